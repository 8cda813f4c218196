"""TensorRT-LLM's PyTorch runtime behind the tensors of its own `llmapi` template, in both directions.

Pure: the runtime's objects come in as they are and are read by attribute. Beside the template's outputs there are token ids,
counts and acceptance. The runtime's own acceptance counters are zeros up to 1.2 (TRT#17082), so acceptance comes from
`avg_decoded_tokens_per_iter`: one token is prefill's, and every further iteration is a verify step. How many tokens were
drafted is not to be had from it, and is left out rather than guessed (TRT#14724).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from toolkit.facts.triton_tensors import LLMAPI
from toolkit.triton.contract import INPUTS, OUTPUTS
from toolkit.triton.requests import Form, Request

__all__ = ["FORM", "OUR_INPUTS", "OUR_OUTPUTS", "Responses", "output_types", "sampling_arguments", "verify_steps"]

OUR_INPUTS = ("return_token_ids", "return_num_input_tokens", "return_num_output_tokens", "return_speculation_stats")
OUR_OUTPUTS = ("output_ids", "num_input_tokens", "num_output_tokens", "verify_steps")
FORM = Form(
    {
        **{fact.name: fact.dims == (1,) for fact in LLMAPI.inputs},
        **{spec.name: spec.dims == (1,) for spec in INPUTS if spec.name in OUR_INPUTS},
    },
    "sampling_param_",
    {"stop_words": "stop", "exclude_input": "exclude_input_from_output"},
)
PERFORMANCE = "sampling_param_return_perf_metrics"
TIMES = ("arrival_time", "first_scheduled_time", "first_token_time", "last_token_time")
BLOCKS = {
    "kv_cache_reused_block": "num_reused_blocks",
    "kv_cache_missed_block": "num_missed_blocks",
    "kv_cache_alloc_new_blocks": "num_new_allocated_blocks",
    "kv_cache_alloc_total_blocks": "num_total_allocated_blocks",
    "kv_cache_hit_rate": "kv_cache_hit_rate",
}


def sampling_arguments(request: Request, max_tokens: int) -> dict[str, Any]:
    """Keyword arguments of SamplingParams."""
    sampling = request.sampling
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
    if PERFORMANCE in request.returns:
        arguments["return_perf_metrics"] = True
    return arguments


class Responses:
    """The responses of one request, out of the runtime's growing outputs. Chunks hold what is new."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self._text = self._tokens = 0  # characters and tokens that were sent

    def of(self, output: Any, *, final: bool) -> dict[str, list[Any]] | None:
        """Name -> values of the response after this output of the runtime; None if there is nothing to send."""
        completion = output.outputs[0]
        text, ids = completion.text, list(completion.token_ids)
        if not final and not (self._request.streaming and len(text) > self._text):
            return None
        prompt = self._request.prompt if self._request.include_prompt else ""
        response: dict[str, list[Any]] = {"text_output": [prompt + text[self._text :]]}
        if self._wants("return_token_ids"):
            response["output_ids"] = ids[self._tokens :]
        if self._wants("return_num_output_tokens"):
            response["num_output_tokens"] = [len(ids)]
        self._text, self._tokens = len(text), len(ids)
        if final:
            response.update(self._ending(output, completion, len(ids)))
        return response

    def _wants(self, name: str) -> bool:
        return name in self._request.returns

    def _ending(self, output: Any, completion: Any, tokens: int) -> dict[str, list[Any]]:
        ending: dict[str, list[Any]] = {}
        if self._wants("return_finish_reason"):
            ending["finish_reason"] = [str(completion.finish_reason)]
        if self._wants("return_stop_reason"):
            ending["stop_reason"] = [str(completion.stop_reason)]
        if self._wants("return_cumulative_logprob"):
            ending["cumulative_logprob"] = [completion.cumulative_logprob]
        if self._wants("return_num_input_tokens"):
            ending["num_input_tokens"] = [len(output.prompt_token_ids)]
        steps = verify_steps(tokens, getattr(output, "avg_decoded_tokens_per_iter", None))
        if self._wants("return_speculation_stats") and steps is not None:
            ending["verify_steps"] = [steps]
        if self._wants(PERFORMANCE):
            ending.update(_figures(getattr(completion, "request_perf_metrics", None)))
            if steps is not None:
                ending["total_accepted_draft_tokens"] = [tokens - 1 - steps]
        return ending


def verify_steps(tokens: int, average: float | None) -> int | None:
    """Iterations behind the first token; None where the runtime does not say, or nothing was decoded."""
    if not average or tokens < 1:
        return None
    return max(0, round(tokens / average) - 1)


def _figures(metrics: Any) -> dict[str, list[Any]]:
    if metrics is None:
        return {}
    cache, timing = metrics.kv_cache_metrics, metrics.timing_metrics
    figures = {name: [getattr(cache, attribute)] for name, attribute in BLOCKS.items() if hasattr(cache, attribute)}
    for name in TIMES:
        if hasattr(timing, name):
            figures[f"{name}_ns"] = [_nanoseconds(getattr(timing, name))]
    return figures


def _nanoseconds(value: Any) -> int:
    """The runtime's times are timedelta; plain numbers are seconds."""
    seconds: float = value.total_seconds() if hasattr(value, "total_seconds") else value
    return round(seconds * 1e9)


def output_types() -> dict[str, str]:
    ours: Sequence[Any] = [spec for spec in OUTPUTS if spec.name in OUR_OUTPUTS]
    return {**{fact.name: fact.dtype for fact in LLMAPI.outputs}, **{spec.name: spec.dtype for spec in ours}}
