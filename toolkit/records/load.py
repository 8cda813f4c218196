"""What an open loop at the judged rate has measured."""

from __future__ import annotations

from dataclasses import dataclass

from toolkit.records.bench import BenchPoint

__all__ = ["LoadRun", "RateProbe"]


@dataclass(frozen=True, slots=True)
class RateProbe:
    """A short run of the search for the highest rate.

    rate: requests due per second. good_share: of the requests, those within every limit.
    is_kept: whether few enough requests failed or missed a limit.
    """

    rate: float
    requests: int
    failed: int
    good_share: float
    is_kept: bool


@dataclass(frozen=True, slots=True)
class LoadRun:
    """Both arms in turns at one rate, in an open loop.

    rate: requests due per second; None: no probed rate kept the limits, and nothing was judged.
    goodput_ms: limits of one request, latency -> ms. min_goodput: the share of requests that has to
    be within them. probes: of the search, in its order; empty for a stated rate. needed: answers
    per arm that p99 takes. lead_in: requests per arm and round that were sent before and not
    judged. point: all figures.
    """

    rate: float | None
    arrivals: str
    temperature: float
    goodput_ms: dict[str, float]
    min_goodput: float
    probes: tuple[RateProbe, ...]
    needed: int
    lead_in: int
    point: BenchPoint | None
