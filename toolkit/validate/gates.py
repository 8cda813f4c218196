"""Thresholds with three outcomes. An interval that straddles its limit is INCONCLUSIVE, and that is not PASS.

Pure: figures and limits in, gates out. Each says in words why, and unless it passed, what to do next.
"""

from __future__ import annotations

from collections.abc import Iterable

from toolkit.config.schema import LatencyGates, ParityGates, QualityGates
from toolkit.records import Arm, Gate, Latency, Parity, QuantizationQuality, Speedup
from toolkit.validate.statistics import prompts_needed

__all__ = [
    "FAIL",
    "INCONCLUSIVE",
    "PASS",
    "latency_gates",
    "outcome",
    "parity_gate",
    "quality_gates",
    "speedup_gate",
    "verdict",
]

PASS, FAIL, INCONCLUSIVE = "PASS", "FAIL", "INCONCLUSIVE"
MIN_PAIRS = 8  # below this a bootstrap interval says little: with one pair it has no width at all


def outcome(low: float, high: float, limit: float, *, at_least: bool) -> str:
    """PASS when the whole interval is on the good side of the limit (or on it), FAIL when none of it is."""
    good, bad = (low >= limit, high < limit) if at_least else (high <= limit, low > limit)
    return PASS if good else FAIL if bad else INCONCLUSIVE


def verdict(gates: Iterable[Gate]) -> str:
    """FAIL if any failed, else INCONCLUSIVE if any is, else PASS."""
    outcomes = {gate.outcome for gate in gates}
    return FAIL if FAIL in outcomes else INCONCLUSIVE if INCONCLUSIVE in outcomes else PASS


def parity_gate(name: str, parity: Parity, limits: ParityGates) -> Gate:
    """measured: the upper bound on the divergence rate. One fault fails, whatever the rate."""
    limit = limits.max_divergence_rate
    found = f"{parity.identical} of {parity.prompts} prompts identical, {parity.near_ties} near-ties"
    if parity.faults:
        first = next(one for one in parity.divergences if one.kind == "fault")
        return Gate(
            name,
            FAIL,
            parity.rate_high,
            limit,
            f"{parity.faults} of {parity.prompts} prompts diverge beyond rounding. The first: prompt {first.prompt_index + 1}, "
            f"output token {first.position + 1}: {first.detail}",
            "Speculation changes the output: this is a fault of the runtime, not of the draft. The divergences below list "
            "position and tokens; run again with engine.mode: eager to tell kernels from logic.",
        )
    if parity.unexplained:
        first = next(one for one in parity.divergences if one.kind == "unexplained")
        return Gate(
            name,
            INCONCLUSIVE,
            parity.rate_high,
            limit,
            f"{found}, {parity.unexplained} that could not be judged: {first.detail}",
            "Give the reference what it lacks, then validate again.",
        )
    result = outcome(parity.rate_low, parity.rate_high, limit, at_least=False)
    bound = f"{found}, no fault; rate at most {parity.rate_high:.1%} with {parity.confidence:.0%} confidence"
    next_step = None
    if result == INCONCLUSIVE:
        needed = prompts_needed(limit, parity.prompts - parity.identical)
        next_step = (
            f"Use at least {needed} prompts (validation.max_prompts), or allow more with validation.parity.max_divergence_rate."
            if needed is not None
            else "Raise validation.parity.max_divergence_rate: no number of prompts can prove a rate of 0."
        )
    elif result == FAIL:
        next_step = (
            "Rounding alone flips this many texts. Use a wider engine.dtype or gentler quantization, or allow it with "
            "validation.parity.max_divergence_rate."
        )
    return Gate(name, result, parity.rate_high, limit, bound, next_step)


def speedup_gate(name: str, speedup: Speedup, limits: LatencyGates) -> list[Gate]:
    limit = limits.min_speedup
    if limit is None:
        return []
    spread = f"{speedup.estimate:.2f}x, {speedup.confidence:.0%} interval {speedup.low:.2f} to {speedup.high:.2f}"
    basis = f"{speedup.prompts} prompts x {speedup.rounds} rounds"
    if speedup.prompts * speedup.rounds < MIN_PAIRS:
        advice = "Raise validation.max_prompts or validation.rounds."
        return [Gate(name, INCONCLUSIVE, speedup.estimate, limit, f"{spread}; {basis} are too few pairs to trust it", advice)]
    result = outcome(speedup.low, speedup.high, limit, at_least=True)
    next_steps = {
        PASS: None,
        FAIL: "Speculation does not pay enough here: try another draft length or a smaller or better matched draft, see "
        "acceptance by position; or lower validation.latency.min_speedup.",
        INCONCLUSIVE: "The measurement is too noisy for this limit: run on an idle machine, or raise validation.max_rounds "
        "or max_prompts.",
    }
    return [Gate(name, result, speedup.estimate, limit, f"{spread}, over {basis}", next_steps[result])]


def latency_gates(arm: Arm, limits: LatencyGates, suffix: str = "") -> list[Gate]:
    """p90 gates of the arm that is deployed; only those that the YAML states."""
    gates: list[Gate] = []
    for name in ("ttft", "tpot", "itl", "e2e"):
        limit: float | None = getattr(limits, f"max_{name}_p90_ms")
        if limit is not None:
            gates.append(_latency_gate(f"{name}_p90{suffix}", f"max_{name}_p90_ms", arm.latencies[name], limit))
    return gates


def _latency_gate(name: str, key: str, latency: Latency, limit: float) -> Gate:
    if latency.p90 is None or latency.p90_low is None or latency.p90_high is None:
        advice = "Raise validation.max_prompts or validation.rounds."
        return Gate(name, INCONCLUSIVE, None, limit, f"no p90: {latency.unsupported['p90']}", advice)
    result = outcome(latency.p90_low, latency.p90_high, limit, at_least=False)
    detail = f"{latency.p90:.2f} ms, 95% interval {latency.p90_low:.2f} to {latency.p90_high:.2f}"
    next_steps = {
        PASS: None,
        FAIL: f"Too slow for this limit: use more engine.threads or faster hardware, or raise validation.latency.{key}.",
        INCONCLUSIVE: "Too close to call: run on an idle machine, or raise validation.max_prompts.",
    }
    return Gate(name, result, latency.p90, limit, detail, next_steps[result])


def quality_gates(target: QuantizationQuality | None, limits: QualityGates) -> list[Gate]:
    """The quantized target against its source. The draft is not gated: its quality shows as acceptance."""
    if target is None:
        return [Gate("quality_kl", PASS, None, limits.max_kl, "the target was not quantized here, so it lost nothing")]
    advice = "Calibrate on more or fitter text, or quantize less (quant_algo: W8A16 or NO_QUANT). The worst layers are below."
    good = target.kl_mean <= limits.max_kl
    detail = f"{target.kl_mean:.4f} nats per token over {target.tokens} held-out tokens"
    gates = [Gate("quality_kl", PASS if good else FAIL, target.kl_mean, limits.max_kl, detail, None if good else advice)]
    if limits.min_top1_agreement is not None:
        good = target.top1_agreement >= limits.min_top1_agreement
        detail = f"{target.top1_agreement:.2%} of {target.tokens} held-out tokens keep their most likely token"
        limit = limits.min_top1_agreement
        gates.append(
            Gate("quality_top1", PASS if good else FAIL, target.top1_agreement, limit, detail, None if good else advice)
        )
    return gates
