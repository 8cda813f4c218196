"""Where `trtllm-build` runs: in this environment, or in the build container of the version.

An engine runs only under the version that built it, so a local builder of another version is never
taken by itself. In the container it sees two folders, the checkpoint (read-only) and the output, no
network, and runs as the calling user, so that what it writes belongs to that user.
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
    """version None: it could not be found out; the finished engine will say."""

    executable: Path
    version: str | None

    @property
    def name(self) -> str:
        return f"local: {self.executable}"

    def paths(self, checkpoint: Path, out_dir: Path, scratch: Path) -> tuple[str, str, str]:
        """How it sees the checkpoint, the output folder, and a file for the timing cache."""
        return str(checkpoint), str(out_dir), str(scratch / "model.cache")

    def command(
        self, arguments: tuple[str, ...], checkpoint: Path, out_dir: Path
    ) -> tuple[str, ...]:
        return (str(self.executable), *arguments)

    def stop_command(self) -> tuple[str, ...] | None:
        return None


@dataclass(frozen=True, slots=True)
class ContainerBuilder:
    """label: names the container, so that it can be stopped; a killed `docker run` leaves its
    container running.
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
        """Both folders as docker wants them: absolute."""
        label = (
            f"{self.label}-help" if "--help" in arguments else self.label
        )  # the name of a run before may not be free yet
        run = ("run", "--rm", "--init", "--name", label, "--gpus", self.gpus, "--network", "none")
        limits = ("--ipc", "host", "--ulimit", "memlock=-1", "--ulimit", "stack=67108864")
        # Nobody in the container has this number: torch asks for the user's name, and takes it from
        # USER.
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
    """asked: auto | local | container. auto: local where it has the version or does not say, else
    the container.

    Raises UsageError for a version without trtllm-build, BackendUnavailable where neither is there.
    """
    if version not in VERSIONS:
        raise UsageError(
            f"TensorRT-LLM {version} has no engine flow",
            hint=f"engine.kind trtllm_pytorch works there; trtllm-build ends with {VERSIONS[-1]}",
        )
    local = which(COMMAND)
    if local is not None and asked != "container":
        found = LocalBuilder(Path(local), _version_beside(Path(local), environment))
        if found.version is None or same_version(found.version, version):
            return found
        if asked == "local":
            raise StageError(
                "compile",
                f"the trtllm-build here is {found.version}, the YAML asks for {version}",
                where=local,
                hint=(
                    "set engine.tensorrt_llm to what is installed, or engine.builder: container"
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
    """What choose_builder would take here, with nothing run or refused; for a plan, so without
    numbers of this very build.
    """
    if asked == "local" or (asked == "auto" and which(COMMAND) is not None):
        return LocalBuilder(Path(COMMAND), None)
    return ContainerBuilder(
        Path("docker"), build_image(version), f"toolkit-build-{role}-ID", "UID:GID"
    )


def build_image(version: str) -> str:
    """Of the row that the serving tags of the version stand in."""
    return BUILD_IMAGE.format(release=ROWS[version].release)


def same_version(found: str, asked: str) -> bool:
    """Whether 1.0.3 is what 1.0 names; 1.2.0rc8 is 1.2.0's candidate and counts as it, since a
    serving tag carries it.
    """
    return found == asked or found.startswith(
        (f"{asked}.", f"{asked}rc", f"{asked}.post", f"{asked}+")
    )


def _version_beside(executable: Path, environment: Mapping[str, str]) -> str | None:
    """Of the tensorrt_llm that the executable belongs to: asked from the interpreter beside it,
    which may not be ours.
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
