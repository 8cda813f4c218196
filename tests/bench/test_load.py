"""How long an open loop is, how its rate is found, and that its lead-in is not judged."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.open_loop import load_arm, queued
from tests.support.stub import Script, StubServer
from toolkit.bench import metrics
from toolkit.bench.load import (
    LEAST_PROBE_REQUESTS,
    PROBES,
    RESOLUTION,
    highest_rate,
    load_schedule,
    run_load,
)
from toolkit.bench.run import BenchOptions, bench
from toolkit.config.schema import LoadGates
from toolkit.records.bench import BenchPoint, BenchRun
from toolkit.records.load import RateProbe

RATES = st.floats(0.05, 5000)


@given(RATES, st.integers(1, 2), st.floats(0, 0.3), st.floats(60, 7200))
def test_a_schedule_has_the_samples_of_p99_unless_the_time_is_too_short(
    rate: float, arms: int, max_errors: float, max_seconds: float
) -> None:
    limits = LoadGates(rate=rate, max_errors=max_errors, max_seconds=max_seconds)
    schedule = load_schedule(rate, arms, limits)
    sending_s = arms * schedule.max_rounds * (schedule.requests - 1) / rate
    assert schedule.rounds == 4 <= schedule.max_rounds <= 16
    assert sending_s <= max_seconds * (1 + 1e-9)
    takes_s = arms * max(math.ceil(1000 / (1 - max_errors)) / rate, 60) / 0.9
    if takes_s <= max_seconds:
        assert schedule.judged * (1 - max_errors) >= 1000 - 1e-6
        assert schedule.judged / rate >= 60 * (1 - 1e-9)
    elif takes_s > 1.1 * max_seconds and schedule.requests > 20:
        assert schedule.judged / rate < 60 or schedule.judged * (1 - max_errors) < 1000


def threshold(rate: float, requests: int, *, most: float) -> RateProbe:
    return RateProbe(rate, requests, 0, 1.0 if rate <= most else 0.0, rate <= most)


@given(RATES, RATES)
def test_a_search_ends_within_a_tenth_below_the_threshold(start: float, most: float) -> None:
    rate, probes = highest_rate(partial(threshold, most=most), start, seconds=1e12)
    assert len(probes) <= PROBES + 1
    if abs(math.log2(start / most)) < PROBES - 6:
        assert rate is not None
        assert most / RESOLUTION / 1.01 <= rate <= most
    elif rate is not None:
        assert rate <= most


@given(RATES, RATES, st.floats(20, 600))
def test_a_search_keeps_its_time_from_the_second_probe_on(
    start: float, most: float, seconds: float
) -> None:
    _, probes = highest_rate(partial(threshold, most=most), start, seconds)
    sent_s = [probe.requests / probe.rate for probe in probes]
    assert len(probes) == 1 or sum(sent_s) <= max(seconds, sent_s[0]) * (1 + 1e-9)
    assert all(probe.requests >= LEAST_PROBE_REQUESTS for probe in probes)


def test_a_rate_that_only_short_runs_keep_is_stepped_back_from() -> None:
    """A queue that grows slowly: above 10 requests a second a run of 20 s shows it."""

    def probe(rate: float, requests: int) -> RateProbe:
        is_kept = rate <= 10 or (rate <= 14 and requests / rate < 20)
        return RateProbe(rate, requests, 0, float(is_kept), is_kept)

    rate, probes = highest_rate(probe, 8.0, 180)
    lengths_s = [run.requests / run.rate for run in probes]
    searching = [run for run, length in zip(probes, lengths_s, strict=True) if length < 20]
    confirming = list(probes[len(searching) :])
    assert lengths_s[-1] == pytest.approx(30, rel=0.02) and sum(lengths_s) <= 180
    assert max(run.rate for run in searching if run.is_kept) == confirming[0].rate > 12
    assert [run.is_kept for run in confirming] == [False, False, False, True]
    assert rate == confirming[-1].rate <= 10 < confirming[-2].rate


def test_a_search_without_any_rate_has_none() -> None:
    rate, probes = highest_rate(partial(threshold, most=0.0), 8.0, 180)
    assert rate is None and [probe.rate for probe in probes[:3]] == [8.0, 4.0, 2.0]


def test_the_deployed_arm_alone_is_probed_and_then_both_at_the_rate_that_was_found() -> None:
    """A server of 50 ms per request keeps 100 ms up to a rate that the queue decides."""
    asked: list[BenchOptions] = []

    def measure(options: BenchOptions) -> BenchRun:
        asked.append(options)
        assert options.rate is not None
        arm = load_arm("served", options.rate, 50.0, count=400, limits_ms={"e2e": 100.0})
        point = BenchPoint(None, options.rate, options.rounds or 1, (arm,), ())
        return BenchRun(4, "", "PASS", (), (), {}, (point,), None, (), (), {}, {}, ())

    limits = LoadGates(rate="auto", goodput={"e2e": 100.0}, min_goodput=0.8, max_ttft_p99_ms=70)
    options = BenchOptions(Path("prompts.jsonl"), against_plain=True, max_tokens=8)
    load, run = run_load(measure, options, limits, start_rate=20.0)
    *probes, judged = asked
    assert [probe.against_plain for probe in probes] == [False] * len(load.probes)
    assert judged.against_plain and judged.rate == load.rate and run is not None
    assert load.rate is not None and 4 < load.rate < 20
    assert load.probes[-1] in [probe for probe in load.probes if probe.rate == load.rate]
    assert all(probe.is_kept == (probe.good_share >= 0.9) for probe in load.probes)
    assert judged.gates == ("ttft_p99<=70.0", "goodput_share>=0.8")
    assert judged.goodput == "e2e=100.0" and judged.arrivals == "poisson"
    assert load.point is not None and load.needed == 1000


@pytest.fixture(scope="module")
def stub() -> Iterator[StubServer]:
    with StubServer(Script(chunks=((2.0, "a", 1), (2.0, "bcd", 3)), plain_factor=2.0)) as server:
        yield server


def write(folder: Path) -> Path:
    path = folder / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"prompt {i}"}) + "\n" for i in range(24)))
    return path


def test_an_open_loop_alternates_its_arms_in_blocks_and_leaves_the_lead_in_out(
    stub: StubServer, tmp_path: Path
) -> None:
    before = len(stub.log())
    limits = LoadGates(rate=50.0, goodput={"e2e": 4000.0}, max_e2e_p99_ms=4000.0, max_seconds=4.0)
    options = BenchOptions(
        write(tmp_path), protocol="triton-http", against_plain=True, timeout_s=5.0, warm_up=2
    )
    load, run = run_load(partial(bench, stub.http), options, limits, start_rate=1.0)
    assert load.point is not None and run is not None
    assert (load.point.rounds, load.lead_in, load.rate) == (4, 2, 50.0)
    assert [arm.requests for arm in load.point.arms] == [4 * 23, 4 * 23]
    drafts = [entry["asked"].get("num_draft_tokens") for entry in stub.log()[before + 2 * 2 :]]
    blocks = [len(list(group)) for _, group in itertools.groupby(drafts)]
    assert sum(blocks) == 2 * 4 * 25 and all(block % 25 == 0 for block in blocks)
    for arm in ("plain", "speculative"):
        for number in range(4):
            sent = [one for one in run.requests if (one.arm, one.round) == (arm, number)]
            due = {one.index: one.due_ns or 0 for one in sent}
            assert max(due[23], due[24]) < min(due[index] for index in range(23))
    gates = {gate.metric: gate for gate in run.gates}
    assert gates["e2e"].outcome == "INCONCLUSIVE" and "needs 1000" in gates["e2e"].detail
    assert gates["goodput_share"].outcome == "PASS"
    share = load.point.arms[-1].goodput_share
    assert share is not None and (share.estimate, share.high) == (1.0, 1.0) and share.low < 0.98


def test_servers_beside_the_probed_one_are_paused(stub: StubServer, tmp_path: Path) -> None:
    """As with vLLM, whose plain arm is a second server."""
    entered: list[str] = []

    @contextlib.contextmanager
    def alone() -> Iterator[None]:
        entered.append("served")
        yield

    options = BenchOptions(
        write(tmp_path), protocol="triton-http", timeout_s=5.0, warm_up=2, rate=100.0,
        requests=10, alone={"served": alone},
    )  # fmt: skip
    assert len(bench(stub.http, options).points) == 1 and entered == ["served"]


def test_queues_make_an_interval_wider_than_independent_requests_would() -> None:
    """Neighbours wait together: their bootstrap draws them together."""
    answers = queued(9.0, 100.0, 1000)
    alone = metrics.latency([[(answer.ttft_ns / 1e6, 1)] for answer in answers if answer.ttft_ns])
    together: list[Any] = [
        [(answer.ttft_ns / 1e6, 1) for answer in answers[at : at + 32] if answer.ttft_ns]
        for at in range(0, 1000, 32)
    ]
    blocks = metrics.latency(together)
    assert blocks.p99 == alone.p99

    def width(latency: Any) -> float:
        return float(latency.p99_high - latency.p99_low)

    assert width(blocks) > 1.5 * width(alone)
