"""Which slot a new sequence gets, and how many of its first tokens some KV cache already holds.

A slot keeps what its last request has computed. A sequence that begins with the same tokens, such
as a system prompt or the earlier turns of a chat, computes only the rest. What a cache holds is
known token by token, so nothing is guessed: two sequences share the cache of their common
beginning, and nothing behind it.

Most of what a slot holds is kept apart: a short beginning that many requests share must not cost
the slot of a long chat. If the engine copies, the beginning is copied to the slot that was used
longest ago. Then the source may also be a slot whose request still runs.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field

__all__ = ["Place", "Slot", "choose_place", "common_length"]

# A shorter common beginning is not worth a copy, which costs a few microseconds per layer.
LEAST_COPIED_TOKENS = 16
AGE = operator.attrgetter("last_use", "number")


@dataclass(slots=True)
class Slot:
    """held: the tokens that the engine's cache holds, in order. salt: only sequences with the same
    one may begin with them. last_use: uses are numbered, so the smallest number is the longest ago;
    0: nothing is held.
    """

    number: int
    held: list[int] = field(default_factory=list)
    salt: str = ""
    last_use: int = 0


@dataclass(frozen=True, slots=True)
class Place:
    """Where a sequence goes. reused: how many of its first tokens `source` holds; if that is
    another slot than `slot`, they have to be copied.
    """

    slot: Slot
    source: Slot
    reused: int


def choose_place(
    free: Sequence[Slot], used: Sequence[Slot], ids: list[int], salt: str, *, copies: bool
) -> Place:
    """Choose one of the free slots, at least one, for the sequence `ids`. used: the slots of
    running sequences. copies: whether the engine does; if not, `used` do not matter.

    The longest common beginning is reused. The last token is always computed, since its logits are
    needed. Without anything to reuse, the slot that was used longest ago is taken.
    """
    oldest = min(free, key=AGE)
    held = [slot for slot in free if slot.held and slot.salt == salt]
    others = [slot for slot in used if slot.held and slot.salt == salt] if copies else []
    shared = {slot.number: common_length(slot.held, ids) for slot in (*held, *others)}
    if not any(shared.values()):
        return Place(oldest, oldest, 0)
    shared.setdefault(oldest.number, 0)
    most = len(ids) - 1
    if held:
        # Of several, the one that loses least.
        best = max(held, key=lambda slot: (shared[slot.number], -len(slot.held), -slot.number))
        if 2 * shared[best.number] > len(best.held) or (shared[best.number] and not copies):
            oldest = best
    source = oldest
    if copies:
        longest = max((*held, *others), key=lambda slot: shared[slot.number])
        gained = min(most, shared[longest.number]) - min(most, shared[oldest.number])
        if gained >= LEAST_COPIED_TOKENS:
            source = longest
    return Place(oldest, source, min(most, shared[source.number]))


def common_length(first: list[int], second: list[int]) -> int:
    """How long the common beginning is. Compares whole parts, which takes about 10 ns a token."""
    equal, end = 0, min(len(first), len(second))
    while equal < end:
        middle = (equal + end + 1) // 2
        if first[equal:middle] == second[equal:middle]:
            equal = middle
        else:
            end = middle - 1
    return equal
