"""Which version has which flow, layout and container, and what its builder switches off without
an error.
"""

from __future__ import annotations

from toolkit.facts.versions import VERSIONS
from toolkit.plan.rules.found import INT8, Check, Findings, Found, of_algo, refuse, unless_allowed
from toolkit.plan.subject import Subject, family_of

__all__ = ["CHECKS"]


def _engine_flow_removed(subject: Subject) -> Findings:
    if (
        subject.engine_flow is not None
        and subject.version is not None
        and not subject.version.engine_flow
    ):
        name = subject.version.name
        last = [version.name for version in VERSIONS.values() if version.engine_flow][-1]
        yield refuse(
            "engine.kind",
            f"TensorRT-LLM {name} has no engine flow: trtllm-build was removed",
            f'set tensorrt_llm: "{last}", the last with it, or kind: trtllm_pytorch',
        )


def _draft_target_min_version(subject: Subject) -> Findings:
    version = subject.version
    if (
        subject.pytorch_flow is not None
        and version is not None
        and subject.drafts
        and not version.pytorch_draft_target
    ):
        yield refuse(
            "engine.tensorrt_llm",
            f"the PyTorch flow of TensorRT-LLM {version.name} has no draft-target speculation",
            'set tensorrt_llm: "1.2.1", or kind: trt_engine',
        )


def _unified_hf_min_version(subject: Subject) -> Findings:
    version = subject.version
    if subject.pytorch_flow is None or version is None or version.unified_checkpoints:
        return
    for role, model in subject.models.items():
        if model.quantization.quant_algo != "NO_QUANT":
            yield unless_allowed(
                subject,
                role,
                "checkpoints as ModelOpt writes them now are documented for TensorRT-LLM 1.2.0 and"
                f" later, not {version.name}",
                'set engine.tensorrt_llm: "1.2.1"',
            )


def _qwen3_min_version(subject: Subject) -> Findings:
    version = subject.version
    if (
        subject.engine_flow is None
        or version is None
        or version.qwen3_engine
        or not version.engine_flow
    ):
        return
    for role, shape in subject.shapes.items():
        if family_of(shape) == "Qwen 3":
            yield refuse(
                f"{role}.checkpoint",
                f"the engine flow of TensorRT-LLM {version.name} has no Qwen 3",
                'set engine.tensorrt_llm: "1.2.1"',
            )


def _serving_container(subject: Subject) -> Findings:
    if subject.version is not None and not subject.version.serving_tags:
        newest = [version for version in VERSIONS.values() if version.serving_tags][-1]
        yield Found(
            "warning",
            "engine.tensorrt_llm",
            f"no Triton container with TensorRT-LLM {subject.version.name} is known",
            f'{newest.serving_tags[0]} holds {newest.name}: set tensorrt_llm: "{newest.name}"',
        )


def _layout_of_flow(subject: Subject) -> Findings:
    layout = subject.config.triton.layout
    if subject.pytorch_flow is not None and layout == "bls":
        what = "speculates inside one runtime, and the BLS layout drives two engines"
        yield refuse("triton.layout", f"kind trtllm_pytorch {what}", "set layout: llmapi, or auto")
    if subject.engine_flow is not None and layout == "llmapi":
        what = (
            "in Triton, the llmapi layout no longer serves engines since 1.0, and never served two"
            " of them"
        )
        yield refuse("triton.layout", what, "set layout: bls, or auto")


def _fused_mlp_scope(subject: Subject) -> Findings:
    if subject.engine_flow is not None:
        for role, model in of_algo(subject, *INT8):
            yield Found(
                "adjusted",
                f"{role}.quantization.quant_algo",
                f"use_fused_mlp is switched off for {model.quantization.quant_algo}",
            )


def _fp8_fmha_needs_fp8_kv(subject: Subject) -> Findings:
    if subject.engine_flow is not None:
        for role, model in of_algo(subject, "FP8"):
            if model.quantization.kv_cache_quant_algo is None:
                yield Found(
                    "adjusted",
                    f"{role}.quantization",
                    "use_fp8_context_fmha is switched off: the KV cache is not FP8",
                )


def _fp8_kv_forces_fp8_fmha(subject: Subject) -> Findings:
    if subject.engine_flow is not None:
        for role, model in of_algo(subject, "FP8"):
            if model.quantization.kv_cache_quant_algo == "FP8":
                yield Found(
                    "adjusted",
                    f"{role}.quantization",
                    "use_fp8_context_fmha is switched on: weights and KV cache are FP8",
                )


def _fp8_fmha_needs_sm89(subject: Subject) -> Findings:
    if subject.engine_flow is not None and subject.gpu is not None and subject.gpu.sm < 89:
        what = f"use_fp8_context_fmha is switched off: {subject.gpu.name} is SM {subject.gpu.sm}"
        yield Found("adjusted", "hardware.gpu", what)


def _nccl_single_rank(subject: Subject) -> Findings:
    if subject.engine_flow is not None and subject.engine_flow.world_size == 1:
        yield Found("adjusted", "engine.tp_size", "nccl_plugin is dropped: there is one rank")


CHECKS: dict[str, Check] = {
    "engine-flow-removed": _engine_flow_removed,
    "draft-target-min-version": _draft_target_min_version,
    "unified-hf-min-version": _unified_hf_min_version,
    "qwen3-min-version": _qwen3_min_version,
    "layout-of-flow": _layout_of_flow,
    "serving-container": _serving_container,
    "fused-mlp-scope": _fused_mlp_scope,
    "fp8-fmha-needs-fp8-kv": _fp8_fmha_needs_fp8_kv,
    "fp8-kv-forces-fp8-fmha": _fp8_kv_forces_fp8_fmha,
    "fp8-fmha-needs-sm89": _fp8_fmha_needs_sm89,
    "nccl-single-rank": _nccl_single_rank,
}
