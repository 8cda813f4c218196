"""Judge a divergence by the log-probabilities of both arms, if no reference can be asked.

A model that runs only in its server gives no logits. But it can return how probable its chosen
token was, and some servers also return the next best token. At the first difference both arms have
the same text before them: plain decoding chose a token of log-probability p, the other arm another
one of log-probability s, and each is the best of its arm. If rounding tipped the choice, the two
distributions are nearly the same, which shows in three ways:

    p and s are close, and neither token has much more than half of the probability, since two
    tokens cannot both have more
    if the next best token is returned, it is the other arm's choice, and hardly less probable
    on the tokens before, which both arms chose, their log-probabilities agree

The first mark is a number: the least change of log-probabilities between the arms, in nats, that
allows both choices. If the next best tokens are returned, each arm is the other's reference, and
the gaps are in logits, as differences of log-probabilities are. A fault shows p and s apart, or
both near 0 (the arms read different texts), or a drift before the texts diverge. All marks are
necessary and none is sufficient: a token of the same probability may be the right one by chance. So
this is weaker than asking a reference, and a fault shows over several divergences rather than in
each one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from toolkit.validate.severity import SUSPICIOUS, judge_gaps
from toolkit.words import DivergenceKind, ParityArm

if TYPE_CHECKING:
    from toolkit.client import RequestTiming

__all__ = ["BASIS", "LogProbJudgement", "judge_log_probs", "least_change", "unusable"]

BASIS = "judged by the served log-probabilities"
HALF = math.log(0.5)
ROUNDED_UP = 1e-3  # rounding may lift a log-probability above 0 by this much
SURE = 1e-7  # rounding may leave a probability of 1 in float32 short by this much


@dataclass(frozen=True, slots=True)
class LogProbJudgement:
    """What the log-probabilities show about one divergence. kind: as in Divergence. change, drift:
    in nats. margin and gaps: in logits; None if the next best tokens are not returned.
    """

    kind: DivergenceKind
    detail: str
    change: float | None = None
    drift: float | None = None
    margin: float | None = None
    ranks: tuple[int | None, int | None] = (None, None)
    gaps: tuple[float | None, float | None] = (None, None)


def judge_log_probs(
    position: int,
    plain: RequestTiming,
    other: RequestTiming,
    arm: ParityArm,
    near_tie_margin: float,
) -> LogProbJudgement:
    """Judge two texts that are the same up to `position`, differ there, and have
    log-probabilities.
    """
    for name, text in (("plain", plain), (arm, other)):
        if (why := unusable(text)) is not None:
            return LogProbJudgement(
                "unexplained", f"the {name} arm's log-probabilities say nothing: {why}"
            )
    own, others = plain.statistics.log_probs or (), other.statistics.log_probs or ()
    differences = [
        abs(first - second) for first, second in zip(own[:position], others[:position], strict=True)
    ]
    drift = max((value for value in differences if not math.isnan(value)), default=0.0)
    known = [
        values[position]
        for values in (own, others)
        if len(values) > position and not math.isnan(values[position])
    ]
    change = least_change(known)
    limit = SUSPICIOUS * near_tie_margin
    agree = f"on the {position} tokens before they agree within {drift:.3f}"
    if drift > limit:
        where = (
            f"the arms' log-probabilities differ by {drift:.3f} nats on a token that both chose,"
            " before their texts differ"
        )
        return LogProbJudgement("broken", f"{where}: {BASIS}", change, drift)
    if change > limit:
        values_text = " and ".join(f"{value:.3f}" for value in known)
        what = (
            f"the chosen tokens have log-probabilities {values_text}, which rounding of one"
            " distribution cannot produce"
        )
        return LogProbJudgement(
            "broken", f"{what} ({change:.3f} nats apart at least; {agree}): {BASIS}", change, drift
        )
    if len(known) < 2:
        return LogProbJudgement(
            "unexplained",
            "one arm gives no log-probability there: its text ends, or it reports other tokens",
            change,
            drift,
        )
    judged = _by_next_best(position, plain, other, change, near_tie_margin)
    if judged is None:
        kind: DivergenceKind = "equivalent" if change <= near_tie_margin else "suspicious"
        what = (
            f"log-probabilities {known[0]:.3f} and {known[1]:.3f}: a change of {change:.3f} nats"
            " allows both choices"
        )
        return LogProbJudgement(kind, f"{what}, {agree}: {BASIS}", change, drift)
    kind, margin, ranks, gaps = judged
    best = "is the other's next best" if max(ranks) == 1 else "is not always the other's next best"
    what = f"each arm's choice {best}, up to {max(gaps):.3f} logits below its own"
    return LogProbJudgement(
        kind, f"{what}; {agree} nats: {BASIS}", change, drift, margin, ranks, gaps
    )


def least_change(log_probs: Sequence[float]) -> float:
    """Return the least d (nats) at which two distributions, whose log-probabilities differ by at
    most d, can choose tokens with these log-probabilities.

    The two lie within d of each other, and the greater one, x, leaves room for the other token:
    exp(x) (1 + exp(-2 d)) <= 1.
    """
    most = max(log_probs, default=HALF)
    apart = most - min(log_probs, default=most)
    if most <= HALF:
        return apart
    return max(apart, -0.5 * math.log(max(SURE, math.expm1(-most))))


def unusable(text: RequestTiming) -> str | None:
    """Say why the log-probabilities cannot be the model's own; None if they can. NaN marks a place
    of which nothing is known.
    """
    values = text.statistics.log_probs
    if values is None:
        return "none came"
    if len(values) < len(text.token_ids):
        return f"{len(values)} came for {len(text.token_ids)} tokens"
    if any(value > ROUNDED_UP or math.isinf(value) for value in values):
        return "they are no log-probabilities"
    if values and all(value == 0.0 for value in values):
        return (
            "all are 0, as if they were computed over the one token that greedy decoding keeps, or"
            " not written at all"
        )
    return None


def _by_next_best(
    position: int, plain: RequestTiming, other: RequestTiming, change: float, near_tie_margin: float
) -> tuple[DivergenceKind, float, tuple[int, int], tuple[float, float]] | None:
    """Return (kind, margin of the plain arm, ranks, gaps), with each choice seen by the other arm.

    A choice that is not the other arm's next best lies at least as far below as that one. How much
    farther it may lie, only the chosen tokens limit.
    """
    views = [_next_best(text, position) for text in (plain, other)]
    if views[0] is None or views[1] is None:
        return None
    gaps = views[1][1], views[0][1]
    chosen = plain.token_ids[position], other.token_ids[position]
    ranks = 1 if views[1][0] == chosen[0] else 2, 1 if views[0][0] == chosen[1] else 2
    kind = judge_gaps(gaps, ranks, near_tie_margin)
    if kind == "equivalent" and max(ranks) > 1 and change > near_tie_margin:
        kind = "suspicious"
    return kind, views[0][1], ranks, gaps


def _next_best(text: RequestTiming, position: int) -> tuple[int, float] | None:
    """Return (the next best token, how far below the chosen one it lies)."""
    statistics = text.statistics
    if (
        statistics.next_best is None
        or statistics.next_best_log_probs is None
        or statistics.log_probs is None
    ):
        return None
    if min(len(statistics.next_best), len(statistics.next_best_log_probs)) <= position:
        return None
    gap = statistics.log_probs[position] - statistics.next_best_log_probs[position]
    return (statistics.next_best[position], gap) if math.isfinite(gap) else None
