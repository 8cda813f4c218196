"""Digests are equal for equal content, different for different content, and the same on every
machine and in every release.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from toolkit.errors import StoreError
from toolkit.pipeline.hashing import (
    DigestMemo,
    digest_file,
    digest_files,
    digest_tree,
    digest_value,
)

leaves = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(max_size=8)
    | st.binary(max_size=8)
)
values = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4)
    ),
    max_leaves=12,
)


def typed(value: Any) -> Any:
    """The value with explicit types. Two digests must be equal exactly if these are equal."""
    if isinstance(value, dict):
        return ("dict", frozenset((key, typed(item)) for key, item in value.items()))
    if isinstance(value, list):
        return ("list", tuple(typed(item) for item in value))
    if isinstance(value, float):
        return ("float", value.hex())
    return (type(value).__name__, value)


@given(values, values)
def test_digests_are_equal_exactly_when_the_values_are(first: Any, second: Any) -> None:
    assert (digest_value(first) == digest_value(second)) == (typed(first) == typed(second))


@given(st.dictionaries(st.text(max_size=4), values, min_size=2, max_size=5), st.randoms())
def test_the_order_of_keys_does_not_matter(mapping: dict[str, Any], random: Any) -> None:
    keys = list(mapping)
    random.shuffle(keys)
    assert digest_value({key: mapping[key] for key in keys}) == digest_value(mapping)


@given(st.lists(values, min_size=2, max_size=4))
def test_the_order_and_nesting_of_items_do_matter(items: list[Any]) -> None:
    assume(typed(items) != typed(items[::-1]))
    assert digest_value(items) != digest_value(items[::-1])
    assert digest_value(items) != digest_value([items])
    assert digest_value(items) == digest_value(tuple(items))


@pytest.mark.parametrize(
    "first, second",
    [(1, 1.0), (1, True), (0, False), ("1", 1), ("a", b"a"), (None, ""), ([], {}), (0.0, -0.0)],
)
def test_types_are_told_apart(first: Any, second: Any) -> None:
    assert digest_value(first) != digest_value(second)


def test_the_digest_of_a_structure_is_pinned() -> None:
    """The keys of finished work depend on this encoding. A change here rebuilds everybody's store,
    so it must be deliberate.
    """
    structure = {
        "stage": "quantize/target",
        "version": 1,
        "parts": {"x": [None, True, -3, 0.1, "é", b"\x00"]},
    }
    assert (
        digest_value(structure)
        == "sha256:a353d16551b121e3d7a051ee5ca9fc193d556a985b0818763ad1dd2aac5f2f1a"
    )
    assert (
        digest_value({})
        == "sha256:ee7d0fbed34482574a32d87dc754abd089afe0eab198e737989e34c14c3fe659"
    )


@pytest.mark.parametrize("value", [Path("x"), {1: 2}, {"a": object()}, [{"b": {3}}]])
def test_what_has_no_canonical_form_is_refused(value: Any) -> None:
    with pytest.raises(TypeError):
        digest_value(value)


def write_tree(folder: Path) -> Path:
    (folder / "sub").mkdir(parents=True)
    (folder / "a.json").write_text("{}")
    (folder / "sub" / "b.bin").write_bytes(b"\x00\x01")
    return folder


def test_a_tree_is_its_names_and_contents(tmp_path: Path) -> None:
    tree, other = write_tree(tmp_path / "tree"), write_tree(tmp_path / "other")
    os.utime(other / "a.json", (1, 1))
    (other / "a.json").chmod(0o600)
    assert (
        digest_tree(tree)
        == digest_tree(other)
        == "sha256:ad3e0e45b36fbe0c354ae53479bacabbc16c79a94770dbcbcd932db21be456a3"
    )
    (other / "a.json").rename(other / "c.json")
    assert digest_tree(tree) != digest_tree(other)
    (other / "c.json").rename(other / "a.json")
    (other / "sub" / "b.bin").write_bytes(b"\x00\x02")
    assert digest_tree(tree) != digest_tree(other)


def test_patterns_choose_files_and_links_are_followed(tmp_path: Path) -> None:
    tree = write_tree(tmp_path / "tree")
    assert list(digest_files(tree, ["*.json"])) == ["a.json"]
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked" / "a.json").symlink_to(tree / "a.json")
    (tmp_path / "linked" / "sub").symlink_to(tree / "sub")
    assert digest_tree(tmp_path / "linked") == digest_tree(tree)


def test_a_link_in_a_circle_and_a_dangling_one_are_refused(tmp_path: Path) -> None:
    tree = write_tree(tmp_path / "tree")
    (tree / "sub" / "up").symlink_to(tree)
    with pytest.raises(StoreError, match="back to a folder above"):
        digest_tree(tree)
    (tree / "sub" / "up").unlink()
    (tree / "gone").symlink_to(tmp_path / "nowhere")
    with pytest.raises(StoreError, match="gone"):
        digest_tree(tree)


def age(file: Path, seconds: float = 100.0) -> None:
    status = file.stat()
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns - int(seconds * 1e9)))


def test_the_memo_spares_reading_and_rehash_overrides_it(tmp_path: Path) -> None:
    file, store = tmp_path / "big", tmp_path / "store" / "digests.json"
    file.write_bytes(b"one")
    age(file)
    memo = DigestMemo(store)
    first = digest_file(file, memo)
    memo.save()
    # The same size, time and inode with other bytes, which only rehashing can see.
    stamp = file.stat().st_mtime_ns
    with file.open("r+b") as opened:
        opened.write(b"two")
    os.utime(file, ns=(stamp, stamp))
    assert digest_file(file, DigestMemo(store)) == first
    rehashed = DigestMemo(store, rehash=True)
    second = digest_file(file, rehashed)
    assert second == digest_file(file) != first
    rehashed.save()
    assert digest_file(file, DigestMemo(store)) == second


def test_the_memo_sees_a_changed_file(tmp_path: Path) -> None:
    file, memo = tmp_path / "big", DigestMemo(tmp_path / "digests.json")
    file.write_bytes(b"one")
    age(file)
    first = digest_file(file, memo)
    file.write_bytes(b"two")
    assert digest_file(file, memo) != first
    replacement = tmp_path / "other"
    replacement.write_bytes(b"six")
    replacement.replace(file)
    assert digest_file(file, memo) == digest_file(file)


def test_a_file_that_was_just_written_is_not_remembered(tmp_path: Path) -> None:
    """Its time stamp could stay the same through another write."""
    file, memo = tmp_path / "fresh", DigestMemo(tmp_path / "digests.json")
    file.write_bytes(b"one")
    digest_file(file, memo)
    assert memo.recall(file, file.stat()) is None


@pytest.mark.parametrize("content", ["", "{", "[]", '{"x": 1}', "\x00"])
def test_a_damaged_memo_is_no_fault(tmp_path: Path, content: str) -> None:
    file, store = tmp_path / "big", tmp_path / "digests.json"
    file.write_bytes(b"one")
    store.write_text(content)
    assert digest_file(file, DigestMemo(store)) == digest_file(file)


def test_a_memo_that_cannot_be_written_is_no_fault(tmp_path: Path) -> None:
    (tmp_path / "blocked").write_text("a file where a folder should be")
    memo = DigestMemo(tmp_path / "blocked" / "digests.json", rehash=True)
    memo.save()
