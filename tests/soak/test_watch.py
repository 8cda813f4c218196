"""What a process holds for itself is counted, and not what it has mapped of files; and what a
server leaves behind, but not what others use.
"""

from __future__ import annotations

import mmap
import os
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import pytest

from tests.soak.watch import leftovers, sample_of
from toolkit.process.workspace import Workspace

SIZE = 64 * 2**20


def test_memory_counts_and_mapped_files_do_not(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"x" * SIZE)
    before = sample_of(os.getpid()).memory
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as read:
        assert sum(read[:: mmap.PAGESIZE]) > 0
        assert sample_of(os.getpid()).memory < before + SIZE // 2
    # Mapped, since `malloc` may answer from what earlier tests freed and what stayed resident.
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    with mmap.mmap(-1, SIZE, flags=private) as held:
        held.write(b"x" * SIZE)
        assert sample_of(os.getpid()).memory > before + SIZE // 2


def test_the_folder_of_a_server_is_left_behind_when_nothing_holds_its_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    workspace = Workspace.create()
    assert str(workspace.path) not in leftovers()
    workspace.close()
    assert str(workspace.path) in leftovers()


def test_shared_memory_is_left_behind_when_no_process_maps_it() -> None:
    region = SharedMemory(create=True, size=4096)
    path = f"/dev/shm/{region.name}"
    try:
        assert path not in leftovers()
        region.close()
        assert path in leftovers()
    finally:
        region.unlink()
