"""What does a processor without AMX lose, and one without AVX-512? Steps of 1, 5 and 16 tokens over
kernels compiled for this processor and for lesser ones, and in plain torch.

Layers of the 250M shape of bench_kernels, every precision, batch 1, behind 32 tokens: 16 are as
many as four requests with three drafts each have. The model runs over the kernels step by step,
without AOTInductor, so that all ways differ in nothing else. torch itself uses what the processor
has, which flatters the eager engine beside AVX2. Printed are medians, in brackets the fastest.
Good: 5 tokens cost less than 2 x 1 token in every precision, and the kernels are faster than eager.

    python -m tests.benchmarks.bench_instructions [--threads N] [--rounds N] [--layers N]
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import torch

from tests.benchmarks.bench_kernels import SHAPE
from tests.benchmarks.bench_prefill import KINDS, write_quantized
from tests.benchmarks.engines import facts, in_turns, step, write_random
from toolkit.checkpoints import quantized
from toolkit.engines.embedded.engine import EmbeddedEngine, eager_engine, eager_runner
from toolkit.engines.embedded.kernels import NATIVE, KernelOps, build_library, load_library
from toolkit.engines.embedded.package import prepare
from toolkit.engines.embedded.weights import fuse
from toolkit.facts.embedded import PREFILL_TOKENS, slot_tokens
from toolkit.pipeline.toolchain import instruction_set
from toolkit.words import ComputeDtype

WITHOUT_AMX = ("native -mno-amx-int8",) if "amx_int8" in instruction_set() else ()
PROCESSORS = (NATIVE, *WITHOUT_AMX, "x86-64-v3")
TOKENS, SLOTS, LENGTH, CONTEXT = (1, 5, 16), 2, 128, 32


def over_kernels(checkpoint: Path, dtype: ComputeDtype, ops: KernelOps) -> EmbeddedEngine:
    source = quantized.open_checkpoint(checkpoint)
    weights, caches = prepare(
        source.shape, fuse(source), dtype, SLOTS, LENGTH, PREFILL_TOKENS, kv_dtype=dtype
    )
    return EmbeddedEngine(
        eager_runner(weights, ops, caches, getattr(torch, dtype)),
        vocab_size=source.shape.vocab_size,
        max_batch_size=SLOTS,
        max_seq_len=LENGTH,
        max_step_tokens=PREFILL_TOKENS,
        capacity=slot_tokens(LENGTH),
    )


def eager(checkpoint: Path, dtype: ComputeDtype) -> EmbeddedEngine:
    source = quantized.open_checkpoint(checkpoint)
    return eager_engine(
        source.shape,
        fuse(source),
        kv_dtype=dtype,
        dtype=dtype,
        max_batch_size=SLOTS,
        max_seq_len=LENGTH,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--layers", type=int, default=4)
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    line: dict[str, Any] = {"benchmark": "instructions", **facts(), "ms": {}}
    print("ms per step, median (fastest)")
    print(f"{'':32}" + "".join(f"{f'{n} tokens':>20}" for n in TOKENS) + f"{'5 / 1':>8}")
    with tempfile.TemporaryDirectory() as folder:
        libraries = {march: Path(folder) / f"kernels{i}.so" for i, march in enumerate(PROCESSORS)}
        ops = {
            march: load_library(file, build_library(file, march))
            for march, file in libraries.items()
        }
        source = write_random({**SHAPE, "num_hidden_layers": asked.layers}, Path(folder) / "bf16")
        for kind, algo, dtype in KINDS:
            checkpoint = write_quantized(source, Path(folder) / kind, algo)
            engines = {march: over_kernels(checkpoint, dtype, ops[march]) for march in PROCESSORS}
            engines["eager"] = eager(checkpoint, dtype)
            calls = [step(engine, n, CONTEXT) for engine in engines.values() for n in TOKENS]
            times = in_turns(calls, asked.rounds)
            for i, name in enumerate(engines):
                row = times[len(TOKENS) * i : len(TOKENS) * (i + 1)]
                cells = "".join(f"{f'{middle:.2f} ({best:.2f})':>20}" for middle, best in row)
                print(f"{f'{kind} {name}':32}{cells}{row[1][0] / row[0][0]:>8.2f}", flush=True)
                line["ms"][f"{kind} {name}"] = [[round(ms, 3) for ms in pair] for pair in row]
    print(json.dumps(line))


if __name__ == "__main__":
    main()
