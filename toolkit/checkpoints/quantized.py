"""Unified Hugging Face checkpoints, quantized or not: what each linear holds, and what its codes
stand for.

ModelOpt's export keeps the tensor names of the source model and puts the scales beside each weight:

    <linear>.weight            float8_e4m3fn [out, in] (FP8) | int8 [out, in] (W8A8_SQ_PER_CHANNEL,
    W8A16) <linear>.weight_scale      float32 [] (FP8) | float32 [out] (INT8); real weight = code *
    scale <linear>.input_scale       float32 []; code = round(input / scale) (FP8, W8A8)
    <linear>.pre_quant_scale   [in]; the input is multiplied by it first (SmoothQuant)
    self_attn.k_proj.k_scale, self_attn.v_proj.v_scale   float32 []; FP8 KV cache, code = e4m3(value
    / scale)

What a tensor is, its own dtype says: linears that were left alone (lm_head) simply have no scale.
transformers would load the codes as if they were weights, so nothing here goes through
`from_pretrained`. Measured on nvidia-modelopt 0.47.0.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit.checkpoints.reader import TensorInfo, check_against_shape, read_index, read_tensor
from toolkit.checkpoints.shape import ModelShape, read_json, read_shape
from toolkit.errors import CheckpointError
from toolkit.words import KvCacheQuantAlgo, QuantAlgo

if TYPE_CHECKING:
    import torch
    from torch import Tensor

__all__ = [
    "Checkpoint",
    "LinearTensors",
    "Quantization",
    "dequantize",
    "open_checkpoint",
    "other_than_asked",
    "read_quantization",
]

QUANT_ALGOS: tuple[QuantAlgo, ...] = ("FP8", "W8A8_SQ_PER_CHANNEL", "W8A16")
KV_ALGOS: tuple[KvCacheQuantAlgo, ...] = ("FP8",)
PLAIN_DTYPES = ("F64", "F32", "F16", "BF16")
CODE_DTYPES = {"FP8": "F8_E4M3", "W8A8_SQ_PER_CHANNEL": "I8", "W8A16": "I8"}


@dataclass(frozen=True, slots=True)
class Quantization:
    """What the checkpoint says of itself; None where that part is not quantized."""

    quant_algo: QuantAlgo | None
    kv_cache_quant_algo: KvCacheQuantAlgo | None
    exclude_modules: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class LinearTensors:
    """One linear as it stands in the file. weight [out, in]; the scales are None where the
    algorithm has none.
    """

    weight: Tensor
    weight_scale: Tensor | None  # float32 [] or [out]
    input_scale: float | None
    pre_quant_scale: Tensor | None  # [in]
    bias: Tensor | None  # [out]


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """An opened checkpoint: headers are read and checked, tensors are read when asked for."""

    path: Path
    shape: ModelShape
    quantization: Quantization
    tensors: dict[str, TensorInfo]

    def tensor(self, name: str) -> Tensor:
        info = self.tensors.get(name)
        if info is None:
            raise CheckpointError(f"{name} is missing from the weights", where=self.path)
        return read_tensor(info)

    def linear(self, name: str) -> LinearTensors:
        """Everything that belongs to one linear, e.g. "model.layers.0.mlp.up_proj".

        Raises CheckpointError for codes without the scales that give them their meaning.
        """
        algo = self.quantization.quant_algo
        weight = self.tensor(f"{name}.weight")
        scale, pre = (
            self._optional(f"{name}.weight_scale"),
            self._optional(f"{name}.pre_quant_scale"),
        )
        input_scale, bias = self._optional(f"{name}.input_scale"), self._optional(f"{name}.bias")
        if self.tensors[f"{name}.weight"].dtype in PLAIN_DTYPES:
            return LinearTensors(weight, None, None, None, bias)
        if algo is None or CODE_DTYPES[algo] != self.tensors[f"{name}.weight"].dtype:
            raise CheckpointError(
                f"{name}.weight is {weight.dtype}, which quant_algo {algo} does not write",
                where=self.path,
            )
        if scale is None or scale.numel() not in (1, weight.shape[0]):
            found = "missing" if scale is None else f"of shape {list(scale.shape)}"
            raise CheckpointError(
                f"{name}.weight_scale is {found}, so its codes have no meaning", where=self.path
            )
        if input_scale is None and algo != "W8A16":
            raise CheckpointError(
                f"{name}.input_scale is missing: {algo} was exported without calibrated"
                " activations",
                where=self.path,
                hint="quantize again with calibration text",
            )
        static = None if input_scale is None or algo == "W8A16" else float(input_scale)
        return LinearTensors(weight, scale.float(), static, pre, bias)

    def kv_scales(self, layer: int) -> tuple[float, float]:
        """(k_scale, v_scale) of an FP8 KV cache; 1.0 each where the checkpoint has none."""
        prefix = f"model.layers.{layer}.self_attn"
        key, value = (
            self._optional(f"{prefix}.k_proj.k_scale"),
            self._optional(f"{prefix}.v_proj.v_scale"),
        )
        return (1.0 if key is None else float(key), 1.0 if value is None else float(value))

    def _optional(self, name: str) -> Tensor | None:
        return read_tensor(self.tensors[name]) if name in self.tensors else None


def open_checkpoint(directory: Path) -> Checkpoint:
    """Read config and headers, and check them against one another. Raises CheckpointError."""
    shape = read_shape(directory)
    tensors = read_index(directory)
    check_against_shape(tensors, shape, directory)
    return Checkpoint(directory, shape, read_quantization(directory), tensors)


def read_quantization(directory: Path) -> Quantization:
    """From hf_quant_config.json, else from `quantization_config` in config.json; neither means not
    quantized.

    Raises CheckpointError for an algorithm that we do not read, and where the two contradict each
    other.
    """
    own = directory / "hf_quant_config.json"
    inside = read_json(directory / "config.json").get("quantization_config")
    found = []
    if own.exists():
        section = read_json(own).get("quantization")
        if not isinstance(section, dict):
            raise CheckpointError("has no `quantization` section", where=own)
        algo = section.get("quant_algo")
        found.append(
            _checked(algo, section.get("kv_cache_quant_algo"), section.get("exclude_modules"), own)
        )
    if isinstance(inside, dict):
        scheme = inside.get("kv_cache_scheme")
        kv = "FP8" if _is_float8(scheme) else None if scheme is None else str(scheme)
        found.append(
            _checked(
                inside.get("quant_algo"),
                kv,
                inside.get("ignore"),
                directory / "config.json",
                inside,
            )
        )
    if len(found) == 2 and found[0].quant_algo != found[1].quant_algo:
        raise CheckpointError(
            f"hf_quant_config.json says {found[0].quant_algo}, config.json says"
            f" {found[1].quant_algo}",
            where=directory,
        )
    return found[0] if found else Quantization(None, None, ())


def other_than_asked(
    found: Quantization, quant_algo: QuantAlgo, kv_cache_quant_algo: KvCacheQuantAlgo | None
) -> tuple[str, str] | None:
    """(what is wrong, how to fix it) where a checkpoint is quantized already, and otherwise
    than the YAML asks.
    """
    stated = (found.quant_algo or "NO_QUANT", found.kv_cache_quant_algo)
    if stated in (("NO_QUANT", None), (quant_algo, kv_cache_quant_algo)):
        return None
    kv = f", kv_cache_quant_algo: {stated[1]}" if stated[1] else ""
    return (
        (
            f"is already quantized with {_spell(*stated)}, the YAML asks for"
            f" {_spell(quant_algo, kv_cache_quant_algo)}"
        ),
        f"set quantization: {{quant_algo: {stated[0]}{kv}}}, or name the unquantized checkpoint",
    )


def _spell(quant_algo: QuantAlgo, kv_cache_quant_algo: KvCacheQuantAlgo | None) -> str:
    return (
        quant_algo
        if kv_cache_quant_algo is None
        else f"{quant_algo} and a {kv_cache_quant_algo} KV cache"
    )


def dequantize(linear: LinearTensors, dtype: torch.dtype | None = None) -> Tensor:
    """The weight [out, in] that the codes stand for: code * scale, in float32 unless another dtype
    is named.

    With a pre_quant_scale this is the smoothed weight, which meets inputs already multiplied by
    that scale. In float64 the result is exact: a code has at most 8 significant bits and a scale
    24.
    """
    import torch

    wide = torch.float32 if dtype is None else dtype
    weight = linear.weight.to(wide)
    if linear.weight_scale is None:
        return weight
    scale = linear.weight_scale.to(wide)
    return weight * (
        scale[:, None] if scale.dim() == 1 and scale.numel() > 1 else scale.reshape(())
    )


def _checked(
    algo: Any, kv: Any, exclude: Any, where: Path, raw: dict[str, Any] | None = None
) -> Quantization:
    if raw is not None and algo is None and raw.get("quant_method") not in (None, "modelopt"):
        raise CheckpointError(
            f"quant_method {raw.get('quant_method')!r} is not ModelOpt's",
            where=where,
            hint="name the unquantized checkpoint; the quantize stage does the rest",
        )
    if algo in ("NO_QUANT", ""):
        algo = None
    if algo is not None and algo not in QUANT_ALGOS:
        raise CheckpointError(
            f"quant_algo {algo!r} is not read here",
            where=where,
            hint=f"read: {', '.join(QUANT_ALGOS)}",
        )
    if kv is not None and kv not in KV_ALGOS:
        raise CheckpointError(
            f"kv_cache_quant_algo {kv!r} is not read here",
            where=where,
            hint=f"read: {', '.join(KV_ALGOS)}",
        )
    return Quantization(algo, kv, tuple(str(name) for name in exclude or ()))


def _is_float8(scheme: Any) -> bool:
    return (
        isinstance(scheme, dict) and scheme.get("num_bits") == 8 and scheme.get("type") == "float"
    )
