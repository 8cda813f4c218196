"""The distribution of the runtime's outputs, compared with the target's own by the chain rule.
Broken parts fail the test.

Each run starts from the same prompt with its own seed, and writes four tokens of a vocabulary of
four: the first from prefill, the rest from blocks with drafts. The 256 outputs are counted and
compared with their exact probabilities by a G-test. Seeds are fixed, so the counts never change.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import chi2

from tests.support.accept_rules import (
    Reject,
    accept_by_argmax,
    with_rule,
    without_normalisation,
    without_residual,
)
from tests.support.runtimes import make_request, make_runtime, serve
from tests.support.step_engines import ChainingTableEngine, ForgetfulRewind, TableEngine
from toolkit.interfaces import Sampling
from toolkit.speculative.acceptance import RULES, Rejection
from toolkit.speculative.sampling import Floats, Penalties, weights

VOCAB, TOKENS, PROMPT = 4, 4, (0, 3, 2)
RUNS = 2000
ALPHA = 1e-3  # how likely it is that these fixed seeds fail although the runtime is right
SAMPLINGS = {
    "plain": {"temperature": 1.0},
    "filters": {"temperature": 0.8, "top_k": 3, "top_p": 0.9},
    "penalties": {"temperature": 1.0, "frequency_penalty": 0.5, "presence_penalty": 0.3},
}


def engine(seed: int, kind: type[TableEngine] = TableEngine) -> TableEngine:
    return kind(seed, vocab_size=VOCAB, closeness=0.5, sharpness=1.2)


def exact(sampling: Sampling) -> dict[tuple[int, ...], float]:
    """Output -> probability, from the target's logits token by token and the request's sampling."""
    target, out = engine(1), {}
    for output in itertools.product(range(VOCAB), repeat=TOKENS):
        logits = target.forward([0], torch.tensor([[*PROMPT, *output]]))[0].numpy()
        target.rewind([0], [0])
        penalties, chance = Penalties(sampling, VOCAB), 1.0
        for index, token in enumerate(output):
            row = weights(penalties.apply(logits[None, len(PROMPT) - 1 + index], [], 0), sampling)[
                0
            ]
            chance *= row[token] / row.sum()
            penalties.note(token)
        out[output] = chance
    assert sum(out.values()) == pytest.approx(1.0)
    return out


def p_value(
    fields: dict[str, Any],
    acceptance: str,
    *,
    target: type[TableEngine] = TableEngine,
    draft: type[TableEngine] = TableEngine,
    **options: Any,
) -> float:
    """P-value of a G-test of RUNS outputs. Outputs that are expected fewer than five times are
    pooled.
    """
    runtime = make_runtime(
        engine(1, target), engine(2, draft), max_draft_len=2, max_queue_size=RUNS, **options
    )
    requests = [
        make_request(PROMPT, TOKENS, f"r{seed}", seed=seed, acceptance=acceptance, **fields)
        for seed in range(RUNS)
    ]
    counts = Counter(tuple(outcome.ids) for outcome in serve(runtime, requests))
    expected = {output: RUNS * chance for output, chance in exact(Sampling(**fields)).items()}
    if any(expected[output] == 0 for output in counts):
        return 0.0
    frequent = [output for output in expected if expected[output] >= 5]
    rest = sum(expected.values()) - sum(expected[output] for output in frequent)
    pairs = [(counts[output], expected[output]) for output in frequent]
    if rest > 0:
        pairs.append((RUNS - sum(count for count, _ in pairs), rest))
    statistic = 2 * sum(count * np.log(count / mean) for count, mean in pairs if count)
    return float(chi2.sf(statistic, len(pairs) - 1))


@pytest.mark.parametrize("draft", [TableEngine, ChainingTableEngine])
@pytest.mark.parametrize("acceptance", ["rejection", "sample_match", "coupled"])
@pytest.mark.parametrize("name", SAMPLINGS)
def test_outputs_are_distributed_as_the_targets_own(
    name: str, acceptance: str, draft: type[TableEngine]
) -> None:
    assert p_value(SAMPLINGS[name], acceptance, draft=draft) > ALPHA


class MistakesProbabilities(Rejection):
    """Broken: drafts that the engine drew count as drawn from all tokens alike."""

    def adopt(self, token: int, probs: Floats | None = None) -> None:
        assert probs is not None
        super().adopt(token, np.full_like(probs, 1.0 / len(probs)))


def test_wrong_probabilities_of_chained_drafts_are_detected() -> None:
    assert_detected("plain", factory=MistakesProbabilities, draft=ChainingTableEngine)


class WithoutPenaltiesInBlock(Rejection):
    """Broken: penalties see the output so far, but not the drafts before a position."""

    def _penalised(self, logits: Floats, drafts: list[int], first: int) -> Floats:
        return super()._penalised(logits, [], 0)


def assert_detected(name: str, *, factory: Any = None, **options: Any) -> None:
    rules = RULES if factory is None else {**RULES, "rejection": factory}
    assert p_value(SAMPLINGS[name], "rejection", rules=rules, **options) < 1e-6


@pytest.mark.parametrize(
    "rule",
    [accept_by_argmax, without_residual, without_normalisation],
    ids=lambda rule: rule.__name__,
)
def test_a_broken_accept_rule_is_detected(rule: Reject) -> None:
    assert_detected("plain", factory=with_rule(rule))


def test_penalties_that_ignore_the_block_are_detected() -> None:
    assert_detected("penalties", factory=WithoutPenaltiesInBlock)


def test_a_missing_rewind_is_detected() -> None:
    assert_detected("plain", target=ForgetfulRewind)


def test_planting_the_right_rule_is_no_fault() -> None:
    from toolkit.speculative.acceptance import reject

    def intact(
        drafts: Sequence[int],
        draft_probs: Sequence[Floats],
        rows: Floats,
        uniforms: Sequence[float],
    ) -> tuple[int, int]:
        return reject(drafts, draft_probs, rows, uniforms)

    assert (
        p_value(SAMPLINGS["plain"], "rejection", rules={**RULES, "rejection": with_rule(intact)})
        > ALPHA
    )
