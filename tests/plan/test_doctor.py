"""The doctor continues whatever is broken, and every check that is not ok has a hint."""

from __future__ import annotations

from pathlib import Path

import pytest

from toolkit.errors import BackendUnavailable
from toolkit.plan import doctor
from toolkit.plan.doctor import Diagnosis, diagnose


def no_server() -> tuple[Path, Path | None]:
    raise BackendUnavailable("tritonserver", extra="embedded")


def diagnoses_of(
    folder: Path,
    server: Path | None,
    wheel: Path | None,
    libpython: Path | None,
    compiler: str | None,
) -> dict[str, Diagnosis]:
    """Diagnose by check. The checks of installed libraries are left to the test of the command."""

    def find_server() -> tuple[Path, Path | None]:
        return no_server() if server is None else (server, wheel)

    checks = diagnose(
        folder,
        find_server=find_server,
        find_libpython=lambda: libpython,
        find_compiler=lambda: compiler,
        find_vllm=lambda: "0.32.0",
    )
    assert all(diagnosis.hint for diagnosis in checks if diagnosis.status != "ok")
    assert all(diagnosis.status in ("ok", "warn", "missing") for diagnosis in checks)
    return {diagnosis.check: diagnosis for diagnosis in checks}


@pytest.fixture(autouse=True)
def without_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Importing torch and ModelOpt takes seconds."""
    monkeypatch.setattr(doctor, "_libraries", lambda: iter(()))


def test_a_machine_that_has_everything_is_ok(tmp_path: Path) -> None:
    stub = (
        tmp_path
        / "python_backend_stubs"
        / f"{doctor.sys.version_info.major}.{doctor.sys.version_info.minor}"
    )
    stub.mkdir(parents=True)
    (stub / "triton_python_backend_stub").touch()
    checks = diagnoses_of(
        tmp_path, tmp_path / "bin" / "tritonserver", tmp_path, tmp_path, "/usr/bin/g++"
    )
    for name in (
        "python",
        "tritonserver",
        "Python stub",
        "libpython",
        "C++ compiler",
        "loopback",
        "/dev/shm",
        "numpy",
        "results",
    ):
        assert checks[name].status == "ok", checks[name]


def test_a_file_in_the_place_of_results_is_told(tmp_path: Path) -> None:
    (tmp_path / "build").write_text("")
    found = diagnoses_of(tmp_path, None, None, None, None)["results"]
    assert (found.status, found.essential) == ("missing", True)
    assert found.detail == f"{tmp_path / 'build'} is a file"
    (tmp_path / "build").unlink()
    (tmp_path / "build").symlink_to("nowhere")
    found = diagnoses_of(tmp_path, None, None, None, None)["results"]
    assert found.detail == f"{tmp_path / 'build'} is a link to no folder"
    (tmp_path / "build").unlink()
    (tmp_path / "build").mkdir()
    (tmp_path / "build" / "reports").write_text("")
    found = diagnoses_of(tmp_path, None, None, None, None)["results"]
    assert found.detail == f"{tmp_path / 'build' / 'reports'} is a file"


def test_what_is_missing_is_said_with_its_hint(tmp_path: Path) -> None:
    checks = diagnoses_of(tmp_path, None, None, None, None)
    assert checks["tritonserver"].status == "missing"
    assert checks["tritonserver"].essential
    assert (
        checks["tritonserver"].hint
        == "pip install --editable '.[embedded]' in the toolkit's checkout"
    )
    assert checks["C++ compiler"].status == "warn"
    assert not checks["C++ compiler"].essential


def test_a_wheel_without_our_stub_or_libpython_is_told(tmp_path: Path) -> None:
    (tmp_path / "python_backend_stubs" / "3.99").mkdir(parents=True)
    checks = diagnoses_of(tmp_path, tmp_path / "tritonserver", tmp_path, None, "g++")
    assert checks["Python stub"].hint == "use one of these Python versions: 3.99"
    assert checks["libpython"].essential


def test_a_server_on_path_needs_no_stub(tmp_path: Path) -> None:
    checks = diagnoses_of(tmp_path, tmp_path / "tritonserver", None, None, "g++")
    assert "Python stub" not in checks


@pytest.mark.parametrize(
    ("version", "status"), [("2.40.0", "warn"), ("2.51.0", "ok"), ("2.60.0", "ok"), (None, "ok")]
)
def test_a_server_on_path_that_is_older_than_the_wheels_is_told(
    tmp_path: Path, version: str | None, status: str
) -> None:
    """Since it is taken all the same. It may be a link to where it is installed."""
    server = tmp_path / "triton" / "bin" / "tritonserver"
    server.parent.mkdir(parents=True)
    server.touch()
    if version is not None:
        (tmp_path / "triton" / "TRITON_VERSION").write_text(f"{version}\n")
    (tmp_path / "tritonserver").symlink_to(server)
    for binary in (server, tmp_path / "tritonserver"):
        diagnosis = diagnoses_of(tmp_path, binary, None, None, "g++")["tritonserver"]
        assert diagnosis.status == status
        told = f"{binary} (PATH) is 2.40.0, older than the 2.51.0 of the nvidia-pytriton wheel"
        assert (told in diagnosis.detail) is (status == "warn")


@pytest.mark.parametrize(
    ("version", "status", "words"),
    [
        (
            "2.51.0",
            "warn",
            "2.51.0 has the holes of NVIDIA's security bulletin 5687 (CVE-2025-23310",
        ),
        ("2.59.1", "warn", "CVE-2025-23334"),
        ("2.60.0", "ok", "2.60.0, without the holes"),
        ("3.0.0", "ok", "3.0.0, without the holes"),
        (None, "warn", "its version is not known"),
    ],
)
def test_the_version_of_triton_is_told_with_its_published_holes(
    tmp_path: Path, version: str | None, status: str, words: str
) -> None:
    if version is not None:
        (tmp_path / "TRITON_VERSION").write_text(f"{version}\n")
    checks = diagnoses_of(tmp_path, tmp_path / "bin" / "tritonserver", None, None, "g++")
    assert checks["Triton"].status == status
    assert words in checks["Triton"].detail


def test_the_wheels_own_version_is_known(tmp_path: Path) -> None:
    checks = diagnoses_of(tmp_path, tmp_path / "bin" / "tritonserver", tmp_path, tmp_path, "g++")
    assert checks["Triton"].detail.startswith("2.51.0 has the holes")


def test_a_server_on_path_without_its_python_backend_is_told(tmp_path: Path) -> None:
    server, folder = tmp_path / "bin" / "tritonserver", tmp_path / "backends" / "python"
    checks = diagnoses_of(tmp_path, server, None, None, "g++")
    assert checks["Python backend"].status == "warn"
    folder.mkdir(parents=True)
    for name in ("libtriton_python.so", "triton_python_backend_stub"):
        (folder / name).touch()
    assert diagnoses_of(tmp_path, server, None, None, "g++")["Python backend"].status == "ok"


def test_a_check_that_breaks_does_not_stop_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> None:
        raise RuntimeError("no /proc here")

    monkeypatch.setattr(doctor, "_cpu", broken)
    checks = {
        diagnosis.check: diagnosis
        for diagnosis in diagnose(
            tmp_path,
            find_server=no_server,
            find_libpython=lambda: None,
            find_compiler=lambda: None,
            find_vllm=lambda: "0.32.0",
        )
    }
    assert checks["cpu"].status == "warn"
    assert "no /proc here" in checks["cpu"].detail
    assert checks["loopback"].status == "ok"


def vllm_of(folder: Path, error: BackendUnavailable) -> Diagnosis:
    def find_vllm() -> str:
        raise error

    checks = diagnose(
        folder,
        find_server=no_server,
        find_libpython=lambda: None,
        find_compiler=lambda: None,
        find_vllm=find_vllm,
    )
    return next(diagnosis for diagnosis in checks if diagnosis.check == "vllm")


def test_vllm_may_be_absent_and_may_not_be_broken(tmp_path: Path) -> None:
    absent = vllm_of(tmp_path, BackendUnavailable("vLLM", hint="make vllm"))
    assert (absent.status, absent.hint, absent.essential) == ("ok", "make vllm", False)
    assert absent.detail.startswith("not installed")
    broken = vllm_of(tmp_path, BackendUnavailable("vLLM", fault="no torch", hint="make vllm"))
    assert (broken.status, broken.hint, broken.essential) == ("warn", "make vllm", False)
    assert broken.detail == "no torch"


@pytest.mark.parametrize("has_it", [True, False])
def test_a_container_whose_packages_are_not_seen_is_recognised(
    tmp_path: Path, has_it: bool
) -> None:
    if has_it:
        (tmp_path / "lib/python3.12/site-packages/tensorrt_llm").mkdir(parents=True)
    checks = diagnose(
        tmp_path,
        find_server=no_server,
        find_libpython=lambda: None,
        find_compiler=lambda: None,
        find_vllm=lambda: "0.32.0",
        container_environment=tmp_path,
    )
    [diagnosis] = [diagnosis for diagnosis in checks if diagnosis.check == "tensorrt_llm"]
    assert diagnosis.status == ("warn" if has_it else "ok")
    assert ("does not see it" in diagnosis.detail) is has_it
    assert ("trtllm-install.sh" in (diagnosis.hint or "")) is has_it


@pytest.mark.parametrize(
    ("lacking", "said"),
    [
        ((), "avx2 avx512f"),
        (("amx_bf16",), "no AMX: sixteen"),
        (("avx512_bf16",), "no BF16 products"),
        (("avx512vbmi",), "no BF16 products"),
        (("avx512_vnni", "avx512_bf16"), "no VNNI"),
        (("avx512f", "avx512_vnni", "avx512_bf16", "avx512vbmi"), "no AVX-512: compiled engines"),
    ],
)
def test_what_a_processor_lacks_is_said_with_its_cost(lacking: tuple[str, ...], said: str) -> None:
    every = {"avx2", "avx512f", "avx512_vnni", "avx512_bf16", "avx512vbmi", "amx_int8", "amx_bf16"}
    diagnosis = doctor._instruction_set("x86_64", frozenset(every - {*lacking}), "avx2 avx512f")
    assert diagnosis.status == "ok"
    assert said in diagnosis.detail
    assert ("(" in diagnosis.detail) is bool(lacking)


def test_a_processor_that_runs_no_kernels_is_told_what_to_do() -> None:
    old = doctor._instruction_set("x86_64", frozenset({"avx"}), "")
    assert (old.status, old.detail) == ("warn", "no AVX2")
    assert old.hint and "engine.mode: eager" in old.hint
    assert doctor._instruction_set("aarch64", frozenset(), "").status == "missing"
