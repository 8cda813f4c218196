"""Read tensors from the shards of a checkpoint. Headers are checked against file sizes and the
config before any weight is read.

Only safetensors files are read, since a pickle can run code. A `.bin` or `.pt` checkpoint is
refused, and the hint says how to convert it.
"""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit.checkpoints.shape import UNREADABLE, ModelShape, read_json
from toolkit.errors import CheckpointError

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "TensorInfo",
    "check_against_shape",
    "check_files",
    "read_file",
    "read_header",
    "read_index",
    "read_tensor",
    "read_tensors",
]

MAX_HEADER_BYTES = 100_000_000  # the safetensors library's own limit
LAYER = re.compile(r"model\.layers\.(?P<index>\d+)\.")
DTYPE_BYTES = {
    "F64": 8,
    "F32": 4,
    "F16": 2,
    "BF16": 2,
    "I64": 8,
    "I32": 4,
    "I16": 2,
    "I8": 1,
    "U8": 1,
    "BOOL": 1,
    "F8_E4M3": 1,
}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where one tensor is stored. dtype: as safetensors spells it (F32, BF16, I8, F8_E4M3, ...)."""

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    num_bytes: int


def read_index(directory: Path) -> dict[str, TensorInfo]:
    """Every tensor of a checkpoint by name. Only headers are read.

    The files of the checkpoint are those that transformers would take: model.safetensors, or
    otherwise the shards that the index names. Other files beside them are ignored, such as a second
    copy in the trainer's own format.

    Raises CheckpointError for a missing folder, pickles, a missing or truncated shard, a damaged
    header, or an index file that disagrees with the shards.
    """
    if not directory.is_dir():
        raise CheckpointError(
            "no such folder",
            where=directory,
            hint="check the path; it is relative to the YAML's folder",
        )
    index_file = directory / "model.safetensors.index.json"
    if (directory / "model.safetensors").exists():
        weight_map, names = None, ["model.safetensors"]
    elif index_file.exists():
        weight_map = read_json(index_file).get("weight_map")
        if not isinstance(weight_map, dict):
            raise CheckpointError("has no weight_map", where=index_file)
        names = sorted({str(name) for name in weight_map.values()})
        outside = [name for name in names if Path(name).name != name or name == ".."]
        if outside:
            raise CheckpointError(
                f"shard {outside[0]!r} points outside the checkpoint's folder", where=index_file
            )
    else:
        raise _without_weights(directory)
    tensors: dict[str, TensorInfo] = {}
    for name in names:
        for info in read_header(directory / name):
            if info.name in tensors:
                raise CheckpointError(f"{info.name} is in two shards", where=info.file)
            tensors[info.name] = info
    missing = sorted(set(weight_map or {}) - set(tensors))
    if missing:
        raise CheckpointError(
            f"{missing[0]} is listed, but is in no shard ({len(missing)} missing)", where=index_file
        )
    return tensors


def check_files(directory: Path) -> None:
    """Raise CheckpointError if the safetensors files of a folder are damaged or incomplete, as
    `read_index`. A folder without any, such as one with a config.json alone, is not judged.
    """
    if any(directory.glob("*.safetensors*")):
        read_index(directory)


def _without_weights(directory: Path) -> CheckpointError:
    """The error for a folder without model.safetensors and without an index. It names what the
    folder holds instead.
    """
    loose = sorted(path.name for path in directory.glob("*.safetensors"))
    if len(loose) == 1:
        return CheckpointError(
            "holds no model.safetensors", where=directory, hint=f"is it {loose[0]}? Then rename it"
        )
    if loose:
        return CheckpointError(
            f"holds {len(loose)} *.safetensors files, but no model.safetensors.index.json that says"
            " which of them belong together",
            where=directory,
            hint="fetch the index too",
        )
    pickles = sorted(
        path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in directory.glob(pattern)
    )
    if pickles:
        return CheckpointError(
            f"holds pickles ({pickles[0]}) and no safetensors; pickles are not read, because they"
            " can run code",
            where=directory,
            hint=(
                "convert it where you trust it:"
                " AutoModelForCausalLM.from_pretrained(DIR).save_pretrained(OUT)"
            ),
        )
    return CheckpointError(
        "holds no *.safetensors file", where=directory, hint="name a folder in Hugging Face format"
    )


def read_tensors(directory: Path) -> Iterator[tuple[str, Tensor]]:
    """Each tensor of a checkpoint in turn, memory-mapped file by file."""
    for file in sorted({info.file for info in read_index(directory).values()}):
        yield from read_file(file)


def read_file(file: Path) -> Iterator[tuple[str, Tensor]]:
    """Each tensor of one safetensors file. Raises CheckpointError if the file is damaged."""
    from safetensors import safe_open

    read_header(file)
    with safe_open(file, framework="pt") as shard:
        for name in shard.keys():  # noqa: SIM118  (a safe_open handle is not a mapping)
            yield name, shard.get_tensor(name)


def read_tensor(info: TensorInfo) -> Tensor:
    """One tensor, memory-mapped."""
    from safetensors import safe_open

    with safe_open(info.file, framework="pt") as shard:
        tensor: Tensor = shard.get_tensor(info.name)
        return tensor


def check_against_shape(tensors: dict[str, TensorInfo], shape: ModelShape, directory: Path) -> None:
    """Raise CheckpointError if config.json and the weights disagree: a tensor is missing or has
    another shape, or there are more layers.
    """
    for name, expected in expected_shapes(shape).items():
        info = tensors.get(name)
        if info is None:
            raise CheckpointError(
                f"{name} {list(expected)} is missing from the weights", where=directory
            )
        if info.shape != expected:
            raise CheckpointError(
                f"{name} has shape {list(info.shape)}, but config.json implies {list(expected)}",
                where=info.file,
                hint="use a config.json and weights of the same model",
            )
    for name, info in tensors.items():
        layer = LAYER.match(name)
        if layer and int(layer["index"]) >= shape.num_layers:
            raise CheckpointError(
                f"{name} belongs to a layer beyond the {shape.num_layers} layers of config.json"
                " (num_hidden_layers)",
                where=info.file,
                hint="use a config.json and weights of the same model",
            )


def expected_shapes(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """Hugging Face tensor name -> shape, for an unquantized checkpoint. With tied embeddings there
    is no lm_head.weight.
    """
    hidden, head = shape.hidden_size, shape.head_dim
    q_out, kv_out = shape.num_heads * head, shape.num_kv_heads * head
    expected: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (shape.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    if not shape.tie_word_embeddings:
        expected["lm_head.weight"] = (shape.vocab_size, hidden)
    for index in range(shape.num_layers):
        layer = f"model.layers.{index}"
        linears = {
            "self_attn.q_proj": (q_out, hidden, shape.qkv_bias),
            "self_attn.k_proj": (kv_out, hidden, shape.qkv_bias),
            "self_attn.v_proj": (kv_out, hidden, shape.qkv_bias),
            "self_attn.o_proj": (hidden, q_out, shape.o_bias),
            "mlp.gate_proj": (shape.intermediate_size, hidden, shape.mlp_bias),
            "mlp.up_proj": (shape.intermediate_size, hidden, shape.mlp_bias),
            "mlp.down_proj": (hidden, shape.intermediate_size, shape.mlp_bias),
        }
        for name, (rows, columns, has_bias) in linears.items():
            expected[f"{layer}.{name}.weight"] = (rows, columns)
            if has_bias:
                expected[f"{layer}.{name}.bias"] = (rows,)
        expected[f"{layer}.input_layernorm.weight"] = (hidden,)
        expected[f"{layer}.post_attention_layernorm.weight"] = (hidden,)
        if shape.qk_norm:
            expected[f"{layer}.self_attn.q_norm.weight"] = (head,)
            expected[f"{layer}.self_attn.k_norm.weight"] = (head,)
    return expected


def read_header(file: Path) -> list[TensorInfo]:
    """Parse the header of one shard: 8 bytes of little-endian length, then JSON. Source:
    safetensors README, "Format". Raises CheckpointError for a damaged header, and for a file whose
    size does not match it, or whose path the safetensors library cannot open.
    """
    try:
        str(file).encode()
    except UnicodeEncodeError as exc:
        raise CheckpointError(
            "the path is not UTF-8, and the safetensors library opens no other",
            where=ascii(str(file)),
            hint="rename the folder",
        ) from exc
    try:
        if file.exists() and not file.is_file():  # reading a pipe could wait for ever
            raise CheckpointError("is not a file", where=file, hint=UNREADABLE)
        size = file.stat().st_size
        with file.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8).ljust(8, b"\0"))
            if length == 0 or length > min(MAX_HEADER_BYTES, size - 8):
                raise CheckpointError(
                    "the header is damaged or the file is truncated",
                    where=file,
                    hint="fetch this shard again",
                )
            header = json.loads(stream.read(length))
    except FileNotFoundError:
        raise CheckpointError("the shard is missing", where=file, hint="fetch this shard") from None
    except OSError as exc:
        raise CheckpointError(
            f"cannot be read ({exc.strerror})", where=file, hint=UNREADABLE
        ) from exc
    except (json.JSONDecodeError, UnicodeDecodeError) as exc:
        raise CheckpointError(
            "the header is damaged", where=file, hint="fetch this shard again"
        ) from exc
    infos = []
    end = 0
    for name, dtype, extents, start, stop in sorted(
        _entries(header, file), key=lambda entry: entry[3]
    ):
        if math.prod(extents) * DTYPE_BYTES.get(dtype, 0) != stop - start:
            raise CheckpointError(
                f"dtype {dtype} and shape of {name} do not match its number of bytes",
                where=file,
                hint="fetch this shard again",
            )
        if start != end:
            raise CheckpointError(
                f"the header is damaged: {name} begins at byte {start}, not at {end}",
                where=file,
                hint="fetch this shard again",
            )
        end = stop
        infos.append(TensorInfo(name, file, dtype, extents, stop - start))
    if 8 + length + end != size:
        raise CheckpointError(
            f"is {size} bytes long, but its header asks for {8 + length + end}",
            where=file,
            hint="fetch this shard again",
        )
    return infos


def _entries(header: Any, file: Path) -> Iterator[tuple[str, str, tuple[int, ...], int, int]]:
    """(name, dtype, shape, start, stop) of each tensor. The offsets are in bytes, from the end of
    the header.
    """
    if not isinstance(header, dict):
        raise CheckpointError(
            "the header is damaged: it is not a JSON object",
            where=file,
            hint="fetch this shard again",
        )
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        try:
            dtype, extents, (start, stop) = (
                entry["dtype"],
                tuple(entry["shape"]),
                entry["data_offsets"],
            )
            is_valid = isinstance(dtype, str) and all(
                type(number) is int and number >= 0 for number in (*extents, start, stop)
            )
        except (TypeError, KeyError, ValueError):
            is_valid = False
        if not is_valid:
            raise CheckpointError(
                f"the header is damaged at {name!r}", where=file, hint="fetch this shard again"
            )
        yield name, dtype, extents, start, stop
