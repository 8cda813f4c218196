"""The advisor: it measures acceptance and cost of every way to draft, ranks them, and says what to
set.

It uses engines through `StepEngine` and the serving runtime through `ServingRuntime`;
`toolkit.workflows` provides both.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol, TypeVar

import numpy as np

from toolkit.advise.acceptance import RULES, Drafted
from toolkit.advise.choose import Mode, predict_candidate, schedule_of
from toolkit.advise.cost import (
    ServingRuntime,
    StepCosts,
    batch_sizes,
    measure_costs,
    predict_costs,
)
from toolkit.advise.observe import (
    LogitsOf,
    Lookup,
    Probabilities,
    Text,
    first_choices,
    foreign_greedy_drafts,
    foreign_sampled_drafts,
    greedy_drafts,
    lookup_drafts,
    sampled_drafts,
)
from toolkit.advise.sweep import RunningRuntime, sweep
from toolkit.interfaces import Progress
from toolkit.records.advice import Advice, Candidate, ScheduleStep, SpeedupPrediction
from toolkit.resampling import CONFIDENCE, bootstrap_ratio_of_sums
from toolkit.words import (
    AlphaRule,
    CostSource,
    DecodingMode,
    DeployedRule,
    Drafter,
    Role,
    TextSource,
)

__all__ = [
    "MAX_DRAFT_LEN",
    "VERSION",
    "Contender",
    "GivenTexts",
    "Question",
    "Texts",
    "advise",
    "decide",
    "of_medium_length",
    "predict_contender",
    "texts_of",
]

Item = TypeVar("Item")

VERSION = 6
MAX_DRAFT_LEN = 8  # the longest that is tried if the YAML says `auto`


class AdvisedRuntime(ServingRuntime, RunningRuntime, Protocol):
    """Everything that the advisor needs of the runtime."""


@dataclass(frozen=True, slots=True)
class Contender:
    """A way to draft: with a draft model, or by prompt lookup.

    runtime: serves the target with this way; None if the models are not in memory. draft: the draft
    model; None for prompt lookup. Steps are timed on the runtime, unless their costs come from
    elsewhere. forward_s: seconds of a forward by role, batch size and tokens, for hardware that is
    not here. served: temperature -> the costs that were timed on the server of another engine.
    """

    name: str
    drafter: Drafter
    runtime: AdvisedRuntime | None
    draft: LogitsOf | None
    forward_s: Callable[[Role, int, int], float] | None = None
    served: Mapping[float, StepCosts] | None = None


Texts = Mapping[DecodingMode, Sequence[Text]]
"""The texts on which acceptance is observed: mode -> one text per prompt."""


@dataclass(frozen=True, slots=True)
class GivenTexts:
    """Texts that take the place of those that the target would write, and what they are."""

    texts: Sequence[Text]
    source: TextSource


@dataclass(frozen=True, slots=True)
class Question:
    """What to decide, and how much to measure.

    prompts: (domain, token ids) of every prompt. temperature: None for greedy decoding alone.
    given: a text for each prompt; None if the target writes them in every mode.
    """

    prompts: Sequence[tuple[str, tuple[int, ...]]]
    max_tokens: int
    temperature: float | None
    acceptance: Literal["auto", DeployedRule]
    max_draft_len: int = MAX_DRAFT_LEN
    batches: Sequence[int] | None = None  # None: 1, 2, 4, ... max_batch_size
    rounds: int = 3
    steps: int = 8
    # Rounds of really speculating with the best candidate, one request at a time; 0 for none.
    measured_rounds: int = 0
    given: GivenTexts | None = None


def advise(
    target: LogitsOf,
    contenders: Sequence[Contender],
    question: Question,
    *,
    lookup: Callable[[], Lookup],
    probabilities: Probabilities,
    progress: Progress,
) -> Advice:
    """Measure all contenders and decide.

    lookup: makes a new prompt lookup for each text. probabilities: turns logits into the
    distribution from which the runtime samples at question.temperature.
    """
    started = time.monotonic()
    batches = tuple(question.batches or batch_sizes(_runtime(contenders[0]).max_batch_size))
    texts, given = texts_of(contenders[0], question, progress), question.given
    candidates: list[Candidate] = []
    sources: list[CostSource] = []
    for contender in contenders:
        candidate, modes = predict_contender(
            target, contender, question, texts, batches, lookup, probabilities, progress
        )
        candidates.append(candidate)
        sources += [mode.costs.source for mode in modes]
    candidates.sort(key=lambda candidate: -candidate.speedup)
    if question.measured_rounds > 0:
        best = next(contender for contender in contenders if contender.name == candidates[0].name)
        progress(0, None, f"{best.name}: running every draft length")
        candidates[0] = _measured(candidates[0], best, question)
    return decide(
        candidates,
        batches,
        own=contenders[0].name,
        costs_are=sources[0],
        temperature=question.temperature or 0.0,
        rule=_served_rule(question),
        prompts=len(question.prompts),
        tokens=sum(len(text.output) for mode_texts in texts.values() for text in mode_texts),
        seconds=time.monotonic() - started,
        texts_are="written by the target" if given is None else given.source,
        first_choices=None if given is None else _first_choices(target, given.texts),
    )


def _first_choices(target: LogitsOf, texts: Sequence[Text]) -> float:
    """The share of the output tokens, but the first of each text, that are the target's first
    choice.
    """
    chosen = [first_choices(target, text) == np.array(text.output[1:]) for text in texts]
    return float(np.concatenate(chosen).mean())


def texts_of(contender: Contender, question: Question, progress: Progress) -> Texts:
    """The given texts; or let the target write a text after every prompt, in every mode, without
    speculation.
    """
    if question.given is not None:
        return dict.fromkeys(_temperatures(question), question.given.texts)
    runtime = _runtime(contender)
    prompts = [ids for _, ids in question.prompts]
    texts: dict[DecodingMode, list[Text]] = {}
    for mode, temperature in _temperatures(question).items():
        progress(0, None, f"writing {mode} texts")
        outputs = runtime.write(prompts, question.max_tokens, temperature)
        texts[mode] = [
            Text(domain, ids, output, question.max_tokens)
            for (domain, ids), output in zip(question.prompts, outputs, strict=True)
        ]
    return texts


def _runtime(contender: Contender) -> AdvisedRuntime:
    assert contender.runtime is not None, "texts and costs come from elsewhere without a runtime"
    return contender.runtime


def predict_contender(
    target: LogitsOf,
    contender: Contender,
    question: Question,
    texts: Texts,
    batches: Sequence[int],
    lookup: Callable[[], Lookup],
    probabilities: Probabilities,
    progress: Progress,
) -> tuple[Candidate, list[Mode]]:
    """Predict how fast one way to draft is; also return the observations of every mode."""
    modes = []
    for mode, temperature in _temperatures(question).items():
        progress(0, None, f"{contender.name}: {mode} acceptance")
        rules = _observe(target, contender, texts[mode], question, mode, lookup, probabilities)
        if contender.served is None:
            activity = "timing" if contender.forward_s is None else "predicting the cost of"
            progress(0, None, f"{contender.name}: {activity} {mode} steps")
        rule: AlphaRule = "greedy" if mode == "greedy" else _served_rule(question)
        costs = _costs(contender, question, texts[mode], batches, temperature)
        modes.append(Mode(mode, rule, rules[rule], rules, costs))
    domains = [domain for domain, _ in question.prompts]
    candidate = predict_candidate(
        contender.name, contender.drafter, modes, domains, max_draft_len=question.max_draft_len
    )
    return candidate, modes


def _temperatures(question: Question) -> dict[DecodingMode, float]:
    if question.temperature is None:
        return {"greedy": 0.0}
    return {"greedy": 0.0, "sampled": question.temperature}


def _served_rule(question: Question) -> DeployedRule:
    """What requests without a seed get."""
    return "rejection" if question.acceptance == "auto" else question.acceptance


def _measured(candidate: Candidate, contender: Contender, question: Question) -> Candidate:
    """Run every draft length, and add the measured speedups to the candidate's predictions."""
    speedup_of = {}
    prompts = [ids for _, ids in question.prompts]
    for mode, temperature in _temperatures(question).items():
        times = sweep(
            _runtime(contender),
            contender.drafter,
            prompts,
            draft_lens=range(question.max_draft_len + 1),
            batch=1,
            max_tokens=question.max_tokens,
            temperature=temperature,
            rounds=question.measured_rounds,
        )
        for length, spent in times.items():
            speedup_of[mode, length] = bootstrap_ratio_of_sums(times[0], spent)

    def with_run(prediction: SpeedupPrediction) -> SpeedupPrediction:
        if prediction.batch != 1:
            return prediction
        measured, low, high = speedup_of[prediction.mode, prediction.draft_len]
        return replace(prediction, measured=measured, measured_low=low, measured_high=high)

    predictions = tuple(with_run(prediction) for prediction in candidate.predictions)
    return replace(candidate, predictions=predictions)


def decide(
    candidates: Sequence[Candidate],
    batches: Sequence[int],
    *,
    own: str,
    costs_are: CostSource,
    temperature: float,
    rule: DeployedRule,
    prompts: int,
    tokens: int,
    seconds: float,
    texts_are: TextSource = "written by the target",
    first_choices: float | None = None,
) -> Advice:
    """Decide for the best candidate's draft lengths, or against speculation.

    candidates: the best first. own: the name of the candidate that the deployment configures.
    """
    best = candidates[0]
    schedule = schedule_of(best, batches)
    speculate = schedule[0].draft_len > 0
    paying = [size for size in batches if _length_at(schedule, size) > 0]
    break_even = (
        f"{best.break_even_length:.2f} tokens per step would break even, it gets"
        f" {best.acceptance_length:.2f}"
    )
    length = "1 draft token" if best.draft_len == 1 else f"{best.draft_len} draft tokens"
    gain = f"{best.speedup:.2f}x ({best.low:.2f} to {best.high:.2f}) with {length}"
    decided = best.low > 1.0 or not speculate
    if not speculate:
        reason = (
            f"do not speculate: {best.name}, the best there is, would give {gain}; {break_even}"
        )
    elif decided:
        reason = f"{best.name}: {gain} for one request at a time; {break_even}"
    else:
        reason = (
            f"undecided: {best.name}, {gain} for one request at a time, may gain or lose;"
            f" {break_even}"
        )
    return Advice(
        speculate=speculate,
        decided=decided,
        own=own,
        drafter=best.drafter if speculate else "none",
        draft=best.name if speculate and best.drafter == "draft_target" else None,
        max_draft_len=schedule[0].draft_len,
        schedule=schedule if speculate else (),
        max_concurrency=max(paying) if speculate and len(paying) < len(batches) else None,
        reason=reason,
        costs_are=costs_are,
        temperature=temperature,
        rule=rule,
        prompts=prompts,
        tokens=tokens,
        confidence=CONFIDENCE,
        seconds=seconds,
        candidates=tuple(candidates),
        texts_are=texts_are,
        first_choices=first_choices,
    )


def _length_at(schedule: Sequence[ScheduleStep], batch: int) -> int:
    return [step.draft_len for step in schedule if step.batch <= batch][-1]


def _observe(
    target: LogitsOf,
    contender: Contender,
    texts: Sequence[Text],
    question: Question,
    mode: DecodingMode,
    lookup: Callable[[], Lookup],
    probabilities: Probabilities,
) -> dict[AlphaRule, list[Drafted]]:
    """The drafts of every text under every rule of the mode."""
    drafts_by_rule: dict[AlphaRule, list[Drafted]] = {}
    rules: Mapping[AlphaRule, Drafted]
    width, is_foreign = question.max_draft_len, question.given is not None
    for text in texts:
        if contender.draft is None and mode == "greedy":
            rules = {"greedy": lookup_drafts(lookup(), text, width)}
        elif contender.draft is None:
            # Under every rule, a looked-up token is accepted with its probability under the target.
            drafted = lookup_drafts(lookup(), text, width, target, probabilities)
            rules = dict.fromkeys(RULES[1:], drafted)
        elif is_foreign and mode == "greedy":
            rules = {"greedy": foreign_greedy_drafts(target, contender.draft, text, width)}
        elif is_foreign:
            rules = foreign_sampled_drafts(target, contender.draft, text, width, probabilities)
        elif mode == "greedy":
            rules = {"greedy": greedy_drafts(contender.draft, text, width)}
        else:
            rules = sampled_drafts(target, contender.draft, text, width, probabilities)
        for rule, drafted in rules.items():
            drafts_by_rule.setdefault(rule, []).append(drafted)
    return drafts_by_rule


def of_medium_length(items: Sequence[Item], length: Callable[[Item], int]) -> list[Item]:
    """The middle half of the items by their length, shortest first."""
    by_length = sorted(items, key=length)
    return by_length[len(by_length) // 4 : -(len(by_length) // 4) or None]


def _costs(
    contender: Contender,
    question: Question,
    texts: Sequence[Text],
    batches: Sequence[int],
    temperature: float,
) -> StepCosts:
    """Predict the costs, take those of a server, or time them after prompts of medium length and
    half of their output, which is where an average step is.
    """
    if contender.served is not None:
        return contender.served[temperature]
    lengths = range(1, question.max_draft_len + 1)
    if contender.forward_s is not None:
        return predict_costs(
            contender.forward_s,
            has_draft_model=contender.draft is not None,
            draft_lens=lengths,
            batches=batches,
            prompt_tokens=round(sum(len(text.prompt) for text in texts) / len(texts)),
        )
    middle = of_medium_length(texts, lambda text: len(text.prompt))
    return measure_costs(
        _runtime(contender),
        contender.drafter,
        [[*text.prompt, *text.output[: len(text.output) // 2]] for text in middle],
        [text.prompt for text in middle],
        draft_lens=lengths,
        batches=batches,
        temperature=temperature,
        rounds=question.rounds,
        steps=question.steps,
    )
