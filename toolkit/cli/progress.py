"""How long work is shown: a bar with an estimate on a terminal, plain lines where the output is
piped. All of it on stderr.

Both are observers of a pipeline run. rich is imported for the terminal only, where it also honours
NO_COLOR.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Protocol

from toolkit.interfaces import Progress
from toolkit.pipeline.stage import Done
from toolkit.rounding import size

if TYPE_CHECKING:
    from rich.progress import TaskID

__all__ = ["Display", "PlainDisplay", "displayed", "duration"]

LINE_EVERY_S = 5.0
SILENCE_S = 15.0  # after which a line says that the same is still being done
ROOMY = 100  # columns of a terminal from which on there is room for a bar beside the words


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
    return (
        f"{hours} h {minutes:02} min"
        if hours
        else f"{minutes} min {rest:02} s"
        if minutes
        else f"{rest} s"
    )


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
        plain = PlainDisplay(lambda text: None if quiet else print(text, file=stream, flush=True))
        with _every_second(plain.beat):
            yield plain
        return
    with _TerminalDisplay(stream) as display:
        yield display


@contextlib.contextmanager
def _every_second(beat: Callable[[], None]) -> Iterator[None]:
    ended = threading.Event()

    def beats() -> None:
        while not ended.wait(1.0):
            beat()

    thread = threading.Thread(target=beats, name="progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


@dataclass
class _Doing:
    """What a stage does at present: its words without their numbers, since when, and how far it
    was then and is now.
    """

    stage: str
    began: float
    said: float
    kind: str = ""
    what: str = "at work"
    first: int = 0
    done: int = 0
    total: int | None = None

    def line(self, *, so_far: float | None = None) -> str:
        """so_far: for how long it has been done, where there is no other news."""
        counted = str(self.done) in self.what
        count = (
            f" {self.done}/{self.total}"
            if self.total
            else f" {self.done}"
            if self.done and not counted
            else ""
        )
        return f"{self.stage:18} {self.what}{count}" + (
            "" if so_far is None else f", for {duration(so_far)}"
        )


class PlainDisplay:
    """A line when something starts, changes or ends, and every few seconds meanwhile.

    beat: to be called now and then, from any thread: work that tells nothing about itself is not to
    look dead.
    """

    def __init__(
        self, say: Callable[[str], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.notice = say
        self._clock = clock
        self._doing: _Doing | None = None
        self._lock = threading.Lock()

    def started(self, stage: str) -> Progress:
        self.notice(f"{stage:18} started")
        now = self._clock()
        doing = _Doing(stage, now, now)
        with self._lock:
            self._doing = doing

        def progress(done: int, total: int | None, what: str) -> None:
            with self._lock:
                self._progress(doing, done, total, what)

        return progress

    def beat(self) -> None:
        with self._lock:
            doing, now = self._doing, self._clock()
            if doing is not None and now - doing.said >= SILENCE_S:
                doing.said = now
                self.notice(doing.line(so_far=now - doing.began))

    def finished(self, stage: str, done: Done) -> None:
        with self._lock:
            self._doing = None
        self.notice(_outcome(stage, done))

    def _progress(self, doing: _Doing, done: int, total: int | None, what: str) -> None:
        now, kind = self._clock(), _kind(what)
        news = kind != doing.kind
        if news:
            doing.kind, doing.began, doing.first = kind, now, done
        doing.what, doing.done, doing.total = what, done, total
        if news or now - doing.said >= LINE_EVERY_S:
            doing.said = now
            left = ""
            if total and doing.first < done < total:
                left = (
                    ", about"
                    f" {duration((now - doing.began) / (done - doing.first) * (total - done))} left"
                )
            self.notice(doing.line() + left)


def _kind(what: str) -> str:
    """ "waiting, 3 s" is what "waiting, 2 s" was."""
    return what.rstrip("0123456789. s")


class _TerminalDisplay:
    """One bar for the stage that runs; finished stages scroll up as lines. Words give way to
    figures where it is narrow.
    """

    def __init__(self, stream: IO[str]) -> None:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            SpinnerColumn,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
        )
        from rich.progress import Progress as Bars
        from rich.table import Column

        console = Console(file=stream)

        def fixed() -> Column:
            return Column(no_wrap=True, min_width=7, justify="right")

        columns = (
            SpinnerColumn(),
            TextColumn("{task.fields[stage]}", markup=False, table_column=Column(no_wrap=True)),
            TextColumn(
                "{task.description}",
                markup=False,
                table_column=Column(no_wrap=True, overflow="ellipsis", ratio=1),
            ),
            *([BarColumn(bar_width=24)] if console.width >= ROOMY else []),
            TextColumn("{task.fields[count]}", markup=False, justify="right", table_column=fixed()),
            TimeElapsedColumn(table_column=fixed()),
            TimeRemainingColumn(table_column=fixed()),
        )
        self._bars = Bars(*columns, console=console, transient=True, expand=True)
        self._task: TaskID | None = None
        self._lock = threading.Lock()

    def __enter__(self) -> _TerminalDisplay:
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()

    def started(self, stage: str) -> Progress:
        self._draw(stage, "started", 0, None)
        doing, of = "", None

        def progress(done: int, total: int | None, what: str) -> None:
            nonlocal doing, of
            with self._lock:
                kind = _kind(what)
                if kind != doing or (of is None) != (total is None):
                    self._draw(
                        stage, what, done, total
                    )  # a new one: another estimate, and a total is never unset in one
                elif self._task is not None:
                    self._bars.update(
                        self._task,
                        description=what,
                        completed=done,
                        total=total,
                        count=_count(done, total),
                    )
                doing, of = kind, total

        return progress

    def finished(self, stage: str, done: Done) -> None:
        self._clear()
        self.notice(_outcome(stage, done))

    def notice(self, text: str) -> None:
        self._bars.console.print(text, markup=False, highlight=False)

    def _draw(self, stage: str, what: str, done: int, total: int | None) -> None:
        self._clear()
        self._task = self._bars.add_task(
            what, total=total, completed=done, stage=stage, count=_count(done, total)
        )

    def _clear(self) -> None:
        if self._task is not None:
            self._bars.remove_task(self._task)
            self._task = None


def _count(done: int, total: int | None) -> str:
    return f"{done}/{total}" if total else str(done) if done else ""
