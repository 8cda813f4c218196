"""Make the arguments of `LLM()` for the PyTorch flow, spelled for a version, and check them against
our tables.

The engine directory holds them in a file. Its paths are relative, since the directory moves: into
the store, to `engines/`, into a container. `resolved` fills in the current paths.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from toolkit.errors import StageError, UsageError
from toolkit.facts.llm_args import (
    DEFAULT_TOKENS_PER_BLOCK,
    LLM_ARGS,
    NESTED,
    NOT_FIELDS,
    REQUIRED,
    SPECULATIVE,
    Field,
)
from toolkit.facts.versions import VERSIONS, Version
from toolkit.interfaces import EngineSpec, TensorRtLlmSpec
from toolkit.words import KvCacheQuantAlgo

__all__ = [
    "FILE",
    "acceptance_gate",
    "faults",
    "llm_args",
    "read_llm_args",
    "resolved",
    "schedule_of",
    "write_llm_args",
]

FILE = "llm_args.json"
HERE, DRAFT = ".", "../draft"


def llm_args(
    spec: EngineSpec, asked: TensorRtLlmSpec, kv_cache_quant_algo: KvCacheQuantAlgo | None
) -> dict[str, Any]:
    """The arguments of the target, which include the draft's.

    If versions differ in a key, it is left out where its value equals the default. Raises
    UsageError for a setting that this version does not have.
    """
    version = VERSIONS[asked.version]
    if not version.pytorch_flow:
        raise UsageError(
            f"LLM() of TensorRT-LLM {version.name} is not the PyTorch flow's",
            hint='take engine.tensorrt_llm "1.2.1"',
        )
    graphs = (
        {"enable_padding": True, "max_batch_size": spec.max_batch_size}
        if asked.cuda_graph
        else None
    )
    optional: dict[str, Any] = {}
    if asked.max_num_tokens is not None:
        optional["max_num_tokens"] = asked.max_num_tokens
    if asked.world_size > asked.gpus_per_node:
        optional["gpus_per_node"] = asked.gpus_per_node
    if asked.attn_backend != "TRTLLM":
        optional["attn_backend"] = asked.attn_backend
    if asked.trust_remote_code:
        optional["trust_remote_code"] = True
    if version.enable_mixed_sampler:
        optional["enable_mixed_sampler"] = True
    optional["cuda_graph_config"] = graphs
    speculative = _speculative(spec, asked, version)
    if speculative is not None:
        optional["speculative_config"] = speculative
        if not _overlaps(optional, version):
            optional["disable_overlap_scheduler"] = True
    return {
        "model": HERE,
        "tensor_parallel_size": asked.tp_size,
        "pipeline_parallel_size": asked.pp_size,
        "max_batch_size": spec.max_batch_size,
        "max_input_len": spec.max_input_len,
        "max_seq_len": spec.max_seq_len,
        "kv_cache_config": _kv_cache(asked, kv_cache_quant_algo),
        **optional,
    }


def _kv_cache(
    asked: TensorRtLlmSpec, kv_cache_quant_algo: KvCacheQuantAlgo | None
) -> dict[str, Any]:
    config: dict[str, Any] = {
        "free_gpu_memory_fraction": asked.free_gpu_memory_fraction,
        "enable_block_reuse": asked.enable_block_reuse,
        "dtype": "fp8" if kv_cache_quant_algo == "FP8" else "auto",
    }
    if asked.tokens_per_block != DEFAULT_TOKENS_PER_BLOCK:
        if not VERSIONS[asked.version].tokens_per_block:
            hint = "remove engine.tokens_per_block, or take a newer engine.tensorrt_llm"
            raise UsageError(
                f"TensorRT-LLM {asked.version} takes no kv_cache_config.tokens_per_block", hint=hint
            )
        config["tokens_per_block"] = asked.tokens_per_block
    return config


def _speculative(
    spec: EngineSpec, asked: TensorRtLlmSpec, version: Version
) -> dict[str, Any] | None:
    if asked.speculation == "none":
        return None
    config = _method(spec, asked, version)
    if asked.draft_len_schedule is not None:
        config["draft_len_schedule"] = schedule_of(
            asked.draft_len_schedule, version, spec.max_batch_size
        )
    if asked.max_concurrency is not None:
        if not version.max_concurrency:
            hint = "remove speculation.max_concurrency, or take a newer engine.tensorrt_llm"
            raise UsageError(f"TensorRT-LLM {version.name} has no max_concurrency", hint=hint)
        config["max_concurrency"] = asked.max_concurrency
    if asked.acceptance_window is not None and asked.min_acceptance_length is not None:
        config |= acceptance_gate(asked.acceptance_window, asked.min_acceptance_length, version)
    needs_option = version.allow_advanced_sampling
    if asked.speculation == "eagle3":
        needs_option = version.head_sampling == "option"
    if needs_option:
        config["allow_advanced_sampling"] = True
    return config


def _method(spec: EngineSpec, asked: TensorRtLlmSpec, version: Version) -> dict[str, Any]:
    """The decoding type, and the keys that only it has."""
    length = spec.max_draft_len
    if asked.speculation == "ngram":
        return {
            "decoding_type": "NGram",
            "max_draft_len": length,
            "max_matching_ngram_size": asked.max_matching_ngram_size,
        }
    if asked.speculation == "eagle3":
        if version.head_sampling == "greedy":
            raise UsageError(
                f"TensorRT-LLM {version.name} answers every request greedily under a head",
                hint="take a newer engine.tensorrt_llm",
            )
        return {
            "decoding_type": version.eagle3_type,
            "max_draft_len": length,
            version.draft_model_key: DRAFT,
            **_captured(asked),
        }
    assert asked.speculation == "draft_target"  # the plan refuses every other kind
    return {
        "decoding_type": version.decoding_type,
        "max_draft_len": length,
        version.draft_model_key: DRAFT,
    }


def _captured(asked: TensorRtLlmSpec) -> dict[str, list[int]]:
    """The layers whose outputs the head reads. LLM() counts them from 0, and reads no layer numbers
    in the head's config.json: without this key it takes its own three.
    """
    if asked.captured_layers is None:
        return {}
    return {"eagle3_layers_to_capture": [layer - 1 for layer in asked.captured_layers]}


def _overlaps(args: Mapping[str, Any], version: Version) -> bool:
    """Whether this version can overlap the host's scheduling with the GPU's work for these
    arguments. A head overlaps in every version. N-gram lookup is left to the runtime, which stops
    overlapping by itself.
    """
    config = args["speculative_config"]
    if config["decoding_type"] != version.decoding_type or version.overlap == "always":
        return True
    return (
        version.overlap == "fixed length"
        and "draft_len_schedule" not in config
        and args.get("attn_backend", "TRTLLM") == "TRTLLM"
    )


def acceptance_gate(
    window_requests: int, min_acceptance_length: float, version: Version
) -> dict[str, Any]:
    """The keys that stop drafting once the last `window_requests` requests had fewer tokens per
    step than min_acceptance_length.

    TensorRT-LLM compares accepted draft tokens per step, in whatever way the key is called: it
    takes 1 off the decoded tokens per iteration (TRT
    tensorrt_llm/_torch/speculative/speculation_gate.py, record_avg_decoded). Raises UsageError if
    the version has no such keys.
    """
    window, threshold = version.acceptance_window, version.acceptance_threshold
    if window is None or threshold is None:
        hint = "remove speculation.adaptive, or take engine.tensorrt_llm 1.2.1"
        raise UsageError(f"TensorRT-LLM {version.name} has no acceptance window", hint=hint)
    return {window: window_requests, threshold: round(min_acceptance_length - 1.0, 6)}


def schedule_of(
    schedule: Mapping[int, int], version: Version, max_batch_size: int
) -> dict[int, int]:
    """Convert our schedule (smallest batch size -> draft length) to the version's meaning.

    Steps above max_batch_size are left out. Raises UsageError if the version has no schedule.
    """
    if version.draft_len_schedule is None:
        hint = "remove speculation.draft_len_schedule, or take engine.tensorrt_llm 1.2.1"
        raise UsageError(f"TensorRT-LLM {version.name} has no draft_len_schedule", hint=hint)
    ordered = sorted(
        (batch, length) for batch, length in schedule.items() if batch <= max_batch_size
    )
    if version.draft_len_schedule == "lower":
        return dict(ordered)
    ends = [start - 1 for start, _ in ordered[1:]] + [max_batch_size]
    return {end: length for end, (_, length) in zip(ends, ordered, strict=True)}


def write_llm_args(args: Mapping[str, Any], out_dir: Path) -> None:
    (out_dir / FILE).write_text(json.dumps(args, indent=2) + "\n", encoding="utf-8")


def read_llm_args(engine_dir: Path) -> dict[str, Any]:
    """Read the arguments back. Raises StageError if the directory does not have them."""
    try:
        args = json.loads((engine_dir / FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise StageError(
            "load", f"not an engine directory of the PyTorch flow ({error})", where=engine_dir
        ) from error
    schedule = (args.get("speculative_config") or {}).get("draft_len_schedule")
    if schedule is not None:  # JSON has no whole numbers as keys
        args["speculative_config"]["draft_len_schedule"] = {
            int(batch): length for batch, length in schedule.items()
        }
    return dict(args)


def resolved(
    args: Mapping[str, Any], target: str | Path, draft: str | Path | None
) -> dict[str, Any]:
    """The same arguments with the models' paths filled in."""
    placed = {**args, "model": str(target)}
    speculative = args.get("speculative_config")
    if speculative is not None:
        places = {
            key: str(draft)
            for key, value in speculative.items()
            if value == DRAFT and draft is not None
        }
        placed["speculative_config"] = {**speculative, **places}
    return placed


def faults(args: Mapping[str, Any], version: str, world_size: int | None = None) -> list[str]:
    """The errors that this version of TensorRT-LLM would report, according to our tables.

    They are unknown keys, wrong types, values out of bounds and broken rules.
    """
    errors = list(_faults_of(args, LLM_ARGS, version, ""))
    speculative = args.get("speculative_config")
    if isinstance(speculative, Mapping):
        errors += _speculative_faults(speculative, args, version)
    sizes = (args.get("tensor_parallel_size", 1), args.get("pipeline_parallel_size", 1))
    if (
        world_size is not None
        and all(isinstance(size, int) for size in sizes)
        and sizes[0] * sizes[1] > world_size
    ):
        errors.append(
            f"tensor_parallel_size * pipeline_parallel_size is {sizes[0] * sizes[1]}, above"
            f" {world_size} GPUs"
        )
    return errors


def _speculative_faults(
    config: Mapping[str, Any], args: Mapping[str, Any], version: str
) -> Iterator[str]:
    where = "speculative_config"
    row = VERSIONS[version]
    kind = config.get("decoding_type")
    if kind not in SPECULATIVE:
        yield f"{where}.decoding_type {kind!r} is not known"
        return
    yield from _faults_of(config, SPECULATIVE[kind], version, f"{where}.")
    length = config.get("max_draft_len")
    if not isinstance(length, int) or length < 1:
        yield f"{where}.max_draft_len must be above 0"
    if kind in ("DraftTarget", "Draft_Target"):
        if kind != row.decoding_type:
            yield f"{where}.decoding_type is spelled {row.decoding_type} in {version}, not {kind}"
        if not any(config.get(key) for key in ("speculative_model", "speculative_model_dir")):
            yield f"{where}.{row.draft_model_key} must name the draft model"
        if args.get("pipeline_parallel_size", 1) != 1:
            yield "draft-target has no pipeline parallelism"
        is_overlapping = args.get("disable_overlap_scheduler") is not True
        if kind == row.decoding_type and is_overlapping and not _overlaps(args, row):
            yield (
                "disable_overlap_scheduler must be true: this draft-target cannot overlap"
                " scheduling"
            )
    if kind in ("Eagle", "Eagle3"):
        if kind != row.eagle3_type:
            yield f"{where}.decoding_type is spelled {row.eagle3_type} in {version}, not {kind}"
        if not any(config.get(key) for key in ("speculative_model", "speculative_model_dir")):
            yield f"{where}.{row.draft_model_key} must name the head"
    if kind == "MTP" and config.get(row.mtp_length) != length:
        yield f"{where}.{row.mtp_length} must be {length}, the number of tokens to draft"
    yield from _schedule_faults(config, row)


def _schedule_faults(config: Mapping[str, Any], row: Version) -> Iterator[str]:
    schedule = config.get("draft_len_schedule")
    if not isinstance(schedule, Mapping) or not schedule:
        return
    lengths = [schedule[batch] for batch in sorted(schedule)]
    if sorted(lengths, reverse=True) != lengths:
        yield "speculative_config.draft_len_schedule: lengths must not grow with the batch size"
    if row.draft_len_schedule == "lower" and schedule.get(1) != config.get("max_draft_len"):
        yield (
            "speculative_config.draft_len_schedule: its value at batch size 1 must be max_draft_len"
        )
    if row.draft_len_schedule == "upper" and lengths[0] != config.get("max_draft_len"):
        yield (
            "speculative_config.draft_len_schedule: its value at the least batch size must be"
            " max_draft_len"
        )
    if row.draft_len_schedule == "upper" and config.get("max_concurrency") is not None:
        yield "speculative_config.draft_len_schedule and max_concurrency exclude one another"


def _faults_of(
    args: Mapping[str, Any], fields: tuple[Field, ...], version: str, where: str
) -> Iterator[str]:
    known = {field.name: field for field in fields if version in field.versions}
    for name, value in args.items():
        if name in known:
            yield from _value_faults(known[name], value, version, where + name)
        else:
            why = f": {NOT_FIELDS[name]}" if name in NOT_FIELDS else ""
            yield f"{where}{name} is not an argument of {version}{why}"
    yield from (
        f"{where}{name} is missing"
        for name, field in known.items()
        if field.default == REQUIRED and name not in args
    )


def _value_faults(field: Field, value: Any, version: str, where: str) -> Iterator[str]:
    kinds = [kind for kind in field.type.split("|") if kind != "null"]
    if value is None:
        if "null" not in field.type.split("|"):
            yield f"{where} must not be null"
    elif any(kind in NESTED for kind in kinds):
        if isinstance(value, Mapping):
            nested = next(NESTED[kind] for kind in kinds if kind in NESTED)
            yield from _faults_of(value, nested, version, f"{where}.")
        else:
            yield f"{where} must be a mapping"
    elif not any(_is(kind, value) for kind in kinds):
        yield f"{where} must be {' or '.join(kinds)}, not {value!r}"
    elif field.choices is not None and value not in field.choices:
        yield f"{where} must be one of {', '.join(field.choices)}, not {value!r}"
    elif field.bounds is not None and not field.bounds[0] <= value <= field.bounds[1]:
        yield f"{where} must be between {field.bounds[0]:g} and {field.bounds[1]:g}, not {value:g}"


def _is(kind: str, value: Any) -> bool:
    """Whether the value has this type. A boolean does not count as a number."""
    if kind == "bool":
        return isinstance(value, bool)
    if kind == "int":
        return isinstance(value, int) and not isinstance(value, bool)
    if kind == "float":
        return isinstance(value, int | float) and not isinstance(value, bool)
    if kind in ("str", "enum"):
        return isinstance(value, str)
    if kind == "path":
        return isinstance(value, str | Path)
    if kind == "list[int]":
        return isinstance(value, list | tuple) and all(_is("int", item) for item in value)
    if kind == "dict[int,int]":
        return isinstance(value, Mapping) and all(
            _is("int", item) for pair in value.items() for item in pair
        )
    return True  # objects of classes that are not in our tables
