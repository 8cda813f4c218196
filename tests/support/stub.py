"""An endpoint that streams on a schedule, in a process of its own: Triton's gRPC and HTTP, and
OpenAI's, with faults to order.

    with StubServer(Script(chunks=((5, "a", 1), (10, "bcd", 3)))) as stub:
        stub.http, stub.grpc, stub.log()

It knows when it really wrote every chunk (one monotonic clock serves all processes of a machine),
so a client's times can be compared with the server's own and not with a schedule that a busy
machine bends. A prompt with "fault:NAME " gets it: refuse, stall, die, garbage, fewer (total below
what was streamed), down (a count that decreases), more (than max_tokens), silent (no counts at
all), endless (no finish reason), half (events cut in two, which is no fault).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import struct
import subprocess
import sys
import time
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

ROOT = Path(__file__).parents[2]
READY = {"/v2/health/ready", "/v1/models"}


@dataclass(frozen=True)
class Script:
    """chunks: (ms after the one before, text, tokens). usage: what the OpenAI side counts:
    continuous | total | none | ids.
    """

    chunks: tuple[tuple[float, str, int], ...] = tuple((1.0, "word ", 1) for _ in range(8))
    usage: str = "continuous"
    counted_twice: bool = False
    refuses_continuous: bool = False
    triton: bool = True
    log: bool = True
    at_once: bool = False  # over HTTP, all events in one write
    decoupled: bool = True  # as the configuration of the model says over Triton's protocols
    plain_factor: float = (
        1.0  # how much longer every chunk takes over HTTP where num_draft_tokens is 0
    )

    def dump(self) -> str:
        return json.dumps(self.__dict__)

    @classmethod
    def load(cls, text: str) -> Script:
        data = json.loads(text)
        return cls(**{**data, "chunks": tuple(tuple(chunk) for chunk in data["chunks"])})


class StubServer:
    """Starts the process, and ends it."""

    def __init__(self, script: Script | None = None) -> None:
        self.script = script or Script()

    def __enter__(self) -> StubServer:
        command = [sys.executable, "-m", "tests.support.stub", self.script.dump()]
        self._process = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdout is not None
        ports = json.loads(self._process.stdout.readline())
        self.http, self.grpc = f"http://127.0.0.1:{ports['http']}", f"127.0.0.1:{ports['grpc']}"
        self.metrics = f"{self.http}/metrics"
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._process.kill()
        self._process.communicate()

    def log(self) -> list[dict[str, Any]]:
        """Of every answer: prompt, when the request had come (came_ns), and written: (ns,
        tokens) of every chunk.
        """
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(f"{self.http}/log", timeout=10) as response:
            found: list[dict[str, Any]] = json.loads(response.read())
            return found


# The process.


@dataclass
class Book:
    """What was answered."""

    script: Script
    entries: list[dict[str, Any]] = field(default_factory=list)
    requests: int = 0
    tokens: int = 0

    def begin(self, prompt: str, asked: dict[str, Any]) -> dict[str, Any]:
        entry = {"prompt": prompt, "asked": asked, "came_ns": time.monotonic_ns(), "written": []}
        if self.script.log:
            self.entries.append(entry)
        return entry

    def end(self) -> None:
        self.requests += 1
        self.tokens += sum(tokens for _, _, tokens in self.script.chunks) * (
            2 if self.script.counted_twice else 1
        )

    def page(self) -> str:
        names = {"toolkit_requests": self.requests, "toolkit_output_tokens": self.tokens}
        names |= {
            "vllm:request_success_total": self.requests,
            "vllm:generation_tokens_total": self.tokens,
        }
        names["nv_inference_request_success"] = self.requests
        return "".join(f'{name}{{model="stub"}} {value}\n' for name, value in names.items())


def fault_of(prompt: str) -> str:
    return prompt.partition("fault:")[2].split(" ")[0]


def counts(script: Script, fault: str) -> tuple[list[int], int]:
    """(running count of every chunk, total at the end)."""
    running, so_far = [], 0
    for _, _, tokens in script.chunks:
        so_far += tokens
        running.append(so_far)
    total = so_far
    if fault == "fewer":
        total -= 1
    if fault == "down":
        running[-2] += 5
    if fault == "more":
        running[-1] = total = 10_000
    return running, total


def openai_events(script: Script, fault: str, chat: bool, usage: str) -> list[bytes]:
    """An event per chunk, and the last ones."""
    running, total = counts(script, fault)
    events = []

    def event(text: str | None, reason: str | None, counted: int | None, ids: int = 0) -> bytes:
        said: dict[str, Any] = {"delta": {"content": text}} if chat else {"text": text}
        kind = "chat.completion.chunk" if chat else "text_completion"
        choice: dict[str, Any] = {"index": 0, **said, "finish_reason": reason}
        if usage == "ids":
            choice["token_ids"] = list(range(ids))
        data: dict[str, Any] = {
            "id": "stub",
            "object": kind,
            "model": "stub",
            "created": 0,
            "choices": [choice],
        }
        if counted is not None and usage == "continuous" and fault != "silent":
            data["usage"] = {
                "prompt_tokens": 3,
                "completion_tokens": counted,
                "total_tokens": 3 + counted,
            }
        return b"data: " + json.dumps(data).encode() + b"\n\n"

    for i, (_, text, tokens) in enumerate(script.chunks):
        events.append(event(text, None, running[i], tokens))
    if fault == "garbage":
        events[1] = b"data: {this is no JSON\n\n"
    tail = event("", None if fault == "endless" else "length", running[-1])
    if usage in ("continuous", "total") and fault != "silent":
        data = {
            "choices": [],
            "model": "stub",
            "usage": {"prompt_tokens": 3, "completion_tokens": total, "total_tokens": total},
        }
        tail += b"data: " + json.dumps(data).encode() + b"\n\n"
    events[-1] += tail + b"data: [DONE]\n\n"
    return events


def triton_outputs(script: Script, fault: str) -> list[dict[str, Any]]:
    running, total = counts(script, fault)
    outputs: list[dict[str, Any]] = []
    for i, (_, text, tokens) in enumerate(script.chunks):
        one: dict[str, Any] = {"text_output": text}
        if fault != "silent":
            one |= {"num_output_tokens": running[i], "output_ids": list(range(tokens))}
        outputs.append(one)
    if fault != "endless":
        outputs[-1] |= {"finish_reason": "length", "stop_reason": "None"}
    if fault == "fewer":
        outputs[-1]["num_output_tokens"] = total
    return outputs


class Http(asyncio.Protocol):
    """One connection: requests one after the other, answers in chunked encoding."""

    def __init__(self, book: Book) -> None:
        self.book = book
        self.buffer = b""

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        while b"\r\n\r\n" in self.buffer:
            head, rest = self.buffer.split(b"\r\n\r\n", 1)
            length = 0
            for line in head.split(b"\r\n")[1:]:
                if line.lower().startswith(b"content-length:"):
                    length = int(line[15:])
            if len(rest) < length:
                return
            self.buffer = rest[length:]
            path = head.split(b" ", 2)[1].decode()
            self.answer(path, rest[:length])

    def whole(self, body: bytes, status: int = 200) -> None:
        head = (
            f"HTTP/1.1 {status} Said\r\nContent-Length: {len(body)}\r\nContent-Type:"
            " application/json\r\n\r\n"
        )
        self.transport.write(head.encode() + body)

    def answer(self, path: str, body: bytes) -> None:
        script = self.book.script
        if path == "/metrics":
            self.whole(self.book.page().encode())
        elif path == "/log":
            self.whole(json.dumps(self.book.entries).encode())
        elif path == "/v2/health/ready":
            self.whole(b"", 200 if script.triton else 404)
        elif path == "/v1/models":
            self.whole(b'{"data": [{"id": "stub"}]}')
        elif path.endswith("/config"):
            self.whole(json.dumps(model_config(script)).encode())
        elif path.endswith("/ready"):
            self.whole(b"", 200 if path == "/v2/models/tensorrt_llm/ready" else 400)
        else:
            self.stream(path, json.loads(body))

    def stream(self, path: str, asked: dict[str, Any]) -> None:
        script = self.book.script
        chat = path.endswith("/chat/completions")
        if path.endswith("/generate_stream"):
            prompt = asked["text_input"]
        else:
            prompt = asked["messages"][0]["content"] if chat else asked["prompt"]
            prompt = (
                prompt
                if isinstance(prompt, str)
                else "".join(part.get("text", "") for part in prompt)
            )
        fault = fault_of(prompt)
        options = asked.get("stream_options", {})
        if fault == "refuse" or (script.refuses_continuous and "continuous_usage_stats" in options):
            self.whole(json.dumps({"error": "no, on purpose"}).encode(), 400)
            return
        entry = self.book.begin(prompt, asked)
        if path.endswith("/generate_stream"):
            events = [
                b"data: " + json.dumps(one).encode() + b"\n\n"
                for one in triton_outputs(script, fault)
            ]
            if fault == "garbage":
                events[1] = b"data: {this is no JSON\n\n"
        else:
            usage = script.usage
            if usage == "continuous" and not options.get("continuous_usage_stats"):
                usage = "total" if options.get("include_usage") else "none"
            events = openai_events(script, fault, chat, usage)
        events = [b"".join(events)] if script.at_once else events
        self.transport.write(
            b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding:"
            b" chunked\r\n\r\n"
        )
        loop = asyncio.get_running_loop()
        self.send(loop, loop.time(), events, 0, entry, fault)

    def send(
        self,
        loop: Any,
        began: float,
        events: list[bytes],
        i: int,
        entry: dict[str, Any],
        fault: str,
    ) -> None:
        if i == 1 and fault == "stall":
            return
        if i == 1 and fault == "die":
            self.transport.abort()
            return
        factor = (
            self.book.script.plain_factor if entry["asked"].get("num_draft_tokens") == 0 else 1.0
        )
        due = began + factor * self.book.script.chunks[i][0] / 1000
        loop.call_at(due, self.write, loop, due, events, i, entry, fault)

    def write(
        self, loop: Any, due: float, events: list[bytes], i: int, entry: dict[str, Any], fault: str
    ) -> None:
        if self.transport.is_closing():
            return
        last = i == len(events) - 1
        parts = [events[i]]
        if fault == "half":
            middle = len(events[i]) // 2
            parts = [events[i][:middle], events[i][middle:]]
        wire = b"".join(f"{len(part):x}\r\n".encode() + part + b"\r\n" for part in parts)
        entry["written"].append((time.monotonic_ns(), self.book.script.chunks[i][2]))
        if last:
            self.book.end()
        self.transport.write(wire + (b"0\r\n\r\n" if last else b""))
        if not last:
            self.send(loop, due, events, i + 1, entry, fault)


def model_config(script: Script) -> dict[str, Any]:
    """As Triton's HTTP gives it: of a packaged repository."""
    from google.protobuf import json_format

    from toolkit.triton.package import model_config as packaged

    found: dict[str, Any] = json_format.MessageToDict(
        packaged.build(decoupled=script.decoupled), preserving_proto_field_name=True
    )
    return found


def response_of(outputs: dict[str, Any]) -> bytes:
    """The outputs of one response, as Triton encodes them."""
    import numpy as np
    from tritonclient.grpc import service_pb2

    response = service_pb2.ModelStreamInferResponse()
    for name, value in outputs.items():
        values = value if isinstance(value, list) else [value]
        text = bool(values) and isinstance(values[0], str)
        response.infer_response.outputs.add(
            name=name, datatype="BYTES" if text else "INT32", shape=[len(values)]
        )
        raw = (
            b"".join(struct.pack("<I", len(one.encode())) + one.encode() for one in values)
            if text
            else b""
        )
        response.infer_response.raw_output_contents.append(
            raw if text else np.asarray(values, np.int32).tobytes()
        )
    encoded: bytes = response.SerializeToString()
    return encoded


async def serve_grpc(book: Book) -> tuple[Any, int]:
    import grpc
    from google.protobuf import json_format
    from tritonclient.grpc import model_config_pb2, service_pb2

    config = json_format.ParseDict(model_config(book.script), model_config_pb2.ModelConfig())
    usual = [response_of(one) for one in triton_outputs(book.script, "")]

    async def model_config_call(request: bytes, context: Any) -> bytes:
        asked = service_pb2.ModelConfigRequest.FromString(request)
        if asked.name != "tensorrt_llm":
            await context.abort(grpc.StatusCode.NOT_FOUND, f"unknown model {asked.name}")
        answer: bytes = service_pb2.ModelConfigResponse(config=config).SerializeToString()
        return answer

    async def infer(requests: Any, context: Any) -> None:
        asked = service_pb2.ModelInferRequest.FromString(await context.read())
        prompt = asked.raw_input_contents[[one.name for one in asked.inputs].index("text_input")][
            4:
        ].decode()
        fault = fault_of(prompt)
        if fault == "refuse":
            await context.write(
                service_pb2.ModelStreamInferResponse(
                    error_message="no, on purpose"
                ).SerializeToString()
            )
            return
        frames = (
            usual if not fault else [response_of(one) for one in triton_outputs(book.script, fault)]
        )
        entry = book.begin(prompt, {})
        loop = asyncio.get_running_loop()
        due = loop.time()
        for i, (frame, (delay_ms, _, tokens)) in enumerate(
            zip(frames, book.script.chunks, strict=True)
        ):
            if i == 1 and fault == "stall":
                await asyncio.sleep(60)
            if i == 1 and fault == "die":
                await context.abort(grpc.StatusCode.UNAVAILABLE, "died on purpose")
            due += delay_ms / 1000
            await asyncio.sleep(max(0.0, due - loop.time()))
            entry["written"].append((time.monotonic_ns(), tokens))
            if i == len(frames) - 1:
                book.end()
            await context.write(b"\xff\xff no message" if i == 1 and fault == "garbage" else frame)

    handlers = {
        "ModelConfig": grpc.unary_unary_rpc_method_handler(model_config_call),
        "ModelStreamInfer": grpc.stream_stream_rpc_method_handler(infer),
    }
    server = grpc.aio.server()
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("inference.GRPCInferenceService", handlers),)
    )
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    return server, port


async def main(script: Script) -> None:
    book = Book(script)
    loop = asyncio.get_running_loop()
    http = await loop.create_server(lambda: Http(book), "127.0.0.1", 0, backlog=1024)
    server, port = await serve_grpc(book)
    print(json.dumps({"http": http.sockets[0].getsockname()[1], "grpc": port}), flush=True)
    await loop.run_in_executor(None, sys.stdin.read)  # until whoever started this has gone
    await server.stop(None)
    http.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("script")
    asyncio.run(main(Script.load(parser.parse_args().script)))
