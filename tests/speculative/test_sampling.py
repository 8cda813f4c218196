"""Weights are compared with a simple reference, draws and races with their exact distribution."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chisquare

from toolkit.interfaces import Sampling
from toolkit.speculative.sampling import (
    NOT_FINITE,
    ExponentialRace,
    Penalties,
    are_finite,
    argmax,
    draw,
    log_probability,
    weights,
)


def reference(logits: np.ndarray[Any, Any], sampling: Sampling) -> np.ndarray[Any, Any]:
    """Probabilities by the definition, token by token: a token stays if fewer than top_k tokens are
    better, and if the better ones together have less than top_p."""
    out = np.zeros_like(logits)
    for row, target in zip(logits, out, strict=True):
        scaled = np.exp((row - row.max()) / sampling.temperature)
        kept = [sampling.top_k == 0 or (row > logit).sum() < sampling.top_k for logit in row]
        scaled = np.where(kept, scaled, 0.0)
        share = scaled / scaled.sum()
        inside = [share[share > token_share].sum() < sampling.top_p for token_share in share]
        target[:] = np.where(inside, share, 0.0)
        target /= target.sum()
    return out


@given(
    seed=st.integers(0, 10_000),
    vocab=st.sampled_from([3, 17, 300]),
    temperature=st.sampled_from([0.2, 0.8, 1.0, 5.0]),
    top_k=st.sampled_from([0, 1, 2, 40, 500]),
    top_p=st.sampled_from([0.05, 0.5, 0.9, 0.999, 1.0]),
)
def test_weights_are_those_of_the_definition(
    seed: int, vocab: int, temperature: float, top_k: int, top_p: float
) -> None:
    logits = np.random.default_rng(seed).normal(scale=2.0, size=(3, vocab))
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p)
    actual = weights(logits, sampling)
    assert actual.max(axis=-1) == pytest.approx(1.0)
    np.testing.assert_allclose(
        actual / actual.sum(axis=-1, keepdims=True), reference(logits, sampling), atol=1e-12
    )


def by_full_sort(logits: np.ndarray[Any, Any], sampling: Sampling) -> np.ndarray[Any, Any]:
    """The filters in the order of their words, on every row sorted whole."""
    out = logits - logits.max(axis=-1, keepdims=True)
    out = np.exp(out / out.dtype.type(sampling.temperature))
    for row in out:
        falling = np.sort(row)[::-1][: sampling.top_k or None]
        total = (falling if sampling.top_k else row).sum(dtype=np.float64)
        last = (falling.cumsum(dtype=np.float64) < sampling.top_p * total).sum()
        row[row < falling[min(last, len(falling) - 1)]] = 0
    return out


ROWS: dict[str, Callable[[np.random.Generator, int], np.ndarray[Any, Any]]] = {
    "peaked": lambda rng, vocab: rng.normal(scale=6.0, size=vocab),
    "wide": lambda rng, vocab: rng.normal(scale=2.0, size=vocab),
    "flat": lambda rng, vocab: rng.normal(scale=0.1, size=vocab),
    "full of ties": lambda rng, vocab: rng.normal(scale=2.0, size=vocab).round(1),
    "two numbers": lambda rng, vocab: rng.choice([0.0, -1.0], size=vocab),
    "one number": lambda rng, vocab: np.zeros(vocab),
    "sorted": lambda rng, vocab: np.sort(rng.normal(size=vocab)),
}


@pytest.mark.parametrize("kind", ROWS)
@pytest.mark.parametrize("vocab", [1000, 32_003, 128_256])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize(
    ("top_k", "top_p"), [(50, 1.0), (0, 0.9), (0, 0.9999), (50, 0.9), (300, 0.99), (5000, 0.95)]
)
def test_preselection_keeps_the_very_tokens_that_a_full_sort_keeps(
    kind: str, vocab: int, dtype: type, top_k: int, top_p: float
) -> None:
    logits = ROWS[kind](np.random.default_rng(vocab), vocab).astype(dtype)[None]
    sampling = Sampling(temperature=0.8, top_k=top_k if top_k < vocab else 0, top_p=top_p)
    np.testing.assert_array_equal(weights(logits, sampling), by_full_sort(logits, sampling))


@pytest.mark.parametrize("share", [0.5, 0.25])
def test_a_cut_that_rounding_decides_is_that_of_the_full_sort(share: float) -> None:
    """The nucleus is full at the very edge between two numbers."""
    logits = np.repeat(np.log([[1.0, 0.5, 0.25]]), [8192, 16_384, 32_768], axis=1)
    edge = Sampling(temperature=1.0, top_p=8192 / (3 * 8192) + (0.5 - share) * 4 / 3)
    np.testing.assert_array_equal(weights(logits, edge), by_full_sort(logits, edge))


@pytest.mark.parametrize(("top_k", "top_p"), [(50, 1.0), (0, 0.9), (50, 0.9)])
def test_rows_that_are_no_numbers_reach_the_draw_that_refuses_them(
    top_k: int, top_p: float
) -> None:
    logits = np.zeros((1, 32_000))
    logits[0, 7] = math.nan
    with pytest.raises(ValueError, match="not finite"):
        draw(weights(logits, Sampling(temperature=1.0, top_k=top_k, top_p=top_p))[0], 0.5)


def test_a_tiny_temperature_leaves_the_best_token_without_a_warning() -> None:
    actual = weights(np.array([[1.0, 3.0, 2.0]], dtype=np.float32), Sampling(temperature=1e-38))
    np.testing.assert_array_equal(actual, [[0.0, 1.0, 0.0]])


def test_weights_leave_the_logits_as_they_were() -> None:
    logits = np.array([[1.0, 3.0, 2.0]])
    weights(logits, Sampling(temperature=0.5, top_k=1, top_p=0.5))
    np.testing.assert_array_equal(logits, [[1.0, 3.0, 2.0]])


def test_ties_go_to_the_lowest_id() -> None:
    logits = torch.tensor([[0.0, 2.0, 2.0, 1.0], [3.0, 3.0, 3.0, 3.0]])
    assert argmax(logits) == [1, 0]


def test_draw_inverts_the_cumulative_distribution_and_never_takes_a_token_of_weight_zero() -> None:
    weight = np.array([0.0, 1.0, 0.0, 2.0, 1.0, 0.0], dtype=np.float32)
    assert [
        draw(weight, u) for u in (0.0, 0.2499, 0.25, 0.7499, 0.75, math.nextafter(1.0, 0.0))
    ] == [1, 1, 3, 3, 4, 4]


@given(
    st.lists(st.sampled_from([0.0, 0.25, 1.0, 3.0]), min_size=1, max_size=200).filter(any),
    st.floats(0, 1, exclude_max=True),
    st.sampled_from([np.float32, np.float64]),
)
def test_draw_by_blocks_is_the_search_through_one_cumulative_sum(
    weight: list[float], uniform: float, dtype: type
) -> None:
    """The sums of these weights are exact in either dtype, so both must find the same token, also
    at the edges of blocks.
    """
    row = np.array(weight, dtype=dtype)
    cumulative = row.cumsum(dtype=np.float64)
    assert draw(row, uniform) == cumulative.searchsorted(uniform * cumulative[-1], side="right")


@pytest.mark.parametrize("seed", range(20))
def test_draw_takes_a_token_of_positive_weight_however_the_sums_are_rounded(seed: int) -> None:
    rng = np.random.default_rng(seed)
    row = np.exp(rng.normal(scale=6.0, size=1000)).astype(np.float32)
    row[rng.random(1000) < 0.5] = 0.0
    ends = np.nextafter(
        np.add.reduceat(row, np.arange(0, 1000, 64)).cumsum(dtype=np.float64)
        / row.sum(dtype=np.float64),
        0.0,
    )
    for uniform in [*ends.clip(0.0, np.nextafter(1.0, 0.0)), *rng.random(200)]:
        assert row[draw(row, float(uniform))] > 0.0


def test_penalties_count_the_output_and_inside_a_block_the_drafts_before_a_position() -> None:
    penalties = Penalties(Sampling(frequency_penalty=0.5, presence_penalty=2.0), vocab_size=4)
    for token in (1, 1):
        penalties.note(token)
    rows = penalties.apply(np.zeros((3, 4)), [2, 1], first=0)
    np.testing.assert_array_equal(rows, [[0, -3.0, 0, 0], [0, -3.0, -2.5, 0], [0, -3.5, -2.5, 0]])
    as_the_draft_sees_it = penalties.apply(np.zeros((1, 4)), [2, 1], first=2)
    np.testing.assert_array_equal(as_the_draft_sees_it, rows[2:])


def test_noise_depends_on_seed_and_position_and_on_nothing_else() -> None:
    weight = np.ones(1000)
    race, again = ExponentialRace(5, 1000), ExponentialRace(5, 1000)
    forwards = [race.winner(weight, position) for position in range(8)]
    backwards = [again.winner(weight, position) for position in reversed(range(8))]
    assert forwards == backwards[::-1]
    race.forget_before(8)
    assert [race.winner(weight, position) for position in range(8)] == forwards
    assert len(set(forwards)) > 4
    assert [ExponentialRace(6, 1000).winner(weight, position) for position in range(8)] != forwards
    assert ExponentialRace(-5, 1000).winner(weight, 0) == ExponentialRace(2**64 - 5, 1000).winner(
        weight, 0
    )


def test_races_are_won_in_proportion_to_the_weights() -> None:
    weight = np.array([4.0, 1.0, 0.0, 2.0, 3.0])
    race, counts = ExponentialRace(3, 5), np.zeros(5)
    for position in range(4000):
        counts[race.winner(weight, position)] += 1
    assert counts[2] == 0
    assert chisquare(counts[weight > 0], 400 * weight[weight > 0]).pvalue > 1e-3


def test_noise_is_fast_enough_for_a_large_vocabulary() -> None:
    weight = np.ones(128_256, dtype=np.float32)
    race, spans = ExponentialRace(3, 128_256), []
    for position in range(5):
        start = time.perf_counter()
        race.winner(weight, position)
        spans.append(time.perf_counter() - start)
    # It takes 1.5 ms on an idle core. The bound only catches another order of magnitude.
    assert min(spans) < 0.05


def test_log_probability_is_that_of_the_softmax() -> None:
    logits = np.random.default_rng(0).normal(scale=5, size=50)
    expected = torch.log_softmax(torch.from_numpy(logits), -1)
    assert [log_probability(logits, token) for token in range(50)] == pytest.approx(
        expected.tolist()
    )


@pytest.mark.parametrize("fault", [math.nan, math.inf])
def test_the_best_token_of_a_row_that_is_not_finite_is_none(fault: float) -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0], [0.0, 2.0, 1.0], [-math.inf, 3.0, 3.0], [0.0] * 3])
    logits[1, 2] = fault
    assert argmax(logits) == [1, NOT_FINITE, 1, 0]

    class OnCuda(torch.Tensor):
        is_cuda = True  # the same arithmetic without NumPy, here on the CPU

    assert argmax(logits.as_subclass(OnCuda)) == [1, NOT_FINITE, 1, 0]
    rows = logits[:2].numpy()
    assert are_finite(rows, [2, 1])
    assert not are_finite(rows, [2, 2])


def test_a_race_of_weights_that_are_not_numbers_has_no_winner() -> None:
    with pytest.raises(ValueError, match="not finite"):
        ExponentialRace(1, 3).winner(np.array([1.0, math.nan, 0.5]), 0)
