"""Observe acceptance: one teacher-forced pass of target and draft over texts.

On texts that the target wrote in the observed mode, the observation is exact. On other texts it is
an approximation, since the models then see contexts that the target would not have produced.

Logits are evaluated and dropped chunk by chunk, so a vocabulary of 128k takes the memory of a chunk
and not of a text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from toolkit.advise.acceptance import (
    Drafted,
    drafted_by_lookup,
    drafted_by_model,
    rule_probabilities,
)
from toolkit.interfaces import StepEngine
from toolkit.words import AlphaRule

if TYPE_CHECKING:
    import torch

__all__ = [
    "LogitsOf",
    "Lookup",
    "Text",
    "first_choices",
    "foreign_greedy_drafts",
    "foreign_sampled_drafts",
    "greedy_drafts",
    "lookup_drafts",
    "sampled_drafts",
    "teacher_forced",
]

Floats = NDArray[Any]
# logits [n, vocab] -> the distribution that tokens are drawn from; rows sum to 1
Probabilities = Callable[[Floats], Floats]
# (ids, room) -> at most `room` drafts; the ids of a call must continue those of the call before
Lookup = Callable[[Sequence[int], int], Sequence[int]]


@dataclass(frozen=True, slots=True)
class Text:
    """A prompt and what the target wrote after it, or other text in its place. limit: the most
    tokens that are allowed.
    """

    domain: str
    prompt: tuple[int, ...]
    output: tuple[int, ...]
    limit: int


LogitsOf = Callable[[Text], Iterator[Floats]]
"""A model as it is observed: yields the logits that choose output tokens 1, 2, ... of a text, in
chunks [n, vocab].
"""


def greedy_drafts(draft: LogitsOf, text: Text, width: int) -> Drafted:
    """The drafts for a text that the target wrote greedily; only the draft has to run."""
    best = first_choices(draft, text)
    kept = (best == np.array(text.output[1:], dtype=np.int64)).astype(np.float64)
    return drafted_by_model(kept, kept, width, text.limit)


def foreign_greedy_drafts(target: LogitsOf, draft: LogitsOf, text: Text, width: int) -> Drafted:
    """The drafts for any text: one is accepted where the first choices of both models agree.

    If the target wrote the text greedily, this is `greedy_drafts`. Else the drafts of a block see
    the text before them, and not the drafts that were accepted.
    """
    agree = first_choices(target, text) == first_choices(draft, text)
    kept = agree.astype(np.float64)
    return drafted_by_model(kept, kept, width, text.limit)


def foreign_sampled_drafts(
    target: LogitsOf, draft: LogitsOf, text: Text, width: int, probabilities: Probabilities
) -> dict[AlphaRule, Drafted]:
    """The drafts under every sampling rule, for any text.

    The token of the text was not drawn from the target, so nothing can be said given this token: a
    draft is accepted with alpha, its probability over all tokens that the target may draw
    (Leviathan et al. 2023, arXiv:2211.17192, corollary 3.6, for rejection).
    """
    chunks_of = dict[AlphaRule, list[Floats]]()
    for target_rows, draft_rows in zip(target(text), draft(text), strict=True):
        p, q = (probabilities(rows).astype(np.float64) for rows in (target_rows, draft_rows))
        for rule, (alpha, _) in rule_probabilities(p, q, p.argmax(axis=-1)).items():
            chunks_of.setdefault(rule, []).append(alpha)
    return {
        rule: drafted_by_model(alpha, alpha, width, text.limit)
        for rule, alpha in ((rule, np.concatenate(chunks)) for rule, chunks in chunks_of.items())
    }


def first_choices(model: LogitsOf, text: Text) -> NDArray[np.int64]:
    """The model's best token at each output token but the first: [n - 1]."""
    chunks = [rows.argmax(axis=-1) for rows in model(text)]
    return np.concatenate(chunks).astype(np.int64) if chunks else np.empty(0, dtype=np.int64)


def sampled_drafts(
    target: LogitsOf, draft: LogitsOf, text: Text, width: int, probabilities: Probabilities
) -> dict[AlphaRule, Drafted]:
    """The drafts under every sampling rule, for a text that the target drew from `probabilities` of
    its logits.
    """
    place, chunks_of = 0, dict[AlphaRule, list[tuple[Floats, Floats]]]()
    for target_rows, draft_rows in zip(target(text), draft(text), strict=True):
        tokens = np.array(text.output[1 + place : 1 + place + len(target_rows)], dtype=np.int64)
        p, q = (probabilities(rows).astype(np.float64) for rows in (target_rows, draft_rows))
        for rule, alpha_and_kept in rule_probabilities(p, q, tokens).items():
            chunks_of.setdefault(rule, []).append(alpha_and_kept)
        place += len(tokens)
    joined = {
        rule: [np.concatenate(part) for part in zip(*chunks, strict=True)]
        for rule, chunks in chunks_of.items()
    }
    return {
        rule: drafted_by_model(alpha, kept, width, text.limit)
        for rule, (alpha, kept) in joined.items()
    }


def lookup_drafts(
    lookup: Lookup,
    text: Text,
    width: int,
    target: LogitsOf | None = None,
    probabilities: Probabilities | None = None,
) -> Drafted:
    """The drafts of prompt lookup.

    With target and probabilities, alpha is the target's probability of the first draft; otherwise
    it is 0 or 1.
    """
    if target is None or probabilities is None:
        return drafted_by_lookup(text.prompt, text.output, lookup, width, text.limit)
    chunks = [probabilities(chunk) for chunk in target(text)]
    rows = np.concatenate(chunks) if chunks else np.empty((0, 0))
    return drafted_by_lookup(
        text.prompt,
        text.output,
        lookup,
        width,
        text.limit,
        lambda place, token: float(rows[place, token]),
    )


def teacher_forced(engine: StepEngine) -> LogitsOf:
    """The engine as it is observed. A text uses slot 0 and frees it."""

    def logits_of(text: Text) -> Iterator[Floats]:
        import torch

        ids, first, step = (
            [*text.prompt, *text.output[:-1]],
            len(text.prompt),
            engine.max_step_tokens,
        )
        try:
            for start in range(0, first, step):
                engine.forward(
                    [0], torch.tensor([ids[start : min(start + step, first)]]), last_only=True
                )
            for start in range(first, len(ids), step):
                yield _array(engine.forward([0], torch.tensor([ids[start : start + step]])))[0]
        finally:
            engine.rewind([0], [0])

    return logits_of


def _array(logits: torch.Tensor) -> Floats:
    array: Floats = logits.cpu().numpy()
    return array
