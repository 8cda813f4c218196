"""Does a roll-out leave an equal candidate alone, and how soon does it find a worse one?

    python -m tests.benchmarks rollout [--rollouts 200]

Simulated roll-outs with the default steps and limits: sessions of one request each, in random
order, with times that rise and fall in the course of the day. Equal candidates stand at the very
limit of what is allowed (1.1 times as slow, 0.9 times the acceptance, 5 % of the texts differ), so
that every test is at its null hypothesis. Good: at most `false_alarm` (1 %) of these are rolled
back, and all planted faults are. Nothing is timed.
"""

from __future__ import annotations

import argparse
import json
import math
import random
from dataclasses import dataclass

from scipy.stats import binom

from toolkit.config.schema import RolloutConfig
from toolkit.gateway.rollout import BASELINE, CANDIDATE, RolloutState

MAX_SESSIONS = 200_000


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


CANDIDATES = {
    "equal": Candidate(),
    "at the limits": Candidate(slower=1.1, acceptance=0.9, differing=0.05),
    "1.5 times as slow": Candidate(slower=1.5),
    "20 % of requests 5 times as slow": Candidate(tail=0.2),
    "acceptance halved": Candidate(acceptance=0.5),
    "10 % errors": Candidate(errors=0.1),
    "all requests fail": Candidate(errors=1.0),
    "30 % of texts wrong": Candidate(differing=0.3),
}


@dataclass(frozen=True)
class Ended:
    """test: that rolled back; None: promoted. sessions: of both arms. seen: of the candidate."""

    test: str | None
    sessions: int
    seen: int


def roll_out(candidate: Candidate, settings: RolloutConfig, seed: int) -> Ended:
    generator, state = random.Random(seed), RolloutState(settings)
    for number in range(MAX_SESSIONS):
        share = state.share
        is_candidate = generator.random() < share
        day = 1 + 0.5 * math.sin(number / 3000)
        slower, errors = 1.0, 0.001
        accepted = generator.betavariate(6, 3)
        if is_candidate:
            slower, errors = candidate.slower, candidate.errors
            slower *= 5.0 if generator.random() < candidate.tail else 1.0
            accepted *= candidate.acceptance
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
        decided = state.next_decision()
        if decided is not None:
            outcome, step, why = decided
            state.add({"kind": "decision", "outcome": outcome, "step": step, "why": why})
            if outcome == "promoted":
                return Ended(None, number + 1, state.evidence.candidate)
            if outcome == "rolled back":
                test = state.evidence.findings()[0].test
                return Ended(test, number + 1, state.evidence.candidate)
    raise AssertionError("the roll-out has not ended")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rollouts", type=int, default=200)
    count = parser.parse_args().rollouts
    settings = RolloutConfig()
    rows = []
    print(f"{'':<34}   rolled back  sessions p50      p95  candidate's p50     p95")
    for name, candidate in CANDIDATES.items():
        ended = [roll_out(candidate, settings, seed) for seed in range(count)]
        back = [end for end in ended if end.test is not None]
        row = {"candidate": name, "rolled_back": len(back), "of": count}
        for key in ("sessions", "seen"):
            values = sorted(getattr(end, key) for end in back)
            for q in (50, 95):
                index = min(len(values) - 1, len(values) * q // 100)
                row[f"{key}_p{q}"] = values[index] if values else None
        rows.append(row)
        shown = [row[key] for key in ("sessions_p50", "sessions_p95", "seen_p50", "seen_p95")]
        cells = ["-" if value is None else f"{value:,}" for value in shown]
        line = f"{name:<34}{f'{len(back)} of {count}':>14}{cells[0]:>14}{cells[1]:>9}"
        print(line + f"{cells[2]:>17}{cells[3]:>8}", flush=True)
    allowed = binom.ppf(0.99, count, settings.false_alarm)
    print(f"at a rate of {settings.false_alarm:g}, up to {allowed:.0f} of {count} are chance")
    print(json.dumps({"benchmark": "rollout", "rows": rows}))


if __name__ == "__main__":
    main()
