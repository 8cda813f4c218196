"""The `trtllm_pytorch` kind: TensorRT-LLM's PyTorch flow. Nothing is built: a checkpoint, and the
arguments it is loaded with.

The target's directory holds the checkpoint in Hugging Face form and `llm_args.json`; the draft's is
a checkpoint alone, named by the target's arguments. The arguments are judged by our tables, by
TensorRT-LLM's own classes where they are installed, and by loading the model once where there is a
GPU as well.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolkit.checkpoints.shape import read_json
from toolkit.engines.trtllm import load_once
from toolkit.engines.trtllm.failures import explain_failure
from toolkit.engines.trtllm.llm_args import faults, llm_args, resolved, write_llm_args
from toolkit.engines.trtllm.llm_classes import (
    field_disagreements,
    installed_class,
    installed_version,
    refusal,
)
from toolkit.engines.trtllm.where import same_version
from toolkit.errors import CheckpointError, StageError
from toolkit.interfaces import EngineSpec, Fingerprint, Progress, TensorRtLlmSpec
from toolkit.pipeline.files import link_or_copy
from toolkit.pipeline.machine import gpus
from toolkit.records.build import CompiledEngine, QuantizedCheckpoint, TensorRtLlmBuild
from toolkit.records.measured import Finding

__all__ = ["TrtllmPytorchBackend", "load_in_a_process"]

LOADER = Path(load_once.__file__)
LOAD_TIMEOUT_S = 3600


def load_in_a_process(args: Mapping[str, Any]) -> str:
    """Load once and generate a token; the name of the GPU that did it. Raises StageError with
    what it said.
    """
    with tempfile.TemporaryDirectory(prefix="toolkit-load-") as scratch:
        file = Path(scratch) / "llm_args.json"
        file.write_text(json.dumps(args), encoding="utf-8")
        try:
            done = subprocess.run(
                [sys.executable, str(LOADER), str(file)],
                capture_output=True,
                text=True,
                timeout=LOAD_TIMEOUT_S,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise StageError(
                "compile", f"TensorRT-LLM did not load the model in {LOAD_TIMEOUT_S} s"
            ) from error
    log = done.stdout + done.stderr
    if done.returncode != 0:
        failure, line = explain_failure(done.returncode, log)
        tail = "\n".join(f"    {text}" for text in log.splitlines()[-15:])
        what = "TensorRT-LLM did not load the model" + (
            f": {failure.what} ({line})" if failure else ""
        )
        raise StageError(
            "compile", what, hint=failure.hint if failure else f"The end of its output:\n{tail}"
        )
    said = json.loads(done.stdout.splitlines()[-1])
    if said["tokens"] != 1:
        raise StageError(
            "compile",
            f"TensorRT-LLM loaded the model and generated {said['tokens']} tokens where one was"
            " asked",
        )
    return str(said["gpu"])


@dataclass(frozen=True)
class TrtllmPytorchBackend:
    """Implements EngineBackend. What it finds on the machine comes in through its fields."""

    installed_version: Callable[[], str | None] = installed_version
    installed_class: Callable[[], Any | None] = installed_class
    load_once: Callable[[Mapping[str, Any]], str] = load_in_a_process
    gpus: Callable[[], list[str]] = gpus

    def fingerprint(self, spec: EngineSpec) -> Fingerprint:
        """Nothing is compiled, so only the spelling depends on the version; what judges it
        beside our tables is in here too.
        """
        return {
            "tensorrt_llm": _asked(spec).version,
            "installed": self.installed_version() or "none",
        }

    def compile(
        self, checkpoint: QuantizedCheckpoint, spec: EngineSpec, out_dir: Path, progress: Progress
    ) -> CompiledEngine:
        """Raises CheckpointError for a checkpoint of another form, UsageError for what the version
        has no word for, StageError where TensorRT-LLM itself refuses the arguments or does not load
        them."""
        asked = _asked(spec)
        _check_form(checkpoint.path)
        progress(0, None, f"{spec.role}: placing the checkpoint")
        for file in sorted(checkpoint.path.iterdir()):
            if file.is_file():
                link_or_copy(file, out_dir / file.name)
        checks: list[Finding] = []
        executed: tuple[str, ...] = ()
        missing: tuple[str, ...] = ("a draft is loaded with its target, not by itself",)
        if spec.role == "target":
            args = llm_args(spec, asked, checkpoint.kv_cache_quant_algo)
            wrong = faults(args, asked.version)
            assert not wrong, wrong  # our own arguments against our own tables
            write_llm_args(args, out_dir)
            placed = resolved(args, out_dir, asked.draft_dir)
            checks, executed, missing = self._ask_installed(placed, asked, progress)
        return CompiledEngine(
            role=spec.role,
            path=out_dir,
            kind="trtllm_pytorch",
            mode="runtime",
            dtype=str(_dtype(checkpoint.path)),
            device="cuda",
            quant_algo=checkpoint.quant_algo,
            kv_cache_quant_algo=checkpoint.kv_cache_quant_algo,
            fp8_compute="native" if checkpoint.quant_algo == "FP8" else None,
            max_batch_size=spec.max_batch_size,
            max_input_len=spec.max_input_len,
            max_seq_len=spec.max_seq_len,
            max_draft_len=spec.max_draft_len,
            vocab_size=checkpoint.vocab_size,
            weight_bytes=sum(file.stat().st_size for file in out_dir.glob("*.safetensors")),
            notes=tuple(
                f"{finding.check}: {finding.detail}"
                for finding in checks
                if finding.severity == "warning"
            ),
            tensorrt_llm=TensorRtLlmBuild(
                version=asked.version,
                builder="none",
                command=(),
                tp_size=asked.tp_size,
                pp_size=asked.pp_size,
                max_num_tokens=asked.max_num_tokens,
                checks=tuple(checks),
                executed=executed,
                not_executed=missing,
            ),
        )

    def _ask_installed(
        self, args: Mapping[str, Any], asked: TensorRtLlmSpec, progress: Progress
    ) -> tuple[list[Finding], tuple[str, ...], tuple[str, ...]]:
        """Findings, what ran on a GPU, and what did not."""
        unasked = "the arguments were judged by our tables alone"
        never = "the model was not loaded by TensorRT-LLM"
        here = self.installed_version()
        if here is None:
            return [], (), (f"TensorRT-LLM is not installed here: {unasked}", never)
        if not same_version(here, asked.version):
            finding = Finding(
                "version",
                "warning",
                f"TensorRT-LLM {here} is installed here, the engine is for {asked.version}",
            )
            return [finding], (), (f"the installed version is another: {unasked}", never)
        try:
            args_class = self.installed_class()
        except Exception as error:
            finding = Finding(
                "TensorRT-LLM", "warning", f"{here} is installed and cannot be imported: {error}"
            )
            return [finding], (), (f"it cannot be imported: {unasked}", never)
        if args_class is None:
            return [], (), (f"TensorRT-LLM cannot be imported here: {unasked}", never)
        progress(0, None, f"asking TensorRT-LLM {here} about the arguments")
        said = refusal(args, args_class)
        if said is not None:
            raise StageError(
                "compile",
                f"TensorRT-LLM {here} refuses arguments that our tables of {asked.version} allow:"
                f" {said}",
                hint=(
                    "report it, please: our tables are wrong there. An `engine` setting that is"
                    " named can be removed"
                ),
            )
        checks = [
            Finding("arguments", "ok", f"taken by TensorRT-LLM {here}"),
            *field_disagreements(args_class, asked.version),
        ]
        if len(self.gpus()) < asked.world_size:
            return (
                checks,
                (),
                (f"{never}: it takes {asked.world_size} GPUs, and {len(self.gpus())} are here",),
            )
        if asked.speculation == "draft_target" and asked.draft_dir is None:
            return checks, (), (f"{never}: the draft's place was not given",)
        progress(0, None, "loading the model once")
        gpu = self.load_once(args)
        return (
            checks,
            (f"TensorRT-LLM {here} loaded the model and generated one token on {gpu}",),
            (),
        )


def _asked(spec: EngineSpec) -> TensorRtLlmSpec:
    assert spec.tensorrt_llm is not None, "the kind trtllm_pytorch is asked with a TensorRtLlmSpec"
    return spec.tensorrt_llm


def _check_form(path: Path) -> None:
    config = read_json(path / "config.json")
    if "architectures" not in config:
        hint = "Quantize again for engine.kind: trtllm_pytorch."
        raise CheckpointError(
            "not a checkpoint in Hugging Face form", where=path / "config.json", hint=hint
        )


def _dtype(path: Path) -> str:
    config = read_json(path / "config.json")
    return str(config.get("dtype") or config.get("torch_dtype") or "auto")
