"""Calibration text: files of texts or conversations -> token batches.

All sequences of a batch have the same length, so that there is no padding: the activation
statistics would count a padded position like real text.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from toolkit.checkpoints.tokenizer import load_tokenizer
from toolkit.config.schema import CalibrationConfig
from toolkit.errors import UsageError
from toolkit.pipeline.rows import Row, read_rows
from toolkit.pipeline.texts import TEXT_KEYS, Writer

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from torch import Tensor

__all__ = ["TextCount", "batches_of", "count_texts", "encode", "split_texts"]

MIN_TEXTS = 2
LINES_PER_HELDOUT_LINE = 10  # without a heldout file, the last tenth of the lines is held out
BYTES_PER_TOKEN = 4  # a usual figure for English text; used where there is no tokenizer


@dataclass(frozen=True, slots=True)
class TextCount:
    """How much calibration text there is. tokens: of all texts, each cut to the length that the
    YAML plans; longest_tokens: of the longest one, cut likewise. is_estimate: BYTES_PER_TOKEN
    instead of the tokenizer.
    """

    texts: int
    tokens: int
    longest_tokens: int
    is_estimate: bool


def count_texts(calibration: CalibrationConfig, checkpoint: Path) -> TextCount:
    """Count the text that calibration runs through a model. Raises UsageError as `split_texts`.

    checkpoint: the target's folder. If it has no tokenizer.json, since it is a hub id for instance,
    the tokens are estimated.
    """
    texts, _ = split_texts(calibration, checkpoint)
    limit = calibration.calib_max_seq_length
    is_estimate = not (checkpoint / "tokenizer.json").is_file()
    if is_estimate:
        lengths = [min(limit, -(-len(text.encode()) // BYTES_PER_TOKEN)) for text in texts]
    else:
        lengths = [len(ids) for ids in _encoded(texts, _tokenizer(checkpoint), limit)]
    return TextCount(len(texts), sum(lengths), max(lengths), is_estimate)


def _tokenizer(checkpoint: Path) -> Tokenizer:
    """The tokenizer, which neither pads nor cuts. Raises CheckpointError if it cannot be read."""
    tokenizer = load_tokenizer(checkpoint)
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


def _encoded(texts: list[str], tokenizer: Tokenizer, max_tokens: int) -> Iterator[list[int]]:
    return (tokenizer.encode(text).ids[:max_tokens] for text in texts)


def split_texts(
    calibration: CalibrationConfig, chat: Path | None = None
) -> tuple[list[str], list[str]]:
    """Return (calibration texts, held-out texts). There are at most calib_size calibration texts,
    and none of them is held out.

    chat: the checkpoint whose template writes conversations, with the assistant's answers. That is
    the target, for the draft, too: both read the same ids when they serve. Raises UsageError if the
    dataset has too few lines for both, if the two files share a text, or if a conversation cannot
    be written.
    """
    write = Writer(chat, whole=True).text
    rows = read_rows(calibration.dataset, *TEXT_KEYS)
    if calibration.heldout is not None:
        heldout = read_rows(calibration.heldout, *TEXT_KEYS)
        shared = set(map(_content, heldout)) & set(map(_content, rows))
        if shared:
            raise UsageError(
                f"{len(shared)} of its texts are also in the calibration text,"
                f" {calibration.dataset.name}",
                where=calibration.heldout,
                hint="remove them from one of the two files",
            )
        return [write(row) for row in rows[: calibration.calib_size]], list(map(write, heldout))
    if len(rows) < MIN_TEXTS:
        raise UsageError(
            f"has {len(rows)} line, but needs at least {MIN_TEXTS}: quality is measured on the"
            " last tenth of the lines, which is not used for calibration",
            where=calibration.dataset,
            hint="add lines, or name a `heldout` file",
        )
    first_heldout = len(rows) - max(1, len(rows) // LINES_PER_HELDOUT_LINE)
    used = rows[:first_heldout][: calibration.calib_size]
    return list(map(write, used)), list(map(write, rows[first_heldout:]))


def _content(row: Row) -> str:
    """What a row says, whatever a template makes of it."""
    return json.dumps(row.messages) if row.messages else row.text or ""


def encode(texts: list[str], checkpoint: Path, max_tokens: int, vocab_size: int) -> list[list[int]]:
    """Token ids of each text, cut to max_tokens. The tokenizer adds BOS if it adds one to prompts.
    Texts shorter than 2 tokens are left out.

    Raises UsageError if the tokenizer makes an id that the model has no row for, or if no text is
    left.
    """
    sequences = []
    for ids in _encoded(texts, _tokenizer(checkpoint), max_tokens):
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
