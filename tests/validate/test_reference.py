from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.support.checkpoints import write_checkpoint
from tests.support.runtime_endpoint import RuntimeEndpoint
from tests.support.runtimes import make_runtime
from tests.support.step_engines import TableEngine
from toolkit.engines.embedded.engine import open_checkpoint
from toolkit.records.build import QuantizationQuality
from toolkit.speculative.text import TextCodec
from toolkit.validate.agreement import agreement, decided_margin
from toolkit.validate.gates import agreement_gate
from toolkit.validate.reference import (
    Reference,
    reference_from_checkpoint,
    reference_from_engine,
    text_logits,
)


class CountingEngine:
    """Its logits are the sum of all tokens cached so far, in the first entry, and their number,
    in the second.
    """

    vocab_size, max_batch_size, max_seq_len, max_step_tokens = 2, 1, 64, 4

    def __init__(self) -> None:
        self.cached: list[int] = []
        self.steps: list[int] = []

    def forward(self, slots: Sequence[int], tokens: Tensor, *, last_only: bool = False) -> Tensor:
        self.steps.append(tokens.shape[1])
        self.cached += tokens[0].tolist()
        return torch.tensor([[[float(sum(self.cached)), float(len(self.cached))]]])

    def rewind(self, slots: Sequence[int], lengths: Sequence[int]) -> None:
        self.cached = self.cached[: lengths[0]]

    def length(self, slot: int) -> int:
        return len(self.cached)


def test_a_prefix_runs_in_blocks_and_leaves_nothing_behind() -> None:
    engine = CountingEngine()
    reference = reference_from_engine(lambda: engine, lambda text: [1], (0,))
    for ids in ([5] * 10, [1, 2]):
        np.testing.assert_array_equal(reference.next_logits(ids), [sum(ids), len(ids)])
        assert engine.length(0) == 0
    assert engine.steps == [4, 4, 2, 2]


def test_the_engine_is_loaded_once_and_only_when_asked() -> None:
    loaded: list[CountingEngine] = []

    def load() -> CountingEngine:
        loaded.append(CountingEngine())
        return loaded[-1]

    reference = reference_from_engine(load, lambda text: [1], (0,))
    assert loaded == []
    reference.next_logits([1])
    reference.next_logits([2])
    assert len(loaded) == 1


def test_all_logits_of_a_text_are_those_of_its_prefixes() -> None:
    """In blocks, from any first place on."""
    engine = TableEngine(1, max_step_tokens=4)
    reference = reference_from_engine(lambda: engine, lambda text: [1], (0,))
    ids = [int(token) for token in np.random.default_rng(0).integers(0, 40, size=11)]
    for first in (1, 4, 5, 10):
        expected = np.stack([reference.next_logits(ids[:end]) for end in range(first, len(ids))])
        np.testing.assert_array_equal(text_logits(reference, ids, first), expected)
        np.testing.assert_array_equal(
            text_logits(replace(reference, text_logits=None), ids, first), expected
        )


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(
        tmp_path_factory.mktemp("source") / "target", dtype="float32", init_scale=1.5
    )


def served_by(checkpoint: Path, reference: Reference) -> list[Any]:
    """Greedy plain texts of an engine over this checkpoint."""
    engine = open_checkpoint(checkpoint, max_batch_size=1, max_seq_len=64)
    codec = TextCodec.from_file(checkpoint / "tokenizer.json")
    endpoint = RuntimeEndpoint(make_runtime(engine, max_draft_len=0, codec=codec), reference.encode)
    prompts = [f"def f{number}(x):" for number in range(12)]
    return endpoint.measure(prompts, max_tokens=16, temperature=0.0)


def test_the_source_checkpoint_in_transformers_agrees_with_an_unquantized_engine(
    checkpoint: Path,
) -> None:
    codec = TextCodec.from_file(checkpoint / "tokenizer.json")
    source = reference_from_checkpoint(checkpoint, codec.encode, (257,))
    found = agreement("source", served_by(checkpoint, source), source, 0.01, same_precision=True)
    assert found.kind in ("identical", "equivalent")
    assert found.tokens >= 150 and found.rate > 0.99
    assert agreement_gate(found).outcome == "PASS"


def test_one_damaged_weight_of_a_real_model_is_beyond_rounding(
    checkpoint: Path, tmp_path: Path
) -> None:
    codec = TextCodec.from_file(checkpoint / "tokenizer.json")
    source = reference_from_checkpoint(checkpoint, codec.encode, (257,))
    damaged = Path(shutil.copytree(checkpoint, tmp_path / "damaged"))
    tensors = load_file(damaged / "model.safetensors")
    tensors["model.layers.1.mlp.down_proj.weight"] = tensors[
        "model.layers.1.mlp.down_proj.weight"
    ].roll(1, 0)
    save_file(tensors, damaged / "model.safetensors", metadata={"format": "pt"})
    texts = served_by(damaged, source)
    exact = agreement("source", texts, source, 0.01, same_precision=True)
    assert exact.kind == "broken" and exact.largest_gap > 0.1
    sure = decided_margin(
        QuantizationQuality(
            5000, 0.001, 0.01, 0.98, 9.0, 9.0, (), (), 0, 40, (0.0008, 0.0012), (0.97, 0.99)
        )
    )
    quantized = agreement("source", texts, source, 0.01, same_precision=False, decided_margin=sure)
    gate = agreement_gate(quantized)
    assert gate is not None and gate.outcome == "FAIL"
    assert quantized.decided_differing > 10


def test_a_quantized_model_passes_against_its_source_and_an_unmeasured_one_is_not_judged(
    checkpoint: Path,
) -> None:
    """Weights rounded to 8 bits in every row: other tokens at near-ties, the same ones where the
    source is decided.
    """
    codec = TextCodec.from_file(checkpoint / "tokenizer.json")
    source = reference_from_checkpoint(checkpoint, codec.encode, (257,))
    texts = served_by(checkpoint, source)
    found = agreement("source", texts, source, 0.01, same_precision=False, decided_margin=0.1)
    gate = agreement_gate(found)
    assert gate is not None and gate.outcome == "PASS"
    assert (
        "decided by at least 0.1 logits (an estimate of how far quantization moves them);"
        " at most 5% may" in gate.detail
    )
    assert 0 < found.decided < found.tokens
    assert agreement_gate(replace(found, decided_margin=None)) is None
    undecided = agreement_gate(replace(found, decided=0))
    assert undecided is not None and undecided.outcome == "INCONCLUSIVE"
