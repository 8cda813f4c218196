"""The packaged repository on an installed vLLM: it takes the arguments of model.json, and
launch_vllm.sh serves with them until it is told to end.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
import urllib.request
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.vllm_packages import ARGS, repository
from toolkit.engines.vllm.environment import VllmEnvironment
from toolkit.triton.package.vllm import OLD_KEYS
from toolkit.triton.process.localize import local_args

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

SMALL = {**ARGS, "dtype": "float32", "max_model_len": 128, "enforce_eager": True}
QUICKSTART = Path(__file__).parents[3] / "configs" / "quickstart"
START_TIMEOUT_S = 420
END_TIMEOUT_S = 60

# Reads {"args", "old_keys"}; writes what vLLM makes of them.
ASK = """
import json, sys
from vllm import AsyncEngineArgs
given = json.load(sys.stdin)
config = AsyncEngineArgs(**given["args"]).create_engine_config()
refused = []
for key in given["old_keys"]:
    try:
        AsyncEngineArgs(**given["args"], **{key: 3})
    except TypeError:
        refused.append(key)
speculative = config.speculative_config
print(json.dumps({
    "model": config.model_config.model,
    "max_model_len": config.model_config.max_model_len,
    "max_num_seqs": config.scheduler_config.max_num_seqs,
    "draft": speculative.draft_model_config.model,
    "draft_len": speculative.num_speculative_tokens,
    "refused": refused,
}))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the quickstart's pair: vLLM's attention on CPUs has no kernel for smaller heads."""
    pair = (QUICKSTART / "target", QUICKSTART / "draft")
    return repository(tmp_path_factory.mktemp("vllm"), SMALL, pair=pair).path


def environment(cache: Path, **variables: str) -> dict[str, str]:
    """Without this process's PYTHONPATH, whose packages are not for vLLM's Python."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return {**kept, "VLLM_CACHE_ROOT": str(cache), "VLLM_NO_USAGE_STATS": "1", **variables}


def test_the_installed_vllm_takes_the_arguments_and_refuses_the_old_ones(
    vllm_environment: VllmEnvironment, folder: Path, tmp_path: Path
) -> None:
    done = subprocess.run(
        [vllm_environment.python, "-c", ASK],
        input=json.dumps({"args": local_args(folder), "old_keys": OLD_KEYS}),
        env=environment(tmp_path, VLLM_LOGGING_LEVEL="ERROR"),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    engines = folder / "vllm_model" / "1" / "engines"
    assert json.loads(done.stdout.splitlines()[-1]) == {
        "model": str(engines / "target"),
        "max_model_len": 128,
        "max_num_seqs": 4,
        "draft": str(engines / "draft"),
        "draft_len": 3,
        "refused": list(OLD_KEYS),
    }


@pytest.fixture
def mark() -> str:
    """A value in the environment that tells the processes of this test from all others."""
    return f"toolkit-test-{uuid.uuid4()}"


def marked_processes(mark: str) -> Iterator[int]:
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (entry / "environ").read_bytes():
                yield int(entry.name)
        except OSError:
            continue  # it has ended, or is not ours


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def is_up(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def complete(url: str, **body: Any) -> dict[str, Any]:
    request = urllib.request.Request(
        f"{url}/v1/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        result: dict[str, Any] = json.loads(answer.read())
        return result


def test_the_launch_script_serves_and_leaves_no_process(
    vllm_environment: VllmEnvironment, folder: Path, tmp_path: Path, mark: str
) -> None:
    port, log = free_port(), tmp_path / "log"
    url = f"http://127.0.0.1:{port}"
    with log.open("w") as output:
        server = subprocess.Popen(
            [folder / "launch_vllm.sh", "--port", str(port)],
            env=environment(tmp_path, PYTHON=str(vllm_environment.python), TOOLKIT_TEST=mark),
            cwd=tmp_path,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        deadline = time.monotonic() + START_TIMEOUT_S
        while not is_up(url):
            assert server.poll() is None, log.read_text()[-3000:]
            assert time.monotonic() < deadline, log.read_text()[-3000:]
            time.sleep(1)
        answer = complete(url, model="Pair", prompt="abc", max_tokens=9, temperature=0)
        assert answer["usage"]["completion_tokens"] in range(1, 10)
        counts = answer["metrics"]["speculative_decoding"]
        assert counts["num_spec_steps"] > 0
        assert counts["num_accepted_draft_tokens"] <= 3 * counts["num_spec_steps"]
        server.send_signal(signal.SIGTERM)
        server.wait(END_TIMEOUT_S)
        deadline = time.monotonic() + END_TIMEOUT_S
        while list(marked_processes(mark)) and time.monotonic() < deadline:
            time.sleep(0.5)
        assert list(marked_processes(mark)) == []
    finally:
        for process in marked_processes(mark):
            os.kill(process, signal.SIGKILL)
        server.wait()
