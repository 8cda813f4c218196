"""Accept rules that are wrong on purpose, and the runtime's rejection with one of them put in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from toolkit.speculative.acceptance import Rejection, Rule, reject
from toolkit.speculative.sampling import Floats, draw

Rows = np.ndarray[Any, Any]
Reject = Callable[[Sequence[int], Sequence[Rows], Rows, Sequence[float]], tuple[int, int]]


def accept_by_argmax(
    drafts: Sequence[int],
    draft_probs: Sequence[Rows],
    target_probs: Rows,
    uniforms: Sequence[float],
) -> tuple[int, int]:
    """Broken: accepts a draft if it is the target's most likely token, at a temperature above 0."""
    accepted = next((i for i, d in enumerate(drafts) if d != target_probs[i].argmax()), len(drafts))
    return accepted, draw(target_probs[accepted], uniforms[-1])


def without_residual(
    drafts: Sequence[int],
    draft_probs: Sequence[Rows],
    target_probs: Rows,
    uniforms: Sequence[float],
) -> tuple[int, int]:
    """Broken: draws the recovered token from the target's row instead of from the residual."""
    accepted, _ = reject(drafts, draft_probs, target_probs, uniforms)
    return accepted, draw(target_probs[accepted], uniforms[-1])


def without_normalisation(
    drafts: Sequence[int],
    draft_probs: Sequence[Rows],
    target_probs: Rows,
    uniforms: Sequence[float],
) -> tuple[int, int]:
    """Broken: reads the residual as if it summed to 1; the last token gets what is missing."""
    accepted, token = reject(drafts, draft_probs, target_probs, uniforms)
    if accepted == len(drafts):
        return accepted, token
    residual = (target_probs[accepted] - draft_probs[accepted]).clip(min=0.0)
    drawn = int(residual.cumsum().searchsorted(uniforms[-1], side="right"))
    return accepted, min(drawn, len(residual) - 1)


def bonus_from_the_draft(
    drafts: Sequence[int],
    draft_probs: Sequence[Rows],
    target_probs: Rows,
    uniforms: Sequence[float],
) -> tuple[int, int]:
    """Broken: draws the bonus token from the draft's last row."""
    accepted, token = reject(drafts, draft_probs, target_probs, uniforms)
    return accepted, draw(draft_probs[-1], uniforms[-1]) if accepted == len(drafts) else token


BROKEN_RULES = [accept_by_argmax, without_residual, without_normalisation, bonus_from_the_draft]


class WithRule(Rejection):
    """Rejection with another accept function, which no engine knows."""

    rule: Reject

    @property
    def bursting(self) -> None:
        return None

    def decide(self, logits: Floats, position: int, drafts: list[int]) -> tuple[int, int]:
        target_probs = self._weights(logits, drafts, 0)
        target_probs /= target_probs.sum(axis=-1, keepdims=True)
        uniforms = self._uniforms.take(len(drafts) + 1)
        outcome = type(self).rule(drafts, self._draft_probs, target_probs, uniforms)
        self._draft_probs.clear()
        return outcome


def with_rule(rule: Reject) -> type[Rule]:
    return type("Broken", (WithRule,), {"rule": staticmethod(rule)})
