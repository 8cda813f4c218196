"""The process that runs a model, by itself."""

from __future__ import annotations

import ctypes
import os
from types import SimpleNamespace

import pytest

from tests.soak.watch import sample_of
from toolkit.triton.native import worker

BLOCKS, BLOCK_BYTES = 60_000, 1000


def test_what_lies_free_below_a_block_in_use_goes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """malloc alone gives back only what lies free at the end of a heap."""
    library = ctypes.CDLL(None)
    library.malloc.restype = ctypes.c_void_p
    blocks = [ctypes.c_void_p(library.malloc(BLOCK_BYTES)) for _ in range(BLOCKS)]
    for block in blocks:
        ctypes.memset(block, 1, BLOCK_BYTES)
    *freed, last = blocks
    for block in freed:
        library.free(block)
    before = sample_of(os.getpid()).memory
    periods = iter([None])  # there is no second one
    monkeypatch.setattr(worker, "time", SimpleNamespace(sleep=lambda _seconds: next(periods)))
    with pytest.raises(StopIteration):
        worker._give_back_memory()
    assert before - sample_of(os.getpid()).memory > BLOCKS * BLOCK_BYTES // 2
    library.free(last)
