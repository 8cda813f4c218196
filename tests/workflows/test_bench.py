"""What `toolkit bench CONFIG` measures of each kind, decided before a server starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.deployments import config_of
from toolkit.errors import UsageError
from toolkit.workflows.bench import (
    chat_folder,
    check_measurable,
    plain_for_bench,
    unmeasured_plain,
)

PLAIN: dict[str, Any] = {"draft": None, "speculation__kind": "none"}


@pytest.mark.parametrize(
    ("kind", "keys", "speculates", "asked", "plain"),
    [
        ("torch", {}, True, None, "by request"),
        ("engine", {}, True, None, "by request"),
        ("torch", {}, True, False, None),
        ("torch", {}, False, None, None),  # max_draft_len: auto may decide so
        ("pytorch", {}, True, None, None),
        ("vllm_cpu", {"engine__kv_cache_gib": 1.0}, True, None, "beside"),
        ("vllm_cpu", {"engine__kv_cache_gib": 1e6}, True, None, None),
        ("vllm_cpu", {"engine__kv_cache_gib": 1.0}, True, False, None),
    ],
)
def test_every_kind_is_measured_without_options(
    tmp_path: Path,
    kind: str,
    keys: dict[str, Any],
    speculates: bool,
    asked: bool | None,
    plain: str | None,
) -> None:
    config = config_of(kind, **keys)
    check_measurable(config, against_plain=asked)
    assert plain_for_bench(config, tmp_path, speculates=speculates, against_plain=asked) == plain


@pytest.mark.parametrize(
    ("kind", "keys", "words", "hint"),
    [
        ("pytorch", {}, "only after a restart", "toolkit validate"),
        ("torch", PLAIN, "does not speculate", "Leave --against-plain out"),
        ("torch", {"triton__decoupled": False}, "answers each request once", "validate_latency.py"),
        ("engine", {"triton__decoupled": False}, "answers each request once", "decoupled: true"),
    ],
)
def test_what_cannot_be_measured_as_asked_is_refused(
    kind: str, keys: dict[str, Any], words: str, hint: str
) -> None:
    with pytest.raises(UsageError, match=words) as refused:
        check_measurable(config_of(kind, **keys), against_plain=True)
    assert hint in str(refused.value)


def test_a_second_server_needs_memory_and_is_refused_where_it_was_asked_for(
    tmp_path: Path,
) -> None:
    config = config_of("vllm_cpu", engine__kv_cache_gib=1e6)
    with pytest.raises(UsageError, match="no memory for a second server"):
        plain_for_bench(config, tmp_path, speculates=True, against_plain=True)
    assert "no memory for one" in unmeasured_plain(config)
    assert "takes a restart" in unmeasured_plain(config_of("pytorch"))


def test_messages_are_written_by_the_targets_template(tmp_path: Path) -> None:
    config = config_of("torch")
    target = config.target.model_copy(update={"checkpoint": tmp_path})
    assert chat_folder(config.model_copy(update={"target": target})) == tmp_path

    nowhere = Path("nobody-has-this/model")
    target = config.target.model_copy(update={"checkpoint": nowhere})
    assert target.hub_id == "nobody-has-this/model"
    assert chat_folder(config.model_copy(update={"target": target})) == nowhere
