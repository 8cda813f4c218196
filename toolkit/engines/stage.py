"""The compile stage: the configured backend makes an engine directory of a quantized checkpoint."""

from __future__ import annotations

from pathlib import Path

from toolkit.engines.registry import backend
from toolkit.interfaces import EngineSpec, Fingerprint, Progress
from toolkit.records.build import CompiledEngine, QuantizedCheckpoint
from toolkit.words import EngineKind

__all__ = ["VERSION", "compile_engine", "fingerprint"]

VERSION = 8


def compile_engine(
    kind: EngineKind,
    checkpoint: QuantizedCheckpoint,
    spec: EngineSpec,
    out_dir: Path,
    progress: Progress,
) -> CompiledEngine:
    """Compile the checkpoint into out_dir.

    Raises StageError if the backend fails, UsageError for an unknown kind, CheckpointError if the
    checkpoint cannot be read.
    """
    out_dir.mkdir(parents=True, exist_ok=True)
    return backend(kind).compile(checkpoint, spec, out_dir, progress)


def fingerprint(kind: EngineKind, spec: EngineSpec) -> Fingerprint:
    """The backend's versions and hardware on this machine; part of the stage's key."""
    return backend(kind).fingerprint(spec)
