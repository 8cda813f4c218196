"""The manifest of a published folder: SHA256SUMS, in the format of sha256sum(1).

It names every file of the folder with its digest, so that a copy on another machine can be proved
to be what was built. `verify` also finds files that were added. Without the toolkit,
`sha256sum -c SHA256SUMS` checks all but those. The digests are those of the store, so writing the
manifest reads no file.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from toolkit.errors import UsageError
from toolkit.interfaces import Progress
from toolkit.pipeline.hashing import PREFIX, digest_file, files_of

__all__ = ["MANIFEST", "Verified", "manifest_text", "verify"]

MANIFEST = "SHA256SUMS"
EXPECTED = {
    "__pycache__/*": "Python's caches",
    "*/__pycache__/*": "Python's caches",
    "hostfile": "the hosts of a deployment over several nodes",
}
"""Shell patterns of files that are not deployed but arise on a serving machine -> what they are."""
LINE = re.compile(r"(?P<digest>[0-9a-f]{64})  (?P<name>.+)")
MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Verified:
    """What differs between a folder and its manifest.

    digest: of the manifest itself; the same on every machine that holds the same files. files,
    num_bytes: how much agrees. expected: files that serving has added.
    """

    path: Path
    digest: str
    files: int
    num_bytes: int
    changed: tuple[str, ...]
    missing: tuple[str, ...]
    added: tuple[str, ...]
    expected: tuple[str, ...]

    @property
    def is_whole(self) -> bool:
        return not (self.changed or self.missing or self.added)


def manifest_text(digests: Mapping[str, str], comments: tuple[str, ...] = ()) -> str:
    """The manifest of files with these digests. comments: lines about where they come from."""
    assert not any("\n" in name or "\\" in name for name in digests), "sha256sum would escape it"
    lines = [
        *(f"# {comment}" for comment in comments),
        *(f"{digests[name].removeprefix(PREFIX)}  {name}" for name in sorted(digests)),
    ]
    return "".join(f"{line}\n" for line in lines)


def verify(folder: Path, progress: Progress) -> Verified:
    """Read every file of the folder and compare it with the manifest. Nothing is remembered from
    an earlier time.

    Raises UsageError if the folder has no manifest or a damaged one, StoreError if a file cannot be
    read.
    """
    stated = _read(folder)
    present = {
        name: (folder / name).stat().st_size
        for name in files_of(folder)
        if name != MANIFEST and (folder / name).exists()  # not a link to nowhere
    }
    total, done = sum(present.get(name, 0) for name in stated), 0

    def report(num_bytes: int) -> None:
        nonlocal done
        done += num_bytes
        progress(done // MIB, total // MIB, "reading files, MiB")

    changed = [
        name
        for name in sorted(stated.keys() & present.keys())
        if digest_file(folder / name, on_bytes=report) != PREFIX + stated[name]
    ]
    extra = sorted(present.keys() - stated.keys())
    expected = [name for name in extra if _is_expected(name)]
    whole = (stated.keys() & present.keys()) - set(changed)
    return Verified(
        path=folder,
        digest=digest_file(folder / MANIFEST),
        files=len(whole),
        num_bytes=sum(present[name] for name in whole),
        changed=tuple(changed),
        missing=tuple(sorted(stated.keys() - present.keys())),
        added=tuple(name for name in extra if name not in expected),
        expected=tuple(expected),
    )


def _is_expected(name: str) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in EXPECTED)


def _read(folder: Path) -> dict[str, str]:
    """Name -> digest, as the manifest states them."""
    file = folder / MANIFEST
    hint = (
        "Name a folder that `toolkit build` has published (engines/NAME or triton_repo/NAME), or a"
        " copy of one."
    )
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError("cannot be read", where=file, hint=hint) from error
    stated = {}
    for number, line in enumerate(lines, start=1):
        if line.startswith("#"):
            continue
        match = LINE.fullmatch(line)
        if match is None:
            what = f"line {number} is no digest with a name, so the manifest itself is damaged"
            raise UsageError(what, where=file, hint="Copy the folder again.")
        stated[match["name"]] = match["digest"]
    return stated
