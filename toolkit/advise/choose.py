"""From what is kept and what it costs to a draft length, a schedule over batch sizes, or the advice
not to speculate.

Pure arithmetic. Time of a set of texts = prefill + steps, a step's time depending on how many
tokens its widest row drafted. The interval resamples whole prompts and the timed steps together,
with the same draws for plain and speculative decoding and for all draft lengths, so that what they
share cancels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from toolkit.advise.acceptance import (
    Drafted,
    Replay,
    by_domain,
    expected_tokens,
    leviathan_speedup,
    replay,
)
from toolkit.advise.cost import QUANTILE, StepCosts
from toolkit.records.advice import Alpha, Candidate, ScheduleStep, SpeedupPrediction
from toolkit.resampling import interval, resampled, times_drawn
from toolkit.words import AlphaRule, DecodingMode, Drafter

__all__ = ["Mode", "alphas", "break_even_alpha", "judge", "schedule_of", "text_times"]

Floats = NDArray[np.float64]

RESAMPLES = 1000
FEWEST_TEXTS = 5  # of a domain; resampling fewer says nothing about its spread
# of the best: among draft lengths that good the shortest is taken, since long blocks make latency
# vary more
NEAR = 0.995


@dataclass(frozen=True, slots=True)
class Mode:
    """One mode of decoding: `drafted` by text under the rule that serves, what its steps cost,
    and all rules, for alpha.
    """

    name: DecodingMode
    rule: AlphaRule
    drafted: Sequence[Drafted]
    rules: Mapping[AlphaRule, Sequence[Drafted]]
    costs: StepCosts


def judge(
    name: str,
    drafter: Drafter,
    modes: Sequence[Mode],
    domains: Sequence[str],
    *,
    max_draft_len: int,
    seed: int = 0,
) -> Candidate:
    """Predict every draft length at every batch size, and pick the best for one request at a time.

    Modes count alike: the speed-up of a draft length is the geometric mean of theirs.
    """
    draws = _Draws(len(domains), seed)
    lengths, batches = range(1, max_draft_len + 1), modes[0].costs.batches
    replays = {
        (mode.name, length): replay(mode.drafted, length)
        for mode in modes
        for length in (0, *lengths)
    }
    predictions, overall = [], dict[tuple[int, int], Floats]()
    for batch in batches:
        for length in lengths:
            logs = []
            for mode in modes:
                prediction, ratios = _predict(mode, replays, batch, length, draws)
                predictions.append(prediction)
                logs.append(np.log(ratios))
            overall[batch, length] = np.exp(np.mean(logs, axis=0))
    best = best_length({length: float(overall[1, length][0]) for length in lengths})
    low, high = interval(overall[1, best])
    acceptance_lengths = np.mean(
        [replays[mode.name, best].acceptance_lengths(draws.prompts) for mode in modes], axis=0
    )
    length_low, length_high = interval(acceptance_lengths)
    even = float(
        np.mean([mode.costs.step_ns(1, best) / mode.costs.step_ns(1, 0) for mode in modes])
    )
    return Candidate(
        name=name,
        drafter=drafter,
        draft_len=best,
        speedup=float(overall[1, best][0]),
        low=low,
        high=high,
        acceptance_length=float(acceptance_lengths[0]),
        acceptance_length_low=length_low,
        acceptance_length_high=length_high,
        break_even_length=even,
        break_even_alpha=break_even_alpha(even, best),
        alphas=tuple(alphas(modes, domains, draws.prompts)),
        by_place={mode.name: _conditional(replays[mode.name, max_draft_len]) for mode in modes},
        costs={mode.name: mode.costs.rows for mode in modes},
        predictions=tuple(predictions),
    )


def schedule_of(candidate: Candidate, batches: Sequence[int]) -> tuple[ScheduleStep, ...]:
    """The best draft length from each batch size on; 0 where the interval of the speed-up does not
    lie above 1. Never grows.

    For one request at a time the interval is the candidate's own, over all modes; beyond, the
    modes' lower ends are averaged, which asks for a little more. Where not even one request at a
    time is decided, the estimates stand for the intervals: a noisy measurement is no reason against
    speculation.
    """
    decided = candidate.low > 1.0
    steps: list[ScheduleStep] = []
    bound = max(prediction.draft_len for prediction in candidate.predictions)
    for batch in batches:
        here = [each for each in candidate.predictions if each.batch == batch]
        by_length: dict[int, list[SpeedupPrediction]] = {}
        for each in here:
            by_length.setdefault(each.draft_len, []).append(each)
        means = {
            length: _geometric([one.speedup for one in ones]) for length, ones in by_length.items()
        }
        best = best_length(means)
        own = (batch, best) == (1, candidate.draft_len)
        low = candidate.low if own else _geometric([one.low for one in by_length[best]])
        pays = (low if decided else means[best]) > 1.0
        bound = min(bound, best if pays else 0)
        if not steps or steps[-1].draft_len != bound:
            steps.append(ScheduleStep(batch, bound))
    return tuple(steps)


def best_length(speedups: Mapping[int, float]) -> int:
    """The shortest draft length that is about as good as the best."""
    most = max(speedups.values())
    return min(length for length, speedup in speedups.items() if speedup >= NEAR * most)


def text_times(mode: Mode, draft_len: int) -> Floats:
    """[texts] nanoseconds of every text, one at a time, with so many drafts; 0: plainly."""
    by_width = replay(mode.drafted, draft_len).steps_by_width
    step_ns = np.array([mode.costs.step_ns(1, width) for width in range(draft_len + 1)])
    times: Floats = (
        by_width @ step_ns + mode.costs.prefill_ns[max(mode.costs.prefill_ns) if draft_len else 0]
    )
    return times


def break_even_alpha(length: float, draft_len: int) -> float | None:
    """The alpha with expected_tokens(alpha, draft_len) = length.

    None where not even acceptance of all drafts reaches it; 0 where a step without drafts does.
    """
    from scipy.optimize import brentq

    if length > draft_len + 1:
        return None
    if length <= 1.0:
        return 0.0

    def beyond(alpha: float) -> float:
        return expected_tokens(alpha, draft_len) - length

    return float(brentq(beyond, 0.0, 1.0))


def alphas(modes: Sequence[Mode], domains: Sequence[str], prompt_weights: Floats) -> list[Alpha]:
    """Every rule of every mode, over all texts and by domain where there are several."""
    groups: dict[str | None, Any] = {None: np.arange(len(domains))}
    by_name = by_domain(domains)
    if len(by_name) > 1:
        groups.update(
            {domain: some for domain, some in by_name.items() if len(some) >= FEWEST_TEXTS}
        )
    found = []
    for mode in modes:
        for rule, texts in mode.rules.items():
            sums = np.array([np.nansum(text.alpha) for text in texts])
            counts = np.array(
                [np.count_nonzero(~np.isnan(text.alpha)) for text in texts], dtype=np.float64
            )
            for domain, some in groups.items():
                total = counts[some].sum()
                if total == 0:
                    continue
                weights = prompt_weights[:, some]
                drawn = weights @ counts[some]
                ratios = (weights @ sums[some])[drawn > 0] / drawn[drawn > 0]
                low, high = interval(ratios)
                found.append(
                    Alpha(rule, domain, float(sums[some].sum() / total), low, high, int(total))
                )
    return found


class _Draws:
    """Bootstrap weights. Row 0 is the sample itself, so that every array computed from them
    begins with the estimate.
    """

    def __init__(self, prompts: int, seed: int) -> None:
        drawn = times_drawn(np.random.default_rng(seed), prompts, RESAMPLES)
        self.prompts: Floats = np.concatenate([np.ones((1, prompts)), drawn]).astype(
            np.float64
        )  # [1 + RESAMPLES, prompts]
        self._seed = seed
        self._costs: dict[int, Floats] = {}

    def costs(self, samples: Floats) -> Floats:
        """What a step costs, from resampled step times; the same array gives the same draws."""
        known = self._costs.get(id(samples))
        if known is None:
            drawn = resampled(np.random.default_rng(self._seed + 1), samples, RESAMPLES)
            known = self._costs[id(samples)] = np.concatenate(
                [[np.quantile(samples, QUANTILE)], np.quantile(drawn, QUANTILE, axis=1)]
            )
        return known


def _predict(
    mode: Mode,
    replays: Mapping[tuple[DecodingMode, int], Replay],
    batch: int,
    length: int,
    draws: _Draws,
) -> tuple[SpeedupPrediction, Floats]:
    plain, ours = replays[mode.name, 0], replays[mode.name, length]
    costs = mode.costs
    plain_ns = _time(plain, costs, batch, draws, costs.prefill_ns[0])
    prefill = costs.prefill_ns[max(costs.prefill_ns)]
    spent_ns = _time(ours, costs, batch, draws, prefill)
    ratios = plain_ns / spent_ns
    low, high = interval(ratios)
    texts = np.concatenate([text.alpha for text in mode.drafted]) if mode.drafted else np.empty(0)
    alpha = float(np.nanmean(texts)) if np.count_nonzero(~np.isnan(texts)) else 0.0
    one, many = costs.row(batch, 0), costs.row(batch, length)
    formula = leviathan_speedup(alpha, length, many.draft_ms / length / one.verify_ms)
    dependence = (ours.tokens.sum() / ours.steps.sum()) / expected_tokens(alpha, length)
    verification = (many.draft_ms + one.verify_ms) / (many.draft_ms + many.verify_ms)
    speedup = float(ratios[0])
    prediction = SpeedupPrediction(
        mode=mode.name,
        batch=batch,
        draft_len=length,
        acceptance_length=ours.acceptance_length,
        tokens_per_s=float((ours.tokens.sum() + len(ours.tokens)) / spent_ns[0] * 1e9),
        speedup=speedup,
        low=low,
        high=high,
        formula=formula,
        dependence=float(dependence),
        verification=verification,
        host=speedup / (formula * float(dependence) * verification),
    )
    return prediction, ratios


def _time(
    outcome: Replay, costs: StepCosts, batch: int, draws: _Draws, prefill_ns: float
) -> Floats:
    """[1 + RESAMPLES] nanoseconds for all texts, served `batch` at a time.

    A step is as wide as its widest row. Rows are taken as independent draws from the widths that
    occur.
    """
    by_width = draws.prompts @ outcome.steps_by_width  # [draws, widths]
    steps = by_width.sum(axis=1)
    up_to = np.cumsum(by_width / np.maximum(steps, 1e-300)[:, None], axis=1) ** batch
    widest = np.diff(up_to, axis=1, prepend=0.0)
    step_ns = sum(
        widest[:, width] * draws.costs(costs.samples[batch, width])
        for width in range(widest.shape[1])
    )
    spent: Floats = steps / batch * step_ns + draws.prompts.sum(axis=1) * prefill_ns
    return spent


def _conditional(outcome: Replay) -> tuple[float | None, ...]:
    """Acceptance at each place of a block, given that all before it in the block were kept."""
    drafted, accepted = outcome.drafted_by_place.sum(axis=0), outcome.accepted_by_place.sum(axis=0)
    reached = np.minimum(np.concatenate([drafted[:1], accepted[:-1]]), drafted)
    return tuple(
        float(kept / tried) if tried > 0 else None
        for kept, tried in zip(accepted, reached, strict=True)
    )


def _geometric(values: Sequence[float]) -> float:
    return float(np.exp(np.mean(np.log(values))))
