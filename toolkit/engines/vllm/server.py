"""Starts vLLM's own OpenAI server on this machine, waits until it answers, and cleans up after it.

The server is three processes or more (`python -m vllm.entrypoints.openai.api_server`, EngineCore,
a Worker per rank). `toolkit.process` runs them in a private folder: sockets, temporary files and
shared memory go with the server, however it ends.

Where a cache folder is given, vLLM keeps what torch.compile made there, for the next start with the
same model and arguments. Only one server starts on a cache at a time, and a start that
fails empties it: a half-written entry must not break the next start.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from toolkit.config.schema import TritonConfig
from toolkit.engines.vllm.arguments import SPECULATION, command_flags
from toolkit.engines.vllm.sampling_plugin import DISTRIBUTION
from toolkit.engines.vllm.sampling_plugin import FOLDER as PLUGINS
from toolkit.errors import ServerError
from toolkit.interfaces import Progress
from toolkit.process.policies import forget_client_policy
from toolkit.process.server import PORT_ATTEMPTS, ServerProcess, is_taken, reserve_ports
from toolkit.process.workspace import Workspace

if TYPE_CHECKING:
    from collections.abc import Sequence

    from toolkit.openai_client import OpenAiClient

__all__ = ["VllmServer", "plugins_of", "preloaded", "root_cause", "server_command"]

MODULE = "vllm.entrypoints.openai.api_server"
PROBE = "Hello"  # one token after it shows that the engine answers
PROBE_TIMEOUT_S = 120.0
GONE_S = 15.0  # how long vLLM may take to end itself after its engine died
CACHE_LOCK = ".lock"
# Variables of this program's own environment that would change another Python.
NOT_INHERITED = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "PYTHONSTARTUP", "__PYVENV_LAUNCHER__")
# No reports to vLLM's makers, and nothing fetched: a deployment has all of its files.
ENVIRONMENT = {
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
}
# A line of a traceback that a process of the engine logs when it dies. The API server's own
# traceback, which follows, only says "See root cause above".
ENGINE_ERROR = re.compile(r"\((?!APIServer)(?P<process>\w+ pid=\d+)\) ERROR ")
CAUSE_LINES = 20
SOCKET_TOO_LONG = "sizeof(sockaddr_un.sun_path)"  # what ZeroMQ says of a path over 107 characters
# Threads that wait sleep, so that two servers, of which one is idle, do not disturb each other.
THREAD_POLICY = {"OMP_WAIT_POLICY": "PASSIVE"}


def server_command(
    python: Path, args: Mapping[str, Any], name: str, *, host: str, port: int
) -> list[str]:
    """The command that serves these arguments (fields of AsyncEngineArgs) under this name.

    generation_config `vllm`: sampling defaults are vLLM's own, as in Triton's backend, and not
    those in the checkpoint's generation_config.json; its end tokens hold either way.
    """
    served = {"generation_config": "vllm", **args, "served_model_name": name}
    command = [str(python), "-m", MODULE, *command_flags(served)]
    command += ["--host", host, "--port", str(port), "--disable-uvicorn-access-log"]
    if SPECULATION in args:  # refused without speculation
        command += ["--per-request-spec-decode-metrics", "detailed"]
    return command


class VllmServer:
    """A running server of vLLM: `with VllmServer(...) as server: ... server.url`.

    python: of the environment that has vLLM. args: fields of AsyncEngineArgs with this machine's
    paths. name: what clients call the model. variables: of the environment, which the arguments
    need. config: host, HTTP port (0: a free one) and the time that a start may take. cache: keeps
    compiled graphs; None: they go with the server. log_path: defaults to a file that is removed
    with the server. encode: the deployment's tokenizer, which the server has to agree with.

    Raises ServerError with the end of the log if it cannot start.
    """

    def __init__(
        self,
        python: Path,
        args: Mapping[str, Any],
        name: str,
        *,
        variables: Mapping[str, str] | None = None,
        config: TritonConfig | None = None,
        cache: Path | None = None,
        log_path: Path | None = None,
        progress: Progress | None = None,
        encode: Callable[[str], Sequence[int]] | None = None,
    ) -> None:
        self.name = name
        self.config = config or TritonConfig()
        self._python, self._args = python, dict(args)
        self._variables = dict(variables or {})
        self._cache, self._encode = cache, encode
        self._server = ServerProcess("vLLM", log_path=log_path, progress=progress, cause=root_cause)
        self._port = 0

    @property
    def url(self) -> str:
        """host:port of the OpenAI server."""
        return f"{self.config.host}:{self._port}"

    @property
    def metrics_url(self) -> str:
        """The whole URL of the Prometheus page."""
        return f"http://{self.url}/metrics"

    @property
    def pid(self) -> int:
        """The process id of vLLM's API server."""
        return self._server.pid

    @property
    def log_path(self) -> Path:
        return self._server.log_path

    def __enter__(self) -> VllmServer:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def client(self, timeout_s: float = 300.0, *, ignore_eos: bool = False) -> OpenAiClient:
        from toolkit.openai_client import OpenAiClient

        return OpenAiClient(
            self.url, self.name, timeout_s, encode=self._encode, ignore_eos=ignore_eos
        )

    def start(self) -> None:
        """Start the server, and return when it has generated a token."""
        with _locked(self._cache):
            try:
                self._start()
            except BaseException:
                self.stop()
                if self._cache is not None:
                    _empty(self._cache)
                raise

    def _start(self) -> None:
        requested = {"http": self.config.http_port}
        for attempt in range(PORT_ATTEMPTS):
            self._port = reserve_ports(self.config.host, requested)["http"]
            try:
                self._server.launch(self._command, in_workspace=True)
                doing = "starting vLLM"
                if SPECULATION not in self._args:
                    doing = f"{doing} without speculation"
                self._server.wait_until(self._is_healthy, self.config.start_timeout_s, doing)
                self._try_one_token()
                return
            except ServerError as error:
                self.stop()
                if SOCKET_TOO_LONG in error.log_tail:
                    raise ServerError(
                        "the path of the temporary folder is too long for vLLM's sockets:"
                        f" {tempfile.gettempdir()}",
                        log_tail=error.log_tail,
                        hint="Set TMPDIR to a folder with a shorter path, such as /tmp.",
                    ) from error
                can_retry = attempt + 1 < PORT_ATTEMPTS and self.config.http_port == 0
                if not (is_taken(error) and can_retry):
                    raise

    def _command(self, workspace: Workspace) -> tuple[list[str], dict[str, str]]:
        command = server_command(
            self._python, self._args, self.name, host=self.config.host, port=self._port
        )
        inherited = {name: value for name, value in os.environ.items() if name not in NOT_INHERITED}
        forget_client_policy(inherited)
        cache = self._cache or workspace.path / "cache"
        return command, {
            **THREAD_POLICY,
            **inherited,
            **preloaded(self._python, inherited, workspace.path),
            **plugins_of(Path(self._args["model"]), inherited, workspace.path),
            **ENVIRONMENT,
            **self._variables,
            "PATH": os.pathsep.join([str(self._python.parent), inherited.get("PATH", os.defpath)]),
            "TMPDIR": str(workspace.path / "tmp"),
            "VLLM_CACHE_ROOT": str(cache.absolute()),
            "VLLM_CONFIG_ROOT": str(workspace.path / "config"),
        }

    def _is_healthy(self) -> bool:
        with self.client(timeout_s=5) as client:
            return client.ready()

    def _try_one_token(self) -> None:
        """Raise ServerError if the server is healthy, and does not generate."""
        from toolkit.client import ClientError

        try:
            with self.client(timeout_s=PROBE_TIMEOUT_S) as client:
                client.generate(PROBE, max_tokens=1, temperature=0.0)
        except ClientError as error:
            self.check(wait_s=GONE_S)
            raise ServerError(
                f"vLLM is healthy, but its first request failed: {error}",
                log_tail=self.log_tail(),
                hint="The end of its log says why.",
            ) from error

    def check(self, *, wait_s: float = 0.0) -> None:
        """Raise ServerError, with the end of the log, if the server is no longer running.

        wait_s: after a failed request, how long to wait for the server to end: vLLM takes a moment
        to notice that its engine died.
        """
        deadline = time.monotonic() + wait_s
        self._server.check()
        while time.monotonic() < deadline:
            time.sleep(0.1)
            self._server.check()

    def paused(self) -> contextlib.AbstractContextManager[None]:
        """Take the processors from the server while the block runs. A rank that has nothing to do
        waits in a loop for a second before it sleeps: SpinCondition of
        vllm/distributed/device_communicators/shm_broadcast.py.
        """
        return self._server.paused()

    def log_tail(self) -> str:
        """The last lines that the server printed, also after it died."""
        return self._server.log_tail()

    def stop(self) -> None:
        """Stop the server and everything it started. May be called again, and after it died."""
        self._server.stop()


def root_cause(lines: Sequence[str]) -> list[str]:
    """The end of the errors that the first failing process of the engine logged: a worker's own, if
    one failed, and not EngineCore's about the worker.
    """
    errors = [(match["process"], line) for line in lines if (match := ENGINE_ERROR.match(line))]
    return [line for process, line in errors if process == errors[0][0]][-CAUSE_LINES:]


def preloaded(python: Path, inherited: Mapping[str, str], workspace: Path) -> dict[str, str]:
    """Intel's OpenMP, which the build for CPUs brings and its installation guide preloads: vLLM
    warns that speculation is much slower without it (vllm/v1/worker/cpu_worker.py).

    It is named through the workspace, since a space or a colon in its own path would end the name.
    """
    openmp = python.parents[1] / "lib" / "libiomp5.so"
    others = inherited.get("LD_PRELOAD", "")
    if not openmp.exists() or openmp.name in others:
        return {}
    linked = workspace / openmp.name
    linked.symlink_to(openmp.absolute())
    return {"LD_PRELOAD": " ".join(filter(None, [str(linked), others]))}


def plugins_of(model: Path, inherited: Mapping[str, str], workspace: Path) -> dict[str, str]:
    """vLLM finds the plugins that the engine directory brings as packages of its Python, and loads
    those that VLLM_PLUGINS names, if it is set.

    They are named through the workspace, since a colon in their own path would split the name.
    """
    folder = model / PLUGINS
    if not folder.is_dir():
        return {}
    linked = workspace / PLUGINS
    linked.symlink_to(folder.absolute())
    variables = {"PYTHONPATH": str(linked)}
    if "VLLM_PLUGINS" in inherited:
        names = filter(None, inherited["VLLM_PLUGINS"].split(","))
        variables["VLLM_PLUGINS"] = ",".join([*names, DISTRIBUTION])
    return variables


@contextlib.contextmanager
def _locked(cache: Path | None) -> Iterator[None]:
    """Let only one server start on this cache while the block runs."""
    if cache is None:
        yield
        return
    cache.mkdir(parents=True, exist_ok=True)
    lock = os.open(cache / CACHE_LOCK, os.O_CREAT | os.O_RDWR, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def _empty(cache: Path) -> None:
    for entry in cache.iterdir():
        if entry.name != CACHE_LOCK:
            shutil.rmtree(entry, ignore_errors=True)
