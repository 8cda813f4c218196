"""What the engines of a small pair take, as figures that tests can change."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

LONGEST = 5
# Milliseconds on two CPU cores, quickstart pair: forwards of 1 to 6 tokens, by rows.
VERIFY = {
    1: (0.387, 0.424, 0.503, 0.565, 0.655, 0.693),
    4: (1.091, 1.339, 1.585, 1.984, 2.214, 2.524),
    16: (3.5, 4.8, 5.8, 7.0, 8.3, 9.7),
}
DRAFT, PROBE, HOST = 0.055, 0.17, 0.06


def between(figures: tuple[float, ...], width: float) -> float:
    """Of a step whose rows have so many tokens in the mean. figures: from one token on."""
    return float(np.interp(width, range(1, len(figures) + 1), figures))


@dataclass
class Costs:
    """verify: per width, of one row; every further row costs `per_row` of it."""

    verify: tuple[float, ...] = VERIFY[1]
    draft: float = DRAFT
    per_row: float = 1.0
    probe: float = PROBE
    reading: float = 0.01

    def draft_ns(self, rows: int, depth: int) -> float:
        return 1e6 * self.draft * (1 + 0.2 * (rows - 1)) if rows else 0.0

    def step_ns(self, rows: int, width: float) -> float:
        return 1e6 * (HOST + between(self.verify, width) * (1 + self.per_row * (rows - 1)))

    def probe_ns(self, rows: int) -> float:
        return 1e6 * self.probe * rows

    def read_ns(self, tokens: float) -> float:
        return 1e6 * self.reading * tokens
