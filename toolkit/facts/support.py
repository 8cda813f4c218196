"""Which precision works with which flow, compute capability and model family.

If a key is missing, nothing is known. The values:
- `yes`: documented
- `seen`: observed once, in a public project, but documented nowhere
- `listed`: listed in the code, but in no list of supported hardware
- `no`: known to fail
"""

from __future__ import annotations

from typing import Literal

from toolkit.facts.source import Source
from toolkit.words import EngineKind, SamplingRule

__all__ = [
    "ACCEPTANCE",
    "KV_SUPPORT",
    "LOG_PROBS",
    "MIN_SM",
    "SMOOTHQUANT_FAMILIES",
    "SOURCES",
    "WEIGHT_SUPPORT",
    "Status",
]

Status = Literal["yes", "seen", "listed", "no"]

# The least SM of each column. A GPU belongs to the last column whose least SM it reaches.
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
    # ModelOpt lists it as not supported. The export itself runs, so it is possible at the user's
    # own risk.
    "Llama 3": "no",
}

# The accept rules at temperature > 0 of each kind of engine, its default first.
ACCEPTANCE: dict[EngineKind, tuple[SamplingRule, ...]] = {
    "torch": ("rejection", "coupled", "sample_match"),
    "trt_engine": ("sample_match", "rejection"),  # rejection by draft logits
    # the two-model engine drafts greedily: acceptance is p(argmax q)
    "trtllm_pytorch": ("sample_match",),
    # draft_sample_method greedy, its default: a one-hot q, so acceptance is p(argmax q), too;
    # probabilistic: rejection sampling with the draft's own probabilities
    "vllm": ("sample_match", "rejection"),
}

# How many log-probabilities per position a request of a speculating deployment gets, by version:
# 2: of the chosen token and of the next best; 1: of the chosen token only; 0: none. They are the
# target's own, before temperature and filters, also for accepted draft tokens. trt_engine: they are
# computed from the target's generation logits; the decoder of an engine for external drafts writes
# no log-probabilities.
LOG_PROBS: dict[str, dict[str, int]] = {
    "trt_engine": {"0.21": 2, "1.0": 2, "1.1": 2, "1.2.0": 2, "1.2.1": 2},
    "trtllm_pytorch": {"1.0": 1, "1.1": 1, "1.2.0": 2, "1.2.1": 2},
}

SOURCES = {
    "WEIGHT_SUPPORT.trt_engine": Source(
        "TRT docs/source/legacy/reference/precision.md, tensorrt_llm/builder.py", "B"
    ),
    "WEIGHT_SUPPORT.trtllm_pytorch": Source(
        "TRT docs/source/features/quantization.md, tensorrt_llm/_torch/modules/linear.py", "B"
    ),
    "WEIGHT_SUPPORT.seen": Source(
        "github.com/nature-li/tensorrt-llm: W8A8 on an RTX 5060 Ti with 1.2.0rc6.post3", "I"
    ),
    "KV_SUPPORT": Source(
        "TRT docs/source/features/quantization.md, docs/source/legacy/reference/precision.md", "B"
    ),
    "SMOOTHQUANT_FAMILIES": Source("MO examples/hf_ptq/README.md, docs/source/deployment", "A"),
    "LOG_PROBS.trt_engine": Source(
        "TRT cpp/tensorrt_llm/layers/externalDraftTokensLayer.cpp (no outputLogProbs),"
        " batch_manager/trtGptModelInflightBatching.cpp (that layer whenever the engine is built"
        " for external drafts), batch_manager/llmRequest.h"
        " (allocTargetModelAcceptedTokenLogitsHost: a row per draft and one more)",
        "B",
    ),
    "LOG_PROBS.trtllm_pytorch.1.2": Source(
        "TRT tensorrt_llm/_torch/pyexecutor/sampler.py (log_softmax of the target's rows, top-k of"
        " each; handle_logprobs takes as many as were accepted), pull request 7756; not at the tag",
        "B",
    ),
    "LOG_PROBS.trtllm_pytorch.1.0": Source(
        "the same before pull request 7756: the chosen token's alone", "C"
    ),
    "LOG_PROBS.trtllm_pytorch.1.3rc": Source(
        "TRT pull request 18401: refused with every speculative configuration; one-model paths"
        " leave them out with a warning. Of early candidates it is not known, and taken as none",
        "B",
    ),
    "ACCEPTANCE": Source(
        "TRT docs/source/features/speculative-decoding.md, examples/draft_target_model/README.md",
        "B",
    ),
    "LOG_PROBS.trtllm_pytorch.heads": Source(
        "TRT tensorrt_llm/_torch/speculative/interface.py, without_logits (includes"
        " is_eagle3_one_model): the sampler of one model gets tokens and no logits",
        "B",
    ),
}
