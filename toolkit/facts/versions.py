"""TensorRT-LLM by version: which flows it has, how it spells names, and which containers have it.

Names changed between releases, so everything that is generated takes its spelling from here. An
engine runs only with the exact version that built it: the image that builds and the image that
serves come from one row.

1.3 was never released: there are candidates 1.3.0rc0 to rc29, and then 1.4.0rc0 and rc1. They
differ as much as versions do, so a row stands for those that agree. The last candidate of 1.3 has
the names of 1.4 and stands in its row.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from toolkit.facts.source import Source

__all__ = ["BUILD_IMAGE", "SERVING_IMAGE", "VERSIONS", "Version"]

SERVING_IMAGE = "nvcr.io/nvidia/tritonserver:{tag}-trtllm-python-py3"
BUILD_IMAGE = "nvcr.io/nvidia/tensorrt-llm/release:{release}"

OLD_NAMES = ("min_length", "random_seed")
NEW_NAMES = ("min_tokens", "seed")
EXTRA, CONFIG = "--extra_llm_api_options", "--config"


@dataclass(frozen=True, slots=True, kw_only=True)
class Version:
    """One row.

    release: the exact release inside the containers; of candidates, the last one of the row.
    candidates: the releases of the row, if it stands for several candidates.
    engine_flow: the toolkit builds engines with it. pytorch_flow: `tensorrt_llm.LLM` is the PyTorch
    flow's; in 0.21 it compiles an engine.
    speculative_config: what LLM() takes. `object`: one of its own classes, which
    `DecodingBaseConfig.from_dict` makes of a mapping; `mapping`: the mapping itself.
    one_model: draft and target run as one model.
    overlap: when draft-target can overlap the host's scheduling with the GPU's work.
    draft_len_schedule: whether its keys are the least batch size of a draft length (`lower`) or the
    greatest (`upper`); None if the option does not exist.
    penalties: the PyTorch flow's penalties act under speculation. seeds: a request's seed decides
    its sampled tokens; if not, every start of the engine draws from the same stream.
    enable_mixed_sampler, allow_advanced_sampling: without this option the default sampler, or the
    one-model path, answers sampled requests greedily.
    eagle3_type: how it spells the decoding type of an EAGLE-3 head. head_sampling: under a head a
    request is sampled as it asks (`requests`), if allow_advanced_sampling is set (`option`), or
    never: every text is greedy (`greedy`). heads_follow_load: draft_len_schedule and
    max_concurrency act on a head, too; elsewhere they are ignored. renames_head_layers: a head's
    tensors may be named `layers.0.` instead of `midlayer.`. mtp_length: the key that says how many
    tokens MTP layers draft.
    triton_names: the names of the BLS layout's tensors for the least number of tokens and the seed.
    """

    name: str
    release: str
    candidates: tuple[str, ...] = ()
    engine_flow: bool = True
    pytorch_flow: bool = True
    qwen3_engine: bool = True
    unified_checkpoints: bool  # documented to read the checkpoints of the current ModelOpt
    decoding_type: str = "DraftTarget"
    draft_model_key: str
    speculative_config: Literal["object", "mapping"] = "object"
    one_model: bool = False
    overlap: Literal["never", "fixed length", "always"]
    max_concurrency: bool = True
    tokens_per_block: bool = True  # in kv_cache_config
    acceptance_window: str | None = None
    acceptance_threshold: str | None = None
    draft_len_schedule: Literal["lower", "upper"] | None = None
    penalties: bool = False
    seeds: bool = False
    enable_mixed_sampler: bool = False
    allow_advanced_sampling: bool = False
    eagle3_type: Literal["Eagle", "Eagle3"] = "Eagle"
    head_sampling: Literal["greedy", "option", "requests"] = "greedy"
    heads_follow_load: bool = False
    renames_head_layers: bool = False
    mtp_length: Literal["num_nextn_predict_layers", "max_draft_len"] = "num_nextn_predict_layers"
    options_flag: str = CONFIG  # flag of trtllm-serve for a YAML of LLM() arguments
    triton_names: tuple[str, str] = NEW_NAMES
    serving_tags: tuple[str, ...] = ()  # newest first
    tensorrt: str | None = None
    cuda: str | None = None


V0_21 = Version(
    name="0.21",
    release="0.21.0",
    pytorch_flow=False,
    qwen3_engine=False,
    unified_checkpoints=False,
    draft_model_key="speculative_model_dir",
    overlap="never",
    max_concurrency=False,
    tokens_per_block=False,
    options_flag=EXTRA,
    triton_names=OLD_NAMES,
    serving_tags=("25.08",),
)
V1_0 = replace(
    V0_21,
    name="1.0",
    release="1.0.0",
    pytorch_flow=True,
    qwen3_engine=True,
    enable_mixed_sampler=True,
    triton_names=NEW_NAMES,
    serving_tags=("25.10", "25.09"),
    tensorrt="10.11.0.33",
    cuda="12.9.1",
)
V1_1 = replace(
    V1_0,
    name="1.1",
    release="1.1.0",
    max_concurrency=True,
    tokens_per_block=True,
    enable_mixed_sampler=False,
    serving_tags=("26.02", "26.01", "25.12"),
    tensorrt="10.13.3.9",
    cuda="13.0.2",
)
V1_2_0 = Version(
    name="1.2.0",
    release="1.2.0",
    unified_checkpoints=True,
    draft_model_key="speculative_model",
    overlap="fixed length",
    acceptance_window="acceptance_window",
    acceptance_threshold="acceptance_length_threshold",
    draft_len_schedule="lower",
    head_sampling="option",
    serving_tags=("26.03",),
    tensorrt="10.14.1.48",
    cuda="13.1.0",
)
V1_2_1 = replace(
    V1_2_0, name="1.2.1", release="1.2.1", serving_tags=("26.07", "26.06", "26.05", "26.04")
)
# Up to rc20 the candidates still had trtllm-build, of which the toolkit has no table.
V1_3_EARLY = replace(
    V1_2_1,
    name="1.3rc-early",
    release="1.3.0rc20",
    candidates=tuple(f"1.3.0rc{number}" for number in range(21)),
    engine_flow=False,
    qwen3_engine=False,
    decoding_type="Draft_Target",
    speculative_config="mapping",
    allow_advanced_sampling=True,
    eagle3_type="Eagle3",
    renames_head_layers=True,
    serving_tags=(),
    tensorrt=None,
    cuda=None,
)
V1_3_LATE = replace(
    V1_3_EARLY,
    name="1.3rc-late",
    release="1.3.0rc28",
    candidates=tuple(f"1.3.0rc{number}" for number in range(21, 29)),
    one_model=True,
    overlap="always",
    draft_len_schedule="upper",
    allow_advanced_sampling=False,
    head_sampling="requests",
    heads_follow_load=True,
    mtp_length="max_draft_len",
)
V1_4 = replace(
    V1_3_LATE,
    name="1.4rc",
    release="1.4.0rc1",
    candidates=("1.3.0rc29", "1.4.0rc0", "1.4.0rc1"),
    acceptance_window="acceptance_rate_window_size",
    acceptance_threshold="acceptance_rate_threshold",
    seeds=True,
)
VERSIONS = {
    version.name: version
    for version in (V0_21, V1_0, V1_1, V1_2_0, V1_2_1, V1_3_EARLY, V1_3_LATE, V1_4)
}

LLM_ARGS = "TRT tensorrt_llm/llmapi/llm_args.py"
SOURCES = {
    "candidates": Source(
        "the list of releases on PyPI, 2026-11; where candidates change: TRT pull request 15907"
        " (the engine flow), 18721 (two models), issue 19487 (seeds)",
        "C",
    ),
    "engine_flow": Source(
        "TRT docs/source/legacy/tensorrt-backend-removal.md, pull requests 15918 and 16369", "A"
    ),
    "pytorch_flow": Source(
        "TRT tensorrt_llm/__init__.py and tensorrt_llm/_torch/__init__.py of 0.21;"
        " docs/source/release-notes.md of 1.0",
        "B",
    ),
    "qwen3_engine": Source("TRT docs/source/release-notes.md, 1.0", "A"),
    "unified_checkpoints": Source("MO docs/source/deployment/3_unified_hf.rst", "A"),
    "decoding_type": Source(LLM_ARGS, "B"),
    "draft_model_key": Source(LLM_ARGS, "A"),
    "speculative_config": Source(
        f"{LLM_ARGS}: DecodingBaseConfig.from_dict and an undiscriminated union to 1.2;"
        " a union discriminated by decoding_type in the candidates of 1.3",
        "B",
    ),
    "one_model": Source(
        f"{LLM_ARGS}: DraftTargetDecodingConfig._draft_target_one_model; pull request 18721", "B"
    ),
    "overlap": Source(
        "TRT tensorrt_llm/_torch/speculative/interface.py (support_overlap_scheduler),"
        " pull requests 7651 and 8706; of 1.1 it is not known, and taken as never",
        "C",
    ),
    "max_concurrency": Source(f"{LLM_ARGS}: absent in 1.0, there in 1.1", "B"),
    "tokens_per_block": Source(f"{LLM_ARGS}: absent in 1.0, there in 1.1", "B"),
    "acceptance_window": Source(f"{LLM_ARGS}; renamed in 1.3.0rc29", "A"),
    "acceptance_threshold": Source(f"{LLM_ARGS}; renamed in 1.3.0rc29", "B"),
    "draft_len_schedule": Source(
        f"{LLM_ARGS}: validate_draft_len_schedule_and_sort asks for the key 1 in 1.2 and in early"
        " candidates of 1.3, later for the smallest key",
        "A",
    ),
    "penalties": Source(
        "TRT issue 9442, pull request 16485: the default sampler ignores them up to 1.2.1. Later"
        " the one-model path refuses them without speculative_config.enable_penalty, and which"
        " candidate has that key is not known",
        "B",
    ),
    "seeds": Source(
        "TRT pull requests 17172 and 17599 (about 1.3.0rc23): before, one generator per engine"
        " with the seed 42",
        "C",
    ),
    "enable_mixed_sampler": Source(
        f"{LLM_ARGS} and tensorrt_llm/_torch/pyexecutor/sampler.py of mid 2025: TorchSampler takes"
        " the likeliest token of every row without it. Later copies lack the option; where it ended"
        " is not known, and 1.1 is taken as without it",
        "C",
    ),
    "allow_advanced_sampling": Source(
        f"{LLM_ARGS}, tensorrt_llm/_torch/pyexecutor/py_executor_creator.py (a warning of greedy"
        " decoding); later deprecated, without effect",
        "C",
    ),
    "eagle3_type": Source(
        f"{LLM_ARGS}: EagleDecodingConfig alone to 1.2; Eagle3DecodingConfig in the candidates of"
        " 1.3, where Eagle is an alias with a warning",
        "B",
    ),
    "head_sampling": Source(
        "TRT pull request 9885 (December 2025: sampling with one model, by"
        " allow_advanced_sampling) and 14745 (May 2026: by each request, without the option);"
        " before, the worker of one model takes the likeliest token",
        "C",
    ),
    "heads_follow_load": Source(
        "TRT pull requests 8194 (a drafter beside the target only; py_executor.py asks"
        " self.drafter), 10860 and 12262 (March 2026: also one model); of early candidates it is"
        " taken as no",
        "C",
    ),
    "renames_head_layers": Source(
        "TRT tensorrt_llm/_torch/models/modeling_speculative.py, Eagle3ForCausalLM.load_weights;"
        " pull request 11010 (28 January 2026), whose fault was seen with 1.2.0rc8",
        "C",
    ),
    "mtp_length": Source(
        f"{LLM_ARGS}, MTPDecodingConfig: max_draft_len is overwritten by num_nextn_predict_layers"
        " to early candidates of 1.3; later that key is deprecated and moved into max_draft_len",
        "B",
    ),
    "options_flag": Source("TRT tensorrt_llm/commands/serve.py", "B"),
    "triton_names": Source(
        "TB v0.19.0 against TRT triton_backend/all_models 1.x; 0.21 is between them and is taken as"
        " old",
        "C",
    ),
    "serving_tags": Source("TS docs/introduction/compatibility.md", "A"),
}
