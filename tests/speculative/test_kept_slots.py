"""Requests of the layout bls over two engines that are called with whole sequences: a running
request keeps its slots, so nothing is computed twice, and nobody waits for ever.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest

from tests.support.runtimes import CODEC
from tests.support.step_engines import TableEngine
from toolkit.speculative.bls_loop import Drafts, Part, Rounds, Settings
from toolkit.speculative.executor import KEPT_NS, Call, Executor, Output

PROMPTS = [
    tuple(int(token) for token in np.random.default_rng(i).integers(0, 40, size=30))
    for i in range(12)
]
WAIT_S = 60.0  # for threads; none of them waits long
NUMBERS = itertools.count()


@dataclass
class Pair:
    """Both engines behind executors. clock: stands still unless a test moves it. runs: threads take
    the steps; else who calls does.
    """

    slots: int
    runs: bool = False
    clock_ns: int = 0
    executors: dict[str, Executor] = field(default_factory=dict)
    engines: dict[str, TableEngine] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for role, seed in (("target", 1), ("draft", 2)):
            engine = TableEngine(seed, closeness=0.8, max_batch_size=self.slots)
            self.engines[role] = engine
            self.executors[role] = Executor(engine, clock=lambda: self.clock_ns)


@dataclass
class Calls:
    """The engines as one request calls them. computed: tokens that its calls had to compute before
    their first output token, of both roles.
    """

    pair: Pair
    owner: str
    computed: dict[str, list[int]] = field(default_factory=lambda: {"target": [], "draft": []})

    def call(
        self, role: str, ids: Sequence[int], count: int, drafts: tuple[int, ...] = ()
    ) -> tuple[int, ...]:
        executor, done, outputs = self.pair.executors[role], threading.Event(), list[Output]()

        def receive(output: Output) -> None:
            outputs.append(output)
            if output.finish_reason is not None:
                done.set()

        call = Call(str(next(NUMBERS)), tuple(ids), count, drafts=drafts, owner=self.owner)
        executor.submit(call, receive)
        if self.pair.runs:
            assert done.wait(WAIT_S)
        while not done.is_set():
            assert executor.step()
        assert outputs[-1].finish_reason in ("stop", "length"), outputs[-1].error
        self.computed[role].append(outputs[-1].computed_tokens)
        return tuple(token for output in outputs for token in output.ids)

    def draft(self, ids: Sequence[int], count: int) -> Drafts:
        return Drafts(self.call("draft", ids, count))

    def verify(self, ids: Sequence[int], drafts: Drafts) -> Part:
        return Part(self.call("target", ids, len(drafts.ids) + 1, drafts.ids))

    def plain(self, ids: Sequence[int], count: int) -> Generator[Part, None, None]:
        yield Part(self.call("target", ids, count))

    def release(self) -> None:
        for executor in self.pair.executors.values():
            executor.release(self.owner)

    def rounds(self, prompt: tuple[int, ...], max_tokens: int) -> Iterator[tuple[int, ...]]:
        settings = Settings("r", prompt, max_tokens, 3, frozenset(), 0)
        try:
            for event in Rounds(settings, self, CODEC.stream(prompt, ()), clock=lambda: 0):
                yield event.token_ids
        finally:
            self.release()


def text_of(prompt: tuple[int, ...], max_tokens: int) -> list[int]:
    pair = Pair(1)
    return list(itertools.chain(*Calls(pair, "alone").rounds(prompt, max_tokens)))


def computed_once(calls: Calls, prompt: tuple[int, ...]) -> bool:
    """Whether both engines computed the prompt once, and later no more than the newest tokens: one
    for the target, up to two for the draft.
    """
    # The draft's first call has the target's first token as well.
    firsts = [calls.computed["target"][0], calls.computed["draft"][0]]
    target, draft = calls.computed["target"][1:], calls.computed["draft"][1:]
    is_read_once = firsts == [len(prompt), len(prompt) + 1]
    return is_read_once and set(target) == {1} and set(draft) <= {1, 2}


@pytest.mark.parametrize("owned", [True, False])
def test_a_running_request_keeps_its_slots_when_others_arrive(owned: bool) -> None:
    """Two slots, two requests at a time that take turns, and always a new one for one that has
    ended. Calls without an owner show what is lost without.
    """
    pair = Pair(2)
    tokens = [40, 6, 9, 12, 7]
    calls = [Calls(pair, str(i) if owned else "") for i in range(len(tokens))]
    texts: list[list[int]] = [[] for _ in tokens]
    waiting = [(i, calls[i].rounds(PROMPTS[i], count)) for i, count in enumerate(tokens)]
    running, waiting = waiting[:2], waiting[2:]
    while running:
        for index, rounds in list(running):
            texts[index] += next(rounds)
            if len(texts[index]) < tokens[index]:
                continue
            assert next(rounds, None) is None
            running.remove((index, rounds))
            # At once, when the slots of the other one are those that were used longest ago.
            for arrival in waiting[:1]:
                running.append(arrival)
                texts[arrival[0]] += next(arrival[1])
            waiting = waiting[1:]
    assert texts == [text_of(prompt, count) for prompt, count in zip(PROMPTS, tokens, strict=False)]
    kept = [computed_once(one, prompt) for one, prompt in zip(calls, PROMPTS, strict=False)]
    assert all(kept) if owned else not all(kept)
    fed = sum(count for one in calls for count in one.computed["target"])
    steps = sum(len(one.computed["target"]) - 1 for one in calls)
    assert (fed == 5 * 30 + steps) == owned


def test_more_requests_than_slots_are_all_served_and_computed_once() -> None:
    """Eight at once over two slots of each engine, and a clock that stands still, so that nothing
    is given up: the others wait until a request has ended.
    """
    pair, stop = Pair(2, runs=True), threading.Event()
    runners = [
        threading.Thread(target=executor.run, args=(stop,)) for executor in pair.executors.values()
    ]
    calls = [Calls(pair, str(i)) for i in range(8)]
    texts: dict[int, list[int]] = {}

    def serve(index: int) -> None:
        texts[index] = list(itertools.chain(*calls[index].rounds(PROMPTS[index], 16)))

    clients = [threading.Thread(target=serve, args=(i,)) for i in range(8)]
    for thread in (*runners, *clients):
        thread.start()
    for client in clients:
        client.join(WAIT_S)
    stop.set()
    for runner in runners:
        runner.join(WAIT_S)
    assert texts == {i: text_of(PROMPTS[i], 16) for i in range(8)}
    assert all(computed_once(one, PROMPTS[i]) for i, one in enumerate(calls))


def outputs_of(executor: Executor, ids: tuple[int, ...], owner: str) -> list[Output]:
    outputs: list[Output] = []
    executor.submit(Call(str(next(NUMBERS)), ids, 1, owner=owner), outputs.append)
    return outputs


def test_a_call_waits_until_a_kept_slot_is_released() -> None:
    pair = Pair(1)
    executor = pair.executors["target"]
    first = Calls(pair, "first")
    new = first.call("target", PROMPTS[0], 1)
    waiting = outputs_of(executor, PROMPTS[1], "second")
    assert not executor.step()
    assert not waiting
    # The owner's next round passes by the call that waits.
    first.call("target", (*PROMPTS[0], *new), 1)
    assert first.computed["target"] == [30, 1]
    assert not waiting
    executor.release("first")
    assert executor.step()
    while not waiting:
        executor.step()
    assert waiting[-1].finish_reason == "length"


def test_who_stops_calling_keeps_nothing_for_long() -> None:
    pair = Pair(1)
    executor = pair.executors["target"]
    dead = Calls(pair, "dead")
    dead.call("target", PROMPTS[0], 1)
    waiting = outputs_of(executor, PROMPTS[1], "next")
    pair.clock_ns = KEPT_NS - 1
    assert not executor.step()
    pair.clock_ns = KEPT_NS
    while not waiting:
        assert executor.step()
    # Should it call again, it is served, after the other one has ended.
    executor.release("next")
    dead.call("target", PROMPTS[0], 1)
    assert dead.computed["target"] == [30, 30]


def test_a_waiting_call_can_be_cancelled() -> None:
    pair = Pair(1)
    executor = pair.executors["target"]
    Calls(pair, "first").call("target", PROMPTS[0], 1)
    seen: list[Output] = []
    executor.submit(Call("waits", PROMPTS[1], 1), seen.append)
    assert not executor.step()
    executor.cancel("waits")
    executor.step()
    assert [output.finish_reason for output in seen] == ["cancelled"]


def test_a_kept_slot_lends_its_beginning_and_a_salt_does_not() -> None:
    pair = Pair(3)
    executor = pair.executors["target"]
    Calls(pair, "first").call("target", PROMPTS[0], 1)
    later = Calls(pair, "second")
    later.call("target", (*PROMPTS[0][:25], 1, 2), 1)
    assert later.computed["target"] == [2]
    seen: list[Output] = []
    executor.submit(Call("salted", PROMPTS[0], 1, cache_salt="a"), seen.append)
    while not seen:
        executor.step()
    assert seen[-1].reused_tokens == 0


def test_without_reuse_only_an_owner_goes_on_from_its_slot() -> None:
    executor = Executor(TableEngine(1, max_batch_size=2), reuse_prefixes=False, clock=lambda: 0)
    reused = []
    for owner in ("a", "a", "b", "", ""):
        outputs = outputs_of(executor, PROMPTS[0], owner)
        while not outputs:
            executor.step()
        reused.append(outputs[-1].reused_tokens)
        if owner == "b":
            executor.release("b")
    assert reused == [0, 29, 0, 0, 0]
