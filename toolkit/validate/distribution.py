"""Test whether an endpoint's sampled tokens are distributed like the target's own. Pure functions:
probabilities and tokens go in, test results come out.

Each sampled token is turned into a point, by the distribution from which it should have been drawn
given the text before it. Lay all tokens side by side on [0, 1] in some order, each as wide as its
probability, and draw the point uniformly from the stretch of the sampled token. If the tokens come
from these distributions, the points are independent and uniform on [0, 1]. This is exact, whatever
the distributions are and however they change from place to place (Rosenblatt 1952; Brockwell 2007
for discrete ones). So the second and later tokens of all texts are pooled in one G-test of their
points in equal bins, with a known null. (A text's first token comes from prefill, so the accept
rule never sees it.) The order of the tokens decides what the test detects: ordered by probability,
a distribution that is too sharp or too flat; ordered by the ratio of draft to target, an accept
rule that leans towards its drafts or away from them.

If the engine gives no logits, these distributions are unknown, and the two arms are compared with
each other. For every beginning that both share, the tokens that follow it are counted in a table of
token by arm. All tables are pooled in one G, and permuting the arms of whole texts within a prompt
gives its null.

Whole continuations of both arms are compared as well, by the energy distance between their n-gram
counts (Szekely and Rizzo 2013). Permuting the arms within a prompt gives its null, so this needs no
model.

A distribution test that has never rejected anything proves nothing. So each test has a control: the
same samples, tilted by a known total variation, which the test has to reject.
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
FEWEST = 10  # texts that have to share a beginning; fewer texts add more noise than evidence
END = -1  # stands for a token where the text ended
# Per prompt: texts of one arm, texts of the other.
Arms = Sequence[tuple[Sequence[Sequence[int]], Sequence[Sequence[int]]]]


def probabilities(logits: Floats, temperature: float, top_k: int = 0, top_p: float = 1.0) -> Floats:
    """Return probabilities [n, vocab] whose rows sum to 1: apply temperature, then top-k, then
    top-p as a share of what top-k left, in TensorRT-LLM's order.

    This is a separate implementation on purpose: the judge must not share the runtime's faults.
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
        # A token is in the nucleus if the tokens before it sum to less than top_p.
        kept[before >= top_p] = 0.0
        kept /= kept.sum(axis=-1, keepdims=True)
    out = np.empty_like(kept)
    np.put_along_axis(out, order, kept, axis=-1)
    return out


def places(probs: Floats, tokens: NDArray[np.int64], order: Floats, uniforms: Floats) -> Floats:
    """Return the point of each token in [0, 1]. probs, order: [n, vocab]; tokens with larger
    `order` come first. uniforms: [n], in [0, 1).
    """
    own = np.take_along_axis(order, tokens[:, None], axis=-1)
    before = np.where(order > own, probs, 0.0).sum(axis=-1)
    width = np.where(order == own, probs, 0.0).sum(axis=-1)
    points: Floats = before + uniforms * width
    return points


def g_test(points: Floats) -> tuple[float, float]:
    """Return (G, p-value) of points that should be uniform on [0, 1], in BINS equal bins."""
    from scipy.stats import power_divergence

    counts = np.histogram(points, bins=BINS, range=(0.0, 1.0))[0]
    result = power_divergence(counts, lambda_="log-likelihood")
    return float(result.statistic), float(result.pvalue)


def lean(points: Floats) -> float:
    """Return by how many standard deviations the points lie nearer to the beginning of their
    order than uniform points would.
    """
    return float((0.5 - points.mean()) * math.sqrt(12 * len(points)))


def tokens_needed(effect: float, alpha: float, power: float) -> int:
    """Return how many tokens the G-test needs to reject, at `alpha` and with probability `power`,
    any shift of the bins by `effect` in total variation.

    A shift spread evenly over all bins is the hardest to see; its noncentrality is 4 n effect^2.
    """
    return math.ceil(_noncentrality(alpha, power) / (4 * effect**2))


def detectable(tokens: int, alpha: float, power: float) -> float:
    """Return the total variation that this many tokens show: the inverse of tokens_needed."""
    return math.sqrt(_noncentrality(alpha, power) / (4 * tokens))


def variation(points: Floats) -> float:
    """Return the total variation between the points' bins and uniform bins."""
    shares = np.histogram(points, bins=BINS, range=(0.0, 1.0))[0] / len(points)
    return float(np.abs(shares - 1 / BINS).sum() / 2)


def tilt(
    points: Floats, biased: Floats, effect: float, generator: np.random.Generator
) -> tuple[Floats, float] | None:
    """Make the negative control: replace every point by its `biased` one with probability e, so
    that the bins shift by `effect` in total variation.

    Returns (points, e), or None if even e = 1 shifts the bins less. biased: the point that a biased
    acceptor's token has at the same place.
    """
    whole = variation(biased)
    if whole <= effect:
        return None
    share = effect / whole
    return np.where(generator.random(len(points)) < share, biased, points), share


def holm(p_values: Sequence[float]) -> list[float]:
    """Return adjusted p-values (Holm 1979). If those below alpha are rejected, the chance of any
    false alarm stays below alpha.
    """
    adjusted = [0.0] * len(p_values)
    least = 0.0
    for done, index in enumerate(sorted(range(len(p_values)), key=lambda i: p_values[i])):
        least = max(least, min(1.0, (len(p_values) - done) * p_values[index]))
        adjusted[index] = least
    return adjusted


@dataclass(frozen=True, slots=True)
class PrefixFound:
    """The result of prefix_test. tokens: how many follow a beginning that both arms have.
    detectable: the total variation that this many tokens show; None: there is nothing to compare,
    and no control.
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
    """Test whether both arms continue the same beginning alike. First tokens do not count.
    longest: the length at which texts were cut.

    The control tilts the other arm by a total variation of `effect`: with this probability a token
    that no text has at that place replaces its own. detectable holds for the shift that is hardest
    to see: over the null of the permutations, G grows by 4 effect^2 n m / (n + m) for every
    beginning that n texts of one arm and m of the other share (Cauchy-Schwarz).
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
    """The tables of one prompt. A node is a beginning that texts share; a cell is a token after a
    node. cells, nodes: [texts, ...], whether a text has it. Nodes of fewer than FEWEST texts are
    left out. node_of: cell -> node.
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
        shared = [rows for rows in behind.values() if len(rows) >= FEWEST]
        cells: dict[tuple[int, int], int] = {}
        entries = [
            (row, node, cells.setdefault((node, token), len(cells)))
            for node, rows in enumerate(shared)
            for row, token in rows
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
        """Return the sum of n m / (n + m) * (t - 2) / (t - 1) with t = n + m. The last factor is
        what so few texts lose.

        If n = m, the factor is exact for the mean of a 2 x 2 table's chi-squared over that of its
        permutations.
        """
        others, all_ = self.nodes[self.is_other].sum(axis=0), self.nodes.sum(axis=0)
        return float((others * (all_ - others) / all_ * (all_ - 2) / (all_ - 1)).sum())

    @property
    def tokens(self) -> int:
        others, all_ = self.nodes[self.is_other].sum(axis=0), self.nodes.sum(axis=0)
        return int(all_[(others > 0) & (others < all_)].sum())

    def tilted(self, share: float, generator: np.random.Generator) -> Floats:
        """Return the cells with one more per beginning, which takes `share` of the other arm's
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
    """Yield (text so far, next token) from the second token on."""
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
    """Return the observed G, and G with the arms permuted within each prompt."""
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
    """Return G [n] of labels [n, texts]: 2 sum O log(O / E) over tokens by arms, of all tables
    together.
    """
    x_log_x = np.arange(len(nodes) + 1) * np.log(np.maximum(1, np.arange(len(nodes) + 1)))

    def entropy(has: Floats) -> Floats:
        totals = has.sum(axis=0)
        counts = (labels @ has).astype(np.int64)
        rest = totals.astype(np.int64) - counts
        terms = x_log_x[counts] + x_log_x[rest] - x_log_x[totals.astype(np.int64)]
        summed: Floats = terms.sum(axis=1)
        return summed

    varied = cells.sum(axis=0) > 0
    g: Floats = 2 * (entropy(cells[:, varied]) - entropy(nodes))
    return g


def _p_value(observed: float, permuted: Floats) -> float:
    """Return the p-value. The observed arrangement counts too, so it is never too small."""
    return float((1 + (permuted >= observed - 1e-9).sum()) / (1 + len(permuted)))


def _shift_needed(null: Floats, alpha: float, power: float) -> float:
    """Return how far G has to move to be rejected with probability `power`. As for a noncentral
    chi-squared, a shift of s adds 4 s to the variance.
    """
    from scipy.stats import chi2, norm

    # If every token is certain, nothing varies under the null. At least a single degree of freedom
    # is assumed.
    critical = max(float(np.quantile(null, 1 - alpha)), float(chi2.isf(alpha, 1)))
    middle = max(float(null.mean()), 1.0)
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
    """Test whether both arms continue every prompt alike, and return (statistic, p-value). arms:
    per prompt, (texts of one arm, texts of the other).

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
    """Return L1 distances between the texts' counts of unigrams and bigrams. This metric is of
    negative type, as the energy distance needs.
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
    distances: Floats = squareform(pdist(counts, "cityblock"))
    return distances


def _noncentrality(alpha: float, power: float) -> float:
    from scipy.optimize import brentq
    from scipy.stats import chi2, ncx2

    critical = chi2.isf(alpha, BINS - 1)

    def lacking(noncentrality: float) -> Any:
        return ncx2.sf(critical, BINS - 1, noncentrality) - power

    return float(brentq(lacking, 1e-9, 1e4))
