"""The loop: stages in order, each reused from the store or run; and the same without running, to
explain.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Protocol

from toolkit.interfaces import Progress
from toolkit.pipeline.machine import machine, program
from toolkit.pipeline.memory import PeakMemory
from toolkit.pipeline.stage import Done, Stage, key_of
from toolkit.pipeline.store import Entry, Store, Written
from toolkit.records.codec import to_json

__all__ = ["Explanation", "Observer", "explain", "run_stages", "upto"]


class Observer(Protocol):
    """Whoever watches a run: the terminal, a log, a test."""

    def started(self, stage: str) -> Progress: ...

    def finished(self, stage: str, done: Done) -> None: ...


def upto(stages: Sequence[Stage], until: str) -> list[Stage]:
    """The stages that `until` (a name, or the part before the slash) needs, itself included."""
    wanted: set[str] = set()
    for stage in reversed(stages):
        if until in (stage.name, stage.group) or stage.name in wanted:
            wanted.update((stage.name, *stage.needs))
    return [stage for stage in stages if stage.name in wanted]


def run_stages(
    stages: Sequence[Stage],
    store: Store,
    name: str,
    observer: Observer,
    *,
    fresh: Collection[str] = (),
) -> Iterator[tuple[str, Done]]:
    """Stage by stage, its name and outcome: reused, or run because it is not in the store or
    `fresh` names it (or its group).

    name: the deployment's, under which keys are remembered. Finished stages stay in the store
    whatever happens later, so the same call goes on where this one ended.
    """
    finished: dict[str, Done] = {}
    try:
        for stage in stages:
            done = _one(
                stage,
                store,
                name,
                observer,
                finished,
                anew=bool({stage.name, stage.group} & set(fresh)),
            )
            finished[stage.name] = done
            observer.finished(stage.name, done)
            yield stage.name, done
    finally:
        store.memo.save()


def _one(
    stage: Stage,
    store: Store,
    name: str,
    observer: Observer,
    finished: Mapping[str, Done],
    *,
    anew: bool,
) -> Done:
    parts = stage.parts(finished)
    key = key_of(stage, parts)

    def write(content: Path) -> Written:
        progress = observer.started(stage.name)
        started = datetime.now(timezone.utc).isoformat(timespec="seconds")
        before = time.monotonic()
        with PeakMemory() as peak:
            record = stage.run(finished, content, progress)
        provenance = {
            **program(),
            "machine": machine(),
            "started": started,
            "seconds": round(time.monotonic() - before, 3),
            "peak_memory_bytes": peak.own,
        }
        return Written(to_json(record), provenance)

    entry, reused = store.build(
        stage.name, key, parts, write, usable=lambda found: not anew and _usable(stage, found)
    )
    store.note(name, stage.name, key, parts)
    return Done(entry, stage.decode(entry), reused)


def _usable(stage: Stage, entry: Entry) -> bool:
    try:
        return stage.reusable(stage.decode(entry))
    except ValueError:
        return False  # a record of another version


@dataclass(frozen=True, slots=True)
class Explanation:
    """What a run would do with a stage: reused, or run, and why."""

    stage: str
    reused: bool
    key: str | None  # None: it depends on the result of a stage that would run first
    reasons: tuple[str, ...]


def explain(stages: Sequence[Stage], store: Store, name: str) -> list[Explanation]:
    """Per stage, what `run_stages` would do, and which parts of its key differ from the last
    build of this name.
    """
    last = store.last(name)
    finished: dict[str, Done] = {}
    explanations: list[Explanation] = []
    for stage in stages:
        waiting = [need for need in stage.needs if need not in finished]
        if waiting:
            reason = (
                f"{' and '.join(waiting)} would run first; if the result is the same, this stage"
                " may still be reused"
            )
            explanations.append(Explanation(stage.name, False, None, (reason,)))
            continue
        parts = stage.parts(finished)
        key = key_of(stage, parts)
        entry = store.find(stage.name, key)
        if entry is not None and _usable(stage, entry):
            finished[stage.name] = Done(entry, stage.decode(entry), True)
            built = f"built {entry.provenance['started']} in {entry.provenance['seconds']:.1f} s"
            explanations.append(Explanation(stage.name, True, key, (built,)))
            continue
        reasons = tuple(_reasons(stage, key, parts, entry, last.get(stage.name)))
        explanations.append(Explanation(stage.name, False, key, reasons))
    store.memo.save()
    return explanations


def _reasons(
    stage: Stage,
    key: str,
    parts: Mapping[str, Any],
    entry: Entry | None,
    last: Mapping[str, Any] | None,
) -> Iterator[str]:
    if last is None:
        yield "never built under this name"
    elif entry is not None:
        yield "its stored result is undecided, and is measured again"
    elif last["key"] == key:
        yield "its stored result is gone or damaged"
    else:
        before, now = dict(_flat(last["parts"])), dict(_flat(parts))
        changed = [part for part in {**before, **now} if before.get(part) != now.get(part)]
        for part in changed:
            yield f"{part}: {_short(before.get(part))} -> {_short(now.get(part))}"
        if not changed:
            yield f"version {stage.version} of this stage works differently"


def _flat(parts: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Nested mappings -> dotted names."""
    for name, value in parts.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, list(value) if isinstance(value, tuple) else value


def _short(value: Any) -> str:
    if isinstance(value, str) and value.startswith("sha256:"):
        return value[:15]
    return "(absent)" if value is None else str(value)
