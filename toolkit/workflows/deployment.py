"""What a YAML asks for, in the words of the stages: questions that more than one of them puts to
it.
"""

from __future__ import annotations

from typing import Any

from toolkit.config.schema import (
    DeploymentConfig,
    ModelConfig,
    SpeculationConfig,
    TorchEngineConfig,
    TrtEngineConfig,
)
from toolkit.errors import UsageError
from toolkit.facts.support import ACCEPTANCE
from toolkit.facts.versions import VERSIONS
from toolkit.pipeline.stage import Finished
from toolkit.records.advice import Advice

__all__ = [
    "check_prompt_lengths",
    "embedded",
    "embedded_twin",
    "measures",
    "models_of",
    "sampled_rule",
    "settled",
    "speculation_of",
    "takes_max_concurrency",
    "takes_schedule",
    "tp_size_of",
]

TWIN_BATCH = (
    4  # requests at once: what is timed there is nothing, and KV caches of a large model are large
)


def models_of(config: DeploymentConfig) -> dict[str, ModelConfig]:
    models = {"target": config.target}
    return models if config.draft is None else {**models, "draft": config.draft}


def tp_size_of(config: DeploymentConfig) -> int:
    return 1 if config.engine.kind == "torch" else config.engine.tp_size


def embedded(config: DeploymentConfig) -> TorchEngineConfig:
    """The section of the embedded engine. Raises UsageError for another kind, which nothing but
    its server can run.
    """
    if not isinstance(config.engine, TorchEngineConfig):
        raise UsageError(
            f"engine.kind {config.engine.kind} runs in its server alone, and this works on the"
            " embedded engine",
            hint="Use engine.kind: torch.",
        )
    return config.engine


def measures(config: DeploymentConfig) -> bool:
    return config.speculation.kind != "none" and config.speculation.max_draft_len == "auto"


def embedded_twin(config: DeploymentConfig) -> DeploymentConfig:
    """The same models on the embedded engine, long enough for what validation asks: to read what
    they say, not how fast.
    """
    if isinstance(config.engine, TorchEngineConfig):
        return config
    longest = config.engine.max_input_len
    engine = TorchEngineConfig(
        max_batch_size=min(config.engine.max_batch_size, TWIN_BATCH),
        max_input_len=longest,
        max_seq_len=min(config.engine.max_seq_len, longest + config.validation.max_tokens),
    )
    return config.model_copy(update={"engine": engine})


def sampled_rule(config: DeploymentConfig) -> str:
    """The rule that accepts the drafts of requests at temperature > 0 without a seed, in the
    advisor's words for it.
    """
    kind, asked = config.engine.kind, config.speculation.acceptance
    rule = ACCEPTANCE[kind][0] if asked == "auto" else asked
    return f"{rule}_greedy_draft" if kind == "trtllm_pytorch" and rule == "sample_match" else rule


def takes_max_concurrency(config: DeploymentConfig) -> bool:
    """Whether speculation can stop above a number of running requests where this is served."""
    if isinstance(config.engine, TorchEngineConfig):
        return config.triton.layout != "bls"
    return not isinstance(config.engine, TrtEngineConfig)


def takes_schedule(config: DeploymentConfig) -> bool:
    """Whether the draft length can follow the number of running requests where this is served."""
    engine = config.engine
    known = (
        isinstance(engine, TorchEngineConfig)
        or VERSIONS[engine.tensorrt_llm].draft_len_schedule is not None
    )
    return known and takes_max_concurrency(config)


def speculation_of(config: DeploymentConfig, finished: Finished) -> SpeculationConfig:
    """What is served: what the YAML says, or what was found where it says `auto`."""
    if not measures(config):
        return config.speculation
    advice: Advice = finished["tune"].record
    if not advice.speculate:
        return config.speculation.model_copy(update={"kind": "none"})
    by_load = takes_schedule(config)
    found: dict[str, Any] = {
        "max_draft_len": advice.max_draft_len,
        "draft_len_schedule": (
            {step.batch: step.draft_len for step in advice.schedule} if by_load else None
        ),
        "max_concurrency": (
            None if by_load or not takes_max_concurrency(config) else advice.max_concurrency
        ),
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
