"""What differs between releases of TensorRT-LLM, where the PyTorch flow meets it.

Written from upstream's own text, and not from the toolkit's tables: a stand-in that is generated
from what it has to judge refuses nothing. TRT is github.com/NVIDIA/TensorRT-LLM, LA its
tensorrt_llm/llmapi/llm_args.py. LA was read in published copies of the time of 0.21 (June 2025),
1.1.0rc (August 2025), 1.2.0rc (November 2025), 1.3.0rc (February and August 2026), and in excerpts
of 1.2.1. What was read in neither is marked (C): seen in one neighbour, or told by a thread.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import Literal

__all__ = ["RELEASE", "RELEASES", "Release"]


@dataclass(frozen=True, slots=True)
class Release:
    """One release.

    is_strict: StrictBaseModel (extra="forbid") is the base of every class in LA; in 0.21 only of
    the arguments, and unknown keys of nested classes are ignored.
    is_pytorch: `tensorrt_llm.LLM` is that of `tensorrt_llm._torch`; in 0.21 it is the one that
    compiles an engine.
    decoding_type: `class` where it is a ClassVar, which a mapping may not contain, and
    DecodingBaseConfig.from_dict exists; `literal` where it is a field that tells the classes of the
    union apart.
    eagle_sets_attributes: EagleDecodingConfig.__init__ calls setattr for all that it is given.
    schedule: the keys of draft_len_schedule: `lower` has to contain 1, `upper` need not, and
    excludes max_concurrency.
    one_model: DraftTargetDecodingConfig._draft_target_one_model is true. Log-probabilities are then
    skipped (pull request 18401), and penalties refused without enable_penalty. Elsewhere the
    sampler ignores penalties (issue 9442, pull request 16485).
    overlaps_draft_models: SpeculativeDecodingMode.support_overlap_scheduler
    (_torch/speculative/interface.py) includes draft models, pull request 7651.
    has_mixed_sampler: TorchSampler samples only with enable_mixed_sampler, and else takes the
    likeliest token (_torch/pyexecutor/sampler.py of mid 2025).
    head_sampling: how a request is sampled under a head or MTP layers in one model with the target.
    `greedy`: its worker takes the likeliest token; `option`: unless allow_advanced_sampling is set
    (pull request 9885, December 2025); `requests`: as each asks (pull request 14745). (C)
    has_seeds: pull requests 17172 and 17599 (C). Before, one generator per engine, always seeded
    alike. counts_drafts: pull request 17082 (C). Before, zeros.
    log_probs: how many per token at most (pull request 7756).
    """

    name: str
    is_strict: bool = True
    is_pytorch: bool = True
    decoding_type: Literal["class", "literal"] = "class"
    eagle_sets_attributes: bool = False
    schedule: Literal["lower", "upper"] | None = None
    one_model: bool = False
    overlaps_draft_models: bool = False
    has_mixed_sampler: bool = False
    head_sampling: Literal["greedy", "option", "requests"] = "greedy"
    has_seeds: bool = False
    counts_drafts: bool = False
    log_probs: int = 1


V0_21 = Release("0.21.0", is_strict=False, is_pytorch=False)
V1_0 = Release("1.0.0", has_mixed_sampler=True)
V1_1 = replace(V1_0, name="1.1.0", has_mixed_sampler=False, eagle_sets_attributes=True)
V1_2_0 = replace(
    V1_1,
    name="1.2.0",
    schedule="lower",
    overlaps_draft_models=True,
    head_sampling="option",
    log_probs=2,
)
V1_2_1 = replace(V1_2_0, name="1.2.1", eagle_sets_attributes=False)
V1_3_EARLY = replace(V1_2_1, name="1.3.0rc20", decoding_type="literal")
V1_3_LATE = replace(
    V1_3_EARLY,
    name="1.3.0rc28",
    schedule="upper",
    one_model=True,
    head_sampling="requests",
    log_probs=0,
)
V1_4 = replace(V1_3_LATE, name="1.4.0rc1", has_seeds=True, counts_drafts=True)
RELEASES = {
    release.name: release
    for release in (V0_21, V1_0, V1_1, V1_2_0, V1_2_1, V1_3_EARLY, V1_3_LATE, V1_4)
}
RELEASE = RELEASES[os.environ.get("TENSORRT_LLM_STAND_IN", "1.2.1")]
