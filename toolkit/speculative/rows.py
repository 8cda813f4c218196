"""One forward for sequences that bring different numbers of tokens.

An engine that packs its rows computes no more than these tokens. Any other gets rows of one width,
padded with a valid token, and is cut back to each row's own tokens.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from toolkit.interfaces import PackingEngine, StepEngine
from toolkit.speculative.sampling import token_rows

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["ForwardRows", "rows_forward"]

ForwardRows = Callable[[Sequence[int], Sequence[Sequence[int]], Sequence[int]], "Tensor"]
"""PackingEngine.forward_rows, of one engine."""


def rows_forward(engine: StepEngine) -> ForwardRows:
    """The forward of rows of any lengths for this engine. Ask once, since it takes some time."""
    if isinstance(engine, PackingEngine):
        return engine.forward_rows
    return functools.partial(_padded_forward, engine)


def _padded_forward(
    engine: StepEngine,
    slots: Sequence[int],
    rows: Sequence[Sequence[int]],
    wanted: Sequence[int],
) -> Tensor:
    width = max(map(len, rows))
    before = [engine.length(slot) for slot in slots]
    padded = token_rows([[*row, *[0] * (width - len(row))] for row in rows])
    short = [i for i, row in enumerate(rows) if len(row) < width]
    last_only = not short and max(wanted) <= 1
    logits = engine.forward(slots, padded, last_only=last_only)  # [rows, width or 1, vocab]
    if short:
        engine.rewind([slots[i] for i in short], [before[i] + len(rows[i]) for i in short])
    if all(count == logits.shape[1] for count in wanted):
        return logits.flatten(0, 1)
    ends = [1 if last_only else len(row) for row in rows]
    parts = [logits[i, end - wanted[i] : end] for i, end in enumerate(ends)]
    return torch.cat(parts)
