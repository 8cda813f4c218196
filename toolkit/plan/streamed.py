"""Estimate a streamed pass: a model of which one layer is in memory at a time reads texts once.

Memory and bytes are counted; rates of disk and processor are assumed, so seconds are an order of
magnitude.
"""

from __future__ import annotations

from dataclasses import dataclass

from toolkit.checkpoints.shape import ModelShape, linear_params
from toolkit.plan.memory import DTYPE_BYTES, LIBRARY_BYTES, weight_bytes
from toolkit.plan.predict import DISK_BYTES_PER_S
from toolkit.words import Device, QuantAlgo

__all__ = ["StreamedPass", "streamed_bytes", "streamed_pass"]

# Assumed: products of large matrices on one core with AVX2 or wider, in float32 or BF16.
CORE_FLOPS_PER_S = 50e9
GPU_FLOPS_PER_S = 20e12  # assumed: float32 on an A100, which has the least of those in `facts/gpus`
# Bytes of a weight while its layer computes. Codes are multiplied as floats whose sums are exact or
# nearly so (`engines/embedded/model.py`); BF16 would round them before they are scaled.
HELD_BYTES = {"FP8": 4, "W8A8_SQ_PER_CHANNEL": 1, "W8A16": 1}
# Bytes of a weight of the linear at work, beside its layer: INT8 codes are widened call by call.
WIDENED_BYTES = {"W8A8_SQ_PER_CHANNEL": 8, "W8A16": 4}
FLOAT64_SLOWDOWN = 2.0  # of the W8A8 products, which are exact in float64


@dataclass(frozen=True, slots=True)
class StreamedPass:
    """What one pass takes: bytes of weights read from the disk, floating-point operations, and
    seconds of both one after the other.
    """

    bytes_read: int
    flops: float
    seconds: float


def streamed_bytes(shape: ModelShape, quant_algo: QuantAlgo, dtype: str) -> int:
    """The memory of a pass without its texts: the libraries, one layer as it computes, the widest
    linear that is fused or widened beside it, and the LM head. dtype: of what is not quantized.
    """
    width = DTYPE_BYTES[dtype]
    layer = linear_params(shape) * HELD_BYTES.get(quant_algo, width)
    widest = 2 * shape.hidden_size * shape.intermediate_size
    head = shape.vocab_size * shape.hidden_size * width
    return LIBRARY_BYTES + layer + widest * WIDENED_BYTES.get(quant_algo, width) + head


def streamed_pass(
    shape: ModelShape, quant_algo: QuantAlgo, *, tokens: int, device: Device, cores: int
) -> StreamedPass:
    """What a pass over texts of so many tokens takes on the device; cores: of the processor."""
    num_bytes = weight_bytes(shape, quant_algo)
    weights = shape.num_layers * linear_params(shape) + shape.vocab_size * shape.hidden_size
    flops = 2.0 * weights * tokens
    slowdown = FLOAT64_SLOWDOWN if quant_algo == "W8A8_SQ_PER_CHANNEL" else 1.0
    rate = GPU_FLOPS_PER_S if device == "cuda" else cores * CORE_FLOPS_PER_S
    computing = slowdown * flops / rate
    return StreamedPass(num_bytes, flops, num_bytes / DISK_BYTES_PER_S + computing)
