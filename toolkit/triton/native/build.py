"""Compiles the backend (backend.cpp) for a model repository."""

from __future__ import annotations

import errno
import os
import subprocess
from pathlib import Path
from typing import Literal

from toolkit.errors import StageError
from toolkit.pipeline.toolchain import compiler_path

__all__ = ["BACKEND", "LIBRARY", "backend_name", "build_backend"]

BACKEND = "toolkit"  # `backend` in config.pbtxt
LIBRARY = f"libtriton_{BACKEND}.so"  # the name that Triton looks for, beside the model first
SOURCE = Path(__file__).with_name("backend.cpp")
# No -march: a repository is copied to other machines, and nothing here is computed.
FLAGS = (
    *("-std=c++17", "-O2", "-fPIC", "-shared", "-pthread"),
    *("-fvisibility=hidden", "-static-libgcc", "-static-libstdc++"),
)


def backend_name(choice: Literal["auto", "native", "python"]) -> str:
    """`backend` in config.pbtxt, for what the YAML says in triton.backend."""
    is_native = choice == "native" or (choice == "auto" and compiler_path() is not None)
    return BACKEND if is_native else "python"


def build_backend(out_file: Path) -> None:
    """Compile the backend to `out_file` (two seconds of one core).

    Raises StageError with the compiler's last lines, or if there is no compiler, and OSError if the
    disk is full.
    """
    compiler = compiler_path()
    if compiler is None:
        raise StageError(
            "package",
            "no C++ compiler was found",
            hint="Install g++, or set triton.backend: python.",
        )
    command = [compiler, *FLAGS, str(SOURCE), "-o", str(out_file)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    disk_full = os.strerror(errno.ENOSPC)
    if done.returncode != 0 and disk_full in done.stderr:
        raise OSError(errno.ENOSPC, disk_full, str(out_file))
    if done.returncode != 0:
        tail = "\n".join(done.stderr.strip().splitlines()[-12:])
        raise StageError(
            "package",
            f"the backend did not compile:\n{tail}",
            where=SOURCE,
            hint="Set triton.backend: python to package without it.",
        )
