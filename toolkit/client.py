"""A typed gRPC client of the served model: generate, stream and measure. It is also a program that
measures latency.

    with Client("localhost:8001") as client:
        print(client.generate("def read_config(path):", max_tokens=32).text)
        for chunk in client.stream("def read_config(path):", temperature=0.8, seed=1):
            print(chunk.text, end="", flush=True)

    python validate_latency.py --url localhost:8001 --prompts prompts.jsonl --gate "ttft_p90<=200"

This file imports nothing of the toolkit, because it is shipped alone, as `validate_latency.py`
beside a repository. It needs `tritonclient[grpc]` and numpy. It asks the server which tensors the
model has and what a chunk of text holds, so it also works with TensorRT-LLM's own `llmapi` model,
as far as that model has the inputs. Every request has its own gRPC stream, so it can be cancelled
alone.

Times are integer nanoseconds of this process's monotonic clock. The server counts the tokens; they
are never guessed from chunks.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import re
import struct
import sys
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

try:
    import grpc
    import grpc.experimental
    import numpy as np
    from tritonclient.grpc import service_pb2, service_pb2_grpc
except (ImportError, RuntimeError) as missing:  # RuntimeError: tritonclient without its gRPC part
    if __name__ == "__main__":
        sys.exit(
            f"{Path(__file__).name} needs tritonclient and numpy ({missing}): pip install"
            " 'tritonclient[grpc]' numpy"
        )
    raise

__all__ = [
    "RECONNECT_MS",
    "STREAM_END_S",
    "AnswerReader",
    "Chunk",
    "Client",
    "ClientError",
    "Completion",
    "ModelInterface",
    "Options",
    "RequestRefused",
    "RequestTiming",
    "ServerUnavailable",
    "Statistics",
    "looked_at",
    "refused",
    "translated",
]

RESAMPLES = 2000
# How long a server that has answered may take to end the stream. Triton keeps a request for ever
# whose client hangs up in between (seen with 24.10: 12 KB and what the client sent).
STREAM_END_S = 1.0
# What the error of one of our models begins with.
OUTCOME = re.compile(r"\[(?P<outcome>refused|overloaded|deadline|cancelled|error)\] ")
# gRPC waits up to two minutes before it looks again for a server that went away.
RECONNECT_MS = 1000
MAX_PORT = 65535  # gRPC wraps a larger number around, and would call another server

# The input tensor of every option.
TENSORS = {
    "max_tokens": "sampling_param_max_tokens",
    "temperature": "sampling_param_temperature",
    "top_k": "sampling_param_top_k",
    "top_p": "sampling_param_top_p",
    "frequency_penalty": "sampling_param_frequency_penalty",
    "presence_penalty": "sampling_param_presence_penalty",
    "seed": "sampling_param_seed",
    "stop": "sampling_param_stop",
    "num_draft_tokens": "num_draft_tokens",
    "acceptance": "acceptance",
    "timeout_ms": "timeout_ms",
    "cache_salt": "cache_salt",
    "log_probs": "return_log_probs",
}
# TensorRT-LLM's `ensemble` and `tensorrt_llm_bls` templates name these tensors without the prefix,
# or as listed here.
PREFIX = "sampling_param_"
SPELLINGS = {
    "sampling_param_stop": "stop_words",
    "streaming": "stream",
    "sampling_param_exclude_input_from_output": "exclude_input_in_output",
}
# Set to true in every request, if the model has the input.
ALWAYS = (
    "sampling_param_exclude_input_from_output",
    "sampling_param_return_perf_metrics",
    "return_finish_reason",
    "return_stop_reason",
    "return_token_ids",
    "return_num_input_tokens",
    "return_num_output_tokens",
    "return_speculation_stats",
)
# The model that clients call: the first in the bls layout, which has both, the second in llmapi.
MODELS = ("tensorrt_llm_bls", "tensorrt_llm")
NUMPY_TYPES: dict[str, Any] = {
    "BOOL": np.bool_,
    "INT32": np.int32,
    "INT64": np.int64,
    "UINT64": np.uint64,
    "FP32": np.float32,
}


class ClientError(Exception):
    """The base of all errors between this client and the server."""


class RequestRefused(ClientError):
    """The server answered this request with an error, and keeps serving. The text is its own.

    outcome: what the served model calls it, `refused` if the request is at fault; None: it does not
    say.
    """

    def __init__(self, message: str, outcome: str | None = None) -> None:
        super().__init__(message)
        self.outcome = outcome


class ServerUnavailable(ClientError):
    """The server cannot be reached, went away, or did not answer within the client's timeout."""


@dataclass(frozen=True, slots=True)
class Options:
    """The options of a request; None leaves the choice to the server.

    num_draft_tokens 0 decodes plainly; temperature 0 is greedy.
    """

    max_tokens: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    seed: int | None = None
    stop: tuple[str, ...] | None = None
    num_draft_tokens: int | None = None
    acceptance: str | None = None
    timeout_ms: int | None = None
    cache_salt: str | None = None
    log_probs: bool | None = None  # of the output tokens, with the last chunk's statistics


@dataclass(frozen=True, slots=True)
class Statistics:
    """The server's figures of one request; None if the server does not give the figure.

    The last three have one entry per output token.
    """

    input_tokens: int | None = None
    output_tokens: int | None = None
    drafted: int | None = None
    accepted: int | None = None
    verify_steps: int | None = None
    drafted_by_position: tuple[int, ...] | None = None
    accepted_by_position: tuple[int, ...] | None = None
    # Why the verify steps had the draft length that they had.
    steps_by_reason: dict[str, int] | None = None
    draft_len_changes: int | None = None
    draft_probes: int | None = None
    draft_ns: int | None = None
    verify_ns: int | None = None
    host_ns: int | None = None
    arrival_ns: int | None = None  # this and the next three are times of the server's clock
    first_scheduled_ns: int | None = None
    first_token_ns: int | None = None
    last_token_ns: int | None = None
    reused_blocks: int | None = None  # KV-cache blocks of the prompt that an earlier one left
    draft_failure: str | None = None  # why the request went on without its draft
    log_probs: tuple[float, ...] | None = None  # of the token itself
    next_best: tuple[int, ...] | None = None  # the likeliest of the other tokens
    next_best_log_probs: tuple[float, ...] | None = None

    @property
    def acceptance_rate(self) -> float | None:
        """accepted tokens / drafted tokens."""
        if self.accepted is None or not self.drafted:
            return None
        return self.accepted / self.drafted

    @property
    def acceptance_length(self) -> float | None:
        """1 + accepted tokens / verify steps; the 1 is the recovered or bonus token of a step."""
        if self.accepted is None or not self.verify_steps:
            return None
        return 1 + self.accepted / self.verify_steps

    @property
    def acceptance_alpha(self) -> float | None:
        """accepted tokens / draft tokens that were looked at. Of drafts of any length, while longer
        ones lower the rate; None if the server does not count by position.
        """
        accepted_at = self.accepted_by_position or ()
        looked = looked_at(self.drafted_by_position or (), accepted_at)
        return sum(accepted_at) / looked if looked else None


def looked_at(drafted_at: Sequence[int], accepted_at: Sequence[int]) -> float:
    """How many draft tokens were looked at: those of which all tokens before them in their block
    were accepted. This share of blocks is taken to be the same for blocks of every length.

    drafted_at, accepted_at: tokens by position.
    """
    looked, reached = 0.0, 1.0  # the share of blocks whose tokens so far were all accepted
    for drafted, accepted in zip(drafted_at, accepted_at, strict=False):
        looked += drafted * reached
        reached = accepted / drafted if drafted else 0.0
    return looked


@dataclass(frozen=True, slots=True)
class Chunk:
    """What one response added.

    text and token_ids are only the new ones; output_tokens counts all of the request so far. The
    last chunk of a request has finish_reason and statistics. text may be empty while the server
    holds back a partial character or the beginning of a stop word.
    """

    text: str
    token_ids: tuple[int, ...]
    output_tokens: int | None
    received_ns: int
    finish_reason: str | None = None
    stop_reason: str | None = None
    statistics: Statistics | None = None


@dataclass(frozen=True, slots=True)
class Completion:
    """One whole answer, without the prompt."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str | None
    stop_reason: str | None
    statistics: Statistics


@dataclass(frozen=True, slots=True)
class RequestTiming:
    """One measured request.

    chunks: (received_ns, number of new tokens) of every response that carried tokens, in order. If
    the server does not count tokens, there is a chunk for every response with text, and its number
    is None. due_ns: when an open loop was due to send the request, and the start of its times; None
    in a closed loop, whose times start when the request is sent.
    """

    prompt: str
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str | None
    sent_ns: int
    chunks: tuple[tuple[int, int | None], ...]
    statistics: Statistics
    due_ns: int | None = None

    @property
    def start_ns(self) -> int:
        return self.sent_ns if self.due_ns is None else self.due_ns

    @property
    def output_tokens(self) -> int | None:
        return self.statistics.output_tokens

    @property
    def ttft_ns(self) -> int | None:
        """First tokens received - request sent (closed loop) or due to be sent (open loop)."""
        return self.chunks[0][0] - self.start_ns if self.chunks else None

    @property
    def e2e_ns(self) -> int | None:
        """Last token received - request sent (closed loop) or due to be sent (open loop)."""
        return self.chunks[-1][0] - self.start_ns if self.chunks else None

    @property
    def tpot_ns(self) -> int | None:
        """(last token - first token) / (output_tokens - 1); None if there are fewer than two."""
        if self.output_tokens is None or self.output_tokens < 2 or not self.chunks:
            return None
        return round((self.chunks[-1][0] - self.chunks[0][0]) / (self.output_tokens - 1))

    @property
    def icl_ns(self) -> tuple[int, ...]:
        """Gaps between chunks, as a reader sees them."""
        return tuple(
            later - earlier
            for (earlier, _), (later, _) in zip(self.chunks, self.chunks[1:], strict=False)
        )

    @property
    def itl(self) -> tuple[tuple[int, int], ...]:
        """(gap / tokens of the later chunk in ns, number of these tokens) for every gap.

        The second is the weight of the first in a percentile. Empty if the server did not count the
        tokens of a chunk.
        """
        gaps = zip(self.icl_ns, self.chunks[1:], strict=True)
        return tuple(
            (round(gap / tokens), tokens) for gap, (_, tokens) in gaps if tokens is not None
        )


def timing(
    prompt: str, received: Sequence[Chunk], sent_ns: int, due_ns: int | None = None
) -> RequestTiming:
    """The measurements of a whole answer.

    The server counts the tokens. If it does not, every chunk with text counts as a chunk.
    """
    has_counts = any(chunk.output_tokens is not None for chunk in received)
    chunks: list[tuple[int, int | None]] = []
    tokens_before = 0
    for chunk in received:
        if chunk.output_tokens is not None and chunk.output_tokens > tokens_before:
            chunks.append((chunk.received_ns, chunk.output_tokens - tokens_before))
            tokens_before = chunk.output_tokens
        elif not has_counts and chunk.text:
            chunks.append((chunk.received_ns, None))
    return RequestTiming(
        prompt=prompt,
        text="".join(chunk.text for chunk in received),
        token_ids=tuple(token for chunk in received for token in chunk.token_ids),
        finish_reason=received[-1].finish_reason,
        sent_ns=sent_ns,
        chunks=tuple(chunks),
        statistics=received[-1].statistics or Statistics(output_tokens=received[-1].output_tokens),
        due_ns=due_ns,
    )


class Client:
    """A connection to one served model. Close it, or use it in a `with`. Several threads may use it
    at once.

    model: None for `tensorrt_llm_bls` if the server has it, else `tensorrt_llm`. timeout_s: limit
    of every call, so that a hanging server does not hang its clients. It sets no deadline for the
    server; the option `timeout_ms` does.
    """

    def __init__(self, url: str, *, model: str | None = None, timeout_s: float = 300.0) -> None:
        self.url = url
        self.model = model
        self.timeout_s = timeout_s
        port = url.rsplit(":", 1)[-1]
        if port.isdecimal() and int(port) > MAX_PORT:
            raise ServerUnavailable(f"{url}: a port is at most {MAX_PORT}")
        is_local = url.rsplit(":", 1)[0] in ("localhost", "127.0.0.1", "[::1]")
        options = [
            ("grpc.max_receive_message_length", -1),
            *([("grpc.enable_http_proxy", 0)] if is_local else []),
            ("grpc.max_reconnect_backoff_ms", RECONNECT_MS),
            (grpc.experimental.ChannelOptions.SingleThreadedUnaryStream, 1),  # see `chunks`
        ]
        self._channel = grpc.insecure_channel(url, options=options)
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)
        # Triton's stream takes any number of requests. One of ours takes one, as a call does that
        # sends a single message.
        self._infer_whole = self._channel.unary_stream(
            "/inference.GRPCInferenceService/ModelStreamInfer",
            request_serializer=service_pb2.ModelInferRequest.SerializeToString,
            response_deserializer=service_pb2.ModelStreamInferResponse.FromString,
        )
        self._interface: ModelInterface | None = None

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection and cancel the running requests."""
        self._channel.close()

    def ready(self) -> bool:
        """Whether the model can be called."""
        return any(self._is_ready(model) for model in ((self.model,) if self.model else MODELS))

    def _is_ready(self, model: str) -> bool:
        try:
            return bool(
                self._stub.ModelReady(
                    service_pb2.ModelReadyRequest(name=model), timeout=self.timeout_s
                ).ready
            )
        except grpc.RpcError:
            return False

    def generate(
        self, prompt: str, options: Options | None = None, *, request_id: str = "", **overrides: Any
    ) -> Completion:
        """Generate the whole completion. overrides: fields of Options.

        Raises RequestRefused, ServerUnavailable.
        """
        (chunk,) = self._call(
            prompt,
            dataclasses.replace(options or Options(), **overrides),
            request_id,
            streaming=False,
        )
        statistics = chunk.statistics or Statistics()
        return Completion(
            chunk.text, chunk.token_ids, chunk.finish_reason, chunk.stop_reason, statistics
        )

    def stream(
        self, prompt: str, options: Options | None = None, *, request_id: str = "", **overrides: Any
    ) -> Iterator[Chunk]:
        """Yield chunks as they arrive.

        Closing the iterator, or leaving its loop, cancels the request on the server. Raises
        RequestRefused, ServerUnavailable.
        """
        return self._call(
            prompt,
            dataclasses.replace(options or Options(), **overrides),
            request_id,
            streaming=True,
        )

    def chunks(self, prompt: str, options: Options | None = None) -> list[Chunk]:
        """As `stream`, read to its end.

        This thread waits for the answers itself, instead of for a second one that does, which saves
        a quarter of a chunk's processor time. A stream that may be left is no such call: gRPC
        (1.85) never frees one that is cancelled, 18 KB.
        """
        interface = self.interface()
        request = interface.request(
            self.model or MODELS[-1], prompt, options or Options(), "", streaming=True
        )
        reader = AnswerReader(interface, self.url, streaming=True)
        chunks: list[Chunk] = []
        refusal: ClientError | None = None
        try:
            for response in self._infer_whole(request, timeout=self.timeout_s):
                if refusal is not None:
                    continue
                try:
                    chunk = reader.read(response)
                except ClientError as error:
                    refusal = error
                    continue
                if chunk is not None:
                    chunks.append(chunk)
        except grpc.RpcError as error:
            if refusal is None:
                raise translated(error, self.url, self.timeout_s) from error
        if refusal is not None:
            raise refusal
        reader.check_complete()
        return chunks

    def answer(self, prompt: str, options: Options | None = None) -> Iterator[Chunk]:
        """As `stream`; a model that does not stream answers in one chunk."""
        streaming = self.interface().streams
        return self._call(prompt, options or Options(), "", streaming=streaming)

    def measure(
        self,
        prompts: Iterable[str],
        options: Options | None = None,
        *,
        concurrency: int = 1,
        **overrides: Any,
    ) -> list[RequestTiming]:
        """Stream and time every prompt, `concurrency` at a time in a closed loop.

        The results are in the order of the prompts. No request begins with what an earlier one left
        in a KV cache, where the model has the input cache_salt and the options do not state one.
        """
        all_options = dataclasses.replace(options or Options(), **overrides)
        self.interface()  # ask for it now, so that no request is timed with it
        if concurrency == 1:
            return [self._time(prompt, all_options) for prompt in prompts]
        with ThreadPoolExecutor(concurrency) as pool:
            return list(pool.map(lambda prompt: self._time(prompt, all_options), prompts))

    def apart(self, options: Options) -> Options:
        """The options of a request that shares its KV cache with no other, if the model has the
        input cache_salt. One that is stated stays.
        """
        if options.cache_salt is not None or "cache_salt" not in self.interface().inputs:
            return options
        return dataclasses.replace(options, cache_salt=uuid.uuid4().hex)

    def _time(self, prompt: str, options: Options) -> RequestTiming:
        options = self.apart(options)
        sent_ns = time.monotonic_ns()
        return timing(prompt, self.chunks(prompt, options), sent_ns)

    def interface(self) -> ModelInterface:
        """What the served model is like. Asks once. Raises RequestRefused, ServerUnavailable."""
        if self._interface is None:
            try:
                model = self.model or MODELS[0 if self._is_ready(MODELS[0]) else -1]
                answer = self._stub.ModelConfig(
                    service_pb2.ModelConfigRequest(name=model), timeout=self.timeout_s
                )
            except grpc.RpcError as error:
                raise translated(error, self.url, self.timeout_s) from error
            self.model, self._interface = model, ModelInterface.of(answer.config)
        return self._interface

    def _call(
        self, prompt: str, options: Options, request_id: str, *, streaming: bool
    ) -> Iterator[Chunk]:
        interface = self.interface()
        request = interface.request(
            self.model or MODELS[-1], prompt, options, request_id, streaming=streaming
        )
        call = self._stub.ModelStreamInfer(iter([request]), timeout=self.timeout_s)
        reader = AnswerReader(interface, self.url, streaming=streaming)
        try:
            for response in call:
                chunk = reader.read(response)
                if chunk is not None:
                    yield chunk
        except grpc.RpcError as error:
            raise translated(error, self.url, self.timeout_s) from error
        finally:
            if reader.has_ended:  # what went wrong afterwards is of no interest
                with contextlib.suppress(grpc.FutureTimeoutError, grpc.FutureCancelledError):
                    call.exception(timeout=STREAM_END_S)
            call.cancel()  # does nothing if the call is over
        reader.check_complete()


class AnswerReader:
    """Makes chunks of the responses to one request. values: the outputs of the latest one."""

    def __init__(self, interface: ModelInterface, url: str, *, streaming: bool) -> None:
        self._interface, self._url = interface, url
        self._repeats = interface.cumulative and streaming
        self._characters = 0
        self._last: Chunk | None = None
        self.has_ended = False  # after an error, or the chunk with the finish reason
        self.values: dict[str, list[Any]] = {}

    def read(self, response: Any) -> Chunk | None:
        """The chunk of a ModelStreamInferResponse message; None for Triton's empty last one. Raises
        ClientError for an error.
        """
        received_ns = time.monotonic_ns()
        if response.error_message:
            self.has_ended = True
            raise refused(response.error_message, self._url)
        values = decode(response.infer_response)
        if not values:
            return None
        text = values["text_output"][0].decode("utf-8")
        if self._repeats:
            text = text[self._characters :]
        self._characters += len(text)
        self.values, self._last = values, read_chunk(text, values, received_ns)
        self.has_ended = self._last.finish_reason is not None
        return self._last

    def check_complete(self) -> None:
        """Raise ServerUnavailable if the answer has no end."""
        if self._last is None:
            raise ServerUnavailable(f"{self._url}: the stream ended without an answer")
        # Every request asks for the finish reason, if the model has that input (see ALWAYS).
        is_asked = "return_finish_reason" in self._interface.inputs
        if self._last.finish_reason is None and is_asked:
            raise ServerUnavailable(f"{self._url}: the stream ended before the answer was complete")


def translated(error: Any, url: str, timeout_s: float) -> ClientError:
    """The exception for a gRPC call that failed."""
    code, details = error.code(), error.details()
    if code == grpc.StatusCode.DEADLINE_EXCEEDED:
        return ServerUnavailable(f"{url}: no answer within {timeout_s:g} s")
    if code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED):
        return ServerUnavailable(f"{url}: the server cannot be reached or went away ({details})")
    # gRPC on this side uses this word for an answer that it cannot read.
    if code == grpc.StatusCode.INTERNAL and "deserializing" in str(details):
        return ServerUnavailable(f"{url}: the answer is not one of Triton ({details})")
    return refused(str(details), url)


def refused(message: str, url: str) -> ClientError:
    """The exception for an error that the server answered with."""
    outcome, message = _outcome_of(message)
    # Once the process has died, Triton's Python backend answers every request with the first
    # message, and the toolkit's own backend with the second. The layout bls passes on the answer of
    # the model that it called.
    is_passed_on = outcome == "error" and message.startswith("the model '")
    cause = message.partition("failed: ")[2] if is_passed_on else message
    is_dead = cause.startswith("Stub process") and "is not healthy" in cause
    if is_dead or cause.startswith("the model's process "):
        is_said = message.startswith("the model's process ")
        said = message if is_said else f"the model's process has died ({message})"
        return ServerUnavailable(f"{url}: {said}")
    # It takes no more requests, and says so without a code.
    is_stopping = is_passed_on and cause.endswith("Server not ready")
    if is_stopping or "Server is stopping" in cause:
        return ServerUnavailable(f"{url}: the server is stopping ({message})")
    # Models are unloaded before the port closes.
    if cause.endswith("has no available versions"):
        return ServerUnavailable(f"{url}: the model is not loaded, or is stopping ({message})")
    return RequestRefused(message, outcome)


def _outcome_of(message: str) -> tuple[str | None, str]:
    """(outcome, the rest) of an error's text. Triton's own errors have no outcome."""
    match = OUTCOME.match(message)
    return (None, message) if match is None else (match["outcome"], message[match.end() :])


@dataclass(frozen=True, slots=True)
class ModelInterface:
    """The interface of the served model.

    inputs: Triton's type of every input, by name. cumulative: whether a chunk repeats the text
    before it. batched: whether tensors begin with a batch dimension of 1. streams: whether it
    answers in chunks; if not, a request that asks for them is refused.
    """

    inputs: dict[str, str]
    cumulative: bool
    batched: bool = False
    streams: bool = True

    @classmethod
    def of(cls, config: Any) -> ModelInterface:
        """Read the interface from Triton's ModelConfig message."""
        from tritonclient.grpc import model_config_pb2

        inputs = {
            tensor.name: model_config_pb2.DataType.Name(tensor.data_type).removeprefix("TYPE_")
            for tensor in config.input
        }
        if "streaming" in inputs:  # the llmapi template
            cumulative = config.parameters["stream_text"].string_value != "delta"
        else:
            cumulative = config.parameters["accumulate_tokens"].string_value.lower() == "true"
        streams = bool(config.model_transaction_policy.decoupled)
        return cls(inputs, cumulative, config.max_batch_size > 0, streams)

    def values(self, prompt: str, options: Options, *, streaming: bool) -> dict[str, Any]:
        """The inputs of a request, by the model's names for them.

        Raises RequestRefused if the model does not have an option.
        """
        values: dict[str, Any] = {"text_input": prompt}
        if (name := self._name_of("streaming")) is not None:
            values[name] = streaming
        for option, tensor in TENSORS.items():
            value = getattr(options, option)
            if value is None:
                continue
            if (name := self._name_of(tensor)) is None:
                raise RequestRefused(
                    f"the served model has no input {tensor!r}, so {option} cannot be set"
                )
            values[name] = value
        # TensorRT-LLM's engines are greedy at any temperature without top_k and top_p. A top_p of 1
        # keeps all tokens.
        is_unfiltered = not options.top_k and options.top_p is None
        top_p_name = self._name_of(TENSORS["top_p"])
        if (options.temperature or 0.0) > 0.0 and is_unfiltered and top_p_name is not None:
            values[top_p_name] = 1.0
        return values | {
            name: True for tensor in ALWAYS if (name := self._name_of(tensor)) is not None
        }

    def request(
        self, model: str, prompt: str, options: Options, request_id: str, *, streaming: bool
    ) -> Any:
        """Make the ModelInferRequest message.

        Raises RequestRefused if the model does not have an option, or if the input's type cannot
        hold its value.
        """
        request = service_pb2.ModelInferRequest(model_name=model, id=request_id)
        for name, value in self.values(prompt, options, streaming=streaming).items():
            items = list(value) if isinstance(value, (list, tuple)) else [value]
            dtype = "BYTES" if self.inputs[name] == "STRING" else self.inputs[name]
            request.inputs.add(
                name=name, datatype=dtype, shape=[1, len(items)] if self.batched else [len(items)]
            )
            try:
                request.raw_input_contents.append(_encode(items, self.inputs[name]))
            except (UnicodeEncodeError, OverflowError) as error:
                raise RequestRefused(f"{name} cannot be sent as {dtype}: {error}") from error
        return request

    def without(self, tensor: str) -> ModelInterface:
        """The same model for requests that do not use this input."""
        inputs = {name: dtype for name, dtype in self.inputs.items() if name != tensor}
        return dataclasses.replace(self, inputs=inputs)

    def _name_of(self, tensor: str) -> str | None:
        """The model's name for the tensor; None if the model does not have it."""
        names = (tensor, SPELLINGS.get(tensor, ""), tensor.removeprefix(PREFIX))
        return next((name for name in names if name in self.inputs), None)


def _encode(items: Sequence[Any], dtype: str) -> bytes:
    if dtype == "STRING":
        texts = [item if isinstance(item, bytes) else str(item).encode("utf-8") for item in items]
        return b"".join(struct.pack("<I", len(text)) + text for text in texts)
    # numpy < 2 would silently keep only the low bits of a number that does not fit.
    if dtype.removeprefix("U").startswith("INT"):
        limits = np.iinfo(NUMPY_TYPES[dtype])
        for item in items:
            if not limits.min <= item <= limits.max:
                raise OverflowError(f"{item} is not between {limits.min} and {limits.max}")
    return np.asarray(items, dtype=NUMPY_TYPES[dtype]).tobytes()


def decode(response: Any) -> dict[str, list[Any]]:
    """The outputs of a ModelInferResponse message, by name."""
    values: dict[str, list[Any]] = {}
    for output, raw in zip(response.outputs, response.raw_output_contents, strict=True):
        if output.datatype == "BYTES":
            values[output.name] = []
            offset = 0
            while offset < len(raw):
                (length,) = struct.unpack_from("<I", raw, offset)
                values[output.name].append(raw[offset + 4 : offset + 4 + length])
                offset += 4 + length
        else:
            values[output.name] = np.frombuffer(raw, dtype=NUMPY_TYPES[output.datatype]).tolist()
    return values


def read_chunk(text: str, values: dict[str, list[Any]], received_ns: int) -> Chunk:
    """Make a chunk of a response's outputs (name -> values); `text` is the new text.

    Raises TypeError if a count is not a number.
    """

    finish_reason = _word(values, "finish_reason")
    return Chunk(
        text=text,
        token_ids=_counts(values, "output_ids") or (),
        output_tokens=_count(values, "num_output_tokens"),
        received_ns=received_ns,
        finish_reason=finish_reason,
        stop_reason=_word(values, "stop_reason"),
        statistics=None if finish_reason is None else read_statistics(values),
    )


def read_statistics(values: dict[str, list[Any]]) -> Statistics:
    """The server's figures in the outputs of a request's last response.

    Raises TypeError if a count is not a number.
    """
    return Statistics(
        input_tokens=_count(values, "num_input_tokens"),
        output_tokens=_count(values, "num_output_tokens"),
        drafted=_count(values, "total_draft_tokens"),
        accepted=_count(values, "total_accepted_draft_tokens"),
        verify_steps=_count(values, "verify_steps"),
        drafted_by_position=_counts(values, "drafted_by_position"),
        accepted_by_position=_counts(values, "accepted_by_position"),
        steps_by_reason=_steps_by_reason(values),
        draft_len_changes=_count(values, "draft_len_changes"),
        draft_probes=_count(values, "draft_probes"),
        draft_ns=_count(values, "draft_time_ns"),
        verify_ns=_count(values, "verify_time_ns"),
        host_ns=_count(values, "host_time_ns"),
        arrival_ns=_count(values, "arrival_time_ns"),
        first_scheduled_ns=_count(values, "first_scheduled_time_ns"),
        first_token_ns=_count(values, "first_token_time_ns"),
        last_token_ns=_count(values, "last_token_time_ns"),
        # Not the figure of the layout bls, whose every step finds the text before it.
        reused_blocks=_count(values, "kv_cache_reused_block"),
        draft_failure=_word(values, "draft_failure"),
        log_probs=_numbers(values, "output_log_probs"),
        next_best=_counts(values, "next_best_ids"),
        next_best_log_probs=_numbers(values, "next_best_log_probs"),
    )


def _word(values: dict[str, list[Any]], name: str) -> str | None:
    """The text of an output; None if there is none, which models also write as "None"."""
    value = values[name][0] if values.get(name) else None
    text = value.decode("utf-8") if isinstance(value, bytes) else value
    return None if text is None or text == "None" else text


def _steps_by_reason(values: dict[str, list[Any]]) -> dict[str, int] | None:
    steps = _counts(values, "draft_len_reason_steps")
    if steps is None:
        return None
    reasons = [
        reason.decode("utf-8") if isinstance(reason, bytes) else str(reason)
        for reason in values.get("draft_len_reasons", [])
    ]
    return dict(zip(reasons, steps, strict=True))


def _count(values: dict[str, list[Any]], name: str) -> int | None:
    counts = _counts(values, name)
    return counts[0] if counts is not None else None


def _counts(values: dict[str, list[Any]], name: str) -> tuple[int, ...] | None:
    for value in values.get(name, ()):
        if not isinstance(value, (int, np.integer)):
            raise TypeError(f"{name} is {value!r}, not a whole number")
    return tuple(values[name]) if name in values else None


def _numbers(values: dict[str, list[Any]], name: str) -> tuple[float, ...] | None:
    for value in values.get(name, ()):
        if not isinstance(value, (int, float, np.integer, np.floating)):
            raise TypeError(f"{name} is {value!r}, not a number")
    return tuple(values[name]) if name in values else None


# The program.

PERCENTILES = (50, 90, 99)
ARMS = ("plain", "speculative")
GATE = re.compile(r"^\s*(?P<name>[a-z0-9_]+)\s*(?P<sign><=|>=)\s*(?P<limit>\d+(?:\.\d+)?)\s*$")
PASS, FAIL, INCONCLUSIVE = "PASS", "FAIL", "INCONCLUSIVE"
EXIT_CODES = {PASS: 0, FAIL: 1, INCONCLUSIVE: 4}
ONE_ARM = (
    "A request cannot switch speculation off here, so this is one arm. To compare, name a second"
    " server with --baseline, or --save a run of each and --compare them."
)


@dataclass(frozen=True, slots=True)
class Run:
    """Measured requests of one arm: rounds[round][prompt]. setting: what both arms of a comparison
    have to share. streamed: whether chunks were seen; if not, only whole answers were timed.
    """

    rounds: list[list[RequestTiming]]
    setting: dict[str, Any]
    streamed: bool

    @property
    def timings(self) -> list[RequestTiming]:
        return [timing for row in self.rounds for timing in row]


def summarise(timings: Sequence[RequestTiming], *, streamed: bool = True) -> dict[str, Any]:
    """The figures of requests that ran one at a time: output tokens per second of request time,
    percentiles in ms, acceptance. A figure that the server does not give is None.

    `too_few` names the percentiles that have fewer than 10 samples beyond them.
    """
    done = [timing for timing in timings if timing.chunks and timing.finish_reason is not None]
    itl = [sample for timing in done for sample in timing.itl]
    whole = [t.e2e_ns for t in done if t.e2e_ns is not None]
    samples: dict[str, list[int]] = {name: [] for name in ("ttft", "tpot", "itl", "icl")}
    if streamed:
        samples = {
            "ttft": [t.ttft_ns for t in done if t.ttft_ns is not None],
            "tpot": [t.tpot_ns for t in done if t.tpot_ns is not None],
            "itl": [gap for gap, tokens in itl for _ in range(tokens)],
            "icl": [gap for t in done for gap in t.icl_ns],
        }
    counted = [t for t in done if _is_counted(t)]
    tokens = sum(t.output_tokens or 0 for t in counted)
    elapsed = sum(t.e2e_ns or 0 for t in counted)
    drafted, accepted = (
        sum(getattr(t.statistics, name) or 0 for t in done) for name in ("drafted", "accepted")
    )
    steps = sum(t.statistics.verify_steps or 0 for t in done)
    figures: dict[str, Any] = {"requests": len(done), "output_tokens": tokens}
    figures["tokens_per_s"] = tokens / elapsed * 1e9 if elapsed else None
    too_few: list[str] = []
    for name, values in {**samples, "e2e": whole}.items():
        for q in PERCENTILES:
            key = f"{name}_p{q}_ms"
            figures[key] = float(np.percentile(values, q)) / 1e6 if values else None
            if values and len(values) * (100 - q) < 1000:
                too_few.append(key)
    figures["acceptance_rate"] = accepted / drafted if drafted else None
    figures["acceptance_length"] = 1 + accepted / steps if steps else None
    figures["too_few"] = too_few
    return figures


def _is_counted(timing: RequestTiming) -> bool:
    return timing.e2e_ns is not None and timing.output_tokens is not None


def speedup(
    plain: Sequence[Sequence[RequestTiming]], speculative: Sequence[Sequence[RequestTiming]]
) -> tuple[float, float, float] | None:
    """(estimate, low, high): speculative over plain tokens/s, and the ends of its 95 % interval.

    None if an arm has no output. Both arms are [round][prompt], with the same prompts in the same
    order. As for the interval in a build's report, prompts and rounds are drawn independently with
    replacement and crossed, so that neither a lucky prompt nor a quiet round decides the figure.
    """
    if not plain or not plain[0]:
        return None

    def counts(arm: Sequence[Sequence[RequestTiming]]) -> Any:
        """Tokens and times of every request: [2, rounds, prompts]."""
        done = [
            [(t.output_tokens, t.e2e_ns) if _is_counted(t) else (0, 0) for t in row] for row in arm
        ]
        return np.moveaxis(np.asarray(done, dtype=np.float64), -1, 0)

    sums = np.concatenate([counts(speculative), counts(plain)])
    total = sums.sum(axis=(1, 2))
    if not total.all():
        return None
    generator = np.random.default_rng(0)
    rounds, prompts = (
        generator.multinomial(count, np.full(count, 1 / count), size=RESAMPLES)
        for count in sums.shape[1:]
    )
    drawn = np.einsum("br,krp,bp->kb", rounds, sums, prompts, optimize=True)
    # In a resample, all prompts may be failed ones, and all sums 0.
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = (drawn[0] / drawn[1]) / (drawn[2] / drawn[3])
    low, high = np.nanpercentile(ratios, [2.5, 97.5])
    return float((total[0] / total[1]) / (total[2] / total[3])), float(low), float(high)


def read_prompts(path: Path) -> list[str]:
    """Read prompts from JSON Lines with a `prompt` (or `text`) string, or from plain text with a
    prompt per line.

    Raises SystemExit with a message if the file cannot be read.
    """
    try:
        # Not splitlines(), which also splits at U+2028, and that may be part of a string.
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except OSError as error:
        raise SystemExit(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise SystemExit(f"{path}: is not UTF-8") from error
    prompts: list[str] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        if path.suffix in (".jsonl", ".json"):
            try:
                data = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise SystemExit(f"{path}:{number}: not JSON: {error}") from error
            prompt = data.get("prompt", data.get("text")) if isinstance(data, dict) else None
            if not isinstance(prompt, str) or not prompt:
                fault = "no `prompt` string, or an empty one"
                if isinstance(data, dict) and "messages" in data:
                    fault = "`messages` need a chat template; `toolkit bench` writes them as text"
                raise SystemExit(f"{path}:{number}: {fault}")
            prompts.append(prompt)
        else:
            prompts.append(line.rstrip("\r"))
    if not prompts:
        raise SystemExit(f"{path}: no prompts")
    return prompts


def save_run(run: Run, path: Path) -> None:
    """Raises SystemExit with a message if the file cannot be written."""
    try:
        path.write_text(json.dumps(dataclasses.asdict(run)) + "\n", encoding="utf-8")
    except OSError as error:
        raise SystemExit(f"{path}: cannot be written: {error.strerror}") from error


def read_run(path: Path) -> Run:
    """Raises SystemExit with a message if the file is not a run that `save_run` wrote."""

    def timing_of(row: dict[str, Any]) -> RequestTiming:
        statistics: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in row["statistics"].items()
        }
        chunks = tuple((at_ns, tokens) for at_ns, tokens in row["chunks"])
        fields = {"chunks": chunks, "token_ids": (), "statistics": Statistics(**statistics)}
        return RequestTiming(**{**row, **fields})

    try:
        saved = json.loads(path.read_text(encoding="utf-8"))
        rounds = [[timing_of(timing) for timing in row] for row in saved["rounds"]]
        return Run(rounds, dict(saved["setting"]), bool(saved["streamed"]))
    except OSError as error:
        raise SystemExit(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, TypeError, KeyError) as error:
        raise SystemExit(f"{path}: is not a run saved with --save ({error!r})") from error


Ask = Callable[[str], RequestTiming]


def asker(client: Client, options: Options) -> Ask:
    """Sends a prompt and times its answer, in chunks if the model streams."""

    def whole(prompt: str) -> RequestTiming:
        own_options = client.apart(options)
        sent_ns = time.monotonic_ns()
        answer = client.generate(prompt, own_options)
        chunks = ((time.monotonic_ns(), answer.statistics.output_tokens),)
        return RequestTiming(
            prompt=prompt,
            text=answer.text,
            token_ids=answer.token_ids,
            finish_reason=answer.finish_reason,
            sent_ns=sent_ns,
            chunks=chunks,
            statistics=answer.statistics,
        )

    if not client.interface().streams:
        return whole
    return lambda prompt: client.measure([prompt], options)[0]


def measure_arms(
    arms: Mapping[str, Ask], prompts: Sequence[str], rounds: int, setting: dict[str, Any]
) -> dict[str, Run]:
    """Send every prompt to every arm, round after round. The arms take turns in going first."""
    timings: dict[str, list[list[RequestTiming]]] = {arm: [] for arm in arms}
    for ask in arms.values():
        for prompt in prompts[:2]:
            ask(prompt)
    for number in range(rounds):
        for rows in timings.values():
            rows.append([])
        for prompt in prompts:
            for arm in list(arms)[:: 1 if number % 2 == 0 else -1]:
                timings[arm][-1].append(arms[arm](prompt))
    return {arm: Run(rows, setting, streamed=True) for arm, rows in timings.items()}


def measured(args: argparse.Namespace) -> dict[str, Run]:
    """The runs by arm: both arms where there are two, else `served`. Raises ClientError."""
    prompts = read_prompts(args.prompts)[: args.max_prompts]
    options = Options(max_tokens=args.max_tokens, temperature=args.temperature)
    setting = {
        "prompts": prompts,
        "max_tokens": args.max_tokens,
        "temperature": args.temperature,
        "rounds": args.rounds,
    }
    with Client(args.url, model=args.model) as client:
        streamed = client.interface().streams
        served = asker(client, options)
        if args.baseline is not None:
            with Client(args.baseline, model=args.model) as plain:
                streamed = streamed and plain.interface().streams
                arms = {"plain": asker(plain, options), "speculative": served}
                runs = measure_arms(arms, prompts, args.rounds, setting)
        elif args.save is None and "num_draft_tokens" in client.interface().inputs:
            plainly = asker(client, dataclasses.replace(options, num_draft_tokens=0))
            arms = {"plain": plainly, "speculative": served}
            runs = measure_arms(arms, prompts, args.rounds, setting)
        else:
            runs = measure_arms({"served": served}, prompts, args.rounds, setting)
    return {arm: dataclasses.replace(run, streamed=streamed) for arm, run in runs.items()}


def compared(files: Sequence[Path]) -> dict[str, Run]:
    """The runs of two files as arms. Raises SystemExit if they cannot be compared."""
    runs = dict(zip(ARMS, map(read_run, files), strict=True))
    plain, speculative = runs.values()
    for name, value in plain.setting.items():
        if speculative.setting.get(name) != value:
            raise SystemExit(f"{files[1]}: measured with other {name} than {files[0]}")
    return runs


def judged(
    gates: Sequence[tuple[str, str, float]],
    figures: Mapping[str, Any],
    ratio: tuple[float, float, float] | None,
) -> list[tuple[str, str]]:
    """(outcome, why) of every limit: PASS, FAIL or INCONCLUSIVE. figures: of the last arm."""
    results = []
    for name, sign, limit in gates:
        low = high = figures.get(key := _figure_name(name))
        what = "not measured"
        if name == "speed" and ratio is not None:
            what, low, high = f"{ratio[0]:.2f}x, {ratio[1]:.2f} to {ratio[2]:.2f}", *ratio[1:]
        elif low is not None:
            what = f"{low:.3f}".rstrip("0").rstrip(".")
        if low is None or high is None:
            result = FAIL
        elif key in figures["too_few"]:
            result, what = INCONCLUSIVE, f"{what}, of too few requests: raise --rounds"
        else:
            result = _outcome([_meets(end, sign, limit) for end in (low, high)])
        results.append((result, f"{name}{sign}{limit:g}: {what}"))
    return results


def _meets(value: float, sign: str, limit: float) -> bool:
    return value >= limit if sign == ">=" else value <= limit


def _outcome(ends: Sequence[bool]) -> str:
    """Of an interval whose ends meet the limit or not."""
    if all(ends):
        return PASS
    return INCONCLUSIVE if any(ends) else FAIL


def _verdict(outcomes: Sequence[str]) -> str:
    if FAIL in outcomes:
        return FAIL
    return INCONCLUSIVE if INCONCLUSIVE in outcomes else PASS


def _figure_name(gate: str) -> str:
    """The figure that a limit is about; limits are spelled as those of `toolkit bench`."""
    return f"{gate}_ms" if re.fullmatch(r"[a-z0-9]+_p\d+", gate) else gate


def parse_gate(text: str) -> tuple[str, str, float]:
    known = [f"{name}_p{q}" for name in ("ttft", "tpot", "itl", "icl", "e2e") for q in PERCENTILES]
    known += ["tokens_per_s", "acceptance_rate", "acceptance_length", "speed"]
    match = GATE.match(text)
    if match is None or match["name"] not in known:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not NAME<=NUMBER or NAME>=NUMBER with one of: {', '.join(known)}"
        )
    return match["name"], match["sign"], float(match["limit"])


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=(
            "Measure a served model, one request at a time: speculative and plain decoding in turn"
            " where a request can switch speculation off, else with a second server or a second"
            " run. Exit codes: 0 every limit is met, 1 one is missed, 2 wrong arguments, 3 the"
            " server failed, 4 too little was measured to say."
        )
    )
    parser.add_argument(
        "--url", default="localhost:8001", help="host:port of Triton's gRPC endpoint"
    )
    parser.add_argument(
        "--baseline", metavar="URL", help="a second endpoint, which decodes plainly"
    )
    parser.add_argument(
        "--save", type=Path, metavar="FILE", help="measure what --url serves, and save the run"
    )
    parser.add_argument(
        "--compare",
        type=Path,
        nargs=2,
        metavar=("PLAIN", "SPECULATIVE"),
        help="compare two saved runs; measures nothing",
    )
    parser.add_argument(
        "--gate",
        type=parse_gate,
        action="append",
        default=[],
        metavar="LIMIT",
        help="a limit to meet, in ms: ttft_p90<=200, speed>=1.2, tokens_per_s>=100; repeatable",
    )
    parser.add_argument(
        "--model", help="default: tensorrt_llm_bls if the server has it, else tensorrt_llm"
    )
    parser.add_argument(
        "--prompts",
        type=Path,
        help="JSON Lines with a `prompt` per line, or plain text with a prompt per line",
    )
    parser.add_argument("--max-prompts", type=int, default=32)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    args = parser.parse_args(arguments)
    if (args.prompts is None) == (args.compare is None):
        parser.error("give either --prompts, to measure, or --compare")
    if args.baseline is not None and args.save is not None:
        parser.error("--save keeps one arm, and --baseline measures two")
    return args


def print_table(runs: Mapping[str, Run], figures: Mapping[str, Mapping[str, Any]]) -> None:
    print(" " * 20 + "".join(f"{arm:>15}" for arm in runs))
    marks = False
    for name in next(iter(figures.values())):
        if name == "too_few":
            continue
        line = f"{name:20}"
        for arm in runs:
            value, is_few = figures[arm][name], name in figures[arm]["too_few"]
            shown = "-" if value is None else f"{value:,.3f}".rstrip("0").rstrip(".")
            line += f"{shown:>14}{'*' if is_few else ' '}"
            marks = marks or is_few
        print(line.rstrip())
    if marks:
        print("* fewer than 10 samples are beyond it: raise --rounds or --max-prompts")
    if not all(run.streamed for run in runs.values()):
        print("The model does not stream (triton.decoupled: false): only whole answers are timed.")


def main(arguments: Sequence[str] | None = None) -> int:
    args = parsed(arguments)
    try:
        runs = compared(args.compare) if args.compare is not None else measured(args)
    except ClientError as error:
        print(error, file=sys.stderr)
        return 3
    if args.save is not None:
        save_run(runs["served"], args.save)
    figures = {arm: summarise(run.timings, streamed=run.streamed) for arm, run in runs.items()}
    has_two = set(runs) == set(ARMS)
    ratio = speedup(runs["plain"].rounds, runs["speculative"].rounds) if has_two else None
    gates = judged(args.gate, list(figures.values())[-1], ratio)
    verdict = _verdict([result for result, _ in gates])
    if args.json:
        estimate, interval = (None, None) if ratio is None else (ratio[0], ratio[1:])
        speed = {"speedup": estimate, "speedup_interval": interval} if has_two else {}
        print(json.dumps({**figures, **speed, "gates": [f"{a} {b}" for a, b in gates]}))
        return EXIT_CODES[verdict]
    print_table(runs, figures)
    setting = next(iter(runs.values())).setting
    sample = (
        f"over {len(setting['prompts'])} prompts x {setting['rounds']} rounds, one request at a"
        " time"
    )
    if ratio is not None:
        print(f"speedup {ratio[0]:.2f}x, 95% interval {ratio[1]:.2f} to {ratio[2]:.2f}, {sample}")
    elif has_two:
        print("no speedup: one arm has no output, or its tokens are not counted")
    elif args.save is None:
        print(ONE_ARM)
    if args.compare is not None:
        print("The arms ran one after the other: a drift of the machine is in the ratio.")
    for result, why in gates:
        print(f"{result:13}{why}")
    return EXIT_CODES[verdict]


if __name__ == "__main__":
    sys.exit(main())
