"""The fused decoder as plain functions. Every faster implementation is compared with it.

`decode` is the whole model. It gets the operations that have kernels as an `Ops`: linear,
attention, and the two halves of a layer, which consist of them. TorchOps computes them in plain
torch, in any dtype and on any device; it also runs if there is no C++ compiler. KV caches are one
(k, v) pair per layer, written in place: [slots, kv_heads, capacity, head_dim].
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from toolkit.checkpoints.shape import ModelShape

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "FP8_MAX",
    "Attention",
    "Layer",
    "Linear",
    "Ops",
    "Padding",
    "Step",
    "TorchOps",
    "Weights",
    "build",
    "build_head",
    "build_layer",
    "decode",
    "logits_of",
    "rms_norm",
]

FP8_MAX = 448.0
# Integers up to this size are exact in float32, for every order of summation.
EXACT_FLOAT32 = 2**24


@dataclass(frozen=True, slots=True)
class Linear:
    """y = x W^T (+ bias).

    int8 or float8 weights have a scale per row. If there is an input_scale, x is multiplied by
    pre_scale and then quantized. rows and start are for kernels, whose weights are packed: the
    number of outputs, and the value from which INT8 products are summed.
    """

    weight: Tensor  # [out, in]
    scale: Tensor | None = None  # [out]
    input_scale: Tensor | None = None  # []
    pre_scale: Tensor | None = None  # [in]
    bias: Tensor | None = None  # [out]
    rows: int = 0
    start: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Attention:
    """The settings of attention. window: None stands for every earlier position. The scales exist
    only for an FP8 cache.
    """

    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    window: int | None
    q_norm: Tensor | None  # [head_dim]
    k_norm: Tensor | None
    k_scale: Tensor | None  # []
    v_scale: Tensor | None


@dataclass(frozen=True, slots=True)
class Layer:
    input_norm: Tensor
    post_norm: Tensor
    qkv: Linear
    o: Linear
    gate_up: Linear
    down: Linear
    attention: Attention


@dataclass(frozen=True, slots=True)
class Weights:
    embed: Tensor  # [vocab, hidden]
    norm: Tensor
    lm_head: Linear
    layers: tuple[Layer, ...]
    cos: Tensor  # [positions, head_dim / 2] float32
    sin: Tensor
    eps: float


@dataclass(frozen=True, slots=True)
class Step:
    """Where a step writes its tokens: after the first `lengths` [batch] positions of `slots`
    [batch].

    The tokens of all sequences are packed, one sequence behind the other: that of slots[i] begins
    at starts[i] [batch], so each brings its own number of tokens. All int64. padding: for TorchOps,
    if these numbers differ.
    """

    slots: Tensor
    lengths: Tensor
    starts: Tensor
    cos: Tensor  # as in Weights
    sin: Tensor
    padding: Padding | None = None


@dataclass(frozen=True, slots=True)
class Padding:
    """How packed tokens become rows of one width, and rows packed tokens again.

    A row is padded with its own last token. What that writes into the cache lies behind the
    sequence's tokens, where no result depends on it.
    """

    rows: Tensor  # [batch, width]: packed token of each place
    kept: Tensor  # [tokens]: place of each packed token in the flattened rows


class Ops(ABC):
    """The operations that may have kernels. The two halves of a layer, `attend` and `feed_forward`,
    consist of linear and attention; a kernel may compute a half in one call.
    """

    @abstractmethod
    def linear(self, x: Tensor, linear: Linear) -> Tensor: ...

    @abstractmethod
    def attention(
        self, qkv: Tensor, cache: tuple[Tensor, Tensor], step: Step, how: Attention
    ) -> Tensor: ...

    def attend(
        self, hidden: Tensor, layer: Layer, cache: tuple[Tensor, Tensor], step: Step
    ) -> Tensor:
        qkv = self.linear(rms_norm(hidden, layer.input_norm, layer.attention.eps), layer.qkv)
        return hidden + self.linear(self.attention(qkv, cache, step, layer.attention), layer.o)

    def feed_forward(self, hidden: Tensor, layer: Layer) -> Tensor:
        both = self.linear(rms_norm(hidden, layer.post_norm, layer.attention.eps), layer.gate_up)
        gate, up = both.chunk(2, dim=-1)
        return hidden + self.linear(F.silu(gate) * up, layer.down)


def build(shape: ModelShape, tensors: dict[str, Tensor], tables: tuple[Tensor, Tensor]) -> Weights:
    """Arrange named tensors (see weights.py) as `Weights`."""
    layers = tuple(build_layer(shape, tensors, i) for i in range(shape.num_layers))
    return Weights(
        tensors["embed.weight"],
        tensors["norm.weight"],
        build_head(shape, tensors),
        layers,
        *tables,
        shape.rms_norm_eps,
    )


def build_head(shape: ModelShape, tensors: dict[str, Tensor]) -> Linear:
    """The LM head; tied, it is the embedding."""
    if shape.tie_word_embeddings:
        return Linear(tensors["embed.weight"])
    return _linear(tensors, "lm_head")


def build_layer(shape: ModelShape, tensors: dict[str, Tensor], i: int) -> Layer:
    """Arrange the named tensors of layer i."""
    name = f"layers.{i}"
    window = shape.sliding_window[i] if shape.sliding_window is not None else None
    norms = (
        tensors.get(f"{name}.{part}")
        for part in ("q_norm.weight", "k_norm.weight", "k_scale", "v_scale")
    )
    attention = Attention(
        shape.num_heads, shape.num_kv_heads, shape.head_dim, shape.rms_norm_eps, window, *norms
    )
    qkv, o, gate_up, down = (
        _linear(tensors, f"{name}.{part}") for part in ("qkv", "o", "gate_up", "down")
    )
    before, after = (tensors[f"{name}.{part}.weight"] for part in ("input_norm", "post_norm"))
    return Layer(before, after, qkv, o, gate_up, down, attention)


def _linear(tensors: dict[str, Tensor], name: str) -> Linear:
    scale, input_scale, pre_scale, bias = (
        tensors.get(f"{name}.{part}") for part in ("scale", "input_scale", "pre_scale", "bias")
    )
    return Linear(tensors[f"{name}.weight"], scale, input_scale, pre_scale, bias)


def decode(
    weights: Weights,
    ops: Ops,
    tokens: Tensor,
    step: Step,
    columns: Tensor,
    caches: list[tuple[Tensor, Tensor]],
    dtype: torch.dtype,
) -> Tensor:
    """Append the packed tokens [t] int64 where `step` says.

    Returns the logits at `columns` [c] of the tokens, [c, vocab] in float32, or float64 in a
    float64 engine. A prompt needs only the logits of its last token, and the LM head takes a large
    part of a small model's time.
    """
    hidden = F.embedding(tokens[None], weights.embed).to(dtype)  # [1, t, hidden]
    for layer, cache in zip(weights.layers, caches, strict=True):
        hidden = ops.feed_forward(ops.attend(hidden, layer, cache, step), layer)
    hidden = hidden[0].index_select(0, columns)
    return logits_of(hidden, weights.norm, weights.lm_head, weights.eps, ops)


def logits_of(hidden: Tensor, norm: Tensor, lm_head: Linear, eps: float, ops: Ops) -> Tensor:
    """The logits [..., vocab] of the last layer's output [..., hidden]; float32, or float64 for
    float64 input.
    """
    logits = ops.linear(rms_norm(hidden, norm, eps), lm_head)
    return logits.to(_wide(hidden.dtype))


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm, computed in float32, or in float64 for float64 input. The result has x's dtype."""
    wide = x.to(_wide(x.dtype))
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (normed * weight.to(wide.dtype)).to(x.dtype)


class TorchOps(Ops):
    """Linear and attention in plain torch. native_fp8: compute FP8 products with torch._scaled_mm
    (CUDA from SM89) and not in float.
    """

    def __init__(self, *, native_fp8: bool = False) -> None:
        self.native_fp8 = native_fp8

    def linear(self, x: Tensor, linear: Linear) -> Tensor:
        """x [..., in] -> [..., out], in x's dtype."""
        if linear.scale is None:
            y = F.linear(x, linear.weight.to(x.dtype))
        elif linear.input_scale is None:
            # Only the weights are quantized. Codes are exact in every float dtype, and the product
            # is scaled.
            y = F.linear(x, linear.weight.to(x.dtype)) * linear.scale.to(x.dtype)
        elif linear.weight.dtype == torch.int8:
            y = _w8a8(x, linear)
        else:
            y = self._fp8(x, linear)
        return y if linear.bias is None else y + linear.bias.to(x.dtype)

    def attention(
        self, qkv: Tensor, cache: tuple[Tensor, Tensor], step: Step, how: Attention
    ) -> Tensor:
        """Rotate queries and keys, write keys and values, and attend causally.

        qkv [1, t, (heads + 2 kv_heads) d] -> [1, t, heads d], or both as rows [b, n, ...].
        """
        packed = qkv
        if step.padding is not None:
            qkv = qkv[0, step.padding.rows]
        else:
            qkv = qkv.reshape(len(step.slots), -1, qkv.shape[-1])
        batch, n, _ = qkv.shape
        heads = qkv.view(batch, n, -1, how.head_dim)
        q, k, v = torch.split(heads, [how.heads, how.kv_heads, how.kv_heads], dim=2)
        if how.q_norm is not None and how.k_norm is not None:
            q, k = rms_norm(q, how.q_norm, how.eps), rms_norm(k, how.k_norm, how.eps)
        slots, lengths, cos, sin = step.slots, step.lengths, step.cos, step.sin
        place = lengths[:, None] + torch.arange(n, device=qkv.device)  # [b, n]
        q, k = _rotate(q, cos[place], sin[place]), _rotate(k, cos[place], sin[place])
        keys, values = cache
        _write(keys, k, slots, place, how.k_scale)
        _write(values, v, slots, place, how.v_scale)
        reach = int(lengths.max()) + n
        k = _read(keys, slots, reach, how.k_scale, qkv.dtype)  # [b, kv_heads, reach, d]
        v = _read(values, slots, reach, how.v_scale, qkv.dtype)
        positions = torch.arange(reach, device=qkv.device)
        # Behind a sequence lies what was there before. Its weight is 0, but 0 times NaN is NaN.
        v = v.masked_fill((positions >= lengths[:, None] + n)[:, None, :, None], 0.0)
        group = how.heads // how.kv_heads
        q = q.view(batch, n, how.kv_heads, group, how.head_dim)
        q = q.permute(0, 2, 3, 1, 4)  # [b, kv_heads, group, n, d]
        scores = (q @ k[:, :, None].transpose(-1, -2)) * how.head_dim**-0.5
        visible = positions <= place[..., None]  # [b, n, reach]
        if how.window is not None:
            visible &= positions > place[..., None] - how.window
        scores = scores.masked_fill(~visible[:, None, None], float("-inf"))
        mixed = scores.to(_wide(qkv.dtype)).softmax(-1).to(qkv.dtype) @ v[:, :, None]
        result: Tensor = mixed.permute(0, 3, 1, 2, 4).reshape(batch * n, -1)
        if step.padding is not None:
            result = result[step.padding.kept]
        return result.view(*packed.shape[:-1], -1)

    def _fp8(self, x: Tensor, linear: Linear) -> Tensor:
        """Multiply E4M3 activations, with one static scale per tensor, by E4M3 weights. The product
        is scaled, as in hardware.
        """
        assert linear.input_scale is not None
        assert linear.scale is not None
        wide = _wide(x.dtype)
        codes = (
            (x.to(wide) / linear.input_scale.to(wide))
            .clamp(-FP8_MAX, FP8_MAX)
            .to(torch.float8_e4m3fn)
        )
        scale = linear.input_scale.to(wide) * linear.scale.to(wide)
        if self.native_fp8:
            unit = torch.ones((), device=x.device)
            flat = codes.reshape(-1, codes.shape[-1])
            y = torch._scaled_mm(
                flat, linear.weight.t(), scale_a=unit, scale_b=unit, out_dtype=torch.float32
            )
            return (y.view(*x.shape[:-1], -1) * scale).to(x.dtype)
        return (F.linear(codes.to(wide), linear.weight.to(wide)) * scale).to(x.dtype)


def _w8a8(x: Tensor, linear: Linear) -> Tensor:
    """The integer product, computed in floats that are wide enough to be exact. So a kernel that
    sums in int32 gives the same result.
    """
    assert linear.input_scale is not None
    assert linear.scale is not None
    wide = _wide(x.dtype)
    scaled = x.to(wide) if linear.pre_scale is None else x.to(wide) * linear.pre_scale.to(wide)
    codes = (scaled * linear.input_scale.to(wide).reciprocal()).round().clamp(-128, 127)
    exact = torch.float32 if 128 * 128 * x.shape[-1] <= EXACT_FLOAT32 else torch.float64
    counts = F.linear(codes.to(exact), linear.weight.to(exact)).to(wide)
    return (counts * (linear.input_scale.to(wide) * linear.scale.to(wide))).to(x.dtype)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [b, n, h, d], cos and sin [b, n, d / 2]: pairs are (i, i + d/2), as in transformers'
    rotate_half.
    """
    cos, sin = cos[:, :, None].to(x.dtype), sin[:, :, None].to(x.dtype)
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def _write(cache: Tensor, new: Tensor, slots: Tensor, place: Tensor, scale: Tensor | None) -> None:
    """Write new [b, n, kv_heads, d] into cache [slots, kv_heads, capacity, d] at place [b, n]."""
    if cache.dtype == torch.float8_e4m3fn:
        assert scale is not None
        wide = _wide(new.dtype)
        new = (
            (new.to(wide) / scale.to(wide))
            .clamp(-FP8_MAX, FP8_MAX)
            .to(cache.dtype)
            .view(torch.uint8)
        )
        cache = cache.view(torch.uint8)
    cache[slots[:, None], :, place] = new.to(cache.dtype)


def _read(
    cache: Tensor, slots: Tensor, reach: int, scale: Tensor | None, dtype: torch.dtype
) -> Tensor:
    if cache.dtype == torch.float8_e4m3fn:
        assert scale is not None
        codes = cache.view(torch.uint8)[:, :, :reach][slots].view(torch.float8_e4m3fn)
        return (codes.to(_wide(dtype)) * scale.to(_wide(dtype))).to(dtype)
    return cache[:, :, :reach][slots]


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32
