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

from toolkit.errors import ToolkitError
from toolkit.triton.process.server import Workspace, launch_command, supervised

__all__ = ["main"]


def main(arguments: list[str]) -> None:
    if not arguments or arguments[0] in ("-h", "--help"):
        sys.exit("usage: python -m toolkit.triton.launch REPOSITORY [tritonserver arguments]")
    try:
        workspace = Workspace.create(inheritable=True)
        command, environment = launch_command(Path(arguments[0]), workspace)
    except ToolkitError as error:
        sys.exit(str(error))
    os.execve(
        sys.executable,
        supervised([*command, *arguments[1:]], workspace.path, Path(arguments[0]), parent=0),
        environment,
    )


if __name__ == "__main__":
    main(sys.argv[1:])
