"""The records that the stages up to `package` hand on: pair, checkpoints, engines, repository."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from toolkit.records.measured import Finding
from toolkit.words import (
    ActivationScales,
    Device,
    EngineKind,
    Fp8Compute,
    Head,
    KvCacheQuantAlgo,
    KvDtype,
    QuantAlgo,
    Role,
    RunMode,
    ServedLayout,
)

__all__ = [
    "CompiledEngine",
    "HeadProof",
    "LayerCounts",
    "LayerError",
    "LayerKl",
    "LeftOut",
    "PairProof",
    "Quality",
    "QuantizationQuality",
    "QuantizedCheckpoint",
    "StageCost",
    "TensorRtLlmBuild",
    "TritonRepository",
    "TrtllmForm",
    "VllmFormat",
]


@dataclass(frozen=True, slots=True)
class HeadProof:
    """Proof that a head on the target's hidden states was read and fits the target.

    captured_layers: the number of the target's layers that have run where each hidden state is
    taken. draft_vocab_size: the ids that the head can draft. shares: the target's tables that it
    uses, since its files have none of their own.
    """

    kind: Head
    captured_layers: tuple[int, ...]
    draft_vocab_size: int
    shares: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class PairProof:
    """Proof that both checkpoints were read and have the same tokenizer and vocabulary by content.

    vocab_size: rows of embedding and LM head with which both are built. target_vocab_size and
    draft_vocab_size: the rows of the sources; those above vocab_size are padding. head: set if the
    draft is a head; draft_vocab_size then counts the ids that go in.
    """

    target_digest: str  # content digest of the source checkpoint
    draft_digest: str | None
    tokenizer_digest: str
    vocab_size: int
    target_vocab_size: int
    draft_vocab_size: int | None
    findings: tuple[Finding, ...]
    head: HeadProof | None = None


@dataclass(frozen=True, slots=True)
class LayerError:
    """Relative Frobenius error of one linear layer's output (quantized against source) on the
    held-out text.
    """

    layer: str
    relative_error: float


@dataclass(frozen=True, slots=True)
class LayerKl:
    """The cost of quantizing one decoder layer alone: mean over tokens of KL(source || source with
    this layer quantized), in nats.
    """

    layer: str  # model.layers.N
    kl: float


@dataclass(frozen=True, slots=True)
class QuantizationQuality:
    """The quantized model compared with its source, teacher-forced on held-out text, before any
    export.

    kl_mean: mean over tokens of KL(source || quantized) in nats; kl_p99: its 99th percentile.
    top1_agreement: the share of tokens with the same argmax. Perplexities are exp of the mean
    negative log-likelihood of the text's own next tokens. layer_kl is measured over the first
    layer_kl_tokens tokens. The intervals (95 %) draw whole texts: tokens of one text are alike.
    """

    tokens: int
    kl_mean: float
    kl_p99: float
    top1_agreement: float
    source_perplexity: float
    quantized_perplexity: float
    layers: tuple[LayerError, ...]
    layer_kl: tuple[LayerKl, ...]
    layer_kl_tokens: int
    texts: int
    kl_interval: tuple[float, float]
    top1_interval: tuple[float, float]


@dataclass(frozen=True, slots=True)
class TrtllmForm:
    """The same checkpoint as `trtllm-build` reads it: config.json and rank{N}.safetensors."""

    path: Path
    tp_size: int
    pp_size: int


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A linear whose inputs are not smoothed in vLLM's format, and why."""

    layer: str
    reason: str


@dataclass(frozen=True, slots=True)
class VllmFormat:
    """The same model as vLLM reads INT8 W8A8: in compressed-tensors format, from the same
    calibration.

    The format has no place for a smoothing vector, so smoothing is folded into the tensors before
    each linear. folded: the linears where that is exact. left_out: the others; they are quantized
    without smoothing. quality: of these codes, which are not those of the unified format.
    """

    path: Path
    weight_bytes: int
    activations: ActivationScales
    folded: tuple[str, ...]
    left_out: tuple[LeftOut, ...]
    quality: QuantizationQuality


@dataclass(frozen=True, slots=True)
class QuantizedCheckpoint:
    """A unified HF checkpoint with tokenizer files. quant_algo None: not quantized. trtllm None:
    that form was not made. vllm None: vLLM reads the unified format itself.
    """

    role: Role
    path: Path
    quant_algo: QuantAlgo | None
    kv_cache_quant_algo: KvCacheQuantAlgo | None
    architecture: str
    vocab_size: int
    weight_bytes: int
    quality: QuantizationQuality | None  # None: nothing was quantized here
    checks: tuple[Finding, ...]
    trtllm: TrtllmForm | None = None
    vllm: VllmFormat | None = None

    @property
    def served_quality(self) -> QuantizationQuality | None:
        """The quality of the codes that clients are served with."""
        return self.quality if self.vllm is None else self.vllm.quality


@dataclass(frozen=True, slots=True)
class LayerCounts:
    """What TensorRT's own inspector reports about a deserialized engine. fused: layers made of
    several layers. plugins: counts by name.
    """

    layers: int
    fused: int
    plugins: dict[str, int]
    # Data type of a layer's first output -> layers; empty if the engine keeps names only.
    precisions: dict[str, int]


@dataclass(frozen=True, slots=True)
class TensorRtLlmBuild:
    """How an engine for TensorRT-LLM was built, and how much of it was tried on a GPU.

    executed and not_executed say in words what ran on a GPU of this machine and what did not.
    """

    version: str  # the TensorRT-LLM version that the engine is for
    builder: str  # local: PATH | container: IMAGE | none
    command: tuple[str, ...]  # empty without a build
    tp_size: int
    pp_size: int
    max_num_tokens: int | None
    checks: tuple[Finding, ...]
    executed: tuple[str, ...]
    not_executed: tuple[str, ...]
    layers: LayerCounts | None = None


@dataclass(frozen=True, slots=True)
class CompiledEngine:
    """An engine directory: config.json in TensorRT-LLM's layout, weights, and compiled packages if
    there are any.

    Of kind trtllm_pytorch: a checkpoint in Hugging Face form with `llm_args.json` beside it.
    """

    role: Role
    path: Path
    kind: EngineKind
    mode: RunMode
    dtype: str
    device: Device
    quant_algo: QuantAlgo | None
    kv_cache_quant_algo: KvCacheQuantAlgo | None
    fp8_compute: Fp8Compute | None  # None without FP8
    max_batch_size: int
    max_input_len: int
    max_seq_len: int
    max_draft_len: int
    vocab_size: int
    weight_bytes: int
    notes: tuple[str, ...]
    tensorrt_llm: TensorRtLlmBuild | None = None  # None: of kind torch
    kv_dtype: KvDtype | None = None  # None: not of kind torch, whose engine decides

    @property
    def has_fp8_kv_at_1(self) -> bool:
        """Whether keys and values are FP8 by the engine's choice: no figure of a checkpoint's
        quality has that in it.
        """
        return self.kv_dtype == "fp8" and self.kv_cache_quant_algo is None


@dataclass(frozen=True, slots=True)
class TritonRepository:
    """A model repository that `tritonserver --model-repository PATH` loads as it is."""

    path: Path
    layout: ServedLayout
    model: str  # the model that clients call
    decoupled: bool
    max_draft_len: int


@dataclass(frozen=True, slots=True)
class Quality:
    """The quality that quantization cost. None: the model was not quantized here, or there is no
    draft.
    """

    target: QuantizationQuality | None
    draft: QuantizationQuality | None


@dataclass(frozen=True, slots=True)
class StageCost:
    """The time and memory that one stage took, from its manifest. reused: this build took its
    result from the store, and the figures are those of the run that made it.
    """

    stage: str
    seconds: float
    peak_memory_bytes: int | None
    reused: bool
