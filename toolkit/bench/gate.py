"""Make gates. Everything that a gate means is in its fields; its name only repeats them."""

from __future__ import annotations

from toolkit.bench.definitions import METRICS
from toolkit.records.measured import Better, Direction, Gate, Scope, Unit
from toolkit.words import GateOutcome

__all__ = ["gate_name", "load_name", "make_gate"]

DIRECTIONS: dict[Better, Direction] = {"higher": "at_least", "lower": "at_most"}
# metric -> the name that users write and read, if it is not the metric's own.
NAMES = {
    "throughput": "tokens_per_s",
    "draft_check": "draft",
    "kl_mean": "quality_kl",
    "top1_agreement": "quality_top1",
}


def make_gate(
    metric: str,
    scope: Scope,
    outcome: GateOutcome,
    measured: float | None,
    limit: float | None,
    detail: str,
    next_step: str | None = None,
    *,
    direction: Direction | None = None,
) -> Gate:
    """Make a gate. The table of metrics gives the unit, and the direction if none is given."""
    unit: Unit = METRICS[metric].unit if scope.over is None else "x"
    return Gate(
        name=gate_name(metric, scope),
        metric=metric,
        scope=scope,
        unit=unit,
        direction=direction or DIRECTIONS[METRICS[metric].better],
        outcome=outcome,
        measured=measured,
        limit=limit,
        detail=detail,
        next_step=next_step,
    )


def gate_name(metric: str, scope: Scope) -> str:
    """The name in report.json and on the command line: ttft_p90, speedup_sampled, errors@4,
    e2e_p99@2.5/s.
    """
    name = NAMES.get(metric, metric)
    if scope.reference is not None:
        name = f"agreement_{scope.reference}"
    if scope.percentile is not None:
        name += f"_p{scope.percentile}"
        name += "_ratio" if scope.over in ("plain", "first_arm") else ""
    if scope.temperature and metric != "seeded_parity":  # this metric is always sampled
        name += "_sampled"
    if scope.arm is not None:
        return f"{name} {scope.arm}@{load_name(scope.concurrency, scope.rate)}"
    if scope.concurrency is None and scope.rate is None:
        return name
    return f"{name}@{load_name(scope.concurrency, scope.rate)}"


def load_name(concurrency: int | None, rate: float | None) -> str:
    """The name of a load in a comparison: `4`, `2.5/s` or `trace`."""
    if concurrency is not None:
        return str(concurrency)
    return "trace" if rate is None else f"{rate:g}/s"
