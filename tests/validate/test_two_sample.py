"""Plain against speculative samples, where no logits are to be had: its null, its power, its
control, and what it sees.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from scipy.stats import binom

from tests.support.accept_rules import with_rule
from tests.support.runtime_endpoint import RuntimeEndpoint
from tests.support.runtimes import make_runtime
from tests.support.step_engines import TableEngine
from toolkit.client import RequestTiming
from toolkit.config.schema import DistributionGates
from toolkit.records.judged import Distribution
from toolkit.records.measured import Gate
from toolkit.speculative.acceptance import RULES
from toolkit.speculative.sampling import draw
from toolkit.validate import diagnose, two_sample
from toolkit.validate.arms import ARMS, Alternating, Endpoint, Sender
from toolkit.validate.distribution import PrefixFound, prefix_test
from toolkit.validate.gates import distribution_gate
from toolkit.validate.sampled import TEXTS
from toolkit.validate.two_sample import TESTS, draw_pairs, judge_pairs

PROMPTS = [f"{number:03d}" for number in range(3)]
DRAWS = 10_000
GATES = DistributionGates(effect=0.19, max_seconds=600)
ENGINE: dict[str, Any] = {
    "vocab_size": 256,
    "max_step_tokens": 16,
    "max_seq_len": 96,
    "sharpness": 6.0,
}


def endpoint(closeness: float = 0.7, sharpness: float = 6.0, **runtime: Any) -> RuntimeEndpoint:
    engines = [
        TableEngine(seed, **{**ENGINE, "closeness": closeness, "sharpness": sharpness})
        for seed in (1, 2)
    ]
    return RuntimeEndpoint(
        make_runtime(*engines, max_draft_len=3, **runtime), overrides={"seed": None}
    )


def judged(
    served: Endpoint | Alternating, gates: DistributionGates = GATES, seed: int = 0
) -> tuple[Distribution, Gate, list[str]]:
    drawn = draw_pairs(Sender(served, max_tokens=48), PROMPTS, gates, temperature=0.8, seed=seed)
    found = judge_pairs(drawn, gates, rule="sample_match", seed=seed)
    return (
        found,
        distribution_gate(found),
        [finding.check for finding in diagnose.of_sampling(found)],
    )


def test_a_sound_runtime_passes_and_both_controls_are_rejected() -> None:
    found, gate, named = judged(endpoint())
    assert (gate.outcome, named) == ("PASS", []), gate
    assert [test.control_rejected for test in found.tests] == [True, True]
    assert found.tests[0].detectable is not None and found.tests[0].detectable <= GATES.effect


def accept_all(drafts: Any, draft_probs: Any, target_probs: Any, uniforms: Any) -> tuple[int, int]:
    """Broken: the text is the draft's own."""
    return len(drafts), draw(target_probs[len(drafts)], uniforms[-1])


def test_an_accept_rule_that_changes_what_is_said_is_named() -> None:
    _, gate, named = judged(endpoint(rules={**RULES, "rejection": with_rule(accept_all)}))
    assert (gate.outcome, named) == ("FAIL", [diagnose.CONTINUATIONS])


def test_too_little_time_is_inconclusive() -> None:
    found, gate, _ = judged(endpoint(), DistributionGates(effect=0.1, max_seconds=0.01))
    assert gate.outcome == "INCONCLUSIVE" and not found.enough


def test_more_texts_are_drawn_until_the_effect_would_be_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A guess that is far too low: a flatter model's texts share fewer beginnings."""
    monkeypatch.setattr(two_sample, "CONTROL", 12)
    monkeypatch.setattr(two_sample, "COMPARABLE", 0.3)
    found, gate, _ = judged(endpoint())
    assert found.requests > 2 * len(PROMPTS) * TEXTS
    assert (gate.outcome, found.enough) == ("PASS", True), gate


def test_the_number_of_texts_does_not_depend_on_which_arm_said_what() -> None:
    generator = np.random.default_rng(5)
    texts = [[[tuple(generator.integers(0, 3, 4)) for _ in range(30)]] for _ in ARMS]
    counts = [
        two_sample._texts_needed(
            two_sample.Pairs(0.8, dict(zip(ARMS, order, strict=True)), 4),
            GATES,
            30,
            np.random.default_rng(6),
        )
        for order in (texts, texts[::-1])
    ]
    assert counts[0] == counts[1] > 30


def test_a_model_that_is_certain_shows_nothing() -> None:
    found, gate, _ = judged(
        endpoint(sharpness=400.0), DistributionGates(effect=0.19, max_seconds=0.5)
    )
    assert not found.tests[1].control_rejected
    assert gate.outcome == "INCONCLUSIVE" and "shown nothing" in gate.detail


@dataclass
class Restarted:
    """An endpoint per arm, and which ones were started."""

    started: list[tuple[str, RuntimeEndpoint]] = field(default_factory=list)

    def start(self, arm: str) -> Endpoint:
        one = endpoint()
        one.overrides |= {"num_draft_tokens": 0} if arm == "plain" else {}
        self.started.append((arm, one))
        return one


def test_arms_that_need_restarts_are_drawn_one_after_the_other() -> None:
    restarted = Restarted()
    _, gate, _ = judged(Alternating(restarted.start))
    assert [arm for arm, _ in restarted.started] == ["plain", "speculative"]
    assert len({one.served for _, one in restarted.started}) == 1
    assert gate.outcome == "PASS"


def test_every_request_has_a_seed_of_its_own() -> None:
    """A runtime that starts its random numbers anew with every request would say one text over
    and over.
    """
    seeds: list[int] = []

    class Noting:
        inner = endpoint()

        def measure(self, prompts: Iterable[str], **options: Any) -> list[RequestTiming]:
            seeds.append(options["seed"])
            return self.inner.measure(prompts, **options)

    judged(Noting(), DistributionGates(effect=0.19, max_seconds=0.01))
    assert len(seeds) == len(set(seeds)) >= 2 * len(PROMPTS)


def test_a_runtime_that_ignores_seeds_gets_none() -> None:
    """It would refuse them."""
    asked: list[str] = []

    class Noting:
        inner = endpoint()

        def measure(self, prompts: Iterable[str], **options: Any) -> list[RequestTiming]:
            asked.extend(options)
            return self.inner.measure(prompts, **options)

    gates = DistributionGates(effect=0.19, max_seconds=0.01)
    sender = Sender(Noting(), 16)
    draw_pairs(sender, PROMPTS, gates, temperature=0.8, seed=0, with_seeds=False)
    assert asked and "seed" not in asked


# The test itself, over texts of a small Markov chain


def chain(
    generator: np.random.Generator, count: int, shift: float = 0.0, length: int = 8
) -> list[tuple[int, ...]]:
    """Two tokens of (1 - shift) / 2 and (1 + shift) / 2 after the first one, and an end now and
    then.
    """
    texts = generator.random((count, length)) < 0.5 * (1 + shift)
    texts[:, 0] = generator.random(count) < 0.9
    stops = generator.integers(length // 2, 2 * length, size=count)
    return [tuple(map(int, text[:stop])) for text, stop in zip(texts, stops, strict=True)]


def found_of(
    generator: np.random.Generator, count: int, shift: float, permutations: int, effect: float = 0.1
) -> PrefixFound:
    arms = [(chain(generator, count), chain(generator, count, shift)) for _ in range(2)]
    return prefix_test(
        arms, 8, generator, effect=effect, alpha=0.01, power=0.9, permutations=permutations
    )


def test_ten_thousand_tests_of_sound_texts_keep_their_level() -> None:
    """As often below a level as stated, and hardly less often: few texts make the statistic
    coarse.
    """
    generator = np.random.default_rng(7)
    found = np.array([found_of(generator, 12, 0.0, 99).p_value for _ in range(DRAWS)])
    for level in (0.2, 0.05, 0.02):
        alarms = int((found <= level).sum())
        assert binom.sf(alarms - 1, DRAWS, level) > 1e-4, (level, alarms)
        assert alarms > 0.8 * level * DRAWS


def test_the_first_token_is_no_part_of_it() -> None:
    generator = np.random.default_rng(8)
    same = chain(generator, 60)
    other = [(0, *text[1:]) for text in chain(generator, 60)]
    assert (
        prefix_test(
            [(same, other)], 8, generator, effect=0.1, alpha=0.01, power=0.9, permutations=999
        ).p_value
        > 0.01
    )


def test_power_is_at_least_as_stated() -> None:
    """At the total variation that is said to be detectable, the hardest shift is rejected that
    often.
    """
    generator = np.random.default_rng(9)
    detectable = [found_of(generator, 100, 0.0, 499).detectable for _ in range(5)]
    variation = float(np.mean([one for one in detectable if one is not None]))
    rejected = sum(found_of(generator, 100, 2 * variation, 499).p_value <= 0.01 for _ in range(40))
    assert binom.cdf(rejected, 40, 0.9) > 1e-3, (variation, rejected)


def test_the_control_is_tilted_by_what_is_said() -> None:
    generator = np.random.default_rng(10)
    assert found_of(generator, 200, 0.0, 999, effect=0.3).control_p_value == pytest.approx(1e-3)
    blind = found_of(generator, 20, 0.0, 999, effect=0.01).control_p_value
    assert blind is not None and blind > 0.01


def test_an_end_is_a_token_too() -> None:
    generator = np.random.default_rng(11)
    whole, cut = [(1, 2, 3)] * 30, [(1, 2)] * 30
    assert (
        prefix_test(
            [(whole, cut)], 3, generator, effect=0.1, alpha=0.01, power=0.9, permutations=999
        ).p_value
        == 1e-3
    )


def test_nothing_in_common_is_nothing_to_compare() -> None:
    found = prefix_test(
        [([(1, 2)], [(3, 4)])], 2, np.random.default_rng(0), effect=0.1, alpha=0.01, power=0.9
    )
    assert (found.tokens, found.detectable, found.p_value) == (0, None, 1.0)


def test_false_alarms_are_shared_by_both_tests() -> None:
    assert TESTS == 2
