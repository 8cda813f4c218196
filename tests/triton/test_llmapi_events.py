"""Which events of the runtime the model of the `llmapi` layout hands to its sender, without a
server.
"""

from __future__ import annotations

import importlib
import queue
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from toolkit.interfaces import TokenEvent
from toolkit.triton.tensors.requests import Answer, Limits, parse

MODEL = "toolkit.triton.models.llmapi.model"


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The model's module, which imports what only Triton has."""
    monkeypatch.setenv("LD_LIBRARY_PATH", "")  # it removes this from the environment
    monkeypatch.setitem(
        sys.modules, "triton_python_backend_utils", ModuleType("triton_python_backend_utils")
    )
    monkeypatch.delitem(sys.modules, MODEL, raising=False)
    yield importlib.import_module(MODEL)
    sys.modules.pop(MODEL, None)


def handed_over(model: Any, *, streams: bool, interval_ns: int, count: int) -> list[int]:
    """The sizes in which so many events of a token each reach the sender, if it is always ready."""
    tensors = {"text_input": [b"x"], "streaming": [streams]}
    request = parse({**tensors}, {}, Limits(decoupled=True, max_draft_len=0))
    job = model.Job("1", "", None, Answer(request, interval_ns), 1000)
    outbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
    itself = SimpleNamespace(_outbox=outbox)
    sizes = []
    for number in range(count):
        reason = "length" if number == count - 1 else None
        event = TokenEvent("1", (number,), "a", finish_reason=reason)
        model.TritonPythonModel._take(itself, job, event)
        while not outbox.empty():
            _, events = outbox.get()
            sizes.append(len(events))
            for each in events:
                job.answer.add(each, time.monotonic_ns())
    return sizes


@pytest.mark.parametrize(
    ("streams", "interval_ns", "sizes"),
    [
        (True, 0, [1, 1, 1, 1, 1]),
        (True, 10**12, [1, 4]),  # the first at once, and the rest with the last
        (False, 0, [5]),
    ],
)
def test_the_sender_is_woken_for_responses_alone(
    model: Any, streams: bool, interval_ns: int, sizes: list[int]
) -> None:
    """It takes the interpreter's lock from the thread that computes."""
    assert handed_over(model, streams=streams, interval_ns=interval_ns, count=5) == sizes


def test_running_requests_and_a_few_waiting_ones_are_asked_whether_their_clients_are_gone(
    model: Any,
) -> None:
    """Asking Triton about all of a long queue would take the computing thread's time."""
    asked: list[str] = []

    def sender_of(number: int) -> Any:
        return SimpleNamespace(is_cancelled=lambda: asked.append(str(number)) or number in (2, 17))

    jobs = {
        str(number): SimpleNamespace(
            id=str(number), lock=nullcontext(), done=False, sender=sender_of(number)
        )
        for number in range(20)
    }
    running = {"0", "1", "2"}
    cancelled: list[str] = []
    itself = SimpleNamespace(
        _runtime=SimpleNamespace(active_ids=lambda: running, cancel=cancelled.append),
        _jobs_lock=nullcontext(),
        _jobs=jobs,
        _next_waiting=0,
    )
    model.TritonPythonModel._cancel_abandoned(itself)
    assert len(asked) == len(running) + model.WAITING_ASKED
    assert running < set(asked)
    assert cancelled == ["2"]
    for _ in range(len(jobs) // model.WAITING_ASKED):
        model.TritonPythonModel._cancel_abandoned(itself)
    assert set(asked) == set(jobs)
    assert "17" in cancelled
