"""Make the plan of a deployment: whether it can work, what memory it needs, how fast it can be.

A plan is made from the config, the models' shapes and the GPUs. It runs nothing and imports nothing
heavy, so it takes a fraction of a second and works before anything is downloaded.
"""

from __future__ import annotations

import difflib
from pathlib import Path

from toolkit.checkpoints.heads import HeadShape, captured_layers, parse_head, read_head
from toolkit.checkpoints.hub import fetch
from toolkit.checkpoints.quantized import Quantization, read_quantization
from toolkit.checkpoints.shape import ModelShape, parse_shape, read_shape
from toolkit.config.schema import DeploymentConfig, LoadGates, ModelConfig
from toolkit.errors import CheckpointError, UsageError
from toolkit.facts.gpus import DRIVER_NAMES, GPUS, Gpu
from toolkit.facts.heads import head_reader
from toolkit.facts.models import CONFIGS, HEAD_CONFIGS
from toolkit.facts.versions import BUILD_IMAGE, SERVING_IMAGE
from toolkit.pipeline.machine import cpu_flags, gpus, memory_bytes, usable_cores
from toolkit.plan.memory import judge_memory, memory_of, parameters_text
from toolkit.plan.mtp import judge_mtp_target
from toolkit.plan.predict import predict, stage_times
from toolkit.plan.resolve import by_severity, resolve
from toolkit.plan.subject import Subject
from toolkit.records.plan import Judgement, Plan
from toolkit.rounding import duration
from toolkit.words import Role

__all__ = [
    "captured_by_head",
    "gpu_from_driver_name",
    "gpu_from_user",
    "make_plan",
    "subject_of",
]

# What `adaptive` becomes, by how drafting follows the text.
ADAPTING = {
    "requests": ", chosen per request while it runs",
    "stop": ", until drafting stops for good",
}


def make_plan(config: DeploymentConfig) -> Plan:
    """Judge the deployment and predict its memory, speed and build time.

    Raises CheckpointError for a checkpoint whose config.json cannot be read.
    """
    subject, unread_models = subject_of(config)
    host_bytes = memory_bytes()
    by_rules = resolve(subject)
    # A refusal has to be fixed first, and the fix changes the memory: no advice on it until then.
    by_memory = (
        () if _is_refused(*by_rules, *unread_models) else tuple(judge_memory(subject, host_bytes))
    )
    stages, serving = memory_of(subject, host_bytes) if _has_numbers(subject) else ((), None)
    judgements = by_severity(*unread_models, *by_rules, *by_memory)
    return Plan(
        name=config.name,
        possible=not _is_refused(*judgements),
        summary=_summary(subject),
        judgements=judgements,
        memory=stages,
        serving=serving,
        predictions=predict(subject) if _has_numbers(subject) else (),
        times=stage_times(subject),
    )


def subject_of(config: DeploymentConfig) -> tuple[Subject, tuple[Judgement, ...]]:
    """Collect what the rules look at, and refuse every model whose shape is not known here."""
    shapes: dict[Role, ModelShape] = {}
    quantized: dict[Role, Quantization] = {}
    unread_models: list[Judgement] = []
    head: HeadShape | None = None
    models: dict[Role, ModelConfig | None] = {"target": config.target, "draft": config.draft}
    for role, model in models.items():
        if model is None:
            continue
        if role == "draft" and config.speculation.head is not None:
            head = _head(model)
            if head is not None:
                shapes[role] = head.as_planned
                continue
        known = CONFIGS.get(model.hub_id or "")
        if known is not None:
            shapes[role] = parse_shape(known, where=str(model.hub_id))
            continue
        folder = _folder(model)
        if folder is not None and role == "target" and config.speculation.kind == "mtp":
            judgement = judge_mtp_target(config, folder)
            if judgement is not None:
                unread_models.append(judgement)
                continue
        if folder is not None:
            shapes[role] = read_shape(folder)
            stated = read_quantization(folder)
            if stated.quant_algo is not None or stated.kv_cache_quant_algo is not None:
                quantized[role] = stated
            continue
        what = (
            f"there is no folder {model.hub_id} beside the YAML, so this is read as a model id of"
            " the hub; but the model is neither in the hub's cache nor known to the toolkit"
        )
        download = f"hf download {model.hub_id} config.json"
        hint = (
            "correct the path of the folder; or, if the model is on the hub, fetch its config.json,"
            f" which is all that a plan reads: {download}"
        )
        unread_models.append(Judgement("shape-needed", "refused", f"{role}.checkpoint", what, hint))
    gpu, count = _gpus(config)
    subject = Subject(config, shapes, gpu, count, quantized, cpu_flags(), usable_cores(), head)
    return subject, tuple(unread_models)


def captured_by_head(config: DeploymentConfig) -> tuple[int, ...] | None:
    """The target's layers that the head reads; None without a head, or if a config.json that says
    it is not here.
    """
    subject = subject_of(config)[0]
    if subject.head is None or "target" not in subject.shapes:
        return None
    reader = head_reader(config.engine.kind, config.engine.version)
    layers = subject.shapes["target"].num_layers
    return captured_layers(subject.head, layers, from_zero=reader.counts_from_zero)


def _head(model: ModelConfig) -> HeadShape | None:
    """The head as its folder, the shipped facts or the hub's cache have it.

    Raises CheckpointError for a model that is no head.
    """
    known = {**CONFIGS, **HEAD_CONFIGS}.get(model.hub_id or "")
    if known is not None:
        return parse_head(known, str(model.hub_id))
    folder = _folder(model)
    return None if folder is None else read_head(folder)


def gpu_from_driver_name(driver_name: str) -> Gpu | None:
    """Look up a GPU by the driver's name for it ("NVIDIA H200"); None if it is not in the table."""
    words = set(driver_name.upper().replace("-", " ").split())
    names = [name for pattern, name in DRIVER_NAMES.items() if set(pattern.split()) <= words]
    return GPUS[names[0]] if names else None


def gpu_from_user(name: str) -> Gpu:
    """Look up a GPU by the name a user typed: the table's name in upper or lower case, or the
    driver's name.

    Raises UsageError for a GPU that is not in the table.
    """
    by_upper_name = {known.upper(): gpu for known, gpu in GPUS.items()}
    gpu = by_upper_name.get(name.upper()) or gpu_from_driver_name(name)
    if gpu is not None:
        return gpu
    near = difflib.get_close_matches(name.upper(), by_upper_name, n=1, cutoff=0.7)
    hint = f"did you mean {by_upper_name[near[0]].name}? " if near else ""
    raise UsageError(f"no GPU {name!r} is known", hint=f"{hint}known: {', '.join(GPUS)}")


def _folder(model: ModelConfig) -> Path | None:
    """The folder of the checkpoint: as the YAML names it, or in the hub's cache; None if neither
    exists.
    """
    if model.hub_id is None:
        return model.checkpoint
    try:
        return fetch(model.hub_id, model.revision, download=False)
    except CheckpointError:
        return None


def _gpus(config: DeploymentConfig) -> tuple[Gpu | None, int]:
    """The GPU, and how many there are in all nodes together: as the YAML says, else as this machine
    has them.
    """
    hardware, engine = config.hardware, config.engine
    if hardware.gpu == "auto":
        names = gpus()
        return (gpu_from_driver_name(names[0]) if names else None), (
            hardware.count or len(names)
        ) * hardware.nodes
    if hardware.count is not None:
        return GPUS[hardware.gpu], hardware.count * hardware.nodes
    wanted = min(engine.world_size, engine.gpus_per_node)
    return GPUS[hardware.gpu], wanted * hardware.nodes


def _is_refused(*judgements: Judgement) -> bool:
    return any(judgement.severity == "refused" for judgement in judgements)


def _has_numbers(subject: Subject) -> bool:
    """Whether sizes can be computed: all shapes are known, and no rank is left without a head."""
    tp = 1 if subject.parallel is None else subject.parallel.tp_size
    return set(subject.shapes) == set(subject.models) and all(
        tp <= shape.num_heads for shape in subject.shapes.values()
    )


def _summary(subject: Subject) -> dict[str, str]:
    config, engine = subject.config, subject.config.engine
    summary: dict[str, str] = {}
    for role, model in subject.models.items():
        name = model.hub_id or model.checkpoint.name
        size = f", {parameters_text(subject.shapes[role])}" if role in subject.shapes else ""
        kv = (
            f", {model.quantization.kv_cache_quant_algo} KV cache"
            if model.quantization.kv_cache_quant_algo
            else ""
        )
        summary[role] = f"{name}{size}, {model.quantization.quant_algo}{kv}"
    version = subject.version
    if version is not None:
        flow = "engine flow" if subject.engine_flow is not None else "PyTorch flow"
        summary["engine"] = (
            f"TensorRT-LLM {version.name}, {flow}, tp {engine.tp_size}, pp {engine.pp_size}"
        )
        if subject.engine_flow is not None and version.engine_flow:
            summary["build image"] = BUILD_IMAGE.format(release=version.release)
        image = None if subject.pytorch_flow is None else subject.pytorch_flow.container_image
        if image is not None:
            summary["serving image"] = f"{image}, named in the YAML"
        elif version.serving_tags:
            summary["serving image"] = SERVING_IMAGE.format(tag=version.serving_tags[0])
    elif subject.vllm_version is not None:
        device = "CPU" if subject.serving_gpu is None else "GPU"
        summary["engine"] = (
            f"vLLM {subject.vllm_version.name}, on {device}, tp {engine.tp_size}, pp"
            f" {engine.pp_size}"
        )
        if subject.vllm_version.serving_image is not None:
            summary["serving image"] = subject.vllm_version.serving_image
    else:
        summary["engine"] = "embedded (torch)"
    summary["sizes"] = (
        f"{engine.max_batch_size} requests, prompts to {engine.max_input_len}, {engine.max_seq_len}"
        " tokens with output"
    )
    summary["speculation"] = _speculation(config, subject)
    summary["hardware"] = (
        f"{subject.gpu_count} x {subject.gpu.name}"
        if subject.gpu is not None
        else "this machine's CPU"
    )
    if subject.gpu is None and subject.trtllm is not None:
        summary["hardware"] = "not known"
    summary["layout"] = config.capabilities.layout
    if config.validation.load is not None:
        summary["open loop"] = _open_loop(config, config.validation.load)
    return summary


def _speculation(config: DeploymentConfig, subject: Subject) -> str:
    """What drafts, how much, and what shortens it."""
    speculation = config.speculation
    if not subject.speculates:
        return "none"
    adapting = None if speculation.adapts is None else config.capabilities.adaptive
    fewer = [f"{n} from {load} requests on" for load, n in speculation.draft_len_by_load.items()]
    text = f"{speculation.kind}, {subject.draft_len} tokens a step"
    if speculation.max_draft_len == "auto":
        text += " at most, to be measured"
    elif adapting == "requests" or fewer[1:]:
        text += " at most"
    text += "".join(f", {part}" for part in fewer[1:])
    return text + (ADAPTING[adapting] if adapting is not None else "")


def _open_loop(config: DeploymentConfig, limits: LoadGates) -> str:
    """At which rate requests will be sent, and for how long."""
    from toolkit.bench.load import load_schedule

    arms, sent_to = 1, "to one arm"
    if config.speculation.is_enabled:
        arms, sent_to = 2, "to both arms in turns"
        if config.capabilities.plain_arm != "request":
            sent_to += " (to one if their servers do not fit together)"
    if limits.rate == "auto":
        return (
            "the highest rate that keeps goodput, looked for in at most"
            f" {duration(limits.search_seconds)}; at it {sent_to}, at most"
            f" {duration(limits.max_seconds)}"
        )
    schedule = load_schedule(limits.rate, arms, limits)
    round_s = arms * schedule.requests / limits.rate
    least, most = duration(schedule.rounds * round_s), duration(schedule.max_rounds * round_s)
    length = f"{least} of sending"
    if most != least:
        length += f", and up to {most} while a gate is undecided"
    return f"{limits.rate:g} requests/s, {limits.arrivals}, {sent_to}: {length}"
