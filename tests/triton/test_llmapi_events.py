"""Which events of the runtime the model of the `llmapi` layout answers, on which thread, and in
which order, without a server.
"""

from __future__ import annotations

import importlib
import queue
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
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
    itself = SimpleNamespace(
        _outbox=outbox,
        _due=deque(),
        _runtime_thread=threading.current_thread(),
        _sending=threading.Lock(),
        _is_idle=lambda: False,
    )
    sizes = []
    for number in range(count):
        reason = "length" if number == count - 1 else None
        event = TokenEvent("1", (number,), "a", finish_reason=reason)
        model.TritonPythonModel._take(itself, job, event)
        model.TritonPythonModel._send_due(itself)
        while not outbox.empty():
            assert outbox.get() == [job]
            sizes.append(len(job.held))
            while job.held:
                job.answer.add(job.held.popleft(), time.monotonic_ns())
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


def test_the_reader_of_a_burst_answers_what_it_has_read(model: Any) -> None:
    """It does not wake the sender, but for what the computing thread gives."""
    answered: list[Any] = []
    outbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
    itself = SimpleNamespace(
        _outbox=outbox,
        _due=deque(["a", "b"]),
        _runtime_thread=threading.Thread(),
        _gives_way=False,
        _answer_all=answered.append,
    )
    for _ in range(2):
        model.TritonPythonModel._send_due(itself)
    assert answered == [["a", "b"]]
    assert outbox.empty()


def test_where_nothing_is_left_to_compute_no_other_thread_is_woken(model: Any) -> None:
    answered: list[Any] = []
    outbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
    request = parse({"text_input": [b"x"]}, {}, Limits(decoupled=True, max_draft_len=0))
    jobs = {name: model.Job(name, "", None, Answer(request, 0), 1000) for name in "12"}
    itself = SimpleNamespace(
        _outbox=outbox,
        _due=deque(),
        _runtime_thread=threading.current_thread(),
        _sending=threading.Lock(),
        _jobs=jobs,
        _jobs_lock=threading.Lock(),
        _answer_all=answered.append,
    )
    itself._is_idle = lambda: model.TritonPythonModel._is_idle(itself)
    for job in jobs.values():
        last = TokenEvent(job.id, (1,), "a", finish_reason="length")
        model.TritonPythonModel._take(itself, job, last)
        model.TritonPythonModel._send_due(itself)
    assert outbox.get_nowait() == [jobs["1"]]  # the other one goes on
    assert outbox.empty()
    assert answered == [[jobs["2"]]]
    # To wait for another that sends, or to answer many, would take longer.
    with itself._sending:
        itself._due.append(jobs["2"])
        model.TritonPythonModel._send_due(itself)
    itself._due.extend(jobs.values())
    jobs["1"].is_over = True
    model.TritonPythonModel._send_due(itself)
    assert [outbox.get_nowait() for _ in range(2)] == [[jobs["2"]], list(jobs.values())]
    assert len(answered) == 1


def test_responses_to_a_request_stay_in_order_until_they_are_on_their_way(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sender keeps some back, to send them at once, while a reader has the next ones."""
    sent: list[int] = []
    has_answered, may_go_out = threading.Event(), threading.Event()
    local = threading.local()

    @contextmanager
    def together() -> Iterator[None]:
        local.kept = []
        yield
        if threading.current_thread().name == "sender":
            has_answered.set()
            may_go_out.wait(5)
        sent.extend(local.kept)

    monkeypatch.setattr(model.pb_utils, "together", together, raising=False)
    itself = SimpleNamespace(
        _sending=threading.Lock(),
        _deliver=lambda _job, event: local.kept.extend(event.token_ids),
        _answer=lambda job: model.TritonPythonModel._answer(itself, job),
    )
    job = model.Job("1", "", None, None, 1000)
    threads = []
    for number, name in enumerate(("sender", "reader")):
        job.held.append(TokenEvent("1", (number,), "a"))
        thread = threading.Thread(
            target=model.TritonPythonModel._answer_all, args=(itself, [job]), name=name
        )
        thread.start()
        threads.append(thread)
        assert has_answered.wait(5)
    threads[1].join(0.2)  # without the lock it would be over
    may_go_out.set()
    for thread in threads:
        thread.join(5)
    assert sent == [0, 1]


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
