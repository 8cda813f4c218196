"""The process that runs a model, by itself."""

from __future__ import annotations

import ctypes
import os
import socket
import threading
from collections.abc import Iterator
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


@pytest.fixture
def sockets() -> Iterator[tuple[socket.socket, socket.socket]]:
    backend, ours = socket.socketpair()
    with backend, ours:
        yield backend, ours


def test_frames_that_are_sent_together_go_out_at_the_end(
    sockets: tuple[socket.socket, socket.socket],
) -> None:
    backend, ours = sockets
    backend.setblocking(False)
    connection = worker.Connection(ours)

    def has_arrived() -> bytes:
        try:
            return backend.recv(100)
        except BlockingIOError:
            return b""

    with connection.together():
        connection.send(b"one")
        connection.send(b"two")
        assert has_arrived() == b""
        other = threading.Thread(target=connection.send, args=(b"of another thread",))
        other.start()
        other.join()
        assert has_arrived() == b"of another thread"
    assert has_arrived() == b"onetwo"
    connection.send(b"three")
    assert has_arrived() == b"three"


def test_what_was_sent_before_a_fault_goes_out(
    sockets: tuple[socket.socket, socket.socket],
) -> None:
    backend, ours = sockets
    connection = worker.Connection(ours)
    with pytest.raises(ValueError, match="on purpose"), connection.together():
        connection.send(b"one")
        raise ValueError("on purpose")
    connection.send(b"two")
    assert backend.recv(100) == b"onetwo"
