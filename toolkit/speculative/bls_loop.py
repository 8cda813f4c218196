"""Draft-target speculation over two engines that can only be called with tokens and answer with
tokens. The BLS model runs this loop.

`runtime` owns both KV caches; this loop does not. A round here is two calls, and each carries the
whole sequence: the draft is asked for a few tokens that follow it, then the target is asked to
verify them and to add one of its own. The engines avoid computing the sequence again by reusing the
KV cache of a common prefix. This module decides what the rounds of one request mean: end tokens,
stop words, lengths, statistics, and what happens to the request if the draft fails.

Apart from the calls it is pure, and it needs only Python's standard library, so it can be shipped
in a repository and run where only Triton is installed. The engines are an argument.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from toolkit.errors import RequestError
from toolkit.interfaces import TokenEvent
from toolkit.speculative.adaptive import Controller
from toolkit.speculative.call_costs import CallCosts
from toolkit.speculative.ending import Reason, last_text, read_block
from toolkit.speculative.load_gate import LoadGate
from toolkit.speculative.stats import Tally
from toolkit.speculative.text import TextStream
from toolkit.words import DraftLenReason, FinishReason

__all__ = ["Adaptive", "DraftFailed", "Drafts", "Engines", "Part", "Rounds", "Settings"]

MEASURED_PLAIN_TOKENS = 48  # that are decoded plainly to learn what that costs
TELLING_TOKENS = 16  # of plain decoding: what fewer take is mostly calling
# A call takes time itself, so that one for fewer tokens is not worth it. Where even a perfect draft
# would not pay, it is decided again after so many, and at most so many: what was decided twice is
# likely to be decided again.
PLAIN_TOKENS, MOST_PLAIN_TOKENS = 32, 1024


class DraftFailed(RequestError):
    """The draft model is missing, died, refused the call, or answered with what are no drafts, or
    none that the target takes.
    """


@dataclass(frozen=True, slots=True)
class Drafts:
    """Proposed tokens. logits [len(ids), vocab]: the draft's logits that each was chosen from,
    present only if the target needs them.
    """

    ids: tuple[int, ...] = ()
    logits: Any = None


NO_DRAFTS = Drafts()


@dataclass(frozen=True, slots=True)
class Part:
    """What one call of the target added to the sequence.

    log_probs: one per token, or empty if they were not requested. next_best: for each token, the
    likeliest other token and its log-probability, or empty if the engine does not return them.
    """

    ids: tuple[int, ...]
    log_probs: tuple[float, ...] = ()
    next_best: tuple[tuple[int, float], ...] = ()


class Engines(Protocol):
    """The two engines as one request sees them. ids: the whole sequence so far. All methods raise
    RequestError if a call fails.
    """

    def draft(self, ids: Sequence[int], count: int) -> Drafts:
        """Propose up to `count` tokens that follow ids. Raises DraftFailed."""
        ...

    def verify(self, ids: Sequence[int], drafts: Drafts) -> Part:
        """Return the drafts that the target accepts, and one token of its own after them unless
        the text ends before it.
        """
        ...

    def plain(self, ids: Sequence[int], count: int) -> Generator[Part, None, None]:
        """Yield up to `count` tokens of the target alone, in as many parts as the engine sends.
        Closing the generator cancels the call.
        """
        ...


@dataclass(frozen=True, slots=True)
class Settings:
    """One request. draft_len 0: plain decoding. draft_len_reason: why it is that long, if nothing
    chooses it while the request runs. on_draft_failure: error | plain (the rest of the request is
    decoded without drafts).
    """

    request_id: str
    prompt_ids: tuple[int, ...]
    max_tokens: int
    draft_len: int
    end_ids: frozenset[int]
    arrival_ns: int
    draft_len_reason: DraftLenReason = "fixed"
    deadline_ns: int | None = None
    on_draft_failure: str = "error"
    # Drafts are verified and none is accepted: this tests the target's verify call.
    verify_only: bool = False
    log_probs: bool = False
    running_stats: bool = False  # every event has the statistics so far


@dataclass(slots=True)
class Adaptive:
    """What chooses draft lengths, shared by the requests of an instance, which come one after the
    other. costs: the same that the controller decides by. gate: whether instances that work at the
    same time may draft. plain_tokens: to decode plainly before it is decided again.
    """

    controller: Controller
    costs: CallCosts
    gate: LoadGate = field(default_factory=LoadGate)
    plain_tokens: int = PLAIN_TOKENS


class Rounds:
    """The events of one request: `for event in Rounds(...)`.

    draft_failure: the draft's error, if the request went on without the draft. log_probs and
    next_best: those of all output tokens so far, as in `Part`.
    """

    def __init__(
        self,
        settings: Settings,
        engines: Engines,
        text: TextStream,
        *,
        cancelled: Callable[[], bool] = lambda: False,
        clock: Callable[[], int] = time.monotonic_ns,
        adaptive: Adaptive | None = None,
    ) -> None:
        """cancelled: called between engine calls; returns whether the client is gone. adaptive:
        chooses how much of settings.draft_len is used; None: all of it.
        """
        self.draft_failure: DraftFailed | None = None
        self.log_probs: list[float] = []
        self.next_best: list[tuple[int, float]] = []
        self._settings = settings
        self._engines = engines
        self._text = text
        self._cancelled = cancelled
        self._clock = clock
        self._ids = list(settings.prompt_ids)
        self._end = len(self._ids) + settings.max_tokens
        self._adaptive = adaptive
        self._adaptation = None if adaptive is None else adaptive.controller.begin()
        self._reason = settings.draft_len_reason
        self._tally = Tally(
            len(self._ids),
            settings.draft_len,
            settings.arrival_ns,
            settings.log_probs,
            self._adaptation,
        )
        self._tally.first_scheduled_ns = clock()

    def __iter__(self) -> Iterator[TokenEvent]:
        """The last event has a finish_reason and the statistics. Raises the engines' error if it
        ends the request.
        """
        speculates = self._settings.draft_len > 0 and self._settings.max_tokens > 2
        if self._adaptive is not None:
            self._adaptive.gate.look()
        try:
            for event in self._speculative() if speculates else self._plain():
                yield event
                if event.finish_reason is not None:
                    return
            raise RuntimeError("the rounds ended before the request")  # it would never be answered
        finally:
            if self._adaptive is not None and self._adaptation is not None:
                self._adaptive.controller.finish(self._adaptation)

    def _speculative(self) -> Iterator[TokenEvent]:
        # The first token is requested without drafts, so that it does not wait for the draft's
        # prefill; with all that follow it, if nothing will be drafted.
        if self._begins_plainly():
            yield from self._plain(self._next_plain_tokens())
        else:
            yield self._take(self._engines.verify(self._ids, NO_DRAFTS))
        while (overdue_event := self._overdue_event()) is None:
            room = min(self._choose_draft_len(), self._end - len(self._ids) - 1)
            if self._adaptation is not None and room == 0:
                yield from self._plain(self._next_plain_tokens())
                continue
            try:
                yield self._round(room)
            except DraftFailed as failure:
                if self._settings.on_draft_failure == "error":
                    raise
                self.draft_failure, self._tally.draft_failure = failure, str(failure)
                self._reason, self._adaptation = "draft failed", None
                if self._adaptive is not None:  # others end the epochs
                    self._adaptive.gate.begin(decides=False)
                if (overdue_event := self._overdue_event()) is not None:
                    break
                yield from self._plain()
                return
        yield overdue_event

    def _round(self, room: int) -> TokenEvent:
        """Draft up to `room` tokens and verify them. Raises DraftFailed."""
        started = self._clock()
        drafts = self._engines.draft(self._ids, room) if room > 0 else NO_DRAFTS
        drafted = self._clock()
        try:
            part = self._engines.verify(self._ids, drafts)
        except RequestError as error:
            if not drafts.ids or self._settings.on_draft_failure == "error":
                raise
            # If the target itself has failed, plain decoding says so at once.
            what = f"the target did not verify its drafts: {error.what}"
            raise DraftFailed(what) from error
        verified = self._clock()
        self._tally.add_time(drafted - started, verified - drafted, 0)
        if self._settings.verify_only:
            part = Part(part.ids[:1], part.log_probs[:1], part.next_best[:1])
            return self._take(part, checked=len(drafts.ids))
        event = self._take(part, drafts, checked=len(drafts.ids))
        accepted = min(len(drafts.ids), max(0, len(event.token_ids) - 1))
        self._note_gain(len(part.ids), verified - started)
        self._learn(len(drafts.ids), accepted, verified - started)
        return event

    def _plain(self, count: int | None = None) -> Iterator[TokenEvent]:
        """Decode `count` tokens, or the rest of the request, with the target alone. With a count it
        ends sooner where the load has become another one, so that drafts may pay.
        """
        ends_sooner = count is not None
        before = len(self._ids)
        count = self._end - before if count is None else min(count, self._end - before)
        timed_tokens = timed_ns = 0  # without the first call, which may read the prompt
        with contextlib.closing(self._engines.plain(self._ids, count)) as parts:
            started, is_first = self._clock(), True
            for part in parts:
                elapsed = self._clock() - started
                self._tally.add_time(0, elapsed, 0)
                if not is_first:
                    timed_tokens, timed_ns = timed_tokens + len(part.ids), timed_ns + elapsed
                    self._note_gain(len(part.ids), elapsed)
                self._learn_plain(len(part.ids), 0 if is_first else elapsed)
                is_first = False
                event = self._take(part)
                if event.finish_reason is not None or len(self._ids) == before + count:
                    self._learn_plain_cost(timed_tokens, timed_ns)
                yield event
                if (overdue_event := self._overdue_event()) is not None:
                    yield overdue_event
                    return
                if ends_sooner and self._is_at_other_load():
                    return
                started = self._clock()
        if len(self._ids) < before + count:
            # The engine stopped early: at a stop word, or at an end token that it does not return.
            yield self._ending_event("stop")

    # Adaptive draft lengths.

    @property
    def _chooser(self) -> Adaptive | None:
        """What chooses this request's draft lengths; None: nothing does, or does any more."""
        return None if self._adaptation is None else self._adaptive

    def _note_gain(self, tokens: int, ns: int) -> None:
        """What a round gave, or a call of plain decoding, without what reads the prompt."""
        if self._chooser is not None:
            self._chooser.gate.note(tokens, ns)

    def _is_at_other_load(self) -> bool:
        """Whether drafts may pay now, or do not any more."""
        return self._chooser is not None and self._chooser.gate.has_changed()

    def _begins_plainly(self) -> bool:
        adaptive = self._adaptive
        if self._adaptation is None or adaptive is None:
            return False
        if adaptive.gate.look() and adaptive.costs.untried() is not None:
            return False
        return self._choose_draft_len() == 0

    def _choose_draft_len(self) -> int:
        """The length of the next round; 0: plain decoding is better now."""
        state, adaptive = self._adaptation, self._adaptive
        if state is None or adaptive is None:
            return self._settings.draft_len
        if not adaptive.gate.look():
            self._reason = "load"
            return 0
        untried = adaptive.costs.untried()
        if untried is not None:
            self._reason = "measuring"
            return min(untried, self._settings.draft_len)
        if adaptive.controller.is_probe_due(state) and self._tokens_until_paid() == 0:
            self._reason = "probe"
            return adaptive.costs.probe_len
        adaptive.controller.reconsider()
        adaptive.controller.choose([state], limit=self._settings.draft_len)
        self._reason = state.reason
        if state.draft_len:
            adaptive.plain_tokens = PLAIN_TOKENS
        return state.draft_len or 0

    def _tokens_until_paid(self) -> int:
        """Plain tokens until a probe is paid. Later probes of a request come so late that they take
        a small share of its time. The first ones of many short texts would not.
        """
        state, adaptive = self._adaptation, self._adaptive
        if state is None or adaptive is None or state.total_trials > 0:
            return 0
        return adaptive.controller.tokens_until_paid()

    def _next_plain_tokens(self) -> int:
        """How many tokens to decode plainly before it is decided again."""
        if self._reason == "measuring":
            return MEASURED_PLAIN_TOKENS
        state, adaptive = self._adaptation, self._adaptive
        if state is None or adaptive is None:
            return PLAIN_TOKENS
        if self._reason == "acceptance":
            until_probe = state.probe_after - state.plain_tokens
            if until_paid := self._tokens_until_paid():
                # A little more: another call, for what an estimate lacks, would take longer.
                until_probe = max(until_probe, until_paid + until_paid // 8, PLAIN_TOKENS)
            if until_probe > 0:
                return until_probe
        count = adaptive.plain_tokens
        adaptive.plain_tokens = min(2 * count, MOST_PLAIN_TOKENS)
        return count

    def _learn(self, drafted: int, accepted: int, ns: int) -> None:
        """Learn from a round. The first round after others of another kind does not count as a
        cost: then the draft reads what it has not seen.
        """
        state, adaptive = self._adaptation, self._adaptive
        if state is None or adaptive is None or drafted == 0:
            return
        if state.plain_tokens == 0 and self._tally.has_drafted(2) and adaptive.gate.is_alone:
            adaptive.costs.note(drafted, ns)
        if self._reason == "probe":
            shares = [1.0] * accepted + [0.0] * (accepted < drafted)
            adaptive.controller.note_probe(state, shares, 1)
        else:
            adaptive.controller.note_block(state, drafted, accepted)

    def _learn_plain(self, tokens: int, ns: int) -> None:
        if self._adaptation is not None and self._adaptive is not None and tokens:
            self._adaptive.controller.note_plain(self._adaptation, tokens)
            self._adaptive.controller.save_for_probes(ns)

    def _learn_plain_cost(self, tokens: int, ns: int) -> None:
        """Of calls that followed each other. They become longer, and so what a token takes less:
        what counts is all of them.
        """
        chooser = self._chooser
        if chooser is not None and tokens >= TELLING_TOKENS and chooser.gate.is_alone:
            chooser.costs.note(0, ns // tokens)

    def _take(self, part: Part, drafts: Drafts = NO_DRAFTS, *, checked: int = 0) -> TokenEvent:
        """Add the target's tokens, up to the first that ends the request. checked: how many drafts
        this step verified, for the statistics.
        """
        settings, new, proposed = self._settings, list(part.ids), drafts.ids
        room, is_first = self._end - len(self._ids), len(self._ids) == len(settings.prompt_ids)
        if len(new) > max(room, 1 + len(proposed)):
            raise RequestError(f"the target returned {len(new)} tokens, and {room} were requested")
        pairs = zip(new, proposed, strict=False)
        accepted = next(
            (index for index, (token, draft) in enumerate(pairs) if token != draft), None
        )
        if accepted is None:
            accepted = min(len(new), len(proposed))
        block = read_block(self._text, new, room, settings.end_ids)
        new, text = block.tokens, block.text
        reason: Reason | None = block.reason
        self._ids += new
        if reason is None and accepted == len(part.ids):
            # The target added no token of its own: it met an end token, which it does not return.
            reason = "stop"
        self._count(len(new), checked, min(accepted, len(new)), is_first)
        for value in part.log_probs[: len(new)]:
            self.log_probs.append(value)
            self._tally.add_logprob(value)
        self.next_best += part.next_best[: len(new)]
        if reason is None:
            running_stats = self._tally.stats() if settings.running_stats else None
            return TokenEvent(settings.request_id, tuple(new), text, stats=running_stats)
        rest, reason = last_text(self._text, reason)
        stop_reason, stats = self._text.stopped_by, self._tally.stats()
        text += rest
        return TokenEvent(settings.request_id, tuple(new), text, reason, stop_reason, None, stats)

    def _count(self, new: int, checked: int, accepted: int, is_first: bool) -> None:
        if new:
            self._tally.add_tokens(new, self._clock())
        if checked:
            self._tally.add_step(checked, accepted, self._reason)
            return
        for _ in range(new - is_first):  # one step per token; the first token comes from prefill
            self._tally.add_step(0, 0, self._reason)

    def _overdue_event(self) -> TokenEvent | None:
        """The last event, if the request is past its deadline or cancelled."""
        deadline = self._settings.deadline_ns
        if deadline is not None and self._clock() >= deadline:
            return self._ending_event("deadline")
        return self._ending_event("cancelled") if self._cancelled() else None

    def _ending_event(self, reason: FinishReason) -> TokenEvent:
        """The last event of a request that no token ended."""
        return TokenEvent(
            self._settings.request_id,
            (),
            self._text.finish(),
            reason,
            None,
            None,
            self._tally.stats(),
        )
