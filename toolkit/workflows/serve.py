"""Serve a packaged repository on this machine, whatever its engine kind: `serve(...)`.

The embedded engine runs anywhere. TensorRT-LLM's kinds run inside NVIDIA's container, on a node
with the GPUs. Their repository names the folders of the container, so it is rendered again with the
folders of this machine. vLLM runs in a Python environment of its own (`serve_vllm`). A kind that
decodes plainly only after a restart (`Capabilities.plain_arm`) is served one arm at a time; one
whose plain arm is another server as well, if there is no room for two.
"""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Literal

from toolkit.config.schema import DeploymentConfig, TritonConfig
from toolkit.errors import UsageError
from toolkit.interfaces import Progress
from toolkit.pipeline.machine import gpus
from toolkit.workflows.serve_vllm import (
    PLAIN,
    SERVED,
    Address,
    VllmServers,
    check_vllm,
    has_room_for_two,
)

if TYPE_CHECKING:
    from toolkit.client import Client
    from toolkit.openai_client import OpenAiClient
    from toolkit.triton.package.deploy import Deployment
    from toolkit.triton.process.server import Launch, TritonServer
    from toolkit.validate.arms import Alternating
    from toolkit.workflows.serve_vllm import Routed

__all__ = ["Machine", "Servers", "check_servable", "deployment_of", "plain_served", "serve"]

START_TIMEOUT_S = 1800.0  # the server may have to read hundreds of gigabytes of weights


def installed_version() -> str | None:
    """The version of tensorrt_llm on this machine, read without importing it; None without one."""
    if importlib.util.find_spec("tensorrt_llm") is None:
        return None
    try:
        return version("tensorrt_llm")
    except PackageNotFoundError:
        return "unknown"


@dataclass(frozen=True, slots=True)
class Machine:
    """What a machine has to serve with.

    gpus: the names of its GPUs. which: finds a program on the PATH. tensorrt_llm: its version.
    vllm: raises an error if it cannot serve a deployment of that kind.
    """

    gpus: Callable[[], Sequence[str]] = gpus
    which: Callable[[str], str | None] = shutil.which
    tensorrt_llm: Callable[[], str | None] = installed_version
    vllm: Callable[[DeploymentConfig], None] = check_vllm


def check_servable(config: DeploymentConfig, machine: Machine, *, judged: bool = True) -> None:
    """Raises UsageError or BackendUnavailable if the machine cannot serve the deployment. The
    embedded engine runs anywhere.

    judged: whether a build serves it to judge it. The hints for a build are other than those for a
    command that only serves.
    """
    from toolkit.engines.trtllm.where import same_version

    if config.vllm_engine is not None:
        machine.vllm(config)
        return
    engine, deployment = config.trtllm_engine, deployment_of(config)
    if engine is None or deployment is None:
        return
    only_package = "Use --until package" if judged else "Use toolkit package"
    if deployment.nodes > 1:
        purpose = "served and judged by a build" if judged else "served by this command"
        raise UsageError(
            f"engine.kind {config.engine.kind} over {deployment.nodes} nodes is not {purpose}",
            hint=(
                f"{only_package}; start it with slurm.sh or leaderworkerset.yaml of the repository,"
                " and judge it with toolkit bench."
            ),
        )
    if config.triton.model_py == "container":
        why = "is a file of the container, which launch.sh copies into the repository"
        if judged:
            why = "returns no token ids and counts, so the deployment cannot be judged"
        raise UsageError(
            f"triton.model_py container {why}",
            hint=f"Set triton.model_py: ours, or {only_package[0].lower()}{only_package[1:]}.",
        )
    programs = ["tritonserver", *(["mpirun"] if deployment.layout == "bls" else [])]
    missing = [f"{name} on the PATH" for name in programs if machine.which(name) is None]
    installed, gpu_count = machine.tensorrt_llm(), len(machine.gpus())
    if installed is None:
        missing.append("the Python package tensorrt_llm")
    elif not same_version(installed, engine.tensorrt_llm):
        missing.append(f"tensorrt_llm {engine.tensorrt_llm} (here is {installed})")
    if gpu_count < deployment.gpus:
        plural = "s" if deployment.gpus > 1 else ""
        missing.append(f"{deployment.gpus} NVIDIA GPU{plural} (here: {gpu_count or 'none'})")
    if missing:
        if judged:
            hint = (
                f"{only_package} or --rehearse here; run the whole build on the GPU machine, in"
                f" {deployment.image}."
            )
        else:
            hint = (
                f"Run it on the GPU machine, in {deployment.image}; toolkit build --rehearse"
                " tries the deployment here."
            )
        cannot = "cannot be served and judged here" if judged else "cannot be served here"
        raise UsageError(
            f"engine.kind {config.engine.kind} {cannot}: it needs {', '.join(missing)}", hint=hint
        )


def deployment_of(config: DeploymentConfig) -> Deployment | None:
    """How it is launched in NVIDIA's container; None for the embedded engine, which needs none."""
    from toolkit.triton.package.deploy import Deployment

    engine = config.trtllm_engine
    if engine is None:
        return None
    return Deployment(
        name=config.name,
        layout="bls" if config.capabilities.layout == "bls" else "llmapi",
        version=engine.tensorrt_llm,
        world_size=engine.world_size,
        gpus_per_node=engine.gpus_per_node,
        speculates=config.speculation.is_enabled,
        model_py=config.triton.model_py,
        container_image=None
        if config.pytorch_flow is None
        else config.pytorch_flow.container_image,
    )


PlainServed = Literal["by request", "in turns", "beside"]


def plain_served(config: DeploymentConfig, repository: Path) -> PlainServed:
    """How the deployment's plain arm is served here: by requests to the same server, by servers
    that take turns, or by a second server.
    """
    plain_arm = config.capabilities.plain_arm
    if plain_arm == "request":
        return "by request"
    if plain_arm == "server" and has_room_for_two(config, repository):
        return "beside"
    return "in turns"


@contextmanager
def serve(
    config: DeploymentConfig,
    repository: Path,
    *,
    triton: TritonConfig | None = None,
    log_path: Path | None = None,
    progress: Progress | None = None,
    plain: PlainServed = "by request",
    cache: Path | None = None,
) -> Iterator[tuple[Client | OpenAiClient | Routed | Alternating, Servers | VllmServers]]:
    """Serve the packaged repository until the block ends: (client, servers).

    triton: the settings with the ports; None for free ports. plain: `in turns` starts a server per
    arm when the client turns to that arm; `beside` starts both. cache: a folder in which vLLM keeps
    compiled graphs for later starts. Raises ServerError if a server does not start, or if vLLM ends
    while it is used.
    """
    from toolkit.validate.arms import Alternating

    triton = triton or config.triton.on_free_ports
    servers: Servers | VllmServers
    with ExitStack() as running:
        if config.vllm_engine is not None:
            servers = VllmServers(config, repository, triton, cache, log_path, progress)
        else:
            from toolkit.process.workspace import private_folder

            folder = running.enter_context(private_folder())
            servers = Servers(
                repository,
                deployment_of(config),
                triton,
                folder,
                config.capabilities.layout,
                log_path,
                progress,
            )
        running.enter_context(servers)
        if plain == "in turns":
            yield Alternating(servers.start), servers
        elif plain == "beside" and isinstance(servers, VllmServers):
            yield servers.start_both(), servers
        else:
            yield servers.start(SERVED), servers


@dataclass
class Servers:
    """Runs the server of one arm at a time: `servers.start("plain")`. It ends with the block.

    deployment: None if the repository is served as it is. folder: for repositories that are
    rendered for this machine. log_path: the log of the latest start; the logs of earlier starts
    are kept beside it, with numbers.
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
        """The server that is running."""
        assert self._server is not None, "start an arm first"
        return self._server

    @property
    def model(self) -> str:
        """The model that clients call."""
        from toolkit.triton.tensors.contract import BLS_MODEL, MODEL

        return BLS_MODEL if self.layout == "bls" else MODEL

    @property
    def address(self) -> Address:
        """Where the running server is called."""
        return Address(self.server.grpc_url, self.model, self.server.metrics_url, "triton-grpc")

    @property
    def plain_address(self) -> None:
        """No plain arm runs beside: the same server decodes plainly, or is started again."""

    @property
    def alone(self) -> Mapping[str, Callable[[], AbstractContextManager[None]]]:
        """No other server runs that could be paused."""
        return {}

    def start(self, arm: str) -> Client:
        """Stop the running server, serve this arm, and return its client. Raises ServerError."""
        from toolkit.client import Client
        from toolkit.triton.process.server import TritonServer

        self._running.close()
        if self.starts and self.log_path is not None:
            self.log_path.rename(self.log_path.with_suffix(f".{self.starts}.log"))
        self.starts += 1
        folder, launch, config = self._repository_of(arm)
        with ExitStack() as starting:
            server = TritonServer(
                folder,
                config,
                log_path=self.log_path,
                progress=self.progress,
                launch=launch,
            )
            self._server = starting.enter_context(server)
            client = starting.enter_context(Client(server.grpc_url, model=self.model))
            self._running = starting.pop_all()
        return client

    def counters(self) -> Mapping[str, float]:
        """The counters of the running server."""
        from toolkit.bench.counters import read_counters

        return read_counters(self.server.metrics_url)

    def check(self) -> None:
        """Raise ServerError, with the end of the log, if the server is no longer running."""
        self.server.check()

    def _repository_of(self, arm: str) -> tuple[Path, Launch | None, TritonConfig]:
        """The arm's repository, how it is launched (None: as usual), and its settings."""
        from toolkit.triton.process.localize import render_here

        if self.deployment is None:
            return self.repository, None, self.config
        rendered = self.folder / arm
        if not rendered.exists():
            render_here(self.repository, rendered, speculates=arm != PLAIN)
        return rendered, _launch_of(self.deployment), _with_start_timeout(self.config)


def _launch_of(deployment: Deployment) -> Launch:
    """The command that launch.sh runs in the container, for a repository in another folder."""
    from toolkit.process.workspace import Workspace
    from toolkit.triton.package.deploy import local_launch_command
    from toolkit.triton.process.server import launch_command

    def launch(
        repository: Path, workspace: Workspace, config: TritonConfig
    ) -> tuple[list[str], dict[str, str]]:
        command, environment = launch_command(repository, workspace, config)
        command, more = local_launch_command(deployment, command)
        return command, {**environment, **more}

    return launch


def _with_start_timeout(triton: TritonConfig) -> TritonConfig:
    """The settings with enough time to start a large model, unless the YAML states a time."""
    if "start_timeout_s" in triton.model_fields_set:
        return triton
    return triton.model_copy(update={"start_timeout_s": START_TIMEOUT_S})
