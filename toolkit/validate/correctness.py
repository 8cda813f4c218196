"""Is what the endpoint says correct? All checks of it in their order, with their gates and the names of what is wrong.

Nothing here is timed. The greedy texts that were measured are used again; everything else is sent for the purpose.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from toolkit.config.schema import ValidationConfig
from toolkit.records import (
    Acceptance,
    Agreement,
    Distribution,
    Divergence,
    DraftCheck,
    Finding,
    Gate,
    Parity,
    QuantizationQuality,
    StopCheck,
)
from toolkit.validate.agreement import agreement, decided_margin
from toolkit.validate.arms import ARMS, Measured, Sender
from toolkit.validate.diagnose import diagnose
from toolkit.validate.drafts import check_drafts
from toolkit.validate.gates import agreement_gate, check_gates, distribution_gate
from toolkit.validate.parity import ArmTexts, Judge, compare, first_difference
from toolkit.validate.reference import Reference
from toolkit.validate.replay import Replay, replay_of
from toolkit.validate.sampled import draw_samples, judge_samples
from toolkit.validate.stops import REQUESTS, check_stops
from toolkit.validate.two_sample import draw_pairs, judge_pairs

if TYPE_CHECKING:
    from toolkit.client import RequestTiming

__all__ = [
    "ALL",
    "Abilities",
    "Correctness",
    "References",
    "correctness_gates",
    "judge_correctness",
    "not_measured",
    "planned_requests",
]

Said = Callable[[str], None]  # what is being done now, for the progress


@dataclass(frozen=True, slots=True)
class References:
    """What judges. engine: the compiled engine outside the server, None where nothing but its server can run it. source: the
    unquantized checkpoint, None where it is not asked.

    source_same_precision: the deployment computes what the source does, up to rounding (nothing is quantized, and float32).
    """

    engine: Reference | None
    source: Reference | None = None
    source_same_precision: bool = False


@dataclass(frozen=True, slots=True)
class Abilities:
    """What an endpoint can be asked for, beyond text. What it cannot is reported as not measured, and passes nothing.

    verify_arm: the acceptance rule `verify_only`. draft_lens: a draft length per request. coupled: seeded texts that are the
    same with and without speculation.
    """

    verify_arm: bool = True
    draft_lens: bool = True
    coupled: bool = True


ALL = Abilities()


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


def planned_requests(config: ValidationConfig, prompts: int, max_draft_len: int, can: Abilities) -> int:
    """How many requests judge_correctness sends, without those that draw tokens."""
    if max_draft_len == 0:
        return 0
    return (len(_more_arms(config, max_draft_len, can)) + 2 * can.coupled) * prompts + REQUESTS


def judge_correctness(
    sender: Sender,
    prompts: Sequence[str],
    greedy: Measured,
    config: ValidationConfig,
    references: References,
    *,
    name: str,
    quality: QuantizationQuality | None,
    rule: str,
    max_draft_len: int,
    can: Abilities,
    keep_replay: Callable[[Replay], str] | None = None,
    say: Said = lambda what: None,
    on_drawn: Callable[[int, int], None] = lambda done, total: None,
) -> Correctness:
    """greedy: the timed requests at temperature 0. quality: of the target, None where it was not quantized here. rule: of
    requests without a seed. keep_replay: stores one divergence and returns the file's name. on_drawn: (tokens or texts, of
    how many).
    """
    plain, margin = greedy.plain[0], config.parity.near_tie_margin
    parity, seeded, draft_check, stop_check, distribution = None, None, None, None, None
    if max_draft_len > 0:
        judge = Judge(references.engine, margin)

        def keep(one: Divergence, text: RequestTiming, other: RequestTiming) -> str | None:
            return None if keep_replay is None else keep_replay(replay_of(name, config, one, text, other))

        say("comparing draft lengths")
        arms = [ArmTexts("speculative", max_draft_len, list(zip(*greedy.speculative, strict=True)))]
        arms += [_said_by(sender, prompts, arm, draft_len) for arm, draft_len in _more_arms(config, max_draft_len, can)]
        say("sending stop words")
        same = [first_difference(*pair) is None for pair in zip(plain, greedy.speculative[0], strict=True)]
        stop_check = check_stops(sender, prompts, plain, same, seed=config.seed)
        seeds = [config.seed + index for index in range(len(prompts))]
        seeded_texts = None
        if can.coupled:
            say("sending seeded requests")
            seeded_texts = _seeded(sender, prompts, seeds, config.temperature)
        if config.distribution.enabled and references.engine is None:
            say("drawing tokens")
            pairs = draw_pairs(
                sender,
                prompts,
                config.distribution,
                temperature=config.temperature,
                seed=config.seed,
                on_progress=on_drawn,
            )
            say("testing what was drawn")
            distribution = judge_pairs(pairs, config.distribution, rule=rule, seed=config.seed)
        elif config.distribution.enabled and references.engine is not None:
            say("drawing tokens")
            drawn = draw_samples(
                sender,
                prompts,
                config.distribution,
                references.engine,
                temperature=config.temperature,
                near_tie_margin=margin,
                seed=config.seed,
                on_progress=on_drawn,
            )
            say("testing what was drawn")
            distribution = judge_samples(drawn, config.distribution, rule=rule, seed=config.seed)
        say("asking the engine about divergences")
        parity = compare(plain, arms, judge, keep=keep)
        if seeded_texts is not None:
            seeded_judge = replace(judge, temperature=config.temperature, seeds=seeds)
            seeded = compare(
                seeded_texts[0], [ArmTexts("speculative", max_draft_len, seeded_texts[1])], seeded_judge, keep=keep
            )
        if references.engine is not None:
            draft_check = check_drafts(greedy.speculative[0], max_draft_len, references.engine)
    agreements = []
    if references.engine is not None:
        say("asking the engine about every token")
        agreements.append(agreement("engine", plain, references.engine, margin, same_precision=True, seed=config.seed))
    if references.source is not None:
        say("asking the unquantized model about every token")
        same_precision = references.source_same_precision
        agreements.append(
            agreement(
                "source",
                plain,
                references.source,
                margin,
                same_precision=same_precision,
                decided_margin=None if same_precision else decided_margin(quality),
                seed=config.seed,
            )
        )
    diagnoses = diagnose(
        plain=plain,
        parity=parity,
        agreements=agreements,
        draft_check=draft_check,
        stop_check=stop_check,
        distribution=distribution,
        overrun=sum((one.output_tokens or 0) > config.max_tokens for one in sender.sent),
        reference=references.engine or references.source,
        near_tie_margin=margin,
    )
    asked_draft = max_draft_len > 0 and references.engine is not None and references.engine.draft is not None
    return Correctness(
        parity, seeded, tuple(agreements), draft_check, stop_check, distribution, tuple(diagnoses), asked_draft=asked_draft
    )


def correctness_gates(found: Correctness) -> list[Gate]:
    """All but those of parity."""
    return [
        *(gate for one in found.agreements if (gate := agreement_gate(one)) is not None),
        *check_gates(found.draft_check, found.stop_check, found.diagnoses, asked_draft=found.asked_draft),
        *([] if found.distribution is None else [distribution_gate(found.distribution)]),
    ]


def not_measured(
    max_draft_len: int, references: References, can: Abilities, acceptance: Acceptance | None
) -> Iterator[Finding]:
    """What this endpoint leaves unknown, and why. There is no gate of any of it, so that none can pass."""
    foreign = "the engine runs in its server alone, and gives no logits there"
    if references.engine is None:
        yield Finding("not measured", "warning", f"whether plain texts are the engine's own (agreement_engine): {foreign}")
    if max_draft_len == 0:
        return
    if references.engine is None:
        yield Finding("not measured", "warning", f"whether the draft proposes what its engine would (draft): {foreign}")
        yield Finding("not measured", "warning", f"whether temperature, top-k, top-p and seeds are respected: {foreign}")
    if not can.verify_arm:
        yield Finding("not measured", "warning", "parity of verifying without accepting: no request can ask for verify_only")
    if not can.draft_lens:
        yield Finding("not measured", "warning", "parity at shorter draft lengths: the length is fixed when the server starts")
    if not can.coupled:
        detail = "parity of seeded texts: this runtime's random numbers are not the same with and without speculation"
        yield Finding("not measured", "warning", detail)
    if acceptance is not None and not acceptance.by_position:
        yield Finding("not measured", "warning", "acceptance by position: the server does not count it")
    if acceptance is not None and not acceptance.drafted:
        yield Finding("not measured", "warning", "the acceptance rate: the server does not say how much was drafted")


def _more_arms(config: ValidationConfig, max_draft_len: int, can: Abilities) -> list[tuple[str, int]]:
    """(arm, draft length) of what is compared beside the arms that are timed."""
    asked = config.parity.draft_lens or (1, (max_draft_len + 1) // 2)
    shorter = sorted({draft_len for draft_len in asked if draft_len < max_draft_len})
    more = [("speculative", draft_len) for draft_len in shorter] if can.draft_lens else []
    return [*([("verify", max_draft_len)] if can.verify_arm else []), *more]


def _said_by(sender: Sender, prompts: Sequence[str], arm: str, draft_len: int) -> ArmTexts:
    options = {"temperature": 0.0, "num_draft_tokens": draft_len}
    return ArmTexts(arm, draft_len, [[sender.send(index, prompt, arm, **options)] for index, prompt in enumerate(prompts)])


def _seeded(
    sender: Sender, prompts: Sequence[str], seeds: Sequence[int], temperature: float
) -> tuple[list[RequestTiming], list[list[RequestTiming]]]:
    """(plain, speculative) texts, a seed per prompt."""
    plain: list[RequestTiming] = []
    said: list[list[RequestTiming]] = []
    for index, (prompt, seed) in enumerate(zip(prompts, seeds, strict=True)):
        options = {"temperature": temperature, "seed": seed, "acceptance": "coupled"}
        one, other = (sender.send(index, prompt, arm, **options) for arm in ARMS)
        plain.append(one)
        said.append([other])
    return plain, said
