"""Measure the cost of each decoder layer on its own: quantize only that layer, and compare the
model with its source on held-out text.

There is one such model per layer. All of them go through the network together, each as one stream
of hidden states, so that the weights of a layer are read only once. The input of layer i is the
stream of the source and the streams of the layers before i. All of them pass layer i unquantized.
The stream of the source also passes layer i quantized, and that begins the stream of layer i. This
is half the work of one forward per layer.

It is computed in float32, a layer at a time: rounding to BF16 would change the result by about as
much as the KL of one layer.
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

TOKENS_PER_CALL = 4096  # tokens of all streams in one call of a layer
LOGIT_TOKENS = 512  # tokens of all streams whose logits are held at a time
LM_HEAD_ROWS = 16_384  # rows of the LM head that are held in float32 at a time


def measure_single_layers(
    model: Any, source: Source, batches: list[Tensor], progress: Progress
) -> tuple[LayerKl, ...]:
    """The mean KL of each decoder layer, in the model's order. batches: [1, length] int64 each,
    with at least two tokens.
    """
    import torch

    names = [f"model.layers.{i}" for i in range(len(model.model.layers))]
    with torch.no_grad():
        entered = [_enter(model, batch) for batch in batches]
        # Per batch [1 + layers so far, length, width]; the first is the stream of the source.
        streams = [hidden for hidden, _ in entered]
        for i, name in enumerate(names):
            layer = model.model.layers[i]
            arguments = [by_layer[i] for _, by_layer in entered]
            with _in_float32(layer):
                new_streams = [
                    _pass(layer, rows[:1], batch_arguments)
                    for rows, batch_arguments in zip(streams, arguments, strict=True)
                ]
            with as_source(model, source, name), _in_float32(layer):
                streams = [
                    _pass(layer, rows, batch_arguments)
                    for rows, batch_arguments in zip(streams, arguments, strict=True)
                ]
            streams = [torch.cat(pair) for pair in zip(streams, new_streams, strict=True)]
            progress(i + 1, len(names), "measuring layers")
        with _in_float32(model.model.norm):
            streams = [_pass(model.model.norm, rows, {}) for rows in streams]
        sums = torch.stack([_divergences(model, rows[:, :-1]) for rows in streams]).sum(dim=0)
    tokens = sum(batch.shape[1] - 1 for batch in batches)
    return tuple(LayerKl(name, float(kl) / tokens) for name, kl in zip(names, sums, strict=True))


def _enter(model: Any, batch: Tensor) -> tuple[Tensor, list[dict[str, Any]]]:
    """Return the input of the first layer, and for each layer the arguments that the model passes
    beside the hidden states: positions and masks.
    """
    hidden: list[Tensor] = []
    arguments: list[dict[str, Any]] = []

    def record(_module: Any, inputs: tuple[Tensor, ...], kwargs: dict[str, Any]) -> None:
        hidden.append(inputs[0].float())
        arguments.append({name: _widened(value) for name, value in kwargs.items()})

    handles = [
        layer.register_forward_pre_hook(record, with_kwargs=True) for layer in model.model.layers
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
    """Within, parameters and buffers are float32 copies. Afterwards the original tensors are back,
    unchanged.
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

    rows_per_call = max(1, TOKENS_PER_CALL // rows.shape[1])
    parts = (module(part, **arguments) for part in rows.split(rows_per_call))  # type: ignore[no-untyped-call]
    return torch.cat([part[0] if isinstance(part, tuple) else part for part in parts])


def _divergences(model: Any, hidden: Tensor) -> Tensor:
    """[streams - 1] float64: the sum over positions of KL(first stream || stream). hidden:
    [streams, positions, width].
    """
    import torch

    sums = torch.zeros(len(hidden) - 1, dtype=torch.float64)
    for part in hidden.split(max(1, LOGIT_TOKENS // len(hidden)), dim=1):  # type: ignore[no-untyped-call]
        logits = [part @ rows.float().T for rows in model.lm_head.weight.split(LM_HEAD_ROWS)]
        scores = torch.log_softmax(torch.cat(logits, dim=-1), dim=-1)  # [streams, positions, vocab]
        kl = (scores[0].exp() * (scores[0] - scores[1:])).sum(dim=-1)
        sums += kl.clamp_min(0.0).double().sum(dim=-1)
    return sums
