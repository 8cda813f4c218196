"""Compare a checkpoint's files with the digests that came with it.

A weight with a flipped bit usually still looks like a weight; only a digest made at the source
reveals it. Digests are compared at every build, before anything is reused. Those of unchanged files
are remembered, so this costs nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from toolkit.errors import CheckpointError
from toolkit.pipeline.hashing import PREFIX, DigestMemo, digest_file

__all__ = ["check_recorded_digests"]

SUMS_FILE = "SHA256SUMS"
HUB_FOLDER = ".cache/huggingface/download"
SUM_LINE = re.compile(r"(?P<digest>[0-9a-fA-F]{64}) [ *](?P<name>.+)")  # as sha256sum writes it


def check_recorded_digests(directory: Path, memo: DigestMemo | None = None) -> None:
    """Raise CheckpointError if the sha256 of a file in `directory` is not the recorded one, or if a
    record cannot be read.
    """
    for name, recorded in (*_from_hub(directory), *_from_sums(directory)):
        file = directory / name
        if not file.is_file():
            continue
        digest = digest_file(file, memo).removeprefix(PREFIX)
        if digest != recorded:
            raise CheckpointError(
                f"its sha256 is {digest[:12]}..., but {recorded[:12]}... was recorded",
                where=file,
                hint="fetch this file again",
            )


def _from_sums(directory: Path) -> Iterator[tuple[str, str]]:
    file = directory / SUMS_FILE
    if not file.is_file():
        return
    for number, line in enumerate(
        file.read_text(encoding="utf-8", errors="replace").splitlines(), start=1
    ):
        if not line.strip():
            continue
        match = SUM_LINE.fullmatch(line)
        if match is None:
            raise CheckpointError(
                f"line {number} is not `DIGEST  NAME`",
                where=file,
                hint="write the file with sha256sum, or remove it",
            )
        yield match["name"], match["digest"].lower()


def _from_hub(directory: Path) -> Iterator[tuple[str, str]]:
    """The hub client writes FILE.metadata with three lines: commit, etag and time. The etag of a
    large file is its sha256.
    """
    for file in sorted((directory / HUB_FOLDER).glob("*.safetensors.metadata")):
        lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
        if len(lines) >= 2 and len(lines[1]) == 64:
            yield file.name.removesuffix(".metadata"), lines[1].lower()
