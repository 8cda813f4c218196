"""The stage `validate`: serve the packaged repository, judge it, write the report. And the same
for one divergence again.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit.config.schema import DeploymentConfig, ValidationConfig
from toolkit.interfaces import Progress, StepEngine
from toolkit.pipeline.hashing import DigestMemo, digest_file, digest_value
from toolkit.pipeline.machine import machine, program
from toolkit.pipeline.sources import digest_sources
from toolkit.pipeline.stage import Finished, Stage
from toolkit.records.bench import BenchRun
from toolkit.records.build import CompiledEngine, Quality, StageCost
from toolkit.records.codec import to_json
from toolkit.records.plan import StageMemory
from toolkit.records.report import ValidationReport
from toolkit.words import Role
from toolkit.workflows.deployment import settled
from toolkit.workflows.folders import Workplace
from toolkit.workflows.serve import Servers, serve
from toolkit.workflows.stages.keys import versions

if TYPE_CHECKING:
    from toolkit.validate.reference import Reference
    from toolkit.validate.stage import References

__all__ = ["engine_reference", "validate_stage"]

MEASURED_LIBRARIES = ("torch", "tokenizers", "tritonclient", "nvidia-pytriton", "numpy")
REPORTED_LIBRARIES = (
    "torch",
    "transformers",
    "nvidia-modelopt",
    "tokenizers",
    "tritonclient",
    "nvidia-pytriton",
    "numpy",
)
SWEEP_REQUESTS = 32  # per arm, round and concurrency, unless more are needed to keep it up


def validate_stage(
    config: DeploymentConfig,
    roles: Sequence[str],
    workplace: Workplace,
    memo: DigestMemo,
    memory: Sequence[StageMemory],
    replaced: Sequence[str] = (),
) -> Stage:
    """memory: as planned, to stand in the report beside what was taken. replaced: of a rehearsal,
    what stands in for what.
    """
    from toolkit.validate import stage

    before = (
        "pair",
        *(f"quantize/{role}" for role in roles),
        *(f"compile/{role}" for role in roles),
        "package",
    )
    needs = (*before, "tune") if config.speculation.is_measured else before

    def quality_of(finished: Finished) -> Quality:
        records = {role: finished[f"quantize/{role}"].record for role in roles}
        return Quality(
            records["target"].quality, records["draft"].quality if "draft" in records else None
        )

    def parts(finished: Finished) -> Mapping[str, Any]:
        """The name is in it, since it stands in the report; so are our own sources and the
        machine, since they are measured.
        """
        return {
            "config": {
                "name": config.name,
                **config.validation.model_dump(exclude={"prompts"}),
                "stated": sorted(
                    config.validation.latency.model_fields_set
                    | config.validation.quality.model_fields_set
                ),
                **({"replaced": list(replaced)} if replaced else {}),
            },
            "inputs": {
                "repository": finished["package"].entry.digest,
                "engines": {role: finished[f"compile/{role}"].entry.digest for role in roles},
                "quality": digest_value(to_json(quality_of(finished))),
                "pair": digest_value(to_json(finished["pair"].record.findings)),
                "prompts": digest_file(config.validation.prompts, memo),
                **(
                    {"advice": finished["tune"].entry.digest}
                    if config.speculation.is_measured
                    else {}
                ),  # it stands in the report
                "toolkit_sources": digest_sources([__name__]),
            },
            "fingerprint": versions([*MEASURED_LIBRARIES, *_libraries_of_server(config)]),
            "machine": machine(),
        }

    def run(finished: Finished, out_dir: Path, progress: Progress) -> ValidationReport:
        return _measure(
            config, finished, quality_of(finished), memory, replaced, workplace, out_dir, progress
        )

    def decided(report: ValidationReport) -> bool:
        return report.verdict != "INCONCLUSIVE"

    return Stage("validate", stage.VERSION, ValidationReport, needs, parts, run, decided)


def _advice_digest(config: DeploymentConfig, finished: Finished) -> dict[str, str]:
    """It stands in the report."""
    is_measured = config.speculation.is_measured
    return {"advice": finished["tune"].entry.digest} if is_measured else {}


def _measure(
    config: DeploymentConfig,
    finished: Finished,
    quality: Quality,
    memory: Sequence[StageMemory],
    replaced: Sequence[str],
    workplace: Workplace,
    out_dir: Path,
    progress: Progress,
) -> ValidationReport:
    """Serve the packaged repository on free ports, judge it, write the report into out_dir."""
    from toolkit.pipeline.memory import PeakMemory
    from toolkit.report.render import write_report
    from toolkit.validate.replay import write_replay
    from toolkit.validate.stage import Origin, Served, validate

    started, repository = time.monotonic(), finished["package"].record
    stated = config.model_dump(mode="json", exclude_unset=True)
    deployed = settled(config, finished)
    can, speculates = config.capabilities, repository.max_draft_len > 0
    in_turns = can.plain_arm == "restart" and speculates
    log, began, peak_bytes = out_dir / "server.log", time.monotonic(), None
    references = _references(config, finished)
    with ExitStack() as running:
        endpoint, servers = running.enter_context(
            serve(deployed, repository.path, log_path=log, progress=progress, in_turns=in_turns)
        )
        if can.in_process:  # elsewhere the server's memory is the GPU's
            peak = running.enter_context(PeakMemory(servers.server.pid))
        rule = config.speculation.acceptance
        report = validate(
            Served(
                endpoint,
                repository.max_draft_len,
                can,
                rule=can.acceptance[0] if rule == "auto" else rule,
                counters=partial(_counters, servers) if can.has_counters else None,
                sweep=partial(
                    _sweep, config, servers, repository.model, progress, speculates and not in_turns
                ),
            ),
            _gates_of(config, speculates=deployed.speculation.is_enabled),
            references,
            Origin(
                config.name,
                quality,
                _published_engines(config, workplace, finished),
                _environment(config),
                findings=finished["pair"].record.findings,
                stages=_costs(finished),
                replaced=replaced,
            ),
            keep_replay=lambda replay: write_replay(
                out_dir / "replay", replace(replay, deployment=stated)
            ),
            progress=progress,
        )
    if can.in_process:
        peak_bytes = peak.bytes
    served = StageCost("serve", round(time.monotonic() - began, 3), peak_bytes, reused=False)
    itself = StageCost(
        "validate", round(time.monotonic() - started, 3), None, reused=False
    )  # its peak is known at its end
    report = replace(
        report,
        stages=(*report.stages, served, itself),
        memory=tuple(memory),
        advice=finished["tune"].record if config.speculation.is_measured else None,
    )
    write_report(report, out_dir)
    return report


def _gates_of(config: DeploymentConfig, *, speculates: bool) -> ValidationConfig:
    """Without the gate on the speed-up where the advisor was asked whether to speculate, and said
    no.
    """
    validation = config.validation
    if speculates or not config.speculation.is_enabled:
        return validation
    latency = validation.latency.model_copy(update={"min_speedup": None})
    return validation.model_copy(update={"latency": latency})


def _counters(servers: Servers) -> Mapping[str, float]:
    from toolkit.bench.counters import read_counters

    return read_counters(servers.server.metrics_url)


def _sweep(
    config: DeploymentConfig,
    servers: Servers,
    model: str,
    progress: Progress,
    against_plain: bool,
    levels: Sequence[int],
) -> BenchRun:
    """What is served at each of these many requests at a time."""
    from toolkit.bench.run import sweep

    validation, server = config.validation, servers.server
    return sweep(
        server.grpc_url,
        model,
        validation.prompts,
        levels,
        against_plain=against_plain,
        requests=min(validation.max_prompts, SWEEP_REQUESTS),
        max_tokens=validation.max_tokens,
        seed=validation.seed,
        metrics_url=server.metrics_url,
        progress=progress,
    )


def _published_engines(
    config: DeploymentConfig, workplace: Workplace, finished: Finished
) -> dict[str, CompiledEngine]:
    """By role, with the folders that people see."""
    folder = workplace.engines(config.name)
    return {
        role: replace(finished[f"compile/{role}"].record, path=folder / role)
        for role in config.models
    }


def _costs(finished: Finished) -> list[StageCost]:
    return [
        StageCost(name, done.seconds, done.peak_memory_bytes, done.reused)
        for name, done in finished.items()
    ]


def _references(config: DeploymentConfig, finished: Finished) -> References:
    """What judges the texts: the engine's own logits where this program can read them, and the
    unquantized checkpoint.
    """
    from toolkit.checkpoints.shape import read_shape
    from toolkit.inprocess import eos_token_ids
    from toolkit.validate.stage import References

    folders = {role: finished[f"compile/{role}"].record.path for role in config.models}
    own, engine = config.embedded_engine, None
    if own is not None:
        end_ids = eos_token_ids(folders["target"])
        engine = engine_reference(folders, own.threads)
    else:
        end_ids = read_shape(finished["quantize/target"].record.path).eos_token_ids
    return References(engine, *_source(config, folders["target"], end_ids))


def _environment(config: DeploymentConfig) -> dict[str, str]:
    """What the report says it was measured with."""
    facts = {name: value for name, value in program().items() if value is not None}
    libraries = [*REPORTED_LIBRARIES, *_libraries_of_server(config)]
    return {**facts, **machine(), **versions(libraries)}


def _libraries_of_server(config: DeploymentConfig) -> list[str]:
    return ["tensorrt_llm"] if config.capabilities.needs_container else []


def engine_reference(engines: Mapping[Role, Path], threads: int | None) -> Reference:
    """The compiled engines, loaded a second time when they are first asked."""
    from toolkit.engines.registry import loader
    from toolkit.inprocess import eos_token_ids
    from toolkit.validate.reference import reference_from_engine

    def load(role: Role) -> Callable[[], StepEngine]:
        return lambda: loader("torch").load(engines[role], threads=threads)

    target = engines["target"]
    return reference_from_engine(
        load("target"),
        lambda prompt: _codec(target).encode(prompt),
        eos_token_ids(target),
        _noise,
        load("draft") if "draft" in engines else None,
    )


def _source(
    config: DeploymentConfig, target: Path, end_ids: Sequence[int]
) -> tuple[Reference | None, bool]:
    """The unquantized checkpoint as a reference, where it is wanted and fits; whether the engine
    computes the same.
    """
    from toolkit.checkpoints.quantized import open_checkpoint
    from toolkit.pipeline.machine import memory_bytes
    from toolkit.validate.reference import reference_from_checkpoint

    wanted, folder = config.validation.parity.source, config.target.checkpoint
    if wanted == "never" or open_checkpoint(folder).quantization.quant_algo is not None:
        return None, False
    in_float32 = 2 * sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    if wanted == "auto" and in_float32 > memory_bytes() / 2:
        return None, False
    is_unquantized = config.target.quantization.quant_algo == "NO_QUANT"
    own = config.embedded_engine
    is_precise = own is not None and own.dtype in ("float32", "float64")

    def encode(prompt: str) -> list[int]:
        """By the engine's own tokenizer, opened when it is first used."""
        return list(_codec(target).encode(prompt))

    return reference_from_checkpoint(folder, encode, end_ids), is_unquantized and is_precise


@functools.cache
def _codec(engine_dir: Path) -> Any:
    from toolkit.speculative.text import TextCodec

    return TextCodec.from_file(engine_dir / "tokenizer.json")


def _noise(seed: int, position: int, vocab: int) -> Any:
    from toolkit.speculative.sampling import ExponentialRace

    return ExponentialRace(seed, vocab).gumbel(position)
