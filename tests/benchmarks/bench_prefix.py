"""How soon is the first token of a prompt whose beginning was seen before? A shape of 250M
parameters in INT8 W8A8 with a draft of an eighth of its layers, in process.

Every prompt has a shared beginning and 32 tokens of its own. A runtime with reuse and one without
get the same prompts in turns, one at a time; the first prompt, which nobody can have seen, is left
out. Printed are medians, in brackets the fastest, and how many texts differ: in float64 none may,
and here forwards of other shapes might round differently. Then how long it takes to copy a
beginning from slot to slot. Good: with reuse the first token takes as long as that of a prompt of
32 tokens, however long the beginning is.

    python -m tests.benchmarks.bench_prefix [--threads N] [--rounds N] [--layers N]
"""

from __future__ import annotations

import argparse
import json
import tempfile
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from tests.benchmarks.bench_kernels import SHAPE
from tests.benchmarks.engines import (
    compile_checkpoint,
    facts,
    in_turns,
    write_int8,
    write_random,
)
from tests.support.runtimes import make_request, make_runtime, serve_one
from toolkit.engines.registry import loader
from toolkit.interfaces import CopyingEngine
from toolkit.speculative.runtime import SpeculativeRuntime

SHARED, OWN = (0, 128, 480), 32
DRAFT_LEN, MAX_TOKENS = 3, 16
WAYS = ("without", "with")


def pair(target: Path, draft: Path, threads: int, *, reuse_prefixes: bool) -> SpeculativeRuntime:
    engines = [loader("torch").load(path, threads=threads) for path in (target, draft)]
    return make_runtime(*engines, max_draft_len=DRAFT_LEN, reuse_prefixes=reuse_prefixes)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--layers", type=int, default=SHAPE["num_hidden_layers"])
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    with tempfile.TemporaryDirectory() as folder:
        built = []
        for layers in (asked.layers, max(1, asked.layers // 8)):
            name = f"{len(built)}"
            source = write_random({**SHAPE, "num_hidden_layers": layers}, Path(folder) / name)
            quantized = write_int8(source, Path(folder) / f"{name}-int8", "W8A8_SQ_PER_CHANNEL")
            engine = compile_checkpoint(quantized, Path(folder) / f"{name}-engine", dtype="float32")
            built.append(engine.path)
        runtimes = {
            way: pair(built[0], built[1], asked.threads, reuse_prefixes=way != "without")
            for way in WAYS
        }
    rng = np.random.default_rng(0)

    def tokens(count: int) -> list[int]:
        return rng.integers(5, 200, size=count).tolist()  # ids that every text decoder knows

    print("ms to the first token, median (fastest)")
    print(f"{'':12}" + "".join(f"{f'{n} shared + {OWN}':>24}" for n in SHARED))
    line: dict[str, Any] = {"benchmark": "prefix", **facts(), "ms": {way: {} for way in WAYS}}
    differing = compared = 0
    for shared in SHARED:
        beginning, ms = tokens(shared), {way: list[float]() for way in WAYS}
        for number in range(asked.rounds + 1):
            prompt = [*beginning, *tokens(OWN)]
            texts = {}
            for way in WAYS if number % 2 else WAYS[::-1]:
                outcome = serve_one(runtimes[way], make_request(prompt, MAX_TOKENS))
                stats = outcome.stats
                assert stats.first_token_ns is not None
                ms[way].append((stats.first_token_ns - stats.arrival_ns) / 1e6)
                texts[way] = outcome.ids
            compared += 1
            differing += texts["with"] != texts["without"]
        for way in WAYS:
            line["ms"][way][str(shared)] = [median(ms[way][1:]), min(ms[way][1:])]
    for way in WAYS:
        cells = (f"{middle:.1f} ({best:.1f})" for middle, best in line["ms"][way].values())
        print(f"{way:12}" + "".join(f"{cell:>24}" for cell in cells))
    engine = runtimes["with"]._target
    assert isinstance(engine, CopyingEngine)
    source = max(range(engine.max_batch_size), key=engine.length)
    slot = (source + 1) % engine.max_batch_size
    calls = [partial(engine.copy, source, slot, count) for count in SHARED[1:]]
    copies = in_turns(calls, asked.rounds)
    for count, (middle, best) in zip(SHARED[1:], copies, strict=True):
        print(f"copy of {count} tokens, target: {middle:.2f} ({best:.2f}) ms")
    line["copy_ms"] = dict(zip(map(str, SHARED[1:]), copies, strict=True))
    line["texts"] = {"compared": compared, "different": differing}
    print(f"{differing} of {compared} texts differ from those without reuse")
    print(json.dumps(line))


if __name__ == "__main__":
    main()
