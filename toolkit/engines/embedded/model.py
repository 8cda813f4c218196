"""The fused decoder as plain functions. Every faster implementation is compared with it.

`decode` is the whole model. It gets the operations that have kernels as an `Ops`: linear,
attention, and the layers, which consist of them. TorchOps computes them in plain torch, in any
dtype and on any device; it also runs if there is no C++ compiler. The host tells it what it has to
know of a step, so that no operation waits for a GPU. KV caches are one (k, v) pair per layer,
written in place: [slots, kv_heads, capacity, head_dim].
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from toolkit.checkpoints.shape import ModelShape

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "CODE_MULTIPLE",
    "FP8_MAX",
    "Attention",
    "Group",
    "Layer",
    "Linear",
    "Native",
    "Ops",
    "Step",
    "TorchOps",
    "Weights",
    "build",
    "build_head",
    "build_layer",
    "decode",
    "logits_of",
    "mapped",
    "rms_norm",
]

FP8_MAX = 448.0
# Integers up to this size are exact in float32, for every order of summation.
EXACT_FLOAT32 = 2**24
# What CUDA demands of matrices of codes: rows and columns of the weights in multiples of 16 for
# torch._scaled_mm, of 8 for torch._int_mm, and there more than 16 rows of activations.
CODE_MULTIPLE, INT8_ROWS = 16, 32


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
    """embed: None if kernels read the embeddings in the packed LM head, to which they are tied."""

    embed: Tensor | None  # [vocab, hidden]
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
    at starts[i] [batch], so each brings its own number of tokens. All int64. groups: the same for
    TorchOps, which reads nothing else; kernels do not need them.
    """

    slots: Tensor
    lengths: Tensor
    starts: Tensor
    cos: Tensor  # as in Weights
    sin: Tensor
    groups: tuple[Group, ...] = ()


@dataclass(frozen=True, slots=True)
class Group:
    """Sequences that bring the same number of tokens, n, and are computed together."""

    slots: Tensor  # [b]
    place: Tensor  # [b, n]: the position of each token in its sequence
    cos: Tensor  # [b, n, head_dim / 2], of these positions
    sin: Tensor
    tokens: Tensor | None  # [b * n]: these of the packed tokens; None: all, in their order
    reach: int  # positions of the longest of them after the step
    is_even: bool  # all have as many
    first_slot: int | None  # if their slots are consecutive


@dataclass(frozen=True, slots=True)
class Native:
    """The products of codes that a device computes itself. What it does not is computed in floats.

    fp8: torch._scaled_mm. int8: torch._int_mm. Weights for them are padded to CODE_MULTIPLE.
    """

    fp8: bool = False
    int8: bool = False


class Ops(ABC):
    """The operations that may have kernels. `layers` consists of linear and attention; a kernel may
    compute it in one call.
    """

    def embedded(self, tokens: Tensor, weights: Weights) -> Tensor:
        """The embeddings [1, t, hidden] of the tokens [t]."""
        assert weights.embed is not None
        return F.embedding(tokens[None], weights.embed)

    @abstractmethod
    def linear(self, x: Tensor, linear: Linear) -> Tensor: ...

    @abstractmethod
    def attention(
        self, qkv: Tensor, cache: tuple[Tensor, Tensor], step: Step, how: Attention
    ) -> Tensor: ...

    def layers(
        self,
        hidden: Tensor,
        layers: Sequence[Layer],
        caches: Sequence[tuple[Tensor, Tensor]],
        step: Step,
    ) -> Tensor:
        """hidden [1, t, hidden] after all of these layers, one after the other."""
        for layer, cache in zip(layers, caches, strict=True):
            hidden = self._feed_forward(self._attend(hidden, layer, cache, step), layer)
        return hidden

    def _attend(
        self, hidden: Tensor, layer: Layer, cache: tuple[Tensor, Tensor], step: Step
    ) -> Tensor:
        qkv = self.linear(rms_norm(hidden, layer.input_norm, layer.attention.eps), layer.qkv)
        return hidden + self.linear(self.attention(qkv, cache, step, layer.attention), layer.o)

    def _feed_forward(self, hidden: Tensor, layer: Layer) -> Tensor:
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
    """The LM head; tied, it is the embedding, unless there is one in INT8."""
    if shape.tie_word_embeddings and "lm_head.weight" not in tensors:
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
    hidden = ops.embedded(tokens, weights).to(dtype)
    hidden = ops.layers(hidden, weights.layers, caches, step)
    hidden = hidden[0].index_select(0, columns)
    return logits_of(hidden, weights.norm, weights.lm_head, weights.eps, ops)


def logits_of(hidden: Tensor, norm: Tensor, lm_head: Linear, eps: float, ops: Ops) -> Tensor:
    """The logits [..., vocab] of the last layer's output [..., hidden]; float32, or float64 for
    float64 input.
    """
    logits = ops.linear(rms_norm(hidden, norm, eps), lm_head)
    return logits.to(_wide(hidden.dtype))


def mapped(node: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """A copy of a tree of dataclasses and tuples, with function(tensor) for every tensor."""
    if isinstance(node, torch.Tensor):
        return function(node)
    if isinstance(node, tuple):
        return tuple(mapped(child, function) for child in node)
    if is_dataclass(node) and not isinstance(node, type):
        parts = {field.name: mapped(getattr(node, field.name), function) for field in fields(node)}
        return replace(node, **parts)
    return node


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm, computed in float32, or in float64 for float64 input. The result has x's dtype."""
    wide = x.to(_wide(x.dtype))
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (normed * weight.to(wide.dtype)).to(x.dtype)


class TorchOps(Ops):
    """Linear and attention in plain torch."""

    def __init__(self, native: Native | None = None) -> None:
        self._native = native or Native()

    def linear(self, x: Tensor, linear: Linear) -> Tensor:
        """x [..., in] -> [..., out], in x's dtype."""
        if linear.scale is None:
            y = F.linear(x, linear.weight.to(x.dtype))
        elif linear.input_scale is None:
            # Only the weights are quantized. Codes are exact in every float dtype, and the product
            # is scaled.
            weight = linear.weight[: len(linear.scale), : x.shape[-1]]
            y = F.linear(x, weight.to(x.dtype)) * linear.scale.to(x.dtype)
        elif linear.weight.dtype == torch.int8:
            y = _w8a8(x, linear, self._native.int8)
        else:
            y = _fp8(x, linear, self._native.fp8)
        return y if linear.bias is None else y + linear.bias.to(x.dtype)

    def attention(
        self, qkv: Tensor, cache: tuple[Tensor, Tensor], step: Step, how: Attention
    ) -> Tensor:
        """Rotate queries and keys, write keys and values, and attend causally.

        qkv [1, t, (heads + 2 kv_heads) d] -> [1, t, heads d], or both as rows [b, n, ...].
        """
        packed = qkv.reshape(-1, qkv.shape[-1])
        result = packed.new_empty((len(packed), how.heads * how.head_dim))
        for group in step.groups:
            if group.tokens is None:
                result = _attend_group(packed, cache, group, how)
            else:
                mixed = _attend_group(packed[group.tokens], cache, group, how)
                result.index_copy_(0, group.tokens, mixed)
        return result.view(*qkv.shape[:-1], -1)


def _attend_group(
    qkv: Tensor, cache: tuple[Tensor, Tensor], group: Group, how: Attention
) -> Tensor:
    """qkv [b * n, (heads + 2 kv_heads) d] of the group's tokens -> [b * n, heads d]."""
    batch, n = group.place.shape
    heads = qkv.view(batch, n, -1, how.head_dim)
    q, k, v = torch.split(heads, [how.heads, how.kv_heads, how.kv_heads], dim=2)
    if how.q_norm is not None and how.k_norm is not None:
        q, k = rms_norm(q, how.q_norm, how.eps), rms_norm(k, how.k_norm, how.eps)
    q, k = _rotate(q, group.cos, group.sin), _rotate(k, group.cos, group.sin)
    keys, values = cache
    _write(keys, k, group, how.k_scale)
    _write(values, v, group, how.v_scale)
    k = _read(keys, group, how.k_scale, qkv.dtype)  # [b, kv_heads, reach, d]
    v = _read(values, group, how.v_scale, qkv.dtype)
    positions = torch.arange(group.reach, device=qkv.device)
    if not group.is_even:
        # Behind a sequence lies what was there before. Its weight is 0, but 0 times NaN is NaN.
        is_behind = positions > group.place[:, -1:]  # [b, reach]
        v = v.masked_fill(is_behind[:, None, :, None], 0.0)
    # The queries of a KV head are the rows of one product, so that no key is copied for each.
    q = q.view(batch, n, how.kv_heads, -1, how.head_dim).permute(0, 2, 3, 1, 4)
    # [b, kv_heads, heads per KV head * n, d]
    rows = q.reshape(batch, how.kv_heads, -1, how.head_dim)
    scores = ((rows @ k.transpose(-1, -2)) * how.head_dim**-0.5).view(*q.shape[:-1], -1)
    is_hidden = positions > group.place[..., None]  # [b, n, reach]
    if how.window is not None:
        is_hidden |= positions <= group.place[..., None] - how.window
    scores = scores.masked_fill(is_hidden[:, None, None], float("-inf"))
    weights = scores.to(_wide(qkv.dtype)).softmax(-1).to(qkv.dtype)
    mixed = (weights.view(*rows.shape[:-1], -1) @ v).view(q.shape)
    result: Tensor = mixed.permute(0, 3, 1, 2, 4).reshape(batch * n, -1)
    return result


def _fp8(x: Tensor, linear: Linear, is_native: bool) -> Tensor:
    """Multiply E4M3 activations, with one static scale per tensor, by E4M3 weights. The product is
    scaled, as in hardware.
    """
    assert linear.input_scale is not None
    assert linear.scale is not None
    wide = _wide(x.dtype)
    values = (x.to(wide) / linear.input_scale.to(wide)).clamp(-FP8_MAX, FP8_MAX)
    scale = linear.input_scale.to(wide) * linear.scale.to(wide)
    if not is_native:
        codes = values.to(torch.float8_e4m3fn)
        return (F.linear(codes.to(wide), linear.weight.to(wide)) * scale).to(x.dtype)
    codes = _padded(values.view(-1, x.shape[-1]), linear).to(torch.float8_e4m3fn)
    unit = torch.ones((), device=x.device)
    y = torch._scaled_mm(
        codes, linear.weight.t(), scale_a=unit, scale_b=unit, out_dtype=torch.float32
    )
    return (y[:, : len(scale)].reshape(*x.shape[:-1], -1) * scale).to(x.dtype)


def _w8a8(x: Tensor, linear: Linear, is_native: bool) -> Tensor:
    """The integer product. Where the device has none it is computed in floats that are wide enough
    to be exact. So all ways, and a kernel that sums in int32, give the same result.
    """
    assert linear.input_scale is not None
    assert linear.scale is not None
    wide = _wide(x.dtype)
    scaled = x.to(wide) if linear.pre_scale is None else x.to(wide) * linear.pre_scale.to(wide)
    codes = (scaled * linear.input_scale.to(wide).reciprocal()).round().clamp(-128, 127)
    if is_native:
        counts = _int8_product(codes, linear).to(wide)
    else:
        exact = torch.float32 if 128 * 128 * x.shape[-1] <= EXACT_FLOAT32 else torch.float64
        counts = F.linear(codes.to(exact), linear.weight.to(exact)).to(wide)
    return (counts * (linear.input_scale.to(wide) * linear.scale.to(wide))).to(x.dtype)


def _int8_product(codes: Tensor, linear: Linear) -> Tensor:
    """codes [..., in], integers as floats -> [..., out]: int32 sums as floats of their dtype. No
    integer stands for NaN, which makes all of its token's results NaN.
    """
    assert linear.scale is not None
    rows = codes.reshape(-1, codes.shape[-1])
    integers = _padded(rows.to(torch.int8), linear, INT8_ROWS)
    sums = torch._int_mm(integers, linear.weight.t())[: len(rows), : len(linear.scale)]
    zero_or_nan = (rows * 0).sum(-1, keepdim=True)
    return (sums.to(codes.dtype) + zero_or_nan).view(*codes.shape[:-1], -1)


def _padded(codes: Tensor, linear: Linear, rows: int = 0) -> Tensor:
    """codes [m, in], with zeros up to the columns of the weights, which are padded for the device,
    and up to so many rows.
    """
    missing = (0, linear.weight.shape[1] - codes.shape[1], 0, max(0, rows - len(codes)))
    return F.pad(codes, missing) if any(missing) else codes


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [b, n, h, d], cos and sin [b, n, d / 2]: pairs are (i, i + d/2), as in transformers'
    rotate_half.
    """
    cos, sin = cos[:, :, None].to(x.dtype), sin[:, :, None].to(x.dtype)
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def _write(cache: Tensor, new: Tensor, group: Group, scale: Tensor | None) -> None:
    """Write new [b, n, kv_heads, d] into cache [slots, kv_heads, capacity, d] at the group's
    places.
    """
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
    cache[group.slots[:, None], :, group.place] = new.to(cache.dtype)


def _read(cache: Tensor, group: Group, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """The positions [b, kv_heads, reach, d] that the group may see. Consecutive slots are a view of
    the cache, so that only codes are copied, to become numbers.
    """
    is_fp8 = cache.dtype == torch.float8_e4m3fn
    reached = (cache.view(torch.uint8) if is_fp8 else cache)[:, :, : group.reach]
    if group.first_slot is None:
        reached = reached[group.slots]
    else:
        reached = reached.narrow(0, group.first_slot, len(group.slots))
    if not is_fp8:
        return reached.to(dtype)
    assert scale is not None
    values = reached.view(torch.float8_e4m3fn).to(_wide(dtype)) * scale.to(_wide(dtype))
    return values.to(dtype)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32
