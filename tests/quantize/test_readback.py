"""The checks find every silent fault of an export. Each fault is planted; where ModelOpt itself
makes it, ModelOpt plants it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from tests.quantize.models import whole_forwards
from tests.support.checkpoints import write_checkpoint
from tests.support.modelopt_exports import export_hf
from toolkit.config.schema import CalibrationConfig
from toolkit.quantize import calibrate, modelopt
from toolkit.quantize.algorithms import ALGORITHMS, Algorithm
from toolkit.quantize.calibrated import calibrated_from_model
from toolkit.quantize.check import check_format
from toolkit.quantize.checkpoint import finish
from toolkit.quantize.quality import measure
from toolkit.quantize.readback import capture, read_back
from toolkit.quantize.source import Source, open_source
from toolkit.records.measured import Finding

SMOOTHQUANT, FP8 = ALGORITHMS["W8A8_SQ_PER_CHANNEL"], ALGORITHMS["FP8"]
LINEAR = "model.layers.0.mlp.up_proj"


def silent(done: int, total: int | None, what: str) -> None:
    pass


def batches(source: Source, calibration: CalibrationConfig) -> list[Any]:
    texts = calibrate.split_texts(calibration)[0]
    return calibrate.batches_of(
        calibrate.encode(texts, source.path, 48, source.shape.vocab_size), 4
    )


def errors(findings: tuple[Finding, ...]) -> dict[str, str]:
    return {finding.check: finding.detail for finding in findings if finding.severity == "error"}


def faults(
    source: Source, out: Path, algorithm: Algorithm, kv: str | None = None
) -> dict[str, str]:
    return errors(check_format(out, source.shape, source.dtype, algorithm, kv))


@pytest.mark.parametrize("algorithm", [SMOOTHQUANT, FP8], ids=["smoothquant", "fp8"])
def test_the_model_computes_its_source_again_and_then_itself(
    algorithm: Algorithm, calibration: CalibrationConfig, tmp_path: Path
) -> None:
    import torch

    source = open_source(write_checkpoint(tmp_path))
    with modelopt.quiet(), torch.no_grad():
        model = modelopt.load_model(source)
        samples = batches(source, calibration)
        original = model(samples[0]).logits
        modelopt.quantize_model(model, algorithm, None, whole_forwards(samples))
        quantized = model(samples[0]).logits
        with modelopt.as_source(model, source):
            assert torch.equal(model(samples[0]).logits, original)
        assert torch.equal(model(samples[0]).logits, quantized)
        assert not torch.equal(quantized, original)


def test_a_model_that_lost_nothing_has_no_error(
    calibration: CalibrationConfig, tmp_path: Path
) -> None:
    """With the quantizers switched off, every figure must be that of two equal models."""
    from modelopt.torch.quantization.nn import TensorQuantizer

    source = open_source(write_checkpoint(tmp_path))
    with modelopt.quiet():
        model = modelopt.load_model(source)
        samples = batches(source, calibration)
        modelopt.quantize_model(model, ALGORITHMS["W8A16"], None, whole_forwards(samples))
        for module in model.modules():
            if isinstance(module, TensorQuantizer) and module.is_enabled:
                module._amax[:] = 1e30  # so coarse that every weight would round to 0 ...
        broken = measure(model, source, samples, silent)
        for module in model.modules():
            if isinstance(module, TensorQuantizer):
                module._if_quant = False  # ... and now nothing is rounded
        same = measure(model, source, samples, silent)
    assert broken.kl_mean > 0.01
    assert all(layer.relative_error == pytest.approx(1.0) for layer in broken.layers)
    assert (same.kl_mean, same.kl_p99, same.top1_agreement) == (0.0, 0.0, 1.0)
    assert same.source_perplexity == same.quantized_perplexity
    assert all(layer.relative_error == 0.0 for layer in same.layers)


def test_fp8_without_a_forward_loop_is_found(tmp_path: Path) -> None:
    source = open_source(write_checkpoint(tmp_path / "source"))
    with modelopt.quiet():
        model = modelopt.load_model(source)
        modelopt.quantize_model(model, FP8, None, lambda model: None)
        export_hf(model, source.dtype, tmp_path / "out")
    finish(source, tmp_path / "out", "FP8", None)
    assert (
        "model.layers.0.self_attn.q_proj.input_scale is missing"
        in faults(source, tmp_path / "out", FP8)["input_scale"]
    )


def test_plain_int8_under_the_name_of_smoothquant_is_found(
    calibration: CalibrationConfig, tmp_path: Path
) -> None:
    source = open_source(write_checkpoint(tmp_path / "source"))
    plain = Algorithm("W8A8_SQ_PER_CHANNEL", "INT8_DEFAULT_CFG", "I8", 127.0, True, True, False)
    with modelopt.quiet():
        model = modelopt.load_model(source)
        modelopt.quantize_model(model, plain, None, whole_forwards(batches(source, calibration)))
        export_hf(model, source.dtype, tmp_path / "out")
    finish(source, tmp_path / "out", "W8A8_SQ_PER_CHANNEL", None)
    stated = json.loads((tmp_path / "out/hf_quant_config.json").read_text())
    assert stated["quantization"]["quant_algo"] == "W8A8_SQ_PER_CHANNEL"  # ModelOpt's own word
    assert list(faults(source, tmp_path / "out", SMOOTHQUANT)) == ["pre_quant_scale"]


def test_a_bare_export_lacks_what_runtimes_need(
    calibration: CalibrationConfig, tmp_path: Path
) -> None:
    source = open_source(write_checkpoint(tmp_path / "source"))
    with modelopt.quiet():
        model = modelopt.load_model(source)
        modelopt.quantize_model(model, FP8, None, whole_forwards(batches(source, calibration)))
        export_hf(model, source.dtype, tmp_path / "out")
    before = faults(source, tmp_path / "out", FP8)
    assert set(before) == {"rope", "dtype", "tokenizer"}
    finish(source, tmp_path / "out", "FP8", None)
    assert faults(source, tmp_path / "out", FP8) == {}


@pytest.fixture
def exported(calibration: CalibrationConfig, tmp_path: Path) -> tuple[Source, Path, Any]:
    """An export by ModelOpt itself: (source, folder, (calibration, captured linears))."""
    source = open_source(write_checkpoint(tmp_path / "source"))
    with modelopt.quiet():
        model = modelopt.load_model(source)
        modelopt.quantize_model(
            model, SMOOTHQUANT, None, whole_forwards(batches(source, calibration))
        )
        calibrated = calibrated_from_model(model, source, SMOOTHQUANT)
        captured = capture(model, calibrated)
        export_hf(model, source.dtype, tmp_path / "out")
    finish(source, tmp_path / "out", SMOOTHQUANT.name, None)
    assert faults(source, tmp_path / "out", SMOOTHQUANT) == {}
    assert errors(read_back(tmp_path / "out", calibrated, captured)) == {}
    return source, tmp_path / "out", (calibrated, captured)


def _flip_code(tensors: dict[str, Any]) -> None:
    tensors[f"{LINEAR}.weight"][0, 0] ^= 1


def _scale_up(tensors: dict[str, Any]) -> None:
    tensors[f"{LINEAR}.weight_scale"] *= 1.001


def _touch_norm(tensors: dict[str, Any]) -> None:
    tensors["model.norm.weight"][0] += 0.5


@pytest.mark.parametrize(
    ("damage", "check"),
    [
        (_flip_code, "read back: codes"),
        (_scale_up, "read back: scales"),
        (_touch_norm, "read back: unquantized"),
    ],
)
def test_an_export_that_differs_from_what_was_quantized_is_found(
    damage: Callable[[dict[str, Any]], None], check: str, exported: tuple[Source, Path, Any]
) -> None:
    _, out, references = exported
    tensors = load_file(out / "model.safetensors")
    damage(tensors)
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    assert list(errors(read_back(out, *references))) == [check]


@pytest.mark.parametrize(
    ("name", "value", "check"),
    [
        (f"{LINEAR}.weight_scale", 0.0, "weight_scale"),
        (f"{LINEAR}.input_scale", float("nan"), "input_scale"),
        (f"{LINEAR}.pre_quant_scale", -1.0, "pre_quant_scale"),
        (f"{LINEAR}.weight", -128, "codes"),
    ],
)
def test_values_out_of_range_are_found(
    name: str, value: float, check: str, exported: tuple[Source, Path, Any]
) -> None:
    source, out, _ = exported
    tensors = load_file(out / "model.safetensors")
    tensors[name].view(-1)[0] = value
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    assert list(faults(source, out, SMOOTHQUANT)) == [check]


def test_two_names_for_one_algorithm_are_found(exported: tuple[Source, Path, Any]) -> None:
    source, out, _ = exported
    config = json.loads((out / "config.json").read_text())
    config["quantization_config"]["quant_algo"] = "W8A16"
    (out / "config.json").write_text(json.dumps(config))
    assert faults(source, out, SMOOTHQUANT) == {
        "quant_algo": "config.json quant_algo is 'W8A16', must be 'W8A8_SQ_PER_CHANNEL'"
    }


def test_a_cache_without_its_scales_is_found(exported: tuple[Source, Path, Any]) -> None:
    source, out, _ = exported
    assert (
        "model.layers.0.self_attn.k_proj.k_scale is missing"
        in faults(source, out, SMOOTHQUANT, "FP8")["kv_scale"]
    )
