"""The figure of a layer is that of the model in which only this layer is quantized, however the
streams are computed.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from tests.quantize.models import calibrated_model
from tests.support.checkpoints import write_checkpoint
from toolkit.quantize import modelopt, single_layers
from toolkit.quantize.single_layers import measure_single_layers
from toolkit.quantize.source import Source, open_source
from toolkit.quantize.streaming import streamed

LAYERS = 3


def silent(done: int, total: int | None, what: str) -> None:
    pass


def texts() -> list[Any]:
    import torch

    generator = torch.Generator().manual_seed(11)
    return [torch.randint(0, 256, (1, length), generator=generator) for length in (24, 9, 2)]


def one_by_one(model: Any, source: Source, batches: list[Any]) -> list[float]:
    """The definition: a whole forward of the source, and one for each layer with all other
    layers as in the source.
    """
    import contextlib

    import torch

    def log_probabilities(batch: Any, quantized: int | None) -> Any:
        with contextlib.ExitStack() as stack, torch.no_grad():
            for i in range(LAYERS):
                if i != quantized:
                    stack.enter_context(modelopt.as_source(model, source, f"model.layers.{i}"))
            return torch.log_softmax(model(input_ids=batch).logits[0, :-1].float(), dim=-1)

    kl_by_layer = []
    for layer in range(LAYERS):
        sums, tokens = 0.0, 0
        for batch in batches:
            wanted, given = log_probabilities(batch, None), log_probabilities(batch, layer)
            sums += float((wanted.exp() * (wanted - given)).sum())
            tokens += len(wanted)
        kl_by_layer.append(sums / tokens)
    return kl_by_layer


@pytest.mark.parametrize(
    ("family", "quant_algo", "kv"),
    [("llama", "FP8", "FP8"), ("mistral", "W8A8_SQ_PER_CHANNEL", None), ("qwen3", "W8A16", None)],
)
def test_each_layer_alone_as_if_run_one_by_one(
    family: str, quant_algo: str, kv: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = open_source(
        write_checkpoint(tmp_path, family=family, dtype="float32", num_hidden_layers=LAYERS)
    )
    monkeypatch.setattr(single_layers, "TOKENS_PER_CALL", 30)  # streams in several calls
    monkeypatch.setattr(single_layers, "LOGIT_TOKENS", 20)
    monkeypatch.setattr(single_layers, "LM_HEAD_ROWS", 100)
    with modelopt.quiet():
        model = calibrated_model(source, quant_algo, kv)
        before = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
        layers = measure_single_layers(model, source, texts(), silent)
        expected = one_by_one(model, source, texts())
        with streamed(model, lambda tensor: tensor.clone(), lambda tensor: tensor.clone()):
            streamed_layers = measure_single_layers(model, source, texts(), silent)
    assert [layer.layer for layer in layers] == [f"model.layers.{i}" for i in range(LAYERS)]
    assert all(layer.kl > 1e-6 for layer in layers)
    assert [layer.kl for layer in layers] == pytest.approx(expected, rel=0.01)
    assert [layer.kl for layer in streamed_layers] == pytest.approx(expected, rel=0.01)
    assert {name: parameter.data_ptr() for name, parameter in model.named_parameters()} == before


def test_the_layer_that_was_damaged_stands_out(tmp_path: Path) -> None:
    source = open_source(write_checkpoint(tmp_path, num_hidden_layers=LAYERS))
    with modelopt.quiet():
        model = calibrated_model(source, "W8A16")
        for quantizer in (
            linear.weight_quantizer
            for linear in modelopt.quantized_linears(model.model.layers[1]).values()
        ):
            quantizer._amax *= 40
        kl = [layer.kl for layer in measure_single_layers(model, source, texts(), silent)]
    assert kl[1] > 20 * max(kl[0], kl[2])


def test_rounding_of_the_source_is_not_taken_for_quantization(tmp_path: Path) -> None:
    """The same weights give the same figures whether stored in BF16 or in float32. With BF16
    arithmetic the figures would be noise.
    """
    source = write_checkpoint(tmp_path / "bfloat16", num_hidden_layers=LAYERS)
    wide = Path(shutil.copytree(source, tmp_path / "float32"))
    tensors = {
        name: tensor.float() for name, tensor in load_file(source / "model.safetensors").items()
    }
    save_file(tensors, wide / "model.safetensors", metadata={"format": "pt"})
    figures = []
    for folder in (source, wide):
        opened = open_source(folder)
        with modelopt.quiet():
            model = calibrated_model(opened, "W8A16")
            figures.append(
                [layer.kl for layer in measure_single_layers(model, opened, texts(), silent)]
            )
    assert figures[0] == pytest.approx(figures[1], rel=0.1)
