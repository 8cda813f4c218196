"""The real command line, in a process of its own or in this one, and a YAML that needs next to
nothing.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

__all__ = ["toolkit", "toolkit_here", "write_config"]

PIPED = {"COLUMNS": "110", "NO_COLOR": "1"}


def toolkit(*arguments: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the real command with its output piped."""
    return subprocess.run(
        [sys.executable, "-m", "toolkit", *arguments],
        cwd=cwd,
        env={**os.environ, **PIPED, **environment},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def toolkit_here(
    *arguments: str, cwd: Path, **environment: str
) -> subprocess.CompletedProcess[str]:
    """The same in this process, which has read the libraries already. For commands that start
    nothing and set nothing up; what the command line does not explain is raised here.
    """
    from toolkit.cli import main

    out, err = io.StringIO(), io.StringIO()
    command, code = ["toolkit", *arguments], None
    with (
        _inside(cwd),
        mock.patch.dict(os.environ, {**PIPED, **environment}),
        mock.patch.object(sys, "argv", command),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            main()
        except SystemExit as end:
            code = end.code
    assert isinstance(code, int)
    return subprocess.CompletedProcess(command, code, out.getvalue(), err.getvalue())


@contextlib.contextmanager
def _inside(folder: Path) -> Iterator[None]:
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


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
