"""The `trtllm_pytorch` kind: TensorRT-LLM's PyTorch flow. It builds nothing: an engine directory is
a checkpoint and the arguments it is loaded with.

The target's directory holds the checkpoint in Hugging Face format and `llm_args.json`. The draft's
holds only a checkpoint, which the target's arguments name. The arguments are checked against the
toolkit's tables; if TensorRT-LLM is installed, also by its own classes; and if there is a GPU as
well, by loading the model once.
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

LOAD_TIMEOUT_S = 3600


def load_in_a_process(args: Mapping[str, Any]) -> str:
    """Load the model in a process of its own and generate one token; return the GPU's name.

    Raises StageError with the end of the process's output.
    """
    with tempfile.TemporaryDirectory(prefix="toolkit-load-") as scratch:
        write_llm_args(args, Path(scratch))
        try:
            done = subprocess.run(
                [sys.executable, "-m", load_once.__name__, scratch],
                capture_output=True,
                text=True,
                timeout=LOAD_TIMEOUT_S,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise StageError(
                "compile", f"TensorRT-LLM did not load the model within {LOAD_TIMEOUT_S} s"
            ) from error
    log = done.stdout + done.stderr
    if done.returncode != 0:
        failure, line = explain_failure(done.returncode, log)
        tail = "\n".join(f"    {text}" for text in log.splitlines()[-15:])
        what, hint = "TensorRT-LLM did not load the model", f"The end of its output:\n{tail}"
        if failure:
            what, hint = f"{what}: {failure.what} ({line})", failure.hint
        raise StageError("compile", what, hint=hint)
    result = json.loads(done.stdout.splitlines()[-1])
    if result["tokens"] != 1:
        raise StageError(
            "compile",
            f"TensorRT-LLM loaded the model and generated {result['tokens']} tokens instead of one",
        )
    return str(result["gpu"])


@dataclass(frozen=True)
class TrtllmPytorchBackend:
    """Implements EngineBackend. The fields give access to the machine, so that tests can replace
    it.
    """

    installed_version: Callable[[], str | None] = installed_version
    installed_class: Callable[[], Any | None] = installed_class
    load_once: Callable[[Mapping[str, Any]], str] = load_in_a_process
    gpus: Callable[[], list[str]] = gpus

    def fingerprint(self, spec: EngineSpec) -> Fingerprint:
        """The version, which decides how the arguments are spelled, and the version that is
        installed here, which checks them.
        """
        return {
            "tensorrt_llm": _trtllm_spec(spec).version,
            "installed": self.installed_version() or "none",
        }

    def compile(
        self, checkpoint: QuantizedCheckpoint, spec: EngineSpec, out_dir: Path, progress: Progress
    ) -> CompiledEngine:
        """Place the checkpoint, and write and check the arguments.

        Raises CheckpointError for a checkpoint in another format, UsageError for a setting that the
        version does not have, StageError if TensorRT-LLM refuses the arguments or cannot load the
        model.
        """
        trtllm = _trtllm_spec(spec)
        _check_format(checkpoint.path)
        progress(0, None, f"{spec.role}: placing the checkpoint")
        for file in sorted(checkpoint.path.iterdir()):
            if file.is_file():
                link_or_copy(file, out_dir / file.name)
        checks: list[Finding] = []
        executed: tuple[str, ...] = ()
        missing: tuple[str, ...] = ("a draft is loaded together with its target, not alone",)
        if spec.role == "target":
            args = llm_args(spec, trtllm, checkpoint.kv_cache_quant_algo)
            errors = faults(args, trtllm.version)
            assert not errors, errors  # the toolkit's arguments have to agree with its tables
            write_llm_args(args, out_dir)
            placed = resolved(args, out_dir, trtllm.draft_dir)
            checks, executed, missing = self._ask_installed(placed, trtllm, progress)
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
                version=trtllm.version,
                builder="none",
                command=(),
                tp_size=trtllm.tp_size,
                pp_size=trtllm.pp_size,
                max_num_tokens=trtllm.max_num_tokens,
                checks=tuple(checks),
                executed=executed,
                not_executed=missing,
            ),
        )

    def _ask_installed(
        self, args: Mapping[str, Any], trtllm: TensorRtLlmSpec, progress: Progress
    ) -> tuple[list[Finding], tuple[str, ...], tuple[str, ...]]:
        """The findings, what ran on a GPU, and what did not."""
        tables_only = "the arguments were checked only against the toolkit's tables"
        not_loaded = "TensorRT-LLM did not load the model"
        installed = self.installed_version()
        if installed is None:
            return [], (), (f"TensorRT-LLM is not installed here: {tables_only}", not_loaded)
        if not same_version(installed, trtllm.version):
            finding = Finding(
                "version",
                "warning",
                f"TensorRT-LLM {installed} is installed here, and the engine is for"
                f" {trtllm.version}",
            )
            missing = (f"another version is installed here: {tables_only}", not_loaded)
            return [finding], (), missing
        try:
            args_class = self.installed_class()
        except Exception as error:
            finding = Finding(
                "TensorRT-LLM",
                "warning",
                f"{installed} is installed and cannot be imported: {error}",
            )
            return [finding], (), (f"TensorRT-LLM cannot be imported: {tables_only}", not_loaded)
        if args_class is None:
            return [], (), (f"TensorRT-LLM cannot be imported here: {tables_only}", not_loaded)
        progress(0, None, f"asking TensorRT-LLM {installed} about the arguments")
        reason = refusal(args, args_class)
        if reason is not None:
            raise StageError(
                "compile",
                f"TensorRT-LLM {installed} refuses arguments that the toolkit's tables of"
                f" {trtllm.version} allow: {reason}",
                hint=(
                    "please report it: the tables are wrong. If the message names an `engine`"
                    " setting, you can remove that setting"
                ),
            )
        checks = [
            Finding("arguments", "ok", f"accepted by TensorRT-LLM {installed}"),
            *field_disagreements(args_class, trtllm.version),
        ]
        if len(self.gpus()) < trtllm.world_size:
            reason = f"it needs {trtllm.world_size} GPUs, and {len(self.gpus())} are here"
            return checks, (), (f"{not_loaded}: {reason}",)
        if trtllm.speculation in ("draft_target", "eagle3") and trtllm.draft_dir is None:
            return checks, (), (f"{not_loaded}: the draft's folder was not given",)
        progress(0, None, "loading the model once")
        gpu = self.load_once(args)
        executed = f"TensorRT-LLM {installed} loaded the model and generated one token on {gpu}"
        return checks, (executed,), ()


def _trtllm_spec(spec: EngineSpec) -> TensorRtLlmSpec:
    assert spec.tensorrt_llm is not None, "the kind trtllm_pytorch needs a TensorRtLlmSpec"
    return spec.tensorrt_llm


def _check_format(path: Path) -> None:
    config = read_json(path / "config.json")
    if "architectures" not in config:
        hint = "Quantize again for engine.kind: trtllm_pytorch."
        raise CheckpointError(
            "not a checkpoint in Hugging Face format", where=path / "config.json", hint=hint
        )


def _dtype(path: Path) -> str:
    config = read_json(path / "config.json")
    return str(config.get("dtype") or config.get("torch_dtype") or "auto")
