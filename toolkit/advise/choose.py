"""Choose a draft length, a schedule over batch sizes, or no speculation, from acceptance and costs.

Everything here is arithmetic. A set of texts takes the time of its prefills and its steps, and the
time of a step depends on how many tokens its widest row drafted. Intervals come from resampling
whole prompts and the timed steps. Plain and speculative decoding and all draft lengths use the same
draws, so noise that they share cancels.
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

__all__ = ["Mode", "alphas", "break_even_alpha", "predict_candidate", "schedule_of", "text_times"]

Floats = NDArray[np.float64]

RESAMPLES = 1000
MIN_DOMAIN_TEXTS = 5  # resampling fewer texts says nothing about the spread of a domain
# Share of the best speedup. The shortest draft length that reaches it is chosen, since long blocks
# make latency vary more.
NEAR_BEST = 0.995


@dataclass(frozen=True, slots=True)
class Mode:
    """A mode of decoding, as observed: the drafts of every text, and what the steps cost.

    drafted: under the acceptance rule that serves. rules: the same under every rule, for alpha.
    """

    name: DecodingMode
    rule: AlphaRule
    drafted: Sequence[Drafted]
    rules: Mapping[AlphaRule, Sequence[Drafted]]
    costs: StepCosts


def predict_candidate(
    name: str,
    drafter: Drafter,
    modes: Sequence[Mode],
    domains: Sequence[str],
    *,
    max_draft_len: int,
    seed: int = 0,
) -> Candidate:
    """Predict every draft length at every batch size, and pick the best for one request at a time.

    All modes count equally: the speedup of a draft length is the geometric mean over the modes.
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
    break_even_length = float(
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
        break_even_length=break_even_length,
        break_even_alpha=break_even_alpha(break_even_length, best),
        alphas=tuple(alphas(modes, domains, draws.prompts)),
        by_place={mode.name: _conditional(replays[mode.name, max_draft_len]) for mode in modes},
        costs={mode.name: mode.costs.rows for mode in modes},
        predictions=tuple(predictions),
    )


def schedule_of(candidate: Candidate, batches: Sequence[int]) -> tuple[ScheduleStep, ...]:
    """The best draft length from each batch size on. It never grows with the batch size.

    The length is 0 where the interval of the speedup is not above 1. For one request at a time,
    this is the candidate's interval over all modes. For larger batches it is the geometric mean of
    the modes' lower ends, which is a little stricter. If the interval is not above 1 even for one
    request at a time, the estimates are used instead: a noisy measurement is no reason not to
    speculate.
    """
    is_decided = candidate.low > 1.0
    steps: list[ScheduleStep] = []
    bound = max(prediction.draft_len for prediction in candidate.predictions)
    for batch in batches:
        by_length: dict[int, list[SpeedupPrediction]] = {}
        for prediction in candidate.predictions:
            if prediction.batch == batch:
                by_length.setdefault(prediction.draft_len, []).append(prediction)
        speedups = {
            length: _geometric([prediction.speedup for prediction in predictions])
            for length, predictions in by_length.items()
        }
        best = best_length(speedups)
        if (batch, best) == (1, candidate.draft_len):
            low = candidate.low
        else:
            low = _geometric([prediction.low for prediction in by_length[best]])
        pays = (low if is_decided else speedups[best]) > 1.0
        bound = min(bound, best if pays else 0)
        if not steps or steps[-1].draft_len != bound:
            steps.append(ScheduleStep(batch, bound))
    return tuple(steps)


def best_length(speedups: Mapping[int, float]) -> int:
    """The shortest draft length whose speedup is close to the best."""
    best = max(speedups.values())
    return min(length for length, speedup in speedups.items() if speedup >= NEAR_BEST * best)


def text_times(mode: Mode, draft_len: int) -> Floats:
    """Nanoseconds [texts] of every text, served one at a time; draft_len 0 decodes plainly."""
    by_width = replay(mode.drafted, draft_len).steps_by_width
    step_ns = np.array([mode.costs.step_ns(1, width) for width in range(draft_len + 1)])
    longest = max(mode.costs.prefill_ns)
    prefill_ns = mode.costs.prefill_ns[longest if draft_len else 0]
    times: Floats = by_width @ step_ns + prefill_ns
    return times


def break_even_alpha(length: float, draft_len: int) -> float | None:
    """The alpha for which expected_tokens(alpha, draft_len) equals length.

    None if it is not reached even when all drafts are accepted; 0 if it is reached without drafts.
    """
    from scipy.optimize import brentq

    if length > draft_len + 1:
        return None
    if length <= 1.0:
        return 0.0

    def difference(alpha: float) -> float:
        return expected_tokens(alpha, draft_len) - length

    return float(brentq(difference, 0.0, 1.0))


def alphas(modes: Sequence[Mode], domains: Sequence[str], prompt_weights: Floats) -> list[Alpha]:
    """Alpha under every rule of every mode: over all texts, and by domain if there are several.

    prompt_weights [1 + RESAMPLES, texts]: see `_Draws.prompts`.
    """
    groups: dict[str | None, Any] = {None: np.arange(len(domains))}
    texts_by_domain = by_domain(domains)
    if len(texts_by_domain) > 1:
        groups.update(
            {
                domain: indices
                for domain, indices in texts_by_domain.items()
                if len(indices) >= MIN_DOMAIN_TEXTS
            }
        )
    estimates = []
    for mode in modes:
        for rule, texts in mode.rules.items():
            sums = np.array([np.nansum(text.alpha) for text in texts])
            counts = np.array(
                [np.count_nonzero(~np.isnan(text.alpha)) for text in texts], dtype=np.float64
            )
            for domain, indices in groups.items():
                total = counts[indices].sum()
                if total == 0:
                    continue
                weights = prompt_weights[:, indices]
                drawn = weights @ counts[indices]
                ratios = (weights @ sums[indices])[drawn > 0] / drawn[drawn > 0]
                low, high = interval(ratios)
                estimate = float(sums[indices].sum() / total)
                estimates.append(Alpha(rule, domain, estimate, low, high, int(total)))
    return estimates


class _Draws:
    """Bootstrap weights of the prompts and the step times.

    prompts: [1 + RESAMPLES, prompts]. Row 0 is the sample itself, so every array computed from the
    weights begins with the estimate.
    """

    def __init__(self, prompts: int, seed: int) -> None:
        drawn = times_drawn(np.random.default_rng(seed), prompts, RESAMPLES)
        self.prompts: Floats = np.concatenate([np.ones((1, prompts)), drawn]).astype(np.float64)
        self._seed = seed
        self._costs: dict[int, Floats] = {}

    def costs(self, samples: Floats) -> Floats:
        """The cost of a step [1 + RESAMPLES], from resampled step times.

        The same array of samples always gives the same draws.
        """
        costs = self._costs.get(id(samples))
        if costs is None:
            drawn = resampled(np.random.default_rng(self._seed + 1), samples, RESAMPLES)
            costs = self._costs[id(samples)] = np.concatenate(
                [[np.quantile(samples, QUANTILE)], np.quantile(drawn, QUANTILE, axis=1)]
            )
        return costs


def _predict(
    mode: Mode,
    replays: Mapping[tuple[DecodingMode, int], Replay],
    batch: int,
    length: int,
    draws: _Draws,
) -> tuple[SpeedupPrediction, Floats]:
    """The prediction, and its resampled speedups [1 + RESAMPLES], the estimate first."""
    plain, speculative = replays[mode.name, 0], replays[mode.name, length]
    costs = mode.costs
    plain_ns = _time(plain, costs, batch, draws, costs.prefill_ns[0])
    prefill = costs.prefill_ns[max(costs.prefill_ns)]
    spent_ns = _time(speculative, costs, batch, draws, prefill)
    ratios = plain_ns / spent_ns
    low, high = interval(ratios)
    texts = np.concatenate([text.alpha for text in mode.drafted]) if mode.drafted else np.empty(0)
    alpha = float(np.nanmean(texts)) if np.count_nonzero(~np.isnan(texts)) else 0.0
    plain_step, step = costs.row(batch, 0), costs.row(batch, length)
    formula = leviathan_speedup(alpha, length, step.draft_ms / length / plain_step.verify_ms)
    tokens_per_step = speculative.tokens.sum() / speculative.steps.sum()
    dependence = tokens_per_step / expected_tokens(alpha, length)
    verification = (step.draft_ms + plain_step.verify_ms) / (step.draft_ms + step.verify_ms)
    speedup = float(ratios[0])
    prediction = SpeedupPrediction(
        mode=mode.name,
        batch=batch,
        draft_len=length,
        acceptance_length=speculative.acceptance_length,
        tokens_per_s=float(
            (speculative.tokens.sum() + len(speculative.tokens)) / spent_ns[0] * 1e9
        ),
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
    """Nanoseconds [1 + RESAMPLES] for all texts, served `batch` at a time.

    A step is as wide as its widest row. The rows are treated as independent draws from the widths
    that occur.
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
    """Acceptance rate at each place of a block, given that all tokens before it were accepted."""
    drafted, accepted = outcome.drafted_by_place.sum(axis=0), outcome.accepted_by_place.sum(axis=0)
    reached = np.minimum(np.concatenate([drafted[:1], accepted[:-1]]), drafted)
    return tuple(
        float(kept / tried) if tried > 0 else None
        for kept, tried in zip(accepted, reached, strict=True)
    )


def _geometric(values: Sequence[float]) -> float:
    return float(np.exp(np.mean(np.log(values))))
