"""Where a builder is taken from, by what is asked and what is there."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from toolkit.engines.trtllm.where import (
    Builder,
    ContainerBuilder,
    LocalBuilder,
    build_image,
    choose_builder,
    same_version,
)
from toolkit.errors import BackendUnavailable, StageError


def program(file: Path, text: str = "exit 0") -> None:
    file.write_text(f"#!/bin/sh\n{text}\n")
    file.chmod(0o755)


def choose(folder: Path, asked: str, version: str = "1.2.1") -> Builder:
    return choose_builder(
        asked,
        version,
        "target",
        which=lambda name: str(folder / name) if (folder / name).exists() else None,
        environment={},
    )


@pytest.mark.parametrize(
    ("found", "asked", "same"),
    [
        ("1.2.1", "1.2.1", True),
        ("1.0.3", "1.0", True),
        ("1.2.0rc8", "1.2.0", True),
        ("1.3.0rc3", "1.3rc-early", True),
        ("1.3.0rc27", "1.3rc-late", True),
        ("1.3.0rc20.post1", "1.3rc-early", True),
        ("1.3.0rc2", "1.3rc-late", False),
        ("1.3.0rc29", "1.4rc", True),
        ("1.3.0", "1.3rc-late", False),
        ("0.21.0", "0.21", True),
        ("1.2.1", "1.2.0", False),
        ("1.10.0", "1.1", False),
        ("1.2.10", "1.2.1", False),
    ],
)
def test_versions_are_the_same_by_release(found: str, asked: str, same: bool) -> None:
    assert same_version(found, asked) is same


def test_a_local_builder_of_the_version_is_taken(tmp_path: Path) -> None:
    program(tmp_path / "trtllm-build")
    program(tmp_path / "docker")
    program(tmp_path / "python3", "echo 1.2.1")
    assert choose(tmp_path, "auto") == LocalBuilder(tmp_path / "trtllm-build", "1.2.1")
    assert isinstance(choose(tmp_path, "container"), ContainerBuilder)


def test_a_local_builder_of_another_version_gives_way_or_is_refused(tmp_path: Path) -> None:
    program(tmp_path / "trtllm-build")
    program(tmp_path / "docker")
    program(tmp_path / "python3", "echo 1.1.0")
    assert isinstance(choose(tmp_path, "auto"), ContainerBuilder)
    with pytest.raises(
        StageError, match=r"the trtllm-build here is 1\.1\.0, but the YAML asks for 1\.2\.1"
    ):
        choose(tmp_path, "local")


def test_an_interpreter_without_tensorrt_llm_says_nothing(tmp_path: Path) -> None:
    program(tmp_path / "trtllm-build")
    program(tmp_path / "python3", "exit 1")
    assert choose(tmp_path, "local") == LocalBuilder(tmp_path / "trtllm-build", None)


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(BackendUnavailable, match="trtllm-build is not available"):
        choose(tmp_path, "local")
    program(tmp_path / "trtllm-build")
    with pytest.raises(BackendUnavailable, match="Neither it nor docker"):
        choose(tmp_path, "container")


def test_the_question_for_flags_has_a_container_of_its_own(tmp_path: Path) -> None:
    """A name is not free at once when its container has ended."""
    builder = ContainerBuilder(
        Path("/usr/bin/docker"), build_image("1.1"), "toolkit-build-target-1", "1000:1000"
    )
    first, second = (
        builder.command(arguments, tmp_path, tmp_path)
        for arguments in (("--help",), ("--workers", "1"))
    )
    assert first[first.index("--name") + 1] != second[second.index("--name") + 1]
    assert builder.stop_command() == ("/usr/bin/docker", "kill", second[second.index("--name") + 1])
    assert second[-4:] == (
        "nvcr.io/nvidia/tensorrt-llm/release:1.1.0",
        "trtllm-build",
        "--workers",
        "1",
    )


def test_the_version_is_asked_of_the_interpreter_that_owns_the_builder() -> None:
    """The question itself, put to an interpreter that has no TensorRT-LLM."""
    from toolkit.engines.trtllm.where import ASK_VERSION

    done = subprocess.run(
        [sys.executable, "-I", "-c", ASK_VERSION],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert "PackageNotFoundError" in done.stderr or done.stdout.strip()
