"""The stages that make engines, and what each one's key is made of.

pair -> quantize/{target,draft} -> compile/{target,draft}
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from toolkit.assembly.asked import measures, models_of, settled, tp_size_of
from toolkit.assembly.keys import engine_fingerprint, spec_parts, versions
from toolkit.assembly.workplace import Workplace
from toolkit.config.schema import DeploymentConfig, TorchEngineConfig, TrtEngineConfig
from toolkit.errors import CheckpointError, StoreError, UsageError
from toolkit.interfaces import EngineSpec, Progress, TensorRtLlmSpec
from toolkit.pipeline.hashing import DigestMemo, digest_file, digest_tree
from toolkit.pipeline.machine import gpus
from toolkit.pipeline.stage import Finished, Stage
from toolkit.records.build import CompiledEngine, PairProof, QuantizedCheckpoint

__all__ = ["compile_stage", "engine_spec", "pair_stage", "quantize_stage"]


def pair_stage(config: DeploymentConfig, memo: DigestMemo) -> Stage:
    from toolkit.pairing.recorded import check_recorded_digests
    from toolkit.pairing.tokenizers import SOURCE_PATTERNS, TOKENIZER_PATTERNS, prove_pair

    tp_size = tp_size_of(config)

    def parts(finished: Finished) -> Mapping[str, Any]:
        patterns = SOURCE_PATTERNS + TOKENIZER_PATTERNS
        try:
            digests = {role: digest_tree(model.checkpoint, patterns, memo) for role, model in models_of(config).items()}
        except StoreError as error:
            raise CheckpointError(error.what, where=error.where, mend=error.mend) from error
        for model in models_of(config).values():
            check_recorded_digests(model.checkpoint, memo)
        return {"config": {"tp_size": tp_size}, "inputs": digests, "fingerprint": versions(["tokenizers"])}

    def run(finished: Finished, out_dir: Path, progress: Progress) -> PairProof:
        draft = None if config.draft is None else config.draft.checkpoint
        return prove_pair(config.target.checkpoint, draft, memo, tp_size=tp_size)

    return Stage("pair", 2, PairProof, (), parts, run)


def quantize_stage(config: DeploymentConfig, role: str, memo: DigestMemo) -> Stage:
    from toolkit.quantize import stage
    from toolkit.quantize.checkpoint import CODE

    model = models_of(config)[role]
    calibration = None if model.quantization.quant_algo == "NO_QUANT" else config.calibration
    engine = config.engine
    trtllm = stage.Ranks(engine.tp_size, engine.pp_size) if engine.kind == "trt_engine" else None

    def parts(finished: Finished) -> Mapping[str, Any]:
        proof = finished["pair"].record
        inputs = {"checkpoint": proof.target_digest if role == "target" else proof.draft_digest}
        settings = {**model.quantization.model_dump(exclude={"allow_unsupported"}), "vocab_size": proof.vocab_size}
        settings["trtllm"] = None if trtllm is None else dataclasses.asdict(trtllm)
        if model.trust_remote_code:
            inputs["code"] = digest_tree(model.checkpoint, CODE, memo)
        if calibration is not None:
            inputs["dataset"] = digest_file(calibration.dataset, memo)
            inputs["heldout"] = calibration.heldout and digest_file(calibration.heldout, memo)
            settings["calibration"] = calibration.model_dump(exclude={"dataset", "heldout"})
        return {"config": settings, "inputs": inputs, "fingerprint": stage.fingerprint(model.quantization)}

    def run(finished: Finished, out_dir: Path, progress: Progress) -> QuantizedCheckpoint:
        _check_prompt_lengths(config)
        vocab_size = finished["pair"].record.vocab_size
        return stage.quantize(
            role,
            model.checkpoint,
            model.quantization,
            calibration,
            out_dir,
            progress,
            vocab_size=vocab_size,
            trtllm=trtllm,
            with_code=model.trust_remote_code,
        )

    return Stage(f"quantize/{role}", stage.VERSION, QuantizedCheckpoint, ("pair",), parts, run)


def compile_stage(config: DeploymentConfig, role: str, workplace: Workplace) -> Stage:
    from toolkit.engines import stage

    kind = config.engine.kind
    loads_draft = kind == "trtllm_pytorch" and role == "target" and config.draft is not None  # with the target, once
    checkpoints = (f"quantize/{role}", *(("quantize/draft",) if loads_draft else ()))
    advised = measures(config) and kind != "torch"  # whose engines serve every draft length up to the longest
    needs = (*checkpoints, *(("tune",) if advised else ()))

    def spec_of(finished: Finished) -> EngineSpec:
        return engine_spec(settled(config, finished) if advised else config, role)

    def parts(finished: Finished) -> Mapping[str, Any]:
        spec = spec_of(finished)
        inputs = {name: finished[need].entry.digest for name, need in zip(("checkpoint", "draft"), checkpoints, strict=False)}
        return {
            "config": {"kind": kind, **spec_parts(spec)},
            "inputs": inputs,
            "fingerprint": engine_fingerprint(kind, spec, workplace.store / ".fingerprints.json"),
        }

    def run(finished: Finished, out_dir: Path, progress: Progress) -> CompiledEngine:
        _check_prompt_lengths(config)
        spec = spec_of(finished)
        asked = spec.tensorrt_llm
        if loads_draft and asked is not None and asked.speculation != "none":
            asked = replace(asked, draft_dir=finished["quantize/draft"].record.path)
        return stage.compile_engine(kind, finished[checkpoints[0]].record, replace(spec, tensorrt_llm=asked), out_dir, progress)

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
    """What decides the engine of this kind, and nothing else: what only the serving side reads must not rebuild it."""
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
        common["trust_remote_code"] = any(model.trust_remote_code for model in models_of(config).values())  # LLM() loads both
    return TensorRtLlmSpec(**common, **{name: getattr(engine, name) for name in settings})


def _device(asked: str) -> str:
    """`auto` is cuda where there is a GPU that torch can use."""
    if asked == "auto":
        if not gpus():
            return "cpu"
        import torch

        return "cuda" if torch.cuda.is_available() else "cpu"
    if asked == "cuda" and not gpus():
        raise UsageError("engine.device is cuda, and this machine has no NVIDIA GPU", mend="set engine.device: auto")
    return asked


def _check_prompt_lengths(config: DeploymentConfig) -> None:
    """Asked before long work and not at every build: it needs the tokenizer. Raises UsageError."""
    from toolkit.bench.prompts import check_lengths
    from toolkit.checkpoints.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(config.target.checkpoint)
    check_lengths(
        config.validation.prompts,
        config.validation.max_prompts,
        lambda prompt: tokenizer.encode(prompt).ids,
        config.engine.max_input_len,
    )
