"""Replace the parts of a deployment that this machine does not have, and list what was replaced.

The result has two configs. `requested` is the YAML's own with stand-ins for its checkpoints: it
decides what is quantized and for which ranks. `served` has small sizes and the embedded engine in
place of the YAML's engine: it is compiled, packaged and measured.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolkit.checkpoints.heads import parse_head, read_head
from toolkit.checkpoints.hub import fetch
from toolkit.checkpoints.shape import ModelShape, parse_shape, read_json
from toolkit.config.schema import (
    CalibrationConfig,
    DeploymentConfig,
    ModelConfig,
    TorchEngineConfig,
    TritonConfig,
    ValidationConfig,
)
from toolkit.facts.capabilities import EMBEDDED
from toolkit.facts.models import CONFIGS, HEAD_CONFIGS
from toolkit.pipeline.rows import holds_conversations
from toolkit.pipeline.texts import PROMPT_KEYS, TEXT_KEYS, read_texts
from toolkit.standins.checkpoints import scaled_config, write_stand_in
from toolkit.standins.heads import TARGET_LAYERS, scaled_head_config, write_stand_in_head
from toolkit.standins.tokenizer import habits_of, num_tokens
from toolkit.words import Layout, Role

__all__ = ["SUFFIX", "Rehearsal", "prepare"]

SUFFIX = "-rehearsal"  # of the deployment's name, under which results are filed
ROW_MULTIPLE = 64  # a vocabulary has a multiple of this many rows
MAX_SIZES = {"max_batch_size": 4, "max_input_len": 128, "max_seq_len": 192}
DRAFT_LEN = 4
MAX_TOKENS = 16
MAX_PROMPTS = 16
PROMPT_CHARACTERS = 48
CONVERSATIONS = 64  # of a file of calibration text, which are written out
MAX_CALIBRATION = {"calib_size": 16, "calib_max_seq_length": 64}
# Share of prompts that may meet a near-tie. With 16 prompts no smaller rate can be bounded.
MAX_DIVERGENCE_RATE = 0.5
# If one token were certain, the controls of the test of sampled tokens could not detect anything.
MIN_TEMPERATURE = 1.0
# The test of sampled tokens: total variation to detect, and the time limit. It ends earlier if it
# has drawn enough.
EFFECT, MAX_SECONDS = 0.12, 180.0
LINES = (
    "def total(values):\n    return sum(value for value in values if value is not None)",
    "The server answers every request once, and closes the connection when the text is complete.",
    "class Queue:\n    def __init__(self, limit):\n        self.items, self.limit = [], limit",
    "A draft proposes a few tokens, and the target keeps those that it would have chosen itself.",
)


@dataclass(frozen=True, slots=True)
class Rehearsal:
    """replaced: one line per replacement, for the reader of the report."""

    requested: DeploymentConfig
    served: DeploymentConfig
    replaced: tuple[str, ...]


def prepare(config: DeploymentConfig, folder: Path) -> Rehearsal:
    """Write the stand-ins and the texts into `folder`. The same YAML gives the same bytes.

    Raises CheckpointError if the config.json of a model cannot be read.
    """
    replaced: list[str] = []
    models = _stand_ins(config, folder, replaced)
    has_head = config.speculation.head is not None
    chat = config.target.checkpoint  # the stand-ins have no chat template
    calibration = config.calibration and _calibration(config.calibration, chat, folder, replaced)
    validation = _validation(config.validation, chat, folder, replaced)
    capabilities, speculation = config.capabilities, config.speculation
    if speculation.is_measured:
        # The best draft length of the stand-ins says nothing about that of the real pair.
        replaced.append(f"speculation.max_draft_len auto: {DRAFT_LEN}")
        speculation = speculation.model_copy(update={"max_draft_len": DRAFT_LEN})
    updates: dict[str, Any] = {str(role): model for role, model in models.items()}
    updates |= {
        "name": config.name + SUFFIX,
        "calibration": calibration,
        "speculation": speculation,
        "validation": validation,
    }
    requested = config.model_copy(update=updates)
    sizes = {name: min(getattr(config.engine, name), limit) for name, limit in MAX_SIZES.items()}
    embedded = config.embedded_engine
    settings = {"enable_prefix_caching": config.engine.enable_block_reuse}
    if embedded is not None:
        settings = embedded.model_dump(exclude=set(MAX_SIZES))
    engine = TorchEngineConfig(**{**settings, "mode": "eager", "threads": 1, **sizes})
    substitute = "the embedded engine on this machine"
    if capabilities.in_process:
        substitute = "the same, eager"
    described_sizes = ", ".join(f"{name} {size}" for name, size in sizes.items())
    replaced.append(f"engine {capabilities.kind}: {substitute}, {described_sizes}")
    if has_head:
        replaced.append(
            "the head: not run. The embedded engine has none, and drafts by lookup in the text"
            " (ngram): the acceptance is that of the lookup. The head is compared with its target,"
            " copied, packaged, and named to the engine that would run it"
        )
    if config.vllm_engine is not None:
        replaced.append(
            f"vLLM {config.vllm_engine.vllm}: not run; the checkpoints, arguments and repository"
            " that it reads are written and read back"
        )
    layout: Layout = "bls" if capabilities.layout == "bls" else "llmapi"
    triton = _triton(config.triton, layout)
    served = requested.model_copy(update={"engine": engine, "triton": triton})
    if has_head:
        lookup = speculation.model_copy(update={"kind": "ngram"})
        served = served.model_copy(update={"draft": None, "speculation": lookup})
    replaced += _accept_rule(config)
    return Rehearsal(requested, served, tuple(replaced))


def _accept_rule(config: DeploymentConfig) -> list[str]:
    """The line that says that sampled tokens are accepted by another rule, if so.

    The real rule would test nothing here: two samples of random weights are hardly ever the same
    (it accepted 1 % of the draft tokens, and rejection accepts 32 %), and the code for accepted
    tokens would hardly run.
    """
    capabilities, speculation = config.capabilities, config.speculation
    real, rehearsed = capabilities.acceptance[0], EMBEDDED.acceptance[0]
    if not speculation.is_enabled or speculation.acceptance != "auto" or real == rehearsed:
        return []
    detail = ", over its draft's likeliest token" if capabilities.drafts_greedily else ""
    return [
        f"accept rule of sampled tokens, {real} in {capabilities.kind}{detail}: {rehearsed}; the"
        " real rule is not tested"
    ]


def _triton(triton: TritonConfig, layout: Layout) -> TritonConfig:
    return triton.model_copy(
        update={"layout": layout, "default_max_tokens": min(triton.default_max_tokens, MAX_TOKENS)}
    )


def _stand_ins(
    config: DeploymentConfig, folder: Path, replaced: list[str]
) -> dict[Role, ModelConfig]:
    head = config.draft if config.speculation.head is not None else None
    models = {role: model for role, model in config.models.items() if model is not head}
    model_configs = {role: _config_of(model, CONFIGS) for role, model in models.items()}
    shapes = {
        role: parse_shape(model_config, where=models[role].checkpoint)
        for role, model_config in model_configs.items()
    }
    habits = habits_of(shapes["target"].architecture)
    rows = _rows(shapes, num_tokens(habits))
    ranks = config.engine.tp_size, config.engine.pp_size
    stand_ins: dict[Role, ModelConfig] = {}
    made: dict[Role, ModelShape] = {}
    for seed, (role, model) in enumerate(models.items()):
        scaled = scaled_config(model_configs[role], shapes[role], rows[role], *ranks)
        if head is not None:
            scaled["num_hidden_layers"] = max(TARGET_LAYERS, scaled["num_hidden_layers"])
        directory = folder / "models" / role
        made[role] = write_stand_in(directory, scaled, habits, seed=seed)
        replaced.append(
            f"{role} {_name(model)}: random weights, {_sizes(shapes[role], made[role])}"
        )
        stand_ins[role] = model.model_copy(update={"checkpoint": directory, "revision": None})
    if head is not None:
        stand_ins["draft"] = _stand_in_head(head, made["target"], folder, replaced)
    replaced.append(
        f"tokenizer: a byte-level one of {num_tokens(habits)} tokens"
        f"{'' if head is not None else ' for both'}, with the special tokens of its family; it does"
        " not show that the real tokenizers agree"
    )
    return stand_ins


def _stand_in_head(
    head: ModelConfig, target: ModelShape, folder: Path, replaced: list[str]
) -> ModelConfig:
    """target: the shape of the stand-in that the head is for."""
    directory = folder / "models" / "draft"
    real = parse_head(_config_of(head, HEAD_CONFIGS), _name(head))
    write_stand_in_head(directory, scaled_head_config(real, target), seed=1)
    made = read_head(directory)
    replaced.append(
        f"draft {_name(head)}: a random head, {_sizes(real.layers, made.layers)}, draft ids"
        f" {real.draft_vocab_size} -> {made.draft_vocab_size}"
    )
    return head.model_copy(update={"checkpoint": directory, "revision": None})


def _name(model: ModelConfig) -> str:
    return model.hub_id or model.checkpoint.name


def _config_of(model: ModelConfig, known: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """The config.json of a folder, from the shipped facts, or from the hub's cache."""
    if model.hub_id is None:
        return read_json(model.checkpoint / "config.json")
    if model.hub_id in known:
        return known[model.hub_id]
    return read_json(fetch(model.hub_id, model.revision, download=False) / "config.json")


def _rows(shapes: Mapping[Role, ModelShape], tokens: int) -> dict[Role, int]:
    """The rows of each vocabulary: all tokens, padded, and as many more rows as the real vocabulary
    has beyond the smaller one of the pair.
    """
    smallest = min(shape.vocab_size for shape in shapes.values())
    padded = -(-tokens // ROW_MULTIPLE) * ROW_MULTIPLE
    return {role: padded + shape.vocab_size - smallest for role, shape in shapes.items()}


def _sizes(real: ModelShape, made: ModelShape) -> str:
    """The sizes that were scaled down, as "name from -> to"."""
    names = {
        "layers": "num_layers",
        "hidden": "hidden_size",
        "heads": "num_heads",
        "KV heads": "num_kv_heads",
        "head_dim": "head_dim",
        "MLP": "intermediate_size",
        "vocabulary": "vocab_size",
    }
    pairs = {title: (getattr(real, name), getattr(made, name)) for title, name in names.items()}
    return ", ".join(
        f"{title} {before} -> {after}"
        for title, (before, after) in pairs.items()
        if before != after
    )


def _calibration(
    calibration: CalibrationConfig, chat: Path, folder: Path, replaced: list[str]
) -> CalibrationConfig:
    sizes = {
        name: min(getattr(calibration, name), limit) for name, limit in MAX_CALIBRATION.items()
    }
    files: dict[str, Path | None] = {"dataset": calibration.dataset, "heldout": calibration.heldout}
    for name, file in files.items():
        if file is not None and not file.is_file():
            files[name] = folder / f"{name}.jsonl"
            _write_lines(folder / f"{name}.jsonl", "text", LINES * 4)
            replaced.append(
                f"calibration.{name} {file.name}, which is not here: {len(LINES)} made-up lines,"
                " repeated"
            )
        elif file is not None and holds_conversations(file):
            files[name] = folder / f"{name}.jsonl"
            written = read_texts(file, *TEXT_KEYS, limit=CONVERSATIONS, chat=chat, whole=True)
            _write_lines(folder / f"{name}.jsonl", "text", written)
            replaced.append(
                f"calibration.{name} {file.name}: its first {len(written)} texts, with the"
                " conversations written out"
            )
    replaced.append(
        f"calibration: {sizes['calib_size']} lines of at most {sizes['calib_max_seq_length']}"
        f" tokens instead of {calibration.calib_size} of {calibration.calib_max_seq_length}"
    )
    return calibration.model_copy(update={**sizes, **files})


def _validation(
    validation: ValidationConfig, chat: Path, folder: Path, replaced: list[str]
) -> ValidationConfig:
    count, tokens = min(validation.max_prompts, MAX_PROMPTS), min(validation.max_tokens, MAX_TOKENS)
    temperature = max(validation.temperature, MIN_TEMPERATURE)
    if validation.prompts.is_file():
        prompts = [
            text[:PROMPT_CHARACTERS]
            for text in read_texts(validation.prompts, *PROMPT_KEYS, limit=count, chat=chat)
        ]
        origin = f"{len(prompts)} of its prompts, cut to {PROMPT_CHARACTERS} characters"
    else:
        prompts = [
            line[: PROMPT_CHARACTERS - index]
            for index in range(MAX_PROMPTS // len(LINES))
            for line in LINES
        ][:count]
        origin = f"which is not here, {len(prompts)} made-up prompts"
    _write_lines(folder / "prompts.jsonl", "prompt", prompts)
    replaced.append(
        f"validation.prompts {validation.prompts.name}: {origin}, {tokens} tokens of output, one"
        " round"
    )
    if validation.latency.concurrency:
        replaced.append("validation.latency.concurrency: one request at a time")
    if validation.load is not None:
        replaced.append("validation.load: no open loop, whose rates mean nothing for these models")
    replaced.append(
        f"validation: because the prompts are few, {MAX_DIVERGENCE_RATE:.0%} of them may meet a"
        " near-tie and end in another text; tokens are sampled at temperature"
        f" {temperature:g} and tested for a total variation of {EFFECT:g}"
    )
    return validation.model_copy(
        update={
            "prompts": folder / "prompts.jsonl",
            "max_prompts": count,
            "max_tokens": tokens,
            "temperature": temperature,
            "rounds": 1,
            "max_rounds": 1,
            "parity": validation.parity.model_copy(
                update={"max_divergence_rate": MAX_DIVERGENCE_RATE}
            ),
            "latency": validation.latency.model_copy(update={"concurrency": ()}),
            "load": None,
            "distribution": validation.distribution.model_copy(
                update={"effect": EFFECT, "max_seconds": MAX_SECONDS}
            ),
        }
    )


def _write_lines(file: Path, key: str, lines: Iterable[str]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps({key: line}) + "\n" for line in lines), encoding="utf-8")
