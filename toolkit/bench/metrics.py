"""Compute the figures of an arm from its timed requests. The functions are pure: measurements in,
records out. The table in definitions.py says what each figure means.

A `Rounds` is [round][prompt]: every round holds one timed request per prompt, in the order of the
prompts.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Literal, TypeAlias

import numpy as np

from toolkit.bench.definitions import LATENCIES, PERCENTILES
from toolkit.records.measured import (
    Acceptance,
    AcceptanceSlice,
    AcceptanceWindow,
    Arm,
    Interval,
    Latency,
    PositionAcceptance,
    Ratio,
    Speedup,
    TooFew,
)
from toolkit.resampling import (
    CONFIDENCE,
    SAMPLES_BEYOND,
    bootstrap_percentile_ratios,
    bootstrap_percentiles,
    bootstrap_ratio,
    bootstrap_ratio_of_sums,
    percentile,
    samples_needed,
)

if TYPE_CHECKING:
    from toolkit.client import RequestTiming, Statistics

__all__ = [
    "LATENCIES",
    "PERCENTILES",
    "Delivery",
    "acceptance",
    "acceptance_over_time",
    "acceptance_slices",
    "arm",
    "delivery",
    "distinct_ngrams",
    "draft_counts",
    "goodput",
    "is_within",
    "latencies",
    "latency",
    "latency_ratios",
    "needed_words",
    "positions",
    "speedup",
    "throughput",
    "too_few",
    "too_few_words",
]

MOST_WINDOWS = 12  # of acceptance over time
WINDOW_REQUESTS = 8  # fewer requests say little about a window
PROMPT_LENGTHS = (0, 128, 512, 2048, 8192, 32768)  # where groups of prompts begin, in tokens

Rounds: TypeAlias = "Sequence[Sequence[RequestTiming]]"
Answers: TypeAlias = "Sequence[Sequence[RequestTiming | None]]"
Samples: TypeAlias = list[tuple[float, int]]  # (milliseconds, weight) of one request
NS_PER_MS = 1e6
NS_PER_S = 1e9


def arm(rounds: Rounds, *, seed: int = 0) -> Arm:
    """The figures of one arm. A request without output tokens counts as a request and adds nothing
    to other figures.
    """
    requests = [request for row in rounds for request in row]
    columns = list(zip(*rounds, strict=True))  # [prompt][round]
    tokens, elapsed_s = _sums(requests)
    ratios = [
        ratio for request in requests if (ratio := distinct_ngrams(request.token_ids)) is not None
    ]
    return Arm(
        requests=len(requests),
        output_tokens=tokens,
        request_time_s=elapsed_s,
        tokens_per_s=throughput(requests),
        tokens_per_s_by_prompt=tuple(throughput(column) for column in columns),
        latencies=latencies(columns, seed=seed),
        distinct_4grams=float(np.mean(ratios)) if ratios else None,
        finish_reasons=dict(
            sorted(Counter(request.finish_reason or "none" for request in requests).items())
        ),
    )


def too_few(samples: int, percentile: int) -> TooFew | None:
    """How many samples this percentile lacks; None if there are enough."""
    needed = samples_needed(percentile)
    return TooFew(samples, needed) if samples < needed else None


def too_few_words(percentile: int, lacking: TooFew) -> str:
    """Why the percentile is not given, in words."""
    if lacking.have == 0:
        return "no samples"
    return f"{lacking.have} samples; {needed_words(percentile, lacking)}"


def needed_words(percentile: int, lacking: TooFew) -> str:
    """How many samples the percentile needs, in words; the number of samples that there are does
    not matter.
    """
    return f"p{percentile} needs {lacking.need}, so that {SAMPLES_BEYOND} lie beyond it"


def latency(by_prompt: Sequence[Samples], seed: int = 0) -> Latency:
    """The mean and the percentiles of (milliseconds, weight) samples that are grouped by prompt."""
    groups = [group for group in by_prompt if group]
    values = [value for group in groups for value, _ in group]
    weights = [weight for group in groups for _, weight in group]
    count = sum(weights)
    unsupported = {
        f"p{q}": lacking for q in PERCENTILES if (lacking := too_few(count, q)) is not None
    }
    if not values:
        return Latency(0, None, None, None, None, None, None, unsupported, ())
    supported = [q for q in PERCENTILES if f"p{q}" not in unsupported]
    intervals = (
        bootstrap_percentiles(
            [[value for value, _ in group] for group in groups],
            supported,
            [[weight for _, weight in group] for group in groups],
            seed=seed,
        )
        if supported
        else ()
    )
    # percentile -> (value, low, high)
    figures: dict[int, tuple[float | None, float | None, float | None]] = dict.fromkeys(
        PERCENTILES, (None, None, None)
    )
    for q, (low, high) in zip(supported, intervals, strict=True):
        figures[q] = (percentile(values, q, weights), low, high)
    return Latency(
        samples=count,
        mean=float(np.average(values, weights=weights)),
        p50=figures[50][0],
        p90=figures[90][0],
        p99=figures[99][0],
        p90_low=figures[90][1],
        p90_high=figures[90][2],
        unsupported=unsupported,
        curve=tuple(
            round(float(value), 4)
            for value in np.percentile(np.repeat(values, weights), range(101))
        ),
        p50_low=figures[50][1],
        p50_high=figures[50][2],
        p99_low=figures[99][1],
        p99_high=figures[99][2],
    )


def latencies(by_prompt: Sequence[Iterable[RequestTiming]], *, seed: int = 0) -> dict[str, Latency]:
    """All latencies of LATENCIES, by name, for requests that are grouped by prompt."""
    groups = [list(group) for group in by_prompt]
    return {
        name: latency(
            [
                [sample for request in group for sample in _samples(name, request)]
                for group in groups
            ],
            seed,
        )
        for name in LATENCIES
    }


def latency_ratios(
    first: Answers, second: Answers, *, paired: bool = True, seed: int = 0
) -> tuple[Ratio, ...]:
    """The percentiles of the first arm's latencies, divided by the second arm's.

    Both are [round][prompt]; None is a failed request. paired: both arms measured the same prompts
    in the same rounds. A ratio above 1 means that the first arm is slower.
    """
    ratios: list[Ratio] = []
    for name in LATENCIES:
        arms = [
            [[[] if answer is None else _samples(name, answer) for answer in row] for row in arm]
            for arm in (first, second)
        ]
        counts = [
            sum(weight for row in arm for group in row for _, weight in group) for arm in arms
        ]
        lacking = {q: too_few(min(counts), q) for q in PERCENTILES}
        supported = [q for q in PERCENTILES if lacking[q] is None]
        intervals = (
            bootstrap_percentile_ratios(arms[0], arms[1], supported, paired=paired, seed=seed)
            if supported
            else ()
        )
        interval_of = dict(zip(supported, intervals, strict=True))
        for q in PERCENTILES:
            if (few := lacking[q]) is not None:
                ratios.append(_no_ratio(name, q, few))
                continue
            numerator, denominator = (percentile(*_values(arm, q)) for arm in arms)
            if denominator == 0.0 or not np.isfinite(interval_of[q]).all():
                reason = "chunks arrived at once, so the gap to divide by is zero"
                ratios.append(Ratio(name, None, None, None, reason, q))
            else:
                estimate = numerator / denominator
                ratios.append(Ratio(name, estimate, *interval_of[q], percentile=q))
    return tuple(ratios)


def _no_ratio(name: str, q: int, few: TooFew) -> Ratio:
    """A ratio without an estimate. It says `too_few` only if there is any sample: where nothing was
    measured, a longer run would not help.
    """
    return Ratio(name, None, None, None, too_few_words(q, few), q, few if few.have else None)


def goodput(
    requests: Iterable[RequestTiming | None], limits_ms: Mapping[str, float], window_s: float
) -> float:
    """Requests per second that met every limit. limits_ms: latency -> ms.

    A request that failed, or that lacks a limited latency, does not count.
    """
    if window_s <= 0:
        return 0.0
    return sum(is_within(request, limits_ms) for request in requests) / window_s


def is_within(request: RequestTiming | None, limits_ms: Mapping[str, float]) -> bool:
    """Whether the request met every limit; None is a request that failed.

    A limit of a gap holds for the largest gap, so that one stall is not averaged away. An answer of
    one token has no gap, so it meets such a limit. If the tokens were not counted, the gaps are
    unknown, and the limit is not met.
    """
    if request is None:
        return False
    for name, limit in limits_ms.items():
        values = [value for value, _ in _samples(name, request)]
        has_no_gap = name in ("tpot", "itl", "icl") and request.output_tokens == 1
        if not has_no_gap and (not values or max(values) > limit):
            return False
    return True


def _values(arm: Sequence[Sequence[Samples]], q: float) -> tuple[list[float], float, list[int]]:
    flat = [sample for row in arm for group in row for sample in group]
    return [value for value, _ in flat], q, [weight for _, weight in flat]


def speedup(speculative: Rounds, plain: Rounds, *, seed: int = 0) -> Speedup:
    """Output tokens per second of the speculative arm, divided by the plain arm's. Both measured
    the same prompts in the same rounds.
    """
    tokens = tuple(
        [[request.output_tokens or 0 for request in row] for row in rounds]
        for rounds in (speculative, plain)
    )
    times = tuple(
        [[request.e2e_ns or 0 for request in row] for row in rounds]
        for rounds in (speculative, plain)
    )
    estimate, low, high = bootstrap_ratio((tokens[0], tokens[1]), (times[0], times[1]), seed=seed)
    return Speedup(estimate, low, high, CONFIDENCE, prompts=len(plain[0]), rounds=len(plain))


def acceptance(
    requests: Iterable[RequestTiming], *, draft_len: int | None = None, seed: int = 0
) -> Acceptance:
    """Acceptance over all requests: the counts are summed first and then divided. If the server
    reports nothing, counts are 0 and ratios None.

    draft_len: the length of every block, if the server does not report the drafted tokens.
    """
    by_prompt: dict[str, list[Statistics]] = {}
    for request in requests:
        by_prompt.setdefault(request.prompt, []).append(request.statistics)
    statistics = [answer for group in by_prompt.values() for answer in group]
    drafted, accepted, steps = draft_counts(statistics)
    is_drafted_known = any(answer.drafted is not None for answer in statistics)
    block_len = drafted / max(steps, 1) if is_drafted_known else draft_len
    alpha = _alpha([_positions(group) for group in by_prompt.values()], seed)
    if alpha is None and block_len:
        alpha = _alpha_of_totals(by_prompt.values(), block_len, seed)
    return Acceptance(
        rate=accepted / drafted if drafted else None,
        length=1 + accepted / steps if steps else None,
        drafted=drafted,
        accepted=accepted,
        verify_steps=steps,
        by_position=_positions(statistics),
        alpha=alpha,
    )


def acceptance_slices(
    requests: Iterable[RequestTiming], domain_of: Mapping[str, str] | None = None
) -> tuple[AcceptanceSlice, ...]:
    """Acceptance by the length of the prompt, by domain if there are several, and with and without
    a reused prefix where the server tells. Only requests whose verify steps it counts; empty if
    there are none.

    domain_of: prompt -> its domain; prompts without one are left out.
    """
    told = [
        (request.prompt, request.statistics)
        for request in requests
        if request.statistics.verify_steps and request.statistics.input_tokens is not None
    ]
    statistics = [answer for _, answer in told]
    slices: list[AcceptanceSlice] = []
    for least, end in zip(PROMPT_LENGTHS, (*PROMPT_LENGTHS[1:], math.inf), strict=True):
        slices += _slice(
            "prompt_tokens", [one for one in statistics if least <= _length(one) < end]
        )
    by_domain: dict[str, list[Statistics]] = {}
    for prompt, answer in told:
        if domain := (domain_of or {}).get(prompt):
            by_domain.setdefault(domain, []).append(answer)
    if len(by_domain) > 1:
        for domain, part in sorted(by_domain.items()):
            slices += _slice("domain", part, domain)
    known = [one for one in statistics if one.reused_blocks is not None]
    if any(one.reused_blocks for one in known):
        slices += _slice("new_prefix", [one for one in known if not one.reused_blocks])
        slices += _slice("reused_prefix", [one for one in known if one.reused_blocks])
    return tuple(slices)


def _slice(
    of: Literal["prompt_tokens", "reused_prefix", "new_prefix", "domain"],
    part: Sequence[Statistics],
    name: str = "",
) -> list[AcceptanceSlice]:
    if not part:
        return []
    rate, acceptance_length, by_position = _acceptance_of(part)
    lengths = [_length(one) for one in part]
    return [
        AcceptanceSlice(
            of, min(lengths), max(lengths), len(part), rate, acceptance_length, name, by_position
        )
    ]


def _acceptance_of(
    part: Sequence[Statistics],
) -> tuple[float | None, float | None, tuple[float | None, ...]]:
    """(rate, length, joint rate at each position), from counts that are summed first."""
    drafted, accepted, steps = draft_counts(part)
    return (
        accepted / drafted if drafted else None,
        1 + accepted / steps if steps else None,
        tuple(position.joint for position in _positions(part)),
    )


def acceptance_over_time(requests: Iterable[RequestTiming]) -> tuple[AcceptanceWindow, ...]:
    """Acceptance in windows of equally many requests, in the order in which they were sent; empty
    if the server counts no verify steps, or there are too few requests for two windows.

    Windows of equal time would be empty while another arm has its turn.
    """
    told = sorted(
        (request for request in requests if request.statistics.verify_steps is not None),
        key=lambda request: request.sent_ns,
    )
    count = min(MOST_WINDOWS, len(told) // WINDOW_REQUESTS)
    if count < 2 or not any(request.statistics.verify_steps for request in told):
        return ()
    first_ns = told[0].sent_ns
    edges = [round(index * len(told) / count) for index in range(count + 1)]
    parts = [told[begin:end] for begin, end in pairwise(edges)]
    return tuple(
        AcceptanceWindow(
            (part[0].sent_ns - first_ns) / NS_PER_S,
            (part[-1].sent_ns - first_ns) / NS_PER_S,
            len(part),
            *_acceptance_of([request.statistics for request in part]),
        )
        for part in parts
    )


def _length(statistics: Statistics) -> int:
    return statistics.input_tokens or 0


def draft_counts(statistics: Iterable[Statistics]) -> tuple[int, int, int]:
    """(drafted tokens, accepted ones, verify steps), summed."""
    answers = list(statistics)
    drafted, accepted, steps = (
        sum(getattr(answer, name) or 0 for answer in answers)
        for name in ("drafted", "accepted", "verify_steps")
    )
    return drafted, accepted, steps


def _positions(statistics: Sequence[Statistics]) -> tuple[PositionAcceptance, ...]:
    """Empty if a server tells accepted tokens by position, and not the drafted ones."""
    drafted_at, accepted_at = (
        _sum_positions(getattr(answer, name) or () for answer in statistics)
        for name in ("drafted_by_position", "accepted_by_position")
    )
    return positions(drafted_at, accepted_at) if len(drafted_at) == len(accepted_at) else ()


def positions(
    drafted_at: Sequence[int], accepted_at: Sequence[int]
) -> tuple[PositionAcceptance, ...]:
    """The acceptance at each position of a block, from drafted and accepted tokens by position."""
    rates: list[PositionAcceptance] = []
    joint_before: float | None = 1.0
    for drafted, accepted in zip(drafted_at, accepted_at, strict=True):
        joint = accepted / drafted if drafted else None
        conditional = None
        if joint is not None and joint_before:
            conditional = min(1.0, joint / joint_before)
        rates.append(PositionAcceptance(drafted, accepted, joint, conditional))
        joint_before = joint
    return tuple(rates)


def _alpha(by_prompt: Sequence[Sequence[PositionAcceptance]], seed: int) -> Interval | None:
    """The maximum-likelihood estimate of alpha, if every draft token is accepted independently and
    with the same probability: a geometric distribution that is cut off at the draft length.
    """
    from toolkit.client import looked_at  # which imports grpc

    accepted: list[int] = []
    looked: list[float] = []
    for positions in by_prompt:
        accepted_at = [position.accepted for position in positions]
        accepted.append(sum(accepted_at))
        looked.append(looked_at([position.drafted for position in positions], accepted_at))
    if not any(looked):
        return None
    estimate, low, high = bootstrap_ratio_of_sums(accepted, looked, seed=seed)
    return Interval(estimate, low, min(1.0, high))


def _alpha_of_totals(
    by_prompt: Iterable[Sequence[Statistics]], block_len: float, seed: int
) -> Interval | None:
    """As `_alpha`, if draft tokens are not counted by position: the alpha under which the expected
    number of accepted tokens per block equals the mean.
    """
    groups = list(by_prompt)
    accepted = [sum(answer.accepted or 0 for answer in group) for group in groups]
    steps = [sum(answer.verify_steps or 0 for answer in group) for group in groups]
    if not any(steps):
        return None
    per_block = bootstrap_ratio_of_sums(accepted, steps, seed=seed)
    return Interval(*(_alpha_that_accepts(figure, block_len) for figure in per_block))


def _alpha_that_accepts(accepted: float, block_len: float) -> float:
    """Solve alpha + alpha^2 + ... + alpha^block_len = accepted. block_len need not be a whole
    number.
    """
    from scipy.optimize import brentq

    if accepted >= block_len:
        return 1.0

    def excess(alpha: float) -> float:
        total = block_len if alpha == 1.0 else alpha * (1 - alpha**block_len) / (1 - alpha)
        return total - accepted

    return float(brentq(excess, 0.0, 1.0))


@dataclass(frozen=True, slots=True)
class Delivery:
    """How many requests' first tokens came late, of those that can be judged.

    late: the client's time to first token exceeds the server's (from arrival to first token, on the
    server's clock) by more than a share of the whole request. The other two split it where client
    and server have one clock: late_in, the request itself took longer than that share until the
    server had it; late_out, the first token took longer than that from the server to the client.
    Tokens that wait on the way out arrive in bursts, which distorts TTFT, ITL and ICL.
    """

    judged: int
    late: int
    same_clock: int  # of those judged
    late_in: int
    late_out: int


def delivery(requests: Iterable[RequestTiming], share: float = 0.1) -> Delivery:
    """Both machines count nanoseconds since they were started. Times that lie in the right order
    between those of the client are of one clock: another one's would be off by minutes or days.
    """
    judged = late = same_clock = late_in = late_out = 0
    for request in requests:
        first_token_ns = request.statistics.first_token_ns
        arrival_ns = request.statistics.arrival_ns
        if (
            first_token_ns is not None
            and arrival_ns is not None
            and request.ttft_ns is not None
            and request.e2e_ns is not None
        ):
            judged += 1
            limit_ns = share * request.e2e_ns
            late += request.ttft_ns - (first_token_ns - arrival_ns) > limit_ns
            first_received_ns = request.chunks[0][0]
            if request.sent_ns <= arrival_ns <= first_token_ns <= first_received_ns:
                same_clock += 1
                late_in += arrival_ns - request.sent_ns > limit_ns
                late_out += first_received_ns - first_token_ns > limit_ns
    return Delivery(judged, late, same_clock, late_in, late_out)


def distinct_ngrams(tokens: Sequence[int], n: int = 4) -> float | None:
    """Distinct n-grams / all n-grams; None if there are fewer than n tokens."""
    ngrams = [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]
    return len(set(ngrams)) / len(ngrams) if ngrams else None


def _once(value_ns: int | None) -> Samples:
    return [] if value_ns is None else [(value_ns / NS_PER_MS, 1)]


def _samples(name: str, request: RequestTiming) -> Samples:
    if name == "itl":
        return [(gap / NS_PER_MS, tokens) for gap, tokens in request.itl]
    if name == "icl":
        return [(gap / NS_PER_MS, 1) for gap in request.icl_ns]
    return _once({"ttft": request.ttft_ns, "tpot": request.tpot_ns, "e2e": request.e2e_ns}[name])


def _sums(requests: Iterable[RequestTiming]) -> tuple[int, float]:
    """(output tokens, seconds) of the requests with output tokens."""
    answered = [
        (request.output_tokens or 0, request.e2e_ns)
        for request in requests
        if request.e2e_ns is not None
    ]
    return sum(tokens for tokens, _ in answered), sum(ns for _, ns in answered) / 1e9


def throughput(requests: Iterable[RequestTiming]) -> float:
    """Output tokens per second of request time."""
    tokens, elapsed_s = _sums(requests)
    return tokens / elapsed_s if elapsed_s else 0.0


def _sum_positions(rows: Iterable[Sequence[int]]) -> list[int]:
    rows = list(rows)
    return [
        sum(row[i] for row in rows if i < len(row)) for i in range(max(map(len, rows), default=0))
    ]
