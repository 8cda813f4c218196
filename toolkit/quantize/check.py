"""Check that a quantized checkpoint holds what its configs say.

The checks read only the files: the named algorithm is the real one, every scale is present and
positive, codes are in range, configs and tokenizer are complete. They serve our own exports and
checkpoints from elsewhere alike. Each check guards against one way in which an export goes wrong
silently. A failed check raises nothing: every check returns a Finding.
"""

from __future__ import annotations

import dataclasses
import fnmatch
from pathlib import Path

from toolkit.checkpoints.reader import TensorInfo, expected_shapes, read_index, read_tensor
from toolkit.checkpoints.shape import ModelShape, read_json, read_shape
from toolkit.checkpoints.tokenizer import load_tokenizer
from toolkit.errors import CheckpointError
from toolkit.quantize.algorithms import Algorithm
from toolkit.quantize.checkpoint import rope_spellings
from toolkit.records.measured import Finding
from toolkit.words import KvCacheQuantAlgo

__all__ = ["check_files", "check_format", "linear_names", "verdict"]

PROJECTIONS = (
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
)


def linear_names(shape: ModelShape) -> list[str]:
    """The linears that get quantized: all of the decoder layers', but not lm_head."""
    return [f"model.layers.{i}.{name}" for i in range(shape.num_layers) for name in PROJECTIONS]


def check_format(
    directory: Path,
    shape: ModelShape,
    dtype: str,
    algorithm: Algorithm | None,
    kv_cache_quant_algo: KvCacheQuantAlgo | None,
) -> tuple[Finding, ...]:
    """Check the checkpoint in `directory` against the shape of its source and the algorithm that
    it should have.
    """
    try:
        tensors = read_index(directory)
        findings = [
            *check_files(directory, shape, dtype),
            _names(directory, algorithm, kv_cache_quant_algo),
            _tensor_set(tensors, shape),
        ]
        if algorithm is not None:
            excluded = (
                read_json(directory / "hf_quant_config.json")["quantization"].get("exclude_modules")
                or []
            )
            linears = [
                name
                for name in linear_names(shape)
                if not any(fnmatch.fnmatchcase(name, pattern) for pattern in excluded)
            ]
            findings += [
                _codes(tensors, linears, algorithm),
                _weight_scales(tensors, linears, algorithm),
                _activation_scales(tensors, linears, algorithm),
                _pre_quant_scales(tensors, linears, algorithm),
            ]
        findings.append(_kv_scales(tensors, shape, kv_cache_quant_algo))
    except CheckpointError as exc:
        return (Finding("readable", "error", str(exc)),)
    return tuple(findings)


def check_files(directory: Path, shape: ModelShape, dtype: str) -> tuple[Finding, ...]:
    """Check what every format has: config.json and the tokenizer. Raises CheckpointError if they
    cannot be read.
    """
    return (
        _config(directory, shape),
        _rope(directory, shape),
        _dtype(directory, dtype),
        _tokenizer(directory, shape),
    )


def verdict(check: str, faults: list[str], fine: str) -> Finding:
    """An error that names the first fault, or ok with what is fine."""
    if not faults:
        return Finding(check, "ok", fine)
    more = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
    return Finding(check, "error", faults[0] + more)


def _config(directory: Path, shape: ModelShape) -> Finding:
    written = read_shape(directory)
    faults = [
        f"{field.name} is {getattr(written, field.name)!r}, the source says"
        f" {getattr(shape, field.name)!r}"
        for field in dataclasses.fields(ModelShape)
        if field.name != "dtype" and getattr(written, field.name) != getattr(shape, field.name)
    ]
    if not read_json(directory / "config.json").get("architectures"):
        faults.append("config.json names no `architectures`")
    return verdict("config", faults, f"{shape.architecture}, the same model as its source")


def _rope(directory: Path, shape: ModelShape) -> Finding:
    raw = read_json(directory / "config.json")
    faults = [
        f"{key} is {raw.get(key)!r}, must be {value!r}"
        for key, value in rope_spellings(shape).items()
        if raw.get(key) != value
    ]
    kind = (shape.rope_scaling or {}).get("rope_type", "default")
    return verdict(
        "rope",
        faults,
        f"theta {shape.rope_theta:g}, {kind}, in the spellings of transformers 4.x and 5.x",
    )


def _dtype(directory: Path, dtype: str) -> Finding:
    raw = read_json(directory / "config.json")
    faults = [
        f"{key} is {raw.get(key)!r}, must be {dtype!r}"
        for key in ("dtype", "torch_dtype")
        if raw.get(key) != dtype
    ]
    return verdict("dtype", faults, dtype)


def _names(
    directory: Path, algorithm: Algorithm | None, kv_cache_quant_algo: KvCacheQuantAlgo | None
) -> Finding:
    """hf_quant_config.json and config.json must name the same algorithm, and exclude lm_head."""
    wanted = None if algorithm is None else algorithm.name
    embedded = read_json(directory / "config.json").get("quantization_config")
    file = directory / "hf_quant_config.json"
    if wanted is None and kv_cache_quant_algo is None:
        faults = [
            f"{name} is present"
            for name, is_present in ((file.name, file.exists()), ("quantization_config", embedded))
            if is_present
        ]
        return verdict("quant_algo", faults, "not quantized, and no config says that it is")
    if not file.exists() or not isinstance(embedded, dict):
        return Finding(
            "quant_algo", "error", "hf_quant_config.json or quantization_config is missing"
        )
    stated = read_json(file)["quantization"]
    scheme = embedded.get("kv_cache_scheme")
    named = {
        "hf_quant_config.json quant_algo": (stated.get("quant_algo"), wanted),
        "config.json quant_algo": (embedded.get("quant_algo"), wanted),
        "hf_quant_config.json kv_cache_quant_algo": (
            stated.get("kv_cache_quant_algo"),
            kv_cache_quant_algo,
        ),
        "config.json kv_cache_scheme": (
            None if scheme is None else scheme.get("type"),
            "float" if kv_cache_quant_algo else None,
        ),
        "config.json quant_method": (embedded.get("quant_method"), "modelopt"),
    }
    faults = [
        f"{key} is {stated_value!r}, must be {wanted_value!r}"
        for key, (stated_value, wanted_value) in named.items()
        if stated_value != wanted_value
    ]
    if "lm_head" not in (stated.get("exclude_modules") or []):
        faults.append("exclude_modules does not name lm_head")
    return verdict(
        "quant_algo",
        faults,
        f"{wanted}, KV cache {kv_cache_quant_algo or 'in the dtype of the model'}",
    )


def _tensor_set(tensors: dict[str, TensorInfo], shape: ModelShape) -> Finding:
    faults = []
    for name, extent in expected_shapes(shape).items():
        if name not in tensors:
            faults.append(f"{name} is missing")
        elif tensors[name].shape != extent:
            faults.append(f"{name} is {list(tensors[name].shape)}, must be {list(extent)}")
    leftovers = [name for name in tensors if name.endswith("_amax") or "_quantizer" in name]
    faults += [f"{name} was left behind by quantization" for name in leftovers]
    return verdict(
        "tensors", faults, f"{len(tensors)} tensors, including every tensor of the source"
    )


def _tokenizer(directory: Path, shape: ModelShape) -> Finding:
    try:
        size = load_tokenizer(directory).get_vocab_size(with_added_tokens=True)
    except CheckpointError as exc:
        return Finding("tokenizer", "error", str(exc))
    if size > shape.vocab_size:
        return Finding(
            "tokenizer", "error", f"has {size} tokens, but the model has {shape.vocab_size} rows"
        )
    if not (directory / "tokenizer_config.json").exists():
        return Finding(
            "tokenizer",
            "warning",
            f"tokenizer.json with {size} tokens, but no tokenizer_config.json; the source has none"
            " either",
        )
    return Finding(
        "tokenizer", "ok", f"tokenizer.json with {size} tokens, and tokenizer_config.json"
    )


def _codes(tensors: dict[str, TensorInfo], linears: list[str], algorithm: Algorithm) -> Finding:
    """Weights must be codes of the right dtype: INT8 within +-127 (symmetric), FP8 without NaN."""
    import torch

    faults, count = [], 0
    for name in linears:
        info = tensors.get(f"{name}.weight")
        if info is None:
            continue  # reported by _tensor_set
        if info.dtype != algorithm.weight_dtype:
            faults.append(f"{name}.weight is {info.dtype}, must be {algorithm.weight_dtype}")
            continue
        codes = read_tensor(info)
        count += codes.numel()
        if algorithm.weight_dtype == "I8":
            low = int((codes == -128).sum())
            if low:
                faults.append(
                    f"{name}.weight holds {low} codes of -128, outside the symmetric range"
                )
        elif not bool(torch.isfinite(codes.float()).all()):
            faults.append(f"{name}.weight holds NaN codes")
    return verdict(
        "codes",
        faults,
        f"{count} {algorithm.weight_dtype} codes in range, in {len(linears)} linears",
    )


def _scale_faults(tensors: dict[str, TensorInfo], name: str, count: int) -> list[str]:
    """The faults of one scale tensor: missing, wrong size, not positive, or not finite."""
    import torch

    info = tensors.get(name)
    if info is None:
        return [f"{name} is missing"]
    scale = read_tensor(info).float()
    if scale.numel() != count:
        return [f"{name} has {scale.numel()} values, must have {count}"]
    if not bool(torch.isfinite(scale).all()) or not bool((scale > 0).all()):
        return [f"{name} holds values that are not positive and finite"]
    return []


def _weight_scales(
    tensors: dict[str, TensorInfo], linears: list[str], algorithm: Algorithm
) -> Finding:
    faults: list[str] = []
    for name in linears:
        weight = tensors.get(f"{name}.weight")
        rows = weight.shape[0] if algorithm.per_channel and weight else 1
        faults += _scale_faults(tensors, f"{name}.weight_scale", rows)
    kind = "per output channel" if algorithm.per_channel else "per tensor"
    return verdict("weight_scale", faults, f"on each of {len(linears)} linears, {kind}")


def _activation_scales(
    tensors: dict[str, TensorInfo], linears: list[str], algorithm: Algorithm
) -> Finding:
    """An FP8 export of a model that saw no calibration text silently lacks these scales."""
    if not algorithm.input_scale:
        faults = [
            f"{name}.input_scale is present" for name in linears if f"{name}.input_scale" in tensors
        ]
        return verdict("input_scale", faults, "none: the algorithm does not quantize activations")
    faults = [
        fault for name in linears for fault in _scale_faults(tensors, f"{name}.input_scale", 1)
    ]
    return verdict("input_scale", faults, f"on each of {len(linears)} linears")


def _pre_quant_scales(
    tensors: dict[str, TensorInfo], linears: list[str], algorithm: Algorithm
) -> Finding:
    """Plain INT8 (INT8_DEFAULT_CFG) is exported under SmoothQuant's name; only this scale tells
    the two apart.
    """
    if not algorithm.pre_quant_scale:
        faults = [
            f"{name}.pre_quant_scale is present"
            for name in linears
            if f"{name}.pre_quant_scale" in tensors
        ]
        return verdict("pre_quant_scale", faults, "none: the algorithm does not smooth")
    faults = []
    for name in linears:
        weight = tensors.get(f"{name}.weight")
        faults += _scale_faults(
            tensors, f"{name}.pre_quant_scale", weight.shape[1] if weight else 1
        )
    return verdict("pre_quant_scale", faults, f"on each of {len(linears)} linears")


def _kv_scales(
    tensors: dict[str, TensorInfo], shape: ModelShape, kv_cache_quant_algo: KvCacheQuantAlgo | None
) -> Finding:
    names = [
        f"model.layers.{layer}.self_attn.{letter}_proj.{letter}_scale"
        for layer in range(shape.num_layers)
        for letter in "kv"
    ]
    if kv_cache_quant_algo is None:
        return verdict(
            "kv_scale",
            [f"{name} is present" for name in names if name in tensors],
            "none: the KV cache is not quantized",
        )
    return verdict(
        "kv_scale",
        [fault for name in names for fault in _scale_faults(tensors, name, 1)],
        f"{len(names)} scales",
    )
