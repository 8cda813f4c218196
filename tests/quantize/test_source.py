"""Damage in a source checkpoint is found before anything is loaded."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from tests.support.checkpoints import write_checkpoint
from toolkit.errors import CheckpointError
from toolkit.quantize.source import check_weights, open_source

NAME = "model.layers.1.mlp.up_proj.weight"


def silent(done: int, total: int | None, what: str) -> None:
    pass


def change(source: Path, value: float) -> None:
    tensors = load_file(source / "model.safetensors")
    tensors[NAME][2, 5] = value
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_weight_that_is_no_number_is_refused_by_name(value: float, tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path)
    check_weights(open_source(source), silent)
    change(source, value)
    with pytest.raises(CheckpointError, match=rf"{NAME} holds 1 values that are NaN or infinite"):
        check_weights(open_source(source), silent)


def test_a_flipped_exponent_bit_is_found_by_its_value(tmp_path: Path) -> None:
    import torch

    source = write_checkpoint(tmp_path)
    tensors = load_file(source / "model.safetensors")
    bits = tensors[NAME].view(dtype=torch.int16)
    bits[0, 0] ^= 1 << 14  # the highest exponent bit of a BF16 below 2
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match="a bit of the file has flipped"):
        check_weights(open_source(source), silent)


@pytest.mark.parametrize("form", ["sums", "hub"])
def test_any_flipped_bit_is_found_by_a_recorded_digest(form: str, tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path)
    file = source / "model.safetensors"
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    if form == "sums":
        (source / "SHA256SUMS").write_text(f"{digest}  model.safetensors\n")
    else:
        folder = source / ".cache/huggingface/download"
        folder.mkdir(parents=True)
        (folder / "model.safetensors.metadata").write_text(f"{'0' * 40}\n{digest}\n1.0\n")
    check_weights(open_source(source), silent)
    data = bytearray(file.read_bytes())
    data[-1] ^= 1  # in the last value: it still looks like a weight
    file.write_bytes(bytes(data))
    with pytest.raises(CheckpointError, match="was recorded"):
        check_weights(open_source(source), silent)


def test_codes_without_a_word_in_the_config_are_refused(tmp_path: Path) -> None:
    import torch

    source = write_checkpoint(tmp_path)
    tensors = load_file(source / "model.safetensors")
    tensors[NAME] = tensors[NAME].to(torch.int8)
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=rf"{NAME} is I8, but nothing in config.json says"):
        open_source(source)
