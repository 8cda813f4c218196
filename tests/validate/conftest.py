"""Verdicts by tests of distributions, repeated exactly: by its nature, a sound runtime fails one
such verdict in a thousand, and these tests make dozens.
"""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest

from toolkit.speculative import acceptance


@pytest.fixture(autouse=True)
def same_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests without a seed are seeded by a generator that begins anew with every test."""
    draws = random.Random(0)

    def seeded(seed: int | str | None = None) -> random.Random:
        return random.Random(draws.getrandbits(64) if seed is None else seed)

    generators = SimpleNamespace(Random=seeded, SystemRandom=lambda: draws)
    monkeypatch.setattr(acceptance, "random", generators)
