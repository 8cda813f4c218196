"""What is printed during long work: lines if the output is piped, a bar on a terminal."""

from __future__ import annotations

import io
import re
from pathlib import Path

import pytest

from toolkit.cli.progress import PlainDisplay, displayed, duration
from toolkit.pipeline.stage import Done
from toolkit.pipeline.store import Entry


def done(seconds: float, *, reused: bool = False, peak: int | None = 3 * 2**30) -> Done:
    provenance = {"seconds": seconds, "peak_memory_bytes": peak}
    return Done(Entry("pair", "k", Path("x"), {}, {}, {}, provenance), None, reused)


def test_lines_are_throttled_and_have_an_estimate() -> None:
    now, lines = [0.0], list[str]()
    display = PlainDisplay(lines.append, clock=lambda: now[0])
    progress = display.started("quantize/target")
    for step in range(1, 13):
        now[0] = float(step)
        progress(step, 24, "calibrating")
    progress(1, None, "reading back")
    display.finished("quantize/target", done(75.2))
    assert [re.sub(" +", " ", line) for line in lines] == [
        "quantize/target started",
        "quantize/target calibrating 1/24",
        "quantize/target calibrating 6/24, about 18 s left",
        "quantize/target calibrating 11/24, about 13 s left",
        "quantize/target reading back 1",
        "quantize/target done in 1 min 15 s, 3.22 GB at most",
    ]


def test_a_text_that_only_counts_is_not_news() -> None:
    now, lines = [0.0], list[str]()
    progress = PlainDisplay(lines.append, clock=lambda: now[0]).started("validate")
    for second in range(4):
        now[0] = float(second)
        progress(second, None, f"waiting for tritonserver, {second} s")
    assert len(lines) == 2


def test_silent_work_is_said_to_go_on() -> None:
    now, lines = [0.0], list[str]()
    display = PlainDisplay(lines.append, clock=lambda: now[0])
    display.beat()  # before anything has started
    progress = display.started("compile/target")
    for second in range(1, 41):
        now[0] = float(second)
        if second == 2:
            progress(0, None, "target: compiling kernels")
        display.beat()
    display.finished("compile/target", done(40.0))
    now[0] = 100.0
    display.beat()  # after it has ended
    assert [re.sub(" +", " ", line) for line in lines] == [
        "compile/target started",
        "compile/target target: compiling kernels",
        "compile/target target: compiling kernels, for 15 s",
        "compile/target target: compiling kernels, for 30 s",
        "compile/target done in 40 s, 3.22 GB at most",
    ]


def test_reuse_is_one_line() -> None:
    lines = list[str]()
    PlainDisplay(lines.append).finished("pair", done(1.0, reused=True))
    assert re.sub(" +", " ", lines[0]) == "pair reused"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_pipe_gets_plain_lines_and_quiet_gets_none() -> None:
    stream = io.StringIO()
    with displayed(stream) as display:
        display.started("pair")(1, 2, "reading")
    assert stream.getvalue() == "pair               started\npair               reading 1/2\n"
    quiet = io.StringIO()
    with displayed(quiet, quiet=True) as display:
        display.started("pair")
    assert quiet.getvalue() == ""


@pytest.mark.parametrize("colours", [True, False])
def test_a_terminal_gets_a_bar_without_colours_if_it_asks(
    colours: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    if not colours:
        monkeypatch.setenv("NO_COLOR", "1")
    stream = Terminal()
    with displayed(stream) as display:
        progress = display.started("quantize/target")
        progress(3, 10, "calibrating")
        progress(1, 5, "measuring [quality]")
        display.finished("quantize/target", done(2.0))
        display.notice("a line [with brackets]")
    text = stream.getvalue()
    assert "done in 2.0 s" in text
    assert "[with brackets]" in text
    assert bool(re.search(r"\x1b\[[\d;]*3\dm", text)) == colours


@pytest.mark.parametrize("columns", [80, 120])
def test_figures_are_whole_on_a_narrow_terminal_and_words_give_way(
    columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("NO_COLOR", "1")
    stream = Terminal()
    with displayed(stream) as display:
        progress = display.started("validate")
        progress(17000, 17311, "drawing tokens")
        progress(3, 64, "asking the unquantized model about every token, texts")
    text = re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", stream.getvalue())
    last = [line.rstrip() for line in text.splitlines() if "validate" in line][-1]
    assert re.search(r" 3/64 +\d:\d\d:\d\d -:--:--$", last) and len(last) <= columns
    assert ("every token, texts" in last) == (columns == 120) and ("…" in last) == (columns == 80)


def test_what_has_no_total_shows_none_of_the_step_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    stream = Terminal()
    with displayed(stream) as display:
        progress = display.started("validate")
        progress(17000, 17311, "drawing tokens")
        progress(0, None, "testing what was drawn")
    last = [line for line in stream.getvalue().splitlines() if "validate" in line][-1]
    assert "testing what was drawn" in last and "17311" not in last


@pytest.mark.parametrize(
    "seconds, text",
    [(0.04, "0.0 s"), (9.94, "9.9 s"), (59.4, "59 s"), (61, "1 min 01 s"), (7260, "2 h 01 min")],
)
def test_durations_are_short(seconds: float, text: str) -> None:
    assert duration(seconds) == text
