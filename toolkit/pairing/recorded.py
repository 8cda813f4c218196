"""The digests that a checkpoint brings along: what its files should be, whoever copied them since.

A flipped bit in a weight usually still looks like a weight; only a digest made at the source tells.
It is compared at every build, before anything is reused: digests of unchanged files are remembered,
so this costs nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from toolkit.errors import CheckpointError
from toolkit.pipeline.hashing import PREFIX, DigestMemo, digest_file

__all__ = ["check_recorded_digests"]

SUMS = "SHA256SUMS"
HUB = ".cache/huggingface/download"
SUM_LINE = re.compile(r"(?P<digest>[0-9a-fA-F]{64}) [ *](?P<name>.+)")  # as sha256sum writes it


def check_recorded_digests(directory: Path, memo: DigestMemo | None = None) -> None:
    """Raise CheckpointError for a file in `directory` whose sha256 is not the recorded one, or a
    record that cannot be read.
    """
    for name, recorded in (*_from_hub(directory), *_from_sums(directory)):
        file = directory / name
        if not file.is_file():
            continue
        found = digest_file(file, memo).removeprefix(PREFIX)
        if found != recorded:
            raise CheckpointError(
                f"its sha256 is {found[:12]}..., {recorded[:12]}... was recorded",
                where=file,
                hint="fetch this file again",
            )


def _from_sums(directory: Path) -> Iterator[tuple[str, str]]:
    file = directory / SUMS
    if not file.is_file():
        return
    for number, line in enumerate(
        file.read_text(encoding="utf-8", errors="replace").splitlines(), start=1
    ):
        if not line.strip():
            continue
        stated = SUM_LINE.fullmatch(line)
        if stated is None:
            raise CheckpointError(
                f"line {number} is not `DIGEST  NAME`",
                where=file,
                hint="write the file with sha256sum, or remove it",
            )
        yield stated["name"], stated["digest"].lower()


def _from_hub(directory: Path) -> Iterator[tuple[str, str]]:
    """The hub client writes FILE.metadata: commit, etag, time; the etag of a large file is its
    sha256.
    """
    for file in sorted((directory / HUB).glob("*.safetensors.metadata")):
        lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
        if len(lines) >= 2 and len(lines[1]) == 64:
            yield file.name.removesuffix(".metadata"), lines[1].lower()
