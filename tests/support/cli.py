"""The real command line in a process of its own, and a YAML that needs next to nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

__all__ = ["toolkit", "write_config"]


def toolkit(*arguments: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the real command with its output piped."""
    return subprocess.run(
        [sys.executable, "-m", "toolkit", *arguments],
        cwd=cwd,
        env={**os.environ, "COLUMNS": "110", "NO_COLOR": "1", **environment},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def write_config(folder: Path, pair: tuple[Path, Path], **sections: Any) -> Path:
    """A YAML that needs nothing quantized and measures next to nothing."""
    (folder / "prompts.jsonl").write_text(
        "".join(json.dumps({"prompt": f"def f{i}(x):"}) + "\n" for i in range(4))
    )
    config: dict[str, Any] = {
        "name": "tiny",
        "target": {"checkpoint": str(pair[0])},
        "draft": {"checkpoint": str(pair[1])},
        "speculation": {"max_draft_len": 2},
        "engine": {
            "mode": "eager",
            "dtype": "float64",
            "max_batch_size": 2,
            "max_input_len": 64,
            "max_seq_len": 128,
            "threads": 1,
        },
        "validation": {
            "prompts": "prompts.jsonl",
            "max_tokens": 6,
            "rounds": 1,
            "max_rounds": 1,
            "parity": {"max_divergence_rate": 0.95, "source": "never"},
            "distribution": {"enabled": False},
            "latency": {"min_speedup": None},
        },
        **sections,
    }
    path = folder / "tiny.yaml"
    path.write_text(json.dumps(config, indent=1))
    return path
