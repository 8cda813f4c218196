"""Benches of a real tritonserver, over both of its protocols, with its own counters."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from toolkit.bench.run import BenchOptions, bench
from toolkit.triton.process.server import TritonServer

PROMPTS = [f"def f{number}(x):" for number in range(20)]


@pytest.mark.slow
@pytest.mark.parametrize("protocol", ["triton-grpc", "triton-http"])
def test_a_served_pair_is_measured_and_its_counters_agree(
    tiny_server: TritonServer, tmp_path: Path, protocol: str
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS))
    url = tiny_server.grpc_url if protocol == "triton-grpc" else f"http://{tiny_server.http_url}"
    options = BenchOptions(
        prompts=prompts,
        protocol=protocol,
        against_plain=True,
        max_tokens=8,
        rounds=1,
        max_rounds=1,
        warm_up=2,
        concurrency=(2,),
        gates=("ttft_p50<=60000", "speed>=0.0001"),
        metrics_url=tiny_server.metrics_url,
    )
    found = bench(url, options)
    plain, speculative = found.points[0].arms
    assert [(gate.name, gate.outcome) for gate in found.gates] == [
        ("errors", "PASS"),
        ("ttft_p50", "PASS"),
        ("speed", "PASS"),
    ]
    assert (plain.failed, speculative.failed) == (0, 0)
    assert plain.output_tokens is not None and plain.output_tokens <= 8 * len(PROMPTS)
    assert plain.acceptance.drafted == 0 and speculative.acceptance.drafted > 0
    assert len(found.counters) == 5 and all(check.matches for check in found.counters)
    assert plain.latencies["itl"].samples == plain.output_tokens - sum(
        one.chunks[0][1] or 0 for one in found.requests if one.arm == "plain"
    )


@pytest.mark.slow
@pytest.mark.parametrize("protocol", ["triton-grpc", "triton-http"])
def test_the_model_of_a_bls_repository_is_found_by_asking_its_server(
    tiny_bls_server: TritonServer, tmp_path: Path, protocol: str
) -> None:
    """Its `tensorrt_llm` is there too, and takes token ids."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS[:4]))
    server = tiny_bls_server
    url = server.grpc_url if protocol == "triton-grpc" else f"http://{server.http_url}"
    options = BenchOptions(
        prompts, protocol, max_tokens=8, warm_up=1, metrics_url=server.metrics_url
    )
    run = bench(url, options)
    (arm,) = run.points[0].arms
    assert [endpoint.model for endpoint in run.endpoints] == ["tensorrt_llm_bls"]
    assert (arm.requests, arm.failed) == (4, 0)
    assert run.counters and all(check.matches for check in run.counters)
