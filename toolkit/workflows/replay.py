"""Ask again about one divergence: serve the deployment that its file describes, as the
validation served it.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import ValidationError

from toolkit.config.schema import DeploymentConfig
from toolkit.errors import StageError, UsageError
from toolkit.workflows.deployment import embedded
from toolkit.workflows.folders import Workplace
from toolkit.workflows.serve import Machine, check_servable, serve
from toolkit.workflows.stages.validate import engine_reference

if TYPE_CHECKING:
    from toolkit.validate.reference import Reference
    from toolkit.validate.replay import Replay, Replayed

__all__ = ["replay_divergence"]


def replay_divergence(
    file: Path, workplace: Workplace, machine: Machine | None = None
) -> tuple[Replay, Replayed]:
    """Serve the repository that is published for a replay file's deployment, send its two requests
    again, judge them.

    machine: where TensorRT-LLM's kinds are to run. Raises UsageError for a file that is none, for a
    deployment that is not built or cannot be served here, StageError.
    """
    from toolkit.validate.replay import read_replay, replay

    found = read_replay(file)
    try:
        config = DeploymentConfig.model_validate(found.deployment)
    except ValidationError as error:
        hint = "Validate again: toolkit validate CONFIG writes new ones."
        raise UsageError(
            f"the deployment in this replay file is none: {error}", where=file, hint=hint
        ) from error
    repository = workplace.repository(config.name)
    if not repository.is_dir():
        hint = "Build it: toolkit build CONFIG."
        raise UsageError(
            f"the deployment {config.name!r} is not built here", where=repository, hint=hint
        )
    check_servable(config, machine or Machine(), judged=False)
    can, reference = config.capabilities, None
    if can.gives_logits:
        reference = _reference(config, workplace.engines(config.name))
    in_turns = can.plain_arm == "restart"
    with serve(config, repository, in_turns=in_turns) as (endpoint, _):
        return found, replay(found, endpoint, reference, can)


def _reference(config: DeploymentConfig, engines: Path) -> Reference:
    """The compiled engine, loaded once more to judge. Raises UsageError where it is not here."""
    from toolkit.engines.embedded.directory import open_directory

    try:
        open_directory(engines / "target")
    except StageError as error:
        what = (
            f"{config.name!r} has no engine of kind torch here, whose scores would judge the two"
            " texts"
        )
        raise UsageError(
            what, where=engines / "target", hint="Build it: toolkit build CONFIG."
        ) from error
    folders = {role: engines / role for role in config.models if (engines / role).is_dir()}
    return engine_reference(folders, embedded(config).threads)
