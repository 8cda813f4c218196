"""The kernel library: built with the machine's own compiler, loaded once per process, called as
`Ops`.

kernels.cpp holds the why and the how. Here: compiling it, packing weights the way it reads them,
and telling torch.export its shapes.
"""

from __future__ import annotations

import functools
import hashlib
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from toolkit.engines.embedded.model import Attention, Layer, Linear, Ops, Step, Weights
from toolkit.engines.embedded.toolchain import compiler_path, compiler_version, instruction_set
from toolkit.errors import StageError

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "BLOCK",
    "KernelOps",
    "build_library",
    "kernel_caches",
    "load_library",
    "namespace",
    "pack",
    "pack_linear",
    "source_digest",
]

SOURCE = Path(__file__).with_name("kernels.cpp")
FLAGS = (
    "-std=gnu++20",
    "-O3",
    "-march=native",
    "-fopenmp",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fPIC",
    "-shared",
)
BLOCK = 64  # rows of a packed block, and the step in which caches grow
LANES = 16
_building = threading.Lock()
_loaded: set[str] = set()


def source_digest() -> str:
    """Of the kernel source and the flags: what decides the library's behaviour besides compiler,
    torch and machine.
    """
    return hashlib.sha256(_source() + " ".join(FLAGS).encode()).hexdigest()[:16]


@functools.cache
def _source() -> bytes:
    """Read once: what is compiled is what was digested, even if the file changes under a
    long-lived process.
    """
    return SOURCE.read_bytes()


def namespace() -> str:
    """Operators of one build carry its digest in their name, so that engines of several builds
    can share a process.
    """
    compiler = compiler_path()
    parts = (
        source_digest(),
        torch.__version__,
        compiler_version(compiler) if compiler else "",
        *instruction_set(),
    )
    return f"toolkit_{hashlib.sha256('|'.join(parts).encode()).hexdigest()[:12]}"


def build_library(out_file: Path) -> str:
    """Compile the library to out_file (about 10 s of one core, once per process). Returns its
    namespace.

    Raises StageError with the compiler's last lines.
    """
    with _building:
        shutil.copyfile(_compiled_once(namespace()), out_file)
    return namespace()


@functools.cache
def _compiled_once(name: str) -> Path:
    from torch.utils.cpp_extension import include_paths, library_paths

    compiler = compiler_path()
    if compiler is None:
        raise StageError(
            "compile", "no C++ compiler was found", hint="install g++, or set engine.mode: eager"
        )
    folder = Path(tempfile.mkdtemp(prefix="toolkit-kernels-"))
    _keep_until_exit(folder)
    library = folder / "kernels.so"
    command = [
        compiler,
        *FLAGS,
        f"-DTOOLKIT_NAMESPACE={name}",
        "-x",
        "c++",
        "-",
        "-o",
        str(library),
    ]
    command += (
        [f"-I{path}" for path in include_paths()]
        + [f"-L{path}" for path in library_paths()]
        + ["-ltorch_cpu", "-lc10"]
    )
    done = subprocess.run(
        command, input=_source().decode(), capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        tail = "\n".join(done.stderr.strip().splitlines()[-12:])
        raise StageError(
            "compile",
            f"the kernel library did not compile:\n{tail}",
            where=SOURCE,
            hint="set engine.mode: eager to go on without it",
        )
    return library


def _keep_until_exit(folder: Path) -> None:
    import atexit

    atexit.register(shutil.rmtree, folder, ignore_errors=True)


def load_library(file: Path, name: str) -> KernelOps:
    """Load a built library unless its namespace is there already. The caller has checked the
    file's digest.
    """
    with _building:
        if name not in _loaded:
            torch.ops.load_library(str(file))  # type: ignore[no-untyped-call]
            _register_shapes(name)
            _loaded.add(name)
    return KernelOps(name)


def _register_shapes(name: str) -> None:
    def linear(x: Tensor, *rest: Any) -> Tensor:
        return x.new_empty((*x.shape[:-1], rest[-1]))

    def attention(qkv: Tensor, keys: Tensor, *rest: Any) -> Tensor:
        return qkv.new_empty((qkv.shape[0], qkv.shape[1], rest[-3] * keys.shape[2]))

    def half_a_layer(hidden: Tensor, *_: Any) -> Tensor:
        return hidden.new_empty(hidden.shape)

    shapes: dict[str, Callable[..., Tensor]] = {
        "linear": linear,
        "attention": attention,
        "attend": half_a_layer,
        "feed_forward": half_a_layer,
    }
    for operator, shape in shapes.items():
        torch.library.register_fake(f"{name}::{operator}", shape)


class KernelOps(Ops):
    """Ops by the kernel library; weights come from `pack`, caches from `kernel_caches`.

    Computes in float32 whatever the input is. Half a layer is one call: in a small model the calls
    themselves take as long as the arithmetic.
    """

    def __init__(self, name: str) -> None:
        operators = getattr(torch.ops, name)
        self._linear, self._attention = operators.linear.default, operators.attention.default
        self._attend, self._feed_forward = operators.attend.default, operators.feed_forward.default

    def linear(self, x: Tensor, linear: Linear) -> Tensor:
        return _as(x, self._linear(x.float().contiguous(), *_linear(linear)))

    def attention(
        self, qkv: Tensor, cache: tuple[Tensor, Tensor], step: Step, how: Attention
    ) -> Tensor:
        return _as(qkv, self._attention(qkv.float(), *_attention(cache, step, how)))

    def attend(
        self, hidden: Tensor, layer: Layer, cache: tuple[Tensor, Tensor], step: Step
    ) -> Tensor:
        parts = (*_linear(layer.qkv), *_linear(layer.o), *_attention(cache, step, layer.attention))
        return _as(hidden, self._attend(hidden.float(), layer.input_norm, *parts))

    def feed_forward(self, hidden: Tensor, layer: Layer) -> Tensor:
        parts = (*_linear(layer.gate_up), *_linear(layer.down), layer.attention.eps)
        return _as(hidden, self._feed_forward(hidden.float(), layer.post_norm, *parts))


def _as(x: Tensor, result: Tensor) -> Tensor:
    return result.to(x.dtype)


def _linear(one: Linear) -> tuple[Any, ...]:
    """In the order of the operators' arguments, as below."""
    return one.weight, one.scale, one.input_scale, one.pre_scale, one.bias, one.start, one.rows


def _attention(cache: tuple[Tensor, Tensor], step: Step, how: Attention) -> tuple[Any, ...]:
    where = (*cache, step.slots, step.lengths, step.cos, step.sin)
    return (
        *where,
        how.q_norm,
        how.k_norm,
        how.k_scale,
        how.v_scale,
        how.heads,
        how.window or 0,
        how.eps,
    )


def kernel_caches(
    weights: Weights, slots: int, capacity: int, *, fp8: bool
) -> list[tuple[Tensor, Tensor]]:
    """Zeroed (keys [slots, kv_heads, dim, capacity], values [slots, kv_heads, capacity, padded])
    per layer.

    Keys are stored by dimension, so that sixteen positions are one vector; capacity must be a
    multiple of BLOCK.
    """
    dtype = torch.uint8 if fp8 else torch.float32

    def one(how: Attention) -> tuple[Tensor, Tensor]:
        padded = -(-how.head_dim // LANES) * LANES
        keys = torch.zeros((slots, how.kv_heads, how.head_dim, capacity), dtype=dtype)
        return keys, torch.zeros((slots, how.kv_heads, capacity, padded), dtype=dtype)

    return [one(layer.attention) for layer in weights.layers]


def pack(weights: Weights, dtype: torch.dtype) -> Weights:
    """The same model with its linears packed for the kernels and everything small in float32, as
    rows.

    A row [1, n] and no vector: inductor writes vectors of up to eight elements into the code,
    values and all.
    """

    def wide(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else _row(tensor)

    def layer(one: Layer) -> Layer:
        how = one.attention
        linears = {
            name: pack_linear(getattr(one, name), dtype) for name in ("qkv", "o", "gate_up", "down")
        }
        return replace(
            one,
            **linears,
            input_norm=_row(one.input_norm),
            post_norm=_row(one.post_norm),
            attention=replace(
                how,
                q_norm=wide(how.q_norm),
                k_norm=wide(how.k_norm),
                k_scale=wide(how.k_scale),
                v_scale=wide(how.v_scale),
            ),
        )

    return replace(
        weights,
        embed=weights.embed
        if weights.embed.dtype in (torch.float32, torch.bfloat16)
        else weights.embed.float(),
        norm=_row(weights.norm),
        lm_head=pack_linear(weights.lm_head, dtype),
        layers=tuple(layer(one) for one in weights.layers),
    )


def pack_linear(linear: Linear, dtype: torch.dtype) -> Linear:
    """Rows in blocks of 64, the inner dimension outermost within a block; the last block is filled
    up with zeros.

    INT8 and FP8 codes keep their byte and bfloat16 its two, since widening them in the kernel is
    exact. Other plain weights become bfloat16 in a bfloat16 engine, else float32.
    """
    weight = linear.weight
    rows, k = weight.shape
    parts = (
        (name, getattr(linear, name)) for name in ("scale", "input_scale", "pre_scale", "bias")
    )
    small = {name: _row(tensor) for name, tensor in parts if tensor is not None}
    if weight.dtype == torch.int8 and linear.input_scale is not None:
        padded = torch.nn.functional.pad(weight, (0, -k % 4, 0, -rows % BLOCK))
        packed = padded.view(-1, BLOCK, padded.shape[1] // 4, 4).permute(0, 2, 1, 3).contiguous()
        start = padded.sum(dim=1, dtype=torch.int32).mul_(-128).view(1, -1)
        return Linear(packed, **small, rows=rows, start=start)
    if weight.dtype == torch.float8_e4m3fn:
        weight = weight.view(torch.uint8)
    elif weight.dtype not in (torch.int8, torch.bfloat16):
        weight = weight.to(torch.bfloat16 if dtype == torch.bfloat16 else torch.float32)
    padded = torch.nn.functional.pad(weight, (0, 0, 0, -rows % BLOCK))
    return Linear(padded.view(-1, BLOCK, k).transpose(1, 2).contiguous(), **small, rows=rows)


def _row(tensor: Tensor) -> Tensor:
    return tensor.float().reshape(1, -1).contiguous()
