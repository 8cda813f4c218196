"""Drafts that the draft's engine chains in one call: the same drafts, texts and figures as token by
token.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.runtimes import assert_idle, make_request, make_runtime, serve, slow_clock
from tests.support.step_engines import ChainingTableEngine, TableEngine
from toolkit.interfaces import GenerationRequest

# Some of them chain, some do not, some only in part of their steps; they end at different times.
REQUESTS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "short": {"max_tokens": 7},
    "two": {"draft_len": 2},
    "rejection": {"temperature": 0.7, "seed": 3, "acceptance": "rejection"},
    "one": {"temperature": 1.1, "seed": 4, "acceptance": "rejection", "draft_len": 1},
    "filtered": {"temperature": 0.7, "seed": 5, "acceptance": "rejection", "top_k": 3},
    "penalised": {"frequency_penalty": 0.5},
    "coupled": {"temperature": 0.7, "seed": 6},
    "filtered coupled": {"temperature": 0.7, "seed": 6, "top_p": 0.9},
    "sample_match": {"temperature": 0.7, "seed": 7, "acceptance": "sample_match"},
    "plain": {"draft_len": 0},
    "verify_only": {"acceptance": "verify_only"},
}
STEPPED = ("penalised", "plain", "verify_only")


def requests() -> list[GenerationRequest]:
    return [
        make_request((1, 2, index), request_id=name, **fields)
        for index, (name, fields) in enumerate(REQUESTS.items())
    ]


@pytest.mark.parametrize("batch", [1, 3, 12])
def test_everything_is_as_token_by_token(batch: int) -> None:
    outcomes = []
    for kind in (TableEngine, ChainingTableEngine):
        target = TableEngine(1, max_batch_size=batch)
        draft = kind(2, max_batch_size=batch, closeness=0.7)
        runtime = make_runtime(target, draft)
        outcomes.append(serve(runtime, requests()))
        assert_idle(runtime, target, draft)
    for plain, chained in zip(*outcomes, strict=True):
        assert chained.ids == plain.ids
        assert chained.stats.drafted_by_position == plain.stats.drafted_by_position
        assert chained.stats.accepted_by_position == plain.stats.accepted_by_position


@pytest.mark.parametrize("name", REQUESTS)
def test_a_request_alone_chains_each_block_or_none(name: str) -> None:
    draft = ChainingTableEngine(2, closeness=0.7)
    runtime = make_runtime(TableEngine(1), draft)
    [outcome] = serve(runtime, [make_request(request_id=name, **REQUESTS[name])])
    blocks = [block for (block,) in draft.chains]
    if name in STEPPED:
        assert not blocks
    else:
        assert sum(blocks) == outcome.stats.drafted > 0


def test_a_chain_reads_what_its_draft_missed() -> None:
    """The long request drafts nothing beside the short one, and then catches up in its block."""
    draft = ChainingTableEngine(2, max_batch_size=2, closeness=0.7)
    target = TableEngine(1, max_batch_size=2)
    schedule = ((1, 3), (2, 0))
    runtime = make_runtime(target, draft, draft_len_schedule=schedule, clock=slow_clock())
    requests = [make_request(request_id="long"), make_request(max_tokens=5, request_id="short")]
    serve(runtime, requests)
    chained = sum(sum(counts) for counts in draft.chains)
    assert chained > 0
    assert len(draft.forwards) == chained  # nothing is read outside of a chain, not even a prompt
    assert max(width for _, width in draft.forwards) > 2
