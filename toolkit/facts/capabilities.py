"""What an engine kind can do in a version, behind a Triton layout: one record, made only here.

Whoever needs to know how engines differ reads a field of `Capabilities`. A new engine kind is a new
function here, a section in config/schema.py and a backend in engines/; nobody else asks its name.
docs/engines.md has the table.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from toolkit.facts.support import ACCEPTANCE, LOG_PROBS
from toolkit.facts.versions import VERSIONS
from toolkit.words import EngineKind, Layout, SamplingRule

__all__ = ["EMBEDDED", "Capabilities", "capabilities_of", "default_layout"]

PlainArm = Literal["request", "restart", "server"]
Seeds = Literal["coupled", "repeatable", "ignored"]
ScheduleKeys = Literal["lower", "upper"]


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What can be asked of a deployment, and how its stages have to treat it.

    in_process: engines run inside this program, so speed and logits are measured without a server.
    plain_arm: how plain decoding of the same deployment is had: a request says so, the server is
    started again without speculation, or a second server runs beside it.
    draft_len_per_request: a request states its own draft length.
    fixes_draft_len: the draft length is decided when engines are compiled or loaded, so that
    `max_draft_len: auto` has to be answered before.
    draft_len_schedule: the draft length can follow the number of running requests; whether keys are
    the least (`lower`) or the greatest (`upper`) number that a length is for.
    max_concurrency: speculation can stop above a number of running requests.
    has_ngram: drafts can be looked up in the text.
    has_verify_only: drafts can be verified and thrown away, which is parity's middle arm.
    acceptance: rules at temperature > 0, the default first.
    drafts_greedily: drafts are the draft's likeliest token, also at temperature > 0.
    seeds: with a seed a text is the same with and without speculation (`coupled`), the same when it
    is asked again (`repeatable`), or neither (`ignored`).
    penalties: what a request can state of them.
    log_probs: per place, 2 (the chosen token's and the next best one's), 1 (the chosen one's) or 0.
    gives_logits: this program can read the engine's logits, so that they judge its texts.
    has_counters: the served models publish our counters on Triton's metrics page.
    reuses_prefixes: a prompt may cost less the second time, since its KV cache is kept.
    has_paged_kv_cache: KV blocks are shared, so that fewer long sequences fit than max_batch_size.
    checkpoint_format: what the engine is compiled from.
    needs_trtllm_build: it is compiled by NVIDIA's program, here or in its container.
    loads_draft_with_target: both models are loaded at once, by the target's stage.
    is_parallel: a model can be split over GPUs.
    needs_container: it is served inside NVIDIA's container, on a machine with the GPUs.
    """

    kind: EngineKind
    layout: Layout
    in_process: bool
    plain_arm: PlainArm
    draft_len_per_request: bool
    fixes_draft_len: bool
    draft_len_schedule: ScheduleKeys | None
    max_concurrency: bool
    has_ngram: bool
    has_verify_only: bool
    acceptance: tuple[SamplingRule, ...]
    drafts_greedily: bool
    seeds: Seeds
    penalties: tuple[str, ...]
    log_probs: Literal[0, 1, 2]
    gives_logits: bool
    has_counters: bool
    reuses_prefixes: bool
    has_paged_kv_cache: bool
    checkpoint_format: Literal["hf", "trtllm"]
    needs_trtllm_build: bool
    loads_draft_with_target: bool
    is_parallel: bool
    needs_container: bool


def capabilities_of(
    kind: EngineKind, version: str | None, layout: Literal["auto", Layout], *, reuses_prefixes: bool
) -> Capabilities:
    """kind and version as the YAML has them; version is None for the embedded engine.

    layout: `auto` stands for the kind's own. reuses_prefixes: as its section sets it.
    """
    served_as: Layout = "bls" if layout == "bls" else "llmapi"
    if layout == "auto":
        served_as = default_layout(kind)
    return MAKERS[kind](version, served_as, reuses_prefixes)


def default_layout(kind: EngineKind) -> Layout:
    return "bls" if kind == "trt_engine" else "llmapi"


def _torch(version: str | None, layout: Layout, reuses_prefixes: bool) -> Capabilities:
    has_scheduler = layout == "llmapi"  # with bls, each request drafts for itself
    return Capabilities(
        kind="torch",
        layout=layout,
        in_process=True,
        plain_arm="request",
        draft_len_per_request=True,
        fixes_draft_len=False,
        draft_len_schedule="lower" if has_scheduler else None,
        max_concurrency=has_scheduler,
        has_ngram=has_scheduler,
        has_verify_only=True,
        acceptance=ACCEPTANCE["torch"],
        drafts_greedily=False,
        seeds="coupled",
        penalties=PENALTIES[layout],
        log_probs=0,  # served: none, since its logits judge
        gives_logits=True,
        has_counters=True,
        reuses_prefixes=reuses_prefixes,
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
        plain_arm="request",  # the BLS model is ours, and drafts as a request asks
        draft_len_per_request=True,
        fixes_draft_len=True,
        draft_len_schedule=None,
        max_concurrency=False,
        has_ngram=False,
        has_verify_only=True,
        acceptance=ACCEPTANCE["trt_engine"],
        drafts_greedily=False,
        seeds="repeatable",
        penalties=PENALTIES["bls"],
        log_probs=_log_probs("trt_engine", version),
        gives_logits=False,
        has_counters=True,
        reuses_prefixes=reuses_prefixes,
        has_paged_kv_cache=True,
        checkpoint_format="trtllm",
        needs_trtllm_build=True,
        loads_draft_with_target=False,
        is_parallel=True,
        needs_container=True,
    )


def _trtllm_pytorch(version: str | None, layout: Layout, reuses_prefixes: bool) -> Capabilities:
    return Capabilities(
        kind="trtllm_pytorch",
        layout=layout,
        in_process=False,
        plain_arm="restart",  # LLM() speculates or does not, and two of them do not fit
        draft_len_per_request=False,
        fixes_draft_len=True,
        draft_len_schedule=VERSIONS[version or ""].draft_len_schedule,
        max_concurrency=True,
        has_ngram=True,
        has_verify_only=False,
        acceptance=ACCEPTANCE["trtllm_pytorch"],
        drafts_greedily=True,
        seeds="repeatable",
        penalties=PENALTIES["llmapi"],
        log_probs=_log_probs("trtllm_pytorch", version),
        gives_logits=False,
        has_counters=False,  # none of ours, and every start would begin them anew
        reuses_prefixes=reuses_prefixes,
        has_paged_kv_cache=True,
        checkpoint_format="hf",
        needs_trtllm_build=False,
        loads_draft_with_target=True,
        is_parallel=True,
        needs_container=True,
    )


def _log_probs(kind: str, version: str | None) -> Literal[0, 1, 2]:
    places = LOG_PROBS[kind].get(version or "", 0)
    return 2 if places >= 2 else 1 if places == 1 else 0


PENALTIES: dict[Layout, tuple[str, ...]] = {
    "llmapi": ("frequency", "presence"),
    "bls": ("repetition", "frequency", "presence"),
}
MAKERS: dict[str, Callable[[str | None, Layout, bool], Capabilities]] = {
    "torch": _torch,
    "trt_engine": _trt_engine,
    "trtllm_pytorch": _trtllm_pytorch,
}
EMBEDDED = _torch(None, "llmapi", False)
