"""A load on any endpoint, measured and judged: `toolkit bench`, and the concurrency sweep.

A run has points (one load each), a point has rounds, and in every round each arm gets the same
prompts in the same order. Arms take turns block by block, in random order, so that drift of the
machine falls on all alike; rounds are added up to a limit until the ratio of the arms is known as
well as was asked for and no gate's interval straddles its limit.

Prompts are unique within an arm over the whole run. The warm-up is neither measured nor counted.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import numpy as np

from toolkit.bench import metrics
from toolkit.bench.arrivals import constant, poisson, run_closed, run_open, undisturbed, uniquely
from toolkit.bench.counters import (
    SETTLE_S,
    client_counts,
    counters_finding,
    reconcile,
    settled,
)
from toolkit.bench.definitions import METRICS
from toolkit.bench.limits import Limit, judge, straddled
from toolkit.bench.transports import BadAnswer, Exchange, Transport, read_exchange
from toolkit.bench.verdict import verdict
from toolkit.client import Options, RequestTiming, Statistics
from toolkit.errors import StageError
from toolkit.interfaces import Progress
from toolkit.records.bench import (
    BenchArm,
    BenchEndpoint,
    BenchPoint,
    BenchRequest,
    BenchRun,
    Crossover,
)
from toolkit.records.measured import CounterCheck, Finding, Ratio
from toolkit.resampling import bootstrap_ratio, bootstrap_unpaired_ratio

__all__ = [
    "SCHEMA_VERSION",
    "Arm",
    "Load",
    "Plan",
    "crossover",
    "run_bench",
    "speed_ratio",
    "undecided_speed",
]

SCHEMA_VERSION = 2
# requests of one arm in a row, per request in flight: the ends of a block, where fewer are, stay a
# small part of it
BLOCK = 8
LATE_MS = 2.0  # p99 of the lag above which the load was not the one that was asked for
FEW = 4  # requests per round below this many times the concurrency do not keep it up
TOGETHER = 0.25  # share of chunks that came with the one before them above which we say so
MOST_MISSING = 0.1  # a ratio is not judged when more of the pairs than this failed


@dataclass(frozen=True, slots=True)
class Arm:
    """What is measured: requests with these options to this endpoint."""

    name: str
    transport: Transport
    options: Options


Arrivals: TypeAlias = Literal["poisson", "constant", "trace"]


@dataclass(frozen=True, slots=True)
class Load:
    """concurrency: a closed loop. rate with `arrivals` poisson or constant, or trace (arrivals
    in ns): an open one.
    """

    concurrency: int | None = None
    rate: float | None = None
    arrivals: Arrivals = "poisson"
    trace: tuple[int, ...] | None = None

    def schedule(self, count: int, seed: int) -> tuple[int, ...]:
        if self.trace is not None:
            return self.trace[:count]
        assert self.rate is not None
        return (
            poisson(self.rate, count, seed)
            if self.arrivals == "poisson"
            else constant(self.rate, count)
        )


@dataclass(frozen=True, slots=True)
class Plan:
    """How much is measured. requests: per arm and round. precision: wanted half width of the
    ratio's interval, as a share.
    """

    prompts: tuple[str, ...]
    loads: tuple[Load, ...]
    requests: int
    rounds: int = 1
    max_rounds: int = 1
    warm_up: int = 8
    precision: float = 0.05
    goodput_ms: Mapping[str, float] = field(default_factory=dict)
    limits: tuple[Limit, ...] = ()
    seed: int = 0


@dataclass(slots=True)
class _Sent:
    """One request of ours, whatever became of it."""

    point: int
    arm: str
    round: int
    index: int
    prompt: str
    exchange: Exchange
    due_ns: int | None
    timing: RequestTiming | None
    error: str | None

    @property
    def start_ns(self) -> int:
        return self.exchange.sent_ns if self.due_ns is None else self.due_ns


@dataclass(slots=True)
class _Round:
    """One arm in one round: its requests in the prompts' order, and the time during which they
    ran.
    """

    sent: list[_Sent]
    window_s: float

    @property
    def timings(self) -> list[RequestTiming | None]:
        return [one.timing for one in self.sent]


async def run_bench(
    arms: Sequence[Arm],
    plan: Plan,
    *,
    settings: Mapping[str, str],
    environment: Mapping[str, str],
    created: str,
    counters: Callable[[], Mapping[str, float]] | None = None,
    progress: Progress = lambda done, total, what: None,
) -> BenchRun:
    """Measure every load of the plan. The last arm is the one that gates judge; ratios are the last
    arm's over the first's.

    counters: reads the server's counters; the arms' requests are all counted there. Raises
    StageError when no request of the warm-up is answered, UsageError for an option that an endpoint
    does not have.
    """
    runner = _Runner(arms, plan, progress)
    before = counters() if counters is not None else {}
    warm = await runner.warm_up()
    if (
        counters is not None
    ):  # counts are published with a delay; those of the warm-up must not fall into the window
        _counted(counters, before, warm)
        before = settled(counters)
    points = [await runner.point(number, load) for number, load in enumerate(plan.loads)]
    checks = _counted(counters, before, runner.everything)
    gates = [gate for point in points for gate in judge(plan.limits, point, at=len(points) > 1)]
    return BenchRun(
        schema_version=SCHEMA_VERSION,
        created=created,
        verdict=verdict(gates),
        gates=tuple(gates),
        endpoints=tuple(
            BenchEndpoint(a.name, a.transport.address, a.transport.protocol, a.transport.model)
            for a in arms
        ),
        settings=dict(settings),
        points=tuple(points),
        crossover=crossover(points),
        counters=checks,
        findings=(
            *_findings(points, plan, checks, counters is not None),
            *undecided_speed(points, plan.limits),
            *_together(arms, runner.everything),
        ),
        environment=dict(environment),
        # under the name that BenchArm has for it
        definitions=METRICS | {"tokens_per_s": METRICS["throughput"]},
        requests=tuple(_saved(one, runner.began_ns) for one in runner.everything),
    )


class _Runner:
    def __init__(self, arms: Sequence[Arm], plan: Plan, progress: Progress) -> None:
        self.arms = arms
        self.plan = plan
        self.everything: list[_Sent] = []
        self.began_ns = time.monotonic_ns()
        self._progress = progress
        self._random = random.Random(plan.seed)
        base = [plan.prompts[i % len(plan.prompts)] for i in range(plan.requests)]
        slots = len(plan.loads) * plan.max_rounds
        fresh = uniquely(base, slots * plan.requests + plan.warm_up)
        self._prompts = [fresh[i * plan.requests : (i + 1) * plan.requests] for i in range(slots)]
        self._warm_up = fresh[slots * plan.requests :]

    async def warm_up(self) -> list[_Sent]:
        sent: list[_Sent] = []
        for arm in self.arms if self._warm_up else ():
            requests = [arm.transport.prepare(prompt, arm.options) for prompt in self._warm_up]
            self._progress(0, None, "warming up")
            exchanges = await run_closed(
                arm.transport, requests, max(load.concurrency or 4 for load in self.plan.loads)
            )
            answers = [
                self._read(arm, 0, 0, 0, prompt, exchange, None)
                for prompt, exchange in zip(self._warm_up, exchanges, strict=True)
            ]
            if all(one.timing is None for one in answers):
                raise StageError(
                    "bench",
                    f"no request of the warm-up was answered; the first: {answers[0].error}",
                    where=arm.transport.address,
                    hint=(
                        "Fix the endpoint or the options; `toolkit generate` sends a single"
                        " request."
                    ),
                )
            sent += answers
        return sent

    async def point(self, number: int, load: Load) -> BenchPoint:
        rounds: dict[str, list[_Round]] = {arm.name: [] for arm in self.arms}
        while True:
            made = len(rounds[self.arms[0].name])
            prompts = self._prompts[number * self.plan.max_rounds + made]
            with undisturbed():
                done = await self._round(number, load, made, prompts)
            for name, one in done.items():
                rounds[name].append(one)
            made += 1
            if made >= self.plan.rounds:
                point = self._figures(load, rounds)
                if made >= self.plan.max_rounds or self._decided(point):
                    return point

    def _decided(self, point: BenchPoint) -> bool:
        speed = next((ratio for ratio in point.ratios if ratio.metric == "speed"), None)
        if (
            speed is not None
            and speed.estimate
            and speed.high is not None
            and speed.low is not None
        ):
            precise = (speed.high - speed.low) / 2 <= self.plan.precision * speed.estimate
        else:
            precise = True  # there is nothing that more rounds would make known
        return precise and not any(straddled(gate) for gate in judge(self.plan.limits, point))

    async def _round(
        self, number: int, load: Load, made: int, prompts: Sequence[str]
    ) -> dict[str, _Round]:
        order = self._random.sample(range(len(prompts)), len(prompts))
        size = len(order)
        if load.concurrency is not None:
            size = 1 if load.concurrency == 1 else BLOCK * load.concurrency
        sent: dict[str, list[_Sent]] = {arm.name: [] for arm in self.arms}
        window_ns = dict.fromkeys(sent, 0)
        for start in range(0, len(order), size):
            block = order[start : start + size]
            for arm in self._random.sample(list(self.arms), len(self.arms)):
                answers = await self._block(
                    arm, load, (number, made), [(i, prompts[i]) for i in block]
                )
                sent[arm.name] += answers
                window_ns[arm.name] += max(a.exchange.ended_ns for a in answers) - min(
                    a.start_ns for a in answers
                )
        return {
            name: _Round(sorted(answers, key=lambda one: one.index), window_ns[name] / 1e9)
            for name, answers in sent.items()
        }

    async def _block(
        self, arm: Arm, load: Load, where: tuple[int, int], prompts: Sequence[tuple[int, str]]
    ) -> list[_Sent]:
        requests = [arm.transport.prepare(prompt, arm.options) for _, prompt in prompts]
        done = len(self.everything)
        level = f"{load.concurrency} at a time" if load.concurrency is not None else "on schedule"

        def one_more() -> None:
            nonlocal done
            done += 1
            self._progress(done, self._expected(), f"measuring, {level}")

        due: list[int | None] = [None] * len(requests)
        if load.concurrency is not None:
            exchanges = await run_closed(arm.transport, requests, load.concurrency, one_more)
        else:
            schedule = load.schedule(len(requests), self.plan.seed + where[1])
            exchanges, times = await run_open(arm.transport, requests, schedule, one_more)
            due = list(times)
        answers = [
            self._read(arm, *where, index, prompt, exchange, at)
            for (index, prompt), exchange, at in zip(prompts, exchanges, due, strict=True)
        ]
        self.everything += answers
        return answers

    def _expected(self) -> int | None:
        """Requests in all, where the number of rounds is settled beforehand."""
        if self.plan.rounds < self.plan.max_rounds:
            return None
        return len(self.plan.loads) * self.plan.rounds * len(self.arms) * self.plan.requests

    @staticmethod
    def _read(
        arm: Arm,
        point: int,
        made: int,
        index: int,
        prompt: str,
        exchange: Exchange,
        due_ns: int | None,
    ) -> _Sent:
        timing, error = None, None
        try:
            timing = read_exchange(arm.transport, prompt, exchange, arm.options.max_tokens, due_ns)
        except BadAnswer as bad:
            error = str(bad)
        return _Sent(point, arm.name, made, index, prompt, exchange, due_ns, timing, error)

    def _figures(self, load: Load, rounds: Mapping[str, Sequence[_Round]]) -> BenchPoint:
        names = [arm.name for arm in self.arms]
        arms = tuple(_arm(name, rounds[name], self.plan) for name in names)
        ratios: tuple[Ratio, ...] = ()
        if len(names) > 1:
            first, last = ([one.timings for one in rounds[name]] for name in (names[-1], names[0]))
            ratios = (
                speed_ratio(first, last, seed=self.plan.seed),
                *metrics.latency_ratios(first, last, seed=self.plan.seed),
            )
        return BenchPoint(load.concurrency, load.rate, len(rounds[names[0]]), arms, ratios)


def _arm(name: str, rounds: Sequence[_Round], plan: Plan) -> BenchArm:
    sent = [one for made in rounds for one in made.sent]
    answered = [one.timing for one in sent if one.timing is not None]
    counted = [one for one in answered if one.output_tokens is not None]
    tokens = (
        sum(one.output_tokens or 0 for one in counted)
        if len(counted) == len(answered) and answered
        else None
    )
    window_s = sum(made.window_s for made in rounds)
    by_prompt = [
        [t for t in column if t is not None]
        for column in zip(*(made.timings for made in rounds), strict=True)
    ]
    lag = [(one.exchange.sent_ns - one.due_ns) / 1e6 for one in sent if one.due_ns is not None]
    p50, p99 = (float(np.percentile(lag, q)) for q in (50, 99)) if lag else (None, None)

    def per_round(figure: Callable[[_Round], float]) -> tuple[float, ...]:
        return tuple(figure(made) / made.window_s if made.window_s > 0 else 0.0 for made in rounds)

    def answers(made: _Round) -> list[RequestTiming]:
        return [one for one in made.timings if one is not None]

    return BenchArm(
        name=name,
        requests=len(sent),
        failed=len(sent) - len(answered),
        errors=dict(Counter(one.error for one in sent if one.error is not None).most_common()),
        output_tokens=tokens,
        window_s=window_s,
        tokens_per_s=None if tokens is None else tokens / window_s,
        requests_per_s=len(answered) / window_s,
        goodput=(
            metrics.goodput([one.timing for one in sent], plan.goodput_ms, window_s)
            if plan.goodput_ms
            else None
        ),
        tokens_per_s_by_round=(
            ()
            if tokens is None
            else per_round(lambda made: sum(one.output_tokens or 0 for one in answers(made)))
        ),
        requests_per_s_by_round=per_round(lambda made: len(answers(made))),
        goodput_by_round=(
            tuple(metrics.goodput(made.timings, plan.goodput_ms, made.window_s) for made in rounds)
            if plan.goodput_ms
            else ()
        ),
        latencies=metrics.latencies(by_prompt, seed=plan.seed),
        acceptance=metrics.acceptance(answered),
        lag_p50_ms=p50,
        lag_p99_ms=p99,
        lag_max_ms=max(lag) if lag else None,
    )


def speed_ratio(
    first: metrics.Answers, second: metrics.Answers, *, paired: bool = True, seed: int = 0
) -> Ratio:
    """Output tokens per second of request time, first over second. A pair of which one request
    failed counts for neither.

    At a fixed concurrency it is the ratio of throughputs too, since requests in flight = requests
    per second x time of one.
    """
    if not paired:
        return _unpaired_speed(first, second, seed)
    pairs = [list(zip(a, b, strict=True)) for a, b in zip(first, second, strict=True)]
    flat = [pair for row in pairs for pair in row]
    both = [(a, b) for a, b in flat if a is not None and b is not None]
    if (
        reason := _not_judged(
            len(flat) - len(both), len(flat), [one for pair in both for one in pair]
        )
    ) is not None:
        return Ratio("speed", None, None, None, reason)

    def column(arm: int, figure: str) -> list[list[float]]:
        return [
            [0 if None in pair else getattr(pair[arm], figure) or 0 for pair in row]
            for row in pairs
        ]

    tokens = column(0, "output_tokens"), column(1, "output_tokens")
    return Ratio(
        "speed", *bootstrap_ratio(tokens, (column(0, "e2e_ns"), column(1, "e2e_ns")), seed=seed)
    )


def _not_judged(failed: int, total: int, answered: Sequence[RequestTiming]) -> str | None:
    if not answered or failed > MOST_MISSING * total:
        return f"{failed} of {total} requests failed"
    if any(one.output_tokens is None for one in answered):
        return "the server does not count output tokens"
    return None if all(one.e2e_ns for one in answered) else "an answer without tokens"


def _unpaired_speed(first: metrics.Answers, second: metrics.Answers, seed: int) -> Ratio:
    """The same where nothing pairs: neither prompts nor rounds are shared."""
    tokens, times = [], []
    for arm in (first, second):
        requests = [request for row in arm for request in row]
        answered = [request for request in requests if request is not None]
        failed = len(requests) - len(answered)
        if (reason := _not_judged(failed, len(requests), answered)) is not None:
            return Ratio("speed", None, None, None, reason)
        tokens.append([request.output_tokens for request in answered])
        times.append([request.e2e_ns for request in answered])
    estimate, low, high = bootstrap_unpaired_ratio(
        (tokens[0], tokens[1]), (times[0], times[1]), seed=seed
    )
    return Ratio("speed", estimate, low, high)


def crossover(points: Sequence[BenchPoint]) -> Crossover | None:
    """Where the last arm stops being faster than the first, over the concurrencies of a sweep;
    None without one.
    """
    levels = [
        (point.concurrency, ratio.estimate, ratio.low, ratio.high)
        for point in points
        for ratio in point.ratios
        if ratio.metric == "speed" and point.concurrency is not None and ratio.estimate is not None
    ]
    if len(levels) < 2:
        return None
    levels.sort()
    pays = [level for level, _, low, _ in levels if low is not None and low > 1]
    stops = [level for level, _, _, high in levels if high is not None and high < 1]
    pays_up_to, stops_at = max(pays, default=None), min(stops, default=None)
    estimate = None
    for (below, before, *_), (above, after, *_) in itertools.pairwise(levels):
        if (
            before is not None and after is not None and before >= 1 > after
        ):  # straight in log concurrency and log ratio
            share = math.log(before) / (math.log(before) - math.log(after))
            estimate = float(below * (above / below) ** share)
            break
    highest = levels[-1][0]
    if stops_at is None:
        detail = (
            f"faster up to {pays_up_to} at a time"
            if pays_up_to is not None
            else "not shown to be faster at any load"
        )
        detail += "" if pays_up_to == highest else f"; beyond, up to {highest}, neither is shown"
    elif pays_up_to is None:
        detail = f"slower from {stops_at} at a time on, and nowhere shown to be faster"
    else:
        detail = f"faster up to {pays_up_to} at a time, slower from {stops_at} on"
    return Crossover(pays_up_to, stops_at, estimate, detail)


def _counted(
    counters: Callable[[], Mapping[str, float]] | None,
    before: Mapping[str, float],
    sent: Sequence[_Sent],
) -> tuple[CounterCheck, ...]:
    if counters is None:
        return ()
    answered = [one.timing for one in sent if one.timing is not None]
    expected = client_counts(answered, known=before)
    settle_s = (
        SETTLE_S if len(answered) == len(sent) else 0.3
    )  # with failures they hardly ever agree
    return reconcile(counters, before, expected, settle_s=settle_s) if expected else ()


def _findings(
    points: Sequence[BenchPoint], plan: Plan, checks: Sequence[CounterCheck], read: bool
) -> list[Finding]:
    """What a reader should know and no gate judges."""
    findings: list[Finding] = []
    failed = sum(arm.failed for point in points for arm in point.arms)
    unread = "the server's counters were not read (--metrics URL)"
    if read:
        unread = "the server has no counters that we know"
    findings.append(counters_finding(checks, unread=unread, failed=failed))
    for point in points:
        load = (
            f"{point.concurrency} at a time" if point.concurrency is not None else "the open loop"
        )
        for arm in point.arms:
            where = f"{arm.name} arm, {load}"
            for error, count in list(arm.errors.items())[:3]:
                findings.append(
                    Finding(
                        "errors",
                        "error",
                        f"{where}: {count} of {arm.requests} requests failed: {error}",
                    )
                )
            if arm.output_tokens is None and arm.failed < arm.requests:
                findings.append(
                    Finding(
                        "tokens",
                        "warning",
                        f"{where}: the server does not count output tokens; chunks are not counted"
                        " instead",
                    )
                )
            if arm.lag_p99_ms is not None and arm.lag_p99_ms > LATE_MS:
                detail = (
                    f"{where}: sends were late by {arm.lag_p99_ms:.1f} ms at p99; this machine"
                    " could not keep the schedule"
                )
                findings.append(Finding("lag", "warning", detail))
        if point.concurrency is not None and plan.requests < FEW * point.concurrency:
            detail = (
                f"{plan.requests} requests a round hardly keep {point.concurrency} in flight; use"
                " more (--requests)"
            )
            findings.append(Finding("load", "warning", detail))
    return findings


def undecided_speed(points: Sequence[BenchPoint], limits: Sequence[Limit]) -> Iterator[Finding]:
    """Two arms of which neither is shown to be faster, where no gate asks which."""
    if any(limit.metric == "speed" for limit in limits):
        return
    for point in points:
        for ratio in point.ratios:
            if (
                ratio.metric == "speed"
                and ratio.low is not None
                and ratio.high is not None
                and ratio.low <= 1 <= ratio.high
            ):
                load = (
                    f"{point.concurrency} at a time"
                    if point.concurrency is not None
                    else "the open loop"
                )
                detail = (
                    f"{load}: {point.arms[-1].name} is not shown to be faster or slower than"
                    f" {point.arms[0].name} ({ratio.low:.3f} to {ratio.high:.3f}); more"
                    " --max-rounds narrow it, --gate 'speed>=1.1' judges it"
                )
                yield Finding("speed", "warning", detail)


def _together(arms: Sequence[Arm], sent: Sequence[_Sent]) -> Iterator[Finding]:
    """Chunks that one read of the socket brought together: the gaps between them are the
    transport's, and not the server's.
    """
    for arm in arms:
        gaps = [
            gap
            for one in sent
            if one.arm == arm.name and one.timing is not None
            for gap in one.timing.icl_ns
        ]
        none = sum(gap == 0 for gap in gaps)
        if none > TOGETHER * len(gaps):
            detail = (
                f"{arm.name} arm: {none} of {len(gaps)} chunks came together with the one before,"
                " so itl and icl tell of the transport (a dash is no gap at all); tpot and e2e"
                " hold"
            )
            detail += (
                ". Measure over gRPC (host:port) for them"
                if arm.transport.protocol == "triton-http"
                else ""
            )
            yield Finding("streaming", "warning", detail)


def _saved(one: _Sent, began_ns: int) -> BenchRequest:
    figures = one.timing.statistics if one.timing is not None else Statistics()
    return BenchRequest(
        point=one.point,
        arm=one.arm,
        round=one.round,
        index=one.index,
        prompt=hashlib.sha256(one.prompt.encode("utf-8", "replace")).hexdigest()[:16],
        due_ns=None if one.due_ns is None else one.due_ns - began_ns,
        sent_ns=one.exchange.sent_ns - began_ns,
        ended_ns=one.exchange.ended_ns - began_ns,
        chunks=(
            ()
            if one.timing is None
            else tuple((at - began_ns, tokens) for at, tokens in one.timing.chunks)
        ),
        input_tokens=figures.input_tokens,
        output_tokens=figures.output_tokens,
        drafted=figures.drafted,
        accepted=figures.accepted,
        verify_steps=figures.verify_steps,
        finish_reason=None if one.timing is None else one.timing.finish_reason,
        error=one.error,
    )
