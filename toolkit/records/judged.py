"""What validation finds about correctness: parity, agreement, distributions, stop words."""

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

    arm: verify (the speculative path that accepts nothing) | speculative, with its draft length.
    kind: equivalent (rounding explains it), suspicious (more than rounding, but still between the
    reference's two best), broken (anything else), unexplained (no model could be asked). A token of
    None is the end of the text. margin: top-1 minus top-2 of the reference's scores, in logits. A
    gap is top-1 minus the score of the chosen token; a rank is its place (0 is the best). Scores
    are logits at temperature 0, and logits + temperature * Gumbel noise in the seeded check, so
    both are in logits. replay: the file beside the report for `toolkit validate --replay`.

    judged_by: reference | log_probs; None if no model was needed or none could be asked. With
    log_probs each arm is the other's reference: margin is that of the plain arm, and a gap is how
    far a token lies below the other arm's choice (at least, if its rank is 2). All are None if the
    server reports chosen tokens only. change: the least change of log-probabilities between the
    arms (nats) that allows both choices. drift: the largest change on the tokens before.
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
    """One arm compared with plain decoding: prompts by kind. draft_len: that its requests state."""

    arm: ParityArm
    draft_len: int
    identical: int
    equivalent: int
    suspicious: int
    broken: int
    unexplained: int


@dataclass(frozen=True, slots=True)
class MarginBin:
    """Places where the reference's margin (top-1 minus top-2) lies in [low, high) logits. high
    None: no upper end. differing: how many of them differ.
    """

    low: float
    high: float | None
    count: int
    differing: int


@dataclass(frozen=True, slots=True)
class Parity:
    """Every arm compared with plain decoding. A prompt counts once, by its worst kind over all
    arms.

    rate = prompts that diverge / prompts, with exact one-sided bounds. same_place: prompts that
    diverge at the same position at every draft length. moved: prompts that diverge at several draft
    lengths, but not at the same position. arms_equal: prompts for which the verify arm and all
    draft lengths give the same text, whatever the plain arm gives. severity: divergences by margin.
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
    token's kind, as in Divergence, with the same margin; None against another precision, where only
    the rates mean something. rate = agreeing / tokens, with a bootstrap interval over prompts.
    first_tokens: prompts whose first output token (from prefill) differs beyond rounding.
    largest_gap: the largest top-1 minus the chosen token's logit. margins: all tokens by the
    reference's margin.
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
    """The first draft token of every greedy verify step, compared with what the draft engine
    proposes teacher-forced at that place.

    after_full: steps after a fully accepted block, where the draft's cache has to catch up.
    earlier: steps before the first such block of a text, which a missing catch-up cannot harm. All
    later steps are left out, since they cannot tell one cause from the other. expected: the draft's
    own choice is the token that followed. kept: the server accepted a draft token there. A damaged
    draft cache changes no text, only these counts. hidden_texts: left out, since a chunk of theirs
    holds several steps.
    """

    draft_len: int
    after_full: int
    after_full_expected: int
    after_full_kept: int
    earlier: int
    earlier_expected: int
    earlier_kept: int
    hidden_texts: int = 0


@dataclass(frozen=True, slots=True)
class StopCheck:
    """Requests with a stop word taken from their own plain text. wrong: requests whose text did not
    end before it.
    """

    requests: int
    wrong: int
    detail: str | None


@dataclass(frozen=True, slots=True)
class DistributionTest:
    """One test of the drawn tokens, with its negative control. adjusted: the p-value adjusted for
    all tests (Holm).

    lean: standard deviations towards the beginning of the test's order (the likely tokens, or the
    draft's); None: the test has no order. detectable: the total variation that this many samples
    show with the stated power; None: not known. control_effect: how much the control was tilted (a
    total variation of the test's bins; for continuations, the share of texts replaced by the same
    text). control_p_value None: no tilt of that size is possible, since the model is too certain of
    its tokens.
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
    were drawn as `effect` and `power` require. outside_filters: tokens that top-k or top-p rule
    out. seeded: requests that were sent twice; unrepeated: those of them whose texts differ.
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
    """What the report holds for temperature 0, here for the YAML's temperature. parity: of seeded
    requests under `coupled`.
    """

    temperature: float
    rule: SamplingRule  # of requests without a seed, such as those that are timed
    arms: Arms
    speedup: Speedup | None
    acceptance: Acceptance | None
    parity: Parity | None
