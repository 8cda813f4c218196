"""What runs in the server process, behind `toolkit generate` and under the advisor: engines in,
a speculative runtime out.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit.checkpoints.shape import read_json
from toolkit.errors import CheckpointError, PairingError
from toolkit.words import AcceptanceChoice

if TYPE_CHECKING:
    from toolkit.speculative.runtime import SpeculativeRuntime

__all__ = ["eos_token_ids", "load_runtime"]


def load_runtime(
    target_dir: Path,
    draft_dir: Path | None,
    *,
    threads: int | None = None,
    max_draft_len: int = 0,
    acceptance: AcceptanceChoice = "auto",
    max_queue_size: int = 256,
    draft_len_schedule: Sequence[tuple[int, int]] = (),
    ngram_size: int | None = None,
) -> SpeculativeRuntime:
    """Load both engines and what they need to serve text: the tokenizer and EOS ids that lie in the
    target's directory.

    threads: of the forwards, for the whole process; None leaves torch's own choice. ngram_size:
    draft by prompt lookup over ends of the text of up to this length, instead of a draft engine.
    Without either, or with max_draft_len 0, requests are decoded plainly. draft_len_schedule:
    (running requests, draft length) pairs, each holding from that many requests on. Raises
    CheckpointError for a directory that is no engine, PairingError for engines that do not belong
    together, UsageError for a draft length that the target's engine was not built for,
    BackendUnavailable.
    """
    from toolkit.engines.registry import loader
    from toolkit.speculative.drafters import NgramDrafter
    from toolkit.speculative.runtime import RuntimeSettings, SpeculativeRuntime
    from toolkit.speculative.text import TextCodec

    config = _engine_config(target_dir)
    codec = TextCodec.from_file(target_dir / "tokenizer.json")
    torch_loader = loader("torch")
    target = torch_loader.load(target_dir, threads=threads)
    draft = None
    if draft_dir is not None and max_draft_len > 0:
        _same_tokenizer(target_dir, draft_dir)
        draft = torch_loader.load(draft_dir, threads=threads)
        if draft.vocab_size != target.vocab_size:
            raise PairingError(
                f"the draft's engine has a vocabulary of {draft.vocab_size}, the target's one of"
                f" {target.vocab_size}",
                where=draft_dir,
                hint="Build both from checkpoints with the same tokenizer.",
            )
    settings = RuntimeSettings(
        max_draft_len=max_draft_len if draft is not None or ngram_size is not None else 0,
        draft_len_schedule=tuple(sorted(draft_len_schedule)),
        acceptance=acceptance,
        max_queue_size=max_queue_size,
        eos_token_ids=eos_token_ids(target_dir),
        max_input_len=config["build_config"]["max_input_len"],
    )
    drafter = None if ngram_size is None or max_draft_len == 0 else NgramDrafter(ngram_size)
    return SpeculativeRuntime(target, draft, codec, settings, drafter=drafter)


def eos_token_ids(engine_dir: Path) -> tuple[int, ...]:
    """The ids that end a text: one, several or none. generation_config.json's, else those of the
    model's own config.json, which the engine keeps with the model's shape.
    """
    generation = engine_dir / "generation_config.json"
    ids = read_json(generation).get("eos_token_id") if generation.exists() else None
    if ids is None:
        ids = _engine_config(engine_dir)["toolkit"]["shape"]["eos_token_ids"]
    return tuple(ids) if isinstance(ids, list) else (int(ids),)


def _engine_config(directory: Path) -> dict[str, Any]:
    config = read_json(directory / "config.json") if (directory / "config.json").is_file() else {}
    if "toolkit" not in config:
        raise CheckpointError(
            "is not an engine directory of this toolkit", where=directory, hint="Run toolkit build."
        )
    return config


def _same_tokenizer(target_dir: Path, draft_dir: Path) -> None:
    """The build has proven the pair; here only that these two directories are still of one
    vocabulary, token by token.
    """
    from tokenizers import Tokenizer

    vocabularies = [
        Tokenizer.from_file(str(directory / "tokenizer.json")).get_vocab(with_added_tokens=True)
        for directory in (target_dir, draft_dir)
        if (directory / "tokenizer.json").is_file()
    ]
    if len(vocabularies) == 2 and vocabularies[0] != vocabularies[1]:
        differing = min(
            token_id for _, token_id in vocabularies[0].items() ^ vocabularies[1].items()
        )
        raise PairingError(
            f"its tokenizer differs from the target's, first at id {differing}",
            where=draft_dir,
            hint="Build both from checkpoints with the same tokenizer.",
        )
