"""Serving the kinds of TensorRT-LLM on this machine: can it be done here, one server by hand, and
the servers of both arms.

It runs where they run: inside NVIDIA's container, on a node with the GPUs. `trt_engine` is one
server, whose plain arm is a request's parameter. `trtllm_pytorch` decides on speculation when it
loads and fills the GPUs, so its arms are two renderings of the repository that are served in turns.
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

from toolkit.config.schema import DeploymentConfig, TorchEngineConfig, TritonConfig, TrtEngineConfig
from toolkit.errors import UsageError
from toolkit.interfaces import Progress
from toolkit.pipeline.machine import gpus

if TYPE_CHECKING:
    from toolkit.client import Client
    from toolkit.triton.package.deploy import Deployment
    from toolkit.triton.process.server import Launch, TritonServer
    from toolkit.validate.arms import Abilities

__all__ = ["Machine", "Servers", "abilities_of", "check_servable", "deployment_of", "served_here"]

START_TIMEOUT_S = 1800.0  # hundreds of gigabytes of weights are read


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

    engine = config.engine
    if isinstance(engine, TorchEngineConfig):
        return
    deployment = deployment_of(config)
    until = "Use --until package" if judged else "Use toolkit package"
    if deployment.nodes > 1:
        by = "served and judged by a build" if judged else "served by this command"
        raise UsageError(
            f"engine.kind {engine.kind} over {deployment.nodes} nodes is not {by}",
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
            f"engine.kind {engine.kind} {cannot}: it needs {', '.join(missing)}", hint=hint
        )


def _image(deployment: Deployment) -> str:
    from toolkit.facts.versions import VERSIONS

    return (
        deployment.image
        if VERSIONS[deployment.version].serving_tags
        else "a container that serves this version"
    )


def deployment_of(config: DeploymentConfig) -> Deployment:
    from toolkit.triton.package.deploy import Deployment

    engine = config.engine
    assert not isinstance(engine, TorchEngineConfig)  # the caller has looked
    return Deployment(
        name=config.name,
        layout="bls" if isinstance(engine, TrtEngineConfig) else "llmapi",
        version=engine.tensorrt_llm,
        world_size=engine.tp_size * engine.pp_size,
        gpus_per_node=engine.gpus_per_node,
        speculates=config.speculation.kind != "none",
        model_py=config.triton.model_py,
    )


@contextmanager
def served_here(
    config: DeploymentConfig, repository: Path, triton: TritonConfig
) -> Iterator[TritonServer]:
    """The packaged repository on the server of its kind, until the block ends. triton: with the
    ports to take.

    Raises ServerError where it does not start.
    """
    from toolkit.triton.process.localize import render_here
    from toolkit.triton.process.server import TritonServer, private_folder

    with ExitStack() as open_until:
        if isinstance(config.engine, TorchEngineConfig):
            server = TritonServer(repository, triton)
        else:
            folder = open_until.enter_context(private_folder())
            render_here(repository, folder / "repository")
            server = TritonServer(
                folder / "repository", _patient(triton), launch=_launch_of(deployment_of(config))
            )
        yield open_until.enter_context(server)


def _launch_of(deployment: Deployment) -> Launch:
    """What launch.sh does in the container, for a repository that lies elsewhere."""
    from toolkit.triton.package.deploy import started_here
    from toolkit.triton.process.server import Workspace, launch_command

    def launch(
        repository: Path, workspace: Workspace, config: TritonConfig
    ) -> tuple[list[str], dict[str, str]]:
        command, environment = launch_command(repository, workspace, config)
        command, more = started_here(deployment, command)
        return command, {**environment, **more}

    return launch


def _patient(triton: TritonConfig) -> TritonConfig:
    """The time to start as the YAML states it, and else enough for a large model."""
    stated = "start_timeout_s" in triton.model_fields_set
    return triton if stated else triton.model_copy(update={"start_timeout_s": START_TIMEOUT_S})


def abilities_of(config: DeploymentConfig) -> Abilities:
    """The BLS model is ours and drafts as a request asks; LLM() has one draft length, and its
    own accept rule.
    """
    from toolkit.facts.support import LOG_PROBS
    from toolkit.validate.arms import Abilities

    engine = config.engine
    assert not isinstance(engine, TorchEngineConfig)  # the caller has looked
    ours = isinstance(engine, TrtEngineConfig)
    told = LOG_PROBS[engine.kind].get(engine.tensorrt_llm, 0) > 0
    fresh = not engine.enable_block_reuse
    return Abilities(
        verify_arm=ours, draft_lens=ours, coupled=False, log_probs=told, fresh_prompts=fresh
    )


@dataclass
class Servers:
    """The server of one arm at a time: `with Servers(...) as servers: servers.start("plain")`. It
    ends with the block.

    folder: for the renderings. log_path: of the latest start; earlier ones are kept beside it,
    numbered.
    """

    repository: Path
    deployment: Deployment
    config: TritonConfig
    folder: Path
    log_path: Path
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
        from toolkit.triton.process.localize import render_here
        from toolkit.triton.process.server import TritonServer

        launch = _launch_of(self.deployment)
        self._running.close()
        if self.starts:
            self.log_path.rename(self.log_path.with_suffix(f".{self.starts}.log"))
        self.starts += 1
        rendered = self.folder / arm
        if not rendered.exists():
            render_here(self.repository, rendered, speculates=arm != "plain")
        with ExitStack() as starting:
            server = TritonServer(
                rendered,
                self._ports(),
                log_path=self.log_path,
                progress=self.progress,
                launch=launch,
            )
            self._server = starting.enter_context(server)
            client = starting.enter_context(Client(server.grpc_url, model=self.deployment.entry))
            self._running = starting.pop_all()
        return client

    def _ports(self) -> TritonConfig:
        """Free ones, and the time to start."""
        return _patient(self.config).on_free_ports
