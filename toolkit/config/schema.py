"""What a deployment YAML may say: frozen pydantic models that refuse unknown keys.

Field names are TensorRT-LLM's own wherever it has one. Cross-field rules stand on the smallest model that sees both fields, and
raise ValueError with a text that ends in the mend. Positions in the file are added by `toolkit.config.load`.
Paths stay as written here; `load` resolves them against the folder of the YAML.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

__all__ = [
    "CalibrationConfig",
    "DeploymentConfig",
    "LatencyGates",
    "ModelConfig",
    "ParityGates",
    "QualityGates",
    "QuantizationConfig",
    "SpeculationConfig",
    "TorchEngineConfig",
    "TritonConfig",
    "ValidationConfig",
]

QuantAlgo = Literal["FP8", "W8A8_SQ_PER_CHANNEL", "W8A16", "NO_QUANT"]
Count = Annotated[int, Field(ge=1)]
Ratio = Annotated[float, Field(ge=0.0, le=1.0)]


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class QuantizationConfig(Section):
    """quant_algo: FP8 | W8A8_SQ_PER_CHANNEL (INT8 SmoothQuant) | W8A16 (INT8 weight-only) | NO_QUANT."""

    quant_algo: QuantAlgo = "NO_QUANT"
    kv_cache_quant_algo: Literal["FP8"] | None = None

    @model_validator(mode="after")
    def _fp8_cache_goes_with_fp8_weights(self) -> QuantizationConfig:
        # Under other weights TensorRT-LLM's builder switches paged context FMHA off in silence, and speculation needs it.
        if self.kv_cache_quant_algo == "FP8" and self.quant_algo != "FP8":
            raise ValueError(
                f"kv_cache_quant_algo FP8 does not go with quant_algo {self.quant_algo}; "
                "set quant_algo: FP8, or remove kv_cache_quant_algo"
            )
        return self


class ModelConfig(Section):
    """One checkpoint. `checkpoint` is a directory in Hugging Face form; a relative path starts at the YAML's folder."""

    checkpoint: Path
    quantization: QuantizationConfig = QuantizationConfig()


class CalibrationConfig(Section):
    """Text that calibration runs through the models, and text held out from it that quality is measured on.

    Files are JSON Lines with a `text` (or `prompt`) string per line.
    """

    dataset: Path
    heldout: Path | None = None  # None: the last tenth of the dataset is kept apart and not calibrated on
    calib_size: Count = 128
    calib_max_seq_length: Count = 512
    batch_size: Count = 4


class SpeculationConfig(Section):
    kind: Literal["draft_target", "none"] = "draft_target"
    max_draft_len: Annotated[int, Field(ge=1, le=16)] = 4
    acceptance: Literal["auto", "rejection", "coupled", "sample_match"] = "auto"


class TorchEngineConfig(Section):
    """The embedded engine: our runtime over compiled torch graphs."""

    kind: Literal["torch"] = "torch"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    mode: Literal["auto", "compiled", "eager"] = "auto"
    dtype: Literal["float64", "float32", "bfloat16"] = "float32"
    threads: Count | None = None  # None: all cores this process may use
    max_batch_size: Count = 8
    max_input_len: Count = 512
    max_seq_len: Count = 1024

    @model_validator(mode="after")
    def _input_leaves_room_for_output(self) -> TorchEngineConfig:
        if self.max_input_len >= self.max_seq_len:
            raise ValueError(
                f"max_input_len {self.max_input_len} leaves no room for output in max_seq_len {self.max_seq_len}; "
                "max_seq_len counts prompt and output together, so make it larger"
            )
        return self


class TritonConfig(Section):
    layout: Literal["auto", "llmapi"] = "auto"
    decoupled: bool = True
    max_queue_size: Count = 256  # requests beyond this are refused at once
    default_max_tokens: Count = 128
    request_timeout_s: Annotated[float, Field(gt=0)] = 120.0  # deadline of a request that states none
    host: str = "127.0.0.1"
    http_port: Annotated[int, Field(ge=0, le=65535)] = 0  # 0: a free port
    grpc_port: Annotated[int, Field(ge=0, le=65535)] = 0
    metrics_port: Annotated[int, Field(ge=0, le=65535)] = 0
    start_timeout_s: Annotated[float, Field(gt=0)] = 180.0


class ParityGates(Section):
    """max_divergence_rate: of prompts, judged by its upper confidence bound.

    A divergence is a near-tie where the reference scores both chosen tokens within near_tie_margin (logits) of its best one, so
    that its top-1 and top-2 are that close too; any other one fails.
    """

    max_divergence_rate: Ratio = 0.05
    near_tie_margin: Annotated[float, Field(ge=0.0)] = 0.05


class QualityGates(Section):
    """Quantized target against its source on held-out text; KL in nats per token."""

    max_kl: Annotated[float, Field(gt=0.0)] = 0.05
    min_top1_agreement: Ratio | None = None


class LatencyGates(Section):
    """None: not a gate. Speed-up is speculative / plain output tokens per second, judged by its bootstrap interval."""

    min_speedup: Annotated[float, Field(gt=0.0)] | None = 1.15
    max_ttft_p90_ms: Annotated[float, Field(gt=0.0)] | None = None
    max_tpot_p90_ms: Annotated[float, Field(gt=0.0)] | None = None
    max_itl_p90_ms: Annotated[float, Field(gt=0.0)] | None = None
    max_e2e_p90_ms: Annotated[float, Field(gt=0.0)] | None = None


class ValidationConfig(Section):
    """How the served deployment is judged. prompts: JSON Lines with a `prompt` string per line."""

    prompts: Path
    max_prompts: Count = 64  # the first lines of the file; below 59 no rate can be bounded by 0.05
    max_tokens: Count = 64
    temperature: Annotated[float, Field(gt=0.0, le=2.0)] = 0.8  # of the sampled runs; greedy is always run too
    rounds: Count = 3  # interleaved plain/speculative passes at least
    max_rounds: Count = 8  # more rounds are added up to this while the interval straddles the gate
    seed: int = 0
    parity: ParityGates = ParityGates()
    quality: QualityGates = QualityGates()
    latency: LatencyGates = LatencyGates()

    @model_validator(mode="after")
    def _rounds_are_ordered(self) -> ValidationConfig:
        if self.rounds > self.max_rounds:
            raise ValueError(f"rounds {self.rounds} is above max_rounds {self.max_rounds}; raise max_rounds")
        return self


class DeploymentConfig(Section):
    """The whole file."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=80)]
    target: ModelConfig
    draft: ModelConfig | None = None
    calibration: CalibrationConfig | None = None
    speculation: SpeculationConfig = SpeculationConfig()
    engine: TorchEngineConfig = TorchEngineConfig()
    triton: TritonConfig = TritonConfig()
    validation: ValidationConfig

    @field_validator("name")
    @classmethod
    def _name_is_no_path(cls, name: str) -> str:
        if ".." in name:
            raise ValueError("must not contain '..', since folders are named after it")
        return name

    @model_validator(mode="after")
    def _speculation_has_its_draft(self) -> DeploymentConfig:
        if self.speculation.kind == "draft_target" and self.draft is None:
            raise ValueError("speculation.kind draft_target needs a `draft` section; add one, or set speculation.kind: none")
        if self.speculation.kind == "none" and self.draft is not None:
            raise ValueError("speculation.kind none does not use the `draft` section; remove it, or set kind: draft_target")
        return self

    @model_validator(mode="after")
    def _calibration_is_there_where_needed(self) -> DeploymentConfig:
        models = {"target": self.target, "draft": self.draft}
        needing = [name for name, model in models.items() if model and model.quantization.quant_algo != "NO_QUANT"]
        if needing and self.calibration is None:
            raise ValueError(f"quantizing {' and '.join(needing)} needs a `calibration` section with a `dataset`")
        return self

    @model_validator(mode="after")
    def _run_fits_the_engine(self) -> DeploymentConfig:
        if self.validation.max_tokens >= self.engine.max_seq_len:
            raise ValueError(
                f"validation.max_tokens {self.validation.max_tokens} does not fit engine.max_seq_len {self.engine.max_seq_len}"
            )
        return self
