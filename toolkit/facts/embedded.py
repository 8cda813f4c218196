"""How the embedded engine holds a model on a CPU: what its package compiles and what the plan
counts.
"""

from __future__ import annotations

__all__ = ["BLOCK", "PREFILL_TOKENS", "slot_tokens"]

BLOCK = 64  # rows of a packed block of weights, and the step in which caches grow
PREFILL_TOKENS = 64  # max tokens per sequence in one forward; a longer prompt comes in chunks


def slot_tokens(max_seq_len: int, max_step_tokens: int = PREFILL_TOKENS) -> int:
    """The positions of a slot's cache. A last step may be padded past max_seq_len."""
    return -(-(max_seq_len + max_step_tokens) // BLOCK) * BLOCK
