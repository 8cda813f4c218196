"""Does the client get each chunk when the model has it, and what does serving cost beside the bare
loop?

A real server on a copy of a packaged repository, whose model also notes when the runtime delivers
each event, and a client over gRPC, both on this machine, whose monotonic clock they share. Greedy,
plain and with speculation, as many streams at a time as stated. A chunk is late if the client gets
it more than 2 ms after the runtime had the last of its tokens. Chunks per step below 1: steps whose
tokens travelled with those of a later step, since the server could not send faster. For one stream
also plain decoding, from first token to last, against the bare loop of bench_serving; both take
turns, prompt by prompt. Good: at most 1 % late, 0.85 of the bare loop with a chunk per step.

    python -m tests.benchmarks.bench_chunks [--repository triton_repo/quickstart] [--streams 1 8]
    python -m tests.benchmarks.bench_chunks --client-cores 1    # the client on these cores only,
                                                                # else off the computing one
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.benchmarks.bench_serving import ROOT, bare_loop
from toolkit.client import Chunk, Client, Options, read_prompts
from toolkit.process.placement import off_claimed_cores
from toolkit.triton.process.server import TritonServer
from toolkit.triton.tensors.contract import MODEL

LATE_NS = 2_000_000
EVENTS = "events.jsonl"
# Appended to the copied model: a line per request, [[token ids, ns], ...] of its events.
RECORDER = f'''

def _record_events(path):
    import json, time
    from toolkit.speculative.runtime import SpeculativeRuntime

    submit = SpeculativeRuntime.submit

    def noting(self, request, on_event):
        rows = []

        def noted(event):
            rows.append((event.token_ids, time.monotonic_ns()))
            if event.finish_reason is not None:
                with open(path, "a") as file:
                    file.write(json.dumps(rows) + "\\n")
            on_event(event)

        submit(self, request, noted)

    SpeculativeRuntime.submit = noting

_record_events(__file__.replace("model.py", "{EVENTS}"))
'''

Events = list[tuple[list[int], int]]


def copy_of(repository: Path, folder: Path) -> Path:
    copy = folder / repository.name
    shutil.copytree(repository, copy)
    with (copy / MODEL / "1" / "model.py").open("a") as model:
        model.write(RECORDER)
    return copy


def delays_ns(chunks: Sequence[Chunk], events: Events) -> list[int]:
    """Per chunk with tokens: received - when the runtime delivered the last of them."""
    had_ns = [at for ids, at in events for _ in ids]  # of each token
    delays, count = [], 0
    for chunk in chunks:
        count += len(chunk.token_ids)
        if chunk.token_ids:
            delays.append(chunk.received_ns - had_ns[count - 1])
    return delays


def recorded(repository: Path, requests: int) -> list[Events]:
    """The events of the last `requests` requests that ended."""
    path = repository / MODEL / "1" / EVENTS
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        lines = path.read_text().splitlines() if path.exists() else []
        if len(lines) >= requests:
            return [json.loads(line) for line in lines]
        time.sleep(0.05)
    raise SystemExit(f"the model recorded fewer than {requests} requests")


def measure(repository: Path, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    prompts = read_prompts(arguments.prompts)[: arguments.max_prompts]
    bare = bare_loop(repository, arguments.max_tokens)
    rows: list[dict[str, Any]] = []
    with (
        tempfile.TemporaryDirectory(prefix="bench-chunks-") as folder,
        TritonServer(copy := copy_of(repository, Path(folder))) as server,
        Client(server.grpc_url) as client,
    ):
        if arguments.client_cores:
            os.sched_setaffinity(0, arguments.client_cores)
        done = 0
        for streams in arguments.streams:
            for name, draft_len in (("plain", 0), ("speculative", None)):
                options = Options(max_tokens=arguments.max_tokens, num_draft_tokens=draft_len)
                for prompt in prompts[:4]:
                    list(client.stream(prompt, options))
                bare_rates, answers = [], []
                began = time.perf_counter()
                if streams == 1:
                    for prompt in prompts:
                        if name == "plain" and not arguments.no_bare:
                            tokens, seconds = bare(prompt)
                            bare_rates.append(tokens / seconds)
                        with off_claimed_cores():
                            answers.append(client.chunks(prompt, options))
                else:
                    with off_claimed_cores(), ThreadPoolExecutor(streams) as pool:
                        answers = list(
                            pool.map(
                                lambda prompt: client.chunks(prompt, options),  # noqa: B023
                                [prompt for _ in range(streams // 4) for prompt in prompts],
                            )
                        )
                wall_s = time.perf_counter() - began
                done += 4 + len(answers)
                events = recorded(copy, done)[-len(answers) :]
                by_ids: dict[tuple[int, ...], list[Events]] = {}
                for request in events:
                    by_ids.setdefault(tuple(i for ids, _ in request for i in ids), []).append(
                        request
                    )
                delays: list[int] = []
                steps = chunks = 0
                for answer in sorted(answers, key=lambda chunks: chunks[-1].received_ns):
                    ids = tuple(i for chunk in answer for i in chunk.token_ids)
                    request = by_ids[ids].pop(0)
                    delays += delays_ns(answer, request)
                    steps += sum(1 for ids, _ in request if ids)
                    chunks += sum(1 for chunk in answer if chunk.token_ids)
                rates = [
                    sum(len(chunk.token_ids) for chunk in answer[1:])
                    / ((answer[-1].received_ns - answer[0].received_ns) / 1e9)
                    for answer in answers
                    if len(answer) > 2
                ]
                delays.sort()
                row = {
                    "arm": name,
                    "streams": streams,
                    "tokens_per_s": statistics.harmonic_mean(rates),
                    "total_tokens_per_s": sum(len(c.token_ids) for a in answers for c in a)
                    / wall_s,
                    "chunks_per_step": chunks / steps,
                    "late": sum(delay > LATE_NS for delay in delays) / len(delays),
                    "delay_p50_ms": delays[len(delays) // 2] / 1e6,
                    "delay_p99_ms": delays[int(0.99 * len(delays))] / 1e6,
                }
                if bare_rates:
                    row["bare_tokens_per_s"] = statistics.harmonic_mean(bare_rates)
                    row["over_bare"] = row["tokens_per_s"] / row["bare_tokens_per_s"]
                rows.append(row)
                print_row(row)
    return rows


def print_row(row: dict[str, Any]) -> None:
    share = f"{row['over_bare']:8.3f}" if "over_bare" in row else " " * 8
    print(
        f"{row['arm']:12}{row['streams']:8}{row['tokens_per_s']:14.0f}{share}"
        f"{row['chunks_per_step']:8.3f}{100 * row['late']:8.2f} %"
        f"{row['delay_p50_ms']:9.2f}{row['delay_p99_ms']:9.2f}",
        flush=True,
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--repository", type=Path, default=ROOT / "triton_repo" / "quickstart", help="packaged"
    )
    parser.add_argument(
        "--prompts", type=Path, default=ROOT / "configs" / "quickstart" / "data" / "prompts.jsonl"
    )
    parser.add_argument("--max-prompts", type=int, default=24)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--client-cores", type=int, nargs="+", default=[])
    parser.add_argument("--no-bare", action="store_true")
    arguments = parser.parse_args()
    if not (arguments.repository / MODEL).is_dir():
        sys.exit(f"no repository at {arguments.repository}: build one with `toolkit build`")
    print(
        f"{'arm':12}{'streams':>8}{'tokens/s each':>14}{'/ bare':>8}{'/ step':>8}{'late':>10}"
        f"{'p50 ms':>9}{'p99 ms':>9}"
    )
    rows = measure(arguments.repository.resolve(), arguments)
    facts = {
        "benchmark": "chunks",
        "max_tokens": arguments.max_tokens,
        "device": f"{platform.machine()}, {os.cpu_count()} cores",
        "rows": rows,
    }
    print(json.dumps(facts))
    return 0


if __name__ == "__main__":
    sys.exit(main())
