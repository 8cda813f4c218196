"""Speculation without a second model: which kinds of engine draft with heads or with layers of the
target itself, what each reads of a head, and what else TensorRT-LLM offers.

A head is one decoder layer, or a few, that read the target's hidden states. VL and TRT are as in
`toolkit.facts.source`; LA is TRT tensorrt_llm/llmapi/llm_args.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from toolkit.facts.source import Source
from toolkit.facts.versions import VERSIONS
from toolkit.words import EngineKind, Head

__all__ = [
    "HEAD_KINDS",
    "HEAD_NAMES",
    "NO_HEADS",
    "NO_MTP",
    "OTHER_KINDS",
    "PUBLISHED",
    "SOURCES",
    "VLLM",
    "HeadReader",
    "PublishedAcceptance",
    "head_reader",
    "mtp_config",
]

HEAD_NAMES: dict[Head, str] = {"eagle3": "EAGLE-3"}
# Which kinds run a head, and why others do not.
HEAD_KINDS: dict[Head, tuple[EngineKind, ...]] = {"eagle3": ("trtllm_pytorch", "vllm")}
NO_HEADS: dict[EngineKind, str] = {
    "torch": "its runtime drafts with a whole model or by prompt lookup, not yet with a head",
    "trt_engine": "it takes drafts from a second engine, not yet from a head",
}
# Why a kind does not draft with the target's own MTP layers; TensorRT-LLM's LLM() does.
NO_MTP: dict[EngineKind, str] = {
    "torch": "its models have none",
    "trt_engine": "MTPDecodingConfig is for the PyTorch flow alone",
    "vllm": "vLLM has the method mtp, but the toolkit does not write it",
}


@dataclass(frozen=True, slots=True)
class HeadReader:
    """What a runtime reads of a head. Everything else of the head would be ignored without an
    error, or would not load.

    reads_speculators: config.json as the speculators library writes it. reads_fc_norms: norms
    before `fc` (norm_before_fc, fc_norm). reads_layer_names: the first layer may be named
    `layers.0.` instead of `midlayer.`. captures_embedding: hidden states before the first layer.
    counts_from_zero: the numbers of captured layers are indices; vLLM takes them for how many
    layers have run. uses_own_embedding: the head's own embedding is used even if it is as wide as
    the target's.
    """

    name: str
    reads_speculators: bool = True
    reads_fc_norms: bool = True
    reads_layer_names: bool = True
    captures_embedding: bool = True
    counts_from_zero: bool = False
    uses_own_embedding: bool = True


VLLM = HeadReader("vLLM")


def mtp_config(version: str, draft_len: int) -> dict[str, str | int]:
    """The `speculative_config` with which TensorRT-LLM drafts with the target's own MTP layers.

    Up to early candidates of 1.3 a max_draft_len alone is overwritten by the other key's default,
    which is 1: LA, MTPDecodingConfig.
    """
    key = VERSIONS[version].mtp_length
    return {"decoding_type": "MTP", "max_draft_len": draft_len, key: draft_len}


def head_reader(kind: EngineKind, version: str | None) -> HeadReader:
    """The reader of the kind and version that the YAML names. A kind without heads has vLLM's,
    which reads most.
    """
    if kind != "trtllm_pytorch":
        return VLLM
    return HeadReader(
        f"TensorRT-LLM {version}",
        reads_speculators=False,
        reads_fc_norms=False,
        reads_layer_names=VERSIONS[version or ""].renames_head_layers,
        captures_embedding=False,
        counts_from_zero=True,
        uses_own_embedding=False,
    )


@dataclass(frozen=True, slots=True)
class PublishedAcceptance:
    """What somebody measured with a head of this kind: tokens per verify step with chains of
    draft_len tokens, greedily. pair and source say of what, and where.
    """

    pair: str
    draft_len: int
    tokens: float
    source: Source

    @property
    def text(self) -> str:
        return (
            f"{self.tokens} tokens a step with {self.draft_len} drafts, published of {self.pair}"
            f" ({self.source.where})"
        )


# Of chains only: the figures of the EAGLE-3 paper (arXiv 2503.01840) are of trees.
PUBLISHED: dict[Head, PublishedAcceptance] = {
    "eagle3": PublishedAcceptance(
        "Llama 3.1 8B with its head, MT-Bench",
        7,
        3.53,
        Source(
            "github.com/vllm-project/vllm issue 26191: 12,208 of 33,712 drafts in 4,816 steps", "A"
        ),
    )
}

# What LA has under speculative_config, as a user may write it under speculation.kind -> the
# versions that have it, and why the toolkit does not.
OTHER_KINDS = {
    "user_provided": (
        "1.0 to 1.4rc",
        "its drafter is a Python object, which no YAML can hold",
    ),
    "save_hidden_states": (
        "1.2.0 to 1.4rc",
        "it speculates on nothing: it writes hidden states to train a head with",
    ),
    "auto": (
        "1.0 to 1.4rc",
        "it is n-gram lookup with lengths that change by load, which speculation.kind: ngram with"
        " draft_len_schedule states openly",
    ),
    "pard": (
        "1.3rc-early to 1.4rc",
        "its drafts need a model that was trained for it, which pairing cannot check",
    ),
    "sa": (
        "1.3rc-late and 1.4rc",
        "no known container has these versions, and ngram looks text up in every version",
    ),
    "dflash": ("1.3rc-late and 1.4rc", "pairing cannot check its draft"),
    "dspark": ("1.4rc", "pairing cannot check its draft"),
    "medusa": ("0.21 to 1.2.1, in the engine flow alone", "the toolkit builds no heads into it"),
    "lookahead": ("0.21 to 1.2.1, in the engine flow alone", "the toolkit does not build it"),
}

SOURCES = {
    "HEAD_KINDS": Source(
        "TRT tensorrt_llm/_torch/models/modeling_speculative.py, SpecDecOneEngineForCausalLM; LA"
        " EagleDecodingConfig; VL vllm/model_executor/models/llama_eagle3.py of 0.32.0",
        "B",
    ),
    "HeadReader": Source(
        "TRT tensorrt_llm/_torch/models/modeling_speculative.py, Eagle3DraftModel (no norms before"
        " fc; an embedding only if target_hidden_size differs) and Eagle3ForCausalLM.load_weights;"
        " tensorrt_llm/_torch/speculative/eagle3.py, Eagle3SpecMetadata (-1 is the last layer)",
        "B",
    ),
    "counts_from_zero": Source(
        "eagle_aux_hidden_state_layer_ids of published heads are TensorRT-LLM's own default indices"
        " (1, 29, 57 of DeepSeek-V3's 61 layers), and SGLang adds 1 to them"
        " (set_eagle3_layers_to_capture); VL vllm/v1/worker/gpu_model_runner.py of 0.32.0 does not",
        "I",
    ),
    "OTHER_KINDS": Source(
        "LA in copies of July and November 2025, February and August 2026; TRT"
        " docs/source/features/speculative-decoding.md",
        "B",
    ),
}
