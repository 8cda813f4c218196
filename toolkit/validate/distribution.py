"""Are the tokens of a sampling endpoint distributed as the target's own? Pure: probabilities and
tokens in, tests out.

Every token that was said is put in its place within the distribution that it should have been drawn
from, given the text before it: the tokens are laid side by side in some order, each as wide as its
probability, and the said one gives a uniformly drawn point of its own stretch. If the tokens do
come from these distributions, the points are independent and uniform on [0, 1], exactly, whatever
the distributions are and however they change from place to place (Rosenblatt 1952; Brockwell 2007
for discrete ones). So all second and later tokens of all texts are pooled in one G-test of their
points in equal bins, with a known null. (A text's first token comes from prefill and never meets
the accept rule.) The order decides what is seen: by probability, a distribution that is too sharp
or too flat; by the ratio of draft to target, an accept rule that leans to its drafts or away from
them.

Where nobody knows these distributions, since the engine gives no logits, the arms are held against
one another: the second and later tokens behind one and the same text, in a table of token by arm
for every such text, all tables pooled in one G whose null is had by permuting the arms of whole
texts within a prompt.

Whole continuations of both arms are compared as well, by the energy distance between their n-gram
counts (Szekely and Rizzo 2013), whose null is had by permuting the arms within a prompt; that needs
no model.

A distribution test that has never rejected anything proves nothing: each test has a control, the
same samples tilted by a known total variation, which it has to reject.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "BINS",
    "PrefixFound",
    "continuation_test",
    "detectable",
    "g_test",
    "holm",
    "lean",
    "places",
    "prefix_test",
    "probabilities",
    "tilt",
    "tokens_needed",
    "variation",
]

Floats = NDArray[np.float64]
BINS = 16
PERMUTATIONS = 19_999
BATCH = 2_000  # permutations at a time
FEWEST = 10  # texts behind which tokens are compared: fewer of them add more noise than they show
END = -1  # in the place of a token: the text ended
Arms = Sequence[
    tuple[Sequence[Sequence[int]], Sequence[Sequence[int]]]
]  # per prompt: texts of one arm, texts of the other


def probabilities(logits: Floats, temperature: float, top_k: int = 0, top_p: float = 1.0) -> Floats:
    """[n, vocab]: temperature, then top-k, then top-p as a share of what top-k left, as
    TensorRT-LLM orders them. Rows sum to
    1.

    Written apart from the runtime's own on purpose: what judges must not share the faults of what
    is judged.
    """
    scaled = np.asarray(logits, dtype=np.float64) / temperature
    vocab = scaled.shape[-1]
    if not 0 < top_k < vocab and top_p >= 1.0:
        raised = np.exp(scaled - scaled.max(axis=-1, keepdims=True))
        plain: Floats = raised / raised.sum(axis=-1, keepdims=True)
        return plain
    order = np.argsort(-scaled, axis=-1, kind="stable")
    falling = np.take_along_axis(scaled, order, axis=-1)
    kept = np.exp(falling - falling[:, :1])
    if 0 < top_k < vocab:
        kept[:, top_k:] = 0.0
    kept /= kept.sum(axis=-1, keepdims=True)
    if top_p < 1.0:
        before = np.cumsum(kept, axis=-1) - kept
        kept[before >= top_p] = (
            0.0  # a token is in the nucleus while what stands before it is less than top_p
        )
        kept /= kept.sum(axis=-1, keepdims=True)
    out = np.empty_like(kept)
    np.put_along_axis(out, order, kept, axis=-1)
    return out


def places(probs: Floats, tokens: NDArray[np.int64], order: Floats, uniforms: Floats) -> Floats:
    """The point of each token in [0, 1]. probs, order [n, vocab]: tokens of larger `order` come
    first; uniforms [n] in [0, 1).
    """
    own = np.take_along_axis(order, tokens[:, None], axis=-1)
    before = np.where(order > own, probs, 0.0).sum(axis=-1)
    width = np.where(order == own, probs, 0.0).sum(axis=-1)
    points: Floats = before + uniforms * width
    return points


def g_test(points: Floats) -> tuple[float, float]:
    """(G, p-value) of points that should be uniform on [0, 1], in BINS equal bins."""
    from scipy.stats import power_divergence

    counts = np.histogram(points, bins=BINS, range=(0.0, 1.0))[0]
    found = power_divergence(counts, lambda_="log-likelihood")
    return float(found.statistic), float(found.pvalue)


def lean(points: Floats) -> float:
    """Standard deviations by which the points lie nearer to the beginning of their order than
    uniform ones would.
    """
    return float((0.5 - points.mean()) * math.sqrt(12 * len(points)))


def tokens_needed(effect: float, alpha: float, power: float) -> int:
    """Tokens with which the G-test rejects at `alpha`, with probability `power`, whatever shifts
    the bins by `effect` in total variation. A shift spread evenly over all bins is the hardest to
    see; its noncentrality is 4 n effect^2.
    """
    return math.ceil(_noncentrality(alpha, power) / (4 * effect**2))


def detectable(tokens: int, alpha: float, power: float) -> float:
    """The inverse of tokens_needed: the total variation that so many tokens show."""
    return math.sqrt(_noncentrality(alpha, power) / (4 * tokens))


def variation(points: Floats) -> float:
    """Total variation between the points' bins and uniform ones."""
    shares = np.histogram(points, bins=BINS, range=(0.0, 1.0))[0] / len(points)
    return float(np.abs(shares - 1 / BINS).sum() / 2)


def tilt(
    points: Floats, biased: Floats, effect: float, generator: np.random.Generator
) -> tuple[Floats, float] | None:
    """The negative control: every point is replaced by its `biased` one with probability e, such
    that the bins shift by `effect` in total variation. Returns (points, e), or None where even e =
    1 shifts them less.

    biased: the point that a biased acceptor's token has at the same place.
    """
    whole = variation(biased)
    if whole <= effect:
        return None
    share = effect / whole
    return np.where(generator.random(len(points)) < share, biased, points), share


def holm(p_values: Sequence[float]) -> list[float]:
    """Adjusted p-values (Holm 1979): rejecting those below alpha keeps the chance of any false
    alarm below alpha.
    """
    adjusted = [0.0] * len(p_values)
    least = 0.0
    for done, index in enumerate(sorted(range(len(p_values)), key=lambda i: p_values[i])):
        least = max(least, min(1.0, (len(p_values) - done) * p_values[index]))
        adjusted[index] = least
    return adjusted


@dataclass(frozen=True, slots=True)
class PrefixFound:
    """tokens: that stand behind a text which both arms have said. detectable: the total variation
    that so many show; None: there is nothing to compare, and no control.
    """

    tokens: int
    statistic: float
    p_value: float
    detectable: float | None
    control_p_value: float | None


def prefix_test(
    arms: Arms,
    longest: int,
    generator: np.random.Generator,
    *,
    effect: float,
    alpha: float,
    power: float,
    permutations: int = PERMUTATIONS,
) -> PrefixFound:
    """Do both arms go on alike behind the same text? The first token is no part of it. longest:
    where texts were cut.

    The control tilts the other arm by a total variation of `effect`: with this probability a token
    that nobody said there takes the place of its own. detectable holds for the shift that is
    hardest to see: G grows by 4 effect^2 n m / (n + m) for every beginning that n of one and m of
    the other arm have said (Cauchy-Schwarz), over the null of the permutations.
    """
    tables = [table for one, other in arms if (table := _Table.of(one, other, longest)) is not None]
    if not tables:
        return PrefixFound(0, 0.0, 1.0, None, None)
    statistic, null = _permuted(tables, [table.cells for table in tables], generator, permutations)
    growth = 4 * sum(table.comparable for table in tables)
    noncentrality = _shift_needed(null, alpha, power)
    control = _permuted(
        tables, [table.tilted(effect, generator) for table in tables], generator, permutations
    )
    return PrefixFound(
        tokens=sum(table.tokens for table in tables),
        statistic=statistic,
        p_value=_p_value(statistic, null),
        detectable=math.sqrt(noncentrality / growth) if growth > 0 else None,
        control_p_value=_p_value(*control),
    )


@dataclass(frozen=True, slots=True)
class _Table:
    """One prompt. cells, nodes: [texts, ...] whether a text has this token behind this beginning,
    and this beginning; those of fewer than FEWEST texts are left out. node_of: cell -> node.
    """

    is_other: NDArray[np.bool_]
    cells: Floats
    nodes: Floats
    node_of: NDArray[np.int64]

    @classmethod
    def of(
        cls, one: Sequence[Sequence[int]], other: Sequence[Sequence[int]], longest: int
    ) -> _Table | None:
        behind: dict[tuple[int, ...], list[tuple[int, int]]] = {}
        for row, text in enumerate([*one, *other]):
            for beginning, token in _steps(text, longest):
                behind.setdefault(beginning, []).append((row, token))
        shared = [found for found in behind.values() if len(found) >= FEWEST]
        cells: dict[tuple[int, int], int] = {}
        entries = [
            (row, node, cells.setdefault((node, token), len(cells)))
            for node, found in enumerate(shared)
            for row, token in found
        ]
        if not entries:
            return None
        texts = len(one) + len(other)
        has_cell, has_node = np.zeros((texts, len(cells))), np.zeros((texts, len(shared)))
        for row, node, cell in entries:
            has_cell[row, cell] = has_node[row, node] = 1.0
        return cls(
            np.arange(texts) >= len(one), has_cell, has_node, np.array([node for node, _ in cells])
        )

    @property
    def comparable(self) -> float:
        """Sum of n m / (n + m), times (t - 2) / (t - 1) for t = n + m, which is what so few texts
        lose.

        That factor is exact for the mean of a 2 x 2 table's chi-squared over that of its
        permutations, where n = m.
        """
        others, all_ = self.nodes[self.is_other].sum(axis=0), self.nodes.sum(axis=0)
        return float((others * (all_ - others) / all_ * (all_ - 2) / (all_ - 1)).sum())

    @property
    def tokens(self) -> int:
        others, all_ = self.nodes[self.is_other].sum(axis=0), self.nodes.sum(axis=0)
        return int(all_[(others > 0) & (others < all_)].sum())

    def tilted(self, share: float, generator: np.random.Generator) -> Floats:
        """Cells, and one more for each beginning, which takes this share of the other arm's
        tokens.
        """
        cells = np.concatenate([self.cells, np.zeros_like(self.nodes)], axis=1)
        rows, chosen = np.nonzero(self.cells * self.is_other[:, None])
        taken = generator.random(len(rows)) < share
        rows, chosen = rows[taken], chosen[taken]
        cells[rows, chosen] = 0.0
        cells[rows, self.cells.shape[1] + self.node_of[chosen]] = 1.0
        tilted: Floats = cells
        return tilted


def _steps(text: Sequence[int], longest: int) -> Iterator[tuple[tuple[int, ...], int]]:
    """(text so far, what comes next) from the second token on."""
    for position in range(1, len(text)):
        yield tuple(text[:position]), text[position]
    if 0 < len(text) < longest:
        yield tuple(text), END


def _permuted(
    tables: Sequence[_Table],
    cells: Sequence[Floats],
    generator: np.random.Generator,
    permutations: int,
) -> tuple[float, Floats]:
    """G as it is, and with the arms permuted within each prompt."""
    observed, permuted = 0.0, np.zeros(permutations)
    for table, has_cell in zip(tables, cells, strict=True):
        labels = table.is_other.astype(np.float64)
        observed += float(_g_of(labels[None], table.nodes, has_cell)[0])
        for start in range(0, permutations, BATCH):
            count = min(BATCH, permutations - start)
            rows = generator.permuted(np.broadcast_to(labels, (count, len(labels))), axis=1)
            permuted[start : start + count] += _g_of(rows, table.nodes, has_cell)
    return observed, permuted


def _g_of(labels: Floats, nodes: Floats, cells: Floats) -> Floats:
    """[n] G of [n, texts] labels: 2 sum O log(O / E) over tokens by arms, of all tables
    together.
    """
    x_log_x = np.arange(len(nodes) + 1) * np.log(np.maximum(1, np.arange(len(nodes) + 1)))

    def entropy(has: Floats) -> Floats:
        totals = has.sum(axis=0)
        counts = (labels @ has).astype(np.int64)
        rest = totals.astype(np.int64) - counts
        found: Floats = (x_log_x[counts] + x_log_x[rest] - x_log_x[totals.astype(np.int64)]).sum(
            axis=1
        )
        return found

    varied = cells.sum(axis=0) > 0
    g: Floats = 2 * (entropy(cells[:, varied]) - entropy(nodes))
    return g


def _p_value(observed: float, permuted: Floats) -> float:
    """The observed arrangement counts too, so it is never too small."""
    return float((1 + (permuted >= observed - 1e-9).sum()) / (1 + len(permuted)))


def _shift_needed(null: Floats, alpha: float, power: float) -> float:
    """How far G has to move to be rejected with this probability: as of a noncentral chi-squared, a
    shift of s adds 4 s to the variance.
    """
    from scipy.stats import chi2, norm

    # Where every token is certain nothing varies under the null; a single degree of freedom is the
    # least that is believed.
    critical, middle = (
        max(float(np.quantile(null, 1 - alpha)), float(chi2.isf(alpha, 1))),
        max(float(null.mean()), 1.0),
    )
    variance = max(float(null.var()), 2.0)
    quantile = float(norm.ppf(power))
    gap = critical - middle
    # gap = s - quantile * sqrt(variance + 4 s), solved for s
    half = gap + 2 * quantile**2
    return half + math.sqrt(half**2 - gap**2 + quantile**2 * variance)


def continuation_test(
    arms: Arms,
    generator: np.random.Generator,
    permutations: int = PERMUTATIONS,
) -> tuple[float, float]:
    """(statistic, p-value): do both arms of every prompt continue it alike? arms: per prompt (texts
    of one, texts of the other).

    Energy distance between the texts' unigram and bigram counts in the L1 metric, weighted by
    sample size and summed over prompts. Arms are permuted within each prompt; the p-value counts
    the observed arrangement too, so it is never too small.
    """
    observed = 0.0
    permuted = np.zeros(permutations)
    for one, other in arms:
        distances = _distances([*one, *other])
        sizes = len(one), len(other)
        weights = np.concatenate(
            [np.full(sizes[0], 1 / sizes[0]), np.full(sizes[1], -1 / sizes[1])]
        )
        scale = sizes[0] * sizes[1] / sum(sizes)
        observed += scale * -float(weights @ distances @ weights)
        for start in range(0, permutations, BATCH):
            count = min(BATCH, permutations - start)
            rows = generator.permuted(np.broadcast_to(weights, (count, len(weights))), axis=1)
            permuted[start : start + count] -= scale * np.einsum("bi,bi->b", rows @ distances, rows)
    return observed, float((1 + (permuted >= observed - 1e-12).sum()) / (1 + permutations))


def _distances(texts: Sequence[Sequence[int]]) -> Floats:
    """L1 distances between the texts' counts of unigrams and bigrams: a metric of negative type, as
    the energy distance needs.
    """
    from scipy.spatial.distance import pdist, squareform

    columns: dict[tuple[int, ...], int] = {}
    entries: list[tuple[int, int]] = []
    for row, text in enumerate(texts):
        grams: list[tuple[int, ...]] = [*((token,) for token in text), *itertools.pairwise(text)]
        entries += [(row, columns.setdefault(gram, len(columns))) for gram in grams]
    counts = np.zeros((len(texts), max(1, len(columns))))
    if entries:
        np.add.at(counts, tuple(np.asarray(entries).T), 1.0)
    found: Floats = squareform(pdist(counts, "cityblock"))
    return found


def _noncentrality(alpha: float, power: float) -> float:
    from scipy.optimize import brentq
    from scipy.stats import chi2, ncx2

    critical = chi2.isf(alpha, BINS - 1)

    def lacking(noncentrality: float) -> Any:
        return ncx2.sf(critical, BINS - 1, noncentrality) - power

    return float(brentq(lacking, 1e-9, 1e4))
