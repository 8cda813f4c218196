"""Other ways to serve a packaged repository: by its launch.sh, by a bare `tritonserver
--model-repository`, and without decoupled responses.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from tests.support.serving import package_pair
from toolkit.client import Client, RequestRefused, ServerUnavailable
from toolkit.errors import ServerError
from toolkit.process.workspace import Workspace, sweep
from toolkit.records.build import TritonRepository
from toolkit.templates import render_template
from toolkit.triton.package import repository as package
from toolkit.triton.process.server import (
    TritonServer,
    find_server,
    launch_command,
)


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    try:
        for item in sockets:
            item.bind(("127.0.0.1", 0))
        return [item.getsockname()[1] for item in sockets]
    finally:
        for item in sockets:
            item.close()


@contextmanager
def running(command: list[str], log: Path, **settings: object) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=output, start_new_session=True, **settings
        )  # type: ignore[call-overload]
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def is_answering(process: subprocess.Popen[bytes], port: int, log: Path) -> bool:
    with Client(f"127.0.0.1:{port}") as client:
        deadline = time.monotonic() + 60
        while not client.ready():
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)
        return bool(client.generate("def f", max_tokens=3).token_ids)


def test_launch_script_serves(tiny_repository: TritonRepository, tmp_path: Path) -> None:
    repository, tmp = tmp_path / "moved", tmp_path / "tmp"
    shutil.copytree(tiny_repository.path, repository)
    tmp.mkdir()
    http, grpc, metrics = free_ports(3)
    command = [
        str(repository / "launch.sh"),
        f"--http-port={http}",
        f"--grpc-port={grpc}",
        f"--metrics-port={metrics}",
    ]
    environment = {**os.environ, "PYTHON": sys.executable, "TMPDIR": str(tmp)}
    with running(command, tmp_path / "log", env=environment, cwd=tmp_path) as process:
        assert is_answering(process, grpc, tmp_path / "log")
        sweep(tmp)
        assert len(list(tmp.iterdir())) == 1  # its workspace is in use
    assert process.returncode == 0
    assert not list(tmp.iterdir())


FAKE_SERVER = """#!/bin/sh
echo start >> {starts}
if [ $(wc -l < {starts}) -gt {deaths} ]; then echo "served with $*"; exit 7; fi
{before}
echo "terminate called after throwing an instance of '{exception}'" >&2
exit 134
"""
LOCK_EXCEPTION = "boost::interprocess::lock_exception"
READY = 'echo "I1122 http_server.cc:4725] Started HTTPService at 127.0.0.1:8000" >&2'


@pytest.mark.parametrize(
    ("exception", "before", "deaths", "starts", "code"),
    [
        (LOCK_EXCEPTION, "", 1, 2, 7),
        (LOCK_EXCEPTION, "", 2, 2, 134),
        (LOCK_EXCEPTION, READY, 1, 1, 134),
        ("std::bad_alloc", "", 1, 1, 134),
    ],
)
def test_launch_script_starts_a_server_once_more_that_met_a_lock_exception_at_start(
    tmp_path: Path, exception: str, before: str, deaths: int, starts: int, code: int
) -> None:
    counted, own_tmp, program = (tmp_path / name for name in ("starts", "tmp", "bin/tritonserver"))
    own_tmp.mkdir()
    program.parent.mkdir()
    program.write_text(
        FAKE_SERVER.format(starts=counted, deaths=deaths, before=before, exception=exception)
    )
    program.chmod(0o755)
    model = tmp_path / "repository" / "tensorrt_llm"
    model.mkdir(parents=True)
    (model / "config.pbtxt").write_text('name: "tensorrt_llm"')
    launch = model.parent / "launch.sh"
    launch.write_text(render_template(package.__file__, "launch_torch.sh.j2"))
    launch.chmod(0o755)
    environment = {
        **os.environ,
        "PATH": f"{program.parent}:{os.environ['PATH']}",
        "PYTHON": sys.executable,
        "TMPDIR": str(own_tmp),
    }
    done = subprocess.run(
        [str(launch), "--http-port=1"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == code, done.stderr
    assert len(counted.read_text().splitlines()) == starts
    assert done.stderr.count("is started once more, after a lock exception") == starts - 1
    assert exception in done.stderr
    assert ("--http-port=1" in done.stdout) is (code == 7)
    assert not list(own_tmp.iterdir())


def test_a_server_that_is_asked_to_end_at_start_is_not_started_again(tmp_path: Path) -> None:
    program, counted = tmp_path / "bin" / "tritonserver", tmp_path / "starts"
    program.parent.mkdir()
    program.write_text(
        f"#!/bin/sh\necho start >> {counted}\necho {LOCK_EXCEPTION} >&2\nexec sleep 60\n"
    )
    program.chmod(0o755)
    model = tmp_path / "repository" / "tensorrt_llm"
    model.mkdir(parents=True)
    (model / "config.pbtxt").write_text('name: "tensorrt_llm"')
    command = [sys.executable, "-m", "toolkit.triton.launch", str(model.parent)]
    environment = {**os.environ, "PATH": f"{program.parent}:{os.environ['PATH']}"}
    with running(command, tmp_path / "log", env=environment) as process:
        deadline = time.monotonic() + 30
        while LOCK_EXCEPTION not in (tmp_path / "log").read_text():
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 143
    assert counted.read_text().splitlines() == ["start"]


@pytest.mark.parametrize("is_open", [True, False])
def test_launch_script_warns_of_a_listener_beyond_loopback(
    tmp_path: Path, *, is_open: bool
) -> None:
    """The tritonserver on PATH is a program that prints its arguments."""
    program, repository = tmp_path / "bin" / "tritonserver", tmp_path / "repository"
    program.parent.mkdir()
    program.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    program.chmod(0o755)
    (repository / "model").mkdir(parents=True)
    (repository / "model" / "config.pbtxt").touch()
    (tmp_path / "tmp").mkdir()
    done = subprocess.run(
        [sys.executable, "-m", "toolkit.triton.launch", str(repository)]
        + ["--http-address=0.0.0.0"] * is_open,
        env={
            **os.environ,
            "PATH": f"{program.parent}{os.pathsep}{os.environ['PATH']}",
            "TMPDIR": str(tmp_path / "tmp"),
            "TOOLKIT_ADMIN_KEY": "0123456789abcdef",
        },
        capture_output=True,
        text=True,
        check=True,
    )
    warning = "warning: --http-address=0.0.0.0: everyone who reaches this address can use the model"
    assert (warning in done.stderr) is is_open
    assert "0123456789abcdef" not in done.stderr
    assert "--http-address=127.0.0.1" in done.stdout
    assert "toolkit-admin-key=0123456789abcdef" in done.stdout


def test_bare_tritonserver_serves_in_the_right_environment(
    tiny_repository: TritonRepository, tmp_path: Path
) -> None:
    """The right environment has backends in /opt/tritonserver, and a Python with the toolkit for
    the Python backend.
    """
    as_root = [] if os.geteuid() == 0 else ["--map-root-user"]
    namespace = ["unshare", *as_root, "--mount"]
    if (
        shutil.which("unshare") is None
        or subprocess.run([*namespace, "true"], capture_output=True, check=False).returncode
    ):
        pytest.skip(
            "needs a mount namespace, to have /opt/tritonserver/backends for one process only"
        )
    if Path(sys.base_prefix).resolve().is_relative_to("/opt") or not Path("/opt").is_dir():
        pytest.skip("the interpreter itself is in /opt, which the test would hide")
    workspace = Workspace.create()
    try:
        arguments, environment = launch_command(tiny_repository.path, workspace)
        backends = next(
            (
                argument.split("=")[1]
                for argument in arguments
                if argument.startswith("--backend-directory")
            ),
            None,
        )
        if backends is None:
            pytest.skip("the tritonserver on PATH has its backends already")
        http, grpc, metrics = free_ports(3)
        script = (
            "mount -t tmpfs none /opt && mkdir -p /opt/tritonserver && "
            f"ln -s {backends} /opt/tritonserver/backends && "
            f"exec {find_server().binary} --model-repository {tiny_repository.path} "
            # The repository does not state where the server listens, so the test does.
            f"--http-address 127.0.0.1 --http-port {http} --grpc-address 127.0.0.1 --grpc-port"
            f" {grpc} "
            f"--metrics-address 127.0.0.1 --metrics-port {metrics}"
        )
        with running(
            [*namespace, "sh", "-c", script], tmp_path / "log", env=environment
        ) as process:
            assert is_answering(process, grpc, tmp_path / "log")
    finally:
        workspace.close()
        sweep(workspace.path.parent)


def test_a_repository_that_is_not_decoupled_answers_once(
    tiny_pair: tuple[Path, Path], tmp_path: Path
) -> None:
    import tritonclient.grpc as triton

    repository = package_pair(tiny_pair, tmp_path, decoupled=False)
    with TritonServer(repository.path) as server, Client(server.grpc_url) as client:
        completion = client.generate("def f", max_tokens=5)
        assert completion.token_ids
        with pytest.raises(RequestRefused, match="streaming needs a decoupled repository"):
            list(client.stream("def f", max_tokens=5))
        with ThreadPoolExecutor(8) as pool:
            assert set(
                pool.map(lambda _: client.generate("def f", max_tokens=5).text, range(40))
            ) == {completion.text}
        # A plain inference call, which Triton allows for models that are not decoupled.
        with triton.InferenceServerClient(server.grpc_url) as plain:
            prompt = triton.InferInput("text_input", [1], "BYTES")
            prompt.set_data_from_numpy(np.array([b"def f"], dtype=object))
            tokens = triton.InferInput("sampling_param_max_tokens", [1], "INT32")
            tokens.set_data_from_numpy(np.array([5], dtype=np.int32))
            answer = plain.infer("tensorrt_llm", [prompt, tokens]).as_numpy("text_output")
            assert answer is not None
            assert answer[0].decode() == "def f" + completion.text


@pytest.mark.parametrize("layout", ["llmapi", "bls"])
def test_a_repository_of_another_version_is_to_be_packaged_again(
    layout: str, tiny_repository: TritonRepository, tmp_path: Path
) -> None:
    """Its models import the toolkit by module names that no longer exist, so nothing is started."""
    repository = tmp_path / "old"
    if layout == "llmapi":
        shutil.copytree(tiny_repository.path, repository)
        path = repository / "tensorrt_llm" / "1" / "model.yaml"
        path.write_text(re.sub(r"package_version: \d+", "package_version: 4", path.read_text()))
    else:
        path = repository / "tensorrt_llm_bls" / "config.pbtxt"
        config = model_config_pb2.ModelConfig(name="tensorrt_llm_bls")
        config.parameters["package_version"].string_value = "4"
        path.parent.mkdir(parents=True)
        path.write_text(text_format.MessageToString(config))
    with (
        pytest.raises(ServerError, match=f"package version 4, and .*{path.name}") as failed,
        TritonServer(repository),
    ):
        pass
    assert failed.value.hint == "Package it again: toolkit package CONFIG."
    by_hand = [sys.executable, "-m", "toolkit.triton.launch", str(repository)]
    done = subprocess.run(by_hand, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 3 and "Package it again" in done.stderr


def test_a_server_that_goes_away_is_reported(tiny_repository: TritonRepository) -> None:
    with TritonServer(tiny_repository.path) as server, Client(server.grpc_url) as client:
        chunks = client.stream("def f", max_tokens=200, num_draft_tokens=0)
        next(chunks)
        os.kill(server.pid, signal.SIGKILL)
        with pytest.raises(ServerUnavailable, match="cannot be reached or went away"):
            list(chunks)
        with pytest.raises(ServerUnavailable, match="cannot be reached or went away"):
            client.generate("def f")
