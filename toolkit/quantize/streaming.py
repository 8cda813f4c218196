"""Computing on a GPU that the model does not fit into: decoder layers visit it one at a time.

Weights stay at home, mapped from files in the host's memory, so that whoever reads or rewrites them
between two forwards need not know of any of this. What a forward takes on the GPU is one layer and
the activations of one batch. Embedding and LM head stay on the host: one is a look-up, the other a
small part of the work.

The price is that every batch carries all layers over the bus; larger batches
(`calibration.batch_size`) share it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from toolkit.words import Device

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["computing_on", "streamed"]

Move = Callable[[Any], Any]


def computing_on(model: Any, device: Device) -> contextlib.AbstractContextManager[None]:
    """Within, `model.model(...)` computes on `device` ("cpu" | "cuda"), and takes and returns
    tensors on the host.
    """
    if device == "cpu":
        return contextlib.nullcontext()
    return streamed(model, lambda tensor: tensor.to(device), lambda tensor: tensor.cpu())


@contextlib.contextmanager
def streamed(model: Any, there: Move, back: Move) -> Iterator[None]:
    """Within, layers are moved by `there` before they run, and what they gathered by `back`
    afterwards.
    """
    body = model.model
    handles = [
        body.embed_tokens.register_forward_hook(lambda module, inputs, output: there(output)),
        body.norm.register_forward_hook(lambda module, inputs, output: back(output)),
    ]
    for module in (*body.layers, body.norm):
        visit = _Visit(module, there, back)
        handles.append(module.register_forward_pre_hook(visit.arrive))
        handles.append(module.register_forward_hook(visit.leave, prepend=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class _Visit:
    """One module's way there and back.

    Parameters return to the very tensors that they were. Buffers and the statistics of ModelOpt's
    calibrators, which the visit changes, are carried along.
    """

    def __init__(self, module: Any, there: Move, back: Move) -> None:
        self._module = module
        self._there = there
        self._back = back
        self._home: list[tuple[Any, Tensor]] = []

    def arrive(self, module: Any, inputs: Any) -> None:
        self._home = [(parameter, parameter.data) for parameter in module.parameters()]
        for parameter, data in self._home:
            parameter.data = self._there(data)
        self._carry(self._there)

    def leave(self, module: Any, inputs: Any, output: Any) -> None:
        for parameter, data in self._home:
            parameter.data = data
        self._home = []
        self._carry(self._back)

    def _carry(self, move: Move) -> None:
        for module in self._module.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = move(buffer)
            calibrator: Any = getattr(module, "_calibrator", None)
            if getattr(calibrator, "_calib_amax", None) is not None:
                calibrator._calib_amax = move(calibrator._calib_amax)
