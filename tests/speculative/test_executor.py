"""An engine that is called with whole sequences: it returns the tokens of plain decoding, and
computes only what its slot does not hold.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.step_engines import PackingTableEngine, TableEngine
from toolkit.engines.embedded.engine import open_checkpoint
from toolkit.errors import RequestError
from toolkit.interfaces import Sampling
from toolkit.speculative.executor import Call, Executor, Output

PROMPTS = [
    tuple(int(t) for t in np.random.default_rng(i).integers(0, 40, size=1 + 3 * i))
    for i in range(9)
]


def run(executor: Executor, *calls: Call) -> list[list[Output]]:
    """Make the calls together and return their outputs."""
    outputs: dict[str, list[Output]] = {call.call_id: [] for call in calls}
    for call in calls:
        executor.submit(call, outputs[call.call_id].append)
    while any(not seen or seen[-1].finish_reason is None for seen in outputs.values()):
        assert executor.step()
    return list(outputs.values())


def ids_of(executor: Executor, ids: tuple[int, ...], count: int, **fields: Any) -> tuple[int, ...]:
    ((*outputs,),) = run(executor, Call("call", ids, count, **fields))
    return tuple(token for output in outputs for token in output.ids)


def rounds(
    target: Executor,
    draft: Executor,
    prompt: tuple[int, ...],
    count: int,
    draft_len: int,
    **fields: Any,
) -> tuple[int, ...]:
    """What a client does: request drafts and have them verified, until there are `count` tokens."""
    ids = prompt
    while len(ids) < len(prompt) + count:
        room = min(draft_len, len(prompt) + count - len(ids) - 1)
        drafts = ids_of(draft, ids, room, **fields) if room else ()
        ids += ids_of(target, ids, len(drafts) + 1, drafts=drafts, **fields)
    return ids[len(prompt) :]


@settings(max_examples=30, deadline=None)
@given(
    closeness=st.sampled_from([0.0, 0.7, 0.95]),
    draft_len=st.integers(1, 6),
    prompt=st.sampled_from(PROMPTS),
    sampling=st.sampled_from(
        [
            Sampling(),
            Sampling(temperature=0.9, seed=5),
            Sampling(temperature=1.1, top_k=9, top_p=0.8, seed=6),
        ]
    ),
)
def test_rounds_give_what_one_call_gives(
    closeness: float, draft_len: int, prompt: tuple[int, ...], sampling: Sampling
) -> None:
    target, draft = Executor(TableEngine(1)), Executor(TableEngine(2, closeness=closeness))
    plain = ids_of(Executor(TableEngine(1)), prompt, 20, sampling=sampling)
    assert rounds(target, draft, prompt, 20, draft_len, sampling=sampling) == plain


def test_calls_made_together_get_what_each_gets_alone() -> None:
    """More calls than slots, of several lengths, with and without drafts."""
    calls = [
        Call(
            str(number),
            prompt,
            1 + number,
            drafts=(1, 2)[: number % 3],
            sampling=Sampling(temperature=0.8 * (number % 2), seed=3),
        )
        for number, prompt in enumerate(PROMPTS)
    ]
    together = run(Executor(TableEngine(1, max_batch_size=3)), *calls)
    for call, outputs in zip(calls, together, strict=True):
        (alone,) = run(Executor(TableEngine(1)), call)
        assert [output.ids for output in outputs] == [output.ids for output in alone]


class Packing(PackingTableEngine):
    """wanted: the logits that each forward was asked for, per row."""

    def __init__(self, seed: int, **settings: Any) -> None:
        super().__init__(seed, **settings)
        self.wanted: list[tuple[int, ...]] = []

    def forward_rows(
        self, slots: Sequence[int], rows: Sequence[Sequence[int]], wanted: Sequence[int]
    ) -> torch.Tensor:
        self.wanted.append(tuple(wanted))
        return super().forward_rows(slots, rows, wanted)


ENGINES = [TableEngine, Packing]


def test_a_step_is_one_forward_of_as_many_tokens_as_the_calls_bring() -> None:
    """Two that decode, one that verifies three drafts, and a sequence of 40 tokens, of which a
    forward takes nine. Nothing is padded, and only what is decided has logits.
    """
    engine = Packing(1)
    executor = Executor(engine)
    executor.submit(Call("a", (1, 2), 30), lambda output: None)
    executor.submit(Call("b", (3,), 30), lambda output: None)
    executor.step()
    engine.packed.clear()
    engine.wanted.clear()
    executor.submit(Call("c", (5, 6), 4, drafts=(1, 2, 3)), lambda output: None)
    executor.submit(Call("d", (4,) * 40, 5), lambda output: None)
    executor.step()
    assert (engine.packed[0], engine.wanted[0]) == ((1, 1, 5, 9), (1, 1, 4, 0))
    while engine.packed[-1] != (1, 1, 1):
        executor.step()
    assert engine.packed[1:] == [(1, 1, 9)] * 3 + [(1, 1, 4), (1, 1, 1)]
    assert engine.wanted[1:] == [(1, 1, 0)] * 3 + [(1, 1, 1), (1, 1, 1)]


def test_drafts_are_verified_with_the_last_chunk_that_has_room_for_them() -> None:
    """Nine tokens in a forward: with 14 there are five left and four drafts; with 15, none fits."""
    for length, packed in ((14, [(9,), (9,)]), (15, [(9,), (5,), (5,)])):
        engine = Packing(1)
        plain = ids_of(Executor(TableEngine(1)), (7,) * length, 5)
        assert ids_of(Executor(engine), (7,) * length, 5, drafts=plain[:4]) == plain
        assert engine.packed == packed


def first_steps(
    engine: type[TableEngine], lengths: Sequence[int], *, new_short_every_step: bool = False
) -> list[int]:
    """The step in which each sequence, of so many tokens, got its first token."""
    executor = Executor(engine(1, max_batch_size=16, max_seq_len=400), reuse_prefixes=False)
    first: dict[str, int] = {}
    step = 0

    def note(output: Output) -> None:
        first.setdefault(output.call_id, step)

    for number, length in enumerate(lengths):
        executor.submit(Call(str(number), (1,) * length, 60), note)
    while step == 0 or any(str(number) not in first for number in range(len(lengths))):
        step += 1
        if new_short_every_step:
            executor.submit(Call(f"short {step}", (2, 3, 4, 5), 1), lambda output: None)
        executor.step()
        assert step < 200
    return [first[str(number)] for number in range(len(lengths))]


@pytest.mark.parametrize("engine", ENGINES)
def test_a_short_sequence_does_not_wait_for_a_long_one(engine: type[TableEngine]) -> None:
    """The long one takes 34 chunks of nine."""
    long, short, other = first_steps(engine, [300, 6, 9])
    assert max(short, other) <= 3
    assert long <= 36


@pytest.mark.parametrize("engine", ENGINES)
def test_a_short_sequence_does_not_wait_while_others_decode(engine: type[TableEngine]) -> None:
    """Then a step reads one chunk, and the short one has every second turn."""
    steps = first_steps(engine, [1, 1, 1, 1, 300, 6])
    assert steps[5] <= 3
    assert steps[4] <= 36


@pytest.mark.parametrize("engine", ENGINES)
def test_short_sequences_without_end_do_not_starve_a_long_one(engine: type[TableEngine]) -> None:
    assert first_steps(engine, [90], new_short_every_step=True)[0] <= 21


def test_packed_calls_get_exactly_what_padded_ones_get() -> None:
    """More calls than slots, so chunks and rounds are mixed in every way."""
    calls = [
        Call(
            str(number),
            tuple(range(1, 2 + 5 * number)),
            8,
            drafts=(1, 2, 3)[: number % 4],
            sampling=Sampling(temperature=0.8 * (number % 2), seed=3),
            logits=True,
        )
        for number in range(7)
    ]
    padded, packed = (run(Executor(engine(1, max_batch_size=3)), *calls) for engine in ENGINES)
    for left, right in zip(padded, packed, strict=True):
        assert [output.ids for output in left] == [output.ids for output in right]
        for one, other in zip(left, right, strict=True):
            assert np.array_equal(one.logits, other.logits)


def test_a_model_gives_in_mixed_forwards_what_it_gives_alone(
    tiny_pair: tuple[Path, Path],
) -> None:
    """A transformer in float64, whose forwards of other shapes may differ in the last bits, which
    changes no token.
    """

    def executor(slots: int) -> Executor:
        return Executor(
            open_checkpoint(
                tiny_pair[0],
                dtype="float64",
                max_batch_size=slots,
                max_seq_len=96,
                max_step_tokens=9,
            )
        )

    calls = [
        Call(
            str(number),
            (*PROMPTS[8][: 1 + 3 * number], number),
            20,
            drafts=(1, 2, 3)[: number % 3],
            sampling=Sampling(temperature=0.8 * (number % 2), seed=3),
        )
        for number in range(8)
    ]
    for call, outputs in zip(calls, run(executor(4), *calls), strict=True):
        (alone,) = run(executor(1), call)
        assert [output.ids for output in outputs] == [output.ids for output in alone]


def test_a_round_feeds_only_what_is_new() -> None:
    engine = TableEngine(1)
    executor = Executor(engine)
    first = ids_of(executor, PROMPTS[8], 4)
    engine.forwards.clear()
    (outputs,) = run(executor, Call("next", (*PROMPTS[8], *first), 3, drafts=(1, 2)))
    assert engine.forwards == [(1, 3)]  # the newest token and two drafts
    assert outputs[-1].reused_tokens == len(PROMPTS[8]) + 3
    assert outputs[-1].computed_tokens == 1


def test_a_sequence_that_branches_off_is_computed_from_the_branch() -> None:
    executor = Executor(TableEngine(1))
    ids_of(executor, PROMPTS[8], 6)
    other = (*PROMPTS[8][:20], 39, 38)
    (outputs,) = run(executor, Call("other", other, 5))
    assert outputs[-1].reused_tokens == 20
    assert tuple(token for output in outputs for token in output.ids) == ids_of(
        Executor(TableEngine(1)), other, 5
    )


def test_a_shared_beginning_does_not_throw_away_a_long_sequence() -> None:
    executor = Executor(TableEngine(1, max_batch_size=2))
    ids_of(executor, PROMPTS[8], 6)
    ids_of(executor, (PROMPTS[8][0], 1, 2), 2)
    (outputs,) = run(executor, Call("again", PROMPTS[8], 1))
    assert outputs[-1].reused_tokens == len(PROMPTS[8]) - 1


def test_a_call_with_drafts_ends_with_one_token_more_than_were_accepted() -> None:
    executor = Executor(TableEngine(1))
    plain = ids_of(executor, PROMPTS[3], 4)
    assert ids_of(executor, PROMPTS[3], 4, drafts=plain[:3]) == plain
    wrong = (plain[0], (plain[1] + 1) % 40, plain[2])
    assert ids_of(executor, PROMPTS[3], 4, drafts=wrong) == plain[:2]


def test_end_tokens_and_stop_sequences_end_a_call_inside_a_block() -> None:
    executor = Executor(TableEngine(1))
    plain = ids_of(executor, PROMPTS[4], 8)
    end = plain[2]
    until = plain[: 1 + plain.index(end)]
    assert ids_of(executor, PROMPTS[4], 8, end_ids=frozenset([end])) == until
    assert ids_of(executor, PROMPTS[4], 8, drafts=plain[:5], end_ids=frozenset([end])) == until
    assert ids_of(executor, PROMPTS[4], 8, stop_sequences=(plain[1:3],)) == plain[:3]
    longer = ids_of(executor, PROMPTS[4], 8, end_ids=frozenset([end]), min_tokens=5)
    assert end not in longer[:5]


def test_draft_logits_keep_the_distribution_of_the_target() -> None:
    """Speculative sampling over two engines: how often the first token is drawn, drafted by another
    model, is compared with its probability under the target.
    """
    target_engine, draft_engine = (
        TableEngine(1, vocab_size=6, sharpness=0.8),
        TableEngine(2, vocab_size=6, sharpness=0.8),
    )
    target, draft = Executor(target_engine), Executor(draft_engine)
    prompt, counts = (1, 2, 3), np.zeros(6)
    for seed in range(3000):
        draft_sampling = Sampling(temperature=1.0, seed=2 * seed + 1)
        (proposed,) = run(draft, Call("d", prompt, 1, sampling=draft_sampling, logits=True))
        output = ids_of(
            target,
            prompt,
            2,
            drafts=proposed[-1].ids,
            draft_logits=np.stack(proposed[-1].logits),
            sampling=Sampling(temperature=1.0, seed=2 * seed),
        )
        counts[output[0]] += 1
    (reference,) = run(Executor(target_engine), Call("r", prompt, 1, logits=True))
    row = np.exp(reference[-1].logits[0] - reference[-1].logits[0].max())
    expected = 3000 * row / row.sum()
    # chi-squared, 5 degrees of freedom: p = 0.0001
    assert ((counts - expected) ** 2 / expected).sum() < 25


def test_log_probabilities_are_the_model_s_own() -> None:
    (outputs,) = run(
        Executor(TableEngine(1)), Call("x", PROMPTS[2], 3, log_probs=True, logits=True)
    )
    for output in outputs:
        for token, value, logits in zip(output.ids, output.log_probs, output.logits, strict=True):
            assert value == pytest.approx(float(logits[token] - np.log(np.exp(logits).sum())))


def test_a_cancelled_call_ends_and_the_others_go_on() -> None:
    executor = Executor(TableEngine(1))
    seen: list[Output] = []
    executor.submit(Call("gone", PROMPTS[1], 50), seen.append)
    executor.step()
    executor.cancel("gone")
    assert ids_of(executor, PROMPTS[2], 3) == ids_of(Executor(TableEngine(1)), PROMPTS[2], 3)
    assert seen[-1].finish_reason == "cancelled"


def test_run_serves_until_it_is_stopped() -> None:
    executor, stop, done = Executor(TableEngine(1)), threading.Event(), threading.Event()
    thread = threading.Thread(target=executor.run, args=(stop,))
    thread.start()
    seen: list[Output] = []
    executor.submit(
        Call("x", PROMPTS[1], 3),
        lambda output: (seen.append(output), output.finish_reason and done.set())[0],
    )
    assert done.wait(10)
    stop.set()
    thread.join(10)
    assert sum(len(output.ids) for output in seen) == 3


class Breaking(TableEngine):
    broken = False

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.broken:
            raise RuntimeError("no more")
        return super().forward(*args, **kwargs)


def test_a_failed_forward_ends_its_calls_and_nothing_else() -> None:
    engine = Breaking(1)
    executor = Executor(engine)
    engine.broken = True
    (outputs,) = run(executor, Call("x", PROMPTS[2], 3))
    assert outputs[-1].error == "RuntimeError: no more"
    engine.broken = False
    assert ids_of(executor, PROMPTS[2], 3) == ids_of(Executor(TableEngine(1)), PROMPTS[2], 3)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_fault_in_a_shared_forward_ends_its_own_call_alone(engine: type[TableEngine]) -> None:
    class Failing(engine):  # type: ignore[misc,valid-type]
        """Fails where a slot holds a token 39, after the rows have been appended."""

        def forward(self, slots: Sequence[int], *args: Any, **kwargs: Any) -> torch.Tensor:
            return self._checked(slots, super().forward(slots, *args, **kwargs))

        def forward_rows(self, slots: Sequence[int], *args: Any) -> torch.Tensor:
            return self._checked(slots, super().forward_rows(slots, *args))

        def _checked(self, slots: Sequence[int], logits: torch.Tensor) -> torch.Tensor:
            for slot in slots:
                if 39 in self._cache[slot][4 : 4 + self._lengths[slot]]:
                    raise RuntimeError("planted fault")
            return logits

    if engine is TableEngine:
        del Failing.forward_rows  # it does not pack
    # A prompt, a sequence of several chunks, and drafts with the token.
    calls = [
        Call("0", (1, 2), 9),
        Call("1", (5, 39, 7, 8), 9),
        Call("2", (8,) * 20, 9),
        Call("3", (*(9,) * 19, 39), 9),
        Call("4", (3, 4), 9, drafts=(39,)),
        Call("5", (3, 4), 9, drafts=(1,)),
    ]
    failing = Failing(1)
    outcomes = run(Executor(failing), *calls)
    for call, outputs in zip(calls, outcomes, strict=True):
        if 39 in (*call.ids, *call.drafts):
            assert outputs[-1].error == "RuntimeError: planted fault"
            continue
        (alone,) = run(Executor(TableEngine(1)), call)
        assert [output.ids for output in outputs] == [output.ids for output in alone]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_finite_end_their_call_and_no_other(temperature: float) -> None:
    class Poisoned(TableEngine):
        """No number behind a token 39 in the third place."""

        def forward(
            self, slots: Sequence[int], tokens: torch.Tensor, *, last_only: bool = False
        ) -> torch.Tensor:
            logits = super().forward(slots, tokens, last_only=last_only)
            for row, slot in enumerate(slots):
                if self._cache[slot][4 + 2] == 39:
                    logits[row, :, 7] = float("nan")
            return logits

    sampling = Sampling(temperature=temperature, seed=3)
    calls = [Call(str(i), (1, 2, last), 9, sampling=sampling) for i, last in enumerate((3, 39, 5))]
    first, bad, last = run(Executor(Poisoned(1)), *calls)
    assert "not finite" in str(bad[-1].error)
    for outputs, call in ((first, calls[0]), (last, calls[2])):
        (alone,) = run(Executor(TableEngine(1)), call)
        assert [output.ids for output in outputs] == [output.ids for output in alone]


def test_draft_logits_that_are_not_finite_end_their_call_and_no_other() -> None:
    executor, warm = Executor(TableEngine(1)), Sampling(temperature=1.0, seed=3)
    fields: dict[str, Any] = {"drafts": (1, 2), "sampling": warm}
    poisoned = Call("poisoned", PROMPTS[2], 3, draft_logits=np.full((2, 40), np.nan), **fields)
    first, bad, last = run(
        executor, Call("first", PROMPTS[2], 9), poisoned, Call("last", PROMPTS[2], 9)
    )
    assert "not finite" in str(bad[-1].error)
    expected = ids_of(Executor(TableEngine(1)), PROMPTS[2], 9)
    for outputs in (first, last):
        assert tuple(token for output in outputs for token in output.ids) == expected


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (Call("x", (), 1), "the sequence is empty"),
        (Call("x", (1,), 0), "0 tokens are requested"),
        (Call("x", (40,), 1), "outside the vocabulary of 40"),
        (Call("x", (1,), 96), "together exceed max_seq_len 96"),
        (
            Call("x", (1,), 9, drafts=(1,) * 8),
            "8 draft tokens were sent, and this engine verifies at most 7",
        ),
        (
            Call("x", (1,), 3, drafts=(1, 2), draft_logits=np.zeros((1, 40))),
            r"draft_logits has the shape \(1, 40\)",
        ),
    ],
)
def test_what_cannot_be_served_is_refused(call: Call, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        Executor(TableEngine(1)).submit(call, lambda output: None)


def test_overload_is_refused() -> None:
    executor = Executor(TableEngine(1, max_batch_size=1), max_queue_size=1)
    for number in range(2):
        executor.submit(Call(str(number), (1,), 1), lambda output: None)
    with pytest.raises(RequestError, match="2 calls are being served or waiting"):
        executor.submit(Call("2", (1,), 1), lambda output: None)
