from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.support.endpoint import VOCAB, Fault, ScriptedEndpoint, encode, gumbel, shortened
from toolkit.client import RequestTiming
from toolkit.records.judged import Divergence, Parity
from toolkit.validate.parity import ArmTexts, Judge, compare, margin_bins, unrepeatable
from toolkit.validate.reference import Reference

PROMPT = "def read(path):"
MARGIN = 0.05


def answers(endpoint: ScriptedEndpoint, **options: object) -> tuple[RequestTiming, RequestTiming]:
    asked = {"temperature": 0.0, "max_tokens": 16, **options}
    return endpoint.measure([PROMPT], **asked, num_draft_tokens=0)[0], endpoint.measure(
        [PROMPT], **asked
    )[0]


def compared(
    plain: RequestTiming,
    others: list[RequestTiming],
    reference: Reference,
    margin: float = MARGIN,
    **judge: Any,
) -> Parity:
    """One prompt, one speculative arm, its rounds."""
    return compare(
        [plain], [ArmTexts("speculative", 4, [others])], Judge(reference, margin, **judge)
    )


def judged(endpoint: ScriptedEndpoint) -> Parity:
    plain, speculative = answers(endpoint)
    return compared(plain, [speculative], endpoint.reference)


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
    assert (parity.broken, divergence.kind, divergence.position) == (1, "broken", 7)
    assert divergence.margin is not None and divergence.margin >= 1.0
    assert (divergence.plain_rank, divergence.speculative_rank) == (0, 1)
    assert divergence.speculative_gap == pytest.approx(divergence.margin)
    assert "the speculative arm chose the reference's number 2" in divergence.detail


def test_a_near_tie_is_numerically_equivalent() -> None:
    parity = judged(ScriptedEndpoint(faults=[Fault(PROMPT, position=3, margin=0.01)]))
    assert (parity.equivalent, parity.suspicious, parity.broken, parity.identical) == (1, 0, 0, 0)
    assert only(parity).margin == pytest.approx(0.01)


def test_a_third_token_at_a_near_tie_of_two_others_is_a_fault() -> None:
    """The margin is small, but rounding cannot explain a token that is far below both."""
    divergence = only(
        judged(ScriptedEndpoint(faults=[Fault(PROMPT, position=3, rank=5, margin=0.01)]))
    )
    assert divergence.kind == "broken"
    assert divergence.margin == pytest.approx(0.01)
    assert divergence.speculative_rank == 5


def test_a_text_that_ends_early_without_reason_is_a_fault() -> None:
    endpoint = ScriptedEndpoint()
    plain, speculative = answers(endpoint)
    short = shortened(speculative, 9)
    divergence = only(compared(plain, [short], endpoint.reference))
    assert (divergence.kind, divergence.position, divergence.speculative_token) == (
        "broken",
        9,
        None,
    )
    assert "ended early" in divergence.detail


@pytest.mark.parametrize(("below", "kind"), [(0.02, "equivalent"), (2.0, "broken")])
def test_an_end_token_is_judged_by_its_own_score(below: float, kind: str) -> None:
    endpoint = ScriptedEndpoint()
    plain, speculative = answers(endpoint)
    stopped = shortened(speculative, 9, finish_reason="stop")

    def logits(ids: object) -> np.ndarray:
        scores = np.zeros(VOCAB)
        scores[plain.token_ids[9]] = 5.0
        scores[0] = 5.0 - below  # the end token
        return scores

    divergence = only(compared(plain, [stopped], Reference(encode, logits, eos_token_ids=(0,))))
    assert divergence.kind == kind
    assert divergence.speculative_gap == pytest.approx(below)


def test_same_tokens_with_another_text_is_a_fault() -> None:
    endpoint = ScriptedEndpoint()
    plain, speculative = answers(endpoint)
    divergence = only(compared(plain, [replace(speculative, text="?")], endpoint.reference))
    assert divergence.kind == "broken"
    assert "detokenization" in divergence.detail


def test_the_earliest_of_several_rounds_counts_once() -> None:
    endpoint = ScriptedEndpoint(faults=[Fault(PROMPT, position=8)])
    plain, late = answers(endpoint)
    _, early = answers(ScriptedEndpoint(faults=[Fault(PROMPT, position=2)]))
    parity = compared(plain, [late, early, plain], endpoint.reference)
    assert only(parity).position == 2
    assert parity.broken == 1


def test_seeded_texts_are_judged_by_logits_plus_noise() -> None:
    """The plain token is the best of logits + T * noise, which is not the best logit."""
    endpoint = ScriptedEndpoint(faults=[Fault(PROMPT, position=5, seeded=True)])
    plain, speculative = answers(endpoint, temperature=0.8, seed=11)
    divergence = only(
        compared(plain, [speculative], endpoint.reference, temperature=0.8, seeds=[11])
    )
    assert (
        divergence.position,
        divergence.seed,
        divergence.plain_rank,
        divergence.speculative_rank,
    ) == (5, 11, 0, 1)
    ids = (*encode(PROMPT), *plain.token_ids[:5])
    scores = endpoint.reference.next_logits(ids) + 0.8 * gumbel(11, len(ids), VOCAB)
    best, second = np.sort(scores)[::-1][:2]
    assert divergence.margin == pytest.approx(best - second)
    wide = compared(
        plain,
        [speculative],
        endpoint.reference,
        float(best - second) + 1e-9,
        temperature=0.8,
        seeds=[11],
    )
    assert only(wide).kind == "equivalent"


def test_seeded_divergence_without_the_noise_is_unexplained() -> None:
    endpoint = ScriptedEndpoint(faults=[Fault(PROMPT, position=5, seeded=True)])
    plain, speculative = answers(endpoint, temperature=0.8, seed=11)
    blind = replace(endpoint.reference, noise=None)
    assert compared(plain, [speculative], blind, temperature=0.8, seeds=[11]).unexplained == 1


def test_a_reference_that_reads_another_prompt_explains_nothing() -> None:
    endpoint = ScriptedEndpoint(faults=[Fault(PROMPT, position=5)])
    plain, speculative = answers(endpoint)
    other = replace(endpoint.reference, encode=lambda prompt: encode(prompt)[1:])
    divergence = only(compared(plain, [speculative], other))
    assert divergence.kind == "unexplained"
    assert "do not read the same prompt" in divergence.detail


def test_prompts_whose_text_changes_between_rounds_are_counted() -> None:
    endpoint = ScriptedEndpoint()
    plain, _ = answers(endpoint)
    assert unrepeatable([[plain, plain], [plain, shortened(plain, 3)]]) == 1


@pytest.mark.parametrize(
    ("margin", "kind"),
    [(0.049, "equivalent"), (0.051, "suspicious"), (0.49, "suspicious"), (0.51, "broken")],
)
def test_the_class_follows_the_margin_between_the_two_best(margin: float, kind: str) -> None:
    divergence = only(judged(ScriptedEndpoint(faults=[Fault(PROMPT, position=3, margin=margin)])))
    assert divergence.kind == kind


def at_lengths(*positions: int | None, margin: float = 0.3) -> Parity:
    """One prompt at draft lengths 1, 2, ..., each diverging at its position."""
    plain, same = answers(ScriptedEndpoint())
    marks = [Fault(PROMPT, position=at, margin=margin) for at in positions if at is not None]
    said = [
        same if at is None else answers(ScriptedEndpoint(faults=[Fault(PROMPT, at)]))[1]
        for at in positions
    ]
    arms = [ArmTexts("speculative", number, [[text]]) for number, text in enumerate(said, 1)]
    return compare([plain], arms, Judge(ScriptedEndpoint(faults=marks).reference, MARGIN))


def test_a_suspicious_place_that_moves_with_the_draft_length_is_broken() -> None:
    still, moving = at_lengths(4, 4), at_lengths(4, 7)
    assert (still.suspicious, still.broken, still.same_place, still.moved) == (1, 0, 1, 0)
    assert (moving.suspicious, moving.broken, moving.same_place, moving.moved) == (0, 1, 0, 1)
    assert "moves with the draft length" in moving.divergences[0].detail


def test_near_ties_may_move() -> None:
    parity = at_lengths(4, 7, margin=0.01)
    assert (parity.equivalent, parity.broken, parity.moved) == (1, 0, 1)


def test_a_prompt_counts_once_by_its_worst_arm_and_arms_are_counted_apart() -> None:
    parity = at_lengths(None, 4, 4, margin=2.0)
    assert (parity.prompts, parity.broken, parity.rate) == (1, 1, 1.0)
    assert [(arm.draft_len, arm.identical, arm.broken) for arm in parity.arms] == [
        (1, 1, 0),
        (2, 0, 1),
        (3, 0, 1),
    ]
    assert parity.arms_equal == 0
    assert sum(one.count for one in parity.severity) == 2


def test_margins_are_binned_with_those_that_differ() -> None:
    bins = margin_bins([0.0, 0.005, 0.3, 5.0], [True, False, True, False])
    assert [(one.low, one.high, one.count, one.differing) for one in bins if one.count] == [
        (0.0, 0.01, 2, 1),
        (0.25, 0.5, 1, 1),
        (2.0, None, 1, 0),
    ]
