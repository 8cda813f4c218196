"""Bets against 'the candidate is not worse'."""

from __future__ import annotations

import itertools
import math
import random
from typing import Any

import pytest

from tests.support.rollouts import Candidate, played
from toolkit.client import Statistics
from toolkit.config.schema import RolloutConfig
from toolkit.gateway.evidence import (
    LEAST_FIGURES,
    TIMES,
    Copy,
    Evidence,
    Figures,
    Observation,
    Texts,
    lot,
)


def evidence(**settings: Any) -> Evidence:
    return Evidence(RolloutConfig(**settings))


def wealth(seen: Evidence, test: str) -> float:
    return next(finding.wealth for finding in seen.findings() if finding.test == test)


def seen_by(arm: bool, share: float, **figures: Any) -> Observation:
    return Observation(arm, share, figures.pop("is_error", False), **figures)


@pytest.mark.parametrize("share", [0.01, 0.25, 0.5, 0.9])
@pytest.mark.parametrize("ratio", [0.001, 0.5, 1.0, 3.0, 200.0])
def test_the_lot_is_a_fair_bet(share: float, ratio: float) -> None:
    expected = share * lot(True, share, ratio) + (1 - share) * lot(False, share, ratio)
    assert math.isclose(expected, 1.0, rel_tol=1e-12)


@pytest.mark.parametrize("is_by_position", [True, False])
def test_the_wealth_of_an_equal_candidate_is_fair_over_all_lots(is_by_position: bool) -> None:
    """By enumeration: the figures are given, the arms are drawn. No margin, so that the candidate
    is exactly at the limit of what is allowed.
    """
    share, generator = 0.3, random.Random(3)
    warm = [generator.lognormvariate(3, 1) for _ in range(LEAST_FIGURES)]
    figures = [generator.lognormvariate(3, 1) for _ in range(7)]
    expected = dict.fromkeys(("errors", "ttft", "time per token", "acceptance"), 0.0)
    for arms in itertools.product((True, False), repeat=len(figures)):
        seen = evidence(max_slowdown=1.0, max_acceptance_loss=0.0)
        for figure in warm:
            told = {"alpha": figure % 0.8} if is_by_position else {}
            seen.add(seen_by(False, share, ttft_ms=figure, token_ms=figure, acceptance=0.5, **told))
        for number, (arm, figure) in enumerate(zip(arms, figures, strict=True)):
            seen.add(
                seen_by(
                    arm,
                    share,
                    is_error=number % 3 == 0,
                    ttft_ms=figure,
                    token_ms=2 * figure,
                    acceptance=figure % 1,
                    **({"alpha": figure % 0.9} if is_by_position else {}),
                )
            )
        chance = math.prod(share if arm else 1 - share for arm in arms)
        for name in expected:
            expected[name] += chance * wealth(seen, name)
    assert expected == pytest.approx(dict.fromkeys(expected, 1.0))


@pytest.mark.parametrize("name", ["ttft_ms", "token_ms", "acceptance"])
def test_a_candidate_that_never_shows_a_figure_loses_no_bet_with_the_baseline_s(name: str) -> None:
    seen, generator = evidence(), random.Random(2)
    for _ in range(5000):
        is_candidate = generator.random() < 0.5
        figures = {} if is_candidate else {name: generator.random()}
        seen.add(seen_by(is_candidate, 0.5, **figures))
    assert [finding.wealth for finding in seen.findings()] == [1.0] * 6


def test_texts_are_bet_on_fairly_at_the_allowed_rate() -> None:
    allowed = 0.2
    expected = 0.0
    for answers in itertools.product((True, False), repeat=8):
        seen = evidence(max_divergence_rate=allowed)
        for are_equal in answers:
            seen.add_texts(Texts(are_equal))
        chance = math.prod(1 - allowed if equal else allowed for equal in answers)
        expected += chance * wealth(seen, "texts")
    assert expected == pytest.approx(1.0)


def test_copies_are_bet_on_fairly_where_either_arm_fails_as_often() -> None:
    expected = 0.0
    for failed in itertools.product((True, False), repeat=8):
        seen = evidence()
        for is_candidate in failed:
            seen.add_copy(Copy(is_candidate))
        expected += 0.5**8 * wealth(seen, "copies")
    assert expected == pytest.approx(1.0)


def test_a_finding_counts_the_candidate_s_requests_that_were_judged() -> None:
    seen = evidence()
    for number in range(60):
        seen.add(seen_by(number % 2 == 0, 0.5, ttft_ms=5.0))
    counts = {finding.test: finding.requests for finding in seen.findings()}
    assert counts["errors"] == 30
    assert counts["ttft"] == 10  # the first of them that has 20 of the baseline's before it, on
    assert counts["acceptance"] == counts["texts"] == counts["copies"] == 0


def by_position(generator: random.Random, chance: float, draft_len: int) -> dict[str, float]:
    """The figures of a request of ten blocks."""
    drafted_at, accepted_at = [10] * draft_len, [0] * draft_len
    for _ in range(10):
        for place in range(draft_len):
            if generator.random() >= chance:
                break
            accepted_at[place] += 1
    counted = Statistics(
        drafted=sum(drafted_at),
        accepted=sum(accepted_at),
        drafted_by_position=tuple(drafted_at),
        accepted_by_position=tuple(accepted_at),
    )
    rate, alpha = counted.acceptance_rate, counted.acceptance_alpha
    assert rate is not None and alpha is not None
    return {"acceptance": rate, "alpha": alpha}


@pytest.mark.parametrize(("told", "is_worse"), [("both", False), ("neither", True), ("one", True)])
def test_longer_drafts_of_the_same_model_are_not_worse(told: str, is_worse: bool) -> None:
    """If one of the arms does not count by position, rates are all that can be compared."""
    generator, seen = random.Random(5), evidence()
    for _ in range(1200):
        arm = generator.random() < 0.25
        figures = by_position(generator, 0.8, 7 if arm else 3)
        if told == "neither" or (told == "one" and arm):
            del figures["alpha"]
        seen.add(seen_by(arm, 0.25, **figures))
    (finding,) = (finding for finding in seen.findings() if finding.test == "acceptance")
    assert finding.requests > 200
    assert finding.is_worse == is_worse and (is_worse or finding.wealth < 1)


def test_a_worse_model_of_longer_drafts_is_found() -> None:
    generator, seen = random.Random(5), evidence()
    for _ in range(1200):
        arm = generator.random() < 0.25
        seen.add(seen_by(arm, 0.25, **by_position(generator, *((0.6, 7) if arm else (0.8, 3)))))
    assert [finding.test for finding in seen.findings() if finding.is_worse] == ["acceptance"]


def test_a_request_without_drafts_is_no_rate_below_the_least() -> None:
    seen = evidence(min_acceptance_rate=0.6)
    for _ in range(100):
        seen.add(Observation(True, 0.5, False, acceptance=0.0, drafted=False))
    assert wealth(seen, "least acceptance") == 1.0


def test_the_least_acceptance_is_bet_on_fairly_at_its_limit() -> None:
    expected = 0.0
    for answers in itertools.product((0.0, 1.0), repeat=8):
        seen = evidence(min_acceptance_rate=0.6)
        for value in answers:
            seen.add(seen_by(True, 0.5, acceptance=value))
        chance = math.prod(0.6 if value else 0.4 for value in answers)
        expected += chance * wealth(seen, "least acceptance")
    assert expected == pytest.approx(1.0)


def traffic(seen: Evidence, count: int, fault: str | None = None, share: float = 0.25) -> int:
    """Requests until a test finds the candidate worse; `count` if none does."""
    generator = random.Random(f"{fault} {share}")
    for number in range(count):
        arm = generator.random() < share
        slower = 1.6 if arm and fault == "slower" else 1.0
        tail = 5.0 if arm and fault == "tail" and generator.random() < 0.2 else 1.0
        taken = generator.betavariate(3, 6) if arm and fault == "acceptance" else None
        figure = slower * tail * generator.lognormvariate(3, 0.4)
        seen.add(
            seen_by(
                arm,
                share,
                is_error=generator.random() < (0.1 if arm and fault == "errors" else 0.005),
                ttft_ms=figure,
                token_ms=figure,
                acceptance=generator.betavariate(6, 3) if taken is None else taken,
            )
        )
        differ = 0.3 if fault == "texts" else 0.01
        if not arm and generator.random() < 0.1:
            seen.add_texts(Texts(generator.random() >= differ))
        if any(finding.is_worse for finding in seen.findings()):
            return number
    return count


@pytest.mark.parametrize(
    ("fault", "test", "within"),
    [
        ("slower", "ttft", 400),
        ("tail", "ttft", 2000),
        ("acceptance", "acceptance", 400),
        ("errors", "errors", 1000),
        ("texts", "texts", 800),
    ],
)
def test_a_fault_is_found_and_named(fault: str, test: str, within: int) -> None:
    seen = evidence()
    assert traffic(seen, within, fault) < within
    names = {finding.test for finding in seen.findings() if finding.is_worse}
    assert test in names or (test == "ttft" and "time per token" in names)


def test_an_equal_candidate_is_left_alone() -> None:
    seen = evidence(max_slowdown=1.0, max_acceptance_loss=0.0)
    assert traffic(seen, 4000) == 4000


@pytest.mark.parametrize("seed", range(3))
def test_a_slower_candidate_that_its_idleness_hides_is_found_where_it_has_as_much_load(
    seed: int,
) -> None:
    """It takes 1.5 times as long at equal load, and less than the baseline up to a quarter of the
    sessions.
    """
    *_, state = played(Candidate(slower=1.5), RolloutConfig(), seed, load=0.6)
    assert (state.outcome, state.share) == ("rolled back", 0.0)
    assert state.why in (f"the candidate is worse: {name}" for name in TIMES)
    assert [entry["step"] for entry in state.decisions] == [1, 2, 3, 3]
    assert RolloutConfig().steps[3] == 50


def test_no_step_is_taken_while_a_test_is_suspicious() -> None:
    """A hundred sessions at equal load are not enough for this one."""
    waiting = 0
    for state in played(Candidate(slower=1.5), RolloutConfig(), 35, load=0.6):
        if state.in_step > state.settings.min_requests and state.suspected() is not None:
            waiting += 1
            assert state.outcome == "running" and not state.missing()
            assert state.summary()["suspected"] in TIMES
    assert waiting and state.outcome == "rolled back"


def test_an_equal_candidate_is_promoted_though_its_load_rises() -> None:
    *_, state = played(Candidate(), RolloutConfig(), 1, load=0.6)
    assert state.outcome == "promoted"


def test_times_are_bet_on_fairly_over_all_steps() -> None:
    """By enumeration, with a share that rises after two lots, and again after two more."""
    generator = random.Random(5)
    figures = [generator.lognormvariate(3, 1) for _ in range(6)]
    shares = (0.01, 0.01, 0.25, 0.25, 0.5, 0.5)
    expected = 0.0
    for arms in itertools.product((True, False), repeat=len(figures)):
        seen, before = evidence(max_slowdown=1.0), 0.0
        for arm, share, figure in zip(arms, shares, figures, strict=True):
            if share != before:
                for known in range(LEAST_FIGURES):
                    seen.add(seen_by(False, share, ttft_ms=20.0 + known))
                before = share
            seen.add(seen_by(arm, share, ttft_ms=figure))
        chance = math.prod(
            share if arm else 1 - share for arm, share in zip(arms, shares, strict=True)
        )
        expected += chance * wealth(seen, "ttft")
    assert expected == pytest.approx(1.0)


def test_figures_are_ranked_among_the_latest() -> None:
    figures = Figures()
    assert figures.rank(5.0) is None
    for value in range(100):
        figures.add(float(value))
    assert figures.rank(-1.0) == pytest.approx(0.5 / 101)
    assert figures.rank(50.0) == pytest.approx(51 / 101)
    assert figures.rank(1000.0) == pytest.approx(100.5 / 101)


def test_the_margin_is_the_candidate_s() -> None:
    """A candidate that is slower by less than the margin wins nothing for the bettor."""
    allowed, forbidden = evidence(max_slowdown=1.5), evidence(max_slowdown=1.0)
    for seen in (allowed, forbidden):
        generator = random.Random(7)
        for _ in range(3000):
            arm = generator.random() < 0.5
            figure = (1.4 if arm else 1.0) * generator.lognormvariate(3, 0.4)
            seen.add(seen_by(arm, 0.5, ttft_ms=figure))
    assert wealth(allowed, "ttft") < 1.0
    assert wealth(forbidden, "ttft") > 1e6


def test_a_wealth_beyond_all_numbers_stays_a_number() -> None:
    seen = evidence()
    for _ in range(5000):
        seen.add_texts(Texts(False))
    assert math.isfinite(wealth(seen, "texts"))
