"""The speculative runtime: requests join and leave between steps, and every step gives each running
request its next tokens.

A step has four parts. It ends the requests that are cancelled or past their deadline, gives free
slots to waiting requests, prefills a bounded number of prompt tokens, and runs one verify step for
all running requests. In a verify step the draft proposes tokens, the target verifies all of them in
one forward, each request accepts what its own rule allows and gets one token more, and both caches
are cut back to the accepted tokens. A request that decodes plainly goes the same way without
drafts: its row of the forward is one token wide, and the draft does not run for it.

The output of a request does not depend on the other requests in the batch: rows are independent,
every request draws from its own generator, and prompts are prefilled one by one in chunks that
start at fixed positions. (Forwards of other shapes may round differently; in float64 that changes
no token.)

Threads: submit, cancel and counters may be called from anywhere. One thread at a time takes the
steps: the one in `run`, or `generate` itself if none is. Events are delivered on the stepping
thread.
"""

from __future__ import annotations

import dataclasses
import heapq
import math
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch

from toolkit.errors import RequestError
from toolkit.interfaces import GenerationRequest, StepEngine, TokenEvent
from toolkit.speculative.acceptance import RULES, RuleFactory, choose_rule, match
from toolkit.speculative.drafters import Drafter, ModelDrafter
from toolkit.speculative.limits import Limits, check_engines
from toolkit.speculative.request_state import OnEvent, Sequence
from toolkit.speculative.sampling import (
    NOT_FINITE,
    Floats,
    are_finite,
    argmax,
    to_host,
    token_rows,
)
from toolkit.speculative.stats import RuntimeCounters, Totals
from toolkit.speculative.text import TextCodec
from toolkit.words import AcceptanceChoice, FinishReason, RuntimeRule

__all__ = ["QueueFull", "RuntimeSettings", "SpeculativeRuntime"]

NOT_FINITE_MESSAGE = (
    "the target's logits are not finite; its weights are damaged or its dtype overflows"
)
# How long an idle `run` sleeps before it looks at its stop event again. A submit wakes it at once.
IDLE_S = 0.1


class QueueFull(RequestError):
    """Overload: the request is refused, and may be sent again later."""


@dataclass(frozen=True, slots=True)
class RuntimeSettings:
    """max_draft_len 0: plain decoding only.

    acceptance (auto | rejection | coupled | sample_match) and draft_len_schedule are defaults for
    requests that state no rule or no draft length of their own. The schedule holds (running
    requests, draft length) pairs; each applies from that many requests on.
    """

    max_draft_len: int
    acceptance: AcceptanceChoice = "auto"
    max_queue_size: int = 256  # requests that may wait for a slot; more are refused
    eos_token_ids: tuple[int, ...] = ()
    draft_len_schedule: tuple[tuple[int, int], ...] = ()
    max_input_len: int | None = None  # None: as long as the target's context allows


class SpeculativeRuntime:
    """An Engine made of two StepEngines. It owns every slot of both."""

    def __init__(
        self,
        target: StepEngine,
        draft: StepEngine | None,
        codec: TextCodec,
        settings: RuntimeSettings,
        *,
        rules: Mapping[RuntimeRule, RuleFactory] = RULES,
        drafter: Drafter | None = None,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        """drafter: a source of drafts to use instead of the draft engine. clock: monotonic
        nanoseconds. Raises UsageError if the engines cannot serve together.
        """
        check_engines(target, draft, settings.max_draft_len)
        self.codec = codec
        self.settings = settings
        self.vocab_size = target.vocab_size
        self._target = target
        self._drafter: Drafter | None = drafter or (None if draft is None else ModelDrafter(draft))
        self._max_draft_len = settings.max_draft_len if self._drafter is not None else 0
        self._limits = Limits(
            vocab_size=target.vocab_size,
            max_input_len=min(settings.max_input_len or target.max_seq_len, target.max_seq_len - 1),
            max_seq_len=target.max_seq_len,
            max_draft_len=self._max_draft_len,
        )
        self._eos = frozenset(settings.eos_token_ids)
        self._rules = rules
        self._clock = clock

        self._lock = threading.Lock()  # guards the four below
        self._open: dict[str, Sequence] = {}  # waiting or active, by request id
        self._waiting: deque[Sequence] = deque()
        self._cancelled: set[str] = set()
        self._closed = False
        self._wake = threading.Event()

        self._stepping = threading.RLock()  # guards the rest: held for a whole step
        self._runner: threading.Thread | None = None
        self._free_slots = list(range(target.max_batch_size))
        self._prefilling: deque[Sequence] = deque()
        self._running: list[Sequence] = []
        self._totals = Totals()

    # From any thread.

    def submit(self, request: GenerationRequest, on_event: OnEvent) -> None:
        """Queue a request. on_event is called on the stepping thread; the last event has a
        finish_reason.

        Raises RequestError if the request can never be served, and QueueFull at overload. Nothing
        is shortened to fit: a request whose prompt and max_tokens together exceed the context is
        refused.
        """
        self._limits.check(request)
        make_rule = self._rules[choose_rule(request, self.settings.acceptance)]
        sequence = Sequence(
            request,
            on_event,
            rule=make_rule(request.sampling, self.vocab_size),
            text=self.codec.stream(request.prompt_ids, request.stop),
            eos=self._eos,
            draft_len=self._max_draft_len if request.draft_len is None else request.draft_len,
            arrival_ns=self._clock(),
        )
        with self._lock:
            if self._closed:
                raise RequestError("the runtime is closed")
            if request.request_id in self._open:
                raise RequestError(
                    f"request id {request.request_id!r} is already being served",
                    hint="Send another id.",
                )
            max_open = self._target.max_batch_size + self.settings.max_queue_size
            if len(self._open) >= max_open:
                raise QueueFull(
                    f"{max_open} requests are being served or waiting", hint="Send it again later."
                )
            self._open[request.request_id] = sequence
            self._waiting.append(sequence)
        self._wake.set()

    def cancel(self, request_id: str) -> None:
        """End a request before the next step. Does nothing for an unknown or ended request."""
        with self._lock:
            if request_id in self._open:
                self._cancelled.add(request_id)
        self._wake.set()

    def counters(self) -> RuntimeCounters:
        with self._lock:
            queued = len(self._waiting)
            return self._totals.snapshot(active=len(self._open) - queued, queued=queued)

    def generate(self, request: GenerationRequest) -> Iterator[TokenEvent]:
        """Serve one request and yield its events. Takes the steps itself if no thread is in `run`.

        Leaving the iterator early cancels the request. The first `next` raises what submit raises.
        """
        events: queue.SimpleQueue[TokenEvent] = queue.SimpleQueue()
        self.submit(request, events.put)
        finished = False
        try:
            while not finished:
                try:
                    event = events.get(block=self._runner is not None, timeout=IDLE_S)
                except queue.Empty:
                    if self._runner is None:
                        self.step()
                    continue
                finished = event.finish_reason is not None
                yield event
        finally:
            if not finished:
                self.cancel(request.request_id)
                if self._runner is None:
                    with self._stepping:
                        self._end_overdue()

    # The stepping thread.

    def run(self, stop: threading.Event) -> None:
        """Step until `stop` is set, and sleep while there is nothing to do. Requests that are open
        then stay open: see close().
        """
        self._runner = threading.current_thread()
        try:
            while not stop.is_set():
                self._wake.clear()
                if not self.step():
                    self._wake.wait(IDLE_S)
        finally:
            self._runner = None

    def step(self) -> bool:
        """One iteration. False if there was nothing to do."""
        with self._stepping:
            self._end_overdue()
            if self._waiting:
                self._admit()
            if not self._prefilling and not self._running:
                return False
            if self._prefilling:
                self._prefill()
            if self._running:
                self._verify()
            return True

    def close(self) -> None:
        """End all open requests as cancelled and refuse later ones. Call it after `run` has
        returned.
        """
        with self._lock:
            self._closed = True
            self._cancelled.update(self._open)
        with self._stepping:
            self._end_overdue()

    def _end_overdue(self) -> None:
        """End cancelled requests and those past their deadline, waiting or running."""
        with self._lock:
            if not self._open:
                return
            cancelled, self._cancelled = self._cancelled, set()
            open_now = list(self._open.values())
        now = self._clock()
        for sequence in open_now:
            deadline = sequence.request.deadline_ns
            if cancelled and sequence.request.request_id in cancelled:
                self._end(sequence, "cancelled")
            elif deadline is not None and now >= deadline:
                self._end(sequence, "deadline")

    def _admit(self) -> None:
        now = self._clock()
        with self._lock:
            while self._waiting and self._free_slots:
                sequence = self._waiting.popleft()
                sequence.slot = heapq.heappop(self._free_slots)
                sequence.tally.first_scheduled_ns = now
                self._prefilling.append(sequence)

    def _prefill(self) -> None:
        """Feed prompts in the order they came, in whole chunks, until the step's allowance of
        tokens is spent.

        The allowance is one chunk while most slots decode, so a long prompt delays them by at most
        one chunk per step. It is larger when more requests wait for their first token than would be
        delayed.
        """
        chunk_len = self._target.max_step_tokens
        tokens_left = chunk_len * max(1, len(self._prefilling) - len(self._running))
        while self._prefilling and tokens_left > 0:
            sequence = self._prefilling[0]
            chunk = sequence.ids[sequence.prefilled : sequence.prefilled + chunk_len]
            tokens_left -= len(chunk)
            try:
                logits = self._target.forward([sequence.slot], token_rows([chunk]), last_only=True)
                sequence.prefilled += len(chunk)
                prompt = sequence.ids[: sequence.prefilled]
                if len(prompt) == len(sequence.ids):
                    self._begin(sequence, logits)
                # The draft reads the prompt after the target, so that the first token waits only
                # for the target.
                if (
                    sequence.finish_reason is None
                    and sequence.speculates
                    and self._drafter is not None
                ):
                    self._drafter.feed(sequence.slot, prompt)
            except Exception as error:
                self._fail([sequence], error)

    def _begin(self, sequence: Sequence, logits: torch.Tensor) -> None:
        """Choose the first token, from the last logits of the prompt."""
        host = to_host(logits)[0]  # [1, vocab]
        if not math.isfinite(float(host.max())):
            raise ValueError(NOT_FINITE_MESSAGE)
        _, token = sequence.rule.decide(host, len(sequence.ids), [])
        event = sequence.take(
            0, token, host if sequence.request.cumulative_logprob else None, self._clock()
        )
        self._prefilling.popleft()
        self._running.append(sequence)
        self._deliver(sequence, event)

    def _verify(self) -> None:
        rows = self._running[:]
        try:
            self._verify_rows(rows)
        except Exception as error:
            self._fail(rows, error)

    def _verify_rows(self, rows: list[Sequence]) -> None:
        start = self._clock()
        self._limit_by_load(rows)
        speculating = (
            [row for row in rows if row.speculates and row.draft_room() > 0]
            if self._drafter is not None
            else []
        )
        if speculating and self._drafter is not None:
            self._drafter.propose(speculating)
        drafted = self._clock()
        width = 1 + max(len(row.drafts) for row in rows)
        # Rows with fewer drafts are padded with any valid token; the cache is cut back to each
        # row's own tokens afterwards.
        tokens = token_rows(
            [[row.ids[-1], *row.drafts, *[0] * (width - 1 - len(row.drafts))] for row in rows]
        )
        logits = self._target.forward([row.slot for row in rows], tokens)  # [rows, width, vocab]
        verified = self._clock()

        choices = argmax(logits) if any(row.rule.is_argmax for row in rows) else []
        # On the CPU this is a view. On a GPU it is a copy, which greedy decoding does not need.
        needs_host = not logits.is_cuda or any(
            not row.rule.is_argmax or row.request.cumulative_logprob for row in rows
        )
        host = to_host(logits) if needs_host else None
        slots, lengths, outcomes = [], [], []
        for index, row in enumerate(rows):
            before, count = len(row.ids), len(row.drafts)
            row_logits = None if host is None else host[index, : count + 1]
            try:
                accepted, token = _decide(row, row_logits, choices[index] if choices else [])
            except Exception as error:  # only this request's logits are at fault
                self._fail([row], error)
                continue
            scored_logits = row_logits if row.request.cumulative_logprob else None
            event = row.take(accepted, token, scored_logits, verified)
            outcomes.append((row, event))
            if row.finish_reason is None:
                length = len(row.ids) - 1  # the newest token is fed by the next step
                if count and self._drafter is not None:
                    self._drafter.settle(row.slot, length)
                if length != before - 1 + width:
                    slots.append(row.slot)
                    lengths.append(length)
        if slots:
            self._target.rewind(slots, lengths)
        host_ns = self._clock() - verified
        self._totals.add_step(drafted - start, verified - drafted, host_ns)
        for row, event in outcomes:
            row.tally.add_time(drafted - start, verified - drafted, host_ns)
            self._deliver(row, event)

    def _limit_by_load(self, rows: list[Sequence]) -> None:
        """Apply the schedule's draft length for this many requests. A draft that skipped some steps
        catches up when it is used again.
        """
        if not self.settings.draft_len_schedule:
            return
        lengths = [
            length for requests, length in self.settings.draft_len_schedule if requests <= len(rows)
        ]
        for row in rows:
            if row.request.draft_len is None and lengths:
                row.load_limit = lengths[-1]

    # The ends of a request.

    def _deliver(self, sequence: Sequence, event: TokenEvent) -> None:
        """Send an event to the client. The slot is freed before the last event, so a client that
        reacts to it finds room.
        """
        if sequence.finish_reason is not None or sequence.request.running_stats:
            event = dataclasses.replace(event, stats=sequence.tally.stats())
        if sequence.finish_reason is not None:
            self._release(sequence, event)
        self._tell(sequence, event)

    def _tell(self, sequence: Sequence, event: TokenEvent) -> None:
        try:
            sequence.on_event(event)
        except Exception as error:  # a fault of the receiver ends its own request only
            if sequence.finish_reason is None:
                self._release(
                    sequence, sequence.end("error", f"the receiver of the events failed: {error!r}")
                )

    def _end(self, sequence: Sequence, reason: FinishReason, error: str | None = None) -> None:
        event = sequence.end(reason, error)
        self._release(sequence, event)
        self._tell(sequence, event)

    def _fail(self, sequences: list[Sequence], error: Exception) -> None:
        """End the requests that took part in a failed forward or decision. The runtime goes on."""
        for sequence in sequences:
            if self._open.get(sequence.request.request_id) is sequence:
                self._end(sequence, "error", f"{type(error).__name__}: {error}")

    def _release(self, sequence: Sequence, event: TokenEvent) -> None:
        """Remove an ended request from the queue, and free its slot in both caches."""
        request_id = sequence.request.request_id
        with self._lock:
            self._open.pop(request_id, None)
            self._cancelled.discard(request_id)
            if sequence.slot < 0:
                self._waiting.remove(sequence)
            if event.finish_reason is not None and event.stats is not None:
                self._totals.add_request(event.finish_reason, event.stats)
        if sequence.slot < 0:
            return
        if sequence in self._prefilling:
            self._prefilling.remove(sequence)
        if sequence in self._running:
            self._running.remove(sequence)
        slot, sequence.slot = sequence.slot, -1
        self._target.rewind([slot], [0])
        if self._drafter is not None and sequence.speculates:
            self._drafter.free([slot])
        heapq.heappush(self._free_slots, slot)


def _decide(row: Sequence, logits: Floats | None, choices: list[int]) -> tuple[int, int]:
    """Return (accepted drafts, next token) of one request.

    logits [drafts + 1, vocab]: the target's, after the output and after each draft; None if they
    are not on the host. choices: the most likely token of each of these rows. Raises ValueError for
    logits that are not finite.
    """
    if row.rule.is_argmax or logits is None:
        accepted, token = match(row.drafts, choices.__getitem__)
    else:
        accepted, token = row.rule.decide(logits, len(row.ids), row.drafts)
    tokens = [*row.drafts[:accepted], token]
    if token == NOT_FINITE or not (logits is None or are_finite(logits, tokens)):
        raise ValueError(NOT_FINITE_MESSAGE)
    return accepted, token
