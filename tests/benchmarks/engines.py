"""What the benchmarks of engines share: checkpoints whose cost is real and whose values do not
matter, and timing in turns.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from toolkit.checkpoints.reader import expected_shapes, read_tensors
from toolkit.checkpoints.shape import read_shape
from toolkit.engines.embedded.model import FP8_MAX
from toolkit.engines.stage import compile_engine
from toolkit.interfaces import EngineSpec, StepEngine
from toolkit.records.build import CompiledEngine, QuantizedCheckpoint

__all__ = [
    "compile_checkpoint",
    "facts",
    "in_turns",
    "step",
    "write_fp8",
    "write_int8",
    "write_random",
]

SPEC = EngineSpec("target", max_batch_size=8, max_input_len=512, max_seq_len=1024, max_draft_len=8)


def write_random(config: dict[str, Any], out_dir: Path) -> Path:
    """A bfloat16 checkpoint of that config.json with random weights."""
    out_dir.mkdir(parents=True)
    (out_dir / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(0)
    shapes = expected_shapes(read_shape(out_dir))
    tensors = {
        name: (0.02 * torch.randn(shape, generator=generator)).bfloat16()
        for name, shape in shapes.items()
    }
    save_file(
        {name: torch.ones_like(t) if "norm" in name else t for name, t in tensors.items()},
        out_dir / "model.safetensors",
    )
    return out_dir


def write_int8(source: Path, out_dir: Path, quant_algo: str) -> Path:
    """The checkpoint in INT8 by rounding alone, in ModelOpt's names. Uncalibrated scales: other
    values, the same cost.
    """

    def quantized(linear: str, weight: Tensor) -> dict[str, Tensor]:
        scale = weight.abs().amax(1) / 127
        tensors = {
            f"{linear}.weight": (weight / scale[:, None]).round().to(torch.int8),
            f"{linear}.weight_scale": scale,
        }
        if quant_algo == "W8A8_SQ_PER_CHANNEL":
            tensors[f"{linear}.input_scale"] = torch.tensor(0.03)
            tensors[f"{linear}.pre_quant_scale"] = torch.ones(weight.shape[1], dtype=torch.bfloat16)
        return tensors

    return _write_quantized(source, out_dir, quant_algo, quantized)


def write_fp8(source: Path, out_dir: Path) -> Path:
    """The same in FP8."""

    def quantized(linear: str, weight: Tensor) -> dict[str, Tensor]:
        scale = weight.abs().max() / FP8_MAX
        return {
            f"{linear}.weight": (weight / scale).to(torch.float8_e4m3fn),
            f"{linear}.weight_scale": scale,
            f"{linear}.input_scale": torch.tensor(0.03),
        }

    return _write_quantized(source, out_dir, "FP8", quantized)


def _write_quantized(
    source: Path,
    out_dir: Path,
    quant_algo: str,
    quantized: Callable[[str, Tensor], dict[str, Tensor]],
) -> Path:
    """quantized: (name, float32 weight) of a linear -> its tensors."""
    shutil.copytree(source, out_dir, ignore=shutil.ignore_patterns("*.safetensors*"))
    tensors = {}
    for name, tensor in read_tensors(source):
        if name.endswith("_proj.weight"):
            tensors |= quantized(name.removesuffix(".weight"), tensor.float())
        else:
            tensors[name] = tensor
    save_file(tensors, out_dir / "model.safetensors")
    section = {
        "quant_algo": quant_algo,
        "kv_cache_quant_algo": None,
        "exclude_modules": ["lm_head"],
    }
    (out_dir / "hf_quant_config.json").write_text(json.dumps({"quantization": section}))
    return out_dir


def compile_checkpoint(checkpoint: Path, out_dir: Path, **changes: Any) -> CompiledEngine:
    record = QuantizedCheckpoint("target", checkpoint, None, None, "", 0, 0, None, ())
    return compile_engine(
        "torch", record, replace(SPEC, **changes), out_dir, lambda done, total, what: None
    )


def step(engine: StepEngine, tokens: int, context: int) -> Callable[[], None]:
    """One forward of that many tokens behind `context` tokens in slot 0, and back again."""
    while engine.length(0) < context:
        engine.forward(
            [0],
            torch.zeros(
                (1, min(engine.max_step_tokens, context - engine.length(0))), dtype=torch.int64
            ),
        )
    ids = torch.arange(tokens)[None] + 1

    def run() -> None:
        engine.forward([0], ids)
        engine.rewind([0], [context])

    return run


def in_turns(calls: Sequence[Callable[[], object]], rounds: int) -> list[tuple[float, float]]:
    """(median, fastest) milliseconds of each call. All take a turn in every round, so that a
    busy moment hits all alike.
    """
    times: list[list[float]] = [[] for _ in calls]
    for turn in range(rounds + 2):
        for call, found in zip(calls, times, strict=True):
            began = time.perf_counter_ns()
            call()
            if turn >= 2:  # the first two warm caches and allocators up
                found.append((time.perf_counter_ns() - began) / 1e6)
    return [(median(found), min(found)) for found in times]


def facts() -> dict[str, Any]:
    """What a number is worth nothing without."""
    model = next(
        (
            line.split(":")[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        "",
    )
    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": model or platform.machine(),
        "threads": torch.get_num_threads(),
        "load": round(os.getloadavg()[0], 1),
    }
