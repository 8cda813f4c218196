"""A small HTTP server that answers as vLLM's OpenAI server does, from a script."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
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


@dataclass(frozen=True)
class Said:
    """One answer. log_probs: of each token, by token id."""

    pieces: Sequence[Piece]
    prompt_ids: Sequence[int] = PROMPT_IDS
    finish_reason: str = "length"
    speculation: dict[str, Any] | None = None
    log_probs: Sequence[dict[int, float]] | None = None


@dataclass
class Script:
    """What the server does. answer: makes an answer of the body of a request; None: it is always
    `pieces`. counters: the page of its counters; None: of the requests alone. delay_s: before every
    event. cut: the events that are sent before the connection breaks. status: of an error, with
    `message`. error_event: ends the stream.
    """

    pieces: Sequence[Piece] = PIECES
    speculation: dict[str, Any] | None = None
    delay_s: float = 0.0
    cut: int | None = None
    status: int = 200
    message: str = ""
    error_event: int | None = None
    healthy: bool = True
    answer: Callable[[dict[str, Any]], Said] | None = None
    counters: Callable[[], str] | None = None
    requests: list[dict[str, Any]] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    broken_off: threading.Event = field(default_factory=threading.Event)


def log_probs(tokens: Sequence[int], rows: Sequence[dict[int, float]]) -> dict[str, Any]:
    """The chosen token, then the two best, as vLLM orders them."""
    best = [sorted(row, key=lambda token: -row[token])[:2] for row in rows]
    return {
        "tokens": [f"token_id:{token}" for token in tokens],
        "token_logprobs": [row[token] for token, row in zip(tokens, rows, strict=True)],
        "top_logprobs": [
            {f"token_id:{name}": row[name] for name in dict.fromkeys([token, *two])}
            for token, two, row in zip(tokens, best, rows, strict=True)
        ],
    }


def said(script: Script, body: dict[str, Any]) -> Said:
    if script.answer is not None:
        return script.answer(body)
    tokens = [token for _, tokens in script.pieces for token in tokens]
    rows = [{token: -0.25, token + 1: -1.5, 99: -3.0} for token in tokens]
    return Said(script.pieces, speculation=script.speculation, log_probs=rows)


def events(script: Script, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The objects of a stream. Raises nothing; the caller makes faults of them."""
    answer, count = said(script, body), 0
    for number, (text, tokens) in enumerate(answer.pieces):
        rows = (answer.log_probs or ())[count : count + len(tokens)]
        count += len(tokens)
        is_last = number == len(answer.pieces) - 1
        choice: dict[str, Any] = {
            "index": 0,
            "text": text,
            "finish_reason": answer.finish_reason if is_last else None,
            "stop_reason": None,
            "token_ids": list(tokens),
            "prompt_token_ids": list(answer.prompt_ids) if number == 0 else None,
            "logprobs": log_probs(tokens, rows) if body.get("logprobs") else None,
        }
        yield {"choices": [choice], "usage": usage(len(answer.prompt_ids), count)}
    last: dict[str, Any] = {"choices": [], "usage": usage(len(answer.prompt_ids), count)}
    if answer.speculation is not None:
        last["metrics"] = {"speculative_decoding": answer.speculation}
    yield last


def usage(prompt: int, count: int) -> dict[str, int]:
    return {
        "prompt_tokens": prompt,
        "completion_tokens": count,
        "total_tokens": prompt + count,
    }


def whole(script: Script, body: dict[str, Any]) -> dict[str, Any]:
    """The answer that is not streamed."""
    *chunks, last = events(script, body)
    choices = [chunk["choices"][0] for chunk in chunks]
    scores = [choice["logprobs"] for choice in choices if choice["logprobs"] is not None]
    joined = {
        **choices[-1],
        "text": "".join(choice["text"] for choice in choices),
        "token_ids": [token for choice in choices for token in choice["token_ids"]],
        "prompt_token_ids": choices[0]["prompt_token_ids"],
        "logprobs": {
            name: [value for score in scores for value in score[name]] for name in scores[0]
        }
        if scores
        else None,
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
                page = f'vllm:request_success_total{{model_name="{MODEL}"}} {len(script.requests)}'
                if script.counters is not None:
                    page = script.counters()
                self._send(200, f"{page}\n".encode())
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
