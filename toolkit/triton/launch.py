"""`python -m toolkit.triton.launch REPOSITORY [tritonserver arguments]`: become the tritonserver of a packaged repository.

This is what `launch.sh` beside the models runs: the same command and environment as `TritonServer`, without the supervision,
for people who have their own (systemd, a container, a terminal). An entry point like the CLI, so it prints and exits.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from toolkit.errors import ToolkitError
from toolkit.triton.server import Workspace, launch_command

__all__ = ["main"]


def main(arguments: list[str]) -> None:
    if not arguments or arguments[0] in ("-h", "--help"):
        sys.exit("usage: python -m toolkit.triton.launch REPOSITORY [tritonserver arguments]")
    try:
        command, environment = launch_command(Path(arguments[0]), Workspace.create(inheritable=True))
    except ToolkitError as error:
        sys.exit(str(error))
    os.execve(command[0], [*command, *arguments[1:]], environment)


if __name__ == "__main__":
    main(sys.argv[1:])
