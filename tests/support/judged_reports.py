"""One report that passed and one with every kind of trouble, both measured on the scripted
endpoint.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from tests.support.endpoint import Fault, ScriptedEndpoint
from tests.support.open_loop import load_run
from toolkit.config.schema import DistributionGates, LatencyGates, ValidationConfig
from toolkit.records.advice import (
    Advice,
    Alpha,
    Candidate,
    DraftCost,
    Grid,
    GridCell,
    ScheduleStep,
    SpeedupPrediction,
    TargetQuality,
)
from toolkit.records.bench import BenchArm, BenchPoint, Crossover
from toolkit.records.build import (
    CompiledEngine,
    LayerError,
    LayerKl,
    Quality,
    QuantizationQuality,
    StageCost,
)
from toolkit.records.measured import (
    Acceptance,
    AcceptanceSlice,
    AcceptanceWindow,
    Interval,
    Latency,
    Ratio,
    TooFew,
)
from toolkit.records.plan import MemoryItem, StageMemory
from toolkit.records.report import ValidationReport
from toolkit.validate.stage import Origin, References, Served, validate

HOSTILE = "<script>alert('x')</script> <img src=x onerror=y> & \"q\" | `c` @you [a](b)"
LAYERS = tuple(
    LayerError(f"model.layers.{i}.{name}", 0.01 + i / 500)
    for i in range(4)
    for name in ("q_proj", "down_proj")
)
LAYER_KL = tuple(LayerKl(f"model.layers.{i}", 1.5e-4 / (i + 1)) for i in range(4))
QUALITY = QuantizationQuality(
    5000, 0.0132, 0.2, 0.97, 4.31, 4.36, LAYERS, LAYER_KL, 500, 40, (0.011, 0.015), (0.96, 0.98)
)


def measured(
    folder: Path, endpoint: ScriptedEndpoint, prompts: list[str], max_draft_len: int = 4
) -> ValidationReport:
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
        Served(endpoint, max_draft_len, counters=endpoint.counters),
        ValidationConfig(
            prompts=path,
            max_tokens=8,
            rounds=1,
            max_rounds=1,
            latency=LatencyGates(max_itl_p90_ms=3.0),
            distribution=DistributionGates(enabled=False),
        ),
        References(endpoint.reference),
        Origin(
            "tiny",
            Quality(QUALITY, replace(QUALITY, layers=LAYERS[:2])),
            {"target": engine},
            {"cpu": "a <cpu> & more"},
            stages=[
                StageCost("quantize", 41.2, 600 << 20, reused=False),
                StageCost("compile", 73.0, None, reused=True),
            ],
        ),
    )


def passing_report(folder: Path) -> ValidationReport:
    return measured(folder, ScriptedEndpoint(), [f"prompt {i}" for i in range(60)])


def failing_report(folder: Path) -> ValidationReport:
    prompts = [HOSTILE, *(f"prompt {i}" for i in range(59))]
    faults = [
        Fault(HOSTILE, 5),
        Fault(prompts[7], 3, margin=0.01),
        Fault(prompts[9], 2, seeded=True),
    ]
    endpoint = ScriptedEndpoint(
        faults=faults, speculative_step_ms=9.0, jitter=0.4, counted_twice=True
    )
    return measured(folder, endpoint, prompts)


def plain_only_report(folder: Path) -> ValidationReport:
    prompts = [f"prompt {i}" for i in range(12)]
    return measured(folder, ScriptedEndpoint(), prompts, max_draft_len=0)


def prediction(mode: str, draft_len: int, *, measured: float | None = None) -> SpeedupPrediction:
    """Numbers that multiply out as the record says."""
    formula, dependence, verification, host = (
        1 + 0.5 * draft_len - 0.05 * draft_len**2,
        1.06,
        0.93,
        0.9 if mode == "greedy" else 0.8,
    )
    speedup = formula * dependence * verification * host
    return SpeedupPrediction(
        mode,
        1,
        draft_len,
        1 + 0.7 * draft_len,
        speedup * 400,
        speedup,
        speedup * 0.95,
        speedup * 1.06,
        formula,
        dependence,
        verification,
        host,
        measured,
        None if measured is None else measured * 0.94,
        None if measured is None else measured * 1.05,
    )


def sweep_arm(name: str, tokens_per_s: float | None, tpot_ms: float) -> BenchArm:
    latency = Latency(
        120, tpot_ms, tpot_ms, tpot_ms * 1.2, None, None, None, {"p99": TooFew(120, 1000)}, ()
    )
    latencies = dict.fromkeys(("ttft", "tpot", "itl", "icl", "e2e"), latency)
    nothing = Acceptance(None, None, 0, 0, 0, ())
    return BenchArm(
        name,
        120,
        0,
        {},
        4000,
        9.0,
        tokens_per_s,
        13.0,
        None,
        (),
        (),
        (),
        latencies,
        nothing,
        None,
        None,
        None,
    )


def sweep_point(concurrency: int, plain: float, ratio: float) -> BenchPoint:
    arms = (sweep_arm("plain", plain, 2.5), sweep_arm("speculative", plain * ratio, 2.5 / ratio))
    return BenchPoint(
        concurrency, None, 3, arms, (Ratio("speed", ratio, ratio * 0.95, ratio * 1.05),)
    )


def advised_report(failing: ValidationReport) -> ValidationReport:
    """Everything that a report can hold: also what the advisor found, a sweep, and the plan's
    memory.
    """
    candidate = Candidate(
        "a <draft>",
        "draft_target",
        4,
        1.62,
        1.5,
        1.7,
        3.1,
        2.9,
        3.3,
        1.9,
        0.42,
        (
            Alpha("greedy", None, 0.71, 0.69, 0.73, 4000),
            Alpha("rejection", "code & <b>", 0.68, 0.6, 0.75, 900),
        ),
        {"greedy": (0.75, 0.72, 0.7, None)},
        {},
        (
            *(prediction("greedy", k, measured=1.7 if k == 4 else None) for k in range(1, 9)),
            *(prediction("sampled", k) for k in range(1, 9)),
        ),
    )
    advice = Advice(
        True,
        True,
        candidate.name,
        "draft_target",
        candidate.name,
        4,
        (ScheduleStep(1, 4), ScheduleStep(4, 2), ScheduleStep(8, 0)),
        4,
        "Draft 4 tokens with a <draft>: 1.62 times plain.",
        "measured",
        0.8,
        "rejection",
        60,
        4000,
        0.95,
        21.0,
        (candidate, replace(candidate, name="ngram", drafter="ngram", speedup=0.97)),
    )
    points = tuple(
        sweep_point(n, 400 * n**0.6, ratio)
        for n, ratio in ((1, 1.6), (2, 1.4), (4, 1.1), (8, 0.82))
    )
    items = (
        MemoryItem("target weights", 90 << 20, "22.1 M parameters"),
        MemoryItem("runtime", 1 << 29, "assumed: libraries"),
    )
    memory = (
        StageMemory(
            "quantize",
            "the machine",
            (MemoryItem("target as it is", 88 << 20, "22.1 M parameters"),),
            24 << 30,
        ),
        StageMemory("serve", "the machine", items, 24 << 30),
        StageMemory("compile", "each GPU", items, 1 << 30),
    )
    stages = (*failing.stages, StageCost("serve", 61.0, 900 << 20, reused=False))

    def interval(speed: float) -> Interval:
        return Interval(speed, speed * 0.97, speed * 1.02)

    grid = Grid(
        tuple(
            GridCell(
                target,
                draft,
                Interval(0.7, 0.68, 0.72),
                3,
                Interval(2.4, 2.3, 2.5),
                interval(speed),
                Interval(1.5, 1.4, 1.6),
                best,
            )
            for target, draft, speed, best in (
                ("NO_QUANT", "NO_QUANT", 500.0, False),
                ("NO_QUANT", "FP8", 520.0, False),
                ("W8A8_SQ_PER_CHANNEL", "NO_QUANT", 690.0, False),
                ("W8A8_SQ_PER_CHANNEL", "W8A8_SQ_PER_CHANNEL", 720.0, True),
                ("FP8", "FP8", 900.0, False),
            )
        ),
        tuple(
            TargetQuality(algo, Interval(kl, kl * 0.9, kl * 1.1), Interval(9.0, 8.9, 9.1), 5000)
            for algo, kl in (("NO_QUANT", 0.0), ("W8A8_SQ_PER_CHANNEL", 0.002), ("FP8", 0.2))
        ),
        (DraftCost("NO_QUANT", "FP8", 0.01, 0.1, Interval(1.04, 1.01, 1.07), "pays"),),
        "measured",
        (),
        0.05,
        60,
        0.95,
    )
    windows = tuple(
        AcceptanceWindow(
            20.0 * number,
            20.0 * (number + 1),
            90,
            0.6 - 0.02 * number,
            2.8 - 0.1 * number,
            tuple((0.85 - 0.02 * number) ** position for position in range(1, 5)),
        )
        for number in range(6)
    )
    of_domains = tuple(
        AcceptanceSlice("domain", 10, 60, 30, 0.5, length, name, (0.8, 0.6, 0.4, 0.3))
        for name, length in (
            ("chat <b>", 2.1),
            ("code", 3.4),
            ("a very long name of a domain", 1.4),
        )
    )
    of_lengths = tuple(
        AcceptanceSlice("prompt_tokens", least, most, 60, 0.5, length, "", (0.8, 0.6, 0.4, 0.3))
        for least, most, length in ((8, 120, 2.9), (140, 400, 2.5))
    )
    load = load_run()
    assert load.point is not None
    plain, speculative = load.point.arms
    deployed = replace(speculative, acceptance_over_time=windows)
    crossover = Crossover(4, 8, 5.3, "faster up to 4 at a time, slower from 8 on")
    return replace(
        failing,
        advice=advice,
        grid=grid,
        loads=points,
        crossover=crossover,
        load=replace(load, point=replace(load.point, arms=(plain, deployed))),
        acceptance_over_time=windows[:4],
        acceptance_slices=(*of_lengths, *of_domains),
        memory=memory,
        stages=stages,
    )
