"""The stage `validate`: serve the packaged repository, judge it, write the report. And the same
for one divergence again.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit.config.schema import DeploymentConfig, TorchEngineConfig, ValidationConfig
from toolkit.interfaces import Progress, StepEngine
from toolkit.pipeline.hashing import DigestMemo, digest_file, digest_value
from toolkit.pipeline.machine import machine, program
from toolkit.pipeline.sources import digest_sources
from toolkit.pipeline.stage import Finished, Stage
from toolkit.records.build import Quality, StageCost, TritonRepository
from toolkit.records.codec import to_json
from toolkit.records.report import ValidationReport
from toolkit.workflows.deployment import measures, models_of, settled, speculation_of
from toolkit.workflows.folders import Workplace
from toolkit.workflows.serve import Servers, abilities_of, deployment_of
from toolkit.workflows.stages.keys import versions

if TYPE_CHECKING:
    from toolkit.triton.process.server import TritonServer
    from toolkit.validate.reference import Reference

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
    replaced: Sequence[str] = (),
) -> Stage:
    from toolkit.validate import stage

    before = (
        "pair",
        *(f"quantize/{role}" for role in roles),
        *(f"compile/{role}" for role in roles),
        "package",
    )
    needs = (*before, "tune") if measures(config) else before

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
                    {"advice": finished["tune"].entry.digest} if measures(config) else {}
                ),  # it stands in the report
                "toolkit_sources": digest_sources([__name__]),
            },
            "fingerprint": versions(
                [*MEASURED_LIBRARIES, *(["tensorrt_llm"] if config.engine.kind != "torch" else [])]
            ),
            "machine": machine(),
        }

    def run(finished: Finished, out_dir: Path, progress: Progress) -> ValidationReport:
        return _measure(
            config, finished, quality_of(finished), replaced, workplace, out_dir, progress
        )

    def decided(report: ValidationReport) -> bool:
        return report.verdict != "INCONCLUSIVE"

    return Stage("validate", stage.VERSION, ValidationReport, needs, parts, run, decided)


def _measure(
    config: DeploymentConfig,
    finished: Finished,
    quality: Quality,
    replaced: Sequence[str],
    workplace: Workplace,
    out_dir: Path,
    progress: Progress,
) -> ValidationReport:
    """Serve the packaged repository on free ports, judge it, write the report into out_dir."""
    from toolkit.checkpoints.shape import read_shape
    from toolkit.client import Client
    from toolkit.pipeline.memory import PeakMemory
    from toolkit.plan.make import make_plan
    from toolkit.report.render import write_report
    from toolkit.triton.process.server import TritonServer, private_folder
    from toolkit.validate.replay import write_replay
    from toolkit.validate.stage import Alternating, References, validate

    started, repository = time.monotonic(), finished["package"].record
    engines = {role: finished[f"compile/{role}"].record for role in models_of(config)}
    folders = {role: engine.path for role, engine in engines.items()}
    stated = config.model_dump(mode="json", exclude_unset=True)
    judged: dict[str, Any] = {
        "name": config.name,
        "max_draft_len": repository.max_draft_len,
        "quality": quality,
        "keep_replay": lambda found: write_replay(
            out_dir / "replay", replace(found, deployment=stated)
        ),
        "engines": {
            role: replace(engine, path=workplace.engines(config.name) / role)
            for role, engine in engines.items()
        },
        "preceding": finished["pair"].record.findings,
        "stages": [
            StageCost(name, done.seconds, done.peak_memory_bytes, done.reused)
            for name, done in finished.items()
        ],
        "replaced": replaced,
        "progress": progress,
    }
    log, began, peak_bytes = out_dir / "server.log", time.monotonic(), None
    if isinstance(config.engine, TorchEngineConfig):
        source, same_precision = _source(config, folders["target"])
        with (
            TritonServer(
                repository.path, config.triton.on_free_ports, log_path=log, progress=progress
            ) as server,
            PeakMemory(server.pid) as peak,
            Client(server.grpc_url, model=repository.model) as client,
        ):
            report = validate(
                client,
                _asked_of(config, finished),
                acceptance=config.speculation.acceptance,
                references=References(
                    engine_reference(folders, config.engine.threads), source, same_precision
                ),
                environment=_environment(),
                **_watched(config, repository, lambda: server, progress),
                **judged,
            )
        peak_bytes = peak.bytes
    else:
        end_ids = read_shape(finished["quantize/target"].record.path).eos_token_ids
        source, same_precision = _source(config, folders["target"], end_ids)
        with (
            private_folder() as scratch,
            Servers(
                repository.path,
                deployment_of(settled(config, finished)),
                config.triton,
                scratch,
                log,
                progress,
            ) as servers,
        ):
            in_turns = config.engine.kind == "trtllm_pytorch" and repository.max_draft_len > 0
            watched = _watched(
                config, repository, lambda: servers.server, progress, against_plain=not in_turns
            )
            if config.engine.kind == "trtllm_pytorch":
                del watched[
                    "counters"
                ]  # LLM() has none of ours, and every start would begin them anew
            report = validate(
                Alternating(servers.start) if in_turns else servers.start("served"),
                _asked_of(config, finished),
                # Both runtimes keep a draft that equals what the target samples, unless they are
                # told otherwise.
                acceptance="sample_match"
                if config.speculation.acceptance == "auto"
                else config.speculation.acceptance,
                references=References(None, source, same_precision),
                can=abilities_of(config),
                environment={**_environment(), **versions(["tensorrt_llm"])},
                **watched,
                **judged,
            )
    served = StageCost("serve", round(time.monotonic() - began, 3), peak_bytes, reused=False)
    itself = StageCost(
        "validate", round(time.monotonic() - started, 3), None, reused=False
    )  # its peak is known at its end
    report = replace(
        report,
        stages=(*report.stages, served, itself),
        memory=make_plan(config).memory,
        advice=finished["tune"].record if measures(config) else None,
    )
    write_report(report, out_dir)
    return report


def _asked_of(config: DeploymentConfig, finished: Finished) -> ValidationConfig:
    """The gates: without one on the speed-up where the advisor was asked whether to speculate,
    and said no.
    """
    if speculation_of(config, finished).kind != "none" or config.speculation.kind == "none":
        return config.validation
    latency = config.validation.latency.model_copy(update={"min_speedup": None})
    return config.validation.model_copy(update={"latency": latency})


def _watched(
    config: DeploymentConfig,
    repository: TritonRepository,
    server: Callable[[], TritonServer],
    progress: Progress,
    *,
    against_plain: bool = True,
) -> dict[str, Any]:
    """The arguments of `validate` that look at the server itself: its counters, and its speed
    under load.
    """
    from toolkit.bench.counters import read_counters
    from toolkit.bench.run import sweep

    return {
        "counters": lambda: read_counters(server().metrics_url),
        "sweep": lambda levels: sweep(
            server().grpc_url,
            repository.model,
            config.validation.prompts,
            levels,
            against_plain=against_plain and repository.max_draft_len > 0,
            requests=min(config.validation.max_prompts, SWEEP_REQUESTS),
            max_tokens=config.validation.max_tokens,
            seed=config.validation.seed,
            metrics_url=server().metrics_url,
            progress=progress,
        ),
    }


def _environment() -> dict[str, str]:
    """What the report says it was measured with."""
    facts = {name: value for name, value in program().items() if value is not None}
    return {**facts, **machine(), **versions(REPORTED_LIBRARIES)}


def engine_reference(engines: Mapping[str, Path], threads: int | None) -> Reference:
    """The compiled engines, loaded a second time when they are first asked."""
    from toolkit.engines.registry import loader
    from toolkit.inprocess import eos_token_ids
    from toolkit.validate.reference import reference_from_engine

    def load(role: str) -> Callable[[], StepEngine]:
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
    config: DeploymentConfig, target: Path, end_ids: Sequence[int] | None = None
) -> tuple[Reference | None, bool]:
    """The unquantized checkpoint as a reference, where it is wanted and fits; whether the engine
    computes the same. end_ids: None where the engine says itself what ends a text.
    """
    from toolkit.checkpoints.quantized import open_checkpoint
    from toolkit.inprocess import eos_token_ids
    from toolkit.pipeline.machine import memory_bytes
    from toolkit.validate.reference import reference_from_checkpoint

    asked, folder = config.validation.parity.source, config.target.checkpoint
    if asked == "never" or open_checkpoint(folder).quantization.quant_algo is not None:
        return None, False
    in_float32 = 2 * sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    if asked == "auto" and in_float32 > memory_bytes() / 2:
        return None, False
    unquantized = config.target.quantization.quant_algo == "NO_QUANT"
    engine = config.engine
    same_precision = (
        unquantized
        and isinstance(engine, TorchEngineConfig)
        and engine.dtype in ("float32", "float64")
    )
    codec = lambda prompt: _codec(target).encode(prompt)  # noqa: E731 - the engine's own tokenizer, opened when first used
    return reference_from_checkpoint(
        folder, codec, eos_token_ids(target) if end_ids is None else end_ids
    ), same_precision


@functools.cache
def _codec(engine_dir: Path) -> Any:
    from toolkit.speculative.text import TextCodec

    return TextCodec.from_file(engine_dir / "tokenizer.json")


def _noise(seed: int, position: int, vocab: int) -> Any:
    from toolkit.speculative.sampling import ExponentialRace

    return ExponentialRace(seed, vocab).gumbel(position)
