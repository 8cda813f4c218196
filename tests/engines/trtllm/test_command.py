"""Every command that can be made, against the table of the version and against a parser of the
contract.
"""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolkit.engines.trtllm.command import BuildCommand, build_flags, flags_of, misfits
from toolkit.facts.trtllm_build import GEMM_PLUGIN, VERSIONS
from toolkit.interfaces import EngineSpec, TensorRtLlmSpec

SPEC = EngineSpec(
    role="target", max_batch_size=16, max_input_len=4096, max_seq_len=8192, max_draft_len=5
)


def command(
    spec: EngineSpec = SPEC,
    asked: TensorRtLlmSpec | None = None,
    algo: str | None = "FP8",
    kv: str | None = "FP8",
) -> BuildCommand:
    asked = asked or TensorRtLlmSpec("1.2.1", speculation="draft_target")
    return build_flags(
        spec,
        asked,
        quant_algo=algo,
        kv_cache_quant_algo=kv,
        checkpoint_dir="C",
        output_dir="E",
        timing_cache="T",
    )


def test_the_target_of_the_70b_recipe() -> None:
    assert (
        " ".join(command().arguments)
        == "--checkpoint_dir C --output_dir E --max_batch_size 16 --max_input_len 4096"
        " --max_seq_len 8192 --max_beam_width 1 --kv_cache_type paged --tokens_per_block 32"
        " --remove_input_padding enable --context_fmha enable --use_paged_context_fmha enable"
        " --use_fp8_context_fmha enable --gpt_attention_plugin auto --gemm_plugin disable"
        " --logits_dtype float32 --use_fused_mlp enable --multiple_profiles disable"
        " --profiling_verbosity detailed"
        " --workers 1 --output_timing_cache T --speculative_decoding_mode draft_tokens_external"
        " --max_draft_len 5 --gather_generation_logits"
    )


def test_the_draft_is_a_plain_engine() -> None:
    flags = command(dataclasses.replace(SPEC, role="draft", max_draft_len=0)).flags
    assert "--speculative_decoding_mode" not in flags
    assert "--max_draft_len" not in flags
    assert flags["--use_paged_context_fmha"] == "enable"


def test_int8_engines_leave_out_what_the_builder_would_switch_off() -> None:
    flags = command(algo="W8A8_SQ_PER_CHANNEL", kv=None).flags
    assert (flags["--use_fused_mlp"], flags["--use_fp8_context_fmha"], flags["--gemm_plugin"]) == (
        "disable",
        "disable",
        "auto",
    )


def test_one_worker_for_each_gpu_of_a_node() -> None:
    asked = TensorRtLlmSpec("1.2.1", tp_size=8, pp_size=2, gpus_per_node=8)
    assert command(asked=asked).flags["--workers"] == "8"


def test_a_pair_gathers_generation_logits_since_a_request_alone_cannot() -> None:
    for version in VERSIONS:
        for speculation, gathers in (("draft_target", True), ("none", False)):
            flags = command(asked=TensorRtLlmSpec(version, speculation=speculation)).flags
            assert ("--gather_generation_logits" in flags) is gathers


@given(
    version=st.sampled_from(VERSIONS),
    algo=st.sampled_from([*GEMM_PLUGIN, None]),
    kv=st.sampled_from(["FP8", None]),
    draft_len=st.integers(0, 16),
    tp_size=st.sampled_from([1, 2, 8]),
    max_num_tokens=st.none() | st.integers(1, 10**6),
    opt_num_tokens=st.none() | st.integers(1, 10**6),
    profiles=st.booleans(),
)
def test_no_command_has_a_flag_or_value_that_its_version_lacks(  # type: ignore[no-untyped-def]
    version, algo, kv, draft_len, tp_size, max_num_tokens, opt_num_tokens, profiles
) -> None:
    asked = TensorRtLlmSpec(
        version,
        tp_size=tp_size,
        max_num_tokens=max_num_tokens,
        opt_num_tokens=opt_num_tokens,
        multiple_profiles=profiles,
        speculation="draft_target",
    )
    made = command(dataclasses.replace(SPEC, max_draft_len=draft_len), asked, algo, kv)
    assert misfits(made, flags_of(version)) == []


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"--max_batch": "1"}, "--max_batch is not a flag"),
        ({"--max_batch_size": None}, "--max_batch_size takes a value"),
        ({"--max_batch_size": "many"}, "--max_batch_size takes a whole number, not 'many'"),
        ({"--strip_plan": "enable"}, "--strip_plan takes no value"),
        ({"--gemm_plugin": "fp6"}, "--gemm_plugin takes auto, float16"),
        ({"--auto_parallel": "1"}, "--auto_parallel is not a flag"),
    ],
)
def test_what_does_not_fit_is_named(flags: dict[str, str | None], said: str) -> None:
    assert misfits(BuildCommand(flags), flags_of("1.2.1"))[0].startswith(said)
    assert misfits(BuildCommand({"--auto_parallel": "1"}), flags_of("0.21")) == []
