"""How many draft tokens a target would keep, found without speculating.

The target writes texts by plain decoding. One teacher-forced pass of target and draft over them
then tells, for every token of the output, how likely a draft token in its place would have been
kept, under every rule of acceptance:

    greedy                     1 if the draft's argmax is the token, else 0 rejection
    sum of min(p, q) coupled                    sum over i of 1 / sum over j of max(p_j / p_i, q_j /
    q_i) sample_match               sum of p q: the draft samples sample_match_greedy_draft
    p(argmax q): the draft takes its best token, as TensorRT-LLM's two-model flow does

p is the target's distribution, q the draft's, both after temperature and filters. The third is the
probability that two exponential races with shared noise have one winner (Daliri et al. 2024,
arXiv:2408.07978, 3).

That is alpha. To know what a draft length would give, the text itself is replayed. Given the token
x that the target chose, a draft in its place was kept with a probability of its own: min(1, q(x) /
p(x)) under rejection, and so on. The output of every rule is distributed as the target's own, and
given the output these events are independent, so the expected numbers of steps and of kept tokens
follow by summing over the places where a block may begin. It assumes neither that acceptance is the
same everywhere nor that neighbours are independent; for greedy decoding all probabilities are 0 or
1 and the replay is the run.

Drafts without a model (prompt lookup) depend on where a block begins, so the general form is a
table [start, place in block].
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
# probability below which a token is left out of the coupled sum; all of them together change it by
# less than 1e-3
NEGLIGIBLE = 1e-9


@dataclass(frozen=True, slots=True)
class Drafted:
    """One text of n tokens under one rule. Places are output tokens but the first, which comes from
    prefill and is not drafted.

    alpha [n - 1]: probability that a draft token is kept there, over all that the target may
    choose; not a number where nothing would be drafted. kept [n - 1, width]: entry (s, j) is the
    probability that draft j of a block that begins at place s is kept, given the text and that the
    drafts before it were. ready [n - 1]: how many drafts there are. limit: output tokens the
    request may have (max_tokens), which bounds a block.
    """

    alpha: Floats
    kept: Floats
    ready: Ints
    limit: int


def rule_probabilities(
    p: Floats, q: Floats, tokens: Ints
) -> dict[AlphaRule, tuple[Floats, Floats]]:
    """Sampling rule -> (alpha, probability of keeping given the token). p, q [n, vocab] rows sum
    to 1, tokens [n] are p's.
    """
    rows = np.arange(len(tokens))
    px, qx = p[rows, tokens], q[rows, tokens]
    best = q.argmax(axis=-1)
    coupled = [coupled_match(p[row], q[row], int(tokens[row])) for row in rows]
    return {
        "rejection": (np.minimum(p, q).sum(axis=-1), np.minimum(1.0, qx / px)),
        "coupled": (
            np.array([both for both, _ in coupled]),
            np.array([one for _, one in coupled]) / px,
        ),
        "sample_match": ((p * q).sum(axis=-1), qx),
        "sample_match_greedy_draft": (p[rows, best], (best == tokens).astype(np.float64)),
    }


def coupled_match(p: Floats, q: Floats, token: int) -> tuple[float, float]:
    """(probability that both races have the same winner, that both are won by `token`). p, q
    [vocab].

    Token i wins both with probability 1 / sum_j max(p_j / p_i, q_j / q_i). In the order of q / p,
    all j up to i take the first form and all behind it the second, so two running sums give every
    i.
    """
    both = np.flatnonzero(np.maximum(p, q) > NEGLIGIBLE)
    p_some, q_some = p[both], q[both]
    with np.errstate(divide="ignore", invalid="ignore"):
        order = np.argsort(q_some / p_some, kind="stable")
        p_some, q_some = p_some[order], q_some[order]
        before = np.cumsum(p_some)
        behind = q_some.sum() - np.cumsum(q_some)
        won = 1.0 / (before / p_some + np.maximum(behind, 0.0) / q_some)
    won[(p_some == 0.0) | (q_some == 0.0)] = 0.0
    place = np.flatnonzero(both[order] == token)
    return float(won.sum()), float(won[place[0]]) if len(place) else 0.0


def drafted_by_model(alpha: Floats, kept: Floats, width: int, limit: int) -> Drafted:
    """A draft model, teacher-forced: what it proposes for a token depends on the text before it,
    not on where a block began.
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
    """Drafts that are certain tokens, found in the text itself. lookup(ids, room) -> at most room
    tokens to follow ids.

    Under every rule such a draft is kept exactly where it is the token that the target chose.
    target_probs(place, token): the target's probability of a token there, for alpha; None: greedy.
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
    """Expected counts of speculating with one draft length, per text (first axis).

    steps_by_width [texts, draft_len + 1]: verify steps that drafted so many tokens.
    drafted_by_place and accepted_by_place [texts, draft_len]: verify steps that drafted, and that
    kept, the token at that place of the block. tokens [texts]: output tokens but the first; a text
    has as many in every replay.
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
        """1 + accepted / steps over all texts together."""
        return float(self.acceptance_lengths(np.ones((1, len(self.tokens))))[0])

    def acceptance_lengths(self, weights: Floats) -> Floats:
        """The same of texts that count so often. weights [n, texts] -> [n]."""
        accepted = self.accepted_by_place.sum(axis=1)
        lengths: Floats = 1.0 + (weights @ accepted) / np.maximum(weights @ self.steps, 1e-300)
        return lengths


def replay(texts: Sequence[Drafted], draft_len: int) -> Replay:
    """Speculate over the texts with blocks of up to draft_len tokens, as the runtime would.

    A block is never longer than what is left of max_tokens less one, since a step adds one token
    more than it keeps; tokens behind the end of the text (EOS) are drafted and dropped.
    """
    count, longest = len(texts), max((len(text.ready) for text in texts), default=0)
    places = np.array([len(text.ready) for text in texts])
    limits = np.array([text.limit for text in texts])
    kept = np.zeros(
        (count, longest, draft_len + 1)
    )  # the last column stays 0: no draft stands there
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
        here = np.where(start < places, begins[:, start], 0.0)
        drafts = np.minimum(
            ready[:, start], limits - start - 2
        )  # start + 1 tokens are there, one comes in any case
        by_width[np.arange(count), np.maximum(drafts, 0)] += here
        run = here
        for offset in range(draft_len + 1):
            if offset < draft_len:
                drafted[:, offset] += np.where(offset < drafts, here, 0.0)
            stands = (offset < drafts) & (start + offset < places)
            keep = np.where(stands, kept[:, start, offset], 0.0)
            begins[:, start + offset + 1] += run * (1.0 - keep)
            run = run * keep
            if offset < draft_len:
                accepted[:, offset] += run
    return Replay(draft_len, by_width, drafted, accepted, places.astype(np.float64))


# What the formulas of the paper make of one alpha.


def expected_tokens(alpha: float, draft_len: int) -> float:
    """Tokens per target run, (1 - alpha^(k + 1)) / (1 - alpha). Leviathan et al. 2023
    (arXiv:2211.17192), equation 1.
    """
    if alpha >= 1.0:
        return draft_len + 1.0
    return float((1.0 - alpha ** (draft_len + 1)) / (1.0 - alpha))


def leviathan_speedup(alpha: float, draft_len: int, c: float) -> float:
    """Improvement in wall time, theorem 3.8 there; c: a draft step in units of a target step,
    which verifies for free.
    """
    return expected_tokens(alpha, draft_len) / (draft_len * c + 1.0)


def by_domain(domains: Sequence[str]) -> Mapping[str, Ints]:
    """Domain -> the indices of its texts, in the order of first appearance."""
    found: dict[str, list[int]] = {}
    for index, domain in enumerate(domains):
        found.setdefault(domain, []).append(index)
    return {domain: np.array(indices, dtype=np.int64) for domain, indices in found.items()}
