"""The records that stages hand on: values and paths, no behaviour. One file, since together they are the contract.

Every record is frozen, is written as JSON beside what it describes, and is read back equal. `path` always points at the folder
that holds the content; it is not part of any digest. Digests are "sha256:<hex>" over content.
"""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

__all__ = [
    "REPORT_SCHEMA_VERSION",
    "Acceptance",
    "Advice",
    "Agreement",
    "Alpha",
    "Arm",
    "ArmParity",
    "Arms",
    "BenchArm",
    "BenchEndpoint",
    "BenchPoint",
    "BenchRequest",
    "BenchRun",
    "Candidate",
    "ComparedPoint",
    "Comparison",
    "CompiledEngine",
    "CounterCheck",
    "Crossover",
    "Definition",
    "Distribution",
    "DistributionTest",
    "Divergence",
    "DraftCheck",
    "DraftCost",
    "Finding",
    "Gate",
    "Grid",
    "GridCell",
    "Interval",
    "Judgement",
    "Latency",
    "LayerCounts",
    "LayerError",
    "LayerKl",
    "MarginBin",
    "MemoryItem",
    "PairProof",
    "Parity",
    "Plan",
    "PositionAcceptance",
    "PredictedSpeed",
    "Prediction",
    "Quality",
    "QuantizationQuality",
    "QuantizedCheckpoint",
    "Ratio",
    "Sampled",
    "ScheduleStep",
    "Serving",
    "Speedup",
    "SpeedupPrediction",
    "StageCost",
    "StageMemory",
    "StageTime",
    "StepCost",
    "StopCheck",
    "TargetQuality",
    "TensorRtLlmBuild",
    "TritonRepository",
    "TrtllmForm",
    "ValidationReport",
    "from_json",
    "to_json",
]

REPORT_SCHEMA_VERSION = 8  # of report.json: raised when a key comes, goes away or changes its meaning

R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was checked. severity: ok | note (to be known, nothing to be done) | warning | error."""

    check: str
    severity: str
    detail: str


@dataclass(frozen=True, slots=True)
class Judgement:
    """What a rule of the plan says of a deployment. rule: id in toolkit.facts.rules; path: the key of the YAML it is about.

    severity: refused (it cannot work; mend says what would) | warning (nobody vouches for it) | adjusted (changed in silence).
    """

    rule: str
    severity: str
    path: str
    what: str
    mend: str | None = None


@dataclass(frozen=True, slots=True)
class MemoryItem:
    """A part of a peak, and how it was computed."""

    name: str
    num_bytes: int
    formula: str


@dataclass(frozen=True, slots=True)
class StageMemory:
    """What a stage needs at its peak. place: `each GPU` or `the machine`; available_bytes None: not known."""

    stage: str
    place: str
    items: tuple[MemoryItem, ...]
    available_bytes: int | None

    @property
    def total_bytes(self) -> int:
        return sum(item.num_bytes for item in self.items)


@dataclass(frozen=True, slots=True)
class Serving:
    """The KV caches of a deployment. kv_bytes_per_token: of target and draft together, on each GPU; sequences: that fit at
    max_seq_len at once; draft_share: of the KV memory that is the draft's.
    """

    kv_bytes: int
    kv_bytes_per_token: int
    kv_tokens: int
    sequences: int
    draft_share: float


@dataclass(frozen=True, slots=True)
class PredictedSpeed:
    """At one acceptance rate: tokens per target forward, output tokens/s of all requests together, and over plain decoding."""

    acceptance_rate: float
    draft_len: int
    tokens_per_step: float
    tokens_per_s: float | None
    speedup: float


@dataclass(frozen=True, slots=True)
class Prediction:
    """An upper bound by bandwidth and arithmetic. plain_tokens_per_s None: the device is not in the tables.

    cost_ratio: time of a draft forward over that of a target forward. break_even: acceptance rate from which drafting pays.
    """

    batch_size: int
    context_tokens: int
    bound: str  # bandwidth | arithmetic
    plain_tokens_per_s: float | None
    cost_ratio: float | None
    break_even: float | None
    speculative: tuple[PredictedSpeed, ...]


@dataclass(frozen=True, slots=True)
class StageTime:
    """A rough estimate: an order of magnitude, and what it was made of."""

    stage: str
    seconds: float
    formula: str


@dataclass(frozen=True, slots=True)
class PlannedRun:
    """Something that a stage will run: a command, word by word, or a call with its arguments.

    place: where, for a reader. Names in capitals stand for what is not known yet.
    """

    stage: str
    place: str
    command: tuple[str, ...] | None = None
    call: str | None = None
    arguments: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """What is known of a deployment before anything runs. summary: what it is, in words. runs: in their order; none where it
    cannot work.
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


@dataclass(frozen=True, slots=True)
class PairProof:
    """Both checkpoints were read, and their tokenizers and vocabularies are the same by content.

    vocab_size: rows of embedding and LM head that both are built with; the sources' own are target_vocab_size and
    draft_vocab_size, and rows above vocab_size are padding.
    """

    target_digest: str  # content digest of the source checkpoint
    draft_digest: str | None
    tokenizer_digest: str
    vocab_size: int
    target_vocab_size: int
    draft_vocab_size: int | None
    findings: tuple[Finding, ...]


@dataclass(frozen=True, slots=True)
class LayerError:
    """Relative Frobenius error of one linear's output (quantized against source) on the held-out text."""

    layer: str
    relative_error: float


@dataclass(frozen=True, slots=True)
class LayerKl:
    """What one decoder layer alone costs: mean over tokens of KL(source || source with this layer quantized), in nats."""

    layer: str  # model.layers.N
    kl: float


@dataclass(frozen=True, slots=True)
class QuantizationQuality:
    """The quantized model against its source, teacher-forced on held-out text, measured before any export.

    kl_mean: mean over tokens of KL(source || quantized) in nats; kl_p99 its 99th percentile; top1_agreement the share of tokens
    with the same argmax; perplexities are exp of the mean negative log-likelihood of the text's own next tokens. layer_kl is
    over the first layer_kl_tokens of them.
    """

    tokens: int
    kl_mean: float
    kl_p99: float
    top1_agreement: float
    source_perplexity: float
    quantized_perplexity: float
    layers: tuple[LayerError, ...]
    layer_kl: tuple[LayerKl, ...]
    layer_kl_tokens: int


@dataclass(frozen=True, slots=True)
class TrtllmForm:
    """The same checkpoint as `trtllm-build` reads it: config.json and rank{N}.safetensors."""

    path: Path
    tp_size: int
    pp_size: int


@dataclass(frozen=True, slots=True)
class QuantizedCheckpoint:
    """A unified HF checkpoint with tokenizer files. quant_algo None: not quantized. trtllm None: that form was not made."""

    role: str  # target | draft
    path: Path
    quant_algo: str | None
    kv_cache_quant_algo: str | None
    architecture: str
    vocab_size: int
    weight_bytes: int
    quality: QuantizationQuality | None  # None: nothing was quantized here
    checks: tuple[Finding, ...]
    trtllm: TrtllmForm | None = None


@dataclass(frozen=True, slots=True)
class LayerCounts:
    """What TensorRT's own inspector says of a deserialized engine. fused: layers made of several; plugins: by name."""

    layers: int
    fused: int
    plugins: dict[str, int]
    precisions: dict[str, int]  # data type of a layer's first output -> layers; empty where the engine keeps names only


@dataclass(frozen=True, slots=True)
class TensorRtLlmBuild:
    """How an engine for TensorRT-LLM came about, and how much of that a GPU has seen.

    executed and not_executed say in words what ran on a GPU of this machine and what did not.
    """

    version: str  # that it is for
    builder: str  # local: PATH | container: IMAGE | none
    command: tuple[str, ...]  # empty without a build
    tp_size: int
    pp_size: int
    max_num_tokens: int | None
    checks: tuple[Finding, ...]
    executed: tuple[str, ...]
    not_executed: tuple[str, ...]
    layers: LayerCounts | None = None


@dataclass(frozen=True, slots=True)
class CompiledEngine:
    """An engine directory: config.json in TensorRT-LLM's shape, weights, and compiled packages where there are any.

    Of kind trtllm_pytorch: a checkpoint in Hugging Face form with `llm_args.json` beside it.
    """

    role: str
    path: Path
    kind: str  # torch | trt_engine | trtllm_pytorch
    mode: str  # compiled | eager | engine (trt_engine) | runtime (trtllm_pytorch)
    dtype: str
    device: str
    quant_algo: str | None
    kv_cache_quant_algo: str | None
    fp8_compute: str | None  # native | dequantized; None without FP8
    max_batch_size: int
    max_input_len: int
    max_seq_len: int
    max_draft_len: int
    vocab_size: int
    weight_bytes: int
    notes: tuple[str, ...]
    tensorrt_llm: TensorRtLlmBuild | None = None  # None: of kind torch


@dataclass(frozen=True, slots=True)
class TritonRepository:
    """A model repository that `tritonserver --model-repository PATH` loads as it is."""

    path: Path
    layout: str  # llmapi | bls
    model: str  # the model that clients call
    decoupled: bool
    max_draft_len: int


@dataclass(frozen=True, slots=True)
class Latency:
    """One latency of one arm, in milliseconds. A percentile that the number of samples cannot support is None, and
    `unsupported` says why under its name (p50 | p90 | p99).

    p90_low and p90_high: the bootstrap interval of p90 over prompts, and so for p50 and p99. curve: the quantiles 0, 1, ... 100
    percent, for plots. samples counts requests (ttft, tpot, e2e), chunks (icl) or tokens (itl, which is weighted by them).
    """

    samples: int
    mean: float | None
    p50: float | None
    p90: float | None
    p99: float | None
    p90_low: float | None
    p90_high: float | None
    unsupported: dict[str, str]
    curve: tuple[float, ...]
    p50_low: float | None = None
    p50_high: float | None = None
    p99_low: float | None = None
    p99_high: float | None = None


@dataclass(frozen=True, slots=True)
class Arm:
    """One arm (plain or speculative) at one temperature, one request at a time.

    tokens_per_s = output_tokens / request_time_s, both summed over the requests; tokens_per_s_by_prompt the same per prompt, in
    the prompts' order. latencies: ttft, tpot, itl, icl, e2e. distinct_4grams: distinct / all 4-grams of output tokens, averaged
    over requests with at least four tokens; texts that loop score low, and flatter speculation.
    """

    requests: int
    output_tokens: int
    request_time_s: float
    tokens_per_s: float
    tokens_per_s_by_prompt: tuple[float, ...]
    latencies: dict[str, Latency]
    distinct_4grams: float | None
    finish_reasons: dict[str, int]


@dataclass(frozen=True, slots=True)
class Arms:
    """The same deployment without and with speculation. speculative None: the deployment does not speculate."""

    plain: Arm
    speculative: Arm | None


@dataclass(frozen=True, slots=True)
class Ratio:
    """A figure of one arm divided by that of another, with its bootstrap interval. estimate None: `reason` says why not."""

    name: str  # ttft_p50, speed, ...
    estimate: float | None
    low: float | None
    high: float | None
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class Speedup:
    """Speculative / plain output tokens per second, with a bootstrap interval over prompts and rounds.

    latencies: the same for every percentile of every latency; there, above 1 is slower.
    """

    estimate: float
    low: float
    high: float
    confidence: float
    prompts: int
    rounds: int
    latencies: tuple[Ratio, ...] = ()


@dataclass(frozen=True, slots=True)
class PositionAcceptance:
    """Position i (from 0) of a draft. joint = accepted / drafted; conditional = joint / joint of the position before it."""

    drafted: int
    accepted: int
    joint: float | None
    conditional: float | None


@dataclass(frozen=True, slots=True)
class Acceptance:
    """rate = accepted / drafted; length = 1 + accepted / verify_steps, the bonus token included. None: nothing was drafted.

    alpha: drafts kept / drafts looked at, those behind a rejection left out, with an interval over prompts; None where the
    server does not count by position.
    """

    rate: float | None
    length: float | None
    drafted: int
    accepted: int
    verify_steps: int
    by_position: tuple[PositionAcceptance, ...]
    alpha: Interval | None = None


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first output position at which a text differs from the plain one, judged by the reference's own logits there.

    arm: verify (the speculative path that keeps nothing) | speculative, with its draft length. kind: equivalent (rounding
    explains it), suspicious (more than rounding, and still between the reference's two best), broken (anything else),
    unexplained (nothing could be asked). A token of None is the end of the text. margin: top-1 minus top-2 of the
    reference's scores, in logits; a gap is top-1 minus the score of the token that was chosen, a rank its place (0 is the
    best). Scores are logits at temperature 0, and logits + temperature * Gumbel noise in the seeded check, so both are in
    logits. replay: the file beside the report with which `toolkit validate --replay` asks again.

    judged_by: reference | log_probs, None where no model was needed or none could be asked. By the served log-probabilities
    each arm's are the other's reference: margin is that of the plain arm, a gap how far a token lies below the other arm's
    choice (at least, with a rank of 2), all None where the server tells of chosen tokens alone. change: the least change of
    log-probabilities between the arms (nats) that allows both choices; drift: the largest on the tokens before.
    """

    prompt_index: int
    prompt: str
    arm: str
    draft_len: int
    position: int
    kind: str
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
    judged_by: str | None = None
    change: float | None = None
    drift: float | None = None


@dataclass(frozen=True, slots=True)
class ArmParity:
    """One arm against plain decoding, prompt by prompt. draft_len: what it asked for."""

    arm: str  # verify | speculative
    draft_len: int
    identical: int
    equivalent: int
    suspicious: int
    broken: int
    unexplained: int


@dataclass(frozen=True, slots=True)
class MarginBin:
    """Places where the reference's margin (top-1 minus top-2) lies in [low, high) logits; high None: no end. differing: of
    them.
    """

    low: float
    high: float | None
    count: int
    differing: int


@dataclass(frozen=True, slots=True)
class Parity:
    """Every arm against plain decoding. A prompt counts once, by its worst class over all arms.

    rate = prompts that diverge / prompts, with exact one-sided bounds. same_place: prompts that diverge at one and the same
    position at every draft length; moved: at several draft lengths, not all at one position. arms_equal: prompts on which the
    verify arm and all draft lengths say the same, whatever the plain arm says. severity: divergences by margin.
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
    """The plain greedy text against a reference model, teacher-forced: is each token the one that the reference would choose?

    against: engine (the same engine outside the server: judges the serving path) | source (the unquantized checkpoint in
    float32 through transformers: judges quantization). kind: the worst token's class, as of a Divergence, with the same
    margin; None against another precision, where only the rates mean something. rate = agreeing / tokens, its interval a
    bootstrap over prompts. first_tokens: how many prompts' first output token (from prefill) differs beyond rounding.
    largest_gap: top-1 minus the chosen token's logit. margins: all tokens by the reference's margin.
    """

    against: str
    prompts: int
    tokens: int
    agreeing: int
    rate: float
    rate_low: float
    rate_high: float
    confidence: float
    kind: str | None
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
    """The first draft token of every verify step, greedy, beside what the draft engine proposes teacher-forced at that place.

    after_full: steps that follow one whose drafts were all kept, where a draft cache has to catch up; earlier: steps of a text
    before any such, which a missing catch-up cannot harm. Steps later than that are left out, as they tell neither from the
    other. expected: the draft's own choice is the token that came; kept: the server kept it. A draft whose cache is damaged
    changes no text, only this.
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
    """Requests with a stop word taken from their own plain text. wrong: their text did not end before it."""

    requests: int
    wrong: int
    detail: str | None


@dataclass(frozen=True, slots=True)
class DistributionTest:
    """One test of what was drawn, with its negative control. adjusted: the p-value adjusted for all tests (Holm).

    lean: standard deviations towards the beginning of the test's order (the likely tokens, or the draft's); None: it has none.
    detectable: the total variation that so many samples show with the stated power; None: not known. control_effect: what the
    control was tilted by (a total variation of the test's bins; of the continuations, the share of texts replaced by one);
    control_p_value None: no tilt of that size is possible, the model is too certain of its tokens.
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

    false_alarm: the chance that any of the tests rejects a sound endpoint. enough: as many tokens were drawn as `effect` and
    `power` ask for. outside_filters: tokens that top-k or top-p rule out. unrepeated: of `seeded` requests that were sent
    twice.
    """

    temperature: float
    rule: str
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
    """What the report holds at temperature 0, at the YAML's temperature. parity: seeded requests under `coupled`."""

    temperature: float
    rule: str  # the acceptance rule of requests without a seed, which the latencies are measured with
    arms: Arms
    speedup: Speedup | None
    acceptance: Acceptance | None
    parity: Parity | None


@dataclass(frozen=True, slots=True)
class Gate:
    """One gate. outcome: PASS | FAIL | INCONCLUSIVE, or NOT JUDGED: speed and quality of a rehearsal, and `draft` where no
    text tells its steps.

    detail: the reason in words; next_step: what to do unless it passed.
    """

    name: str
    outcome: str
    measured: float | None
    limit: float | None
    detail: str
    next_step: str | None = None


@dataclass(frozen=True, slots=True)
class CounterCheck:
    """A server counter, differenced over the measured window, beside what the client added up itself."""

    name: str
    client: int
    server: int | None
    matches: bool


@dataclass(frozen=True, slots=True)
class Quality:
    """What quantization cost. None: that model was not quantized here, or there is no draft."""

    target: QuantizationQuality | None
    draft: QuantizationQuality | None


@dataclass(frozen=True, slots=True)
class StageCost:
    """What one stage took, from its manifest. reused: taken from the store in this build; the figures are of when it ran."""

    stage: str
    seconds: float
    peak_memory_bytes: int | None
    reused: bool


@dataclass(frozen=True, slots=True)
class Definition:
    """What a number in the report means."""

    formula: str
    numerator: str
    denominator: str
    note: str = ""


@dataclass(frozen=True, slots=True)
class BenchRequest:
    """One request of a bench, kept so that a saved run can be judged again. Times are ns after the run's start.

    prompt: 16 hex digits of the sent text's sha256. chunks: (arrival, new tokens) as in `RequestTiming`. error: why it failed.
    """

    point: int
    arm: str
    round: int
    index: int
    prompt: str
    due_ns: int | None
    sent_ns: int
    ended_ns: int
    chunks: tuple[tuple[int, int | None], ...]
    input_tokens: int | None
    output_tokens: int | None
    drafted: int | None
    accepted: int | None
    verify_steps: int | None
    finish_reason: str | None
    error: str | None


@dataclass(frozen=True, slots=True)
class BenchArm:
    """One arm at one load. tokens_per_s and requests_per_s are of the window, so of all requests together; goodput likewise.

    window_s: from the first request sent (or due) to the last one's end, summed over blocks of requests. *_by_round: the same
    figure of each round, from which its interval comes. output_tokens None: the server counted none. errors: text -> requests.
    lag_*: how late sends were behind an open loop's schedule.
    """

    name: str
    requests: int
    failed: int
    errors: dict[str, int]
    output_tokens: int | None
    window_s: float
    tokens_per_s: float | None
    requests_per_s: float
    goodput: float | None
    tokens_per_s_by_round: tuple[float, ...]
    requests_per_s_by_round: tuple[float, ...]
    goodput_by_round: tuple[float, ...]
    latencies: dict[str, Latency]
    acceptance: Acceptance
    lag_p50_ms: float | None
    lag_p99_ms: float | None
    lag_max_ms: float | None


@dataclass(frozen=True, slots=True)
class BenchPoint:
    """One load: so many requests at a time, or so many per second. ratios: the last arm's figures over the first arm's."""

    concurrency: int | None
    rate: float | None
    rounds: int
    arms: tuple[BenchArm, ...]
    ratios: tuple[Ratio, ...]


@dataclass(frozen=True, slots=True)
class Crossover:
    """Where the speed-up falls below 1. pays_up_to: the highest concurrency shown to pay, stops_at: the lowest one
    shown not to; between them nothing is shown. estimate: where the measured ratios cross 1, in between.
    """

    pays_up_to: int | None
    stops_at: int | None
    estimate: float | None
    detail: str


@dataclass(frozen=True, slots=True)
class BenchEndpoint:
    """Where an arm's requests went."""

    arm: str
    address: str
    protocol: str
    model: str


@dataclass(frozen=True, slots=True)
class BenchRun:
    """A saved run of `toolkit bench`. settings: what was asked for. docs/benchmarking.md explains it."""

    schema_version: int
    created: str
    verdict: str  # PASS | FAIL | INCONCLUSIVE
    gates: tuple[Gate, ...]
    endpoints: tuple[BenchEndpoint, ...]
    settings: dict[str, str]
    points: tuple[BenchPoint, ...]
    crossover: Crossover | None
    counters: tuple[CounterCheck, ...]
    findings: tuple[Finding, ...]
    environment: dict[str, str]
    definitions: dict[str, Definition]
    requests: tuple[BenchRequest, ...]


@dataclass(frozen=True, slots=True)
class ComparedPoint:
    """The same load in two saved runs. ratios: B's figures over A's. paired: both sent the same prompts."""

    concurrency: int | None
    rate: float | None
    arm: str
    paired: bool
    prompts: int
    ratios: tuple[Ratio, ...]


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two saved runs judged: is B slower than A by more than `tolerance` (a share)?"""

    verdict: str
    gates: tuple[Gate, ...]
    tolerance: float
    points: tuple[ComparedPoint, ...]
    findings: tuple[Finding, ...]


@dataclass(frozen=True, slots=True)
class Alpha:
    """Probability that a draft token is kept where the target stands before one, averaged over output tokens, with a bootstrap
    interval over prompts. domain None: all texts. tokens: places that were looked at.
    """

    rule: str  # greedy | rejection | coupled | sample_match | sample_match_greedy_draft
    domain: str | None
    estimate: float
    low: float
    high: float
    tokens: int


@dataclass(frozen=True, slots=True)
class StepCost:
    """Milliseconds of one step for all requests of a batch, the lower quartile of those timed. draft_len 0: plain decoding."""

    batch: int
    draft_len: int
    draft_ms: float
    verify_ms: float
    host_ms: float
    samples: int


@dataclass(frozen=True, slots=True)
class SpeedupPrediction:
    """Speculative / plain tokens per second for one mode of decoding, batch size and draft length, with its bootstrap interval.

    speedup = formula * dependence * verification * host, where formula is Leviathan et al.'s (1 - a^(k+1)) / ((1 - a)(k c +
    1)), dependence the replayed tokens per step over the formula's, verification what a forward of k + 1 tokens costs beyond
    one of 1, host the rest: the host's work, prefill, and blocks cut short at the end of a text. measured: where it was run as
    well.
    """

    mode: str  # greedy | sampled
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
    """One way to draft, as the advisor found it. by_place: conditional acceptance at each place of a block, mode -> rates.

    draft_len, speedup, low, high: the best for one request at a time, over all modes; break_even_length is what
    acceptance_length would have to be there for speculation to cost nothing, break_even_alpha the alpha that gives it.
    """

    name: str
    drafter: str  # draft_target | ngram
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
    by_place: dict[str, tuple[float | None, ...]]
    costs: dict[str, tuple[StepCost, ...]]
    predictions: tuple[SpeedupPrediction, ...]


@dataclass(frozen=True, slots=True)
class ScheduleStep:
    """From `batch` requests on, up to the next step of the schedule, draft_len tokens are drafted; 0: none."""

    batch: int
    draft_len: int


@dataclass(frozen=True, slots=True)
class Advice:
    """What should be set, and why. candidates: the best first. costs_are: measured, or predicted for a GPU that is not here.

    decided False: the interval of the best candidate's speed-up holds 1, and what is set follows the estimate. own: name of the
    deployment's own candidate, which need not be the best.

    schedule: draft lengths by batch size, never growing, beginning at 1 with max_draft_len. max_concurrency: the most requests
    at once with which speculation was seen to pay; None: it pays at every size tried.
    """

    speculate: bool
    decided: bool
    own: str
    drafter: str  # draft_target | ngram | none
    draft: str | None  # name of the best candidate where it is a model
    max_draft_len: int  # 0: do not speculate
    schedule: tuple[ScheduleStep, ...]
    max_concurrency: int | None
    reason: str
    costs_are: str
    temperature: float
    rule: str
    prompts: int
    tokens: int
    confidence: float
    seconds: float
    candidates: tuple[Candidate, ...]


@dataclass(frozen=True, slots=True)
class Interval:
    """An estimate with its bootstrap interval."""

    estimate: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class TargetQuality:
    """One precision of the target against the unquantized one, on held-out text: KL in nats per token, perplexity."""

    quant_algo: str
    kl: Interval
    perplexity: Interval
    tokens: int


@dataclass(frozen=True, slots=True)
class GridCell:
    """One pair of precisions: greedy, one request at a time, at the best draft length of the pair."""

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
    """What quantizing the draft does, under one target: shares of alpha lost and of a drafted token's time saved, and the
    speed against the unquantized draft's.
    """

    target: str
    draft: str
    alpha_lost: float
    draft_time_saved: float
    speed: Interval
    verdict: str  # pays | costs more than it saves | makes no difference seen


@dataclass(frozen=True, slots=True)
class Grid:
    """Draft precision x target precision. The best cell is the fastest whose target keeps max_kl by its upper bound.

    costs_are: measured, or predicted for a GPU by name: so are then speeds and speed-ups, and their intervals are of acceptance
    alone. left_out: pairs that the deployment cannot have, and why. targets has the unquantized one even where it is left out.
    """

    cells: tuple[GridCell, ...]
    targets: tuple[TargetQuality, ...]
    drafts: tuple[DraftCost, ...]
    costs_are: str
    left_out: tuple[str, ...]
    max_kl: float
    prompts: int
    confidence: float


@dataclass(frozen=True, slots=True)
class ValidationReport:
    """The verdict and everything it rests on. docs/report.md explains the JSON.

    arms, speedup, acceptance and parity are at temperature 0; sampled has the same at the YAML's temperature. loads: both arms
    at each of validation.latency.concurrency, at temperature 0; crossover: where speculation stops paying. replaced: of a
    rehearsal, in words, what stood in for what; empty for a real deployment. memory: the plan's, beside which `stages` hold
    what was measured. advice: of `tune`, in the build or since, if it looked at these engines; grid: likewise.
    """

    schema_version: int
    name: str
    verdict: str  # PASS | FAIL | INCONCLUSIVE
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
    definitions: dict[str, Definition]
    loads: tuple[BenchPoint, ...] = ()
    crossover: Crossover | None = None
    replaced: tuple[str, ...] = ()
    memory: tuple[StageMemory, ...] = ()
    advice: Advice | None = None
    grid: Grid | None = None
    plain_arm: str = "request"  # a request's parameter, or "restarts": a server without speculation, in turns with the other


def to_json(record: object) -> Any:
    """A record as plain JSON values; paths become strings, tuples lists."""
    if dataclasses.is_dataclass(record) and not isinstance(record, type):
        return {f.name: to_json(getattr(record, f.name)) for f in dataclasses.fields(record)}
    if isinstance(record, Path):
        return str(record)
    if isinstance(record, (list, tuple)):
        return [to_json(item) for item in record]
    if isinstance(record, dict):
        return {str(key): to_json(value) for key, value in record.items()}
    return record


def from_json(kind: type[R], data: Any) -> R:
    """The inverse of to_json, driven by the field annotations. ValueError: what to_json would not have written."""
    return typing.cast(R, _decode(kind, data))


LEAVES: dict[Any, tuple[tuple[type, ...], str]] = {
    int: ((int,), "a whole number"),
    float: ((int, float), "a finite number"),
    str: ((str,), "text"),
    Path: ((str,), "text"),
    bool: ((bool,), "true or false"),
}


def _decode(kind: Any, data: Any) -> Any:
    origin = typing.get_origin(kind)
    arguments = typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        if data is None and type(None) in arguments:
            return None
        present = [argument for argument in arguments if argument is not type(None)]
        return _decode(present[0], data)
    if origin is tuple:
        items = _of(list, "a list", data)
        if len(arguments) == 2 and arguments[1] is Ellipsis:
            return tuple(_decode(arguments[0], item) for item in items)
        return tuple(_decode(argument, item) for argument, item in zip(arguments, items, strict=True))
    if origin is dict:
        return {key: _decode(arguments[1], value) for key, value in _of(dict, "an object", data).items()}
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        return _decode_record(kind, _of(dict, "an object", data))
    if kind in LEAVES:
        types_, what = LEAVES[kind]
        if isinstance(data, bool) and kind is not bool:
            raise ValueError(f"{str(data).lower()} is not {what}")
        value = _of(types_, what, data)
        if kind is float and not math.isfinite(value):
            raise ValueError(f"{value} is not {what}")
        return kind(value)
    return data


def _decode_record(kind: type, data: dict[str, Any]) -> Any:
    hints = typing.get_type_hints(kind)
    unknown = set(data) - set(hints)
    missing = {f.name for f in dataclasses.fields(kind) if f.default is dataclasses.MISSING} - set(data)
    if unknown or missing:
        raise ValueError(f"{kind.__name__}: unknown fields {sorted(unknown)}, missing fields {sorted(missing)}")
    values = {}
    for name, value in data.items():
        try:
            values[name] = _decode(hints[name], value)
        except (ValueError, OverflowError) as error:
            raise ValueError(f"{name}: {error}") from error
    return kind(**values)


def _of(types_: Any, what: str, data: Any) -> Any:
    if not isinstance(data, types_):
        raise ValueError(f"{data!r:.60} is not {what}")
    return data
