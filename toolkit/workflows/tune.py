"""`tune` and `tune --grid`: build the engines that are missing, measure them in every way,
publish what was found.
"""

from __future__ import annotations

import itertools
import typing
from collections.abc import Sequence
from pathlib import Path

from toolkit.config.schema import DeploymentConfig, ModelConfig
from toolkit.errors import UsageError
from toolkit.facts.gpus import Gpu
from toolkit.pipeline.run import Observer, run_stages
from toolkit.pipeline.stage import Done, Stage
from toolkit.pipeline.store import Store
from toolkit.records.advice import Advice, Grid
from toolkit.words import QuantAlgo, Role
from toolkit.workflows.build import build
from toolkit.workflows.deployment import embedded, embedded_twin, sampled_rule
from toolkit.workflows.folders import Workplace
from toolkit.workflows.report import publish_report
from toolkit.workflows.stages.sequence import (
    TWIN,
    advised_stages,
    own_way,
    raise_refused,
    ready,
    stages_here,
)
from toolkit.workflows.stages.tune import grid_stage, tune_stage

__all__ = ["tune", "tune_grid"]


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
    """Build the engines that are missing, measure every way to draft, publish the advice: (it, its
    folder).

    Beside the YAML's own drafter, prompt lookup and `drafts` (checkpoints, quantized and compiled
    as the YAML's draft) are tried. measured_rounds: of running every draft length, to see how true
    the predictions are. Raises what the stages raise.

    TensorRT-LLM runs in its server alone. There acceptance is measured on the embedded engine, from
    the same quantized checkpoints, and costs are predicted: for `gpu`, or for the one that the YAML
    or this machine names.
    """
    elsewhere = _gpu_of_costs(config, gpu, measured_rounds)
    if not config.capabilities.in_process:
        engines = _run(
            advised_stages(config, workplace, store.memo), store, f"{config.name}.advised", observer
        )
        checkpoints = {role: engines[f"quantize/{role}"] for role in config.models}
    else:
        checkpoints = None
        engines = build(config, workplace, observer, store, until="compile").stages
    ways = [*own_way(config)(engines)]
    for number, checkpoint in enumerate(drafts, start=1):
        model = (config.draft or config.target).model_copy(
            update={"checkpoint": checkpoint.resolve()}
        )
        speculation = config.speculation.model_copy(update={"kind": "draft_target"})
        other = config.model_copy(update={"draft": model, "speculation": speculation})
        found = _run(
            advised_stages(other, workplace, store.memo),
            store,
            f"{config.name}.draft-{number}",
            observer,
        )
        ways.append((checkpoint.name, "draft_target", found["compile/draft"]))
    if config.capabilities.has_ngram and not config.speculation.has_ngram:
        ways.append(("ngram", "ngram", None))
    stage = tune_stage(
        config,
        embedded(embedded_twin(config)),
        store.memo,
        lambda finished: ways,
        rule=sampled_rule(config),
        target=engines["compile/target"],
        checkpoints=None if checkpoints is None else lambda finished: checkpoints,
        measured_rounds=measured_rounds,
        gpu=elsewhere,
    )
    ((_, done),) = run_stages(
        [stage], store, config.name, observer, fresh=["tune"] if fresh else []
    )
    store.publish({"": done.entry}, workplace.advice(config.name))
    publish_report(store, config.name, workplace.report(config.name), observer)
    return done.record, workplace.advice(config.name)


def _run(stages: Sequence[Stage], store: Store, name: str, observer: Observer) -> dict[str, Done]:
    """What was found, engines by the names that those of the deployment have."""
    return {
        stage.replace(TWIN, "compile/"): done
        for stage, done in run_stages(stages, store, name, observer)
    }


def _gpu_of_costs(config: DeploymentConfig, asked: str | None, measured_rounds: int) -> Gpu | None:
    """Whose costs are predicted; None: they are measured here. Raises UsageError where they can
    be neither.
    """
    from toolkit.plan.make import gpu_from_user, subject_of

    if config.capabilities.in_process:
        return None if asked is None else gpu_from_user(asked)
    kind = config.engine.kind
    if measured_rounds > 0:
        what = (
            f"--measure runs draft lengths in this process, and engine.kind {kind} runs in its"
            " server alone"
        )
        raise UsageError(
            what,
            hint="leave it out; `toolkit validate` measures the length that the YAML has, served",
        )
    if not config.speculation.is_enabled:
        raise UsageError(
            "this deployment does not speculate, so there is nothing to advise",
            hint="set speculation.kind",
        )
    found = gpu_from_user(asked) if asked is not None else subject_of(config)[0].gpu
    if found is None:
        what = f"the costs of engine.kind {kind} are predicted for a GPU, and none is named or here"
        raise UsageError(what, hint="set hardware.gpu, or give --gpu H200")
    return found


def tune_grid(
    config: DeploymentConfig,
    workplace: Workplace,
    observer: Observer,
    store: Store,
    *,
    gpu: str | None = None,
    fresh: bool = False,
) -> tuple[Grid, Path]:
    """Quantize and compile both models in every precision, measure every pair, publish the grid:
    (it, its folder).

    Pairs that the plan refuses are left out. Speeds are measured, or predicted as `tune` predicts
    costs. Raises UsageError without a draft or calibration text, and what the stages raise.
    """
    from toolkit.quantize.calibrate import split_texts

    if config.draft is None or config.calibration is None:
        raise UsageError(
            "the grid quantizes target and draft",
            hint="give the YAML a `draft` and a `calibration` section",
        )
    heldout = split_texts(config.calibration)[1]
    elsewhere = _gpu_of_costs(config, gpu, measured_rounds=0)
    if elsewhere is not None and not config.capabilities.in_process:  # the rules judge this GPU
        config = config.model_copy(
            update={"hardware": config.hardware.model_copy(update={"gpu": elsewhere.name})}
        )
    config = ready(config, download=True).config
    pairs, left_out = _pairs_of(config)
    wanted = {
        role: {"NO_QUANT", *(pair[place] for pair in pairs)}
        for place, role in enumerate(config.models)
    }
    engines: dict[Role, dict[QuantAlgo, Done]] = {role: {} for role in wanted}
    checkpoints: dict[Role, dict[QuantAlgo, Done]] = {role: {} for role in wanted}
    for algo in typing.get_args(QuantAlgo):
        roles = [role for role, algos in wanted.items() if algo in algos]
        if not roles:
            continue
        both = _of_precisions(config, *(algo if role in roles else "NO_QUANT" for role in wanted))
        found = _run(
            stages_here(both, workplace, store.memo), store, f"{config.name}.{algo}", observer
        )
        for role in roles:
            engines[role][algo], checkpoints[role][algo] = (
                found[f"compile/{role}"],
                found[f"quantize/{role}"],
            )
    stage = grid_stage(
        config,
        embedded(embedded_twin(config)),
        store.memo,
        engines,
        heldout,
        pairs=pairs,
        left_out=left_out,
        checkpoints=None if config.capabilities.in_process else checkpoints,
        gpu=elsewhere,
    )
    ((_, done),) = run_stages(
        [stage], store, config.name, observer, fresh=["grid"] if fresh else []
    )
    store.publish({"": done.entry}, workplace.grid(config.name))
    publish_report(store, config.name, workplace.report(config.name), observer)
    return done.record, workplace.grid(config.name)


def _pairs_of(config: DeploymentConfig) -> tuple[list[tuple[str, str]], list[str]]:
    """(precisions of target and draft that the deployment could have, what is left out and why).

    Raises PlanError where there is nothing unquantized to compare with; it need not fit what
    serves.
    """
    from toolkit.plan.make import make_plan

    reference = make_plan(_of_precisions(config, "NO_QUANT", "NO_QUANT")).judgements
    raise_refused(config.name, [one for one in reference if ".quantization" in one.path])
    possible: list[tuple[str, str]] = []
    reasons: dict[str, set[str]] = {}  # why -> what
    for target, draft in itertools.product(typing.get_args(QuantAlgo), repeat=2):
        refused = [
            one
            for one in make_plan(_of_precisions(config, target, draft)).judgements
            if one.severity == "refused"
        ]
        if not refused:
            possible.append((target, draft))
        of_role = {"target": f"target {target}", "draft": f"draft {draft}"}
        for one in refused:
            what = of_role.get(one.path.partition(".")[0], f"target {target} with draft {draft}")
            reasons.setdefault(one.what, set()).add(what)
    return possible, [
        f"{', '.join(sorted(what, reverse=True))}: {why}" for why, what in reasons.items()
    ]  # targets first


def _of_precisions(config: DeploymentConfig, target: str, draft: str) -> DeploymentConfig:
    """The same in other precisions; a model in its own is as the YAML has it, so that it is the
    one that is served.
    """
    algos = {"target": target, "draft": draft}
    return config.model_copy(
        update={role: _quantized_as(model, algos[role]) for role, model in config.models.items()}
    )


def _quantized_as(model: ModelConfig, algo: str) -> ModelConfig:
    asked = model.quantization
    if algo == asked.quant_algo != "NO_QUANT":  # which is what all are compared with, whole
        return model
    kv_cache = asked.kv_cache_quant_algo if algo == "FP8" else None
    changes = {"quant_algo": algo, "kv_cache_quant_algo": kv_cache}
    return model.model_copy(update={"quantization": asked.model_copy(update=changes)})
