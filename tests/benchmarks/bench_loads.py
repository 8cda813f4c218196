"""Does speculation pay at every load, and what does serving cost beside the runtime in a process?

Closed loops of 1, 4, 16 and 64 requests at a time, greedy, over the prompts of each YAML, plain and
speculative in turns. Served: `toolkit bench CONFIG`, its client on the same machine. In process,
for engines that this process can run: the same runtime and requests without server and client, once
before and once after the served ones. Good: speculative / plain >= 1 and served / in process >=
0.85 at each load. With configs/quickstart-vllm-int8.yaml as well it is the table against vLLM.

    python -m tests.benchmarks.bench_loads [CONFIG ...] [--set KEY=VALUE ...]
        [--loads 1 4 16 64] [--requests 128]

CONFIG: configs/quickstart.yaml if none is named. Each is built with room for as many requests as
the highest load has, under the name loads-NAME; another build of the same takes a second. The
quickstart streams a chunk per step; `--set triton.stream_interval_ms=10` is what servers do by
default. `--set speculation.adaptive.enabled=true` lets draft lengths follow acceptance and load.
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.benchmarks.engines import facts
from tests.support.runtimes import Outcome, make_request
from toolkit.config.load import load_config
from toolkit.config.schema import DeploymentConfig
from toolkit.inprocess import load_runtime
from toolkit.speculative.runtime import SpeculativeRuntime

ROOT = Path(__file__).parents[2]
ARMS = ("plain", "speculative")


@dataclass
class Rates:
    """Tokens/s of each arm at one load; None where it was not measured."""

    in_process: dict[str, float | None] = field(default_factory=lambda: dict.fromkeys(ARMS))
    served: dict[str, float | None] = field(default_factory=lambda: dict.fromkeys(ARMS))

    def speedup(self, where: dict[str, float | None]) -> float | None:
        return _quotient(where["speculative"], where["plain"])

    def kept(self, arm: str) -> float | None:
        return _quotient(self.served[arm], self.in_process[arm])


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("configs", nargs="*", type=Path)
    parser.add_argument("--set", dest="changes", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--loads", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--requests", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--max-tokens", type=int, default=64)
    asked = parser.parse_args()
    results = {}
    for path in asked.configs or [ROOT / "configs" / "quickstart.yaml"]:
        changes = build(path, max(asked.loads), asked.changes)
        rates = measure(path, changes, asked)
        results[path.stem] = {load: row.__dict__ for load, row in rates.items()}
        show(path.stem, rates)
    names = ("changes", "requests", "rounds", "max_tokens")
    settings = {name: getattr(asked, name) for name in names}
    print(json.dumps({"benchmark": "loads", **settings, **facts(), "results": results}))
    return 0


def build(path: Path, slots: int, changes: Sequence[str]) -> list[str]:
    """Build the deployment with so many slots. Returns the options that name it."""
    changes = [f"name=loads-{path.stem}", f"engine.max_batch_size={slots}", *changes]
    options = [word for change in changes for word in ("--set", change)]
    toolkit("build", str(path), *options, "--until", "package")
    return options


def measure(path: Path, changes: list[str], asked: argparse.Namespace) -> dict[int, Rates]:
    config = load_config(path, changes[1::2])
    rates = {load: Rates() for load in asked.loads}
    found: dict[tuple[int, str], list[float]] = {}
    if config.capabilities.in_process:
        in_process(config, asked, found)
    for load, served in serve(path, changes, asked).items():
        rates[load].served.update(served)
    if config.capabilities.in_process:
        in_process(config, asked, found)
    for (load, arm), values in found.items():
        rates[load].in_process[arm] = sum(values) / len(values)
    return rates


def in_process(
    config: DeploymentConfig,
    asked: argparse.Namespace,
    found: dict[tuple[int, str], list[float]],
) -> None:
    """Add the tokens/s of each load and arm, in turns, to what was found."""
    engines = ROOT / "engines" / config.name
    speculation = config.speculation
    runtime = load_runtime(
        engines / "target",
        engines / "draft",
        threads=config.engine.threads,
        max_draft_len=speculation.max_draft_len,
        max_queue_size=asked.requests,
        draft_len_schedule=list(speculation.draft_len_by_load.items()),
        adaptive=speculation.adaptive_settings,
    )
    assert config.validation is not None
    lines = config.validation.prompts.read_text(encoding="utf-8").splitlines()
    prompts = [runtime.codec.encode(json.loads(line)["prompt"]) for line in lines]
    closed_loop(runtime, prompts, max(asked.loads), max(asked.loads), None, asked.max_tokens)
    for load, turn in itertools.product(asked.loads, range(asked.rounds)):
        for arm in ARMS if turn % 2 == 0 else reversed(ARMS):
            draft_len = 0 if arm == "plain" else None
            rate = closed_loop(runtime, prompts, load, asked.requests, draft_len, asked.max_tokens)
            found.setdefault((load, arm), []).append(rate)


def closed_loop(
    runtime: SpeculativeRuntime,
    prompts: Sequence[Sequence[int]],
    load: int,
    requests: int,
    draft_len: int | None,
    max_tokens: int,
) -> float:
    """Tokens/s of so many requests, `load` of them at a time."""
    waiting = deque(range(requests))
    running: dict[int, Outcome] = {}
    tokens, began = 0, time.monotonic()
    while waiting or running:
        while waiting and len(running) < load:
            index = waiting.popleft()
            outcome = running[index] = Outcome()
            request = make_request(
                prompts[index % len(prompts)], max_tokens, str(index), draft_len=draft_len
            )
            runtime.submit(request, outcome.events.append)
        runtime.step()
        for index in [index for index, outcome in running.items() if outcome.finish_reason]:
            outcome = running.pop(index)
            if outcome.finish_reason not in ("stop", "length"):
                raise RuntimeError(f"a request failed: {outcome.events[-1].error}")
            tokens += len(outcome.ids)
    return tokens / (time.monotonic() - began)


def serve(
    path: Path, changes: list[str], asked: argparse.Namespace
) -> dict[int, dict[str, float | None]]:
    """Load -> arm -> tokens/s of the served deployment."""
    with tempfile.TemporaryDirectory(prefix="toolkit-loads-") as folder:
        out = Path(folder) / "run.json"
        toolkit(
            "bench",
            str(path),
            *changes,
            *("--concurrency", ",".join(map(str, asked.loads))),
            *("--requests", str(asked.requests), "--max-tokens", str(asked.max_tokens)),
            *("--rounds", str(asked.rounds), "--max-rounds", str(asked.rounds)),
            *("--out", str(out)),
        )
        run = json.loads(out.read_text(encoding="utf-8"))
    return {
        point["concurrency"]: {arm["name"]: arm["tokens_per_s"] for arm in point["arms"]}
        for point in run["points"]
    }


def toolkit(*arguments: str) -> None:
    command = [str(Path(sys.executable).with_name("toolkit")), *arguments]
    done = subprocess.run(command, stdout=sys.stderr, check=False)
    # 4: a speed-up near 1, which is not decided.
    if done.returncode not in (0, 4):
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}")


def show(name: str, rates: dict[int, Rates]) -> None:
    heads = ("plain", "spec.", "spec./plain")
    print(f"{name}: tokens/s")
    print(f"{'':8}  {'in process':^33}  {'served':^33}  {'served / in process':^22}")
    print(f"{'requests':>8}" + "".join(f"{head:>11}" for head in (*heads, *heads, *heads[:2])))
    for load, row in rates.items():
        cells: list[Any] = []
        for where in (row.in_process, row.served):
            cells += [where["plain"], where["speculative"], row.speedup(where)]
        cells += [row.kept(arm) for arm in ARMS]
        words = (
            "-" if cell is None else f"{cell:.2f}" if cell < 20 else f"{cell:,.0f}"
            for cell in cells
        )
        print(f"{load:>8}" + "".join(f"{word:>11}" for word in words), flush=True)


def _quotient(above: float | None, below: float | None) -> float | None:
    return above / below if above is not None and below else None


if __name__ == "__main__":
    sys.exit(main())
