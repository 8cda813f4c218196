"""What `bench` measures at an endpoint, and how two of its runs compare."""

from __future__ import annotations

from dataclasses import dataclass

from toolkit.records.measured import (
    Acceptance,
    AcceptanceSlice,
    AcceptanceWindow,
    CounterCheck,
    Finding,
    Gate,
    Interval,
    Latency,
    Metric,
    Ratio,
)
from toolkit.words import AcceptanceSource, Verdict, WireProtocol

__all__ = [
    "BenchArm",
    "BenchEndpoint",
    "BenchPoint",
    "BenchRequest",
    "BenchRun",
    "ComparedPoint",
    "Comparison",
    "Crossover",
]


@dataclass(frozen=True, slots=True)
class BenchRequest:
    """One request of a bench, saved so that the run can be judged again. Times are in ns after the
    run's start.

    prompt: 16 hex digits of the sent text's sha256. chunks: (arrival, new tokens) as in
    `RequestTiming`. error: why it failed.
    """

    point: int
    arm: str
    round: int
    index: int
    prompt: str
    due_ns: int | None
    sent_ns: int
    ended_ns: int
    chunks: tuple[tuple[int, int | None], ...]
    input_tokens: int | None
    output_tokens: int | None
    drafted: int | None
    accepted: int | None
    verify_steps: int | None
    finish_reason: str | None
    error: str | None


@dataclass(frozen=True, slots=True)
class BenchArm:
    """One arm at one load. tokens_per_s, requests_per_s and goodput count all requests of the
    window together.

    window_s: from the first request sent (or due) to the end of the last one, summed over blocks of
    requests. *_by_round: the same figure for each round; the interval is computed from these.
    output_tokens None: the server did not count them. errors: text -> number of requests. lag_*:
    how late requests were sent, compared with the schedule of an open loop.

    goodput_share: of the sent requests, those that met every limit; None: no limits are stated.
    acceptance_over_time: of an open loop; a closed one sends when the server lets it.
    acceptance_slices: by length of the prompt, by domain, by reused prefix.

    acceptance_source: the answers of our requests, or the server's counters, which count other
    clients' requests, too; None: nothing tells the acceptance.
    """

    name: str
    requests: int
    failed: int
    errors: dict[str, int]
    output_tokens: int | None
    window_s: float
    tokens_per_s: float | None
    requests_per_s: float
    goodput: float | None
    tokens_per_s_by_round: tuple[float, ...]
    requests_per_s_by_round: tuple[float, ...]
    goodput_by_round: tuple[float, ...]
    latencies: dict[str, Latency]
    acceptance: Acceptance
    lag_p50_ms: float | None
    lag_p99_ms: float | None
    lag_max_ms: float | None
    acceptance_source: AcceptanceSource | None = None
    acceptance_rate_by_round: tuple[float, ...] = ()
    acceptance_length_by_round: tuple[float, ...] = ()
    goodput_share: Interval | None = None
    acceptance_over_time: tuple[AcceptanceWindow, ...] = ()
    acceptance_slices: tuple[AcceptanceSlice, ...] = ()

    @property
    def acceptance_rate(self) -> float | None:
        return self.acceptance.rate

    @property
    def acceptance_length(self) -> float | None:
        return self.acceptance.length


@dataclass(frozen=True, slots=True)
class BenchPoint:
    """One load: a number of concurrent requests, or a rate per second. ratios: the last arm's
    figures over the first arm's.
    """

    concurrency: int | None
    rate: float | None
    rounds: int
    arms: tuple[BenchArm, ...]
    ratios: tuple[Ratio, ...]


@dataclass(frozen=True, slots=True)
class Crossover:
    """Where the speed-up falls below 1. pays_up_to: the highest concurrency at which speculation
    was shown to pay. stops_at: the lowest at which it was shown not to pay. Between them nothing
    was shown. estimate: where the measured ratios cross 1, between the two.
    """

    pays_up_to: int | None
    stops_at: int | None
    estimate: float | None
    detail: str


@dataclass(frozen=True, slots=True)
class BenchEndpoint:
    """Where an arm's requests went."""

    arm: str
    address: str
    protocol: WireProtocol
    model: str


@dataclass(frozen=True, slots=True)
class BenchRun:
    """A saved run of `toolkit bench`, as docs/benchmarking.md explains it. settings: the options
    of the run. counters: if two arms have two servers, a counter's name follows the arm's.
    """

    schema_version: int
    created: str
    verdict: Verdict
    gates: tuple[Gate, ...]
    endpoints: tuple[BenchEndpoint, ...]
    settings: dict[str, str]
    points: tuple[BenchPoint, ...]
    crossover: Crossover | None
    counters: tuple[CounterCheck, ...]
    findings: tuple[Finding, ...]
    environment: dict[str, str]
    definitions: dict[str, Metric]
    requests: tuple[BenchRequest, ...]


@dataclass(frozen=True, slots=True)
class ComparedPoint:
    """The same load in two saved runs. ratios: B's figures over A's. paired: both sent the same
    prompts.
    """

    concurrency: int | None
    rate: float | None
    arm: str
    paired: bool
    prompts: int
    ratios: tuple[Ratio, ...]


@dataclass(frozen=True, slots=True)
class Comparison:
    """The judgement whether saved run B is slower than A by more than `tolerance` (a share)."""

    verdict: Verdict
    gates: tuple[Gate, ...]
    tolerance: float
    points: tuple[ComparedPoint, ...]
    findings: tuple[Finding, ...]
