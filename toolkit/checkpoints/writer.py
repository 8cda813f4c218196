"""Write tensors into shards, with one tensor in memory at a time.

The safetensors library needs all tensors of a file in memory at once. Here the header is written
first, from names, dtypes and shapes only. Then each tensor is made when its turn comes, written,
and dropped. Source: safetensors README, "Format".
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from toolkit.checkpoints.reader import DTYPE_BYTES, TensorInfo, read_tensor

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["MAX_SHARD_BYTES", "TensorPlan", "plan_of", "write_checkpoint_shards", "write_shard"]

MAX_SHARD_BYTES = 10_000_000_000
ALIGNMENT_BYTES = 8  # of the first byte of data
TORCH_DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "I8": "int8",
}


@dataclass(frozen=True, slots=True)
class TensorPlan:
    """One tensor to be written. dtype: as safetensors spells it. make: called once, when the
    tensor is written.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    make: Callable[[], Tensor]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


def plan_of(info: TensorInfo, rows: int | None = None) -> TensorPlan:
    """The plan to copy a tensor of another checkpoint, or only its first `rows` rows."""
    if rows is None:
        return TensorPlan(info.name, info.dtype, info.shape, lambda: read_tensor(info))
    return TensorPlan(
        info.name, info.dtype, (rows, *info.shape[1:]), lambda: read_tensor(info)[:rows]
    )


def write_shard(file: Path, plans: Iterable[TensorPlan]) -> None:
    """Write one safetensors file. Wider dtypes come first, so that every tensor is aligned to its
    own width.

    Raises ValueError if `make` returns another dtype or shape than the plan says.
    """
    ordered = sorted(plans, key=lambda plan: (-DTYPE_BYTES[plan.dtype], plan.name))
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for plan in ordered:
        header[plan.name] = {
            "dtype": plan.dtype,
            "shape": list(plan.shape),
            "data_offsets": [offset, offset + plan.num_bytes],
        }
        offset += plan.num_bytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGNMENT_BYTES)
    with file.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little"))
        stream.write(text)
        for plan in ordered:
            _write_tensor(stream, plan)


def write_checkpoint_shards(
    directory: Path,
    plans: Sequence[TensorPlan],
    *,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    done: Callable[[], None] | None = None,
) -> None:
    """Write `model.safetensors`; or, if it would be larger than max_shard_bytes, numbered shards
    with their index.

    The shards take the tensors in the order given. done: called after each shard.
    """
    shards: list[list[TensorPlan]] = [[]]
    size = 0
    for plan in plans:
        if shards[-1] and size + plan.num_bytes > max_shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(plan)
        size += plan.num_bytes
    weight_map = {}
    for number, shard in enumerate(shards, start=1):
        name = (
            "model.safetensors"
            if len(shards) == 1
            else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        )
        write_shard(directory / name, shard)
        weight_map.update(dict.fromkeys((plan.name for plan in shard), name))
        if done is not None:
            done()
    if len(shards) > 1:
        index = {
            "metadata": {"total_size": sum(plan.num_bytes for plan in plans)},
            "weight_map": weight_map,
        }
        (directory / "model.safetensors.index.json").write_text(
            json.dumps(index, indent=2, sort_keys=True) + "\n"
        )


def _write_tensor(stream: BinaryIO, plan: TensorPlan) -> None:
    import torch

    tensor = plan.make()
    if tuple(tensor.shape) != plan.shape or tensor.dtype != getattr(
        torch, TORCH_DTYPES[plan.dtype]
    ):
        raise ValueError(
            f"{plan.name} was made as {tensor.dtype} {list(tensor.shape)}, but was planned as"
            f" {plan.dtype} {list(plan.shape)}"
        )
    stream.write(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
