"""Reusing what a slot's caches hold: the same tokens as without, and fewer that are computed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.runtimes import Outcome, make_request, make_runtime, serve, serve_one
from tests.support.step_engines import LOOK_BACK, FailingEngine, PackingTableEngine, TableEngine
from toolkit.interfaces import GenerationRequest, TokenEvent
from toolkit.speculative.drafters import ModelDrafter
from toolkit.speculative.runtime import SpeculativeRuntime

SYSTEM = tuple(5 + i * 7 % 31 for i in range(30))


def engines(kind: type[TableEngine] = TableEngine, **fields: Any) -> tuple[TableEngine, ...]:
    sizes = {"max_batch_size": 3, "max_seq_len": 96, "max_step_tokens": 9, **fields}
    return kind(1, closeness=0.8, **sizes), TableEngine(2, closeness=0.8, **sizes)


def assert_caches_are_known(
    runtime: SpeculativeRuntime, target: TableEngine, draft: TableEngine
) -> None:
    """Both caches hold exactly what the runtime takes them to hold."""
    drafter = runtime._drafter
    assert isinstance(drafter, ModelDrafter)
    held = {number: runtime._slots[number].held for number in runtime._free}
    for row in (*runtime._running, *runtime._prefilling):
        held[row.slot] = row.ids[: row.cached_tokens]
    assert sorted(held) == list(range(target.max_batch_size))
    for slot, ids in held.items():
        assert target.length(slot) == len(ids)
        assert target._cache[slot][LOOK_BACK:][: len(ids)].tolist() == ids
        valid = drafter._valid_tokens[slot]
        assert valid <= min(len(ids), draft.length(slot))
        assert draft._cache[slot][LOOK_BACK:][:valid].tolist() == ids[:valid]


def alone(request: GenerationRequest, eos: tuple[int, ...] = ()) -> list[int]:
    target, _ = engines()
    runtime = make_runtime(target, max_draft_len=0, eos_token_ids=eos)
    return serve_one(runtime, replace(request, draft_len=None)).ids


requests = st.fixed_dictionaries(
    {
        "after": st.integers(-1, 7),  # whose text it goes on with; -1: a new chat
        "cut": st.integers(0, 6),  # tokens of that text that it leaves out
        "new": st.lists(st.integers(0, 39), min_size=1, max_size=6),
        "max_tokens": st.integers(1, 12),
        "cancelled_after": st.sampled_from([None, None, None, 0, 1, 2, 4]),  # steps
        "wait": st.integers(0, 6),  # steps before the next request comes
        "draft_len": st.sampled_from([None, None, 0, 2]),
        "salt": st.sampled_from(["", "", "", "a"]),
        "sampling": st.sampled_from([{}, {"temperature": 0.9, "seed": 5}]),
    }
)


@settings(max_examples=80, deadline=None)
@given(
    chats=st.lists(requests, min_size=2, max_size=8),
    kind=st.sampled_from([TableEngine, PackingTableEngine]),
    copies=st.booleans(),
    eos=st.sampled_from([(), (3, 4)]),
)
def test_texts_are_those_without_reuse_and_caches_are_known(
    chats: list[dict[str, Any]], kind: type[TableEngine], copies: bool, eos: tuple[int, ...]
) -> None:
    target, draft = engines(kind)
    runtime = make_runtime(target, draft, reuse_prefixes=True, eos_token_ids=eos)
    runtime._copies = copies
    told: list[tuple[GenerationRequest, Outcome]] = []
    cancels: dict[str, int] = {}
    steps = 0

    def step() -> bool:
        nonlocal steps
        for name, at in list(cancels.items()):
            if at <= steps:
                runtime.cancel(name)
                del cancels[name]
        went_on = runtime.step()
        steps += 1
        assert_caches_are_known(runtime, target, draft)
        return went_on

    for number, chat in enumerate(chats):
        before = SYSTEM
        if 0 <= chat["after"] < number:
            earlier, outcome = told[chat["after"]]
            text = (*earlier.prompt_ids, *outcome.ids)
            before = text[: max(1, len(text) - chat["cut"])]
        prompt = (*before, *chat["new"])[-80:]
        request = make_request(
            prompt,
            chat["max_tokens"],
            f"r{number}",
            draft_len=chat["draft_len"],
            cache_salt=chat["salt"],
            **chat["sampling"],
        )
        told.append((request, Outcome()))
        runtime.submit(request, told[-1][1].events.append)
        if chat["cancelled_after"] is not None:
            cancels[request.request_id] = steps + chat["cancelled_after"]
        for _ in range(chat["wait"]):
            step()
    while step() or cancels:
        pass
    for request, outcome in told:
        expected = alone(request, eos)
        if outcome.finish_reason == "cancelled":
            assert outcome.ids == expected[: len(outcome.ids)]
        else:
            assert outcome.ids == expected


def test_only_the_rest_is_computed_by_both_models() -> None:
    target, draft = engines()
    runtime = make_runtime(target, draft, reuse_prefixes=True)
    first = serve_one(runtime, make_request((*SYSTEM, 1, 2), 12))
    assert first.stats.reused_prompt_tokens == 0
    chat = (*SYSTEM, 1, 2, *first.ids, 3, 4)
    target.forwards.clear(), draft.forwards.clear()
    second = serve_one(runtime, make_request(chat, 3, draft_len=2))
    # The last token of a text is chosen and not fed.
    assert second.stats.reused_prompt_tokens == len(chat) - 3
    assert target.forwards[0] == (1, 3)
    # The draft is at most two tokens behind, which it reads with the rest of the prompt.
    assert draft.forwards[0][1] <= 5
    assert len(draft.forwards) <= 1 + 2 * second.stats.verify_steps
    counters = runtime.counters()
    assert counters.reused_prompt_tokens == len(chat) - 3
    assert counters.prompt_tokens == 32 + len(chat)


def test_a_repeated_prompt_computes_its_last_token_again() -> None:
    target, _ = engines()
    runtime = make_runtime(target, max_draft_len=0, reuse_prefixes=True)
    first = serve_one(runtime, make_request(SYSTEM, 4))
    target.forwards.clear()
    again = serve_one(runtime, make_request(SYSTEM, 4))
    assert again.ids == first.ids
    assert target.forwards == [(1, 1)] * 4
    assert again.stats.reused_prompt_tokens == len(SYSTEM) - 1


def test_a_running_request_lends_what_it_has_computed() -> None:
    target, draft = engines()
    runtime = make_runtime(target, draft, reuse_prefixes=True)
    first, second = Outcome(), Outcome()
    runtime.submit(make_request((*SYSTEM, 1), 20, "first"), first.events.append)
    while not first.events:
        runtime.step()
    target.forwards.clear()
    request = make_request((*SYSTEM, 2), 4, "second")
    runtime.submit(request, second.events.append)
    while runtime.step():
        assert_caches_are_known(runtime, target, draft)
    assert second.stats.reused_prompt_tokens == len(SYSTEM)
    assert (second.ids, len(first.ids)) == (alone(request), 20)


def test_switched_off_every_prompt_is_computed() -> None:
    target, draft = engines()
    runtime = make_runtime(target, draft)
    for _ in range(2):
        target.forwards.clear()
        outcome = serve_one(runtime, make_request(SYSTEM, 1))
        assert sum(tokens for _, tokens in target.forwards) == len(SYSTEM)
        assert outcome.stats.reused_prompt_tokens == 0
    assert [target.length(slot) for slot in range(3)] == [0] * 3


def test_another_salt_computes_the_prompt_again() -> None:
    target, draft = engines()
    runtime = make_runtime(target, draft, reuse_prefixes=True)
    reused = [
        serve_one(runtime, make_request(SYSTEM, 2, cache_salt=salt)).stats.reused_prompt_tokens
        for salt in ("a", "b", "", "a", "b", "")
    ]
    assert reused == [0, 0, 0, *[len(SYSTEM) - 1] * 3]


@pytest.mark.parametrize("where", ["target", "receiver", "target is not finite"])
def test_the_slot_of_a_failed_request_holds_nothing(where: str) -> None:
    class NotFinite(TableEngine):
        broken = False

        def forward(self, *args: Any, **options: Any) -> torch.Tensor:
            logits = super().forward(*args, **options)
            return logits * float("nan") if self.broken else logits

    target, draft = FailingEngine(1, max_batch_size=2), TableEngine(2, max_batch_size=2)
    if where == "target is not finite":
        target = NotFinite(1, max_batch_size=2)
    runtime = make_runtime(target, draft, reuse_prefixes=True)
    seen: list[TokenEvent] = []

    def receive(event: TokenEvent) -> None:
        seen.append(event)
        if where == "receiver":
            raise RuntimeError("planted fault")
        target.failing = frozenset([len(target.forwards)])
        target.broken = True  # type: ignore[attr-defined]

    runtime.submit(make_request(SYSTEM, 20), receive)
    while runtime.step():
        assert_caches_are_known(runtime, target, draft)
    assert where == "receiver" or seen[-1].finish_reason == "error"
    target.failing, target.broken = frozenset(), False  # type: ignore[attr-defined]
    assert [target.length(slot) for slot in range(2)] == [0, 0]
    assert [draft.length(slot) for slot in range(2)] == [0, 0]
    assert serve_one(runtime, make_request(SYSTEM, 4)).stats.reused_prompt_tokens == 0


def test_a_draft_that_failed_is_not_reused() -> None:
    class NotFinite(TableEngine):
        broken = True

        def forward(self, *args: Any, **options: Any) -> torch.Tensor:
            logits = super().forward(*args, **options)
            return logits * float("nan") if self.broken else logits

    target, draft = TableEngine(1, closeness=0.9), NotFinite(2, closeness=0.9)
    runtime = make_runtime(target, draft, reuse_prefixes=True)
    request = make_request(SYSTEM, 8)
    assert serve_one(runtime, request).stats.steps_by_reason["draft failed"] > 0
    assert [draft.length(slot) for slot in range(draft.max_batch_size)] == [0] * 8
    draft.broken = False
    again = serve_one(runtime, request)
    assert again.stats.reused_prompt_tokens == len(SYSTEM) - 1
    assert again.stats.accepted > 0


def test_many_at_once_that_share_a_beginning_come_out_as_each_alone() -> None:
    target, draft = engines()
    runtime = make_runtime(target, draft, reuse_prefixes=True)
    requests = [make_request((*SYSTEM, number), 6 + number, f"r{number}") for number in range(12)]
    outcomes = serve(runtime, requests)
    assert [outcome.ids for outcome in outcomes] == [alone(request) for request in requests]
    # Three begin at once, before anything is cached.
    reused = [outcome.stats.reused_prompt_tokens for outcome in outcomes]
    assert reused == [0] * 3 + [len(SYSTEM)] * 9
    again = serve(runtime, [replace(request, request_id="x") for request in requests[:1]])
    assert again[0].ids == outcomes[0].ids


@pytest.mark.parametrize("position", range(1, 6))
def test_drafts_behind_the_end_of_a_text_are_not_held(position: int) -> None:
    """The end token is an accepted draft, and so are those behind it."""
    ids = alone(make_request(SYSTEM, 12))
    target, draft = TableEngine(1, closeness=0.8), TableEngine(1, closeness=0.8)
    runtime = make_runtime(target, draft, reuse_prefixes=True, eos_token_ids=(ids[position],))
    outcome = serve_one(runtime, make_request(SYSTEM, 12))
    assert outcome.ids == ids[: 1 + ids.index(ids[position])]
    assert_caches_are_known(runtime, target, draft)
