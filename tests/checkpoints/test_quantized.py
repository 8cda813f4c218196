"""Unified HF checkpoints with ModelOpt's tensor names, written by hand: they are read and
dequantized, and refused if scales are missing.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.checkpoints import write_checkpoint
from toolkit.checkpoints.quantized import (
    Quantization,
    dequantize,
    open_checkpoint,
    read_quantization,
)
from toolkit.errors import CheckpointError

LINEAR = "model.layers.0.mlp.up_proj"
PRODUCER = {"name": "modelopt", "version": "0.47.0"}


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path)


def rewrite(directory: Path, **changes: torch.Tensor | None) -> None:
    """Replace tensors of LINEAR by their last name; None removes one."""
    tensors = load_file(directory / "model.safetensors")
    for name, tensor in changes.items():
        tensors.pop(f"{LINEAR}.{name}", None)
        if tensor is not None:
            tensors[f"{LINEAR}.{name}"] = tensor
    save_file(tensors, directory / "model.safetensors")


def declare(
    directory: Path, algo: str | None, kv: str | None = None, *, embedded: Any = None
) -> None:
    section = {"quant_algo": algo, "kv_cache_quant_algo": kv, "exclude_modules": ["lm_head"]}
    (directory / "hf_quant_config.json").write_text(
        json.dumps({"producer": PRODUCER, "quantization": section})
    )
    if embedded is not None:
        config = json.loads((directory / "config.json").read_text())
        config["quantization_config"] = embedded
        (directory / "config.json").write_text(json.dumps(config))


def test_plain_checkpoint_is_not_quantized(plain: Path) -> None:
    checkpoint = open_checkpoint(plain)
    assert checkpoint.quantization == Quantization(None, None, ())
    linear = checkpoint.linear(LINEAR)
    assert (linear.weight.dtype, linear.weight_scale, linear.input_scale) == (
        torch.bfloat16,
        None,
        None,
    )
    assert torch.equal(dequantize(linear), linear.weight.float())


def test_int8_codes_times_row_scales(plain: Path) -> None:
    codes = torch.randint(-127, 128, (128, 64), dtype=torch.int8)
    scale, pre = torch.rand(128), torch.rand(64).bfloat16()
    rewrite(
        plain, weight=codes, weight_scale=scale, input_scale=torch.tensor(0.02), pre_quant_scale=pre
    )
    declare(plain, "W8A8_SQ_PER_CHANNEL", "FP8")
    checkpoint = open_checkpoint(plain)
    linear = checkpoint.linear(LINEAR)
    assert checkpoint.quantization == Quantization("W8A8_SQ_PER_CHANNEL", "FP8", ("lm_head",))
    assert linear.input_scale == pytest.approx(0.02)
    assert linear.pre_quant_scale is not None
    assert torch.equal(linear.pre_quant_scale, pre)
    assert torch.equal(dequantize(linear, torch.float64), codes.double() * scale.double()[:, None])
    assert checkpoint.linear("lm_head").weight_scale is None  # left alone


def test_fp8_codes_times_one_scale(plain: Path) -> None:
    codes = torch.randn(128, 64).to(torch.float8_e4m3fn)
    rewrite(plain, weight=codes, weight_scale=torch.tensor(0.5), input_scale=torch.tensor(0.1))
    declare(plain, "FP8")
    assert torch.equal(dequantize(open_checkpoint(plain).linear(LINEAR)), codes.float() * 0.5)


def test_kv_scales_are_read_and_default_to_one(plain: Path) -> None:
    tensors = load_file(plain / "model.safetensors")
    tensors["model.layers.1.self_attn.k_proj.k_scale"] = torch.tensor(0.25)
    tensors["model.layers.1.self_attn.v_proj.v_scale"] = torch.tensor(0.75)
    save_file(tensors, plain / "model.safetensors")
    checkpoint = open_checkpoint(plain)
    assert checkpoint.kv_scales(1) == (0.25, 0.75)
    assert checkpoint.kv_scales(0) == (1.0, 1.0)


def test_config_json_alone_is_enough(plain: Path) -> None:
    config = json.loads((plain / "config.json").read_text())
    scheme = {"dynamic": False, "num_bits": 8, "type": "float"}
    config["quantization_config"] = {
        "quant_algo": "FP8",
        "quant_method": "modelopt",
        "kv_cache_scheme": scheme,
        "ignore": ["lm_head"],
    }
    (plain / "config.json").write_text(json.dumps(config))
    assert read_quantization(plain) == Quantization("FP8", "FP8", ("lm_head",))


def test_activation_scale_that_was_never_calibrated_is_found(plain: Path) -> None:
    rewrite(
        plain, weight=torch.zeros(128, 64).to(torch.float8_e4m3fn), weight_scale=torch.tensor(0.5)
    )
    declare(plain, "FP8")
    with pytest.raises(
        CheckpointError,
        match=r"up_proj\.input_scale is missing: the FP8 export was made without",
    ):
        open_checkpoint(plain).linear(LINEAR)


@pytest.mark.parametrize("scale", [None, torch.ones(5)])
def test_codes_without_their_scale_are_refused(plain: Path, scale: torch.Tensor | None) -> None:
    rewrite(plain, weight=torch.zeros(128, 64, dtype=torch.int8), weight_scale=scale)
    declare(plain, "W8A16")
    with pytest.raises(CheckpointError, match=r"weight_scale (is missing|has shape \[5\])"):
        open_checkpoint(plain).linear(LINEAR)


def test_codes_under_another_algorithms_name_are_refused(plain: Path) -> None:
    rewrite(plain, weight=torch.zeros(128, 64, dtype=torch.int8), weight_scale=torch.ones(128))
    declare(plain, "FP8")
    with pytest.raises(CheckpointError, match="but quant_algo FP8 does not write this dtype"):
        open_checkpoint(plain).linear(LINEAR)


def test_unknown_algorithm_is_refused_with_the_known_ones(plain: Path) -> None:
    declare(plain, "NVFP4")
    with pytest.raises(CheckpointError, match=r"'NVFP4' is not supported[\s\S]*supported: FP8"):
        read_quantization(plain)


def test_int8_kv_cache_is_refused(plain: Path) -> None:
    declare(plain, "FP8", "INT8")
    with pytest.raises(CheckpointError, match="kv_cache_quant_algo 'INT8'"):
        read_quantization(plain)


def test_two_places_that_disagree_are_refused(plain: Path) -> None:
    declare(plain, "FP8", embedded={"quant_algo": "W8A16", "quant_method": "modelopt"})
    with pytest.raises(
        CheckpointError, match=r"hf_quant_config\.json says FP8, but config\.json says W8A16"
    ):
        read_quantization(plain)


def test_another_quantizers_checkpoint_is_refused(plain: Path) -> None:
    config = json.loads((plain / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4}
    (plain / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="'gptq' is not ModelOpt's"):
        read_quantization(plain)
