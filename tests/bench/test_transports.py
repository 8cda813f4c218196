"""Every protocol against an endpoint whose schedule and counts are known, and with each fault
that an endpoint can have.
"""

from __future__ import annotations

import asyncio
import json
import resource
import socket
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, Literal, TypeAlias

import aiohttp
import grpc
import pytest

from tests.support.stub import Script, StubServer, openai_events, response_of, triton_outputs
from toolkit.bench import metrics
from toolkit.bench.transports import (
    PROTOCOLS,
    BadAnswer,
    Exchange,
    GrpcTransport,
    HttpTransport,
    OpenAiTransport,
    _session,
    connect,
    read_exchange,
)
from toolkit.client import ModelInterface, Options, RequestTiming
from toolkit.errors import StageError, UsageError
from toolkit.triton.tensors.contract import INPUTS

MS = 1_000_000
SCRIPT = Script(chunks=((5, "a", 1), (20, "bcd", 3), (6, "ef", 2)))
TOKENS = [1, 3, 2]


@pytest.fixture(scope="module")
def stub() -> Iterator[StubServer]:
    with StubServer(SCRIPT) as server:
        yield server


def url(stub: StubServer, protocol: str) -> str:
    return stub.grpc if protocol == "triton-grpc" else stub.http


def ask(
    where: str,
    prompt: str = "hello",
    *,
    protocol: str = "auto",
    max_tokens: int = 64,
    timeout_s: float = 5.0,
    **options: Any,
) -> RequestTiming:
    async def one() -> RequestTiming:
        transport = await connect(where, protocol=protocol, timeout_s=timeout_s)
        try:
            exchange = await transport.exchange(
                transport.prepare(prompt, Options(max_tokens=max_tokens, **options))
            )
            return read_exchange(transport, prompt, exchange, max_tokens)
        finally:
            await transport.close()

    return asyncio.run(one())


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_times_and_tokens_are_those_of_the_endpoint(stub: StubServer, protocol: str) -> None:
    """The endpoint's own clock says when it wrote each chunk: TTFT, TPOT, ITL, ICL and e2e
    follow from that.
    """
    got = ask(url(stub, protocol), f"{protocol} on schedule", protocol=protocol)
    (said,) = [entry for entry in stub.log() if entry["prompt"] == f"{protocol} on schedule"]
    wrote = [at for at, _ in said["written"]]
    assert [tokens for _, tokens in got.chunks] == TOKENS
    assert (got.text, got.output_tokens, got.finish_reason) == ("abcdef", 6, "length")
    late = [seen - at for (seen, _), at in zip(got.chunks, wrote, strict=True)]
    assert min(late) > 0 and sorted(late)[1] < 20 * MS
    assert 0 < said["came_ns"] - got.sent_ns < 200 * MS
    spread = max(late) - min(late) + 1
    assert got.ttft_ns == pytest.approx(wrote[0] - got.sent_ns, abs=late[0])
    assert got.e2e_ns == pytest.approx(wrote[2] - got.sent_ns, abs=late[2])
    assert got.tpot_ns == pytest.approx((wrote[2] - wrote[0]) / 5, abs=spread / 5 + 1)
    assert got.icl_ns == pytest.approx([wrote[1] - wrote[0], wrote[2] - wrote[1]], abs=spread)
    assert [gap for gap, _ in got.itl] == pytest.approx(
        [(wrote[1] - wrote[0]) / 3, (wrote[2] - wrote[1]) / 2], abs=spread / 2 + 1
    )
    assert [weight for _, weight in got.itl] == TOKENS[1:]


FORM = ModelInterface(
    {spec.name: spec.dtype.removeprefix("TYPE_") for spec in INPUTS}, cumulative=False
)


def bare(protocol: str) -> Any:
    """A transport that is connected to nothing: it can read."""
    session: Any = None
    if protocol == "triton-grpc":
        transport = GrpcTransport.__new__(GrpcTransport)
        transport._form = FORM
        return transport
    if protocol == "triton-http":
        return HttpTransport(session, "", "m", 1.0, FORM)
    return OpenAiTransport(session, "", protocol, "m", 1.0)


def frames(protocol: str, fault: str = "", usage: str = "continuous") -> list[bytes]:
    if protocol == "triton-grpc":
        return [response_of(one) for one in triton_outputs(SCRIPT, fault)]
    if protocol == "triton-http":
        return [
            b"data: " + json.dumps(one).encode() + b"\n\n" for one in triton_outputs(SCRIPT, fault)
        ]
    return openai_events(SCRIPT, fault, protocol == "openai-chat", usage)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_figures_of_a_known_schedule_are_exact(protocol: str) -> None:
    """Sent at 10 (due at 4), chunks of 1, 3 and 2 tokens at 15, 35 and 41 ms."""
    arrived = list(zip((15 * MS, 35 * MS, 41 * MS), frames(protocol), strict=True))
    closed = read_exchange(bare(protocol), "p", Exchange(10 * MS, 0, arrived), 64)
    opened = read_exchange(bare(protocol), "p", Exchange(10 * MS, 0, arrived), 64, due_ns=4 * MS)
    means = {name: one.mean for name, one in metrics.arm([[closed]]).latencies.items()}
    assert means == {
        "ttft": 5,
        "e2e": 31,
        "tpot": pytest.approx(26 / 5),
        "icl": 13,
        "itl": pytest.approx((20 + 6) / 5, abs=1e-6),
    }
    assert (opened.ttft_ns, opened.e2e_ns, opened.tpot_ns) == (11 * MS, 37 * MS, closed.tpot_ns)


@pytest.mark.parametrize(
    "protocol", [protocol for protocol in PROTOCOLS if protocol != "triton-grpc"]
)  # which has frames
def test_an_event_may_arrive_in_pieces_and_two_at_once(protocol: str) -> None:
    """Chunks that arrive together have one time; no chunk is lost, and none has the time of half
    of it.
    """
    one, two, three = frames(protocol)
    arrived = [(1 * MS, one[:9]), (2 * MS, one[9:] + two + three[:5]), (3 * MS, three[5:])]
    got = read_exchange(bare(protocol), "p", Exchange(0, 0, arrived), 64)
    assert got.chunks == ((2 * MS, 1), (2 * MS, 3), (3 * MS, 2))


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("refuse", "no, on purpose"),
        ("stall", r"not finished within 0\.3 s"),
        ("die", "connection broke|died on purpose"),
        ("garbage", "garbage: "),
        ("fewer", "wrong counts: "),
        ("down", "wrong counts: the number of output tokens went down, from 9 to 6"),
        ("more", "wrong counts: .*10000 tokens"),
        ("endless", "the stream ended before the answer was complete"),
    ],
)
def test_every_fault_of_an_endpoint_is_a_failed_request_that_says_so(
    stub: StubServer, protocol: str, fault: str, words: str
) -> None:
    with pytest.raises(BadAnswer, match=words):
        ask(
            url(stub, protocol),
            f"fault:{fault} x",
            protocol=protocol,
            timeout_s=0.3 if fault == "stall" else 5.0,
        )


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_server_that_counts_nothing_leaves_tokens_unknown_and_times_known(
    stub: StubServer, protocol: str
) -> None:
    """Three chunks are not three tokens."""
    got = ask(url(stub, protocol), "fault:silent x", protocol=protocol)
    assert got.output_tokens is None and got.tpot_ns is None and got.itl == ()
    assert got.ttft_ns is not None and got.e2e_ns is not None and len(got.icl_ns) == 2
    arm = metrics.arm([[got]])
    assert (arm.output_tokens, arm.tokens_per_s) == (0, 0.0)


def test_a_total_alone_gives_tpot_and_no_itl() -> None:
    arrived = list(
        zip((15 * MS, 35 * MS, 41 * MS), frames("openai-chat", usage="total"), strict=True)
    )
    got = read_exchange(bare("openai-chat"), "p", Exchange(10 * MS, 0, arrived), 64)
    assert (got.output_tokens, got.tpot_ns, got.itl) == (6, 26 * MS // 5, ())
    assert got.icl_ns == (20 * MS, 6 * MS)


def test_token_ids_of_chunks_are_counted() -> None:
    arrived = list(
        zip((15 * MS, 35 * MS, 41 * MS), frames("openai-completions", usage="ids"), strict=True)
    )
    got = read_exchange(bare("openai-completions"), "p", Exchange(10 * MS, 0, arrived), 64)
    assert [tokens for _, tokens in got.chunks] == TOKENS


@pytest.mark.parametrize(
    "wrong",
    [
        b"data: {}\n\n",
        b"data: [1]\n\n",
        b'data: {"choices": 3}\n\n',
        b'data: {"choices": [7]}\n\n',
        b'data: {"choices": [{"text": 7}]}\n\n',
        b'data: {"choices": [{"text": "a", "token_ids": ["b"]}]}\n\n',
        b'data: {"choices": [{"text": "a"}], "usage": {"completion_tokens": "3"}}\n\n',
        b'data: {"choices": [], "usage": {"completion_tokens": 3, "prompt_tokens": [1]}}\n\n',
    ],
)
def test_json_that_is_no_completion_is_garbage(wrong: bytes) -> None:
    one, *rest = frames("openai-chat")
    with pytest.raises(BadAnswer, match="garbage"):
        read_exchange(
            bare("openai-chat"),
            "p",
            Exchange(0, 0, [(1, one + wrong), *((2, data) for data in rest)]),
            64,
        )


@pytest.mark.parametrize(
    "name", ["num_output_tokens", "output_ids", "total_draft_tokens", "drafted_by_position"]
)
def test_a_count_that_is_no_number_is_garbage(name: str) -> None:
    *most, last = frames("triton-http")
    wrong = json.dumps({**json.loads(last.removeprefix(b"data: ")), name: "3"}).encode()
    arrived = [(1, data) for data in (*most, b"data: " + wrong + b"\n\n")]
    with pytest.raises(BadAnswer, match=f"garbage.*{name}"):
        read_exchange(bare("triton-http"), "p", Exchange(0, 0, arrived), 64)


def test_a_stream_that_ends_inside_an_event_is_broken() -> None:
    *most, last = frames("openai-chat")
    with pytest.raises(BadAnswer, match="inside an event"):
        read_exchange(
            bare("openai-chat"),
            "p",
            Exchange(0, 0, [*((1, data) for data in most), (2, last[:-3])]),
            64,
        )


def test_nothing_at_all_is_no_answer() -> None:
    for protocol in PROTOCOLS:
        with pytest.raises(BadAnswer, match="without an answer"):
            read_exchange(bare(protocol), "p", Exchange(0, 1, []), 64)


def test_an_openai_server_without_the_extension_is_asked_for_totals() -> None:
    with StubServer(Script(chunks=SCRIPT.chunks, refuses_continuous=True, triton=False)) as stub:
        got = ask(stub.http)
        assert (got.output_tokens, got.itl) == (6, ())
        assert stub.log()[-1]["asked"]["stream_options"] == {"include_usage": True}


@pytest.mark.parametrize("path", ["", "/v1", "/v1/chat/completions", "/v1/completions"])
def test_urls_name_what_they_mean(stub: StubServer, path: str) -> None:
    async def found() -> tuple[str, str]:
        transport = await connect(stub.http + path)
        await transport.close()
        return transport.protocol, transport.model

    expected = {"": "triton-http", "/v1/completions": "openai-completions"}.get(path, "openai-chat")
    assert asyncio.run(found()) == (expected, "tensorrt_llm" if path == "" else "stub")


def test_options_are_sent_in_the_endpoints_words(stub: StubServer) -> None:
    ask(stub.http, "options", protocol="triton-http", temperature=0.5, num_draft_tokens=0)
    ask(stub.http, "options", protocol="openai-chat", temperature=0.5, seed=3)
    triton, openai = [entry["asked"] for entry in stub.log() if entry["prompt"] == "options"]
    assert (
        triton["sampling_param_temperature"],
        triton["num_draft_tokens"],
        triton["streaming"],
    ) == (0.5, 0, True)
    assert (openai["temperature"], openai["seed"], openai["max_tokens"]) == (0.5, 3, 64)
    with pytest.raises(UsageError, match="no request to an OpenAI endpoint turns speculation off"):
        ask(stub.http, protocol="openai-chat", num_draft_tokens=0)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_nobody_at_home_is_said_with_the_address(protocol: str) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
        with pytest.raises(StageError, match=f"{address}.*cannot be reached") as caught:
            ask(address, protocol=protocol)
    assert caught.value.hint is not None


def test_a_model_that_is_not_there_is_named(stub: StubServer) -> None:
    async def other() -> None:
        await connect(stub.grpc, model="nonesuch")

    with pytest.raises(StageError, match="no model 'nonesuch'"):
        asyncio.run(other())


@pytest.mark.parametrize("protocol", ["triton-grpc", "triton-http"])
def test_a_model_that_does_not_stream_is_said_at_once(protocol: str) -> None:
    with StubServer(Script(decoupled=False)) as stub:
        address = stub.grpc if protocol == "triton-grpc" else stub.http
        with pytest.raises(StageError, match="does not stream") as caught:
            ask(address, protocol=protocol)
    assert caught.value.hint is not None and "validate_latency.py" in caught.value.hint


@pytest.mark.parametrize("wrong", ["localhost", "ftp://host:1", "/a/path", "", "http://[::1"])
def test_what_is_no_address_is_refused(wrong: str) -> None:
    with pytest.raises(UsageError, match="not an address"):
        ask(wrong)


BLS = {
    "text_input": "STRING",
    "max_tokens": "INT32",
    "stream": "BOOL",
    "stop_words": "STRING",
    "return_num_output_tokens": "BOOL",
}


Peer: TypeAlias = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
ANSWER = b"".join(openai_events(SCRIPT, "", True, "continuous"))
ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(ANSWER), ANSWER)


async def with_peer(peer: Peer, use: Callable[[OpenAiTransport], Awaitable[None]]) -> None:
    """An HTTP endpoint that `peer` plays, connection by connection."""
    peers: list[Any] = []

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peers.append(asyncio.current_task())
        try:
            await peer(reader, writer)
            await reader.read()
        finally:
            writer.close()
            await writer.wait_closed()

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    address = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1/chat/completions"
    transport = OpenAiTransport(_session(5.0, None), address, "openai-chat", "m", 5.0)
    try:
        await use(transport)
    finally:
        await transport.close()
        server.close()
        await asyncio.gather(*peers)


def test_a_kept_connection_that_ends_before_a_request_is_due_is_no_failure() -> None:
    connections: list[asyncio.StreamWriter] = []

    async def peer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.append(writer)
        while await reader.read(2**16):  # a request comes in one piece
            writer.write(ANSWER)

    async def use(transport: OpenAiTransport) -> None:
        prepared, go = transport.prepare("p", Options()), asyncio.Event()
        assert (await transport.exchange(prepared)).failure is None
        waiting = asyncio.create_task(transport.exchange(prepared, go))
        await asyncio.sleep(0.05)
        connections[0].close()
        await asyncio.sleep(0.05)
        assert not waiting.done()
        due = time.monotonic_ns()
        go.set()
        answered = await waiting
        assert answered.failure is None and answered.sent_ns >= due and len(connections) == 2
        assert read_exchange(transport, "p", answered, 64).output_tokens == sum(TOKENS)

    asyncio.run(with_peer(peer, use))


def test_a_kept_connection_that_ends_as_a_request_is_sent_is_no_failure() -> None:
    """So it is if the server's timer for idle connections fires late, since the other arm computed
    until this one's turn.
    """
    requests: list[bytes] = []

    async def peer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while request := await reader.read(2**16):
            requests.append(request)
            writer.write(ANSWER)

    class ClosesOnce(asyncio.Event):
        async def wait(self) -> Literal[True]:
            if not self.is_set():
                self.set()
                (connection,) = session.connector._acquired  # type: ignore[union-attr]
                connection.transport.close()  # type: ignore[union-attr]
            return True

    async def use(transport: OpenAiTransport) -> None:
        nonlocal session
        session, prepared = transport._session, transport.prepare("p", Options())
        assert (await transport.exchange(prepared)).failure is None
        answered = await transport.exchange(prepared, ClosesOnce())
        assert answered.failure is None and len(requests) == 2
        assert read_exchange(transport, "p", answered, 64).output_tokens == sum(TOKENS)

    session: aiohttp.ClientSession
    asyncio.run(with_peer(peer, use))


@pytest.mark.parametrize("goes_on", [True, False])
def test_an_answer_to_what_was_not_sent_is_a_failure(goes_on: bool) -> None:
    async def peer(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(ANSWER)
        await writer.drain()
        if not goes_on:
            writer.close()

    async def use(transport: OpenAiTransport) -> None:
        go = asyncio.Event()
        asyncio.get_running_loop().call_later(0.05, go.set)
        failure = (await transport.exchange(transport.prepare("p", Options()), go)).failure
        assert failure == "garbage: it was answered before it was sent"

    asyncio.run(with_peer(peer, use))


def test_a_machine_without_more_connections_is_not_the_endpoints_failure() -> None:
    async def peer(_reader: asyncio.StreamReader, _writer: asyncio.StreamWriter) -> None: ...

    async def use(transport: OpenAiTransport) -> None:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
        try:
            with pytest.raises(StageError, match=r"(?s)Too many open files.*ulimit"):
                await transport.exchange(transport.prepare("p", Options()))
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

    asyncio.run(with_peer(peer, use))


def test_a_grpc_stream_that_ends_before_its_request_is_sent_is_a_failure() -> None:
    async def ends(_requests: Any, _context: Any) -> None: ...

    async def go() -> str | None:
        server, sent = grpc.aio.server(), asyncio.Event()
        handlers = {"ModelStreamInfer": grpc.stream_stream_rpc_method_handler(ends)}
        server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler("inference.GRPCInferenceService", handlers),)
        )
        address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        await server.start()
        transport = GrpcTransport(address, "m", 5.0, FORM, grpc.aio.insecure_channel(address))
        asyncio.get_running_loop().call_later(0.1, sent.set)
        exchange = await transport.exchange(transport.prepare("p", Options()), sent)
        await transport.close()
        await server.stop(None)
        return exchange.failure

    assert asyncio.run(go()) == "the stream ended before its request was sent"


def test_a_redirected_request_is_timed_from_its_first_sending() -> None:
    at: list[int] = []

    async def peer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await reader.read(2**16):
            at.append(time.monotonic_ns())
            moved = (
                b"HTTP/1.1 307 Moved\r\nLocation: /v1/chat/completions\r\nContent-Length: 0\r\n\r\n"
            )
            writer.write(ANSWER if len(at) > 1 else moved)

    async def use(transport: OpenAiTransport) -> None:
        answered = await transport.exchange(transport.prepare("p", Options()))
        assert answered.failure is None and answered.sent_ns < at[0] < at[1]

    asyncio.run(with_peer(peer, use))


def test_a_bls_model_is_asked_in_its_own_spelling() -> None:
    form = ModelInterface(BLS, cumulative=False, batched=True)
    values = form.values("p", Options(max_tokens=4, stop=("x",)), streaming=True)
    assert values == {
        "text_input": "p",
        "stream": True,
        "max_tokens": 4,
        "stop_words": ("x",),
        "return_num_output_tokens": True,
    }
    request = form.request("tensorrt_llm_bls", "p", Options(max_tokens=4), "", streaming=True)
    assert {tuple(tensor.shape) for tensor in request.inputs} == {(1, 1)}
