"""The servers behind the gateway, as one interface: chunks of text for a prompt.

Triton is called over gRPC, with a stream per request, whatever engine it serves. vLLM is called at
its own `/v1/completions`, since the gateway has rendered the chat template already. In both, ending
the iteration cancels the request on the server.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import re
import struct
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from toolkit.client import (
    MODELS,
    RECONNECT_MS,
    STREAM_END_S,
    TENSORS,
    AnswerReader,
    Chunk,
    ClientError,
    ModelInterface,
    Options,
    RequestRefused,
    ServerUnavailable,
    translated,
)
from toolkit.openai_client import KEEP_ALIVE_S, Answer, OpenAiClient, error_of

if TYPE_CHECKING:
    import aiohttp

__all__ = ["Backend", "OptionRefused", "Overloaded", "Piece", "TritonBackend", "VllmBackend"]

CONNECT_S = 10.0
EVENT_END = re.compile(rb"\r\n\r\n|\n\n|\r\r")
HTTP_OK = 200
OVERLOADED_STATUS = (429, 503)
# What Triton itself says of a model whose queue is full, or in which a request has waited too long.
FULL_QUEUE = ("Exceeds maximum queue size", "Request timeout expired")


class OptionRefused(RequestRefused):
    """The served model has no such option. option: a field of `Options`."""

    def __init__(self, option: str) -> None:
        super().__init__(f"the served model does not take {option}", "refused")
        self.option = option


class Overloaded(ClientError):
    """The server has no room for the request now, or gave it up at its deadline."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A chunk, with how many of its tokens were accepted drafts; None: the server does not tell."""

    chunk: Chunk
    accepted: int | None = None


class Backend(Protocol):
    """A served model. url: for messages."""

    url: str

    def stream(
        self, prompt: str, options: Options, request_id: str, *, streams: bool, tells_accepted: bool
    ) -> AsyncIterator[Piece]:
        """Send the request. The last piece has the finish reason and the statistics. A server that
        takes no cache_salt gets none.

        Raises RequestRefused, Overloaded, ServerUnavailable.
        """
        ...

    async def close(self) -> None: ...


class TritonBackend:
    """A model of a tritonserver, over gRPC. model: as for `toolkit.client.Client`.

    It reads from an error's text whose fault it is. Triton would end the stream with a code if the
    metadata `triton_grpc_error` asked for it; but Triton 24.10 dies of that, in median at the 57th
    refusal (see docs/serving.md).
    """

    def __init__(self, url: str, *, model: str | None = None, timeout_s: float = 300.0) -> None:
        import grpc
        from tritonclient.grpc import service_pb2, service_pb2_grpc

        self.url, self._timeout_s, self._model = url, timeout_s, model
        self._messages, self._errors = service_pb2, grpc.RpcError
        options = [
            ("grpc.max_receive_message_length", -1),
            ("grpc.enable_http_proxy", 0),
            ("grpc.max_reconnect_backoff_ms", RECONNECT_MS),
        ]
        self._channel = grpc.aio.insecure_channel(url, options=options)
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)
        self._interface: ModelInterface | None = None

    async def close(self) -> None:
        await self._channel.close()

    async def _known(self) -> ModelInterface:
        """What the served model is like; asked once."""
        if self._interface is None:
            for model in (self._model,) if self._model else MODELS:
                request = self._messages.ModelConfigRequest(name=model)
                try:
                    answer = await self._stub.ModelConfig(request, timeout=CONNECT_S)
                except self._errors as error:
                    failure = translated(error, self.url, CONNECT_S)
                    continue
                self._model, self._interface = model, ModelInterface.of(answer.config)
                break
            else:
                raise self._failed(failure)
        return self._interface

    async def stream(
        self, prompt: str, options: Options, request_id: str, *, streams: bool, tells_accepted: bool
    ) -> AsyncIterator[Piece]:
        interface = await self._known()
        if tells_accepted:  # then every chunk has the figures, as of that chunk
            interface = interface.without("return_speculation_stats")
        if "cache_salt" not in interface.inputs:
            options = dataclasses.replace(options, cache_salt=None)
        try:
            request = interface.request(
                self._model or MODELS[-1],
                prompt,
                options,
                request_id,
                streaming=streams and interface.streams,
            )
        except RequestRefused as error:
            if (option := _untaken(interface, options)) is not None:
                raise OptionRefused(option) from error
            raise

        async def requests() -> AsyncIterator[Any]:
            yield request

        call = self._stub.ModelStreamInfer(requests(), timeout=self._timeout_s)
        reader = AnswerReader(interface, self.url, streaming=streams)
        accepted = 0
        try:
            async for response in call:
                chunk = reader.read(response)
                if chunk is None:
                    continue
                counted = reader.values.get("total_accepted_draft_tokens")
                new_accepted = None
                if tells_accepted and counted:
                    new_accepted, accepted = counted[0] - accepted, counted[0]
                yield Piece(chunk, new_accepted)
        except RequestRefused as error:
            raise self._meant(error) from error
        except self._errors as error:
            failure = translated(error, self.url, self._timeout_s)
            raise self._failed(failure) from error
        except (KeyError, TypeError, ValueError, struct.error) as error:
            raise ServerUnavailable(
                f"{self.url}: the answer is not one of a model of text ({error!r})"
            ) from error
        finally:
            if reader.has_ended:
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(call.code(), STREAM_END_S)
            call.cancel()  # does nothing if the call is over
        reader.check_complete()

    def _meant(self, error: RequestRefused) -> ClientError:
        """What an error of the server says of this request. Of one that does not say its outcome,
        the server is at fault: what clients send has been checked, and put into tensors of the
        right form.
        """
        if error.outcome == "refused":
            return error
        is_full = any(words in str(error) for words in FULL_QUEUE)
        if error.outcome in ("overloaded", "deadline") or is_full:
            return Overloaded(str(error))
        return self._failed(error)

    def _failed(self, error: ClientError) -> ClientError:
        if isinstance(error, ServerUnavailable):
            return error
        return ServerUnavailable(f"{self.url}: the server failed ({error})")


def _untaken(interface: ModelInterface, options: Options) -> str | None:
    """The first option that the model has no input for."""
    for option in TENSORS:
        try:
            value = {option: getattr(options, option)}
            interface.values("", Options(**value), streaming=False)
        except RequestRefused:
            return option
    return None


class VllmBackend:
    """A model of vLLM's own server. url: host:port."""

    def __init__(self, url: str, model: str, *, timeout_s: float = 300.0) -> None:
        import aiohttp

        self._client = OpenAiClient(url, model, timeout_s)
        self.url = self._client.url
        self._failures = aiohttp.ClientError
        # No limit of connections: the gateway limits its requests itself.
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S),
            timeout=aiohttp.ClientTimeout(total=timeout_s, connect=CONNECT_S),
        )

    async def close(self) -> None:
        await self._session.close()

    async def stream(
        self, prompt: str, options: Options, request_id: str, *, streams: bool, tells_accepted: bool
    ) -> AsyncIterator[Piece]:
        body = self._client.body(prompt, options, request_id, streaming=streams)
        answer = Answer(self._client, prompt, with_log_probs=bool(options.log_probs))
        try:
            async with self._session.post(f"http://{self.url}/v1/completions", json=body) as page:
                if page.status in OVERLOADED_STATUS:
                    raise Overloaded(str(error_of(await page.text(), page.status, self.url)))
                if page.status != HTTP_OK:
                    raise error_of(await page.text(), page.status, self.url)
                if not streams:
                    data = json.loads(await page.read())
                    for chunk in answer.whole(data, time.monotonic_ns()):
                        yield Piece(chunk)
                    return
                async for chunk in _events(page, answer):
                    yield Piece(chunk)
        except (self._failures, asyncio.TimeoutError, ValueError) as error:
            raise ServerUnavailable(
                f"{self.url}: no answer, or a broken one ({error!r})"
            ) from error
        if not answer.is_over:
            raise ServerUnavailable(f"{self.url}: the stream ended before the answer was complete")


async def _events(page: aiohttp.ClientResponse, answer: Answer) -> AsyncIterator[Chunk]:
    rest = b""
    async for data in page.content.iter_any():
        received_ns = time.monotonic_ns()
        *events, rest = EVENT_END.split(rest + data)
        for event in events:
            for chunk in answer.event(event, received_ns):
                yield chunk
        if answer.is_over:
            return
