"""The kernel library: it is built with the machine's own compiler, loaded once per process, and
called as `Ops`.

kernels.cpp explains the kernels, and package.cpp the object that runs a compiled package. This
module compiles both into one library, packs weights in the layout that the kernels read, and tells
torch.export the shapes of their results.
"""

from __future__ import annotations

import functools
import hashlib
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from toolkit.engines.embedded.memory import unused_zeros, zeros_in_huge_pages
from toolkit.engines.embedded.model import Attention, Layer, Linear, Ops, Step, Weights, mapped
from toolkit.errors import StageError
from toolkit.facts.embedded import BLOCK
from toolkit.pipeline.toolchain import compiler_path, compiler_version, instruction_set

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "NATIVE",
    "KernelOps",
    "build_library",
    "caches_by_position",
    "kernel_caches",
    "layer_cache",
    "load_library",
    "namespace",
    "pack",
    "pack_linear",
    "reading_order",
    "source_digest",
]

SOURCES = ("kernels.cpp", "package.cpp")  # of one translation unit, in this order
FLAGS = (
    "-std=gnu++20",
    "-O3",
    "-fopenmp",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fPIC",
    "-shared",
)
NATIVE = "native"  # the processor for which the library is compiled: GCC's -march, and options
LANES = 16
LINE_BYTES = 64  # of a cache
SMALL_BYTES = 32 << 20  # of packed weights that are put side by side
_building = threading.Lock()
_loaded: set[str] = set()


def source_digest() -> str:
    """The digest of the sources and the flags, which decide the library's behaviour together
    with compiler, torch and machine.
    """
    return hashlib.sha256(_source() + " ".join(FLAGS).encode()).hexdigest()[:16]


@functools.cache
def _source() -> bytes:
    """The sources, one behind the other. They are read once, so that the digest is that of the
    compiled source, even if a file changes while a process runs. Each says its name, so that the
    compiler's messages do.
    """
    folder = Path(__file__).parent
    return b"".join(
        f'#line 1 "{name}"\n'.encode() + (folder / name).read_bytes() for name in SOURCES
    )


def namespace(march: str = NATIVE) -> str:
    """The namespace of a build's operators. It has a digest of the build in its name, so that
    engines of several builds can share a process.
    """
    compiler = compiler_path()
    version = compiler_version(compiler) if compiler else ""
    parts = (source_digest(), march, torch.__version__, version, *instruction_set())
    return f"toolkit_{hashlib.sha256('|'.join(parts).encode()).hexdigest()[:12]}"


def build_library(out_file: Path, march: str = NATIVE) -> str:
    """Compile the library to out_file (about 15 s of one core, once per process). Returns its
    namespace.

    Raises StageError with the compiler's last lines.
    """
    with _building:
        shutil.copyfile(_compiled_once(namespace(march), march), out_file)
    return namespace(march)


@functools.cache
def _compiled_once(name: str, march: str) -> Path:
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
        *f"-march={march}".split(),
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
            where=Path(__file__).with_name(SOURCES[0]),
            hint="set engine.mode: eager to build without it",
        )
    return library


def _keep_until_exit(folder: Path) -> None:
    import atexit

    atexit.register(shutil.rmtree, folder, ignore_errors=True)


def load_library(file: Path, name: str) -> KernelOps:
    """Load a built library, unless its namespace is loaded already. The caller has checked the
    digest of the file.
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
        dim = keys.shape[3] * (2 if keys.dim() == 6 else 1)  # see `kernel_caches`
        return qkv.new_empty((qkv.shape[0], qkv.shape[1], rest[-3] * dim))

    def layers(hidden: Tensor, *_: Any) -> Tensor:
        return hidden.new_empty(hidden.shape)

    shapes: dict[str, Callable[..., Tensor]] = {
        "linear": linear,
        "attention": attention,
        "layers": layers,
        "held_layers": layers,
    }
    for operator, shape in shapes.items():
        torch.library.register_fake(f"{name}::{operator}", shape)


class KernelOps(Ops):
    """Ops that call the kernel library. Weights come from `pack`, caches from `kernel_caches`.

    Sums are in float32, for every dtype of the input. All layers are one call, since in a small
    model the calls themselves take as long as the arithmetic.
    """

    def __init__(self, name: str, number: Tensor | None = None) -> None:
        """number [1, 1] int64: `layers` computes those that are held under it, whatever it is
        given, so that a compiled package does not pass their tensors with every call.
        """
        self._name, self._number = name, number
        operators = getattr(torch.ops, name)
        self._linear, self._attention = operators.linear.default, operators.attention.default
        self._layers, self._held_layers = operators.layers.default, operators.held_layers.default
        self._hold, self._let_go = operators.hold.default, operators.let_go.default

    def embedded(self, tokens: Tensor, weights: Weights) -> Tensor:
        if weights.embed is not None:
            return super().embedded(tokens, weights)
        rows = weights.lm_head.weight[tokens // BLOCK, :, tokens % BLOCK]  # as in `pack_linear`
        return rows.flatten(1)[None, :, : weights.norm.shape[-1]]

    def linear(self, x: Tensor, linear: Linear) -> Tensor:
        return _as(x, self._linear(x.float().contiguous(), *_tensors(linear), linear.rows))

    def attention(
        self, qkv: Tensor, cache: tuple[Tensor, Tensor], step: Step, how: Attention
    ) -> Tensor:
        settings = (*_scales(how), how.heads, how.window or 0, how.eps)
        return _as(qkv, self._attention(qkv.float(), *cache, *_where(step), *settings))

    def layers(
        self,
        hidden: Tensor,
        layers: Sequence[Layer],
        caches: Sequence[tuple[Tensor, Tensor]],
        step: Step,
    ) -> Tensor:
        if self._number is not None:
            places = step.slots, step.lengths, step.starts
            return _as(hidden, self._held_layers(hidden.float(), self._number, *places))
        eps = layers[0].attention.eps
        out = self._layers(hidden.float(), *_flat(layers, caches), *_where(step), eps)
        return _as(hidden, out)

    def hold(self, weights: Weights, caches: Sequence[tuple[Tensor, Tensor]]) -> int:
        """Keep the layers in the library, with everything that they need, under the number that is
        returned, until `let_go`.
        """
        parts = _flat(weights.layers, caches)
        number: int = self._hold(*parts, weights.cos, weights.sin, weights.eps)
        return number

    def let_go(self, number: int) -> None:
        self._let_go(number)

    def held(self, number: Tensor) -> KernelOps:
        """The same library, for the layers that are held under `number` [1, 1] int64."""
        return KernelOps(self._name, number)


def _as(x: Tensor, result: Tensor) -> Tensor:
    return result.to(x.dtype)


def _flat(
    layers: Sequence[Layer], caches: Sequence[tuple[Tensor, Tensor]]
) -> tuple[list[Tensor], list[int], list[Tensor], list[Tensor]]:
    """The tensors and numbers of layers in the order in which kernels.cpp reads them (`Reader`),
    then keys and values of each.
    """
    tensors: list[Tensor] = []
    numbers: list[int] = []
    for layer in layers:
        how, linears = layer.attention, (layer.qkv, layer.o, layer.gate_up, layer.down)
        parts: list[Tensor | None] = [layer.input_norm, layer.post_norm]
        parts += [part for linear in linears for part in _tensors(linear)]
        parts += _scales(how)
        exists = sum(1 << i for i, part in enumerate(parts) if part is not None)
        tensors += [part for part in parts if part is not None]
        numbers += [exists, how.heads, how.window or 0, *(linear.rows for linear in linears)]
    return tensors, numbers, [keys for keys, _ in caches], [values for _, values in caches]


def _tensors(linear: Linear) -> tuple[Tensor | None, ...]:
    return (
        linear.weight,
        linear.scale,
        linear.input_scale,
        linear.pre_scale,
        linear.bias,
        linear.start,
    )


def _scales(how: Attention) -> tuple[Tensor | None, ...]:
    return how.q_norm, how.k_norm, how.k_scale, how.v_scale


def _where(step: Step) -> tuple[Tensor, ...]:
    return step.slots, step.lengths, step.starts, step.cos, step.sin


def kernel_caches(
    weights: Weights, slots: int, capacity: int, dtype: torch.dtype
) -> list[tuple[Tensor, Tensor]]:
    """Zeroed (keys [slots, kv_heads, capacity / BLOCK, dim, BLOCK], values [slots, kv_heads,
    capacity, padded]) per layer, in float32 or uint8 (FP8 codes). In bfloat16: (keys [slots,
    kv_heads, capacity / BLOCK, dim / 2, BLOCK, 2], values [slots, kv_heads, capacity / 2, padded,
    2]), in the pairs of which processors sum the products at once.

    Keys are stored by dimension within a block of positions, so that consecutive positions are one
    vector, and a short context lies in few pages. capacity must be a multiple of BLOCK. A slot
    takes memory only as far as it has been used.
    """
    return [layer_cache(layer.attention, slots, capacity, dtype) for layer in weights.layers]


def layer_cache(
    how: Attention, slots: int, capacity: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """(keys, values) of one layer of `kernel_caches`."""
    n = 2 if dtype == torch.bfloat16 else 1
    pair = (n,) if n > 1 else ()
    padded = -(-how.head_dim // LANES) * LANES
    blocks = (slots, how.kv_heads, capacity // BLOCK, how.head_dim // n, BLOCK, *pair)
    rows = (slots, how.kv_heads, capacity // n, padded, *pair)
    return unused_zeros(blocks, dtype), unused_zeros(rows, dtype)


def caches_by_position(caches: list[tuple[Tensor, Tensor]]) -> list[Tensor]:
    """Views of what `kernel_caches` made: keys [slots, kv_heads, capacity / BLOCK, any] and values
    [slots, kv_heads, capacity or half of it, any] of each layer.
    """
    return [view.flatten(3) for layer in caches for view in layer]


def pack(weights: Weights, dtype: torch.dtype) -> Weights:
    """The same model, with its linears packed for the kernels and its small tensors as rows in
    float32.

    A small tensor is a row [1, n] and not a vector, since inductor writes the values of vectors of
    up to eight elements into the code. Embeddings that are tied to the LM head are packed with it
    and kept once: of a model of a billion parameters they are a fifth.
    """

    def row(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else _row(tensor)

    def pack_layer(layer: Layer) -> Layer:
        how = layer.attention
        linears = {
            name: pack_linear(getattr(layer, name), dtype)
            for name in ("qkv", "o", "gate_up", "down")
        }
        return replace(
            layer,
            **linears,
            input_norm=_row(layer.input_norm),
            post_norm=_row(layer.post_norm),
            attention=replace(
                how,
                q_norm=row(how.q_norm),
                k_norm=row(how.k_norm),
                k_scale=row(how.k_scale),
                v_scale=row(how.v_scale),
            ),
        )

    embed: Tensor | None = None
    if weights.embed is not None and weights.embed is not weights.lm_head.weight:
        # A copy, so that nothing keeps the file of the weights mapped.
        keeps_dtype = weights.embed.dtype in (torch.float32, torch.bfloat16)
        embed = weights.embed.clone() if keeps_dtype else weights.embed.float()
    return _side_by_side(
        replace(
            weights,
            embed=embed,
            norm=_row(weights.norm),
            lm_head=pack_linear(weights.lm_head, dtype),
            layers=tuple(pack_layer(layer) for layer in weights.layers),
        )
    )


def _side_by_side(weights: Weights) -> Weights:
    """The same weights, those of a small model in one piece of memory, in the order in which a
    forward reads them.

    The kernels fetch weights ahead, beyond the end of a linear. So the next one's are on their way
    when it begins. A linear of a few tens of kilobytes would have spent a good part of its time on
    waiting for its first ones; of a large model it is nothing, and a copy would take long.
    """
    order = list(reading_order(weights))
    sizes = [-(-part.nbytes // LINE_BYTES) * LINE_BYTES for part in order]
    if sum(sizes) > SMALL_BYTES:
        return weights
    memory = zeros_in_huge_pages((sum(sizes) + LINE_BYTES,), torch.uint8)
    begin = -memory.data_ptr() % LINE_BYTES
    places: dict[int, Tensor] = {}
    for part, size in zip(order, sizes, strict=True):
        place = memory[begin : begin + part.nbytes].view(part.dtype).view(part.shape)
        places[id(part)] = place.copy_(part)
        begin += size
    moved: Weights = mapped(weights, lambda part: places.get(id(part), part))
    return moved


def reading_order(weights: Weights) -> Iterator[Tensor]:
    """Of each linear the small tensors come first, since its first block needs them."""

    def of(linear: Linear) -> Iterator[Tensor]:
        weight, *small = _tensors(linear)
        yield from (part for part in small if part is not None)
        assert weight is not None
        yield weight

    for layer in weights.layers:
        yield layer.input_norm
        yield from of(layer.qkv)
        yield from of(layer.o)
        yield layer.post_norm
        yield from of(layer.gate_up)
        yield from of(layer.down)
    yield weights.norm
    yield from of(weights.lm_head)


def pack_linear(linear: Linear, dtype: torch.dtype) -> Linear:
    """Pack the rows in blocks of 64. Within a block the inner dimension comes first; the last block
    is padded with zeros.

    INT8 codes lie in groups of four. FP8 codes whose inputs are rounded, too, and all bfloat16
    weights of a bfloat16 engine lie in pairs: their inputs are bfloat16 in a product. In a float32
    engine bfloat16 weights stay bfloat16, since the kernel widens them exactly, and other plain
    weights become float32.
    """
    weight = linear.weight
    parts = (
        (name, getattr(linear, name)) for name in ("scale", "input_scale", "pre_scale", "bias")
    )
    small = {name: _row(tensor) for name, tensor in parts if tensor is not None}
    if weight.dtype == torch.int8:
        padded, packed = _pack_rows(weight, 4)
        start = padded.sum(dim=1, dtype=torch.int32).mul_(-128).view(1, -1)
        return Linear(packed, **small, rows=len(weight), start=start)
    group = 1
    if weight.dtype == torch.float8_e4m3fn:
        weight, group = weight.view(torch.uint8), 1 if linear.input_scale is None else 2
    elif dtype == torch.bfloat16:
        weight, group = weight.to(torch.bfloat16), 2
    elif weight.dtype != torch.bfloat16:
        weight = weight.float()
    return Linear(_pack_rows(weight, group)[1], **small, rows=len(weight))


def _pack_rows(weight: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """weight [rows, k], padded -> (itself, [blocks, k / group, BLOCK(, group)])."""
    rows, k = weight.shape
    padded = weight
    if k % group or rows % BLOCK:  # pad copies in any case
        padded = torch.nn.functional.pad(weight, (0, -k % group, 0, -rows % BLOCK))
    blocks = padded.view(-1, BLOCK, padded.shape[1] // group, group).transpose(1, 2)
    packed = zeros_in_huge_pages(tuple(blocks.shape), blocks.dtype).copy_(blocks)
    return padded, packed.squeeze(3)


def _row(tensor: Tensor) -> Tensor:
    return tensor.float().reshape(1, -1).contiguous()
