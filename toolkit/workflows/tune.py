"""`tune` and `tune --grid`: build the missing engines, measure them, and publish the result."""

from __future__ import annotations

import itertools
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from toolkit.config.schema import DeploymentConfig, ModelConfig
from toolkit.errors import UsageError
from toolkit.facts.gpus import Gpu
from toolkit.pipeline.run import Observer, run_stages
from toolkit.pipeline.stage import Done, Stage
from toolkit.pipeline.store import Store
from toolkit.records.advice import Advice, Grid
from toolkit.records.plan import MemoryItem
from toolkit.words import QuantAlgo, Role
from toolkit.workflows.build import build
from toolkit.workflows.deployment import embedded, embedded_twin, sampled_rule
from toolkit.workflows.fits_here import must_stream
from toolkit.workflows.folders import Workplace
from toolkit.workflows.measured_vllm import VllmCosts
from toolkit.workflows.report import publish_report
from toolkit.workflows.serve_vllm import check_vllm
from toolkit.workflows.stages.sequence import (
    TWIN,
    embedded_stages,
    is_measured_on_server,
    methods_of_yaml,
    raise_refused,
    ready,
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
    stream: bool = False,
    fresh: bool = False,
) -> tuple[Advice, Path]:
    """Build the missing engines, measure every drafting method, and publish the advice: (the
    advice, its folder).

    The methods are the YAML's own drafter, prompt lookup, and `drafts`: checkpoints that are
    quantized and compiled like the YAML's draft. measured_rounds: how many rounds run every draft
    length, to check the predictions; 0 for none. Raises what the stages raise.

    TensorRT-LLM and vLLM run only in their servers. For them, acceptance is measured on the
    embedded engine with the same quantized checkpoints, and costs are predicted: for `gpu`, or for
    the GPU that the YAML names or this machine has. vLLM without a GPU is measured in its own
    server. Models that do not fit this machine are streamed over given texts
    (`toolkit.workflows.measured_streamed`); stream: even where they fit.
    """
    predicted_gpu = _gpu_of_costs(config, gpu, measured_rounds)
    if stream and config.capabilities.in_process and predicted_gpu is None:
        raise UsageError(
            "--stream has no model in memory whose steps could be timed",
            hint="Give --gpu H200, for which costs are predicted, or leave --stream out.",
        )
    if not config.capabilities.in_process:
        must_stream(config)  # raises, before anything is downloaded, if not even a layer fits
    served_drafts: dict[str, Done] = {}
    with_drafts = [_with_draft(config, checkpoint) for checkpoint in drafts]
    fetched = config  # the names in the advice stay those of the YAML
    if stream or not config.capabilities.in_process:
        fetched = ready(config, download=True).config
        streamed = stream or any(map(must_stream, (fetched, *with_drafts)))
        stages = embedded_stages(fetched, workplace, store.memo, streamed=streamed)
        engines = _run(stages, store, f"{config.name}.advised", observer)
    else:
        streamed = False
        engines = build(config, workplace, observer, store, until="compile").stages
    made_by: Literal["compile", "quantize"] = "quantize" if streamed else "compile"
    checkpoints = None
    if not config.capabilities.in_process:
        checkpoints = {role: engines[f"quantize/{role}"] for role in config.models}
        if config.draft is not None:
            served_drafts[config.draft.checkpoint.name] = checkpoints["draft"]
    methods = [*methods_of_yaml(config, made_by)(engines)]
    for number, (checkpoint, with_draft) in enumerate(zip(drafts, with_drafts, strict=True), 1):
        with_draft = ready(with_draft, download=True).config
        stages = embedded_stages(with_draft, workplace, store.memo, streamed=streamed)
        built = _run(stages, store, f"{config.name}.draft-{number}", observer)
        methods.append((checkpoint.name, "draft_target", built[f"{made_by}/draft"]))
        served_drafts[checkpoint.name] = built["quantize/draft"]
    if config.capabilities.has_ngram and not config.speculation.has_ngram:
        methods.append(("ngram", "ngram", None))
    served = None
    if checkpoints is not None and predicted_gpu is None:
        target = checkpoints["target"]
        served = VllmCosts(config, lambda finished: target, lambda finished: served_drafts)
    stage = tune_stage(
        config,
        embedded(embedded_twin(fetched)),
        store.memo,
        lambda finished: methods,
        rule=sampled_rule(config),
        target=engines[f"{made_by}/target"],
        checkpoints=None if checkpoints is None else lambda finished: checkpoints,
        measured_rounds=measured_rounds,
        gpu=predicted_gpu,
        served=served,
        streamed=streamed,
    )
    ((_, done),) = run_stages(
        [stage], store, config.name, observer, fresh=["tune"] if fresh else []
    )
    store.publish({"": done.entry}, workplace.advice(config.name))
    publish_report(store, config.name, workplace.report(config.name), observer)
    return done.record, workplace.advice(config.name)


def _with_draft(config: DeploymentConfig, checkpoint: Path) -> DeploymentConfig:
    """The deployment with another draft, quantized like its own."""
    model = (config.draft or config.target).model_copy(update={"checkpoint": checkpoint.resolve()})
    speculation = config.speculation.model_copy(update={"kind": "draft_target"})
    return config.model_copy(update={"draft": model, "speculation": speculation})


def _run(stages: Sequence[Stage], store: Store, name: str, observer: Observer) -> dict[str, Done]:
    """Run the stages; their results, with the embedded engines under the names of the real ones."""
    return {
        stage.replace(TWIN, "compile/"): done
        for stage, done in run_stages(stages, store, name, observer)
    }


def _gpu_of_costs(
    config: DeploymentConfig, gpu_name: str | None, measured_rounds: int
) -> Gpu | None:
    """The GPU whose costs are predicted; None if the costs are measured on this machine.

    gpu_name: as the user gave it. Raises UsageError if costs can be neither measured nor predicted,
    BackendUnavailable if only a server that is missing could measure them.
    """
    from toolkit.plan.make import gpu_from_user, subject_of

    if config.capabilities.in_process:
        return None if gpu_name is None else gpu_from_user(gpu_name)
    kind = config.engine.kind
    if measured_rounds > 0:
        what = (
            f"--measure runs draft lengths in this process, and engine.kind {kind} runs only in"
            " its server"
        )
        raise UsageError(
            what,
            hint=(
                "Leave --measure out; `toolkit validate` serves and measures the YAML's draft"
                " length."
            ),
        )
    if not config.speculation.is_enabled:
        raise UsageError(
            "this deployment does not speculate, so there is nothing to advise",
            hint="Set speculation.kind.",
        )
    if gpu_name is None and is_measured_on_server(config):
        check_vllm(config)
        return None
    gpu = subject_of(config)[0].gpu if gpu_name is None else gpu_from_user(gpu_name)
    if gpu is None:
        raise UsageError(
            f"the costs of engine.kind {kind} are predicted for a GPU, and none is named or here",
            hint="Set hardware.gpu, or give --gpu H200.",
        )
    return gpu


def tune_grid(
    config: DeploymentConfig,
    workplace: Workplace,
    observer: Observer,
    store: Store,
    *,
    gpu: str | None = None,
    stream: bool = False,
    fresh: bool = False,
) -> tuple[Grid, Path]:
    """Quantize and compile both models in every precision, measure every pair of them, and publish
    the grid: (the grid, its folder).

    Pairs that the plan refuses are left out. Speeds are measured, or predicted as `tune` predicts
    costs; of engines that run only in their server, they are predicted. Models that do not fit this
    machine are streamed, and then speeds are predicted; stream: even where they fit. Raises
    UsageError without a draft or calibration text, and what the stages raise.
    """
    from toolkit.quantize.calibrate import split_texts

    if gpu is None and is_measured_on_server(config):
        raise UsageError(
            "the grid runs every pair of precisions in this process or predicts it for a GPU;"
            f" engine.kind {config.engine.kind} runs only in its server, and no GPU is named or"
            " here",
            hint=(
                "Give --gpu H200. To measure on this machine, give each pair a YAML, and run"
                " `toolkit tune` without --grid."
            ),
        )

    if config.draft is None or config.calibration is None:
        raise UsageError(
            "the grid quantizes target and draft",
            hint="Give the YAML a `draft` and a `calibration` section.",
        )
    predicted_gpu = _gpu_of_costs(config, gpu, measured_rounds=0)
    if predicted_gpu is not None and not config.capabilities.in_process:
        # The plan judges the pairs for this GPU.
        config = config.model_copy(
            update={"hardware": config.hardware.model_copy(update={"gpu": predicted_gpu.name})}
        )
    config = ready(config, download=True).config
    assert config.calibration is not None  # checked above
    heldout = split_texts(config.calibration, config.target.checkpoint)[1]
    pairs, left_out = _pairs_of(config)
    streamed = stream or _must_stream_grid(config, pairs, is_timed=predicted_gpu is None)
    if streamed and predicted_gpu is None:
        raise UsageError(
            "streamed models are not in memory, so their pairs cannot be run",
            hint="Give --gpu H200, for which speeds are predicted.",
        )
    precisions = {
        role: {"NO_QUANT", *(pair[index] for pair in pairs)}
        for index, role in enumerate(config.models)
    }
    engines: dict[Role, dict[QuantAlgo, Done]] = {role: {} for role in precisions}
    checkpoints: dict[Role, dict[QuantAlgo, Done]] = {role: {} for role in precisions}
    for algo in typing.get_args(QuantAlgo):
        roles = [role for role, algos in precisions.items() if algo in algos]
        if not roles:
            continue
        algos = [algo if role in roles else "NO_QUANT" for role in precisions]
        pair = _of_precisions(config, *algos)
        stages = embedded_stages(pair, workplace, store.memo, streamed=streamed)
        built = _run(stages, store, f"{config.name}.{algo}", observer)
        for role in roles:
            engines[role][algo] = built[f"{'quantize' if streamed else 'compile'}/{role}"]
            checkpoints[role][algo] = built[f"quantize/{role}"]
    stage = grid_stage(
        config,
        embedded(embedded_twin(config)),
        store.memo,
        engines,
        heldout,
        pairs=pairs,
        left_out=left_out,
        checkpoints=None if config.capabilities.in_process else checkpoints,
        gpu=predicted_gpu,
        streamed=streamed,
    )
    ((_, done),) = run_stages(
        [stage], store, config.name, observer, fresh=["grid"] if fresh else []
    )
    store.publish({"": done.entry}, workplace.grid(config.name))
    publish_report(store, config.name, workplace.report(config.name), observer)
    return done.record, workplace.grid(config.name)


def _must_stream_grid(
    config: DeploymentConfig, pairs: Sequence[tuple[QuantAlgo, QuantAlgo]], *, is_timed: bool
) -> bool:
    """Whether this machine cannot hold what the grid holds at once: the unquantized target, with
    which all are compared, one other target, and a draft; of every precision, if pairs are timed.

    Raises UsageError if it cannot even hold a layer.
    """
    from toolkit.plan.make import subject_of
    from toolkit.plan.memory import weight_bytes

    shapes = subject_of(config)[0].shapes
    if set(shapes) != set(config.models):
        return False
    dtype = embedded(embedded_twin(config)).dtype
    sizes = {
        role: {
            algo: weight_bytes(shapes[role], algo, dtype=dtype)
            for algo in {pair[index] for pair in pairs} - {"NO_QUANT"}
        }
        for index, role in enumerate(config.models)
    }
    more = [MemoryItem("a second target", max(sizes["target"].values(), default=0), "quantized")]
    if is_timed:
        more.append(MemoryItem("more drafts", sum(sizes["draft"].values()), "of every precision"))
    return must_stream(_of_precisions(config, "NO_QUANT", "NO_QUANT"), more)


def _pairs_of(
    config: DeploymentConfig,
) -> tuple[list[tuple[QuantAlgo, QuantAlgo]], list[str]]:
    """The precisions of (target, draft) that the plan allows, and sentences about the others.

    Raises PlanError if the unquantized pair, with which all are compared, is refused because of its
    quantization. It may be refused for another reason, as it need not fit the serving machine.
    """
    from toolkit.plan.make import make_plan

    reference = make_plan(_of_precisions(config, "NO_QUANT", "NO_QUANT")).judgements
    raise_refused(
        config.name, [judgement for judgement in reference if ".quantization" in judgement.path]
    )
    possible: list[tuple[QuantAlgo, QuantAlgo]] = []
    left_out: dict[str, set[str]] = {}  # reason -> the precisions that it rules out
    for target, draft in itertools.product(typing.get_args(QuantAlgo), repeat=2):
        refused = [
            judgement
            for judgement in make_plan(_of_precisions(config, target, draft)).judgements
            if judgement.severity == "refused"
        ]
        if not refused:
            possible.append((target, draft))
        of_role = {"target": f"target {target}", "draft": f"draft {draft}"}
        for judgement in refused:
            role = judgement.path.partition(".")[0]
            precision = of_role.get(role, f"target {target} with draft {draft}")
            left_out.setdefault(judgement.what, set()).add(precision)
    return possible, [
        f"{', '.join(sorted(ruled_out, reverse=True))}: {reason}"  # targets come first
        for reason, ruled_out in left_out.items()
    ]


def _of_precisions(config: DeploymentConfig, target: str, draft: str) -> DeploymentConfig:
    """The deployment in other precisions.

    A model in the YAML's own precision stays as it is, so that its engine is the served one.
    """
    algos = {"target": target, "draft": draft}
    return config.model_copy(
        update={role: _quantized_as(model, algos[role]) for role, model in config.models.items()}
    )


def _quantized_as(model: ModelConfig, algo: str) -> ModelConfig:
    """The model in another precision. NO_QUANT, with which all are compared, has no quantized KV
    cache.
    """
    stated = model.quantization
    if algo == stated.quant_algo != "NO_QUANT":
        return model
    kv_cache = stated.kv_cache_quant_algo if algo == "FP8" else None
    changes = {"quant_algo": algo, "kv_cache_quant_algo": kv_cache}
    return model.model_copy(update={"quantization": stated.model_copy(update=changes)})
