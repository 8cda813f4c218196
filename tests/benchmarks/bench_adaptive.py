"""Whether draft lengths that adapt keep what the best fixed length gains, and lose nothing where no
length gains.

The quickstart pair in process, greedy, on four mixes of text; 1, 4 and 16 requests at once, of
which each makes room for the next:

    predictable     the draft as it is
    unpredictable   the draft's best token is never the right one
    alternating     both in turns of 48 tokens within each text
    both kinds      every second request is unpredictable

First a sweep: plain decoding and every fixed draft length, to find the best. Then that choice,
plain decoding, the same again as a control, and adaptive, for --rounds. So the best is not the one
that was lucky while it was compared. How far the control's ratio is from 1 is what the machine
adds; what deciding and probing took of the adaptive arm's time is told, too, and hardly depends on
that. All arms take a group of prompts before any takes the next one, in rotated order, so that the
figures of a pair are seconds apart; the ranges are 95 % bootstrap intervals. Drafts are spoiled
behind the draft's back, where they are proposed and where they are probed. Good: adaptive / best
fixed >= 0.97, adaptive / plain >= 0.95, and every text is the plain one. (`best` may be plain
decoding. In the mix of both kinds the best fixed choice is per kind: the predictable ones draft,
the others do not.)

    python -m tests.benchmarks.bench_adaptive [--engines DIR] [--sweep-rounds 1] [--rounds 5]
        [--max-tokens 192] [--prompts 48] [--mix MIX] [--load N] [--cpu-time]

--cpu-time: times are the thread's own, which computes alone (engines have one thread), so that a
machine that is busy with other work still gives ratios. The runtime's costs are taken so, too.
--engines: a folder with the engine directories `target` and `draft` of a deployment with
max_batch_size 16 or more. Made, if it has none, by
    toolkit build configs/quickstart.yaml --set name=adaptive --set engine.max_batch_size=16 \
        --set speculation.max_draft_len=5 --until compile
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Slots
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tests.benchmarks.engines import facts
from tests.support.runtimes import Outcome, make_request
from toolkit.engines.registry import loader
from toolkit.inprocess import eos_token_ids
from toolkit.resampling import bootstrap_ratio_of_sums
from toolkit.speculative.adaptive import AdaptiveSettings
from toolkit.speculative.cost_timer import measured_costs
from toolkit.speculative.drafters import ModelDrafter
from toolkit.speculative.request_state import Sequence
from toolkit.speculative.runtime import RuntimeSettings, SpeculativeRuntime
from toolkit.speculative.text import TextCodec

ROOT = Path(__file__).parents[2]
PROMPTS = ROOT / "configs" / "quickstart" / "data" / "prompts.jsonl"
MIXES = ("predictable", "unpredictable", "alternating", "both kinds")
LOADS = (1, 4, 16)
TURN_TOKENS = 48
TIMES_THE_LOAD = 3  # so many prompts are a group
WRONG_TOKEN = 0
PLAIN, CONTROL = "plain", "plain again"

IsSpoiled = Callable[[int, int], bool]
"""Of a prompt's number and the place in its output."""
Lengths = list[int | None]
"""The draft length of each prompt; None: adaptive."""


class SpoiledDrafter(ModelDrafter):
    """Proposes a wrong token wherever `is_spoiled` says so, and finds it wrong when it probes.

    What it proposes behind a wrong token is as good as any other text, since nothing of it is
    accepted. Requests are called by their prompts' numbers.
    """

    is_spoiled: IsSpoiled = staticmethod(lambda prompt, place: False)
    spoils = False

    def is_near(self, row: Sequence) -> bool:
        """Nobody spoils the drafts of a burst, so that blocks which may be spoiled are not in one.
        Plain steps still are.
        """
        return not self.spoils and super().is_near(row)

    def propose(self, sequences: Slots[Sequence]) -> None:
        super().propose(sequences)
        for row in sequences:
            prompt, made = int(row.request.request_id), len(row.ids) - row.prompt_tokens
            for depth in range(len(row.drafts)):
                if self.is_spoiled(prompt, made + depth):
                    row.drafts[depth] = WRONG_TOKEN

    def probe(self, sequences: Slots[Sequence], counts: Slots[int]) -> list[list[float]]:
        results = super().probe(sequences, counts)
        for row, shares in zip(sequences, results, strict=True):
            prompt, first = int(row.request.request_id), len(row.ids) - len(shares)
            for index in range(len(shares)):
                if self.is_spoiled(prompt, first + index - row.prompt_tokens):
                    shares[index] = 0.0
        return results


class TimedRuntime(SpeculativeRuntime):
    """adapting_s: what deciding and probing took so far."""

    adapting_s = 0.0

    def _adapt(self, rows: list[Sequence]) -> None:
        began = self._clock()
        super()._adapt(rows)
        self.adapting_s += (self._clock() - began) / 1e9


@dataclass
class Arm:
    """Tokens and seconds of each group of prompts that ran together."""

    tokens: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    @property
    def rate(self) -> float:
        return sum(self.tokens) / sum(self.seconds)


def together(
    runtime: SpeculativeRuntime,
    prompts: Mapping[int, list[int]],
    load: int,
    max_tokens: int,
    draft_lens: Lengths,
    clock: Callable[[], int],
) -> tuple[list[Outcome], float]:
    """All prompts (number -> ids), so many at a time, and how many seconds they took. When one has
    ended, the next one comes.
    """
    outcomes = {number: Outcome() for number in prompts}
    waiting, running = deque(prompts), list[Outcome]()
    began = clock()
    while waiting or running:
        while waiting and len(running) < load:
            number = waiting.popleft()
            request = make_request(
                prompts[number], max_tokens, request_id=str(number), draft_len=draft_lens[number]
            )
            running.append(outcomes[number])
            runtime.submit(request, outcomes[number].events.append)
        runtime.step()
        running = [outcome for outcome in running if outcome.finish_reason is None]
    spent = (clock() - began) / 1e9
    for outcome in outcomes.values():
        if outcome.finish_reason not in ("stop", "length"):
            raise RuntimeError(f"a request failed: {outcome.events[-1].error}")
    return list(outcomes.values()), spent


SPOILED: dict[str, IsSpoiled] = {
    "predictable": lambda prompt, place: False,
    "unpredictable": lambda prompt, place: True,
    "alternating": lambda prompt, place: place // TURN_TOKENS % 2 == 1,
    "both kinds": lambda prompt, place: prompt % 2 == 1,
}


def fixed_arms(mix: str, max_draft_len: int, count: int) -> dict[str, Lengths]:
    """Name -> draft length of each prompt: plain decoding and every fixed length."""
    arms: dict[str, Lengths] = {PLAIN: [0] * count}
    for draft_len in range(1, max_draft_len + 1):
        arms[f"fixed {draft_len}"] = [draft_len] * count
        if mix == "both kinds":
            arms[f"fixed {draft_len} and 0"] = [
                0 if index % 2 else draft_len for index in range(count)
            ]
    return arms


Run = Callable[[Mapping[int, list[int]], Lengths], tuple[list[Outcome], float]]


def in_turns(
    run: Run,
    groups: list[dict[int, list[int]]],
    rounds: int,
    lengths: Mapping[str, Lengths],
    watch: Callable[[str, Mapping[int, list[int]], list[Outcome]], None] = lambda *_: None,
) -> dict[str, Arm]:
    """Every arm over every group, in rotated order. watch: is told what came of each."""
    arms = {name: Arm() for name in lengths}
    names = list(arms)
    for turn, group in enumerate(groups * rounds):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            outcomes, spent = run(group, lengths[name])
            arms[name].tokens.append(sum(len(outcome.ids) for outcome in outcomes))
            arms[name].seconds.append(spent)
            watch(name, group, outcomes)
    return arms


def measure(
    runtime: TimedRuntime,
    drafter: SpoiledDrafter,
    prompts: Mapping[int, list[int]],
    mix: str,
    load: int,
    asked: argparse.Namespace,
) -> dict[str, Any]:
    max_draft_len, clock = runtime.settings.max_draft_len, clock_of(asked)

    def run(group: Mapping[int, list[int]], lengths: Lengths, at_once: int = load) -> Any:
        return together(runtime, group, at_once, asked.max_tokens, lengths, clock)

    fixed = fixed_arms(mix, max_draft_len, len(prompts))
    drafter.is_spoiled, drafter.spoils = SPOILED[mix], mix != "predictable"
    texts = {}
    for number, prompt in prompts.items():
        (outcome,), _ = run({number: prompt}, fixed[PLAIN], 1)
        texts[number] = outcome.ids
    many = TIMES_THE_LOAD * load
    groups = [
        {number: prompts[number] for number in range(start, min(start + many, len(prompts)))}
        for start in range(0, len(prompts), many)
    ]
    sweep = in_turns(run, groups, asked.sweep_rounds, fixed)
    best = max(sweep, key=lambda name: sweep[name].rate)

    adaptive: Lengths = [None] * len(prompts)
    run(groups[0], adaptive)  # warm
    same, asked_texts, before_s = 0, 0, runtime.adapting_s
    reasons: dict[str, int] = {}
    drafted = [0] * max_draft_len

    def watch(name: str, group: Mapping[int, list[int]], outcomes: list[Outcome]) -> None:
        nonlocal same, asked_texts
        if name != "adaptive":
            return
        for number, outcome in zip(group, outcomes, strict=True):
            same += outcome.ids == texts[number]
            asked_texts += 1
            for place, count in enumerate(outcome.stats.drafted_by_position):
                drafted[place] += count
            for reason, steps in outcome.stats.steps_by_reason.items():
                reasons[reason] = reasons.get(reason, 0) + steps

    lengths = {PLAIN: fixed[PLAIN], "adaptive": adaptive, CONTROL: fixed[PLAIN], best: fixed[best]}
    arms = in_turns(run, groups, asked.rounds, lengths, watch)
    adapting_s = runtime.adapting_s - before_s

    def ratio(other: str, one: str = "adaptive") -> list[float]:
        """[ratio of speeds, low end, high end], drawn from groups of prompts and rounds."""
        ours, theirs = (np.reshape(arms[name].seconds, (asked.rounds, -1)) for name in (one, other))
        return [round(figure, 4) for figure in bootstrap_ratio_of_sums(theirs, ours)]

    return {
        "mix": mix,
        "requests": load,
        "sweep_tokens_per_s": {name: round(arm.rate) for name, arm in sweep.items()},
        "tokens_per_s": {name: round(arm.rate) for name, arm in arms.items()},
        "best": best,
        "adaptive_over_best": ratio(best),
        "adaptive_over_plain": ratio(PLAIN),
        "control_over_plain": ratio(PLAIN, CONTROL),
        "adapting_share": round(adapting_s / sum(arms["adaptive"].seconds), 4),
        "same_texts": [same, asked_texts],
        "steps_by_reason": reasons,
        "drafted_by_position": drafted,
    }


def clock_of(asked: argparse.Namespace) -> Callable[[], int]:
    return time.thread_time_ns if asked.cpu_time else time.monotonic_ns


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--engines", type=Path, default=ROOT / "engines" / "adaptive")
    parser.add_argument("--sweep-rounds", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompts", type=int, default=48)
    parser.add_argument("--max-tokens", type=int, default=192)
    parser.add_argument("--mix", choices=MIXES, action="append")
    parser.add_argument("--load", type=int, action="append")
    parser.add_argument("--cpu-time", action="store_true")
    asked = parser.parse_args()
    if not (asked.engines / "target" / "config.json").exists():
        build_engines()
    target = loader("torch").load(asked.engines / "target", threads=1)
    draft = loader("torch").load(asked.engines / "draft", threads=1)
    codec = TextCodec.from_file(asked.engines / "target" / "tokenizer.json")
    config = json.loads((asked.engines / "target" / "config.json").read_text())
    settings = RuntimeSettings(
        max_draft_len=config["build_config"]["max_draft_len"],
        eos_token_ids=eos_token_ids(asked.engines / "target"),
        adaptive=AdaptiveSettings(),
    )
    lines = PROMPTS.read_text(encoding="utf-8").splitlines()[: asked.prompts]
    prompts = dict(enumerate(codec.encode(json.loads(line)["prompt"]) for line in lines))
    results = []
    for mix, load in itertools.product(asked.mix or MIXES, asked.load or LOADS):
        # One runtime per row: what it learned of one mix is not to help in the next.
        drafter, clock = SpoiledDrafter(draft), clock_of(asked)
        costs = measured_costs(target, draft, settings.max_draft_len, clock)
        runtime = TimedRuntime(
            target, draft, codec, settings, drafter=drafter, clock=clock, costs=costs
        )
        results.append(measure(runtime, drafter, prompts, mix, load, asked))
        show(results[-1])
    of = "thread" if asked.cpu_time else "wall"
    print(json.dumps({"benchmark": "adaptive", "clock": of, **facts(), "results": results}))
    return 0


def show(row: dict[str, Any]) -> None:
    sweep, rates = (
        ", ".join(f"{name} {rate}" for name, rate in row[part].items())
        for part in ("sweep_tokens_per_s", "tokens_per_s")
    )
    same, texts = row["same_texts"]
    print(f"{row['mix']}, {row['requests']} at once: sweep {sweep} tokens/s")
    print(f"    in turns: {rates} tokens/s")
    print(
        f"    adaptive / {row['best']}: {_range(row['adaptive_over_best'])}   adaptive / plain:"
        f" {_range(row['adaptive_over_plain'])}   {CONTROL} / plain:"
        f" {_range(row['control_over_plain'])}   deciding and probing:"
        f" {row['adapting_share']:.1%}   texts as plain: {same} of {texts}   steps:"
        f" {row['steps_by_reason']}, drafted by position: {row['drafted_by_position']}",
        flush=True,
    )


def _range(ratio: Slots[float]) -> str:
    return "{:.3f} ({:.3f}-{:.3f})".format(*ratio)


def build_engines() -> None:
    print("building the engines ...", file=sys.stderr)
    command = [sys.executable, "-m", "toolkit", "build", str(ROOT / "configs" / "quickstart.yaml")]
    command += ["--until", "compile"]
    for change in ("name=adaptive", "engine.max_batch_size=16", "speculation.max_draft_len=5"):
        command += ["--set", change]
    subprocess.run(command, cwd=ROOT, stdout=sys.stderr, check=True)


if __name__ == "__main__":
    sys.exit(main())
