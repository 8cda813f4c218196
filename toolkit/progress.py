"""How long work is shown: a bar with an estimate on a terminal, plain lines where the output is piped. All of it on stderr.

Both are observers of a pipeline run. rich is imported for the terminal only, where it also honours NO_COLOR.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import IO, TYPE_CHECKING, Protocol

from toolkit.interfaces import Progress
from toolkit.pipeline.stage import Done

if TYPE_CHECKING:
    from rich.progress import TaskID

__all__ = ["Display", "PlainDisplay", "displayed", "duration", "size"]

LINE_EVERY_S = 5.0


class Display(Protocol):
    """An observer of the pipeline that can also say a line."""

    def started(self, stage: str) -> Progress: ...

    def finished(self, stage: str, done: Done) -> None: ...

    def notice(self, text: str) -> None: ...


def duration(seconds: float) -> str:
    if seconds < 10:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {rest:02} s" if minutes else f"{rest} s"


def size(count: int) -> str:
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}"
        count = count / 1024  # type: ignore[assignment]
    return f"{count:.1f} GiB"


def _outcome(stage: str, done: Done) -> str:
    if done.reused:
        return f"{stage:18} reused"
    peak = "" if done.peak_memory_bytes is None else f", {size(done.peak_memory_bytes)} at most"
    return f"{stage:18} done in {duration(done.seconds)}{peak}"


@contextlib.contextmanager
def displayed(stream: IO[str] | None = None, *, quiet: bool = False) -> Iterator[Display]:
    """The display that suits the stream (stderr if none is given)."""
    stream = stream or sys.stderr
    if quiet or not stream.isatty():
        yield PlainDisplay(lambda text: None if quiet else print(text, file=stream, flush=True))
        return
    with _TerminalDisplay(stream) as display:
        yield display


class PlainDisplay:
    """A line when something starts, changes or ends, and every few seconds meanwhile."""

    def __init__(self, say: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self.notice = say
        self._clock = clock

    def started(self, stage: str) -> Progress:
        self.notice(f"{stage:18} started")
        began = said = self._clock()
        doing, first = "", 0

        def progress(done: int, total: int | None, what: str) -> None:
            nonlocal said, doing, began, first
            now = self._clock()
            kind = what.rstrip("0123456789. s")  # "waiting, 3 s" is what "waiting, 2 s" was
            if kind != doing:
                doing, began, first = kind, now, done
            elif now - said < LINE_EVERY_S:
                return
            said = now
            count = f" {done}/{total}" if total else f" {done}" if done and str(done) not in what else ""
            left = ""
            if total and first < done < total:
                left = f", about {duration((now - began) / (done - first) * (total - done))} left"
            self.notice(f"{stage:18} {what}{count}{left}")

        return progress

    def finished(self, stage: str, done: Done) -> None:
        self.notice(_outcome(stage, done))


class _TerminalDisplay:
    """One bar for the stage that runs; finished stages scroll up as lines."""

    def __init__(self, stream: IO[str]) -> None:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            SpinnerColumn,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
        )
        from rich.progress import Progress as Bars

        columns = (
            SpinnerColumn(),
            TextColumn("{task.fields[stage]:18}", markup=False),
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
        )
        self._bars = Bars(*columns, console=Console(file=stream), transient=True)
        self._task: TaskID | None = None
        self._lock = threading.Lock()

    def __enter__(self) -> _TerminalDisplay:
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()

    def started(self, stage: str) -> Progress:
        self._clear()
        task = self._task = self._bars.add_task("started", total=None, stage=stage)
        doing = ""

        def progress(done: int, total: int | None, what: str) -> None:
            nonlocal doing
            with self._lock:
                kind = what.rstrip("0123456789. s")
                if kind != doing:
                    doing = kind
                    self._bars.reset(task, stage=stage)  # another estimate
                self._bars.update(task, description=what, completed=done, total=total)

        return progress

    def finished(self, stage: str, done: Done) -> None:
        self._clear()
        self.notice(_outcome(stage, done))

    def notice(self, text: str) -> None:
        self._bars.console.print(text, markup=False, highlight=False)

    def _clear(self) -> None:
        if self._task is not None:
            self._bars.remove_task(self._task)
            self._task = None
