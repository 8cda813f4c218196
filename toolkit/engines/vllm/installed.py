"""Ask the installed vLLM about its arguments, in a process of its own Python."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolkit.engines.vllm import check_args
from toolkit.engines.vllm.environment import VllmEnvironment
from toolkit.errors import StageError

__all__ = ["Answer", "ask_vllm"]

PROGRAM = Path(check_args.__file__)
TIMEOUT_S = 600  # it takes 8 to 18 s on two cores, nearly all of it to import vLLM
LINES_OF_LOG = 15


@dataclass(frozen=True, slots=True)
class Answer:
    """reason: why vLLM refuses the arguments; None: it accepts them. arguments: the names of those
    it refuses; empty if it refuses the model itself. dtype: of the target's activations, if vLLM
    made its configuration.
    """

    reason: str | None
    arguments: tuple[str, ...]
    dtype: str | None


def ask_vllm(
    environment: VllmEnvironment,
    args: Mapping[str, Any],
    variables: Mapping[str, str],
    *,
    has_device: bool,
) -> Answer:
    """What vLLM's own classes say to `args`, fields of AsyncEngineArgs with existing paths.

    variables: environment variables that belong to the arguments. has_device: whether the devices
    are here that the arguments need. Raises StageError if vLLM cannot be imported.
    """
    with tempfile.TemporaryDirectory(prefix="toolkit-vllm-") as folder:
        request, answer = Path(folder) / "request.json", Path(folder) / "answer.json"
        request.write_text(
            json.dumps({"args": dict(args), "has_device": has_device}), encoding="utf-8"
        )
        command = [str(environment.python), str(PROGRAM), str(request), str(answer)]
        log = _run(command, Path(folder), {**os.environ, **variables, "HF_HUB_OFFLINE": "1"})
        try:
            fields = json.loads(answer.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise _broken(environment, log) from error
    return Answer(fields["reason"], tuple(fields["arguments"]), fields["dtype"])


def _run(command: list[str], folder: Path, variables: Mapping[str, str]) -> str:
    """Run the command to its end, and return what it printed. It leaves no process."""
    with (folder / "log").open("w+", encoding="utf-8", errors="replace") as log:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=dict(variables),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            process.wait(TIMEOUT_S)
        except subprocess.TimeoutExpired as error:
            raise StageError(
                "compile", f"vLLM did not answer about its arguments within {TIMEOUT_S} s"
            ) from error
        finally:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        log.seek(0)
        return log.read()


def _broken(environment: VllmEnvironment, log: str) -> StageError:
    lines = log.strip().splitlines()
    tail = "\n".join(f"    {line}" for line in lines[-LINES_OF_LOG:])
    reason = f": {lines[-1]}" if lines else ""
    return StageError(
        "compile",
        f"vLLM {environment.version} could not be asked about its arguments{reason}",
        where=environment.python,
        hint=(
            "Its environment does not work; `make vllm` creates one, and engine.python names"
            f" another. The end of the output:\n{tail}"
        ),
    )
