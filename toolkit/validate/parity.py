"""Compare every arm with plain decoding, token by token, and judge what a difference means.

The plain text is compared with the text of the speculative path that accepts nothing (`verify`),
and with the texts of speculation at several draft lengths. Floating point is not batch-invariant: a
verify forward of five tokens rounds differently from a decode forward of one. So at a near-tie
either token may win, and from there on the texts have nothing in common. A logic fault looks the
same from outside, except that the reference is not undecided where the texts diverge. Therefore the
reference model judges every first difference, teacher-forced on the text that both share:

    equivalent   both chosen tokens lie within `near_tie_margin` of the reference's best score, so
                 rounding explains it
    suspicious   the choice is between the reference's two best tokens, up to ten times as far
                 apart: more than rounding, less than a plain fault
    broken       anything else, and a suspicious one whose position moves with the draft length,
                 since rounding does not depend on that length

At temperature 0 the score is the logit. Under the `coupled` rule with a seed it is logit +
temperature * Gumbel noise, which is what that rule maximises. The noise is the same in both arms,
so only rounding of the logits can tip the choice, and a rounding error moves this score as much as
the logit. One margin in logits therefore serves both.

If no reference can be asked, greedy divergences are judged by the log-probabilities that the arms
themselves return when they are asked again (`toolkit.validate.log_probs`). That is weaker evidence,
with the same classes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from toolkit.bench.proportions import clopper_pearson
from toolkit.records.judged import ArmParity, Divergence, MarginBin, Parity
from toolkit.resampling import CONFIDENCE
from toolkit.validate.log_probs import LogProbJudgement, judge_log_probs
from toolkit.validate.reference import Reference
from toolkit.validate.severity import judge_gaps
from toolkit.words import DivergenceKind, ParityArm, ParityKind

if TYPE_CHECKING:
    from toolkit.client import RequestTiming

__all__ = [
    "KINDS",
    "MARGIN_EDGES",
    "ArmTexts",
    "AskedAgain",
    "Judge",
    "Place",
    "compare",
    "earliest_difference",
    "first_difference",
    "margin_bins",
    "unrepeatable",
]

UNKNOWN = "the engine cannot be asked outside its server: rounding and a fault look the same"
KINDS: tuple[ParityKind, ...] = (
    "identical",
    "equivalent",
    "suspicious",
    "broken",
    "unexplained",
)  # from good to bad, as far as they have an order
MARGIN_EDGES = (0.0, 0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.0)  # logits


@dataclass(frozen=True, slots=True)
class Place:
    """Where two texts diverge: the output position and each text's token there. None: it ended."""

    position: int
    plain_token: int | None
    speculative_token: int | None


@dataclass(frozen=True, slots=True)
class ArmTexts:
    """The texts of one arm, as texts[prompt][round]. A prompt diverges if any of its rounds does,
    and the earliest place counts.
    """

    arm: ParityArm
    draft_len: int
    texts: Sequence[Sequence[RequestTiming]]


# (arm, draft length, prompt) -> the plain and the other text, generated again with
# log-probabilities; or the reason why there are none.
AskedAgain = Mapping[tuple[ParityArm, int, int], "tuple[RequestTiming, RequestTiming] | str"]


@dataclass(frozen=True, slots=True)
class Judge:
    """What is needed to judge a divergence. seeds: one per prompt, at temperature > 0. reference
    None: there is none to ask, so `again` judges a divergence; without an entry there it stays
    unexplained.
    """

    reference: Reference | None
    near_tie_margin: float
    temperature: float = 0.0
    seeds: Sequence[int] | None = None
    again: AskedAgain = field(default_factory=dict)


def compare(
    plain: Sequence[RequestTiming],
    arms: Sequence[ArmTexts],
    judge: Judge,
    *,
    keep: Callable[
        [Divergence, RequestTiming, RequestTiming], str | None
    ] = lambda divergence, plain, other: None,
) -> Parity:
    """Judge every prompt in every arm. keep: takes each divergence with its texts, and returns the
    name of its replay file.
    """
    # [arm][prompt] -> the divergence and the text that has it
    judged: list[list[tuple[Divergence, RequestTiming] | None]]
    judged = [[None] * len(plain) for _ in arms]
    # Arms often diverge at the same place, so the reference is asked only once per place.
    scores: dict[tuple[int, ...], NDArray[np.float64]] = {}
    for number, arm in enumerate(arms):
        for index, (own, others) in enumerate(zip(plain, arm.texts, strict=True)):
            first = earliest_difference(own, others)
            if first is not None:
                place, other = first
                divergence = _judge(judge, index, own, other, place, arm, scores)
                judged[number][index] = (divergence, other)
    moved = [_moves(arms, column) for column in zip(*judged, strict=True)]
    divergences: list[Divergence] = []
    counts: list[dict[ParityKind, int]] = []
    worst: list[ParityKind] = ["identical"] * len(plain)
    for row in judged:
        kinds = dict.fromkeys(KINDS, 0)
        for index, item in enumerate(row):
            if item is None:
                kinds["identical"] += 1
                continue
            divergence, other = item
            if divergence.kind == "suspicious" and moved[index]:
                detail = f"{divergence.detail}; the position moves with the draft length"
                divergence = replace(divergence, kind="broken", detail=detail)
            divergence = replace(divergence, replay=keep(divergence, plain[index], other))
            divergences.append(divergence)
            kinds[divergence.kind] += 1
            worst[index] = max(worst[index], divergence.kind, key=_badness)
        counts.append(kinds)
    diverging = len(plain) - worst.count("identical")
    low, high = clopper_pearson(diverging, len(plain))
    columns = list(zip(*judged, strict=True))
    return Parity(
        prompts=len(plain),
        **{kind: worst.count(kind) for kind in KINDS},
        rate=diverging / len(plain),
        rate_low=low,
        rate_high=high,
        confidence=CONFIDENCE,
        compared_tokens=sum(len(own.token_ids) for own in plain) * len(arms),
        near_tie_margin=judge.near_tie_margin,
        arms=tuple(
            ArmParity(arm.arm, arm.draft_len, **kinds)
            for arm, kinds in zip(arms, counts, strict=True)
        ),
        arms_equal=sum(
            _all_equal([arm.texts[index] for arm in arms]) for index in range(len(plain))
        ),
        same_place=sum(_stays(arms, column) for column in columns),
        moved=sum(moved),
        severity=margin_bins([each.margin for each in divergences if each.margin is not None]),
        divergences=tuple(sorted(divergences, key=_worst_first)),
    )


def first_difference(plain: RequestTiming, speculative: RequestTiming) -> Place | None:
    """Return where the texts diverge; None if tokens, text and finish reason are all the same."""
    for position, (plain_token, speculative_token) in enumerate(
        zip(plain.token_ids, speculative.token_ids, strict=False)
    ):
        if plain_token != speculative_token:
            return Place(position, plain_token, speculative_token)
    shared = min(len(plain.token_ids), len(speculative.token_ids))
    if len(plain.token_ids) != len(speculative.token_ids):
        return Place(shared, _token(plain.token_ids, shared), _token(speculative.token_ids, shared))
    same = plain.text == speculative.text and plain.finish_reason == speculative.finish_reason
    return None if same else Place(shared, None, None)


def earliest_difference(
    plain: RequestTiming, others: Iterable[RequestTiming]
) -> tuple[Place, RequestTiming] | None:
    """Return the first place where any round of a prompt diverges from the plain text, and the
    text of that round.
    """
    places = [
        (place, other) for other in others if (place := first_difference(plain, other)) is not None
    ]
    return min(places, key=lambda item: item[0].position) if places else None


def margin_bins(
    margins: Iterable[float], differing: Iterable[bool] | None = None
) -> tuple[MarginBin, ...]:
    """Count places by their margin. differing: whether each of them differs (None: all do)."""
    values = np.asarray(list(margins), dtype=np.float64)
    marks = np.ones(len(values), dtype=bool)
    if differing is not None:
        marks = np.asarray(list(differing), dtype=bool)
    bins = []
    for low, high in zip(MARGIN_EDGES, (*MARGIN_EDGES[1:], None), strict=True):
        inside = (values >= low) & (values < (np.inf if high is None else high))
        bins.append(MarginBin(low, high, int(inside.sum()), int((inside & marks).sum())))
    return tuple(bins)


def unrepeatable(rounds: Iterable[Sequence[RequestTiming]]) -> int:
    """Count the prompts whose text is not the same in every round of one arm."""
    return sum(
        any(other.token_ids != column[0].token_ids for other in column)
        for column in zip(*rounds, strict=True)
    )


def _judge(
    judge: Judge,
    index: int,
    plain: RequestTiming,
    other: RequestTiming,
    place: Place,
    arm: ArmTexts,
    known: dict[tuple[int, ...], NDArray[np.float64]],
) -> Divergence:
    """Judge one divergence by the reference. known: its logits so far, by all ids before them."""
    reference, seed = judge.reference, None if judge.seeds is None else judge.seeds[index]

    def divergence(
        kind: DivergenceKind,
        detail: str,
        margin: float | None = None,
        ranks: Any = (None, None),
        gaps: Any = (None, None),
    ) -> Divergence:
        return Divergence(
            prompt_index=index,
            prompt=plain.prompt,
            arm=arm.arm,
            draft_len=arm.draft_len,
            position=place.position,
            kind=kind,
            plain_token=place.plain_token,
            speculative_token=place.speculative_token,
            margin=margin,
            plain_rank=ranks[0],
            speculative_rank=ranks[1],
            plain_gap=gaps[0],
            speculative_gap=gaps[1],
            seed=seed,
            detail=detail,
            judged_by=None if margin is None else "reference",
        )

    if place.plain_token is None and place.speculative_token is None:
        what = "finish reasons" if plain.finish_reason != other.finish_reason else "texts"
        return divergence(
            "broken",
            f"the tokens are the same, but the {what} differ: detokenization or stop rules are at"
            " fault, not rounding",
        )
    chosen: list[tuple[int, ...]] = []
    for name, request, token in (
        ("plain", plain, place.plain_token),
        (arm.arm, other, place.speculative_token),
    ):
        if token is None and request.finish_reason != "stop":
            return divergence(
                "broken",
                f"the {name} text ended early ({request.finish_reason}), without an end token",
            )
        if reference is None:
            continue
        chosen.append(reference.eos_token_ids if token is None else (token,))
    if reference is None:
        return _of_log_probs(divergence("unexplained", UNKNOWN), plain, other, judge)
    if judge.temperature > 0 and (reference.noise is None or seed is None):
        return divergence(
            "unexplained",
            "the runtime's noise is not known here, so rounding and a fault cannot be told apart",
        )

    prompt_ids = tuple(reference.encode(plain.prompt))
    if plain.statistics.input_tokens not in (None, len(prompt_ids)):
        counts = f"{plain.statistics.input_tokens} prompt tokens, the reference {len(prompt_ids)}"
        return divergence(
            "unexplained", f"the server counts {counts}: they do not read the same prompt"
        )
    prefix = (*prompt_ids, *plain.token_ids[: place.position])
    if prefix not in known:
        known[prefix] = np.asarray(reference.next_logits(prefix), dtype=np.float64)
    scores = known[prefix]
    if judge.temperature > 0 and reference.noise is not None and seed is not None:
        scores = scores + judge.temperature * np.asarray(
            reference.noise(seed, len(prefix), len(scores)), dtype=np.float64
        )
    second, best = (float(score) for score in np.partition(scores, -2)[-2:])
    # If a text ended without a token, it counts as the end token that the reference likes best.
    scored = [max((float(scores[token]) for token in tokens), default=-np.inf) for tokens in chosen]
    gaps = tuple(best - score for score in scored)
    ranks = tuple(int((scores > score).sum()) for score in scored)
    margin = best - second
    kind = judge_gaps(gaps, ranks, judge.near_tie_margin)
    if kind == "equivalent":
        return divergence(
            kind,
            f"the reference is undecided: {margin:.4f} logits between its two best",
            margin,
            ranks,
            gaps,
        )
    culprit, gap, rank = max(
        zip(("plain", arm.arm), gaps, ranks, strict=True), key=lambda item: item[1]
    )
    detail = (
        f"the {culprit} arm chose the reference's number {rank + 1}, {gap:.4f} logits below its"
        " best"
    )
    return divergence(kind, detail, margin, ranks, gaps)


def _worst_first(divergence: Divergence) -> tuple[int, int, str, int]:
    return (
        -_badness(divergence.kind),
        divergence.prompt_index,
        divergence.arm,
        divergence.draft_len,
    )


def _of_log_probs(
    divergence: Divergence, plain: RequestTiming, other: RequestTiming, judge: Judge
) -> Divergence:
    """Judge a divergence by the arms' own log-probabilities. Without them it stays as it is."""
    again = judge.again.get((divergence.arm, divergence.draft_len, divergence.prompt_index))
    if again is None:
        return divergence
    if isinstance(again, str):
        return replace(divergence, detail=f"{divergence.detail}; {again}")
    upto = divergence.position + 1
    for name, before, now in (("plain", plain, again[0]), (divergence.arm, other, again[1])):
        if before.token_ids[:upto] != now.token_ids[:upto]:
            detail = (
                f"asked again for its log-probabilities, the {name} arm gave another text up to"
                " this place"
            )
            return replace(divergence, detail=f"{detail}, so nothing is known about the first text")
    verdict: LogProbJudgement = judge_log_probs(
        divergence.position, *again, divergence.arm, judge.near_tie_margin
    )
    return replace(
        divergence,
        kind=verdict.kind,
        detail=verdict.detail,
        margin=verdict.margin,
        plain_rank=verdict.ranks[0],
        speculative_rank=verdict.ranks[1],
        plain_gap=verdict.gaps[0],
        speculative_gap=verdict.gaps[1],
        judged_by="log_probs" if verdict.kind != "unexplained" else None,
        change=verdict.change,
        drift=verdict.drift,
    )


def _positions(
    arms: Sequence[ArmTexts], column: Sequence[tuple[Divergence, RequestTiming] | None]
) -> list[int | None]:
    """Return where a prompt diverges, for each draft length of the speculative arm."""
    pairs = zip(arms, column, strict=True)
    return [
        None if item is None else item[0].position
        for arm, item in pairs
        if arm.arm == "speculative"
    ]


def _moves(
    arms: Sequence[ArmTexts], column: Sequence[tuple[Divergence, RequestTiming] | None]
) -> bool:
    return len({place for place in _positions(arms, column) if place is not None}) > 1


def _stays(
    arms: Sequence[ArmTexts], column: Sequence[tuple[Divergence, RequestTiming] | None]
) -> bool:
    places = _positions(arms, column)
    return len(places) > 1 and len(set(places)) == 1 and places[0] is not None


def _all_equal(texts: Sequence[Sequence[RequestTiming]]) -> bool:
    first = texts[0][0] if texts else None
    return all(
        first_difference(first, text) is None
        for rounds in texts
        for text in rounds
        if first is not None
    )


def _badness(kind: ParityKind) -> int:
    """Rank a kind by how bad it is. `broken` is worse than `unexplained`: one fault fails, whatever
    else could not be judged.
    """
    return {"broken": 4, "unexplained": 3}.get(kind, KINDS.index(kind))


def _token(tokens: Sequence[int], position: int) -> int | None:
    return tokens[position] if position < len(tokens) else None
