"""Engine directories: built, loaded, and refused when they are not what was built. Two are
compiled, once per run.
"""

from __future__ import annotations

import gc
import hashlib
import json
import os
import shutil
import statistics
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch._inductor.runtime.cache_dir_utils import cache_dir

from tests.engines.contract import StepEngineContract
from tests.support.checkpoints import write_checkpoint
from tests.support.exports import TOKENS, Export
from tests.support.runtimes import make_request, make_runtime, serve_one
from tests.support.step_engines import chained
from toolkit.engines.embedded.backend import INT8_HEAD
from toolkit.engines.embedded.compile import private_cache
from toolkit.engines.embedded.directory import FORMAT
from toolkit.engines.embedded.engine import EmbeddedEngine, open_checkpoint
from toolkit.engines.embedded.kernels import NATIVE, KernelOps, build_library, load_library
from toolkit.engines.embedded.package import PackagedEngine
from toolkit.engines.registry import backend, loader
from toolkit.engines.stage import compile_engine, fingerprint
from toolkit.errors import BackendUnavailable, CheckpointError, StageError, UsageError
from toolkit.interfaces import Burst, Chain, EngineSpec
from toolkit.pipeline.toolchain import compiler_path, instruction_set
from toolkit.records.build import CompiledEngine, QuantizedCheckpoint
from toolkit.words import Role, SamplingRule

needs_compiler = pytest.mark.skipif(compiler_path() is None, reason="no C++ compiler")


def spec(**changes: object) -> EngineSpec:
    settings = {
        "role": "target",
        "max_batch_size": 3,
        "max_input_len": 64,
        "max_seq_len": 96,
        "max_draft_len": 3,
    }
    return EngineSpec(**{**settings, **changes})  # type: ignore[arg-type]


def build(checkpoint: Path, out_dir: Path, **changes: object) -> CompiledEngine:
    record = QuantizedCheckpoint("target", checkpoint, None, None, "", 258, 0, None, ())
    return compile_engine("torch", record, spec(**changes), out_dir, lambda done, total, what: None)


@pytest.fixture(scope="module")
def quantized_engine(
    exported: Callable[[str], Export], tmp_path_factory: pytest.TempPathFactory
) -> CompiledEngine:
    return build(
        exported("qwen2_w8a8_kv_fp8").path, tmp_path_factory.mktemp("w8a8"), mode="compiled"
    )


@pytest.fixture(scope="module")
def plain_engine(tmp_path_factory: pytest.TempPathFactory) -> CompiledEngine:
    source = write_checkpoint(tmp_path_factory.mktemp("source"), family="mistral", sliding_window=9)
    return build(source, tmp_path_factory.mktemp("plain"), mode="auto", dtype="bfloat16")


@pytest.fixture(scope="module")
def eager_engine(
    tiny_pair: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> CompiledEngine:
    return build(tiny_pair[0], tmp_path_factory.mktemp("eager"), mode="eager")


@pytest.fixture(scope="module")
def loaded(quantized_engine: CompiledEngine) -> PackagedEngine:
    return loader("torch").load(quantized_engine.path)  # type: ignore[return-value]


@needs_compiler
@pytest.mark.slow
class TestCompiledContract(StepEngineContract):
    """INT8 linears and an FP8 cache through AOTInductor: still the same bits for any number of
    tokens.
    """

    @pytest.fixture
    def engine(self, loaded: EmbeddedEngine) -> EmbeddedEngine:
        return loaded


@needs_compiler
@pytest.mark.slow
def test_the_layers_of_an_engine_are_held_as_long_as_it_is_loaded(
    quantized_engine: CompiledEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    let_go: list[int] = []
    monkeypatch.setattr(KernelOps, "let_go", lambda self, number: let_go.append(number))
    first, second = (loader("torch").load(quantized_engine.path) for _ in range(2))
    expected = first.forward([0], TOKENS[:1])
    del first
    gc.collect()
    assert len(let_go) == 1
    assert torch.equal(second.forward([0], TOKENS[:1]), expected)
    del second
    gc.collect()
    assert len(set(let_go)) == 2


@needs_compiler
@pytest.mark.slow
def test_compiled_equals_the_kernels_step_by_step(
    loaded: EmbeddedEngine,
    kernel_engine: Callable[..., EmbeddedEngine],
    exported: Callable[[str], Export],
) -> None:
    """What AOTInductor generated is the last norm: its last bits may differ."""
    loaded.rewind([0, 1], [0, 0])
    ours = loaded.forward([0, 1], TOKENS)
    difference = (
        (ours - kernel_engine(exported("qwen2_w8a8_kv_fp8").path).forward([0, 1], TOKENS))
        .abs()
        .amax(-1)
    )
    assert difference.median() < 1e-5
    assert difference.max() < 0.1


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("temperatures", [(0.0, 0.0, 0.0), (0.9, 0.0, 1e-30), (0.5, 1.0, 2.0)])
@pytest.mark.parametrize("raced", [(), (0,), (0, 1, 2)])
@pytest.mark.parametrize("filters", [(0, 1.0), (9, 1.0), (0, 0.7), (200, 0.95)])
def test_a_chain_chooses_as_single_forwards_do(
    loaded: PackagedEngine,
    temperatures: tuple[float, ...],
    raced: tuple[int, ...],
    filters: tuple[int, float],
) -> None:
    """Rows of other widths and counts, of which some are drawn: the same tokens, and the same
    probabilities up to their rounding.
    """
    slots, rows, counts = [2, 0, 1], [list(b"def "), list(b"x"), list(b"return")], [5, 3, 1]
    random = np.random.default_rng(1)
    uniforms = random.random((3, 5)).tolist()
    noise = 1 / random.standard_exponential((3, 5, loaded.vocab_size)).astype(np.float32)
    uniforms[0][:2] = [0.0, np.nextafter(1.0, 0.0)]
    chains = [
        Chain(
            slots[row],
            rows[row],
            counts[row],
            temperatures[row],
            uniforms[row][: counts[row]],
            noise[row, : counts[row]] if row in raced else None,
            *filters,
        )
        for row in range(3)
    ]

    def begin() -> None:
        for slot in range(3):
            loaded.rewind([slot], [0])
            loaded.forward([slot], torch.tensor([list(b"class A")]))

    begin()
    expected_ids, expected = chained(loaded, chains)
    begin()
    ids, probabilities = loaded.forward_chain(chains)
    assert ids == expected_ids
    lengths = [7 + len(row) + count - 1 for row, count in zip(rows, counts, strict=True)]
    assert [loaded.length(slot) for slot in slots] == lengths
    assert (probabilities is None) == (expected is None)
    for index, count in enumerate(counts):
        if probabilities is None or expected is None or not chains[index].is_drawn:
            continue
        for depth in range(count):
            assert probabilities[index, depth, ids[index][depth]] > 0
            np.testing.assert_allclose(
                probabilities[index, depth], expected[index, depth], rtol=1e-4, atol=1e-30
            )


@needs_compiler
@pytest.mark.slow
def test_tokens_of_a_chain_are_drawn_by_their_probabilities(loaded: PackagedEngine) -> None:
    """With evenly spaced numbers, each token comes as often as its probability says, up to one."""
    many, counts = 2000, np.zeros(loaded.vocab_size)
    for index in range(many):
        loaded.rewind([0], [0])
        ids, probabilities = loaded.forward_chain(
            [Chain(0, list(b"def"), 1, 1.5, [(index + 0.5) / many])]
        )
        counts[ids[0][0]] += 1
    assert probabilities is not None
    assert np.abs(counts - many * probabilities[0, 0]).max() <= 1.01


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_row_without_finite_logits_chooses_nothing_and_spoils_no_other(
    plain_engine: CompiledEngine, temperature: float
) -> None:
    engine = loader("torch").load(plain_engine.path)
    assert isinstance(engine, PackagedEngine)
    chains = [Chain(slot, list(b"abc"), 4, temperature, [0.3] * 4) for slot in (0, 1)]
    for slot in (0, 1):
        engine.forward([slot], torch.tensor([list(b"text")]))
    whole, _ = engine.forward_chain(chains)
    assert whole[0] == whole[1]
    engine.rewind([0, 1], [4, 4])
    for cache in engine._caches:
        cache[1, :, 1] = float("nan")  # of values: the second position, or pair of positions
    ids, _ = engine.forward_chain(chains)
    assert ids == [whole[0], [-1] * 4]


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize(
    ("slots", "rows", "counts", "message"),
    [
        ([0, 1], [[1], [2]], [1, 2], "to fall"),
        ([0, 1], [[1], [2]], [1, 0], "1 or more"),
        ([0], [[]], [1], "tokens per sequence"),
        ([0, 0], [[1], [1]], [1, 1], "one distinct slot"),
        ([9], [[1]], [1], "not all in this engine"),
        ([0], [[1]], [200], "do not fit max_seq_len"),
    ],
)
def test_a_chain_that_does_not_fit_is_refused(
    loaded: PackagedEngine,
    slots: list[int],
    rows: list[list[int]],
    counts: list[int],
    message: str,
) -> None:
    loaded.rewind(range(3), [0] * 3)
    with pytest.raises(ValueError, match=message):
        loaded.forward_chain([Chain(*each) for each in zip(slots, rows, counts, strict=True)])
    assert loaded.length(0) == 0


def run_burst(
    target: PackagedEngine,
    draft: PackagedEngine | None,
    prompt: list[int],
    **settings: Any,
) -> list[list[int]]:
    """The rows of a burst behind a prompt, each as [drafted, accepted, drafts..., token]. asked:
    how many tokens a step is to draft; as many as it may, if that is not stated.
    """
    for engine in (target, draft):
        if engine is not None:
            engine.rewind([0], [0])
    target.forward([0], torch.tensor([prompt[:-1]]))
    steps = torch.zeros((settings.pop("most", 40), 11), dtype=torch.int64)
    unread = prompt if draft is not None else prompt[-1:]
    defaults = {"draft_len": 0 if draft is None else 4, "room": 30, "end_ids": (), "max_ns": 10**12}
    flags = torch.tensor([0, 0, settings.pop("asked", 4)])
    burst = Burst(0, unread, **{**defaults, **settings}, steps=steps, flags=flags)
    count, _ = target.burst(draft, burst)
    assert flags[1] == count
    rows = [[*row[1:3], *row[6 : 7 + row[1]]] for row in steps[:count].tolist()]
    tokens = [token for row in rows for token in [*row[2 : 2 + row[1]], row[-1]]]
    assert target.length(0) == len(prompt) + len(tokens) - 1
    if draft is not None and rows:
        assert len(prompt) + len(tokens) - 2 <= draft.length(0) < len(prompt) + len(tokens)
    return rows


def tokens_of(rows: list[list[int]]) -> list[int]:
    return [token for row in rows for token in [*row[2 : 2 + row[1]], row[-1]]]


@needs_compiler
@pytest.mark.slow
def test_a_burst_takes_the_steps_of_single_forwards(
    loaded: PackagedEngine, quantized_engine: CompiledEngine, plain_engine: CompiledEngine
) -> None:
    prompt, room = list(b"def read"), 30
    loaded.rewind([0], [0])
    (expected,), _ = chained(loaded, [Chain(0, prompt, room)])
    plain = run_burst(loaded, None, prompt)
    assert plain == [[0, 0, token] for token in expected]

    same = loader("torch").load(quantized_engine.path)
    other = loader("torch").load(plain_engine.path)
    assert isinstance(same, PackagedEngine) and isinstance(other, PackagedEngine)
    assert loaded.bursts_with(same) and not loaded.bursts_with(object())  # type: ignore[arg-type]
    for draft in (same, other):
        assert tokens_of(run_burst(loaded, draft, prompt)) == expected
    # A draft that is the target: all is accepted, but where there is no more room.
    rows = run_burst(loaded, same, prompt)
    assert [row[:2] for row in rows] == [[4, 4]] * 6
    rows = run_burst(loaded, same, prompt, asked=2)
    assert [row[:2] for row in rows] == [[2, 2]] * 10 and tokens_of(rows) == expected


@needs_compiler
@pytest.mark.slow
def test_a_burst_ends_where_it_has_to(
    loaded: PackagedEngine, quantized_engine: CompiledEngine
) -> None:
    prompt = list(b"def read")
    whole = tokens_of(run_burst(loaded, None, prompt))
    end = next(index for index, token in enumerate(whole) if token not in whole[:index] and index)
    draft = loader("torch").load(quantized_engine.path)
    assert isinstance(draft, PackagedEngine)
    for engine in (None, draft):
        ended = tokens_of(run_burst(loaded, engine, prompt, end_ids=(whole[end],)))
        assert whole[end] in ended and ended == whole[: len(ended)]
        assert len(ended) <= end + 5
        assert len(run_burst(loaded, engine, prompt, most=3)) == 3
        assert tokens_of(run_burst(loaded, engine, prompt, room=7)) == whole[:7]
        assert run_burst(loaded, engine, prompt, max_ns=0) == []
    with pytest.raises(ValueError, match="do not fit max_seq_len"):
        run_burst(loaded, None, prompt, room=200)
    loaded.rewind([0], [0])
    loaded.forward([0], torch.tensor([prompt[:-1]]))
    steps, flags = torch.zeros((4, 7), dtype=torch.int64), torch.zeros(3, dtype=torch.int64)
    burst = Burst(0, prompt[-1:], 0, 9, (), 10**12, steps, flags)
    flags[0] = 1
    assert loaded.burst(None, burst) == (0, False)
    flags[0] = 0
    for cache in loaded._caches:
        cache[0, :, 2] = 0x7F  # FP8's NaN
    assert loaded.burst(None, burst) == (1, False)
    assert steps[0, 6] == -1


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("acceptance", ["rejection", "coupled"])
@pytest.mark.parametrize("temperature", [0.3, 1.0])
@pytest.mark.parametrize(
    "filters", [{}, {"top_k": 20}, {"top_p": 0.8}, {"top_k": 90, "top_p": 0.95}]
)
def test_sampled_bursts_have_the_texts_of_single_steps(
    loaded: PackagedEngine,
    plain_engine: CompiledEngine,
    acceptance: SamplingRule,
    temperature: float,
    filters: dict[str, Any],
) -> None:
    """Rules of Python and of C++ round differently, which no text with a seed may show."""
    other = loader("torch").load(plain_engine.path)
    for engine in (loaded, other):
        engine.rewind(range(3), [0] * 3)
    for draft in (None, other):
        runtimes = [make_runtime(loaded, draft, max_draft_len=3) for _ in range(2)]
        bursting, stepping = runtimes
        stepping._bursts = None
        steps = 0
        for seed in range(20):
            fields = {"temperature": temperature, "seed": seed, "acceptance": acceptance, **filters}
            request = make_request(tuple(b"def read"), 40, **fields)
            with mock.patch.object(bursting, "_verify_rows", wraps=bursting._verify_rows) as single:
                outcome = serve_one(bursting, request)
            steps += outcome.stats.verify_steps - single.call_count
            assert outcome.ids == serve_one(stepping, request).ids
        assert steps > 200
        for runtime in runtimes:
            runtime.close()


@needs_compiler
@pytest.mark.slow
def test_other_threads_run_during_a_forward(loaded: EmbeddedEngine) -> None:
    """A thread that wakes up every 0.1 ms or so notes the times at which it gets the interpreter's
    lock. Were the lock held during a forward, there would be at most one within it: where the
    forward ends, and the lock is given away before the end is noted here.

    On a busy machine the thread may get no core for a while: then once more.
    """
    medians = [statistics.median(times_within_forwards(loaded))]
    while medians[-1] < 2:
        assert len(medians) < 20, medians
        medians.append(statistics.median(times_within_forwards(loaded)))


def times_within_forwards(engine: EmbeddedEngine) -> list[int]:
    """How often another thread ran within each of 100 forwards."""
    times_ns, is_over = [], threading.Event()

    def note_times() -> None:
        while not is_over.is_set():
            times_ns.append(time.perf_counter_ns())
            time.sleep(0)

    chunk = torch.zeros((3, engine.max_step_tokens), dtype=torch.int64)
    spans_ns = []
    thread = threading.Thread(target=note_times)
    thread.start()
    try:
        for _ in range(100):
            engine.rewind([0, 1, 2], [0, 0, 0])
            began_ns = time.perf_counter_ns()
            engine.forward([0, 1, 2], chunk)
            spans_ns.append((began_ns, time.perf_counter_ns()))
    finally:
        is_over.set()
        thread.join()
        engine.rewind([0, 1, 2], [0, 0, 0])
    return [sum(began < at < ended for at in times_ns) for began, ended in spans_ns]


@needs_compiler
@pytest.mark.slow
def test_auto_compiles_where_there_is_a_compiler(plain_engine: CompiledEngine) -> None:
    """A bfloat16 model with a sliding window; bfloat16 keeps 8 bits, so logits of order 3 agree
    to some hundredths.
    """
    assert (plain_engine.mode, plain_engine.notes) == ("compiled", ())
    source = plain_engine.path
    assert {"config.json", "weights.safetensors", "decode.pt2", "kernels.so", "tokenizer.json"} <= {
        p.name for p in source.iterdir()
    }
    engine = loader("torch").load(source)
    config = json.loads((source / "config.json").read_text())
    assert config["toolkit"]["mode"] == "compiled"
    first = engine.forward([0], TOKENS[:1, :30])
    singly = [engine.forward([1], TOKENS[:1, i : i + 1]).clone() for i in range(30)]
    assert torch.equal(first, torch.cat(singly, dim=1))


@needs_compiler
@pytest.mark.slow
def test_int8_weights_stay_int8(
    quantized_engine: CompiledEngine, exported: Callable[[str], Export]
) -> None:
    from safetensors.torch import load_file

    weights = load_file(quantized_engine.path / "weights.safetensors")
    assert {
        weights[f"layers.0.{name}.weight"].dtype for name in ("qkv", "o", "gate_up", "down")
    } == {torch.int8}
    assert (
        quantized_engine.weight_bytes
        < 1.1 * (exported("qwen2_w8a8_kv_fp8").path / "model.safetensors").stat().st_size
    )
    # The package holds code: no weight is in it, whatever their number.
    assert quantized_engine.quant_algo == "W8A8_SQ_PER_CHANNEL"
    assert quantized_engine.kv_cache_quant_algo == "FP8"


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize(
    ("role", "mode", "is_rounded"),
    [("draft", "compiled", True), ("draft", "eager", False), ("target", "compiled", False)],
)
def test_the_head_of_an_int8_draft_is_int8_where_it_is_compiled(
    role: Role,
    mode: str,
    is_rounded: bool,
    exported: Callable[[str], Export],
    kernel_engine: Callable[..., EmbeddedEngine],
    tmp_path: Path,
) -> None:
    """Rounding to 1/254 of a row's largest weight moves the logits by a few thousandths of what
    they vary by.
    """
    from safetensors.torch import load_file

    source = exported("llama_w8a8").path
    built = build(source, tmp_path, role=role, mode=mode)
    weights = load_file(tmp_path / "weights.safetensors")
    assert (INT8_HEAD in built.notes) == is_rounded
    assert ("lm_head.scale" in weights) == is_rounded
    assert weights["embed.weight"].is_floating_point()
    logits = loader("torch").load(tmp_path).forward([0, 1], TOKENS)
    unrounded = kernel_engine(source, "float32").forward([0, 1], TOKENS)
    moved = float((logits - unrounded).abs().median() / unrounded.std())
    assert (1e-4 < moved < 1e-2) if is_rounded else moved < 1e-4


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("mode", ["compiled", "eager"])
def test_keys_and_values_may_be_bfloat16_beside_float32(
    mode: str,
    tiny_pair: tuple[Path, Path],
    kernel_engine: Callable[..., EmbeddedEngine],
    tmp_path: Path,
) -> None:
    """Half the memory; the logits move by no more than the rounding of keys and values does. What
    eager attention computes is what kernels do that do not multiply in bfloat16.
    """
    built = build(tiny_pair[0], tmp_path, mode=mode, kv_cache_dtype="bfloat16")
    assert (built.dtype, built.kv_dtype, built.mode) == ("float32", "bfloat16", mode)
    ours = loader("torch").load(tmp_path)
    assert isinstance(ours, EmbeddedEngine)
    assert {cache.dtype for cache in ours._caches} == {torch.bfloat16}
    logits = ours.forward([0, 1], TOKENS)
    march = NATIVE if mode == "compiled" else "x86-64-v3" if "avx2" in instruction_set() else NATIVE
    kernels = load_library(tmp_path / "other.so", build_library(tmp_path / "other.so", march))
    same = kernel_engine(tiny_pair[0], "float32", "bfloat16", kernels).forward([0, 1], TOKENS)
    unrounded = kernel_engine(tiny_pair[0], "float32").forward([0, 1], TOKENS)
    assert (logits - same).abs().median() < 1e-5
    moved = (logits - unrounded).abs()
    assert 1e-5 < moved.median() < 1e-2
    assert moved.max() < 0.1


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize(("mode", "model"), [("compiled", "llama_w8a8"), ("eager", "tiny")])
def test_keys_and_values_may_be_fp8_beside_other_weights(
    mode: str,
    model: str,
    tiny_pair: tuple[Path, Path],
    exported: Callable[[str], Export],
    kernel_engine: Callable[..., EmbeddedEngine],
    tmp_path: Path,
) -> None:
    """A byte each. E4M3 keeps 3 bits behind the leading one where BF16 keeps 7, so logits move by
    up to 16 times as much; here by 11 times, 0.01 (median) and 0.08 (most) of logits that spread by
    0.7. Numbers below 2^-6 lose more: twice as much is allowed.
    """
    source = tiny_pair[0] if model == "tiny" else exported(model).path
    built = build(source, tmp_path, mode=mode, kv_cache_dtype="fp8")
    assert (built.dtype, built.kv_dtype, built.mode) == ("float32", "fp8", mode)
    assert built.kv_cache_quant_algo is None and built.has_fp8_kv_at_1
    assert any("scale 1" in note for note in built.notes)
    ours = loader("torch").load(tmp_path)
    assert isinstance(ours, EmbeddedEngine)
    unrounded, bf16, same = (
        kernel_engine(source, "float32", kv) for kv in (None, "bfloat16", "fp8")
    )
    sizes = [cache.nbytes for cache in ours._caches]
    assert {cache.itemsize for cache in ours._caches} == {1}
    if mode == "compiled":
        assert 4 * sum(sizes) == sum(cache.nbytes for cache in unrounded._caches)
    logits, exact, coarse, kernels = (
        engine.forward([0, 1], TOKENS) for engine in (ours, unrounded, bf16, same)
    )
    assert (logits - kernels).abs().median() < 1e-5
    moved, by_bf16 = (logits - exact).abs(), (coarse - exact).abs()
    assert by_bf16.median() < moved.median() < 32 * by_bf16.median()
    assert moved.max() < 32 * by_bf16.max()
    assert moved.max() < 0.25 * exact.std()


@pytest.mark.slow
def test_a_checkpoint_s_own_scales_are_kept(
    exported: Callable[[str], Export], tmp_path: Path
) -> None:
    source = exported("qwen2_w8a8_kv_fp8").path
    built = build(source, tmp_path, mode="eager", kv_cache_dtype="fp8")
    assert (built.kv_dtype, built.kv_cache_quant_algo) == ("fp8", "FP8")
    assert not built.has_fp8_kv_at_1 and built.notes == ()


def test_config_has_the_shape_of_an_engine_directory(eager_engine: CompiledEngine) -> None:
    config = json.loads((eager_engine.path / "config.json").read_text())
    assert set(config) == {"version", "pretrained_config", "build_config", "toolkit"}
    assert config["pretrained_config"]["quantization"]["quant_algo"] is None
    assert config["pretrained_config"]["mapping"] == {
        "world_size": 1,
        "tp_size": 1,
        "pp_size": 1,
        "cp_size": 1,
    }
    assert config["build_config"]["max_draft_len"] == 3
    assert config["build_config"]["speculative_decoding_mode"] == 2  # DRAFT_TOKENS_EXTERNAL
    assert {"tokenizer.json", "tokenizer_config.json"} <= set(config["toolkit"]["files"])


def test_eager_engine_loads_to_the_checkpoints_own_logits(
    eager_engine: CompiledEngine, tiny_pair: tuple[Path, Path]
) -> None:
    engine = loader("torch").load(eager_engine.path)
    plain = open_checkpoint(tiny_pair[0], max_batch_size=3, max_seq_len=96)
    assert torch.equal(engine.forward([0, 1], TOKENS), plain.forward([0, 1], TOKENS))


@pytest.mark.parametrize(("asked", "tokens"), [(None, 64), (16, 16), (2, 4)])
def test_an_engine_takes_chunks_as_long_as_asked_and_all_drafts(
    tiny_pair: tuple[Path, Path], tmp_path: Path, asked: int | None, tokens: int
) -> None:
    built = build(tiny_pair[0], tmp_path, mode="eager", prefill_chunk_len=asked)
    engine = loader("torch").load(built.path)
    assert engine.max_step_tokens == tokens
    assert engine.forward([0], TOKENS[:1, :tokens]).shape[1] == min(tokens, TOKENS.shape[1])


def test_inductors_cache_is_private_while_it_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    with private_cache():
        folder = Path(cache_dir())
        assert folder.name.startswith("toolkit-inductor-")
        assert folder.stat().st_mode & 0o777 == 0o700
    assert "TORCHINDUCTOR_CACHE_DIR" not in os.environ
    with private_cache():
        assert Path(cache_dir()) == folder  # inductor remembers files in it


@pytest.fixture
def copied(eager_engine: CompiledEngine, tmp_path: Path) -> Path:
    shutil.copytree(eager_engine.path, tmp_path / "engine")
    return tmp_path / "engine"


def edit(engine_dir: Path, change: Callable[[dict[str, Any]], object]) -> None:
    config = json.loads((engine_dir / "config.json").read_text())
    change(config)
    (engine_dir / "config.json").write_text(json.dumps(config))


def make_compiled(engine_dir: Path, built_with: dict[str, str]) -> None:
    """Let an engine say that it is compiled, with code that nobody can load."""
    digests = {}
    for name in ("decode.pt2", "kernels.so"):
        (engine_dir / name).write_bytes(b"x")
        digests[name] = f"sha256:{hashlib.sha256(b'x').hexdigest()}"

    def change(config: dict[str, Any]) -> None:
        config["toolkit"].update(mode="compiled", built_with=built_with)
        config["toolkit"]["files"].update(digests)

    edit(engine_dir, change)


@pytest.mark.parametrize("name", ["weights.safetensors", "decode.pt2", "kernels.so"])
def test_a_file_that_is_loaded_has_to_have_a_digest(copied: Path, name: str) -> None:
    make_compiled(copied, {})
    edit(copied, lambda config: config["toolkit"]["files"].pop(name))
    with pytest.raises(StageError, match=rf"{name} is not in its list of files, so it has no"):
        loader("torch").load(copied)


@pytest.mark.parametrize("name", ["weights.safetensors", "tokenizer.json"])
def test_changed_file_is_not_loaded(copied: Path, name: str) -> None:
    data = bytearray((copied / name).read_bytes())
    data[len(data) // 2] ^= 1
    (copied / name).write_bytes(bytes(data))
    with pytest.raises(StageError, match=rf"{name}: the file changed after the engine was built"):
        loader("torch").load(copied)


def test_missing_file_is_named(copied: Path) -> None:
    (copied / "weights.safetensors").unlink()
    with pytest.raises(StageError, match=r"weights.safetensors: a file of the engine is missing"):
        loader("torch").load(copied)


def test_folder_without_config_is_no_engine(tmp_path: Path) -> None:
    with pytest.raises(StageError, match="not an engine directory"):
        loader("torch").load(tmp_path)


def test_engine_of_another_format_is_refused(copied: Path) -> None:
    edit(copied, lambda config: config["toolkit"].update(format=99))
    with pytest.raises(StageError, match=f"engine format 99 is not {FORMAT}"):
        loader("torch").load(copied)


def test_engine_for_another_cpu_is_refused(copied: Path) -> None:
    foreign = {
        "instruction_set": "avx2 avx1024",
        "cpu_capability": "AVX512",
        "torch": torch.__version__,
    }
    make_compiled(copied, foreign)
    with pytest.raises(StageError, match="lacks avx1024"):
        loader("torch").load(copied)


def test_engine_of_another_torch_is_refused(copied: Path) -> None:
    from toolkit.pipeline.toolchain import instruction_set

    here = {
        "instruction_set": " ".join(instruction_set()),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
    }
    older = {**here, "torch": "2.1.0"}
    make_compiled(copied, older)
    with pytest.raises(StageError, match=r"compiled with torch 2\.1\.0"):
        loader("torch").load(copied)


def test_without_a_compiler_auto_is_eager_and_says_so(
    tiny_pair: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    engine = build(tiny_pair[0], tmp_path, mode="auto")
    assert (engine.mode, engine.notes) == ("eager", ("eager: no C++ compiler was found",))
    assert json.loads((tmp_path / "config.json").read_text())["toolkit"]["notes"] == [
        "eager: no C++ compiler was found"
    ]
    loader("torch").load(tmp_path)


def test_compiled_without_a_compiler_is_an_error_with_its_hint(
    tiny_pair: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(StageError, match="install g"):
        build(tiny_pair[0], tmp_path, mode="compiled")


def test_a_failing_compiler_is_quoted(
    tiny_pair: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "broken-c++"
    broken.write_text(
        '#!/bin/sh\n[ "$1" = --version ] && echo "broken 1.0" && exit 0\necho "fatal: out of'
        ' cheese" >&2\nexit 1\n'
    )
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", str(broken))
    with pytest.raises(StageError, match=r"fatal: out of cheese[\s\S]*engine.mode: eager"):
        build(tiny_pair[0], tmp_path / "engine", mode="compiled")


def test_float64_cannot_be_compiled(tiny_pair: tuple[Path, Path], tmp_path: Path) -> None:
    with pytest.raises(StageError, match="float64 runs eager"):
        build(tiny_pair[0], tmp_path, mode="compiled", dtype="float64")


def test_checkpoint_without_config_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json"):
        build(tmp_path, tmp_path / "out")


def test_unknown_kind_is_refused_with_the_known_ones() -> None:
    with pytest.raises(UsageError, match="known: torch"):
        backend("abacus")


def test_fingerprint_is_stable_and_knows_what_matters() -> None:
    assert fingerprint("torch", spec()) == fingerprint("torch", spec())
    assert fingerprint("torch", spec(mode="eager")) == {
        "mode": "eager",
        "format": str(FORMAT),
        "torch": torch.__version__,
        "device": "cpu",
    }
    if compiler_path() is not None:
        assert {"compiler", "instruction_set", "kernels"} <= set(
            fingerprint("torch", spec(mode="compiled"))
        )


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a CUDA device")
def test_gpu_engine_without_a_gpu_is_refused(copied: Path) -> None:
    edit(copied, lambda config: config["toolkit"].update(device="cuda"))  # type: ignore[attr-defined]
    with pytest.raises(BackendUnavailable, match="CUDA"):
        loader("torch").load(copied)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_fp8_on_a_gpu_follows_the_simulation(
    exported: Callable[[str], Export], tmp_path: Path
) -> None:
    """Native products sum in another order, and codes on the edge may flip: within what
    quantization itself costs.
    """
    export = exported("llama_fp8_kv_fp8")
    built = build(export.path, tmp_path, device="cuda")
    logits = loader("torch").load(built.path).forward([0, 1], TOKENS).cpu()
    difference = (logits - export.simulated).abs().amax(-1)
    cost = (export.simulated - export.source).abs().max()
    assert difference.median() < cost / 4
    assert difference.max() < 2 * cost
