"""Measured requests, as a client would have kept them."""

from __future__ import annotations

from toolkit.client import RequestTiming, Statistics

MS = 1_000_000


def timing(
    chunks: list[tuple[int, int]],
    *,
    sent_ms: int = 0,
    tokens: int | None = None,
    **statistics: object,
) -> RequestTiming:
    """chunks: (ms, tokens)."""
    count = sum(n for _, n in chunks) if tokens is None else tokens
    stats = Statistics(output_tokens=count, **statistics)  # type: ignore[arg-type]
    received = tuple((at * MS, n) for at, n in chunks)
    return RequestTiming("p", "", tuple(range(count)), "length", sent_ms * MS, received, stats)
