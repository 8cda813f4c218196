"""Ranks partition a model: every layer, head, column and row is on exactly one rank."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolkit.checkpoints.shape import ModelShape
from toolkit.errors import UsageError
from toolkit.quantize.partition import Ranks, partition

SHAPE = ModelShape(
    architecture="LlamaForCausalLM",
    vocab_size=128256,
    hidden_size=8192,
    intermediate_size=28672,
    num_layers=80,
    num_heads=64,
    num_kv_heads=8,
    head_dim=128,
    max_position_embeddings=131072,
    rms_norm_eps=1e-5,
    rope_theta=500000.0,
    rope_scaling=None,
    tie_word_embeddings=False,
    qkv_bias=False,
    o_bias=False,
    mlp_bias=False,
    qk_norm=False,
    sliding_window=None,
    dtype="bfloat16",
    bos_token_id=None,
    eos_token_ids=(),
)


def rows(part: slice) -> list[int]:
    return list(range(part.start, part.stop))


@given(
    tp_size=st.integers(1, 8),
    pp_size=st.integers(1, 4),
    layers=st.integers(1, 4),
    heads=st.integers(1, 3),
    kv=st.sampled_from(["fewer", "equal", "more"]),
    head_dim=st.sampled_from([2, 4]),
    mlp=st.integers(1, 4),
    vocab=st.integers(8, 60),
)
def test_everything_is_held_once(
    tp_size: int,
    pp_size: int,
    layers: int,
    heads: int,
    kv: str,
    head_dim: int,
    mlp: int,
    vocab: int,
) -> None:
    kv_heads = {"fewer": 1, "equal": tp_size, "more": 2 * tp_size}[kv]
    shape = replace(
        SHAPE,
        num_layers=layers * pp_size,
        num_heads=2 * heads * tp_size,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=mlp * tp_size,
        vocab_size=vocab,
    )
    parts = partition(shape, Ranks(tp_size, pp_size))
    assert [part.rank for part in parts] == list(range(tp_size * pp_size))
    stages = [parts[start : start + tp_size] for start in range(0, len(parts), tp_size)]
    assert [layer for stage in stages for layer in stage[0].layers] == list(range(shape.num_layers))
    assert [stage[0].first for stage in stages] == [True] + [False] * (pp_size - 1)
    assert [stage[0].last for stage in stages] == [False] * (pp_size - 1) + [True]
    for stage in stages:
        assert len({part.layers for part in stage}) == 1
        assert [row for part in stage for row in rows(part.q)] == list(
            range(shape.num_heads * head_dim)
        )
        assert [row for part in stage for row in rows(part.mlp)] == list(
            range(shape.intermediate_size)
        )
        held = [row for part in stage for row in rows(part.vocab)]
        assert held == list(range(len(held)))
        assert vocab <= len(held) < vocab + tp_size
        copies = max(1, tp_size // kv_heads)
        assert sorted(row for part in stage for row in rows(part.kv)) == sorted(
            list(range(kv_heads * head_dim)) * copies
        )
        for tp_rank, part in enumerate(stage):  # a query head finds its key head on its own rank
            group = shape.num_heads // kv_heads
            needed = {head // group for head in {row // head_dim for row in rows(part.q)}}
            assert needed == {row // head_dim for row in rows(part.kv)}, tp_rank


@pytest.mark.parametrize(
    ("ranks", "change", "message"),
    [
        (Ranks(3, 1), {}, "tp_size 3 does not divide the model's 64 attention heads"),
        (Ranks(1, 3), {}, "pp_size 3 does not divide the model's 80 layers"),
        (
            Ranks(2, 1),
            {"intermediate_size": 27},
            "tp_size 2 does not divide the model's 27 MLP columns",
        ),
        (
            Ranks(4, 1),
            {"num_kv_heads": 6},
            "tp_size 4 is neither a divisor nor a multiple of 6, the model's number of key and",
        ),
    ],
)
def test_what_cannot_be_divided_is_refused(
    ranks: Ranks, change: dict[str, int], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        partition(replace(SHAPE, **change), ranks)  # type: ignore[arg-type]
