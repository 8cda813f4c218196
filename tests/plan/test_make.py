"""A plan is made from whatever can be read of a deployment, and says whether it can work."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tests.support.deployments import config_of
from toolkit.config.load import load_config
from toolkit.facts.models import CONFIGS
from toolkit.plan.make import gpu_from_driver_name, make_plan
from toolkit.records.codec import from_json, to_json
from toolkit.records.plan import Plan
from toolkit.report.plan import print_plan

FOLDER = Path(__file__).parents[2] / "configs"


def printed(plan: Plan) -> str:
    out = io.StringIO()
    print_plan(plan, Console(width=128, file=out))
    return "".join(f"{line.rstrip()}\n" for line in out.getvalue().splitlines())


def test_the_quickstart_can_work() -> None:
    plan = make_plan(load_config(FOLDER / "quickstart.yaml"))
    assert plan.possible
    assert "it can work" in printed(plan)
    assert plan.memory[-1].place == "the machine"


def test_a_plan_that_cannot_work_says_how_many_reasons_there_are() -> None:
    text = printed(
        make_plan(config_of("pytorch", triton__layout="bls", engine__tokens_per_block=5))
    )
    assert "it cannot work: 2 reasons above" in text
    assert "[layout-of-flow]" in text


@pytest.mark.parametrize(
    "kind, keys, words",
    [
        ("torch", {"enabled": False}, "draft_target, 4 tokens a step"),
        ("torch", {}, "draft_target, 4 tokens a step at most, chosen per request while it runs"),
        (
            "pytorch",
            {"min_acceptance_length": 1.3},
            "draft_target, 4 tokens a step, until drafting stops for good",
        ),
    ],
)
def test_lengths_that_adapt_are_no_fixed_ones(kind: str, keys: dict[str, Any], words: str) -> None:
    config = config_of(kind, speculation__max_draft_len=4, speculation__adaptive=keys)
    assert make_plan(config).summary["speculation"] == words


@pytest.mark.parametrize(
    "limits, words",
    [
        (
            {"rate": 10},
            "10 requests/s, poisson, to both arms in turns: 4 min of sending, and up to 9 min",
        ),
        (
            {"rate": 2, "arrivals": "constant"},
            "2 requests/s, constant, to both arms in turns: 10 min",
        ),
        (
            {"rate": "auto", "goodput": {"ttft": 300}},
            "the highest rate that keeps goodput, looked for in at most 3 min",
        ),
    ],
)
def test_an_open_loop_is_announced_with_its_rate_and_length(
    limits: dict[str, Any], words: str
) -> None:
    assert words in make_plan(config_of("torch", validation__load=limits)).summary["open loop"]
    assert "open loop" not in make_plan(config_of("torch")).summary


def test_a_bare_config_json_is_enough(tmp_path: Path) -> None:
    name = "meta-llama/Llama-3.3-70B-Instruct"
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS[name]))
    bare = make_plan(config_of("pytorch", target__checkpoint=str(tmp_path)))
    assert bare.serving == make_plan(config_of("pytorch")).serving


def test_a_plan_round_trips_through_json() -> None:
    plan = make_plan(config_of("engine"))
    assert from_json(Plan, json.loads(json.dumps(to_json(plan)))) == plan


@pytest.mark.parametrize(
    "name, row",
    [
        ("NVIDIA H200", "H200"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H100 NVL", "H100-NVL"),
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("NVIDIA A100-PCIE-40GB", "A100-40GB"),
        ("NVIDIA A10", "A10"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA L4", "L4"),
        ("NVIDIA GeForce RTX 4090", "RTX4090"),
        ("NVIDIA GH200 480GB", "GH200"),
        ("NVIDIA B200", "B200"),
        ("NVIDIA L40", None),
        ("Tesla T4", None),
    ],
)
def test_the_driver_s_name_finds_the_row(name: str, row: str | None) -> None:
    gpu = gpu_from_driver_name(name)
    assert (None if gpu is None else gpu.name) == row
