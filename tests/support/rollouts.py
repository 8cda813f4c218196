"""Simulated roll-outs: sessions of one request each, in random order, with times that rise and fall
in the course of the day.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass

from toolkit.config.schema import RolloutConfig
from toolkit.gateway.rollout import BASELINE, CANDIDATE, RolloutState, decision

MAX_SESSIONS = 200_000
BEGAN_S = 1_795_000_000.0  # seconds since 1970
SESSION_S = 0.5  # from one session to the next


@dataclass(frozen=True)
class Candidate:
    """How it differs from the baseline. slower: factor of its times. tail: share of its requests
    that take five times as long. acceptance: factor. errors, differing: shares.
    """

    slower: float = 1.0
    tail: float = 0.0
    acceptance: float = 1.0
    errors: float = 0.001
    differing: float = 0.005


def played(
    candidate: Candidate,
    settings: RolloutConfig,
    seed: int,
    *,
    swing: float = 0.5,
    load: float = 0.0,
) -> Iterator[RolloutState]:
    """The state after each session, until the roll-out has ended. It is one object. swing: by which
    share times rise and fall. load: which share of an arm's times comes from the sessions that it
    has; an arm without any takes 1 - load of the time.
    """
    generator, state = random.Random(seed), RolloutState(settings)
    for number in range(MAX_SESSIONS):
        share = state.share
        is_candidate = generator.random() < share
        day = 1 + swing * math.sin(number / 3000)
        slower, errors = 1.0, 0.001
        accepted = generator.betavariate(6, 3)
        if is_candidate:
            slower, errors = candidate.slower, candidate.errors
            slower *= 5.0 if generator.random() < candidate.tail else 1.0
            accepted *= candidate.acceptance
        slower *= 1 - load + load * (share if is_candidate else 1 - share)
        is_error = generator.random() < errors
        ttft = day * slower * generator.lognormvariate(4.0, 0.5)
        token = day * slower * generator.lognormvariate(2.0, 0.3)
        figures = (None, None, None) if is_error else (ttft, token, accepted)
        named = dict(zip(("ttft_ms", "token_ms", "acceptance"), figures, strict=True))
        arm = CANDIDATE if is_candidate else BASELINE
        session = {"kind": "session", "session": number, "arm": arm, "share": share}
        state.add({**session, "error": is_error, **named})
        if not is_candidate and generator.random() < settings.shadow / 100:
            differs = generator.random() < candidate.differing
            copy_fails = generator.random() < candidate.errors
            if copy_fails != is_error:
                failed = CANDIDATE if copy_fails else BASELINE
                state.add({"kind": "copy", "prompt": number, "failed": failed})
            elif not is_error:
                state.add({"kind": "texts", "prompt": number, "equal": not differs})
        if (decided := state.next_decision()) is not None:
            state.add(decision(state, *decided, BEGAN_S + SESSION_S * number))
        yield state
        if state.outcome != "running":
            return
