"""Reads prompts with OpenVINO, for bench_prefill. The Python of `.venv-openvino` runs this file.

    PYTHON tests/benchmarks/openvino_prefill.py CHECKPOINT THREADS

Exports the checkpoint, and loads it with INT8 weights, as OpenVINO runs them by default, with
activations in float32. A line is printed when it is ready. Each line of standard input is a number
of tokens: a prompt of so many is read, and a line is printed.
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
from pathlib import Path


def main() -> None:
    import numpy as np
    import openvino
    from peer_export import export

    source, threads = Path(sys.argv[1]), int(sys.argv[2])
    with tempfile.TemporaryDirectory() as folder:
        with contextlib.redirect_stdout(sys.stderr):
            export(source, Path(folder))
        model = openvino.Core().compile_model(
            Path(folder) / "INT8" / "openvino_model.xml",
            "CPU",
            {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": threads},
        )
    request = model.create_infer_request()
    print("ready", flush=True)
    for line in sys.stdin:
        ids = np.arange(int(line), dtype=np.int64)[None]
        request.reset_state()
        request.infer(
            {
                "input_ids": ids,
                "attention_mask": np.ones_like(ids),
                "position_ids": ids,
                "beam_idx": np.zeros(1, dtype=np.int32),
            }
        )
        print("done", flush=True)


if __name__ == "__main__":
    main()
