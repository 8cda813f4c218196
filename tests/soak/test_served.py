"""Requests of the soak against a real server of the tiny pair."""

from __future__ import annotations

import pytest

from tests.soak.growth import answered, cancelled
from tests.soak.traffic import MALFORMED, WORDS, Case, Server, Traffic
from toolkit.client import RequestRefused
from toolkit.triton.process.server import TritonServer

# Greedily, the tiny target goes on to the last token; sampled, its first token may end the text.
LASTING = "another's"
LONG = {"max_tokens": 600, "temperature": 0.0, "num_draft_tokens": 0}


@pytest.mark.parametrize("hangs_up", [False, True])
@pytest.mark.parametrize("layout", ["llmapi", "bls"])
def test_every_attack_is_refused_and_the_server_goes_on(
    request: pytest.FixtureRequest, layout: str, hangs_up: bool
) -> None:
    """A request that runs meanwhile goes on to its end."""
    fixture = "tiny_server" if layout == "llmapi" else "tiny_bls_server"
    started: TritonServer = request.getfixturevalue(fixture)
    server = Server.at(started.grpc_url)
    running = server.client.stream(LASTING, request_id="another's", **LONG)
    next(running)
    attacks = MALFORMED | server.hostile
    assert ("a stop for an id that nobody has" in attacks) is (layout == "llmapi")
    assert ("the logits of a million tokens" in attacks) is (layout == "bls")
    for name, make in attacks.items():
        with pytest.raises(RequestRefused) as refused:
            server.send(make(server), hangs_up=hangs_up)
        assert WORDS.get(name, "") in str(refused.value)
    assert list(running)[-1].finish_reason == "length"
    cancelled(server)
    answered(server)
    server.close()


def test_a_stop_ends_the_request_with_its_id_and_no_other(tiny_server: TritonServer) -> None:
    server = Server.at(tiny_server.grpc_url)
    other = server.client.stream(LASTING, request_id="another's", **LONG)
    next(other)
    traffic, case = Traffic({}), Case(LASTING, 600)
    outcomes = [traffic.stopped(server, case, f"mine {number}", 1) for number in range(3)]
    assert {verdict for _, verdict in outcomes} == {"right"}
    assert "cancelled" in {outcome for outcome, _ in outcomes}
    assert list(other)[-1].finish_reason == "length"
    server.close()
