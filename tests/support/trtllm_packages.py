"""Engines of TensorRT-LLM that nobody compiled, and the llmapi repository of a pair of them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.support.checkpoints import write_byte_tokenizer
from toolkit.config.schema import TritonConfig
from toolkit.records.build import CompiledEngine, TensorRtLlmBuild, TritonRepository
from toolkit.triton.package.layout_trtllm import ENGINES
from toolkit.triton.package.trtllm import package_llmapi

ARGS = {
    "model": f"{ENGINES}/target",
    "max_batch_size": 4,
    "speculative_config": {
        "decoding_type": "DraftTarget",
        "max_draft_len": 3,
        "speculative_model": f"{ENGINES}/draft",
    },
}


def engine(folder: Path, role: str, kind: str, tp_size: int = 1) -> CompiledEngine:
    path = folder / role
    write_byte_tokenizer(path)
    (path / "config.json").write_text("{}")
    built = TensorRtLlmBuild("1.2.1", "none", (), tp_size, 1, None, (), (), ())
    return CompiledEngine(
        role,
        path,
        kind,
        "engine",
        "bfloat16",
        "cuda",
        "FP8",
        None,
        "native",
        4,
        100,
        200,
        3,
        258,
        1,
        (),
        tensorrt_llm=built,
    )


def llmapi(folder: Path, args: Mapping[str, Any] | None = None, **triton: Any) -> TritonRepository:
    """args: arguments of LLM() beside ARGS."""
    pair = [engine(folder / "engines", role, "trtllm_pytorch") for role in ("target", "draft")]
    return package_llmapi(
        pair[0],
        pair[1],
        {**ARGS, **(args or {})},
        TritonConfig(**triton),
        folder / "out",
        name="pair",
        max_draft_len=3,
    )
