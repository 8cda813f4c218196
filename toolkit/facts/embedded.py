"""How the embedded engine holds a model: what its package compiles and what the plan counts; and
which models gain from a GPU.
"""

from __future__ import annotations

from toolkit.words import Device, QuantAlgo, Role

__all__ = [
    "BLOCK",
    "LAUNCHES_PER_LAYER",
    "PREFILL_TOKENS",
    "gains_from_gpu",
    "has_int8_head",
    "prefill_tokens",
    "slot_tokens",
]

BLOCK = 64  # rows of a packed block of weights, and the step in which caches grow
PREFILL_TOKENS = 64  # max tokens per sequence in one forward; a longer prompt comes in chunks
# On a GPU, where a forward of few tokens costs as much as one of many.
GPU_PREFILL_TOKENS = 256
# On a GPU the engine is plain torch, which launches up to so many operations for a layer and a
# token (tests/engines/test_cuda.py counts them). Assumed, never measured: what a launch takes, and
# how fast a CPU reads weights.
LAUNCHES_PER_LAYER = 120
LAUNCH_S = 5e-6
CPU_BYTES_PER_S = 40e9


def prefill_tokens(device: Device) -> int:
    """The tokens of a prompt in one forward, unless the YAML says so."""
    return PREFILL_TOKENS if device == "cpu" else GPU_PREFILL_TOKENS


def gains_from_gpu(layer_weights: int, quant_algo: QuantAlgo) -> bool:
    """Whether a CPU takes longer to read the weights of a layer's linears than it takes to launch
    the layer on a GPU: from 24 MB on. A smaller model decodes more slowly on the GPU.
    """
    num_bytes = layer_weights * (2 if quant_algo == "NO_QUANT" else 1)
    return num_bytes / CPU_BYTES_PER_S > LAUNCHES_PER_LAYER * LAUNCH_S


def has_int8_head(role: Role, quant_algo: QuantAlgo | None) -> bool:
    """Whether a compiled engine rounds its LM head to INT8, which ModelOpt leaves as it is. A
    draft only proposes, so the target's distribution does not depend on it, and the head is much
    of what a small model reads per token.
    """
    return role == "draft" and quant_algo in ("W8A8_SQ_PER_CHANNEL", "W8A16")


def slot_tokens(max_seq_len: int, max_step_tokens: int = PREFILL_TOKENS) -> int:
    """The positions of a slot's cache. A last step may be padded past max_seq_len."""
    return -(-(max_seq_len + max_step_tokens) // BLOCK) * BLOCK
