"""Small models, calibrated on seeded tokens."""

from __future__ import annotations

from typing import Any

from toolkit.quantize import modelopt
from toolkit.quantize.algorithms import ALGORITHMS
from toolkit.quantize.calibrate import forward_loop
from toolkit.quantize.source import Source


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
    modelopt.quantize_model(
        model, ALGORITHMS[quant_algo], kv, forward_loop(batches, lambda done, total, what: None)
    )
    return model
