"""Open a source checkpoint and find everything that is wrong with it, before time is spent on it.

Headers are compared with the config first. Then every tensor is read once, to find NaN, infinity,
absurd values, and tied embeddings that differ. A checkpoint that ModelOpt has already quantized is
recognised; one that another tool has quantized is refused.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from toolkit.checkpoints.quantized import read_quantization
from toolkit.checkpoints.reader import (
    TensorInfo,
    check_against_shape,
    expected_shapes,
    read_index,
    read_tensor,
    read_tensors,
)
from toolkit.checkpoints.shape import ModelShape, read_shape
from toolkit.errors import CheckpointError
from toolkit.interfaces import Progress
from toolkit.words import KvCacheQuantAlgo, QuantAlgo

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "VOCABULARY",
    "Source",
    "check_values",
    "check_weights",
    "open_source",
    "read_source",
]

FLOAT_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
TIED_NAMES = ("lm_head.weight", "model.embed_tokens.weight")
# No weight of a trained model comes near this magnitude; one flipped exponent bit exceeds it.
MAX_MAGNITUDE = 1e8
VALUES_AT_A_TIME = 1 << 20
VOCABULARY = ("model.embed_tokens.weight", "lm_head.weight")  # one row per token


@dataclass(frozen=True, slots=True)
class Source:
    """A checkpoint whose headers and config agree.

    dtype: the dtype of most unquantized weights, as torch names it.
    quant_algo: set if the checkpoint is already quantized, in ModelOpt's unified format.
    shape.vocab_size may be smaller than the number of rows in the files. The other rows are
    padding and are left out of everything that is made from this source.
    """

    path: Path
    shape: ModelShape
    tensors: dict[str, TensorInfo]
    dtype: str
    quant_algo: QuantAlgo | None
    kv_cache_quant_algo: KvCacheQuantAlgo | None

    @property
    def is_quantized(self) -> bool:
        return self.quant_algo is not None or self.kv_cache_quant_algo is not None

    @property
    def is_trimmed(self) -> bool:
        return self.tensors[VOCABULARY[0]].shape[0] != self.shape.vocab_size


def open_source(directory: Path, vocab_size: int | None = None) -> Source:
    """Read headers and config. Raises CheckpointError, also for everything that `read_shape`,
    `read_index` and `check_against_shape` refuse.

    vocab_size: the number of rows of embedding and LM head to keep, as pairing decided; None keeps
    all.
    """
    tensors = read_index(directory)
    shape = read_shape(directory)
    check_against_shape(tensors, shape, directory)
    stated = read_quantization(directory)
    quant_algo, kv_cache_quant_algo = stated.quant_algo, stated.kv_cache_quant_algo
    embedding = tensors["model.embed_tokens.weight"]
    if embedding.dtype not in FLOAT_DTYPES:
        raise CheckpointError(
            f"{embedding.name} is {embedding.dtype}",
            where=embedding.file,
            hint=f"supported: {', '.join(FLOAT_DTYPES)}",
        )
    if quant_algo is None:
        for name in expected_shapes(shape):
            if tensors[name].dtype not in FLOAT_DTYPES:
                raise CheckpointError(
                    f"{name} is {tensors[name].dtype}, but nothing in config.json says that the"
                    " checkpoint is quantized",
                    where=tensors[name].file,
                    hint=(
                        f"supported: {', '.join(FLOAT_DTYPES)}, or ModelOpt's unified format with"
                        " its hf_quant_config.json"
                    ),
                )
    if vocab_size is not None:
        if vocab_size > shape.vocab_size:
            raise CheckpointError(
                f"has {shape.vocab_size} rows (vocab_size), but {vocab_size} are wanted",
                where=directory,
            )
        shape = replace(shape, vocab_size=vocab_size)
    stored = embedding.dtype if quant_algo is not None else _prevailing_dtype(tensors, shape)
    dtype = FLOAT_DTYPES[stored]
    return Source(directory, shape, tensors, dtype, quant_algo, kv_cache_quant_algo)


def _prevailing_dtype(tensors: dict[str, TensorInfo], shape: ModelShape) -> str:
    """The dtype of most weights. If a few wider tensors (an embedding in F32) decided, all others
    would be widened, and so be copied from their files into memory.
    """
    counts: Counter[str] = Counter()
    for name in expected_shapes(shape):
        counts[tensors[name].dtype] += math.prod(tensors[name].shape)
    return counts.most_common(1)[0][0]


def read_source(source: Source, name: str) -> Tensor:
    """One tensor, memory-mapped, without padding rows."""
    tensor = read_tensor(source.tensors[name])
    return tensor[: source.shape.vocab_size] if name in VOCABULARY else tensor


def check_weights(source: Source, progress: Progress) -> None:
    """Read every tensor once, memory-mapped. Raises CheckpointError that names the tensor and its
    fault.
    """
    tied: list[Tensor] = []
    for done, (name, tensor) in enumerate(read_tensors(source.path), start=1):
        check_values(tensor, source.tensors[name])
        if source.shape.tie_word_embeddings and name in TIED_NAMES:
            tied.append(tensor)
        progress(done, len(source.tensors), "checking weights, tensors")
    if len(tied) == len(TIED_NAMES) and not tied[0].equal(tied[1]):
        raise CheckpointError(
            f"config.json ties the embeddings, but {' and '.join(TIED_NAMES)} differ",
            where=source.path,
            hint=(
                "if the model was trained with untied embeddings, set tie_word_embeddings: false in"
                " config.json; otherwise remove the LM head"
            ),
        )


def check_values(tensor: Tensor, info: TensorInfo) -> None:
    """Raise CheckpointError that names the tensor if its values cannot be a trained model's."""
    fault = _fault_of(tensor) if tensor.is_floating_point() else None
    if fault is not None:
        raise CheckpointError(f"{info.name} holds {fault}", where=info.file, hint=_FETCH_AGAIN)


def _fault_of(tensor: Tensor) -> str | None:
    """What is wrong with the values of a float tensor, or None. The tensor is read in parts, so
    that widening to float32 takes little memory.
    """
    import torch

    not_finite, largest = 0, 0.0
    flat = tensor.reshape(-1)
    for start in range(0, len(flat), VALUES_AT_A_TIME):
        values = flat[start : start + VALUES_AT_A_TIME].float()
        low, high = (float(value) for value in torch.aminmax(values))
        if not (math.isfinite(low) and math.isfinite(high)):
            not_finite += int((~torch.isfinite(values)).sum())
        largest = max(largest, -low, high)
    if not_finite:
        return f"{not_finite} values that are NaN or infinite"
    if largest > MAX_MAGNITUDE:
        return f"a value of magnitude {largest:.3g}; a bit of the file has flipped"
    return None


_FETCH_AGAIN = "fetch this shard again, or check the model where it was trained"
