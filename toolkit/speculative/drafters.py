"""Where drafts come from. A drafter keeps up with every sequence that speculates and proposes tokens behind it.

`ModelDrafter` runs a draft model. Its KV cache follows the sequence by one invariant: per slot it knows how many leading tokens
of the cache are the sequence's own. A rejected draft shortens that prefix. A block that was kept whole leaves it two tokens
behind, since the last draft was proposed and never fed: the next block begins by feeding both (the catch-up; without it the
draft would look at a sequence with a hole, and acceptance would sink with nothing to show why).
"""

from __future__ import annotations

from collections.abc import Sequence as Slots
from typing import Protocol

import torch

from toolkit.interfaces import StepEngine
from toolkit.speculative.sampling import argmax, to_host
from toolkit.speculative.sequence import Sequence

__all__ = ["Drafter", "ModelDrafter"]

STEADY = 2  # tokens a cache may be behind at the start of a block: the last draft and the one that followed it


class Drafter(Protocol):
    def feed(self, slot: int, ids: list[int]) -> None:
        """Bring the slot up to the sequence `ids`, of which it may already hold a beginning."""
        ...

    def propose(self, sequences: Slots[Sequence]) -> None:
        """Append to each sequence's `drafts` as many tokens as it has draft_room() for, at least one. All were fed before."""
        ...

    def settle(self, slot: int, length: int) -> None:
        """The target kept a sequence of `length` tokens: whatever stands behind them in the cache is not part of it."""
        ...

    def free(self, slots: Slots[int]) -> None: ...


class ModelDrafter:
    """Slots are numbered as the target's."""

    def __init__(self, engine: StepEngine) -> None:
        self._engine = engine
        self._valid = [0] * engine.max_batch_size  # leading tokens of the cache that are the sequence's own

    def feed(self, slot: int, ids: list[int]) -> None:
        engine, start = self._engine, self._valid[slot]
        self._rewind([slot], [start])
        while start < len(ids):
            chunk = ids[start : start + engine.max_step_tokens]
            engine.forward([slot], torch.tensor([chunk]), last_only=True)
            start += len(chunk)
        self._valid[slot] = start

    def propose(self, sequences: Slots[Sequence]) -> None:
        rooms = {sequence.slot: sequence.draft_room() for sequence in sequences}
        # The longest drafts first: as shorter ones end, those that go on are a beginning of the list.
        rows = sorted(sequences, key=lambda sequence: -rooms[sequence.slot]) if len(sequences) > 1 else list(sequences)
        for row in rows:
            if len(row.ids) - self._valid[row.slot] > STEADY:
                self.feed(row.slot, row.ids[:-1])
        # One width for all: a cache that is one token behind is fed one token again, beside one that is two behind.
        width = max(len(row.ids) - self._valid[row.slot] for row in rows)
        self._rewind([row.slot for row in rows], [len(row.ids) - width for row in rows])
        tokens = [row.ids[-width:] for row in rows]
        for index in range(rooms[rows[0].slot]):
            while rooms[rows[-1].slot] <= index:
                rows.pop()
            logits = self._engine.forward(
                [row.slot for row in rows], torch.tensor(tokens[: len(rows)]), last_only=True
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
        return [row.rule.propose(host[index, 0], len(row.ids) + len(row.drafts), row.drafts) for index, row in enumerate(rows)]

    def _rewind(self, slots: list[int], lengths: list[int]) -> None:
        engine = self._engine
        if any(engine.length(slot) != length for slot, length in zip(slots, lengths, strict=True)):
            engine.rewind(slots, lengths)
