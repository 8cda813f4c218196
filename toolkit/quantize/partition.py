"""Which part of a model each rank holds, as TensorRT-LLM divides it. Pure arithmetic on the model's
shape.

Pipeline ranks hold consecutive layers, equally many; tensor ranks hold whole heads and equal shares
of the MLP and the vocabulary. rank = pp_rank * tp_size + tp_rank. Key and value heads that are
fewer than tensor ranks are held more than once.
"""

from __future__ import annotations

from dataclasses import dataclass

from toolkit.checkpoints.shape import ModelShape
from toolkit.errors import UsageError

__all__ = ["Part", "Ranks", "partition"]


@dataclass(frozen=True, slots=True)
class Ranks:
    """How many ranks a checkpoint in TRT-LLM's form is written for."""

    tp_size: int = 1
    pp_size: int = 1

    @property
    def world_size(self) -> int:
        return self.tp_size * self.pp_size


@dataclass(frozen=True, slots=True)
class Part:
    """One rank's share. Slices count rows of the whole model's tensors (columns, for the linears
    that end a block).

    vocab may reach past the vocabulary, where tp_size does not divide it: those rows are zeros.
    first, last: in the pipeline; they hold the embedding, and the last norm with the LM head.
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
    """Every rank's share, by rank. Raises UsageError for a model that does not divide so."""
    tp_size, pp_size = ranks.tp_size, ranks.pp_size
    for what, count, name, size in (
        ("attention heads", shape.num_heads, "tp_size", tp_size),
        ("MLP columns", shape.intermediate_size, "tp_size", tp_size),
        ("layers", shape.num_layers, "pp_size", pp_size),
    ):
        if count % size:
            raise UsageError(
                f"{name} {size} does not divide the model's {count} {what}",
                hint=f"choose one that divides {count}",
            )
    kv_heads = shape.num_kv_heads
    if max(kv_heads, tp_size) % min(kv_heads, tp_size):
        raise UsageError(
            f"tp_size {tp_size} neither divides the model's {kv_heads} key and value heads nor is a"
            " multiple of them",
            hint=f"choose one that divides {kv_heads}, or a multiple of it",
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
