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
from dataclasses import dataclass
from typing import Any, Protocol

from toolkit.errors import RequestError
from toolkit.interfaces import TokenEvent
from toolkit.speculative.ending import Reason, last_text, read_block
from toolkit.speculative.stats import Tally
from toolkit.speculative.text import TextStream
from toolkit.words import FinishReason

__all__ = ["DraftFailed", "Drafts", "Engines", "Part", "Rounds", "Settings"]


class DraftFailed(RequestError):
    """The draft model did not answer: it is missing, it died, or it refused the call."""


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
    """One request. draft_len 0: plain decoding. on_draft_failure: error | plain (the rest of the
    request is decoded without drafts).
    """

    request_id: str
    prompt_ids: tuple[int, ...]
    max_tokens: int
    draft_len: int
    end_ids: frozenset[int]
    arrival_ns: int
    deadline_ns: int | None = None
    on_draft_failure: str = "error"
    # Drafts are verified and none is accepted: this tests the target's verify call.
    verify_only: bool = False
    log_probs: bool = False
    running_stats: bool = False  # every event has the statistics so far


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
    ) -> None:
        """cancelled: called between engine calls; returns whether the client is gone."""
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
        self._tally = Tally(
            len(self._ids), settings.draft_len, settings.arrival_ns, settings.log_probs
        )
        self._tally.first_scheduled_ns = clock()

    def __iter__(self) -> Iterator[TokenEvent]:
        """The last event has a finish_reason and the statistics. Raises the engines' error if it
        ends the request.
        """
        speculates = self._settings.draft_len > 0 and self._settings.max_tokens > 2
        parts = self._speculative() if speculates else self._plain()
        for event in parts:
            yield event
            if event.finish_reason is not None:
                return

    def _speculative(self) -> Iterator[TokenEvent]:
        # The first token is requested without drafts, so that it does not wait for the draft's
        # prefill.
        yield self._take(self._engines.verify(self._ids, NO_DRAFTS))
        while (overdue_event := self._overdue_event()) is None:
            started = self._clock()
            room = min(self._settings.draft_len, self._end - len(self._ids) - 1)
            try:
                drafts = self._engines.draft(self._ids, room) if room > 0 else NO_DRAFTS
            except DraftFailed as failure:
                if self._settings.on_draft_failure == "error":
                    raise
                self.draft_failure = failure
                yield from self._plain()
                return
            drafted = self._clock()
            part = self._engines.verify(self._ids, drafts)
            self._tally.add_time(drafted - started, self._clock() - drafted, 0)
            if self._settings.verify_only:
                yield self._take(
                    Part(part.ids[:1], part.log_probs[:1], part.next_best[:1]),
                    checked=len(drafts.ids),
                )
            else:
                yield self._take(part, drafts, checked=len(drafts.ids))
        yield overdue_event

    def _plain(self) -> Iterator[TokenEvent]:
        """Decode the rest of the request with the target alone."""
        with contextlib.closing(
            self._engines.plain(self._ids, self._end - len(self._ids))
        ) as parts:
            started = self._clock()
            for part in parts:
                self._tally.add_time(0, self._clock() - started, 0)
                yield self._take(part)
                if (overdue_event := self._overdue_event()) is not None:
                    yield overdue_event
                    return
                started = self._clock()
        # The engine stopped early: at a stop word, or at an end token that it does not return.
        yield self._ending_event("stop")

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
            self._tally.add_step(checked, accepted)
            return
        for _ in range(new - is_first):  # one step per token; the first token comes from prefill
            self._tally.add_step(0, 0)

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
