"""Does speculation pay at every load, and what does serving cost beside the runtime in a process?

Closed loops of 1, 4, 16 and 64 requests at a time, greedy, over the prompts of each YAML, plain and
speculative in turns. Served: what `toolkit bench` does, its client on the same machine. In process,
for engines that this process can run: the same runtime and requests without server and client. The
speed of a machine wavers within seconds, so both ways take turns, too, by the blocks of requests in
which `toolkit bench` changes arms. One start of a server differs from the next by several percent,
and so does one runtime from another, so each round starts both anew, and the intervals are over
rounds. Requests have 32 to 96 output tokens: where all have the same number, those of the plain arm
begin and end together, so that their prompts are read together, which no traffic does. Visits of
every load come first that are not counted, WARM_UP times a pair, in which both ways learn what its
steps cost: servers run for longer than that takes. Runtimes that have just begun lose up to 2 %
with it where drafts do not pay (`--warm-up 1`). Prefixes are not reused: how much a KV cache holds
of an arm's prompts depends on which arm went before it. Runtimes change arms from visit to visit,
of which a round has an even number. Good: speculative / plain >= 1 and served / in process >= 0.85
at each load. The acceptance length, the mean of the visits, tells whether drafts were in use: 1.00
where none is accepted. With configs/quickstart-vllm-int8.yaml as well it is the table against vLLM.

    python -m tests.benchmarks.bench_loads [CONFIG ...] [--set KEY=VALUE ...]
        [--loads 1 4 16 64] [--requests 128] [--rounds 8] [--warm-up 3] [--max-tokens-from 32]
        [--max-tokens 96]

CONFIG: configs/quickstart.yaml if none is named. Each is built with room for as many requests as
the highest load has, under the name loads-NAME; another build of the same takes a second. The
quickstart streams a chunk per step; `--set triton.stream_interval_ms=10` is what servers do by
default. `--set speculation.adaptive.enabled=false` lets every request draft as much at any load.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np

from tests.benchmarks.engines import facts
from tests.support.runtimes import Outcome, make_request
from toolkit.bench.run import BenchOptions, bench
from toolkit.bench.runner import BLOCK_REQUESTS
from toolkit.config.load import load_config
from toolkit.config.schema import DeploymentConfig
from toolkit.inprocess import load_runtime
from toolkit.records.codec import to_json
from toolkit.resampling import Estimate, bootstrap_ratio_of_sums
from toolkit.speculative.runtime import SpeculativeRuntime
from toolkit.triton.process.server import TritonServer

ROOT = Path(__file__).parents[2]
ARMS = ("plain", "speculative")
FIRST_SEED = 3
# Of an arm in process. In a visit of 4 requests at a time two plain arms differ by about 2 % with
# turns of 0.2 s, and by 1.6 % with these (sixteen visits, Zen 4).
TURN_S = 0.05


@dataclass
class Measured:
    """Of one load and way, by visit or by round: tokens/s of each arm, and the speculative arm's
    acceptance length. Empty where it was not measured.
    """

    rates: dict[str, list[float]] = field(default_factory=lambda: {arm: [] for arm in ARMS})
    acceptance_length: list[float] = field(default_factory=list)

    def add_mean(self, visits: Measured) -> None:
        """Add a round."""
        for arm, rates in visits.rates.items():
            self.rates[arm].append(mean(rates))
        self.acceptance_length.append(mean(visits.acceptance_length))

    @property
    def speedup(self) -> Estimate | None:
        return _quotient(self.rates["speculative"], self.rates["plain"])


@dataclass
class Load:
    in_process: Measured = field(default_factory=Measured)
    served: Measured = field(default_factory=Measured)

    def kept(self, arm: str) -> Estimate | None:
        return _quotient(self.served.rates[arm], self.in_process.rates[arm])


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("configs", nargs="*", type=Path)
    parser.add_argument("--set", dest="changes", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--loads", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--requests", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--warm-up", type=int, default=3)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--max-tokens-from", type=int, default=32)
    asked = parser.parse_args()
    results = {}
    for path in asked.configs or [ROOT / "configs" / "quickstart.yaml"]:
        changes = build(path, max(asked.loads), asked.changes)
        loads = measure(path, changes, asked)
        results[path.stem] = {load: asdict(row) for load, row in loads.items()}
        show(path.stem, loads)
    names = ("changes", "requests", "rounds", "warm_up", "max_tokens_from", "max_tokens")
    settings = {name: getattr(asked, name) for name in names}
    print(json.dumps({"benchmark": "loads", **settings, **facts(), "results": results}))
    return 0


def build(path: Path, slots: int, changes: Sequence[str]) -> list[str]:
    """Build the deployment with so many slots. Returns the options that name it."""
    changes = [
        f"name=loads-{path.stem}",
        f"engine.max_batch_size={slots}",
        "engine.enable_prefix_caching=false",
        *changes,
    ]
    options = [word for change in changes for word in ("--set", change)]
    toolkit("build", str(path), *options, "--until", "package")
    return options


@dataclass(frozen=True)
class Visit:
    """Requests that both ways are given. number: of the visit of this load, which decides who goes
    first, and the lengths.
    """

    load: int
    number: int
    lines: list[str]  # of the file of prompts, one for each request


def visits_of(load: int, requests: int, turn: int, lines: Sequence[str]) -> list[Visit]:
    """Those of a round: an even number, two at least. What is no whole pair is left out."""
    size = min(requests, BLOCK_REQUESTS * load)
    count = max(1, requests // size // len(ARMS)) * len(ARMS)
    first = turn * count
    return [
        Visit(
            load,
            number,
            [lines[at % len(lines)] for at in range(number * size, (number + 1) * size)],
        )
        for number in range(first, first + count)
    ]


def measure(path: Path, changes: list[str], asked: argparse.Namespace) -> dict[int, Load]:
    config = load_config(path, changes[1::2])
    loads = {load: Load() for load in asked.loads}
    if not config.capabilities.in_process:
        bench_command([str(path), *changes], asked, loads)
        return loads
    for turn in range(asked.rounds):
        for load, found in measure_round(config, asked, turn).items():
            loads[load].in_process.add_mean(found.in_process)
            loads[load].served.add_mean(found.served)
        print(f"round {turn + 1} of {asked.rounds}", file=sys.stderr, flush=True)
    return loads


def measure_round(
    config: DeploymentConfig, asked: argparse.Namespace, turn: int
) -> dict[int, Load]:
    """By visit, with runtimes and a server of its own."""
    assert config.validation is not None
    lines = config.validation.prompts.read_text(encoding="utf-8").splitlines()
    loads = {load: Load() for load in asked.loads}
    visits = {load: visits_of(load, asked.requests, turn, lines) for load in loads}
    with contextlib.ExitStack() as stack:
        runtimes = [
            stack.enter_context(contextlib.closing(runtime_of(config, asked.requests)))
            for _ in ARMS
        ]
        repository = ROOT / "triton_repo" / config.name
        server = stack.enter_context(TritonServer(repository, config.triton))
        here = functools.partial(in_process, runtimes, asked)
        there = functools.partial(served, server.grpc_url, asked)
        pairs = [visit for of_load in visits.values() for visit in of_load[: len(ARMS)]]
        for visit in pairs * asked.warm_up:
            here(Measured(), visit)
            there(Measured(), visit)
        gc.collect()
        gc.freeze()  # `bench` collects garbage, which should not empty the caches each time
        stack.callback(gc.unfreeze)
        for load, found in loads.items():
            for visit in visits[load]:
                ways = [(here, found.in_process), (there, found.served)]
                for way, measured in ways if visit.number % 2 == 0 else reversed(ways):
                    way(measured, visit)
    return loads


def in_process(
    runtimes: Sequence[SpeculativeRuntime], asked: argparse.Namespace, found: Measured, visit: Visit
) -> None:
    """Add a visit in this process.

    runtimes: two that are alike, of which one may be faster, by where its memory lies. So each
    takes either arm in every other visit. The first one always goes first. Lengths are drawn as the
    served requests' are.
    """
    draw = random.Random(FIRST_SEED + visit.number)
    lengths = [draw.randint(asked.max_tokens_from, asked.max_tokens) for _ in visit.lines]
    prompts = [runtimes[0].codec.encode(json.loads(line)["prompt"]) for line in visit.lines]
    arms = {
        arm: ClosedLoop(runtime, prompts, visit.load, lengths, 0 if arm == "plain" else None)
        for arm, runtime in zip(
            ARMS if visit.number % 2 == 0 else ARMS[::-1], runtimes, strict=True
        )
    }
    for arm, rate in rates_in_turns(arms).items():
        found.rates[arm].append(rate)
    found.acceptance_length.append(arms["speculative"].acceptance_length)


def runtime_of(config: DeploymentConfig, max_queue_size: int) -> SpeculativeRuntime:
    engines = ROOT / "engines" / config.name
    speculation = config.speculation
    return load_runtime(
        engines / "target",
        engines / "draft",
        threads=config.engine.threads,
        max_draft_len=speculation.max_draft_len,
        max_queue_size=max_queue_size,
        draft_len_schedule=list(speculation.draft_len_by_load.items()),
        adaptive=speculation.adaptive_settings,
    )


def rates_in_turns(loops: dict[str, ClosedLoop]) -> dict[str, float]:
    """Tokens/s of each loop. They take turns of TURN_S, each with a clock of its own."""
    seconds = dict.fromkeys(loops, 0.0)
    running = dict(loops)
    while running:
        for arm, loop in list(running.items()):
            began = now = time.monotonic()
            while now - began < TURN_S and arm in running:
                if not loop.step():
                    del running[arm]
                now = time.monotonic()
            seconds[arm] += now - began
    return {arm: loop.tokens / seconds[arm] for arm, loop in loops.items()}


@dataclass
class ClosedLoop:
    """Requests of so many output tokens (`lengths`), `load` of them at a time."""

    runtime: SpeculativeRuntime
    prompts: Sequence[Sequence[int]]
    load: int
    lengths: Sequence[int]
    draft_len: int | None
    # Of the requests that ended.
    tokens: int = 0
    accepted: int = 0
    verify_steps: int = 0
    _begun: int = 0  # requests
    _running: dict[int, Outcome] = field(default_factory=dict)

    @property
    def acceptance_length(self) -> float:
        return 1.0 + self.accepted / max(1, self.verify_steps)

    def step(self) -> bool:
        """Returns whether there was anything to do."""
        while self._begun < len(self.lengths) and len(self._running) < self.load:
            self._submit(self._begun)
            self._begun += 1
        self.runtime.step()  # also when none is left, as `run` does
        if not self._running:
            return False
        for index in [index for index, outcome in self._running.items() if outcome.finish_reason]:
            self._note(self._running.pop(index))
        return True

    def _submit(self, index: int) -> None:
        outcome = self._running[index] = Outcome()
        request = make_request(
            self.prompts[index % len(self.prompts)],
            self.lengths[index],
            str(index),
            draft_len=self.draft_len,
        )
        self.runtime.submit(request, outcome.events.append)

    def _note(self, outcome: Outcome) -> None:
        if outcome.finish_reason not in ("stop", "length"):
            raise RuntimeError(f"a request failed: {outcome.events[-1].error}")
        self.tokens += len(outcome.ids)
        self.accepted += outcome.stats.accepted
        self.verify_steps += outcome.stats.verify_steps


def served(url: str, asked: argparse.Namespace, found: Measured, visit: Visit) -> None:
    """Add a visit, in two rounds, so that each arm goes first once."""
    rounds = len(ARMS)
    with tempfile.TemporaryDirectory(prefix="toolkit-loads-") as folder:
        prompts = Path(folder) / "prompts.jsonl"
        prompts.write_text("".join(f"{line}\n" for line in visit.lines), encoding="utf-8")
        options = BenchOptions(
            prompts=prompts,
            against_plain=True,
            concurrency=(visit.load,),
            requests=len(visit.lines),
            max_tokens=asked.max_tokens,
            max_tokens_from=asked.max_tokens_from,
            rounds=rounds,
            max_rounds=rounds,
            warm_up=0,
            seed=FIRST_SEED + visit.number,
        )
        (point,) = to_json(bench(url, options))["points"]
    note_arms(found, point["arms"])


def bench_command(
    what: Sequence[str], asked: argparse.Namespace, loads: Mapping[int, Load]
) -> None:
    """Add what `toolkit bench` measures of all loads, in the mean of its rounds."""
    rounds = str(len(ARMS) * asked.rounds)
    with tempfile.TemporaryDirectory(prefix="toolkit-loads-") as folder:
        out = Path(folder) / "run.json"
        toolkit(
            "bench",
            *what,
            *("--concurrency", ",".join(map(str, loads))),
            *("--requests", str(asked.requests), "--max-tokens", str(asked.max_tokens)),
            *("--max-tokens-from", str(asked.max_tokens_from)),
            *("--rounds", rounds, "--max-rounds", rounds, "--seed", str(FIRST_SEED)),
            *("--out", str(out)),
        )
        run = json.loads(out.read_text(encoding="utf-8"))
    for point in run["points"]:
        note_arms(loads[point["concurrency"]].served, point["arms"])


def note_arms(served: Measured, arms: Sequence[dict[str, Any]]) -> None:
    """Add what `toolkit bench` measured of the plain and the speculative arm. They are told apart
    by their order: with two servers, as for vLLM, they have other names.
    """
    for name, arm in zip(ARMS, arms, strict=True):
        if arm["failed"]:
            raise RuntimeError(f"{arm['failed']} requests failed: {arm['errors']}")
        served.rates[name].append(arm["tokens_per_s"])
        if name == "speculative" and arm["acceptance"] is not None:
            served.acceptance_length.append(arm["acceptance"]["length"])


def toolkit(*arguments: str) -> None:
    command = [str(Path(sys.executable).with_name("toolkit")), *arguments]
    done = subprocess.run(command, stdout=sys.stderr, check=False)
    # 4: a speed-up near 1, which is not decided.
    if done.returncode not in (0, 4):
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}")


def show(name: str, loads: dict[int, Load]) -> None:
    heads = f"{'plain':>9}{'spec.':>9}{'spec./plain':>18}{'length':>8}"
    print(f"{name}: tokens/s, and the acceptance length with speculation")
    print(f"{'':8}{'in process':^44}{'served':^44}{'served / in process':^36}")
    print(f"{'requests':>8}{heads}{heads}{'plain':>18}{'spec.':>18}")
    for load, row in loads.items():
        cells = []
        for way in (row.in_process, row.served):
            cells += [f"{_mean(way.rates[arm]):>9}" for arm in ARMS]
            cells += [f"{_words(way.speedup):>18}", f"{_mean(way.acceptance_length, 2):>8}"]
        cells += [f"{_words(row.kept(arm)):>18}" for arm in ARMS]
        print(f"{load:>8}" + "".join(cells), flush=True)


def _quotient(above: list[float], below: list[float]) -> Estimate | None:
    if not above or not below:
        return None
    return bootstrap_ratio_of_sums(np.array(above)[:, None], np.array(below)[:, None])


def _mean(values: list[float], digits: int = 0) -> str:
    return f"{mean(values):,.{digits}f}" if values else "-"


def _words(estimate: Estimate | None) -> str:
    if estimate is None:
        return "-"
    value, low, high = estimate
    return f"{value:.2f} ({low:.2f}-{high:.2f})"


if __name__ == "__main__":
    sys.exit(main())
