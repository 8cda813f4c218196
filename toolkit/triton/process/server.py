"""Finds a tritonserver, starts it on a repository, waits until it serves, and cleans up after it.

The server is the one on PATH, else the one inside the nvidia-pytriton wheel. The wheel's server is
complete, but needs some preparation: its libraries and the interpreter's libpython on
LD_LIBRARY_PATH, and the Python backend's stub for the interpreter's version beside the backend.
This is prepared in a private workspace; nothing is written into site-packages.

A workspace is a folder in the temporary directory. The server and everything it starts hold its
lock, so a leftover is recognised exactly: its lock is free. The name of the workspace is also the
prefix of the server's shared-memory regions. The next start sweeps leftovers, in case even
`supervise` was killed before it could clean up.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import importlib.util
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO

from toolkit.config.schema import TritonConfig
from toolkit.errors import BackendUnavailable, ServerError
from toolkit.interfaces import Progress
from toolkit.triton.package import model_config
from toolkit.triton.process import supervise
from toolkit.triton.tensors.contract import BLS_MODEL, DRAFT_MODEL, PACKAGE_VERSION

__all__ = [
    "Launch",
    "ServerInstall",
    "TritonServer",
    "Workspace",
    "find_libpython",
    "find_server",
    "launch_command",
    "server_arguments",
]

WORKSPACE_PREFIX = "toolkit-serve-"
LOCK_FILE = "lock"
STALE_S = 60.0  # a workspace that still has no lock file after this time was abandoned
# Enough for a model that loads torch and compiled packages from a slow disk. Triton's default: 30.
STUB_TIMEOUT_S = 300
EXIT_TIMEOUT_S = 5  # how long a stopping server waits for running requests
GRACE_S = 15.0  # from SIGTERM to SIGKILL
PORT_ATTEMPTS = 3
LOG_TAIL_LINES = 40
# As model.yaml (YAML) or config.pbtxt (text format of protobuf) state it.
PACKAGED_VERSION = re.compile(
    r'package_version(?:: |"\s+value:? \{\s+string_value: ")(?P<version>\d+)'
)
# Waiting OpenMP threads sleep. On two cores, target forwards of the quickstart pair (INT8, 1 token,
# 2 threads) take 0.60 ms at best with either policy. At the median on a busy machine they take 1.0
# to 1.7 ms when threads spin, and 0.66 ms when they sleep. ACTIVE made served tokens 2.5 times
# slower. A policy that the environment states takes precedence.
THREAD_POLICY = {"OMP_WAIT_POLICY": "PASSIVE"}


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


def find_server() -> ServerInstall:
    """The tritonserver on PATH, else the one in the installed nvidia-pytriton wheel. Raises
    BackendUnavailable if there is neither.
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


@dataclass(frozen=True, slots=True)
class Workspace:
    """The private folder of one server. lock: the open file descriptor that marks it as in use."""

    path: Path
    lock: int

    @classmethod
    def create(cls, *, inheritable: bool = False) -> Workspace:
        """Sweep the workspaces of servers that are gone, then make a new one. inheritable: the lock
        stays held after an exec.
        """
        sweep(Path(tempfile.gettempdir()))
        path = Path(tempfile.mkdtemp(prefix=WORKSPACE_PREFIX))
        (path / "tmp").mkdir()
        making = path / "making"
        lock = os.open(making, os.O_CREAT | os.O_RDWR, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX)
        os.set_inheritable(lock, inheritable)
        making.rename(path / LOCK_FILE)
        return cls(path, lock)

    def close(self) -> None:
        """Release the lock. Processes that inherited it still hold it."""
        os.close(self.lock)


@contextlib.contextmanager
def private_folder() -> Iterator[Path]:
    """A folder that exists until the block ends. If the process is killed before, the next server
    start sweeps it away.
    """
    workspace = Workspace.create()
    try:
        yield workspace.path
    finally:
        supervise.clean(workspace.path)
        workspace.close()


def sweep(folder: Path) -> None:
    """Remove the workspaces and the shared memory of servers that are gone."""
    for path in folder.glob(f"{WORKSPACE_PREFIX}*"):
        try:
            lock = os.open(path / LOCK_FILE, os.O_RDWR)
        except FileNotFoundError:
            # The folder itself may also be gone: its own server has just ended.
            with contextlib.suppress(FileNotFoundError):
                if time.time() - path.stat().st_mtime > STALE_S:
                    supervise.clean(path)
            continue
        except OSError:
            continue  # it belongs to another user
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            supervise.clean(path)
        except BlockingIOError:
            pass  # in use
        finally:
            os.close(lock)


def launch_command(
    repository: Path, workspace: Workspace, config: TritonConfig | None = None
) -> tuple[list[str], dict[str, str]]:
    """The (command, environment) that serve `repository` on loopback. Ports of 0 in the config
    leave Triton's defaults.

    Raises BackendUnavailable if there is no tritonserver or no libpython for its Python backend,
    and ServerError for a repository of another package version.
    """
    config = config or TritonConfig()
    _check_package_version(repository)
    install = find_server()
    command = [str(install.binary), *server_arguments(repository, config)]
    command.append(f"--backend-config=python,shm-region-prefix-name={workspace.path.name}-")
    environment = {**THREAD_POLICY, **os.environ}
    # The stub finds its packages through the first `python3` on PATH, which is also how it
    # recognises a virtual environment.
    environment["PATH"] = os.pathsep.join(
        [str(Path(sys.executable).parent), environment.get("PATH", os.defpath)]
    )
    # Compiled packages are unpacked into the temporary directory. In the shared one they would stay
    # if the server were killed.
    environment["TMPDIR"] = str(workspace.path / "tmp")
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
        f"--exit-timeout-secs={EXIT_TIMEOUT_S}",
        f"--backend-config=python,stub-timeout-seconds={STUB_TIMEOUT_S}",
    ]


Launch = Callable[[Path, Workspace, TritonConfig], tuple[list[str], dict[str, str]]]


def supervised(command: list[str], workspace: Path, repository: Path, *, parent: int) -> list[str]:
    """The command that runs `command` under the supervisor. parent: the id of the process that the
    supervisor watches; 0: none.
    """
    supervisor = [
        sys.executable,
        "-I",
        "-S",
        supervise.__file__,
        str(parent),
        str(workspace),
        str(GRACE_S),
    ]
    return [*supervisor, *_dispensable_models(repository), "--", *command]


def _dispensable_models(repository: Path) -> list[str]:
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
    dies or is not ready within start_timeout_s. log_path: defaults to a file that is removed with
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
        self.log_path = log_path or Path()
        self._own_log = log_path is None
        self._log: IO[bytes] | None = None
        self._progress: Progress = progress or (lambda done, total, what: None)
        self._process: subprocess.Popen[bytes] | None = None
        self._workspace = Path()
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
        return int((self._workspace / supervise.PID_FILE).read_text())

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
        requested_ports = {
            "http": self.config.http_port,
            "grpc": self.config.grpc_port,
            "metrics": self.config.metrics_port,
        }
        for attempt in range(PORT_ATTEMPTS):
            self._ports = _reserve(self.config.host, requested_ports)
            try:
                self._launch()
                self._wait_until_ready()
                return
            except BaseException as error:
                self.stop()
                # Another process may take a free port before the server binds it. Then other free
                # ports are tried.
                is_taken = (
                    isinstance(error, ServerError) and "ddress already in use" in error.log_tail
                )
                can_retry = attempt + 1 < PORT_ATTEMPTS and 0 in requested_ports.values()
                if not (is_taken and can_retry):
                    raise

    def _launch(self) -> None:
        workspace = Workspace.create()
        try:
            self._workspace = workspace.path
            if self._own_log:
                self.log_path = workspace.path / "server.log"
            self.log_path.parent.mkdir(parents=True, exist_ok=True)
            ports = {f"{name}_port": port for name, port in self._ports.items()}
            command, environment = self._make_command(
                self.repository, workspace, self.config.model_copy(update=ports)
            )
            # It stays open, so that it can be read after the server and its folder are gone.
            self._log = self.log_path.open("w+b")
            self._process = subprocess.Popen(
                supervised(command, workspace.path, self.repository, parent=os.getpid()),
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                # A Ctrl-C in our terminal must reach only us. We then stop the server in order.
                start_new_session=True,
                pass_fds=[workspace.lock],
            )
        except BaseException:
            supervise.clean(workspace.path)
            raise
        finally:
            workspace.close()

    def _wait_until_ready(self) -> None:
        started = time.monotonic()
        while not self._is_ready():
            self.check()
            waited = time.monotonic() - started
            if waited > self.config.start_timeout_s:
                raise ServerError(
                    f"tritonserver was not ready after {self.config.start_timeout_s:g} s",
                    log_tail=self.log_tail(),
                    hint=(
                        "The end of its log shows what it waits for. If it is only slow, raise"
                        " triton.start_timeout_s."
                    ),
                )
            self._progress(int(waited), None, f"waiting for tritonserver, {waited:.0f} s")
            time.sleep(0.05)

    def _is_ready(self) -> bool:
        # No proxy, since the server is on this machine.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(f"http://{self.http_url}/v2/health/ready", timeout=5) as response:
                return bool(response.status == 200)
        except (OSError, urllib.error.URLError):
            return False

    def check(self) -> None:
        """Raise ServerError, with the end of the log, if the server is no longer running."""
        if self._process is None:
            raise ServerError("tritonserver is not running", hint="Start it first.")
        code = self._process.poll()
        if code is not None:
            raise ServerError(
                f"tritonserver {_how_it_ended(code)}",
                log_tail=self.log_tail(),
                hint="The end of its log says why.",
            )

    def log_tail(self, lines: int = LOG_TAIL_LINES) -> str:
        """The last lines that the server printed, also after it died."""
        if self._log is None:
            return ""
        text = os.pread(self._log.fileno(), os.fstat(self._log.fileno()).st_size, 0).decode(
            "utf-8", errors="replace"
        )
        # Triton prints wide tables of options after every error. They are left out, since each
        # error in them was also printed as a line before.
        return "\n".join(
            [line for line in text.splitlines() if line and line[0] not in "+|"][-lines:]
        )

    def stop(self) -> None:
        """Stop the server and everything it started. May be called again, and after it died."""
        process, self._process = self._process, None
        if process is None:
            return
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(GRACE_S + 10)
        except subprocess.TimeoutExpired:
            process.kill()  # kills the supervisor; the server dies with it
            process.wait()
            supervise.clean(self._workspace)
        if self._log is not None:
            self._log.close()
            self._log = None


def _how_it_ended(code: int) -> str:
    if code == supervise.STUB_DIED:
        return "was stopped, because the Python process of a model had died"
    if code > 128:
        return f"was killed by {signal.Signals(code - 128).name}"
    return f"ended with exit code {code}"


def _reserve(host: str, requested_ports: dict[str, int]) -> dict[str, int]:
    """A port for each protocol: the requested one if it is free, or any free one for 0. Raises
    ServerError that names a port in use.
    """
    sockets: list[socket.socket] = []
    ports: dict[str, int] = {}
    try:
        for protocol, port in requested_ports.items():
            probe = socket.socket()
            sockets.append(probe)
            # A port in TIME_WAIT counts as free.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, port))
            except OSError as error:
                hint = (
                    f"Stop the program that listens there, or set triton.{protocol}_port to another"
                    " port, or to 0 for a free one."
                )
                if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
                    hint = (
                        "Set triton.host to a name or address of this machine; the default is"
                        " 127.0.0.1."
                    )
                raise ServerError(
                    f"{protocol} port {port} on {host} cannot be used: {error.strerror}",
                    hint=hint,
                ) from error
            ports[protocol] = int(probe.getsockname()[1])
    finally:
        for probe in sockets:
            probe.close()
    return ports
