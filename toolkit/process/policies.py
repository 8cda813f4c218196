"""What libraries read from the environment once, when they are loaded."""

from __future__ import annotations

import os
from collections.abc import MutableMapping

__all__ = ["POLICIES", "forget_client_policy", "set_policies"]

# gRPC's newer poller (1.85) hands each message from thread to thread: a streamed chunk takes 230 us
# of a client's processor time and 8 switches between threads, without it 175 us and 3 (Zen 4,
# asyncio). What a client takes on the server's own machine is missing there.
CLIENT_POLICY = {"GRPC_EXPERIMENTS": "-event_engine_client"}
POLICIES = {
    # OpenMP threads that spin while they wait slow everything down on a busy machine: on two loaded
    # cores a calibration took 136 s spinning and 16 s sleeping.
    "OMP_WAIT_POLICY": "PASSIVE",
    **CLIENT_POLICY,
}


def set_policies() -> None:
    """Call it before every heavy import. What the environment states stays."""
    for name, value in POLICIES.items():
        os.environ.setdefault(name, value)


def forget_client_policy(environment: MutableMapping[str, str]) -> None:
    """For a server that this process starts: it has a gRPC of its own, and is to run as it does
    where others start it.
    """
    for name, value in CLIENT_POLICY.items():
        if environment.get(name) == value:
            del environment[name]
