"""Compare the plain greedy text with a reference model, teacher-forced over every token.

Arms that agree with one another may all be wrong: a dropped BOS, a damaged weight or a wrong
position affects every arm. So a reference checks the plain text token by token: would it have
chosen this token after the same text? Only tokens are compared, which any endpoint returns. How far
a token lies below the reference's best shows what kind of difference it is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from toolkit.records.build import QuantizationQuality
from toolkit.records.judged import Agreement
from toolkit.resampling import CONFIDENCE, bootstrap_ratio_of_sums
from toolkit.validate.parity import margin_bins
from toolkit.validate.reference import Reference, text_logits
from toolkit.validate.severity import judge_gaps
from toolkit.words import AgreementSource, ParityKind

if TYPE_CHECKING:
    from toolkit.client import RequestTiming

__all__ = ["agreement", "decided_margin", "explained_without_first_token"]


def agreement(
    against: AgreementSource,
    texts: Sequence[RequestTiming],
    reference: Reference,
    near_tie_margin: float,
    *,
    same_precision: bool,
    decided_margin: float | None = None,
    seed: int = 0,
    on_prompt: Callable[[int], None] = lambda done: None,
) -> Agreement:
    """Compare texts (plain, greedy, one per prompt) with the reference.

    same_precision: the reference computes what the server should compute, up to rounding. If not,
    a differing token means something only where the reference is decided by decided_margin logits.
    """
    per_prompt: list[tuple[int, int]] = []
    margins: list[float] = []
    differing: list[bool] = []
    worst_kind: ParityKind = "identical"
    worst = (0.0, "every token is the reference's own choice")
    beyond = first_tokens = 0
    order: tuple[ParityKind, ...] = ("identical", "equivalent", "suspicious", "broken")
    for index, text in enumerate(texts):
        gaps, ranks, margin = _scored(reference, text)
        agreeing = gaps <= 0.0
        per_prompt.append((int(agreeing.sum()), len(gaps)))
        margins += margin.tolist()
        differing += (~agreeing).tolist()
        for position in np.flatnonzero(~agreeing).tolist():
            gap, rank = float(gaps[position]), int(ranks[position])
            kind = judge_gaps([gap], [rank], near_tie_margin)
            worst_kind = max(worst_kind, kind, key=order.index)
            beyond += kind != "equivalent"
            first_tokens += position == 0 and kind != "equivalent"
            if gap > worst[0]:
                where = f"prompt {index + 1}, output token {position + 1}"
                worst = (
                    gap,
                    f"{where}: the reference's number {rank + 1}, {gap:.4f} logits below its best",
                )
        on_prompt(index + 1)
    decided = np.asarray(margins) >= (np.inf if decided_margin is None else decided_margin)
    agreeing_tokens = [agreed for agreed, _ in per_prompt]
    tokens = [count for _, count in per_prompt]
    rate, low, high = bootstrap_ratio_of_sums(agreeing_tokens, tokens, seed=seed)
    return Agreement(
        against=against,
        prompts=len(texts),
        tokens=sum(tokens),
        agreeing=sum(agreeing_tokens),
        rate=rate,
        rate_low=low,
        rate_high=high,
        confidence=CONFIDENCE,
        kind=worst_kind if same_precision else None,
        beyond_rounding=beyond,
        first_tokens=first_tokens,
        largest_gap=worst[0],
        margins=margin_bins(margins, differing),
        decided_margin=decided_margin,
        decided=int(decided.sum()),
        decided_differing=int((decided & np.asarray(differing, dtype=bool)).sum()),
        detail=worst[1],
    )


def decided_margin(quality: QuantizationQuality | None) -> float | None:
    """Return the margin, in logits, at which quantization hardly ever tips a choice. None if the
    quality was not measured.

    To second order KL is half the variance of the logits' errors under the model's own
    distribution, so sqrt(2 KL) is their size. kl_p99 stands for the worst of 100 tokens. The size
    counts twice, once for each of the two best tokens.
    """
    return None if quality is None else 2 * math.sqrt(2 * quality.kl_p99)


def explained_without_first_token(
    texts: Sequence[RequestTiming], reference: Reference, near_tie_margin: float
) -> bool:
    """Whether the reference agrees if the prompt's first token is left out, as with a server that
    drops the BOS.
    """
    for text in texts:
        if text.token_ids:
            gaps, _, _ = _scored(reference, text, skipped=1)
            if (gaps > near_tie_margin).any():
                return False
    return bool(texts)


def _scored(
    reference: Reference, text: RequestTiming, skipped: int = 0
) -> tuple[NDArray[np.float64], NDArray[np.int64], NDArray[np.float64]]:
    """Return (gap, rank, margin) of every output token. An EOS that ended the text counts as one if
    the server returned it.
    """
    prompt = tuple(reference.encode(text.prompt))[skipped:]
    ids = (*prompt, *text.token_ids)
    if not text.token_ids or not prompt:
        return np.empty(0), np.empty(0, dtype=np.int64), np.empty(0)
    logits = np.asarray(text_logits(reference, ids, len(prompt)), dtype=np.float64)
    best = np.partition(logits, -2, axis=-1)[:, -2:]
    own = np.take_along_axis(logits, np.asarray(text.token_ids)[:, None], axis=-1)
    ranks = (logits > own).sum(axis=-1)
    return best[:, 1] - own[:, 0], ranks, best[:, 1] - best[:, 0]
