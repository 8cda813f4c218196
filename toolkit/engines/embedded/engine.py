"""One model that runs step by step: its slots, their lengths, and a `Runner` that runs `decode`.

The engine has the KV caches and one length per slot. A forward appends tokens, a rewind forgets
them. The runner is plain torch here, and a compiled package in `package.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from toolkit.checkpoints import quantized
from toolkit.checkpoints.shape import ModelShape
from toolkit.engines.embedded.model import Ops, TorchOps, Weights, build, decode
from toolkit.engines.embedded.rope import rope_tables
from toolkit.engines.embedded.weights import fuse
from toolkit.words import ComputeDtype, Device

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "PREFILL_TOKENS",
    "EmbeddedEngine",
    "Runner",
    "allocate_caches",
    "eager_engine",
    "eager_runner",
    "open_checkpoint",
    "prepare_weight",
]

PREFILL_TOKENS = 64  # max tokens per sequence in one forward; a longer prompt comes in chunks
MAX_INDICES = 256  # index tensors that are kept
Runner = Callable[["Tensor", "Tensor", "Tensor", "Tensor"], "Tensor"]
"""(tokens [b, n], slots [b], lengths [b], columns [c]), all int64 -> logits [b, c, vocab] at
those columns of the tokens."""


class EmbeddedEngine:
    """Implements StepEngine. Not thread-safe."""

    def __init__(
        self,
        run: Runner,
        *,
        vocab_size: int,
        max_batch_size: int,
        max_seq_len: int,
        max_step_tokens: int,
        capacity: int,
        device: torch.device | None = None,
    ) -> None:
        self._run = run
        self._capacity = capacity
        self._device = device or torch.device("cpu")
        self._on_cpu = self._device.type == "cpu"
        self._lengths = [0] * max_batch_size
        # The few index tensors that every step needs again.
        self._indices: dict[tuple[int, ...], Tensor] = {}
        self.vocab_size = vocab_size
        self.max_batch_size = max_batch_size
        self.max_seq_len = max_seq_len
        self.max_step_tokens = max_step_tokens

    def forward(self, slots: Sequence[int], tokens: Tensor, *, last_only: bool = False) -> Tensor:
        """See StepEngine.forward. Raises ValueError for tokens or slots that do not fit."""
        n = tokens.shape[1]
        slots = list(slots)
        if not 0 < n <= self.max_step_tokens:
            raise ValueError(
                f"{n} tokens per sequence; this engine takes 1 to {self.max_step_tokens} in one"
                " forward"
            )
        if tokens.shape[0] != len(slots) or len(set(slots)) != len(slots):
            raise ValueError(
                f"{tokens.shape[0]} rows of tokens for slots {slots}; one distinct slot per row is"
                " needed"
            )
        try:
            lengths = [self._lengths[slot] for slot in slots]
        except IndexError:
            raise ValueError(
                f"slots {slots} are not all in this engine, which has {self.max_batch_size} slots"
            ) from None
        if max(lengths) + n > self._capacity or min(slots) < 0:
            raise ValueError(
                f"{n} tokens after {max(lengths)} do not fit max_seq_len {self.max_seq_len}"
            )
        columns = self._index((n - 1,) if last_only else tuple(range(n)))
        starts = torch.from_numpy(np.array(lengths))  # takes a fourth of torch.tensor's time
        with torch.inference_mode():
            if not self._on_cpu:
                tokens, starts = tokens.to(self._device), starts.to(self._device)
            logits = self._run(tokens, self._index(tuple(slots)), starts, columns)
        for slot in slots:
            self._lengths[slot] += n
        return logits

    def _index(self, values: tuple[int, ...]) -> Tensor:
        """The values as a tensor. It is kept, since making a tensor takes longer than a lookup."""
        index = self._indices.get(values)
        if index is None:
            if len(self._indices) >= MAX_INDICES:
                self._indices.clear()
            index = self._indices[values] = torch.tensor(values, device=self._device)
        return index

    def rewind(self, slots: Sequence[int], lengths: Sequence[int]) -> None:
        for slot, length in zip(slots, lengths, strict=True):
            if not 0 <= length <= self._lengths[slot]:
                raise ValueError(
                    f"slot {slot} holds {self._lengths[slot]} tokens and cannot be rewound to"
                    f" {length}"
                )
            self._lengths[slot] = length

    def length(self, slot: int) -> int:
        return self._lengths[slot]


def open_checkpoint(
    path: Path,
    *,
    dtype: ComputeDtype = "float32",
    max_batch_size: int = 8,
    max_seq_len: int = 1024,
    max_step_tokens: int = PREFILL_TOKENS,
    device: Device = "cpu",
) -> EmbeddedEngine:
    """Open a Hugging Face checkpoint, plain or quantized, as an eager engine; nothing is compiled.
    Raises CheckpointError.
    """
    checkpoint = quantized.open_checkpoint(path)
    return eager_engine(
        checkpoint.shape,
        fuse(checkpoint),
        fp8_kv=checkpoint.quantization.kv_cache_quant_algo == "FP8",
        dtype=dtype,
        max_batch_size=max_batch_size,
        max_seq_len=max_seq_len,
        max_step_tokens=max_step_tokens,
        device=device,
    )


def eager_engine(
    shape: ModelShape,
    tensors: dict[str, Tensor],
    *,
    fp8_kv: bool,
    dtype: ComputeDtype,
    max_batch_size: int,
    max_seq_len: int,
    max_step_tokens: int = PREFILL_TOKENS,
    device: Device = "cpu",
    native_fp8: bool = False,
) -> EmbeddedEngine:
    """An engine that runs fused tensors (see weights.py) in plain torch on `device`."""
    compute, place = getattr(torch, dtype), torch.device(device)
    capacity = max_seq_len + max_step_tokens
    prepared = {
        name: prepare_weight(name, tensor, compute, native_fp8).to(place)
        for name, tensor in tensors.items()
    }
    cos, sin = rope_tables(shape, capacity)
    weights = build(shape, prepared, (cos.to(place), sin.to(place)))
    caches = allocate_caches(
        shape, max_batch_size, capacity, torch.float8_e4m3fn if fp8_kv else compute, place
    )
    run = eager_runner(weights, TorchOps(native_fp8=native_fp8), caches, compute)
    return EmbeddedEngine(
        run,
        vocab_size=shape.vocab_size,
        max_batch_size=max_batch_size,
        max_seq_len=max_seq_len,
        max_step_tokens=max_step_tokens,
        capacity=capacity,
        device=place,
    )


def eager_runner(
    weights: Weights, ops: Ops, caches: list[tuple[Tensor, Tensor]], dtype: torch.dtype
) -> Runner:
    """A runner that calls `decode` with these ops on these caches."""

    def run(tokens: Tensor, slots: Tensor, lengths: Tensor, columns: Tensor) -> Tensor:
        return decode(weights, ops, tokens, slots, lengths, columns, caches, dtype)

    return run


def allocate_caches(
    shape: ModelShape,
    slots: int,
    capacity: int,
    dtype: torch.dtype,
    device: torch.device | None = None,
) -> list[tuple[Tensor, Tensor]]:
    """Zeroed (k, v) per layer, each [slots, kv_heads, capacity, head_dim]."""
    size = (slots, shape.num_kv_heads, capacity, shape.head_dim)
    return [
        (
            torch.zeros(size, dtype=dtype, device=device),
            torch.zeros(size, dtype=dtype, device=device),
        )
        for _ in range(shape.num_layers)
    ]


def prepare_weight(name: str, tensor: Tensor, dtype: torch.dtype, native_fp8: bool) -> Tensor:
    """The tensor in the dtype in which it is computed: plain weights in the engine's dtype, INT8
    codes unchanged, FP8 codes as floats (which is exact) unless the device computes in FP8.
    """
    if tensor.dtype == torch.int8 or name.endswith("scale"):
        return tensor
    if tensor.dtype != torch.float8_e4m3fn:
        return tensor.to(dtype)
    if native_fp8:
        return tensor
    return tensor.to(torch.float64 if dtype == torch.float64 else torch.float32)
