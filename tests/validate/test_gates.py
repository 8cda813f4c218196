from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolkit.bench import metrics
from toolkit.bench.gate import make_gate
from toolkit.bench.proportions import clopper_pearson
from toolkit.bench.verdict import outcome, verdict
from toolkit.config.schema import LatencyGates, ParityGates, QualityGates
from toolkit.records.build import QuantizationQuality
from toolkit.records.judged import DraftCheck, Parity, StopCheck
from toolkit.records.measured import Arm, Latency, Ratio, Scope, Speedup, TooFew
from toolkit.validate.draft_check import shortfall, telling
from toolkit.validate.gates import (
    check_gates,
    latency_gates,
    not_judged,
    parity_gate,
    quality_gates,
    ratio_gates,
    speedup_gate,
)


def parity(prompts: int, near_ties: int) -> Parity:
    low, high = clopper_pearson(near_ties, prompts)
    return Parity(
        prompts=prompts,
        identical=prompts - near_ties,
        equivalent=near_ties,
        suspicious=0,
        broken=0,
        unexplained=0,
        rate=near_ties / prompts,
        rate_low=low,
        rate_high=high,
        confidence=0.95,
        compared_tokens=1000,
        near_tie_margin=0.05,
        arms=(),
        arms_equal=prompts,
        same_place=0,
        moved=0,
        severity=(),
        divergences=(),
    )


@given(st.floats(0, 10), st.floats(0, 10), st.floats(0, 10), st.booleans())
def test_an_interval_that_straddles_its_limit_is_inconclusive(
    a: float, b: float, limit: float, at_least: bool
) -> None:
    low, high = min(a, b), max(a, b)
    found = outcome(low, high, limit, at_least=at_least)
    if low < limit < high:
        assert found == "INCONCLUSIVE"
    if low > limit:
        assert found == ("PASS" if at_least else "FAIL")
    if high < limit:
        assert found == ("FAIL" if at_least else "PASS")
    if low == high == limit:
        assert found == "PASS"


@pytest.mark.parametrize(
    ("outcomes", "expected"),
    [
        ((), "PASS"),
        (("PASS", "PASS"), "PASS"),
        (("PASS", "INCONCLUSIVE"), "INCONCLUSIVE"),
        (("INCONCLUSIVE", "FAIL", "PASS"), "FAIL"),
        (("PASS", "NOT JUDGED"), "PASS"),
        (("FAIL", "NOT JUDGED"), "FAIL"),
        (("NOT JUDGED", "NOT JUDGED"), "INCONCLUSIVE"),
    ],
)
def test_verdict_is_the_worst_outcome(outcomes: tuple[str, ...], expected: str) -> None:
    assert (
        verdict(make_gate("parity", Scope(), one, None, None, "") for one in outcomes) == expected
    )


def test_clean_parity_passes_when_there_are_enough_prompts_to_say_so() -> None:
    assert parity_gate(parity(64, 0), ParityGates()).outcome == "PASS"
    few = parity_gate(parity(48, 0), ParityGates())
    assert few.outcome == "INCONCLUSIVE"
    assert "at least 59 prompts" in (few.next_step or "")


def test_too_many_near_ties_fail_once_that_is_certain() -> None:
    assert parity_gate(parity(64, 12), ParityGates()).outcome == "FAIL"
    assert parity_gate(parity(64, 3), ParityGates()).outcome == "INCONCLUSIVE"


def test_a_rate_of_zero_cannot_be_proved() -> None:
    gate = parity_gate(parity(64, 0), ParityGates(max_divergence_rate=0.0))
    assert gate.outcome == "INCONCLUSIVE"
    assert "no number of prompts" in (gate.next_step or "")


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [(1.2, 1.6, "PASS"), (0.9, 1.1, "FAIL"), (1.1, 1.3, "INCONCLUSIVE"), (1.15, 1.2, "PASS")],
)
def test_speedup_is_judged_by_its_interval(low: float, high: float, expected: str) -> None:
    (gate,) = speedup_gate(
        Speedup((low + high) / 2, low, high, 0.95, 32, 3), LatencyGates(min_speedup=1.15)
    )
    assert gate.outcome == expected
    assert (gate.next_step is None) == (expected == "PASS")


def test_an_interval_that_ends_just_beyond_its_limit_shows_it() -> None:
    (gate,) = speedup_gate(Speedup(1.28, 1.1487, 1.43, 0.95, 64, 3), LatencyGates(min_speedup=1.15))
    assert gate.outcome == "INCONCLUSIVE"
    assert "interval 1.149 to 1.430" in gate.detail


def test_a_bound_on_a_rate_is_told_from_what_differed() -> None:
    clean = parity_gate(parity(64, 0), ParityGates())
    assert clean.detail == "0 of 64 prompts differ; with 95% confidence at most 4.6% do"
    some = parity_gate(parity(200, 3), ParityGates())
    assert some.detail.startswith(
        "3 of 200 prompts differ, 3 of them numerically equivalent, none beyond rounding; with 95%"
    )
    close = parity_gate(parity(64, 0), ParityGates(max_divergence_rate=0.046))
    assert close.outcome == "PASS" and "at most 4.57% do" in close.detail


def test_a_draft_whose_steps_nobody_told_is_not_judged_and_spoils_no_verdict() -> None:
    stops = StopCheck(24, 0, None)
    assert [gate.name for gate in check_gates(None, stops, ())] == ["stop_words"]
    draft, stop_words = check_gates(None, stops, (), asked_draft=True)
    assert (draft.name, draft.outcome, draft.measured, draft.next_step) == (
        "draft",
        "NOT JUDGED",
        None,
        None,
    )
    assert "stream_interval_ms: 0" in draft.detail
    assert verdict([draft, stop_words]) == "PASS"


@pytest.mark.parametrize(
    ("behind", "before", "result", "said"),
    [
        (
            (40, 30),
            (90, 60),
            "PASS",
            "90 first drafts of a step kept, 90 expected of the draft engine",
        ),
        (
            (3, 2),
            (90, 60),
            "PASS",
            "only 2 of them follow a fully accepted block, too few to judge the draft's cache",
        ),
        ((40, 30), (5, 1), "PASS", "31 first drafts"),
        (
            (0, 0),
            (1764, 0),
            "INCONCLUSIVE",
            "of 1,764 steps the draft engine proposes the right first token in none; a sound draft"
            " can be told from 27 on",
        ),
        (
            (40, 26),
            (30, 26),
            "INCONCLUSIVE",
            "of 70 steps the draft engine proposes the right first token in 52 of them",
        ),
    ],
)
def test_a_draft_passes_on_evidence_only(
    behind: tuple[int, int], before: tuple[int, int], result: str, said: str
) -> None:
    check = DraftCheck(3, *behind, behind[1], *before, before[1])
    (found,) = check_gates(check, None, ())
    assert found.outcome == result and said in found.detail
    assert (found.next_step is None) == (result == "PASS")
    (rehearsed,) = not_judged([found])
    assert rehearsed.outcome == ("PASS" if result == "PASS" else "NOT JUDGED")


def test_too_few_steps_decide_nothing_if_others_were_hidden() -> None:
    """How many chunks are single steps is then a matter of speed, and no verdict may depend on
    that.
    """
    few = DraftCheck(3, 0, 0, 0, 10, 0, 0, hidden_texts=4)
    (gate,) = check_gates(few, None, ())
    assert gate.outcome == "NOT JUDGED"
    assert "stream_interval_ms: 0" in gate.detail
    (judged,) = check_gates(DraftCheck(3, 40, 30, 30, 30, 26, 26, hidden_texts=4), None, ())
    assert judged.outcome == "PASS"


def test_as_many_drafts_as_can_pass_would_tell_one_that_loses_half() -> None:
    from scipy.stats import binom

    def seen(expected: int) -> float:
        """How likely a draft that keeps every second of these is named."""
        enough = next(
            lost
            for lost in range(1, expected + 1)
            if shortfall(expected, expected, expected - lost)
        )
        return float(binom.sf(enough - 1, expected, 0.5))

    assert telling(27) and seen(27) >= 0.99
    assert not telling(26) and seen(26) < 0.99


def test_one_pair_is_too_few_for_any_interval() -> None:
    (gate,) = speedup_gate(Speedup(3.0, 3.0, 3.0, 0.95, 1, 1), LatencyGates())
    assert gate.outcome == "INCONCLUSIVE"


def test_gates_that_the_yaml_does_not_state_are_not_judged() -> None:
    assert speedup_gate(Speedup(0.5, 0.5, 0.5, 0.95, 32, 3), LatencyGates(min_speedup=None)) == []


@pytest.mark.parametrize(
    ("limit", "expected"), [(30.0, "PASS"), (25.0, "INCONCLUSIVE"), (20.0, "FAIL")]
)
def test_latency_gate(limit: float, expected: str) -> None:
    latency = Latency(200, 20.0, 20.0, 25.0, None, 24.0, 27.0, {"p99": TooFew(200, 1000)}, ())
    arm = Arm(
        200,
        1,
        1.0,
        1.0,
        (),
        dict.fromkeys(("ttft", "tpot", "itl", "icl", "e2e"), latency),
        None,
        {},
    )
    (gate,) = latency_gates(arm, LatencyGates(max_itl_p90_ms=limit))
    assert (gate.name, gate.outcome, gate.measured) == ("itl_p90", expected, 25.0)
    short = replace(latency, p90=None, unsupported={"p90": TooFew(24, 100)})
    (gate,) = latency_gates(
        replace(arm, latencies={**arm.latencies, "itl": short}), LatencyGates(max_itl_p90_ms=limit)
    )
    assert (gate.outcome, gate.measured) == ("INCONCLUSIVE", None)
    assert "p90 needs 100" in gate.detail
    none = metrics.latency([])  # as where every text has one token
    (gate,) = latency_gates(
        replace(arm, latencies={**arm.latencies, "itl": none}), LatencyGates(max_itl_p90_ms=limit)
    )
    assert (gate.outcome, gate.measured) == ("FAIL", None)
    assert gate.detail.startswith("not measured") and gate.next_step is not None


QUALITY = QuantizationQuality(
    5000, 0.02, 0.3, 0.97, 9.0, 9.1, (), (), 0, 40, (0.015, 0.025), (0.96, 0.98)
)


@pytest.mark.parametrize(
    ("limits", "texts", "outcomes"),
    [
        (QualityGates(), 40, ["PASS"]),
        (QualityGates(max_kl=0.01), 40, ["FAIL"]),
        (QualityGates(max_kl=0.022), 40, ["INCONCLUSIVE"]),  # inside the interval
        (QualityGates(min_top1_agreement=0.95), 40, ["PASS", "PASS"]),
        (QualityGates(min_top1_agreement=0.99), 40, ["PASS", "FAIL"]),
        (QualityGates(min_top1_agreement=0.965), 40, ["PASS", "INCONCLUSIVE"]),
        (QualityGates(), 7, ["INCONCLUSIVE"]),  # an interval over so few texts means little
        (QualityGates(max_kl=0.01), 7, ["INCONCLUSIVE"]),
    ],
)
def test_quality_is_judged_by_its_interval(
    limits: QualityGates, texts: int, outcomes: list[str]
) -> None:
    gates = quality_gates(replace(QUALITY, texts=texts), limits, quantized=True)
    assert [gate.outcome for gate in gates] == outcomes
    assert all((gate.next_step is None) is (gate.outcome == "PASS") for gate in gates)
    assert f"of {texts} held-out texts, 95% interval 0.015" in gates[0].detail


def test_quality_that_was_not_measured_passes_only_where_there_is_nothing_to_lose() -> None:
    """A checkpoint that came quantized has no source here: what the YAML asks of it fails, and a
    default is not judged.
    """
    both = QualityGates(max_kl=0.05, min_top1_agreement=0.98)
    assert [gate.outcome for gate in quality_gates(None, both, quantized=False)] == ["PASS", "PASS"]
    asked = quality_gates(None, both, quantized=True)
    assert [(gate.name, gate.outcome, gate.measured) for gate in asked] == [
        ("quality_kl", "FAIL", None),
        ("quality_top1", "FAIL", None),
    ]
    assert all(gate.detail.startswith("not measured") and gate.next_step for gate in asked)
    (default,) = quality_gates(None, QualityGates(), quantized=True)
    assert (default.outcome, default.limit) == ("NOT JUDGED", 0.05)


def test_what_an_fp8_kv_cache_of_the_engine_costs_is_in_no_figure() -> None:
    """It was not measured, so nothing that is silent about it passes."""
    (default,) = quality_gates(None, QualityGates(), quantized=False, fp8_kv_at_1=True)
    assert default.outcome == "NOT JUDGED" and "FP8 KV cache" in default.detail
    stated = QualityGates(max_kl=0.05)
    (asked,) = quality_gates(None, stated, quantized=False, fp8_kv_at_1=True)
    assert asked.outcome == "FAIL" and "Remove engine.kv_cache_dtype" in str(asked.next_step)
    (measured,) = quality_gates(QUALITY, QualityGates(), quantized=True, fp8_kv_at_1=True)
    assert "of 40 held-out texts (without the FP8 KV cache at scale 1), 95%" in measured.detail


@pytest.mark.parametrize(
    ("ratio", "result"),
    [
        (Ratio("ttft", 1.0, 0.95, 1.05, percentile=90), "PASS"),
        (Ratio("ttft", 1.1, 1.0, 1.2, percentile=90), "INCONCLUSIVE"),
        (Ratio("ttft", 1.3, 1.2, 1.4, percentile=90), "FAIL"),
        (
            Ratio("ttft", None, None, None, "for want of samples", 90, TooFew(60, 100)),
            "INCONCLUSIVE",
        ),
        (Ratio("ttft", None, None, None, "no samples", 90), "FAIL"),
        (Ratio("e2e", 1.0, 0.95, 1.05, percentile=90), "FAIL"),
    ],
)
def test_a_ratio_of_latencies_is_judged_by_its_interval_and_fails_unmeasured(
    ratio: Ratio, result: str
) -> None:
    (gate,) = ratio_gates([ratio], LatencyGates(max_ratios={"ttft_p90": 1.1}), 0.8)
    assert (gate.name, gate.outcome) == ("ttft_p90_ratio_sampled", result)
    assert (gate.next_step is None) == (result == "PASS")


def test_a_rehearsal_judges_what_is_right_and_not_what_is_fast_or_good() -> None:
    sampled, over_plain = Scope(temperature=0.8), Scope(percentile=50, over="plain")
    empty = {
        "speedup": make_gate("speedup", Scope(), "PASS", 1.0, 2.0, "why", "hint"),
        "speedup_sampled": make_gate("speedup", sampled, "PASS", 1.0, 2.0, "why", "hint"),
        "ttft_p90": make_gate("ttft", Scope(percentile=90), "PASS", 1.0, 2.0, "why", "hint"),
        "itl_p90_sampled": make_gate(
            "itl", replace(sampled, percentile=90), "PASS", 1.0, 2.0, "why", "hint"
        ),
        "tpot_p50_ratio": make_gate("tpot", over_plain, "PASS", 1.0, 2.0, "why", "hint"),
        "quality_kl": make_gate("kl_mean", Scope(), "PASS", 1.0, 2.0, "why", "hint"),
        "quality_top1": make_gate("top1_agreement", Scope(), "PASS", 1.0, 2.0, "why", "hint"),
    }
    of_engine = Scope(reference="engine")
    kept = {
        "parity": make_gate("parity", Scope(temperature=0.0), "PASS", 1.0, 2.0, "why", "hint"),
        "seeded_parity": make_gate("seeded_parity", sampled, "PASS", 1.0, 2.0, "why", "hint"),
        "agreement_engine": make_gate("wrong_tokens", of_engine, "PASS", 1.0, 2.0, "why", "hint"),
        "draft": make_gate("draft_check", Scope(), "PASS", 1.0, 2.0, "why", "hint"),
        "stop_words": make_gate("stop_words", Scope(), "PASS", 1.0, 2.0, "why", "hint"),
        "distribution": make_gate("distribution", Scope(), "PASS", 1.0, 2.0, "why", "hint"),
        "errors@4": make_gate("errors", Scope(concurrency=4), "PASS", 1.0, 2.0, "why", "hint"),
    }
    made = {**empty, **kept}
    assert [gate.name for gate in made.values()] == list(made)
    gates = [replace(gate, outcome=result) for gate in made.values() for result in ("PASS", "FAIL")]
    found = not_judged(gates)
    assert {gate.name for gate in found if gate.outcome == "NOT JUDGED"} == set(empty)
    assert [gate for gate in found if gate.name in kept] == [
        gate for gate in gates if gate.name in kept
    ]
    assert all(
        "why" in gate.detail and gate.next_step is None for gate in found if gate.name in empty
    )


def test_a_rehearsal_judges_agreement_with_its_source_only_where_both_compute_the_same() -> None:
    source = Scope(reference="source")
    exact = make_gate("wrong_tokens", source, "FAIL", 3.0, 0.0, "3 beyond rounding")
    rate = make_gate("wrong_choices", source, "PASS", 0.8, 0.7, "80 %")
    assert exact.name == rate.name == "agreement_source"
    assert [gate.outcome for gate in not_judged([exact, rate])] == ["FAIL", "NOT JUDGED"]
