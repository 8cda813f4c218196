"""Serve a packaged repository on this machine, whatever its engine kind: `serve(...)`.

The embedded engine runs anywhere. TensorRT-LLM's kinds run inside NVIDIA's container, on a node
with the GPUs. There the repository does not lie where it names itself, so it is laid out anew. A
kind whose plain arm is had by a restart (`Capabilities.plain_arm`) is served an arm at a time.
"""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from toolkit.config.schema import DeploymentConfig, TritonConfig
from toolkit.errors import UsageError
from toolkit.interfaces import Progress
from toolkit.pipeline.machine import gpus

if TYPE_CHECKING:
    from toolkit.client import Client
    from toolkit.triton.package.deploy import Deployment
    from toolkit.triton.process.server import Launch, TritonServer
    from toolkit.validate.arms import Alternating

__all__ = ["Machine", "Servers", "check_servable", "deployment_of", "serve"]

START_TIMEOUT_S = 1800.0  # hundreds of gigabytes of weights are read
SERVED, PLAIN = "served", "plain"  # arms: the deployment as it is, and without speculation


def installed_version() -> str | None:
    """Of the tensorrt_llm that can be imported here; found out without importing it."""
    if importlib.util.find_spec("tensorrt_llm") is None:
        return None
    try:
        return version("tensorrt_llm")
    except PackageNotFoundError:
        return "unknown"


@dataclass(frozen=True, slots=True)
class Machine:
    """What is here to serve with. which: finds a program on the PATH."""

    gpus: Callable[[], Sequence[str]] = gpus
    which: Callable[[str], str | None] = shutil.which
    tensorrt_llm: Callable[[], str | None] = installed_version


def check_servable(config: DeploymentConfig, machine: Machine, *, judged: bool = True) -> None:
    """Raises UsageError where this machine cannot serve the deployment. The embedded engine runs
    anywhere.

    judged: by a build, which has other ways out than a command that merely serves.
    """
    from toolkit.engines.trtllm.where import same_version

    engine, deployment = config.trtllm_engine, deployment_of(config)
    if engine is None or deployment is None:
        return
    until = "Use --until package" if judged else "Use toolkit package"
    if deployment.nodes > 1:
        by = "served and judged by a build" if judged else "served by this command"
        raise UsageError(
            f"engine.kind {config.engine.kind} over {deployment.nodes} nodes is not {by}",
            hint=(
                f"{until}; start it with slurm.sh or leaderworkerset.yaml of the repository, and"
                " judge it with toolkit bench."
            ),
        )
    if config.triton.model_py == "container":
        told = "returns no token ids and counts, so the deployment cannot be judged"
        raise UsageError(
            "triton.model_py container"
            f" {told if judged else 'is a file of the container, which launch.sh takes there'}",
            hint=f"Set triton.model_py: ours, or {until[0].lower()}{until[1:]}.",
        )
    programs = ["tritonserver", *(["mpirun"] if deployment.layout == "bls" else [])]
    missing = [f"{name} on the PATH" for name in programs if machine.which(name) is None]
    found, there = machine.tensorrt_llm(), len(machine.gpus())
    if found is None:
        missing.append("the Python package tensorrt_llm")
    elif not same_version(found, engine.tensorrt_llm):
        missing.append(f"tensorrt_llm {engine.tensorrt_llm} (here is {found})")
    if there < deployment.gpus:
        missing.append(
            f"{deployment.gpus} NVIDIA GPU{'s' if deployment.gpus > 1 else ''} (here:"
            f" {there or 'none'})"
        )
    if missing:
        if judged:
            hint = (
                f"{until} or --rehearse here; run the whole build on the GPU machine, in"
                f" {_image(deployment)}."
            )
        else:
            hint = (
                f"Run it on the GPU machine, in {_image(deployment)}; toolkit build --rehearse"
                " tries the deployment here."
            )
        cannot = "cannot be served and judged here" if judged else "cannot be served here"
        raise UsageError(
            f"engine.kind {config.engine.kind} {cannot}: it needs {', '.join(missing)}", hint=hint
        )


def _image(deployment: Deployment) -> str:
    from toolkit.facts.versions import VERSIONS

    has_image = bool(VERSIONS[deployment.version].serving_tags)
    return deployment.image if has_image else "a container that serves this version"


def deployment_of(config: DeploymentConfig) -> Deployment | None:
    """What launches it in NVIDIA's container; None for the embedded engine, which needs none."""
    from toolkit.triton.package.deploy import Deployment

    engine, can = config.trtllm_engine, config.capabilities
    if engine is None:
        return None
    return Deployment(
        name=config.name,
        layout=can.layout,
        version=engine.tensorrt_llm,
        world_size=engine.world_size,
        gpus_per_node=engine.gpus_per_node,
        speculates=config.speculation.is_enabled,
        model_py=config.triton.model_py,
    )


@contextmanager
def serve(
    config: DeploymentConfig,
    repository: Path,
    *,
    triton: TritonConfig | None = None,
    log_path: Path | None = None,
    progress: Progress | None = None,
    in_turns: bool = False,
) -> Iterator[tuple[Client | Alternating, Servers]]:
    """Start what serves the packaged repository: (client, servers), until the block ends.

    triton: with the ports to take; None for free ones. in_turns: each arm is a server of its own,
    started when the client turns to it. Raises ServerError where a server does not start.
    """
    from toolkit.triton.process.server import private_folder
    from toolkit.validate.arms import Alternating

    with (
        private_folder() as folder,
        Servers(
            repository,
            deployment_of(config),
            triton or config.triton.on_free_ports,
            folder,
            config.capabilities.layout,
            log_path,
            progress,
        ) as servers,
    ):
        yield (Alternating(servers.start) if in_turns else servers.start(SERVED)), servers


@dataclass
class Servers:
    """The server of one arm at a time: `servers.start("plain")`. It ends with the block.

    deployment: None where the repository is served as it lies. folder: for repositories that are
    laid out anew. log_path: of the latest start; earlier logs are kept beside it, numbered.
    """

    repository: Path
    deployment: Deployment | None
    config: TritonConfig
    folder: Path
    layout: str
    log_path: Path | None = None
    progress: Progress | None = None
    starts: int = 0
    _running: ExitStack = field(default_factory=ExitStack)
    _server: TritonServer | None = None

    def __enter__(self) -> Servers:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._running.close()

    @property
    def server(self) -> TritonServer:
        """The one that is running."""
        assert self._server is not None, "start an arm first"
        return self._server

    def start(self, arm: str) -> Client:
        """End the running server, serve this arm, and return a client of it. Raises ServerError."""
        from toolkit.client import Client
        from toolkit.triton.process.server import TritonServer
        from toolkit.triton.tensors.contract import BLS_MODEL, MODEL

        self._running.close()
        if self.starts and self.log_path is not None:
            self.log_path.rename(self.log_path.with_suffix(f".{self.starts}.log"))
        self.starts += 1
        folder, launch, patience = self._placed(arm)
        with ExitStack() as starting:
            server = TritonServer(
                folder,
                patience,
                log_path=self.log_path,
                progress=self.progress,
                launch=launch,
            )
            self._server = starting.enter_context(server)
            model = BLS_MODEL if self.layout == "bls" else MODEL
            client = starting.enter_context(Client(server.grpc_url, model=model))
            self._running = starting.pop_all()
        return client

    def _placed(self, arm: str) -> tuple[Path, Launch | None, TritonConfig]:
        """(the repository of this arm, how it is launched, with how much time to start)."""
        from toolkit.triton.process.localize import render_here

        if self.deployment is None:
            return self.repository, None, self.config
        rendered = self.folder / arm
        if not rendered.exists():
            render_here(self.repository, rendered, speculates=arm != PLAIN)
        return rendered, _launch_of(self.deployment), _patient(self.config)


def _launch_of(deployment: Deployment) -> Launch:
    """What launch.sh does in the container, for a repository that lies elsewhere."""
    from toolkit.triton.package.deploy import local_launch_command
    from toolkit.triton.process.server import Workspace, launch_command

    def launch(
        repository: Path, workspace: Workspace, config: TritonConfig
    ) -> tuple[list[str], dict[str, str]]:
        command, environment = launch_command(repository, workspace, config)
        command, more = local_launch_command(deployment, command)
        return command, {**environment, **more}

    return launch


def _patient(triton: TritonConfig) -> TritonConfig:
    """The time to start as the YAML states it, and else enough for a large model."""
    if "start_timeout_s" in triton.model_fields_set:
        return triton
    return triton.model_copy(update={"start_timeout_s": START_TIMEOUT_S})
