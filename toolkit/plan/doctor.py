"""What this machine can and cannot do for the toolkit, each finding with what fixes it. Nothing is
changed.

Every check stands alone and takes what it looks at as it finds it: a broken installation is what a
doctor is called for.
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

from toolkit.errors import ToolkitError
from toolkit.pipeline.machine import cpu_flags, gpus, machine, memory_bytes, usable_cores
from toolkit.rounding import size

__all__ = ["Diagnosis", "diagnose"]

DiagnosisStatus: TypeAlias = Literal["ok", "warn", "missing"]
OK: Final = "ok"
WARN: Final = "warn"
MISSING: Final = "missing"
MIN_MEMORY_BYTES = 4 * 2**30
MIN_DISK_BYTES = 2 * 2**30
MIN_SHM_BYTES = 64 * 2**20
EXTRA = "pip install --editable '.[{}]' in the toolkit's checkout"


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """status: ok, warn (it works, less well) or missing. essential: nothing can be built without
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
) -> list[Diagnosis]:
    """Look at everything. folder: where results would go.

    find_server: the program, and the wheel's folder if it is that one's; raises ToolkitError where
    there is none. find_libpython: the folder with the interpreter's shared library. find_compiler:
    the C++ compiler's path.
    """
    checks: tuple[tuple[str, Callable[[], Iterator[Diagnosis]]], ...] = (
        ("python", _python),
        ("cpu", _cpu),
        ("memory", _memory),
        ("disk", lambda: _disk(folder)),
        ("libraries", _libraries),
        ("numpy", _numpy),
        ("C++ compiler", lambda: _compiler(find_compiler())),
        ("tritonserver", lambda: _server(find_server, find_libpython)),
        ("loopback", _loopback),
        ("/dev/shm", _shared_memory),
        ("GPU", _gpu),
    )
    found: list[Diagnosis] = []
    for name, check in checks:
        try:
            found.extend(check())
        except Exception as error:  # whatever is broken, the other checks are still worth having
            found.append(
                Diagnosis(name, WARN, f"could not be looked at: {error}", "look at it by hand")
            )
    return found


def _python() -> Iterator[Diagnosis]:
    running = platform.python_version()
    fits = (3, 10) <= sys.version_info[:2] <= (3, 12)
    hint = None if fits else "make PYTHON=python3.11 quickstart (3.10 to 3.12)"
    yield Diagnosis(
        "python", OK if fits else MISSING, f"{running} at {sys.executable}", hint, essential=True
    )
    library, libc = platform.libc_ver()
    if library == "glibc":
        new_enough = tuple(int(part) for part in libc.split(".")[:2]) >= (2, 35)
        hint = (
            None
            if new_enough
            else "use a system with glibc 2.35 or newer; the bundled server needs it"
        )
        yield Diagnosis("glibc", OK if new_enough else WARN, libc, hint)


def _cpu() -> Iterator[Diagnosis]:
    facts = machine()
    cores = usable_cores()
    yield Diagnosis(
        "cores",
        OK if cores > 1 else WARN,
        f"{cores} of {os.cpu_count()}, {facts['cpu']}",
        None if cores > 1 else "use 2 or more",
    )
    sets = facts["instruction_sets"]
    if platform.machine() != "x86_64":
        yield Diagnosis(
            "instruction set",
            MISSING,
            platform.machine(),
            "the bundled server and the kernels need x86-64",
        )
    elif "avx2" not in cpu_flags():
        yield Diagnosis(
            "instruction set",
            WARN,
            sets or "no AVX2",
            "compiled engines want AVX2; set engine.mode: eager",
        )
    else:
        fast = {"avx512_vnni", "avx_vnni"} & cpu_flags()
        yield Diagnosis(
            "instruction set", OK, sets + ("" if fast else " (no VNNI: INT8 is slower here)")
        )


def _memory() -> Iterator[Diagnosis]:
    total = memory_bytes()
    hint = (
        None
        if total >= MIN_MEMORY_BYTES
        else "4 GB are enough for the quickstart; a model of N parameters wants about 10 N bytes"
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
    writable = os.access(folder, os.W_OK)
    hint = None if writable else "run from a folder of your own"
    yield Diagnosis(
        "results",
        OK if writable else MISSING,
        f"build/, engines/, triton_repo/ in {folder}",
        hint,
        essential=True,
    )


def _libraries() -> Iterator[Diagnosis]:
    """Installed, and importable where that costs little; torch and ModelOpt are imported, since
    a broken one is common.
    """
    needed = {
        "torch": "torch",
        "transformers": "transformers",
        "nvidia-modelopt": "modelopt.torch.quantization",
        "safetensors": "safetensors",
        "tokenizers": "tokenizers",
        "tritonclient": "tritonclient.grpc",
        "scipy": "scipy.stats",
    }
    for name, module in needed.items():
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
    try:
        yield Diagnosis("tensorrt_llm", OK, version("tensorrt_llm"))
    except PackageNotFoundError:
        yield Diagnosis("tensorrt_llm", OK, "not installed; engine.kind torch does not need it")


def _numpy() -> Iterator[Diagnosis]:
    installed = version("numpy")
    old = int(installed.split(".", 1)[0]) < 2
    hint = (
        None
        if old
        else "pip install 'numpy<2': Triton's Python stub dies with numpy 2 at the first request"
    )
    yield Diagnosis("numpy", OK if old else MISSING, installed, hint, essential=True)


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
            "tritonserver", MISSING, detail, error.hint or EXTRA.format("embedded"), essential=True
        )
        return
    yield Diagnosis(
        "tritonserver",
        OK,
        f"{binary}"
        f" ({'PATH' if wheel is None else 'nvidia-pytriton ' + version('nvidia-pytriton')})",
    )
    if wheel is None:
        return  # complete in itself
    running = f"{sys.version_info.major}.{sys.version_info.minor}"
    stubs = wheel / "python_backend_stubs"
    if (stubs / running / "triton_python_backend_stub").is_file():
        yield Diagnosis("Python stub", OK, f"for Python {running}")
    else:
        brought = ", ".join(sorted(path.name for path in stubs.glob("*")))
        yield Diagnosis(
            "Python stub",
            MISSING,
            f"none for Python {running}",
            f"use one of {brought}",
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
            "no shared library of this interpreter, which the stub needs",
            hint,
            essential=True,
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
        "127.0.0.1 listens and answers; servers take free ports unless the YAML names some",
    )
    taken = [str(port) for port in (8000, 8001, 8002) if _listens(port)]
    if taken:
        hint = (
            "nothing to do while triton.*_port is 0, the default; launch.sh takes other ports as"
            " arguments"
        )
        yield Diagnosis("default ports", WARN, f"in use: {', '.join(taken)}", hint)
    else:
        yield Diagnosis("default ports", OK, "8000, 8001 and 8002 are free")


def _listens(port: int) -> bool:
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
        else "docker run --shm-size=256m, or free /dev/shm: the Python backend talks through it"
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

    usable = torch.cuda.is_available()
    hint = None if usable else "install a CUDA build of torch: https://pytorch.org/get-started"
    yield Diagnosis(
        "GPU",
        OK if usable else WARN,
        ", ".join(names) + ("" if usable else f"; torch {torch.__version__} cannot use it"),
        hint,
    )
