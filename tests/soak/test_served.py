"""Requests of the soak against a real server of the tiny pair."""

from __future__ import annotations

import pytest

from tests.soak.growth import answered, cancelled
from tests.soak.traffic import HOSTILE, MALFORMED, Server
from toolkit.client import RequestRefused
from toolkit.triton.process.server import TritonServer


@pytest.mark.parametrize("hangs_up", [False, True])
def test_every_attack_is_refused_and_the_server_goes_on(
    tiny_server: TritonServer, hangs_up: bool
) -> None:
    server = Server.at(tiny_server.grpc_url)
    for make in (MALFORMED | HOSTILE).values():
        with pytest.raises(RequestRefused):
            server.send(make(server), hangs_up=hangs_up)
    cancelled(server)
    answered(server)
    server.close()
