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
        (("nope.yaml",), "nope.yaml: no such file"),
        ((".",), ".: is a folder, not a file"),
        (("nope",), "nope: not an address of an endpoint"),
        (("localhost:99999", "--prompts", "p.jsonl"), "'99999' is not a port"),
        (("localhost:abc", "--prompts", "p.jsonl"), "'abc' is not a port"),
        (("http://localhost:99999/v1", "--prompts", "p.jsonl"), "'99999' is not a port"),
        (("http://localhost:abc/v1", "--prompts", "p.jsonl"), "'abc' is not a port"),
        (("localhost:0", "--prompts", "p.jsonl"), "'0' is not a port"),
        (
            ("localhost:1", "--prompts", "p.jsonl", "--baseline", "http://localhost:abc"),
            "http://localhost:abc: 'abc' is not a port",
        ),
        (
            ("localhost:1", "--prompts", "p.jsonl", "--metrics-url", "http://localhost:abc/m"),
            "http://localhost:abc/m: 'abc' is not a port",
        ),
        (("localhost:1", "--prompts", "p.jsonl", "--out", "."), ".: the run cannot be saved"),
        (
            ("localhost:1", "--prompts", "p.jsonl", "--out", "p.jsonl/run.json"),
            "p.jsonl: the run cannot be saved",
        ),
        (("localhost:1", "--prompts", "p.jsonl", "--goodput", "ttft"), "not a limit of a latency"),
        (("localhost:1", "--prompts", "p.jsonl", "--arrivals", "none"), "cannot be read"),
        (("localhost:1", "--prompts", "p.jsonl", "--gate", "speed>=1.2"), "only one is measured"),
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
    assert "bench started" not in done.stderr and "cannot be reached" not in done.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ("--gate", "warmth<=1"),
        ("--goodput", "ttft"),
        ("--arrivals", "none"),
        ("--as-served", "--gate", "speed>=1.2"),
        ("--set", "triton.decoupled=false"),
    ],
)
def test_a_deployment_is_not_served_for_arguments_that_cannot_work(
    folder: Path, arguments: tuple[str, ...]
) -> None:
    config = Path(__file__).parents[2] / "configs" / "quickstart.yaml"
    done = toolkit_here("bench", str(config), *arguments, cwd=folder)
    assert (done.returncode, done.stdout) == (2, "")
    assert "starting tritonserver" not in done.stderr and "tritonserver" not in done.stderr
