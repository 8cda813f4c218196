"""How much time does the runtime itself take per verify step, outside the models' forwards?

Time of whole runs minus the time inside `forward` of both engines, divided by verify steps:
drafting, choosing, accepting, text, events and statistics, prefill's share included. All of it is
one thread's work, so beside the wall clock that thread's CPU time is taken: it is the one to go by
on a machine that is busy with other things. The engines are tables that answer in microseconds,
with the quickstart's vocabulary and tokenizer, draft length 4, and an acceptance of about 0.7
(--real takes the quickstart pair itself, eager). Good: < 0.25 ms a step at batch 1 greedy, < 0.6 ms
sampled. Wall is the median over rounds, CPU the least of them: other load lengthens even CPU time,
by taking caches and clock rate.

    python -m tests.benchmarks.bench_host [--real] [--rounds 9]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.support.runtimes import make_request, make_runtime, serve
from toolkit.interfaces import StepEngine
from toolkit.speculative.text import TextCodec

QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart"
DRAFT_LEN, MAX_TOKENS = 4, 200
NUCLEUS = {"temperature": 0.8, "top_k": 50, "top_p": 0.95}
CASES: dict[str, dict[str, Any]] = {
    "plain greedy": {"draft_len": 0},
    "greedy": {},
    "greedy, penalties": {"frequency_penalty": 0.2},
    "plain T=0.8": {"draft_len": 0, "temperature": 0.8},
    "rejection T=0.8": {"temperature": 0.8},
    "coupled T=0.8": {"temperature": 0.8, "seed": 1},
    "rejection, top-k 50, top-p 0.95": NUCLEUS,
    "coupled, top-k 50, top-p 0.95": {**NUCLEUS, "seed": 1},
    "greedy, stop words": {"stop": ("<never>", "\n\n\n\n\n\n")},
}


class Timed:
    """A step engine that sums up the time inside forward."""

    def __init__(self, engine: StepEngine) -> None:
        self._engine = engine
        self.vocab_size = engine.vocab_size
        self.max_batch_size = engine.max_batch_size
        self.max_seq_len = engine.max_seq_len
        self.max_step_tokens = engine.max_step_tokens
        self.rewind = engine.rewind
        self.length = engine.length
        self.wall_ns = self.cpu_ns = 0

    def forward(
        self, slots: Sequence[int], tokens: torch.Tensor, *, last_only: bool = False
    ) -> torch.Tensor:
        wall, cpu = time.perf_counter_ns(), time.thread_time_ns()
        logits = self._engine.forward(slots, tokens, last_only=last_only)
        self.cpu_ns += time.thread_time_ns() - cpu
        self.wall_ns += time.perf_counter_ns() - wall
        return logits


class Lookup:
    """Logits [vocab] per last token, read from a table; draft and target share most of theirs."""

    def __init__(self, seed: int, vocab_size: int = 2048, max_batch_size: int = 8) -> None:
        common, own = np.random.default_rng(0), np.random.default_rng(seed)
        shape = (vocab_size, vocab_size)
        table = 3.0 * common.standard_normal(shape, np.float32) + 0.25 * own.standard_normal(
            shape, np.float32
        )
        self._table = torch.from_numpy(table)
        self._lengths = [0] * max_batch_size
        self.vocab_size = vocab_size
        self.max_batch_size = max_batch_size
        self.max_seq_len = 1024
        self.max_step_tokens = 64

    def forward(
        self, slots: Sequence[int], tokens: torch.Tensor, *, last_only: bool = False
    ) -> torch.Tensor:
        for slot in slots:
            self._lengths[slot] += tokens.shape[1]
        return self._table[tokens[:, -1:] if last_only else tokens]

    def rewind(self, slots: Sequence[int], lengths: Sequence[int]) -> None:
        for slot, length in zip(slots, lengths, strict=True):
            self._lengths[slot] = length

    def length(self, slot: int) -> int:
        return self._lengths[slot]


def engines(real: bool) -> tuple[StepEngine, StepEngine]:
    if not real:
        return Lookup(1), Lookup(2)
    from toolkit.engines.embedded.engine import open_checkpoint

    return open_checkpoint(QUICKSTART / "target"), open_checkpoint(QUICKSTART / "draft")


def measure(
    target: Timed, draft: Timed, codec: TextCodec, batch: int, fields: dict[str, Any], rounds: int
) -> dict[str, float]:
    """Milliseconds of host time per verify step (wall, CPU), and the acceptance rate; a first
    round warms up.
    """
    runtime = make_runtime(target, draft, max_draft_len=DRAFT_LEN, codec=codec)
    prompts = [codec.encode(f"def example_{i}(value):\n") for i in range(batch)]
    per_step: list[list[float]] = []
    rates: list[float | None] = []
    for _ in range(rounds + 1):
        steps, within = (
            runtime.counters().steps,
            (target.wall_ns + draft.wall_ns, target.cpu_ns + draft.cpu_ns),
        )
        wall, cpu = time.perf_counter_ns(), time.thread_time_ns()
        outcomes = serve(
            runtime,
            [
                make_request(prompt, MAX_TOKENS, str(i), **fields)
                for i, prompt in enumerate(prompts)
            ],
        )
        cpu, wall = time.thread_time_ns() - cpu, time.perf_counter_ns() - wall
        outside = (
            wall - target.wall_ns - draft.wall_ns + within[0],
            cpu - target.cpu_ns - draft.cpu_ns + within[1],
        )
        per_step.append([span / 1e6 / (runtime.counters().steps - steps) for span in outside])
        rates += [outcome.stats.acceptance_rate for outcome in outcomes]
    known = [rate for rate in rates if rate is not None]
    wall, cpu = np.median(per_step[1:], axis=0)[0], np.min(per_step[1:], axis=0)[1]
    return {
        "wall_ms": wall,
        "cpu_ms": cpu,
        "acceptance_rate": statistics.fmean(known) if known else float("nan"),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--real", action="store_true", help="the quickstart pair, eager, instead of tables"
    )
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=2)
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    target, draft = (Timed(engine) for engine in engines(asked.real))
    codec = TextCodec.from_file(QUICKSTART / "target" / "tokenizer.json")
    results: dict[str, dict[str, float]] = {}
    print(
        f"{'host time per verify step':36}{'batch':>6}{'wall ms':>9}{'CPU ms':>9}{'accepted':>10}"
    )
    for batch in (1, 8):
        for name, fields in CASES.items():
            found = results[f"{name}, batch {batch}"] = measure(
                target, draft, codec, batch, fields, asked.rounds
            )
            print(
                f"{name:36}{batch:6}{found['wall_ms']:9.3f}{found['cpu_ms']:9.3f}{found['acceptance_rate']:10.2f}"
            )
    facts = {
        "benchmark": "host",
        "engines": "quickstart, eager" if asked.real else "tables",
        "draft_len": DRAFT_LEN,
        "rounds": asked.rounds,
        "device": f"{platform.machine()}, {os.cpu_count()} cores",
        "versions": {name: version(name) for name in ("torch", "numpy", "tokenizers")},
    }
    print(
        json.dumps(
            {
                **facts,
                "host_cpu_ms": {name: round(found["cpu_ms"], 4) for name, found in results.items()},
            }
        )
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
