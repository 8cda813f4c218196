"""What a round over two engines takes that can only be called. `bls_loop` chooses draft lengths by
it.

A call cannot be timed before there are requests, so the first rounds try every length. The
instances of a server share the figures, so that each length is tried once and not by each of them.
Only what a request takes that is alone is noted, since under load a round holds what waits in the
engines' queues (`load_gate` decides then). As in `costs`, every figure follows the median of its
times, and all of them share a scale that follows quickly. While drafts are in use, plain decoding
is not timed; so it is tried again now and then. Only of Python's standard library.
"""

from __future__ import annotations

from statistics import median

__all__ = ["CallCosts"]

SAMPLES = 3  # of each length, before its figure is used
SCALE_STEP, FIGURE_STEP = 0.05, 0.01
RETRY_ROUNDS = 512  # with drafts, after which plain decoding is tried again
NUMBER_BYTES = 8
# The numbers of a length: how many samples it has, the samples, and the figure. Before them come
# those of all lengths: their scale, where 0 stands for 1, and the rounds since plain decoding was
# tried.
NUMBERS = 2 + SAMPLES
SCALE, ROUNDS, FIRST = range(3)


class CallCosts:
    """Of one request at a time: `rows` is always 1. Length 0 is plain decoding, per token.

    probe_len: the length of the block that probes.
    """

    def __init__(self, max_draft_len: int, memory: bytearray | memoryview | None = None) -> None:
        """memory: `size` bytes that the instances share, zeros at first; None: there are no others.
        They write without a lock: what is lost by that is one time among many.
        """
        memory = bytearray(self.size(max_draft_len)) if memory is None else memory
        self._numbers = memoryview(memory).cast("d")
        self._lengths = range(max_draft_len + 1)
        self.probe_len = min(3, max_draft_len)

    @staticmethod
    def size(max_draft_len: int) -> int:
        """Of the memory, in bytes."""
        return NUMBER_BYTES * (FIRST + NUMBERS * (max_draft_len + 1))

    def untried(self) -> int | None:
        """A length that has to be tried before lengths can be chosen; None: all have been."""
        for draft_len in reversed(self._lengths):
            if self._numbers[self._at(draft_len)] < SAMPLES:
                return draft_len
        return None

    def note(self, draft_len: int, ns: int) -> None:
        """A round with so many drafts took so long, or a token of plain decoding."""
        numbers, at = self._numbers, self._at(draft_len)
        count, at_figure, scale = int(numbers[at]), at + 1 + SAMPLES, self._scale()
        if count < SAMPLES:
            numbers[at + 1 + count] = ns / scale
            numbers[at_figure] = median(numbers[at + 1 : at + 2 + count])
            numbers[at] = count + 1
            return
        is_slower = ns > scale * numbers[at_figure]
        numbers[at_figure] *= 1 + FIGURE_STEP if is_slower else 1 / (1 + FIGURE_STEP)
        numbers[SCALE] = scale * (1 + SCALE_STEP if is_slower else 1 / (1 + SCALE_STEP))
        numbers[ROUNDS] += draft_len > 0
        if numbers[ROUNDS] >= RETRY_ROUNDS:
            self._retry_plain()

    def _retry_plain(self) -> None:
        """Let a new time replace the oldest one."""
        numbers, at = self._numbers, self._at(0)
        numbers[ROUNDS] = 0
        if numbers[at] == SAMPLES:
            numbers[at] = SAMPLES - 1
            for sample in range(at + 1, at + SAMPLES):
                numbers[sample] = numbers[sample + 1]

    def draft_ns(self, rows: int, depth: int) -> float:
        """0: the draft's call is a part of the round, whose time depends on its length."""
        return 0.0

    def step_ns(self, rows: int, width: float) -> float:
        return self._scale() * self._numbers[self._at(int(width) - 1) + 1 + SAMPLES]

    def probe_ns(self, rows: int) -> float:
        """A block that is rejected, above the token of plain decoding that it gives."""
        return max(0.0, self.step_ns(1, self.probe_len + 1) - self.step_ns(1, 1))

    def read_ns(self, tokens: float) -> float:
        """0: the draft reads in its calls."""
        return 0.0

    def _scale(self) -> float:
        return self._numbers[SCALE] or 1.0

    def _at(self, draft_len: int) -> int:
        """The place of a length's numbers."""
        return FIRST + NUMBERS * draft_len
