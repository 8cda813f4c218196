"""Hub ids against a hub on loopback: which files are fetched, what stays in the cache, and what
the errors say.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.checkpoints import write_checkpoint
from tests.support.hub import SmallHub, small_hub
from toolkit.checkpoints.hub import fetch
from toolkit.checkpoints.reader import read_index
from toolkit.errors import CheckpointError

NAME = "somebody/tiny"


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[SmallHub]:
    folder = write_checkpoint(tmp_path / "origin")
    (folder / "pytorch_model.bin").write_bytes(b"a pickle")
    (folder / "modeling_custom.py").write_text("raise SystemExit")
    with small_hub(NAME, folder) as running:
        yield running


def test_a_checkpoint_is_fetched_whole_without_pickles_and_code(
    hub: SmallHub, tmp_path: Path
) -> None:
    folder = fetch(NAME, cache=tmp_path / "cache", endpoint=hub.url)
    assert read_index(folder).keys() == read_index(hub.folder).keys()
    assert (folder / "tokenizer.json").read_bytes() == (hub.folder / "tokenizer.json").read_bytes()
    assert not {file.suffix for file in folder.iterdir()} & {".bin", ".py"}
    assert "pytorch_model.bin" not in hub.asked and "modeling_custom.py" not in hub.asked


def test_what_was_fetched_is_found_again_without_the_hub(hub: SmallHub, tmp_path: Path) -> None:
    first = fetch(NAME, cache=tmp_path / "cache", endpoint=hub.url)
    sent = len(hub.asked)
    assert fetch(NAME, cache=tmp_path / "cache", endpoint=hub.url, download=False) == first
    assert len(hub.asked) == sent


def test_what_is_not_here_says_so_without_asking_the_hub(hub: SmallHub, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is not on this machine"):
        fetch(NAME, cache=tmp_path / "cache", endpoint=hub.url, download=False)
    assert hub.asked == []


@pytest.mark.parametrize(
    "status, code, words",
    [
        (401, "RepoNotFound", "is not on the hub, or you have no access to it"),
        (403, "GatedRepo", "access has not been granted"),
        (404, "RevisionNotFound", "has no such revision"),
        (404, "RepoNotFound", "is not on the hub"),
    ],
)
def test_a_refusal_of_the_hub_has_its_hint(
    hub: SmallHub, tmp_path: Path, status: int, code: str, words: str
) -> None:
    hub.status, hub.error = status, code
    with pytest.raises(CheckpointError, match=words) as caught:
        fetch(NAME, "main", cache=tmp_path / "cache", endpoint=hub.url)
    assert caught.value.hint


def test_a_hub_that_is_out_of_reach_is_named_as_the_cause(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="could not be fetched"):
        fetch(NAME, cache=tmp_path / "cache", endpoint="http://127.0.0.1:9")
