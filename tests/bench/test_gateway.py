"""Benches of the toolkit's own gateway, whose answers tell the acceptance in `usage`."""

from __future__ import annotations

import dataclasses
import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tests.support.gateways import STATISTICS, ScriptedBackend, gateway
from toolkit.bench.run import BenchOptions, bench
from toolkit.client import Statistics
from toolkit.openai_client import usage_counts
from toolkit.records.bench import BenchRun
from toolkit.report.bench import print_run

COUNT = 3
# Two steps, of three and two draft tokens; three and none of them are accepted.
BY_POSITION = dataclasses.replace(
    STATISTICS,
    verify_steps=2,
    drafted_by_position=(2, 2, 1),
    accepted_by_position=(1, 1, 1),
)


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"prompt {i}"}) + "\n" for i in range(COUNT)))
    return path


def measured(prompts: Path, statistics: Statistics, path: str = "/v1") -> BenchRun:
    with gateway(ScriptedBackend(statistics=statistics)) as served:
        return bench(f"{served.url}{path}", BenchOptions(prompts, warm_up=1, timeout_s=30.0))


@pytest.mark.parametrize("path", ["/v1", "/v1/completions"])
def test_acceptance_is_from_the_answers_of_the_gateway(prompts: Path, path: str) -> None:
    run = measured(prompts, BY_POSITION, path)
    (arm,) = run.points[0].arms
    acceptance = arm.acceptance
    assert (arm.failed, arm.acceptance_source) == (0, "requests")
    assert (acceptance.drafted, acceptance.accepted) == (5 * COUNT, 3 * COUNT)
    assert (acceptance.rate, acceptance.length) == (0.6, 2.5)
    assert [place.joint for place in acceptance.by_position] == [0.5, 0.5, 1.0]
    assert arm.acceptance_length_by_round == (2.5,)
    assert {(one.drafted, one.accepted, one.verify_steps) for one in run.requests} == {(5, 3, 2)}
    console = Console(file=io.StringIO(), width=160)
    print_run(run, console)
    assert isinstance(console.file, io.StringIO)
    assert "0.50 / 0.50 / 1.00" in console.file.getvalue()


def test_acceptance_is_told_by_the_domain_of_the_prompts_however_often_they_are_sent(
    tmp_path: Path,
) -> None:
    prompts, domains = tmp_path / "prompts.jsonl", ("code", "chat", "code")
    rows = [{"prompt": f"p{i}", "domain": domain} for i, domain in enumerate(domains)]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with gateway(ScriptedBackend(statistics=BY_POSITION)) as served:
        options = BenchOptions(prompts, warm_up=1, timeout_s=30.0, requests=5, rounds=2)
        run = bench(f"{served.url}/v1", options)
    (arm,) = run.points[0].arms
    everything, chat, code = arm.acceptance_slices
    assert (everything.of, everything.requests, everything.length) == ("prompt_tokens", 10, 2.5)
    # Of each round's five requests the prompts are 0, 1, 2, 0 and 1.
    assert [(part.of, part.name, part.requests) for part in (chat, code)] == [
        ("domain", "chat", 4),
        ("domain", "code", 6),
    ]
    console = Console(file=io.StringIO(), width=160)
    print_run(run, console)
    assert isinstance(console.file, io.StringIO)
    shown = [line.split() for line in console.file.getvalue().splitlines()]
    assert ["code", "6", "2.50", "0.60", *["0.50", "/", "0.50", "/", "1.00"]] in shown


def test_gaps_are_per_token_since_the_gateway_counts_each_event(prompts: Path) -> None:
    (arm,) = measured(prompts, STATISTICS).points[0].arms
    assert arm.latencies["itl"].samples
    assert arm.latencies["tpot"].samples


def test_what_the_gateway_s_server_does_not_tell_stays_unknown(prompts: Path) -> None:
    rate_alone = dataclasses.replace(STATISTICS, verify_steps=None)
    (arm,) = measured(prompts, rate_alone).points[0].arms
    assert (arm.acceptance_source, arm.acceptance.rate) == ("requests", 0.6)
    assert (arm.acceptance.length, arm.acceptance.by_position) == (None, ())
    nothing = dataclasses.replace(rate_alone, drafted=None, accepted=None)
    (arm,) = measured(prompts, nothing).points[0].arms
    assert (arm.acceptance_source, arm.acceptance.rate) == (None, None)


@pytest.mark.parametrize(
    "usage",
    [
        {"completion_tokens": 3},
        {"completion_tokens_details": None},
        {"completion_tokens_details": {"reasoning_tokens": 4}},
        {
            "completion_tokens_details": {
                "accepted_prediction_tokens": 0,
                "rejected_prediction_tokens": 0,
            }
        },
        {"speculation": True},
    ],
)
def test_servers_that_tell_no_drafts_tell_nothing(usage: dict[str, Any]) -> None:
    assert usage_counts(usage) == {}


@pytest.mark.parametrize("count", [-1, 1.0, "1", True])
def test_what_is_no_count_is_refused(count: Any) -> None:
    details = {"accepted_prediction_tokens": count, "rejected_prediction_tokens": 1}
    with pytest.raises(TypeError):
        usage_counts({"completion_tokens_details": details})
    with pytest.raises(TypeError):
        usage_counts({"speculation": {"verify_steps": count}})
    with pytest.raises(TypeError):
        usage_counts({"speculation": {"accepted_by_position": [1, count]}})
