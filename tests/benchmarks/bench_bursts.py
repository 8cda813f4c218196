"""What does it gain that the engine takes the steps of a request alone by itself?

The same runtime in process with bursts and without, one request at a time, in turns, on compiled
engines; tokens per second of whole requests, prompts included. Every text has a seed, and has to be
the same in both. Good: >= 1 in every row, and all texts the same.

    python -m tests.benchmarks.bench_bursts [--engines engines/quickstart] [--prompts 24]
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

from tests.benchmarks.engines import facts
from tests.support.runtimes import make_request
from toolkit.client import read_prompts
from toolkit.inprocess import load_runtime
from toolkit.speculative.runtime import SpeculativeRuntime

ROOT = Path(__file__).parents[2]
PROMPTS = ROOT / "configs" / "quickstart" / "data" / "prompts.jsonl"
CASES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "rejection": {"temperature": 0.8, "acceptance": "rejection"},
    "rejection, top_p": {"temperature": 0.8, "acceptance": "rejection", "top_p": 0.9},
    "coupled": {"temperature": 0.8},
    "coupled, top_p": {"temperature": 0.8, "top_p": 0.9},
}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--engines", type=Path, default=ROOT / "engines" / "quickstart")
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--draft-len", type=int, default=4)
    asked = parser.parse_args()
    if not (asked.engines / "target").is_dir():
        print(f"{asked.engines} has no engines: toolkit build CONFIG --until compile makes them")
        return 2
    torch.set_num_threads(1)
    bursting, stepping = (
        load_runtime(
            asked.engines / "target",
            asked.engines / "draft",
            threads=1,
            max_draft_len=asked.draft_len,
        )
        for _ in range(2)
    )
    stepping._bursts = None
    runtimes = {"bursts": bursting, "steps": stepping}
    texts = read_prompts(PROMPTS)[: asked.prompts]
    prompts = [tuple(bursting.codec.encode(text)) for text in texts]
    print(f"{'tokens per second':18}{'drafts':>7}{'bursts':>9}{'steps':>9}{'ratio':>8}{'same':>9}")
    results: list[dict[str, Any]] = []
    for case, fields in CASES.items():
        for draft_len in (0, asked.draft_len):
            spent, tokens, same = dict.fromkeys(runtimes, 0.0), dict.fromkeys(runtimes, 0), 0
            for index, prompt in enumerate(prompts):
                outputs = {}
                for name in list(runtimes)[:: 1 if index % 2 else -1]:
                    request = make_request(
                        prompt, asked.max_tokens, seed=index, draft_len=draft_len, **fields
                    )
                    outputs[name], seconds = timed(runtimes[name], request)
                    spent[name] += seconds
                    tokens[name] += len(outputs[name])
                same += outputs["bursts"] == outputs["steps"]
            rates = {name: tokens[name] / spent[name] for name in runtimes}
            ratio = rates["bursts"] / rates["steps"]
            print(
                f"{case:18}{draft_len:>7}{rates['bursts']:>9,.0f}{rates['steps']:>9,.0f}"
                f"{ratio:>8.2f}{f'{same}/{len(prompts)}':>9}",
                flush=True,
            )
            figures = {"ratio": round(ratio, 3), "same": same, "prompts": len(prompts)}
            results.append({"case": case, "drafts": draft_len, **figures})
    print(json.dumps({"benchmark": "bursts", **facts(), "results": results}))
    for runtime in runtimes.values():
        runtime.close()
    return 0 if all(row["same"] == row["prompts"] for row in results) else 1


def timed(runtime: SpeculativeRuntime, request: Any) -> tuple[list[int], float]:
    """The output, and the seconds of the whole request: the tokens of a burst come together, so
    there is no time from the first to the last.
    """
    began = time.perf_counter()
    ids = [token for event in runtime.generate(request) for token in event.token_ids]
    return ids, time.perf_counter() - began


if __name__ == "__main__":
    sys.exit(main())
