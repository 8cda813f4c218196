"""What vLLM is told about speculation: the method, its settings, and the draft's path."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from toolkit.engines.vllm.arguments import engine_args, resolved
from toolkit.errors import UsageError
from toolkit.interfaces import EngineSpec, VllmSpec

SPEC = EngineSpec(
    role="target", max_batch_size=16, max_input_len=512, max_seq_len=1024, max_draft_len=4
)


def speculative(**fields: Any) -> dict[str, Any]:
    settings = VllmSpec("0.32.0", **{"speculation": "draft_target", **fields})
    config: dict[str, Any] = engine_args(SPEC, settings, None)["speculative_config"]
    return config


@pytest.mark.parametrize(
    ("kind", "method"), [("draft_target", "draft_model"), ("eagle3", "eagle3")]
)
def test_a_draft_checkpoint_is_named_with_its_method(kind: str, method: str) -> None:
    expected = {"method": method, "model": "../draft", "num_speculative_tokens": 4}
    assert speculative(speculation=kind) == expected


def test_rejection_sampling_needs_drafts_that_are_drawn() -> None:
    assert speculative(samples_drafts=True)["draft_sample_method"] == "probabilistic"
    assert "draft_sample_method" not in speculative()


def test_ngram_looks_shorter_endings_up_too() -> None:
    """With a maximum alone, vLLM looks up endings of exactly that many tokens."""
    assert speculative(speculation="ngram", max_matching_ngram_size=3) == {
        "method": "ngram",
        "num_speculative_tokens": 4,
        "prompt_lookup_min": 1,
        "prompt_lookup_max": 3,
    }


@pytest.mark.parametrize(
    ("fields", "ranges"),
    [
        ({"draft_len_schedule": {1: 4, 3: 2, 9: 0}}, [[1, 2, 4], [3, 8, 2], [9, 16, 0]]),
        ({"draft_len_schedule": {1: 4, 16: 1, 17: 0}}, [[1, 15, 4], [16, 16, 1]]),
        ({"max_concurrency": 3}, [[1, 3, 4], [4, 16, 0]]),
        ({"max_concurrency": 16}, [[1, 16, 4]]),
    ],
)
def test_a_schedule_has_a_range_for_every_batch_size_that_can_occur(
    fields: dict[str, Any], ranges: list[list[int]]
) -> None:
    assert speculative(**fields)["num_speculative_tokens_per_batch_size"] == ranges


@pytest.mark.parametrize("name", ["EAGLE3", "my-eagle-head", "dflash", "old.dspark"])
def test_a_draft_whose_path_vllm_would_misread_is_refused(name: str) -> None:
    settings = VllmSpec("0.32.0", speculation="draft_target")
    args = engine_args(SPEC, settings, None)
    with pytest.raises(UsageError, match="takes every draft whose path contains") as caught:
        resolved(args, "/models/target", Path("/models") / name / "draft")
    assert "rename the folder" in str(caught.value.hint)


def test_the_path_of_a_head_may_say_what_it_is() -> None:
    args = engine_args(SPEC, VllmSpec("0.32.0", speculation="eagle3"), None)
    placed = resolved(args, "/models/target", "/models/eagle3/draft")
    assert placed["speculative_config"]["model"] == "/models/eagle3/draft"
