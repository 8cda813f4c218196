"""A roll-out: which arm answers a session, and when the next step is taken, or all go back.

The share of the sessions that the candidate answers rises step by step, as long as no test of
`evidence` finds it worse; then everything goes back to the baseline at once. No step is taken
before every test that can judge has judged `min_requests` of the candidate's requests; what cannot
judge is named in the decision (`RolloutState.missing`). Nor is one taken while a test is suspicious
(`RolloutState.suspected`). A session stays with its arm while the share stays, and comes back to no
other arm while it rises: its place on the line from 0 to 1 is a digest of its name.

Everything that happens is a line of the journal, and the state is what follows from these lines.
Each decision is written with its evidence. If the journal cannot be written, the baseline answers
all, until it can.
"""

from __future__ import annotations

import hashlib
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from toolkit.config.schema import RolloutConfig
from toolkit.errors import UsageError
from toolkit.gateway.arms import Arm, Choice, Finished
from toolkit.gateway.evidence import LEAST_FIGURES, Copy, Evidence, Observation, Texts
from toolkit.gateway.journal import Journal, read_journal
from toolkit.gateway.lines import VERSION, Outcome, fault_of

__all__ = ["BASELINE", "CANDIDATE", "Rollout", "RolloutState", "decision", "read_state"]

BASELINE, CANDIDATE = "baseline", "candidate"
MAX_TICKETS = 100_000  # requests whose end is awaited; the oldest are forgotten
MAX_TEXTS = 1000  # answers that wait for the other arm's
# times min_requests answered sessions at one step; then it waits for no test any longer
PATIENCE = 20
# Evidence at which the next step waits, until there is more of it or less. An equal candidate ever
# has so much in a test with probability 1 / SUSPICIOUS at most.
SUSPICIOUS = 10.0
# test -> the figure in `ArmFigures` that both arms need for it
NEEDED_FIGURES = {"ttft": "ttft_ms", "time per token": "token_ms", "acceptance": "acceptance"}
LATEST = 500  # sessions of each arm, whose times and acceptance people are shown


@dataclass
class ArmFigures:
    """What people are shown of an arm; no decision rests on it. times in ms."""

    requests: int = 0
    errors: int = 0
    ttft_ms: list[float] = field(default_factory=list)
    token_ms: list[float] = field(default_factory=list)
    acceptance: list[float] = field(default_factory=list)
    alpha: list[float] = field(default_factory=list)

    def add(self, seen: Observation) -> None:
        self.requests += 1
        self.errors += seen.is_error
        for kept, value in (
            (self.ttft_ms, seen.ttft_ms),
            (self.token_ms, seen.token_ms),
            (self.acceptance, seen.acceptance if seen.drafted else None),
            (self.alpha, seen.alpha if seen.drafted else None),
        ):
            if value is not None:
                kept.append(value)
                del kept[:-LATEST]

    def summary(self) -> dict[str, Any]:
        shown: dict[str, Any] = {"sessions": self.requests, "errors": self.errors}
        for name, values in (("ttft_ms", self.ttft_ms), ("token_ms", self.token_ms)):
            for q in (50, 99):
                shown[f"{name}_p{q}"] = _percentile(values, q)
        for name, values in (
            ("acceptance_rate", self.acceptance),
            ("acceptance_alpha", self.alpha),
        ):
            shown[name] = sum(values) / len(values) if values else None
        return shown


class RolloutState:
    """What follows from a journal's lines."""

    def __init__(self, settings: RolloutConfig) -> None:
        self.settings = settings
        self.evidence = Evidence(settings)
        self.outcome: Outcome = "running"
        self.step = 0  # index of settings.steps
        self.in_step = 0  # answered sessions of the candidate, or copies at step 0
        self.why = ""
        self.decisions: list[dict[str, Any]] = []
        self.sessions: set[int] = set()
        self.prompts: set[int] = set()
        self.arms = {BASELINE: ArmFigures(), CANDIDATE: ArmFigures()}
        self.differing = self.failed_copies = 0

    @property
    def share(self) -> float:
        """The probability that the candidate answers a session."""
        if self.outcome == "running":
            return self.settings.steps[self.step] / 100
        return 1.0 if self.outcome == "promoted" else 0.0

    def add(self, entry: Mapping[str, Any]) -> None:
        """Follow one line of the journal."""
        kind = entry["kind"]
        if kind == "session":
            self.sessions.add(entry["session"])
            # An arm that has drafted before drafts, unless it has reasons not to. It has an alpha
            # if it has told one.
            arm = self.arms[entry["arm"]]
            is_undrafted = entry.get("undrafted", False) and bool(arm.acceptance)
            alpha = 0.0 if is_undrafted and arm.alpha else entry.get("alpha")
            seen = Observation(
                entry["arm"] == CANDIDATE,
                entry["share"],
                entry["error"],
                entry["ttft_ms"],
                entry["token_ms"],
                0.0 if is_undrafted else entry["acceptance"],
                drafted=not is_undrafted,
                alpha=alpha,
            )
            self.evidence.add(seen)
            arm.add(seen)
            # Where both arms fail, no test finds the candidate worse: errors lead no step further.
            self.in_step += seen.is_candidate and not seen.is_error
        elif kind == "texts":
            self.prompts.add(entry["prompt"])
            self.evidence.add_texts(Texts(entry["equal"]))
            self.differing += not entry["equal"]
            self.in_step += self.share == 0.0
        elif kind == "copy":
            self.prompts.add(entry["prompt"])
            self.evidence.add_copy(Copy(entry["failed"] == CANDIDATE))
            self.failed_copies += entry["failed"] == CANDIDATE
        elif kind == "decision":
            self.outcome, self.step, self.why = entry["outcome"], entry["step"], entry["why"]
            self.in_step = 0
            self.decisions.append(dict(entry))

    def summary(self) -> dict[str, Any]:
        """What people are shown, as JSON. Times in ms."""
        return {
            "outcome": self.outcome,
            "why": self.why,
            "share_percent": 100 * self.share,
            "steps_percent": list(self.settings.steps),
            "in_step": self.in_step,
            "needed_in_step": self.settings.min_requests,
            "false_alarm": self.settings.false_alarm,
            "arms": {name: arm.summary() for name, arm in self.arms.items()},
            "latest": LATEST,
            "texts": {
                "compared": self.evidence.compared_texts,
                "differing": self.differing,
                "failed_copies": self.failed_copies,
            },
            "missing": self.missing() if self.outcome == "running" else {},
            "suspected": self.suspected() if self.outcome == "running" else None,
            "evidence": [asdict(finding) for finding in self.evidence.findings()],
            "decisions": self.decisions,
        }

    def next_decision(self) -> tuple[Outcome, int, str] | None:
        """(outcome, step, why) if something has to be decided now."""
        if self.outcome != "running":
            return None
        worst = self.evidence.findings()[0]
        if worst.is_worse:
            return "rolled back", self.step, f"the candidate is worse: {worst.test}"
        if self.share == 1.0:
            return "promoted", self.step, "the first step is 100 %"
        if self.in_step < self.settings.min_requests:
            return None
        missing = self.missing()
        if "awaited" in missing.values() or self.suspected() is not None:
            return None
        what = "copies" if self.share == 0.0 else "sessions"
        why = f"{self.in_step} {what} of the candidate, and no test finds it worse"
        if missing:
            why += f"; not judged: {', '.join(missing)}"
        step = self.step + 1
        return ("promoted" if self.settings.steps[step] == 100 else "running"), step, why

    def suspected(self) -> str | None:
        """The test for which the next step waits, since it may find the candidate worse soon."""
        worst = self.evidence.findings()[0]
        return worst.test if worst.wealth >= SUSPICIOUS and not self._has_waited else None

    @property
    def _has_waited(self) -> bool:
        """Whether the step waits for no test any longer."""
        return self.in_step >= PATIENCE * self.settings.min_requests

    def missing(self) -> dict[str, Literal["awaited", "cannot judge", "too few"]]:
        """The tests that have judged fewer than min_requests of the candidate's since the roll-out
        began, and whether the step waits for them.

        cannot judge: an arm has answered enough and shown no figure for it. too few: the candidate
        has answered PATIENCE times min_requests sessions at this step. At step 0 only copies count,
        and there are as many texts as the step needs.
        """
        if self.share == 0.0:
            return {}
        few = self.settings.min_requests
        found: dict[str, Literal["awaited", "cannot judge", "too few"]] = {}
        for finding in self.evidence.findings():
            if finding.requests < few:
                if not self._can_judge(finding.test, finding.requests):
                    found[finding.test] = "cannot judge"
                else:
                    found[finding.test] = "too few" if self._has_waited else "awaited"
        return found

    def _can_judge(self, test: str, judged: int) -> bool:
        enough = max(self.settings.min_requests, LEAST_FIGURES)
        answered = {name: arm.requests - arm.errors for name, arm in self.arms.items()}
        if test in ("copies", "texts"):  # nothing is greedy, or the copies are always dropped
            return judged > 0 or answered[BASELINE] * self.settings.shadow < 100 * enough
        if test == "least acceptance":
            return judged > 0 or answered[CANDIDATE] < enough
        figure = NEEDED_FIGURES.get(test)
        return figure is None or all(
            getattr(arm, figure) or answered[name] < enough for name, arm in self.arms.items()
        )


def decision(
    state: RolloutState, outcome: Outcome, step: int, why: str, time_s: float | None = None
) -> dict[str, Any]:
    """The journal's line of a decision, with the evidence that it rests on."""
    return {
        "kind": "decision",
        "time": time.time() if time_s is None else time_s,
        "outcome": outcome,
        "step": step,
        "why": why,
        "evidence": [asdict(finding) for finding in state.evidence.findings()],
        "sessions": {name: arm.requests for name, arm in state.arms.items()},
    }


def read_state(file: Path) -> tuple[dict[str, Any], RolloutState] | None:
    """(its first line, the state) of a journal; None if there is none. Raises UsageError."""
    state: RolloutState | None = None
    begin: dict[str, Any] = {}
    for number, entry in enumerate(read_journal(file), 1):
        steps = 0 if state is None else len(state.settings.steps)
        fault = fault_of(entry, is_first=state is None, steps=steps)
        if fault is not None:
            raise UsageError(
                f"the line cannot be followed ({fault})",
                where=f"{file}:{number}",
                hint="toolkit rollout run --fresh puts the file aside, and begins anew.",
            )
        if state is None:
            begin = {"version": VERSION, **entry}
            state = RolloutState(RolloutConfig(**entry["settings"]))
        else:
            state.add(entry)
    return None if state is None else (begin, state)


@dataclass(frozen=True, slots=True)
class _Ticket:
    """What was decided when a request came. session: its digest. prompt: of a request that both
    arms answer, the digest of what was asked.
    """

    session: int
    share: float
    prompt: int | None = None


class Rollout:
    """Chooses arms (`toolkit.gateway.arms.Arms`), judges and decides. Raises UsageError if another
    process runs it, or if the journal is of another roll-out.

    ids: what tells one roll-out from another, such as addresses and digests of both arms. now:
    seconds since 1970. lot: a number in [0, 1).
    """

    def __init__(
        self,
        baseline: Arm,
        candidate: Arm,
        settings: RolloutConfig,
        file: Path,
        *,
        ids: Mapping[str, str],
        now: Callable[[], float] = time.time,
        lot: Callable[[], float] = random.random,
    ) -> None:
        self._baseline, self._candidate = baseline, candidate
        self._file, self._now, self._lot = file, now, lot
        self._tickets: dict[str, _Ticket] = {}
        self._halves: dict[str, Finished] = {}
        self.paused: str | None = None  # why the journal cannot be written
        self._journal = Journal(file)
        begin = {
            "kind": "begin",
            "version": VERSION,
            "ids": dict(ids),
            "settings": settings.model_dump(mode="json"),
        }
        try:
            found = read_state(file)
            if found is None:
                self._state = RolloutState(settings)
                self._journal.add({**begin, "time": now()}, lasting=True)
                return
            older, self._state = found
            if changes := _changes(older, begin):
                raise UsageError(
                    f"is the journal of another roll-out ({'; '.join(changes)})",
                    where=file,
                    hint="Go on with those, or begin anew with --fresh.",
                )
        except BaseException:
            self._journal.close()
            raise

    @property
    def all(self) -> tuple[Arm, ...]:
        return self._baseline, self._candidate

    @property
    def open(self) -> tuple[Arm, ...]:
        """The arms that may answer a client now."""
        share = 0.0 if self.paused else self._state.share
        shares = ((self._baseline, 1 - share), (self._candidate, share))
        return tuple(arm for arm, of_arm in shares if of_arm > 0)

    @property
    def needed(self) -> tuple[Arm, ...]:
        """The arms without which clients are not served."""
        return (self._candidate if self._state.outcome == "promoted" else self._baseline,)

    @property
    def state(self) -> RolloutState:
        return self._state

    def close(self) -> None:
        self._journal.close()

    def choose(self, session: str, ticket: str, prompt: str | None) -> Choice:
        share = 0.0 if self.paused else self._state.share
        digest = _digest(session)
        arm = self._candidate if digest / 2**64 < share else self._baseline
        compared = None
        if arm is self._baseline and prompt is not None and self._is_copied():
            compared = _digest(prompt)
            if compared in self._state.prompts:
                compared = None
        self._tickets[ticket] = _Ticket(digest, share, compared)
        if len(self._tickets) > MAX_TICKETS:
            self._tickets.pop(next(iter(self._tickets)))
        return Choice(arm, None if compared is None else self._candidate)

    def _is_copied(self) -> bool:
        is_running = self._state.outcome == "running" and self.paused is None
        return is_running and self._lot() < self._state.settings.shadow / 100

    def finished(self, request: Finished) -> None:
        """Take note of an answer, and decide."""
        ticket = self._tickets.get(request.ticket)
        if ticket is None or self._state.outcome != "running":
            self._tickets.pop(request.ticket, None)
            return
        if ticket.prompt is None or not request.is_shadow:
            self._note_session(ticket, request)
        if ticket.prompt is not None:
            self._note_copy(ticket.prompt, request)
        else:
            self._tickets.pop(request.ticket, None)
        self._decide()

    def summary(self) -> dict[str, Any]:
        """What people are shown, as JSON."""
        return {**self._state.summary(), "paused": self.paused}

    def roll_back(self, why: str) -> None:
        """What an operator may do at any time, too."""
        if self._state.outcome != "rolled back":
            self._write_decision("rolled back", self._state.step, why)

    def _note_session(self, ticket: _Ticket, request: Finished) -> None:
        if request.status is None or ticket.session in self._state.sessions:
            return  # a client that left says nothing about the server
        statistics = request.statistics
        tokens = statistics.output_tokens or 0
        self._write(
            {
                "kind": "session",
                "session": ticket.session,
                "arm": request.arm,
                "share": ticket.share,
                # A request that is itself at fault is refused by both arms alike.
                "error": request.status != 200,
                "ttft_ms": None if request.ttft_ns is None else request.ttft_ns / 1e6,
                "token_ms": None if not tokens else request.e2e_ns / 1e6 / tokens,
                "acceptance": statistics.acceptance_rate,
                "alpha": statistics.acceptance_alpha,
                "undrafted": statistics.drafted == 0,
            }
        )

    def _note_copy(self, prompt: int, request: Finished) -> None:
        """Compare the two answers when both are there. A failed copy is an error, and no text."""
        other = self._halves.pop(request.ticket, None)
        if other is None:
            self._halves[request.ticket] = request
            if len(self._halves) > MAX_TEXTS:  # of copies that a busy gateway has not sent
                self._halves.pop(next(iter(self._halves)))
            return
        self._tickets.pop(request.ticket, None)
        failed = [half.arm for half in (request, other) if half.status != 200]
        has_left = request.status is None or other.status is None
        if has_left or len(failed) == 2 or prompt in self._state.prompts:
            return
        if failed:
            self._write({"kind": "copy", "prompt": prompt, "failed": failed[0]})
        else:
            are_equal = (request.text or "") == (other.text or "")
            self._write({"kind": "texts", "prompt": prompt, "equal": are_equal})

    def _decide(self) -> None:
        decision = self._state.next_decision()
        if decision is not None:
            self._write_decision(*decision)

    def _write_decision(self, outcome: Outcome, step: int, why: str) -> None:
        self._write(decision(self._state, outcome, step, why, self._now()), lasting=True)

    def _write(self, entry: Mapping[str, Any], *, lasting: bool = False) -> None:
        try:
            self._journal.add(entry, lasting=lasting)
        except OSError as error:
            self.paused = f"the journal cannot be written ({error.strerror or error})"
            return
        self.paused = None
        self._state.add(entry)


def _changes(older: Mapping[str, Any], begin: Mapping[str, Any]) -> list[str]:
    """What of a first line differs: each name with the journal's value and the one of now."""
    found = []
    for part, prefix in (("ids", ""), ("settings", "rollout.")):
        before, now = older[part], begin[part]
        for key in sorted({*before, *now}):
            if before.get(key) != now.get(key):
                found.append(f"{prefix}{key}: {before.get(key)}, now {now.get(key)}")
    return found


def _digest(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


def _percentile(values: list[float], q: int) -> float | None:
    """The smallest value that at least q percent of the values do not exceed."""
    if not values:
        return None
    return sorted(values)[max(0, -(-len(values) * q // 100) - 1)]
