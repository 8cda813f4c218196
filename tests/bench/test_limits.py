from __future__ import annotations

from dataclasses import replace

import pytest

from tests.support.timings import timing
from toolkit.bench import metrics
from toolkit.bench.limits import judge, parse_goodput, parse_limit, straddled
from toolkit.errors import UsageError
from toolkit.records.bench import BenchArm, BenchPoint
from toolkit.records.measured import Gate, Ratio, TooFew


def arm(
    requests: int = 120,
    *,
    counted: bool = True,
    failed: int = 0,
    rounds: tuple[float, ...] = (100.0, 101.0, 99.0),
) -> BenchArm:
    timings = [[timing([(100 + i % 7, 1), (140 + i % 7, 2), (190, 1)])] for i in range(requests)]
    latencies = metrics.latencies(timings)
    if not counted:
        latencies |= {name: metrics.latency([]) for name in ("tpot", "itl")}
    return BenchArm(
        name="served",
        requests=requests + failed,
        failed=failed,
        errors={"it broke": failed} if failed else {},
        output_tokens=4 * requests if counted else None,
        window_s=4.8,
        tokens_per_s=100.0 if counted else None,
        requests_per_s=25.0,
        goodput=None,
        tokens_per_s_by_round=rounds if counted else (),
        requests_per_s_by_round=tuple(one / 4 for one in rounds),
        goodput_by_round=(),
        latencies=latencies,
        acceptance=metrics.acceptance([]),
        lag_p50_ms=None,
        lag_p99_ms=None,
        lag_max_ms=None,
    )


def judged(text: str, served: BenchArm | None = None, ratios: tuple[Ratio, ...] = ()) -> Gate:
    point = BenchPoint(1, None, 3, (served or arm(),), ratios)
    limit = parse_limit(text)
    return next(gate for gate in judge([limit], point) if gate.name == limit.name)


@pytest.mark.parametrize(
    ("text", "outcome"),
    [
        ("ttft_p50<=200", "PASS"),
        ("ttft_p50<=50", "FAIL"),
        ("ttft_p50<=103", "INCONCLUSIVE"),
        ("ttft_p90 <= 1e3", "PASS"),
        ("tokens_per_s>=90", "PASS"),
        ("tokens_per_s>=110", "FAIL"),
        ("tokens_per_s>=100", "INCONCLUSIVE"),
    ],
)
def test_an_interval_that_straddles_its_limit_decides_nothing(text: str, outcome: str) -> None:
    gate = judged(text)
    assert gate.outcome == outcome
    assert (gate.next_step is None) == (outcome == "PASS")
    assert straddled(gate) == (outcome == "INCONCLUSIVE")


def test_a_percentile_of_too_few_requests_says_how_many_it_takes() -> None:
    gate = judged("e2e_p99<=1000")
    assert (gate.outcome, gate.measured) == ("INCONCLUSIVE", None)
    assert "120 samples; p99 needs 1000" in gate.detail


@pytest.mark.parametrize(
    "text",
    [
        "itl_p90<=10",
        "tpot_p50<=10",
        "tokens_per_s>=1",
        "goodput>=1",
        "speed>=0.1",
        "ttft_p50_ratio<=9",
    ],
)
def test_a_gate_on_what_was_not_measured_fails_and_says_so(text: str) -> None:
    gate = judged(text, arm(counted=False))
    assert (
        gate.outcome == "FAIL"
        and gate.detail.startswith("not measured: ")
        and gate.next_step is not None
    )


def test_failed_requests_fail_the_run_unless_allowed() -> None:
    (gate,) = judge([], BenchPoint(1, None, 1, (arm(failed=6),), ()))
    assert (gate.name, gate.outcome) == ("errors", "FAIL")
    assert gate.detail == "6 of 126 requests failed; the most common: it broke"
    assert judged("errors<=0.1", arm(failed=6)).outcome == "PASS"
    assert judge([], BenchPoint(1, None, 1, (arm(),), ()))[0].outcome == "PASS"


def test_when_everything_failed_no_latency_passes() -> None:
    dead = replace(
        arm(failed=0), requests=9, failed=9, errors={"refused": 9}, latencies=metrics.latencies([])
    )
    assert judged("ttft_p50<=1e6", dead).outcome == "FAIL"
    assert "no request was answered" in judged("ttft_p50<=1e6", dead).detail


def test_ratios_are_judged_by_their_interval() -> None:
    speed = Ratio("speed", 1.5, 1.4, 1.6)
    assert judged("speed>=1.3", ratios=(speed,)).outcome == "PASS"
    assert judged("speed>=1.5", ratios=(speed,)).outcome == "INCONCLUSIVE"
    assert judged("speed>=1.7", ratios=(speed,)).outcome == "FAIL"
    few = Ratio("ttft", None, None, None, "for want of samples", 99, TooFew(60, 1000))
    assert judged("ttft_p99_ratio<=1", ratios=(few,)).outcome == "INCONCLUSIVE"
    gone = Ratio("speed", None, None, None, "9 of 9 requests failed")
    assert judged("speed>=0.1", ratios=(gone,)).outcome == "FAIL"


def test_one_round_has_no_spread_to_judge_a_throughput_by() -> None:
    assert judged("tokens_per_s>=1", arm(rounds=(100.0,))).outcome == "INCONCLUSIVE"


@pytest.mark.parametrize(
    "text",
    ["ttft<=3", "ttft_p95<=3", "speed>1", "speed", "", "latency<=3", "ttft_p50<=.", "ttft_p50<=-3"],
)
def test_what_is_no_limit_is_refused_with_the_names(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_limit(text)
    assert caught.value.hint


def test_limits_of_a_good_request() -> None:
    assert parse_goodput("ttft=200, tpot=25.5") == {"ttft": 200.0, "tpot": 25.5}
    for wrong in ("ttft", "speed=3", "ttft=", "ttft=soon", "ttft=nan"):
        with pytest.raises(UsageError):
            parse_goodput(wrong)
