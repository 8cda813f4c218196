"""A roll-out between two real servers of which the new one is slower: after how many sessions does
everything go back to the old one?

    python -m tests.soak.slower [--only slower|equal] [--step-ms 3] [--concurrency 4]
                                [--sessions 20000] [--seed 0]

Both are tritonservers with the same small random pair, so texts and acceptance are equal; before
every step of its runtime, the new one sleeps. `toolkit rollout run` stands before them with its
default steps and limits, and clients send a session of one request after the other. How much slower
it is, is measured before, at the same concurrency.

The control is the same roll-out of an equal server, which sleeps for no time. The exit code is 0 if
the slower one is rolled back by its times, the equal one is not, and all clients are answered. So
that the control can see as much, it goes on to the end of its roll-out, or of the sessions.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.support.checkpoints import write_pair
from tests.support.cli import write_config
from tests.support.gateways import post
from tests.support.serving import package_pair
from toolkit.client import Client
from toolkit.triton.process.server import TritonServer

KINDS = ("slower", "equal")
MAX_TOKENS = 12
WARM_UP = 20
MEASURED = 100
SLEEPS = """

from toolkit.speculative.runtime import SpeculativeRuntime as _Runtime

_step = _Runtime.step


def _slower(self):
    time.sleep({seconds})
    return _step(self)


_Runtime.step = _slower
"""


def slowed(repository: Path, copy: Path, seconds: float) -> Path:
    """A copy of the repository whose model sleeps so long before every step."""
    shutil.copytree(repository, copy)
    model = copy / "tensorrt_llm" / "1" / "model.py"
    model.write_text(model.read_text() + SLEEPS.format(seconds=seconds))
    return copy


def request(number: int, seed: int) -> dict[str, Any]:
    """A request like nobody else's; a third of them are greedy, so that some are copied."""
    chance = random.Random(f"{seed} {number}")
    prompt = f"def f{number}({'x' * chance.randint(1, 40)}):"
    temperature = chance.choice((0.0, 0.8, 1.0))
    return {
        "model": "tiny",
        "prompt": prompt,
        "max_tokens": MAX_TOKENS,
        "temperature": temperature,
        "seed": number,
    }


def time_per_token_ms(server: TritonServer, concurrency: int) -> float:
    """The median of requests to this server alone."""
    with Client(server.grpc_url) as client:
        prompts = [f"def g{number}(x):" for number in range(WARM_UP + MEASURED)]
        options = {"max_tokens": MAX_TOKENS, "temperature": 0.0}
        timings = client.measure(prompts, concurrency=concurrency, **options)[WARM_UP:]
    return statistics.median((t.e2e_ns or 0) / 1e6 / len(t.token_ids or (0,)) for t in timings)


class Sessions:
    """The clients. seen: status -> answers."""

    def __init__(self, url: str, seed: int, count: int) -> None:
        self._url, self._seed = url, seed
        self._numbers, self._lock = iter(range(count)), threading.Lock()
        self.seen: dict[int, int] = {}
        self.is_over = threading.Event()

    def send(self) -> None:
        while not self.is_over.is_set():
            with self._lock:
                number = next(self._numbers, None)
            if number is None:
                return
            status = post(self._url, "/v1/completions", request(number, self._seed))[0]
            with self._lock:
                self.seen[status] = self.seen.get(status, 0) + 1


def state_of(url: str) -> dict[str, Any]:
    with urllib.request.urlopen(f"{url}/rollout.json", timeout=30) as answer:
        state: dict[str, Any] = json.loads(answer.read())
    return state


def rolled(
    folder: Path, pair: tuple[Path, Path], addresses: tuple[str, str], asked: argparse.Namespace
) -> tuple[dict[str, Any], dict[int, int], float]:
    """(the roll-out's state at its end, what clients saw, seconds)."""
    folder.mkdir()
    config = write_config(folder, pair)
    baseline, candidate = addresses
    command = [sys.executable, "-m", "toolkit", "rollout", "run", str(config), candidate]
    command += ["--baseline", baseline]
    began_s = time.monotonic()
    with (
        (folder / "gateway.log").open("w") as log,
        subprocess.Popen(
            command, cwd=folder, stdout=subprocess.PIPE, stderr=log, text=True
        ) as process,
    ):
        assert process.stdout is not None
        first = process.stdout.readline()
        if not first.startswith("gateway"):
            raise SystemExit((folder / "gateway.log").read_text())
        url = first.split()[1]
        sessions = Sessions(url, asked.seed, asked.sessions)
        try:
            with ThreadPoolExecutor(asked.concurrency) as pool:
                sending = [pool.submit(sessions.send) for _ in range(asked.concurrency)]
                while not all(future.done() for future in sending):
                    state = state_of(url)
                    if state["outcome"] in ("promoted", "rolled back"):
                        sessions.is_over.set()
                    time.sleep(0.2)
                for future in sending:
                    future.result()
            return state_of(url), sessions.seen, time.monotonic() - began_s
        finally:
            process.terminate()


def judged(
    kind: str, folder: Path, pair: tuple[Path, Path], old: Path, asked: argparse.Namespace
) -> bool:
    """Roll a candidate of this kind out and print what happens: whether it is what should."""
    folder.mkdir()
    step_ms = asked.step_ms if kind == "slower" else 0.0
    new = slowed(old, folder / "new", step_ms / 1000)
    with TritonServer(old) as baseline, TritonServer(new) as candidate:
        times = [time_per_token_ms(server, asked.concurrency) for server in (baseline, candidate)]
        print(
            f"{kind}: time per token, {asked.concurrency} requests at a time: {times[0]:.2f} and"
            f" {times[1]:.2f} ms, {times[1] / times[0]:.2f} times as slow",
            flush=True,
        )
        addresses = baseline.grpc_url, candidate.grpc_url
        state, seen, seconds = rolled(folder / "run", pair, addresses, asked)
    arms = state["arms"]
    print(f"{state['outcome']}: {state['why']}; after {seconds:.0f} s; clients saw {seen}")
    for arm, figures in arms.items():
        print(f"{arm}: " + ", ".join(f"{key} {value}" for key, value in figures.items()))
    for finding in state["evidence"]:
        print(f"{finding['test']}: {finding['wealth']:.3g} of {finding['limit']:g}")
    is_rolled_back = state["outcome"] == "rolled back"
    is_by_times = any(test in state["why"] for test in ("ttft", "time per token"))
    is_right = is_rolled_back and is_by_times if kind == "slower" else not is_rolled_back
    row = {
        "candidate": kind,
        "step_ms": step_ms,
        "slower": times[1] / times[0],
        "outcome": state["outcome"],
        "why": state["why"],
        "share_percent": state["share_percent"],
        "sessions": {arm: figures["sessions"] for arm, figures in arms.items()},
        "steps": [decision["why"] for decision in state["decisions"]],
        "seen": seen,
    }
    print(json.dumps({"benchmark": "slower", **row}), flush=True)
    return is_right and set(seen) == {200}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", choices=KINDS, help="default: both, one after the other")
    parser.add_argument("--step-ms", type=float, default=3.0, help="of the slower one")
    parser.add_argument("--concurrency", type=int, default=4)
    parser.add_argument("--sessions", type=int, default=20_000, help="of each roll-out, at most")
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="slower-") as name:
        folder = Path(name)
        (folder / "pair").mkdir()
        pair = write_pair(folder / "pair")
        old = package_pair(pair, folder / "old").path
        kinds = KINDS if asked.only is None else (asked.only,)
        outcomes = [judged(kind, folder / kind, pair, old, asked) for kind in kinds]
        return 0 if all(outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
