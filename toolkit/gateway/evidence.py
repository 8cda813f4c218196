"""Whether a roll-out's candidate is worse than its baseline, by tests that may be looked at after
every request: `Evidence`.

Each test is a bet against "the candidate is not worse". If that is true, the wealth of a bettor who
starts with 1 and may stop at any time exceeds 1/a with probability at most a (Ville's inequality;
Ramdas et al. 2023, arXiv:2210.01948, sections 1 and 3). So a roll-out that rolls back once a
wealth reaches (number of tests)/false_alarm rolls back an equal candidate with at most that
probability, however long it runs and however often anybody looks.

- errors, ttft, time per token, acceptance: the arm of a session is drawn by lot, so given a
  session's figures, and all sessions before it, an equal candidate had it with probability `share`.
  The bet is the likelihood ratio of the arm under an alternative in which worse figures are
  likelier from the candidate. The figure enters by its rank among the baseline's earlier ones,
  u in (0, 1). The alternatives are Lehmann's, with density h * u^(h - 1), for a candidate that is
  worse altogether, and tails, for one that is worse in few requests: a share of its figures lies
  above the baseline's 90th or 97th percentile. Traffic may change
  in the course of the day: both arms meet it alike. Margins: the candidate's times are divided by
  max_slowdown before they are ranked, its acceptance by 1 - max_acceptance_loss.
  Load is not alike: a candidate with a small share is nearly idle, and its times look good. So the
  bets on times begin anew at every step, each with an equal part of the stake, and rank among the
  figures of that step; what a bettor lost while the candidate was idle counts no more where it is
  not. A part that waits for its step is money, so their sum is still a fair bet.
  A request for which a drafting arm drafted nothing has acceptance 0: lengths that adapt to a draft
  that has gone bad end drafting, and no rate would show it.
  Longer drafts lower the rate of the same draft, and a candidate of other costs adapts to other
  lengths. So where both arms count by position, alpha is ranked in place of the rate.
- copies: of the copied requests that only one arm answered, an equal candidate is as often the one
  that failed as the baseline.
- texts: greedy prompts that both arms answered. At most max_divergence_rate may differ.
- least acceptance: the mean of the candidate's acceptance rates is at least min_acceptance_rate
  (Waudby-Smith and Ramdas 2023, arXiv:2010.09686, section 4).

A session counts once, by its first request, since its requests are like one another. So does a
prompt. Bets with several alternatives are averaged, which leaves a fair bet.

Pure: observations in, wealth out. The same observations in the same order give the same wealth.
"""

from __future__ import annotations

import bisect
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from toolkit.config.schema import RolloutConfig

__all__ = ["LEAST_FIGURES", "TIMES", "Copy", "Evidence", "Finding", "Observation", "Texts"]

HEIGHTS = (1.2, 1.5, 2.0, 3.0, 6.0)  # Lehmann's exponents: a little worse to far worse
# (quantile, the candidate's share of figures above it)
TAILS = ((0.9, 0.2), (0.9, 0.4), (0.97, 0.12))
ERROR_RATIOS = (2.0, 5.0, 20.0, 200.0)  # how much likelier an error is from the candidate
RATE_SHARES = (0.1, 0.3, 0.6, 0.9)  # of the way from the allowed rate to 1
MEAN_STAKES = (0.2, 0.4, 0.6, 0.8)  # of the largest stake that cannot ruin
KEPT_FIGURES = 2000  # of the baseline, to rank by
LEAST_FIGURES = 20  # below this a rank says nothing
TIMES = ("ttft", "time per token")


@dataclass(frozen=True, slots=True)
class Observation:
    """A session's first request. share: the probability with which its arm was the candidate. A
    figure is None if the request had none. acceptance: accepted / drafted tokens; alpha: accepted /
    looked at. Both are 0 without drafts from an arm that drafts, and then drafted is False.
    """

    is_candidate: bool
    share: float
    is_error: bool
    ttft_ms: float | None = None
    token_ms: float | None = None
    acceptance: float | None = None
    drafted: bool = True
    alpha: float | None = None


@dataclass(frozen=True, slots=True)
class Texts:
    """A prompt that both arms answered greedily."""

    are_equal: bool


@dataclass(frozen=True, slots=True)
class Copy:
    """A prompt that was sent to both arms, and that only one of them answered."""

    is_candidate: bool  # the one that failed


@dataclass(frozen=True, slots=True)
class Finding:
    """A test as it stands. wealth: at `limit` the candidate is worse. requests: the candidate's
    that it has judged.
    """

    test: str
    wealth: float
    limit: float
    requests: int

    @property
    def is_worse(self) -> bool:
        return self.wealth >= self.limit


@dataclass
class Bet:
    """The wealth of one bet per alternative; the bettor's own is their mean."""

    log_wealths: list[float]
    judged: int = 0  # requests of the candidate

    @classmethod
    def of(cls, alternatives: Sequence[object]) -> Bet:
        return cls([0.0] * len(alternatives))

    @property
    def wealth(self) -> float:
        highest = max(self.log_wealths)
        mean = sum(math.exp(value - highest) for value in self.log_wealths) / len(self.log_wealths)
        return math.exp(min(700.0, highest + math.log(mean)))

    def multiply(self, factors: Sequence[float]) -> None:
        for index, factor in enumerate(factors):
            self.log_wealths[index] += math.log(factor)


@dataclass
class Restarts:
    """Bets that begin one after the other, each with one of so many parts of the stake."""

    parts: int
    bets: list[Bet] = field(default_factory=list)

    def begin(self) -> None:
        """The next bet, if a part of the stake is left for it."""
        if len(self.bets) < self.parts:
            self.bets.append(Bet.of((*HEIGHTS, *TAILS)))

    @property
    def judged(self) -> int:
        return self.bets[0].judged if self.bets else 0

    @property
    def wealth(self) -> float:
        waiting = self.parts - len(self.bets)
        return (sum(bet.wealth for bet in self.bets) + waiting) / self.parts


@dataclass
class Figures:
    """The baseline's latest figures, in order of time and of size."""

    latest: deque[float] = field(default_factory=deque)
    ordered: list[float] = field(default_factory=list)

    def add(self, figure: float) -> None:
        self.latest.append(figure)
        bisect.insort(self.ordered, figure)
        if len(self.latest) > KEPT_FIGURES:
            oldest = self.latest.popleft()
            self.ordered.pop(bisect.bisect_left(self.ordered, oldest))

    @property
    def can_rank(self) -> bool:
        return len(self.ordered) >= LEAST_FIGURES

    def rank(self, figure: float) -> float | None:
        """In (0, 1): the share of figures below this one; equal ones count half."""
        if not self.can_rank:
            return None
        below = bisect.bisect_left(self.ordered, figure)
        equal = bisect.bisect_right(self.ordered, figure) - below
        return (below + 0.5 * equal + 0.5) / (len(self.ordered) + 1)


def lot(is_candidate: bool, share: float, ratio: float) -> float:
    """The factor of a bet on the arm of a figure that is `ratio` times as likely from the candidate
    as from the baseline.
    """
    return (ratio if is_candidate else 1.0) / (share * ratio + 1.0 - share)


def _ratios(rank: float) -> list[float]:
    """How much likelier a figure of this rank is from the candidate, under each alternative."""
    altogether = [height * rank ** (height - 1) for height in HEIGHTS]
    tails = [
        above / (1 - quantile) if rank > quantile else (1 - above) / quantile
        for quantile, above in TAILS
    ]
    return altogether + tails


def _negative(figure: float | None) -> float | None:
    return None if figure is None else -figure


class Evidence:
    """All tests of one roll-out, brought forward by one observation after the other."""

    def __init__(self, settings: RolloutConfig) -> None:
        self._settings = settings
        self._errors = Bet.of(ERROR_RATIOS)
        self._share = 0.0  # the highest that was seen
        judged_steps = max(1, sum(0 < step < 100 for step in settings.steps))
        self._ranked = {name: Restarts(judged_steps) for name in TIMES}
        self._ranked["acceptance"] = Restarts(1)
        self._figures = {name: Figures() for name in (*self._ranked, "alpha")}
        # Whose figure the candidate has shown. One that never has it, as a plain one has no
        # acceptance, would lose a bet with every figure of the baseline.
        self._shown: set[str] = set()
        self._copies = Bet.of(ERROR_RATIOS)
        self._texts = Bet.of(RATE_SHARES)
        self._least = Bet.of(MEAN_STAKES)
        self.baseline = self.candidate = 0  # sessions

    def add(self, seen: Observation) -> None:
        """One session's first request."""
        if seen.is_candidate:
            self.candidate += 1
        else:
            self.baseline += 1
        is_drawn = 0 < seen.share < 1
        if is_drawn and seen.share > self._share:
            self._begin_step(seen.share)
        self._errors.judged += is_drawn and seen.is_candidate
        if seen.is_error and is_drawn:
            ratios = [lot(seen.is_candidate, seen.share, ratio) for ratio in ERROR_RATIOS]
            self._errors.multiply(ratios)
        slower, kept = self._settings.max_slowdown, 1 - self._settings.max_acceptance_loss
        lost = {"acceptance": _negative(seen.acceptance), "alpha": _negative(seen.alpha)}
        is_by_position = lost["alpha"] is not None and self._figures["alpha"].can_rank
        kind = "alpha" if is_by_position else "acceptance"
        self._rank("ttft", seen, seen.ttft_ms, 1 / slower)
        self._rank("time per token", seen, seen.token_ms, 1 / slower)
        self._rank("acceptance", seen, lost[kind], 1 / kept, kind)
        if not seen.is_candidate:
            figures = {"ttft": seen.ttft_ms, "time per token": seen.token_ms, **lost}
            for name, figure in figures.items():
                if figure is not None:
                    self._figures[name].add(figure)
        least = self._settings.min_acceptance_rate
        if least is not None and seen.is_candidate and seen.drafted and seen.acceptance is not None:
            largest = 1 / max(1 - least, 1e-9)
            stakes = [share * largest for share in MEAN_STAKES]
            self._least.judged += 1
            self._least.multiply([1 + stake * (least - seen.acceptance) for stake in stakes])

    def _begin_step(self, share: float) -> None:
        self._share = share
        for name, bets in self._ranked.items():
            if name in TIMES:
                self._figures[name] = Figures()
            bets.begin()

    def add_texts(self, seen: Texts) -> None:
        """One prompt that both arms answered."""
        self._texts.judged += 1
        self._copies.judged += 1
        allowed = max(self._settings.max_divergence_rate, 1e-6)
        rates = [allowed + share * (1 - allowed) for share in RATE_SHARES]
        if seen.are_equal:
            self._texts.multiply([(1 - rate) / (1 - allowed) for rate in rates])
        else:
            self._texts.multiply([rate / allowed for rate in rates])

    def add_copy(self, seen: Copy) -> None:
        """One prompt that one arm of two answered."""
        self._copies.judged += 1
        self._copies.multiply([lot(seen.is_candidate, 0.5, ratio) for ratio in ERROR_RATIOS])

    def _rank(
        self, name: str, seen: Observation, figure: float | None, scale: float, kind: str = ""
    ) -> None:
        """Bet on the arm of a figure; larger ones are worse. scale: the candidate's margin. kind:
        of the figure, if it is not the test's name.
        """
        if figure is None:
            return
        figures = self._figures[kind or name]
        rank = figures.rank(figure * scale if seen.is_candidate else figure)
        if rank is not None and name in self._shown and 0 < seen.share < 1:
            factors = [lot(seen.is_candidate, seen.share, ratio) for ratio in _ratios(rank)]
            for bet in self._ranked[name].bets:
                bet.judged += seen.is_candidate
                bet.multiply(factors)
        if seen.is_candidate:
            self._shown.add(name)

    @property
    def compared_texts(self) -> int:
        return self._texts.judged

    def findings(self) -> tuple[Finding, ...]:
        """Every test as it stands, the strongest evidence first."""
        tests: dict[str, Bet | Restarts] = {"errors": self._errors, **self._ranked}
        if self._settings.shadow:
            tests |= {"copies": self._copies, "texts": self._texts}
        if self._settings.min_acceptance_rate is not None:
            tests["least acceptance"] = self._least
        limit = len(tests) / self._settings.false_alarm
        found = [Finding(name, bet.wealth, limit, bet.judged) for name, bet in tests.items()]
        return tuple(sorted(found, key=lambda finding: -finding.wealth))
