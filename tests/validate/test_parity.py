from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.support.endpoint import VOCAB, Fault, ScriptedEndpoint, encode, gumbel, shortened
from toolkit.client import RequestTiming
from toolkit.records import Divergence, Parity
from toolkit.validate.parity import compare, unrepeatable
from toolkit.validate.reference import Reference

PROMPT = "def read(path):"
MARGIN = 0.05


def answers(endpoint: ScriptedEndpoint, **options: object) -> tuple[RequestTiming, RequestTiming]:
    asked = {"temperature": 0.0, "max_tokens": 16, **options}
    return endpoint.measure([PROMPT], **asked, num_draft_tokens=0)[0], endpoint.measure([PROMPT], **asked)[0]


def judged(endpoint: ScriptedEndpoint) -> Parity:
    plain, speculative = answers(endpoint)
    return compare([(plain, [speculative])], endpoint.reference, MARGIN)


def only(parity: Parity) -> Divergence:
    (divergence,) = parity.divergences
    return divergence


def test_identical_texts_have_no_divergence() -> None:
    parity = judged(ScriptedEndpoint())
    assert (parity.prompts, parity.identical, parity.rate, parity.divergences) == (1, 1, 0.0, ())
    assert parity.compared_tokens == 16


def test_a_token_that_differs_at_a_large_margin_is_a_fault_at_its_position() -> None:
    parity = judged(ScriptedEndpoint(faults=[Fault(PROMPT, position=7)]))
    divergence = only(parity)
    assert (parity.faults, divergence.kind, divergence.position) == (1, "fault", 7)
    assert divergence.margin is not None and divergence.margin >= 1.0
    assert (divergence.plain_rank, divergence.speculative_rank) == (0, 1)
    assert divergence.speculative_gap == pytest.approx(divergence.margin)
    assert "the speculative arm chose the reference's number 2" in divergence.detail


def test_a_near_tie_is_counted_and_is_no_fault() -> None:
    parity = judged(ScriptedEndpoint(faults=[Fault(PROMPT, position=3, margin=0.01)]))
    assert (parity.near_ties, parity.faults, parity.identical) == (1, 0, 0)
    assert only(parity).margin == pytest.approx(0.01)


def test_a_third_token_at_a_near_tie_of_two_others_is_a_fault() -> None:
    """The margin is small, but rounding cannot explain a token that is far below both."""
    divergence = only(judged(ScriptedEndpoint(faults=[Fault(PROMPT, position=3, rank=5, margin=0.01)])))
    assert divergence.kind == "fault"
    assert divergence.margin == pytest.approx(0.01)
    assert divergence.speculative_rank == 5


def test_a_text_that_ends_early_without_reason_is_a_fault() -> None:
    endpoint = ScriptedEndpoint()
    plain, speculative = answers(endpoint)
    short = shortened(speculative, 9)
    divergence = only(compare([(plain, [short])], endpoint.reference, MARGIN))
    assert (divergence.kind, divergence.position, divergence.speculative_token) == ("fault", 9, None)
    assert "ended early" in divergence.detail


@pytest.mark.parametrize(("below", "kind"), [(0.02, "near-tie"), (2.0, "fault")])
def test_an_end_token_is_judged_by_its_own_score(below: float, kind: str) -> None:
    endpoint = ScriptedEndpoint()
    plain, speculative = answers(endpoint)
    stopped = shortened(speculative, 9, finish_reason="stop")

    def logits(ids: object) -> np.ndarray:
        scores = np.zeros(VOCAB)
        scores[plain.token_ids[9]] = 5.0
        scores[0] = 5.0 - below  # the end token
        return scores

    divergence = only(compare([(plain, [stopped])], Reference(encode, logits, eos_token_ids=(0,)), MARGIN))
    assert divergence.kind == kind
    assert divergence.speculative_gap == pytest.approx(below)


def test_same_tokens_with_another_text_is_a_fault() -> None:
    endpoint = ScriptedEndpoint()
    plain, speculative = answers(endpoint)
    divergence = only(compare([(plain, [replace(speculative, text="?")])], endpoint.reference, MARGIN))
    assert divergence.kind == "fault"
    assert "detokenization" in divergence.detail


def test_the_earliest_of_several_rounds_counts_once() -> None:
    endpoint = ScriptedEndpoint(faults=[Fault(PROMPT, position=8)])
    plain, late = answers(endpoint)
    _, early = answers(ScriptedEndpoint(faults=[Fault(PROMPT, position=2)]))
    parity = compare([(plain, [late, early, plain])], endpoint.reference, MARGIN)
    assert only(parity).position == 2
    assert parity.faults == 1


def test_seeded_texts_are_judged_by_logits_plus_noise() -> None:
    """The plain token is the best of logits + T * noise, which is not the best logit."""
    endpoint = ScriptedEndpoint(faults=[Fault(PROMPT, position=5, seeded=True)])
    plain, speculative = answers(endpoint, temperature=0.8, seed=11)
    pairs = [(plain, [speculative])]
    divergence = only(compare(pairs, endpoint.reference, MARGIN, temperature=0.8, seeds=[11]))
    assert (divergence.position, divergence.seed, divergence.plain_rank, divergence.speculative_rank) == (5, 11, 0, 1)
    ids = (*encode(PROMPT), *plain.token_ids[:5])
    scores = endpoint.reference.next_logits(ids) + 0.8 * gumbel(11, len(ids), VOCAB)
    best, second = np.sort(scores)[::-1][:2]
    assert divergence.margin == pytest.approx(best - second)
    wide = compare(pairs, endpoint.reference, float(best - second) + 1e-9, temperature=0.8, seeds=[11])
    assert only(wide).kind == "near-tie"


def test_seeded_divergence_without_the_noise_is_unexplained() -> None:
    endpoint = ScriptedEndpoint(faults=[Fault(PROMPT, position=5, seeded=True)])
    plain, speculative = answers(endpoint, temperature=0.8, seed=11)
    blind = replace(endpoint.reference, noise=None)
    assert compare([(plain, [speculative])], blind, MARGIN, temperature=0.8, seeds=[11]).unexplained == 1


def test_a_reference_that_reads_another_prompt_explains_nothing() -> None:
    endpoint = ScriptedEndpoint(faults=[Fault(PROMPT, position=5)])
    plain, speculative = answers(endpoint)
    other = replace(endpoint.reference, encode=lambda prompt: encode(prompt)[1:])
    divergence = only(compare([(plain, [speculative])], other, MARGIN))
    assert divergence.kind == "unexplained"
    assert "do not read the same prompt" in divergence.detail


def test_prompts_whose_text_changes_between_rounds_are_counted() -> None:
    endpoint = ScriptedEndpoint()
    plain, _ = answers(endpoint)
    assert unrepeatable([[plain, plain], [plain, shortened(plain, 3)]]) == 1
