"""What a stage is to the pipeline: a name, what its key is made of, and a function that fills a
folder.

The pipeline knows nothing of what stages do, and stages nothing of the pipeline:
`toolkit.workflows` writes one `Stage` around each stage function.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolkit.interfaces import Progress
from toolkit.pipeline.hashing import digest_value
from toolkit.pipeline.store import Entry
from toolkit.records.codec import from_json

__all__ = ["Done", "Finished", "Stage", "key_of"]


@dataclass(frozen=True, slots=True)
class Done:
    """A stage's outcome in this run. record: the stage's own, with the paths of its stored
    content.
    """

    entry: Entry
    record: Any
    reused: bool

    @property
    def seconds(self) -> float:
        """What it took when it ran, which may be another day."""
        return float(self.entry.provenance["seconds"])

    @property
    def peak_memory_bytes(self) -> int | None:
        return self.entry.provenance.get("peak_memory_bytes")


Finished = Mapping[str, Done]
"""Stage name -> outcome, of the stages before."""


def _always(record: Any) -> bool:
    return True


@dataclass(frozen=True, slots=True)
class Stage:
    """name: `quantize/target`; several stages may share the part before the slash. version: raised
    when what it does changes.

    kind: the class of its record. needs: the stages whose outcomes it looks at. parts: their
    outcomes -> everything that its result depends on, as values with a canonical form: config
    section, digests of what it consumes, fingerprint. run: writes into the folder and returns the
    record. reusable: whether a stored result may stand for a new one.
    """

    name: str
    version: int
    kind: type
    needs: tuple[str, ...]
    parts: Callable[[Finished], Mapping[str, Any]]
    run: Callable[[Finished, Path, Progress], Any]
    reusable: Callable[[Any], bool] = _always

    @property
    def group(self) -> str:
        """The name that people use: `quantize` for both roles."""
        return self.name.partition("/")[0]

    def decode(self, entry: Entry) -> Any:
        """The record of a stored result. Raises ValueError if it is of another version."""
        return from_json(self.kind, entry.record)


def key_of(stage: Stage, parts: Mapping[str, Any]) -> str:
    """The key of a stage's result: 64 hexadecimal digits."""
    return digest_value(
        {"stage": stage.name, "version": stage.version, "parts": parts}
    ).removeprefix("sha256:")
