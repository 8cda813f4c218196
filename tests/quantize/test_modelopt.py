from __future__ import annotations

import resource
from pathlib import Path

import pytest

from toolkit.quantize.modelopt import reserve


def test_a_file_to_map_has_all_its_blocks_before_it_is_written(tmp_path: Path) -> None:
    reserve(tmp_path / "weight", 1_000_000)
    stat = (tmp_path / "weight").stat()
    assert (stat.st_size, stat.st_blocks * 512 >= 1_000_000) == (1_000_000, True)


def test_a_file_that_finds_no_room_is_an_error_and_no_signal(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
        with pytest.raises(OSError, match="File too large"):
            reserve(tmp_path / "weight", 1_000_000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
