"""Rotary position embeddings as tables, with one row for every position that an engine can reach.

A variant of RoPE only fills the tables in another way, so the model and its kernels need one
implementation. Frequencies are computed in float32 and in the order of operations of transformers
(`modeling_rope_utils`), so the tables equal those of transformers bit for bit.

Only in dynamic NTK do the frequencies depend on the length of the sequence. Here position p uses
the frequencies of length p + 1. transformers does the same when it generates with a cache after a
prompt within the original length, and it makes a rewound cache equal to a fresh one.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from toolkit.checkpoints.shape import ModelShape

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["rope_tables"]


def rope_tables(shape: ModelShape, positions: int) -> tuple[Tensor, Tensor]:
    """(cos, sin), each [positions, head_dim / 2] float32, multiplied by yarn's attention factor."""
    scaling = shape.rope_scaling or {"rope_type": "default"}
    kind, factor = scaling["rope_type"], 1.0
    place = torch.arange(positions, dtype=torch.float32)[:, None]
    if kind == "dynamic":
        angles = _dynamic_angles(shape, scaling, place)
    elif kind == "linear":
        angles = place * (_inverse_frequencies(shape) / scaling["factor"])
    elif kind == "llama3":
        angles = place * _llama3(_inverse_frequencies(shape), scaling)
    elif kind == "yarn":
        frequencies, factor = _yarn(shape, scaling)
        angles = place * frequencies
    else:
        angles = place * _inverse_frequencies(shape)
    return angles.cos() * factor, angles.sin() * factor


def _inverse_frequencies(shape: ModelShape, theta: float | None = None) -> Tensor:
    """theta ** (-2i / head_dim), [head_dim / 2]."""
    base = shape.rope_theta if theta is None else theta
    exponents = torch.arange(0, shape.head_dim, 2, dtype=torch.float32) / shape.head_dim
    return 1.0 / (base**exponents)


def _dynamic_angles(shape: ModelShape, scaling: dict[str, Any], place: Tensor) -> Tensor:
    dim, original, factor = shape.head_dim, shape.max_position_embeddings, float(scaling["factor"])
    angles = place * _inverse_frequencies(shape)
    for p in range(original, len(place)):
        stretch = (factor * (p + 1) / original) - (factor - 1)
        angles[p] = p * _inverse_frequencies(shape, shape.rope_theta * stretch ** (dim / (dim - 2)))
    return angles


def _llama3(frequencies: Tensor, scaling: dict[str, Any]) -> Tensor:
    """Llama 3.1: long wavelengths are stretched by factor, short ones stay the same, and those in
    between are interpolated.
    """
    factor, low, high = scaling["factor"], scaling["low_freq_factor"], scaling["high_freq_factor"]
    original = scaling["original_max_position_embeddings"]
    wavelength = 2 * math.pi / frequencies
    stretched = torch.where(wavelength > original / low, frequencies / factor, frequencies)
    smooth = (original / wavelength - low) / (high - low)
    between = ~(wavelength < original / high) & ~(wavelength > original / low)
    return torch.where(between, (1 - smooth) * stretched / factor + smooth * stretched, stretched)


def _yarn(shape: ModelShape, scaling: dict[str, Any]) -> tuple[Tensor, float]:
    """Peng et al. 2023 (arXiv:2309.00071): (frequencies, factor on cos and sin)."""
    dim, theta = shape.head_dim, shape.rope_theta
    original = scaling.get("original_max_position_embeddings") or shape.max_position_embeddings
    factor = scaling.get("factor") or shape.max_position_embeddings / original

    def mscale(scale: float, weight: float = 1.0) -> float:
        return 1.0 if scale <= 1 else 0.1 * weight * math.log(scale) + 1.0

    attention = scaling.get("attention_factor")
    if attention is None:
        weight, weight_all = scaling.get("mscale"), scaling.get("mscale_all_dim")
        attention = mscale(factor)
        if weight and weight_all:
            attention = mscale(factor, weight) / mscale(factor, weight_all)

    def correction(rotations: float) -> float:
        return (dim * math.log(original / (rotations * 2 * math.pi))) / (2 * math.log(theta))

    low = correction(scaling.get("beta_fast") or 32)
    high = correction(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = torch.clamp(
        (torch.arange(dim // 2, dtype=torch.float32) - low) / ((high - low) or 0.001), 0, 1
    )
    stretches = theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    keep = 1 - ramp
    return 1.0 / (factor * stretches) * (1 - keep) + 1.0 / stretches * keep, float(attention)
