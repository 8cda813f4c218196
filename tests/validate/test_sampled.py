"""Drawing from a real runtime with one fault planted in how it samples: the fault is named, and
a sound one passes.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.support.accept_rules import accept_by_argmax, with_rule, without_residual
from tests.support.runtime_endpoint import RuntimeEndpoint, reference_of
from tests.support.runtimes import make_runtime
from tests.support.step_engines import TableEngine
from toolkit.config.schema import DistributionGates
from toolkit.records.judged import Distribution
from toolkit.records.measured import Finding, Gate
from toolkit.speculative.acceptance import RULES
from toolkit.validate import diagnose
from toolkit.validate.arms import Sender
from toolkit.validate.gates import distribution_gate
from toolkit.validate.sampled import draw_samples, judge_samples

PROMPTS = [f"{number:03d}" for number in range(8)]
GATES = DistributionGates(effect=0.1, max_seconds=600)
ENGINE: dict[str, Any] = {
    "vocab_size": 256,
    "closeness": 0.9,
    "max_step_tokens": 16,
    "max_seq_len": 96,
    "sharpness": 1.5,
}


def judged(
    gates: DistributionGates = GATES,
    *,
    overrides: dict[str, Any] | None = None,
    seed: int = 0,
    closeness: float = 0.9,
    **runtime: Any,
) -> tuple[Distribution, Gate, list[str]]:
    """The record, its gate, and the names of what is wrong."""
    draft = {**ENGINE, "closeness": closeness}
    engines = (TableEngine(1, **ENGINE), TableEngine(2, **draft))
    endpoint = RuntimeEndpoint(
        make_runtime(*engines, max_draft_len=3, **runtime), overrides=overrides or {}
    )
    reference = reference_of(TableEngine(1, **ENGINE), TableEngine(2, **draft))
    sender = Sender(endpoint, max_tokens=48)
    drawn = draw_samples(
        sender, PROMPTS, gates, reference, temperature=0.8, near_tie_margin=0.05, seed=seed
    )
    found = judge_samples(drawn, gates, rule="rejection", seed=seed)
    findings: list[Finding] = list(diagnose.of_sampling(found))
    return found, distribution_gate(found), [finding.check for finding in findings]


def test_a_sound_runtime_passes_and_every_control_is_rejected() -> None:
    found, gate, named = judged()
    assert (gate.outcome, named) == ("PASS", [])
    assert all(test.control_rejected and not test.rejected for test in found.tests)
    assert [test.name for test in found.tests] == [
        "plain: by probability",
        "speculative: by probability",
        "speculative: by draft against target",
        "temperature: by probability",
        "top_k: by probability",
        "top_p: by probability",
        "continuations, plain against speculative",
    ]
    assert all(
        test.detectable is None or test.detectable <= 2 * GATES.effect for test in found.tests
    )
    assert (found.outside_filters, found.unrepeated, found.seeds_matter, found.enough) == (
        0,
        0,
        True,
        True,
    )


def test_an_argmax_that_is_accepted_at_temperature_above_0_is_named() -> None:
    found, gate, named = judged(rules={**RULES, "rejection": with_rule(accept_by_argmax)})
    assert (gate.outcome, named) == ("FAIL", [diagnose.LIKELY])
    assert not next(test for test in found.tests if test.name == "plain: by probability").rejected


def test_rejected_drafts_that_are_replaced_from_the_whole_target_lean_to_the_draft() -> None:
    _, gate, named = judged(
        rules={**RULES, "rejection": with_rule(without_residual)}, closeness=0.7
    )
    assert (gate.outcome, named) == ("FAIL", [diagnose.TO_DRAFT])


@pytest.mark.parametrize(
    "overrides",
    [{"temperature": 1.0}, {"top_k": 0}, {"top_p": 1.0}],
    ids=["temperature", "top_k", "top_p"],
)
def test_a_setting_that_does_not_reach_the_sampler_is_named(overrides: dict[str, Any]) -> None:
    _, gate, named = judged(overrides=overrides)
    assert (gate.outcome, named) == ("FAIL", [diagnose.SAMPLING])


def test_a_seed_that_is_ignored_is_named() -> None:
    found, gate, named = judged(overrides={"seed": None})
    assert (gate.outcome, named, found.unrepeated) == ("FAIL", [diagnose.SEEDS], found.seeded)


def test_too_little_time_is_inconclusive_and_says_what_could_be_seen() -> None:
    found, gate, _ = judged(DistributionGates(effect=0.02, max_seconds=0.2))
    assert gate.outcome == "INCONCLUSIVE"
    assert not found.enough
    assert all(test.detectable is None or test.detectable > 0.02 for test in found.tests)


def test_a_test_whose_control_is_not_rejected_has_shown_nothing() -> None:
    found, _, _ = judged()
    blind = replace(found.tests[0], control_rejected=False, control_p_value=0.3)
    gate = distribution_gate(replace(found, tests=(blind, *found.tests[1:])))
    assert gate.outcome == "INCONCLUSIVE"
    assert "plain: by probability" in gate.detail and "shown nothing" in gate.detail
