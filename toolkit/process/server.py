"""Runs one server under its supervisor: start, wait until it is ready, watch, stop."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO

from toolkit.errors import ServerError
from toolkit.interfaces import Progress
from toolkit.process import supervise
from toolkit.process.workspace import Workspace

__all__ = [
    "LOCK_EXCEPTION",
    "LOG_TAIL_LINES",
    "PORT_ATTEMPTS",
    "ServerProcess",
    "is_taken",
    "met_lock_exception",
    "reserve_ports",
    "supervised",
]

GRACE_S = 15.0  # from SIGTERM to SIGKILL
STOP_S = GRACE_S + 10  # until the supervisor itself is killed
POLL_S = 0.05
PORT_ATTEMPTS = 3
LOG_TAIL_LINES = 40
# What a tritonserver printed that died at start, twice in some thousand starts, on a machine with
# more work than cores. Nothing was wrong with the repository, and the next start went well.
LOCK_EXCEPTION = "boost::interprocess::lock_exception"

Command = tuple[list[str], dict[str, str]]  # with its whole environment


class ServerProcess:
    """A server process with its private folder and its log.

    program: its name in messages. log_path: defaults to a file that is removed with the server.
    is_noise: which lines of the log are left out of its end. cause: of its lines, those that say
    why it died, if they may be far from the end: they come first.
    """

    def __init__(
        self,
        program: str,
        *,
        log_path: Path | None = None,
        progress: Progress | None = None,
        is_noise: Callable[[str], bool] = lambda line: False,
        cause: Callable[[Sequence[str]], Sequence[str]] = lambda lines: (),
    ) -> None:
        self.program = program
        self.log_path = log_path or Path()
        self._own_log = log_path is None
        self._log: IO[bytes] | None = None
        self._progress: Progress = progress or (lambda done, total, what: None)
        self._is_noise, self._cause = is_noise, cause
        self._workspace = Path()
        self.process: subprocess.Popen[bytes] | None = None  # the supervisor

    @property
    def pid(self) -> int:
        """The process id of the server itself."""
        return int((self._workspace / supervise.PID_FILE).read_text())

    def launch(
        self,
        make_command: Callable[[Workspace], Command],
        *,
        dispensable: Sequence[str] = (),
        in_workspace: bool = False,
        preamble: str = "",
    ) -> None:
        """Start the server. dispensable: as `supervised`. in_workspace: run it in its private
        folder, so that all of its processes and their shared memory are recognised. preamble: what
        its log begins with.
        """
        workspace = Workspace.create()
        try:
            self._workspace = workspace.path
            if self._own_log:
                self.log_path = workspace.path / "server.log"
            self.log_path.parent.mkdir(parents=True, exist_ok=True)
            command, environment = make_command(workspace)
            # It stays open, so that it can be read after the server and its folder are gone.
            self._log = self.log_path.open("w+b")
            self._log.write(preamble.encode())
            self._log.flush()
            self.process = subprocess.Popen(
                supervised(command, workspace.path, dispensable, parent=os.getpid()),
                env=environment,
                cwd=workspace.path / "tmp" if in_workspace else None,
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

    def wait_until(self, is_ready: Callable[[], bool], timeout_s: float, doing: str) -> None:
        """Return when `is_ready` returns true. doing: what is shown meanwhile, such as `starting
        vLLM`. Raises ServerError if the server dies or is not ready in time.
        """
        started = time.monotonic()
        while not is_ready():
            self.check()
            waited = time.monotonic() - started
            if waited > timeout_s:
                raise ServerError(
                    f"{self.program} was not ready after {timeout_s:g} s",
                    log_tail=self.log_tail(),
                    hint=(
                        "The end of its log shows what it waits for. If it is only slow, raise"
                        " triton.start_timeout_s."
                    ),
                )
            self._progress(0, None, f"{doing}, {waited:.0f} s")
            time.sleep(POLL_S)

    def check(self) -> None:
        """Raise ServerError, with the end of the log, if the server is no longer running."""
        if self.process is None:
            raise ServerError(f"{self.program} is not running", hint="Start it first.")
        code = self.process.poll()
        if code is not None:
            raise ServerError(
                f"{self.program} {_how_it_ended(code)}",
                log_tail=self.log_tail(),
                hint=_why(code),
            )

    def log_tail(self, lines: int = LOG_TAIL_LINES) -> str:
        """The last lines that the server printed, also after it died; before them the cause."""
        if self._log is None:
            return ""
        text = os.pread(self._log.fileno(), os.fstat(self._log.fileno()).st_size, 0).decode(
            "utf-8", errors="replace"
        )
        kept = [line for line in text.splitlines() if line and not self._is_noise(line)]
        return "\n".join([*self._cause(kept[:-lines]), *kept[-lines:]])

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Take the processors from the server and everything it started, while the block runs."""
        server = self.pid
        _signal_group(server, signal.SIGSTOP)
        try:
            yield
        finally:
            _signal_group(server, signal.SIGCONT)

    def stop(self) -> None:
        """Stop the server and everything it started. May be called again, and after it died."""
        process, self.process = self.process, None
        if process is None:
            return
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if process.returncode < 0:  # the supervisor was killed: the server died with it, no more
            supervise.clean(self._workspace)
        if self._log is not None:
            self._log.close()
            self._log = None


def supervised(
    command: list[str], workspace: Path, dispensable: Sequence[str], *, parent: int
) -> list[str]:
    """The command that runs `command` under the supervisor. dispensable: models that the server can
    do without. parent: the id of the process that the supervisor watches; 0: none.
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
    return [*supervisor, *dispensable, "--", *command]


def _signal_group(server: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):  # it has died; `check` says so
        os.killpg(server, number)


def _how_it_ended(code: int) -> str:
    if code == supervise.STUB_DIED:
        return "was stopped, because the Python process of a model had died"
    if code < 0:
        return f"has lost its supervisor, which was killed by {signal.Signals(-code).name}"
    if code > 128:
        return f"was killed by {signal.Signals(code - 128).name}"
    return f"ended with exit code {code}"


def _why(code: int) -> str:
    if -signal.SIGKILL in (code, 128 - code):
        return (
            "Its log cannot say why: it was killed from outside, or by the kernel, which dmesg"
            " would show, because memory had run out."
        )
    return "The end of its log says why."


def is_taken(error: BaseException) -> bool:
    """Whether a server did not start because another process had taken its port: it was free when
    it was reserved.
    """
    return isinstance(error, ServerError) and "ddress already in use" in error.log_tail


def met_lock_exception(error: BaseException) -> bool:
    """Whether a server died of a lock in its own shared memory: another start may go well."""
    return isinstance(error, ServerError) and LOCK_EXCEPTION in error.log_tail


def reserve_ports(host: str, requested_ports: Mapping[str, int]) -> dict[str, int]:
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
