"""The results of `tune`: acceptance, costs, the choice of drafter and draft length, and the grid of
precisions.
"""

from __future__ import annotations

from dataclasses import dataclass

from toolkit.records.measured import Interval
from toolkit.words import (
    AlphaRule,
    CostSource,
    DecodingMode,
    DeployedRule,
    Drafter,
    DraftVerdict,
    QuantAlgo,
    SpeculationKind,
    TextSource,
)

__all__ = [
    "Advice",
    "Alpha",
    "Candidate",
    "DraftCost",
    "Grid",
    "GridCell",
    "ScheduleStep",
    "SpeedupPrediction",
    "StepCost",
    "TargetQuality",
]


@dataclass(frozen=True, slots=True)
class Alpha:
    """Probability that the target accepts a draft token, averaged over output tokens, with a
    bootstrap interval over prompts. domain None: all texts. tokens: number of places that count.
    """

    rule: AlphaRule
    domain: str | None
    estimate: float
    low: float
    high: float
    tokens: int


@dataclass(frozen=True, slots=True)
class StepCost:
    """Milliseconds of one step for all requests of a batch: the lower quartile of the timed steps.
    draft_len 0: plain decoding. Of a server, samples counts waves of requests, and draft_ms is all
    that a step takes beyond a plain one.
    """

    batch: int
    draft_len: int
    draft_ms: float
    verify_ms: float
    host_ms: float
    samples: int


@dataclass(frozen=True, slots=True)
class SpeedupPrediction:
    """Speculative / plain tokens per second for one mode of decoding, batch size and draft length,
    with its bootstrap interval.

    speedup = formula * dependence * verification * host, where formula is Leviathan et al.'s (1 -
    a^(k+1)) / ((1 - a)(k c + 1)), dependence is the replayed tokens per step over the formula's,
    verification is what a forward of k + 1 tokens costs beyond a forward of 1, and host is the
    rest: the host's work, prefill, and blocks cut short at the end of a text. measured: from a real
    run, if there was one.
    """

    mode: DecodingMode
    batch: int
    draft_len: int
    acceptance_length: float
    tokens_per_s: float
    speedup: float
    low: float
    high: float
    formula: float
    dependence: float
    verification: float
    host: float
    measured: float | None = None
    measured_low: float | None = None
    measured_high: float | None = None


@dataclass(frozen=True, slots=True)
class Candidate:
    """One way to draft, as the advisor assessed it. by_place: conditional acceptance at each place
    of a block, mode -> rates.

    draft_len, speedup, low, high: the best for one request at a time, over all modes.
    break_even_length: the acceptance length at which speculation at draft_len neither gains nor
    loses. break_even_alpha: the alpha that gives this length.
    """

    name: str
    drafter: Drafter
    draft_len: int
    speedup: float
    low: float
    high: float
    acceptance_length: float
    acceptance_length_low: float
    acceptance_length_high: float
    break_even_length: float
    break_even_alpha: float | None
    alphas: tuple[Alpha, ...]
    by_place: dict[DecodingMode, tuple[float | None, ...]]
    costs: dict[DecodingMode, tuple[StepCost, ...]]
    predictions: tuple[SpeedupPrediction, ...]


@dataclass(frozen=True, slots=True)
class ScheduleStep:
    """From `batch` requests on, up to the next step of the schedule, draft_len tokens are drafted
    (0: none).
    """

    batch: int
    draft_len: int


@dataclass(frozen=True, slots=True)
class Advice:
    """What should be set, and why. candidates: the best first. costs_are: measured on the runtime
    here or on the server that serves, or predicted for a GPU that is not in this machine.

    decided False: the interval of the best candidate's speed-up contains 1, so the choice rests on
    the estimate alone. own: name of the deployment's own candidate, which need not be the best.

    schedule: draft lengths by batch size; they begin with max_draft_len at batch 1 and never grow.
    max_concurrency: the most concurrent requests at which speculation pays; None: it pays at every
    size tried.

    texts_are: the texts on which acceptance was measured. first_choices: if the target did not
    write them for this, the share of their tokens that are its first choice; greedy acceptance is
    exact if all are.
    """

    speculate: bool
    decided: bool
    own: str
    drafter: SpeculationKind
    draft: str | None  # name of the best candidate if it is a model
    max_draft_len: int  # 0: do not speculate
    schedule: tuple[ScheduleStep, ...]
    max_concurrency: int | None
    reason: str
    costs_are: CostSource
    temperature: float
    rule: DeployedRule
    prompts: int
    tokens: int
    confidence: float
    seconds: float
    candidates: tuple[Candidate, ...]
    texts_are: TextSource = "written by the target"
    first_choices: float | None = None


@dataclass(frozen=True, slots=True)
class TargetQuality:
    """One precision of the target compared with the unquantized target on held-out text: KL in
    nats per token, and perplexity.
    """

    quant_algo: QuantAlgo
    kl: Interval
    perplexity: Interval
    tokens: int


@dataclass(frozen=True, slots=True)
class GridCell:
    """One pair of precisions: greedy, one request at a time, at the best draft length of the
    pair.
    """

    target: str
    draft: str
    alpha: Interval
    draft_len: int
    acceptance_length: Interval
    tokens_per_s: Interval
    speedup: Interval  # over plain decoding with the same target
    best: bool


@dataclass(frozen=True, slots=True)
class DraftCost:
    """What quantizing the draft costs and saves under one target: the share of alpha lost, the
    share of a drafted token's time saved, and the speed over that with the unquantized draft.
    """

    target: str
    draft: str
    alpha_lost: float
    draft_time_saved: float
    speed: Interval
    verdict: DraftVerdict


@dataclass(frozen=True, slots=True)
class Grid:
    """Draft precision x target precision. The best cell is the fastest whose target stays within
    max_kl by its upper bound.

    costs_are: measured, or predicted for a named GPU. In the second case speeds and speed-ups are
    predicted too, and their intervals cover acceptance alone. left_out: pairs that the deployment
    cannot have, and why. targets includes the unquantized one even if it is left out. texts_are: as
    in Advice.
    """

    cells: tuple[GridCell, ...]
    targets: tuple[TargetQuality, ...]
    drafts: tuple[DraftCost, ...]
    costs_are: str
    left_out: tuple[str, ...]
    max_kl: float
    prompts: int
    confidence: float
    texts_are: TextSource = "written by the target"
