"""What the command line states for libraries is known to them, and gives way to the user's own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from toolkit.process.policies import POLICIES, forget_client_policy, set_policies

CHANNEL = """
from toolkit.process.policies import set_policies
set_policies()
import grpc
grpc.insecure_channel("localhost:1").close()
"""


def complaints(variables: dict[str, str]) -> str:
    """What gRPC prints in a process with a channel."""
    environment = {name: value for name, value in os.environ.items() if name not in POLICIES}
    done = subprocess.run(
        [sys.executable, "-c", CHANNEL],
        env={**environment, **variables},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stderr


def test_grpc_knows_its_policy() -> None:
    """It complains about an experiment that is gone."""
    assert complaints({}) == ""
    assert "no_such_one" in complaints({"GRPC_EXPERIMENTS": "-no_such_one"})


def test_what_the_environment_states_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    monkeypatch.delenv("GRPC_EXPERIMENTS", raising=False)
    set_policies()
    assert os.environ["OMP_WAIT_POLICY"] == "ACTIVE"
    assert os.environ["GRPC_EXPERIMENTS"] == POLICIES["GRPC_EXPERIMENTS"]


def test_servers_do_not_inherit_what_is_for_clients() -> None:
    ours, users = {**POLICIES, "A": "1"}, {"GRPC_EXPERIMENTS": "something_else"}
    for environment in (ours, users):
        forget_client_policy(environment)
    assert ours == {"OMP_WAIT_POLICY": "PASSIVE", "A": "1"}
    assert users == {"GRPC_EXPERIMENTS": "something_else"}
