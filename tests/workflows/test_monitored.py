"""The rules beside a report look at the same server as those in the repository, and expect what the
build has measured.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from tests.support import trtllm_packages, vllm_packages
from tests.support.deployments import base
from toolkit.config.schema import DeploymentConfig, LoadGates, ValidationConfig
from toolkit.records.report import ValidationReport
from toolkit.triton.package.monitoring import RULES_FILE, Expected, rules
from toolkit.workflows.monitored import expected_of, monitored_of


def config_of(kind: str, name: str, model_py: str = "ours") -> DeploymentConfig:
    sections = {
        "name": name,
        "speculation": {"max_draft_len": 3},
        "triton": {"model_py": model_py},
        "hardware": {},
    }
    return DeploymentConfig.model_validate({**base(kind), **sections})


@pytest.mark.parametrize("kind", ["pytorch", "vllm"])
def test_the_rules_of_the_repository_are_those_without_measurements(
    tmp_path: Path, kind: str
) -> None:
    if kind == "vllm":
        folder = vllm_packages.repository(tmp_path).path
        monitored = monitored_of(config_of(kind, "Pair"))
    else:
        folder = trtllm_packages.llmapi(tmp_path).path
        monitored = monitored_of(config_of(kind, "pair"))
    assert monitored is not None and monitored.job == "pair"
    assert yaml.safe_load((folder / RULES_FILE).read_text()) == rules(monitored, Expected())
    readme = (folder / "README.md").read_text()
    assert f"| `{RULES_FILE}` |" in readme and f"port {monitored.port} |" in readme


def test_the_container_s_own_model_is_not_looked_at(tmp_path: Path) -> None:
    assert monitored_of(config_of("pytorch", "pair", "container")) is None
    folder = trtllm_packages.llmapi(tmp_path, model_py="container").path
    assert not (folder / RULES_FILE).exists()
    assert "## Watch" not in (folder / "README.md").read_text()


def test_what_is_expected_is_what_was_measured(passing: ValidationReport) -> None:
    """At a speed-up of 1.5 with 3 tokens a step, a step costs as much as 2 plain tokens."""
    assert passing.speedup is not None and passing.acceptance is not None
    sampled = passing.sampled
    assert sampled.speedup is not None and sampled.acceptance is not None
    report = replace(
        passing,
        speedup=replace(passing.speedup, estimate=1.5),
        acceptance=replace(passing.acceptance, length=3.0),
        sampled=replace(
            sampled,
            speedup=replace(sampled.speedup, estimate=1.6),
            acceptance=replace(sampled.acceptance, length=2.4),
        ),
    )
    validation = ValidationConfig(prompts=Path("p"), load=LoadGates(rate=4.0, max_ttft_p99_ms=250))
    assert expected_of(report, validation) == Expected(2.4, 2.0, 0.25)


def test_without_speculation_nothing_is_expected(plain_only: ValidationReport) -> None:
    assert expected_of(plain_only, ValidationConfig(prompts=Path("p"))) == Expected()
