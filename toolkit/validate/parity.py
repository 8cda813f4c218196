"""Speculative against plain decoding, token by token, and what a difference means.

Floating point is not batch-invariant: a verify forward of five tokens rounds otherwise than a decode forward of one, so at a
near-tie either token may win, and from there on the texts have nothing in common. A logic fault looks the same from outside,
except that the reference is not undecided where the texts part. So every first difference is put to the reference model,
teacher-forced on the text that both arms share, and both chosen tokens have to lie within `near_tie_margin` of the best score.
Anything else is a fault.

The score is the logit at temperature 0. Under the `coupled` rule with a seed it is logit + temperature * Gumbel noise, which is
what that rule maximises: the noise is the same in both arms, so only rounding of the logits can tip the choice, and a rounding
error moves this score by as much as the logit. One margin in logits therefore serves both.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from toolkit.records import Divergence, Parity
from toolkit.validate.reference import Reference
from toolkit.validate.statistics import CONFIDENCE, clopper_pearson

if TYPE_CHECKING:
    from toolkit.client import RequestTiming

__all__ = ["compare", "first_difference", "judge_divergence", "unrepeatable"]


@dataclass(frozen=True, slots=True)
class Place:
    """Where two texts part: the output position, and what each chose there. None: it ended."""

    position: int
    plain_token: int | None
    speculative_token: int | None


def compare(
    pairs: Sequence[tuple[RequestTiming, Sequence[RequestTiming]]],
    reference: Reference,
    near_tie_margin: float,
    *,
    temperature: float = 0.0,
    seeds: Sequence[int | None] | None = None,
) -> Parity:
    """Judge every prompt: (its plain text, its speculative texts). It diverges if any of them differs; the earliest counts."""
    divergences: list[Divergence] = []
    for index, (plain, speculative) in enumerate(pairs):
        places = [(place, other) for other in speculative if (place := first_difference(plain, other)) is not None]
        if places:
            place, other = min(places, key=lambda item: item[0].position)
            seed = None if seeds is None else seeds[index]
            divergences.append(judge_divergence(index, plain, other, place, reference, near_tie_margin, temperature, seed))
    kinds = [divergence.kind for divergence in divergences]
    low, high = clopper_pearson(len(divergences), len(pairs))
    return Parity(
        prompts=len(pairs),
        identical=len(pairs) - len(divergences),
        near_ties=kinds.count("near-tie"),
        faults=kinds.count("fault"),
        unexplained=kinds.count("unexplained"),
        rate=len(divergences) / len(pairs),
        rate_low=low,
        rate_high=high,
        confidence=CONFIDENCE,
        compared_tokens=sum(len(plain.token_ids) for plain, _ in pairs),
        near_tie_margin=near_tie_margin,
        divergences=tuple(divergences),
    )


def first_difference(plain: RequestTiming, speculative: RequestTiming) -> Place | None:
    """Where the texts part; None when tokens, text and finish reason are all the same."""
    for position, (one, other) in enumerate(zip(plain.token_ids, speculative.token_ids, strict=False)):
        if one != other:
            return Place(position, one, other)
    shared = min(len(plain.token_ids), len(speculative.token_ids))
    if len(plain.token_ids) != len(speculative.token_ids):
        return Place(shared, _token(plain.token_ids, shared), _token(speculative.token_ids, shared))
    same = plain.text == speculative.text and plain.finish_reason == speculative.finish_reason
    return None if same else Place(shared, None, None)


def judge_divergence(
    index: int,
    plain: RequestTiming,
    speculative: RequestTiming,
    place: Place,
    reference: Reference,
    near_tie_margin: float,
    temperature: float = 0.0,
    seed: int | None = None,
) -> Divergence:
    """Put one divergence to the reference."""

    def divergence(
        kind: str, detail: str, margin: float | None = None, ranks: Any = (None, None), gaps: Any = (None, None)
    ) -> Divergence:
        return Divergence(
            prompt_index=index,
            prompt=plain.prompt,
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
        )

    if place.plain_token is None and place.speculative_token is None:
        what = "finish reasons" if plain.finish_reason != speculative.finish_reason else "texts"
        return divergence("fault", f"the same tokens, but their {what} differ: detokenization or stop rules, not rounding")
    chosen: list[tuple[int, ...]] = []
    for arm, request, token in (("plain", plain, place.plain_token), ("speculative", speculative, place.speculative_token)):
        if token is None and request.finish_reason != "stop":
            return divergence("fault", f"the {arm} text ended early ({request.finish_reason}), at no end token")
        chosen.append(reference.eos_token_ids if token is None else (token,))
    if temperature > 0 and (reference.noise is None or seed is None):
        return divergence("unexplained", "the runtime's noise is not known here, so rounding and a fault cannot be told apart")

    prompt_ids = tuple(reference.encode(plain.prompt))
    if plain.statistics.input_tokens not in (None, len(prompt_ids)):
        counts = f"{plain.statistics.input_tokens} prompt tokens, the reference {len(prompt_ids)}"
        return divergence("unexplained", f"the server counts {counts}: they do not read the same prompt")
    prefix = (*prompt_ids, *plain.token_ids[: place.position])
    scores = np.asarray(reference.next_logits(prefix), dtype=np.float64)
    if temperature > 0 and reference.noise is not None and seed is not None:
        scores = scores + temperature * np.asarray(reference.noise(seed, len(prefix), len(scores)), dtype=np.float64)
    best, second = _two_best(scores)
    # An end without a token is whichever end token the reference likes best.
    scored = [max((float(scores[token]) for token in tokens), default=-np.inf) for tokens in chosen]
    gaps = tuple(best - score for score in scored)
    ranks = tuple(int((scores > score).sum()) for score in scored)
    margin = best - second
    if max(gaps) <= near_tie_margin:
        return divergence(
            "near-tie", f"the reference is undecided: {margin:.4f} logits between its two best", margin, ranks, gaps
        )
    culprit, gap, rank = max(zip(("plain", "speculative"), gaps, ranks, strict=True), key=lambda item: item[1])
    detail = f"the {culprit} arm chose the reference's number {rank + 1}, {gap:.4f} logits below its best"
    return divergence("fault", detail, margin, ranks, gaps)


def unrepeatable(rounds: Iterable[Sequence[RequestTiming]]) -> int:
    """Prompts whose text is not the same in every round of one arm."""
    return sum(any(other.token_ids != column[0].token_ids for other in column) for column in zip(*rounds, strict=True))


def _token(tokens: Sequence[int], position: int) -> int | None:
    return tokens[position] if position < len(tokens) else None


def _two_best(scores: NDArray[np.float64]) -> tuple[float, float]:
    second, best = np.partition(scores, -2)[-2:]
    return float(best), float(second)
