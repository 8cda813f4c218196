"""A head goes into the store as it is, and a damaged one does not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.eagle3 import write_head
from toolkit.errors import CheckpointError
from toolkit.quantize.heads import copy_head


def progress(done: int, total: int | None, label: str) -> None:
    """Shows nothing."""


def test_a_head_is_copied_bit_for_bit(tmp_path: Path) -> None:
    source, copy = write_head(tmp_path / "head"), tmp_path / "copy"
    (source / "README.md").write_text("not part of the head")
    checkpoint = copy_head(source, copy, progress)
    assert {file.name for file in copy.iterdir()} == {"config.json", "model.safetensors"}
    for file in copy.iterdir():
        assert file.read_bytes() == (source / file.name).read_bytes()
        assert file.stat().st_ino != (source / file.name).stat().st_ino
    tensors = load_file(source / "model.safetensors")
    assert checkpoint.weight_bytes == sum(tensor.nbytes for tensor in tensors.values())
    assert (checkpoint.role, checkpoint.quant_algo, checkpoint.quality) == ("draft", None, None)


def test_a_head_with_a_value_that_is_no_number_is_refused(tmp_path: Path) -> None:
    head = write_head(tmp_path / "head")
    tensors = load_file(head / "model.safetensors")
    tensors["fc.weight"][3, 5] = torch.nan
    save_file(tensors, head / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"fc\.weight holds 1 values that are NaN"):
        copy_head(head, tmp_path / "copy", progress)
    assert not (tmp_path / "copy").exists()
