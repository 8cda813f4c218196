"""The tokenizer of a checkpoint as one self-contained tokenizer.json, whatever form it was shipped
in.

Everything downstream reads tokenizer.json alone, so that the server needs the small `tokenizers`
library and not transformers.
"""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

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
"""Files that belong to a tokenizer beside tokenizer.json; copied where they are there."""


def load_tokenizer(directory: Path) -> Tokenizer:
    """Raises CheckpointError when there is no tokenizer, it cannot be converted, or it is
    damaged.
    """
    from tokenizers import Tokenizer

    text = tokenizer_text(directory)
    try:
        return Tokenizer.from_str(text)
    except Exception as exc:  # the library raises bare Exception for every fault
        raise CheckpointError(
            f"cannot be parsed ({exc})", where=directory / "tokenizer.json"
        ) from exc


def tokenizer_text(directory: Path) -> str:
    """tokenizer.json as text: read, or converted from a sentencepiece or vocab/merges form.

    transformers does the conversion, offline and without running the checkpoint's code;
    sentencepiece models need that library.
    """
    file = directory / "tokenizer.json"
    if file.exists():
        try:
            text = file.read_text(encoding="utf-8")
            json.loads(text)
        except (OSError, UnicodeDecodeError, json.JSONDecodeError) as exc:
            raise CheckpointError(f"cannot be read ({exc})", where=file) from exc
        return text
    slow = [
        name
        for name in ("tokenizer.model", "vocab.json", "merges.txt")
        if (directory / name).exists()
    ]
    if not slow:
        raise CheckpointError(
            "has no tokenizer (no tokenizer.json, tokenizer.model or vocab.json)",
            where=directory,
            hint="put the model's tokenizer files beside its weights",
        )
    return _convert(directory, slow[0])


def _convert(directory: Path, slow: str) -> str:
    from transformers import AutoTokenizer

    try:
        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore", DeprecationWarning
            )  # of transformers' own calls into `tokenizers`
            tokenizer = AutoTokenizer.from_pretrained(
                str(directory), local_files_only=True, trust_remote_code=False, use_fast=True
            )
        return str(tokenizer.backend_tokenizer.to_str(pretty=True))
    except (
        Exception
    ) as exc:  # a missing library, a foreign format, a damaged file: transformers raises all kinds
        raise CheckpointError(
            f"has only {slow}, which cannot be converted to tokenizer.json"
            f" ({str(exc).strip().splitlines()[0]})",
            where=directory,
            hint=(
                "pip install sentencepiece protobuf, or convert it elsewhere: "
                "AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR)"
            ),
        ) from exc


def write_tokenizer(source: Path, out_dir: Path) -> tuple[str, ...]:
    """Write tokenizer.json to out_dir and copy what belongs to it. Returns the names written."""
    (out_dir / "tokenizer.json").write_text(tokenizer_text(source), encoding="utf-8")
    names = ["tokenizer.json"]
    for name in SIDE_FILES:
        if (source / name).exists():
            shutil.copyfile(source / name, out_dir / name)
            names.append(name)
    return tuple(names)
