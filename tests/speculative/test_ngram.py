"""Prompt lookup as a drafter: it finds the right drafts, and changes no output under any rule."""

from __future__ import annotations

import collections

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.runtimes import assert_idle, make_request, make_runtime, serve, serve_one
from tests.support.step_engines import TableEngine
from toolkit.speculative.drafters import Lookup, NgramDrafter
from toolkit.speculative.sampling import weights


def slow_lookup(ids: list[int], room: int, max_size: int) -> list[int]:
    for size in range(max_size, 0, -1):
        for end in range(len(ids) - 1, size - 1, -1):
            if size < len(ids) and ids[end - size : end] == ids[-size:]:
                return ids[end : end + room]
    return []


@given(st.lists(st.integers(0, 3), min_size=1, max_size=30), st.integers(1, 4), st.integers(1, 4))
def test_lookup_finds_the_last_occurrence_of_the_longest_ending(
    ids: list[int], room: int, max_size: int
) -> None:
    lookup, grown = Lookup(max_size), 0
    for length in range(1, len(ids) + 1, 1 + len(ids) % 3):  # grows by one token or several
        grown = length
        assert lookup(ids[:length], room) == slow_lookup(ids[:length], room, max_size)
    assert grown > 0


@pytest.mark.parametrize(
    "sampling", [{"temperature": 0.0}, {"temperature": 0.9, "seed": 5, "acceptance": "coupled"}]
)
def test_prompt_lookup_does_not_change_the_output(sampling: dict[str, object]) -> None:
    """Greedy and seeded outputs equal plain decoding's, alone and together with others."""
    requests = [
        make_request([1, 2, 3, 1, 2, index], 40, str(index), **sampling) for index in range(6)
    ]
    plain = serve(make_runtime(TableEngine(1)), requests)
    engine = TableEngine(1)
    runtime = make_runtime(engine, None, max_draft_len=4, drafter=NgramDrafter(3))
    drafted = serve(runtime, requests)
    assert [outcome.ids for outcome in drafted] == [outcome.ids for outcome in plain]
    assert sum(outcome.stats.drafted for outcome in drafted) > 0
    assert_idle(runtime, engine)


def test_prompt_lookup_saves_steps_where_text_repeats() -> None:
    """A target with few tokens runs into a cycle. From then on every block is fully accepted."""
    engine = TableEngine(4, vocab_size=5, sharpness=6.0)
    outcome = serve_one(
        make_runtime(engine, None, max_draft_len=4, drafter=NgramDrafter(3)),
        make_request([1, 2, 3], 60),
    )
    assert outcome.stats.verify_steps < 30
    assert len(outcome.ids) == 60


def test_rejection_keeps_the_distribution_when_drafts_are_certain() -> None:
    """The second token, given the first, has the target's own distribution, although the draft is
    always the same token.
    """
    engine = TableEngine(1, vocab_size=6, sharpness=1.0)
    runtime = make_runtime(engine, None, max_draft_len=2, drafter=NgramDrafter(1))
    prompt, seen = [2, 4, 2, 4, 2], dict[int, collections.Counter[int]]()
    requests = [
        make_request(prompt, 3, str(i), temperature=1.0, acceptance="rejection", seed=i)
        for i in range(3000)
    ]
    for start in range(0, len(requests), 8):
        for outcome in serve(runtime, requests[start : start + 8]):
            seen.setdefault(outcome.ids[0], collections.Counter())[outcome.ids[1]] += 1
    import torch

    sampling = requests[0].sampling
    for first, counts in seen.items():
        engine.forward([0], torch.tensor([[*prompt, first]]))
        engine.rewind([0], [0])
        logits = engine.forward([0], torch.tensor([[*prompt, first]]), last_only=True)[0].numpy()
        engine.rewind([0], [0])
        expected = weights(logits, sampling)[0]
        expected = expected / expected.sum() * counts.total()
        observed = np.array([counts[token] for token in range(6)])
        assert ((observed - expected) ** 2 / expected).sum() < 30  # 5 degrees of freedom: p < 2e-5


def test_schedule_bounds_drafts_by_load_and_lets_them_return() -> None:
    """Four requests run without drafts. When three have ended, the last one drafts again, and its
    text does not change.
    """
    target, draft = TableEngine(1), TableEngine(1)
    runtime = make_runtime(
        target, draft, max_draft_len=4, draft_len_schedule=((1, 4), (2, 1), (4, 0))
    )
    requests = [make_request([1, index], 8 if index else 60, str(index)) for index in range(4)]
    outcomes = serve(runtime, requests)
    alone = serve(make_runtime(TableEngine(1)), requests)
    assert [outcome.ids for outcome in outcomes] == [outcome.ids for outcome in alone]
    assert all(outcome.stats.drafted == 0 for outcome in outcomes[1:])
    last = outcomes[0].stats
    assert last.drafted_by_position[3] > 0
    # Both engines are the same, so the draft must have caught up on what it missed.
    assert last.acceptance_rate == 1.0


def test_the_prompt_is_not_fed_to_a_draft_that_the_load_turns_off() -> None:
    """Not even of the first request, which is alone until the others are read."""
    draft = TableEngine(1)
    runtime = make_runtime(TableEngine(1), draft, draft_len_schedule=((1, 4), (2, 0)))
    requests = [make_request((1, 2, 3), 20, name) for name in "abc"]
    outcomes = serve(runtime, requests)
    assert [len(outcome.ids) for outcome in outcomes] == [20] * 3
    assert draft.forwards == []


def test_the_schedule_bounds_a_request_that_states_its_draft_length() -> None:
    """Its length holds while the load allows it, and what bounds it is told."""
    runtime = make_runtime(
        TableEngine(1), TableEngine(1), max_draft_len=4, draft_len_schedule=((1, 4), (2, 1), (3, 0))
    )
    long, short = (
        make_request(max_tokens=count, request_id=str(count), draft_len=3) for count in (40, 12)
    )
    alone = serve(runtime, [long])[0].stats
    assert (alone.drafted_by_position[2] > 0, set(alone.steps_by_reason)) == (True, {"request"})
    first, second = (outcome.stats for outcome in serve(runtime, [long, short]))
    assert (second.drafted_by_position, set(second.steps_by_reason)) == ((5, 0, 0), {"load"})
    assert first.drafted_by_position[0] > first.drafted_by_position[2] > 0
    assert set(first.steps_by_reason) == {"request", "load"}
    crowd = serve(runtime, [make_request(request_id=str(i), draft_len=i % 4) for i in range(8)])
    assert not any(outcome.stats.drafted for outcome in crowd)
    # A length that the schedule allows anyway is the request's own.
    assert [set(outcome.stats.steps_by_reason) for outcome in crowd[:2]] == [{"request"}, {"load"}]
