"""Read a checkpoint in TRT-LLM format, as `trtllm-build` does: config.json and one safetensors file
per rank.

Only what a build has to know beforehand is read; the tensors stay in the files.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolkit.checkpoints.shape import read_json
from toolkit.errors import CheckpointError
from toolkit.records.build import QuantizedCheckpoint
from toolkit.words import KvCacheQuantAlgo, QuantAlgo

__all__ = ["TrtLlmCheckpoint", "is_trtllm_format", "open_trtllm_format"]

HINT = "Write it again with `toolkit build --fresh quantize`."


@dataclass(frozen=True, slots=True)
class TrtLlmCheckpoint:
    """A checkpoint in TRT-LLM format. rank_bytes[r]: size of rank r's weights on disk."""

    path: Path
    architecture: str
    dtype: str
    quant_algo: QuantAlgo | None
    kv_cache_quant_algo: KvCacheQuantAlgo | None
    vocab_size: int
    tp_size: int
    pp_size: int
    rank_bytes: tuple[int, ...]


def is_trtllm_format(config: dict[str, Any]) -> bool:
    """Whether it is the config of a checkpoint in TRT-LLM format.

    Such a config has architecture and dtype at the top level. An engine's config has a
    build_config, too, and contains the checkpoint's.
    """
    return "architecture" in config and "dtype" in config and "build_config" not in config


def open_trtllm_format(
    checkpoint: QuantizedCheckpoint, tp_size: int, pp_size: int
) -> TrtLlmCheckpoint:
    """Open the TRT-LLM format of a quantized checkpoint.

    Raises CheckpointError if there is none, or if it was made for other ranks.
    """
    if checkpoint.trtllm is None:
        raise CheckpointError(
            "was not written in TRT-LLM format, which the engine flow needs",
            where=checkpoint.path,
            hint=HINT,
        )
    path = checkpoint.trtllm.path
    config = read_json(path / "config.json")
    if not is_trtllm_format(config):
        raise CheckpointError(
            "is not the config of a checkpoint in TRT-LLM format",
            where=path / "config.json",
            hint=HINT,
        )
    return _checked(path, config, tp_size, pp_size)


def _checked(path: Path, config: dict[str, Any], tp_size: int, pp_size: int) -> TrtLlmCheckpoint:
    mapping = config.get("mapping") or {}
    made_for = (int(mapping.get("tp_size", 1)), int(mapping.get("pp_size", 1)))
    if made_for != (tp_size, pp_size):
        raise CheckpointError(
            f"was made for tp_size {made_for[0]} and pp_size {made_for[1]}, but the engine needs"
            f" {tp_size} and {pp_size}",
            where=path / "config.json",
            hint=HINT,
        )
    ranks = [path / f"rank{rank}.safetensors" for rank in range(tp_size * pp_size)]
    missing = [rank.name for rank in ranks if not rank.is_file()]
    if missing:
        raise CheckpointError(f"lacks {', '.join(missing)}", where=path, hint=HINT)
    quantization = config.get("quantization") or {}
    return TrtLlmCheckpoint(
        path=path,
        architecture=str(config["architecture"]),
        dtype=str(config["dtype"]),
        quant_algo=quantization.get("quant_algo"),
        kv_cache_quant_algo=quantization.get("kv_cache_quant_algo"),
        vocab_size=int(config["vocab_size"]),
        tp_size=tp_size,
        pp_size=pp_size,
        rank_bytes=tuple(rank.stat().st_size for rank in ranks),
    )
