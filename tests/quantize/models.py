"""Small models, calibrated on seeded tokens, and a stand-in for the device that computes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from toolkit.quantize import modelopt
from toolkit.quantize.algorithms import ALGORITHMS
from toolkit.quantize.source import Source


def whole_forwards(batches: list[Any]) -> Callable[[Any], None]:
    """The plain calibration loop: every batch through the whole model."""
    import torch

    def loop(model: Any) -> None:
        with torch.no_grad():
            for batch in batches:
                model.model(input_ids=batch, use_cache=False)

    return loop


def calibrated_model(
    source: Source, quant_algo: str, kv: str | None = None, model: Any = None
) -> Any:
    """Quantized as the stage does it, on two batches of random tokens. To be called within
    `modelopt.quiet()`.

    model: one that was loaded from the source already.
    """
    import torch

    generator = torch.Generator().manual_seed(7)
    batches = [torch.randint(0, 256, (2, 24), generator=generator) for _ in range(2)]
    model = modelopt.load_model(source) if model is None else model
    modelopt.quantize_model(model, ALGORITHMS[quant_algo], kv, whole_forwards(batches))
    return model


class Elsewhere:
    """A stand-in for a device, which notes the largest tensor. Every move is a copy, so a tensor
    that is not moved back is found by its address.
    """

    def __init__(self) -> None:
        self.largest = 0

    def there(self, tensor: Any) -> Any:
        self.largest = max(self.largest, tensor.nbytes)
        return tensor.clone()

    def back(self, tensor: Any) -> Any:
        return tensor.clone()
