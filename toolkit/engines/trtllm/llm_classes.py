"""Check `LLM()` arguments with the installed TensorRT-LLM's own classes, besides our tables.

The class is an argument and may be any pydantic model, so tests need no TensorRT-LLM. If the class
refuses what our tables allow, the build stops. Fields that only one side knows are reported as a
disagreement.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from toolkit.engines.trtllm.speculative_config import with_speculative_config
from toolkit.facts.llm_args import LLM_ARGS
from toolkit.records.measured import Finding

__all__ = ["field_disagreements", "installed_class", "installed_version", "refusal"]


def installed_version() -> str | None:
    try:
        return version("tensorrt_llm")
    except PackageNotFoundError:
        return None


def installed_class() -> Any | None:
    """`TorchLlmArgs`, or None if TensorRT-LLM is not installed. Raises what its import raises."""
    if importlib.util.find_spec("tensorrt_llm") is None:
        return None
    return importlib.import_module("tensorrt_llm.llmapi.llm_args").TorchLlmArgs


def refusal(args: Mapping[str, Any], args_class: Any) -> str | None:
    """The error with which the class refuses the arguments; None if it accepts them.

    A validator of 1.0 asks the device for its capability (RuntimeError without one), and the
    constructor of one speculative class sets what it is given (AttributeError).
    """
    module = importlib.import_module(args_class.__module__)
    try:
        args_class(**with_speculative_config(args, module))
    except (ValueError, TypeError, RuntimeError, AttributeError) as error:
        return str(error)  # pydantic's own error is a ValueError
    return None


def field_disagreements(args_class: Any, of_version: str) -> list[Finding]:
    """The differences between the fields of the class and our table of the version."""
    theirs = {
        name
        for field, info in args_class.model_fields.items()
        for name in (field, getattr(info, "alias", None) or field)
    }
    ours = {field.name for field in LLM_ARGS if of_version in field.versions}
    return [
        *(
            Finding(
                "our facts",
                "warning",
                f"LLM() {of_version} here has no {name}, but our table lists it",
            )
            for name in sorted(ours - theirs)
        ),
        *(
            Finding(
                "our facts",
                "warning",
                f"LLM() {of_version} here has {name}, which our table does not list",
            )
            for name in sorted(theirs - ours)
        ),
    ]
