"""Facts per quant_algo: what a checkpoint of it has to contain, and which ModelOpt preset makes it.

The names are TensorRT-LLM's. The name of a preset does not prove what it writes: INT8_DEFAULT_CFG
is exported under the name of SmoothQuant, but without the pre-quant scales. So every fact here is
checked on the exported tensors.
"""

from __future__ import annotations

from dataclasses import dataclass

from toolkit.words import KvCacheQuantAlgo, QuantAlgo

__all__ = ["ALGORITHMS", "Algorithm", "algorithm_of", "presets"]


@dataclass(frozen=True, slots=True)
class Algorithm:
    """One way to quantize the linears of the decoder layers. lm_head, embeddings and norms are
    never quantized.

    weight_dtype: as safetensors spells it.
    max_code: the code that stands for amax, so scale = amax / max_code.
    per_channel: weight_scale has one value per output row; otherwise one value per tensor.
    input_scale: activations have a static scale.
    pre_quant_scale: inputs are first multiplied by a vector, and the weights were divided by it
    (SmoothQuant).
    builder_quantizes: TensorRT-LLM's engine flow makes the codes itself, from float weights. If it
    is given int8 weights, it takes them to be in its own layout already (preprocess_weights and
    weight_only_quantize_dict in tensorrt_llm/models/).
    """

    name: QuantAlgo
    preset: str  # constant of modelopt.torch.quantization
    weight_dtype: str
    max_code: float
    per_channel: bool
    input_scale: bool
    pre_quant_scale: bool
    builder_quantizes: bool = False


ALGORITHMS = {
    algorithm.name: algorithm
    for algorithm in (
        Algorithm(
            "FP8",
            "FP8_DEFAULT_CFG",
            "F8_E4M3",
            448.0,
            per_channel=False,
            input_scale=True,
            pre_quant_scale=False,
        ),
        Algorithm(
            "W8A8_SQ_PER_CHANNEL",
            "INT8_SMOOTHQUANT_CFG",
            "I8",
            127.0,
            per_channel=True,
            input_scale=True,
            pre_quant_scale=True,
        ),
        Algorithm(
            "W8A16",
            "INT8_WEIGHT_ONLY_CFG",
            "I8",
            127.0,
            per_channel=True,
            input_scale=False,
            pre_quant_scale=False,
            builder_quantizes=True,
        ),
    )
}


def algorithm_of(quant_algo: QuantAlgo) -> Algorithm | None:
    """The algorithm of this name, or None for NO_QUANT. Raises KeyError for an unknown name; the
    config schema lets none through.
    """
    return None if quant_algo == "NO_QUANT" else ALGORITHMS[quant_algo]


def presets(algorithm: Algorithm, kv_cache_quant_algo: KvCacheQuantAlgo | None) -> tuple[str, ...]:
    """Names of the constants of modelopt.torch.quantization whose quant_cfg are concatenated."""
    if kv_cache_quant_algo == "FP8":
        return (algorithm.preset, "FP8_KV_CFG")
    return (algorithm.preset,)
