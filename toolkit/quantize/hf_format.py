"""Write weights in the unified Hugging Face format: the source's own tensor names, with codes in
place of weights and scales beside them.

TensorRT-LLM's PyTorch flow, vLLM and the embedded engine read this format. The tensors equal those
of ModelOpt's own `export_hf_checkpoint`, but that function holds a second copy of the whole model
while it writes; this one holds one tensor.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from toolkit.checkpoints.reader import expected_shapes
from toolkit.checkpoints.writer import TORCH_DTYPES, TensorPlan, write_checkpoint_shards
from toolkit.quantize.algorithms import Algorithm
from toolkit.quantize.calibrated import Calibrated, LinearScales
from toolkit.quantize.codes import encode_weight
from toolkit.quantize.source import FLOAT_DTYPES, Source, read_source

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["fixed_plan", "write_hf_weights"]

SAFETENSORS_DTYPES = {name: spelled for spelled, name in TORCH_DTYPES.items()}
SOURCE_DTYPES = {name: spelled for spelled, name in FLOAT_DTYPES.items()}


def write_hf_weights(calibrated: Calibrated, out_dir: Path) -> None:
    """Write the tensors of the unified format. `toolkit.quantize.checkpoint` writes the configs."""
    write_checkpoint_shards(out_dir, list(_plans(calibrated)))


def _plans(calibrated: Calibrated) -> Iterator[TensorPlan]:
    source, algorithm = calibrated.source, calibrated.algorithm
    for name, extent in expected_shapes(source.shape).items():
        linear = name.removesuffix(".weight")
        if algorithm is None or linear not in calibrated.linears:
            yield TensorPlan(
                name, SOURCE_DTYPES[source.dtype], extent, partial(_plain, source, name)
            )
            continue
        scales = calibrated.linears[linear]
        yield TensorPlan(
            name,
            algorithm.weight_dtype,
            extent,
            partial(_codes, calibrated, algorithm, linear, scales),
        )
        yield fixed_plan(f"{linear}.weight_scale", scales.weight)
        if scales.input is not None:
            yield fixed_plan(f"{linear}.input_scale", scales.input)
        if scales.pre_quant is not None:
            yield fixed_plan(f"{linear}.pre_quant_scale", scales.pre_quant)
    for layer, (key, value) in enumerate(calibrated.kv_scales):
        yield fixed_plan(f"model.layers.{layer}.self_attn.k_proj.k_scale", key)
        yield fixed_plan(f"model.layers.{layer}.self_attn.v_proj.v_scale", value)


def fixed_plan(name: str, tensor: Tensor) -> TensorPlan:
    """The plan of a small tensor that is in memory already."""
    return TensorPlan(
        name,
        SAFETENSORS_DTYPES[str(tensor.dtype).removeprefix("torch.")],
        tuple(tensor.shape),
        lambda: tensor,
    )


def _plain(source: Source, name: str) -> Tensor:
    import torch

    return read_source(source, name).to(getattr(torch, source.dtype))


def _codes(
    calibrated: Calibrated, algorithm: Algorithm, linear: str, scales: LinearScales
) -> Tensor:
    return encode_weight(calibrated.weight(linear), scales.weight, algorithm)
