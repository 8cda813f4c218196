"""Check what this machine can and cannot do for the toolkit, and say how to fix what is missing.

The checks change nothing. They are independent of one another and assume nothing about the
installation, since a broken installation is the reason to call a doctor.
"""

from __future__ import annotations

import importlib
import os
import platform
import shutil
import socket
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final, Literal, TypeAlias

from toolkit.errors import BackendUnavailable, ToolkitError
from toolkit.facts.triton_server import BULLETIN, CVES, MENDED, WHEEL_VERSIONS, triton_version
from toolkit.pipeline.machine import cpu_flags, gpus, machine, memory_bytes, obstacle, usable_cores
from toolkit.rounding import size

__all__ = ["Diagnosis", "diagnose"]

DiagnosisStatus: TypeAlias = Literal["ok", "warn", "missing"]
OK: Final = "ok"
WARN: Final = "warn"
MISSING: Final = "missing"
MIN_MEMORY_BYTES = 4 * 2**30
MIN_DISK_BYTES = 2 * 2**30
MIN_SHM_BYTES = 64 * 2**20
# Of nvcr.io/nvidia/tritonserver:NN.NN-trtllm-python-py3 from 26.03 on (triton-inference-server/
# tensorrtllm_backend, dockerfile/Dockerfile.triton.trt_llm_backend: its PATH).
CONTAINER_ENVIRONMENT = Path("/opt/venv-tritonserver")
WITHOUT_AVX512 = (
    "compiled engines use AVX2; a token takes up to 1.2 times as long, and verifying five takes 1.5"
    " to 4.2 times as long as decoding one"
)
INSTALL_EXTRA = "pip install --editable '.[{}]' in the toolkit's checkout"


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The result of one check.

    status: ok, warn (it works, but less well) or missing. essential: nothing can be built without
    it.
    """

    check: str
    status: DiagnosisStatus
    detail: str
    hint: str | None = None
    essential: bool = False


def diagnose(
    folder: Path,
    *,
    find_server: Callable[[], tuple[Path, Path | None]],
    find_libpython: Callable[[], Path | None],
    find_compiler: Callable[[], str | None],
    find_vllm: Callable[[], str],
    container_environment: Path = CONTAINER_ENVIRONMENT,
) -> list[Diagnosis]:
    """Run all checks. folder: where the results of a build would go.

    find_server returns the tritonserver program, and the folder of the nvidia-pytriton wheel if the
    program comes from that wheel; it raises ToolkitError if there is no server. find_libpython
    returns the folder that holds the interpreter's shared library. find_compiler returns the path
    of the C++ compiler. find_vllm says which vLLM there is; it raises BackendUnavailable.
    container_environment: the Python environment of NVIDIA's container, if this is one.
    """
    checks: tuple[tuple[str, Callable[[], Iterator[Diagnosis]]], ...] = (
        ("python", _python),
        ("cpu", _cpu),
        ("memory", _memory),
        ("disk", lambda: _disk(folder)),
        ("libraries", _libraries),
        ("tensorrt_llm", lambda: _tensorrt_llm(container_environment)),
        ("vllm", lambda: _vllm(find_vllm)),
        ("numpy", _numpy),
        ("C++ compiler", lambda: _compiler(find_compiler())),
        ("tritonserver", lambda: _server(find_server, find_libpython)),
        ("loopback", _loopback),
        ("/dev/shm", _shared_memory),
        ("GPU", _gpu),
    )
    diagnoses: list[Diagnosis] = []
    for name, check in checks:
        try:
            diagnoses.extend(check())
        except Exception as error:  # the other checks are still useful
            diagnoses.append(
                Diagnosis(name, WARN, f"the check failed: {error}", "check it by hand")
            )
    return diagnoses


def _python() -> Iterator[Diagnosis]:
    running = platform.python_version()
    is_supported = (3, 10) <= sys.version_info[:2] <= (3, 12)
    hint = None if is_supported else "make PYTHON=python3.11 quickstart (3.10 to 3.12)"
    detail = f"{running} at {sys.executable}"
    yield Diagnosis("python", OK if is_supported else MISSING, detail, hint, essential=True)
    library, libc = platform.libc_ver()
    if library == "glibc":
        is_new_enough = tuple(int(part) for part in libc.split(".")[:2]) >= (2, 35)
        hint = "use a system with glibc 2.35 or newer; the bundled server needs it"
        if is_new_enough:
            yield Diagnosis("glibc", OK, libc)
        else:
            yield Diagnosis("glibc", WARN, libc, hint)


def _cpu() -> Iterator[Diagnosis]:
    facts = machine()
    cores = usable_cores()
    detail = f"{cores} of {os.cpu_count()}, {facts['cpu']}"
    if cores > 1:
        yield Diagnosis("cores", OK, detail)
    else:
        yield Diagnosis("cores", WARN, detail, "use 2 or more")
    yield _instruction_set(platform.machine(), cpu_flags(), facts["instruction_sets"])


def _instruction_set(architecture: str, flags: frozenset[str], shown: str) -> Diagnosis:
    """What the kernels find in this processor, and what it costs that something is missing. flags:
    as /proc/cpuinfo names them. The figures are those of docs/engines.md.
    """
    if architecture != "x86_64":
        hint = "the bundled server and the kernels need x86-64"
        return Diagnosis("instruction set", MISSING, architecture, hint)
    if "avx2" not in flags:
        hint = "compiled engines need AVX2; set engine.mode: eager"
        return Diagnosis("instruction set", WARN, shown or "no AVX2", hint)
    lacking = ""
    if "avx512f" not in flags:
        lacking = f"no AVX-512: {WITHOUT_AVX512}"
    elif "avx512_vnni" not in flags:
        lacking = "no VNNI: INT8 products take more instructions"
    elif not {"avx512_bf16", "avx512vbmi"} <= flags:
        lacking = "no BF16 products: BF16 and FP8 are multiplied as float32"
    elif not {"amx_int8", "amx_bf16"} <= flags:
        lacking = "no AMX: sixteen tokens take 1.3 to 2.7 times as long"
    return Diagnosis("instruction set", OK, f"{shown} ({lacking})" if lacking else shown)


def _memory() -> Iterator[Diagnosis]:
    total = memory_bytes()
    hint = (
        None
        if total >= MIN_MEMORY_BYTES
        else "4 GB are enough for the quickstart; a model of N parameters needs about 10 N bytes"
    )
    yield Diagnosis("memory", OK if hint is None else WARN, size(total), hint)


def _disk(folder: Path) -> Iterator[Diagnosis]:
    free = shutil.disk_usage(folder).free
    hint = (
        None
        if free >= MIN_DISK_BYTES
        else "free some space: builds keep quantized weights and engines"
    )
    yield Diagnosis("disk", OK if hint is None else WARN, f"{size(free)} free in {folder}", hint)
    names = ("build/store", "build/reports", "engines", "triton_repo")
    found = next(filter(None, (obstacle(folder / name) for name in names)), None)
    yield Diagnosis(
        "results",
        OK if found is None else MISSING,
        found or f"build/, engines/, triton_repo/ in {folder}",
        None if found is None else "mend that, or run the toolkit in another folder",
        essential=True,
    )


def _libraries() -> Iterator[Diagnosis]:
    """Check that every library is installed and can be imported: a broken torch or ModelOpt is
    common.
    """
    module_of_package = {
        "torch": "torch",
        "transformers": "transformers",
        "nvidia-modelopt": "modelopt.torch.quantization",
        "safetensors": "safetensors",
        "tokenizers": "tokenizers",
        "tritonclient": "tritonclient.grpc",
        "scipy": "scipy.stats",
    }
    for name, module in module_of_package.items():
        try:
            installed = version(name)
        except PackageNotFoundError:
            yield Diagnosis(
                name,
                MISSING,
                "not installed",
                "pip install --editable . in the toolkit's checkout",
                essential=True,
            )
            continue
        try:
            importlib.import_module(module)
        except Exception as error:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            yield Diagnosis(
                name,
                MISSING,
                f"{installed}, cannot be imported: {reason}",
                f"pip install --force-reinstall {name}",
                True,
            )
        else:
            yield Diagnosis(name, OK, installed)


def _tensorrt_llm(container_environment: Path) -> Iterator[Diagnosis]:
    """Look for TensorRT-LLM, which is not imported. In NVIDIA's containers from 26.03 on it may be
    there and not be seen by the Python that runs the toolkit.
    """
    try:
        yield Diagnosis("tensorrt_llm", OK, version("tensorrt_llm"))
        return
    except PackageNotFoundError:
        pass
    if any(container_environment.glob("lib/python3*/site-packages/tensorrt_llm")):
        yield Diagnosis(
            "tensorrt_llm",
            WARN,
            f"{container_environment} has it, and {sys.executable} does not see it",
            "install the toolkit with `sh docker/trtllm-install.sh` of its checkout",
        )
    else:
        yield Diagnosis("tensorrt_llm", OK, "not installed; engine.kind torch does not need it")


def _vllm(find_vllm: Callable[[], str]) -> Iterator[Diagnosis]:
    """vLLM has an environment of its own, which only one kind of engine needs."""
    try:
        yield Diagnosis("vllm", OK, find_vllm())
    except BackendUnavailable as error:
        if error.fault is None:
            detail = "not installed; only engine.kind vllm needs it"
            yield Diagnosis("vllm", OK, detail, error.hint)
        else:
            yield Diagnosis("vllm", WARN, error.fault, error.hint)


def _numpy() -> Iterator[Diagnosis]:
    installed = version("numpy")
    if int(installed.split(".", 1)[0]) < 2:
        yield Diagnosis("numpy", OK, installed, essential=True)
        return
    hint = "pip install 'numpy<2': with numpy 2, Triton's Python stub dies at the first request"
    yield Diagnosis("numpy", MISSING, installed, hint, essential=True)


def _compiler(path: str | None) -> Iterator[Diagnosis]:
    if path is None:
        detail = (
            f"{os.environ.get('CXX') or 'g++'} not found: engines run eagerly, which is several"
            " times slower"
        )
        yield Diagnosis("C++ compiler", WARN, detail, "apt install g++")
    else:
        yield Diagnosis("C++ compiler", OK, path)


def _server(
    find_server: Callable[[], tuple[Path, Path | None]], find_libpython: Callable[[], Path | None]
) -> Iterator[Diagnosis]:
    try:
        binary, wheel = find_server()
    except ToolkitError as error:
        detail = "neither on PATH nor in the nvidia-pytriton wheel"
        yield Diagnosis(
            "tritonserver",
            MISSING,
            detail,
            error.hint or INSTALL_EXTRA.format("embedded"),
            essential=True,
        )
        return
    yield _choice(binary, wheel)
    yield _holes(binary, wheel)
    if wheel is None:
        yield _python_backend(binary)  # a server on the PATH brings its own Python stub
        return
    running = f"{sys.version_info.major}.{sys.version_info.minor}"
    stubs = wheel / "python_backend_stubs"
    if (stubs / running / "triton_python_backend_stub").is_file():
        yield Diagnosis("Python stub", OK, f"for Python {running}")
    else:
        supported = ", ".join(sorted(path.name for path in stubs.glob("*")))
        yield Diagnosis(
            "Python stub",
            MISSING,
            f"none for Python {running}",
            f"use one of these Python versions: {supported}",
            essential=True,
        )
    folder = find_libpython()
    if folder is not None:
        yield Diagnosis("libpython", OK, f"in {folder}")
    else:
        hint = f"apt install libpython{running}, or use a Python built with --enable-shared"
        yield Diagnosis(
            "libpython",
            MISSING,
            "this interpreter has no shared library, and the Python stub needs it",
            hint,
            essential=True,
        )


def _choice(binary: Path, wheel: Path | None) -> Diagnosis:
    """Which server was taken. One on PATH always is, so an old one is told."""
    if wheel is not None:
        origin = f"nvidia-pytriton {version('nvidia-pytriton')}"
        return Diagnosis("tritonserver", OK, f"{binary} ({origin})")
    try:
        wheels = WHEEL_VERSIONS.get(version("nvidia-pytriton"), "")
    except PackageNotFoundError:
        wheels = ""
    stated = _stated_version(binary)
    on_path, in_wheel = triton_version(stated), triton_version(wheels)
    if on_path is None or in_wheel is None or on_path >= in_wheel:
        return Diagnosis("tritonserver", OK, f"{binary} (PATH)")
    return Diagnosis(
        "tritonserver",
        WARN,
        f"{binary} (PATH) is {stated}, older than the {wheels} of the nvidia-pytriton wheel; the"
        " one on PATH is always taken",
        "take it off PATH for the wheel's",
    )


def _stated_version(binary: Path) -> str:
    """The version in the file that NVIDIA's containers have beside the server's folders."""
    file = binary.resolve().parent.parent / "TRITON_VERSION"
    return file.read_text(encoding="utf-8").strip() if file.is_file() else ""


def _holes(binary: Path, wheel: Path | None) -> Diagnosis:
    """Whether this version of Triton has the published holes."""
    text = _stated_version(binary)
    if wheel is not None:
        text = text or WHEEL_VERSIONS.get(version("nvidia-pytriton"), "")
    triton = triton_version(text)
    mended = ".".join(map(str, MENDED))
    hint = (
        f"put a tritonserver from {mended} (container 25.08) on PATH, which is always taken; until"
        " then let only programs that you trust reach it"
    )
    if triton is None:
        return Diagnosis("Triton", WARN, f"its version is not known; {BULLETIN}", hint)
    if triton >= MENDED:
        return Diagnosis("Triton", OK, f"{text}, without the holes of {BULLETIN}")
    holes = f"{text} has the holes of {BULLETIN} ({', '.join(CVES)})"
    return Diagnosis("Triton", WARN, holes, hint)


def _python_backend(binary: Path) -> Diagnosis:
    """Whether a server on the PATH has what our models run in."""
    folder = binary.resolve().parent.parent / "backends" / "python"
    names = ("libtriton_python.so", "triton_python_backend_stub")
    missing = [name for name in names if not (folder / name).is_file()]
    if not missing:
        return Diagnosis("Python backend", OK, f"in {folder}; it runs the Python it was built for")
    return Diagnosis(
        "Python backend",
        WARN,
        f"{folder} has no {' and no '.join(missing)}",
        "use a tritonserver with its Python backend, or take this one off PATH for the wheel's",
    )


def _loopback() -> Iterator[Diagnosis]:
    try:
        with socket.socket() as listener, socket.socket() as caller:
            listener.bind(("127.0.0.1", 0))
            listener.listen(1)
            caller.settimeout(2)
            caller.connect(listener.getsockname())
    except OSError as error:
        yield Diagnosis(
            "loopback", MISSING, f"127.0.0.1: {error.strerror}", "ip link set lo up", essential=True
        )
        return
    yield Diagnosis(
        "loopback",
        OK,
        "127.0.0.1 accepts connections; servers take free ports unless the YAML names ports",
    )
    used_ports = [str(port) for port in (8000, 8001, 8002) if _is_in_use(port)]
    if used_ports:
        hint = (
            "nothing to do while triton.*_port is 0, the default; launch.sh takes other ports as"
            " arguments"
        )
        yield Diagnosis("default ports", WARN, f"in use: {', '.join(used_ports)}", hint)
    else:
        yield Diagnosis("default ports", OK, "8000, 8001 and 8002 are free")


def _is_in_use(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return True
        return False


def _shared_memory() -> Iterator[Diagnosis]:
    free = shutil.disk_usage("/dev/shm").free
    hint = (
        None
        if free >= MIN_SHM_BYTES
        else "docker run --shm-size=256m, or free /dev/shm: Triton's Python backend uses it"
    )
    yield Diagnosis(
        "/dev/shm", OK if hint is None else MISSING, f"{size(free)} free", hint, essential=True
    )


def _gpu() -> Iterator[Diagnosis]:
    names = gpus()
    if not names:
        yield Diagnosis("GPU", OK, "none; the embedded engine runs on the CPU")
        return
    import torch

    detail = ", ".join(names)
    if torch.cuda.is_available():
        yield Diagnosis("GPU", OK, detail)
        return
    detail += f"; torch {torch.__version__} cannot use it"
    hint = "install a CUDA build of torch: https://pytorch.org/get-started"
    yield Diagnosis("GPU", WARN, detail, hint)
