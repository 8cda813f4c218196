"""`python -m toolkit.triton.launch REPOSITORY [tritonserver arguments]`: serve a packaged
repository.

`launch.sh` in the repository runs this, in systemd, a container or a terminal. It uses the same
command, environment and supervisor as `TritonServer`, but no parent process is watched. It is an
entry point like the CLI, so it prints and exits. Packaged repositories name this module, so it must
not move: an outdated repository also calls it, and is then told to be packaged again.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import NoReturn

from toolkit.config.hosts import OPEN_LISTENER
from toolkit.errors import ToolkitError, UsageError
from toolkit.process import supervise
from toolkit.process.server import supervised
from toolkit.process.workspace import Workspace
from toolkit.triton.access import open_listeners
from toolkit.triton.process.server import dispensable_models, launch_command

__all__ = ["main"]


USAGE = "usage: python -m toolkit.triton.launch REPOSITORY [tritonserver arguments]"


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
        workspace = Workspace.create(inheritable=True)
    except ToolkitError as error:
        _exit(error)
    try:
        command, environment = launch_command(repository, workspace)
    except ToolkitError as error:
        supervise.clean(workspace.path)
        _exit(error)
    command += arguments[1:]
    for listener in open_listeners(command):
        warning = OPEN_LISTENER.format(address="this address")
        print(
            f"warning: {listener}: {warning}; put a proxy or a firewall before it", file=sys.stderr
        )
    os.execve(
        sys.executable,
        supervised(
            command,
            workspace.path,
            dispensable_models(repository),
            parent=0,
        ),
        environment,
    )


def _exit(error: ToolkitError) -> NoReturn:
    print(error, file=sys.stderr)
    sys.exit(error.exit_code)


if __name__ == "__main__":
    main(sys.argv[1:])
