"""Prompts are read beside one another and beside decoding, and none waits for long."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest
import torch

from tests.support.runtimes import Outcome, assert_idle, make_request, make_runtime, serve
from tests.support.step_engines import PackingTableEngine, TableEngine
from toolkit.interfaces import TokenEvent
from toolkit.speculative.rows import rows_forward
from toolkit.speculative.runtime import SpeculativeRuntime

ENGINES = [TableEngine, PackingTableEngine]
CHUNK = 9  # tokens that the engines take of a prompt


def decoding_runtime(target: TableEngine, requests: int) -> SpeculativeRuntime:
    """With so many requests that decode."""
    runtime = make_runtime(target, max_draft_len=0)
    begun: set[str] = set()
    for number in range(requests):
        runtime.submit(
            make_request((1,), 300, f"decoding {number}"), lambda event: begun.add(event.request_id)
        )
    while len(begun) < requests:
        runtime.step()
    return runtime


def first_tokens(
    engine: type[TableEngine],
    prompts: Sequence[int],
    *,
    decoding: int,
    new_short_every_step: bool = False,
) -> list[int]:
    """The step in which each prompt, of so many tokens, got its first token, beside so many
    requests that decode.
    """
    runtime = decoding_runtime(engine(1, max_batch_size=16, max_seq_len=400), decoding)
    first: dict[str, int] = {}
    step = 0

    def note(event: TokenEvent) -> None:
        first.setdefault(event.request_id, step)

    for number, length in enumerate(prompts):
        runtime.submit(make_request((1,) * length, 2, str(number)), note)
    while len(first) < len(prompts) or step == 0:
        step += 1
        if new_short_every_step:
            runtime.submit(make_request((2,) * CHUNK, 1, f"short {step}"), lambda event: None)
        runtime.step()
        assert step < 200
    return [first[str(number)] for number in range(len(prompts))]


@pytest.mark.parametrize("decoding", [0, 8])
@pytest.mark.parametrize("engine", ENGINES)
def test_a_short_prompt_does_not_wait_for_a_long_one(
    engine: type[TableEngine], decoding: int
) -> None:
    """The long one takes 34 chunks of nine."""
    long, short, other = first_tokens(engine, [300, 3, 9], decoding=decoding)
    assert max(short, other) <= 3
    assert long <= 36


@pytest.mark.parametrize("decoding", [0, 8])
@pytest.mark.parametrize("engine", ENGINES)
def test_short_prompts_without_end_do_not_starve_a_long_one(
    engine: type[TableEngine], decoding: int
) -> None:
    """It gets at least every second chunk."""
    prompts = first_tokens(engine, [90], decoding=decoding, new_short_every_step=True)
    assert prompts[0] <= 21


def test_prompts_delay_many_that_decode_by_a_chunk_a_step() -> None:
    target = PackingTableEngine(1, max_batch_size=16, max_seq_len=400)
    runtime = decoding_runtime(target, 8)
    target.packed.clear()
    for number in range(4):
        runtime.submit(make_request((2,) * 5 * CHUNK, 1, str(number)), lambda event: None)
    for _ in range(20):
        runtime.step()
    assert [sorted(lengths) for lengths in target.packed] == [[*[1] * 8, CHUNK]] * 20


def test_chunks_share_the_forward_of_running_requests() -> None:
    target = PackingTableEngine(1, max_batch_size=4, max_seq_len=200)
    runtime = make_runtime(target, max_draft_len=0)
    outcomes = serve(
        runtime,
        [
            make_request((1, 2), 30, "a"),
            make_request((3,), 30, "b"),
            make_request((4,) * 40, 5, "c"),
        ],
    )
    assert all(outcome.finish_reason == "length" for outcome in outcomes)
    assert (1, 1, 9) in target.packed
    assert not any(9 in lengths and len(lengths) == 1 for lengths in target.packed)
    assert_idle(runtime, target)


@pytest.mark.parametrize("fields", [{}, {"temperature": 1.0, "seed": 3}])
def test_packed_rows_give_what_padded_rows_give(fields: dict[str, float]) -> None:
    texts = []
    for engine in ENGINES:
        target, draft = engine(1, closeness=0.8), TableEngine(2, closeness=0.8)
        runtime = make_runtime(target, draft)
        requests = [
            make_request(tuple(range(1, 2 + 7 * i)), 20, str(i), draft_len=i % 4, **fields)
            for i in range(5)
        ]
        outcomes = serve(runtime, requests)
        texts.append([outcome.ids for outcome in outcomes])
        assert_idle(runtime, target, draft)
    assert texts[0] == texts[1]


def test_one_request_with_drafts_pads_no_other() -> None:
    target, draft = PackingTableEngine(1), TableEngine(2)
    runtime = make_runtime(target, draft)
    serve(
        runtime,
        [make_request((1, i + 2), 12, str(i), draft_len=4 if i == 3 else 0) for i in range(4)],
    )
    assert (1, 1, 1, 5) in target.packed
    assert max(sum(lengths) for lengths in target.packed) == 8


def test_a_fault_of_one_prompt_in_a_shared_forward_ends_it_alone() -> None:
    class Failing(PackingTableEngine):
        """Fails where a row has a token 39, after it has appended all rows."""

        def forward_rows(
            self, slots: Sequence[int], rows: Sequence[Sequence[int]], wanted: Sequence[int]
        ) -> torch.Tensor:
            logits = super().forward_rows(slots, rows, wanted)
            if any(39 in row for row in rows):
                raise RuntimeError("planted fault")
            return logits

    prompts = [(1, 2), (5, 39, 7), (8,) * 20, (3, 4)]
    target = Failing(1)
    runtime = make_runtime(target, max_draft_len=0)
    outcomes = serve(runtime, [make_request(p, 12, str(i)) for i, p in enumerate(prompts)])
    assert [outcome.finish_reason for outcome in outcomes] == ["length", "error", *["length"] * 2]
    alone = serve(
        make_runtime(TableEngine(1), max_draft_len=0),
        [make_request(p, 12, str(i)) for i, p in enumerate(prompts) if i != 1],
    )
    assert [o.ids for i, o in enumerate(outcomes) if i != 1] == [o.ids for o in alone]
    assert_idle(runtime, target)


def test_an_engine_that_does_not_pack_gets_padded_rows_and_keeps_its_lengths() -> None:
    padded, packed = TableEngine(1), PackingTableEngine(1)
    rows, wanted = [(1, 2, 3), (4,), (5, 6)], [1, 1, 2]
    logits = [rows_forward(engine)([0, 2, 1], rows, wanted) for engine in (padded, packed)]
    assert torch.equal(*logits)
    assert [padded.length(slot) for slot in range(3)] == [3, 2, 1]
    last = [rows_forward(engine)([0, 1], [(7, 8), (9, 1)], [0, 1]) for engine in (padded, packed)]
    assert torch.equal(*last)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("others", [0, 1])
def test_tokens_are_passed_on_before_the_draft_reads_a_prompt(
    engine: type[TableEngine], others: int
) -> None:
    """A long prompt takes it long. others: requests that decode in the same step."""
    draft = engine(2, max_batch_size=4, max_seq_len=400)
    runtime = make_runtime(engine(1, max_batch_size=4, max_seq_len=400), draft)
    outcomes = [Outcome() for _ in range(others + 1)]
    stop, passed_on, forward = threading.Event(), [0] * (others + 1), draft.forward
    unsaid: list[int] = []  # tokens that were told and not passed on, at each forward of the draft

    def pass_on() -> None:
        passed_on[:] = [len(outcome.ids) for outcome in outcomes]

    def watched_forward(*args: object, **kwargs: object) -> torch.Tensor:
        unsaid.append(sum(len(outcome.ids) for outcome in outcomes) - sum(passed_on))
        return forward(*args, **kwargs)  # type: ignore[arg-type]

    draft.forward = watched_forward  # type: ignore[method-assign]
    runner = threading.Thread(target=runtime.run, args=(stop, pass_on))
    runner.start()
    for number, outcome in enumerate(outcomes):
        is_last = number == others
        request = make_request((1,) * 4 * CHUNK, 8 if is_last else 300, str(number))
        runtime.submit(request, outcome.events.append)
        while not outcome.events or (is_last and outcome.events[-1].finish_reason is None):
            stop.wait(0.001)
    stop.set()
    runner.join()
    runtime.close()
    assert unsaid
    assert not any(unsaid)


def test_the_end_of_a_late_request_is_passed_on_before_the_next_forward() -> None:
    now, target = [0], TableEngine(1, max_batch_size=4, max_seq_len=400)
    runtime = make_runtime(target, max_draft_len=0, clock=lambda: now[0])
    late, other, stop = Outcome(), Outcome(), threading.Event()
    passed_on: list[bool] = []  # whether the late one had ended, as far as it was passed on
    has_ended, forward = [False], target.forward

    def pass_on() -> None:
        has_ended[0] = bool(late.events) and late.events[-1].finish_reason == "deadline"

    def watched_forward(*args: object, **kwargs: object) -> torch.Tensor:
        if now[0]:
            passed_on.append(has_ended[0])
        elif len(late.ids) > 3:
            now[0] = 2
        return forward(*args, **kwargs)  # type: ignore[arg-type]

    target.forward = watched_forward  # type: ignore[method-assign]
    runtime.submit(make_request((1,), 300, "late", deadline_ns=1), late.events.append)
    runtime.submit(make_request((1,), 20, "other"), other.events.append)
    runner = threading.Thread(target=runtime.run, args=(stop, pass_on))
    runner.start()
    while not (other.events and other.events[-1].finish_reason):
        stop.wait(0.001)
    stop.set()
    runner.join()
    runtime.close()
    assert len(passed_on) > 3
    assert all(passed_on)
