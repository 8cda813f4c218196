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

__all__ = ["flags_of", "server_command", "thread_binding"]

CONTAINER_FOLDER = "/models"
MODEL_JSON = "vllm_model/1/model.json"
SPECULATION = "speculative_config"
BINDING = "VLLM_CPU_OMP_THREADS_BIND"
NUMA_NODES = Path("/sys/devices/system/node")
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


def thread_binding(args: Mapping[str, Any], numa_nodes: Path = NUMA_NODES) -> dict[str, str]:
    """The environment variable that gives every rank on a CPU cores of its own; empty if vLLM can
    do it.

    By itself vLLM gives each rank a NUMA node, and does not start with more ranks than nodes
    (vllm/utils/ompmultiprocessing.py of 0.32.0). A build for GPUs does not read the variable.
    """
    ranks = args.get("tensor_parallel_size", 1) * args.get("pipeline_parallel_size", 1)
    cores = sorted(os.sched_getaffinity(0))
    nodes = len([node for node in numa_nodes.glob("node*") if node.name[4:].isdecimal()])
    if ranks <= max(nodes, 1) or len(cores) < ranks or BINDING in os.environ:
        return {}
    share = len(cores) // ranks
    groups = [cores[rank * share : (rank + 1) * share] for rank in range(ranks)]
    return {BINDING: "|".join(",".join(map(str, group)) for group in groups)}


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
    repository = Path(__file__).resolve().parent
    try:
        command = server_command(repository, sys.argv[1:], sys.executable)
        args = json.loads((repository / MODEL_JSON).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        sys.exit(f"cannot read {MODEL_JSON}: {error}")
    # Of several nodes, this one has only a part of the ranks.
    binding = {} if "--nnodes" in command else thread_binding(args)
    os.execve(command[0], command, {**os.environ, **binding})


if __name__ == "__main__":
    main()
