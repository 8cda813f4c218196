"""Explain why a build failed, from its exit status and its log."""

from __future__ import annotations

import re
import signal

from toolkit.facts.trtllm_build import FAILURES, Failure

__all__ = ["explain_failure"]

KILLED = next(failure for failure in FAILURES if failure.id == "killed")
SHELL_KILLED = 128 + signal.SIGKILL


def explain_failure(returncode: int, log: str) -> tuple[Failure | None, str | None]:
    """The known failure, and the line of the log that shows it; None for an unknown failure.

    A cause in the log comes before the signal that ended the process, since a builder that ran out
    of GPU memory may be killed as well.
    """
    for failure in FAILURES:
        matches = list(re.finditer(failure.pattern, log))
        if matches:
            return failure, _line_of(log, matches[-1].start())
    if returncode in (-signal.SIGKILL, SHELL_KILLED):
        return KILLED, None
    return None, None


def _line_of(text: str, position: int) -> str:
    start = text.rfind("\n", 0, position) + 1
    end = text.find("\n", position)
    return text[start : end if end >= 0 else len(text)].strip()
