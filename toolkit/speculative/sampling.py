"""From logits to weights over the vocabulary, and from weights to a token. Pure arithmetic on the
host.

It uses NumPy, not torch: these are a few calls over a few thousand numbers, between forwards of
about a millisecond. A NumPy call costs about a microsecond and stays on its thread. A torch
operation above the parallel threshold (a softmax over 5 x 2048) wakes the thread pool, which was
seen to cost 5 ms on a busy 2-core machine.

Arithmetic is done in the dtype of the logits, so a float64 engine is exact to its last bits and a
float32 engine is fast. Sums and cumulative distributions are always float64: a running float32 sum
over 128k tokens would lose the rare tokens.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from toolkit.interfaces import Sampling

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "MIN_TEMPERATURE",
    "NOT_FINITE",
    "ExponentialRace",
    "Floats",
    "Penalties",
    "are_finite",
    "argmax",
    "draw",
    "filters",
    "log_probability",
    "normalised",
    "to_host",
    "token_rows",
    "weights",
]

Floats = NDArray[Any]  # float32 or float64
# Below this temperature a float32 quotient overflows. All tokens but the best weigh 0 long before.
MIN_TEMPERATURE = 1e-30
NOT_FINITE = -1  # instead of a token, where the best logit is no finite number
DRAW_BLOCK_TOKENS = 64
NUCLEUS_CANDIDATES = 128  # most nuclei are smaller
GROUPS, SMALLEST_GROUP = 1024, 8  # to find the largest: so many groups, or else a full sort
# To find the end of a large nucleus: numbers that are sorted, sampled, and taken as the error of
# the sample; and more than float64 can lose in a sum of a vocabulary, relative to the sum.
SORTED_AT_ONCE, SAMPLES, SAMPLE_MARGIN, ROUNDING = 4096, 1024, 32, 1e-9


def token_rows(rows: Sequence[Sequence[int]]) -> Tensor:
    """Rows of ids, all of one length, as [rows, n] int64. It goes through NumPy because
    torch.tensor takes four times as long.
    """
    return torch.from_numpy(np.array(rows, dtype=np.int64))


def to_host(logits: Tensor) -> Floats:
    """The logits as an array: a view of the same memory on the CPU, a copy otherwise."""
    array: Floats = logits.cpu().numpy()
    return array


def argmax(logits: Tensor) -> list[int]:
    """[n, vocab] -> n ids, or NOT_FINITE. The lowest id wins a tie, in target and draft alike, so
    that both choose the same token. NaN counts as the largest number.
    """
    ids: list[int]
    if logits.is_cuda:
        best = logits.argmax(-1)
        values = logits.gather(-1, best[..., None])[..., 0]
        ids = torch.where(values.isfinite(), best, NOT_FINITE).tolist()
        return ids
    rows = logits.numpy()
    ids = rows.argmax(-1).tolist()
    # One by one: most steps have few rows, for which NumPy's own way takes five times as long.
    for row, token in enumerate(ids):
        if not math.isfinite(rows.item(row, token)):
            ids[row] = NOT_FINITE
    return ids


def are_finite(logits: Floats, tokens: Sequence[int]) -> bool:
    """Whether each token has a finite logit in its row. logits [at least len(tokens), vocab]."""
    return all(math.isfinite(logits[row, token]) for row, token in enumerate(tokens))


def weights(logits: Floats, sampling: Sampling) -> Floats:
    """Unnormalised probabilities after temperature, then top-k, then top-p. A filtered token weighs
    0, the most likely token weighs 1.

    logits: [n, vocab], with penalties already subtracted; not modified. temperature must be above
    0. top_p is a share of the total weight of the top_k tokens. Tokens that tie with the last one
    kept are kept too, so the result does not depend on how a sort breaks ties.
    """
    token_weights: Floats = logits - logits.max(axis=-1, keepdims=True)
    token_weights /= token_weights.dtype.type(max(sampling.temperature, MIN_TEMPERATURE))
    np.exp(token_weights, out=token_weights)
    vocab = token_weights.shape[-1]
    if not filters(sampling, vocab):
        return token_weights
    has_top_k = 0 < sampling.top_k < vocab
    for row in token_weights:
        row *= row >= _smallest_kept(row, sampling.top_k if has_top_k else vocab, sampling.top_p)
    return token_weights


def filters(sampling: Sampling, vocab_size: int) -> bool:
    """Whether top_k or top_p leave tokens out."""
    return 0 < sampling.top_k < vocab_size or sampling.top_p < 1.0


def _smallest_kept(row: Floats, top_k: int, top_p: float) -> Any:
    """The smallest weight of row [vocab] that top_k and top_p keep."""
    if top_p >= 1.0:
        return _largest(row, top_k)[-1]
    largest = _largest(row, min(top_k, NUCLEUS_CANDIDATES))
    if len(largest) < top_k < len(row):
        largest = _largest(row, top_k)
    candidates = row if top_k == len(row) else largest
    needed = top_p * float(candidates.sum(dtype=np.float64))
    cumulative = largest.cumsum(dtype=np.float64)
    if cumulative[-1] < needed and len(largest) < top_k:
        cut = _cut_by_parts(row, needed)
        if cut is not None:
            return cut
        largest = _falling(row)
        cumulative = largest.cumsum(dtype=np.float64)
    return largest[min(int((cumulative < needed).sum()), len(largest) - 1)]


def _falling(row: Floats) -> Floats:
    falling: Floats = np.sort(row)[::-1]
    return falling


def _largest(row: Floats, count: int) -> Floats:
    """[count]: the largest numbers of row [vocab], in falling order.

    Of `groups` groups of numbers, `count` have a maximum that is at least the count-th largest
    maximum. So at least as many numbers reach it, and only these are sorted.
    """
    groups = max(GROUPS, 4 * count)
    size = len(row) // groups
    if size >= SMALLEST_GROUP:
        maxima = row[: size * groups].reshape(size, groups).max(axis=0)
        candidates = row[row >= np.partition(maxima, groups - count)[groups - count]]
        if len(candidates) >= count:  # fewer only if some are not numbers
            return _falling(candidates)[:count]
    return _falling(row)[:count]


def _cut_by_parts(row: Floats, needed: float) -> Any:
    """The number of row at which a sum in falling order reaches `needed`, without sorting the row.
    None if rounding decides it: sums of parts are rounded in another order than one sum.

    Numbers on the wrong side of a pivot are dropped, as in quickselect. A sample says where the cut
    about is, and pivots lie on alternate sides of it.
    """
    above, inside, is_below = 0.0, row, True
    while len(inside) > SORTED_AT_ONCE:
        sample = _falling(inside[:: len(inside) // SAMPLES])
        share = len(inside) / len(sample)
        place = int((above + share * sample.cumsum(dtype=np.float64) < needed).sum())
        place += SAMPLE_MARGIN if is_below else -SAMPLE_MARGIN
        is_upper = inside >= sample[min(max(place, 0), len(sample) - 1)]
        upper = inside[is_upper]
        upper_sum = float(upper.sum(dtype=np.float64))
        if len(upper) == len(inside):
            if not is_below:
                break  # the rest may be equal numbers
        elif above + upper_sum >= needed:
            inside = upper
        else:
            above += upper_sum
            inside = inside[~is_upper]
        is_below = not is_below
    falling = _falling(inside)
    cumulative = above + falling.cumsum(dtype=np.float64)
    cut = falling[min(int((cumulative < needed).sum()), len(falling) - 1)]
    before = above + float(falling[falling > cut].sum(dtype=np.float64))
    up_to = above + float(falling[falling >= cut].sum(dtype=np.float64))
    margin = ROUNDING * needed
    return cut if before < needed - margin and needed + margin < up_to else None


def draw(distribution: Floats, uniform: float) -> int:
    """Draw a token: invert the cumulative distribution of `distribution` [vocab], normalised or
    not, at `uniform` in [0, 1).

    The search looks at sums of DRAW_BLOCK_TOKENS tokens first and then within one block, since a
    running sum over the whole vocabulary would be the slowest step here. For every double below 1,
    uniform * total stays below the total, so the result is a token of positive weight.

    Raises ValueError for weights that are not numbers.
    """
    sums = np.add.reduceat(distribution, _block_starts(distribution.size)).cumsum(dtype=np.float64)
    threshold = uniform * float(sums[-1])
    if math.isnan(threshold):
        raise ValueError("the weights of the tokens are not finite")
    block = int(sums.searchsorted(threshold, side="right"))
    start = block * DRAW_BLOCK_TOKENS
    inside = distribution[start : start + DRAW_BLOCK_TOKENS].cumsum(dtype=np.float64)
    rest = threshold - (float(sums[block - 1]) if block else 0.0)
    # Rounding may put the rest beyond the block's own sum: then the block's last token is chosen.
    within = int(inside.searchsorted(min(rest, np.nextafter(inside[-1], 0.0)), side="right"))
    return start + within


@functools.cache
def _block_starts(vocab: int) -> NDArray[np.intp]:
    return np.arange(0, vocab, DRAW_BLOCK_TOKENS)


def normalised(rows: Floats) -> Floats:
    """Weights [..., vocab] as probabilities: every row sums to 1."""
    out: Floats = rows / rows.sum(axis=-1, dtype=np.float64, keepdims=True).astype(rows.dtype)
    return out


def log_probability(logits: Floats, token: int) -> float:
    """Log-probability of `token` under the model's own logits [vocab], which means before
    penalties, temperature and filters.
    """
    shifted = logits - logits.max()
    return float(shifted[token]) - math.log(float(np.exp(shifted).sum(dtype=np.float64)))


class Penalties:
    """What frequency and presence penalties subtract from the logits, given the output so far. The
    prompt does not count.

    They are kept as one dense row, updated with each output token. Draft tokens are counted only
    when the row is applied, at the positions after them.
    """

    def __init__(self, sampling: Sampling, vocab_size: int) -> None:
        self._frequency = sampling.frequency_penalty
        self._presence = sampling.presence_penalty
        self._row = np.zeros(vocab_size)
        self._seen: set[int] = set()

    def note(self, token: int) -> None:
        """Count one more output token."""
        self._row[token] += self._frequency + (0.0 if token in self._seen else self._presence)
        self._seen.add(token)

    def apply(self, logits: Floats, drafts: list[int], first: int) -> Floats:
        """Return a penalised copy. logits: [n, vocab]; row r follows the output so far and
        drafts[: first + r].
        """
        penalised: Floats = logits - self._row.astype(logits.dtype)
        for index, token in enumerate(drafts):
            is_new = token not in self._seen and token not in drafts[:index]
            penalty = self._frequency + (self._presence if is_new else 0.0)
            penalised[max(0, index + 1 - first) :, token] -= penalty
        return penalised


class ExponentialRace:
    """Sampling with noise keyed by (seed, position), so that draft and target use the same noise at
    the same position.

    Token i wins if weight[i] / E[i] is largest, where E are independent standard exponentials. It
    wins with probability weight[i] / sum. This is the Gumbel-max trick without its logarithm, since
    -log E is Gumbel noise. Sharing the noise is the coupling of Daliri et al. 2024
    (arXiv:2408.07978).

    The noise comes from the counter-based Philox generator, with the seed as key and the position
    as counter. So it depends on nothing else: not on the draft, the draft length, the batch or
    earlier draws. One position costs about 0.02 ms for a vocabulary of 2048 and 1 ms for 128k. The
    rows of current positions are kept, since draft and target both need them.
    """

    def __init__(self, seed: int, vocab_size: int) -> None:
        self._key = seed % 2**64
        self._vocab_size = vocab_size
        self._rows: dict[int, Floats] = {}

    def winner(self, weight: Floats, position: int) -> int:
        """Choose a token. weight: [vocab]; position: its index, counted from the start of the
        prompt. Raises ValueError for weights that are not numbers.
        """
        arrivals = weight * self.noise(position)
        token = int(arrivals.argmax())
        if math.isnan(arrivals[token]):
            raise ValueError("the weights of the tokens are not finite")
        return token

    def noise(self, position: int) -> Floats:
        """1 / E of each token [vocab] at a position. It is kept until it is forgotten."""
        row = self._rows.get(position)
        if row is None:
            row = self._rows[position] = self._noise(position)
        return row

    def known_from(self, position: int) -> int:
        """How many positions from this one on have noise that is kept."""
        count = 0
        while position + count in self._rows:
            count += 1
        return count

    def gumbel(self, position: int) -> Floats:
        """The same noise [vocab] as Gumbel noise: the largest log(weight) + gumbel wins."""
        noise: Floats = np.log(self._noise(position))
        return noise

    def forget_before(self, position: int) -> None:
        for old in [kept for kept in self._rows if kept < position]:
            del self._rows[old]

    def _noise(self, position: int) -> Floats:
        generator = np.random.Generator(np.random.Philox(key=self._key, counter=position << 128))
        exponentials: Floats = generator.standard_exponential(self._vocab_size)
        np.maximum(exponentials, 1e-300, out=exponentials)
        np.reciprocal(exponentials, out=exponentials)
        return exponentials
