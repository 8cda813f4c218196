"""The pipeline itself: which stages there are, what each one's key is made of, and where results are published.

    pair -> quantize/{target,draft} -> compile/{target,draft} -> package -> validate

This is one of the two places where the working packages meet (`serving` is the other). Stage functions are imported when they
are called, and keys are made of versions that can be read without importing a heavy library, so that a build that finds nothing
to do takes about a second.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import sys
import tempfile
import time
import typing
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit.config.schema import (
    DeploymentConfig,
    ModelConfig,
    QuantAlgo,
    SpeculationConfig,
    TorchEngineConfig,
    TrtEngineConfig,
    ValidationConfig,
)
from toolkit.errors import BackendUnavailable, CheckpointError, Fault, PlanError, StoreError, UsageError
from toolkit.interfaces import EngineSpec, Fingerprint, Progress, StepEngine, TensorRtLlmSpec
from toolkit.pipeline.files import store_error, write_whole
from toolkit.pipeline.hashing import DigestMemo, digest_file, digest_tree, digest_value
from toolkit.pipeline.machine import gpus, machine, program
from toolkit.pipeline.run import Explanation, Observer, explain, run_stages, upto
from toolkit.pipeline.stage import Done, Finished, Stage
from toolkit.pipeline.store import Store
from toolkit.records import (
    Advice,
    CompiledEngine,
    Grid,
    PairProof,
    Quality,
    QuantizedCheckpoint,
    StageCost,
    TritonRepository,
    ValidationReport,
    to_json,
)
from toolkit.reporting import publish_report
from toolkit.serving_trtllm import Machine, Servers, abilities_of, check_servable, deployment_of
from toolkit.tuning import Way, grid_stage, tune_stage

if TYPE_CHECKING:
    from toolkit.triton.server import TritonServer
    from toolkit.validate.reference import Reference
    from toolkit.validate.replay import Replay, Replayed

__all__ = [
    "STAGES",
    "Built",
    "Workplace",
    "build",
    "embedded",
    "engine_spec",
    "explain_build",
    "in_container",
    "models_of",
    "rehearsal_stages",
    "replay_divergence",
    "speculation_of",
    "stages_of",
    "tp_size_of",
    "tune",
    "tune_grid",
]

STAGES = ("pair", "quantize", "compile", "package", "validate")
PACKAGED = STAGES[STAGES.index("package") :]
SOURCES = Path(__file__).parent
SERVED_SOURCES = (
    "serving.py",
    "serving_trtllm.py",
    "benching.py",
    "client.py",
    "interfaces.py",
    "checkpoints/*",
    "engines/*",
    "speculative/*",
    "triton/*",
    "validate/*",
)
SHIPPED_SOURCES = ("client.py", "errors.py", "interfaces.py", "speculative/*.py", "triton/*.py", "facts/triton_tensors.py")
MEASURED_LIBRARIES = ("torch", "tokenizers", "tritonclient", "nvidia-pytriton", "numpy")
REPORTED_LIBRARIES = ("torch", "transformers", "nvidia-modelopt", "tokenizers", "tritonclient", "nvidia-pytriton", "numpy")

SWEEP_REQUESTS = 32  # per arm, round and concurrency, unless more are needed to keep it up
REAL_KIND, PACKAGE_TRTLLM = "-trtllm", "package/trtllm"  # of a rehearsal, beside the embedded engine's
REMEMBERED = 64  # fingerprints of engine backends


@dataclass(frozen=True, slots=True)
class Workplace:
    """Where results go: the folders beneath the one that the command runs in."""

    root: Path

    @property
    def store(self) -> Path:
        return self.root / "build" / "store"

    def engines(self, name: str) -> Path:
        return self.root / "engines" / name

    def repository(self, name: str) -> Path:
        return self.root / "triton_repo" / name

    def report(self, name: str) -> Path:
        return self.root / "build" / "reports" / name

    def advice(self, name: str) -> Path:
        return self.root / "build" / "advice" / name

    def rehearsal(self, name: str) -> Path:
        """What a rehearsal makes up."""
        return self.root / "build" / "rehearsals" / name

    def grid(self, name: str) -> Path:
        return self.root / "build" / "grid" / name


@dataclass(frozen=True, slots=True)
class Built:
    """What a build did. published: the folders that hold its results; changed: whether anything ran or was put there anew."""

    stages: dict[str, Done]
    published: tuple[Path, ...]
    changed: bool

    @property
    def report(self) -> ValidationReport | None:
        return self.stages["validate"].record if "validate" in self.stages else None

    @property
    def not_executed(self) -> dict[str, tuple[str, ...]]:
        """Stage -> what of its engine no GPU has executed; of engines for TensorRT-LLM alone."""
        records = {name: done.record for name, done in self.stages.items() if isinstance(done.record, CompiledEngine)}
        return {name: record.tensorrt_llm.not_executed for name, record in records.items() if record.tensorrt_llm is not None}


def build(
    config: DeploymentConfig,
    workplace: Workplace,
    observer: Observer,
    store: Store,
    *,
    until: str = "validate",
    fresh: Collection[str] = (),
    stages: Sequence[Stage] | None = None,
    here: Machine | None = None,
) -> Built:
    """Run the stages that `until` needs and are not in the store, and publish what people use.

    fresh: stages that run in any case. stages: others than `stages_of(config)`. here: what there is to serve with, None for
    what this machine has. Raises what the stages raise.
    """
    if stages is None and until in PACKAGED:
        _refuse_impossible(config)
        if until == "validate":
            check_servable(config, here or Machine())  # before hours of downloading and quantizing
    chosen = upto(stages or stages_of(config, workplace, store.memo), until)
    if stages is None and until in ("compile", "package"):
        _check_builder(config, workplace, store)
    finished: dict[str, Done] = {}
    published: list[Path] = []
    changed = False
    for name, done in run_stages(chosen, store, config.name, observer, fresh=fresh):
        finished[name] = done
        changed |= not done.reused
        for destination, parts in _publications(config, workplace):
            if name in parts.values() and set(parts.values()) <= set(finished):
                entries = {folder: finished[stage].entry for folder, stage in parts.items()}
                changed |= store.publish(entries, destination)
                published.append(destination)
        if name == "validate":
            changed |= publish_report(store, config.name, workplace.report(config.name), observer)
            published.append(workplace.report(config.name))
    return Built(finished, tuple(published), changed)


def explain_build(config: DeploymentConfig, workplace: Workplace, store: Store) -> list[Explanation]:
    """What `build` would do, and why."""
    stages = stages_of(config, workplace, store.memo, download=False)
    try:
        check_servable(config, Machine())
    except UsageError:
        stages = upto(stages, "package")
    return explain(stages, store, config.name)


def _publications(config: DeploymentConfig, workplace: Workplace) -> Iterator[tuple[Path, dict[str, str]]]:
    """Folder -> its subfolders and the stages that they come from."""
    yield workplace.engines(config.name), {role: f"compile/{role}" for role in models_of(config)}
    yield workplace.engines(config.name + REAL_KIND), {role: f"compile/{role}{REAL_KIND}" for role in models_of(config)}
    yield workplace.advice(config.name), {"": "tune"}
    yield workplace.repository(config.name), {"": "package"}
    yield workplace.repository(config.name + REAL_KIND), {"": PACKAGE_TRTLLM}


def models_of(config: DeploymentConfig) -> dict[str, ModelConfig]:
    models = {"target": config.target}
    return models if config.draft is None else {**models, "draft": config.draft}


def stages_of(config: DeploymentConfig, workplace: Workplace, memo: DigestMemo, *, download: bool = True) -> list[Stage]:
    """All stages of a deployment, in order; checkpoints that are hub ids are downloaded, or only looked for.

    Raises PlanError for what cannot work, UsageError for calibration or prompt files that cannot
    be used.
    """
    _refuse_impossible(config)
    _check_inputs(config)
    if any(model.hub_id is not None for model in models_of(config).values()):
        config = _on_this_machine(config, download=download)
        _refuse_impossible(config)  # as the files say
    roles = tuple(models_of(config))
    return [
        _pair(config, memo),
        *(_quantize(config, role, memo) for role in roles),
        *(_compile(config, role, workplace) for role in roles),
        *([tune_stage(config, embedded(config), memo, _own_way(config))] if _measures(config) else []),
        _package(config, roles) if config.engine.kind == "torch" else _package_trtllm(config, roles),
        _validate(config, roles, workplace, memo),
    ]


def rehearsal_stages(
    asked: DeploymentConfig, served: DeploymentConfig, workplace: Workplace, memo: DigestMemo, replaced: Sequence[str]
) -> list[Stage]:
    """The stages of a rehearsal: `asked` decides what is quantized and how, `served` what is compiled, packaged and measured.

    The engine's own stage runs too where this machine can do it. replaced: for the report. Raises UsageError as `stages_of`.
    """
    _check_inputs(served)
    roles = tuple(models_of(served))
    real: list[Stage] = []
    if asked.engine.kind != "torch":
        compiled = [_compile(asked, role, workplace) for role in roles]
        if isinstance(asked.engine, TrtEngineConfig) and not _builds_here(asked):
            compiled = [_unbuilt(stage, engine_spec(asked, role)) for stage, role in zip(compiled, roles, strict=True)]
        real = [_beside(stage) for stage in (*compiled, _package_trtllm(asked, roles))]
    validate = _validate(served, roles, workplace, memo, replaced)
    return [
        _pair(asked, memo),
        *(_quantize(asked, role, memo) for role in roles),
        *real,
        *(_compile(served, role, workplace) for role in roles),
        _package(served, roles),
        replace(validate, needs=(*validate.needs, *(stage.name for stage in real))),
    ]


def _beside(stage: Stage) -> Stage:
    """A stage of the real kind of engine, beside the embedded one's of the same name; it sees its own kind's stages alone."""

    def own(name: str) -> str:
        return PACKAGE_TRTLLM if name == "package" else f"{name}{REAL_KIND}" if name.startswith("compile/") else name

    def seen(finished: Finished) -> Finished:
        return {**finished, **{need: finished[own(need)] for need in stage.needs}}

    return replace(
        stage,
        name=own(stage.name),
        needs=tuple(map(own, stage.needs)),
        parts=lambda finished: stage.parts(seen(finished)),
        run=lambda finished, out_dir, progress: stage.run(seen(finished), out_dir, progress),
    )


def _unbuilt(stage: Stage, spec: EngineSpec) -> Stage:
    """The same without trtllm-build."""

    def run(finished: Finished, out_dir: Path, progress: Progress) -> CompiledEngine:
        from toolkit.engines.trt_engine import TrtEngineBackend

        return TrtEngineBackend().without_building(finished[stage.needs[0]].record, spec, out_dir)

    return replace(stage, parts=lambda finished: {**stage.parts(finished), "built": False}, run=run)


def _builds_here(config: DeploymentConfig) -> bool:
    """Whether this machine has trtllm-build and a GPU for it."""
    from toolkit.engines.trt_engine import TrtEngineBackend

    try:
        TrtEngineBackend().check_builder(engine_spec(config, "target"))
    except BackendUnavailable:
        return False
    return bool(gpus())


def _refuse_impossible(config: DeploymentConfig) -> None:
    from toolkit.plan.make import make_plan

    # A hub id of which nothing is known yet is about to be fetched.
    refused = [one for one in make_plan(config).judgements if one.severity == "refused" and one.rule != "shape-needed"]
    if refused:
        faults = [Fault(one.path, f"{one.what} [{one.rule}]", mend=one.mend) for one in refused]
        raise PlanError(config.name, faults)


def _on_this_machine(config: DeploymentConfig, *, download: bool) -> DeploymentConfig:
    """The same with folders in the place of hub ids. Raises PlanError with every one that cannot be had."""
    from toolkit.checkpoints.hub import fetch

    found: dict[str, ModelConfig] = {}
    faults: list[Fault] = []
    for role, model in models_of(config).items():
        if model.hub_id is None:
            continue
        try:
            code, bars = model.trust_remote_code, sys.stderr.isatty()
            folder = fetch(model.hub_id, model.revision, download=download, bars=bars, with_code=code)
        except CheckpointError as error:
            what = f"no folder {model.hub_id} beside the YAML; read as a model id of the hub, {error.where} {error.what}"
            faults.append(Fault(f"{role}.checkpoint", what, mend=f"Mend the path if a folder is meant. Else {error.mend}."))
        else:
            found[role] = model.model_copy(update={"checkpoint": folder, "revision": None})
    if faults:
        raise PlanError(config.name, faults)
    return config.model_copy(update=found)


def _check_builder(config: DeploymentConfig, workplace: Workplace, store: Store) -> None:
    """Raises BackendUnavailable where trtllm-build would be needed and is not to be had; what is in the store needs none."""
    if not isinstance(config.engine, TrtEngineConfig):
        return
    if all(one.reused for one in explain_build(config, workplace, store)):
        return
    from toolkit.engines.trt_engine import TrtEngineBackend

    TrtEngineBackend().check_builder(engine_spec(config, "target"))


def embedded(config: DeploymentConfig) -> TorchEngineConfig:
    """The section of the embedded engine. Raises UsageError for another kind, which nothing but its server can run."""
    if not isinstance(config.engine, TorchEngineConfig):
        raise UsageError(
            f"engine.kind {config.engine.kind} runs in its server alone, and this works on the embedded engine",
            mend="Use engine.kind: torch.",
        )
    return config.engine


def _check_inputs(config: DeploymentConfig) -> None:
    """Read the small input files now: a bad line in the prompts should not be found after an hour of quantizing."""
    from toolkit.quantize.calibrate import split_texts
    from toolkit.validate.prompts import read_prompts

    read_prompts(config.validation.prompts, config.validation.max_prompts)
    if config.calibration is not None:
        split_texts(config.calibration)


def _check_prompt_lengths(config: DeploymentConfig) -> None:
    """Asked before long work and not at every build: it needs the tokenizer. Raises UsageError."""
    from toolkit.checkpoints.tokenizer import load_tokenizer
    from toolkit.validate.prompts import check_lengths

    tokenizer = load_tokenizer(config.target.checkpoint)
    check_lengths(
        config.validation.prompts,
        config.validation.max_prompts,
        lambda prompt: tokenizer.encode(prompt).ids,
        config.engine.max_input_len,
    )


def _pair(config: DeploymentConfig, memo: DigestMemo) -> Stage:
    from toolkit.pairing.recorded import check_recorded_digests
    from toolkit.pairing.tokenizers import SOURCE_PATTERNS, TOKENIZER_PATTERNS, prove_pair

    tp_size = tp_size_of(config)

    def parts(finished: Finished) -> Mapping[str, Any]:
        patterns = SOURCE_PATTERNS + TOKENIZER_PATTERNS
        try:
            digests = {role: digest_tree(model.checkpoint, patterns, memo) for role, model in models_of(config).items()}
        except StoreError as error:
            raise CheckpointError(error.what, where=error.where, mend=error.mend) from error
        for model in models_of(config).values():
            check_recorded_digests(model.checkpoint, memo)
        return {"config": {"tp_size": tp_size}, "inputs": digests, "fingerprint": _versions(["tokenizers"])}

    def run(finished: Finished, out_dir: Path, progress: Progress) -> PairProof:
        draft = None if config.draft is None else config.draft.checkpoint
        return prove_pair(config.target.checkpoint, draft, memo, tp_size=tp_size)

    return Stage("pair", 2, PairProof, (), parts, run)


def tp_size_of(config: DeploymentConfig) -> int:
    return 1 if config.engine.kind == "torch" else config.engine.tp_size


def _quantize(config: DeploymentConfig, role: str, memo: DigestMemo) -> Stage:
    from toolkit.quantize import stage
    from toolkit.quantize.checkpoint import CODE

    model = models_of(config)[role]
    calibration = None if model.quantization.quant_algo == "NO_QUANT" else config.calibration
    engine = config.engine
    trtllm = stage.Ranks(engine.tp_size, engine.pp_size) if engine.kind == "trt_engine" else None

    def parts(finished: Finished) -> Mapping[str, Any]:
        proof = finished["pair"].record
        inputs = {"checkpoint": proof.target_digest if role == "target" else proof.draft_digest}
        settings = {**model.quantization.model_dump(exclude={"allow_unsupported"}), "vocab_size": proof.vocab_size}
        settings["trtllm"] = None if trtllm is None else dataclasses.asdict(trtllm)
        if model.trust_remote_code:
            inputs["code"] = digest_tree(model.checkpoint, CODE, memo)
        if calibration is not None:
            inputs["dataset"] = digest_file(calibration.dataset, memo)
            inputs["heldout"] = calibration.heldout and digest_file(calibration.heldout, memo)
            settings["calibration"] = calibration.model_dump(exclude={"dataset", "heldout"})
        return {"config": settings, "inputs": inputs, "fingerprint": stage.fingerprint(model.quantization)}

    def run(finished: Finished, out_dir: Path, progress: Progress) -> QuantizedCheckpoint:
        _check_prompt_lengths(config)
        vocab_size = finished["pair"].record.vocab_size
        return stage.quantize(
            role,
            model.checkpoint,
            model.quantization,
            calibration,
            out_dir,
            progress,
            vocab_size=vocab_size,
            trtllm=trtllm,
            with_code=model.trust_remote_code,
        )

    return Stage(f"quantize/{role}", stage.VERSION, QuantizedCheckpoint, ("pair",), parts, run)


def _compile(config: DeploymentConfig, role: str, workplace: Workplace) -> Stage:
    from toolkit.engines import stage

    kind = config.engine.kind
    loads_draft = kind == "trtllm_pytorch" and role == "target" and config.draft is not None  # with the target, once
    needs = (f"quantize/{role}", *(("quantize/draft",) if loads_draft else ()))
    spec = engine_spec(config, role)

    def parts(finished: Finished) -> Mapping[str, Any]:
        return {
            "config": {"kind": kind, **_spec_parts(spec)},
            "inputs": {name: finished[need].entry.digest for name, need in zip(("checkpoint", "draft"), needs, strict=False)},
            "fingerprint": _engine_fingerprint(kind, spec, workplace.store / ".fingerprints.json"),
        }

    def run(finished: Finished, out_dir: Path, progress: Progress) -> CompiledEngine:
        _check_prompt_lengths(config)
        asked = spec.tensorrt_llm
        if loads_draft and asked is not None:
            asked = replace(asked, draft_dir=finished["quantize/draft"].record.path)
        return stage.compile_engine(kind, finished[needs[0]].record, replace(spec, tensorrt_llm=asked), out_dir, progress)

    return Stage(f"compile/{role}", stage.VERSION, CompiledEngine, needs, parts, run)


def engine_spec(config: DeploymentConfig, role: str) -> EngineSpec:
    engine = config.engine
    spec = EngineSpec(
        role=role,
        max_batch_size=engine.max_batch_size,
        max_input_len=engine.max_input_len,
        max_seq_len=engine.max_seq_len,
        max_draft_len=config.speculation.longest_draft if role == "target" else 0,
    )
    if isinstance(engine, TorchEngineConfig):
        return replace(spec, dtype=engine.dtype, device=_device(engine.device), mode=engine.mode)
    return replace(spec, dtype="auto", device="cuda", tensorrt_llm=_tensorrt_llm_spec(config, role))


def _tensorrt_llm_spec(config: DeploymentConfig, role: str) -> TensorRtLlmSpec:
    """What decides the engine of this kind, and nothing else: what only the serving side reads must not rebuild it."""
    engine = config.engine
    assert not isinstance(engine, TorchEngineConfig)  # the caller has looked
    common: dict[str, Any] = {
        "version": engine.tensorrt_llm,
        "tp_size": engine.tp_size,
        "pp_size": engine.pp_size,
        "gpus_per_node": engine.gpus_per_node,
        "max_num_tokens": engine.max_num_tokens,
        "tokens_per_block": engine.tokens_per_block,
        "speculation": config.speculation.kind,
    }
    if isinstance(engine, TrtEngineConfig):
        settings = {"multiple_profiles", "opt_num_tokens", "builder"}
    else:
        settings = {"free_gpu_memory_fraction", "enable_block_reuse", "cuda_graph", "attn_backend"}
        common["draft_len_schedule"] = config.speculation.draft_len_schedule
        if config.speculation.kind == "ngram":
            common["max_matching_ngram_size"] = config.speculation.max_matching_ngram_size
        common["trust_remote_code"] = any(model.trust_remote_code for model in models_of(config).values())  # LLM() loads both
    return TensorRtLlmSpec(**common, **{name: getattr(engine, name) for name in settings})


def _spec_parts(spec: EngineSpec) -> dict[str, Any]:
    """Of a key: without what leaves the engine as it is, where it is built and where its draft lies meanwhile."""
    parts = dataclasses.asdict(spec)
    asked = parts.pop("tensorrt_llm")
    if asked is not None:
        decides = {name: value for name, value in asked.items() if name not in ("builder", "draft_dir")}
        schedule = asked["draft_len_schedule"]
        parts["tensorrt_llm"] = {**decides, "draft_len_schedule": schedule and sorted(map(list, schedule.items()))}
    return parts


def _measures(config: DeploymentConfig) -> bool:
    return config.speculation.kind != "none" and config.speculation.max_draft_len == "auto"


def in_container(llm_args: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of LLM() with the places that both models have where the repository is served."""
    from toolkit.engines.trtllm.llm_args import resolved
    from toolkit.triton.layout_trtllm import ENGINES

    return resolved(llm_args, f"{ENGINES}/target", f"{ENGINES}/draft")


def speculation_of(config: DeploymentConfig, finished: Finished) -> SpeculationConfig:
    """What is served: what the YAML says, or what was found where it says `auto`."""
    if not _measures(config):
        return config.speculation
    advice: Advice = finished["tune"].record
    if not advice.speculate:
        return config.speculation.model_copy(update={"kind": "none"})
    schedule = {step.batch: step.draft_len for step in advice.schedule}
    return config.speculation.model_copy(update={"max_draft_len": advice.max_draft_len, "draft_len_schedule": schedule})


def tune(
    config: DeploymentConfig,
    workplace: Workplace,
    observer: Observer,
    store: Store,
    *,
    drafts: Sequence[Path] = (),
    measured_rounds: int = 0,
    gpu: str | None = None,
    fresh: bool = False,
) -> tuple[Advice, Path]:
    """Build the engines that are missing, measure every way to draft, publish the advice: (it, its folder).

    Beside the YAML's own drafter, prompt lookup and `drafts` (checkpoints, quantized and compiled as the YAML's draft) are
    tried. measured_rounds: of running every draft length, to see how true the predictions are. Raises what the stages raise.
    """
    from toolkit.plan.make import gpu_asked_for

    elsewhere = None if gpu is None else gpu_asked_for(gpu)
    built = build(config, workplace, observer, store, until="compile")
    engines = built.stages
    ways = [*_own_way(config)(engines)]
    for number, checkpoint in enumerate(drafts, start=1):
        model = (config.draft or config.target).model_copy(update={"checkpoint": checkpoint.resolve()})
        speculation = config.speculation.model_copy(update={"kind": "draft_target"})
        other = config.model_copy(update={"draft": model, "speculation": speculation})
        stages = upto(stages_of(other, workplace, store.memo), "compile")
        found = dict(run_stages(stages, store, f"{config.name}.draft-{number}", observer))
        ways.append((checkpoint.name, "draft_target", found["compile/draft"]))
    if config.speculation.kind != "ngram":
        ways.append(("ngram", "ngram", None))
    stage = tune_stage(
        config,
        embedded(config),
        store.memo,
        lambda finished: ways,
        target=engines["compile/target"],
        measured_rounds=measured_rounds,
        gpu=elsewhere,
    )
    ((_, done),) = run_stages([stage], store, config.name, observer, fresh=["tune"] if fresh else [])
    store.publish({"": done.entry}, workplace.advice(config.name))
    publish_report(store, config.name, workplace.report(config.name), observer)
    return done.record, workplace.advice(config.name)


def tune_grid(
    config: DeploymentConfig, workplace: Workplace, observer: Observer, store: Store, *, fresh: bool = False
) -> tuple[Grid, Path]:
    """Quantize and compile both models in every precision, measure every pair, publish the grid: (it, its folder).

    Raises UsageError without a draft or calibration text, and what the stages raise.
    """
    from toolkit.quantize.calibrate import split_texts

    if config.draft is None or config.calibration is None:
        raise UsageError("the grid quantizes target and draft", mend="give the YAML a `draft` and a `calibration` section")
    engines = {}
    for algo in typing.get_args(QuantAlgo):
        models = {role: _quantized_as(model, algo) for role, model in models_of(config).items()}
        stages = upto(stages_of(config.model_copy(update=models), workplace, store.memo), "compile")
        found = dict(run_stages(stages, store, f"{config.name}.{algo}", observer))
        engines[algo] = (found["compile/target"], found["compile/draft"])
    stage = grid_stage(config, embedded(config), store.memo, engines, split_texts(config.calibration)[1])
    ((_, done),) = run_stages([stage], store, config.name, observer, fresh=["grid"] if fresh else [])
    store.publish({"": done.entry}, workplace.grid(config.name))
    publish_report(store, config.name, workplace.report(config.name), observer)
    return done.record, workplace.grid(config.name)


def _quantized_as(model: ModelConfig, algo: str) -> ModelConfig:
    kv_cache = model.quantization.kv_cache_quant_algo if algo == "FP8" else None
    changes = {"quant_algo": algo, "kv_cache_quant_algo": kv_cache}
    return model.model_copy(update={"quantization": model.quantization.model_copy(update=changes)})


def _own_way(config: DeploymentConfig) -> Callable[[Finished], list[Way]]:
    """The YAML's own way to draft; none at all without speculation."""

    def ways(finished: Finished) -> list[Way]:
        if config.speculation.kind == "ngram":
            return [("ngram", "ngram", None)]
        return [] if config.draft is None else [(config.draft.checkpoint.name, "draft_target", finished["compile/draft"])]

    return ways


def _package(config: DeploymentConfig, roles: Sequence[str]) -> Stage:
    from toolkit.serving import eos_token_ids
    from toolkit.triton import stage

    engines = tuple(f"compile/{role}" for role in roles)
    needs = (*engines, "tune") if _measures(config) else engines

    def parts(finished: Finished) -> Mapping[str, Any]:
        where_it_listens = {"host", "http_port", "grpc_port", "metrics_port", "start_timeout_s"}
        settings = {
            "speculation": speculation_of(config, finished).model_dump(mode="json"),
            "triton": config.triton.model_dump(exclude=where_it_listens),
            "threads": embedded(config).threads,
        }
        inputs = {need: finished[need].entry.digest for need in engines}
        # The model and the client are files of ours, copied into the repository.
        inputs["sources"] = digest_tree(SOURCES, SHIPPED_SOURCES)
        return {"config": settings, "inputs": inputs, "fingerprint": _versions(["tritonclient"])}

    def run(finished: Finished, out_dir: Path, progress: Progress) -> TritonRepository:
        target, *drafts = (finished[need].record for need in engines)
        speculation = speculation_of(config, finished)
        draft = drafts[0] if speculation.kind == "draft_target" else None
        threads, end_ids = embedded(config).threads, eos_token_ids(target.path)
        return stage.package(target, draft, speculation, config.triton, threads, out_dir, end_ids=end_ids)

    return Stage("package", stage.VERSION, TritonRepository, needs, parts, run)


def _package_trtllm(config: DeploymentConfig, roles: Sequence[str]) -> Stage:
    """For TensorRT-LLM's containers. The quantized target is needed for its end ids, which an engine does not hold."""
    from toolkit.checkpoints.shape import read_shape
    from toolkit.engines.trtllm.llm_args import read_llm_args
    from toolkit.triton import stage
    from toolkit.triton.package_trtllm import package_bls, package_llmapi

    engine, triton = config.engine, config.triton
    assert not isinstance(engine, TorchEngineConfig)
    engines = tuple(f"compile/{role}" for role in roles)
    placed: dict[str, Any] = {
        "name": config.name,
        "gpus_per_node": engine.gpus_per_node,
        "max_draft_len": config.speculation.longest_draft,
    }

    def parts(finished: Finished) -> Mapping[str, Any]:
        where_it_listens = {"host", "http_port", "grpc_port", "metrics_port", "start_timeout_s"}
        memory = {"free_gpu_memory_fraction": engine.free_gpu_memory_fraction, "enable_block_reuse": engine.enable_block_reuse}
        settings = {
            "kind": engine.kind,
            "speculation": config.speculation.model_dump(mode="json"),
            "triton": triton.model_dump(exclude=where_it_listens),
            **placed,
            **memory,
        }
        inputs = {need: finished[need].entry.digest for need in (*engines, "quantize/target")}
        inputs["sources"] = digest_tree(SOURCES, SHIPPED_SOURCES)
        return {"config": settings, "inputs": inputs, "fingerprint": _versions(["tritonclient"])}

    def run(finished: Finished, out_dir: Path, progress: Progress) -> TritonRepository:
        target, *drafts = (finished[need].record for need in engines)
        draft = drafts[0] if config.speculation.kind == "draft_target" else None
        if engine.kind == "trtllm_pytorch":
            args = in_container(read_llm_args(target.path))
            return package_llmapi(target, draft, args, triton, out_dir, **placed)
        return package_bls(
            target,
            draft,
            triton,
            out_dir,
            end_ids=read_shape(finished["quantize/target"].record.path).eos_token_ids,
            free_gpu_memory_fraction=engine.free_gpu_memory_fraction,
            enable_block_reuse=engine.enable_block_reuse,
            acceptance=config.speculation.acceptance,
            **placed,
        )

    return Stage("package", stage.VERSION, TritonRepository, (*engines, "quantize/target"), parts, run)


def _validate(
    config: DeploymentConfig, roles: Sequence[str], workplace: Workplace, memo: DigestMemo, replaced: Sequence[str] = ()
) -> Stage:
    from toolkit.validate import stage

    before = ("pair", *(f"quantize/{role}" for role in roles), *(f"compile/{role}" for role in roles), "package")
    needs = (*before, "tune") if _measures(config) else before

    def quality_of(finished: Finished) -> Quality:
        records = {role: finished[f"quantize/{role}"].record for role in roles}
        return Quality(records["target"].quality, records["draft"].quality if "draft" in records else None)

    def parts(finished: Finished) -> Mapping[str, Any]:
        """The name is in it, since it stands in the report; so are our own sources and the machine, since they are measured."""
        return {
            "config": {
                "name": config.name,
                **config.validation.model_dump(exclude={"prompts"}),
                "stated": sorted(config.validation.latency.model_fields_set | config.validation.quality.model_fields_set),
                **({"replaced": list(replaced)} if replaced else {}),
            },
            "inputs": {
                "repository": finished["package"].entry.digest,
                "engines": {role: finished[f"compile/{role}"].entry.digest for role in roles},
                "quality": digest_value(to_json(quality_of(finished))),
                "pair": digest_value(to_json(finished["pair"].record.findings)),
                "prompts": digest_file(config.validation.prompts, memo),
                **({"advice": finished["tune"].entry.digest} if _measures(config) else {}),  # it stands in the report
                "sources": digest_tree(SOURCES, [f"{pattern}.py" if "*" in pattern else pattern for pattern in SERVED_SOURCES]),
            },
            "fingerprint": _versions([*MEASURED_LIBRARIES, *(["tensorrt_llm"] if config.engine.kind != "torch" else [])]),
            "machine": machine(),
        }

    def run(finished: Finished, out_dir: Path, progress: Progress) -> ValidationReport:
        return _measure(config, finished, quality_of(finished), replaced, workplace, out_dir, progress)

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
    from toolkit.triton.server import TritonServer
    from toolkit.validate.replay import write_replay
    from toolkit.validate.stage import Alternating, References, validate

    started, repository = time.monotonic(), finished["package"].record
    engines = {role: finished[f"compile/{role}"].record for role in models_of(config)}
    folders = {role: engine.path for role, engine in engines.items()}
    judged: dict[str, Any] = {
        "name": config.name,
        "max_draft_len": repository.max_draft_len,
        "quality": quality,
        "keep_replay": lambda found: write_replay(out_dir / "replay", found),
        "engines": {role: replace(engine, path=workplace.engines(config.name) / role) for role, engine in engines.items()},
        "preceding": finished["pair"].record.findings,
        "stages": [StageCost(name, done.seconds, done.peak_memory_bytes, done.reused) for name, done in finished.items()],
        "replaced": replaced,
        "progress": progress,
    }
    log, began, peak_bytes = out_dir / "server.log", time.monotonic(), None
    if isinstance(config.engine, TorchEngineConfig):
        source, same_precision = _source(config, folders["target"])
        free_ports = config.triton.model_copy(update={"http_port": 0, "grpc_port": 0, "metrics_port": 0})
        with (
            TritonServer(repository.path, free_ports, log_path=log, progress=progress) as server,
            PeakMemory(server.pid) as peak,
            Client(server.grpc_url, model=repository.model) as client,
        ):
            report = validate(
                client,
                _asked_of(config, finished),
                acceptance=config.speculation.acceptance,
                references=References(_reference(folders, config.engine.threads), source, same_precision),
                environment=_environment(),
                **_watched(config, repository, lambda: server, progress),
                **judged,
            )
        peak_bytes = peak.bytes
    else:
        end_ids = read_shape(finished["quantize/target"].record.path).eos_token_ids
        source, same_precision = _source(config, folders["target"], end_ids)
        with (
            tempfile.TemporaryDirectory(prefix="toolkit-validate-") as scratch,
            Servers(repository, deployment_of(config), config.triton, Path(scratch), log, progress) as servers,
        ):
            in_turns = config.engine.kind == "trtllm_pytorch" and repository.max_draft_len > 0
            watched = _watched(config, repository, lambda: servers.server, progress, against_plain=not in_turns)
            if config.engine.kind == "trtllm_pytorch":
                del watched["counters"]  # LLM() has none of ours, and every start would begin them anew
            report = validate(
                Alternating(servers.start) if in_turns else servers.start("served"),
                _asked_of(config, finished),
                # Both runtimes keep a draft that equals what the target samples, unless they are told otherwise.
                acceptance="sample_match" if config.speculation.acceptance == "auto" else config.speculation.acceptance,
                references=References(None, source, same_precision),
                can=abilities_of(config),
                environment={**_environment(), **_versions(["tensorrt_llm"])},
                **watched,
                **judged,
            )
    served = StageCost("serve", round(time.monotonic() - began, 3), peak_bytes, reused=False)
    itself = StageCost("validate", round(time.monotonic() - started, 3), None, reused=False)  # its peak is known at its end
    report = replace(
        report,
        stages=(*report.stages, served, itself),
        memory=make_plan(config).memory,
        advice=finished["tune"].record if _measures(config) else None,
    )
    write_report(report, out_dir)
    return report


def _asked_of(config: DeploymentConfig, finished: Finished) -> ValidationConfig:
    """The gates: without one on the speed-up where the advisor was asked whether to speculate, and said no."""
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
    """The arguments of `validate` that look at the server itself: its counters, and its speed under load."""
    from toolkit.benching import sweep
    from toolkit.validate.counters import read_counters

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


def replay_divergence(file: Path, workplace: Workplace) -> tuple[Replay, Replayed]:
    """Serve the repository that a replay file names, send its two requests again, judge them. Raises UsageError, StageError."""
    from toolkit.client import Client
    from toolkit.config.schema import TritonConfig
    from toolkit.triton.server import TritonServer
    from toolkit.validate.replay import read_replay, replay

    found = read_replay(file)
    repository, engines = workplace.repository(found.name), workplace.engines(found.name)
    for folder in (repository, engines / "target"):
        if not folder.is_dir():
            raise UsageError(
                f"the deployment {found.name!r} is not built here", where=folder, mend="Build it: toolkit build CONFIG."
            )
    folders = {role: engines / role for role in ("target", "draft") if (engines / role).is_dir()}
    with TritonServer(repository, TritonConfig()) as server, Client(server.grpc_url) as client:
        return found, replay(found, client, _reference(folders, None))


def _reference(engines: Mapping[str, Path], threads: int | None) -> Reference:
    """The compiled engines, loaded a second time when they are first asked."""
    from toolkit.engines.registry import loader
    from toolkit.serving import eos_token_ids
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


def _source(config: DeploymentConfig, target: Path, end_ids: Sequence[int] | None = None) -> tuple[Reference | None, bool]:
    """The unquantized checkpoint as a reference, where it is wanted and fits; whether the engine computes the same. end_ids:
    None where the engine says itself what ends a text.
    """
    from toolkit.checkpoints.quantized import open_checkpoint
    from toolkit.pipeline.machine import memory_bytes
    from toolkit.serving import eos_token_ids
    from toolkit.validate.reference import reference_from_checkpoint

    asked, folder = config.validation.parity.source, config.target.checkpoint
    if asked == "never" or open_checkpoint(folder).quantization.quant_algo is not None:
        return None, False
    in_float32 = 2 * sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    if asked == "auto" and in_float32 > memory_bytes() / 2:
        return None, False
    unquantized = config.target.quantization.quant_algo == "NO_QUANT"
    engine = config.engine
    same_precision = unquantized and isinstance(engine, TorchEngineConfig) and engine.dtype in ("float32", "float64")
    codec = lambda prompt: _codec(target).encode(prompt)  # noqa: E731 - the engine's own tokenizer, opened when first used
    return reference_from_checkpoint(folder, codec, eos_token_ids(target) if end_ids is None else end_ids), same_precision


@functools.cache
def _codec(engine_dir: Path) -> Any:
    from toolkit.speculative.text import TextCodec

    return TextCodec.from_file(engine_dir / "tokenizer.json")


def _noise(seed: int, position: int, vocab: int) -> Any:
    from toolkit.speculative.sampling import ExponentialRace

    return ExponentialRace(seed, vocab).gumbel(position)


def _environment() -> dict[str, str]:
    """What the report says it was measured with."""
    facts = {name: value for name, value in program().items() if value is not None}
    return {**facts, **machine(), **_versions(REPORTED_LIBRARIES)}


def _versions(libraries: Sequence[str]) -> Fingerprint:
    """From the installed metadata, without importing anything."""
    found = {}
    for library in libraries:
        try:
            found[library] = version(library)
        except PackageNotFoundError:
            found[library] = "none"
    return found


def _device(asked: str) -> str:
    """`auto` is cuda where there is a GPU that torch can use."""
    if asked == "auto":
        if not gpus():
            return "cpu"
        import torch

        return "cuda" if torch.cuda.is_available() else "cpu"
    if asked == "cuda" and not gpus():
        raise UsageError("engine.device is cuda, and this machine has no NVIDIA GPU", mend="set engine.device: auto")
    return asked


def _engine_fingerprint(kind: str, spec: EngineSpec, file: Path) -> Fingerprint:
    """The backend's fingerprint, remembered: asking for it means importing torch and running the compiler.

    It is asked again when anything changes that it could depend on: what is asked for, versions, the compiler's file, the
    machine, or our own sources.
    """
    from toolkit.engines.embedded.toolchain import compiler_path, instruction_set
    from toolkit.engines.stage import fingerprint

    if spec.tensorrt_llm is not None:
        return fingerprint(kind, spec)  # installed versions and GPU names: cheap to ask
    compiler = compiler_path()
    status = None if compiler is None else Path(compiler).resolve().stat()
    depends_on = digest_value(
        {
            "spec": {"kind": kind, **_spec_parts(spec)},
            "torch": _versions(["torch"]),
            "compiler": None if status is None else [compiler, status.st_size, status.st_mtime_ns],
            "machine": [*instruction_set(), *gpus()],
            "sources": digest_tree(SOURCES / "engines", ("*.py", "*.cpp")),
        }
    )
    try:
        known = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        known = {}
    if depends_on not in known:
        known = dict([*known.items(), (depends_on, fingerprint(kind, spec))][-REMEMBERED:])
        try:
            write_whole(file, json.dumps(known, indent=1))
        except OSError as error:
            raise store_error("compile", error, file) or error from error
    remembered: Fingerprint = known[depends_on]
    return remembered
