"""The compile stage: a quantized checkpoint in, an engine directory out, by whichever backend
the config names.
"""

from __future__ import annotations

from pathlib import Path

from toolkit.engines.registry import backend
from toolkit.interfaces import EngineSpec, Fingerprint, Progress
from toolkit.records.build import CompiledEngine, QuantizedCheckpoint
from toolkit.words import EngineKind

__all__ = ["VERSION", "compile_engine", "fingerprint"]

VERSION = 5


def compile_engine(
    kind: EngineKind,
    checkpoint: QuantizedCheckpoint,
    spec: EngineSpec,
    out_dir: Path,
    progress: Progress,
) -> CompiledEngine:
    """Raises StageError when the backend fails, UsageError for an unknown kind, CheckpointError
    for what cannot be read.
    """
    out_dir.mkdir(parents=True, exist_ok=True)
    return backend(kind).compile(checkpoint, spec, out_dir, progress)


def fingerprint(kind: EngineKind, spec: EngineSpec) -> Fingerprint:
    """What the backend is on this machine: part of the stage's key."""
    return backend(kind).fingerprint(spec)
