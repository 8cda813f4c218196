"""The schema of a deployment YAML: frozen pydantic models that refuse unknown keys.

If TensorRT-LLM has a name for a field, the field has that name. A rule about two fields is a
validator on the smallest model that has both, and raises ValueError with a text "message; hint".
The validator belongs to the later field and reads the earlier one from `info.data`, so that it runs
even if other fields have faults. `toolkit.config.load` adds positions in the file. Paths stay as
written here; `load` resolves them against the folder of the YAML.
"""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import (
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationInfo,
    field_validator,
)

from toolkit.facts.capabilities import Capabilities, capabilities_of
from toolkit.facts.heads import OTHER_KINDS
from toolkit.words import (
    AcceptanceChoice,
    AttnBackend,
    BuilderChoice,
    ComputeDtype,
    Device,
    EngineMode,
    Head,
    KvCacheQuantAlgo,
    Layout,
    ModelPy,
    QuantAlgo,
    Role,
    SpeculationKind,
    VllmDtype,
)

__all__ = [
    "AdaptiveConfig",
    "CalibrationConfig",
    "DeploymentConfig",
    "DistributionGates",
    "EngineConfig",
    "GatewayConfig",
    "HardwareConfig",
    "LatencyGates",
    "LoadGates",
    "ModelConfig",
    "ParityGates",
    "QualityGates",
    "QuantizationConfig",
    "RolloutConfig",
    "SpeculationConfig",
    "TensorRtLlmConfig",
    "TorchEngineConfig",
    "TritonConfig",
    "TrtEngineConfig",
    "TrtllmPytorchConfig",
    "ValidationConfig",
    "engine_kind",
]

AUTO_MAX_DRAFT_LEN = 8  # the longest draft, in tokens, that is tried if max_draft_len is auto
TensorRtLlmVersion = Literal[
    "0.21", "1.0", "1.1", "1.2.0", "1.2.1", "1.3rc-early", "1.3rc-late", "1.4rc"
]
VllmVersion = Literal["0.24.0", "0.32.0", "0.33.0"]
GpuName = Literal[
    "auto",
    "A100-40GB",
    "A100",
    "A10",
    "A30",
    "L4",
    "L40S",
    "RTX4090",
    "RTX5090",
    "H100",
    "H100-NVL",
    "H200",
    "GH200",
    "B200",
    "B300",
]
# The name of a container image, with a tag or a digest; scripts and manifests hold it as it is.
IMAGE_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._/:@-]*$"
Count = Annotated[int, Field(ge=1)]
Ratio = Annotated[float, Field(ge=0.0, le=1.0)]
AnyPath = Annotated[Path, Field(strict=False)]  # not strict, since it is text in the YAML


class Section(BaseModel):
    """The base of all sections. Types are strict: "4" and true are not numbers, and "yes" is not a
    truth value. The string below a field is its description for editors
    (`toolkit.config.json_schema`).
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class QuantizationConfig(Section):
    """The precision of a checkpoint; one that is already quantized states its own."""

    quant_algo: QuantAlgo = "NO_QUANT"
    """Precision: W8A8_SQ_PER_CHANNEL is INT8 SmoothQuant, W8A16 has INT8 weights only."""
    kv_cache_quant_algo: KvCacheQuantAlgo | None = None
    """Precision of the KV cache, with FP8 weights only; null: the model's own type."""
    allow_unsupported: bool = False
    """Build a combination whose support is unknown; one that is known to fail is refused anyway."""


class ModelConfig(Section):
    """One checkpoint: a directory in Hugging Face format, or a hub id
    (`meta-llama/Llama-3.2-1B-Instruct`).

    A relative path starts at the folder of the YAML. After loading, directories are absolute paths,
    and hub ids are relative.
    """

    checkpoint: AnyPath
    """A folder in Hugging Face format, or a hub id, OWNER/NAME."""
    revision: str | None = None
    """Branch, tag or commit of a hub id; null: its main branch."""
    trust_remote_code: bool = False
    """Let TensorRT-LLM or vLLM run the checkpoint's own Python code, in the server."""
    quantization: QuantizationConfig = QuantizationConfig()

    @property
    def hub_id(self) -> str | None:
        return None if self.checkpoint.is_absolute() else self.checkpoint.as_posix()


def _is_quantized(model: ModelConfig) -> bool:
    stated = model.quantization
    return stated.quant_algo != "NO_QUANT" or stated.kv_cache_quant_algo is not None


class CalibrationConfig(Section):
    """The text that calibration runs through the models, and the held-out text that quality is
    measured on.

    Files hold raw text or conversations, in the forms of docs/chat.md.
    """

    dataset: AnyPath
    """Text that activations are observed on; take text like your traffic."""
    heldout: AnyPath | None = None
    """Text that quality is measured on; null: the last tenth of the dataset is held out."""
    calib_size: Count = 128
    """Lines used at most."""
    calib_max_seq_length: Count = 512
    """Tokens per line at most."""
    batch_size: Count = 4
    """Lines per forward."""


class AdaptiveConfig(Section):
    """Draft lengths that follow the text while it is written."""

    enabled: bool = True
    """False: the section has no effect."""
    window_tokens: Annotated[int, Field(ge=8, le=65536)] = 32
    """About how many of its last draft tokens decide a request's length."""
    window_requests: Annotated[int, Field(ge=1, le=65536)] = 16
    """Over how many finished requests acceptance is averaged."""
    min_acceptance_length: Annotated[float, Field(ge=1.0)] | None = None
    """Tokens per step, the target's own included, below which nothing is drafted."""
    probe_every_tokens: Annotated[int, Field(ge=8, le=65536)] = 16
    """Output tokens without drafts after which it is asked whether they would pay."""


class SpeculationConfig(Section):
    """Which drafter is used and how many tokens it drafts."""

    kind: SpeculationKind = "draft_target"
    """What drafts: the `draft` model; ngram, prompt lookup; eagle3, a head in `draft.checkpoint`;
    mtp, layers of the target's own checkpoint; or nothing."""
    max_draft_len: Annotated[int, Field(ge=1, le=16)] | Literal["auto"] = 4
    """Tokens drafted per step; auto: the build chooses the fastest length, which may be none."""
    draft_len_schedule: dict[Count, Annotated[int, Field(ge=0, le=16)]] | None = None
    """Running requests -> draft length from that number on, such as {1: 4, 4: 2, 8: 0}."""
    max_concurrency: Count | None = None
    """With more running requests than this, nothing is drafted."""
    max_prompt_tokens: Count | None = None
    """For a prompt with more tokens than this, nothing is drafted."""
    adaptive: AdaptiveConfig | None = None
    """The length is chosen per request, up to max_draft_len."""
    max_matching_ngram_size: Annotated[int, Field(ge=1, le=16)] = 4
    """For ngram: how many of the last tokens are looked up, at most."""
    acceptance: AcceptanceChoice = "auto"
    """The rule above temperature 0; auto: coupled for requests with a seed, else rejection."""

    @property
    def is_enabled(self) -> bool:
        return self.kind != "none"

    @property
    def has_draft_model(self) -> bool:
        """Whether the `draft` section's checkpoint drafts: a model or a head."""
        return self.kind == "draft_target" or self.head is not None

    @property
    def head(self) -> Head | None:
        """The head that drafts, if the `draft` section's checkpoint is a head on the target's
        hidden states and not a model that can run on its own.
        """
        return "eagle3" if self.kind == "eagle3" else None

    @property
    def has_ngram(self) -> bool:
        """Whether draft tokens are looked up in the text."""
        return self.kind == "ngram"

    @property
    def is_measured(self) -> bool:
        """Whether the build measures which draft length to use."""
        return self.is_enabled and self.max_draft_len == "auto"

    @property
    def longest_draft(self) -> int:
        """The draft length that engines are built for: an upper bound if the length is still to be
        measured, 0 without speculation.
        """
        if not self.is_enabled:
            return 0
        return AUTO_MAX_DRAFT_LEN if self.max_draft_len == "auto" else self.max_draft_len

    @property
    def adapts(self) -> AdaptiveConfig | None:
        """The section `adaptive`, if it is in force."""
        is_on = self.is_enabled and self.adaptive is not None and self.adaptive.enabled
        return self.adaptive if is_on else None

    @property
    def adaptive_settings(self) -> dict[str, Any] | None:
        """The fields of the runtime's AdaptiveSettings; None: lengths are fixed."""
        section = self.adapts
        return (
            None if section is None else section.model_dump(exclude={"enabled"}, exclude_none=True)
        )

    @property
    def draft_len_by_load(self) -> dict[int, int]:
        """The draft_len_schedule, or the schedule that max_concurrency means. Empty if the length
        is the same for every load.
        """
        if self.max_concurrency is not None and self.max_draft_len != "auto":
            return {1: self.max_draft_len, self.max_concurrency + 1: 0}
        return self.draft_len_schedule or {}

    @field_validator("kind", mode="before")
    @classmethod
    def _kind_is_supported(cls, kind: object) -> object:
        if isinstance(kind, str) and kind.lower() in OTHER_KINDS:
            versions, why = OTHER_KINDS[kind.lower()]
            raise ValueError(
                f"{kind!r} is a kind of TensorRT-LLM ({versions}) that the toolkit does not"
                f" support: {why}; known: {', '.join(get_args(SpeculationKind))}"
            )
        return kind

    @field_validator("draft_len_schedule")
    @classmethod
    def _schedule_falls_from_the_longest(
        cls, schedule: dict[int, int] | None, info: ValidationInfo
    ) -> dict[int, int] | None:
        longest = info.data.get("max_draft_len")
        if schedule is None or longest is None:
            return schedule
        if longest == "auto":
            raise ValueError(
                "draft_len_schedule is measured if max_draft_len is auto; remove one of the two"
            )
        ordered = sorted(schedule.items())
        if 1 not in schedule:
            raise ValueError(
                f"draft_len_schedule must begin with 1: {longest}, which is max_draft_len; add it"
            )
        if schedule[1] != longest:
            raise ValueError(
                f"draft_len_schedule begins with 1: {schedule[1]}, and max_draft_len is {longest};"
                " let both be the same"
            )
        for (_, earlier), (load, later) in itertools.pairwise(ordered):
            if later > earlier:
                raise ValueError(
                    "draft_len_schedule grows; let it fall, since longer drafts never pay when"
                    " more requests run at once"
                )
            if later == earlier:
                raise ValueError(
                    f"draft_len_schedule stays {later} from {load} requests on; let it fall there,"
                    f" or remove {load}: {later}"
                )
        return dict(ordered)

    @field_validator("max_concurrency")
    @classmethod
    def _load_is_limited_once(cls, max_concurrency: int | None, info: ValidationInfo) -> int | None:
        if max_concurrency is None:
            return None
        schedule = info.data.get("draft_len_schedule")
        if schedule is not None:
            ends = next((load for load, length in schedule.items() if length == 0), math.inf)
            hint = f", and add {max_concurrency + 1}: 0 to draft_len_schedule if you need it"
            raise ValueError(
                "draft_len_schedule also says when to stop drafting; remove max_concurrency"
                f"{hint if max_concurrency + 1 < ends else ''}"
            )
        if info.data.get("max_draft_len") == "auto":
            raise ValueError(
                "max_concurrency is measured if max_draft_len is auto; remove one of the two"
            )
        return max_concurrency


class EngineLengths(Section):
    """The sizes of every engine."""

    max_batch_size: Count = 8
    """Requests decoded together."""
    max_input_len: Count = 512
    """The longest prompt, in tokens."""
    max_seq_len: Annotated[Count, Field(validate_default=True)] = 1024
    """Tokens of prompt and output together."""

    @field_validator("max_seq_len")
    @classmethod
    def _input_leaves_room_for_output(cls, max_seq_len: int, info: ValidationInfo) -> int:
        max_input_len = info.data.get("max_input_len", 0)
        if max_input_len >= max_seq_len:
            raise ValueError(
                f"max_input_len {max_input_len} leaves no room for output in max_seq_len"
                f" {max_seq_len}; max_seq_len counts prompt and output together, so make it larger"
            )
        return max_seq_len


class TorchEngineConfig(EngineLengths):
    """The embedded engine: our runtime over compiled torch graphs."""

    kind: Literal["torch"] = "torch"
    """The embedded engine."""
    device: Literal["auto", Device] = "auto"
    """Where it computes; auto: a GPU where there is one and it pays."""
    mode: EngineMode = "auto"
    """Whether graphs are compiled; auto: where possible."""
    dtype: ComputeDtype = "float32"
    """Type of activations and unquantized weights."""
    kv_cache_dtype: Literal["auto", "bfloat16", "fp8"] = "auto"
    """Type of keys and values that are not quantized; auto: that of dtype; fp8: E4M3 at scale 1."""
    threads: Count | None = None
    """Threads that compute a forward; null: all cores this process may use."""
    prefill_chunk_len: Count | None = None
    """Tokens of a prompt in one forward; null: 64 on a CPU, 256 on a GPU."""
    enable_prefix_caching: bool = True
    """A prompt is computed only from where it differs from what a KV cache holds."""

    @property
    def version(self) -> None:
        """None: the embedded engine is a part of the toolkit."""

    @property
    def tp_size(self) -> int:
        """1, since the embedded engine runs on one device."""
        return 1

    pp_size = world_size = gpus_per_node = tp_size

    @property
    def enable_block_reuse(self) -> bool:
        return self.enable_prefix_caching


class TensorRtLlmConfig(EngineLengths):
    """The keys that both flows of TensorRT-LLM have, under its own names. `toolkit.plan.resolve`
    knows what is possible in which version.
    """

    tensorrt_llm: TensorRtLlmVersion = "1.2.1"
    """Its version, in quotes."""
    tp_size: Count = 1
    """GPUs that share each layer."""
    pp_size: Count = 1
    """GPUs that divide the layers among them."""
    gpus_per_node: Count = 8
    """GPUs of one machine."""
    max_num_tokens: Count | None = None
    """Tokens of one forward, of all requests together; null: 8192, TensorRT-LLM's default."""
    tokens_per_block: Count = 32
    """Tokens in a block of the paged KV cache."""
    free_gpu_memory_fraction: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.9
    """Share of the memory that the weights leave free, for both KV caches."""
    enable_block_reuse: bool = True
    """Keep the KV blocks of earlier prefixes, and use them again."""

    @property
    def version(self) -> str:
        return self.tensorrt_llm

    @property
    def world_size(self) -> int:
        return self.tp_size * self.pp_size

    @property
    def device(self) -> str:
        return "cuda"


class TrtEngineConfig(TensorRtLlmConfig):
    """The engine flow: TRT-LLM checkpoint -> trtllm-build -> rank{N}.engine. TensorRT-LLM 1.2.1 is
    the last version that has it.
    """

    kind: Literal["trt_engine"] = "trt_engine"
    """TensorRT-LLM's engine flow."""
    multiple_profiles: bool = False
    """An option of trtllm-build; not with opt_num_tokens."""
    opt_num_tokens: Count | None = None
    """An option of trtllm-build; not with multiple_profiles."""
    builder: BuilderChoice = "auto"
    """Where trtllm-build runs; auto: here if it is on the PATH, else in its container."""


class TrtllmPytorchConfig(TensorRtLlmConfig):
    """The PyTorch flow: a quantized checkpoint in Hugging Face format, without a compile step."""

    kind: Literal["trtllm_pytorch"] = "trtllm_pytorch"
    """TensorRT-LLM's PyTorch flow."""
    cuda_graph: bool = True
    """Capture CUDA graphs."""
    attn_backend: AttnBackend = "TRTLLM"
    """What computes attention."""
    container_image: Annotated[str, Field(pattern=IMAGE_PATTERN, max_length=255)] | None = None
    """Serves instead of NVIDIA's image of the version, and has this version."""


class VllmConfig(EngineLengths):
    """vLLM, in a Python environment of its own. Keys have vLLM's own names where it has one."""

    kind: Literal["vllm"] = "vllm"
    """vLLM's own server."""
    vllm: VllmVersion = "0.32.0"
    """Its version, in quotes."""
    python: AnyPath | None = None
    """The Python that has vLLM; null: that of .venv-vllm beside this program's own environment."""
    device: Literal["auto", Device] = "auto"
    """Where it computes; auto: a GPU if there is one."""
    dtype: VllmDtype = "auto"
    """Type of activations and unquantized weights; auto: the checkpoint's own."""
    tp_size: Count = 1
    """Devices that share each layer."""
    pp_size: Count = 1
    """Devices that divide the layers among them."""
    gpus_per_node: Count = 8
    """GPUs of one machine."""
    max_num_batched_tokens: Count | None = None
    """Tokens of one forward, of all requests together; null: vLLM's default."""
    gpu_memory_utilization: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.9
    """Share of a GPU's memory for weights, activations and KV caches."""
    kv_cache_gib: Annotated[float, Field(gt=0.0)] = 2.0
    """On a CPU: GiB for the KV caches of both models, in every rank."""
    enable_prefix_caching: bool = True
    """Keep the KV blocks of earlier prefixes, and use them again."""
    correct_sampling: bool = True
    """On a CPU: load our correction of vLLM issue 55005, where the version needs it."""

    @field_validator("python", mode="before")
    @classmethod
    def _python_is_named(cls, python: Any) -> Any:
        if python == "":
            raise ValueError(
                "the path is empty; name the Python of an environment that has vLLM, or remove this"
                " line for the one that make vllm creates"
            )
        return python

    @property
    def version(self) -> str:
        return self.vllm

    @property
    def world_size(self) -> int:
        return self.tp_size * self.pp_size

    @property
    def enable_block_reuse(self) -> bool:
        return self.enable_prefix_caching


def engine_kind(engine: Any) -> Any:
    """The tag of the union: `kind`, or `torch` if there is none."""
    if isinstance(engine, dict):
        return engine.get("kind", "torch")
    return getattr(engine, "kind", "torch")


EngineConfig = Annotated[
    Annotated[TorchEngineConfig, Tag("torch")]
    | Annotated[TrtEngineConfig, Tag("trt_engine")]
    | Annotated[TrtllmPytorchConfig, Tag("trtllm_pytorch")]
    | Annotated[VllmConfig, Tag("vllm")],
    Discriminator(engine_kind),
]


class HardwareConfig(Section):
    """The hardware that serves the deployment."""

    gpu: GpuName = "auto"
    """The GPU that will serve; auto: that of this machine."""
    count: Count | None = None
    """GPUs per node; null: as many as the engine needs."""
    nodes: Count = 1
    """Machines."""


class TritonConfig(Section):
    """The model repository and its server."""

    layout: Literal["auto", Layout] = "auto"
    """llmapi: one model with the tensors of TensorRT-LLM's template; bls: draft and target as
    models of their own."""
    decoupled: bool = True
    """Streaming; false for clients that call `infer`."""
    max_queue_size: Count = 256
    """Requests that may wait; more are refused at once."""
    default_max_tokens: Count = 128
    """Output tokens at most, of a request that states no number."""
    request_timeout_s: Annotated[float, Field(gt=0)] = 120.0
    """Deadline of a request that states none, and the latest that one may state."""
    stream_interval_ms: Annotated[float, Field(ge=0, le=1000)] = 10.0
    """Least time between two chunks of a stream; 0: one chunk per step."""
    backend: Literal["auto", "native", "python"] = "auto"
    """llmapi of kind torch: what runs the model in Triton. native: the toolkit's own backend;
    python: Triton's Python backend; auto: native where there is a C++ compiler."""
    model_py: ModelPy = "ours"
    """llmapi with TensorRT-LLM: whose model.py answers requests in the container."""
    on_draft_failure: Literal["error", "plain"] = "plain"
    """bls: the result of a request if the draft model does not answer."""
    host: str = "127.0.0.1"
    """What the server listens on."""
    http_port: Annotated[int, Field(ge=0, le=65535)] = 0
    """Of Triton's HTTP endpoint; 0: a free port."""
    grpc_port: Annotated[int, Field(ge=0, le=65535)] = 0
    """Of Triton's gRPC endpoint; 0: a free port."""
    metrics_port: Annotated[int, Field(ge=0, le=65535)] = 0
    """Of Triton's metrics; 0: a free port."""
    start_timeout_s: Annotated[float, Field(gt=0)] = 180.0
    """What a server may take to be ready."""

    @field_validator("grpc_port", "metrics_port")
    @classmethod
    def _a_port_is_used_once(cls, port: int, info: ValidationInfo) -> int:
        for name in ("http_port", "grpc_port"):
            if port and port == info.data.get(name):
                raise ValueError(f"{port} is also {name}; choose another port, or 0 for a free one")
        return port

    @property
    def on_free_ports(self) -> TritonConfig:
        """The same section with free ports, so that it does not collide with other servers on this
        machine.
        """
        return self.model_copy(update={"http_port": 0, "grpc_port": 0, "metrics_port": 0})


class ParityGates(Section):
    """Whether speculation writes the texts of plain decoding."""

    max_divergence_rate: Ratio = 0.05
    """Share of prompts that may differ at a near-tie, judged by its upper confidence bound."""
    near_tie_margin: Annotated[float, Field(ge=0.0)] = 0.05
    """In logits. A divergence is numerically equivalent if the reference scores both chosen tokens
    within this of its best token; any other fails."""
    draft_lens: Annotated[tuple[Count, ...], Field(strict=False)] | None = None
    """Draft lengths compared in addition to speculation.max_draft_len. Longer ones are left out.
    null: 1 and half of max_draft_len."""
    source: Literal["auto", "always", "never"] = "auto"
    """Use the unquantized checkpoint in float32 as a second reference; auto: if it takes less than
    half of the free memory."""


class DistributionGates(Section):
    """The test whether sampled tokens come from the target's distribution."""

    enabled: bool = True
    """Whether tokens are drawn and judged."""
    effect: Annotated[float, Field(gt=0.0, lt=0.2)] = 0.05
    """The total variation that must be detected with probability `power`."""
    power: Annotated[float, Field(ge=0.5, lt=1.0)] = 0.99
    """The probability with which `effect` must be detected."""
    false_alarm: Annotated[float, Field(gt=0.0, le=0.05)] = 0.001
    """Probability that a correct deployment fails, over all tests."""
    max_seconds: Annotated[float, Field(gt=0.0)] = 60.0
    """If this time is not enough, fewer tokens are drawn, and the gate is INCONCLUSIVE."""


class QualityGates(Section):
    """The quantized target is compared with its source on held-out text."""

    max_kl: Annotated[float, Field(gt=0.0)] = 0.05
    """Divergence from the source, in nats per token."""
    min_top1_agreement: Ratio | None = None
    """Share of tokens with the same first choice."""


LatencyName = Literal["ttft", "tpot", "itl", "icl", "e2e"]
LatencyPercentile = Literal[
    "ttft_p50", "ttft_p90", "ttft_p99",
    "tpot_p50", "tpot_p90", "tpot_p99",
    "itl_p50", "itl_p90", "itl_p99",
    "icl_p50", "icl_p90", "icl_p99",
    "e2e_p50", "e2e_p90", "e2e_p99",
]  # fmt: skip


class LatencyGates(Section):
    """Times of the closed loop. A limit that is null is not a gate."""

    min_speedup: Annotated[float, Field(gt=0.0)] | None = 1.15
    """Speculative / plain output tokens per second, judged by its bootstrap interval."""
    precision: Annotated[float, Field(gt=0.0)] = 0.15
    """Rounds are added, up to max_rounds, until the interval of the speed-up is this narrow (half
    its width, as a share)."""
    concurrency: tuple[Count, ...] = Field(default=(), strict=False)
    """Both arms are also measured with these numbers of requests at a time, to find where
    speculation stops paying."""
    max_ratios: dict[LatencyPercentile, Annotated[float, Field(gt=0.0)]] = {}
    """Speculative / plain per latency and percentile, such as {ttft_p90: 1.1}."""
    max_ttft_p90_ms: Annotated[float, Field(gt=0.0)] | None = None
    """Time to the first token, of the speculative arm."""
    max_tpot_p90_ms: Annotated[float, Field(gt=0.0)] | None = None
    """Time per output token after the first, of the speculative arm."""
    max_itl_p90_ms: Annotated[float, Field(gt=0.0)] | None = None
    """Gap between chunks per token of the later one, of the speculative arm."""
    max_e2e_p90_ms: Annotated[float, Field(gt=0.0)] | None = None
    """Time to the last token, of the speculative arm."""


class LoadGates(Section):
    """An open loop at a stated rate, by which the deployment is judged beside the closed loop. The
    length follows from the rate: each arm gets the requests that p99 needs.
    """

    rate: Annotated[float, Field(gt=0.0)] | Literal["auto"]
    """Requests per second; auto: the highest rate found at which `min_goodput` of the requests stay
    within `goodput`."""
    arrivals: Literal["poisson", "constant"] = "poisson"
    """When requests are sent."""
    temperature: Annotated[float, Field(ge=0.0, le=2.0)] = 0.0
    """Temperature of its requests."""
    goodput: Annotated[
        dict[LatencyName, Annotated[float, Field(gt=0.0)]], Field(validate_default=True)
    ] = {}
    """Limits of one request, latency -> ms, such as {ttft: 300}; needed for rate auto."""
    min_goodput: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.95
    """Share of the requests that has to keep all limits of `goodput`."""
    max_ttft_p99_ms: Annotated[float, Field(gt=0.0)] | None = None
    """Time to the first token, of the deployed arm."""
    max_tpot_p99_ms: Annotated[float, Field(gt=0.0)] | None = None
    """Time per output token after the first, of the deployed arm."""
    max_itl_p99_ms: Annotated[float, Field(gt=0.0)] | None = None
    """Gap between chunks per token of the later one, of the deployed arm."""
    max_e2e_p99_ms: Annotated[float, Field(gt=0.0)] | None = None
    """Time to the last token, of the deployed arm."""
    max_errors: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    """Share of the requests that may fail."""
    max_seconds: Annotated[float, Field(gt=0.0)] = 600.0
    """Sending at the judged rate takes at most this long, all arms and rounds together."""
    search_seconds: Annotated[float, Field(gt=0.0)] = 180.0
    """Sending while `auto` looks for the rate takes at most this long."""

    @field_validator("goodput")
    @classmethod
    def _auto_has_limits(cls, goodput: dict[str, float], info: ValidationInfo) -> dict[str, float]:
        if info.data.get("rate") == "auto" and not goodput:
            raise ValueError(
                "rate auto looks for the highest rate that keeps these limits, and there are none;"
                " add some, such as goodput: {ttft: 300, tpot: 30}, or state a rate"
            )
        return goodput

    @field_validator("min_goodput")
    @classmethod
    def _share_has_limits(cls, min_goodput: float, info: ValidationInfo) -> float:
        if info.data.get("goodput") == {}:
            raise ValueError(
                "min_goodput is the share of requests that keep the limits of goodput, and there"
                " are none; add some, such as goodput: {ttft: 300, tpot: 30}, or remove this line"
            )
        return min_goodput


class ValidationConfig(Section):
    """How the served deployment is judged."""

    prompts: AnyPath
    """Raw text or conversations, in the forms of docs/chat.md; not from the calibration text."""
    max_prompts: Count = 64
    """The first lines of the file are used. With fewer than 59 no rate can be bounded by 0.05."""
    max_tokens: Count = 64
    """Output tokens per request."""
    temperature: Annotated[float, Field(gt=0.0, le=2.0)] = 0.8
    """Temperature of the sampled runs; greedy runs are always made, too."""
    rounds: Count = 3
    """The least number of interleaved plain and speculative passes."""
    max_rounds: Annotated[Count, Field(validate_default=True)] = 8
    """Rounds are added up to this number while the interval contains the gate."""
    seed: int = 0
    """Seed of the seeded requests and of the bootstrap."""
    parity: ParityGates = ParityGates()
    distribution: DistributionGates = DistributionGates()
    quality: QualityGates = QualityGates()
    latency: LatencyGates = LatencyGates()
    load: LoadGates | None = None
    """An open loop; null: there is none."""

    @field_validator("max_rounds")
    @classmethod
    def _rounds_are_ordered(cls, max_rounds: int, info: ValidationInfo) -> int:
        rounds = info.data.get("rounds", 0)
        if rounds > max_rounds:
            raise ValueError(
                f"rounds {rounds} is greater than max_rounds {max_rounds}; raise max_rounds"
            )
        return max_rounds


class GatewayConfig(Section):
    """OpenAI's protocol in front of the served deployment. API keys come from the environment,
    never from the YAML.
    """

    host: str = "127.0.0.1"
    """What it listens on."""
    port: Annotated[int, Field(ge=0, le=65535)] = 0
    """What it listens on; 0: a free port."""
    chat_template: AnyPath | None = None
    """A Jinja file; null: the template of the target's checkpoint."""
    max_requests: Count = 256
    """Requests at a time; more are told to come again."""
    requests_per_minute: Count | None = None
    """Requests of one API key, or of all where there are none; null: no limit."""
    max_body_bytes: Count = 1 << 20
    """The largest body of a request."""
    request_timeout_s: Annotated[float, Field(gt=0)] = 300.0
    """The gateway's own limit of a request; the server's deadline comes first."""
    stop_timeout_s: Annotated[int, Field(ge=0)] = 30
    """After Ctrl-C or SIGTERM, running requests have this time to end."""


class RolloutConfig(Section):
    """A roll-out: a new deployment takes over from an old one, or from plain decoding. The limits
    say how much worse the new one may be.
    """

    steps: Annotated[tuple[Annotated[int, Field(ge=0, le=100)], ...], Field(strict=False)] = (
        1,
        5,
        25,
        50,
        100,
    )
    """Percent of the sessions that the new one answers; 0 first: only shadow copies."""
    shadow: Annotated[int, Field(ge=0, le=100, validate_default=True)] = 10
    """Percent of the greedy requests to the old one that the new one answers, too, unseen."""
    min_requests: Count = 100
    """Answered sessions of the new one, or copies at step 0, before the next step; and requests
    that each test has judged."""
    false_alarm: Annotated[float, Field(gt=0.0, le=0.2)] = 0.01
    """Probability that an equal deployment is rolled back, over the whole roll-out."""
    max_slowdown: Annotated[float, Field(ge=1.0, le=10.0)] = 1.1
    """How many times as long its times may be."""
    max_acceptance_loss: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.1
    """How much lower its acceptance may be, as a share of the old one's."""
    min_acceptance_rate: Annotated[float, Field(gt=0.0, lt=1.0)] | None = None
    """Its acceptance rate may not be below this."""
    max_divergence_rate: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.05
    """Share of the copies whose text may differ."""

    @field_validator("steps")
    @classmethod
    def _steps_lead_to_all(cls, steps: tuple[int, ...]) -> tuple[int, ...]:
        if not steps:
            raise ValueError("there are no steps; write percents that rise to 100: [1, 5, 25, 100]")
        for before, after in itertools.pairwise(steps):
            if after <= before:
                raise ValueError(
                    f"{after} comes after {before}; write percents that rise, each one once"
                )
        if steps[-1] != 100:
            raise ValueError(
                f"the last step is {steps[-1]}, so the new deployment would never have all;"
                " write 100 after it"
            )
        return steps

    @field_validator("shadow")
    @classmethod
    def _copies_where_there_is_nothing_else(cls, shadow: int, info: ValidationInfo) -> int:
        if info.data.get("steps", (100,))[0] == 0 and shadow == 0:
            raise ValueError(
                "step 0 has only shadow copies, and there are none; write a shadow of at least 1,"
                " or begin with step 1"
            )
        return shadow


class DeploymentConfig(Section):
    """The YAML of a deployment. docs/configuration.md says more of every key."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=80)]
    """Names the folders of the results."""
    target: ModelConfig
    """The model that is served."""
    draft: ModelConfig | None = None
    """The model or head that drafts; needed for the kinds draft_target and eagle3."""
    calibration: Annotated[CalibrationConfig | None, Field(validate_default=True)] = None
    """The text for quantization; needed when a model is quantized."""
    speculation: Annotated[SpeculationConfig, Field(validate_default=True)] = SpeculationConfig()
    engine: EngineConfig = TorchEngineConfig()
    """What runs the models; `kind` says which."""
    hardware: HardwareConfig = HardwareConfig()
    triton: TritonConfig = TritonConfig()
    gateway: GatewayConfig = GatewayConfig()
    rollout: RolloutConfig = RolloutConfig()
    validation: ValidationConfig

    @property
    def capabilities(self) -> Capabilities:
        """What the engine kind can do when it is served by this Triton layout."""
        engine = self.engine
        return capabilities_of(
            engine.kind,
            engine.version,
            self.triton.layout,
            reuses_prefixes=engine.enable_block_reuse,
            head=self.speculation.head,
        )

    @property
    def models(self) -> dict[Role, ModelConfig]:
        """Role -> model: the target, and the draft if there is one."""
        models: dict[Role, ModelConfig] = {"target": self.target}
        return models if self.draft is None else {**models, "draft": self.draft}

    @property
    def embedded_engine(self) -> TorchEngineConfig | None:
        """The engine section if it is of the embedded engine, else None."""
        return self.engine if isinstance(self.engine, TorchEngineConfig) else None

    @property
    def trtllm_engine(self) -> TensorRtLlmConfig | None:
        """The engine section if it is of TensorRT-LLM, else None."""
        return self.engine if isinstance(self.engine, TensorRtLlmConfig) else None

    @property
    def vllm_engine(self) -> VllmConfig | None:
        """The engine section if it is of vLLM, else None."""
        return self.engine if isinstance(self.engine, VllmConfig) else None

    @property
    def engine_flow(self) -> TrtEngineConfig | None:
        return self.engine if isinstance(self.engine, TrtEngineConfig) else None

    @property
    def pytorch_flow(self) -> TrtllmPytorchConfig | None:
        return self.engine if isinstance(self.engine, TrtllmPytorchConfig) else None

    @field_validator("name")
    @classmethod
    def _name_is_not_a_path(cls, name: str) -> str:
        if ".." in name:
            raise ValueError("must not contain '..'; choose another name, since it names folders")
        return name

    @field_validator("calibration")
    @classmethod
    def _has_calibration_if_needed(
        cls, calibration: CalibrationConfig | None, info: ValidationInfo
    ) -> CalibrationConfig | None:
        models = {role: info.data.get(role) for role in ("target", "draft")}
        quantized = [
            role
            for role, model in models.items()
            if model and model.quantization.quant_algo != "NO_QUANT"
        ]
        if quantized and calibration is None:
            raise ValueError(
                f"quantizing {' and '.join(quantized)} needs a `calibration` section; add one with"
                " a `dataset`"
            )
        return calibration

    @field_validator("speculation")
    @classmethod
    def _speculation_has_its_draft(
        cls, speculation: SpeculationConfig, info: ValidationInfo
    ) -> SpeculationConfig:
        if "draft" not in info.data:  # the draft section has faults, which are reported
            return speculation
        if speculation.has_draft_model and info.data["draft"] is None:
            raise ValueError(
                f"kind {speculation.kind} needs a `draft` section; add one, or set"
                " speculation.kind: none"
            )
        if not speculation.has_draft_model and info.data["draft"] is not None:
            raise ValueError(
                f"kind {speculation.kind} does not use the `draft` section; remove it, or set"
                " speculation.kind: draft_target"
            )
        if speculation.head is not None and _is_quantized(info.data["draft"]):
            raise ValueError(
                f"the head of kind {speculation.kind} keeps its own precision beside a quantized"
                " target; remove draft.quantization"
            )
        return speculation

    @field_validator("validation")
    @classmethod
    def _run_fits_the_engine(
        cls, validation: ValidationConfig, info: ValidationInfo
    ) -> ValidationConfig:
        engine = info.data.get("engine")
        if engine is not None and validation.max_tokens >= engine.max_seq_len:
            raise ValueError(
                f"max_tokens {validation.max_tokens} does not fit engine.max_seq_len"
                f" {engine.max_seq_len}; max_seq_len counts prompt and output together, so lower"
                " max_tokens or raise max_seq_len"
            )
        return validation
