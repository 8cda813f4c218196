"""The kernel library against plain torch, and its promise: the same bits for a token, however
many others take part.
"""

from __future__ import annotations

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
from toolkit.engines.embedded.kernels import KernelOps, pack_linear
from toolkit.engines.embedded.model import Attention, Layer, Linear, Ops, Step, TorchOps

MakeEngine = Callable[..., EmbeddedEngine]


def random_linear(kind: str, rows: int, columns: int) -> Linear:
    generator = torch.Generator().manual_seed(rows * columns)
    codes = torch.randint(-127, 128, (rows, columns), generator=generator).to(torch.int8)
    scale = torch.rand(rows, generator=generator) + 0.1
    bias = torch.randn(rows, generator=generator)
    return {
        "float32": lambda: Linear(torch.randn(rows, columns, generator=generator), bias=bias),
        "bfloat16": lambda: Linear(torch.randn(rows, columns, generator=generator).bfloat16()),
        "w8a16": lambda: Linear(codes, scale, bias=bias),
        "w8a8": lambda: Linear(
            codes, scale, torch.tensor(0.03), torch.rand(columns, generator=generator) + 0.5, bias
        ),
        "fp8": lambda: Linear(codes.float().to(torch.float8_e4m3fn), scale, torch.tensor(0.01)),
    }[kind]()


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "w8a16", "w8a8", "fp8"])
@pytest.mark.parametrize(("rows", "columns"), [(64, 64), (130, 33), (1, 3), (257, 300)])
def test_linear_equals_torch(kernels: KernelOps, kind: str, rows: int, columns: int) -> None:
    """Integer products exactly, up to one rounding of the scale; float sums up to their order,
    1e-5 of their size.
    """
    linear = random_linear(kind, rows, columns)
    x = torch.randn(11, columns, generator=torch.Generator().manual_seed(1))
    ours, plain = (
        kernels.linear(x, pack_linear(linear, torch.float32)),
        TorchOps().linear(x, linear),
    )
    assert torch.allclose(
        ours, plain, rtol=1e-6 if kind == "w8a8" else 1e-5, atol=1e-5 * float(plain.abs().max())
    )


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "w8a16", "w8a8", "fp8"])
def test_linear_gives_the_same_bits_for_any_number_of_tokens(kernels: KernelOps, kind: str) -> None:
    linear = pack_linear(random_linear(kind, 200, 300), torch.float32)
    x = torch.randn(23, 300, generator=torch.Generator().manual_seed(2))
    whole = kernels.linear(x, linear)
    for count in range(1, 14):
        assert torch.equal(kernels.linear(x[:count], linear), whole[:count]), count


def test_every_fp8_code_is_widened_exactly(kernels: KernelOps) -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    codes[[0x7F, 0xFF]] = 0  # not a number
    weight = codes.view(torch.float8_e4m3fn)[:, None]
    widened = kernels.linear(
        torch.ones(1, 1), pack_linear(Linear(weight, torch.ones(256)), torch.float32)
    )
    assert torch.equal(widened[0], weight[:, 0].float())


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "w8a16", "w8a8", "fp8"])
@pytest.mark.parametrize("bits", [0x7FC00000, 0x7FFFFFFF, -0x400000])
def test_a_nan_stays_one_and_stays_with_its_token(kernels: KernelOps, kind: str, bits: int) -> None:
    """bits: of a NaN as torch writes it, with every bit set, and as a processor makes it."""
    linear = pack_linear(random_linear(kind, 130, 33), torch.float32)
    x = torch.randn(11, 33, generator=torch.Generator().manual_seed(4))
    expected = kernels.linear(x, linear).clone()
    expected[7] = float("nan")
    x.view(torch.int32)[7, 20] = bits
    assert torch.equal(kernels.linear(x, linear).nan_to_num(1e9), expected.nan_to_num(1e9))


@pytest.mark.parametrize("kind", ["float32", "w8a16", "w8a8", "fp8"])
@pytest.mark.parametrize(("hidden", "dim", "inner"), [(96, 32, 160), (37, 24, 45)])
def test_half_a_layer_in_one_call_equals_its_parts(
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
    step = Step(torch.tensor([1, 0]), torch.tensor([3, 40]), angles.cos(), angles.sin())

    def caches() -> tuple[torch.Tensor, torch.Tensor]:
        padded = -(-dim // 16) * 16
        return torch.zeros(2, kv_heads, dim, capacity), torch.zeros(2, kv_heads, capacity, padded)

    for whole, parts in (
        (kernels.attend(x, layer, caches(), step), Ops.attend(kernels, x, layer, caches(), step)),
        (kernels.feed_forward(x, layer), Ops.feed_forward(kernels, x, layer)),
    ):
        difference = (whole - parts).abs().amax(-1) / parts.abs().max()
        assert (difference < 1e-5).float().mean() > 0.7
        assert difference.max() < (0.05 if kind in ("w8a8", "fp8") else 1e-5)
        assert (whole - x).abs().max() > 0.01


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


@pytest.mark.parametrize("dim", [32, 24])
def test_an_fp8_cache_is_written_like_torchs_cast(kernels: KernelOps, dim: int) -> None:
    padded, n = 32, 40
    keys, values = (
        torch.zeros(size, dtype=torch.uint8) for size in ((2, 1, dim, 128), (2, 1, 128, padded))
    )
    trials = fp8_trials()
    qkv = trials.repeat(8)[: n * 3 * dim].view(1, n, 3 * dim).contiguous()
    k_scale, v_scale = torch.tensor(0.7), torch.tensor(1.3)
    how = Attention(1, 1, dim, 1e-5, None, None, None, k_scale, v_scale)
    unrotated = torch.ones(128, dim // 2), torch.zeros(128, dim // 2)
    kernels.attention(
        qkv, (keys, values), Step(torch.tensor([1]), torch.tensor([10]), *unrotated), how
    )
    _, key, value = qkv[0].split(dim, dim=-1)
    for written, new, scale in (
        (keys[1, 0, :, 10 : 10 + n].T, key, k_scale),
        (values[1, 0, 10 : 10 + n, :dim], value, v_scale),
    ):
        stored = written.contiguous().view(torch.float8_e4m3fn).float()
        assert torch.equal(stored, (new / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float())


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
    see test_quantized.
    """
    export = exported(name)
    plain = open_checkpoint(export.path, max_batch_size=2, max_seq_len=96).forward([0, 1], TOKENS)
    difference = (kernel_engine(export.path).forward([0, 1], TOKENS) - plain).abs().amax(-1)
    assert difference.median() < 1e-5
    assert difference.max() < (export.simulated - export.source).abs().max()


@pytest.mark.parametrize("part", ["key", "value"])
def test_a_nan_in_an_fp8_cache_is_found_by_every_later_token(kernels: KernelOps, part: str) -> None:
    dim, n = 32, 5
    sizes = (2, 1, dim, 128), (2, 1, 128, dim)
    cache = tuple(torch.zeros(size, dtype=torch.uint8) for size in sizes)
    qkv = torch.randn(1, n, 3 * dim, generator=torch.Generator().manual_seed(5))
    qkv[0, 2, dim if part == "key" else 2 * dim] = float("nan")
    one = torch.tensor(1.0)
    how = Attention(1, 1, dim, 1e-5, None, None, None, one, one)
    unrotated = torch.ones(128, dim // 2), torch.zeros(128, dim // 2)

    def step(tokens: torch.Tensor, length: int) -> torch.Tensor:
        where = Step(torch.tensor([1]), torch.tensor([length]), *unrotated)
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
        params=["llama_w8a8", "qwen3_w8a16_kv_fp8", "llama_fp8_kv_fp8", "float32", "bfloat16"]
    )
    def engine(
        self,
        request: pytest.FixtureRequest,
        kernel_engine: MakeEngine,
        exported: Callable[[str], Export],
        tiny_pair: tuple[Path, Path],
    ) -> Iterator[EmbeddedEngine]:
        kind: str = request.param
        plain = kind in ("float32", "bfloat16")
        yield kernel_engine(tiny_pair[0], kind) if plain else kernel_engine(exported(kind).path)
