"""A small HTTP server that answers as vLLM's OpenAI server does, from a script."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

MODEL = "tiny"
PROMPT_IDS = (1, 7)
# A chunk of an answer: its text and its tokens.
Piece = tuple[str, tuple[int, ...]]
PIECES: tuple[Piece, ...] = ((" a", (5,)), ("bc d", (6, 8, 9)), ("!", (4,)))
SPECULATION: dict[str, Any] = {
    "mean_acceptance_length": 2.0,
    "draft_acceptance_rate": 0.4,
    "acceptance_histogram": [1, 0, 1, 0],
    "num_spec_steps": 2,
    "num_accepted_draft_tokens": 2,
    "num_draft_tokens": 5,
    "num_spec_tokens": 3,
    "per_step_accepted": [2, 0],
    "per_step_drafted": [3, 2],
}


@dataclass
class Script:
    """What the server does. delay_s: before every event. cut: the events that are sent before the
    connection breaks. status: of an error, with `message`. error_event: ends the stream.
    """

    pieces: Sequence[Piece] = PIECES
    speculation: dict[str, Any] | None = None
    delay_s: float = 0.0
    cut: int | None = None
    status: int = 200
    message: str = ""
    error_event: int | None = None
    healthy: bool = True
    requests: list[dict[str, Any]] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    broken_off: threading.Event = field(default_factory=threading.Event)


def log_probs(tokens: Sequence[int]) -> dict[str, Any]:
    """The chosen token, then the two best, as vLLM orders them."""
    return {
        "tokens": [f"token_id:{token}" for token in tokens],
        "token_logprobs": [-0.25 for _ in tokens],
        "top_logprobs": [
            {f"token_id:{token}": -0.25, f"token_id:{token + 1}": -1.5, "token_id:99": -3.0}
            for token in tokens
        ],
    }


def events(script: Script, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The objects of a stream. Raises nothing; the caller makes faults of them."""
    count = 0
    for number, (text, tokens) in enumerate(script.pieces):
        count += len(tokens)
        is_last = number == len(script.pieces) - 1
        choice: dict[str, Any] = {
            "index": 0,
            "text": text,
            "finish_reason": "length" if is_last else None,
            "stop_reason": None,
            "token_ids": list(tokens),
            "prompt_token_ids": list(PROMPT_IDS) if number == 0 else None,
            "logprobs": log_probs(tokens) if body.get("logprobs") else None,
        }
        yield {"choices": [choice], "usage": usage(count)}
    last: dict[str, Any] = {"choices": [], "usage": usage(count)}
    if script.speculation is not None:
        last["metrics"] = {"speculative_decoding": script.speculation}
    yield last


def usage(count: int) -> dict[str, int]:
    prompt = len(PROMPT_IDS)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": count,
        "total_tokens": prompt + count,
    }


def whole(script: Script, body: dict[str, Any]) -> dict[str, Any]:
    """The answer that is not streamed."""
    *chunks, last = events(script, body)
    choices = [chunk["choices"][0] for chunk in chunks]
    tokens = [token for choice in choices for token in choice["token_ids"]]
    joined = {
        **choices[-1],
        "text": "".join(choice["text"] for choice in choices),
        "token_ids": tokens,
        "prompt_token_ids": list(PROMPT_IDS),
        "logprobs": log_probs(tokens) if body.get("logprobs") else None,
    }
    return {**last, "choices": [joined]}


@contextmanager
def vllm_stub(script: Script, port: int = 0) -> Iterator[str]:
    """Serve the script until the block ends: host:port."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: Any) -> None: ...

        def do_GET(self) -> None:
            script.paths.append(self.path)
            if self.path == "/health":
                self._send(200 if script.healthy else 503, b"")
            elif self.path == "/metrics":
                count = f'vllm:request_success_total{{model_name="{MODEL}"}} {len(script.requests)}'
                self._send(200, f"{count}\n".encode())
            elif self.path == "/v1/models":
                self._send(200, json.dumps({"data": [{"id": MODEL}]}).encode())
            else:
                self._send(404, b"{}")

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            script.requests.append(body)
            if script.status != 200:
                error = {"error": {"message": script.message, "code": script.status}}
                self._send(script.status, json.dumps(error).encode())
            elif body.get("stream"):
                self._stream(body)
            else:
                time.sleep(script.delay_s)
                self._send(200, json.dumps(whole(script, body)).encode())

        def _send(self, status: int, page: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(page)))
            self.end_headers()
            self.wfile.write(page)

        def _stream(self, body: dict[str, Any]) -> None:
            self.send_response(200)
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            pages = [json.dumps(event).encode() for event in events(script, body)]
            if script.error_event is not None:
                error = {"error": {"message": script.message, "code": 500}}
                pages[script.error_event :] = [json.dumps(error).encode()]
            try:
                for number, page in enumerate([*pages, b"[DONE]"]):
                    if number == script.cut:
                        self.close_connection = True
                        return
                    time.sleep(script.delay_s)
                    self._chunk(b"data: " + page + b"\n\n")
                self._chunk(b"")
            except OSError:
                script.broken_off.set()
                self.close_connection = True

        def _chunk(self, data: bytes) -> None:
            self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
            self.wfile.flush()

    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
