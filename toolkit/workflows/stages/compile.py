"""The stage `compile`: a quantized checkpoint becomes an engine of the kind that the YAML names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from toolkit.config.schema import DeploymentConfig, TorchEngineConfig, TrtEngineConfig
from toolkit.errors import UsageError
from toolkit.interfaces import EngineSpec, Progress, TensorRtLlmSpec
from toolkit.pipeline.machine import gpus
from toolkit.pipeline.stage import Finished, Stage
from toolkit.records.build import CompiledEngine
from toolkit.workflows.deployment import check_prompt_lengths, measures, models_of, settled
from toolkit.workflows.folders import Workplace
from toolkit.workflows.stages.keys import engine_fingerprint, spec_parts

__all__ = ["compile_stage", "engine_spec"]


def compile_stage(config: DeploymentConfig, role: str, workplace: Workplace) -> Stage:
    from toolkit.engines import stage

    kind = config.engine.kind
    loads_draft = (
        kind == "trtllm_pytorch" and role == "target" and config.draft is not None
    )  # with the target, once
    checkpoints = (f"quantize/{role}", *(("quantize/draft",) if loads_draft else ()))
    advised = (
        measures(config) and kind != "torch"
    )  # whose engines serve every draft length up to the longest
    needs = (*checkpoints, *(("tune",) if advised else ()))

    def spec_of(finished: Finished) -> EngineSpec:
        return engine_spec(settled(config, finished) if advised else config, role)

    def parts(finished: Finished) -> Mapping[str, Any]:
        spec = spec_of(finished)
        inputs = {
            name: finished[need].entry.digest
            for name, need in zip(("checkpoint", "draft"), checkpoints, strict=False)
        }
        return {
            "config": {"kind": kind, **spec_parts(spec)},
            "inputs": inputs,
            "fingerprint": engine_fingerprint(kind, spec, workplace.store / ".fingerprints.json"),
        }

    def run(finished: Finished, out_dir: Path, progress: Progress) -> CompiledEngine:
        check_prompt_lengths(config)
        spec = spec_of(finished)
        asked = spec.tensorrt_llm
        if loads_draft and asked is not None and asked.speculation != "none":
            asked = replace(asked, draft_dir=finished["quantize/draft"].record.path)
        return stage.compile_engine(
            kind,
            finished[checkpoints[0]].record,
            replace(spec, tensorrt_llm=asked),
            out_dir,
            progress,
        )

    return Stage(f"compile/{role}", stage.VERSION, CompiledEngine, needs, parts, run)


def engine_spec(config: DeploymentConfig, role: str) -> EngineSpec:
    engine = config.engine
    spec = EngineSpec(
        role=role,
        max_batch_size=engine.max_batch_size,
        max_input_len=engine.max_input_len,
        max_seq_len=engine.max_seq_len,
        max_draft_len=config.speculation.longest_draft if role == "target" else 0,
    )
    if isinstance(engine, TorchEngineConfig):
        return replace(spec, dtype=engine.dtype, device=_device(engine.device), mode=engine.mode)
    return replace(spec, dtype="auto", device="cuda", tensorrt_llm=_tensorrt_llm_spec(config, role))


def _tensorrt_llm_spec(config: DeploymentConfig, role: str) -> TensorRtLlmSpec:
    """What decides the engine of this kind, and nothing else: what only the serving side reads
    must not rebuild it.
    """
    engine = config.engine
    assert not isinstance(engine, TorchEngineConfig)  # the caller has looked
    common: dict[str, Any] = {
        "version": engine.tensorrt_llm,
        "tp_size": engine.tp_size,
        "pp_size": engine.pp_size,
        "gpus_per_node": engine.gpus_per_node,
        "max_num_tokens": engine.max_num_tokens,
        "tokens_per_block": engine.tokens_per_block,
        "speculation": config.speculation.kind,
    }
    if isinstance(engine, TrtEngineConfig):
        settings = {"multiple_profiles", "opt_num_tokens", "builder"}
    else:
        settings = {"free_gpu_memory_fraction", "enable_block_reuse", "cuda_graph", "attn_backend"}
        common["draft_len_schedule"] = config.speculation.draft_len_schedule
        common["max_concurrency"] = config.speculation.max_concurrency
        if config.speculation.kind == "ngram":
            common["max_matching_ngram_size"] = config.speculation.max_matching_ngram_size
        common["trust_remote_code"] = any(
            model.trust_remote_code for model in models_of(config).values()
        )  # LLM() loads both
    return TensorRtLlmSpec(**common, **{name: getattr(engine, name) for name in settings})


def _device(asked: str) -> str:
    """`auto` is cuda where there is a GPU that torch can use."""
    if asked == "auto":
        if not gpus():
            return "cpu"
        import torch

        return "cuda" if torch.cuda.is_available() else "cpu"
    if asked == "cuda" and not gpus():
        raise UsageError(
            "engine.device is cuda, and this machine has no NVIDIA GPU",
            hint="set engine.device: auto",
        )
    return asked
