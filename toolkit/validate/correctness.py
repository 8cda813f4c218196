"""Check whether the endpoint's answers are correct: run all checks in order, with their gates and
the names of what is wrong.

Nothing here is timed. The greedy texts that were measured are used again; every other request is
sent for a check.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

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

NO_LOG_PROBS = (
    "whether a greedy text that differs from plain decoding differs by rounding: this version"
    " returns no log-probabilities under speculation. The verdict rests on the texts that are the"
    " same token for token, and on comparing the sampled texts of both arms"
)


@dataclass(frozen=True, slots=True)
class References:
    """The models that judge the texts. engine: the compiled engine outside the server; None: only
    its server can run it. source: the unquantized checkpoint; None: it is not used.

    source_same_precision: the deployment computes the same as the source, up to rounding (nothing
    is quantized, and the dtype is float32).
    """

    engine: Reference | None
    source: Reference | None = None
    source_same_precision: bool = False


@dataclass(frozen=True, slots=True)
class Correctness:
    """The results of all checks. None: the deployment does not speculate, or the YAML does not ask
    for the check.
    """

    parity: Parity | None
    seeded: Parity | None
    agreements: tuple[Agreement, ...]
    draft_check: DraftCheck | None
    stop_check: StopCheck | None
    distribution: Distribution | None
    diagnoses: tuple[Finding, ...]
    # A draft engine was asked. Then draft_check None means that no text showed where steps began.
    asked_draft: bool = False
    # Greedy requests like the timed ones that began with what others left in the KV cache.
    reused: tuple[RequestTiming, ...] = ()


def planned_requests(
    config: ValidationConfig, prompts: int, max_draft_len: int, can: Capabilities
) -> int:
    """Return how many requests judge_correctness sends, without those that draw tokens."""
    if max_draft_len == 0:
        return 0
    seeded_arms = len(ARMS) if can.seeds == "coupled" else 0
    arms = len(_more_arms(config, max_draft_len, can)) + _shares(can) + seeded_arms
    return arms * prompts + REQUESTS


class Say(Protocol):
    def __call__(self, what: str, *, by_steps: bool = False) -> None: ...


def _say_nothing(what: str, *, by_steps: bool = False) -> None:
    """The default of `Case.say`: nobody watches."""


@dataclass(frozen=True, slots=True)
class Case:
    """What is judged, and by which means.

    greedy: the timed requests at temperature 0. rule: the accept rule of requests without a seed.
    max_draft_len 0: nothing speculates. keep_replay: stores one divergence and returns the file's
    name. say: is told what is done now, with by_steps if on_step, called with (done, of how many),
    shows the progress.
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
    say: Say = _say_nothing
    on_step: Callable[[int, int], None] = lambda done, total: None

    @property
    def plain(self) -> Sequence[RequestTiming]:
        return self.greedy.plain[0]

    @property
    def seeds(self) -> list[int]:
        return [self.config.seed + index for index in range(len(self.prompts))]

    def keep(
        self, divergence: Divergence, plain: RequestTiming, other: RequestTiming
    ) -> str | None:
        if self.keep_replay is None:
            return None
        return self.keep_replay(replay_of(self.config, divergence, plain, other))


def judge_correctness(case: Case, quality: QuantizationQuality | None) -> Correctness:
    """Run all checks. quality: of the target; None if it was not quantized here."""
    references = case.references
    speculation = _judge_speculation(case) if case.max_draft_len > 0 else _Speculation()
    agreements = _agreements(case, quality)
    diagnoses = diagnose(
        plain=case.plain,
        parity=speculation.parity,
        agreements=agreements,
        draft_check=speculation.draft_check,
        stop_check=speculation.stop_check,
        distribution=speculation.distribution,
        overrun=sum(
            (request.output_tokens or 0) > case.config.max_tokens for request in case.sender.sent
        ),
        reference=references.engine or references.source,
        near_tie_margin=case.config.parity.near_tie_margin,
    )
    return Correctness(
        parity=speculation.parity,
        seeded=speculation.seeded,
        agreements=tuple(agreements),
        draft_check=speculation.draft_check,
        stop_check=speculation.stop_check,
        distribution=speculation.distribution,
        diagnoses=tuple(diagnoses),
        asked_draft=case.max_draft_len > 0
        and references.engine is not None
        and references.engine.draft is not None,
        reused=speculation.reused,
    )


@dataclass(frozen=True, slots=True)
class _Speculation:
    """The results of the checks that only a deployment with speculation gets."""

    parity: Parity | None = None
    seeded: Parity | None = None
    draft_check: DraftCheck | None = None
    stop_check: StopCheck | None = None
    distribution: Distribution | None = None
    reused: tuple[RequestTiming, ...] = ()


def _judge_speculation(case: Case) -> _Speculation:
    """Send all requests first, then ask the engine."""
    case.say("comparing draft lengths")
    more, reused = _texts_of(case, _more_arms(case.config, case.max_draft_len, case.can))
    # A prompt's text with a reused beginning counts as another round.
    rounds = [*case.greedy.speculative, *([reused] if reused else [])]
    timed = ArmTexts("speculative", case.max_draft_len, list(zip(*rounds, strict=True)))
    arms = [timed, *more]
    case.say("sending stop words")
    is_same = [
        first_difference(*pair) is None
        for pair in zip(case.plain, case.greedy.speculative[0], strict=True)
    ]
    stop_check = check_stops(case.sender, case.prompts, case.plain, is_same, seed=case.config.seed)
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
        plain, speculative = seeded_texts
        seeded_judge = replace(judge, temperature=case.config.temperature, seeds=case.seeds)
        seeded_arm = ArmTexts("speculative", case.max_draft_len, speculative)
        seeded = compare(plain, [seeded_arm], seeded_judge, keep=case.keep)
    draft_check = None
    if engine is not None:
        draft_check = check_drafts(_drafted_in_full(case), case.max_draft_len, engine)
    return _Speculation(parity, seeded, draft_check, stop_check, distribution, tuple(reused))


def _distribution(case: Case) -> Distribution:
    """Compare sampled tokens with the engine's distribution or, without an engine, the two arms
    with each other.
    """
    config, gates, engine = case.config, case.config.distribution, case.references.engine
    case.say("drawing texts" if engine is None else "drawing tokens", by_steps=True)
    if engine is None:
        pairs = draw_pairs(
            case.sender,
            case.prompts,
            gates,
            temperature=config.temperature,
            seed=config.seed,
            with_seeds=case.can.seeds != "ignored",
            on_progress=case.on_step,
        )
        case.say("testing what was drawn")
        return judge_pairs(pairs, gates, rule=case.rule, seed=config.seed)
    drawn = draw_samples(
        case.sender,
        case.prompts,
        gates,
        engine,
        temperature=config.temperature,
        near_tie_margin=config.parity.near_tie_margin,
        seed=config.seed,
        on_progress=case.on_step,
    )
    case.say("testing what was drawn")
    return judge_samples(drawn, gates, rule=case.rule, seed=config.seed)


def _agreements(case: Case, quality: QuantizationQuality | None) -> list[Agreement]:
    """Compare the plain texts token by token with the engine's own choices and with those of the
    unquantized model.
    """
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
        same_precision = references.source_same_precision
        agreements.append(
            agreement(
                "source",
                case.plain,
                references.source,
                margin,
                same_precision=same_precision,
                decided_margin=None if same_precision else decided_margin(quality),
                seed=seed,
                on_prompt=on_prompt,
            )
        )
    return agreements


def correctness_gates(correctness: Correctness) -> list[Gate]:
    """Return all gates of correctness except those of parity."""
    agreement_gates = (agreement_gate(agreement) for agreement in correctness.agreements)
    gates = [gate for gate in agreement_gates if gate is not None]
    gates += check_gates(
        correctness.draft_check,
        correctness.stop_check,
        correctness.diagnoses,
        asked_draft=correctness.asked_draft,
    )
    if correctness.distribution is not None:
        gates.append(distribution_gate(correctness.distribution))
    return gates


def not_measured(
    max_draft_len: int, references: References, can: Capabilities, acceptance: Acceptance | None
) -> Iterator[Finding]:
    """Name what cannot be measured at this endpoint, and why. None of it has a gate, so none of it
    can pass.
    """
    if references.engine is None:
        unknown = ["plain texts are the engine's own (agreement_engine)"]
        if max_draft_len > 0:
            unknown += [
                "the draft proposes what its engine would propose (draft)",
                "temperature, top-k, top-p and seeds are respected",
            ]
        reason = "the engine runs in its server alone, which gives no logits"
        yield Finding("not measured", "note", f"whether {', whether '.join(unknown)}: {reason}")
    if can.reuses_prefixes and not can.has_cache_salt:
        detail = (
            "time to the first token of new prompts: the server keeps KV blocks"
            " (engine.enable_block_reuse; enable_prefix_caching for vllm), and both arms send every"
            " prompt several times; `toolkit bench` sends each prompt once"
        )
        yield Finding("not measured", "note", detail)
    if max_draft_len == 0:
        return
    if references.engine is None and can.log_probs == 0:
        yield Finding("not measured", "note", NO_LOG_PROBS)
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
            "the acceptance rate: the server does not say how many tokens were drafted",
        )


def _more_arms(
    config: ValidationConfig, max_draft_len: int, can: Capabilities
) -> list[tuple[ParityArm, int]]:
    """Return (arm, draft length) of what is compared in addition to the timed arms."""
    draft_lens = config.parity.draft_lens or (1, (max_draft_len + 1) // 2)
    shorter = sorted({draft_len for draft_len in draft_lens if draft_len < max_draft_len})
    more: list[tuple[ParityArm, int]] = [("verify", max_draft_len)] if can.has_verify_only else []
    if can.draft_len_per_request:
        more += [("speculative", draft_len) for draft_len in shorter]
    return more


def _texts_of(
    case: Case, arms: Sequence[tuple[ParityArm, int]]
) -> tuple[list[ArmTexts], list[RequestTiming]]:
    """Greedy texts of arms that are not timed, one prompt after the other. Then, where beginnings
    are reused, the requests of the timed arm once more, which begin with what those arms left.
    """
    texts: list[list[list[RequestTiming]]] = [[] for _ in arms]
    reused: list[RequestTiming] = []
    shared = {"temperature": 0.0, **_shared(case)}
    for index, prompt in enumerate(case.prompts):
        for (arm, draft_len), of_arm in zip(arms, texts, strict=True):
            of_arm.append(
                [case.sender.send(index, prompt, arm, num_draft_tokens=draft_len, **shared)]
            )
        if _shares(case.can):
            reused.append(case.sender.send(index, prompt, "speculative", **shared))
    return [ArmTexts(*arm, of_arm) for arm, of_arm in zip(arms, texts, strict=True)], reused


def _shares(can: Capabilities) -> bool:
    """Whether requests can begin with what others left in the KV cache, and can be kept from it."""
    return can.reuses_prefixes and can.has_cache_salt


def _shared(case: Case) -> dict[str, Any]:
    """The option of requests that begin with what others left in the KV cache. Timed ones do not,
    so it is here that a fault in it shows.
    """
    return {"cache_salt": ""} if _shares(case.can) else {}


def _drafted_in_full(case: Case) -> Sequence[RequestTiming]:
    """Greedy texts of which every step drafted max_draft_len tokens. Where lengths adapt, those of
    the timed arm did not, so texts are requested that state the length.
    """
    timed = case.greedy.speculative[0]
    chosen = {"pays", "acceptance", "load", "probe", "measuring"}
    if not any(chosen & set(text.statistics.steps_by_reason or {}) for text in timed):
        return timed
    options = {"temperature": 0.0, "num_draft_tokens": case.max_draft_len}
    return [
        case.sender.send(index, prompt, "speculative", **options)
        for index, prompt in enumerate(case.prompts)
    ]


def _seeded(case: Case) -> tuple[list[RequestTiming], list[list[RequestTiming]]]:
    """Return (plain, speculative) texts, with one seed per prompt."""
    case.say("sending seeded requests")
    plain: list[RequestTiming] = []
    speculative: list[list[RequestTiming]] = []
    for index, (prompt, seed) in enumerate(zip(case.prompts, case.seeds, strict=True)):
        options = {"temperature": case.config.temperature, "seed": seed, "acceptance": "coupled"}
        options |= _shared(case)
        first, second = (case.sender.send(index, prompt, arm, **options) for arm in ARMS)
        plain.append(first)
        speculative.append([second])
    return plain, speculative
