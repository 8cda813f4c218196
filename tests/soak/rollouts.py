"""Roll-outs between two real servers of which the new one has a planted fault: after how many
sessions does everything go back to the old one?

    python -m tests.soak.rollouts [CONFIG] [--only FAULT] [--step-ms 3] [--concurrency 4]
                                  [--sessions 14000] [--seed 0]

CONFIG: a YAML that is built; its package is served twice. Without one, a small random pair is.
`toolkit rollout run` stands before both servers with its default steps and limits, and clients send
a session of one request after the other. The faults, each in the new server alone:

    slower      it sleeps before every step of its runtime
    wrong text  now and then it takes the target's logits for the tokens beside them
    acceptance  the draft reads other tokens than those of the text; texts are as before
    errors      it fails one request in five
    equal       none: the control

The exit code is 0 if every fault is found by a test that is meant for it within --sessions, the
equal server is not rolled back, and, but for the planted errors, all clients are answered. The
control goes on to the end of its roll-out, or of the sessions.
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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.checkpoints import write_pair
from tests.support.cli import write_config
from tests.support.gateways import post
from tests.support.serving import package_pair
from toolkit.client import Client
from toolkit.config.load import load_config
from toolkit.triton.process.server import TritonServer

ROOT = Path(__file__).parents[2]
MAX_TOKENS = 12
WARM_UP = 20
MEASURED = 100


@dataclass(frozen=True, slots=True)
class Fault:
    """code: goes behind the code of the server's model. tests: that may find it."""

    code: str
    tests: tuple[str, ...]


# Bursts, in which the engine steps by itself, would pass by what is planted in Python.
STEP_BY_STEP = """
from toolkit.speculative.runtime import SpeculativeRuntime as _Runtime

_Runtime._may_burst = lambda self, rows: None
"""
FAULTS = {
    "slower": Fault(
        STEP_BY_STEP
        + """
_step = _Runtime.step


def _slower(self):
    time.sleep({seconds})
    return _step(self)


_Runtime.step = _slower
""",
        ("ttft", "time per token"),
    ),
    "wrong text": Fault(
        STEP_BY_STEP
        + """
import random as _random

_forward = _Runtime._forward_chunks


def _wrong(self, *arguments):
    logits = _forward(self, *arguments)
    return logits.roll(1, -1) if _random.random() < 0.03 else logits


_Runtime._forward_chunks = _wrong
""",
        ("texts",),
    ),
    "acceptance": Fault(
        STEP_BY_STEP
        + """
import dataclasses as _dataclasses

from toolkit.speculative import drafters as _drafters

_chain, _rows = _drafters._chain, _drafters.token_rows
_drafters.token_rows = lambda rows: _rows(rows) * 0
_drafters._chain = lambda row, tokens: _dataclasses.replace(
    _chain(row, tokens), tokens=[0] * len(tokens)
)
""",
        ("acceptance", "time per token"),
    ),
    "errors": Fault(
        """
import random as _random

from toolkit.speculative.runtime import SpeculativeRuntime as _Runtime

_submit = _Runtime.submit


def _failing(self, *arguments):
    if _random.random() < 0.2:
        raise RuntimeError("a planted fault")
    return _submit(self, *arguments)


_Runtime.submit = _failing
""",
        ("errors", "copies"),
    ),
    "equal": Fault("", ()),
}


def planted(repository: Path, copy: Path, fault: Fault, seconds: float) -> Path:
    """A copy of the repository whose model has this fault. seconds: of a slower one's sleep."""
    shutil.copytree(repository, copy, symlinks=True)
    model = copy / "tensorrt_llm" / "1" / "model.py"
    model.write_text(model.read_text() + fault.code.replace("{seconds}", str(seconds)))
    return copy


def request(model: str, number: int, seed: int) -> dict[str, Any]:
    """A request like nobody else's; a third of them are greedy, so that some are copied."""
    chance = random.Random(f"{seed} {number}")
    prompt = f"def f{number}({'x' * chance.randint(1, 40)}):"
    temperature = chance.choice((0.0, 0.8, 1.0))
    return {
        "model": model,
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

    def __init__(self, url: str, model: str, seed: int, count: int) -> None:
        self._url, self._model, self._seed = url, model, seed
        self._numbers, self._lock = iter(range(count)), threading.Lock()
        self.seen: dict[int, int] = {}
        self.is_over = threading.Event()

    def send(self) -> None:
        while not self.is_over.is_set():
            with self._lock:
                number = next(self._numbers, None)
            if number is None:
                return
            status = post(self._url, "/v1/completions", request(self._model, number, self._seed))[0]
            with self._lock:
                self.seen[status] = self.seen.get(status, 0) + 1


def state_of(url: str) -> dict[str, Any]:
    with urllib.request.urlopen(f"{url}/rollout.json", timeout=30) as answer:
        state: dict[str, Any] = json.loads(answer.read())
    return state


def rolled(
    folder: Path, config: Path, addresses: tuple[str, str], asked: argparse.Namespace
) -> tuple[dict[str, Any], dict[int, int], float]:
    """(the roll-out's state at its end, what clients saw, seconds)."""
    folder.mkdir()
    model = load_config(config).name
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
        sessions = Sessions(url, model, asked.seed, asked.sessions)
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
    kind: str, folder: Path, config: Path, old: Path, asked: argparse.Namespace
) -> dict[str, Any]:
    """Roll a candidate with this fault out and print what happens. `as_it_should` of the result:
    whether that is what should.
    """
    folder.mkdir()
    fault = FAULTS[kind]
    new = planted(old, folder / "new", fault, asked.step_ms / 1000)
    with TritonServer(old) as baseline, TritonServer(new) as candidate:
        times = [0.0, 0.0]
        if kind != "errors":
            times = [time_per_token_ms(each, asked.concurrency) for each in (baseline, candidate)]
            print(
                f"{kind}: time per token, {asked.concurrency} requests at a time: {times[0]:.2f}"
                f" and {times[1]:.2f} ms, {times[1] / times[0]:.2f} times as slow",
                flush=True,
            )
        addresses = baseline.grpc_url, candidate.grpc_url
        state, seen, seconds = rolled(folder / "run", config, addresses, asked)
    arms = state["arms"]
    print(f"{state['outcome']}: {state['why']}; after {seconds:.0f} s; clients saw {seen}")
    for arm, figures in arms.items():
        print(f"{arm}: " + ", ".join(f"{key} {value}" for key, value in figures.items()))
    for finding in state["evidence"]:
        print(f"{finding['test']}: {finding['wealth']:.3g} of {finding['limit']:g}")
    is_rolled_back = state["outcome"] == "rolled back"
    is_meant = any(test in state["why"] for test in fault.tests) if fault.tests else True
    return {
        "candidate": kind,
        "slower": times[1] / times[0] if times[0] else None,
        "outcome": state["outcome"],
        "why": state["why"],
        "share_percent": state["share_percent"],
        "sessions": {arm: figures["sessions"] for arm, figures in arms.items()},
        "steps": [decision["why"] for decision in state["decisions"]],
        "seen": seen,
        "as_it_should": is_rolled_back == bool(fault.tests)
        and is_meant
        and (set(seen) == {200} or kind == "errors"),
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("config", nargs="?", type=Path, help="default: a small random pair")
    parser.add_argument("--only", choices=FAULTS, help="default: all, one after the other")
    parser.add_argument("--step-ms", type=float, default=3.0, help="of the slower one")
    parser.add_argument("--concurrency", type=int, default=4)
    parser.add_argument("--sessions", type=int, default=14_000)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory(prefix="rollouts-") as folder:
        if asked.config is None:
            pair = write_pair(Path(folder))
            config = write_config(Path(folder), pair)
            old = package_pair(pair, Path(folder)).path
        else:
            config = asked.config.resolve()
            old = ROOT / "triton_repo" / load_config(config).name
        for kind in [asked.only] if asked.only else FAULTS:
            place = Path(folder) / kind.replace(" ", "-")
            rows.append(judged(kind, place, config, old, asked))
            print(json.dumps({"benchmark": "rollouts", **rows[-1]}), flush=True)
    print(f"{'fault':<12}{'outcome':<14}{'sessions':>9}{'its own':>9}  why")
    for row in rows:
        own = row["sessions"]["candidate"]
        print(
            f"{row['candidate']:<12}{row['outcome']:<14}{sum(row['sessions'].values()):>9,}"
            f"{own:>9,}  {row['why']}{'' if row['as_it_should'] else '  <- NOT AS IT SHOULD BE'}"
        )
    return 0 if all(row["as_it_should"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
