"""A roll-out: who answers, when the next step is taken, what survives."""

from __future__ import annotations

import dataclasses
import json
import random
import subprocess
import sys
import threading
import time
import urllib.error
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.gateways import STATISTICS, ScriptedBackend, gateway, post
from toolkit.client import Options, ServerUnavailable, Statistics
from toolkit.config.schema import RolloutConfig
from toolkit.errors import UsageError
from toolkit.gateway.arms import Arm, Finished
from toolkit.gateway.journal import Journal, read_journal
from toolkit.gateway.rollout import BASELINE, CANDIDATE, Rollout, RolloutState, read_state
from toolkit.workflows.rollout import order_rollback, set_aside, status_of, take_orders

MS = 1_000_000


@contextmanager
def rolled(
    file: Path,
    *,
    baseline: ScriptedBackend | None = None,
    candidate: ScriptedBackend | None = None,
    seed: int = 0,
    **settings: Any,
) -> Iterator[Rollout]:
    made = Rollout(
        Arm(BASELINE, baseline or ScriptedBackend()),
        Arm(CANDIDATE, candidate or ScriptedBackend()),
        RolloutConfig(**settings),
        file,
        ids={"deployment": "tiny"},
        now=lambda: 1.0,
        lot=random.Random(seed).random,
    )
    try:
        yield made
    finally:
        made.close()


Times = Callable[[str, random.Random], Finished | None]


def answered(
    arm: str,
    ticket: str,
    generator: random.Random,
    *,
    slower: float = 1.0,
    error: bool = False,
    acceptance: float = 0.7,
    text: str | None = None,
    is_shadow: bool = False,
) -> Finished:
    ttft_ns = int(slower * generator.lognormvariate(3, 0.4) * MS)
    drafted = 60
    accepted = sum(generator.random() < acceptance for _ in range(drafted))
    statistics = Statistics(output_tokens=30, drafted=drafted, accepted=accepted)
    return Finished(
        ticket,
        "id",
        arm,
        503 if error else 200,
        None if error else ttft_ns,
        3 * ttft_ns,
        (),
        statistics,
        text,
        is_shadow,
    )


def drive(
    rollout: Rollout, count: int, fault: str | None = None, *, seed: int = 1, first: int = 0
) -> int:
    """Send sessions of one request each until the roll-out has ended: how many."""
    generator = random.Random(seed)
    for number in range(first, first + count):
        if rollout.state.outcome != "running":
            return number - first
        ticket = str(number)
        choice = rollout.choose(f"session {number}", ticket, f"prompt {number}")
        is_new = choice.arm.name == CANDIDATE
        rollout.finished(
            answered(
                choice.arm.name,
                ticket,
                generator,
                slower=1.6 if is_new and fault == "slower" else 1.0,
                error=is_new and fault == "errors" and generator.random() < 0.2,
                acceptance=0.2 if is_new and fault == "acceptance" else 0.7,
                text="text" if choice.shadow else None,
            )
        )
        if choice.shadow is not None:
            wrong = fault == "texts" and generator.random() < 0.5
            rollout.finished(
                answered(
                    CANDIDATE,
                    ticket,
                    generator,
                    text="wrong" if wrong else "text",
                    is_shadow=True,
                )
            )
    return count


def test_an_equal_candidate_is_promoted_step_by_step(tmp_path: Path) -> None:
    with rolled(tmp_path / "journal.jsonl", steps=(0, 5, 25, 100), min_requests=50) as rollout:
        drive(rollout, 20_000)
        assert rollout.state.outcome == "promoted"
        assert [decision["outcome"] for decision in rollout.state.decisions] == [
            "running",
            "running",
            "promoted",
        ]
        assert rollout.choose("anybody", "x", "p").arm.name == CANDIDATE
        assert [arm.name for arm in rollout.needed] == [CANDIDATE]
        evidence = rollout.state.decisions[-1]["evidence"]
        assert all(finding["wealth"] < finding["limit"] for finding in evidence)


@pytest.mark.parametrize(
    ("fault", "test", "within"),
    [
        ("slower", ("ttft", "time per token"), 6000),
        ("acceptance", ("acceptance",), 4000),
        ("errors", ("errors",), 6000),
        ("texts", ("texts",), 800),
    ],
)
def test_a_faulty_candidate_is_rolled_back_by_itself(
    tmp_path: Path, fault: str, test: tuple[str, ...], within: int
) -> None:
    with rolled(tmp_path / "journal.jsonl") as rollout:
        assert drive(rollout, within, fault) < within
        state = rollout.state
        assert state.outcome == "rolled back"
        assert any(name in state.why for name in test)
        assert state.decisions[-1]["evidence"][0]["test"] in test
        assert all(
            rollout.choose(f"s{number}", "x", "p").arm.name == BASELINE for number in range(500)
        )
        assert [arm.name for arm in rollout.needed] == [BASELINE]


def test_a_session_stays_with_its_arm_and_only_moves_forward(tmp_path: Path) -> None:
    with rolled(tmp_path / "journal.jsonl", shadow=0, min_requests=20) as rollout:
        names = [f"person {number}" for number in range(300)]
        before = {name: rollout.choose(name, name, None).arm.name for name in names}
        assert before == {name: rollout.choose(name, name, None).arm.name for name in names}
        drive(rollout, 20_000)
        assert rollout.state.step > 0
        after = {name: rollout.choose(name, name, None).arm.name for name in names}
        assert not [n for n in names if before[n] == CANDIDATE and after[n] == BASELINE]


def seen_without(rollout: Rollout, count: int, is_told: Callable[[str, int], bool]) -> int:
    """Sessions whose acceptance is told only of some, until the roll-out has ended: how many."""
    generator = random.Random(4)
    for number in range(count):
        if rollout.state.outcome != "running":
            return number
        choice = rollout.choose(f"s{number}", str(number), None)
        answer = answered(choice.arm.name, str(number), generator)
        if not is_told(choice.arm.name, number):
            answer = dataclasses.replace(answer, statistics=Statistics(output_tokens=30))
        rollout.finished(answer)
    return count


def test_no_step_is_taken_before_all_tests_have_judged(tmp_path: Path) -> None:
    """After a few sessions there is nothing to rank by, and no text has been compared."""
    few = 5
    with rolled(tmp_path / "journal.jsonl", steps=(50, 100), min_requests=few) as rollout:
        drive(rollout, 15)
        state = rollout.state
        assert state.in_step >= few
        assert state.outcome == "running"
        assert set(state.missing().values()) == {"awaited"}
        assert {"ttft", "time per token", "acceptance"} <= set(state.missing())
        drive(rollout, 2000, first=15)
        assert state.outcome == "promoted"
        last = state.decisions[-1]
        assert "not judged" not in last["why"]
        assert all(finding["requests"] >= few for finding in last["evidence"])


@pytest.mark.parametrize("silent", [BASELINE, CANDIDATE])
def test_a_test_without_figures_of_an_arm_is_named_and_not_awaited(
    tmp_path: Path, silent: str
) -> None:
    """As of a plain baseline, which has no acceptance rate."""
    settings = {"steps": (50, 100), "min_requests": 30, "shadow": 0}
    with rolled(tmp_path / "journal.jsonl", **settings) as rollout:
        assert seen_without(rollout, 1000, lambda arm, number: arm != silent) < 150
        assert rollout.state.outcome == "promoted"
        assert rollout.state.why.endswith("; not judged: acceptance")


@pytest.mark.parametrize("idle", [BASELINE, CANDIDATE, None])
def test_an_arm_that_has_given_up_drafting_accepts_nothing(
    tmp_path: Path, idle: str | None
) -> None:
    """As lengths that adapt to a bad draft do: the first sessions have a rate, later ones none."""
    with rolled(tmp_path / "journal.jsonl", steps=(50, 100), shadow=0) as rollout:
        generator = random.Random(4)
        for number in range(600):
            if rollout.state.outcome != "running":
                break
            arm = rollout.choose(f"s{number}", str(number), None).arm.name
            answer = answered(arm, str(number), generator)
            if arm == idle and number > 20:
                nothing = Statistics(output_tokens=30, drafted=0, accepted=0)
                answer = dataclasses.replace(answer, statistics=nothing)
            rollout.finished(answer)
        outcome, why = rollout.state.outcome, rollout.state.why
        if idle == CANDIDATE:
            assert (outcome, why) == ("rolled back", "the candidate is worse: acceptance")
        else:
            assert outcome == "promoted"


def test_a_test_with_few_figures_is_awaited_twenty_times_as_long(tmp_path: Path) -> None:
    settings = {"steps": (50, 100), "min_requests": 10, "shadow": 0}
    with rolled(tmp_path / "journal.jsonl", **settings) as rollout:
        assert seen_without(rollout, 100, lambda arm, number: number % 30 == 0) == 100
        assert rollout.state.missing() == {"acceptance": "awaited"}
    other = tmp_path / "other" / "journal.jsonl"
    with rolled(other, **settings) as rollout:
        seen_without(rollout, 1000, lambda arm, number: number % 30 == 0)
        assert rollout.state.outcome == "promoted"
        assert rollout.state.decisions[-1]["why"].startswith("200 sessions")
        assert rollout.state.why.endswith("; not judged: acceptance")


def test_copies_of_no_greedy_request_are_not_awaited(tmp_path: Path) -> None:
    settings = {"steps": (50, 100), "min_requests": 10, "shadow": 50}
    with rolled(tmp_path / "journal.jsonl", **settings) as rollout:
        assert seen_without(rollout, 1000, lambda arm, number: True) < 200
        assert rollout.state.outcome == "promoted"
        assert set(rollout.state.why.split("not judged: ")[1].split(", ")) == {"copies", "texts"}


def test_a_failed_copy_is_an_error_and_no_text(tmp_path: Path) -> None:
    with rolled(tmp_path / "journal.jsonl", steps=(0, 100), shadow=100) as rollout:
        generator = random.Random(6)
        for number in range(30):
            choice = rollout.choose(f"s{number}", str(number), f"p{number}")
            if choice.shadow is None:
                break
            rollout.finished(answered(BASELINE, str(number), generator, text="text"))
            copy = answered(CANDIDATE, str(number), generator, error=True, is_shadow=True)
            rollout.finished(copy)
        state = rollout.state
        assert state.why == "the candidate is worse: copies"
        texts = rollout.summary()["texts"]
        assert texts == {"compared": 0, "differing": 0, "failed_copies": number}
        assert number <= 15


def test_a_copy_that_both_arms_fail_says_nothing(tmp_path: Path) -> None:
    file = tmp_path / "journal.jsonl"
    with rolled(file, steps=(0, 100), shadow=100) as rollout:
        for number in range(30):
            rollout.choose(f"s{number}", str(number), f"p{number}")
            for arm in (BASELINE, CANDIDATE):
                answer = answered(arm, str(number), random.Random(1), error=True)
                rollout.finished(dataclasses.replace(answer, is_shadow=arm == CANDIDATE))
        assert rollout.state.outcome == "running"
    assert {entry["kind"] for entry in read_journal(file)} == {"begin", "session"}


def test_a_session_counts_once(tmp_path: Path) -> None:
    with rolled(tmp_path / "journal.jsonl", shadow=0) as rollout:
        for number in range(200):
            choice = rollout.choose("the same", str(number), None)
            rollout.finished(answered(choice.arm.name, str(number), random.Random(number)))
        assert rollout.state.evidence.baseline + rollout.state.evidence.candidate == 1


def test_a_hang_up_is_no_evidence(tmp_path: Path) -> None:
    with rolled(tmp_path / "journal.jsonl", shadow=0) as rollout:
        choice = rollout.choose("somebody", "1", None)
        rollout.finished(Finished("1", "id", choice.arm.name, None, None, 5, (), Statistics()))
        assert rollout.state.evidence.baseline == 0


def test_a_candidate_that_refuses_what_the_baseline_answers_is_rolled_back(tmp_path: Path) -> None:
    with rolled(tmp_path / "journal.jsonl", shadow=0, steps=(25, 100)) as rollout:
        generator = random.Random(5)
        for number in range(400):
            choice = rollout.choose(f"s{number}", str(number), None)
            answer = answered(choice.arm.name, str(number), generator)
            if choice.arm.name == CANDIDATE and number % 3 == 0:
                answer = Finished(str(number), "id", CANDIDATE, 400, None, 5, (), Statistics())
            rollout.finished(answer)
        assert rollout.state.why == "the candidate is worse: errors"


def test_a_device_is_no_journal(tmp_path: Path) -> None:
    (tmp_path / "journal.jsonl").symlink_to("/dev/full")
    with pytest.raises(UsageError, match="no regular file"):
        status_of(tmp_path / "journal.jsonl")
    with pytest.raises(UsageError, match="no regular file"), rolled(tmp_path / "journal.jsonl"):
        pass


def test_errors_of_both_arms_lead_no_step_further(tmp_path: Path) -> None:
    """A dead server behind both arms: neither is worse, and the candidate has shown nothing."""
    with rolled(tmp_path / "journal.jsonl", steps=(50, 100), min_requests=5) as rollout:
        generator = random.Random(3)
        for number in range(300):
            choice = rollout.choose(f"s{number}", str(number), None)
            rollout.finished(answered(choice.arm.name, str(number), generator, error=True))
        state = rollout.state
        assert state.arms[CANDIDATE].errors > 100
        assert (state.outcome, state.step, state.in_step) == ("running", 0, 0)


def test_it_goes_on_where_it_was(tmp_path: Path) -> None:
    file = tmp_path / "journal.jsonl"
    with rolled(file, min_requests=30) as rollout:
        drive(rollout, 1500)
        before = json.dumps(rollout.summary())
    with rolled(file, min_requests=30) as rollout:
        assert json.dumps(rollout.summary()) == before
        assert rollout.state.outcome == "running"
        drive(rollout, 20_000, first=1500)
        assert rollout.state.outcome == "promoted"
    assert status_of(file)["outcome"] == "promoted"


def test_a_line_that_was_cut_is_dropped(tmp_path: Path) -> None:
    file = tmp_path / "journal.jsonl"
    with rolled(file) as rollout:
        drive(rollout, 50)
        before = rollout.summary()
    with file.open("ab") as stream:
        stream.write(b'{"kind": "session", "sess')
    assert {**status_of(file), "paused": None} == {
        "ids": {"deployment": "tiny"},
        "is_run": False,
        **before,
    }
    with rolled(file) as rollout:
        assert rollout.summary() == before
        drive(rollout, 10, first=50)
    assert len(list(read_journal(file))) > 50


def test_kill_9_loses_nothing_that_was_decided(tmp_path: Path) -> None:
    """A process drives a roll-out until it is killed; another goes on from its journal."""
    program = (
        "import sys, pathlib\n"
        "from tests.gateway.test_rollout import drive, rolled\n"
        f"with rolled(pathlib.Path({str(tmp_path / 'journal.jsonl')!r}), steps=(5, 25, 100),"
        " min_requests=50) as rollout:\n"
        "    for first in range(0, 10**6, 10):\n"
        "        drive(rollout, 10, first=first, seed=first)\n"
        "        print(rollout.state.step, rollout.state.evidence.baseline, flush=True)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, cwd=Path.cwd()
    )
    assert process.stdout is not None
    step, sessions = 0, 0
    for line in process.stdout:
        step, sessions = map(int, line.split())
        if step == 1:
            break
    process.kill()
    process.wait()
    process.stdout.close()
    found = read_state(tmp_path / "journal.jsonl")
    assert found is not None
    assert found[1].step >= step
    assert found[1].evidence.baseline >= sessions
    with rolled(tmp_path / "journal.jsonl", steps=(5, 25, 100), min_requests=50) as rollout:
        assert rollout.state.step >= 1


def test_only_one_process_runs_a_roll_out(tmp_path: Path) -> None:
    file = tmp_path / "journal.jsonl"
    with rolled(file), pytest.raises(UsageError, match="another process"), rolled(file):
        pass


def test_the_status_says_whether_a_process_runs_it(tmp_path: Path) -> None:
    file = tmp_path / "journal.jsonl"
    with rolled(file):
        status = status_of(file)
        assert (status["outcome"], status["is_run"]) == ("running", True)
    status = status_of(file)
    assert (status["outcome"], status["is_run"]) == ("running", False)
    with rolled(file):  # and asking holds nobody up
        pass


def test_the_journal_of_another_roll_out_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "journal.jsonl"
    with rolled(file):
        pass
    with pytest.raises(UsageError, match="another roll-out") as caught, rolled(file, shadow=50):
        pass
    assert "--fresh" in str(caught.value)
    assert "rollout.shadow: 10, now 50)" in str(caught.value)
    set_aside(file)
    with rolled(file, shadow=50):
        pass
    assert (tmp_path / "journal.1.jsonl").exists()


BEGIN = {"kind": "begin", "version": 1, "ids": {}, "settings": {}, "time": 1.0}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("nonsense\n", "is not the journal"),
        ("[1]\n", "is not the journal"),
        ("[" * 5000 + "\n", "is not the journal"),
        ("\0\n", "is not the journal"),
        ('{"kind": "begin"}\n', "cannot be followed"),
        ('{"settings": 5}\n', "cannot be followed"),
        (json.dumps({**BEGIN, "settings": {"step": 1}}) + "\n", r"\(step: extra inputs"),
        (json.dumps({**BEGIN, "ids": []}) + "\n", r"\(ids: "),
        ("", "no roll-out"),
        (json.dumps(BEGIN), "no roll-out"),  # cut before its end
    ],
)
def test_a_file_that_is_no_journal_is_refused(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "journal.jsonl"
    file.write_text(text)
    with pytest.raises(UsageError, match=words) as caught:
        status_of(file)
    assert str(file) in str(caught.value)


def test_a_folder_is_no_journal(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no regular file"):
        status_of(tmp_path)


def test_a_journal_that_cannot_be_written_sends_all_to_the_baseline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with rolled(tmp_path / "journal.jsonl", steps=(50, 100)) as rollout:
        is_full = True

        def add(self: Journal, entry: Any, *, lasting: bool = False) -> None:
            if is_full:
                raise OSError(28, "No space left on device")
            written.append(entry)

        written: list[Any] = []
        monkeypatch.setattr(Journal, "add", add)
        drive(rollout, 5)
        assert "No space left" in rollout.summary()["paused"]
        assert {rollout.choose(f"s{n}", "x", None).arm.name for n in range(50)} == {BASELINE}
        is_full = False
        drive(rollout, 5, first=5)
        assert written
        assert rollout.summary()["paused"] is None


def test_an_operator_rolls_back_a_running_and_a_stopped_roll_out(tmp_path: Path) -> None:
    file = tmp_path / "a" / "journal.jsonl"
    with rolled(file) as rollout:
        assert order_rollback(file, "too many complaints") == "told"
        take_orders(rollout, file)
        assert (rollout.state.outcome, rollout.state.why) == ("rolled back", "too many complaints")
        take_orders(rollout, file)
        assert order_rollback(file, "again") == "already done"
    assert order_rollback(file, "again") == "already done"
    assert status_of(file)["why"] == "too many complaints"
    other = tmp_path / "b" / "journal.jsonl"
    with rolled(other):
        pass
    assert order_rollback(other, "no") == "done"
    assert status_of(other)["outcome"] == "rolled back"
    with pytest.raises(UsageError, match="no roll-out"):
        order_rollback(tmp_path / "c" / "journal.jsonl", "no")


DECISION = {"kind": "decision", "time": 1.0, "outcome": "running", "step": 1, "why": "it is well"}
SESSION = {
    "kind": "session",
    "session": 1 << 63,
    "arm": "candidate",
    "share": 0.5,
    "error": False,
    "ttft_ms": 1,
    "token_ms": None,
    "acceptance": None,
}


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        (DECISION, {"step": 99}),
        (DECISION, {"step": "1"}),
        (DECISION, {"step": -1}),
        (DECISION, {"outcome": "won"}),
        (DECISION, {"time": "yesterday"}),
        (DECISION, {"why": 5}),
        (SESSION, {"arm": "other"}),
        (SESSION, {"ttft_ms": "1"}),
        (SESSION, {"ttft_ms": float("nan")}),
        (SESSION, {"share": 7}),
        (SESSION, {"session": [1]}),
        (SESSION, {"kind": "other"}),
        (SESSION, {"kind": "begin"}),
    ],
)
def test_a_line_that_cannot_be_is_refused_with_its_number(
    tmp_path: Path, line: dict[str, Any], fault: dict[str, Any]
) -> None:
    file = tmp_path / "journal.jsonl"
    with rolled(file):
        pass
    with file.open("a") as journal:
        journal.write(json.dumps(line) + "\n")
    status_of(file)
    with file.open("a") as journal:
        journal.write(json.dumps({**line, **fault}) + "\n")
    with pytest.raises(UsageError, match=r"jsonl:3: the line cannot be followed") as caught:
        status_of(file)
    assert next(iter(fault)) in str(caught.value)
    assert "--fresh" in str(caught.value)


def test_the_journal_of_another_version_says_so(tmp_path: Path) -> None:
    file = tmp_path / "journal.jsonl"
    with rolled(file):
        pass
    begin = json.loads(file.read_text())
    file.write_text(json.dumps({**begin, "version": 2}) + "\n")
    with pytest.raises(UsageError, match="has form 2, and this version of the toolkit reads 1"):
        status_of(file)
    del begin["version"]  # the first one had none
    file.write_text(json.dumps(begin) + "\n")
    with rolled(file) as rollout:
        assert rollout.state.outcome == "running"


def test_a_roll_out_that_runs_is_not_set_aside(tmp_path: Path) -> None:
    """It would go on without a journal that anybody finds, and no order would reach it."""
    file = tmp_path / "journal.jsonl"
    with rolled(file) as rollout:
        order_rollback(file, "at once")
        with pytest.raises(UsageError, match="another process"):
            set_aside(file)
        take_orders(rollout, file)
        assert rollout.state.outcome == "rolled back"


def test_an_order_to_an_older_roll_out_is_void(tmp_path: Path) -> None:
    file = tmp_path / "journal.jsonl"
    with rolled(file):
        order_rollback(file, "the older one")
    set_aside(file)
    with rolled(file) as rollout:
        take_orders(rollout, file)
        assert rollout.state.outcome == "running"


def test_an_order_waits_until_the_journal_can_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "journal.jsonl"
    with rolled(file) as rollout:
        order_rollback(file, "a reason of odd bytes: \udcff")

        def add(self: Journal, entry: Any, *, lasting: bool = False) -> None:
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as full:
            full.setattr(Journal, "add", add)
            take_orders(rollout, file)
        assert rollout.state.outcome == "running"
        take_orders(rollout, file)
        assert rollout.state.why == "a reason of odd bytes: ?"


def test_an_order_needs_no_room_for_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write_text(file: Path, *args: Any, **named: Any) -> int:
        file.touch()
        raise OSError(28, "No space left on device")

    file = tmp_path / "journal.jsonl"
    with rolled(file) as rollout:
        with monkeypatch.context() as full:
            full.setattr(Path, "write_text", write_text)
            assert order_rollback(file, "a long reason") == "told"
        take_orders(rollout, file)
        assert (rollout.state.outcome, rollout.state.why) == ("rolled back", "by an operator")


def test_an_order_that_cannot_be_read_is_an_order(tmp_path: Path) -> None:
    file = tmp_path / "journal.jsonl"
    with rolled(file) as rollout:
        (tmp_path / "rollback").mkdir()
        take_orders(rollout, file)
        take_orders(rollout, file)
        assert rollout.state.outcome == "rolled back"
        assert "cannot be read" in rollout.state.why


def test_the_gateway_rolls_back_a_candidate_that_fails(tmp_path: Path) -> None:
    """Over HTTP: clients of the candidate see its errors until the evidence is there; then none."""
    failing = ScriptedBackend(failure=ServerUnavailable("went away"))
    settings = {"steps": (50, 100), "min_requests": 500}
    with (
        rolled(tmp_path / "journal.jsonl", candidate=failing, **settings) as rollout,
        gateway(arms=rollout) as served,
    ):
        body = {"model": "tiny", "prompt": "Hi", "temperature": 0.5}
        statuses = [post(served.url, "/v1/completions", body)[0] for _ in range(60)]
        assert 503 in statuses
        assert statuses[-20:] == [200] * 20
        assert statuses.count(503) <= 20
        assert rollout.state.outcome == "rolled back"
        with_page = _get_json(f"{served.url}/rollout.json")
        assert with_page["outcome"] == "rolled back"
        assert with_page["evidence"][0]["test"] == "errors"


def test_the_health_shows_all_arms_that_may_answer(tmp_path: Path) -> None:
    gone = ScriptedBackend(failure=ServerUnavailable("went away"))
    with (
        rolled(tmp_path / "journal.jsonl", candidate=gone, steps=(0, 50, 100)) as rollout,
        gateway(arms=rollout) as served,
    ):
        assert _get_json(f"{served.url}/health")["arms"] == {"baseline": "ready"}
        rollout.state.add({**DECISION, "step": 1})
        health = _get_json(f"{served.url}/health")  # with status 200: the baseline answers
        assert health["arms"] == {"baseline": "ready", "candidate": "unavailable"}
        rollout.state.add({**DECISION, "outcome": "promoted", "step": 2})
        with pytest.raises(urllib.error.HTTPError) as caught:
            _get_json(f"{served.url}/health")
        with caught.value as error:
            assert (error.code, json.loads(error.read())["arms"]) == (
                503,
                {"candidate": "unavailable"},
            )


def test_what_the_gateway_itself_refuses_is_no_evidence_and_is_not_copied(tmp_path: Path) -> None:
    hanging = ScriptedBackend(hangs_after=0)
    with (
        rolled(tmp_path / "j.jsonl", baseline=hanging, steps=(0, 100), shadow=100) as rollout,
        gateway(arms=rollout, max_requests=1) as served,
    ):
        body = {"model": "tiny", "prompt": "p", "temperature": 0}
        with _hanging_request(served.url, body):
            for _ in range(500):
                if hanging.running:
                    break
                time.sleep(0.01)
            statuses = [post(served.url, "/v1/completions", body)[0] for _ in range(20)]
        assert statuses == [503] * 20
        assert rollout.summary()["arms"][BASELINE]["sessions"] == 0
        assert len(rollout.all[1].backend.seen) == 1  # type: ignore[attr-defined]
        page = served.gateway.metrics.page().decode()
    assert 'requests_total{arm="-",path="/v1/completions",status="503"} 20.0' in page


@contextmanager
def _hanging_request(url: str, body: dict[str, Any]) -> Iterator[None]:
    import socket

    host, port = url.removeprefix("http://").split(":")
    data = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n"
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(head.encode() + data)
        yield


def _get_json(url: str) -> Any:
    import urllib.request

    with urllib.request.urlopen(url, timeout=10) as answer:
        return json.loads(answer.read())


def test_shadows_are_compared_and_never_seen(tmp_path: Path) -> None:
    def words(prompt: str, options: Options) -> list[str]:
        return [prompt]

    wrong = ScriptedBackend(text=lambda prompt, options: ["wrong"], statistics=STATISTICS)
    with (
        rolled(
            tmp_path / "journal.jsonl",
            baseline=ScriptedBackend(text=words),
            candidate=wrong,
            steps=(0, 100),
            shadow=100,
        ) as rollout,
        gateway(arms=rollout) as served,
    ):
        for number in range(40):
            body = {"model": "tiny", "prompt": f"p{number}", "temperature": 0}
            _, _, answer = post(served.url, "/v1/completions", body)
            assert answer["choices"][0]["text"] == f"p{number}"
        for _ in range(500):
            if rollout.state.outcome == "rolled back":
                break
            time.sleep(0.01)
        assert rollout.state.why == "the candidate is worse: texts"
        assert 0 < len(wrong.seen) <= 20


def test_a_hanging_shadow_holds_nobody_up(tmp_path: Path) -> None:
    hanging = ScriptedBackend(hangs_after=0)
    with (
        rolled(tmp_path / "j.jsonl", candidate=hanging, steps=(0, 100), shadow=100) as rollout,
        gateway(arms=rollout) as served,
    ):
        body = {"model": "tiny", "prompt": "p", "temperature": 0}
        threads = [
            threading.Thread(
                target=lambda n=n: post(served.url, "/v1/completions", {**body, "prompt": f"p{n}"})  # type: ignore[misc]
            )
            for n in range(50)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        assert not any(thread.is_alive() for thread in threads)
        assert hanging.running <= 32
    assert hanging.running == 0


def test_the_journal_survives_an_end_in_the_midst_of_a_write(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j.jsonl")
    journal.add({"a": 1})
    journal.close()
    with (tmp_path / "j.jsonl").open("ab") as stream:
        stream.write(b'{"half')
    again = Journal(tmp_path / "j.jsonl")
    again.add({"b": 2})
    again.close()
    assert list(read_journal(tmp_path / "j.jsonl")) == [{"a": 1}, {"b": 2}]


def test_a_baseline_that_counts_no_positions_has_no_alpha_where_it_drafts_nothing() -> None:
    """As vLLM beside our own engine: twenty zeros would make every alpha of the candidate good."""

    def session(number: int, arm: str, rate: float | None, alpha: float | None) -> dict[str, Any]:
        return {
            "kind": "session",
            "session": number,
            "arm": arm,
            "share": 0.5,
            "error": False,
            "ttft_ms": None,
            "token_ms": None,
            "acceptance": rate,
            "undrafted": rate is None,
            **({} if alpha is None else {"alpha": alpha}),  # older journals have none
        }

    state = RolloutState(RolloutConfig())
    for number in range(400):
        if number % 2:
            state.add(session(number, CANDIDATE, 0.2, 0.4))
        else:
            state.add(session(number, BASELINE, None if number % 8 == 2 else 0.7, None))
    findings = {finding.test: finding for finding in state.evidence.findings()}
    assert findings["acceptance"].is_worse
