"""Is the attention of one long sequence among short ones shared by the threads, and what does it
cost to verify?

One layer's attention with the heads of the 250M shape. One token for each of 16 sequences: all of
64 tokens, and one of them of 32k. The cost beside short ones is that of the long sequence alone.
Good: with T threads, the long sequence takes 1 / T of its time on one thread. And 1 and 5 tokens of
a sequence behind 128 and 4,096, with caches in float32 and bfloat16.

    python -m tests.benchmarks.bench_attention [--threads N] [--rounds N]
"""

from __future__ import annotations

import argparse
import itertools
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.benchmarks.bench_kernels import SHAPE
from tests.benchmarks.engines import facts, in_turns
from toolkit.engines.embedded.kernels import (
    KernelOps,
    build_library,
    layer_cache,
    load_library,
)
from toolkit.engines.embedded.model import Attention, Step

SEQUENCES, SHORT, LONG = 16, 64, 32_768
HEADS, KV_HEADS = SHAPE["num_attention_heads"], SHAPE["num_key_value_heads"]
DIM, CAPACITY = SHAPE["head_dim"], LONG + 64
VERIFIED, BEHIND = (1, 5), (128, 4096)
HOW = Attention(HEADS, KV_HEADS, DIM, 1e-5, None, None, None, None, None)


def attention(
    ops: KernelOps, cache: tuple[torch.Tensor, torch.Tensor], lengths: list[int], tokens: int = 1
) -> Callable[[], object]:
    """So many tokens for each sequence, in slot 0 if it is long and in the others if it is
    short.
    """
    qkv = torch.randn(1, tokens * len(lengths), (HEADS + 2 * KV_HEADS) * DIM)
    angles = torch.rand(CAPACITY, DIM // 2)
    slots = torch.arange(len(lengths)) + (0 if max(lengths) == LONG else 1)
    starts = torch.arange(len(lengths)) * tokens
    step = Step(slots, torch.tensor(lengths), starts, angles.cos(), angles.sin())
    return lambda: ops.attention(qkv, cache, step, HOW)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=50)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "kernels.so"
        ops = load_library(library, build_library(library))
    cache = layer_cache(HOW, SEQUENCES + 1, CAPACITY, torch.float32)
    batches = {
        "16 short": [SHORT] * SEQUENCES,
        "1 long": [LONG],
        "1 long, 15 short": [LONG, *[SHORT] * (SEQUENCES - 1)],
    }
    line: dict[str, Any] = {"benchmark": "attention", **facts(), "ms": {}}
    print("ms per step of one layer, median (fastest)")
    for threads in sorted({1, asked.threads}):
        torch.set_num_threads(threads)
        calls = [attention(ops, cache, lengths) for lengths in batches.values()]
        for name, (middle, best) in zip(batches, in_turns(calls, asked.rounds), strict=True):
            print(f"{threads} threads, {name:18}{middle:10.3f} ({best:.3f})", flush=True)
            line["ms"][f"{threads} threads, {name}"] = [round(middle, 4), round(best, 4)]
    torch.set_num_threads(1)
    for behind, dtype in itertools.product(BEHIND, (torch.float32, torch.bfloat16)):
        cache = layer_cache(HOW, 2, CAPACITY, dtype)
        calls = [attention(ops, cache, [behind], tokens) for tokens in VERIFIED]
        found = in_turns(calls, asked.rounds)
        for tokens, (middle, best) in zip(VERIFIED, found, strict=True):
            name = f"{tokens} tokens behind {behind}, {str(dtype).removeprefix('torch.')}"
            print(f"1 thread, {name:34}{middle:10.4f} ({best:.4f})", flush=True)
            line["ms"][f"1 thread, {name}"] = [round(middle, 4), round(best, 4)]
    print(json.dumps(line))


if __name__ == "__main__":
    main()
