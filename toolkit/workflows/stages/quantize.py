"""The stage `quantize`: write a checkpoint in the precision that the YAML asks for."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from toolkit.config.schema import DeploymentConfig
from toolkit.interfaces import Progress
from toolkit.pipeline.hashing import DigestMemo, digest_file, digest_tree
from toolkit.pipeline.stage import Finished, Stage, resume_folder
from toolkit.pipeline.texts import template_part
from toolkit.records.build import QuantizedCheckpoint
from toolkit.words import Head, Role
from toolkit.workflows.deployment import check_prompt_lengths

__all__ = ["quantize_stage"]


def quantize_stage(config: DeploymentConfig, role: Role, memo: DigestMemo) -> Stage:
    """The stage `quantize/ROLE`. memo: remembers the digests of its input files."""
    from toolkit.quantize import stage
    from toolkit.quantize.checkpoint import CODE_PATTERNS

    if role == "draft" and config.speculation.head is not None:
        return _head_stage(config.models[role].checkpoint, config.speculation.head)
    model = config.models[role]
    calibration = None if model.quantization.quant_algo == "NO_QUANT" else config.calibration
    engine = config.engine
    ranks = stage.Ranks(engine.tp_size, engine.pp_size)
    trtllm = ranks if config.capabilities.checkpoint_format == "trtllm" else None

    vllm = config.capabilities.checkpoint_format == "vllm" and stage.needs_vllm_format(
        model.quantization
    )

    def parts(finished: Finished) -> Mapping[str, Any]:
        proof = finished["pair"].record
        inputs = {"checkpoint": proof.target_digest if role == "target" else proof.draft_digest}
        settings = {
            **model.quantization.model_dump(exclude={"allow_unsupported"}),
            "vocab_size": proof.vocab_size,
        }
        settings["trtllm"] = None if trtllm is None else dataclasses.asdict(trtllm)
        if vllm:
            settings["vllm"] = True
        if model.trust_remote_code:
            inputs["code"] = digest_tree(model.checkpoint, CODE_PATTERNS, memo)
        if calibration is not None:
            inputs["dataset"] = digest_file(calibration.dataset, memo)
            inputs["heldout"] = calibration.heldout and digest_file(calibration.heldout, memo)
            inputs |= template_part(
                config.target.checkpoint, calibration.dataset, calibration.heldout
            )
            settings["calibration"] = calibration.model_dump(exclude={"dataset", "heldout"})
        return {
            "config": settings,
            "inputs": inputs,
            "fingerprint": stage.fingerprint(model.quantization),
        }

    def run(finished: Finished, out_dir: Path, progress: Progress) -> QuantizedCheckpoint:
        check_prompt_lengths(config)
        vocab_size = finished["pair"].record.vocab_size
        return stage.quantize(
            role,
            model.checkpoint,
            model.quantization,
            calibration,
            out_dir,
            progress,
            vocab_size=vocab_size,
            trtllm=trtllm,
            vllm=vllm,
            with_code=model.trust_remote_code,
            chat=config.target.checkpoint,
            resume=resume_folder(out_dir),
        )

    return Stage(f"quantize/{role}", stage.VERSION, QuantizedCheckpoint, ("pair",), parts, run)


def _head_stage(checkpoint: Path, head: Head) -> Stage:
    """The stage `quantize/draft` of a head, which is copied in its own precision."""
    from toolkit.quantize import heads

    def parts(finished: Finished) -> Mapping[str, Any]:
        return {
            "config": {"head": head},
            "inputs": {"checkpoint": finished["pair"].record.draft_digest},
            "fingerprint": {},
        }

    def run(finished: Finished, out_dir: Path, progress: Progress) -> QuantizedCheckpoint:
        return heads.copy_head(checkpoint, out_dir, progress)

    return Stage("quantize/draft", heads.VERSION, QuantizedCheckpoint, ("pair",), parts, run)
