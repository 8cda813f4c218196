"""Read the tokenizer of a checkpoint, and write it as one self-contained tokenizer.json, whatever
format it was shipped in.

All later stages read only tokenizer.json, so that the server needs the small `tokenizers` library
and not transformers.
"""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

from toolkit.checkpoints.patterns import expressions, gives_up, runs_away
from toolkit.checkpoints.shape import UNREADABLE
from toolkit.errors import CheckpointError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

__all__ = ["SIDE_FILES", "load_tokenizer", "tokenizer_text", "write_tokenizer"]

SIDE_FILES = (
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
)
"""Files that belong to a tokenizer beside tokenizer.json. Those that exist are copied."""


def load_tokenizer(directory: Path) -> Tokenizer:
    """The checkpoint's tokenizer. Raises CheckpointError if there is none, if it is damaged, or if
    it cannot be converted.
    """
    from tokenizers import Tokenizer

    text = tokenizer_text(directory)
    try:
        return Tokenizer.from_str(text)
    except Exception as exc:  # the library raises bare Exception for every fault
        raise CheckpointError(
            f"cannot be parsed ({exc})",
            where=directory / "tokenizer.json",
            hint="fetch this file again, or save it with the `tokenizers` library of today",
        ) from exc


def tokenizer_text(directory: Path) -> str:
    """The text of tokenizer.json, read from the file or converted from sentencepiece or
    vocab/merges files.

    transformers converts, offline and without running the checkpoint's code. To convert a
    sentencepiece model, the library sentencepiece must be installed.
    """
    file = directory / "tokenizer.json"
    if file.exists():
        try:
            text = file.read_text(encoding="utf-8")
            content = json.loads(text)
        except OSError as exc:
            raise CheckpointError(
                f"cannot be read ({exc.strerror})", where=file, hint=UNREADABLE
            ) from exc
        except (UnicodeDecodeError, json.JSONDecodeError) as exc:
            raise CheckpointError(
                f"cannot be read ({exc})", where=file, hint="fetch this file again"
            ) from exc
        _check_expressions(content, file)
        return text
    convertible = [
        name
        for name in ("tokenizer.model", "vocab.json", "merges.txt")
        if (directory / name).exists()
    ]
    if not convertible:
        raise CheckpointError(
            "has no tokenizer (no tokenizer.json, tokenizer.model or vocab.json)",
            where=directory,
            hint="put the model's tokenizer files beside its weights",
        )
    return _convert(directory, convertible[0])


def _convert(directory: Path, name: str) -> str:
    from transformers import AutoTokenizer

    try:
        with warnings.catch_warnings():
            # transformers' own calls into `tokenizers` give DeprecationWarnings
            warnings.simplefilter("ignore", DeprecationWarning)
            tokenizer = AutoTokenizer.from_pretrained(
                str(directory), local_files_only=True, trust_remote_code=False, use_fast=True
            )
        return str(tokenizer.backend_tokenizer.to_str(pretty=True))
    except Exception as exc:
        # A missing library, a foreign format, a damaged file: transformers raises many kinds.
        raise CheckpointError(
            f"has only {name}, which cannot be converted to tokenizer.json"
            f" ({str(exc).strip().splitlines()[0]})",
            where=directory,
            hint=(
                "pip install sentencepiece protobuf, or convert it on another machine: "
                "AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR)"
            ),
        ) from exc


def write_tokenizer(source: Path, out_dir: Path) -> tuple[str, ...]:
    """Write tokenizer.json to out_dir and copy the SIDE_FILES. Returns the names written."""
    (out_dir / "tokenizer.json").write_text(tokenizer_text(source), encoding="utf-8")
    names = ["tokenizer.json"]
    for name in SIDE_FILES:
        if (source / name).exists():
            shutil.copyfile(source / name, out_dir / name)
            names.append(name)
    return tuple(names)


def _check_expressions(content: object, file: Path) -> None:
    for expression in expressions(content):
        repeats = runs_away(expression)
        if repeats or gives_up(expression):
            why = "repeats what repeats" if repeats else "matches some texts in very many ways"
            raise CheckpointError(
                f"a prompt can take exponentially long, since this expression {why}: {expression}",
                where=file,
                hint="use the tokenizer of the model's own publisher",
            )
