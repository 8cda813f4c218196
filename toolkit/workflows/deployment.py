"""Facts about a deployment that more than one stage needs, derived from its YAML."""

from __future__ import annotations

from typing import Any

from toolkit.checkpoints.shape import read_shape
from toolkit.config.schema import DeploymentConfig, SpeculationConfig, TorchEngineConfig
from toolkit.errors import UsageError
from toolkit.pipeline.stage import Finished
from toolkit.records.advice import Advice
from toolkit.words import DeployedRule

__all__ = [
    "check_prompt_lengths",
    "embedded",
    "embedded_twin",
    "refuse_head",
    "sampled_rule",
    "speculation_of",
    "with_advice",
]

# Requests in a batch of the embedded twin. Nothing is timed there, and the KV caches of a large
# model are large.
TWIN_MAX_BATCH_SIZE = 4


def embedded(config: DeploymentConfig) -> TorchEngineConfig:
    """The `engine` section of the embedded engine.

    Raises UsageError for any other kind, which runs only in its server.
    """
    engine = config.embedded_engine
    if engine is None:
        raise UsageError(
            f"engine.kind {config.engine.kind} runs only in its server, and this needs the embedded"
            " engine",
            hint="Use engine.kind: torch.",
        )
    return engine


def embedded_twin(config: DeploymentConfig) -> DeploymentConfig:
    """The same models on the embedded engine, which shows what they say but not how fast.

    Its sequences are long enough for the requests of the validation. Where the engine
    that serves computes what is not quantized in 16 bits, it does so in BF16; float32 would make it
    twice as large.
    """
    if config.capabilities.in_process:
        return config
    longest = config.engine.max_input_len
    engine = TorchEngineConfig(
        max_batch_size=min(config.engine.max_batch_size, TWIN_MAX_BATCH_SIZE),
        max_input_len=longest,
        max_seq_len=min(config.engine.max_seq_len, longest + config.validation.max_tokens),
        dtype="float32" if _computes_in_float32(config) else "bfloat16",
    )
    return config.model_copy(update={"engine": engine})


def _computes_in_float32(config: DeploymentConfig) -> bool:
    """Whether what is not quantized is served in float32. TensorRT-LLM computes it in 16 bits, vLLM
    as it is told or as the checkpoint has it; a checkpoint that is not here yet is taken to have 16
    bits.
    """
    engine, target = config.vllm_engine, config.target
    if engine is None:
        return False
    if engine.dtype != "auto" or target.hub_id is not None:
        return engine.dtype == "float32"
    return read_shape(target.checkpoint).dtype == "float32"


def refuse_head(config: DeploymentConfig) -> None:
    """Raises UsageError if a head drafts, since the embedded engine cannot run one."""
    if config.speculation.head is not None:
        raise UsageError(
            f"speculation.kind {config.speculation.kind} drafts with a head on the target's hidden"
            " states, and this runs both models on the embedded engine, which cannot run one",
            hint="Use `toolkit build`, which measures it on the engine that serves it.",
        )


def sampled_rule(config: DeploymentConfig) -> DeployedRule:
    """The rule that accepts draft tokens of requests at temperature > 0 without a seed.

    It is named as the advisor names it.
    """
    capabilities = config.capabilities
    stated = config.speculation.acceptance
    rule = capabilities.acceptance[0] if stated == "auto" else stated
    if capabilities.drafts_greedily and rule == "sample_match":
        return "sample_match_greedy_draft"
    return rule


def speculation_of(config: DeploymentConfig, finished: Finished) -> SpeculationConfig:
    """The speculation that is served: as the YAML says, with the advice in place of `auto`."""
    if not config.speculation.is_measured:
        return config.speculation
    advice: Advice = finished["tune"].record
    if not advice.speculate:
        return config.speculation.model_copy(update={"kind": "none"})
    advised: dict[str, Any] = {
        "max_draft_len": advice.max_draft_len,
        "draft_len_schedule": None,
        "max_concurrency": None,
    }
    if config.capabilities.draft_len_schedule is not None:
        advised["draft_len_schedule"] = {step.batch: step.draft_len for step in advice.schedule}
    elif config.capabilities.max_concurrency:
        advised["max_concurrency"] = advice.max_concurrency
    return config.speculation.model_copy(update=advised)


def with_advice(config: DeploymentConfig, finished: Finished) -> DeploymentConfig:
    """The same deployment with the advice in place of `auto`."""
    return config.model_copy(update={"speculation": speculation_of(config, finished)})


def check_prompt_lengths(config: DeploymentConfig) -> None:
    """Raises UsageError if a prompt is longer than engine.max_input_len.

    This needs the tokenizer, so it is done before long work and not in every build.
    """
    from toolkit.bench.prompts import check_lengths
    from toolkit.checkpoints.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(config.target.checkpoint)
    check_lengths(
        config.validation.prompts,
        config.validation.max_prompts,
        lambda prompt: tokenizer.encode(prompt).ids,
        config.engine.max_input_len,
        config.target.checkpoint,
    )
