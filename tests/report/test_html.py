from __future__ import annotations

import re
from dataclasses import replace
from html import escape
from html.parser import HTMLParser

import pytest

from tests.support.judged_reports import HOSTILE
from toolkit.records.report import ValidationReport
from toolkit.report.html import render_html

VOID = {"meta", "br", "img", "input", "link", "hr", "wbr"}


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


@pytest.mark.parametrize("which", ["passing", "failing", "plain_only", "advised"])
def test_the_page_stands_alone(which: str, request: pytest.FixtureRequest) -> None:
    page = render_html(request.getfixturevalue(which))
    reader = Reader(page)
    assert not {"script", "link", "img", "iframe", "object"} & set(reader.tags)
    assert not re.search(
        r"https?://|@import|url\(|\ssrc=", re.sub(r"<td[^>]*>.*?</td>|<title>.*?</title>", "", page)
    )
    assert "default-src 'none'" in page
    assert "prefers-color-scheme: dark" in page
    assert 'name="viewport"' in page


def test_verdict_and_gates_come_first_then_what_to_do(failing: ValidationReport) -> None:
    page = render_html(failing)
    places = [
        page.index(text)
        for text in ("<h1>", ">Gates<", ">What to do next<", ">What was measured<", ">All figures<")
    ]
    assert places == sorted(places)
    assert page.count('class="outcome') == len(failing.gates)


def test_what_a_prompt_holds_is_shown_and_not_obeyed(failing: ValidationReport) -> None:
    page = render_html(failing)
    assert "<script" not in page and "<img" not in page
    assert any(HOSTILE[:30] in word for word in Reader(page).words)


def test_whatever_a_record_says_is_text(advised: ValidationReport) -> None:
    """Names, gates, definitions: where the page shows a field, it shows it as it was written."""
    odd = "<b onclick='x'>\"{{ 7 * 7 }}\" & {% raw %}</b>"
    gates = tuple(replace(gate, detail=odd) for gate in advised.gates)
    definitions = {
        name: replace(figure, formula=odd) for name, figure in advised.definitions.items()
    }
    page = render_html(replace(advised, name=odd, gates=gates, definitions=definitions))
    assert odd not in page
    shown = "".join(Reader(page).words)
    assert shown.count(odd) >= 2 + len(gates)


def test_every_figure_has_its_formula_one_click_away(passing: ValidationReport) -> None:
    page = render_html(passing)
    for name in (
        "speedup",
        "tokens_per_s",
        "acceptance_rate",
        "ttft",
        "itl",
        "kl_mean",
        "layer_error",
        "parity",
    ):
        assert f"<dt>{name} = {escape(passing.definitions[name].formula)}" in page


def test_long_names_may_break_and_short_intervals_do_not(advised: ValidationReport) -> None:
    page = render_html(advised)
    assert "W8A8_<wbr>SQ_<wbr>PER_<wbr>CHANNEL" in page
    assert '1.70 <span class="kept">(1.60 to 1.78)</span>' in page
    assert "".join(Reader(page).words).count("W8A8_SQ_PER_CHANNEL") >= 2
