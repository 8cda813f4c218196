"""Write INT8 W8A8 in compressed-tensors format, which vLLM and transformers read, and read it back.

    <linear>.weight         int8 [out, in]
    <linear>.weight_scale   float32 [out, 1]; weight = code * scale

There is no smoothing vector: `toolkit.quantize.folding` says where it went. Activations get a scale
per token, from the token's own values, and so there is no input_scale. On CPUs with AMX vLLM
computes that whatever the config says: `_apply_weights_sgl` takes no input scale
(vllm/model_executor/kernels/linear/scaled_mm/cpu.py, vLLM 0.32.0). A calibrated scale would give
other logits there than on every other machine. vLLM applies it elsewhere with oneDNN and CUTLASS.

Source: vllm/model_executor/layers/quantization/compressed_tensors/, of vLLM 0.32.0.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit.checkpoints.reader import TensorInfo, expected_shapes, read_index, read_tensor
from toolkit.checkpoints.shape import read_json
from toolkit.checkpoints.writer import TensorPlan, write_checkpoint_shards
from toolkit.errors import CheckpointError
from toolkit.quantize.algorithms import Algorithm
from toolkit.quantize.calibrated import Calibrated
from toolkit.quantize.check import check_files, verdict
from toolkit.quantize.checkpoint import finish
from toolkit.quantize.codes import encode_weight, row_slices
from toolkit.quantize.folding import Folding
from toolkit.quantize.hf_format import SOURCE_DTYPES, fixed_plan
from toolkit.quantize.readback import Captured, digest_of_codes
from toolkit.quantize.source import read_source
from toolkit.records.measured import Finding

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["check_compressed_tensors", "quantization_config", "write_compressed_tensors"]

# A code is the nearest to its weight up to this share of a step: float32 divides 127 steps with an
# error of 2**-17, and the scale itself is rounded by as much.
TIE_TOLERANCE = 2.0**-15


def quantization_config() -> dict[str, Any]:
    """The `quantization_config` of config.json."""
    int8 = {"num_bits": 8, "type": "int", "symmetric": True}
    return {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {**int8, "strategy": "channel", "dynamic": False},
                "input_activations": {**int8, "strategy": "token", "dynamic": True},
                "output_activations": None,
            }
        },
    }


def write_compressed_tensors(calibrated: Calibrated, folding: Folding, out_dir: Path) -> None:
    """Write the whole checkpoint: weights, config.json, tokenizer. calibrated: smoothed as
    `folding` says, with a scale per row and none for activations.
    """
    source = calibrated.source
    out_dir.mkdir(parents=True, exist_ok=True)
    write_checkpoint_shards(out_dir, list(_plans(calibrated, folding)))
    config = {
        **read_json(source.path / "config.json"),
        "quantization_config": quantization_config(),
    }
    text = json.dumps(config, indent=2) + "\n"
    (out_dir / "config.json").write_text(text, encoding="utf-8")
    finish(source, out_dir, None, None)


def _plans(calibrated: Calibrated, folding: Folding) -> Iterator[TensorPlan]:
    source, algorithm = calibrated.source, calibrated.algorithm
    assert algorithm is not None
    for name, extent in expected_shapes(source.shape).items():
        linear = name.removesuffix(".weight")
        if linear not in calibrated.linears:
            make = partial(_float_tensor, calibrated, folding, name)
            yield TensorPlan(name, SOURCE_DTYPES[source.dtype], extent, make)
            continue
        yield TensorPlan(
            name, algorithm.weight_dtype, extent, partial(_codes, calibrated, algorithm, linear)
        )
        yield fixed_plan(f"{linear}.weight_scale", _scale(calibrated, folding, linear)[:, None])


def _codes(calibrated: Calibrated, algorithm: Algorithm, linear: str) -> Tensor:
    return encode_weight(calibrated.weight(linear), calibrated.linears[linear].weight, algorithm)


def _scale(calibrated: Calibrated, folding: Folding, linear: str) -> Tensor:
    """float32 [out]. What is folded into the rows of a quantized linear is folded into this."""
    scale, rows = calibrated.linears[linear].weight, folding.rows.get(linear)
    return scale if rows is None else scale * rows


def _float_tensor(calibrated: Calibrated, folding: Folding, name: str) -> Tensor:
    """A norm, bias or other tensor that stays float, multiplied by what is folded into it."""
    import torch

    source = calibrated.source
    dtype = getattr(torch, source.dtype)
    tensor = read_source(source, name).to(dtype)
    rows = folding.rows.get(name.rpartition(".")[0])
    return tensor if rows is None else (tensor.float() * rows).to(dtype)


def check_compressed_tensors(
    directory: Path, calibrated: Calibrated, folding: Folding, captured: Mapping[str, Captured]
) -> tuple[Finding, ...]:
    """Compare every file, tensor, scale and key with what was quantized.

    captured: the codes at the time when quality was measured. Codes are also held against the
    source's own weights: each must be the nearest code to its folded weight.
    """
    source = calibrated.source
    try:
        tensors = read_index(directory)
        findings = [
            *check_files(directory, source.shape, source.dtype),
            _config(directory),
            _smoothing(folding),
            _tensor_names(tensors, calibrated),
        ]
        if findings[-1].severity == "ok":
            findings += [
                _check_codes(tensors, calibrated, folding, captured),
                _check_scales(tensors, calibrated, folding),
                _check_float_tensors(tensors, calibrated, folding),
            ]
    except CheckpointError as exc:
        findings = [Finding("readable", "error", str(exc))]
    return tuple(
        Finding(f"vllm: {finding.check}", finding.severity, finding.detail) for finding in findings
    )


def _config(directory: Path) -> Finding:
    """Every key of the quantization, and nothing beside it that names another one."""
    wanted = quantization_config()
    stated = read_json(directory / "config.json").get("quantization_config")
    faults = []
    if not isinstance(stated, dict):
        faults.append("config.json has no quantization_config")
    else:
        faults += [
            f"quantization_config.{key} is {stated.get(key)!r}, must be {wanted.get(key)!r}"
            for key in sorted({*wanted, *stated})
            if stated.get(key) != wanted.get(key) or key not in stated
        ]
    if (directory / "hf_quant_config.json").exists():
        faults.append("hf_quant_config.json is present, and names ModelOpt's format")
    return verdict("quantization_config", faults, "int-quantized, a scale per row and per token")


def _smoothing(folding: Folding) -> Finding:
    """Whose smoothing is folded. A linear without it is worse quantized, but not wrong."""
    if not folding.left_out:
        detail = f"folded exactly, for the inputs of all {len(folding.folded)} linears"
        return Finding("smoothing", "ok", detail)
    first = folding.left_out[0]
    total = len(folding.folded) + len(folding.left_out)
    return Finding(
        "smoothing",
        "note",
        f"left out for {len(folding.left_out)} of {total} linears; {first.layer}: {first.reason}",
    )


def _tensor_names(tensors: Mapping[str, TensorInfo], calibrated: Calibrated) -> Finding:
    wanted = {*expected_shapes(calibrated.source.shape)}
    wanted |= {f"{linear}.weight_scale" for linear in calibrated.linears}
    faults = [f"{name} is missing" for name in sorted(wanted - set(tensors))]
    faults += [f"{name} is unknown to vLLM" for name in sorted(set(tensors) - wanted)]
    return verdict("tensors", faults, f"{len(wanted)} tensors, none missing and none extra")


def _check_codes(
    tensors: Mapping[str, TensorInfo],
    calibrated: Calibrated,
    folding: Folding,
    captured: Mapping[str, Captured],
) -> Finding:
    """The codes are those that quality was measured with, and the nearest to the folded source."""
    import torch

    faults, weights = [], 0
    for linear, scales in calibrated.linears.items():
        codes = read_tensor(tensors[f"{linear}.weight"])
        weights += codes.numel()
        if captured[linear].wrong:
            faults.append(
                f"{linear}: {captured[linear].wrong} of {codes.numel()} codes are not those of the"
                " weight that quality was measured with"
            )
        if codes.dtype != torch.int8 or digest_of_codes(codes) != captured[linear].codes_sha256:
            faults.append(f"{linear}.weight does not hold the codes that were quantized")
            continue
        scale = read_tensor(tensors[f"{linear}.weight_scale"]).reshape(-1, 1)
        columns = _ones_if_none(scales.pre_quant, codes.shape[1]).float()
        own_rows = _ones_if_none(folding.rows.get(linear), codes.shape[0])
        original = read_source(calibrated.source, f"{linear}.weight")
        for rows in row_slices(original):
            folded = original[rows].float() / columns * own_rows[rows, None]
            steps = (folded / scale[rows] - codes[rows].float()).abs()
            far = int((steps > 0.5 + TIE_TOLERANCE).sum())
            if far:
                faults.append(
                    f"{linear}: {far} weights are up to {float(steps.max()):.3g} steps of their"
                    " scale away from their code, and half a step is the most that rounding gives"
                )
                break
    return verdict("codes", faults, f"{weights} codes as quantized, each the nearest to its weight")


def _ones_if_none(vector: Tensor | None, length: int) -> Tensor:
    import torch

    return torch.ones(length) if vector is None else vector


def _check_scales(
    tensors: Mapping[str, TensorInfo], calibrated: Calibrated, folding: Folding
) -> Finding:
    import torch

    faults = []
    for linear in calibrated.linears:
        name = f"{linear}.weight_scale"
        stored, wanted = read_tensor(tensors[name]), _scale(calibrated, folding, linear)[:, None]
        if stored.dtype != torch.float32 or stored.shape != wanted.shape:
            faults.append(
                f"{name} is {stored.dtype} {list(stored.shape)}, must be float32"
                f" {list(wanted.shape)}"
            )
        elif not torch.equal(stored, wanted):
            rows = int((stored != wanted).sum())
            ratio = float((stored / wanted).max())
            faults.append(
                f"{name} is not the scale that calibration gave, in {rows} of {len(wanted)} rows;"
                f" the largest is {ratio:.4g} times too large"
            )
    return verdict("scales", faults, f"as calibrated, on {len(calibrated.linears)} linears")


def _check_float_tensors(
    tensors: Mapping[str, TensorInfo], calibrated: Calibrated, folding: Folding
) -> Finding:
    """Norms, biases, embeddings and LM head equal the source's, times what is folded into them."""
    import torch

    weights = {f"{linear}.weight" for linear in calibrated.linears}
    names = [name for name in expected_shapes(calibrated.source.shape) if name not in weights]
    faults = []
    for name in names:
        wanted = _float_tensor(calibrated, folding, name)
        stored = read_tensor(tensors[name])
        if stored.dtype != wanted.dtype or not torch.equal(stored, wanted):
            faults.append(f"{name} is not the source's, times the factors folded into it")
    return verdict("unquantized", faults, f"{len(names)} tensors, the source's times its factors")
