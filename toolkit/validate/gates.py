"""Judge figures by limits, with three outcomes. A gate whose interval straddles its limit is
INCONCLUSIVE, and that is not PASS.

The functions are pure: figures and limits go in, gates come out. Each gate says in words why it has
its outcome and, unless it passed, what to do next.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial

from toolkit.bench.definitions import LATENCIES, LATENCY_PERCENTILES, METRICS
from toolkit.bench.gate import make_gate
from toolkit.bench.metrics import too_few_words
from toolkit.bench.proportions import clopper_pearson, prompts_needed
from toolkit.bench.verdict import FAIL, INCONCLUSIVE, NOT_JUDGED, PASS, outcome
from toolkit.config.schema import LatencyGates, ParityGates, QualityGates
from toolkit.records.build import QuantizationQuality
from toolkit.records.judged import Agreement, Distribution, DraftCheck, Parity, StopCheck
from toolkit.records.measured import Arm, Finding, Gate, Latency, Ratio, Scope, Speedup
from toolkit.rounding import decimals
from toolkit.validate.diagnose import DRAFT_CACHE, DRAFT_MODEL
from toolkit.validate.draft_check import TELLING, telling
from toolkit.words import Verdict

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

# Largest share of wrong choices among tokens where the source is decided, for its upper bound.
# It can be this small since a model's own served text is easier for it than held-out text.
MAX_WRONG_CHOICES = 0.05
# Metrics that mean nothing for random weights. `wrong_tokens` is not among them: against a source
# of the same precision a served text is right or wrong, whatever the weights are.
METRICS_OF_WEIGHTS = {
    *LATENCIES,
    "goodput_share",
    "speedup",
    "kl_mean",
    "top1_agreement",
    "wrong_choices",
}
UNKNOWN_STEPS = (
    "chunks hold more than one step, so it is not known where a block began: judged on an idle"
    " machine, with triton.stream_interval_ms: 0 and triton.decoupled: true"
)
MIN_TEXTS = 8  # as MIN_PAIRS, for held-out texts
MIN_PAIRS = 8  # with fewer pairs a bootstrap interval says little; with one it has no width at all


def not_judged(gates: Iterable[Gate]) -> list[Gate]:
    """Return the gates of a rehearsal, without a verdict on those that depend on the weights.

    Speed and quality of random weights are measured, but they mean nothing.
    """

    def is_meaningless(gate: Gate) -> bool:
        # Random models hardly ever agree, so the draft check has too few tokens to judge by.
        lacks_tokens = gate.metric == "draft_check" and gate.outcome == INCONCLUSIVE
        return lacks_tokens or gate.metric in METRICS_OF_WEIGHTS

    detail = "rehearsed with random weights: {}"
    return [
        (
            replace(gate, outcome=NOT_JUDGED, detail=detail.format(gate.detail), next_step=None)
            if is_meaningless(gate)
            else gate
        )
        for gate in gates
    ]


def parity_gate(parity: Parity, limits: ParityGates, temperature: float = 0.0) -> Gate:
    """Judge the upper bound on the divergence rate. One divergence beyond rounding fails, whatever
    the rate is.
    """
    metric = "seeded_parity" if temperature else "parity"
    gate = partial(make_gate, metric, Scope(temperature=temperature))
    limit = limits.max_divergence_rate
    if parity.suspicious or parity.broken:
        return gate(FAIL, parity.rate_high, limit, *_beyond_rounding(parity))
    found = f"{parity.prompts - parity.identical} of {parity.prompts} prompts differ"
    if parity.equivalent:
        found += f", {parity.equivalent} of them numerically equivalent"
        if any(divergence.judged_by == "log_probs" for divergence in parity.divergences):
            found += " by their served log-probabilities"
    if parity.unexplained:
        first = next(each for each in parity.divergences if each.kind == "unexplained")
        return gate(
            INCONCLUSIVE,
            parity.rate_high,
            limit,
            f"{found}, {parity.unexplained} that could not be judged: {first.detail}",
            "Give the reference what it lacks and validate again.",
        )
    result = outcome(parity.rate_low, parity.rate_high, limit, at_least=False)
    found += ", none beyond rounding" if parity.identical < parity.prompts else ""
    digits = decimals([100 * parity.rate_high], 100 * limit, least=1)
    bound = (
        f"{found}; with {parity.confidence:.0%} confidence at most {parity.rate_high:.{digits}%} do"
    )
    return gate(result, parity.rate_high, limit, bound, _parity_fix(result, parity, limit))


def _beyond_rounding(parity: Parity) -> tuple[str, str]:
    """Return (detail, next step) of a parity gate that fails because of a fault."""
    first = next(each for each in parity.divergences if each.kind in ("broken", "suspicious"))
    counts = ", ".join(
        f"{getattr(parity, kind)} {kind}"
        for kind in ("broken", "suspicious")
        if getattr(parity, kind)
    )
    detail = (
        f"{counts} of {parity.prompts} prompts: they diverge beyond rounding. The first: prompt"
        f" {first.prompt_index + 1}, output token {first.position + 1} ({first.arm}, draft"
        f" length {first.draft_len}): {first.detail}"
    )
    next_step = (
        "Speculation changes the output: this is a fault of the runtime, not of the draft. The"
        " divergences below list position and tokens, with a file for toolkit validate"
        " --replay; run again with engine.mode: eager to tell kernels from logic."
    )
    return detail, next_step


def _parity_fix(result: Verdict, parity: Parity, limit: float) -> str | None:
    """Return what to do about a divergence rate that rounding alone explains."""
    if result == PASS:
        return None
    if result == FAIL:
        return (
            "Rounding alone flips this many texts. Use a wider engine.dtype or gentler"
            " quantization, or allow it with validation.parity.max_divergence_rate."
        )
    needed = prompts_needed(limit, parity.prompts - parity.identical)
    if needed is None:
        return (
            "Raise validation.parity.max_divergence_rate: no number of prompts can prove a rate"
            " of 0."
        )
    return (
        f"Use at least {needed} prompts (validation.max_prompts), or allow a higher rate with"
        " validation.parity.max_divergence_rate."
    )


def agreement_gate(agreement: Agreement) -> Gate | None:
    """Judge the plain text against a reference.

    If both have the same precision, one token beyond rounding fails. If not, tokens are judged only
    where the reference is decided by more than quantization moves its logits. None if that was not
    measured.
    """
    scope = Scope(reference="engine" if agreement.against == "engine" else "source")
    gate = partial(make_gate, "wrong_choices", scope)
    if agreement.kind is not None:
        good = agreement.kind in ("identical", "equivalent")
        detail = (
            f"{agreement.agreeing:,} of {agreement.tokens:,} tokens are the reference's own,"
            f" {agreement.beyond_rounding} beyond rounding"
        )
        advice = (
            "The plain text itself is wrong, without any speculation. What to do next names the"
            " likely cause."
        )
        return make_gate(
            "wrong_tokens",
            scope,
            PASS if good else FAIL,
            float(agreement.beyond_rounding),
            0.0,
            detail if good else f"{detail}. {agreement.detail}",
            None if good else advice,
        )
    if agreement.decided_margin is None:
        return None
    where = (
        f"where the unquantized model is decided by at least {agreement.decided_margin:.2g} logits"
        " (an estimate of how far quantization moves them)"
    )
    if agreement.decided == 0:
        advice = (
            "The texts of such a model show nothing about its weights: use other prompts, or set"
            " validation.parity.source: never."
        )
        return gate(INCONCLUSIVE, None, MAX_WRONG_CHOICES, f"there is no token {where}", advice)
    low, high = clopper_pearson(agreement.decided_differing, agreement.decided)
    result = outcome(low, high, MAX_WRONG_CHOICES, at_least=False)
    count = (
        f"{agreement.decided_differing:,} of {agreement.decided:,} served tokens differ from its"
        f" choice {where}"
    )
    next_steps = {
        PASS: None,
        FAIL: (
            "The served model is further from its source than it was on held-out text: calibrate on"
            " text like these prompts. If you did, the engine is not what was quantized: compile"
            " again."
        ),
        INCONCLUSIVE: "Raise validation.max_prompts or max_tokens.",
    }
    detail = (
        f"{count}; at most {MAX_WRONG_CHOICES:.0%} may. Of all tokens, {agreement.rate:.2%} agree"
    )
    return gate(result, high, MAX_WRONG_CHOICES, detail, next_steps[result])


def distribution_gate(distribution: Distribution) -> Gate:
    """Judge the smallest adjusted p-value. A test shows nothing if its control was not rejected."""
    gate = partial(make_gate, "distribution", Scope())
    smallest = min(test.adjusted for test in distribution.tests)
    rejected = [test for test in distribution.tests if test.rejected]
    wrong = [f"{test.name} (adjusted p = {test.adjusted:.1e})" for test in rejected]
    if distribution.outside_filters:
        wrong.append(f"{distribution.outside_filters} tokens outside top-k or top-p")
    if distribution.unrepeated:
        wrong.append(
            f"{distribution.unrepeated} of {distribution.seeded} seeded requests did not repeat"
        )
    elif not distribution.seeds_matter:
        wrong.append("seeds are ignored")
    counts = f"{distribution.tokens:,} tokens, {len(distribution.tests)} tests with their controls"
    if wrong:
        advice = (
            "Sampled text does not follow the target's distribution. What to do next names the"
            " likely cause."
        )
        return gate(
            FAIL,
            smallest,
            distribution.false_alarm,
            f"{counts}: {'; '.join(wrong)}",
            advice,
        )
    blind = [test.name for test in distribution.tests if not test.control_rejected]
    if blind or not distribution.enough:
        why = f"too few to detect a total variation of {distribution.effect:g}"
        if blind:
            why = f"the control of {', '.join(blind)} was not rejected: that test has shown nothing"
        advice = (
            "Raise validation.distribution.max_seconds, effect, or validation.temperature where the"
            " model is too certain."
        )
        return gate(INCONCLUSIVE, smallest, distribution.false_alarm, f"{counts}; {why}", advice)
    detail = (
        f"{counts}: no test rejects, and every control is rejected. A total variation of"
        f" {distribution.effect:g} would be seen with probability {distribution.power:g}; a sound"
        f" deployment fails once in {1 / distribution.false_alarm:,.0f} runs"
    )
    return gate(PASS, smallest, distribution.false_alarm, detail)


def check_gates(
    draft_check: DraftCheck | None,
    stop_check: StopCheck | None,
    diagnoses: Iterable[Finding],
    *,
    asked_draft: bool = False,
) -> list[Gate]:
    """Judge what is right or wrong without a rate: stop words, and whether the served draft
    proposes what the draft engine does.

    asked_draft: a draft engine was asked. If draft_check is None all the same, no text showed where
    its steps began.
    """
    named = {finding.check: finding for finding in diagnoses}
    gates: list[Gate] = []
    if draft_check is not None:
        gates.append(_draft_gate(draft_check, named.get(DRAFT_CACHE) or named.get(DRAFT_MODEL)))
    elif asked_draft:
        gates.append(make_gate("draft_check", Scope(), NOT_JUDGED, None, None, UNKNOWN_STEPS))
    if stop_check is not None:
        good = stop_check.wrong == 0
        detail, advice = f"{stop_check.requests} requests end before their stop word", None
        if not good:
            detail = stop_check.detail or ""
            advice = "The stop rule has to look at every token of an accepted block."
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
    """Judge the draft check. A fault that was named fails. To pass, the draft engine has to be
    right at enough places.
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
        if check.hidden_texts > 0:
            # Which chunks are single steps is then a matter of the machine's speed, and so would
            # the verdict be.
            return gate(NOT_JUDGED, *figures, f"{detail}; in other texts {UNKNOWN_STEPS}")
        advice = (
            "Raise validation.max_prompts or max_tokens, or use a draft that agrees with its target"
            " more often; this draft agrees too seldom to speed anything up."
        )
        return gate(
            INCONCLUSIVE,
            *figures,
            f"{detail}; a sound draft can be told from {TELLING} on",
            advice,
        )
    if not behind:
        detail += (
            f"; only {check.after_full_expected} of them follow a fully accepted block, too few to"
            " judge the draft's cache"
        )
    return gate(PASS, *figures, detail)


def speedup_gate(
    speedup: Speedup | None, limits: LatencyGates, temperature: float = 0.0
) -> list[Gate]:
    """Judge the speed-up. speedup None: the deployment does not speculate, and a limit that the
    YAML itself states fails.
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
            " any. A small model is often faster with engine.threads: 1. Otherwise use a smaller or"
            " better matched draft (see acceptance by position), or lower"
            " validation.latency.min_speedup."
        ),
        INCONCLUSIVE: (
            "The measurement is too noisy for this limit: run on an idle machine, or raise"
            " validation.max_rounds or max_prompts."
        ),
    }
    return [gate(result, speedup.estimate, limit, f"{spread}, over {basis}", next_steps[result])]


def latency_gates(arm: Arm, limits: LatencyGates, temperature: float = 0.0) -> list[Gate]:
    """Judge the p90 latencies of the deployed arm that the YAML limits."""
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
    """Judge latencies of the speculative arm over those of the plain one. A ratio that could not
    be measured fails.
    """
    measured = {ratio.name: ratio for ratio in ratios}
    gates: list[Gate] = []
    for name, limit in limits.max_ratios.items():
        metric, percentile = LATENCY_PERCENTILES[name]
        scope = Scope(temperature=temperature, percentile=percentile, over="plain")
        gates.append(_ratio_gate(metric, scope, measured.get(name), limit, name))
    return gates


def _ratio_gate(metric: str, scope: Scope, ratio: Ratio | None, limit: float, key: str) -> Gate:
    """Judge one ratio. key: the limit's key in validation.latency.max_ratios."""
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
            "Speculation makes this latency worse than allowed. If that is acceptable, raise"
            f" validation.latency.max_ratios.{key}."
        ),
        INCONCLUSIVE: (
            "Too close to call: run on an idle machine, or raise validation.max_rounds or"
            " max_prompts."
        ),
    }
    return gate(result, ratio.estimate, limit, detail, next_steps[result])


def _unmeasured_quality(
    metric: str, key: str, limits: QualityGates, *, quantized: bool, fp8_kv_at_1: bool
) -> Gate:
    """Judge a target whose quality was not measured. An unquantized target lost nothing and
    passes. If the checkpoint came quantized, nobody knows what it lost; nor what an FP8 KV cache
    of the engine's own costs.
    """
    limit: float = getattr(limits, key)
    gate = partial(make_gate, metric, Scope())
    if not quantized and not fp8_kv_at_1:
        return gate(PASS, None, limit, "the target is not quantized, so it lost nothing")
    detail = "not measured: the target came quantized, without its source to compare it with"
    mended_by = "Name the unquantized checkpoint, so that it is quantized and measured here"
    if not quantized:
        detail = "not measured: what the FP8 KV cache at scale 1 costs; nothing else is quantized"
        mended_by = "Remove engine.kv_cache_dtype"
    if key not in limits.model_fields_set:
        return gate(NOT_JUDGED, None, limit, detail)
    advice = f"{mended_by}; or remove validation.quality.{key}."
    return gate(FAIL, None, limit, detail, advice)


def _latency_gate(name: str, scope: Scope, latency: Latency, limit: float) -> Gate:
    gate, key = partial(make_gate, name, scope), f"max_{name}_p90_ms"
    if latency.samples == 0:
        advice = (
            "Raise validation.max_tokens: a text of one token has no gap. Or remove"
            f" validation.latency.{key}."
        )
        return gate(FAIL, None, limit, "not measured: no answer has this latency", advice)
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
    target: QuantizationQuality | None,
    limits: QualityGates,
    *,
    quantized: bool,
    fp8_kv_at_1: bool = False,
) -> list[Gate]:
    """Judge the quantized target against its source. The draft has no gate: its quality shows in
    acceptance.

    quantized: whether the served target is quantized, no matter where that was done. fp8_kv_at_1:
    whether its engine rounds keys and values beside that, which was not measured.
    """
    if target is None:
        keys = {"kl_mean": "max_kl", "top1_agreement": "min_top1_agreement"}
        return [
            _unmeasured_quality(metric, key, limits, quantized=quantized, fp8_kv_at_1=fp8_kv_at_1)
            for metric, key in keys.items()
            if getattr(limits, key) is not None
        ]
    kl = f"{target.kl_mean:.4f} nats per token over {target.tokens:,} tokens of {{texts}}"
    without = " (without the FP8 KV cache at scale 1)" if fp8_kv_at_1 else ""
    gates = [
        _quality_gate(
            "kl_mean",
            target,
            target.kl_mean,
            target.kl_interval,
            limits.max_kl,
            f"{kl}{without}",
        )
    ]
    if limits.min_top1_agreement is not None:
        top1 = (
            f"{target.top1_agreement:.2%} of {target.tokens:,} tokens of {{texts}} keep"
            f" theirs{without}"
        )
        gates.append(
            _quality_gate(
                "top1_agreement",
                target,
                target.top1_agreement,
                target.top1_interval,
                limits.min_top1_agreement,
                top1,
            )
        )
    return gates


def _quality_gate(
    metric: str,
    target: QuantizationQuality,
    measured: float,
    interval: tuple[float, float],
    limit: float,
    detail: str,
) -> Gate:
    """Judge one figure of the target by its interval. detail: with a place for the texts."""
    gate = partial(make_gate, metric, Scope())
    low, high = interval
    digits = decimals((measured, low, high), limit, least=4)
    ends = f"95% interval {low:.{digits}f} to {high:.{digits}f}"
    detail = f"{detail.format(texts=f'{target.texts} held-out texts')}, {ends}"
    if target.texts < MIN_TEXTS:
        advice = (
            f"Give at least {MIN_TEXTS} texts (calibration.heldout), or cut them shorter"
            " (calibration.calib_max_seq_length)."
        )
        return gate(INCONCLUSIVE, measured, limit, f"{detail}; too few texts to trust it", advice)
    result = outcome(low, high, limit, at_least=metric == "top1_agreement")
    next_steps = {
        PASS: None,
        FAIL: (
            "Calibrate on more or better suited text, or quantize less (quant_algo: W8A16 or"
            " NO_QUANT). The worst layers are listed below."
        ),
        INCONCLUSIVE: (
            "The texts differ too much for this limit: give more held-out text"
            " (calibration.heldout), or cut it into more texts (calibration.calib_max_seq_length)."
        ),
    }
    return gate(result, measured, limit, detail, next_steps[result])
