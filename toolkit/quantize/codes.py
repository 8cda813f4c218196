"""Encode weights as codes, a few rows at a time, with the same arithmetic as ModelOpt's exports."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from toolkit.quantize.algorithms import Algorithm

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["encode_values", "encode_weight", "row_slices"]

WEIGHTS_AT_A_TIME = 1 << 22  # float32 temporaries of 16 MB


def encode_weight(weight: Tensor, scale: Tensor, algorithm: Algorithm) -> Tensor:
    """The codes [out, in] of `weight` [out, in]: round(weight / scale), ties to even, as int8 or
    float8_e4m3fn.

    scale: float32, [out] or a single value. By torch's promotion rule, the division by a scalar of
    shape [] is done in the weight's own dtype, and by one of shape [1] in float32. ModelOpt's
    unified export divides the first way, its TRT-LLM export the second.
    """
    import torch

    dtype = torch.int8 if algorithm.weight_dtype == "I8" else torch.float8_e4m3fn
    codes = torch.empty(weight.shape, dtype=dtype)
    for rows in row_slices(weight):
        divisor = scale[rows, None] if scale.numel() > 1 else scale
        codes[rows] = encode_values(weight[rows] / divisor, algorithm)
    return codes


def row_slices(weight: Tensor) -> Iterator[slice]:
    """Slices of rows that hold about WEIGHTS_AT_A_TIME weights each."""
    step = max(1, WEIGHTS_AT_A_TIME // max(1, weight[0].numel()))
    return (slice(start, min(start + step, len(weight))) for start in range(0, len(weight), step))


def encode_values(values: Tensor, algorithm: Algorithm) -> Tensor:
    """The nearest codes of values that are already divided by the scale."""
    import torch

    if algorithm.weight_dtype == "I8":
        return values.round().clamp(-127, 127).to(torch.int8)
    return values.clamp(-algorithm.max_code, algorithm.max_code).to(torch.float8_e4m3fn)
