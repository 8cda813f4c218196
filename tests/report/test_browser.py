"""Every kind of report in a real browser: desktop and phone, light and dark. `make
browser-check` keeps the screenshots.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.browser import MISSING, Look, View, find_browser, look
from toolkit.records.report import ValidationReport
from toolkit.report.html import render_html

WIDTHS = (390, 768, 1280)
PHONE = 390
REPORTS = Path(__file__).parents[2] / "build" / "reports"
READABLE_PX = 9.0

pytestmark = [pytest.mark.slow, pytest.mark.skipif(find_browser() is None, reason=MISSING)]

Looks = dict[tuple[str, int, bool], Look]


@pytest.fixture(scope="module")
def looks(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    passing: ValidationReport,
    failing: ValidationReport,
    plain_only: ValidationReport,
    advised: ValidationReport,
) -> Looks:
    """Each page at each width; in both schemes where screenshots are wanted or the width is a
    phone's.
    """
    folder = tmp_path_factory.mktemp("pages")
    kept = request.config.getoption("--screenshots")
    pages = {"passing": passing, "failing": failing, "plain_only": plain_only, "advised": advised}
    files = {name: folder / f"{name}.html" for name in pages}
    for name, report in pages.items():
        files[name].write_text(render_html(report), encoding="utf-8")
    if kept is not None:
        files |= {
            f"built-{file.parent.name}": file for file in sorted(REPORTS.glob("*/report.html"))
        }

    views: dict[tuple[str, int, bool], View] = {}
    for name, file in files.items():
        for width in WIDTHS:
            for dark in (False, True):
                if dark and kept is None and width != PHONE:
                    continue
                shot = f"{name}-{width}-{'dark' if dark else 'light'}.png"
                keep = None if kept is None or width not in (PHONE, 1280) else kept / shot
                views[name, width, dark] = View(file, width, dark, keep)
    browser = find_browser()
    assert browser is not None
    found = look(browser, list(views.values()), folder / "profile")
    return dict(zip(views, found, strict=True))


def test_nothing_is_logged_and_nothing_is_fetched(looks: Looks) -> None:
    assert {key: one.messages for key, one in looks.items() if one.messages} == {}
    assert {key: one.requests for key, one in looks.items() if one.requests} == {}


def test_nothing_runs_out_of_the_page(looks: Looks) -> None:
    assert {
        key: one.scroll for key, one in looks.items() if one.scroll > key[1] or one.inner != key[1]
    } == {}


def test_texts_of_plots_are_inside_apart_and_readable(looks: Looks) -> None:
    assert min(one.plots for one in looks.values()) >= 7
    assert {key: one.outside for key, one in looks.items() if one.outside} == {}
    assert {key: one.covered for key, one in looks.items() if one.covered} == {}
    assert min(one.smallest for one in looks.values()) >= READABLE_PX


def test_the_scheme_is_the_readers(looks: Looks) -> None:
    for (name, width, dark), one in looks.items():
        background, ink = brightness(one.background), brightness(one.ink)
        assert abs(background - ink) > 120 and (background < ink) == dark, (name, width, dark)


def brightness(colour: str) -> float:
    """Mean of the channels of `rgb(r, g, b)`."""
    channels = [float(part) for part in colour[colour.index("(") + 1 : -1].split(",")[:3]]
    return sum(channels) / 3


def test_a_browser_that_complains_or_fetches_is_noticed(tmp_path: Path) -> None:
    """The checks above can fail: a page with each fault."""
    page = tmp_path / "faulty.html"
    page.write_text(
        "<!doctype html><body style='width:2000px'><figure><svg viewBox='0 0 9 9'><text x='4'"
        " y='4'>a</text><text x='4' y='4'>b</text></svg></figure><img"
        " src='missing.png'><script>console.error('no'); throw Error('oh')</script>"
    )
    browser = find_browser()
    assert browser is not None
    (found,) = look(browser, [View(page, PHONE, False)], tmp_path / "profile")
    assert any("oh" in message for message in found.messages)
    assert found.requests == [(tmp_path / "missing.png").as_uri()]
    assert found.scroll > PHONE
    assert found.covered
