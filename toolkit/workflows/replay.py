"""Ask again about one divergence: serve the deployment that its file describes, as the
validation served it.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import ValidationError

from toolkit.config.schema import DeploymentConfig, TorchEngineConfig
from toolkit.errors import StageError, UsageError
from toolkit.workflows.deployment import embedded
from toolkit.workflows.folders import Workplace
from toolkit.workflows.serve import (
    Machine,
    Servers,
    abilities_of,
    check_servable,
    deployment_of,
    served_here,
)
from toolkit.workflows.stages.validate import engine_reference

if TYPE_CHECKING:
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
    from toolkit.validate.replay import read_replay

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
    if isinstance(config.engine, TorchEngineConfig):
        return found, _embedded(found, config, repository, workplace.engines(config.name))
    check_servable(config, machine or Machine(), judged=False)
    return found, _trtllm(found, config, repository)


def _embedded(found: Replay, config: DeploymentConfig, repository: Path, engines: Path) -> Replayed:
    """The compiled engine is loaded a second time, to judge."""
    from toolkit.client import Client
    from toolkit.engines.embedded.directory import open_directory
    from toolkit.validate.replay import replay

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
    folders = {role: engines / role for role in ("target", "draft") if (engines / role).is_dir()}
    with (
        served_here(config, repository, config.triton.on_free_ports) as server,
        Client(server.grpc_url) as client,
    ):
        return replay(found, client, engine_reference(folders, embedded(config).threads))


def _trtllm(found: Replay, config: DeploymentConfig, repository: Path) -> Replayed:
    """The arms judge one another by their log-probabilities, as far as the server tells them."""
    from toolkit.triton.process.server import private_folder
    from toolkit.validate.arms import Alternating
    from toolkit.validate.replay import replay

    with (
        private_folder() as folder,
        Servers(
            repository, deployment_of(config), config.triton, folder, folder / "server.log"
        ) as servers,
    ):
        in_turns = config.engine.kind == "trtllm_pytorch"
        return replay(
            found,
            Alternating(servers.start) if in_turns else servers.start("served"),
            None,
            abilities_of(config),
        )
