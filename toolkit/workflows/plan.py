"""What `toolkit plan` says: the plan, the pair where both tokenizers are here, and what the stages
will run, word by word.

What will run is asked of the very functions that the stages use, so that the plan cannot say one
thing and the build do another. Nothing is run, and nothing heavy is imported.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from toolkit.config.schema import DeploymentConfig
from toolkit.engines.spec import engine_spec
from toolkit.errors import PairingError, UsageError
from toolkit.facts.versions import VERSIONS
from toolkit.records.plan import Judgement, Plan, PlannedRun
from toolkit.words import JudgementSeverity, Role
from toolkit.workflows.folders import Workplace
from toolkit.workflows.serve import deployment_of
from toolkit.workflows.stages.package import in_container

if TYPE_CHECKING:
    from toolkit.triton.package.deploy import Deployment

__all__ = ["plan_of"]

HERE = Workplace(Path())
IN_CONTAINER = (
    'docs/tensorrt_llm.md, "Inside NVIDIA\'s container", tells how the toolkit gets there'
)
SAME_VOCAB = "same-vocab"  # the rule, of which the shapes know a part


def plan_of(config: DeploymentConfig, which: Callable[[str], str | None] = shutil.which) -> Plan:
    """which: finds a program on the PATH. Raises CheckpointError as `make_plan`."""
    from toolkit.plan.make import make_plan
    from toolkit.plan.resolve import by_severity

    plan, pair = make_plan(config), _pair(config)
    judgements = by_severity(*_unless_read(plan.judgements, pair), *pair, *_texts(config))
    possible = not any(one.severity == "refused" for one in judgements)
    runs = tuple(_runs(config, which)) if possible else ()
    return replace(plan, possible=possible, judgements=judgements, runs=runs)


def _unless_read(judgements: tuple[Judgement, ...], pair: list[Judgement]) -> Iterator[Judgement]:
    """Without what the shapes alone say of the vocabularies, where the tokenizers have said it
    better.
    """
    read = {one.severity for one in pair if one.rule == SAME_VOCAB}
    told = {"refused", "adjusted"} if "refused" in read else read & {"adjusted"}
    return (one for one in judgements if one.rule != SAME_VOCAB or one.severity not in told)


def _pair(config: DeploymentConfig) -> list[Judgement]:
    """What the tokenizers say, where both lie on this machine."""
    from toolkit.pairing.tokenizers import compare_pair

    draft, models = config.draft, config.models.values()
    if draft is None or not all(
        model.hub_id is None and any(model.checkpoint.glob("tokenizer*")) for model in models
    ):
        return []
    try:
        findings = compare_pair(
            config.target.checkpoint, draft.checkpoint, tp_size=config.engine.tp_size
        ).findings
    except PairingError as error:
        return [Judgement(SAME_VOCAB, "refused", "draft.checkpoint", error.what, error.hint)]
    # Of a pair that fits, padding rows are the one thing that a build changes.
    severities: dict[str, JudgementSeverity] = {"vocabulary": "adjusted"}
    return [
        Judgement(
            SAME_VOCAB,
            severities.get(one.check, "warning"),
            "draft.checkpoint",
            f"{one.check}: {one.detail}",
        )
        for one in findings
        if one.severity == "warning"
    ]


def _texts(config: DeploymentConfig) -> Iterator[Judgement]:
    """A plan needs no texts, and a build does; but those that are there have to be of use to it."""
    from toolkit.bench.prompts import read_prompts
    from toolkit.quantize.calibrate import split_texts

    validation, calibration = config.validation, config.calibration
    wanted: list[tuple[str, str, dict[str, Path | None], Callable[[], object]]] = [
        (
            "validation.prompts",
            "prompt",
            {"validation.prompts": validation.prompts},
            partial(read_prompts, validation.prompts, validation.max_prompts),
        )
    ]
    if calibration is not None:
        files = {
            "calibration.dataset": calibration.dataset,
            "calibration.heldout": calibration.heldout,
        }
        wanted.append(("calibration", "text", files, partial(split_texts, calibration)))
    for where, key, paths, read in wanted:
        missing = [
            (path, file) for path, file in paths.items() if file is not None and not file.is_file()
        ]
        for path, file in missing:
            hint = f"write JSON Lines with a `{key}` per line before `toolkit build`"
            yield Judgement("toolkit-texts", "warning", path, f"there is no {file} yet", hint)
        if not missing:
            try:
                read()
            except UsageError as error:
                said = error.what if error.where is None else f"{error.where}: {error.what}"
                yield Judgement("toolkit-texts", "refused", where, said, error.hint)


def _runs(config: DeploymentConfig, which: Callable[[str], str | None]) -> Iterator[PlannedRun]:
    for role in config.models:
        yield from _quantizing(config, role)
    deployment = deployment_of(config)
    if deployment is None:
        yield from _serving_here(config)
        return
    if config.capabilities.needs_trtllm_build:
        for role in config.models:
            yield _compiling(config, role, which)
    yield from _launching(config, deployment)
    if config.capabilities.loads_draft_with_target:
        yield _loading(config)


def _quantizing(config: DeploymentConfig, role: Role) -> Iterator[PlannedRun]:
    from toolkit.checkpoints.quantized import read_quantization
    from toolkit.quantize.algorithms import algorithm_of, presets

    model, calibration = config.models[role], config.calibration
    algorithm = algorithm_of(model.quantization.quant_algo)
    if algorithm is None or calibration is None:
        return
    if model.hub_id is None and read_quantization(model.checkpoint).quant_algo is not None:
        return  # it is taken as it is
    texts = f"{calibration.calib_size} texts of at most {calibration.calib_max_seq_length} tokens"
    yield PlannedRun(
        f"quantize/{role}",
        "this environment",
        call="modelopt.torch.quantization.quantize",
        arguments={
            "model": str(model.checkpoint),
            "config": " + ".join(presets(algorithm, model.quantization.kv_cache_quant_algo)),
            "forward_loop": f"{texts}, {calibration.batch_size} at a time",
        },
    )


def _compiling(
    config: DeploymentConfig, role: Role, which: Callable[[str], str | None]
) -> PlannedRun:
    from toolkit.engines.trtllm.command import build_flags
    from toolkit.engines.trtllm.where import ContainerBuilder, planned_builder
    from toolkit.quantize.stage import TRTLLM_FOLDER

    spec, quantization = engine_spec(config, role), config.models[role].quantization
    assert spec.tensorrt_llm is not None  # of this kind
    builder = planned_builder(
        spec.tensorrt_llm.builder, spec.tensorrt_llm.version, role, which=which
    )
    source = HERE.store / "quantize" / role / "KEY" / "content" / TRTLLM_FOLDER
    out_dir = HERE.engines(config.name) / role
    checkpoint_dir, output_dir, timing_cache = builder.paths(source, out_dir, Path("TEMPORARY"))
    command = build_flags(
        spec,
        spec.tensorrt_llm,
        quant_algo=quantization.quant_algo,
        kv_cache_quant_algo=quantization.kv_cache_quant_algo,
        checkpoint_dir=checkpoint_dir,
        output_dir=output_dir,
        timing_cache=timing_cache,
    )
    place = "the build image" if isinstance(builder, ContainerBuilder) else "this environment"
    return PlannedRun(
        f"compile/{role}", place, command=builder.command(command.arguments, source, out_dir)
    )


def _loading(config: DeploymentConfig) -> PlannedRun:
    from toolkit.engines.trtllm.llm_args import llm_args

    spec = engine_spec(config, "target")
    assert spec.tensorrt_llm is not None  # of this kind
    args = in_container(
        llm_args(spec, spec.tensorrt_llm, config.target.quantization.kv_cache_quant_algo)
    )
    return PlannedRun("serve", "the server's Python model", call="tensorrt_llm.LLM", arguments=args)


def _launching(config: DeploymentConfig, deployment: Deployment) -> Iterator[PlannedRun]:
    from toolkit.triton.package.deploy import docker_run, launch_command

    if deployment.nodes == 1 and VERSIONS[deployment.version].serving_tags:
        if deployment.model_py == "ours":  # else nothing of it can be judged
            place = f"inside {deployment.image}; {IN_CONTAINER}"
            yield PlannedRun("validate", place, command=("toolkit", "build", "CONFIG"))
        repository = f"./{HERE.repository(config.name)}"
        place = "docker-run.sh, on the host: the finished repository in a container of its own"
        yield PlannedRun("serve", place, command=tuple(docker_run(deployment, repository)))
    yield PlannedRun(
        "serve", "launch.sh, in the container", command=tuple(launch_command(deployment))
    )


def _serving_here(config: DeploymentConfig) -> Iterator[PlannedRun]:
    from toolkit.triton.process.server import server_arguments

    arguments = server_arguments(HERE.repository(config.name), config.triton)
    yield PlannedRun("serve", "this machine", command=("tritonserver", *arguments))
