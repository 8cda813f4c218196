"""A real tritonserver process with models of a few lines: it is found, started, watched and
stopped, and leaves nothing behind.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tritonclient import grpc as grpcclient
from tritonclient import http as httpclient
from tritonclient.utils import InferenceServerException

from toolkit.config.schema import TritonConfig
from toolkit.errors import BackendUnavailable, ServerError
from toolkit.process.workspace import Workspace, sweep
from toolkit.triton.process import server as server_module
from toolkit.triton.process.server import (
    TritonServer,
    find_server,
    launch_command,
)

CONFIG = """
name: "tiny"
backend: "python"
input { name: "x" data_type: TYPE_INT32 dims: 1 }
output { name: "y" data_type: TYPE_INT32 dims: 1 }
instance_group { kind: KIND_CPU }
"""
GOOD_MODEL = """
class TritonPythonModel:
    def execute(self, requests):
        return []
"""
SILENT_MODEL = """
class TritonPythonModel:
    def execute(self, requests):
        self.taken = [request.get_response_sender() for request in requests]
"""
BROKEN_MODEL = "raise RuntimeError('this model is broken on purpose')\n"
HANGING_MODEL = """
import time
class TritonPythonModel:
    def initialize(self, args):
        time.sleep(3600)
    def execute(self, requests):
        return []
"""


@pytest.fixture
def repository(tmp_path: Path) -> Callable[[str], Path]:
    def make(source: str) -> Path:
        version = tmp_path / "repository" / "tiny" / "1"
        version.mkdir(parents=True)
        (version / "model.py").write_text(source)
        (version.parent / "config.pbtxt").write_text(CONFIG)
        return tmp_path / "repository"

    return make


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # the second: it ends while it is read
        return False


def has_ended(server: TritonServer) -> bool:
    supervisor = server._server.process
    return supervisor is not None and supervisor.poll() is not None


def eventually(condition: Callable[[], bool], timeout_s: float = 20.0) -> bool:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.05)
    return False


def children(pid: int) -> list[int]:
    listed = subprocess.run(
        ["ps", "-eo", "pid=,ppid="], check=True, capture_output=True, text=True
    ).stdout.split("\n")
    return [int(line.split()[0]) for line in listed if line.strip() and int(line.split()[1]) == pid]


@pytest.fixture
def own_tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A temporary directory for this test alone, so that all workspaces in it are its own."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def regions(folder_names: list[str]) -> list[Path]:
    return [region for name in folder_names for region in Path("/dev/shm").glob(f"{name}*")]


def test_it_serves_on_loopback_only_and_leaves_nothing(
    repository: Callable[[str], Path], own_tmp: Path
) -> None:
    waits: list[str] = []
    with TritonServer(
        repository(GOOD_MODEL), progress=lambda done, total, what: waits.append(what)
    ) as server:
        names = [path.name for path in own_tmp.glob("toolkit-serve-*")]
        pid, stubs = server.pid, children(server.pid)
        assert is_alive(pid)
        assert stubs
        assert regions(names)
        ports = {
            int(url.rsplit(":", 1)[1].split("/")[0])
            for url in (server.http_url, server.grpc_url, server.metrics_url)
        }
        assert len(ports) == 3
        assert listening_addresses(ports) == {"127.0.0.1"}
    assert waits
    assert not any(is_alive(process) for process in [pid, *stubs])
    assert not list(own_tmp.iterdir())
    assert not regions(names)


def listening_addresses(ports: set[int]) -> set[str]:
    """The addresses that sockets listen on at these ports. A v4 address inside a v6 one, as gRPC's
    sockets have it, counts as the v4 address.
    """
    addresses = set()
    for file in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(file).read_text().splitlines()[1:]:
            local, state = line.split()[1], line.split()[3]
            digits, port = local.split(":")
            if state != "0A" or int(port, 16) not in ports:
                continue
            packed = b"".join(
                bytes.fromhex(digits[i : i + 8])[::-1] for i in range(0, len(digits), 8)
            )
            address = ipaddress.ip_address(packed)
            mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
            addresses.add(str(mapped or address))
    return addresses


def test_a_server_that_dies_at_start_is_reported_with_the_end_of_its_log(
    repository: Callable[[str], Path], own_tmp: Path
) -> None:
    with pytest.raises(ServerError) as failed, TritonServer(repository(BROKEN_MODEL)):
        pass
    assert "tritonserver ended with exit code 1" in str(failed.value)
    assert "this model is broken on purpose" in failed.value.log_tail
    assert not list(own_tmp.iterdir())


DYING_SERVER = """#!/bin/sh
echo start >> {starts}
if [ $(wc -l < {starts}) -gt {deaths} ]; then exec {program} "$@"; fi
echo "terminate called after throwing an instance of '{exception}'" >&2
exit 134
"""


@pytest.mark.parametrize(
    ("exception", "deaths", "starts"),
    [
        ("boost::interprocess::lock_exception", 1, 2),
        ("boost::interprocess::lock_exception", 2, 2),
        ("std::bad_alloc", 1, 1),
    ],
)
def test_a_server_that_dies_of_a_lock_exception_is_started_once_more(
    repository: Callable[[str], Path],
    own_tmp: Path,
    tmp_path: Path,
    exception: str,
    deaths: int,
    starts: int,
) -> None:
    """A program in its place dies as it did, so many times, before it runs the real one."""
    said: list[str] = []
    counted, wrapper = tmp_path / "starts", tmp_path / "dying-server"

    def launch(
        folder: Path, workspace: Workspace, config: TritonConfig
    ) -> tuple[list[str], dict[str, str]]:
        command, environment = launch_command(folder, workspace, config)
        program = DYING_SERVER.format(
            starts=counted, deaths=deaths, program=command[0], exception=exception
        )
        wrapper.write_text(program)
        wrapper.chmod(0o755)
        return [str(wrapper), *command[1:]], environment

    server = TritonServer(
        repository(GOOD_MODEL),
        log_path=tmp_path / "server.log",
        progress=lambda done, total, what: said.append(what),
        launch=launch,
    )
    survives = starts > deaths
    with (
        contextlib.nullcontext() if survives else pytest.raises(ServerError, match="SIGABRT"),
        server,
    ):
        server.check()
        log = server.log_path.read_text(errors="replace")
        assert exception in log and "is started once more:" in log
    assert len(counted.read_text().splitlines()) == starts
    assert any("is started once more" in text for text in said) is (starts == 2)
    assert not list(own_tmp.iterdir())


def test_a_server_that_hangs_at_start_is_stopped_after_the_timeout(
    repository: Callable[[str], Path], own_tmp: Path
) -> None:
    started = time.monotonic()
    with (
        pytest.raises(ServerError) as failed,
        TritonServer(repository(HANGING_MODEL), TritonConfig(start_timeout_s=1.0)),
    ):
        pass
    assert "tritonserver was not ready after 1 s" in str(failed.value)
    assert "loading: tiny:1" in failed.value.log_tail
    assert time.monotonic() - started < 40
    assert not list(own_tmp.iterdir())


@pytest.mark.parametrize("protocol", ["http", "grpc", "metrics"])
def test_a_port_in_use_is_named_before_anything_starts(
    repository: Callable[[str], Path], own_tmp: Path, protocol: str
) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with (
            pytest.raises(ServerError) as failed,
            TritonServer(repository(GOOD_MODEL), TritonConfig(**{f"{protocol}_port": port})),
        ):
            pass
    assert f"{protocol} port {port} on 127.0.0.1 cannot be used: Address already in use" in str(
        failed.value
    )
    assert f"triton.{protocol}_port" in str(failed.value)
    assert not list(own_tmp.iterdir())


def test_a_missing_repository_is_named(tmp_path: Path) -> None:
    with (
        pytest.raises(ServerError, match=f"no model repository at {tmp_path / 'none'}"),
        TritonServer(tmp_path / "none"),
    ):
        pass


def test_check_reports_a_server_that_dies_later(
    repository: Callable[[str], Path], own_tmp: Path
) -> None:
    with TritonServer(repository(GOOD_MODEL)) as server:
        server.check()
        stubs = children(server.pid)
        os.kill(server.pid, signal.SIGKILL)
        assert eventually(lambda: has_ended(server))
        with pytest.raises(ServerError, match="tritonserver was killed by SIGKILL") as caught:
            server.check()
        assert "killed from outside" in str(caught.value.hint)
        assert not any(is_alive(stub) for stub in stubs)
    assert not list(own_tmp.iterdir())


def test_a_model_whose_process_dies_stops_the_server(
    repository: Callable[[str], Path], own_tmp: Path
) -> None:
    """Triton alone would stay ready and answer nothing."""
    with TritonServer(repository(GOOD_MODEL)) as server:
        (stub,) = children(server.pid)
        os.kill(stub, signal.SIGKILL)
        assert eventually(lambda: has_ended(server))
        with pytest.raises(
            ServerError, match="was stopped, because the Python process of a model had died"
        ) as failed:
            server.check()
        assert f"a model's Python process ({stub}) died" in failed.value.log_tail
    assert not list(own_tmp.iterdir())


def test_a_form_larger_than_a_usual_stack_does_not_end_the_server(
    repository: Callable[[str], Path], own_tmp: Path
) -> None:
    """`curl -d` calls every body a form, and Triton reads it on the stack of an HTTP thread."""
    tensor = {"name": "x", "shape": [1], "datatype": "INT32", "data": [0]}
    body = json.dumps({"id": "a" * 16_000_000, "inputs": [tensor]}).encode()
    form = {"Content-Type": "application/x-www-form-urlencoded"}
    with TritonServer(repository(GOOD_MODEL)) as server:
        url = f"http://{server.http_url}/v2/models/tiny/infer"
        request = urllib.request.Request(url, body, form)
        with contextlib.suppress(urllib.error.HTTPError):  # it may refuse it
            urllib.request.urlopen(request, timeout=60).close()
        server.check()


def test_how_a_model_s_process_ended_stays_in_sight(tmp_path: Path) -> None:
    """Triton prints dozens of lines while it stops."""
    said = """E1126 08:00:00.000000 1 toolkit:0] "the model's process was killed by signal 9\""""
    again = """E1126 08:00:01.000000 1 toolkit:0] "the model's process ended with exit code 1\""""
    assert server_module.model_death(["I1126 started", said, again]) == [said]
    assert server_module.model_death(["I1126 started"]) == []


def test_clients_of_a_model_whose_process_dies_are_told_soon(
    repository: Callable[[str], Path], own_tmp: Path
) -> None:
    """Triton itself waits for the answers of the dead process: they took 17 seconds to fail."""
    path = repository(SILENT_MODEL)
    config = path / "tiny" / "config.pbtxt"
    config.write_text(config.read_text() + "model_transaction_policy { decoupled: true }\n")
    told = threading.Event()
    tensor = grpcclient.InferInput("x", [1], "INT32")
    tensor.set_data_from_numpy(np.zeros(1, np.int32))
    with TritonServer(path) as server, grpcclient.InferenceServerClient(server.grpc_url) as client:
        client.start_stream(lambda result, error: told.set())
        client.async_stream_infer("tiny", [tensor])
        (stub,) = children(server.pid)
        assert not told.wait(1)
        os.kill(stub, signal.SIGKILL)
        assert told.wait(8)


def test_what_only_an_operator_needs_asks_for_a_key(
    repository: Callable[[str], Path], own_tmp: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over both protocols. Inference, metadata, configuration and health stay open."""
    key = "0123456789abcdef-operator"
    monkeypatch.setenv("TOOLKIT_ADMIN_KEY", key)
    calls: list[Callable[..., object]] = []
    with TritonServer(repository(GOOD_MODEL)) as server:
        with (
            grpcclient.InferenceServerClient(server.grpc_url) as grpc,
            httpclient.InferenceServerClient(server.http_url) as http,
        ):
            for client, name in (
                (grpc, "triton-grpc-protocol-toolkit-admin-key"),
                (http, "toolkit-admin-key"),
            ):
                assert client.is_server_ready()
                assert client.get_model_metadata("tiny")
                assert client.get_model_config("tiny")
                calls = [
                    client.get_model_repository_index,
                    client.get_inference_statistics,
                    client.get_system_shared_memory_status,
                    client.get_trace_settings,
                    client.get_log_settings,
                ]
                for call in calls:
                    with pytest.raises(InferenceServerException, match="restricted"):
                        call()
                    with pytest.raises(InferenceServerException, match="restricted"):
                        call(headers={name: key[:-1]})
                    call(headers={name: key})
        environment = Path(f"/proc/{server.pid}/environ").read_bytes()
        assert key not in server.log_path.read_text()
        assert key.encode() not in environment


@pytest.mark.parametrize("killer", [signal.SIGKILL, signal.SIGTERM])
def test_nothing_outlives_a_killed_parent(
    repository: Callable[[str], Path], own_tmp: Path, killer: signal.Signals
) -> None:
    program = (
        "import sys, tempfile, time; from pathlib import Path; from toolkit.triton.process.server"
        " import TritonServer\nserver = TritonServer(Path(sys.argv[1])); server.start();"
        " print(server.pid, flush=True); time.sleep(600)"
    )
    environment = {**os.environ, "TMPDIR": str(own_tmp)}
    command = [sys.executable, "-c", program, str(repository(GOOD_MODEL))]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        names = [path.name for path in own_tmp.glob("toolkit-serve-*")]
        processes = [pid, *children(pid)]
        assert all(is_alive(process) for process in processes)
        parent.send_signal(killer)
        parent.wait()
    assert eventually(lambda: not any(is_alive(process) for process in processes))
    assert eventually(lambda: not list(own_tmp.iterdir()))
    assert not regions(names)


def test_leftovers_of_a_killed_server_are_swept_and_those_in_use_are_not(own_tmp: Path) -> None:
    dead, live = Workspace.create(), Workspace.create()
    shm = Path("/dev/shm")
    ours, theirs = shm / f"{dead.path.name}-region", shm / f"{live.path.name}-region"
    try:
        ours.write_bytes(b"x")
        theirs.write_bytes(b"x")
        dead.close()
        sweep(own_tmp)
        assert not dead.path.exists()
        assert not ours.exists()
        assert live.path.exists()
        assert theirs.exists()
    finally:
        live.close()
        sweep(own_tmp)
    assert not theirs.exists()


@pytest.mark.parametrize(
    "name", ["toolkit-serve-", "toolkit-serve-1", "toolkit-serve-*", "toolkit-serve-notes_of_mine"]
)
def test_a_folder_with_a_similar_name_costs_no_running_server_its_memory(
    own_tmp: Path, name: str
) -> None:
    live = Workspace.create()
    stale = own_tmp / name
    stale.mkdir()
    os.utime(stale, (0, 0))
    region = Path("/dev/shm") / f"{live.path.name}-region"
    try:
        region.write_bytes(b"x")
        sweep(own_tmp)
        assert region.exists()
        assert stale.exists()
    finally:
        live.close()
        sweep(own_tmp)


def test_a_stale_workspace_does_not_take_the_memory_of_one_whose_name_it_begins(
    own_tmp: Path,
) -> None:
    stale = Workspace.create()
    region = Path("/dev/shm") / f"{stale.path.name}0-region"
    try:
        region.write_bytes(b"x")
        stale.close()
        sweep(own_tmp)
        assert not stale.path.exists()
        assert region.exists()
    finally:
        region.unlink()


def test_folders_of_others_and_links_are_not_swept(
    own_tmp: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    workspace = Workspace.create()
    workspace.close()
    link = own_tmp / "toolkit-serve-00000000"
    link.symlink_to(workspace.path)
    with monkeypatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: workspace.path.stat().st_uid + 1)
        sweep(own_tmp)
        assert workspace.path.exists()
    sweep(own_tmp)
    assert not workspace.path.exists()
    assert link.is_symlink()


def test_a_workspace_that_vanishes_while_others_are_swept_is_no_fault(own_tmp: Path) -> None:
    """Its server ended after the sweep had listed the folder."""

    class Listed(type(own_tmp)):  # type: ignore[misc]
        def glob(self, pattern: str) -> list[Path]:  # type: ignore[override]
            return [own_tmp / "toolkit-serve-gone0000"]

    sweep(Listed(own_tmp))


def test_server_on_path_comes_first_and_brings_its_own_backends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own_tmp: Path
) -> None:
    program = tmp_path / "bin" / "tritonserver"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.delenv("LD_LIBRARY_PATH", raising=False)
    workspace = Workspace.create()
    command, environment = launch_command(tmp_path, workspace)
    workspace.close()
    assert find_server().binary == program
    assert command[0] == str(program)
    assert not any(argument.startswith("--backend-directory") for argument in command)
    assert "LD_LIBRARY_PATH" not in environment


def test_without_any_server_the_extra_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(server_module.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(BackendUnavailable, match=r"tritonserver is not available\n.*embedded"):
        find_server()
