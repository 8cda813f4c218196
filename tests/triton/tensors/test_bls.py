"""What the BLS model takes of a draft's answer."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from toolkit.triton.tensors.bls import read_drafts

VOCAB = 6
LOGITS = np.array([[[0.5, -np.inf, 2.0, 1.0, 0.0, 0.0]] * 3], dtype=np.float32)[None]
GOOD = {
    "output_ids": np.array([[[2, 5, 3]]], dtype=np.int32),
    "sequence_length": np.array([[3]], dtype=np.int32),
    "generation_logits": LOGITS,
}


def read(wants_logits: bool = True, count: int = 3, **changes: Any) -> Any:
    answer = {name: array for name, array in {**GOOD, **changes}.items() if array is not None}
    return read_drafts(answer, count, vocab_size=VOCAB, wants_logits=wants_logits)


def test_drafts_come_with_the_logits_that_are_wanted() -> None:
    ids, logits = read()
    assert ids == (2, 5, 3)
    assert logits.shape == (3, VOCAB)
    assert read(False) == ((2, 5, 3), None)
    ids, logits = read(count=2)
    assert (ids, logits.shape) == ((2, 5), (2, VOCAB))


def test_an_engine_that_met_an_end_token_at_once_drafts_nothing() -> None:
    nothing = {"sequence_length": np.array([[0]], dtype=np.int32)}
    assert read(**nothing, generation_logits=None) == ((), None)


def test_logits_may_be_padded() -> None:
    padded = np.zeros((1, 1, 3, VOCAB + 2), dtype=np.float16)
    assert read(generation_logits=padded)[1].shape == (3, VOCAB + 2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"output_ids": None}, "no output_ids"),
        ({"sequence_length": None}, "no sequence_length"),
        ({"sequence_length": np.zeros((1, 0), dtype=np.int32)}, "no sequence_length"),
        ({"generation_logits": None}, "no generation_logits"),
        ({"output_ids": np.array([[[2, VOCAB, 3]]])}, "outside the vocabulary"),
        ({"output_ids": np.array([[[2, -1, 3]]])}, "outside the vocabulary"),
        ({"output_ids": np.array([[[2, 3]]])}, "drafted 3 tokens, and sent 2"),
        ({"sequence_length": np.array([[-2]])}, "drafted -2 tokens"),
        ({"generation_logits": LOGITS[..., :2, :]}, "for 3 tokens of a vocabulary"),
        ({"generation_logits": LOGITS[..., :4]}, "of a vocabulary of 6"),
        ({"generation_logits": LOGITS * np.nan}, "not finite"),
        ({"generation_logits": np.full_like(LOGITS, np.inf)}, "not finite"),
        ({"generation_logits": np.full_like(LOGITS, -np.inf)}, "not finite"),
    ],
)
def test_what_cannot_be_drafts_is_a_failure_of_the_draft(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        read(**changes)
