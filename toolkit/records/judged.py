"""What validation finds out about correctness: parity, agreement, distributions, stop words."""

from __future__ import annotations

from dataclasses import dataclass

from toolkit.records.measured import Acceptance, Arms, Speedup
from toolkit.words import (
    AgreementSource,
    DivergenceJudge,
    DivergenceKind,
    ParityArm,
    ParityKind,
    SamplingRule,
)

__all__ = [
    "Agreement",
    "ArmParity",
    "Distribution",
    "DistributionTest",
    "Divergence",
    "DraftCheck",
    "MarginBin",
    "Parity",
    "Sampled",
    "StopCheck",
]


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first output position at which a text differs from the plain one, judged by the
    reference's own logits there.

    arm: verify (the speculative path that keeps nothing) | speculative, with its draft length.
    kind: equivalent (rounding explains it), suspicious (more than rounding, and still between the
    reference's two best), broken (anything else), unexplained (nothing could be asked). A token of
    None is the end of the text. margin: top-1 minus top-2 of the reference's scores, in logits; a
    gap is top-1 minus the score of the token that was chosen, a rank its place (0 is the best).
    Scores are logits at temperature 0, and logits + temperature * Gumbel noise in the seeded check,
    so both are in logits. replay: the file beside the report with which `toolkit validate --replay`
    asks again.

    judged_by: reference | log_probs, None where no model was needed or none could be asked. By the
    served log-probabilities each arm's are the other's reference: margin is that of the plain arm,
    a gap how far a token lies below the other arm's choice (at least, with a rank of 2), all None
    where the server tells of chosen tokens alone. change: the least change of log-probabilities
    between the arms (nats) that allows both choices; drift: the largest on the tokens before.
    """

    prompt_index: int
    prompt: str
    arm: ParityArm
    draft_len: int
    position: int
    kind: DivergenceKind
    plain_token: int | None
    speculative_token: int | None
    margin: float | None
    plain_rank: int | None
    speculative_rank: int | None
    plain_gap: float | None
    speculative_gap: float | None
    seed: int | None
    detail: str
    replay: str | None = None
    judged_by: DivergenceJudge | None = None
    change: float | None = None
    drift: float | None = None


@dataclass(frozen=True, slots=True)
class ArmParity:
    """One arm against plain decoding, prompt by prompt. draft_len: what it asked for."""

    arm: ParityArm
    draft_len: int
    identical: int
    equivalent: int
    suspicious: int
    broken: int
    unexplained: int


@dataclass(frozen=True, slots=True)
class MarginBin:
    """Places where the reference's margin (top-1 minus top-2) lies in [low, high) logits; high
    None: no end. differing: of them.
    """

    low: float
    high: float | None
    count: int
    differing: int


@dataclass(frozen=True, slots=True)
class Parity:
    """Every arm against plain decoding. A prompt counts once, by its worst class over all arms.

    rate = prompts that diverge / prompts, with exact one-sided bounds. same_place: prompts that
    diverge at one and the same position at every draft length; moved: at several draft lengths, not
    all at one position. arms_equal: prompts on which the verify arm and all draft lengths say the
    same, whatever the plain arm says. severity: divergences by margin.
    """

    prompts: int
    identical: int
    equivalent: int
    suspicious: int
    broken: int
    unexplained: int
    rate: float
    rate_low: float
    rate_high: float
    confidence: float
    compared_tokens: int
    near_tie_margin: float  # logits
    arms: tuple[ArmParity, ...]
    arms_equal: int
    same_place: int
    moved: int
    severity: tuple[MarginBin, ...]
    divergences: tuple[Divergence, ...]


@dataclass(frozen=True, slots=True)
class Agreement:
    """The plain greedy text against a reference model, teacher-forced: is each token the one that
    the reference would choose?

    against: engine (the same engine outside the server: judges the serving path) | source (the
    unquantized checkpoint in float32 through transformers: judges quantization). kind: the worst
    token's class, as of a Divergence, with the same margin; None against another precision, where
    only the rates mean something. rate = agreeing / tokens, its interval a bootstrap over prompts.
    first_tokens: how many prompts' first output token (from prefill) differs beyond rounding.
    largest_gap: top-1 minus the chosen token's logit. margins: all tokens by the reference's
    margin.
    """

    against: AgreementSource
    prompts: int
    tokens: int
    agreeing: int
    rate: float
    rate_low: float
    rate_high: float
    confidence: float
    kind: ParityKind | None
    beyond_rounding: int
    first_tokens: int
    largest_gap: float
    margins: tuple[MarginBin, ...]
    decided_margin: float | None
    decided: int
    decided_differing: int
    detail: str


@dataclass(frozen=True, slots=True)
class DraftCheck:
    """The first draft token of every verify step, greedy, beside what the draft engine proposes
    teacher-forced at that place.

    after_full: steps that follow one whose drafts were all kept, where a draft cache has to catch
    up; earlier: steps of a text before any such, which a missing catch-up cannot harm. Steps later
    than that are left out, as they tell neither from the other. expected: the draft's own choice is
    the token that came; kept: the server kept it. A draft whose cache is damaged changes no text,
    only this.
    """

    draft_len: int
    after_full: int
    after_full_expected: int
    after_full_kept: int
    earlier: int
    earlier_expected: int
    earlier_kept: int


@dataclass(frozen=True, slots=True)
class StopCheck:
    """Requests with a stop word taken from their own plain text. wrong: their text did not end
    before it.
    """

    requests: int
    wrong: int
    detail: str | None


@dataclass(frozen=True, slots=True)
class DistributionTest:
    """One test of what was drawn, with its negative control. adjusted: the p-value adjusted for all
    tests (Holm).

    lean: standard deviations towards the beginning of the test's order (the likely tokens, or the
    draft's); None: it has none. detectable: the total variation that so many samples show with the
    stated power; None: not known. control_effect: what the control was tilted by (a total variation
    of the test's bins; of the continuations, the share of texts replaced by one); control_p_value
    None: no tilt of that size is possible, the model is too certain of its tokens.
    """

    name: str
    samples: int  # tokens, or texts
    statistic: float
    p_value: float
    adjusted: float
    rejected: bool
    lean: float | None
    detectable: float | None
    control_effect: float
    control_p_value: float | None
    control_rejected: bool


@dataclass(frozen=True, slots=True)
class Distribution:
    """Whether the endpoint's tokens at temperature > 0 come from the target's distribution.

    false_alarm: the chance that any of the tests rejects a sound endpoint. enough: as many tokens
    were drawn as `effect` and `power` ask for. outside_filters: tokens that top-k or top-p rule
    out. unrepeated: of `seeded` requests that were sent twice.
    """

    temperature: float
    rule: SamplingRule
    requests: int
    tokens: int
    false_alarm: float
    power: float
    effect: float
    enough: bool
    tests: tuple[DistributionTest, ...]
    outside_filters: int
    seeded: int
    unrepeated: int
    seeds_matter: bool
    seconds: float


@dataclass(frozen=True, slots=True)
class Sampled:
    """What the report holds at temperature 0, at the YAML's temperature. parity: seeded requests
    under `coupled`.
    """

    temperature: float
    rule: SamplingRule  # of requests without a seed, which the latencies are measured with
    arms: Arms
    speedup: Speedup | None
    acceptance: Acceptance | None
    parity: Parity | None
