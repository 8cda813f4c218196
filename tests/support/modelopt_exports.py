"""ModelOpt's own exports, which change the model they are given: what the forms that we write
must be equal to.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any


def export_hf(model: Any, dtype: str, out_dir: Path) -> None:
    import torch
    from modelopt.torch.export import export_hf_checkpoint

    export_hf_checkpoint(model, dtype=getattr(torch, dtype), export_dir=out_dir)


def export_trtllm(model: Any, dtype: str, out_dir: Path, tp_size: int, pp_size: int) -> None:
    import torch
    from modelopt.torch.export import export_tensorrt_llm_checkpoint

    export_tensorrt_llm_checkpoint(
        model,
        "qwen" if model.config.model_type.startswith("qwen") else "llama",
        dtype=getattr(torch, dtype),
        export_dir=out_dir,
        inference_tensor_parallel=tp_size,
        inference_pipeline_parallel=pp_size,
    )
