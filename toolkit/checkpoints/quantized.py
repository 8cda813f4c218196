"""Read checkpoints in the unified Hugging Face format, quantized or not: the tensors of each
linear, and the weights that its codes stand for.

ModelOpt's export keeps the tensor names of the source model and puts the scales beside each weight:

    <linear>.weight            float8_e4m3fn [out, in] (FP8)
                               int8 [out, in] (W8A8_SQ_PER_CHANNEL, W8A16)
    <linear>.weight_scale      float32 [] (FP8) | float32 [out] (INT8); weight = code * scale
    <linear>.input_scale       float32 []; code = round(input / scale) (FP8, W8A8)
    <linear>.pre_quant_scale   [in]; the input is multiplied by it first (SmoothQuant)
    self_attn.k_proj.k_scale   float32 []; FP8 KV cache, code = e4m3(value / scale)
    self_attn.v_proj.v_scale   likewise

The dtype of a weight says whether it holds codes; linears that are not quantized (lm_head) have no
scale. transformers would load the codes as if they were weights, so nothing here uses
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
    "quantization_conflict",
    "read_quantization",
]

QUANT_ALGOS: tuple[QuantAlgo, ...] = ("FP8", "W8A8_SQ_PER_CHANNEL", "W8A16")
KV_ALGOS: tuple[KvCacheQuantAlgo, ...] = ("FP8",)
PLAIN_DTYPES = ("F64", "F32", "F16", "BF16")
CODE_DTYPES = {"FP8": "F8_E4M3", "W8A8_SQ_PER_CHANNEL": "I8", "W8A16": "I8"}


@dataclass(frozen=True, slots=True)
class Quantization:
    """How the checkpoint's own configs say it is quantized; None for a part that is not."""

    quant_algo: QuantAlgo | None
    kv_cache_quant_algo: KvCacheQuantAlgo | None
    exclude_modules: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class LinearTensors:
    """The tensors of one linear as stored. weight [out, in]; a scale that the algorithm does not
    have is None.
    """

    weight: Tensor
    weight_scale: Tensor | None  # float32 [] or [out]
    input_scale: float | None
    pre_quant_scale: Tensor | None  # [in]
    bias: Tensor | None  # [out]


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """An opened checkpoint: its headers are read and checked; tensors are read on demand."""

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
        """All tensors of one linear, e.g. "model.layers.0.mlp.up_proj".

        Raises CheckpointError for codes without the scales that they need.
        """
        algo = self.quantization.quant_algo
        weight = self.tensor(f"{name}.weight")
        scale = self._optional(f"{name}.weight_scale")
        pre_quant_scale = self._optional(f"{name}.pre_quant_scale")
        input_scale = self._optional(f"{name}.input_scale")
        bias = self._optional(f"{name}.bias")
        if self.tensors[f"{name}.weight"].dtype in PLAIN_DTYPES:
            return LinearTensors(weight, None, None, None, bias)
        if algo is None or CODE_DTYPES[algo] != self.tensors[f"{name}.weight"].dtype:
            raise CheckpointError(
                f"{name}.weight is {weight.dtype}, but quant_algo {algo} does not write this dtype",
                where=self.path,
            )
        if scale is None or scale.numel() not in (1, weight.shape[0]):
            fault = "is missing" if scale is None else f"has shape {list(scale.shape)}"
            raise CheckpointError(
                f"{name}.weight_scale {fault}, so the codes of {name}.weight cannot be decoded",
                where=self.path,
            )
        if input_scale is None and algo != "W8A16":
            raise CheckpointError(
                f"{name}.input_scale is missing: the {algo} export was made without calibrated"
                " activations",
                where=self.path,
                hint="quantize again with calibration text",
            )
        static_scale = None if input_scale is None or algo == "W8A16" else float(input_scale)
        return LinearTensors(weight, scale.float(), static_scale, pre_quant_scale, bias)

    def kv_scales(self, layer: int) -> tuple[float, float]:
        """(k_scale, v_scale) of an FP8 KV cache. A scale that the checkpoint lacks is 1.0."""
        prefix = f"model.layers.{layer}.self_attn"
        key_scale = self._optional(f"{prefix}.k_proj.k_scale")
        value_scale = self._optional(f"{prefix}.v_proj.v_scale")
        key = 1.0 if key_scale is None else float(key_scale)
        value = 1.0 if value_scale is None else float(value_scale)
        return key, value

    def _optional(self, name: str) -> Tensor | None:
        return read_tensor(self.tensors[name]) if name in self.tensors else None


def open_checkpoint(directory: Path) -> Checkpoint:
    """Read config and headers. Raises CheckpointError if they are damaged or disagree."""
    shape = read_shape(directory)
    tensors = read_index(directory)
    check_against_shape(tensors, shape, directory)
    return Checkpoint(directory, shape, read_quantization(directory), tensors)


def read_quantization(directory: Path) -> Quantization:
    """Read hf_quant_config.json and `quantization_config` in config.json. If both exist, the first
    is returned; if neither exists, the checkpoint is not quantized.

    Raises CheckpointError for an algorithm that we do not read, and if the two name different
    algorithms.
    """
    file = directory / "hf_quant_config.json"
    embedded = read_json(directory / "config.json").get("quantization_config")
    statements = []
    if file.exists():
        section = read_json(file).get("quantization")
        if not isinstance(section, dict):
            raise CheckpointError("has no `quantization` section", where=file)
        algo = section.get("quant_algo")
        statements.append(
            _checked(algo, section.get("kv_cache_quant_algo"), section.get("exclude_modules"), file)
        )
    if isinstance(embedded, dict):
        statements.append(
            _checked(
                embedded.get("quant_algo"),
                _kv_algo(embedded.get("kv_cache_scheme")),
                embedded.get("ignore"),
                directory / "config.json",
                embedded,
            )
        )
    if len(statements) == 2 and statements[0].quant_algo != statements[1].quant_algo:
        raise CheckpointError(
            f"hf_quant_config.json says {statements[0].quant_algo}, but config.json says"
            f" {statements[1].quant_algo}",
            where=directory,
        )
    return statements[0] if statements else Quantization(None, None, ())


def quantization_conflict(
    stated: Quantization, quant_algo: QuantAlgo, kv_cache_quant_algo: KvCacheQuantAlgo | None
) -> tuple[str, str] | None:
    """Compare a checkpoint with what the YAML asks for. Return (message, hint) if the checkpoint is
    already quantized, but differently; otherwise None.
    """
    stated_algo, stated_kv_algo = stated.quant_algo or "NO_QUANT", stated.kv_cache_quant_algo
    is_unquantized = (stated_algo, stated_kv_algo) == ("NO_QUANT", None)
    if is_unquantized or (stated_algo, stated_kv_algo) == (quant_algo, kv_cache_quant_algo):
        return None
    kv_key = f", kv_cache_quant_algo: {stated_kv_algo}" if stated_kv_algo else ""
    message = (
        f"is already quantized with {_described(stated_algo, stated_kv_algo)},"
        f" but the YAML asks for {_described(quant_algo, kv_cache_quant_algo)}"
    )
    hint = (
        f"set quantization: {{quant_algo: {stated_algo}{kv_key}}}, or name the unquantized"
        " checkpoint"
    )
    return message, hint


def _described(quant_algo: QuantAlgo, kv_cache_quant_algo: KvCacheQuantAlgo | None) -> str:
    if kv_cache_quant_algo is None:
        return quant_algo
    return f"{quant_algo} and a {kv_cache_quant_algo} KV cache"


def dequantize(linear: LinearTensors, dtype: torch.dtype | None = None) -> Tensor:
    """The weight [out, in] that the codes stand for: code * scale. `dtype` None is float32.

    With a pre_quant_scale this is the smoothed weight: its inputs must be multiplied by that scale
    first. In float64 the result is exact: a code has at most 8 significant bits and a scale 24.
    """
    import torch

    wide = torch.float32 if dtype is None else dtype
    weight = linear.weight.to(wide)
    if linear.weight_scale is None:
        return weight
    scale = linear.weight_scale.to(wide)
    is_per_row = scale.dim() == 1 and scale.numel() > 1
    return weight * (scale[:, None] if is_per_row else scale.reshape(()))


def _checked(
    algo: Any, kv: Any, exclude: Any, where: Path, raw: dict[str, Any] | None = None
) -> Quantization:
    if raw is not None and algo is None and raw.get("quant_method") not in (None, "modelopt"):
        raise CheckpointError(
            f"quant_method {raw.get('quant_method')!r} is not ModelOpt's",
            where=where,
            hint="name the unquantized checkpoint; the quantize stage quantizes it",
        )
    if algo in ("NO_QUANT", ""):
        algo = None
    if algo is not None and algo not in QUANT_ALGOS:
        raise CheckpointError(
            f"quant_algo {algo!r} is not supported",
            where=where,
            hint=f"supported: {', '.join(QUANT_ALGOS)}",
        )
    if kv is not None and kv not in KV_ALGOS:
        raise CheckpointError(
            f"kv_cache_quant_algo {kv!r} is not supported",
            where=where,
            hint=f"supported: {', '.join(KV_ALGOS)}",
        )
    return Quantization(algo, kv, tuple(str(name) for name in exclude or ()))


def _kv_algo(scheme: Any) -> str | None:
    """The kv_cache_quant_algo of a `kv_cache_scheme`."""
    if scheme is None:
        return None
    is_dict = isinstance(scheme, dict)
    if is_dict and scheme.get("num_bits") == 8 and scheme.get("type") == "float":
        return "FP8"
    return str(scheme)
