"""A whole run against a stub endpoint over HTTP: arms, rounds, loads, counters, and endpoints
that fail.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from rich.console import Console

from tests.support.stub import Script, StubServer
from tests.support.timings import timing
from toolkit.bench import runner
from toolkit.bench.compare import compare_runs, read_run
from toolkit.bench.limits import parse_limit
from toolkit.bench.run import BenchOptions, apart, bench
from toolkit.bench.runner import crossover, speed_ratio, undecided_speed
from toolkit.bench.transports import Transport
from toolkit.client import Options
from toolkit.errors import StageError, UsageError
from toolkit.records.bench import BenchArm, BenchPoint, BenchRun, Comparison
from toolkit.records.codec import from_json, to_json
from toolkit.records.measured import Ratio
from toolkit.report.bench import print_run

CHUNKS = ((2.0, "a", 1), (2.0, "bcd", 3))
COUNT = 24


@pytest.fixture(scope="module")
def stub() -> Iterator[StubServer]:
    with StubServer(Script(chunks=CHUNKS, plain_factor=4.0)) as server:
        yield server


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    return write(tmp_path, [f"prompt {i}" for i in range(COUNT)])


def write(folder: Path, texts: list[str]) -> Path:
    path = folder / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    return path


def run(stub: StubServer, prompts: Path, url: str | None = None, **asked: Any) -> BenchRun:
    asked = {"protocol": "triton-http", "timeout_s": 5.0, "warm_up": 2, **asked}
    return bench(url or stub.http, BenchOptions(prompts=prompts, **asked))


def finding(found: BenchRun | Comparison, check: str) -> str:
    return " | ".join(one.detail for one in found.findings if one.check == check)


@pytest.mark.parametrize(
    ("block_ns", "sizes"),
    [(10**15, (1, 8, 8, 7) * 2), (1, (1,) * 2 * COUNT)],  # a request is short beside it, or long
)
def test_arms_take_turns_on_the_same_prompts_and_the_ratio_is_that_of_the_endpoint(
    stub: StubServer,
    prompts: Path,
    monkeypatch: pytest.MonkeyPatch,
    block_ns: int,
    sizes: tuple[int, ...],
) -> None:
    monkeypatch.setattr(runner, "BLOCK_NS", block_ns)
    before = len(stub.log())
    found = run(stub, prompts, against_plain=True, rounds=2, max_rounds=2, gates=("speed>=1.5",))
    (point,) = found.points
    assert [arm.name for arm in point.arms] == ["plain", "speculative"]
    assert all(
        (arm.requests, arm.failed, arm.output_tokens) == (2 * COUNT, 0, 8 * COUNT)
        for arm in point.arms
    )
    speed = point.ratios[0]
    assert (
        speed.estimate is not None and 1.8 < speed.estimate < 4.2
    )  # 16 ms against 4, and what the wire costs
    measured = stub.log()[before + 2 * 2 :]
    assert len(measured) == 4 * COUNT
    entries = iter(measured)
    blocks = [list(itertools.islice(entries, size)) for size in sizes for _ in range(2)]
    asked = [[entry["prompt"] for entry in block] for block in blocks]
    assert asked[::2] == asked[1::2]
    arms = [{entry["asked"].get("num_draft_tokens") for entry in block} for block in blocks]
    pairs = list(zip(arms[::2], arms[1::2], strict=True))
    assert all(len(first) == len(second) == 1 and first != second for first, second in pairs)
    plain_first = [first == {0} for first, _ in pairs]
    half = len(pairs) // 2
    assert plain_first.count(True) == half and plain_first != plain_first[:2] * half
    first_round = [prompt for block in asked[: len(asked) // 2 : 2] for prompt in block]
    assert first_round != [f"prompt {i}" for i in range(COUNT)]


def test_no_arm_goes_first_in_every_round_of_a_load_whose_block_is_the_round(
    stub: StubServer, prompts: Path
) -> None:
    before = len(stub.log())
    run(stub, prompts, against_plain=True, concurrency=(4,), rounds=4, max_rounds=4, warm_up=0)
    drafts = [entry["asked"].get("num_draft_tokens") for entry in stub.log()[before:]]
    firsts = drafts[:: 2 * COUNT]
    assert len(firsts) == 4 and firsts[0] != firsts[1] and firsts[2] != firsts[3]


def test_lengths_are_drawn_once_for_all_arms_and_rounds(stub: StubServer, prompts: Path) -> None:
    before = len(stub.log())
    asked: dict[str, Any] = {"max_tokens": 40, "max_tokens_from": 10}
    found = run(stub, prompts, against_plain=True, rounds=2, max_rounds=2, **asked)
    assert found.settings["max_tokens_from"] == "10"
    lengths: dict[str, set[int]] = {}
    sent = stub.log()[before:]
    assert all(entry["asked"]["sampling_param_max_tokens"] == 40 for entry in sent[:4])  # warm-up
    for entry in sent[4:]:
        prompt = re.sub(r"^[0-9]+[.] ", "", entry["prompt"])
        lengths.setdefault(prompt, set()).add(entry["asked"]["sampling_param_max_tokens"])
    assert len(lengths) == COUNT and all(len(one) == 1 for one in lengths.values())
    drawn = [length for one in lengths.values() for length in one]
    assert 10 <= min(drawn) < max(drawn) <= 40 and len(set(drawn)) > COUNT / 3


def test_the_shortest_length_is_not_above_the_longest(stub: StubServer, prompts: Path) -> None:
    with pytest.raises(UsageError, match="--max-tokens-from 65 is above --max-tokens 64"):
        run(stub, prompts, max_tokens_from=65)


def test_no_prompt_is_sent_twice_by_an_arm_and_the_warm_up_is_left_out(
    stub: StubServer, prompts: Path
) -> None:
    before = len(stub.log())
    found = run(stub, prompts, rounds=2, warm_up=3)
    sent = [entry["prompt"] for entry in stub.log()[before:]]
    assert len(sent) == len(set(sent)) == 2 * COUNT + 3
    assert len(found.requests) == 2 * COUNT and found.points[0].arms[0].requests == 2 * COUNT


def test_server_counters_are_those_of_the_window(stub: StubServer, prompts: Path) -> None:
    found = run(stub, prompts)
    assert {check.name: (check.client, check.server) for check in found.counters} == {
        "toolkit_requests": (COUNT, COUNT),
        "toolkit_output_tokens": (4 * COUNT, 4 * COUNT),
    }
    assert found.verdict == "PASS" and "2 counters" in finding(found, "counters")


@pytest.mark.parametrize(
    ("requests", "lacking"), [(8, "p50 needs 20, p90 needs 100, "), (24, "p90 needs 100, ")]
)
def test_what_percentiles_want_is_said(
    stub: StubServer, prompts: Path, requests: int, lacking: str
) -> None:
    found = run(stub, prompts, requests=requests)
    assert finding(found, "percentiles") == (
        f"{lacking}p99 needs 1000 answered requests, and there are {requests} (`toolkit bench"
        " --requests`)"
    )


def test_a_server_that_counts_otherwise_is_reported(prompts: Path) -> None:
    with StubServer(Script(chunks=CHUNKS, counted_twice=True)) as stub:
        found = run(stub, prompts)
    assert f"toolkit_output_tokens {8 * COUNT} against {4 * COUNT}" in finding(found, "counters")


def test_an_open_loop_keeps_its_rate_and_reports_its_lag(stub: StubServer, prompts: Path) -> None:
    found = run(stub, prompts, rate=100.0, arrivals="constant", requests=30, goodput="e2e=4000")
    (arm,) = found.points[0].arms
    due = sorted(one.due_ns for one in found.requests if one.due_ns is not None)
    assert [later - earlier for earlier, later in itertools.pairwise(due)] == [10_000_000] * 29
    assert arm.lag_p99_ms is not None and arm.lag_p99_ms >= 0
    assert arm.goodput is not None and arm.goodput == pytest.approx(arm.requests_per_s)
    assert 60 < arm.requests_per_s < 110


def test_progress_names_the_rate_and_the_requests_of_the_rounds_that_are_known(
    stub: StubServer, prompts: Path
) -> None:
    said: list[tuple[int, int | None, str]] = []
    options = BenchOptions(
        prompts=prompts,
        protocol="triton-http",
        against_plain=True,
        rate=200.0,
        requests=10,
        rounds=2,
        max_rounds=3,
        warm_up=0,
        gates=("e2e_p99<=4000",),
    )
    bench(stub.http, options, progress=lambda *now: said.append(now))
    assert {what for _, _, what in said} == {"measuring at 200 requests/s"}
    assert [done for done, _, _ in said] == list(range(1, 61))
    assert [total for _, total, _ in said] == [40] * 40 + [60] * 20


def test_a_trace_is_played(stub: StubServer, prompts: Path, tmp_path: Path) -> None:
    (tmp_path / "trace").write_text("0\n0.01\n0.01\n0.1\n")
    found = run(stub, prompts, arrivals=str(tmp_path / "trace"))
    due = sorted(one.due_ns for one in found.requests if one.due_ns is not None)
    assert [at - due[0] for at in due] == [0, 10_000_000, 10_000_000, 100_000_000]


def test_rounds_are_added_until_the_limit_while_a_gate_is_undecided(
    stub: StubServer, prompts: Path
) -> None:
    """p90 takes 100 samples, so 24 a round are enough in the fifth; p99 never is."""
    decided = run(stub, prompts, rounds=1, max_rounds=7, gates=("e2e_p90<=4000",))
    assert (decided.points[0].rounds, decided.verdict) == (5, "PASS")
    hopeless = run(stub, prompts, rounds=1, max_rounds=2, gates=("e2e_p99<=4000",))
    assert (hopeless.points[0].rounds, hopeless.verdict) == (2, "INCONCLUSIVE")


def test_a_sweep_has_a_point_per_concurrency(stub: StubServer, prompts: Path) -> None:
    found = run(
        stub,
        prompts,
        against_plain=True,
        concurrency=(1, 4),
        rounds=1,
        max_rounds=1,
        gates=("speed>=1.2",),
    )
    assert [point.concurrency for point in found.points] == [1, 4]
    assert [gate.name for gate in found.gates] == ["errors@1", "speed@1", "errors@4", "speed@4"]
    single, four = (point.arms[-1].tokens_per_s for point in found.points)
    assert single is not None and four is not None and four > 1.5 * single
    assert found.crossover is not None and (
        found.crossover.pays_up_to,
        found.crossover.stops_at,
    ) == (4, None)


def test_two_endpoints_are_measured_in_turns(stub: StubServer, prompts: Path) -> None:
    with StubServer(
        Script(chunks=tuple((12.0, text, tokens) for _, text, tokens in CHUNKS))
    ) as slow:
        found = run(stub, prompts, baseline=slow.http, rounds=1, max_rounds=1)
    assert [one.arm for one in found.endpoints] == ["baseline", "served"]
    assert (
        found.points[0].ratios[0].estimate is not None and found.points[0].ratios[0].estimate > 1.5
    )


def test_the_other_server_is_kept_from_computing_while_one_is_measured(
    stub: StubServer, prompts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "BLOCK_NS", 10**15)
    sent: list[tuple[str, int]] = []

    @contextlib.contextmanager
    def alone(arm: str) -> Iterator[None]:
        before = len(stub.log())
        yield
        sent.append((arm, len(stub.log()) - before))

    arms = {arm: partial(alone, arm) for arm in ("baseline", "served")}
    run(stub, prompts, baseline=stub.http, rounds=1, max_rounds=1, alone=arms)
    assert sorted(sent) == sorted((arm, size) for arm in arms for size in (1, 8, 8, 7))


def test_saved_runs_are_read_back_equal_and_compared(
    stub: StubServer, prompts: Path, tmp_path: Path
) -> None:
    first, second = run(stub, prompts, rounds=2), run(stub, prompts, rounds=2)
    with StubServer(
        Script(chunks=tuple((20.0, text, tokens) for _, text, tokens in CHUNKS))
    ) as slow:
        third = run(slow, prompts, rounds=1)
    (tmp_path / "a.json").write_text(json.dumps(to_json(first)))
    assert read_run(tmp_path / "a.json") == first == from_json(BenchRun, to_json(first))
    same = compare_runs(first, second, tolerance=3.0)
    assert same.verdict == "PASS" and all(point.paired for point in same.points)
    worse = compare_runs(first, third, tolerance=0.5)
    assert worse.verdict == "FAIL" and worse.points[0].paired
    assert next(gate for gate in worse.gates if gate.metric == "speed").outcome == "FAIL"
    better = compare_runs(third, first)
    assert better.verdict == "PASS" and "B is better" in " ".join(
        gate.detail for gate in better.gates
    )
    assert "two runs at two times" in finding(same, "design")


def test_a_run_that_somebody_has_cut_is_refused(
    stub: StubServer, prompts: Path, tmp_path: Path
) -> None:
    whole = to_json(run(stub, prompts, rounds=2, max_rounds=2))
    assert len(whole["requests"]) == 2 * COUNT
    for wrong in (
        {"requests": whole["requests"][:-1]},
        {"requests": []},
        {"points": [{**whole["points"][0], "arms": []}]},
        {"requests": [{**one, "chunks": [[1, -1]]} for one in whole["requests"]]},
    ):
        (tmp_path / "cut.json").write_text(json.dumps({**whole, **wrong}))
        with pytest.raises(UsageError, match="requests of this run are missing"):
            read_run(tmp_path / "cut.json")


def test_runs_on_other_prompts_are_compared_unpaired(
    stub: StubServer, prompts: Path, tmp_path: Path
) -> None:
    first = run(stub, prompts)
    other = run(stub, write(tmp_path, [f"another {i}" for i in range(COUNT)]))
    found = compare_runs(first, other, tolerance=4.0)
    assert not found.points[0].paired and "different prompts" in finding(found, "prompts")
    assert found.verdict == "PASS"


def test_runs_without_a_load_in_common_are_not_compared(stub: StubServer, prompts: Path) -> None:
    with pytest.raises(UsageError, match="no load in common: 1 and 2"):
        compare_runs(run(stub, prompts), run(stub, prompts, concurrency=(2,)))


def test_a_run_that_fails_more_often_does_not_win(
    stub: StubServer, prompts: Path, tmp_path: Path
) -> None:
    good = run(stub, prompts)
    texts = [f"prompt {i}" for i in range(COUNT - 2)] + ["fault:die 1", "fault:garbage 2"]
    found = compare_runs(good, run(stub, write(tmp_path, texts)), tolerance=9.0)
    assert found.verdict == "FAIL"
    assert next(gate for gate in found.gates if gate.metric == "errors").outcome == "FAIL"


@pytest.mark.parametrize(
    "text", ["", "{}", "[1]", '{"schema_version": 1}', '{"schema_version": 99}', "not json"]
)
def test_a_file_that_is_no_run_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(UsageError, match=r"x\.json: ") as caught:
        read_run(tmp_path / "x.json")
    assert caught.value.hint


@pytest.mark.parametrize(
    "fault", ["refuse", "stall", "die", "garbage", "fewer", "down", "more", "endless"]
)
def test_an_endpoint_with_a_fault_never_passes(
    stub: StubServer, tmp_path: Path, fault: str
) -> None:
    prompts = write(tmp_path, [*(f"fine {i}" for i in range(COUNT)), f"fault:{fault} x"])
    found = run(stub, prompts, gates=("e2e_p50<=4000",), timeout_s=0.5)
    assert found.verdict == "FAIL"
    assert [gate.outcome for gate in found.gates] == ["FAIL", "PASS"]
    assert "1 of 25 requests failed" in finding(found, "errors")


def test_an_endpoint_that_answers_nothing_is_an_error(stub: StubServer, tmp_path: Path) -> None:
    with pytest.raises(
        StageError, match="no request of the warm-up was answered; the first: refused"
    ):
        run(stub, write(tmp_path, [f"fault:refuse {i}" for i in range(5)]), requests=3)


def test_a_server_without_counts_fails_a_gate_on_them(stub: StubServer, tmp_path: Path) -> None:
    prompts = write(tmp_path, [f"fault:silent {i}" for i in range(COUNT)])
    found = run(stub, prompts, gates=("itl_p50<=4000",))
    assert (found.verdict, found.points[0].arms[0].output_tokens) == ("FAIL", None)
    assert "not measured: this endpoint gives no itl" in found.gates[-1].detail
    assert "does not count output tokens" in finding(found, "tokens")


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"rate": 5.0, "concurrency": (2,)}, "closed loop"),
        ({"arrivals": "no/such/trace"}, "cannot be read"),
        ({"protocol": "smoke"}, "no protocol 'smoke'"),
        ({"gates": ("warmth<=3",)}, "'warmth' is not measured"),
        ({"goodput": "warmth=3"}, "not a limit of a latency"),
        ({"rounds": 3, "max_rounds": 2}, "--max-rounds 2 is less than --rounds 3"),
        ({"against_plain": True, "protocol": "openai-chat"}, "--baseline URL"),
        ({"metrics_url": "http://127.0.0.1:9/metrics"}, "counters cannot be read"),
    ],
)
def test_arguments_that_cannot_work_are_refused(
    stub: StubServer, prompts: Path, asked: dict[str, Any], words: str
) -> None:
    with pytest.raises(UsageError, match=words):
        run(stub, prompts, **asked)


def test_no_more_rounds_are_run_than_are_allowed(stub: StubServer, prompts: Path) -> None:
    found = run(stub, prompts, against_plain=True, max_rounds=2, requests=2)
    assert (found.settings["rounds"], found.settings["max_rounds"], found.points[0].rounds) == (
        "2",
        "2",
        2,
    )


def test_an_empty_prompts_file_is_refused(stub: StubServer, tmp_path: Path) -> None:
    with pytest.raises(UsageError):
        run(stub, write(tmp_path, []))


def level(concurrency: int, estimate: float, half: float) -> BenchPoint:
    no_arms: tuple[BenchArm, ...] = ()
    return BenchPoint(
        concurrency, None, 3, no_arms, (Ratio("speed", estimate, estimate - half, estimate + half),)
    )


def test_the_crossover_lies_between_what_was_shown() -> None:
    found = crossover(
        [level(1, 1.6, 0.1), level(2, 1.25, 0.1), level(4, 1.05, 0.1), level(8, 0.8, 0.1)]
    )
    assert found is not None
    assert (found.pays_up_to, found.stops_at) == (2, 8)
    assert found.estimate is not None and 4 < found.estimate < 8
    assert found.detail == "faster up to 2 at a time, slower from 8 on"


def test_a_sweep_that_shows_nothing_says_so() -> None:
    found = crossover([level(1, 1.02, 0.1), level(2, 0.99, 0.1)])
    assert found is not None and (found.pays_up_to, found.stops_at) == (None, None)
    assert "not shown to be faster" in found.detail
    assert crossover([level(1, 1.5, 0.1)]) is None


def test_a_ratio_with_too_many_failed_pairs_is_not_judged() -> None:
    good = [[timing([(10, 1), (20, 3)]) for _ in range(10)]]
    holes = [[None, None, *good[0][2:]]]
    assert speed_ratio(good, good).estimate == 1.0
    assert speed_ratio(holes, good).reason == "2 of 10 requests failed"
    assert speed_ratio(good, holes, paired=False).reason == "2 of 10 requests failed"
    assert speed_ratio(good, good, paired=False).estimate == 1.0


def test_a_speed_that_is_not_decided_is_said_where_no_gate_asks(
    stub: StubServer, prompts: Path
) -> None:
    found = run(stub, prompts, against_plain=True, rounds=1, max_rounds=1)
    assert finding(found, "speed") == ""  # the stub's plain arm is four times as slow
    (point,) = found.points
    near = replace(point, ratios=(Ratio("speed", 1.02, 0.95, 1.1),))
    (said,) = undecided_speed([near], ())
    assert (
        "speculative is not shown to be faster or slower than plain (0.950 to 1.100)" in said.detail
    )
    assert list(undecided_speed([near], [parse_limit("speed>=1.2")])) == []


def test_chunks_that_came_together_are_no_latency_and_said_to_be_none(prompts: Path) -> None:
    """One read of the socket holds them all, as HTTP delivers them from a fast server."""
    with StubServer(
        Script(chunks=((0.0, "a", 1), (0.0, "b", 1), (0.0, "c", 1), (0.0, "d", 1)), at_once=True)
    ) as stub:
        found = run(stub, prompts)
    assert "came together with the one before" in finding(found, "streaming") and "gRPC" in finding(
        found, "streaming"
    )
    console = Console(file=io.StringIO(), width=160)
    print_run(found, console)
    assert isinstance(console.file, io.StringIO)
    lines = {
        line.split(" p50")[0]: line
        for line in console.file.getvalue().splitlines()
        if " p50/p90/p99 ms" in line
    }
    assert lines["ITL"].split()[-5] == "-" and "0.00" not in lines["ITL"]
    assert re.search(r"\d", lines["e2e"].partition("ms")[2])
    assert "the only limit was on errors" in console.file.getvalue()


def test_arms_share_no_kv_cache_where_a_request_can_keep_them_apart() -> None:
    def refuse(prompt: str, options: Options) -> bytes:
        raise UsageError("the served model has no input 'cache_salt'")

    options = Options(max_tokens=4)
    taking, refusing = (
        cast(Transport, SimpleNamespace(prepare=prepare))
        for prepare in (lambda prompt, options: b"", refuse)
    )
    salts = {apart(taking, options).cache_salt for _ in range(2)}
    assert len(salts) == 2 and not salts & {None, ""}
    assert apart(refusing, options) == options
