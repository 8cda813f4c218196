"""An OpenAI server in this process that answers, refuses and counts as vLLM 0.32 does.

    with FakeVllm(chat_template=False) as server:
        server.url, server.asked

A request's steps are scripted: the first event has one token, and every later one the accepted
draft tokens of a verify step and one more. So all counts of a run can be worked out by hand.
"""

from __future__ import annotations

import json
import threading
from collections import Counter
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any

NO_TEMPLATE = (  # vllm/renderers/hf.py
    "As of transformers v4.44, default chat template is no longer allowed, so you must provide a"
    " chat template if the tokenizer does not define one."
)


@dataclass
class FakeVllm:
    """steps: (drafted, accepted) of every verify step of every request. counts: what a chunk tells
    of its tokens: usage, ids, last (usage with the last chunk alone) or nothing. tells: the level
    of --per-request-spec-decode-metrics. refused: keys of a request that are answered with 400.
    foreign: requests of another client that are counted with each of ours.
    """

    steps: tuple[tuple[int, int], ...] = ((3, 3), (3, 1), (3, 0), (3, 2))
    draft_len: int = 3
    model: str = "mine"
    counts: str = "usage"
    tells: str = "none"
    refused: tuple[str, ...] = ()
    chat_template: bool = True
    refusal: tuple[int, str] = (400, NO_TEMPLATE)
    speculates: bool = True
    foreign: int = 0
    asked: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    totals: Counter[str] = field(default_factory=Counter)

    def __enter__(self) -> FakeVllm:
        fake = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                if self.path == "/metrics":
                    fake.send(self, 200, fake.page().encode())
                elif self.path == "/v1/models":
                    fake.send(self, 200, json.dumps({"data": [{"id": fake.model}]}).encode())
                else:
                    fake.send(self, 404, b'{"detail":"Not Found"}')

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                fake.answer(self, body)

            def log_message(self, *arguments: object) -> None:
                pass

        self._lock = threading.Lock()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    @staticmethod
    def send(handler: BaseHTTPRequestHandler, status: int, body: bytes) -> None:
        handler.send_response(status)
        handler.send_header("Content-Length", str(len(body)))
        handler.end_headers()
        handler.wfile.write(body)

    def answer(self, handler: BaseHTTPRequestHandler, body: dict[str, Any]) -> None:
        with self._lock:
            self.asked.append((handler.path, body))
        is_chat = handler.path.endswith("/chat/completions")
        unknown = [
            key for key in self.refused if key in body or key in body.get("stream_options", ())
        ]
        status, words = (400, f"unknown argument {unknown}") if unknown else (200, "")
        if is_chat and not self.chat_template:
            status, words = self.refusal
        if status != 200:
            error = {"message": words, "type": "BadRequestError", "param": None, "code": status}
            self.send(handler, status, json.dumps({"error": error}).encode())
            return
        handler.send_response(200)
        handler.send_header("Content-Type", "text/event-stream")
        handler.send_header("Transfer-Encoding", "chunked")
        handler.end_headers()
        events = self.events(body, is_chat)
        with self._lock:
            self.count()
        for event in [*events, b"data: [DONE]\n\n"]:
            handler.wfile.write(f"{len(event):x}\r\n".encode() + event + b"\r\n")
            handler.wfile.flush()
        handler.wfile.write(b"0\r\n\r\n")

    def events(self, body: dict[str, Any], is_chat: bool) -> list[bytes]:
        stream = body.get("stream_options", {})
        chunks = [1, *(1 + accepted for _, accepted in self.steps)]
        running = 0
        events: list[bytes] = []
        for number, tokens in enumerate(chunks, 1):
            running += tokens
            is_last = number == len(chunks)
            text = "ab" * tokens
            choice: dict[str, Any] = {"delta": {"content": text}} if is_chat else {"text": text}
            choice |= {"index": 0, "finish_reason": "length" if is_last else None}
            if self.counts == "ids" and body.get("return_token_ids"):
                choice["token_ids"] = list(range(tokens))
            data: dict[str, Any] = {"choices": [choice]}
            is_continuous = self.counts == "usage" and stream.get("continuous_usage_stats")
            if is_continuous or (self.counts == "last" and is_last):
                data["usage"] = {"prompt_tokens": 5, "completion_tokens": running}
            events.append(b"data: " + json.dumps(data).encode() + b"\n\n")
        if stream.get("include_usage") and self.counts not in ("last", "nothing"):
            data = {
                "choices": [],
                "usage": {"prompt_tokens": 5, "completion_tokens": running},
                **self.metrics(),
            }
            events.append(b"data: " + json.dumps(data).encode() + b"\n\n")
        return events

    def metrics(self) -> dict[str, Any]:
        if self.tells == "none" or not self.speculates:
            return {}
        accepted = Counter(accepted for _, accepted in self.steps)
        counts: dict[str, Any] = {
            "mean_acceptance_length": 1.0,
            "draft_acceptance_rate": 0.0,
            "acceptance_histogram": [accepted[j] for j in range(self.draft_len + 1)],
            "num_spec_steps": len(self.steps),
            "num_accepted_draft_tokens": sum(accepted for _, accepted in self.steps),
            "num_draft_tokens": sum(drafted for drafted, _ in self.steps),
            "num_spec_tokens": self.draft_len,
        }
        if self.tells == "detailed":
            counts["per_step_accepted"] = [accepted for _, accepted in self.steps]
            counts["per_step_drafted"] = [drafted for drafted, _ in self.steps]
        return {"metrics": {"speculative_decoding": counts}}

    def count(self) -> None:
        requests = 1 + self.foreign
        self.totals["requests"] += requests
        self.totals["tokens"] += requests * (1 + sum(1 + accepted for _, accepted in self.steps))
        for drafted, accepted in self.steps if self.speculates else ():
            self.totals["drafts"] += requests
            self.totals["drafted"] += requests * drafted
            self.totals["accepted"] += requests * accepted
            for i in range(accepted):
                self.totals[f"accepted {i}"] += requests

    def page(self) -> str:
        labels = f'engine="0",model_name="{self.model}"'
        with self._lock:
            totals = Counter(self.totals)
        values = {
            f'vllm:request_success_total{{{labels},finished_reason="length"}}': "requests",
            f"vllm:generation_tokens_total{{{labels}}}": "tokens",
        }
        if self.speculates:
            name = "vllm:spec_decode_num"
            values |= {
                f"{name}_drafts_total{{{labels}}}": "drafts",
                f"{name}_draft_tokens_total{{{labels}}}": "drafted",
                f"{name}_accepted_tokens_total{{{labels}}}": "accepted",
                **{
                    f'{name}_accepted_tokens_per_pos_total{{{labels},position="{i}"}}': (
                        f"accepted {i}"
                    )
                    for i in range(self.draft_len)
                },
            }
        return "".join(f"{sample} {float(totals[what])}\n" for sample, what in values.items())
