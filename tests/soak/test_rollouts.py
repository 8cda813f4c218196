"""What a planted fault has to reach: every step, also of a request that runs alone."""

from __future__ import annotations

import random
import time

import pytest

from tests.soak.rollouts import FAULTS
from tests.support.runtimes import make_request, make_runtime, serve_one
from tests.support.step_engines import BurstingTableEngine, ChainingTableEngine
from toolkit.speculative import drafters
from toolkit.speculative.runtime import SpeculativeRuntime


@pytest.mark.parametrize("kind", ["slower", "wrong text", "acceptance"])
def test_a_fault_of_steps_is_passed_by_no_burst(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("step", "_forward_chunks", "_may_burst"):  # put back when the test ends
        monkeypatch.setattr(SpeculativeRuntime, name, getattr(SpeculativeRuntime, name))
    for name in ("_chain", "token_rows"):
        monkeypatch.setattr(drafters, name, getattr(drafters, name))
    monkeypatch.setattr(random, "random", lambda: 0.0)  # a fault of some steps is one of all
    exec(FAULTS[kind].code.replace("{seconds}", "0"), {"time": time})
    target = BurstingTableEngine(1)
    runtime = make_runtime(target, ChainingTableEngine(1))
    serve_one(runtime, make_request(max_tokens=20))
    runtime.close()
    assert target.bursts == []
