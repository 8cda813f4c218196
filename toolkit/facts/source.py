"""Where a fact comes from, and how sure it is.

Confidence:
- M: measured by running it
- A: read in the published text of the named version
- B: the same in the published revisions just before and after that version
- C: seen in one neighbouring revision only
- I: inferred

Short names in sources: TRT is github.com/NVIDIA/TensorRT-LLM, TB
triton-inference-server/tensorrtllm_backend, TS triton-inference-server/server, MO
NVIDIA/Model-Optimizer, VL vllm-project/vllm (folders without `vllm/` are below
vllm/model_executor or vllm).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["Confidence", "Source"]

Confidence = Literal["M", "A", "B", "C", "I"]


@dataclass(frozen=True, slots=True)
class Source:
    where: str
    confidence: Confidence

    def __str__(self) -> str:
        return f"{self.where} ({self.confidence})"
