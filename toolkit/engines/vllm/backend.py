"""The `vllm` kind. It builds nothing: an engine directory is a checkpoint and the arguments it is
loaded with.

The target's directory holds the checkpoint in the format that vLLM reads, and `vllm_args.json`. The
draft's holds only a checkpoint, which the target's arguments name. If that version of vLLM is
installed here, its own classes check the arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from toolkit.checkpoints.shape import read_json
from toolkit.engines.vllm.arguments import (
    SPECULATION,
    brings_plugin,
    engine_args,
    environment_of,
    has_draft_model,
    resolved,
    write_engine_args,
)
from toolkit.engines.vllm.environment import VllmEnvironment, find_environment, is_same_version
from toolkit.engines.vllm.installed import Answer, ask_vllm
from toolkit.engines.vllm.sampling_plugin import FOLDER as PLUGINS
from toolkit.engines.vllm.sampling_plugin import VERSION, plugin_files
from toolkit.errors import BackendUnavailable, StageError
from toolkit.interfaces import EngineSpec, Fingerprint, Progress, VllmSpec
from toolkit.pipeline.files import link_or_copy
from toolkit.pipeline.machine import gpus
from toolkit.records.build import CompiledEngine, QuantizedCheckpoint
from toolkit.words import Fp8Compute

__all__ = ["VllmBackend", "served_checkpoint"]

NOT_CHECKED = "vLLM did not check the arguments"
CORRECTED = "brings a plugin for vLLM that corrects sampled drafts on a CPU (vLLM issue 55005)"
# Argument of vLLM -> the key of the YAML that it is made of.
KEYS = {
    "model": "target.checkpoint",
    "dtype": "engine.dtype",
    "max_model_len": "engine.max_seq_len",
    "max_num_seqs": "engine.max_batch_size",
    "max_num_batched_tokens": "engine.max_num_batched_tokens",
    "enable_prefix_caching": "engine.enable_prefix_caching",
    "tensor_parallel_size": "engine.tp_size",
    "pipeline_parallel_size": "engine.pp_size",
    "kv_cache_dtype": "target.quantization.kv_cache_quant_algo",
    "gpu_memory_utilization": "engine.gpu_memory_utilization",
    SPECULATION: "speculation",
}


class FindEnvironment(Protocol):
    def __call__(self, python: Path | None) -> VllmEnvironment: ...


def served_checkpoint(checkpoint: QuantizedCheckpoint) -> Path:
    """The folder that vLLM reads: the one written for it, else the common format."""
    return checkpoint.path if checkpoint.vllm is None else checkpoint.vllm.path


@dataclass(frozen=True)
class VllmBackend:
    """Implements EngineBackend. The fields give access to the machine, so that tests can replace
    it.
    """

    find_environment: FindEnvironment = find_environment
    ask_vllm: Callable[..., Answer] = ask_vllm
    gpus: Callable[[], list[str]] = gpus

    def fingerprint(self, spec: EngineSpec) -> Fingerprint:
        """The version, which decides how the arguments are spelled, and what checks them here: the
        installed version, whether the devices are here, and the plugin that the engine brings.
        """
        settings = _settings(spec)
        devices = "here"
        try:
            environment = self.find_environment(settings.python)
        except BackendUnavailable as error:
            installed = "none" if error.fault is None else "unusable"
        else:
            installed = f"{environment.distribution} {environment.version}"
            if self._missing_devices(spec, environment) is not None:
                devices = "missing"
        plugin = {"plugin": VERSION} if brings_plugin(spec, settings) else {}
        return {"vllm": settings.version, "installed": installed, "devices": devices, **plugin}

    def compile(
        self, checkpoint: QuantizedCheckpoint, spec: EngineSpec, out_dir: Path, progress: Progress
    ) -> CompiledEngine:
        """Place the checkpoint, and write and check the arguments.

        Raises StageError if vLLM refuses the arguments, or if its environment does not work.
        """
        settings = _settings(spec)
        folder = served_checkpoint(checkpoint)
        progress(0, None, f"{spec.role}: placing the checkpoint")
        for file in sorted(folder.iterdir()):
            if file.is_file():
                link_or_copy(file, out_dir / file.name)
        dtype: str = settings.dtype
        notes: list[str] = []
        if spec.role == "target":
            args = engine_args(spec, settings, checkpoint.kv_cache_quant_algo)
            write_engine_args(out_dir, args)
            placed = resolved(args, out_dir, settings.draft_dir)
            resolved_dtype, note = self._check(placed, spec, progress)
            dtype = resolved_dtype or dtype
            notes.append(note)
            if brings_plugin(spec, settings):
                _write_plugin(out_dir / PLUGINS)
                notes.append(CORRECTED)
        return CompiledEngine(
            role=spec.role,
            path=out_dir,
            kind="vllm",
            mode="runtime",
            dtype=_stated_dtype(out_dir) if dtype == "auto" else dtype,
            device=spec.device,
            quant_algo=checkpoint.quant_algo,
            kv_cache_quant_algo=checkpoint.kv_cache_quant_algo,
            fp8_compute=_fp8_compute(checkpoint, spec),
            max_batch_size=spec.max_batch_size,
            max_input_len=spec.max_input_len,
            max_seq_len=spec.max_seq_len,
            max_draft_len=spec.max_draft_len,
            vocab_size=checkpoint.vocab_size,
            weight_bytes=sum(file.stat().st_size for file in out_dir.glob("*.safetensors")),
            notes=tuple(notes),
        )

    def _check(
        self, args: Mapping[str, Any], spec: EngineSpec, progress: Progress
    ) -> tuple[str | None, str]:
        """The dtype of the activations, if vLLM says it, and a note: who checked the arguments."""
        settings = _settings(spec)
        try:
            environment = self.find_environment(settings.python)
        except BackendUnavailable as error:
            return None, f"{NOT_CHECKED}: {error.what} ({error.hint})"
        if not is_same_version(environment.version, settings.version):
            return None, (
                f"{NOT_CHECKED}: {environment.python} has {environment.version}, and the engine is"
                f" for {settings.version}"
            )
        obstacle = self._missing_devices(spec, environment)
        if obstacle is None and has_draft_model(args) and settings.draft_dir is None:
            obstacle = "the draft's folder was not given"
        progress(0, None, f"asking vLLM {environment.version} about the arguments")
        answer = self.ask_vllm(
            environment, args, environment_of(spec, settings), has_device=obstacle is None
        )
        if answer.reason is not None:
            raise _refused(environment, answer, settings)
        if obstacle is not None:
            return None, (
                f"vLLM {environment.version} knows the arguments, and did not check their values:"
                f" {obstacle}"
            )
        return answer.dtype, f"vLLM {environment.version} accepts the arguments"

    def _missing_devices(self, spec: EngineSpec, environment: VllmEnvironment) -> str | None:
        """Why vLLM cannot make its whole configuration here; None if it can."""
        if environment.platform != spec.device:
            build = environment.platform or "another device"
            return f"the engine is for {spec.device}, and the installed build for {build}"
        world_size = _settings(spec).tp_size * _settings(spec).pp_size
        if spec.device == "cuda" and len(self.gpus()) < world_size:
            return f"it needs {world_size} GPUs, and {len(self.gpus())} are here"
        return None


def _write_plugin(folder: Path) -> None:
    for name, text in plugin_files().items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")


def _refused(environment: VllmEnvironment, answer: Answer, settings: VllmSpec) -> StageError:
    names = answer.arguments or ("model",)
    keys = dict.fromkeys(
        KEYS[name.partition(".")[0]] for name in names if name.partition(".")[0] in KEYS
    )
    hint = f"{' and '.join(names)} comes from {' and '.join(keys)} in the YAML"
    if not keys:
        hint = (
            "please report it: the toolkit writes arguments that vLLM"
            f" {settings.version} does not know"
        )
    return StageError(
        "compile",
        f"vLLM {environment.version} refuses {' and '.join(names)}: {answer.reason}",
        hint=hint,
    )


def _fp8_compute(checkpoint: QuantizedCheckpoint, spec: EngineSpec) -> Fp8Compute | None:
    """On a CPU vLLM multiplies in 16 bits: its kernel is fp8_scaled_mm_cpu, W8A16."""
    if checkpoint.quant_algo != "FP8":
        return None
    return "native" if spec.device == "cuda" else "dequantized"


def _stated_dtype(folder: Path) -> str:
    config = read_json(folder / "config.json")
    return str(config.get("dtype") or config.get("torch_dtype") or "auto")


def _settings(spec: EngineSpec) -> VllmSpec:
    assert spec.vllm is not None, "the kind vllm needs a VllmSpec"
    return spec.vllm
