"""What a plan is about: a deployment, the shapes of its models, and the GPUs that it is for;
read and judged elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from toolkit.checkpoints.quantized import Quantization
from toolkit.checkpoints.shape import ModelShape
from toolkit.config.schema import (
    DeploymentConfig,
    ModelConfig,
    TensorRtLlmConfig,
    TrtEngineConfig,
    TrtllmPytorchConfig,
)
from toolkit.facts.gpus import Gpu
from toolkit.facts.support import MIN_SM
from toolkit.facts.versions import VERSIONS, Version
from toolkit.words import Role

__all__ = [
    "DEFAULT_MAX_NUM_TOKENS",
    "Subject",
    "family_of",
    "length_limit",
    "max_num_tokens",
    "splits",
    "widest",
]

DEFAULT_MAX_NUM_TOKENS = (
    8192  # of trtllm-build and of LLM(); TRT commands/build.py, llmapi/llm_args.py (B)
)


@dataclass(frozen=True, slots=True)
class Subject:
    """A deployment and what is known around it. shapes: by role; a role whose checkpoint is nowhere
    to be read is absent. quantized: what checkpoints that are quantized already say of themselves,
    by role.

    gpu None: not known. gpu_count: in all nodes together.
    """

    config: DeploymentConfig
    shapes: Mapping[Role, ModelShape]
    gpu: Gpu | None
    gpu_count: int
    quantized: Mapping[Role, Quantization] = field(default_factory=dict)

    @property
    def models(self) -> dict[Role, ModelConfig]:
        return self.config.models

    @property
    def drafts(self) -> bool:
        """Whether a second model drafts."""
        return self.config.draft is not None

    @property
    def speculates(self) -> bool:
        """With a second model, or by looking the text up."""
        return self.config.speculation.is_enabled

    @property
    def draft_len(self) -> int:
        return self.config.speculation.longest_draft

    @property
    def trtllm(self) -> TensorRtLlmConfig | None:
        return self.config.trtllm_engine

    @property
    def engine_flow(self) -> TrtEngineConfig | None:
        return self.config.engine_flow

    @property
    def pytorch_flow(self) -> TrtllmPytorchConfig | None:
        return self.config.pytorch_flow

    @property
    def version(self) -> Version | None:
        return None if self.trtllm is None else VERSIONS[self.trtllm.tensorrt_llm]

    @property
    def column(self) -> int | None:
        """The column of the support tables that the GPU belongs to."""
        return None if self.gpu is None else max(sm for sm in MIN_SM if sm <= self.gpu.sm)


def family_of(shape: ModelShape) -> str:
    """The name that support lists use. Llama 3 is told from Llama 2 by its tokenizer's size."""
    if shape.architecture == "LlamaForCausalLM":
        return "Llama 3" if shape.vocab_size >= 128000 else "Llama 2"
    return {
        "MistralForCausalLM": "Mistral",
        "Qwen2ForCausalLM": "Qwen 2 / 2.5",
        "Qwen3ForCausalLM": "Qwen 3",
    }[shape.architecture]


def length_limit(shape: ModelShape) -> int:
    """Positions that the model was made for; RoPE variants that stretch them by a factor say so
    in their own keys.
    """
    scaling = shape.rope_scaling or {}
    if scaling.get("rope_type") in ("linear", "dynamic"):
        return int(shape.max_position_embeddings * float(scaling.get("factor", 1.0)))
    if scaling.get("rope_type") == "yarn":
        original = int(
            scaling.get("original_max_position_embeddings", shape.max_position_embeddings)
        )
        return max(shape.max_position_embeddings, int(original * float(scaling.get("factor", 1.0))))
    return shape.max_position_embeddings


def splits(shape: ModelShape, tp_size: int) -> bool:
    heads, kv_heads = shape.num_heads, shape.num_kv_heads
    return heads % tp_size == 0 and (kv_heads % tp_size == 0 or tp_size % kv_heads == 0)


def widest(subject: Subject, at_most: int) -> int:
    """The largest tp_size up to `at_most` that every model here can be split over."""

    def fits(tp_size: int) -> bool:
        return all(
            splits(one, tp_size) and one.intermediate_size % tp_size == 0
            for one in subject.shapes.values()
        )

    return max(size for size in range(1, max(1, at_most) + 1) if size == 1 or fits(size))


def max_num_tokens(engine: TensorRtLlmConfig) -> int:
    return DEFAULT_MAX_NUM_TOKENS if engine.max_num_tokens is None else engine.max_num_tokens
