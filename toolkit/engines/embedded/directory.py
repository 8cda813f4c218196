"""An engine directory: config.json in TensorRT-LLM's format, weights, code, tokenizer files.

Readers of TensorRT-LLM engines use `version`, `pretrained_config` and `build_config`. The section
`toolkit` holds what only the toolkit needs. A `.pt2` and a `.so` are code, so the section has the
digest of every file, and the digests are compared before anything is loaded.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolkit import __version__
from toolkit.checkpoints.quantized import Quantization
from toolkit.checkpoints.shape import ModelShape, read_json
from toolkit.errors import CheckpointError, StageError
from toolkit.interfaces import EngineSpec
from toolkit.records.codec import from_json, to_json
from toolkit.words import BuiltMode, ComputeDtype, Device, Fp8Compute, KvDtype

__all__ = [
    "CONFIG",
    "FORMAT",
    "KERNELS",
    "PACKAGE",
    "WEIGHTS",
    "EngineDirectory",
    "copy_side_files",
    "open_directory",
    "write_config",
]

FORMAT = 11  # version of the section `toolkit`; a reader refuses other versions
CONFIG, WEIGHTS, PACKAGE, KERNELS = "config.json", "weights.safetensors", "decode.pt2", "kernels.so"
# TensorRT-LLM's SpeculativeDecodingMode: DRAFT_TOKENS_EXTERNAL, NONE
SPECULATION = {"target": 2, "draft": 1}


@dataclass(frozen=True, slots=True)
class EngineDirectory:
    """A directory whose files exist and have the digests that they were built with."""

    path: Path
    shape: ModelShape
    mode: BuiltMode
    dtype: ComputeDtype
    device: Device
    fp8_compute: Fp8Compute | None
    kv_dtype: KvDtype
    max_batch_size: int
    max_seq_len: int
    max_draft_len: int
    max_step_tokens: int
    built_with: dict[str, str]


def write_config(
    out_dir: Path,
    *,
    shape: ModelShape,
    quantization: Quantization,
    spec: EngineSpec,
    mode: BuiltMode,
    fp8_compute: Fp8Compute | None,
    kv_dtype: KvDtype,
    max_step_tokens: int,
    built_with: dict[str, str],
    notes: tuple[str, ...],
) -> None:
    """Write config.json last: it lists the digests of the other files."""
    files = {
        path.name: _digest(path)
        for path in sorted(out_dir.iterdir())
        if path.is_file() and path.name != CONFIG
    }
    toolkit_section = {
        "format": FORMAT,
        "role": spec.role,
        "mode": mode,
        "device": spec.device,
        "dtype": spec.dtype,
        "fp8_compute": fp8_compute,
        "kv_dtype": kv_dtype,
        "max_step_tokens": max_step_tokens,
        "built_with": built_with,
        "notes": list(notes),
        "shape": to_json(shape),
        "files": files,
    }
    config = {
        "version": __version__,
        "pretrained_config": _pretrained(shape, quantization, spec),
        "build_config": _build(spec, max_step_tokens),
        "toolkit": toolkit_section,
    }
    (out_dir / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def open_directory(path: Path) -> EngineDirectory:
    """Read config.json and compare every file with its digest. Raises StageError if a file is
    missing or changed, or the directory was not written in this format.
    """
    try:
        config = read_json(path / CONFIG)
    except CheckpointError as exc:
        raise StageError(
            "load",
            f"not an engine directory ({exc.what})",
            where=path,
            hint="run `toolkit build` again",
        ) from exc
    section = config.get("toolkit")
    if not isinstance(section, dict) or section.get("format") != FORMAT:
        version = section.get("format") if isinstance(section, dict) else None
        raise StageError(
            "load",
            f"engine format {version} is not {FORMAT}, which this version reads",
            where=path / CONFIG,
            hint="run `toolkit build` again with this version",
        )
    for name, digest in section["files"].items():
        if not (path / name).is_file():
            raise StageError(
                "load",
                "a file of the engine is missing",
                where=path / name,
                hint="run `toolkit build` again",
            )
        if _digest(path / name) != digest:
            raise StageError(
                "load",
                "the file changed after the engine was built, so it is not loaded",
                where=path / name,
                hint="run `toolkit build --rehash`, which reads every file again; if this is a"
                " copy, copy it again",
            )
    for name in (WEIGHTS, *((PACKAGE, KERNELS) if section["mode"] == "compiled" else ())):
        if name not in section["files"]:
            raise StageError(
                "load",
                f"{name} is not in its list of files, so it has no digest",
                where=path / CONFIG,
                hint="run `toolkit build` again",
            )
    build = config["build_config"]
    return EngineDirectory(
        path=path,
        shape=from_json(ModelShape, section["shape"]),
        mode=section["mode"],
        dtype=section["dtype"],
        device=section["device"],
        fp8_compute=section["fp8_compute"],
        kv_dtype=section["kv_dtype"],
        max_batch_size=build["max_batch_size"],
        max_seq_len=build["max_seq_len"],
        max_draft_len=build["max_draft_len"],
        max_step_tokens=section["max_step_tokens"],
        built_with=section["built_with"],
    )


def copy_side_files(source: Path, out_dir: Path) -> None:
    """Copy the files that turn text into tokens and back, so that a server needs nothing besides
    the engine directory.
    """
    for name in (
        "tokenizer.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "generation_config.json",
        "chat_template.jinja",
    ):
        if (source / name).exists():
            shutil.copyfile(source / name, out_dir / name)


def _pretrained(shape: ModelShape, quantization: Quantization, spec: EngineSpec) -> dict[str, Any]:
    """The keys of a TensorRT-LLM checkpoint's config.json (contract 1.2.1)."""
    return {
        "architecture": shape.architecture,
        "dtype": spec.dtype,
        "logits_dtype": "float64" if spec.dtype == "float64" else "float32",
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_size": shape.head_dim,
        "hidden_act": "silu",
        "norm_epsilon": shape.rms_norm_eps,
        "qk_layernorm": shape.qk_norm,
        "attn_bias": shape.qkv_bias,
        "mlp_bias": shape.mlp_bias,
        "position_embedding_type": "rope_gpt_neox",
        "max_position_embeddings": shape.max_position_embeddings,
        "rotary_base": shape.rope_theta,
        "rotary_scaling": shape.rope_scaling,
        "share_embedding_table": shape.tie_word_embeddings,
        "mapping": {"world_size": 1, "tp_size": 1, "pp_size": 1, "cp_size": 1},
        "quantization": {
            "quant_algo": quantization.quant_algo,
            "kv_cache_quant_algo": quantization.kv_cache_quant_algo,
            "exclude_modules": list(quantization.exclude_modules) or None,
        },
    }


def _build(spec: EngineSpec, max_step_tokens: int) -> dict[str, Any]:
    speculates = bool(spec.max_draft_len) or spec.role == "draft"
    return {
        "max_input_len": spec.max_input_len,
        "max_seq_len": spec.max_seq_len,
        "opt_batch_size": spec.max_batch_size,
        "max_batch_size": spec.max_batch_size,
        "max_beam_width": 1,
        "max_num_tokens": spec.max_batch_size * max_step_tokens,
        "opt_num_tokens": None,
        "max_prompt_embedding_table_size": 0,
        "kv_cache_type": "CONTINUOUS",
        "gather_context_logits": False,
        "gather_generation_logits": spec.max_draft_len > 0,
        "strongly_typed": True,
        "max_draft_len": spec.max_draft_len,
        "speculative_decoding_mode": SPECULATION.get(spec.role, 1) if speculates else 1,
        "plugin_config": {},
    }


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
    return f"sha256:{digest.hexdigest()}"
