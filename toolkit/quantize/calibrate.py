"""Calibration text: JSON Lines -> token batches.

All sequences of a batch have the same length, so that there is no padding: the activation
statistics would count a padded position like real text.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from toolkit.checkpoints.tokenizer import load_tokenizer
from toolkit.config.schema import CalibrationConfig
from toolkit.errors import UsageError
from toolkit.pipeline.texts import read_texts

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["batches_of", "encode", "split_texts"]

TEXT_KEYS = ("text", "prompt")
MIN_TEXTS = 2
LINES_PER_HELDOUT_LINE = 10  # without a heldout file, the last tenth of the lines is held out


def split_texts(calibration: CalibrationConfig) -> tuple[list[str], list[str]]:
    """Return (calibration texts, held-out texts). There are at most calib_size calibration texts,
    and none of them is held out.

    Raises UsageError if the dataset has too few lines for both, or if the two files share a text.
    """
    texts = read_texts(calibration.dataset, *TEXT_KEYS)
    if calibration.heldout is not None:
        heldout = read_texts(calibration.heldout, *TEXT_KEYS)
        shared = set(heldout) & set(texts)
        if shared:
            raise UsageError(
                f"{len(shared)} of its texts are also in the calibration text,"
                f" {calibration.dataset.name}",
                where=calibration.heldout,
                hint="remove them from one of the two files",
            )
        return texts[: calibration.calib_size], heldout
    if len(texts) < MIN_TEXTS:
        raise UsageError(
            f"has {len(texts)} line, but needs at least {MIN_TEXTS}: quality is measured on the"
            " last tenth of the lines, which is not used for calibration",
            where=calibration.dataset,
            hint="add lines, or name a `heldout` file",
        )
    first_heldout = len(texts) - max(1, len(texts) // LINES_PER_HELDOUT_LINE)
    return texts[:first_heldout][: calibration.calib_size], texts[first_heldout:]


def encode(texts: list[str], checkpoint: Path, max_tokens: int, vocab_size: int) -> list[list[int]]:
    """Token ids of each text, cut to max_tokens. The tokenizer adds BOS if it adds one to prompts.
    Texts shorter than 2 tokens are left out.

    Raises UsageError if the tokenizer makes an id that the model has no row for, or if no text is
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
                f"the tokenizer makes token id {max(ids)}, but the model has {vocab_size} rows",
                where=checkpoint,
                hint="use a tokenizer and weights of the same model",
            )
        if len(ids) >= 2:
            sequences.append(ids)
    if not sequences:
        raise UsageError(
            f"none of the {len(texts)} calibration texts is 2 tokens or longer",
            where=checkpoint,
            hint="use longer texts",
        )
    return sequences


def batches_of(sequences: list[list[int]], batch_size: int) -> list[Tensor]:
    """Group sequences of equal length into int64 tensors [n, length], n <= batch_size. The longest
    come first, so that memory peaks early.
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
