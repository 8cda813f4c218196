"""Where drafts come from. A drafter follows every sequence that speculates, and proposes the tokens
that come next.

`ModelDrafter` runs a draft model. One invariant ties its KV cache to the sequence: for each slot it
knows how many leading tokens of the cache belong to the sequence. A rejected draft shortens that
prefix. After a fully accepted block the cache is two tokens behind: the last draft, which was
proposed but never fed, and the bonus token. The next block begins by feeding both (the catch-up).
Without it the draft would see a sequence with a hole, and acceptance would fall with nothing to
show why.

`NgramDrafter` needs no model (prompt lookup): if the last few tokens occurred before in prompt or
output, it proposes what followed them then. Such a draft is certain, not drawn from a distribution;
it is passed to the accept rule with `adopt`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Slots
from typing import Protocol

import torch

from toolkit.interfaces import Chain, ChainingEngine, CopyingEngine, StepEngine
from toolkit.speculative.request_state import Sequence
from toolkit.speculative.rows import rows_forward
from toolkit.speculative.sampling import NOT_FINITE, argmax, to_host, token_rows

__all__ = ["Drafter", "Lookup", "ModelDrafter", "NgramDrafter"]

# How far a cache may be behind at the start of a block: the last draft and the bonus token.
MAX_LAG_TOKENS = 2
# After a hole in the text, so many tokens do not count in a probe: the draft has too little to go
# by.
HOLE_TOKENS = 4


class Drafter(Protocol):
    def feed(self, slot: int, ids: list[int]) -> None:
        """Bring the slot up to the sequence `ids`. The slot may already hold its beginning."""
        ...

    def lag(self, row: Sequence) -> int:
        """How many tokens of the row its slot was not fed."""
        ...

    def propose(self, sequences: Slots[Sequence]) -> None:
        """Append up to draft_room() tokens to each sequence's `drafts`. Every sequence has room for
        at least one token; what its slot was not fed is fed first. A sequence whose draft fails
        keeps the drafts that it has, and `draft_failed` is set.
        """
        ...

    def probe(self, sequences: Slots[Sequence], counts: Slots[int]) -> list[list[float]]:
        """Compare the last counts[i] tokens of sequences[i], which are output that came without
        drafts, with what would have been drafted at each of them. Returns for each sequence the
        probabilities that they would have been accepted, in order; a drafter may leave tokens out.
        The slots need not have been fed.
        """
        ...

    def settle(self, slot: int, length: int) -> None:
        """Record that the sequence is now `length` tokens long: what the cache holds beyond them
        does not belong to it.
        """
        ...

    def begin(self, slot: int, source: int, length: int) -> None:
        """A sequence begins in `slot`, and its first `length` tokens are those of `source`, which
        may be the same slot.
        """
        ...

    def keep(self, slot: int, length: int) -> None:
        """The sequence in `slot` has ended. Only its first `length` tokens may be used again."""
        ...


class ModelDrafter:
    """Drafts with a model of its own. Slots have the same numbers as the target's."""

    def __init__(self, engine: StepEngine) -> None:
        self._engine = engine
        # Asked once, since it takes some time.
        self._chaining = engine if isinstance(engine, ChainingEngine) else None
        self._forward_rows = rows_forward(engine)
        # Per slot: how many leading tokens of the cache belong to the sequence.
        self._valid_tokens = [0] * engine.max_batch_size

    @property
    def engine(self) -> StepEngine:
        return self._engine

    def unread(self, row: Sequence) -> list[int]:
        """The tokens that the row's slot was not fed, after cutting it back to what belongs to the
        row.
        """
        start = self._valid_tokens[row.slot]
        self._rewind([row.slot], [start])
        return row.ids[start:]

    def lag(self, row: Sequence) -> int:
        return len(row.ids) - self._valid_tokens[row.slot]

    def is_near(self, row: Sequence) -> bool:
        """Whether a forward has room for the tokens that the row's slot was not fed."""
        return self.lag(row) <= self._engine.max_step_tokens

    def note_burst(self, row: Sequence) -> None:
        """Record what the row's slot holds after a burst, in which the engine fed itself."""
        self._valid_tokens[row.slot] = min(self._engine.length(row.slot), row.cached_tokens)

    def feed(self, slot: int, ids: list[int]) -> None:
        engine, start = self._engine, self._valid_tokens[slot]
        self._rewind([slot], [start])
        while start < len(ids):
            chunk = ids[start : start + engine.max_step_tokens]
            engine.forward([slot], token_rows([chunk]), last_only=True)
            start += len(chunk)
        self._valid_tokens[slot] = start

    def propose(self, sequences: Slots[Sequence]) -> None:
        # The longest drafts come first, so the rows that go on are always the start of the list.
        rows = sorted(sequences, key=lambda sequence: -sequence.draft_room())
        if self._chaining is not None:
            chained = [row for row in rows if row.rule.draft_temperature is not None]
            rows = [row for row in rows if row.rule.draft_temperature is None]
            if chained:
                # A chain begins with as many tokens as a forward takes, packed.
                self._catch_up(chained, self._engine.max_step_tokens)
                self._propose_chained(self._chaining, chained)
        if rows:
            self._catch_up(rows, MAX_LAG_TOKENS)
            self._propose_singly(rows)
        for sequence in sequences:
            self._valid_tokens[sequence.slot] = len(sequence.ids) + len(sequence.drafts) - 1

    def _catch_up(self, rows: list[Sequence], max_lag: int) -> None:
        for row in rows:
            if self.lag(row) > max_lag:
                self.feed(row.slot, row.ids[:-1])

    def _propose_chained(self, engine: ChainingEngine, rows: list[Sequence]) -> None:
        """In one call of the engine, which feeds itself. rows: the longest drafts first."""
        starts = [self._valid_tokens[row.slot] for row in rows]
        self._rewind([row.slot for row in rows], starts)
        tokens, probs = engine.forward_chain(
            [_chain(row, row.ids[start:]) for row, start in zip(rows, starts, strict=True)]
        )
        for index, row in enumerate(rows):
            for depth, token in enumerate(tokens[index]):
                row.draft_failed = token == NOT_FINITE
                if row.draft_failed:
                    break
                row.drafts.append(token)
                row.rule.adopt(token, probs[index, depth] if probs is not None else None)

    def _propose_singly(self, rows: list[Sequence]) -> None:
        """Token by token. rows: the longest drafts first."""
        # All rows have one width: if one cache is two tokens behind, a cache that is one behind
        # gets one token a second time.
        width = max(map(self.lag, rows))
        self._rewind([row.slot for row in rows], [len(row.ids) - width for row in rows])
        tokens = [row.ids[-width:] for row in rows]
        for index in range(rows[0].draft_room()):
            while rows and rows[-1].draft_room() <= index:
                rows.pop()
                tokens.pop()
            if not rows:
                break
            logits = self._engine.forward(
                [row.slot for row in rows], token_rows(tokens), last_only=True
            )  # [rows, 1, vocab]
            chosen = list(zip(rows, self._choose(rows, logits), strict=True))
            for row, token in chosen:
                row.draft_failed = token == NOT_FINITE
                if not row.draft_failed:
                    row.drafts.append(token)
            rows = [row for row, token in chosen if token != NOT_FINITE]
            tokens = [[token] for _, token in chosen if token != NOT_FINITE]

    def probe(self, sequences: Slots[Sequence], counts: Slots[int]) -> list[list[float]]:
        """One forward of the last tokens. If the cache ends long before them, the draft reads them
        right after what it has: a hole in the text, over which it predicts a little worse. The
        first tokens after a hole do not count, and the next use of the cache cuts it back to what
        belongs to the sequence. If it holds nothing of the sequence, whose prompt the draft has not
        read, a forward reads as much as it can.
        """
        slots = [row.slot for row in sequences]
        starts, rows, seen = [], [], []
        for row, count in zip(sequences, counts, strict=True):
            valid, end = self._valid_tokens[row.slot], len(row.ids) - 1
            most = count + HOLE_TOKENS if valid else self._engine.max_step_tokens
            width = min(max(count, end - valid), most, self._engine.max_step_tokens, end)
            starts.append(min(valid, end - width))
            rows.append(row.ids[end - width : end])
            is_whole = starts[-1] + width == end
            if is_whole:
                self._valid_tokens[row.slot] = end
            seen.append(min(count, width if is_whole else max(1, width - HOLE_TOKENS)))
        self._rewind(slots, starts)
        logits = self._forward_rows(slots, rows, seen)  # [sum of seen, vocab]
        are_greedy = all(row.rule.is_argmax for row in sequences)
        choices, host = (argmax(logits), None) if are_greedy else ([], to_host(logits))
        results, end = [], 0
        for row, count in zip(sequences, seen, strict=True):
            start, end = end, end + count
            if host is None:
                same = zip(choices[start:end], row.ids[-count:], strict=True)
                results.append([float(choice == token) for choice, token in same])
                continue
            chances = list(row.target_chances)[-count:]
            own = host[end - len(chances) : end]
            if chances and math.isfinite(float(own.max())):
                results.append(row.rule.acceptable(own, row.ids[-len(chances) :], chances))
            else:
                results.append([0.0] * len(chances))
        return results

    def settle(self, slot: int, length: int) -> None:
        self._valid_tokens[slot] = min(self._valid_tokens[slot], length)

    def begin(self, slot: int, source: int, length: int) -> None:
        valid_tokens = min(length, self._valid_tokens[source])
        if source != slot and valid_tokens:
            assert isinstance(self._engine, CopyingEngine)
            self._engine.copy(source, slot, valid_tokens)
        else:
            self._rewind([slot], [valid_tokens])
        self._valid_tokens[slot] = valid_tokens

    def keep(self, slot: int, length: int) -> None:
        self.settle(slot, length)
        self._rewind([slot], [self._valid_tokens[slot]])

    def _choose(self, rows: list[Sequence], logits: torch.Tensor) -> list[int]:
        if all(row.rule.is_argmax for row in rows):
            return argmax(logits[:, 0])
        host = to_host(logits)[:, 0]
        return [
            row.rule.propose(host[index], len(row.ids) + len(row.drafts), row.drafts)
            if math.isfinite(host[index].max())
            else NOT_FINITE
            for index, row in enumerate(rows)
        ]

    def _rewind(self, slots: list[int], lengths: list[int]) -> None:
        engine = self._engine
        if any(engine.length(slot) != length for slot, length in zip(slots, lengths, strict=True)):
            engine.rewind(slots, lengths)


def _chain(row: Sequence, tokens: list[int]) -> Chain:
    """The next block of a row whose draft's cache still needs these tokens."""
    rule, sampling, count = row.rule, row.request.sampling, row.draft_room()
    return Chain(
        row.slot,
        tokens,
        count,
        rule.draft_temperature or 0.0,
        rule.draft_uniforms(count),
        rule.draft_races(len(row.ids), count),
        sampling.top_k,
        sampling.top_p,
    )


class Lookup:
    """Finds where the n-grams of one growing sequence occurred last. Each token is indexed once,
    however many look-ups there are.
    """

    def __init__(self, max_ngram_size: int) -> None:
        self._sizes = range(max_ngram_size, 0, -1)
        # n-gram -> the index after its last occurrence, not counting the one at the very end
        self._index_after: dict[tuple[int, ...], int] = {}
        self.indexed_tokens = 0

    def __call__(self, ids: Slots[int], room: int) -> list[int]:
        """Find the longest ending of `ids` that occurred before, and return up to `room` tokens
        that followed its last occurrence. Empty if there is none.

        ids must begin with the ids of the previous call.
        """
        for end in range(max(1, self.indexed_tokens), len(ids)):
            for size in self._sizes:
                if size <= end:
                    self._index_after[tuple(ids[end - size : end])] = end
        self.indexed_tokens = len(ids)
        for size in self._sizes:
            start = self._index_after.get(tuple(ids[-size:])) if size < len(ids) else None
            if start is not None:
                return list(ids[start : start + room])
        return []


class NgramDrafter:
    """Prompt lookup. max_ngram_size: the longest ending that is looked for; shorter ones are tried
    after it.

    padded: always fill the room, with copies of the last token if need be. A step of a given width
    can then be timed whether or not the text repeats itself.
    """

    def __init__(self, max_ngram_size: int, *, padded: bool = False) -> None:
        self._max_ngram_size = max_ngram_size
        self._padded = padded
        self._lookups: dict[int, Lookup] = {}

    def feed(self, slot: int, ids: list[int]) -> None:
        self._lookup(slot)

    def lag(self, row: Sequence) -> int:
        """None: a look-up reads the sequence itself."""
        return 0

    def propose(self, sequences: Slots[Sequence]) -> None:
        for sequence in sequences:
            room = sequence.draft_room()
            drafts = self._lookup(sequence.slot)(sequence.ids, room)
            if self._padded:
                drafts += [sequence.ids[-1]] * (room - len(drafts))
            for token in drafts:
                sequence.drafts.append(token)
                sequence.rule.adopt(token)

    def probe(self, sequences: Slots[Sequence], counts: Slots[int]) -> list[list[float]]:
        """Where nothing would have been looked up, there is nothing to count, and nothing to pay
        for either.
        """
        results = []
        for sequence, count in zip(sequences, counts, strict=True):
            lookup, ids = self._lookup(sequence.slot), sequence.ids
            shares = []
            # What is indexed already would be found by looking ahead.
            for end in range(max(len(ids) - count, lookup.indexed_tokens), len(ids)):
                shares += [float(draft == ids[end]) for draft in lookup(ids[:end], 1)]
            results.append(shares)
        return results

    def _lookup(self, slot: int) -> Lookup:
        if slot not in self._lookups:
            self._lookups[slot] = Lookup(self._max_ngram_size)
        return self._lookups[slot]

    def settle(self, slot: int, length: int) -> None:
        """Does nothing: look-ups read the sequence itself, which holds accepted tokens only."""

    def begin(self, slot: int, source: int, length: int) -> None:
        """Does nothing: a look-up begins with the sequence itself."""

    def keep(self, slot: int, length: int) -> None:
        self._lookups.pop(slot, None)
