"""`tensorrt_llm.llmapi.llm_args`: the classes of the arguments of `LLM()`, as the chosen release
has them. `..releases` says what differs and where that was read.

Every name is known to the release or refused. Values are checked where upstream checks what the
toolkit writes; every other field takes any value.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    AliasChoices,
    BaseModel,
    ConfigDict,
    Field,
    create_model,
    field_validator,
    model_validator,
)

from ..releases import RELEASE, RELEASES

Count = Annotated[int, Field(ge=0)]
IS_CLASS = RELEASE.decoding_type == "class"


def since(release: str) -> bool:
    order = list(RELEASES)
    return order.index(RELEASE.name) >= order.index(release)


def untyped(*names: str) -> dict[str, Any]:
    """Fields that take any value."""
    return dict.fromkeys(names, (Any, None))


class Strict(BaseModel):
    """LA StrictBaseModel."""

    model_config = ConfigDict(extra="forbid", arbitrary_types_allowed=True, populate_by_name=True)


class Nested(Strict):
    """In 0.21 only the arguments themselves were strict."""

    model_config = ConfigDict(extra="forbid" if RELEASE.is_strict else "ignore")


NestedKv = create_model(
    "NestedKv",
    __base__=Nested,
    **untyped(
        "max_tokens",
        "max_attention_window",
        "sink_token_length",
        "host_cache_size",
        "cross_kv_cache_fraction",
        "secondary_offload_min_priority",
        "event_buffer_max_size",
        "enable_partial_reuse",
        "copy_on_partial_reuse",
    ),
)


class KvCacheConfig(NestedKv):
    enable_block_reuse: bool = True
    free_gpu_memory_fraction: Annotated[float, Field(ge=0, le=1)] | None = None
    if since("1.0.0"):
        dtype: str = "auto"
        use_uvm: bool = False
    if since("1.1.0"):
        tokens_per_block: int = 32
        max_gpu_total_bytes: int = 0
        mamba_ssm_cache_dtype: str = "auto"
        attention_dp_events_gather_period_ms: int = 5
    if since("1.3.0rc20"):
        use_kv_cache_manager_v2: bool = False
        max_util_for_resume: float = 0.95
    if not since("1.3.0rc28"):
        onboard_blocks: bool = True


class CudaGraphConfig(Nested):
    batch_sizes: list[int] | None = None
    max_batch_size: Count = 0
    enable_padding: bool = False


class DecodingBaseConfig(Nested):
    """from_dict looks the class up by a decoding_type that is spelled otherwise than the classes
    spell it (DraftTarget, UserProvided), and takes the key out of what it is given.
    """

    max_draft_len: Count | None = None
    if since("1.1.0"):
        max_total_draft_tokens: int | None = None
        max_concurrency: Count | None = None
    if since("1.2.0"):
        speculative_model: str | Path | None = Field(
            default=None,
            validation_alias=AliasChoices("speculative_model", "speculative_model_dir"),
        )
        draft_len_schedule: dict[int, int] | None = None
        load_format: str | None = None
        allow_advanced_sampling: bool = False
    else:
        speculative_model_dir: str | Path | None = None
    if since("1.4.0rc1"):
        acceptance_rate_window_size: Count | None = None
        acceptance_rate_threshold: float | None = None
        enable_penalty: bool = False
    elif since("1.2.0"):
        acceptance_window: Count | None = None
        acceptance_length_threshold: float | None = None
    if since("1.3.0rc28"):
        use_rejection_sampling: bool = False

    if IS_CLASS:

        @classmethod
        def from_dict(cls, data: dict[str, Any]) -> Any:
            found = BY_DECODING_TYPE.get(data.get("decoding_type"))
            if found is None:
                raise ValueError(f"Invalid decoding type: {data.get('decoding_type')}")
            data.pop("decoding_type")
            return found(**data)

    if since("1.2.0"):

        @field_validator("draft_len_schedule")
        @classmethod
        def check_schedule(cls, schedule: dict[int, int] | None, info: Any) -> Any:
            """LA validate_draft_len_schedule_and_sort."""
            if schedule is None:
                return None
            longest = info.data.get("max_draft_len")
            if any(batch < 1 or length < 0 for batch, length in schedule.items()):
                raise ValueError("draft_len_schedule: batch sizes from 1 and lengths from 0")
            if RELEASE.schedule == "lower" and 1 not in schedule:
                raise ValueError("draft_len_schedule must include batch size 1")
            first = min(schedule)
            if longest is not None and schedule[first] != longest:
                raise ValueError(f"draft_len_schedule[{first}] must equal max_draft_len")
            if longest is not None and max(schedule.values()) > longest:
                raise ValueError("draft_len_schedule has a length above max_draft_len")
            return dict(sorted(schedule.items()))

    if RELEASE.schedule == "upper":

        @model_validator(mode="after")
        def limit_the_load_once(self) -> Any:
            """LA validate_max_concurrency_and_draft_len_schedule_mutually_exclusive."""
            if self.max_concurrency is not None and self.draft_len_schedule is not None:
                raise ValueError("max_concurrency and draft_len_schedule are mutually exclusive")
            return self

    @property
    def draft_model(self) -> Any:
        return getattr(self, "speculative_model" if since("1.2.0") else "speculative_model_dir")


class DraftTargetDecodingConfig(DecodingBaseConfig):
    if IS_CLASS:
        decoding_type: ClassVar[str] = "Draft_Target"
    else:
        decoding_type: Literal["Draft_Target"] = "Draft_Target"


NamesOfEagle = create_model(
    "NamesOfEagle",
    __base__=DecodingBaseConfig,
    **untyped(
        "eagle_choices",
        "posterior_threshold",
        "dynamic_tree_max_topK",
        "num_eagle_layers",
        "max_non_leaves_per_layer",
    ),
)


class EagleDecodingConfig(NamesOfEagle):
    """Drafts in one model with the target unless eagle3_one_model is false. Where the constructor
    sets attributes, an alias of a field is no attribute, and values are not converted.
    """

    if IS_CLASS:
        decoding_type: ClassVar[str] = "Eagle"
    else:
        decoding_type: Literal["Eagle"] = "Eagle"
    greedy_sampling: bool | None = True
    use_dynamic_tree: bool | None = False
    eagle3_one_model: bool | None = True
    if since("1.1.0"):
        eagle3_layers_to_capture: set[int] | None = None
    if since("1.2.1"):
        eagle3_model_arch: Literal["llama3", "mistral_large3"] = "llama3"

    if RELEASE.eagle_sets_attributes:

        def __init__(self, **given: Any) -> None:
            super().__init__()
            for name, value in given.items():
                setattr(self, name, value)  # AttributeError for decoding_type, a ClassVar
            if since("1.2.0"):
                assert self.max_draft_len is not None, "max_draft_len is required for Eagle"

    if since("1.2.1"):

        @model_validator(mode="after")
        def check_eagle(self) -> Any:
            """LA validate_eagle_config for chains, and validate_speculative_model (candidates)."""
            if not self.max_draft_len:
                raise ValueError("max_draft_len must be above 0 for Eagle")
            if not IS_CLASS and self.draft_model is None:
                raise ValueError("Eagle needs a draft model")
            if self.use_dynamic_tree and not self.dynamic_tree_max_topK:
                raise ValueError("a dynamic tree needs dynamic_tree_max_topK")
            return self

    @property
    def is_one_model(self) -> bool:
        return bool(self.eagle3_one_model)


if not IS_CLASS:

    class Eagle3DecodingConfig(EagleDecodingConfig):
        decoding_type: Literal["Eagle3"] = "Eagle3"


NamesOfMtp = create_model(
    "NamesOfMtp",
    __base__=DecodingBaseConfig,
    **untyped("use_relaxed_acceptance_for_thinking", "relaxed_topk", "relaxed_delta"),
    **(untyped("use_mtp_vanilla") if since("1.0.0") else {}),
    **(untyped("mtp_eagle_one_model") if since("1.2.0") else {}),
    **(
        untyped("num_nextn_predict_layers_from_model_config")
        if since("1.0.0") and not since("1.3.0rc28")
        else {}
    ),
    **(untyped("begin_thinking_phase_token", "end_thinking_phase_token") if not IS_CLASS else {}),
)


class MTPDecodingConfig(NamesOfMtp):
    """Its length is num_nextn_predict_layers, which overwrites max_draft_len without a word; from
    late candidates on it is max_draft_len, and the other key is only moved there.
    """

    if IS_CLASS:
        decoding_type: ClassVar[str] = "MTP"
    else:
        decoding_type: Literal["MTP"] = "MTP"
    num_nextn_predict_layers: int | None = None if since("1.3.0rc28") else 1

    if since("1.3.0rc28"):

        @model_validator(mode="before")
        @classmethod
        def move_length(cls, data: Any) -> Any:
            """LA _remap_deprecated_num_nextn_predict_layers."""
            if isinstance(data, dict) and "num_nextn_predict_layers" in data:
                data = dict(data)
                data.setdefault("max_draft_len", data.pop("num_nextn_predict_layers"))
            return data

        @model_validator(mode="after")
        def check_length(self) -> Any:
            if self.max_draft_len is not None and self.max_draft_len <= 0:
                raise ValueError("max_draft_len must be above 0 for MTP")
            return self

    else:

        @model_validator(mode="after")
        def take_length(self) -> Any:
            """In LA of 1.0 and 1.1 by the arguments of LLM(), validate_speculative_config."""
            if (self.num_nextn_predict_layers or 0) <= 0:
                raise ValueError("num_nextn_predict_layers must be above 0")
            self.max_draft_len = self.num_nextn_predict_layers
            return self

    @property
    def is_one_model(self) -> bool:
        return getattr(self, "mtp_eagle_one_model", None) is not False


class NGramDecodingConfig(DecodingBaseConfig):
    if IS_CLASS:
        decoding_type: ClassVar[str] = "NGram"
    else:
        decoding_type: Literal["NGram"] = "NGram"
    max_matching_ngram_size: int = 0 if IS_CLASS else 2
    is_keep_all: bool = True
    is_use_oldest: bool = True
    is_public_pool: bool = True


class UserProvidedDecodingConfig(DecodingBaseConfig):
    if IS_CLASS:
        decoding_type: ClassVar[str] = "User_Provided"
    else:
        decoding_type: Literal["User_Provided"] = "User_Provided"
    drafter: Any


class AutoDecodingConfig(DecodingBaseConfig):
    if IS_CLASS:
        decoding_type: ClassVar[str] = "AUTO"
    else:
        decoding_type: Literal["AUTO"] = "AUTO"


BY_DECODING_TYPE = {
    "DraftTarget": DraftTargetDecodingConfig,
    "Eagle": EagleDecodingConfig,
    "MTP": MTPDecodingConfig,
    "NGram": NGramDecodingConfig,
    "UserProvided": UserProvidedDecodingConfig,
    "AUTO": AutoDecodingConfig,
}
SpeculativeConfig: Any = (
    DraftTargetDecodingConfig
    | EagleDecodingConfig
    | MTPDecodingConfig
    | NGramDecodingConfig
    | UserProvidedDecodingConfig
    | AutoDecodingConfig
)
if not IS_CLASS:
    SpeculativeConfig = Annotated[
        SpeculativeConfig | Eagle3DecodingConfig, Field(discriminator="decoding_type")
    ]

Base = create_model(
    "Base",
    __base__=Strict,
    **untyped(
        "tokenizer",
        "tokenizer_mode",
        "skip_tokenizer_init",
        "revision",
        "tokenizer_revision",
        "context_parallel_size",
        "moe_cluster_parallel_size",
        "moe_tensor_parallel_size",
        "moe_expert_parallel_size",
        "enable_attention_dp",
        "cp_config",
        "load_format",
        "enable_lora",
        "lora_config",
        "enable_chunked_prefill",
        "guided_decoding_backend",
        "batched_logits_processor",
        "iter_stats_max_iterations",
        "request_stats_max_iterations",
        "peft_cache_config",
        "scheduler_config",
        "cache_transceiver_config",
        "gather_generation_logits",
        "num_postprocess_workers",
        "postprocess_tokenizer_dir",
        "reasoning_parser",
        "decoding_config",
        "backend",
    ),
)


class BaseLlmArgs(Base):
    model: str | Path
    dtype: str = "auto"
    trust_remote_code: bool = False
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    gpus_per_node: int | None = None
    kv_cache_config: KvCacheConfig = Field(default_factory=KvCacheConfig)
    speculative_config: SpeculativeConfig | None = None
    max_batch_size: int | None = None
    max_input_len: int | None = None
    max_seq_len: int | None = None
    max_beam_width: int | None = None
    max_num_tokens: int | None = None
    mpi_session: Any = Field(default=None, alias="_mpi_session")

    @model_validator(mode="after")
    def check_speculation(self) -> Any:
        """LA validate_speculative_config."""
        config = self.speculative_config
        if isinstance(config, DraftTargetDecodingConfig | NGramDecodingConfig):
            if not RELEASE.is_pytorch:
                raise ValueError(f"{config.decoding_type} does not support backend tensorrt")
            assert (config.max_draft_len or 0) > 0, "max_draft_len must be above 0"
        if isinstance(config, DraftTargetDecodingConfig):
            assert config.draft_model is not None, "Draft model must be specified"
        if isinstance(config, EagleDecodingConfig):
            assert (config.max_draft_len or 0) > 0, "max_draft_len must be above 0"
            assert config.draft_model is not None, "Path to EAGLE3 weights must be specified"
        if isinstance(config, NGramDecodingConfig):
            assert config.max_matching_ngram_size > 0, "max_matching_ngram_size must be above 0"
        return self


NamesOfTorch = create_model(
    "NamesOfTorch",
    __base__=BaseLlmArgs,
    **untyped(
        "moe_config",
        "enable_iter_perf_stats",
        "enable_iter_req_stats",
        "print_iter_log",
        "torch_compile_config",
        "enable_autotuner",
        "enable_layerwise_nvtx_marker",
        "enable_min_latency",
        "stream_interval",
        "force_dynamic_quantization",
        "allreduce_strategy",
        "checkpoint_loader",
        "garbage_collection_gen0_threshold",
    ),
    **(
        untyped(
            "custom_tokenizer",
            "enable_lm_head_tp_in_adp",
            "pp_partition",
            "sparse_attention_config",
            "return_perf_metrics",
            "orchestrator_type",
            "attention_dp_config",
            "batch_wait_timeout_ms",
            "batch_wait_timeout_iters",
            "batch_wait_max_tokens_ratio",
            "checkpoint_format",
            "kv_connector_config",
            "mm_encoder_only",
            "ray_worker_extension_cls",
            "perf_metrics_max_requests",
        )
        if since("1.2.0")
        else {}
    ),
    **(untyped("sampler_type") if since("1.1.0") and not since("1.3.0rc28") else {}),
    **(
        untyped("fail_fast_on_attention_window_too_large")
        if not since("1.3.0rc20") and since("1.0.0")
        else {}
    ),
)


class TorchLlmArgs(NamesOfTorch):
    cuda_graph_config: CudaGraphConfig | None = Field(default_factory=CudaGraphConfig)
    disable_overlap_scheduler: bool = False
    if not since("1.1.0"):
        enable_mixed_sampler: bool = False
    attn_backend: str = "TRTLLM"


class TrtLlmArgs(BaseLlmArgs):
    """What `LLM()` takes where it compiles an engine. It has none of the PyTorch flow's names."""

    build_config: Any = None
    quant_config: Any = None


LlmArgs = TorchLlmArgs if RELEASE.is_pytorch else TrtLlmArgs
