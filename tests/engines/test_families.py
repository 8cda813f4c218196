"""The fused model against transformers' own, every family and every variation that a config.json
can ask for.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.engines.reference import reference_logits, reference_model
from tests.support.checkpoints import write_checkpoint
from tests.support.families import CASES
from toolkit.engines.embedded.engine import open_checkpoint


@pytest.fixture(scope="module", params=CASES)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp(request.param), seed=3, **CASES[request.param])


TOKENS = torch.randint(0, 250, (2, 40), generator=torch.Generator().manual_seed(5))


def test_logits_equal_transformers_in_float64(checkpoint: Path) -> None:
    """Both sides add up the same float64 products in another order: 1e-9 is some 1e5 roundings
    of logits near 10.
    """
    engine = open_checkpoint(checkpoint, dtype="float64", max_batch_size=2, max_seq_len=64)
    ours = engine.forward([0, 1], TOKENS)
    assert (ours - reference_logits(checkpoint, TOKENS)).abs().max() < 1e-9


def test_chunks_equal_one_shot(checkpoint: Path) -> None:
    """Another split of the same products over matrix calls: last bits only, so 1e-12 in float64."""
    engine = open_checkpoint(checkpoint, dtype="float64", max_batch_size=2, max_seq_len=64)
    whole = engine.forward([0], TOKENS[:1])
    parts = torch.cat(
        [engine.forward([1], part) for part in TOKENS[:1].split([1, 16, 5, 18], dim=1)], dim=1
    )
    assert (whole - parts).abs().max() < 1e-12


def test_float32_stays_within_rounding(checkpoint: Path) -> None:
    """float32 has 24 bits: after two layers and sums of 64, logits near 10 agree to about 1e-5;
    1e-4 is the bound.
    """
    engine = open_checkpoint(checkpoint, dtype="float32", max_batch_size=2, max_seq_len=64)
    assert (
        engine.forward([0, 1], TOKENS) - reference_logits(checkpoint, TOKENS)
    ).abs().max() < 1e-4


def test_dynamic_rope_beyond_its_length_equals_generation_with_a_cache(tmp_path: Path) -> None:
    """Past the original length transformers rotates each new position by the length reached, and
    keeps what is cached.

    It stretches theta in float32 there, which moves angles by some 1e-7 of themselves: hence 1e-6.
    """
    from transformers import DynamicCache

    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    source = write_checkpoint(tmp_path, max_position_embeddings=24, rope_parameters=rope)
    model, cache = reference_model(source), DynamicCache()
    engine = open_checkpoint(source, dtype="float64", max_batch_size=1, max_seq_len=64)
    with torch.no_grad():
        expected = [model(TOKENS[:1, :20], past_key_values=cache).logits]
        expected += [
            model(TOKENS[:1, i : i + 1], past_key_values=cache).logits for i in range(20, 40)
        ]
    assert (engine.forward([0], TOKENS[:1]) - torch.cat(expected, dim=1)).abs().max() < 1e-6


def test_bfloat16_engine_follows_within_its_precision(tmp_path: Path) -> None:
    """bfloat16 keeps 8 bits: logits near 3 agree to some hundredths; a wrong graph would be off
    by the logits themselves.
    """
    source = write_checkpoint(tmp_path)
    engine = open_checkpoint(source, dtype="bfloat16", max_batch_size=2, max_seq_len=64)
    assert (engine.forward([0, 1], TOKENS) - reference_logits(source, TOKENS)).abs().max() < 0.15
