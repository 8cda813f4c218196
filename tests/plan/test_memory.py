"""The computed sizes agree with published figures and with the bytes of real checkpoints."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.checkpoints import write_checkpoint
from tests.support.deployments import FP8, config_of, subject
from toolkit.checkpoints.quantized import open_checkpoint
from toolkit.checkpoints.reader import read_index
from toolkit.checkpoints.shape import ModelShape, linear_params, parse_shape, read_shape
from toolkit.engines.embedded.package import prepare
from toolkit.engines.embedded.weights import fuse, int8_head
from toolkit.facts.embedded import PREFILL_TOKENS, gains_from_gpu
from toolkit.facts.gpus import GPUS
from toolkit.facts.models import CONFIGS
from toolkit.plan import memory
from toolkit.plan.make import make_plan
from toolkit.plan.memory import (
    judge_memory,
    kv_bytes_per_token,
    memory_of,
    parameters,
    weight_bytes,
)
from toolkit.quantize import quality, single_layers
from toolkit.words import ComputeDtype, KvDtype

HOST = 10**12
# Parameters as the model cards state them, in billions.
PUBLISHED = {
    "meta-llama/Llama-3.3-70B-Instruct": 70.6,
    "meta-llama/Llama-3.1-405B-Instruct": 406.0,
    "meta-llama/Llama-3.1-8B-Instruct": 8.03,
    "meta-llama/Llama-3.2-3B-Instruct": 3.21,
    "meta-llama/Llama-3.2-1B-Instruct": 1.24,
    "Qwen/Qwen2.5-72B-Instruct": 72.7,
    "Qwen/Qwen2.5-0.5B-Instruct": 0.494,
    "Qwen/Qwen3-32B": 32.8,
    "Qwen/Qwen3-0.6B": 0.6,
    "mistralai/Mistral-Large-Instruct-2407": 123.0,
    "mistralai/Mistral-7B-Instruct-v0.3": 7.25,
    "naver-hyperclovax/HyperCLOVAX-SEED-Text-Instruct-0.5B": 0.57,
}


def shape(name: str) -> ModelShape:
    return parse_shape(CONFIGS[name], where=name)


def total(kind: str, stage: str, **keys: object) -> int:
    stages, _ = memory_of(subject(kind, **keys), HOST)
    return next(memory.total_bytes for memory in stages if memory.stage == stage)


@pytest.mark.parametrize("name, billions", PUBLISHED.items())
def test_parameters_are_those_of_the_model_card(name: str, billions: float) -> None:
    assert parameters(shape(name)) / 1e9 == pytest.approx(billions, rel=0.01)


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_bytes_are_those_of_a_real_checkpoint(family: str, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "model", family=family)
    on_disk = sum(info.num_bytes for info in read_index(folder).values())
    model = read_shape(folder)
    # Biases and norms of q and k are left out; at this tiny size they are about a hundredth.
    assert weight_bytes(model, "NO_QUANT", dtype=model.dtype) == pytest.approx(on_disk, rel=0.03)


def test_llama_70b_in_fp8_with_its_draft_fits_one_h200() -> None:
    """As published: NVIDIA served this pair on one H200."""
    plan = make_plan(config_of("pytorch"))
    assert plan.possible
    assert plan.serving is not None and plan.serving.sequences >= 4


def test_llama_70b_in_bf16_does_not_fit_one_h100_and_fits_two() -> None:
    bf16 = {"target__quantization": {}, "draft__quantization": {}}
    plan = make_plan(config_of("pytorch", hardware__gpu="H100", **bf16))
    assert [judgement.rule for judgement in plan.judgements if judgement.severity == "refused"] == [
        "memory"
    ]
    two = {"hardware__count": 2, "engine__tp_size": 2}
    assert make_plan(config_of("pytorch", hardware__gpu="H100", **bf16, **two)).possible


def test_calibrating_llama_70b_in_fp8_takes_more_than_210_gb() -> None:
    """As published: more than two 80 GB GPUs hold. 34 GB of it are hidden states on the disk."""
    assert 210e9 < total("pytorch", "quantize") < 260e9


def test_quantizing_is_held_against_the_memory_of_its_host() -> None:
    """Weights are mapped in the host's memory, so the GPUs' memory does not matter."""
    here = {"hardware__gpu": "auto"}  # this machine's GPUs, so this machine quantizes
    for kind, keys, known in (("torch", {}, True), ("pytorch", here, True), ("pytorch", {}, False)):
        stage = memory_of(
            subject(kind, target__quantization=FP8, draft__quantization=FP8, **keys), HOST
        )[0][0]
        assert (stage.stage, stage.place, stage.available_bytes) == (
            "quantize",
            "the machine",
            HOST if known else None,
        )


def test_a_host_that_is_too_small_is_warned_of() -> None:
    deployment = subject("torch", target__quantization=FP8, draft__quantization=FP8)
    needed = memory_of(deployment, HOST)[0][0].total_bytes
    enough, small = (
        [
            judgement
            for judgement in judge_memory(deployment, host)
            if judgement.severity == "warning"
        ]
        for host in (needed, needed - 1)
    )
    assert not enough and len(small) == 1
    assert (
        "this machine has" in small[0].what and small[0].hint and "the same result" in small[0].hint
    )


def test_a_slot_of_the_embedded_engine_has_room_for_one_forward_more() -> None:
    _, short = memory_of(subject("torch", engine__prefill_chunk_len=64), HOST)
    _, long = memory_of(subject("torch", engine__prefill_chunk_len=512), HOST)
    slots = subject("torch").config.engine.max_batch_size
    assert long.kv_tokens - short.kv_tokens == slots * (512 - 64)


def test_the_embedded_engine_takes_a_gpu_only_for_models_that_gain() -> None:
    gains = {
        name: gains_from_gpu(linear_params(shape(name)), "FP8")
        for name in ("Qwen/Qwen2.5-0.5B-Instruct", "meta-llama/Llama-3.2-1B-Instruct")
    }
    assert list(gains.values()) == [False, True]  # 15 and 61 million weights in a layer
    assert gains_from_gpu(linear_params(shape("Qwen/Qwen2.5-0.5B-Instruct")), "NO_QUANT")


@pytest.mark.parametrize(
    ("device", "hub_id", "place"),
    [
        ("auto", "Qwen/Qwen2.5-0.5B-Instruct", "the machine"),
        ("auto", "meta-llama/Llama-3.1-8B-Instruct", "each GPU"),
        ("cpu", "meta-llama/Llama-3.1-8B-Instruct", "the machine"),
        ("cuda", "Qwen/Qwen2.5-0.5B-Instruct", "each GPU"),
    ],
)
def test_the_memory_of_the_embedded_engine_is_that_of_its_device(
    device: str, hub_id: str, place: str
) -> None:
    deployment = subject("torch", engine__device=device, target__quantization=FP8)
    shapes = dict.fromkeys(deployment.shapes, shape(hub_id))
    deployment = replace(deployment, shapes=shapes, gpu=GPUS["H200"])
    stages, _ = memory_of(deployment, HOST)
    assert stages[-1].place == place
    slot_tokens = re.search(r"slots x (\d+) tokens", stages[-1].items[-1].formula)
    assert slot_tokens is not None
    chunk = 64 if place == "the machine" else 256
    assert int(slot_tokens[1]) == deployment.config.engine.max_seq_len + chunk


def test_keys_and_values_take_what_their_type_does() -> None:
    sizes = {
        kept: memory_of(subject("torch", engine__kv_cache_dtype=kept), HOST)[1].kv_bytes
        for kept in ("auto", "bfloat16", "fp8")
    }
    assert sizes["auto"] == 2 * sizes["bfloat16"] == 4 * sizes["fp8"]


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("cache", ["FP8", "bfloat16", "auto"])
def test_the_embedded_engine_takes_what_the_plan_counts(
    tmp_path: Path, tied: bool, dtype: ComputeDtype, cache: str
) -> None:
    """But for norms and the tables of RoPE, which are small. cache: FP8 by the quantization, else
    the engine's kv_cache_dtype.
    """
    source = write_checkpoint(
        tmp_path, tie_word_embeddings=tied, vocab_size=512, hidden_size=256, intermediate_size=1024
    )
    keys: dict[str, object] = {
        "engine__dtype": dtype,
        "engine__device": "cpu",
        "engine__max_seq_len": 1000,
    }
    kv_dtype: KvDtype = "fp8" if cache == "FP8" else "bfloat16"
    if cache == "FP8":
        keys["target__quantization"] = {"kv_cache_quant_algo": "FP8"}
    elif cache == "auto":
        kv_dtype = dtype
    else:
        keys["engine__kv_cache_dtype"] = cache
    deployment = subject("torch", engine__max_batch_size=3, engine__max_input_len=64, **keys)
    shape = read_shape(source)
    planned = memory_of(replace(deployment, shapes={**deployment.shapes, "target": shape}), HOST)
    items = {item.name: item.num_bytes for item in planned[0][-1].items}
    weights, caches = prepare(
        shape, fuse(open_checkpoint(source)), dtype, 3, 1000, PREFILL_TOKENS, kv_dtype=kv_dtype
    )
    assert (weights.embed is None) == tied
    packed = [weights.lm_head.weight, *([] if weights.embed is None else [weights.embed])]
    for layer in weights.layers:
        packed += [getattr(layer, name).weight for name in ("qkv", "o", "gate_up", "down")]
    taken = sum(tensor.nbytes for tensor in packed)
    assert items["target weights"] == pytest.approx(taken, rel=0.002)
    assert items["KV cache of the target"] == sum(k.nbytes + v.nbytes for k, v in caches)


@pytest.mark.parametrize("tied", [True, False])
def test_the_plan_counts_the_int8_head_of_a_compiled_draft(tmp_path: Path, tied: bool) -> None:
    """A tied one stands beside the embeddings then, and another one takes half of its bytes."""
    source = write_checkpoint(tmp_path, tie_word_embeddings=tied, vocab_size=512, hidden_size=256)
    shape, keys = read_shape(source), {"draft__quantization": {"quant_algo": "W8A16"}}

    def draft_bytes(mode: str) -> int:
        deployment = subject("torch", engine__mode=mode, engine__dtype="bfloat16", **keys)
        planned = memory_of(replace(deployment, shapes={**deployment.shapes, "draft": shape}), HOST)
        return {item.name: item.num_bytes for item in planned[0][-1].items}["draft weights"]

    weights = fuse(open_checkpoint(source))
    taken = {**weights, **int8_head(weights)}
    more = sum(t.nbytes for t in taken.values()) - sum(t.nbytes for t in weights.values())
    scales = 4 * shape.vocab_size
    assert draft_bytes("auto") - draft_bytes("eager") == more - scales


def quantize_items(**calibration: int) -> dict[str, int]:
    keys = {f"calibration__{name}": value for name, value in calibration.items()}
    stage = memory_of(subject("pytorch", **keys), HOST)[0][0]
    assert stage.stage == "quantize"
    return {item.name: item.num_bytes for item in stage.items}


def test_quantizing_counts_the_libraries_and_the_largest_of_its_phases() -> None:
    """Calibrating keeps the hidden states of all text, and a batch in one layer; measuring keeps
    the outputs of 80 layers for one line, 84k values each; measuring layers keeps 512 tokens once
    per layer, before and after it. Only one of the three is in memory at a time.
    """
    phases = {"calibration", "measuring", "measuring layers"}
    widest = 4 * 8192 + 2 * 28672
    for keys, phase, expected in (
        (
            {"calib_size": 512, "calib_max_seq_length": 2048},
            "calibration",
            2 * 512 * 2048 * 8192 * 2 + 4 * 2048 * widest * 2,
        ),
        (
            {"calib_size": 64, "calib_max_seq_length": 2048},
            "measuring",
            2048 * 80 * (3 * 8192 + 2 * 1024 + 2 * 28672) * 2,
        ),
        (
            {"calib_size": 16, "calib_max_seq_length": 128},
            "measuring layers",
            2 * 81 * 128 * 8192 * 4 + 4096 * widest * 4,
        ),
    ):
        items = quantize_items(**keys)
        assert items["libraries"] == 2**29
        assert {name: items[name] for name in phases & set(items)} == {phase: expected}


def test_quantizing_counts_a_kernel_for_every_size_of_a_product() -> None:
    """q and o are alike in Llama 70B, so there are four sizes of linears. 16,384 held-out tokens
    are 32 lines of 512. oneDNN keeps 1,024 kernels at most.
    """
    assert quantize_items(calib_size=512)["kernels"] == 4 * (128 + 32) * 5 * 2**17
    assert quantize_items(calib_size=16, calib_max_seq_length=2048)["kernels"] == (
        4 * (4 + 8) * 5 * 2**17
    )
    assert quantize_items(calib_size=4096)["kernels"] == 1024 * 5 * 2**17


def test_the_sizes_of_the_phases_are_those_of_the_stage() -> None:
    assert memory.HELDOUT_TOKENS == quality.MAX_TOKENS
    assert memory.LAYER_TOKENS == quality.LAYER_TOKENS
    assert memory.LAYER_CALL_TOKENS == single_layers.TOKENS_PER_CALL


def test_llama_70b_has_160_kib_of_kv_cache_a_token_in_fp8() -> None:
    """80 layers x K and V x 8 heads x 128 values; twice that in BF16."""
    assert kv_bytes_per_token(shape("meta-llama/Llama-3.3-70B-Instruct"), "FP8") == 160 * 1024
    assert kv_bytes_per_token(shape("meta-llama/Llama-3.3-70B-Instruct"), None) == 320 * 1024


def test_what_is_planned_never_exceeds_what_is_there() -> None:
    for kind in ("pytorch", "engine", "int8"):
        stages, serving = memory_of(subject(kind), HOST)
        assert serving is not None and stages[-1].available_bytes is not None
        assert stages[-1].total_bytes <= stages[-1].available_bytes
        assert (
            sum(item.num_bytes for item in stages[-1].items if item.name.startswith("KV"))
            == serving.kv_bytes
        )


def test_draft_weights_and_draft_cache_are_counted() -> None:
    without = {"draft": None, "speculation__kind": "none"}
    both, alone = (
        memory_of(subject("pytorch"), HOST)[1],
        memory_of(subject("pytorch", **without), HOST)[1],
    )
    assert both is not None and alone is not None
    assert both.kv_tokens < alone.kv_tokens
    assert both.draft_share == pytest.approx(16 * 2 * 8 * 64 / both.kv_bytes_per_token)


def test_the_engine_flow_writes_a_head_of_its_own_for_tied_embeddings() -> None:
    tied = shape("meta-llama/Llama-3.2-1B-Instruct")
    assert weight_bytes(tied, "FP8", untied=True) - weight_bytes(tied, "FP8") == 128256 * 2048 * 2


@pytest.mark.parametrize("length, blocks", [(124, 4), (125, 5), (156, 5), (157, 6)])
def test_a_sequence_takes_whole_blocks_and_room_for_what_is_drafted(
    length: int, blocks: int
) -> None:
    """32 tokens a block, and 4 are drafted beyond max_seq_len."""
    serving = memory_of(
        subject("pytorch", engine__max_seq_len=length, engine__max_input_len=32), HOST
    )[1]
    assert serving is not None
    assert serving.sequences == serving.kv_tokens // 32 // blocks


@given(tp_size=st.sampled_from([1, 2, 4, 8]), name=st.sampled_from(sorted(CONFIGS)))
def test_ranks_share_all_of_the_linears(tp_size: int, name: str) -> None:
    model = shape(name)
    if model.num_kv_heads % tp_size or model.num_heads % tp_size:
        return
    assert tp_size * linear_params(model, tp_size) == linear_params(model)
    assert kv_bytes_per_token(model, None, tp_size=tp_size) * tp_size == kv_bytes_per_token(
        model, None
    )


def test_a_batch_that_does_not_fit_at_full_length_is_a_warning_with_the_length_that_does() -> None:
    plan = make_plan(config_of("pytorch", engine__max_batch_size=64, engine__max_seq_len=16384))
    (judgement,) = [judgement for judgement in plan.judgements if judgement.rule == "batch-fits"]
    assert plan.possible and plan.serving is not None
    length = plan.serving.kv_tokens // 64 - 4
    assert f"longer than {length} tokens" in str(judgement.hint)
    shorter = make_plan(
        config_of("pytorch", engine__max_batch_size=64, engine__max_seq_len=length // 32 * 32 - 4)
    )
    assert "batch-fits" not in {judgement.rule for judgement in shorter.judgements}


def test_vllm_counts_its_share_of_a_gpu_for_everything() -> None:
    """Weights, activations and KV caches together take gpu_memory_utilization, and no more."""
    plan = make_plan(config_of("vllm", engine__gpu_memory_utilization=0.8))
    serve = plan.memory[-1]
    assert plan.serving is not None and serve.available_bytes is not None
    share = 0.8 * serve.available_bytes
    block = 16 * plan.serving.kv_bytes_per_token
    assert share - block <= serve.total_bytes <= share


def test_vllm_on_a_cpu_fills_kv_cache_gib_with_both_models_in_every_rank() -> None:
    stages, serving = memory_of(subject("vllm_cpu", engine__kv_cache_gib=4.0), HOST)
    assert serving is not None
    shape_of_both = shape("Qwen/Qwen2.5-0.5B-Instruct")
    assert serving.kv_bytes_per_token == 2 * kv_bytes_per_token(shape_of_both, None)
    assert 4 * 2**30 - 128 * serving.kv_bytes_per_token < serving.kv_bytes <= 4 * 2**30
    # A sequence takes the blocks of max_seq_len and the draft length: 17 of 128 tokens.
    assert serving.sequences == serving.kv_tokens // 128 // 17
    two, halved = memory_of(subject("vllm_cpu", engine__kv_cache_gib=4.0, engine__tp_size=2), HOST)
    assert halved is not None and halved.kv_bytes_per_token == serving.kv_bytes_per_token // 2
    kv_of_both_ranks = sum(
        item.num_bytes for item in two[-1].items if item.name.startswith("KV cache")
    )
    assert kv_of_both_ranks == 2 * halved.kv_bytes
    by_name = {stage.stage: stage for stage in stages}
    assert by_name["validate"].total_bytes > 1.5 * by_name["serve"].total_bytes


def test_both_arms_of_vllm_run_in_turns_where_only_one_fits() -> None:
    judged = subject("vllm_cpu")
    serve = memory_of(judged, HOST)[0][-1].total_bytes
    [judgement] = judge_memory(judged, serve + 2**20)
    assert (judgement.severity, judgement.rule) == ("warning", "memory")
    assert judgement.hint is not None and "in turns" in judgement.hint
    assert list(judge_memory(judged, 3 * serve)) == []
    [judgement] = judge_memory(judged, serve - 2**20)
    assert judgement.severity == "refused" and judgement.path == "engine.kv_cache_gib"


def test_the_kv_cache_that_is_offered_to_vllm_holds_a_sequence() -> None:
    keys = {"engine__max_seq_len": 32768, "engine__dtype": "float32"}
    [judgement] = judge_memory(subject("vllm_cpu", engine__kv_cache_gib=1.0, **keys), HOST)
    assert judgement.hint is not None and "kv_cache_gib: 2" in judgement.hint
    judged = judge_memory(subject("vllm_cpu", engine__kv_cache_gib=2.0, **keys), HOST)
    assert "refused" not in {judgement.severity for judgement in judged}
