"""From the tensors of one Triton request to what the runtime is asked for, and from its events to
the tensors of the responses.

Pure: values in, values out, so every refusal can be tested without a server. What the tensors mean
is said in `contract`. A request that asks for something this deployment cannot do is refused by
name; nothing is dropped or clamped in silence.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from toolkit.errors import RequestError
from toolkit.interfaces import MAX_PENALTY, RequestStats, Sampling, TokenEvent
from toolkit.triton.tensors.contract import INPUTS
from toolkit.words import RequestAcceptance

__all__ = ["LLMAPI", "Answer", "Form", "Limits", "Request", "parse"]


@dataclass(frozen=True, slots=True)
class Form:
    """How a layout spells a request. inputs: tensor -> whether it holds a single value; prefix: of
    the sampling parameters; names: other words for what the llmapi form calls so.
    """

    inputs: Mapping[str, bool]
    prefix: str = ""
    names: Mapping[str, str] = field(default_factory=dict)

    def of(self, word: str) -> str:
        """The tensor that carries this: temperature, max_tokens, streaming..."""
        name = self.names.get(word, word)
        return self.prefix + name if self.prefix + name in self.inputs else name


LLMAPI = Form(
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
# What Triton itself puts among a request's parameters; `id` is the request's id as HTTP's generate
# leaves it there.
TRITON_PARAMETERS = (
    "id",
    "sequence_id",
    "sequence_start",
    "sequence_end",
    "priority",
    "timeout",
    "binary_data_output",
)


@dataclass(frozen=True, slots=True)
class Limits:
    """What this deployment can do. max_draft_len 0: there is no draft model."""

    decoupled: bool
    max_draft_len: int


@dataclass(frozen=True, slots=True)
class Request:
    """One parsed request. None: not stated, so the deployment's default holds. `returns`: the
    optional outputs asked for.
    """

    prompt: str
    streaming: bool = False
    sampling: Sampling = field(default_factory=Sampling)
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    draft_len: int | None = None
    acceptance: RequestAcceptance | None = None
    timeout_ms: int | None = None
    include_prompt: bool = True
    returns: frozenset[str] = frozenset()
    cancels: bool = False  # the request is not to be run: it cancels the one with the same id


def parse(
    tensors: Mapping[str, list[Any]],
    parameters: Mapping[str, object],
    limits: Limits,
    form: Form = LLMAPI,
) -> Request:
    """Check one request. tensors: name -> flat list of values (bytes for strings). Raises
    RequestError with what is wrong.

    parameters are what came beside the tensors: over HTTP, Triton turns every name that the model
    does not know into one.
    """
    for name in parameters:
        if name not in TRITON_PARAMETERS and not name.startswith("triton_"):
            raise _unknown(name, form)
    for name in tensors:
        if name not in form.inputs:
            raise _unknown(name, form)
        if form.inputs[name] and len(tensors[name]) != 1:
            raise RequestError(f"{name} holds one value, {len(tensors[name])} were sent")

    one = {name: values[0] for name, values in tensors.items() if form.inputs[name]}
    # A prompt is single in one form and a list of one in the other; it is looked at below in
    # either.
    one.pop("text_input", None)
    streaming = bool(one.get(form.of("streaming"), False))
    if streaming and not limits.decoupled:
        raise RequestError(
            "streaming needs a decoupled repository, and this one is not",
            hint=(
                f"Send {form.of('streaming')}=false, or package again with triton.decoupled: true."
            ),
        )
    best_of = form.of("best_of")
    if one.get(best_of, 1) != 1:
        raise RequestError(f"{best_of} {one[best_of]} is not supported: one sequence per request")
    return Request(
        prompt=_prompt(tensors),
        streaming=streaming,
        sampling=_sampling(one, form),
        max_tokens=_at_least_one(one, form.of("max_tokens")),
        stop=_stop_words(tensors, form.of("stop_words")),
        draft_len=_draft_len(one.get("num_draft_tokens"), limits),
        acceptance=_acceptance(one.get("acceptance")),
        timeout_ms=_at_least_one(one, "timeout_ms"),
        include_prompt=not streaming and not one.get(form.of("exclude_input"), False),
        returns=frozenset(name for name, value in one.items() if "return_" in name and value),
        cancels=bool(one.get("stop", False)),
    )


def _unknown(name: str, form: Form) -> RequestError:
    close = difflib.get_close_matches(name, form.inputs, n=1)
    likely = form.of(name) if form.of(name) in form.inputs else close[0] if close else None
    return RequestError(
        f"unknown input {name!r}",
        hint=f"Did you mean {likely!r}?" if likely else f"Known: {', '.join(form.inputs)}.",
    )


def _text(value: bytes | str, what: str) -> str:
    try:
        return value if isinstance(value, str) else bytes(value).decode("utf-8")
    except UnicodeDecodeError as error:
        raise RequestError(
            f"{what} is not valid UTF-8: {error.reason} at byte {error.start}"
        ) from error


def _prompt(tensors: Mapping[str, list[Any]]) -> str:
    prompts = tensors.get("text_input")
    if prompts is None:
        raise RequestError("text_input is missing")
    if len(prompts) != 1:
        raise RequestError(
            f"text_input holds one prompt, {len(prompts)} were sent",
            hint="Send one request per prompt.",
        )
    prompt = _text(prompts[0], "text_input")
    if not prompt:
        raise RequestError("text_input is empty", hint="Send at least one character.")
    return prompt


def _stop_words(tensors: Mapping[str, list[Any]], name: str) -> tuple[str, ...]:
    words = tuple(_text(value, name) for value in tensors.get(name, []))
    if "" in words:
        raise RequestError(
            f"{name} holds an empty stop word, which would end every text before it begins"
        )
    return words


def _sampling(one: Mapping[str, Any], form: Form) -> Sampling:
    def number(word: str, default: float, low: float, high: float = math.inf) -> float:
        name = form.of(word)
        value = float(one.get(name, default))
        if not (math.isfinite(value) and low <= value <= high):
            bounds = [f"at least {low}"] if math.isfinite(low) else []
            bounds += [f"at most {high}"] if math.isfinite(high) else []
            raise RequestError(
                f"{name} is {value}; it has to be a finite"
                f" number{' of ' if bounds else ''}{' and '.join(bounds)}"
            )
        return value

    top_k_name, top_p_name, seed_name = form.of("top_k"), form.of("top_p"), form.of("seed")
    top_k = int(one.get(top_k_name, 0))
    if top_k < 0:
        raise RequestError(f"{top_k_name} is {top_k}; it has to be 0 (off) or more")
    top_p = number("top_p", 1.0, 0.0, 1.0)
    if top_p == 0.0:
        raise RequestError(
            f"{top_p_name} is 0, which leaves no token",
            hint="For greedy decoding send temperature 0.",
        )
    filtered = top_k_name in one or top_p_name in one
    return Sampling(
        temperature=number("temperature", 1.0 if filtered else 0.0, 0.0),
        top_k=top_k,
        top_p=top_p,
        frequency_penalty=number("frequency_penalty", 0.0, -MAX_PENALTY, MAX_PENALTY),
        presence_penalty=number("presence_penalty", 0.0, -MAX_PENALTY, MAX_PENALTY),
        seed=int(one[seed_name]) if seed_name in one else None,
    )


def _at_least_one(one: Mapping[str, Any], name: str) -> int | None:
    if name not in one:
        return None
    if int(one[name]) < 1:
        raise RequestError(f"{name} is {one[name]}; it has to be at least 1")
    return int(one[name])


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
        raise RequestError(f"acceptance is {rule!r}; known: {', '.join(ACCEPTANCE)}")
    return None if rule == "auto" else cast(RequestAcceptance, rule)


class Answer:
    """Turns the events of one request into the tensors of its responses. Not thread-safe; one
    thread answers a request.

    interval_ns: chunks of a stream are at least this far apart, except for the last. What comes in
    between is held and goes with the next: a response costs time that a small model's step does not
    have.
    """

    def __init__(self, request: Request, interval_ns: int = 0) -> None:
        self._request = request
        self._interval_ns = interval_ns
        self._due_ns = 0  # when the next chunk may be sent; the first one at once
        self._tokens = 0  # of the request so far
        # What has not been sent.
        self._text: list[str] = [request.prompt] if request.include_prompt else []
        self._ids: list[int] = []

    def add(self, event: TokenEvent, now_ns: int) -> dict[str, list[Any]] | None:
        """Name -> values of the response that is due after this event; None if none is."""
        self._tokens += len(event.token_ids)
        self._text.append(event.text)
        self._ids.extend(event.token_ids)
        if event.finish_reason is None and not (self._request.streaming and now_ns >= self._due_ns):
            return None
        response: dict[str, list[Any]] = {"text_output": ["".join(self._text)]}
        if self._wants("return_token_ids"):
            response["output_ids"] = self._ids
        if self._wants("return_num_output_tokens"):
            response["num_output_tokens"] = [self._tokens]
        if event.finish_reason is not None:
            response.update(self._ending(event))
        self._text, self._ids = [], []
        self._due_ns = now_ns + self._interval_ns
        return response

    def _wants(self, name: str) -> bool:
        return name in self._request.returns

    def _ending(self, event: TokenEvent) -> dict[str, list[Any]]:
        ending: dict[str, list[Any]] = {}
        if self._wants("return_finish_reason"):
            ending["finish_reason"] = [event.finish_reason]
        if self._wants("return_stop_reason"):
            ending["stop_reason"] = [str(event.stop_reason)]
        if event.stats is None:
            return ending
        stats = event.stats
        if self._wants("return_cumulative_logprob"):
            if stats.cumulative_logprob is None:
                raise RequestError(
                    "return_cumulative_logprob was asked for, and the runtime kept no"
                    " log-probabilities"
                )
            ending["cumulative_logprob"] = [stats.cumulative_logprob]
        if self._wants("return_num_input_tokens"):
            ending["num_input_tokens"] = [stats.prompt_tokens]
        if self._wants("sampling_param_return_perf_metrics"):
            ending.update(_performance(stats))
        if self._wants("return_speculation_stats"):
            ending.update(_speculation(stats))
        return ending


def _performance(stats: RequestStats) -> dict[str, list[Any]]:
    figures: dict[str, Any] = {
        "kv_cache_reused_block": 0,
        "kv_cache_missed_block": 1,
        "kv_cache_alloc_new_blocks": 1,
        "kv_cache_alloc_total_blocks": 1,
        "kv_cache_hit_rate": 0.0,
        "arrival_time_ns": stats.arrival_ns,
        "first_scheduled_time_ns": stats.first_scheduled_ns,
        "first_token_time_ns": stats.first_token_ns,
        "last_token_time_ns": stats.last_token_ns,
        "acceptance_rate": stats.acceptance_rate,
        "total_accepted_draft_tokens": stats.accepted,
        "total_draft_tokens": stats.drafted,
    }
    return {name: [value] for name, value in figures.items() if value is not None}


def _speculation(stats: RequestStats) -> dict[str, list[Any]]:
    return {
        "verify_steps": [stats.verify_steps],
        "drafted_by_position": list(stats.drafted_by_position),
        "accepted_by_position": list(stats.accepted_by_position),
        "draft_time_ns": [stats.draft_ns],
        "verify_time_ns": [stats.verify_ns],
        "host_time_ns": [stats.host_ns],
    }
