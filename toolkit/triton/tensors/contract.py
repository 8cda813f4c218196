"""The contract between the served model and its callers: tensors, metrics, and what a chunk of text
holds. It is defined here only.

The tensors that are not marked `ours` have the names, types and shapes of TensorRT-LLM's `llmapi`
template (1.2.1), so TensorRT-LLM's clients work here. The others are ours. All of ours are
optional, and they have TensorRT-LLM's own names if it has such a tensor elsewhere.

What a response holds:
- streaming: one chunk per step, but never two within triton.stream_interval_ms: the tokens in
  between come with the next chunk. Every chunk holds only new text (delta) and never the prompt.
  `output_ids` also holds the chunk's own tokens only. `num_output_tokens` counts all tokens so far,
  so the difference between two chunks is the later chunk's number of tokens. TensorRT-LLM's own
  model repeats the whole text in every chunk. A client can tell the two apart by the parameter
  STREAM_TEXT_PARAMETER in config.pbtxt.
- not streaming: exactly one response with the whole text. The prompt comes before it unless
  sampling_param_exclude_input_from_output is true (false when absent, as in TensorRT-LLM).
- `output_ids` never holds the prompt.
- Reasons and figures come with every chunk, as of that chunk, as from TensorRT-LLM's models: a
  reason is the text None until there is one, and acceptance_rate is 0.0 if nothing was drafted. To
  a request with return_speculation_stats, which only our clients send, they come with the last
  chunk alone.
- An error's text begins with the request's outcome (see METRICS), as in `[refused] the prompt has
  ...`: over gRPC a stream has no code of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from toolkit.words import DRAFT_LEN_REASONS, RequestOutcome

__all__ = [
    "BLS_INPUTS",
    "BLS_MODEL",
    "BLS_OUTPUTS",
    "CACHE_INPUTS",
    "DRAFT_MODEL",
    "ENGINE_INPUTS",
    "ENSEMBLE",
    "HEARTBEATS_VARIABLE",
    "INPUTS",
    "LOG_PROB_INPUTS",
    "LOG_PROB_OUTPUTS",
    "METRICS",
    "MODEL",
    "OUTCOMES",
    "OUTPUTS",
    "PACKAGE_VERSION",
    "POSTPROCESSING",
    "PREPROCESSING",
    "STREAM_TEXT",
    "STREAM_TEXT_PARAMETER",
    "VLLM_MODEL",
    "MetricSpec",
    "TensorSpec",
]

# The version of the packaged files and of what they use of the toolkit. It is written into the
# repository, so a repository of another version is recognised when it is loaded. Raise it when
# either changes; it is also the package stage's version.
PACKAGE_VERSION = 11
# Of the environment: the folder of `toolkit.process.supervise` where models beat.
HEARTBEATS_VARIABLE = "TOOLKIT_HEARTBEATS"

MODEL = "tensorrt_llm"  # the model that clients call, as in TensorRT-LLM's template
# The models of the other layout, `bls`: clients call BLS_MODEL, which calls the others. There MODEL
# is the target.
BLS_MODEL = "tensorrt_llm_bls"
DRAFT_MODEL = "tensorrt_llm_draft"
ENSEMBLE = "ensemble"  # without drafts: preprocessing, target, postprocessing
PREPROCESSING = "preprocessing"
POSTPROCESSING = "postprocessing"
VLLM_MODEL = "vllm_model"  # as in the samples of Triton's vLLM backend

STREAM_TEXT_PARAMETER = "stream_text"  # in config.pbtxt
# delta | cumulative. A config without the parameter is TensorRT-LLM's own, and cumulative.
STREAM_TEXT = "delta"


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor of the model. dims: as in config.pbtxt (-1: any length). ours: the tensor is not
    in TensorRT-LLM's template.
    """

    name: str
    dtype: str  # TYPE_STRING, TYPE_INT32, ... as in config.pbtxt
    dims: tuple[int, ...]
    meaning: str
    optional: bool = True
    ours: bool = False


MetricKind: TypeAlias = Literal["counter", "gauge", "histogram"]
HISTOGRAM_PARTS = ("bucket", "sum", "count")


@dataclass(frozen=True, slots=True)
class MetricSpec:
    """buckets: of a histogram, the upper limits. is_batched: a histogram of more samples than
    requests, which is published as the counters that a histogram consists of.
    """

    name: str
    kind: MetricKind
    meaning: str
    buckets: tuple[float, ...] = ()
    is_batched: bool = False

    @property
    def samples(self) -> tuple[str, ...]:
        """The names on the metrics page."""
        if self.kind != "histogram":
            return (self.name,)
        return tuple(f"{self.name}_{part}" for part in HISTOGRAM_PARTS)


ONE_VALUE, ANY_LENGTH = (1,), (-1,)

INPUTS: tuple[TensorSpec, ...] = (
    TensorSpec(
        "text_input", "TYPE_STRING", ANY_LENGTH, "the prompt, exactly one, UTF-8", optional=False
    ),
    TensorSpec(
        "streaming",
        "TYPE_BOOL",
        ONE_VALUE,
        "one response per step instead of a single one; needs a decoupled repository",
    ),
    TensorSpec(
        "sampling_param_best_of",
        "TYPE_INT32",
        ONE_VALUE,
        "1 is the only value: one sequence per request",
    ),
    TensorSpec(
        "sampling_param_temperature",
        "TYPE_FP32",
        ONE_VALUE,
        "0: greedy; absent: 1 if top_k or top_p is sent, else greedy",
    ),
    TensorSpec(
        "sampling_param_top_k", "TYPE_INT32", ONE_VALUE, "keep the k most likely tokens; 0: all"
    ),
    TensorSpec(
        "sampling_param_top_p",
        "TYPE_FP32",
        ONE_VALUE,
        "keep the most likely tokens up to this total probability, in [0, 1]; 0: greedy",
    ),
    TensorSpec(
        "sampling_param_frequency_penalty",
        "TYPE_FP32",
        ONE_VALUE,
        "subtracted from a token's logit for each time it was output before",
    ),
    TensorSpec(
        "sampling_param_presence_penalty",
        "TYPE_FP32",
        ONE_VALUE,
        "subtracted from the logit of every token that was output before",
    ),
    TensorSpec(
        "sampling_param_max_tokens",
        "TYPE_INT32",
        ONE_VALUE,
        "maximum number of output tokens; absent: the repository's default",
    ),
    TensorSpec(
        "sampling_param_stop",
        "TYPE_STRING",
        ANY_LENGTH,
        "stop words; the text ends before the first one",
    ),
    TensorSpec(
        "sampling_param_seed",
        "TYPE_UINT64",
        ONE_VALUE,
        "makes sampling repeatable, whatever the load or the draft length",
    ),
    TensorSpec(
        "sampling_param_exclude_input_from_output",
        "TYPE_BOOL",
        ONE_VALUE,
        "leave the prompt out of text_output",
    ),
    TensorSpec(
        "sampling_param_return_perf_metrics",
        "TYPE_BOOL",
        ONE_VALUE,
        "return cache, time and acceptance figures",
    ),
    TensorSpec(
        "return_finish_reason",
        "TYPE_BOOL",
        ONE_VALUE,
        "return finish_reason",
    ),
    TensorSpec("return_stop_reason", "TYPE_BOOL", ONE_VALUE, "return stop_reason"),
    TensorSpec(
        "return_cumulative_logprob",
        "TYPE_BOOL",
        ONE_VALUE,
        "return cumulative_logprob",
    ),
    TensorSpec(
        "stop",
        "TYPE_BOOL",
        ONE_VALUE,
        "cancel the running request that has this request's id; the prompt may be empty",
    ),
    TensorSpec(
        "num_draft_tokens",
        "TYPE_INT32",
        ONE_VALUE,
        "draft length of this request, at most what the schedule allows; 0: plain decoding",
        ours=True,
    ),
    TensorSpec(
        "acceptance",
        "TYPE_STRING",
        ONE_VALUE,
        "rule at temperature > 0: auto | rejection | coupled | sample_match; verify_only drafts and"
        " verifies, but accepts nothing",
        ours=True,
    ),
    TensorSpec(
        "timeout_ms",
        "TYPE_INT32",
        ONE_VALUE,
        "deadline, in milliseconds from arrival; absent: the repository's default",
        ours=True,
    ),
    TensorSpec(
        "cache_salt",
        "TYPE_STRING",
        ONE_VALUE,
        "only requests with the same one begin with what another left in the KV cache; at most 256"
        " bytes",
        ours=True,
    ),
    TensorSpec("return_token_ids", "TYPE_BOOL", ONE_VALUE, "return output_ids", ours=True),
    TensorSpec(
        "return_num_input_tokens",
        "TYPE_BOOL",
        ONE_VALUE,
        "return num_input_tokens",
        ours=True,
    ),
    TensorSpec(
        "return_num_output_tokens", "TYPE_BOOL", ONE_VALUE, "return num_output_tokens", ours=True
    ),
    TensorSpec(
        "return_speculation_stats",
        "TYPE_BOOL",
        ONE_VALUE,
        "return verify_steps and the outputs listed after it, all figures with the last response",
        ours=True,
    ),
)

# A KV-cache block is one token of the prompt here, in the target's cache.
OUTPUTS: tuple[TensorSpec, ...] = (
    TensorSpec("text_output", "TYPE_STRING", ANY_LENGTH, "the text, or its new part"),
    TensorSpec(
        "finish_reason",
        "TYPE_STRING",
        ANY_LENGTH,
        "stop (end token or stop word) | length; the text None before",
    ),
    TensorSpec(
        "stop_reason",
        "TYPE_STRING",
        ANY_LENGTH,
        "the stop word that ended the text, or the text None",
    ),
    TensorSpec(
        "cumulative_logprob", "TYPE_FP32", ANY_LENGTH, "sum of the output tokens' log-probabilities"
    ),
    TensorSpec(
        "kv_cache_reused_block",
        "TYPE_INT32",
        ANY_LENGTH,
        "tokens of the prompt that an earlier request left in the cache",
    ),
    TensorSpec(
        "kv_cache_missed_block", "TYPE_INT32", ANY_LENGTH, "tokens of the prompt that were computed"
    ),
    TensorSpec("kv_cache_alloc_new_blocks", "TYPE_INT32", ANY_LENGTH, "as kv_cache_missed_block"),
    TensorSpec("kv_cache_alloc_total_blocks", "TYPE_INT32", ANY_LENGTH, "tokens of the prompt"),
    TensorSpec("kv_cache_hit_rate", "TYPE_FP32", ANY_LENGTH, "reused / (reused + missed)"),
    TensorSpec(
        "arrival_time_ns", "TYPE_INT64", ANY_LENGTH, "monotonic clock of the server's machine"
    ),
    TensorSpec(
        "first_scheduled_time_ns", "TYPE_INT64", ANY_LENGTH, "when the request left the queue"
    ),
    TensorSpec("first_token_time_ns", "TYPE_INT64", ANY_LENGTH, "when the first token was known"),
    TensorSpec("last_token_time_ns", "TYPE_INT64", ANY_LENGTH, "when the last token was known"),
    TensorSpec(
        "acceptance_rate",
        "TYPE_FP32",
        ANY_LENGTH,
        "accepted / drafted tokens; 0.0 when nothing was drafted",
    ),
    TensorSpec("total_accepted_draft_tokens", "TYPE_INT32", ANY_LENGTH, "accepted draft tokens"),
    TensorSpec("total_draft_tokens", "TYPE_INT32", ANY_LENGTH, "drafted tokens"),
    TensorSpec(
        "output_ids",
        "TYPE_INT32",
        ANY_LENGTH,
        "output tokens; when streaming, those of this chunk",
        ours=True,
    ),
    TensorSpec("num_input_tokens", "TYPE_INT32", ONE_VALUE, "tokens of the prompt", ours=True),
    TensorSpec("num_output_tokens", "TYPE_INT32", ONE_VALUE, "output tokens so far", ours=True),
    TensorSpec("verify_steps", "TYPE_INT32", ONE_VALUE, "target forwards after prefill", ours=True),
    TensorSpec(
        "drafted_by_position",
        "TYPE_INT32",
        ANY_LENGTH,
        "verify steps that drafted a token at position i",
        ours=True,
    ),
    TensorSpec(
        "accepted_by_position",
        "TYPE_INT32",
        ANY_LENGTH,
        "verify steps that accepted the token at position i",
        ours=True,
    ),
    TensorSpec(
        "draft_len_reasons",
        "TYPE_STRING",
        ANY_LENGTH,
        "why the steps had the draft length that they had: " + ", ".join(DRAFT_LEN_REASONS),
        ours=True,
    ),
    TensorSpec(
        "draft_len_reason_steps",
        "TYPE_INT32",
        ANY_LENGTH,
        "for each of draft_len_reasons, the number of its steps",
        ours=True,
    ),
    TensorSpec(
        "draft_len_changes",
        "TYPE_INT32",
        ONE_VALUE,
        "how often the draft length that is chosen for the request changed",
        ours=True,
    ),
    TensorSpec(
        "draft_probes",
        "TYPE_INT32",
        ONE_VALUE,
        "how often it was asked whether drafts would pay again",
        ours=True,
    ),
    TensorSpec(
        "draft_time_ns",
        "TYPE_INT64",
        ONE_VALUE,
        "time in draft forwards, of the steps that the request took part in",
        ours=True,
    ),
    TensorSpec(
        "verify_time_ns",
        "TYPE_INT64",
        ONE_VALUE,
        "time in target forwards of those steps",
        ours=True,
    ),
    TensorSpec(
        "host_time_ns", "TYPE_INT64", ONE_VALUE, "the rest of the time of those steps", ours=True
    ),
    TensorSpec(
        "draft_failure",
        "TYPE_STRING",
        ONE_VALUE,
        "the draft's error, with the last response, if the rest was decoded without drafts",
        ours=True,
    ),
)

# Log-probabilities of each token, with the last response. TensorRT-LLM has return_log_probs and
# output_log_probs in its BLS model, but not in `llmapi`.
LOG_PROB_INPUTS: tuple[TensorSpec, ...] = (
    TensorSpec(
        "return_log_probs",
        "TYPE_BOOL",
        ONE_VALUE,
        "return output_log_probs, next_best_ids and next_best_log_probs",
        ours=True,
    ),
)
NEXT_BEST: tuple[TensorSpec, ...] = (
    TensorSpec(
        "next_best_ids",
        "TYPE_INT32",
        ANY_LENGTH,
        "for each output token, the likeliest other token",
        ours=True,
    ),
    TensorSpec(
        "next_best_log_probs",
        "TYPE_FP32",
        ANY_LENGTH,
        "the log-probabilities of next_best_ids",
        ours=True,
    ),
)
LOG_PROB_OUTPUTS: tuple[TensorSpec, ...] = (
    TensorSpec(
        "output_log_probs",
        "TYPE_FP32",
        ANY_LENGTH,
        "log-probabilities of the output tokens, under the target's own logits",
        ours=True,
    ),
    *NEXT_BEST,
)

# Of the embedded engine as one of the two engine models of the bls layout. TensorRT-LLM's engines
# never return the end token; our BLS model counts it where the engine can tell it.
ENGINE_INPUTS: tuple[TensorSpec, ...] = (
    TensorSpec(
        "return_end_token",
        "TYPE_BOOL",
        ONE_VALUE,
        "output_ids then hold the end token too",
        ours=True,
    ),
    TensorSpec(
        "slot_owner",
        "TYPE_STRING",
        ONE_VALUE,
        "the request that this call is a round of: its slot is kept for its next call, until it"
        " sends `stop` or calls no more",
        ours=True,
    ),
    next(spec for spec in INPUTS if spec.name == "cache_salt"),
)

# Tensors that our BLS model has in addition to TensorRT-LLM's (`toolkit.facts.triton_tensors`).
# They are the same tensors as above.
_OURS = {spec.name: spec for spec in (*INPUTS, *OUTPUTS)}
BLS_INPUTS: tuple[TensorSpec, ...] = tuple(
    _OURS[name]
    for name in (
        "acceptance",
        "timeout_ms",
        "return_token_ids",
        "return_finish_reason",
        "return_stop_reason",
        "return_speculation_stats",
    )
)
CACHE_INPUTS = (_OURS["cache_salt"],)  # where the engines are embedded
BLS_OUTPUTS: tuple[TensorSpec, ...] = (
    *(
        _OURS[name]
        for name in (
            "finish_reason",
            "stop_reason",
            "output_ids",
            "verify_steps",
            "drafted_by_position",
            "accepted_by_position",
            "draft_len_reasons",
            "draft_len_reason_steps",
            "draft_len_changes",
            "draft_probes",
            "draft_time_ns",
            "verify_time_ns",
            "host_time_ns",
        )
    ),
    *NEXT_BEST,
    _OURS["draft_failure"],
)

OUTCOMES: tuple[RequestOutcome, ...] = get_args(RequestOutcome)

# From a small model on a CPU to a long prompt in a queue.
FIRST_TOKEN_BUCKETS = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0
)  # fmt: skip
NEXT_TOKEN_BUCKETS = (
    0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5
)  # fmt: skip

TOKENS_PER_STEP_BUCKETS = (1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0, 13.0, 17.0)

METRICS: tuple[MetricSpec, ...] = (
    MetricSpec("toolkit_draft_tokens", "counter", "Draft tokens proposed by finished requests"),
    MetricSpec(
        "toolkit_accepted_draft_tokens", "counter", "Draft tokens accepted by finished requests"
    ),
    MetricSpec(
        "toolkit_verify_steps", "counter", "Target forwards after prefill of finished requests"
    ),
    MetricSpec(
        "toolkit_draft_len_steps",
        "counter",
        "Verify steps of finished requests by the reason of their draft length: "
        + ", ".join(DRAFT_LEN_REASONS),
    ),
    MetricSpec(
        "toolkit_draft_len_changes", "counter", "Changes of draft length within finished requests"
    ),
    MetricSpec(
        "toolkit_draft_probes",
        "counter",
        "Questions whether drafts would pay again, of finished requests",
    ),
    MetricSpec("toolkit_prompt_tokens", "counter", "Prompt tokens of finished requests"),
    MetricSpec(
        "toolkit_reused_prompt_tokens",
        "counter",
        "Prompt tokens of finished requests that an earlier request left in the KV cache",
    ),
    MetricSpec("toolkit_output_tokens", "counter", "Output tokens of finished requests"),
    MetricSpec("toolkit_requests", "counter", "Requests by outcome: " + ", ".join(OUTCOMES)),
    MetricSpec("toolkit_active_requests", "gauge", "Requests that hold a slot"),
    MetricSpec("toolkit_queued_requests", "gauge", "Requests that wait for a slot"),
    MetricSpec(
        "toolkit_ttft_seconds",
        "histogram",
        "From arrival to the first token, of finished requests",
        FIRST_TOKEN_BUCKETS,
    ),
    MetricSpec(
        "toolkit_tpot_seconds",
        "histogram",
        "Time per output token after the first, of finished requests, each counted once",
        NEXT_TOKEN_BUCKETS,
    ),
    MetricSpec(
        "toolkit_itl_seconds",
        "histogram",
        "Gaps between the chunks of finished streams, shared by the tokens of the later chunk; each"
        " token counted",
        NEXT_TOKEN_BUCKETS,
        is_batched=True,
    ),
    MetricSpec(
        "toolkit_icl_seconds",
        "histogram",
        "Gaps between the chunks of finished streams",
        NEXT_TOKEN_BUCKETS,
        is_batched=True,
    ),
    MetricSpec(
        "toolkit_queue_seconds",
        "histogram",
        "From arrival until the prompt was begun, of finished requests",
        FIRST_TOKEN_BUCKETS,
    ),
    MetricSpec(
        "toolkit_tokens_per_step",
        "histogram",
        "Output tokens of each verify step of finished requests: accepted ones and one more",
        TOKENS_PER_STEP_BUCKETS,
        is_batched=True,
    ),
)
