"""The tests of sampled tokens: their null by simulation, their power as stated, and that they
see what they are for.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import binom, chi2, kstest

from toolkit.interfaces import Sampling
from toolkit.speculative.sampling import weights
from toolkit.validate import distribution
from toolkit.validate.sampled import TESTS

DRAWS = 10_000
ALPHA = 1e-3 / TESTS


def contexts(count: int, vocab: int, seed: int = 0, sharpness: float = 2.0) -> np.ndarray:
    """Next-token distributions of several places, some flat and some nearly certain."""
    generator = np.random.default_rng(seed)
    logits = generator.normal(size=(count, vocab)) * generator.uniform(
        0.1, sharpness, size=(count, 1)
    )
    return distribution.probabilities(logits, 1.0)


def table(probs: np.ndarray, order: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(where every token's stretch begins, how wide it is), by `places` itself."""
    rows, tokens = (np.ravel(a) for a in np.indices(probs.shape))
    begin = distribution.places(probs[rows], tokens, order[rows], np.zeros(len(rows)))
    end = distribution.places(probs[rows], tokens, order[rows], np.ones(len(rows)))
    return begin.reshape(probs.shape), (end - begin).reshape(probs.shape)


def drawn(probs: np.ndarray, size: tuple[int, int], generator: np.random.Generator) -> np.ndarray:
    """[draws, places] tokens; place j is drawn from row j modulo the number of rows."""
    rows = np.arange(size[1]) % len(probs)
    cumulative = np.cumsum(probs, axis=1)[rows]
    cumulative[:, -1] = 1.0
    return (generator.random((*size, 1)) > cumulative[None]).sum(axis=-1)


def g_statistics(points: np.ndarray) -> np.ndarray:
    """G of every row, as g_test computes it one by one."""
    bins = np.minimum((points * distribution.BINS).astype(int), distribution.BINS - 1)
    counts = np.stack([(bins == number).sum(axis=1) for number in range(distribution.BINS)], axis=1)
    expected = points.shape[1] / distribution.BINS
    with np.errstate(divide="ignore", invalid="ignore"):
        return 2 * np.where(counts > 0, counts * np.log(counts / expected), 0.0).sum(axis=1)


def at_most(events: int, trials: int, rate: float) -> bool:
    """Whether so many events are no surprise at that rate (P above 1e-4)."""
    return bool(binom.sf(events - 1, trials, rate) > 1e-4)


@settings(max_examples=50, deadline=None)
@given(
    st.integers(0, 10_000),
    st.sampled_from([0, 1, 3, 40]),
    st.sampled_from([0.1, 0.6, 0.95, 1.0]),
    st.floats(0.3, 2.0),
)
def test_probabilities_are_those_of_the_runtimes_sampler(
    seed: int, top_k: int, top_p: float, temperature: float
) -> None:
    """Two implementations that share nothing."""
    logits = np.random.default_rng(seed).normal(size=(4, 40)) * 3
    found = distribution.probabilities(logits, temperature, top_k, top_p)
    rows = weights(logits, Sampling(temperature=temperature, top_k=top_k, top_p=top_p))
    assert found == pytest.approx(rows / rows.sum(axis=-1, keepdims=True), abs=1e-12)


@pytest.mark.parametrize("order", ["probability", "draft"])
def test_points_of_true_tokens_are_uniform_whatever_the_order(order: str) -> None:
    probs, other = contexts(60, 30), contexts(60, 30, seed=1)
    ranks = probs if order == "probability" else other / probs
    tokens = drawn(probs, (1, 30_000), np.random.default_rng(2))[0]
    rows = np.arange(30_000) % 60
    points = distribution.places(
        probs[rows], tokens, ranks[rows], np.random.default_rng(3).random(30_000)
    )
    assert kstest(points, "uniform").pvalue > 1e-3


def test_ten_thousand_sound_runs_raise_no_more_false_alarms_than_stated() -> None:
    """Every pooled test of a run, on shared tokens, adjusted as a run does; the chance is stated
    over all of them together.
    """
    generator = np.random.default_rng(4)
    probs, other = contexts(50, 24), contexts(50, 24, seed=1)
    tables = [table(probs, probs), table(probs, other / probs)]
    rows = np.arange(600) % 50
    p_values = []
    for _ in range(TESTS - 2):
        tokens = np.concatenate([drawn(probs, (500, 600), generator) for _ in range(DRAWS // 500)])
        for begin, width in tables if not p_values else tables[:1]:
            points = begin[rows, tokens] + generator.random(tokens.shape) * width[rows, tokens]
            p_values.append(chi2.sf(g_statistics(points), distribution.BINS - 1))
    p_values.append(
        generator.random(DRAWS)
    )  # the permutation test, whose null is had by permuting, stands in as itself
    every = np.stack(p_values)
    assert distribution.g_test(points[0])[1] == pytest.approx(every[-2][0])
    for level in (0.05, 0.01, 1e-3):
        assert at_most(int((every[0] <= level).sum()), DRAWS, 1.15 * level)
        alarms = sum(min(distribution.holm(column)) <= level for column in every.T.tolist())
        assert at_most(alarms, DRAWS, 1.15 * level)


def test_ten_thousand_permutation_tests_of_sound_texts_keep_their_level() -> None:
    generator = np.random.default_rng(5)
    probs = contexts(6, 12)
    texts = drawn(probs, (DRAWS * 12, 6), generator).tolist()
    p_values = []
    for number in range(DRAWS):
        both = texts[number * 12 : number * 12 + 12]
        p_values.append(
            distribution.continuation_test([(both[:6], both[6:])], generator, permutations=99)[1]
        )
    for level in (0.2, 0.05, 0.02):
        assert at_most(int((np.asarray(p_values) <= level).sum()), DRAWS, level)


@pytest.mark.parametrize("effect", [0.05, 0.1])
def test_power_is_at_least_as_stated_against_the_hardest_shift(effect: float) -> None:
    """Alternate bins gain and lose: spread evenly, as the sample size assumes."""
    generator = np.random.default_rng(6)
    count = distribution.tokens_needed(effect, ALPHA, 0.9)
    shares = (1 + 2 * effect * (-1.0) ** np.arange(distribution.BINS)) / distribution.BINS
    assert np.abs(shares - 1 / distribution.BINS).sum() / 2 == pytest.approx(effect)
    points = (
        generator.choice(distribution.BINS, p=shares, size=(400, count))
        + generator.random((400, count))
    ) / distribution.BINS
    seen = (chi2.sf(g_statistics(points), distribution.BINS - 1) <= ALPHA).sum()
    assert binom.cdf(seen, 400, 0.9) > 1e-4
    assert distribution.detectable(count, ALPHA, 0.9) == pytest.approx(effect, rel=1e-3)


def test_the_control_shifts_the_bins_by_the_stated_variation_and_is_rejected() -> None:
    generator = np.random.default_rng(7)
    points, biased = generator.random(8_000), generator.random(8_000) * 0.4
    control = distribution.tilt(points, biased, 0.1, generator)
    assert control is not None
    assert control[1] == pytest.approx(0.1 / 0.6, rel=0.1)
    assert distribution.variation(control[0]) == pytest.approx(0.1, abs=0.02)
    assert distribution.g_test(control[0])[1] < ALPHA < distribution.g_test(points)[1]
    assert distribution.lean(control[0]) > 5
    assert distribution.tilt(points, biased, 0.7, generator) is None


def test_texts_of_which_a_share_is_one_and_the_same_are_rejected() -> None:
    generator = np.random.default_rng(8)
    probs = contexts(30, 40)
    arms = [tuple(drawn(probs, (16, 30), generator).tolist() for _ in range(2)) for _ in range(3)]
    assert distribution.continuation_test(arms, generator)[1] > 1e-3
    tilted = [
        (one, [other[0] if number < 7 else text for number, text in enumerate(other)])
        for one, other in arms
    ]
    assert distribution.continuation_test(tilted, generator)[1] < ALPHA


@given(st.lists(st.floats(0, 1), min_size=1, max_size=8))
def test_adjusted_p_values_lie_between_plain_and_bonferroni_and_keep_their_order(
    p_values: list[float],
) -> None:
    adjusted = distribution.holm(p_values)
    assert min(adjusted) == pytest.approx(min(1.0, len(p_values) * min(p_values)))
    for one, other in zip(p_values, adjusted, strict=True):
        assert one <= other <= min(1.0, len(p_values) * one) + 1e-12 or other <= 1.0
    ordered = [adjusted[i] for i in sorted(range(len(p_values)), key=lambda i: p_values[i])]
    assert ordered == sorted(ordered)
