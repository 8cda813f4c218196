"""What libraries read from the environment once, when they are loaded."""

from __future__ import annotations

import os

__all__ = ["POLICIES", "set_policies"]

POLICIES = {
    # OpenMP threads that spin while they wait slow everything down on a busy machine: on two loaded
    # cores a calibration took 136 s spinning and 16 s sleeping.
    "OMP_WAIT_POLICY": "PASSIVE",
    # gRPC's newer poller (1.85) hands each message from thread to thread: a streamed chunk takes
    # 230 us of a client's processor time and 8 switches between threads, without it 175 us and 3
    # (Zen 4, asyncio). What a client takes on the server's own machine is missing there.
    "GRPC_EXPERIMENTS": "-event_engine_client",
}


def set_policies() -> None:
    """Call it before every heavy import. What the environment states stays."""
    for name, value in POLICIES.items():
        os.environ.setdefault(name, value)
