"""How a call of an engine model is read. No server is needed."""

from __future__ import annotations

import numpy as np
import pytest

from toolkit.errors import RequestError
from toolkit.triton.tensors.engine_tensors import parse_engine
from toolkit.triton.tensors.size_limits import MAX_STOP_IDS, check_logits


def test_stop_words_of_too_many_ids_are_refused() -> None:
    ids = np.array([[1, 2]], dtype=np.int32)
    stop_words = np.zeros((1, 2, MAX_STOP_IDS + 1), dtype=np.int32)
    with pytest.raises(RequestError, match="stop_words_list holds 4097 ids; 4096 are served"):
        parse_engine({"input_ids": ids, "stop_words_list": stop_words}, decoupled=False)


def test_owner_and_salt_are_read_and_a_stop_releases_the_owner_s_slot() -> None:
    words = {"slot_owner": np.array([[b"r1"]], dtype=np.object_)}
    ids = np.array([[1, 2]], dtype=np.int32)
    salt = np.array([[b"s"]], dtype=np.object_)
    request = parse_engine({"input_ids": ids, **words, "cache_salt": salt}, decoupled=False)
    assert (request.owner, request.cache_salt, request.cancels) == ("r1", "s", False)
    request = parse_engine({"stop": np.array([[True]]), **words}, decoupled=False)
    assert (request.owner, request.cancels) == ("r1", True)
    with pytest.raises(RequestError, match="slot_owner takes one value, and 2 were sent"):
        parse_engine(
            {"input_ids": ids, "slot_owner": np.array([[b"a", b"b"]], dtype=np.object_)},
            decoupled=False,
        )


def test_logits_of_an_answer_are_bounded() -> None:
    check_logits(256, 131072)
    with pytest.raises(RequestError, match="takes 134742016 bytes") as refused:
        check_logits(257, 131072)
    assert "Ask for at most 256 tokens" in str(refused.value)
