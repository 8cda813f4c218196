"""The safetensors library reads the shards that are written one tensor at a time."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolkit.checkpoints.reader import read_index, read_tensors
from toolkit.checkpoints.writer import (
    TORCH_DTYPES,
    TensorPlan,
    plan_of,
    write_checkpoint_shards,
    write_shard,
)


def plans_of(tensors: dict[str, object]) -> list[TensorPlan]:
    names = {value: name for name, value in TORCH_DTYPES.items()}
    return [
        TensorPlan(
            name,
            names[str(tensor.dtype).removeprefix("torch.")],
            tuple(tensor.shape),
            lambda tensor=tensor: tensor,
        )  # type: ignore[attr-defined, misc]
        for name, tensor in tensors.items()
    ]


@given(
    shapes=st.dictionaries(
        st.text(
            st.characters(codec="utf-8", exclude_categories=["Cs"]), min_size=1, max_size=8
        ).filter(lambda name: name != "__metadata__"),
        st.tuples(st.sampled_from(sorted(TORCH_DTYPES)), st.lists(st.integers(1, 4), max_size=3)),
        min_size=1,
        max_size=6,
    )
)
def test_the_library_reads_what_was_written(
    shapes: dict[str, tuple[str, list[int]]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    import torch
    from safetensors.torch import load_file

    folder = tmp_path_factory.mktemp("shard")
    tensors = {
        name: (torch.arange(torch.tensor(shape).prod().item()) + index)
        .reshape(shape)
        .to(getattr(torch, TORCH_DTYPES[dtype]))
        for index, (name, (dtype, shape)) in enumerate(shapes.items())
    }
    write_shard(folder / "ours.safetensors", plans_of(tensors))
    read = load_file(folder / "ours.safetensors")
    assert read.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert (read[name].dtype, read[name].shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(read[name].float(), tensor.float())


def test_shards_split_where_the_limit_is_and_are_indexed(tmp_path: Path) -> None:
    import torch

    tensors = {f"t{i}": torch.full((10,), float(i)) for i in range(5)}  # 40 bytes each
    write_checkpoint_shards(tmp_path, plans_of(tensors), max_shard_bytes=90)
    assert sorted(file.name for file in tmp_path.glob("*.safetensors")) == [
        f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)
    ]
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 200
    assert index["weight_map"]["t4"] == "model-00003-of-00003.safetensors"
    assert {name: float(tensor[0]) for name, tensor in read_tensors(tmp_path)} == {
        f"t{i}": float(i) for i in range(5)
    }


def test_a_tensor_larger_than_the_limit_has_a_shard_of_its_own(tmp_path: Path) -> None:
    import torch

    write_checkpoint_shards(
        tmp_path, plans_of({"a": torch.ones(2), "b": torch.ones(100)}), max_shard_bytes=16
    )
    assert len(list(tmp_path.glob("*.safetensors"))) == 2


def test_each_tensor_is_made_when_its_turn_comes(tmp_path: Path) -> None:
    import torch

    made: list[str] = []

    def make(name: str) -> object:
        made.append(name)
        return torch.zeros(4)

    plans = [TensorPlan(name, "F32", (4,), lambda name=name: make(name)) for name in ("b", "a")]  # type: ignore[misc]
    assert made == []
    write_shard(tmp_path / "x.safetensors", plans)
    assert made == ["a", "b"]


def test_a_tensor_that_is_not_what_was_promised_is_refused(tmp_path: Path) -> None:
    import torch

    with pytest.raises(
        ValueError, match=r"t was made as torch.float32 \[3\], but was planned as BF16"
    ):
        write_shard(
            tmp_path / "x.safetensors", [TensorPlan("t", "BF16", (3,), lambda: torch.zeros(3))]
        )


def test_the_first_rows_of_another_checkpoint(tmp_path: Path) -> None:
    import torch

    write_shard(tmp_path / "model.safetensors", plans_of({"t": torch.arange(12.0).reshape(4, 3)}))
    info = read_index(tmp_path)["t"]
    for rows in (2, None):
        folder = tmp_path / f"first {rows}"
        folder.mkdir()
        write_shard(folder / "model.safetensors", [plan_of(info, rows)])
        [(_, tensor)] = read_tensors(folder)
        assert tensor.flatten().tolist() == [float(value) for value in range(3 * (rows or 4))]
