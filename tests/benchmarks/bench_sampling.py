"""What does sampling cost per row of logits, for the vocabularies of current models?

`weights` with T = 0.8, alone and with top_p, top_k and both, and the draw after it, on logits that
are peaked as a model's are and on flat ones, whose nucleus holds most of the vocabulary. One
thread, float32. Good: below 1 ms a row with 128k tokens, peaked.

    python -m tests.benchmarks.bench_sampling [--rounds N]
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from typing import Any

import numpy as np

from tests.benchmarks.engines import facts, in_turns
from toolkit.interfaces import Sampling
from toolkit.speculative.sampling import Floats, draw, weights

VOCABS = (32_000, 128_256, 256_000)
SETTINGS = {
    "T": Sampling(temperature=0.8),
    "T, top_p 0.9": Sampling(temperature=0.8, top_p=0.9),
    "T, top_k 50": Sampling(temperature=0.8, top_k=50),
    "all": Sampling(temperature=0.8, top_k=50, top_p=0.9),
}
SCALES = {"peaked": 6.0, "flat": 0.3}  # standard deviations of the logits


def sample(logits: Floats, sampling: Sampling) -> Callable[[], object]:
    return lambda: draw(weights(logits, sampling)[0], 0.5)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=30)
    asked = parser.parse_args()
    print("ms per row, median (fastest)")
    print(f"{'':16}" + "".join(f"{name:>18}" for name in SETTINGS))
    line: dict[str, Any] = {"benchmark": "sampling", **facts(), "numpy": np.__version__, "ms": {}}
    for vocab in VOCABS:
        for kind, scale in SCALES.items():
            normal = np.random.default_rng(0).standard_normal((1, vocab)) * scale
            logits = normal.astype(np.float32)
            times = in_turns([sample(logits, each) for each in SETTINGS.values()], asked.rounds)
            cells = "".join(f"{f'{middle:.3f} ({best:.3f})':>18}" for middle, best in times)
            print(f"{f'{vocab} {kind}':16}{cells}", flush=True)
            line["ms"][f"{vocab} {kind}"] = {
                name: [round(ms, 4) for ms in pair]
                for name, pair in zip(SETTINGS, times, strict=True)
            }
    print(json.dumps(line))


if __name__ == "__main__":
    main()
