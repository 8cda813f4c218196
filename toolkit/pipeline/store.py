"""The content-addressed store of finished stage outputs.

    ROOT/STAGE/KEY/content/       what the stage wrote
    ROOT/STAGE/KEY/record.json    its record, all parts of its key, the digest of every file, and
                                  its provenance
    ROOT/.names/NAME.json         the last keys of a deployment, so that `explain` can say what
                                  differs
    ROOT/.locks/                  one lock per key that is being built
    ROOT/.digests.json            remembered digests, which save time

An entry is written to a temporary sibling and renamed. So it exists whole or not at all, even if
processes race or are killed. The process that builds a key holds its lock (flock, which the kernel
releases when the process ends); a second build waits and then reuses the entry. A temporary folder
whose key nobody has locked is therefore left over from a killed build, and is removed; what the
build kept there to go on from waits for the next build of its key. Every use of an entry compares
its files with their digests, so a damaged or edited entry is built again.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolkit.errors import StoreError, ToolkitError
from toolkit.pipeline.files import (
    link_or_copy,
    os_error_in,
    replace_folder,
    store_error,
    write_whole,
)
from toolkit.pipeline.hashing import DigestMemo, digest_file, digest_files, digest_value
from toolkit.pipeline.manifest import MANIFEST, manifest_text

__all__ = ["MAX_WAITING", "RESUME", "Entry", "Store", "Written"]

FORMAT = 1  # of record.json
TEMPORARY = ".tmp."
RESUME = "resume"  # in a temporary folder, beside `content`
MAX_WAITING = 2  # killed builds of other keys whose RESUME folders are kept; the oldest go first
# In a stored record this replaces the path of the content folder, so that the store can be moved.
CONTENT_PLACEHOLDER = "@content"

Notice = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Written:
    """What a stage gives to the store: its record as JSON values, and its provenance, which is not
    part of any key.
    """

    record: Any
    provenance: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Entry:
    """One finished output. path: its content folder. files: relative name -> digest. record: JSON
    values; its paths are absolute.
    """

    stage: str
    key: str
    path: Path
    parts: dict[str, Any]
    files: dict[str, str]
    record: Any
    provenance: dict[str, Any]

    @property
    def digest(self) -> str:
        """The digest of the content: names and bytes of its files."""
        return digest_value(self.files)


class Store:
    """Look up, build and publish entries. notice: called with one line about anything that a user
    would otherwise wonder about.
    """

    def __init__(self, root: Path, *, rehash: bool = False, notice: Notice | None = None) -> None:
        self.root = root.absolute()
        self.memo = DigestMemo(self.root / ".digests.json", rehash=rehash)
        self.notice: Notice = notice or (lambda text: None)

    def find(self, stage: str, key: str) -> Entry | None:
        """The entry, or None if it is missing or damaged."""
        folder = self.root / stage / key
        try:
            data = json.loads((folder / "record.json").read_text(encoding="utf-8"))
        except FileNotFoundError:
            if folder.exists():
                self.notice(f"{stage}: its stored output has lost record.json; it is built again")
            return None
        except OSError as error:
            raise store_error(stage, error, folder) or error from error
        except ValueError:
            self.notice(f"{stage}: record.json of its stored output is damaged; it is built again")
            return None
        if data.get("format") != FORMAT:
            return None
        content = folder / "content"
        damage = self._damage(content, data["files"])
        if damage is not None:
            self.notice(f"{stage}: its stored output is damaged ({damage}); it is built again")
            return None
        record = _replace_prefix(data["record"], CONTENT_PLACEHOLDER, str(content))
        return Entry(stage, key, content, data["parts"], data["files"], record, data["provenance"])

    def _damage(self, content: Path, files: Mapping[str, str]) -> str | None:
        for name, digest in files.items():
            path = content / name
            if not path.is_file():
                return f"{name} is missing"
            if digest_file(path, self.memo) != digest:
                return f"{name} has changed"
        return None

    def build(
        self,
        stage: str,
        key: str,
        parts: Mapping[str, Any],
        write: Callable[[Path], Written],
        *,
        is_usable: Callable[[Entry], bool] = lambda entry: True,
        fresh: bool = False,
    ) -> tuple[Entry, bool]:
        """Return the entry, and whether it was in the store already. If it was not, `write` fills a
        folder, which then becomes the entry.

        is_usable: whether a stored entry may be used; if not, it is built again and replaced.
        fresh: build it again in any case, and from its beginning. Raises StoreError if nothing can
        be written, and whatever `write` raises; in both cases nothing is left behind but what
        `write` has put into the RESUME folder beside its own.
        """
        try:
            with self._lock(stage, key):
                stored = self.find(stage, key)
                if stored is not None and not fresh and is_usable(stored):
                    return stored, True
                return self._write(stage, key, parts, write, fresh=fresh), False
        except OSError as error:
            raise store_error(stage, error, self.root) or error from error
        except ToolkitError:
            raise
        except Exception as error:
            wrapped = os_error_in(error)
            if wrapped is None:
                raise
            raise store_error(stage, wrapped, self.root) or error from error

    def _write(
        self,
        stage: str,
        key: str,
        parts: Mapping[str, Any],
        write: Callable[[Path], Written],
        *,
        fresh: bool,
    ) -> Entry:
        folder = self.root / stage
        folder.mkdir(parents=True, exist_ok=True)
        self._sweep()
        temporary = folder / f"{TEMPORARY}{key}"  # nobody else writes there while we hold the lock
        content = temporary / "content"
        _remove_temporary(temporary, keep_resume=not fresh)
        content.mkdir(parents=True)
        try:
            written = write(content)
            files = digest_files(content)
            data = {
                "format": FORMAT,
                "stage": stage,
                "key": key,
                "parts": dict(parts),
                "record": _replace_prefix(written.record, str(content), CONTENT_PLACEHOLDER),
                "files": files,
                "provenance": dict(written.provenance),
            }
            (temporary / "record.json").write_text(json.dumps(data, indent=1), encoding="utf-8")
            shutil.rmtree(temporary / RESUME, ignore_errors=True)
            replace_folder(temporary, folder / key)
        except BaseException:
            _remove_temporary(temporary, keep_resume=True)
            raise
        stored = self.find(stage, key)
        if stored is None:
            raise StoreError(
                stage,
                "the output that was just written reads back differently",
                where=folder / key,
                hint="Check the disk.",
            )
        return stored

    @contextlib.contextmanager
    def _lock(self, stage: str, key: str, *, wait: bool = True) -> Iterator[None]:
        """Hold the lock of a key. The lock file is removed on release, so a process that waited
        checks that it has locked the present file and not a removed one.

        Raises BlockingIOError if another process holds the lock and `wait` is False.
        """
        path = self.root / ".locks" / f"{stage.replace('/', '-')}.{key}"
        path.parent.mkdir(parents=True, exist_ok=True)
        while True:
            descriptor = os.open(path, os.O_CREAT | os.O_RDWR, 0o666)
            try:
                self._acquire(descriptor, stage, wait=wait)
                if path.exists() and path.stat().st_ino == os.fstat(descriptor).st_ino:
                    break
            except BaseException:
                os.close(descriptor)
                raise
            os.close(descriptor)
        try:
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, str(os.getpid()).encode(), 0)
            yield
        finally:
            path.unlink(missing_ok=True)
            os.close(descriptor)

    def _acquire(self, descriptor: int, stage: str, *, wait: bool) -> None:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if not wait:
                raise
            owner = os.pread(descriptor, 20, 0).decode(errors="replace") or "another"
            self.notice(f"{stage}: process {owner} is building the same; waiting for it")
            fcntl.flock(descriptor, fcntl.LOCK_EX)

    def _sweep(self) -> None:
        """Remove the temporary folders that killed builds have left: those of keys that nobody has
        locked. The newest MAX_WAITING of them keep what their builds can go on from.
        """
        folders = [
            path
            for pattern in (f"*/{TEMPORARY}*", f"*/*/{TEMPORARY}*")
            for path in self.root.glob(pattern)
        ]
        waiting = 0
        for path in sorted(folders, key=_time_of_resume, reverse=True):
            stage, key = path.parent.relative_to(self.root).as_posix(), path.name.split(".")[2]
            with contextlib.suppress(BlockingIOError), self._lock(stage, key, wait=False):
                _remove_temporary(path, keep_resume=waiting < MAX_WAITING)
                waiting += path.exists()

    def last(self, name: str) -> dict[str, dict[str, Any]]:
        """Stage -> {key, parts} of the last build of a deployment; empty if there was none."""
        try:
            known = json.loads(self._name_file(name).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        if not isinstance(known, dict):
            return {}
        return {stage: note for stage, note in known.items() if _is_note(note)}

    def note(self, name: str, stage: str, key: str, parts: Mapping[str, Any]) -> None:
        """Remember the present key of a stage of the deployment `name`."""
        known = self.last(name)
        current = {"key": key, "parts": dict(parts)}
        if known.get(stage) != current:
            known[stage] = current
            try:
                write_whole(self._name_file(name), json.dumps(known, indent=1))
            except OSError as error:
                raise store_error(stage, error, self.root) or error from error

    def _name_file(self, name: str) -> Path:
        return self.root / ".names" / f"{name}.json"

    def publish(
        self, parts: Mapping[str, Entry], destination: Path, *, manifest: bool = False
    ) -> bool:
        """Make `destination` hold the content of the entries. The keys of `parts` name the
        subfolders; "" is `destination` itself.

        manifest: also write a manifest of all files there (`toolkit.pipeline.manifest`).

        Files are hard links if the file system has them, so they take no space. The folder is
        replaced as a whole; anything else in it is removed. Returns whether anything had to be
        done.
        """
        text = _manifest_of(parts) if manifest else None
        if _is_published(parts, destination, text, self.memo):
            return False
        try:
            with self._lock(
                "publish", digest_value(str(destination.absolute())).removeprefix("sha256:")
            ):
                destination.parent.mkdir(parents=True, exist_ok=True)
                for leftover in destination.parent.glob(f".{destination.name}{TEMPORARY}*"):
                    shutil.rmtree(leftover, ignore_errors=True)
                temporary = (
                    destination.parent / f".{destination.name}{TEMPORARY}{secrets.token_hex(4)}"
                )
                try:
                    temporary.mkdir()
                    for folder, entry in parts.items():
                        shutil.copytree(
                            entry.path,
                            temporary / folder,
                            copy_function=link_or_copy,
                            dirs_exist_ok=True,
                        )
                    if text is not None:
                        (temporary / MANIFEST).write_text(text, encoding="utf-8")
                    replace_folder(temporary, destination)
                except BaseException:
                    shutil.rmtree(temporary, ignore_errors=True)
                    raise
        except OSError as error:
            raise store_error("publish", error, destination) or error from error
        return True


def _remove_temporary(folder: Path, *, keep_resume: bool) -> None:
    """Remove what a build has left in its temporary folder, and the folder unless something is kept
    in it.
    """
    resume = folder / RESUME
    if not (keep_resume and resume.is_dir()):
        shutil.rmtree(folder, ignore_errors=True)
        return
    shutil.rmtree(folder / "content", ignore_errors=True)
    (folder / "record.json").unlink(missing_ok=True)


def _time_of_resume(folder: Path) -> float:
    """When the build of a temporary folder last kept something; 0 if it has kept nothing."""
    try:
        return (folder / RESUME).stat().st_mtime
    except OSError:
        return 0.0


def _manifest_of(parts: Mapping[str, Entry]) -> str:
    digests = {
        f"{folder}/{name}" if folder else name: digest
        for folder, entry in parts.items()
        for name, digest in entry.files.items()
    }
    stages = tuple(f"{entry.stage} {entry.key}" for entry in parts.values())
    return manifest_text(digests, comments=stages)


def _is_published(
    parts: Mapping[str, Entry], destination: Path, manifest: str | None, memo: DigestMemo
) -> bool:
    """manifest: the text that the folder's manifest must have; None if it has none."""
    if not destination.is_dir():
        return False
    names = set(parts) if manifest is None else {*parts, MANIFEST}
    if "" not in parts and {path.name for path in destination.iterdir()} != names:
        return False
    if manifest is not None and not _holds(destination / MANIFEST, manifest):
        return False
    for folder, entry in parts.items():
        for name, digest in entry.files.items():
            published = destination / folder / name
            if not published.is_file():
                return False
            is_link = published.samefile(entry.path / name)
            if not is_link and digest_file(published, memo) != digest:
                return False
    return True


def _holds(file: Path, text: str) -> bool:
    try:
        return file.read_text(encoding="utf-8") == text
    except (OSError, UnicodeDecodeError):
        return False


def _is_note(note: Any) -> bool:
    """Whether it is as `Store.note` writes it: the file may have been edited."""
    return (
        isinstance(note, dict)
        and isinstance(note.get("key"), str)
        and isinstance(note.get("parts"), dict)
    )


def _replace_prefix(value: Any, old: str, new: str) -> Any:
    """JSON values in which every path that is `old`, or is below it, is moved to `new`."""
    if isinstance(value, str) and (value == old or value.startswith(old + "/")):
        return new + value[len(old) :]
    if isinstance(value, list):
        return [_replace_prefix(item, old, new) for item in value]
    if isinstance(value, dict):
        return {key: _replace_prefix(item, old, new) for key, item in value.items()}
    return value
