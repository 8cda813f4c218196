"""Addresses of servers that a gateway is put in front of."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from tests.support.cli import toolkit, write_config
from tests.support.deployments import config_of
from toolkit.cli.gateway import warn_of_silent
from toolkit.errors import UsageError
from toolkit.workflows.gateway import is_listening, server_address
from toolkit.workflows.rollout import rollout_maker


@pytest.mark.parametrize(
    ("kind", "written"),
    [
        ("torch", "127.0.0.1:8001"),
        ("torch", "grpc://127.0.0.1:8001/"),
        ("vllm", "127.0.0.1:8001"),
        ("vllm", "http://127.0.0.1:8001/v1"),
        ("vllm", "http://127.0.0.1:8001/"),
    ],
)
def test_an_address_is_host_and_port(kind: str, written: str) -> None:
    assert server_address(config_of(kind), written) == "127.0.0.1:8001"


@pytest.mark.parametrize(
    ("kind", "written", "words"),
    [
        ("torch", "http://127.0.0.1:8000", "over grpc, not http"),
        ("vllm", "grpc://127.0.0.1:8000", "over http, not grpc"),
        ("torch", "localhost", "host:port"),
        ("torch", "localhost:99999", "host:port"),
        ("torch", "localhost:0", "host:port"),
        ("torch", ":8000", "host:port"),
        ("vllm", "http://host:80/other", "host:port"),
    ],
)
def test_what_cannot_be_an_address_is_refused(kind: str, written: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        server_address(config_of(kind), written)


def test_a_server_that_does_not_answer_is_told(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        there = f"127.0.0.1:{server.getsockname()[1]}"
        warn_of_silent(there, "127.0.0.1:9")
        assert is_listening(there)
    assert not is_listening(there)
    told = capsys.readouterr()
    assert "no server answers at 127.0.0.1:9" in told.err + told.out
    assert there not in told.err + told.out


@pytest.mark.parametrize("key", [None, "a-key-of-sixteen-characters"])
def test_the_warning_of_an_open_listener_asks_for_keys_where_there_are_none(
    tiny_pair: tuple[Path, Path], tmp_path: Path, key: str | None
) -> None:
    config = write_config(tmp_path, tiny_pair)
    environment = {} if key is None else {"TOOLKIT_API_KEYS": key}
    with socket.create_server(("127.0.0.1", 0)) as other:  # so that it cannot start
        port = other.getsockname()[1]
        done = toolkit(
            *("gateway", str(config), "127.0.0.1:9", "--set", f"gateway.port={port}"),
            *("--set", "gateway.host=0.0.0.0"),
            cwd=tmp_path,
            **environment,
        )
    assert done.returncode == 3
    assert "no server answers at 127.0.0.1:9" in done.stderr
    assert ("set API keys" in done.stderr) == (key is None)
    assert "put TLS before it" in done.stderr


def test_a_kind_without_a_switch_needs_a_baseline_of_its_own(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--baseline"):
        rollout_maker(config_of("vllm"), "127.0.0.1:1", "plain", tmp_path / "journal.jsonl")


def test_a_fresh_roll_out_that_cannot_listen_leaves_the_older_one(
    tiny_pair: tuple[Path, Path], tmp_path: Path
) -> None:
    config = write_config(tmp_path, tiny_pair)
    journal = tmp_path / "build" / "rollouts" / "tiny" / "journal.jsonl"
    journal.parent.mkdir(parents=True)
    journal.write_text("the older one")
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        done = toolkit(
            *("rollout", "run", str(config), "127.0.0.1:9", "--fresh"),
            *("--set", f"gateway.port={port}"),
            cwd=tmp_path,
        )
    assert done.returncode == 3
    assert f"cannot listen on 127.0.0.1:{port}" in done.stderr
    assert [file.name for file in journal.parent.iterdir()] == ["journal.jsonl"]
    assert journal.read_text() == "the older one"
