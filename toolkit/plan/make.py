"""The plan of a deployment: what is read (shapes, GPUs), what the rules say, what it needs and how
fast it can be.

Nothing is run, and nothing heavy is imported: a plan takes a fraction of a second and works before
anything is downloaded.
"""

from __future__ import annotations

import difflib
from pathlib import Path

from toolkit.checkpoints.hub import fetch
from toolkit.checkpoints.quantized import Quantization, read_quantization
from toolkit.checkpoints.shape import ModelShape, parse_shape, read_shape
from toolkit.config.schema import DeploymentConfig, ModelConfig
from toolkit.errors import CheckpointError, UsageError
from toolkit.facts.gpus import DRIVER_NAMES, GPUS, Gpu
from toolkit.facts.models import CONFIGS
from toolkit.facts.versions import BUILD_IMAGE, SERVING_IMAGE
from toolkit.pipeline.machine import gpus, memory_bytes
from toolkit.plan.memory import judge_memory, memory_of, parameters_in_words
from toolkit.plan.predict import predict, stage_times
from toolkit.plan.resolve import by_severity, resolve
from toolkit.plan.subject import Subject
from toolkit.records.plan import Judgement, Plan
from toolkit.words import Role

__all__ = ["gpu_asked_for", "gpu_named", "make_plan", "subject_of"]


def make_plan(config: DeploymentConfig) -> Plan:
    """Raises CheckpointError for a checkpoint whose config.json cannot be read."""
    subject, unread = subject_of(config)
    host_bytes = memory_bytes()
    resolved = resolve(subject)
    impossible = any(one.severity == "refused" for one in (*resolved, *unread))
    # Memory of what cannot be built would be advice on top of a refusal that changes it.
    fitting = () if impossible else tuple(judge_memory(subject, host_bytes))
    stages, serving = memory_of(subject, host_bytes) if _has_numbers(subject) else ((), None)
    judgements = by_severity(*unread, *resolved, *fitting)
    return Plan(
        name=config.name,
        possible=not any(one.severity == "refused" for one in judgements),
        summary=_summary(subject),
        judgements=judgements,
        memory=stages,
        serving=serving,
        predictions=predict(subject) if _has_numbers(subject) else (),
        times=stage_times(subject),
    )


def subject_of(config: DeploymentConfig) -> tuple[Subject, tuple[Judgement, ...]]:
    """The deployment with what is known around it, and a refusal for every model of which
    nothing is.
    """
    shapes: dict[Role, ModelShape] = {}
    quantized: dict[Role, Quantization] = {}
    unread: list[Judgement] = []
    models: dict[Role, ModelConfig | None] = {"target": config.target, "draft": config.draft}
    for role, model in models.items():
        if model is None:
            continue
        known = CONFIGS.get(model.hub_id or "")
        if known is not None:
            shapes[role] = parse_shape(known, where=str(model.hub_id))
            continue
        folder = _folder(model)
        if folder is not None:
            shapes[role] = read_shape(folder)
            stated = read_quantization(folder)
            if stated.quant_algo is not None or stated.kv_cache_quant_algo is not None:
                quantized[role] = stated
            continue
        what = (
            f"no folder {model.hub_id} beside the YAML; read as a model id of the hub, and nothing"
            " is known here of it"
        )
        # all that is read of it here; a build fetches the rest
        fetched = f"hf download {model.hub_id} config.json"
        hint = (
            "fix the path to its folder; or, if it is on the hub, fetch what a plan reads of it:"
            f" {fetched}"
        )
        unread.append(Judgement("shape-needed", "refused", f"{role}.checkpoint", what, hint))
    gpu, count = _gpus(config)
    return Subject(config, shapes, gpu, count, quantized), tuple(unread)


def gpu_named(driver_name: str) -> Gpu | None:
    """The row of a GPU as the driver calls it ("NVIDIA H200"); None for one that is not in the
    table.
    """
    words = set(driver_name.upper().replace("-", " ").split())
    found = [name for pattern, name in DRIVER_NAMES.items() if set(pattern.split()) <= words]
    return GPUS[found[0]] if found else None


def gpu_asked_for(written: str) -> Gpu:
    """The row that a word on the command line means: the table's own name in any case, or the
    driver's. Raises UsageError.
    """
    by_case = {name.upper(): gpu for name, gpu in GPUS.items()}
    found = by_case.get(written.upper()) or gpu_named(written)
    if found is not None:
        return found
    near = difflib.get_close_matches(written.upper(), by_case, n=1, cutoff=0.7)
    hint = f"did you mean {by_case[near[0]].name}? " if near else ""
    raise UsageError(f"no GPU {written!r} is known", hint=f"{hint}known: {', '.join(GPUS)}")


def _folder(model: ModelConfig) -> Path | None:
    """Where the checkpoint lies: the folder itself, or what the hub's cache has of an id."""
    if model.hub_id is None:
        return model.checkpoint
    try:
        return fetch(model.hub_id, model.revision, download=False)
    except CheckpointError:
        return None


def _gpus(config: DeploymentConfig) -> tuple[Gpu | None, int]:
    """(GPU, how many in all nodes): what the YAML names, else what this machine has."""
    hardware, engine = config.hardware, config.engine
    if hardware.gpu == "auto":
        names = gpus()
        return (gpu_named(names[0]) if names else None), (
            hardware.count or len(names)
        ) * hardware.nodes
    if hardware.count is not None:
        return GPUS[hardware.gpu], hardware.count * hardware.nodes
    wanted = min(engine.world_size, engine.gpus_per_node)
    return GPUS[hardware.gpu], wanted * hardware.nodes


def _has_numbers(subject: Subject) -> bool:
    """Whether arithmetic has a meaning: every shape is known, and splits as asked."""
    tp = 1 if subject.trtllm is None else subject.trtllm.tp_size
    return set(subject.shapes) == set(subject.models) and all(
        tp <= shape.num_heads for shape in subject.shapes.values()
    )


def _summary(subject: Subject) -> dict[str, str]:
    config, engine = subject.config, subject.config.engine
    found: dict[str, str] = {}
    for role, model in subject.models.items():
        name = model.hub_id or model.checkpoint.name
        size = f", {parameters_in_words(subject.shapes[role])}" if role in subject.shapes else ""
        kv = (
            f", {model.quantization.kv_cache_quant_algo} KV cache"
            if model.quantization.kv_cache_quant_algo
            else ""
        )
        found[role] = f"{name}{size}, {model.quantization.quant_algo}{kv}"
    version = subject.version
    if version is not None:
        flow = "engine flow" if subject.engine_flow is not None else "PyTorch flow"
        found["engine"] = (
            f"TensorRT-LLM {version.name}, {flow}, tp {engine.tp_size}, pp {engine.pp_size}"
        )
        if subject.engine_flow is not None and version.engine_flow:
            found["build image"] = BUILD_IMAGE.format(release=version.release)
        if version.serving_tags:
            found["serving image"] = SERVING_IMAGE.format(tag=version.serving_tags[0])
    else:
        found["engine"] = "embedded (torch)"
    found["sizes"] = (
        f"{engine.max_batch_size} requests, prompts to {engine.max_input_len}, {engine.max_seq_len}"
        " tokens with output"
    )
    kind, tuned = config.speculation.kind, config.speculation.max_draft_len == "auto"
    length = f"{subject.draft_len} tokens a step" + (" at most, to be measured" if tuned else "")
    found["speculation"] = f"{kind}, {length}" if subject.speculates else "none"
    found["hardware"] = (
        f"{subject.gpu_count} x {subject.gpu.name}"
        if subject.gpu is not None
        else "this machine's CPU"
    )
    if subject.gpu is None and subject.trtllm is not None:
        found["hardware"] = "not known"
    found["layout"] = (
        "bls" if config.triton.layout == "bls" or subject.engine_flow is not None else "llmapi"
    )
    return found
