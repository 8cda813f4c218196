"""Engine backends by kind. Adding one is a file, a line here, and passing `tests/engines/contract.py`."""

from __future__ import annotations

import importlib
from typing import cast

from toolkit.errors import UsageError
from toolkit.interfaces import EngineBackend

__all__ = ["BACKENDS", "backend"]

BACKENDS = {"torch": "toolkit.engines.embedded.backend:TorchBackend"}


def backend(kind: str) -> EngineBackend:
    """The backend of that kind, imported on first use. Raises UsageError for an unknown one."""
    if kind not in BACKENDS:
        raise UsageError(f"engine kind {kind!r} is not known", mend=f"known: {', '.join(BACKENDS)}")
    module, name = BACKENDS[kind].split(":")
    return cast(EngineBackend, getattr(importlib.import_module(module), name)())
