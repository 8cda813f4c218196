"""Describe this machine and this program: for the keys of measurements, for provenance, and for
`toolkit doctor`. No heavy imports.
"""

from __future__ import annotations

import functools
import os
import platform
import re
import subprocess
import sys
from pathlib import Path

__all__ = [
    "available_memory_bytes",
    "cpu_flags",
    "git_commit",
    "gpus",
    "machine",
    "memory_bytes",
    "obstacle",
    "program",
    "usable_cores",
]

INSTRUCTION_SETS = (
    "avx2",
    "avx512f",
    "avx512_vnni",
    "avx_vnni",
    "avx512_bf16",
    "amx_int8",
    "amx_bf16",
)


def machine() -> dict[str, str]:
    """What a measurement depends on: the processor and its instruction sets, the cores that this
    process may use, memory, GPUs.
    """
    return {
        "cpu": _cpu_info().get("model name", platform.machine()),
        "instruction_sets": " ".join(name for name in INSTRUCTION_SETS if name in cpu_flags()),
        "cores": str(usable_cores()),
        "memory_gib": str(round(memory_bytes() / 2**30)),
        "gpus": ", ".join(gpus()) or "none",
    }


@functools.cache
def _cpu_info() -> dict[str, str]:
    """The first processor of /proc/cpuinfo."""
    try:
        text = (
            Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").split("\n\n", 1)[0]
        )
    except OSError:
        return {}
    rows = (line.partition(":") for line in text.splitlines())
    return {name.strip(): value.strip() for name, _, value in rows}


def cpu_flags() -> frozenset[str]:
    return frozenset(_cpu_info().get("flags", "").split())


def usable_cores() -> int:
    return len(os.sched_getaffinity(0))


def obstacle(path: Path) -> str | None:
    """Why no folder can be made at path, or written to; None if that is possible."""
    at = next(each for each in (path, *path.parents) if os.path.lexists(each))
    if not at.is_dir():
        return f"{at} is {'a link to no folder' if at.is_symlink() else 'a file'}"
    return None if os.access(at, os.W_OK) else f"{at} cannot be written to"


def memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def available_memory_bytes() -> int:
    """What a new program could take without swapping, by the kernel's estimate; half of the memory
    where the kernel gives none.
    """
    try:
        rows = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        rows = []
    for name, _, value in (row.partition(":") for row in rows):
        if name == "MemAvailable":
            return int(value.split()[0]) * 1024
    return memory_bytes() // 2


def gpus() -> list[str]:
    """The names of the NVIDIA GPUs, as the driver lists them; empty if there is none."""
    names = []
    for file in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information")):
        match = re.search(
            r"^Model:\s*(.+)$", file.read_text(encoding="utf-8", errors="replace"), re.MULTILINE
        )
        names.append(match.group(1).strip() if match else "NVIDIA GPU")
    return names


@functools.cache
def git_commit() -> str | None:
    """The commit that this program is run from, with a `+` if tracked files differ from it. None
    outside a clone.
    """
    root = Path(__file__).parents[2]
    if not (root / ".git").exists():
        return None

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(root), *arguments]
        return subprocess.run(
            command, capture_output=True, text=True, timeout=10, check=True
        ).stdout.strip()

    try:
        commit = git("rev-parse", "HEAD")
        is_changed = bool(git("status", "--porcelain", "--untracked-files=no"))
        return f"{commit}+" if is_changed else commit
    except (OSError, subprocess.SubprocessError):
        return None


def program() -> dict[str, str | None]:
    """The command line, and the versions of the toolkit and of Python."""
    from toolkit import __version__

    return {
        "command": " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "toolkit": __version__,
        "python": platform.python_version(),
        "git_commit": git_commit(),
    }
