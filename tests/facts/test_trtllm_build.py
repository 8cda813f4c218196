"""The table of trtllm-build's flags is compared with a second table, made independently from the
same contract; and the patterns of the failures are tested.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import trtllm_build
from tests.support.trtllm import STAND_IN, write_trtllm_checkpoint
from toolkit.engines.trtllm.command import flags_of
from toolkit.engines.trtllm.failures import explain_failure
from toolkit.facts.trtllm_build import FAILURES, FLAGS, VERSIONS
from toolkit.facts.versions import VERSIONS as ROWS


def other_table(version: str) -> dict[str, tuple[str, object]]:
    rows = (*trtllm_build.FLAGS, *(trtllm_build.FLAGS_UP_TO_0_21 if version == "0.21" else ()))
    return {name: (kind, default) for names, kind, default in rows for name in names.split()}


@pytest.mark.parametrize("version", VERSIONS)
def test_both_tables_have_the_same_flags_and_defaults(version: str) -> None:
    ours, other = flags_of(version), other_table(version)
    assert sorted(ours) == sorted(other)
    assert {name: flag.default for name, flag in ours.items()} == {
        name: default for name, (_, default) in other.items()
    }


def test_both_tables_have_the_same_choices() -> None:
    other = other_table("1.2.1")
    for name, flag in flags_of("1.2.1").items():
        if flag.choices is not None and name != "--kv_cache_type":
            assert "|".join(flag.choices) == other[name][0], name


def test_facts_have_a_confidence_and_versions_that_exist() -> None:
    assert {row.confidence for row in (*FLAGS, *FAILURES)} <= set("ABCI")
    assert all(set(flag.versions) <= set(VERSIONS) for flag in FLAGS)
    assert tuple(name for name, row in ROWS.items() if row.engine_flow) == VERSIONS
    assert flags_of("1.4rc") == {}


# Lines from public logs and sources (see the sources of FAILURES), one for each failure.
LINES = {
    "unknown-flag": "trtllm-build: error: unrecognized arguments: --auto_parallel 1",
    "disk-full": "OSError: [Errno 28] No space left on device",
    "blackwell-no-int8": "RuntimeError: SmoothQuant is not supported on SM>=100.",
    "unsupported-sm": (
        "RuntimeError: CUDA error: no kernel image is available for execution on the device"
    ),
    "version-mismatch": (
        "[E] The engine plan file is not compatible with this version of TensorRT, expecting"
        " library version"
    ),
    "gpu-out-of-memory": (
        "[E] 2: [virtualMemoryBuffer.cpp::resizePhysical::140] Error Code 2: OutOfMemory"
    ),
    "no-gpu": (
        'docker: Error response from daemon: could not select device driver "" with capabilities:'
        " [[gpu]]."
    ),
    "no-image": (
        "docker: Error response from daemon: manifest for nvcr.io/x:1 not found: manifest unknown."
    ),
    "no-docker": (
        "docker: Cannot connect to the Docker daemon at unix:///var/run/docker.sock. Is the docker"
        " daemon running?"
    ),
    "shared-memory": "ERROR: Unexpected bus error encountered in worker.",
    "missing-library": (
        "ImportError: libnvinfer.so.10: cannot open shared object file: No such file or directory"
    ),
    "unknown-architecture": "AssertionError: Unsupported model architecture: FooForCausalLM",
    "tensors": (
        "RuntimeError: Required but not provided"
        " tensors:{'transformer.layers.0.attention.qkv.bias'}"
    ),
    "no-implementation": (
        "[E] 10: Could not find any implementation for node"
        " PWN(LLaMAForCausalLM/layers/0/mlp/SIGMOID_0)."
    ),
    "killed": "Killed",
}


@pytest.mark.parametrize("failure", FAILURES, ids=lambda failure: failure.id)
def test_each_failure_is_recognised_by_the_line_that_it_prints(failure) -> None:  # type: ignore[no-untyped-def]
    re.compile(failure.pattern)
    log = (
        f"[TensorRT-LLM] TensorRT-LLM version: 1.2.1\n{LINES[failure.id]}\nTraceback (most recent"
        " call last):\n"
    )
    assert explain_failure(1, log) == (failure, LINES[failure.id])


def test_a_log_of_a_build_that_went_well_is_no_failure() -> None:
    log = (
        "[TRT-LLM] [W] padding removal and fMHA are both enabled, max_input_len is not required and"
        " will be ignored\n"
    )
    assert explain_failure(1, log) == (None, None)


def test_a_cause_in_the_log_goes_before_the_signal() -> None:
    failure, _ = explain_failure(-9, LINES["gpu-out-of-memory"])
    assert failure is not None
    assert failure.id == "gpu-out-of-memory"
    assert explain_failure(137, "")[0] is not None


def run_stand_in(
    folder: Path, *arguments: str, **settings: str
) -> subprocess.CompletedProcess[str]:
    """Build from a checkpoint in the folder, as the stand-in `trtllm-build` does."""
    checkpoint = write_trtllm_checkpoint(folder, quant_algo="FP8")
    assert checkpoint.trtllm is not None
    paths = ("--checkpoint_dir", str(checkpoint.trtllm.path), "--output_dir", str(folder / "out"))
    cache = ("--output_timing_cache", str(folder / "cache"))
    return subprocess.run(
        [sys.executable, "-I", "-S", str(STAND_IN), *paths, *cache, *arguments],
        capture_output=True,
        text=True,
        check=False,
        env=settings,
    )


@pytest.mark.parametrize(
    ("arguments", "settings", "error"),
    [
        (("--max_batch", "4", "--auto_parallel", "1"), {}, "unrecognized arguments"),
        (("--logits_dtype", "bfloat16"), {}, "invalid choice"),
        (("--kv_cache_type", "int8"), {}, "Expected one of"),
        (("--gather_context_logits", "--max_draft_len", "4"), {}, "is not support with draft len"),
        (("--multiple_profiles", "enable", "--opt_num_tokens", "8"), {}, "opt_num_tokens is set"),
        (("--pp_reduce_scatter", "enable"), {}, "only supported in the mixtral model"),
        (("--streamingllm", "enable"), {}, "no longer supported"),
        (("--low_latency_gemm_swiglu_plugin", "fp8"), {"STANDIN_SM": "100"}, "not supported on SM"),
        (("--bert_context_fmha_fp32_acc", "enable"), {"STANDIN_SM": "120"}, "not supported on SM"),
        ((), {"STANDIN_DEVICES": "0"}, "max_workers must be greater than 0"),
    ],
)
def test_the_stand_in_refuses_what_the_builder_refuses(
    tmp_path: Path, arguments: tuple[str, ...], settings: dict[str, str], error: str
) -> None:
    done = run_stand_in(tmp_path, *arguments, **settings)
    assert done.returncode != 0 and error in done.stderr, done.stderr
    assert not (tmp_path / "out" / "rank0.engine").exists()


@pytest.mark.parametrize(
    ("arguments", "recorded"), [((), "float16"), (("--logits_dtype", "float32"), "float32")]
)
def test_the_flag_of_the_logits_overrides_the_checkpoint(
    tmp_path: Path, arguments: tuple[str, ...], recorded: str
) -> None:
    assert run_stand_in(tmp_path, *arguments).returncode == 0
    engine = json.loads((tmp_path / "out" / "config.json").read_text())
    assert engine["pretrained_config"]["logits_dtype"] == recorded
