"""The command line of `trtllm-build`: flags, types, defaults, choices, and how it fails. Data only.

`facts.rules` has the rules by which it changes or refuses settings.

Sources: NVIDIA/TensorRT-LLM `tensorrt_llm/commands/build.py` (65f1d1536e18, of the 1.1-1.2 line;
008b2b8d23af, of the 0.x line), `plugin/plugin.py`, `builder.py`;
`examples/draft_target_model/README.md` (0.18-1.2); the performance guide's pages "Useful build-time
flags" and "FP8 quantization". The command is gone in 1.3 (pull requests 15918, 16369).

Confidence: A: read in the version itself; B: the same in published revisions just before and after;
C: seen in one neighbouring revision; I: inferred. For 0.21 no row is better than C, since its
plugin flags were not read one by one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from toolkit.facts.source import Confidence

__all__ = [
    "DRAFT_TOKENS_EXTERNAL",
    "ENGINE_INPUTS",
    "ENGINE_OUTPUTS",
    "FAILURES",
    "FLAGS",
    "GEMM_PLUGIN",
    "HIDDEN_STATES",
    "LOGITS_DTYPE",
    "MILESTONES",
    "SPECULATIVE_MODES",
    "VERSIONS",
    "Failure",
    "Flag",
]

VERSIONS = ("0.21", "1.0", "1.1", "1.2.0", "1.2.1")
DTYPES = ("auto", "float16", "float32", "bfloat16", "int32", "disable")
SWITCH = ("enable", "disable")


FlagType: TypeAlias = Literal["path", "str", "int", "enum", "flag", "list[path]", "list[str]"]


@dataclass(frozen=True, slots=True)
class Flag:
    """type: path | str | int | enum | flag (takes no value) | list[path] | list[str]. versions: the
    versions that have the flag.
    """

    name: str
    type: FlagType
    default: str | int | bool | None
    group: str
    choices: tuple[str, ...] | None = None
    aliases: tuple[str, ...] = ()
    deprecated: bool = False
    versions: tuple[str, ...] = VERSIONS
    confidence: Confidence = "B"
    note: str | None = None


@dataclass(frozen=True, slots=True)
class Failure:
    """A known way in which builds fail. pattern: a regular expression that is searched in the log,
    last lines first.

    source: where the text was seen: issues of NVIDIA/TensorRT-LLM, its source, or messages of CUDA,
    Docker and Linux.
    """

    id: str
    pattern: str
    what: str
    hint: str
    source: str
    confidence: Confidence = "B"


FLAGS = (
    Flag("--checkpoint_dir", "path", None, "input"),
    Flag("--model_config", "path", None, "input"),
    Flag("--build_config", "path", None, "input"),
    Flag("--model_cls_file", "path", None, "input"),
    Flag("--model_cls_name", "str", None, "input"),
    Flag("--output_dir", "path", "engine_outputs", "output"),
    Flag("--max_batch_size", "int", 2048, "limits"),
    Flag("--max_input_len", "int", 1024, "limits", note="clipped to max_seq_len"),
    Flag(
        "--max_seq_len",
        "int",
        None,
        "limits",
        aliases=("--max_decoder_seq_len",),
        note="when unset: max_position_embeddings times rotary scaling factor",
    ),
    Flag("--max_beam_width", "int", 1, "limits"),
    Flag("--max_num_tokens", "int", 8192, "limits"),
    Flag("--opt_num_tokens", "int", None, "limits"),
    Flag("--max_encoder_input_len", "int", 1024, "limits"),
    Flag(
        "--max_prompt_embedding_table_size", "int", 0, "limits", aliases=("--max_multimodal_len",)
    ),
    Flag(
        "--kv_cache_type",
        "enum",
        None,
        "limits",
        choices=("continuous", "paged", "disabled"),
        note="unset resolves to PAGED; case-insensitive",
    ),
    Flag("--paged_kv_cache", "enum", None, "limits", choices=SWITCH, deprecated=True),
    Flag("--input_timing_cache", "path", None, "engine"),
    Flag("--output_timing_cache", "path", "model.cache", "engine"),
    Flag(
        "--profiling_verbosity",
        "enum",
        "layer_names_only",
        "engine",
        choices=("layer_names_only", "detailed", "none"),
    ),
    Flag("--strip_plan", "flag", False, "engine"),
    Flag("--weight_sparsity", "flag", False, "engine"),
    Flag(
        "--weight_streaming",
        "flag",
        False,
        "engine",
        note=(
            "pairs with runtime gpu_weights_percent; gemm_plugin must be disabled for the weights"
            " to stream"
        ),
    ),
    Flag(
        "--fast_build",
        "flag",
        False,
        "engine",
        note="turns on managed weights (rank*_managed_weights.safetensors)",
    ),
    Flag("--workers", "int", 1, "engine", note="clamped to visible device count"),
    Flag(
        "--log_level",
        "enum",
        "info",
        "engine",
        choices=("internal_error", "error", "warning", "info", "verbose", "debug", "trace"),
        confidence="C",
    ),
    Flag("--enable_debug_output", "flag", False, "engine"),
    Flag("--visualize_network", "path", None, "engine"),
    Flag("--dry_run", "flag", False, "engine"),
    Flag("--monitor_memory", "flag", False, "engine"),
    Flag("--logits_dtype", "enum", None, "logits", choices=("float16", "float32")),
    Flag("--gather_context_logits", "flag", False, "logits"),
    Flag(
        "--gather_generation_logits",
        "flag",
        False,
        "logits",
        deprecated=True,
        note=(
            "accepted and recorded; the runtime gathers where the record or an executor option says"
            " so, and Triton's backend has no parameter for that option"
        ),
    ),
    Flag("--gather_all_token_logits", "flag", False, "logits", note="sets both gather flags"),
    Flag("--lora_dir", "list[path]", None, "lora"),
    Flag("--lora_ckpt_source", "enum", "hf", "lora", choices=("hf", "nemo")),
    Flag("--lora_target_modules", "list[str]", None, "lora"),
    Flag("--max_lora_rank", "int", 64, "lora"),
    Flag(
        "--speculative_decoding_mode",
        "enum",
        None,
        "speculative",
        choices=(
            "draft_tokens_external",
            "lookahead_decoding",
            "medusa",
            "explicit_draft_tokens",
            "eagle",
        ),
    ),
    Flag("--max_draft_len", "int", 0, "speculative"),
    Flag("--bert_attention_plugin", "enum", "auto", "plugin", choices=DTYPES),
    Flag("--gpt_attention_plugin", "enum", "auto", "plugin", choices=DTYPES),
    Flag("--fp8_rowwise_gemm_plugin", "enum", "disable", "plugin", choices=DTYPES),
    Flag("--lora_plugin", "enum", "disable", "plugin", choices=DTYPES),
    Flag("--moe_plugin", "enum", "auto", "plugin", choices=DTYPES),
    Flag("--mamba_conv1d_plugin", "enum", "auto", "plugin", choices=DTYPES),
    Flag("--nccl_plugin", "enum", "auto", "plugin", choices=DTYPES),
    Flag(
        "--gemm_plugin",
        "enum",
        None,
        "plugin",
        choices=("auto", "float16", "float32", "bfloat16", "int32", "fp8", "nvfp4", "disable"),
        note="unset means disabled",
    ),
    Flag("--gemm_swiglu_plugin", "enum", "disable", "plugin", choices=("fp8", "disable")),
    Flag("--low_latency_gemm_plugin", "enum", "disable", "plugin", choices=("fp8", "disable")),
    Flag(
        "--low_latency_gemm_swiglu_plugin", "enum", "disable", "plugin", choices=("fp8", "disable")
    ),
    Flag(
        "--gemm_allreduce_plugin",
        "enum",
        "disable",
        "plugin",
        choices=("float16", "bfloat16", "disable"),
    ),
    Flag("--dora_plugin", "enum", "disable", "plugin", choices=SWITCH),
    Flag("--context_fmha", "enum", "enable", "plugin", choices=SWITCH),
    Flag("--bert_context_fmha_fp32_acc", "enum", "disable", "plugin", choices=SWITCH),
    Flag("--remove_input_padding", "enum", "enable", "plugin", choices=SWITCH),
    Flag("--use_paged_context_fmha", "enum", "enable", "plugin", choices=SWITCH),
    Flag("--use_fp8_context_fmha", "enum", "enable", "plugin", choices=SWITCH),
    Flag("--fuse_fp4_quant", "enum", "disable", "plugin", choices=SWITCH),
    Flag("--multiple_profiles", "enum", "disable", "plugin", choices=SWITCH),
    Flag("--paged_state", "enum", "enable", "plugin", choices=SWITCH),
    Flag("--streamingllm", "enum", "disable", "plugin", choices=SWITCH, note="enable is rejected"),
    Flag("--norm_quant_fusion", "enum", "disable", "plugin", choices=SWITCH),
    Flag("--reduce_fusion", "enum", "disable", "plugin", choices=SWITCH),
    Flag("--user_buffer", "enum", "disable", "plugin", choices=SWITCH),
    Flag("--use_fused_mlp", "enum", "enable", "plugin", choices=SWITCH),
    Flag("--pp_reduce_scatter", "enum", "disable", "plugin", choices=SWITCH),
    Flag("--tokens_per_block", "int", 32, "plugin"),
    Flag("--auto_parallel", "int", 1, "auto_parallel", versions=("0.21",)),
    Flag("--gpus_per_node", "int", 8, "auto_parallel", versions=("0.21",)),
    Flag("--cluster_key", "enum", None, "auto_parallel", versions=("0.21",)),
)

DRAFT_TOKENS_EXTERNAL = "draft_tokens_external"

# build_config.speculative_decoding_mode in an engine's config.json. It is inferred (I) that it is
# stored as a number, so the reader must accept number and name.
SPECULATIVE_MODES = {
    "NONE": 1,
    "DRAFT_TOKENS_EXTERNAL": 2,
    "MEDUSA": 4,
    "LOOKAHEAD_DECODING": 8,
    "EXPLICIT_DRAFT_TOKENS": 16,
    "EAGLE": 32,
    "NGRAM": 64,
    "USER_PROVIDED": 128,
    "SAVE_HIDDEN_STATES": 256,
    "AUTO": 512,
}

# quant_algo -> --gemm_plugin. NVIDIA's guide: on for FP16 and BF16 products; off for FP8 products,
# since TensorRT's own kernels are faster except at the smallest batches (C). SmoothQuant and
# weight-only matrices have their own plugins, but LM head and embeddings stay in 16 bits, so it is
# on for them.
GEMM_PLUGIN = {"FP8": "disable", "W8A8_SQ_PER_CHANNEL": "auto", "W8A16": "auto", "NO_QUANT": "auto"}

# The type of an engine's logits, on all sides: the checkpoint states it, `--logits_dtype` overrides
# that and is recorded in the engine, and config.pbtxt repeats it
# (`triton_tensors.LOGITS_DATATYPES`). Triton's backend answers a request for logits only if engine
# and config.pbtxt agree (triton_backend/inflight_batcher_llm/src/model_instance_state.cc, B), and
# the runtime copies draft logits only between equal types ("Incompatible data types",
# cpp/tensorrt_llm/runtime/bufferManager.cpp, B). float32 is the default for a checkpoint that
# states none, what upstream's examples fill in, and fine enough to judge a divergence by
# log-probabilities.
LOGITS_DTYPE = "float32"

# Text in the build log -> the step that is done. The steps come in this order, once per rank
# (public logs of 0.10-1.2, issues 2451, 1543, 346).
MILESTONES = (
    ("Total time of constructing network from module object", "network constructed"),
    ("Build TensorRT engine", "choosing kernels"),
    ("Total time of building Unnamed", "engine built"),
    ("Serializing engine to", "writing the engine"),
    ("Engine serialized. Total time", "engine written"),
)

# The first match is reported, so causes come before their consequences.
FAILURES = (
    Failure(
        "unknown-flag",
        r"unrecognized arguments: .+|argument --\w+: invalid choice: .+",
        "the installed trtllm-build refuses a flag of the version that the YAML names",
        "Build in the container of that version (engine.builder: container), or name the installed"
        " version.",
        "argparse",
    ),
    Failure(
        "disk-full",
        r"No space left on device|Disk quota exceeded",
        "the disk is full",
        "An engine needs about the size of its checkpoint, and as much again while it is written:"
        " free space and build again.",
        "Linux",
    ),
    Failure(
        "blackwell-no-int8",
        r"(INT8/INT4 quantization|SmoothQuant|Per-channel or per-token scaling) is not supported on"
        r" SM>=100",
        "this GPU generation (SM 100-119) has no INT8 engines",
        "Quantize to FP8, or build on and for SM 80-90.",
        "builder.py",
    ),
    Failure(
        "unsupported-sm",
        r"(?i)unsupported SM|no kernel image is available for execution|sm_?\d+ is not (currently"
        r" )?supported",
        "this TensorRT-LLM has no kernels for this GPU",
        "Choose a version that supports the GPU (engine.tensorrt_llm), or a GPU that the version"
        " supports.",
        "CUDA; TensorRT's myelin and cask messages",
        "C",
    ),
    Failure(
        "version-mismatch",
        r"engine plan file is not compatible|expecting library version|has a different version of"
        r" TensorRT"
        r"|undefined symbol: \w*nvinfer|does not match .*TensorRT",
        "the versions of TensorRT and TensorRT-LLM do not match",
        "Build in the container of the version that serves (engine.builder: container): it has"
        " matching versions.",
        "issue 1695; triton_cli pull request 59",
    ),
    Failure(
        "gpu-out-of-memory",
        r"OutOfMemory|CUDA out of memory|cudaErrorMemoryAllocation|CUDA runtime error in .*: out of"
        r" memory"
        r"|GPU memory \(\d+ bytes\) could not be allocated",
        "the GPU ran out of memory while building",
        "Lower max_batch_size, max_seq_len or max_num_tokens, raise tp_size, or stop other programs"
        " on the GPU.",
        "issues 346, 1543, 2451",
    ),
    Failure(
        "no-gpu",
        r"Found no NVIDIA driver|no CUDA-capable device|CUDA driver version is"
        r" insufficient|libcuda\.so\.1: cannot open"
        r"|max_workers must be greater than 0|could not select device driver",
        "no NVIDIA GPU or no matching driver was found",
        "Build on a machine with a GPU of the kind that will serve, its driver, and the NVIDIA"
        " container toolkit.",
        "CUDA; Docker; build.py cuts the workers down to the number of devices",
        "C",
    ),
    Failure(
        "no-image",
        r"manifest unknown|manifest for .* not found|pull access denied|unauthorized: |Unable to"
        r" find image .*(?s:.)*denied",
        "the image of the build container could not be fetched",
        "Log in (docker login nvcr.io), or load the image by hand; `docker pull IMAGE` shows why.",
        "Docker",
        "I",
    ),
    Failure(
        "no-docker",
        r"Cannot connect to the Docker daemon|permission denied while trying to connect to the"
        r" Docker daemon",
        "docker does not answer",
        "Start the daemon and give this user access to it, or build inside the container with"
        " engine.builder: local.",
        "Docker",
    ),
    Failure(
        "shared-memory",
        r"(?i)insufficient shared memory|bus error",
        "shared memory is too small for the workers",
        "Run the container with --ipc=host or --shm-size=16g.",
        "PyTorch",
        "C",
    ),
    Failure(
        "missing-library",
        r"error while loading shared libraries: .+|ImportError: .+\.so[.\d]*: cannot open shared"
        r" object file",
        "a library that trtllm-build needs is missing",
        "Build in the container (engine.builder: container), which has all libraries.",
        "Linux",
    ),
    Failure(
        "unknown-architecture",
        r"Unsupported model architecture: \S+",
        "the engine flow does not know this architecture",
        "Choose engine.kind: trtllm_pytorch, or a model of a family that the engine flow supports.",
        "build.py",
    ),
    Failure(
        "tensors",
        r"Required but not provided tensors: ?.+|Provided but not expected tensors: ?.+",
        "the checkpoint does not have the tensors that this version expects",
        "Write the checkpoint again for this version and tp_size: `toolkit build --fresh"
        " quantize`.",
        "models/modeling_utils.py",
        "C",
    ),
    Failure(
        "no-implementation",
        r"Could not find any implementation for node \S+",
        "TensorRT has no kernel for a layer with these sizes, this precision or this much memory",
        "Lower max_num_tokens and max_seq_len first: the most frequent cause is too little memory"
        " for the kernel.",
        "issues 54, 619; TensorRT issue 2918",
    ),
    Failure(
        "killed",
        r"(?m)^(.*: line \d+: +\d+ )?Killed\b|terminated abruptly while the future was running",
        "the build was killed, most often because the machine ran out of main memory",
        "Each worker needs main memory of about twice its rank's checkpoint: use fewer workers, or"
        " add memory.",
        "issues 102, 191, 743",
    ),
)

# The names of the tensors that every paged-attention decoder engine has
# (models/generation_mixin.py of the 1.1-1.2 line, C). If one is missing, the runtime will refuse
# the engine.
ENGINE_INPUTS = (
    "input_ids",
    "position_ids",
    "last_token_ids",
    "sequence_length",
    "context_lengths",
    "host_request_types",
    "host_past_key_value_lengths",
    "host_context_lengths",
    "host_max_attention_window_sizes",
    "cache_indirection",
    "kv_cache_block_offsets",
    "host_kv_cache_block_offsets",
    "host_kv_cache_pool_pointers",
)
ENGINE_OUTPUTS = ("logits",)
HIDDEN_STATES = ("hidden_states_input", "hidden_states_output")  # between the ranks of a pipeline
