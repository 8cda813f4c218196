"""`python -m toolkit.triton.launch REPOSITORY [tritonserver arguments]`: serve a packaged
repository.

`launch.sh` in the repository runs this, in systemd, a container or a terminal. It uses the same
command, environment and supervisor as `TritonServer`, and copies what the server prints. A server
that dies of a lock exception before it is ready is started once more, as there; whatever happens
later is for the caller's own supervisor. It is an entry point like the CLI, so it prints and exits.
Packaged repositories name this module, so it must not move: an outdated repository also calls it,
and is then told to be packaged again.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import IO, NoReturn

from toolkit.errors import ToolkitError, UsageError
from toolkit.process import supervise
from toolkit.process.server import LOCK_EXCEPTION, supervised
from toolkit.process.workspace import Workspace
from toolkit.triton.access import LISTENER_WARNING, open_listeners
from toolkit.triton.process.server import STARTED_AGAIN, dispensable_models, launch_command

__all__ = ["main"]


USAGE = "usage: python -m toolkit.triton.launch REPOSITORY [tritonserver arguments]"
# Triton opens its ports when all models are loaded, and prints a line for each.
READY = re.compile(rb"Started (GRPCInferenceService|HTTPService|Metrics Service) at")


def main(arguments: list[str]) -> None:
    if arguments and arguments[0] in ("-h", "--help"):
        print(USAGE)
        return
    if not arguments:
        _exit(UsageError("which repository?", hint=USAGE))
    repository = Path(arguments[0])
    if not any(repository.glob("*/config.pbtxt")):
        what = "holds no model of a packaged repository (MODEL/config.pbtxt)"
        _exit(UsageError(what, where=repository, hint="Package one: toolkit package CONFIG."))
    try:
        code, met_lock_exception = _serve(repository, arguments[1:])
        if met_lock_exception:
            print(f"launch: {STARTED_AGAIN}, after a lock exception", file=sys.stderr, flush=True)
            code, _ = _serve(repository, arguments[1:])
    except ToolkitError as error:
        _exit(error)
    sys.exit(code)


def _serve(repository: Path, arguments: list[str]) -> tuple[int, bool]:
    """Serve until the server ends, or this process is asked to end. Returns the exit code, and
    whether the server met a lock exception before it was ready. Raises ToolkitError if the
    repository cannot be served here.
    """
    workspace = Workspace.create()
    try:
        command, environment = launch_command(repository, workspace)
        command += arguments
        _warn_of_listeners(command)
        server = subprocess.Popen(
            supervised(
                command,
                workspace.path,
                dispensable_models(repository),
                parent=os.getpid(),
            ),
            env=environment,
            stderr=subprocess.PIPE,
            pass_fds=[workspace.lock],
        )
    except BaseException:
        supervise.clean(workspace.path)
        raise
    finally:
        workspace.close()
    assert server.stderr is not None
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        met_lock_exception = _copy(server.stderr)
    except KeyboardInterrupt:
        met_lock_exception = False
        server.terminate()
        _copy(server.stderr)
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    return server.wait(), met_lock_exception


def _warn_of_listeners(command: list[str]) -> None:
    for listener in open_listeners(command):
        print(f"warning: {listener}: {LISTENER_WARNING}", file=sys.stderr)


def _copy(log: IO[bytes]) -> bool:
    """Print what the server prints, until it ends. Returns whether it met a lock exception before
    it was ready.
    """
    is_ready = met_lock_exception = False
    for line in log:
        sys.stderr.buffer.write(line)
        sys.stderr.buffer.flush()
        is_ready = is_ready or READY.search(line) is not None
        met_lock_exception = met_lock_exception or LOCK_EXCEPTION.encode() in line
    return met_lock_exception and not is_ready


def _exit(error: ToolkitError) -> NoReturn:
    print(error, file=sys.stderr)
    sys.exit(error.exit_code)


if __name__ == "__main__":
    main(sys.argv[1:])
