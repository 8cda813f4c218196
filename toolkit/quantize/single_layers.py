"""What each decoder layer alone costs: the source with only that layer quantized, against the
source, on held-out text.

All these models go through the network together, one stream of hidden states each, so that a
layer's weights are read once: in front of layer i there are the source's stream and those of the
layers before it. All pass layer i as it stands in the source, and the source's also passes it
quantized, which is where the stream of layer i begins. That is half the work of one forward for
every layer.

It is computed in float32, a layer at a time: one layer's KL is of the order of what rounding to
BF16 makes of any disturbance.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from toolkit.interfaces import Progress
from toolkit.quantize.modelopt import as_source
from toolkit.quantize.source import Source
from toolkit.records.build import LayerKl

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["measure_single_layers"]

TOGETHER = 4096  # tokens of several streams in one call of a layer
SCORED = 512  # tokens of all streams whose logits are held at a time
ROWS = 16_384  # of the LM head that are held in float32 at a time


def measure_single_layers(
    model: Any, source: Source, batches: list[Tensor], progress: Progress
) -> tuple[LayerKl, ...]:
    """One figure per decoder layer, in the model's order. batches: [1, length] int64 each, with
    two tokens at least.
    """
    import torch

    names = [f"model.layers.{i}" for i in range(len(model.model.layers))]
    with torch.no_grad():
        entered = [_enter(model, batch) for batch in batches]
        streams = [
            hidden for hidden, _ in entered
        ]  # per batch [1 + layers so far, length, width]; the first is the source's
        for i, name in enumerate(names):
            layer, arguments = model.model.layers[i], [each[i] for _, each in entered]
            with _in_float32(layer):
                begun = [
                    _pass(layer, rows[:1], given)
                    for rows, given in zip(streams, arguments, strict=True)
                ]
            with as_source(model, source, name), _in_float32(layer):
                streams = [
                    _pass(layer, rows, given)
                    for rows, given in zip(streams, arguments, strict=True)
                ]
            streams = [torch.cat(pair) for pair in zip(streams, begun, strict=True)]
            progress(i + 1, len(names), "measuring layers")
        with _in_float32(model.model.norm):
            streams = [_pass(model.model.norm, rows, {}) for rows in streams]
        sums = torch.stack([_divergences(model, rows[:, :-1]) for rows in streams]).sum(dim=0)
    tokens = sum(batch.shape[1] - 1 for batch in batches)
    return tuple(LayerKl(name, float(kl) / tokens) for name, kl in zip(names, sums, strict=True))


def _enter(model: Any, batch: Tensor) -> tuple[Tensor, list[dict[str, Any]]]:
    """(hidden states in front of the first layer, what the model hands to each layer beside
    them: positions and masks).
    """
    hidden: list[Tensor] = []
    arguments: list[dict[str, Any]] = []

    def note(_module: Any, inputs: tuple[Tensor, ...], given: dict[str, Any]) -> None:
        hidden.append(inputs[0].float())
        arguments.append({name: _widened(value) for name, value in given.items()})

    handles = [
        layer.register_forward_pre_hook(note, with_kwargs=True) for layer in model.model.layers
    ]
    try:
        model.model(input_ids=batch, use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    return hidden[0], arguments


def _widened(value: Any) -> Any:
    import torch

    if isinstance(value, tuple):
        return tuple(map(_widened, value))
    return value.float() if isinstance(value, torch.Tensor) and value.is_floating_point() else value


@contextlib.contextmanager
def _in_float32(module: Any) -> Iterator[None]:
    """Within, parameters and buffers are float32 copies; the tensors that they were come back as
    they are.
    """
    tensors = [
        *module.parameters(),
        *(buffer for buffer in module.buffers() if buffer.is_floating_point()),
    ]
    narrow = [tensor.data for tensor in tensors]
    try:
        for tensor in tensors:
            tensor.data = tensor.data.float()
        yield
    finally:
        for tensor, data in zip(tensors, narrow, strict=True):
            tensor.data = data


def _pass(module: Any, rows: Tensor, arguments: dict[str, Any]) -> Tensor:
    import torch

    parts = (module(part, **arguments) for part in rows.split(max(1, TOGETHER // rows.shape[1])))  # type: ignore[no-untyped-call]
    return torch.cat([part[0] if isinstance(part, tuple) else part for part in parts])


def _divergences(model: Any, hidden: Tensor) -> Tensor:
    """[streams - 1] float64: the sum over positions of KL(first stream || stream). hidden:
    [streams, positions, width].
    """
    import torch

    sums = torch.zeros(len(hidden) - 1, dtype=torch.float64)
    for part in hidden.split(max(1, SCORED // len(hidden)), dim=1):  # type: ignore[no-untyped-call]
        logits = [part @ rows.float().T for rows in model.lm_head.weight.split(ROWS)]
        scores = torch.log_softmax(torch.cat(logits, dim=-1), dim=-1)  # [streams, positions, vocab]
        kl = (scores[0].exp() * (scores[0] - scores[1:])).sum(dim=-1)
        sums += kl.clamp_min(0.0).double().sum(dim=-1)
    return sums
