"""Finds a tritonserver, starts it on a repository, waits until it serves, and cleans up after it.

The server is the one on PATH, else the one inside the nvidia-pytriton wheel. The wheel's server is
complete, but needs some preparation: its libraries and the interpreter's libpython on
LD_LIBRARY_PATH, and the Python backend's stub for the interpreter's version beside the backend.
This is prepared in a private workspace; nothing is written into site-packages.

`toolkit.process` runs it, and cleans up after it.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import sys
import sysconfig
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from toolkit.config.schema import TritonConfig
from toolkit.errors import BackendUnavailable, ServerError
from toolkit.interfaces import Progress
from toolkit.process.policies import THREAD_POLICY, forget_client_policy
from toolkit.process.server import (
    LOG_TAIL_LINES,
    PORT_ATTEMPTS,
    ServerProcess,
    is_taken,
    met_lock_exception,
    reserve_ports,
)
from toolkit.process.supervise import HEARTBEATS
from toolkit.process.workspace import Workspace
from toolkit.triton.access import KEY_VARIABLE, admin_key, restrictions
from toolkit.triton.package import model_config
from toolkit.triton.tensors.contract import (
    BLS_MODEL,
    DRAFT_MODEL,
    HEARTBEATS_VARIABLE,
    PACKAGE_VERSION,
)

__all__ = [
    "STARTED_AGAIN",
    "Launch",
    "ServerInstall",
    "TritonServer",
    "dispensable_models",
    "find_libpython",
    "find_server",
    "launch_command",
    "model_death",
    "server_arguments",
]

# Enough for a model that loads torch and compiled packages from a slow disk. Triton's default: 30.
STUB_TIMEOUT_S = 300
STARTED_AGAIN = "tritonserver died at start and is started once more"
EXIT_TIMEOUT_S = 5  # how long a stopping server waits for running requests
# As model.yaml (YAML) or config.pbtxt (text format of protobuf) state it.
PACKAGED_VERSION = re.compile(
    r'package_version(?:: |"\s+value:? \{\s+string_value: ")(?P<version>\d+)'
)


@dataclass(frozen=True, slots=True)
class ServerInstall:
    """A tritonserver program. wheel: the server's folder inside nvidia-pytriton; None for a server
    on PATH, which needs no preparation.
    """

    binary: Path
    wheel: Path | None

    @property
    def origin(self) -> str:
        return f"PATH ({self.binary})" if self.wheel is None else "the nvidia-pytriton wheel"


def model_death(lines: Sequence[str]) -> list[str]:
    """The line in which the native backend says how a model's process ended: Triton goes on
    printing while it stops.
    """
    return [line for line in lines if "] \"the model's process " in line][:1]


def find_server() -> ServerInstall:
    """The tritonserver on PATH, whatever its version, else the one in the installed nvidia-pytriton
    wheel. Raises BackendUnavailable if there is neither.
    """
    on_path = shutil.which("tritonserver")
    if on_path is not None:
        return ServerInstall(Path(on_path), None)
    package = importlib.util.find_spec("pytriton")
    if package is not None and package.origin is not None:
        wheel = Path(package.origin).parent / "tritonserver"
        if (wheel / "bin" / "tritonserver").is_file():
            return ServerInstall(wheel / "bin" / "tritonserver", wheel)
    raise BackendUnavailable("tritonserver", extra="embedded")


def find_libpython() -> Path | None:
    """The folder with the interpreter's shared library, which the Python backend's stub needs. None
    if there is no such library.
    """
    name = sysconfig.get_config_var("INSTSONAME") or ""
    if ".so" not in name:
        name = f"libpython{sys.version_info.major}.{sys.version_info.minor}.so.1.0"
    libdir, multiarch = sysconfig.get_config_var("LIBDIR"), sysconfig.get_config_var("MULTIARCH")
    folders = [Path(libdir)] if libdir else []
    folders += [folder / multiarch for folder in folders if multiarch]
    folders += [Path(sys.base_prefix) / "lib", Path("/usr/lib64"), Path("/usr/lib")]
    return next((folder for folder in folders if (folder / name).exists()), None)


def launch_command(
    repository: Path, workspace: Workspace, config: TritonConfig | None = None
) -> tuple[list[str], dict[str, str]]:
    """The (command, environment) that serve `repository` on loopback. Ports of 0 in the config
    leave Triton's defaults.

    Raises BackendUnavailable if there is no tritonserver or no libpython for its Python backend,
    ServerError for a repository of another package version, and UsageError for a bad admin key.
    """
    config = config or TritonConfig()
    _check_package_version(repository)
    install = find_server()
    command = [str(install.binary), *server_arguments(repository, config)]
    command.append(f"--backend-config=python,shm-region-prefix-name={workspace.path.name}-")
    command += restrictions(admin_key(os.environ))
    environment = {**THREAD_POLICY, **os.environ}
    environment.pop(KEY_VARIABLE, None)  # the models of the server have no use for it
    forget_client_policy(environment)
    # The stub finds its packages through the first `python3` on PATH, which is also how it
    # recognises a virtual environment.
    environment["PATH"] = os.pathsep.join(
        [str(Path(sys.executable).parent), environment.get("PATH", os.defpath)]
    )
    # Compiled packages are unpacked into the temporary directory. In the shared one they would stay
    # if the server were killed.
    environment["TMPDIR"] = str(workspace.path / "tmp")
    environment[HEARTBEATS_VARIABLE] = str(workspace.path / HEARTBEATS)
    if install.wheel is not None:
        libpython = find_libpython()
        if libpython is None:
            raise BackendUnavailable(
                f"libpython{sys.version_info.major}.{sys.version_info.minor}.so",
                hint=(
                    "Triton's Python backend needs it: use a Python with a shared library (on"
                    " Debian: libpython3.X, from source: ./configure --enable-shared)."
                ),
            )
        command.append(f"--backend-directory={_backends(install.wheel, workspace)}")
        libraries = [install.wheel.parent.parent / "nvidia_pytriton.libs", libpython]
        inherited = [environment["LD_LIBRARY_PATH"]] if environment.get("LD_LIBRARY_PATH") else []
        # For the processes that our own backend starts: they need none of the server's libraries.
        environment["TOOLKIT_WORKER_LIBRARY_PATH"] = "".join(inherited)
        environment["LD_LIBRARY_PATH"] = os.pathsep.join([*map(str, libraries), *inherited])
    if not Path("/dev/nvidiactl").exists():
        command.append("--allow-gpu-metrics=false")
    return command, environment


def _check_package_version(repository: Path) -> None:
    """Raise ServerError for a repository of another version: its models import the toolkit's
    modules by the names that they had then.
    """
    for file in (*repository.glob("*/1/model.yaml"), *repository.glob("*/config.pbtxt")):
        match = PACKAGED_VERSION.search(file.read_text(encoding="utf-8", errors="replace"))
        if match is not None and int(match["version"]) != PACKAGE_VERSION:
            raise ServerError(
                f"this repository has package version {match['version']}, and this toolkit serves"
                f" version {PACKAGE_VERSION}: {file}",
                hint="Package it again: toolkit package CONFIG.",
            )


def server_arguments(repository: Path, config: TritonConfig) -> list[str]:
    """The arguments that every tritonserver gets, wherever it was found."""
    arguments = [f"--model-repository={repository}", "--disable-auto-complete-config"]
    for protocol, port in (
        ("http", config.http_port),
        ("grpc", config.grpc_port),
        ("metrics", config.metrics_port),
    ):
        arguments.append(f"--{protocol}-address={config.host}")
        if port:
            arguments.append(f"--{protocol}-port={port}")
    return [
        *arguments,
        # Triton keeps the messages of answered requests for later ones, and each keeps the size of
        # the largest that it ever held: hostile prompts of 4 MB took 100 MiB in ten minutes.
        "--grpc-infer-allocation-pool-size=0",
        f"--exit-timeout-secs={EXIT_TIMEOUT_S}",
        f"--backend-config=python,stub-timeout-seconds={STUB_TIMEOUT_S}",
    ]


Launch = Callable[[Path, Workspace, TritonConfig], tuple[list[str], dict[str, str]]]


def dispensable_models(repository: Path) -> list[str]:
    """The models that the rest of this repository can do without: the draft, if the repository was
    packaged with on_draft_failure: plain.
    """
    path = repository / BLS_MODEL / "config.pbtxt"
    if not path.is_file():
        return []
    policy = model_config.read(path).parameters["on_draft_failure"].string_value
    return [DRAFT_MODEL] if policy == "plain" else []


def _backends(wheel: Path, workspace: Workspace) -> Path:
    """Make a backend directory like the wheel's, with the stub for this interpreter's version where
    the backend looks for it. Raises BackendUnavailable if the wheel has no such stub.
    """
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    stub = wheel / "python_backend_stubs" / version / "triton_python_backend_stub"
    if not stub.is_file():
        raise BackendUnavailable(
            f"Triton's Python backend for Python {version}",
            hint="Use a Python that the nvidia-pytriton wheel has a stub for.",
        )
    python = workspace.path / "backends" / "python"
    python.mkdir(parents=True)
    for file in (wheel / "backends" / "python").iterdir():
        if file.is_file():
            (python / file.name).symlink_to(file)
    # A copy, since the backend makes the file executable if it is not.
    shutil.copy(stub, python / stub.name)
    return python.parent


class TritonServer:
    """A running tritonserver: `with TritonServer(repository, config) as server: ...
    server.grpc_url`.

    Raises ServerError with the end of the log if it cannot start: a port is in use, or the server
    dies or is not ready within start_timeout_s. A server that dies of a lock exception is started
    once more; progress and the new log say so. log_path: defaults to a file that is removed with
    the server. launch: makes the command and its environment, as `launch_command` does.
    """

    def __init__(
        self,
        repository: Path,
        config: TritonConfig | None = None,
        *,
        log_path: Path | None = None,
        progress: Progress | None = None,
        launch: Launch | None = None,
    ) -> None:
        self.repository = Path(repository)
        self._make_command: Launch = launch or launch_command
        self.config = config or TritonConfig()
        self._progress: Progress = progress or (lambda done, total, what: None)
        self._server = ServerProcess(
            "tritonserver",
            log_path=log_path,
            progress=progress,
            # Triton prints wide tables of options after every error. They are left out, since each
            # error in them was also printed as a line before.
            is_noise=lambda line: line[0] in "+|",
            cause=model_death,
        )
        self._ports: dict[str, int] = {}

    @property
    def http_url(self) -> str:
        return f"{self.config.host}:{self._ports['http']}"

    @property
    def grpc_url(self) -> str:
        return f"{self.config.host}:{self._ports['grpc']}"

    @property
    def metrics_url(self) -> str:
        """The whole URL of the Prometheus page."""
        return f"http://{self.config.host}:{self._ports['metrics']}/metrics"

    @property
    def pid(self) -> int:
        """The process id of tritonserver itself."""
        return self._server.pid

    @property
    def log_path(self) -> Path:
        return self._server.log_path

    def __enter__(self) -> TritonServer:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Start the server, and return when the models can be called."""
        if not self.repository.is_dir():
            raise ServerError(
                f"no model repository at {self.repository}",
                hint="Package one first: toolkit package CONFIG.",
            )
        try:
            self._start_once()
        except ServerError as error:
            if not met_lock_exception(error):
                raise
            self._progress(0, None, f"{STARTED_AGAIN}, after a lock exception")
            self._start_once(preamble=f"{error}\n{STARTED_AGAIN}:\n")

    def _start_once(self, preamble: str = "") -> None:
        requested_ports = {
            "http": self.config.http_port,
            "grpc": self.config.grpc_port,
            "metrics": self.config.metrics_port,
        }
        for attempt in range(PORT_ATTEMPTS):
            self._ports = reserve_ports(self.config.host, requested_ports)
            try:
                self._server.launch(
                    self._command,
                    dispensable=dispensable_models(self.repository),
                    preamble=preamble,
                )
                self._server.wait_until(
                    self._is_ready, self.config.start_timeout_s, "waiting for tritonserver"
                )
                return
            except BaseException as error:
                self.stop()
                # Another process may take a free port before the server binds it. Then other free
                # ports are tried.
                can_retry = attempt + 1 < PORT_ATTEMPTS and 0 in requested_ports.values()
                if not (is_taken(error) and can_retry):
                    raise

    def _command(self, workspace: Workspace) -> tuple[list[str], dict[str, str]]:
        ports = {f"{name}_port": port for name, port in self._ports.items()}
        config = self.config.model_copy(update=ports)
        return self._make_command(self.repository, workspace, config)

    def _is_ready(self) -> bool:
        # No proxy, since the server is on this machine.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(f"http://{self.http_url}/v2/health/ready", timeout=5) as response:
                if response.status != 200:
                    return False
            # Triton listens for metrics last, some 50 ms after it says that it is ready.
            with opener.open(self.metrics_url, timeout=5):
                return True
        except (OSError, urllib.error.URLError):
            return False

    def check(self) -> None:
        """Raise ServerError, with the end of the log, if the server is no longer running."""
        self._server.check()

    def log_tail(self, lines: int = LOG_TAIL_LINES) -> str:
        """The last lines that the server printed, also after it died."""
        return self._server.log_tail(lines)

    def stop(self) -> None:
        """Stop the server and everything it started. May be called again, and after it died."""
        self._server.stop()
