"""Write everything of a quantized checkpoint that is not a weight, so that every runtime reads it
the same way.

A unified checkpoint as ModelOpt exports it lacks files that a runtime needs: the tokenizer, RoPE
settings as transformers 4.57 spells them (5.x writes only its own spelling), the source's
generation config. `finish` adds these. `toolkit.quantize.check` then checks the result.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from toolkit.checkpoints.reader import TensorInfo
from toolkit.checkpoints.shape import ModelShape, read_json
from toolkit.checkpoints.tokenizer import write_tokenizer
from toolkit.checkpoints.writer import plan_of, write_shard
from toolkit.quantize.source import VOCABULARY, Source
from toolkit.words import KvCacheQuantAlgo, QuantAlgo

__all__ = [
    "CODE_PATTERNS",
    "copy_code",
    "copy_unchanged",
    "finish",
    "rope_spellings",
    "write_configs",
]


CODE_PATTERNS = ("*.py",)


def copy_code(source: Path, out_dir: Path) -> None:
    """Copy the checkpoint's own Python modules, for a runtime that was told to trust them. They
    are never run here.
    """
    for pattern in CODE_PATTERNS:
        for file in sorted(source.glob(pattern)):
            shutil.copyfile(file, out_dir / file.name)


def copy_unchanged(source: Source, out_dir: Path) -> None:
    """Copy weights and configs without quantizing. It makes no links: the store's content must not
    change when somebody overwrites the source.

    If pairing trimmed padding rows, the shards that hold them are rewritten without them.
    """
    shards: dict[str, list[TensorInfo]] = {}
    for info in source.tensors.values():
        shards.setdefault(info.file.name, []).append(info)
    for name, infos in shards.items():
        if source.is_trimmed and any(info.name in VOCABULARY for info in infos):
            rows = dict.fromkeys(VOCABULARY, source.shape.vocab_size)
            write_shard(out_dir / name, [plan_of(info, rows.get(info.name)) for info in infos])
        else:
            shutil.copyfile(source.path / name, out_dir / name)
    index = () if "model.safetensors" in shards else ("model.safetensors.index.json",)
    for name in (*index, "config.json", "hf_quant_config.json"):
        if (source.path / name).exists():
            shutil.copyfile(source.path / name, out_dir / name)
    finish(source, out_dir, source.quant_algo, source.kv_cache_quant_algo)


def write_configs(
    source: Source, out_dir: Path, quantization: dict[str, Any], embedded: dict[str, Any]
) -> None:
    """Write the source's config.json, and both descriptions of its quantization: `embedded` in
    config.json, `quantization` in hf_quant_config.json.
    """
    config = read_json(source.path / "config.json")
    _write_json(out_dir / "config.json", {**config, "quantization_config": embedded})
    _write_json(out_dir / "hf_quant_config.json", quantization)


def finish(
    source: Source,
    out_dir: Path,
    quant_algo: QuantAlgo | None,
    kv_cache_quant_algo: KvCacheQuantAlgo | None,
) -> None:
    """Complete a checkpoint in place: config.json, hf_quant_config.json, generation_config.json,
    tokenizer files.
    """
    config = read_json(out_dir / "config.json")
    config["architectures"] = [source.shape.architecture]
    config["dtype"] = config["torch_dtype"] = source.dtype  # transformers 5.x and 4.x
    config["vocab_size"] = source.shape.vocab_size
    if (config.get("pad_token_id") or 0) >= source.shape.vocab_size:
        # Its row was padding and is gone; transformers refuses an id without a row.
        config["pad_token_id"] = None
    config.update(rope_spellings(source.shape))
    if quant_algo is not None or kv_cache_quant_algo is not None:
        _name_quantization(config, out_dir, quant_algo, kv_cache_quant_algo)
    _write_json(out_dir / "config.json", config)
    if (source.path / "generation_config.json").exists():
        shutil.copyfile(source.path / "generation_config.json", out_dir / "generation_config.json")
    write_tokenizer(source.path, out_dir)


def rope_spellings(shape: ModelShape) -> dict[str, Any]:
    """The RoPE settings as transformers 4.x reads them (rope_theta, rope_scaling) and as 5.x
    reads them (rope_parameters).
    """
    scaling = shape.rope_scaling
    return {
        "rope_theta": shape.rope_theta,
        "rope_scaling": scaling,
        "rope_parameters": {
            "rope_theta": shape.rope_theta,
            **(scaling or {"rope_type": "default"}),
        },
    }


def _name_quantization(
    config: dict[str, Any],
    out_dir: Path,
    quant_algo: QuantAlgo | None,
    kv_cache_quant_algo: KvCacheQuantAlgo | None,
) -> None:
    """Name the quantization in both places: hf_quant_config.json (for TensorRT-LLM) and config.json
    (for transformers and vLLM).

    A checkpoint from elsewhere may have only one of them; then the other is written from it. What
    is already there is not changed: the checks judge it.
    """
    file = out_dir / "hf_quant_config.json"
    embedded = config.get("quantization_config")
    if not file.exists():
        ignored = embedded.get("ignore", ["lm_head"]) if isinstance(embedded, dict) else ["lm_head"]
        quantization = {
            "quant_algo": quant_algo,
            "kv_cache_quant_algo": kv_cache_quant_algo,
            "exclude_modules": ignored,
        }
        _write_json(file, {"producer": {"name": "modelopt"}, "quantization": quantization})
    if not isinstance(embedded, dict):
        stated = read_json(file)
        config["quantization_config"] = {
            "quant_method": "modelopt",
            "quant_algo": quant_algo,
            "ignore": stated["quantization"].get("exclude_modules", ["lm_head"]),
            "producer": stated.get("producer", {"name": "modelopt"}),
        }
        if kv_cache_quant_algo == "FP8":
            config["quantization_config"]["kv_cache_scheme"] = {
                "dynamic": False,
                "num_bits": 8,
                "type": "float",
            }


def _write_json(path: Path, data: dict[str, Any]) -> None:
    path.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
