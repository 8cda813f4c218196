"""How many tokens each request drafts, chosen while it runs: by what was accepted lately, and by
what a step costs.

The one idea: those lengths are best that are expected to give the most tokens per nanosecond
(`expected_speed`), by the probability of each request that a draft token of it is accepted. Plain
decoding is one of the choices, so a batch whose drafts do not pay is decoded plainly. Before it can
draft, the draft has the texts to read, so what is left of the requests has to be worth that.

That probability is estimated from a request's recent draft tokens (old ones are forgotten), and
begins at what recent requests had. After two blocks without an accepted token a draft is one token,
until one is accepted. A run of them that would be very unlikely at the estimate before it discards
the estimate, so that a text that becomes unpredictable is noticed in a few steps, and at little
cost. Lengths change only if that promises a gain of SWITCH_GAIN: near the best length the speed is
flat, and every change has its price.

Estimates are for texts that stay as they are. Where texts keep changing, less is accepted than they
say, in every request; so the expected tokens count only as far as recent ones came (`trust`).

A request that does not draft learns nothing, so it probes now and then: the draft reads the last
tokens that the target wrote, and what it would have proposed at each of them is compared. That is
one forward of the draft and none of the target. After a probe that fails the next one comes later,
and never so soon that its probes take more than a share of the time (PROBE_SHARE). All requests of
a batch together save up for their probes, since the first ones of many short texts would take more
than that. Where even perfect drafts would gain a batch little, the share is smaller, too, and where
they would not pay, as at high load, nothing is probed.

Of a batch that decodes plainly decisions take a part, too: the fewer its requests, the more. So
what was found for so many of them holds for a while, also when they have been more or fewer
meanwhile (PLAIN_HOLDS_NS).

Pure, and only of Python's standard library: costs are an argument, and there is no clock.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from toolkit.speculative.comparison import ComparedStep, Comparison
from toolkit.speculative.expected_speed import Costs, Plan, Speeds, block_length
from toolkit.speculative.trials import LEAST_TOKENS, PLAIN_TRIAL_STEPS, Trials
from toolkit.words import DraftLenReason

__all__ = [
    "PROBED_ROWS",
    "PROBE_TOKENS",
    "Adaptation",
    "AdaptiveSettings",
    "Controller",
    "Rest",
]

# Before the first request has finished. Drafts of pairs that are worth serving do about as well.
FIRST_ACCEPTANCE = 0.7
# How many draft tokens the estimate from earlier requests is worth to a new one: the more alike
# they were, the more. The first figure holds until so many have finished.
FIRST_PRIOR_TOKENS, LEAST_PRIOR_TOKENS, MOST_PRIOR_TOKENS, PRIOR_REQUESTS = 4.0, 1.0, 24.0, 8
KNOWN_TOKENS = 4.0  # of a request's own; with fewer it tells nothing of requests in general
# How many draft tokens of a request the mean of all running ones is worth, at least and at most.
# It is estimated from about so many decisions.
LEAST_POOLED_TOKENS, MOST_POOLED_TOKENS, POOLED_DECISIONS = 1.0, 32.0, 16.0
# Of the speed of one row; below it, lengths stay as they are. To end the drafts of a row has to
# gain more, since nothing is learned then, and it takes a while until they come back.
SWITCH_GAIN, END_GAIN = 0.015, 0.02
# Of the speed of a batch, that drafts have to promise beside the time in which the draft reads the
# prompts; those that begin also as much as costs may be off.
LEAST_BATCH_GAIN, MOST_READING = 0.01, 0.9
# A decision costs 50 to 150 microseconds, and a step of a small model a millisecond; of a batch
# each takes longer in proportion to its rows, but in a batch the text of one request matters less.
# Decisions that change nothing come at longer intervals. Where nothing is drafted, nothing is
# learned.
DECIDE_EVERY_STEPS, DECIDE_EVERY_STEPS_OF_BATCH, STEADY_FACTOR = 4, 16, 2
DECIDE_EVERY_IDLE_STEPS = 256
# That so many requests decode plainly holds for so long, whichever they are, where their load is
# known and what is expected of a new one's draft tokens changes by no more than that: of 4 requests
# decisions took 0.25 % of the time.
PLAIN_HOLDS_NS, EXPECTATION_THAT_MATTERS = 500_000_000, 0.05
ROWS_THAT_MATTER = 0.125  # by which share the rows may change before it is decided again
# A request that ends is often followed by another, and then nothing has changed: so many steps. A
# batch that does not draft begins anew with few rows, which would draft in vain: then more steps.
AWAIT_STEPS, AWAIT_STEPS_PLAIN = 3, 16
# Requests often come together. While more and more of them join, those that do decode plainly: so
# many steps.
JOINING_STEPS = 3
# While no estimate has moved by so much, a decision stands, so many times.
CHANCE_THAT_MATTERS, MOST_CONFIRMATIONS = 0.02, 4
PROBE_TOKENS = 12  # that one probe compares, at most
FIRST_PROBE_TOKENS = 8  # after which a request that begins without drafts is probed
PROBE_WINDOW_TOKENS = 8.0  # of a probe decide: the text may have changed while nothing was seen
# Of the time of plain decoding, at most: of a request alone, and of a batch, where each also learns
# from what the others showed.
PROBE_SHARE_ALONE, PROBE_SHARE = 0.01, 0.0025
# That is a batch's share where perfect drafts would gain so much beyond what it begins to draft
# for. Where they would gain less it falls in proportion, down to so much of it, since costs are not
# known exactly.
GAIN_WORTH_PROBING, LEAST_PROBING = 0.4, 0.125
# That are probed at a time: each also learns from what the others showed, and a draft that has not
# read a prompt yet reads all of it.
PROBED_ROWS = 4
PURSE_PROBES = 1.25  # of so many, that are saved up for at most: what one costs keeps changing
READ_REQUESTS = 32  # over about so many the lengths of prompts and outputs are averaged
PROBE_BACKOFF = 1.5  # the factor between the intervals of probes that fail
LONGEST_INTERVAL = 8  # of probes, in intervals as stated
# A run of blocks without an accepted token discards the estimate if it is less probable than this.
UNLIKELY_RUN = 0.00003
# Over about so many tokens without a draft an estimate is forgotten, where requests are alike.
STALE_TOKENS = 64.0
# Over about how many blocks, of all requests, what was accepted is compared with what was expected,
# and what that comparison is worth at first, in tokens.
TRUST_BLOCKS, TRUST_PRIOR_TOKENS, MOST_TRUST = 128.0, 120.0, 1.2
IDLE_DECISIONS = 64.0  # without drafts: over about so many that comparison is forgotten
LEAST_BLOCKS = 12  # with fewer of them, drafting was a mistake
DOUBTFUL_MISSES = 2  # blocks without an accepted token; from here on a draft is one token
PERFECT_ACCEPTANCE = 0.95  # if even this would not pay, the load is the reason


@dataclass(frozen=True, slots=True)
class AdaptiveSettings:
    """window_tokens: about how many draft tokens of a request decide. window_requests: over how
    many finished requests the acceptance is averaged that a new request begins with.
    min_acceptance_length: tokens per step, bonus token included; a request that is expected to have
    fewer does not draft, whatever the costs. probe_every_tokens: output tokens between two probes,
    before they become rarer.
    """

    window_tokens: int = 32
    window_requests: int = 16
    min_acceptance_length: float = 1.0
    probe_every_tokens: int = 16


@dataclass(slots=True)
class Adaptation:
    """One request. hits and trials: of draft tokens, with old ones forgotten; their quotient is
    the estimate. draft_len None: not decided yet.
    """

    hits: float
    trials: float
    draft_len: int | None = None
    chance: float = FIRST_ACCEPTANCE  # `acceptance`, drawn towards that of the others
    decided_chance: float = -1.0  # `chance`, when all lengths were compared last
    reason: DraftLenReason = "pays"
    unread_tokens: int = 0  # that the draft has to read before it can draft
    left_tokens: float = math.inf  # of output, that the request allows
    changes: int = 0  # of draft_len
    probes: int = 0
    misses: int = 0  # blocks without an accepted token, since the last one with
    usual_len: int = 0  # before the text became doubtful
    before_misses: float = 0.0  # the estimate then
    plain_tokens: int = 0  # output tokens since the last probe or block
    blocks: int = 0  # since drafting began
    probe_after: int = FIRST_PROBE_TOKENS
    # all of the request, for those that come after it
    total_hits: float = 0.0
    total_trials: float = 0.0

    @property
    def is_doubtful(self) -> bool:
        """Whether the text may have become unpredictable."""
        return self.misses >= DOUBTFUL_MISSES

    @property
    def acceptance(self) -> float:
        """The probability that a draft token is accepted if those before it are."""
        return self.hits / self.trials


@dataclass(slots=True)
class Rest:
    """Steps in which nothing can be due: how many, of which so many were taken, which no other
    count has yet; and of how many rows. As small as it can be, since most steps look at nothing
    else, and a forward has just filled the caches with something else.
    """

    steps: int = 0
    taken: int = 0
    least_rows: int = 0
    most_rows: int = 0
    at_lower_load: int = 0  # steps of fewer rows, one behind another

    def take(self, rows: int) -> bool:
        """Whether the next step, of so many rows, is one of them. If so, it is counted."""
        if self.taken < self.steps and self.least_rows <= rows <= self.most_rows:
            self.taken += 1
            self.at_lower_load = 0
            return True
        return False


@dataclass(frozen=True, slots=True)
class _Plainly:
    """So many requests were found to decode plainly, and why. until: the step from which on that
    has to be found again. expected: see _expected_of_new. perfect_gain: see Controller.
    """

    until: int
    expected: float
    why_not: DraftLenReason
    perfect_gain: float


@dataclass(frozen=True, slots=True)
class _Crowd:
    """The most requests that were decided for together since none was left, and how."""

    rows: int
    drafts: bool
    why_not: DraftLenReason


@dataclass(slots=True)
class Controller:
    """Decides for all requests of one runtime. Not thread-safe: the stepping thread calls it. Only
    `begin`, which reads, may be called from elsewhere.

    max_draft_len: the longest block that the engines can verify. trials: when the way of decoding
    that is not used is tried; None: never. comparison: what they show of batches; None: costs are
    known well.
    """

    settings: AdaptiveSettings
    costs: Costs
    max_draft_len: int
    trials: Trials | None = None
    comparison: Comparison | None = None
    expected_acceptance: float = FIRST_ACCEPTANCE  # of a new request
    _forgotten: float = field(init=False)  # of what is known, by a draft token
    _finished: int = 0
    _finished_spread: float = 0.0  # of finished requests' acceptance, beyond luck
    _steps_until_decision: int = 0
    _is_overdue: bool = False  # even where rows that draft await more of them
    _steps_since_more: int = 0  # rows than in the step before
    _last_rows: int = 0
    _decide_every: int = DECIDE_EVERY_STEPS
    rest: Rest = field(default_factory=Rest)
    _steps_until_probe: int = 0
    # For probes: what was saved, what each step adds, and the most.
    _saved_ns: float = math.inf
    _income_ns: float = 0.0
    _purse_ns: float = math.inf
    _perfect_gain: float = math.inf  # of perfect drafts: see Speeds.gain. inf: not known
    # Of the last decision: its rows, its longest draft, the worth of the least draft token that it
    # took, and why a row that drafts nothing does not.
    _rows: int = 0
    _longest: int = 0  # that was allowed
    _deepest: int = 0
    _wants_ends: bool = False  # of a row that is not doubtful
    _confirmations: int = 0  # since then
    _least_worth: float = math.inf
    _why_not: DraftLenReason = "acceptance"
    _crowd: _Crowd | None = None
    _steps: int = 0  # all that were taken
    _plainly: dict[int, _Plainly] = field(default_factory=dict)  # by rows
    # By how much recent requests differed beyond luck, and what luck explains: see _pooled.
    _spread: float = 0.0
    _luck: float = 0.0
    # Draft tokens of recent blocks.
    _expected: float = 0.0
    _accepted: float = 0.0
    # Tokens of recent requests: of their prompts, which a draft would have to read, and of output
    # that was written, and that was allowed.
    _ended: int = 0  # requests, READ_REQUESTS at most
    _read: float = 0.0
    _written: float = 0.0
    _allowed: float = 0.0
    # Of the time that the rows of the decision still take plainly, what it takes to let the draft
    # read their texts.
    _catching_up: float = 0.0
    # What rows that are in a trial have usually.
    _usual: list[tuple[Adaptation, int | None, DraftLenReason]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._forgotten = 1.0 / self.settings.window_tokens

    @property
    def trust(self) -> float:
        """The accepted draft tokens over those that were expected. Below 1 where texts change
        faster than the estimates; a little above it where they do not, since hard stretches take
        more steps, and so more of the estimates are made there.
        """
        prior = TRUST_PRIOR_TOKENS
        return min(MOST_TRUST, (self._accepted + prior) / (self._expected + prior))

    def begin(self) -> Adaptation:
        """The state of a new request."""
        prior = self._prior_tokens()
        return Adaptation(self.expected_acceptance * prior, prior)

    def _prior_tokens(self) -> float:
        """How many of a request's own draft tokens the estimate from finished ones is worth."""
        if self._finished < PRIOR_REQUESTS:
            return FIRST_PRIOR_TOKENS
        luck = self.expected_acceptance * (1.0 - self.expected_acceptance)
        return _worth_of_the_mean(
            luck, self._finished_spread, LEAST_PRIOR_TOKENS, MOST_PRIOR_TOKENS
        )

    def finish(
        self,
        state: Adaptation,
        *,
        prompt_tokens: int = 0,
        output_tokens: int = 0,
        max_tokens: int = 0,
    ) -> None:
        """Learn from a finished request what to expect of the next one. prompt_tokens: those that
        no cache held when it began.
        """
        if output_tokens:
            self._ended = min(self._ended + 1, READ_REQUESTS)
            self._read += (prompt_tokens - self._read) / self._ended
            self._written += (output_tokens - self._written) / self._ended
            self._allowed += (max_tokens - self._allowed) / self._ended
        if state.total_trials < KNOWN_TOKENS:
            return
        self._finished = min(self._finished + 1, self.settings.window_requests)
        expected, rate = self.expected_acceptance, state.total_hits / state.total_trials
        beyond = (rate - expected) ** 2 - expected * (1.0 - expected) / state.total_trials
        self._finished_spread += (beyond - self._finished_spread) / self._finished
        self.expected_acceptance += (rate - expected) / (1 + self._finished)

    def pause(self) -> None:
        """No request is left. What comes next is of another moment of the machine, and is taken for
        the first of as many as there were at most. So if those decoded plainly, it does, too, until
        none has followed for a while.
        """
        if self.comparison is not None:
            self.comparison.end()
        crowd = self._crowd
        if crowd is not None and not crowd.drafts and crowd.rows > self._rows:
            self._wake()
            self._rows, self._deepest, self._why_not = crowd.rows, 0, crowd.why_not
        self._crowd = None

    def reconsider(self) -> None:
        """What was decided does not hold any more, for however many rows."""
        self._plainly.clear()
        self._decide_again()

    def _decide_again(self) -> None:
        """Let `keeps` say no for the next step, unless rows that decode plainly await others."""
        self._wake()
        self._is_overdue = True

    @property
    def is_trying(self) -> bool:
        """Whether the next steps are those of a trial."""
        return self.trials is not None and self.trials.is_on

    @property
    def compares(self) -> bool:
        """Whether the step that is taken is one of those that `compare` asks for."""
        return self.comparison is not None and self.comparison.is_on

    # What a step showed.

    def compare(self, step: ComparedStep) -> None:
        """A step was taken, in a trial or behind one."""
        if self.comparison is not None and self.comparison.note(step):
            self.reconsider()

    def note_block(self, state: Adaptation, drafted: int, accepted: int) -> None:
        """A block was verified. The first rejected token is the last one that was tried."""
        if not (accepted or state.misses):
            state.before_misses = min(state.acceptance, PERFECT_ACCEPTANCE)
        tried = accepted + 1 if accepted < drafted else drafted
        kept = max(0.0, 1.0 - tried * self._forgotten)
        state.hits = state.hits * kept + accepted
        state.trials = state.trials * kept + tried
        state.total_hits += accepted
        state.total_trials += tried
        state.blocks += 1
        self._expected += block_length(state.chance, drafted) - 1.0 - self._expected / TRUST_BLOCKS
        self._accepted += accepted - self._accepted / TRUST_BLOCKS
        state.plain_tokens = 0
        if accepted and not state.misses:
            return  # what nearly all blocks are
        was_doubtful = state.is_doubtful
        state.misses = 0 if accepted else state.misses + 1
        if state.is_doubtful and not was_doubtful:
            state.usual_len, state.draft_len = drafted, min(drafted, 1)
        elif was_doubtful and not state.is_doubtful:
            state.draft_len = max(drafted, state.usual_len)
        if state.misses and (1.0 - state.before_misses) ** state.misses < UNLIKELY_RUN:
            state.hits, state.trials = 0.5, state.misses + 1.0
            self._decide_again()

    def note_plain(self, state: Adaptation, tokens: int) -> None:
        """Output tokens came without a draft. The more of them, the less is known of the text as it
        is now, so the estimate returns to what requests have in general; the sooner, the more alike
        they are.
        """
        state.plain_tokens += tokens
        if state.draft_len == 0 and self._finished >= PRIOR_REQUESTS:
            stale = tokens * self._prior_tokens() / MOST_PRIOR_TOKENS
            kept = math.exp(-stale / STALE_TOKENS)
            state.hits = kept * state.hits + (1.0 - kept) * state.trials * self.expected_acceptance

    def note_probe(self, state: Adaptation, shares: Sequence[float], rows: int) -> None:
        """A probe looked at the last output tokens. shares: for each of them, in order, the
        probability that it would have been an accepted draft. rows: of the batch, which decides how
        soon another probe is affordable.
        """
        self._wake()
        state.probes += 1
        self._saved_ns -= self.costs.probe_ns(1)
        state.plain_tokens = state.misses = 0
        for share in shares:
            state.hits += share - state.hits / PROBE_WINDOW_TOKENS
            state.trials += 1.0 - state.trials / PROBE_WINDOW_TOKENS
        state.total_hits += sum(shares)
        state.total_trials += len(shares)
        self._probe_later(state, rows)
        self._decide_again()

    def _probe_later(self, state: Adaptation, rows: int) -> None:
        every = self.settings.probe_every_tokens
        longest = LONGEST_INTERVAL * every
        state.probe_after = max(every, min(int(PROBE_BACKOFF * state.probe_after), longest))
        self._afford(state, rows)

    def _afford(self, state: Adaptation, rows: int) -> None:
        affordable = self.costs.probe_ns(rows) / (_probe_share(rows) * self.costs.step_ns(rows, 1))
        state.probe_after = max(state.probe_after, int(affordable) + 1)

    # What the next step does.

    def is_probe_due(self, state: Adaptation) -> bool:
        return state.plain_tokens >= state.probe_after and state.reason == "acceptance"

    def is_probe_near(self, state: Adaptation, tokens: int) -> bool:
        """Whether the next token may be one that a probe looks at. tokens: of plain output that
        were not noted yet.
        """
        seen = state.plain_tokens + tokens + PROBE_TOKENS
        # Steps that rest are saved for later.
        is_paid_soon = self._lacking_ns() <= (self.rest.taken + PROBE_TOKENS) * self._income_ns
        return seen >= state.probe_after and is_paid_soon and state.reason == "acceptance"

    def is_due_soon(self, state: Adaptation) -> bool:
        """Whether a probe is far enough away that one now, beside another row's, saves one."""
        return 2 * state.plain_tokens >= state.probe_after and state.reason == "acceptance"

    def rests(self, rows: int) -> bool:
        """Whether nothing can be due in the next step, of so many rows. If so, it is counted. Where
        nothing drafts, requests that come and go change nothing, while they are about as many, nor
        for some steps in which they are fewer.
        """
        rest = self.rest
        if rest.take(rows):
            return True
        if self._deepest or rest.taken >= rest.steps or rows > rest.most_rows:
            return False
        if rest.at_lower_load >= AWAIT_STEPS_PLAIN:
            return False
        rest.at_lower_load += 1
        rest.taken += 1
        return True

    def _wake(self) -> None:
        """Let `rests` say no for the next step, and count those in which nothing was due."""
        rest, steps = self.rest, self.rest.taken
        rest.steps = rest.taken = 0
        if steps:
            self._steps_until_decision -= steps
            self._steps_until_probe -= steps
            self._steps_since_more += steps
            self._steps += steps
            self._save(steps * self._income_ns)
            if self.trials is not None:
                self.trials.pass_steps(self._last_rows, steps)

    def keeps(self, rows: int) -> bool:
        """Whether the next step, of so many rows, goes on with the lengths of the last decision.
        Ask once per step in which `rests` says no: deciding takes longer than this.
        """
        self._wake()
        self._steps_until_decision -= 1
        self._steps_until_probe -= 1
        self._steps += 1
        self._save(self._income_ns)
        more = rows - self._rows
        slack = 0 if self._deepest else int(ROWS_THAT_MATTER * self._rows)
        self.rest.at_lower_load = self.rest.at_lower_load + 1 if more < -slack else 0
        is_same_load = abs(more) <= ROWS_THAT_MATTER * self._rows
        awaited = AWAIT_STEPS if self._deepest else AWAIT_STEPS_PLAIN
        is_awaited = 0 < self.rest.at_lower_load <= awaited
        self._steps_since_more = 0 if rows > self._last_rows else self._steps_since_more + 1
        self._last_rows = rows
        is_growing = more > 0 and rows > 1 and self._steps_since_more < JOINING_STEPS
        if self.trials is not None:
            was_on = self.trials.is_on
            if self.trials.pass_step(rows) or was_on:
                return self.trials.is_on
        if is_awaited and not self._deepest:
            return True  # drafts that begin for a moment are in vain
        if self._is_overdue:
            return False
        holds = self._steps_until_decision > 0 and (is_same_load or is_awaited or is_growing)
        if not (holds or self._deepest) and self._goes_on_plainly(rows):
            holds, more = True, 0
        if abs(more) <= slack:
            until_probe = max(self._steps_until_probe, self._steps_until_paid())
            rest = self.rest
            rest.steps = max(0, min(self._steps_until_decision, until_probe) - 1)
            rest.least_rows, rest.most_rows = self._rows - slack, self._rows + slack
        return holds

    def _goes_on_plainly(self, rows: int) -> bool:
        """Whether so many were found to decode plainly, and that holds. If so, it is as if it had
        been decided again.
        """
        found = self._plainly.get(rows)
        if found is None or self._steps >= found.until:
            return False
        if abs(self._expected_of_new() - found.expected) > EXPECTATION_THAT_MATTERS:
            return False
        self._rows, self._steps_until_decision = rows, found.until - self._steps
        self._why_not, self._perfect_gain = found.why_not, found.perfect_gain
        self._note_crowd()
        self._save_for_probes_of(rows)
        return True

    def _note_plainly(self) -> None:
        """The last decision was that its rows decode plainly."""
        rows, comparison = self._rows, self.comparison
        if rows > 1 and (comparison is None or comparison.is_known(rows)):
            steps = int(PLAIN_HOLDS_NS / self.costs.step_ns(rows, 1.0))
            self._plainly[rows] = _Plainly(
                self._steps + steps, self._expected_of_new(), self._why_not, self._perfect_gain
            )

    def _expected_of_new(self) -> float:
        """Of the draft tokens of a new request, the share that is expected to be accepted."""
        return self.trust * self.expected_acceptance

    def _note_crowd(self) -> None:
        if self._crowd is None or self._rows >= self._crowd.rows:
            self._crowd = _Crowd(self._rows, self._deepest > 0, self._why_not)

    def may_probe(self) -> bool:
        """Whether a probe can be due in this step. Only then rows have to be looked at. It may
        cost more than was saved: then the next one comes the later.
        """
        return self._steps_until_probe <= 0 and self.can_pay_probe()

    def can_pay_probe(self) -> bool:
        """Whether enough was saved for the probe of a row."""
        return self._lacking_ns() == 0.0

    def _steps_until_paid(self) -> int:
        """For a probe."""
        return math.ceil(self._lacking_ns() / self._income_ns)

    def _lacking_ns(self) -> float:
        return max(0.0, self.costs.probe_ns(1) - self._saved_ns)

    def tokens_until_paid(self) -> int:
        """How many output tokens a request alone decodes plainly until enough is saved for a probe
        (`save_for_probes`).
        """
        return math.ceil(self._lacking_ns() / (PROBE_SHARE_ALONE * self.costs.step_ns(1, 1)))

    def save_for_probes(self, plain_ns: int) -> None:
        """Plain decoding took so long, where no steps are counted (`keeps`)."""
        self._save(PROBE_SHARE_ALONE * plain_ns)

    def _saved_share(self, rows: int) -> float:
        """Of the time of plain decoding, that is saved for probes."""
        worth = self._perfect_gain / GAIN_WORTH_PROBING if rows > 1 else 1.0
        return _probe_share(rows) * min(1.0, max(LEAST_PROBING, worth))

    def _save(self, ns: float) -> None:
        self._saved_ns = min(self._saved_ns + ns, self._purse_ns)

    def await_probes(self, states: Sequence[Adaptation]) -> None:
        """Note when the first probe is due, if each of them gets a token per step."""
        self._wake()
        self._steps_until_probe = min(
            (
                state.probe_after - state.plain_tokens
                for state in states
                if state.reason == "acceptance"
            ),
            default=DECIDE_EVERY_IDLE_STEPS,
        )

    def awaits_more(self, rows: int) -> bool:
        """Whether so many requests, which begin together while none runs, are taken for the first
        of as many as there were: then they join that batch.
        """
        return rows < self._rows

    def _has_outgrown(self, rows: int) -> bool:
        """Whether so many rows are more than the last decision was for."""
        return rows > (1.0 + ROWS_THAT_MATTER) * self._rows

    def join(self, state: Adaptation, rows: int) -> None:
        """Give a request that joins a batch, or follows one alone, the drafts that the last
        decision would have taken, or none if the batch grows. The next one is for all. rows: with
        this one.
        """
        is_growing = self._has_outgrown(rows)
        if not (self._deepest or is_growing or self.is_trying):
            # The batch rests on, until a probe of this request may be due.
            state.draft_len, state.reason = 0, self._why_not
            due = self.rest.taken + state.probe_after
            if state.reason == "acceptance" and due < self._steps_until_probe:
                self._steps_until_probe = due
                paid = self.rest.taken + self._steps_until_paid()
                self.rest.steps = min(self.rest.steps, max(due, paid))
            return
        self._wake()
        state.chance = state.acceptance
        length, worth = 0, self.trust * state.chance
        while length < self._deepest and worth >= self._least_worth and not is_growing:
            length, worth = length + 1, worth * state.chance
        self._set(state, length, "load" if is_growing else self._why_not, self._rows)
        if self.trials is not None and self.is_trying:
            self._try(state, 0)
            self.trials.join()
        if state.reason == "acceptance":
            self._steps_until_probe = min(self._steps_until_probe, state.probe_after)

    def choose(
        self,
        states: Sequence[Adaptation],
        *,
        limit: int | None = None,
        fixed: Sequence[int] = (),
    ) -> None:
        """Set draft_len and reason of every row of the next step.

        limit: the longest draft that is allowed now; None: max_draft_len. fixed: the draft lengths
        of further rows of the step, which are not ours to choose.
        """
        self._wake()
        self._end_trial()
        rows = len(states) + len(fixed)
        longest = self.max_draft_len if limit is None else min(limit, self.max_draft_len)
        alphas = self._pooled(states)
        self._catching_up = self._share_of_catching_up(states, rows)
        for state, alpha in zip(states, alphas, strict=True):
            state.chance = alpha
        if self._is_held(states, longest, fixed):
            self._rows = rows
            self._wait(states, is_steady=True)
            return
        if self._stands(states, longest) and rows == self._rows and not fixed:
            self._confirmations += 1
            self._wait(states, is_steady=True)
            return
        has_grown = self._rows > 0 and self._has_outgrown(rows)
        has_shrunk = rows < self._rows
        self._rows, self._longest, self._confirmations = rows, longest, 0
        for state in states:
            state.decided_chance = state.chance
        longests = [min(longest, 1) if state.is_doubtful else longest for state in states]
        speeds, least_gain = self._speeds(), self._least_gain(rows, fixed)
        best = speeds.best(alphas, longests, fixed, least_gain)
        best = self._settled(states, alphas, longests, best, fixed, has_grown=has_grown)
        # A new request that does not draft, as those before it, changes nothing.
        unset = 0 if self._deepest == 0 else None
        is_same = best.draft_lens == [
            unset if state.draft_len is None else state.draft_len for state in states
        ]
        is_steady = is_same and not self._wants_ends
        is_loaded: bool | None = None
        self._deepest = max(best.draft_lens, default=0)
        if not self._deepest:
            # Nothing corrects it now, and it must not hold for ever.
            self._expected -= self._expected / IDLE_DECISIONS
            self._accepted -= self._accepted / IDLE_DECISIONS
        self._least_worth, self._why_not = math.inf, "acceptance"
        self._perfect_gain = math.inf
        for state, alpha, draft_len in zip(states, alphas, best.draft_lens, strict=True):
            is_too_short = block_length(alpha, longest) < self.settings.min_acceptance_length
            length = 0 if is_too_short else draft_len
            if length == 0 and is_loaded is None:
                perfect = max(PERFECT_ACCEPTANCE, *alphas)
                self._perfect_gain = speeds.gain(perfect, len(states), longest, fixed, least_gain)
                is_loaded = self._perfect_gain <= 0.0
                self._why_not = "load" if is_loaded else "acceptance"
            if length:
                self._least_worth = min(self._least_worth, self.trust * alpha**length)
            self._set(state, length, self._why_not, rows)
        self._note_crowd()
        self._wait(states, is_steady=is_steady)
        if not (self._deepest or fixed):
            self._note_plainly()
        # Fewer rows may soon be still fewer.
        is_possible = not (fixed or has_shrunk or self.compares)
        if self.trials is not None and is_possible and self.trials.is_due(rows):
            self._begin_trial(self.trials, states, alphas, longests)

    def _begin_trial(
        self,
        trials: Trials,
        states: Sequence[Adaptation],
        alphas: Sequence[float],
        longests: Sequence[int],
    ) -> None:
        """Let the next steps be plain ones if these rows draft. If not, each drafts as many tokens
        as all of them would best.
        """
        rows, usual = len(states), [state.draft_len or 0 for state in states]
        mean = sum(alphas) / rows
        lengths = [0]
        if not any(usual):
            lengths = [
                length
                for length in range(1, min(longests) + 1)
                if block_length(mean, length)
                >= max(LEAST_TOKENS, self.settings.min_acceptance_length)
            ]
        speeds = self._speeds()
        speed, other = max(
            ((speeds.of(alphas, [length] * rows, ()), length) for length in lengths),
            default=(0.0, 0),
        )
        # What the draft reads before it, or after it.
        unread = sum(state.unread_tokens for state in states) if other else rows * PLAIN_TRIAL_STEPS
        reading_ns = self.costs.read_ns(unread)
        promise = speed / speeds.of(alphas, usual, ())
        step_ns = self.costs.step_ns(rows, 1.0)
        blocks = max((state.blocks for state in states if state.draft_len), default=0)
        if trials.begin(
            rows,
            promise,
            reading_ns / step_ns,
            step_ns=step_ns,
            drafts=any(usual),
            blocks=blocks,
            little_is_known=self.comparison is not None and not self.comparison.is_known(rows),
        ):
            for state in states:
                self._try(state, other)
            if self.comparison is not None and rows > 1:
                self.comparison.begin(rows)

    def _try(self, state: Adaptation, draft_len: int) -> None:
        self._usual.append((state, state.draft_len, state.reason))
        state.draft_len, state.reason = draft_len, "measuring"
        if not draft_len:
            state.misses = 0  # the text goes on, and what was doubtful is behind it

    def _end_trial(self) -> None:
        if self.trials is not None:
            self.trials.end()
        if self.comparison is not None and self._usual:
            self.comparison.end_trial()
        for state, draft_len, reason in self._usual:
            state.draft_len, state.reason = draft_len, reason
        self._usual.clear()

    def _settled(
        self,
        states: Sequence[Adaptation],
        alphas: Sequence[float],
        longests: Sequence[int],
        best: Plan,
        fixed: Sequence[int],
        *,
        has_grown: bool,
    ) -> Plan:
        """The best lengths, or the present ones if that gains too little. The drafts of a row end
        when a second decision in a row wants it: a few hard words may have been the reason for the
        first, and what ends is not seen any more. A doubtful row has shown enough, and so has a
        batch that has grown. A batch goes back to plain decoding as soon as drafts gain next to
        nothing.
        """
        present = [
            new if state.draft_len is None else min(state.draft_len, most)
            for state, new, most in zip(states, best.draft_lens, longests, strict=True)
        ]
        if present == best.draft_lens:  # nothing to settle, and to compare takes time
            self._wants_ends = False
            return best
        rows = len(states) + len(fixed)
        kept_speed = self._speeds().of(alphas, present, fixed)
        ending = [
            state
            for state, old, new in zip(states, present, best.draft_lens, strict=True)
            if old > 0 == new
        ]
        least = 1.0 + (SWITCH_GAIN + END_GAIN * len(ending)) / rows
        if _begins_plainly(rows, fixed) and not any(best.draft_lens):
            least = 1.0 - self._share_of_reading(rows) - LEAST_BATCH_GAIN
        is_worth_it = best.tokens_per_ns >= kept_speed * least
        wanted_ends = self._wants_ends
        has_shown_enough = has_grown or all(state.is_doubtful for state in ending)
        self._wants_ends = is_worth_it and not has_shown_enough
        if not is_worth_it or (self._wants_ends and not wanted_ends):
            return Plan(present, kept_speed)
        return best

    def _is_held(self, states: Sequence[Adaptation], longest: int, fixed: Sequence[int]) -> bool:
        """Whether a comparison goes on, for which lengths stay as they are. It ends where these are
        no longer the rows for it.
        """
        if self.comparison is None or not self.comparison.is_on:
            return False
        is_same = longest == self._longest and self.comparison.is_of(len(states))
        if not is_same or fixed or any(state.draft_len is None for state in states):
            self.comparison.end()
        return self.comparison.is_on

    def _stands(self, states: Sequence[Adaptation], longest: int) -> bool:
        """Whether the last decision holds for these rows, if nothing else has changed. Without
        drafts no estimate moves, but costs do.
        """
        return (
            self._deepest > 0
            and not self._wants_ends
            and self._confirmations < MOST_CONFIRMATIONS
            and longest == self._longest
            and all(
                abs(state.chance - state.decided_chance) < CHANCE_THAT_MATTERS for state in states
            )
        )

    def _wait(self, states: Sequence[Adaptation], *, is_steady: bool) -> None:
        """Until the next decision, and the next probe."""
        every = DECIDE_EVERY_STEPS if self._rows == 1 else DECIDE_EVERY_STEPS_OF_BATCH
        most, factor = STEADY_FACTOR * every, STEADY_FACTOR
        if not self._deepest:
            most, factor = DECIDE_EVERY_IDLE_STEPS, 4
        longer = min(factor * self._decide_every, most)
        self._decide_every = longer if is_steady else every
        self._steps_until_decision, self._is_overdue = self._decide_every, False
        self._save_for_probes_of(self._rows)
        self.await_probes(states)

    def _save_for_probes_of(self, rows: int) -> None:
        """From now on, each step saves for those of so many rows."""
        self._income_ns = self._saved_share(rows) * self.costs.step_ns(rows, 1)
        self._purse_ns = PURSE_PROBES * self.costs.probe_ns(min(rows, PROBED_ROWS))

    def _pooled(self, states: Sequence[Adaptation]) -> list[float]:
        """The acceptance to expect of each request: its own estimate, drawn towards the mean, since
        the best estimates owe a part to luck.
        """
        if not states:
            return []
        mean = sum(state.hits for state in states) / sum(state.trials for state in states)
        # What a request begins with says nothing of how much requests differ.
        known = [state for state in states if state.total_trials >= KNOWN_TOKENS]
        if len(known) > 1:
            luck = mean * (1.0 - mean)
            beyond = sum((state.acceptance - mean) ** 2 - luck / state.trials for state in known)
            self._spread += (beyond / (len(known) - 1) - self._spread) / POOLED_DECISIONS
            self._luck += (luck - self._luck) / POOLED_DECISIONS
        pooled = _worth_of_the_mean(
            self._luck, self._spread, LEAST_POOLED_TOKENS, MOST_POOLED_TOKENS
        )
        return [(state.hits + pooled * mean) / (state.trials + pooled) for state in states]

    def _set(self, state: Adaptation, draft_len: int, why_not: DraftLenReason, rows: int) -> None:
        if state.draft_len is not None and state.draft_len != draft_len:
            state.changes += 1
        if draft_len and not state.draft_len:
            state.blocks = 0
        if state.draft_len and draft_len == 0:
            # What would repeat a mistake comes later.
            if state.blocks >= LEAST_BLOCKS:
                state.probe_after = self.settings.probe_every_tokens
                self._afford(state, rows)
            else:
                self._probe_later(state, rows)
        state.draft_len = draft_len
        state.reason = "pays" if draft_len else why_not

    def _speeds(self) -> Speeds:
        return Speeds(self.costs, self.trust)

    def _least_gain(self, rows: int, fixed: Sequence[int]) -> float:
        """The speed with drafts over that without, from which on so many rows begin to draft."""
        if not _begins_plainly(rows, fixed):
            return 1.0 / (1.0 - self._catching_up)
        reading = max(self._catching_up, self._share_of_reading(rows))
        doubt = 0.0 if self.comparison is None else self.comparison.doubt(rows)
        return (1.0 + LEAST_BATCH_GAIN + doubt) / (1.0 - reading)

    def _share_of_reading(self, rows: int) -> float:
        """What a batch of requests like the recent ones takes to let the draft read their prompts,
        over the time of plain decoding.
        """
        if not self._ended:
            return 0.0
        per_token_ns = self.costs.read_ns(self._read / self._written)
        return min(MOST_READING, per_token_ns * rows / self.costs.step_ns(rows, 1.0))

    def _share_of_catching_up(self, states: Sequence[Adaptation], rows: int) -> float:
        """What it takes to let the draft read what these requests have by now, over the time that
        they still take in plain decoding of so many rows. Near their ends it is not worth it.
        """
        unread = sum(state.unread_tokens for state in states)
        if not unread:
            return 0.0
        # Of what is allowed, requests write about as large a part as recent ones.
        part = self._written / self._allowed if self._allowed else 1.0
        left = part * sum(state.left_tokens for state in states)
        plain_ns = left / len(states) * self.costs.step_ns(rows, 1.0)
        return min(MOST_READING, self.costs.read_ns(unread) / plain_ns)


def _begins_plainly(rows: int, fixed: Sequence[int]) -> bool:
    """Whether it is a batch none of whose rows drafts in any case."""
    return rows > 1 and not any(fixed)


def _probe_share(rows: int) -> float:
    return PROBE_SHARE_ALONE if rows == 1 else PROBE_SHARE


def _worth_of_the_mean(luck: float, spread: float, least: float, most: float) -> float:
    """How many of a request's own tokens the mean of all is worth. The less requests differ beyond
    what luck explains, the more (the method of moments for a beta-binomial).

    luck: the variance of one token. spread: the variance of the requests, without what luck adds.
    """
    return most if spread <= 0.0 else min(most, max(least, luck / spread - 1.0))
