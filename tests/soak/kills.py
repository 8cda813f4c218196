"""kill -9 of model, server and gateway in the midst of 50 streams: what clients see, and how soon
all is well again.

    python -m tests.soak.kills [--streams 50] [--layout llmapi | bls]
                               [--config configs/quickstart.yaml]

Clients speak OpenAI's protocol to the gateway, over and over, and come again after an error, as
the openai package does by itself. Server and gateway are started again by this program, as a
service manager would. A client must be told within TOLD_S: by an event of the stream, a status, or
a connection that closes; nobody may hang, and no text may be wrong. The exit code is 1 if one does.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
from collections import Counter
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np

from tests.soak.__main__ import BACK_S, PROMPTS, QUICKSTART, TOLD_S, repository, wait_for_end
from tests.soak.watch import stub_of
from toolkit.client import Client, read_prompts
from toolkit.config.schema import TritonConfig
from toolkit.triton.process.server import TritonServer
from toolkit.triton.tensors.contract import BLS_MODEL, MODEL

MAX_TOKENS = 96
MAX_PROMPTS = 24
CALM_S = 4.0
PAUSE_S = 0.2  # between an error and the next try
HANGS_S = 30.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """One request of a client. what: `whole`, or what it was told. ended_s: monotonic."""

    what: str
    began_s: float
    ended_s: float
    is_right: bool = True


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port: int = listening.getsockname()[1]
    return port


def run_gateway(port: int, grpc_url: str) -> None:
    from toolkit.config.schema import GatewayConfig
    from toolkit.gateway.app import Gateway
    from toolkit.gateway.arms import SERVED, Arm, OneArm
    from toolkit.gateway.backends import TritonBackend
    from toolkit.gateway.guard import Guard
    from toolkit.gateway.program import run

    config = GatewayConfig(port=port)

    def make() -> Gateway:
        guard = Guard((), None, 1000, time.monotonic)
        arms = OneArm(Arm(SERVED, TritonBackend(grpc_url)))
        return Gateway(config, "m", arms, guard, log=lambda line: None)

    run(config, make, ready=lambda url: None)


def ask(port: int, prompt: str) -> tuple[str, str]:
    """(`whole` or what went wrong, the text) of one streamed request."""
    body = {"model": "m", "prompt": prompt, "max_tokens": MAX_TOKENS, "temperature": 0}
    data = json.dumps({**body, "stream": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n"
    text = ""
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=HANGS_S) as connection:
            connection.sendall(f"{head}Connection: close\r\n\r\n".encode() + data)
            with connection.makefile("rb") as lines:
                status = int(lines.readline().split()[1])
                if status == 400:
                    return f"status 400: {lines.read()[-300:]!r}", text
                if status != 200:
                    return f"status {status}", text
                for line in lines:
                    if line.startswith(b"data: [DONE]"):
                        return "whole", text
                    if line.startswith(b"data: "):
                        event = json.loads(line[6:])
                        if "error" in event:
                            return "error in the stream", text
                        text += event["choices"][0]["text"]
        return "stream cut off", text
    except TimeoutError:
        return "HUNG", text
    except ConnectionRefusedError:
        return "connection refused", text
    except (OSError, IndexError):
        return "connection broken", text


class Clients:
    """Threads that ask over and over. references: prompt -> text."""

    def __init__(self, port: int, references: dict[str, str], streams: int) -> None:
        self._port, self._references = port, references
        self.outcomes: list[Outcome] = []
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(n,)) for n in range(streams)]
        for thread in self._threads:
            thread.start()

    def _ask(self, number: int) -> None:
        prompts = list(self._references)
        while not self._stop.is_set():
            prompt = prompts[number % len(prompts)]
            number += 1
            began_s = time.monotonic()
            what, text = ask(self._port, prompt)
            reference = self._references[prompt]
            is_right = text == reference if what == "whole" else reference.startswith(text)
            self.outcomes.append(Outcome(what, began_s, time.monotonic(), is_right))
            if what != "whole":
                time.sleep(PAUSE_S)

    def stop(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()


def wait_until_whole(clients: Clients, since_s: float) -> float:
    """When the first request that began after `since_s` was answered whole."""
    until = time.monotonic() + BACK_S
    while time.monotonic() < until:
        for outcome in list(clients.outcomes):
            if outcome.began_s > since_s and outcome.what == "whole":
                return outcome.ended_s
        time.sleep(0.02)
    raise SystemExit(f"no request was answered within {BACK_S:g} s after the kill")


def told(clients: Clients, killed_s: float, back_s: float) -> tuple[Counter[str], list[float]]:
    """What the requests that were open at the kill were told, and after how long."""
    hit = [o for o in clients.outcomes if o.began_s < killed_s < o.ended_s]
    return Counter(o.what for o in hit), [o.ended_s - killed_s for o in hit if o.what != "whole"]


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--streams", type=int, default=50)
    parser.add_argument("--layout", choices=("llmapi", "bls"), default="llmapi")
    parser.add_argument("--config", type=Path, default=QUICKSTART, help="of the pair")
    options = parser.parse_args()
    model = BLS_MODEL if options.layout == "bls" else MODEL
    context = multiprocessing.get_context("spawn")
    port = free_port()
    config = TritonConfig(http_port=free_port(), grpc_port=free_port(), metrics_port=free_port())
    rows: list[dict[str, Any]] = []
    failed = False

    def start_gateway(grpc_url: str) -> BaseProcess:
        process = context.Process(target=run_gateway, args=(port, grpc_url))
        process.start()
        return process

    with TritonServer(repository(options.config, options.layout), config) as server:
        with Client(server.grpc_url) as client:
            prompts = read_prompts(PROMPTS)[:MAX_PROMPTS]
            references = {
                prompt: client.generate(prompt, max_tokens=MAX_TOKENS, temperature=0.0).text
                for prompt in prompts
            }
        gateway = start_gateway(server.grpc_url)
        while ask(port, prompts[0])[0] != "whole":
            time.sleep(0.1)
        clients = Clients(port, references, options.streams)
        try:
            for what in ("model", "server", "gateway"):
                time.sleep(CALM_S)
                killed_s = time.monotonic()
                if what == "gateway":
                    gateway.kill()
                    gateway.join()
                    gateway = start_gateway(server.grpc_url)
                else:
                    pid = stub_of(server.pid, model) if what == "model" else server.pid
                    os.kill(pid, signal.SIGKILL)
                    wait_for_end(server)
                    server.start()
                back_s = wait_until_whole(clients, killed_s) - killed_s
                time.sleep(CALM_S)
                outcomes, after_s = told(clients, killed_s, back_s)
                slowest = max(after_s, default=0.0)
                failed |= slowest > TOLD_S
                rows.append(
                    {
                        "killed": what,
                        "open": sum(outcomes.values()),
                        "told": dict(outcomes),
                        "told_p50_s": float(np.median(after_s)) if after_s else None,
                        "told_max_s": slowest,
                        "back_s": back_s,
                    }
                )
        finally:
            clients.stop()
            gateway.terminate()
            gateway.join()
    wrong = sum(not outcome.is_right for outcome in clients.outcomes)
    hung = sum(outcome.what == "HUNG" for outcome in clients.outcomes)
    print(f"{'killed':<9}{'open':>5}{'told p50':>10}{'max':>8}{'whole again':>13}  what they saw")
    for row in rows:
        seen = ", ".join(f"{count} {what}" for what, count in sorted(row["told"].items()))
        p50 = "-" if row["told_p50_s"] is None else f"{row['told_p50_s']:.1f} s"
        print(
            f"{row['killed']:<9}{row['open']:>5}{p50:>10}{row['told_max_s']:>6.1f} s"
            f"{row['back_s']:>11.1f} s  {seen}"
        )
    total = Counter(outcome.what for outcome in clients.outcomes)
    print(f"all {len(clients.outcomes)} requests: {dict(total)}; {wrong} wrong texts, {hung} hung")
    print(
        json.dumps(
            {
                "benchmark": "kills",
                "pair": options.config.stem,
                "layout": options.layout,
                "rows": rows,
            }
        )
    )
    return 1 if failed or wrong or hung else 0


if __name__ == "__main__":
    sys.exit(main())
