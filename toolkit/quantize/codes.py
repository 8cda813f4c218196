"""Weights -> codes, with exactly the arithmetic of ModelOpt's exports, a few rows at a time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from toolkit.quantize.algorithms import Algorithm

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["encode_values", "encode_weight", "row_parts"]

PART = 1 << 22  # weights encoded at a time: float32 temporaries of 16 MB


def encode_weight(weight: Tensor, scale: Tensor, algorithm: Algorithm) -> Tensor:
    """The codes [out, in] of `weight` [out, in]: int8 or float8_e4m3fn, round(weight / scale), ties
    to even.

    scale: float32, [out] or one value. A single value of no dimensions divides in the weight's own
    dtype, one of shape [1] in float32: torch's promotion rule, which the unified export meets the
    one way and the TRT-LLM export the other.
    """
    import torch

    codes = torch.empty(
        weight.shape, dtype=torch.int8 if algorithm.weight_dtype == "I8" else torch.float8_e4m3fn
    )
    for rows in row_parts(weight):
        codes[rows] = encode_values(
            weight[rows] / (scale[rows, None] if scale.numel() > 1 else scale), algorithm
        )
    return codes


def row_parts(weight: Tensor) -> Iterator[slice]:
    """Slices of rows that hold about PART weights each."""
    step = max(1, PART // max(1, weight[0].numel()))
    return (slice(start, min(start + step, len(weight))) for start in range(0, len(weight), step))


def encode_values(values: Tensor, algorithm: Algorithm) -> Tensor:
    """The nearest codes of values that are in units of the scale."""
    import torch

    if algorithm.weight_dtype == "I8":
        return values.round().clamp(-127, 127).to(torch.int8)
    return values.clamp(-algorithm.max_code, algorithm.max_code).to(torch.float8_e4m3fn)
