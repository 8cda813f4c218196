"""Does speculation pay through Triton, and is the plain arm honest?

One stream, the quickstart pair, held-out prompts; a real server on this machine and a client over
gRPC, which stays off the core that the server computes on, as one on another machine would. Prompt
by prompt, in turns, three arms run: the bare loop (the target engine alone, in this process, one
token per forward and nothing else), plain decoding through Triton, and speculation through Triton;
greedy and at T = 0.8. Tokens per second count the whole request, from sent to last token; against
the bare loop, which has no prompt to read, from first token to last. Good: speculative / plain >=
1.5 in both, texts that do not loop (distinct 4-grams >= 0.5), plain / bare >= 0.9.

The pair is deployed in three ways. As shipped, a chunk is streamed per step, and sending one costs
as much as an INT8 forward of so small a model: what speculation saves is chunks, too. With chunks
40 ms apart sending hardly counts, and what is left is decoding itself: with an INT8 target, which
this processor keeps in its cache, and with the target as it was trained, in BF16, which is bound by
reading its weights as large models are.

What plain decoding takes beside the bare loop is told by process: the processor time per chunk of
the model's stepping thread (the forward; what is around it, too, where the request is not in a
burst), of the model's other threads (text and sending), of tritonserver, and of the client.

    python -m tests.benchmarks.bench_serving [--deployments NAME ...] [--prompts FILE]
    python -m tests.benchmarks.bench_serving --repository triton_repo/NAME
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from toolkit.bench.arrivals import undisturbed
from toolkit.client import Client, Options, read_prompts
from toolkit.resampling import bootstrap_ratio
from toolkit.triton.process.server import TritonServer
from toolkit.triton.tensors.contract import MODEL

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "configs" / "quickstart.yaml"
FAR_APART = "triton.stream_interval_ms=40"
DEPLOYMENTS = {
    "shipped": [],
    "int8": [FAR_APART],
    "bf16": [FAR_APART, "target.quantization.quant_algo=NO_QUANT"],
}
SAMPLED = {
    "T=0": Options(temperature=0.0),
    "T=0.8": Options(temperature=0.8),  # unseeded: speculative sampling by rejection
    "T=0.8 seeded": Options(temperature=0.8, seed=1),  # coupled: the same text in both arms
}


@dataclass
class Arm:
    """Tokens and seconds of every run, in order; prompts repeat in every round."""

    tokens: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    decode: Arm | None = None  # the same runs without their first tokens
    texts: list[tuple[int, ...]] = field(default_factory=list)
    drafted: int = 0
    accepted: int = 0
    steps: int = 0

    def add(self, tokens: int, seconds: float) -> None:
        self.tokens.append(tokens)
        self.seconds.append(seconds)

    def rate(self) -> float:
        return sum(self.tokens) / sum(self.seconds)


def distinct_4_grams(texts: Sequence[tuple[int, ...]]) -> float:
    """Mean over texts of distinct / all runs of four tokens; 1.0 never repeats itself."""
    runs = [[text[i : i + 4] for i in range(len(text) - 3)] for text in texts if len(text) > 3]
    return float(np.mean([len(set(run)) / len(run) for run in runs]))


def ratio_interval(above: Arm, below: Arm, prompts: int) -> tuple[float, float, float]:
    """above / below in tokens per second, with its interval over prompts (all rounds of a prompt
    stay together).
    """

    def by_prompt(figures: Sequence[float]) -> Any:  # [1, prompts]
        return np.reshape(figures, (-1, prompts)).sum(axis=0, keepdims=True)

    arms = (above, below)
    tokens, seconds = (
        [by_prompt(getattr(arm, name)) for arm in arms] for name in ("tokens", "seconds")
    )
    return bootstrap_ratio((tokens[0], tokens[1]), (seconds[0], seconds[1]))


def deploy(folder: Path, name: str) -> Path:
    """Quantize, compile and package the quickstart pair as the YAML says, but for what the name
    says. The repository.
    """
    from toolkit.cli.progress import displayed
    from toolkit.config.load import load_config
    from toolkit.pipeline.store import Store
    from toolkit.workflows.build import build
    from toolkit.workflows.folders import Workplace

    workplace = Workplace(folder)
    config = load_config(CONFIG, [f"name={name}", *DEPLOYMENTS[name]])
    with displayed() as display:
        build(config, workplace, display, Store(workplace.store), until="package")
    return workplace.repository(name)


def bare_loop(repository: Path, max_tokens: int) -> Callable[[str], tuple[int, float]]:
    """prompt -> (tokens, seconds) of greedy decoding with the target engine alone; the least
    that plain decoding can cost.
    """
    import torch
    from tokenizers import Tokenizer

    from toolkit.engines.registry import loader

    folder = repository / MODEL / "1" / "engines" / "target"
    threads = yaml.safe_load((repository / MODEL / "1" / "model.yaml").read_text())["toolkit"][
        "threads"
    ]
    engine = loader("torch").load(folder, threads=threads)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))

    @torch.inference_mode()
    def run(prompt: str) -> tuple[int, float]:
        ids = torch.tensor([tokenizer.encode(prompt).ids])
        for start in range(0, ids.shape[1], engine.max_step_tokens):
            logits = engine.forward(
                [0], ids[:, start : start + engine.max_step_tokens], last_only=True
            )
        token = logits[:, -1:].argmax(-1)
        started = time.perf_counter()
        for _ in range(max_tokens - 1):
            token = engine.forward([0], token, last_only=True).argmax(-1)
        seconds = time.perf_counter() - started
        engine.rewind([0], [0])
        return max_tokens - 1, seconds

    return run


def processor_ns(server: int) -> Counter[tuple[str, int]]:
    """(part, thread) -> nanoseconds that it has computed so far. server: the process of
    tritonserver, whose child is the model's.
    """

    def add(part: str, process: str) -> None:
        for task in Path(f"/proc/{process}/task").iterdir():
            with contextlib.suppress(OSError):  # a thread that has just ended
                times[part, int(task.name)] += int((task / "schedstat").read_text().split()[0])

    times: Counter[tuple[str, int]] = Counter()
    for task in Path(f"/proc/{server}/task").iterdir():
        for pid in (task / "children").read_text().split():
            add("model", pid)
    add("tritonserver", str(server))
    add("client", "self")
    return times


def by_part(spent: Counter[tuple[str, int]]) -> dict[str, int]:
    """Nanoseconds by part. The stepping thread is the one of the model that computed the most."""
    stepping = max(ns for (part, _), ns in spent.items() if part == "model")
    parts = Counter[str]()
    for (part, _), ns in spent.items():
        parts[part] += ns
    return {
        "stepping thread": stepping,
        "other threads of the model": parts["model"] - stepping,
        "tritonserver": parts["tritonserver"],
        "client": parts["client"],
    }


def served(client: Client, arm: Arm, prompt: str, options: Options) -> None:
    (timing,) = client.measure([prompt], options)
    if (
        not timing.output_tokens
        or timing.output_tokens < 2
        or timing.ttft_ns is None
        or timing.e2e_ns is None
    ):
        raise SystemExit(f"a prompt of the benchmark gives no text to measure: {prompt[:60]!r}")
    arm.add(timing.output_tokens, timing.e2e_ns / 1e9)
    arm.decode = arm.decode or Arm()
    arm.decode.add(timing.output_tokens - 1, (timing.e2e_ns - timing.ttft_ns) / 1e9)
    arm.texts.append(timing.token_ids)
    arm.drafted += timing.statistics.drafted or 0
    arm.accepted += timing.statistics.accepted or 0
    arm.steps += timing.statistics.verify_steps or 0


def measure(
    repository: Path, prompts: Sequence[str], max_tokens: int, rounds: int
) -> dict[str, Any]:
    bare, results, spent = Arm(), dict[str, Any](), Counter[tuple[str, int]]()
    run_bare = bare_loop(repository, max_tokens)
    with TritonServer(repository) as server, Client(server.grpc_url) as client:
        for name, options in SAMPLED.items():
            plain, speculative = Arm(), Arm()
            base = {
                "max_tokens": max_tokens,
                **{key: getattr(options, key) for key in ("temperature", "seed")},
            }
            asked = {"plain": Options(**base, num_draft_tokens=0), "speculative": Options(**base)}
            for number in range(-1, rounds):  # round -1 warms up
                arms = (
                    {"plain": Arm(), "speculative": Arm()}
                    if number < 0
                    else {"plain": plain, "speculative": speculative}
                )
                for index, prompt in enumerate(prompts[: 4 if number < 0 else None]):
                    if options.temperature == 0:
                        (bare if number >= 0 else Arm()).add(*run_bare(prompt))
                    for arm in sorted(arms, reverse=(number + index) % 2 == 0):
                        with undisturbed():
                            before = processor_ns(server.pid)
                            served(client, arms[arm], prompt, asked[arm])
                            if arm == "plain" and options.temperature == 0 and number >= 0:
                                spent.update(processor_ns(server.pid))
                                spent.subtract(before)
            estimate, low, high = ratio_interval(speculative, plain, len(prompts))
            results[name] = {
                "plain_tokens_per_s": plain.rate(),
                "speculative_tokens_per_s": speculative.rate(),
                "speedup": {"estimate": estimate, "low": low, "high": high},
                "acceptance_rate": speculative.accepted / speculative.drafted,
                "acceptance_length": 1 + speculative.accepted / speculative.steps,
                "distinct_4_grams": {
                    "plain": distinct_4_grams(plain.texts),
                    "speculative": distinct_4_grams(speculative.texts),
                },
            }
            if options.temperature == 0 and plain.decode is not None:
                share, low, high = ratio_interval(plain.decode, bare, len(prompts))
                results["plain_over_bare"] = {
                    "estimate": share,
                    "low": low,
                    "high": high,
                    "bare_tokens_per_s": bare.rate(),
                    "chunk_ms": 1000 / plain.rate(),
                    "processor_ms_per_chunk": {
                        part: ns / 1e6 / sum(plain.tokens) for part, ns in by_part(spent).items()
                    },
                }
    return results


def print_table(results: dict[str, Any]) -> None:
    bare = results["plain_over_bare"]
    heads = ("plain", "speculative", "speed-up", "95 %", "acceptance", "length", "4-grams")
    print(
        f"{'tokens/s':14}"
        + "".join(
            f"{head:>{width}}"
            for head, width in zip(heads, (10, 13, 10, 13, 12, 8, 9), strict=True)
        )
    )
    for name in SAMPLED:
        row = results[name]
        speedup, grams = row["speedup"], min(row["distinct_4_grams"].values())
        interval = f"{speedup['low']:.2f}-{speedup['high']:.2f}"
        print(
            f"{name:14}{row['plain_tokens_per_s']:10.1f}{row['speculative_tokens_per_s']:13.1f}{speedup['estimate']:9.2f}x"
            f"{interval:>13}{row['acceptance_rate']:12.3f}{row['acceptance_length']:8.2f}{grams:9.2f}"
        )
    print(
        f"bare loop {bare['bare_tokens_per_s']:.1f} tokens/s; plain through Triton reaches"
        f" {bare['estimate']:.3f} of it ({bare['low']:.3f} - {bare['high']:.3f})"
    )
    parts = bare["processor_ms_per_chunk"].items()
    print(
        f"a chunk through Triton {bare['chunk_ms']:.3f} ms, a forward of the bare loop"
        f" {1000 / bare['bare_tokens_per_s']:.3f} ms; processor time: "
        + ", ".join(f"{part} {ms:.3f}" for part, ms in parts),
        flush=True,
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--deployments", nargs="+", choices=DEPLOYMENTS, default=list(DEPLOYMENTS), metavar="NAME"
    )
    parser.add_argument(
        "--repository", type=Path, help="one that is packaged already, in their place"
    )
    parser.add_argument(
        "--prompts", type=Path, default=ROOT / "configs" / "quickstart" / "data" / "prompts.jsonl"
    )
    parser.add_argument("--max-prompts", type=int, default=48)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=2)
    asked = parser.parse_args()
    if asked.repository is not None and not (asked.repository / MODEL).is_dir():
        sys.exit(
            f"no repository at {asked.repository}: build one with `toolkit build`, or leave"
            " --repository out"
        )
    prompts = read_prompts(asked.prompts)[: asked.max_prompts]
    found = {}
    with tempfile.TemporaryDirectory(prefix="bench-serving-") as folder:
        for name in asked.deployments if asked.repository is None else [asked.repository.name]:
            repository = (
                deploy(Path(folder), name)
                if asked.repository is None
                else asked.repository.resolve()
            )
            found[name] = measure(repository, prompts, asked.max_tokens, asked.rounds)
            print(f"\n{name} {' '.join(DEPLOYMENTS.get(name, []))}")
            print_table(found[name])
    facts = {
        "benchmark": "serving",
        "prompts": len(prompts),
        "max_tokens": asked.max_tokens,
        "rounds": asked.rounds,
        "device": f"{platform.machine()}, {os.cpu_count()} cores",
        "versions": {name: version(name) for name in ("torch", "tritonclient", "nvidia-pytriton")},
    }
    print(json.dumps({**facts, "deployments": found}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
