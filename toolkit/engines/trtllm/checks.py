"""Check a finished engine directory: whether it is the engine requested, whether it is complete,
and what the builder changed.

The checks read the engine's config.json. A value with which the engine cannot do what was requested
is an error. A value that the builder changed without that effect is a warning.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolkit.checkpoints.shape import read_json
from toolkit.engines.trtllm.checkpoint import TrtLlmCheckpoint
from toolkit.engines.trtllm.command import BuildCommand
from toolkit.engines.trtllm.where import same_version
from toolkit.errors import CheckpointError, StageError
from toolkit.facts.trtllm_build import LOGITS_DTYPE, SPECULATIVE_MODES
from toolkit.interfaces import EngineSpec, TensorRtLlmSpec
from toolkit.records.measured import Finding
from toolkit.words import KvCacheQuantAlgo, QuantAlgo

__all__ = ["BuiltEngine", "check_engine", "read_engine", "speculative_mode"]

# An engine contains the unchanged weights of its rank, and kernels and plans.
MIN_SHARE_OF_WEIGHTS = 0.9
MAX_SHARE_OF_WEIGHTS = 1.5
KERNELS_BYTES = 512 * 2**20


@dataclass(frozen=True, slots=True)
class BuiltEngine:
    """An engine directory as its config.json describes it. rank_bytes: file sizes of the ranks
    that exist.
    """

    path: Path
    version: str
    quant_algo: QuantAlgo | None
    kv_cache_quant_algo: KvCacheQuantAlgo | None
    tp_size: int
    pp_size: int
    vocab_size: int
    logits_dtype: str
    max_batch_size: int
    max_input_len: int
    max_seq_len: int
    max_num_tokens: int
    max_draft_len: int
    max_beam_width: int
    speculative_mode: str
    kv_cache_type: str
    plugins: dict[str, Any]
    rank_bytes: dict[int, int]


def read_engine(path: Path) -> BuiltEngine:
    """Read the config and file sizes. Raises StageError if the directory is not an engine's."""
    try:
        config = read_json(path / "config.json")
        pretrained, build = config["pretrained_config"], config["build_config"]
        quantization, mapping = pretrained["quantization"], pretrained["mapping"]
        world_size = int(mapping["world_size"])
        ranks = {rank: path / f"rank{rank}.engine" for rank in range(world_size)}
        return BuiltEngine(
            path=path,
            version=str(config["version"]),
            quant_algo=quantization["quant_algo"],
            kv_cache_quant_algo=quantization["kv_cache_quant_algo"],
            tp_size=int(mapping["tp_size"]),
            pp_size=int(mapping["pp_size"]),
            vocab_size=int(pretrained["vocab_size"]),
            logits_dtype=str(pretrained["logits_dtype"]),
            max_batch_size=int(build["max_batch_size"]),
            max_input_len=int(build["max_input_len"]),
            max_seq_len=int(build["max_seq_len"]),
            max_num_tokens=int(build["max_num_tokens"]),
            max_draft_len=int(build["max_draft_len"]),
            max_beam_width=int(build["max_beam_width"]),
            speculative_mode=speculative_mode(build["speculative_decoding_mode"]),
            kv_cache_type=str(build["kv_cache_type"]).rpartition(".")[2].upper(),
            plugins=dict(build["plugin_config"]),
            rank_bytes={
                rank: file.stat().st_size for rank, file in ranks.items() if file.is_file()
            },
        )
    except (CheckpointError, KeyError, TypeError, ValueError) as error:
        detail = (
            error.what if isinstance(error, CheckpointError) else f"{type(error).__name__} {error}"
        )
        raise StageError(
            "compile",
            f"trtllm-build left no readable engine ({detail})",
            where=path / "config.json",
        ) from error


def speculative_mode(stored: int | str) -> str:
    """The name of a mode that is stored as a bit flag or as `SpeculativeDecodingMode.NAME`.

    Raises ValueError if it is neither.
    """
    if isinstance(stored, str) and not stored.isdigit():
        name = stored.rpartition(".")[2].upper()
        if name not in SPECULATIVE_MODES:
            raise ValueError(f"speculative_decoding_mode {stored!r}")
        return name
    names = {value: name for name, value in SPECULATIVE_MODES.items()}
    if int(stored) not in names:
        raise ValueError(f"speculative_decoding_mode {stored!r}")
    return names[int(stored)]


def check_engine(
    engine: BuiltEngine,
    checkpoint: TrtLlmCheckpoint,
    spec: EngineSpec,
    asked: TensorRtLlmSpec,
    command: BuildCommand,
) -> list[Finding]:
    """The outcome of every check: ok, warning or error."""
    return [
        *_identity(engine, checkpoint, asked),
        *_lengths(engine, spec, asked),
        *_speculation(engine, spec),
        *_plugins(engine, command),
        *_files(engine, checkpoint),
    ]


def _equal(check: str, actual: object, expected: object) -> Finding:
    if actual == expected:
        return Finding(check, "ok", str(actual))
    return Finding(check, "error", f"is {actual}, but {expected} was requested")


def _identity(
    engine: BuiltEngine, checkpoint: TrtLlmCheckpoint, asked: TensorRtLlmSpec
) -> Iterator[Finding]:
    if same_version(engine.version, asked.version):
        yield Finding("version", "ok", engine.version)
    else:
        detail = (
            f"built by {engine.version}, but {asked.version} was requested; a runtime loads only"
            " engines of its own version"
        )
        yield Finding("version", "error", detail)
    yield _equal("quant_algo", engine.quant_algo, checkpoint.quant_algo)
    yield _equal("kv_cache_quant_algo", engine.kv_cache_quant_algo, checkpoint.kv_cache_quant_algo)
    yield _equal("vocab_size", engine.vocab_size, checkpoint.vocab_size)
    yield _equal("logits_dtype", engine.logits_dtype, LOGITS_DTYPE)
    yield _equal("tp_size", engine.tp_size, asked.tp_size)
    yield _equal("pp_size", engine.pp_size, asked.pp_size)


def _lengths(engine: BuiltEngine, spec: EngineSpec, asked: TensorRtLlmSpec) -> Iterator[Finding]:
    yield _equal("max_batch_size", engine.max_batch_size, spec.max_batch_size)
    yield _equal("max_beam_width", engine.max_beam_width, 1)
    yield _equal("max_input_len", engine.max_input_len, min(spec.max_input_len, spec.max_seq_len))
    expected = spec.max_seq_len + spec.max_draft_len
    if engine.max_seq_len == expected and spec.max_draft_len:
        detail = (
            f"{engine.max_seq_len}: the builder added max_draft_len {spec.max_draft_len} to"
            f" {spec.max_seq_len}"
        )
        yield Finding("max_seq_len", "ok", detail)
    else:
        yield _equal("max_seq_len", engine.max_seq_len, expected)
    floor = spec.max_batch_size * (spec.max_draft_len + 1) if spec.max_draft_len else 0
    if asked.max_num_tokens is None or engine.max_num_tokens == asked.max_num_tokens:
        if engine.max_num_tokens < floor:
            detail = f"{engine.max_num_tokens}, but a verify step needs {floor} tokens"
            yield Finding("max_num_tokens", "error", detail)
        else:
            yield Finding("max_num_tokens", "ok", f"{engine.max_num_tokens}")
    elif engine.max_num_tokens == floor > asked.max_num_tokens:
        detail = (
            f"the builder raised {asked.max_num_tokens} to {floor}: max_batch_size * (max_draft_len"
            " + 1)"
        )
        yield Finding("max_num_tokens", "warning", detail)
    else:
        yield _equal("max_num_tokens", engine.max_num_tokens, asked.max_num_tokens)


def _speculation(engine: BuiltEngine, spec: EngineSpec) -> Iterator[Finding]:
    mode = "DRAFT_TOKENS_EXTERNAL" if spec.max_draft_len else "NONE"
    yield _equal("speculative_decoding_mode", engine.speculative_mode, mode)
    yield _equal("max_draft_len", engine.max_draft_len, spec.max_draft_len)
    yield _equal("kv_cache_type", engine.kv_cache_type, "PAGED")
    if engine.plugins.get("use_paged_context_fmha") is True:
        yield Finding("use_paged_context_fmha", "ok", "on")
    else:
        detail = (
            "the builder switched it off; without it no KV block is reused, and draft-target"
            " cannot run"
        )
        yield Finding("use_paged_context_fmha", "error", detail)


def _plugins(engine: BuiltEngine, command: BuildCommand) -> Iterator[Finding]:
    """Compare the flags of the command with the engine's config; the builder silently changed those
    that differ.
    """
    for flag, value in command.flags.items():
        name = flag.removeprefix("--")
        if name not in engine.plugins or name == "use_paged_context_fmha":
            continue
        recorded = engine.plugins[name]
        requested = {"enable": True, "disable": False}.get(str(value), value)
        if requested is False and recorded in (False, None):
            continue
        if str(recorded) != str(requested) and value != "auto":
            detail = f"the builder recorded {recorded}, but {value} was requested"
            yield Finding(name, "warning", detail)


def _files(engine: BuiltEngine, checkpoint: TrtLlmCheckpoint) -> Iterator[Finding]:
    world_size = checkpoint.tp_size * checkpoint.pp_size
    missing = [f"rank{rank}.engine" for rank in range(world_size) if rank not in engine.rank_bytes]
    if missing:
        detail = f"{', '.join(missing)} missing, of {world_size} ranks"
        yield Finding("ranks", "error", detail)
        return
    yield Finding("ranks", "ok", f"{world_size} of {world_size}")
    for rank, weights in enumerate(checkpoint.rank_bytes):
        size = engine.rank_bytes[rank]
        share = (
            f"rank{rank}.engine has {size} bytes, {size / weights:.2f} of its weights' {weights}"
        )
        if size < MIN_SHARE_OF_WEIGHTS * weights:
            yield Finding("engine size", "error", f"{share}: it lacks weights")
        elif size > MAX_SHARE_OF_WEIGHTS * weights + KERNELS_BYTES:
            detail = (
                f"{share}: it may contain weights in a wider type than"
                f" {checkpoint.quant_algo or checkpoint.dtype}"
            )
            yield Finding("engine size", "warning", detail)
        else:
            yield Finding("engine size", "ok", share)
