"""OpenAI's protocol in front of a served deployment of any kind: `gateway_of(...)`."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from toolkit.config.schema import DeploymentConfig
from toolkit.errors import UsageError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from toolkit.gateway.app import Gateway
    from toolkit.gateway.arms import Arms
    from toolkit.gateway.backends import Backend

__all__ = ["backend_of", "gateway_of", "is_listening", "one_arm", "server_address"]

CONNECT_S = 2.0
PORTS = {"grpc": "Triton's gRPC, which toolkit serve prints", "http": "vLLM's own server"}


def _target(config: DeploymentConfig) -> Path:
    """The folder of the target's checkpoint, which is never downloaded here."""
    from toolkit.checkpoints.hub import fetch

    target = config.target
    if target.hub_id is None:
        return target.checkpoint
    return fetch(target.hub_id, revision=target.revision, download=False)


def server_address(config: DeploymentConfig, written: str) -> str:
    """host:port of an address as users write it. Raises UsageError for what cannot be one."""
    from toolkit.client import MAX_PORT

    scheme, rest = "http" if config.vllm_engine is not None else "grpc", written
    if "://" in written:
        stated, rest = written.split("://", 1)
        if stated != scheme:
            raise UsageError(
                f"the gateway calls this deployment over {scheme}, not {stated}",
                where=written,
                hint=f"Give host:port of {PORTS[scheme]}.",
            )
    rest = rest.rstrip("/").removesuffix("/v1")
    host, _, port = rest.rpartition(":")
    if not host or "/" in rest or not port.isdecimal() or not 0 < int(port) <= MAX_PORT:
        raise UsageError(
            "not an address of a server", where=written, hint=f"Give host:port of {PORTS[scheme]}."
        )
    return rest


def is_listening(address: str) -> bool:
    """Whether something takes connections at host:port."""
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_S):
            return True
    except OSError:
        return False


def backend_of(config: DeploymentConfig, url: str) -> Backend:
    """The server at this address: host:port of gRPC, or of HTTP for vLLM. To be called in the event
    loop that uses it.
    """
    from toolkit.gateway.backends import TritonBackend, VllmBackend

    timeout_s = config.gateway.request_timeout_s
    if config.vllm_engine is not None:
        return VllmBackend(url, config.name, timeout_s=timeout_s)
    return TritonBackend(url, timeout_s=timeout_s)


def one_arm(config: DeploymentConfig, url: str) -> Callable[[], Arms]:
    """Everything goes to the server at this address."""
    from toolkit.gateway.arms import SERVED, Arm, OneArm

    address = server_address(config, url)
    return lambda: OneArm(Arm(SERVED, backend_of(config, address)))


def gateway_of(config: DeploymentConfig, make_arms: Callable[[], Arms]) -> Callable[[], Gateway]:
    """What makes the gateway in its event loop. All that can be wrong with keys and template is
    found before: raises UsageError, CheckpointError.
    """
    from toolkit.checkpoints.chat import ChatTemplate
    from toolkit.gateway.app import Gateway
    from toolkit.gateway.guard import Guard, read_keys

    settings = config.gateway
    checkpoint, keys = _target(config), read_keys(os.environ)
    template = ChatTemplate.load(checkpoint, file=settings.chat_template)

    def make() -> Gateway:
        return Gateway(
            settings,
            config.name,
            make_arms(),
            Guard(keys, settings.requests_per_minute, settings.max_requests, time.monotonic),
            None if template is None else template.render,
            _speller(checkpoint),
        )

    return make


def _speller(checkpoint: Path) -> Callable[[int], str]:
    """The text of a token. The tokenizer is read when it is asked for first."""

    @lru_cache(1)
    def tokenizer() -> Tokenizer:
        from toolkit.checkpoints.tokenizer import load_tokenizer

        return load_tokenizer(checkpoint)

    def spell(token: int) -> str:
        text: str = tokenizer().decode([token], skip_special_tokens=False)
        return text

    return spell
