"""Make what `toolkit plan` prints: the plan, the check of the pair if both tokenizers are here, and
the exact commands that the stages will run.

The commands come from the functions that the stages themselves use, so that the plan cannot differ
from the build. Nothing is run, and nothing heavy is imported.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit.config.load import load_config, load_data
from toolkit.config.schema import DeploymentConfig, VllmConfig
from toolkit.engines.spec import engine_spec
from toolkit.errors import BackendUnavailable, CheckpointError, PairingError, UsageError
from toolkit.facts.heads import head_reader
from toolkit.facts.versions import VERSIONS
from toolkit.records.plan import Judgement, Plan, PlannedRun
from toolkit.words import JudgementSeverity, Role
from toolkit.workflows.folders import Workplace
from toolkit.workflows.serve import deployment_of
from toolkit.workflows.stages.package import in_container

if TYPE_CHECKING:
    from toolkit.plan.pytorch_flow import Translation
    from toolkit.quantize.calibrate import TextCount
    from toolkit.triton.package.deploy import Deployment

__all__ = ["plan_as_pytorch", "plan_of"]

RELATIVE_FOLDERS = Workplace(Path())
HOW_TO_ENTER_CONTAINER = (
    'docs/tensorrt_llm.md, "Inside NVIDIA\'s container", tells how the toolkit gets there'
)
SAME_VOCAB_RULE = "same-vocab"  # the shapes alone can judge only a part of it


def plan_of(config: DeploymentConfig, which: Callable[[str], str | None] = shutil.which) -> Plan:
    """The plan of a deployment, with its pair, its texts and its commands judged too.

    which: finds a program on the PATH. Raises CheckpointError as `make_plan` does.
    """
    from toolkit.plan.make import make_plan
    from toolkit.plan.resolve import by_severity

    plan, text, weights = make_plan(config), _calibration_text(config), list(_judge_weights(config))
    pair = [] if weights else _judge_pair(config)  # which reads them too
    judgements = by_severity(
        *_without_replaced(plan.judgements, pair),
        *pair,
        *weights,
        *_judge_texts(config),
        *_judge_calibration_text(config, text),
        *_judge_raw_texts(config),
        *_judge_template(config),
        *_judge_environment(config),
    )
    possible = not any(judgement.severity == "refused" for judgement in judgements)
    runs = tuple(_planned_runs(config, which, text)) if possible else ()
    return replace(plan, possible=possible, judgements=judgements, runs=runs)


def plan_as_pytorch(
    file: Path, overrides: Sequence[str], which: Callable[[str], str | None] = shutil.which
) -> tuple[Plan, Translation]:
    """The plan of an engine-flow deployment as it would be in the PyTorch flow, and its YAML.

    Raises ConfigError for a faulty file, UsageError for one of another kind.
    """
    from toolkit.plan.pytorch_flow import KIND, to_pytorch_flow

    config = load_config(file, overrides, texts=False)
    if config.engine_flow is None:
        raise UsageError(
            f"--as {KIND} is for deployments of kind trt_engine, and this one is"
            f" {config.engine.kind}",
            where=file,
            hint="Leave --as out, or name a file of the engine flow.",
        )
    translation = to_pytorch_flow(load_data(file, overrides))
    translated = load_config(file, overrides, texts=False, data=translation.data)
    return replace(plan_of(translated, which), changes=translation.changes), translation


def _without_replaced(
    judgements: tuple[Judgement, ...], pair: list[Judgement]
) -> Iterator[Judgement]:
    """The judgements without those of the vocabularies that the tokenizers make more exactly.

    judgements: from the shapes of the checkpoints. pair: from the tokenizers.
    """
    of_tokenizers = {judgement.severity for judgement in pair if judgement.rule == SAME_VOCAB_RULE}
    replaced = of_tokenizers & {"adjusted"}
    if "refused" in of_tokenizers:
        replaced = {"refused", "adjusted"}
    return (
        judgement
        for judgement in judgements
        if judgement.rule != SAME_VOCAB_RULE or judgement.severity not in replaced
    )


def _judge_pair(config: DeploymentConfig) -> list[Judgement]:
    """What the tokenizers say about the pair; nothing unless both are on this machine."""
    from toolkit.pairing.tokenizers import compare_pair

    draft, head = config.draft, config.speculation.head
    with_tokenizers = config.models.values() if head is None else [config.target]
    if draft is None or not all(
        model.hub_id is None and any(model.checkpoint.glob("tokenizer*"))
        for model in with_tokenizers
    ):
        return []
    if head is not None and (draft.hub_id is not None or not any(draft.checkpoint.iterdir())):
        return []
    try:
        findings = compare_pair(
            config.target.checkpoint,
            draft.checkpoint,
            tp_size=config.engine.tp_size,
            head=head,
            reader=head_reader(config.engine.kind, config.engine.version),
        ).findings
    except PairingError as error:
        return [Judgement(SAME_VOCAB_RULE, "refused", "draft.checkpoint", error.what, error.hint)]
    # Of a pair that fits, a build changes nothing but the padding rows of the vocabulary.
    severities: dict[str, JudgementSeverity] = {"vocabulary": "adjusted"}
    return [
        Judgement(
            SAME_VOCAB_RULE,
            severities.get(finding.check, "warning"),
            "draft.checkpoint",
            f"{finding.check}: {finding.detail}",
        )
        for finding in findings
        if finding.severity == "warning"
    ]


def _judge_weights(config: DeploymentConfig) -> Iterator[Judgement]:
    """Refuse weights that are here and damaged: a file that is cut off, or a shard that is missing.
    Only headers are read.
    """
    from toolkit.checkpoints.reader import check_files

    for role, model in config.models.items():
        if model.hub_id is not None:
            continue
        try:
            check_files(model.checkpoint)
        except CheckpointError as error:
            what = error.what if error.where is None else f"{error.where}: {error.what}"
            yield Judgement("checkpoint-files", "refused", f"{role}.checkpoint", what, error.hint)


def _judge_texts(config: DeploymentConfig) -> Iterator[Judgement]:
    """Warn about files of prompts and calibration text that are missing, and refuse unusable ones.

    A plan does not need these files, but the build after it does.
    """
    from toolkit.bench.prompts import read_prompts
    from toolkit.quantize.calibrate import split_texts

    validation, calibration, chat = config.validation, config.calibration, config.target.checkpoint
    checks: list[tuple[str, str, dict[str, Path | None], Callable[[], object]]] = [
        (
            "validation.prompts",
            "prompt",
            {"validation.prompts": validation.prompts},
            partial(read_prompts, validation.prompts, validation.max_prompts, chat),
        )
    ]
    if calibration is not None:
        files = {
            "calibration.dataset": calibration.dataset,
            "calibration.heldout": calibration.heldout,
        }
        checks.append(("calibration", "text", files, partial(split_texts, calibration, chat)))
    for where, key, paths, read in checks:
        missing = [
            (path, file) for path, file in paths.items() if file is not None and not file.exists()
        ]
        for path, file in missing:
            hint = f"write JSON Lines with a `{key}` per line before `toolkit build`"
            yield Judgement("toolkit-texts", "warning", path, f"there is no {file} yet", hint)
        if not missing:
            try:
                read()
            except (UsageError, CheckpointError) as error:
                what = error.what if error.where is None else f"{error.where}: {error.what}"
                yield Judgement("toolkit-texts", "refused", where, what, error.hint)


def _judge_raw_texts(config: DeploymentConfig) -> Iterator[Judgement]:
    """Warn about raw text beside a chat template, or for an instruct model of the hub."""
    from toolkit.facts.models import is_instruct
    from toolkit.workflows.raw_texts import RAW_TEXT_HINT, raw_texts

    hub_id = config.target.hub_id
    known = hub_id is not None and is_instruct(hub_id)
    for key, what in raw_texts(config, is_instruct=known):
        yield Judgement("toolkit-raw-text", "warning", key, what, RAW_TEXT_HINT)


def _judge_template(config: DeploymentConfig) -> Iterator[Judgement]:
    """Refuse a chat template of the gateway that cannot be used, since it would not start."""
    from toolkit.checkpoints.chat import check_template

    file = config.gateway.chat_template
    if file is None:
        return
    try:
        check_template(file)
    except CheckpointError as error:
        what = f"{file.name}: {error.what}"
        hint = "correct this file, or remove the line for the template of the target's checkpoint"
        yield Judgement("toolkit-chat-template", "refused", "gateway.chat_template", what, hint)


def _calibration_text(config: DeploymentConfig) -> TextCount | None:
    """How much calibration text there is; None if no model is quantized here, or the text cannot be
    read, which `_judge_texts` judges.
    """
    from toolkit.quantize.calibrate import count_texts

    if config.calibration is None or not any(
        model.quantization.quant_algo != "NO_QUANT" for model in config.models.values()
    ):
        return None
    try:
        return count_texts(config.calibration, config.target.checkpoint)
    except (UsageError, CheckpointError):
        return None


def _judge_calibration_text(
    config: DeploymentConfig, count: TextCount | None
) -> Iterator[Judgement]:
    """Warn if there is less calibration text than the YAML plans with."""
    calibration = config.calibration
    if calibration is None or count is None:
        return
    about = "about " if count.is_estimate else ""
    if count.texts < calibration.calib_size:
        yield Judgement(
            "toolkit-calibration-text",
            "warning",
            "calibration.calib_size",
            f"{count.texts} texts are there for calibration, and {calibration.calib_size} are"
            f" planned; they hold {about}{count.tokens:,} tokens",
            "Add lines like your traffic to the dataset, or lower calib_size.",
        )
    if count.longest_tokens < calibration.calib_max_seq_length:
        yield Judgement(
            "toolkit-calibration-text",
            "warning",
            "calibration.calib_max_seq_length",
            f"the longest calibration text has {about}{count.longest_tokens:,} tokens, and texts of"
            f" {calibration.calib_max_seq_length:,} are planned: nothing is calibrated on longer"
            " contexts",
            "Add texts as long as your prompts, or lower calib_max_seq_length.",
        )


def _judge_environment(config: DeploymentConfig) -> Iterator[Judgement]:
    """Warn if this machine serves with vLLM and has none, or another one. A plan may be made
    elsewhere, so nothing is refused.
    """
    from toolkit.engines.vllm.environment import find_environment
    from toolkit.pipeline.machine import gpus

    engine = config.vllm_engine
    if engine is None or (config.hardware.gpu != "auto" and not gpus()):
        return
    path, device = "engine.python", engine_spec(config, "target").device
    try:
        environment = find_environment(engine.python, version=engine.vllm)
    except BackendUnavailable as error:
        what = error.fault or "there is no Python environment with vLLM here"
        yield Judgement("vllm-environment", "warning", path, what, error.hint)
        return
    if environment.platform not in (None, device):
        what = (
            f"{environment.python} has vLLM for {environment.platform}, and the deployment is for"
            f" {device}"
        )
        hint = f"name the Python of an environment that has vLLM for {device}"
        yield Judgement("vllm-environment", "warning", path, what, hint)


def _planned_runs(
    config: DeploymentConfig, which: Callable[[str], str | None], text: TextCount | None
) -> Iterator[PlannedRun]:
    """The commands and calls of every stage, in their order."""
    for role in config.models:
        yield from _quantize_run(config, role, text)
    if config.vllm_engine is not None:
        yield from _vllm_runs(config, config.vllm_engine)
        return
    deployment = deployment_of(config)
    if deployment is None:
        yield from _serve_here_run(config)
        return
    if config.capabilities.needs_trtllm_build:
        for role in config.models:
            yield _compile_run(config, role, which)
    yield from _container_runs(config, deployment)
    if config.capabilities.loads_draft_with_target:
        yield _load_run(config)


def _quantize_run(
    config: DeploymentConfig, role: Role, count: TextCount | None
) -> Iterator[PlannedRun]:
    from toolkit.checkpoints.quantized import read_quantization
    from toolkit.quantize.algorithms import algorithm_of, presets

    model, calibration = config.models[role], config.calibration
    algorithm = algorithm_of(model.quantization.quant_algo)
    if algorithm is None or calibration is None:
        return
    if model.hub_id is None and read_quantization(model.checkpoint).quant_algo is not None:
        return  # a quantized checkpoint is used as it is
    texts = f"{calibration.calib_size} texts of at most {calibration.calib_max_seq_length} tokens"
    if count is not None:
        about = "about " if count.is_estimate else ""
        texts = f"{count.texts} texts with {about}{count.tokens:,} tokens in all"
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


def _compile_run(
    config: DeploymentConfig, role: Role, which: Callable[[str], str | None]
) -> PlannedRun:
    from toolkit.engines.trtllm.command import build_flags
    from toolkit.engines.trtllm.where import ContainerBuilder, planned_builder
    from toolkit.quantize.stage import TRTLLM_FOLDER

    spec, quantization = engine_spec(config, role), config.models[role].quantization
    assert spec.tensorrt_llm is not None  # since its kind needs trtllm-build
    builder = planned_builder(
        spec.tensorrt_llm.builder, spec.tensorrt_llm.version, role, which=which
    )
    source = RELATIVE_FOLDERS.store / "quantize" / role / "KEY" / "content" / TRTLLM_FOLDER
    out_dir = RELATIVE_FOLDERS.engines(config.name) / role
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


def _load_run(config: DeploymentConfig) -> PlannedRun:
    from toolkit.engines.trtllm.llm_args import llm_args
    from toolkit.engines.trtllm.speculative_config import printing_module, with_speculative_config
    from toolkit.plan.make import captured_by_head

    spec = engine_spec(config, "target")
    assert spec.tensorrt_llm is not None  # since its kind loads both models
    asked = replace(spec.tensorrt_llm, captured_layers=captured_by_head(config))
    args = in_container(llm_args(spec, asked, config.target.quantization.kv_cache_quant_algo))
    takes_mapping = VERSIONS[asked.version].speculative_config == "mapping"
    return PlannedRun(
        "serve",
        "the server's Python model",
        call="tensorrt_llm.LLM",
        arguments=with_speculative_config(args, printing_module(takes_mapping=takes_mapping)),
    )


def _container_runs(config: DeploymentConfig, deployment: Deployment) -> Iterator[PlannedRun]:
    from toolkit.triton.package.deploy import docker_run, launch_command

    if deployment.nodes == 1:
        if deployment.model_py == "ours":  # nothing of any other model can be judged
            place = f"inside {deployment.image}; {HOW_TO_ENTER_CONTAINER}"
            yield PlannedRun("validate", place, command=("toolkit", "build", "CONFIG"))
        repository = f"./{RELATIVE_FOLDERS.repository(config.name)}"
        place = "docker-run.sh, on the host: the finished repository in a container of its own"
        yield PlannedRun("serve", place, command=tuple(docker_run(deployment, repository)))
    yield PlannedRun(
        "serve", "launch.sh, in the container", command=tuple(launch_command(deployment))
    )


def _serve_here_run(config: DeploymentConfig) -> Iterator[PlannedRun]:
    from toolkit.triton.process.server import server_arguments

    arguments = server_arguments(RELATIVE_FOLDERS.repository(config.name), config.triton)
    yield PlannedRun("serve", "this machine", command=("tritonserver", *arguments))


def _vllm_runs(config: DeploymentConfig, engine: VllmConfig) -> Iterator[PlannedRun]:
    """The servers of both arms, and how the finished repository is started elsewhere.

    The plain arm's server is there only while the deployment is judged.
    """
    from toolkit.engines.vllm.arguments import (
        SPECULATION,
        brings_plugin,
        check_draft_path,
        engine_args,
        environment_of,
        has_draft_model,
        resolved,
        without_speculation,
    )
    from toolkit.engines.vllm.environment import default_python
    from toolkit.engines.vllm.sampling_plugin import FOLDER
    from toolkit.engines.vllm.server import server_command
    from toolkit.pipeline.machine import gpus
    from toolkit.triton.package.deploy_vllm import VllmDeployment

    spec, quantization = engine_spec(config, "target"), config.target.quantization
    assert spec.vllm is not None  # since its kind is vllm
    folder, python = RELATIVE_FOLDERS.engines(config.name), engine.python or default_python()
    if engine.python is None and spec.device != "cpu" and not gpus():
        python = Path("PYTHON")  # of the other machine, which is not known yet
    args = resolved(
        engine_args(spec, spec.vllm, quantization.kv_cache_quant_algo),
        folder / "target",
        folder / "draft",
    )
    if has_draft_model(args):  # vLLM reads the whole path, and a build's folders lie below this one
        draft = {**args[SPECULATION], "model": str((folder / "draft").absolute())}
        check_draft_path({SPECULATION: draft})
    variables = [f"{name}={value}" for name, value in environment_of(spec, spec.vllm).items()]
    if brings_plugin(spec, spec.vllm):
        variables.append(f"PYTHONPATH={folder / 'target' / FOLDER}")

    def serving(arguments: Mapping[str, Any]) -> tuple[str, ...]:
        host, port = config.triton.host, config.triton.http_port
        command = server_command(python, arguments, config.name, host=host, port=port)
        if port == 0:  # a free one, which is not known yet
            command[command.index("--port") + 1] = "PORT"
        return ("env", *variables, *command)

    where = "this machine" if spec.device == "cpu" else "the machine with the GPUs"
    yield PlannedRun("serve", where, command=serving(args))
    if config.speculation.is_enabled:
        plain = serving(without_speculation(args))
        yield PlannedRun("validate", f"{where}: the plain arm", command=plain)
    repository = f"./{RELATIVE_FOLDERS.repository(config.name)}"
    deployment = VllmDeployment(
        config.name,
        engine.vllm,
        spec.device,
        environment_of(spec, spec.vllm),
        engine.world_size,
        engine.gpus_per_node,
        config.speculation.is_enabled,
    )
    if deployment.nodes > 1:
        place = f"each of {deployment.nodes} nodes; ray.sh says what to set there"
        yield PlannedRun("serve", place, command=(f"{repository}/ray.sh",))
    if deployment.has_triton:
        place = f"the host: the finished repository in {deployment.triton_image}"
        yield PlannedRun("serve", place, command=(f"{repository}/docker-run.sh",))
