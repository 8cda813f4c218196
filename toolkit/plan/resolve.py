"""What is possible where: every rule of `toolkit.facts.rules` as a small pure function, all judged at once.

A rule looks at the whole deployment and yields what it finds: a refusal (it cannot work, and what would), an adjustment (what
the builder or the runtime changes without saying so), or a warning (it may work, and nobody vouches for it). Nothing is run or
read here; shapes and GPUs are handed in. Memory is judged in `toolkit.plan.memory`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from toolkit.checkpoints.shape import ModelShape
from toolkit.config.schema import (
    DeploymentConfig,
    HardwareConfig,
    ModelConfig,
    TensorRtLlmConfig,
    TorchEngineConfig,
    TrtEngineConfig,
    TrtllmPytorchConfig,
)
from toolkit.facts.gpus import GPUS, Gpu
from toolkit.facts.support import ACCEPTANCE, KV_SUPPORT, MIN_SM, SMOOTHQUANT_FAMILIES, WEIGHT_SUPPORT, Status
from toolkit.facts.versions import VERSIONS, Version
from toolkit.records import Judgement

__all__ = ["CHECKS", "DEFAULT_MAX_NUM_TOKENS", "Subject", "family_of", "length_limit", "resolve", "splits"]

DEFAULT_MAX_NUM_TOKENS = 8192  # of trtllm-build and of LLM(); TRT commands/build.py, llmapi/llm_args.py (B)
PADDING = 1024  # rows; more than that apart, two vocabularies are no paddings of one
INT8 = ("W8A8_SQ_PER_CHANNEL", "W8A16")
Severity = Literal["refused", "adjusted", "warning"]


@dataclass(frozen=True, slots=True)
class Subject:
    """A deployment and what is known around it. shapes: by role; a role whose checkpoint is nowhere to be read is absent.

    gpu None: not known. gpu_count: in all nodes together.
    """

    config: DeploymentConfig
    shapes: Mapping[str, ModelShape]
    gpu: Gpu | None
    gpu_count: int

    @property
    def models(self) -> dict[str, ModelConfig]:
        models = {"target": self.config.target}
        return models if self.config.draft is None else {**models, "draft": self.config.draft}

    @property
    def drafts(self) -> bool:
        """Whether a second model drafts."""
        return self.config.draft is not None

    @property
    def draft_len(self) -> int:
        return self.config.speculation.longest_draft if self.drafts else 0

    @property
    def trtllm(self) -> TensorRtLlmConfig | None:
        return self.config.engine if isinstance(self.config.engine, TensorRtLlmConfig) else None

    @property
    def engine_flow(self) -> TrtEngineConfig | None:
        return self.config.engine if isinstance(self.config.engine, TrtEngineConfig) else None

    @property
    def pytorch_flow(self) -> TrtllmPytorchConfig | None:
        return self.config.engine if isinstance(self.config.engine, TrtllmPytorchConfig) else None

    @property
    def version(self) -> Version | None:
        return None if self.trtllm is None else VERSIONS[self.trtllm.tensorrt_llm]

    @property
    def column(self) -> int | None:
        """The column of the support tables that the GPU belongs to."""
        return None if self.gpu is None else max(sm for sm in MIN_SM if sm <= self.gpu.sm)


@dataclass(frozen=True, slots=True)
class _Found:
    severity: Severity
    path: str
    what: str
    mend: str | None = None


Found = Iterator[_Found]


def resolve(subject: Subject) -> tuple[Judgement, ...]:
    """Everything that the rules find, refusals first, each with its rule's id."""
    order = ("refused", "warning", "adjusted")
    found = [
        Judgement(rule=rule, severity=one.severity, path=one.path, what=one.what, mend=one.mend)
        for rule, check in CHECKS.items()
        for one in check(subject)
    ]
    return tuple(sorted(found, key=lambda one: order.index(one.severity)))


def _refuse(path: str, what: str, mend: str) -> _Found:
    return _Found("refused", path, what, mend)


def _unless_allowed(subject: Subject, role: str, what: str, mend: str) -> _Found:
    """A refusal; with quantization.allow_unsupported a warning."""
    path = f"{role}.quantization"
    if subject.models[role].quantization.allow_unsupported:
        return _Found("warning", f"{path}.quant_algo", what, mend)
    return _refuse(f"{path}.quant_algo", what, f"{mend}; or set {path}.allow_unsupported: true to go on at your own risk")


# Versions and flows.


def _engine_flow_removed(subject: Subject) -> Found:
    if subject.engine_flow is not None and subject.version is not None and not subject.version.engine_flow:
        name = subject.version.name
        last = [version.name for version in VERSIONS.values() if version.engine_flow][-1]
        yield _refuse(
            "engine.kind",
            f"TensorRT-LLM {name} has no engine flow: trtllm-build was removed",
            f'set tensorrt_llm: "{last}", the last with it, or kind: trtllm_pytorch',
        )


def _draft_target_min_version(subject: Subject) -> Found:
    version = subject.version
    if subject.pytorch_flow is not None and version is not None and subject.drafts and not version.pytorch_draft_target:
        yield _refuse(
            "engine.tensorrt_llm",
            f"the PyTorch flow of TensorRT-LLM {version.name} has no draft-target speculation",
            'set tensorrt_llm: "1.2.1", or kind: trt_engine',
        )


def _unified_hf_min_version(subject: Subject) -> Found:
    version = subject.version
    if subject.pytorch_flow is None or version is None or version.unified_checkpoints:
        return
    for role, model in subject.models.items():
        if model.quantization.quant_algo != "NO_QUANT":
            yield _unless_allowed(
                subject,
                role,
                f"checkpoints as ModelOpt writes them now are documented for TensorRT-LLM 1.2.0 and later, not {version.name}",
                'set engine.tensorrt_llm: "1.2.1"',
            )


def _qwen3_min_version(subject: Subject) -> Found:
    version = subject.version
    if subject.engine_flow is None or version is None or version.qwen3_engine or not version.engine_flow:
        return
    for role, shape in subject.shapes.items():
        if family_of(shape) == "Qwen 3":
            yield _refuse(
                f"{role}.checkpoint",
                f"the engine flow of TensorRT-LLM {version.name} has no Qwen 3",
                'set engine.tensorrt_llm: "1.2.1"',
            )


def _serving_container(subject: Subject) -> Found:
    if subject.version is not None and not subject.version.serving_tags:
        newest = [version for version in VERSIONS.values() if version.serving_tags][-1]
        yield _Found(
            "warning",
            "engine.tensorrt_llm",
            f"no Triton container with TensorRT-LLM {subject.version.name} is known",
            f'{newest.serving_tags[0]} holds {newest.name}: set tensorrt_llm: "{newest.name}"',
        )


def _layout_of_flow(subject: Subject) -> Found:
    layout = subject.config.triton.layout
    if subject.pytorch_flow is not None and layout == "bls":
        what = "speculates inside one runtime, and the BLS layout drives two engines"
        yield _refuse("triton.layout", f"kind trtllm_pytorch {what}", "set layout: llmapi, or auto")
    if subject.engine_flow is not None and layout == "llmapi":
        what = "in Triton, the llmapi layout no longer serves engines since 1.0, and never served two of them"
        yield _refuse("triton.layout", what, "set layout: bls, or auto")


# Precision.


def _fp8_needs_sm89(subject: Subject) -> Found:
    for role, model in _of_algo(subject, "FP8"):
        if _status(subject, model) == "no" and subject.gpu is not None:
            others = "W8A8_SQ_PER_CHANNEL or W8A16" if subject.engine_flow is not None else "NO_QUANT"
            flow = "" if subject.engine_flow is not None else ", or kind: trt_engine with W8A8_SQ_PER_CHANNEL"
            yield _refuse(
                f"{role}.quantization.quant_algo",
                f"FP8 needs SM 89, and {subject.gpu.name} is SM {subject.gpu.sm}",
                f"set quant_algo: {others}{flow}; or take an L40S, H100 or H200",
            )


def _kv_fp8_needs_sm89(subject: Subject) -> Found:
    if subject.trtllm is None or subject.gpu is None or subject.column is None:
        return
    status = KV_SUPPORT[subject.config.engine.kind]["FP8"].get(subject.column)
    for role, model in subject.models.items():
        if model.quantization.kv_cache_quant_algo == "FP8" and status == "no":
            yield _refuse(
                f"{role}.quantization.kv_cache_quant_algo",
                f"the engine flow has no FP8 KV cache below SM 89, and {subject.gpu.name} is SM {subject.gpu.sm}",
                "remove kv_cache_quant_algo",
            )


def _no_w8a8_in_pytorch(subject: Subject) -> Found:
    if subject.pytorch_flow is None:
        return
    for role, _ in _of_algo(subject, "W8A8_SQ_PER_CHANNEL"):
        can_fp8 = subject.column is None or subject.column >= 89
        yield _refuse(
            f"{role}.quantization.quant_algo",
            "the PyTorch flow loads no INT8 W8A8 checkpoint: it raises ValueError, unsupported quant mode",
            ("set quant_algo: FP8, or " if can_fp8 else "set ") + 'engine.kind: trt_engine with tensorrt_llm: "1.2.1"',
        )


def _w8a16_not_established(subject: Subject) -> Found:
    if subject.pytorch_flow is None:
        return
    for role, _ in _of_algo(subject, "W8A16"):
        what = "W8A16 in the PyTorch flow is not established: the code has it, no supported hardware lists it"
        yield _unless_allowed(subject, role, what, "set quant_algo: FP8, or engine.kind: trt_engine")


def _blackwell_no_int8(subject: Subject) -> Found:
    if subject.engine_flow is None or subject.gpu is None:
        return
    for role, model in _of_algo(subject, *INT8):
        if _status(subject, model) == "no":
            yield _refuse(
                f"{role}.quantization.quant_algo",
                f"trtllm-build refuses INT8 on SM 100 to 119, and {subject.gpu.name} is SM {subject.gpu.sm}",
                "set quant_algo: FP8; or take an A100, H100 or H200 for INT8",
            )


def _int8_on_sm120(subject: Subject) -> Found:
    if subject.engine_flow is None or subject.gpu is None or subject.column != 120:
        return
    for role, model in _of_algo(subject, *INT8):
        known = "was seen working once" if _status(subject, model) == "seen" else "is on no list"
        what = f"{model.quantization.quant_algo} on SM {subject.gpu.sm} ({subject.gpu.name}) {known}, and is documented nowhere"
        yield _unless_allowed(subject, role, what, "set quant_algo: FP8")


def _smoothquant_families(subject: Subject) -> Found:
    if subject.engine_flow is None:
        return
    for role, _ in _of_algo(subject, "W8A8_SQ_PER_CHANNEL"):
        family = family_of(subject.shapes[role]) if role in subject.shapes else "Llama 2"
        if SMOOTHQUANT_FAMILIES.get(family) == "yes":
            continue
        listed = "lists as not supported" if family in SMOOTHQUANT_FAMILIES else "does not list"
        fp8 = "FP8 or W8A16" if subject.column is None or subject.column >= 89 else "W8A16"
        yield _unless_allowed(
            subject, role, f"{family} is a family that ModelOpt {listed} for SmoothQuant", f"set quant_algo: {fp8}"
        )


def _no_int8_kv_preset(subject: Subject) -> Found:
    for role, model in subject.models.items():
        if model.quantization.kv_cache_quant_algo == "INT8":
            fp8 = model.quantization.quant_algo == "FP8"
            yield _refuse(
                f"{role}.quantization.kv_cache_quant_algo",
                "ModelOpt has no preset for an INT8 KV cache, so no scales would be calibrated",
                "set kv_cache_quant_algo: FP8" if fp8 else "remove kv_cache_quant_algo",
            )


def _int8_kv_disables_paged_fmha(subject: Subject) -> Found:
    if subject.engine_flow is None or not subject.drafts:
        return
    for role, model in subject.models.items():
        if model.quantization.kv_cache_quant_algo == "INT8":
            yield _refuse(
                f"{role}.quantization.kv_cache_quant_algo",
                "trtllm-build switches paged context FMHA off for an INT8 KV cache, and drafts from outside need it",
                "remove kv_cache_quant_algo",
            )


def _fp8_kv_under_other_weights(subject: Subject) -> Found:
    if subject.engine_flow is None:
        return
    for role, model in subject.models.items():
        quantization = model.quantization
        if quantization.kv_cache_quant_algo != "FP8" or quantization.quant_algo == "FP8":
            continue
        path = f"{role}.quantization.kv_cache_quant_algo"
        off = f"under {quantization.quant_algo} weights trtllm-build switches paged context FMHA off in silence"
        if subject.drafts:
            mend = "remove kv_cache_quant_algo" + (", or set quant_algo: FP8" if (subject.column or 89) >= 89 else "")
            yield _refuse(path, f"{off}, and with it the block reuse that drafts from outside need", mend)
        else:
            yield _Found("adjusted", path, f"{off}; KV block reuse is lost")


def _toolkit_fp8_kv(subject: Subject) -> Found:
    if subject.engine_flow is not None:
        return
    for role, model in subject.models.items():
        algo = model.quantization.quant_algo
        if model.quantization.kv_cache_quant_algo == "FP8" and algo != "FP8":
            yield _refuse(
                f"{role}.quantization.kv_cache_quant_algo",
                f"kv_cache_quant_algo FP8 does not go with quant_algo {algo}: its scales are calibrated with FP8 weights only",
                "set quant_algo: FP8, or remove kv_cache_quant_algo",
            )


def _mixed_precision_pair(subject: Subject) -> Found:
    if subject.trtllm is None or subject.config.draft is None:
        return
    target, draft = subject.config.target.quantization.quant_algo, subject.config.draft.quantization.quant_algo
    if target != draft and "NO_QUANT" not in (target, draft):
        yield _Found(
            "warning", "draft.quantization.quant_algo", f"a {draft} draft for a {target} target is in no published recipe"
        )


# Shapes.


def _heads_divide_tp(subject: Subject) -> Found:
    tp = 1 if subject.trtllm is None else subject.trtllm.tp_size
    for role, shape in subject.shapes.items():
        if splits(shape, tp):
            continue
        fitting = [size for size in (1, 2, 4, 8, 16) if all(splits(other, size) for other in subject.shapes.values())]
        yield _refuse(
            "engine.tp_size",
            f"the {role}'s {shape.num_heads} attention heads ({shape.num_kv_heads} of KV) cannot be split over {tp} ranks",
            f"set tp_size: {' or '.join(map(str, fitting))}",
        )


def _mlp_divides_tp(subject: Subject) -> Found:
    tp = 1 if subject.trtllm is None else subject.trtllm.tp_size
    for role, shape in subject.shapes.items():
        if shape.intermediate_size % tp and splits(shape, tp):  # else its heads have said so
            fitting = [size for size in (1, 2, 4, 8, 16) if shape.intermediate_size % size == 0]
            yield _refuse(
                "engine.tp_size",
                f"the {role}'s MLP of {shape.intermediate_size} cannot be split over {tp} ranks",
                f"set tp_size: {' or '.join(map(str, fitting))}",
            )


def _layers_for_pp(subject: Subject) -> Found:
    for role, shape in subject.shapes.items():
        if subject.trtllm is not None and subject.trtllm.pp_size > shape.num_layers:
            what = f"the {role} has {shape.num_layers} layers for {subject.trtllm.pp_size} pipeline ranks"
            yield _refuse("engine.pp_size", what, f"set pp_size: {shape.num_layers} or less")


def _length_within_model(subject: Subject) -> Found:
    if "target" not in subject.shapes:
        return
    limit = length_limit(subject.shapes["target"])
    if subject.config.engine.max_seq_len > limit:
        what = f"max_seq_len {subject.config.engine.max_seq_len} is beyond the target's {limit} positions"
        yield _refuse("engine.max_seq_len", what, f"set max_seq_len: {limit} or less")


def _draft_seq_len(subject: Subject) -> Found:
    if "draft" not in subject.shapes:
        return
    limit, wanted = length_limit(subject.shapes["draft"]), subject.config.engine.max_seq_len
    if wanted > limit and ("target" not in subject.shapes or wanted <= length_limit(subject.shapes["target"])):
        what = f"max_seq_len {wanted} is beyond the draft's {limit} positions, and it has to reach as far as the target"
        yield _refuse("engine.max_seq_len", what, f"set max_seq_len: {limit}, or take a draft with a longer context")


def _same_vocab(subject: Subject) -> Found:
    if {"target", "draft"} - set(subject.shapes):
        return
    target, draft = subject.shapes["target"].vocab_size, subject.shapes["draft"].vocab_size
    if abs(target - draft) > PADDING:
        what = f"the draft's vocabulary of {draft} is not the target's of {target}: another tokenizer"
        yield _refuse("draft.checkpoint", what, "take a draft of the target's own family")
    elif target != draft:
        what = f"vocabularies of {target} and {draft} rows: if only padding differs, the larger is trimmed before the build"
        yield _Found("adjusted", "draft.checkpoint", what)


# Sizes.


def _input_within_num_tokens(subject: Subject) -> Found:
    engine = subject.trtllm
    if engine is not None and engine.max_input_len > _max_num_tokens(engine):
        yield _refuse(
            "engine.max_input_len",
            f"a prompt of {engine.max_input_len} tokens is one forward, and max_num_tokens allows {_max_num_tokens(engine)}",
            f"set max_num_tokens: {engine.max_input_len} or more, or a smaller max_input_len",
        )


def _draft_within_num_tokens(subject: Subject) -> Found:
    engine = subject.pytorch_flow
    if engine is None or not subject.drafts:
        return
    needed, allowed = engine.max_batch_size * (subject.draft_len + 1), _max_num_tokens(engine)
    if needed > allowed:
        fits = max(1, allowed // (subject.draft_len + 1))
        what = f"verifying {subject.draft_len} + 1 tokens of {engine.max_batch_size} requests takes {needed} tokens a step"
        mend = f"set max_num_tokens: {needed} or more, or max_batch_size: {fits}"
        yield _refuse("engine.max_num_tokens", f"{what}, and max_num_tokens allows {allowed}", mend)


def _spec_raises_num_tokens(subject: Subject) -> Found:
    engine = subject.engine_flow
    if engine is None or not subject.drafts:
        return
    needed = engine.max_batch_size * (subject.draft_len + 1)
    if needed > _max_num_tokens(engine):
        steps = f"{engine.max_batch_size} requests x ({subject.draft_len} + 1) tokens"
        yield _Found("adjusted", "engine.max_num_tokens", f"raised from {_max_num_tokens(engine)} to {needed}: {steps}")


def _spec_extends_seq_len(subject: Subject) -> Found:
    if subject.engine_flow is not None and subject.drafts:
        length = subject.config.engine.max_seq_len
        what = f"the target's engine records {length + subject.draft_len}: {length} + max_draft_len {subject.draft_len}"
        yield _Found("adjusted", "engine.max_seq_len", what)


def _tokens_per_block(subject: Subject) -> Found:
    if subject.trtllm is not None and subject.trtllm.tokens_per_block.bit_count() != 1:
        what = f"tokens_per_block {subject.trtllm.tokens_per_block} is no power of two"
        yield _refuse("engine.tokens_per_block", what, "set tokens_per_block: 32 or 64")


def _profiles_with_opt_tokens(subject: Subject) -> Found:
    if (
        subject.engine_flow is not None
        and subject.engine_flow.multiple_profiles
        and subject.engine_flow.opt_num_tokens is not None
    ):
        what = "trtllm-build refuses opt_num_tokens together with multiple_profiles"
        yield _refuse("engine.opt_num_tokens", what, "remove one of the two")


# Speculation.


def _no_pp_with_draft_target(subject: Subject) -> Found:
    engine = subject.trtllm
    if engine is not None and subject.drafts and engine.pp_size > 1:
        mend = f"set pp_size: 1 and tp_size: {engine.world_size}, or speculation.kind: none"
        yield _refuse("engine.pp_size", "draft-target with two models runs without pipeline parallelism", mend)


def _acceptance_rule(subject: Subject) -> Found:
    asked, known = subject.config.speculation.acceptance, ACCEPTANCE[subject.config.engine.kind]
    if not subject.drafts or asked in ("auto", *known):
        return
    why = (
        "it drafts greedily and keeps a token that the target samples too"
        if subject.pytorch_flow is not None
        else "its loop has no such rule"
    )
    mend = f"set acceptance: auto (which is {known[0]}), or engine.kind: torch, which has {asked}"
    yield _refuse("speculation.acceptance", f"kind {subject.config.engine.kind} cannot accept by {asked}: {why}", mend)


def _block_reuse_for_drafts(subject: Subject) -> Found:
    if subject.engine_flow is not None and subject.drafts and not subject.engine_flow.enable_block_reuse:
        what = "drafts from outside need KV block reuse: each step sends the accepted text again"
        yield _refuse("engine.enable_block_reuse", what, "remove this line, or set it to true")


def _overlap_scheduler(subject: Subject) -> Found:
    if subject.pytorch_flow is not None and subject.drafts and subject.version is not None and subject.version.name != "1.3":
        yield _Found(
            "adjusted", "speculation.kind", "the overlap scheduler is off: two-model draft-target does not run with it"
        )


def _attention_backend(subject: Subject) -> Found:
    engine = subject.pytorch_flow
    if engine is not None and engine.attn_backend == "FLASHINFER" and engine.enable_block_reuse:
        yield _Found("adjusted", "engine.attn_backend", "FLASHINFER turns KV block reuse off")
    if engine is not None and engine.attn_backend != "TRTLLM" and subject.drafts:
        what = f"{engine.attn_backend} with draft-target is not tested upstream"
        yield _Found("warning", "engine.attn_backend", what, "set attn_backend: TRTLLM")


# What the builder switches off.


def _fused_mlp_scope(subject: Subject) -> Found:
    if subject.engine_flow is not None:
        for role, model in _of_algo(subject, *INT8):
            yield _Found(
                "adjusted",
                f"{role}.quantization.quant_algo",
                f"use_fused_mlp is switched off for {model.quantization.quant_algo}",
            )


def _fp8_fmha_needs_fp8_kv(subject: Subject) -> Found:
    if subject.engine_flow is not None:
        for role, model in _of_algo(subject, "FP8"):
            if model.quantization.kv_cache_quant_algo is None:
                yield _Found(
                    "adjusted", f"{role}.quantization", "use_fp8_context_fmha is switched off: the KV cache is not FP8"
                )


def _fp8_kv_forces_fp8_fmha(subject: Subject) -> Found:
    if subject.engine_flow is not None:
        for role, model in _of_algo(subject, "FP8"):
            if model.quantization.kv_cache_quant_algo == "FP8":
                yield _Found(
                    "adjusted", f"{role}.quantization", "use_fp8_context_fmha is switched on: weights and KV cache are FP8"
                )


def _fp8_fmha_needs_sm89(subject: Subject) -> Found:
    if subject.engine_flow is not None and subject.gpu is not None and subject.gpu.sm < 89:
        what = f"use_fp8_context_fmha is switched off: {subject.gpu.name} is SM {subject.gpu.sm}"
        yield _Found("adjusted", "hardware.gpu", what)


def _nccl_single_rank(subject: Subject) -> Found:
    if subject.engine_flow is not None and subject.engine_flow.world_size == 1:
        yield _Found("adjusted", "engine.tp_size", "nccl_plugin is dropped: there is one rank")


# Hardware.


def _world_size(subject: Subject) -> Found:
    engine, hardware = subject.trtllm, subject.config.hardware
    if engine is None or subject.gpu is None:
        return
    ranks = f"tp_size {engine.tp_size} x pp_size {engine.pp_size} = {engine.world_size} ranks"
    if engine.world_size > subject.gpu_count:
        mend = f"set tp_size: {_power_of_two_below(subject.gpu_count)}, or hardware.count and nodes to what there is"
        yield _refuse("engine.tp_size", f"{ranks} need as many GPUs, and there are {subject.gpu_count}", mend)
    elif engine.world_size > engine.gpus_per_node * hardware.nodes:
        nodes = -(-engine.world_size // engine.gpus_per_node)
        what = f"{ranks} do not fit {_nodes(hardware)} of {engine.gpus_per_node} GPUs"
        yield _refuse("engine.gpus_per_node", what, f"set hardware.nodes: {nodes}, or engine.gpus_per_node")


def _ranks_per_node(subject: Subject) -> Found:
    engine, count = subject.trtllm, subject.config.hardware.count
    if engine is None or count is None or engine.world_size > subject.gpu_count:
        return
    placed = min(engine.world_size, engine.gpus_per_node)
    if placed > count:
        what = f"gpus_per_node {engine.gpus_per_node} places {placed} ranks on a machine with {count} GPUs"
        yield _refuse("engine.gpus_per_node", what, f"set gpus_per_node: {count}")
    elif engine.tp_size > count:
        what = f"tp_size {engine.tp_size} spans machines of {count} GPUs: every layer waits for the network between them"
        yield _Found("warning", "engine.tp_size", what, f"set tp_size: {_power_of_two_below(count)}, and pp_size for the rest")


def _hardware_needed(subject: Subject) -> Found:
    if subject.trtllm is not None and subject.gpu is None:
        what = "this machine has no NVIDIA GPU that is known here, so precision, memory and speed are not judged"
        yield _Found("warning", "hardware.gpu", what, f"name the one that will serve: {', '.join(GPUS)}")


def _one_device(subject: Subject) -> Found:
    hardware = subject.config.hardware
    if isinstance(subject.config.engine, TorchEngineConfig) and (hardware.nodes > 1 or (hardware.count or 1) > 1):
        path = "hardware.nodes" if hardware.nodes > 1 else "hardware.count"
        yield _refuse(path, "kind torch runs on one device", "remove this line, or set engine.kind: trtllm_pytorch")


# Helpers.


def family_of(shape: ModelShape) -> str:
    """The name that support lists use. Llama 3 is told from Llama 2 by its tokenizer's size."""
    if shape.architecture == "LlamaForCausalLM":
        return "Llama 3" if shape.vocab_size >= 128000 else "Llama 2"
    return {"MistralForCausalLM": "Mistral", "Qwen2ForCausalLM": "Qwen 2 / 2.5", "Qwen3ForCausalLM": "Qwen 3"}[
        shape.architecture
    ]


def length_limit(shape: ModelShape) -> int:
    """Positions that the model was made for; RoPE variants that stretch them by a factor say so in their own keys."""
    scaling = shape.rope_scaling or {}
    if scaling.get("rope_type") in ("linear", "dynamic"):
        return int(shape.max_position_embeddings * float(scaling.get("factor", 1.0)))
    if scaling.get("rope_type") == "yarn":
        original = int(scaling.get("original_max_position_embeddings", shape.max_position_embeddings))
        return max(shape.max_position_embeddings, int(original * float(scaling.get("factor", 1.0))))
    return shape.max_position_embeddings


def _of_algo(subject: Subject, *algos: str) -> list[tuple[str, ModelConfig]]:
    return [(role, model) for role, model in subject.models.items() if model.quantization.quant_algo in algos]


def _status(subject: Subject, model: ModelConfig) -> Status | None:
    if subject.trtllm is None or subject.column is None:
        return None
    return WEIGHT_SUPPORT[subject.config.engine.kind][model.quantization.quant_algo].get(subject.column)


def splits(shape: ModelShape, tp_size: int) -> bool:
    heads, kv_heads = shape.num_heads, shape.num_kv_heads
    return heads % tp_size == 0 and (kv_heads % tp_size == 0 or tp_size % kv_heads == 0)


def _max_num_tokens(engine: TensorRtLlmConfig) -> int:
    return DEFAULT_MAX_NUM_TOKENS if engine.max_num_tokens is None else engine.max_num_tokens


def _power_of_two_below(count: int) -> int:
    return 1 << (max(1, count).bit_length() - 1)


def _nodes(hardware: HardwareConfig) -> str:
    return "one machine" if hardware.nodes == 1 else f"{hardware.nodes} machines"


CHECKS: dict[str, Callable[[Subject], Found]] = {
    "engine-flow-removed": _engine_flow_removed,
    "draft-target-min-version": _draft_target_min_version,
    "unified-hf-min-version": _unified_hf_min_version,
    "qwen3-min-version": _qwen3_min_version,
    "layout-of-flow": _layout_of_flow,
    "fp8-needs-sm89": _fp8_needs_sm89,
    "kv-fp8-needs-sm89": _kv_fp8_needs_sm89,
    "no-w8a8-in-pytorch": _no_w8a8_in_pytorch,
    "w8a16-not-established": _w8a16_not_established,
    "blackwell-no-int8": _blackwell_no_int8,
    "int8-on-sm120": _int8_on_sm120,
    "smoothquant-families": _smoothquant_families,
    "no-int8-kv-preset": _no_int8_kv_preset,
    "int8-kv-disables-paged-fmha": _int8_kv_disables_paged_fmha,
    "fp8-kv-needs-fp8-weights-for-paged-fmha": _fp8_kv_under_other_weights,
    "toolkit-fp8-kv": _toolkit_fp8_kv,
    "heads-divide-tp": _heads_divide_tp,
    "mlp-divides-tp": _mlp_divides_tp,
    "layers-for-pp": _layers_for_pp,
    "length-within-model": _length_within_model,
    "draft-seq-len": _draft_seq_len,
    "same-vocab": _same_vocab,
    "input-within-num-tokens": _input_within_num_tokens,
    "draft-within-num-tokens": _draft_within_num_tokens,
    "tokens-per-block-power-of-two": _tokens_per_block,
    "profiles-with-opt-tokens": _profiles_with_opt_tokens,
    "no-pp-with-draft-target": _no_pp_with_draft_target,
    "acceptance-rule": _acceptance_rule,
    "block-reuse-for-drafts": _block_reuse_for_drafts,
    "world-size": _world_size,
    "ranks-per-node": _ranks_per_node,
    "hardware-needed": _hardware_needed,
    "toolkit-one-device": _one_device,
    "mixed-precision-pair": _mixed_precision_pair,
    "serving-container": _serving_container,
    "spec-extends-seq-len": _spec_extends_seq_len,
    "spec-raises-num-tokens": _spec_raises_num_tokens,
    "draft-target-two-model-overlap": _overlap_scheduler,
    "attention-backend": _attention_backend,
    "fused-mlp-scope": _fused_mlp_scope,
    "fp8-fmha-needs-fp8-kv": _fp8_fmha_needs_fp8_kv,
    "fp8-kv-forces-fp8-fmha": _fp8_kv_forces_fp8_fmha,
    "fp8-fmha-needs-sm89": _fp8_fmha_needs_sm89,
    "nccl-single-rank": _nccl_single_rank,
}
