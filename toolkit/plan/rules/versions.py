"""Rules about versions: which has which flow, layout and container, and which settings its builder
changes without an error.
"""

from __future__ import annotations

from toolkit.facts.versions import VERSIONS
from toolkit.plan.rules.findings import (
    INT8,
    Check,
    Findings,
    RuleFinding,
    models_with_algo,
    refuse,
    refuse_unless_allowed,
)
from toolkit.plan.subject import Subject, family_of

__all__ = ["CHECKS"]


def _engine_flow_removed(subject: Subject) -> Findings:
    if (
        subject.engine_flow is not None
        and subject.version is not None
        and not subject.version.engine_flow
    ):
        last = [version.name for version in VERSIONS.values() if version.engine_flow][-1]
        yield refuse(
            "engine.kind",
            f"no engines are built with TensorRT-LLM {subject.version.name}: trtllm-build was"
            " removed after 1.3.0rc20",
            f'set tensorrt_llm: "{last}", the last version that has it, or kind: trtllm_pytorch',
        )


def _pytorch_flow_min_version(subject: Subject) -> Findings:
    version = subject.version
    if subject.pytorch_flow is not None and version is not None and not version.pytorch_flow:
        yield refuse(
            "engine.tensorrt_llm",
            f"LLM() of TensorRT-LLM {version.name} compiles an engine; the PyTorch flow's is not"
            " public there",
            'set tensorrt_llm: "1.2.1", or kind: trt_engine',
        )


def _unified_hf_min_version(subject: Subject) -> Findings:
    version = subject.version
    if subject.pytorch_flow is None or version is None or version.unified_checkpoints:
        return
    for role, model in subject.models.items():
        if model.quantization.quant_algo != "NO_QUANT":
            yield refuse_unless_allowed(
                subject,
                role,
                "the checkpoint format that ModelOpt writes is documented for TensorRT-LLM 1.2.0"
                f" and later, not for {version.name}",
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
                f"the engine flow of TensorRT-LLM {version.name} does not support Qwen 3",
                'set engine.tensorrt_llm: "1.2.1"',
            )


def _serving_container(subject: Subject) -> Findings:
    """Refused before hours of quantizing, since nothing could be packaged after them."""
    engine, version = subject.pytorch_flow, subject.version
    if engine is None or version is None or version.serving_tags or engine.container_image:
        return
    newest = [other for other in VERSIONS.values() if other.serving_tags][-1]
    yield refuse(
        "engine.tensorrt_llm",
        f"no Triton container with TensorRT-LLM {version.name} is known",
        f'set tensorrt_llm: "{newest.name}", which {newest.serving_tags[0]} contains, or name an'
        " image of yours that has tritonserver and this version: engine.container_image",
    )


def _layout_of_flow(subject: Subject) -> Findings:
    layout = subject.config.triton.layout
    if subject.pytorch_flow is not None and layout == "bls":
        what = (
            "kind trtllm_pytorch speculates inside one runtime, but the BLS layout drives two"
            " engines"
        )
        yield refuse("triton.layout", what, "set layout: llmapi, or auto")
    if subject.engine_flow is not None and layout == "llmapi":
        what = (
            "Triton's llmapi layout has not served engines since 1.0, and it never served two of"
            " them"
        )
        yield refuse("triton.layout", what, "set layout: bls, or auto")


def _fused_mlp_scope(subject: Subject) -> Findings:
    if subject.engine_flow is not None:
        for role, model in models_with_algo(subject, *INT8):
            yield RuleFinding(
                "adjusted",
                f"{role}.quantization.quant_algo",
                f"use_fused_mlp is switched off for {model.quantization.quant_algo}",
            )


def _fp8_fmha_needs_fp8_kv(subject: Subject) -> Findings:
    if subject.engine_flow is not None:
        for role, model in models_with_algo(subject, "FP8"):
            if model.quantization.kv_cache_quant_algo is None:
                yield RuleFinding(
                    "adjusted",
                    f"{role}.quantization",
                    "use_fp8_context_fmha is switched off: the KV cache is not FP8",
                )


def _fp8_kv_forces_fp8_fmha(subject: Subject) -> Findings:
    if subject.engine_flow is not None:
        for role, model in models_with_algo(subject, "FP8"):
            if model.quantization.kv_cache_quant_algo == "FP8":
                yield RuleFinding(
                    "adjusted",
                    f"{role}.quantization",
                    "use_fp8_context_fmha is switched on: weights and KV cache are FP8",
                )


def _fp8_fmha_needs_sm89(subject: Subject) -> Findings:
    if subject.engine_flow is not None and subject.gpu is not None and subject.gpu.sm < 89:
        what = f"use_fp8_context_fmha is switched off: {subject.gpu.name} is SM {subject.gpu.sm}"
        yield RuleFinding("adjusted", "hardware.gpu", what)


def _nccl_single_rank(subject: Subject) -> Findings:
    if subject.engine_flow is not None and subject.engine_flow.world_size == 1:
        yield RuleFinding("adjusted", "engine.tp_size", "nccl_plugin is dropped: there is one rank")


CHECKS: dict[str, Check] = {
    "engine-flow-removed": _engine_flow_removed,
    "pytorch-flow-min-version": _pytorch_flow_min_version,
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
