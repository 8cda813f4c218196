"""From logits to weights over the vocabulary, and from weights to a token. Pure arithmetic on the
host.

NumPy, not torch: these are a few calls over a few thousand numbers between forwards of about a
millisecond. NumPy pays about a microsecond per call and stays on its thread; a torch operation
above its parallel threshold (a softmax over 5 x 2048) wakes the thread pool, which was seen to cost
5 ms on a busy 2-core machine.

Arithmetic is in the logits' own dtype, so a float64 engine is exact to its last bits and a float32
one is fast. Sums and cumulative distributions are float64 always: a running float32 sum over 128k
tokens would lose the rare ones.
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
    "ExponentialRace",
    "Floats",
    "Penalties",
    "argmax",
    "draw",
    "log_probability",
    "normalised",
    "to_host",
    "token_rows",
    "weights",
]

Floats = NDArray[Any]  # float32 or float64
# below this temperature a float32 quotient overflows; all but the best token weigh 0 long before
COLDEST = 1e-30
DRAW_BLOCK = 64
TOP_P_CANDIDATES = 128  # a nucleus larger than this is found by a full sort


def token_rows(rows: Sequence[Sequence[int]]) -> Tensor:
    """Rows of ids, all of one length, as [rows, n] int64. By way of NumPy: torch.tensor takes
    four times as long.
    """
    return torch.from_numpy(np.array(rows, dtype=np.int64))


def to_host(logits: Tensor) -> Floats:
    """The logits as an array: a view of the same memory on the CPU, a copy otherwise."""
    array: Floats = logits.cpu().numpy()
    return array


def argmax(logits: Tensor) -> list[list[int]]:
    """[batch, n, vocab] -> [batch][n] ids. The lowest id wins a tie, in target and draft alike,
    so that both mean the same.
    """
    ids: list[list[int]] = (logits if logits.is_cuda else logits.numpy()).argmax(-1).tolist()
    return ids


def weights(logits: Floats, sampling: Sampling) -> Floats:
    """Unnormalised probabilities after temperature, then top-k, then top-p; filtered tokens weigh
    0, the best one weighs 1.

    logits: [n, vocab], penalties already subtracted; not modified. temperature must be above 0.
    top_p is a share of what the top_k best hold. Tokens that tie with the last one kept are kept
    too: the result does not depend on how a sort breaks ties.
    """
    raised: Floats = logits - logits.max(axis=-1, keepdims=True)
    raised /= raised.dtype.type(max(sampling.temperature, COLDEST))
    np.exp(raised, out=raised)
    vocab = raised.shape[-1]
    has_top_k = 0 < sampling.top_k < vocab
    if not has_top_k and sampling.top_p >= 1.0:
        return raised
    best = _best(raised, sampling.top_k if has_top_k else min(TOP_P_CANDIDATES, vocab))
    edge = best[:, -1:]
    if sampling.top_p < 1.0:
        wanted = sampling.top_p * (best if has_top_k else raised).sum(
            axis=-1, dtype=np.float64, keepdims=True
        )
        held = best.cumsum(axis=-1, dtype=np.float64)
        if (held[:, -1:] < wanted).any():
            best = _best(raised, vocab)
            held = best.cumsum(axis=-1, dtype=np.float64)
        last = (held < wanted).sum(axis=-1, keepdims=True).clip(max=best.shape[-1] - 1)
        edge = np.take_along_axis(best, last, axis=-1)
    raised *= raised >= edge
    return raised


def _best(raised: Floats, count: int) -> Floats:
    """[n, count]: the largest weights of each row, in falling order."""
    vocab = raised.shape[-1]
    some = (
        raised
        if count == vocab
        else np.partition(raised, vocab - count, axis=-1)[:, vocab - count :]
    )
    falling: Floats = np.sort(some, axis=-1)[:, ::-1]
    return falling


def draw(distribution: Floats, uniform: float) -> int:
    """Invert the cumulative distribution of `distribution` [vocab], normalised or not, at `uniform`
    in [0, 1).

    First among sums of DRAW_BLOCK tokens, then within the block: a running sum over the whole
    vocabulary is the slowest thing here. uniform * total stays below the total for every double
    below 1, so the result is a token of positive weight.

    Raises ValueError for weights that are not numbers.
    """
    sums = np.add.reduceat(distribution, _block_starts(distribution.size)).cumsum(dtype=np.float64)
    place = uniform * float(sums[-1])
    if math.isnan(place):
        raise ValueError("the weights of the tokens are not finite")
    block = int(sums.searchsorted(place, side="right"))
    inside = distribution[block * DRAW_BLOCK : (block + 1) * DRAW_BLOCK].cumsum(dtype=np.float64)
    left = place - (float(sums[block - 1]) if block else 0.0)
    # A block's own sum may be rounded up past its last token: that token is meant.
    within = int(inside.searchsorted(min(left, np.nextafter(inside[-1], 0.0)), side="right"))
    return block * DRAW_BLOCK + within


@functools.cache
def _block_starts(vocab: int) -> NDArray[np.intp]:
    return np.arange(0, vocab, DRAW_BLOCK)


def normalised(rows: Floats) -> Floats:
    """Weights [..., vocab] as probabilities: every row sums to 1."""
    out: Floats = rows / rows.sum(axis=-1, dtype=np.float64, keepdims=True).astype(rows.dtype)
    return out


def log_probability(logits: Floats, token: int) -> float:
    """Log-probability of `token` under the model's own logits [vocab]: before penalties,
    temperature and filters.
    """
    shifted = logits - logits.max()
    return float(shifted[token]) - math.log(float(np.exp(shifted).sum(dtype=np.float64)))


class Penalties:
    """What frequency and presence penalties subtract from the logits, given the output so far. The
    prompt does not count.

    Kept as one dense row and updated token by token; a draft's tokens are added on the fly for the
    positions behind them.
    """

    def __init__(self, sampling: Sampling, vocab_size: int) -> None:
        self._frequency = sampling.frequency_penalty
        self._presence = sampling.presence_penalty
        self._row = np.zeros(vocab_size)
        self._seen: set[int] = set()

    def note(self, token: int) -> None:
        """One more output token."""
        self._row[token] += self._frequency + (0.0 if token in self._seen else self._presence)
        self._seen.add(token)

    def apply(self, logits: Floats, drafts: list[int], first: int) -> Floats:
        """A penalised copy. logits: [n, vocab]; row r stands behind the output so far and
        drafts[: first + r].
        """
        out: Floats = logits - self._row.astype(logits.dtype)
        for index, token in enumerate(drafts):
            new = token not in self._seen and token not in drafts[:index]
            out[max(0, index + 1 - first) :, token] -= self._frequency + (
                self._presence if new else 0.0
            )
        return out


class ExponentialRace:
    """Sampling noise keyed by (seed, position): draft and target that look at one position race
    with the same noise.

    Token i wins if weight[i] / E[i] is largest, E being independent standard exponentials; it then
    has probability weight[i] / sum. This is the Gumbel-max trick without its logarithm, as -log E
    is Gumbel noise. Sharing the noise is the coupling of Daliri et al. 2024 (arXiv:2408.07978).

    The noise comes from the counter-based Philox generator with the seed as key and the position as
    counter, so it depends on nothing else: not on the draft, its length, the batch, or what was
    drawn before. One position costs about 0.02 ms for a vocabulary of 2048 and 1 ms for 128k; the
    rows of the positions at hand are kept, since draft and target both need them.
    """

    def __init__(self, seed: int, vocab_size: int) -> None:
        self._key = seed % 2**64
        self._vocab_size = vocab_size
        self._rows: dict[int, Floats] = {}

    def winner(self, weight: Floats, position: int) -> int:
        """weight: [vocab]; position: index of the token to choose, counted from the start of the
        prompt.
        """
        row = self._rows.get(position)
        if row is None:
            row = self._rows[position] = self._noise(position)
        return int((weight * row).argmax())

    def gumbel(self, position: int) -> Floats:
        """The same noise in the other form [vocab]: the winner is the largest of log(weight) +
        gumbel.
        """
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
