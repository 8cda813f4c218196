"""How requests begin and end: refusals, overload, cancellation, deadlines, faults, threads. Every
test checks that no slot stays occupied.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from tests.support.runtimes import (
    Outcome,
    assert_idle,
    make_request,
    make_runtime,
    serve,
    serve_one,
)
from tests.support.step_engines import ChainingTableEngine, FailingEngine, TableEngine
from toolkit.errors import RequestError, UsageError
from toolkit.interfaces import TokenEvent
from toolkit.speculative.drafters import ModelDrafter
from toolkit.speculative.runtime import QueueFull

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "empty prompt": ({"prompt": ()}, "prompt is empty"),
    "long prompt": ({"prompt": (1,) * 33}, r"33 tokens.*up to 32"),
    "foreign token": ({"prompt": (1, 40)}, "outside the vocabulary of 40"),
    "negative token": ({"prompt": (-1,)}, "outside the vocabulary"),
    "no tokens": ({"max_tokens": 0}, "max_tokens is 0"),
    "too many tokens": ({"prompt": (1,) * 30, "max_tokens": 67}, "exceed max_seq_len 96"),
    "long draft": ({"draft_len": 5}, "drafts 0 to 4"),
    "negative draft": ({"draft_len": -1}, "drafts 0 to 4"),
    "empty stop word": ({"stop": ("a", "")}, "empty stop word"),
    "negative temperature": ({"temperature": -0.1}, "temperature"),
    "temperature is no number": ({"temperature": float("nan")}, "temperature"),
    "top_p": ({"temperature": 1.0, "top_p": 0.0}, "top_p"),
    "top_k": ({"temperature": 1.0, "top_k": -1}, "top_k"),
    "penalty": (
        {"presence_penalty": float("inf")},
        "presence_penalty inf; each has to be from -1000",
    ),
    "penalty that float32 cannot add up": (
        {"frequency_penalty": -3.4e38},
        "frequency_penalty is -3.4e",
    ),
    "acceptance": ({"temperature": 1.0, "acceptance": "hope"}, "known: auto"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_can_never_be_served_is_refused_at_once(name: str) -> None:
    fields, message = REFUSED[name]
    target, draft = TableEngine(1), TableEngine(2)
    runtime = make_runtime(target, draft, max_input_len=32)
    with pytest.raises(RequestError, match=message):
        runtime.submit(make_request(**fields), lambda event: None)
    assert_idle(runtime, target, draft)
    assert serve_one(runtime, make_request()).finish_reason == "length"


def test_overload_is_refused_and_passes() -> None:
    target = TableEngine(1, max_batch_size=2)
    runtime = make_runtime(target, max_draft_len=0, max_queue_size=3)
    outcomes = [Outcome() for _ in range(5)]
    for i, outcome in enumerate(outcomes):
        runtime.submit(make_request(request_id=str(i)), outcome.events.append)
    with pytest.raises(QueueFull, match="5 requests"):
        runtime.submit(make_request(request_id="5"), lambda event: None)
    runtime.step()
    assert (runtime.counters().active, runtime.counters().queued) == (2, 3)
    assert len(runtime.active_ids()) == 2
    while runtime.step():
        pass
    assert [outcome.finish_reason for outcome in outcomes] == ["length"] * 5
    assert serve_one(runtime, make_request(request_id="5")).finish_reason == "length"
    assert_idle(runtime, target)


def test_an_id_in_use_is_refused() -> None:
    runtime = make_runtime(TableEngine(1), max_draft_len=0)
    runtime.submit(make_request(), lambda event: None)
    with pytest.raises(RequestError, match="already being served"):
        runtime.submit(make_request(), lambda event: None)


@pytest.mark.parametrize("steps", [0, 1, 2, 5])
def test_a_cancelled_request_frees_its_slot_wherever_it_stands(steps: int) -> None:
    target, draft = TableEngine(1, max_batch_size=1), TableEngine(2, max_batch_size=1)
    runtime = make_runtime(target, draft)
    first, second = Outcome(), Outcome()
    runtime.submit(make_request((1,) * 30, 60, "first"), first.events.append)
    runtime.submit(make_request(request_id="second"), second.events.append)
    for _ in range(steps):
        runtime.step()
    runtime.cancel("first")
    runtime.cancel("unknown")
    while runtime.step():
        pass
    assert first.finish_reason == "cancelled"
    assert first.stats.output_tokens == len(first.ids)
    assert second.finish_reason == "length"
    assert (
        second.ids == serve_one(make_runtime(TableEngine(1), max_draft_len=0), make_request()).ids
    )
    assert_idle(runtime, target, draft)
    assert runtime.counters().requests == {"cancelled": 1, "length": 1}
    runtime.cancel("first")  # it has ended: no effect, and its id may be used again
    assert serve_one(runtime, make_request(request_id="first")).finish_reason == "length"


def test_a_deadline_ends_running_and_waiting_requests() -> None:
    now = [1000]
    target, draft = TableEngine(1, max_batch_size=1), TableEngine(2, max_batch_size=1)
    runtime = make_runtime(target, draft, clock=lambda: now[0])
    running, waiting = Outcome(), Outcome()
    runtime.submit(
        make_request(max_tokens=60, request_id="running", deadline_ns=2000), running.events.append
    )
    runtime.submit(make_request(request_id="waiting", deadline_ns=2000), waiting.events.append)
    for _ in range(3):
        runtime.step()
    now[0] = 2000
    assert not runtime.step()
    assert (running.finish_reason, waiting.finish_reason) == ("deadline", "deadline")
    assert len(running.ids) > 1
    assert (waiting.ids, waiting.stats.first_scheduled_ns) == ([], None)
    assert_idle(runtime, target, draft)


def test_a_failed_forward_ends_the_requests_of_its_step_and_no_other() -> None:
    target, draft = FailingEngine(1, max_batch_size=2), TableEngine(2, max_batch_size=2)
    runtime = make_runtime(target, draft)
    requests = [make_request(request_id=str(i), max_tokens=8) for i in range(5)]
    expected = serve_one(make_runtime(TableEngine(1), max_draft_len=0), requests[0]).ids
    target.failing = frozenset({3})
    outcomes = serve(runtime, requests)
    assert [outcome.finish_reason for outcome in outcomes] == [
        "error",
        "error",
        "length",
        "length",
        "length",
    ]
    assert outcomes[0].events[-1].error == "RuntimeError: planted fault"
    assert all(outcome.ids == expected for outcome in outcomes[2:])
    assert_idle(runtime, target, draft)


def test_a_slot_that_cannot_be_freed_is_told_and_used_again() -> None:
    class Refusing(TableEngine):
        refuses = True

        def rewind(self, slots: Sequence[int], lengths: Sequence[int]) -> None:
            if self.refuses:
                self.refuses = False
                raise RuntimeError("planted fault")
            super().rewind(slots, lengths)

    target = Refusing(1, max_batch_size=1)
    runtime = make_runtime(target, max_draft_len=0, reuse_prefixes=True)
    first, second = serve(runtime, [make_request(), make_request(request_id="b")])
    assert first.finish_reason == "error"
    assert first.events[-1].error == "RuntimeError: planted fault"
    assert second.ids == serve_one(make_runtime(TableEngine(1)), make_request()).ids
    counters = runtime.counters()
    assert (counters.active, counters.queued) == (0, 0)
    assert counters.requests == {"error": 1, "length": 1}


def test_a_fault_in_prefill_ends_that_request_alone() -> None:
    target = FailingEngine(1, max_batch_size=4)
    runtime = make_runtime(target, max_draft_len=0)
    target.failing = frozenset({1})
    outcomes = serve(runtime, [make_request(request_id=str(i)) for i in range(3)])
    assert [outcome.finish_reason for outcome in outcomes] == ["length", "error", "length"]
    assert_idle(runtime, target)


def test_logits_that_are_not_finite_are_an_error() -> None:
    class Damaged(TableEngine):
        def forward(self, *args: Any, **options: Any) -> torch.Tensor:
            return super().forward(*args, **options) * float("nan")

    outcome = serve_one(make_runtime(Damaged(1), max_draft_len=0), make_request())
    assert outcome.finish_reason == "error"
    assert "not finite" in str(outcome.events[-1].error)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("acceptance", ["rejection", "coupled", "sample_match", "verify_only"])
def test_numbers_that_are_not_finite_end_one_request_and_no_other(
    temperature: float, acceptance: str
) -> None:
    class Poisoned(TableEngine):
        """No number behind a token 39, which no output holds."""

        def forward(
            self, slots: Sequence[int], tokens: torch.Tensor, *, last_only: bool = False
        ) -> torch.Tensor:
            logits = super().forward(slots, tokens, last_only=last_only)
            logits[..., 39] = -1e9
            rows = [
                row
                for row, slot in enumerate(slots)
                if self.length(slot) > 6 and 39 in self._cache[slot][: 4 + 6]
            ]
            logits[rows] = float("nan")
            return logits

    target, draft = Poisoned(1), TableEngine(2, closeness=0.5)
    runtime = make_runtime(target, draft)
    fields: dict[str, Any] = {"temperature": temperature, "acceptance": acceptance, "seed": 3}
    requests = [make_request((1, 2, last), request_id=str(last), **fields) for last in (3, 39, 5)]
    outcomes = serve(runtime, requests)
    assert [outcome.finish_reason for outcome in outcomes] == ["length", "error", "length"]
    assert "not finite" in str(outcomes[1].events[-1].error)
    assert_idle(runtime, target, draft)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("acceptance", ["rejection", "coupled", "sample_match"])
@pytest.mark.parametrize("fed", [3, 5])
@pytest.mark.parametrize("kind", [TableEngine, ChainingTableEngine])
def test_a_draft_that_is_not_finite_leaves_its_request_to_plain_decoding(
    temperature: float, acceptance: str, fed: int, kind: Any
) -> None:
    """fed: from how many tokens in the draft's cache on its numbers are bad, so that it is with
    the first or in the middle of a block.
    """

    class Poisoned(kind):  # type: ignore[misc]
        def forward(
            self, slots: Sequence[int], tokens: torch.Tensor, *, last_only: bool = False
        ) -> torch.Tensor:
            logits = super().forward(slots, tokens, last_only=last_only)
            rows = [
                row
                for row, slot in enumerate(slots)
                if self.length(slot) > fed and self._cache[slot][4 + 2] == 39
            ]
            logits[rows] = float("nan")
            return logits

    draft = Poisoned(2, closeness=0.9)
    runtime = make_runtime(TableEngine(1, closeness=0.9), draft)
    fields: dict[str, Any] = {"temperature": temperature, "acceptance": acceptance, "seed": 3}
    requests = [make_request((1, 2, last), request_id=str(last), **fields) for last in (3, 39, 5)]
    outcomes = serve(runtime, requests)
    assert [outcome.finish_reason for outcome in outcomes] == ["length"] * 3
    drafted = [outcome.stats.drafted for outcome in outcomes]
    assert drafted[1] < 4 < min(drafted[0], drafted[2])
    if temperature == 0.0 or acceptance == "coupled":
        plain = make_runtime(TableEngine(1, closeness=0.9), max_draft_len=0)
        assert [outcome.ids for outcome in outcomes] == [
            outcome.ids for outcome in serve(plain, requests)
        ]
    assert_idle(runtime, draft)


class FailingDraft(ModelDrafter):
    """Raises in one of its methods, named by `failing`, after it has changed its cache."""

    failing = ""
    calls = 0

    def _after(self, name: str) -> None:
        self.calls += name == self.failing
        if name == self.failing:
            raise RuntimeError("planted fault")

    def begin(self, slot: int, source: int, length: int) -> None:
        super().begin(slot, source, length)
        self._after("begin")

    def feed(self, slot: int, ids: list[int]) -> None:
        super().feed(slot, ids)
        self._after("feed")

    def propose(self, sequences: Sequence[Any]) -> None:
        if self.failing == "wrong ids":
            self.calls += 1
            for row in sequences:
                row.drafts.append(40)
                row.rule.adopt(39)
            return
        super().propose(sequences)
        self._after("propose")

    def keep(self, slot: int, length: int) -> None:
        super().keep(slot, length)
        self._after("keep")


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("acceptance", ["rejection", "coupled", "sample_match"])
@pytest.mark.parametrize("where", ["begin", "feed", "propose", "wrong ids", "keep"])
@pytest.mark.parametrize("kind", [TableEngine, ChainingTableEngine])
def test_a_draft_that_raises_leaves_its_requests_to_plain_decoding(
    temperature: float, acceptance: str, where: str, kind: Any
) -> None:
    target, draft = TableEngine(1, closeness=0.9), kind(2, closeness=0.9)
    drafter = FailingDraft(draft)
    runtime = make_runtime(target, draft, drafter=drafter, reuse_prefixes=True)
    fields: dict[str, Any] = {"temperature": temperature, "acceptance": acceptance, "seed": 3}
    requests = [make_request((1, 2, last), request_id=str(last), **fields) for last in (3, 4, 5)]
    requests.append(make_request((1, 2, 6), request_id="plain", draft_len=0, **fields))
    drafter.failing = where
    failed = serve(runtime, requests)
    calls, drafter.failing = drafter.calls, ""
    assert [outcome.finish_reason for outcome in failed] == ["length"] * 4
    reasons = [set(outcome.stats.steps_by_reason) for outcome in failed]
    if where == "keep":  # the requests have ended when it fails
        assert reasons == [{"fixed"}] * 3 + [{"request"}]
    else:
        assert reasons == [{"draft failed"}] * 3 + [{"request"}]
        assert [outcome.stats.drafted for outcome in failed] == [0] * 4
        # Nobody tries again: one call for each request, or one for all.
        assert calls == {"begin": 4, "feed": 3}.get(where, 1)
        assert all("planted" in str(o.stats.draft_failure) for o in failed[:3]) or (
            where == "wrong ids" and "outside the vocab" in str(failed[0].stats.draft_failure)
        )
        assert [draft.length(slot) for slot in range(8)] == [0] * 8
    assert failed[3].stats.draft_failure is None
    again = serve(runtime, requests)
    plain = serve(make_runtime(TableEngine(1, closeness=0.9), max_draft_len=0), requests)
    if temperature == 0.0 or acceptance == "coupled":
        expected = [outcome.ids for outcome in plain]
        assert [outcome.ids for outcome in failed] == expected
        assert [outcome.ids for outcome in again] == expected
    assert min(outcome.stats.accepted for outcome in again[:3]) > 0
    assert {reason for o in again for reason in o.stats.steps_by_reason} == {"fixed", "request"}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("failing", range(12))
def test_a_draft_that_raises_at_any_forward_changes_no_text(
    temperature: float, failing: int
) -> None:
    """Also in the middle of a block, and with requests that come later."""
    target = TableEngine(1, closeness=0.9, max_batch_size=2)
    draft = FailingEngine(2, closeness=0.9, max_batch_size=2)
    runtime = make_runtime(target, draft)
    requests = [
        make_request((1, 2, 3 + i), 16, str(i), temperature=temperature, seed=i) for i in range(6)
    ]
    draft.failing = frozenset({failing})
    outcomes = serve(runtime, requests)
    plain = make_runtime(TableEngine(1, closeness=0.9), max_draft_len=0)
    assert [outcome.ids for outcome in outcomes] == [o.ids for o in serve(plain, requests)]
    assert 1 <= sum(outcome.stats.draft_failure is not None for outcome in outcomes) <= 2
    assert all(outcome.stats.accepted > 0 for outcome in outcomes[4:])
    assert_idle(runtime, target, draft)


def test_a_receiver_that_fails_ends_its_own_request_only() -> None:
    target, draft = TableEngine(1), TableEngine(2)
    runtime = make_runtime(target, draft)
    seen: list[TokenEvent] = []

    def broken(event: TokenEvent) -> None:
        seen.append(event)
        if len(seen) == 2:
            raise OSError("the client is gone")

    other = Outcome()
    runtime.submit(make_request(request_id="broken"), broken)
    runtime.submit(make_request(request_id="other"), other.events.append)
    while runtime.step():
        pass
    assert len(seen) == 2
    assert other.finish_reason == "length"
    assert_idle(runtime, target, draft)


def test_generate_takes_the_steps_itself() -> None:
    runtime = make_runtime(TableEngine(1), TableEngine(2))
    events = list(runtime.generate(make_request()))
    assert [event.finish_reason for event in events] == [*[None] * (len(events) - 1), "length"]
    assert [token for event in events for token in event.token_ids] == serve_one(
        runtime, make_request()
    ).ids


def test_leaving_generate_early_frees_the_slot() -> None:
    target, draft = TableEngine(1), TableEngine(2)
    runtime = make_runtime(target, draft)
    events = runtime.generate(make_request(max_tokens=60))
    next(events)
    assert runtime.counters().active == 1
    events.close()  # type: ignore[attr-defined]
    assert_idle(runtime, target, draft)


def test_threads_submit_while_one_runs() -> None:
    target, draft = TableEngine(1, max_batch_size=4), TableEngine(2, max_batch_size=4)
    runtime = make_runtime(target, draft)
    expected = serve_one(runtime, make_request()).ids
    stop, outputs = threading.Event(), []
    runner = threading.Thread(target=runtime.run, args=(stop,))
    runner.start()

    def client(name: str) -> None:
        for i in range(5):
            events = runtime.generate(make_request(request_id=f"{name}-{i}"))
            outputs.append([token for event in events for token in event.token_ids])

    clients = [threading.Thread(target=client, args=(str(i),)) for i in range(8)]
    for thread in clients:
        thread.start()
    for thread in clients:
        thread.join(timeout=30)
    stop.set()
    runner.join(timeout=5)
    assert not runner.is_alive()
    assert outputs == [expected] * 40
    assert_idle(runtime, target, draft)


def test_close_ends_what_is_open_and_refuses_the_rest() -> None:
    target, draft = TableEngine(1, max_batch_size=1), TableEngine(2, max_batch_size=1)
    runtime = make_runtime(target, draft)
    outcomes = [Outcome(), Outcome()]
    for i, outcome in enumerate(outcomes):
        runtime.submit(make_request(request_id=str(i)), outcome.events.append)
    runtime.step()
    runtime.close()
    assert [outcome.finish_reason for outcome in outcomes] == ["cancelled", "cancelled"]
    with pytest.raises(RequestError, match="closed"):
        runtime.submit(make_request(), lambda event: None)
    assert_idle(runtime, target, draft)


@pytest.mark.parametrize(
    ("draft", "message"),
    [
        (TableEngine(2, vocab_size=41), "vocabulary"),
        (TableEngine(2, max_batch_size=4), "max_batch_size"),
        (TableEngine(2, max_seq_len=50), "max_seq_len"),
    ],
)
def test_engines_that_cannot_serve_together_are_refused(draft: TableEngine, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        make_runtime(TableEngine(1), draft)


def test_a_target_that_cannot_verify_the_draft_length_is_refused() -> None:
    with pytest.raises(UsageError, match="too few to verify 9"):
        make_runtime(TableEngine(1), TableEngine(2), max_draft_len=9)
