"""The `torch` engine kind: it builds engine directories and loads them again.

Mode `auto` compiles if there is a C++ compiler, the device is a CPU, and the kernels have the
dtype. Otherwise the engine is eager, and its config and record say why. If the YAML names a mode
that is not possible, that is an error; the mode is never replaced.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from toolkit.checkpoints.quantized import open_checkpoint
from toolkit.engines.embedded.directory import (
    FORMAT,
    KERNELS,
    PACKAGE,
    WEIGHTS,
    EngineDirectory,
    copy_side_files,
    open_directory,
    write_config,
)
from toolkit.engines.embedded.engine import EmbeddedEngine, eager_engine, native_products
from toolkit.engines.embedded.weights import (
    fuse,
    int8_head,
    load_weights,
    save_weights,
    unit_kv_scales,
)
from toolkit.errors import BackendUnavailable, StageError
from toolkit.facts.embedded import PREFILL_TOKENS, has_int8_head
from toolkit.interfaces import EngineSpec, Fingerprint, Progress
from toolkit.pipeline.toolchain import compiler_path, compiler_version, instruction_set
from toolkit.records.build import CompiledEngine, QuantizedCheckpoint
from toolkit.words import BuiltMode, ComputeDtype, Device, Fp8Compute, KvDtype

__all__ = ["INT8_HEAD", "TorchBackend"]

UNIT_SCALES = "the FP8 KV cache has scale 1 (engine.kv_cache_dtype); figures of quality are without"
INT8_HEAD = "the LM head is INT8, too, since a draft only proposes"


class TorchBackend:
    """Implements EngineBackend."""

    def fingerprint(self, spec: EngineSpec) -> Fingerprint:
        mode, _ = _resolve_mode(spec)
        return {"mode": mode, "format": str(FORMAT), **_built_with(mode, spec.device)}

    def compile(
        self, checkpoint: QuantizedCheckpoint, spec: EngineSpec, out_dir: Path, progress: Progress
    ) -> CompiledEngine:
        """Build the engine directory.

        Raises StageError if the mode is not possible or the compiler fails, CheckpointError if the
        checkpoint cannot be read.
        """
        mode, notes = _resolve_mode(spec)
        source = open_checkpoint(checkpoint.path)
        progress(0, None, f"{spec.role}: fusing weights")
        weights = fuse(source)
        is_calibrated = source.quantization.kv_cache_quant_algo == "FP8"
        kv_dtype: KvDtype = "fp8" if is_calibrated else spec.kv_cache_dtype or _compute_dtype(spec)
        if kv_dtype == "fp8" and not is_calibrated:
            weights |= unit_kv_scales(source.shape.num_layers)
            notes = (*notes, UNIT_SCALES)
        if mode == "compiled" and has_int8_head(spec.role, source.quantization.quant_algo):
            weights |= int8_head(weights)
            notes = (*notes, INT8_HEAD)
        save_weights(weights, out_dir / WEIGHTS)
        weights = load_weights(out_dir / WEIGHTS)  # mapped: compiling holds packed ones beside them
        copy_side_files(checkpoint.path, out_dir)
        fp8_compute: Fp8Compute | None = None
        if source.quantization.quant_algo == "FP8":
            fp8_compute = "native" if native_products(spec.device).fp8 else "dequantized"
        max_step_tokens = max(spec.prefill_chunk_len or PREFILL_TOKENS, spec.max_draft_len + 1)
        if mode == "compiled":
            from toolkit.engines.embedded.compile import compile_package

            compile_package(
                source.shape,
                weights,
                spec,
                max_step_tokens,
                kernels=out_dir / KERNELS,
                package=out_dir / PACKAGE,
                progress=progress,
            )
        write_config(
            out_dir,
            shape=source.shape,
            quantization=source.quantization,
            spec=spec,
            mode=mode,
            fp8_compute=fp8_compute,
            kv_dtype=kv_dtype,
            max_step_tokens=max_step_tokens,
            built_with=_built_with(mode, spec.device),
            notes=notes,
        )
        return CompiledEngine(
            role=spec.role,
            path=out_dir,
            kind="torch",
            mode=mode,
            dtype=spec.dtype,
            device=spec.device,
            quant_algo=source.quantization.quant_algo,
            kv_cache_quant_algo=source.quantization.kv_cache_quant_algo,
            fp8_compute=fp8_compute,
            max_batch_size=spec.max_batch_size,
            max_input_len=spec.max_input_len,
            max_seq_len=spec.max_seq_len,
            max_draft_len=spec.max_draft_len,
            vocab_size=source.shape.vocab_size,
            weight_bytes=(out_dir / WEIGHTS).stat().st_size,
            notes=notes,
            kv_dtype=kv_dtype,
        )

    def load(self, engine_dir: Path, *, threads: int | None = None) -> EmbeddedEngine:
        """Load the engine. threads: set torch's thread count for this process; None keeps it.

        Raises StageError, BackendUnavailable.
        """
        directory = open_directory(engine_dir)
        if directory.device == "cuda" and not torch.cuda.is_available():
            raise BackendUnavailable(
                "CUDA", hint="this engine was built for a GPU; build again with engine.device: cpu"
            )
        if threads is not None:
            torch.set_num_threads(threads)
        if directory.mode == "compiled":
            _refuse_other_machine(directory)
            from toolkit.engines.embedded.package import load_package

            return load_package(directory)
        native = native_products(directory.device)
        return eager_engine(
            directory.shape,
            load_weights(engine_dir / WEIGHTS),
            kv_dtype=directory.kv_dtype,
            dtype=directory.dtype,
            max_batch_size=directory.max_batch_size,
            max_seq_len=directory.max_seq_len,
            max_step_tokens=directory.max_step_tokens,
            device=directory.device,
            native=replace(native, fp8=native.fp8 and directory.fp8_compute == "native"),
        )


def _compute_dtype(spec: EngineSpec) -> ComputeDtype:
    assert spec.dtype != "auto"  # the config of this engine kind has no auto
    return spec.dtype


def _resolve_mode(spec: EngineSpec) -> tuple[BuiltMode, tuple[str, ...]]:
    """(compiled or eager, notes). A note says why `auto` is not compiled."""
    obstacle: str | None = None
    if spec.device != "cpu":
        obstacle = f"device {spec.device} runs eager"
    elif spec.dtype == "float64":
        obstacle = "float64 runs eager"
    elif compiler_path() is None:
        obstacle = "no C++ compiler was found"
    if spec.mode == "compiled" and obstacle is not None:
        hint = "set engine.mode: auto"
        if compiler_path() is None:
            hint = "install g++, or set engine.mode: eager (slower)"
        raise StageError("compile", f"engine.mode compiled is not possible: {obstacle}", hint=hint)
    if spec.mode == "eager":
        return "eager", ()
    return ("compiled", ()) if obstacle is None else ("eager", (f"eager: {obstacle}",))


def _built_with(mode: BuiltMode, device: Device) -> Fingerprint:
    """The versions and the instruction set on which the engine depends."""
    facts: Fingerprint = {"torch": torch.__version__, "device": device}
    if mode == "compiled":
        from toolkit.engines.embedded.kernels import namespace, source_digest

        compiler = compiler_path()
        facts |= {
            "compiler": compiler_version(compiler) if compiler else "none",
            "cpu_capability": torch.backends.cpu.get_cpu_capability(),
            "instruction_set": " ".join(instruction_set()),
            "kernels": source_digest(),
            "namespace": namespace(),
        }
    if device == "cuda" and torch.cuda.is_available():
        facts["compute_capability"] = ".".join(
            str(part) for part in torch.cuda.get_device_capability()
        )
    return facts


def _refuse_other_machine(directory: EngineDirectory) -> None:
    """Raise StageError unless this machine has the instruction set and the torch that the engine
    was compiled for.
    """
    built = directory.built_with
    missing = sorted(set(built["instruction_set"].split()) - set(instruction_set()))
    if missing or built["cpu_capability"] != torch.backends.cpu.get_cpu_capability():
        here = torch.backends.cpu.get_cpu_capability()
        lack = f" and lacks {', '.join(missing)}" if missing else ""
        raise StageError(
            "load",
            f"engine was compiled for CPU capability {built['cpu_capability']}; this CPU is"
            f" {here}{lack}",
            where=directory.path,
            hint="run `toolkit build` on this machine, or build with engine.mode: eager",
        )
    if built["torch"] != torch.__version__:
        raise StageError(
            "load",
            f"engine was compiled with torch {built['torch']}, this is {torch.__version__}",
            where=directory.path,
            hint="run `toolkit build` again",
        )
