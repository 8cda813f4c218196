"""Where the things of a repository for vLLM are: in its folder, and in the container."""

from __future__ import annotations

from toolkit.triton.package.layout_trtllm import REPOSITORY
from toolkit.triton.tensors.contract import VLLM_MODEL

__all__ = ["ENGINES", "MODEL_JSON", "REPOSITORY", "SPECULATION"]

ENGINES = f"{REPOSITORY}/{VLLM_MODEL}/1/engines"
MODEL_JSON = f"{VLLM_MODEL}/1/model.json"
SPECULATION = "speculative_config"  # the field of AsyncEngineArgs
