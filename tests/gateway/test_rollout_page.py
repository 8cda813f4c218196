"""The page of a roll-out in a real browser, served by a gateway, with simulated states. `make
browser-check` keeps the screenshots; docs/rollout.png is `running-960-light.png` of them.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.support.browser import MISSING, Look, View, find_browser, look
from tests.support.gateways import ScriptedBackend, gateway
from tests.support.rollouts import Candidate, played
from toolkit.config.schema import RolloutConfig
from toolkit.gateway.arms import SERVED, Arm, OneArm

WIDTHS = (390, 960)
FIRST_AWAITED = 60  # answered sessions of the candidate, when nothing is judged yet

pytestmark = [pytest.mark.slow, pytest.mark.skipif(find_browser() is None, reason=MISSING)]

Looks = dict[tuple[str, int, bool], Look]


@dataclass(frozen=True)
class Shown(OneArm):
    """One arm, and the state of a roll-out, which the test sets."""

    state: dict[str, Any] = field(default_factory=dict)

    def summary(self) -> Any:
        return self.state


def states() -> Iterator[tuple[str, dict[str, Any]]]:
    """name -> what /rollout.json tells."""
    settings = RolloutConfig()

    def kept(name: str, state: Any) -> tuple[str, dict[str, Any]]:
        return name, {**copy.deepcopy(state.summary()), "paused": None}

    for state in played(Candidate(), settings, 1, swing=0.0):
        if state.step == 0 and state.in_step == FIRST_AWAITED:
            awaited = kept("awaited", state)
        if state.step == 2 and state.in_step == FIRST_AWAITED:
            running = kept("running", state)
    yield from (awaited, running, kept("promoted", state))
    *_, state = played(Candidate(slower=1.5), settings, 1, swing=0.0)
    yield kept("rolled-back", state)


@pytest.fixture(scope="module")
def looks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Looks:
    folder = tmp_path_factory.mktemp("pages")
    screenshots = request.config.getoption("--screenshots")
    browser = find_browser()
    assert browser is not None
    found: Looks = {}
    backend = ScriptedBackend()
    arms = Shown(Arm(SERVED, backend))
    with gateway(backend, arms=arms) as served:
        for name, state in states():
            arms.state.update(state)
            views = {}
            for width in WIDTHS:
                for dark in (False, True):
                    shot = f"{name}-{width}-{'dark' if dark else 'light'}.png"
                    keep = None if screenshots is None else screenshots / shot
                    views[name, width, dark] = View(
                        f"{served.url}/rollout", width, dark, keep, "at('alarm').textContent"
                    )
            seen = look(browser, list(views.values()), folder / f"profile-{name}")
            found |= dict(zip(views, seen, strict=True))
    return found


def test_nothing_is_logged_and_only_the_state_is_fetched(looks: Looks) -> None:
    assert {key: one.messages for key, one in looks.items() if one.messages} == {}
    fetched = {url.rpartition("/")[2] for one in looks.values() for url in one.requests}
    assert {name for name in fetched if not name.startswith("data:")} == {"rollout.json"}


def test_nothing_runs_out_of_the_page_or_is_cut(looks: Looks) -> None:
    assert {key: one.scroll for key, one in looks.items() if one.scroll > key[1]} == {}
    assert {key: one.cut for key, one in looks.items() if one.cut} == {}


def test_a_reader_sees_what_a_program_does(looks: Looks) -> None:
    for name, state in states():
        text = looks[name, 960, False].text
        assert text.count(state["why"]) >= 1
        for finding in state["evidence"]:
            assert f"{finding['test']}\t" in text and f"{finding['requests']:,}" in text
            if 0 < finding["wealth"] < 0.001:
                assert f"{finding['wealth']:.2e}".replace("e-0", "e-") in text
        assert f"{state['arms']['baseline']['sessions']:,}" in text
        assert ("not judged 100 of its requests yet" in text) == bool(state["missing"])
        for decision in state["decisions"]:
            assert decision["why"] in text
