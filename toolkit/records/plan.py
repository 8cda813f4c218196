"""The results of `plan`: judgements, memory, predicted speed, and what will run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from toolkit.words import JudgementSeverity, KeyChangeStep, MemoryPlace, SpeedBound

__all__ = [
    "Judgement",
    "KeyChange",
    "MemoryItem",
    "Plan",
    "PlannedRun",
    "PredictedSpeed",
    "Prediction",
    "Serving",
    "StageMemory",
    "StageTime",
]


@dataclass(frozen=True, slots=True)
class Judgement:
    """What a rule of the plan says about a deployment. rule: id in toolkit.facts.rules. path: the
    YAML key that it is about.

    severity: refused (it cannot work; hint says what would) | warning (nobody vouches for it) |
    adjusted (it is changed in silence).
    """

    rule: str
    severity: JudgementSeverity
    path: str
    what: str
    hint: str | None = None


@dataclass(frozen=True, slots=True)
class MemoryItem:
    """One part of a memory peak, and how it was computed."""

    name: str
    num_bytes: int
    formula: str


@dataclass(frozen=True, slots=True)
class StageMemory:
    """The memory that a stage needs at its peak. place: `each GPU` or `the machine`.
    available_bytes None: not known.
    """

    stage: str
    place: MemoryPlace
    items: tuple[MemoryItem, ...]
    available_bytes: int | None

    @property
    def total_bytes(self) -> int:
        return sum(item.num_bytes for item in self.items)


@dataclass(frozen=True, slots=True)
class Serving:
    """The KV caches of a deployment. kv_bytes_per_token: of target and draft together, on each GPU.
    sequences: how many fit at once at max_seq_len. draft_share: the draft's share of the KV memory.
    """

    kv_bytes: int
    kv_bytes_per_token: int
    kv_tokens: int
    sequences: int
    draft_share: float


@dataclass(frozen=True, slots=True)
class PredictedSpeed:
    """The speed at one acceptance rate: tokens per target forward, output tokens/s of all requests
    together, and the speed-up over plain decoding.
    """

    acceptance_rate: float
    draft_len: int
    tokens_per_step: float
    tokens_per_s: float | None
    speedup: float


@dataclass(frozen=True, slots=True)
class Prediction:
    """An upper bound on speed from bandwidth and arithmetic. plain_tokens_per_s None: the device is
    not in the tables.

    cost_ratio: time of a draft forward over that of a target forward. break_even: the acceptance
    rate from which on drafting pays. assumed: the speed at an acceptance that somebody published
    for this way of drafting, which assumption names; None if there is none.
    """

    batch_size: int
    context_tokens: int
    bound: SpeedBound
    plain_tokens_per_s: float | None
    cost_ratio: float | None
    break_even: float | None
    speculative: tuple[PredictedSpeed, ...]
    assumed: PredictedSpeed | None = None
    assumption: str | None = None


@dataclass(frozen=True, slots=True)
class StageTime:
    """A rough estimate of a stage's time, and how it was computed. Expect an order of magnitude."""

    stage: str
    seconds: float
    formula: str


@dataclass(frozen=True, slots=True)
class PlannedRun:
    """Something that a stage will run: a command, word by word, or a call with its arguments.

    place: where it runs, in words. Names in capitals stand for values that are not known yet.
    """

    stage: str
    place: str
    command: tuple[str, ...] | None = None
    call: str | None = None
    arguments: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class KeyChange:
    """One thing that is different when a deployment goes to another kind of engine.

    path: the YAML key, or what else it is about. after None: it is gone.
    """

    step: KeyChangeStep
    path: str
    before: str
    after: str | None
    why: str


@dataclass(frozen=True, slots=True)
class Plan:
    """What is known about a deployment before anything runs. summary: what it is, in words. runs:
    in their order; empty if the deployment cannot work. changes: against the file that was named,
    if it is planned as another kind.
    """

    name: str
    possible: bool
    summary: dict[str, str]
    judgements: tuple[Judgement, ...]
    memory: tuple[StageMemory, ...]
    serving: Serving | None
    predictions: tuple[Prediction, ...]
    times: tuple[StageTime, ...]
    runs: tuple[PlannedRun, ...] = ()
    changes: tuple[KeyChange, ...] = ()
