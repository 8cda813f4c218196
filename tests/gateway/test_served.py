"""The gateway in front of real servers: both layouts of Triton, and vLLM's protocol."""

from __future__ import annotations

import asyncio
import contextlib
import json
import queue
import re
import socket
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent import futures
from contextlib import contextmanager
from typing import Any

import grpc
import openai
import pytest
from tritonclient.grpc import model_config_pb2, service_pb2, service_pb2_grpc

from tests.support.gateways import MODEL, post, render, running, sent, until
from tests.support.serving import MAX_BATCH_SIZE
from tests.support.vllm_stub import SPECULATION, Script, vllm_stub
from toolkit.client import Client, ClientError, Options, RequestRefused, ServerUnavailable
from toolkit.config.schema import GatewayConfig
from toolkit.gateway.answering import refusal_of
from toolkit.gateway.app import Gateway
from toolkit.gateway.arms import SERVED, Arm, OneArm
from toolkit.gateway.backends import Backend, TritonBackend, VllmBackend
from toolkit.gateway.guard import Guard
from toolkit.openai_client import usage_counts
from toolkit.triton.process.server import TritonServer
from toolkit.triton.tensors.contract import BLS_MODEL

PROMPT = "def read_config(path):"  # the tiny pair continues it to the end of the sequence
CONFIG = GatewayConfig(stop_timeout_s=1)
WHOLE = {"streams": False, "tells_accepted": False}


@contextmanager
def gateway(
    make: Any, *, plain: bool = False, log: Callable[[str], None] = lambda line: None
) -> Iterator[str]:
    """A gateway before the backend that `make` makes in the event loop: its URL."""

    with running(CONFIG, lambda: before_one(make(), plain=plain, log=log)) as url:
        yield url


def before_one(
    backend: Backend, *, plain: bool = False, log: Callable[[str], None] = lambda line: None
) -> Gateway:
    return Gateway(
        CONFIG,
        MODEL,
        OneArm(Arm(SERVED, backend, is_plain=plain)),
        Guard((), None, 64, time.monotonic),
        render,
        str,
        log,
    )


@pytest.fixture(params=["llmapi", "bls"])
def server(request: pytest.FixtureRequest) -> TritonServer:
    name = {"llmapi": "tiny_server", "bls": "tiny_bls_server"}[request.param]
    found: TritonServer = request.getfixturevalue(name)
    return found


def body(**keys: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": PROMPT, "max_tokens": 12, "temperature": 0, **keys}


def test_texts_and_counts_are_those_of_our_own_client(server: TritonServer) -> None:
    with Client(server.grpc_url) as client:
        expected = client.generate(PROMPT, max_tokens=12, temperature=0.0)
    with gateway(lambda: TritonBackend(server.grpc_url)) as url:
        status, headers, answer = post(url, "/v1/completions", body())
        assert status == 200
        assert answer["choices"][0]["text"] == expected.text
        assert answer["choices"][0]["finish_reason"] == expected.finish_reason
        counts = answer["usage"]
        statistics = expected.statistics
        assert counts["completion_tokens"] == statistics.output_tokens
        details = counts["completion_tokens_details"]
        assert details["accepted_prediction_tokens"] == statistics.accepted
        assert counts["speculation"]["verify_steps"] == statistics.verify_steps
        for name, told in usage_counts(counts).items():
            assert told == getattr(statistics, name)
        assert headers["x-accepted-draft-tokens"] == f"{statistics.accepted}/{statistics.drafted}"
        clients = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        with clients, clients.completions.create(**body(stream=True)) as stream:
            assert "".join(event.choices[0].text for event in stream) == expected.text


def test_each_event_tells_its_accepted_drafts(server: TritonServer) -> None:
    with gateway(lambda: TritonBackend(server.grpc_url)) as url:
        _, _, whole = post(url, "/v1/completions", body())
        clients = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        options = {"include_usage": True, "include_speculation": True}
        with clients:
            events = list(clients.completions.create(**body(stream=True, stream_options=options)))
    told = [event.speculation for event in events if hasattr(event, "speculation")]  # type: ignore[attr-defined]
    usage = whole["usage"]
    assert sum(event["tokens"] for event in told) == usage["completion_tokens"]
    accepted = usage["completion_tokens_details"]["accepted_prediction_tokens"]
    assert sum(event["accepted"] for event in told) == accepted


def test_each_event_tells_the_tokens_so_far(server: TritonServer) -> None:
    with gateway(lambda: TritonBackend(server.grpc_url)) as url:
        clients = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        options = {"include_usage": True, "continuous_usage_stats": True}
        with clients:
            events = list(clients.completions.create(**body(stream=True, stream_options=options)))
    counts = [event.usage.completion_tokens for event in events if event.usage]
    assert len([event for event in events if event.choices and event.choices[0].text]) > 1
    assert counts == sorted(counts)
    assert counts[0] < counts[-1]
    assert all(event.usage for event in events if event.choices and event.choices[0].text)
    assert events[-1].usage.prompt_tokens > 0


def test_a_plain_arm_drafts_nothing(server: TritonServer) -> None:
    with gateway(lambda: TritonBackend(server.grpc_url), plain=True) as url:
        _, _, answer = post(url, "/v1/completions", body())
        details = answer["usage"].get("completion_tokens_details")
        assert details in (
            None,
            {"accepted_prediction_tokens": 0, "rejected_prediction_tokens": 0},
        )


def test_what_the_server_refuses_is_a_400(server: TritonServer) -> None:
    with gateway(lambda: TritonBackend(server.grpc_url)) as url:
        for streams in (False, True):
            status, _, answer = post(
                url, "/v1/completions", body(max_tokens=100_000, stream=streams)
            )
            assert status == 400
            assert "max_seq_len" in answer["error"]["message"]


def test_a_server_outlives_what_it_refuses(server: TritonServer) -> None:
    """Triton 24.10 dies within a few hundred refusals if it is asked for the code of each."""

    async def refusals() -> int:
        backend, count = TritonBackend(server.grpc_url), 0
        options = Options(max_tokens=100_000)
        try:
            while count < 1000:
                pieces = backend.stream("p", options, "id", streams=True, tells_accepted=False)
                with pytest.raises(RequestRefused, match="max_seq_len"):
                    await anext(pieces)
                count += 1
        finally:
            await backend.close()
        return count

    assert asyncio.run(refusals()) == 1000
    with Client(server.grpc_url) as client:
        assert client.generate(PROMPT, max_tokens=4).finish_reason is not None


def test_clients_that_hang_up_while_they_wait_leave_nothing_behind(
    server: TritonServer, caplog: pytest.LogCaptureFixture
) -> None:
    """In the layout bls they wait in Triton's queue, which gives them up when their turn comes."""
    lines: list[str] = []
    endless = body(max_tokens=900)
    is_bls = (server.repository / BLS_MODEL).is_dir()
    queue = "nv_inference_pending_request_count" if is_bls else "toolkit_queued_requests"
    until(lambda: counted(server)["toolkit_active_requests"] == 0)
    before = counted(server)
    with held(server, lines.append) as (url, made, tasks), contextlib.ExitStack() as connections:

        def send(stream: bool) -> socket.socket:
            return connections.enter_context(sent(url, {**endless, "stream": stream}))

        idle_tasks = tasks()
        served = [send(True) for _ in range(MAX_BATCH_SIZE)]
        for connection in served:
            assert b"200 OK" in connection.recv(100)
        waiting = [send(number % 2 == 0) for number in range(6)]
        until(lambda: counted(server)[queue] == 6)
        for connection in waiting:
            connection.close()
        until(lambda: made.guard.running == MAX_BATCH_SIZE)
        assert [json.loads(line)["status"] for line in lines] == ["hung up"] * 6
        if not is_bls:
            until(lambda: counted(server)[queue] == 0)
        for connection in served:
            connection.close()
        until(lambda: made.guard.running == 0)
        until(lambda: tasks() == idle_tasks)
        until(lambda: cancelled(server) - sum(before.get(name, 0) for name in CANCELLED) == 10)
        after = counted(server)
        begun = "toolkit_queue_seconds_count"
        assert after[begun] - before[begun] == MAX_BATCH_SIZE
        assert after[queue] == 0
        assert post(url, "/v1/completions", body())[0] == 200
    assert [record for record in caplog.records if record.name == "asyncio"] == []


CANCELLED = ("toolkit_requests:cancelled", "nv_inference_request_failure:CANCELED")


def cancelled(server: TritonServer) -> float:
    """By the model, or before it by Triton."""
    counts = counted(server)
    return sum(counts.get(name, 0) for name in CANCELLED)


def counted(server: TritonServer) -> dict[str, float]:
    """'name' or 'name:label' -> value, of the model that clients call."""
    page = urllib.request.urlopen(server.metrics_url, timeout=10).read().decode()
    model = BLS_MODEL if (server.repository / BLS_MODEL).is_dir() else "tensorrt_llm"
    rows = re.findall(
        rf'^(\w+){{model="{model}"(?:,(?:outcome|reason)="(\w+)")?(?:,version="1")?}} (\S+)$',
        page,
        re.MULTILINE,
    )
    return {f"{name}:{label}" if label else name: float(value) for name, label, value in rows}


@contextmanager
def held(
    server: TritonServer, log: Callable[[str], None]
) -> Iterator[tuple[str, Gateway, Callable[[], int]]]:
    """(URL, gateway, number of tasks in its event loop) of a gateway before a server."""
    parts: list[tuple[Gateway, asyncio.AbstractEventLoop]] = []

    def make() -> Gateway:
        made = before_one(TritonBackend(server.grpc_url), log=log)
        parts.append((made, asyncio.get_running_loop()))
        return made

    async def count() -> int:
        return len(asyncio.all_tasks())

    def tasks() -> int:
        return asyncio.run_coroutine_threadsafe(count(), parts[0][1]).result(10)

    with running(CONFIG, make) as url:
        yield url, parts[0][0], tasks


def test_a_refusal_names_the_client_s_key(server: TritonServer) -> None:
    with gateway(lambda: TritonBackend(server.grpc_url)) as url:

        def error(path: str = "/v1/completions", **keys: Any) -> Any:
            status, _, answer = post(url, path, keys)
            assert status == 400, answer
            return answer["error"]

        assert error(**body(num_draft_tokens=99))["param"] == "num_draft_tokens"
        long = "word " * 5000
        assert error(**body(prompt=long))["param"] == "prompt"
        messages = [{"role": "user", "content": long}]
        chat = {"model": MODEL, "messages": messages}
        assert error("/v1/chat/completions", **chat)["param"] == "messages"


def test_log_probabilities_of_a_layout_without_them_are_refused_by_name(
    tiny_server: TritonServer,
) -> None:
    with gateway(lambda: TritonBackend(tiny_server.grpc_url)) as url:
        status, _, answer = post(url, "/v1/completions", body(logprobs=1))
    assert (status, answer["error"]["param"]) == (400, "logprobs")
    assert "triton.layout bls" in answer["error"]["message"]
    assert "log_probs" not in answer["error"]["message"]


def test_log_probabilities_of_the_layout_that_has_them(tiny_bls_server: TritonServer) -> None:
    with gateway(lambda: TritonBackend(tiny_bls_server.grpc_url)) as url:
        status, _, answer = post(url, "/v1/completions", body(logprobs=1, num_draft_tokens=0))
    scores = answer["choices"][0]["logprobs"]
    assert status == 200
    assert len(scores["token_logprobs"]) == answer["usage"]["completion_tokens"]
    assert all(value <= 0 for value in scores["token_logprobs"])


def test_a_server_that_is_not_there_is_a_503() -> None:
    lines: list[str] = []
    with gateway(lambda: TritonBackend("127.0.0.1:9"), log=lines.append) as url:
        status, headers, answer = post(url, "/v1/completions", body())
        assert status == 503
        assert "127.0.0.1" not in json.dumps(answer)
        assert "retry-after" in headers
    assert any("127.0.0.1:9" in line for line in lines)
    with gateway(lambda: VllmBackend("127.0.0.1:9", MODEL)) as url:
        assert post(url, "/v1/completions", body())[0] == 503


@pytest.mark.slow
def test_a_server_that_stays_away_is_looked_for_all_the_time() -> None:
    """Six attempts take 5 s. With gRPC's own backoff the last of five waits takes 6.5 s alone, and
    all take 12.6 s at least.
    """

    async def count_attempts() -> int:
        attempts = 0

        async def close(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal attempts
            attempts += 1
            writer.close()

        async def ask() -> None:
            while attempts < 6:
                with pytest.raises(ServerUnavailable):
                    await anext(backend.stream("p", Options(), "id", **WHOLE))
                await asyncio.sleep(0.05)

        listener = await asyncio.start_server(close, "127.0.0.1", 0)
        backend = TritonBackend("{}:{}".format(*listener.sockets[0].getsockname()))
        try:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(ask(), 12)
        finally:
            await backend.close()
            listener.close()
        return attempts

    assert asyncio.run(count_attempts()) >= 6


def test_vllm_is_called_at_its_completions() -> None:
    script = Script(speculation=SPECULATION)
    with vllm_stub(script) as address, gateway(lambda: VllmBackend(address, MODEL)) as url:
        chat = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 5}
        _, headers, answer = post(url, "/v1/chat/completions", chat)
        assert answer["choices"][0]["message"]["content"] == " abc d!"
        assert headers["x-accepted-draft-tokens"] == "2/5"
        assert script.requests[-1]["prompt"] == "<user>Hi"
        clients = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        with clients:
            stream = clients.chat.completions.create(**chat, stream=True)
            texts = [event.choices[0].delta.content for event in stream]
        assert texts == ["", " a", "bc d", "!", None]
        status, _, answer = post(url, "/v1/completions", body(num_draft_tokens=0))
        assert status == 400
        assert "fixed when the server starts" in answer["error"]["message"]


@pytest.mark.parametrize(
    ("script", "status"),
    [
        (Script(status=400, message=json.dumps({"error": {"message": "no", "code": 400}})), 400),
        (Script(status=503, message="busy"), 503),
        (Script(status=500, message="broken"), 503),
        (Script(cut=0), 503),
    ],
)
def test_what_vllm_refuses_keeps_its_meaning(script: Script, status: int) -> None:
    with vllm_stub(script) as address, gateway(lambda: VllmBackend(address, MODEL)) as url:
        assert post(url, "/v1/completions", body(stream=True))[0] == status


class Odd(service_pb2_grpc.GRPCInferenceServiceServicer):  # type: ignore[misc]
    """A server whose model answers with something else than text."""

    def ModelConfig(self, request: Any, context: Any) -> Any:  # noqa: N802 - Triton's name
        config = model_config_pb2.ModelConfig(name=request.name)
        for name in ("text_input", "sampling_param_max_tokens", "sampling_param_temperature"):
            dtype = {"text_input": "TYPE_STRING", "sampling_param_max_tokens": "TYPE_INT32"}
            data_type = model_config_pb2.DataType.Value(dtype.get(name, "TYPE_FP32"))
            config.input.add(name=name, data_type=data_type, dims=[1])
        return service_pb2.ModelConfigResponse(config=config)

    def ModelStreamInfer(self, requests: Any, context: Any) -> Iterator[Any]:  # noqa: N802
        for _ in requests:
            answer = service_pb2.ModelInferResponse()
            answer.outputs.add(name="logits", datatype="INT32", shape=[1])
            answer.raw_output_contents.append(b"\1\0\0\0")
            yield service_pb2.ModelStreamInferResponse(infer_response=answer)


class Refusing(Odd):
    """Answers with an error, and ends the stream a moment later."""

    def __init__(self, message: str) -> None:
        self.message = message
        self.metadata: dict[str, str] = {}
        self.was_left = queue.SimpleQueue[bool]()

    def ModelStreamInfer(self, requests: Any, context: Any) -> Iterator[Any]:  # noqa: N802
        next(requests)
        self.metadata = dict(context.invocation_metadata())
        try:
            yield service_pb2.ModelStreamInferResponse(error_message=self.message)
            time.sleep(0.3)
        finally:
            self.was_left.put(not context.is_active())


class Failing(Odd):
    """Gives the call up, after a chunk or before one."""

    def __init__(self, details: str, has_begun: bool) -> None:
        self.details, self.has_begun = details, has_begun

    def ModelStreamInfer(self, requests: Any, context: Any) -> Iterator[Any]:  # noqa: N802
        next(requests)
        if self.has_begun:
            answer = service_pb2.ModelInferResponse()
            answer.outputs.add(name="text_output", datatype="BYTES", shape=[1])
            answer.raw_output_contents.append(b"\1\0\0\0a")
            yield service_pb2.ModelStreamInferResponse(infer_response=answer)
        context.abort(grpc.StatusCode.UNAVAILABLE, self.details)


@pytest.mark.parametrize(
    ("details", "has_begun"),
    [
        ("Socket closed", False),
        ("recvmsg:Connection reset by peer", False),
        ("Socket closed", True),
        ("Cancelling all calls", True),
    ],
)
def test_a_server_that_goes_away_is_unavailable_at_any_time(details: str, has_begun: bool) -> None:
    with served(Failing(details, has_begun)) as address:
        assert told(address) == (503, "unavailable")


@pytest.mark.parametrize(
    ("message", "status", "code"),
    [
        ("[refused] too long", 400, None),
        ("[overloaded] 36 requests are being served", 503, "overloaded"),
        ("[deadline] deadline of 5 ms passed", 503, "overloaded"),
        ("[request id: 7] Exceeds maximum queue size", 503, "overloaded"),
        ("[error] the draft failed", 503, "unavailable"),
        ("[cancelled] cancelled by the client", 503, "unavailable"),
        ("Failed to process the request(s) for model instance", 503, "unavailable"),
        ("[request id: 7] Server is stopping", 503, "unavailable"),
    ],
)
def test_whose_fault_an_error_is(message: str, status: int, code: str | None) -> None:
    service = Refusing(message)
    with served(service) as address:
        assert told(address) == (status, code)
    assert "triton_grpc_error" not in service.metadata


def test_a_model_that_is_not_there_is_not_the_client_s_fault() -> None:
    class Empty(Odd):
        def ModelConfig(self, request: Any, context: Any) -> Any:  # noqa: N802
            context.abort(grpc.StatusCode.NOT_FOUND, "Request for unknown model")

    with served(Empty()) as address:
        assert told(address) == (503, "unavailable")


def told(address: str) -> tuple[int, str | None]:
    """(status, code) of the error that a client is told for a request at this server."""

    async def ask() -> tuple[int, str | None]:
        backend = TritonBackend(address)
        try:
            async for _ in backend.stream("p", Options(), "id", streams=True, tells_accepted=False):
                pass
        except ClientError as error:
            refusal = refusal_of(error, 1)
            return refusal.status, refusal.code
        finally:
            await backend.close()
        return 200, None

    return asyncio.run(ask())


@contextmanager
def served(service: Odd) -> Iterator[str]:
    server = grpc.server(futures.ThreadPoolExecutor(2))
    service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(service, server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield address
    finally:
        server.stop(None)


@pytest.mark.parametrize("streams", [False, True])
def test_a_server_that_answers_something_else_is_a_503(streams: bool) -> None:
    lines: list[str] = []
    with (
        served(Odd()) as address,
        gateway(lambda: TritonBackend(address), log=lines.append) as url,
    ):
        status, _, answer = post(url, "/v1/completions", body(stream=streams))
    assert status == 503
    assert answer["error"]["code"] == "unavailable"
    assert any("not one of a model of text" in line for line in lines)


def test_a_server_that_has_refused_is_left_when_it_has_ended_the_stream() -> None:
    service = Refusing("[refused] too long")
    with served(service) as address, gateway(lambda: TritonBackend(address)) as url:
        status, _, answer = post(url, "/v1/completions", body())
        assert (status, answer["error"]["message"]) == (400, "too long")
        assert not service.was_left.get(timeout=5)
