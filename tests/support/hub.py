"""A hub of one model on loopback: the two routes that huggingface_hub asks for a snapshot, and
nothing else.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class SmallHub:
    """folder: what `name` holds. gone: answer as if out of reach. asked: file names that were
    sent.
    """

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.folder, self.asked = name, folder, list[str]()
        self.status = 200
        self.error: str | None = None
        self.url = ""

    def listing(self) -> dict[str, Any]:
        files = [
            {"rfilename": file.name, "size": file.stat().st_size}
            for file in sorted(self.folder.iterdir())
        ]
        return {
            "id": self.name,
            "modelId": self.name,
            "sha": COMMIT,
            "siblings": files,
            "private": False,
            "tags": [],
        }

    def tree(self) -> list[dict[str, Any]]:
        return [
            {
                "type": "file",
                "path": file.name,
                "size": file.stat().st_size,
                "oid": hashlib.sha1(file.read_bytes()).hexdigest(),
            }
            for file in sorted(self.folder.iterdir())
        ]


@contextmanager
def small_hub(name: str, folder: Path) -> Iterator[SmallHub]:
    hub = SmallHub(name, folder)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def answer(self, body: bytes, headers: dict[str, str], *, send: bool) -> None:
            self.send_response(hub.status)
            for key, value in headers.items():
                self.send_header(key, value)
            if hub.error is not None:
                self.send_header("X-Error-Code", hub.error)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if send:
                self.wfile.write(body)

        def route(self, *, send: bool) -> None:
            path = self.path.split("?")[0]
            if hub.status != 200:
                self.answer(b"", {}, send=send)
            elif path.startswith(f"/api/models/{hub.name}/tree/"):
                self.answer(
                    json.dumps(hub.tree()).encode(), {"Content-Type": "application/json"}, send=send
                )
            elif path.startswith(f"/api/models/{hub.name}"):
                self.answer(
                    json.dumps(hub.listing()).encode(),
                    {"Content-Type": "application/json"},
                    send=send,
                )
            else:
                file = hub.folder / path.rsplit("/", 1)[1]
                content = file.read_bytes()
                if send:
                    hub.asked.append(file.name)
                tag = hashlib.sha1(content).hexdigest()
                self.answer(
                    content,
                    {"ETag": f'"{tag}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"},
                    send=send,
                )

        def do_GET(self) -> None:
            self.route(send=True)

        def do_HEAD(self) -> None:
            self.route(send=False)

        def log_message(self, *arguments: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
