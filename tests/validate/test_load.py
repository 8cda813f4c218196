"""The gates of an open loop have three outcomes, and their next steps name keys of the YAML."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.support.open_loop import load_arm, load_run
from toolkit.config.schema import LoadGates
from toolkit.records.bench import BenchPoint
from toolkit.records.load import LoadRun
from toolkit.records.measured import Gate
from toolkit.validate.load import judge_load, load_findings

LIMITS: dict[str, Any] = {"goodput": {"ttft": 400.0, "e2e": 600.0}}


def judged(load: LoadRun, **limits: Any) -> dict[str, Gate]:
    return {gate.name: gate for gate in judge_load(load, LoadGates(rate=8.0, **limits))}


@pytest.fixture(scope="module")
def run() -> LoadRun:
    return load_run()


@pytest.mark.parametrize("metric", ["ttft", "tpot", "itl", "e2e"])
def test_every_p99_has_three_outcomes(run: LoadRun, metric: str) -> None:
    assert run.point is not None
    latency = run.point.arms[-1].latencies[metric]
    assert latency.p99 is not None and latency.p99_low is not None
    assert latency.p99_high is not None
    middle = (latency.p99_low + latency.p99_high) / 2
    limits = {latency.p99_high * 1.1: "PASS", latency.p99_low * 0.9: "FAIL", middle: "INCONCLUSIVE"}
    for limit, outcome in limits.items():
        gate = judged(run, **{f"max_{metric}_p99_ms": limit})[f"{metric}_p99@8/s"]
        assert (gate.outcome, gate.limit, gate.scope.rate) == (outcome, limit, 8.0)
        if outcome == "FAIL":
            assert gate.next_step is not None
            assert f"validation.load.max_{metric}_p99_ms" in gate.next_step
            assert "--" not in gate.next_step


def test_a_percentile_without_its_samples_is_inconclusive() -> None:
    gates = judged(load_run(count=900), max_ttft_p99_ms=1e6)
    gate = gates["ttft_p99@8/s"]
    assert gate.outcome == "INCONCLUSIVE" and "900 samples; p99 needs 1000" in gate.detail
    # Two arms, 1,000 answers each at 8/s, behind a tenth that leads in: 278 s.
    assert gate.next_step is not None and "validation.load.max_seconds: 280" in gate.next_step


@pytest.mark.parametrize(
    ("min_goodput", "outcome"), [(0.5, "PASS"), (0.999, "FAIL"), (None, "INCONCLUSIVE")]
)
def test_the_share_within_the_limits_has_three_outcomes(
    min_goodput: float | None, outcome: str
) -> None:
    load = load_run(speculative_ms=95.0)
    assert load.point is not None
    share = load.point.arms[-1].goodput_share
    assert share is not None and 0.6 < share.estimate < 0.99
    goal = share.estimate if min_goodput is None else min_goodput
    assert judged(load, min_goodput=goal, **LIMITS)["goodput_share@8/s"].outcome == outcome


@pytest.mark.parametrize(
    ("failed", "max_errors", "outcome"),
    [
        (0, 0.0, "PASS"),
        (1, 0.0, "FAIL"),
        (0, 0.01, "PASS"),
        (9, 0.01, "INCONCLUSIVE"),
        (60, 0.01, "FAIL"),
    ],
)
def test_failed_requests_have_three_outcomes(failed: int, max_errors: float, outcome: str) -> None:
    gate = judged(load_run(failed=failed), max_errors=max_errors)["errors@8/s"]
    assert gate.outcome == outcome
    assert ("the queue is full" in gate.detail) == (failed > 0)
    assert (gate.next_step is None) == (outcome == "PASS")


def test_failures_of_the_plain_arm_are_not_the_deployments(run: LoadRun) -> None:
    assert run.point is not None
    plain, speculative = run.point.arms
    failing = replace(plain, failed=300, errors={"late": 300})
    arms = replace(run, point=replace(run.point, arms=(failing, speculative)))
    assert judged(arms)["errors@8/s"].outcome == "PASS"


def test_an_arm_that_falls_behind_is_told() -> None:
    """Eight requests a second come, and an arm serves 14, 7 or 3.6 of them."""
    assert list(load_findings(load_run(plain_ms=70.0), None)) == []
    (found,) = load_findings(load_run(plain_ms=280.0), None)
    assert found.severity == "note" and "the plain arm answered 3." in found.detail
    own, slower = load_findings(load_run(plain_ms=70.0, speculative_ms=280.0), None)
    assert own.severity == "warning" and "the speculative arm answered 3." in own.detail
    assert slower.severity == "warning" and "than they save" in slower.detail


def test_speculation_that_slows_requests_down_at_this_rate_is_told() -> None:
    (slower,) = load_findings(load_run(plain_ms=60.0, speculative_ms=90.0), None)
    assert slower.severity == "warning" and "speculation.draft_len_schedule" in slower.detail
    assert list(load_findings(load_run(plain_ms=70.0, speculative_ms=70.5), None)) == []


def test_one_arm_alone_is_told() -> None:
    load = load_run()
    alone = BenchPoint(None, 8.0, 4, (load_arm("served", 8.0, 70.0),), ())
    (found,) = load_findings(replace(load, point=alone), None)
    assert "no plain arm" in found.detail


def test_a_search_that_finds_no_rate_fails_with_what_it_saw() -> None:
    load = load_run()
    lost = tuple(replace(probe, is_kept=False, good_share=0.5) for probe in load.probes)
    none = replace(load, rate=None, point=None, probes=lost)
    (gate,) = judged(none, min_goodput=0.95, **LIMITS).values()
    assert (gate.outcome, gate.measured, gate.name) == ("FAIL", 0.5, "goodput_share@4/s")
    assert "no rate was found" in gate.detail
    assert list(load_findings(none, None)) == []
