"""Is what the endpoint says correct? All checks of it in their order, with their gates and the
names of what is wrong.

Nothing here is timed. The greedy texts that were measured are used again; everything else is sent
for the purpose.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from toolkit.config.schema import ValidationConfig
from toolkit.facts.capabilities import Capabilities
from toolkit.records.build import QuantizationQuality
from toolkit.records.judged import (
    Agreement,
    Distribution,
    Divergence,
    DraftCheck,
    Parity,
    StopCheck,
)
from toolkit.records.measured import Acceptance, Finding, Gate
from toolkit.validate.agreement import agreement, decided_margin
from toolkit.validate.arms import ARMS, Measured, Sender
from toolkit.validate.diagnose import diagnose
from toolkit.validate.draft_check import check_drafts
from toolkit.validate.gates import agreement_gate, check_gates, distribution_gate
from toolkit.validate.parity import ArmTexts, AskedAgain, Judge, compare, first_difference
from toolkit.validate.reference import Reference
from toolkit.validate.replay import Replay, replay_of
from toolkit.validate.requery import ask_again
from toolkit.validate.sampled import draw_samples, judge_samples
from toolkit.validate.stop_check import REQUESTS, check_stops
from toolkit.validate.two_sample import draw_pairs, judge_pairs
from toolkit.words import ParityArm, SamplingRule

if TYPE_CHECKING:
    from toolkit.client import RequestTiming

__all__ = [
    "Case",
    "Correctness",
    "References",
    "correctness_gates",
    "judge_correctness",
    "not_measured",
    "planned_requests",
]


@dataclass(frozen=True, slots=True)
class References:
    """What judges. engine: the compiled engine outside the server, None where nothing but its
    server can run it. source: the unquantized checkpoint, None where it is not asked.

    source_same_precision: the deployment computes what the source does, up to rounding (nothing is
    quantized, and float32).
    """

    engine: Reference | None
    source: Reference | None = None
    source_same_precision: bool = False


@dataclass(frozen=True, slots=True)
class Correctness:
    """What was found. None: the deployment does not speculate, or the check was not asked for."""

    parity: Parity | None
    seeded: Parity | None
    agreements: tuple[Agreement, ...]
    draft_check: DraftCheck | None
    stop_check: StopCheck | None
    distribution: Distribution | None
    diagnoses: tuple[Finding, ...]
    asked_draft: bool = False  # draft_check None then means that no text told where its steps began


def planned_requests(
    config: ValidationConfig, prompts: int, max_draft_len: int, can: Capabilities
) -> int:
    """How many requests judge_correctness sends, without those that draw tokens."""
    if max_draft_len == 0:
        return 0
    return (
        len(_more_arms(config, max_draft_len, can)) + 2 * (can.seeds == "coupled")
    ) * prompts + REQUESTS


class Say(Protocol):
    def __call__(self, what: str, *, by_steps: bool = False) -> None: ...


def _unsaid(what: str, *, by_steps: bool = False) -> None:
    """Nobody watches."""


@dataclass(frozen=True, slots=True)
class Case:
    """What is judged, and with what.

    greedy: the timed requests at temperature 0. rule: of requests without a seed. max_draft_len 0:
    nothing speculates. keep_replay: stores one divergence and returns the file's name. say: what is
    being done now; by_steps where on_step, called with (done, of how many), tells how far it is.
    """

    sender: Sender
    prompts: Sequence[str]
    greedy: Measured
    config: ValidationConfig
    references: References
    rule: SamplingRule
    max_draft_len: int
    can: Capabilities
    keep_replay: Callable[[Replay], str] | None = None
    say: Say = _unsaid
    on_step: Callable[[int, int], None] = lambda done, total: None

    @property
    def plain(self) -> Sequence[RequestTiming]:
        return self.greedy.plain[0]

    @property
    def seeds(self) -> list[int]:
        return [self.config.seed + index for index in range(len(self.prompts))]

    def keep(self, one: Divergence, text: RequestTiming, other: RequestTiming) -> str | None:
        return (
            None
            if self.keep_replay is None
            else self.keep_replay(replay_of(self.config, one, text, other))
        )


def judge_correctness(case: Case, quality: QuantizationQuality | None) -> Correctness:
    """quality: of the target, None where it was not quantized here."""
    references = case.references
    found = _judge_speculation(case) if case.max_draft_len > 0 else _Speculation()
    agreements = _agreements(case, quality)
    diagnoses = diagnose(
        plain=case.plain,
        parity=found.parity,
        agreements=agreements,
        draft_check=found.draft_check,
        stop_check=found.stop_check,
        distribution=found.distribution,
        overrun=sum((one.output_tokens or 0) > case.config.max_tokens for one in case.sender.sent),
        reference=references.engine or references.source,
        near_tie_margin=case.config.parity.near_tie_margin,
    )
    return Correctness(
        parity=found.parity,
        seeded=found.seeded,
        agreements=tuple(agreements),
        draft_check=found.draft_check,
        stop_check=found.stop_check,
        distribution=found.distribution,
        diagnoses=tuple(diagnoses),
        asked_draft=case.max_draft_len > 0
        and references.engine is not None
        and references.engine.draft is not None,
    )


@dataclass(frozen=True, slots=True)
class _Speculation:
    """What there is to say of a deployment that speculates."""

    parity: Parity | None = None
    seeded: Parity | None = None
    draft_check: DraftCheck | None = None
    stop_check: StopCheck | None = None
    distribution: Distribution | None = None


def _judge_speculation(case: Case) -> _Speculation:
    """All requests are sent first, then the engine is asked."""
    case.say("comparing draft lengths")
    arms = [
        ArmTexts(
            "speculative", case.max_draft_len, list(zip(*case.greedy.speculative, strict=True))
        )
    ]
    arms += [
        _said_by(case, arm, draft_len)
        for arm, draft_len in _more_arms(case.config, case.max_draft_len, case.can)
    ]
    case.say("sending stop words")
    same = [
        first_difference(*pair) is None
        for pair in zip(case.plain, case.greedy.speculative[0], strict=True)
    ]
    stop_check = check_stops(case.sender, case.prompts, case.plain, same, seed=case.config.seed)
    seeded_texts = _seeded(case) if case.can.seeds == "coupled" else None
    engine = case.references.engine
    again: AskedAgain = {}
    if engine is None and case.can.log_probs > 0:
        case.say("asking again for log-probabilities")
        again = ask_again(case.sender, case.plain, arms, draft_lens=case.can.draft_len_per_request)
    distribution = _distribution(case) if case.config.distribution.enabled else None

    case.say("asking the engine about divergences")
    judge = Judge(engine, case.config.parity.near_tie_margin)
    parity, seeded = compare(case.plain, arms, replace(judge, again=again), keep=case.keep), None
    if seeded_texts is not None:
        plain, said = seeded_texts
        seeded_judge = replace(judge, temperature=case.config.temperature, seeds=case.seeds)
        seeded = compare(
            plain, [ArmTexts("speculative", case.max_draft_len, said)], seeded_judge, keep=case.keep
        )
    draft_check = (
        None
        if engine is None
        else check_drafts(case.greedy.speculative[0], case.max_draft_len, engine)
    )
    return _Speculation(parity, seeded, draft_check, stop_check, distribution)


def _distribution(case: Case) -> Distribution:
    """Against what the engine says tokens should be distributed like, or of both arms against
    one another without it.
    """
    config, asked, engine = case.config, case.config.distribution, case.references.engine
    case.say("drawing texts" if engine is None else "drawing tokens", by_steps=True)
    if engine is None:
        pairs = draw_pairs(
            case.sender,
            case.prompts,
            asked,
            temperature=config.temperature,
            seed=config.seed,
            on_progress=case.on_step,
        )
        case.say("testing what was drawn")
        return judge_pairs(pairs, asked, rule=case.rule, seed=config.seed)
    drawn = draw_samples(
        case.sender,
        case.prompts,
        asked,
        engine,
        temperature=config.temperature,
        near_tie_margin=config.parity.near_tie_margin,
        seed=config.seed,
        on_progress=case.on_step,
    )
    case.say("testing what was drawn")
    return judge_samples(drawn, asked, rule=case.rule, seed=config.seed)


def _agreements(case: Case, quality: QuantizationQuality | None) -> list[Agreement]:
    """The plain texts token by token: of the engine itself, and of the unquantized model."""
    references, margin, seed = case.references, case.config.parity.near_tie_margin, case.config.seed
    agreements = []

    def on_prompt(done: int) -> None:
        case.on_step(done, len(case.plain))

    if references.engine is not None:
        case.say("asking the engine about every token, texts", by_steps=True)
        exact = agreement(
            "engine",
            case.plain,
            references.engine,
            margin,
            same_precision=True,
            seed=seed,
            on_prompt=on_prompt,
        )
        agreements.append(exact)
    if references.source is not None:
        case.say("asking the unquantized model about every token, texts", by_steps=True)
        same = references.source_same_precision
        sure = None if same else decided_margin(quality)
        agreements.append(
            agreement(
                "source",
                case.plain,
                references.source,
                margin,
                same_precision=same,
                decided_margin=sure,
                seed=seed,
                on_prompt=on_prompt,
            )
        )
    return agreements


def correctness_gates(found: Correctness) -> list[Gate]:
    """All but those of parity."""
    return [
        *(gate for one in found.agreements if (gate := agreement_gate(one)) is not None),
        *check_gates(
            found.draft_check, found.stop_check, found.diagnoses, asked_draft=found.asked_draft
        ),
        *([] if found.distribution is None else [distribution_gate(found.distribution)]),
    ]


def not_measured(
    max_draft_len: int, references: References, can: Capabilities, acceptance: Acceptance | None
) -> Iterator[Finding]:
    """What this endpoint leaves unknown, and why. There is no gate of any of it, so that none
    can pass.
    """
    foreign = "the engine runs in its server alone, and gives no logits there"
    if references.engine is None:
        yield Finding(
            "not measured",
            "note",
            f"whether plain texts are the engine's own (agreement_engine): {foreign}",
        )
    if can.reuses_prefixes:
        detail = (
            "time to the first token of prompts that are new: the server keeps KV blocks"
            " (engine.enable_block_reuse), and both arms send every prompt several times; `toolkit"
            " bench` sends each once"
        )
        yield Finding("not measured", "note", detail)
    if max_draft_len == 0:
        return
    if references.engine is None:
        yield Finding(
            "not measured",
            "note",
            f"whether the draft proposes what its engine would (draft): {foreign}",
        )
        yield Finding(
            "not measured",
            "note",
            f"whether temperature, top-k, top-p and seeds are respected: {foreign}",
        )
    if not can.has_verify_only:
        yield Finding(
            "not measured",
            "note",
            "parity of verifying without accepting: no request can ask for verify_only",
        )
    if not can.draft_len_per_request:
        yield Finding(
            "not measured",
            "note",
            "parity at shorter draft lengths: the length is fixed when the server starts",
        )
    if can.seeds != "coupled":
        detail = (
            "parity of seeded texts: this runtime's random numbers are not the same with and"
            " without speculation"
        )
        yield Finding("not measured", "note", detail)
    if acceptance is not None and not acceptance.by_position:
        yield Finding(
            "not measured", "note", "acceptance by position: the server does not count it"
        )
    if acceptance is not None and not acceptance.drafted:
        yield Finding(
            "not measured",
            "note",
            "the acceptance rate: the server does not say how much was drafted",
        )


def _more_arms(
    config: ValidationConfig, max_draft_len: int, can: Capabilities
) -> list[tuple[ParityArm, int]]:
    """(arm, draft length) of what is compared beside the arms that are timed."""
    asked = config.parity.draft_lens or (1, (max_draft_len + 1) // 2)
    shorter = sorted({draft_len for draft_len in asked if draft_len < max_draft_len})
    more: list[tuple[ParityArm, int]] = [("verify", max_draft_len)] if can.has_verify_only else []
    if can.draft_len_per_request:
        more += [("speculative", draft_len) for draft_len in shorter]
    return more


def _said_by(case: Case, arm: ParityArm, draft_len: int) -> ArmTexts:
    options = {"temperature": 0.0, "num_draft_tokens": draft_len}
    said = [
        [case.sender.send(index, prompt, arm, **options)]
        for index, prompt in enumerate(case.prompts)
    ]
    return ArmTexts(arm, draft_len, said)


def _seeded(case: Case) -> tuple[list[RequestTiming], list[list[RequestTiming]]]:
    """(plain, speculative) texts, a seed per prompt."""
    case.say("sending seeded requests")
    plain: list[RequestTiming] = []
    said: list[list[RequestTiming]] = []
    for index, (prompt, seed) in enumerate(zip(case.prompts, case.seeds, strict=True)):
        options = {"temperature": case.config.temperature, "seed": seed, "acceptance": "coupled"}
        one, other = (case.sender.send(index, prompt, arm, **options) for arm in ARMS)
        plain.append(one)
        said.append([other])
    return plain, said
