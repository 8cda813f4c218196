"""Engine backends by kind. Adding one is a file, a line here, and passing
`tests/engines/contract.py` if its engines step.
"""

from __future__ import annotations

import importlib
from typing import Any, cast

from toolkit.errors import UsageError
from toolkit.interfaces import EngineBackend, EngineLoader
from toolkit.words import EngineKind

__all__ = ["BACKENDS", "backend", "loader"]

BACKENDS = {
    "torch": "toolkit.engines.embedded.backend:TorchBackend",
    "trt_engine": "toolkit.engines.trt_engine:TrtEngineBackend",
    "trtllm_pytorch": "toolkit.engines.trtllm_pytorch:TrtllmPytorchBackend",
}
STEPPING = ("torch",)  # the others speculate inside TensorRT-LLM, and run where it runs


def backend(kind: EngineKind) -> EngineBackend:
    """The backend of that kind, imported on first use. Raises UsageError for an unknown one."""
    return cast(EngineBackend, _made(kind))


def loader(kind: EngineKind) -> EngineLoader:
    """What makes a StepEngine of an engine directory of that kind. Raises UsageError where there
    is no such thing.
    """
    if kind in BACKENDS and kind not in STEPPING:
        raise UsageError(
            f"an engine of kind {kind} does not run inside this program",
            hint="TensorRT-LLM runs it: serve the packaged repository in its container",
        )
    return cast(EngineLoader, _made(kind))


def _made(kind: EngineKind) -> Any:
    if kind not in BACKENDS:
        raise UsageError(f"engine kind {kind!r} is not known", hint=f"known: {', '.join(BACKENDS)}")
    module, name = BACKENDS[kind].split(":")
    return getattr(importlib.import_module(module), name)()
