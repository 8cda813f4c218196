"""Compute how many draft tokens a target would accept, without speculating.

The target writes texts by plain decoding. Then one teacher-forced pass of target and draft over the
texts gives, for every output token, the probability that a draft token in its place is accepted.
This probability is called alpha. It depends on the acceptance rule:

    greedy                     1 if the draft's argmax is the token, else 0
    rejection                  sum of min(p, q)
    coupled                    sum over i of 1 / sum over j of max(p_j / p_i, q_j / q_i)
    sample_match               sum of p q: the draft samples
    sample_match_greedy_draft  p(argmax q): the draft takes its best token, as TensorRT-LLM's
                               two-model flow does

p is the target's distribution and q the draft's, both after temperature and filters. The third is
the probability that two exponential races with shared noise have the same winner (Daliri et al.
2024, arXiv:2408.07978, 3).

To predict the effect of a draft length, the text itself is replayed. Given the token x that the
target chose, a draft in its place is accepted with another probability: min(1, q(x) / p(x)) under
rejection, and so on. Under every rule the output has the target's distribution, and given the
output these events are independent. So the expected numbers of steps and of accepted tokens follow
by summing over the places where a block may begin. The replay does not assume that acceptance is
the same everywhere, nor that neighbouring tokens are independent. For greedy decoding all
probabilities are 0 or 1, and the replay equals the run.

Drafts by prompt lookup depend on where a block begins, so the probabilities are kept in a table
[start, place in block].
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from toolkit.words import AlphaRule

__all__ = [
    "RULES",
    "Drafted",
    "Replay",
    "coupled_match",
    "drafted_by_lookup",
    "drafted_by_model",
    "expected_tokens",
    "leviathan_speedup",
    "replay",
    "rule_probabilities",
]

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

RULES: tuple[AlphaRule, ...] = (
    "greedy",
    "rejection",
    "coupled",
    "sample_match",
    "sample_match_greedy_draft",
)
# Tokens with a smaller probability are left out of the coupled sum; all of them together change it
# by less than 1e-3.
NEGLIGIBLE_PROBABILITY = 1e-9


@dataclass(frozen=True, slots=True)
class Drafted:
    """The drafts for one text of n output tokens under one acceptance rule.

    A place is an output token except the first, which prefill chooses and which is never drafted.
    alpha [n - 1]: probability that a draft token is accepted at the place, averaged over the
    target's choices; NaN if nothing would be drafted there. kept [n - 1, width]: entry (s, j) is
    the probability that draft j of a block that begins at place s is accepted, given the text and
    that the drafts before it are accepted. ready [n - 1]: the number of drafts available at the
    place. limit: the request's max_tokens, which bounds a block.
    """

    alpha: Floats
    kept: Floats
    ready: Ints
    limit: int


def rule_probabilities(
    p: Floats, q: Floats, tokens: Ints
) -> dict[AlphaRule, tuple[Floats, Floats]]:
    """For every sampling rule: alpha, and the probability of acceptance given the target's token.

    p, q [n, vocab]: distributions of target and draft, rows sum to 1. tokens [n]: drawn from p.
    Both results are [n].
    """
    rows = np.arange(len(tokens))
    px, qx = p[rows, tokens], q[rows, tokens]
    best = q.argmax(axis=-1)
    coupled = [coupled_match(p[row], q[row], int(tokens[row])) for row in rows]
    return {
        "rejection": (np.minimum(p, q).sum(axis=-1), np.minimum(1.0, qx / px)),
        "coupled": (
            np.array([any_token for any_token, _ in coupled]),
            np.array([this_token for _, this_token in coupled]) / px,
        ),
        "sample_match": ((p * q).sum(axis=-1), qx),
        "sample_match_greedy_draft": (p[rows, best], (best == tokens).astype(np.float64)),
    }


def coupled_match(p: Floats, q: Floats, token: int) -> tuple[float, float]:
    """The probability that both races have the same winner, and that this winner is `token`.

    p, q [vocab]. Token i wins both with probability 1 / sum_j max(p_j / p_i, q_j / q_i). If the
    tokens are sorted by q / p, the maximum is the first term for all j up to i and the second term
    for all later j, so two running sums give the result for every i.
    """
    candidates = np.flatnonzero(np.maximum(p, q) > NEGLIGIBLE_PROBABILITY)
    p_sorted, q_sorted = p[candidates], q[candidates]
    with np.errstate(divide="ignore", invalid="ignore"):
        order = np.argsort(q_sorted / p_sorted, kind="stable")
        p_sorted, q_sorted = p_sorted[order], q_sorted[order]
        p_up_to = np.cumsum(p_sorted)
        q_after = q_sorted.sum() - np.cumsum(q_sorted)
        wins_both = 1.0 / (p_up_to / p_sorted + np.maximum(q_after, 0.0) / q_sorted)
    wins_both[(p_sorted == 0.0) | (q_sorted == 0.0)] = 0.0
    place = np.flatnonzero(candidates[order] == token)
    return float(wins_both.sum()), float(wins_both[place[0]]) if len(place) else 0.0


def drafted_by_model(alpha: Floats, kept: Floats, width: int, limit: int) -> Drafted:
    """The drafts of a teacher-forced draft model.

    Its proposal for a token depends on the text before the token, not on where the block began.
    alpha, kept: [places].
    """
    padded = np.concatenate([kept, np.zeros(width)])
    table = np.lib.stride_tricks.sliding_window_view(padded, width)[: len(kept)].copy()
    return Drafted(alpha, table, np.full(len(kept), width, dtype=np.int64), limit)


def drafted_by_lookup(
    prompt: Sequence[int],
    output: Sequence[int],
    lookup: Callable[[Sequence[int], int], Sequence[int]],
    width: int,
    limit: int,
    target_probs: Callable[[int, int], float] | None = None,
) -> Drafted:
    """The drafts of prompt lookup, which copies tokens from the text.

    Under every rule such a draft is accepted exactly if it is the token that the target chose.
    lookup(ids, room) returns at most `room` tokens that may follow ids. target_probs(place, token)
    is the target's probability of the token there, for alpha; None for greedy decoding.
    """
    ids, places = [*prompt, *output], len(output) - 1
    alpha, kept = np.full(places, np.nan), np.zeros((places, width))
    ready = np.zeros(places, dtype=np.int64)
    for place in range(places):
        start = len(prompt) + 1 + place
        drafts = list(lookup(ids[:start], width))
        ready[place] = len(drafts)
        for offset, draft in enumerate(drafts):
            kept[place, offset] = float(start + offset < len(ids) and ids[start + offset] == draft)
        if drafts:
            alpha[place] = (
                kept[place, 0] if target_probs is None else target_probs(place, drafts[0])
            )
    return Drafted(alpha, kept, ready, limit)


@dataclass(frozen=True, slots=True)
class Replay:
    """Expected counts of speculating with one draft length; the first axis is the text.

    steps_by_width [texts, draft_len + 1]: verify steps by the number of tokens they drafted.
    drafted_by_place, accepted_by_place [texts, draft_len]: verify steps that drafted, and that
    accepted, the token at this place of the block. tokens [texts]: output tokens except the first,
    the same in every replay of the text.
    """

    draft_len: int
    steps_by_width: Floats
    drafted_by_place: Floats
    accepted_by_place: Floats
    tokens: Floats

    @property
    def steps(self) -> Floats:
        return np.asarray(self.steps_by_width.sum(axis=1))

    @property
    def acceptance_length(self) -> float:
        """1 + accepted tokens / steps, over all texts together."""
        return float(self.acceptance_lengths(np.ones((1, len(self.tokens))))[0])

    def acceptance_lengths(self, weights: Floats) -> Floats:
        """The acceptance length [n] if each text counts as often as weights [n, texts] say."""
        accepted = self.accepted_by_place.sum(axis=1)
        lengths: Floats = 1.0 + (weights @ accepted) / np.maximum(weights @ self.steps, 1e-300)
        return lengths


def replay(texts: Sequence[Drafted], draft_len: int) -> Replay:
    """Compute the expected counts of speculating over the texts with blocks of up to draft_len.

    As in the runtime, a step adds one token more than it accepts, so a block has at most one token
    less than max_tokens still allows. Tokens after the end of the text (EOS) are drafted and
    dropped.
    """
    count, longest = len(texts), max((len(text.ready) for text in texts), default=0)
    places = np.array([len(text.ready) for text in texts])
    limits = np.array([text.limit for text in texts])
    # The last column stays 0: a block has no draft there.
    kept = np.zeros((count, longest, draft_len + 1))
    ready = np.zeros((count, longest), dtype=np.int64)
    for row, text in enumerate(texts):
        width = min(draft_len, text.kept.shape[1])
        kept[row, : places[row], :width] = text.kept[:, :width]
        ready[row, : places[row]] = np.minimum(text.ready, width)
    begins = np.zeros((count, longest + draft_len + 2))
    begins[:, 0] = 1.0
    by_width = np.zeros((count, draft_len + 1))
    drafted, accepted = np.zeros((count, draft_len)), np.zeros((count, draft_len))
    for start in range(longest):
        begins_here = np.where(start < places, begins[:, start], 0.0)
        # start + 1 tokens have been written, and the step adds one even if it accepts no draft.
        drafts = np.minimum(ready[:, start], limits - start - 2)
        by_width[np.arange(count), np.maximum(drafts, 0)] += begins_here
        accepted_so_far = begins_here
        for offset in range(draft_len + 1):
            if offset < draft_len:
                drafted[:, offset] += np.where(offset < drafts, begins_here, 0.0)
            has_draft = (offset < drafts) & (start + offset < places)
            accepts = np.where(has_draft, kept[:, start, offset], 0.0)
            begins[:, start + offset + 1] += accepted_so_far * (1.0 - accepts)
            accepted_so_far = accepted_so_far * accepts
            if offset < draft_len:
                accepted[:, offset] += accepted_so_far
    return Replay(draft_len, by_width, drafted, accepted, places.astype(np.float64))


# The formulas of Leviathan et al., which assume one alpha for all tokens.


def expected_tokens(alpha: float, draft_len: int) -> float:
    """Expected tokens per target run: (1 - alpha^(k + 1)) / (1 - alpha).

    Leviathan et al. 2023 (arXiv:2211.17192), equation 1.
    """
    if alpha >= 1.0:
        return draft_len + 1.0
    return float((1.0 - alpha ** (draft_len + 1)) / (1.0 - alpha))


def leviathan_speedup(alpha: float, draft_len: int, c: float) -> float:
    """Speedup in wall time by theorem 3.8 of the same paper.

    c: time of a draft step divided by that of a target step. Verifying several tokens is assumed to
    take no longer than a plain step.
    """
    return expected_tokens(alpha, draft_len) / (draft_len * c + 1.0)


def by_domain(domains: Sequence[str]) -> Mapping[str, Ints]:
    """The indices of every domain's texts; domains in the order of their first appearance."""
    indices_of: dict[str, list[int]] = {}
    for index, domain in enumerate(domains):
        indices_of.setdefault(domain, []).append(index)
    return {domain: np.array(indices, dtype=np.int64) for domain, indices in indices_of.items()}
