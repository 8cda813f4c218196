"""The draft length that the load allows (`draft_len_schedule`).

More requests shorten drafts at once. Fewer ones lengthen them when they have been fewer for a
while, since a request that ends is often followed by another, which its client sends a few
milliseconds later. For that moment drafts would not pay: a draft first reads all that it has
missed.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["RISE_AFTER_NS", "LoadSchedule"]

# Longer than an answer takes to its client, and the next request back.
RISE_AFTER_NS = 10_000_000


class LoadSchedule:
    """schedule: (requests, draft length) pairs; each applies from that many requests on. The first
    one also applies to fewer.
    """

    def __init__(self, schedule: Sequence[tuple[int, int]]) -> None:
        self._schedule = sorted(schedule)
        self._length = self._schedule[0][1]
        self._lower_since_ns: int | None = None

    def length(self, requests: int, now_ns: int) -> int:
        """The longest draft for so many requests. Call it at each step, and when none is left."""
        allowed = self._schedule[0][1]
        for least, length in self._schedule:
            if least <= requests:
                allowed = length
        if allowed <= self._length:
            self._length, self._lower_since_ns = allowed, None
        elif self._lower_since_ns is None:
            self._lower_since_ns = now_ns
        elif now_ns - self._lower_since_ns >= RISE_AFTER_NS:
            self._length, self._lower_since_ns = allowed, None
        return self._length
