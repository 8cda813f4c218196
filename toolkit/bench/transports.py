"""Asynchronous clients of any streaming endpoint: Triton over gRPC or `generate_stream`, OpenAI's
chat and text completions.

The one idea: nothing is encoded or decoded while time is measured. A request is encoded before it
is due. An answer is stored as bytes, each with its arrival time, and decoded after the run. So the
client's work per chunk is one read and one timestamp.

The number of tokens is what the server counts (num_output_tokens, token ids, `usage`), never the
number of chunks. If a server counts only the tokens of the whole answer, the tokens of a chunk are
unknown, and ITL is absent. If it counts nothing, TPOT and throughput are absent as well. An answer
raises BadAnswer if it breaks off, does not follow the protocol, or has counts that contradict each
other: such a request has failed, however fast it was.
"""

from __future__ import annotations

import asyncio
import dataclasses
import enum
import errno
import itertools
import json
import re
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias
from urllib.parse import SplitResult, urlsplit

from toolkit.bench.prompts import Conversation, Prompt, text_of
from toolkit.client import (
    MAX_PORT,
    MODELS,
    Chunk,
    ModelInterface,
    Options,
    RequestRefused,
    RequestTiming,
    Statistics,
    decode,
    read_chunk,
    read_statistics,
    timing,
)
from toolkit.errors import StageError, UsageError
from toolkit.openai_client import KEEP_ALIVE_S, speculation_counts, usage_counts
from toolkit.words import WireProtocol

if TYPE_CHECKING:
    import aiohttp

__all__ = [
    "PROTOCOLS",
    "BadAnswer",
    "Exchange",
    "Transport",
    "check_address",
    "connect",
    "read_exchange",
    "too_many_files",
]

PROTOCOLS: tuple[WireProtocol, ...] = (
    "triton-grpc",
    "triton-http",
    "openai-chat",
    "openai-completions",
)
ADDRESS = re.compile(r"^(?:\[[0-9a-fA-F:]+\]|[\w.-]+):(?P<port>\w+)$")
BODY_SHOWN = 300  # characters of an error page
EVENT_END = re.compile(rb"\r\n\r\n|\n\n|\r\r")
REFUSED_ARGUMENT = (400, 422)  # how servers refuse an unknown argument
# How servers refuse a chat with a model that has no chat template. vLLM 0.32 (renderers/hf.py) says
# with 400: "default chat template is no longer allowed, so you must provide a chat template".
REFUSED_CHAT = (400, 404)
CHAT_TEMPLATE = re.compile(r"chat[ _-]?template", re.IGNORECASE)
# The fields of vLLM's figures of a request that are read; vLLM calls them experimental, so an
# answer without one of them is an answer without counts.
SPECULATION_COUNTS = {
    "num_spec_steps",
    "num_draft_tokens",
    "num_accepted_draft_tokens",
    "acceptance_histogram",
}
PROBE = "Hello"
PROBE_TOKENS = 4
CONNECT_S = 10.0

Go: TypeAlias = asyncio.Event | None


class BadAnswer(Exception):
    """One request failed; the text says how. It counts as an error and adds no latency."""


@dataclass(slots=True)
class Exchange:
    """One request as it went over the network.

    frames: (arrival time, bytes) of every read. failure: why the answer is not complete. status: of
    HTTP, if the server refused the request with it.
    """

    sent_ns: int = 0
    ended_ns: int = 0
    frames: list[tuple[int, bytes]] = dataclasses.field(default_factory=list)
    failure: str | None = None
    status: int | None = None


class Transport(Protocol):
    """A connection to one model of one endpoint. note: what a reader should know about the choice
    of the protocol; None: nothing.
    """

    protocol: WireProtocol
    model: str
    address: str
    note: str | None

    def prepare(self, prompt: Prompt, options: Options) -> Any:
        """Encode the request. Raises UsageError for an option that this endpoint does not have."""
        ...

    async def exchange(self, prepared: Any, go: Go = None) -> Exchange:
        """Send the request and keep what arrives until the answer ends.

        Nothing that the endpoint does raises an exception. Raises StageError if this machine allows
        no more connections. go: if given, everything is prepared at once, and the request is sent
        when this event is set.
        """
        ...

    def chunks(self, exchange: Exchange) -> list[Chunk]:
        """Decode what arrived. Raises BadAnswer."""
        ...

    async def close(self) -> None: ...


def read_exchange(
    transport: Transport,
    prompt: str,
    exchange: Exchange,
    max_tokens: int | None,
    due_ns: int | None = None,
) -> RequestTiming:
    """The measurements of one exchange. Raises BadAnswer if it failed, broke off or contradicts
    itself.
    """
    if exchange.failure is not None:
        raise BadAnswer(exchange.failure)
    chunks = transport.chunks(exchange)
    if not chunks:
        raise BadAnswer("the stream ended without an answer")
    measured = timing(prompt, chunks, exchange.sent_ns, due_ns)
    _check_counts(chunks, measured, max_tokens)
    return measured


def _check_counts(chunks: Sequence[Chunk], measured: RequestTiming, max_tokens: int | None) -> None:
    """Raise BadAnswer for counts that cannot all be true, since every figure per token depends on
    them.
    """
    running = [chunk.output_tokens for chunk in chunks if chunk.output_tokens is not None]
    if any(later < earlier for earlier, later in itertools.pairwise(running)):
        raise BadAnswer(
            f"wrong counts: the number of output tokens went down, from {max(running)} to"
            f" {running[-1]}"
        )
    total = measured.output_tokens
    if total is None:
        return
    if running and running[-1] != total:
        raise BadAnswer(
            f"wrong counts: {running[-1]} tokens were streamed and {total} counted at the end"
        )
    if measured.token_ids and len(measured.token_ids) != total:
        raise BadAnswer(
            f"wrong counts: {len(measured.token_ids)} token ids came and {total} tokens were"
            " counted"
        )
    spoken = sum(bool(chunk.text) for chunk in chunks)
    if total < spoken:
        raise BadAnswer(
            f"wrong counts: {spoken} chunks had text and only {total} tokens were counted"
        )
    if max_tokens is not None and total > max_tokens:
        raise BadAnswer(f"wrong counts: {total} tokens where at most {max_tokens} were asked for")


async def connect(
    url: str,
    *,
    protocol: Literal["auto", WireProtocol] = "auto",
    model: str | None = None,
    timeout_s: float = 120.0,
    api_key: str | None = None,
) -> Transport:
    """Connect to the endpoint at url, and ask it which protocol it speaks and which inputs its
    model has.

    url: host:port or grpc://host:port is Triton's gRPC; http(s)://host:port is Triton's HTTP or an
    OpenAI-compatible server, whichever answers; .../v1 is OpenAI's chat, or its text completions if
    the server says that the model has no chat template; a path that ends in /completions is used
    unchanged. protocol: one of PROTOCOLS, if that guess is wrong. model: None
    stands for the model that clients call: the first of MODELS that Triton has ready, or the first
    that an OpenAI-compatible server lists. timeout_s: the limit of every request as a whole. Raises
    UsageError if url is not an address, StageError if the endpoint cannot be reached or does not
    speak the protocol.
    """
    check_address(url, protocol)
    bare = url.removeprefix("grpc://").rstrip("/")
    if ADDRESS.match(bare) and protocol in ("auto", "triton-grpc"):
        return await GrpcTransport.connect(bare, model, timeout_s)
    if ADDRESS.match(bare):
        url = f"http://{bare}"
    parts = urlsplit(url)
    session = _session(timeout_s, api_key)
    try:
        is_chosen = protocol != "auto" or parts.path.rstrip("/").endswith("/completions")
        if protocol == "auto":
            protocol = await _guess(session, url)
        if protocol == "triton-http":
            return await HttpTransport.connect(
                session, f"{parts.scheme}://{parts.netloc}", model, timeout_s
            )
        return await OpenAiTransport.connect(
            session, url, protocol, model, timeout_s, is_chosen=is_chosen
        )
    except BaseException:
        await session.close()
        raise


def check_address(url: str, protocol: str = "auto") -> None:
    """Raise UsageError if nothing can be reached at url, whoever listens there, or if there is no
    such protocol.
    """
    if protocol not in ("auto", *PROTOCOLS):
        raise UsageError(
            f"there is no protocol {protocol!r}", hint=f"known: auto, {', '.join(PROTOCOLS)}"
        )
    bare = ADDRESS.match(url.removeprefix("grpc://").rstrip("/"))
    if bare is not None:
        _check_port(bare["port"], url)
        return
    try:
        parts = urlsplit(url)
    except ValueError:  # such as an IPv6 address without its closing bracket
        parts = SplitResult("", "", "", "", "")
    if parts.scheme not in ("http", "https") or not parts.netloc:
        hint = (
            "Give host:port of Triton's gRPC endpoint, or the http:// address of Triton or of an"
            " OpenAI-compatible server."
        )
        raise UsageError("not an address of an endpoint", where=url, hint=hint)
    _, colon, port = parts.netloc.rpartition("@")[2].rpartition("]")[2].rpartition(":")
    if colon:
        _check_port(port, url)


def _check_port(port: str, url: str) -> None:
    if not (port.isascii() and port.isdecimal() and 0 < int(port) <= MAX_PORT):
        raise UsageError(
            f"{port!r} is not a port", where=url, hint=f"A port is a number from 1 to {MAX_PORT}."
        )


async def _guess(session: aiohttp.ClientSession, url: str) -> WireProtocol:
    path = urlsplit(url).path.rstrip("/")
    if path.endswith("/completions"):
        return "openai-chat" if path.endswith("/chat/completions") else "openai-completions"
    if path:
        return "openai-chat"
    status, _ = await _get(session, f"{url.rstrip('/')}/v2/health/ready")
    return "triton-http" if status == 200 else "openai-chat"


@dataclass(slots=True)
class _Sending:
    """What aiohttp reports about one request. reused: its connection was already open."""

    go: Go = None
    sent_ns: int | None = None
    reused: bool = False


def _session(timeout_s: float, api_key: str | None) -> aiohttp.ClientSession:
    import aiohttp

    async def reuse(_session: Any, context: Any, _parameters: Any) -> None:
        context.trace_request_ctx.reused = True

    async def send(_session: Any, context: Any, _parameters: Any) -> None:
        sending: _Sending = context.trace_request_ctx
        if sending.go is not None:
            await sending.go.wait()
        if sending.sent_ns is None:  # a redirect sends the request again, and does not count
            sending.sent_ns = time.monotonic_ns()

    trace = aiohttp.TraceConfig()
    trace.on_connection_reuseconn.append(reuse)
    # aiohttp calls this when headers and body are prepared, before it writes them.
    trace.on_request_chunk_sent.append(send)
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S),
        timeout=aiohttp.ClientTimeout(total=timeout_s, connect=min(timeout_s, CONNECT_S)),
        headers={
            "Content-Type": "application/json",
            **({"Authorization": f"Bearer {api_key}"} if api_key else {}),
        },
        trace_configs=[trace],
        read_bufsize=2**18,
        trust_env=False,
    )


async def _get(session: aiohttp.ClientSession, url: str) -> tuple[int, Any]:
    """(status, JSON or text). Raises StageError if nothing answers."""
    import aiohttp

    try:
        async with session.get(url, trace_request_ctx=_Sending()) as response:
            text = await response.text(errors="replace")
            return response.status, _json(text)
    except (aiohttp.ClientError, TimeoutError, asyncio.TimeoutError, OSError) as error:
        raise _unreachable(url, error) from error


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _unreachable(url: str, error: BaseException) -> StageError:
    return StageError(
        "bench",
        f"the endpoint cannot be reached: {_words(error)}",
        where=url,
        hint=(
            "Is it running, and is this its address? `toolkit serve` prints those of a deployment"
            " of ours."
        ),
    )


def too_many_files(error: OSError) -> StageError:
    hint = "Raise the limit of open files (ulimit -Hn): each connection is one."
    return StageError("bench", f"this machine cannot keep up the load: {error.strerror}", hint=hint)


def _words(error: BaseException) -> str:
    return str(error) or type(error).__name__


# Triton.


async def _entry_model(is_ready: Callable[[str], Awaitable[bool]]) -> str:
    """The model that clients call, as `toolkit.client` finds it. The last one is not asked for:
    where it is not ready either, the error tells what the server says of it.
    """
    for model in MODELS[:-1]:
        if await is_ready(model):
            return model
    return MODELS[-1]


# Triton, gRPC.


class GrpcTransport:
    """ModelStreamInfer, with one stream per request. Responses stay bytes until `chunks` decodes
    them.
    """

    protocol: WireProtocol = "triton-grpc"
    note: str | None = None

    def __init__(
        self, address: str, model: str, timeout_s: float, form: ModelInterface, channel: Any
    ) -> None:
        self.address = address
        self.model = model
        self._timeout_s = timeout_s
        self._form = form
        self._channel = channel
        method = "/inference.GRPCInferenceService/ModelStreamInfer"
        # Triton's stream takes any number of requests. Ours has one, so where it need not wait for
        # its time, it goes out with the end of the stream, which saves 0.3 ms.
        self._infer_later, self._infer = channel.stream_stream(method), channel.unary_stream(method)

    @classmethod
    async def connect(cls, address: str, model: str | None, timeout_s: float) -> GrpcTransport:
        import grpc.aio
        from tritonclient.grpc import service_pb2

        host = address.rsplit(":", 1)[0]
        options = [("grpc.max_receive_message_length", -1), ("grpc.use_local_subchannel_pool", 1)]
        if host in ("localhost", "127.0.0.1", "[::1]"):
            options.append(("grpc.enable_http_proxy", 0))
        channel = grpc.aio.insecure_channel(address, options=options)
        silent = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)

        async def ask(what: str, name: str) -> Any:
            call = channel.unary_unary(
                f"/inference.GRPCInferenceService/{what}",
                request_serializer=getattr(service_pb2, f"{what}Request").SerializeToString,
                response_deserializer=getattr(service_pb2, f"{what}Response").FromString,
            )
            request = getattr(service_pb2, f"{what}Request")(name=name)
            return await call(request, timeout=min(timeout_s, CONNECT_S))

        async def is_ready(name: str) -> bool:
            try:
                return bool((await ask("ModelReady", name)).ready)
            except grpc.aio.AioRpcError as error:
                if error.code() in silent:
                    raise
                return False

        try:
            model = model or await _entry_model(is_ready)
            answer = await ask("ModelConfig", model)
        except grpc.aio.AioRpcError as error:
            await channel.close()
            if error.code() in silent:
                raise _unreachable(address, Exception(error.details())) from error
            raise StageError(
                "bench",
                f"no model {model!r}: {error.details()}",
                where=address,
                hint="Name the served model with --model.",
            ) from error
        interface = ModelInterface.of(answer.config)
        if not interface.streams:
            await channel.close()
            raise _unstreamed(address)
        return cls(address, model, timeout_s, interface, channel)

    def prepare(self, prompt: Prompt, options: Options) -> bytes:
        with _refusals(self.address):
            text = text_of(prompt)
            request = self._form.request(self.model, text, options, "", streaming=True)
        encoded: bytes = request.SerializeToString()
        return encoded

    async def exchange(self, prepared: bytes, go: Go = None) -> Exchange:
        import grpc.aio

        done = Exchange()
        if go is None:
            done.sent_ns = time.monotonic_ns()
            call = self._infer(prepared, timeout=self._timeout_s)
        else:
            call = self._infer_later(timeout=self._timeout_s)
        try:
            if go is not None:
                await go.wait()
                done.sent_ns = time.monotonic_ns()
                await call.write(prepared)
                await call.done_writing()
            while (frame := await call.read()) is not grpc.aio.EOF:
                done.frames.append((time.monotonic_ns(), frame))
            if (code := await call.code()) is not grpc.StatusCode.OK:
                done.failure = self._failure(code, await call.details())
        except grpc.aio.AioRpcError as error:
            done.failure = self._failure(error.code(), error.details())
        except asyncio.InvalidStateError:  # the call ended during the write
            done.failure = self._failure(await call.code(), await call.details())
        finally:
            call.cancel()
            done.ended_ns = time.monotonic_ns()
        return done

    def _failure(self, code: Any, details: str | None) -> str:
        if code.name == "DEADLINE_EXCEEDED":
            return f"not finished within {self._timeout_s:g} s"
        if code.name == "OK":
            return "the stream ended before its request was sent"
        return f"{code.name}: {details}"

    def chunks(self, exchange: Exchange) -> list[Chunk]:
        from google.protobuf.message import DecodeError
        from tritonclient.grpc import service_pb2

        answers: list[tuple[int, dict[str, list[Any]]]] = []
        for received_ns, frame in exchange.frames:
            try:
                response = service_pb2.ModelStreamInferResponse.FromString(frame)
                values = decode(response.infer_response)
            except (DecodeError, ValueError, KeyError, TypeError) as error:
                raise BadAnswer(
                    f"garbage: a response is no ModelStreamInferResponse ({_words(error)})"
                ) from error
            if response.error_message:
                raise BadAnswer(f"refused: {response.error_message}")
            if values:  # Triton's last response of a stream may be empty
                answers.append((received_ns, values))
        return _triton_chunks(answers, self._form)

    async def close(self) -> None:
        await self._channel.close()


def _unstreamed(where: str) -> StageError:
    """The error for a model that answers each request once."""
    return StageError(
        "bench",
        "the model does not stream (triton.decoupled: false), and bench times chunks",
        where=where,
        hint="validate_latency.py, in the packaged repository, times whole answers.",
    )


class _refusals:  # noqa: N801 - reads as a statement in `with`
    """Turns a request that the client refuses to send into a usage error."""

    def __init__(self, where: str) -> None:
        self.where = where

    def __enter__(self) -> None: ...

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, RequestRefused):
            raise UsageError(
                str(error), where=self.where, hint="Leave that option out for this endpoint."
            ) from error


def _triton_chunks(
    answers: Sequence[tuple[int, dict[str, list[Any]]]], form: ModelInterface
) -> list[Chunk]:
    """Make chunks from the outputs of a Triton model. If the model gives no finish reason, its
    statistics are read from its last response.
    """
    chunks: list[Chunk] = []
    text = ""
    for received_ns, values in answers:
        if "text_output" not in values:
            raise BadAnswer(
                f"garbage: a response without text_output, only {', '.join(sorted(values))}"
            )
        full = _text(values["text_output"][0] if values["text_output"] else "")
        new = full[len(text) :] if form.cumulative else full
        text += new
        try:
            chunks.append(read_chunk(new, values, received_ns))
        except (TypeError, ValueError, IndexError) as error:
            raise BadAnswer(f"garbage: a response that cannot be read ({_words(error)})") from error
    if chunks and all(chunk.finish_reason is None for chunk in chunks):
        if "return_finish_reason" in form.inputs:  # the request asked for it
            raise BadAnswer("the stream ended before the answer was complete")
        try:
            chunks[-1] = dataclasses.replace(chunks[-1], statistics=read_statistics(answers[-1][1]))
        except (TypeError, ValueError, IndexError) as error:
            raise BadAnswer(f"garbage: a response that cannot be read ({_words(error)})") from error
    elif chunks and chunks[-1].finish_reason is None:
        raise BadAnswer("the answer went on after its end")
    return chunks


def _text(value: Any) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


# Server-sent events over HTTP.


class _EventTransport:
    """POST a JSON body, and keep the bytes of the event stream."""

    protocol: WireProtocol
    note: str | None = None

    def __init__(
        self, session: aiohttp.ClientSession, address: str, model: str, timeout_s: float
    ) -> None:
        self.address = address
        self.model = model
        self._session = session
        self._timeout_s = timeout_s

    async def exchange(self, prepared: bytes, go: Go = None) -> Exchange:
        import aiohttp

        done = Exchange(sent_ns=time.monotonic_ns())
        frames, again = done.frames, True
        while again:
            again, sending = False, _Sending(go)
            try:
                async with self._session.post(
                    self.address, data=prepared, trace_request_ctx=sending
                ) as response:
                    if response.status != 200:
                        page = (await response.text(errors="replace"))[:BODY_SHOWN]
                        done.failure = f"refused: HTTP {response.status} {_error_text(page)}"
                        done.status = response.status
                    else:
                        content = response.content
                        while data := await content.readany():
                            frames.append((time.monotonic_ns(), data))
            except aiohttp.ConnectionTimeoutError:
                done.failure = f"no connection within {min(self._timeout_s, CONNECT_S):g} s"
            except (TimeoutError, asyncio.TimeoutError):
                done.failure = f"not finished within {self._timeout_s:g} s"
            except (aiohttp.ClientError, OSError) as error:
                # A server may close an idle connection at any time, even while a request waits to
                # be sent on it, or as it is. Then the request is sent again.
                was_closed = isinstance(error.__cause__, aiohttp.ClientConnectionResetError)
                is_unsent = sending.sent_ns is None or was_closed
                again = sending.reused and is_unsent and not frames
                if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
                    raise too_many_files(error) from error
                done.failure = None if again else f"the connection broke: {_words(error)}"
        done.ended_ns = time.monotonic_ns()
        if sending.sent_ns is not None:
            done.sent_ns = sending.sent_ns
        if done.failure is None and (
            sending.sent_ns is None or (frames and frames[0][0] < sending.sent_ns)
        ):
            done.failure = "garbage: it was answered before it was sent"
        return done

    async def close(self) -> None:
        await self._session.close()
        await asyncio.sleep(0)  # lets the connections' close callbacks run


def _error_text(page: str) -> str:
    data = _json(page)
    if isinstance(data, dict) and "error" in data:
        inner = data["error"]
        return str(inner.get("message", inner) if isinstance(inner, dict) else inner)
    return page.strip()


def _events(frames: Sequence[tuple[int, bytes]]) -> Iterator[tuple[int, bytes]]:
    """(arrival time of its last byte, data) of every event. Raises BadAnswer if the stream ends
    inside an event.
    """
    rest = b""
    for received_ns, data in frames:
        *events, rest = EVENT_END.split(rest + data)
        for event in events:
            lines = (line for line in event.splitlines() if line.startswith(b"data:"))
            if payload := b"\n".join(line[5:].strip() for line in lines):
                yield received_ns, payload
    if rest.strip():
        raise BadAnswer(f"the stream ended inside an event: {rest[:80]!r}")


def _objects(frames: Sequence[tuple[int, bytes]]) -> Iterator[tuple[int, dict[str, Any] | None]]:
    """(arrival time, JSON object) of every event; None stands for OpenAI's [DONE]."""
    for received_ns, payload in _events(frames):
        if payload == b"[DONE]":
            yield received_ns, None
            continue
        try:
            data = json.loads(payload)
        except ValueError as error:
            raise BadAnswer(f"garbage: an event is not JSON: {payload[:80]!r}") from error
        if not isinstance(data, dict):
            raise BadAnswer(f"garbage: an event is no JSON object: {payload[:80]!r}")
        if data.get("error"):
            raise BadAnswer(f"refused: {_error_text(json.dumps(data))}")
        yield received_ns, data


class HttpTransport(_EventTransport):
    """Triton's generate_stream extension."""

    protocol: WireProtocol = "triton-http"

    def __init__(
        self,
        session: aiohttp.ClientSession,
        base: str,
        model: str,
        timeout_s: float,
        form: ModelInterface,
    ) -> None:
        super().__init__(session, f"{base}/v2/models/{model}/generate_stream", model, timeout_s)
        self._form = form

    @classmethod
    async def connect(
        cls, session: aiohttp.ClientSession, base: str, model: str | None, timeout_s: float
    ) -> HttpTransport:
        async def is_ready(name: str) -> bool:
            status, _ = await _get(session, f"{base}/v2/models/{name}/ready")
            return status == 200

        model = model or await _entry_model(is_ready)
        url = f"{base}/v2/models/{model}/config"
        status, config = await _get(session, url)
        if status != 200 or not isinstance(config, dict) or "input" not in config:
            said = _error_text(config if isinstance(config, str) else json.dumps(config))[
                :BODY_SHOWN
            ]
            raise StageError(
                "bench",
                f"no model {model!r}: HTTP {status} {said}",
                where=base,
                hint="Name it with --model.",
            )
        from google.protobuf import json_format
        from tritonclient.grpc import model_config_pb2

        try:
            form = ModelInterface.of(
                json_format.ParseDict(
                    config, model_config_pb2.ModelConfig(), ignore_unknown_fields=True
                )
            )
        except json_format.ParseError as error:
            raise StageError(
                "bench", f"its model configuration cannot be read: {error}", where=url
            ) from error
        if not form.streams:
            raise _unstreamed(base)
        return cls(session, base, model, timeout_s, form)

    def prepare(self, prompt: Prompt, options: Options) -> bytes:
        with _refusals(self.address):
            text = text_of(prompt)
            return json.dumps(self._form.values(text, options, streaming=True)).encode()

    def chunks(self, exchange: Exchange) -> list[Chunk]:
        answers: list[tuple[int, dict[str, list[Any]]]] = []
        for received_ns, data in _objects(exchange.frames):
            if data is None:
                raise BadAnswer("garbage: [DONE] is no event of generate_stream")
            values = {
                name: value if isinstance(value, list) else [value] for name, value in data.items()
            }
            answers.append((received_ns, values))
        return _triton_chunks(answers, self._form)


class OpenAiTransport(_EventTransport):
    """chat/completions or completions of any compatible server.

    The tokens of a chunk come from the chunk's `usage` (`continuous_usage_stats`, an extension of
    vLLM and trtllm-serve) or from token ids (`return_token_ids`, of vLLM). Otherwise only the
    tokens of the whole answer are known, from `include_usage`. `connect` tries which of these
    options the server accepts and honours. Draft tokens are counted by the toolkit's own gateway,
    in `usage`, and by a vLLM server that was started with `--per-request-spec-decode-metrics`.
    """

    COUNTS: tuple[dict[str, Any], ...] = (
        {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
        {"stream_options": {"include_usage": True}, "return_token_ids": True},
        {"stream_options": {"include_usage": True}},
        {},
    )
    NAMES = (
        "max_tokens",
        "temperature",
        "top_p",
        "top_k",
        "frequency_penalty",
        "presence_penalty",
        "seed",
        "stop",
    )

    def __init__(
        self,
        session: aiohttp.ClientSession,
        address: str,
        protocol: WireProtocol,
        model: str,
        timeout_s: float,
    ) -> None:
        super().__init__(session, address, model, timeout_s)
        self.protocol = protocol
        self._counts: dict[str, Any] = {}

    @classmethod
    async def connect(
        cls,
        session: aiohttp.ClientSession,
        url: str,
        protocol: WireProtocol,
        model: str | None,
        timeout_s: float,
        *,
        is_chosen: bool = True,
    ) -> OpenAiTransport:
        """is_chosen: the user named this protocol, so there is no other one to fall back to."""
        base, path = (
            url.rstrip("/"),
            "/chat/completions" if protocol == "openai-chat" else "/completions",
        )
        if base.endswith("/completions"):
            address, base = base, base.removesuffix("/completions").removesuffix("/chat")
        else:
            base = base if urlsplit(base).path else f"{base}/v1"
            address = base + path
        if model is None:
            model = await cls._first_model(session, base)
        transport = cls(session, address, protocol, model, timeout_s)
        refused = await transport._find_counts()
        has_no_template = refused is not None and protocol == "openai-chat" and _no_chat(refused)
        if refused is not None and has_no_template and not is_chosen:
            said = refused.failure
            transport = cls(session, f"{base}/completions", "openai-completions", model, timeout_s)
            transport.note = (
                f"text completions were measured, since the endpoint refused a chat: {said}"
            )
            refused = await transport._find_counts()
        if refused is not None:
            hint = "Check address, --model and --protocol."
            if has_no_template:
                hint = "Measure text completions: --protocol openai-completions."
            raise StageError(
                "bench",
                f"a first request failed: {refused.failure}",
                where=transport.address,
                hint=hint,
            )
        return transport

    async def _find_counts(self) -> Exchange | None:
        """Choose the options under which the server counts best: tokens of every chunk, else of
        the whole answer. Of equally good ones the last is kept, which asks for least.

        Returns what the server answered if it takes no request at all.
        """
        kept: dict[str, Any] | None = None
        best = _Counted.NOTHING
        refused: Exchange | None = None
        for asked in self.COUNTS:
            self._counts = asked
            prepared = self.prepare(PROBE, Options(max_tokens=PROBE_TOKENS))
            answer = await self.exchange(prepared)
            if answer.failure is None:
                counted = self._counted(answer)
                if kept is None or counted >= best:
                    kept, best = asked, counted
                if best is _Counted.CHUNKS:
                    break
            elif kept is None:
                refused = answer
                if answer.status not in REFUSED_ARGUMENT or _no_chat(answer):
                    return answer
        if kept is None:
            return refused
        self._counts = kept
        return None

    def _counted(self, answer: Exchange) -> _Counted:
        try:
            chunks = self.chunks(answer)
        except BadAnswer:
            return _Counted.NOTHING
        if any(chunk.output_tokens is not None for chunk in chunks):
            return _Counted.CHUNKS
        last = chunks[-1].statistics if chunks else None
        has_total = last is not None and last.output_tokens is not None
        return _Counted.TOTAL if has_total else _Counted.NOTHING

    @staticmethod
    async def _first_model(session: aiohttp.ClientSession, base: str) -> str:
        status, data = await _get(session, f"{base}/models")
        try:
            return str(data["data"][0]["id"])
        except (KeyError, IndexError, TypeError) as error:
            raise StageError(
                "bench",
                f"{base}/models names no model (HTTP {status})",
                where=base,
                hint="Name it with --model.",
            ) from error

    def prepare(self, prompt: Prompt, options: Options) -> bytes:
        asked = {
            name: value for name, value in dataclasses.asdict(options).items() if value is not None
        }
        unknown = sorted(set(asked) - set(self.NAMES))
        if "num_draft_tokens" in unknown:
            raise UsageError(
                "no request to an OpenAI endpoint turns speculation off, so one endpoint is not"
                " compared with its own plain decoding (--against-plain, --draft-len)",
                where=self.address,
                hint="Start a server without speculation, and name it: --baseline URL.",
            )
        if unknown:
            raise UsageError(
                f"OpenAI's protocol has no {unknown[0]}",
                where=self.address,
                hint="Leave that option out for this endpoint.",
            )
        content: dict[str, Any]
        if self.protocol != "openai-chat":
            content = {"prompt": text_of(prompt)}
        elif isinstance(prompt, Conversation):
            content = {"messages": prompt.messages}
        else:
            content = {"messages": [{"role": "user", "content": prompt}]}
        return json.dumps(
            {"model": self.model, **content, "stream": True, **self._counts, **asked}
        ).encode()

    def chunks(self, exchange: Exchange) -> list[Chunk]:
        chunks: list[Chunk] = []
        figures = Statistics()
        ended = False
        for received_ns, data in _objects(exchange.frames):
            if data is None:
                ended = True
                continue
            try:
                chunks.append(self._chunk(data, received_ns))
                figures = _figures(data, figures)
            except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
                raise BadAnswer(
                    f"garbage: an event that is no completion chunk: {json.dumps(data)[:80]}"
                ) from error
        if not chunks:
            return []
        reason = next(
            (chunk.finish_reason for chunk in reversed(chunks) if chunk.finish_reason is not None),
            None,
        )
        if reason is None or not ended:
            raise BadAnswer(
                "the stream ended before the answer was complete"
                if reason is None
                else "the stream ended without [DONE]"
            )
        return self._with_total(chunks, figures, reason)

    @staticmethod
    def _chunk(data: dict[str, Any], received_ns: int) -> Chunk:
        choice = data["choices"][0] if data["choices"] else {}
        spoken = choice.get("delta") or {}
        text = choice.get("text") or spoken.get("content") or spoken.get("reasoning_content") or ""
        ids = tuple(choice.get("token_ids") or ())
        if not isinstance(text, str) or any(type(token) is not int for token in ids):
            raise TypeError
        count = _whole((data.get("usage") or {}).get("completion_tokens"))
        return Chunk(text, ids, count if choice else None, received_ns, choice.get("finish_reason"))

    @staticmethod
    def _with_total(chunks: list[Chunk], figures: Statistics, reason: str) -> list[Chunk]:
        """Complete the chunks of an answer. If chunks have only token ids, they get running counts.
        The last chunk gets the finish reason and the total.
        """
        if any(chunk.token_ids for chunk in chunks) and all(
            chunk.output_tokens is None for chunk in chunks
        ):
            count, counted = 0, []
            for chunk in chunks:
                count += len(chunk.token_ids)
                counted.append(dataclasses.replace(chunk, output_tokens=count))
            chunks = counted
        running = [chunk.output_tokens for chunk in chunks if chunk.output_tokens is not None]
        if figures.output_tokens is None and running:
            figures = dataclasses.replace(figures, output_tokens=running[-1])
        if any(chunk.text and chunk.output_tokens is None for chunk in chunks):
            # Only some chunks are counted, such as the last one: it tells the total, and no chunk's
            # own tokens.
            chunks = [dataclasses.replace(chunk, output_tokens=None) for chunk in chunks]
        return [
            *chunks[:-1],
            dataclasses.replace(chunks[-1], finish_reason=reason, statistics=figures),
        ]


class _Counted(enum.IntEnum):
    """What a server counts in a streamed answer."""

    NOTHING = 0
    TOTAL = 1
    CHUNKS = 2


def _no_chat(refused: Exchange) -> bool:
    """Whether the server refused a chat because its model has no chat template."""
    said = refused.failure or ""
    return refused.status in REFUSED_CHAT and CHAT_TEMPLATE.search(said) is not None


def _figures(data: dict[str, Any], before: Statistics) -> Statistics:
    """The figures of a request, with those that this event tells."""
    told: dict[str, Any] = {}
    if usage := data.get("usage"):
        told["input_tokens"] = _whole(usage.get("prompt_tokens"))
        told["output_tokens"] = _whole(usage.get("completion_tokens"))
        told |= usage_counts(usage)
    metrics = data.get("metrics")
    counts = metrics.get("speculative_decoding") if isinstance(metrics, dict) else None
    if isinstance(counts, dict) and set(counts) >= SPECULATION_COUNTS:
        told |= speculation_counts(counts)
    return dataclasses.replace(before, **told) if told else before


def _whole(value: Any) -> int | None:
    """The number, or None if the server does not tell it. Raises TypeError for anything else."""
    if value is not None and type(value) is not int:
        raise TypeError
    return value
