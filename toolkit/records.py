"""The records that stages hand on: values and paths, no behaviour. One file, since together they are the contract.

Every record is frozen, is written as JSON beside what it describes, and is read back equal. `path` always points at the folder
that holds the content; it is not part of any digest. Digests are "sha256:<hex>" over content.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

__all__ = [
    "CompiledEngine",
    "Finding",
    "LayerError",
    "PairProof",
    "QuantizationQuality",
    "QuantizedCheckpoint",
    "TritonRepository",
    "from_json",
    "to_json",
]

R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was checked. severity: ok | warning | error."""

    check: str
    severity: str
    detail: str


@dataclass(frozen=True, slots=True)
class PairProof:
    """Both checkpoints were read, and their tokenizers and vocabularies are the same by content."""

    target_digest: str  # content digest of the source checkpoint
    draft_digest: str | None
    tokenizer_digest: str
    vocab_size: int
    findings: tuple[Finding, ...]


@dataclass(frozen=True, slots=True)
class LayerError:
    """Relative Frobenius error of one linear's output (quantized against source) on the held-out text."""

    layer: str
    relative_error: float


@dataclass(frozen=True, slots=True)
class QuantizationQuality:
    """The quantized model against its source, teacher-forced on held-out text, measured before any export.

    kl_mean: mean over tokens of KL(source || quantized) in nats; kl_p99 its 99th percentile; top1_agreement the share of tokens
    with the same argmax; perplexities are exp of the mean negative log-likelihood of the text's own next tokens.
    """

    tokens: int
    kl_mean: float
    kl_p99: float
    top1_agreement: float
    source_perplexity: float
    quantized_perplexity: float
    layers: tuple[LayerError, ...]


@dataclass(frozen=True, slots=True)
class QuantizedCheckpoint:
    """A unified HF checkpoint with tokenizer files. quant_algo None: not quantized."""

    role: str  # target | draft
    path: Path
    quant_algo: str | None
    kv_cache_quant_algo: str | None
    architecture: str
    vocab_size: int
    weight_bytes: int
    quality: QuantizationQuality | None  # None: nothing was quantized here
    checks: tuple[Finding, ...]


@dataclass(frozen=True, slots=True)
class CompiledEngine:
    """An engine directory: config.json in TensorRT-LLM's shape, weights, and compiled packages where there are any."""

    role: str
    path: Path
    kind: str  # torch
    mode: str  # compiled | eager
    dtype: str
    device: str
    quant_algo: str | None
    kv_cache_quant_algo: str | None
    fp8_compute: str | None  # native | dequantized; None without FP8
    max_batch_size: int
    max_input_len: int
    max_seq_len: int
    max_draft_len: int
    vocab_size: int
    weight_bytes: int
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class TritonRepository:
    """A model repository that `tritonserver --model-repository PATH` loads as it is."""

    path: Path
    layout: str  # llmapi
    model: str  # the model that clients call
    decoupled: bool
    max_draft_len: int


def to_json(record: object) -> Any:
    """A record as plain JSON values; paths become strings, tuples lists."""
    if dataclasses.is_dataclass(record) and not isinstance(record, type):
        return {f.name: to_json(getattr(record, f.name)) for f in dataclasses.fields(record)}
    if isinstance(record, Path):
        return str(record)
    if isinstance(record, (list, tuple)):
        return [to_json(item) for item in record]
    if isinstance(record, dict):
        return {str(key): to_json(value) for key, value in record.items()}
    return record


def from_json(kind: type[R], data: Any) -> R:
    """The inverse of to_json, driven by the field annotations. Raises ValueError on unknown or missing fields."""
    return typing.cast(R, _decode(kind, data))


def _decode(kind: Any, data: Any) -> Any:
    origin = typing.get_origin(kind)
    arguments = typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        if data is None and type(None) in arguments:
            return None
        present = [argument for argument in arguments if argument is not type(None)]
        return _decode(present[0], data)
    if origin is tuple:
        if len(arguments) == 2 and arguments[1] is Ellipsis:
            return tuple(_decode(arguments[0], item) for item in data)
        return tuple(_decode(argument, item) for argument, item in zip(arguments, data, strict=True))
    if origin is dict:
        return {key: _decode(arguments[1], value) for key, value in data.items()}
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        hints = typing.get_type_hints(kind)
        unknown = set(data) - set(hints)
        missing = {f.name for f in dataclasses.fields(kind) if f.default is dataclasses.MISSING} - set(data)
        if unknown or missing:
            raise ValueError(f"{kind.__name__}: unknown fields {sorted(unknown)}, missing fields {sorted(missing)}")
        return kind(**{name: _decode(hints[name], value) for name, value in data.items()})
    if kind is Path:
        return Path(data)
    if kind is float and data is not None:
        return float(data)
    return data
