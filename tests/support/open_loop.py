"""Open loops that were never run: one server with a queue, simulated arrival by arrival."""

from __future__ import annotations

import numpy as np

from tests.support.timings import MS
from toolkit.bench import metrics
from toolkit.bench.proportions import clopper_pearson
from toolkit.client import RequestTiming, Statistics
from toolkit.records.bench import BenchArm, BenchPoint
from toolkit.records.load import LoadRun, RateProbe
from toolkit.records.measured import Interval

__all__ = ["load_arm", "load_run", "queued"]

TOKENS = 8


def queued(rate: float, service_ms: float, count: int, seed: int = 0) -> list[RequestTiming]:
    """Answers of a server that serves one request at a time, each in about service_ms: a request
    waits until all before it are served.
    """
    generator = np.random.default_rng(seed)
    due_ms = np.cumsum(generator.exponential(1000 / rate, count))
    free_ms, answers = 0.0, []
    for due in due_ms:
        begin = max(free_ms, due)
        free_ms = begin + service_ms * generator.uniform(0.8, 1.2)
        gap = (free_ms - begin) / TOKENS
        chunks = tuple((int((begin + gap * (token + 1)) * MS), 1) for token in range(TOKENS))
        stats = Statistics(output_tokens=TOKENS)
        answers.append(
            RequestTiming("p", "", tuple(range(TOKENS)), "length", int(due * MS), chunks, stats)
        )
    return answers


def load_arm(
    name: str,
    rate: float,
    service_ms: float,
    *,
    count: int = 1000,
    failed: int = 0,
    limits_ms: dict[str, float] | None = None,
) -> BenchArm:
    answers = queued(rate, service_ms, count)
    groups = [answers[at : at + 32] for at in range(0, count, 32)]
    window_s = (answers[-1].chunks[-1][0] - answers[0].sent_ns) / 1e9
    good = sum(metrics.is_within(answer, limits_ms or {}) for answer in answers)
    share = Interval(good / (count + failed), *clopper_pearson(good, count + failed))
    return BenchArm(
        name=name,
        requests=count + failed,
        failed=failed,
        errors={"the queue is full": failed} if failed else {},
        output_tokens=TOKENS * count,
        window_s=window_s,
        tokens_per_s=TOKENS * count / window_s,
        requests_per_s=count / window_s,
        goodput=good / window_s,
        tokens_per_s_by_round=(),
        requests_per_s_by_round=(),
        goodput_by_round=(),
        latencies=metrics.latencies(groups),
        acceptance=metrics.acceptance(answers),
        lag_p50_ms=0.2,
        lag_p99_ms=0.9,
        lag_max_ms=1.4,
        goodput_share=share if limits_ms else None,
    )


def load_run(
    rate: float = 8.0, *, plain_ms: float = 140.0, speculative_ms: float = 70.0, **options: int
) -> LoadRun:
    """A found rate at which the plain arm cannot keep up and the other can."""
    limits = {"ttft": 400.0, "e2e": 600.0}
    arms = (
        load_arm("plain", rate, plain_ms, limits_ms=limits, **options),
        load_arm("speculative", rate, speculative_ms, limits_ms=limits, **options),
    )
    shares = {4.0: 1.0, 8.0: 0.98, 16.0: 0.02, 11.3: 0.41, 9.51: 0.88, 8.72: 0.93}
    probes = tuple(
        RateProbe(at, max(20, round(at * 15)), 0, share, share >= 0.975)
        for at, share in shares.items()
    )
    point = BenchPoint(None, rate, 4, arms, ())
    return LoadRun(rate, "poisson", 0.0, limits, 0.95, probes, 1000, 27, point)
