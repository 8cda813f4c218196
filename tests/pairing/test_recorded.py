"""Digests that came with a checkpoint: only they reveal a flipped bit in a weight that still looks
like a weight.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from toolkit.errors import CheckpointError
from toolkit.pairing.recorded import check_recorded_digests


@pytest.fixture
def source(tmp_path: Path) -> Path:
    (tmp_path / "model.safetensors").write_bytes(bytes(range(200)))
    return tmp_path


def record(source: Path, style: str) -> None:
    digest = hashlib.sha256((source / "model.safetensors").read_bytes()).hexdigest()
    if style == "hub":
        folder = source / ".cache/huggingface/download"
        folder.mkdir(parents=True)
        (folder / "model.safetensors.metadata").write_text(f"{'0' * 40}\n{digest}\n1.0\n")
    else:
        (source / "SHA256SUMS").write_text(
            f"{digest} {style}model.safetensors\n{'0' * 64}  elsewhere.bin\n\n"
        )


@pytest.mark.parametrize("style", [" ", "*", "hub"])
def test_any_flipped_bit_is_found(style: str, source: Path) -> None:
    record(source, style)
    check_recorded_digests(source)
    data = bytearray((source / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (source / "model.safetensors").write_bytes(bytes(data))
    with pytest.raises(
        CheckpointError,
        match=r"model\.safetensors: its sha256 is .* was recorded\n  fetch this file again",
    ):
        check_recorded_digests(source)


def test_a_checkpoint_without_recorded_digests_passes(source: Path) -> None:
    check_recorded_digests(source)


@pytest.mark.parametrize("line", [b"oneword", b"\xff\xfe", b"0123  model.safetensors"])
def test_a_record_that_cannot_be_read_is_refused_with_its_line(line: bytes, source: Path) -> None:
    record(source, " ")
    with (source / "SHA256SUMS").open("ab") as file:
        file.write(line + b"\n")
    with pytest.raises(CheckpointError, match=r"SHA256SUMS: line 4 is not `DIGEST  NAME`"):
        check_recorded_digests(source)
