"""What a gate is about stands in fields, and its name is made from them."""

from __future__ import annotations

import pytest

from toolkit.bench.definitions import METRICS
from toolkit.bench.gate import gate_name, make_gate
from toolkit.bench.limits import BY_NAME
from toolkit.records.measured import Scope

NAMES = [
    ("parity", Scope(temperature=0.0), "parity"),
    ("seeded_parity", Scope(temperature=0.8), "seeded_parity"),
    ("speedup", Scope(temperature=0.0), "speedup"),
    ("speedup", Scope(temperature=0.8), "speedup_sampled"),
    ("itl", Scope(temperature=0.8, percentile=90), "itl_p90_sampled"),
    ("ttft", Scope(temperature=0.8, percentile=50, over="plain"), "ttft_p50_ratio_sampled"),
    ("wrong_tokens", Scope(reference="engine"), "agreement_engine"),
    ("wrong_choices", Scope(reference="source"), "agreement_source"),
    ("draft_check", Scope(), "draft"),
    ("kl_mean", Scope(), "quality_kl"),
    ("top1_agreement", Scope(), "quality_top1"),
    ("throughput", Scope(concurrency=16), "tokens_per_s@16"),
    ("ttft", Scope(percentile=99, over="first_arm", rate=2.5), "ttft_p99_ratio@2.5/s"),
    ("speed", Scope(over="first_arm"), "speed"),
    ("speed", Scope(over="run_a", arm="plain", concurrency=4), "speed plain@4"),
    ("e2e", Scope(over="run_a", percentile=50, arm="served", rate=2.0), "e2e_p50 served@2/s"),
    ("errors", Scope(arm="served"), "errors served@trace"),
]


@pytest.mark.parametrize(("metric", "scope", "name"), NAMES)
def test_a_name_is_made_from_metric_and_scope(metric: str, scope: Scope, name: str) -> None:
    gate = make_gate(metric, scope, "PASS", 1.0, 1.0, "")
    assert gate.name == gate_name(metric, scope) == name
    assert gate.unit == ("x" if scope.over else METRICS[metric].unit)
    assert gate.direction == ("at_least" if METRICS[metric].better == "higher" else "at_most")


def test_a_limit_may_point_the_other_way() -> None:
    assert make_gate("speed", Scope(), "PASS", 1.0, 1.0, "", direction="at_most").direction == (
        "at_most"
    )


def test_every_name_of_a_limit_is_of_one_metric_in_one_scope() -> None:
    assert len(set(BY_NAME.values())) == len(BY_NAME) == 2 * 15 + 5 + 3
    assert all(metric in METRICS for metric, _ in BY_NAME.values())
