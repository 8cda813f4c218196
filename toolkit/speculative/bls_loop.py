"""Draft-target speculation over two engines that can only be called: tokens in, tokens out. What a
BLS model runs.

Unlike `decode`, which owns both KV caches, a round here is two calls that each carry the whole
sequence: the draft is asked for a few tokens behind it, then the target is asked to check them and
to add one of its own. That the engines do not compute the sequence anew each time is their business
(KV reuse by prefix). What the rounds of one request mean is decided here: end tokens, stop words,
lengths, statistics, and what becomes of the request when the draft fails.

Pure but for the calls, and without any library beside Python's own, so that it can be shipped in a
repository and run where only Triton is. The engines come in as an argument.
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
    """The draft model did not answer: it is missing, dead, or refused."""


@dataclass(frozen=True, slots=True)
class Drafts:
    """Proposed tokens. logits [len(ids), vocab] are the draft's behind which each was chosen,
    where the target wants them.
    """

    ids: tuple[int, ...] = ()
    logits: Any = None


NONE = Drafts()


@dataclass(frozen=True, slots=True)
class Part:
    """What a call of the target added to the sequence. log_probs: one per token, empty where they
    were not asked for. next_best: likewise, the likeliest of the other tokens with its
    log-probability, empty where the engine does not tell.
    """

    ids: tuple[int, ...]
    log_probs: tuple[float, ...] = ()
    next_best: tuple[tuple[int, float], ...] = ()


class Engines(Protocol):
    """The two engines as one request sees them. ids: the whole sequence so far. Raise
    RequestError for a failed call.
    """

    def draft(self, ids: Sequence[int], count: int) -> Drafts:
        """Up to `count` tokens behind ids. Raises DraftFailed."""
        ...

    def verify(self, ids: Sequence[int], drafts: Drafts) -> Part:
        """The drafts that the target keeps, and one token of its own behind them unless the text
        ends before it.
        """
        ...

    def plain(self, ids: Sequence[int], count: int) -> Generator[Part, None, None]:
        """Up to `count` tokens of the target alone, in as many parts as the engine sends them.
        Closing it cancels the call.
        """
        ...


@dataclass(frozen=True, slots=True)
class Settings:
    """One request. draft_len 0: plain decoding. on_draft_failure: error | plain (the rest of it
    is decoded plainly).
    """

    request_id: str
    prompt_ids: tuple[int, ...]
    max_tokens: int
    draft_len: int
    end_ids: frozenset[int]
    arrival_ns: int
    deadline_ns: int | None = None
    on_draft_failure: str = "error"
    verify_only: bool = (
        False  # drafts are checked and none is kept: a way to test the target's verify call
    )
    log_probs: bool = False


class Rounds:
    """The events of one request: `for event in Rounds(...)`. draft_failure: what the draft
    failed with, if it was borne.
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
        """cancelled: asked between calls, whether the client is gone."""
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
        """The last event has a finish_reason and the statistics. Raises what the engines raise,
        if it ends the request.
        """
        speculates = self._settings.draft_len > 0 and self._settings.max_tokens > 2
        parts = self._speculative() if speculates else self._plain()
        for event in parts:
            yield event
            if event.finish_reason is not None:
                return

    def _speculative(self) -> Iterator[TokenEvent]:
        # The first token comes without drafts: nobody who waits for it should wait for the draft's
        # prefill, too.
        yield self._take(self._engines.verify(self._ids, NONE))
        while (over := self._overdue()) is None:
            started = self._clock()
            room = min(self._settings.draft_len, self._end - len(self._ids) - 1)
            try:
                drafts = self._engines.draft(self._ids, room) if room > 0 else NONE
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
        yield over

    def _plain(self) -> Iterator[TokenEvent]:
        """The rest of the request, by the target alone."""
        with contextlib.closing(
            self._engines.plain(self._ids, self._end - len(self._ids))
        ) as parts:
            started = self._clock()
            for part in parts:
                self._tally.add_time(0, self._clock() - started, 0)
                yield self._take(part)
                if (over := self._overdue()) is not None:
                    yield over
                    return
                started = self._clock()
        yield self._last(
            "stop"
        )  # at a stop word that the engine knows, or an end token that it keeps to itself

    def _take(self, part: Part, drafts: Drafts = NONE, *, checked: int = 0) -> TokenEvent:
        """Add what the target gave, up to the first thing that ends the request. checked: drafts
        the step counts with.
        """
        settings, new, proposed = self._settings, list(part.ids), drafts.ids
        room, first = self._end - len(self._ids), len(self._ids) == len(settings.prompt_ids)
        if len(new) > max(room, 1 + len(proposed)):
            raise RequestError(f"the target answered {len(new)} tokens where {room} were asked for")
        kept = next(
            (i for i, (one, other) in enumerate(zip(new, proposed, strict=False)) if one != other),
            None,
        )
        if kept is None:
            kept = min(len(new), len(proposed))
        block = read_block(self._text, new, room, settings.end_ids)
        new, text = block.tokens, block.text
        reason: Reason | None = block.reason
        self._ids += new
        if reason is None and kept == len(part.ids):
            # nothing of the target's own behind the drafts: an end token that it keeps to itself
            reason = "stop"
        self._count(len(new), checked, min(kept, len(new)), first)
        for value in part.log_probs[: len(new)]:
            self.log_probs.append(value)
            self._tally.add_logprob(value)
        self.next_best += part.next_best[: len(new)]
        if reason is None:
            return TokenEvent(settings.request_id, tuple(new), text)
        rest, reason = last_text(self._text, reason)
        stop_reason, stats = self._text.stopped_by, self._tally.stats()
        text += rest
        return TokenEvent(settings.request_id, tuple(new), text, reason, stop_reason, None, stats)

    def _count(self, new: int, checked: int, kept: int, first: bool) -> None:
        if new:
            self._tally.add_tokens(new, self._clock())
        if checked:
            self._tally.add_step(checked, kept)
            return
        for _ in range(new - first):  # one step per token; the first one comes from prefill
            self._tally.add_step(0, 0)

    def _overdue(self) -> TokenEvent | None:
        deadline = self._settings.deadline_ns
        if deadline is not None and self._clock() >= deadline:
            return self._last("deadline")
        return self._last("cancelled") if self._cancelled() else None

    def _last(self, reason: FinishReason) -> TokenEvent:
        """An end that no token brought."""
        return TokenEvent(
            self._settings.request_id,
            (),
            self._text.finish(),
            reason,
            None,
            None,
            self._tally.stats(),
        )
