"""Calibration text: JSON Lines -> token batches -> the forward loop that ModelOpt calibrates with.

Batches hold sequences of one length and no padding: a padded position would enter the activation
statistics like real text.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit.checkpoints.tokenizer import load_tokenizer
from toolkit.config.schema import CalibrationConfig
from toolkit.errors import UsageError
from toolkit.interfaces import Progress
from toolkit.pipeline.texts import read_texts

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["batches_of", "encode", "forward_loop", "split_texts"]

KEYS = ("text", "prompt")
MIN_TEXTS = 2
HELDOUT_SHARE = 10  # without a heldout file, one line in ten (the last ones) is kept apart


def split_texts(calibration: CalibrationConfig) -> tuple[list[str], list[str]]:
    """(calibration texts, held-out texts), at most calib_size of the first. No held-out line is
    calibrated on.

    Raises UsageError where there are too few lines for both.
    """
    texts = read_texts(calibration.dataset, *KEYS)
    if calibration.heldout is not None:
        heldout = read_texts(calibration.heldout, *KEYS)
        shared = set(heldout) & set(texts)
        if shared:
            raise UsageError(
                f"{len(shared)} of its texts also stand in {calibration.dataset.name}, which is"
                " calibrated on",
                where=calibration.heldout,
                hint="remove them from one of the two files",
            )
        return texts[: calibration.calib_size], heldout
    if len(texts) < MIN_TEXTS:
        raise UsageError(
            f"has {len(texts)} line, at least {MIN_TEXTS} are needed: the last tenth is held out to"
            " measure quality on",
            where=calibration.dataset,
            hint="add lines, or name a `heldout` file",
        )
    held = max(1, len(texts) // HELDOUT_SHARE)
    return texts[: len(texts) - held][: calibration.calib_size], texts[len(texts) - held :]


def encode(texts: list[str], checkpoint: Path, max_tokens: int, vocab_size: int) -> list[list[int]]:
    """Token ids as the model sees a prompt (with its BOS habit), cut to max_tokens. Texts shorter
    than 2 tokens are left out.

    Raises UsageError when the tokenizer makes an id that the model has no row for, or nothing is
    left.
    """
    tokenizer = load_tokenizer(checkpoint)
    tokenizer.no_padding()
    tokenizer.no_truncation()
    sequences = []
    for text in texts:
        ids = tokenizer.encode(text).ids[:max_tokens]
        if ids and max(ids) >= vocab_size:
            raise UsageError(
                f"the tokenizer makes id {max(ids)}, the model has {vocab_size} rows",
                where=checkpoint,
                hint="tokenizer and weights must come from the same model",
            )
        if len(ids) >= 2:
            sequences.append(ids)
    if not sequences:
        raise UsageError(
            f"no calibration text is 2 tokens or longer ({len(texts)} texts)",
            where=checkpoint,
            hint="give longer texts",
        )
    return sequences


def batches_of(sequences: list[list[int]], batch_size: int) -> list[Tensor]:
    """[n, length] int64 tensors with n <= batch_size, each of one length; longest first, so that
    memory peaks early.
    """
    import torch

    by_length: dict[int, list[list[int]]] = {}
    for ids in sequences:
        by_length.setdefault(len(ids), []).append(ids)
    return [
        torch.tensor(group[start : start + batch_size])
        for _, group in sorted(by_length.items(), reverse=True)
        for start in range(0, len(group), batch_size)
    ]


def forward_loop(batches: list[Tensor], progress: Progress) -> Callable[[Any], None]:
    """What ModelOpt calls to run the calibration text through the model. Nothing observes the
    logits: they are not computed.
    """
    import torch

    def loop(model: Any) -> None:
        with torch.no_grad():
            for done, batch in enumerate(batches, start=1):
                model.model(input_ids=batch, use_cache=False)
                progress(done, len(batches), "calibrating, batches")

    return loop
