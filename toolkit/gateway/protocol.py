"""OpenAI's protocol: a request's JSON becomes an `Asked`, and chunks of text become its answers.

Pure: values in, values out. What the served engine cannot do is refused by name, never dropped. A
key of the protocol that says nothing new (its default, a user's name) is taken as it is. Keys that
OpenAI does not have and vLLM does (`top_k`), and one of ours (`num_draft_tokens`, 0 for plain
decoding), are taken, too. Source: OpenAI's API reference, "Create chat completion" and "Create
completion".
"""

from __future__ import annotations

import difflib
import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from toolkit.client import Options, Statistics
from toolkit.errors import ToolkitError
from toolkit.openai_client import USAGE_COUNTS

__all__ = [
    "DRAFT_FAILED",
    "KNOWN",
    "MAX_SHOWN",
    "Answers",
    "Asked",
    "Refusal",
    "log_probs",
    "parse_chat",
    "parse_completion",
]

DRAFT_FAILED = "the draft failed; the rest was decoded without it"  # all that a client is told
MAX_STOPS = 4  # as in OpenAI's protocol
MAX_SHOWN = 40  # characters of what a client sent, in a message
MAX_TOP_LOGPROBS = 1  # the engines tell the likeliest of the other tokens, and no third
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
SEED_LIMIT = 1 << 64
INT32_LIMIT = 1 << 31

# Keys of both endpoints that are read here; the others are refused.
SHARED = frozenset(
    {
        "model", "stream", "stream_options", "max_tokens", "temperature", "top_p", "top_k", "seed",
        "stop", "n", "frequency_penalty", "presence_penalty", "logprobs", "num_draft_tokens",
    }
)  # fmt: skip
CHAT = SHARED | {"messages", "max_completion_tokens", "top_logprobs"}
COMPLETION = SHARED | {"prompt", "best_of", "echo", "suffix"}
# They change nothing of the text.
NAMES = frozenset(
    {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"}
)
SESSIONS = ("prompt_cache_key", "safety_identifier", "user")
# key -> (values that ask for nothing, what the others would need). None always asks for nothing.
UNSERVED: dict[str, tuple[tuple[Any, ...], str]] = {
    "tools": (([],), "tool calls"),
    "tool_choice": (("none", "auto"), "tool calls"),
    "parallel_tool_calls": ((True, False), "tool calls"),
    "functions": (([],), "tool calls"),
    "function_call": (("none", "auto"), "tool calls"),
    "response_format": (({"type": "text"},), "guided decoding"),
    "logit_bias": (({},), "a bias of single tokens"),
    "modalities": ((["text"],), "other output than text"),
    "audio": ((), "other output than text"),
    "prediction": ((), "a predicted output"),
    "reasoning_effort": (("none",), "levels of reasoning"),
    "verbosity": (("medium",), "levels of verbosity"),
    "web_search_options": ((), "a search"),
    "best_of": ((1,), "several sequences per request"),
    "echo": ((False,), "the prompt in the answer"),
    "suffix": (("",), "text after the gap"),
}
# The parameters that a log may name. Any other is a text of the client's.
KNOWN = CHAT | COMPLETION | NAMES | frozenset(UNSERVED)


class Refusal(Exception):
    """A request that cannot be served, as OpenAI's clients expect it.

    status: of HTTP. parameter: the key that is at fault. retry_after_s: when to come again.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        parameter: str | None = None,
        code: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.message, self.status, self.code = message, status, code
        self.parameter, self.retry_after_s = parameter, retry_after_s

    def body(self) -> dict[str, Any]:
        """The JSON of the error."""
        kind = "invalid_request_error"
        if self.status >= 500:
            kind = "server_error"
        elif self.status == 429:
            kind = "rate_limit_error"
        elif self.status == 401:
            kind = "authentication_error"
        error = {
            "message": self.message,
            "type": kind,
            "param": self.parameter,
            "code": self.code,
        }
        return {"error": error}


@dataclass(frozen=True, slots=True)
class Asked:
    """What a client asks for.

    prompt: the text that the engine continues. tells_usage: the stream ends with an event of usage.
    tells_tokens: each event of the stream says how many tokens came so far. tells_speculation: each
    event of the stream says how many of its tokens were accepted drafts. session: what the client
    calls the conversation or its user; None: it does not say. key: the name of its key; None: the
    gateway has no keys.
    """

    kind: Literal["chat", "completion"]
    model: str
    prompt: str
    options: Options
    streams: bool = False
    tells_usage: bool = False
    tells_tokens: bool = False
    tells_speculation: bool = False
    top_logprobs: int = 0
    session: str | None = None
    key: str | None = None


def parse_chat(body: Mapping[str, Any], render: Callable[[object], str] | None) -> Asked:
    """A request to /v1/chat/completions. render: applies the chat template; None: there is none.

    Raises Refusal.
    """
    _check_keys(body, CHAT)
    if render is None:
        raise Refusal(
            "the target's checkpoint has no chat template: use /v1/completions, or name a template"
            " in gateway.chat_template",
            parameter="messages",
        )
    if body.get("max_tokens") is not None and body.get("max_completion_tokens") is not None:
        raise Refusal(
            "max_tokens and max_completion_tokens are two names of one limit: send one",
            parameter="max_tokens",
        )
    top = _whole(body, "top_logprobs", 0, MAX_TOP_LOGPROBS)
    asks_log_probs = _flag(body, "logprobs")
    if top is not None and not asks_log_probs:
        raise Refusal("top_logprobs needs logprobs: true", parameter="top_logprobs")
    if "messages" not in body:
        raise Refusal("messages is missing", parameter="messages")
    try:
        prompt = render(body["messages"])
    except ToolkitError as error:
        raise Refusal(error.what, parameter="messages") from error
    limit = _whole(body, "max_completion_tokens", 1, INT32_LIMIT - 1)
    return _asked("chat", body, prompt, limit, asks_log_probs, top or 0)


def parse_completion(body: Mapping[str, Any]) -> Asked:
    """A request to /v1/completions. Raises Refusal."""
    _check_keys(body, COMPLETION)
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str):
        prompt = prompt[0]
    if isinstance(prompt, list):
        raise Refusal(
            "prompt has to be one string: token ids, and several prompts in one request, are not"
            " served",
            parameter="prompt",
        )
    if not isinstance(prompt, str) or not prompt:
        raise Refusal("prompt has to be a string that is not empty", parameter="prompt")
    top = _whole(body, "logprobs", 0, MAX_TOP_LOGPROBS)
    return _asked("completion", body, prompt, None, top is not None, top or 0)


def _asked(
    kind: Literal["chat", "completion"],
    body: Mapping[str, Any],
    prompt: str,
    limit: int | None,
    asks_log_probs: bool,
    top_logprobs: int,
) -> Asked:
    model = body.get("model")
    if not isinstance(model, str) or not model:
        raise Refusal("model has to be the name of the served model", parameter="model")
    if _whole(body, "n", 1, 1) is None and body.get("n") is not None:
        raise Refusal("n can only be 1", parameter="n")
    streams = _flag(body, "stream")
    stream_options = _stream_options(body, streams)
    if asks_log_probs and streams:
        raise Refusal(
            "logprobs come with whole answers only: send stream: false", parameter="logprobs"
        )
    options = Options(
        max_tokens=limit or _whole(body, "max_tokens", 1, INT32_LIMIT - 1),
        # OpenAI's default; the engines' own would be greedy.
        temperature=_number(body, "temperature", 0.0, 2.0, default=1.0),
        top_p=_number(body, "top_p", 0.0, 1.0),
        top_k=_whole(body, "top_k", 0, INT32_LIMIT - 1),
        frequency_penalty=_penalty(body, "frequency_penalty"),
        presence_penalty=_penalty(body, "presence_penalty"),
        seed=_whole(body, "seed", 0, SEED_LIMIT - 1),
        stop=_stops(body),
        num_draft_tokens=_whole(body, "num_draft_tokens", 0, INT32_LIMIT - 1),
        log_probs=True if asks_log_probs else None,
    )
    return Asked(
        kind,
        model,
        prompt,
        options,
        streams,
        stream_options.get("include_usage", False),
        stream_options.get("continuous_usage_stats", False),
        stream_options.get("include_speculation", False),
        top_logprobs,
        next((str(value) for key in SESSIONS if (value := body.get(key)) is not None), None),
    )


def _check_keys(body: Mapping[str, Any], known: frozenset[str]) -> None:
    for key, value in body.items():
        if key in UNSERVED:
            harmless, needed = UNSERVED[key]
            if value is not None and value not in harmless:
                raise Refusal(
                    f"{key} asks for {needed}, which is not served",
                    parameter=key,
                    code="unsupported_parameter",
                )
        elif key not in known and key not in NAMES:
            shown = key[:MAX_SHOWN]
            close = difflib.get_close_matches(shown, known, 1)
            hint = f"; did you mean {close[0]}?" if close else ""
            what = f"{shown} is not a key of this endpoint{hint}"
            raise Refusal(what, parameter=shown, code="unknown_parameter")


def _stream_options(body: Mapping[str, Any], streams: bool) -> dict[str, bool]:
    options = body.get("stream_options")
    if options is None:
        return {}
    if not isinstance(options, Mapping):
        raise Refusal("stream_options has to be an object", parameter="stream_options")
    if not streams:
        raise Refusal("stream_options needs stream: true", parameter="stream_options")
    known = {
        "include_usage",
        "continuous_usage_stats",  # vLLM's
        "include_speculation",  # ours
        "include_obfuscation",
    }
    for key, value in options.items():
        if key not in known or (value is not None and not isinstance(value, bool)):
            raise Refusal(
                f"stream_options.{key[:MAX_SHOWN]} is not a switch that this server has",
                parameter="stream_options",
            )
    return {key: bool(value) for key, value in options.items()}


def _flag(body: Mapping[str, Any], key: str) -> bool:
    value = body.get(key)
    if value is not None and not isinstance(value, bool):
        raise Refusal(f"{key} has to be true or false", parameter=key)
    return bool(value)


def _whole(body: Mapping[str, Any], key: str, least: int, most: int) -> int | None:
    value = body.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        wanted = f"{least}" if least == most else f"a whole number from {least} to {most}"
        raise Refusal(f"{key} has to be {wanted}, not {_shown(value)}", parameter=key)
    return value


def _number(
    body: Mapping[str, Any], key: str, least: float, most: float, default: float | None = None
) -> float | None:
    value = body.get(key)
    if value is None:
        return default
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not least <= value <= most:  # NaN is in no range
        raise Refusal(
            f"{key} has to be a number from {least:g} to {most:g}, not {_shown(value)}",
            parameter=key,
        )
    return float(value)


def _penalty(body: Mapping[str, Any], key: str) -> float | None:
    """0 is none: an engine without penalties takes it, too."""
    return _number(body, key, -2.0, 2.0) or None


def _stops(body: Mapping[str, Any]) -> tuple[str, ...] | None:
    stop = body.get("stop")
    stops = [stop] if isinstance(stop, str) else stop
    if not stops:
        return None
    if not isinstance(stops, list) or not all(isinstance(word, str) and word for word in stops):
        raise Refusal("stop has to be a string or a list of strings, none empty", parameter="stop")
    if len(stops) > MAX_STOPS:
        what = f"stop has {len(stops)} words, and at most {MAX_STOPS} are served"
        raise Refusal(what, parameter="stop")
    return tuple(stops)


def _shown(value: Any) -> str:
    text = json.dumps(value, default=repr)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."


@dataclass(frozen=True, slots=True)
class Answers:
    """Makes the JSON of the answers to one request. created_s: seconds since 1970."""

    asked: Asked
    id: str
    created_s: int

    def event(self, text: str, extra: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """An event with new text."""
        if self.asked.kind == "chat":
            return self._event({"delta": {"content": text}, "finish_reason": None}, extra)
        return self._event({"text": text, "finish_reason": None}, extra)

    def first_event(self) -> dict[str, Any] | None:
        """The event before any text: of a chat, whose role it is."""
        if self.asked.kind != "chat":
            return None
        delta = {"role": "assistant", "content": ""}
        return self._event({"delta": delta, "finish_reason": None})

    def last_event(self, finish_reason: str) -> dict[str, Any]:
        """The event after all text."""
        content: dict[str, Any] = {"delta": {}} if self.asked.kind == "chat" else {"text": ""}
        return self._event({**content, "finish_reason": finish_reason})

    def usage_event(
        self, statistics: Statistics, extra: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """The event of usage, which has no choice."""
        head = self._head(streams=True)
        return {**head, "choices": [], "usage": usage(statistics), **(extra or {})}

    def whole(
        self,
        text: str,
        finish_reason: str,
        statistics: Statistics,
        log_probs: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """The answer to a request that does not stream."""
        content: dict[str, Any] = {"text": text}
        if self.asked.kind == "chat":
            content = {"message": {"role": "assistant", "content": text, "refusal": None}}
        choice = {"index": 0, **content, "logprobs": log_probs, "finish_reason": finish_reason}
        return {**self._head(streams=False), "choices": [choice], "usage": usage(statistics)}

    def _event(
        self, choice: Mapping[str, Any], extra: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        choices = [{"index": 0, **choice, "logprobs": None}]
        return {**self._head(streams=True), "choices": choices, **(extra or {})}

    def _head(self, *, streams: bool) -> dict[str, Any]:
        name = "text_completion"
        if self.asked.kind == "chat":
            name = "chat.completion.chunk" if streams else "chat.completion"
        return {
            "id": self.id,
            "object": name,
            "created": self.created_s,
            "model": self.asked.model,
        }


def log_probs(
    asked: Asked, token_ids: Sequence[int], statistics: Statistics, spell: Callable[[int], str]
) -> dict[str, Any]:
    """The log-probabilities of an answer's tokens, under the target's own distribution. spell: the
    text of a token. Raises ValueError if the server has not told one of each token.
    """
    own, best = statistics.log_probs or (), statistics.next_best or ()
    scores = statistics.next_best_log_probs or ()
    rows = []
    for token, value, other, score in zip(token_ids, own, best, scores, strict=True):
        likeliest = (token, value) if value >= score else (other, score)
        rows.append((spell(token), value, spell(likeliest[0]), likeliest[1]))
    if asked.kind == "chat":
        content = [
            {
                **_token(text, value),
                "top_logprobs": [_token(top, score)] if asked.top_logprobs else [],
            }
            for text, value, top, score in rows
        ]
        return {"content": content, "refusal": None}
    offsets = [0, *itertools.accumulate(len(text) for text, *_ in rows)][: len(rows)]
    return {
        "tokens": [text for text, *_ in rows],
        "token_logprobs": [value for _, value, *_ in rows],
        "top_logprobs": [{top: score} for *_, top, score in rows] if asked.top_logprobs else None,
        "text_offset": offsets,
    }


def _token(text: str, value: float) -> dict[str, Any]:
    # A token may be a part of a character, which has no text of its own.
    whole = REPLACEMENT not in text
    return {"token": text, "logprob": value, "bytes": list(text.encode()) if whole else None}


def usage(statistics: Statistics) -> dict[str, Any]:
    """The tokens of a request, with the accepted and the rejected draft tokens where they are
    known. OpenAI defines these two for predictions that the client sends; drafts are predictions
    that the server makes, and rejected ones are not billed here, nor part of completion_tokens.
    `speculation` is ours: what else the server tells of its verify steps. The error of a draft that
    failed is in the log alone: it may name models and addresses.
    """
    prompt, completion = statistics.input_tokens or 0, statistics.output_tokens or 0
    counts: dict[str, Any] = {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
    }
    if statistics.drafted is not None and statistics.accepted is not None:
        counts["completion_tokens_details"] = {
            "accepted_prediction_tokens": statistics.accepted,
            "rejected_prediction_tokens": statistics.drafted - statistics.accepted,
        }
        told = {name: getattr(statistics, name) for name in USAGE_COUNTS}
        told["draft_len_reasons"] = statistics.steps_by_reason
        if statistics.draft_failure is not None:
            told["draft_failure"] = DRAFT_FAILED
        known = {name: count for name, count in told.items() if count is not None}
        if known:
            counts["speculation"] = known
    return counts
