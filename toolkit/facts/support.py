"""Which precision works where: algorithm x KV algorithm x compute capability x flow, and which families.

A key that is absent is not established. Words of the table: `yes` documented; `seen` observed once, in a public project, and
documented nowhere; `listed` in the code, and on no list of supported hardware; `no` known to fail.
"""

from __future__ import annotations

from typing import Literal

from toolkit.facts.source import Source

__all__ = ["ACCEPTANCE", "KV_SUPPORT", "MIN_SM", "SMOOTHQUANT_FAMILIES", "SOURCES", "WEIGHT_SUPPORT", "Status"]

Status = Literal["yes", "seen", "listed", "no"]

# Least SM of each column; a GPU belongs to the greatest one that is not above it.
MIN_SM = (80, 89, 90, 100, 120)

WEIGHT_SUPPORT: dict[str, dict[str, dict[int, Status]]] = {
    "trt_engine": {
        "NO_QUANT": {80: "yes", 89: "yes", 90: "yes", 100: "yes", 120: "yes"},
        "FP8": {80: "no", 89: "yes", 90: "yes", 100: "yes", 120: "yes"},
        "W8A8_SQ_PER_CHANNEL": {80: "yes", 89: "yes", 90: "yes", 100: "no", 120: "seen"},
        "W8A16": {80: "yes", 89: "yes", 90: "yes", 100: "no"},
    },
    "trtllm_pytorch": {
        "NO_QUANT": {80: "yes", 89: "yes", 90: "yes", 100: "yes", 120: "yes"},
        "FP8": {80: "no", 89: "yes", 90: "yes", 100: "yes", 120: "yes"},
        "W8A8_SQ_PER_CHANNEL": {80: "no", 89: "no", 90: "no", 100: "no", 120: "no"},
        "W8A16": {80: "listed", 89: "listed", 90: "listed", 100: "listed", 120: "listed"},
    },
}
KV_SUPPORT: dict[str, dict[str, dict[int, Status]]] = {
    "trt_engine": {"FP8": {80: "no", 89: "yes", 90: "yes", 100: "yes", 120: "yes"}},
    "trtllm_pytorch": {"FP8": {80: "yes", 89: "yes", 90: "yes", 100: "yes", 120: "yes"}},
}

# ModelOpt's list for the export of INT8 SmoothQuant to TensorRT-LLM checkpoints.
SMOOTHQUANT_FAMILIES: dict[str, Status] = {
    "Llama 2": "yes",
    "Mistral": "yes",
    "Qwen 2 / 2.5": "yes",
    "Llama 3": "no",  # on its list as not supported; the export itself runs, so it is somebody's risk and not impossible
}

# Rules of acceptance at temperature > 0 that each kind of engine has, its default first, and whether the draft samples.
ACCEPTANCE: dict[str, tuple[str, ...]] = {
    "torch": ("rejection", "coupled", "sample_match"),
    "trt_engine": ("sample_match", "rejection"),  # rejection by draft logits
    "trtllm_pytorch": ("sample_match",),  # the two-model engine drafts greedily: acceptance is p(argmax q)
}

SOURCES = {
    "WEIGHT_SUPPORT.trt_engine": Source("TRT docs/source/legacy/reference/precision.md, tensorrt_llm/builder.py", "B"),
    "WEIGHT_SUPPORT.trtllm_pytorch": Source(
        "TRT docs/source/features/quantization.md, tensorrt_llm/_torch/modules/linear.py", "B"
    ),
    "WEIGHT_SUPPORT.seen": Source("github.com/nature-li/tensorrt-llm: W8A8 on an RTX 5060 Ti with 1.2.0rc6.post3", "I"),
    "KV_SUPPORT": Source("TRT docs/source/features/quantization.md, docs/source/legacy/reference/precision.md", "B"),
    "SMOOTHQUANT_FAMILIES": Source("MO examples/hf_ptq/README.md, docs/source/deployment", "A"),
    "ACCEPTANCE": Source("TRT docs/source/features/speculative-decoding.md, examples/draft_target_model/README.md", "B"),
}
