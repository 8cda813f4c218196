"""The PyTorch flow: a checkpoint and its arguments, asked of classes like TensorRT-LLM's own,
and loaded by a stand-in.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, ConfigDict, create_model

from tests.support.checkpoints import write_checkpoint
from toolkit.engines.registry import backend
from toolkit.engines.trtllm.llm_args import llm_args as written_args
from toolkit.engines.trtllm.llm_args import read_llm_args, resolved, write_llm_args
from toolkit.engines.trtllm.llm_classes import refusal
from toolkit.engines.trtllm_pytorch import TrtllmPytorchBackend
from toolkit.errors import CheckpointError, StageError
from toolkit.facts.llm_args import LLM_ARGS
from toolkit.interfaces import EngineSpec, TensorRtLlmSpec
from toolkit.records.build import CompiledEngine, QuantizedCheckpoint
from toolkit.records.codec import from_json, to_json
from toolkit.standins.trtllm import PACKAGE, RELEASE_VARIABLE
from toolkit.standins.trtllm.tensorrt_llm.llmapi import llm_args


def silent(done: int, total: int | None, what: str) -> None:
    pass


def spec_of(role: str = "target", version: str = "1.2.1", **asked: Any) -> EngineSpec:
    return EngineSpec(
        role=role,
        max_batch_size=4,
        max_input_len=128,
        max_seq_len=256,
        max_draft_len=4 if role == "target" else 0,
        tensorrt_llm=TensorRtLlmSpec(
            version, **{"speculation": "draft_target", "draft_dir": Path("/draft"), **asked}
        ),
    )


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> QuantizedCheckpoint:
    path = write_checkpoint(tmp_path_factory.mktemp("checkpoint") / "target")
    return QuantizedCheckpoint(
        "target", path, "FP8", "FP8", "LlamaForCausalLM", 258, 1000, None, ()
    )


def args_class(without: tuple[str, ...] = (), **more: Any) -> type[BaseModel]:
    """A class with our table's fields, as forbidding as the real one, and like it pydantic."""
    names = {
        field.name: (Any, None)
        for field in LLM_ARGS
        if "1.2.1" in field.versions and field.name not in without
    }
    made: type[BaseModel] = create_model(
        "TorchLlmArgs",
        __config__=ConfigDict(extra="forbid"),
        __module__=llm_args.__name__,  # where its DecodingBaseConfig stands
        **{**names, **more},
    )  # type: ignore[call-overload]
    return made


def compiled(
    checkpoint: QuantizedCheckpoint, spec: EngineSpec, out_dir: Path, **fields: Any
) -> CompiledEngine:
    out_dir.mkdir(exist_ok=True)
    given: dict[str, Any] = {
        "installed_version": lambda: None,
        "installed_class": lambda: None,
        "gpus": list,
        **fields,
    }
    return TrtllmPytorchBackend(**given).compile(checkpoint, spec, out_dir, silent)


def test_the_directory_is_a_checkpoint_with_its_arguments(
    checkpoint: QuantizedCheckpoint, tmp_path: Path
) -> None:
    engine = compiled(checkpoint, spec_of(), tmp_path)
    assert read_llm_args(tmp_path)["speculative_config"]["speculative_model"] == "../draft"
    assert json.loads((tmp_path / "config.json").read_text()) == json.loads(
        (checkpoint.path / "config.json").read_text()
    )
    assert (tmp_path / "model.safetensors").samefile(
        checkpoint.path / "model.safetensors"
    )  # no second copy of the weights
    assert (engine.kind, engine.mode, engine.quant_algo, engine.max_draft_len) == (
        "trtllm_pytorch",
        "runtime",
        "FP8",
        4,
    )
    assert engine.weight_bytes == (tmp_path / "model.safetensors").stat().st_size
    assert from_json(CompiledEngine, to_json(engine)) == engine


def test_the_draft_is_a_checkpoint_alone(checkpoint: QuantizedCheckpoint, tmp_path: Path) -> None:
    compiled(checkpoint, spec_of("draft"), tmp_path)
    assert not (tmp_path / "llm_args.json").exists()
    assert (tmp_path / "model.safetensors").is_file()


def test_without_tensorrt_llm_the_record_says_what_was_not_done(
    checkpoint: QuantizedCheckpoint, tmp_path: Path
) -> None:
    build = compiled(checkpoint, spec_of(), tmp_path).tensorrt_llm
    assert build is not None
    assert build.executed == ()
    assert build.not_executed == (
        "TensorRT-LLM is not installed here: the arguments were checked only"
        " against the toolkit's tables",
        "TensorRT-LLM did not load the model",
    )


def test_its_own_class_is_asked_and_a_disagreement_is_reported(
    checkpoint: QuantizedCheckpoint, tmp_path: Path
) -> None:
    theirs = args_class(without=("enable_min_latency",), enable_time_travel=(Any, None))
    engine = compiled(
        checkpoint,
        spec_of(),
        tmp_path,
        installed_version=lambda: "1.2.1",
        installed_class=lambda: theirs,
    )
    assert engine.notes == (
        "our facts: LLM() 1.2.1 here has no enable_min_latency, but our table lists it",
        "our facts: LLM() 1.2.1 here has enable_time_travel, which our table does not list",
    )


def test_arguments_that_its_class_refuses_stop_the_build(
    checkpoint: QuantizedCheckpoint, tmp_path: Path
) -> None:
    theirs = args_class(without=("cuda_graph_config",))
    with pytest.raises(
        StageError,
        match=r"(?s)refuses arguments that the toolkit's tables of 1\.2\.1 allow:"
        r" .*cuda_graph_config",
    ):
        compiled(
            checkpoint,
            spec_of(),
            tmp_path,
            installed_version=lambda: "1.2.1",
            installed_class=lambda: theirs,
        )


DRAFTS = {"decoding_type": "DraftTarget", "max_draft_len": 4, "speculative_model": "/draft"}


def test_a_speculative_config_becomes_an_object_of_the_release() -> None:
    """1.2.1 refuses the mapping, in which decoding_type is one key too many, and takes the object
    that its from_dict makes of it.
    """
    args = {"model": "/target", "speculative_config": DRAFTS}
    with pytest.raises(ValueError, match=r"DraftTargetDecodingConfig\.decoding_type"):
        llm_args.TorchLlmArgs(**args)
    assert refusal(args, llm_args.TorchLlmArgs) is None
    assert args["speculative_config"] == DRAFTS  # from_dict takes a key out of what it is given
    spelled_as_later = {**DRAFTS, "decoding_type": "Draft_Target"}
    said = refusal({**args, "speculative_config": spelled_as_later}, llm_args.TorchLlmArgs)
    assert said == "Invalid decoding type: Draft_Target"


LOADING = """
import sys, torch
torch.cuda.get_device_name = lambda index: "stand-in"
from toolkit.engines.trtllm.load_once import main
main(sys.argv[1])
"""


@pytest.mark.slow
@pytest.mark.parametrize("release", ["1.1.0", "1.2.1", "1.4.0rc1"])
def test_the_trial_load_takes_what_was_written(tmp_path: Path, release: str) -> None:
    version = {"1.1.0": "1.1", "1.4.0rc1": "1.4rc"}.get(release, release)
    for role in ("target", "draft"):
        (tmp_path / role).mkdir()
    spec = spec_of(version=version)
    assert spec.tensorrt_llm is not None
    args = written_args(spec, spec.tensorrt_llm, "FP8")
    write_llm_args(resolved(args, tmp_path / "target", tmp_path / "draft"), tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", LOADING, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(PACKAGE.parent), RELEASE_VARIABLE: release},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == {"tokens": 1, "gpu": "stand-in"}


@pytest.mark.parametrize("error", [RuntimeError, AttributeError, ValueError, TypeError])
def test_whatever_its_classes_raise_is_a_refusal(error: type[Exception]) -> None:
    """A validator of 1.0 asks for the device, and Eagle's constructor of 1.1 sets attributes."""

    def raises(**_args: Any) -> None:
        raise error("no CUDA GPUs are available")

    raises.__module__ = llm_args.__name__
    assert refusal({"model": "/target"}, raises) == "no CUDA GPUs are available"


def test_with_gpus_the_model_is_loaded_once(
    checkpoint: QuantizedCheckpoint, tmp_path: Path
) -> None:
    loaded: list[Mapping[str, Any]] = []

    def load(args: Mapping[str, Any]) -> str:
        loaded.append(args)
        return "NVIDIA H200"

    installed: dict[str, Any] = {
        "installed_version": lambda: "1.2.1",
        "installed_class": args_class,
        "load_once": load,
    }
    build = compiled(
        checkpoint, spec_of(tp_size=2), tmp_path, gpus=lambda: ["NVIDIA H200"] * 2, **installed
    ).tensorrt_llm
    assert build is not None
    assert build.executed == (
        "TensorRT-LLM 1.2.1 loaded the model and generated one token on NVIDIA H200",
    )
    assert build.not_executed == ()
    assert (loaded[0]["model"], loaded[0]["speculative_config"]["speculative_model"]) == (
        str(tmp_path),
        "/draft",
    )
    build = compiled(
        checkpoint,
        spec_of(tp_size=4),
        tmp_path / "4",
        gpus=lambda: ["NVIDIA H200"] * 2,
        **installed,
    ).tensorrt_llm
    assert build is not None
    assert build.not_executed == (
        "TensorRT-LLM did not load the model: it needs 4 GPUs, and 2 are here",
    )


def test_another_version_is_not_asked(checkpoint: QuantizedCheckpoint, tmp_path: Path) -> None:
    engine = compiled(
        checkpoint,
        spec_of(),
        tmp_path,
        installed_version=lambda: "1.1.0",
        installed_class=args_class,
    )
    assert engine.notes == (
        "version: TensorRT-LLM 1.1.0 is installed here, and the engine is for 1.2.1",
    )


def test_the_other_form_is_refused(checkpoint: QuantizedCheckpoint, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps({"architecture": "LlamaForCausalLM", "dtype": "bfloat16"})
    )
    other = QuantizedCheckpoint(
        "target", tmp_path, "FP8", None, "LlamaForCausalLM", 258, 1000, None, ()
    )
    with pytest.raises(CheckpointError, match="not a checkpoint in Hugging Face format"):
        compiled(other, spec_of(), tmp_path / "engine")


def test_the_fingerprint_changes_with_version_and_installation() -> None:
    fingerprints = [
        TrtllmPytorchBackend(installed_version=lambda here=here: here).fingerprint(
            spec_of(version=version)
        )  # type: ignore[misc]
        for version in ("1.2.1", "1.4rc")
        for here in (None, "1.2.1")
    ]
    assert len({json.dumps(fingerprint) for fingerprint in fingerprints}) == 4
    assert type(backend("trtllm_pytorch")) is TrtllmPytorchBackend
