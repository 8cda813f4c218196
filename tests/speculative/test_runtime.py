"""What the runtime returns for a request: the tokens of plain decoding, whatever the draft, the
draft length and the other requests.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.runtimes import (
    CODEC,
    Outcome,
    assert_idle,
    make_request,
    make_runtime,
    serve,
    serve_one,
)
from tests.support.step_engines import ForgetfulRewind, TableEngine
from toolkit.interfaces import GenerationRequest
from toolkit.speculative.drafters import ModelDrafter

VOCAB = 40
PROMPTS = [
    tuple(int(t) for t in np.random.default_rng(i).integers(0, VOCAB, size=1 + i % 23))
    for i in range(64)
]

SAMPLED: dict[str, dict[str, Any]] = {
    "greedy": {},
    "greedy, penalties": {"frequency_penalty": 0.6, "presence_penalty": 0.4},
    "coupled": {"temperature": 0.8, "seed": 11},
    "coupled, filters": {"temperature": 1.1, "seed": 12, "top_k": 9, "top_p": 0.8},
    "coupled, penalties": {
        "temperature": 0.9,
        "seed": 13,
        "frequency_penalty": 0.5,
        "presence_penalty": -0.3,
    },
}


def ids_of(outcomes: list[Outcome]) -> list[list[int]]:
    return [outcome.ids for outcome in outcomes]


def requests_of(count: int, max_tokens: int = 20, **fields: Any) -> list[GenerationRequest]:
    return [make_request(PROMPTS[i], max_tokens, f"r{i}", **fields) for i in range(count)]


@settings(max_examples=60)
@given(
    draft_seed=st.integers(0, 1000),
    closeness=st.sampled_from([0.0, 0.7, 0.95]),
    draft_len=st.integers(1, 8),
    batch=st.sampled_from([1, 3, 8]),
    kind=st.sampled_from(sorted(SAMPLED)),
    eos=st.sampled_from([(), (3,), (5, 6, 7)]),
    max_tokens=st.integers(1, 24),
)
def test_the_draft_changes_nothing(
    draft_seed: int,
    closeness: float,
    draft_len: int,
    batch: int,
    kind: str,
    eos: tuple[int, ...],
    max_tokens: int,
) -> None:
    requests = requests_of(8, max_tokens, **SAMPLED[kind])
    target = TableEngine(1, closeness=closeness)
    plain = make_runtime(target, max_draft_len=0, eos_token_ids=eos)
    expected = [serve_one(plain, request) for request in requests]
    target = TableEngine(1, closeness=closeness, max_batch_size=batch)
    draft = TableEngine(draft_seed, closeness=closeness, max_batch_size=batch, max_step_tokens=5)
    runtime = make_runtime(target, draft, max_draft_len=draft_len, eos_token_ids=eos)
    outcomes = serve(runtime, requests)
    assert ids_of(outcomes) == ids_of(expected)
    assert [outcome.finish_reason for outcome in outcomes] == [
        outcome.finish_reason for outcome in expected
    ]
    assert_idle(runtime, target, draft)


@pytest.mark.parametrize("rule", ["rejection", "sample_match"])
def test_a_seed_reproduces_the_output_for_one_draft_length_in_any_company(rule: str) -> None:
    target, draft = TableEngine(1, closeness=0.8), TableEngine(2, closeness=0.8)
    runtime = make_runtime(target, draft, max_draft_len=3)
    requests = requests_of(12, temperature=0.9, top_p=0.95, seed=4, acceptance=rule)
    alone = ids_of([serve_one(runtime, request) for request in requests])
    assert ids_of(serve(runtime, requests)) == alone
    assert ids_of(serve(runtime, requests[::-1])) == alone[::-1]


def test_without_a_seed_outputs_differ() -> None:
    runtime = make_runtime(TableEngine(1), TableEngine(2))
    assert (
        len({tuple(serve_one(runtime, make_request(temperature=1.0)).ids) for _ in range(4)}) == 4
    )


def test_500_mixed_requests_at_concurrency_16_come_out_as_one_by_one() -> None:
    rng = np.random.default_rng(7)
    kinds: list[dict[str, Any]] = [
        *SAMPLED.values(),
        {"temperature": 0.7, "seed": 21, "acceptance": "rejection"},
        {"temperature": 0.7, "seed": 22, "acceptance": "sample_match", "top_k": 5},
    ]
    requests = [
        make_request(
            PROMPTS[int(rng.integers(64))],
            int(rng.integers(1, 20)),
            f"r{i}",
            **kinds[i % len(kinds)],
            draft_len=[None, 0, 1, 3][int(rng.integers(4))],
            stop=((), ("!", "%'"))[int(rng.integers(2))],
        )
        for i in range(500)
    ]
    target, draft = TableEngine(1, closeness=0.8), TableEngine(2, closeness=0.8)
    single = make_runtime(target, draft, eos_token_ids=(3,))
    expected = [serve_one(single, request) for request in requests]
    many_target = TableEngine(1, closeness=0.8, max_batch_size=16, max_step_tokens=24)
    many_draft = TableEngine(2, closeness=0.8, max_batch_size=16)
    runtime = make_runtime(many_target, many_draft, eos_token_ids=(3,), max_queue_size=500)
    outcomes = serve(runtime, requests)
    for outcome, alone in zip(outcomes, expected, strict=True):
        assert (outcome.ids, outcome.text, outcome.finish_reason) == (
            alone.ids,
            alone.text,
            alone.finish_reason,
        )
        assert outcome.events[-1].stop_reason == alone.events[-1].stop_reason
        assert (outcome.stats.accepted, outcome.stats.verify_steps) == (
            alone.stats.accepted,
            alone.stats.verify_steps,
        )
    assert max(rows for rows, _ in many_target.forwards) == 16
    assert {outcome.finish_reason for outcome in outcomes} == {"stop", "length"}
    assert_idle(runtime, many_target, many_draft)
    counters = runtime.counters()
    assert sum(counters.requests.values()) == 500
    assert counters.output_tokens == sum(len(outcome.ids) for outcome in outcomes)


# The caches.


def test_drafts_of_the_target_itself_are_always_accepted() -> None:
    for kind in ("greedy", "coupled", "greedy, penalties"):
        runtime = make_runtime(TableEngine(1), TableEngine(1), max_draft_len=3)
        for outcome in serve(runtime, requests_of(8, 25, **SAMPLED[kind])):
            assert outcome.stats.acceptance_rate == 1.0
            assert outcome.stats.acceptance_length == 4.0  # 24 tokens after the first, in 6 steps


class WithoutCatchUp(ModelDrafter):
    """Broken: takes the cache for complete after a fully accepted block, so the last draft is never
    fed.
    """

    def settle(self, slot: int, length: int) -> None:
        super().settle(slot, length)
        missing = length - self._valid_tokens[slot]
        if missing:
            self._engine.forward([slot], torch.zeros((1, missing), dtype=torch.int64))
            self._valid_tokens[slot] = length


def test_a_missing_catch_up_is_detected() -> None:
    draft = TableEngine(1)
    runtime = make_runtime(TableEngine(1), drafter=WithoutCatchUp(draft), max_draft_len=3)
    rates = [outcome.stats.acceptance_rate for outcome in serve(runtime, requests_of(8, 25))]
    assert all(rate is not None and rate < 0.9 for rate in rates)


def test_a_missing_rewind_is_detected() -> None:
    requests = requests_of(8, 20)
    expected = ids_of(serve(make_runtime(TableEngine(1, closeness=0.7), max_draft_len=0), requests))
    broken = make_runtime(ForgetfulRewind(1, closeness=0.7), TableEngine(2, closeness=0.7))
    assert sum(a != b for a, b in zip(ids_of(serve(broken, requests)), expected, strict=True)) >= 6


def test_plain_decoding_never_runs_the_draft_and_takes_one_token_per_forward() -> None:
    target, draft = TableEngine(1), TableEngine(2)
    runtime = make_runtime(target, draft)
    outcome = serve_one(runtime, make_request((1, 2), 6, draft_len=0))
    assert target.forwards == [(1, 2), *[(1, 1)] * 5]
    assert draft.forwards == []
    assert (outcome.stats.verify_steps, outcome.stats.drafted, outcome.stats.acceptance_rate) == (
        5,
        0,
        None,
    )


def test_no_token_is_drafted_that_could_not_be_used() -> None:
    target, draft = TableEngine(1), TableEngine(1)
    for max_tokens in (1, 2):
        serve_one(make_runtime(target, draft), make_request(max_tokens=max_tokens))
    assert draft.forwards == []
    assert serve_one(make_runtime(target, draft), make_request(max_tokens=4)).stats.drafted == 2


def test_a_long_prompt_does_not_stall_others() -> None:
    target, draft = TableEngine(1, max_step_tokens=5), TableEngine(1, max_step_tokens=5)
    runtime = make_runtime(target, draft, max_draft_len=0)
    short, long = Outcome(), Outcome()
    runtime.submit(make_request((1, 2), 30, "short"), short.events.append)
    runtime.step()
    runtime.submit(make_request(tuple(range(40)), 30, "long"), long.events.append)
    new_tokens = []
    while not long.events:
        before = len(short.ids)
        runtime.step()
        new_tokens.append(len(short.ids) - before)
    assert new_tokens == [1] * 8  # eight chunks, each with one token of the other request
    assert [n for rows, n in target.forwards if n > 1] == [2, *[5] * 8]


# The ends.


def ending_target() -> tuple[TableEngine, TableEngine, list[int]]:
    """A pair that agrees on everything, and its output after PROMPTS[5]."""
    target, draft = TableEngine(4), TableEngine(4)
    output = serve_one(make_runtime(target, max_draft_len=0), make_request(PROMPTS[5], 20)).ids
    return target, draft, output


@pytest.mark.parametrize("position", range(12))
def test_eos_ends_the_output_at_any_place_of_a_block(position: int) -> None:
    target, draft, output = ending_target()
    position = output.index(output[position])
    runtime = make_runtime(target, draft, eos_token_ids=(output[position], 99))
    outcome = serve_one(runtime, make_request(PROMPTS[5], 20))
    assert outcome.ids == output[: position + 1]
    assert outcome.finish_reason == "stop"
    assert outcome.events[-1].stop_reason is None
    assert outcome.text == continuation(output[:position])
    assert_consistent(outcome)
    assert_idle(runtime, target, draft)


@pytest.mark.parametrize("max_tokens", range(1, 13))
def test_max_tokens_is_exact_at_any_place_of_a_block(max_tokens: int) -> None:
    target, draft, output = ending_target()
    runtime = make_runtime(target, draft)
    outcome = serve_one(runtime, make_request(PROMPTS[5], max_tokens))
    assert outcome.ids == output[:max_tokens]
    assert outcome.finish_reason == "length"
    assert_consistent(outcome)
    assert_idle(runtime, target, draft)


@pytest.mark.parametrize("length", [1, 2, 3])
@pytest.mark.parametrize("position", range(9))
def test_a_stop_word_ends_the_text_at_any_place_of_a_block(position: int, length: int) -> None:
    target, draft, output = ending_target()
    word = CODEC.decode(output[position : position + length])
    if "\N{REPLACEMENT CHARACTER}" in word:
        pytest.skip("these ids are no text")
    text = continuation(output)
    start = text.index(word)
    runtime = make_runtime(target, draft)
    outcome = serve_one(runtime, make_request(PROMPTS[5], 20, stop=("zzz", word)))
    assert outcome.text == text[:start]
    assert word not in outcome.text
    assert word in continuation(outcome.ids)
    assert word not in continuation(outcome.ids[:-1])
    assert (outcome.finish_reason, outcome.events[-1].stop_reason) == ("stop", word)
    assert_consistent(outcome)
    assert_idle(runtime, target, draft)


def test_the_context_can_be_filled_to_its_end() -> None:
    target, draft = TableEngine(1, max_seq_len=30), TableEngine(1, max_seq_len=30)
    runtime = make_runtime(target, draft)
    outcome = serve_one(runtime, make_request((1,) * 10, 20))
    assert (len(outcome.ids), outcome.finish_reason) == (20, "length")
    assert_idle(runtime, target, draft)


def test_log_probabilities_add_up_to_those_of_plain_decoding() -> None:
    target, draft = TableEngine(1, closeness=0.8), TableEngine(2, closeness=0.8)
    runtime = make_runtime(target, draft)
    for fields in SAMPLED.values():
        outcome = serve_one(
            runtime, make_request(PROMPTS[9], 20, cumulative_logprob=True, **fields)
        )
        ids = [*PROMPTS[9], *outcome.ids]
        target.max_step_tokens = len(ids)
        rows = torch.log_softmax(target.forward([0], torch.tensor([ids])), -1)[0]
        target.rewind([0], [0])
        expected = sum(rows[i - 1, ids[i]].item() for i in range(len(PROMPTS[9]), len(ids)))
        assert outcome.stats.cumulative_logprob == pytest.approx(expected)
    assert serve_one(runtime, make_request()).stats.cumulative_logprob is None


def test_times_are_in_order_and_counted() -> None:
    outcome = serve_one(make_runtime(TableEngine(1), TableEngine(2)), make_request())
    stats = outcome.stats
    assert stats.first_scheduled_ns is not None
    assert stats.first_token_ns is not None
    assert stats.last_token_ns is not None
    assert stats.arrival_ns <= stats.first_scheduled_ns < stats.first_token_ns < stats.last_token_ns
    assert min(stats.draft_ns, stats.verify_ns, stats.host_ns) > 0
    assert stats.draft_ns + stats.verify_ns + stats.host_ns < 10**9 + 2 * (
        stats.last_token_ns - stats.first_token_ns
    )


def continuation(ids: list[int]) -> str:
    prompt = CODEC.decode(PROMPTS[5])
    whole = CODEC.decode([*PROMPTS[5], *ids])
    assert whole.startswith(prompt)
    return whole[len(prompt) :]


def assert_consistent(outcome: Outcome) -> None:
    """Output tokens are one from prefill, one per verify step and the accepted ones. The last block
    may end at a draft, and then adds no token of the target's own.
    """
    stats = outcome.stats
    assert stats.output_tokens == len(outcome.ids)
    assert 1 + stats.verify_steps + stats.accepted - stats.output_tokens in (0, 1)
    assert (stats.drafted, stats.accepted) == (
        sum(stats.drafted_by_position),
        sum(stats.accepted_by_position),
    )
    for drafted, accepted in zip(
        stats.drafted_by_position, stats.accepted_by_position, strict=True
    ):
        assert accepted <= drafted <= stats.verify_steps
    assert list(stats.accepted_by_position) == sorted(stats.accepted_by_position, reverse=True)
    if stats.verify_steps:
        assert stats.acceptance_length == 1 + stats.accepted / stats.verify_steps
        assert not math.isnan(stats.acceptance_length or 0.0)


@pytest.mark.parametrize("kind", sorted(SAMPLED))
def test_verify_only_drafts_and_verifies_and_accepts_nothing(kind: str) -> None:
    """verify_only gives the plain text on the speculative path, so a fault of the forwards can be
    told from a fault of the accept rule.
    """
    plain = serve(
        make_runtime(TableEngine(1, closeness=0.9), max_draft_len=0),
        requests_of(8, **SAMPLED[kind]),
    )
    runtime = make_runtime(
        TableEngine(1, closeness=0.9), TableEngine(2, closeness=0.9), max_draft_len=3
    )
    outcomes = serve(runtime, requests_of(8, acceptance="verify_only", **SAMPLED[kind]))
    assert ids_of(outcomes) == ids_of(plain)
    assert all(outcome.stats.drafted > 0 and outcome.stats.accepted == 0 for outcome in outcomes)
    assert all(outcome.stats.verify_steps == len(outcome.ids) - 1 for outcome in outcomes)


def test_running_statistics_grow_from_event_to_event() -> None:
    runtime = make_runtime(TableEngine(3, vocab_size=VOCAB), TableEngine(3, vocab_size=VOCAB))
    events = serve_one(runtime, make_request(PROMPTS[3], 12, running_stats=True)).events
    tokens = 0
    for event in events:
        tokens += len(event.token_ids)
        assert event.stats is not None
        assert event.stats.output_tokens == tokens
    assert len(events) > 1
    assert tokens == 12
