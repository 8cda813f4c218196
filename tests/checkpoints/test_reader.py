"""Shards: whole, split, damaged, and of other tools. Every fault is found from headers and sizes,
before a weight is read.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from tests.support.checkpoints import write_checkpoint
from toolkit.checkpoints.reader import check_against_shape, read_index, read_tensor, read_tensors
from toolkit.checkpoints.shape import read_shape
from toolkit.errors import CheckpointError

INDEX = "model.safetensors.index.json"


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "whole")


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "sharded", max_shard_size="60KB")


def damage(file: Path, at: int, value: bytes) -> None:
    data = bytearray(file.read_bytes())
    data[at : at + len(value)] = value
    file.write_bytes(bytes(data))


def fails(folder: Path, message: str) -> str:
    with pytest.raises(CheckpointError, match=message) as caught:
        check_against_shape(read_index(folder), read_shape(folder), folder)
    return str(caught.value)


def test_shards_hold_what_one_file_holds(whole: Path, sharded: Path) -> None:
    import torch

    assert len(list(sharded.glob("*.safetensors"))) > 1
    from_one, from_many = dict(read_tensors(whole)), dict(read_tensors(sharded))
    assert from_one.keys() == from_many.keys() == read_index(sharded).keys()
    assert all(torch.equal(from_one[name], from_many[name]) for name in from_one)
    for folder in (whole, sharded):
        check_against_shape(read_index(folder), read_shape(folder), folder)


@pytest.mark.parametrize(
    ("dtype", "code", "size"),
    [("float32", "F32", 4), ("float16", "F16", 2), ("bfloat16", "BF16", 2)],
)
def test_dtypes_are_told(dtype: str, code: str, size: int, tmp_path: Path) -> None:
    index = read_index(write_checkpoint(tmp_path, dtype=dtype))
    info = index["model.norm.weight"]
    assert (info.dtype, info.shape, info.num_bytes) == (code, (64,), 64 * size)
    assert str(read_tensor(info).dtype) == f"torch.{dtype}"


def test_tied_embeddings_need_no_head(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, tie_word_embeddings=True)
    index = read_index(folder)
    assert "lm_head.weight" not in index
    check_against_shape(index, read_shape(folder), folder)


def test_a_truncated_shard_is_found_by_its_size(whole: Path) -> None:
    file = whole / "model.safetensors"
    size = file.stat().st_size
    file.write_bytes(file.read_bytes()[: size - 100])
    assert f"is {size - 100} bytes long, but its header asks for {size}" in fails(
        whole, "fetch this shard again"
    )


@pytest.mark.parametrize("size", [0, 4, 8, 50])
def test_a_shard_cut_inside_its_header_is_found(size: int, whole: Path) -> None:
    file = whole / "model.safetensors"
    file.write_bytes(file.read_bytes()[:size])
    assert str(file) in fails(whole, "header is damaged or the file is truncated")


def test_bytes_after_the_end_are_found(whole: Path) -> None:
    with (whole / "model.safetensors").open("ab") as stream:
        stream.write(b"tail")
    fails(whole, "bytes long, but its header asks for")


@pytest.mark.parametrize(
    ("at", "value"),
    [(0, b"\xff"), (7, b"\x01"), (8, b"["), (9, b"\xff"), (12, b"\x00")],
    ids=["length", "length too large", "no object", "no UTF-8", "control byte"],
)
def test_a_flipped_byte_in_the_header_is_found(at: int, value: bytes, whole: Path) -> None:
    damage(whole / "model.safetensors", at, value)
    with pytest.raises(CheckpointError) as caught:
        read_index(whole)
    assert str(whole / "model.safetensors") in str(caught.value)


def test_every_flipped_bit_of_the_header_is_found_or_harmless(whole: Path) -> None:
    """A flip may hit the metadata or the spelling of a name. Then either nothing has changed, or
    the tensors disagree with config.json.
    """
    file = whole / "model.safetensors"
    original = file.read_bytes()
    (length,) = struct.unpack("<Q", original[:8])
    expected = {name: (info.dtype, info.shape) for name, info in read_index(whole).items()}
    for position in range(0, 8 + length, 7):
        damage(file, position, bytes([original[position] ^ (1 << position % 8)]))
        try:
            index = read_index(whole)
            check_against_shape(index, read_shape(whole), whole)
        except CheckpointError:
            continue
        finally:
            file.write_bytes(original)
        assert {name: (info.dtype, info.shape) for name, info in index.items()} == expected, (
            f"byte {position}"
        )


def test_a_header_that_is_json_of_another_kind_is_found(whole: Path) -> None:
    for header in (
        b"[1, 2]",
        b'{"a": 3}',
        b'{"a": {"dtype": "F32"}}',
        b'{"a": {"dtype": 1, "shape": "x", "data_offsets": [0]}}',
    ):
        (whole / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
        with pytest.raises(CheckpointError, match="header is damaged"):
            read_index(whole)


def test_a_second_copy_beside_the_checkpoint_is_not_read(whole: Path, sharded: Path) -> None:
    """Mistral ships consolidated.safetensors beside the shards, with names of its own."""
    for folder in (whole, sharded):
        before = read_index(folder)
        save_file(load_file(whole / "model.safetensors"), folder / "consolidated.safetensors")
        assert read_index(folder) == before


def test_model_safetensors_wins_over_an_index_as_in_transformers(
    whole: Path, sharded: Path
) -> None:
    (whole / INDEX).write_bytes((sharded / INDEX).read_bytes())
    assert {info.file.name for info in read_index(whole).values()} == {"model.safetensors"}


def test_shards_without_their_index_are_refused(whole: Path, sharded: Path) -> None:
    (sharded / INDEX).unlink()
    fails(
        sharded,
        r"no model\.safetensors\.index\.json that says which of them belong together\n  fetch the"
        r" index too",
    )
    (whole / "model.safetensors").rename(whole / "weights.safetensors")
    fails(whole, r"holds no model\.safetensors\n  is it weights\.safetensors\? Then rename it")


def test_pickles_are_refused_with_the_way_out(whole: Path) -> None:
    (whole / "model.safetensors").rename(whole / "pytorch_model.bin")
    assert "save_pretrained" in fails(whole, r"holds pickles \(pytorch_model\.bin\)")


def test_a_folder_without_weights_is_refused(whole: Path) -> None:
    (whole / "model.safetensors").unlink()
    fails(whole, r"holds no \*\.safetensors file")


def test_a_folder_that_is_not_there_is_refused(tmp_path: Path) -> None:
    fails(tmp_path / "nowhere", "no such folder")


def test_a_missing_shard_is_named(sharded: Path) -> None:
    victim = sorted(sharded.glob("*.safetensors"))[1]
    victim.unlink()
    assert str(victim) in fails(sharded, "shard is missing")


@pytest.mark.parametrize(
    "name", ["../whole/model.safetensors", "/etc/passwd", "sub/model.safetensors", ".."]
)
def test_an_index_that_points_outside_is_refused(name: str, sharded: Path) -> None:
    index = json.loads((sharded / INDEX).read_text())
    index["weight_map"]["model.norm.weight"] = name
    (sharded / INDEX).write_text(json.dumps(index))
    assert str(sharded / INDEX) in fails(sharded, "points outside the checkpoint's folder")


def test_an_index_that_names_a_tensor_in_no_shard_is_refused(sharded: Path) -> None:
    index = json.loads((sharded / INDEX).read_text())
    index["weight_map"]["model.extra.weight"] = index["weight_map"]["model.norm.weight"]
    (sharded / INDEX).write_text(json.dumps(index))
    fails(sharded, r"model\.extra\.weight is listed, but is in no shard")


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"weight_map": []}'])
def test_a_damaged_index_is_refused(content: str, sharded: Path) -> None:
    (sharded / INDEX).write_text(content)
    assert str(sharded / INDEX) in fails(sharded, "valid JSON|JSON object|weight_map")


def test_a_tensor_in_two_shards_is_refused(sharded: Path) -> None:
    first, second = sorted(sharded.glob("*.safetensors"))[:2]
    tensors = load_file(second)
    name, tensor = next(iter(load_file(first).items()))
    save_file({**tensors, name: tensor}, second)
    fails(sharded, f"{name} is in two shards")


def test_weights_of_another_model_are_refused(whole: Path) -> None:
    config = json.loads((whole / "config.json").read_text())
    (whole / "config.json").write_text(json.dumps({**config, "intermediate_size": 96}))
    fails(whole, r"gate_proj\.weight has shape \[128, 64\], but config\.json implies \[96, 64\]")
    (whole / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3}))
    fails(whole, r"model\.layers\.2\..*is missing from the weights")
    (whole / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 1}))
    fails(whole, r"model\.layers\.1\..*belongs to a layer beyond the 1 layers of config\.json")
