"""`toolkit bench` as people meet it: what it prints, saves and exits with."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.cli import toolkit, toolkit_here
from tests.support.stub import Script, StubServer


@pytest.fixture(scope="module")
def stub() -> Iterator[StubServer]:
    with StubServer(Script(chunks=((2.0, "a", 1), (2.0, "bcd", 3)))) as server:
        yield server


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bench")
    (folder / "p.jsonl").write_text(
        "".join(json.dumps({"prompt": f"p {i}"}) + "\n" for i in range(24))
    )
    return folder


@pytest.mark.slow
def test_a_run_prints_its_verdict_saves_itself_and_is_compared(
    stub: StubServer, folder: Path
) -> None:
    arguments = (
        "bench",
        stub.grpc,
        "--prompts",
        "p.jsonl",
        "--metrics",
        stub.metrics,
        "--gate",
        "ttft_p50<=5000",
    )
    done = toolkit(*arguments, "--out", "runs/a.json", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert done.stdout.rstrip().endswith("PASS\nsaved in runs/a.json")
    assert "TTFT p50/p90/p99 ms" in done.stdout and "counters: 2 counters" in done.stdout
    assert "bench" in done.stderr
    again = toolkit_here("bench", "--compare", "runs/a.json", "runs/a.json", "--json", cwd=folder)
    assert (again.returncode, json.loads(again.stdout)["verdict"]) == (0, "PASS")


@pytest.mark.slow
def test_exit_codes_tell_fail_undecided_and_broken_apart(stub: StubServer, folder: Path) -> None:
    base = ("bench", stub.http, "--prompts", "p.jsonl")
    assert toolkit(*base, "--gate", "ttft_p50<=0.001", cwd=folder).returncode == 1
    assert toolkit(*base, "--gate", "ttft_p99<=5000", cwd=folder).returncode == 4
    gone = toolkit("bench", "127.0.0.1:9", "--prompts", "p.jsonl", cwd=folder)
    assert (
        gone.returncode == 3
        and "cannot be reached" in gone.stderr
        and "Traceback" not in gone.stderr
    )


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "give a CONFIG, an endpoint or --compare"),
        (("localhost:1",), "no prompts to send"),
        (("localhost:1", "--prompts", "none.jsonl"), "cannot be read"),
        (
            ("localhost:1", "--prompts", "p.jsonl", "--concurrency", "many"),
            "not a number of requests",
        ),
        (("localhost:1", "--prompts", "p.jsonl", "--gate", "warmth<=1"), "not measured"),
        (
            ("localhost:1", "--prompts", "p.jsonl", "--api-key-env", "NO_SUCH_KEY"),
            "has no NO_SUCH_KEY",
        ),
        (("localhost:1", "--compare", "a", "b"), "judges saved runs"),
        (("--compare", "p.jsonl", "none.json"), "p.jsonl: cannot be read"),
        (("--compare", "/dev/zero", "none.json"), "/dev/zero: cannot be read"),
    ],
)
def test_arguments_that_cannot_work_exit_2(
    folder: Path, arguments: tuple[str, ...], words: str
) -> None:
    done = toolkit_here("bench", *arguments, cwd=folder)
    assert (done.returncode, done.stdout) == (2, "")
    assert words in done.stderr and "Traceback" not in done.stderr
