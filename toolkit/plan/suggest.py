"""Write a first YAML for a pair: precision, engine and sizes that can work according to the plan,
each with a comment that gives the reason.

The YAML is a start, not an optimum. It takes the fewest GPUs that hold a full batch at full length
(or at least one sequence, if no number of GPUs holds the batch), the narrowest precision that is
documented as supported, and a length that both models reach.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolkit.checkpoints.chat import has_chat_template
from toolkit.checkpoints.hub import fetch
from toolkit.checkpoints.reader import check_files
from toolkit.checkpoints.shape import ModelShape
from toolkit.config.schema import DeploymentConfig
from toolkit.errors import BackendUnavailable, CheckpointError, UsageError
from toolkit.facts.gpus import Gpu
from toolkit.facts.support import SMOOTHQUANT_FAMILIES
from toolkit.plan.make import make_plan, subject_of
from toolkit.plan.memory import parameters
from toolkit.plan.subject import family_of, length_limit
from toolkit.records.plan import Plan
from toolkit.words import Role

__all__ = ["Suggestion", "suggest"]

TP_SIZES = (1, 2, 4, 8)
MAX_SEQ_LEN = 8192  # a start; the plan says how many sequences of this length fit
INT8, FP8 = "W8A8_SQ_PER_CHANNEL", "FP8"
# Models with fewer parameters get one CPU thread. Measured on both sides: with 9 M parameters a
# second thread costs more time in waiting than it saves, with 250 M two threads reach the memory's
# bandwidth. The value between them is a choice.
ONE_THREAD_PARAMETERS = 100_000_000
CALIBRATION, PROMPTS = "data/calib.jsonl", "data/prompts.jsonl"


@dataclass(frozen=True, slots=True)
class _Lines:
    """What the lines of both files look like. key: what a line has, for a comment in the YAML."""

    calibration: str
    calibration_key: str
    prompt: str
    prompt_key: str
    reason: str = ""

    @property
    def texts(self) -> dict[str, str]:
        """File -> what the user has to write into it."""
        return {
            CALIBRATION: f"{self.calibration} on each line, similar to your traffic; 128 lines are"
            " used",
            PROMPTS: f"{self.prompt} on each line, with none of the calibration text; 64 lines are"
            " used, and 59 are needed to show 5 %",
        }


RAW = _Lines('{"text": "..."}', "a `text`", '{"prompt": "..."}', "a `prompt`")
CHAT = _Lines(
    '{"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}',
    "`messages`",
    '{"messages": [{"role": "user", "content": "..."}]}',
    "`messages`",
    "; the target has a chat template, which writes them",
)


@dataclass(frozen=True, slots=True)
class Suggestion:
    """A suggested deployment.

    text: the YAML. plan: the plan of this YAML. texts: what the user has to write into each file
    that the YAML names.
    """

    name: str
    file_name: str
    text: str
    plan: Plan
    texts: Mapping[str, str]


def suggest(
    target: Path, draft: Path | None, gpu: Gpu | None, *, folder: Path, file_name: str | None = None
) -> Suggestion:
    """Suggest the first deployment that the plan accepts.

    target, draft: folders or hub ids. gpu: None for the embedded engine. folder: where the YAML
    will be written. file_name: the YAML's name, whose stem becomes the deployment's name; None to
    name both after the target.

    Raises UsageError if no attempt can work, with the refusals of the last one, and CheckpointError
    for a damaged checkpoint.
    """
    for checkpoint in (target, draft):
        if checkpoint is not None and checkpoint.is_dir():
            check_files(checkpoint)
    plan: Plan | None = None
    fallback: Suggestion | None = None  # it can work, but does not hold a full batch
    name = _name(Path(file_name).stem if file_name is not None else target.name.lower())
    file_name = file_name or f"{name}.yaml"
    lines = CHAT if _is_chat(target) else RAW
    for data in _attempts(target, draft, gpu):
        config = DeploymentConfig.model_validate({"name": name, **data})
        plan = make_plan(config)
        if not plan.possible:
            continue
        text = _yaml(name, file_name, data, folder, lines)
        suggestion = Suggestion(name, file_name, text, plan, lines.texts)
        if not any(judgement.rule == "batch-fits" for judgement in plan.judgements):
            return suggestion
        fallback = fallback or suggestion
    if fallback is not None:
        return fallback
    judgements = () if plan is None else plan.judgements
    refusals = [judgement for judgement in judgements if judgement.severity == "refused"]
    reasons = "; ".join(refusal.what for refusal in refusals[:3])
    raise UsageError(
        f"no deployment that was tried can work: {reasons}",
        hint=refusals[0].hint if refusals else None,
    )


def _is_chat(target: Path) -> bool:
    """Whether the target has a chat template, as far as its files are here. A hub id is looked up
    in the hub's cache.
    """
    if not target.is_dir():
        try:
            target = fetch(target.as_posix(), download=False)
        except (BackendUnavailable, CheckpointError):
            return False
    return has_chat_template(target)


def _name(text: str) -> str:
    """Make a name that folders can have; see `name` in the config schema."""
    return (
        re.sub(r"\.{2,}", ".", re.sub(r"[^A-Za-z0-9._]+", "-", text)).strip("-._")[:80]
        or "deployment"
    )


def _attempts(target: Path, draft: Path | None, gpu: Gpu | None) -> Iterator[dict[str, Any]]:
    """Yield the deployments to try, the best one first."""
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
    has_smoothquant = all(
        SMOOTHQUANT_FAMILIES.get(family_of(shape)) == "yes" for shape in shapes.values()
    )
    if gpu.sm >= 89:
        flow, algo, kv = "trtllm_pytorch", FP8, FP8
    else:
        flow, algo, kv = "trt_engine", INT8 if has_smoothquant else "W8A16", None
    for tp_size in TP_SIZES:
        engine = {"kind": flow, **sizes, "tp_size": tp_size}
        yield _with(base, algo, kv, engine, {"gpu": gpu.name, "count": tp_size})


def _is_small(shapes: Mapping[Role, ModelShape]) -> bool:
    return "target" in shapes and parameters(shapes["target"]) < ONE_THREAD_PARAMETERS


def _with(
    base: dict[str, Any],
    algo: str,
    kv: str | None,
    engine: dict[str, Any],
    hardware: dict[str, Any],
) -> dict[str, Any]:
    """Complete `base` to a deployment with this precision, engine and hardware."""
    quantization = {"quant_algo": algo}
    if kv is not None:
        quantization["kv_cache_quant_algo"] = kv
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
        "weights, activations and KV cache in FP8: half the bytes, and this GPU computes in FP8"
    ),
    "W8A8_SQ_PER_CHANNEL": "INT8 weights and activations (SmoothQuant)",
    "W8A16": "INT8 weights: ModelOpt does not list SmoothQuant as supported for this family",
    "torch": "the embedded engine: runs anywhere. Also: vllm, trtllm_pytorch, trt_engine",
    "trtllm_pytorch": (
        "TensorRT-LLM's PyTorch flow: loads the quantized checkpoint as it is. Also: vllm"
    ),
    "threads": (
        "for so small a model, a second thread waits longer than it computes; without this line,"
        " all cores are used"
    ),
    "trt_engine": "TensorRT-LLM's engine flow: the one that loads INT8 weights on this GPU",
}


DRAFT_LEN_COMMENTS = {
    4: "tokens drafted per step; the plan says above which acceptance rate this pays",
    "auto": (
        "the build measures which length pays, up to 8 tokens per step; if none does, it serves"
        " without the draft"
    ),
}
INTERVAL_COMMENTS = (
    (
        "Send a chunk per step, as most servers do. For so small a model, sending a chunk takes"
        " about as long as a forward, and"
    ),
    (
        "speculation saves that time too. The default, 10, sends fewer chunks: both arms are"
        " faster, and speculation gains less."
    ),
)
WITHOUT_LOGITS = (
    (
        "  # TensorRT-LLM returns no logits, so the texts of both arms are compared. BF16 logits"
        " between 16 and 32 are 0.125 apart, so"
    ),
    (
        "  # near ties are common, and their limit is loose here. A text that differs by more than"
        " a near tie fails in any case."
    ),
    "  parity: {max_divergence_rate: 0.6, near_tie_margin: 0.25}",
    (
        "  distribution: {effect: 0.15, max_seconds: 600} # the difference that samples of texts"
        " can show in that time"
    ),
)


def _yaml(name: str, file_name: str, data: dict[str, Any], folder: Path, texts: _Lines) -> str:
    """Write the deployment as YAML with comments; paths are relative to the YAML's folder."""
    engine, quantization = data["engine"], data["target"]["quantization"]
    pairs = ", ".join(f"{key}: {value}" for key, value in quantization.items())
    lines = [
        "# Written by `toolkit init`; docs/configuration.md lists every key.",
        (
            f"# `toolkit plan {shlex.quote(file_name)}` says whether this can work and what it"
            " needs; `toolkit build` builds it."
        ),
        "",
        (
            f"name: {name} # results are in engines/{name}, triton_repo/{name} and"
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
        f"  dataset: {CALIBRATION} # one JSON object with {texts.calibration_key}"
        f" per line, similar to your traffic{texts.reason}",
        "",
        "speculation:",
        f"  kind: {data['speculation']['kind']}",
    ]
    if "draft" in data:
        length = data["speculation"]["max_draft_len"]
        lines.append(f"  max_draft_len: {length} # {DRAFT_LEN_COMMENTS[length]}")
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
        lines += [
            "triton:",
            *(f"  # {line}" for line in INTERVAL_COMMENTS),
            "  stream_interval_ms: 0",
            "",
        ]
    if "hardware" in data:
        lines += [
            f"hardware: {{gpu: {data['hardware']['gpu']}, count: {data['hardware']['count']}}}",
            "",
        ]
    lines += [
        "validation:",
        (
            f"  prompts: {PROMPTS} # one JSON object with {texts.prompt_key} per"
            " line, with none of the calibration text"
        ),
    ]
    if "draft" in data and "hardware" in data:
        lines += WITHOUT_LOGITS
    if "draft" in data:
        # Only as a comment: a stated min_speedup fails a build that may choose the draft length
        # and decides not to speculate.
        lines.append(
            "  # latency: {min_speedup: 1.15} # the default: speculative over plain tokens/s,"
            " judged by its confidence interval"
        )
    lines.append("")
    return "\n".join(lines)


def _path(checkpoint: Path, folder: Path) -> str:
    """Write a checkpoint's path or hub id; a folder below the YAML's becomes a relative path.

    The text is quoted if YAML would give its characters a meaning.
    """
    is_inside = checkpoint.is_absolute() and checkpoint.is_relative_to(folder)
    text = (checkpoint.relative_to(folder) if is_inside else checkpoint).as_posix()
    return text if re.fullmatch(r"[\w./+-]+", text) else "'" + text.replace("'", "''") + "'"
