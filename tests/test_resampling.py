from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolkit.resampling import (
    bootstrap_percentile_ratios,
    bootstrap_percentiles,
    bootstrap_ratio,
    bootstrap_ratio_of_sums,
    bootstrap_unpaired_ratio,
    percentile,
    samples_needed,
)

VALUES = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=50)


@given(VALUES, st.floats(0, 100))
def test_percentile_agrees_with_numpy(values: list[float], q: float) -> None:
    assert percentile(values, q) == np.percentile(values, q)


@given(
    st.lists(st.tuples(st.floats(0, 1e3), st.integers(1, 6)), min_size=1, max_size=30),
    st.floats(0, 100),
)
def test_weighted_percentile_is_that_of_the_repeated_values(
    pairs: list[tuple[float, int]], q: float
) -> None:
    repeated = [value for value, weight in pairs for _ in range(weight)]
    assert percentile([v for v, _ in pairs], q, [w for _, w in pairs]) == pytest.approx(
        np.percentile(repeated, q)
    )


@pytest.mark.parametrize(("q", "needed"), [(50, 20), (90, 100), (99, 1000)])
def test_percentile_needs_ten_samples_beyond_it(q: int, needed: int) -> None:
    assert samples_needed(q) == needed


def test_ratio_without_noise_has_no_width() -> None:
    tokens = np.full((3, 10), 64.0)
    estimate, low, high = bootstrap_ratio((tokens, tokens), (tokens * 1.0, tokens * 2.0))
    assert (estimate, low, high) == (2.0, 2.0, 2.0)


def test_ratio_is_of_sums_and_repeatable() -> None:
    generator = np.random.default_rng(0)
    tokens = generator.integers(1, 64, size=(2, 2, 12)).astype(float)
    times = generator.uniform(0.1, 1.0, size=(2, 2, 12))
    first = bootstrap_ratio((tokens[0], tokens[1]), (times[0], times[1]), seed=3)
    assert first[0] == pytest.approx(
        tokens[0].sum() / times[0].sum() / (tokens[1].sum() / times[1].sum())
    )
    assert first[1] < first[0] < first[2]
    assert first == bootstrap_ratio((tokens[0], tokens[1]), (times[0], times[1]), seed=3)


def test_a_draw_of_nothing_but_failed_prompts_is_left_out() -> None:
    """Of three prompts one failed, which counts as no tokens in no time: one draw in 27 has
    nothing to divide.
    """
    tokens, times = np.array([[0.0, 64.0, 64.0]]), np.array([[0.0, 1.0, 2.0]])
    estimate, low, high = bootstrap_ratio((tokens, tokens), (times, 2 * times))
    assert (estimate, low, high) == (2.0, 2.0, 2.0)


def test_an_answer_without_tokens_costs_an_interval_nothing_but_its_rarest_draws() -> None:
    """One of four prompts gave no token plainly: one draw in 256 is of that prompt alone, and
    infinite.
    """
    tokens = np.full((2, 1, 4), 64.0)
    tokens[1, 0, 0] = 0.0
    estimate, low, high = bootstrap_ratio(
        (tokens[0], tokens[1]), (np.ones((1, 4)), np.ones((1, 4)))
    )
    assert 1.0 <= low <= estimate == pytest.approx(4 / 3)
    assert np.isfinite(high)


def test_a_ratio_of_sums_is_of_pairs_whether_in_one_round_or_in_many() -> None:
    """Arms that differ by a factor alone have that ratio without spread; a round more without
    news changes nothing.
    """
    times = np.random.default_rng(4).lognormal(0, 1, size=12)
    assert bootstrap_ratio_of_sums(1.5 * times, times) == pytest.approx((1.5, 1.5, 1.5))
    counts = np.arange(1.0, 13.0)
    assert bootstrap_ratio_of_sums(times, counts) == bootstrap_ratio_of_sums([times], [counts])
    assert bootstrap_ratio_of_sums(times[:0], counts[:0]) == pytest.approx(
        (np.nan,) * 3, nan_ok=True
    )


def test_a_ratio_of_sums_is_as_uncertain_as_its_rounds_are() -> None:
    """Two rounds of which one was three times slower for one arm alone: every prompt agrees, the
    rounds do not.
    """
    times = np.ones((2, 30))
    slow = times * [[1.0], [3.0]]
    assert bootstrap_ratio_of_sums(slow, times) == pytest.approx((2.0, 1.0, 3.0))


def test_arms_that_share_nothing_are_drawn_on_their_own() -> None:
    """What both have in common cancels when paired, and not otherwise."""
    times = np.random.default_rng(4).lognormal(0, 1, size=(1, 40))
    tokens = np.full((1, 40), 64.0)
    paired = bootstrap_ratio((tokens, tokens), (times, 2 * times))
    alone = bootstrap_unpaired_ratio((tokens[0], tokens[0, :30]), (times[0], 2 * times[0, :30]))
    assert paired == pytest.approx((2.0, 2.0, 2.0))
    assert alone[1] < 1.6 and alone[2] > 2.4


def test_ratio_interval_covers_the_truth_about_as_often_as_it_says() -> None:
    """Paired prompts with effects of prompt and round; the crossed bootstrap is conservative, so
    coverage may exceed 95 %.
    """
    generator = np.random.default_rng(1)
    covered, trials, truth = 0, 120, 1.5
    for _ in range(trials):
        base = generator.lognormal(
            0.0, 0.4, size=(1, 24)
        )  # how long a prompt's text takes, in both arms
        plain = base * generator.lognormal(0.0, 0.1, size=(3, 24))
        # exp(sigma^2 / 2) of both noises is the same, so the ratio of the means is the truth
        speculative = base / truth * generator.lognormal(0.0, 0.1, size=(3, 24))
        tokens = np.full((3, 24), 64.0)
        _, low, high = bootstrap_ratio((tokens, tokens), (speculative, plain))
        covered += low <= truth <= high
    assert covered / trials >= 0.88


def test_percentile_interval_covers_the_truth_about_as_often_as_it_says() -> None:
    generator = np.random.default_rng(2)
    covered, trials = 0, 100
    truth = -np.log(0.1)  # p90 of the unit exponential
    for _ in range(trials):
        clusters = generator.exponential(size=(100, 3)).tolist()
        ((low, high),) = bootstrap_percentiles(clusters, (90,))
        covered += low <= truth <= high
    assert covered / trials >= 0.86


def test_percentile_interval_resamples_whole_prompts() -> None:
    """Ten prompts whose samples are all alike carry ten samples' worth of evidence, however
    often they were measured.
    """
    generator = np.random.default_rng(3)
    level = generator.exponential(size=40)
    (alike,) = bootstrap_percentiles([[value] * 20 for value in level], (90,))
    (independent,) = bootstrap_percentiles(
        [generator.exponential(size=20).tolist() for _ in level], (90,)
    )
    assert alike[1] - alike[0] > 2 * (independent[1] - independent[0])


def test_percentile_interval_with_weights_is_that_of_repeated_values() -> None:
    clusters = [[1.0, 5.0], [2.0], [7.0, 3.0], [4.0]]
    weights = [[3, 1], [2], [1, 4], [2]]
    repeated = [
        [v for v, w in zip(c, ws, strict=True) for _ in range(w)]
        for c, ws in zip(clusters, weights, strict=True)
    ]
    assert bootstrap_percentiles(clusters, (50,), weights) == bootstrap_percentiles(repeated, (50,))


def crossed(values: np.ndarray) -> list[list[list[tuple[float, int]]]]:
    """[round, prompt] numbers as samples of one each."""
    return [[[(float(value), 1)] for value in row] for row in values]


def test_paired_percentile_ratios_lose_what_both_arms_share() -> None:
    """Arms that differ by a factor alone have that ratio without spread, however much prompts
    differ; unpaired it spreads.
    """
    hard = np.random.default_rng(0).lognormal(2, 1, size=(3, 40))
    (paired,) = bootstrap_percentile_ratios(crossed(1.5 * hard), crossed(hard), (50,))
    (unpaired,) = bootstrap_percentile_ratios(
        crossed(1.5 * hard), crossed(hard), (50,), paired=False
    )
    assert paired == pytest.approx((1.5, 1.5))
    assert unpaired[0] < 1.3 and unpaired[1] > 1.7


def test_percentile_ratio_intervals_cover_the_truth() -> None:
    """200 experiments with a true ratio of the medians of 1.2: a 95 % interval misses at most
    about one in ten.
    """
    generator = np.random.default_rng(7)
    hits = 0
    for seed in range(200):
        prompts, rounds = (
            generator.lognormal(0, 0.5, size=(1, 40)),
            generator.lognormal(0, 0.05, size=(3, 1)),
        )
        noise = generator.lognormal(0, 0.1, size=(2, 3, 40))
        first, second = 1.2 * prompts * rounds * noise[0], prompts * rounds * noise[1]
        ((low, high),) = bootstrap_percentile_ratios(
            crossed(first), crossed(second), (50,), seed=seed
        )
        hits += low <= 1.2 <= high
    assert hits >= 180


def test_arms_of_different_shape_are_not_paired() -> None:
    with pytest.raises(ValueError, match="cannot be paired"):
        bootstrap_percentile_ratios(crossed(np.ones((2, 3))), crossed(np.ones((2, 4))), (50,))


def test_percentiles_at_once_are_those_one_by_one() -> None:
    clusters = [list(row) for row in np.random.default_rng(1).exponential(size=(30, 5))]
    together = bootstrap_percentiles(clusters, (50, 90), seed=4)
    assert together == tuple(bootstrap_percentiles(clusters, (q,), seed=4)[0] for q in (50, 90))
