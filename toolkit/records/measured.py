"""The figures of a served deployment, what they mean, and the gates that judge them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from toolkit.words import GateOutcome, Severity

__all__ = [
    "Acceptance",
    "AcceptanceSlice",
    "AcceptanceWindow",
    "Arm",
    "Arms",
    "Better",
    "CounterCheck",
    "Direction",
    "Finding",
    "Gate",
    "Interval",
    "Latency",
    "Metric",
    "PositionAcceptance",
    "Ratio",
    "Scope",
    "Speedup",
    "TooFew",
    "Unit",
]

# share: a fraction of 1, shown in percent. "": a figure without a unit, or with several units.
Unit: TypeAlias = Literal[
    "ms", "x", "share", "nats", "tokens", "tokens/s", "tokens/step", "requests", "requests/s",
    "bytes", "p-value", "",
]  # fmt: skip
Better: TypeAlias = Literal["higher", "lower", "none"]
Direction: TypeAlias = Literal[
    "at_least", "at_most"
]  # where a passing figure lies: at least or at most the limit


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was checked. severity: ok | note (good to know, nothing to do) | warning |
    error.
    """

    check: str
    severity: Severity
    detail: str


@dataclass(frozen=True, slots=True)
class TooFew:
    """There are `have` samples, but the figure needs `need`."""

    have: int
    need: int


@dataclass(frozen=True, slots=True)
class Latency:
    """One latency of one arm, in milliseconds. A percentile with too few samples is None, and
    `unsupported` has the numbers under its name (p50 | p90 | p99).

    p90_low and p90_high: the bootstrap interval of p90 over prompts; likewise for p50 and p99.
    curve: the quantiles 0, 1, ... 100 percent, for plots. samples: the number of requests (ttft,
    tpot, e2e), chunks (icl) or tokens (itl, which is weighted by tokens).
    """

    samples: int
    mean: float | None
    p50: float | None
    p90: float | None
    p99: float | None
    p90_low: float | None
    p90_high: float | None
    unsupported: dict[str, TooFew]
    curve: tuple[float, ...]
    p50_low: float | None = None
    p50_high: float | None = None
    p99_low: float | None = None
    p99_high: float | None = None


@dataclass(frozen=True, slots=True)
class Arm:
    """One arm (plain or speculative) at one temperature, one request at a time.

    tokens_per_s = output_tokens / request_time_s, both summed over the requests.
    tokens_per_s_by_prompt: the same per prompt, in the prompts' order. latencies: ttft, tpot, itl,
    icl, e2e. distinct_4grams: distinct / all 4-grams of output tokens, averaged over requests with
    at least four tokens; texts that loop score low, and flatter speculation.
    """

    requests: int
    output_tokens: int
    request_time_s: float
    tokens_per_s: float
    tokens_per_s_by_prompt: tuple[float, ...]
    latencies: dict[str, Latency]
    distinct_4grams: float | None
    finish_reasons: dict[str, int]


@dataclass(frozen=True, slots=True)
class Arms:
    """A deployment without and with speculation. speculative None: it does not speculate."""

    plain: Arm
    speculative: Arm | None


@dataclass(frozen=True, slots=True)
class Ratio:
    """A figure of one arm divided by that of another, with its bootstrap interval.

    metric: a name in the table of metrics. percentile: if the metric is a latency. estimate None:
    `reason` says why, and too_few has the numbers if samples are lacking.
    """

    metric: str
    estimate: float | None
    low: float | None
    high: float | None
    reason: str | None = None
    percentile: int | None = None
    too_few: TooFew | None = None

    @property
    def name(self) -> str:
        """The metric with its percentile, such as ttft_p50 or speed."""
        return self.metric if self.percentile is None else f"{self.metric}_p{self.percentile}"


@dataclass(frozen=True, slots=True)
class Speedup:
    """Speculative / plain output tokens per second, with a bootstrap interval over prompts and
    rounds.

    latencies: the ratios of every percentile of every latency; above 1 is slower there.
    """

    estimate: float
    low: float
    high: float
    confidence: float
    prompts: int
    rounds: int
    latencies: tuple[Ratio, ...] = ()


@dataclass(frozen=True, slots=True)
class PositionAcceptance:
    """Acceptance at position i (from 0) of a draft. joint = accepted / drafted; conditional =
    joint / joint of the position before it.
    """

    drafted: int
    accepted: int
    joint: float | None
    conditional: float | None


@dataclass(frozen=True, slots=True)
class Acceptance:
    """rate = accepted / drafted; length = 1 + accepted / verify_steps, the bonus token included.
    None: nothing was drafted.

    alpha: accepted / verified draft tokens, without those after a rejection, with an interval over
    prompts; None if the server does not count by position.
    """

    rate: float | None
    length: float | None
    drafted: int
    accepted: int
    verify_steps: int
    by_position: tuple[PositionAcceptance, ...]
    alpha: Interval | None = None


@dataclass(frozen=True, slots=True)
class AcceptanceSlice:
    """The acceptance of some of the requests. of: those with prompts of `least` to `most` tokens,
    those whose prompt began in the KV cache of an earlier request (`reused_prefix`) or did not, or
    those of one domain, which has a `name`.

    rate: None where the server does not tell how many tokens were drafted. by_position: the share
    of the drafted tokens at each position that were accepted; empty where the server does not tell.
    """

    of: Literal["prompt_tokens", "reused_prefix", "new_prefix", "domain"]
    least: int
    most: int
    requests: int
    rate: float | None
    length: float | None
    name: str = ""
    by_position: tuple[float | None, ...] = ()


@dataclass(frozen=True, slots=True)
class AcceptanceWindow:
    """The acceptance of requests that were sent one after another, the first of them begin_s and
    the last end_s after the first of all. length, rate and by_position: as of AcceptanceSlice.
    """

    begin_s: float
    end_s: float
    requests: int
    rate: float | None
    length: float | None
    by_position: tuple[float | None, ...] = ()


@dataclass(frozen=True, slots=True)
class Scope:
    """Which figure of a metric a gate judges. A field is None if there is only one choice.

    temperature: 0 is greedy. over: what a ratio divides by. reference: the model whose choice of
    tokens counts as right. arm: of two saved runs. concurrency and rate: the load, if there are
    several loads or saved runs; a trace has neither.
    """

    temperature: float | None = None
    percentile: int | None = None
    over: Literal["plain", "first_arm", "run_a"] | None = None
    reference: Literal["engine", "source"] | None = None
    arm: str | None = None
    concurrency: int | None = None
    rate: float | None = None


@dataclass(frozen=True, slots=True)
class Gate:
    """One gate. outcome: PASS | FAIL | INCONCLUSIVE, or NOT JUDGED: speed and quality of a
    rehearsal, and `draft` if no text shows its steps.

    metric: a name in the table of metrics. unit: of measured and limit. name: for people, made from
    metric and scope (`make_gate`). detail: the reason in words. next_step: what to do unless the
    gate passed.
    """

    name: str
    metric: str
    scope: Scope
    unit: Unit
    direction: Direction
    outcome: GateOutcome
    measured: float | None
    limit: float | None
    detail: str
    next_step: str | None = None


@dataclass(frozen=True, slots=True)
class CounterCheck:
    """How much a server counter grew over the measured window, beside the client's own count."""

    name: str
    client: int
    server: int | None
    matches: bool


@dataclass(frozen=True, slots=True)
class Metric:
    """The name and the meaning of a figure. title: as written in the middle of a sentence.
    spelled_out: what an abbreviation stands for. better: which direction is better, if any.
    """

    name: str
    title: str
    unit: Unit
    better: Better
    formula: str
    numerator: str
    denominator: str
    note: str = ""
    spelled_out: str = ""


@dataclass(frozen=True, slots=True)
class Interval:
    """An estimate with its bootstrap interval."""

    estimate: float
    low: float
    high: float
