"""What a YAML asks for, in the words of the stages: questions that more than one of them puts to it."""

from __future__ import annotations

from toolkit.config.schema import DeploymentConfig, ModelConfig, TorchEngineConfig
from toolkit.errors import UsageError

__all__ = ["embedded", "measures", "models_of", "tp_size_of"]


def models_of(config: DeploymentConfig) -> dict[str, ModelConfig]:
    models = {"target": config.target}
    return models if config.draft is None else {**models, "draft": config.draft}


def tp_size_of(config: DeploymentConfig) -> int:
    return 1 if config.engine.kind == "torch" else config.engine.tp_size


def embedded(config: DeploymentConfig) -> TorchEngineConfig:
    """The section of the embedded engine. Raises UsageError for another kind, which nothing but its server can run."""
    if not isinstance(config.engine, TorchEngineConfig):
        raise UsageError(
            f"engine.kind {config.engine.kind} runs in its server alone, and this works on the embedded engine",
            mend="Use engine.kind: torch.",
        )
    return config.engine


def measures(config: DeploymentConfig) -> bool:
    return config.speculation.kind != "none" and config.speculation.max_draft_len == "auto"
