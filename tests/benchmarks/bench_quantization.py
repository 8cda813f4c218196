"""How much memory does quantizing take, against the size of the checkpoint?

A random Llama of 2 GB in BF16 is quantized in a process of its own, into the unified form and
TRT-LLM's for two ranks. Counted is anonymous memory (RssAnon, every 10 ms) above what is there once
the libraries are imported. Pages of mapped files (the source, and the weights that SmoothQuant
rewrites) are the kernel's to write back and to drop. Good: peak / size of the source <= 0.75. One
copy of the model in memory is 1.0.

    python -m tests.benchmarks.bench_quantization [--quant-algo W8A8_SQ_PER_CHANNEL] [--layers 18]
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import tempfile
import threading
import time
from importlib.metadata import version
from pathlib import Path

from tests.support.checkpoints import write_checkpoint

SHAPE = {
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
}


def anonymous_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    return next(
        int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("RssAnon")
    )


def measure(source: Path, quant_algo: str, out: Path) -> dict[str, float]:
    """Quantize in this process. Bytes at the peak of each phase, above the imports."""
    import modelopt.torch.export
    import modelopt.torch.quantization  # noqa: F401
    import transformers

    from toolkit.config.schema import CalibrationConfig, QuantizationConfig
    from toolkit.quantize.stage import Ranks, quantize

    _ = (transformers.AutoModelForCausalLM, transformers.LlamaForCausalLM)
    text = out / "calib.jsonl"
    text.write_text(
        "".join(json.dumps({"text": f"line {i}: " + "some text " * 20}) + "\n" for i in range(20))
    )
    phase, peaks, stop = (
        ["checking weights, tensors"],
        {"checking weights, tensors": 0},
        threading.Event(),
    )
    baseline = anonymous_bytes()

    def sample() -> None:
        while not stop.wait(0.01):
            peaks[phase[0]] = max(peaks.get(phase[0], 0), anonymous_bytes() - baseline)

    def progress(done: int, total: int | None, what: str) -> None:
        phase[0] = what

    sampler = threading.Thread(target=sample)
    sampler.start()
    began = time.monotonic()
    try:
        calibration = CalibrationConfig(dataset=text, calib_size=8, calib_max_seq_length=128)
        asked = QuantizationConfig(quant_algo=quant_algo)
        quantize(
            "target", source, asked, calibration, out / "out", progress, trtllm=Ranks(tp_size=2)
        )
    finally:
        stop.set()
        sampler.join()
    return {"seconds": time.monotonic() - began, **peaks}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quant-algo", default="W8A8_SQ_PER_CHANNEL")
    parser.add_argument("--layers", type=int, default=18)
    parser.add_argument(
        "--measure", nargs=2, type=Path, help=argparse.SUPPRESS
    )  # source, out: the process that is measured
    arguments = parser.parse_args()
    if arguments.measure:
        print(json.dumps(measure(arguments.measure[0], arguments.quant_algo, arguments.measure[1])))
        return
    with tempfile.TemporaryDirectory() as folder:
        source = write_checkpoint(
            Path(folder) / "source", vocab_size=32000, num_hidden_layers=arguments.layers, **SHAPE
        )
        size = (source / "model.safetensors").stat().st_size
        command = [
            sys.executable,
            "-m",
            "tests.benchmarks.bench_quantization",
            "--quant-algo",
            arguments.quant_algo,
        ]
        answer = subprocess.run(
            [*command, "--measure", source, folder], capture_output=True, text=True, check=True
        )
    found = json.loads(answer.stdout)
    seconds = found.pop("seconds")
    print(f"{arguments.quant_algo}, source {size / 1e6:.0f} MB, {seconds:.0f} s")
    for phase, peak in found.items():
        print(f"  {phase:20} {peak / 1e6:8.0f} MB  {peak / size:5.2f} x source")
    peak = max(found.values())
    print(f"  {'peak':20} {peak / 1e6:8.0f} MB  {peak / size:5.2f} x source, bar 0.75")
    versions = {name: version(name) for name in ("torch", "transformers", "nvidia-modelopt")}
    line = {
        "benchmark": "quantization",
        "quant_algo": arguments.quant_algo,
        "source_bytes": size,
        "peak_ratio": peak / size,
    }
    print(
        json.dumps(
            {
                **line,
                "phases": found,
                "seconds": seconds,
                "versions": versions,
                "device": platform.machine(),
            }
        )
    )


if __name__ == "__main__":
    main()
