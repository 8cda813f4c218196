"""Divide a model among ranks as TensorRT-LLM does. Pure arithmetic on the model's shape.

Each pipeline rank holds the same number of consecutive layers. Each tensor rank holds whole heads
and an equal share of the MLP and of the vocabulary. rank = pp_rank * tp_size + tp_rank. If there
are fewer key and value heads than tensor ranks, several ranks hold the same head.
"""

from __future__ import annotations

from dataclasses import dataclass

from toolkit.checkpoints.shape import ModelShape
from toolkit.errors import UsageError

__all__ = ["Part", "Ranks", "partition"]


@dataclass(frozen=True, slots=True)
class Ranks:
    """How many ranks a checkpoint in the TRT-LLM format is written for."""

    tp_size: int = 1
    pp_size: int = 1

    @property
    def world_size(self) -> int:
        return self.tp_size * self.pp_size


@dataclass(frozen=True, slots=True)
class Part:
    """The share of one rank. Slices are of rows of the whole model's tensors; for the linears that
    end a block (o_proj, down_proj) they are of columns.

    vocab reaches past the vocabulary if tp_size does not divide it; the rows past it are zeros.
    first: first of the pipeline, holds the embedding. last: last of the pipeline, holds the final
    norm and the LM head.
    """

    rank: int
    layers: range
    q: slice
    kv: slice
    mlp: slice
    vocab: slice
    first: bool
    last: bool


def partition(shape: ModelShape, ranks: Ranks) -> list[Part]:
    """The share of each rank, in the order of ranks. Raises UsageError if the model cannot be
    divided among `ranks`.
    """
    tp_size, pp_size = ranks.tp_size, ranks.pp_size
    for noun, count, name, size in (
        ("attention heads", shape.num_heads, "tp_size", tp_size),
        ("MLP columns", shape.intermediate_size, "tp_size", tp_size),
        ("layers", shape.num_layers, "pp_size", pp_size),
    ):
        if count % size:
            raise UsageError(
                f"{name} {size} does not divide the model's {count} {noun}",
                hint=f"choose a {name} that divides {count}",
            )
    kv_heads = shape.num_kv_heads
    if max(kv_heads, tp_size) % min(kv_heads, tp_size):
        raise UsageError(
            f"tp_size {tp_size} is neither a divisor nor a multiple of {kv_heads}, the model's"
            " number of key and value heads",
            hint=f"choose a tp_size that divides {kv_heads}, or a multiple of it",
        )
    layers = shape.num_layers // pp_size
    return [
        Part(
            rank=pp_rank * tp_size + tp_rank,
            layers=range(pp_rank * layers, (pp_rank + 1) * layers),
            q=_share(shape.num_heads * shape.head_dim, tp_rank, tp_size),
            kv=_heads(kv_heads, shape.head_dim, tp_rank, tp_size),
            mlp=_share(shape.intermediate_size, tp_rank, tp_size),
            vocab=_share(-(-shape.vocab_size // tp_size) * tp_size, tp_rank, tp_size),
            first=pp_rank == 0,
            last=pp_rank == pp_size - 1,
        )
        for pp_rank in range(pp_size)
        for tp_rank in range(tp_size)
    ]


def _share(count: int, tp_rank: int, tp_size: int) -> slice:
    return slice(count // tp_size * tp_rank, count // tp_size * (tp_rank + 1))


def _heads(kv_heads: int, head_dim: int, tp_rank: int, tp_size: int) -> slice:
    if kv_heads >= tp_size:
        return _share(kv_heads * head_dim, tp_rank, tp_size)
    head = tp_rank * kv_heads // tp_size
    return slice(head * head_dim, (head + 1) * head_dim)
