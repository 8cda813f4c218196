"""One model as an engine that is called with whole sequences: in-flight batching over slots that
keep their KV cache between calls.

It is to a `StepEngine` what TensorRT-LLM's executor is to its Triton backend. A call states the
tokens of a sequence and how many more it wants. A call with draft tokens ends once they are
verified: it returns the accepted drafts and one token more. A free slot still holds the sequence of
its last call. So the next round of the same request is computed only from where the two differ: one
or two tokens, however long the sequence is.

A call may name its owner, the request that it is a round of. Then its slot is kept for the owner's
next call, until the owner releases it or makes no call for KEPT_NS. Meanwhile others wait, unless
another slot is free. So a request that runs never loses its slot to one that arrives, and one that
has died holds the others up for a moment only. Nobody waits for ever, whoever waits for whom, since
what is given up can be computed again.

Greedy calls take the most likely token. Other calls choose with noise keyed by (seed, position). So
a draft and a target that are called with the same seed are coupled, and a seeded text is the same
whatever the drafts were. A call that states the draft's logits is judged by speculative sampling
instead. Penalties count the whole sequence, including the prompt, as TensorRT-LLM's do.

A step is one forward: the calls that decode, each with as many tokens as it brings, and chunks of
the sequences that a slot does not hold yet, chosen as the runtime chooses those of prompts. An
engine that does not pack rows gets each chunk in a forward of its own.

Threads: submit and cancel may be called from anywhere; one thread takes the steps.
"""

from __future__ import annotations

import dataclasses
import functools
import random
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from toolkit.errors import RequestError
from toolkit.interfaces import CopyingEngine, PackingEngine, Sampling, StepEngine
from toolkit.speculative.acceptance import Coupled, Greedy, Rule, reject
from toolkit.speculative.ending import after_stop_sequence, ending_of
from toolkit.speculative.limits import check_total_length
from toolkit.speculative.prefill import next_prompts
from toolkit.speculative.rows import rows_forward
from toolkit.speculative.sampling import Floats, are_finite, log_probability, normalised, to_host
from toolkit.speculative.slots import Place, Slot, choose_place, common_length
from toolkit.words import FinishReason

__all__ = ["Call", "Executor", "Output"]

# How long an idle `run` sleeps before it looks at its stop event again. A submit wakes it at once.
IDLE_S = 0.1
# How many tokens a slot's cache may lack for its call to take part in every step. If it lacks more,
# they are fed in chunks, when it is their turn.
MAX_LAG_TOKENS = 2
# How long an owner may make no call. Rounds follow one another within milliseconds. After a longer
# call to the other engine, such as for a long prompt, the slot may have been given away.
KEPT_NS = 2_000_000_000


@dataclass(frozen=True, slots=True)
class Call:
    """ids: the sequence so far. draft_logits [len(drafts), vocab]: drafts are judged by speculative
    sampling against them; None: a draft is accepted if it equals the target's choice. owner: the
    request that it is a round of, if it has several. cache_salt: only calls with the same one begin
    with what another one left in a slot.
    """

    call_id: str
    ids: tuple[int, ...]
    max_tokens: int
    drafts: tuple[int, ...] = ()
    draft_logits: Floats | None = None
    sampling: Sampling = field(default_factory=Sampling)
    end_ids: frozenset[int] = frozenset()
    stop_sequences: tuple[tuple[int, ...], ...] = ()
    min_tokens: int = 0  # no end token is chosen before so many output tokens
    log_probs: bool = False
    logits: bool = False
    owner: str = ""
    cache_salt: str = ""


@dataclass(frozen=True, slots=True)
class Output:
    """What one step added to a call. The last output has a finish_reason: stop | length | cancelled
    | error.

    log_probs: one per token, under the model's own logits. logits: one row [vocab] per token. Each
    is empty unless the call requested it.
    """

    call_id: str
    ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    error: str | None = None
    log_probs: tuple[float, ...] = ()
    logits: tuple[Floats, ...] = ()
    reused_tokens: int = 0  # of the sequence, already in a slot's cache
    computed_tokens: int = 0  # of the sequence, fed before the first output token
    arrival_ns: int = 0
    first_scheduled_ns: int = 0


OnOutput = Callable[[Output], None]


@dataclass(slots=True)
class _Slot(Slot):
    """A free slot keeps what it holds for the next call that begins with it. owner: the request
    that it is kept for; while it is free, until the time until_ns.
    """

    is_free: bool = True
    owner: str = ""
    until_ns: int = 0


@dataclass(slots=True)
class _Row:
    """A call that has a slot."""

    call: Call
    on_output: OnOutput
    rule: Rule
    arrival_ns: int
    ids: list[int]
    drafts: list[int]
    slot: _Slot | None = None
    reused: int = 0
    scheduled_ns: int = 0

    def lag_tokens(self) -> int:
        """How many tokens of the sequence the slot's cache lacks."""
        assert self.slot is not None
        return len(self.ids) - len(self.slot.held)


@dataclass(frozen=True, slots=True)
class _Block:
    """What a row brings to a forward: tokens that its cache lacks and, behind the last of them, its
    drafts. wanted: how many logits that gives; 0: the sequence does not end here.
    """

    row: _Row
    tokens: list[int]
    wanted: int

    @property
    def slot(self) -> _Slot:
        assert self.row.slot is not None
        return self.row.slot


class Executor:
    """Owns every slot of the engine."""

    def __init__(
        self,
        engine: StepEngine,
        *,
        max_queue_size: int = 256,
        reuse_prefixes: bool = True,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        """reuse_prefixes: a call may begin with what the call of another owner left in a slot."""
        self._engine = engine
        self._reuse_prefixes = reuse_prefixes
        self._copies = isinstance(engine, CopyingEngine)
        self._packs = isinstance(engine, PackingEngine)
        self._forward_rows = rows_forward(engine)
        self._max_queue_size = max_queue_size
        self._clock = clock
        self._lock = threading.Lock()  # guards the four below
        self._waiting: deque[_Row] = deque()
        self._open: set[str] = set()
        self._cancelled: set[str] = set()
        self._released: set[str] = set()  # owners
        self._wake = threading.Event()
        self._slots = [_Slot(number) for number in range(engine.max_batch_size)]
        self._active: list[_Row] = []  # in the order in which they got their slots
        self._oldest_first = False  # whether the oldest to be fed went first in the last step
        self._uses = 0  # of slots

    # From any thread.

    def submit(self, call: Call, on_output: OnOutput) -> None:
        """Queue a call. Raises RequestError for what can never be served, or at overload."""
        self._check(call)
        row = _Row(
            call, on_output, self._rule(call), self._clock(), list(call.ids), list(call.drafts)
        )
        with self._lock:
            if call.call_id in self._open:
                raise RequestError(
                    f"call id {call.call_id!r} is already being served", hint="Send another id."
                )
            max_open = self._engine.max_batch_size + self._max_queue_size
            if len(self._open) >= max_open:
                raise RequestError(
                    f"{max_open} calls are being served or waiting", hint="Send it again later."
                )
            self._open.add(call.call_id)
            self._waiting.append(row)
        self._wake.set()

    def cancel(self, call_id: str) -> None:
        """End a call before the next step. Does nothing for an unknown or ended call."""
        with self._lock:
            if call_id in self._open:
                self._cancelled.add(call_id)
        self._wake.set()

    def release(self, owner: str) -> None:
        """Keep no slot for this owner any more. Does nothing for an unknown one."""
        with self._lock:
            self._released.add(owner)
        self._wake.set()

    def _check(self, call: Call) -> None:
        length, engine = len(call.ids), self._engine
        if length == 0:
            raise RequestError("the sequence is empty", hint="Send at least one token.")
        if call.max_tokens < 1:
            raise RequestError(f"{call.max_tokens} tokens are requested; it has to be at least 1")
        if not all(0 <= token < engine.vocab_size for token in (*call.ids, *call.drafts)):
            raise RequestError(
                f"the sequence holds token ids outside the vocabulary of {engine.vocab_size}"
            )
        check_total_length(length, call.max_tokens, engine.max_seq_len, unit="tokens")
        if len(call.drafts) + MAX_LAG_TOKENS > engine.max_step_tokens:
            raise RequestError(
                f"{len(call.drafts)} draft tokens were sent, and this engine verifies at most"
                f" {engine.max_step_tokens - MAX_LAG_TOKENS}"
            )
        shape = (len(call.drafts), engine.vocab_size)
        if call.draft_logits is not None and call.draft_logits.shape != shape:
            raise RequestError(
                f"draft_logits has the shape {call.draft_logits.shape}; for these draft tokens it"
                f" has to be {shape}"
            )

    def _rule(self, call: Call) -> Rule:
        vocab = self._engine.vocab_size
        if call.sampling.temperature == 0.0:
            rule: Rule = Greedy(call.sampling, vocab)
        elif call.draft_logits is not None:
            rule = _GivenDraftLogits(call.sampling, vocab, call.draft_logits)
        else:
            rule = Coupled(call.sampling, vocab)
        rule.note(call.ids)
        return rule

    # The stepping thread.

    def run(self, stop: threading.Event) -> None:
        """Step until `stop` is set. Calls that are still open then end as cancelled."""
        while not stop.is_set():
            self._wake.clear()
            if not self.step():
                self._wake.wait(IDLE_S)
        with self._lock:
            self._cancelled.update(self._open)
        self._end_cancelled()

    def step(self) -> bool:
        """One iteration. Returns False if there was nothing to do."""
        if self._cancelled:
            self._end_cancelled()
        if self._released:
            self._end_owners()
        self._admit()
        if not self._active:
            return False
        ready = [row for row in self._active if row.lag_tokens() <= MAX_LAG_TOKENS]
        chunks = self._next_chunks(len(ready))
        blocks = [self._block(row) for row in ready]
        parts = [[*blocks, *chunks]] if self._packs else [*[[chunk] for chunk in chunks], blocks]
        for part in parts:
            if part:
                self._forward(part)
        return True

    def _next_chunks(self, ready: int) -> list[_Block]:
        """What this step reads of sequences whose slots lack more than the newest tokens. ready:
        how many calls decode. `SpeculativeRuntime` has the same rule.
        """
        feeding = [row for row in self._active if row.lag_tokens() > MAX_LAG_TOKENS]
        if not feeding:
            return []
        chunk_len = self._engine.max_step_tokens
        self._oldest_first = not self._oldest_first
        places = next_prompts(
            [row.lag_tokens() for row in feeding],
            chunk_len,
            chunk_len * max(1, len(feeding) - ready),
            oldest_first=self._oldest_first,
        )
        return [self._block(feeding[place]) for place in places]

    def _block(self, row: _Row) -> _Block:
        """The rest of a sequence and its drafts; if that is more than a forward takes, a chunk,
        which leaves a token, since the drafts stand behind the last one.
        """
        assert row.slot is not None
        start, most = len(row.slot.held), self._engine.max_step_tokens
        if row.lag_tokens() + len(row.drafts) <= most:
            return _Block(row, [*row.ids[start:], *row.drafts], len(row.drafts) + 1)
        return _Block(row, row.ids[start : min(start + most, len(row.ids) - 1)], 0)

    def _forward(self, blocks: list[_Block]) -> None:
        """One forward for all blocks. If it fails, each has its own, so that a fault ends its own
        call only.
        """
        slots = [block.slot.number for block in blocks]
        before = [len(block.slot.held) for block in blocks]
        try:
            logits = self._forward_rows(
                slots, [block.tokens for block in blocks], [block.wanted for block in blocks]
            )
            host = to_host(logits)  # [sum of wanted, vocab]
        except Exception as error:
            if len(blocks) == 1:
                self._fail(blocks[0].row, error)
                return
            self._engine.rewind(slots, before)
            for block in blocks:
                self._forward([block])
            return
        end = 0
        for block in blocks:
            first, end = end, end + block.wanted
            if not block.wanted:
                block.slot.held += block.tokens
                continue
            # Guarded one by one: a fault in one row's logits ends that call alone.
            self._guarded(block.row, functools.partial(self._decide, logits=host[first:end]))

    def _end_cancelled(self) -> None:
        with self._lock:
            cancelled, self._cancelled = self._cancelled, set()
            waiting = [row for row in self._waiting if row.call.call_id in cancelled]
            for row in waiting:
                self._waiting.remove(row)
        for row in [*waiting, *(row for row in self._active if row.call.call_id in cancelled)]:
            self._finish(row, Output(row.call.call_id, (), "cancelled"))

    def _end_owners(self) -> None:
        with self._lock:
            released, self._released = self._released, set()
        for slot in self._slots:
            if slot.owner in released:
                slot.owner = ""

    def _admit(self) -> None:
        """Give slots to waiting calls, in their order. A call whose owner has a slot passes by
        those that have to wait for one.
        """
        if not self._waiting:
            return
        with self._lock:
            waiting = list(self._waiting)
        for row in waiting:
            place = self._choose(row.call, row.ids)
            if place is None:
                continue
            with self._lock:
                self._waiting.remove(row)
            slot = self._slots[place.slot.number]
            slot.is_free, slot.owner, slot.salt = False, row.call.owner, row.call.cache_salt
            row.slot, row.reused, row.scheduled_ns = slot, place.reused, self._clock()
            self._active.append(row)
            self._guarded(row, functools.partial(self._fill, place=place))

    def _choose(self, call: Call, ids: list[int]) -> Place | None:
        """The free slot of the call's owner; else the one that `choose_place` chooses of those that
        are kept for nobody. None: the call has to wait.
        """
        free = [slot for slot in self._slots if slot.is_free]
        for slot in free:
            if call.owner and slot.owner == call.owner:
                # The last token is always fed, since its logits are needed.
                reused = min(len(ids) - 1, common_length(slot.held, ids))
                return Place(slot, slot, reused)
        now = self._clock()
        free = [slot for slot in free if not slot.owner or now >= slot.until_ns]
        if not free:
            return None
        if not self._reuse_prefixes:
            slot = min(free, key=lambda slot: slot.last_use)
            return Place(slot, slot, 0)
        used = [slot for slot in self._slots if slot not in free]
        return choose_place(free, used, ids, call.cache_salt, copies=self._copies)

    def _fill(self, row: _Row, place: Place) -> None:
        """Bring a call's slot to the tokens that are reused."""
        assert row.slot is not None
        if place.source is row.slot:
            self._cut(row.slot, place.reused)
            return
        assert isinstance(self._engine, CopyingEngine)
        row.slot.held = place.source.held[: place.reused]
        self._engine.copy(place.source.number, row.slot.number, place.reused)

    def _cut(self, slot: Slot, length: int) -> None:
        del slot.held[length:]
        if self._engine.length(slot.number) != length:
            self._engine.rewind([slot.number], [length])

    def _decide(self, row: _Row, logits: Floats) -> None:
        """Go on by what the logits [drafts + 1, vocab] allow."""
        call, before, drafts = row.call, len(row.ids), row.drafts
        made = before - len(call.ids)
        allowed = self._without_end_ids(logits, call, made) if made < call.min_tokens else logits
        accepted, token = row.rule.decide(allowed, before, drafts)
        if not are_finite(logits, [*drafts[:accepted], token]):
            raise ValueError("the model's logits are not finite")
        new, reason = self._until_the_end(row, [*drafts[:accepted], token])
        if drafts and reason is None:
            reason = "length"  # a call with drafts is one verification
        row.rule.note(new)
        row.ids += new
        log_probs: tuple[float, ...] = ()
        if call.log_probs:
            log_probs = tuple(log_probability(logits[i], token) for i, token in enumerate(new))
        output = Output(
            call.call_id,
            tuple(new),
            reason,
            log_probs=log_probs,
            logits=tuple(logits[i].copy() for i in range(len(new))) if call.logits else (),
        )
        assert row.slot is not None
        row.slot.held = row.ids[: before + min(accepted, len(new))]
        self._engine.rewind([row.slot.number], [len(row.slot.held)])
        row.drafts = []
        if reason is None:
            self._tell(row, output)
        else:
            self._finish(row, output)

    def _until_the_end(self, row: _Row, new: list[int]) -> tuple[list[int], FinishReason | None]:
        """The tokens up to the first that ends the call, and why it ends there."""
        call, output = row.call, row.ids[len(row.call.ids) :]
        ending = ending_of(
            new,
            call.max_tokens - len(output),
            call.end_ids,
            lambda tokens: after_stop_sequence(output, tokens, call.stop_sequences),
        )
        return new[: ending.count], ending.reason

    @staticmethod
    def _without_end_ids(logits: Floats, call: Call, made: int) -> Floats:
        rows = logits.copy()
        # -1e30 is finite, so it becomes a probability of 0 without a warning.
        rows[: call.min_tokens - made, sorted(call.end_ids)] = -1e30
        return rows

    def _guarded(self, row: _Row, work: Callable[[_Row], None]) -> None:
        """Do a part of one call. If it fails, the call ends with the error, and the executor goes
        on.
        """
        try:
            work(row)
        except Exception as error:
            self._fail(row, error)

    def _fail(self, row: _Row, error: Exception) -> None:
        if row in self._active:
            assert row.slot is not None
            self._cut(row.slot, 0)
            text = f"{type(error).__name__}: {error}"
            self._finish(row, Output(row.call.call_id, (), "error", text))

    def _finish(self, row: _Row, output: Output) -> None:
        with self._lock:
            self._open.discard(row.call.call_id)
            self._cancelled.discard(row.call.call_id)
        if row in self._active:
            self._active.remove(row)
        if row.slot is not None:
            slot = row.slot
            self._cut(slot, min(len(slot.held), self._engine.length(slot.number)))
            self._uses += 1
            slot.is_free, slot.last_use = True, self._uses if slot.held else 0
            slot.until_ns = self._clock() + KEPT_NS
        self._tell(row, output)

    def _tell(self, row: _Row, output: Output) -> None:
        output = dataclasses.replace(
            output,
            reused_tokens=row.reused,
            computed_tokens=len(row.call.ids) - row.reused,
            arrival_ns=row.arrival_ns,
            first_scheduled_ns=row.scheduled_ns,
        )
        try:
            row.on_output(output)
        except Exception:  # the receiver failed, so there is nobody to report the error to
            self.cancel(row.call.call_id)


class _GivenDraftLogits(Coupled):
    """Speculative sampling of drafts that came with their logits. Without drafts, as `Coupled`.

    The draws are keyed by seed and position, and independent of the noise of `Coupled`.
    """

    def __init__(self, sampling: Sampling, vocab_size: int, draft_logits: Floats) -> None:
        seed = random.SystemRandom().getrandbits(64) if sampling.seed is None else sampling.seed
        super().__init__(dataclasses.replace(sampling, seed=seed), vocab_size)
        self._seed = seed
        self._draft_logits: Floats | None = draft_logits

    def decide(self, logits: Floats, position: int, drafts: list[int]) -> tuple[int, int]:
        draft_logits, self._draft_logits = self._draft_logits, None
        if draft_logits is None or not drafts:
            return super().decide(logits, position, drafts)
        rows = [row[None].astype(logits.dtype) for row in draft_logits]
        draft_probs = [
            normalised(self._weights(rows[index], drafts[:index], index))[0]
            for index in range(len(drafts))
        ]
        target_probs = normalised(self._weights(logits, drafts, 0))
        generator = random.Random(f"{self._seed} {position}")
        uniforms = [generator.random() for _ in range(len(drafts) + 1)]
        return reject(drafts, draft_probs, target_probs, uniforms)
