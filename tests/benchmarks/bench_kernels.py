"""How much of the memory bandwidth does a step use? A shape of 250M parameters in INT8 and BF16,
eager and compiled.

A decode step reads every weight once, so bytes of weights per second, over what an int64 sum of as
many bytes reaches in the same process, is the share of the possible. Bytes are those of the weights
without the embedding, which is not read whole. Printed are medians, and in brackets the share from
the fastest of each, which a busy machine disturbs least. Good: INT8 compiled >= 70 % at 1 token.

    python -m tests.benchmarks.bench_kernels [--threads N] [--rounds N] [--layers N]
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch

from tests.benchmarks.engines import (
    compile_checkpoint,
    facts,
    in_turns,
    step,
    write_int8,
    write_random,
)
from toolkit.engines.registry import loader

TOKENS = (1, 3, 5, 9)
SHAPE = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 8192,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 15,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
}
KINDS = (
    ("int8 w8a8", "W8A8_SQ_PER_CHANNEL", "float32"),
    ("int8 w8a16", "W8A16", "float32"),
    ("bf16", None, "bfloat16"),
)


def weight_bytes(file: Path) -> int:
    """Bytes of the tensors that a step reads whole."""
    from safetensors import safe_open

    with safe_open(file, framework="pt") as weights:
        names = [name for name in weights.keys() if name != "embed.weight"]  # noqa: SIM118  (not a mapping)
        return sum(weights.get_tensor(name).nbytes for name in names)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--layers", type=int, default=SHAPE["num_hidden_layers"])
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    line: dict[str, Any] = {"benchmark": "kernels", **facts(), "results": {}}
    print(
        "ms per step, GB of weights per second, share of an int64 sum over as many bytes: medians,"
        " batch 1, 32 tokens before"
    )
    print(f"{'':22}{'sum GB/s':>10}" + "".join(f"{f'{n} tokens':>26}" for n in TOKENS))
    with tempfile.TemporaryDirectory() as folder:
        source = write_random({**SHAPE, "num_hidden_layers": asked.layers}, Path(folder) / "bf16")
        for kind, algo, dtype in KINDS:
            checkpoint = source if algo is None else write_int8(source, Path(folder) / kind, algo)
            for mode in ("compiled", "eager"):
                built = compile_checkpoint(
                    checkpoint,
                    Path(folder) / "engine",
                    mode=mode,
                    dtype=dtype,
                    max_seq_len=128,
                    max_input_len=64,
                )
                size = weight_bytes(built.path / "weights.safetensors")
                engine = loader("torch").load(built.path, threads=asked.threads)
                shutil.rmtree(built.path)
                words = torch.ones(size // 8, dtype=torch.int64)
                rounds = asked.rounds if mode == "compiled" else max(3, asked.rounds // 5)
                (sum_ms, fastest_sum), *found = in_turns(
                    [words.sum, *(step(engine, n, 32) for n in TOKENS)], rounds
                )
                rates = [size / middle / 1e6 for middle, _ in found]
                limit = size / sum_ms / 1e6
                best = [fastest_sum / fastest for _, fastest in found]
                columns = zip(found, rates, best, strict=True)
                cells = "".join(
                    f"{f'{ms:.1f} ms {rate:.1f} {rate / limit:.0%} ({top:.0%})':>26}"
                    for (ms, _), rate, top in columns
                )
                print(f"{f'{kind} {mode}':22}{limit:10.1f}{cells}", flush=True)
                line["results"][f"{kind} {mode}"] = {
                    "weight_bytes": size,
                    "sum_gb_per_s": round(limit, 2),
                    "ms": {str(n): round(ms, 3) for n, (ms, _) in zip(TOKENS, found, strict=True)},
                    "share": {
                        str(n): round(rate / limit, 3)
                        for n, rate in zip(TOKENS, rates, strict=True)
                    },
                    "share_of_fastest": {
                        str(n): round(share, 3) for n, share in zip(TOKENS, best, strict=True)
                    },
                }
                del engine, words
            if algo is not None:
                shutil.rmtree(checkpoint)
    print(json.dumps(line))


if __name__ == "__main__":
    main()
