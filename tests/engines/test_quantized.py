"""Quantized checkpoints through the eager engine, against ModelOpt's own simulation of the same
model.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.support.exports import EXPORTS, TOKENS, Export
from toolkit.engines.embedded.engine import open_checkpoint


@pytest.mark.slow
@pytest.mark.parametrize("name", EXPORTS)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_engine_computes_what_modelopt_simulates(
    name: str, dtype: str, exported: Callable[[str], Export]
) -> None:
    """Equal up to float rounding, 1e-5, wherever no activation sits so close to the middle between
    two codes that this rounding

    decides its code; where one does, the difference is a share of what quantization itself costs.
    Such positions are few: the median of all must be exact, and none may be further off than
    quantization is.
    """
    export = exported(name)
    engine = open_checkpoint(export.path, dtype=dtype, max_batch_size=2, max_seq_len=64)
    difference = (engine.forward([0, 1], TOKENS) - export.simulated).abs().amax(-1).flatten()
    cost = (export.simulated - export.source).abs().max()
    assert difference.median() < 1e-5
    assert cost > 1e-2  # or the comparison would prove nothing
    assert difference.max() < cost


def test_int8_products_beyond_float32_are_still_exact() -> None:
    """3000 products of 127 x 127 pass 2^24, where float32 would begin to round."""
    from toolkit.engines.embedded.model import Linear, TorchOps

    codes = torch.randint(-128, 128, (5, 3000), generator=torch.Generator().manual_seed(0))
    weight = torch.randint(100, 128, (7, 3000), generator=torch.Generator().manual_seed(1)).to(
        torch.int8
    )
    linear = Linear(weight, torch.ones(7), torch.ones(()))
    counts = TorchOps().linear(codes.abs().clamp(max=127).double(), linear)
    assert torch.equal(counts.long(), codes.abs().clamp(max=127) @ weight.long().t())
