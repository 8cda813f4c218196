"""What a YAML asks for, in the words of the stages: questions that more than one of them puts to
it.
"""

from __future__ import annotations

from typing import Any

from toolkit.config.schema import DeploymentConfig, SpeculationConfig, TorchEngineConfig
from toolkit.errors import UsageError
from toolkit.pipeline.stage import Finished
from toolkit.records.advice import Advice
from toolkit.words import DeployedRule

__all__ = [
    "check_prompt_lengths",
    "embedded",
    "embedded_twin",
    "sampled_rule",
    "settled",
    "speculation_of",
]

TWIN_BATCH = (
    4  # requests at once: what is timed there is nothing, and KV caches of a large model are large
)


def embedded(config: DeploymentConfig) -> TorchEngineConfig:
    """The section of the embedded engine. Raises UsageError for another kind, which nothing but
    its server can run.
    """
    engine = config.embedded_engine
    if engine is None:
        raise UsageError(
            f"engine.kind {config.engine.kind} runs in its server alone, and this works on the"
            " embedded engine",
            hint="Use engine.kind: torch.",
        )
    return engine


def embedded_twin(config: DeploymentConfig) -> DeploymentConfig:
    """The same models on the embedded engine, long enough for what validation asks: to read what
    they say, not how fast.
    """
    if config.capabilities.in_process:
        return config
    longest = config.engine.max_input_len
    engine = TorchEngineConfig(
        max_batch_size=min(config.engine.max_batch_size, TWIN_BATCH),
        max_input_len=longest,
        max_seq_len=min(config.engine.max_seq_len, longest + config.validation.max_tokens),
    )
    return config.model_copy(update={"engine": engine})


def sampled_rule(config: DeploymentConfig) -> DeployedRule:
    """The rule that accepts the drafts of requests at temperature > 0 without a seed, in the
    advisor's words for it.
    """
    can, stated = config.capabilities, config.speculation.acceptance
    rule = can.acceptance[0] if stated == "auto" else stated
    return "sample_match_greedy_draft" if can.drafts_greedily and rule == "sample_match" else rule


def speculation_of(config: DeploymentConfig, finished: Finished) -> SpeculationConfig:
    """What is served: what the YAML says, or what was found where it says `auto`."""
    if not config.speculation.is_measured:
        return config.speculation
    advice: Advice = finished["tune"].record
    if not advice.speculate:
        return config.speculation.model_copy(update={"kind": "none"})
    can = config.capabilities
    by_load = can.draft_len_schedule is not None
    found: dict[str, Any] = {
        "max_draft_len": advice.max_draft_len,
        "draft_len_schedule": (
            {step.batch: step.draft_len for step in advice.schedule} if by_load else None
        ),
        "max_concurrency": (None if by_load or not can.max_concurrency else advice.max_concurrency),
    }
    return config.speculation.model_copy(update=found)


def settled(config: DeploymentConfig, finished: Finished) -> DeploymentConfig:
    """The same with what was found in the place of `auto`."""
    return config.model_copy(update={"speculation": speculation_of(config, finished)})


def check_prompt_lengths(config: DeploymentConfig) -> None:
    """Asked before long work and not at every build: it needs the tokenizer. Raises UsageError."""
    from toolkit.bench.prompts import check_lengths
    from toolkit.checkpoints.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(config.target.checkpoint)
    check_lengths(
        config.validation.prompts,
        config.validation.max_prompts,
        lambda prompt: tokenizer.encode(prompt).ids,
        config.engine.max_input_len,
    )
