"""Our runtime against transformers' assisted generation: the same pair, prompts, precision, threads
and draft length.

In one process, prompt by prompt in turns, greedy, FP32: our runtime with and without the draft, the
bare loop (our target's engine alone, one token per forward and nothing else), and transformers'
`generate` with and without `assistant_model`, its draft length held constant as ours is. Tokens per
second count whole calls, prompt included; the bare loop and the plain arm are compared on the time
behind the first token. Good: ours / transformers >= 3, plain / bare >= 0.9.

    python -m tests.benchmarks.bench_runtime [--engines DIR] [--prompts 24] [--max-tokens 96]

--engines: a folder with FP32 engine directories `target` and `draft` of the pair; made there if it
has none, else in a temporary folder (compiling takes about a minute).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from tests.support.runtimes import make_request, serve_one
from toolkit.checkpoints.shape import read_json
from toolkit.engines.registry import loader
from toolkit.engines.stage import compile_engine
from toolkit.inprocess import load_runtime
from toolkit.interfaces import EngineSpec, RequestStats
from toolkit.records.build import QuantizedCheckpoint
from toolkit.speculative.runtime import SpeculativeRuntime

QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart"
MAX_SEQ_LEN = 1024


@dataclass
class Arm:
    """Tokens and seconds summed over all runs, the same behind the first token, and the output
    of every prompt.
    """

    tokens: int = 0
    seconds: float = 0.0
    later_tokens: int = 0
    later_seconds: float = 0.0
    outputs: dict[int, list[int]] = field(default_factory=dict)

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


def make_engines(folder: Path, draft_len: int) -> str:
    """Engine directories of the quickstart pair without quantization; those that stand are
    taken. Returns their mode.
    """
    for role in ("target", "draft"):
        out, source = folder / role, QUICKSTART / role
        if (out / "config.json").exists():
            continue
        print(f"compiling the {role} ...", file=sys.stderr)
        config = read_json(source / "config.json")
        spec = EngineSpec(
            role, 8, MAX_SEQ_LEN - 256, MAX_SEQ_LEN, draft_len if role == "target" else 0
        )
        checkpoint = QuantizedCheckpoint(
            role=role,
            path=source,
            quant_algo=None,
            kv_cache_quant_algo=None,
            architecture=config["architectures"][0],
            vocab_size=config["vocab_size"],
            weight_bytes=0,
            quality=None,
            checks=(),
        )
        compile_engine("torch", checkpoint, spec, out, lambda done, total, what: None)
    return str(read_json(folder / "target" / "config.json")["toolkit"]["mode"])


def ours(
    runtime: SpeculativeRuntime, max_tokens: int, draft_len: int | None
) -> Callable[[list[int]], tuple[list[int], float]]:
    def run(prompt: list[int]) -> tuple[list[int], float]:
        outcome = serve_one(runtime, make_request(prompt, max_tokens, draft_len=draft_len))
        return outcome.ids, behind_the_first(outcome.stats)

    return run


def behind_the_first(stats: RequestStats) -> float:
    assert stats.first_token_ns is not None
    assert stats.last_token_ns is not None
    return (stats.last_token_ns - stats.first_token_ns) / 1e9


def bare_loop(
    engine_dir: Path, threads: int, eos: Sequence[int], max_tokens: int
) -> Callable[[list[int]], tuple[list[int], float]]:
    engine = loader("torch").load(engine_dir, threads=threads)

    def run(prompt: list[int]) -> tuple[list[int], float]:
        for start in range(0, len(prompt), engine.max_step_tokens):
            logits = engine.forward(
                [0], torch.tensor([prompt[start : start + engine.max_step_tokens]]), last_only=True
            )
        ids = [int(logits.argmax())]
        began = time.perf_counter()
        while len(ids) < max_tokens and ids[-1] not in eos:
            ids.append(int(engine.forward([0], torch.tensor([[ids[-1]]])).argmax()))
        spent = time.perf_counter() - began
        engine.rewind([0], [0])
        return ids, spent

    return run


def theirs(
    model: Any, assistant: Any, max_tokens: int, draft_len: int
) -> Callable[[list[int]], tuple[list[int], float]]:
    if assistant is not None:
        own = assistant.generation_config
        own.num_assistant_tokens, own.num_assistant_tokens_schedule = draft_len, "constant"
        own.assistant_confidence_threshold = (
            0.0  # it would end a block early where the draft is unsure
        )

    def run(prompt: list[int]) -> tuple[list[int], float]:
        ids = torch.tensor([prompt])
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=max_tokens,
            do_sample=False,
            assistant_model=assistant,
        )
        return out[0, len(prompt) :].tolist(), float("nan")

    return run


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--engines", type=Path)
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--draft-len", type=int, default=4)
    parser.add_argument("--threads", type=int, default=2)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        return compare(asked, asked.engines or Path(scratch))


def compare(asked: argparse.Namespace, folder: Path) -> int:
    import transformers

    mode = make_engines(folder, asked.draft_len)
    torch.set_num_threads(asked.threads)
    runtime = load_runtime(
        folder / "target", folder / "draft", threads=asked.threads, max_draft_len=asked.draft_len
    )
    eos = runtime.settings.eos_token_ids
    transformers.utils.logging.disable_progress_bar()
    # it would print a line per block, in its own time
    transformers.utils.logging.set_verbosity_error()
    model, assistant = (
        transformers.AutoModelForCausalLM.from_pretrained(
            QUICKSTART / role, dtype=torch.float32
        ).eval()
        for role in ("target", "draft")
    )
    for each in (model, assistant):
        each.generation_config.max_length = None
    arms: dict[str, Callable[[list[int]], tuple[list[int], float]]] = {
        "ours, speculative": ours(runtime, asked.max_tokens, None),
        "ours, plain": ours(runtime, asked.max_tokens, 0),
        "bare loop": bare_loop(folder / "target", asked.threads, eos, asked.max_tokens),
        "transformers, assisted": theirs(model, assistant, asked.max_tokens, asked.draft_len),
        "transformers, plain": theirs(model, None, asked.max_tokens, asked.draft_len),
    }
    lines = (
        (QUICKSTART / "data" / "prompts.jsonl")
        .read_text(encoding="utf-8")
        .splitlines()[: asked.prompts]
    )
    prompts = [runtime.codec.encode(json.loads(line)["prompt"]) for line in lines]
    results = {name: Arm() for name in arms}
    for run in arms.values():
        run(prompts[0])  # warms up
    for index, prompt in enumerate(prompts):
        for name in list(arms)[index % len(arms) :] + list(arms)[: index % len(arms)]:
            start = time.perf_counter()
            ids, later = arms[name](prompt)
            results[name].seconds += time.perf_counter() - start
            results[name].tokens += len(ids)
            results[name].later_tokens += len(ids) - 1
            results[name].later_seconds += later
            results[name].outputs[index] = ids
    report(asked, mode, results, runtime)
    return 0


def report(
    asked: argparse.Namespace, mode: str, results: dict[str, Arm], runtime: SpeculativeRuntime
) -> None:
    reference = results["ours, plain"].outputs
    print(f"{'arm':26}{'tokens/s':>10}{'tokens':>9}{'prompts as ours, plain':>25}")
    for name, arm in results.items():
        same = sum(arm.outputs[index] == ids for index, ids in reference.items())
        print(f"{name:26}{arm.rate:10.1f}{arm.tokens:9}{same:19} of {len(reference)}")
    plain, bare = results["ours, plain"], results["bare loop"]
    counters = runtime.counters()
    figures = {
        "ours_over_transformers": results["ours, speculative"].rate
        / results["transformers, assisted"].rate,
        "speculative_over_plain": results["ours, speculative"].rate / plain.rate,
        "transformers_assisted_over_plain": results["transformers, assisted"].rate
        / results["transformers, plain"].rate,
        "plain_over_bare": (plain.later_tokens / plain.later_seconds)
        / (bare.later_tokens / bare.later_seconds),
        "acceptance_rate": counters.accepted / max(1, counters.drafted),
    }
    for name, figure in figures.items():
        print(f"{name.replace('_', ' '):36}{figure:8.3f}")
    facts = {
        "benchmark": "runtime",
        "precision": "FP32",
        "engine_mode": mode,
        "threads": asked.threads,
        "draft_len": asked.draft_len,
        "prompts": len(reference),
        "max_tokens": asked.max_tokens,
        "device": f"{platform.machine()}, {os.cpu_count()} cores",
        "versions": {name: version(name) for name in ("torch", "transformers")},
        "tokens_per_s": {name: round(arm.rate, 1) for name, arm in results.items()},
    }
    print(json.dumps({**facts, **{name: round(figure, 4) for name, figure in figures.items()}}))


if __name__ == "__main__":
    sys.exit(main())
