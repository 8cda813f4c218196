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

__all__ = [
    "checked_args",
    "flags_of",
    "plugin_path",
    "server_command",
    "server_environment",
    "thread_binding",
]

CONTAINER_FOLDER = "/models"
MODEL_JSON = "vllm_model/1/model.json"
SPECULATION = "speculative_config"
PLUGINS = "vllm_plugins"  # in the target's folder
PLUGIN = "toolkit_vllm_sampling"
BINDING = "VLLM_CPU_OMP_THREADS_BIND"
NUMA_NODES = Path("/sys/devices/system/node")
PARALLEL = ("tensor_parallel_size", "pipeline_parallel_size")
# In a draft's path vLLM reads them as the name of a method (vllm/config/speculative.py of 0.32.0).
MISLEADING_NAMES = ("eagle-", "eagle3", "dflash", "dspark")
# A checkpoint's own sampling defaults would change what was judged.
NO_DEFAULTS = ("--generation-config", "vllm")
SERVER, COMMAND_LINE = "vllm.entrypoints.openai.api_server", "vllm.entrypoints.cli.main"


def server_command(repository: Path, options: Sequence[str], python: str) -> list[str]:
    """The command of the server. Raises OSError or ValueError if model.json cannot be read."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--plain", action="store_true")
    parser.add_argument("--request-metrics", action="store_true")
    ours, others = parser.parse_known_args(options)
    text = (repository / MODEL_JSON).read_text(encoding="utf-8")
    args = _placed(checked_args(json.loads(text)), str(repository))
    for folder in (args["model"], args.get(SPECULATION, {}).get("model")):
        if folder is not None and not Path(folder).is_dir():
            raise ValueError(f"it names {folder}, and there is no such folder")
    if ours.plain:
        args.pop(SPECULATION, None)
    if ours.request_metrics and SPECULATION in args:
        args["per_request_spec_decode_metrics"] = "detailed"
    program = [COMMAND_LINE, "serve"] if "--headless" in others else [SERVER]
    _check_draft_path(args)
    return [python, "-m", *program, *NO_DEFAULTS, *flags_of(args), *others]


def checked_args(value: Any) -> dict[str, Any]:
    """The object in model.json, without what is null. Raises ValueError for what cannot start."""
    if not isinstance(value, dict) or not isinstance(value.get("model"), str):
        raise ValueError('it is no object with a "model"')
    args = {name: inner for name, inner in value.items() if inner is not None}
    for name in PARALLEL:
        if not isinstance(args.get(name, 1), int):
            raise ValueError(f"{name} is {args[name]!r}, not a number")
    if not isinstance(args.get(SPECULATION, {}), dict):
        raise ValueError(f"{SPECULATION} is no object")
    return args


def _check_draft_path(args: Mapping[str, Any]) -> None:
    speculative = args.get(SPECULATION, {})
    draft = str(speculative.get("model", ""))
    named = [name for name in MISLEADING_NAMES if name in draft.lower()]
    if named and speculative.get("method") == "draft_model":
        raise ValueError(
            f"vLLM takes a draft whose path contains {named[0]!r} for another kind of draft; move"
            f" this folder: {draft}"
        )


def server_environment(python: Path, inherited: Mapping[str, str]) -> dict[str, str]:
    """Variables that belong to the server on every machine, unless they are set already. Intel's
    OpenMP is that of the build for CPUs, which warns that speculation is much slower without it.
    """
    variables = {
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "OMP_WAIT_POLICY": "PASSIVE",
    }
    openmp = python.parents[1] / "lib" / "libiomp5.so"
    if set(str(openmp)) & set(" :"):  # which end a name in LD_PRELOAD
        if openmp.exists():
            print(f"{openmp} cannot be preloaded under this path: vLLM is slower", file=sys.stderr)
    elif openmp.exists():
        variables["LD_PRELOAD"] = str(openmp)
    return {name: value for name, value in variables.items() if name not in inherited}


def plugin_path(model: Path, inherited: Mapping[str, str]) -> dict[str, str]:
    """PYTHONPATH with the plugins for vLLM that the engine brings, if there are any, and their name
    in VLLM_PLUGINS if that is set: then vLLM loads no others. Raises ValueError for a folder that
    PYTHONPATH cannot name.
    """
    folder = model / PLUGINS
    if not folder.is_dir():
        return {}
    if os.pathsep in str(folder):
        raise ValueError(
            f"PYTHONPATH cannot name a path with {os.pathsep!r}, and vLLM would sample wrongly"
            f" without {folder}; move this folder"
        )
    found = os.pathsep.join(filter(None, [str(folder), inherited.get("PYTHONPATH")]))
    variables = {"PYTHONPATH": found}
    if "VLLM_PLUGINS" in inherited:
        names = filter(None, inherited["VLLM_PLUGINS"].split(","))
        variables["VLLM_PLUGINS"] = ",".join([*names, PLUGIN])
    return variables


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
        args = checked_args(json.loads((repository / MODEL_JSON).read_text(encoding="utf-8")))
        plugins = plugin_path(Path(_placed(args["model"], str(repository))), os.environ)
    except (OSError, ValueError) as error:
        sys.exit(f"{MODEL_JSON} cannot be used: {error}")
    # Of several nodes, this one has only a part of the ranks.
    binding = {} if "--nnodes" in command else thread_binding(args)
    more = {**server_environment(Path(sys.executable), os.environ), **plugins}
    os.execve(command[0], command, {**os.environ, **more, **binding})


if __name__ == "__main__":
    main()
