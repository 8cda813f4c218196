"""The C++ compiler of this machine and the instruction set of its CPU, for which it compiles."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
from pathlib import Path

__all__ = ["INSTRUCTION_SETS", "compiler_path", "compiler_version", "instruction_set"]

INSTRUCTION_SETS = (
    *("sse4_2", "avx", "avx2", "fma", "f16c", "avx_vnni"),
    *(
        "avx512f",
        "avx512bw",
        "avx512dq",
        "avx512vl",
        "avx512_vnni",
        "avx512_bf16",
        "avx512_fp16",
        "avx512ifma",
    ),
    *(
        "avx512vbmi",
        "avx512_vbmi2",
        "avx512_bitalg",
        "avx512_vpopcntdq",
        "amx_tile",
        "amx_int8",
        "amx_bf16",
    ),
)
"""Linux's names of the instruction sets that -march=native may use for arithmetic."""


def compiler_path() -> str | None:
    """$CXX if it is set, else g++. torch's own search for a compiler does the same."""
    return shutil.which(os.environ.get("CXX") or "g++")


@functools.cache
def compiler_version(path: str) -> str:
    """The first line of `--version`."""
    done = subprocess.run([path, "--version"], capture_output=True, text=True, check=False)
    return done.stdout.splitlines()[0] if done.returncode == 0 and done.stdout else "unknown"


@functools.cache
def instruction_set() -> tuple[str, ...]:
    """The names of INSTRUCTION_SETS that this CPU has."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return ()
    line = next((line for line in text.splitlines() if line.startswith("flags")), "")
    flags = set(line.split())
    return tuple(name for name in INSTRUCTION_SETS if name in flags)
