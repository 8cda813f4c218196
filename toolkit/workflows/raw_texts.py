"""Texts that do without the chat template of their deployment.

An instruct model is served conversations, and its template writes them. Calibration, acceptance and
parity that are measured on raw text then describe text that nobody sends, which the plan and the
report say.
"""

from __future__ import annotations

from collections.abc import Iterator

from toolkit.checkpoints.chat import has_chat_template
from toolkit.config.schema import DeploymentConfig
from toolkit.errors import CheckpointError, UsageError
from toolkit.pipeline.rows import read_rows
from toolkit.pipeline.texts import PROMPT_KEYS, TEXT_KEYS
from toolkit.records.measured import Finding

__all__ = ["RAW_TEXT_HINT", "raw_text_findings", "raw_texts"]

RAW_TEXT_HINT = (
    'Write {"messages": [{"role": "user", "content": "..."}]} on each line; docs/chat.md has all'
    " forms."
)


def raw_texts(config: DeploymentConfig, *, is_instruct: bool = False) -> Iterator[tuple[str, str]]:
    """(key of the YAML, what is wrong) of each file of raw text beside a chat template. Files that
    cannot be read are judged elsewhere.

    is_instruct: known of a hub id by its name; its template is not read, since a plan does not
    depend on what is in this machine's cache.
    """
    why = "is an instruct model"
    if not is_instruct:
        try:
            if not has_chat_template(config.target.checkpoint):
                return
        except CheckpointError:
            return
        why = "has a chat template"
    validation, calibration = config.validation, config.calibration
    files = [
        (
            "validation.prompts",
            validation.prompts,
            PROMPT_KEYS,
            validation.max_prompts,
            "acceptance, parity and latency are",
        )
    ]
    if calibration is not None and _is_quantized(config):
        limit = calibration.calib_size
        files.append(
            ("calibration.dataset", calibration.dataset, TEXT_KEYS, limit, "activation scales are")
        )
        if calibration.heldout is not None:
            files.append(
                ("calibration.heldout", calibration.heldout, TEXT_KEYS, limit, "quality is")
            )
    for key, file, names, limit, measured in files:
        try:
            rows = read_rows(file, *names, limit=limit)
        except UsageError:
            continue
        raw = sum(not row.messages for row in rows)
        if raw:
            yield (
                key,
                f"{raw} of the {len(rows)} texts that are used are raw, and the target {why}:"
                f" {measured} measured on text that no chat client sends",
            )


def raw_text_findings(config: DeploymentConfig) -> list[Finding]:
    """What the report says about raw text."""
    return [Finding("raw text", "warning", f"{key}: {what}") for key, what in raw_texts(config)]


def _is_quantized(config: DeploymentConfig) -> bool:
    return any(model.quantization.quant_algo != "NO_QUANT" for model in config.models.values())
