"""Deployments to judge: one base per engine kind that can work, and keys laid over it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

from tests.support.cli import write_config
from toolkit.config.load import load_config
from toolkit.config.schema import CalibrationConfig, DeploymentConfig
from toolkit.plan.make import subject_of
from toolkit.plan.subject import Subject

LLAMA, LLAMA_DRAFT = "meta-llama/Llama-3.3-70B-Instruct", "meta-llama/Llama-3.2-1B-Instruct"
QWEN, QWEN_DRAFT = "Qwen/Qwen2.5-72B-Instruct", "Qwen/Qwen2.5-0.5B-Instruct"
FP8 = {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}
INT8 = {"quant_algo": "W8A8_SQ_PER_CHANNEL"}
# Keys that put a head in the place of the draft of Llama 3.3 70B.
HEAD: dict[str, Any] = {
    "draft__checkpoint": "nvidia/Llama-3.3-70B-Instruct-Eagle3",
    "draft__quantization": None,
    "speculation__kind": "eagle3",
}


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


def for_tensorrt_llm(pair: tuple[Path, Path], folder: Path, **hardware: Any) -> DeploymentConfig:
    """The tiny pair in TensorRT-LLM's PyTorch flow, unquantized."""
    data = yaml.safe_load(write_config(folder, pair).read_text())
    for role in ("target", "draft"):
        data[role].pop("quantization", None)
    data["engine"] = {
        "kind": "trtllm_pytorch",
        "max_batch_size": 64,
        "max_input_len": 40,
        "max_seq_len": 64,
    }
    data["triton"], data["hardware"] = {"layout": "llmapi"}, hardware
    file = folder / "tensorrt_llm.yaml"
    file.write_text(yaml.safe_dump(data))
    return load_config(file, ["validation.max_prompts=4", "validation.max_tokens=12"])


def calibrated(config: DeploymentConfig, folder: Path) -> DeploymentConfig:
    """The deployment with 40 lines of calibration text, the last four of them held out."""
    file = folder / "calibration.jsonl"
    file.write_text(
        "".join(
            json.dumps({"text": f"def f{i}(x):\n    return x + {i}\n"}) + "\n" for i in range(40)
        )
    )
    calibration = CalibrationConfig(dataset=file, calib_size=8, calib_max_seq_length=32)
    return config.model_copy(update={"calibration": calibration})
