"""Show the progress of long work on stderr: a bar with an estimate on a terminal, plain lines if
the output is piped.

Both displays are observers of a pipeline run. rich is imported only for the terminal, where it also
honours NO_COLOR.
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

LINE_INTERVAL_S = 5.0
MAX_SILENCE_S = 15.0  # after this time, a line says that the work still goes on
MIN_COLUMNS_FOR_BAR = 100  # a narrower terminal has no room for a bar beside the text


class Display(Protocol):
    """An observer of the pipeline that can also print a line."""

    def started(self, stage: str) -> Progress: ...

    def finished(self, stage: str, done: Done) -> None: ...

    def notice(self, text: str) -> None: ...


def duration(seconds: float) -> str:
    """A short text for a duration: "9.4 s", "42 s", "1 min 05 s" or "2 h 01 min"."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02} min"
    return f"{minutes} min {rest:02} s" if minutes else f"{rest} s"


def _outcome(stage: str, done: Done) -> str:
    """The line about a stage that has finished."""
    if done.reused:
        return f"{stage:18} reused"
    peak = "" if done.peak_memory_bytes is None else f", {size(done.peak_memory_bytes)} at most"
    after = " after a killed run" if done.is_resumed else ""
    return f"{stage:18} done in {duration(done.seconds)}{after}{peak}"


@contextlib.contextmanager
def displayed(stream: IO[str] | None = None, *, quiet: bool = False) -> Iterator[Display]:
    """The display that suits the stream, which is stderr by default. `quiet` prints nothing."""
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
    """Call `beat` every second, in a thread of its own, while the block runs."""
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
class _Activity:
    """What a stage does at present.

    began_s: when it began to do this; printed_s: when the last line about it was printed. kind: the
    text without its number. first_done: how much was done when it began; done: how much is done
    now; total: how much there is to do, if that is known.
    """

    stage: str
    began_s: float
    printed_s: float
    kind: str = ""
    text: str = "at work"
    first_done: int = 0
    done: int = 0
    total: int | None = None

    def line(self, *, elapsed_s: float | None = None) -> str:
        """The line about it. elapsed_s: how long it has been going on, if there is no news."""
        count = ""
        if self.total:
            count = f" {self.done}/{self.total}"
        elif self.done and str(self.done) not in self.text:
            count = f" {self.done}"
        elapsed = "" if elapsed_s is None else f", for {duration(elapsed_s)}"
        return f"{self.stage:18} {self.text}{count}{elapsed}"


class PlainDisplay:
    """Print a line when something starts, changes or ends, and every few seconds in between.

    Call `beat` from time to time, from any thread: it prints a line if the work has reported
    nothing for MAX_SILENCE_S seconds, so that the work does not look dead.
    """

    def __init__(
        self, say: Callable[[str], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.notice = say
        self._clock = clock
        self._activity: _Activity | None = None
        self._lock = threading.Lock()

    def started(self, stage: str) -> Progress:
        self.notice(f"{stage:18} started")
        now = self._clock()
        activity = _Activity(stage, now, now)
        with self._lock:
            self._activity = activity

        def progress(done: int, total: int | None, what: str) -> None:
            with self._lock:
                self._progress(activity, done, total, what)

        return progress

    def beat(self) -> None:
        with self._lock:
            activity, now = self._activity, self._clock()
            if activity is not None and now - activity.printed_s >= MAX_SILENCE_S:
                activity.printed_s = now
                self.notice(activity.line(elapsed_s=now - activity.began_s))

    def finished(self, stage: str, done: Done) -> None:
        with self._lock:
            self._activity = None
        self.notice(_outcome(stage, done))

    def _progress(self, activity: _Activity, done: int, total: int | None, what: str) -> None:
        now, kind = self._clock(), _without_number(what)
        is_new = kind != activity.kind
        if is_new:
            activity.kind, activity.began_s, activity.first_done = kind, now, done
        activity.text, activity.done, activity.total = what, done, total
        if is_new or now - activity.printed_s >= LINE_INTERVAL_S:
            activity.printed_s = now
            left = ""
            if total and activity.first_done < done < total:
                seconds_each = (now - activity.began_s) / (done - activity.first_done)
                left = f", about {duration(seconds_each * (total - done))} left"
            self.notice(activity.line() + left)


def _without_number(what: str) -> str:
    """The text without a number at its end: "waiting, 3 s" is the same work as "waiting, 2 s"."""
    return what.rstrip("0123456789. s")


class _TerminalDisplay:
    """Show one bar for the stage that runs; finished stages scroll up as lines.

    On a narrow terminal the text is shortened, and the figures stay whole.
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

        def figure_column() -> Column:
            return Column(no_wrap=True, min_width=7, justify="right")

        columns = (
            SpinnerColumn(),
            TextColumn("{task.fields[stage]}", markup=False, table_column=Column(no_wrap=True)),
            TextColumn(
                "{task.description}",
                markup=False,
                table_column=Column(no_wrap=True, overflow="ellipsis", ratio=1),
            ),
            *([BarColumn(bar_width=24)] if console.width >= MIN_COLUMNS_FOR_BAR else []),
            TextColumn(
                "{task.fields[count]}", markup=False, justify="right", table_column=figure_column()
            ),
            TimeElapsedColumn(table_column=figure_column()),
            TimeRemainingColumn(table_column=figure_column()),
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
        last_kind, last_total = "", None

        def progress(done: int, total: int | None, what: str) -> None:
            nonlocal last_kind, last_total
            with self._lock:
                kind = _without_number(what)
                if kind != last_kind or (last_total is None) != (total is None):
                    # A new bar begins a new estimate, and a bar cannot lose its total.
                    self._draw(stage, what, done, total)
                elif self._task is not None:
                    self._bars.update(
                        self._task,
                        description=what,
                        completed=done,
                        total=total,
                        count=_count(done, total),
                    )
                last_kind, last_total = kind, total

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
    if total:
        return f"{done}/{total}"
    return str(done) if done else ""
