"""A deployment that cannot work is refused by the right rule, with a hint at what would work; one
that works is not refused.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.deployments import HEAD, LLAMA, LLAMA_DRAFT, QWEN, QWEN_DRAFT, config_of, subject
from toolkit.facts.models import CONFIGS
from toolkit.facts.rules import RULES
from toolkit.facts.vllm import VLLM_VERSIONS
from toolkit.plan.make import make_plan
from toolkit.plan.resolve import CHECKS, resolve
from toolkit.records.plan import Judgement

SQ, WO, NONE = "W8A8_SQ_PER_CHANNEL", "W8A16", "NO_QUANT"


def algo(quant_algo: str, role: str = "target", kv: str | None = None) -> dict[str, Any]:
    return {
        f"{role}__quantization__quant_algo": quant_algo,
        f"{role}__quantization__kv_cache_quant_algo": kv,
    }


def both(quant_algo: str, kv: str | None = None) -> dict[str, Any]:
    return {**algo(quant_algo, "target", kv), **algo(quant_algo, "draft", kv)}


def gpu(name: str, count: int = 1, **more: Any) -> dict[str, Any]:
    return {"hardware__gpu": name, "hardware__count": count, **more}


def model(role: str, name: str) -> dict[str, Any]:
    return {f"{role}__checkpoint": name}


QWEN3 = {**model("target", "Qwen/Qwen3-32B"), **model("draft", "Qwen/Qwen3-0.6B")}
QWENS = {**model("target", QWEN), **model("draft", QWEN_DRAFT)}
OWN_IMAGE = {"engine__container_image": "registry.example/triton:1"}
V14, V021, V10, V11 = (
    {"engine__tensorrt_llm": version} for version in ("1.4rc", "0.21", "1.0", "1.1")
)
PLAIN: dict[str, Any] = {"draft": None, "speculation__kind": "none"}

# base, keys laid over it, the rule that refuses it, words of the judgement, words of its hint
REFUSED: list[tuple[str, dict[str, Any], str, str, str]] = [
    # INT8 in the PyTorch flow
    ("pytorch", algo(SQ), "no-w8a8-in-pytorch", "cannot load an INT8 W8A8", "FP8"),
    ("pytorch", algo(SQ, "draft"), "no-w8a8-in-pytorch", "cannot load an INT8 W8A8", "trt_engine"),
    ("pytorch", both(SQ), "no-w8a8-in-pytorch", "cannot load an INT8 W8A8", "1.2.1"),
    ("pytorch", {**both(SQ), **gpu("A100", 2), "engine__tp_size": 2},
     "no-w8a8-in-pytorch", "unsupported quant mode", "set engine.kind"),
    ("pytorch", {**both(SQ), **gpu("B200")}, "no-w8a8-in-pytorch", "ValueError", "FP8"),
    ("pytorch", algo(WO), "w8a16-not-established", "not established", "allow_unsupported"),
    ("pytorch", algo(WO, "draft"), "w8a16-not-established", "unified format is FP8 and 4-bit", "FP8"),
    # INT8 by compute capability
    ("engine", {**both(SQ), **gpu("B200")}, "blackwell-no-int8", "SM 100", "H100"),
    ("engine", {**both(SQ), **gpu("B300")}, "blackwell-no-int8", "SM 103", "FP8"),
    ("engine", {**both(WO), **gpu("B200")}, "blackwell-no-int8", "refuses INT8", "FP8"),
    ("engine", {**algo(WO, "draft"), **gpu("B200")}, "blackwell-no-int8", "B200", "A100"),
    ("int8", gpu("B200", 2), "blackwell-no-int8", "trtllm-build", "H200"),
    ("int8", gpu("RTX5090", 2), "int8-on-sm120", "seen to work once", "allow_unsupported"),
    ("int8", {**both(WO), **gpu("RTX5090", 2)}, "int8-on-sm120", "on no list", "FP8"),
    # FP8 by compute capability
    ("engine", gpu("A100"), "fp8-needs-sm89", "A100 is SM 80", "W8A8_SQ_PER_CHANNEL"),
    ("engine", gpu("A10"), "fp8-needs-sm89", "A10 is SM 86", "W8A16"),
    ("pytorch", gpu("A100"), "fp8-needs-sm89", "needs SM 89", "NO_QUANT"),
    ("pytorch", gpu("A100-40GB"), "fp8-needs-sm89", "A100-40GB", "trt_engine"),
    ("pytorch", {**both(NONE), **algo("FP8", "draft"), **gpu("A30")}, "fp8-needs-sm89", "A30", "L40S"),
    ("engine", {**algo(NONE, kv="FP8"), **gpu("A100")}, "kv-fp8-needs-sm89", "below SM 89", "remove kv_cache_quant_algo"),
    ("engine", {**PLAIN, **algo(NONE, kv="FP8"), **gpu("A10")}, "kv-fp8-needs-sm89", "A10", "remove"),
    # KV caches
    ("engine", algo("FP8", kv="INT8"), "no-int8-kv-preset", "no preset", "kv_cache_quant_algo: FP8"),
    ("pytorch", algo("FP8", kv="INT8"), "no-int8-kv-preset", "no preset", "FP8"),
    ("torch", algo(NONE, kv="INT8"), "no-int8-kv-preset", "INT8 KV cache", "remove"),
    ("int8", algo(SQ, kv="INT8"), "no-int8-kv-preset", "calibrated", "remove"),
    ("int8", algo(SQ, kv="INT8"), "int8-kv-disables-paged-fmha", "paged context FMHA", "remove"),
    ("engine", algo(NONE, kv="FP8"), "fp8-kv-needs-fp8-weights-for-paged-fmha", "silently", "quant_algo: FP8"),
    ("engine", algo(SQ, kv="FP8"), "fp8-kv-needs-fp8-weights-for-paged-fmha", "block reuse", "remove"),
    ("engine", algo(WO, "draft", kv="FP8"), "fp8-kv-needs-fp8-weights-for-paged-fmha", "W8A16", "remove"),
    ("torch", algo(WO, kv="FP8"), "toolkit-fp8-kv", "cannot be combined with quant_algo W8A16", "FP8"),
    ("torch", algo(NONE, "draft", kv="FP8"), "toolkit-fp8-kv", "NO_QUANT", "engine.kv_cache_dtype: fp8"),
    ("pytorch", algo(NONE, kv="FP8"), "toolkit-fp8-kv", "calibrated only with FP8", "remove"),
    # families
    ("engine", algo(SQ), "smoothquant-families", "Llama 3 is a family", "FP8 or W8A16"),
    ("engine", {**algo(SQ, "draft"), **gpu("H100", 2), "engine__tp_size": 2},
     "smoothquant-families", "as not supported", "allow_unsupported"),
    ("int8", {**model("target", LLAMA), **model("draft", LLAMA_DRAFT)}, "smoothquant-families", "ModelOpt lists", "W8A16"),
    ("int8", QWEN3, "smoothquant-families", "Qwen 3 is a family that ModelOpt does not list", "W8A16"),
    ("engine", {**QWEN3, **V021}, "qwen3-min-version", "does not support Qwen 3", "1.2.1"),
    # measured while building
    ("pytorch", {"speculation__max_draft_len": "auto", "hardware__gpu": "auto"},
     "toolkit-auto-draft-len", "the YAML names none", "hardware.gpu"),
    # layouts of the embedded engine
    ("torch", {"speculation__draft_len_schedule": {1: 4, 2: 0}, "triton__layout": "bls"},
     "toolkit-bls-drafts", "at every load", "layout: llmapi"),
    ("torch", {"speculation__max_concurrency": 4, "triton__layout": "bls"},
     "toolkit-bls-drafts", "at every load", "layout: llmapi"),
    ("engine", {"speculation__max_concurrency": 4}, "toolkit-engine-flow-load", "at every load", "trtllm_pytorch"),
    ("torch", {"draft": None, "speculation__kind": "ngram", "triton__layout": "bls"},
     "toolkit-bls-drafts", "ngram has none", "layout: llmapi"),
    # versions
    ("engine", V14, "engine-flow-removed", "no engines are built", "trtllm_pytorch"),
    ("int8", V14, "engine-flow-removed", "trtllm-build was removed", '"1.2.1"'),
    ("engine", {**PLAIN, **V14}, "engine-flow-removed", "1.4rc", "1.2.1"),
    ("engine", {"engine__tensorrt_llm": "1.3rc-early"}, "engine-flow-removed", "after 1.3.0rc20", "1.2.1"),
    # without a draft it would build an engine in silence
    *(("pytorch", {**V021, **keys}, "pytorch-flow-min-version", "compiles an engine", "1.2.1")
      for keys in ({}, PLAIN, {"draft": None, "speculation__kind": "ngram"})),
    *(("pytorch", {"engine__tensorrt_llm": version}, "serving-container", f"with TensorRT-LLM {version} is known",
       "engine.container_image") for version in ("1.3rc-early", "1.3rc-late", "1.4rc")),
    ("pytorch", {**V10, "speculation__max_concurrency": 4}, "pytorch-settings-min-version", "no max_concurrency", "1.2.1"),
    ("pytorch", {**V10, "engine__tokens_per_block": 64}, "pytorch-settings-min-version", "no tokens_per_block", "1.2.1"),
    ("pytorch", V10, "unified-hf-min-version", "1.2.0 and later, not for 1.0", "1.2.1"),
    ("pytorch", V11, "unified-hf-min-version", "not for 1.1", "allow_unsupported"),
    # parallelism
    ("pytorch", {**gpu("H200", 2), "engine__pp_size": 2}, "no-pp-with-draft-target", "does not support pipeline", "tp_size: 2"),
    ("engine", {**gpu("H200", 4), "engine__tp_size": 2, "engine__pp_size": 2},
     "no-pp-with-draft-target", "two models", "tp_size: 4"),
    ("pytorch", {**gpu("H200", 3), "engine__tp_size": 3}, "heads-divide-tp", "64 attention heads", "1 or 2 or 4 or 8"),
    ("int8", {**gpu("A100", 4), "engine__tp_size": 4}, "heads-divide-tp", "the draft's 14 attention heads", "1 or 2"),
    ("engine", {**gpu("H200", 6), "engine__tp_size": 6}, "heads-divide-tp", "over 6 ranks", "set tp_size"),
    ("pytorch", {**QWENS, **gpu("H200", 8), "engine__tp_size": 8}, "heads-divide-tp", "14", "1 or 2"),
    ("pytorch", {**PLAIN, **model("target", LLAMA_DRAFT), **gpu("H200", 32), "engine__pp_size": 32,
                 "engine__gpus_per_node": 32}, "layers-for-pp", "16 layers for 32", "16 or less"),
    ("engine", {**PLAIN, **model("target", "meta-llama/Llama-3.1-405B-Instruct"), **gpu("H200", 8, hardware__nodes=4),
                "engine__tp_size": 8, "engine__pp_size": 4},
     "toolkit-even-pipeline", "126 layers cannot be divided evenly among 4", "1 or 2 or 3 or 6"),
    ("pytorch", {"engine__tp_size": 2}, "world-size", "2 ranks need one GPU each, and there are 1", "tp_size: 1"),
    ("engine", {**gpu("H200", 4), "engine__tp_size": 8}, "world-size", "there are 4", "tp_size: 4"),
    ("pytorch", {**PLAIN, **gpu("H200", 2), "engine__tp_size": 2, "engine__pp_size": 2},
     "world-size", "= 4 ranks", "hardware.count"),
    ("pytorch", {**gpu("H200", 8, hardware__nodes=2), "engine__tp_size": 16, "engine__gpus_per_node": 4},
     "world-size", "2 machines", "nodes: 4"),
    ("pytorch", {**gpu("H200", 4, hardware__nodes=2), "engine__tp_size": 8},
     "ranks-per-node", "puts 8 ranks on a machine with 4", "gpus_per_node: 4"),
    # lengths
    ("pytorch", {"engine__max_seq_len": 131073}, "length-within-model", "131072 positions", "131072 or less"),
    ("engine", {**QWENS, "engine__max_seq_len": 40000}, "length-within-model", "32768", "32768"),
    ("torch", {"engine__max_seq_len": 200000}, "length-within-model", "beyond the target's", "set max_seq_len"),
    ("pytorch", {**QWEN3, **model("draft", QWEN_DRAFT), "engine__max_seq_len": 40000},
     "draft-seq-len", "the draft's 32768", "longer context"),
    ("pytorch", model("draft", QWEN_DRAFT), "same-vocab", "the draft has 151936 tokens in its vocabulary and the target 128256", "target's family"),
    ("int8", model("draft", LLAMA_DRAFT), "same-vocab", "different tokenizers", "family"),
    ("torch", model("draft", "mistralai/Mistral-7B-Instruct-v0.3"), "same-vocab", "32768", "family"),
    # sizes
    ("pytorch", {"engine__max_num_tokens": 512}, "input-within-num-tokens", "a prompt of 1024", "max_num_tokens: 1024"),
    ("engine", {"engine__max_input_len": 9000, "engine__max_seq_len": 9500}, "input-within-num-tokens", "allows 8192", "9000"),
    ("pytorch", {"engine__max_batch_size": 2000}, "draft-within-num-tokens", "10000 tokens per step", "max_batch_size: 1638"),
    ("pytorch", {"engine__max_batch_size": 600, "speculation__max_draft_len": 16},
     "draft-within-num-tokens", "16 + 1", "10200"),
    ("pytorch", {"engine__tokens_per_block": 48}, "tokens-per-block-power-of-two", "48", "32 or 64"),
    ("engine", {"engine__tokens_per_block": 100}, "tokens-per-block-power-of-two", "not a power of two", "64"),
    ("engine", {"engine__multiple_profiles": True, "engine__opt_num_tokens": 64},
     "profiles-with-opt-tokens", "refuses", "remove one"),
    ("engine", {"engine__enable_block_reuse": False}, "block-reuse-for-drafts", "block reuse", "true"),
    # acceptance, layouts, hardware
    ("engine", {"draft": None, "speculation__kind": "ngram"}, "ngram-of-flow", "n-gram lookup", "trtllm_pytorch"),
    ("torch", HEAD, "toolkit-heads", "not yet with a head", "set engine.kind: trtllm_pytorch or vllm"),
    ("engine", HEAD, "toolkit-heads", "a second engine", "vllm"),
    ("pytorch", {**HEAD, **V11}, "toolkit-heads", "whatever its temperature", "versions that sample: 1.2.0, 1.2.1"),
    ("pytorch", {**HEAD, "speculation__max_draft_len": "auto"}, "toolkit-heads", "cannot run an EAGLE-3 head", "a number"),
    ("pytorch", {**HEAD, "target__checkpoint": QWEN}, "head-target", "a Qwen 2 / 2.5 target", "Llama or Qwen 3"),
    ("pytorch", {**HEAD, "speculation__max_concurrency": 2}, "head-load", "would ignore it", "1.3rc-late, 1.4rc"),
    ("pytorch", {"draft": None, "speculation__kind": "mtp"}, "mtp-layers", "a Llama 3 target has no MTP layers", "EAGLE-3"),
    ("engine", {"speculation__draft_len_schedule": {1: 4, 8: 0}}, "draft-len-schedule", "each request states its own", "remove"),
    ("pytorch", {**V11, "speculation__draft_len_schedule": {1: 4, 8: 0}}, "draft-len-schedule", "1.1 has no", "1.2.1"),
    ("pytorch", {**V11, "speculation__adaptive": {"min_acceptance_length": 1.3}}, "adaptive-speculation", "1.1 has no switch", "remove"),
    ("pytorch", {"speculation__adaptive": {}}, "adaptive-speculation", "measures no costs", "min_acceptance_length, such as 1.3"),
    ("pytorch", {**HEAD, "speculation__adaptive": {"min_acceptance_length": 1.3}}, "adaptive-speculation", "would ignore it", "remove"),
    ("vllm", {"speculation__adaptive": {}}, "adaptive-speculation", "no switch by acceptance", "remove"),
    ("torch", {"speculation__max_draft_len": 3, "speculation__adaptive": {"min_acceptance_length": 4.5}},
     "toolkit-adaptive", "at most 4 tokens", "lower it"),
    ("torch", {"speculation__max_draft_len": "auto", "speculation__adaptive": {"min_acceptance_length": 9.5}},
     "toolkit-adaptive", "at most 9 tokens", "what drafting costs decides"),
    ("pytorch", {"speculation__max_draft_len": 3, "speculation__adaptive": {"min_acceptance_length": 9}},
     "toolkit-adaptive", "at most 4 tokens", "predicts the costs"),
    ("pytorch", {"speculation__max_prompt_tokens": 100}, "draft-for-every-prompt", "drafts for every prompt", "remove"),
    ("vllm", {"speculation__max_prompt_tokens": 100}, "draft-for-every-prompt", "no request can be left out", "remove"),
    ("pytorch", {"draft": None, "speculation__kind": "ngram", "speculation__acceptance": "rejection"}, "acceptance-rule",
     "does not have the acceptance rule rejection", "auto"),
    ("pytorch", {"speculation__acceptance": "rejection"}, "acceptance-rule", "drafts greedily", "auto (which is sample_match)"),
    ("pytorch", {"speculation__acceptance": "coupled"}, "acceptance-rule", "does not have the acceptance rule coupled", "torch"),
    ("engine", {"speculation__acceptance": "coupled"}, "acceptance-rule", "no such rule", "auto"),
    ("pytorch", {"triton__layout": "bls"}, "layout-of-flow", "inside one runtime", "llmapi"),
    ("engine", {"triton__layout": "llmapi"}, "layout-of-flow", "never served two", "bls"),
    ("engine", {"triton__model_py": "container"}, "toolkit-model-py", "the toolkit's own models", "remove"),
    ("torch", {"triton__model_py": "container"}, "toolkit-model-py", "only trtllm_pytorch", "remove"),
    *(
        ("pytorch", {"triton__model_py": "container", f"triton__{key}": value}, "toolkit-model-py", words, "model_py: ours")
        for key, value, words in (
            ("max_queue_size", 8, "without a limit"),
            ("default_max_tokens", 8, "SamplingParams"),
            ("request_timeout_s", 8.0, "no request by time"),
            ("stream_interval_ms", 0.0, "one chunk per step"),
            ("stream_interval_ms", 10.0, "one chunk per step"),
        )
    ),
    ("engine", {"triton__backend": "native"}, "toolkit-backend", "NVIDIA's container", "remove"),
    ("torch", {"triton__backend": "native", "triton__layout": "bls"}, "toolkit-backend", "call each other", "remove"),
    ("pytorch", {"triton__on_draft_failure": "plain"}, "toolkit-draft-failure", "fail together", "remove"),
    ("torch", {"triton__on_draft_failure": "error"}, "toolkit-draft-failure", "in layout llmapi", "remove"),
    ("torch", {"triton__on_draft_failure": "plain"}, "toolkit-draft-failure", "in layout llmapi", "remove"),
    ("torch", {"hardware__nodes": 2}, "toolkit-one-device", "one device", "trtllm_pytorch"),
    ("torch", {"hardware__count": 4}, "toolkit-one-device", "one device", "remove"),
    # memory
    ("torch", {"engine__max_batch_size": 1_000_000}, "memory", " for 1000000 slots of max_seq_len ", "smaller engine.max_batch_size"),
    ("pytorch", {**both(NONE), **gpu("H100")},
     "memory", "do not fit H100", "tp_size: 2 and hardware.count: 2, or quant_algo: FP8, or"),
    ("pytorch", gpu("L40S"), "memory", "do not fit L40S", "tp_size: 2"),
    ("engine", gpu("L4"), "memory", "GB", "tp_size"),
    ("pytorch", {**PLAIN, "engine__max_seq_len": 40000, **algo("FP8"), **gpu("H100")},
     "memory", "one sequence", "max_seq_len: 20000"),
    # A checkpoint's own code
    ("torch", {"target__trust_remote_code": True}, "toolkit-remote-code", "embedded engine has its own models", "remove"),
    ("engine", {"draft__trust_remote_code": True}, "toolkit-remote-code", "trtllm-build reads a format", "remove"),
    # versions and devices of vLLM
    ("vllm_cpu", {"engine__vllm": "0.33.0"}, "vllm-on-cpu", "0.33.0 on a CPU is not established", '"0.32.0"'),
    ("vllm_cpu", {"engine__device": "cuda"}, "vllm-device", "no NVIDIA GPU", "hardware.gpu"),
    ("vllm", {"engine__device": "cpu", "engine__vllm": "0.32.0"}, "vllm-device", "names an H200", "remove one"),
    ("vllm_cpu", {"hardware__nodes": 2}, "vllm-device", "one machine only", "hardware.gpu"),
    ("vllm_cpu", {"engine__tp_size": 1024, "engine__pp_size": 2}, "vllm-device", "a process each", "pp_size: 1"),
    ("vllm", {**gpu("H200", 4), "engine__tp_size": 2, "engine__pp_size": 2}, "vllm-no-pp", "not established", "tp_size: 4"),
    ("vllm", {**gpu("H200", 3), "engine__tp_size": 3}, "heads-divide-tp", "64 attention heads", "1 or 2 or 4 or 8"),
    ("vllm", {**QWENS, **gpu("H200", 8), "engine__tp_size": 8}, "heads-divide-tp", "the draft's 14", "1 or 2"),
    ("vllm", {"engine__tp_size": 2}, "world-size", "there are 1", "tp_size: 1"),
    ("vllm", {**gpu("H200", 4, hardware__nodes=2), "engine__tp_size": 8}, "ranks-per-node", "with 4", "gpus_per_node: 4"),
    # precisions of vLLM
    ("vllm", algo(WO), "vllm-w8a16", "none of ModelOpt's INT8 formats", "FP8 or W8A8_SQ_PER_CHANNEL"),
    ("vllm_cpu", algo(WO, "draft"), "vllm-w8a16", "4 bits only", "NO_QUANT"),
    ("vllm", {**both(SQ), **gpu("B200")}, "vllm-int8-sm100", "B200 is SM 100", "FP8"),
    ("vllm", {**both(SQ), **gpu("RTX5090", 8), "engine__tp_size": 8}, "vllm-int8-sm100", "SM 120", "H100"),
    ("vllm", {**both("FP8"), **gpu("A100", 2), "engine__tp_size": 2}, "vllm-fp8-needs-sm89", "weights alone", "allow_unsupported"),
    ("vllm", {"engine__dtype": "float32"}, "vllm-fp8-dtype", "would be float32", "dtype: bfloat16"),
    ("vllm_cpu", both("FP8"), "vllm-fp8-cpu", "static_scaled_fp8_quant", "W8A8_SQ_PER_CHANNEL or NO_QUANT"),
    ("vllm", algo("FP8", kv="INT8"), "no-int8-kv-preset", "no preset", "FP8"),
    ("vllm_cpu", algo(SQ, kv="FP8"), "toolkit-fp8-kv", "cannot be combined with quant_algo W8A8", "remove"),
    # sizes and keys of vLLM
    ("vllm_cpu", {"engine__kv_cache_gib": 1.5}, "vllm-kv-space", "this is 1.5", "kv_cache_gib: 2"),
    ("vllm", {"engine__max_num_batched_tokens": 3}, "vllm-batched-tokens", "allows 3", "max_num_batched_tokens: 20"),
    ("vllm", {"triton__layout": "llmapi"}, "vllm-layout", "Triton's vLLM backend", "auto"),
    ("vllm_cpu", {"triton__layout": "bls"}, "vllm-layout", "layout bls", "auto"),
    ("vllm", {"triton__on_draft_failure": "plain"}, "vllm-triton-keys", "fail together", "remove"),
    ("vllm", {"triton__stream_interval_ms": 0.0}, "vllm-triton-keys", "one chunk per step", "remove"),
    ("vllm", {"triton__grpc_port": 8001}, "vllm-triton-keys", "one port", "set http_port"),
    ("vllm", {"triton__decoupled": False}, "vllm-triton-keys", "always streams", "remove"),
    ("vllm", {"triton__model_py": "container"}, "vllm-triton-keys", "container's vLLM backend", "remove"),
    ("vllm", {"triton__max_queue_size": 8}, "vllm-triton-keys", "without a limit", "remove"),
    ("vllm", {"triton__default_max_tokens": 8}, "vllm-triton-keys", "vLLM's own default", "remove"),
    ("vllm", {"triton__request_timeout_s": 8.0}, "vllm-triton-keys", "no request by time", "remove"),
    ("vllm", {"triton__request_timeout_s": 120.0}, "vllm-triton-keys", "no request by time", "remove"),  # its default
    ("vllm", {"triton__default_max_tokens": 128}, "vllm-triton-keys", "vLLM's own default", "remove"),
    ("vllm", {"triton__grpc_port": 0}, "vllm-triton-keys", "one port", "set http_port"),
    ("vllm", {"speculation__acceptance": "coupled"}, "acceptance-rule", "drafts greedily", "auto (which is sample_match)"),
    ("vllm_cpu", {"draft": None, "speculation__kind": "ngram", "speculation__acceptance": "rejection"}, "vllm-sampled-drafts",
     "no probabilities", "remove acceptance"),
    ("vllm", model("draft", QWEN_DRAFT), "same-vocab", "151936 tokens", "target's family"),
    # memory of vLLM
    ("vllm", gpu("H100"), "memory", "do not fit H100", "tp_size: 2"),
    ("vllm", {**both(NONE), **gpu("H200"), "engine__vllm": "0.33.0"}, "memory", "do not fit H200", "quant_algo: FP8"),
    ("vllm_cpu", {**both("NO_QUANT"), "engine__kv_cache_gib": 1.0, "engine__max_seq_len": 32768, "engine__dtype": "float32"},
     "memory", "vLLM refuses to start", "kv_cache_gib: 2"),
    ("vllm_cpu", {"engine__kv_cache_gib": 1e6}, "memory", "this machine has", "smaller engine.kv_cache_gib"),
    ("pytorch", model("target", "somebody/unheard-of"),
     "shape-needed", "no folder somebody/unheard-of beside the YAML, so this is read as a model id", "unheard-of config.json"),
]  # fmt: skip


def refused(kind: str, keys: dict[str, Any]) -> list[Judgement]:
    return [
        judgement
        for judgement in make_plan(config_of(kind, **keys)).judgements
        if judgement.severity == "refused"
    ]


@pytest.mark.parametrize(
    "kind, keys, rule, what, hint",
    REFUSED,
    ids=[f"{number}-{case[2]}" for number, case in enumerate(REFUSED)],
)
def test_what_cannot_work_is_refused_with_what_would(
    kind: str, keys: dict[str, Any], rule: str, what: str, hint: str
) -> None:
    assert rule in RULES
    texts = [
        (judgement.what, judgement.hint)
        for judgement in refused(kind, keys)
        if judgement.rule == rule
    ]
    assert any(
        what in judged and offered is not None and hint in offered for judged, offered in texts
    ), texts or refused(kind, keys)


@pytest.mark.parametrize(
    "kind, keys",
    [
        ("pytorch", {}),
        ("engine", {"triton__on_draft_failure": "plain"}),
        ("torch", {"triton__on_draft_failure": "plain", "triton__layout": "bls"}),
    ],
)
def test_a_key_that_the_repository_carries_is_not_refused(kind: str, keys: dict[str, Any]) -> None:
    limits = {"max_queue_size": 8, "request_timeout_s": 8.0, "stream_interval_ms": 0.0}
    stated = {f"triton__{key}": value for key, value in limits.items()}
    assert refused(kind, {**stated, **keys}) == []


@pytest.mark.parametrize("kind", ["torch", "engine", "int8"])
def test_adaptive_lengths_and_a_limit_on_prompts_work_where_we_draft(kind: str) -> None:
    keys = {"speculation__adaptive": {}, "speculation__max_prompt_tokens": 100}
    assert refused(kind, keys) == []
    assert refused(kind, {"speculation__adaptive": {"enabled": False}}) == []
    off = {"enabled": False, "min_acceptance_length": 9}
    assert refused(kind, {"speculation__max_draft_len": 3, "speculation__adaptive": off}) == []
    perfect = {"min_acceptance_length": 4}
    assert refused(kind, {"speculation__max_draft_len": 3, "speculation__adaptive": perfect}) == []


@pytest.mark.parametrize("kind", ["torch", "pytorch", "engine", "int8", "vllm", "vllm_cpu"])
def test_the_bases_of_that_table_work(kind: str) -> None:
    """Otherwise the refusals above might come from the base and not from the keys laid over it."""
    assert refused(kind, {}) == []


def test_every_rule_that_refuses_has_a_case_above() -> None:
    adjusts_or_warns = {
        "ignored-sampling", "no-log-probs", "mixed-precision-pair", "batch-fits", "spec-extends-seq-len", "spec-raises-num-tokens",
        "draft-target-overlap", "attention-backend", "fused-mlp-scope", "fp8-fmha-needs-fp8-kv",
        "fp8-kv-forces-fp8-fmha", "fp8-fmha-needs-sm89", "nccl-single-rank", "hardware-needed",
        "checkpoint-files", "toolkit-texts", "toolkit-calibration-text", "toolkit-raw-text", "toolkit-parity-prompts", "toolkit-draft-is-target",
        "vllm-container", "vllm-prompt-limit", "vllm-environment", "vllm-one-kv-dtype",
        "vllm-merged-scales", "vllm-int8-vnni", "vllm-sampling-on-cpu", "vllm-other-device", "head-kv-cache",
        "toolkit-open-listener", "toolkit-load-too-short", "toolkit-chat-template", "toolkit-needs-streams",
        "toolkit-loads-beyond-batch", "toolkit-ngram-size",
    }  # fmt: skip
    tested_below = {
        "mlp-divides-tp",
        "toolkit-already-quantized",
        "vllm-fp8-kv-cpu",
        "vllm-head-size",
        "vllm-int8-amx",
        "vllm-method",
        "vllm-schedule",
    }
    assert {case[2] for case in REFUSED} | adjusts_or_warns | tested_below == set(RULES)


def test_every_rule_has_its_code_under_its_id() -> None:
    elsewhere = {
        "memory",
        "batch-fits",
        "shape-needed",
        "checkpoint-files",
        "toolkit-texts",
        "toolkit-calibration-text",
        "toolkit-raw-text",
        "toolkit-chat-template",
        "vllm-environment",
    }  # memory.py, make.py, workflows/plan.py
    assert set(CHECKS) | elsewhere == set(RULES)
    assert not set(CHECKS) & elsewhere


def test_everything_is_refused_at_once() -> None:
    keys = {
        **both(SQ),
        "engine__tp_size": 3,
        "engine__max_seq_len": 500000,
        "triton__layout": "bls",
        "speculation__acceptance": "coupled",
    }
    rules = {judgement.rule for judgement in refused("pytorch", keys)}
    assert rules >= {
        "no-w8a8-in-pytorch",
        "heads-divide-tp",
        "world-size",
        "length-within-model",
        "layout-of-flow",
        "acceptance-rule",
    }


def test_a_model_whose_mlp_does_not_divide_is_refused() -> None:
    keys = {
        **PLAIN,
        **model("target", "Qwen/Qwen2.5-1.5B-Instruct"),
        **gpu("H200", 12),
        "engine__tp_size": 12,
        "engine__gpus_per_node": 12,
    }
    (judgement,) = [
        judgement for judgement in refused("pytorch", keys) if judgement.rule == "mlp-divides-tp"
    ]
    assert "MLP (intermediate_size 8960)" in judgement.what


def test_a_checkpoint_that_is_quantized_otherwise_is_refused_before_anything_runs(
    tmp_path: Path,
) -> None:
    """One that is quantized as the YAML says needs no memory for quantizing."""
    quantized: dict[str, Any] = {"quant_algo": "FP8", "kv_cache_quant_algo": None}
    for role, name in (("target", LLAMA), ("draft", LLAMA_DRAFT)):
        (tmp_path / role).mkdir()
        (tmp_path / role / "config.json").write_text(json.dumps(CONFIGS[name]))
        (tmp_path / role / "hf_quant_config.json").write_text(
            json.dumps({"quantization": quantized})
        )
    keys = {f"{role}__checkpoint": tmp_path / role for role in ("target", "draft")}
    judgements = refused("pytorch", keys)
    assert [judgement.rule for judgement in judgements] == ["toolkit-already-quantized"] * 2
    assert (
        "is already quantized with FP8, but the YAML asks for FP8 and a FP8 KV cache"
        in judgements[0].what
    )
    assert (
        judgements[0].hint is not None
        and "{quant_algo: FP8}, or name the unquantized" in judgements[0].hint
    )
    plan = make_plan(config_of("pytorch", **keys, **both("FP8")))
    assert plan.possible
    assert "quantize" not in {stage.stage for stage in plan.memory}


@pytest.mark.parametrize(
    "kind, keys, rule",
    [
        ("pytorch", {**gpu("H200", 3), "engine__tp_size": 8}, "world-size"),
        (
            "int8",
            {**gpu("A100", 4), "engine__tp_size": 8},
            "world-size",
        ),  # 14 heads of the draft: four ranks are too many
        (
            "pytorch",
            {**PLAIN, **gpu("H200", 2), "engine__tp_size": 2, "engine__pp_size": 2},
            "world-size",
        ),
        (
            "pytorch",
            {**PLAIN, **gpu("H200", 1), "engine__tp_size": 2, "engine__pp_size": 2},
            "world-size",
        ),
        ("pytorch", {**gpu("H200", 3), "engine__pp_size": 3}, "no-pp-with-draft-target"),
        (
            "int8",
            {**gpu("A100", 8), "engine__tp_size": 2, "engine__pp_size": 4},
            "no-pp-with-draft-target",
        ),
    ],
)
def test_the_ranks_that_are_offered_instead_work(
    kind: str, keys: dict[str, Any], rule: str
) -> None:
    (hint,) = [judgement.hint for judgement in refused(kind, keys) if judgement.rule == rule]
    assert hint is not None
    offered = {
        f"engine__{name}": int(size) for name, size in re.findall(r"(tp_size|pp_size): (\d+)", hint)
    }
    assert not [
        judgement
        for judgement in resolve(subject(kind, **{**keys, **offered}))
        if judgement.severity == "refused"
    ], hint


def test_without_a_gpu_here_nothing_that_depends_on_one_is_judged() -> None:
    keys = {"hardware": None}
    if subject("engine", **keys).gpu is not None:
        pytest.skip("this machine has a GPU that is known")
    plan = make_plan(config_of("engine", **keys))
    assert [judgement.rule for judgement in plan.judgements if judgement.severity == "warning"] == [
        "hardware-needed"
    ]
    assert plan.serving is None and plan.predictions[0].plain_tokens_per_s is None


@pytest.mark.parametrize(
    "kind, keys, rule",
    [
        ("engine", algo(SQ), "smoothquant-families"),
        ("pytorch", algo(WO), "w8a16-not-established"),
        ("int8", gpu("RTX5090", 2), "int8-on-sm120"),
        ("pytorch", V11, "unified-hf-min-version"),
        ("vllm", gpu("A100", 2), "vllm-fp8-needs-sm89"),
    ],
)
def test_what_nobody_vouches_for_can_be_allowed(kind: str, keys: dict[str, Any], rule: str) -> None:
    allowed = {f"{role}__quantization__allow_unsupported": True for role in ("target", "draft")}
    judgements = [
        judgement
        for judgement in resolve(subject(kind, **keys, **allowed))
        if judgement.rule == rule
    ]
    assert judgements and {judgement.severity for judgement in judgements} == {"warning"}


@pytest.mark.parametrize("keys", [gpu("B200"), both(SQ) | gpu("B200"), V14])
def test_what_is_known_to_fail_cannot_be_allowed(keys: dict[str, Any]) -> None:
    allowed = {f"{role}__quantization__allow_unsupported": True for role in ("target", "draft")}
    strict = {
        judgement.rule
        for judgement in resolve(subject("int8", **keys))
        if judgement.severity == "refused"
    } - {"smoothquant-families"}
    assert {
        judgement.rule
        for judgement in resolve(subject("int8", **keys, **allowed))
        if judgement.severity == "refused"
    } == strict


@pytest.mark.parametrize(
    "kind, keys, rule, words",
    [
        ("engine", {}, "spec-extends-seq-len", "2048 + max_draft_len 4"),
        (
            "engine",
            {"engine__max_batch_size": 2048},
            "spec-raises-num-tokens",
            "raised from 8192 to 10240",
        ),
        (
            "engine",
            {"engine__max_num_tokens": 1024, "engine__max_batch_size": 512},
            "spec-raises-num-tokens",
            "from 1024 to 2560",
        ),
        ("int8", {}, "fused-mlp-scope", "use_fused_mlp is switched off"),
        ("int8", {}, "fp8-fmha-needs-sm89", "A100 is SM 80"),
        ("engine", algo("FP8"), "fp8-fmha-needs-fp8-kv", "switched off"),
        ("engine", {}, "fp8-kv-forces-fp8-fmha", "switched on"),
        ("engine", {}, "nccl-single-rank", "one rank"),
        (
            "engine",
            {**PLAIN, **algo(NONE, kv="FP8")},
            "fp8-kv-needs-fp8-weights-for-paged-fmha",
            "block reuse is lost",
        ),
        ("vllm", {}, "vllm-merged-scales", "the draft's q, k and v"),
        (
            "vllm",
            both("FP8", kv="FP8") | algo("NO_QUANT", "draft"),
            "vllm-one-kv-dtype",
            "FP8, not the model's dtype",
        ),
        ("vllm", {}, "vllm-prompt-limit", "longer prompts than max_input_len 1024"),
        (
            "vllm",
            {"speculation__max_draft_len": "auto"},
            "toolkit-auto-draft-len",
            "costs predicted for H200",
        ),
        (
            "vllm_cpu",
            {"speculation__max_draft_len": "auto"},
            "toolkit-auto-draft-len",
            "costs measured on this machine",
        ),
        (
            "vllm",
            {
                **model("target", QWEN),
                **model("draft", QWEN_DRAFT),
            },
            "same-vocab",
            "152064 and 151936",
        ),
        ("pytorch", V11, "draft-target-overlap", "overlap scheduler is off"),
        (
            "pytorch",
            {"speculation__draft_len_schedule": {1: 4, 2: 0}},
            "draft-target-overlap",
            "together with draft_len_schedule",
        ),
        (
            "pytorch",
            {"engine__attn_backend": "FLASHINFER"},
            "draft-target-overlap",
            "not FLASHINFER",
        ),
        ("pytorch", {"engine__attn_backend": "FLASHINFER"}, "attention-backend", "block reuse off"),
        ("int8", {}, "same-vocab", "152064 and 151936"),
        ("vllm_cpu", {}, "vllm-sampling-on-cpu", "brings a plugin for vLLM"),
        (
            "vllm_cpu",
            {"engine__gpu_memory_utilization": 0.5},
            "vllm-other-device",
            "gpu_memory_utilization is for GPUs, and has no effect on CPUs",
        ),
        ("vllm", {"engine__kv_cache_gib": 4.0}, "vllm-other-device", "no effect on GPUs"),
        (
            "vllm",
            {"speculation__draft_len_schedule": {1: 4, 4: 2, 9: 0}},
            "toolkit-loads-beyond-batch",
            "from 9 running requests on have no effect: no more than engine.max_batch_size 4",
        ),
        (
            "torch",
            {"speculation__max_concurrency": 4},
            "toolkit-loads-beyond-batch",
            "drafting never stops: no more than engine.max_batch_size 4 run at once",
        ),
        (
            "torch",
            {"validation__latency__concurrency": (1, 4, 16)},
            "toolkit-loads-beyond-batch",
            "of 16 requests at a time no more than engine.max_batch_size 4 run at once",
        ),
        (
            "vllm_cpu",
            {"speculation__max_matching_ngram_size": 4},
            "toolkit-ngram-size",
            "is for kind ngram, and has no effect with kind draft_target",
        ),
        (
            "vllm",
            {"speculation__acceptance": "rejection"},
            "vllm-sampled-drafts",
            "a seeded text is not repeatable",
        ),
        (
            "pytorch",
            {"speculation__max_draft_len": "auto"},
            "toolkit-auto-draft-len",
            "costs predicted for H200",
        ),
        (
            "engine",
            {"speculation__max_draft_len": "auto"},
            "toolkit-auto-draft-len",
            "before engines are built",
        ),
        (
            "pytorch",
            {"speculation__adaptive": {"min_acceptance_length": 1.3, "window_requests": 9}},
            "adaptive-speculation",
            "the last 9 requests had fewer than 1.3 tokens per step",
        ),
        (
            "pytorch",
            {"speculation__adaptive": {"min_acceptance_length": 1.3, "window_tokens": 64}},
            "adaptive-speculation",
            "window_tokens is for lengths per request, and has no effect here",
        ),
        (
            "torch",
            {**PLAIN, "speculation__adaptive": {}},
            "toolkit-adaptive",
            "has no effect with kind none",
        ),
        (
            "pytorch",
            {**V14, "speculation__draft_len_schedule": {1: 4, 8: 0}},
            "draft-len-schedule",
            "1.4rc reads them as the largest",
        ),
    ],
)
def test_what_changes_in_silence_is_said_before(
    kind: str, keys: dict[str, Any], rule: str, words: str
) -> None:
    judgements = resolve(subject(kind, **keys))
    assert any(
        judgement.rule == rule and judgement.severity == "adjusted" and words in judgement.what
        for judgement in judgements
    ), judgements


@pytest.mark.parametrize(
    "kind, keys, rule",
    [
        ("vllm", {"engine__vllm": "0.33.0"}, "vllm-container"),
        ("vllm_cpu", {"engine__correct_sampling": False}, "vllm-sampling-on-cpu"),
        ("vllm", {"speculation__max_concurrency": 8}, "vllm-schedule"),
        ("vllm", {"draft__trust_remote_code": True}, "toolkit-remote-code"),
        *(
            ("pytorch", {"engine__tensorrt_llm": version, **OWN_IMAGE}, "no-log-probs")
            for version in ("1.3rc-early", "1.3rc-late", "1.4rc")
        ),
        *(
            ("pytorch", {"engine__tensorrt_llm": version, **OWN_IMAGE}, "ignored-sampling")
            for version in ("1.2.1", "1.3rc-early", "1.3rc-late", "1.4rc")
        ),
        ("pytorch", {"draft__trust_remote_code": True}, "toolkit-remote-code"),
        ("engine", algo(WO, "draft"), "mixed-precision-pair"),
        ("pytorch", {"engine__attn_backend": "VANILLA"}, "attention-backend"),
        ("pytorch", {**gpu("H200", 8, hardware__nodes=2), "engine__tp_size": 16}, "ranks-per-node"),
        ("torch", {"triton__host": "0.0.0.0"}, "toolkit-open-listener"),
        ("vllm_cpu", {"triton__host": "gpu7"}, "toolkit-open-listener"),
        ("torch", {"gateway__host": "0.0.0.0"}, "toolkit-open-listener"),
        ("torch", {"validation__max_prompts": 58}, "toolkit-parity-prompts"),
        (
            "torch",
            {"validation__load": {"rate": 3.6, "max_ttft_p99_ms": 300.0}},
            "toolkit-load-too-short",
        ),
        *(
            (
                "torch",
                {"triton__decoupled": False, f"validation__{section}": gates},
                "toolkit-needs-streams",
            )
            for section, gates in (
                ("latency", {"max_itl_p90_ms": 20.0}),
                ("latency", {"max_tpot_p90_ms": 20.0}),
                ("latency", {"max_ratios": {"ttft_p90": 1.1}}),
                ("load", {"rate": 3.71, "max_ttft_p99_ms": 300.0}),
                ("load", {"rate": 3.71, "goodput": {"icl": 30.0}}),
            )
        ),
        ("torch", {"validation__parity": {"max_divergence_rate": 0.04}}, "toolkit-parity-prompts"),
        (
            "torch",
            {"draft__checkpoint": QWEN_DRAFT, "target__checkpoint": QWEN_DRAFT},
            "toolkit-draft-is-target",
        ),
    ],
)
def test_what_may_work_and_is_not_vouched_for_is_a_warning(
    kind: str, keys: dict[str, Any], rule: str
) -> None:
    judgements = [
        judgement for judgement in resolve(subject(kind, **keys)) if judgement.rule == rule
    ]
    assert judgements and {judgement.severity for judgement in judgements} == {"warning"}


@pytest.mark.parametrize(
    "keys",
    [
        {"validation__max_prompts": 59},
        {"validation__max_prompts": 4, "draft": None, "speculation__kind": "none"},
        {"validation__load": {"rate": 3.71, "max_ttft_p99_ms": 300.0}},
        {"validation__load": {"rate": 3.6, "max_ttft_p99_ms": 300.0, "max_seconds": 618}},
        {
            "validation__load": {"rate": 1.9, "max_ttft_p99_ms": 300.0},
            "draft": None,
            "speculation__kind": "none",
        },
        {"validation__load": {"rate": 2.0, "goodput": {"ttft": 200}}},
        {"validation__load": {"rate": "auto", "goodput": {"ttft": 200}}},
        {"triton__decoupled": False, "validation__latency": {"max_e2e_p90_ms": 900.0}},
        {"validation__latency": {"max_ttft_p90_ms": 90.0}},
    ],
)
def test_a_verdict_that_can_be_reached_is_not_warned_about(keys: dict[str, Any]) -> None:
    assert not {judgement.rule for judgement in resolve(subject("pytorch", **keys))} & {
        "toolkit-parity-prompts",
        "toolkit-draft-is-target",
        "toolkit-load-too-short",
        "toolkit-needs-streams",
    }


def vllm_refusals(**known: Any) -> dict[str, str]:
    """Rule -> what is wrong, for an FP8 KV cache under vLLM on a CPU, without the rule that
    refuses FP8 weights there.

    known: what of the machine and the models is not as it is here.
    """
    keys = {**both("FP8", kv="FP8"), "engine__dtype": "bfloat16"}
    judged = replace(subject("vllm_cpu", **keys), **known)
    return {
        judgement.rule: judgement.what
        for judgement in resolve(judged)
        if judgement.severity == "refused" and judgement.rule != "vllm-fp8-cpu"
    }


def test_an_fp8_kv_cache_under_vllm_on_a_cpu_needs_its_instruction_sets() -> None:
    assert vllm_refusals(cpu_flags=frozenset({"avx512f"})) == {}
    assert vllm_refusals(cpu_flags=frozenset({"amx_tile"})) == {}
    refusals = vllm_refusals(cpu_flags=frozenset({"avx2"}))
    assert set(refusals) == {"vllm-fp8-kv-cpu"} and "AVX-512 or AMX" in refusals["vllm-fp8-kv-cpu"]


def test_an_fp8_kv_cache_under_vllm_on_a_cpu_needs_heads_of_a_multiple_of_32() -> None:
    shape = replace(subject("vllm_cpu").shapes["target"], head_dim=80)
    refusals = vllm_refusals(
        cpu_flags=frozenset({"avx512f"}), shapes={"target": shape, "draft": shape}
    )
    assert set(refusals) == {"vllm-fp8-kv-cpu"} and "80" in refusals["vllm-fp8-kv-cpu"]


@pytest.mark.parametrize(
    ("kind", "flags", "is_warned"),
    [
        ("vllm_cpu", {"avx2"}, True),
        ("vllm_cpu", {"avx2", "avx512f"}, True),
        ("vllm_cpu", {"avx2", "avx_vnni"}, False),
        ("vllm_cpu", {"avx512f", "avx512_vnni"}, False),
        ("vllm_cpu", set(), False),
        ("vllm", {"avx2"}, False),
        ("torch", {"avx2"}, False),
    ],
)
def test_int8_under_vllm_saturates_without_vnni(
    kind: str, flags: set[str], is_warned: bool
) -> None:
    judged = replace(subject(kind, **both("W8A8_SQ_PER_CHANNEL")), cpu_flags=frozenset(flags))
    warnings = [
        judgement.path for judgement in resolve(judged) if judgement.rule == "vllm-int8-vnni"
    ]
    paths = ["target.quantization.quant_algo", "draft.quantization.quant_algo"]
    assert warnings == (paths if is_warned else [])


@pytest.mark.parametrize(
    ("kind", "flags", "dtype", "is_refused"),
    [
        ("vllm_cpu", {"avx512_vnni", "amx_tile"}, "float32", True),
        ("vllm_cpu", {"avx512_vnni", "amx_tile"}, "bfloat16", False),
        ("vllm_cpu", {"avx512_vnni", "amx_tile"}, "auto", False),  # the checkpoints' bfloat16
        ("vllm_cpu", {"avx512_vnni"}, "float32", False),
        ("vllm", {"avx512_vnni", "amx_tile"}, "float32", False),
    ],
)
def test_vllm_s_int8_kernel_for_amx_takes_no_float32(
    kind: str, flags: set[str], dtype: str, is_refused: bool
) -> None:
    changes = {**both("W8A8_SQ_PER_CHANNEL"), "engine__dtype": dtype}
    judged = replace(subject(kind, **changes), cpu_flags=frozenset(flags))
    found = [judgement for judgement in resolve(judged) if judgement.rule == "vllm-int8-amx"]
    assert [judgement.path for judgement in found] == ["engine.dtype"] * 2 * is_refused
    assert all("set dtype: bfloat16" in judgement.hint for judgement in found)


def test_vllm_s_attention_on_a_cpu_has_certain_head_sizes() -> None:
    on_cpu, on_gpu = subject("vllm_cpu"), subject("vllm")
    odd = replace(on_cpu.shapes["draft"], head_dim=16)
    (judgement,) = [
        judgement
        for judgement in resolve(replace(on_cpu, shapes={**on_cpu.shapes, "draft": odd}))
        if judgement.rule == "vllm-head-size"
    ]
    assert judgement.severity == "refused" and judgement.path == "draft.checkpoint"
    assert "the draft's head_dim 16" in judgement.what
    shapes = {**on_gpu.shapes, "draft": replace(on_gpu.shapes["draft"], head_dim=16)}
    assert "vllm-head-size" not in {
        judgement.rule for judgement in resolve(replace(on_gpu, shapes=shapes))
    }


@pytest.mark.parametrize(
    "keys, row, rule, what",
    [
        ({}, {"draft_model": False}, "vllm-method", "draft_model in vLLM 0.24.0 does not exist"),
        ({}, {"draft_model": None}, "vllm-method", "is not established"),
        (
            {"draft": None, "speculation__kind": "ngram"},
            {"ngram": None},
            "vllm-method",
            "the method ngram",
        ),
        (
            {"speculation__draft_len_schedule": {1: 4, 8: 0}},
            {"schedule": None},
            "vllm-schedule",
            "a draft length per batch size in vLLM 0.24.0 is not established",
        ),
        (
            {"speculation__max_concurrency": 4},
            {"schedule": False},
            "vllm-schedule",
            "does not exist",
        ),
    ],
)
def test_a_vllm_version_without_what_the_yaml_asks_is_refused(
    keys: dict[str, Any],
    row: dict[str, bool | None],
    rule: str,
    what: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every version in the table has these today, so a row is changed here."""
    monkeypatch.setitem(VLLM_VERSIONS, "0.24.0", replace(VLLM_VERSIONS["0.24.0"], **row))
    (judgement,) = [judgement for judgement in refused("vllm", keys) if judgement.rule == rule]
    assert what in judgement.what
    assert judgement.hint is not None and '"0.33.0"' in judgement.hint
