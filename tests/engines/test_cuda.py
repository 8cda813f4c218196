"""What can be known of the engine's CUDA path without a GPU: its operations on a device whose
tensors hold no numbers (`meta`), and its results where a CPU has the same products.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.engines.contract import StepEngineContract
from tests.support.exports import TOKENS, Export
from toolkit.checkpoints.shape import ModelShape, parse_shape
from toolkit.engines.embedded.engine import (
    EmbeddedEngine,
    allocate_caches,
    eager_engine,
    eager_runner,
    open_checkpoint,
    prepare_weight,
)
from toolkit.engines.embedded.model import (
    FP8_MAX,
    Linear,
    Native,
    TorchOps,
    Weights,
    build,
)
from toolkit.engines.embedded.rope import rope_tables
from toolkit.facts.embedded import LAUNCHES_PER_LAYER

NATIVE = Native(fp8=True, int8=True)
SLOTS, CAPACITY = 8, 4096
# Widths that are no multiple of 16, nor of 8: 52, 40 + 2 x 20, 2 x 90, 301.
ODD = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 301,
    "hidden_size": 52,
    "intermediate_size": 90,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 10,
    "max_position_embeddings": CAPACITY,
}
ALGOS = ("NO_QUANT", "W8A16", "W8A8", "FP8", "FP8 KV")
# (slots, their lengths, tokens that each brings)
STEPS = {
    "one token": ((3,), (20,), (1,)),
    "a batch": ((1, 2, 3), (20, 20, 20), (1, 1, 1)),
    "scattered slots of their own lengths": ((4, 0, 7), (3, 30, 9), (4, 4, 4)),
    "drafts of their own lengths beside a prompt": ((4, 0, 7, 1), (3, 30, 9, 0), (2, 1, 4, 40)),
}


def shape_of(**changes: Any) -> ModelShape:
    return parse_shape({**ODD, **changes}, where="a test")


def tensors_of(shape: ModelShape, algo: str) -> dict[str, torch.Tensor]:
    """The fused tensors of a random model, named as in weights.py."""
    generator = torch.Generator().manual_seed(1)
    hidden, inner, dim = shape.hidden_size, shape.intermediate_size, shape.head_dim
    queries = shape.num_heads * dim
    tensors = {
        "embed.weight": torch.randn(shape.vocab_size, hidden, generator=generator),
        "norm.weight": torch.ones(hidden),
        "lm_head.weight": torch.randn(shape.vocab_size, hidden, generator=generator),
    }
    sizes = {
        "qkv": (queries + 2 * shape.num_kv_heads * dim, hidden),
        "o": (hidden, queries),
        "gate_up": (2 * inner, hidden),
        "down": (hidden, inner),
    }
    for i in range(shape.num_layers):
        for norm in ("input_norm", "post_norm"):
            tensors[f"layers.{i}.{norm}.weight"] = torch.ones(hidden)
        for name, size in sizes.items():
            linear = f"layers.{i}.{name}"
            weight = torch.randn(size, generator=generator) / size[1] ** 0.5
            tensors[f"{linear}.weight"] = weight
            if algo == "NO_QUANT":
                continue
            largest = FP8_MAX if algo.startswith("FP8") else 127
            scale = weight.abs().amax(1) / largest
            codes = weight / scale[:, None]
            is_fp8 = algo.startswith("FP8")
            tensors[f"{linear}.weight"] = (
                codes.to(torch.float8_e4m3fn) if is_fp8 else codes.round().to(torch.int8)
            )
            tensors[f"{linear}.scale"] = scale
            if algo != "W8A16":
                tensors[f"{linear}.input_scale"] = torch.tensor(0.03)
        if algo == "FP8 KV":
            tensors |= {f"layers.{i}.{part}_scale": torch.tensor(0.05) for part in "kv"}
    return tensors


def weights_of(shape: ModelShape, algo: str, native: Native, dtype: torch.dtype) -> Weights:
    tensors = tensors_of(shape, algo)
    prepared = {
        name: prepare_weight(name, tensor, dtype, native) for name, tensor in tensors.items()
    }
    return build(shape, prepared, rope_tables(shape, CAPACITY))


def moved(node: Any, move: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """The same tree of dataclasses, tuples and lists, with every tensor moved."""
    if isinstance(node, torch.Tensor):
        return move(node)
    if isinstance(node, (tuple, list)):
        return type(node)(moved(child, move) for child in node)
    if dataclasses.is_dataclass(node) and not isinstance(node, type):
        parts = {
            field.name: moved(getattr(node, field.name), move) for field in dataclasses.fields(node)
        }
        return dataclasses.replace(node, **parts)
    return node


class Watch(TorchDispatchMode):
    """Refuses what a forward on a GPU must not do, and keeps what it launches and what it sends.

    torch checks on the device `meta` what CUDA demands of torch._scaled_mm, but not what it demands
    of torch._int_mm: that is as in _int_mm_out_cuda (aten/src/ATen/native/cuda/Blas.cpp).
    """

    def __init__(self) -> None:
        super().__init__()
        self.launched: list[tuple[str, torch.Size, torch.dtype]] = []
        self.sent = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with self:  # an operation that consists of others
            parts = func.decompose(*args, **(kwargs or {}))
        if parts is not NotImplemented:
            return parts
        name = func.overloadpacket.__name__
        result = func(*args, **(kwargs or {}))
        where = {
            part.device.type
            for part in tree_leaves((args, kwargs, result))
            if isinstance(part, torch.Tensor)
        }
        if where == {"cpu"}:
            return result  # the host's own numbers
        if name == "_to_copy" and args[0].device.type == "cpu":
            self.sent += 1
            return result
        assert where == {"meta"}, f"{name} mixes host and device"
        if name == "_int_mm":
            rows, weight = args
            assert rows.dtype == weight.dtype == torch.int8
            assert rows.shape[0] > 16
            assert all(size > 0 and size % 8 == 0 for size in weight.shape)
            assert rows.is_contiguous()
            assert weight.t().is_contiguous()
        if not func.is_view:
            is_written = func._schema.is_mutable  # its result is its argument
            size = torch.Size() if is_written else result.shape
            self.launched.append((name, size, result.dtype))
        return result


def watched(
    algo: str, step: str, *, dtype: torch.dtype = torch.bfloat16, layers: int = 2
) -> tuple[torch.Tensor, Watch]:
    """The logits of a step on a device without numbers, and what was launched for them."""
    shape, (slots, lengths, widths) = shape_of(num_hidden_layers=layers), STEPS[step]
    kept = torch.float8_e4m3fn if algo == "FP8 KV" else dtype
    weights, caches = moved(
        (
            weights_of(shape, algo, NATIVE, dtype),
            allocate_caches(shape, SLOTS, CAPACITY, kept),
        ),
        lambda tensor: tensor.to("meta"),
    )
    engine = EmbeddedEngine(
        eager_runner(weights, TorchOps(NATIVE), caches, dtype),
        vocab_size=301,
        max_batch_size=SLOTS,
        max_seq_len=CAPACITY - 64,
        max_step_tokens=64,
        capacity=CAPACITY,
    )
    for slot, length in zip(slots, lengths, strict=True):
        if length:
            engine.forward([slot], torch.zeros((1, length), dtype=torch.int64))
    with Watch() as watch:
        logits = engine.forward_rows(slots, [[7] * width for width in widths], widths)
    return logits, watch


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("algo", ALGOS)
def test_a_forward_on_a_gpu_asks_only_for_what_cuda_has(algo: str, step: str) -> None:
    """No number comes back before the logits, nothing is computed in float64, and a few index
    tensors are sent.
    """
    logits, watch = watched(algo, step)
    assert logits.shape == (sum(STEPS[step][2]), 301)
    assert logits.dtype == torch.float32
    assert not [name for name, _, dtype in watch.launched if dtype == torch.float64]
    names = [name for name, _, _ in watch.launched]
    product = {"W8A8": "_int_mm", "FP8": "_scaled_mm", "FP8 KV": "_scaled_mm"}.get(algo)
    if product is not None:
        assert names.count(product) == 2 * 4  # layers x linears
    groups = len(set(STEPS[step][2]))
    assert watch.sent == 2 + groups * (2 if groups == 1 else 3)


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("algo", ["NO_QUANT", "FP8 KV"])
def test_a_step_copies_no_more_of_the_cache_than_it_sees(algo: str, step: str) -> None:
    """A cache has 8 slots of 4096 positions. The longest sequence has 43, of 2 heads of 10."""
    slots, lengths, widths = STEPS[step]
    seen = len(slots) * max(map(sum, zip(lengths, widths, strict=True))) * 2 * 10
    _, watch = watched(algo, step)
    sizes = [shape for _, shape, _ in watch.launched]
    copies = [size for size in sizes if len(size) == 4 and size[1] == 2 and size[-1] == 10]
    copies = [size for size in copies if size[2] > max(widths)]  # not of the step's own tokens
    assert max((size.numel() for size in copies), default=0) <= seen
    is_view = algo == "NO_QUANT" and step in ("one token", "a batch")
    assert bool(copies) is not is_view  # slots of one length that are consecutive
    assert max(size.numel() for size in sizes) < CAPACITY * 2 * 10  # less than one slot


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("algo", ALGOS)
def test_a_layer_launches_no_more_than_its_cost_says(algo: str, dtype: torch.dtype) -> None:
    counts = [
        len(watched(algo, "one token", dtype=dtype, layers=layers)[1].launched) for layers in (1, 2)
    ]
    assert LAUNCHES_PER_LAYER / 4 < counts[1] - counts[0] <= LAUNCHES_PER_LAYER


@pytest.mark.parametrize("tokens", [1, 5, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_an_int8_product_of_the_device_is_the_exact_one(tokens: int, dtype: torch.dtype) -> None:
    """Bit by bit; a NaN stays one and stays with its token. 2100 columns pass what float32 sums
    exactly.
    """
    generator = torch.Generator().manual_seed(tokens)
    weight = torch.randint(-128, 128, (37, 2100), generator=generator).to(torch.int8)
    scale, pre_scale = (torch.rand(size, generator=generator) + 0.5 for size in (37, 2100))
    x = torch.randn((1, tokens, 2100), generator=generator).to(dtype)
    x[0, tokens // 2, 7] = float("nan")
    linear = Linear(weight, scale, torch.tensor(0.03), pre_scale)
    padded = prepare_weight("w.weight", weight, dtype, NATIVE)
    assert padded.shape == (48, 2112)
    ours = TorchOps(NATIVE).linear(x, dataclasses.replace(linear, weight=padded))
    exact = TorchOps().linear(x, linear)
    assert exact[0, tokens // 2].isnan().all()
    assert int(exact.isnan().sum()) == 37
    assert torch.equal(ours.nan_to_num(1e9), exact.nan_to_num(1e9))


@pytest.mark.parametrize(("algo", "tolerance"), [("W8A16", 0.0), ("W8A8", 0.0), ("FP8", 1e-4)])
def test_an_engine_over_the_devices_products_follows_the_plain_one(
    algo: str, tolerance: float
) -> None:
    """INT8 is the same exactly; FP8's sums have another order."""
    shape, logits = shape_of(), []
    for native in (Native(), NATIVE):
        engine = eager_engine(
            shape,
            tensors_of(shape, algo),
            kv_dtype="float32",
            dtype="float32",
            max_batch_size=2,
            max_seq_len=96,
            native=native,
        )
        logits.append(engine.forward([1, 0], TOKENS))
    assert logits[0].std() > 0.1
    assert (logits[0] - logits[1]).abs().median() <= tolerance
    assert (logits[0] - logits[1]).abs().max() <= 100 * tolerance


needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.gpu
@needs_gpu
class TestOnAGpu(StepEngineContract):
    """Products of another number of rows are summed in another order."""

    tolerance = 0.05

    @pytest.fixture(params=["plain", "llama_w8a8", "qwen3_w8a16_kv_fp8", "llama_fp8_kv_fp8"])
    def engine(
        self,
        request: pytest.FixtureRequest,
        exported: Callable[[str], Export],
        tiny_pair: tuple[Path, Path],
    ) -> Iterator[EmbeddedEngine]:
        kind: str = request.param
        path = tiny_pair[0] if kind == "plain" else exported(kind).path
        yield open_checkpoint(path, max_batch_size=3, max_seq_len=96, device="cuda")


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("name", ["llama_w8a8", "qwen3_w8a16_kv_fp8"])
def test_a_gpu_follows_the_cpu(name: str, exported: Callable[[str], Export]) -> None:
    """Integer products are the same; sums of floats have another order, and a code on the edge may
    flip by that: within what quantization itself costs.
    """
    export = exported(name)
    here, there = (
        open_checkpoint(export.path, max_batch_size=2, max_seq_len=96, device=device)
        for device in ("cpu", "cuda")
    )
    difference = (here.forward([0, 1], TOKENS) - there.forward([0, 1], TOKENS).cpu()).abs()
    cost = (export.simulated - export.source).abs().max()
    assert difference.median() < 1e-4
    assert difference.max() < cost
