"""The quantize stage on small real models: every family with every algorithm, and every refusal."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from tests.support.checkpoints import write_checkpoint
from toolkit.checkpoints.shape import read_shape
from toolkit.config.schema import CalibrationConfig, QuantizationConfig
from toolkit.errors import CheckpointError, UsageError
from toolkit.quantize.modelopt import load_model, quiet
from toolkit.quantize.source import open_source
from toolkit.quantize.stage import fingerprint, quantize
from toolkit.records.build import QuantizedCheckpoint
from toolkit.records.codec import from_json, to_json

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
FP8, FP8_KV = (
    QuantizationConfig(quant_algo="FP8"),
    QuantizationConfig(quant_algo="FP8", kv_cache_quant_algo="FP8"),
)
SMOOTHQUANT, WEIGHT_ONLY = (
    QuantizationConfig(quant_algo="W8A8_SQ_PER_CHANNEL"),
    QuantizationConfig(quant_algo="W8A16"),
)
NO_QUANT = QuantizationConfig()
CODES = {"FP8": "torch.float8_e4m3fn", "W8A8_SQ_PER_CHANNEL": "torch.int8", "W8A16": "torch.int8"}


def silent(done: int, total: int | None, what: str) -> None:
    pass


def run(
    source: Path,
    quantization: QuantizationConfig,
    calibration: CalibrationConfig | None,
    out: Path,
    progress: Any = silent,
) -> QuantizedCheckpoint:
    return quantize("target", source, quantization, calibration, out, progress)


def tensors_of(folder: Path) -> dict[str, Any]:
    return {
        name: tensor
        for file in sorted(folder.glob("*.safetensors"))
        for name, tensor in load_file(file).items()
    }


def dequantized(folder: Path, name: str) -> Any:
    """codes * scale / pre_quant_scale: the weight that acts on the linear's own input."""
    tensors = tensors_of(folder)
    weight = tensors[f"{name}.weight"].float() * tensors[f"{name}.weight_scale"].reshape(-1, 1)
    smoothing = tensors.get(f"{name}.pre_quant_scale")
    return weight if smoothing is None else weight * smoothing.float()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "quantization", [FP8_KV, SMOOTHQUANT, WEIGHT_ONLY], ids=["fp8+kv", "smoothquant", "weight-only"]
)
def test_every_family_is_quantized_checked_and_close_to_its_source(
    family: str, quantization: QuantizationConfig, calibration: CalibrationConfig, tmp_path: Path
) -> None:
    source = write_checkpoint(tmp_path / "source", family=family)
    record = run(source, quantization, calibration, tmp_path / "out")
    assert {finding.severity for finding in record.checks} == {"ok"}
    assert (record.quant_algo, record.kv_cache_quant_algo) == (
        quantization.quant_algo,
        quantization.kv_cache_quant_algo,
    )
    tensors, originals = tensors_of(record.path), tensors_of(source)
    for layer in range(2):
        for part in ("self_attn.q_proj", "self_attn.o_proj", "mlp.down_proj"):
            name = f"model.layers.{layer}.{part}"
            assert str(tensors[f"{name}.weight"].dtype) == CODES[quantization.quant_algo]
            original = originals[f"{name}.weight"].float()
            error = (dequantized(record.path, name) - original).norm() / original.norm()
            assert error < (
                0.04 if quantization.quant_algo == "FP8" else 0.03
            )  # E4M3 keeps 3 bits, INT8 per channel 7
        for part in "kv":
            scale = tensors.get(f"model.layers.{layer}.self_attn.{part}_proj.{part}_scale")
            assert (scale is not None) == (quantization.kv_cache_quant_algo == "FP8")
    assert record.quality is not None
    assert 0 < record.quality.kl_mean < 0.05
    assert record.quality.kl_p99 >= record.quality.kl_mean
    low, high = record.quality.kl_interval
    assert record.quality.texts > 1 and low < record.quality.kl_mean < high
    low, high = record.quality.top1_interval
    assert low <= record.quality.top1_agreement <= high
    assert record.quality.top1_agreement > 0.5
    assert len(record.quality.layers) == 14
    assert all(0 < layer.relative_error < 0.5 for layer in record.quality.layers)
    assert from_json(QuantizedCheckpoint, json.loads(json.dumps(to_json(record)))) == record


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize(
    "quantization", [FP8_KV, SMOOTHQUANT, NO_QUANT], ids=["fp8+kv", "smoothquant", "none"]
)
def test_padding_rows_are_cut_off_embedding_and_head(
    quantization: QuantizationConfig, tied: bool, calibration: CalibrationConfig, tmp_path: Path
) -> None:
    """Pairing decided how many rows are kept. These are bit for bit the source's; a pad id above
    them is dropped.
    """
    import torch

    source = write_checkpoint(
        tmp_path / "source",
        vocab_size=300,
        tie_word_embeddings=tied,
        pad_token_id=299,
        max_shard_size="40KB",
    )
    record = quantize(
        "target", source, quantization, calibration, tmp_path / "out", silent, vocab_size=260
    )
    assert record.vocab_size == read_shape(record.path).vocab_size == 260
    assert {finding.severity for finding in record.checks} == {"ok"}
    tensors, originals = tensors_of(record.path), tensors_of(source)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        assert (name in tensors) == (name in originals)
        if name in tensors:
            assert torch.equal(tensors[name], originals[name][:260])
    assert json.loads((record.path / "config.json").read_text())["pad_token_id"] is None
    assert record.weight_bytes < sum(file.stat().st_size for file in source.glob("*.safetensors"))


def test_padding_rows_of_an_already_quantized_checkpoint_are_cut(
    calibration: CalibrationConfig, tmp_path: Path
) -> None:
    import torch

    first = run(
        write_checkpoint(tmp_path / "source", vocab_size=300),
        FP8_KV,
        calibration,
        tmp_path / "first",
    )
    again = quantize("target", first.path, FP8_KV, None, tmp_path / "again", silent, vocab_size=272)
    before, after = tensors_of(first.path), tensors_of(again.path)
    assert before.keys() == after.keys()
    for name, tensor in after.items():
        assert torch.equal(
            tensor.float(), before[name][: len(tensor)].float() if tensor.ndim else before[name]
        )
    assert len(after["lm_head.weight"]) == 272


def test_rows_that_the_source_does_not_have_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has 258 rows \(vocab_size\), but 300 are wanted"):
        quantize(
            "target",
            write_checkpoint(tmp_path / "source"),
            NO_QUANT,
            None,
            tmp_path / "out",
            silent,
            vocab_size=300,
        )


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize(
    "quantization", [FP8, SMOOTHQUANT, WEIGHT_ONLY], ids=["fp8", "smoothquant", "weight-only"]
)
def test_other_dtypes_stay_what_they_are(
    dtype: str, quantization: QuantizationConfig, calibration: CalibrationConfig, tmp_path: Path
) -> None:
    source = write_checkpoint(tmp_path / "source", family="qwen2", dtype=dtype)
    record = run(source, quantization, calibration, tmp_path / "out")
    assert {finding.severity for finding in record.checks} == {"ok"}
    assert str(tensors_of(record.path)["model.norm.weight"].dtype) == f"torch.{dtype}"
    assert json.loads((record.path / "config.json").read_text())["torch_dtype"] == dtype


@pytest.mark.parametrize(
    "quantization", [FP8, SMOOTHQUANT, NO_QUANT], ids=["fp8", "smoothquant", "not-quantized"]
)
def test_a_wider_embedding_does_not_widen_the_layers(
    quantization: QuantizationConfig, calibration: CalibrationConfig, tmp_path: Path
) -> None:
    """Otherwise a model of 140 GB would be copied out of its files into 280 GB of memory, and
    served in float32.
    """
    source = write_checkpoint(tmp_path / "source", tie_word_embeddings=False, intermediate_size=512)
    tensors = tensors_of(source)
    wide = {
        name: tensor.float()
        for name, tensor in tensors.items()
        if "embed_tokens" in name or "norm" in name
    }
    save_file(tensors | wide, source / "model.safetensors", metadata={"format": "pt"})
    opened = open_source(source)
    assert opened.dtype == "bfloat16"
    with quiet():
        model = load_model(opened)
    assert {str(parameter.dtype) for parameter in model.parameters()} == {"torch.bfloat16"}
    record = run(source, quantization, calibration, tmp_path / "out")
    assert {finding.severity for finding in record.checks} == {"ok"}
    assert json.loads((record.path / "config.json").read_text())["torch_dtype"] == "bfloat16"


def test_an_odd_model_works(calibration: CalibrationConfig, tmp_path: Path) -> None:
    """Tied, head_dim not hidden / heads, odd vocabulary, several EOS ids, shards, no
    generation_config, a row of zeros.
    """
    source = write_checkpoint(
        tmp_path / "source",
        tie_word_embeddings=True,
        head_dim=24,
        num_attention_heads=8,
        num_key_value_heads=1,
        vocab_size=301,
        eos_token_id=[257, 5],
        max_shard_size="60KB",
    )
    (source / "generation_config.json").unlink()
    shards = sorted(source.glob("model-*.safetensors"))
    assert len(shards) > 1
    for shard in shards:
        tensors = load_file(shard)
        for name in ("model.layers.0.mlp.up_proj.weight", "model.layers.1.self_attn.k_proj.weight"):
            if name in tensors:
                tensors[name][3] = 0.0
        save_file(tensors, shard, metadata={"format": "pt"})
    for quantization in (FP8_KV, SMOOTHQUANT, WEIGHT_ONLY):
        record = run(source, quantization, calibration, tmp_path / quantization.quant_algo)
        assert {finding.severity for finding in record.checks} == {"ok"}
        assert "lm_head.weight" not in tensors_of(record.path)
        assert not (record.path / "generation_config.json").exists()
        assert read_shape(record.path).eos_token_ids == (257, 5)
        assert not dequantized(record.path, "model.layers.0.mlp.up_proj")[3].any()


def test_the_same_input_gives_the_same_bytes(
    calibration: CalibrationConfig, tmp_path: Path
) -> None:
    source = write_checkpoint(tmp_path / "source")
    first = run(source, SMOOTHQUANT, calibration, tmp_path / "first")
    second = run(source, SMOOTHQUANT, calibration, tmp_path / "second")
    names = sorted(file.name for file in first.path.iterdir())
    assert names == sorted(file.name for file in second.path.iterdir())
    for name in names:
        assert (first.path / name).read_bytes() == (second.path / name).read_bytes()
    assert first.quality == second.quality


def test_rope_is_written_as_both_transformers_read_it(
    calibration: CalibrationConfig, tmp_path: Path
) -> None:
    from transformers import AutoConfig

    scaling = {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    source = write_checkpoint(tmp_path / "source", rope_parameters=scaling)
    for quantization in (WEIGHT_ONLY, NO_QUANT):
        record = run(source, quantization, calibration, tmp_path / quantization.quant_algo)
        raw = json.loads((record.path / "config.json").read_text())
        assert raw["rope_theta"] == 500000.0  # transformers 4.x
        assert raw["rope_scaling"] == {
            key: value for key, value in scaling.items() if key != "rope_theta"
        }
        assert raw["dtype"] == raw["torch_dtype"] == "bfloat16"
        read = AutoConfig.from_pretrained(record.path)  # transformers 5.x, installed here
        assert read.rope_parameters == AutoConfig.from_pretrained(source).rope_parameters


def test_a_source_in_the_old_rope_spelling_keeps_it(
    calibration: CalibrationConfig, tmp_path: Path
) -> None:
    source = write_checkpoint(tmp_path / "source")
    file = source / "config.json"
    raw = json.loads(file.read_text())
    del raw["rope_parameters"], raw["dtype"]
    file.write_text(
        json.dumps({**raw, "rope_theta": 12345.0, "rope_scaling": None, "torch_dtype": "bfloat16"})
    )
    record = run(source, WEIGHT_ONLY, calibration, tmp_path / "out")
    written = json.loads((record.path / "config.json").read_text())
    assert (written["rope_theta"], written["rope_parameters"]["rope_theta"]) == (12345.0, 12345.0)


def test_no_quant_copies_and_leaves_the_source_alone(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "source", max_shard_size="60KB")
    before = {file.name: file.read_bytes() for file in source.iterdir()}
    record = run(source, NO_QUANT, None, tmp_path / "out")
    assert record.quality is None
    assert record.quant_algo is None
    assert {file.name: file.read_bytes() for file in source.iterdir()} == before
    for name, content in before.items():
        if name != "config.json":  # completed with the second spelling
            assert (record.path / name).read_bytes() == content
            assert not (record.path / name).samefile(source / name)
    assert record.weight_bytes == sum(tensor.nbytes for tensor in tensors_of(source).values())


@pytest.mark.parametrize("with_code", [False, True])
def test_code_comes_along_only_where_it_is_trusted(with_code: bool, tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "source")
    (source / "tokenization_own.py").write_text("raise RuntimeError('run')\n")
    out_dir = tmp_path / "out"
    quantize("target", source, NO_QUANT, None, out_dir, silent, with_code=with_code)
    assert (out_dir / "tokenization_own.py").exists() == with_code


def test_tokenizer_and_generation_config_come_along(
    calibration: CalibrationConfig, tmp_path: Path
) -> None:
    source = write_checkpoint(tmp_path / "source")
    (source / "chat_template.jinja").write_text("{{ messages }}")
    (source / "generation_config.json").write_text(
        '{"eos_token_id": [257], "top_p": 0.9, "do_sample": false}'
    )
    record = run(source, FP8, calibration, tmp_path / "out")
    for name in (
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
        "generation_config.json",
    ):
        assert (record.path / name).read_bytes() == (source / name).read_bytes()


def test_an_already_quantized_checkpoint_is_used_as_it_is(
    calibration: CalibrationConfig, tmp_path: Path
) -> None:
    source = write_checkpoint(tmp_path / "source")
    first = run(source, FP8_KV, calibration, tmp_path / "first")
    again = run(first.path, FP8_KV, None, tmp_path / "again")
    assert again.quality is None
    assert {finding.severity for finding in again.checks} == {"ok"}
    assert (again.path / "model.safetensors").read_bytes() == (
        first.path / "model.safetensors"
    ).read_bytes()
    (first.path / "hf_quant_config.json").unlink()  # config.json alone says it too
    assert run(first.path, FP8_KV, None, tmp_path / "third").kv_cache_quant_algo == "FP8"


@pytest.mark.parametrize(
    "quantization", [SMOOTHQUANT, FP8, NO_QUANT], ids=["other", "no kv", "none"]
)
def test_another_algorithm_than_asked_is_refused_with_both(
    quantization: QuantizationConfig, calibration: CalibrationConfig, tmp_path: Path
) -> None:
    first = run(write_checkpoint(tmp_path / "source"), FP8_KV, calibration, tmp_path / "first")
    with pytest.raises(
        CheckpointError, match="already quantized with FP8 and a FP8 KV cache, but the YAML asks"
    ) as caught:
        run(first.path, quantization, calibration, tmp_path / "out")
    assert quantization.quant_algo in str(caught.value)
    assert "{quant_algo: FP8, kv_cache_quant_algo: FP8}" in str(caught.value)


def test_one_quantized_by_something_else_is_refused(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "source")
    raw = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(
        json.dumps({**raw, "quantization_config": {"quant_method": "gptq"}})
    )
    with pytest.raises(CheckpointError, match="'gptq' is not ModelOpt's"):
        run(source, NO_QUANT, None, tmp_path / "out")


def test_progress_is_shown_and_the_libraries_are_silent(
    calibration: CalibrationConfig, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    source = write_checkpoint(tmp_path / "source")
    capfd.readouterr()
    seen: list[tuple[int, int | None, str]] = []

    def progress(done: int, total: int | None, what: str) -> None:
        seen.append((done, total, what))
        print(f"at {what}")

    run(source, SMOOTHQUANT, calibration, tmp_path / "out", progress)
    for what in (
        "checking weights, tensors",
        "calibrating, batches x layers",
        "measuring quality, batches",
    ):
        steps = [(done, total) for done, total, name in seen if name == what]
        assert steps == [(i, len(steps)) for i in range(1, len(steps) + 1)]
    out, err = capfd.readouterr()
    assert set(out.splitlines()) == {f"at {what}" for _, _, what in seen}
    assert err == ""


def test_quality_is_of_the_checkpoint_that_was_written(
    calibration: CalibrationConfig, tmp_path: Path
) -> None:
    """W8A16 has no activation quantization, so the source's code with dequantized weights must
    show the recorded KL.
    """
    import torch
    import transformers

    from toolkit.quantize.calibrate import encode, split_texts

    source = write_checkpoint(tmp_path / "source", dtype="float32")
    record = run(source, WEIGHT_ONLY, calibration, tmp_path / "out")
    models = [
        transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
        for _ in range(2)
    ]
    with torch.no_grad():
        for name, module in models[1].named_modules():
            if name.endswith("_proj"):
                module.weight.copy_(dequantized(record.path, name))
        kl, nll = [], []
        for ids in encode(split_texts(calibration)[1], source, 48, 258):
            rows = [
                torch.log_softmax(model(torch.tensor([ids])).logits[0, :-1], dim=-1)
                for model in models
            ]
            kl += (rows[0].exp() * (rows[0] - rows[1])).sum(-1).tolist()
            nll += (-rows[0].gather(1, torch.tensor(ids[1:])[:, None])[:, 0]).tolist()
    assert record.quality is not None
    assert record.quality.tokens == len(kl)
    assert record.quality.kl_mean == pytest.approx(
        sum(kl) / len(kl), rel=1e-2
    )  # float32 sums in another order
    assert record.quality.source_perplexity == pytest.approx(
        math.exp(sum(nll) / len(nll)), rel=1e-4
    )


def test_calibration_is_required(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="quantizing the target needs calibration text"):
        run(write_checkpoint(tmp_path / "source"), FP8, None, tmp_path / "out")


def test_fingerprint_names_what_decides_the_bytes() -> None:
    assert set(fingerprint(FP8)) >= {"nvidia-modelopt", "torch", "transformers"}
