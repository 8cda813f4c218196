"""Tensors and parameters of TensorRT-LLM's Triton templates, 1.2.1: what a client of either layout
may send and receive.

Data only. Confidence: A: read in published text of 1.2.1 itself; B: the same in published revisions
just before and just after; C: seen in one neighbouring revision only; I: inferred.

Sources
- triton-inference-server/tensorrtllm_backend v0.19.0,
  all_models/inflight_batcher_llm/*/config.pbtxt, docs/model_config.md
- NVIDIA/TensorRT-LLM, triton_backend/all_models/inflight_batcher_llm: tensorrt_llm/config.pbtxt
  (0c8de69a), tensorrt_llm_bls/config.pbtxt (0193dbd4), tensorrt_llm_bls/1/lib/decode.py (4db68284);
  triton_backend/all_models/llmapi
- the renaming min_length -> min_tokens, random_seed -> seed happened after 0.19 (B)

A dtype written as ${key} is filled in by the template key of that name. A parameter that is not set
keeps the template's placeholder, ${key}, which the backend reads as unset.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from toolkit.facts.source import Confidence

__all__ = [
    "BLS",
    "ENGINE",
    "ENSEMBLE",
    "ENSEMBLE_STEPS",
    "LLMAPI",
    "LOGITS_DATATYPES",
    "POSTPROCESSING",
    "PREPROCESSING",
    "ModelFacts",
    "ParameterFact",
    "StepFacts",
    "TensorFact",
]


@dataclass(frozen=True, slots=True)
class TensorFact:
    """dims: as in config.pbtxt, without the batch dimension. ragged: allow_ragged_batch. scalar:
    reshaped to one value per batch entry.
    """

    name: str
    dtype: str
    dims: tuple[int, ...]
    optional: bool = False
    ragged: bool = False
    scalar: bool = False
    confidence: Confidence = "B"


# A list is comma-separated.
ParameterType: TypeAlias = Literal["str", "int", "float", "bool", "path", "enum", "list", "url"]


@dataclass(frozen=True, slots=True)
class ParameterFact:
    """key: the template key that fills it in; None if the value is `fixed`, or if the backend reads
    it but no template has it.
    """

    name: str
    key: str | None = None
    type: ParameterType = "str"  # list: comma-separated
    choices: tuple[str, ...] = ()
    required: bool = False
    fixed: str | None = None
    in_template: bool = True
    confidence: Confidence = "B"


@dataclass(frozen=True, slots=True)
class ModelFacts:
    inputs: tuple[TensorFact, ...]
    outputs: tuple[TensorFact, ...]
    parameters: tuple[ParameterFact, ...]


PREPROCESSING = ModelFacts(
    inputs=(
        TensorFact("QUERY", "TYPE_STRING", (1,)),
        TensorFact("DECODER_QUERY", "TYPE_STRING", (1,), optional=True),
        TensorFact("IMAGE_BYTES", "TYPE_UINT8", (-1, -1, -1, -1), optional=True),
        TensorFact("IMAGE_URL", "TYPE_STRING", (1,), optional=True),
        TensorFact("VIDEO_BYTES", "TYPE_UINT8", (-1, -1, -1, -1), optional=True),
        TensorFact("REQUEST_OUTPUT_LEN", "TYPE_INT32", (1,)),
        TensorFact("BAD_WORDS_DICT", "TYPE_STRING", (-1,), optional=True),
        TensorFact("STOP_WORDS_DICT", "TYPE_STRING", (-1,), optional=True),
        TensorFact("EMBEDDING_BIAS_WORDS", "TYPE_STRING", (-1,), optional=True),
        TensorFact("EMBEDDING_BIAS_WEIGHTS", "TYPE_FP32", (-1,), optional=True),
        TensorFact("END_ID", "TYPE_INT32", (1,), optional=True),
        TensorFact("PAD_ID", "TYPE_INT32", (1,), optional=True),
        TensorFact("PROMPT_TABLE_EXTRA_ID", "TYPE_UINT64", (1,), optional=True),
    ),
    outputs=(
        TensorFact("INPUT_ID", "TYPE_INT32", (-1,)),
        TensorFact("REQUEST_INPUT_LEN", "TYPE_INT32", (1,)),
        TensorFact("DECODER_INPUT_ID", "TYPE_INT32", (-1,)),
        TensorFact("REQUEST_DECODER_INPUT_LEN", "TYPE_INT32", (1,)),
        TensorFact("BAD_WORDS_IDS", "TYPE_INT32", (2, -1)),
        TensorFact("STOP_WORDS_IDS", "TYPE_INT32", (2, -1)),
        TensorFact("EMBEDDING_BIAS", "TYPE_FP32", (-1,)),
        TensorFact("REQUEST_OUTPUT_LEN", "TYPE_INT32", (-1,)),
        TensorFact("OUT_END_ID", "TYPE_INT32", (1,)),
        TensorFact("OUT_PAD_ID", "TYPE_INT32", (1,)),
        TensorFact("OUT_PROMPT_TABLE_EXTRA_IDS", "TYPE_UINT64", (-1,)),
        TensorFact("PIXEL_VALUES", "TYPE_FP16", (-1, -1, -1, -1)),
        TensorFact("ASPECT_RATIO_IDS", "TYPE_INT64", (-1,)),
        TensorFact("ASPECT_RATIO_MASK", "TYPE_INT64", (-1, -1)),
        TensorFact("CROSS_ATTENTION_MASK", "TYPE_INT64", (-1, -1, -1)),
        TensorFact("IMAGE_SIZES", "TYPE_INT64", (2,)),
        TensorFact("IS_VIDEO_INPUT", "TYPE_BOOL", (1,)),
        TensorFact("ATTENTION_MASK", "TYPE_INT64", (-1,)),
        TensorFact("IMAGE_GRID_THW", "TYPE_INT64", (3,)),
        TensorFact("VISION_INPUT_ID", "TYPE_INT32", (-1,)),
    ),
    parameters=(
        ParameterFact("tokenizer_dir", key="tokenizer_dir", type="path", required=True),
        ParameterFact("add_special_tokens", key="add_special_tokens", type="bool"),
        ParameterFact("multimodal_model_path", key="multimodal_model_path", type="path"),
        ParameterFact("gpt_model_path", key="engine_dir", type="path"),
        ParameterFact("max_num_images", key="max_num_images", type="int"),
    ),
)

POSTPROCESSING = ModelFacts(
    inputs=(
        TensorFact("TOKENS_BATCH", "TYPE_INT32", (-1, -1)),
        TensorFact("SEQUENCE_LENGTH", "TYPE_INT32", (-1,)),
    ),
    outputs=(TensorFact("OUTPUT", "TYPE_STRING", (-1,)),),
    parameters=(
        ParameterFact("tokenizer_dir", key="tokenizer_dir", type="path", required=True),
        ParameterFact("skip_special_tokens", key="skip_special_tokens", type="bool"),
    ),
)

# `--logits_dtype` of trtllm-build -> `logits_datatype` of the templates.
LOGITS_DATATYPES = {"float32": "TYPE_FP32", "float16": "TYPE_FP16"}

# Outputs of both the engine model and the BLS model.
SCORE_OUTPUTS = (
    TensorFact("cum_log_probs", "TYPE_FP32", (-1,)),
    TensorFact("output_log_probs", "TYPE_FP32", (-1, -1)),
    TensorFact("context_logits", "${logits_datatype}", (-1, -1)),
    TensorFact("generation_logits", "${logits_datatype}", (-1, -1, -1)),
    TensorFact("batch_index", "TYPE_INT32", (1,)),
    TensorFact("sequence_index", "TYPE_INT32", (1,)),
)
USAGE_OUTPUTS = (
    TensorFact("kv_cache_alloc_new_blocks", "TYPE_INT32", (1,)),
    TensorFact("kv_cache_reused_blocks", "TYPE_INT32", (1,)),
    TensorFact("kv_cache_alloc_total_blocks", "TYPE_INT32", (1,)),
    TensorFact("arrival_time_ns", "TYPE_INT64", (1,)),
    TensorFact("first_scheduled_time_ns", "TYPE_INT64", (1,)),
    TensorFact("first_token_time_ns", "TYPE_INT64", (1,)),
    TensorFact("last_token_time_ns", "TYPE_INT64", (1,)),
    TensorFact("acceptance_rate", "TYPE_FP32", (1,)),
    TensorFact("total_accepted_draft_tokens", "TYPE_INT32", (1,)),
    TensorFact("total_draft_tokens", "TYPE_INT32", (1,)),
    TensorFact("num_input_tokens", "TYPE_INT32", (1,)),
    TensorFact("num_output_tokens", "TYPE_INT32", (1,)),
)

ENGINE = ModelFacts(
    inputs=(
        TensorFact("input_ids", "TYPE_INT32", (-1,), optional=True, ragged=True),
        TensorFact(
            "encoder_input_features",
            "${encoder_input_features_data_type}",
            (-1, -1),
            optional=True,
            ragged=True,
        ),
        TensorFact("encoder_output_lengths", "TYPE_INT32", (1,), optional=True, scalar=True),
        TensorFact("input_lengths", "TYPE_INT32", (1,), scalar=True),
        TensorFact("request_output_len", "TYPE_INT32", (1,), scalar=True),
        TensorFact("num_return_sequences", "TYPE_INT32", (1,), optional=True, scalar=True),
        TensorFact("draft_input_ids", "TYPE_INT32", (-1,), optional=True, ragged=True),
        TensorFact("decoder_input_ids", "TYPE_INT32", (-1,), optional=True, ragged=True),
        TensorFact("decoder_input_lengths", "TYPE_INT32", (1,), optional=True, scalar=True),
        TensorFact("draft_logits", "${logits_datatype}", (-1, -1), optional=True, ragged=True),
        TensorFact("draft_acceptance_threshold", "TYPE_FP32", (1,), optional=True, scalar=True),
        TensorFact("end_id", "TYPE_INT32", (1,), optional=True, scalar=True),
        TensorFact("pad_id", "TYPE_INT32", (1,), optional=True, scalar=True),
        TensorFact("stop_words_list", "TYPE_INT32", (2, -1), optional=True, ragged=True),
        TensorFact("bad_words_list", "TYPE_INT32", (2, -1), optional=True, ragged=True),
        TensorFact("embedding_bias", "TYPE_FP32", (-1,), optional=True, ragged=True),
        TensorFact("beam_width", "TYPE_INT32", (1,), optional=True, scalar=True),
        TensorFact("temperature", "TYPE_FP32", (1,), optional=True, scalar=True),
        TensorFact("runtime_top_k", "TYPE_INT32", (1,), optional=True, scalar=True),
        TensorFact("runtime_top_p", "TYPE_FP32", (1,), optional=True, scalar=True),
        TensorFact("runtime_top_p_min", "TYPE_FP32", (1,), optional=True, scalar=True),
        TensorFact("runtime_top_p_decay", "TYPE_FP32", (1,), optional=True, scalar=True),
        TensorFact("runtime_top_p_reset_ids", "TYPE_INT32", (1,), optional=True, scalar=True),
        TensorFact("len_penalty", "TYPE_FP32", (1,), optional=True, scalar=True),
        TensorFact("early_stopping", "TYPE_BOOL", (1,), optional=True, scalar=True),
        TensorFact("repetition_penalty", "TYPE_FP32", (1,), optional=True, scalar=True),
        TensorFact("min_tokens", "TYPE_INT32", (1,), optional=True, scalar=True),
        TensorFact("beam_search_diversity_rate", "TYPE_FP32", (1,), optional=True, scalar=True),
        TensorFact("presence_penalty", "TYPE_FP32", (1,), optional=True, scalar=True),
        TensorFact("frequency_penalty", "TYPE_FP32", (1,), optional=True, scalar=True),
        TensorFact("seed", "TYPE_UINT64", (1,), optional=True, scalar=True),
        TensorFact("return_log_probs", "TYPE_BOOL", (1,), optional=True, scalar=True),
        TensorFact("return_context_logits", "TYPE_BOOL", (1,), optional=True, scalar=True),
        TensorFact("return_generation_logits", "TYPE_BOOL", (1,), optional=True, scalar=True),
        TensorFact("return_perf_metrics", "TYPE_BOOL", (1,), optional=True, scalar=True),
        TensorFact("exclude_input_in_output", "TYPE_BOOL", (1,), optional=True, scalar=True),
        TensorFact("stop", "TYPE_BOOL", (1,), optional=True, scalar=True),
        TensorFact("streaming", "TYPE_BOOL", (1,), optional=True, scalar=True),
        TensorFact(
            "prompt_embedding_table",
            "${prompt_embedding_table_data_type}",
            (-1, -1),
            optional=True,
            ragged=True,
        ),
        TensorFact("prompt_table_extra_ids", "TYPE_UINT64", (-1,), optional=True, ragged=True),
        TensorFact("prompt_vocab_size", "TYPE_INT32", (1,), optional=True, scalar=True),
        TensorFact("cross_attention_mask", "TYPE_BOOL", (-1, -1), optional=True, ragged=True),
        TensorFact("mrope_rotary_cos_sin", "TYPE_FP32", (-1,), optional=True),
        TensorFact("mrope_position_deltas", "TYPE_INT64", (1,), optional=True),
        TensorFact("lora_task_id", "TYPE_UINT64", (1,), optional=True, scalar=True),
        TensorFact("lora_weights", "TYPE_FP16", (-1, -1), optional=True, ragged=True),
        TensorFact("lora_config", "TYPE_INT32", (-1, 3), optional=True, ragged=True),
        TensorFact("context_phase_params", "TYPE_UINT8", (-1,), optional=True, ragged=True),
        TensorFact("skip_cross_attn_blocks", "TYPE_BOOL", (1,), optional=True, ragged=True),
        TensorFact("retention_token_range_starts", "TYPE_INT32", (-1,), optional=True, ragged=True),
        TensorFact("retention_token_range_ends", "TYPE_INT32", (-1,), optional=True, ragged=True),
        TensorFact(
            "retention_token_range_priorities", "TYPE_INT32", (-1,), optional=True, ragged=True
        ),
        TensorFact(
            "retention_token_range_durations_ms", "TYPE_INT32", (-1,), optional=True, ragged=True
        ),
        TensorFact("retention_decode_priority", "TYPE_INT32", (1,), optional=True, ragged=True),
        TensorFact("retention_decode_duration_ms", "TYPE_INT32", (1,), optional=True, ragged=True),
        TensorFact("guided_decoding_guide_type", "TYPE_STRING", (1,), optional=True, ragged=True),
        TensorFact("guided_decoding_guide", "TYPE_STRING", (1,), optional=True, ragged=True),
        TensorFact("lookahead_window_size", "TYPE_INT32", (1,), optional=True, ragged=True),
        TensorFact("lookahead_ngram_size", "TYPE_INT32", (1,), optional=True, ragged=True),
        TensorFact(
            "lookahead_verification_set_size", "TYPE_INT32", (1,), optional=True, ragged=True
        ),
        TensorFact("return_num_input_tokens", "TYPE_BOOL", (1,), optional=True, scalar=True),
        TensorFact("return_num_output_tokens", "TYPE_BOOL", (1,), optional=True, scalar=True),
    ),
    outputs=(
        TensorFact("output_ids", "TYPE_INT32", (-1, -1)),
        TensorFact("sequence_length", "TYPE_INT32", (-1,)),
        *SCORE_OUTPUTS,
        TensorFact("context_phase_params", "TYPE_UINT8", (-1,)),
        *USAGE_OUTPUTS,
    ),
    parameters=(
        ParameterFact("max_beam_width", key="max_beam_width", type="int", required=True),
        ParameterFact("FORCE_CPU_ONLY_INPUT_TENSORS", fixed="no"),
        ParameterFact(
            "gpt_model_type",
            key="batching_strategy",
            type="enum",
            choices=("inflight_fused_batching", "V1"),
            required=True,
        ),
        ParameterFact("gpt_model_path", key="engine_dir", type="path", required=True),
        ParameterFact("encoder_model_path", key="encoder_engine_dir", type="path"),
        ParameterFact(
            "max_tokens_in_paged_kv_cache", key="max_tokens_in_paged_kv_cache", type="int"
        ),
        ParameterFact("max_attention_window_size", key="max_attention_window_size", type="list"),
        ParameterFact("sink_token_length", key="sink_token_length", type="int"),
        ParameterFact(
            "batch_scheduler_policy",
            key="batch_scheduler_policy",
            type="enum",
            choices=("guaranteed_no_evict", "max_utilization"),
        ),
        ParameterFact(
            "kv_cache_free_gpu_mem_fraction", key="kv_cache_free_gpu_mem_fraction", type="float"
        ),
        ParameterFact("cross_kv_cache_fraction", key="cross_kv_cache_fraction", type="float"),
        ParameterFact("kv_cache_host_memory_bytes", key="kv_cache_host_memory_bytes", type="int"),
        ParameterFact("kv_cache_onboard_blocks", key="kv_cache_onboard_blocks", type="bool"),
        ParameterFact("exclude_input_in_output", key="exclude_input_in_output", type="bool"),
        ParameterFact(
            "cancellation_check_period_ms", key="cancellation_check_period_ms", type="int"
        ),
        ParameterFact("stats_check_period_ms", key="stats_check_period_ms", type="int"),
        ParameterFact("iter_stats_max_iterations", key="iter_stats_max_iterations", type="int"),
        ParameterFact(
            "request_stats_max_iterations", key="request_stats_max_iterations", type="int"
        ),
        ParameterFact("enable_kv_cache_reuse", key="enable_kv_cache_reuse", type="bool"),
        ParameterFact("normalize_log_probs", key="normalize_log_probs", type="bool"),
        ParameterFact("enable_chunked_context", key="enable_chunked_context", type="bool"),
        ParameterFact("gpu_device_ids", key="gpu_device_ids", type="list"),
        ParameterFact("participant_ids", key="participant_ids", type="list"),
        ParameterFact("num_nodes", key="num_nodes", type="int"),
        ParameterFact(
            "lora_cache_optimal_adapter_size", key="lora_cache_optimal_adapter_size", type="int"
        ),
        ParameterFact("lora_cache_max_adapter_size", key="lora_cache_max_adapter_size", type="int"),
        ParameterFact(
            "lora_cache_gpu_memory_fraction", key="lora_cache_gpu_memory_fraction", type="float"
        ),
        ParameterFact(
            "lora_cache_host_memory_bytes", key="lora_cache_host_memory_bytes", type="int"
        ),
        ParameterFact("lora_prefetch_dir", key="lora_prefetch_dir", type="path"),
        ParameterFact(
            "decoding_mode",
            key="decoding_mode",
            type="enum",
            choices=(
                "top_k",
                "top_p",
                "top_k_top_p",
                "beam_search",
                "medusa",
                "redrafter",
                "lookahead",
                "eagle",
            ),
        ),
        ParameterFact(
            "executor_worker_path",
            fixed="/opt/tritonserver/backends/tensorrtllm/trtllmExecutorWorker",
        ),
        ParameterFact("lookahead_window_size", key="lookahead_window_size", type="int"),
        ParameterFact("lookahead_ngram_size", key="lookahead_ngram_size", type="int"),
        ParameterFact(
            "lookahead_verification_set_size", key="lookahead_verification_set_size", type="int"
        ),
        ParameterFact("medusa_choices", key="medusa_choices"),
        ParameterFact("eagle_choices", key="eagle_choices"),
        ParameterFact("gpu_weights_percent", key="gpu_weights_percent", type="float"),
        ParameterFact(
            "enable_context_fmha_fp32_acc", key="enable_context_fmha_fp32_acc", type="bool"
        ),
        ParameterFact("multi_block_mode", key="multi_block_mode", type="bool"),
        ParameterFact("cuda_graph_mode", key="cuda_graph_mode", type="bool"),
        ParameterFact("cuda_graph_cache_size", key="cuda_graph_cache_size", type="int"),
        ParameterFact(
            "speculative_decoding_fast_logits", key="speculative_decoding_fast_logits", type="bool"
        ),
        ParameterFact("tokenizer_dir", key="tokenizer_dir", type="path"),
        ParameterFact(
            "guided_decoding_backend",
            key="guided_decoding_backend",
            type="enum",
            choices=("xgrammar",),
        ),
        ParameterFact(
            "xgrammar_tokenizer_info_path", key="xgrammar_tokenizer_info_path", type="path"
        ),
        ParameterFact("recv_poll_period_ms", type="int", in_template=False),
        ParameterFact("enable_trt_overlap", key="enable_trt_overlap", type="bool", confidence="C"),
    ),
)

BLS = ModelFacts(
    inputs=(
        TensorFact("text_input", "TYPE_STRING", (1,)),
        TensorFact("decoder_text_input", "TYPE_STRING", (1,), optional=True),
        TensorFact("image_input", "TYPE_FP16", (-1, 3, -1, -1), optional=True),
        TensorFact("image_bytes_input", "TYPE_UINT8", (-1, -1, -1, -1), optional=True),
        TensorFact("image_url_input", "TYPE_STRING", (1,), optional=True),
        TensorFact("video_bytes_input", "TYPE_UINT8", (-1, -1, -1, -1), optional=True),
        TensorFact("max_tokens", "TYPE_INT32", (1,)),
        TensorFact("bad_words", "TYPE_STRING", (-1,), optional=True),
        TensorFact("stop_words", "TYPE_STRING", (-1,), optional=True),
        TensorFact("exclude_input_in_output", "TYPE_BOOL", (1,), optional=True),
        TensorFact("end_id", "TYPE_INT32", (1,), optional=True),
        TensorFact("pad_id", "TYPE_INT32", (1,), optional=True),
        TensorFact("top_k", "TYPE_INT32", (1,), optional=True),
        TensorFact("top_p", "TYPE_FP32", (1,), optional=True),
        TensorFact("temperature", "TYPE_FP32", (1,), optional=True),
        TensorFact("length_penalty", "TYPE_FP32", (1,), optional=True),
        TensorFact("repetition_penalty", "TYPE_FP32", (1,), optional=True),
        TensorFact("min_tokens", "TYPE_INT32", (1,), optional=True),
        TensorFact("presence_penalty", "TYPE_FP32", (1,), optional=True),
        TensorFact("frequency_penalty", "TYPE_FP32", (1,), optional=True),
        TensorFact("seed", "TYPE_UINT64", (1,), optional=True),
        TensorFact("return_log_probs", "TYPE_BOOL", (1,), optional=True, scalar=True),
        TensorFact("return_context_logits", "TYPE_BOOL", (1,), optional=True, scalar=True),
        TensorFact("return_generation_logits", "TYPE_BOOL", (1,), optional=True, scalar=True),
        TensorFact("num_return_sequences", "TYPE_INT32", (1,), optional=True, scalar=True),
        TensorFact("beam_width", "TYPE_INT32", (1,), optional=True),
        TensorFact("stream", "TYPE_BOOL", (1,), optional=True),
        TensorFact(
            "prompt_embedding_table", "${prompt_embedding_table_data_type}", (-1, -1), optional=True
        ),
        TensorFact("prompt_vocab_size", "TYPE_INT32", (1,), optional=True),
        TensorFact("prompt_table_extra_id", "TYPE_UINT64", (1,), optional=True),
        TensorFact("embedding_bias_words", "TYPE_STRING", (-1,), optional=True),
        TensorFact("embedding_bias_weights", "TYPE_FP32", (-1,), optional=True),
        TensorFact("num_draft_tokens", "TYPE_INT32", (1,), optional=True),
        TensorFact("use_draft_logits", "TYPE_BOOL", (1,), optional=True, scalar=True),
        TensorFact("lora_task_id", "TYPE_UINT64", (1,), optional=True, scalar=True),
        TensorFact("lora_weights", "TYPE_FP16", (-1, -1), optional=True, ragged=True),
        TensorFact("lora_config", "TYPE_INT32", (-1, 3), optional=True, ragged=True),
        TensorFact("return_perf_metrics", "TYPE_BOOL", (1,), optional=True, scalar=True),
        TensorFact("guided_decoding_guide_type", "TYPE_STRING", (1,), optional=True),
        TensorFact("guided_decoding_guide", "TYPE_STRING", (1,), optional=True),
        TensorFact("return_num_input_tokens", "TYPE_BOOL", (1,), optional=True),
        TensorFact("return_num_output_tokens", "TYPE_BOOL", (1,), optional=True),
    ),
    outputs=(
        TensorFact("text_output", "TYPE_STRING", (-1,)),
        *SCORE_OUTPUTS,
        *USAGE_OUTPUTS,
    ),
    parameters=(
        ParameterFact("accumulate_tokens", key="accumulate_tokens", type="bool"),
        ParameterFact("tensorrt_llm_model_name", key="tensorrt_llm_model_name"),
        ParameterFact("tensorrt_llm_draft_model_name", key="tensorrt_llm_draft_model_name"),
        ParameterFact("multimodal_encoders_name", key="multimodal_encoders_name"),
        ParameterFact("target_model_config_api_url", type="url", in_template=False, confidence="C"),
        ParameterFact("draft_model_config_api_url", type="url", in_template=False, confidence="C"),
    ),
)

# The plain path. Its tensors are those of BLS but for drafts and images, and it has no parameters.
# (TRT triton_backend/all_models/inflight_batcher_llm/ensemble/config.pbtxt, 2a9abd95)
NOT_IN_ENSEMBLE = (
    "num_draft_tokens",
    "use_draft_logits",
    "image_input",
    "image_bytes_input",
    "image_url_input",
    "video_bytes_input",
)
RAGGED_IN_ENSEMBLE = ("guided_decoding_guide_type", "guided_decoding_guide")
ENSEMBLE = ModelFacts(
    inputs=tuple(
        replace(fact, scalar=False, ragged=fact.ragged or fact.name in RAGGED_IN_ENSEMBLE)
        for fact in BLS.inputs
        if fact.name not in NOT_IN_ENSEMBLE
    ),
    outputs=BLS.outputs,
    parameters=(),
)


@dataclass(frozen=True, slots=True)
class StepFacts:
    """One step of the ensemble. inputs, outputs: name in the step's model -> name in the ensemble;
    those that begin with an underscore are not the ensemble's own.
    """

    model: str
    inputs: Mapping[str, str]
    outputs: Mapping[str, str]


ENSEMBLE_STEPS = (
    StepFacts(
        "preprocessing",
        {
            "QUERY": "text_input",
            "DECODER_QUERY": "decoder_text_input",
            "REQUEST_OUTPUT_LEN": "max_tokens",
            "BAD_WORDS_DICT": "bad_words",
            "STOP_WORDS_DICT": "stop_words",
            "EMBEDDING_BIAS_WORDS": "embedding_bias_words",
            "EMBEDDING_BIAS_WEIGHTS": "embedding_bias_weights",
            "END_ID": "end_id",
            "PAD_ID": "pad_id",
            "PROMPT_TABLE_EXTRA_ID": "prompt_table_extra_id",
        },
        {
            "REQUEST_INPUT_LEN": "_REQUEST_INPUT_LEN",
            "INPUT_ID": "_INPUT_ID",
            "REQUEST_DECODER_INPUT_LEN": "_REQUEST_DECODER_INPUT_LEN",
            "DECODER_INPUT_ID": "_DECODER_INPUT_ID",
            "REQUEST_OUTPUT_LEN": "_REQUEST_OUTPUT_LEN",
            "STOP_WORDS_IDS": "_STOP_WORDS_IDS",
            "BAD_WORDS_IDS": "_BAD_WORDS_IDS",
            "EMBEDDING_BIAS": "_EMBEDDING_BIAS",
            "OUT_END_ID": "_PREPROCESSOR_END_ID",
            "OUT_PAD_ID": "_PREPROCESSOR_PAD_ID",
            "OUT_PROMPT_TABLE_EXTRA_IDS": "_OUT_PROMPT_TABLE_EXTRA_IDS",
        },
    ),
    StepFacts(
        "tensorrt_llm",
        {
            "input_ids": "_INPUT_ID",
            "decoder_input_ids": "_DECODER_INPUT_ID",
            "input_lengths": "_REQUEST_INPUT_LEN",
            "decoder_input_lengths": "_REQUEST_DECODER_INPUT_LEN",
            "exclude_input_in_output": "exclude_input_in_output",
            "request_output_len": "_REQUEST_OUTPUT_LEN",
            "end_id": "_PREPROCESSOR_END_ID",
            "pad_id": "_PREPROCESSOR_PAD_ID",
            "embedding_bias": "_EMBEDDING_BIAS",
            "runtime_top_k": "top_k",
            "runtime_top_p": "top_p",
            "temperature": "temperature",
            "len_penalty": "length_penalty",
            "repetition_penalty": "repetition_penalty",
            "min_tokens": "min_tokens",
            "presence_penalty": "presence_penalty",
            "frequency_penalty": "frequency_penalty",
            "seed": "seed",
            "return_log_probs": "return_log_probs",
            "return_context_logits": "return_context_logits",
            "return_generation_logits": "return_generation_logits",
            "return_perf_metrics": "return_perf_metrics",
            "return_num_input_tokens": "return_num_input_tokens",
            "return_num_output_tokens": "return_num_output_tokens",
            "num_return_sequences": "num_return_sequences",
            "beam_width": "beam_width",
            "streaming": "stream",
            "prompt_embedding_table": "prompt_embedding_table",
            "prompt_vocab_size": "prompt_vocab_size",
            "stop_words_list": "_STOP_WORDS_IDS",
            "bad_words_list": "_BAD_WORDS_IDS",
            "prompt_table_extra_ids": "_OUT_PROMPT_TABLE_EXTRA_IDS",
            "lora_task_id": "lora_task_id",
            "lora_weights": "lora_weights",
            "lora_config": "lora_config",
            "guided_decoding_guide_type": "guided_decoding_guide_type",
            "guided_decoding_guide": "guided_decoding_guide",
        },
        {
            "output_ids": "_TOKENS_BATCH",
            "sequence_length": "_SEQUENCE_LENGTH",
            **{fact.name: fact.name for fact in (*SCORE_OUTPUTS, *USAGE_OUTPUTS)},
        },
    ),
    StepFacts(
        "postprocessing",
        {"TOKENS_BATCH": "_TOKENS_BATCH", "SEQUENCE_LENGTH": "_SEQUENCE_LENGTH"},
        {"OUTPUT": "text_output"},
    ),
)

LLMAPI = ModelFacts(
    inputs=(
        TensorFact("text_input", "TYPE_STRING", (-1,)),
        TensorFact("streaming", "TYPE_BOOL", (1,), optional=True),
        TensorFact("sampling_param_best_of", "TYPE_INT32", (1,), optional=True),
        TensorFact("sampling_param_temperature", "TYPE_FP32", (1,), optional=True),
        TensorFact("sampling_param_top_k", "TYPE_INT32", (1,), optional=True),
        TensorFact("sampling_param_top_p", "TYPE_FP32", (1,), optional=True),
        TensorFact("sampling_param_frequency_penalty", "TYPE_FP32", (1,), optional=True),
        TensorFact("sampling_param_presence_penalty", "TYPE_FP32", (1,), optional=True),
        TensorFact("sampling_param_max_tokens", "TYPE_INT32", (1,), optional=True),
        TensorFact("sampling_param_stop", "TYPE_STRING", (-1,), optional=True),
        TensorFact("sampling_param_seed", "TYPE_UINT64", (1,), optional=True),
        TensorFact("sampling_param_exclude_input_from_output", "TYPE_BOOL", (1,), optional=True),
        TensorFact("sampling_param_return_perf_metrics", "TYPE_BOOL", (1,), optional=True),
        TensorFact("return_finish_reason", "TYPE_BOOL", (1,), optional=True),
        TensorFact("return_stop_reason", "TYPE_BOOL", (1,), optional=True),
        TensorFact("return_cumulative_logprob", "TYPE_BOOL", (1,), optional=True),
        TensorFact("stop", "TYPE_BOOL", (1,), optional=True),
    ),
    outputs=(
        TensorFact("text_output", "TYPE_STRING", (-1,)),
        TensorFact("finish_reason", "TYPE_STRING", (-1,)),
        TensorFact("stop_reason", "TYPE_STRING", (-1,)),
        TensorFact("cumulative_logprob", "TYPE_FP32", (-1,)),
        TensorFact("kv_cache_reused_block", "TYPE_INT32", (-1,), confidence="C"),
        TensorFact("kv_cache_missed_block", "TYPE_INT32", (-1,), confidence="C"),
        TensorFact("kv_cache_alloc_new_blocks", "TYPE_INT32", (-1,), confidence="C"),
        TensorFact("kv_cache_alloc_total_blocks", "TYPE_INT32", (-1,), confidence="C"),
        TensorFact("kv_cache_hit_rate", "TYPE_FP32", (-1,), confidence="C"),
        TensorFact("arrival_time_ns", "TYPE_INT64", (-1,), confidence="C"),
        TensorFact("first_scheduled_time_ns", "TYPE_INT64", (-1,), confidence="C"),
        TensorFact("first_token_time_ns", "TYPE_INT64", (-1,), confidence="C"),
        TensorFact("last_token_time_ns", "TYPE_INT64", (-1,), confidence="C"),
        TensorFact("acceptance_rate", "TYPE_FP32", (-1,), confidence="C"),
        TensorFact("total_accepted_draft_tokens", "TYPE_INT32", (-1,), confidence="C"),
        TensorFact("total_draft_tokens", "TYPE_INT32", (-1,), confidence="C"),
    ),
    parameters=(ParameterFact("gpu_device_ids", type="list", in_template=False),),
)
