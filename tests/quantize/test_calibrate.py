"""Calibration files: good ones, and each way of being bad."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.checkpoints import write_byte_tokenizer
from toolkit.config.schema import CalibrationConfig
from toolkit.errors import UsageError
from toolkit.quantize.calibrate import batches_of, encode, split_texts


def write(path: Path, *lines: object) -> Path:
    path.write_text(
        "".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines),
        encoding="utf-8",
    )
    return path


def test_the_last_tenth_is_held_out(tmp_path: Path) -> None:
    file = write(tmp_path / "a.jsonl", *({"text": f"t{i}"} for i in range(30)))
    texts, heldout = split_texts(CalibrationConfig(dataset=file, calib_size=20))
    assert (texts, heldout) == ([f"t{i}" for i in range(20)], ["t27", "t28", "t29"])


def test_too_few_lines_are_refused(tmp_path: Path) -> None:
    file = write(tmp_path / "a.jsonl", {"text": "only"})
    with pytest.raises(UsageError, match="has 1 line, but needs at least 2"):
        split_texts(CalibrationConfig(dataset=file))
    heldout = write(tmp_path / "b.jsonl", {"text": "other"})
    assert split_texts(CalibrationConfig(dataset=file, heldout=heldout)) == (["only"], ["other"])


def test_heldout_text_that_is_calibrated_on_is_refused(tmp_path: Path) -> None:
    file = write(tmp_path / "a.jsonl", {"text": "one"}, {"text": "two"})
    heldout = write(tmp_path / "b.jsonl", {"text": "two"}, {"text": "three"})
    with pytest.raises(
        UsageError, match=r"1 of its texts are also in the calibration text, a\.jsonl"
    ):
        split_texts(CalibrationConfig(dataset=file, heldout=heldout))


def test_tokens_begin_with_bos_and_are_cut(tmp_path: Path) -> None:
    write_byte_tokenizer(tmp_path)
    long, short = encode(["abcdef", "x"], tmp_path, 4, 258)
    assert (len(long), len(short)) == (4, 2)
    assert long[0] == short[0] == 256
    with pytest.raises(UsageError, match="makes token id 256, but the model has 200 rows"):
        encode(["a"], tmp_path, 4, 200)


def test_text_without_tokens_is_refused(tmp_path: Path) -> None:
    write_byte_tokenizer(tmp_path, bos=False)
    with pytest.raises(UsageError, match="none of the 1 calibration texts is 2 tokens or longer"):
        encode(["a"], tmp_path, 8, 258)


def test_batches_hold_one_length_each_and_everything_once() -> None:
    sequences = [[1, 2], [3, 4, 5], [6, 7], [8, 9], [10, 11, 12]]
    batches = [batch.tolist() for batch in batches_of(sequences, 2)]
    assert batches == [[[3, 4, 5], [10, 11, 12]], [[1, 2], [6, 7]], [[8, 9]]]
