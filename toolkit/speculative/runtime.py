"""The speculative runtime: requests join and leave between steps, and every step gives each running
request its next tokens.

A step has four parts. It ends the requests that are cancelled or past their deadline, gives free
slots to waiting requests, prefills a bounded number of prompt tokens, and runs one verify step for
all running requests. Where the engine packs rows, the last two share a forward of the target. In a
verify step the draft proposes tokens, the target verifies all of them in one forward, each request
accepts what its own rule allows and gets one token more, and both caches are cut back to the
accepted tokens. A request that decodes plainly goes the same way without drafts: its row of the
forward is one token wide, and the draft does not run for it.

The output of a request does not depend on the other requests in the batch: rows are independent,
every request draws from its own generator, and prompts are prefilled in chunks that start at fixed
positions, or behind what an earlier request left in a KV cache, if prefixes are reused. (Forwards
of other shapes may round differently; in float64 that changes no token.)

Threads: submit, cancel and counters may be called from anywhere. One thread at a time takes the
steps: the one in `run`, or `generate` itself if none is. Events are delivered on the stepping
thread, or by the reader of a burst.
"""

from __future__ import annotations

import dataclasses
import math
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch

from toolkit.errors import RequestError
from toolkit.interfaces import (
    BurstingEngine,
    CopyingEngine,
    GenerationRequest,
    PackingEngine,
    StepEngine,
    TokenEvent,
)
from toolkit.speculative.acceptance import RULES, BurstingRule, RuleFactory, choose_rule, match
from toolkit.speculative.adaptive import (
    PROBE_TOKENS,
    PROBED_ROWS,
    Adaptation,
    AdaptiveSettings,
    Controller,
    Rest,
)
from toolkit.speculative.bursts import MAX_NS, Bursts, BurstStep
from toolkit.speculative.comparison import ComparedStep, Comparison
from toolkit.speculative.cost_timer import measured_costs
from toolkit.speculative.costs import FRESH_STEPS, StepCosts
from toolkit.speculative.drafters import Drafter, ModelDrafter
from toolkit.speculative.limits import Limits, check_engines
from toolkit.speculative.load_schedule import LoadSchedule
from toolkit.speculative.prefill import Chunk, next_chunks
from toolkit.speculative.request_state import OnEvent, Sequence
from toolkit.speculative.rows import rows_forward
from toolkit.speculative.sampling import (
    NOT_FINITE,
    Floats,
    are_finite,
    argmax,
    to_host,
)
from toolkit.speculative.slots import Slot, choose_place
from toolkit.speculative.stats import RuntimeCounters, Totals
from toolkit.speculative.text import TextCodec
from toolkit.speculative.trials import PLAIN_TRIAL_STEPS, UNSETTLED_STEPS, Trials
from toolkit.words import AcceptanceChoice, DraftLenReason, FinishReason, RuntimeRule

__all__ = ["QueueFull", "RuntimeSettings", "SpeculativeRuntime"]

NOT_FINITE_MESSAGE = (
    "the target's logits are not finite; its weights are damaged or its dtype overflows"
)
# How long an idle `run` sleeps before it looks at its stop event again. A submit wakes it at once.
IDLE_S = 0.1
# A burst that ends undecided has computed a step in vain. Where nearly all weights are alike, most
# steps are so: behind a burst of fewer tokens than the first number, so many steps have none.
WORTHWHILE_TOKENS, STEPS_WITHOUT_BURST = 8, 16
# Noting what a step took costs 20 microseconds, and plain decoding has the least of them to spare:
# for every fourth step it took 0.8 % of the quickstart's time at 4 requests. Those of a trial that
# have settled are all noted, and the longer there is no other, the fewer. Of a batch that drafts
# the first ones are, and then every fourth.
NOTE_EVERY_PLAIN_STEPS, NOTE_SHARE_OF_PLAIN_STEPS, MOST_PLAIN_STEPS_UNNOTED = 16, 8, 64
NOTE_EVERY_DRAFTING_STEPS = 4


class QueueFull(RequestError):
    """Overload: the request is refused, and may be sent again later."""


@dataclass(frozen=True, slots=True)
class RuntimeSettings:
    """max_draft_len 0: plain decoding only.

    acceptance (auto | rejection | coupled | sample_match) and draft_len_schedule are defaults for
    requests that state no rule or no draft length of their own. The schedule holds (running
    requests, draft length) pairs; each applies from that many requests on. max_prompt_tokens:
    requests with longer prompts are decoded plainly. adaptive: each request's draft length, up to
    the one that schedule and max_draft_len allow, is chosen while it runs; None: it is used in
    full. Adaptive lengths and max_prompt_tokens are for requests that state no draft length;
    max_draft_len and the schedule bound every request.

    reuse_prefixes: a prompt that begins with what a slot's cache holds is computed only from there.
    """

    max_draft_len: int
    acceptance: AcceptanceChoice = "auto"
    max_queue_size: int = 256  # requests that may wait for a slot; more are refused
    eos_token_ids: tuple[int, ...] = ()
    draft_len_schedule: tuple[tuple[int, int], ...] = ()
    max_input_len: int | None = None  # None: as long as the target's context allows
    max_prompt_tokens: int | None = None
    adaptive: AdaptiveSettings | None = None
    reuse_prefixes: bool = False


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
        costs: StepCosts | None = None,
        comparison: Comparison | None = None,
    ) -> None:
        """drafter: a source of drafts to use instead of the draft engine. clock: monotonic
        nanoseconds. For adaptive lengths, costs: of the engines; None: they are timed now.
        comparison: with what is known of these costs, as from a rehearsal; None: nothing is. Raises
        UsageError if the engines cannot serve together.
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
        self._adaptive: Controller | None = None
        self._rest = Rest()  # the controller's
        self._costs = costs
        # Since the last step of the other kind, and from how many plain ones on one is noted.
        self._drafting_steps = 0
        self._plain_steps, self._next_noted = 0, UNSETTLED_STEPS + 1
        # Whether the last step of a burst has asked what the next step, of its row, does.
        self._has_asked = False
        if settings.adaptive is not None and self._max_draft_len:
            if self._costs is None:
                drafting_engine = draft if drafter is None else None
                self._costs = measured_costs(target, drafting_engine, self._max_draft_len, clock)
            self._adaptive = Controller(
                settings.adaptive,
                self._costs,
                self._max_draft_len,
                trials=Trials(target.max_batch_size),
                comparison=comparison or Comparison(target.max_batch_size, self._costs),
            )
            self._rest = self._adaptive.rest

        schedule = settings.draft_len_schedule
        self._schedule = LoadSchedule(schedule) if schedule else None
        self._load_limit: int | None = None  # what it allowed last
        self._bursts = bursts_of(target, self._drafter, self._max_draft_len)

        self._lock = threading.Lock()  # guards the four below
        self._open: dict[str, Sequence] = {}  # waiting or active, by request id
        self._waiting: deque[Sequence] = deque()
        self._cancelled: set[str] = set()
        self._closed = False
        self._wake = threading.Event()

        self._stepping = threading.RLock()  # guards the rest: held for a whole step
        self._runner: threading.Thread | None = None
        self._on_told: Callable[[], object] = lambda: None
        self._slots = [Slot(number) for number in range(target.max_batch_size)]
        self._free = set(range(target.max_batch_size))
        self._uses = 0  # of slots
        self._began_ns = self._fed = 0  # of a step: when it began, and prompt tokens for the draft
        # A drafter without an engine has no cache, and nothing to copy.
        engines = (target,) if draft is None or drafter is not None else (target, draft)
        self._copies = all(isinstance(engine, CopyingEngine) for engine in engines)
        self._prefilling: list[Sequence] = []  # in the order in which they came
        self._oldest_first = False  # whether the oldest of them went first in the last step
        self._packs = isinstance(target, PackingEngine)
        self._forward_rows = rows_forward(target)
        self._running: list[Sequence] = []
        self._totals = Totals()

    # From any thread.

    def submit(self, request: GenerationRequest, on_event: OnEvent) -> None:
        """Queue a request. on_event is called on the stepping thread, or on the reader of its
        bursts; the last event has a finish_reason.

        Raises RequestError if the request can never be served, and QueueFull at overload. Nothing
        is shortened to fit: a request whose prompt and max_tokens together exceed the context is
        refused.
        """
        self._limits.check(request)
        rule_name = choose_rule(request, self.settings.acceptance)
        draft_len, reason = self._draft_len(request, rule_name)
        sequence = Sequence(
            request,
            on_event,
            rule=self._rules[rule_name](request.sampling, self.vocab_size),
            text=self.codec.stream(request.prompt_ids, request.stop),
            eos=self._eos,
            draft_len=draft_len,
            arrival_ns=self._clock(),
            adaptation=self._adaptive.begin() if self._adaptive and reason == "pays" else None,
            reason=reason,
        )
        with self._lock:
            if self._closed:
                raise RequestError("the runtime is closed")
            if request.request_id in self._open:
                raise RequestError(
                    f"request id {request.request_id[:60]!r} is already being served",
                    hint="Send another id.",
                )
            max_open = self._target.max_batch_size + self.settings.max_queue_size
            if len(self._open) >= max_open:
                raise QueueFull(
                    f"{max_open} requests are being served or waiting", hint="Send it again later."
                )
            self._open[request.request_id] = sequence
            self._waiting.append(sequence)
        self._interrupt()

    def _draft_len(
        self, request: GenerationRequest, rule: RuntimeRule
    ) -> tuple[int, DraftLenReason]:
        """The longest draft of a request, and why; "pays" if its length is chosen while it runs."""
        longest = self.settings.max_prompt_tokens
        if request.draft_len is not None:
            return request.draft_len, "request"
        if longest is not None and len(request.prompt_ids) > longest:
            return 0, "prompt length"
        if self._adaptive is None or rule == "verify_only":
            return self._max_draft_len, "fixed"
        # Speculative sampling draws other numbers at another draft length, and a seed promises the
        # same text again.
        if rule == "rejection" and request.sampling.seed is not None:
            return self._max_draft_len, "seed"
        return self._max_draft_len, "pays"

    def cancel(self, request_id: str) -> None:
        """End a request before the next step. Does nothing for an unknown or ended request."""
        with self._lock:
            if request_id in self._open:
                self._cancelled.add(request_id)
        self._interrupt()

    def _interrupt(self) -> None:
        """Let the stepping thread look at what has changed."""
        bursts = self._bursts  # `close` forgets it
        if bursts is not None:
            bursts.start()
            bursts.interrupt()
        self._wake.set()

    def counters(self) -> RuntimeCounters:
        with self._lock:
            queued = len(self._waiting)
            return self._totals.snapshot(active=len(self._open) - queued, queued=queued)

    def active_ids(self) -> frozenset[str]:
        """The ids of the requests that have a slot; the other open ones wait for one."""
        with self._lock:
            return frozenset(name for name, sequence in self._open.items() if sequence.slot >= 0)

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

    def run(self, stop: threading.Event, on_told: Callable[[], object] = lambda: None) -> None:
        """Step until `stop` is set, and sleep while there is nothing to do. Requests that are open
        then stay open: see close().

        on_told: called behind events, before the runtime goes on to what takes long. On this
        thread, or on a second one that reads what a burst gives while the next step runs: see
        toolkit.speculative.bursts.
        """
        self._runner, self._on_told = threading.current_thread(), on_told
        if self._bursts is not None:
            self._bursts.on_read = on_told
        try:
            while not stop.is_set():
                self._wake.clear()
                has_stepped = self.step()
                on_told()
                if not has_stepped:
                    self._wake.wait(IDLE_S)
        finally:
            self._runner, self._on_told = None, lambda: None
            if self._bursts is not None:
                self._bursts.on_read = self._on_told

    def step(self) -> bool:
        """One iteration. False if there was nothing to do."""
        with self._stepping:
            self._end_overdue()
            if self._waiting:
                self._admit()
            self._limit_by_load()
            if not self._prefilling and not self._running:
                if self._adaptive is not None:
                    self._adaptive.pause()
                return False
            chunks = self._next_chunks()
            if chunks and not (self._running and self._packs):
                self._prefill(chunks)
                chunks = []
            if self._running:
                self._verify(chunks)
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
        if self._bursts is not None:
            self._bursts.close()
            self._bursts = None

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
        while self._waiting and self._free:
            with self._lock:
                sequence = self._waiting.popleft()
            sequence.tally.first_scheduled_ns = now
            self._place(sequence)
        adaptive = self._adaptive
        if adaptive is None:
            return
        # A trial of a request alone goes on with the next one.
        goes_on = self._running or (adaptive.is_trying and len(self._prefilling) == 1)
        if goes_on or adaptive.awaits_more(len(self._prefilling)):
            for rows, sequence in enumerate(self._prefilling, len(self._running) + 1):
                if sequence.adaptation is not None and sequence.adaptation.draft_len is None:
                    adaptive.join(sequence.adaptation, rows)
        else:
            self._choose_draft_lens(self._prefilling)

    def _place(self, sequence: Sequence) -> None:
        """Give a request a free slot, with as much of its prompt as a KV cache already holds."""
        active, salt = [*self._running, *self._prefilling], sequence.request.cache_salt
        if self.settings.reuse_prefixes:
            for other in active:
                self._slots[other.slot].held = other.ids[: other.cached_tokens]
        free = [self._slots[number] for number in self._free]
        used = [self._slots[other.slot] for other in active]
        place = choose_place(free, used, sequence.ids, salt, copies=self._copies)
        number, source, reused = place.slot.number, place.source.number, place.reused
        self._free.remove(number)
        sequence.slot, sequence.tally.reused_prompt_tokens = number, reused
        place.slot.held, place.slot.salt = [], salt
        self._prefilling.append(sequence)
        try:
            if source != number:
                _copying(self._target).copy(source, number, reused)
            elif self._target.length(number) != reused:
                self._target.rewind([number], [reused])
            sequence.cached_tokens = reused
        except Exception as error:
            self._fail([sequence], error)
            return
        if self._drafter is not None:
            try:
                self._drafter.begin(number, source, reused)
            except Exception as error:
                self._go_on_plainly([sequence], error)

    def _next_chunks(self) -> list[Chunk]:
        """The chunks of prompts that this step reads.

        Their tokens are those of one chunk while most slots decode, so prompts delay them by at
        most one chunk per step. There are more when more requests wait for their first token than
        would be delayed.
        """
        if not self._prefilling:
            return []
        chunk_len = self._target.max_step_tokens
        max_tokens = chunk_len * max(1, len(self._prefilling) - len(self._running))
        self._oldest_first = not self._oldest_first
        return next_chunks(self._prefilling, chunk_len, max_tokens, oldest_first=self._oldest_first)

    def _prefill(self, chunks: list[Chunk]) -> None:
        """Feed chunks, in one forward if there are several and the engine packs rows."""
        parts = [chunks] if self._packs else [[chunk] for chunk in chunks]
        for part in parts:
            try:
                logits = self._forward_chunks([], [], part)
            except Exception as error:
                if len(part) == 1:
                    self._fail([part[0].sequence], error)
                else:  # each by itself, so that a fault ends its own request only
                    parts += [[chunk] for chunk in part]
            else:
                self._read(part, logits)

    def _forward_chunks(
        self, slots: list[int], blocks: list[list[int]], chunks: list[Chunk]
    ) -> torch.Tensor:
        """One forward for blocks of running requests, in `slots`, and for chunks of prompts. Logits
        [n, vocab]: those of every token of the blocks, then those that end a prompt. If it fails
        with chunks, no length has changed.
        """
        if not chunks:  # the path of almost every step
            return self._forward_rows(slots, blocks, [len(block) for block in blocks])
        for chunk in chunks:
            # A step that failed behind its forward has not noted what that read.
            if self._target.length(chunk.sequence.slot) > chunk.sequence.cached_tokens:
                self._target.rewind([chunk.sequence.slot], [chunk.sequence.cached_tokens])
        slots = slots + [chunk.sequence.slot for chunk in chunks]
        rows = blocks + [chunk.tokens for chunk in chunks]
        wanted = [len(block) for block in blocks] + [int(chunk.ends_prompt) for chunk in chunks]
        before = [self._target.length(slot) for slot in slots]
        try:
            return self._forward_rows(slots, rows, wanted)
        except Exception:
            self._target.rewind(slots, before)
            raise

    def _read(self, chunks: list[Chunk], logits: torch.Tensor) -> None:
        """Go on behind chunks that the target has read. logits: of those that end their prompt."""
        count = 0
        for chunk in chunks:
            sequence = chunk.sequence
            sequence.cached_tokens += len(chunk.tokens)
            count += chunk.ends_prompt
            try:
                if chunk.ends_prompt:
                    self._begin(sequence, logits[count - 1 : count])
                    self._on_told()
            except Exception as error:
                self._fail([sequence], error)
                continue
            try:
                # The draft reads the prompt after the target, so that the first token waits only
                # for the target. A request that does not draft yet is fed when it does.
                if (
                    sequence.finish_reason is None
                    and sequence.speculates
                    and sequence.draft_room() > 0
                    and self._drafter is not None
                ):
                    self._feed(self._drafter, sequence)
            except Exception as error:
                self._go_on_plainly([sequence], error)

    def _feed(self, drafter: Drafter, sequence: Sequence) -> None:
        """Let the draft read what the target has read of a prompt."""
        start, lag = self._clock(), drafter.lag(sequence)
        drafter.feed(
            sequence.slot,
            sequence.ids[: min(sequence.cached_tokens, sequence.prompt_tokens)],
        )
        tokens = lag - drafter.lag(sequence)
        self._fed += tokens
        if self._costs is not None and tokens:
            self._costs.note_reading(tokens, self._clock() - start)

    def _begin(self, sequence: Sequence, logits: torch.Tensor) -> None:
        """Choose the first token, from the last logits [1, vocab] of the prompt."""
        host = to_host(logits)
        if not math.isfinite(float(host.max())):
            raise ValueError(NOT_FINITE_MESSAGE)
        _, token = sequence.rule.decide(host, len(sequence.ids), [])
        event = sequence.take(
            0, token, host if sequence.request.cumulative_logprob else None, self._clock()
        )
        self._prefilling.remove(sequence)
        self._running.append(sequence)
        self._deliver(sequence, event)

    def _verify(self, chunks: list[Chunk]) -> None:
        rows = self._running[:]
        self._began_ns, self._fed = self._clock(), 0
        try:
            self._adapt(rows)
            bursting = None if chunks else self._may_burst(rows)
            if bursting is None or not self._burst(rows[0], bursting):
                self._has_asked = False
                self._verify_rows(rows, chunks)
        except Exception as error:
            self._fail(rows, error)

    def _verify_rows(self, rows: list[Sequence], chunks: list[Chunk]) -> None:
        """One step of the running requests. chunks: prompts that are read in the same forward. If
        that fails, each has its own, so that a fault ends its own request only.
        """
        start, has_failed = self._clock(), False
        if self._drafter is not None:
            # Most rows of a batch that decodes plainly are told without a call.
            speculating = [
                row
                for row in rows
                if (row.adaptation is None or row.adaptation.draft_len != 0)
                and row.speculates
                and row.draft_room() > 0
            ]
            if speculating:
                has_failed = not self._propose(self._drafter, speculating)
        drafted = self._clock()
        counts = [len(row.drafts) for row in rows]
        blocks = [[row.ids[-1], *row.drafts] for row in rows]
        slots = [row.slot for row in rows]
        read = chunks
        try:
            logits = self._forward_chunks(slots, blocks, chunks)
            first_logits = logits[sum(map(len, blocks)) :]
        except Exception:
            if not chunks:
                raise
            self._prefill(chunks)
            read = []
            logits = self._forward_chunks(slots, blocks, [])
        verified = self._clock()
        outcomes, read_ns = self._take(rows, blocks, logits, verified)
        host_ns = self._clock() - verified
        self._totals.add_step(drafted - start, verified - drafted, host_ns)
        for row, event in outcomes:
            row.tally.add_time(drafted - start, verified - drafted, host_ns)
            self._deliver(row, event)
        self._on_told()
        if read:
            self._read(read, first_logits)
        # A forward that read prompts, too, says nothing about the cost of a step, nor does a draft
        # that failed.
        if self._costs is not None and self._notes(counts, reads=bool(chunks)) and not has_failed:
            if self._plain_steps >= PLAIN_TRIAL_STEPS:
                share = self._plain_steps // NOTE_SHARE_OF_PLAIN_STEPS
                unnoted = min(max(NOTE_EVERY_PLAIN_STEPS, share), MOST_PLAIN_STEPS_UNNOTED)
                self._next_noted = self._plain_steps + unnoted
            times = (drafted - start, read_ns - drafted, self._clock() - read_ns)
            self._costs.note_step(len(rows), _drafting(counts), _context(rows), *times)
        is_whole = len(read) == len(chunks) and not has_failed
        if self._adaptive is not None and self._adaptive.compares and is_whole:
            self._compare(rows, counts, read)

    def _compare(self, rows: list[Sequence], counts: list[int], read: list[Chunk]) -> None:
        """A step of a trial, or behind one, was taken. counts: of the drafts of each row. read:
        prompts, in the same forward.
        """
        assert self._adaptive is not None
        step = ComparedStep(
            len(rows),
            _drafting(counts),
            _context(rows),
            read=sum(len(chunk.tokens) for chunk in read),
            fed=self._fed,
            ns=self._clock() - self._began_ns,
        )
        self._adaptive.compare(step)

    def _notes(self, counts: list[int], *, reads: bool) -> bool:
        """Count a step. Returns whether what it took is worth to be noted. counts: of the drafts of
        each row. reads: prompts, too.
        """
        if any(counts):
            self._plain_steps, self._next_noted = 0, UNSETTLED_STEPS + 1
            if reads:
                return False
            self._drafting_steps += 1
            is_fresh = len(counts) == 1 or self._drafting_steps <= FRESH_STEPS
            return is_fresh or self._drafting_steps % NOTE_EVERY_DRAFTING_STEPS == 0
        self._drafting_steps = 0
        self._plain_steps += 1
        return not reads and self._plain_steps >= self._next_noted

    def _propose(self, drafter: Drafter, rows: list[Sequence]) -> bool:
        """Draft for these rows. Returns whether it went well; if not, rows go on plainly."""
        try:
            drafter.propose(rows)
        except Exception as error:
            self._go_on_plainly(rows, error)
            return False
        wrong = [
            row
            for row in rows
            if row.drafts and not 0 <= min(row.drafts) <= max(row.drafts) < self.vocab_size
        ]
        if wrong:
            what = f"the draft proposed token ids outside the vocabulary of {self.vocab_size}"
            self._go_on_plainly(wrong, ValueError(what))
        return not wrong

    def _go_on_plainly(self, sequences: list[Sequence], error: Exception) -> None:
        """The draft failed for these requests: they do not use it any more, and nothing that its
        cache holds of them is used again.
        """
        for sequence in sequences:
            sequence.drafts.clear()
            if self._drafter is not None:
                self._drafter.settle(sequence.slot, 0)
            if sequence.speculates:
                sequence.draft_failed = True
                sequence.tally.draft_failure = f"{type(error).__name__}: {error}"

    def _take(
        self, rows: list[Sequence], blocks: list[list[int]], logits: torch.Tensor, now: int
    ) -> tuple[list[tuple[Sequence, TokenEvent]], int]:
        """Accept what each row's logits allow, and cut the caches back to it. blocks: what each row
        has fed. logits: [tokens, vocab], those of all blocks first. Also returns when the logits
        had been read, which is when a GPU has finished the forward.
        """
        choices = argmax(logits) if any(row.rule.is_argmax for row in rows) else []
        # On the CPU this is a view. On a GPU it is a copy, which greedy decoding does not need.
        needs_host = not logits.is_cuda or any(
            not row.rule.is_argmax or row.request.cumulative_logprob for row in rows
        )
        host = to_host(logits) if needs_host else None
        read_ns = self._clock()
        slots, lengths, outcomes = [], [], []
        end = 0
        for row, block in zip(rows, blocks, strict=True):
            before, count = len(row.ids), len(row.drafts)
            first, end = end, end + len(block)
            row_logits = None if host is None else host[first:end]
            try:
                accepted, token = _decide(row, row_logits, choices[first:end])
            except Exception as error:  # only this request's logits are at fault
                self._fail([row], error)
                continue
            if row.adaptation is not None and (count or not row.rule.is_argmax):
                self._note(row, row.adaptation, count, accepted, token, row_logits)
            scored_logits = row_logits if row.request.cumulative_logprob else None
            event = row.take(accepted, token, scored_logits, now)
            if count:
                row.noted_tokens = len(row.ids)
            outcomes.append((row, event))
            if row.finish_reason is None:
                if count and self._drafter is not None:
                    self._drafter.settle(row.slot, row.cached_tokens)
                if row.cached_tokens != before + count:
                    slots.append(row.slot)
                    lengths.append(row.cached_tokens)
        if slots:
            self._target.rewind(slots, lengths)
        return outcomes, read_ns

    def _may_burst(self, rows: list[Sequence]) -> BurstingRule | None:
        """The rule in whose place the engine may take the next steps by itself: of one request,
        while nothing else is to be done.
        """
        if self._bursts is None or len(rows) != 1:
            return None
        (row,) = rows
        self._bursts.allow()  # what comes from here on interrupts the burst
        bursting, drafts = row.rule.bursting, row.draft_room() > 0
        # A probe needs the chances of tokens that were drawn without drafts.
        is_probed = row.adaptation is not None and not drafts and not row.rule.is_argmax
        is_alone = not (self._waiting or self._prefilling or self._cancelled)
        if row.request.cumulative_logprob or is_probed or not is_alone:
            return None
        if row.steps_without_burst:
            row.steps_without_burst -= 1
            return None
        return bursting if not drafts or self._drafter_of_bursts().is_near(row) else None

    def _burst(self, row: Sequence, rule: BurstingRule) -> bool:
        """Whether it is all of this iteration. If not, the next step is left, in which rounding
        decides.
        """
        bursts, draft_len, longest = self._bursts, row.draft_room(), row.longest_draft()
        assert bursts is not None
        last: list[TokenEvent] = []
        faults: list[Exception] = []

        def take(step: BurstStep) -> bool:
            """On the reader's thread, or on this one."""
            try:
                if step.token == NOT_FINITE:
                    raise ValueError(NOT_FINITE_MESSAGE)
                if len(step.drafts) < step.wanted:
                    row.draft_failed = True
                rule.pass_step(len(row.ids), step.wanted, len(step.drafts), step.accepted)
                row.drafts = step.drafts[:]  # which the row clears
                event = row.take(step.accepted, step.token, None, step.now_ns)
                self._totals.add_step(step.draft_ns, step.verify_ns, 0)
                row.tally.add_time(step.draft_ns, step.verify_ns, 0)
                if row.adaptation is not None and self._adapt_in_burst(row, row.adaptation, step):
                    bursts.interrupt()
                if row.finish_reason is None:
                    if row.request.running_stats:
                        event = dataclasses.replace(event, stats=row.tally.stats())
                    row.on_event(event)
                    return True
                last.append(event)
            except Exception as error:
                faults.append(error)
            return False

        unread = self._drafter_of_bursts().unread(row) if draft_len else row.ids[-1:]
        end_ids = tuple(self._eos)
        before = len(row.ids)
        numbers = rule.foresee(before, longest if draft_len else 0)
        deadline, max_ns = row.request.deadline_ns, MAX_NS
        if deadline is not None:
            max_ns = max(0, min(MAX_NS, deadline - self._clock()))
        is_undecided = bursts.run(
            row.slot, unread, draft_len, longest, row.room, end_ids, max_ns, numbers, take
        )
        if faults:
            raise faults[0]
        # Steps behind one that a stop word ended are of no use.
        if self._target.length(row.slot) > row.cached_tokens:
            self._target.rewind([row.slot], [row.cached_tokens])
        if draft_len:
            self._drafter_of_bursts().note_burst(row)
        for event in last:
            self._deliver(row, event)
        if is_undecided and len(row.ids) - before < WORTHWHILE_TOKENS:
            row.steps_without_burst = STEPS_WITHOUT_BURST
        return not is_undecided or row.finish_reason is not None

    def _adapt_in_burst(self, row: Sequence, state: Adaptation, step: BurstStep) -> bool:
        """Record what a step of a burst showed of a request whose draft length is chosen, and
        choose again if that is due, while the next step runs. Returns whether the burst has to end:
        drafts end or begin, or a probe may be due.
        """
        controller, bursts, count = self._adaptive, self._bursts, len(step.drafts)
        assert controller is not None and self._costs is not None and bursts is not None
        before = state.draft_len
        if count:
            controller.note_block(state, count, step.accepted)
            row.noted_tokens = len(row.ids)
            row.target_chances.clear()
        if self._notes([count], reads=False):
            times = (step.draft_ns, step.verify_ns, 0)
            self._costs.note_step(1, _drafting([count]), row.cached_tokens, *times)
        self._has_asked = row.finish_reason is None
        if self._has_asked and not controller.keeps(1):
            self._choose_draft_lens([row])
        if state.draft_len and before and state.draft_len != before:
            bursts.set_draft_len(state.draft_len)
        return bool(state.draft_len) != bool(before) or controller.may_probe()

    def _drafter_of_bursts(self) -> ModelDrafter:
        assert isinstance(self._drafter, ModelDrafter)
        return self._drafter

    def _limit_by_load(self) -> None:
        """Apply the schedule's draft length, whatever the requests ask for. Those that are read
        count, too: their prompts the draft need not read if it will not be used. A draft that
        skipped some steps catches up when it is used again.
        """
        if self._schedule is None:
            return
        rows = [*self._running, *self._prefilling]
        length = self._schedule.length(len(rows), self._clock())
        if self._adaptive is not None and length != self._load_limit:
            self._adaptive.reconsider()
        self._load_limit = length
        for row in rows:
            row.load_limit = length

    # Adaptive draft lengths.

    def _adapt(self, rows: list[Sequence]) -> None:
        """Decide and probe, if that is due. A step without a request that adapts saves nothing for
        probes.
        """
        if self._adaptive is None:
            return
        # Of the first row alone, mostly: behind a forward, looking at all takes microseconds.
        if rows[0].adaptation is None and all(row.adaptation is None for row in rows):
            return
        if self._has_asked and len(rows) == 1:
            self._has_asked = False
        elif self._rest.take(len(rows)) or self._adaptive.rests(len(rows)):
            return
        elif not self._adaptive.keeps(len(rows)):
            self._choose_draft_lens(rows)
        if self._adaptive.may_probe():
            self._probe(rows)

    def _adapting(self, rows: list[Sequence]) -> list[Adaptation]:
        """The states of the rows whose lengths are chosen, which know of all output."""
        states = []
        for row in rows:
            if self._adaptive is not None and row.adaptation is not None and row.adapts:
                if self._drafter is not None:
                    row.adaptation.unread_tokens = self._drafter.lag(row)
                row.adaptation.left_tokens = row.room
                self._adaptive.note_plain(row.adaptation, len(row.ids) - row.noted_tokens)
                row.noted_tokens = len(row.ids)
                states.append(row.adaptation)
        return states

    def _choose_draft_lens(self, rows: list[Sequence]) -> None:
        if self._adaptive is None or self._costs is None:
            return
        states = self._adapting(rows)
        if states:
            # Not each step is noted, and requests have come and gone since.
            self._costs.set_context(_context(rows))
            fixed = [row.draft_room() for row in rows if not row.adapts]
            limit = max(row.load_limit for row in rows if row.adapts)
            self._adaptive.choose(states, limit=limit, fixed=fixed)

    def _note(
        self,
        row: Sequence,
        state: Adaptation,
        drafted: int,
        accepted: int,
        token: int,
        logits: Floats | None,
    ) -> None:
        """Record what a verify step showed of a request that drafted, or that draws its tokens.
        logits [drafted + 1, vocab]: the target's.
        """
        controller = self._adaptive
        if controller is None:
            return
        if drafted:
            controller.note_block(state, drafted, accepted)
            if row.target_chances:
                row.target_chances.clear()
            return
        tokens = len(row.ids) - row.noted_tokens
        if logits is not None and controller.is_probe_near(state, tokens):
            row.target_chances += row.rule.chances(logits[:1], [token])

    def _probe(self, rows: list[Sequence]) -> None:
        """Find out for requests that do not draft whether it would pay again, all in one forward of
        the draft. It is decided again with the next step.
        """
        controller = self._adaptive
        if controller is None or self._costs is None or self._drafter is None:
            return
        states = self._adapting(rows)
        if not any(map(controller.is_probe_due, states)):
            controller.await_probes(states)
            return
        soon = [
            (row, row.adaptation)
            for row in rows
            if row.adapts and row.adaptation is not None and controller.is_due_soon(row.adaptation)
        ]
        due = sorted(soon, key=lambda pair: -pair[1].plain_tokens)[:PROBED_ROWS]
        start = self._clock()
        probed = [row for row, _ in due]
        try:
            results = self._drafter.probe(
                probed, [min(PROBE_TOKENS, state.plain_tokens) for _, state in due]
            )
        except Exception as error:
            self._go_on_plainly(probed, error)
            self._choose_draft_lens(rows)
            return
        self._costs.note_probe(len(due), self._clock() - start)
        for (row, state), shares in zip(due, results, strict=True):
            controller.note_probe(state, shares, len(rows))
            row.target_chances.clear()

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
        self._on_told()

    def _fail(self, sequences: list[Sequence], error: Exception) -> None:
        """End the requests that took part in a failed forward or decision. The runtime goes on."""
        for sequence in sequences:
            if self._open.get(sequence.request.request_id) is sequence:
                self._end(sequence, "error", f"{type(error).__name__}: {error}")

    def _release(self, sequence: Sequence, event: TokenEvent) -> None:
        """Free the slot of an ended request in both caches, and forget the request. The next
        request may begin with what the caches hold, unless this one failed. A request whose slot
        cannot be freed is still open, so that `_fail` ends it.
        """
        kept = 0
        if self.settings.reuse_prefixes and event.finish_reason != "error":
            kept = sequence.cached_tokens
        if sequence.slot >= 0:
            self._empty(sequence, kept)
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
        if self._adaptive is not None and sequence.adaptation is not None:
            self._adaptive.finish(
                sequence.adaptation,
                prompt_tokens=sequence.prompt_tokens - (sequence.tally.reused_prompt_tokens or 0),
                output_tokens=len(sequence.ids) - sequence.prompt_tokens,
                max_tokens=sequence.request.max_tokens,
            )
        slot, sequence.slot = self._slots[sequence.slot], -1
        self._uses += 1
        slot.held, slot.last_use = sequence.ids[:kept], self._uses if kept else 0
        self._free.add(slot.number)

    def _empty(self, sequence: Sequence, kept: int) -> None:
        """Leave as many tokens of a request in both caches."""
        self._target.rewind([sequence.slot], [kept])
        if self._drafter is None:
            return
        try:
            self._drafter.keep(sequence.slot, 0 if sequence.draft_failed else kept)
        except Exception:  # the next request in this slot finds out whether it still fails
            self._drafter.settle(sequence.slot, 0)


def bursts_of(target: StepEngine, drafter: Drafter | None, max_draft_len: int) -> Bursts | None:
    """Bursts of these engines, if they can: plain requests and those that draft alike, since their
    speed is compared.
    """
    if not isinstance(target, BurstingEngine):
        return None
    if drafter is None or max_draft_len == 0:
        return Bursts(target, None, 0)
    if not isinstance(drafter, ModelDrafter) or not target.bursts_with(drafter.engine):
        return None
    return Bursts(target, drafter.engine, max_draft_len)


def _copying(engine: StepEngine) -> CopyingEngine:
    assert isinstance(engine, CopyingEngine)
    return engine


def _context(rows: list[Sequence]) -> float:
    """How many tokens stand in the slot of a row once its prompt is read, in the mean."""
    return sum([len(row.ids) for row in rows]) / len(rows)


def _drafting(counts: list[int]) -> list[int]:
    """How many rows drafted a first token, a second one, and so on. counts: drafts of each row."""
    if len(counts) == 1:
        return [1] * counts[0]
    return [sum([count > depth for count in counts]) for depth in range(max(counts))]


def _decide(row: Sequence, logits: Floats | None, choices: list[int]) -> tuple[int, int]:
    """Return (accepted drafts, next token) of one request.

    logits [drafts + 1, vocab]: the target's, after the output and after each draft; None if they
    are not on the host. choices: the most likely token of each of these rows. Raises ValueError for
    logits that are not finite.
    """
    if row.rule.is_argmax or logits is None:
        accepted, token = match(row.drafts, choices.__getitem__)
        is_finite = token != NOT_FINITE  # accepted drafts are choices, too
    else:
        accepted, token = row.rule.decide(logits, len(row.ids), row.drafts)
        is_finite = token != NOT_FINITE and are_finite(logits, [*row.drafts[:accepted], token])
    if not is_finite:
        raise ValueError(NOT_FINITE_MESSAGE)
    return accepted, token
