"""A published folder can be proved to be what was built, wherever it was copied."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.cli import toolkit_here
from toolkit.errors import UsageError
from toolkit.pipeline.manifest import MANIFEST, Verified, verify
from toolkit.pipeline.store import Entry, Store, Written


def silent(done: int, total: int | None, what: str) -> None:
    pass


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


def entry_of(store: Store, stage: str, size: int) -> Entry:
    def write(content: Path) -> Written:
        (content / "model.engine").write_bytes(b"x" * size)
        (content / "sub").mkdir()
        (content / "sub" / "a file").write_text(stage)
        return Written({}, {"seconds": 0.0})

    return store.build(stage, "1" * 64, {}, write)[0]


@pytest.fixture
def published(store: Store, tmp_path: Path) -> Path:
    """Two entries, published as engines are."""
    destination = tmp_path / "engines" / "name"
    parts = {role: entry_of(store, f"compile/{role}", 3 << 20) for role in ("target", "draft")}
    assert store.publish(parts, destination, manifest=True)
    assert not store.publish(parts, destination, manifest=True)
    return destination


@pytest.fixture
def copy(published: Path, tmp_path: Path) -> Path:
    """The folder on another machine: another path, no store, other times."""
    folder = tmp_path / "elsewhere" / "deployed"
    shutil.copytree(published, folder, copy_function=shutil.copyfile)
    shutil.rmtree(tmp_path / "store")
    return folder


def test_a_copy_is_whole_and_has_the_same_manifest(published: Path, copy: Path) -> None:
    verified = verify(copy, silent)
    assert verified.is_whole
    assert (verified.files, verified.num_bytes) == (
        4,
        (6 << 20) + len("compile/targetcompile/draft"),
    )
    assert verified.digest == verify(published, silent).digest
    text = (copy / MANIFEST).read_text()
    digest = hashlib.sha256((copy / "draft" / "model.engine").read_bytes()).hexdigest()
    assert f"{digest}  draft/model.engine\n" in text
    assert f"# compile/target {'1' * 64}\n" in text


def test_sha256sum_reads_the_manifest(copy: Path) -> None:
    command = ["sha256sum", "--check", "--strict", MANIFEST]
    assert subprocess.run(command, cwd=copy, capture_output=True, check=False).returncode == 0
    (copy / "target" / "sub" / "a file").write_text("y")
    assert subprocess.run(command, cwd=copy, capture_output=True, check=False).returncode == 1


def change(folder: Path) -> None:
    file = folder / "draft" / "model.engine"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def cut(folder: Path) -> None:
    with (folder / "draft" / "model.engine").open("r+b") as file:
        file.truncate(1000)


def remove(folder: Path) -> None:
    (folder / "draft" / "model.engine").unlink()


def link_to_nowhere(folder: Path) -> None:
    remove(folder)
    (folder / "draft" / "model.engine").symlink_to("gone")


def add(folder: Path) -> None:
    (folder / "draft" / "more").write_text("x")


@pytest.mark.parametrize(
    ("act", "fault", "name"),
    [
        (change, "changed", "draft/model.engine"),
        (cut, "changed", "draft/model.engine"),
        (remove, "missing", "draft/model.engine"),
        (link_to_nowhere, "missing", "draft/model.engine"),
        (add, "added", "draft/more"),
    ],
)
def test_what_differs_is_named_and_the_exit_code_is_1(
    act: Callable[[Path], None], fault: str, name: str, copy: Path, tmp_path: Path
) -> None:
    assert toolkit_here("report", str(copy), "--verify", cwd=tmp_path).returncode == 0
    act(copy)
    verified = verify(copy, silent)
    faults = {key: getattr(verified, key) for key in ("changed", "missing", "added")}
    assert faults == {**dict.fromkeys(faults, ()), fault: (name,)}
    done = toolkit_here("report", str(copy), "--verify", cwd=tmp_path)
    assert done.returncode == 1
    assert f"  {fault:8} {name}\n" in done.stdout
    (as_json,) = json.loads(
        toolkit_here("report", str(copy), "--verify", "--json", cwd=tmp_path).stdout
    )
    assert as_json[fault] == [name]


def test_what_serving_adds_is_told_and_no_fault(copy: Path) -> None:
    caches = copy / "target" / "sub" / "__pycache__"
    caches.mkdir()
    (caches / "model.cpython-311.pyc").write_text("x")
    (copy / "hostfile").write_text("node1\n")
    verified = verify(copy, silent)
    assert verified.is_whole
    assert verified.expected == ("hostfile", "target/sub/__pycache__/model.cpython-311.pyc")


def test_large_files_are_read_with_progress(copy: Path) -> None:
    seen: list[tuple[int, int | None]] = []
    verify(copy, lambda done, total, what: seen.append((done, total)))
    assert seen == sorted(seen)
    assert len(seen) >= 6  # a report per MiB
    assert seen[-1] == (6, 6)


@pytest.mark.parametrize("text", [None, "no digest\n"])
def test_without_a_manifest_nothing_can_be_verified(text: str | None, copy: Path) -> None:
    (copy / MANIFEST).unlink()
    if text is not None:
        (copy / MANIFEST).write_text(text)
    with pytest.raises(UsageError, match=MANIFEST):
        verify(copy, silent)
    assert toolkit_here("report", str(copy), "--verify", cwd=copy).returncode == 2


def test_an_edited_manifest_is_published_again(store: Store, tmp_path: Path) -> None:
    entry, destination = entry_of(store, "package", 10), tmp_path / "name"
    store.publish({"": entry}, destination, manifest=True)
    whole: Verified = verify(destination, silent)
    (destination / MANIFEST).write_text("")
    assert store.publish({"": entry}, destination, manifest=True)
    assert verify(destination, silent) == whole
