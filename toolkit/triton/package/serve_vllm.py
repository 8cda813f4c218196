"""Start vLLM's own server for the repository that this file lies in.

It reads model.json, puts this folder in place of the container's, and becomes vLLM's server: the
process is replaced, so a signal to it reaches the server. It runs without the toolkit, with the
Python that has vLLM; launch_vllm.sh finds that Python. Options of its own:

    --plain            without speculation, to compare
    --request-metrics  each answer says what was accepted, where it speculates

All other options go to the server. A node of several that serves no requests has --headless, which
only `vllm serve` understands.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["flags_of", "server_command"]

CONTAINER_FOLDER = "/models"
MODEL_JSON = "vllm_model/1/model.json"
SPECULATION = "speculative_config"
SERVER, COMMAND_LINE = "vllm.entrypoints.openai.api_server", "vllm.entrypoints.cli.main"


def server_command(repository: Path, options: Sequence[str], python: str) -> list[str]:
    """The command of the server. Raises OSError or ValueError if model.json cannot be read."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--plain", action="store_true")
    parser.add_argument("--request-metrics", action="store_true")
    ours, others = parser.parse_known_args(options)
    args = json.loads((repository / MODEL_JSON).read_text(encoding="utf-8"))
    if ours.plain:
        args.pop(SPECULATION, None)
    if ours.request_metrics and SPECULATION in args:
        args["per_request_spec_decode_metrics"] = "detailed"
    program = [COMMAND_LINE, "serve"] if "--headless" in others else [SERVER]
    return [python, "-m", *program, *flags_of(_placed(args, str(repository))), *others]


def flags_of(args: Mapping[str, Any]) -> list[str]:
    """Fields of AsyncEngineArgs as flags."""
    flags: list[str] = []
    for name, value in args.items():
        flag = name.replace("_", "-")
        if value is False:
            flags.append(f"--no-{flag}")
        elif value is True:
            flags.append(f"--{flag}")
        else:
            flags += [f"--{flag}", json.dumps(value) if isinstance(value, dict) else str(value)]
    return flags


def _placed(value: Any, folder: str) -> Any:
    """The same value, with this folder in place of the container's."""
    if isinstance(value, dict):
        return {name: _placed(inner, folder) for name, inner in value.items()}
    if isinstance(value, str) and value.startswith(f"{CONTAINER_FOLDER}/"):
        return folder + value[len(CONTAINER_FOLDER) :]
    return value


def main() -> None:
    try:
        command = server_command(Path(__file__).resolve().parent, sys.argv[1:], sys.executable)
    except (OSError, ValueError) as error:
        sys.exit(f"cannot read {MODEL_JSON}: {error}")
    os.execv(command[0], command)


if __name__ == "__main__":
    main()
