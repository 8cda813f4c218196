"""The accept rules, by exact enumeration: the output has the target's distribution, and planted
faults are detected.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.accept_rules import BROKEN_RULES, Reject, Rows
from tests.support.runtimes import make_request
from toolkit.errors import RequestError
from toolkit.interfaces import Sampling
from toolkit.speculative.acceptance import (
    Coupled,
    Rejection,
    SampleMatch,
    choose_rule,
    match,
    reject,
)
from toolkit.speculative.sampling import Penalties, draw, weights

VOCAB = 4


def law(
    outcome: Callable[[float], Hashable], low: float = 0.0, high: float = 1.0 - 2**-53
) -> dict[Hashable, tuple[float, float]]:
    """Value -> (measure, a point where it is taken) of a step function of one uniform, by bisection
    of its steps.

    The functions here never take a value on both sides of another one. So if both ends of a range
    are equal, the function is constant on it.
    """
    left, right = outcome(low), outcome(high)
    if left == right:
        return {left: (high - low, (low + high) / 2)}
    if high - low < 1e-13:
        return {left: (high - low, low)}
    middle = (low + high) / 2
    measures = law(outcome, low, middle)
    for value, (size, point) in law(outcome, middle, high).items():
        if value in measures:
            measures[value] = (measures[value][0] + size, measures[value][1])
        else:
            measures[value] = (size, point)
    return measures


def output_law(
    drafts: list[int], draft_probs: list[Rows], target_probs: Rows, rule: Reject
) -> dict[tuple[int, ...], float]:
    """Output tokens of one block -> probability, given its drafts, over all uniforms of the
    accept rule.
    """
    out: dict[tuple[int, ...], float] = {}

    def explore(fixed: list[float], chance: float) -> None:
        index = len(fixed)
        rest = [0.0] * (len(drafts) - index - 1)  # accepts whatever can be accepted
        survives = law(
            lambda u: rule(drafts, draft_probs, target_probs, [*fixed, u, *rest, 0.5])[0] > index
        )
        size, point = survives.get(True, (0.0, 0.0))
        if size:
            if index + 1 < len(drafts):
                explore([*fixed, point], chance * size)
            else:
                finish([*fixed, point], chance * size)
        size, point = survives.get(False, (0.0, 0.0))
        if size:
            finish([*fixed, point, *rest], chance * size)

    def finish(fixed: list[float], chance: float) -> None:
        for value, (size, _) in law(
            lambda u: rule(drafts, draft_probs, target_probs, [*fixed, u])
        ).items():
            accepted, token = value  # type: ignore[misc]
            tokens = (*drafts[:accepted], token)
            out[tokens] = out.get(tokens, 0.0) + chance * size

    if drafts:
        explore([], 1.0)
    else:
        finish([], 1.0)
    return out


def block_law(
    draft: Callable[[list[int]], Rows], target: Callable[[list[int]], Rows], k: int, rule: Reject
) -> dict[int, float]:
    """First two tokens of a block's output, as one number -> probability, over all drafts and
    uniforms.

    draft and target return the row of probabilities that follows the given drafts. A block that
    ends after one token goes on with the target's own next row, as the next block would.
    """
    total = dict.fromkeys(range(VOCAB * VOCAB), 0.0)

    def over_drafts(drafts: list[int], chance: float) -> None:
        if len(drafts) == k:
            draft_probs = [draft(drafts[:i]) for i in range(k)]
            target_probs = np.array([target(drafts[:i]) for i in range(k + 1)])
            for tokens, probability in output_law(drafts, draft_probs, target_probs, rule).items():
                if len(tokens) == 1:
                    for second, share in enumerate(target(list(tokens))):
                        total[tokens[0] * VOCAB + second] += chance * probability * share
                else:
                    total[tokens[0] * VOCAB + tokens[1]] += chance * probability
            return
        for token, share in enumerate(draft(drafts)):
            if share > 0:
                over_drafts([*drafts, token], chance * share)

    over_drafts([], 1.0)
    return total


def model(seed: int, sampling: Sampling) -> Callable[[list[int]], Rows]:
    """A next-token distribution that depends on the last token, after the request's own
    penalties and filters.
    """
    logits = np.random.default_rng(seed).normal(scale=1.5, size=(VOCAB + 1, VOCAB))

    def row(drafts: list[int]) -> Rows:
        penalties = Penalties(sampling, VOCAB)
        penalties.note(1)  # output so far
        last = drafts[-1] if drafts else VOCAB
        weight = weights(penalties.apply(logits[None, last], drafts, len(drafts)), sampling)[0]
        return weight / weight.sum()

    return row


def distance(seed: int, sampling: Sampling, k: int, rule: Reject) -> float:
    """Total variation between the output of one block and the target's own, over the first two
    tokens.
    """
    draft, target = model(seed, sampling), model(seed + 1000, sampling)
    actual = block_law(draft, target, k, rule)
    expected = {
        a * VOCAB + b: target([])[a] * target([a])[b] for a in range(VOCAB) for b in range(VOCAB)
    }
    return sum(abs(actual[pair] - expected[pair]) for pair in expected) / 2


SAMPLINGS = {
    "plain": Sampling(temperature=1.0),
    "cold": Sampling(temperature=0.5),
    "top-k": Sampling(temperature=1.0, top_k=2),
    "top-p": Sampling(temperature=1.0, top_p=0.7),
    "penalties": Sampling(temperature=1.0, frequency_penalty=0.7, presence_penalty=0.9),
    "all": Sampling(
        temperature=0.8, top_k=3, top_p=0.9, frequency_penalty=-0.4, presence_penalty=0.6
    ),
}


def match_samples(
    drafts: Sequence[int],
    draft_probs: Sequence[Rows],
    target_probs: Rows,
    uniforms: Sequence[float],
) -> tuple[int, int]:
    """sample_match with the enumeration's signature: the target's sample at position i is drawn
    with uniform i.
    """
    return match(drafts, lambda index: draw(target_probs[index], uniforms[index]))


@pytest.mark.parametrize("name", SAMPLINGS)
@pytest.mark.parametrize("k", [0, 1, 2])
def test_rejection_gives_the_targets_distribution(name: str, k: int) -> None:
    for seed in range(3):
        assert distance(seed, SAMPLINGS[name], k, reject) < 1e-9


@settings(max_examples=15)
@given(
    seed=st.integers(0, 10**6),
    temperature=st.floats(0.2, 3.0),
    top_p=st.floats(0.3, 1.0),
    penalty=st.floats(-1.0, 1.0),
)
def test_rejection_gives_the_targets_distribution_whatever_the_sampling(
    seed: int, temperature: float, top_p: float, penalty: float
) -> None:
    sampling = Sampling(temperature=temperature, top_p=top_p, frequency_penalty=penalty)
    assert distance(seed, sampling, 1, reject) < 1e-9


@pytest.mark.parametrize("name", SAMPLINGS)
def test_sample_match_gives_the_targets_distribution(name: str) -> None:
    """The recovered token is the sample that differs from the draft: one uniform decides both."""
    sampling = SAMPLINGS[name]
    draft, target = model(1, sampling), model(1001, sampling)
    chances = dict.fromkeys(range(VOCAB), 0.0)
    for token, share in enumerate(draft([])):
        rows = np.array([target([]), target([token])])
        decide = functools.partial(match_samples, [token], [], rows)
        for value, (size, _) in law(lambda u, decide=decide: decide([u, 0.5])).items():  # type: ignore[misc]
            accepted, recovered = value  # type: ignore[misc]
            chances[token if accepted else recovered] += share * size
    assert list(chances.values()) == pytest.approx(target([]).tolist(), abs=1e-9)


@pytest.mark.parametrize("rule", BROKEN_RULES, ids=lambda rule: rule.__name__)
def test_the_enumeration_detects_a_broken_rule(rule: Reject) -> None:
    assert distance(0, SAMPLINGS["plain"], 1, rule) > 0.02


def test_drafts_are_always_accepted_if_the_rows_agree() -> None:
    row = np.array([0.25, 0.5, 0.25, 0.0])
    assert reject(
        [1, 2], [row, row], np.array([row, row, row]), [1.0 - 2**-53, 1.0 - 2**-53, 0.9]
    ) == (2, 2)


def test_a_draft_that_the_target_excludes_is_never_accepted() -> None:
    assert reject(
        [3], [np.array([0.0, 0.0, 0.0, 1.0])], np.array([[0.5, 0.5, 0.0, 0.0]] * 2), [0.0, 0.6]
    ) == (0, 1)


def test_match_accepts_the_common_beginning() -> None:
    # No choice is requested after the first that differs.
    assert match([5, 6, 7], [5, 6, 9].__getitem__) == (2, 9)
    assert match([], [4].__getitem__) == (0, 4)
    assert match([5], [5, 8, 0, 0].__getitem__) == (1, 8)  # a padded row


def test_the_rule_follows_from_temperature_requested_rule_and_seed() -> None:
    assert choose_rule(make_request(acceptance="rejection"), "auto") == "greedy"
    assert choose_rule(make_request(temperature=1.0), "auto") == "rejection"
    assert choose_rule(make_request(temperature=1.0, seed=3), "auto") == "coupled"
    assert choose_rule(make_request(temperature=1.0, seed=3), "sample_match") == "sample_match"
    assert (
        choose_rule(make_request(temperature=1.0, seed=3, acceptance="auto"), "auto") == "coupled"
    )
    assert (
        choose_rule(make_request(temperature=1.0, acceptance="coupled"), "rejection") == "coupled"
    )
    with pytest.raises(RequestError, match="known: auto"):
        choose_rule(make_request(temperature=1.0, acceptance="greedy"), "auto")


@pytest.mark.parametrize("rule", [Rejection, Coupled, SampleMatch])
def test_what_a_probe_sees_is_on_average_what_the_rule_accepts(rule: type[Rejection]) -> None:
    """Over the tokens that the target writes: the sum of min(draft, target), or for SampleMatch of
    their product.
    """
    sampling = Sampling(temperature=0.7, seed=1)
    generator = np.random.default_rng(4)
    target, draft = generator.normal(size=(2, 1, 12))
    target_probs, draft_probs = (
        (rows := weights(logits, sampling)) / rows.sum() for logits in (target, draft)
    )
    judge = rule(sampling, 12)
    seen = sum(
        float(target_probs[0, token])
        * judge.acceptable(draft, [token], judge.chances(target, [token]))[0]
        for token in range(12)
    )
    accepted = np.minimum(target_probs, draft_probs)
    if rule is SampleMatch:
        accepted = target_probs * draft_probs
    assert seen == pytest.approx(float(accepted.sum()))


@pytest.mark.parametrize(("vocab_size", "most"), [(2048, 32), (128_000, 5)])
def test_a_large_vocabulary_has_little_noise_made_in_advance(vocab_size: int, most: int) -> None:
    """A burst has few steps then, and copying the noise would take longer than they do."""
    rule = Coupled(Sampling(temperature=0.7, seed=3), vocab_size)
    position = 10
    for _ in range(10):
        rule.foresee(position, 4)
        rule.pass_step(position, 4, 4, 4)
        position += 5
    races = rule.foresee(position, 4).races
    assert races is not None and len(races) == most
