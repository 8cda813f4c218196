"""A bench of vLLM itself with the quickstart pair: what it tells of each request agrees with what
its counters tell.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from toolkit.bench.counters import counted_acceptance, has_equal_blocks, read_counters
from toolkit.bench.run import BenchOptions, bench

ROOT = Path(__file__).parents[2]
PAIR = ROOT / "configs" / "quickstart"
PYTHON = Path(sys.prefix).parent / ".venv-vllm" / "bin" / "python"
DRAFT_LEN = 3
READY_S = 540  # it imports for half a minute on an idle machine, and for minutes on a busy one


@pytest.fixture
def vllm_server(tmp_path: Path) -> Iterator[str]:
    if not PYTHON.exists():
        pytest.skip(f"{PYTHON} is not there; `make vllm` makes it")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    draft = {
        "method": "draft_model",
        "model": str(PAIR / "draft"),
        "num_speculative_tokens": DRAFT_LEN,
    }
    flags = {
        "--model": str(PAIR / "target"),
        "--served-model-name": "quickstart",
        "--dtype": "float32",
        "--max-model-len": "512",
        "--max-num-seqs": "4",
        "--host": "127.0.0.1",
        "--port": str(port),
        "--speculative-config": json.dumps(draft),
        "--per-request-spec-decode-metrics": "detailed",
    }
    command = [str(PYTHON), "-m", "vllm.entrypoints.openai.api_server", "--enforce-eager"]
    command += [part for flag in flags.items() for part in flag]
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in ("PYTHONPATH", "LD_PRELOAD")
    }
    environment |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}
    environment |= {"HF_HUB_OFFLINE": "1"}
    log = tmp_path / "vllm.log"
    with log.open("w") as output:
        server = subprocess.Popen(
            command, stdout=output, stderr=output, env=environment, start_new_session=True
        )
        try:
            url = f"http://127.0.0.1:{port}"
            wait_until_ready(url, server, log)
            yield url
        finally:
            server.terminate()  # it ends its engine's process itself
            try:
                server.wait(60)
            except subprocess.TimeoutExpired:
                os.killpg(server.pid, 9)
                server.wait()


def wait_until_ready(url: str, server: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + READY_S
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    while time.monotonic() < deadline:
        assert server.poll() is None, log.read_text()[-3000:]
        try:
            with opener.open(f"{url}/health", timeout=5):
                return
        except OSError:
            time.sleep(0.5)
    raise AssertionError(f"not ready after {READY_S} s: {log.read_text()[-3000:]}")


@pytest.mark.vllm
@pytest.mark.slow
def test_vllm_is_measured_and_its_counters_agree_with_its_answers(
    vllm_server: str, tmp_path: Path
) -> None:
    before = read_counters(f"{vllm_server}/metrics", "quickstart")
    run = bench(
        vllm_server,
        BenchOptions(
            PAIR / "data" / "prompts.jsonl",
            requests=12,
            rounds=2,
            warm_up=2,
            max_tokens=24,
            gates=("acceptance_length>=1.2", "ttft_p50<=60000"),
        ),
    )
    (arm,) = run.points[0].arms
    assert [gate.outcome for gate in run.gates] == ["PASS", "PASS", "PASS"]

    # The pair has no chat template.
    assert run.endpoints[0].protocol == "openai-completions"
    (note,) = [finding for finding in run.findings if finding.check == "protocol"]
    assert "HTTP 400" in note.detail and "chat template" in note.detail

    # Tokens are counted by chunk. A chunk is a verify step or, on a busy machine, several of them:
    # vLLM merges what its HTTP side has not fetched yet (RequestOutputCollector).
    counted = [tokens for request in run.requests for _, tokens in request.chunks]
    assert all(tokens is not None and tokens >= 1 for tokens in counted)
    assert sum(tokens or 0 for tokens in counted) == arm.output_tokens
    assert max(tokens or 0 for tokens in counted) > 1
    first = sum(request.chunks[0][1] or 0 for request in run.requests)
    assert arm.latencies["itl"].samples == (arm.output_tokens or 0) - first
    assert arm.latencies["icl"].samples == len(counted) - len(run.requests)

    # Requests, output tokens, drafts, drafted and accepted tokens, and accepted ones by position.
    assert arm.acceptance_source == "requests"
    assert len(run.counters) == 5 + DRAFT_LEN
    assert [check for check in run.counters if not check.matches] == []

    # Another bench without the answers' own counts would read the same from the counters.
    now = read_counters(f"{vllm_server}/metrics", "quickstart")
    everything = counted_acceptance(now, before)
    assert everything is not None and has_equal_blocks(everything)
    assert everything.verify_steps > arm.acceptance.verify_steps  # the probe and the warm-up
    assert everything.length == pytest.approx(arm.acceptance.length, rel=0.2)
