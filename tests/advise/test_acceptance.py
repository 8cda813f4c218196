"""Acceptance without a speculative run: the formulas agree with enumeration and with the paper's
tables, and the replay with the runtime.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.runtimes import make_request, make_runtime, serve
from tests.support.step_engines import TableEngine
from toolkit.advise.acceptance import (
    Drafted,
    coupled_match,
    drafted_by_lookup,
    drafted_by_model,
    expected_tokens,
    leviathan_speedup,
    replay,
    rule_probabilities,
)

# Leviathan et al. 2023 (arXiv:2211.17192): Table 1, c = 0: (alpha, gamma) -> operations, speed.
TABLE_1 = [
    (0.6, 2, 1.53, 1.96),
    (0.7, 3, 1.58, 2.53),
    (0.8, 2, 1.23, 2.44),
    (0.8, 5, 1.63, 3.69),
    (0.9, 2, 1.11, 2.71),
    (0.9, 10, 1.60, 6.86),
]
# Table 2: gamma, alpha, c -> the predicted improvement.
TABLE_2 = [
    (7, 0.75, 0.02, 3.2),
    (7, 0.80, 0.04, 3.3),
    (7, 0.82, 0.11, 2.5),
    (7, 0.62, 0.02, 2.3),
    (5, 0.68, 0.04, 2.4),
    (3, 0.71, 0.11, 2.0),
    (5, 0.65, 0.02, 2.4),
    (5, 0.73, 0.04, 2.6),
    (3, 0.74, 0.11, 2.0),
    (5, 0.53, 0.02, 1.9),
    (3, 0.55, 0.04, 1.8),
    (3, 0.56, 0.11, 1.6),
]


@pytest.mark.parametrize(("alpha", "gamma", "operations", "speed"), TABLE_1)
def test_table_1_of_leviathan_is_reproduced(
    alpha: float, gamma: int, operations: float, speed: float
) -> None:
    assert leviathan_speedup(alpha, gamma, 0.0) == pytest.approx(speed, abs=0.0051)
    # Theorem 3.11 with c_hat = 0: what the target computes, gamma + 1 tokens a run, over what it
    # yields.
    assert (gamma + 1) / expected_tokens(alpha, gamma) == pytest.approx(operations, abs=0.0051)


@pytest.mark.parametrize(("gamma", "alpha", "c", "predicted"), TABLE_2)
def test_table_2_of_leviathan_is_reproduced(
    gamma: int, alpha: float, c: float, predicted: float
) -> None:
    """alpha and c have only two digits in the paper, which moves the result by up to 0.1."""
    assert leviathan_speedup(alpha, gamma, c) == pytest.approx(predicted, abs=0.1)


@given(st.integers(0, 2**32 - 1))
def test_coupled_probability_is_that_of_shared_noise(seed: int) -> None:
    random = np.random.default_rng(seed)
    p, q = random.dirichlet(np.full(5, 0.7)), random.dirichlet(np.full(5, 0.7))
    token = int(random.integers(5))
    exact = [1.0 / sum(max(p[j] / p[i], q[j] / q[i]) for j in range(5)) for i in range(5)]
    any_token, this_token = coupled_match(p, q, token)
    assert any_token == pytest.approx(sum(exact), abs=1e-6)
    assert this_token == pytest.approx(exact[token], abs=1e-6)


def test_coupled_probability_agrees_with_races() -> None:
    random = np.random.default_rng(3)
    p, q = random.dirichlet(np.ones(6)), random.dirichlet(np.ones(6))
    noise = random.standard_exponential((200_000, 6))
    same = ((p / noise).argmax(1) == (q / noise).argmax(1)).mean()
    assert coupled_match(p, q, 0)[0] == pytest.approx(same, abs=0.005)


@given(st.integers(0, 2**32 - 1))
def test_keeping_given_the_token_averages_to_alpha(seed: int) -> None:
    """The replay relies on this for every rule: the sum over x of p(x) * kept(x) is alpha."""
    random = np.random.default_rng(seed)
    p, q = random.dirichlet(np.ones(5)), random.dirichlet(np.ones(5))
    given_token = rule_probabilities(np.tile(p, (5, 1)), np.tile(q, (5, 1)), np.arange(5))
    for rule, (alpha, kept) in given_token.items():
        assert (p * kept).sum() == pytest.approx(alpha[0], abs=1e-6), rule
        assert (kept <= 1 + 1e-9).all()


def test_replay_of_equal_independent_acceptance_is_the_formula() -> None:
    """In a long text, whose end hardly counts, tokens per step are (1 - a^(k + 1)) / (1 - a)."""
    long = drafted_by_model(np.full(6000, 0.7), np.full(6000, 0.7), 8, 6001)
    for draft_len in (1, 3, 8):
        outcome = replay([long], draft_len)
        assert outcome.tokens.sum() / outcome.steps.sum() == pytest.approx(
            expected_tokens(0.7, draft_len), rel=2e-3
        )
        assert outcome.acceptance_length == pytest.approx(expected_tokens(0.7, draft_len), rel=2e-3)


def test_acceptance_lengths_are_of_the_texts_that_are_weighted() -> None:
    texts = [
        drafted_by_model(np.full(60, alpha), np.full(60, alpha), 3, 61) for alpha in (0.9, 0.4)
    ]
    both, twice = replay(texts, 3), replay([texts[0], *texts], 3)
    lengths = both.acceptance_lengths(np.array([[1.0, 1.0], [1.0, 0.0], [0.0, 1.0], [2.0, 1.0]]))
    assert lengths[0] == both.acceptance_length
    assert lengths[1] > lengths[3] > lengths[0] > lengths[2]
    assert lengths[3] == pytest.approx(twice.acceptance_length)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=24), st.integers(1, 5), st.integers(0, 4))
def test_replay_counts_every_token_once(kept: list[float], draft_len: int, unused: int) -> None:
    """Every token is an accepted draft or the token that a step adds; only the last step of a text
    may end with an accepted draft.
    """
    text = drafted_by_model(np.array(kept), np.array(kept), 5, len(kept) + 1 + unused)
    outcome = replay([text], draft_len)
    made = float(outcome.accepted_by_place.sum() + outcome.steps.sum())
    assert len(kept) - 1e-9 <= made <= len(kept) + 1 + 1e-9
    if unused == 0:
        assert made == pytest.approx(len(kept))
    assert outcome.steps_by_width.sum() == pytest.approx(outcome.steps.sum())


def greedy_texts(
    target: TableEngine, draft: TableEngine, prompts: list[list[int]], tokens: int
) -> list[Drafted]:
    runtime = make_runtime(target)
    outcomes = serve(
        runtime, [make_request(p, tokens, str(i), temperature=0.0) for i, p in enumerate(prompts)]
    )
    texts = []
    for prompt, outcome in zip(prompts, outcomes, strict=True):
        ids = prompt + outcome.ids
        logits = torch.cat(
            [
                draft.forward([0], torch.tensor([ids[i : i + 8]])).clone()
                for i in range(0, len(ids), 8)
            ],
            1,
        )
        draft.rewind([0], [0])
        proposed = logits[0].argmax(-1).numpy()[len(prompt) : len(ids) - 1]
        kept = (proposed == np.array(outcome.ids[1:])).astype(float)
        texts.append(drafted_by_model(kept, kept, 6, tokens))
    return texts


@pytest.mark.parametrize("draft_len", [1, 2, 3, 6])
def test_greedy_replay_is_the_run(draft_len: int) -> None:
    """For every text, the replay has the steps and the drafted and accepted tokens by place that
    the runtime counts when it really speculates.
    """
    prompts = [[1 + i, 2, 3 + i] for i in range(8)]
    target, draft = TableEngine(1, closeness=0.8), TableEngine(2, closeness=0.8)
    replayed = replay(greedy_texts(target, draft, prompts, 24), draft_len)
    outcomes = serve(
        make_runtime(target, draft, max_draft_len=draft_len),
        [make_request(p, 24, str(i), temperature=0.0) for i, p in enumerate(prompts)],
    )
    stats = [outcome.stats for outcome in outcomes]
    assert replayed.steps.tolist() == [s.verify_steps for s in stats]
    assert replayed.drafted_by_place.tolist() == [list(s.drafted_by_position) for s in stats]
    assert replayed.accepted_by_place.tolist() == [list(s.accepted_by_position) for s in stats]
    rate = replayed.accepted_by_place.sum() / replayed.drafted_by_place.sum()
    assert 0.2 < rate < 0.95  # otherwise nothing was tested


def test_lookup_drafts_are_kept_where_the_text_repeats() -> None:
    def after_last(ids: list[int], room: int) -> list[int]:
        earlier = [i for i in range(len(ids) - 1) if ids[i] == ids[-1]]
        return ids[earlier[-1] + 1 :][:room] if earlier else []

    text = drafted_by_lookup([5, 6, 7], [5, 6, 7, 9, 5], after_last, 3, 5)
    assert text.ready.tolist() == [3, 3, 3, 0]
    assert text.kept.tolist() == [[1, 1, 0], [1, 0, 0], [0, 0, 0], [0, 0, 0]]
    outcome = replay([text], 3)
    # The first step accepts 6 7 and adds 9; the second adds 5, with nothing to draft.
    assert outcome.steps.tolist() == [2.0]
    assert outcome.steps_by_width.tolist() == [[1.0, 0.0, 0.0, 1.0]]
