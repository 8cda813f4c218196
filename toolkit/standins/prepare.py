"""A deployment -> the same one with what is not at hand replaced, and the list of what was.

Two configs come out. `asked` is the YAML's own with stand-ins for its checkpoints: it decides what
is quantized and for which ranks. `served` has the embedded engine in the engine's place, with small
sizes: it is compiled, packaged and measured.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
from toolkit.facts.models import CONFIGS
from toolkit.pipeline.texts import read_texts
from toolkit.standins.checkpoints import scaled_config, write_stand_in
from toolkit.standins.tokenizer import habits_of, num_tokens
from toolkit.words import Layout, Role

__all__ = ["SUFFIX", "Rehearsal", "prepare"]

SUFFIX = "-rehearsal"  # of the name that results stand under
ROWS = 64  # of a vocabulary: the least multiple that holds all tokens
SIZES = {"max_batch_size": 4, "max_input_len": 128, "max_seq_len": 192}  # at most
DRAFT_LEN = 4
MAX_TOKENS = 16
PROMPTS = 16
PROMPT_CHARACTERS = 48
CALIBRATION = {"calib_size": 16, "calib_max_seq_length": 64}  # at most
TIES = 0.5  # of the prompts may meet a near-tie: with 16 prompts no smaller rate can be bounded
# at least: the controls of the test of sampled tokens see nothing where one token is certain
TEMPERATURE = 1.0
EFFECT, SECONDS = (
    0.12,
    180.0,
)  # of the test of sampled tokens; drawing ends sooner where it has enough
LINES = (
    "def total(values):\n    return sum(value for value in values if value is not None)",
    "The server answers every request once, and closes the connection when the text is complete.",
    "class Queue:\n    def __init__(self, limit):\n        self.items, self.limit = [], limit",
    "A draft proposes a few tokens, and the target keeps those that it would have chosen itself.",
)


@dataclass(frozen=True, slots=True)
class Rehearsal:
    """replaced: in words, what stands in for what."""

    asked: DeploymentConfig
    served: DeploymentConfig
    replaced: tuple[str, ...]


def prepare(config: DeploymentConfig, folder: Path) -> Rehearsal:
    """Write the stand-ins and the texts into `folder`. The same YAML gives the same bytes.

    Raises CheckpointError for a model of which no config.json can be read.
    """
    replaced: list[str] = []
    models = _stand_ins(config, folder, replaced)
    calibration = config.calibration and _calibration(config.calibration, folder, replaced)
    validation = _validation(config.validation, folder, replaced)
    can, speculation = config.capabilities, config.speculation
    if speculation.is_measured:  # what pays here says nothing about the real pair
        replaced.append(f"speculation.max_draft_len auto: {DRAFT_LEN}")
        speculation = speculation.model_copy(update={"max_draft_len": DRAFT_LEN})
    asked = config.model_copy(
        update={
            **models,
            "name": config.name + SUFFIX,
            "calibration": calibration,
            "speculation": speculation,
            "validation": validation,
        }
    )
    sizes = {name: min(getattr(config.engine, name), most) for name, most in SIZES.items()}
    own = config.embedded_engine
    settings = {} if own is None else own.model_dump(exclude=set(SIZES))
    engine = TorchEngineConfig(**{**settings, "mode": "eager", "threads": 1, **sizes})
    what = "the same, eager" if can.in_process else "the embedded engine on this machine"
    listed = ", ".join(f"{name} {size}" for name, size in sizes.items())
    replaced.append(f"engine {can.kind}: {what}, {listed}")
    triton = _triton(config.triton, can.layout)
    served = asked.model_copy(update={"engine": engine, "triton": triton})
    replaced += _rule(config)
    return Rehearsal(asked, served, tuple(replaced))


def _rule(config: DeploymentConfig) -> list[str]:
    """Where sampled tokens are accepted by another rule.

    The real one would be to no purpose here: of random weights two samples are hardly ever the same
    (1 % of drafts were kept by it, and 32 % are by rejection), and what is never accepted is not
    tested.
    """
    can, speculation = config.capabilities, config.speculation
    real, here = can.acceptance[0], EMBEDDED.acceptance[0]
    if not speculation.is_enabled or speculation.acceptance != "auto" or real == here:
        return []
    how = ", over its draft's likeliest token" if can.drafts_greedily else ""
    return [
        f"accept rule of sampled tokens, {real} in {can.kind}{how}: {here}; the real rule is not"
        " tested"
    ]


def _triton(triton: TritonConfig, layout: Layout) -> TritonConfig:
    return triton.model_copy(
        update={"layout": layout, "default_max_tokens": min(triton.default_max_tokens, MAX_TOKENS)}
    )


def _stand_ins(
    config: DeploymentConfig, folder: Path, replaced: list[str]
) -> dict[str, ModelConfig]:
    models = config.models
    stated = {role: _config_of(model) for role, model in models.items()}
    shapes = {
        role: parse_shape(config, where=models[role].checkpoint) for role, config in stated.items()
    }
    habits = habits_of(shapes["target"].architecture)
    rows = _rows(shapes, num_tokens(habits))
    ranks = config.engine.tp_size, config.engine.pp_size
    found: dict[str, ModelConfig] = {}
    for seed, (role, model) in enumerate(models.items()):
        scaled = scaled_config(stated[role], shapes[role], rows[role], *ranks)
        directory = folder / "models" / role
        made = write_stand_in(directory, scaled, habits, seed=seed)
        name = model.hub_id or model.checkpoint.name
        replaced.append(f"{role} {name}: random weights, {_sizes(shapes[role], made)}")
        found[role] = model.model_copy(update={"checkpoint": directory, "revision": None})
    replaced.append(
        f"tokenizer: a byte-level one of {num_tokens(habits)} tokens for both, with the special"
        " ones of its family; that the real ones agree is not shown by it"
    )
    return found


def _config_of(model: ModelConfig) -> dict[str, Any]:
    """config.json of a folder, of the shipped facts, or of the hub's cache."""
    if model.hub_id is None:
        return read_json(model.checkpoint / "config.json")
    if model.hub_id in CONFIGS:
        return CONFIGS[model.hub_id]
    return read_json(fetch(model.hub_id, model.revision, download=False) / "config.json")


def _rows(shapes: Mapping[Role, ModelShape], tokens: int) -> dict[Role, int]:
    """Rows of each vocabulary: all tokens, padded, and as many more as the real one has over its
    partner.
    """
    least = min(shape.vocab_size for shape in shapes.values())
    padded = -(-tokens // ROWS) * ROWS
    return {role: padded + shape.vocab_size - least for role, shape in shapes.items()}


def _sizes(real: ModelShape, made: ModelShape) -> str:
    """What was scaled down, from -> to."""
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
        f"{title} {one} -> {other}" for title, (one, other) in pairs.items() if one != other
    )


def _calibration(
    calibration: CalibrationConfig, folder: Path, replaced: list[str]
) -> CalibrationConfig:
    least = {name: min(getattr(calibration, name), most) for name, most in CALIBRATION.items()}
    files: dict[str, Path | None] = {"dataset": calibration.dataset, "heldout": calibration.heldout}
    for name, file in files.items():
        if file is not None and not file.is_file():
            files[name] = folder / f"{name}.jsonl"
            _write_lines(folder / f"{name}.jsonl", "text", LINES * 4)
            replaced.append(
                f"calibration.{name} {file.name}, which is not here: {len(LINES)} lines of text,"
                " repeated"
            )
    replaced.append(
        f"calibration: {least['calib_size']} lines of at most {least['calib_max_seq_length']}"
        f" tokens instead of {calibration.calib_size} of {calibration.calib_max_seq_length}"
    )
    return calibration.model_copy(update={**least, **files})


def _validation(
    validation: ValidationConfig, folder: Path, replaced: list[str]
) -> ValidationConfig:
    count, tokens = min(validation.max_prompts, PROMPTS), min(validation.max_tokens, MAX_TOKENS)
    temperature = max(validation.temperature, TEMPERATURE)
    if validation.prompts.is_file():
        prompts = [
            text[:PROMPT_CHARACTERS]
            for text in read_texts(validation.prompts, "prompt", "text", limit=count)
        ]
        which = f"{len(prompts)} of its prompts, cut to {PROMPT_CHARACTERS} characters"
    else:
        prompts = [
            line[: PROMPT_CHARACTERS - index]
            for index in range(PROMPTS // len(LINES))
            for line in LINES
        ][:count]
        which = f"which is not here, {len(prompts)} made-up prompts"
    _write_lines(folder / "prompts.jsonl", "prompt", prompts)
    replaced.append(
        f"validation.prompts {validation.prompts.name}: {which}, {tokens} tokens of output, one"
        " round"
    )
    if validation.latency.concurrency:
        replaced.append("validation.latency.concurrency: one request at a time")
    replaced.append(
        f"validation: as few prompts allow, near-ties in {TIES:.0%} of them may end in another"
        f" text, and tokens are sampled at temperature {temperature:g} and tested for a total"
        f" variation of {EFFECT:g}"
    )
    return validation.model_copy(
        update={
            "prompts": folder / "prompts.jsonl",
            "max_prompts": count,
            "max_tokens": tokens,
            "temperature": temperature,
            "rounds": 1,
            "max_rounds": 1,
            "parity": validation.parity.model_copy(update={"max_divergence_rate": TIES}),
            "latency": validation.latency.model_copy(update={"concurrency": ()}),
            "distribution": validation.distribution.model_copy(
                update={"effect": EFFECT, "max_seconds": SECONDS}
            ),
        }
    )


def _write_lines(file: Path, key: str, lines: Iterable[str]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps({key: line}) + "\n" for line in lines), encoding="utf-8")
