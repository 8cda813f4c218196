"""Where drafts come from. A drafter keeps up with every sequence that speculates and proposes
tokens behind it.

`ModelDrafter` runs a draft model. Its KV cache follows the sequence by one invariant: per slot it
knows how many leading tokens of the cache are the sequence's own. A rejected draft shortens that
prefix. A block that was kept whole leaves it two tokens behind, since the last draft was proposed
and never fed: the next block begins by feeding both (the catch-up; without it the draft would look
at a sequence with a hole, and acceptance would sink with nothing to show why).

`NgramDrafter` needs no model: where the last few tokens stood before in prompt or output, what
followed them then is proposed (prompt lookup). Such a draft is a certain token, not a draw, and the
accept rules are told so.
"""

from __future__ import annotations

from collections.abc import Sequence as Slots
from typing import Protocol

import torch

from toolkit.interfaces import StepEngine
from toolkit.speculative.request_state import Sequence
from toolkit.speculative.sampling import argmax, to_host, token_rows

__all__ = ["Drafter", "Lookup", "ModelDrafter", "NgramDrafter"]

# tokens a cache may be behind at the start of a block: the last draft and the one that followed it
STEADY = 2


class Drafter(Protocol):
    def feed(self, slot: int, ids: list[int]) -> None:
        """Bring the slot up to the sequence `ids`, of which it may already hold a beginning."""
        ...

    def propose(self, sequences: Slots[Sequence]) -> None:
        """Append to each sequence's `drafts` up to draft_room() tokens, which is one at least.
        All were fed before.
        """
        ...

    def settle(self, slot: int, length: int) -> None:
        """The target kept a sequence of `length` tokens: whatever stands behind them in the
        cache is not part of it.
        """
        ...

    def free(self, slots: Slots[int]) -> None: ...


class ModelDrafter:
    """Slots are numbered as the target's."""

    def __init__(self, engine: StepEngine) -> None:
        self._engine = engine
        self._valid = [
            0
        ] * engine.max_batch_size  # leading tokens of the cache that are the sequence's own

    def feed(self, slot: int, ids: list[int]) -> None:
        engine, start = self._engine, self._valid[slot]
        self._rewind([slot], [start])
        while start < len(ids):
            chunk = ids[start : start + engine.max_step_tokens]
            engine.forward([slot], token_rows([chunk]), last_only=True)
            start += len(chunk)
        self._valid[slot] = start

    def propose(self, sequences: Slots[Sequence]) -> None:
        rooms = {sequence.slot: sequence.draft_room() for sequence in sequences}
        # The longest drafts first: as shorter ones end, those that go on are a beginning of the
        # list.
        rows = (
            sorted(sequences, key=lambda sequence: -rooms[sequence.slot])
            if len(sequences) > 1
            else list(sequences)
        )
        for row in rows:
            if len(row.ids) - self._valid[row.slot] > STEADY:
                self.feed(row.slot, row.ids[:-1])
        # One width for all: a cache that is one token behind is fed one token again, beside one
        # that is two behind.
        width = max(len(row.ids) - self._valid[row.slot] for row in rows)
        self._rewind([row.slot for row in rows], [len(row.ids) - width for row in rows])
        tokens = [row.ids[-width:] for row in rows]
        for index in range(rooms[rows[0].slot]):
            while rooms[rows[-1].slot] <= index:
                rows.pop()
            logits = self._engine.forward(
                [row.slot for row in rows], token_rows(tokens[: len(rows)]), last_only=True
            )  # [rows, 1, vocab]
            tokens = [[token] for token in self._choose(rows, logits)]
            for row, (token,) in zip(rows, tokens, strict=True):
                row.drafts.append(token)
        for sequence in sequences:
            self._valid[sequence.slot] = len(sequence.ids) + len(sequence.drafts) - 1

    def settle(self, slot: int, length: int) -> None:
        self._valid[slot] = min(self._valid[slot], length)

    def free(self, slots: Slots[int]) -> None:
        for slot in slots:
            self._valid[slot] = 0
        self._engine.rewind(slots, [0] * len(slots))

    def _choose(self, rows: list[Sequence], logits: torch.Tensor) -> list[int]:
        if all(row.rule.by_argmax for row in rows):
            return [ids[0] for ids in argmax(logits)]
        host = to_host(logits)
        return [
            row.rule.propose(host[index, 0], len(row.ids) + len(row.drafts), row.drafts)
            for index, row in enumerate(rows)
        ]

    def _rewind(self, slots: list[int], lengths: list[int]) -> None:
        engine = self._engine
        if any(engine.length(slot) != length for slot, length in zip(slots, lengths, strict=True)):
            engine.rewind(slots, lengths)


class Lookup:
    """Where the n-grams of one growing sequence stood last. Each token is indexed once, whatever
    the number of look-ups.
    """

    def __init__(self, max_ngram_size: int) -> None:
        self._sizes = range(max_ngram_size, 0, -1)
        self._behind: dict[
            tuple[int, ...], int
        ] = {}  # n-gram -> the index behind its latest place, the end left out
        self._indexed = 0

    def __call__(self, ids: Slots[int], room: int) -> list[int]:
        """What followed the longest end of `ids` that stood before, at its latest place: up to
        `room` tokens, or none.

        ids has to begin with what the last call was given.
        """
        for end in range(max(1, self._indexed), len(ids)):
            for size in self._sizes:
                if size <= end:
                    self._behind[tuple(ids[end - size : end])] = end
        self._indexed = len(ids)
        for size in self._sizes:
            place = self._behind.get(tuple(ids[-size:])) if size < len(ids) else None
            if place is not None:
                return list(ids[place : place + room])
        return []


class NgramDrafter:
    """Prompt lookup. max_ngram_size: the longest end of a sequence that is looked for; shorter ones
    are tried after it.

    padded: always draft as much as there is room for, with repetitions of the last token, so that a
    step of a given width can be timed whether or not the text repeats itself.
    """

    def __init__(self, max_ngram_size: int, *, padded: bool = False) -> None:
        self._max_ngram_size = max_ngram_size
        self._padded = padded
        self._lookups: dict[int, Lookup] = {}

    def feed(self, slot: int, ids: list[int]) -> None:
        self._lookups.setdefault(slot, Lookup(self._max_ngram_size))

    def propose(self, sequences: Slots[Sequence]) -> None:
        for sequence in sequences:
            room = sequence.draft_room()
            found = self._lookups[sequence.slot](sequence.ids, room)
            if self._padded:
                found += [sequence.ids[-1]] * (room - len(found))
            for token in found:
                sequence.drafts.append(token)
                sequence.rule.adopt(token)

    def settle(self, slot: int, length: int) -> None:
        """What was looked up is no part of a sequence until the target has kept it."""

    def free(self, slots: Slots[int]) -> None:
        for slot in slots:
            self._lookups.pop(slot, None)
