"""The page to try a gateway, in a real browser, before a scripted backend. `make browser-check`
keeps the screenshots; docs/gateway.png is of the quickstart pair.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.browser import MISSING, Look, View, find_browser, look
from tests.support.gateways import ScriptedBackend, gateway
from toolkit.client import Chunk, Options, RequestRefused, ServerUnavailable, Statistics
from toolkit.gateway.backends import Piece

WIDTHS = (390, 1280)
KEY = "a-key-of-sixteen-characters"
STEP_S = 0.04  # of both arms: the speculative one has a quarter of the steps
DRAFTED = 3

Step = tuple[str, int, int]  # text, tokens, accepted drafts of them
SPECULATIVE: Sequence[Step] = (
    ("\n    with", 1, 0),
    (" open(path) as", 4, 3),
    (" file:\n", 2, 1),
    ("        return json", 3, 2),
    (".load(file)\n", 4, 3),
    ("\n", 1, 0),
)
TEXT = "".join(text for text, _, _ in SPECULATIVE)
PLAIN: Sequence[Step] = tuple((part, 1, 0) for part in re.findall(r"\s*\S{1,5}|\s+$", TEXT))
# [text, class, tooltip, colour] of each chunk in the page.
SPECULATIVE_CHUNKS = """[...at("speculative").querySelectorAll("pre span")].map(
  span => [span.textContent, span.className, span.title, getComputedStyle(span).backgroundColor])"""
CLICK = "at('go').click();"
OVER = "!at('go').disabled && at('verdict').textContent"
UNSEEN = "rgba(0, 0, 0, 0)"

pytestmark = [pytest.mark.slow, pytest.mark.skipif(find_browser() is None, reason=MISSING)]


@dataclass
class Arms(ScriptedBackend):
    """Two arms of one text. fails: the speculative arm ends with this after its second chunk.
    is_empty: no answer has a token. switches: else no request may set its draft length.
    """

    fails: Exception | None = None
    is_empty: bool = False
    switches: bool = True

    async def stream(
        self, prompt: str, options: Options, request_id: str, *, streams: bool, tells_accepted: bool
    ) -> AsyncIterator[Piece]:
        self.seen.append((prompt, options, request_id))
        is_plain = options.num_draft_tokens == 0
        if is_plain and not self.switches:
            raise RequestRefused("num_draft_tokens: this server cannot switch", "refused")
        steps = PLAIN if is_plain else SPECULATIVE
        if options.max_tokens == 1:
            steps = steps[:1]
        if self.is_empty:
            steps = [("", 0, 0)]
        tokens = accepted = 0
        for number, (text, new, new_accepted) in enumerate(steps):
            await asyncio.sleep(STEP_S)
            if self.fails is not None and not is_plain and number == 2:
                raise self.fails
            ids = tuple(range(tokens, tokens + new))
            tokens, accepted = tokens + new, accepted + new_accepted
            statistics = None
            if is_last := number == len(steps) - 1:
                drafted = 0 if is_plain else DRAFTED * (len(steps) - 1)
                statistics = Statistics(4, tokens, drafted, accepted, len(steps) - 1)
            reason = "length" if is_last else None
            chunk = Chunk(text, ids, tokens, time.monotonic_ns(), reason, None, statistics)
            yield Piece(chunk, new_accepted if tells_accepted else None)


def seen(folder: Path, *views: View) -> list[Look]:
    browser = find_browser()
    assert browser is not None
    return look(browser, views, folder / "profile")


@pytest.fixture(scope="module")
def looks(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[tuple[int, bool], Look]:
    """The page after "Run both", by width and whether it is dark."""
    screenshots = request.config.getoption("--screenshots")
    with gateway(Arms()) as served:
        views = {}
        for width in WIDTHS:
            for dark in (False, True):
                shot = f"try-{width}-{'dark' if dark else 'light'}.png"
                keep = None if screenshots is None else screenshots / shot
                views[width, dark] = View(
                    f"{served.url}/", width, dark, keep, OVER, CLICK, SPECULATIVE_CHUNKS
                )
        found = seen(tmp_path_factory.mktemp("page"), *views.values())
    return dict(zip(views, found, strict=True))


def test_both_columns_have_the_text_and_their_speed(looks: dict[tuple[int, bool], Look]) -> None:
    for one in looks.values():
        assert one.messages == []
        assert {url.rpartition("/")[2] for url in one.requests} <= {
            "models",
            "completions",
            "data:,",
        }
        plain, speculative = re.findall(r"(\d+) tokens/s", one.text)
        assert int(speculative) > int(plain)
        assert one.text.count("return json.load(file)") == 2
        assert f"{len(PLAIN)} tokens" in one.text and "15 tokens" in one.text
        assert "9 of 15 accepted" in one.text and "0 of" not in one.text
        (ratio,) = re.findall(r"([\d.]+)x as fast; the same text", one.text)
        assert float(ratio) > 1.5
        assert len(re.findall(r"\d+ ms first token", one.text)) == 2


def test_a_chunk_has_one_colour_by_its_accepted_drafts(
    looks: dict[tuple[int, bool], Look],
) -> None:
    for one in looks.values():
        colours: dict[str, str] = {}
        for (text, tokens, accepted), chunk in zip(SPECULATIVE, one.read, strict=True):
            name = f"a{accepted}" if accepted else ""
            title = f"tokens: {tokens}; accepted drafts: {accepted}"
            assert chunk[:3] == [text, name, title]
            assert colours.setdefault(name, chunk[3]) == chunk[3]
        assert colours.pop("") == UNSEEN
        assert len({*colours.values(), UNSEEN}) == 4
        assert "accepted draft tokens, per chunk: none123 or more" in one.text
        assert "its text has one colour" in one.text


def test_nothing_runs_out_of_the_page(looks: dict[tuple[int, bool], Look]) -> None:
    assert {key: one.scroll for key, one in looks.items() if one.scroll > key[0]} == {}
    assert {key: one.cut for key, one in looks.items() if one.cut} == {}


def test_a_key_is_asked_for_and_sent(tmp_path: Path) -> None:
    with gateway(Arms(), keys=(KEY,)) as served:
        without = View(f"{served.url}/", 1280, False, None, OVER, CLICK)
        typed = f"at('key').value = '{KEY}'; at('verdict').textContent = ''; {CLICK}"
        given = View(f"{served.url}/", 1280, False, None, f"{OVER}.includes('fast')", typed)
        refused, answered = seen(tmp_path, without, given)
    assert "API key" in refused.text and " ms first token" not in refused.text
    assert "the same text" in answered.text and KEY not in answered.text


def test_an_error_is_shown_in_words(tmp_path: Path) -> None:
    backend = Arms(fails=ServerUnavailable("127.0.0.1:1: gone"))
    with gateway(backend) as served:
        page = f"{served.url}/"
        wrong = "at('temperature').value = '-1';" + CLICK
        broken, refused = seen(
            tmp_path,
            View(page, 390, False, None, OVER, CLICK, SPECULATIVE_CHUNKS),
            View(page, 390, False, None, OVER, wrong, "at('verdict').textContent"),
        )
    assert "the model's server is unavailable" in broken.text
    assert [chunk[0] for chunk in broken.read] == [text for text, _, _ in SPECULATIVE[:2]]
    assert "temperature" in refused.read and "-1" in refused.read


def test_an_answer_without_a_token_is_no_error(tmp_path: Path) -> None:
    with gateway(Arms(is_empty=True)) as served:
        (one,) = seen(tmp_path, View(f"{served.url}/", 390, False, None, OVER, CLICK))
    assert "the same text (one request each" in one.text
    assert "undefined" not in one.text and "x as fast" not in one.text
    assert one.messages == []


def test_a_server_that_cannot_switch_speculates_alone(tmp_path: Path) -> None:
    reads = f"[at('plain').innerText, {SPECULATIVE_CHUNKS}]"
    with gateway(Arms(switches=False)) as served:
        (one,) = seen(tmp_path, View(f"{served.url}/", 1280, False, None, OVER, CLICK, reads))
    plain, chunks = one.read
    assert "this server cannot switch" in plain
    assert "".join(chunk[0] for chunk in chunks) == TEXT
    assert "nothing to compare with" in one.text
