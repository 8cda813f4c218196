"""The engine backends by kind.

To add a backend, write its file and add a line here. If its engines are StepEngines, they also have
to pass `tests/engines/contract.py`.
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
    "vllm": "toolkit.engines.vllm.backend:VllmBackend",
}
STEP_ENGINE_KINDS = ("torch",)  # the others speculate inside an engine of others


def backend(kind: EngineKind) -> EngineBackend:
    """The backend of this kind, imported on first use. Raises UsageError for an unknown kind."""
    return cast(EngineBackend, _backend_object(kind))


def loader(kind: EngineKind) -> EngineLoader:
    """The loader that makes a StepEngine of an engine directory. Raises UsageError where there
    is no such thing.
    """
    if kind in BACKENDS and kind not in STEP_ENGINE_KINDS:
        raise UsageError(
            f"an engine of kind {kind} does not run inside this program",
            hint="only its own server can run it: serve the packaged repository",
        )
    return cast(EngineLoader, _backend_object(kind))


def _backend_object(kind: EngineKind) -> Any:
    if kind not in BACKENDS:
        raise UsageError(f"engine kind {kind!r} is not known", hint=f"known: {', '.join(BACKENDS)}")
    module, name = BACKENDS[kind].split(":")
    return getattr(importlib.import_module(module), name)()
