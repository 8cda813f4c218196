"""The `package` stage: two engines in, a model repository out, checked by reading it back."""

from __future__ import annotations

from pathlib import Path

from toolkit.config.schema import SpeculationConfig, TritonConfig
from toolkit.errors import StageError
from toolkit.records import CompiledEngine, TritonRepository
from toolkit.triton import model_config
from toolkit.triton.contract import MODEL, PACKAGE_VERSION
from toolkit.triton.repository import model_settings, write_repository

__all__ = ["VERSION", "package"]

VERSION = PACKAGE_VERSION


def package(
    target: CompiledEngine,
    draft: CompiledEngine | None,
    speculation: SpeculationConfig,
    triton: TritonConfig,
    threads: int | None,
    out_dir: Path,
) -> TritonRepository:
    """Write the repository into out_dir. Raises StageError if the engines do not fit together or the files do not read back."""
    _check(target, draft, speculation)
    write_repository(target, draft, speculation, triton, threads, out_dir)
    _read_back(target, draft, speculation, triton, threads, out_dir)
    return TritonRepository(
        path=out_dir,
        layout="llmapi",
        model=MODEL,
        decoupled=triton.decoupled,
        max_draft_len=speculation.longest_draft,
    )


def _check(target: CompiledEngine, draft: CompiledEngine | None, speculation: SpeculationConfig) -> None:
    for engine in [target, draft] if draft is not None else [target]:
        if not (engine.path / "config.json").is_file():
            raise StageError(
                "package", f"no {engine.role} engine here: config.json is missing", where=engine.path, mend="Compile it."
            )
    if target.max_draft_len < speculation.longest_draft:
        raise StageError(
            "package",
            f"the target engine verifies at most {target.max_draft_len} draft tokens, and speculation.max_draft_len is "
            f"{speculation.longest_draft}",
            where=target.path,
            mend="Compile it again with this draft length, or lower speculation.max_draft_len.",
        )
    if draft is None:
        return
    for name in ("vocab_size", "max_batch_size", "max_seq_len"):
        if getattr(draft, name) < getattr(target, name):
            raise StageError(
                "package",
                f"the draft engine's {name} {getattr(draft, name)} is below the target's {getattr(target, name)}",
                where=draft.path,
                mend="Compile both with the same engine section.",
            )


def _read_back(
    target: CompiledEngine,
    draft: CompiledEngine | None,
    speculation: SpeculationConfig,
    triton: TritonConfig,
    threads: int | None,
    folder: Path,
) -> None:
    import yaml

    config = model_config.read(folder / MODEL / "config.pbtxt")
    path = folder / MODEL / "1" / "model.yaml"
    settings = yaml.safe_load(path.read_text(encoding="utf-8"))
    if settings != model_settings(target, draft, speculation, triton, threads):
        raise StageError("package", "model.yaml reads back differently from what was written", where=path)
    if config.model_transaction_policy.decoupled != settings["triton_config"]["decoupled"]:
        raise StageError("package", "decoupled differs between config.pbtxt and model.yaml", where=path)
