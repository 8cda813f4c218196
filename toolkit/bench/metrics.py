"""From timed requests to the figures of an arm. Pure: measurements in, records out. The table in
definitions.py says what each figure means.

A `Rounds` is [round][prompt]: every round holds one timed request per prompt, in the prompts'
order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from toolkit.bench.definitions import LATENCIES, PERCENTILES
from toolkit.records.measured import (
    Acceptance,
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
    "acceptance",
    "arm",
    "delivered_late",
    "distinct_ngrams",
    "goodput",
    "latencies",
    "latency",
    "latency_ratios",
    "needed_words",
    "speedup",
    "throughput",
    "too_few",
    "too_few_words",
]

Rounds: TypeAlias = "Sequence[Sequence[RequestTiming]]"
Answers: TypeAlias = "Sequence[Sequence[RequestTiming | None]]"
Samples: TypeAlias = list[tuple[float, int]]  # (milliseconds, weight) of one request
NS_PER_MS = 1e6


def arm(rounds: Rounds, *, seed: int = 0) -> Arm:
    """The figures of one arm. Requests that put out no token count as requests and add nothing
    else.
    """
    requests = [request for one in rounds for request in one]
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
    """None: so many samples support this percentile."""
    needed = samples_needed(percentile)
    return TooFew(samples, needed) if samples < needed else None


def too_few_words(percentile: int, lacking: TooFew) -> str:
    """Why there is no such percentile."""
    if lacking.have == 0:
        return "no samples"
    return f"{lacking.have} samples; {needed_words(percentile, lacking)}"


def needed_words(percentile: int, lacking: TooFew) -> str:
    """What such a percentile takes, whatever there was."""
    return f"p{percentile} needs {lacking.need}, so that {SAMPLES_BEYOND} lie beyond it"


def latency(by_prompt: Sequence[Samples], seed: int = 0) -> Latency:
    """Percentiles of (milliseconds, weight) samples that are grouped by prompt."""
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
    found: dict[int, tuple[float | None, float | None, float | None]] = dict.fromkeys(
        PERCENTILES, (None, None, None)
    )
    for q, (low, high) in zip(supported, intervals, strict=True):
        found[q] = (percentile(values, q, weights), low, high)
    return Latency(
        samples=count,
        mean=float(np.average(values, weights=weights)),
        p50=found[50][0],
        p90=found[90][0],
        p99=found[99][0],
        p90_low=found[90][1],
        p90_high=found[90][2],
        unsupported=unsupported,
        curve=tuple(
            round(float(value), 4)
            for value in np.percentile(np.repeat(values, weights), range(101))
        ),
        p50_low=found[50][1],
        p50_high=found[50][2],
        p99_low=found[99][1],
        p99_high=found[99][2],
    )


def latencies(by_prompt: Sequence[Iterable[RequestTiming]], *, seed: int = 0) -> dict[str, Latency]:
    """Every latency of requests that are grouped by prompt."""
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
    """Percentiles of first's latencies over second's. [round][prompt]; None is a request that
    failed.

    paired: both measured the same prompts in the same rounds. Above 1, first is slower.
    """
    ratios: list[Ratio] = []
    for name in LATENCIES:
        arms = [
            [[[] if one is None else _samples(name, one) for one in row] for row in arm]
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
        found = dict(zip(supported, intervals, strict=True))
        for q in PERCENTILES:
            if (few := lacking[q]) is not None:
                ratios.append(_no_ratio(name, q, few))
                continue
            above, below = (percentile(*_values(arm, q)) for arm in arms)
            if below == 0.0 or not np.isfinite(found[q]).all():
                reason = "chunks that arrive at once have no gap to divide by"
                ratios.append(Ratio(name, None, None, None, reason, q))
            else:
                ratios.append(Ratio(name, above / below, *found[q], percentile=q))
    return tuple(ratios)


def _no_ratio(name: str, q: int, few: TooFew) -> Ratio:
    """Without any sample nothing was measured, which more of them would not change."""
    return Ratio(name, None, None, None, too_few_words(q, few), q, few if few.have else None)


def goodput(
    requests: Iterable[RequestTiming | None], limits_ms: Mapping[str, float], window_s: float
) -> float:
    """Requests per second that met every limit; latency -> ms. One that failed, or lacks a
    limited latency, met none.
    """
    return (
        sum(one is not None and _meets(one, limits_ms) for one in requests) / window_s
        if window_s > 0
        else 0.0
    )


def _meets(request: RequestTiming, limits_ms: Mapping[str, float]) -> bool:
    """A gap's limit holds for the largest gap of the request, so that one stall is not averaged
    away.

    One token has no gap that could be too long; tokens that nobody counted have gaps that nobody
    knows.
    """
    for name, limit in limits_ms.items():
        values = [value for value, _ in _samples(name, request)]
        single = name in ("tpot", "itl", "icl") and request.output_tokens == 1
        if not single and (not values or max(values) > limit):
            return False
    return True


def _values(arm: Sequence[Sequence[Samples]], q: float) -> tuple[list[float], float, list[int]]:
    flat = [sample for row in arm for group in row for sample in group]
    return [value for value, _ in flat], q, [weight for _, weight in flat]


def speedup(speculative: Rounds, plain: Rounds, *, seed: int = 0) -> Speedup:
    """Speculative over plain output tokens per second; both measured on the same prompts in the
    same rounds.
    """
    tokens = tuple(
        [[request.output_tokens or 0 for request in one] for one in rounds]
        for rounds in (speculative, plain)
    )
    times = tuple(
        [[request.e2e_ns or 0 for request in one] for one in rounds]
        for rounds in (speculative, plain)
    )
    estimate, low, high = bootstrap_ratio((tokens[0], tokens[1]), (times[0], times[1]), seed=seed)
    return Speedup(estimate, low, high, CONFIDENCE, prompts=len(plain[0]), rounds=len(plain))


def acceptance(
    requests: Iterable[RequestTiming], *, draft_len: int | None = None, seed: int = 0
) -> Acceptance:
    """Acceptance over all requests: sums first, then ratios. A server that reports nothing gives
    zeros and None.

    draft_len: of every block, where the server does not say how much was drafted.
    """
    by_prompt: dict[str, list[Statistics]] = {}
    for request in requests:
        by_prompt.setdefault(request.prompt, []).append(request.statistics)
    statistics = [one for group in by_prompt.values() for one in group]
    drafted, accepted, steps = (
        sum(getattr(one, name) or 0 for one in statistics)
        for name in ("drafted", "accepted", "verify_steps")
    )
    told = any(one.drafted is not None for one in statistics)
    block = drafted / max(steps, 1) if told else draft_len
    alpha = _alpha([_positions(group) for group in by_prompt.values()], seed)
    if alpha is None and block:
        alpha = _alpha_of_totals(by_prompt.values(), block, seed)
    return Acceptance(
        rate=accepted / drafted if drafted else None,
        length=1 + accepted / steps if steps else None,
        drafted=drafted,
        accepted=accepted,
        verify_steps=steps,
        by_position=_positions(statistics),
        alpha=alpha,
    )


def _positions(statistics: Sequence[Statistics]) -> tuple[PositionAcceptance, ...]:
    drafted_at = _sum_positions(one.drafted_by_position or () for one in statistics)
    accepted_at = _sum_positions(one.accepted_by_position or () for one in statistics)
    positions: list[PositionAcceptance] = []
    before: float | None = 1.0
    for proposed, kept in zip(drafted_at, accepted_at, strict=True):
        joint = kept / proposed if proposed else None
        conditional = joint / before if joint is not None and before else None
        positions.append(
            PositionAcceptance(
                proposed, kept, joint, None if conditional is None else min(1.0, conditional)
            )
        )
        before = joint
    return tuple(positions)


def _alpha(by_prompt: Sequence[Sequence[PositionAcceptance]], seed: int) -> Interval | None:
    """Maximum likelihood of alpha where every draft is kept alike and on its own: a geometric
    distribution, cut off at the draft length. A draft is looked at where all before it were kept;
    blocks of one length are looked at alike.
    """
    accepted: list[int] = []
    looked_at: list[float] = []
    for positions in by_prompt:
        reached = (1.0, *(place.joint or 0.0 for place in positions))
        accepted.append(sum(place.accepted for place in positions))
        looked_at.append(
            sum(place.drafted * before for place, before in zip(positions, reached, strict=False))
        )
    if not any(looked_at):
        return None
    estimate, low, high = bootstrap_ratio_of_sums(accepted, looked_at, seed=seed)
    return Interval(estimate, low, min(1.0, high))


def _alpha_of_totals(
    by_prompt: Iterable[Sequence[Statistics]], block: float, seed: int
) -> Interval | None:
    """The same where drafts are not counted by position: the alpha under which a block keeps as
    many as it does on average.
    """
    groups = list(by_prompt)
    accepted = [sum(answer.accepted or 0 for answer in group) for group in groups]
    steps = [sum(answer.verify_steps or 0 for answer in group) for group in groups]
    if not any(steps):
        return None
    kept = bootstrap_ratio_of_sums(accepted, steps, seed=seed)
    return Interval(*(_alpha_that_keeps(figure, block) for figure in kept))


def _alpha_that_keeps(kept: float, block: float) -> float:
    """Solves alpha + alpha^2 + ... + alpha^block = kept; block need not be a whole number."""
    from scipy.optimize import brentq

    if kept >= block:
        return 1.0

    def beyond(alpha: float) -> float:
        total = block if alpha == 1.0 else alpha * (1 - alpha**block) / (1 - alpha)
        return total - kept

    return float(brentq(beyond, 0.0, 1.0))


def delivered_late(requests: Iterable[RequestTiming], share: float = 0.1) -> tuple[int, int]:
    """(requests whose first token reached the client late, requests that can be judged).

    Late: the client's time to first token exceeds the server's own (arrival to first token, on its
    clock) by more than `share` of the whole request. Tokens that wait between server and client
    arrive in bursts, and bend TTFT, ITL and ICL.
    """
    late, judged = 0, 0
    for request in requests:
        known, arrived = request.statistics.first_token_ns, request.statistics.arrival_ns
        if (
            known is not None
            and arrived is not None
            and request.ttft_ns is not None
            and request.e2e_ns is not None
        ):
            judged += 1
            late += request.ttft_ns - (known - arrived) > share * request.e2e_ns
    return late, judged


def distinct_ngrams(tokens: Sequence[int], n: int = 4) -> float | None:
    """Distinct / all n-grams; None below n tokens."""
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
    """(output tokens, seconds) of the requests that put out tokens."""
    done = [
        (request.output_tokens or 0, request.e2e_ns)
        for request in requests
        if request.e2e_ns is not None
    ]
    return sum(tokens for tokens, _ in done), sum(ns for _, ns in done) / 1e9


def throughput(requests: Iterable[RequestTiming]) -> float:
    """Output tokens per second of request time."""
    tokens, elapsed_s = _sums(requests)
    return tokens / elapsed_s if elapsed_s else 0.0


def _sum_positions(rows: Iterable[Sequence[int]]) -> list[int]:
    rows = list(rows)
    return [
        sum(row[i] for row in rows if i < len(row)) for i in range(max(map(len, rows), default=0))
    ]
