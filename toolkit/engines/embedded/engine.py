"""One model that runs step by step: its slots, their lengths, and a `Runner` that runs `decode`.

The engine has the KV caches and one length per slot. A forward appends tokens, a rewind forgets
them. The runner is plain torch here, and a compiled package in `package.py`.

The engine's own numbers are on the host. An eager runner on a GPU copies them there and does not
wait: the caller does, once per forward, when it reads the logits.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from toolkit.checkpoints import quantized
from toolkit.checkpoints.shape import ModelShape
from toolkit.engines.embedded.memory import unused_zeros
from toolkit.engines.embedded.model import (
    CODE_MULTIPLE,
    Group,
    Native,
    Ops,
    Step,
    TorchOps,
    Weights,
    build,
    decode,
)
from toolkit.engines.embedded.rope import rope_tables
from toolkit.engines.embedded.weights import fuse
from toolkit.facts.embedded import PREFILL_TOKENS
from toolkit.words import ComputeDtype, Device, KvDtype

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "EmbeddedEngine",
    "Runner",
    "allocate_caches",
    "eager_engine",
    "eager_runner",
    "exact_products",
    "groups_of",
    "native_products",
    "open_checkpoint",
    "prepare_weight",
]

MAX_INDICES = 256  # index tensors that are kept
# Compute capabilities from which torch has the products. INT8's may begin below; the other kinds of
# engine begin here.
NATIVE_FP8_CAPABILITY, NATIVE_INT8_CAPABILITY = (8, 9), (8, 0)
Runner = Callable[["Tensor", "Tensor", "Tensor", "Tensor", "Tensor"], "Tensor"]
"""(tokens [t], slots [b], lengths [b], starts [b], columns [c]), all int64 on the CPU -> logits [c,
vocab] at those columns of the packed tokens; those of slots[i] begin at starts[i]."""


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
        caches: Sequence[Tensor] = (),
    ) -> None:
        """caches: everything that a forward keeps of its tokens, each [slots, kv_heads, n, any],
        of which an entry is capacity / n positions, so that `copy` can copy it.
        """
        self._run = run
        self._caches = caches
        self._capacity = capacity
        self._lengths = [0] * max_batch_size
        # The few index tensors that every step needs again.
        self._indices: dict[tuple[int, ...], Tensor] = {}
        # (widths, wanted) of steps -> starts and columns
        self._shapes: dict[tuple[tuple[int, ...], tuple[int, ...]], tuple[Tensor, Tensor]] = {}
        self.vocab_size = vocab_size
        self.max_batch_size = max_batch_size
        self.max_seq_len = max_seq_len
        self.max_step_tokens = max_step_tokens

    def forward(self, slots: Sequence[int], tokens: Tensor, *, last_only: bool = False) -> Tensor:
        """See StepEngine.forward. Raises ValueError for tokens or slots that do not fit."""
        batch, n = tokens.shape
        slots = list(slots)
        if batch != len(slots):
            raise ValueError(
                f"{batch} rows of tokens for slots {slots}; one distinct slot per row is needed"
            )
        starts = tuple(range(0, batch * n, max(1, n)))
        columns = tuple(start + n - 1 for start in starts) if last_only else tuple(range(batch * n))
        logits = self._append(
            slots, tokens.reshape(-1), [n] * batch, self._index(starts), self._index(columns)
        )
        return logits.view(batch, -1, self.vocab_size)

    def forward_rows(
        self, slots: Sequence[int], rows: Sequence[Sequence[int]], wanted: Sequence[int]
    ) -> Tensor:
        """See PackingEngine.forward_rows. Raises ValueError for tokens or slots that do not fit."""
        shape = (tuple(map(len, rows)), tuple(wanted))
        # Most steps have the shape of an earlier one, and finding places and columns takes longer.
        places = self._shapes.get(shape)
        if places is None:
            if len(self._shapes) >= MAX_INDICES:
                self._shapes.clear()
            places = self._shapes[shape] = _starts_and_columns(*shape)
        starts, columns = places
        tokens = torch.from_numpy(np.array([token for row in rows for token in row]))
        logits = self._append(list(slots), tokens, shape[0], starts, columns)
        return logits if any(wanted) else logits[:0]

    def _append(
        self,
        slots: list[int],
        tokens: Tensor,
        widths: Sequence[int],
        starts: Tensor,
        columns: Tensor,
    ) -> Tensor:
        """Append packed tokens [t], widths[i] of them to slots[i]. The logits [c, vocab]."""
        places = self._places(slots, widths)
        with torch.inference_mode():
            logits = self._run(tokens, self._index(tuple(slots)), places, starts, columns)
        for slot, width in zip(slots, widths, strict=True):
            self._lengths[slot] += width
        return logits

    def _places(self, slots: list[int], widths: Sequence[int], more: int = 0) -> Tensor:
        """The lengths of the slots [b], after a check that so many tokens fit behind them, and
        `more` that come one by one.
        """
        if not (widths and min(widths) > 0 and max(widths) <= self.max_step_tokens):
            raise ValueError(
                f"{widths} tokens per sequence; this engine takes 1 to {self.max_step_tokens} in"
                " one forward"
            )
        if len(widths) != len(slots) or len(set(slots)) != len(slots):
            raise ValueError(
                f"{len(widths)} rows of tokens for slots {slots}; one distinct slot per row is"
                " needed"
            )
        try:
            lengths = [self._lengths[slot] for slot in slots]
        except IndexError:
            raise ValueError(
                f"slots {slots} are not all in this engine, which has {self.max_batch_size} slots"
            ) from None
        if max(lengths) + max(widths) + more > self._capacity or min(slots) < 0:
            raise ValueError(
                f"{max(widths) + more} tokens after {max(lengths)} do not fit max_seq_len"
                f" {self.max_seq_len}"
            )
        return torch.from_numpy(np.array(lengths))  # takes a fourth of torch.tensor's time

    def _index(self, values: tuple[int, ...]) -> Tensor:
        """The values as a tensor. It is kept, since making a tensor takes longer than a lookup."""
        index = self._indices.get(values)
        if index is None:
            if len(self._indices) >= MAX_INDICES:
                self._indices.clear()
            index = self._indices[values] = torch.tensor(values, dtype=torch.int64)
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

    def copy(self, source: int, slot: int, length: int) -> None:
        """See CopyingEngine.copy. Raises ValueError if there are not so many tokens."""
        if not 0 <= length <= self._lengths[source]:
            raise ValueError(
                f"slot {source} holds {self._lengths[source]} tokens; {length} of them cannot be"
                " copied"
            )
        if source == slot:
            raise ValueError(f"slot {slot} cannot be copied to itself")
        with torch.inference_mode():
            for cache in self._caches:
                entries = -(-length * cache.shape[2] // self._capacity)
                cache[slot, :, :entries] = cache[source, :, :entries]
        self._lengths[slot] = length


def _starts_and_columns(widths: Sequence[int], wanted: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Of packed rows: where each begins, and the columns of their last `wanted` tokens. A forward
    has at least one column of logits: the last one, if none is wanted.
    """
    ends = list(itertools.accumulate(widths))
    starts = [end - width for end, width in zip(ends, widths, strict=True)]
    columns = [
        column
        for end, count in zip(ends, wanted, strict=True)
        for column in range(end - count, end)
    ]
    return torch.tensor(starts), torch.tensor(columns or [ends[-1] - 1])


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
        kv_dtype="fp8" if checkpoint.quantization.kv_cache_quant_algo == "FP8" else dtype,
        dtype=dtype,
        max_batch_size=max_batch_size,
        max_seq_len=max_seq_len,
        max_step_tokens=max_step_tokens,
        device=device,
        native=exact_products(device),
    )


def eager_engine(
    shape: ModelShape,
    tensors: dict[str, Tensor],
    *,
    kv_dtype: KvDtype,
    dtype: ComputeDtype,
    max_batch_size: int,
    max_seq_len: int,
    max_step_tokens: int = PREFILL_TOKENS,
    device: Device = "cpu",
    native: Native | None = None,
) -> EmbeddedEngine:
    """An engine that runs fused tensors (see weights.py) in plain torch on `device`. native: the
    products of codes that the device computes; None for none.
    """
    compute, place = getattr(torch, dtype), torch.device(device)
    capacity = max_seq_len + max_step_tokens
    native = native or Native()
    prepared = {
        name: prepare_weight(name, tensor, compute, native).to(place)
        for name, tensor in tensors.items()
    }
    cos, sin = rope_tables(shape, capacity)
    weights = build(shape, prepared, (cos.to(place), sin.to(place)))
    kept = torch.float8_e4m3fn if kv_dtype == "fp8" else getattr(torch, kv_dtype)
    caches = allocate_caches(shape, max_batch_size, capacity, kept, place)
    run = eager_runner(weights, TorchOps(native), caches, compute)
    return EmbeddedEngine(
        run,
        vocab_size=shape.vocab_size,
        max_batch_size=max_batch_size,
        max_seq_len=max_seq_len,
        max_step_tokens=max_step_tokens,
        capacity=capacity,
        caches=[cache for layer in caches for cache in layer],
    )


def eager_runner(
    weights: Weights, ops: Ops, caches: list[tuple[Tensor, Tensor]], dtype: torch.dtype
) -> Runner:
    """A runner that calls `decode` with these ops on these caches."""
    device = weights.cos.device

    def run(
        tokens: Tensor, slots: Tensor, lengths: Tensor, starts: Tensor, columns: Tensor
    ) -> Tensor:
        groups = groups_of(
            slots.numpy(), lengths.numpy(), starts.numpy(), len(tokens), weights.cos, weights.sin
        )
        tokens, columns = (part.to(device, non_blocking=True) for part in (tokens, columns))
        step = Step(slots, lengths, starts, weights.cos, weights.sin, groups)
        return decode(weights, ops, tokens, step, columns, caches, dtype)

    return run


def groups_of(
    slots: NDArray[Any],
    lengths: NDArray[Any],
    starts: NDArray[Any],
    tokens: int,
    cos: Tensor,
    sin: Tensor,
) -> tuple[Group, ...]:
    """The sequences of a step, those that bring as many tokens together. Slots, lengths and starts
    [batch] are those of `Step`; the tensors of the groups are on the device of cos and sin.
    """
    widths = np.diff(starts, append=tokens)

    def group(width: int) -> Group:
        members = np.flatnonzero(widths == width)
        new, mine = np.arange(width), slots[members]
        place = lengths[members, None] + new
        packed = None
        if len(members) < len(slots):
            packed = _sent((starts[members, None] + new).reshape(-1), cos.device)
        is_consecutive = bool((np.diff(mine) == 1).all())
        sent = _sent(place, cos.device)
        return Group(
            slots=_sent(mine, cos.device),
            place=sent,
            cos=cos[sent],
            sin=sin[sent],
            tokens=packed,
            reach=int(place.max()) + 1,
            is_even=bool((place == place[0]).all()),
            first_slot=int(mine[0]) if is_consecutive else None,
        )

    return tuple(group(int(width)) for width in np.unique(widths))


def _sent(values: NDArray[Any], device: torch.device) -> Tensor:
    """The values on the device. The host does not wait until they are there."""
    return torch.from_numpy(values).to(device, non_blocking=True)


def allocate_caches(
    shape: ModelShape,
    slots: int,
    capacity: int,
    dtype: torch.dtype,
    device: torch.device | None = None,
) -> list[tuple[Tensor, Tensor]]:
    """Zeroed (k, v) per layer, each [slots, kv_heads, capacity, head_dim]."""
    size = (slots, shape.num_kv_heads, capacity, shape.head_dim)

    def cache() -> Tensor:
        if device is None or device.type == "cpu":
            return unused_zeros(size, dtype)
        return torch.zeros(size, dtype=dtype, device=device)

    return [(cache(), cache()) for _ in range(shape.num_layers)]


def native_products(device: Device) -> Native:
    """The products of codes that torch has on the device, as far as it is known here."""
    if device != "cuda" or not torch.cuda.is_available():
        return Native()
    capability = torch.cuda.get_device_capability()
    return Native(
        fp8=capability >= NATIVE_FP8_CAPABILITY, int8=capability >= NATIVE_INT8_CAPABILITY
    )


def exact_products(device: Device) -> Native:
    """Those whose results are the same as in floats: INT8's. FP8's are rounded in another order."""
    return Native(int8=native_products(device).int8)


def prepare_weight(name: str, tensor: Tensor, dtype: torch.dtype, native: Native) -> Tensor:
    """The tensor in the dtype in which it is computed: plain weights in the engine's dtype, INT8
    codes unchanged, FP8 codes as floats (which is exact) unless the device computes in FP8. Codes
    that the device multiplies itself are padded with zeros as it demands.
    """
    if name.endswith("scale"):
        return tensor
    is_int8, is_fp8 = tensor.dtype == torch.int8, tensor.dtype == torch.float8_e4m3fn
    if is_int8 or (is_fp8 and native.fp8):
        is_native = native.int8 if is_int8 else native.fp8
        rows, columns = tensor.shape
        if not is_native or (rows % CODE_MULTIPLE == 0 and columns % CODE_MULTIPLE == 0):
            return tensor
        return F.pad(tensor, (0, -columns % CODE_MULTIPLE, 0, -rows % CODE_MULTIPLE))
    if not is_fp8:
        return tensor.to(dtype)
    return tensor.to(torch.float64 if dtype == torch.float64 else torch.float32)
