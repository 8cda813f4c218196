"""Which stages a deployment has, in their order, and what is refused before the first of them runs.

pair -> quantize/{target,draft} -> compile/{target,draft} -> [tune] -> package -> validate

For TensorRT-LLM what `auto` asks for is found before its engines are made: ->
advised/{target,draft} -> tune -> compile/...
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

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
from toolkit.workflows.deployment import embedded, embedded_twin, sampled_rule
from toolkit.workflows.folders import Workplace
from toolkit.workflows.stages.compile import compile_stage
from toolkit.workflows.stages.package import package_stage
from toolkit.workflows.stages.pair import pair_stage
from toolkit.workflows.stages.quantize import quantize_stage
from toolkit.workflows.stages.tune import Way, tune_stage
from toolkit.workflows.stages.validate import validate_stage

__all__ = [
    "PACKAGE_TRTLLM",
    "REAL_KIND",
    "TWIN",
    "Ready",
    "advised_stages",
    "own_way",
    "planned",
    "raise_refused",
    "ready",
    "rehearsal_stages",
    "stages_here",
    "stages_of",
]

TWIN = "advised/"  # before the role: an engine that tells what another kind of engine would say
REAL_KIND, PACKAGE_TRTLLM = (
    "-trtllm",
    "package/trtllm",
)  # of a rehearsal, beside the embedded engine's


def stages_of(
    config: DeploymentConfig,
    workplace: Workplace,
    memo: DigestMemo,
    *,
    download: bool = True,
    plan: Plan | None = None,
) -> list[Stage]:
    """All stages of a deployment, in order; checkpoints that are hub ids are downloaded, or only
    looked for.

    plan: where the caller has made it already. Raises PlanError for what cannot work, UsageError
    for calibration or prompt files that cannot be used.
    """
    prepared = ready(config, download=download, plan=plan)
    config, roles = prepared.config, tuple(prepared.config.models)
    engines = [compile_stage(config, role, workplace) for role in roles]
    advising = _advising(config, workplace, memo)
    before_engines = config.capabilities.fixes_draft_len
    return [
        pair_stage(config, memo),
        *(quantize_stage(config, role, memo) for role in roles),
        *([*advising, *engines] if before_engines else [*engines, *advising]),
        package_stage(config, roles),
        validate_stage(config, roles, workplace, memo, prepared.plan.memory),
    ]


def _advising(config: DeploymentConfig, workplace: Workplace, memo: DigestMemo) -> list[Stage]:
    """What finds the draft length where the YAML says `auto`.

    The embedded engine is measured as it is. TensorRT-LLM's kinds are fixed to a length when they
    are compiled or loaded, so it is found before: by the same checkpoints on the embedded engine,
    and costs that are predicted.
    """
    from toolkit.plan.make import subject_of

    if not config.speculation.is_measured:
        return []
    rule, ways, roles = sampled_rule(config), own_way(config), tuple(config.models)
    if config.capabilities.in_process:
        return [tune_stage(config, embedded(config), memo, ways, rule=rule)]

    def quantized(finished: Finished) -> dict[Role, Done]:
        return {role: finished[f"quantize/{role}"] for role in roles}

    engine, gpu = embedded(embedded_twin(config)), subject_of(config)[0].gpu
    tune = tune_stage(config, engine, memo, ways, rule=rule, checkpoints=quantized, gpu=gpu)
    tune = replace(tune, needs=(*tune.needs, *(f"quantize/{role}" for role in roles)))
    return [*_twins(config, workplace), _renamed(tune, _advised)]


def _twins(config: DeploymentConfig, workplace: Workplace) -> list[Stage]:
    """The models compiled for the embedded engine: by a name of their own where the deployment
    has other engines.
    """
    stages = [compile_stage(embedded_twin(config), role, workplace) for role in config.models]
    if config.capabilities.in_process:
        return stages
    return [_renamed(stage, _advised) for stage in stages]


def _advised(name: str) -> str:
    return name.replace("compile/", TWIN)


def advised_stages(config: DeploymentConfig, workplace: Workplace, memo: DigestMemo) -> list[Stage]:
    """Up to engines that run in this process: quantized as the deployment is, compiled for the
    embedded engine whatever it is served by. Raises as `stages_of` does.
    """
    return stages_here(ready(config, download=True).config, workplace, memo)


def stages_here(config: DeploymentConfig, workplace: Workplace, memo: DigestMemo) -> list[Stage]:
    """The same of one that is `ready`, or of its models in another precision, which what serves
    it may refuse.
    """
    return [
        pair_stage(config, memo),
        *(quantize_stage(config, role, memo) for role in config.models),
        *_twins(config, workplace),
    ]


@dataclass(frozen=True, slots=True)
class Ready:
    """A deployment that can work as far as is known, with folders in the place of hub ids."""

    config: DeploymentConfig
    plan: Plan


def ready(config: DeploymentConfig, *, download: bool, plan: Plan | None = None) -> Ready:
    """plan: where the caller has made it already. It is made anew once checkpoints were fetched,
    since files may say what the hub did not.
    """
    plan = plan or planned(config)
    _check_inputs(config)
    if any(model.hub_id is not None for model in config.models.values()):
        config = _on_this_machine(config, download=download)
        plan = planned(config)
    return Ready(config, plan)


def rehearsal_stages(
    asked: DeploymentConfig,
    served: DeploymentConfig,
    workplace: Workplace,
    memo: DigestMemo,
    replaced: Sequence[str],
) -> list[Stage]:
    """The stages of a rehearsal: `asked` decides what is quantized and how, `served` what is
    compiled, packaged and measured.

    The engine's own stage runs too where this machine can do it. replaced: for the report. Raises
    UsageError as `stages_of`.
    """
    from toolkit.plan.make import make_plan

    _check_inputs(served)
    roles = tuple(served.models)
    real: list[Stage] = []
    if not asked.capabilities.in_process:
        compiled = [compile_stage(asked, role, workplace) for role in roles]
        if asked.capabilities.needs_trtllm_build and not _builds_here(asked):
            compiled = [
                _unbuilt(stage, engine_spec(asked, role))
                for stage, role in zip(compiled, roles, strict=True)
            ]
        real = [_renamed(stage, _beside) for stage in (*compiled, package_stage(asked, roles))]
    memory = make_plan(served).memory
    validate = validate_stage(served, roles, workplace, memo, memory, replaced)
    return [
        pair_stage(asked, memo),
        *(quantize_stage(asked, role, memo) for role in roles),
        *real,
        *(compile_stage(served, role, workplace) for role in roles),
        package_stage(served, roles),
        replace(validate, needs=(*validate.needs, *(stage.name for stage in real))),
    ]


def _beside(name: str) -> str:
    """Of a stage of the real kind of engine, beside the embedded one's of the same name."""
    return (
        PACKAGE_TRTLLM
        if name == "package"
        else f"{name}{REAL_KIND}"
        if name.startswith("compile/")
        else name
    )


def _renamed(stage: Stage, own: Callable[[str], str]) -> Stage:
    """The same by the name own(name); what it needs it finds by such names, too."""

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


def planned(config: DeploymentConfig) -> Plan:
    """The plan of a deployment that can work. Raises PlanError with everything that is refused.

    A hub id of which nothing is known yet is not refused: its files are about to be fetched.
    """
    from toolkit.plan.make import make_plan

    plan = make_plan(config)
    raise_refused(config.name, [one for one in plan.judgements if one.rule != "shape-needed"])
    return plan


def raise_refused(name: str, judgements: Sequence[Judgement]) -> None:
    """Raises PlanError with everything that is refused, if anything is."""
    faults = [
        Fault(one.path, f"{one.what} [{one.rule}]", hint=one.hint)
        for one in judgements
        if one.severity == "refused"
    ]
    if faults:
        raise PlanError(name, faults)


def _on_this_machine(config: DeploymentConfig, *, download: bool) -> DeploymentConfig:
    """The same with folders in the place of hub ids. Raises PlanError with every one that cannot
    be had.
    """
    from toolkit.checkpoints.hub import fetch

    found: dict[str, ModelConfig] = {}
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
            found[role] = model.model_copy(update={"checkpoint": folder, "revision": None})
    if faults:
        raise PlanError(config.name, faults)
    return config.model_copy(update=found)


def _check_inputs(config: DeploymentConfig) -> None:
    """Read the small input files now: a bad line in the prompts should not be found after an
    hour of quantizing.
    """
    from toolkit.bench.prompts import read_prompts
    from toolkit.quantize.calibrate import split_texts

    read_prompts(config.validation.prompts, config.validation.max_prompts)
    if config.calibration is not None:
        split_texts(config.calibration)


def own_way(config: DeploymentConfig) -> Callable[[Finished], list[Way]]:
    """The YAML's own way to draft; none at all without speculation."""

    def ways(finished: Finished) -> list[Way]:
        if config.speculation.has_ngram:
            return [("ngram", "ngram", None)]
        return (
            []
            if config.draft is None
            else [(config.draft.checkpoint.name, "draft_target", finished["compile/draft"])]
        )

    return ways
