"""`python -m toolkit.triton.launch REPOSITORY [tritonserver arguments]`: serve a packaged
repository.

This is what `launch.sh` beside the models runs, in systemd, a container or a terminal: the same
command, environment and supervisor as those of `TritonServer`, but nobody's child. An entry point
like the CLI, so it prints and exits. It stays where it is: packaged repositories name it, also
those that have to be told that they are outdated.
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
