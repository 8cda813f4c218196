"""Rules about running the deployment: speculation, ranks and machines."""

from __future__ import annotations

from toolkit.config.schema import HardwareConfig
from toolkit.facts.gpus import GPUS
from toolkit.facts.heads import HEAD_KINDS, HEAD_NAMES, NO_HEADS, NO_MTP
from toolkit.facts.llm_args import DEFAULT_TOKENS_PER_BLOCK
from toolkit.facts.versions import VERSIONS
from toolkit.plan.rules.findings import Check, Findings, RuleFinding, refuse
from toolkit.plan.subject import Subject, family_of, largest_tp_size

__all__ = ["CHECKS"]

HEAD_TARGETS = ("LlamaForCausalLM", "Qwen3ForCausalLM")


def _no_pp_with_draft_target(subject: Subject) -> Findings:
    engine = subject.trtllm
    if engine is not None and subject.has_draft_model and engine.pp_size > 1:
        hint = (
            f"set pp_size: 1 and tp_size: {largest_tp_size(subject, engine.world_size)}, or"
            " speculation.kind: none"
        )
        what = "draft-target speculation with two models does not support pipeline parallelism"
        if subject.config.speculation.head is not None:
            what = "a head over several pipeline ranks is documented nowhere"
        yield refuse("engine.pp_size", what, hint)


def _acceptance_rule(subject: Subject) -> Findings:
    rule, known = subject.config.speculation.acceptance, subject.config.capabilities.acceptance
    if not subject.speculates or rule in ("auto", *known):
        return
    reason = "its loop has no such rule"
    if subject.config.capabilities.drafts_greedily:
        reason = "it drafts greedily and accepts a drafted token if the target samples the same one"
    hint = f"set acceptance: auto (which is {known[0]}), or engine.kind: torch, which has {rule}"
    yield refuse(
        "speculation.acceptance",
        f"kind {subject.config.engine.kind} does not have the acceptance rule {rule}: {reason}",
        hint,
    )


def _ngram_of_flow(subject: Subject) -> Findings:
    if subject.engine_flow is not None and subject.config.speculation.has_ngram:
        what = (
            "the engine flow takes drafts from a second engine; only the PyTorch flow has n-gram"
            " lookup"
        )
        yield refuse(
            "speculation.kind", what, "set engine.kind: trtllm_pytorch, or kind: draft_target"
        )


def _heads(subject: Subject) -> Findings:
    config, version = subject.config, subject.version
    head, kind = config.speculation.head, config.engine.kind
    if head is None:
        return
    if kind not in HEAD_KINDS[head]:
        able = " or ".join(HEAD_KINDS[head])
        yield refuse(
            "speculation.kind",
            f"kind {kind} does not draft with an {HEAD_NAMES[head]} head: {NO_HEADS[kind]}",
            f"set engine.kind: {able}, or take a draft model and speculation.kind: draft_target",
        )
    elif version is not None and head not in config.capabilities.heads:
        able = ", ".join(row.name for row in VERSIONS.values() if row.head_sampling != "greedy")
        yield refuse(
            "engine.tensorrt_llm",
            f"TensorRT-LLM {version.name} answers every request under an {HEAD_NAMES[head]} head"
            " with the likeliest tokens, whatever its temperature",
            f'set tensorrt_llm: "1.2.1"; versions that sample: {able}',
        )
    elif config.speculation.max_draft_len == "auto":
        what = (
            "max_draft_len auto measures acceptance on the embedded engine, which cannot run an"
            f" {HEAD_NAMES[head]} head"
        )
        yield refuse("speculation.max_draft_len", what, "set a number")


def _head_target(subject: Subject) -> Findings:
    """One model of target and head is written per family upstream."""
    target = subject.shapes.get("target")
    if subject.pytorch_flow is None or subject.config.speculation.head is None or target is None:
        return
    if target.architecture not in HEAD_TARGETS:
        yield refuse(
            "speculation.kind",
            f"TensorRT-LLM does not run a head in one model with a {family_of(target)} target",
            "take a draft model and speculation.kind: draft_target, or a target of Llama or Qwen 3",
        )


def _head_kv_cache(subject: Subject) -> Findings:
    algo = subject.config.target.quantization.kv_cache_quant_algo
    if subject.pytorch_flow is None or subject.config.speculation.head is None or algo is None:
        return
    what = f"the head's KV cache is {algo}, as the target's; its weights keep their precision"
    yield RuleFinding("adjusted", "target.quantization.kv_cache_quant_algo", what)


def _head_load(subject: Subject) -> Findings:
    speculation, version = subject.config.speculation, subject.version
    if subject.pytorch_flow is None or speculation.head is None or version is None:
        return
    if version.heads_follow_load:
        return
    able = ", ".join(row.name for row in VERSIONS.values() if row.heads_follow_load)
    for key in ("draft_len_schedule", "max_concurrency"):
        if getattr(speculation, key) is not None:
            what = (
                f"TensorRT-LLM {version.name} applies {key} to a draft model, and would ignore it"
                f" with an {HEAD_NAMES[speculation.head]} head"
            )
            yield refuse(f"speculation.{key}", what, f"remove it; versions that apply it: {able}")


def _mtp(subject: Subject) -> Findings:
    """A target that the toolkit does not read is judged when its config.json is (plan/mtp.py)."""
    kind = subject.config.engine.kind
    if subject.config.speculation.kind != "mtp":
        return
    if kind in NO_MTP:
        yield refuse(
            "speculation.kind",
            f"kind {kind} does not draft with the target's MTP layers: {NO_MTP[kind]}",
            "take a draft model and speculation.kind: draft_target, or kind: ngram",
        )
    elif "target" in subject.shapes:
        yield refuse(
            "speculation.kind",
            f"a {family_of(subject.shapes['target'])} target has no MTP layers"
            " (num_nextn_predict_layers in config.json)",
            "take a draft model and speculation.kind: draft_target, or an EAGLE-3 head and eagle3",
        )


def _draft_len_schedule(subject: Subject) -> Findings:
    version = subject.version
    if subject.config.speculation.draft_len_schedule is None or version is None:
        return
    path = "speculation.draft_len_schedule"
    if subject.config.speculation.head is not None and not version.heads_follow_load:
        return  # _head_load refuses it
    if subject.engine_flow is not None:
        what = (
            "the engine flow cannot choose the draft length by batch size: each request states its"
            " own"
        )
        yield refuse(path, what, "remove it, or set engine.kind: trtllm_pytorch")
    elif version.draft_len_schedule is None:
        what = f"TensorRT-LLM {version.name} has no draft_len_schedule"
        yield refuse(path, what, 'remove it, or set engine.tensorrt_llm: "1.2.1"')
    elif version.draft_len_schedule == "upper":
        what = (
            "the schedule is rewritten: its keys are the smallest batch size of each range, and"
            f" TensorRT-LLM {version.name} reads them as the largest"
        )
        yield RuleFinding("adjusted", path, what)


def _max_concurrency(subject: Subject) -> Findings:
    if subject.engine_flow is not None and subject.config.speculation.max_concurrency is not None:
        what = "the engine flow speculates at every load: each request states its own draft length"
        yield refuse(
            "speculation.max_concurrency", what, "remove it, or set engine.kind: trtllm_pytorch"
        )


def _adaptive(subject: Subject) -> Findings:
    """TensorRT-LLM can only stop, once for all requests, and knows no costs."""
    speculation, can = subject.config.speculation, subject.config.capabilities
    section, path = speculation.adapts, "speculation.adaptive"
    if section is None:
        return
    if can.adaptive is None:
        yield refuse(path, _why_not_adaptive(subject), "remove it")
    elif can.adaptive == "stop":
        if section.min_acceptance_length is None:
            what = (
                "TensorRT-LLM measures no costs: it has to be told below how many tokens per step"
                " drafting does not pay"
            )
            hint = "add min_acceptance_length, such as 1.3; `toolkit plan` predicts the costs"
            yield refuse(path, what, hint)
            return
        what = (
            "TensorRT-LLM does not choose lengths: drafting stops for good, for all requests, when"
            f" the last {section.window_requests} requests had fewer than"
            f" {section.min_acceptance_length:g} tokens per step"
        )
        yield RuleFinding("adjusted", path, what)
        for key in ("window_tokens", "probe_every_tokens"):
            if key in section.model_fields_set:
                what = f"{key} is for lengths per request, and has no effect here"
                yield RuleFinding("adjusted", f"{path}.{key}", what)


def _adaptive_without_drafts(subject: Subject) -> Findings:
    """Drafting that never begins."""
    speculation, path = subject.config.speculation, "speculation.adaptive"
    stated = speculation.adaptive
    if stated is None or not stated.enabled:
        return
    if not speculation.is_enabled:
        what = "adaptive chooses draft lengths, and has no effect with kind none"
        yield RuleFinding("adjusted", path, what)
        return
    least, most = stated.min_acceptance_length, speculation.longest_draft + 1
    if least is not None and least > most:
        what = (
            f"with max_draft_len {speculation.max_draft_len} a step has at most {most} tokens, so"
            f" below {least:g} of them nothing would ever be drafted"
        )
        hint = "lower it; or remove it, and what drafting costs decides"
        if subject.config.capabilities.adaptive == "stop":
            hint = "lower it; `toolkit plan` predicts the costs"
        yield refuse(f"{path}.min_acceptance_length", what, hint)


def _why_not_adaptive(subject: Subject) -> str:
    version, head = subject.version, subject.config.speculation.head
    if version is None:
        return "vLLM drafts as many tokens for every text: it has no switch by acceptance"
    if version.acceptance_window is not None and head is not None:
        return (
            f"TensorRT-LLM {version.name} looks at the acceptance of a draft model, and would"
            f" ignore it with an {HEAD_NAMES[head]} head"
        )
    return f"TensorRT-LLM {version.name} has no switch by acceptance"


def _max_prompt_tokens(subject: Subject) -> Findings:
    speculation = subject.config.speculation
    if speculation.max_prompt_tokens is None or not speculation.is_enabled:
        return
    if not subject.config.capabilities.max_prompt_tokens:
        kind = subject.config.engine.kind
        what = f"kind {kind} drafts for every prompt: no request can be left out"
        yield refuse("speculation.max_prompt_tokens", what, "remove it")


def _loads_beyond_batch(subject: Subject) -> Findings:
    speculation, validation = subject.config.speculation, subject.config.validation
    largest = subject.config.engine.max_batch_size
    most = f"no more than engine.max_batch_size {largest} run at once"
    beyond = [load for load in speculation.draft_len_by_load if load > largest]
    if speculation.is_enabled and beyond:
        path = "speculation.draft_len_schedule"
        what = f"its lengths from {beyond[0]} running requests on have no effect"
        if speculation.max_concurrency is not None:
            path = "speculation.max_concurrency"
            what = "drafting never stops"
        yield RuleFinding("adjusted", path, f"{what}: {most}")
    loads = () if validation is None else validation.latency.concurrency
    waiting = [str(load) for load in loads if load > largest]
    if waiting:
        what = (
            f"of {' or '.join(waiting)} requests at a time {most}, and the others wait; raise it to"
            " measure as many"
        )
        yield RuleFinding("adjusted", "validation.latency.concurrency", what)


def _ngram_size(subject: Subject) -> Findings:
    speculation, key = subject.config.speculation, "max_matching_ngram_size"
    if key in speculation.model_fields_set and not speculation.has_ngram:
        what = f"{key} is for kind ngram, and has no effect with kind {speculation.kind}"
        yield RuleFinding("adjusted", f"speculation.{key}", what)


def _settings_min_version(subject: Subject) -> Findings:
    engine, version = subject.pytorch_flow, subject.version
    if engine is None or version is None:
        return
    unknown = {
        "speculation.max_concurrency": not version.max_concurrency
        and subject.config.speculation.max_concurrency is not None,
        "engine.tokens_per_block": not version.tokens_per_block
        and engine.tokens_per_block != DEFAULT_TOKENS_PER_BLOCK,
    }
    for path, is_unknown in unknown.items():
        if is_unknown:
            name = path.partition(".")[2]
            what = f"the PyTorch flow of TensorRT-LLM {version.name} has no {name}"
            yield refuse(path, what, 'remove it, or set engine.tensorrt_llm: "1.2.1"')


def _auto_draft_len(subject: Subject) -> Findings:
    if subject.config.speculation.is_measured and subject.config.capabilities.fixes_draft_len:
        path = "speculation.max_draft_len"
        if subject.vllm is not None and subject.serving_gpu is None:
            what = (
                "it is chosen before the server starts, from the acceptance measured on the"
                " embedded engine and the costs measured on this machine"
            )
            yield RuleFinding("adjusted", path, what)
        elif subject.gpu is None:
            what = (
                f"to choose it, the costs of engine.kind {subject.config.engine.kind} are predicted"
                " for a GPU; the YAML names none, and this machine has none that is known"
            )
            yield refuse(path, what, "set hardware.gpu, or set max_draft_len to a number")
        else:
            what = (
                "it is chosen before engines are built, from the acceptance measured on the"
                f" embedded engine and the costs predicted for {subject.gpu.name}"
            )
            yield RuleFinding("adjusted", path, what)


def _bls_drafts(subject: Subject) -> Findings:
    if subject.config.embedded_engine is None or subject.config.triton.layout != "bls":
        return
    hint = "set triton.layout: llmapi"
    if subject.config.speculation.has_ngram:
        yield refuse("speculation.kind", "layout bls needs a draft model, and ngram has none", hint)
    for key in ("draft_len_schedule", "max_concurrency"):
        if getattr(subject.config.speculation, key) is not None:
            yield refuse(
                f"speculation.{key}",
                "layout bls drafts the same number of tokens at every load",
                f"remove it, or {hint}",
            )


def _block_reuse_for_drafts(subject: Subject) -> Findings:
    if (
        subject.engine_flow is not None
        and subject.has_draft_model
        and not subject.engine_flow.enable_block_reuse
    ):
        what = "external drafts need KV block reuse, since each step sends the accepted text again"
        yield refuse("engine.enable_block_reuse", what, "remove this line, or set it to true")


def _overlap_scheduler(subject: Subject) -> Findings:
    """Told, since the plain arm always overlaps: a part of what speculation gains is lost."""
    engine, version = subject.pytorch_flow, subject.version
    has_head = subject.config.speculation.head is not None  # which overlaps in every version
    if engine is None or version is None or not subject.has_draft_model or has_head:
        return
    why = None
    if version.overlap == "never":
        why = f"draft-target of TensorRT-LLM {version.name} does not support it"
    elif version.overlap == "fixed length" and subject.config.speculation.draft_len_schedule:
        why = f"TensorRT-LLM {version.name} does not support it together with draft_len_schedule"
    elif version.overlap == "fixed length" and engine.attn_backend != "TRTLLM":
        why = f"draft-target supports it with attn_backend TRTLLM, not {engine.attn_backend}"
    if why is not None:
        what = f"the overlap scheduler is off: {why}"
        yield RuleFinding("adjusted", "speculation.kind", what)


def _ignored_sampling(subject: Subject) -> Findings:
    version = subject.version
    if subject.pytorch_flow is None or version is None:
        return
    ignored = [
        *([] if version.penalties else ["penalties"]),
        *([] if version.seeds else ["seeds"]),
    ]
    if ignored:
        names = " and ".join(ignored)
        what = (
            f"TensorRT-LLM {version.name} ignores {names}, so requests that have them are refused"
        )
        yield RuleFinding("warning", "engine.tensorrt_llm", what)


def _no_log_probs(subject: Subject) -> Findings:
    version = subject.version
    if (
        subject.pytorch_flow is None
        or version is None
        or not subject.speculates
        or subject.config.capabilities.log_probs > 0
    ):
        return
    head = subject.config.speculation.head
    under = "speculation" if head is None else f"an {HEAD_NAMES[head]} head"
    what = (
        f"TensorRT-LLM {version.name} returns no log-probabilities under {under}, so nothing"
        " can tell whether a greedy text that differs from plain decoding differs by rounding: the"
        " verdict rests on texts that are the same token for token, is INCONCLUSIVE if one is not,"
        " and compares the sampled texts of both arms"
    )
    yield RuleFinding("warning", "validation.parity", what)


def _attention_backend(subject: Subject) -> Findings:
    engine = subject.pytorch_flow
    if engine is not None and engine.attn_backend == "FLASHINFER" and engine.enable_block_reuse:
        yield RuleFinding("adjusted", "engine.attn_backend", "FLASHINFER turns KV block reuse off")
    if engine is not None and engine.attn_backend != "TRTLLM" and subject.has_draft_model:
        kind = subject.config.speculation.kind.replace("_", "-")
        what = f"{engine.attn_backend} with {kind} is not tested upstream"
        yield RuleFinding("warning", "engine.attn_backend", what, "set attn_backend: TRTLLM")


def _world_size(subject: Subject) -> Findings:
    engine, hardware = subject.parallel, subject.config.hardware
    if engine is None or subject.serving_gpu is None:
        return
    ranks = f"tp_size {engine.tp_size} x pp_size {engine.pp_size} = {engine.world_size} ranks"
    if engine.world_size > subject.gpu_count:
        rest = subject.gpu_count // engine.pp_size
        fewer_ranks = f"tp_size: {largest_tp_size(subject, rest)}" + (
            "" if rest else " and pp_size: 1"
        )
        hint = f"set {fewer_ranks}; or, if there are more GPUs, set hardware.count and nodes"
        what = f"{ranks} need one GPU each, and there are {subject.gpu_count}"
        yield refuse("engine.tp_size", what, hint)
    elif engine.world_size > engine.gpus_per_node * hardware.nodes:
        nodes = -(-engine.world_size // engine.gpus_per_node)
        what = f"{ranks} do not fit on {_nodes(hardware)} of {engine.gpus_per_node} GPUs"
        yield refuse(
            "engine.gpus_per_node", what, f"set hardware.nodes: {nodes}, or engine.gpus_per_node"
        )


def _ranks_per_node(subject: Subject) -> Findings:
    engine, count = subject.parallel, subject.config.hardware.count
    if engine is None or count is None or engine.world_size > subject.gpu_count:
        return
    placed = min(engine.world_size, engine.gpus_per_node)
    if placed > count:
        what = (
            f"gpus_per_node {engine.gpus_per_node} puts {placed} ranks on a machine with {count}"
            " GPUs"
        )
        yield refuse("engine.gpus_per_node", what, f"set gpus_per_node: {count}")
    elif engine.tp_size > count:
        what = (
            f"tp_size {engine.tp_size} spans several machines of {count} GPUs: every layer waits"
            " for the network between them"
        )
        tp_size = largest_tp_size(subject, count)
        hint = f"set tp_size: {tp_size} and pp_size: {engine.world_size // tp_size}"
        if subject.has_draft_model:
            hint += ", with speculation.kind: none"
        yield RuleFinding(
            "warning", "engine.tp_size", what, f"{hint}; or take {tp_size} larger GPUs"
        )


def _hardware_needed(subject: Subject) -> Findings:
    if subject.trtllm is not None and subject.gpu is None:
        what = (
            "this machine has no NVIDIA GPU that the toolkit knows, so the plan does not judge"
            " precision, memory and speed"
        )
        hint = f"name the GPU that will serve: {', '.join(GPUS)}"
        yield RuleFinding("warning", "hardware.gpu", what, hint)


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
        if subject.pytorch_flow is not None or subject.vllm is not None:
            loader = "LLM()" if subject.vllm is None else "vLLM"
            what = (
                f"{loader} runs the Python code of both checkpoints in the server, with the"
                " server's permissions"
            )
            hint = "read that code first; the model families that the toolkit knows need none"
            yield RuleFinding("warning", path, what, hint)
        else:
            reason = "trtllm-build reads a format that holds no code"
            if subject.trtllm is None:
                reason = "the embedded engine has its own models"
            what = (
                "no code of a checkpoint is ever run:"
                f" {reason}, and tokenizers are read from tokenizer.json"
            )
            yield refuse(path, what, "remove this line")


def _nodes(hardware: HardwareConfig) -> str:
    return "one machine" if hardware.nodes == 1 else f"{hardware.nodes} machines"


CHECKS: dict[str, Check] = {
    "no-pp-with-draft-target": _no_pp_with_draft_target,
    "acceptance-rule": _acceptance_rule,
    "ngram-of-flow": _ngram_of_flow,
    "toolkit-heads": _heads,
    "head-target": _head_target,
    "head-kv-cache": _head_kv_cache,
    "head-load": _head_load,
    "mtp-layers": _mtp,
    "draft-len-schedule": _draft_len_schedule,
    "toolkit-engine-flow-load": _max_concurrency,
    "adaptive-speculation": _adaptive,
    "toolkit-adaptive": _adaptive_without_drafts,
    "draft-for-every-prompt": _max_prompt_tokens,
    "toolkit-loads-beyond-batch": _loads_beyond_batch,
    "toolkit-ngram-size": _ngram_size,
    "toolkit-auto-draft-len": _auto_draft_len,
    "toolkit-bls-drafts": _bls_drafts,
    "block-reuse-for-drafts": _block_reuse_for_drafts,
    "world-size": _world_size,
    "ranks-per-node": _ranks_per_node,
    "hardware-needed": _hardware_needed,
    "toolkit-one-device": _one_device,
    "toolkit-remote-code": _remote_code,
    "pytorch-settings-min-version": _settings_min_version,
    "draft-target-overlap": _overlap_scheduler,
    "ignored-sampling": _ignored_sampling,
    "no-log-probs": _no_log_probs,
    "attention-backend": _attention_backend,
}
