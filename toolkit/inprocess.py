"""Load engines and build the speculative runtime that runs in this process.

The server process, `toolkit generate` and the advisor use it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
    max_prompt_tokens: int | None = None,
    adaptive: Mapping[str, Any] | None = None,
    reuse_prefixes: bool = False,
) -> SpeculativeRuntime:
    """Load both engines, and the tokenizer and EOS ids from the target's directory.

    threads: threads of a forward, set for the whole process; None keeps torch's default.
    ngram_size: draft by prompt lookup instead of a draft engine, and search for the last tokens of
    the text, up to this many. Without a draft engine and ngram_size, or with max_draft_len 0,
    requests are decoded plainly. draft_len_schedule: pairs (running requests, draft length); a
    length holds from that many running requests on. max_prompt_tokens: requests with longer prompts
    are decoded plainly. adaptive: the fields of AdaptiveSettings, if draft lengths are chosen while
    requests run; what that needs to know of the engines is then found out first, which takes some
    seconds. reuse_prefixes: a prompt is computed only from where it differs from what a KV cache
    holds.

    Raises CheckpointError if a directory is not an engine, PairingError if the engines do not
    belong together, UsageError if the target's engine was not built for this draft length,
    BackendUnavailable if a library is missing.
    """
    from toolkit.engines.registry import loader
    from toolkit.speculative.adaptive import AdaptiveSettings
    from toolkit.speculative.drafters import NgramDrafter
    from toolkit.speculative.rehearsal import rehearsed
    from toolkit.speculative.runtime import RuntimeSettings, SpeculativeRuntime
    from toolkit.speculative.text import TextCodec

    config = _engine_config(target_dir)
    codec = TextCodec.from_file(target_dir / "tokenizer.json")
    torch_loader = loader("torch")
    target = torch_loader.load(target_dir, threads=threads)
    draft = None
    if draft_dir is not None and max_draft_len > 0:
        _check_same_tokenizer(target_dir, draft_dir)
        draft = torch_loader.load(draft_dir, threads=threads)
        if draft.vocab_size != target.vocab_size:
            raise PairingError(
                f"the draft's engine has a vocabulary of {draft.vocab_size} tokens, and the"
                f" target's engine one of {target.vocab_size}",
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
        max_prompt_tokens=max_prompt_tokens,
        adaptive=None if adaptive is None else AdaptiveSettings(**adaptive),
        reuse_prefixes=reuse_prefixes,
    )
    drafter = None if ngram_size is None or max_draft_len == 0 else NgramDrafter(ngram_size)
    costs = comparison = None
    if draft is not None and drafter is None and settings.adaptive is not None:
        costs, comparison = rehearsed(target, draft, codec, settings)
    return SpeculativeRuntime(
        target, draft, codec, settings, drafter=drafter, costs=costs, comparison=comparison
    )


def eos_token_ids(engine_dir: Path) -> tuple[int, ...]:
    """The token ids that end a text; there may be several or none.

    They are read from generation_config.json, or else from the model's config.json, whose EOS ids
    the engine keeps with the model's shape.
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
            "is not an engine directory of this toolkit",
            where=directory,
            hint="Build the engine with `toolkit build`.",
        )
    return config


def _check_same_tokenizer(target_dir: Path, draft_dir: Path) -> None:
    """Raise PairingError if the two directories have different vocabularies.

    The build has already proven the pair. This only finds directories that were mixed up later.
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
