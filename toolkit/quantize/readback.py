"""Prove that the files hold the model whose quality was measured.

Before the export, `capture` computes the codes of each linear, compares them with the
fake-quantized weight that quality was measured with, and keeps a digest of the codes, a few bytes
per linear. After the export, `read_back` reads the files and demands the same codes and scales.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit.checkpoints.reader import TensorInfo, expected_shapes, read_index, read_tensor
from toolkit.quantize.algorithms import Algorithm
from toolkit.quantize.calibrated import Calibrated
from toolkit.quantize.check import linear_names, verdict
from toolkit.quantize.codes import encode_values, encode_weight, row_slices
from toolkit.quantize.source import Source, read_source
from toolkit.records.measured import Finding

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Captured", "capture", "digest_of_codes", "read_back"]


@dataclass(frozen=True, slots=True)
class Captured:
    """One linear at the time when quality was measured.

    codes_sha256: of the codes' bytes, row by row.
    weights: the number of weights.
    ties: how many codes are rounded the other way than the fake quantization rounds, because the
    value lies halfway between two codes, up to rounding.
    wrong: how many codes differ from the fake quantization for no such reason.
    """

    codes_sha256: str
    weights: int
    ties: int
    wrong: int


def capture(model: Any, calibrated: Calibrated) -> dict[str, Captured]:
    """Capture every quantized linear of `model`, a few rows at a time."""
    import torch

    assert calibrated.algorithm is not None
    modules = dict(model.named_modules())
    captured = {}
    with torch.no_grad():
        for name, scales in calibrated.linears.items():
            weight = calibrated.weight(name)
            fake = modules[name].weight_quantizer(weight)
            captured[name] = _compare_with_fake(weight, fake, scales.weight, calibrated.algorithm)
    return captured


def _compare_with_fake(
    weight: Tensor, fake: Tensor, scale: Tensor, algorithm: Algorithm
) -> Captured:
    digest, ties, wrong = hashlib.sha256(), 0, 0
    for rows in row_slices(weight):
        row_scale = scale[rows] if scale.ndim else scale
        codes = encode_weight(weight[rows], row_scale, algorithm)
        digest.update(_bytes(codes))
        exact = codes.float() * row_scale.reshape(-1, 1)
        differs = (fake[rows].float() - exact).abs() > _rounding_of_fake(exact, weight.dtype)
        values, rounding = _divide(weight[rows], row_scale)
        values = values[differs].float()
        above, below = (
            encode_values(values * (1.0 + side * rounding), algorithm) for side in (1, -1)
        )
        tied = int((above.float() != below.float()).sum())
        ties += tied
        wrong += int(differs.sum()) - tied
    return Captured(digest.hexdigest(), weight.numel(), ties, wrong)


def _divide(weight: Tensor, scale: Tensor) -> tuple[Tensor, float]:
    """Divide weight [rows, columns] by scale just as `encode_weight` does. Return the quotient and
    its relative rounding error.

    Divided by a float32 vector, the quotient is float32. Divided by a float32 scalar, it stays in
    the weight's own dtype (torch's promotion rule), and the scalar may be rounded to that dtype,
    too: so FP8 codes of a BF16 model can be one step off if the value is close to halfway.
    """
    import torch

    if scale.ndim:
        return weight.float() / scale[:, None], 2.0**-20
    return weight / scale, 2.0 * torch.finfo(weight.dtype).eps


def _rounding_of_fake(exact: Tensor, dtype: Any) -> Tensor:
    """How far the fake-quantized weight may be from code * scale: one rounding to its dtype, after
    a few roundings to float32.
    """
    import torch

    info = torch.finfo(dtype)
    return (info.eps / 2 + 2.0**-21) * exact.abs() + info.smallest_normal * info.eps


def _bytes(codes: Tensor) -> memoryview:
    import torch

    return codes.contiguous().view(torch.uint8).numpy().data


def digest_of_codes(codes: Tensor) -> str:
    """sha256 of the codes' bytes, row by row."""
    return hashlib.sha256(_bytes(codes)).hexdigest()


def read_back(
    directory: Path, calibrated: Calibrated, captured: dict[str, Captured]
) -> tuple[Finding, ...]:
    """Compare the quantized tensors in the files with the captured ones, and all other tensors with
    the source, bit for bit.
    """
    tensors, source = read_index(directory), calibrated.source
    code_faults = [
        f"{name} was not quantized" for name in linear_names(source.shape) if name not in captured
    ]
    for name, linear in captured.items():
        if linear.wrong:
            code_faults.append(
                f"{name}: {linear.wrong} of {linear.weights} codes are not those of the weight that"
                " quality was measured with"
            )
        if digest_of_codes(read_tensor(tensors[f"{name}.weight"])) != linear.codes_sha256:
            code_faults.append(f"{name}.weight does not hold the codes that were quantized")
    scale_faults = [
        fault
        for name, value in _scales(calibrated).items()
        for fault in _compare_scale(tensors, name, value)
    ]
    weights = sum(linear.weights for linear in captured.values())
    ties = sum(linear.ties for linear in captured.values())
    return (
        verdict(
            "read back: codes",
            code_faults,
            f"{weights} codes as quantized, {ties} of them rounded the other way at a tie",
        ),
        verdict("read back: scales", scale_faults, f"as calibrated, on {len(captured)} linears"),
        _unquantized(tensors, source, set(captured)),
    )


def _scales(calibrated: Calibrated) -> dict[str, Tensor]:
    """Tensor name -> the value that the file must hold."""
    values = {}
    for name, scales in calibrated.linears.items():
        named = {
            "weight_scale": scales.weight,
            "input_scale": scales.input,
            "pre_quant_scale": scales.pre_quant,
        }
        values.update({f"{name}.{key}": value for key, value in named.items() if value is not None})
    for layer, (key_scale, value_scale) in enumerate(calibrated.kv_scales):
        values[f"model.layers.{layer}.self_attn.k_proj.k_scale"] = key_scale
        values[f"model.layers.{layer}.self_attn.v_proj.v_scale"] = value_scale
    return values


def _compare_scale(tensors: dict[str, TensorInfo], name: str, value: Tensor) -> list[str]:
    """The faults of one scale, which must be equal up to one float32 rounding."""
    import torch

    if name not in tensors:
        return [f"{name} is missing"]
    same = torch.allclose(
        read_tensor(tensors[name]).float().reshape(-1),
        value.float().reshape(-1),
        rtol=2**-23,
        atol=0.0,
    )
    return [] if same else [f"{name} is not the scale that calibration gave"]


def _unquantized(tensors: dict[str, TensorInfo], source: Source, linears: set[str]) -> Finding:
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
