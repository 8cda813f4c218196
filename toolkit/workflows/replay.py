"""Repeat one divergence: serve the deployment that its file describes, as the validation did, and
send its two requests again.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import ValidationError

from toolkit.config.schema import DeploymentConfig
from toolkit.errors import StageError, UsageError
from toolkit.workflows.deployment import embedded
from toolkit.workflows.folders import Workplace
from toolkit.workflows.serve import Machine, check_servable, plain_served, serve
from toolkit.workflows.stages.validate import engine_reference

if TYPE_CHECKING:
    from toolkit.validate.reference import Reference
    from toolkit.validate.replay import Replay, Replayed

__all__ = ["replay_divergence"]


def replay_divergence(
    file: Path,
    workplace: Workplace,
    machine: Machine | None = None,
    announce: Callable[[], None] = lambda: None,
) -> tuple[Replay, Replayed]:
    """Serve the published repository of a replay file's deployment, send the two requests of the
    file again, and judge them: (the file's content, the new judgement).

    machine: what serves TensorRT-LLM's kinds; None for this machine. announce: called when the file
    and the deployment turned out usable, before a server starts. Raises UsageError if the file
    is not a replay file, or if the deployment is not built or cannot be served here; StageError.
    """
    from toolkit.validate.replay import read_replay, replay

    recorded = read_replay(file)
    try:
        config = DeploymentConfig.model_validate(recorded.deployment)
    except ValidationError as error:
        hint = "Validate again: toolkit validate CONFIG writes new files."
        raise UsageError(
            f"the deployment in this replay file is not valid: {error}", where=file, hint=hint
        ) from error
    repository = workplace.repository(config.name)
    if not repository.is_dir():
        hint = "Build it: toolkit build CONFIG."
        raise UsageError(
            f"the deployment {config.name!r} is not built here", where=repository, hint=hint
        )
    check_servable(config, machine or Machine(), judged=False)
    capabilities, reference = config.capabilities, None
    if capabilities.gives_logits:
        reference = _reference(config, workplace.engines(config.name))
    plain = plain_served(config, repository)
    announce()
    with serve(config, repository, plain=plain, cache=workplace.vllm_cache) as (endpoint, _):
        return recorded, replay(recorded, endpoint, reference, capabilities)


def _reference(config: DeploymentConfig, engines: Path) -> Reference:
    """The compiled engines, loaded again to judge the texts.

    Raises UsageError if the target's engine is missing or of another kind.
    """
    from toolkit.engines.embedded.directory import open_directory

    try:
        open_directory(engines / "target")
    except StageError as error:
        raise UsageError(
            f"{config.name!r} has no engine of kind torch here, which is needed to judge the texts",
            where=engines / "target",
            hint="Build it: toolkit build CONFIG.",
        ) from error
    folders = {role: engines / role for role in config.models if (engines / role).is_dir()}
    return engine_reference(folders, embedded(config).threads)
