"""The target model outside the server, which judges texts.

There are two references. The compiled engine, loaded a second time, has the server's weights, so it
judges the serving path and speculation. The unquantized checkpoint runs in float32 through
transformers, with other code and other weights, so it judges quantization and everything before it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from toolkit.interfaces import StepEngine

__all__ = ["Reference", "reference_from_checkpoint", "reference_from_engine", "text_logits"]

SLOT = 0

TextLogits = Callable[[Sequence[int], int], NDArray[Any]]


@dataclass(frozen=True, slots=True)
class Reference:
    """The target model outside the server.

    encode: prompt text -> prompt ids, as the server encodes it (with or without BOS). next_logits:
    all token ids so far -> logits [vocab] of the next one, float. eos_token_ids: the tokens that
    end a text. noise: (seed, position, vocab) -> the Gumbel noise [vocab] that `coupled` adds to
    logits / temperature for the token at `position`, counted over prompt and output together (the
    first output token has position len(prompt ids)). None: a divergence of seeded requests is
    reported as unexplained. text_logits: (ids, first) -> the logits [len(ids) - first, vocab] from
    which ids[first:] were chosen, in one pass. None: next_logits computes them one by one. draft:
    the same for the draft model; None: there is no draft to ask.
    """

    encode: Callable[[str], Sequence[int]]
    next_logits: Callable[[Sequence[int]], NDArray[Any]]
    eos_token_ids: tuple[int, ...]
    noise: Callable[[int, int, int], NDArray[Any]] | None = None
    text_logits: TextLogits | None = None
    draft: TextLogits | None = None


def text_logits(reference: Reference, ids: Sequence[int], first: int) -> NDArray[Any]:
    """Return the logits [len(ids) - first, vocab] from which ids[first:] were chosen, each given
    all tokens before it. first >= 1.
    """
    if reference.text_logits is not None:
        return reference.text_logits(ids, first)
    return np.stack(
        [np.asarray(reference.next_logits(ids[:end])) for end in range(first, len(ids))]
    )


def reference_from_engine(
    load: Callable[[], StepEngine],
    encode: Callable[[str], Sequence[int]],
    eos_token_ids: Sequence[int],
    noise: Callable[[int, int, int], NDArray[Any]] | None = None,
    load_draft: Callable[[], StepEngine] | None = None,
) -> Reference:
    """Make a reference that loads its engines when they are first used.

    Nothing else may use the engine: each call runs a whole prefix through its first slot, as plain
    prefill does.
    """
    engine = cache(load)
    return Reference(
        encode,
        lambda ids: _pass(engine(), ids, None)[0],
        tuple(eos_token_ids),
        noise,
        lambda ids, first: _pass(engine(), ids[:-1], first - 1),
        None if load_draft is None else _teacher_forced(cache(load_draft)),
    )


def _teacher_forced(engine: Callable[[], StepEngine]) -> TextLogits:
    return lambda ids, first: _pass(engine(), ids[:-1], first - 1)


def _pass(model: StepEngine, ids: Sequence[int], first: int | None) -> NDArray[Any]:
    """Run one prefill of `ids` and return the logits after each of ids[first:]. If first is None,
    return only those after the last id.
    """
    import torch

    model.rewind([SLOT], [0])
    rows: list[NDArray[Any]] = []
    for start in range(0, len(ids), model.max_step_tokens):
        block = torch.tensor([list(ids[start : start + model.max_step_tokens])], dtype=torch.int64)
        logits = model.forward([SLOT], block, last_only=first is None)[0].double().cpu().numpy()
        rows = [logits.copy()] if first is None else [*rows, logits[max(0, first - start) :].copy()]
    model.rewind([SLOT], [0])
    return np.concatenate(rows) if rows else np.empty((0, model.vocab_size))


def reference_from_checkpoint(
    checkpoint: Path, encode: Callable[[str], Sequence[int]], eos_token_ids: Sequence[int]
) -> Reference:
    """Make a reference of the unquantized checkpoint, in float32 through transformers, on the CPU.
    It is loaded when it is first used.
    """

    @cache
    def model() -> Any:
        import torch
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        logging.disable_progress_bar()  # the bar for loading; we show our own progress
        return AutoModelForCausalLM.from_pretrained(
            checkpoint, dtype=torch.float32, local_files_only=True
        ).eval()

    def rows(ids: Sequence[int], first: int) -> NDArray[Any]:
        import torch

        with torch.inference_mode():
            logits = model()(torch.tensor([list(ids)], dtype=torch.int64), use_cache=False).logits[
                0, first - 1 :
            ]
        array: NDArray[Any] = logits.double().numpy()
        return array

    return Reference(
        encode,
        lambda ids: rows(ids, len(ids))[0],
        tuple(eos_token_ids),
        text_logits=lambda ids, first: rows(ids[:-1], first),
    )
