"""Run a builder, write its output to a file, and show its milestones as progress.

The builder has its own process group and ends when this process ends, so an interrupted or failed
build leaves no process and no container behind.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import signal
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from toolkit.errors import BackendUnavailable
from toolkit.facts.trtllm_build import MILESTONES
from toolkit.interfaces import Progress

__all__ = ["BuildOutcome", "run_build"]

PR_SET_PDEATHSIG = 1
STOP_TIMEOUT_S = 30
STAMP = re.compile(r"^\[[^\]]+\] (\[[A-Z-]+\] )?\[[A-Z]\] ")  # [11/16/2024-00:05:47] [TRT-LLM] [I]


@dataclass(frozen=True, slots=True)
class BuildOutcome:
    """The end of a build. log: everything it printed on both streams, in order."""

    returncode: int
    log: str


def run_build(
    command: tuple[str, ...],
    log_path: Path,
    progress: Progress,
    *,
    what: str,
    world_size: int,
    cwd: Path,
    environment: Mapping[str, str],
    stop_command: tuple[str, ...] | None = None,
) -> BuildOutcome:
    """Run the command until it ends, with success or not.

    what: the beginning of every progress line, such as `target: `. stop_command: stops what the
    command started elsewhere, such as a container. Raises BackendUnavailable if the program cannot
    be started.
    """
    ranks = 0
    progress(0, world_size, f"{what}starting trtllm-build")
    # Loaded before the fork, since a forked child should not import or allocate much.
    libc = ctypes.CDLL(None, use_errno=True)

    def in_the_child() -> None:
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)

    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            cwd=cwd,
            env=dict(environment),
            text=True,
            errors="replace",
            start_new_session=True,
            preexec_fn=in_the_child,  # noqa: PLW1509 - one call into libc, loaded before the fork
        )
    except OSError as error:
        raise BackendUnavailable(
            command[0], hint=f"It could not be started: {error.strerror}."
        ) from error
    try:
        assert process.stdout is not None  # it is a pipe
        with process.stdout as lines, log_path.open("w", encoding="utf-8") as log:
            for line in lines:
                log.write(line)
                log.flush()
                milestone = _milestone(line)
                if milestone is not None:
                    ranks += milestone == MILESTONES[-1][1]
                    progress(ranks, world_size, f"{what}{milestone}")
        returncode = process.wait()
    except BaseException:
        _stop(process, stop_command)
        raise
    _end_group(process)  # a killed builder may leave workers
    return BuildOutcome(returncode, log_path.read_text(encoding="utf-8", errors="replace"))


def _milestone(line: str) -> str | None:
    text = STAMP.sub("", line)
    return next((milestone for start, milestone in MILESTONES if text.startswith(start)), None)


def _stop(process: subprocess.Popen[str], stop_command: tuple[str, ...] | None) -> None:
    if stop_command is not None:
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            subprocess.run(stop_command, capture_output=True, timeout=STOP_TIMEOUT_S, check=False)
    _end_group(process)
    process.wait()


def _end_group(process: subprocess.Popen[str]) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):  # the group has ended already
        os.killpg(process.pid, signal.SIGKILL)
