"""Entries exist whole or not at all; a damaged one is noticed; nothing is left behind."""

from __future__ import annotations

import errno
import json
import os
import re
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from toolkit.errors import StageError, StoreError
from toolkit.pipeline.files import replace_folder, store_error, write_whole
from toolkit.pipeline.store import MAX_WAITING, RESUME, Entry, Store, Written

KEY = "0" * 64


def write_two(content: Path) -> Written:
    (content / "a").write_text("alpha")
    (content / "sub").mkdir()
    (content / "sub" / "b").write_text("beta")
    return Written(
        {"path": str(content), "inner": [{"file": f"{content}/a"}], "other": "/elsewhere"},
        {"seconds": 1.0},
    )


def leftovers(root: Path) -> list[Path]:
    return [path for path in root.rglob(".tmp.*") if path.is_dir()]


@pytest.fixture
def notices() -> list[str]:
    return []


@pytest.fixture
def store(tmp_path: Path, notices: list[str]) -> Store:
    return Store(tmp_path / "store", notice=notices.append)


def entry_in(store: Store) -> Entry:
    return store.build("s/one", KEY, {"config": {}}, write_two)[0]


def test_an_entry_is_found_again_and_its_record_points_into_it(store: Store) -> None:
    built, reused = store.build("s/one", KEY, {"config": {"x": 1}}, write_two)
    assert not reused
    assert built.path == store.root / "s" / "one" / KEY / "content"
    assert built.record == {
        "path": str(built.path),
        "inner": [{"file": f"{built.path}/a"}],
        "other": "/elsewhere",
    }
    again, reused = store.build("s/one", KEY, {}, write_two)
    assert reused
    assert again == built == store.find("s/one", KEY)
    assert set(built.files) == {"a", "sub/b"}


def test_the_store_can_be_moved(store: Store, tmp_path: Path) -> None:
    entry_in(store)
    store.root.rename(tmp_path / "moved")
    entry = Store(tmp_path / "moved").find("s/one", KEY)
    assert entry is not None
    assert entry.record["path"] == str(tmp_path / "moved" / "s" / "one" / KEY / "content")


def test_the_digest_is_of_content_alone(store: Store) -> None:
    first, _ = store.build("s", "1" * 64, {"config": {"x": 1}}, write_two)
    second, _ = store.build("t", "2" * 64, {"config": {"x": 2}}, write_two)
    assert first.digest == second.digest
    assert first.path != second.path


def test_what_fails_leaves_nothing(store: Store) -> None:
    def fail(content: Path) -> Written:
        write_two(content)
        raise StageError("s", "no luck")

    with pytest.raises(StageError, match="no luck"):
        store.build("s/one", KEY, {}, fail)
    assert store.find("s/one", KEY) is None
    assert leftovers(store.root) == []
    assert list((store.root / ".locks").iterdir()) == []


@pytest.mark.parametrize("file", ["a", "sub/b"])
@pytest.mark.parametrize("damage", ["gone", "truncated", "flipped", "folder"])
def test_a_damaged_entry_is_noticed_and_built_again(
    store: Store, notices: list[str], file: str, damage: str
) -> None:
    path = entry_in(store).path / file
    if damage == "truncated":
        os.truncate(path, 2)
    elif damage == "flipped":
        path.write_text(path.read_text()[:-1] + "X")
    else:
        path.unlink()
        if damage == "folder":
            path.mkdir()
    rebuilt, reused = store.build("s/one", KEY, {}, write_two)
    assert not reused
    assert file in notices[0]
    assert (rebuilt.path / "sub" / "b").read_text() == "beta"
    assert store.build("s/one", KEY, {}, write_two)[1]


@pytest.mark.parametrize("text", ["", "{", None])
def test_a_lost_or_damaged_record_is_noticed(
    store: Store, notices: list[str], text: str | None
) -> None:
    record = entry_in(store).path.parent / "record.json"
    record.unlink()
    if text is not None:
        record.write_text(text)
    assert store.find("s/one", KEY) is None
    assert "record.json" in notices[0]
    assert not store.build("s/one", KEY, {}, write_two)[1]
    assert store.find("s/one", KEY) is not None


def test_an_entry_that_may_not_be_used_is_replaced(store: Store) -> None:
    entry_in(store)

    def other(content: Path) -> Written:
        (content / "c").write_text("gamma")
        return Written({}, {"seconds": 2.0})

    replaced, reused = store.build("s/one", KEY, {}, other, is_usable=lambda entry: False)
    assert not reused
    assert set(replaced.files) == {"c"}
    assert not (replaced.path / "a").exists()
    assert [path.name for path in (store.root / "s" / "one").iterdir()] == [KEY]


def test_dead_temporary_folders_are_swept_and_living_ones_are_not(store: Store) -> None:
    for stage, key in (("s/one", KEY), ("t", "1" * 64), ("u", "2" * 64)):
        (store.root / stage / f".tmp.{key}" / "content").mkdir(parents=True)
    with store._lock("u", "2" * 64):
        entry_in(store)
    assert [path.parent.name for path in leftovers(store.root)] == ["u"]


def test_what_a_killed_build_can_go_on_from_waits_for_its_key(store: Store) -> None:
    kept: list[str] = []

    def write(content: Path) -> Written:
        kept.extend(file.name for file in (content.parent / RESUME).iterdir())
        return write_two(content)

    waiting = store.root / "s/one" / f".tmp.{KEY}"
    for name in ("content/half", f"{RESUME}/layer-000"):
        (waiting / name).parent.mkdir(parents=True)
        (waiting / name).write_text("x")
    store.build("t", "1" * 64, {}, write_two)
    assert leftovers(store.root) == [waiting]
    assert not (waiting / "content").exists()
    entry, reused = store.build("s/one", KEY, {}, write)
    assert (kept, reused, set(entry.files)) == (["layer-000"], False, {"a", "sub/b"})
    assert leftovers(store.root) == []
    assert {path.name for path in entry.path.parent.iterdir()} == {"content", "record.json"}


def test_what_a_failed_build_has_finished_is_kept_unless_it_is_to_be_fresh(store: Store) -> None:
    seen: list[bool] = []

    def fail(content: Path) -> Written:
        seen.append((content.parent / RESUME).exists())
        (content.parent / RESUME).mkdir(exist_ok=True)
        raise OSError(errno.ENOSPC, "No space left on device")

    for fresh in (False, False, True):
        with pytest.raises(StoreError, match="cannot write"):
            store.build("s/one", KEY, {}, fail, fresh=fresh)
    assert seen == [False, True, False]
    (waiting,) = leftovers(store.root)
    assert [path.name for path in waiting.iterdir()] == [RESUME]


def test_of_the_builds_that_wait_only_the_newest_are_kept(store: Store) -> None:
    folders = [store.root / "s" / f".tmp.{number:064}" for number in range(MAX_WAITING + 2)]
    for age, folder in enumerate(folders):
        (folder / RESUME).mkdir(parents=True)
        os.utime(folder / RESUME, (1000 - age, 1000 - age))
    entry_in(store)
    assert sorted(leftovers(store.root)) == folders[:MAX_WAITING]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EACCES, errno.EROFS, errno.EDQUOT])
def test_what_the_file_system_refuses_says_what_where_and_how_to_fix(
    store: Store, number: int
) -> None:
    def refuse(content: Path) -> Written:
        raise OSError(number, os.strerror(number), str(content / "weights"))

    with pytest.raises(StoreError) as caught:
        store.build("s/one", KEY, {}, refuse)
    assert caught.value.exit_code == 3
    assert caught.value.where is not None and "weights" in caught.value.where
    assert caught.value.hint
    assert os.strerror(number) in str(caught.value)
    assert store.find("s/one", KEY) is None
    assert leftovers(store.root) == []


@pytest.mark.parametrize(
    ("message", "hint"),
    [
        (
            "Error while serializing: IoError: No space left on device (os error 28)",
            "Free some space",
        ),
        ("Error while serializing: I/O error: File too large (os error 27)", "The file-size limit"),
        (
            (
                "[enforce fail at inline_container.cc:664] . unexpected pos 64 vs 0, No space left"
                " on device"
            ),
            "Free some space",
        ),
    ],
)
def test_a_full_disk_that_a_library_reports_in_its_own_words_is_one(
    message: str, hint: str, store: Store
) -> None:
    def refuse(content: Path) -> Written:
        raise RuntimeError(message)

    with pytest.raises(StoreError, match=hint):
        store.build("s/one", KEY, {}, refuse)


def test_a_copy_that_cannot_be_written_names_the_file_that_it_would_make(
    store: Store, tmp_path: Path
) -> None:
    """Under `ulimit -f`, Python names the source first, which nobody writes."""
    (source := tmp_path / "source").write_bytes(bytes(1 << 16))

    def copy(content: Path) -> Written:
        shutil.copy2(source, content / "weights")
        raise AssertionError("no limit")

    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 14, limits[1]))
    try:
        with pytest.raises(StoreError, match="File too large") as caught:
            store.build("s/one", KEY, {}, copy)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert caught.value.where is not None
    assert caught.value.where.endswith("content/weights")


def test_what_a_library_says_about_its_own_work_is_left_alone(store: Store) -> None:
    def refuse(content: Path) -> Written:
        raise RuntimeError("shape mismatch (os error 9999)")

    with pytest.raises(RuntimeError, match="shape mismatch"):
        store.build("s/one", KEY, {}, refuse)


def test_other_errors_stay_what_they_are() -> None:
    assert store_error("s", FileNotFoundError(errno.ENOENT, "gone"), "x") is None


FULL = """
import sys
from pathlib import Path
from toolkit.errors import StoreError
from toolkit.pipeline.store import Store, Written
def write(content):
    (content / "small").write_text("x")
    (content / "big").write_bytes(bytes(200_000))
    return Written({}, {"seconds": 0.0})
try:
    Store(Path(sys.argv[1])).build("s", "0" * 64, {}, write)
except StoreError as error:
    print(error)
"""


@pytest.fixture
def no_big_files() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_real_refusal_by_the_kernel_leaves_nothing(store: Store) -> None:
    """A test cannot fill a disk. A file-size limit makes a write fail half-way in the same way."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))

    done = subprocess.run(
        [sys.executable, "-c", FULL, str(store.root)],
        capture_output=True,
        text=True,
        preexec_fn=limit,
        timeout=60,
        check=True,
    )
    assert re.search(
        r"s: .*/store: cannot write: File too large\n  The file-size limit", done.stdout
    ), done.stdout + done.stderr
    assert store.find("s", KEY) is None
    assert leftovers(store.root) == []


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_permission_says_so(tmp_path: Path) -> None:
    (tmp_path / "locked").mkdir(mode=0o500)
    with pytest.raises(StoreError, match="permission"):
        Store(tmp_path / "locked" / "store").build("s", KEY, {}, write_two)


def test_a_store_below_a_file_is_an_error_with_its_place(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    blocked = Store(tmp_path / "file" / "store")
    with pytest.raises(
        StoreError,
        match=r"file/store.*: cannot write: Not a directory\n  A file stands where a folder",
    ):
        blocked.build("s", KEY, {}, write_two)
    with pytest.raises(StoreError, match="A file stands where a folder"):
        blocked.find("s", KEY)


@pytest.mark.parametrize("obstacle", ["file", "link", "link to nowhere", "file above"])
def test_nothing_of_other_peoples_is_replaced_by_what_is_published(
    obstacle: str, store: Store, tmp_path: Path
) -> None:
    entry, theirs, destination = entry_in(store), tmp_path / "theirs", tmp_path / "out" / "name"
    if obstacle == "file above":
        destination.parent.write_text("theirs")
    else:
        destination.parent.mkdir()
        if obstacle == "file":
            destination.write_text("theirs")
        else:
            destination.symlink_to(theirs)
            if obstacle == "link":
                theirs.mkdir()
    with pytest.raises(
        StoreError,
        match=r"publish: .*/out.*: cannot write: File exists\n  A file or a link stands where",
    ):
        store.publish({"": entry}, destination)
    assert destination.parent.is_file() or [path.name for path in destination.parent.iterdir()] == [
        "name"
    ]
    assert destination.is_symlink() == obstacle.startswith("link")
    assert not theirs.exists() or list(theirs.iterdir()) == []


def test_publishing_links_and_replaces_as_a_whole(store: Store, tmp_path: Path) -> None:
    entry, destination = entry_in(store), tmp_path / "out" / "name"
    assert store.publish({"target": entry}, destination)
    assert (destination / "target" / "sub" / "b").read_text() == "beta"
    assert (destination / "target" / "a").samefile(entry.path / "a")
    assert not store.publish({"target": entry}, destination)
    assert store.publish({"": entry}, destination)
    assert sorted(path.name for path in destination.iterdir()) == ["a", "sub"]
    assert [path.name for path in destination.parent.iterdir()] == ["name"]


def test_publishing_drops_what_no_longer_belongs_there(store: Store, tmp_path: Path) -> None:
    entry, destination = entry_in(store), tmp_path / "name"
    store.publish({"target": entry, "draft": entry}, destination)
    assert store.publish({"target": entry}, destination)
    assert [path.name for path in destination.iterdir()] == ["target"]


def test_a_published_file_that_was_edited_is_put_right(store: Store, tmp_path: Path) -> None:
    destination = tmp_path / "name"
    store.publish({"": entry_in(store)}, destination)
    (destination / "a").unlink()
    (destination / "a").write_text("other")
    assert store.publish({"": entry_in(store)}, destination)
    assert (destination / "a").read_text() == "alpha"
    # A write in place also changes the stored file, which is the other end of the hard link. Both
    # are restored.
    (destination / "a").write_text("hurt!")
    assert store.publish({"": entry_in(store)}, destination)
    assert (destination / "a").read_text() == "alpha"


def test_what_python_caches_beside_published_files_is_no_reason_to_publish(
    store: Store, tmp_path: Path
) -> None:
    destination = tmp_path / "name"
    store.publish({"": entry_in(store)}, destination)
    (destination / "sub" / "__pycache__").mkdir()
    assert not store.publish({"": entry_in(store)}, destination)


def test_files_are_copied_where_links_are_not_to_be_had(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(source: str, copy: str) -> None:
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", refuse)
    destination = tmp_path / "name"
    assert store.publish({"": entry_in(store)}, destination)
    assert not (destination / "a").samefile(entry_in(store).path / "a")
    assert not store.publish({"": entry_in(store)}, destination)


def test_folders_are_replaced_where_names_cannot_be_exchanged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("toolkit.pipeline.files._exchange", lambda new, destination: False)
    for name in ("new", "old"):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).touch()
    replace_folder(tmp_path / "new", tmp_path / "old")
    assert [path.name for path in tmp_path.rglob("*")] == ["old", "new"]


def test_small_files_are_written_whole(tmp_path: Path) -> None:
    write_whole(tmp_path / "sub" / "file", "one")
    write_whole(tmp_path / "sub" / "file", "two")
    assert [path.read_text() for path in (tmp_path / "sub").iterdir()] == ["two"]


def test_the_last_keys_of_a_name_are_remembered(store: Store) -> None:
    assert store.last("name") == {}
    store.note("name", "pair", "k1", {"config": {"x": (1, 2)}})
    store.note("name", "package", "k2", {})
    store.note("name", "pair", "k3", {"config": {"x": 2}})
    assert store.last("name") == {
        "pair": {"key": "k3", "parts": {"config": {"x": 2}}},
        "package": {"key": "k2", "parts": {}},
    }
    (store.root / ".names" / "name.json").write_text("{")
    assert store.last("name") == {}


def test_the_record_holds_the_key_parts_and_where_it_came_from(store: Store) -> None:
    entry, _ = store.build("s/one", KEY, {"config": {"x": 1}}, write_two)
    data = json.loads((entry.path.parent / "record.json").read_text())
    assert data["parts"] == {"config": {"x": 1}}
    assert data["provenance"] == {"seconds": 1.0}
    assert set(data["files"]) == {"a", "sub/b"}


@pytest.mark.parametrize("content", ["[]", '{"pair": 5}', '{"pair": {"key": null}}', "{"])
def test_an_edited_memory_of_the_last_build_counts_as_none(content: str, tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    store.note("tiny", "pair", "k", {"config": 1})
    assert store.last("tiny") == {"pair": {"key": "k", "parts": {"config": 1}}}
    (tmp_path / "store" / ".names" / "tiny.json").write_text(content)
    assert store.last("tiny") == {}
