"""What a deployment of TensorRT-LLM's engine flow becomes in its PyTorch flow: the keys of the YAML
that change, each with the reason, and the new YAML.

This is a translation of keys, and no judgement: whether the result can work says its plan, whose
refusals name what is left to decide, such as another precision for INT8. The engine flow ends with
1.2.1; upstream's own guide is "Migrating from the TensorRT backend" (docs/source/legacy/
tensorrt-backend-removal.md of NVIDIA/TensorRT-LLM).
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from toolkit.config.schema import TrtEngineConfig
from toolkit.facts.support import ACCEPTANCE
from toolkit.facts.versions import VERSIONS
from toolkit.records.plan import KeyChange
from toolkit.words import EngineKind

__all__ = ["KIND", "Translation", "to_pytorch_flow", "yaml_text"]

KIND: EngineKind = "trtllm_pytorch"
ONLY_ENGINE_FLOW = {
    "builder": "nothing is built: LLM() loads the quantized checkpoint itself",
    "multiple_profiles": "a flag of trtllm-build; LLM() makes CUDA graphs by batch size",
    "opt_num_tokens": "a flag of trtllm-build; LLM() has no such setting",
}
ON_DRAFT_FAILURE = "both models run in one process, so a draft cannot fail alone"
ACCEPTANCE_RULE = "LLM() has one rule: its draft proposes greedily, and the target's choice decides"
# What changes outside the YAML: what it is about, before, after, and why.
ELSEWHERE = (
    KeyChange(
        "elsewhere",
        "engines/NAME",
        "rank{N}.engine",
        "the checkpoint itself",
        "no compile step; the same calibration, written in ModelOpt's unified format alone",
    ),
    KeyChange(
        "elsewhere",
        "model for clients",
        "tensorrt_llm_bls",
        "tensorrt_llm",
        "one model with the tensors of the llmapi template, such as sampling_param_max_tokens;"
        " docs/tensorrt_llm.md lists them side by side",
    ),
    KeyChange(
        "elsewhere",
        "num_draft_tokens",
        "a request's parameter",
        None,
        "LLM() fixes speculation when it loads, so no request turns it off; validation measures"
        " the plain arm by restarting the server",
    ),
)


@dataclass(frozen=True, slots=True)
class Translation:
    """data: the YAML's content in the PyTorch flow, in the order of the original."""

    data: dict[str, Any]
    changes: tuple[KeyChange, ...]


def to_pytorch_flow(data: Mapping[str, Any]) -> Translation:
    """Translate the content of a valid YAML whose engine.kind is trt_engine."""
    translated = copy.deepcopy(dict(data))
    return Translation(translated, (*_changes(translated), *ELSEWHERE))


def _changes(data: dict[str, Any]) -> Iterator[KeyChange]:
    """The changes, each made in `data` when it is yielded."""
    before, data["name"] = data["name"], f"{data['name']}-pytorch"
    why = "both deployments lie side by side in engines/ and triton_repo/"
    yield KeyChange("changed", "name", before, data["name"], why)
    engine = data["engine"]
    before, engine["kind"] = engine["kind"], KIND
    yield KeyChange("changed", "engine.kind", before, KIND, "the PyTorch flow")
    yield from _version(engine)
    for key, why in ONLY_ENGINE_FLOW.items():
        if key in engine:
            yield _removed(engine, "engine", key, why)
    speculation, triton = data.get("speculation") or {}, data.get("triton") or {}
    rule = speculation.get("acceptance", "auto")
    if rule not in ("auto", *ACCEPTANCE[KIND]):
        yield _removed(speculation, "speculation", "acceptance", ACCEPTANCE_RULE)
    if triton.get("layout") == "bls":
        triton["layout"] = "llmapi"
        why = "one Python model over LLM() takes the place of five"
        yield KeyChange("changed", "triton.layout", "bls", "llmapi", why)
    if "on_draft_failure" in triton:
        yield _removed(triton, "triton", "on_draft_failure", ON_DRAFT_FAILURE)


def _version(engine: dict[str, Any]) -> Iterator[KeyChange]:
    """The newest version with a container, in place of one that is not documented to read these
    checkpoints.
    """
    stated = engine.get("tensorrt_llm", TrtEngineConfig.model_fields["tensorrt_llm"].default)
    if VERSIONS[stated].unified_checkpoints:
        return
    engine["tensorrt_llm"] = [
        row.name for row in VERSIONS.values() if row.unified_checkpoints and row.serving_tags
    ][-1]
    why = "the first that is documented to read the checkpoints of this ModelOpt is 1.2.0"
    yield KeyChange("changed", "engine.tensorrt_llm", stated, engine["tensorrt_llm"], why)


def _removed(section: dict[str, Any], name: str, key: str, why: str) -> KeyChange:
    return KeyChange("removed", f"{name}.{key}", str(section.pop(key)), None, why)


def yaml_text(translation: Translation, origin: str) -> str:
    """The new file. Comments of the original are not kept; its own begin with what changed.

    origin: the name of the file that it was made from.
    """
    import yaml

    lines = [
        f"# {origin} in TensorRT-LLM's PyTorch flow, made by `toolkit plan --as {KIND}`.",
        "# Comments are in the original. What changed:",
        "#",
    ]
    for change in translation.changes:
        if change.step != "elsewhere":
            after = change.after or "removed"
            lines.append(f"# - {change.path}: {change.before} -> {after}; {change.why}")
    content = yaml.safe_dump(translation.data, sort_keys=False, allow_unicode=True, width=100)
    return "\n".join([*lines, "", content])
