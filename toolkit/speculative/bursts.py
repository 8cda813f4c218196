"""Verify steps of a single request that the engine takes by itself, one after the other.

Between two forwards the interpreter works on what the last one gave: it reads the logits, chooses
tokens, decodes text and makes an event. For a small model that is a sixth of a step, most of it
waiting for memory that the forward has taken out of the caches. In a burst the engine goes on at
once (`BurstingEngine`), and a second thread, the reader, takes what each step gave while the next
one runs. So an event is on its way as soon as its tokens are known, as without bursts.

A request that joins or is cancelled does not wait, since it interrupts the burst, which ends at its
next step; nor does a deadline, since the caller says how long a burst may last. What ends it is
decided by its steps, so the texts are the same. So are those of sampled requests: the engine draws
with the numbers that the request's rule would have drawn with, and leaves a step to the rule where
rounding would decide it.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
from numpy.typing import NDArray

from toolkit.interfaces import Burst, BurstingEngine, StepEngine
from toolkit.speculative.acceptance import Numbers

__all__ = ["MAX_NS", "BurstStep", "Bursts"]

MAX_STEPS = 32
MAX_NS = 20_000_000
END = 1 << 32  # written to the reader's eventfd to end it; a burst writes 1 for a step
HEAD = 6  # numbers of a row before its drafts: see toolkit.interfaces.Burst
STOP, DONE, DRAFT_LEN = range(3)  # the flags


class BurstStep:
    """What one step gave. wanted: tokens that it was to draft. token: the target's own, NOT_FINITE
    if there is none.
    """

    __slots__ = ("accepted", "draft_ns", "drafts", "now_ns", "token", "verify_ns", "wanted")

    def __init__(self, row: list[int]) -> None:
        self.wanted, drafted, self.accepted = row[:3]
        self.draft_ns, self.verify_ns, self.now_ns = row[3:HEAD]
        self.drafts = row[HEAD : HEAD + drafted]
        self.token = row[HEAD + drafted]


class Bursts:
    """Runs bursts, one at a time, on the thread that calls `run`.

    draft: the engine that drafts; None if no request drafts. The caller knows that they burst
    together.
    """

    def __init__(
        self, target: BurstingEngine, draft: StepEngine | None, max_draft_len: int
    ) -> None:
        self._target, self._draft = target, draft
        self._steps = torch.zeros((MAX_STEPS, max_draft_len + HEAD + 1), dtype=torch.int64)
        self._flags = torch.zeros(3, dtype=torch.int64)
        self._rows, self._state = self._steps.numpy(), self._flags.numpy()
        self._reading = threading.Lock()  # guards the two below
        self._take: Callable[[BurstStep], bool] | None = None
        self._taken = 0
        self._event_fd = -1
        # Called by the reader, without a lock, when it has taken what was known.
        self.on_read: Callable[[], object] = lambda: None
        self._end_reader: Callable[[], object] | None = None

    def start(self) -> None:
        """Start the reader, unless it runs. It inherits the cores of the calling thread, which
        therefore is not the one that computes. It ends when this object is closed or forgotten.
        """
        if self._end_reader is None:
            self._event_fd = os.eventfd(0, os.EFD_CLOEXEC)
            reader = (weakref.ref(self), self._event_fd)
            self._end_reader = weakref.finalize(self, os.eventfd_write, self._event_fd, END)
            threading.Thread(target=_read, args=reader, name="burst reader", daemon=True).start()

    def interrupt(self) -> None:
        """End the burst that runs before its next step. From any thread."""
        self._state[STOP] = 1

    def set_draft_len(self, draft_len: int) -> None:
        """From the next step on, the burst that runs drafts so many tokens, 1 or more, up to those
        that it may draft. From any thread.
        """
        self._state[DRAFT_LEN] = draft_len

    def allow(self) -> None:
        """Forget interruptions. Call it before looking for a reason not to begin a burst."""
        self._state[STOP] = 0

    def run(
        self,
        slot: int,
        unread: list[int],
        draft_len: int,
        longest: int,
        room: int,
        end_ids: tuple[int, ...],
        max_ns: int,
        numbers: Numbers,
        take: Callable[[BurstStep], bool],
    ) -> bool:
        """Run a burst, whose arguments are those of `Burst`. draft_len: tokens to draft at first;
        `set_draft_len` may change it, up to `longest`. take: is given each step, in order, by one
        thread at a time, while later steps may run; it returns whether the sequence goes on, and is
        not called again if not. Returns whether the next step is the caller's.
        """
        with self._reading:
            self._state[DONE], self._state[DRAFT_LEN] = 0, draft_len
            self._take, self._taken = take, 0
        try:
            draft = self._draft if draft_len else None
            uniforms, races = map(_tensor_or_none, (numbers.uniforms, numbers.races))
            _, is_undecided = self._target.burst(
                draft,
                Burst(
                    slot,
                    unread,
                    longest if draft_len else 0,
                    room,
                    end_ids,
                    max_ns,
                    self._steps,
                    self._flags,
                    self._event_fd,
                    numbers.sampling,
                    uniforms,
                    races,
                ),
            )
            self.take_known()
            return is_undecided
        finally:
            with self._reading:
                self._take = None

    def close(self) -> None:
        """End the reader. No burst may run, now or later."""
        if self._end_reader is not None:
            self._end_reader()

    def take_known(self) -> None:
        """Take the steps that are known."""
        with self._reading:  # before the count is read, which may be that of an earlier burst
            count = int(self._state[DONE])
            while self._take is not None and self._taken < count:
                row = self._rows[self._taken].tolist()
                self._taken += 1
                if not self._take(BurstStep(row)):
                    self.interrupt()
                    self._take = None


def _tensor_or_none(numbers: NDArray[Any] | None) -> torch.Tensor | None:
    return None if numbers is None else torch.from_numpy(numbers)


def _read(reference: weakref.ref[Bursts], event_fd: int) -> None:
    """The reader. It keeps no reference while it waits."""
    while os.eventfd_read(event_fd) < END:
        bursts = reference()
        if bursts is not None:
            bursts.take_known()
            bursts.on_read()
        del bursts
    os.close(event_fd)
