"""Layer by layer, calibration gives what whole forwards give, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.quantize.models import Elsewhere, whole_forwards
from tests.support.checkpoints import write_checkpoint
from toolkit.quantize import modelopt
from toolkit.quantize.algorithms import ALGORITHMS
from toolkit.quantize.layerwise import forward_loop
from toolkit.quantize.resume import open_resume_state
from toolkit.quantize.source import Source, open_source
from toolkit.quantize.streaming import Moves, moves_to
from toolkit.words import KvCacheQuantAlgo


def silent(done: int, total: int | None, what: str) -> None:
    pass


def batches() -> list[Any]:
    """Two of one shape, and two of others."""
    import torch

    generator = torch.Generator().manual_seed(7)
    shapes = [(2, 24), (2, 24), (1, 24), (3, 9)]
    return [torch.randint(0, 256, shape, generator=generator) for shape in shapes]


def amaxes(source: Source, quant_algo: str, kv: KvCacheQuantAlgo | None, loop: Any) -> Any:
    with modelopt.quiet():
        model = modelopt.load_model(source)
        modelopt.quantize_model(model, ALGORITHMS[quant_algo], kv, loop)
    names = ("_amax", "_pre_quant_scale")
    return {name: value for name, value in model.state_dict().items() if name.endswith(names)}


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize("device", ["here", "elsewhere"])
@pytest.mark.parametrize(
    ("quant_algo", "kv"), [("FP8", "FP8"), ("FP8", None), ("W8A8_SQ_PER_CHANNEL", None)]
)
def test_every_family_is_calibrated_as_by_whole_forwards(
    family: str, device: str, quant_algo: str, kv: KvCacheQuantAlgo | None, tmp_path: Path
) -> None:
    import torch

    window = {"sliding_window": 8} if family == "mistral" else {}  # narrower than the text
    source = open_source(write_checkpoint(tmp_path / "source", family=family, **window))
    there = Elsewhere()
    moves = moves_to("cpu") if device == "here" else Moves(there.there, there.back)
    state = open_resume_state(tmp_path / "resume", source, batches(), "cpu")
    by_layer = amaxes(source, quant_algo, kv, forward_loop(batches(), state, moves, silent))
    whole = amaxes(source, quant_algo, kv, whole_forwards(batches()))
    assert by_layer.keys() == whole.keys()
    assert len(whole) > 20
    assert all(torch.equal(by_layer[name], whole[name]) for name in whole)
    assert there.largest <= 128 * 64 * 2 * 2  # one layer's linears and activations


def test_the_hidden_states_are_gone_after_the_last_layer(tmp_path: Path) -> None:
    source = open_source(write_checkpoint(tmp_path / "source"))
    folder = tmp_path / "resume"
    sizes: list[set[str]] = []

    def progress(done: int, total: int | None, what: str) -> None:
        sizes.append({file.name for file in folder.glob("hidden-*")})

    state = open_resume_state(folder, source, batches(), "cpu")
    loop = forward_loop(batches(), state, moves_to("cpu"), progress)
    amaxes(source, "FP8", None, loop)
    assert sizes == [{"hidden-0", "hidden-1"}] * (2 * len(batches()))
    assert {file.name for file in folder.iterdir()} == {
        "journal.json",
        "layer-000.safetensors",
        "layer-001.safetensors",
    }
