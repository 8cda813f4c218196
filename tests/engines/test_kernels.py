"""The kernel library against plain torch, and its promise: the same bits for a token, however
many others take part.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.engines.contract import StepEngineContract
from tests.engines.reference import reference_logits
from tests.support.checkpoints import write_checkpoint
from tests.support.exports import EXPORTS, TOKENS, Export
from tests.support.families import CASES
from toolkit.engines.embedded.engine import EmbeddedEngine, open_checkpoint
from toolkit.engines.embedded.kernels import (
    NATIVE,
    KernelOps,
    build_library,
    layer_cache,
    load_library,
    pack,
    pack_linear,
    reading_order,
)
from toolkit.engines.embedded.model import (
    Attention,
    Layer,
    Linear,
    Ops,
    Step,
    TorchOps,
    Weights,
)
from toolkit.facts.embedded import BLOCK
from toolkit.pipeline.toolchain import compiler_path, instruction_set

MakeEngine = Callable[..., EmbeddedEngine]


# The processors for which the library is compiled here, and what this one needs for each: without
# AMX vectors multiply all; one of AVX2 is half as wide, and multiplies neither bytes nor BF16
# numbers.
PROCESSORS = {NATIVE: None, "native -mno-amx-int8": "amx_int8", "x86-64-v3": "avx2"}


@pytest.fixture(scope="session", params=PROCESSORS)
def kernels(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> KernelOps:
    """The library for this machine, and as it would be on one without AMX, and without AVX-512."""
    if compiler_path() is None:
        pytest.skip("no C++ compiler")
    if PROCESSORS[request.param] not in (None, *instruction_set()):
        pytest.skip(f"this processor has no {PROCESSORS[request.param]}")
    library = tmp_path_factory.mktemp("kernels") / "kernels.so"
    return load_library(library, build_library(library, request.param))


Cache = tuple[torch.Tensor, torch.Tensor]
KINDS = ("float32", "bfloat16", "bfloat16 engine", "w8a16", "w8a8", "fp8")


def packed(kind: str, linear: Linear) -> Linear:
    return pack_linear(linear, torch.bfloat16 if kind == "bfloat16 engine" else torch.float32)


def random_linear(kind: str, rows: int, columns: int) -> Linear:
    generator = torch.Generator().manual_seed(rows * columns)
    codes = torch.randint(-127, 128, (rows, columns), generator=generator).to(torch.int8)
    scale = torch.rand(rows, generator=generator) + 0.1
    bias = torch.randn(rows, generator=generator)
    return {
        "float32": lambda: Linear(torch.randn(rows, columns, generator=generator), bias=bias),
        "bfloat16": lambda: Linear(torch.randn(rows, columns, generator=generator).bfloat16()),
        "bfloat16 engine": lambda: random_linear("bfloat16", rows, columns),
        "w8a16": lambda: Linear(codes, scale, bias=bias),
        "w8a8": lambda: Linear(
            codes, scale, torch.tensor(0.03), torch.rand(columns, generator=generator) + 0.5, bias
        ),
        "fp8": lambda: Linear(codes.float().to(torch.float8_e4m3fn), scale, torch.tensor(0.01)),
    }[kind]()


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "w8a8", "fp8"])
@pytest.mark.parametrize(("rows", "columns"), [(64, 64), (130, 33), (1, 3), (257, 300)])
def test_linear_equals_torch(kernels: KernelOps, kind: str, rows: int, columns: int) -> None:
    """Integer products exactly, up to one rounding of the scale; float sums up to their order,
    1e-5 of their size.
    """
    linear = random_linear(kind, rows, columns)
    x = torch.randn(37, columns, generator=torch.Generator().manual_seed(1))
    ours, plain = kernels.linear(x, packed(kind, linear)), TorchOps().linear(x, linear)
    assert torch.allclose(
        ours, plain, rtol=1e-6 if kind == "w8a8" else 1e-5, atol=1e-5 * float(plain.abs().max())
    )


@pytest.mark.parametrize("kind", ["w8a16", "bfloat16 engine"])
@pytest.mark.parametrize(("rows", "columns"), [(64, 64), (130, 33), (1, 3), (257, 300)])
def test_activations_keep_sixteen_bits(
    kernels: KernelOps, kind: str, rows: int, columns: int
) -> None:
    """Each is rounded by at most half a step: of 2^-15 of the token's largest for INT8 weights, of
    its own eighth bit for BF16. Float sums add 1e-5 of their size.
    """
    linear = random_linear(kind, rows, columns)
    x = torch.randn(37, columns, generator=torch.Generator().manual_seed(1))
    x[3] *= 1e-20
    x[5] = 0
    x[7, 0] = 1e4
    exact = TorchOps().linear(x.double(), linear)
    half_step = x.abs().amax(1, keepdim=True) / 32767 / 2 if kind == "w8a16" else x.abs() / 256
    scale = torch.ones(rows) if linear.scale is None else linear.scale
    most = half_step.expand_as(x) @ (linear.weight.float().abs() * scale[:, None]).T
    error = (kernels.linear(x, packed(kind, linear)) - exact).abs()
    assert (error <= most + 1e-5 * exact.abs().amax(1, keepdim=True)).all()


@pytest.mark.parametrize("kind", KINDS)
def test_linear_gives_the_same_bits_for_any_number_of_tokens(kernels: KernelOps, kind: str) -> None:
    """Also for so many tokens and columns that the weights come in several panels."""
    linear = packed(kind, random_linear(kind, 200, 300))
    x = torch.randn(69, 300, generator=torch.Generator().manual_seed(2))
    whole = kernels.linear(x, linear)
    for count in (*range(1, 18), 32, 33, 64):
        assert torch.equal(kernels.linear(x[:count], linear), whole[:count]), count


REFUSES_AMX = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdarg.h>
long syscall(long number, ...) {
  va_list rest;
  va_start(rest, number);
  long a[6];
  for (int i = 0; i < 6; ++i) a[i] = va_arg(rest, long);
  va_end(rest);
  if (number == 158 && a[0] == 0x1023) { errno = EPERM; return -1; }
  long (*real)(long, ...) = (long (*)(long, ...))dlsym(RTLD_NEXT, "syscall");
  return real(number, a[0], a[1], a[2], a[3], a[4], a[5]);
}
"""
LINEARS = """
import sys, torch
from pathlib import Path
from tests.engines.test_kernels import KINDS, amx_inputs, packed, random_linear
from toolkit.engines.embedded.kernels import load_library
ops = load_library(Path(sys.argv[1]), sys.argv[2])
linears = [packed(kind, random_linear(kind, 200, 300)) for kind in KINDS]
torch.save([ops.linear(amx_inputs(), linear) for linear in linears], sys.argv[3])
"""


def amx_inputs() -> torch.Tensor:
    return torch.randn(37, 300, generator=torch.Generator().manual_seed(2))


@pytest.mark.skipif("amx_int8" not in instruction_set(), reason="this processor has no AMX")
def test_where_linux_refuses_the_registers_of_amx_vectors_compute_everything(
    tmp_path: Path,
) -> None:
    """Then a build for this processor has the bits of one without AMX."""
    if compiler_path() is None:
        pytest.skip("no C++ compiler")
    native, without, shim = (tmp_path / name for name in ("native.so", "without.so", "shim.so"))
    name = build_library(native)
    ops = load_library(without, build_library(without, "native -mno-amx-int8"))
    (tmp_path / "shim.c").write_text(REFUSES_AMX)
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", shim, tmp_path / "shim.c", "-ldl"], check=True)
    outcomes = {}
    for preloaded in ("", str(shim)):
        out = tmp_path / f"{bool(preloaded)}.pt"
        subprocess.run(
            [sys.executable, "-c", LINEARS, native, name, out],
            env={**os.environ, "LD_PRELOAD": preloaded},
            cwd=Path(__file__).parents[2],
            check=True,
        )
        outcomes[bool(preloaded)] = torch.load(out)
    for index, kind in enumerate(KINDS):
        vectors = ops.linear(amx_inputs(), packed(kind, random_linear(kind, 200, 300)))
        assert torch.equal(outcomes[True][index], vectors), kind
    by_amx, by_vectors = (outcomes[refused][KINDS.index("fp8")] for refused in (False, True))
    assert not torch.equal(by_amx, by_vectors)  # so the registers were refused


@pytest.mark.parametrize("input_scale", [None, torch.tensor(1.0)])
def test_every_fp8_code_is_widened_exactly(
    kernels: KernelOps, input_scale: torch.Tensor | None
) -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    codes[[0x7F, 0xFF]] = 0  # not a number
    weight = codes.view(torch.float8_e4m3fn)[:, None]
    widened = kernels.linear(
        torch.ones(1, 1), pack_linear(Linear(weight, torch.ones(256), input_scale), torch.float32)
    )
    assert torch.equal(widened[0], weight[:, 0].float())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bits", [0x7FC00000, 0x7FFFFFFF, -0x400000])
def test_a_nan_stays_one_and_stays_with_its_token(kernels: KernelOps, kind: str, bits: int) -> None:
    """bits: of a NaN as torch writes it, with every bit set, and as a processor makes it."""
    linear = packed(kind, random_linear(kind, 130, 33))
    x = torch.randn(11, 33, generator=torch.Generator().manual_seed(4))
    expected = kernels.linear(x, linear).clone()
    expected[7] = float("nan")
    x.view(torch.int32)[7, 20] = bits
    assert torch.equal(kernels.linear(x, linear).nan_to_num(1e9), expected.nan_to_num(1e9))


@pytest.mark.parametrize("kind", ["float32", "w8a16", "w8a8", "fp8"])
@pytest.mark.parametrize(("hidden", "dim", "inner"), [(96, 32, 160), (37, 24, 45)])
def test_layers_in_one_call_equal_their_parts(
    kernels: KernelOps, kind: str, hidden: int, dim: int, inner: int
) -> None:
    """The parts between the linears are torch's then. A code on the edge may flip by that: most
    tokens agree to 1e-5.
    """
    heads, kv_heads, batch, n, capacity = 4, 2, 2, 6, 128
    generator = torch.Generator().manual_seed(hidden)

    def small(rows: int, columns: int) -> Linear:
        linear = random_linear(kind, rows, columns)
        scale = None if linear.scale is None else linear.scale / 1000
        return pack_linear(
            replace(linear, scale=scale, bias=None if scale is None else linear.bias), torch.float32
        )

    sizes = (
        ((heads + 2 * kv_heads) * dim, hidden),
        (hidden, heads * dim),
        (2 * inner, hidden),
        (hidden, inner),
    )
    norms = [torch.rand((1, hidden), generator=generator) + 0.5 for _ in range(2)]
    how = Attention(heads, kv_heads, dim, 1e-5, None, None, None, None, None)
    layer = Layer(*norms, *(small(rows, columns) for rows, columns in sizes), how)
    x = torch.randn((batch, n, hidden), generator=generator)
    angles = torch.rand((capacity, dim // 2), generator=generator)
    starts = torch.tensor([0, n])
    step = Step(torch.tensor([1, 0]), torch.tensor([3, 40]), starts, angles.cos(), angles.sin())

    def caches() -> tuple[torch.Tensor, torch.Tensor]:
        padded = -(-dim // 16) * 16
        keys = torch.zeros(2, kv_heads, capacity // BLOCK, dim, BLOCK)
        return keys, torch.zeros(2, kv_heads, capacity, padded)

    of_whole, of_held = [caches(), caches()], [caches(), caches()]
    whole = kernels.layers(x, [layer, layer], of_whole, step)
    parts = Ops.layers(kernels, x, [layer, layer], [caches(), caches()], step)
    head = Linear(torch.zeros(1, hidden))
    number = kernels.hold(
        Weights(None, norms[0], head, (layer, layer), step.cos, step.sin, 1e-5), of_held
    )
    held = kernels.held(torch.tensor([[number]]))
    assert torch.equal(held.layers(x, [], [], step), whole)
    assert all(map(torch.equal, sum(of_held, ()), sum(of_whole, ())))
    kernels.let_go(number)
    with pytest.raises(RuntimeError, match=f"none are held under number {number}"):
        held.layers(x, [], [], step)
    difference = (whole - parts).abs().amax(-1) / parts.abs().max()
    assert (difference < 1e-5).float().mean() > 0.7
    assert difference.max() < (0.05 if kind in ("w8a8", "fp8") else 1e-5)
    assert (whole - x).abs().max() > 0.01


@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_embeddings_tied_to_the_head_are_read_where_it_is_packed(
    kernels: KernelOps, source: torch.dtype, dtype: torch.dtype
) -> None:
    """Rows at both ends of blocks, one of which is not full, of an odd number of columns."""
    table, tokens = torch.randn(130, 33).to(source), torch.tensor([0, 129, 64, 63, 128, 7, 7])
    nothing = torch.zeros(0)
    weights = Weights(table, torch.ones(33), Linear(table), (), nothing, nothing, 1e-6)
    once = pack(weights, dtype)
    assert once.embed is None
    assert torch.equal(kernels.embedded(tokens, once).to(dtype), table[None, tokens].to(dtype))
    twice = pack(replace(weights, lm_head=Linear(table.clone())), dtype)
    assert twice.embed is not None
    assert torch.equal(kernels.embedded(tokens, twice).to(dtype), table[None, tokens].to(dtype))


@pytest.mark.parametrize("is_small", [True, False])
def test_a_small_model_s_weights_lie_in_the_order_in_which_they_are_read(
    is_small: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are the same numbers, each at the start of a cache line."""
    how = Attention(2, 1, 8, 1e-5, None, None, None, None, None)
    sizes = ((32, 24), (24, 16), (90, 24), (24, 45))
    layers = tuple(
        Layer(
            torch.rand(24), torch.rand(24), *(random_linear("w8a8", *size) for size in sizes), how
        )
        for _ in range(2)
    )
    nothing = torch.zeros(0)
    table = torch.randn(130, 24)
    weights = Weights(
        table, torch.rand(24), random_linear("w8a16", 130, 24), layers, nothing, nothing, 1e-6
    )
    if not is_small:
        monkeypatch.setattr("toolkit.engines.embedded.kernels.SMALL_BYTES", 0)
    packed = pack(weights, torch.float32)
    order = list(reading_order(packed))
    assert len(order) == 2 * (2 + 4 * 6) + 1 + 4
    assert order[0] is packed.layers[0].input_norm
    assert order[-1] is packed.lm_head.weight
    together = len({part.untyped_storage().data_ptr() for part in order}) == 1
    assert together == is_small
    if is_small:
        places = [part.data_ptr() for part in order]
        assert all(place % 64 == 0 for place in places)
        gaps = [
            after - place - part.nbytes
            for place, after, part in zip(places[:-1], places[1:], order[:-1], strict=True)
        ]
        assert 0 <= min(gaps) <= max(gaps) < 64
    expected = pack_linear(layers[1].down, torch.float32)
    assert torch.equal(packed.layers[1].down.weight, expected.weight)
    assert torch.equal(packed.norm[0], weights.norm)


def test_layers_refuse_tensors_of_more_layers_than_caches(kernels: KernelOps) -> None:
    tensors = [torch.ones(1, 4)] * 2
    with pytest.raises(RuntimeError, match="more layers than caches"):
        kernels._layers(torch.ones(1, 1, 4), tensors, [3], [], [], *[torch.zeros(1)] * 5, 1e-5)
    with pytest.raises(RuntimeError, match="numbers are missing"):
        kernels._layers(
            torch.ones(1, 1, 4), [], [], tensors[:1], tensors[:1], *[torch.zeros(1)] * 5, 1e-5
        )


@pytest.mark.parametrize("value", [float("inf"), float("-inf")])
def test_infinity_among_sixteen_bit_codes_makes_its_token_nan(
    kernels: KernelOps, value: float
) -> None:
    linear = pack_linear(random_linear("w8a16", 130, 33), torch.float32)
    x = torch.randn(11, 33, generator=torch.Generator().manual_seed(4))
    expected = kernels.linear(x, linear).clone()
    expected[7] = float("nan")
    x[7, 20] = value
    assert torch.equal(kernels.linear(x, linear).nan_to_num(1e9), expected.nan_to_num(1e9))


def fp8_trials() -> torch.Tensor:
    """Every E4M3 number, every midpoint between two of them with its neighbours, both overflows:
    [n], a multiple of 64.
    """
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    codes = codes[codes.isfinite()].sort().values
    middles = (codes[1:] + codes[:-1]) / 2
    beside = [torch.nextafter(middles, torch.tensor(end)) for end in (-1e9, 1e9)]
    trials = torch.cat(
        [codes, middles, *beside, torch.tensor([1e9, -1e9, 449.0, -465.0, 1e-30, -1e-30])]
    )
    return torch.nn.functional.pad(trials, (0, -len(trials) % 64))


def test_activations_are_rounded_to_fp8_like_torchs_cast(kernels: KernelOps) -> None:
    x = fp8_trials().view(-1, 64)
    identity = pack_linear(
        Linear(torch.eye(64).to(torch.float8_e4m3fn), torch.ones(64), torch.tensor(1.0)),
        torch.float32,
    )
    assert torch.equal(
        kernels.linear(x, identity), x.clamp(-448, 448).to(torch.float8_e4m3fn).float()
    )


def by_position(keys: torch.Tensor) -> torch.Tensor:
    """[slots, kv_heads, capacity, dim]"""
    return keys.transpose(3, 4).flatten(2, 3)


@pytest.mark.parametrize("dim", [32, 24])
def test_an_fp8_cache_is_written_like_torchs_cast(kernels: KernelOps, dim: int) -> None:
    padded, n, first = 32, 40, 50  # over the end of a block
    sizes = (2, 1, 2, dim, BLOCK), (2, 1, 128, padded)
    keys, values = (torch.zeros(size, dtype=torch.uint8) for size in sizes)
    trials = fp8_trials()
    qkv = trials.repeat(8)[: n * 3 * dim].view(1, n, 3 * dim).contiguous()
    k_scale, v_scale = torch.tensor(0.7), torch.tensor(1.3)
    how = Attention(1, 1, dim, 1e-5, None, None, None, k_scale, v_scale)
    unrotated = torch.ones(128, dim // 2), torch.zeros(128, dim // 2)
    kernels.attention(
        qkv,
        (keys, values),
        Step(torch.tensor([1]), torch.tensor([first]), torch.tensor([0]), *unrotated),
        how,
    )
    _, key, value = qkv[0].split(dim, dim=-1)
    for written, new, scale in (
        (by_position(keys)[1, 0, first : first + n], key, k_scale),
        (values[1, 0, first : first + n, :dim], value, v_scale),
    ):
        stored = written.contiguous().view(torch.float8_e4m3fn).float()
        assert torch.equal(stored, (new / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float())


def singly(cache: Cache) -> Cache:
    """The same numbers as in a cache whose numbers do not lie in pairs."""
    keys, values = cache
    return keys.transpose(4, 5).flatten(3, 4).contiguous(), values.transpose(3, 4).flatten(2, 3)


@pytest.mark.parametrize("first", [50, 51])
def test_a_bfloat16_cache_is_written_like_torchs_cast_and_read_exactly(
    kernels: KernelOps, request: pytest.FixtureRequest, first: int
) -> None:
    """Where the processor sums the products of pairs, queries and weights are bfloat16, too."""
    dim, n = 24, 40  # over the end of a block
    how = Attention(1, 1, dim, 1e-5, None, None, None, None, None)
    cache = layer_cache(how, 2, 128, torch.bfloat16)
    qkv = torch.randn((1, n, 3 * dim), generator=torch.Generator().manual_seed(6)) * 30
    special = torch.tensor([float("nan"), float("inf"), -3.4e38, 1e-40, 257.0, 259.0])
    qkv[0, -1, -len(special) :] = special
    unrotated = torch.ones(128, dim // 2), torch.zeros(128, dim // 2)

    def step(tokens: torch.Tensor, where: Cache, length: int) -> torch.Tensor:
        at = Step(torch.tensor([1]), torch.tensor([length]), torch.tensor([0]), *unrotated)
        return kernels.attention(tokens.contiguous(), where, at, how)

    step(qkv, cache, first)
    _, key, value = qkv[0].bfloat16().split(dim, dim=-1)
    keys, values = singly(cache)
    for written, new in (
        (by_position(keys)[1, 0, first : first + n], key),
        (values[1, 0, first : first + n, :dim], value),
    ):
        assert torch.equal(written.float().nan_to_num(7.0), new.float().nan_to_num(7.0))
    qkv = torch.randn((1, 1, 3 * dim), generator=torch.Generator().manual_seed(7)) / 30
    qkv, end = qkv.bfloat16().float(), first + n - 1  # over the special numbers
    result, widened = step(qkv, cache, end), (keys.float(), values.float().contiguous())
    exact = step(qkv, widened, end)
    in_pairs = NATIVE in request.node.name and {"avx512_bf16", "avx512vbmi"} <= {*instruction_set()}
    if not in_pairs:
        assert torch.equal(result, exact)
        return
    visible = slice(0, end + 1)
    keys, values = (part.float() for part in singly(cache))  # with the last token
    query = (qkv[0, 0, :dim] * (1 / math.sqrt(dim))).bfloat16().float()
    scores = by_position(keys)[1, 0, visible] @ query
    weights = (scores - scores.max()).exp()
    mixed = weights.bfloat16().float() @ values[1, 0, visible, :dim] / weights.sum()
    assert (result[0, 0] - mixed).abs().max() < 1e-3 < (result - exact).abs().max()


def test_what_an_earlier_sequence_left_in_a_pair_does_not_count(kernels: KernelOps) -> None:
    dim = 16
    how = Attention(1, 1, dim, 1e-5, None, None, None, None, None)
    qkv = torch.randn((1, 1, 3 * dim), generator=torch.Generator().manual_seed(8))
    at = Step(*(torch.tensor([0]) for _ in range(3)), torch.ones(64, 8), torch.zeros(64, 8))
    results = []
    for left in (0.0, float("nan")):
        cache = layer_cache(how, 1, 64, torch.bfloat16)
        for part in cache:
            part.fill_(left)
        results.append(kernels.attention(qkv, cache, at, how))
    assert torch.equal(*results)
    assert results[0].isfinite().all()


def test_threads_do_not_change_the_bits(
    kernels: KernelOps, kernel_engine: MakeEngine, tmp_path: Path
) -> None:
    source = write_checkpoint(
        tmp_path, hidden_size=256, intermediate_size=1024, vocab_size=2048, num_hidden_layers=1
    )
    alone = kernel_engine(source).forward([0, 1], TOKENS)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        assert torch.equal(kernel_engine(source).forward([0, 1], TOKENS), alone)
    finally:
        torch.set_num_threads(threads)


def test_a_long_sequence_among_short_ones_gives_the_same_bits_alone(kernels: KernelOps) -> None:
    """Its heads are shared by the threads, and the longest sequence is not the first of them."""
    dim, n, kv_heads, capacity = 32, 2, 3, 4096
    lengths = [5, 4000, 17, 0]
    how = Attention(6, kv_heads, dim, 1e-5, None, None, None, None, None)
    generator = torch.Generator().manual_seed(3)
    angles = torch.rand((capacity, dim // 2), generator=generator)
    keys, values = (
        torch.randn((4, kv_heads, *size), generator=generator)
        for size in ((capacity // BLOCK, dim, BLOCK), (capacity, dim))
    )
    qkv = torch.randn((4, n, (6 + 2 * kv_heads) * dim), generator=generator)

    def attend(rows: list[int]) -> torch.Tensor:
        read = torch.tensor([lengths[row] for row in rows])
        starts = n * torch.arange(len(rows))
        at = Step(torch.tensor(rows), read, starts, angles.cos(), angles.sin())
        return kernels.attention(qkv[rows], (keys.clone(), values.clone()), at, how)

    alone = torch.cat([attend([row]) for row in range(4)])
    threads = torch.get_num_threads()
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            assert torch.equal(attend([0, 1, 2, 3]), alone), count
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("name", CASES)
def test_every_family_equals_transformers(
    name: str, kernel_engine: MakeEngine, tmp_path: Path
) -> None:
    """float32 against float64: 1e-4, as for the eager engine."""
    source = write_checkpoint(tmp_path, seed=3, **CASES[name])
    assert (
        kernel_engine(source).forward([0, 1], TOKENS) - reference_logits(source, TOKENS)
    ).abs().max() < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("name", EXPORTS)
def test_quantized_models_equal_the_eager_engine(
    name: str, kernel_engine: MakeEngine, exported: Callable[[str], Export]
) -> None:
    """Both compute the same codes; only float sums differ in order. A code on the edge may flip:
    see test_quantized. Inputs of W8A16 are rounded to 16 bits, so there most tokens have a flipped
    code in the FP8 cache.
    """
    export = exported(name)
    cost = (export.simulated - export.source).abs().max()
    plain = open_checkpoint(export.path, max_batch_size=2, max_seq_len=96).forward([0, 1], TOKENS)
    difference = (kernel_engine(export.path).forward([0, 1], TOKENS) - plain).abs().amax(-1)
    assert difference.median() < (cost / 20 if export.quant_algo == "W8A16" else 1e-5)
    assert difference.max() < cost


@pytest.mark.parametrize("part", ["key", "value"])
def test_a_nan_in_an_fp8_cache_is_found_by_every_later_token(kernels: KernelOps, part: str) -> None:
    dim, n = 32, 5
    sizes = (2, 1, 2, dim, BLOCK), (2, 1, 128, dim)
    cache = tuple(torch.zeros(size, dtype=torch.uint8) for size in sizes)
    qkv = torch.randn(1, n, 3 * dim, generator=torch.Generator().manual_seed(5))
    qkv[0, 2, dim if part == "key" else 2 * dim] = float("nan")
    one = torch.tensor(1.0)
    how = Attention(1, 1, dim, 1e-5, None, None, None, one, one)
    unrotated = torch.ones(128, dim // 2), torch.zeros(128, dim // 2)

    def step(tokens: torch.Tensor, length: int) -> torch.Tensor:
        where = Step(torch.tensor([1]), torch.tensor([length]), torch.tensor([0]), *unrotated)
        return kernels.attention(tokens.contiguous(), (cache[0], cache[1]), where, how)

    step(qkv, 10)
    later = step(torch.randn(1, 1, 3 * dim), 10 + n)
    assert later.isnan().any()
    assert step(torch.randn(1, 2, 3 * dim), 10).isfinite().all()  # written again from there on


def test_garbage_behind_a_slots_length_is_never_read(
    kernel_engine: MakeEngine, tmp_path: Path
) -> None:
    engine = kernel_engine(write_checkpoint(tmp_path))
    fresh = engine.forward([0], TOKENS[:1, :8]).clone()
    engine.forward([0], TOKENS[1:, :40])
    engine.rewind([0], [0])
    assert torch.equal(engine.forward([0], TOKENS[:1, :8]), fresh)


class TestKernelContract(StepEngineContract):
    """Tolerance 0: this is the promise that speculation rests on."""

    @pytest.fixture(
        params=[
            "llama_w8a8",
            "qwen3_w8a16_kv_fp8",
            "llama_fp8_kv_fp8",
            "float32",
            "bfloat16",
            "float32 with bfloat16 KV",
            "float32 with fp8 KV",
            "llama_w8a8 with fp8 KV",
        ]
    )
    def engine(
        self,
        request: pytest.FixtureRequest,
        kernel_engine: MakeEngine,
        exported: Callable[[str], Export],
        tiny_pair: tuple[Path, Path],
    ) -> Iterator[EmbeddedEngine]:
        dtype, _, kv_dtype = request.param.partition(" with ")
        kept = kv_dtype.partition(" ")[0] or None
        if dtype in ("float32", "bfloat16"):
            yield kernel_engine(tiny_pair[0], dtype, kept)
        else:
            yield kernel_engine(exported(dtype).path, kv_dtype=kept)
