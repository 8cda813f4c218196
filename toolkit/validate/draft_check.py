"""Check whether the served draft proposes what the draft engine would. Such a fault changes no text
and only costs acceptance.

A draft whose cache has a hole or holds rejected tokens still proposes something, and the target
still corrects it: the text is right and speculation is slow, with nothing to show why. So the draft
engine is run teacher-forced over the returned text: at the first place of every verify step, is the
draft's own choice the token that followed? If so, a sound server accepted it. The steps are split
by what came before them. After a fully accepted block the draft's cache has to catch up; before the
first such block of a text there was nothing to catch up with.

Only greedy requests count, and only those whose chunks are single steps: if a chunk holds several
steps, their places are not known.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from toolkit.records.judged import DraftCheck
from toolkit.validate.reference import Reference

if TYPE_CHECKING:
    from toolkit.client import RequestTiming

__all__ = ["check_drafts", "shortfall", "telling"]

# Share of the expected first draft tokens that rounding at the draft's own near-ties may cost; a
# generous guess.
MISSING = 0.05
# Expected first draft tokens from which on a draft that loses every second one is caught in 99 of
# 100 runs.
TELLING = 27


def check_drafts(
    texts: Sequence[RequestTiming], draft_len: int, reference: Reference
) -> DraftCheck | None:
    """Count the first draft tokens of all steps. texts: speculative and greedy, at draft_len.

    None: there is no draft to ask, or no text shows its steps.
    """
    if reference.draft is None or draft_len < 1:
        return None
    # [after a full block, before any] x [steps, expected, kept]
    counts = np.zeros((2, 3), dtype=np.int64)
    hidden_texts = 0
    for text in texts:
        sizes = [tokens for _, tokens in text.chunks if tokens is not None]
        if sizes[:1] != [1] or len(sizes) - 1 != text.statistics.verify_steps:
            hidden_texts += 1
            continue
        prompt = tuple(reference.encode(text.prompt))
        ids = (*prompt, *text.token_ids)
        own = np.asarray(reference.draft(ids, len(prompt))).argmax(axis=-1) == np.asarray(
            text.token_ids
        )
        done, full, ever = 1, False, False
        for size in sizes[1:]:
            # Nothing is drafted for the last token.
            if done + 1 < len(own) and (full or not ever):
                counts[0 if full else 1] += (1, own[done], size > 1)
            done, full = done + size, size == draft_len + 1
            ever |= full
    (after, after_expected, after_kept), (steps, expected, kept) = counts.tolist()
    if after + steps == 0:
        return None
    return DraftCheck(
        draft_len, after, after_expected, after_kept, steps, expected, kept, hidden_texts
    )


def shortfall(steps: int, expected: int, kept: int) -> bool:
    """Whether fewer first draft tokens were accepted than the draft engine proposes, beyond chance
    and rounding.

    The test is one-sided: if each expected token were lost with probability MISSING, this many
    losses would have a probability below 1 in 10,000.
    """
    from scipy.stats import binom

    lost = expected - kept
    return steps > 0 and lost > 0 and float(binom.sf(lost - 1, expected, MISSING)) < 1e-4


def telling(expected: int) -> bool:
    """Whether this many expected first draft tokens can show that a draft is sound. If none were
    expected, no draft could lose any.
    """
    return expected >= TELLING
