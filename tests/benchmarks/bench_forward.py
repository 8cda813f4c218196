"""What does verifying several tokens cost, against decoding one? Forward of n tokens over forward
of 1, on the quickstart pair.

Compiled engines in FP32 and INT8 W8A8 (rounded here, not calibrated: other values, the same cost),
batch 1, behind 128 tokens. Good: 5 tokens <= 1.5 x 1 token in both precisions; target well below 2
ms at 1 token; draft below 0.15 ms a layer.

    python -m tests.benchmarks.bench_forward [--threads N] [--rounds N]
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import torch

from tests.benchmarks.engines import compile_checkpoint, facts, in_turns, step, write_int8
from toolkit.engines.registry import loader

PAIR = Path(__file__).parents[2] / "configs" / "quickstart"
TOKENS = (1, 2, 3, 5, 9)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--context", type=int, default=128)
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    print(f"forward of n tokens, batch 1, behind {asked.context} tokens: ms, median (fastest)")
    print(f"{'':16}" + "".join(f"{n:>17}" for n in TOKENS) + f"{'5 / 1':>16}")
    line: dict[str, Any] = {
        "benchmark": "forward",
        "context": asked.context,
        **facts(),
        "ms": {},
        "five_over_one": {},
    }
    with tempfile.TemporaryDirectory() as folder:
        for role in ("target", "draft"):
            int8 = write_int8(PAIR / role, Path(folder) / f"{role}-int8", "W8A8_SQ_PER_CHANNEL")
            for precision, checkpoint in (("fp32", PAIR / role), ("int8", int8)):
                built = compile_checkpoint(checkpoint, Path(folder) / f"{role}-{precision}-engine")
                engine = loader("torch").load(built.path, threads=asked.threads)
                found = in_turns([step(engine, n, asked.context) for n in TOKENS], asked.rounds)
                name, five = f"{role} {precision}", TOKENS.index(5)
                ratios = [found[five][k] / found[0][k] for k in (0, 1)]
                cells = "".join(f"{f'{middle:.3f} ({best:.3f})':>17}" for middle, best in found)
                print(f"{name:16}{cells}{f'{ratios[0]:.2f} ({ratios[1]:.2f})':>16}", flush=True)
                line["ms"][name] = {
                    str(n): [round(x, 4) for x in pair]
                    for n, pair in zip(TOKENS, found, strict=True)
                }
                line["five_over_one"][name] = [round(ratio, 3) for ratio in ratios]
    print(json.dumps(line))


if __name__ == "__main__":
    main()
