"""What the alerts of a deployment look at, and what they expect, by its YAML and its report."""

from __future__ import annotations

from toolkit.config.schema import DeploymentConfig, ValidationConfig
from toolkit.records.report import ValidationReport
from toolkit.triton.package.deploy import PORTS, resource_name_of
from toolkit.triton.package.deploy_vllm import HTTP_PORT
from toolkit.triton.package.monitoring import EMBEDDED_JOB, Expected, Monitored

__all__ = ["expected_of", "monitored_of"]


def monitored_of(config: DeploymentConfig) -> Monitored | None:
    """What is looked at, as the stage `package` writes it; None where the container's own model
    answers, which counts nothing of it.
    """
    draft_len = config.speculation.longest_draft
    if config.vllm_engine is not None:
        return Monitored(resource_name_of(config.name), HTTP_PORT, draft_len, is_vllm=True)
    if config.trtllm_engine is None:
        return Monitored(EMBEDDED_JOB, PORTS["metrics"], draft_len)
    is_bls = config.capabilities.layout == "bls"
    if not is_bls and config.triton.model_py != "ours":
        return None
    return Monitored(
        resource_name_of(config.name),
        PORTS["metrics"],
        draft_len,
        counts_positions=is_bls,
        counts_waits=is_bls,
    )


def expected_of(report: ValidationReport, validation: ValidationConfig) -> Expected:
    """What the build measured and the YAML states. Of the greedy and the sampled acceptance the
    lower one is expected, since real traffic has both.

    A step that gives L tokens and makes the deployment S times as fast costs as much as L / S plain
    tokens, so speculation pays above L / S tokens per step.
    """
    pairs = [
        (acceptance.length, speedup.estimate)
        for acceptance, speedup in (
            (report.acceptance, report.speedup),
            (report.sampled.acceptance, report.sampled.speedup),
        )
        if acceptance is not None and acceptance.length is not None and speedup is not None
    ]
    load = validation.load
    limit_ms = None if load is None else load.max_ttft_p99_ms
    return Expected(
        acceptance_length=min((length for length, _ in pairs), default=None),
        break_even=max((length / speedup for length, speedup in pairs), default=None),
        ttft_p99_s=None if limit_ms is None else limit_ms / 1000,
    )
