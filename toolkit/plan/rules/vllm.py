"""Rules about the kind vllm: what each version has, which quantization runs on which device, and
which keys of the YAML its servers cannot carry.
"""

from __future__ import annotations

from toolkit.facts.vllm import CPU_HEAD_SIZES, SERVING_TAGS, VLLM_VERSIONS
from toolkit.plan.rules.findings import (
    Check,
    Findings,
    RuleFinding,
    models_with_algo,
    refuse,
    refuse_unless_allowed,
)
from toolkit.plan.subject import Subject, largest_tp_size
from toolkit.words import QuantAlgo

__all__ = ["CHECKS"]

# What a key of the `triton` section sets in the repositories of other kinds, and what stands in its
# place. Neither vLLM's own server nor Triton's backend has such a setting.
WITHOUT_EFFECT = {
    "decoupled": "Triton's vLLM backend always streams; a request asks for its text at once",
    "max_queue_size": "vLLM queues requests itself, without a limit",
    "default_max_tokens": "a request without max_tokens gets vLLM's own default",
    "request_timeout_s": "vLLM ends no request by time; the client closes the connection",
    "stream_interval_ms": "vLLM sends one chunk per step",
    "backend": "the server is vLLM's own, or Triton with the container's vLLM backend",
    "model_py": "the model's Python code is that of the container's vLLM backend",
    "on_draft_failure": "target and draft are one engine, so they fail together",
}
# The same of ports: vLLM's own server has one, for requests and metrics.
ONE_PORT = ("grpc_port", "metrics_port")
# Keys of the engine that one kind of device reads.
ONLY_ON = {"gpu_memory_utilization": "GPUs", "kv_cache_gib": "CPUs", "correct_sampling": "CPUs"}
AMX_FLAG = "amx_tile"  # as /proc/cpuinfo names it
FP8_KV_FLAGS = frozenset({"avx512f", AMX_FLAG})
# Either of them multiplies INT8 codes without an intermediate of 16 bits.
VNNI_FLAGS = frozenset({"avx512_vnni", "avx_vnni", "amx_int8"})
INT8_OR_NONE = "W8A8_SQ_PER_CHANNEL or NO_QUANT"


def _method(subject: Subject) -> Findings:
    version, speculation = subject.vllm_version, subject.config.speculation
    if version is None or not speculation.is_enabled or speculation.kind == "mtp":
        return  # the toolkit writes no mtp: toolkit.plan.rules.runtime
    method = speculation.kind if speculation.kind != "draft_target" else "draft_model"
    has_method: bool | None = getattr(version, method)
    if not has_method:
        yield refuse(
            "engine.vllm",
            f"the method {method} in vLLM {version.name} {_missing(has_method)}",
            f'set vllm: "{_newest_with(method)}", or speculation.kind: none',
        )


def _schedule(subject: Subject) -> Findings:
    version, speculation = subject.vllm_version, subject.config.speculation
    if version is None or not speculation.is_enabled:
        return
    for key in ("draft_len_schedule", "max_concurrency"):
        if getattr(speculation, key) is None:
            continue
        path = f"speculation.{key}"
        if not version.schedule:
            what = (
                f"a draft length per batch size in vLLM {version.name} {_missing(version.schedule)}"
            )
            yield refuse(path, what, f'remove it, or set engine.vllm: "{_newest_with("schedule")}"')
        elif subject.serving_gpu is not None and speculation.head is None:
            what = (
                "vLLM documents its draft length per batch size as tested with EAGLE and DFlash"
                f" heads only, not with {speculation.kind}"
            )
            hint = "compare the counters of the served deployment at that load, or remove it"
            yield RuleFinding("warning", path, what, hint)


def _on_cpu(subject: Subject) -> Findings:
    version = subject.vllm_version
    if version is None or subject.serving_gpu is not None or version.on_cpu:
        return
    tried = [other.name for other in VLLM_VERSIONS.values() if other.on_cpu]
    yield refuse(
        "engine.vllm",
        f"vLLM {version.name} on a CPU {_missing(version.on_cpu)}",
        f'set vllm: "{tried[-1]}", which `make vllm` installs, or name the GPU in hardware.gpu',
    )


def _device(subject: Subject) -> Findings:
    engine, hardware = subject.vllm, subject.config.hardware
    if engine is None:
        return
    if engine.device == "cpu" and hardware.gpu != "auto":
        what = f"device is cpu, and hardware.gpu names an {hardware.gpu}"
        yield refuse("engine.device", what, "remove one of the two")
    if subject.serving_gpu is not None:
        return
    if engine.device == "cuda":
        yield refuse(
            "engine.device",
            "device is cuda, and this machine has no NVIDIA GPU that the toolkit knows",
            "name the GPU that will serve in hardware.gpu, or set device: auto",
        )
        return
    for key in ("nodes", "count"):
        if (getattr(hardware, key) or 1) > 1:
            what = "on CPUs, the toolkit serves vLLM on one machine only"
            yield refuse(f"hardware.{key}", what, "remove this line, or set hardware.gpu")
    if engine.world_size > subject.cores:
        what = (
            f"tp_size {engine.tp_size} x pp_size {engine.pp_size} takes a process each, and every"
            f" process a core; this program may use {subject.cores}"
        )
        tp_size = largest_tp_size(subject, subject.cores // engine.pp_size)
        yield refuse("engine.tp_size", what, f"set tp_size: {tp_size} and pp_size: 1")


def _pipeline(subject: Subject) -> Findings:
    engine = subject.vllm
    if engine is None or engine.pp_size == 1 or not subject.speculates:
        return
    yield refuse(
        "engine.pp_size",
        "speculation over several pipeline ranks is not established in vLLM: up to 0.29 it does not"
        " start, or ranks disagree about the accepted tokens",
        f"set pp_size: 1 and tp_size: {largest_tp_size(subject, engine.world_size)}, or"
        " speculation.kind: none",
    )


def _weight_only(subject: Subject) -> Findings:
    if subject.vllm is None:
        return
    for role, _ in models_with_algo(subject, "W8A16"):
        where = "on GPUs it reads none of ModelOpt's INT8 formats"
        if subject.serving_gpu is None:
            where = "its kernels for CPUs take weights of 4 bits only"
        yield refuse(
            f"{role}.quantization.quant_algo",
            f"vLLM cannot run W8A16: {where}",
            f"set quant_algo: {' or '.join(_fitting_algos(subject))}",
        )


def _int8_on_gpus(subject: Subject) -> Findings:
    gpu = subject.serving_gpu
    if subject.vllm is None or gpu is None or gpu.sm < 100:
        return
    for role, _ in models_with_algo(subject, "W8A8_SQ_PER_CHANNEL"):
        yield refuse(
            f"{role}.quantization.quant_algo",
            f"vLLM has no INT8 kernels for SM 100 and above, and {gpu.name} is SM {gpu.sm}",
            "set quant_algo: FP8; or take an A100, L40S, H100 or H200 for INT8",
        )


def _fp8_on_gpus(subject: Subject) -> Findings:
    gpu = subject.serving_gpu
    if subject.vllm is None or gpu is None or gpu.sm >= 89:
        return
    for role, _ in models_with_algo(subject, "FP8"):
        what = (
            f"vLLM computes in FP8 from SM 89 on, and {gpu.name} is SM {gpu.sm}: it would use the"
            " weights alone, and not what was calibrated and measured"
        )
        hint = "set quant_algo: W8A8_SQ_PER_CHANNEL; or take an L40S, H100 or H200"
        yield refuse_unless_allowed(subject, role, what, hint)


def _fp8_on_cpus(subject: Subject) -> Findings:
    if subject.vllm is None or subject.serving_gpu is not None:
        return
    for role, _ in models_with_algo(subject, "FP8"):
        what = (
            "vLLM's build for CPUs cannot load FP8 weights with a scale per linear: it gives q, k"
            " and v one scale, and the operator for that, static_scaled_fp8_quant, is not in it"
        )
        yield refuse(f"{role}.quantization.quant_algo", what, f"set quant_algo: {INT8_OR_NONE}")


def _int8_on_cpus(subject: Subject) -> Findings:
    """cpu_flags is empty where the processor is not known, or does not saturate (Arm)."""
    if subject.vllm is None or subject.serving_gpu is not None or not subject.cpu_flags:
        return
    if subject.cpu_flags & VNNI_FLAGS:
        return
    for role, _ in models_with_algo(subject, "W8A8_SQ_PER_CHANNEL"):
        what = (
            f"vLLM multiplies the {role}'s INT8 codes by oneDNN, which without VNNI adds two"
            " products in 16 bits, where they saturate: the served model is further from its"
            " source than the quality that the build measures and judges"
        )
        hint = "serve on a processor with VNNI; or set quant_algo: NO_QUANT, or engine.kind: torch"
        yield RuleFinding("warning", f"{role}.quantization.quant_algo", what, hint)


def _merged_scales(subject: Subject) -> Findings:
    if subject.vllm is None or subject.serving_gpu is None or subject.serving_gpu.sm < 89:
        return
    for role, _ in models_with_algo(subject, "FP8"):
        what = (
            f"the {role}'s q, k and v, and its gate and up, get one scale each when vLLM loads"
            " them: the largest of theirs, to which the weights are rounded again"
        )
        yield RuleFinding("adjusted", f"{role}.quantization.quant_algo", what)


def _fp8_dtype(subject: Subject) -> Findings:
    if subject.serving_gpu is not None:  # on a CPU no dtype helps
        yield from _refuse_float32(subject, "FP8", "vLLM's FP8 takes")


def _int8_by_amx(subject: Subject) -> Findings:
    if subject.serving_gpu is None and AMX_FLAG in subject.cpu_flags:
        takes = "this processor has AMX, and vLLM's INT8 kernel for it takes"
        yield from _refuse_float32(subject, "W8A8_SQ_PER_CHANNEL", takes)


def _refuse_float32(subject: Subject, algo: QuantAlgo, takes: str) -> Findings:
    """takes: what does not take it, and the verb."""
    engine = subject.vllm
    if engine is None:
        return
    for role, _ in models_with_algo(subject, algo):
        dtype: str = engine.dtype
        if dtype == "auto" and role in subject.shapes:
            dtype = subject.shapes[role].dtype
        if dtype == "float32":
            yield refuse(
                "engine.dtype",
                f"{takes} the {role}'s activations in bfloat16 or float16 only, and they would be"
                " float32",
                "set dtype: bfloat16",
            )


def _fp8_kv_on_cpus(subject: Subject) -> Findings:
    if subject.vllm is None or subject.serving_gpu is not None:
        return
    for role, model in subject.models.items():
        if model.quantization.kv_cache_quant_algo != "FP8":
            continue
        path = f"{role}.quantization.kv_cache_quant_algo"
        if not subject.cpu_flags & FP8_KV_FLAGS:
            what = "vLLM's FP8 KV cache on a CPU needs AVX-512 or AMX, which this processor lacks"
            yield refuse(path, what, "remove kv_cache_quant_algo")
        elif role in subject.shapes and subject.shapes[role].head_dim % 32:
            what = (
                "vLLM's FP8 KV cache on a CPU needs a head_dim that is a multiple of 32, and the"
                f" {role}'s is {subject.shapes[role].head_dim}"
            )
            yield refuse(path, what, "remove kv_cache_quant_algo")


def _head_size(subject: Subject) -> Findings:
    if subject.vllm is None or subject.serving_gpu is not None:
        return
    for role, shape in subject.shapes.items():
        if shape.head_dim not in CPU_HEAD_SIZES:
            sizes = ", ".join(map(str, CPU_HEAD_SIZES))
            what = (
                f"vLLM's attention on a CPU has no kernel for the {role}'s head_dim"
                f" {shape.head_dim}; it has {sizes}"
            )
            yield refuse(f"{role}.checkpoint", what, "use engine.kind: torch for this model")


def _one_kv_dtype(subject: Subject) -> Findings:
    """The arguments state the target's `kv_cache_dtype`, and vLLM takes it for the draft, too."""
    if subject.vllm is None or subject.config.draft is None:
        return
    target, draft = (
        model.quantization.kv_cache_quant_algo or "the model's dtype"
        for model in (subject.config.target, subject.config.draft)
    )
    if target != draft:
        what = f"the draft's KV cache takes the target's dtype in vLLM: {target}, not {draft}"
        yield RuleFinding("adjusted", "draft.quantization.kv_cache_quant_algo", what)


def _kv_space(subject: Subject) -> Findings:
    engine = subject.vllm
    if engine is None or subject.serving_gpu is not None or engine.kv_cache_gib.is_integer():
        return
    yield refuse(
        "engine.kv_cache_gib",
        f"vLLM reads VLLM_CPU_KVCACHE_SPACE as whole GiB, and this is {engine.kv_cache_gib:g}",
        f"set kv_cache_gib: {int(engine.kv_cache_gib) + 1}",
    )


def _batched_tokens(subject: Subject) -> Findings:
    engine = subject.vllm
    if engine is None or engine.max_num_batched_tokens is None:
        return
    if engine.max_num_batched_tokens < engine.max_batch_size:
        yield refuse(
            "engine.max_num_batched_tokens",
            f"a step has at least a token of each of {engine.max_batch_size} requests, and"
            f" max_num_batched_tokens allows {engine.max_num_batched_tokens}",
            f"set max_num_batched_tokens: {engine.max_batch_size * (subject.draft_len + 1)} or"
            " more, or remove this line",
        )


def _layout(subject: Subject) -> Findings:
    layout = subject.config.triton.layout
    if subject.vllm is not None and layout != "auto":
        what = (
            f"layout {layout} is served by the toolkit's or TensorRT-LLM's models; kind vllm has"
            " the layout of Triton's vLLM backend"
        )
        yield refuse("triton.layout", what, "set layout: auto, or remove this line")


def _triton_keys(subject: Subject) -> Findings:
    if subject.vllm is None:
        return
    stated = subject.config.triton.model_fields_set
    for key, instead in WITHOUT_EFFECT.items():
        if key in stated:
            what = f"kind vllm has no such setting: {instead}"
            yield refuse(f"triton.{key}", what, "remove this line")
    for key in ONE_PORT:
        if key in stated:
            what = "vLLM's own server has one port, for requests and metrics"
            yield refuse(f"triton.{key}", what, "remove this line; set http_port")


def _other_device(subject: Subject) -> Findings:
    engine = subject.vllm
    if engine is None:
        return
    here = "CPUs" if subject.serving_gpu is None else "GPUs"
    for key, device in ONLY_ON.items():
        if key in engine.model_fields_set and device != here:
            what = f"{key} is for {device}, and has no effect on {here}"
            yield RuleFinding("adjusted", f"engine.{key}", what)


def _container(subject: Subject) -> Findings:
    version = subject.vllm_version
    if version is None or version.name in SERVING_TAGS or subject.serving_gpu is None:
        return
    newest = [name for name in VLLM_VERSIONS if name in SERVING_TAGS][-1]
    yield RuleFinding(
        "warning",
        "engine.vllm",
        f"no Triton container with vLLM {version.name} is known; vLLM's own server serves it",
        f'set vllm: "{newest}", which {SERVING_TAGS[newest]} contains, to serve with Triton',
    )


def _sampling_on_cpu(subject: Subject) -> Findings:
    engine, version = subject.vllm, subject.vllm_version
    if engine is None or subject.serving_gpu is not None or not subject.speculates:
        return
    if version is None or version.samples_on_cpu:
        return
    what = (
        f"on a CPU vLLM {version.name} reads temperature, top-k and top-p of drafted tokens from"
        " memory that nobody wrote (vLLM issue 55005)"
    )
    if engine.correct_sampling:
        what += "; the engine brings a plugin for vLLM that corrects it"
        yield RuleFinding("adjusted", "engine.correct_sampling", what)
        return
    yield RuleFinding(
        "warning",
        "engine.correct_sampling",
        f"{what}, so sampled text does not follow the target; greedy text is right",
        "remove correct_sampling: false, or send requests with temperature 0 only",
    )


def _sampled_drafts(subject: Subject) -> Findings:
    speculation, path = subject.config.speculation, "speculation.acceptance"
    if subject.vllm is None or speculation.acceptance != "rejection":
        return
    if speculation.has_ngram:
        what = "vLLM's prompt lookup has no probabilities, so there is no rejection sampling"
        yield refuse(path, what, "remove acceptance: rejection")
    elif subject.speculates:
        what = "vLLM draws drafts without the request's seed: a seeded text is not repeatable"
        yield RuleFinding("adjusted", path, what)


def _prompt_limit(subject: Subject) -> Findings:
    engine = subject.vllm
    if engine is not None:
        what = (
            f"vLLM limits prompt and output together, to max_seq_len {engine.max_seq_len}; it takes"
            f" longer prompts than max_input_len {engine.max_input_len}"
        )
        yield RuleFinding("adjusted", "engine.max_input_len", what)


def _missing(known: bool | None) -> str:
    return "is not established" if known is None else "does not exist"


def _newest_with(field: str) -> str:
    return [version.name for version in VLLM_VERSIONS.values() if getattr(version, field)][-1]


def _fitting_algos(subject: Subject) -> list[str]:
    """The precisions that vLLM runs on the device of the deployment."""
    gpu = subject.serving_gpu
    if gpu is None:
        return [INT8_OR_NONE]
    if gpu.sm >= 100:
        return ["FP8"]
    return ["W8A8_SQ_PER_CHANNEL"] if gpu.sm < 89 else ["FP8", "W8A8_SQ_PER_CHANNEL"]


CHECKS: dict[str, Check] = {
    "vllm-method": _method,
    "vllm-schedule": _schedule,
    "vllm-on-cpu": _on_cpu,
    "vllm-device": _device,
    "vllm-no-pp": _pipeline,
    "vllm-w8a16": _weight_only,
    "vllm-int8-sm100": _int8_on_gpus,
    "vllm-fp8-needs-sm89": _fp8_on_gpus,
    "vllm-fp8-cpu": _fp8_on_cpus,
    "vllm-int8-vnni": _int8_on_cpus,
    "vllm-merged-scales": _merged_scales,
    "vllm-fp8-dtype": _fp8_dtype,
    "vllm-int8-amx": _int8_by_amx,
    "vllm-fp8-kv-cpu": _fp8_kv_on_cpus,
    "vllm-head-size": _head_size,
    "vllm-one-kv-dtype": _one_kv_dtype,
    "vllm-kv-space": _kv_space,
    "vllm-batched-tokens": _batched_tokens,
    "vllm-layout": _layout,
    "vllm-triton-keys": _triton_keys,
    "vllm-other-device": _other_device,
    "vllm-container": _container,
    "vllm-sampling-on-cpu": _sampling_on_cpu,
    "vllm-sampled-drafts": _sampled_drafts,
    "vllm-prompt-limit": _prompt_limit,
}
