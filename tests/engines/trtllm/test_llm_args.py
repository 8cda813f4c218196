"""Arguments of `LLM()`: their spelling by version, and what our tables say against wrong ones."""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolkit.engines.trtllm.llm_args import (
    faults,
    llm_args,
    read_llm_args,
    resolved,
    schedule_of,
    write_llm_args,
)
from toolkit.errors import StageError, UsageError
from toolkit.facts.heads import mtp_config
from toolkit.facts.llm_args import LLM_ARGS, NESTED, SPECULATIVE
from toolkit.facts.versions import VERSIONS
from toolkit.interfaces import EngineSpec, TensorRtLlmSpec

SPEC = EngineSpec(
    role="target", max_batch_size=16, max_input_len=4096, max_seq_len=8192, max_draft_len=4
)
VERSIONS_OF_FLOW = [name for name, row in VERSIONS.items() if row.pytorch_flow]


def asked(version: str = "1.2.1", **fields: Any) -> TensorRtLlmSpec:
    return TensorRtLlmSpec(version, **{"speculation": "draft_target", **fields})


def test_the_arguments_of_the_70b_recipe() -> None:
    assert llm_args(SPEC, asked(), "FP8") == {
        "model": ".",
        "tensor_parallel_size": 1,
        "pipeline_parallel_size": 1,
        "max_batch_size": 16,
        "max_input_len": 4096,
        "max_seq_len": 8192,
        "kv_cache_config": {
            "free_gpu_memory_fraction": 0.9,
            "enable_block_reuse": True,
            "dtype": "fp8",
        },
        "cuda_graph_config": {"enable_padding": True, "max_batch_size": 16},
        "speculative_config": {
            "decoding_type": "DraftTarget",
            "max_draft_len": 4,
            "speculative_model": "../draft",
        },
    }


def test_names_are_those_of_the_version() -> None:
    old, new = llm_args(SPEC, asked("1.1"), None), llm_args(SPEC, asked("1.4rc"), None)
    assert old["speculative_config"] == {
        "decoding_type": "DraftTarget",
        "max_draft_len": 4,
        "speculative_model_dir": "../draft",
    }
    assert new["speculative_config"] == {
        "decoding_type": "Draft_Target",
        "max_draft_len": 4,
        "speculative_model": "../draft",
    }


@pytest.mark.parametrize(
    ("version", "keys", "overlaps"),
    [
        ("1.0", {}, False),
        ("1.1", {}, False),
        ("1.2.1", {}, True),
        ("1.2.1", {"draft_len_schedule": {1: 4, 8: 0}}, False),
        ("1.2.1", {"attn_backend": "FLASHINFER"}, False),
        ("1.2.1", {"max_concurrency": 8}, True),
        ("1.3rc-early", {"draft_len_schedule": {1: 4, 8: 0}}, False),
        ("1.3rc-late", {"draft_len_schedule": {1: 4, 8: 0}}, True),
        ("1.4rc", {}, True),
        ("1.0", {"speculation": "ngram"}, True),
    ],
)
def test_scheduling_overlaps_where_the_version_can(
    version: str, keys: dict[str, Any], overlaps: bool
) -> None:
    args = llm_args(SPEC, asked(version, **keys), None)
    assert args.get("disable_overlap_scheduler", False) is not overlaps
    assert faults(args, version) == []


@pytest.mark.parametrize("version", [version for version in VERSIONS_OF_FLOW if version != "1.0"])
def test_the_load_to_stop_at_begins_with_1_1(version: str) -> None:
    args = llm_args(SPEC, asked(version, max_concurrency=8), None)
    assert args["speculative_config"]["max_concurrency"] == 8
    assert faults(args, version) == []


def test_1_0_is_told_to_sample() -> None:
    """Its default sampler answers every request greedily otherwise."""
    old, new = llm_args(SPEC, asked("1.0"), None), llm_args(SPEC, asked("1.1"), None)
    assert old["enable_mixed_sampler"] is True and "enable_mixed_sampler" not in new
    assert faults(old, "1.0") == []


def test_the_one_model_path_of_early_candidates_is_told_to_sample() -> None:
    """Without this option it decodes sampled requests greedily."""
    early, late = (llm_args(SPEC, asked(name), None) for name in ("1.3rc-early", "1.3rc-late"))
    assert early["speculative_config"]["allow_advanced_sampling"] is True
    assert "allow_advanced_sampling" not in late["speculative_config"]


HEAD = {"speculation": "eagle3", "captured_layers": (2, 40, 77)}


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        ("1.2.0", {"decoding_type": "Eagle", "allow_advanced_sampling": True}),
        ("1.2.1", {"decoding_type": "Eagle", "allow_advanced_sampling": True}),
        ("1.3rc-early", {"decoding_type": "Eagle3", "allow_advanced_sampling": True}),
        ("1.3rc-late", {"decoding_type": "Eagle3"}),
        ("1.4rc", {"decoding_type": "Eagle3"}),
    ],
)
def test_a_head_is_named_as_the_version_names_it(version: str, expected: dict[str, Any]) -> None:
    """Layers are counted from 0 there, and the host's scheduling overlaps in every version."""
    args = llm_args(SPEC, asked(version, **HEAD), "FP8")
    assert args["speculative_config"] == {
        "max_draft_len": 4,
        "speculative_model": "../draft",
        "eagle3_layers_to_capture": [1, 39, 76],
        **expected,
    }
    assert "disable_overlap_scheduler" not in args
    assert faults(args, version) == []


@pytest.mark.parametrize("version", ["1.0", "1.1"])
def test_versions_that_answer_greedily_under_a_head_are_refused(version: str) -> None:
    with pytest.raises(UsageError, match="answers every request greedily under a head"):
        llm_args(SPEC, asked(version, **HEAD), None)


def test_our_tables_know_what_is_wrong_with_a_head_or_with_mtp_layers() -> None:
    args = llm_args(SPEC, asked("1.2.1", **HEAD), None)
    config = args["speculative_config"]

    def said(version: str, **changes: Any) -> list[str]:
        return faults({**args, "speculative_config": {**config, **changes}}, version)

    assert said("1.2.1", decoding_type="Eagle3") == [
        "speculative_config.decoding_type is spelled Eagle in 1.2.1, not Eagle3"
    ]
    assert said("1.2.1", speculative_model=None) == [
        "speculative_config.speculative_model must name the head"
    ]
    assert said("1.2.1", eagle3_layers_to_capture="1") != []
    mtp = {"decoding_type": "MTP", "max_draft_len": 3}
    assert faults({**args, "speculative_config": mtp}, "1.2.1") == [
        "speculative_config.num_nextn_predict_layers must be 3, the number of tokens to draft"
    ]
    for version in VERSIONS_OF_FLOW:
        assert faults({"model": ".", "speculative_config": mtp_config(version, 3)}, version) == []


def test_settings_without_a_word_in_the_version_are_refused() -> None:
    with pytest.raises(UsageError, match=r"1\.1 has no draft_len_schedule"):
        llm_args(SPEC, asked("1.1", draft_len_schedule={1: 4}), None)
    with pytest.raises(UsageError, match="tokens_per_block"):
        llm_args(SPEC, asked("1.0", tokens_per_block=64), None)
    with pytest.raises(UsageError, match=r"1\.0 has no max_concurrency"):
        llm_args(SPEC, asked("1.0", max_concurrency=4), None)
    with pytest.raises(UsageError, match=r"LLM\(\) of TensorRT-LLM 0\.21"):
        llm_args(SPEC, asked("0.21", speculation="none"), None)
    assert llm_args(SPEC, asked("1.1", tokens_per_block=64), None)["kv_cache_config"][
        "tokens_per_block"
    ]


def test_prompt_lookup_needs_no_draft() -> None:
    args = llm_args(SPEC, asked(speculation="ngram", max_matching_ngram_size=3), None)
    assert args["speculative_config"] == {
        "decoding_type": "NGram",
        "max_draft_len": 4,
        "max_matching_ngram_size": 3,
    }
    assert faults(args, "1.2.1") == []


@pytest.mark.parametrize(
    "version, window, threshold",
    [
        ("1.2.1", "acceptance_window", "acceptance_length_threshold"),
        ("1.3rc-late", "acceptance_window", "acceptance_length_threshold"),
        ("1.4rc", "acceptance_rate_window_size", "acceptance_rate_threshold"),
    ],
)
def test_the_least_acceptance_length_counts_drafts_only_there(
    version: str, window: str, threshold: str
) -> None:
    """TensorRT-LLM takes 1 off the tokens per iteration before it compares."""
    args = llm_args(SPEC, asked(version, acceptance_window=16, min_acceptance_length=1.3), None)
    config = args["speculative_config"]
    assert (config[window], config[threshold]) == (16, 0.3)
    assert faults(args, version) == []
    without = llm_args(SPEC, asked(version), None)["speculative_config"]
    assert window not in without and threshold not in without


def test_a_version_without_the_acceptance_window_is_refused() -> None:
    with pytest.raises(UsageError, match=r"1\.1 has no acceptance window"):
        llm_args(SPEC, asked("1.1", acceptance_window=16, min_acceptance_length=1.3), None)


def test_a_schedule_says_the_same_in_both_senses() -> None:
    """To 1.3.0rc20: from this batch size on. Later: up to this batch size."""
    schedule = {1: 4, 5: 2, 9: 0}
    assert schedule_of(schedule, VERSIONS["1.3rc-early"], 16) == {1: 4, 5: 2, 9: 0}
    assert schedule_of(schedule, VERSIONS["1.2.1"], 16) == {1: 4, 5: 2, 9: 0}
    assert schedule_of(schedule, VERSIONS["1.4rc"], 16) == {4: 4, 8: 2, 16: 0}


@pytest.mark.parametrize("version", ["1.2.1", "1.3rc-late"])
def test_steps_beyond_the_largest_batch_are_left_out(version: str) -> None:
    """As upper bounds they would make the last key fall below the one before it."""
    args = llm_args(SPEC, asked(version, draft_len_schedule={1: 4, 8: 2, 17: 1, 32: 0}), None)
    assert args["speculative_config"]["draft_len_schedule"] == (
        {1: 4, 8: 2} if version == "1.2.1" else {7: 4, 16: 2}
    )
    assert faults(args, version) == []


@given(
    version=st.sampled_from(VERSIONS_OF_FLOW),
    speculation=st.sampled_from(["draft_target", "ngram", "none"]),
    kv=st.sampled_from(["FP8", None]),
    tp_size=st.sampled_from([1, 2, 8, 16]),
    fraction=st.floats(0.01, 0.99),
    reuse=st.booleans(),
    graph=st.booleans(),
    tokens=st.none() | st.integers(1, 10**6),
    backend=st.sampled_from(["TRTLLM", "FLASHINFER"]),
    later=st.dictionaries(st.integers(2, 40), st.integers(0, 4)),
)
def test_what_we_write_is_what_our_tables_allow(  # type: ignore[no-untyped-def]
    version, speculation, kv, tp_size, fraction, reuse, graph, tokens, backend, later
) -> None:
    lengths = sorted([*later.values()], reverse=True)
    schedule = {1: 4, **dict(zip(sorted(later), lengths, strict=True))}
    schedules = speculation != "none" and VERSIONS[version].draft_len_schedule is not None
    given_spec = asked(
        version,
        speculation=speculation,
        tp_size=tp_size,
        free_gpu_memory_fraction=fraction,
        enable_block_reuse=reuse,
        cuda_graph=graph,
        max_num_tokens=tokens,
        attn_backend=backend,
        draft_len_schedule=schedule if schedules else None,
    )
    spec = SPEC if speculation != "none" else dataclasses.replace(SPEC, max_draft_len=0)
    assert faults(llm_args(spec, given_spec, kv), version) == []


def changed(path: str, value: Any) -> dict[str, Any]:
    args = copy.deepcopy(llm_args(SPEC, asked(), "FP8"))
    *folders, last = path.split(".")
    inner = args
    for folder in folders:
        inner = inner[folder]
    inner[last] = value
    return args


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        (
            "quant_config",
            {},
            "quant_config is not an argument of 1.2.1: the checkpoint decides the precision",
        ),
        ("max_batchsize", 4, "max_batchsize is not an argument"),
        ("max_batch_size", "16", "max_batch_size must be int, not '16'"),
        ("max_batch_size", True, "max_batch_size must be int, not True"),
        ("tensor_parallel_size", None, "tensor_parallel_size must not be null"),
        ("kv_cache_config", 0.9, "kv_cache_config must be a mapping"),
        (
            "kv_cache_config.free_gpu_memory_fraction",
            1.5,
            "kv_cache_config.free_gpu_memory_fraction must be between 0 and 1",
        ),
        ("kv_cache_config.free_memory", 0.5, "kv_cache_config.free_memory is not an argument"),
        (
            "attn_backend",
            "FLASH",
            "attn_backend must be one of TRTLLM, FLASHINFER, VANILLA, not 'FLASH'",
        ),
        (
            "cuda_graph_config.batch_sizes",
            [1, 2.5],
            "cuda_graph_config.batch_sizes must be list[int]",
        ),
        (
            "speculative_config.decoding_type",
            "Draft_Target",
            "decoding_type is spelled DraftTarget in 1.2.1",
        ),
        (
            "speculative_config.decoding_type",
            "Clairvoyance",
            "decoding_type 'Clairvoyance' is not known",
        ),
        ("speculative_config.max_draft_len", 0, "max_draft_len must be above 0"),
        ("speculative_config.speculative_model", "", "speculative_model must name the draft model"),
        (
            "speculative_config.acceptance_rate_threshold",
            0.5,
            "acceptance_rate_threshold is not an argument of 1.2.1",
        ),
        ("speculative_config.draft_len_schedule", {1: 2, 4: 4}, "lengths must not grow"),
        (
            "speculative_config.draft_len_schedule",
            {2: 4},
            "its value at batch size 1 must be max_draft_len",
        ),
        ("attn_backend", "FLASHINFER", "disable_overlap_scheduler must be true"),
        ("pipeline_parallel_size", 2, "draft-target has no pipeline parallelism"),
    ],
)
def test_wrong_arguments_are_named(path: str, value: Any, said: str) -> None:
    found = faults(changed(path, value), "1.2.1")
    assert any(said in fault for fault in found), found


def test_arguments_without_a_model_are_refused() -> None:
    args = llm_args(SPEC, asked(), None)
    del args["model"]
    assert faults(args, "1.2.1") == ["model is missing"]


def test_more_ranks_than_gpus_are_told() -> None:
    args = llm_args(SPEC, asked(tp_size=8), None)
    assert faults(args, "1.2.1", 4) == [
        "tensor_parallel_size * pipeline_parallel_size is 8, above 4 GPUs"
    ]


def test_a_file_is_read_back_equal_and_resolved(tmp_path: Path) -> None:
    args = llm_args(SPEC, asked(draft_len_schedule={1: 4, 8: 2}), "FP8")
    write_llm_args(args, tmp_path)
    assert read_llm_args(tmp_path) == args
    placed = resolved(args, "/models/target", Path("/models/draft"))
    assert (placed["model"], placed["speculative_config"]["speculative_model"]) == (
        "/models/target",
        "/models/draft",
    )
    with pytest.raises(StageError, match="not an engine directory of the PyTorch flow"):
        read_llm_args(tmp_path / "nowhere")


def test_the_tables_name_each_field_once() -> None:
    for fields in (LLM_ARGS, *NESTED.values(), *SPECULATIVE.values()):
        names = [field.name for field in fields]
        assert len(names) == len(set(names))
        assert all(set(field.versions) <= set(VERSIONS) for field in fields)
        assert {field.confidence for field in fields} <= set("ABCI")
