"""A typed gRPC client of the served model: generate, stream and measure. It is also a program that
measures latency.

    with Client("localhost:8001") as client:
        print(client.generate("def read_config(path):", max_tokens=32).text)
        for chunk in client.stream("def read_config(path):", temperature=0.8, seed=1):
            print(chunk.text, end="", flush=True)

    python validate_latency.py --url localhost:8001 --prompts prompts.jsonl

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
import dataclasses
import json
import struct
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

try:
    import grpc
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
    "Chunk",
    "Client",
    "ClientError",
    "Completion",
    "Options",
    "RequestRefused",
    "RequestTiming",
    "ServerUnavailable",
    "Statistics",
]

RESAMPLES = 2000
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
    """The server answered this request with an error, and keeps serving. The text is its own."""


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
    draft_ns: int | None = None
    verify_ns: int | None = None
    host_ns: int | None = None
    arrival_ns: int | None = None  # this and the next three are times of the server's clock
    first_scheduled_ns: int | None = None
    first_token_ns: int | None = None
    last_token_ns: int | None = None
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
        ]
        self._channel = grpc.insecure_channel(url, options=options)
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)
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

    def measure(
        self,
        prompts: Iterable[str],
        options: Options | None = None,
        *,
        concurrency: int = 1,
        **overrides: Any,
    ) -> list[RequestTiming]:
        """Stream and time every prompt, `concurrency` at a time in a closed loop.

        The results are in the order of the prompts.
        """
        all_options = dataclasses.replace(options or Options(), **overrides)
        self._model_interface()  # ask for it now, so that no request is timed with it
        if concurrency == 1:
            return [self._time(prompt, all_options) for prompt in prompts]
        with ThreadPoolExecutor(concurrency) as pool:
            return list(pool.map(lambda prompt: self._time(prompt, all_options), prompts))

    def _time(self, prompt: str, options: Options) -> RequestTiming:
        sent_ns = time.monotonic_ns()
        return timing(prompt, list(self._call(prompt, options, "", streaming=True)), sent_ns)

    def _model_interface(self) -> ModelInterface:
        if self._interface is None:
            try:
                model = self.model or MODELS[0 if self._is_ready(MODELS[0]) else -1]
                answer = self._stub.ModelConfig(
                    service_pb2.ModelConfigRequest(name=model), timeout=self.timeout_s
                )
            except grpc.RpcError as error:
                raise self._translated(error) from error
            self.model, self._interface = model, ModelInterface.of(answer.config)
        return self._interface

    def _call(
        self, prompt: str, options: Options, request_id: str, *, streaming: bool
    ) -> Iterator[Chunk]:
        interface = self._model_interface()
        request = interface.request(
            self.model or MODELS[-1], prompt, options, request_id, streaming=streaming
        )
        call = self._stub.ModelStreamInfer(iter([request]), timeout=self.timeout_s)
        text = ""
        chunk: Chunk | None = None
        try:
            for response in call:
                received_ns = time.monotonic_ns()
                if response.error_message:
                    raise self._refused(response.error_message)
                values = decode(response.infer_response)
                if not values:
                    continue  # Triton's empty last response of a stream
                new_text = values["text_output"][0].decode("utf-8")
                if interface.cumulative and streaming:
                    new_text = new_text[len(text) :]
                text += new_text
                chunk = read_chunk(new_text, values, received_ns)
                yield chunk
        except grpc.RpcError as error:
            raise self._translated(error) from error
        finally:
            call.cancel()  # does nothing if the call is over
        if chunk is None:
            raise ServerUnavailable(f"{self.url}: the stream ended without an answer")
        # Every request asks for the finish reason, if the model has that input (see ALWAYS).
        if chunk.finish_reason is None and "return_finish_reason" in interface.inputs:
            raise ServerUnavailable(f"{self.url}: the stream ended before the answer was complete")

    def _translated(self, error: grpc.RpcError) -> ClientError:
        code, details = error.code(), error.details()
        if code == grpc.StatusCode.DEADLINE_EXCEEDED:
            return ServerUnavailable(f"{self.url}: no answer within {self.timeout_s:g} s")
        if code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED):
            return ServerUnavailable(
                f"{self.url}: the server cannot be reached or went away ({details})"
            )
        # gRPC on this side uses this word for an answer that it cannot read.
        if code == grpc.StatusCode.INTERNAL and "deserializing" in str(details):
            return ServerUnavailable(f"{self.url}: the answer is not one of Triton ({details})")
        return self._refused(str(details))

    def _refused(self, message: str) -> ClientError:
        # Once the process has died, Triton answers every request with this message.
        if message.startswith("Stub process") and "is not healthy" in message:
            return ServerUnavailable(f"{self.url}: the model's process has died ({message})")
        return RequestRefused(message)


@dataclass(frozen=True, slots=True)
class ModelInterface:
    """The interface of the served model.

    inputs: Triton's type of every input, by name. cumulative: whether a chunk repeats the text
    before it. batched: whether tensors begin with a batch dimension of 1.
    """

    inputs: dict[str, str]
    cumulative: bool
    batched: bool = False

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
        return cls(inputs, cumulative, config.max_batch_size > 0)

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

    def first(name: str) -> Any:
        return values[name][0] if name in values else None

    def word(name: str) -> str | None:
        value = first(name)
        text = value.decode("utf-8") if isinstance(value, bytes) else value
        return None if text is None or text == "None" else text

    finish_reason = word("finish_reason")
    return Chunk(
        text=text,
        token_ids=_counts(values, "output_ids") or (),
        output_tokens=_count(values, "num_output_tokens"),
        received_ns=received_ns,
        finish_reason=finish_reason,
        stop_reason=word("stop_reason"),
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
        draft_ns=_count(values, "draft_time_ns"),
        verify_ns=_count(values, "verify_time_ns"),
        host_ns=_count(values, "host_time_ns"),
        arrival_ns=_count(values, "arrival_time_ns"),
        first_scheduled_ns=_count(values, "first_scheduled_time_ns"),
        first_token_ns=_count(values, "first_token_time_ns"),
        last_token_ns=_count(values, "last_token_time_ns"),
        log_probs=_numbers(values, "output_log_probs"),
        next_best=_counts(values, "next_best_ids"),
        next_best_log_probs=_numbers(values, "next_best_log_probs"),
    )


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


def summarise(timings: Sequence[RequestTiming]) -> dict[str, float | None]:
    """The figures of requests that ran one at a time: output tokens per second of request time,
    percentiles in ms, acceptance.
    """

    def percentile(
        values: Sequence[int], q: float, weights: Sequence[int] | None = None
    ) -> float | None:
        if not values:
            return None
        expanded = np.repeat(values, weights) if weights is not None else np.asarray(values)
        return float(np.percentile(expanded, q)) / 1e6

    done = [timing for timing in timings if _is_counted(timing)]
    itl = [sample for timing in done for sample in timing.itl]
    samples: dict[str, tuple[list[int], list[int] | None]] = {
        "ttft": ([t.ttft_ns for t in done if t.ttft_ns is not None], None),
        "tpot": ([t.tpot_ns for t in done if t.tpot_ns is not None], None),
        "itl": ([gap for gap, _ in itl], [tokens for _, tokens in itl]),
        "icl": ([gap for t in done for gap in t.icl_ns], None),
        "e2e": ([t.e2e_ns for t in done if t.e2e_ns is not None], None),
    }
    tokens, elapsed = sum(t.output_tokens or 0 for t in done), sum(t.e2e_ns or 0 for t in done)
    drafted, accepted = (
        sum(getattr(t.statistics, name) or 0 for t in done) for name in ("drafted", "accepted")
    )
    steps = sum(t.statistics.verify_steps or 0 for t in done)
    figures: dict[str, float | None] = {"requests": len(done), "output_tokens": tokens}
    figures["tokens_per_s"] = tokens / elapsed * 1e9 if elapsed else None
    for name, (values, weights) in samples.items():
        for q in (50, 90):
            figures[f"{name}_p{q}_ms"] = percentile(values, q, weights)
    figures["acceptance_rate"] = accepted / drafted if drafted else None
    figures["acceptance_length"] = 1 + accepted / steps if steps else None
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
                raise SystemExit(f"{path}:{number}: no `prompt` string, or an empty one")
            prompts.append(prompt)
        else:
            prompts.append(line.rstrip("\r"))
    if not prompts:
        raise SystemExit(f"{path}: no prompts")
    return prompts


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=(
            "Measure a served model: speculative and plain decoding in turn, one request at a time."
        )
    )
    parser.add_argument(
        "--url", default="localhost:8001", help="host:port of Triton's gRPC endpoint"
    )
    parser.add_argument(
        "--model", help="default: tensorrt_llm_bls if the server has it, else tensorrt_llm"
    )
    parser.add_argument(
        "--prompts",
        type=Path,
        required=True,
        help="JSON Lines with a `prompt` per line, or plain text with a prompt per line",
    )
    parser.add_argument("--max-prompts", type=int, default=32)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    args = parser.parse_args(arguments)
    prompts = read_prompts(args.prompts)[: args.max_prompts]
    rounds: dict[str, list[list[RequestTiming]]] = {"plain": [], "speculative": []}
    num_draft_tokens = {"plain": 0, "speculative": None}
    try:
        with Client(args.url, model=args.model) as client:
            options = Options(max_tokens=args.max_tokens, temperature=args.temperature)
            client.measure(prompts[:2], options)
            for number in range(args.rounds):
                for timings in rounds.values():
                    timings.append([])
                for prompt in prompts:
                    # The arms take turns in going first.
                    for arm in list(rounds)[:: 1 if number % 2 == 0 else -1]:
                        rounds[arm][-1] += client.measure(
                            [prompt], options, num_draft_tokens=num_draft_tokens[arm]
                        )
    except ClientError as error:
        print(error, file=sys.stderr)
        return 3
    figures = {
        arm: summarise([timing for row in timings for timing in row])
        for arm, timings in rounds.items()
    }
    ratio = speedup(rounds["plain"], rounds["speculative"])
    if args.json:
        estimate, interval = (None, None) if ratio is None else (ratio[0], ratio[1:])
        print(json.dumps({**figures, "speedup": estimate, "speedup_interval": interval}))
        return 0
    print(f"{'':20}{'plain':>14}{'speculative':>14}")
    for name in figures["plain"]:
        cells = [
            (
                "-"
                if (value := figures[arm][name]) is None
                else f"{value:,.3f}".rstrip("0").rstrip(".")
            )
            for arm in rounds
        ]
        print(f"{name:20}{cells[0]:>14}{cells[1]:>14}")
    sample = f"over {len(prompts)} prompts x {args.rounds} rounds, one request at a time"
    if ratio is None:
        print("no speedup: one arm has no output")
    else:
        print(f"speedup {ratio[0]:.2f}x, 95% interval {ratio[1]:.2f} to {ratio[2]:.2f}, {sample}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
