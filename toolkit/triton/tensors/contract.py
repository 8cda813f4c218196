"""What the served model and its callers agree on: tensors, metrics, and what a chunk of text holds.
Said here only.

Names, types and shapes of the tensors marked TensorRT-LLM are those of its `llmapi` template
(1.2.1), so its clients work here; the others are ours, all optional, and named with TensorRT-LLM's
words where it has one elsewhere.

What a response holds
- streaming: a chunk per step, but none within triton.stream_interval_ms of the one before: its
  tokens come with the next. Every chunk holds only what is new (delta) and never the prompt.
  `output_ids` too holds the chunk's own tokens, and `num_output_tokens` counts all tokens so far,
  so that the difference of two chunks is what the later one carries. TensorRT-LLM's own model
  repeats the whole text in every chunk; config.pbtxt carries STREAM_TEXT so that a client can tell.
- not streaming: exactly one response with the whole text. The prompt precedes it unless
  sampling_param_exclude_input_from_output is true (false when absent, as in TensorRT-LLM).
- `output_ids` never holds the prompt. Statistics come with the last response only. A value that
  does not exist (the acceptance rate of a request that drafted nothing) is left out rather than
  sent as 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from toolkit.words import RequestOutcome

__all__ = [
    "BLS_INPUTS",
    "BLS_MODEL",
    "BLS_OUTPUTS",
    "DRAFT_MODEL",
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
    "MetricSpec",
    "TensorSpec",
]

# Of the packaged files and what they use of the toolkit; written into model.yaml, so that a
# repository packaged by another version is told apart when it is loaded. Raise it with every change
# of either: it is the package stage's version, too.
PACKAGE_VERSION = 5

MODEL = "tensorrt_llm"  # the model that clients call, as in TensorRT-LLM's template
# The models of the other layout, `bls`: clients call the first, which calls the rest; the target is
# MODEL.
BLS_MODEL = "tensorrt_llm_bls"
DRAFT_MODEL = "tensorrt_llm_draft"
PREPROCESSING = "preprocessing"
POSTPROCESSING = "postprocessing"

STREAM_TEXT_PARAMETER = "stream_text"  # of config.pbtxt
# delta | cumulative; a config without the parameter is TensorRT-LLM's own and cumulative
STREAM_TEXT = "delta"


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor of the model. dims as in config.pbtxt (-1: any length); ours: not in
    TensorRT-LLM's template.
    """

    name: str
    dtype: str  # TYPE_STRING, TYPE_INT32, ... as in config.pbtxt
    dims: tuple[int, ...]
    meaning: str
    optional: bool = True
    ours: bool = False


MetricKind: TypeAlias = Literal["counter", "gauge"]


@dataclass(frozen=True, slots=True)
class MetricSpec:
    name: str
    kind: MetricKind
    meaning: str


ONE, ANY = (1,), (-1,)

INPUTS: tuple[TensorSpec, ...] = (
    TensorSpec("text_input", "TYPE_STRING", ANY, "the prompt, exactly one, UTF-8", optional=False),
    TensorSpec(
        "streaming",
        "TYPE_BOOL",
        ONE,
        "one response per step instead of one in all; needs a decoupled repository",
    ),
    TensorSpec(
        "sampling_param_best_of", "TYPE_INT32", ONE, "1 is the only value: one sequence per request"
    ),
    TensorSpec(
        "sampling_param_temperature",
        "TYPE_FP32",
        ONE,
        "0 is greedy; absent: 1 with top_k or top_p, else greedy",
    ),
    TensorSpec("sampling_param_top_k", "TYPE_INT32", ONE, "keep the k most likely tokens; 0: all"),
    TensorSpec(
        "sampling_param_top_p",
        "TYPE_FP32",
        ONE,
        "keep the most likely tokens up to this mass, in (0, 1]",
    ),
    TensorSpec(
        "sampling_param_frequency_penalty",
        "TYPE_FP32",
        ONE,
        "taken off a logit per earlier output of the token",
    ),
    TensorSpec(
        "sampling_param_presence_penalty",
        "TYPE_FP32",
        ONE,
        "taken off the logit of every token output before",
    ),
    TensorSpec(
        "sampling_param_max_tokens",
        "TYPE_INT32",
        ONE,
        "most output tokens; absent: the repository's default",
    ),
    TensorSpec(
        "sampling_param_stop", "TYPE_STRING", ANY, "stop words; the text ends before the first one"
    ),
    TensorSpec(
        "sampling_param_seed",
        "TYPE_UINT64",
        ONE,
        "makes sampling repeatable, whatever the load or draft length",
    ),
    TensorSpec(
        "sampling_param_exclude_input_from_output",
        "TYPE_BOOL",
        ONE,
        "leave the prompt out of text_output",
    ),
    TensorSpec(
        "sampling_param_return_perf_metrics",
        "TYPE_BOOL",
        ONE,
        "return cache, time and acceptance figures",
    ),
    TensorSpec(
        "return_finish_reason", "TYPE_BOOL", ONE, "return finish_reason with the last response"
    ),
    TensorSpec("return_stop_reason", "TYPE_BOOL", ONE, "return stop_reason with the last response"),
    TensorSpec(
        "return_cumulative_logprob",
        "TYPE_BOOL",
        ONE,
        "return cumulative_logprob with the last response",
    ),
    TensorSpec("stop", "TYPE_BOOL", ONE, "cancel the running request that has this request's id"),
    TensorSpec(
        "num_draft_tokens",
        "TYPE_INT32",
        ONE,
        "draft length of this request; 0: plain decoding",
        ours=True,
    ),
    TensorSpec(
        "acceptance",
        "TYPE_STRING",
        ONE,
        "auto | rejection | coupled | sample_match, at temperature > 0; verify_only drafts,"
        " verifies and keeps nothing",
        ours=True,
    ),
    TensorSpec(
        "timeout_ms",
        "TYPE_INT32",
        ONE,
        "deadline, counted from arrival; absent: the repository's default",
        ours=True,
    ),
    TensorSpec("return_token_ids", "TYPE_BOOL", ONE, "return output_ids", ours=True),
    TensorSpec(
        "return_num_input_tokens",
        "TYPE_BOOL",
        ONE,
        "return num_input_tokens with the last response",
        ours=True,
    ),
    TensorSpec("return_num_output_tokens", "TYPE_BOOL", ONE, "return num_output_tokens", ours=True),
    TensorSpec(
        "return_speculation_stats",
        "TYPE_BOOL",
        ONE,
        "return verify_steps and what follows it",
        ours=True,
    ),
)

# A KV-cache block is one slot here: a contiguous cache for one sequence, target's and draft's
# together. A request therefore takes one block and reuses none, since nothing is kept from one
# request to the next.
OUTPUTS: tuple[TensorSpec, ...] = (
    TensorSpec("text_output", "TYPE_STRING", ANY, "the text, or what is new of it"),
    TensorSpec("finish_reason", "TYPE_STRING", ANY, "stop (end token or stop word) | length"),
    TensorSpec(
        "stop_reason",
        "TYPE_STRING",
        ANY,
        "the stop word that ended it; None as text where none did",
    ),
    TensorSpec(
        "cumulative_logprob", "TYPE_FP32", ANY, "sum of the output tokens' log-probabilities"
    ),
    TensorSpec(
        "kv_cache_reused_block", "TYPE_INT32", ANY, "0: slots are not shared between requests"
    ),
    TensorSpec("kv_cache_missed_block", "TYPE_INT32", ANY, "1: the slot had to be filled"),
    TensorSpec("kv_cache_alloc_new_blocks", "TYPE_INT32", ANY, "1: the request's slot"),
    TensorSpec("kv_cache_alloc_total_blocks", "TYPE_INT32", ANY, "1: the request's slot"),
    TensorSpec("kv_cache_hit_rate", "TYPE_FP32", ANY, "0.0: reused / (reused + missed)"),
    TensorSpec("arrival_time_ns", "TYPE_INT64", ANY, "monotonic clock of the server's machine"),
    TensorSpec("first_scheduled_time_ns", "TYPE_INT64", ANY, "when it left the queue"),
    TensorSpec("first_token_time_ns", "TYPE_INT64", ANY, "when its first token was known"),
    TensorSpec("last_token_time_ns", "TYPE_INT64", ANY, "when its last token was known"),
    TensorSpec(
        "acceptance_rate",
        "TYPE_FP32",
        ANY,
        "accepted / drafted tokens; left out when nothing was drafted",
    ),
    TensorSpec("total_accepted_draft_tokens", "TYPE_INT32", ANY, "accepted draft tokens"),
    TensorSpec("total_draft_tokens", "TYPE_INT32", ANY, "drafted tokens"),
    TensorSpec(
        "output_ids", "TYPE_INT32", ANY, "output tokens, of this chunk when streaming", ours=True
    ),
    TensorSpec("num_input_tokens", "TYPE_INT32", ONE, "tokens of the prompt", ours=True),
    TensorSpec("num_output_tokens", "TYPE_INT32", ONE, "output tokens so far", ours=True),
    TensorSpec("verify_steps", "TYPE_INT32", ONE, "target forwards after prefill", ours=True),
    TensorSpec(
        "drafted_by_position",
        "TYPE_INT32",
        ANY,
        "verify steps that drafted a token at position i",
        ours=True,
    ),
    TensorSpec(
        "accepted_by_position",
        "TYPE_INT32",
        ANY,
        "verify steps that kept the token at position i",
        ours=True,
    ),
    TensorSpec(
        "draft_time_ns",
        "TYPE_INT64",
        ONE,
        "in draft forwards, of the steps the request took part in",
        ours=True,
    ),
    TensorSpec("verify_time_ns", "TYPE_INT64", ONE, "in target forwards, likewise", ours=True),
    TensorSpec("host_time_ns", "TYPE_INT64", ONE, "the rest of those steps", ours=True),
)

# Log-probabilities token by token, with the last response. TensorRT-LLM has the first two in its
# BLS model and not in `llmapi`.
LOG_PROB_INPUTS: tuple[TensorSpec, ...] = (
    TensorSpec(
        "return_log_probs",
        "TYPE_BOOL",
        ONE,
        "return output_log_probs, and what comes with it",
        ours=True,
    ),
)
NEXT_BEST: tuple[TensorSpec, ...] = (
    TensorSpec(
        "next_best_ids",
        "TYPE_INT32",
        ANY,
        "at each output token the likeliest of the others",
        ours=True,
    ),
    TensorSpec("next_best_log_probs", "TYPE_FP32", ANY, "its log-probability", ours=True),
)
LOG_PROB_OUTPUTS: tuple[TensorSpec, ...] = (
    TensorSpec(
        "output_log_probs",
        "TYPE_FP32",
        ANY,
        "of the output tokens, under the target's own logits",
        ours=True,
    ),
    *NEXT_BEST,
)

# What our BLS model has beside the tensors of TensorRT-LLM's (`toolkit.facts.triton_tensors`); the
# same words as above.
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
            "draft_time_ns",
            "verify_time_ns",
            "host_time_ns",
        )
    ),
    *NEXT_BEST,
    TensorSpec(
        "draft_failure",
        "TYPE_STRING",
        ONE,
        "what the draft failed with, where the rest was decoded plainly",
        ours=True,
    ),
)

OUTCOMES: tuple[RequestOutcome, ...] = get_args(RequestOutcome)

METRICS: tuple[MetricSpec, ...] = (
    MetricSpec("toolkit_draft_tokens", "counter", "Draft tokens proposed by finished requests"),
    MetricSpec(
        "toolkit_accepted_draft_tokens", "counter", "Draft tokens accepted by finished requests"
    ),
    MetricSpec(
        "toolkit_verify_steps", "counter", "Target forwards after prefill of finished requests"
    ),
    MetricSpec("toolkit_output_tokens", "counter", "Output tokens of finished requests"),
    MetricSpec("toolkit_requests", "counter", "Requests by outcome: " + ", ".join(OUTCOMES)),
    MetricSpec("toolkit_active_requests", "gauge", "Requests that hold a slot"),
    MetricSpec("toolkit_queued_requests", "gauge", "Requests that wait for a slot"),
)
