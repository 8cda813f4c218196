"""Make the arguments of `trtllm-build` for an engine and a TensorRT-LLM version.

Every setting that decides the engine is passed, even if it equals the default. So a default that
changes between versions changes nothing, and `checks.py` can find what the builder changed. Flags
that a version does not have are never passed: `facts.trtllm_build.FLAGS` lists the flags of each
version, and the tests compare every command with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from toolkit.facts.trtllm_build import (
    DRAFT_TOKENS_EXTERNAL,
    FLAGS,
    GEMM_PLUGIN,
    LOGITS_DTYPE,
    VERSIONS,
    Flag,
)
from toolkit.interfaces import EngineSpec, TensorRtLlmSpec
from toolkit.words import KvCacheQuantAlgo, QuantAlgo

__all__ = ["BuildCommand", "build_flags", "flags_of", "misfits"]

FP8_WEIGHTS = ("FP8",)


@dataclass(frozen=True, slots=True)
class BuildCommand:
    """The arguments of `trtllm-build`. A flag with the value None takes no value."""

    flags: Mapping[str, str | None]

    @property
    def arguments(self) -> tuple[str, ...]:
        return tuple(
            part
            for flag, value in self.flags.items()
            for part in ((flag,) if value is None else (flag, value))
        )


def build_flags(
    spec: EngineSpec,
    asked: TensorRtLlmSpec,
    *,
    quant_algo: QuantAlgo | None,
    kv_cache_quant_algo: KvCacheQuantAlgo | None,
    checkpoint_dir: str,
    output_dir: str,
    timing_cache: str,
) -> BuildCommand:
    """Make the command for one engine. The three paths are as the builder sees them, which may be
    inside a container.

    A target that verifies drafts is built with draft_tokens_external; the draft is a plain engine.
    Both have a paged KV cache and paged context FMHA, since draft-target reuses cached blocks.
    """
    fp8 = (quant_algo or "NO_QUANT") in FP8_WEIGHTS
    flags: dict[str, str | None] = {
        "--checkpoint_dir": checkpoint_dir,
        "--output_dir": output_dir,
        "--max_batch_size": str(spec.max_batch_size),
        "--max_input_len": str(spec.max_input_len),
        "--max_seq_len": str(spec.max_seq_len),
        "--max_beam_width": "1",
        "--kv_cache_type": "paged",
        "--tokens_per_block": str(asked.tokens_per_block),
        "--remove_input_padding": "enable",
        "--context_fmha": "enable",
        "--use_paged_context_fmha": "enable",
        "--use_fp8_context_fmha": _switch(fp8 and kv_cache_quant_algo == "FP8"),
        "--gpt_attention_plugin": "auto",
        "--gemm_plugin": GEMM_PLUGIN[quant_algo or "NO_QUANT"],
        "--logits_dtype": LOGITS_DTYPE,
        "--use_fused_mlp": _switch(fp8 or quant_algo in (None, "NO_QUANT")),
        "--multiple_profiles": _switch(asked.multiple_profiles),
        # without it the finished engine cannot say which precisions it runs in
        "--profiling_verbosity": "detailed",
        "--workers": str(min(asked.world_size, asked.gpus_per_node)),
        "--output_timing_cache": timing_cache,
    }
    if asked.max_num_tokens is not None:
        flags["--max_num_tokens"] = str(asked.max_num_tokens)
    if asked.opt_num_tokens is not None:
        flags["--opt_num_tokens"] = str(asked.opt_num_tokens)
    if spec.max_draft_len:
        flags["--speculative_decoding_mode"] = DRAFT_TOKENS_EXTERNAL
        flags["--max_draft_len"] = str(spec.max_draft_len)
    if asked.speculation == "draft_target":
        # Triton's backend returns generation logits only if the engine was built to gather them.
        flags["--gather_generation_logits"] = None
    return BuildCommand(flags)


def _switch(on: bool) -> str:
    return "enable" if on else "disable"


def flags_of(version: str) -> dict[str, Flag]:
    """The flags of a version, by name and alias. Empty for a version without the command."""
    if version not in VERSIONS:
        return {}
    return {
        name: flag
        for flag in FLAGS
        if version in flag.versions
        for name in (flag.name, *flag.aliases)
    }


def misfits(command: BuildCommand, known: Mapping[str, Flag]) -> list[str]:
    """The errors that a builder with these flags would report: unknown flags and wrong values."""
    errors = []
    for name, value in command.flags.items():
        flag = known.get(name)
        if flag is None:
            errors.append(f"{name} is not a flag")
        elif (flag.type == "flag") != (value is None):
            errors.append(f"{name} takes {'no' if flag.type == 'flag' else 'a'} value")
        elif value is not None and flag.type == "int" and not value.lstrip("-").isdigit():
            errors.append(f"{name} takes a whole number, not {value!r}")
        elif value is not None and flag.choices is not None and value not in flag.choices:
            errors.append(f"{name} takes {', '.join(flag.choices)}, not {value!r}")
    return errors
