"""Exports a checkpoint for OpenVINO GenAI: FP32, and INT8 weights made from it; and its tokenizer,
if it has one. The Python of `.venv-openvino` runs this file.

    PYTHON tests/benchmarks/peer_export.py SOURCE OUT     writes OUT/FP32 and OUT/INT8
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path


def export(source: Path, out_dir: Path) -> None:
    import nncf
    import openvino
    from optimum.exporters.openvino import main_export
    from optimum.intel import OVConfig

    main_export(
        str(source),
        output=out_dir / "FP32",
        task="text-generation-with-past",
        ov_config=OVConfig(dtype="fp32"),
        convert_tokenizer=(source / "tokenizer.json").exists(),
    )
    shutil.copytree(
        out_dir / "FP32", out_dir / "INT8", ignore=shutil.ignore_patterns("openvino_model.*")
    )
    model = openvino.Core().read_model(out_dir / "FP32" / "openvino_model.xml")
    # INT8_ASYM per channel: what `optimum-cli export openvino --weight-format int8` does
    compressed = nncf.compress_weights(model, mode=nncf.CompressWeightsMode.INT8_ASYM)
    openvino.save_model(compressed, out_dir / "INT8" / "openvino_model.xml", compress_to_fp16=False)


if __name__ == "__main__":
    export(Path(sys.argv[1]), Path(sys.argv[2]))
