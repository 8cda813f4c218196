"""Choose where `trtllm-build` runs: in this environment or in the version's build container.

An engine runs only under the version that built it, so `auto` never takes a local builder of
another version. In the container, the builder has no network and sees two folders: the checkpoint
(read-only) and the output. It runs as the calling user, who then owns the files.
"""

from __future__ import annotations

import os
import secrets
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from toolkit.errors import BackendUnavailable, StageError, UsageError
from toolkit.facts.trtllm_build import VERSIONS
from toolkit.facts.versions import BUILD_IMAGE
from toolkit.facts.versions import VERSIONS as ROWS
from toolkit.words import Role

__all__ = [
    "Builder",
    "ContainerBuilder",
    "LocalBuilder",
    "build_image",
    "choose_builder",
    "planned_builder",
    "same_version",
]

COMMAND = "trtllm-build"
ASK_VERSION = "from importlib.metadata import version; print(version('tensorrt_llm'))"
ASK_TIMEOUT_S = 60


@dataclass(frozen=True, slots=True)
class LocalBuilder:
    """A builder in this environment. version: None if it is unknown; the engine will state it."""

    executable: Path
    version: str | None

    @property
    def name(self) -> str:
        return f"local: {self.executable}"

    def paths(self, checkpoint: Path, out_dir: Path, scratch: Path) -> tuple[str, str, str]:
        """The paths of the checkpoint, the output folder and the timing cache for the builder."""
        return str(checkpoint), str(out_dir), str(scratch / "model.cache")

    def command(
        self, arguments: tuple[str, ...], checkpoint: Path, out_dir: Path
    ) -> tuple[str, ...]:
        return (str(self.executable), *arguments)

    def stop_command(self) -> tuple[str, ...] | None:
        return None


@dataclass(frozen=True, slots=True)
class ContainerBuilder:
    """A builder in a container. label: the container's name, by which it can be stopped; a killed
    `docker run` leaves its container running.
    """

    docker: Path
    image: str
    label: str
    user: str  # uid:gid
    gpus: str = "all"

    @property
    def name(self) -> str:
        return f"container: {self.image}"

    def paths(self, checkpoint: Path, out_dir: Path, scratch: Path) -> tuple[str, str, str]:
        return "/checkpoint", "/engine", "/tmp/model.cache"

    def command(
        self, arguments: tuple[str, ...], checkpoint: Path, out_dir: Path
    ) -> tuple[str, ...]:
        """The docker command. Both folders have to be absolute."""
        # The name of an earlier run may still be taken, so --help gets another one.
        label = f"{self.label}-help" if "--help" in arguments else self.label
        run = ("run", "--rm", "--init", "--name", label, "--gpus", self.gpus, "--network", "none")
        limits = ("--ipc", "host", "--ulimit", "memlock=-1", "--ulimit", "stack=67108864")
        # The container has no user with this number. torch needs a user name, and reads USER.
        user = (
            "--user",
            self.user,
            "--env",
            "HOME=/tmp",
            "--env",
            "USER=toolkit",
            "--workdir",
            "/tmp",
        )
        mounts = (
            *("--mount", f"type=bind,source={checkpoint},target=/checkpoint,readonly"),
            *("--mount", f"type=bind,source={out_dir},target=/engine"),
        )
        return (str(self.docker), *run, *limits, *user, *mounts, self.image, COMMAND, *arguments)

    def stop_command(self) -> tuple[str, ...] | None:
        return (str(self.docker), "kill", self.label)


Builder = LocalBuilder | ContainerBuilder


def choose_builder(
    asked: str,
    version: str,
    role: Role,
    *,
    which: Callable[[str], str | None],
    environment: Mapping[str, str] = os.environ,
) -> Builder:
    """Choose the builder. asked: auto, local or container.

    auto takes the local builder if its version is right or unknown, else the container. Raises
    UsageError for a version without trtllm-build, StageError if `local` has another version,
    BackendUnavailable if there is no builder.
    """
    if version not in VERSIONS:
        raise UsageError(
            f"TensorRT-LLM {version} has no engine flow",
            hint=(
                f"set engine.kind: trtllm_pytorch; the last version with trtllm-build is"
                f" {VERSIONS[-1]}"
            ),
        )
    local = which(COMMAND)
    if local is not None and asked != "container":
        builder = LocalBuilder(Path(local), _version_beside(Path(local), environment))
        if builder.version is None or same_version(builder.version, version):
            return builder
        if asked == "local":
            raise StageError(
                "compile",
                f"the trtllm-build here is {builder.version}, but the YAML asks for {version}",
                where=local,
                hint=(
                    "set engine.tensorrt_llm to that version, or set engine.builder: container"
                    f" ({build_image(version)})"
                ),
            )
    if asked == "local":
        hint = "Run this inside the build container, or set engine.builder: container."
        raise BackendUnavailable(COMMAND, hint=f"{hint} Its image: {build_image(version)}")
    docker = which("docker")
    if docker is None:
        raise BackendUnavailable(
            f"{COMMAND} {version}",
            hint=(
                f"Neither it nor docker is on the PATH. Run this inside {build_image(version)} on a"
                " machine with the GPU, or install docker and the NVIDIA container toolkit."
                " `toolkit plan` works here."
            ),
        )
    label = f"toolkit-build-{role}-{secrets.token_hex(4)}"
    return ContainerBuilder(
        Path(docker), build_image(version), label, f"{os.getuid()}:{os.getgid()}"
    )


def planned_builder(
    asked: str, version: str, role: Role, *, which: Callable[[str], str | None]
) -> Builder:
    """The builder that choose_builder would take here, for a plan: nothing is run or refused, and
    ids are placeholders.
    """
    if asked == "local" or (asked == "auto" and which(COMMAND) is not None):
        return LocalBuilder(Path(COMMAND), None)
    return ContainerBuilder(
        Path("docker"), build_image(version), f"toolkit-build-{role}-ID", "UID:GID"
    )


def build_image(version: str) -> str:
    """The build image of the version."""
    return BUILD_IMAGE.format(release=ROWS[version].release)


def same_version(found: str, asked: str) -> bool:
    """Whether `found` belongs to the version `asked`: 1.0.3 belongs to 1.0, and 1.3.0rc27 to
    1.3rc-late. The release candidate 1.2.0rc8 counts as 1.2.0, since a serving image contains it.
    """
    if ROWS[asked].candidates:
        return found.partition(".post")[0].partition("+")[0] in ROWS[asked].candidates
    return found == asked or found.startswith(
        (f"{asked}.", f"{asked}rc", f"{asked}.post", f"{asked}+")
    )


def _version_beside(executable: Path, environment: Mapping[str, str]) -> str | None:
    """The version of the executable's tensorrt_llm; None if it cannot be determined.

    The Python interpreter beside the executable is asked, which may not be the one running now.
    """
    for name in ("python3", "python"):
        python = executable.parent / name
        if python.is_file():
            command = [str(python), "-I", "-c", ASK_VERSION]
            try:
                done = subprocess.run(
                    command,
                    capture_output=True,
                    text=True,
                    timeout=ASK_TIMEOUT_S,
                    check=False,
                    env=dict(environment),
                )
            except (OSError, subprocess.SubprocessError):
                continue
            if done.returncode == 0:
                return done.stdout.strip() or None
    return None
