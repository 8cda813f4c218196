"""A builder's process: what it prints, how it ends, and that it does not outlive us."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from toolkit.engines.trtllm.process import run_build
from toolkit.errors import BackendUnavailable

PARENT = """
import sys
from pathlib import Path
from toolkit.engines.trtllm.process import run_build
run_build(("/bin/sh", "-c", "echo $$ > pid; exec sleep 60"), Path("log"), lambda *step: None,
          what="", world_size=1, cwd=Path.cwd(), environment={})
"""


def test_both_streams_are_kept_in_the_order_they_came(tmp_path: Path) -> None:
    said: list[tuple[int, int | None, str]] = []
    script = "echo one; echo two >&2; echo '[1/2/2026-03:04:05] [TRT-LLM] [I] Serializing engine to x'; printf 'no end of line'; exit 3"
    outcome = run_build(
        ("/bin/sh", "-c", script),
        tmp_path / "log",
        lambda *step: said.append(step),
        what="draft: ",
        world_size=2,
        cwd=tmp_path,
        environment={"PATH": "/usr/bin:/bin"},
    )
    assert outcome.returncode == 3
    assert outcome.log.splitlines()[:2] == ["one", "two"]
    assert outcome.log.endswith("no end of line")
    assert said == [(0, 2, "draft: starting trtllm-build"), (0, 2, "draft: writing the engine")]


def test_a_program_that_cannot_be_started_is_named(tmp_path: Path) -> None:
    with pytest.raises(BackendUnavailable, match="no-such-program is not available"):
        run_build(
            (str(tmp_path / "no-such-program"),),
            tmp_path / "log",
            lambda *step: None,
            what="",
            world_size=1,
            cwd=tmp_path,
            environment={},
        )


def test_a_builder_dies_with_the_program_that_is_killed(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    parent = subprocess.Popen([sys.executable, "-c", PARENT], cwd=tmp_path, env=environment)
    try:
        _wait(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text().strip() != "")
    finally:
        parent.send_signal(signal.SIGKILL)
        parent.wait()
    builder = int((tmp_path / "pid").read_text())
    _wait(lambda: not _alive(builder))


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _wait(condition) -> None:  # type: ignore[no-untyped-def]
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, "it took too long"
        time.sleep(0.01)
