"""How TensorRT-LLM's engines read temperature, top_k and top_p: the rule of the `bls` layout, for
the BLS model and the embedded engine alike. `llmapi` has another rule
(`toolkit.triton.tensors.requests`).

NVIDIA's clients send temperature 1.0 when nothing is asked of them, and expect greedy text.

Sources: a top_p of 0 or less counts as absent (getSamplingConfigFromTensors in TRT
triton_backend/inflight_batcher_llm/src/utils.cc). With top_k 0 and top_p 0, the defaults, decoding
is greedy, and with top_k alone top_p is 1 (regularizeTopKTopP of TRT's sampling kernels).
"""

from __future__ import annotations

__all__ = ["read_sampling"]


def read_sampling(temperature: float, top_k: int, top_p: float) -> tuple[float, float]:
    """(temperature, top_p) as `toolkit.interfaces.Sampling` means them. A top_k or top_p of 0 is
    absent. Without both, or with top_k 1, the result is greedy at any temperature.
    """
    is_greedy = top_k == 1 or (top_k == 0 and top_p <= 0.0)
    return (0.0 if is_greedy else temperature), (top_p if top_p > 0.0 else 1.0)
