"""Commands that run until Ctrl-C or SIGTERM, and clean up then."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator

__all__ = ["Signal", "interrupted_by_signals"]


class Signal(KeyboardInterrupt):
    """A Ctrl-C or SIGTERM. number: the signal's."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number


@contextlib.contextmanager
def interrupted_by_signals() -> Iterator[None]:
    """Raise Signal at the first Ctrl-C or SIGTERM while the block runs, whatever it does. Later
    ones do not disturb the cleaning up. The old handlers are restored at the end.
    """

    def interrupt(number: int, _: object) -> None:
        for watched in old_handlers:
            signal.signal(watched, signal.SIG_IGN)
        raise Signal(number)

    old_handlers = {
        number: signal.signal(number, interrupt) for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield
    finally:
        for number, handler in old_handlers.items():
            signal.signal(number, handler)
