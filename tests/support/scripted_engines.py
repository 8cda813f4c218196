"""Engines that can only be called, and return a fixed text: what the BLS model's loop is tested
with.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence

from tests.support.runtimes import CODEC
from toolkit.speculative.bls_loop import DraftFailed, Drafts, Part

PROMPT = tuple(CODEC.encode("ab"))
END = 257
TEXT = [97 + place % 3 for place in range(200)]


class Scripted:
    """Engines that return a fixed text. hides_end: the target does not return its end token, as
    some backends do not.
    """

    def __init__(
        self,
        text: Sequence[int],
        drafts: Sequence[int],
        *,
        hides_end: bool = False,
        fails_after: int | None = None,
    ) -> None:
        self.text, self.drafts, self.hides_end = list(text), list(drafts), hides_end
        self.draft_calls, self.plain_calls, self.closed = 0, 0, 0
        self.fails_after = fails_after

    def _new(self, ids: Sequence[int], count: int) -> list[int]:
        start = len(ids) - len(PROMPT)
        new = self.text[start : start + count]
        if END in new:
            new = new[: new.index(END) + (0 if self.hides_end else 1)]
        return new

    def draft(self, ids: Sequence[int], count: int) -> Drafts:
        self.draft_calls += 1
        if self.fails_after is not None and self.draft_calls > self.fails_after:
            raise DraftFailed("it is dead")
        start = len(ids) - len(PROMPT)
        return Drafts(tuple(self.drafts[start : start + count]))

    def verify(self, ids: Sequence[int], drafts: Drafts) -> Part:
        new = self._new(ids, len(drafts.ids) + 1)
        accepted = 0
        while accepted < min(len(new), len(drafts.ids)) and new[accepted] == drafts.ids[accepted]:
            accepted += 1
        new = new[: accepted + 1]
        return Part(tuple(new), tuple(-0.5 for _ in new))

    def plain(self, ids: Sequence[int], count: int) -> Generator[Part, None, None]:
        self.plain_calls += 1
        try:
            new = self._new(ids, count)
            for start in range(0, len(new), 2):
                yield Part(
                    tuple(new[start : start + 2]), tuple(-0.5 for _ in new[start : start + 2])
                )
        finally:
            self.closed += 1
