"""A first YAML for a pair: precision, engine and sizes that the plan says can work, with a line on
why each stands there.

It is a start and no optimum: the fewest GPUs that hold a full batch at full length (or, where no
number does, that hold a sequence), the narrowest precision that is vouched for, and lengths that
both models reach.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolkit.checkpoints.shape import ModelShape
from toolkit.config.schema import DeploymentConfig
from toolkit.errors import UsageError
from toolkit.facts.gpus import Gpu
from toolkit.facts.support import SMOOTHQUANT_FAMILIES
from toolkit.plan.make import make_plan, subject_of
from toolkit.plan.memory import parameters
from toolkit.plan.subject import family_of, length_limit
from toolkit.records.plan import Plan
from toolkit.words import Role

__all__ = ["Suggestion", "suggest"]

TP_SIZES = (1, 2, 4, 8)
MAX_SEQ_LEN = 8192  # a start; the plan says how many sequences of it fit
INT8, FP8 = "W8A8_SQ_PER_CHANNEL", "FP8"
# Parameters below which one CPU thread is taken. Measured at both ends: with 9 M a second thread
# costs more in waiting than it computes, with 250 M two threads reach the memory's speed. What lies
# between is a choice.
SMALL = 100_000_000
CALIBRATION, PROMPTS = "data/calib.jsonl", "data/prompts.jsonl"
TEXTS = {
    CALIBRATION: '{"text": "..."} on each line, like your traffic; 128 lines are used',
    PROMPTS: (
        '{"prompt": "..."} on each line, none of the calibration text; 64 are used, and 59 are'
        " needed to show 5 %"
    ),
}


@dataclass(frozen=True, slots=True)
class Suggestion:
    """text: the YAML. plan: of it, as it stands. texts: files that it names and that are still to
    be written -> what belongs into them.
    """

    name: str
    file_name: str
    text: str
    plan: Plan
    texts: Mapping[str, str]


def suggest(
    target: Path, draft: Path | None, gpu: Gpu | None, *, folder: Path, file_name: str | None = None
) -> Suggestion:
    """target, draft: folders, or hub ids as they are written. gpu None: the embedded engine.
    folder: where the YAML will lie. file_name: of the YAML, whose stem is the deployment's name;
    None: after the target.

    Raises UsageError where nothing that is tried can work, with what stood against the last
    attempt.
    """
    plan: Plan | None = None
    narrow: Suggestion | None = None
    name = _name(Path(file_name).stem if file_name is not None else target.name.lower())
    file_name = file_name or f"{name}.yaml"
    for data in _attempts(target, draft, gpu):
        config = DeploymentConfig.model_validate({"name": name, **data})
        plan = make_plan(config)
        made = Suggestion(name, file_name, _written(name, file_name, data, folder), plan, TEXTS)
        if plan.possible and not any(one.rule == "batch-fits" for one in plan.judgements):
            return made
        narrow = narrow or (made if plan.possible else None)
    if narrow is not None:
        return narrow
    refused = [] if plan is None else [one for one in plan.judgements if one.severity == "refused"]
    reasons = "; ".join(one.what for one in refused[:3])
    raise UsageError(
        f"nothing that was tried can work: {reasons}", hint=refused[0].hint if refused else None
    )


def _name(text: str) -> str:
    """What may name folders: see `name` in the schema."""
    return (
        re.sub(r"\.{2,}", ".", re.sub(r"[^A-Za-z0-9._]+", "-", text)).strip("-._")[:80]
        or "deployment"
    )


def _attempts(target: Path, draft: Path | None, gpu: Gpu | None) -> Iterator[dict[str, Any]]:
    """Deployments to try, best first."""
    models = {
        role: path for role, path in (("target", target), ("draft", draft)) if path is not None
    }
    base: dict[str, Any] = {role: {"checkpoint": path} for role, path in models.items()}
    base |= {
        "calibration": {"dataset": Path(CALIBRATION)},
        "validation": {"prompts": Path(PROMPTS)},
    }
    base["speculation"] = (
        {"kind": "draft_target", "max_draft_len": 4} if draft is not None else {"kind": "none"}
    )
    shapes = subject_of(DeploymentConfig.model_validate({"name": "x", **base}))[0].shapes
    limit = min((length_limit(shape) for shape in shapes.values()), default=MAX_SEQ_LEN)
    if gpu is None:
        length = min(1024, limit)
        engine = {
            "kind": "torch",
            "max_batch_size": 8,
            "max_input_len": length // 2,
            "max_seq_len": length,
        }
        if _is_small(shapes):
            engine |= {"threads": 1}
            base["triton"] = {"stream_interval_ms": 0.0}
        if draft is not None:
            base["speculation"]["max_draft_len"] = "auto"
        yield _with(base, INT8, None, engine, {})
        return
    length = min(MAX_SEQ_LEN, limit)
    sizes = {
        "tensorrt_llm": "1.2.1",
        "max_batch_size": 16,
        "max_input_len": length // 2,
        "max_seq_len": length,
    }
    listed = all(SMOOTHQUANT_FAMILIES.get(family_of(shape)) == "yes" for shape in shapes.values())
    if gpu.sm >= 89:
        flow, algo, kv = "trtllm_pytorch", FP8, FP8
    else:
        flow, algo, kv = "trt_engine", INT8 if listed else "W8A16", None
    for tp_size in TP_SIZES:
        engine = {"kind": flow, **sizes, "tp_size": tp_size}
        yield _with(base, algo, kv, engine, {"gpu": gpu.name, "count": tp_size})


def _is_small(shapes: Mapping[Role, ModelShape]) -> bool:
    return "target" in shapes and parameters(shapes["target"]) < SMALL


def _with(
    base: dict[str, Any],
    algo: str,
    kv: str | None,
    engine: dict[str, Any],
    hardware: dict[str, Any],
) -> dict[str, Any]:
    quantization = (
        {"quant_algo": algo} if kv is None else {"quant_algo": algo, "kv_cache_quant_algo": kv}
    )
    models: dict[str, Any] = {
        role: {**base[role], "quantization": quantization}
        for role in ("target", "draft")
        if role in base
    }
    rest: dict[str, Any] = (
        {"engine": engine, "hardware": hardware} if hardware else {"engine": engine}
    )
    return {**base, **models, **rest}


WHY = {
    "FP8": (
        "weights and activations in FP8, and the KV cache too: half the bytes, and this GPU"
        " computes in it"
    ),
    "W8A8_SQ_PER_CHANNEL": "INT8 weights and activations (SmoothQuant)",
    "W8A16": "INT8 weights: ModelOpt does not vouch for SmoothQuant with this family",
    "torch": "the embedded engine: runs anywhere. Also: trtllm_pytorch, trt_engine",
    "trtllm_pytorch": "TensorRT-LLM's PyTorch flow: loads the quantized checkpoint as it is",
    "threads": (
        "so small a model computes less than a second thread costs in waiting; without this line,"
        " all cores"
    ),
    "trt_engine": "TensorRT-LLM's engine flow: the one that loads INT8 weights on this GPU",
}


DRAFT_LEN = {
    4: "tokens drafted per step; the plan says from which acceptance on it pays",
    "auto": (
        "the build measures what pays, up to 8 tokens a step, and serves without the draft if"
        " nothing does"
    ),
}
INTERVAL = (
    (
        "A chunk per step, as most servers stream. Sending one costs about as much as a forward of"
        " so small a model, and"
    ),
    (
        "speculation saves that too. The default, 10, sends fewer chunks: both arms are faster"
        " then, and speculation gains less."
    ),
)
WITHOUT_LOGITS = (
    (
        "  # TensorRT-LLM shows no logits: both arms' texts are judged. BF16 logits between 16 and"
        " 32 lie 0.125 apart, so ties are"
    ),
    "  # common, and bounded loosely here; a text that differs beyond one fails in any case.",
    "  parity: {max_divergence_rate: 0.6, near_tie_margin: 0.25}",
    (
        "  distribution: {effect: 0.15, max_seconds: 600} # what samples of texts can tell apart in"
        " that time"
    ),
)


def _written(name: str, file_name: str, data: dict[str, Any], folder: Path) -> str:
    """The same as commented YAML; paths are written as seen from the folder."""
    engine, quantization = data["engine"], data["target"]["quantization"]
    pairs = ", ".join(f"{key}: {value}" for key, value in quantization.items())
    lines = [
        "# Written by `toolkit init`; docs/configuration.md lists every key.",
        (
            f"# `toolkit plan {shlex.quote(file_name)}` says whether it can work and what it needs;"
            " `toolkit build` does it."
        ),
        "",
        (
            f"name: {name} # results stand in engines/{name}, triton_repo/{name} and"
            f" build/reports/{name}"
        ),
        "",
        "target:",
        f"  checkpoint: {_path(data['target']['checkpoint'], folder)}",
        f"  quantization: {{{pairs}}} # {WHY[quantization['quant_algo']]}",
        "",
    ]
    if "draft" in data:
        lines += [
            "draft: # needs the target's tokenizer; `toolkit pair` proves it",
            f"  checkpoint: {_path(data['draft']['checkpoint'], folder)}",
            f"  quantization: {{{pairs}}}",
            "",
        ]
    lines += [
        "calibration:",
        f"  dataset: {CALIBRATION} # one JSON object with a `text` per line, like your traffic",
        "",
        "speculation:",
        f"  kind: {data['speculation']['kind']}",
    ]
    if "draft" in data:
        length = data["speculation"]["max_draft_len"]
        lines.append(f"  max_draft_len: {length} # {DRAFT_LEN[length]}")
    lines += ["", "engine:", f"  kind: {engine['kind']} # {WHY[engine['kind']]}"]
    if "tensorrt_llm" in engine:
        lines += [
            f'  tensorrt_llm: "{engine["tensorrt_llm"]}"',
            f"  tp_size: {engine['tp_size']} # GPUs that share every layer",
        ]
    lines += [
        f"  max_batch_size: {engine['max_batch_size']}",
        f"  max_input_len: {engine['max_input_len']}",
        f"  max_seq_len: {engine['max_seq_len']} # prompt and output together",
        "",
    ]
    if "threads" in engine:
        lines[-1:-1] = [f"  threads: {engine['threads']} # {WHY['threads']}"]
    if "triton" in data:
        lines += ["triton:", *(f"  # {line}" for line in INTERVAL), "  stream_interval_ms: 0", ""]
    if "hardware" in data:
        lines += [
            f"hardware: {{gpu: {data['hardware']['gpu']}, count: {data['hardware']['count']}}}",
            "",
        ]
    lines += [
        "validation:",
        (
            f"  prompts: {PROMPTS} # one JSON object with a `prompt` per line; none of the"
            " calibration text"
        ),
    ]
    if "draft" in data and "hardware" in data:
        lines += WITHOUT_LOGITS
    if "draft" in data:
        # A comment: stated, it fails a build that was left to choose the draft length and chose
        # none.
        lines.append(
            "  # latency: {min_speedup: 1.15} # the default: speculative over plain tokens/s, by"
            " its interval"
        )
    lines.append("")
    return "\n".join(lines)


def _path(checkpoint: Path, folder: Path) -> str:
    """Hub ids as they are; folders relative where they lie beneath the YAML's. In quotes where
    YAML would read more into it.
    """
    inside = checkpoint.is_absolute() and checkpoint.is_relative_to(folder)
    text = (checkpoint.relative_to(folder) if inside else checkpoint).as_posix()
    return text if re.fullmatch(r"[\w./+-]+", text) else "'" + text.replace("'", "''") + "'"
