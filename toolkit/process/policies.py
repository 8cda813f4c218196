"""What libraries read from the environment once, when they are loaded."""

from __future__ import annotations

import os
from collections.abc import MutableMapping

__all__ = ["POLICIES", "THREAD_POLICY", "forget_client_policy", "set_policies"]

# gRPC's newer poller (1.85) hands each message from thread to thread: a streamed chunk takes 230 us
# of a client's processor time and 8 switches between threads, without it 175 us and 3 (Zen 4,
# asyncio). What a client takes on the server's own machine is missing there.
CLIENT_POLICY = {"GRPC_EXPERIMENTS": "-event_engine_client"}
# Waiting OpenMP threads sleep. On two loaded cores a calibration took 136 s spinning and 16 s
# sleeping. Target forwards of the quickstart pair (INT8, 1 token, 2 threads) take 0.60 ms at best
# with either policy; at the median on a busy machine they take 1.0 to 1.7 ms when threads spin, and
# 0.66 ms when they sleep. ACTIVE made served tokens 2.5 times slower.
THREAD_POLICY = {"OMP_WAIT_POLICY": "PASSIVE"}
POLICIES = {**THREAD_POLICY, **CLIENT_POLICY}


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
