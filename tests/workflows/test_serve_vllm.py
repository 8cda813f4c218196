"""Serve a deployment of the kind vllm: both arms beside each other or in turns. A program that
answers as vLLM does stands for it. `test_built_for_vllm.py` starts the real one.
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.cli import write_config
from tests.support.vllm_program import are_stopped, fake_python
from toolkit.bench.counters import read_counters
from toolkit.client import RequestRefused, ServerUnavailable
from toolkit.config.load import load_config
from toolkit.config.schema import DeploymentConfig
from toolkit.engines.vllm.environment import find_environment
from toolkit.errors import BackendUnavailable, ServerError, UsageError
from toolkit.validate.arms import Alternating
from toolkit.workflows import serve_vllm
from toolkit.workflows.serve import Machine, check_servable, plain_served, serve
from toolkit.workflows.serve_vllm import Routed, has_room_for_two

ARGS = {
    "model": "/models/vllm_model/1/engines/target",
    "speculative_config": {
        "method": "draft_model",
        "model": "/models/vllm_model/1/engines/draft",
        "num_speculative_tokens": 2,
    },
}
ENGINE: dict[str, Any] = {
    "kind": "vllm",
    "dtype": "float32",
    "max_batch_size": 2,
    "max_input_len": 64,
    "max_seq_len": 128,
    "kv_cache_gib": 1,
}


@pytest.fixture
def own_tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def loaded(folder: Path, pair: tuple[Path, Path], **sections: Any) -> DeploymentConfig:
    engine = {**ENGINE, **sections.pop("engine", {})}
    return load_config(write_config(folder, pair, engine=engine, **sections))


@pytest.fixture
def deployment(vllm_pair: tuple[Path, Path], tmp_path: Path) -> DeploymentConfig:
    """Served by the program that stands for vLLM."""
    python = fake_python(tmp_path / "bin")
    return loaded(tmp_path, vllm_pair, engine={"python": str(python)})


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    version = tmp_path / "repository" / "vllm_model" / "1"
    version.mkdir(parents=True)
    (version / "model.json").write_text(json.dumps(ARGS))
    return tmp_path / "repository"


@pytest.fixture(autouse=True)
def no_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The program has no tokenizer: every prompt is [1, 7] to it."""
    monkeypatch.setattr(serve_vllm, "_encoder", lambda model: lambda prompt: [1, 7])


def test_arms_are_served_beside_each_other_and_their_counters_added(
    deployment: DeploymentConfig, repository: Path, tmp_path: Path, own_tmp: Path
) -> None:
    log = tmp_path / "logs" / "server.log"
    with serve(deployment, repository, plain="beside", log_path=log) as (endpoint, servers):
        assert isinstance(endpoint, Routed)
        before = servers.counters()
        endpoint.measure(["hi"], num_draft_tokens=0)
        endpoint.measure(["hi"])
        endpoint.measure(["hi"], num_draft_tokens=deployment.speculation.longest_draft)
        with pytest.raises(RequestRefused, match="the draft length is fixed at"):
            endpoint.measure(["hi"], num_draft_tokens=99)
        name = "vllm:request_success_total"
        assert servers.counters()[name] - before[name] == 3
        assert servers.address.protocol == "openai-completions"
        assert servers.plain_address is not None
        with servers.alone["served"]():
            assert are_stopped(servers.running["plain"].pid)
            assert not are_stopped(servers.server.pid, within_s=0.1)
        # One request of each start, then one to the plain server and two to the other.
        plain, served = servers.plain_address.metrics_url, servers.address.metrics_url
        assert (read_counters(plain)[name], read_counters(served)[name]) == (2, 3)
    assert "--speculative-config" in log.read_text()
    assert "--speculative-config" not in log.with_suffix(".plain.log").read_text()
    assert not list(own_tmp.iterdir())


def test_arms_take_turns_and_only_one_runs(
    deployment: DeploymentConfig, repository: Path, tmp_path: Path, own_tmp: Path
) -> None:
    log = tmp_path / "server.log"
    with serve(deployment, repository, plain="in turns", log_path=log) as (endpoint, servers):
        assert isinstance(endpoint, Alternating)
        plain = endpoint.start("plain")
        assert len(plain.measure(["hi"])) == 1
        endpoint.start("speculative").measure(["hi"])
        with pytest.raises(ServerUnavailable):
            plain.measure(["hi"])
        assert servers.plain_address is None
    assert "--speculative-config" not in log.with_suffix(".1.log").read_text()
    assert "--speculative-config" in log.read_text()
    assert not list(own_tmp.iterdir())


def test_server_that_dies_while_it_is_used_is_told_with_the_end_of_its_log(
    deployment: DeploymentConfig, repository: Path, own_tmp: Path
) -> None:
    dying = deployment.model_copy(update={"name": "loses-engine"})
    with (
        pytest.raises(ServerError, match="vLLM ended with exit code 1") as raised,
        serve(dying, repository) as (endpoint, _),
    ):
        assert not isinstance(endpoint, Alternating)
        endpoint.measure(["hi"])
    assert raised.value.log_tail.endswith("EngineDeadError")
    assert isinstance(raised.value.__context__, ServerUnavailable)
    assert not list(own_tmp.iterdir())


def test_two_servers_run_only_where_both_fit(
    deployment: DeploymentConfig, repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serve_vllm, "gpus", list)
    weights = repository / "vllm_model/1/model.safetensors"
    weights.write_bytes(b"x")
    each = 1 * serve_vllm.GIB + serve_vllm.OVERHEAD_BYTES
    for share, fits in ((2.3, True), (2.1, False)):
        monkeypatch.setattr(serve_vllm, "available_memory_bytes", lambda s=share: int(s * each))
        assert has_room_for_two(deployment, repository) is fits
        assert plain_served(deployment, repository) == ("beside" if fits else "in turns")
    monkeypatch.setattr(serve_vllm, "gpus", lambda: ["H200"])
    assert not has_room_for_two(deployment, repository)  # each takes 0.9 of the memory


def test_draft_whose_path_vllm_would_misread_is_not_served(
    deployment: DeploymentConfig, repository: Path, tmp_path: Path
) -> None:
    misread = repository.rename(tmp_path / "not-an-EAGLE3-head")
    with (
        pytest.raises(UsageError, match="takes every draft whose path contains 'eagle3'"),
        serve(deployment, misread, plain="in turns") as (endpoint, _),
    ):
        endpoint.start("speculative")


def test_machine_without_vllm_cannot_serve_it(vllm_pair: tuple[Path, Path], tmp_path: Path) -> None:
    missing = loaded(tmp_path, vllm_pair, engine={"python": str(tmp_path / "none")})
    with pytest.raises(BackendUnavailable, match="vLLM"):
        check_servable(missing, Machine())


def test_deployment_over_several_nodes_is_not_served_here(
    vllm_pair: tuple[Path, Path], tmp_path: Path
) -> None:
    python = str(fake_python(tmp_path / "bin"))
    wide = loaded(tmp_path, vllm_pair, engine={"python": python, "pp_size": 2, "gpus_per_node": 1})
    with pytest.raises(UsageError, match="over 2 nodes"):
        check_servable(wide, Machine())


def test_deployment_for_gpus_is_not_started_on_a_cpu(
    vllm_pair: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither by a build for CPUs, nor without the GPUs."""
    python = str(fake_python(tmp_path / "bin"))
    on_gpu = loaded(tmp_path, vllm_pair, engine={"python": python}, hardware={"gpu": "H100"})
    with pytest.raises(UsageError, match=r"is for cuda, and vLLM in .* is built for cpu"):
        check_servable(on_gpu, Machine())
    environment = replace(find_environment(Path(python)), platform="cuda")
    monkeypatch.setattr(
        "toolkit.engines.vllm.environment.find_environment", lambda *_, **__: environment
    )
    with pytest.raises(UsageError, match=r"needs 1 NVIDIA GPU \(here: none\)"):
        check_servable(on_gpu, Machine())
