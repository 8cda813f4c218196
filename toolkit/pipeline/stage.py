"""What the pipeline knows of a stage: its name, the parts of its key, and a function that fills a
folder.

The pipeline does not know what stages do, and stage functions do not know the pipeline:
`toolkit.workflows` wraps each stage function in a `Stage`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolkit.interfaces import Progress
from toolkit.pipeline.hashing import digest_value
from toolkit.pipeline.store import RESUME, Entry
from toolkit.records.codec import from_json

__all__ = ["Done", "Finished", "Stage", "key_of", "resume_folder"]


@dataclass(frozen=True, slots=True)
class Done:
    """The outcome of a stage in this run. record: the record that the stage returned, with paths
    into its stored content.
    """

    entry: Entry
    record: Any
    reused: bool

    @property
    def seconds(self) -> float:
        """How long the stage took when it ran, which may have been another day. After a killed run
        that it went on from, only what it did itself.
        """
        return float(self.entry.provenance["seconds"])

    @property
    def is_resumed(self) -> bool:
        """Whether it went on from what a killed run had finished."""
        return bool(self.entry.provenance.get("resumed"))

    @property
    def peak_memory_bytes(self) -> int | None:
        return self.entry.provenance.get("peak_memory_bytes")


Finished = Mapping[str, Done]
"""Stage name -> outcome, for the stages that are done."""


def resume_folder(out_dir: Path) -> Path:
    """Where a stage that fills `out_dir` may keep what it has finished so far. If it is killed, the
    next run with the same key finds it there; when the result is stored, the folder is removed.

    The folder may be missing, and nothing says that its files are whole.
    """
    return out_dir.parent / RESUME


def _is_always_reusable(record: Any) -> bool:
    return True


@dataclass(frozen=True, slots=True)
class Stage:
    """name: such as `quantize/target`; several stages may share the part before the slash.
    version: raised when the stage does something else than before.
    kind: the class of its record.
    needs: the stages whose outcomes it reads.
    parts: from their outcomes, everything that its result depends on, as values that have a digest:
    config section, digests of its inputs, fingerprint.
    run: writes into the folder and returns the record.
    is_reusable: whether a stored record may be used instead of a new run.
    """

    name: str
    version: int
    kind: type
    needs: tuple[str, ...]
    parts: Callable[[Finished], Mapping[str, Any]]
    run: Callable[[Finished, Path, Progress], Any]
    is_reusable: Callable[[Any], bool] = _is_always_reusable

    @property
    def group(self) -> str:
        """The name that people use: `quantize` for both roles."""
        return self.name.partition("/")[0]

    def decode(self, entry: Entry) -> Any:
        """The record of a stored result. Raises ValueError if another version wrote it."""
        return from_json(self.kind, entry.record)


def key_of(stage: Stage, parts: Mapping[str, Any]) -> str:
    """The key of a stage's result: 64 hexadecimal digits."""
    return digest_value(
        {"stage": stage.name, "version": stage.version, "parts": parts}
    ).removeprefix("sha256:")
