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
