"""A plugin for vLLM, loaded in its own processes: sampled drafts on a CPU. It corrects two faults.

Where vLLM verifies drafts, it repeats each request's temperature, top-k and top-p for each of its
draft tokens. Its function for CPUs, `_expand_kernel_impl`, converts the result's memory to int64
and writes into the copy, so the sampler reads memory that nobody wrote (vLLM issue 55005).

In a step that verifies no draft, as the last one of many requests, its `apply_top_k_only` takes the
maximum of nothing. The error ends the engine: one sampled request with top_k and without top_p ends
the server.

This plugin puts functions of its own in these places, and only where vLLM's give a wrong answer.

vLLM loads plugins of the group `vllm.general_plugins` in each of its processes before it chooses
its kernels. This file runs without the toolkit; `plugin_files` makes an installed package of it.

Source: vllm/v1/sample/rejection_sampler.py, vllm/v1/sample/ops/topk_topp_sampler.py,
vllm/utils/cpu_triton_utils.py, vllm/plugins/__init__.py, register_triton_kernel_overrides in
vllm/platforms/cpu.py, of 0.32.0.
"""

from __future__ import annotations

import importlib
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

__all__ = ["DISTRIBUTION", "FOLDER", "VERSION", "plugin_files", "register"]

FOLDER = "vllm_plugins"  # in the engine directory; the server's PYTHONPATH names it
DISTRIBUTION = "toolkit_vllm_sampling"
VERSION = "2"  # part of the key of an engine that brings it
GROUP = "vllm.general_plugins"


def plugin_files() -> dict[str, str]:
    """The installed package: path in a folder of PYTHONPATH -> text."""
    metadata = f"Metadata-Version: 2.1\nName: {DISTRIBUTION}\nVersion: {VERSION}\n"
    return {
        f"{DISTRIBUTION}.py": Path(__file__).read_text(encoding="utf-8"),
        f"{DISTRIBUTION}-{VERSION}.dist-info/METADATA": metadata,
        f"{DISTRIBUTION}-{VERSION}.dist-info/entry_points.txt": (
            f"[{GROUP}]\n{DISTRIBUTION} = {DISTRIBUTION}:register\n"
        ),
    }


def register() -> None:
    """Called by vLLM, more than once in a process."""
    platform: Any = importlib.import_module("vllm.platforms").current_platform
    if not platform.is_cpu():
        return
    platform.import_kernels()
    kernels: Any = importlib.import_module("vllm.utils.cpu_triton_utils")
    if not repeats_values(kernels._expand_kernel_impl):
        kernels._expand_kernel_impl = expand
        logging.getLogger("vllm").info("%s corrects how drafts are sampled", DISTRIBUTION)
    samplers: Any = importlib.import_module("vllm.v1.sample.ops.topk_topp_sampler")
    if not takes_no_rows(samplers.apply_top_k_only):
        samplers.apply_top_k_only = unless_empty(samplers.apply_top_k_only)
        logging.getLogger("vllm").info("%s corrects top_k in steps without drafts", DISTRIBUTION)


def takes_no_rows(implementation: Any) -> bool:
    """Whether this implementation of vLLM's `apply_top_k_only` has an answer to no logits."""
    import torch

    try:
        implementation(torch.empty(0, 4), torch.empty(0, dtype=torch.int32))
    except RuntimeError:
        return False
    return True


def unless_empty(implementation: Any) -> Any:
    """The same, but that no logits are answered with none."""

    def apply_top_k_only(logits: torch.Tensor, k: torch.Tensor) -> Any:
        return implementation(logits, k) if logits.shape[0] else logits

    return apply_top_k_only


def repeats_values(implementation: Any) -> bool:
    """Whether this implementation of vLLM's `expand_kernel` gives the right answer."""
    import torch

    output = torch.full((3,), -1.0)
    implementation(output, torch.tensor([0.5, 0.0]), torch.tensor([2, 3]), 0, 1)
    return output.tolist() == [0.5, 0.5, 1.0]


def expand(
    output: torch.Tensor,
    input_val: torch.Tensor,
    cu_num_tokens: torch.Tensor,
    replace_from: float,
    replace_to: float,
    MAX_NUM_TOKENS: int | None = None,  # noqa: N803  # vLLM passes it by this name
) -> None:
    """Fill output, [tokens], with each request's value of input_val, [requests], once per token.

    cu_num_tokens: tokens of the requests up to and including each, [requests]. A value of
    replace_from becomes replace_to.
    """
    import torch

    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
    replaced = input_val.masked_fill(input_val == replace_from, replace_to)
    values = replaced.repeat_interleave(counts.long())
    output[: values.shape[0]].copy_(values)
