"""Damage in a source checkpoint is found before anything is loaded."""

from __future__ import annotations

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


def test_codes_without_a_word_in_the_config_are_refused(tmp_path: Path) -> None:
    import torch

    source = write_checkpoint(tmp_path)
    tensors = load_file(source / "model.safetensors")
    tensors[NAME] = tensors[NAME].to(torch.int8)
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=rf"{NAME} is I8, but nothing in config.json says"):
        open_source(source)


def test_tied_embeddings_with_a_head_of_their_own_are_refused(tmp_path: Path) -> None:
    """transformers would use the head, and a runtime that follows config.json would use the
    embedding: two different models.
    """
    source = write_checkpoint(tmp_path, tie_word_embeddings=True)
    tensors = load_file(source / "model.safetensors")
    head = tensors["model.embed_tokens.weight"].clone()
    save_file(
        {**tensors, "lm_head.weight": head}, source / "model.safetensors", metadata={"format": "pt"}
    )
    check_weights(open_source(source), silent)
    head[3, 4] += 1
    save_file(
        {**tensors, "lm_head.weight": head}, source / "model.safetensors", metadata={"format": "pt"}
    )
    with pytest.raises(
        CheckpointError,
        match=r"config\.json ties the embeddings, but lm_head\.weight and .* differ",
    ):
        check_weights(open_source(source), silent)
