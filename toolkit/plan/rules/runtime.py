"""How it runs: speculation, ranks and machines."""

from __future__ import annotations

from toolkit.config.schema import HardwareConfig
from toolkit.facts.gpus import GPUS
from toolkit.plan.rules.found import Check, Findings, Found, refuse
from toolkit.plan.subject import Subject, widest

__all__ = ["CHECKS"]


def _no_pp_with_draft_target(subject: Subject) -> Findings:
    engine = subject.trtllm
    if engine is not None and subject.drafts and engine.pp_size > 1:
        hint = (
            f"set pp_size: 1 and tp_size: {widest(subject, engine.world_size)}, or"
            " speculation.kind: none"
        )
        yield refuse(
            "engine.pp_size", "draft-target with two models runs without pipeline parallelism", hint
        )


def _acceptance_rule(subject: Subject) -> Findings:
    asked, known = subject.config.speculation.acceptance, subject.config.capabilities.acceptance
    if not subject.speculates or asked in ("auto", *known):
        return
    why = (
        "it drafts greedily and keeps a token that the target samples too"
        if subject.pytorch_flow is not None
        else "its loop has no such rule"
    )
    hint = f"set acceptance: auto (which is {known[0]}), or engine.kind: torch, which has {asked}"
    yield refuse(
        "speculation.acceptance",
        f"kind {subject.config.engine.kind} cannot accept by {asked}: {why}",
        hint,
    )


def _ngram_of_flow(subject: Subject) -> Findings:
    if subject.engine_flow is not None and subject.config.speculation.has_ngram:
        what = (
            "the engine flow takes drafts from a second engine; looking the text up is in the"
            " PyTorch flow"
        )
        yield refuse(
            "speculation.kind", what, "set engine.kind: trtllm_pytorch, or kind: draft_target"
        )


def _draft_len_schedule(subject: Subject) -> Findings:
    version = subject.version
    if subject.config.speculation.draft_len_schedule is None or version is None:
        return
    path = "speculation.draft_len_schedule"
    if subject.engine_flow is not None:
        what = "the engine flow has no draft length by batch size: a request states its own"
        yield refuse(path, what, "remove it, or set engine.kind: trtllm_pytorch")
    elif version.draft_len_schedule is None:
        what = f"TensorRT-LLM {version.name} has no draft_len_schedule"
        yield refuse(path, what, 'remove it, or set engine.tensorrt_llm: "1.2.1"')
    elif version.draft_len_schedule == "upper":
        what = (
            f"written with greatest batch sizes as keys, as TensorRT-LLM {version.name} reads them;"
            " here they are least ones"
        )
        yield Found("adjusted", path, what)


def _max_concurrency(subject: Subject) -> Findings:
    if subject.engine_flow is not None and subject.config.speculation.max_concurrency is not None:
        what = "the engine flow speculates whatever the load: a request states its own draft length"
        yield refuse(
            "speculation.max_concurrency", what, "remove it, or set engine.kind: trtllm_pytorch"
        )


def _auto_draft_len(subject: Subject) -> Findings:
    if (
        subject.trtllm is not None
        and subject.speculates
        and subject.config.speculation.max_draft_len == "auto"
    ):
        path = "speculation.max_draft_len"
        if subject.gpu is None:
            what = (
                f"costs of engine.kind {subject.config.engine.kind} are predicted for a GPU, and"
                " none is named or here"
            )
            yield refuse(path, what, "set hardware.gpu, or a number")
        else:
            what = (
                "found before engines are built: acceptance on the embedded engine, costs"
                f" predicted for {subject.gpu.name}"
            )
            yield Found("adjusted", path, what)


def _bls_drafts(subject: Subject) -> Findings:
    if subject.trtllm is not None or subject.config.triton.layout != "bls":
        return
    hint = "set triton.layout: llmapi"
    if subject.config.speculation.has_ngram:
        yield refuse(
            "speculation.kind", "layout bls takes drafts from a model, and ngram has none", hint
        )
    for key in ("draft_len_schedule", "max_concurrency"):
        if getattr(subject.config.speculation, key) is not None:
            yield refuse(
                f"speculation.{key}",
                "layout bls drafts as many tokens whatever the load",
                f"remove it, or {hint}",
            )


def _block_reuse_for_drafts(subject: Subject) -> Findings:
    if (
        subject.engine_flow is not None
        and subject.drafts
        and not subject.engine_flow.enable_block_reuse
    ):
        what = "drafts from outside need KV block reuse: each step sends the accepted text again"
        yield refuse("engine.enable_block_reuse", what, "remove this line, or set it to true")


def _overlap_scheduler(subject: Subject) -> Findings:
    if (
        subject.pytorch_flow is not None
        and subject.drafts
        and subject.version is not None
        and subject.version.name != "1.3"
    ):
        yield Found(
            "adjusted",
            "speculation.kind",
            "the overlap scheduler is off: two-model draft-target does not run with it",
        )


def _attention_backend(subject: Subject) -> Findings:
    engine = subject.pytorch_flow
    if engine is not None and engine.attn_backend == "FLASHINFER" and engine.enable_block_reuse:
        yield Found("adjusted", "engine.attn_backend", "FLASHINFER turns KV block reuse off")
    if engine is not None and engine.attn_backend != "TRTLLM" and subject.drafts:
        what = f"{engine.attn_backend} with draft-target is not tested upstream"
        yield Found("warning", "engine.attn_backend", what, "set attn_backend: TRTLLM")


def _world_size(subject: Subject) -> Findings:
    engine, hardware = subject.trtllm, subject.config.hardware
    if engine is None or subject.gpu is None:
        return
    ranks = f"tp_size {engine.tp_size} x pp_size {engine.pp_size} = {engine.world_size} ranks"
    if engine.world_size > subject.gpu_count:
        rest = subject.gpu_count // engine.pp_size
        fewer = f"tp_size: {widest(subject, rest)}" + ("" if rest else " and pp_size: 1")
        hint = f"set {fewer}, or hardware.count and nodes to what there is"
        yield refuse(
            "engine.tp_size", f"{ranks} need as many GPUs, and there are {subject.gpu_count}", hint
        )
    elif engine.world_size > engine.gpus_per_node * hardware.nodes:
        nodes = -(-engine.world_size // engine.gpus_per_node)
        what = f"{ranks} do not fit {_nodes(hardware)} of {engine.gpus_per_node} GPUs"
        yield refuse(
            "engine.gpus_per_node", what, f"set hardware.nodes: {nodes}, or engine.gpus_per_node"
        )


def _ranks_per_node(subject: Subject) -> Findings:
    engine, count = subject.trtllm, subject.config.hardware.count
    if engine is None or count is None or engine.world_size > subject.gpu_count:
        return
    placed = min(engine.world_size, engine.gpus_per_node)
    if placed > count:
        what = (
            f"gpus_per_node {engine.gpus_per_node} places {placed} ranks on a machine with {count}"
            " GPUs"
        )
        yield refuse("engine.gpus_per_node", what, f"set gpus_per_node: {count}")
    elif engine.tp_size > count:
        what = (
            f"tp_size {engine.tp_size} spans machines of {count} GPUs: every layer waits for the"
            " network between them"
        )
        within = widest(subject, count)
        pipeline = engine.world_size // within
        hint = f"set tp_size: {within} and pp_size: {pipeline}" + (
            ", with speculation.kind: none" if subject.drafts else ""
        )
        yield Found(
            "warning", "engine.tp_size", what, f"{hint}; or take larger GPUs, {within} of them"
        )


def _hardware_needed(subject: Subject) -> Findings:
    if subject.trtllm is not None and subject.gpu is None:
        what = (
            "this machine has no NVIDIA GPU that is known here, so precision, memory and speed are"
            " not judged"
        )
        yield Found(
            "warning", "hardware.gpu", what, f"name the one that will serve: {', '.join(GPUS)}"
        )


def _one_device(subject: Subject) -> Findings:
    hardware = subject.config.hardware
    if not subject.config.capabilities.is_parallel and (
        hardware.nodes > 1 or (hardware.count or 1) > 1
    ):
        path = "hardware.nodes" if hardware.nodes > 1 else "hardware.count"
        yield refuse(
            path,
            "kind torch runs on one device",
            "remove this line, or set engine.kind: trtllm_pytorch",
        )


def _remote_code(subject: Subject) -> Findings:
    for role, model in subject.models.items():
        if not model.trust_remote_code:
            continue
        path = f"{role}.trust_remote_code"
        if subject.pytorch_flow is not None:
            what = (
                "LLM() runs the Python code of both checkpoints in the server, with the server's"
                " rights"
            )
            yield Found(
                "warning", path, what, "read it first; the families that are known here need none"
            )
        else:
            why = (
                "the embedded engine has models of its own"
                if subject.trtllm is None
                else "trtllm-build reads a form that holds no code"
            )
            what = (
                f"{why}, and tokenizers are read from tokenizer.json: no code of a checkpoint"
                " is run"
            )
            yield refuse(path, what, "remove this line")


def _nodes(hardware: HardwareConfig) -> str:
    return "one machine" if hardware.nodes == 1 else f"{hardware.nodes} machines"


CHECKS: dict[str, Check] = {
    "no-pp-with-draft-target": _no_pp_with_draft_target,
    "acceptance-rule": _acceptance_rule,
    "ngram-of-flow": _ngram_of_flow,
    "draft-len-schedule": _draft_len_schedule,
    "toolkit-engine-flow-load": _max_concurrency,
    "toolkit-auto-draft-len": _auto_draft_len,
    "toolkit-bls-drafts": _bls_drafts,
    "block-reuse-for-drafts": _block_reuse_for_drafts,
    "world-size": _world_size,
    "ranks-per-node": _ranks_per_node,
    "hardware-needed": _hardware_needed,
    "toolkit-one-device": _one_device,
    "toolkit-remote-code": _remote_code,
    "draft-target-two-model-overlap": _overlap_scheduler,
    "attention-backend": _attention_backend,
}
