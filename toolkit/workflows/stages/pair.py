"""The stage `pair`: prove that draft and target belong together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from toolkit.config.schema import DeploymentConfig
from toolkit.errors import CheckpointError, StoreError
from toolkit.facts.heads import HeadReader, head_reader
from toolkit.interfaces import Progress
from toolkit.pipeline.hashing import DigestMemo, digest_tree
from toolkit.pipeline.stage import Finished, Stage
from toolkit.records.build import PairProof
from toolkit.words import Head
from toolkit.workflows.stages.keys import versions

__all__ = ["pair_stage"]


def pair_stage(config: DeploymentConfig, memo: DigestMemo) -> Stage:
    """The stage `pair`. memo: remembers the digests of the checkpoints' files."""
    from toolkit.pairing.recorded import check_recorded_digests
    from toolkit.pairing.tokenizers import SOURCE_PATTERNS, TOKENIZER_PATTERNS, prove_pair

    tp_size, head = config.engine.tp_size, config.speculation.head
    reader = head_reader(config.engine.kind, config.engine.version)

    def parts(finished: Finished) -> Mapping[str, Any]:
        patterns = SOURCE_PATTERNS + TOKENIZER_PATTERNS
        try:
            digests = {
                role: digest_tree(model.checkpoint, patterns, memo)
                for role, model in config.models.items()
            }
        except StoreError as error:
            raise CheckpointError(error.what, where=error.where, hint=error.hint) from error
        for model in config.models.values():
            check_recorded_digests(model.checkpoint, memo)
        return {
            "config": {"tp_size": tp_size, **_head_parts(head, reader)},
            "inputs": digests,
            "fingerprint": versions(["tokenizers"]),
        }

    def run(finished: Finished, out_dir: Path, progress: Progress) -> PairProof:
        draft = None if config.draft is None else config.draft.checkpoint
        return prove_pair(
            config.target.checkpoint, draft, memo, tp_size=tp_size, head=head, reader=reader
        )

    return Stage("pair", 3, PairProof, (), parts, run)


def _head_parts(head: Head | None, reader: HeadReader) -> dict[str, Any]:
    return {} if head is None else {"head": head, "reader": asdict(reader)}
