"""The process of vLLM's server: started, watched and stopped, with nothing left of it.

What is started is a program that answers as vLLM does; `tests/workflows/test_built_for_vllm.py`
starts vLLM.
"""

from __future__ import annotations

import os
import re
import signal
import tempfile
import time
from pathlib import Path

import pytest

from tests.support.vllm_program import are_stopped, fake_python
from toolkit.client import ServerUnavailable
from toolkit.config.schema import TritonConfig
from toolkit.engines.vllm.server import (
    CAUSE_LINES,
    VllmServer,
    plugins_of,
    preloaded,
    root_cause,
    server_command,
)
from toolkit.errors import ServerError
from toolkit.process.server import GRACE_S, LOG_TAIL_LINES

ARGS = {"model": "/models/target", "max_model_len": 64, "enable_prefix_caching": False}
SPECULATION = {"method": "draft_model", "model": "/models/draft", "num_speculative_tokens": 3}
SHM = Path("/dev/shm")


@pytest.fixture
def own_tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def server(folder: Path, name: str, start_timeout_s: float = 60.0) -> VllmServer:
    config = TritonConfig(start_timeout_s=start_timeout_s)
    log = folder / "server.log"
    return VllmServer(fake_python(folder / "bin"), ARGS, name, config=config, log_path=log)


def started(folder: Path) -> tuple[int, Path]:
    """The child that the server started, and its shared memory."""
    match = re.search(r"started (\d+) (\S+)", (folder / "server.log").read_text())
    assert match is not None
    return int(match[1]), SHM / match[2]


def is_clean(child: int, memory: Path) -> bool:
    names = (f"__KMP_REGISTERED_LIB_{child}_*", f"sem.mp-{child}")
    return not memory.exists() and not any(list(SHM.glob(name)) for name in names)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_command_speculates_with_figures_per_request_and_takes_no_defaults_of_the_checkpoint() -> (
    None
):
    args = {**ARGS, "speculative_config": SPECULATION}
    command = server_command(Path("py"), args, "name", host="127.0.0.1", port=5)
    assert command[:3] == ["py", "-m", "vllm.entrypoints.openai.api_server"]
    assert "--no-enable-prefix-caching" in command
    for flag, value in (
        ("--generation-config", "vllm"),
        ("--served-model-name", "name"),
        ("--port", "5"),
        ("--per-request-spec-decode-metrics", "detailed"),
    ):
        assert command[command.index(flag) + 1] == value
    plain = server_command(Path("py"), ARGS, "name", host="127.0.0.1", port=5)
    assert "--per-request-spec-decode-metrics" not in plain  # vLLM refuses it there


def test_server_answers_and_leaves_nothing(tmp_path: Path, own_tmp: Path) -> None:
    with server(tmp_path, "tiny") as running, running.client() as client:
        assert client.generate("hi").text == " abc d!"
        child, memory = started(tmp_path)
        assert is_alive(child)
        assert memory.exists()
        assert (SHM / f"sem.mp-{child}").exists()
        assert list(own_tmp.iterdir())
        running.check()
    assert not is_alive(child)
    assert is_clean(child, memory)
    assert not list(own_tmp.iterdir())
    text = (tmp_path / "server.log").read_text()
    assert "--generation-config vllm" in text
    assert "offline 1 1" in text
    assert f"cache {own_tmp}/toolkit-serve-" in text


def test_the_plugins_of_the_engine_directory_are_found_by_vllm(
    tmp_path: Path, own_tmp: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the folder's name holds, which PYTHONPATH would split at a colon."""
    monkeypatch.setenv("PYTHONPATH", "/of/another/python")
    args = {**ARGS, "model": str(tmp_path / "a:target")}
    for brings_plugins in (False, True):
        if brings_plugins:
            (tmp_path / "a:target" / "vllm_plugins" / "inside").mkdir(parents=True)
        python, log = fake_python(tmp_path / "bin"), tmp_path / "server.log"
        with VllmServer(python, args, "tiny", log_path=log):
            (line,) = re.findall(r"^path \S+?:(\S*)$", log.read_text(), re.MULTILINE)
            assert (line != "") == brings_plugins
            assert not brings_plugins or (Path(line) / "inside").is_dir()
    assert (tmp_path / "a:target" / "vllm_plugins" / "inside").is_dir()  # the link alone is removed


def test_a_choice_of_plugins_does_not_leave_out_the_engine_s(tmp_path: Path) -> None:
    (tmp_path / "vllm_plugins").mkdir()
    for chosen, expected in (("", "toolkit_vllm_sampling"), ("one", "one,toolkit_vllm_sampling")):
        workspace = tmp_path / f"workspace-{chosen}"
        workspace.mkdir()
        variables = plugins_of(tmp_path, {"VLLM_PLUGINS": chosen}, workspace)
        assert variables["VLLM_PLUGINS"] == expected
    assert plugins_of(tmp_path / "no", {"VLLM_PLUGINS": ""}, tmp_path) == {}


def test_openmp_is_preloaded_from_a_folder_whatever_its_name(tmp_path: Path) -> None:
    python, openmp = tmp_path / "v v" / "bin" / "python", tmp_path / "v v" / "lib" / "libiomp5.so"
    openmp.parent.mkdir(parents=True)
    openmp.touch()
    preload = preloaded(python, {"LD_PRELOAD": "/lib/other.so"}, tmp_path)["LD_PRELOAD"].split(" ")
    assert preload == [str(tmp_path / "libiomp5.so"), "/lib/other.so"]
    assert Path(preload[0]).samefile(openmp)


def test_a_paused_server_has_no_processor_and_goes_on_later(tmp_path: Path, own_tmp: Path) -> None:
    with server(tmp_path, "tiny") as running, running.client() as client:
        child, _ = started(tmp_path)
        with running.paused():
            assert are_stopped(running.pid, child)
            running.check()
        assert client.generate("hi").text == " abc d!"


def test_a_paused_server_is_stopped_without_delay(tmp_path: Path, own_tmp: Path) -> None:
    with server(tmp_path, "tiny") as running:
        child, memory = started(tmp_path)
        with running.paused():
            began = time.monotonic()
            running.stop()
            assert time.monotonic() - began < GRACE_S
    assert not is_alive(child)
    assert is_clean(child, memory)


def test_server_that_dies_at_start_is_told_with_the_end_of_its_log(
    tmp_path: Path, own_tmp: Path
) -> None:
    with pytest.raises(ServerError, match="vLLM ended with exit code 1") as raised:
        server(tmp_path, "dies").start()
    assert "ValueError: no such model" in str(raised.value)
    assert not list(own_tmp.iterdir())


def test_the_engine_s_own_error_comes_before_the_end_of_the_log(
    tmp_path: Path, own_tmp: Path
) -> None:
    with pytest.raises(ServerError) as raised:
        server(tmp_path, "engine-dies").start()
    first, second, *rest = raised.value.log_tail.splitlines()
    assert first.endswith("EngineCore failed to start.")
    assert second.endswith("ValueError: No available memory for the cache blocks.")
    assert len(rest) == LOG_TAIL_LINES
    assert rest[-1].endswith("See root cause above.")


def test_the_cause_is_the_error_of_the_process_that_failed_first() -> None:
    worker, engine = (
        f"({name}) ERROR 01-01 00:00:00 [a.py:1]" for name in ("Worker pid=2", "EngineCore pid=1")
    )
    failed = [f"{worker} {number}" for number in range(30)]
    log = [
        "(EngineCore pid=1) INFO a",
        *failed,
        f"{engine} See stack trace.",
        "(APIServer pid=0) ERROR b",
    ]
    assert root_cause(log) == failed[-CAUSE_LINES:]
    assert root_cause(log[:1]) == []


def test_temporary_folder_too_long_for_sockets_is_told(tmp_path: Path, own_tmp: Path) -> None:
    with pytest.raises(ServerError, match="too long for vLLM's sockets") as raised:
        server(tmp_path, "has-long-path").start()
    assert str(own_tmp) in str(raised.value) and "Set TMPDIR" in str(raised.value)
    assert not list(own_tmp.iterdir())


def test_server_that_never_becomes_ready_is_stopped(tmp_path: Path, own_tmp: Path) -> None:
    with pytest.raises(ServerError, match="vLLM was not ready after 4 s") as raised:
        server(tmp_path, "hangs", start_timeout_s=4.0).start()
    assert "started" in raised.value.log_tail
    child, memory = started(tmp_path)
    assert not is_alive(child)
    assert is_clean(child, memory)
    assert not list(own_tmp.iterdir())


def test_server_that_is_healthy_and_does_not_generate_has_not_started(
    tmp_path: Path, own_tmp: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("toolkit.engines.vllm.server.GONE_S", 0.1)
    with pytest.raises(ServerError, match=r"its first request failed: .*EngineCore died"):
        server(tmp_path, "silent").start()
    assert not is_alive(started(tmp_path)[0])


def test_server_that_dies_in_the_middle_is_told_with_the_end_of_its_log(
    tmp_path: Path, own_tmp: Path
) -> None:
    with server(tmp_path, "loses-engine") as running, running.client() as client:
        with pytest.raises(ServerUnavailable):
            client.measure(["hi"])
        with pytest.raises(ServerError, match="vLLM ended with exit code 1") as raised:
            running.check(wait_s=10.0)
        assert raised.value.log_tail.endswith("EngineDeadError")
    child, memory = started(tmp_path)
    assert not is_alive(child)
    assert is_clean(child, memory)
    assert not list(own_tmp.iterdir())


def test_killed_server_takes_its_children_with_it(tmp_path: Path, own_tmp: Path) -> None:
    with server(tmp_path, "tiny") as running:
        child, memory = started(tmp_path)
        os.kill(running.pid, signal.SIGKILL)
        with pytest.raises(ServerError, match="vLLM was killed by SIGKILL"):
            running.check(wait_s=10.0)
        assert not is_alive(child)
        assert is_clean(child, memory)
    assert not list(own_tmp.iterdir())


def kill_supervisor(running: VllmServer) -> None:
    supervisor = running._server.process
    assert supervisor is not None
    os.kill(supervisor.pid, signal.SIGKILL)


def test_what_a_killed_supervisor_leaves_is_removed_at_the_end(
    tmp_path: Path, own_tmp: Path
) -> None:
    with server(tmp_path, "tiny") as running:
        child, memory = started(tmp_path)
        kill_supervisor(running)
        with pytest.raises(ServerError, match=r"lost its supervisor, .* killed by SIGKILL"):
            running.check(wait_s=10.0)
        assert is_alive(child)
    assert not is_alive(child)
    assert is_clean(child, memory)
    assert not list(own_tmp.iterdir())


def test_what_a_killed_supervisor_leaves_is_swept_by_the_next_start(
    tmp_path: Path, own_tmp: Path
) -> None:
    """The supervisor's own death kills the server alone, as nobody is left to end its child."""
    first = server(tmp_path / "first", "tiny")
    first.start()
    child, memory = started(tmp_path / "first")
    kill_supervisor(first)
    time.sleep(0.3)
    assert is_alive(child)
    with server(tmp_path / "second", "tiny"):
        assert not is_alive(child)
        assert is_clean(child, memory)
    first.stop()
    assert not list(own_tmp.iterdir())


def test_cache_is_kept_after_a_start_and_emptied_by_one_that_fails(
    tmp_path: Path, own_tmp: Path
) -> None:
    cache, python = tmp_path / "cache", fake_python(tmp_path / "bin")
    (cache / "compiled").mkdir(parents=True)
    with VllmServer(python, ARGS, "tiny", cache=cache, log_path=tmp_path / "log"):
        pass
    assert f"cache {cache}\n" in (tmp_path / "log").read_text()
    assert (cache / "compiled").exists()
    with pytest.raises(ServerError):
        VllmServer(python, ARGS, "dies", cache=cache).start()
    assert not (cache / "compiled").exists()
