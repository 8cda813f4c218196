"""Thresholds with three outcomes. An interval that straddles its limit is INCONCLUSIVE, and that is
not PASS.

Pure: figures and limits in, gates out. Each says in words why, and unless it passed, what to do
next.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial

from toolkit.bench.definitions import LATENCIES, LATENCY_PERCENTILES, METRICS
from toolkit.bench.gate import make_gate
from toolkit.bench.metrics import too_few_words
from toolkit.bench.verdict import FAIL, INCONCLUSIVE, NOT_JUDGED, PASS, outcome
from toolkit.config.schema import LatencyGates, ParityGates, QualityGates
from toolkit.records.build import QuantizationQuality
from toolkit.records.judged import Agreement, Distribution, DraftCheck, Parity, StopCheck
from toolkit.records.measured import Arm, Finding, Gate, Latency, Ratio, Scope, Speedup
from toolkit.rounding import decimals
from toolkit.validate.diagnose import DRAFT_CACHE, DRAFT_MODEL
from toolkit.validate.draft_check import TELLING, telling
from toolkit.validate.proportions import clopper_pearson, prompts_needed

__all__ = [
    "agreement_gate",
    "check_gates",
    "distribution_gate",
    "latency_gates",
    "not_judged",
    "parity_gate",
    "quality_gates",
    "ratio_gates",
    "speedup_gate",
]

# of those where the source is decided, by their upper bound: its own served text is easier than
# held-out text
WRONG_TOKENS = 0.05
# What random weights say nothing about. Against a source of the same precision the served text is
# right or wrong; against another it is more or less like it.
METRICS_OF_WEIGHTS = {*LATENCIES, "speedup", "kl_mean", "top1_agreement", "wrong_choices"}
UNTOLD_STEPS = (
    "chunks hold more than one step, so it is not known where a block began; with"
    " triton.stream_interval_ms: 0 and triton.decoupled: true this is judged"
)
MIN_PAIRS = 8  # below this a bootstrap interval says little: with one pair it has no width at all


def not_judged(gates: Iterable[Gate]) -> list[Gate]:
    """The same gates of a rehearsal: what speed and quality say of random weights is measured,
    and is no verdict.
    """

    def is_empty(gate: Gate) -> bool:
        # random models hardly ever agree
        seldom = gate.metric == "draft_check" and gate.outcome == INCONCLUSIVE
        return seldom or gate.metric in METRICS_OF_WEIGHTS

    detail = "rehearsed with random weights: {}"
    return [
        (
            replace(gate, outcome=NOT_JUDGED, detail=detail.format(gate.detail), next_step=None)
            if is_empty(gate)
            else gate
        )
        for gate in gates
    ]


def parity_gate(parity: Parity, limits: ParityGates, temperature: float = 0.0) -> Gate:
    """measured: the upper bound on the divergence rate. One divergence beyond rounding fails,
    whatever the rate.
    """
    metric = "seeded_parity" if temperature else "parity"
    gate = partial(make_gate, metric, Scope(temperature=temperature))
    limit = limits.max_divergence_rate
    found = f"{parity.prompts - parity.identical} of {parity.prompts} prompts differ"
    if parity.equivalent:
        found += f", {parity.equivalent} of them numerically equivalent"
        if any(one.judged_by == "log_probs" for one in parity.divergences):
            found += " by their served log-probabilities"
    if parity.suspicious or parity.broken:
        first = next(one for one in parity.divergences if one.kind in ("broken", "suspicious"))
        counts = ", ".join(
            f"{getattr(parity, kind)} {kind}"
            for kind in ("broken", "suspicious")
            if getattr(parity, kind)
        )
        return gate(
            FAIL,
            parity.rate_high,
            limit,
            f"{counts} of {parity.prompts} prompts: they diverge beyond rounding. The first: prompt"
            f" {first.prompt_index + 1}, output token {first.position + 1} ({first.arm}, draft"
            f" length {first.draft_len}): {first.detail}",
            "Speculation changes the output: this is a fault of the runtime, not of the draft. The"
            " divergences below list position and tokens, with a file for toolkit validate"
            " --replay; run again with engine.mode: eager to tell kernels from logic.",
        )
    if parity.unexplained:
        first = next(one for one in parity.divergences if one.kind == "unexplained")
        return gate(
            INCONCLUSIVE,
            parity.rate_high,
            limit,
            f"{found}, {parity.unexplained} that could not be judged: {first.detail}",
            "Give the reference what it lacks, then validate again.",
        )
    result = outcome(parity.rate_low, parity.rate_high, limit, at_least=False)
    found += ", none beyond rounding" if parity.identical < parity.prompts else ""
    digits = decimals([100 * parity.rate_high], 100 * limit, least=1)
    bound = (
        f"{found}; with {parity.confidence:.0%} confidence at most {parity.rate_high:.{digits}%} do"
    )
    next_step = None
    if result == INCONCLUSIVE:
        needed = prompts_needed(limit, parity.prompts - parity.identical)
        next_step = (
            f"Use at least {needed} prompts (validation.max_prompts), or allow more with"
            " validation.parity.max_divergence_rate."
            if needed is not None
            else (
                "Raise validation.parity.max_divergence_rate: no number of prompts can prove a rate"
                " of 0."
            )
        )
    elif result == FAIL:
        next_step = (
            "Rounding alone flips this many texts. Use a wider engine.dtype or gentler"
            " quantization, or allow it with validation.parity.max_divergence_rate."
        )
    return gate(result, parity.rate_high, limit, bound, next_step)


def agreement_gate(found: Agreement) -> Gate | None:
    """The plain text against a reference. In the same precision one token beyond rounding fails.
    Against another precision tokens are judged where the reference is decided by more than
    quantization moves its logits; None where that was not measured.
    """
    scope = Scope(reference="engine" if found.against == "engine" else "source")
    gate = partial(make_gate, "wrong_choices", scope)
    if found.kind is not None:
        good = found.kind in ("identical", "equivalent")
        detail = (
            f"{found.agreeing:,} of {found.tokens:,} tokens are the reference's own,"
            f" {found.beyond_rounding} beyond rounding"
        )
        advice = (
            "The plain text itself is wrong, speculation aside. What to do next names the likely"
            " cause."
        )
        return make_gate(
            "wrong_tokens",
            scope,
            PASS if good else FAIL,
            float(found.beyond_rounding),
            0.0,
            detail if good else f"{detail}. {found.detail}",
            None if good else advice,
        )
    if found.decided_margin is None:
        return None
    sure = (
        f"where the unquantized model is decided by at least {found.decided_margin:.2g} logits (an"
        " estimate of how far quantization moves them)"
    )
    if found.decided == 0:
        advice = (
            "Such a model says nothing about its weights: use other prompts, or"
            " validation.parity.source: never."
        )
        return gate(INCONCLUSIVE, None, WRONG_TOKENS, f"there is no token {sure}", advice)
    low, high = clopper_pearson(found.decided_differing, found.decided)
    result = outcome(low, high, WRONG_TOKENS, at_least=False)
    count = f"{found.decided_differing:,} of {found.decided:,} served tokens are not its own {sure}"
    next_steps = {
        PASS: None,
        FAIL: (
            "The served model is further from its source than it was on held-out text: calibrate on"
            " text like these prompts; if it was, the engine is not what was quantized, so compile"
            " again."
        ),
        INCONCLUSIVE: "Raise validation.max_prompts or max_tokens.",
    }
    detail = f"{count}, and {WRONG_TOKENS:.0%} may be; of all tokens {found.rate:.2%} are"
    return gate(result, high, WRONG_TOKENS, detail, next_steps[result])


def distribution_gate(found: Distribution) -> Gate:
    """measured: the smallest adjusted p-value. A test whose control was not rejected has shown
    nothing.
    """
    gate = partial(make_gate, "distribution", Scope())
    smallest = min(test.adjusted for test in found.tests)
    rejected = [test for test in found.tests if test.rejected]
    wrong = [f"{test.name} (adjusted p = {test.adjusted:.1e})" for test in rejected]
    if found.outside_filters:
        wrong.append(f"{found.outside_filters} tokens outside top-k or top-p")
    if found.unrepeated or not found.seeds_matter:
        wrong.append(
            f"{found.unrepeated} of {found.seeded} seeded requests did not repeat"
            if found.unrepeated
            else "seeds are ignored"
        )
    counts = f"{found.tokens:,} tokens, {len(found.tests)} tests with their controls"
    if wrong:
        advice = "Sampled text is not the target's own. What to do next names the likely cause."
        return gate(
            FAIL,
            smallest,
            found.false_alarm,
            f"{counts}: {'; '.join(wrong)}",
            advice,
        )
    blind = [test.name for test in found.tests if not test.control_rejected]
    if blind or not found.enough:
        why = f"the control of {', '.join(blind)} was not rejected: that test has shown nothing"
        why = (
            why
            if blind
            else f"too few for a total variation of {found.effect:g} within the time allowed"
        )
        advice = (
            "Raise validation.distribution.max_seconds, effect, or validation.temperature where the"
            " model is too certain."
        )
        return gate(INCONCLUSIVE, smallest, found.false_alarm, f"{counts}; {why}", advice)
    detail = (
        f"{counts}: none rejected, every control is. A total variation of {found.effect:g} would be"
        f" seen with probability {found.power:g}; a sound deployment fails once in"
        f" {1 / found.false_alarm:,.0f} runs"
    )
    return gate(PASS, smallest, found.false_alarm, detail)


def check_gates(
    draft_check: DraftCheck | None,
    stop_check: StopCheck | None,
    diagnoses: Iterable[Finding],
    *,
    asked_draft: bool = False,
) -> list[Gate]:
    """What is right or wrong without a rate: stop words, and that the served draft proposes what
    the draft engine does.

    asked_draft: there is a draft engine that was asked; without a draft_check no text told where
    its steps began.
    """
    named = {one.check: one for one in diagnoses}
    gates: list[Gate] = []
    if draft_check is not None:
        gates.append(_draft_gate(draft_check, named.get(DRAFT_CACHE) or named.get(DRAFT_MODEL)))
    elif asked_draft:
        gates.append(make_gate("draft_check", Scope(), NOT_JUDGED, None, None, UNTOLD_STEPS))
    if stop_check is not None:
        good = stop_check.wrong == 0
        detail = (
            f"{stop_check.requests} requests end before their stop word"
            if good
            else stop_check.detail or ""
        )
        advice = None if good else "The stop rule has to see every token of an accepted block."
        gates.append(
            make_gate(
                "stop_words",
                Scope(),
                PASS if good else FAIL,
                float(stop_check.wrong),
                0.0,
                detail,
                advice,
            )
        )
    return gates


def _draft_gate(check: DraftCheck, fault: Finding | None) -> Gate:
    """A fault that was named fails. Without one it takes enough places at which the draft engine
    is right to pass.
    """
    gate = partial(make_gate, "draft_check", Scope())
    kept = check.after_full_kept + check.earlier_kept
    expected = check.after_full_expected + check.earlier_expected
    figures = (float(kept), float(expected))
    if fault is not None:
        return gate(
            FAIL,
            *figures,
            fault.detail,
            "Speculation is slower than this draft allows; its text is right.",
        )
    detail = f"{kept:,} first drafts of a step kept, {expected:,} expected of the draft engine"
    behind, before = telling(check.after_full_expected), telling(check.earlier_expected)
    if not behind and not before:
        few = "none" if expected == 0 else f"{expected} of them"
        detail = (
            f"of {check.after_full + check.earlier:,} steps the draft engine proposes the right"
            f" first token in {few}"
        )
        advice = (
            "Raise validation.max_prompts or max_tokens, or take a draft that agrees with its"
            " target more often; this one does too seldom to speed anything up."
        )
        return gate(
            INCONCLUSIVE,
            *figures,
            f"{detail}; it takes {TELLING} to tell a sound draft",
            advice,
        )
    if not behind:
        detail += (
            f"; only {check.after_full_expected} of them behind a whole block, too few to judge its"
            " cache by"
        )
    return gate(PASS, *figures, detail)


def speedup_gate(
    speedup: Speedup | None, limits: LatencyGates, temperature: float = 0.0
) -> list[Gate]:
    """speedup None: the deployment does not speculate; a limit that the YAML states itself then
    fails.
    """
    limit = limits.min_speedup
    if limit is None or (speedup is None and "min_speedup" not in limits.model_fields_set):
        return []
    gate = partial(make_gate, "speedup", Scope(temperature=temperature))
    if speedup is None:
        detail = "not measured: this deployment does not speculate, so there is no speed-up"
        return [
            gate(
                FAIL,
                None,
                limit,
                detail,
                "Remove validation.latency.min_speedup, or set it to null.",
            )
        ]
    digits = decimals((speedup.estimate, speedup.low, speedup.high), limit)
    ends = f"{speedup.low:.{digits}f} to {speedup.high:.{digits}f}"
    spread = f"{speedup.estimate:.{digits}f}x, {speedup.confidence:.0%} interval {ends}"
    basis = f"{speedup.prompts} prompts x {speedup.rounds} rounds"
    if speedup.prompts * speedup.rounds < MIN_PAIRS:
        advice = "Raise validation.max_prompts or validation.rounds."
        return [
            gate(
                INCONCLUSIVE,
                speedup.estimate,
                limit,
                f"{spread}; {basis} are too few pairs to trust it",
                advice,
            )
        ]
    result = outcome(speedup.low, speedup.high, limit, at_least=True)
    next_steps = {
        PASS: None,
        FAIL: (
            "Speculation does not pay enough here: toolkit tune says which draft length would, if"
            " any. A small model is often faster with engine.threads: 1. Else a smaller or better"
            " matched draft, see acceptance by position; or lower validation.latency.min_speedup."
        ),
        INCONCLUSIVE: (
            "The measurement is too noisy for this limit: run on an idle machine, or raise"
            " validation.max_rounds or max_prompts."
        ),
    }
    return [gate(result, speedup.estimate, limit, f"{spread}, over {basis}", next_steps[result])]


def latency_gates(arm: Arm, limits: LatencyGates, temperature: float = 0.0) -> list[Gate]:
    """p90 gates of the arm that is deployed; only those that the YAML states."""
    gates: list[Gate] = []
    for name in ("ttft", "tpot", "itl", "e2e"):
        limit: float | None = getattr(limits, f"max_{name}_p90_ms")
        if limit is not None:
            scope = Scope(temperature=temperature, percentile=90)
            gates.append(_latency_gate(name, scope, arm.latencies[name], limit))
    return gates


def ratio_gates(
    ratios: Sequence[Ratio], limits: LatencyGates, temperature: float = 0.0
) -> list[Gate]:
    """Latencies of the speculative arm over the plain one's; a ratio that there is none of
    fails.
    """
    measured = {ratio.name: ratio for ratio in ratios}
    gates: list[Gate] = []
    for name, limit in limits.max_ratios.items():
        metric, percentile = LATENCY_PERCENTILES[name]
        scope = Scope(temperature=temperature, percentile=percentile, over="plain")
        gates.append(_ratio_gate(metric, scope, measured.get(name), limit, name))
    return gates


def _ratio_gate(metric: str, scope: Scope, ratio: Ratio | None, limit: float, key: str) -> Gate:
    """key: the limit's in validation.latency.max_ratios."""
    gate = partial(make_gate, metric, scope)
    if ratio is None:
        detail = "not measured: this deployment does not speculate, so there is nothing to divide"
        return gate(FAIL, None, limit, detail, "Remove validation.latency.max_ratios.")
    if ratio.too_few is not None:
        raised = "Raise validation.max_prompts or validation.rounds."
        return gate(INCONCLUSIVE, None, limit, f"no ratio: {ratio.reason}", raised)
    if ratio.estimate is None or ratio.low is None or ratio.high is None:
        removed = f"Remove validation.latency.max_ratios.{key}."
        return gate(FAIL, None, limit, f"not measured: {ratio.reason}", removed)
    result = outcome(ratio.low, ratio.high, limit, at_least=False)
    digits = decimals((ratio.estimate, ratio.low, ratio.high), limit)
    ends = f"{ratio.low:.{digits}f} to {ratio.high:.{digits}f}"
    detail = f"{ratio.estimate:.{digits}f} of plain's, 95% interval {ends}"
    next_steps = {
        PASS: None,
        FAIL: (
            "Speculation makes this latency worse than allowed; or raise"
            f" validation.latency.max_ratios.{key}."
        ),
        INCONCLUSIVE: (
            "Too close to call: run on an idle machine, or raise validation.max_rounds or"
            " max_prompts."
        ),
    }
    return gate(result, ratio.estimate, limit, detail, next_steps[result])


def _unmeasured_quality(metric: str, key: str, limits: QualityGates, *, quantized: bool) -> Gate:
    """A target that is its own source passes by being it; of one that came quantized nobody
    knows what it lost.
    """
    limit: float = getattr(limits, key)
    gate = partial(make_gate, metric, Scope())
    if not quantized:
        return gate(PASS, None, limit, "the target is not quantized, so it lost nothing")
    detail = (
        "not measured: the target came quantized, and its source is not here to compare it with"
    )
    if key not in limits.model_fields_set:
        return gate(NOT_JUDGED, None, limit, detail)
    advice = (
        "Name the unquantized checkpoint, so that it is quantized and measured here; or remove"
        f" validation.quality.{key}."
    )
    return gate(FAIL, None, limit, detail, advice)


def _latency_gate(name: str, scope: Scope, latency: Latency, limit: float) -> Gate:
    gate, key = partial(make_gate, name, scope), f"max_{name}_p90_ms"
    if latency.samples == 0:
        advice = (
            "Raise validation.max_tokens: a text of one token has no gap. Or remove"
            f" validation.latency.{key}."
        )
        return gate(FAIL, None, limit, "not measured: no answer has one", advice)
    if latency.p90 is None or latency.p90_low is None or latency.p90_high is None:
        advice = "Raise validation.max_prompts or validation.rounds."
        detail = f"no p90: {too_few_words(90, latency.unsupported['p90'])}"
        return gate(INCONCLUSIVE, None, limit, detail, advice)
    result = outcome(latency.p90_low, latency.p90_high, limit, at_least=False)
    digits = decimals((latency.p90, latency.p90_low, latency.p90_high), limit)
    ends = f"{latency.p90_low:.{digits}f} to {latency.p90_high:.{digits}f}"
    detail = f"{latency.p90:.{digits}f} {METRICS[name].unit}, 95% interval {ends}"
    next_steps = {
        PASS: None,
        FAIL: (
            "Too slow for this limit: use more engine.threads or faster hardware, or raise"
            f" validation.latency.{key}."
        ),
        INCONCLUSIVE: "Too close to call: run on an idle machine, or raise validation.max_prompts.",
    }
    return gate(result, latency.p90, limit, detail, next_steps[result])


def quality_gates(
    target: QuantizationQuality | None, limits: QualityGates, *, quantized: bool
) -> list[Gate]:
    """The quantized target against its source. The draft is not gated: its quality shows as
    acceptance.

    quantized: whether the target that is served is, be it here or before it came.
    """
    if target is None:
        keys = {"kl_mean": "max_kl", "top1_agreement": "min_top1_agreement"}
        return [
            _unmeasured_quality(metric, key, limits, quantized=quantized)
            for metric, key in keys.items()
            if getattr(limits, key) is not None
        ]
    advice = (
        "Calibrate on more or fitter text, or quantize less (quant_algo: W8A16 or NO_QUANT). The"
        " worst layers are below."
    )
    good = target.kl_mean <= limits.max_kl
    detail = f"{target.kl_mean:.4f} nats per token over {target.tokens} held-out tokens"
    gates = [
        make_gate(
            "kl_mean",
            Scope(),
            PASS if good else FAIL,
            target.kl_mean,
            limits.max_kl,
            detail,
            None if good else advice,
        )
    ]
    if limits.min_top1_agreement is not None:
        good = target.top1_agreement >= limits.min_top1_agreement
        detail = (
            f"{target.top1_agreement:.2%} of {target.tokens} held-out tokens keep their most likely"
            " token"
        )
        limit = limits.min_top1_agreement
        gates.append(
            make_gate(
                "top1_agreement",
                Scope(),
                PASS if good else FAIL,
                target.top1_agreement,
                limit,
                detail,
                None if good else advice,
            )
        )
    return gates
