"""A typed client of vLLM's OpenAI server with the interface of `toolkit.client.Client`: generate,
stream and measure.

    with OpenAiClient("127.0.0.1:8000", "quickstart") as client:
        print(client.generate("def read_config(path):", max_tokens=32).text)

It calls `/v1/completions` and asks for what OpenAI's own interface leaves out: the token ids
(`return_token_ids`), the number of tokens with every chunk (`continuous_usage_stats`), and ids for
the tokens of log-probabilities (`return_tokens_as_token_ids`). A server that was started with
`--per-request-spec-decode-metrics detailed` adds what was drafted and accepted in every verify
step, to the last event of a stream as well. Source: vllm/entrypoints/openai/completion/
{protocol,serving}.py and entrypoints/generate/base/protocol.py of vLLM 0.32.0.

The prompt is sent as text, as other clients send it. The server says which token ids it made of
it, and an answer to other ids than `encode` gives is refused: the arms could still be compared with
each other, but not with a reference that reads the prompt itself.

Every request has its own connection, so closing it cancels the request alone. Times are integer
nanoseconds of this process's monotonic clock, taken when bytes arrive, before they are decoded. The
server counts the tokens.
"""

from __future__ import annotations

import dataclasses
import http.client
import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from types import TracebackType
from typing import Any

from toolkit.client import (
    MAX_PORT,
    Chunk,
    ClientError,
    Completion,
    Options,
    RequestRefused,
    RequestTiming,
    ServerUnavailable,
    Statistics,
    timing,
)

__all__ = [
    "KEEP_ALIVE_S",
    "USAGE_COUNTS",
    "Answer",
    "OpenAiClient",
    "error_of",
    "speculation_counts",
    "usage_counts",
]

# After so long without a request a pooled connection is closed by the client. vLLM, like every
# server on uvicorn, closes it after 5 s (VLLM_HTTP_TIMEOUT_KEEP_ALIVE, timeout_keep_alive), and a
# request that is sent in that moment is lost.
KEEP_ALIVE_S = 4.0
# Options that vLLM's requests carry under the same name.
CARRIED = (
    "max_tokens",
    "temperature",
    "top_k",
    "top_p",
    "frequency_penalty",
    "presence_penalty",
    "seed",
    "cache_salt",
)
# Options that no request of vLLM carries, and what decides instead.
NOT_CARRIED = {
    "num_draft_tokens": "the draft length is fixed when the server starts",
    "acceptance": "the accept rule is fixed when the server starts",
    "timeout_ms": "a request has no deadline; the client's own timeout_s ends it",
}
# The chosen token and two more. The chosen token is usually the first of these, and then the second
# is the next best.
LOG_PROBS = 2
# The fields of Statistics that the toolkit's own gateway tells as `usage.speculation`.
BY_POSITION = ("drafted_by_position", "accepted_by_position")
USAGE_COUNTS = ("verify_steps", *BY_POSITION)
TOKEN_ID = "token_id:"  # vLLM names a token so if return_tokens_as_token_ids is set
EVENT_END = re.compile(rb"\r\n\r\n|\n\n|\r\r")
READ_BYTES = 1 << 16
START_S = 60.0  # how long the threads of concurrent requests may take to start
SHOWN = 300  # characters of an answer that is no JSON
SERVER_FAULT = 500  # HTTP status codes from here on are faults of the server


class OpenAiClient:
    """A client of one model of one server. Several threads may use it at once.

    url: host:port, or http://host:port. encode: the deployment's own tokenizer; None: the server's
    token ids of the prompt are not checked. ignore_eos: no end token ends an answer, which then has
    max_tokens tokens. timeout_s: limit of every call as a whole.
    """

    def __init__(
        self,
        url: str,
        model: str,
        timeout_s: float = 300.0,
        *,
        encode: Callable[[str], Sequence[int]] | None = None,
        ignore_eos: bool = False,
    ) -> None:
        self.url = url.removeprefix("http://").rstrip("/")
        self.model = model
        self.timeout_s = timeout_s
        self._encode, self._ignore_eos = encode, ignore_eos
        host, _, port = self.url.rpartition(":")
        if not port.isdecimal() or int(port) > MAX_PORT or not host:
            raise ServerUnavailable(f"{url}: this is not host:port of an HTTP server")
        self._host, self._port = host.strip("[]"), int(port)

    def __enter__(self) -> OpenAiClient:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Nothing to do: every request closes its own connection."""

    def ready(self) -> bool:
        """Whether the server is healthy and has the model."""
        deadline = time.monotonic() + self.timeout_s
        try:
            with self._connected("GET", "/health", None, deadline) as (response, _):
                response.read()
            with self._connected("GET", "/v1/models", None, deadline) as (response, _):
                models = json.loads(response.read())
            return any(model["id"] == self.model for model in models["data"])
        except (ClientError, ValueError, KeyError, TypeError, OSError, http.client.HTTPException):
            return False

    def generate(
        self, prompt: str, options: Options | None = None, *, request_id: str = "", **overrides: Any
    ) -> Completion:
        """Generate the whole completion. overrides: fields of Options.

        Raises RequestRefused, ServerUnavailable.
        """
        all_options = dataclasses.replace(options or Options(), **overrides)
        (chunk,) = self._call(prompt, all_options, request_id, streaming=False)
        return Completion(
            chunk.text,
            chunk.token_ids,
            chunk.finish_reason,
            chunk.stop_reason,
            chunk.statistics or Statistics(),
        )

    def stream(
        self, prompt: str, options: Options | None = None, *, request_id: str = "", **overrides: Any
    ) -> Iterator[Chunk]:
        """Yield chunks as they arrive.

        Closing the iterator, or leaving its loop, cancels the request on the server. The chunk with
        the finish reason is yielded when the statistics have come, right after it. Raises
        RequestRefused, ServerUnavailable.
        """
        all_options = dataclasses.replace(options or Options(), **overrides)
        return self._call(prompt, all_options, request_id, streaming=True)

    def measure(
        self,
        prompts: Iterable[str],
        options: Options | None = None,
        *,
        concurrency: int = 1,
        **overrides: Any,
    ) -> list[RequestTiming]:
        """Stream and time every prompt, `concurrency` at a time in a closed loop.

        The results are in the order of the prompts. The first `concurrency` of them are sent at
        once: on a machine that the server keeps busy, starting a thread takes as long as a short
        request.
        """
        all_options = dataclasses.replace(options or Options(), **overrides)
        prompts = list(prompts)
        workers = min(concurrency, len(prompts))
        if workers <= 1:
            return [self._time(prompt, all_options) for prompt in prompts]
        all_started = Barrier(workers, timeout=START_S)
        with ThreadPoolExecutor(workers, initializer=all_started.wait) as pool:
            return list(pool.map(lambda prompt: self._time(prompt, all_options), prompts))

    def _time(self, prompt: str, options: Options) -> RequestTiming:
        sent_ns = time.monotonic_ns()
        return timing(prompt, list(self._call(prompt, options, "", streaming=True)), sent_ns)

    def body(
        self, prompt: str, options: Options, request_id: str, *, streaming: bool
    ) -> dict[str, Any]:
        """The JSON of a request. Raises RequestRefused for an option that vLLM does not have."""
        for option, reason in NOT_CARRIED.items():
            if getattr(options, option) is not None:
                raise RequestRefused(f"vLLM has no {option} in a request: {reason}")
        body: dict[str, Any] = {
            "model": self.model,
            "prompt": prompt,
            "return_token_ids": True,
            **{name: value for name in CARRIED if (value := getattr(options, name)) is not None},
        }
        if options.stop is not None:
            body["stop"] = list(options.stop)
        if options.log_probs:
            body |= {"logprobs": LOG_PROBS, "return_tokens_as_token_ids": True}
        if self._ignore_eos:
            body["ignore_eos"] = True
        if request_id:
            body["request_id"] = request_id
        if streaming:
            body["stream"] = True
            body["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
        return body

    def _call(
        self, prompt: str, options: Options, request_id: str, *, streaming: bool
    ) -> Iterator[Chunk]:
        body = self.body(prompt, options, request_id, streaming=streaming)
        deadline = time.monotonic() + self.timeout_s
        answer = Answer(self, prompt, with_log_probs=bool(options.log_probs))
        with self._connected("POST", "/v1/completions", body, deadline) as (response, renew):
            try:
                if not streaming:
                    page = response.read()
                    yield from answer.whole(_object(page, self.url), time.monotonic_ns())
                    return
                rest = b""
                while not answer.is_over:
                    renew()
                    data = response.read1(READ_BYTES)
                    received_ns = time.monotonic_ns()
                    if not data:
                        break
                    *events, rest = EVENT_END.split(rest + data)
                    for event in events:
                        yield from answer.event(event, received_ns)
            except TimeoutError as error:
                raise ServerUnavailable(
                    f"{self.url}: no answer within {self.timeout_s:g} s"
                ) from error
            except (OSError, http.client.HTTPException, AttributeError) as error:
                # AttributeError: http.client, reading from a connection that another thread closed.
                raise ServerUnavailable(f"{self.url}: the connection broke: {error!r}") from error
        if not answer.is_over:
            raise ServerUnavailable(f"{self.url}: the stream ended before the answer was complete")

    def _connected(
        self, method: str, path: str, body: Mapping[str, Any] | None, deadline: float
    ) -> _Connection:
        return _Connection(self, method, path, body, deadline)

    def check_prompt(self, prompt: str, ids: Sequence[int]) -> None:
        """Raise RequestRefused if the server encodes the prompt otherwise than `encode`."""
        if self._encode is None or list(ids) == (expected := list(self._encode(prompt))):
            return
        raise RequestRefused(
            f"the server reads the prompt as {len(ids)} tokens {_shown(ids)}, and the deployment's"
            f" tokenizer as {len(expected)} tokens {_shown(expected)}"
        )


class _Connection:
    """One HTTP request on its own connection: (the response with status 200, a function that
    leaves the socket the time until the deadline). Raises RequestRefused or ServerUnavailable.
    """

    def __init__(
        self,
        client: OpenAiClient,
        method: str,
        path: str,
        body: Mapping[str, Any] | None,
        deadline: float,
    ) -> None:
        self._client, self._deadline = client, deadline
        self._request = method, path, body
        self._connection = http.client.HTTPConnection(
            client._host, client._port, timeout=client.timeout_s
        )

    def __enter__(self) -> tuple[http.client.HTTPResponse, Callable[[], None]]:
        method, path, body = self._request
        url, timeout_s = self._client.url, self._client.timeout_s
        payload = None if body is None else json.dumps(body).encode()
        headers = {"Connection": "close", "Content-Type": "application/json"}
        try:
            self._connection.request(method, path, payload, headers)
            response = self._connection.getresponse()
            socket = response.fp.raw._sock if response.fp is not None else None  # type: ignore[attr-defined]
            if response.status != http.client.OK:
                page = response.read().decode("utf-8", "replace")
                raise error_of(page, response.status, url)
        except TimeoutError as error:
            self._connection.close()
            raise ServerUnavailable(f"{url}: no answer within {timeout_s:g} s") from error
        except (OSError, http.client.HTTPException) as error:
            self._connection.close()
            raise ServerUnavailable(
                f"{url}: the server cannot be reached or went away ({error!r})"
            ) from error
        except ClientError:
            self._connection.close()
            raise
        self._response = response

        def renew() -> None:
            remaining = self._deadline - time.monotonic()
            if remaining <= 0:
                raise TimeoutError
            if socket is not None:
                socket.settimeout(remaining)

        renew()
        return response, renew

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # With `Connection: close`, the response owns the socket.
        self._response.close()
        self._connection.close()


class Answer:
    """Makes chunks of an answer's events.

    The statistics come in an event of their own after the last tokens, so the chunk with the finish
    reason is held until then. is_over: the server has said that nothing more comes.
    """

    def __init__(self, client: OpenAiClient, prompt: str, *, with_log_probs: bool) -> None:
        self._client, self._prompt = client, prompt
        self._with_log_probs = with_log_probs
        self._tokens: list[_ScoredToken] = []
        self._last: Chunk | None = None
        self._is_checked = False
        self.is_over = False

    def whole(self, data: dict[str, Any], received_ns: int) -> Iterator[Chunk]:
        """The one chunk of an answer that is not streamed."""
        with self._readable():
            chunk = self._chunk(data, received_ns)
            if chunk is None or chunk.finish_reason is None:
                raise ServerUnavailable(f"{self._client.url}: the answer is not complete")
            chunk = dataclasses.replace(chunk, statistics=self._statistics(data, chunk))
        self.is_over = True
        yield chunk

    def event(self, event: bytes, received_ns: int) -> Iterator[Chunk]:
        """The chunk of one event of the stream, if it has one."""
        lines = (line for line in event.splitlines() if line.startswith(b"data:"))
        payload = b"\n".join(line[len(b"data:") :].strip() for line in lines)
        if not payload:
            return  # a comment that keeps the connection alive
        if payload == b"[DONE]":
            if self._last is not None:
                raise ServerUnavailable(f"{self._client.url}: the answer ended without its usage")
            self.is_over = self._is_checked
            return
        data = _object(payload, self._client.url)
        with self._readable():
            if self._last is not None:
                last, self._last = self._last, None
                yield dataclasses.replace(last, statistics=self._statistics(data, last))
                return
            chunk = self._chunk(data, received_ns)
        if chunk is None:
            return
        if chunk.finish_reason is not None:
            self._last = chunk
        else:
            yield chunk

    def _readable(self) -> _Readable:
        return _Readable(self._client.url)

    def _chunk(self, data: dict[str, Any], received_ns: int) -> Chunk | None:
        """None: the event has no choice."""
        if not data["choices"]:
            return None
        choice = data["choices"][0]
        if not self._is_checked:
            self._client.check_prompt(self._prompt, choice["prompt_token_ids"])
            self._is_checked = True
        token_ids = tuple(int(token) for token in choice["token_ids"])
        if self._with_log_probs:
            self._tokens += _scored(token_ids, choice["logprobs"])
        stop_reason = choice.get("stop_reason")
        return Chunk(
            text=choice["text"],
            token_ids=token_ids,
            output_tokens=int(data["usage"]["completion_tokens"]),
            received_ns=received_ns,
            finish_reason=choice.get("finish_reason"),
            stop_reason=None if stop_reason is None else str(stop_reason),
        )

    def _statistics(self, data: dict[str, Any], last: Chunk) -> Statistics:
        usage = data["usage"]
        if usage["completion_tokens"] != last.output_tokens:
            raise ValueError(
                f"{usage['completion_tokens']} tokens at the end, {last.output_tokens} before"
            )
        metrics = data.get("metrics") or {}
        return Statistics(
            input_tokens=int(usage["prompt_tokens"]),
            output_tokens=int(usage["completion_tokens"]),
            **speculation_counts(metrics.get("speculative_decoding")),
            **_log_probs(self._tokens if self._with_log_probs else None),
        )


class _Readable:
    """Turns an answer that does not have the expected fields into ServerUnavailable."""

    def __init__(self, url: str) -> None:
        self._url = url

    def __enter__(self) -> None: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if isinstance(error, (KeyError, TypeError, ValueError, IndexError, AttributeError)):
            raise ServerUnavailable(
                f"{self._url}: the answer is not one of vLLM's ({error!r})"
            ) from error


def _object(page: bytes, url: str) -> dict[str, Any]:
    try:
        data = json.loads(page)
    except ValueError as error:
        text = page[:SHOWN].decode("utf-8", "replace")
        raise ServerUnavailable(f"{url}: the answer is not JSON: {text}") from error
    if not isinstance(data, dict):
        raise ServerUnavailable(f"{url}: the answer is no JSON object")
    if data.get("error"):
        raise error_of(json.dumps(data), SERVER_FAULT, url)
    return data


def error_of(page: str, status: int, url: str) -> ClientError:
    """The exception for an error of the server, with its words. The status in the words, if there
    is one, says whose fault it was.
    """
    message, code = page[:SHOWN].strip(), status
    try:
        stated = json.loads(page)["error"]
        message = str(stated["message"])
        code = int(stated.get("code") or status)
    except (ValueError, KeyError, TypeError, AttributeError):
        pass  # the page itself is the message
    if code < SERVER_FAULT:
        return RequestRefused(message)
    return ServerUnavailable(f"{url}: the server failed with status {code}: {message}")


def speculation_counts(metrics: Mapping[str, Any] | None) -> dict[str, Any]:
    """The fields of Statistics in vLLM's `metrics.speculative_decoding`.

    There is none of a server without speculation, and none of a request that a stop word ended:
    then the server aborts its engine's request, and the counts are lost. drafted_by_position is
    known if the server tells every step (`detailed`), or if every block was of full length.
    """
    if metrics is None:
        return {}
    steps, drafted = int(metrics["num_spec_steps"]), int(metrics["num_draft_tokens"])
    histogram = metrics["acceptance_histogram"]  # steps by their number of accepted tokens
    places = range(len(histogram) - 1)
    fields: dict[str, Any] = {
        "drafted": drafted,
        "accepted": int(metrics["num_accepted_draft_tokens"]),
        "verify_steps": steps,
        "accepted_by_position": tuple(sum(histogram[place + 1 :]) for place in places),
    }
    per_step = metrics.get("per_step_drafted")
    if per_step is not None:
        fields["drafted_by_position"] = tuple(
            sum(length > place for length in per_step) for place in places
        )
    elif drafted == steps * len(places):
        fields["drafted_by_position"] = (steps,) * len(places)
    return fields


def usage_counts(usage: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of Statistics in the `usage` of the toolkit's own gateway, or of another server
    that tells its drafts under OpenAI's two keys.

    OpenAI's keys are of predictions that a client sends. A server that does not tell drafts there
    may tell 0 and 0, so that says nothing unless `speculation` is beside it. Raises TypeError for
    what is no count.
    """
    fields: dict[str, Any] = {}
    told = usage.get("speculation")
    if isinstance(told, Mapping):
        fields = {name: tuple(map(_count, told[name])) for name in BY_POSITION if name in told}
        if "verify_steps" in told:
            fields["verify_steps"] = _count(told["verify_steps"])
        if "draft_len_reasons" in told:
            steps = dict(told["draft_len_reasons"]).items()
            fields["steps_by_reason"] = {str(reason): _count(count) for reason, count in steps}
        if "draft_failure" in told:
            fields["draft_failure"] = str(told["draft_failure"])
    details = usage.get("completion_tokens_details") or {}
    accepted, rejected = (
        details.get(f"{what}_prediction_tokens") for what in ("accepted", "rejected")
    )
    if accepted is None or rejected is None or not (accepted or rejected or fields):
        return fields
    return {**fields, "accepted": _count(accepted), "drafted": _count(accepted) + _count(rejected)}


def _count(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise TypeError(f"{value!r} is no count")
    return value


# (log-probability of the chosen token, the likeliest other token, its log-probability)
_ScoredToken = tuple[float, int, float]


def _scored(token_ids: Sequence[int], log_probs: Mapping[str, Any]) -> Iterator[_ScoredToken]:
    """The log-probabilities of a chunk's tokens. Raises ValueError if they are of other tokens."""
    names, own = log_probs["tokens"], log_probs["token_logprobs"]
    for token, name, value, best in zip(
        token_ids, names, own, log_probs["top_logprobs"], strict=True
    ):
        if name != f"{TOKEN_ID}{token}":
            raise ValueError(f"log-probabilities of {name} for the token {token}")
        others = [(score, other) for other, score in best.items() if other != name]
        if value is None or not others:
            raise ValueError(f"no log-probabilities for the token {token}")
        score, other = max(others)
        yield float(value), int(other.removeprefix(TOKEN_ID)), float(score)


def _log_probs(tokens: Sequence[_ScoredToken] | None) -> dict[str, Any]:
    if tokens is None:
        return {}
    return {
        "log_probs": tuple(own for own, _, _ in tokens),
        "next_best": tuple(other for _, other, _ in tokens),
        "next_best_log_probs": tuple(score for _, _, score in tokens),
    }


def _shown(ids: Sequence[int]) -> str:
    return f"{list(ids[:8])}{' ...' if len(ids) > 8 else ''}"
