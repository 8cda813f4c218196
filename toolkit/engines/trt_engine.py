"""The `trt_engine` kind: TensorRT-LLM's engine flow. `trtllm-build` makes a `rank{N}.engine` for
every rank of a checkpoint in TRT-LLM format.

The builder does the work. This module gives it exact arguments, explains its failures, and checks
the result: the engine's config, its files and, if TensorRT can be imported, the engine itself. The
record says what no GPU has executed.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from toolkit.engines.embedded.directory import copy_side_files
from toolkit.engines.trtllm.checkpoint import TrtLlmCheckpoint, open_trtllm_format
from toolkit.engines.trtllm.checks import BuiltEngine, check_engine, read_engine
from toolkit.engines.trtllm.command import BuildCommand, build_flags, flags_of, misfits
from toolkit.engines.trtllm.failures import explain_failure
from toolkit.engines.trtllm.inspect import inspect_engine
from toolkit.engines.trtllm.installed import (
    flags_of_help,
    flags_of_parser,
    table_disagreements,
    unknown_to_installation,
)
from toolkit.engines.trtllm.process import run_build
from toolkit.engines.trtllm.where import Builder, ContainerBuilder, choose_builder
from toolkit.errors import CheckpointError, StageError
from toolkit.interfaces import EngineSpec, Fingerprint, Progress, TensorRtLlmSpec
from toolkit.pipeline.machine import gpus
from toolkit.records.build import CompiledEngine, LayerCounts, QuantizedCheckpoint, TensorRtLlmBuild
from toolkit.records.measured import Finding
from toolkit.words import Role

__all__ = ["LOG", "TrtEngineBackend"]

LOG = "build.log"
LOG_TAIL_LINES = 15  # shown if a build fails
HELP_TIMEOUT_S = 600  # the container's image may have to be fetched first
COMMAND = "trtllm-build.sh"  # the command of an engine that was not built


def _importable(name: str) -> Any | None:
    """The module, or None if it is not installed.

    Raises ImportError if it is installed and cannot be imported.
    """
    return importlib.import_module(name) if importlib.util.find_spec(name) else None


def _installed_parser() -> argparse.ArgumentParser | None:
    """The argument parser of the TensorRT-LLM in this environment; None if there is none."""
    if importlib.util.find_spec("tensorrt_llm") is None:
        return None
    parser: argparse.ArgumentParser = importlib.import_module(
        "tensorrt_llm.commands.build"
    ).parse_arguments()
    return parser


@dataclass(frozen=True)
class TrtEngineBackend:
    """Implements EngineBackend. The fields give access to the machine, so that tests can replace
    it.
    """

    which: Callable[[str], str | None] = shutil.which
    environment: Mapping[str, str] = field(default_factory=lambda: os.environ)
    installed_parser: Callable[[], argparse.ArgumentParser | None] = _installed_parser
    tensorrt: Callable[[], Any | None] = lambda: _importable("tensorrt")
    gpus: Callable[[], list[str]] = gpus

    def fingerprint(self, spec: EngineSpec) -> Fingerprint:
        """The version and the GPUs, on which engines depend. It does not matter where the builder
        runs.
        """
        return {
            "tensorrt_llm": _trtllm_spec(spec).version,
            "gpus": ", ".join(sorted(set(self.gpus()))) or "none",
        }

    def check_builder(self, spec: EngineSpec) -> None:
        """Check that there is a builder, before hours are spent on the checkpoint it would build.

        Raises BackendUnavailable, UsageError and StageError as `compile` does.
        """
        trtllm = _trtllm_spec(spec)
        choose_builder(
            trtllm.builder,
            trtllm.version,
            spec.role,
            which=self.which,
            environment=self.environment,
        )

    def compile(
        self, checkpoint: QuantizedCheckpoint, spec: EngineSpec, out_dir: Path, progress: Progress
    ) -> CompiledEngine:
        """Build the engine, check it, and describe it.

        Raises StageError if the build fails or the engine is not the one requested, CheckpointError
        for an unusable checkpoint, BackendUnavailable if there is no builder, UsageError for a
        version without a builder.
        """
        trtllm = _trtllm_spec(spec)
        source = open_trtllm_format(checkpoint, trtllm.tp_size, trtllm.pp_size)
        source, out_dir = replace(source, path=source.path.resolve()), out_dir.resolve()
        _agree(checkpoint, source)
        builder = choose_builder(
            trtllm.builder,
            trtllm.version,
            spec.role,
            which=self.which,
            environment=self.environment,
        )
        with tempfile.TemporaryDirectory(prefix="toolkit-build-") as scratch:
            command = self._command(builder, source, spec, trtllm, out_dir, Path(scratch))
            findings = self._check_flags(builder, command, source, trtllm, out_dir, progress)
            self._build(builder, command, source, spec, out_dir, Path(scratch), progress)
        built = read_engine(out_dir)
        findings += check_engine(built, source, spec, trtllm, command)
        _refuse(findings, out_dir)
        inspected, layers = self._inspect(builder, built, progress)
        _refuse(inspected, out_dir)
        copy_side_files(checkpoint.path, out_dir)
        executed, not_executed = self._executed(built, layers)
        return CompiledEngine(
            role=spec.role,
            path=out_dir,
            kind="trt_engine",
            mode="engine",
            dtype=source.dtype,
            device="cuda",
            quant_algo=built.quant_algo,
            kv_cache_quant_algo=built.kv_cache_quant_algo,
            fp8_compute="native" if built.quant_algo == "FP8" else None,
            max_batch_size=built.max_batch_size,
            max_input_len=built.max_input_len,
            max_seq_len=spec.max_seq_len,  # the builder's value includes the draft tokens
            max_draft_len=built.max_draft_len,
            vocab_size=built.vocab_size,
            weight_bytes=sum(built.rank_bytes.values()),
            notes=tuple(
                f"{finding.check}: {finding.detail}"
                for finding in (*findings, *inspected)
                if finding.severity == "warning"
            ),
            tensorrt_llm=TensorRtLlmBuild(
                version=built.version,
                builder=builder.name,
                command=("trtllm-build", *command.arguments),
                tp_size=built.tp_size,
                pp_size=built.pp_size,
                max_num_tokens=built.max_num_tokens,
                checks=(*findings, *inspected),
                executed=executed,
                not_executed=not_executed,
                layers=layers,
            ),
        )

    def without_building(
        self, checkpoint: QuantizedCheckpoint, spec: EngineSpec, out_dir: Path
    ) -> CompiledEngine:
        """Do everything of `compile` that needs no builder, for rehearsals.

        The checkpoint is read, and the command is checked and written to the file COMMAND. There is
        no engine.
        """
        trtllm = _trtllm_spec(spec)
        source = open_trtllm_format(checkpoint, trtllm.tp_size, trtllm.pp_size)
        _agree(checkpoint, source)
        flags = _checked_command(
            source, spec, trtllm, (str(source.path), str(out_dir), str(out_dir / "model.cache"))
        )
        command = ("trtllm-build", *flags.arguments)
        (out_dir / COMMAND).write_text(f"{shlex.join(command)}\n", encoding="utf-8")
        copy_side_files(checkpoint.path, out_dir)
        return CompiledEngine(
            role=spec.role,
            path=out_dir,
            kind="trt_engine",
            mode="not built",
            dtype=source.dtype,
            device="cuda",
            quant_algo=source.quant_algo,
            kv_cache_quant_algo=source.kv_cache_quant_algo,
            fp8_compute=None,
            max_batch_size=spec.max_batch_size,
            max_input_len=spec.max_input_len,
            max_seq_len=spec.max_seq_len,
            max_draft_len=spec.max_draft_len,
            vocab_size=source.vocab_size,
            weight_bytes=sum(source.rank_bytes),
            notes=(),
            tensorrt_llm=TensorRtLlmBuild(
                version=trtllm.version,
                builder="none",
                command=command,
                tp_size=trtllm.tp_size,
                pp_size=trtllm.pp_size,
                max_num_tokens=trtllm.max_num_tokens,
                checks=(),
                executed=(),
                not_executed=(
                    (
                        f"trtllm-build did not run: there is no engine, only the command that"
                        f" would build it, in {COMMAND}"
                    ),
                ),
            ),
        )

    def _command(
        self,
        builder: Builder,
        source: TrtLlmCheckpoint,
        spec: EngineSpec,
        trtllm: TensorRtLlmSpec,
        out_dir: Path,
        scratch: Path,
    ) -> BuildCommand:
        return _checked_command(source, spec, trtllm, builder.paths(source.path, out_dir, scratch))

    def _check_flags(
        self,
        builder: Builder,
        command: BuildCommand,
        source: TrtLlmCheckpoint,
        trtllm: TensorRtLlmSpec,
        out_dir: Path,
        progress: Progress,
    ) -> list[Finding]:
        """Compare the command's flags with those that the builder has, before the build starts."""
        note = ""
        if isinstance(builder, ContainerBuilder):
            note = " (its image is fetched first if it is not here)"
        progress(0, None, f"asking trtllm-build for its flags{note}")
        offered = None
        if not isinstance(builder, ContainerBuilder):
            try:
                parser = self.installed_parser()
                offered = None if parser is None else flags_of_parser(parser)
            except Exception as error:
                progress(0, None, f"tensorrt_llm cannot be imported here ({type(error).__name__})")
        if offered is None:
            line = builder.command(("--help",), source.path, out_dir)
            try:
                done = subprocess.run(
                    line,
                    capture_output=True,
                    text=True,
                    timeout=HELP_TIMEOUT_S,
                    check=False,
                    env=dict(self.environment),
                )
            except subprocess.TimeoutExpired as error:
                raise StageError(
                    "compile", f"{builder.name}: no answer to --help within {HELP_TIMEOUT_S} s"
                ) from error
            if done.returncode != 0:
                raise _failed(builder, done.returncode, done.stdout + done.stderr, None)
            offered = flags_of_help(done.stdout)
        refused = unknown_to_installation(command, offered)
        if refused:
            raise StageError(
                "compile",
                f"the trtllm-build of {builder.name} does not have the flags that the toolkit knows"
                f" of {trtllm.version}: {'; '.join(refused)}",
                hint=(
                    "Set engine.tensorrt_llm to the version that is installed, or set"
                    " engine.builder: container."
                ),
            )
        return table_disagreements(offered, trtllm.version)

    def _build(
        self,
        builder: Builder,
        command: BuildCommand,
        source: TrtLlmCheckpoint,
        spec: EngineSpec,
        out_dir: Path,
        scratch: Path,
        progress: Progress,
    ) -> None:
        outcome = run_build(
            builder.command(command.arguments, source.path, out_dir),
            out_dir / LOG,
            progress,
            what=f"{spec.role}: ",
            world_size=source.tp_size * source.pp_size,
            cwd=scratch,
            environment=self.environment,
            stop_command=builder.stop_command(),
        )
        if outcome.returncode != 0:
            raise _failed(builder, outcome.returncode, outcome.log, _kept(out_dir / LOG, spec.role))

    def _inspect(
        self, builder: Builder, built: BuiltEngine, progress: Progress
    ) -> tuple[list[Finding], LayerCounts | None]:
        """Open the engine of rank 0 with TensorRT.

        Rank 0 stands for all ranks: the others have the same layers with other weights. Its tensors
        are those of the first pipeline stage. The TensorRT here may have another version than the
        builder's, or lack the kernels; then the engine cannot be inspected.
        """
        try:
            trt = self.tensorrt()
        except Exception as error:
            return [
                Finding("deserialization", "warning", f"tensorrt cannot be imported: {error}")
            ], None
        if trt is None or not self.gpus():
            return [], None
        progress(0, None, "opening the engine with TensorRT")
        _load_plugins()
        findings, layers = inspect_engine(
            built.path / "rank0.engine", trt, first=True, last=built.pp_size == 1
        )
        if layers is None and isinstance(builder, ContainerBuilder):
            detail = (
                f"not opened: TensorRT {trt.__version__} here cannot read the engine that the"
                " container's TensorRT built"
            )
            return [Finding("deserialization", "warning", detail)], None
        return findings, layers

    def _executed(
        self,
        built: BuiltEngine,
        layers: LayerCounts | None,
    ) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """What a GPU has executed of the engine, and what none has."""
        gpu_names = self.gpus()
        executed, missing = [], []
        if gpu_names:
            executed.append(f"trtllm-build {built.version} chose its kernels on {gpu_names[0]}")
        else:
            missing.append(
                "trtllm-build ran on a machine without an NVIDIA GPU: no kernel was timed or tried"
            )
        if layers is not None:
            executed.append("rank 0 was deserialized by TensorRT")
        else:
            missing.append(
                "the engine was not opened: this environment has no GPU, or no tensorrt module"
                " that can read it"
            )
        missing.append("no token was generated with the engine; validation does that")
        return tuple(executed), tuple(missing)


def _trtllm_spec(spec: EngineSpec) -> TensorRtLlmSpec:
    assert spec.tensorrt_llm is not None, "the kind trt_engine needs a TensorRtLlmSpec"
    return spec.tensorrt_llm


def _checked_command(
    source: TrtLlmCheckpoint, spec: EngineSpec, trtllm: TensorRtLlmSpec, paths: tuple[str, str, str]
) -> BuildCommand:
    """The command for these paths (checkpoint, engine, timing cache), checked against the toolkit's
    table of the version's flags.
    """
    checkpoint_dir, output_dir, timing_cache = paths
    command = build_flags(
        spec,
        trtllm,
        quant_algo=source.quant_algo,
        kv_cache_quant_algo=source.kv_cache_quant_algo,
        checkpoint_dir=checkpoint_dir,
        output_dir=output_dir,
        timing_cache=timing_cache,
    )
    errors = misfits(command, flags_of(trtllm.version))
    assert not errors, errors  # the toolkit's command has to agree with its table
    return command


def _agree(checkpoint: QuantizedCheckpoint, source: TrtLlmCheckpoint) -> None:
    """Check that the engine is built from the checkpoint whose quality was measured."""
    for name in ("quant_algo", "kv_cache_quant_algo", "vocab_size"):
        expected, actual = getattr(checkpoint, name), getattr(source, name)
        if expected != actual:
            raise CheckpointError(
                f"{name} is {actual}, but {expected} in the checkpoint that it was written from",
                where=source.path / "config.json",
                hint="Write it again with `toolkit build --fresh quantize`.",
            )


def _refuse(findings: list[Finding], out_dir: Path) -> None:
    errors = [
        f"{finding.check}: {finding.detail}" for finding in findings if finding.severity == "error"
    ]
    if errors:
        raise StageError(
            "compile",
            f"the engine is not the one requested: {'; '.join(errors)}",
            hint=f"The log of the build is in {_kept(out_dir / LOG, 'engine')}.",
        )


def _failed(builder: Builder, returncode: int, log: str, kept: Path | None) -> StageError:
    failure, line = explain_failure(returncode, log)
    where = "" if kept is None else f"\n  The whole log: {kept}"
    if failure is not None:
        what = f"{failure.what}\n  line of its log: {line}" if line else failure.what
        return StageError(
            "compile", f"{builder.name} failed: {what}", hint=f"{failure.hint}{where}"
        )
    tail = "\n".join(f"    {text}" for text in log.splitlines()[-LOG_TAIL_LINES:])
    return StageError(
        "compile",
        f"{builder.name} ended with exit status {returncode}, for an unknown reason",
        hint=f"The end of its log:\n{tail}{where}",
    )


def _kept(log: Path, part: Role | Literal["engine"]) -> Path | None:
    """Copy the log, since the folder of a failed stage is removed; None if there is none."""
    if not log.is_file():
        return None
    descriptor, name = tempfile.mkstemp(prefix=f"toolkit-{part}-build-", suffix=".log")
    os.close(descriptor)
    return Path(shutil.copyfile(log, name))


def _load_plugins() -> None:
    """TensorRT-LLM's kernels register with TensorRT when the package is imported."""
    if importlib.util.find_spec("tensorrt_llm") is not None:
        importlib.import_module("tensorrt_llm")
