"""A stand-in for the file systems of NVIDIA's containers, as far as Python's packages go.

    ROOT/usr            a Python of its own: the standard library of this one, no packages but pip
    ROOT/opt/venv-tritonserver   from 26.03 on: an environment of it, with TensorRT-LLM

Sources of the layouts: dockerfile/Dockerfile.triton.trt_llm_backend of triton-inference-server/
tensorrtllm_backend (`pip3 install` into the system's Python; from 26.03 on a PATH that begins with
/opt/venv-tritonserver/bin); projects that run the later images name the same folder.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

SITE = 'import sysconfig; print(sysconfig.get_path("purelib"))'
# What the containers of both layouts have, in versions that their torch and wheel pin.
PACKAGES = {
    "tensorrt_llm": "1.2.1",
    "torch": "2.10.0a0+b558c98.nv26.1",
    "transformers": "4.57.3",
    "huggingface_hub": "0.36.0",
    "numpy": "1.26.4",
    "nvidia_modelopt": "0.37.0",
}


@dataclass(frozen=True)
class Container:
    """root: its file system. bin: the first folder of its PATH, with python3. site: the folder of
    its packages.
    """

    root: Path
    bin: Path
    site: Path

    @property
    def environment(self) -> dict[str, str]:
        """What its processes see, and no package index."""
        return {
            "PATH": os.pathsep.join([str(self.bin), "/usr/bin", "/bin"]),
            "HOME": str(self.root),
            "PIP_NO_INDEX": "1",
            "PIP_FIND_LINKS": str(self.root / "wheels"),
            "PIP_CONSTRAINT": "/etc/pip/constraint.txt",
            "PIP_DISABLE_PIP_VERSION_CHECK": "1",
            "PIP_ROOT_USER_ACTION": "ignore",
        }

    def run(self, *command: str, **more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command,
            capture_output=True,
            text=True,
            check=False,
            cwd=self.root,
            env={**self.environment, **more},
        )

    def offer(self, name: str, version: str, requires: Iterable[str] = ()) -> None:
        """A wheel that pip finds."""
        folder = self.root / "wheels"
        folder.mkdir(exist_ok=True)
        with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
            for path, text in files_of(name, version, requires).items():
                wheel.writestr(path, text)


def container(root: Path, *, has_environment: bool, packages: dict[str, str]) -> Container:
    """has_environment: the layout from 26.03 on."""
    python = _python(root / "usr")
    if has_environment:
        folder = root / "opt" / "venv-tritonserver"
        subprocess.run([python, "-m", "venv", "--without-pip", folder], check=True)
        python = folder / "bin" / "python3"
    site = _site(python)
    _link_pip(site)
    made = Container(root, python.parent, site)
    for name, version in packages.items():
        for path, text in files_of(name, version).items():
            (site / path).parent.mkdir(parents=True, exist_ok=True)
            (site / path).write_text(text)
    # One of its packages is found by a .pth file of its own, as nvidia_cutlass_dsl is.
    (site / "cutlass" / "python_packages" / "cutlass_of_nvidia").mkdir(parents=True)
    (site / "cutlass" / "python_packages" / "cutlass_of_nvidia" / "__init__.py").touch()
    (site / "cutlass.pth").write_text("cutlass/python_packages\n")
    return made


def _python(prefix: Path) -> Path:
    """A Python whose only packages are those in `prefix`."""
    library = Path(sysconfig.get_path("stdlib"))
    copy = prefix / "lib" / library.name
    copy.mkdir(parents=True)
    for entry in library.iterdir():
        if entry.name not in ("site-packages", "dist-packages"):
            (copy / entry.name).symlink_to(entry)
    (prefix / "bin").mkdir()
    python = prefix / "bin" / "python3"
    shutil.copy(Path(sys._base_executable).resolve(), python)  # type: ignore[attr-defined]
    return python


def _site(python: Path) -> Path:
    done = subprocess.run([python, "-c", SITE], capture_output=True, text=True, check=True)
    return Path(done.stdout.strip())


def _link_pip(site: Path) -> None:
    site.mkdir(parents=True, exist_ok=True)
    # Not asked of importlib: setuptools watches for pip there, and warns of an imported distutils.
    packages = [Path(folder) / "pip" for folder in sys.path]
    pip = next((folder for folder in packages if (folder / "__init__.py").is_file()), None)
    assert pip is not None, "the tests need pip in their environment"
    (site / "pip").symlink_to(pip)


def files_of(name: str, version: str, requires: Iterable[str] = ()) -> dict[str, str]:
    """The files of a package that holds its version, by their paths in a site folder."""
    metadata = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
    metadata += [f"Requires-Dist: {requirement}" for requirement in requires]
    info = f"{name}-{version}.dist-info"
    return {
        f"{name}/__init__.py": f"__version__ = {version!r}\n",
        f"{info}/METADATA": "\n".join(metadata) + "\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/RECORD": f"{name}/__init__.py,,\n{info}/METADATA,,\n{info}/WHEEL,,\n",
    }
