"""One report that passed and one with every kind of trouble, both measured on the scripted endpoint."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.endpoint import Fault, ScriptedEndpoint
from toolkit.config.schema import DistributionGates, LatencyGates, ValidationConfig
from toolkit.records import CompiledEngine, LayerError, Quality, QuantizationQuality, StageCost, ValidationReport
from toolkit.validate.stage import References, validate

HOSTILE = "<script>alert('x')</script> <img src=x onerror=y> & \"q\" | `c` @you [a](b)"
LAYERS = tuple(LayerError(f"model.layers.{i}.{name}", 0.01 + i / 500) for i in range(4) for name in ("q_proj", "down_proj"))
QUALITY = QuantizationQuality(5000, 0.0132, 0.2, 0.97, 4.31, 4.36, LAYERS)


def measured(folder: Path, endpoint: ScriptedEndpoint, prompts: list[str], max_draft_len: int = 4) -> ValidationReport:
    path = folder / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    engine = CompiledEngine(
        "target",
        Path("engines/tiny/target"),
        "torch",
        "eager",
        "float32",
        "cpu",
        "FP8",
        "FP8",
        "dequantized",
        8,
        64,
        128,
        4,
        512,
        9 << 20,
        ("a <note>",),
    )
    return validate(
        endpoint,
        ValidationConfig(
            prompts=path,
            max_tokens=8,
            rounds=1,
            max_rounds=1,
            latency=LatencyGates(max_itl_p90_ms=3.0),
            distribution=DistributionGates(enabled=False),
        ),
        name="tiny",
        max_draft_len=max_draft_len,
        acceptance="auto",
        references=References(endpoint.reference),
        quality=Quality(QUALITY, replace(QUALITY, layers=LAYERS[:2])),
        engines={"target": engine},
        environment={"cpu": "a <cpu> & more"},
        counters=endpoint.counters,
        stages=[StageCost("quantize", 41.2, 600 << 20, reused=False), StageCost("compile", 73.0, None, reused=True)],
    )


@pytest.fixture(scope="session")
def passing(tmp_path_factory: pytest.TempPathFactory) -> ValidationReport:
    return measured(tmp_path_factory.mktemp("passing"), ScriptedEndpoint(), [f"prompt {i}" for i in range(60)])


@pytest.fixture(scope="session")
def failing(tmp_path_factory: pytest.TempPathFactory) -> ValidationReport:
    prompts = [HOSTILE, *(f"prompt {i}" for i in range(59))]
    faults = [Fault(HOSTILE, 5), Fault(prompts[7], 3, margin=0.01), Fault(prompts[9], 2, seeded=True)]
    endpoint = ScriptedEndpoint(faults=faults, speculative_step_ms=9.0, jitter=0.4, counted_twice=True)
    return measured(tmp_path_factory.mktemp("failing"), endpoint, prompts)


@pytest.fixture(scope="session")
def plain_only(tmp_path_factory: pytest.TempPathFactory) -> ValidationReport:
    return measured(tmp_path_factory.mktemp("plain"), ScriptedEndpoint(), [f"prompt {i}" for i in range(12)], max_draft_len=0)
