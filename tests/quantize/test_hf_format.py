"""The unified format equals ModelOpt's own export, tensor for tensor and word for word."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.quantize.models import calibrated_model
from tests.support.checkpoints import write_checkpoint
from tests.support.modelopt_exports import export_hf
from toolkit.quantize import modelopt
from toolkit.quantize.algorithms import ALGORITHMS
from toolkit.quantize.calibrated import calibrated_from_model
from toolkit.quantize.hf_format import write_hf_weights
from toolkit.quantize.source import open_source

CASES = [
    ("llama", "FP8", "FP8", "bfloat16"),
    ("qwen2", "W8A8_SQ_PER_CHANNEL", None, "bfloat16"),
    ("qwen3", "W8A16", None, "float16"),
    ("mistral", "FP8", None, "float32"),
    ("llama", "W8A8_SQ_PER_CHANNEL", None, "float32"),
]


@pytest.mark.parametrize(("family", "quant_algo", "kv", "dtype"), CASES, ids=str)
def test_it_is_what_modelopt_writes(
    family: str, quant_algo: str, kv: str | None, dtype: str, tmp_path: Path
) -> None:
    import torch

    source = open_source(
        write_checkpoint(
            tmp_path / "source", family=family, dtype=dtype, tie_word_embeddings=family == "qwen3"
        )
    )
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    ours.mkdir()
    with modelopt.quiet():
        model = calibrated_model(source, quant_algo, kv)
        write_hf_weights(calibrated_from_model(model, source, ALGORITHMS[quant_algo]), ours)
        own, embedded = modelopt.quantization_configs(model)
        export_hf(model, dtype, theirs)
    tensors = load_file(ours / "model.safetensors")
    expected = load_file(theirs / "model.safetensors")
    assert tensors.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (tensors[name].dtype, tensors[name].shape) == (tensor.dtype, tensor.shape), name
        assert torch.equal(
            tensors[name].contiguous().view(-1).view(torch.uint8),
            tensor.contiguous().view(-1).view(torch.uint8),
        ), name
    assert own == json.loads((theirs / "hf_quant_config.json").read_text())
    assert embedded == json.loads((theirs / "config.json").read_text())["quantization_config"]
