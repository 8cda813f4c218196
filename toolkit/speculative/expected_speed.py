"""How fast a batch is expected to be with given draft lengths, and with which it is fastest.

All rows share a step, so the lengths are chosen for the whole batch together: those with the most
expected tokens per nanosecond. A row that drafts k tokens is expected to get 1 + a + ... + a^k of
them, where `a` is the probability that a draft token of it is accepted.

Pure, and only of Python's standard library.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

__all__ = ["Costs", "Plan", "Speeds", "block_length"]


class Costs(Protocol):
    """What the engines take, in nanoseconds."""

    def draft_ns(self, rows: int, depth: int) -> float:
        """The draft's token at this depth of a block, from 1 on, for so many rows. 0 rows: 0."""
        ...

    def step_ns(self, rows: int, width: float) -> float:
        """The rest of a step: the target's forward of so many rows, of so many tokens in the mean,
        and the host's work.
        """
        ...

    def probe_ns(self, rows: int) -> float:
        """A probe of each of so many rows."""
        ...

    def read_ns(self, tokens: float) -> float:
        """The draft reads so many tokens of a text."""
        ...


@dataclass(slots=True)
class Plan:
    """draft_lens: one per row. tokens_per_ns: of the whole batch."""

    draft_lens: list[int]
    tokens_per_ns: float


@dataclass(frozen=True, slots=True)
class Speeds:
    """trust: the accepted draft tokens over those that the rows' probabilities promise. In each
    method, alphas: the probability of each row whose length is to be chosen; fixed: the draft
    lengths of the others.
    """

    costs: Costs
    trust: float

    def of(self, alphas: Sequence[float], draft_lens: Sequence[int], fixed: Sequence[int]) -> float:
        """Expected tokens per nanosecond of a step."""
        everyone = [*draft_lens, *fixed]
        ns = self.costs.step_ns(len(everyone), 1.0 + sum(everyone) / len(everyone))
        for depth in range(1, 1 + max(everyone)):
            ns += self.costs.draft_ns(sum(length >= depth for length in everyone), depth)
        tokens = float(len(fixed))  # of rows that are not ours, only what is certain
        for alpha, draft_len in zip(alphas, draft_lens, strict=True):
            tokens += 1.0 + self.trust * (block_length(alpha, draft_len) - 1.0)
        return tokens / ns

    def best(
        self,
        alphas: Sequence[float],
        longests: Sequence[int],
        fixed: Sequence[int],
        least_gain: float,
    ) -> Plan:
        """The lengths with the most expected tokens per nanosecond, each at most as long as the
        row's in `longests`. Plain decoding, if they are not so many times as fast as it.

        For each longest block, drafts are added in the order of their worth, the probability that
        they are accepted, and the best beginning of this order is taken. The worth falls along a
        block, so a beginning is a length for each row.
        """
        best = Plan([0] * len(alphas), self.of(alphas, [0] * len(alphas), fixed))
        longest = max(longests, default=0)
        # Where no length would pay if all rows were like the best one, none does.
        if not alphas or self.gain(max(alphas), len(alphas), longest, fixed, least_gain) <= 0.0:
            return best
        worth = [
            (self.trust * alpha**depth, row, depth)
            for row, (alpha, longest_here) in enumerate(zip(alphas, longests, strict=True))
            for depth in range(1, longest_here + 1)
        ]
        worth.sort(key=lambda draft: (-draft[0], draft[2]))
        least_speed = best.tokens_per_ns * least_gain
        figures = self._figures(len(alphas) + len(fixed), max(longest, *fixed, 1))
        # One row alone goes through its lengths in any case.
        for deepest in range(1 if len(alphas) > 1 else longest, longest + 1):
            drafts = [draft for draft in worth if draft[2] <= deepest]
            count, speed = _best_beginning(drafts, deepest, fixed, *figures)
            if speed > max(best.tokens_per_ns, least_speed):
                best = Plan([0] * len(alphas), speed)
                for _, row, depth in drafts[:count]:
                    best.draft_lens[row] = depth
        return best

    def _figures(self, rows: int, longest: int) -> tuple[list[list[float]], list[float]]:
        """The costs as lists, since a decision needs each many times: of a draft token at depth 1
        and of one behind it, by rows; of the rest of a step, by tokens per row.
        """
        draft_ns = [
            [self.costs.draft_ns(count, depth) for count in range(rows + 1)] for depth in (1, 2)
        ]
        return draft_ns, [self.costs.step_ns(rows, float(width)) for width in range(1, longest + 2)]

    def gain(
        self, alpha: float, rows: int, longest: int, fixed: Sequence[int], least_gain: float
    ) -> float:
        """What the best draft length would gain, if all of so many rows had this probability,
        beyond so many times the speed of plain decoding. Not above 0: no length pays.
        """
        if fixed:
            alphas = [alpha] * rows
            least = self.of(alphas, [0] * rows, fixed) * least_gain
            lengths = range(1, longest + 1)
            speeds = (self.of(alphas, [length] * rows, fixed) for length in lengths)
            return max(speeds, default=0.0) / least - 1.0
        step_ns = self.costs.step_ns
        plain_ns = step_ns(rows, 1.0) / least_gain
        best, drafting_ns, tokens, worth = 0.0, 0.0, 1.0, self.trust
        for length in range(1, longest + 1):
            worth *= alpha
            tokens += worth
            drafting_ns += self.costs.draft_ns(rows, length)
            best = max(best, tokens / (drafting_ns + step_ns(rows, 1.0 + length)))
        return best * plain_ns - 1.0


def block_length(alpha: float, draft_len: int) -> float:
    """The expected tokens of a step: 1 + a + ... + a^k (Leviathan et al. 2023, arXiv:2211.17192,
    section 3.1).
    """
    if alpha >= 1.0:
        return 1.0 + draft_len
    return float((1.0 - alpha ** (draft_len + 1)) / (1.0 - alpha))


def _best_beginning(
    drafts: Sequence[tuple[float, int, int]],
    deepest: int,
    fixed: Sequence[int],
    draft_ns: Sequence[Sequence[float]],
    step_ns: Sequence[float],
) -> tuple[int, float]:
    """How many of these drafts (worth, row, depth), in their order, make the batch fastest, and how
    fast in tokens per nanosecond. draft_ns and step_ns: see _figures.
    """
    first, further = draft_ns
    rows = len(first) - 1
    counts = [sum(length > depth for length in fixed) for depth in range(max(deepest, *fixed, 0))]
    drafting = sum((further if depth else first)[count] for depth, count in enumerate(counts))
    tokens, drafted, best, best_speed = float(rows), sum(fixed), 0, 0.0
    for index, (worth, _, depth) in enumerate(drafts):
        tokens += worth
        drafted += 1
        count, figures = counts[depth - 1], first if depth == 1 else further
        drafting += figures[count + 1] - figures[count]
        counts[depth - 1] = count + 1
        whole, part = divmod(drafted, rows)
        ns = drafting + step_ns[whole]
        if part:
            ns += part / rows * (step_ns[whole + 1] - step_ns[whole])
        if tokens > best_speed * ns:
            best, best_speed = index + 1, tokens / ns
    return best, best_speed
