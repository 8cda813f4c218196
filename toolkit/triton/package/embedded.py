"""The `package` stage for embedded engines. It takes the compiled engines, writes a model
repository, and checks the files by reading them back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from toolkit.config.schema import SpeculationConfig, TritonConfig
from toolkit.errors import StageError
from toolkit.records.build import CompiledEngine, TritonRepository
from toolkit.triton.package import model_config
from toolkit.triton.package.layout_bls import model_configs
from toolkit.triton.package.repository import bls_of, model_settings, write_repository
from toolkit.triton.tensors.contract import BLS_MODEL, MODEL, PACKAGE_VERSION

__all__ = ["VERSION", "package"]

VERSION = PACKAGE_VERSION


def package(
    target: CompiledEngine,
    draft: CompiledEngine | None,
    speculation: SpeculationConfig,
    triton: TritonConfig,
    threads: int | None,
    out_dir: Path,
    *,
    end_ids: Sequence[int] = (),
    reuse_prefixes: bool = True,
) -> TritonRepository:
    """Write the repository into out_dir. end_ids: the ids that end a text; only the bls layout
    needs them. reuse_prefixes: a request may begin with what an earlier one left in a KV cache.

    Raises StageError if the engines do not fit together, or if a file reads back differently.
    """
    _check(target, draft, speculation)
    if triton.layout == "bls" and (speculation.has_ngram or speculation.draft_len_by_load):
        setting = (
            "draft_len_schedule and max_concurrency"
            if speculation.draft_len_by_load
            else "kind ngram"
        )
        raise StageError(
            "package",
            f"speculation: triton.layout bls does not support {setting}, since a model of its own"
            " proposes the drafts",
            where=out_dir,
            hint="Use triton.layout: llmapi.",
        )
    write_repository(target, draft, speculation, triton, threads, end_ids, reuse_prefixes, out_dir)
    is_bls = triton.layout == "bls"
    if is_bls:
        bls = bls_of(target, draft, speculation, triton, threads, end_ids, reuse_prefixes)
        _read_back_bls(model_configs(bls), out_dir)
    else:
        _read_back(target, draft, speculation, triton, threads, reuse_prefixes, out_dir)
    model = BLS_MODEL if is_bls else MODEL
    return TritonRepository(
        path=out_dir,
        layout="bls" if is_bls else "llmapi",
        model=model,
        decoupled=triton.decoupled,
        max_draft_len=speculation.longest_draft,
    )


def _check(
    target: CompiledEngine, draft: CompiledEngine | None, speculation: SpeculationConfig
) -> None:
    for engine in [target, draft] if draft is not None else [target]:
        if not (engine.path / "config.json").is_file():
            raise StageError(
                "package",
                f"no {engine.role} engine here: config.json is missing",
                where=engine.path,
                hint="Compile the engine first.",
            )
    if target.max_draft_len < speculation.longest_draft:
        raise StageError(
            "package",
            f"the target engine verifies at most {target.max_draft_len} draft tokens, and"
            f" speculation.max_draft_len is {speculation.longest_draft}",
            where=target.path,
            hint="Compile it again with this draft length, or lower speculation.max_draft_len.",
        )
    if draft is None:
        return
    for name in ("vocab_size", "max_batch_size", "max_seq_len"):
        if getattr(draft, name) < getattr(target, name):
            raise StageError(
                "package",
                f"the draft engine's {name} {getattr(draft, name)} is below the target's"
                f" {getattr(target, name)}",
                where=draft.path,
                hint="Compile both engines with the same engine section.",
            )


def _read_back(
    target: CompiledEngine,
    draft: CompiledEngine | None,
    speculation: SpeculationConfig,
    triton: TritonConfig,
    threads: int | None,
    reuse_prefixes: bool,
    folder: Path,
) -> None:
    import yaml

    config = model_config.read(folder / MODEL / "config.pbtxt")
    path = folder / MODEL / "1" / "model.yaml"
    settings = yaml.safe_load(path.read_text(encoding="utf-8"))
    if settings != model_settings(target, draft, speculation, triton, threads, reuse_prefixes):
        raise StageError(
            "package", "model.yaml reads back differently from what was written", where=path
        )
    if config.model_transaction_policy.decoupled != settings["triton_config"]["decoupled"]:
        raise StageError(
            "package", "decoupled differs between config.pbtxt and model.yaml", where=path
        )


def _read_back_bls(configs: Mapping[str, Any], folder: Path) -> None:
    for name, config in configs.items():
        path = folder / name / "config.pbtxt"
        if model_config.read(path) != config:
            raise StageError(
                "package", "config.pbtxt reads back differently from what was written", where=path
            )
