"""Turns the tensors of one Triton request into a request for the runtime, and the runtime's events
into the tensors of the responses.

Pure: values in, values out, so every refusal can be tested without a server. `contract` defines the
tensors. A request for something that this deployment cannot do is refused by name. Nothing is
silently dropped or clamped.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from toolkit.errors import RequestError
from toolkit.interfaces import MAX_PENALTY, RequestStats, Sampling, TokenEvent
from toolkit.triton.tensors.contract import INPUTS
from toolkit.triton.tensors.engine_sampling import read_sampling
from toolkit.triton.tensors.size_limits import check_prompt_bytes, check_words
from toolkit.words import RequestAcceptance

__all__ = [
    "LLMAPI",
    "Answer",
    "Limits",
    "Request",
    "RequestFormat",
    "check_is_only",
    "joined",
    "parse",
]


@dataclass(frozen=True, slots=True)
class RequestFormat:
    """How a layout names the tensors of a request. inputs: tensor name -> whether it holds a single
    value. prefix: what the names of sampling parameters begin with. names: option -> tensor name,
    for options whose tensor has another name. engine_sampling: temperature, top_k and top_p mean
    what they mean to TensorRT-LLM's engines, else what they mean to its `SamplingParams`.
    """

    inputs: Mapping[str, bool]
    prefix: str = ""
    names: Mapping[str, str] = field(default_factory=dict)
    engine_sampling: bool = False

    def tensor_name(self, option: str) -> str:
        """The name of the tensor for an option: temperature, max_tokens, streaming..."""
        name = self.names.get(option, option)
        return self.prefix + name if self.prefix + name in self.inputs else name


LLMAPI = RequestFormat(
    {spec.name: spec.dims == (1,) for spec in INPUTS},
    "sampling_param_",
    {"stop_words": "stop", "exclude_input": "exclude_input_from_output"},
)
ACCEPTANCE: tuple[RequestAcceptance, ...] = (
    "auto",
    "rejection",
    "coupled",
    "sample_match",
    "verify_only",
)
# Parameters that say nothing about the text. Triton itself adds most of them; `id` is the request's
# id, which HTTP's generate puts there. `Streaming` is sent by TensorRT-LLM's clients
# (tools/llmapi_client.py), and read by none of its models.
IGNORED_PARAMETERS = (
    "Streaming",
    "id",
    "sequence_id",
    "sequence_start",
    "sequence_end",
    "priority",
    "timeout",
    "binary_data_output",
)

MAX_LIKE = 64  # characters of a name that may be like an input's


@dataclass(frozen=True, slots=True)
class Limits:
    """What this deployment can serve. max_draft_len 0: there is no draft model. max_input_len: of
    a prompt, in tokens; None: unknown. max_timeout_ms: the deployment's own deadline; None: it has
    none.
    """

    decoupled: bool
    max_draft_len: int
    max_input_len: int | None = None
    max_timeout_ms: int | None = None


@dataclass(frozen=True, slots=True)
class Request:
    """One parsed request. None means not stated: the deployment's default applies. returns: the
    inputs return_... that request optional outputs.
    """

    prompt: str
    streaming: bool = False
    sampling: Sampling = field(default_factory=Sampling)
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    draft_len: int | None = None
    acceptance: RequestAcceptance | None = None
    timeout_ms: int | None = None
    cache_salt: str = ""
    include_prompt: bool = True
    returns: frozenset[str] = frozenset()
    cancels: bool = False  # the request does not run: it cancels the one with the same id

    @property
    def repeats_figures(self) -> bool:
        """Whether every chunk of a stream has the reasons and figures that were requested, as
        TensorRT-LLM's clients expect, or only the last one.

        The last alone for those who request return_speculation_stats, as our clients do: a dozen
        tensors more in every chunk would slow down the stream that they measure.
        """
        return (
            self.streaming and bool(self.returns) and "return_speculation_stats" not in self.returns
        )


def parse(
    tensors: Mapping[str, list[Any]],
    parameters: Mapping[str, object],
    limits: Limits,
    request_format: RequestFormat = LLMAPI,
) -> Request:
    """Check one request. Raises RequestError.

    tensors: name -> flat list of values (bytes for strings). parameters: those that Triton passes
    beside the tensors; over HTTP it makes every name that the model does not know a parameter.
    """
    for name in parameters:
        if name not in IGNORED_PARAMETERS and not name.startswith("triton_"):
            raise _unknown_input(name, request_format)
    values = {}
    for name, rows in tensors.items():
        is_single = request_format.inputs.get(name)
        if is_single is None:
            raise _unknown_input(name, request_format)
        if not is_single:
            continue
        if len(rows) != 1:
            raise RequestError(f"{name} takes one value, and {len(rows)} were sent")
        values[name] = rows[0]
    # The prompt is a single value in one format and a list of one in the other. _prompt reads both.
    values.pop("text_input", None)
    # Before anything else is read: clients send a `stop` with an empty prompt.
    if values.get("stop"):
        return Request(prompt="", cancels=True)
    streaming_name = request_format.tensor_name("streaming")
    streaming = bool(values.get(streaming_name, False))
    if streaming and not limits.decoupled:
        raise RequestError(
            "streaming needs a decoupled repository, and this one is not",
            hint=f"Send {streaming_name}=false, or package again with triton.decoupled: true.",
        )
    best_of = request_format.tensor_name("best_of")
    if values.get(best_of, 1) != 1:
        raise RequestError(
            f"{best_of} {values[best_of]} is not supported: one sequence per request"
        )
    return Request(
        prompt=_prompt(tensors, limits),
        streaming=streaming,
        sampling=_sampling(values, request_format),
        max_tokens=_positive(values, request_format.tensor_name("max_tokens")),
        stop=_stop_words(tensors, request_format.tensor_name("stop_words")),
        draft_len=_draft_len(values.get("num_draft_tokens"), limits),
        acceptance=_acceptance(values.get("acceptance")),
        timeout_ms=_timeout(values, limits),
        cache_salt=_cache_salt(values.get("cache_salt")),
        include_prompt=(
            not streaming and not values.get(request_format.tensor_name("exclude_input"), False)
        ),
        returns=frozenset([name for name, value in values.items() if "return_" in name and value]),
    )


def check_is_only(count: int, request_id: str) -> None:
    """Raises RequestError if a `stop` names `count` running requests, more than one. Clients choose
    their ids, so the others may be somebody else's.
    """
    if count > 1:
        raise RequestError(
            f"{count} running requests have the id {request_id[:60]!r}, so none is cancelled",
            hint="Give requests ids that nobody else chooses, such as a UUID.",
        )


def _unknown_input(name: str, request_format: RequestFormat) -> RequestError:
    if name == "num_draft_tokens":
        return RequestError(
            "num_draft_tokens: this engine fixes the draft length when it starts, for all requests",
            hint="Leave it out; for plain decoding, serve with speculation.kind: none.",
        )
    # Without the prefix, which makes any two names that have it alike.
    prefix = request_format.prefix
    options = [known.removeprefix(prefix) for known in request_format.inputs]
    meant = request_format.names.get(name, name).removeprefix(prefix)
    is_short = len(meant) <= MAX_LIKE  # to compare takes time in proportion
    near = difflib.get_close_matches(meant, options, n=1) if is_short else []
    known = ", ".join(request_format.inputs)
    return RequestError(
        f"unknown input {name[:MAX_LIKE]!r}",
        hint=f"Did you mean {request_format.tensor_name(near[0])!r}?"
        if near
        else f"Known: {known}.",
    )


def _text(value: bytes | str, what: str) -> str:
    try:
        return value if isinstance(value, str) else bytes(value).decode("utf-8")
    except UnicodeDecodeError as error:
        raise RequestError(
            f"{what} is not valid UTF-8: {error.reason} at byte {error.start}"
        ) from error


def _prompt(tensors: Mapping[str, list[Any]], limits: Limits) -> str:
    prompts = tensors.get("text_input")
    if prompts is None:
        raise RequestError("text_input is missing")
    if len(prompts) != 1:
        raise RequestError(
            f"text_input takes one prompt, and {len(prompts)} were sent",
            hint="Send one request per prompt.",
        )
    check_prompt_bytes(prompts[0], limits.max_input_len, "text_input")
    prompt = _text(prompts[0], "text_input")
    if not prompt:
        raise RequestError("text_input is empty", hint="Send at least one character.")
    return prompt


def _stop_words(tensors: Mapping[str, list[Any]], name: str) -> tuple[str, ...]:
    check_words(tensors.get(name, []), name)
    words = tuple(_text(value, name) for value in tensors.get(name, []))
    if "" in words:
        raise RequestError(
            f"{name} holds an empty stop word, which would end every text before it begins"
        )
    return words


def _sampling(values: Mapping[str, Any], request_format: RequestFormat) -> Sampling:
    def number(option: str, default: float, low: float, high: float = math.inf) -> float:
        name = request_format.tensor_name(option)
        value = float(values.get(name, default))
        if not (math.isfinite(value) and low <= value <= high):
            limits = (("at least", low), ("at most", high))
            bounds = " and ".join(
                f"{word} {limit}" for word, limit in limits if math.isfinite(limit)
            )
            raise RequestError(f"{name} is {value}; it has to be a finite number of {bounds}")
        return value

    top_k_name, top_p_name, seed_name = map(request_format.tensor_name, ("top_k", "top_p", "seed"))
    top_k = int(values.get(top_k_name, 0))
    if top_k < 0:
        raise RequestError(f"{top_k_name} is {top_k}; it has to be 0 (off) or more")
    is_filtered = top_k_name in values or top_p_name in values
    temperature = number("temperature", 1.0 if is_filtered else 0.0, 0.0)
    if request_format.engine_sampling:
        temperature, top_p = read_sampling(temperature, top_k, number("top_p", 0.0, -math.inf, 1.0))
    else:
        top_p = number("top_p", 1.0, 0.0, 1.0)
        if top_p == 0.0:  # TRT sampling_params.py, params_imply_greedy_decoding
            temperature, top_p = 0.0, 1.0
    return Sampling(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        frequency_penalty=number("frequency_penalty", 0.0, -MAX_PENALTY, MAX_PENALTY),
        presence_penalty=number("presence_penalty", 0.0, -MAX_PENALTY, MAX_PENALTY),
        seed=int(values[seed_name]) if seed_name in values else None,
    )


def _positive(values: Mapping[str, Any], name: str) -> int | None:
    if name not in values:
        return None
    if int(values[name]) < 1:
        raise RequestError(f"{name} is {values[name]}; it has to be at least 1")
    return int(values[name])


def _timeout(values: Mapping[str, Any], limits: Limits) -> int | None:
    stated, longest = _positive(values, "timeout_ms"), limits.max_timeout_ms
    if stated is not None and longest is not None and stated > longest:
        raise RequestError(
            f"timeout_ms is {stated}; this deployment ends every request after {longest} ms"
            " (triton.request_timeout_s)",
            hint="Send a shorter one, or leave it out.",
        )
    return stated


def _cache_salt(value: Any) -> str:
    if value is None:
        return ""
    check_words([value], "cache_salt")
    return _text(value, "cache_salt")


def _draft_len(value: Any, limits: Limits) -> int | None:
    if value is None:
        return None
    if limits.max_draft_len == 0 and value > 0:
        raise RequestError(
            f"num_draft_tokens is {value}, and this deployment has no draft model",
            hint="Send 0, or leave it out.",
        )
    if not 0 <= value <= limits.max_draft_len:
        raise RequestError(
            f"num_draft_tokens is {value}; this deployment drafts 0 to {limits.max_draft_len}"
            " tokens"
        )
    return int(value)


def _acceptance(value: Any) -> RequestAcceptance | None:
    if value is None:
        return None
    rule = _text(value, "acceptance")
    if rule not in ACCEPTANCE:
        raise RequestError(f"acceptance is {rule[:60]!r}; known: {', '.join(ACCEPTANCE)}")
    return None if rule == "auto" else cast(RequestAcceptance, rule)


def joined(events: Sequence[TokenEvent]) -> list[TokenEvent]:
    """The events of one request in their order, as one event with the reasons and figures of the
    last. An event that ends the request without text stays by itself: its response is an error, and
    has no room for the text before it.
    """
    *before, last = events
    if before and last.finish_reason not in (None, "stop", "length"):
        return [*joined(before), last]
    if not before:
        return [last]
    return [
        dataclasses.replace(
            last,
            token_ids=tuple(token for event in events for token in event.token_ids),
            text="".join(event.text for event in events),
        )
    ]


class Answer:
    """Turns the events of one request into the tensors of its responses. One thread at a time
    answers a request; `is_due`, which only reads, may be called from elsewhere.

    interval_ns: the least time between two chunks of a stream, except before the last. Tokens in
    between are sent with the next chunk, because a response takes time that is long beside a small
    model's step.
    """

    def __init__(self, request: Request, interval_ns: int = 0) -> None:
        self._request = request
        self._interval_ns = interval_ns
        self._due_ns = 0  # when the next chunk may be sent; the first may be sent at once
        self._tokens = 0  # output tokens of the request so far
        self._sent_ns: int | None = None
        # Between the chunks that were sent: ns, and the tokens of the later chunk.
        self.gaps: list[tuple[int, int]] = []
        # Text and ids that have not been sent.
        self._text: list[str] = [request.prompt] if request.include_prompt else []
        self._ids: list[int] = []

    def is_due(self, now_ns: int) -> bool:
        """Whether a response may be sent before the last one."""
        return self._request.streaming and now_ns >= self._due_ns

    def add(self, event: TokenEvent, now_ns: int) -> dict[str, list[Any]] | None:
        """Name -> values of the response that is due after this event; None if none is due."""
        self._tokens += len(event.token_ids)
        self._text.append(event.text)
        self._ids.extend(event.token_ids)
        if event.finish_reason is None and not self.is_due(now_ns):
            return None
        response: dict[str, list[Any]] = {"text_output": ["".join(self._text)]}
        if self._wants("return_token_ids"):
            response["output_ids"] = self._ids
        if self._wants("return_num_output_tokens"):
            response["num_output_tokens"] = [self._tokens]
        if event.finish_reason is not None or self._request.repeats_figures:
            response.update(self._figures(event))
        # Told unasked: nobody would ask for it.
        if event.finish_reason and event.stats and event.stats.draft_failure is not None:
            response["draft_failure"] = [event.stats.draft_failure]
        if self._sent_ns is not None:
            self.gaps.append((now_ns - self._sent_ns, len(self._ids)))
        self._text, self._ids = [], []
        self._due_ns = now_ns + self._interval_ns
        self._sent_ns = now_ns
        return response

    def _wants(self, name: str) -> bool:
        return name in self._request.returns

    def _figures(self, event: TokenEvent) -> dict[str, list[Any]]:
        """Reasons and figures as of this event. A reason is the text None until there is one."""
        figures: dict[str, list[Any]] = {}
        if self._wants("return_finish_reason"):
            figures["finish_reason"] = [str(event.finish_reason)]
        if self._wants("return_stop_reason"):
            figures["stop_reason"] = [str(event.stop_reason)]
        if event.stats is None:
            return figures
        stats = event.stats
        if self._wants("return_cumulative_logprob"):
            if stats.cumulative_logprob is None:
                raise RequestError(
                    "return_cumulative_logprob was requested, but the runtime kept no"
                    " log-probabilities"
                )
            figures["cumulative_logprob"] = [stats.cumulative_logprob]
        if self._wants("return_num_input_tokens"):
            figures["num_input_tokens"] = [stats.prompt_tokens]
        if self._wants("sampling_param_return_perf_metrics"):
            figures.update(_performance(stats))
        if self._wants("return_speculation_stats"):
            figures.update(_speculation(stats))
        return figures


def _performance(stats: RequestStats) -> dict[str, list[Any]]:
    reused = stats.reused_prompt_tokens or 0
    computed = stats.prompt_tokens - reused
    figures: dict[str, Any] = {
        "kv_cache_reused_block": reused,
        "kv_cache_missed_block": computed,
        "kv_cache_alloc_new_blocks": computed,
        "kv_cache_alloc_total_blocks": stats.prompt_tokens,
        "kv_cache_hit_rate": reused / stats.prompt_tokens,
        "arrival_time_ns": stats.arrival_ns,
        "first_scheduled_time_ns": stats.first_scheduled_ns,
        "first_token_time_ns": stats.first_token_ns,
        "last_token_time_ns": stats.last_token_ns,
        "acceptance_rate": stats.acceptance_rate or 0.0,
        "total_accepted_draft_tokens": stats.accepted,
        "total_draft_tokens": stats.drafted,
    }
    return {name: [value] for name, value in figures.items() if value is not None}


def _speculation(stats: RequestStats) -> dict[str, list[Any]]:
    return {
        "verify_steps": [stats.verify_steps],
        "drafted_by_position": list(stats.drafted_by_position),
        "accepted_by_position": list(stats.accepted_by_position),
        "draft_len_reasons": list(stats.steps_by_reason),
        "draft_len_reason_steps": list(stats.steps_by_reason.values()),
        "draft_len_changes": [stats.draft_len_changes],
        "draft_probes": [stats.draft_probes],
        "draft_time_ns": [stats.draft_ns],
        "verify_time_ns": [stats.verify_ns],
        "host_time_ns": [stats.host_ns],
    }
