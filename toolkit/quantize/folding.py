"""Choose smoothing that can be folded into the tensors before each linear, exactly.

SmoothQuant multiplies the inputs of a linear by a vector and divides its weight by it. ModelOpt's
unified format keeps that vector as `pre_quant_scale`. compressed-tensors has no place for it, so it
has to go into what produces the input:

    q, k, v          rows of input_layernorm
    gate, up         rows of post_attention_layernorm
    o                rows of v_proj, and of its bias
    down             rows of up_proj, and of its bias; SiLU acts on gate, not on up

The factors are ModelOpt's, rounded to powers of two. A power of two moves only exponents, so the
folded model computes exactly what the source does, in every dtype: a norm or a bias that was
multiplied by another factor would be rounded. Rows of a quantized linear are folded into its
weight_scale, which leaves its codes alone.

With grouped-query attention several query heads read one row of v_proj, so they share a factor: the
smallest of theirs, since ModelOpt's factor is the reciprocal of the largest input (its alpha is 1).
A row of v_proj or up_proj is only ever made smaller. Calibration does not see these rows alone, and
one that grew could leave the range of float16.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from toolkit.quantize.codes import row_slices
from toolkit.quantize.source import Source, read_source
from toolkit.records.build import LeftOut

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["INPUTS", "Folding", "Input", "exact_factors", "rows_of_producer", "why_left_out"]


@dataclass(frozen=True, slots=True)
class Input:
    """Linears of a decoder layer that read one input, and the module whose rows produce it."""

    linears: tuple[str, ...]
    producer: str


INPUTS = (
    Input(("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), "input_layernorm"),
    Input(("self_attn.o_proj",), "self_attn.v_proj"),
    Input(("mlp.gate_proj", "mlp.up_proj"), "post_attention_layernorm"),
    Input(("mlp.down_proj",), "mlp.up_proj"),
)


@dataclass(frozen=True, slots=True)
class Folding:
    """What is folded where.

    rows: producer -> float32 [rows], the power of two that each of its rows is multiplied by.
    folded and left_out: names of linears whose inputs are smoothed, or not.
    """

    rows: Mapping[str, Tensor]
    folded: tuple[str, ...]
    left_out: tuple[LeftOut, ...]


def exact_factors(source: Source, layer: int, group: Input, smoothing: Tensor) -> Tensor:
    """float32 [in]: powers of two near `smoothing` [in] that can be folded without rounding. Where
    a channel cannot be (its values would leave the range of the source's dtype), its factor is 1.
    """
    import torch

    factors = smoothing.detach().float().cpu()
    heads = _by_kv_head(source, factors) if group.producer == "self_attn.v_proj" else None
    if heads is not None:
        factors = heads.amin(dim=1, keepdim=True).expand_as(heads).reshape(-1)
    factors = _power_of_two(factors)
    if not group.producer.endswith("norm"):
        factors = factors.clamp_max(1.0)
    is_exact = _is_exact(source, layer, group, factors)
    if heads is not None:
        shared = _by_kv_head(source, is_exact).all(dim=1, keepdim=True)
        is_exact = shared.expand_as(heads).reshape(-1)
    return torch.where(is_exact, factors, torch.ones_like(factors))


def why_left_out(group: Input, smoothing: Tensor, factors: Tensor) -> str | None:
    """Why `exact_factors` smooths no channel of this input; None if it does."""
    wanted = _power_of_two(smoothing.detach().float().cpu())
    if bool((factors != 1).any()) or bool((wanted == 1).all()):
        return None
    if not group.producer.endswith("norm") and bool((wanted >= 1).all()):
        return f"every row of {group.producer} would have to grow, and could leave float16's range"
    return f"no channel can be folded into {group.producer} exactly"


def _power_of_two(factors: Tensor) -> Tensor:
    """The nearest powers of two, by ratio."""
    import torch

    return torch.exp2(torch.log2(factors).round())


def rows_of_producer(source: Source, group: Input, factors: Tensor) -> Tensor:
    """The factor of each row of the producer: [in] -> [rows]. They differ for v_proj, one row of
    which is read by all query heads of its key/value head.
    """
    if group.producer != "self_attn.v_proj":
        return factors
    return _by_kv_head(source, factors)[:, 0].reshape(-1)


def _by_kv_head(source: Source, vector: Tensor) -> Tensor:
    """[query heads * head_dim] -> [key/value heads, query heads of each, head_dim]."""
    shape = source.shape
    return vector.reshape(shape.num_kv_heads, shape.num_heads // shape.num_kv_heads, shape.head_dim)


def _is_exact(source: Source, layer: int, group: Input, factors: Tensor) -> Tensor:
    """bool [in]: the producer times its factor, and the weights divided by it, are not rounded."""
    import torch

    prefix = f"model.layers.{layer}"
    dtype = getattr(torch, source.dtype)
    exact = torch.ones_like(factors, dtype=torch.bool)
    suffix = "weight" if group.producer.endswith("norm") else "bias"
    values = source.tensors.get(f"{prefix}.{group.producer}.{suffix}")
    if values is not None:
        produced = read_source(source, values.name).to(dtype)
        if group.producer == "self_attn.v_proj":
            grouped = _by_kv_head(source, factors)
            produced = produced.reshape(len(grouped), 1, -1).expand_as(grouped).reshape(-1)
        exact &= _survives(produced, factors)
    for name in group.linears:
        weight = read_source(source, f"{prefix}.{name}.weight").to(dtype)
        for rows in row_slices(weight):
            exact &= _survives(weight[rows], factors.reciprocal()).all(dim=0)
    return exact


def _survives(values: Tensor, factors: Tensor) -> Tensor:
    """Whether each value, multiplied by its factor in its own dtype, is finite and not rounded."""
    product = (values.float() * factors).to(values.dtype)
    return product.isfinite() & (product.float() / factors == values.float())
