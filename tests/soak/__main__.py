"""Serve a pair under mixed and hostile traffic, kill its model in the middle, and say what held and
what did not.

    python -m tests.soak [--minutes 5] [--concurrency 32] [--seed 0] [--layout llmapi | bls]
                         [--config configs/quickstart.yaml]

The first tenth is calm: honest requests alone, whose latencies are what the others are held
against. At half time the model's process is killed (SIGKILL); the supervisor ends the server, and
this program starts it again, as a service manager would. The exit code is 1 if a check fails.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import re
import signal
import sys
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from tests.soak.traffic import (
    ANSWER_S,
    HOSTILE,
    Answer,
    Attack,
    Server,
    Traffic,
    compare,
    references,
)
from tests.soak.watch import Sample, Watch, leftovers, stub_of
from toolkit.client import RequestRefused, read_prompts, timing
from toolkit.errors import ServerError
from toolkit.triton.process.server import TritonServer
from toolkit.triton.tensors.contract import MODEL

ROOT = Path(__file__).parents[2]
QUICKSTART = ROOT / "configs" / "quickstart.yaml"
PROMPTS = ROOT / "configs" / "quickstart" / "data" / "prompts.jsonl"
MAX_PROMPTS = 45
SLOTS = 8  # of the deployment, for 1,024 tokens each
FILLING_PROMPT, FILLING_TOKENS = "x " * 400, 600  # together about as many
LONG_PROMPT = 1200  # characters; about 400 of the 512 tokens that the deployment takes
REQUESTS = re.compile(r'^toolkit_requests\{[^}]*outcome="(\w+)"[^}]*\} (\S+)$', re.MULTILINE)
RUNNING = re.compile(r"^toolkit_(?:active|queued)_requests\{[^}]*\} (\S+)$", re.MULTILINE)
SETTLE_S = 5.0
# What the checks allow.
ATTACKS = ("malformed", "hostile")
GROWTH = 0.03  # of memory, from the second quarter of a life to its last
MORE_FILES = 8  # a few connections of gRPC come and go
SLOWER = 2.0  # p99 among hostile requests over p99 among honest ones
TOLD_S = 10.0  # until a client whose model has died knows it
BACK_S = 60.0


@dataclass
class Life:
    """One process of the server, from ready to its end. filled, refused: requests before
    `ready_ns` that were answered, and that the model refused.
    """

    server: Server
    ready_ns: int
    filled: int
    refused: int
    answers: list[Answer] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Check:
    name: str
    found: str
    allowed: str
    holds: bool


class Soak:
    """The threads that send, and the lives of the server that they send to."""

    def __init__(self, traffic: Traffic, seed: int, concurrency: int) -> None:
        self._traffic = traffic
        self._seed = seed
        self._concurrency = concurrency
        self.lives: list[Life] = []
        self._is_up = threading.Event()
        self._is_calm = True
        self._stop = threading.Event()

    def begin_life(self, server: TritonServer) -> None:
        started = Server.at(server.grpc_url)
        filled, refused = fill(started), attack(started, self._concurrency)
        self.lives.append(Life(started, time.monotonic_ns(), filled, refused))
        self._is_up.set()

    def run(self, server: TritonServer, seconds: float) -> tuple[int, int]:
        """The whole run. Returns when the model was killed and when it was back (monotonic ns)."""
        pool = ThreadPoolExecutor(self._concurrency)
        senders = [pool.submit(self._send, number) for number in range(self._concurrency)]
        try:
            with Watch(lambda: server.pid if self._is_up.is_set() else None) as watch:
                self._wait(0.1 * seconds, "honest requests alone")
                self._is_calm = False
                self._wait(0.4 * seconds, "hostile requests among them")
                self._is_up.clear()
                killed_ns = time.monotonic_ns()
                os.kill(stub_of(server.pid, MODEL), signal.SIGKILL)
                wait_for_end(server)
                server.start()
                back_ns = time.monotonic_ns()
                self.begin_life(server)
                self._wait(0.5 * seconds, "after the model was killed")
        finally:
            self._stop.set()
            self._is_up.set()
            pool.shutdown()
        for sender in senders:
            sender.result()  # raises what a sender did not expect
        for life, after in zip(self.lives, [killed_ns, time.monotonic_ns()], strict=True):
            life.samples = [s for s in watch.samples if life.ready_ns < s.at_ns < after]
        return killed_ns, back_ns

    def _send(self, number: int) -> None:
        chance = random.Random(f"{self._seed} {number}")
        while self._is_up.wait() and not self._stop.is_set():
            life = self.lives[-1]
            answer = self._traffic.send(life.server, chance, is_calm=self._is_calm)
            life.answers.append(answer)
            if answer.outcome == "unavailable":
                time.sleep(0.1)

    def _wait(self, seconds: float, what: str) -> None:
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            if sys.stderr.isatty():
                done = sum(len(life.answers) for life in self.lives)
                print(f"\r{what}: {left:4.0f} s left, {done} requests ", end="", file=sys.stderr)
            time.sleep(min(1.0, left))
        print(f"\r{what}: {seconds:.0f} s{' ' * 30}", file=sys.stderr)


def fill(server: Server) -> int:
    """Use every slot to its end, since a KV cache takes memory when it is first written: how many
    requests that took. Hardly any token is the end token at this temperature.
    """
    options = {"max_tokens": FILLING_TOKENS, "temperature": 2.0}
    server.client.measure([FILLING_PROMPT] * SLOTS, concurrency=SLOTS, **options)
    return SLOTS


def attack(server: Server, concurrency: int) -> int:
    """Send every hostile request `concurrency` times at once, since a heap keeps the size that it
    once needed: how many requests the model refused. What grows afterwards is a leak.
    """

    def send(make: Attack) -> None:
        with contextlib.suppress(RequestRefused):
            server.send(make(server))

    for make in HOSTILE.values():
        with ThreadPoolExecutor(concurrency) as pool:
            list(pool.map(send, [make] * concurrency))
    return concurrency * len(HOSTILE)


def wait_for_end(server: TritonServer) -> None:
    """Return when the server has ended by itself, stopped and ready to start again."""
    until = time.monotonic() + BACK_S
    while time.monotonic() < until:
        try:
            server.check()
        except ServerError:
            server.stop()
            return
        time.sleep(0.05)
    raise SystemExit("the server still runs, a minute after its model was killed")


def judge(
    lives: Sequence[Life], killed_ns: int, back_ns: int, page: str, again: Counter[str]
) -> Iterator[Check]:
    """Every check. page: the server's metrics after the last request. again: verdicts of the
    references that were asked for once more, alone.
    """
    answers = [answer for life in lives for answer in life.answers]
    verdicts = Counter(answer.verdict for answer in answers)
    texts = sum(answer.outcome == "answered" for answer in answers)
    yield Check(
        "wrong answers",
        f"{verdicts['wrong']} of {len(answers)} ({texts} texts, {verdicts['near-tie']} near-ties)",
        "0",
        verdicts["wrong"] == 0,
    )
    attacks = [answer for answer in answers if answer.kind in ATTACKS]
    refused = sum(answer.outcome in ("refused", "unavailable") for answer in attacks)
    yield Check(
        "malformed and hostile, refused",
        f"{refused} of {len(attacks)}",
        "all, and some",
        refused == len(attacks) > 0,
    )
    lost = [answer for answer in answers if answer.outcome == "unavailable"]
    elsewhere = sum(a.ended_ns < killed_ns or a.sent_ns > back_ns for a in lost)
    yield Check("lost, but for the kill", f"{elsewhere}", "0", elsewhere == 0)
    told = max((a.ended_ns - killed_ns for a in lost), default=0) / 1e9
    yield Check(
        "lost by the kill, told after",
        f"{len(lost)}, {told:.1f} s at most",
        f"some, {TOLD_S:g} s",
        bool(lost) and told <= TOLD_S,
    )
    back = (back_ns - killed_ns) / 1e9
    yield Check("ready again after", f"{back:.1f} s", f"{BACK_S:g} s", back <= BACK_S)
    yield from _held(lives)
    yield from _latency(lives)
    yield from _counted(lives[-1], page)
    yield Check(
        "alone again, wrong texts",
        f"{again['wrong']} of {again.total()}",
        "0",
        again["wrong"] == 0 and again.total() > 0,
    )


def _by_tenths(life: Life) -> str:
    """MiB, medians: how memory grew, if it did."""
    parts = np.array_split([sample.memory / 2**20 for sample in life.samples], 10)
    return " ".join(f"{np.median(part):.0f}" for part in parts if len(part))


def _held(lives: Sequence[Life]) -> Iterator[Check]:
    for number, life in enumerate(lives, 1):
        quarter = len(life.samples) // 4
        early, late = life.samples[quarter : 2 * quarter], life.samples[-quarter:]
        before, after = (float(np.median([s.memory for s in part])) for part in (early, late))
        yield Check(
            f"memory, life {number}",
            f"{before / 2**20:.0f} to {after / 2**20:.0f} MiB",
            f"+ {GROWTH:.0%}",
            after <= (1 + GROWTH) * before,
        )
        for name in ("files", "threads"):
            most = [max(getattr(s, name) for s in part) for part in (early, late)]
            yield Check(
                f"{name}, life {number}",
                f"{most[0]} to {most[1]}",
                f"+ {MORE_FILES}",
                most[1] <= most[0] + MORE_FILES,
            )


def _latency(lives: Sequence[Life]) -> Iterator[Check]:
    life = lives[0]
    end_of_calm = min(a.sent_ns for a in life.answers if a.kind in ATTACKS)
    timings = [(a.ended_ns, a.timing) for a in life.answers if a.timing is not None]
    calm = [t for ended_ns, t in timings if ended_ns < end_of_calm]
    hostile = [t for ended_ns, t in timings if ended_ns >= end_of_calm]
    hostile += [a.timing for a in lives[-1].answers if a.timing is not None]
    for name, of in (
        ("TTFT", lambda t: [t.ttft_ns or 0]),
        ("ICL", lambda t: t.icl_ns),
        ("e2e", lambda t: [t.e2e_ns or 0]),
    ):
        p99 = [
            np.percentile([ns for t in part for ns in of(t)], 99) / 1e6 for part in (calm, hostile)
        ]
        yield Check(
            f"p99 {name}, calm and hostile",
            f"{p99[0]:.0f} and {p99[1]:.0f} ms",
            f"{SLOWER:g} x",
            p99[1] <= SLOWER * p99[0],
        )


def _counted(life: Life, page: str) -> Iterator[Check]:
    """The server's counters since its last start beside the client's."""
    server = Counter({outcome: int(float(count)) for outcome, count in REQUESTS.findall(page)})
    client = Counter(a.outcome for a in life.answers if a.by_model)
    for name, counted, sent in (
        (
            "answered or cancelled",
            server["stop"] + server["length"] + server["cancelled"],
            client["answered"] + client["cancelled"] + life.filled,
        ),
        ("refused", server["refused"], client["refused"] + life.refused),
        (
            "deadline, overloaded, error",
            sum(server[o] for o in ("deadline", "overloaded", "error")),
            0,
        ),
    ):
        yield Check(f"counted: {name}", f"{counted}", f"{sent}", counted == sent)
    running = sum(float(count) for count in RUNNING.findall(page))
    yield Check("requests that still run", f"{running:g}", "0", running == 0)


def repository(config: Path, layout: str) -> Path:
    """The packaged pair of a YAML, built if it is not there."""
    from toolkit.cli.progress import displayed
    from toolkit.config.load import load_config
    from toolkit.pipeline.store import Store
    from toolkit.workflows.build import build
    from toolkit.workflows.folders import Workplace

    name = f"soak-{layout}" if config == QUICKSTART else f"soak-{config.stem}-{layout}"
    deployment = load_config(config, [f"name={name}", f"triton.layout={layout}"])
    workplace = Workplace(ROOT)
    with displayed() as display:
        build(deployment, workplace, display, Store(workplace.store), until="package")
    return workplace.repository(name)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--concurrency", type=int, default=32)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--layout", choices=("llmapi", "bls"), default="llmapi")
    parser.add_argument("--config", type=Path, default=QUICKSTART, help="of the pair")
    asked = parser.parse_args()
    folder = repository(asked.config, asked.layout)
    before = leftovers()
    cases = Traffic.cases(read_prompts(PROMPTS)[:MAX_PROMPTS], LONG_PROMPT)
    with TritonServer(folder) as server:
        alone = Server.at(server.grpc_url)
        known = references(folder, alone.client, cases)
        alone.close()
        soak = Soak(Traffic(known), asked.seed, asked.concurrency)
        soak.begin_life(server)
        killed_ns, back_ns = soak.run(server, 60 * asked.minutes)
        time.sleep(SETTLE_S)
        with urllib.request.urlopen(server.metrics_url, timeout=ANSWER_S) as response:
            page = response.read().decode()
        client, again = soak.lives[-1].server.client, Counter[str]()
        for case, reference in known.items():
            chunks = list(client.stream(case.prompt, max_tokens=case.max_tokens, temperature=0.0))
            again[compare(reference, timing(case.prompt, chunks, 0))[0]] += 1
        for life in soak.lives:
            life.server.close()
    left = leftovers() - before
    checks = [
        *judge(soak.lives, killed_ns, back_ns, page, again),
        Check("left behind", ", ".join(sorted(left)) or "nothing", "nothing", not left),
    ]
    width = max(len(check.name) for check in checks)
    found = max(len(check.found) for check in checks)
    for check in checks:
        state = "holds" if check.holds else "FAILS"
        print(f"{check.name:{width}}  {check.found:>{found}}  {check.allowed:>14}  {state}")
    for number, life in enumerate(soak.lives, 1):
        print(f"MiB by tenths of life {number}: {_by_tenths(life)}")
    for reason, count in Counter(
        a.why for life in soak.lives for a in life.answers if a.verdict == "wrong"
    ).most_common(10):
        print(f"wrong, {count} times: {reason}")
    return 0 if all(check.holds for check in checks) else 1


if __name__ == "__main__":
    sys.exit(main())
