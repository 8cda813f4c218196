"""What checkpoints that ModelOpt quantized are compared with, and which of them there are."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

TOKENS = torch.randint(0, 250, (2, 40), generator=torch.Generator().manual_seed(5))
EXPORTS = {
    "llama_fp8_kv_fp8": ("llama", "FP8", "FP8"),
    "qwen2_fp8": ("qwen2", "FP8", None),
    "llama_w8a8": ("llama", "W8A8_SQ_PER_CHANNEL", None),
    "qwen2_w8a8_kv_fp8": ("qwen2", "W8A8_SQ_PER_CHANNEL", "FP8"),
    "qwen3_w8a16_kv_fp8": ("qwen3", "W8A16", "FP8"),
}


@dataclass(frozen=True, slots=True)
class Export:
    """A unified HF checkpoint, and logits [2, 40, vocab] on TOKENS: of the source, and of
    ModelOpt's fake-quantized model.
    """

    path: Path
    quant_algo: str
    kv_cache_quant_algo: str | None
    source: torch.Tensor
    simulated: torch.Tensor
