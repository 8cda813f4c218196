"""Run stages in order: each is reused from the store or run. `explain` says, without running
anything, which stages would run and why.
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
from toolkit.pipeline.stage import Done, Stage, key_of, resume_folder
from toolkit.pipeline.store import Entry, Store, Written
from toolkit.records.codec import to_json

__all__ = ["Explanation", "Observer", "explain", "run_stages", "upto"]


class Observer(Protocol):
    """Watches a run: the terminal, a log, a test."""

    def started(self, stage: str) -> Progress: ...

    def finished(self, stage: str, done: Done) -> None: ...


def upto(stages: Sequence[Stage], until: str) -> list[Stage]:
    """The stage `until`, and all stages that it needs. `until` is a name, or the part of the name
    before the slash.
    """
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
    """Yield the name and outcome of each stage in turn. A stage is run if it is not in the store,
    or if `fresh` names it or its group; otherwise it is reused.

    name: the name of the deployment, under which its keys are remembered. Finished stages stay in
    the store even if a later one fails, so the same call continues from there.
    """
    finished: dict[str, Done] = {}
    try:
        for stage in stages:
            is_fresh = bool({stage.name, stage.group} & set(fresh))
            done = _run_stage(stage, store, name, observer, finished, is_fresh=is_fresh)
            finished[stage.name] = done
            observer.finished(stage.name, done)
            yield stage.name, done
    finally:
        store.memo.save()


def _run_stage(
    stage: Stage,
    store: Store,
    name: str,
    observer: Observer,
    finished: Mapping[str, Done],
    *,
    is_fresh: bool,
) -> Done:
    parts = stage.parts(finished)
    key = key_of(stage, parts)

    def write(content: Path) -> Written:
        progress = observer.started(stage.name)
        started = datetime.now(timezone.utc).isoformat(timespec="seconds")
        before = time.monotonic()
        is_resumed = resume_folder(content).exists()
        with PeakMemory() as peak:
            record = stage.run(finished, content, progress)
        provenance = {
            **program(),
            "machine": machine(),
            "started": started,
            "seconds": round(time.monotonic() - before, 3),
            "resumed": is_resumed,
            "peak_memory_bytes": peak.of_this_work,
        }
        return Written(to_json(record), provenance)

    entry, reused = store.build(
        stage.name,
        key,
        parts,
        write,
        is_usable=lambda stored: _is_usable(stage, stored),
        fresh=is_fresh,
    )
    store.note(name, stage.name, key, parts)
    return Done(entry, stage.decode(entry), reused)


def _is_usable(stage: Stage, entry: Entry) -> bool:
    try:
        return stage.is_reusable(stage.decode(entry))
    except ValueError:
        return False  # another version of the toolkit wrote this record


@dataclass(frozen=True, slots=True)
class Explanation:
    """Whether a stage would be reused or run, and why."""

    stage: str
    reused: bool
    key: str | None  # None if it depends on the result of a stage that would run first
    reasons: tuple[str, ...]


def explain(stages: Sequence[Stage], store: Store, name: str) -> list[Explanation]:
    """For each stage, what `run_stages` would do, and which parts of its key differ from the last
    build of the deployment `name`.
    """
    last = store.last(name)
    finished: dict[str, Done] = {}
    explanations: list[Explanation] = []
    for stage in stages:
        unfinished = [need for need in stage.needs if need not in finished]
        if unfinished:
            reason = (
                f"{' and '.join(unfinished)} would run first; if the result is the same, this stage"
                " may still be reused"
            )
            explanations.append(Explanation(stage.name, False, None, (reason,)))
            continue
        parts = stage.parts(finished)
        key = key_of(stage, parts)
        entry = store.find(stage.name, key)
        if entry is not None and _is_usable(stage, entry):
            finished[stage.name] = Done(entry, stage.decode(entry), True)
            built = f"built {entry.provenance['started']} in {entry.provenance['seconds']:.1f} s"
            if entry.provenance.get("resumed"):
                built += ", going on after a killed run"
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
        yield "its stored result is undecided, so it is measured again"
    elif last["key"] == key:
        yield "its stored result is gone or damaged"
    else:
        before, now = dict(_flat(last["parts"])), dict(_flat(parts))
        changed = [part for part in {**before, **now} if before.get(part) != now.get(part)]
        for part in changed:
            yield f"{part}: {_short(before.get(part))} -> {_short(now.get(part))}"
        if not changed:
            yield f"this stage has changed: it has version {stage.version} now"


def _flat(parts: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Flatten nested mappings: dotted name, value."""
    for name, value in parts.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, list(value) if isinstance(value, tuple) else value


def _short(value: Any) -> str:
    if isinstance(value, str) and value.startswith("sha256:"):
        return value[:15]
    return "(absent)" if value is None else str(value)
