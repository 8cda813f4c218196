"""`tune` and `tune --grid`: build the engines that are missing, measure them in every way, publish what was found."""

from __future__ import annotations

import typing
from collections.abc import Sequence
from pathlib import Path

from toolkit.assembly.asked import embedded, models_of
from toolkit.assembly.build import build
from toolkit.assembly.stages import own_way, stages_of
from toolkit.assembly.workplace import Workplace
from toolkit.config.schema import DeploymentConfig, ModelConfig, QuantAlgo
from toolkit.errors import UsageError
from toolkit.pipeline.run import Observer, run_stages, upto
from toolkit.pipeline.store import Store
from toolkit.records import Advice, Grid
from toolkit.reporting import publish_report
from toolkit.tuning import grid_stage, tune_stage

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
    """Build the engines that are missing, measure every way to draft, publish the advice: (it, its folder).

    Beside the YAML's own drafter, prompt lookup and `drafts` (checkpoints, quantized and compiled as the YAML's draft) are
    tried. measured_rounds: of running every draft length, to see how true the predictions are. Raises what the stages raise.
    """
    from toolkit.plan.make import gpu_asked_for

    elsewhere = None if gpu is None else gpu_asked_for(gpu)
    built = build(config, workplace, observer, store, until="compile")
    engines = built.stages
    ways = [*own_way(config)(engines)]
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
