"""What an engine is compiled as: the part of a deployment that decides the engine, and no more.

What only the serving side reads must not rebuild an engine, so it is left out.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

from toolkit.checkpoints.shape import linear_params, read_shape
from toolkit.config.schema import (
    DeploymentConfig,
    TensorRtLlmConfig,
    TorchEngineConfig,
    TrtEngineConfig,
    VllmConfig,
)
from toolkit.errors import CheckpointError, UsageError
from toolkit.facts.embedded import gains_from_gpu, prefill_tokens
from toolkit.interfaces import EngineSpec, TensorRtLlmSpec, VllmSpec
from toolkit.pipeline.machine import gpus
from toolkit.words import Device, Role

__all__ = ["engine_spec"]


def engine_spec(config: DeploymentConfig, role: Role) -> EngineSpec:
    engine = config.engine
    spec = EngineSpec(
        role=role,
        max_batch_size=engine.max_batch_size,
        max_input_len=engine.max_input_len,
        max_seq_len=engine.max_seq_len,
        max_draft_len=config.speculation.longest_draft if role == "target" else 0,
    )
    if isinstance(engine, TorchEngineConfig):
        device = _device(engine.device)
        if engine.device == "auto" and device == "cuda" and not _target_gains(config):
            device = "cpu"
        return replace(
            spec,
            dtype=engine.dtype,
            device=device,
            mode=engine.mode,
            kv_cache_dtype=None if engine.kv_cache_dtype == "auto" else engine.kv_cache_dtype,
            prefill_chunk_len=engine.prefill_chunk_len or prefill_tokens(device),
        )
    if isinstance(engine, VllmConfig):
        settings = _vllm_spec(config, engine)
        # A GPU that the YAML names need not be in this machine.
        device = _device(engine.device) if config.hardware.gpu == "auto" else "cuda"
        return replace(spec, dtype="auto", device=device, vllm=settings)
    return replace(
        spec, dtype="auto", device="cuda", tensorrt_llm=_tensorrt_llm_spec(config, engine)
    )


def _tensorrt_llm_spec(config: DeploymentConfig, engine: TensorRtLlmConfig) -> TensorRtLlmSpec:
    """What decides the engine of this kind, and nothing else: what only the serving side reads
    must not rebuild it.
    """
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
        adaptive = config.speculation.adapts
        if adaptive is not None:
            common["acceptance_window"] = adaptive.window_requests
            common["min_acceptance_length"] = adaptive.min_acceptance_length
        if config.speculation.has_ngram:
            common["max_matching_ngram_size"] = config.speculation.max_matching_ngram_size
        common["trust_remote_code"] = any(
            model.trust_remote_code for model in config.models.values()
        )  # LLM() loads both
    return TensorRtLlmSpec(**common, **{name: getattr(engine, name) for name in settings})


def _vllm_spec(config: DeploymentConfig, engine: VllmConfig) -> VllmSpec:
    speculation = config.speculation
    return VllmSpec(
        version=engine.vllm,
        dtype=engine.dtype,
        python=engine.python,
        tp_size=engine.tp_size,
        pp_size=engine.pp_size,
        gpus_per_node=engine.gpus_per_node,
        max_num_batched_tokens=engine.max_num_batched_tokens,
        gpu_memory_utilization=engine.gpu_memory_utilization,
        kv_cache_gib=engine.kv_cache_gib,
        enable_prefix_caching=engine.enable_prefix_caching,
        correct_sampling=engine.correct_sampling,
        speculation=speculation.kind,
        draft_len_schedule=speculation.draft_len_schedule,
        max_concurrency=speculation.max_concurrency,
        max_matching_ngram_size=speculation.max_matching_ngram_size,
        samples_drafts=speculation.acceptance == "rejection",
        trust_remote_code=any(model.trust_remote_code for model in config.models.values()),
    )


def _target_gains(config: DeploymentConfig) -> bool:
    """Whether the target gains from a GPU; the draft runs where the target does. A checkpoint that
    cannot be read is a fault that other code reports.
    """
    try:
        shape = read_shape(config.target.checkpoint)
    except CheckpointError:
        return True
    return gains_from_gpu(linear_params(shape), config.target.quantization.quant_algo)


def _device(asked: Literal["auto", Device]) -> Device:
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
