"""TensorRT-LLM by version: which flows it has, how it spells names, and which containers have it.

Names changed between releases, so everything that is generated takes its spelling from here. An
engine runs only with the exact version that built it: the image that builds and the image that
serves come from one row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from toolkit.facts.source import Source

__all__ = ["BUILD_IMAGE", "SERVING_IMAGE", "VERSIONS", "Version"]

SERVING_IMAGE = "nvcr.io/nvidia/tritonserver:{tag}-trtllm-python-py3"
BUILD_IMAGE = "nvcr.io/nvidia/tensorrt-llm/release:{release}"


@dataclass(frozen=True, slots=True)
class Version:
    """One row.

    release: the exact release inside the containers.
    draft_len_schedule: whether its keys are the least batch size of a draft length (`lower`) or the
    greatest (`upper`); None if the option does not exist.
    triton_names: the names of the BLS layout's tensors for the least number of tokens and the seed.
    """

    name: str
    release: str
    engine_flow: bool
    pytorch_draft_target: bool
    qwen3_engine: bool
    unified_checkpoints: bool  # documented to read the checkpoints of the current ModelOpt
    decoding_type: str
    draft_model_key: str
    acceptance_window: str | None
    acceptance_threshold: str | None
    draft_len_schedule: Literal["lower", "upper"] | None
    options_flag: str  # flag of trtllm-serve for a YAML of LLM() arguments
    triton_names: tuple[str, str]
    serving_tags: tuple[str, ...]  # newest first
    tensorrt: str | None
    cuda: str | None


OLD_NAMES = ("min_length", "random_seed")
NEW_NAMES = ("min_tokens", "seed")
EXTRA, CONFIG = "--extra_llm_api_options", "--config"

VERSIONS = {
    version.name: version
    for version in (
        Version("0.21", "0.21.0", True, False, False, False, "DraftTarget", "speculative_model_dir", None, None, None, EXTRA,
                OLD_NAMES, ("25.08",), None, None),
        Version("1.0", "1.0.0", True, True, True, False, "DraftTarget", "speculative_model_dir", None, None, None, EXTRA,
                NEW_NAMES, ("25.10", "25.09"), "10.11.0.33", "12.9.1"),
        Version("1.1", "1.1.0", True, True, True, False, "DraftTarget", "speculative_model_dir", None, None, None, EXTRA,
                NEW_NAMES, ("26.02", "26.01", "25.12"), "10.13.3.9", "13.0.2"),
        Version("1.2.0", "1.2.0", True, True, True, True, "DraftTarget", "speculative_model", "acceptance_window",
                "acceptance_length_threshold", "lower", CONFIG, NEW_NAMES, ("26.03",), "10.14.1.48", "13.1.0"),
        Version("1.2.1", "1.2.1", True, True, True, True, "DraftTarget", "speculative_model", "acceptance_window",
                "acceptance_length_threshold", "lower", CONFIG, NEW_NAMES, ("26.07", "26.06", "26.05", "26.04"), "10.14.1.48",
                "13.1.0"),
        Version("1.3", "1.3.0", False, True, False, True, "Draft_Target", "speculative_model", "acceptance_rate_window_size",
                "acceptance_rate_threshold", "upper", CONFIG, NEW_NAMES, (), None, None),
    )
}  # fmt: skip

SOURCES = {
    "engine_flow": Source(
        "TRT docs/source/legacy/tensorrt-backend-removal.md, pull requests 15918 and 16369", "A"
    ),
    "pytorch_draft_target": Source(
        "TRT tensorrt_llm/llmapi/llm_args.py, docs/source/features/speculative-decoding.md", "B"
    ),
    "qwen3_engine": Source("TRT docs/source/release-notes.md, 1.0", "A"),
    "unified_checkpoints": Source("MO docs/source/deployment/3_unified_hf.rst", "A"),
    "decoding_type": Source("TRT tensorrt_llm/llmapi/llm_args.py", "B"),
    "draft_model_key": Source("TRT tensorrt_llm/llmapi/llm_args.py", "A"),
    "acceptance_window": Source("TRT tensorrt_llm/llmapi/llm_args.py; renamed in 1.3.0rc29", "A"),
    "acceptance_threshold": Source(
        "TRT tensorrt_llm/llmapi/llm_args.py; renamed in 1.3.0rc29", "B"
    ),
    "draft_len_schedule": Source("TRT tensorrt_llm/llmapi/llm_args.py", "A"),
    "options_flag": Source("TRT tensorrt_llm/commands/serve.py", "B"),
    "triton_names": Source(
        "TB v0.19.0 against TRT triton_backend/all_models 1.x; 0.21 is between them and is taken as"
        " old",
        "C",
    ),
    "serving_tags": Source("TS docs/introduction/compatibility.md", "A"),
}
