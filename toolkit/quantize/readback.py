"""What was exported is what was quantized: noted before the export, compared with the files after it.

The export changes the model and may merge or smooth again on the way, so the comparison needs a note from before. `capture`
works out each linear's codes from its weight, holds them against the fake-quantized weight that quality was measured with, and
keeps scales and a digest of the codes, a few bytes per row. `read_back` then reads the files and demands the same.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit.checkpoints.reader import TensorInfo, expected_shapes, read_index, read_tensor
from toolkit.quantize.algorithms import Algorithm
from toolkit.quantize.check import linear_names, verdict
from toolkit.quantize.modelopt import quantized_linears
from toolkit.quantize.source import Source, read_source
from toolkit.records import Finding

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Captured", "capture", "read_back"]

KV_MAX_CODE = 448.0  # FP8 E4M3


@dataclass(frozen=True, slots=True)
class Captured:
    """One linear as it stood when quality was measured. Scales are float32.

    scales: tensor name after the linear's own -> value that the file must hold. codes_sha256: of the codes' bytes, row by row.
    weights: how many. ties: of them, codes that the export rounds the other way than the fake quantization, since the value
    lies in the middle between two codes up to rounding. wrong: codes that differ without that excuse.
    """

    scales: dict[str, Tensor]
    codes_sha256: str
    weights: int
    ties: int
    wrong: int


def capture(model: Any, algorithm: Algorithm) -> dict[str, Captured]:
    """Note every quantized linear of `model`, one at a time."""
    import torch

    modules = dict(model.named_modules())
    captured = {}
    with torch.no_grad():
        for name, module in quantized_linears(model).items():
            weight = module._parameters["weight"]  # [rows, columns], smoothed where the algorithm smooths
            amax = _float(module.weight_quantizer.amax)
            scale = amax / algorithm.max_code
            values, rounding = _divide(weight, scale)
            codes = _encode(values, algorithm)
            fake = module.weight_quantizer(weight).float()
            exact = codes.float() * scale.reshape(-1, 1)
            off = (fake - exact).abs() > _rounding_of_fake(exact, weight.dtype)
            values = values[off].float()
            above, below = (_encode(values * (1.0 + side * rounding), algorithm) for side in (1, -1))
            ties = int((above.float() != below.float()).sum())
            captured[name] = Captured(
                _scales(name, module, modules, scale, algorithm), _digest(codes), weight.numel(), ties, int(off.sum()) - ties
            )
    return captured


def _divide(weight: Tensor, scale: Tensor) -> tuple[Tensor, float]:
    """weight [rows, columns] / scale as the export divides, and the relative rounding of that against exact arithmetic.

    By a vector of float32 the quotient is float32. By a float32 scalar it stays in the weight's own dtype (torch's
    promotion rule), and the scalar may be rounded to it too: FP8 codes of a BF16 model can land one step off near a middle.
    """
    import torch

    if scale.ndim:
        return weight.float() / scale[:, None], 2.0**-20
    return weight / scale, 2.0 * torch.finfo(weight.dtype).eps


def _rounding_of_fake(exact: Tensor, dtype: Any) -> Tensor:
    """How far the fake-quantized weight may be from code * scale: one rounding to its dtype, after a few of float32."""
    import torch

    info = torch.finfo(dtype)
    return (info.eps / 2 + 2.0**-21) * exact.abs() + info.smallest_normal * info.eps


def _scales(name: str, module: Any, modules: dict[str, Any], scale: Tensor, algorithm: Algorithm) -> dict[str, Tensor]:
    scales = {"weight_scale": scale}
    inputs = module.input_quantizer
    if inputs.is_enabled and inputs.amax is not None:
        scales["input_scale"] = _float(inputs.amax) / algorithm.max_code
    if inputs.pre_quant_scale is not None:
        scales["pre_quant_scale"] = _float(inputs.pre_quant_scale)
    attention, _, projection = name.rpartition(".")
    cache = getattr(modules[attention], f"{projection[0]}_bmm_quantizer", None)
    if projection in ("k_proj", "v_proj") and cache is not None and cache.is_enabled:
        scales[f"{projection[0]}_scale"] = _float(cache.amax) / KV_MAX_CODE
    return scales


def _encode(values: Tensor, algorithm: Algorithm) -> Tensor:
    """The nearest codes (ties to even): int8 or float8_e4m3fn."""
    import torch

    if algorithm.weight_dtype == "I8":
        return values.round().clamp(-127, 127).to(torch.int8)
    return values.clamp(-algorithm.max_code, algorithm.max_code).to(torch.float8_e4m3fn)


def _float(value: Tensor) -> Tensor:
    return value.detach().float().squeeze().clone()


def _digest(codes: Tensor) -> str:
    import torch

    return hashlib.sha256(codes.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


def read_back(directory: Path, source: Source, captured: dict[str, Captured]) -> tuple[Finding, ...]:
    """Compare the exported files with what was captured, and everything that was not quantized with the source, bit for bit."""
    tensors = read_index(directory)
    codes = [f"{name} was not quantized" for name in linear_names(source.shape) if name not in captured]
    for name, note in captured.items():
        if note.wrong:
            codes.append(f"{name}: {note.wrong} of {note.weights} codes are not the weight that quality was measured with")
        if _digest(read_tensor(tensors[f"{name}.weight"])) != note.codes_sha256:
            codes.append(f"{name}.weight does not hold the codes that were quantized")
    scales = [fault for name, note in captured.items() for fault in _compare_scales(tensors, name, note)]
    weights = sum(note.weights for note in captured.values())
    ties = sum(note.ties for note in captured.values())
    return (
        verdict("read back: codes", codes, f"{weights} codes as quantized, {ties} of them rounded the other way at a tie"),
        verdict("read back: scales", scales, f"as calibrated, on {len(captured)} linears"),
        _untouched(tensors, source, set(captured)),
    )


def _compare_scales(tensors: dict[str, TensorInfo], name: str, note: Captured) -> list[str]:
    """Equal up to one rounding of float32."""
    import torch

    faults = []
    for key, value in note.scales.items():
        info = tensors.get(f"{name}.{key}")
        if info is None:
            faults.append(f"{name}.{key} is missing")
        elif not torch.allclose(read_tensor(info).float().reshape(-1), value.reshape(-1), rtol=2**-23, atol=0.0):
            faults.append(f"{name}.{key} is not what calibration decided")
    return faults


def _untouched(tensors: dict[str, TensorInfo], source: Source, linears: set[str]) -> Finding:
    import torch

    weights = {f"{name}.weight" for name in linears}
    names = [name for name in expected_shapes(source.shape) if name not in weights]
    faults = []
    for name in names:
        original = read_source(source, name).to(getattr(torch, source.dtype))
        written = read_tensor(tensors[name])
        if written.dtype != original.dtype or not torch.equal(written, original):
            faults.append(f"{name} differs from the source")
    return verdict("read back: unquantized", faults, f"{len(names)} tensors equal to the source's")
