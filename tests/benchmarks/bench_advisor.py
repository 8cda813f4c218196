"""The advisor's draft length against the best of an exhaustive sweep, at three batch sizes, and
what either took to find.

The quickstart pair, INT8, greedy. The advisor answers first, for all batch sizes at once. Then
every length is really run at every batch size, interleaved. Where both name different lengths (0:
plain decoding), these two are run again in pairs, and the ratio of their speeds is what counts. On
a draft of random weights the advisor has to say that speculation does not pay. Good: the interval
of the ratio reaches 0.97 at every batch size, and the advisor took at most a tenth of the sweep's
time.

    python -m tests.benchmarks.bench_advisor [--engines DIR] [--prompts 64] [--rounds 3]

--engines: a folder with engine directories `target` and `draft` of the pair; without it they are
built in a temporary folder.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch

from toolkit.advise.choose import best_length
from toolkit.advise.observe import teacher_forced
from toolkit.advise.stage import Contender, Question, advise
from toolkit.advise.sweep import sweep
from toolkit.engines.registry import loader
from toolkit.inprocess import eos_token_ids
from toolkit.interfaces import StepEngine
from toolkit.pipeline.rows import read_rows
from toolkit.records.advice import Advice
from toolkit.resampling import bootstrap_ratio_of_sums
from toolkit.speculative.drafters import Lookup
from toolkit.speculative.text import TextCodec
from toolkit.workflows.measured_runtime import MeasuredRuntime

ROOT = Path(__file__).parents[2]
BATCHES, LENGTHS, MAX_TOKENS = (1, 2, 4), range(9), 64
PAIRED_ROUNDS = 6


@dataclass(frozen=True)
class Row:
    """One batch size: the advisor's length, the sweep's, and the speed of the one over the
    other, re-measured in pairs.
    """

    batch: int
    chosen: int
    best: int
    ratio: tuple[float, float, float]
    predicted: dict[int, float]
    measured: dict[int, float]


def build_engines(folder: Path) -> Path:
    """Quantize and compile the quickstart pair, as its YAML says."""
    from toolkit.cli.progress import displayed
    from toolkit.config.load import load_config
    from toolkit.pipeline.store import Store
    from toolkit.workflows.build import build
    from toolkit.workflows.folders import Workplace

    config, workplace = load_config(ROOT / "configs" / "quickstart.yaml"), Workplace(folder)
    with displayed() as display:
        build(config, workplace, display, Store(workplace.store), until="compile")
    return workplace.engines(config.name)


class RandomDraft:
    """The draft's cost with logits of noise: what an untrained draft of this shape is worth."""

    def __init__(self, engine: StepEngine) -> None:
        self._engine, self._generator = engine, torch.Generator().manual_seed(0)
        self.vocab_size, self.max_batch_size = engine.vocab_size, engine.max_batch_size
        self.max_seq_len, self.max_step_tokens = engine.max_seq_len, engine.max_step_tokens
        self.rewind, self.length = engine.rewind, engine.length

    def forward(
        self, slots: list[int], tokens: torch.Tensor, *, last_only: bool = False
    ) -> torch.Tensor:
        return torch.rand(
            self._engine.forward(slots, tokens, last_only=last_only).shape,
            generator=self._generator,
        )


def ask(
    target: StepEngine, draft: StepEngine, runtime: MeasuredRuntime, question: Question
) -> Advice:
    return advise(
        teacher_forced(target),
        [Contender("draft", "draft_target", runtime, teacher_forced(draft))],
        question,
        lookup=lambda: Lookup(4),
        probabilities=lambda logits: logits,
        progress=lambda done, total, what: None,
    )


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--engines", type=Path)
    arguments.add_argument("--prompts", type=int, default=64)
    arguments.add_argument("--rounds", type=int, default=3)
    asked = arguments.parse_args()
    with ExitStack() as stack:
        engines = asked.engines or build_engines(
            Path(stack.enter_context(tempfile.TemporaryDirectory()))
        )
        target, draft = (
            loader("torch").load(engines / role, threads=1) for role in ("target", "draft")
        )
        codec, eos = (
            TextCodec.from_file(engines / "target" / "tokenizer.json"),
            eos_token_ids(engines / "target"),
        )
    file = ROOT / "configs" / "quickstart" / "data" / "prompts.jsonl"
    rows = read_rows(file, "prompt", limit=asked.prompts)
    prompts = [(row.domain, tuple(codec.encode(row.text or ""))) for row in rows]
    question = Question(
        prompts, MAX_TOKENS, None, "auto", max_draft_len=LENGTHS[-1], batches=BATCHES
    )
    runtime = MeasuredRuntime(target, draft, codec, eos_token_ids=eos)
    runtime.run("draft_target", [ids for _, ids in prompts[:8]], 4, MAX_TOKENS, 0.0)  # warm

    began = time.monotonic()
    advice = ask(target, draft, runtime, question)
    advised_s = time.monotonic() - began
    began = time.monotonic()
    times = {batch: run(runtime, prompts, batch, LENGTHS, asked.rounds) for batch in BATCHES}
    swept_s = time.monotonic() - began

    rows = []
    for batch in BATCHES:
        predicted = {
            each.draft_len: each.speedup
            for each in advice.candidates[0].predictions
            if each.batch == batch
        }
        chosen = best_length({0: 1.0, **predicted})
        total = {length: float(spent.sum()) for length, spent in times[batch].items()}
        best = min(total, key=total.__getitem__)
        ratio = (1.0, 1.0, 1.0)
        if chosen != best:
            again = run(runtime, prompts, batch, (chosen, best), PAIRED_ROUNDS)
            ratio = bootstrap_ratio_of_sums(again[best], again[chosen])
        measured = {length: total[0] / spent for length, spent in total.items()}
        rows.append(Row(batch, chosen, best, ratio, predicted, measured))
        print(
            f"batch {batch}: advisor {chosen}, sweep {best}; choice / best {ratio[0]:.3f}"
            f" ({ratio[1]:.3f} to {ratio[2]:.3f})"
        )
        print("  length     " + "".join(f"{length:8}" for length in predicted))
        print("  predicted  " + "".join(f"{speedup:8.2f}" for speedup in predicted.values()))
        print("  measured   " + "".join(f"{measured[length]:8.2f}" for length in predicted))

    noise = RandomDraft(draft)
    refused = ask(
        target,
        noise,
        MeasuredRuntime(target, noise, codec, eos_token_ids=eos),
        replace(question, batches=(1,)),
    )
    print(f"random draft: {refused.reason}")
    share = advised_s / swept_s
    good = all(row.ratio[2] >= 0.97 for row in rows) and share <= 0.1 and not refused.speculate
    print(
        f"advisor {advised_s:.1f} s, sweep {swept_s:.1f} s: {share:.1%};"
        f" {'good' if good else 'not good'}"
    )
    line = {
        "benchmark": "advisor",
        "rows": [asdict(row) for row in rows],
        "seconds": {"advisor": advised_s, "sweep": swept_s},
        "random_refused": not refused.speculate,
        "torch": torch.__version__,
        "machine": platform.machine(),
        "cores": os.cpu_count(),
    }
    print(json.dumps(line))
    return 0


def run(
    runtime: MeasuredRuntime,
    prompts: list[tuple[str, tuple[int, ...]]],
    batch: int,
    lengths: Sequence[int],
    rounds: int,
) -> dict[int, np.ndarray]:
    return sweep(
        runtime,
        "draft_target",
        [ids for _, ids in prompts],
        draft_lens=lengths,
        batch=batch,
        max_tokens=MAX_TOKENS,
        temperature=0.0,
        rounds=rounds,
    )


if __name__ == "__main__":
    sys.exit(main())
