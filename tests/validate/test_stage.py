"""The whole stage against a scripted endpoint, with one fault planted at a time."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.support.endpoint import Fault, ScriptedEndpoint
from tests.support.open_loop import load_run
from toolkit.bench.gate import make_gate
from toolkit.bench.runner import crossover
from toolkit.client import RequestRefused, RequestTiming, ServerUnavailable
from toolkit.config.schema import (
    DistributionGates,
    LatencyGates,
    LoadGates,
    ParityGates,
    ValidationConfig,
)
from toolkit.errors import StageError, UsageError
from toolkit.records.bench import BenchPoint, BenchRun
from toolkit.records.build import Quality, QuantizationQuality
from toolkit.records.codec import from_json, to_json
from toolkit.records.measured import Finding, Gate, Ratio, Scope
from toolkit.records.report import ValidationReport
from toolkit.report.figures import next_steps, notes
from toolkit.validate.diagnose import ACCEPT_RULE
from toolkit.validate.stage import Origin, References, Served, validate

PROMPTS = tuple(f"prompt number {i}" for i in range(60))
QUALITY = Quality(
    QuantizationQuality(
        5000, 0.01, 0.1, 0.98, 9.0, 9.05, (), (), 0, 40, (0.008, 0.012), (0.97, 0.99)
    ),
    None,
)


@pytest.fixture
def prompts_file(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS))
    return path


def run(
    endpoint: ScriptedEndpoint,
    prompts_file: Path,
    *,
    max_draft_len: int = 4,
    sweep: Any = None,
    load: Any = None,
    load_gates: dict[str, Any] | None = None,
    **config: Any,
) -> ValidationReport:
    asked: dict[str, Any] = {
        "load": None if load_gates is None else LoadGates(**load_gates),
        "max_tokens": 8,
        "rounds": 1,
        "max_rounds": 2,
        "latency": LatencyGates(min_speedup=1.15),
        "distribution": DistributionGates(
            enabled=False
        ),  # the script does not draw at random; test_sampled.py does
        **config,
    }
    return validate(
        Served(endpoint, max_draft_len, counters=endpoint.counters, sweep=sweep, load=load),
        ValidationConfig(prompts=prompts_file, **asked),
        References(endpoint.reference),
        Origin("tiny", QUALITY, {}, {"python": "3"}),
    )


def gate(report: ValidationReport, name: str) -> Gate:
    return next(one for one in report.gates if one.name == name)


def test_a_sound_deployment_passes_and_the_report_survives_json(prompts_file: Path) -> None:
    report = run(ScriptedEndpoint(), prompts_file)
    assert report.verdict == "PASS"
    assert {one.outcome for one in report.gates} == {"PASS"}
    assert [one.name for one in report.gates] == [
        "parity",
        "speedup",
        "seeded_parity",
        "speedup_sampled",
        "agreement_engine",
        "stop_words",
        "quality_kl",
    ]
    assert report.parity is not None and (report.parity.prompts, report.parity.identical) == (
        60,
        60,
    )
    assert report.sampled.parity is not None and report.sampled.parity.identical == 60
    assert report.acceptance is not None and report.acceptance.by_position[0].joint == 1.0
    data = json.loads(json.dumps(to_json(report)))
    assert from_json(ValidationReport, data) == report
    assert data["arms"]["speculative"]["tokens_per_s"] > data["arms"]["plain"]["tokens_per_s"]
    assert set(data["speedup"]) >= {"estimate", "low", "high"}
    assert set(data["gates"][0]) >= {"name", "outcome", "measured", "limit"}


def test_arms_are_interleaved_in_random_order_after_a_warm_up_that_is_not_counted(
    prompts_file: Path,
) -> None:
    endpoint = ScriptedEndpoint()
    report = run(endpoint, prompts_file, rounds=2)
    warm_up = 2 * 2 * 2  # prompts, arms, temperatures
    greedy = endpoint.seen[warm_up : warm_up + 2 * 2 * len(PROMPTS)]
    assert all(one["temperature"] == 0.0 for one in greedy)
    pairs = list(zip(greedy[::2], greedy[1::2], strict=True))
    assert all(
        a["prompt"] == b["prompt"]
        and {a.get("num_draft_tokens"), b.get("num_draft_tokens")} == {0, None}
        for a, b in pairs
    )
    first = [pair[0].get("num_draft_tokens") == 0 for pair in pairs]
    assert 0.25 < sum(first) / len(first) < 0.75
    assert [pair[0]["prompt"] for pair in pairs[:60]] != list(PROMPTS)
    assert report.arms.plain.requests == 2 * len(PROMPTS)


def test_timed_requests_have_no_seed_and_the_exact_check_has_one_per_prompt(
    prompts_file: Path,
) -> None:
    endpoint = ScriptedEndpoint()
    run(endpoint, prompts_file, seed=40)
    seeded = [one for one in endpoint.seen if "seed" in one]
    assert {one["acceptance"] for one in seeded} == {"coupled"}
    assert [one["seed"] for one in seeded[::2]] == [40 + i for i in range(60)]
    assert {one.get("acceptance") for one in endpoint.seen if "seed" not in one} == {
        None,
        "verify_only",
    }


def test_a_token_at_a_large_margin_fails_with_its_position(prompts_file: Path) -> None:
    report = run(ScriptedEndpoint(faults=[Fault(PROMPTS[12], position=5)]), prompts_file)
    assert report.verdict == "FAIL"
    assert gate(report, "parity").outcome == "FAIL"
    assert "prompt 13, output token 6" in gate(report, "parity").detail
    assert report.parity is not None
    assert {(one.prompt_index, one.position, one.kind) for one in report.parity.divergences} == {
        (12, 5, "broken")
    }
    assert [(arm.arm, arm.draft_len, arm.broken) for arm in report.parity.arms] == [
        ("speculative", 4, 1),
        ("verify", 4, 0),
        ("speculative", 1, 1),
        ("speculative", 2, 1),
    ]
    assert report.findings[0].check == ACCEPT_RULE
    assert gate(report, "seeded_parity").outcome == "PASS"


def test_a_seeded_fault_fails_the_seeded_gate_alone(prompts_file: Path) -> None:
    report = run(
        ScriptedEndpoint(faults=[Fault(PROMPTS[3], position=2, seeded=True)]), prompts_file
    )
    assert gate(report, "parity").outcome == "PASS"
    assert gate(report, "seeded_parity").outcome == "FAIL"


def test_a_near_tie_is_counted_and_passes(prompts_file: Path) -> None:
    endpoint = ScriptedEndpoint(faults=[Fault(PROMPTS[7], position=1, margin=0.01)])
    report = run(endpoint, prompts_file, parity=ParityGates(max_divergence_rate=0.1))
    assert report.verdict == "PASS"
    assert report.parity is not None and report.parity.equivalent == 1


def test_slow_speculation_fails(prompts_file: Path) -> None:
    report = run(ScriptedEndpoint(speculative_step_ms=9.0), prompts_file)
    assert (report.verdict, gate(report, "speedup").outcome) == ("FAIL", "FAIL")
    assert report.speedup is not None and report.speedup.high < 1.15


def test_a_noisy_machine_is_inconclusive_after_all_rounds(prompts_file: Path) -> None:
    endpoint = ScriptedEndpoint(jitter=0.9)
    found = run(ScriptedEndpoint(), prompts_file)
    assert found.speedup is not None
    report = run(
        endpoint,
        prompts_file,
        latency=LatencyGates(min_speedup=found.speedup.estimate),
        max_rounds=3,
    )
    assert report.speedup is not None
    assert report.speedup.low < found.speedup.estimate < report.speedup.high
    assert (gate(report, "speedup").outcome, report.speedup.rounds) == ("INCONCLUSIVE", 3)
    assert report.verdict == "INCONCLUSIVE"


def test_no_round_is_added_once_the_verdict_is_clear(prompts_file: Path) -> None:
    report = run(ScriptedEndpoint(), prompts_file, rounds=1, max_rounds=8)
    assert report.speedup is not None and report.speedup.rounds == 1


def test_counters_that_disagree_are_reported(prompts_file: Path) -> None:
    right = run(ScriptedEndpoint(), prompts_file)
    assert all(check.matches for check in right.counters)
    wrong = run(ScriptedEndpoint(counted_twice=True), prompts_file)
    (check,) = [check for check in wrong.counters if not check.matches]
    assert (check.name, check.server) == ("toolkit_output_tokens", 2 * check.client)
    assert any(one.check == "counters" and one.severity == "warning" for one in wrong.findings)


def test_texts_that_loop_are_reported(prompts_file: Path) -> None:
    report = run(ScriptedEndpoint(looping=True), prompts_file, max_tokens=40)
    *_, looping = (one.detail for one in report.findings if one.check == "looping texts")
    assert "flatters the speed-up" in looping
    alone = run(
        ScriptedEndpoint(looping=True),
        prompts_file,
        max_tokens=40,
        max_draft_len=0,
        latency=LatencyGates(),
    )
    looping, *_ = (one.detail for one in alone.findings if one.check == "looping texts")
    assert "repeat themselves" in looping and "speed-up" not in looping
    assert report.arms.plain.distinct_4grams is not None and report.arms.plain.distinct_4grams < 0.5


def test_tokens_that_wait_between_server_and_client_are_reported(prompts_file: Path) -> None:
    def warned(report: ValidationReport) -> bool:
        return any(one.check == "streaming" for one in report.findings)

    assert warned(run(ScriptedEndpoint(late_ms=4.0), prompts_file))
    assert not warned(run(ScriptedEndpoint(late_ms=0.5), prompts_file))


def test_a_machine_that_drifts_is_remarked_and_asks_for_nothing(prompts_file: Path) -> None:
    def remarks(busy: Callable[[float], float]) -> list[str]:
        report = run(ScriptedEndpoint(busy=busy), prompts_file, rounds=2)
        assert report.verdict == "PASS" and not any("rift" in step for step in next_steps(report))
        return [
            one.detail for one in report.findings if (one.check, one.severity) == ("drift", "note")
        ]

    assert (
        remarks(lambda temperature: 1.0)
        == remarks(lambda temperature: 1.0 if temperature == 0 else 1.5)
        == []
    )
    (greedy_slower,) = remarks(lambda temperature: 1.5 if temperature == 0 else 1.0)
    assert (
        "though to sample is more work" in greedy_slower and "round to round" not in greedy_slower
    )
    sent = iter(range(10**6))
    (rounds,) = remarks(lambda temperature: 1.0 if next(sent) < 150 else 1.4)
    assert "from round to round at temperature 0:" in rounds


def test_load_and_sampled_tokens_that_were_not_looked_at_are_remarked(prompts_file: Path) -> None:
    load, sampled = sorted(notes(run(ScriptedEndpoint(), prompts_file)))
    assert load.startswith(
        "Not measured: speed and latency with several requests at a time"
        " (validation.latency.concurrency"
    )
    assert sampled == (
        "Not measured: whether sampled tokens are distributed as the target's own"
        " (validation.distribution.enabled: true)"
    )


def test_a_deployment_without_speculation_has_one_arm(prompts_file: Path) -> None:
    endpoint = ScriptedEndpoint()
    report = run(endpoint, prompts_file, max_draft_len=0, latency=LatencyGates(max_itl_p90_ms=3.0))
    assert report.verdict == "PASS"
    assert report.arms.speculative is None and report.speedup is None and report.parity is None
    assert [one.name for one in report.gates] == [
        "itl_p90",
        "itl_p90_sampled",
        "agreement_engine",
        "quality_kl",
    ]
    assert {one["num_draft_tokens"] for one in endpoint.seen} == {0}
    assert from_json(ValidationReport, to_json(report)) == report


def test_a_speed_up_that_is_asked_of_a_deployment_without_speculation_fails(
    prompts_file: Path,
) -> None:
    report = run(
        ScriptedEndpoint(), prompts_file, max_draft_len=0, latency=LatencyGates(min_speedup=1.15)
    )
    assert report.verdict == "FAIL"
    assert gate(report, "speedup").detail.startswith(
        "not measured: this deployment does not speculate"
    )
    assert (
        gate(report, "speedup").measured is None and gate(report, "speedup").next_step is not None
    )


class Breaking(ScriptedEndpoint):
    error: Exception = RequestRefused("prompt longer than max_input_len")

    def measure(self, prompts: Any, **options: Any) -> list[RequestTiming]:
        if len(self.seen) > 20:
            raise self.error
        return super().measure(prompts, **options)


@pytest.mark.parametrize(
    "error", [RequestRefused("prompt longer than max_input_len"), ServerUnavailable("gone")]
)
def test_an_endpoint_that_breaks_is_an_error_that_names_the_prompt(
    error: Exception, prompts_file: Path
) -> None:
    endpoint = Breaking()
    endpoint.error = error
    with pytest.raises(
        StageError, match=r"validate: prompt \d+, (plain|speculative) arm: .*" + str(error)
    ) as caught:
        run(endpoint, prompts_file)
    assert caught.value.hint is not None


class Mute(ScriptedEndpoint):
    def measure(self, prompts: Any, **options: Any) -> list[RequestTiming]:
        from dataclasses import replace

        return [replace(timing, token_ids=()) for timing in super().measure(prompts, **options)]


def test_an_endpoint_without_token_ids_cannot_be_validated(prompts_file: Path) -> None:
    with pytest.raises(StageError, match="0 token ids returned"):
        run(Mute(), prompts_file)


def test_ratios_of_latencies_are_measured_in_both_kinds_of_decoding_and_gated(
    prompts_file: Path,
) -> None:
    limits = LatencyGates(max_ratios={"e2e_p50": 0.9, "ttft_p50": 1.05, "tpot_p99": 2.0})
    report = run(ScriptedEndpoint(), prompts_file, latency=limits)
    for suffix in ("", "_sampled"):
        assert gate(report, f"e2e_p50_ratio{suffix}").outcome == "PASS"
        assert gate(report, f"ttft_p50_ratio{suffix}").measured == pytest.approx(1.0)
        assert "p99 needs 1000" in gate(report, f"tpot_p99_ratio{suffix}").detail
    assert report.verdict == "INCONCLUSIVE"
    assert report.speedup is not None and len(report.speedup.latencies) == 15


def test_a_gate_on_ratios_of_a_deployment_without_speculation_fails(prompts_file: Path) -> None:
    report = run(
        ScriptedEndpoint(),
        prompts_file,
        max_draft_len=0,
        latency=LatencyGates(max_ratios={"e2e_p50": 9.0}),
    )
    assert report.verdict == "FAIL" and "not measured" in gate(report, "e2e_p50_ratio").detail


def test_rounds_are_added_until_the_speedup_is_known_as_closely_as_wanted(
    prompts_file: Path,
) -> None:
    """The gate is decided from the first round on; noise of 60 % a request leaves more than 2 %
    of doubt for some rounds.
    """
    noisy = {"min_speedup": 0.1, "precision": 0.02}
    report = run(
        ScriptedEndpoint(jitter=0.6), prompts_file, max_rounds=5, latency=LatencyGates(**noisy)
    )
    coarse = run(
        ScriptedEndpoint(jitter=0.6),
        prompts_file,
        max_rounds=5,
        latency=LatencyGates(**{**noisy, "precision": 0.5}),
    )
    assert report.speedup is not None and coarse.speedup is not None
    assert (coarse.speedup.rounds, report.speedup.rounds) == (1, 5)
    assert report.speedup.high - report.speedup.low < coarse.speedup.high - coarse.speedup.low


def swept(levels: Sequence[int], *, failed: bool = False) -> BenchRun:
    """What a sweep would have found: speculation that pays up to half of the highest level."""
    pays, stops = Ratio("speed", 1.2, 1.1, 1.3), Ratio("speed", 0.8, 0.7, 0.9)
    points = tuple(
        BenchPoint(level, None, 2, (), (pays if 2 * level <= max(levels) else stops,))
        for level in levels
    )
    gate = make_gate(
        "errors",
        Scope(concurrency=1),
        "FAIL" if failed else "PASS",
        0.0,
        0.0,
        "1 of 8 requests failed" if failed else "",
    )
    found = Finding("lag", "warning", "sends were late")
    return BenchRun(
        1, "", gate.outcome, (gate,), (), {}, points, crossover(points), (), (found,), {}, {}, ()
    )


def test_a_sweep_stands_in_the_report_and_its_failures_in_the_verdict(prompts_file: Path) -> None:
    limits = LatencyGates(concurrency=(1, 4, 8))
    report = run(ScriptedEndpoint(), prompts_file, latency=limits, sweep=swept)
    assert [point.concurrency for point in report.loads] == [1, 4, 8]
    assert report.crossover is not None and (
        report.crossover.pays_up_to,
        report.crossover.stops_at,
    ) == (4, 8)
    assert report.verdict == "PASS" and any(
        one.detail == "sends were late" for one in report.findings
    )
    assert from_json(ValidationReport, to_json(report)) == report
    broken = run(
        ScriptedEndpoint(), prompts_file, latency=limits, sweep=partial(swept, failed=True)
    )
    assert broken.verdict == "FAIL"


def test_an_open_loop_stands_in_the_report_and_its_limits_in_the_verdict(
    prompts_file: Path,
) -> None:
    """The search begins where one request follows another."""
    starts: list[float] = []

    def load(limits: LoadGates, start_rate: float) -> Any:
        starts.append(start_rate)
        return load_run(plain_ms=70.0), None

    limits: dict[str, Any] = {"rate": 8.0, "goodput": {"ttft": 400.0, "e2e": 600.0}}
    report = run(ScriptedEndpoint(), prompts_file, load=load, load_gates=limits)
    assert report.load is not None and report.load.rate == 8.0
    assert gate(report, "goodput_share@8/s").outcome == "PASS"
    assert report.verdict == "PASS" and not any("validation.load" in note for note in notes(report))
    assert from_json(ValidationReport, to_json(report)) == report
    assert report.arms.speculative is not None
    e2e = report.arms.speculative.latencies["e2e"]
    assert e2e.mean is not None and starts == [pytest.approx(1000 / e2e.mean)]
    limits["max_e2e_p99_ms"] = 60.0
    slow = run(ScriptedEndpoint(), prompts_file, load=load, load_gates=limits)
    assert slow.verdict == "FAIL" and gate(slow, "e2e_p99@8/s").outcome == "FAIL"
    assert any("validation.load.max_e2e_p99_ms" in step for step in next_steps(slow))


def test_an_open_loop_that_cannot_be_run_is_not_left_out_in_silence(prompts_file: Path) -> None:
    with pytest.raises(UsageError, match=r"validation\.load is set, and nothing here"):
        run(ScriptedEndpoint(), prompts_file, load_gates={"rate": 8.0})


def test_a_sweep_that_cannot_be_made_is_not_left_out_in_silence(prompts_file: Path) -> None:
    with pytest.raises(UsageError, match="nothing here can measure it"):
        run(ScriptedEndpoint(), prompts_file, latency=LatencyGates(concurrency=(1, 4)))
