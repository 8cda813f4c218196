"""What a round over two engines takes that can only be called. `bls_loop` chooses draft lengths by
it.

A call cannot be timed before there are requests, so the first rounds try every length. A round's
time holds what waits in the engines' queues, too: at a high load the lengths are those that pay
there. As in `costs`, every figure follows the median of its times, and all of them share a scale
that follows quickly. Only of Python's standard library.
"""

from __future__ import annotations

from statistics import median

__all__ = ["CallCosts"]

SAMPLES = 3  # of each length, before its figure is used
SCALE_STEP, FIGURE_STEP = 0.05, 0.01


class CallCosts:
    """Of one request at a time: `rows` is always 1. Length 0 is plain decoding, per token.

    probe_len: the length of the block that probes.
    """

    def __init__(self, max_draft_len: int) -> None:
        self.probe_len = min(3, max_draft_len)
        self._samples: list[list[int]] = [[] for _ in range(max_draft_len + 1)]
        self._figures = [0.0] * (max_draft_len + 1)
        self._scale = 1.0

    def untried(self) -> int | None:
        """A length that has to be tried before lengths can be chosen; None: all have been."""
        for draft_len in reversed(range(len(self._samples))):
            if len(self._samples[draft_len]) < SAMPLES:
                return draft_len
        return None

    def note(self, draft_len: int, ns: int) -> None:
        """A round with so many drafts took so long, or a token of plain decoding."""
        samples = self._samples[draft_len]
        if len(samples) < SAMPLES:
            samples.append(ns)
            self._figures[draft_len] = median(samples) / self._scale
            return
        is_slower = ns > self._scale * self._figures[draft_len]
        self._figures[draft_len] *= 1 + FIGURE_STEP if is_slower else 1 / (1 + FIGURE_STEP)
        self._scale *= 1 + SCALE_STEP if is_slower else 1 / (1 + SCALE_STEP)

    def draft_ns(self, rows: int, depth: int) -> float:
        """0: the draft's call is a part of the round, whose time depends on its length."""
        return 0.0

    def step_ns(self, rows: int, width: float) -> float:
        return self._scale * self._figures[int(width) - 1]

    def probe_ns(self, rows: int) -> float:
        """A block that is rejected, above the token of plain decoding that it gives."""
        return max(0.0, self.step_ns(1, self.probe_len + 1) - self.step_ns(1, 1))
