"""The result of calibration: the scales of each linear, and access to the weights they apply to.

Both checkpoint formats are written from this record. Writing does not change the model, so one
calibration serves any number of formats, in any order. ModelOpt's own exports do change the model:
a forward after an export raises, and a TRT-LLM export after a unified one is silently wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from toolkit.checkpoints.quantized import dequantize, open_checkpoint
from toolkit.quantize.algorithms import ALGORITHMS, Algorithm
from toolkit.quantize.check import linear_names
from toolkit.quantize.source import Source

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Calibrated", "LinearScales", "calibrated_from_checkpoint", "calibrated_from_model"]

KV_MAX_CODE = 448.0  # FP8 E4M3


@dataclass(frozen=True, slots=True)
class LinearScales:
    """The scales of one linear. weight: float32 [] or [out]; input: float32 []; pre_quant: [in],
    in the dtype of the inputs that it multiplies.
    """

    weight: Tensor
    input: Tensor | None
    pre_quant: Tensor | None


@dataclass(frozen=True, slots=True)
class Calibrated:
    """How one checkpoint is quantized. If algorithm is None, the weights stay as they are and
    linears is empty.

    weight(name): the weight [out, in] that the scales of that linear apply to, already smoothed if
    the algorithm smooths. The caller must not change it.
    kv_scales: (k, v) of each layer, float32 []; empty if the KV cache is not quantized.
    """

    source: Source
    algorithm: Algorithm | None
    linears: Mapping[str, LinearScales]
    kv_scales: tuple[tuple[Tensor, Tensor], ...]
    weight: Callable[[str], Tensor]

    @property
    def kv_cache_quant_algo(self) -> str | None:
        return "FP8" if self.kv_scales else None


def calibrated_from_model(model: Any, source: Source, algorithm: Algorithm) -> Calibrated:
    """Read the scales off a model that ModelOpt has calibrated. The record refers to the model's
    own weights, so the model must outlive it.
    """
    modules = dict(model.named_modules())
    linears = {
        name: _scales(module, algorithm)
        for name, module in modules.items()
        if getattr(getattr(module, "weight_quantizer", None), "is_enabled", False)
    }
    attentions = [modules[f"model.layers.{i}.self_attn"] for i in range(source.shape.num_layers)]
    kv_scales = tuple(
        (
            _float(attention.k_bmm_quantizer.amax) / KV_MAX_CODE,
            _float(attention.v_bmm_quantizer.amax) / KV_MAX_CODE,
        )
        for attention in attentions
        if getattr(getattr(attention, "k_bmm_quantizer", None), "is_enabled", False)
    )

    def weight(name: str) -> Tensor:
        parameter: Tensor = modules[name]._parameters["weight"]
        return parameter.data

    return Calibrated(source, algorithm, linears, kv_scales, weight)


def calibrated_from_checkpoint(source: Source) -> Calibrated:
    """Read the scales of a checkpoint that is already quantized; an unquantized one has none.

    weight(name) of a quantized linear gives the dequantized values in float32, so that encoding
    them under the same scale gives the same codes again.
    """
    checkpoint = open_checkpoint(source.path)
    if source.quant_algo is None:
        return Calibrated(
            source, None, {}, _kv_scales(source), lambda name: checkpoint.tensor(f"{name}.weight")
        )
    linears = {}
    for name in linear_names(source.shape):
        linear = checkpoint.linear(name)
        if linear.weight_scale is not None:
            input_scale = (
                None
                if linear.input_scale is None
                else linear.weight_scale.new_tensor(linear.input_scale)
            )
            linears[name] = LinearScales(linear.weight_scale, input_scale, linear.pre_quant_scale)
    return Calibrated(
        source,
        ALGORITHMS[source.quant_algo],
        linears,
        _kv_scales(source),
        lambda name: dequantize(checkpoint.linear(name)),
    )


def _kv_scales(source: Source) -> tuple[tuple[Tensor, Tensor], ...]:
    import torch

    if source.kv_cache_quant_algo is None:
        return ()
    checkpoint = open_checkpoint(source.path)
    pairs = (checkpoint.kv_scales(layer) for layer in range(source.shape.num_layers))
    return tuple((torch.tensor(key), torch.tensor(value)) for key, value in pairs)


def _scales(module: Any, algorithm: Algorithm) -> LinearScales:
    quantizer = module.input_quantizer
    is_static = quantizer.is_enabled and not quantizer._dynamic
    has_input_scale = is_static and quantizer.amax is not None
    smoothing = quantizer.pre_quant_scale
    return LinearScales(
        weight=_float(module.weight_quantizer.amax) / algorithm.max_code,
        input=_float(quantizer.amax) / algorithm.max_code if has_input_scale else None,
        pre_quant=None if smoothing is None else smoothing.detach().squeeze().clone(),
    )


def _float(value: Tensor) -> Tensor:
    return value.detach().float().squeeze().clone()
