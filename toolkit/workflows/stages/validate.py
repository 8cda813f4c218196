"""The stage `validate`: serve the packaged repository, judge it, and write the report."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit.config.schema import DeploymentConfig, LoadGates, ValidationConfig
from toolkit.interfaces import Progress, StepEngine
from toolkit.pipeline.hashing import DigestMemo, digest_file, digest_value
from toolkit.pipeline.machine import machine, program
from toolkit.pipeline.sources import digest_sources
from toolkit.pipeline.stage import Finished, Stage
from toolkit.pipeline.texts import template_part
from toolkit.records.bench import BenchRun
from toolkit.records.build import CompiledEngine, Quality, StageCost
from toolkit.records.codec import to_json
from toolkit.records.load import LoadRun
from toolkit.records.plan import StageMemory
from toolkit.records.report import ValidationReport
from toolkit.words import Role
from toolkit.workflows.deployment import check_prompt_lengths, with_advice
from toolkit.workflows.folders import Workplace
from toolkit.workflows.raw_texts import raw_text_findings
from toolkit.workflows.serve import Servers, plain_served, serve
from toolkit.workflows.serve_vllm import VllmServers
from toolkit.workflows.stages.keys import versions

if TYPE_CHECKING:
    from toolkit.validate.reference import Reference
    from toolkit.validate.stage import Origin, References

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
SWEEP_REQUESTS = 32  # per arm, round and concurrency; a high concurrency takes more


def validate_stage(
    config: DeploymentConfig,
    roles: Sequence[str],
    workplace: Workplace,
    memo: DigestMemo,
    memory: Sequence[StageMemory],
    replaced: Sequence[str] = (),
) -> Stage:
    """The stage `validate`.

    memory: as the plan predicts it; the report shows it beside the memory that was used. replaced:
    for a rehearsal, sentences about what its stand-ins replace.
    """
    from toolkit.validate import stage

    earlier = (
        "pair",
        *(f"quantize/{role}" for role in roles),
        *(f"compile/{role}" for role in roles),
        "package",
    )
    needs = (*earlier, "tune") if config.speculation.is_measured else earlier

    def quality_of(finished: Finished) -> Quality:
        records = {role: finished[f"quantize/{role}"].record for role in roles}
        return Quality(
            records["target"].served_quality,
            records["draft"].served_quality if "draft" in records else None,
        )

    def parts(finished: Finished) -> Mapping[str, Any]:
        """The name is a part, since the report contains it; so are our own sources and the
        machine, since the validation measures them.
        """
        stated = (
            config.validation.latency.model_fields_set | config.validation.quality.model_fields_set
        )
        return {
            "config": {
                "name": config.name,
                **config.validation.model_dump(exclude={"prompts"}),
                "stated": sorted(stated),
                **({"replaced": list(replaced)} if replaced else {}),
            },
            "inputs": {
                "repository": finished["package"].entry.digest,
                "engines": {role: finished[f"compile/{role}"].entry.digest for role in roles},
                "quality": digest_value(to_json(quality_of(finished))),
                "pair": digest_value(to_json(finished["pair"].record.findings)),
                "prompts": digest_file(config.validation.prompts, memo),
                **template_part(config.target.checkpoint, config.validation.prompts),
                **_raw_text_digest(config),
                **_advice_digest(config, finished),
                "toolkit_sources": digest_sources([__name__]),
            },
            "fingerprint": {
                **versions([*MEASURED_LIBRARIES, *_libraries_of_server(config)]),
                **_vllm_environment(config),
            },
            "machine": machine(),
        }

    def run(finished: Finished, out_dir: Path, progress: Progress) -> ValidationReport:
        from toolkit.report.render import write_report

        check_prompt_lengths(config)  # the prompts may be newer than the engines
        started = time.monotonic()
        origin = stage.Origin(
            config.name,
            quality_of(finished),
            _published_engines(config, workplace, finished),
            _environment(config),
            findings=(*finished["pair"].record.findings, *raw_text_findings(config)),
            stages=_costs(finished),
            replaced=replaced,
        )
        report, serving = _serve_and_judge(config, workplace, finished, origin, out_dir, progress)
        # The peak memory of this stage is known only when it has ended.
        own_seconds = round(time.monotonic() - started, 3)
        validating = StageCost("validate", own_seconds, None, reused=False)
        report = replace(
            report,
            stages=(*report.stages, serving, validating),
            memory=tuple(memory),
            advice=finished["tune"].record if config.speculation.is_measured else None,
        )
        write_report(report, out_dir)
        _write_rules(config, with_advice(config, finished), report, out_dir)
        return report

    def is_decided(report: ValidationReport) -> bool:
        return report.verdict != "INCONCLUSIVE"

    return Stage("validate", stage.VERSION, ValidationReport, needs, parts, run, is_decided)


def _raw_text_digest(config: DeploymentConfig) -> dict[str, str]:
    """The digest of what the report says about raw text; empty if it says nothing."""
    findings = raw_text_findings(config)
    return {"raw_text": digest_value(to_json(findings))} if findings else {}


def _write_rules(
    config: DeploymentConfig,
    deployed: DeploymentConfig,
    report: ValidationReport,
    out_dir: Path,
) -> None:
    """Write the alerts beside the report, with what the build has measured and the YAML states, for
    kinds whose server counts what they look at. A rehearsal measures nothing to compare with.
    """
    if report.replaced:
        return
    from toolkit.triton.package.monitoring import write_rules
    from toolkit.workflows.monitored import expected_of, monitored_of

    monitored = monitored_of(deployed)
    if monitored is not None:
        write_rules(monitored, expected_of(report, config.validation), out_dir)


def _advice_digest(config: DeploymentConfig, finished: Finished) -> dict[str, str]:
    """The digest of the advice, which the report contains; empty if there is none."""
    is_measured = config.speculation.is_measured
    return {"advice": finished["tune"].entry.digest} if is_measured else {}


def _serve_and_judge(
    config: DeploymentConfig,
    workplace: Workplace,
    finished: Finished,
    origin: Origin,
    out_dir: Path,
    progress: Progress,
) -> tuple[ValidationReport, StageCost]:
    """Serve the packaged repository on free ports and judge it: (the report, the cost of serving).

    The server's log and the replay files of divergences are written into out_dir.
    """
    from toolkit.pipeline.memory import PeakMemory
    from toolkit.validate.replay import write_replay
    from toolkit.validate.stage import Served, validate

    repository = finished["package"].record
    stated = config.model_dump(mode="json", exclude_unset=True)
    deployed = with_advice(config, finished)
    capabilities, speculates = config.capabilities, repository.max_draft_len > 0
    plain = plain_served(deployed, repository.path) if speculates else "by request"
    rule = config.speculation.acceptance
    log, began, peak_bytes = out_dir / "server.log", time.monotonic(), None
    references = _references(config, finished)
    with ExitStack() as running:
        endpoint, servers = running.enter_context(
            serve(
                deployed,
                repository.path,
                log_path=log,
                progress=progress,
                plain=plain,
                cache=workplace.vllm_cache,
            )
        )
        if capabilities.in_process:  # the memory of others is on GPUs, or in many processes
            peak = running.enter_context(PeakMemory(servers.server.pid))
        against_plain = speculates and plain != "in turns"
        report = validate(
            Served(
                endpoint,
                repository.max_draft_len,
                capabilities,
                rule=capabilities.acceptance[0] if rule == "auto" else rule,
                counters=servers.counters if capabilities.counted != "nothing" else None,
                sweep=partial(_sweep, config, servers, progress, against_plain),
                load=partial(_load, config, servers, progress, against_plain),
                has_second_server=plain == "beside",
            ),
            _gates_of(config, speculates=deployed.speculation.is_enabled),
            references,
            origin,
            chat=config.target.checkpoint,
            keep_replay=lambda replay: write_replay(
                out_dir / "replay", replace(replay, deployment=stated)
            ),
            progress=progress,
        )
    if capabilities.in_process:
        peak_bytes = peak.bytes
    seconds = round(time.monotonic() - began, 3)
    return report, StageCost("serve", seconds, peak_bytes, reused=False)


def _gates_of(config: DeploymentConfig, *, speculates: bool) -> ValidationConfig:
    """The gates, without the one on the speed-up if the advisor has decided not to speculate."""
    validation = config.validation
    if speculates or not config.speculation.is_enabled:
        return validation
    latency = validation.latency.model_copy(update={"min_speedup": None})
    return validation.model_copy(update={"latency": latency})


def _sweep(
    config: DeploymentConfig,
    servers: Servers | VllmServers,
    progress: Progress,
    against_plain: bool,
    levels: Sequence[int],
) -> BenchRun:
    """Measure the running server at each of these numbers of requests in flight."""
    from toolkit.bench.run import sweep

    validation, served, plain = config.validation, servers.address, servers.plain_address
    return sweep(
        served.url,
        served.model,
        validation.prompts,
        levels,
        protocol=served.protocol,
        baseline=None if plain is None else plain.url,
        against_plain=against_plain and plain is None,
        requests=min(validation.max_prompts, SWEEP_REQUESTS),
        max_tokens=validation.max_tokens,
        seed=validation.seed,
        chat=config.target.checkpoint,
        metrics_url=None if plain is not None else served.metrics_url,
        alone=servers.alone,
        progress=progress,
    )


def _load(
    config: DeploymentConfig,
    servers: Servers | VllmServers,
    progress: Progress,
    against_plain: bool,
    limits: LoadGates,
    start_rate: float,
) -> tuple[LoadRun, BenchRun | None]:
    """Measure the running server in an open loop. start_rate: where a search for the rate
    begins.
    """
    from toolkit.bench.load import run_load
    from toolkit.bench.run import BenchOptions, bench

    validation, served, plain = config.validation, servers.address, servers.plain_address
    options = BenchOptions(
        prompts=validation.prompts,
        max_prompts=validation.max_prompts,
        protocol=served.protocol,
        model=served.model,
        baseline=None if plain is None else plain.url,
        against_plain=against_plain and plain is None,
        max_tokens=validation.max_tokens,
        metrics_url=None if plain is not None else served.metrics_url,
        seed=validation.seed,
        chat=config.target.checkpoint,
        alone=servers.alone,
    )
    return run_load(
        partial(bench, served.url, progress=progress), options, limits, start_rate=start_rate
    )


def _published_engines(
    config: DeploymentConfig, workplace: Workplace, finished: Finished
) -> dict[str, CompiledEngine]:
    """Role -> its engine, with the path of the published folder instead of the store's."""
    folder = workplace.engines(config.name)
    return {
        role: replace(finished[f"compile/{role}"].record, path=folder / role)
        for role in config.models
    }


def _costs(finished: Finished) -> list[StageCost]:
    """The time and memory of each finished stage."""
    return [
        StageCost(name, done.seconds, done.peak_memory_bytes, done.reused)
        for name, done in finished.items()
    ]


def _references(config: DeploymentConfig, finished: Finished) -> References:
    """The references that judge the texts: the engine, if its logits can be read in this process,
    and the unquantized checkpoint.
    """
    from toolkit.checkpoints.shape import read_shape
    from toolkit.inprocess import eos_token_ids
    from toolkit.validate.stage import References

    folders = {role: finished[f"compile/{role}"].record.path for role in config.models}
    embedded, engine = config.embedded_engine, None
    if embedded is not None:
        end_ids = eos_token_ids(folders["target"])
        engine = engine_reference(folders, embedded.threads)
    else:
        end_ids = read_shape(finished["quantize/target"].record.path).eos_token_ids
    return References(engine, *_source(config, folders["target"], end_ids))


def _environment(config: DeploymentConfig) -> dict[str, str]:
    """Name -> value of what the report says about the program, the machine and the libraries."""
    facts = {name: value for name, value in program().items() if value is not None}
    libraries = [*REPORTED_LIBRARIES, *_libraries_of_server(config)]
    return {**facts, **machine(), **versions(libraries), **_vllm_environment(config)}


def _vllm_environment(config: DeploymentConfig) -> dict[str, str]:
    """The versions in the environment that vLLM runs in, which is not this program's own."""
    engine = config.vllm_engine
    if engine is None:
        return {}
    from toolkit.engines.vllm.environment import find_environment

    environment = find_environment(engine.python, version=engine.vllm)
    return {
        environment.distribution: environment.version,
        "torch of vLLM": environment.torch,
        "transformers of vLLM": environment.transformers,
    }


def _libraries_of_server(config: DeploymentConfig) -> list[str]:
    return ["tensorrt_llm"] if config.capabilities.needs_container else []


def engine_reference(engines: Mapping[Role, Path], threads: int | None) -> Reference:
    """The compiled engines as a reference. They are loaded a second time, at their first use."""
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
    """The unquantized checkpoint as a reference, and whether the engine computes the same as it.

    The reference is None if the YAML does not want it, if the checkpoint is quantized already, or
    if it does not fit into memory.
    """
    from toolkit.checkpoints.quantized import open_checkpoint
    from toolkit.pipeline.machine import memory_bytes
    from toolkit.validate.reference import reference_from_checkpoint

    source, folder = config.validation.parity.source, config.target.checkpoint
    if source == "never" or open_checkpoint(folder).quantization.quant_algo is not None:
        return None, False
    float32_bytes = 2 * sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    if source == "auto" and float32_bytes > memory_bytes() / 2:
        return None, False
    is_unquantized = config.target.quantization.quant_algo == "NO_QUANT"
    engine = config.embedded_engine or config.vllm_engine
    is_precise = engine is not None and engine.dtype in ("float32", "float64")
    if config.embedded_engine is not None and config.embedded_engine.kv_cache_dtype != "auto":
        is_precise = False  # keys and values are rounded

    def encode(prompt: str) -> list[int]:
        """Encode with the engine's own tokenizer, which is opened at its first use."""
        return list(_codec(target).encode(prompt))

    return reference_from_checkpoint(folder, encode, end_ids), is_unquantized and is_precise


@functools.cache
def _codec(engine_dir: Path) -> Any:
    from toolkit.speculative.text import TextCodec

    return TextCodec.from_file(engine_dir / "tokenizer.json")


def _noise(seed: int, position: int, vocab: int) -> Any:
    """The Gumbel noise [vocab] that a seeded request adds to its logits at this position."""
    from toolkit.speculative.sampling import ExponentialRace

    return ExponentialRace(seed, vocab).gumbel(position)
