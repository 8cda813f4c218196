"""TensorRT-LLM's PyTorch runtime with the tensors of its own `llmapi` template: requests in,
responses out.

Pure: the runtime's objects are read by attribute. In addition to the template's outputs there are
token ids, counts and acceptance. The runtime's own acceptance counters are zeros up to 1.2
(TRT#17082), so accepted tokens come from `avg_decoded_tokens_per_iter`: the first token comes from
prefill, and every later iteration is a verify step. The number of drafted tokens is the runtime's
own where it is above zero; elsewhere it is left out, not guessed (TRT#14724).

Log-probabilities are the target's own, before temperature and filters, also for accepted drafts.
The runtime returns the likeliest tokens at every position; a greedy text chose the first of them.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from toolkit.errors import RequestError
from toolkit.facts.triton_tensors import LLMAPI
from toolkit.interfaces import RequestStats, Sampling
from toolkit.triton.tensors.contract import (
    INPUTS,
    LOG_PROB_INPUTS,
    LOG_PROB_OUTPUTS,
    OUTPUTS,
    TensorSpec,
)
from toolkit.triton.tensors.requests import Request, RequestFormat

__all__ = [
    "OUR_INPUTS",
    "OUR_OUTPUTS",
    "REQUEST_FORMAT",
    "Responses",
    "output_types",
    "sampling_arguments",
    "token_log_probs",
    "verify_steps",
]

SHARED_INPUTS = (
    "timeout_ms",
    "return_token_ids",
    "return_num_input_tokens",
    "return_num_output_tokens",
    "return_speculation_stats",
)
SHARED_OUTPUTS = ("output_ids", "num_input_tokens", "num_output_tokens", "verify_steps")
OUR_INPUTS: Sequence[TensorSpec] = (
    *(spec for spec in INPUTS if spec.name in SHARED_INPUTS),
    *LOG_PROB_INPUTS,
)
OUR_OUTPUTS: Sequence[TensorSpec] = (
    *(spec for spec in OUTPUTS if spec.name in SHARED_OUTPUTS),
    *LOG_PROB_OUTPUTS,
)
REQUEST_FORMAT = RequestFormat(
    {
        **{fact.name: fact.dims == (1,) for fact in LLMAPI.inputs},
        **{spec.name: spec.dims == (1,) for spec in OUR_INPUTS},
    },
    "sampling_param_",
    {"stop_words": "stop", "exclude_input": "exclude_input_from_output"},
)
LOG_PROBS_REQUEST = "return_log_probs"
PERFORMANCE_REQUEST = "sampling_param_return_perf_metrics"
TIME_NAMES = ("arrival_time", "first_scheduled_time", "first_token_time", "last_token_time")
BLOCK_NAMES = {
    "kv_cache_reused_block": "num_reused_blocks",
    "kv_cache_missed_block": "num_missed_blocks",
    "kv_cache_alloc_new_blocks": "num_new_allocated_blocks",
    "kv_cache_alloc_total_blocks": "num_total_allocated_blocks",
    "kv_cache_hit_rate": "kv_cache_hit_rate",
}


def sampling_arguments(
    request: Request, max_tokens: int, log_probs: int = 0, ignored: Collection[str] = ()
) -> dict[str, Any]:
    """Keyword arguments of SamplingParams. log_probs: how many log-probabilities per token this
    version returns. ignored: the settings that it takes and ignores.

    Raises RequestError if the request wants log-probabilities and there are none, or a setting that
    would be ignored.
    """
    sampling = request.sampling
    for name in ignored:
        if getattr(sampling, name) != getattr(Sampling(), name):
            raise RequestError(
                f"{REQUEST_FORMAT.prefix}{name}: this version of TensorRT-LLM ignores it",
                hint="Leave it out.",
            )
    arguments: dict[str, Any] = {"max_tokens": request.max_tokens or max_tokens}
    if sampling.temperature == 0.0:
        arguments["top_k"] = 1  # greedy in every version
    else:
        arguments["temperature"] = sampling.temperature
        arguments["top_p"] = sampling.top_p
        if sampling.top_k:
            arguments["top_k"] = sampling.top_k
    if sampling.seed is not None:
        arguments["seed"] = sampling.seed
    for name in ("frequency_penalty", "presence_penalty"):
        if getattr(sampling, name):
            arguments[name] = getattr(sampling, name)
    if request.stop:
        arguments["stop"] = list(request.stop)
    if PERFORMANCE_REQUEST in request.returns:
        arguments["return_perf_metrics"] = True
    if LOG_PROBS_REQUEST in request.returns:
        if log_probs == 0:
            raise RequestError(
                f"{LOG_PROBS_REQUEST}: this version returns no log-probabilities under speculation"
            )
        arguments["logprobs"] = log_probs
    return arguments


class Responses:
    """Makes the responses of one request from the runtime's outputs, which grow. A chunk holds only
    what is new.

    arrival_ns: when the request arrived. interval_ns: the least time between two chunks of a
    stream, except before the last. Tokens in between come with the next chunk.
    """

    def __init__(self, request: Request, arrival_ns: int, interval_ns: int) -> None:
        self._request = request
        self._arrival_ns = arrival_ns
        self._interval_ns = interval_ns
        self._sent_chars = self._sent_tokens = self._tokens = 0
        self._sent_ns: int | None = None  # when the last chunk was sent
        self._first_token_ns: int | None = None
        self._last_token_ns: int | None = None
        # Between the chunks that were sent: ns, and the tokens of the later chunk.
        self.gaps: list[tuple[int, int]] = []

    def of(self, output: Any, now_ns: int, *, final: bool) -> dict[str, list[Any]] | None:
        """Name -> values of the response after this output; None if there is nothing to send."""
        completion = output.outputs[0]
        text, ids = completion.text, list(completion.token_ids)
        self._see(len(ids), now_ns)
        if not final and not (len(text) > self._sent_chars and self._is_due(now_ns)):
            return None
        prompt = self._request.prompt if self._request.include_prompt else ""
        response: dict[str, list[Any]] = {"text_output": [prompt + text[self._sent_chars :]]}
        if self._wants("return_token_ids"):
            response["output_ids"] = ids[self._sent_tokens :]
        if self._wants("return_num_output_tokens"):
            response["num_output_tokens"] = [len(ids)]
        if self._sent_ns is not None:
            self.gaps.append((now_ns - self._sent_ns, len(ids) - self._sent_tokens))
        self._sent_chars, self._sent_tokens = len(text), len(ids)
        self._sent_ns = now_ns
        if final:
            response.update(self._ending(output, completion, len(ids)))
        elif self._request.repeats_figures:
            response.update(self._reasons(completion))
        return response

    def stats(self, output: Any | None) -> RequestStats:
        """What metrics count of this request. output: the runtime's last one, None if there was
        none. A request that is not streamed has no time of its first token.
        """
        prompt_tokens = steps = drafted = 0
        if output is not None:
            prompt_tokens = len(output.prompt_token_ids)
            steps = _steps_of(output, self._tokens) or 0
            drafted = _drafted(output.outputs[0]) or 0
        return RequestStats(
            prompt_tokens=prompt_tokens,
            output_tokens=self._tokens,
            verify_steps=steps,
            drafted=drafted,
            accepted=self._tokens - 1 - steps if steps else 0,
            drafted_by_position=(),
            accepted_by_position=(),
            arrival_ns=self._arrival_ns,
            first_scheduled_ns=None,
            first_token_ns=self._first_token_ns if self._request.streaming else None,
            last_token_ns=self._last_token_ns,
            draft_ns=0,
            verify_ns=0,
            host_ns=0,
        )

    def _see(self, tokens: int, now_ns: int) -> None:
        if tokens > self._tokens:
            self._first_token_ns = self._first_token_ns or now_ns
            self._tokens, self._last_token_ns = tokens, now_ns

    def _is_due(self, now_ns: int) -> bool:
        return self._sent_ns is None or now_ns >= self._sent_ns + self._interval_ns

    def _wants(self, name: str) -> bool:
        return name in self._request.returns

    def _reasons(self, completion: Any) -> dict[str, list[Any]]:
        """Why the text ended, as far as it was requested; the text None while it goes on."""
        reasons: dict[str, list[Any]] = {}
        if self._wants("return_finish_reason"):
            reasons["finish_reason"] = [str(completion.finish_reason)]
        if self._wants("return_stop_reason"):
            reasons["stop_reason"] = [str(completion.stop_reason)]
        return reasons

    def _ending(self, output: Any, completion: Any, tokens: int) -> dict[str, list[Any]]:
        ending = self._reasons(completion)
        if self._wants("return_cumulative_logprob"):
            ending["cumulative_logprob"] = [completion.cumulative_logprob]
        if self._wants(LOG_PROBS_REQUEST):
            ending.update(
                token_log_probs(completion.token_ids, getattr(completion, "logprobs", None) or ())
            )
        if self._wants("return_num_input_tokens"):
            ending["num_input_tokens"] = [len(output.prompt_token_ids)]
        steps = _steps_of(output, tokens)
        if self._wants("return_speculation_stats") and steps is not None:
            ending["verify_steps"] = [steps]
        if self._wants(PERFORMANCE_REQUEST):
            ending.update(_figures(getattr(completion, "request_perf_metrics", None)))
            ending.update(_acceptance(steps, tokens, _drafted(completion)))
        return ending


def _steps_of(output: Any, tokens: int) -> int | None:
    return verify_steps(tokens, getattr(output, "avg_decoded_tokens_per_iter", None))


def _drafted(completion: Any) -> int | None:
    """The drafted tokens of a request that was asked for its performance; None if the runtime does
    not tell: a version that does not count them says 0.
    """
    metrics = getattr(completion, "request_perf_metrics", None)
    counted = getattr(metrics, "speculative_decoding", None)
    return getattr(counted, "total_draft_tokens", 0) or None


def _acceptance(steps: int | None, tokens: int, drafted: int | None) -> dict[str, list[Any]]:
    figures: dict[str, list[Any]] = {}
    if steps is not None:
        figures["total_accepted_draft_tokens"] = [tokens - 1 - steps]
    if drafted is not None:
        figures["total_draft_tokens"] = [drafted]
    if steps is not None and drafted is not None:
        figures["acceptance_rate"] = [(tokens - 1 - steps) / drafted]
    return figures


def verify_steps(tokens: int, average: float | None) -> int | None:
    """Iterations after the first token; None if the runtime does not report them, or if nothing was
    decoded.
    """
    if not average or tokens < 1:
        return None
    return max(0, round(tokens / average) - 1)


def token_log_probs(
    ids: Sequence[int], likeliest: Sequence[Mapping[int, Any]]
) -> dict[str, list[Any]]:
    """The tensors of log-probabilities. likeliest: at each position, token -> object with a
    `logprob`.

    Empty unless there is a mapping for every token. A token that is not in its mapping gets NaN,
    since its log-probability is not known.
    """
    if len(likeliest) != len(ids):
        return {}
    tensors: dict[str, list[Any]] = {
        "output_log_probs": [
            candidates[token].logprob if token in candidates else math.nan
            for token, candidates in zip(ids, likeliest, strict=True)
        ]
    }
    next_best = []
    for token, candidates in zip(ids, likeliest, strict=True):
        others = [(entry.logprob, other) for other, entry in candidates.items() if other != token]
        if others:
            next_best.append(max(others))
    if len(next_best) == len(ids):
        tensors["next_best_ids"] = [token for _, token in next_best]
        tensors["next_best_log_probs"] = [value for value, _ in next_best]
    return tensors


def _figures(metrics: Any) -> dict[str, list[Any]]:
    if metrics is None:
        return {}
    cache, timing = metrics.kv_cache_metrics, metrics.timing_metrics
    figures = {
        name: [getattr(cache, attribute)]
        for name, attribute in BLOCK_NAMES.items()
        if hasattr(cache, attribute)
    }
    for name in TIME_NAMES:
        if hasattr(timing, name):
            figures[f"{name}_ns"] = [_nanoseconds(getattr(timing, name))]
    return figures


def _nanoseconds(value: Any) -> int:
    """The runtime's times are timedeltas or seconds."""
    seconds: float = value.total_seconds() if hasattr(value, "total_seconds") else value
    return round(seconds * 1e9)


def output_types() -> dict[str, str]:
    """Output tensor -> its type as in config.pbtxt."""
    return {
        **{fact.name: fact.dtype for fact in LLMAPI.outputs},
        **{spec.name: spec.dtype for spec in OUR_OUTPUTS},
    }
