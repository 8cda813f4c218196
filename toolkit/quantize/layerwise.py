"""Calibrate one decoder layer after the other, each with all the text.

While ModelOpt observes, nothing is quantized. So what the quantizers of a layer see depends on the
layers before it, and not on the order of the work: the result is that of whole forwards, bit for
bit. In this order a layer crosses to a GPU once and not once per batch, and a run that was killed
goes on at the layer that it had reached (`toolkit.quantize.resume`).

The price is disk space for the hidden states before and after a layer: 2 x tokens x hidden size in
the model's dtype; 34 GB for 70B with 512 texts of 2,048 tokens. It is free again after the last
layer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from toolkit.interfaces import Progress
from toolkit.quantize.modelopt import observe_again, observed_by
from toolkit.quantize.resume import HASHING_THREADS, ResumeState, digest_of_values
from toolkit.quantize.streaming import Moves, moved, visiting

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["forward_loop"]

Arguments = dict[tuple[int, int], list[dict[str, Any]]]
"""(n, length) of a batch -> for each layer, what the model passes it beside the hidden states."""


def forward_loop(
    batches: Sequence[Tensor], state: ResumeState, moves: Moves, progress: Progress
) -> Callable[[Any], None]:
    """The function that ModelOpt calls to run the calibration text through the model. It does not
    compute logits, since nothing observes them.

    batches: [n, length] int64 each. state: what an earlier run has finished, and where this one
    keeps what it finishes. moves: to the device that computes, and back.
    """
    import torch

    def loop(model: Any) -> None:
        layers = model.model.layers
        first = state.finished_layers
        for i in range(first):
            observe_again(layers[i], state.observed(i))
        if first:
            progress(first, len(layers), "going on after a killed run; layers calibrated before")
        with torch.no_grad():
            if first < len(layers):
                arguments = _arguments(model, batches)
                if first == 0:
                    _embed(model, batches, state)
                for i in range(first, len(layers)):
                    _calibrate(layers, i, arguments, state, moves, progress)
            state.finish_calibration()

    return loop


def _arguments(model: Any, batches: Sequence[Tensor]) -> Arguments:
    """What the model passes to its layers: positions and masks. Without padding, these are the same
    for all batches of one shape.

    The model is run with layers that do nothing, so this takes no time.
    """
    arguments: Arguments = {}
    layers = model.model.layers

    def skip(hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        recorded.append(kwargs)
        return hidden

    try:
        for layer in layers:
            layer.forward = skip
        for batch in batches:
            shape = (batch.shape[0], batch.shape[1])
            if shape not in arguments:
                recorded: list[dict[str, Any]] = []
                model.model(input_ids=batch, use_cache=False)
                arguments[shape] = recorded
    finally:
        for layer in layers:
            del layer.forward
    return arguments


def _embed(model: Any, batches: Sequence[Tensor], state: ResumeState) -> None:
    for hidden, batch in zip(state.hidden_states(0).batches, batches, strict=True):
        hidden.copy_(model.model.embed_tokens(batch))


def _calibrate(
    layers: Any,
    number: int,
    arguments: Arguments,
    state: ResumeState,
    moves: Moves,
    progress: Progress,
) -> None:
    """Run all batches through one layer, and keep its output and what its quantizers observed."""
    layer = layers[number]
    inputs, outputs = state.hidden_states(number).batches, state.hidden_states(number + 1).batches
    total = len(layers) * len(inputs)
    digests: list[Future[str]] = []
    with ThreadPoolExecutor(HASHING_THREADS) as pool:
        with visiting(layer, moves):
            for done, (hidden, output) in enumerate(zip(inputs, outputs, strict=True), start=1):
                given = arguments[(hidden.shape[0], hidden.shape[1])][number]
                result = layer(moves.there(hidden), **moved(given, moves.there))
                output.copy_(result[0] if isinstance(result, tuple) else result)
                digests.append(pool.submit(digest_of_values, output))
                progress(number * len(inputs) + done, total, "calibrating, batches x layers")
        state.finish_layer(number, observed_by(layer), digests)
