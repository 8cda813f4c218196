"""Do our client and NVIDIA's AIPerf say the same of one endpoint? Figure by figure, where both
define it alike.

A stub endpoint in a process of its own streams chat completions on a known schedule, in chunks of 1
to 3 tokens; both clients send it the same prompts, so many at a time. `stub` is what it knows
itself: when a request had come, when a chunk was written.

AIPerf pins libraries in other versions than ours, so it wants an environment of its own:

    python -m venv aiperf && aiperf/bin/pip install aiperf
    python -m tests.benchmarks.bench_aiperf [--aiperf aiperf/bin/aiperf] [--concurrency 1 8]
        [--requests 200]
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from tests.support.stub import Script, StubServer
from toolkit.bench.run import BenchOptions, bench
from toolkit.records.bench import BenchArm

TOKENIZER = Path(__file__).parents[2] / "configs/quickstart/target"
SCHEDULE = Script(
    chunks=tuple(
        (30.0 if i == 0 else 15.0, f"word{i} ", tokens)
        for i, tokens in enumerate((1, 3, 2, 3, 2, 3, 1, 3))
    )
)
WARM_UP = 8
FEWEST = 100
MISSING = (
    "AIPerf is not here, so nothing was compared. It wants an environment of its own:\n"
    "    python -m venv aiperf && aiperf/bin/pip install aiperf\n"
    "    python -m tests.benchmarks.bench_aiperf --aiperf aiperf/bin/aiperf"
)


@dataclass(frozen=True)
class Metric:
    """One figure: where each client keeps it, whether both define it alike, and what there is to
    know about that.
    """

    name: str
    unit: str
    ours: Callable[[BenchArm], float | None]
    theirs: tuple[str, str]  # AIPerf's tag and statistic
    stub: Callable[[list[dict[str, Any]]], float] | None = None
    alike: bool = True
    note: str = ""


def of_latency(name: str, statistic: str) -> Callable[[BenchArm], float | None]:
    return lambda arm: getattr(arm.latencies[name], statistic)


def written(
    statistic: str, figure: Callable[[dict[str, Any]], list[float]]
) -> Callable[[list[dict[str, Any]]], float]:
    """A statistic of what the stub's log says, in ms."""
    reduce = (
        np.mean if statistic == "mean" else lambda values: np.percentile(values, int(statistic[1:]))
    )
    return lambda log: float(reduce([value / 1e6 for entry in log for value in figure(entry)]))


def stub_ttft(entry: dict[str, Any]) -> list[float]:
    return [entry["written"][0][0] - entry["came_ns"]]


def stub_e2e(entry: dict[str, Any]) -> list[float]:
    return [entry["written"][-1][0] - entry["came_ns"]]


def stub_tpot(entry: dict[str, Any]) -> list[float]:
    tokens = sum(count for _, count in entry["written"])
    return [(entry["written"][-1][0] - entry["written"][0][0]) / (tokens - 1)]


def stub_icl(entry: dict[str, Any]) -> list[float]:
    return [
        later - earlier
        for (earlier, _), (later, _) in zip(entry["written"], entry["written"][1:], strict=False)
    ]


LATENCIES = (
    ("ttft", "time_to_first_token", stub_ttft),
    ("tpot", "inter_token_latency", stub_tpot),
    ("icl", "inter_chunk_latency", stub_icl),
    ("e2e", "request_latency", stub_e2e),
)
PAUSES = "at a fixed concurrency a client's own pause between two requests is in it"
METRICS = (
    *(
        Metric(
            f"{ours} {said}",
            "ms",
            of_latency(ours, said),
            (theirs, "avg" if said == "mean" else said),
            written(said, stub),
        )
        for ours, theirs, stub in LATENCIES
        for said in ("mean", "p50", "p90")
    ),
    Metric("output tokens", "", lambda arm: arm.output_tokens, ("total_osl", "avg")),
    Metric(
        "tokens_per_s",
        "1/s",
        lambda arm: arm.tokens_per_s,
        ("output_token_throughput", "avg"),
        note=PAUSES,
    ),
    Metric(
        "requests_per_s",
        "1/s",
        lambda arm: arm.requests_per_s,
        ("request_throughput", "avg"),
        note=PAUSES,
    ),
    Metric(
        "itl p90",
        "ms",
        of_latency("itl", "p90"),
        ("inter_token_latency", "p90"),
        alike=False,
        note="AIPerf's ITL is our tpot, one mean a request; our itl is every token's own gap",
    ),
)


def run_ours(url: str, prompts: Path, concurrency: int, requests: int) -> BenchArm:
    options = BenchOptions(
        prompts=prompts,
        protocol="openai-chat",
        concurrency=(concurrency,),
        requests=requests,
        rounds=1,
        warm_up=WARM_UP,
    )
    run = bench(f"{url}/v1", options)
    return run.points[0].arms[0]


def run_aiperf(
    program: str, url: str, prompts: Path, concurrency: int, requests: int
) -> dict[str, Any]:
    """Its profile_export_aiperf.json. Nothing is fetched: the prompts and the tokenizer are
    files, tokens are the server's.
    """
    with tempfile.TemporaryDirectory() as folder:
        command = [
            program,
            "profile",
            "--model",
            "stub",
            "--url",
            url,
            "--endpoint-type",
            "chat",
            "--streaming",
        ]
        command += ["--tokenizer", str(TOKENIZER), "--use-server-token-count"]
        command += ["--input-file", str(prompts), "--custom-dataset-type", "single_turn"]
        command += ["--dataset-sampling-strategy", "sequential"]
        command += ["--concurrency", str(concurrency), "--request-count", str(requests)]
        command += ["--warmup-request-count", str(WARM_UP), "--artifact-dir", folder]
        command += ["--ui", "none", "--no-gpu-telemetry", "--no-server-metrics"]
        # In the hub's offline mode AIPerf takes the folder of a tokenizer for a repository's name;
        # otherwise it just reads it.
        unwanted = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "PYTHONPATH")
        environment = {
            name: value for name, value in os.environ.items() if name not in unwanted
        } | {"NO_PROXY": "127.0.0.1"}
        ran = subprocess.run(
            command,
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
        results = sorted(Path(folder).rglob("profile_export_aiperf.json"))
        if ran.returncode != 0 or not results:
            raise SystemExit(
                "aiperf ended with exit code"
                f" {ran.returncode}:\n{(ran.stdout + ran.stderr)[-3000:]}"
            )
        found: dict[str, Any] = json.loads(results[0].read_text())
        return found


def compare(program: str, concurrency: int, requests: int) -> tuple[list[dict[str, Any]], str]:
    """A row per figure, and AIPerf's version."""
    with tempfile.TemporaryDirectory() as folder:
        prompts = Path(folder) / "prompts.jsonl"
        prompts.write_text(
            "".join(
                json.dumps({"text": f"Prompt {i} of the comparison"}) + "\n"
                for i in range(requests)
            )
        )
        with StubServer(SCHEDULE) as stub:
            ours = run_ours(stub.http, prompts, concurrency, requests)
            log = stub.log()[-requests:]
        with StubServer(SCHEDULE) as stub:
            theirs = run_aiperf(program, stub.http, prompts, concurrency, requests)
            their_log = stub.log()[-requests:]
    rows = []
    for metric in METRICS:
        tag, statistic = metric.theirs
        a, b = metric.ours(ours), theirs[tag][statistic]
        assert a is not None, f"{metric.name} was not measured"
        rows.append(
            {
                "concurrency": concurrency,
                "metric": metric.name,
                "unit": metric.unit,
                "ours": a,
                "stub": metric.stub(log) if metric.stub else None,
                "aiperf": b,
                "stub_of_aiperf": metric.stub(their_log) if metric.stub else None,
                "difference": a / b - 1,
                "alike": metric.alike,
                "note": metric.note,
            }
        )
    return rows, str(theirs["aiperf_version"])


def show(rows: Sequence[dict[str, Any]]) -> None:
    def figure(value: float | None) -> str:
        return "-" if value is None else f"{value:.2f}"

    print(
        f"{'':24}{'ours':>10}{'stub':>9}{'aiperf':>10}{'stub':>9}{'difference':>12}  defined alike"
    )
    for row in rows:
        name = f"{row['metric']}{', ' + row['unit'] if row['unit'] else ''}"
        alike = ("yes" if row["alike"] else "no") + (f": {row['note']}" if row["note"] else "")
        print(
            f"{name:24}{figure(row['ours']):>10}{figure(row['stub']):>9}{figure(row['aiperf']):>10}"
            f"{figure(row['stub_of_aiperf']):>9}{row['difference']:>+12.2%}  {alike}",
            flush=True,
        )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--aiperf",
        default="aiperf",
        metavar="PATH",
        help="the program; without it, `aiperf` of PATH",
    )
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--requests", type=int, default=200)
    asked = parser.parse_args()
    if asked.requests < FEWEST:
        parser.error(
            f"--requests {asked.requests}: our client gives a p90 from {FEWEST} requests on"
        )
    program = shutil.which(asked.aiperf)
    if program is None:
        print(MISSING)
        return 0
    rows: list[dict[str, Any]] = []
    release = ""
    for concurrency in asked.concurrency:
        print(
            f"{asked.requests} requests, {concurrency} at a time, {len(SCHEDULE.chunks)} chunks"
            f" each, {os.cpu_count()} cores"
        )
        found, release = compare(str(Path(program).absolute()), concurrency, asked.requests)
        show(found)
        rows += found
    furthest = max((row for row in rows if row["alike"]), key=lambda row: abs(row["difference"]))
    where = f"{furthest['metric']}, {furthest['concurrency']} at a time"
    print(f"furthest apart of those defined alike: {furthest['difference']:+.2%} ({where})")
    versions = {"aiperf": release, "aiohttp": version("aiohttp"), "python": sys.version.split()[0]}
    print(
        json.dumps(
            {"benchmark": "aiperf", "results": rows, "versions": versions, "cores": os.cpu_count()}
        )
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
