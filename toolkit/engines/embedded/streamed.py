"""Run texts through a model that need not fit into memory: one layer at a time, all texts through
each layer.

The texts are known beforehand (teacher forcing), so nothing is generated and a single pass over the
checkpoint's files gives the logits at every place of every text. Between two layers only the hidden
states of the texts are kept. The arithmetic is that of the eager engine (`model.py`), on the same
tensors and in the same order.

The hidden states after each layer may be saved, so that a killed pass goes on at the layer that it
had reached.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F

from toolkit.checkpoints.quantized import Checkpoint, open_checkpoint
from toolkit.engines.embedded.engine import (
    allocate_caches,
    exact_products,
    groups_of,
    prepare_weight,
)
from toolkit.engines.embedded.model import (
    Layer,
    Linear,
    Native,
    Ops,
    Step,
    TorchOps,
    build_head,
    build_layer,
    logits_of,
)
from toolkit.engines.embedded.rope import rope_tables
from toolkit.engines.embedded.weights import fuse_layer, fuse_outside
from toolkit.interfaces import Progress
from toolkit.pipeline.hashing import digest_value
from toolkit.pipeline.memory import freed_blocks_returned
from toolkit.words import ComputeDtype, Device

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

__all__ = ["CHUNK_TOKENS", "StreamedTexts", "stream_texts"]

# Tokens of a text in one call of a layer. More would read the layer from memory less often, and
# take more for the scores of attention.
CHUNK_TOKENS = 256
LOGIT_TOKENS = 64  # tokens whose logits are held at a time


class StreamedTexts:
    """Texts that have passed all layers of a model. Their logits are computed when asked for."""

    def __init__(
        self, hidden: dict[tuple[int, ...], Tensor], norm: Tensor, head: Linear, eps: float
    ) -> None:
        """hidden: the last layer's output [1, tokens, width] of each text."""
        self._hidden, self._norm, self._head, self._eps = hidden, norm, head, eps

    def logits(self, text: Sequence[int], first: int) -> Iterator[NDArray[Any]]:
        """Yield the logits after token `first` of the text and after every later one, in chunks
        [n, vocab] in float32. Raises KeyError for a text that was not streamed.
        """
        hidden = self._hidden[tuple(text)][0, first:]
        for part in hidden.split(LOGIT_TOKENS):  # type: ignore[no-untyped-call]
            with torch.inference_mode():
                there = part.to(self._norm.device)
                logits = logits_of(there, self._norm, self._head, self._eps, TorchOps())
            yield logits.cpu().numpy()


@freed_blocks_returned()
def stream_texts(
    checkpoint_dir: Path,
    texts: Sequence[tuple[int, ...]],
    *,
    dtype: ComputeDtype,
    device: Device = "cpu",
    state: Path | None = None,
    progress: Progress,
    what: str,
) -> StreamedTexts:
    """Run the texts through the checkpoint, in Hugging Face format, quantized or not.

    texts: token ids; none is empty. device: where a layer is put while it computes. state: the file
    that keeps the hidden states; a killed run over the same texts has left it there. It belongs to
    this one checkpoint, and the caller removes it. what: names the pass to `progress`. Raises
    CheckpointError if the files are damaged.
    """
    checkpoint = open_checkpoint(checkpoint_dir)
    shape, compute, place = checkpoint.shape, getattr(torch, dtype), torch.device(device)
    texts = list(dict.fromkeys(texts))
    longest = max(map(len, texts))
    made_with = digest_value({"texts": texts, "dtype": dtype, "device": device})
    outside = fuse_outside(checkpoint)
    cos, sin = (table.to(place) for table in rope_tables(shape, longest))
    is_fp8 = checkpoint.quantization.kv_cache_quant_algo == "FP8"
    cache_dtype = torch.float8_e4m3fn if is_fp8 else compute
    (cache,) = allocate_caches(replace(shape, num_layers=1), 1, longest, cache_dtype, place)
    native = exact_products(device)
    ops = TorchOps(native)
    with torch.inference_mode():
        first, hidden = _load_state(state, made_with)
        if first:
            progress(first, shape.num_layers, f"{what}: going on after a killed run; layers before")
        else:
            embed = outside["embed.weight"]
            hidden = [F.embedding(torch.tensor([text]), embed).to(compute) for text in texts]
        for i in range(first, shape.num_layers):
            layer = _load_layer(checkpoint, i, compute, place, native)
            for number, states in enumerate(hidden):
                hidden[number] = _through(layer, states.to(place), cache, cos, sin, ops).cpu()
                done = i * len(texts) + number + 1
                progress(done, shape.num_layers * len(texts), f"{what}: layers x texts")
            del layer
            _save_state(state, made_with, i + 1, hidden)
        norm = outside["norm.weight"].to(compute).to(place)
        head = build_head(
            shape,
            {
                name: prepare_weight(name, tensor, compute, Native()).to(place)
                for name, tensor in outside.items()
                if shape.tie_word_embeddings or name.startswith("lm_head")
            },
        )
    return StreamedTexts(dict(zip(texts, hidden, strict=True)), norm, head, shape.rms_norm_eps)


def _load_layer(
    checkpoint: Checkpoint, i: int, dtype: torch.dtype, place: torch.device, native: Native
) -> Layer:
    fused = fuse_layer(checkpoint, i)
    prepared = {}
    for name in list(fused):  # a tensor at a time, so that a layer is not held twice
        tensor = prepare_weight(name, fused.pop(name), dtype, native)
        prepared[name] = tensor.to(place)
    return build_layer(checkpoint.shape, prepared, i)


def _through(
    layer: Layer, hidden: Tensor, cache: tuple[Tensor, Tensor], cos: Tensor, sin: Tensor, ops: Ops
) -> Tensor:
    """The layer's output [1, tokens, width]. What the cache holds of the text before does not
    matter: a place is written before it is read.
    """
    first = np.zeros(1, dtype=np.int64)
    zero = torch.zeros(1, dtype=torch.int64, device=hidden.device)
    parts = []
    for start in range(0, hidden.shape[1], CHUNK_TOKENS):
        part = hidden[:, start : start + CHUNK_TOKENS]
        groups = groups_of(first, first + start, first, part.shape[1], cos, sin)
        step = Step(zero, zero + start, zero, cos, sin, groups)
        parts.append(ops.layers(part, (layer,), (cache,), step))
    return torch.cat(parts, dim=1)


def _load_state(file: Path | None, made_with: str) -> tuple[int, list[Tensor]]:
    """(layers that are done, their output per text); (0, []) if the file is missing, damaged, or
    about other texts.
    """
    from safetensors import SafetensorError, safe_open

    if file is None or not file.is_file():
        return 0, []
    try:
        with safe_open(file, framework="pt") as saved:
            metadata = saved.metadata()
            if metadata.get("made_with") != made_with:
                return 0, []
            count = len(saved.keys())
            # Copied, since the file is replaced while these are in use.
            hidden = [saved.get_tensor(str(number)).clone() for number in range(count)]
            return int(metadata["layers"]), hidden
    except (SafetensorError, OSError, KeyError, ValueError):
        return 0, []


def _save_state(file: Path | None, made_with: str, layers: int, hidden: Sequence[Tensor]) -> None:
    """Replace the file as a whole, so that a kill leaves the old or the new one."""
    from safetensors.torch import save_file

    if file is None:
        return
    file.parent.mkdir(parents=True, exist_ok=True)
    unfinished = file.with_suffix(".unfinished")
    metadata = {"made_with": made_with, "layers": str(layers)}
    save_file({str(number): states for number, states in enumerate(hidden)}, unfinished, metadata)
    unfinished.replace(file)
