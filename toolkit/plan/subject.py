"""The subject of a plan: a deployment, the shapes of its models, and the GPUs that will serve it.

`toolkit.plan.make` collects it; the rules judge it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from toolkit.checkpoints.heads import HeadShape
from toolkit.checkpoints.quantized import Quantization
from toolkit.checkpoints.shape import ModelShape
from toolkit.config.schema import (
    DeploymentConfig,
    ModelConfig,
    TensorRtLlmConfig,
    TrtEngineConfig,
    TrtllmPytorchConfig,
    VllmConfig,
)
from toolkit.facts.gpus import Gpu
from toolkit.facts.support import MIN_SM
from toolkit.facts.versions import VERSIONS, Version
from toolkit.facts.vllm import VLLM_VERSIONS, VllmVersion
from toolkit.words import Role

__all__ = [
    "DEFAULT_MAX_NUM_TOKENS",
    "Subject",
    "can_split",
    "family_of",
    "largest_tp_size",
    "length_limit",
    "max_num_tokens",
]

# The default of trtllm-build and of LLM(); TRT commands/build.py, llmapi/llm_args.py (B).
DEFAULT_MAX_NUM_TOKENS = 8192


@dataclass(frozen=True, slots=True)
class Subject:
    """A deployment and what is known about its models and GPUs.

    shapes: the model shapes by role; a role whose checkpoint cannot be read is absent. quantized:
    how checkpoints that are already quantized describe their format, by role. gpu: None if it is
    not known. gpu_count: GPUs in all nodes together. cpu_flags: the instruction sets of this
    machine, as /proc/cpuinfo names them. cores: those that this process may use. head: what
    drafts, if it is a head whose config.json can be read; shapes has it as a model of its cost.
    """

    config: DeploymentConfig
    shapes: Mapping[Role, ModelShape]
    gpu: Gpu | None
    gpu_count: int
    quantized: Mapping[Role, Quantization] = field(default_factory=dict)
    cpu_flags: frozenset[str] = frozenset()
    cores: int = 1
    head: HeadShape | None = None

    @property
    def models(self) -> dict[Role, ModelConfig]:
        return self.config.models

    @property
    def has_draft_model(self) -> bool:
        """Whether a draft model drafts."""
        return self.config.draft is not None

    @property
    def speculates(self) -> bool:
        """Whether there is speculation at all, by a draft model or by n-gram lookup."""
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
    def vllm(self) -> VllmConfig | None:
        return self.config.vllm_engine

    @property
    def vllm_version(self) -> VllmVersion | None:
        return None if self.vllm is None else VLLM_VERSIONS[self.vllm.vllm]

    @property
    def parallel(self) -> TensorRtLlmConfig | VllmConfig | None:
        """The engine section if its models can be split over ranks, else None."""
        return self.trtllm or self.vllm

    @property
    def serving_gpu(self) -> Gpu | None:
        """The GPU that serves; None for a CPU, or if it is not known."""
        return None if self.config.engine.device == "cpu" else self.gpu

    @property
    def version(self) -> Version | None:
        return None if self.trtllm is None else VERSIONS[self.trtllm.tensorrt_llm]

    @property
    def column(self) -> int | None:
        """The compute capability whose column of the support tables holds for the GPU."""
        return None if self.gpu is None else max(sm for sm in MIN_SM if sm <= self.gpu.sm)


def family_of(shape: ModelShape) -> str:
    """The family's name in the support lists. Llama 2 and 3 differ in vocabulary size."""
    if shape.architecture == "LlamaForCausalLM":
        return "Llama 3" if shape.vocab_size >= 128000 else "Llama 2"
    return {
        "MistralForCausalLM": "Mistral",
        "Qwen2ForCausalLM": "Qwen 2 / 2.5",
        "Qwen3ForCausalLM": "Qwen 3",
    }[shape.architecture]


def length_limit(shape: ModelShape) -> int:
    """The number of positions the model was made for.

    RoPE variants that extend the positions by a factor state it in `rope_scaling`.
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


def can_split(shape: ModelShape, tp_size: int) -> bool:
    """Whether the model's attention heads can be split over tp_size ranks."""
    heads, kv_heads = shape.num_heads, shape.num_kv_heads
    return heads % tp_size == 0 and (kv_heads % tp_size == 0 or tp_size % kv_heads == 0)


def largest_tp_size(subject: Subject, at_most: int) -> int:
    """The largest tp_size up to `at_most` over which every model can be split."""

    def fits(tp_size: int) -> bool:
        return all(
            can_split(shape, tp_size) and shape.intermediate_size % tp_size == 0
            for shape in subject.shapes.values()
        )

    return max(size for size in range(1, max(1, at_most) + 1) if size == 1 or fits(size))


def max_num_tokens(engine: TensorRtLlmConfig) -> int:
    return DEFAULT_MAX_NUM_TOKENS if engine.max_num_tokens is None else engine.max_num_tokens
