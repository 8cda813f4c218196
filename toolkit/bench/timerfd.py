"""A timer for the event loop that is precise enough to send requests on schedule.

asyncio waits in whole milliseconds. A sleeping thread would be more precise, but after it wakes it
has to wait until the event loop releases the interpreter. Linux' timerfd is a file descriptor, as a
socket is: the loop waits for it together with its sockets, to the nanosecond (timerfd_create(2)).
Python has it from 3.13 on; with older versions this module calls the C library.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import time
from collections.abc import Callable
from types import TracebackType

__all__ = ["Alarm"]

ABSOLUTE = 1  # TFD_TIMER_ABSTIME
NS_PER_S = 1_000_000_000


class _Setting(ctypes.Structure):
    """struct itimerspec: the interval, which stays 0, and the time of the alarm. Each is seconds
    and nanoseconds.
    """

    _fields_ = (("interval", ctypes.c_long * 2), ("at", ctypes.c_long * 2))


class Alarm:
    """Calls `ring` in the running loop at the time that was set last, on the clock of
    time.monotonic_ns(). Raises OSError.
    """

    def __init__(self, ring: Callable[[], None]) -> None:
        self._ring = ring

    def __enter__(self) -> Alarm:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._fd = self._checked(
            self._libc.timerfd_create(time.CLOCK_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC)
        )
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._fd, self._rang)
        return self

    def set(self, at_ns: int) -> None:
        """Set the time of the alarm, which replaces the time set before. A time in the past rings
        at once.
        """
        setting = _Setting(at=(at_ns // NS_PER_S, at_ns % NS_PER_S))
        self._checked(self._libc.timerfd_settime(self._fd, ABSOLUTE, ctypes.byref(setting), None))

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._loop.remove_reader(self._fd)
        os.close(self._fd)

    def _rang(self) -> None:
        with contextlib.suppress(BlockingIOError):  # it was set again after it rang
            os.read(self._fd, 8)
        self._ring()

    @staticmethod
    def _checked(result: int) -> int:
        if result < 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), "timerfd")
        return result
