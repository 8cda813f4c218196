"""An open loop at a rate that is stated, or found: how long it is, and how the rate is found.

A round sends each arm the same requests on the same schedule, and the arms take turns, so drift of
the machine affects both alike. Every block begins with a lead-in that is not judged, since an idle
server answers its first requests faster than it will answer the others.

    requests per arm   N = 10 / (1 - 0.99) / (1 - max_errors)   so that 10 answers lie beyond p99
    time per arm       T = max(N / rate, 60 s)                  in 4 rounds, each with its lead-in
    rounds             4, and more while a gate is undecided, as far as max_seconds reach

If max_seconds is not enough for 4 rounds, the rounds are shorter, and a percentile that then lacks
samples is INCONCLUSIVE.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from toolkit.bench.run import BenchOptions
from toolkit.config.schema import LoadGates
from toolkit.records.bench import BenchRun
from toolkit.records.load import LoadRun, RateProbe
from toolkit.resampling import samples_needed

__all__ = [
    "LoadSchedule",
    "Measure",
    "highest_rate",
    "load_limits",
    "load_schedule",
    "needed_requests",
    "needed_seconds",
    "run_load",
]

PERCENTILE = 99
ROUNDS = 4
MOST_ROUNDS = 16
LEAD_IN = 0.1  # of a block's requests
# Time per arm, even where the rate is so high that fewer seconds give all samples: a queue that
# grows takes time to show, and a block has to be long beside one answer.
LEAST_SECONDS = 60.0
PROBES = 8  # of a search, if search_seconds last
SEARCHING_SHARE = 0.5  # of search_seconds; the others confirm what was found
CONFIRMATIONS = 3
STEP_BACK = 1.15  # if a longer run does not confirm a rate
LEAST_PROBE_REQUESTS = 20
RESOLUTION = 1.1  # a search ends when a rate that failed is within this factor of one that kept

# Measures with these options: rate, requests and what else a load has.
Measure = Callable[[BenchOptions], BenchRun]


@dataclass(frozen=True, slots=True)
class LoadSchedule:
    """requests: per arm and round, the lead-in included; lead_in: how many of them."""

    requests: int
    lead_in: int
    rounds: int
    max_rounds: int

    @property
    def judged(self) -> int:
        """Requests per arm that are judged, in the least number of rounds."""
        return self.rounds * (self.requests - self.lead_in)


def needed_requests(limits: LoadGates) -> int:
    """Requests per arm, so that p99 has its samples even if as many fail as may."""
    return math.ceil(samples_needed(PERCENTILE) / (1 - limits.max_errors) - 1e-9)


def needed_seconds(rate: float, arms: int, limits: LoadGates) -> float:
    """Sending at this rate that gives every arm the requests it needs, lead-ins included."""
    return arms * max(needed_requests(limits) / rate, LEAST_SECONDS) / (1 - LEAD_IN)


def load_schedule(rate: float, arms: int, limits: LoadGates) -> LoadSchedule:
    """How much is sent at this rate. The formula is at the head of this module."""
    seconds = min(needed_seconds(rate, arms, limits), limits.max_seconds)
    block_s = seconds / (arms * ROUNDS)
    requests = max(1, math.ceil(rate * block_s - 1e-9))
    max_rounds = math.floor(limits.max_seconds / (arms * block_s) + 1e-9)
    return LoadSchedule(
        requests, int(LEAD_IN * requests), ROUNDS, min(max(ROUNDS, max_rounds), MOST_ROUNDS)
    )


def highest_rate(
    probe: Callable[[float, int], RateProbe], start: float, seconds: float
) -> tuple[float | None, tuple[RateProbe, ...]]:
    """(the highest rate found that keeps the limits, all probes); None: no probed rate kept them.

    probe: sends so many requests at a rate. start: requests per second. From there the rate is
    doubled, or halved, until one kept and one did not, and then halved between them (in
    logarithms). Longer runs confirm what was found, since a queue that grows slowly takes time to
    show, and step back while they do not. All share `seconds` of sending.
    """
    search = _Search(probe, seconds)
    kept, lost = 0.0, math.inf
    rate = start
    while len(search.probes) < PROBES:
        rate = float(f"{rate:.3g}")  # as it is printed
        result = search.run(rate, seconds * SEARCHING_SHARE / PROBES)
        if result is None:
            break
        if result.is_kept:
            kept = max(kept, rate)
        else:
            lost = min(lost, rate)
        if lost <= kept * RESOLUTION:
            break
        rate = 2 * kept if math.isinf(lost) else lost / 2
        if kept and not math.isinf(lost):
            rate = math.sqrt(kept * lost)
    if not kept:
        return None, tuple(search.probes)
    rate = kept
    confirm_s = seconds * (1 - SEARCHING_SHARE) / CONFIRMATIONS
    while (result := search.run(rate, confirm_s)) is not None and not result.is_kept:
        rate = float(f"{rate / STEP_BACK:.3g}")
    return rate, tuple(search.probes)


@dataclass
class _Search:
    """The probes of a search, and the time of sending that is left to it."""

    probe: Callable[[float, int], RateProbe]
    seconds: float
    probes: list[RateProbe] = field(default_factory=list)

    def run(self, rate: float, seconds: float) -> RateProbe | None:
        """Probe a rate for about this long; None if that would take too long. The first probe is
        always run.
        """
        requests = max(LEAST_PROBE_REQUESTS, round(rate * seconds))
        if self.probes and requests / rate > self.seconds:
            return None
        self.seconds -= requests / rate
        self.probes.append(self.probe(rate, requests))
        return self.probes[-1]


def load_limits(limits: LoadGates) -> tuple[str, ...]:
    """The limits of the YAML as `toolkit bench` reads them."""
    gates = [
        f"{name}_p{PERCENTILE}<={limit}"
        for name in ("ttft", "tpot", "itl", "e2e")
        if (limit := getattr(limits, f"max_{name}_p{PERCENTILE}_ms")) is not None
    ]
    if limits.goodput:
        gates.append(f"goodput_share>={limits.min_goodput}")
    return tuple(gates)


def run_load(
    measure: Measure, options: BenchOptions, limits: LoadGates, *, start_rate: float
) -> tuple[LoadRun, BenchRun | None]:
    """Find the rate if it is not stated, and measure all arms at it.

    options: endpoint, prompts and arms. start_rate: the first rate of a search, such as that of one
    request after another. The run is None if no rate kept the limits.
    """
    options = replace(
        options,
        arrivals=limits.arrivals,
        temperature=limits.temperature,
        concurrency=(),
        goodput=",".join(f"{name}={limit}" for name, limit in limits.goodput.items()) or None,
        precision=math.inf,  # the gates decide how much is measured, not the ratio of the arms
    )
    rate, probes = _rate(measure, options, limits, start_rate)
    arms = 2 if options.against_plain or options.baseline is not None else 1
    result = LoadRun(
        rate,
        limits.arrivals,
        limits.temperature,
        {str(name): limit for name, limit in limits.goodput.items()},
        limits.min_goodput,
        probes,
        needed_requests(limits),
        0,
        None,
    )
    if rate is None:
        return result, None
    schedule = load_schedule(rate, arms, limits)
    run = measure(
        replace(
            options,
            rate=rate,
            requests=schedule.requests,
            rounds=schedule.rounds,
            max_rounds=schedule.max_rounds,
            lead_in=LEAD_IN,
            gates=load_limits(limits),
        )
    )
    return replace(result, lead_in=schedule.lead_in, point=run.points[0]), run


def _rate(
    measure: Measure, options: BenchOptions, limits: LoadGates, start_rate: float
) -> tuple[float | None, tuple[RateProbe, ...]]:
    if limits.rate != "auto":
        return limits.rate, ()
    alone = replace(options, baseline=None, against_plain=False, rounds=1, max_rounds=1, warm_up=2)

    def probe(rate: float, requests: int) -> RateProbe:
        run = measure(replace(alone, rate=rate, requests=requests))
        arm = run.points[0].arms[-1]
        assert arm.goodput_share is not None  # the schema wants limits where the rate is found
        share = arm.goodput_share.estimate
        # Half of the misses that are allowed: the judged run is longer, and needs room.
        is_kept = (
            1 - share <= (1 - limits.min_goodput) / 2
            and arm.failed <= limits.max_errors * arm.requests
        )
        return RateProbe(rate, arm.requests, arm.failed, share, is_kept)

    return highest_rate(probe, start_rate, limits.search_seconds)
