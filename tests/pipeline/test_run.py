"""The loop: reuse, resuming after a kill, two builds at once, and why a stage would run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.stages import UNDECIDED, Silent, small_stages
from toolkit.errors import StageError
from toolkit.pipeline.memory import PeakMemory
from toolkit.pipeline.run import explain, run_stages, upto
from toolkit.pipeline.stage import Done, Stage, key_of
from toolkit.pipeline.store import Store

ROOT = Path(__file__).parents[2]


def run(store: Store, stages: list[Stage], *, fresh: tuple[str, ...] = ()) -> dict[str, Done]:
    return dict(run_stages(stages, store, "small", Silent(), fresh=fresh))


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


def test_a_second_run_reuses_everything_and_gives_the_same_records(store: Store) -> None:
    ran: list[str] = []
    first = run(store, small_stages("a b", ran))
    assert ran == ["words", "upper/target", "count"]
    assert (first["count"].record.path / "text").read_text() == "2"
    second = run(store, small_stages("a b", ran))
    assert len(ran) == 3
    assert all(done.reused for done in second.values())
    assert {name: done.record for name, done in first.items()} == {
        name: done.record for name, done in second.items()
    }


def test_a_change_runs_what_depends_on_it_and_stops_where_content_is_the_same(store: Store) -> None:
    ran: list[str] = []
    run(store, small_stages("a b"))
    run(store, small_stages("A b", ran))
    # The upper-cased text is the same again, so counting is not repeated.
    assert ran == ["words", "upper/target"]


def test_a_new_version_runs_the_stage(store: Store) -> None:
    ran: list[str] = []
    run(store, small_stages("a b"))
    run(store, small_stages("a b", ran, version=2))
    assert ran == ["words", "upper/target", "count"]


@pytest.mark.parametrize(
    "fresh, expected",
    [("upper", ["upper/target"]), ("upper/target", ["upper/target"]), ("count", ["count"])],
)
def test_fresh_runs_a_stage_that_is_stored(store: Store, fresh: str, expected: list[str]) -> None:
    ran: list[str] = []
    run(store, small_stages("a b"))
    run(store, small_stages("a b", ran), fresh=(fresh,))
    assert ran == expected


def test_what_is_undecided_is_never_reused(store: Store) -> None:
    ran: list[str] = []
    for _ in range(2):
        run(store, small_stages("a b", ran, layout=UNDECIDED))
    assert ran.count("count") == 2
    first = explain(small_stages("a b", layout=UNDECIDED), store, "small")[0]
    assert not first.reused
    assert first.reasons == ("its stored result is undecided, so it is measured again",)


def test_upto_takes_a_stage_or_a_group_with_what_it_needs() -> None:
    stages = small_stages("a")
    assert [stage.name for stage in upto(stages, "upper")] == ["words", "upper/target"]
    assert [stage.name for stage in upto(stages, "words")] == ["words"]
    assert [stage.name for stage in upto(stages, "count")] == ["words", "upper/target", "count"]


def test_a_failed_stage_keeps_what_was_finished(store: Store) -> None:
    def fail(stage: str) -> None:
        if stage == "count":
            raise StageError(stage, "no luck")

    ran: list[str] = []
    with pytest.raises(StageError):
        run(store, small_stages("a b", ran, pause=fail))
    assert ran == ["words", "upper/target", "count"]
    ran.clear()
    run(store, small_stages("a b", ran))
    assert ran == ["count"]


def test_provenance_is_measured_and_not_part_of_the_key(store: Store) -> None:
    def work(stage: str) -> None:
        time.sleep(0.05)
        if stage == "words":
            bytearray(400_000_000)

    first = run(store, small_stages("a b", pause=work))
    provenance = first["words"].entry.provenance
    assert first["words"].seconds >= 0.05
    assert provenance["peak_memory_bytes"] > 400_000_000
    # The stage takes no memory, and the memory that the process held before does not count.
    assert first["count"].peak_memory_bytes is None
    assert {"command", "python", "toolkit", "git_commit", "machine", "started"} <= set(provenance)


def test_the_key_of_a_stage_is_pinned() -> None:
    """All finished work is found by these keys. A change here rebuilds everybody's store, so it
    must be deliberate.
    """
    stage = small_stages("a b")[0]
    parts = {
        "config": {"quant_algo": "FP8", "sizes": (1, 2.5, None)},
        "inputs": {"checkpoint": "sha256:00"},
    }
    assert (
        key_of(stage, parts) == "2f906b4de2e76218b820dd09b3fdef18b00bffdc2c99a1a56c042a140cd811aa"
    )


def test_peak_memory_counts_children() -> None:
    with PeakMemory() as alone:
        pass
    with PeakMemory() as with_child:
        subprocess.run(
            [sys.executable, "-c", "x = bytearray(200_000_000); import time; time.sleep(0.6)"],
            check=True,
        )
    assert alone.bytes > 0
    assert with_child.bytes > alone.bytes + 150_000_000


def test_peak_memory_of_another_tree_leaves_ours_out() -> None:
    ours = bytearray(300_000_000)
    work = (
        "import subprocess, sys; subprocess.run([sys.executable, '-c', 'x = bytearray(90_000_000);"
        " input()'])"
    )
    with subprocess.Popen([sys.executable, "-c", work], stdin=subprocess.PIPE) as process:
        with PeakMemory(process.pid) as peak:
            deadline = time.monotonic() + 20
            while peak.bytes < 90_000_000 and time.monotonic() < deadline:
                time.sleep(0.05)
        process.communicate(b"\n")
    assert 90_000_000 < peak.bytes < len(ours)


class Build:
    """A real process that builds; see tests.support.stages."""

    def __init__(self, store: Store, *arguments: str) -> None:
        command = [sys.executable, "-m", "tests.support.stages", str(store.root), *arguments]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)

    def wait_for(self, line: str) -> None:
        assert self.process.stdout is not None
        for read in self.process.stdout:
            if line in read:
                return
        raise AssertionError(f"the build ended without {line!r}")

    def rest(self) -> list[str]:
        lines = self.process.communicate(timeout=60)[0].splitlines()
        assert self.process.returncode == 0
        return lines


@pytest.mark.parametrize("stage", ["words", "upper/target", "count"])
def test_a_build_that_was_killed_in_any_stage_resumes(store: Store, stage: str) -> None:
    killed = Build(store, "a b", f"{stage}=60")
    killed.wait_for(f"{stage} started")
    os.kill(killed.process.pid, signal.SIGKILL)
    killed.process.communicate(timeout=60)
    assert list(store.root.rglob(".tmp.*"))  # it left half a stage
    again = Build(store, "a b").rest()
    names = ["words", "upper/target", "count"]
    before = names[: names.index(stage)]
    assert [line for line in again if "reused" in line] == [f"{name} reused" for name in before]
    assert [line for line in again if "built" in line] == [
        f"{name} built" for name in names[len(before) :]
    ]
    assert list(store.root.rglob(".tmp.*")) == []
    assert all(line.endswith("reused") for line in Build(store, "a b").rest())


def test_of_two_builds_at_once_one_works_and_the_other_waits(store: Store) -> None:
    first = Build(store, "a b", "upper/target=1.5")
    first.wait_for("upper/target started")
    second = Build(store, "a b")
    lines = second.rest()
    assert (
        f"upper/target: process {first.process.pid} is building the same; waiting for it" in lines
    )
    assert [line for line in lines if "reused" in line or "built" in line][:2] == [
        "words reused",
        "upper/target reused",
    ]
    built = [line for line in first.rest() + lines if line == "count built"]
    assert len(built) == 1


def test_a_build_takes_over_from_one_that_dies_while_it_waits(store: Store) -> None:
    first = Build(store, "a b", "words=60")
    first.wait_for("words started")
    second = Build(store, "a b")
    second.wait_for("waiting for it")
    os.kill(first.process.pid, signal.SIGKILL)
    first.process.communicate(timeout=60)
    assert "words built" in second.rest()


def test_explain_says_what_would_run_and_why(store: Store) -> None:
    def explained(words: str, version: int = 1) -> dict[str, tuple[bool, str]]:
        explanations = explain(small_stages(words, version=version), store, "small")
        return {
            explanation.stage: (explanation.reused, "; ".join(explanation.reasons))
            for explanation in explanations
        }

    assert explained("a b")["words"] == (False, "never built under this name")
    assert "words would run first" in explained("a b")["upper/target"][1]
    run(store, small_stages("a b"))
    assert all(reused for reused, _ in explained("a b").values())
    assert explained("c d")["words"] == (False, "config.words: a b -> c d")
    assert explained("a b", version=2)["words"] == (
        False,
        "this stage has changed: it has version 2 now",
    )
    run(store, small_stages("A b"))
    assert explained("a b")["words"][0]  # its entry is still there
    entry = run(store, small_stages("a b"))["words"].entry
    (entry.path / "first").unlink()
    assert explained("a b")["words"] == (False, "its stored result is gone or damaged")
