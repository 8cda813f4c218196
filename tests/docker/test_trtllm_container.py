"""The toolkit's installation in NVIDIA's container, over stand-ins of both layouts: what is run is
the script itself, with pip, and without any index.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from tests.support.trtllm_container import PACKAGES, Container, container
from toolkit.facts.versions import SERVING_IMAGE, VERSIONS

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "docker/trtllm-install.sh"
DOCKERFILE = ROOT / "docker/trtllm.Dockerfile"
LAYOUTS = [pytest.param(False, id="up to 26.02"), pytest.param(True, id="from 26.03")]
SHOWN = "tensorrt_llm", "torch", "transformers", "nvidia_modelopt", "toolkit"
SHOW = f"""
import cutlass_of_nvidia
for name in {SHOWN}:
    module = __import__(name)
    print(name, module.__version__, module.__file__)
"""
# A checkout that pip can build without a build tool: its wheel asks for what ours asks for, as far
# as the stand-ins of the container's packages go.
BACKEND = """
import sys
sys.path.insert(0, {tests!r})
import pathlib, zipfile
from tests.support.trtllm_container import files_of
def build_wheel(folder, settings=None, metadata=None):
    name = "toolkit-1.0-py3-none-any.whl"
    with zipfile.ZipFile(pathlib.Path(folder) / name, "w") as wheel:
        for path, text in files_of("toolkit", "1.0", {requires!r}).items():
            wheel.writestr(path, text)
    return name
"""
PROJECT = """
[build-system]
requires = []
build-backend = "backend"
backend-path = ["."]
"""


def requirements() -> list[str]:
    """Of the toolkit and its extra `trtllm`, those whose packages the containers have."""
    text = (ROOT / "pyproject.toml").read_text()
    base = text.split("\ndependencies = [")[1].split("\n]")[0]
    extra = text.split("\ntrtllm = [")[1].split("]\n")[0]
    names = "|".join(name.replace("_", "[-_]") for name in PACKAGES)
    asked = [re.findall(rf'"((?:{names})[<>=][^"]*)"', part) for part in (base, extra)]
    return [*asked[0], *(f'{requirement}; extra == "trtllm"' for requirement in asked[1])]


def checkout(folder: Path) -> Path:
    (folder / "docker").mkdir(parents=True)
    shutil.copy(SCRIPT, folder / "docker" / SCRIPT.name)
    (folder / "pyproject.toml").write_text(PROJECT)
    backend = BACKEND.format(tests=str(ROOT), requires=requirements())
    (folder / "backend.py").write_text(backend)
    return folder / "docker" / SCRIPT.name


def containers(folder: Path, *, has_environment: bool, **packages: str) -> Container:
    made = container(folder, has_environment=has_environment, packages={**PACKAGES, **packages})
    made.offer("nvidia_modelopt", "0.47.0")
    # What an index would also offer: newer than what TensorRT-LLM is compiled against.
    made.offer("torch", "2.13.0")
    made.offer("transformers", "5.14.1")
    made.offer("huggingface_hub", "2.0.0")
    made.offer("numpy", "2.3.0")
    return made


@pytest.mark.slow
@pytest.mark.parametrize("has_environment", LAYOUTS)
def test_the_script_adds_the_toolkit_and_replaces_nothing_of_the_container(
    tmp_path: Path, has_environment: bool
) -> None:
    here = containers(tmp_path / "root", has_environment=has_environment)
    before = sorted(str(file) for file in here.site.rglob("*"))
    environment = tmp_path / "root/opt/toolkit"
    done = here.run("sh", str(checkout(tmp_path / "checkout")), str(environment))
    assert done.returncode == 0, done.stdout + done.stderr
    shown = here.run(str(environment / "bin/python"), "-c", SHOW)
    assert shown.returncode == 0, shown.stderr
    seen = {
        name: (version, Path(file))
        for name, version, file in map(str.split, shown.stdout.splitlines())
    }
    for name in ("tensorrt_llm", "torch", "transformers"):
        assert seen[name][0] == PACKAGES[name] and here.site in seen[name][1].parents
    assert seen["nvidia_modelopt"][0] == "0.47.0"  # ours, in our environment alone
    assert environment in seen["nvidia_modelopt"][1].parents
    assert environment in seen["toolkit"][1].parents
    kept = (environment / "keep.txt").read_text().splitlines()
    assert f"torch=={PACKAGES['torch']}" in kept and f"numpy=={PACKAGES['numpy']}" in kept
    assert sorted(
        str(file) for file in here.site.rglob("*") if "__pycache__" not in file.parts
    ) == [file for file in before if "__pycache__" not in file]


@pytest.mark.slow
def test_from_26_03_on_an_environment_of_the_container_s_python_does_not_see_its_packages(
    tmp_path: Path,
) -> None:
    """Why the script writes a .pth file: `venv` looks at the Python beneath the environment."""
    here = containers(tmp_path / "root", has_environment=True)
    plain = tmp_path / "plain"
    here.run("python3", "-m", "venv", "--without-pip", "--system-site-packages", str(plain))
    asked = here.run(str(plain / "bin/python"), "-c", "import tensorrt_llm")
    assert "No module named 'tensorrt_llm'" in asked.stderr
    assert here.run("python3", "-c", "import tensorrt_llm").returncode == 0


@pytest.mark.slow
def test_a_container_whose_versions_do_not_fit_is_left_as_it_was(tmp_path: Path) -> None:
    """The wheel of TensorRT-LLM 1.1, of the containers up to 26.02, needs transformers 4.56.0."""
    here = containers(tmp_path / "root", has_environment=False, transformers="4.56.0")
    environment = tmp_path / "root/opt/toolkit"
    done = here.run("sh", str(checkout(tmp_path / "checkout")), str(environment))
    assert done.returncode != 0 and "transformers==4.56.0" in done.stdout + done.stderr
    assert not list(environment.rglob("nvidia_modelopt"))


@pytest.mark.slow
def test_another_image_is_told(tmp_path: Path) -> None:
    here = container(tmp_path / "root", has_environment=False, packages={"torch": "2.8.0"})
    done = here.run("sh", str(checkout(tmp_path / "checkout")), str(tmp_path / "environment"))
    assert done.returncode == 1
    assert f"{here.bin}/python3 has no tensorrt_llm" in done.stderr


def test_the_dockerfile_is_of_the_newest_image_and_copies_what_there_is() -> None:
    text = DOCKERFILE.read_text()
    [tag] = re.findall(r"^ARG TAG=(\S+)$", text, re.MULTILINE)
    assert tag == VERSIONS["1.2.1"].serving_tags[0]
    assert f"FROM {SERVING_IMAGE.format(tag='${TAG}')}\n" in text
    copied = [line.split()[1:] for line in text.splitlines() if line.startswith("COPY ")]
    places = {}
    for *sources, destination in copied:
        for source in sources:
            assert (ROOT / source).exists(), source
            is_folder = destination.endswith("/")
            places[f"{destination}{Path(source).name}" if is_folder else destination] = source
    [script] = re.findall(r"^RUN sh (\S+) /opt/toolkit$", text, re.MULTILINE)
    assert places[script] == "docker/trtllm-install.sh"
    checkout = Path(script).parents[1]  # as the script finds it
    for needed in ("pyproject.toml", "README.md", "toolkit"):
        assert places[str(checkout / needed)] == needed
    assert "ENV PATH=/opt/toolkit/bin:${PATH}\n" in text
    assert text.endswith('CMD ["toolkit", "doctor"]\n')
