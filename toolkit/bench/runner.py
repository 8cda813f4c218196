"""Put a load on any endpoint, measure it and judge it: `toolkit bench` and the concurrency sweep.

A run has points (one load each), a point has rounds, and in every round each arm gets the same
prompts in the same order. Arms take turns block by block, in random order and then the other way
round, so that neither drift of the machine nor going first favours an arm. Rounds are added, up to
a limit, until the ratio of the arms has the stated precision and no gate's interval contains its
limit.

Within an arm, no prompt is sent twice in a run. The warm-up is neither measured nor counted.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import random
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias

import numpy as np

from toolkit.bench import metrics
from toolkit.bench.arrivals import constant, poisson, run_closed, run_open, undisturbed, uniquely
from toolkit.bench.counters import (
    counters_finding,
    foreign_requests,
    has_equal_blocks,
    pooled,
)
from toolkit.bench.definitions import METRICS, PERCENTILES
from toolkit.bench.limits import Limit, judge, straddled
from toolkit.bench.meter import Meter
from toolkit.bench.prompts import Prompt, name_of
from toolkit.bench.proportions import clopper_pearson
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
from toolkit.records.measured import Acceptance, CounterCheck, Finding, Interval, Ratio
from toolkit.resampling import bootstrap_ratio, bootstrap_ratio_of_sums, bootstrap_unpaired_ratio
from toolkit.words import AcceptanceSource

__all__ = [
    "READABLE_VERSIONS",
    "SCHEMA_VERSION",
    "Arm",
    "Load",
    "Plan",
    "crossover",
    "run_bench",
    "speed_ratio",
    "undecided_speed",
]

SCHEMA_VERSION = 4
# Version 3 added where the acceptance is from, by round; version 4 the share within the limits.
READABLE_VERSIONS = (2, 3, SCHEMA_VERSION)
# Requests in a block, per request in flight. At its end fewer are in flight, and at its start the
# engine's weights come back into the caches, and those of its draft: both are a small part of it.
# One at a time, they are only as many as take so long: beyond that caches matter little, and the
# machine may have changed before the other arm's turn.
BLOCK_REQUESTS, BLOCK_NS = 8, 250_000_000
MAX_LAG_MS = 2.0  # if p99 of the lag is above, the load was not the requested one
MIN_REQUESTS = 4  # per round and request in flight; with fewer, the concurrency is not kept up
MAX_MERGED_SHARE = (
    0.25  # of chunks that came together with the one before; above, a finding says so
)
MAX_FAILED_SHARE = 0.1  # of the pairs; above, their ratio is not judged


@dataclass(frozen=True, slots=True)
class Arm:
    """Requests with these options to this endpoint, which are measured together.

    counters: reads the counters of its server, name -> value; None: they are not read. Arms with
    the same function share a server. alone: keeps the other arms' servers from computing while
    requests of this one run.
    """

    name: str
    transport: Transport
    options: Options
    counters: Callable[[], Mapping[str, float]] | None = None
    alone: Callable[[], AbstractContextManager[None]] = nullcontext


Arrivals: TypeAlias = Literal["poisson", "constant", "trace"]


@dataclass(frozen=True, slots=True)
class Load:
    """When requests are sent.

    concurrency: in a closed loop. rate, with `arrivals` poisson or constant, or trace (arrivals in
    ns): in an open loop. lead_in: the share of an open loop's requests, at the start of every
    block, that fill the idle server and are not judged.
    """

    concurrency: int | None = None
    rate: float | None = None
    arrivals: Arrivals = "poisson"
    trace: tuple[int, ...] | None = None
    lead_in: float = 0.0

    def __str__(self) -> str:
        if self.concurrency is not None:
            return f"{self.concurrency} at a time"
        return "on schedule" if self.rate is None else f"at {self.rate:g} requests/s"

    def schedule(self, count: int, seed: int) -> tuple[int, ...]:
        if self.trace is not None:
            return self.trace[:count]
        assert self.rate is not None
        if self.arrivals == "poisson":
            return poisson(self.rate, count, seed)
        return constant(self.rate, count)


@dataclass(frozen=True, slots=True)
class Plan:
    """How much is measured.

    domains: of the prompts, as toolkit.pipeline.rows reads them; or none. requests: per arm and
    round. max_tokens: of each of them, the same in every arm and round; none: as the arms say.
    precision: the half width that the interval of the ratio should have, as a share of the ratio.
    """

    prompts: tuple[Prompt, ...]
    loads: tuple[Load, ...]
    requests: int
    rounds: int = 1
    max_rounds: int = 1
    warm_up: int = 8
    precision: float = 0.05
    domains: tuple[str, ...] = ()
    max_tokens: tuple[int, ...] = ()
    goodput_ms: Mapping[str, float] = field(default_factory=dict)
    limits: tuple[Limit, ...] = ()
    seed: int = 0


@dataclass(slots=True)
class _Sent:
    """One request that was sent, answered or not."""

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
    """One arm in one round: its judged requests in the order of the prompts, and the time in which
    they ran. counted: the acceptance by the server's counters, if the answers do not tell it.
    lead_in: the requests before them, which are not judged.
    """

    sent: list[_Sent]
    window_s: float
    counted: Acceptance | None = None
    lead_in: list[_Sent] = field(default_factory=list)

    @property
    def timings(self) -> list[RequestTiming | None]:
        return [request.timing for request in self.sent]

    @property
    def answered(self) -> list[RequestTiming]:
        return [timing for timing in self.timings if timing is not None]


async def run_bench(
    arms: Sequence[Arm],
    plan: Plan,
    *,
    settings: Mapping[str, str],
    environment: Mapping[str, str],
    created: str,
    progress: Progress = lambda done, total, what: None,
) -> BenchRun:
    """Measure every load of the plan. Gates judge the last arm; ratios are the last arm's figure
    divided by the first's.

    Raises StageError if no request of the warm-up is answered, UsageError for an option that an
    endpoint does not have.
    """
    runner = _Runner(arms, plan, progress)
    warm = await runner.warm_up()
    for meter in runner.meters:
        meter.warmed_up(_of_arms(meter, warm))
    points = [await runner.point(number, load) for number, load in enumerate(plan.loads)]
    checks = [(meter, meter.checks(_of_arms(meter, runner.everything))) for meter in runner.meters]
    gates = [gate for point in points for gate in judge(plan.limits, point, at=len(points) > 1)]
    return BenchRun(
        schema_version=SCHEMA_VERSION,
        created=created,
        verdict=verdict(gates),
        gates=tuple(gates),
        endpoints=tuple(
            BenchEndpoint(
                arm.name, arm.transport.address, arm.transport.protocol, arm.transport.model
            )
            for arm in arms
        ),
        settings=dict(settings),
        points=tuple(points),
        crossover=crossover(points),
        counters=tuple(_named(checks)),
        findings=(
            *_protocol(arms),
            *_counters(checks, points),
            *_findings(points, plan),
            *undecided_speed(points, plan.limits),
            *_merged_chunks(arms, runner.everything),
        ),
        environment=dict(environment),
        # BenchArm calls the throughput tokens_per_s
        definitions=METRICS | {"tokens_per_s": METRICS["throughput"]},
        requests=tuple(_saved(request, runner.began_ns) for request in runner.everything),
    )


class _Runner:
    def __init__(self, arms: Sequence[Arm], plan: Plan, progress: Progress) -> None:
        self.arms = arms
        self.plan = plan
        self.everything: list[_Sent] = []
        self.began_ns = time.monotonic_ns()
        self.meters = _meters(arms)
        self._progress = progress
        self._random = random.Random(plan.seed)
        self._orders = self._in_turns()
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
            if all(answer.timing is None for answer in answers):
                raise StageError(
                    "bench",
                    f"no request of the warm-up was answered; the first: {answers[0].error}",
                    where=arm.transport.address,
                    hint=(
                        "Fix the endpoint or the options. `toolkit generate` sends a single"
                        " request."
                    ),
                )
            sent += answers
        return sent

    async def point(self, number: int, load: Load) -> BenchPoint:
        rounds: dict[str, list[_Round]] = {arm.name: [] for arm in self.arms}
        while True:
            round_number = len(rounds[self.arms[0].name])
            prompts = self._prompts[number * self.plan.max_rounds + round_number]
            with undisturbed():
                measured = await self._round(number, load, round_number, prompts)
            for name, measured_round in measured.items():
                rounds[name].append(measured_round)
            for meter in self.meters:
                counted = meter.round_ended(
                    [answer for name in meter.arms for answer in _all_timings(measured[name])]
                )
                for name in meter.arms:
                    measured[name].counted = counted
            count = round_number + 1
            if count >= self.plan.rounds:
                point = self._figures(load, rounds)
                if count >= self.plan.max_rounds or self._is_decided(point):
                    return point

    def _is_decided(self, point: BenchPoint) -> bool:
        """Whether the speed ratio is precise enough and no gate could change with more rounds."""
        speed = next((ratio for ratio in point.ratios if ratio.metric == "speed"), None)
        is_precise = True  # without a ratio, more rounds could not make it more precise
        if (
            speed is not None
            and speed.estimate
            and speed.high is not None
            and speed.low is not None
        ):
            is_precise = (speed.high - speed.low) / 2 <= self.plan.precision * speed.estimate
        return is_precise and not any(straddled(gate) for gate in judge(self.plan.limits, point))

    async def _round(
        self, number: int, load: Load, round_number: int, prompts: Sequence[Prompt]
    ) -> dict[str, _Round]:
        # The last prompts lead in: so the same prompts are judged in every round.
        judged = len(prompts) - int(load.lead_in * len(prompts))
        order = [
            *range(judged, len(prompts)),
            *self._random.sample(range(judged), judged),
        ]
        size = len(order)
        if load.concurrency is not None:
            size = 1 if load.concurrency == 1 else BLOCK_REQUESTS * load.concurrency
        expected = self._expected(number, round_number)
        sent: dict[str, list[_Sent]] = {arm.name: [] for arm in self.arms}
        window_ns = dict.fromkeys(sent, 0)
        start = 0
        while start < len(order):
            block = order[start : start + size]
            start += size
            longest_ns = 1
            for arm in next(self._orders):
                answers = await self._block(
                    arm, load, (number, round_number), [(i, prompts[i]) for i in block], expected
                )
                sent[arm.name] += answers
                end_ns = max(answer.exchange.ended_ns for answer in answers)
                longest_ns = max(longest_ns, end_ns - answers[0].start_ns)
                window_ns[arm.name] += end_ns - min(
                    answer.start_ns for answer in answers if answer.index < judged
                )
            if load.concurrency == 1:
                size = max(1, min(BLOCK_REQUESTS, BLOCK_NS * len(block) // longest_ns))
        rounds: dict[str, _Round] = {}
        for name, answers in sent.items():
            ordered = sorted(answers, key=lambda answer: answer.index)
            rounds[name] = _Round(ordered[:judged], window_ns[name] / 1e9, lead_in=ordered[judged:])
        return rounds

    def _in_turns(self) -> Iterator[list[Arm]]:
        """The order of the arms in each block of the run. A load may have one block per round."""
        while True:
            order = self._random.sample(list(self.arms), len(self.arms))
            yield order
            yield order[::-1]

    async def _block(
        self,
        arm: Arm,
        load: Load,
        where: tuple[int, int],
        prompts: Sequence[tuple[int, Prompt]],
        expected: int,
    ) -> list[_Sent]:
        asking = [self._asking(arm, index) for index, _ in prompts]
        requests = [
            own.transport.prepare(prompt, own.options)
            for (_, prompt), own in zip(prompts, asking, strict=True)
        ]
        done = len(self.everything)

        def count_one() -> None:
            nonlocal done
            done += 1
            self._progress(done, expected, f"measuring {load}")

        due: list[int | None] = [None] * len(requests)
        with arm.alone():
            if load.concurrency is not None:
                exchanges = await run_closed(arm.transport, requests, load.concurrency, count_one)
            else:
                schedule = load.schedule(len(requests), self.plan.seed + where[1])
                exchanges, times = await run_open(arm.transport, requests, schedule, count_one)
                due = list(times)
        answers = [
            self._read(own, *where, index, prompt, exchange, due_ns)
            for own, (index, prompt), exchange, due_ns in zip(
                asking, prompts, exchanges, due, strict=True
            )
        ]
        self.everything += answers
        return answers

    def _expected(self, point: int, round_number: int) -> int:
        """The number of requests of the run when a round begins, as far as is known: an undecided
        load takes more rounds.
        """
        rounds = max(1, self.plan.rounds - round_number)
        rounds += self.plan.rounds * (len(self.plan.loads) - 1 - point)
        return len(self.everything) + rounds * len(self.arms) * self.plan.requests

    def _asking(self, arm: Arm, index: int) -> Arm:
        """The arm with the length of this request."""
        lengths = self.plan.max_tokens
        if not lengths:
            return arm
        return replace(arm, options=replace(arm.options, max_tokens=lengths[index]))

    @staticmethod
    def _read(
        arm: Arm,
        point: int,
        round_number: int,
        index: int,
        prompt: Prompt,
        exchange: Exchange,
        due_ns: int | None,
    ) -> _Sent:
        timing, error, name = None, None, name_of(prompt)
        try:
            timing = read_exchange(arm.transport, name, exchange, arm.options.max_tokens, due_ns)
        except BadAnswer as bad:
            error = str(bad)
        return _Sent(point, arm.name, round_number, index, name, exchange, due_ns, timing, error)

    def _figures(self, load: Load, rounds: Mapping[str, Sequence[_Round]]) -> BenchPoint:
        names = [arm.name for arm in self.arms]
        arms = tuple(_arm(name, rounds[name], self.plan) for name in names)
        ratios: tuple[Ratio, ...] = ()
        if len(names) > 1:
            last, first = (
                [measured.timings for measured in rounds[name]] for name in (names[-1], names[0])
            )
            ratios = (
                speed_ratio(last, first, seed=self.plan.seed),
                *metrics.latency_ratios(last, first, seed=self.plan.seed),
            )
        return BenchPoint(load.concurrency, load.rate, len(rounds[names[0]]), arms, ratios)


def _arm(name: str, rounds: Sequence[_Round], plan: Plan) -> BenchArm:
    sent = [request for measured in rounds for request in measured.sent]
    answered = [request.timing for request in sent if request.timing is not None]
    tokens: int | None = None
    if answered and all(timing.output_tokens is not None for timing in answered):
        tokens = sum(timing.output_tokens or 0 for timing in answered)
    window_s = sum(measured.window_s for measured in rounds)
    lag_ms = [
        (request.exchange.sent_ns - request.due_ns) / 1e6
        for request in sent
        if request.due_ns is not None
    ]
    p50, p99 = (float(np.percentile(lag_ms, q)) for q in (50, 99)) if lag_ms else (None, None)

    def per_round(figure: Callable[[_Round], float]) -> tuple[float, ...]:
        return tuple(
            figure(measured) / measured.window_s if measured.window_s > 0 else 0.0
            for measured in rounds
        )

    tokens_by_round: tuple[float, ...] = ()
    if tokens is not None:
        tokens_by_round = per_round(
            lambda measured: sum(timing.output_tokens or 0 for timing in measured.answered)
        )
    acceptance, source, by_round = _acceptance(rounds, answered)
    goodput: float | None = None
    goodput_share: Interval | None = None
    goodput_by_round: tuple[float, ...] = ()
    if plan.goodput_ms:
        goodput_share = _share_within([*_drawn_together(rounds)], plan)
        goodput = metrics.goodput([request.timing for request in sent], plan.goodput_ms, window_s)
        goodput_by_round = tuple(
            metrics.goodput(measured.timings, plan.goodput_ms, measured.window_s)
            for measured in rounds
        )
    return BenchArm(
        name=name,
        requests=len(sent),
        failed=len(sent) - len(answered),
        errors=dict(
            Counter(request.error for request in sent if request.error is not None).most_common()
        ),
        output_tokens=tokens,
        window_s=window_s,
        tokens_per_s=None if tokens is None else tokens / window_s,
        requests_per_s=len(answered) / window_s,
        goodput=goodput,
        tokens_per_s_by_round=tokens_by_round,
        requests_per_s_by_round=per_round(lambda measured: len(measured.answered)),
        goodput_by_round=goodput_by_round,
        latencies=metrics.latencies(
            [
                [request.timing for request in group if request.timing is not None]
                for group in _drawn_together(rounds)
            ],
            seed=plan.seed,
        ),
        acceptance=acceptance,
        lag_p50_ms=p50,
        lag_p99_ms=p99,
        lag_max_ms=max(lag_ms, default=None),
        acceptance_source=source,
        acceptance_rate_by_round=_all_known(part.rate for part in by_round),
        acceptance_length_by_round=_all_known(part.length for part in by_round),
        goodput_share=goodput_share,
        acceptance_over_time=metrics.acceptance_over_time(answered if lag_ms else ()),
        acceptance_slices=metrics.acceptance_slices(answered, _domains(sent, plan)),
    )


def _domains(sent: Sequence[_Sent], plan: Plan) -> dict[str, str]:
    """Prompt -> domain. As `_Runner` does it, requests go through the prompts again and again."""
    domains = plan.domains
    return {request.prompt: domains[request.index % len(domains)] for request in sent if domains}


def _all_timings(measured: _Round) -> list[RequestTiming | None]:
    return [request.timing for request in (*measured.lead_in, *measured.sent)]


def _drawn_together(rounds: Sequence[_Round]) -> list[list[_Sent]]:
    """The groups of requests that the bootstrap of one arm draws whole.

    In a closed loop they are the requests of one prompt in all rounds. In an open loop requests
    that follow one another wait in the same queue, so a group is a run of consecutive arrivals; as
    many groups as requests in each let no queue be much longer than a group, and keep enough groups
    (a bootstrap of non-overlapping blocks: Carlstein 1986).
    """
    if any(request.due_ns is None for measured in rounds for request in measured.sent):
        columns = zip(*(measured.sent for measured in rounds), strict=True)
        return [list(column) for column in columns]
    size = max(1, math.isqrt(sum(len(measured.sent) for measured in rounds)))
    groups: list[list[_Sent]] = []
    for measured in rounds:
        arrived = sorted(measured.sent, key=lambda request: request.start_ns)
        groups += [arrived[at : at + size] for at in range(0, len(arrived), size)]
    return groups


def _share_within(groups: Sequence[Sequence[_Sent]], plan: Plan) -> Interval:
    """The share of the requests that met every limit of plan.goodput_ms.

    Its interval is the wider one, at each end, of the bootstrap, which knows that neighbours fail
    together, and of the exact bounds, which hold if none or all of them met the limits.
    """
    good = [
        sum(metrics.is_within(request.timing, plan.goodput_ms) for request in group)
        for group in groups
    ]
    sizes = [len(group) for group in groups]
    estimate, low, high = bootstrap_ratio_of_sums(good, sizes, seed=plan.seed)
    least, most = clopper_pearson(sum(good), sum(sizes))
    return Interval(estimate, min(low, least), max(high, most))


def _acceptance(
    rounds: Sequence[_Round], answered: Sequence[RequestTiming]
) -> tuple[Acceptance, AcceptanceSource | None, list[Acceptance]]:
    """(the acceptance, where it is from, the same of every round)."""
    told = metrics.acceptance(answered)
    if any(timing.statistics.drafted is not None for timing in answered):
        by_round = [
            _of_counts(*metrics.draft_counts(timing.statistics for timing in measured.answered))
            for measured in rounds
        ]
        return told, "requests", by_round
    counted = [measured.counted for measured in rounds if measured.counted is not None]
    if not counted or len(counted) < len(rounds):
        return told, None, []
    return pooled(counted), "counters", counted


def _of_counts(drafted: int, accepted: int, steps: int) -> Acceptance:
    rate = accepted / drafted if drafted else None
    length = 1 + accepted / steps if steps else None
    return Acceptance(rate, length, drafted, accepted, steps, ())


def _all_known(values: Iterable[float | None]) -> tuple[float, ...]:
    """The values, or none of them if one is not known."""
    listed = list(values)
    known = tuple(value for value in listed if value is not None)
    return known if len(known) == len(listed) else ()


def speed_ratio(
    first: metrics.Answers, second: metrics.Answers, *, paired: bool = True, seed: int = 0
) -> Ratio:
    """Output tokens per second of request time: the first arm's, divided by the second's. If one
    request of a pair failed, neither of the two counts.

    At a fixed concurrency it is also the ratio of throughputs, since requests in flight = requests
    per second x time of one.
    """
    if not paired:
        return _unpaired_speed(first, second, seed)
    pairs = [list(zip(a, b, strict=True)) for a, b in zip(first, second, strict=True)]
    flat = [pair for row in pairs for pair in row]
    whole = [(a, b) for a, b in flat if a is not None and b is not None]
    answered = [timing for pair in whole for timing in pair]
    reason = _why_not_judged(len(flat) - len(whole), len(flat), answered)
    if reason is not None:
        return Ratio("speed", None, None, None, reason)

    def column(arm: int, figure: str) -> list[list[float]]:
        return [
            [0 if None in pair else getattr(pair[arm], figure) or 0 for pair in row]
            for row in pairs
        ]

    tokens = column(0, "output_tokens"), column(1, "output_tokens")
    times = column(0, "e2e_ns"), column(1, "e2e_ns")
    return Ratio("speed", *bootstrap_ratio(tokens, times, seed=seed))


def _why_not_judged(failed: int, total: int, answered: Sequence[RequestTiming]) -> str | None:
    if not answered or failed > MAX_FAILED_SHARE * total:
        return f"{failed} of {total} requests failed"
    if any(timing.output_tokens is None for timing in answered):
        return "the server does not count output tokens"
    return None if all(timing.e2e_ns for timing in answered) else "an answer has no tokens"


def _unpaired_speed(first: metrics.Answers, second: metrics.Answers, seed: int) -> Ratio:
    """As `speed_ratio`, if the arms share neither prompts nor rounds, so that nothing is paired."""
    tokens, times = [], []
    for arm in (first, second):
        requests = [request for row in arm for request in row]
        answered = [request for request in requests if request is not None]
        failed = len(requests) - len(answered)
        if (reason := _why_not_judged(failed, len(requests), answered)) is not None:
            return Ratio("speed", None, None, None, reason)
        tokens.append([request.output_tokens for request in answered])
        times.append([request.e2e_ns for request in answered])
    estimate, low, high = bootstrap_unpaired_ratio(
        (tokens[0], tokens[1]), (times[0], times[1]), seed=seed
    )
    return Ratio("speed", estimate, low, high)


def crossover(points: Sequence[BenchPoint]) -> Crossover | None:
    """The concurrency of a sweep at which the last arm stops being faster than the first; None if
    there are not two concurrencies to compare.
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
    faster_at = [level for level, _, low, _ in levels if low is not None and low > 1]
    slower_at = [level for level, _, _, high in levels if high is not None and high < 1]
    pays_up_to, stops_at = max(faster_at, default=None), min(slower_at, default=None)
    estimate = None
    for (below, before, *_), (above, after, *_) in itertools.pairwise(levels):
        if before is not None and after is not None and before >= 1 > after:
            # A straight line in log concurrency and log ratio crosses 1 at this share of the way.
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
        detail = f"slower from {stops_at} at a time on, and not shown to be faster at any load"
    else:
        detail = f"faster up to {pays_up_to} at a time, slower from {stops_at} on"
    return Crossover(pays_up_to, stops_at, estimate, detail)


def _meters(arms: Sequence[Arm]) -> list[Meter]:
    """A meter for every server whose counters are read."""
    names: dict[Callable[[], Mapping[str, float]], list[str]] = {}
    for arm in arms:
        if arm.counters is not None:
            names.setdefault(arm.counters, []).append(arm.name)
    return [Meter(sharing, read) for read, sharing in names.items()]


def _of_arms(meter: Meter, sent: Sequence[_Sent]) -> list[RequestTiming | None]:
    return [request.timing for request in sent if request.arm in meter.arms]


def _named(
    checks: Sequence[tuple[Meter, tuple[CounterCheck, ...]]],
) -> Iterator[CounterCheck]:
    """The checks of all servers. If there are several, the arm stands before a counter's name."""
    for meter, of_server in checks:
        for check in of_server:
            is_alone = len(checks) == 1
            name = check.name if is_alone else f"{meter.arms[0]} {check.name}"
            yield replace(check, name=name)


def _protocol(arms: Sequence[Arm]) -> Iterator[Finding]:
    for arm in arms:
        if arm.transport.note is not None:
            yield Finding("protocol", "note", f"{arm.name} arm: {arm.transport.note}")
            if all(other.transport is arm.transport for other in arms):
                return  # the arms share a connection


def _counters(
    checks: Sequence[tuple[Meter, tuple[CounterCheck, ...]]], points: Sequence[BenchPoint]
) -> Iterator[Finding]:
    """What the counters of every server say, and what the acceptance that is from them means."""
    if not checks:
        yield counters_finding((), unread="the server's counters were not read (--metrics-url URL)")
    unread = "the server has no counters that this program knows"
    for meter, of_server in checks:
        arms = [arm for point in points for arm in point.arms if arm.name in meter.arms]
        said = counters_finding(of_server, unread=unread, failed=sum(arm.failed for arm in arms))
        where = f"{' and '.join(meter.arms)} arm: "
        is_alone = len(checks) == 1
        yield said if is_alone else replace(said, detail=where + said.detail)
        counted = [arm.acceptance for arm in arms if arm.acceptance_source == "counters"]
        if any(part.verify_steps for part in counted):
            yield from _counted_acceptance(where, pooled(counted), foreign_requests(of_server))


def _counted_acceptance(where: str, counted: Acceptance, foreign: int) -> Iterator[Finding]:
    detail = (
        f"{where}the acceptance is from the server's counters, since its answers do not tell it;"
        " so it has no alpha"
    )
    yield Finding("acceptance", "note", detail)
    if foreign:
        detail = (
            f"{where}the acceptance includes {foreign} requests of other clients, which the"
            " server's counters do not tell apart"
        )
        yield Finding("acceptance", "warning", detail)
    if not has_equal_blocks(counted):
        detail = (
            f"{where}blocks had different lengths, and the server does not count drafted tokens by"
            " position: the rates by position are of all verify steps"
        )
        yield Finding("acceptance", "note", detail)


def _findings(points: Sequence[BenchPoint], plan: Plan) -> list[Finding]:
    """Findings that a reader should know and that no gate judges."""
    findings: list[Finding] = []
    for point in points:
        load = _load_words(point)
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
                        f"{where}: the server does not count output tokens, and chunks cannot"
                        " replace the count",
                    )
                )
            if arm.lag_p99_ms is not None and arm.lag_p99_ms > MAX_LAG_MS:
                detail = (
                    f"{where}: requests were sent {arm.lag_p99_ms:.1f} ms late at p99; this machine"
                    " could not keep the schedule"
                )
                findings.append(Finding("lag", "warning", detail))
        if point.concurrency is not None and plan.requests < MIN_REQUESTS * point.concurrency:
            detail = (
                f"{plan.requests} requests per round are too few to keep {point.concurrency} in"
                " flight; use more (--requests)"
            )
            findings.append(Finding("load", "warning", detail))
    answered = min((arm.requests - arm.failed for point in points for arm in point.arms), default=0)
    lacking = {q: few for q in PERCENTILES if (few := metrics.too_few(answered, q)) is not None}
    if answered and lacking:
        needed = ", ".join(f"p{q} needs {few.need}" for q, few in lacking.items())
        detail = (
            f"{needed} answered requests, and there are {answered} (`toolkit bench --requests`)"
        )
        findings.append(Finding("percentiles", "note", detail))
    return findings


def undecided_speed(points: Sequence[BenchPoint], limits: Sequence[Limit]) -> Iterator[Finding]:
    """A finding per load at which neither arm is shown to be faster; none if a gate judges it."""
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
                detail = (
                    f"{_load_words(point)}: {point.arms[-1].name} is not shown to be faster or"
                    f" slower than {point.arms[0].name} ({ratio.low:.3f} to {ratio.high:.3f});"
                    " `toolkit bench` with more --max-rounds narrows it, with --gate 'speed>=1.1'"
                    " judges it"
                )
                yield Finding("speed", "warning", detail)


def _load_words(point: BenchPoint) -> str:
    return f"{point.concurrency} at a time" if point.concurrency is not None else "the open loop"


def _merged_chunks(arms: Sequence[Arm], sent: Sequence[_Sent]) -> Iterator[Finding]:
    """A finding per arm whose chunks often came several in one read of the socket: the gaps between
    them are made by the transport and not by the server.
    """
    for arm in arms:
        gaps = [
            gap
            for request in sent
            if request.arm == arm.name and request.timing is not None
            for gap in request.timing.icl_ns
        ]
        merged = sum(gap == 0 for gap in gaps)
        if merged > MAX_MERGED_SHARE * len(gaps):
            detail = (
                f"{arm.name} arm: {merged} of {len(gaps)} chunks came together with the one before,"
                " so itl and icl describe the transport (a dash means that there was no gap); tpot"
                " and e2e are correct"
            )
            if arm.transport.protocol == "triton-http":
                detail += ". To measure itl and icl, use gRPC (host:port)"
            yield Finding("streaming", "warning", detail)


def _saved(request: _Sent, began_ns: int) -> BenchRequest:
    statistics, finish_reason = Statistics(), None
    chunks: tuple[tuple[int, int | None], ...] = ()
    if (timing := request.timing) is not None:
        statistics, finish_reason = timing.statistics, timing.finish_reason
        chunks = tuple((at_ns - began_ns, tokens) for at_ns, tokens in timing.chunks)
    return BenchRequest(
        point=request.point,
        arm=request.arm,
        round=request.round,
        index=request.index,
        prompt=hashlib.sha256(request.prompt.encode("utf-8", "replace")).hexdigest()[:16],
        due_ns=None if request.due_ns is None else request.due_ns - began_ns,
        sent_ns=request.exchange.sent_ns - began_ns,
        ended_ns=request.exchange.ended_ns - began_ns,
        chunks=chunks,
        input_tokens=statistics.input_tokens,
        output_tokens=statistics.output_tokens,
        drafted=statistics.drafted,
        accepted=statistics.accepted,
        verify_steps=statistics.verify_steps,
        finish_reason=finish_reason,
        error=request.error,
    )
