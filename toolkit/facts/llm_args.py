"""The arguments of TensorRT-LLM's `LLM()` in the PyTorch flow. They are also the keys of its YAML
files. Data only.

Sources: NVIDIA/TensorRT-LLM `tensorrt_llm/llmapi/llm_args.py` (excerpts of 1.2.1; full revisions of
2025, 1.1.0rc and 1.2.0rc, and 2026, early and late 1.3.0rc),
`docs/source/features/speculative-decoding.md`.
TensorRT-LLM refuses unknown keys (`extra="forbid"`).

Confidence: A: read in 1.2.1 itself; B: the same just before and after; C: seen in one neighbouring
revision; I: inferred. For versions other than 1.2.x, no field is better than C.
"""

from __future__ import annotations

from dataclasses import dataclass

from toolkit.facts.source import Confidence

__all__ = [
    "DEFAULT_TOKENS_PER_BLOCK",
    "LLM_ARGS",
    "NESTED",
    "NOT_FIELDS",
    "REQUIRED",
    "SPECULATIVE",
    "Field",
]

# 0.21 is not among them: `LLM` is another class there.
ALL = ("1.0", "1.1", "1.2.0", "1.2.1", "1.3rc-early", "1.3rc-late", "1.4rc")
SINCE_1_1, SINCE_1_2 = ALL[1:], ALL[2:]
TO_1_2, TO_1_3_EARLY = ALL[:4], ALL[:5]
FROM_1_2_TO_1_3 = ALL[2:6]
ONLY_1_4 = ALL[6:]
REQUIRED = "(required)"
DEFAULT_TOKENS_PER_BLOCK = 32


@dataclass(frozen=True, slots=True)
class Field:
    """type: bool | int | float | str | path | enum | object | list[...] | dict[int,int] | a class
    of NESTED; with `|null`, None is also allowed.

    default None: no value, or the nested class with its own defaults. bounds: both ends are
    allowed.
    """

    name: str
    type: str
    default: str | int | float | bool | None
    choices: tuple[str, ...] | None = None
    bounds: tuple[float, float] | None = None
    deprecated: bool = False
    versions: tuple[str, ...] = ALL
    confidence: Confidence = "B"


# BaseLlmArgs and TorchLlmArgs together.
LLM_ARGS = (
    Field("model", "str|path", REQUIRED, confidence="A"),
    Field("tokenizer", "str|path|object|null", None, confidence="A"),
    Field("tokenizer_mode", "enum", "auto", choices=("auto", "slow"), confidence="A"),
    Field("custom_tokenizer", "str|null", None, confidence="A"),
    Field("skip_tokenizer_init", "bool", False, confidence="A"),
    Field("trust_remote_code", "bool", False, confidence="A"),
    Field("tensor_parallel_size", "int", 1, confidence="A"),
    Field("dtype", "str", "auto", confidence="A"),
    Field("revision", "str|null", None, confidence="A"),
    Field("tokenizer_revision", "str|null", None, confidence="A"),
    Field("pipeline_parallel_size", "int", 1, confidence="A"),
    Field("context_parallel_size", "int", 1, confidence="A"),
    Field("gpus_per_node", "int|null", None, confidence="A"),
    Field("moe_cluster_parallel_size", "int|null", None, confidence="A"),
    Field("moe_tensor_parallel_size", "int|null", None, confidence="A"),
    Field("moe_expert_parallel_size", "int|null", None, confidence="A"),
    Field("enable_attention_dp", "bool", False, confidence="A"),
    Field("enable_lm_head_tp_in_adp", "bool", False, confidence="A"),
    Field("pp_partition", "list[int]|null", None, confidence="A"),
    Field("cp_config", "object|null", None, confidence="A"),
    Field(
        "load_format",
        "enum",
        "auto",
        choices=("auto", "dummy", "AUTO", "DUMMY", "VISION_ONLY"),
        confidence="A",
    ),
    Field(
        "fail_fast_on_attention_window_too_large", "bool", False, versions=TO_1_2, confidence="A"
    ),
    Field("enable_lora", "bool", False, confidence="A"),
    Field("lora_config", "LoraConfig|null", None, confidence="A"),
    Field("kv_cache_config", "KvCacheConfig", None, confidence="A"),
    Field("enable_chunked_prefill", "bool", False, confidence="A"),
    Field(
        "guided_decoding_backend",
        "enum|null",
        None,
        choices=("xgrammar", "llguidance"),
        confidence="A",
    ),
    Field("batched_logits_processor", "object|null", None, confidence="A"),
    Field("iter_stats_max_iterations", "int|null", None, confidence="A"),
    Field("request_stats_max_iterations", "int|null", None, confidence="A"),
    Field("peft_cache_config", "PeftCacheConfig|null", None, confidence="A"),
    Field("scheduler_config", "SchedulerConfig", None, confidence="A"),
    Field("cache_transceiver_config", "CacheTransceiverConfig|null", None, confidence="A"),
    Field("sparse_attention_config", "object|null", None, confidence="A"),
    Field("speculative_config", "one of the speculative classes|null", None, confidence="A"),
    Field("max_batch_size", "int|null", None, confidence="A"),
    Field("max_input_len", "int|null", None, confidence="A"),
    Field("max_seq_len", "int|null", None, confidence="A"),
    Field("max_beam_width", "int|null", None, confidence="A"),
    Field("max_num_tokens", "int|null", 8192, confidence="A"),
    Field("gather_generation_logits", "bool", False, confidence="A"),
    Field("num_postprocess_workers", "int", 0, confidence="A"),
    Field("postprocess_tokenizer_dir", "str|null", None, confidence="A"),
    Field("reasoning_parser", "str|null", None, confidence="A"),
    Field("decoding_config", "object|null", None, deprecated=True, confidence="A"),
    Field("backend", "str|null", None, deprecated=True, confidence="A"),
    Field("return_perf_metrics", "bool", False),
    Field("orchestrator_type", "enum|null", None, choices=("rpc", "ray")),
    Field("otlp_traces_endpoint", "str|null", None, confidence="C"),
    Field("garbage_collection_gen0_threshold", "int", 20000),
    Field("cuda_graph_config", "CudaGraphConfig|null", None, confidence="C"),
    Field("attention_dp_config", "AttentionDpConfig|null", None),
    Field("disable_overlap_scheduler", "bool", False),
    Field("moe_config", "MoeConfig", None),
    Field(
        "attn_backend", "str", "TRTLLM", choices=("TRTLLM", "FLASHINFER", "VANILLA"), confidence="C"
    ),
    Field(
        "sampler_type",
        "enum",
        "auto",
        choices=("TRTLLMSampler", "TorchSampler", "auto"),
        versions=TO_1_3_EARLY,
    ),
    Field("enable_mixed_sampler", "bool", False, versions=ALL[:1], confidence="C"),
    Field("enable_iter_perf_stats", "bool", False),
    Field("enable_iter_req_stats", "bool", False),
    Field("print_iter_log", "bool", False),
    Field("batch_wait_timeout_ms", "float", 0),
    Field("batch_wait_timeout_iters", "int", 0),
    Field("batch_wait_max_tokens_ratio", "float", 0),
    Field("torch_compile_config", "TorchCompileConfig|null", None),
    Field("enable_autotuner", "bool", True),
    Field("enable_layerwise_nvtx_marker", "bool", False),
    Field("enable_min_latency", "bool", False),
    Field("stream_interval", "int", 1),
    Field("force_dynamic_quantization", "bool", False),
    Field(
        "allreduce_strategy",
        "enum",
        "AUTO",
        choices=(
            "AUTO",
            "NCCL",
            "UB",
            "MINLATENCY",
            "ONESHOT",
            "TWOSHOT",
            "LOWPRECISION",
            "MNNVL",
            "NCCL_SYMMETRIC",
        ),
    ),
    Field("checkpoint_loader", "object|null", None),
    Field("checkpoint_format", "str|null", None),
    Field("kv_connector_config", "object|null", None),
    Field("mm_encoder_only", "bool", False),
    Field("ray_worker_extension_cls", "str|null", None),
    Field("perf_metrics_max_requests", "int", 0),
    Field("max_stats_len", "int", 1000, confidence="C"),
    Field("nvfp4_gemm_config", "object", "default", confidence="C"),
    Field("sampler_force_async_worker", "bool", False, confidence="C"),
    Field("disable_flashinfer_sampling", "bool", False, confidence="C"),
    Field("enable_sleep", "bool", False, confidence="C"),
)

NESTED = {
    "KvCacheConfig": (
        Field("enable_block_reuse", "bool", True),
        Field("max_tokens", "int|null", None),
        Field("max_attention_window", "list[int]|null", None),
        Field("sink_token_length", "int|null", None),
        Field("free_gpu_memory_fraction", "float|null", 0.9, bounds=(0, 1)),
        Field("host_cache_size", "int|null", None),
        Field("onboard_blocks", "bool", True, versions=TO_1_3_EARLY),
        Field("cross_kv_cache_fraction", "float|null", None),
        Field("secondary_offload_min_priority", "int|null", None),
        Field("event_buffer_max_size", "int", 0),
        Field("attention_dp_events_gather_period_ms", "int", 5),
        Field("enable_partial_reuse", "bool", True),
        Field("copy_on_partial_reuse", "bool", True),
        Field("use_uvm", "bool", False),
        Field("max_gpu_total_bytes", "int", 0),
        Field("dtype", "str", "auto", confidence="C"),
        Field(
            "mamba_ssm_cache_dtype",
            "enum",
            "auto",
            choices=("auto", "float16", "bfloat16", "float32"),
            confidence="C",
        ),
        Field(
            "tokens_per_block", "int", DEFAULT_TOKENS_PER_BLOCK, versions=SINCE_1_1, confidence="C"
        ),
        Field("use_kv_cache_manager_v2", "bool", False, confidence="C"),
        Field("max_util_for_resume", "float", 0.95, confidence="C"),
    ),
    "SchedulerConfig": (
        Field(
            "capacity_scheduler_policy",
            "enum",
            "GUARANTEED_NO_EVICT",
            choices=("MAX_UTILIZATION", "GUARANTEED_NO_EVICT", "STATIC_BATCH"),
        ),
        Field(
            "context_chunking_policy",
            "enum|null",
            None,
            choices=("FIRST_COME_FIRST_SERVED", "EQUAL_PROGRESS"),
        ),
        Field("dynamic_batch_config", "object|null", None),
        Field("waiting_queue_policy", "enum", "fcfs", confidence="C"),
    ),
    "CudaGraphConfig": (
        Field("batch_sizes", "list[int]|null", None),
        Field("max_batch_size", "int", 0),
        Field("enable_padding", "bool", False),
    ),
    "TorchCompileConfig": (
        Field("enable_fullgraph", "bool", True),
        Field("enable_inductor", "bool", False),
        Field("enable_piecewise_cuda_graph", "bool", False),
        Field("capture_num_tokens", "list[int]|null", None),
        Field("enable_userbuffers", "bool", True),
        Field("max_num_streams", "int", 1),
    ),
}

COMMON = (
    Field("decoding_type", "str", REQUIRED),
    Field("max_draft_len", "int|null", None, confidence="A"),
    Field("max_total_draft_tokens", "int|null", None, confidence="A"),
    Field("speculative_model", "str|path|null", None, versions=SINCE_1_2, confidence="A"),
    # 1.2 and later still read it
    Field("speculative_model_dir", "str|path|null", None, confidence="A"),
    Field("max_concurrency", "int|null", None, versions=SINCE_1_1, confidence="A"),
    Field("draft_len_schedule", "dict[int,int]|null", None, versions=SINCE_1_2, confidence="A"),
    Field("load_format", "str|null", None, confidence="A"),
    Field("acceptance_window", "int|null", None, versions=FROM_1_2_TO_1_3, confidence="A"),
    Field("acceptance_length_threshold", "float|null", None, versions=FROM_1_2_TO_1_3),
    Field("acceptance_rate_window_size", "int|null", None, versions=ONLY_1_4),
    Field("acceptance_rate_threshold", "float|null", None, versions=ONLY_1_4),
    Field("allow_advanced_sampling", "bool", False, versions=SINCE_1_2, confidence="C"),
)

EAGLE = (
    *COMMON,
    Field("eagle_choices", "list|null", None, confidence="A"),
    Field("greedy_sampling", "bool|null", True, confidence="A"),
    Field("posterior_threshold", "float|null", None, confidence="A"),
    Field("use_dynamic_tree", "bool|null", False, confidence="A"),
    Field("dynamic_tree_max_topK", "int|null", None, confidence="A"),
    Field("num_eagle_layers", "int|null", None, confidence="A"),
    Field("max_non_leaves_per_layer", "int|null", None, confidence="A"),
    Field("eagle3_one_model", "bool|null", True, confidence="A"),
    # layers of the target, counted from 0
    Field("eagle3_layers_to_capture", "list[int]|null", None, versions=SINCE_1_1, confidence="A"),
    Field(
        "eagle3_model_arch",
        "enum",
        "llama3",
        choices=("llama3", "mistral_large3"),
        versions=SINCE_1_2[1:],
        confidence="A",
    ),
)

# decoding_type -> fields of its class. The spellings of draft-target and EAGLE-3 changed:
# `facts.versions` has them by version.
SPECULATIVE = {
    "DraftTarget": COMMON,
    "Draft_Target": COMMON,
    "NGram": (
        *COMMON,
        Field("max_matching_ngram_size", "int", 0),
        Field("is_keep_all", "bool", True),
        Field("is_use_oldest", "bool", True),
        Field("is_public_pool", "bool", True),
    ),
    "Eagle": EAGLE,
    "Eagle3": EAGLE,
    "MTP": (
        *COMMON,
        Field("num_nextn_predict_layers", "int|null", 1),
        Field("use_relaxed_acceptance_for_thinking", "bool", False),
        Field("relaxed_topk", "int", 1),
        Field("relaxed_delta", "float", 0.0),
        Field("use_mtp_vanilla", "bool", False),
        Field("mtp_eagle_one_model", "bool", True, versions=SINCE_1_2),
        Field("begin_thinking_phase_token", "int", 128798, versions=ALL[4:]),
        Field("end_thinking_phase_token", "int", 128799, versions=ALL[4:]),
    ),
}

# Keys that people often write and that are refused, with the reason.
NOT_FIELDS = {
    "quant_config": "the checkpoint decides the precision; only kv_cache_config.dtype overrides it",
    "build_config": "there is nothing to build in this flow",
    "decoding_config": "its name is speculative_config now",
}
