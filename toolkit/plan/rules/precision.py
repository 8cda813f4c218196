"""Rules about precision: which quantization of weights and KV caches each flow, GPU and model
family supports.
"""

from __future__ import annotations

from toolkit.checkpoints.quantized import quantization_conflict
from toolkit.config.schema import ModelConfig
from toolkit.facts.support import KV_SUPPORT, SMOOTHQUANT_FAMILIES, WEIGHT_SUPPORT, Status
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


def _fp8_needs_sm89(subject: Subject) -> Findings:
    for role, model in models_with_algo(subject, "FP8"):
        if _status(subject, model) == "no" and subject.gpu is not None:
            change = "NO_QUANT, or kind: trt_engine with W8A8_SQ_PER_CHANNEL"
            if subject.engine_flow is not None:
                change = "W8A8_SQ_PER_CHANNEL or W8A16"
            yield refuse(
                f"{role}.quantization.quant_algo",
                f"FP8 needs SM 89, and {subject.gpu.name} is SM {subject.gpu.sm}",
                f"set quant_algo: {change}; or take an L40S, H100 or H200",
            )


def _kv_fp8_needs_sm89(subject: Subject) -> Findings:
    if subject.trtllm is None or subject.gpu is None or subject.column is None:
        return
    status = KV_SUPPORT[subject.config.engine.kind]["FP8"].get(subject.column)
    for role, model in subject.models.items():
        if model.quantization.kv_cache_quant_algo == "FP8" and status == "no":
            yield refuse(
                f"{role}.quantization.kv_cache_quant_algo",
                f"the engine flow has no FP8 KV cache below SM 89, and {subject.gpu.name} is SM"
                f" {subject.gpu.sm}",
                "remove kv_cache_quant_algo",
            )


def _no_w8a8_in_pytorch(subject: Subject) -> Findings:
    if subject.pytorch_flow is None:
        return
    for role, _ in models_with_algo(subject, "W8A8_SQ_PER_CHANNEL"):
        has_fp8 = subject.column is None or subject.column >= 89
        other_algo = "quant_algo: FP8, or " if has_fp8 else ""
        yield refuse(
            f"{role}.quantization.quant_algo",
            "the PyTorch flow cannot load an INT8 W8A8 checkpoint: it raises ValueError,"
            " unsupported quant mode",
            f'set {other_algo}engine.kind: trt_engine with tensorrt_llm: "1.2.1"',
        )


def _w8a16_not_established(subject: Subject) -> Findings:
    if subject.pytorch_flow is None:
        return
    for role, _ in models_with_algo(subject, "W8A16"):
        what = (
            "W8A16 is not established in the PyTorch flow: its code has such linears, but what it"
            " is said to read of ModelOpt's unified format is FP8 and 4-bit, and no INT8"
        )
        yield refuse_unless_allowed(
            subject, role, what, "set quant_algo: FP8, or engine.kind: trt_engine"
        )


def _blackwell_no_int8(subject: Subject) -> Findings:
    if subject.engine_flow is None or subject.gpu is None:
        return
    for role, model in models_with_algo(subject, *INT8):
        if _status(subject, model) == "no":
            yield refuse(
                f"{role}.quantization.quant_algo",
                f"trtllm-build refuses INT8 on SM 100 to 119, and {subject.gpu.name} is SM"
                f" {subject.gpu.sm}",
                "set quant_algo: FP8; or take an A100, H100 or H200 for INT8",
            )


def _int8_on_sm120(subject: Subject) -> Findings:
    if subject.engine_flow is None or subject.gpu is None or subject.column != 120:
        return
    for role, model in models_with_algo(subject, *INT8):
        evidence = "was seen to work once" if _status(subject, model) == "seen" else "is on no list"
        what = (
            f"{model.quantization.quant_algo} on SM {subject.gpu.sm} ({subject.gpu.name})"
            f" {evidence}, and it is documented nowhere"
        )
        yield refuse_unless_allowed(subject, role, what, "set quant_algo: FP8")


def _smoothquant_families(subject: Subject) -> Findings:
    if subject.engine_flow is None:
        return
    for role, _ in models_with_algo(subject, "W8A8_SQ_PER_CHANNEL"):
        family = family_of(subject.shapes[role]) if role in subject.shapes else "Llama 2"
        if SMOOTHQUANT_FAMILIES.get(family) == "yes":
            continue
        status = "lists as not supported" if family in SMOOTHQUANT_FAMILIES else "does not list"
        has_fp8 = subject.column is None or subject.column >= 89
        other_algos = "FP8 or W8A16" if has_fp8 else "W8A16"
        yield refuse_unless_allowed(
            subject,
            role,
            f"{family} is a family that ModelOpt {status} for SmoothQuant",
            f"set quant_algo: {other_algos}",
        )


def _no_int8_kv_preset(subject: Subject) -> Findings:
    for role, model in subject.models.items():
        if model.quantization.kv_cache_quant_algo == "INT8":
            has_fp8_weights = model.quantization.quant_algo == "FP8"
            yield refuse(
                f"{role}.quantization.kv_cache_quant_algo",
                "ModelOpt has no preset for an INT8 KV cache, so no scales would be calibrated",
                "set kv_cache_quant_algo: FP8" if has_fp8_weights else "remove kv_cache_quant_algo",
            )


def _int8_kv_disables_paged_fmha(subject: Subject) -> Findings:
    if subject.engine_flow is None or not subject.has_draft_model:
        return
    for role, model in subject.models.items():
        if model.quantization.kv_cache_quant_algo == "INT8":
            yield refuse(
                f"{role}.quantization.kv_cache_quant_algo",
                "for an INT8 KV cache, trtllm-build switches paged context FMHA off, and external"
                " drafts need it",
                "remove kv_cache_quant_algo",
            )


def _fp8_kv_under_other_weights(subject: Subject) -> Findings:
    if subject.engine_flow is None:
        return
    for role, model in subject.models.items():
        quantization = model.quantization
        if quantization.kv_cache_quant_algo != "FP8" or quantization.quant_algo == "FP8":
            continue
        path = f"{role}.quantization.kv_cache_quant_algo"
        what = (
            f"with {quantization.quant_algo} weights and an FP8 KV cache, trtllm-build silently"
            " switches paged context FMHA off"
        )
        if subject.has_draft_model:
            hint = "remove kv_cache_quant_algo"
            if (subject.column or 89) >= 89:
                hint += ", or set quant_algo: FP8"
            yield refuse(
                path, f"{what}, and with it the block reuse that external drafts need", hint
            )
        else:
            yield RuleFinding("adjusted", path, f"{what}; KV block reuse is lost")


def _toolkit_fp8_kv(subject: Subject) -> Findings:
    if subject.engine_flow is not None:
        return
    is_embedded = subject.config.embedded_engine is not None
    without = ", or set engine.kv_cache_dtype: fp8 instead, at scale 1" if is_embedded else ""
    for role, model in subject.models.items():
        algo = model.quantization.quant_algo
        if model.quantization.kv_cache_quant_algo == "FP8" and algo != "FP8":
            yield refuse(
                f"{role}.quantization.kv_cache_quant_algo",
                f"kv_cache_quant_algo FP8 cannot be combined with quant_algo {algo}: its scales are"
                " calibrated only with FP8 weights",
                f"set quant_algo: FP8, or remove kv_cache_quant_algo{without}",
            )


def _already_quantized(subject: Subject) -> Findings:
    for role, present in subject.quantized.items():
        configured = subject.models[role].quantization
        fault = quantization_conflict(
            present, configured.quant_algo, configured.kv_cache_quant_algo
        )
        if fault is not None:
            what, hint = fault
            yield refuse(f"{role}.quantization", f"the checkpoint {what}", hint)


def _mixed_precision_pair(subject: Subject) -> Findings:
    if subject.trtllm is None or subject.config.draft is None:
        return
    target, draft = (
        subject.config.target.quantization.quant_algo,
        subject.config.draft.quantization.quant_algo,
    )
    if target != draft and "NO_QUANT" not in (target, draft):
        yield RuleFinding(
            "warning",
            "draft.quantization.quant_algo",
            f"a {draft} draft for a {target} target is in no published recipe",
        )


def _status(subject: Subject, model: ModelConfig) -> Status | None:
    """What the support table says of the model's quantization; None without a known GPU."""
    if subject.trtllm is None or subject.column is None:
        return None
    return WEIGHT_SUPPORT[subject.config.engine.kind][model.quantization.quant_algo].get(
        subject.column
    )


CHECKS: dict[str, Check] = {
    "fp8-needs-sm89": _fp8_needs_sm89,
    "kv-fp8-needs-sm89": _kv_fp8_needs_sm89,
    "no-w8a8-in-pytorch": _no_w8a8_in_pytorch,
    "w8a16-not-established": _w8a16_not_established,
    "blackwell-no-int8": _blackwell_no_int8,
    "int8-on-sm120": _int8_on_sm120,
    "smoothquant-families": _smoothquant_families,
    "no-int8-kv-preset": _no_int8_kv_preset,
    "int8-kv-disables-paged-fmha": _int8_kv_disables_paged_fmha,
    "fp8-kv-needs-fp8-weights-for-paged-fmha": _fp8_kv_under_other_weights,
    "toolkit-fp8-kv": _toolkit_fp8_kv,
    "toolkit-already-quantized": _already_quantized,
    "mixed-precision-pair": _mixed_precision_pair,
}
