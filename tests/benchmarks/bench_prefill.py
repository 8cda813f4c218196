"""How long does a prompt take before its first token? A shape of 250M parameters in every precision
of the embedded engine.

A prompt is read in steps of the engine's max_step_tokens, and only its last token needs logits. The
floor is arithmetic: two operations for each weight of a linear and each token. Printed are medians,
in brackets the fastest, and the ratio to INT8 W8A8 of as many tokens. With --openvino the same
prompts are read by OpenVINO with INT8 weights, in turns with ours. Good: no precision of ours takes
longer.

    python -m tests.benchmarks.bench_prefill [--threads N] [--rounds N] [--layers N] [--openvino]

--openvino needs the environment of `make openvino`.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tests.benchmarks.bench_kernels import SHAPE
from tests.benchmarks.bench_peers import openvino_python
from tests.benchmarks.engines import (
    compile_checkpoint,
    facts,
    in_turns,
    write_fp8,
    write_int8,
    write_random,
)
from toolkit.engines.registry import loader
from toolkit.interfaces import StepEngine

TOKENS = (32, 128, 512)
KINDS = (
    ("int8 w8a8", "W8A8_SQ_PER_CHANNEL", "float32"),
    ("int8 w8a16", "W8A16", "float32"),
    ("bf16", None, "bfloat16"),
    ("fp8", "FP8", "float32"),
)


def prefill(engine: StepEngine, count: int) -> Callable[[], None]:
    """Read a prompt of that many tokens into slot 0, and forget it."""
    ids = torch.arange(count)[None] % engine.vocab_size

    def run() -> None:
        for chunk in ids.split(engine.max_step_tokens, dim=1):
            engine.forward([0], chunk, last_only=True)
        engine.rewind([0], [0])

    return run


@contextmanager
def openvino(checkpoint: Path, threads: int) -> Iterator[Callable[[int], None]]:
    """Reads a prompt of so many tokens in a process of OpenVINO's environment."""
    command = [openvino_python(), Path(__file__).with_name("openvino_prefill.py"), checkpoint]
    with (
        tempfile.TemporaryFile("w+") as log,
        subprocess.Popen(
            [*map(str, command), str(threads)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        ) as process,
    ):
        sent, told = process.stdin, process.stdout
        assert sent is not None and told is not None

        def wait_for(word: str) -> None:
            if told.readline().strip() != word:
                log.seek(0)
                raise SystemExit(f"OpenVINO's process ended:\n{log.read()[-2000:]}")

        def read(count: int) -> None:
            print(count, file=sent, flush=True)
            wait_for("done")

        wait_for("ready")
        yield read
        sent.close()


def write_quantized(source: Path, out_dir: Path, algo: str | None) -> Path:
    if algo is None:
        return source
    return write_fp8(source, out_dir) if algo == "FP8" else write_int8(source, out_dir, algo)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--layers", type=int, default=SHAPE["num_hidden_layers"])
    parser.add_argument("--openvino", action="store_true")
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    kinds = [kind for kind, _, _ in KINDS]
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        source = write_random({**SHAPE, "num_hidden_layers": asked.layers}, Path(folder) / "bf16")
        engines = []
        for kind, algo, dtype in KINDS:
            checkpoint = write_quantized(source, Path(folder) / kind, algo)
            built = compile_checkpoint(checkpoint, Path(folder) / "engine", dtype=dtype)
            engines.append(loader("torch").load(built.path, threads=asked.threads))
            shutil.rmtree(built.path)
        calls = [prefill(engine, count) for engine in engines for count in TOKENS]
        if asked.openvino:
            kinds.append("openvino int8")
            read = stack.enter_context(openvino(source, asked.threads))
            calls += [partial(read, count) for count in TOKENS]
        times = in_turns(calls, asked.rounds)
    print("ms per prompt, median (fastest), over INT8 W8A8; batch 1")
    print(f"{'':14}" + "".join(f"{f'{n} tokens':>28}" for n in TOKENS))
    line: dict[str, Any] = {"benchmark": "prefill", **facts(), "ms": {}}
    reference = times[: len(TOKENS)]
    for i, kind in enumerate(kinds):
        found = times[i * len(TOKENS) : (i + 1) * len(TOKENS)]
        cells = "".join(
            f"{f'{middle:.1f} ({best:.1f}) {middle / base:.2f}x':>28}"
            for (middle, best), (base, _) in zip(found, reference, strict=True)
        )
        print(f"{kind:14}{cells}", flush=True)
        line["ms"][kind] = {
            str(n): [round(ms, 2) for ms in pair] for n, pair in zip(TOKENS, found, strict=True)
        }
    print(json.dumps(line))


if __name__ == "__main__":
    main()
