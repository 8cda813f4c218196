"""The engine flow against a stand-in `trtllm-build` of the contract: all versions, sizes,
precisions, and ways to fail.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.trtllm import Place, place_with_builder, write_trtllm_checkpoint
from toolkit.engines.registry import backend, loader
from toolkit.errors import BackendUnavailable, CheckpointError, StageError, UsageError
from toolkit.facts.trtllm_build import ENGINE_INPUTS, VERSIONS
from toolkit.interfaces import EngineSpec, TensorRtLlmSpec
from toolkit.records.build import CompiledEngine
from toolkit.records.codec import from_json, to_json


def spec_of(
    role: str = "target", *, max_draft_len: int = 4, version: str = "1.2.1", **asked: Any
) -> EngineSpec:
    drafts = max_draft_len if role == "target" else 0
    speculation = asked.pop("speculation", "draft_target")
    return EngineSpec(
        role=role,
        max_batch_size=4,
        max_input_len=256,
        max_seq_len=512,
        max_draft_len=drafts,
        tensorrt_llm=TensorRtLlmSpec(version, speculation=speculation, **asked),
    )


def silent(done: int, total: int | None, what: str) -> None:
    pass


def build(
    place: Place,
    tmp_path: Path,
    spec: EngineSpec,
    backend_fields: dict[str, Any] | None = None,
    **made: Any,
) -> CompiledEngine:
    assert spec.tensorrt_llm is not None
    sizes = {"tp_size": spec.tensorrt_llm.tp_size, "pp_size": spec.tensorrt_llm.pp_size}
    checkpoint = write_trtllm_checkpoint(
        tmp_path / "checkpoint", role=spec.role, **{**sizes, **made}
    )
    out_dir = tmp_path / "engine"
    out_dir.mkdir()
    return place.backend(**(backend_fields or {})).compile(checkpoint, spec, out_dir, silent)


@pytest.fixture(autouse=True)
def _failed_builds_keep_their_logs_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return place_with_builder(tmp_path / "bin")


PRECISIONS = [
    ("FP8", "FP8"),
    ("FP8", None),
    ("W8A8_SQ_PER_CHANNEL", None),
    ("W8A16", None),
    (None, None),
]


@pytest.mark.parametrize(("algo", "kv_algo"), PRECISIONS)
@pytest.mark.parametrize("tp_size", [1, 2, 8])
def test_engines_of_every_precision_and_size_are_built_as_asked(
    place: Place, tmp_path: Path, algo: str | None, kv_algo: str | None, tp_size: int
) -> None:
    engine = build(
        place, tmp_path, spec_of(tp_size=tp_size), quant_algo=algo, kv_cache_quant_algo=kv_algo
    )
    config = json.loads((engine.path / "config.json").read_text())
    assert (engine.quant_algo, engine.kv_cache_quant_algo, engine.vocab_size) == (
        algo,
        kv_algo,
        258,
    )
    assert sorted(file.name for file in engine.path.glob("rank*.engine")) == [
        f"rank{rank}.engine" for rank in range(tp_size)
    ]
    assert config["build_config"]["speculative_decoding_mode"] == 2
    assert (
        config["build_config"]["max_seq_len"] == 512 + 4
    )  # the builder's own; ours is what a request may use
    assert (engine.max_seq_len, engine.max_draft_len) == (512, 4)
    assert config["build_config"]["plugin_config"]["use_paged_context_fmha"] is True
    assert config["build_config"]["plugin_config"]["use_fp8_context_fmha"] is (
        algo == kv_algo == "FP8"
    )
    assert (engine.path / "tokenizer.json").is_file()
    assert engine.notes == ()
    assert from_json(CompiledEngine, to_json(engine)) == engine


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("role", ["target", "draft"])
def test_every_version_with_the_flow_takes_our_command(
    tmp_path: Path, version: str, role: str
) -> None:
    place = place_with_builder(tmp_path / "bin", STANDIN_VERSION=version)
    engine = build(place, tmp_path, spec_of(role, version=version))
    assert engine.tensorrt_llm is not None
    assert engine.tensorrt_llm.version == version
    assert engine.tensorrt_llm.command[0] == "trtllm-build"
    assert ("--speculative_decoding_mode" in engine.tensorrt_llm.command) == (role == "target")
    assert {finding.severity for finding in engine.tensorrt_llm.checks} == {"ok"}


def test_pipeline_stages_are_ranks_too(place: Place, tmp_path: Path) -> None:
    engine = build(place, tmp_path, spec_of("draft", tp_size=2, pp_size=2))
    assert engine.tensorrt_llm is not None
    assert len(list(engine.path.glob("rank*.engine"))) == 4
    assert (engine.tensorrt_llm.tp_size, engine.tensorrt_llm.pp_size) == (2, 2)


def test_the_log_is_streamed_into_progress_and_a_file(place: Place, tmp_path: Path) -> None:
    checkpoint = write_trtllm_checkpoint(tmp_path / "checkpoint", tp_size=2)
    said: list[tuple[int, int | None, str]] = []
    (tmp_path / "engine").mkdir()
    place.backend().compile(
        checkpoint, spec_of(tp_size=2), tmp_path / "engine", lambda *step: said.append(step)
    )
    written = [step for step in said if step[2] == "target: engine written"]
    assert written == [(1, 2, "target: engine written"), (2, 2, "target: engine written")]
    log = (tmp_path / "engine" / "build.log").read_text()
    assert "TensorRT-LLM version: 1.2.1" in log
    assert log.count("Engine serialized") == 2


# What the builder changes


def test_a_raised_max_num_tokens_is_reported(place: Place, tmp_path: Path) -> None:
    engine = build(place, tmp_path, spec_of(max_num_tokens=16))
    assert engine.tensorrt_llm is not None
    assert engine.tensorrt_llm.max_num_tokens == 4 * (4 + 1)
    assert engine.notes == (
        "max_num_tokens: the builder raised 16 to 20: max_batch_size * (max_draft_len + 1)",
    )


def test_an_engine_that_lost_paged_context_fmha_is_refused(place: Place, tmp_path: Path) -> None:
    """FP8 KV under INT8 weights: the builder switches it off without failing."""
    with pytest.raises(StageError, match="use_paged_context_fmha: the builder switched it off"):
        build(
            place, tmp_path, spec_of(), quant_algo="W8A8_SQ_PER_CHANNEL", kv_cache_quant_algo="FP8"
        )


def test_fp8_on_ampere_loses_paged_context_fmha_and_is_refused(tmp_path: Path) -> None:
    place = place_with_builder(tmp_path / "bin", STANDIN_SM="80")
    with pytest.raises(StageError, match="use_paged_context_fmha"):
        build(place, tmp_path, spec_of(), quant_algo="FP8", kv_cache_quant_algo="FP8")


# Failures


@pytest.mark.parametrize(
    ("settings", "made", "said"),
    [
        ({"STANDIN_FAIL": "oom"}, {}, "the GPU ran out of memory"),
        ({"STANDIN_FAIL": "host-oom"}, {}, "the machine ran out of main memory"),
        ({"STANDIN_FAIL": "killed"}, {}, "the machine ran out of main memory"),
        ({"STANDIN_FAIL": "disk-full"}, {}, "the disk is full"),
        ({"STANDIN_FAIL": "tactics"}, {}, "TensorRT has no kernel for a layer"),
        ({"STANDIN_SM": "100"}, {"quant_algo": "W8A8_SQ_PER_CHANNEL"}, "has no INT8 engines"),
        ({"STANDIN_SM": "103"}, {"quant_algo": "W8A16"}, "has no INT8 engines"),
        ({"STANDIN_DEVICES": "0"}, {}, "no NVIDIA GPU"),
        ({}, {"architecture": "ExaoneForCausalLM"}, "does not know this architecture"),
    ],
)
def test_known_failures_are_explained(
    tmp_path: Path, settings: dict[str, str], made: dict[str, str], said: str
) -> None:
    place = place_with_builder(tmp_path / "bin", **settings)
    with pytest.raises(StageError) as caught:
        build(place, tmp_path, spec_of(), **made)
    assert said in caught.value.what
    kept = Path(str(caught.value.hint).rpartition("The whole log: ")[2])
    assert kept.read_text().startswith("[TensorRT-LLM]")
    kept.unlink()


def test_an_unknown_failure_shows_the_end_of_the_log(tmp_path: Path) -> None:
    place = place_with_builder(tmp_path / "bin", STANDIN_FAIL="silent")
    with pytest.raises(
        StageError, match="ended with exit status 7, for an unknown reason"
    ) as caught:
        build(place, tmp_path, spec_of())
    assert "Build TensorRT engine Unnamed Network 0" in str(caught.value)


@pytest.mark.parametrize(
    ("fail", "said"),
    [("partial-ranks", r"ranks: rank1.engine missing, of 2"), ("hollow", "it lacks weights")],
)
def test_an_engine_that_is_not_whole_is_refused(tmp_path: Path, fail: str, said: str) -> None:
    place = place_with_builder(tmp_path / "bin", STANDIN_FAIL=fail, STANDIN_FAIL_RANK="1")
    with pytest.raises(StageError, match=said):
        build(place, tmp_path, spec_of(tp_size=2))


def test_an_engine_with_logits_of_another_type_is_refused(tmp_path: Path) -> None:
    """Triton's backend would answer no request for logits."""
    place = place_with_builder(tmp_path / "bin", STANDIN_FAIL="logits")
    with pytest.raises(StageError, match="logits_dtype: is float16, but float32 was requested"):
        build(place, tmp_path, spec_of())


def test_an_engine_of_another_version_is_refused(tmp_path: Path) -> None:
    """Nothing told beforehand: the executable has no interpreter beside it."""
    place = place_with_builder(tmp_path / "bin", STANDIN_VERSION="1.1.0")
    with pytest.raises(StageError, match=r"version: built by 1\.1\.0, but 1\.2\.1 was requested"):
        build(place, tmp_path, spec_of())


def test_a_flag_that_the_installation_lacks_is_found_before_the_build(
    tmp_path: Path, place: Place
) -> None:
    def parser() -> argparse.ArgumentParser:
        made = argparse.ArgumentParser()
        made.add_argument("--checkpoint_dir")
        made.add_argument("--gemm_plugin", choices=["auto", "disable"])
        return made

    with pytest.raises(StageError, match="--output_dir is not known there"):
        build(place, tmp_path, spec_of(), {"installed_parser": parser})
    assert not (tmp_path / "engine" / "build.log").exists()


def test_a_parser_that_cannot_be_imported_gives_way_to_help(place: Place, tmp_path: Path) -> None:
    def broken() -> argparse.ArgumentParser:
        raise OSError("libnvinfer.so.10: cannot open shared object file")

    assert build(place, tmp_path, spec_of(), {"installed_parser": broken}).kind == "trt_engine"


# What it is built from


def test_a_checkpoint_for_other_ranks_is_refused(place: Place, tmp_path: Path) -> None:
    with pytest.raises(
        CheckpointError, match="made for tp_size 2 and pp_size 1, but the engine needs 4 and 1"
    ):
        build(place, tmp_path, spec_of(tp_size=4), tp_size=2)


def test_a_checkpoint_without_the_form_is_refused(place: Place, tmp_path: Path) -> None:
    checkpoint = write_trtllm_checkpoint(tmp_path / "checkpoint")
    with pytest.raises(CheckpointError, match="was not written in TRT-LLM format"):
        place.backend().compile(
            dataclasses.replace(checkpoint, trtllm=None), spec_of(), tmp_path, silent
        )
    (tmp_path / "checkpoint" / "trtllm" / "config.json").write_text(
        '{"architectures": ["LlamaForCausalLM"]}'
    )
    with pytest.raises(
        CheckpointError, match="is not the config of a checkpoint in TRT-LLM format"
    ):
        place.backend().compile(checkpoint, spec_of(), tmp_path, silent)


def test_a_rank_that_is_gone_is_named(place: Place, tmp_path: Path) -> None:
    checkpoint = write_trtllm_checkpoint(tmp_path / "checkpoint", tp_size=2)
    (tmp_path / "checkpoint" / "trtllm" / "rank1.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"lacks rank1\.safetensors"):
        place.backend().compile(checkpoint, spec_of(tp_size=2), tmp_path, silent)


def test_a_form_that_contradicts_its_record_is_refused(place: Place, tmp_path: Path) -> None:
    checkpoint = dataclasses.replace(
        write_trtllm_checkpoint(tmp_path / "checkpoint"), quant_algo="W8A16"
    )
    with pytest.raises(CheckpointError, match="quant_algo is FP8, but W8A16"):
        place.backend().compile(checkpoint, spec_of(), tmp_path, silent)


# Where it is built


def test_the_container_gets_gpus_mounts_and_the_calling_user(place: Place, tmp_path: Path) -> None:
    record = place.add_docker()
    engine = build(place, tmp_path, spec_of(builder="container"))
    line = record.read_text().splitlines()
    assert engine.tensorrt_llm is not None
    assert engine.tensorrt_llm.builder == "container: nvcr.io/nvidia/tensorrt-llm/release:1.2.1"
    assert line[line.index("--gpus") + 1] == "all"
    assert (
        f"type=bind,source={tmp_path / 'checkpoint' / 'trtllm'},target=/checkpoint,readonly" in line
    )
    assert f"type=bind,source={tmp_path / 'engine'},target=/engine" in line
    assert line[line.index("--checkpoint_dir") + 1] == "/checkpoint"
    assert "--user" in line
    assert (engine.path / "rank0.engine").is_file()


def test_auto_takes_the_container_where_there_is_no_builder(tmp_path: Path) -> None:
    place = place_with_builder(tmp_path / "bin")
    place.add_docker()
    (tmp_path / "bin" / "trtllm-build").unlink()
    engine = build(place, tmp_path, spec_of())
    assert engine.tensorrt_llm is not None
    assert engine.tensorrt_llm.builder.startswith("container: ")


def test_without_builder_and_docker_the_image_is_named(tmp_path: Path) -> None:
    with pytest.raises(BackendUnavailable, match=r"tensorrt-llm/release:1\.2\.1"):
        build(Place(tmp_path), tmp_path, spec_of())


def test_a_version_without_the_flow_is_refused(place: Place, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"1\.4rc has no engine flow"):
        build(place, tmp_path, spec_of(version="1.4rc"))


# What a GPU has seen


def test_without_a_gpu_the_record_says_that_nothing_was_executed(
    place: Place, tmp_path: Path
) -> None:
    engine = build(place, tmp_path, spec_of())
    assert engine.tensorrt_llm is not None
    assert engine.tensorrt_llm.executed == ()
    assert "no kernel was timed or tried" in engine.tensorrt_llm.not_executed[0]
    assert engine.tensorrt_llm.layers is None


class Tensorrt:
    """As much of the module `tensorrt` as opens an engine."""

    __version__ = "10.14.1.48"
    TensorIOMode = SimpleNamespace(INPUT=0, OUTPUT=1)
    LayerInformationFormat = SimpleNamespace(JSON="json")

    class Logger:
        ERROR = 1

        def __init__(self, severity: int) -> None: ...

    def __init__(self, inputs: tuple[str, ...], *, readable: bool = True) -> None:
        names = [*inputs, "logits"]
        layers = [
            {
                "Name": "a + b",
                "LayerType": "gemm",
                "Outputs": [{"Format/Datatype": "Row major linear FP8 format"}],
            },
            {
                "Name": "c",
                "LayerType": "PluginV2",
                "PluginType": "GPTAttention",
                "Outputs": [{"Format/Datatype": "BFloat16"}],
            },
        ]
        engine = SimpleNamespace(
            num_io_tensors=len(names),
            get_tensor_name=lambda index: names[index],
            get_tensor_mode=lambda name: int(name == "logits"),
            create_engine_inspector=lambda: SimpleNamespace(
                get_engine_information=lambda form: json.dumps({"Layers": layers})
            ),
        )
        self.Runtime = lambda logger: SimpleNamespace(
            deserialize_cuda_engine=lambda data: engine if readable else None
        )
        self.init_libnvinfer_plugins = lambda logger, namespace: True


def test_where_tensorrt_is_there_the_engine_is_opened_and_counted(
    place: Place, tmp_path: Path
) -> None:
    place.gpus = ["NVIDIA H200"]
    engine = build(place, tmp_path, spec_of(), {"tensorrt": lambda: Tensorrt(ENGINE_INPUTS)})
    assert engine.tensorrt_llm is not None
    assert engine.tensorrt_llm.layers is not None
    assert engine.tensorrt_llm.layers.precisions == {"BF16": 1, "FP8": 1}
    assert (engine.tensorrt_llm.layers.layers, engine.tensorrt_llm.layers.fused) == (2, 1)
    assert engine.tensorrt_llm.layers.plugins == {"GPTAttention": 1}
    assert engine.tensorrt_llm.executed[0] == "trtllm-build 1.2.1 chose its kernels on NVIDIA H200"


@pytest.mark.parametrize(
    ("module", "said"),
    [
        (Tensorrt(ENGINE_INPUTS[1:]), "tensors: the engine lacks input_ids"),
        (
            Tensorrt(ENGINE_INPUTS, readable=False),
            "deserialization: TensorRT 10.14.1.48 cannot read rank0.engine",
        ),
    ],
)
def test_an_engine_that_a_runtime_would_refuse_is_refused(
    place: Place, tmp_path: Path, module: Tensorrt, said: str
) -> None:
    place.gpus = ["NVIDIA H200"]
    with pytest.raises(StageError, match=said):
        build(place, tmp_path, spec_of(), {"tensorrt": lambda: module})


def test_what_a_container_built_may_be_beyond_the_tensorrt_that_is_here(
    place: Place, tmp_path: Path
) -> None:
    """Of another version, or without TensorRT-LLM's kernels: that says nothing against the
    engine.
    """
    place.add_docker()
    place.gpus = ["NVIDIA H200"]
    engine = build(
        place,
        tmp_path,
        spec_of(builder="container"),
        {"tensorrt": lambda: Tensorrt(ENGINE_INPUTS, readable=False)},
    )
    assert engine.tensorrt_llm is not None
    (found,) = [one for one in engine.tensorrt_llm.checks if one.check == "deserialization"]
    assert found.severity == "warning"
    assert "not opened: TensorRT 10.14.1.48 here" in found.detail
    assert any("the engine was not opened" in one for one in engine.tensorrt_llm.not_executed)


def test_the_fingerprint_changes_with_version_and_gpu(place: Place) -> None:
    before = place.backend().fingerprint(spec_of())
    place.gpus = ["NVIDIA H200", "NVIDIA H200"]
    assert place.backend().fingerprint(spec_of()) == {
        "tensorrt_llm": "1.2.1",
        "gpus": "NVIDIA H200",
    }
    assert before != place.backend().fingerprint(spec_of())
    assert before != place.backend().fingerprint(spec_of(version="1.1"))


def test_the_registry_has_it_and_says_that_it_does_not_step() -> None:
    assert type(backend("trt_engine")).__name__ == "TrtEngineBackend"
    with pytest.raises(UsageError, match="does not run inside this program"):
        loader("trt_engine")


def test_an_interrupted_build_leaves_no_process(place: Place, tmp_path: Path) -> None:
    (place.bin / "trtllm-build").write_text(
        '#!/bin/sh\ncase "$*" in *--help*) exec '
        + f"{place.bin}/help;; esac\necho $$ > {tmp_path}/pid\n"
        "echo Build TensorRT engine\nsleep 60 &\nwait\n"
    )
    help_text = place_with_builder(tmp_path / "other").bin / "trtllm-build"
    (place.bin / "help").write_text(f"#!/bin/sh\nexec {help_text} --help\n")
    (place.bin / "help").chmod(0o755)

    def interrupt(done: int, total: int | None, what: str) -> None:
        if what.endswith("choosing kernels"):
            raise KeyboardInterrupt

    checkpoint = write_trtllm_checkpoint(tmp_path / "checkpoint")
    (tmp_path / "engine").mkdir()
    with pytest.raises(KeyboardInterrupt):
        place.backend().compile(checkpoint, spec_of(), tmp_path / "engine", interrupt)
    group = int((tmp_path / "pid").read_text())
    deadline = time.monotonic() + 5  # the kernel takes its time over orphans
    while _running(group) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert _running(group) == []


def _running(group: int) -> list[str]:
    """Processes of the group that are not dead yet; zombies wait for their parent, which is not
    us.
    """
    found = []
    for file in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, its_group = file.read_text().rpartition(")")[2].split()[:3]
            if int(its_group) == group and state != "Z":
                found.append(file.parent.name)
    return found
