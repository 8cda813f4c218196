"""The report of a validated deployment."""

from __future__ import annotations

from dataclasses import dataclass

from toolkit.records.advice import Advice, Grid
from toolkit.records.bench import BenchPoint, Crossover
from toolkit.records.build import CompiledEngine, Quality, StageCost
from toolkit.records.judged import Agreement, Distribution, DraftCheck, Parity, Sampled, StopCheck
from toolkit.records.load import LoadRun
from toolkit.records.measured import (
    Acceptance,
    AcceptanceSlice,
    AcceptanceWindow,
    Arms,
    CounterCheck,
    Finding,
    Gate,
    Metric,
    Speedup,
)
from toolkit.records.plan import StageMemory
from toolkit.words import ReportedPlainArm, Verdict

__all__ = ["REPORT_SCHEMA_VERSION", "ValidationReport"]

# The version of report.json. Raise it when a key is added, removed or changes its meaning.
REPORT_SCHEMA_VERSION = 12


@dataclass(frozen=True, slots=True)
class ValidationReport:
    """The verdict and everything it rests on. docs/report.md explains the JSON.

    arms, speedup, acceptance and parity hold for temperature 0; sampled has the same for the YAML's
    temperature. loads: both arms at each number in validation.latency.concurrency, at temperature
    0. crossover: where speculation stops paying. load: both arms in an open loop, if
    validation.load is set. replaced: in a rehearsal, what stood in for what, in words; empty for a
    real deployment. memory: what the plan expected; `stages` has what was measured. advice and
    grid: from `tune`, during the build or later, if it used these engines.
    """

    schema_version: int
    name: str
    verdict: Verdict
    gates: tuple[Gate, ...]
    arms: Arms
    speedup: Speedup | None
    acceptance: Acceptance | None
    parity: Parity | None
    sampled: Sampled
    agreements: tuple[Agreement, ...]
    draft_check: DraftCheck | None
    stop_check: StopCheck | None
    distribution: Distribution | None
    quality: Quality
    counters: tuple[CounterCheck, ...]
    findings: tuple[Finding, ...]
    environment: dict[str, str]
    engines: dict[str, CompiledEngine]
    stages: tuple[StageCost, ...]
    definitions: dict[str, Metric]
    loads: tuple[BenchPoint, ...] = ()
    crossover: Crossover | None = None
    replaced: tuple[str, ...] = ()
    memory: tuple[StageMemory, ...] = ()
    advice: Advice | None = None
    grid: Grid | None = None
    # request: a parameter turns speculation off; restarts: a server without speculation takes turns
    plain_arm: ReportedPlainArm = "request"
    # of the greedy requests: by length of the prompt, by domain, and with and without a reused
    # prefix
    acceptance_slices: tuple[AcceptanceSlice, ...] = ()
    load: LoadRun | None = None
    acceptance_over_time: tuple[AcceptanceWindow, ...] = ()  # of the greedy requests
