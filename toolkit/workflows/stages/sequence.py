"""Which stages a deployment has, in their order, and what is refused before the first of them runs.

    pair -> quantize/{target,draft} -> compile/{target,draft} -> [tune] -> package -> validate

The engines of TensorRT-LLM have a fixed draft length, so `auto` is decided before they are
compiled, with embedded engines in their place:

    ... -> advised/{target,draft} -> tune -> compile/{target,draft} -> package -> validate

Where they do not fit into memory, `tune` streams the quantized checkpoints instead.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

from toolkit.config.schema import DeploymentConfig, ModelConfig
from toolkit.engines.spec import engine_spec
from toolkit.errors import BackendUnavailable, CheckpointError, Fault, PlanError
from toolkit.interfaces import EngineSpec, Progress
from toolkit.pipeline.hashing import DigestMemo
from toolkit.pipeline.machine import gpus
from toolkit.pipeline.stage import Done, Finished, Stage
from toolkit.records.build import CompiledEngine
from toolkit.records.plan import Judgement, Plan
from toolkit.words import Role
from toolkit.workflows.deployment import embedded, embedded_twin, refuse_head, sampled_rule
from toolkit.workflows.fits_here import must_stream
from toolkit.workflows.folders import Workplace
from toolkit.workflows.measured_vllm import VllmCosts
from toolkit.workflows.serve_vllm import check_vllm
from toolkit.workflows.stages.compile import compile_stage
from toolkit.workflows.stages.load_served import and_loaded
from toolkit.workflows.stages.package import package_stage
from toolkit.workflows.stages.pair import pair_stage
from toolkit.workflows.stages.quantize import quantize_stage
from toolkit.workflows.stages.tune import DraftingMethod, tune_stage
from toolkit.workflows.stages.validate import validate_stage

__all__ = [
    "REAL_KINDS",
    "TWIN",
    "Ready",
    "embedded_stages",
    "is_measured_on_server",
    "methods_of_yaml",
    "possible_plan",
    "raise_refused",
    "ready",
    "rehearsal_stages",
    "stages_of",
]

TWIN = "advised/"  # before the role: an embedded engine that stands for one of another kind
# A rehearsal also has stages for the real kind of engine, beside those for the embedded engine:
# `compile/ROLE-NAME` and `package/NAME`, for each of these names.
REAL_KINDS = ("trtllm", "vllm")


def stages_of(
    config: DeploymentConfig,
    workplace: Workplace,
    memo: DigestMemo,
    *,
    download: bool = True,
    plan: Plan | None = None,
) -> list[Stage]:
    """All stages of a deployment, in their order.

    download: whether checkpoints that are hub ids are downloaded, or only looked up on this
    machine. plan: the plan, if the caller has made it already. Raises PlanError for a deployment
    that cannot work, UsageError for calibration or prompt files that cannot be used.
    """
    if config.speculation.is_measured and not config.capabilities.in_process:
        must_stream(config)  # raises, before anything is downloaded, if not even a layer fits
    prepared = ready(config, download=download, plan=plan)
    config, roles = prepared.config, tuple(prepared.config.models)
    engines = [compile_stage(config, role, workplace) for role in roles]
    advising = _tune_stages(config, workplace, memo)
    before_engines = config.capabilities.fixes_draft_len
    return [
        pair_stage(config, memo),
        *(quantize_stage(config, role, memo) for role in roles),
        *([*advising, *engines] if before_engines else [*engines, *advising]),
        package_stage(config, roles),
        validate_stage(config, roles, workplace, memo, prepared.plan.memory),
    ]


def _tune_stages(config: DeploymentConfig, workplace: Workplace, memo: DigestMemo) -> list[Stage]:
    """The stages that decide the draft length if the YAML says `auto`.

    The embedded engine is measured as it is. TensorRT-LLM's kinds are fixed to a draft length when
    they are compiled or loaded, so it is decided before: acceptance is measured with the same
    checkpoints on the embedded engine, and costs are predicted. vLLM without a GPU is measured in
    its own server. Raises BackendUnavailable if this machine has none.
    """
    from toolkit.plan.make import subject_of

    if not config.speculation.is_measured:
        return []
    rule, roles = sampled_rule(config), tuple(config.models)
    if config.capabilities.in_process:
        methods = methods_of_yaml(config, "compile")
        return [tune_stage(config, embedded(config), memo, methods, rule=rule)]

    def quantized(finished: Finished) -> dict[Role, Done]:
        return {role: finished[f"quantize/{role}"] for role in roles}

    def drafts(finished: Finished) -> dict[str, Done]:
        draft = config.draft
        return {} if draft is None else {draft.checkpoint.name: finished["quantize/draft"]}

    engine, subject = embedded(embedded_twin(config)), subject_of(config)[0]
    served, gpu = None, subject.gpu
    if is_measured_on_server(config):
        check_vllm(config)
        served, gpu = VllmCosts(config, lambda finished: finished["quantize/target"], drafts), None
    refuse_head(config)
    streamed = must_stream(config)
    tune = tune_stage(
        config,
        engine,
        memo,
        methods_of_yaml(config, "quantize" if streamed else "compile"),
        rule=rule,
        checkpoints=quantized,
        gpu=gpu,
        served=served,
        streamed=streamed,
    )
    if streamed:
        return [tune]
    tune = replace(tune, needs=(*tune.needs, *(f"quantize/{role}" for role in roles)))
    return [*_twins(config, workplace), _renamed(tune, _advised_name)]


def is_measured_on_server(config: DeploymentConfig) -> bool:
    """Whether the advisor's costs are timed on the server that will serve: vLLM's, where no GPU is
    named or here.
    """
    from toolkit.plan.make import subject_of

    return config.vllm_engine is not None and subject_of(config)[0].serving_gpu is None


def _twins(config: DeploymentConfig, workplace: Workplace) -> list[Stage]:
    """The stages that compile the models for the embedded engine. They are named `advised/ROLE` if
    the deployment has engines of another kind.
    """
    stages = [compile_stage(embedded_twin(config), role, workplace) for role in config.models]
    if config.capabilities.in_process:
        return stages
    return [_renamed(stage, _advised_name) for stage in stages]


def _advised_name(name: str) -> str:
    return name.replace("compile/", TWIN)


def embedded_stages(
    config: DeploymentConfig, workplace: Workplace, memo: DigestMemo, *, streamed: bool = False
) -> list[Stage]:
    """The stages up to engines that run in this process, whatever kind serves the deployment. They
    quantize the models as the deployment does, and compile them for the embedded engine.

    config: `ready`; its models may have another precision, even one that the serving engine
    refuses. streamed: up to the checkpoints alone, which are streamed. Raises UsageError if the
    draft is a head.
    """
    refuse_head(config)
    quantized = [
        pair_stage(config, memo),
        *(quantize_stage(config, role, memo) for role in config.models),
    ]
    return quantized if streamed else [*quantized, *_twins(config, workplace)]


@dataclass(frozen=True, slots=True)
class Ready:
    """A deployment that the plan does not refuse, with folders in place of hub ids."""

    config: DeploymentConfig
    plan: Plan


def ready(config: DeploymentConfig, *, download: bool, plan: Plan | None = None) -> Ready:
    """Check the plan and the small input files, and fetch checkpoints that are hub ids.

    plan: the plan, if the caller has made it already. It is made again after a download, since the
    files may say what the hub did not. Raises PlanError, UsageError.
    """
    plan = plan or possible_plan(config)
    _check_inputs(config)
    if any(model.hub_id is not None for model in config.models.values()):
        config = _with_fetched_checkpoints(config, download=download)
        plan = possible_plan(config)
    return Ready(config, plan)


def rehearsal_stages(
    real: DeploymentConfig,
    served: DeploymentConfig,
    workplace: Workplace,
    memo: DigestMemo,
    replaced: Sequence[str],
) -> list[Stage]:
    """The stages of a rehearsal.

    real: the deployment with its own engine kind; it decides how the models are quantized. served:
    the deployment on the embedded engine, which is compiled, packaged and measured. If `real` is of
    another kind, its compile and package stages run too, without trtllm-build if this machine
    cannot run that. What is packaged for the PyTorch flow is loaded over a stand-in. A head belongs
    to `real` alone. replaced: sentences for the report. Raises UsageError as `stages_of` does.
    """
    from toolkit.plan.make import make_plan

    _check_inputs(served)
    roles, real_roles = tuple(served.models), tuple(real.models)
    real_stages: list[Stage] = []
    if not real.capabilities.in_process:
        compiled = [compile_stage(real, role, workplace) for role in real_roles]
        if real.capabilities.needs_trtllm_build and not _can_build_here(real):
            compiled = [
                _without_trtllm_build(stage, engine_spec(real, role))
                for stage, role in zip(compiled, real_roles, strict=True)
            ]
        package = package_stage(real, real_roles)
        if real.pytorch_flow is not None:
            version = real.pytorch_flow.tensorrt_llm
            package = and_loaded(package, version, real.triton)
        new_name = partial(_real_kind_name, kind="trtllm" if real.vllm_engine is None else "vllm")
        real_stages = [_renamed(stage, new_name) for stage in (*compiled, package)]
    memory = make_plan(served).memory
    validate = validate_stage(served, roles, workplace, memo, memory, replaced)
    return [
        pair_stage(real, memo),
        *(quantize_stage(real, role, memo) for role in real_roles),
        *real_stages,
        *(compile_stage(served, role, workplace) for role in roles),
        package_stage(served, roles),
        replace(validate, needs=(*validate.needs, *(stage.name for stage in real_stages))),
    ]


def _real_kind_name(name: str, kind: str) -> str:
    """The name of a rehearsal's stage for the real kind of engine, one of REAL_KINDS."""
    if name == "package":
        return f"package/{kind}"
    return f"{name}-{kind}" if name.startswith("compile/") else name


def _renamed(stage: Stage, new_name: Callable[[str], str]) -> Stage:
    """The stage under another name; the stages that it needs are renamed in the same way."""

    def with_old_names(finished: Finished) -> Finished:
        return {**finished, **{need: finished[new_name(need)] for need in stage.needs}}

    return replace(
        stage,
        name=new_name(stage.name),
        needs=tuple(map(new_name, stage.needs)),
        parts=lambda finished: stage.parts(with_old_names(finished)),
        run=lambda finished, out_dir, progress: stage.run(
            with_old_names(finished), out_dir, progress
        ),
    )


def _without_trtllm_build(stage: Stage, spec: EngineSpec) -> Stage:
    """The compile stage, which writes everything but the engine itself."""

    def run(finished: Finished, out_dir: Path, progress: Progress) -> CompiledEngine:
        from toolkit.engines.trt_engine import TrtEngineBackend

        return TrtEngineBackend().without_building(finished[stage.needs[0]].record, spec, out_dir)

    return replace(stage, parts=lambda finished: {**stage.parts(finished), "built": False}, run=run)


def _can_build_here(config: DeploymentConfig) -> bool:
    """Whether this machine has trtllm-build and a GPU to run it on."""
    from toolkit.engines.trt_engine import TrtEngineBackend

    try:
        TrtEngineBackend().check_builder(engine_spec(config, "target"))
    except BackendUnavailable:
        return False
    return bool(gpus())


def possible_plan(config: DeploymentConfig) -> Plan:
    """The plan of a deployment. Raises PlanError with everything that the plan refuses.

    A hub id whose shape is not known yet is not refused, since its files are about to be fetched.
    """
    from toolkit.plan.make import make_plan

    plan = make_plan(config)
    judgements = [judgement for judgement in plan.judgements if judgement.rule != "shape-needed"]
    raise_refused(config.name, judgements)
    return plan


def raise_refused(name: str, judgements: Sequence[Judgement]) -> None:
    """Raises PlanError with every judgement that refuses the deployment, if there is one."""
    faults = [
        Fault(judgement.path, f"{judgement.what} [{judgement.rule}]", hint=judgement.hint)
        for judgement in judgements
        if judgement.severity == "refused"
    ]
    if faults:
        raise PlanError(name, faults)


def _with_fetched_checkpoints(config: DeploymentConfig, *, download: bool) -> DeploymentConfig:
    """The deployment with folders in place of hub ids.

    Raises PlanError with every hub id whose files are not here and cannot be downloaded.
    """
    from toolkit.checkpoints.hub import fetch

    fetched: dict[str, ModelConfig] = {}
    faults: list[Fault] = []
    for role, model in config.models.items():
        if model.hub_id is None:
            continue
        try:
            code, bars = model.trust_remote_code, sys.stderr.isatty()
            folder = fetch(
                model.hub_id, model.revision, download=download, bars=bars, with_code=code
            )
        except CheckpointError as error:
            what = (
                f"no folder {model.hub_id} beside the YAML; read as a model id of the hub,"
                f" {error.where} {error.what}"
            )
            faults.append(
                Fault(
                    f"{role}.checkpoint",
                    what,
                    hint=f"Fix the path if a folder is meant. Else {error.hint}.",
                )
            )
        else:
            fetched[role] = model.model_copy(update={"checkpoint": folder, "revision": None})
    if faults:
        raise PlanError(config.name, faults)
    return config.model_copy(update=fetched)


def _check_inputs(config: DeploymentConfig) -> None:
    """Read the prompts and the calibration text, so that a bad line is not found only after an hour
    of quantizing. Raises UsageError.
    """
    from toolkit.bench.prompts import read_prompts
    from toolkit.quantize.calibrate import split_texts

    chat = config.target.checkpoint
    read_prompts(config.validation.prompts, config.validation.max_prompts, chat)
    if config.calibration is not None:
        split_texts(config.calibration, chat)


def methods_of_yaml(
    config: DeploymentConfig, made_by: Literal["compile", "quantize"]
) -> Callable[[Finished], list[DraftingMethod]]:
    """A function of the finished stages that lists the YAML's own drafting method.

    made_by: the stage whose draft is tried. The list is empty without speculation.
    """

    def methods(finished: Finished) -> list[DraftingMethod]:
        if config.speculation.has_ngram:
            return [("ngram", "ngram", None)]
        if config.draft is None:
            return []
        return [(config.draft.checkpoint.name, "draft_target", finished[f"{made_by}/draft"])]

    return methods
