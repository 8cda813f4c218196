"""Looks at a page in a real headless Chromium, through its DevTools protocol: what it logs, loads and lays out.

https://chromedevtools.github.io/devtools-protocol/; the browser listens on a free loopback port of its own choice.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import json
import shutil
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
MISSING = f"no browser on PATH ({', '.join(NAMES)})"
STARTS_S = 60.0
FLAGS = (
    "--headless",
    "--no-sandbox",  # Chromium refuses to start as root otherwise; the pages are our own
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-extensions",
    "--no-first-run",
    "--remote-debugging-port=0",
    "--hide-scrollbars",
)

# Texts of a plot that leave its figure, and pairs of texts that cover each other.
MEASURE = """(() => {
  const outside = [], covered = [], cut = [];
  for (const box of document.querySelectorAll("section"))
    if (box.scrollWidth > box.clientWidth) cut.push(box.innerText.split("\\n")[0]);
  for (const svg of document.querySelectorAll("svg")) {
    const frame = svg.closest("figure").getBoundingClientRect();
    const boxes = [...svg.querySelectorAll("text")].map(text => [text.textContent, text.getBoundingClientRect()]);
    boxes.forEach(([name, a], i) => {
      if (a.left < frame.left || a.right > frame.right || a.top < frame.top || a.bottom > frame.bottom)
        outside.push(svg.getAttribute("aria-label") + ": " + name);
      for (const [other, b] of boxes.slice(i + 1))
        if (a.left < b.right - 1 && b.left < a.right - 1 && a.top < b.bottom - 3 && b.top < a.bottom - 3)
          covered.push(svg.getAttribute("aria-label") + ": " + name + " / " + other);
    });
  }
  const colour = (element, name) => getComputedStyle(element)[name];
  return {
    scroll: document.documentElement.scrollWidth, inner: innerWidth, plots: document.querySelectorAll("svg").length,
    height: document.documentElement.scrollHeight, outside, covered, cut, text: document.body.innerText,
    background: colour(document.body, "backgroundColor"), ink: colour(document.body, "color"),
    smallest: Math.min(...[...document.querySelectorAll("svg text")].map(
      text => parseFloat(colour(text, "fontSize")) * text.getScreenCTM().d || Infinity)),
  };
})()"""


SHOWN = "new Promise(done => { const look = () => (%s) ? done() : setTimeout(look, 20); look(); })"


def find_browser() -> str | None:
    return next((path for name in NAMES if (path := shutil.which(name))), None)


@dataclass(frozen=True)
class View:
    """page: a file, or a URL. does: JavaScript that runs once it has loaded. shown: an expression
    that is true once the page is complete. reads: an expression whose value `Look.read` gets.
    """

    page: Path | str
    width: int
    dark: bool
    screenshot: Path | None = None
    shown: str = "true"
    does: str = ""
    reads: str = "null"

    @property
    def url(self) -> str:
        return self.page if isinstance(self.page, str) else self.page.absolute().as_uri()


@dataclass(frozen=True)
class Look:
    """messages: what the page logged, complaints of the browser included, its recommendations not. requests: addresses other than the page's own.

    smallest: font size of the smallest text in a plot, in CSS pixels on the screen; None without plots. cut: sections
    that are wider than their frame, by their first line. text: what a reader sees. read: what the
    view asked for.
    """

    messages: list[str]
    requests: list[str]
    scroll: int
    inner: int
    height: int
    plots: int
    outside: list[str]
    covered: list[str]
    cut: list[str]
    text: str
    background: str
    ink: str
    smallest: float | None
    read: Any


def look(browser: str, views: Sequence[View], profile: Path) -> list[Look]:
    """One browser for all views, one tab after the other."""
    return asyncio.run(_look(browser, views, profile))


async def _look(browser: str, views: Sequence[View], profile: Path) -> list[Look]:
    async with (
        _started(browser, profile) as address,
        aiohttp.ClientSession() as http,
        http.ws_connect(address, max_msg_size=0) as socket,
    ):
        tab = _Protocol(socket)
        return [await _view(tab, view) for view in views]


@contextlib.asynccontextmanager
async def _started(browser: str, profile: Path) -> AsyncIterator[str]:
    """Yields the address of its DevTools socket."""
    errors = profile.with_suffix(".log")
    with errors.open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            browser, *FLAGS, f"--user-data-dir={profile}", "about:blank", stdout=log, stderr=log
        )
    try:
        file = profile / "DevToolsActivePort"
        for _ in range(int(STARTS_S / 0.05)):
            lines = file.read_text().split() if file.exists() else []
            if len(lines) == 2 or process.returncode is not None:
                break
            await asyncio.sleep(0.05)
        assert file.exists(), (
            f"{browser} did not start: {errors.read_text(errors='replace')[-2000:]}"
        )
        port, path = file.read_text().split()
        yield f"ws://127.0.0.1:{port}{path}"
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        await process.wait()


class _Protocol:
    """Commands one at a time; events that come in between are kept."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._ids = itertools.count(1)
        self.events: list[dict[str, Any]] = []

    async def call(self, method: str, session: str | None = None, **params: Any) -> dict[str, Any]:
        number = next(self._ids)
        message = {
            "id": number,
            "method": method,
            "params": params,
            **({"sessionId": session} if session else {}),
        }
        await self._socket.send_json(message)
        while True:
            answer = await self._next()
            if answer.get("id") == number:
                assert "error" not in answer, (method, answer["error"])
                result: dict[str, Any] = answer["result"]
                return result

    async def until(self, method: str) -> None:
        while not any(event["method"] == method for event in self.events):
            await self._next()

    async def _next(self) -> dict[str, Any]:
        answer: dict[str, Any] = json.loads(await self._socket.receive_str(timeout=STARTS_S))
        if "method" in answer:
            self.events.append(answer)
        return answer


async def _view(tab: _Protocol, view: View) -> Look:
    tab.events.clear()
    target = (await tab.call("Target.createTarget", url="about:blank"))["targetId"]
    session = (await tab.call("Target.attachToTarget", targetId=target, flatten=True))["sessionId"]
    for domain in ("Page", "Runtime", "Log", "Network"):
        await tab.call(f"{domain}.enable", session)
    phone = view.width < 600
    metrics = {
        "width": view.width,
        "height": 844,
        "deviceScaleFactor": 2 if phone else 1,
        "mobile": phone,
    }
    await tab.call("Emulation.setDeviceMetricsOverride", session, **metrics)
    scheme = {"name": "prefers-color-scheme", "value": "dark" if view.dark else "light"}
    await tab.call("Emulation.setEmulatedMedia", session, features=[scheme])
    tab.events.clear()
    await tab.call("Page.navigate", session, url=view.url)
    await tab.until("Page.loadEventFired")
    await tab.call("Runtime.evaluate", session, expression=view.does)
    await tab.call("Runtime.evaluate", session, expression=SHOWN % view.shown, awaitPromise=True)
    found, read = [
        (await tab.call("Runtime.evaluate", session, expression=expression, returnByValue=True))[
            "result"
        ].get("value")
        for expression in (MEASURE, view.reads)
    ]
    if view.screenshot is not None:
        shot = await tab.call(
            "Page.captureScreenshot", session, captureBeyondViewport=True, clip=_all_of(view, found)
        )
        view.screenshot.parent.mkdir(parents=True, exist_ok=True)
        view.screenshot.write_bytes(base64.b64decode(shot["data"]))
    own = view.url
    params = [(event["method"], event["params"]) for event in tab.events]
    await tab.call("Target.closeTarget", targetId=target)
    return Look(
        messages=[
            json.dumps(one)
            for name, one in params
            if name in COMPLAINTS and one.get("entry", {}).get("source") != "recommendation"
        ],
        requests=[
            url
            for name, one in params
            if name == "Network.requestWillBeSent" and (url := one["request"]["url"]) != own
        ],
        read=read,
        **found,
    )


COMPLAINTS = ("Log.entryAdded", "Runtime.consoleAPICalled", "Runtime.exceptionThrown")


def _all_of(view: View, found: dict[str, Any]) -> dict[str, float]:
    return {"x": 0, "y": 0, "width": view.width, "height": found["height"], "scale": 1}
