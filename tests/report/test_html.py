from __future__ import annotations

import json
import re
import shutil
import subprocess
from html import escape
from html.parser import HTMLParser
from pathlib import Path

import pytest

from tests.report.conftest import HOSTILE
from toolkit.records import ValidationReport
from toolkit.report.html import render_html

VOID = {"meta", "br", "img", "input", "link", "hr"}
BROWSER = next((path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None)


class Reader(HTMLParser):
    """Keeps the tags and the text of a page, and checks that tags nest."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.words: list[str] = []
        self.open: list[str] = []
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        assert not any(name.startswith("on") for name, _ in attrs)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)


@pytest.mark.parametrize("which", ["passing", "failing", "plain_only"])
def test_the_page_stands_alone(which: str, request: pytest.FixtureRequest) -> None:
    page = render_html(request.getfixturevalue(which))
    reader = Reader(page)
    assert not {"script", "link", "img", "iframe", "object"} & set(reader.tags)
    assert not re.search(r"https?://|@import|url\(|\ssrc=", re.sub(r"<td>.*?</td>|<title>.*?</title>", "", page))
    assert "default-src 'none'" in page
    assert "prefers-color-scheme: dark" in page
    assert 'name="viewport"' in page


def test_verdict_and_gates_come_first_then_what_to_do(failing: ValidationReport) -> None:
    page = render_html(failing)
    places = [page.index(text) for text in ("<h1>", ">Gates<", ">What to do next<", ">What was measured<", ">All figures<")]
    assert places == sorted(places)
    assert page.count('class="outcome') == len(failing.gates)


def test_what_a_prompt_holds_is_shown_and_not_obeyed(failing: ValidationReport) -> None:
    page = render_html(failing)
    assert "<script" not in page and "<img" not in page
    assert any(HOSTILE[:30] in word for word in Reader(page).words)


def test_every_figure_has_its_formula_one_click_away(passing: ValidationReport) -> None:
    page = render_html(passing)
    for name in ("speedup", "tokens_per_s", "acceptance_rate", "ttft", "itl", "kl_mean", "layer_error", "parity"):
        assert f"<dt>{name} = {escape(passing.definitions[name].formula)}" in page


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="no Chromium on PATH to lay the page out with")
@pytest.mark.parametrize("width", [360, 768, 1280])
@pytest.mark.parametrize("which", ["passing", "failing", "plain_only"])
def test_a_browser_lays_the_page_out_without_overflow(
    width: int, which: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """In a frame of the given width: nothing runs out of the page, and no plot's text out of its plot or into its neighbour."""
    page = render_html(request.getfixturevalue(which))
    frame = f'<iframe style="border:0;width:{width}px;height:900px" srcdoc="{escape(page, quote=True)}"></iframe>'
    script = """
    onload = () => {
      const inner = document.querySelector("iframe").contentDocument;
      const outside = [], covered = [];
      for (const svg of inner.querySelectorAll("svg")) {
        const frame = svg.closest("figure").getBoundingClientRect();
        const boxes = [...svg.querySelectorAll("text")].map(text => [text.textContent, text.getBoundingClientRect()]);
        boxes.forEach(([name, a], i) => {
          if (a.left < frame.left || a.right > frame.right || a.top < frame.top || a.bottom > frame.bottom) outside.push(name);
          for (const [other, b] of boxes.slice(i + 1))
            if (a.left < b.right - 1 && b.left < a.right - 1 && a.top < b.bottom - 3 && b.top < a.bottom - 3)
              covered.push(svg.getAttribute("aria-label") + ": " + name + " / " + other);
        });
      }
      document.body.textContent = "RESULT" + JSON.stringify({
        scroll: inner.documentElement.scrollWidth, plots: inner.querySelectorAll("svg").length, outside, covered,
        background: getComputedStyle(inner.body).backgroundColor}) + "END";
    };"""
    outer = tmp_path / "outer.html"
    outer.write_text(f"<!doctype html><meta charset=utf-8><body>{frame}<script>{script}</script>", encoding="utf-8")
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run"]
    done = subprocess.run(
        [
            str(BROWSER),
            *flags,
            f"--user-data-dir={tmp_path / 'profile'}",
            "--window-size=1400,1000",
            "--dump-dom",
            outer.as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    match = re.search(r"RESULT(\{.*\})END", done.stdout)
    assert match is not None, done.stderr[-2000:]
    from html import unescape

    found = json.loads(unescape(match[1]))
    assert found["scroll"] <= width
    assert found["plots"] >= 7
    assert found["outside"] == []
    assert found["covered"] == []
    assert found["background"] != "rgba(0, 0, 0, 0)"
