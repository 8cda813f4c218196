from __future__ import annotations

import os
from pathlib import Path

import pytest

from toolkit.pipeline.saved import read_saved


def test_an_object_is_read_back(tmp_path: Path) -> None:
    (tmp_path / "file").write_text(' \n{"said": ["ä"]}\n', encoding="utf-8")
    assert read_saved(tmp_path / "file") == {"said": ["ä"]}


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "not a JSON object"),
        (b"[1]", "not a JSON object"),
        (b'{"cut": ', "Expecting value"),
        (b'{"a": "\xff"}', "can't decode byte"),
        (b'{"a":' * 100_000, "nested too deeply"),
    ],
)
def test_what_is_none_is_refused_with_the_reason(tmp_path: Path, content: bytes, why: str) -> None:
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(ValueError, match=why):
        read_saved(tmp_path / "file")


def test_a_large_file_of_something_else_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / "file").open("wb") as file:
        file.truncate(2**40)  # a hole; nobody has the memory for it
    with pytest.raises(ValueError, match="not a JSON object"):
        read_saved(tmp_path / "file")


def test_what_may_never_end_is_not_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for endless in (tmp_path / "pipe", Path("/dev/zero"), tmp_path):
        with pytest.raises(ValueError, match="not a regular file"):
            read_saved(endless)
    with pytest.raises(FileNotFoundError):
        read_saved(tmp_path / "nothing")
