"""Layers that are moved to another device compute what they compute on the host. The device is a
stand-in: moving a tensor to it makes a copy.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.quantize.models import Elsewhere, calibrated_model
from tests.support.checkpoints import write_checkpoint
from toolkit.quantize import modelopt
from toolkit.quantize.source import open_source
from toolkit.quantize.streaming import computing_on, streamed


@pytest.mark.parametrize("quant_algo", ["FP8", "W8A8_SQ_PER_CHANNEL"])
def test_a_model_is_calibrated_and_run_elsewhere_as_at_home(
    quant_algo: str, tmp_path: Path
) -> None:
    import torch

    source = open_source(write_checkpoint(tmp_path / "source", family="qwen3"))
    tokens = torch.arange(40).reshape(2, 20)
    elsewhere = Elsewhere()
    with modelopt.quiet(), torch.no_grad():
        at_home = calibrated_model(source, quant_algo)
        visiting = modelopt.load_model(source)
        with streamed(visiting, elsewhere.there, elsewhere.back):
            calibrated_model(source, quant_algo, model=visiting)
            homes = {name: parameter.data_ptr() for name, parameter in visiting.named_parameters()}
            away = visiting.model(input_ids=tokens, use_cache=False).last_hidden_state
        expected = at_home.model(input_ids=tokens, use_cache=False).last_hidden_state
        assert torch.equal(away, expected)
        again = visiting.model(
            input_ids=tokens, use_cache=False
        ).last_hidden_state  # no hook is left
    assert torch.equal(again, expected)
    assert {name: parameter.data_ptr() for name, parameter in visiting.named_parameters()} == homes
    states = [
        {name: value for name, value in model.state_dict().items() if "_amax" in name}
        for model in (at_home, visiting)
    ]
    assert states[0].keys() == states[1].keys()
    assert len(states[0]) > 20
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    assert (
        0 < elsewhere.largest <= 128 * 64 * 2 * 2
    )  # one layer's linears and activations, never the embedding


def test_a_layer_that_fails_elsewhere_leaves_no_hook(tmp_path: Path) -> None:
    import torch

    source = open_source(write_checkpoint(tmp_path / "source"))
    model = modelopt.load_model(source)

    def broken(tensor: Any) -> Any:
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"), streamed(model, broken, broken):
        model.model(input_ids=torch.arange(4)[None])
    assert model.model(input_ids=torch.arange(4)[None]).last_hidden_state.isfinite().all()


@pytest.mark.gpu
def test_a_gpu_gives_what_the_host_gives_up_to_rounding(tmp_path: Path) -> None:
    import torch

    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    source = open_source(write_checkpoint(tmp_path / "source", dtype="float32"))
    model = modelopt.load_model(source)
    tokens = torch.arange(40).reshape(2, 20)
    with torch.no_grad():
        expected = model.model(input_ids=tokens).last_hidden_state
        with computing_on(model, "cuda"):
            hidden = model.model(input_ids=tokens).last_hidden_state
    assert hidden.device.type == "cpu"
    assert torch.allclose(hidden, expected, atol=1e-4)
