"""Does the served draft propose what the draft engine would? The one fault that changes no text and
only costs acceptance.

A draft whose cache has a hole or holds rejected tokens still proposes something, and the target
still corrects it: the text is right and speculation is slow, with nothing to show why. So the draft
engine is asked teacher-forced over the text that came: at the first place of every verify step, is
the draft's own choice the token that followed? Then a sound server kept it. The steps are split by
what came before them: a step behind a block that was kept whole is the one whose cache has to catch
up, and before the first such block of a text there was nothing to catch up with.

Greedy requests only, and only those whose chunks are steps: where several steps come in one chunk
the places are not known.
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

# share of the expected first drafts that rounding of the draft's own near-ties may cost, generously
MISSING = 0.05
# expected first drafts of which a draft that loses every second one is seen to lose too many in 99
# of 100 runs
TELLING = 27


def check_drafts(
    texts: Sequence[RequestTiming], draft_len: int, reference: Reference
) -> DraftCheck | None:
    """texts: speculative and greedy, at draft_len. None: there is no draft to ask, or no text
    whose steps can be told.
    """
    if reference.draft is None or draft_len < 1:
        return None
    counts = np.zeros(
        (2, 3), dtype=np.int64
    )  # [after a full block, before any] x [steps, expected, kept]
    for text in texts:
        sizes = [tokens for _, tokens in text.chunks if tokens is not None]
        if sizes[:1] != [1] or len(sizes) - 1 != text.statistics.verify_steps:
            continue
        prompt = tuple(reference.encode(text.prompt))
        ids = (*prompt, *text.token_ids)
        own = np.asarray(reference.draft(ids, len(prompt))).argmax(axis=-1) == np.asarray(
            text.token_ids
        )
        done, full, ever = 1, False, False
        for size in sizes[1:]:
            if done + 1 < len(own) and (
                full or not ever
            ):  # at the last token nothing is drafted any more
                counts[0 if full else 1] += (1, own[done], size > 1)
            done, full = done + size, size == draft_len + 1
            ever |= full
    (after, after_expected, after_kept), (steps, expected, kept) = counts.tolist()
    if after + steps == 0:
        return None
    return DraftCheck(draft_len, after, after_expected, after_kept, steps, expected, kept)


def shortfall(steps: int, expected: int, kept: int) -> bool:
    """Whether fewer first drafts were kept than the draft engine proposes, beyond chance and beyond
    rounding.

    One-sided: were each expected one lost with probability MISSING, as many losses as these would
    come less than once in 10,000.
    """
    from scipy.stats import binom

    lost = expected - kept
    return steps > 0 and lost > 0 and float(binom.sf(lost - 1, expected, MISSING)) < 1e-4


def telling(expected: int) -> bool:
    """Whether so many expected first drafts can show that a draft is sound: with none expected
    every draft keeps them all.
    """
    return expected >= TELLING
