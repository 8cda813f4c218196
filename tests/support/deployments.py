"""Deployments to judge: one base per engine kind that can work, and keys laid over it."""

from __future__ import annotations

from typing import Any

from toolkit.config.schema import DeploymentConfig
from toolkit.plan.make import subject_of
from toolkit.plan.subject import Subject

LLAMA, LLAMA_DRAFT = "meta-llama/Llama-3.3-70B-Instruct", "meta-llama/Llama-3.2-1B-Instruct"
QWEN, QWEN_DRAFT = "Qwen/Qwen2.5-72B-Instruct", "Qwen/Qwen2.5-0.5B-Instruct"
FP8 = {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}
INT8 = {"quant_algo": "W8A8_SQ_PER_CHANNEL"}


def base(kind: str) -> dict[str, Any]:
    """torch: Qwen 2.5 0.5B twice, not quantized. pytorch, engine: Llama in FP8 on an H200. int8:
    Qwen 2.5 on two A100s. vllm: Llama in FP8 on an H200. vllm_cpu: Qwen 2.5 0.5B twice in INT8.
    """
    target, draft, quantization = (
        (QWEN, QWEN_DRAFT, INT8) if kind == "int8" else (LLAMA, LLAMA_DRAFT, FP8)
    )
    if kind in ("torch", "vllm_cpu"):  # small enough for any machine that tests run on
        target = draft = QWEN_DRAFT
    engine: dict[str, Any] = {"max_batch_size": 4, "max_input_len": 1024, "max_seq_len": 2048}
    hardware: dict[str, Any] = {"gpu": "H200", "count": 1}
    if kind == "int8":
        engine, hardware = (
            {**engine, "kind": "trt_engine", "tp_size": 2},
            {"gpu": "A100", "count": 2},
        )
    elif kind == "torch":
        engine, hardware, quantization = {**engine, "kind": "torch", "device": "cpu"}, {}, {}
    elif kind == "vllm_cpu":
        engine, hardware, quantization = {**engine, "kind": "vllm", "device": "cpu"}, {}, INT8
    elif kind == "vllm":
        engine |= {"kind": "vllm", "vllm": "0.24.0"}
    else:
        engine["kind"] = {"engine": "trt_engine", "pytorch": "trtllm_pytorch"}[kind]
    return {
        "name": "x",
        "target": {"checkpoint": target, "quantization": dict(quantization)},
        "draft": {"checkpoint": draft, "quantization": dict(quantization)},
        "calibration": {"dataset": "calib.jsonl"},
        "engine": engine,
        "hardware": hardware,
        "validation": {"prompts": "prompts.jsonl"},
    }


def config_of(kind: str, **keys: Any) -> DeploymentConfig:
    """keys: `engine__tp_size=2`; None removes a key or a section."""
    data = base(kind)
    for name, value in keys.items():
        *sections, last = name.split("__")
        inner = data
        for section in sections:
            inner = inner.setdefault(section, {})
        if value is None:
            inner.pop(last, None)
        else:
            inner[last] = value
    return DeploymentConfig.model_validate(data)


def subject(kind: str, **keys: Any) -> Subject:
    return subject_of(config_of(kind, **keys))[0]
