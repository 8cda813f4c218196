"""The content-addressed store of finished stage outputs.

    ROOT/STAGE/KEY/content/       what the stage wrote ROOT/STAGE/KEY/record.json    its record, all
    key parts, the digest of every file, and where it came from ROOT/.names/NAME.json         the
    last keys of a deployment, so that `explain` can say what differs ROOT/.locks/
    one lock per key being built ROOT/.digests.json            remembered digests (a shortcut)

An entry is written to a temporary sibling and renamed, so it is there whole or not at all, whoever
races and whatever is killed. Whoever builds a key holds its lock (flock, which the kernel drops
with the process); a second build waits and then reuses. A temporary folder whose key nobody has
locked is therefore dead, and is swept. Every use of an entry compares its files with their digests,
so an entry that was damaged or edited is built again.
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

__all__ = ["Entry", "Store", "Written"]

FORMAT = 1  # of record.json
TEMPORARY = ".tmp."
HERE = (
    "@content"  # stands for the content folder in a stored record, so that the store can be moved
)

Notice = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Written:
    """What a stage hands the store: its record as JSON values, and where it came from (not part
    of any key).
    """

    record: Any
    provenance: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Entry:
    """One finished output. path: its content folder; files: relative name -> digest; record:
    JSON values, paths absolute.
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
        """Of the content alone: names and bytes of its files."""
        return digest_value(self.files)


class Store:
    """Look up, build, publish. notice is told, in a line, of what a user would wonder about."""

    def __init__(self, root: Path, *, rehash: bool = False, notice: Notice | None = None) -> None:
        self.root = root.absolute()
        self.memo = DigestMemo(self.root / ".digests.json", rehash=rehash)
        self.notice: Notice = notice or (lambda text: None)

    def find(self, stage: str, key: str) -> Entry | None:
        """The entry, if it is there and undamaged."""
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
        record = _replace_prefix(data["record"], HERE, str(content))
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
        usable: Callable[[Entry], bool] = lambda entry: True,
    ) -> tuple[Entry, bool]:
        """The entry, and whether it was there already. Otherwise `write` fills a folder, which then
        becomes the entry.

        usable: whether a stored entry may be taken; if not, it is built and replaced. Raises
        StoreError where nothing can be written, and what `write` raises; in both cases nothing of
        it is left.
        """
        try:
            with self._lock(stage, key):
                found = self.find(stage, key)
                if found is not None and usable(found):
                    return found, True
                return self._write(stage, key, parts, write), False
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
        self, stage: str, key: str, parts: Mapping[str, Any], write: Callable[[Path], Written]
    ) -> Entry:
        folder = self.root / stage
        folder.mkdir(parents=True, exist_ok=True)
        self._sweep(stage, key)
        temporary = folder / f"{TEMPORARY}{key}.{secrets.token_hex(4)}"
        content = temporary / "content"
        content.mkdir(parents=True)
        try:
            written = write(content)
            files = digest_files(content)
            data = {
                "format": FORMAT,
                "stage": stage,
                "key": key,
                "parts": dict(parts),
                "record": _replace_prefix(written.record, str(content), HERE),
                "files": files,
                "provenance": dict(written.provenance),
            }
            (temporary / "record.json").write_text(json.dumps(data, indent=1), encoding="utf-8")
            replace_folder(temporary, folder / key)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        found = self.find(stage, key)
        if found is None:
            raise StoreError(
                stage,
                "what was just written reads back differently",
                where=folder / key,
                hint="Check the disk.",
            )
        return found

    @contextlib.contextmanager
    def _lock(self, stage: str, key: str, *, wait: bool = True) -> Iterator[None]:
        """Hold the lock of a key. The file is removed on release, so a waiter makes sure that it
        holds the present one.

        Raises BlockingIOError if it is taken and we are not to wait.
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

    def _sweep(self, stage: str, key: str) -> None:
        """Remove what killed builds have left: temporary folders of this key, whose lock is
        ours, and of free ones.
        """
        for pattern in (f"*/{TEMPORARY}*", f"*/*/{TEMPORARY}*"):
            for path in self.root.glob(pattern):
                of_stage, of_key = (
                    path.parent.relative_to(self.root).as_posix(),
                    path.name.split(".")[2],
                )
                if (of_stage, of_key) == (stage, key):
                    shutil.rmtree(path, ignore_errors=True)
                    continue
                with contextlib.suppress(BlockingIOError), self._lock(of_stage, of_key, wait=False):
                    shutil.rmtree(path, ignore_errors=True)

    def last(self, name: str) -> dict[str, dict[str, Any]]:
        """Stage -> {key, parts} of the last build of a deployment; empty if there was none."""
        try:
            known = json.loads(self._name_file(name).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return known if isinstance(known, dict) else {}

    def note(self, name: str, stage: str, key: str, parts: Mapping[str, Any]) -> None:
        """Remember the key that a deployment's stage has now."""
        known = self.last(name)
        now = {"key": key, "parts": dict(parts)}
        if known.get(stage) != now:
            known[stage] = now
            try:
                write_whole(self._name_file(name), json.dumps(known, indent=1))
            except OSError as error:
                raise store_error(stage, error, self.root) or error from error

    def _name_file(self, name: str) -> Path:
        return self.root / ".names" / f"{name}.json"

    def publish(self, parts: Mapping[str, Entry], destination: Path) -> bool:
        """Make `destination` hold the entries' content, each in the subfolder it is named by (""
        for the folder itself).

        Files are hard links where the file system has them, so they cost no space. The folder is
        replaced as a whole; what else stood in it is gone. Returns whether anything had to be done.
        """
        if _is_published(parts, destination, self.memo):
            return False
        try:
            with self._lock(
                "publish", digest_value(str(destination.absolute())).removeprefix("sha256:")
            ):
                destination.parent.mkdir(parents=True, exist_ok=True)
                for left in destination.parent.glob(f".{destination.name}{TEMPORARY}*"):
                    shutil.rmtree(left, ignore_errors=True)
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
                    replace_folder(temporary, destination)
                except BaseException:
                    shutil.rmtree(temporary, ignore_errors=True)
                    raise
        except OSError as error:
            raise store_error("publish", error, destination) or error from error
        return True


def _is_published(parts: Mapping[str, Entry], destination: Path, memo: DigestMemo) -> bool:
    if not destination.is_dir() or (
        "" not in parts and {path.name for path in destination.iterdir()} != set(parts)
    ):
        return False
    for folder, entry in parts.items():
        for name, digest in entry.files.items():
            there = destination / folder / name
            if not there.is_file() or not (
                there.samefile(entry.path / name) or digest_file(there, memo) == digest
            ):
                return False
    return True


def _replace_prefix(value: Any, old: str, new: str) -> Any:
    """JSON values with every text that is the path `old`, or lies beneath it, moved to `new`."""
    if isinstance(value, str) and (value == old or value.startswith(old + "/")):
        return new + value[len(old) :]
    if isinstance(value, list):
        return [_replace_prefix(item, old, new) for item in value]
    if isinstance(value, dict):
        return {key: _replace_prefix(item, old, new) for key, item in value.items()}
    return value
