"""Compute on a GPU that the model does not fit into: move one decoder layer at a time to the GPU.

Between two forwards all weights are on the host, mapped from files, so that code that reads or
rewrites them then need not know about the GPU. A forward needs GPU memory for one layer and for the
activations of one batch. Embedding and LM head stay on the host: the first is a look-up, the second
a small part of the work.

The price of a whole forward is that all layers cross the bus once per batch. Calibration, which
sees the most text, goes layer by layer instead (`toolkit.quantize.layerwise`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from toolkit.words import Device

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Move", "Moves", "computing_on", "moved", "moves_to", "streamed", "visiting"]

Move = Callable[[Any], Any]


@dataclass(frozen=True, slots=True)
class Moves:
    """How a tensor gets to the device that computes, and back to the host."""

    there: Move
    back: Move


def moves_to(device: Device) -> Moves:
    """The moves for "cuda", or those for "cpu", which leave a tensor where it is."""
    if device == "cpu":
        return Moves(_stay, _stay)
    return Moves(lambda tensor: tensor.to(device), lambda tensor: tensor.cpu())


def _stay(tensor: Tensor) -> Tensor:
    return tensor


def moved(value: Any, move: Move) -> Any:
    """The tensors of nested mappings and tuples, moved; anything else stays as it is."""
    import torch

    if isinstance(value, dict):
        return {name: moved(item, move) for name, item in value.items()}
    if isinstance(value, tuple):
        return tuple(moved(item, move) for item in value)
    return move(value) if isinstance(value, torch.Tensor) else value


@contextlib.contextmanager
def visiting(module: Any, moves: Moves) -> Iterator[None]:
    """Within, the module is on the device. What it is called with has to be there as well."""
    visit = _Visit(module, moves.there, moves.back)
    visit.arrive()
    try:
        yield
    finally:
        visit.leave()


def computing_on(model: Any, device: Device) -> contextlib.AbstractContextManager[None]:
    """Within, `model.model(...)` computes on `device` ("cpu" | "cuda"). Its arguments and results
    stay on the host.
    """
    if device == "cpu":
        return contextlib.nullcontext()
    moves = moves_to(device)
    return streamed(model, moves.there, moves.back)


@contextlib.contextmanager
def streamed(model: Any, to_device: Move, to_host: Move) -> Iterator[None]:
    """Within, `to_device` moves each layer before it runs, and `to_host` moves the statistics that
    it has gathered back afterwards.
    """
    body = model.model
    handles = [
        body.embed_tokens.register_forward_hook(lambda module, inputs, output: to_device(output)),
        body.norm.register_forward_hook(lambda module, inputs, output: to_host(output)),
    ]
    for module in (*body.layers, body.norm):
        visit = _Visit(module, to_device, to_host)
        handles.append(module.register_forward_pre_hook(visit.before_forward))
        handles.append(module.register_forward_hook(visit.after_forward, prepend=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class _Visit:
    """Move one module to the device, and back to the host.

    Afterwards the parameters hold their original tensors again; nothing is copied back. Buffers and
    the statistics of ModelOpt's calibrators may change in a forward, so they are copied back.
    """

    def __init__(self, module: Any, to_device: Move, to_host: Move) -> None:
        self._module = module
        self._to_device = to_device
        self._to_host = to_host
        self._host_data: list[tuple[Any, Tensor]] = []

    def before_forward(self, module: Any, inputs: Any) -> None:
        self.arrive()

    def after_forward(self, module: Any, inputs: Any, output: Any) -> None:
        self.leave()

    def arrive(self) -> None:
        self._host_data = [(parameter, parameter.data) for parameter in self._module.parameters()]
        for parameter, data in self._host_data:
            parameter.data = self._to_device(data)
        self._move_buffers(self._to_device)

    def leave(self) -> None:
        for parameter, data in self._host_data:
            parameter.data = data
        self._host_data = []
        self._move_buffers(self._to_host)

    def _move_buffers(self, move: Move) -> None:
        for module in self._module.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = move(buffer)
            calibrator: Any = getattr(module, "_calibrator", None)
            if getattr(calibrator, "_calib_amax", None) is not None:
                calibrator._calib_amax = move(calibrator._calib_amax)
