"""Whether draft lengths that adapt keep what the best fixed length gains, and lose nothing where no
length gains.

The quickstart pair in process, greedy, 1, 4 and 16 requests at once, on four mixes of text:

    predictable     the draft as it is
    unpredictable   the draft's best token is never the right one
    alternating     both in turns of 48 tokens within each text
    both kinds      every second request is unpredictable

Arms: plain decoding, every fixed draft length, and adaptive. All arms take a group of prompts
before any takes the next one, in rotated order, so that the figures of a pair are seconds apart;
the ranges are 95 % bootstrap intervals. Drafts are spoiled by a wrapper around the draft's engine,
which costs a few microseconds per draft in all arms. Good: adaptive / best fixed >= 0.97, adaptive
/ plain >= 0.95, and every text is the plain one. (`best` includes plain decoding. In the mix of
both kinds the best fixed choice is per kind: the predictable ones draft, the others do not.)

    python -m tests.benchmarks.bench_adaptive [--engines DIR] [--rounds 5] [--max-tokens 192]
        [--cpu-time]

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
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tests.benchmarks.engines import facts
from tests.support.runtimes import Outcome, make_request
from toolkit.engines.embedded.package import PackagedEngine
from toolkit.engines.registry import loader
from toolkit.inprocess import eos_token_ids
from toolkit.interfaces import Chain
from toolkit.resampling import bootstrap_ratio_of_sums
from toolkit.speculative.adaptive import AdaptiveSettings
from toolkit.speculative.runtime import RuntimeSettings, SpeculativeRuntime
from toolkit.speculative.sampling import to_host
from toolkit.speculative.text import TextCodec

ROOT = Path(__file__).parents[2]
PROMPTS = ROOT / "configs" / "quickstart" / "data" / "prompts.jsonl"
MIXES = ("predictable", "unpredictable", "alternating", "both kinds")
LOADS = (1, 4, 16)
TURN_TOKENS = 48
CONTEXT_TOKENS = 6  # that tell, with the position, where in which text a token is
WRONG_TOKEN = 0


Place = tuple[int, tuple[int, ...]]


def place_of(ids: Sequence[int], end: int) -> Place:
    """Where a token is that follows the first `end` of these. Texts repeat themselves, so the last
    tokens alone do not tell.
    """
    return end, tuple(ids[max(0, end - CONTEXT_TOKENS) : end])


class SpoiledDraft:
    """An engine whose best token is wrong wherever `is_spoiled` says so."""

    def __init__(self, engine: PackagedEngine) -> None:
        self._engine = engine
        self._held: list[list[int]] = [[] for _ in range(engine.max_batch_size)]
        self.vocab_size = engine.vocab_size
        self.max_batch_size = engine.max_batch_size
        self.max_seq_len = engine.max_seq_len
        self.max_step_tokens = engine.max_step_tokens
        self.is_spoiled: Callable[[Place], bool] = lambda place: False

    def forward(
        self, slots: Sequence[int], tokens: torch.Tensor, *, last_only: bool = False
    ) -> torch.Tensor:
        logits = self._engine.forward(slots, tokens, last_only=last_only)
        host = to_host(logits)  # a view: inference tensors cannot be written to
        for row, (slot, new) in enumerate(zip(slots, tokens.tolist(), strict=True)):
            held = self._held[slot]
            held += new
            for column in range(logits.shape[1]):
                end = len(held) - logits.shape[1] + 1 + column
                if self.is_spoiled(place_of(held, end)):
                    host[row, column, WRONG_TOKEN] = 1e4
        return logits

    def forward_chain(self, chains: Sequence[Chain]) -> tuple[list[list[int]], NDArray[Any] | None]:
        """What the engine chooses, but for wrong tokens at spoiled places. What it chose behind
        them is as good as any other text, since nothing behind a wrong token is accepted.
        """
        ids, _ = self._engine.forward_chain(chains)
        for chain, chosen in zip(chains, ids, strict=True):
            held = self._held[chain.slot]
            held += chain.tokens
            for index, token in enumerate(chosen):
                if self.is_spoiled(place_of(held, len(held))):
                    chosen[index] = WRONG_TOKEN
                if index < len(chosen) - 1:
                    held.append(token)
        return ids, None

    def rewind(self, slots: Sequence[int], lengths: Sequence[int]) -> None:
        self._engine.rewind(slots, lengths)
        for slot, length in zip(slots, lengths, strict=True):
            del self._held[slot][length:]

    def length(self, slot: int) -> int:
        return self._engine.length(slot)


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
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    draft_lens: Sequence[int | None],
    clock: Callable[[], int],
) -> tuple[list[Outcome], float]:
    """All prompts at once, to the end, and how many seconds they took."""
    outcomes = [Outcome() for _ in prompts]
    began = clock()
    for index, (prompt, draft_len) in enumerate(zip(prompts, draft_lens, strict=True)):
        request = make_request(prompt, max_tokens, request_id=str(index), draft_len=draft_len)
        runtime.submit(request, outcomes[index].events.append)
    while runtime.step():
        pass
    spent = (clock() - began) / 1e9
    for outcome in outcomes:
        if outcome.finish_reason not in ("stop", "length"):
            raise RuntimeError(f"a request failed: {outcome.events[-1].error}")
    return outcomes, spent


def spoiled_contexts(
    mix: str, prompts: Sequence[Sequence[int]], texts: Sequence[Sequence[int]]
) -> set[Place]:
    """Where the draft is to be wrong."""
    contexts = set()
    for index, (prompt, text) in enumerate(zip(prompts, texts, strict=True)):
        ids = [*prompt, *text]
        for made in range(len(text)):
            is_spoiled = {
                "predictable": False,
                "unpredictable": True,
                "alternating": made // TURN_TOKENS % 2 == 1,
                "both kinds": index % 2 == 1,
            }[mix]
            if is_spoiled:
                end = len(prompt) + made
                contexts.add(place_of(ids, end))
    return contexts


def arms_of(mix: str, max_draft_len: int, count: int) -> dict[str, list[int | None]]:
    """Name -> draft length of each prompt."""
    arms: dict[str, list[int | None]] = {"plain": [0] * count, "adaptive": [None] * count}
    for draft_len in range(1, max_draft_len + 1):
        arms[f"fixed {draft_len}"] = [draft_len] * count
        if mix == "both kinds":
            arms[f"fixed {draft_len} and 0"] = [
                0 if index % 2 else draft_len for index in range(count)
            ]
    return arms


def measure(
    runtime: SpeculativeRuntime,
    draft: SpoiledDraft,
    prompts: Sequence[Sequence[int]],
    mix: str,
    load: int,
    asked: argparse.Namespace,
) -> dict[str, Any]:
    max_draft_len, clock = runtime.settings.max_draft_len, clock_of(asked)
    plain, _ = zip(
        *(together(runtime, [p], asked.max_tokens, [0], clock) for p in prompts), strict=True
    )
    texts = [outcomes[0].ids for outcomes in plain]
    contexts = spoiled_contexts(mix, prompts, texts)
    draft.is_spoiled = lambda place: place in contexts
    lengths = arms_of(mix, max_draft_len, len(prompts))
    arms = {name: Arm() for name in lengths}
    names, same, asked_texts = list(arms), 0, 0
    reasons: dict[str, int] = {}
    drafted = [0] * max_draft_len
    together(runtime, prompts[:load], asked.max_tokens, lengths["adaptive"][:load], clock)  # warm
    starts = range(0, len(prompts), load)
    for turn, start in enumerate(asked.rounds * list(starts)):
        part = slice(start, start + load)
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            outcomes, spent = together(
                runtime, prompts[part], asked.max_tokens, lengths[name][part], clock
            )
            arms[name].tokens.append(sum(len(outcome.ids) for outcome in outcomes))
            arms[name].seconds.append(spent)
            if name != "adaptive":
                continue
            ids = [outcome.ids for outcome in outcomes]
            same += sum(a == b for a, b in zip(ids, texts[part], strict=True))
            asked_texts += len(ids)
            for outcome in outcomes:
                for place, count in enumerate(outcome.stats.drafted_by_position):
                    drafted[place] += count
                for reason, steps in outcome.stats.steps_by_reason.items():
                    reasons[reason] = reasons.get(reason, 0) + steps
    rates = {name: arm.rate for name, arm in arms.items()}
    best = max((name for name in names if name != "adaptive"), key=lambda name: rates[name])

    def ratio(other: str) -> list[float]:
        """[ratio of speeds, low end, high end], drawn from groups of prompts and rounds."""
        ours, theirs = (
            np.reshape(arms[name].seconds, (asked.rounds, -1)) for name in ("adaptive", other)
        )
        return [round(figure, 4) for figure in bootstrap_ratio_of_sums(theirs, ours)]

    return {
        "mix": mix,
        "requests": load,
        "tokens_per_s": {name: round(rate) for name, rate in rates.items()},
        "best": best,
        "adaptive_over_best": ratio(best),
        "adaptive_over_plain": ratio("plain"),
        "same_texts": [same, asked_texts],
        "steps_by_reason": reasons,
        "drafted_by_position": drafted,
    }


def clock_of(asked: argparse.Namespace) -> Callable[[], int]:
    return time.thread_time_ns if asked.cpu_time else time.monotonic_ns


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--engines", type=Path, default=ROOT / "engines" / "adaptive")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--max-tokens", type=int, default=192)
    parser.add_argument("--mix", choices=MIXES, action="append")
    parser.add_argument("--load", type=int, action="append")
    parser.add_argument("--cpu-time", action="store_true")
    asked = parser.parse_args()
    if not (asked.engines / "target" / "config.json").exists():
        build_engines()
    target = loader("torch").load(asked.engines / "target", threads=1)
    draft_engine = loader("torch").load(asked.engines / "draft", threads=1)
    assert isinstance(draft_engine, PackagedEngine)
    draft = SpoiledDraft(draft_engine)
    codec = TextCodec.from_file(asked.engines / "target" / "tokenizer.json")
    config = json.loads((asked.engines / "target" / "config.json").read_text())
    settings = RuntimeSettings(
        max_draft_len=config["build_config"]["max_draft_len"],
        eos_token_ids=eos_token_ids(asked.engines / "target"),
        adaptive=AdaptiveSettings(),
    )
    lines = PROMPTS.read_text(encoding="utf-8").splitlines()[: asked.prompts]
    prompts = [codec.encode(json.loads(line)["prompt"]) for line in lines]
    results = []
    for mix, load in itertools.product(asked.mix or MIXES, asked.load or LOADS):
        # One runtime per row: what it learned of one mix is not to help in the next.
        runtime = SpeculativeRuntime(target, draft, codec, settings, clock=clock_of(asked))
        draft.is_spoiled = lambda place: False
        results.append(measure(runtime, draft, prompts, mix, load, asked))
        show(results[-1])
    clock = "thread" if asked.cpu_time else "wall"
    print(json.dumps({"benchmark": "adaptive", "clock": clock, **facts(), "results": results}))
    return 0


def show(row: dict[str, Any]) -> None:
    rates = ", ".join(f"{name} {rate}" for name, rate in row["tokens_per_s"].items())
    same, texts = row["same_texts"]
    print(f"{row['mix']}, {row['requests']} at once: {rates} tokens/s")
    print(
        f"    adaptive / {row['best']}: {_range(row['adaptive_over_best'])}   adaptive / plain:"
        f" {_range(row['adaptive_over_plain'])}   texts as plain: {same} of {texts}   steps:"
        f" {row['steps_by_reason']}, drafted by position: {row['drafted_by_position']}",
        flush=True,
    )


def _range(ratio: Sequence[float]) -> str:
    return "{:.3f} ({:.3f}-{:.3f})".format(*ratio)


def build_engines() -> None:
    from toolkit.cli import main as toolkit

    print("building the engines ...", file=sys.stderr)
    arguments = ["build", str(ROOT / "configs" / "quickstart.yaml"), "--until", "compile"]
    for change in ("name=adaptive", "engine.max_batch_size=16", "speculation.max_draft_len=5"):
        arguments += ["--set", change]
    toolkit(arguments)


if __name__ == "__main__":
    sys.exit(main())
