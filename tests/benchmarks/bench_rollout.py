"""Does a roll-out leave an equal candidate alone, and how soon does it find a worse one?

    python -m tests.benchmarks rollout [--rollouts 200]

Simulated roll-outs with the default steps and limits: sessions of one request each, in random
order, with times that rise and fall in the course of the day. Equal candidates stand at the very
limit of what is allowed (1.1 times as slow, 0.9 times the acceptance, 5 % of the texts differ), so
that every test is at its null hypothesis. Two more have times of which six tenths come from the
sessions that an arm has, so that a candidate with a small share looks fast. Good: at most
`false_alarm` (1 %) of the equal ones are rolled back, and all planted faults are. Nothing is timed.
"""

from __future__ import annotations

import argparse
import json
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial

from scipy.stats import binom

from tests.support.rollouts import Candidate, played
from toolkit.config.schema import RolloutConfig

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
UNDER_LOAD = {
    "equal, times by load": Candidate(),
    "1.5 times as slow, times by load": Candidate(slower=1.5),
}
LOAD = 0.6


@dataclass(frozen=True)
class Ended:
    """test: that rolled back; None: promoted. sessions: of both arms. seen: of the candidate."""

    test: str | None
    sessions: int
    seen: int


def roll_out(candidate: Candidate, settings: RolloutConfig, seed: int, *, load: float) -> Ended:
    for number, state in enumerate(played(candidate, settings, seed, load=load), 1):
        if state.outcome == "promoted":
            return Ended(None, number, state.evidence.candidate)
        if state.outcome == "rolled back":
            return Ended(state.evidence.findings()[0].test, number, state.evidence.candidate)
    raise AssertionError("the roll-out has not ended")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rollouts", type=int, default=200)
    count = parser.parse_args().rollouts
    settings = RolloutConfig()
    rows = []
    print(f"{'':<34}   rolled back  sessions p50      p95  candidate's p50     p95")
    for name, candidate in (CANDIDATES | UNDER_LOAD).items():
        load = LOAD if name in UNDER_LOAD else 0.0
        play = partial(roll_out, candidate, settings, load=load)
        with ProcessPoolExecutor() as pool:
            ended = list(pool.map(play, range(count)))
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
