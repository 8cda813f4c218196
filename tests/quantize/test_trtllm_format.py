"""The TRT-LLM format equals ModelOpt's own export, tensor for tensor, and has more fields in
config.json.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from tests.quantize.models import calibrated_model
from tests.support.checkpoints import write_checkpoint
from tests.support.modelopt_exports import export_trtllm
from tests.support.trtllm import place_with_builder
from toolkit.config.schema import CalibrationConfig, QuantizationConfig
from toolkit.errors import UsageError
from toolkit.interfaces import EngineSpec, TensorRtLlmSpec
from toolkit.quantize import modelopt
from toolkit.quantize.algorithms import ALGORITHMS
from toolkit.quantize.calibrated import Calibrated, calibrated_from_model
from toolkit.quantize.partition import Ranks
from toolkit.quantize.source import open_source
from toolkit.quantize.stage import quantize
from toolkit.quantize.trtllm_format import write_trtllm
from toolkit.quantize.trtllm_format_check import check_trtllm
from toolkit.records.build import QuantizedCheckpoint, TrtllmForm
from toolkit.records.codec import from_json, to_json

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
CASES: dict[str, tuple[str, str, str | None, Ranks, dict[str, Any]]] = {
    "fp8+kv tp1": ("llama", "FP8", "FP8", Ranks(), {"rope_parameters": LLAMA3_ROPE}),
    "fp8+kv tp2 pp2": (
        "llama",
        "FP8",
        "FP8",
        Ranks(2, 2),
        {"rope_parameters": LLAMA3_ROPE, "attention_bias": True},
    ),
    "fp8 kv heads twice, tied, odd vocabulary": (
        "llama",
        "FP8",
        None,
        Ranks(4, 1),
        {"tie_word_embeddings": True, "vocab_size": 263},
    ),
    "int8 qwen2 tp2": ("qwen2", "W8A8_SQ_PER_CHANNEL", None, Ranks(2, 1), {}),
    "int8 mistral pp2": ("mistral", "W8A8_SQ_PER_CHANNEL", None, Ranks(1, 2), {"dtype": "float16"}),
    "fp8 qwen3 tp2": ("qwen3", "FP8", None, Ranks(2, 1), {}),
    "fp8 float32 source": ("qwen2", "FP8", None, Ranks(2, 1), {"dtype": "float32"}),
}


@pytest.mark.parametrize("case", CASES)
def test_it_is_what_modelopt_writes(case: str, tmp_path: Path) -> None:
    import torch

    family, quant_algo, kv, ranks, options = CASES[case]
    source = open_source(write_checkpoint(tmp_path / "source", family=family, **options))
    with modelopt.quiet():
        model = calibrated_model(source, quant_algo, kv)
        write_trtllm(
            calibrated_from_model(model, source, ALGORITHMS[quant_algo]),
            ranks,
            tmp_path / "ours",
            lambda rank: None,
        )
        export_trtllm(model, source.dtype, tmp_path / "theirs", ranks.tp_size, ranks.pp_size)
    files = {file.name for file in (tmp_path / "theirs").iterdir()}
    assert {file.name for file in (tmp_path / "ours").iterdir()} == files
    for rank in range(ranks.world_size):
        ours, theirs = (
            load_file(tmp_path / side / f"rank{rank}.safetensors") for side in ("ours", "theirs")
        )
        assert ours.keys() == theirs.keys()
        for name, tensor in theirs.items():
            assert (ours[name].dtype, ours[name].shape) == (tensor.dtype, tensor.shape), name
            assert torch.equal(
                ours[name].view(-1).view(torch.uint8), tensor.view(-1).view(torch.uint8)
            ), name
    config, bare = (
        json.loads((tmp_path / side / "config.json").read_text()) for side in ("ours", "theirs")
    )
    # ModelOpt writes the checkpoint's own 16-bit type; Triton's side of the logits is float32.
    assert bare.pop("logits_dtype") == "float16" and config["logits_dtype"] == "float32"
    assert {key: config[key] for key in bare} == bare
    added = {key: config[key] for key in config.keys() - bare.keys()}
    assert added["rotary_base"] == source.shape.rope_theta
    assert added["attn_bias"] == (family == "qwen2" or "attention_bias" in options)


def reassembled(folder: Path, ranks: Ranks, shape: Any) -> dict[str, Any]:
    """HF name -> weight [out, in] in float32, assembled from all ranks by a dequantizer that shares
    no code with ours.
    """
    import torch

    files = [load_file(folder / f"rank{rank}.safetensors") for rank in range(ranks.world_size)]
    per_stage, weights = shape.num_layers // ranks.pp_size, {}
    q, kv = (
        shape.num_heads * shape.head_dim // ranks.tp_size,
        max(1, shape.num_kv_heads // ranks.tp_size) * shape.head_dim,
    )

    def weight(tensors: dict[str, Any], name: str) -> Any:
        codes, scale = (
            tensors[f"{name}.weight"].float(),
            tensors.get(f"{name}.weights_scaling_factor"),
        )
        smoothing = tensors.get(f"{name}.prequant_scaling_factor")
        real = codes if scale is None else codes * scale.view(-1, 1)
        return real if smoothing is None else real * smoothing.float()

    for layer in range(shape.num_layers):
        stage = [files[layer // per_stage * ranks.tp_size + rank] for rank in range(ranks.tp_size)]
        prefix, name = f"transformer.layers.{layer % per_stage}", f"model.layers.{layer}"
        fused = [weight(tensors, f"{prefix}.attention.qkv").split([q, kv, kv]) for tensors in stage]
        copies = max(1, ranks.tp_size // shape.num_kv_heads)
        weights[f"{name}.self_attn.q_proj"] = torch.cat([parts[0] for parts in fused])
        weights[f"{name}.self_attn.k_proj"] = torch.cat([parts[1] for parts in fused[::copies]])
        weights[f"{name}.self_attn.v_proj"] = torch.cat([parts[2] for parts in fused[::copies]])
        for theirs, ours, axis in (
            ("self_attn.o_proj", "attention.dense", 1),
            ("mlp.gate_proj", "mlp.fc", 0),
            ("mlp.up_proj", "mlp.gate", 0),
            ("mlp.down_proj", "mlp.proj", 1),
        ):
            weights[f"{name}.{theirs}"] = torch.cat(
                [weight(tensors, f"{prefix}.{ours}") for tensors in stage], dim=axis
            )
    return weights


def silent(done: int, total: int | None, what: str) -> None:
    pass


def stage_run(
    source: Path,
    quantization: QuantizationConfig,
    calibration: CalibrationConfig | None,
    out: Path,
    ranks: Ranks,
) -> Any:
    return quantize("target", source, quantization, calibration, out, silent, trtllm=ranks)


TOLERANCE = {"FP8": 0.05, "W8A8_SQ_PER_CHANNEL": 0.03, "W8A16": 0.0, "NO_QUANT": 0.0}
STAGE_CASES = [
    ("llama", QuantizationConfig(quant_algo="FP8", kv_cache_quant_algo="FP8"), Ranks(2, 2)),
    (
        "qwen2",
        QuantizationConfig(quant_algo="W8A8_SQ_PER_CHANNEL"),
        Ranks(4, 1),
    ),  # 2 key heads: INT8 scales held twice
    ("qwen3", QuantizationConfig(quant_algo="W8A16"), Ranks(2, 1)),
    ("mistral", QuantizationConfig(), Ranks(2, 2)),
]


@pytest.mark.parametrize(
    ("family", "quantization", "ranks"),
    STAGE_CASES,
    ids=[case[1].quant_algo for case in STAGE_CASES],
)
def test_both_formats_come_from_one_calibration(
    family: str,
    quantization: QuantizationConfig,
    ranks: Ranks,
    calibration: CalibrationConfig,
    tmp_path: Path,
) -> None:
    from toolkit.checkpoints.quantized import open_checkpoint

    source = write_checkpoint(tmp_path / "source", family=family)
    record = stage_run(source, quantization, calibration, tmp_path / "out", ranks)
    assert {finding.severity for finding in record.checks} == {"ok"}
    assert {"trtllm: codes", "trtllm: rope", "trtllm: unquantized"} <= {
        finding.check for finding in record.checks
    }
    assert record.trtllm == TrtllmForm(record.path / "trtllm", ranks.tp_size, ranks.pp_size)
    assert from_json(QuantizedCheckpoint, json.loads(json.dumps(to_json(record)))) == record
    originals = load_file(source / "model.safetensors")
    unified = open_checkpoint(record.path)
    weights = reassembled(record.trtllm.path, ranks, unified.shape)
    assert len(weights) == 14
    for name, weight in weights.items():
        original = originals[f"{name}.weight"].float()
        assert (weight - original).norm() <= TOLERANCE[quantization.quant_algo] * original.norm(), (
            name
        )
    if quantization.quant_algo == "W8A16":  # for the builder to quantize
        assert unified.linear("model.layers.1.mlp.up_proj").weight_scale is not None
        tensors = load_file(record.trtllm.path / "rank0.safetensors")
        assert {str(tensor.dtype) for tensor in tensors.values()} == {"torch.bfloat16"}
        assert (
            json.loads((record.trtllm.path / "config.json").read_text())["quantization"][
                "quant_algo"
            ]
            == "W8A16"
        )


def test_a_checkpoint_that_is_quantized_already_is_divided_as_it_is(
    calibration: CalibrationConfig, tmp_path: Path
) -> None:
    from toolkit.checkpoints.quantized import dequantize, open_checkpoint

    quantization = QuantizationConfig(quant_algo="FP8", kv_cache_quant_algo="FP8")
    source = write_checkpoint(tmp_path / "source", vocab_size=300)
    first = quantize("target", source, quantization, calibration, tmp_path / "first", silent)
    assert first.trtllm is None
    again = quantize(
        "target",
        first.path,
        quantization,
        None,
        tmp_path / "again",
        silent,
        vocab_size=264,
        trtllm=Ranks(2, 1),
    )
    assert {finding.severity for finding in again.checks} == {"ok"}
    unified = open_checkpoint(first.path)
    weights = reassembled(again.trtllm.path, Ranks(2, 1), unified.shape) if again.trtllm else {}
    for name in (
        "self_attn.o_proj",
        "mlp.down_proj",
    ):  # not fused with anything: the very same codes
        assert (
            weights[f"model.layers.0.{name}"]
            == dequantize(unified.linear(f"model.layers.0.{name}"))
        ).all()
    assert load_file(again.path / "trtllm/rank1.safetensors")["lm_head.weight"].shape[0] == 132


def test_the_settings_of_llama_3_reach_the_engine(tmp_path: Path) -> None:
    """If transformers 5.x is installed, ModelOpt loses base and scaling, and TensorRT-LLM computes
    with base 10000.
    """
    source = write_checkpoint(tmp_path / "source", rope_parameters=LLAMA3_ROPE)
    record = stage_run(source, QuantizationConfig(), None, tmp_path / "out", Ranks())
    config = json.loads((record.path / "trtllm/config.json").read_text())
    assert config["rotary_base"] == 500000.0
    assert config["rotary_scaling"] == {
        "type": "llama3",
        **{k: v for k, v in LLAMA3_ROPE.items() if k != "rope_theta"},
    }


def test_the_engine_flow_builds_from_what_was_written(
    calibration: CalibrationConfig, tmp_path: Path
) -> None:
    """The compile stage finds the format by itself; a stand-in of the contract is the builder."""
    source = write_checkpoint(
        tmp_path / "source", max_position_embeddings=1024, rope_parameters=LLAMA3_ROPE
    )
    quantization = QuantizationConfig(quant_algo="FP8", kv_cache_quant_algo="FP8")
    record = stage_run(source, quantization, calibration, tmp_path / "out", Ranks(2, 1))
    spec = EngineSpec(
        "target",
        4,
        256,
        512,
        4,
        tensorrt_llm=TensorRtLlmSpec("1.2.1", speculation="draft_target", tp_size=2),
    )
    (tmp_path / "engine").mkdir()
    engine = (
        place_with_builder(tmp_path / "bin")
        .backend()
        .compile(record, spec, tmp_path / "engine", silent)
    )
    assert engine.tensorrt_llm is not None
    assert {finding.severity for finding in engine.tensorrt_llm.checks} == {"ok"}
    built = json.loads((engine.path / "config.json").read_text())["pretrained_config"]
    assert (built["rotary_base"], built["rotary_scaling"]["type"]) == (500000.0, "llama3")


def test_ranks_that_do_not_divide_the_model_are_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="tp_size 3 does not divide the model's 4 attention heads"):
        stage_run(
            write_checkpoint(tmp_path / "source"),
            QuantizationConfig(),
            None,
            tmp_path / "out",
            Ranks(3, 1),
        )


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Calibrated, Path]:
    """A SmoothQuant checkpoint for two tensor ranks, with its calibration."""
    folder = tmp_path_factory.mktemp("written")
    source = open_source(write_checkpoint(folder / "source", rope_parameters=LLAMA3_ROPE))
    with modelopt.quiet():
        model = calibrated_model(source, "W8A8_SQ_PER_CHANNEL")
    calibrated = calibrated_from_model(model, source, ALGORITHMS["W8A8_SQ_PER_CHANNEL"])
    write_trtllm(calibrated, Ranks(2, 1), folder / "trtllm", lambda rank: None)
    return calibrated, folder / "trtllm"


LAYER = "transformer.layers.1"


def _code(tensors: dict[str, Any]) -> None:
    tensors[f"{LAYER}.mlp.fc.weight"][3, 5] += 3


def _scale(tensors: dict[str, Any]) -> None:
    tensors[f"{LAYER}.attention.qkv.weights_scaling_factor"][40] *= 1.5


def _no_activation(tensors: dict[str, Any]) -> None:
    del tensors[f"{LAYER}.mlp.proj.activation_scaling_factor"]


def _low_activation(tensors: dict[str, Any]) -> None:
    tensors[f"{LAYER}.attention.qkv.activation_scaling_factor"] *= 0.9


def _smoothing(tensors: dict[str, Any]) -> None:
    tensors[f"{LAYER}.mlp.proj.prequant_scaling_factor"] *= 2


def _embedding(tensors: dict[str, Any]) -> None:
    tensors["transformer.vocab_embedding.weight"][7, 7] += 1


def _extra(tensors: dict[str, Any]) -> None:
    tensors[f"{LAYER}.mlp.fc.bias"] = tensors["transformer.ln_f.weight"].clone()


@pytest.mark.parametrize(
    ("damage", "check", "detail"),
    [
        (
            _code,
            "codes",
            "rank1.safetensors: 1 codes of transformer.layers.1.mlp.fc.weight are not the nearest",
        ),
        (_scale, "codes", "codes of transformer.layers.1.attention.qkv.weight are not the nearest"),
        (
            _no_activation,
            "tensors",
            "transformer.layers.1.mlp.proj.activation_scaling_factor is missing",
        ),
        (
            _low_activation,
            "scales",
            "attention.qkv.activation_scaling_factor is below the calibrated scale",
        ),
        (_smoothing, "scales", "prequant_scaling_factor is not the vector that calibration gave"),
        (_embedding, "unquantized", "transformer.vocab_embedding.weight differs from the source"),
        (_extra, "tensors", "transformer.layers.1.mlp.fc.bias does not belong there"),
    ],
)
def test_a_rank_that_does_not_hold_what_was_quantized_is_found(
    damage: Any, check: str, detail: str, written: tuple[Calibrated, Path], tmp_path: Path
) -> None:
    calibrated, folder = written
    shutil.copytree(folder, tmp_path / "copy")
    file = tmp_path / "copy/rank1.safetensors"
    tensors = load_file(file)
    damage(tensors)
    file.unlink()
    save_file(tensors, file, metadata={"format": "pt"})
    errors = [
        finding
        for finding in check_trtllm(tmp_path / "copy", calibrated, Ranks(2, 1))
        if finding.severity == "error"
    ]
    assert [finding.check for finding in errors] == [f"trtllm: {check}"]
    assert detail in errors[0].detail


@pytest.mark.parametrize(
    ("change", "check"),
    [
        ({"rotary_base": None}, "rope"),
        ({"rotary_scaling": None}, "rope"),
        ({"rotary_scaling": {**LLAMA3_ROPE, "type": "llama3", "factor": 32.0}}, "rope"),
        (
            {"quantization": {"quant_algo": "W8A8_SQ_PER_CHANNEL", "kv_cache_quant_algo": "INT8"}},
            "quant_algo",
        ),
        ({"mapping": {"world_size": 2, "tp_size": 1, "pp_size": 2}}, "config"),
    ],
)
def test_a_config_that_says_something_else_is_found(
    change: dict[str, Any], check: str, written: tuple[Calibrated, Path], tmp_path: Path
) -> None:
    calibrated, folder = written
    shutil.copytree(folder, tmp_path / "copy")
    file = tmp_path / "copy/config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    findings = check_trtllm(tmp_path / "copy", calibrated, Ranks(2, 1))
    assert [finding.check for finding in findings if finding.severity == "error"] == [
        f"trtllm: {check}"
    ]


def test_a_missing_rank_is_found(written: tuple[Calibrated, Path], tmp_path: Path) -> None:
    calibrated, folder = written
    shutil.copytree(folder, tmp_path / "copy")
    (tmp_path / "copy/rank1.safetensors").unlink()
    [finding] = check_trtllm(tmp_path / "copy", calibrated, Ranks(2, 1))
    assert (finding.severity, "rank1.safetensors" in finding.detail) == ("error", True)
