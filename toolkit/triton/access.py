"""Who may call what of a tritonserver.

Clients need inference, metadata, configuration and health. What else Triton offers is for its
operator: shared memory, the model repository, statistics, tracing and logging. With these a
stranger loads models, reads the memory of other requests or fills the disk, and they are a way into
the server of NVIDIA's bulletin 5687. So they ask for a key, in a header (Triton's
docs/customization_guide/inference_protocols.md, "Limit Endpoint Access"). The key is the
operator's, from the environment; if there is none it is random, and nobody knows it. The metrics
port has no such key.

Triton takes the key as an argument only. So users of the same machine can see it in the list of
processes, unless /proc is mounted with hidepid.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping, Sequence

from toolkit.config.hosts import OPEN_LISTENER, is_loopback
from toolkit.errors import UsageError

__all__ = [
    "KEY_CHARACTERS",
    "KEY_HEADER",
    "KEY_HINT",
    "KEY_VARIABLE",
    "LISTENERS",
    "LISTENER_WARNING",
    "MIN_KEY_CHARACTERS",
    "RESTRICTED",
    "UNUSABLE_KEY",
    "admin_key",
    "open_listeners",
    "restrictions",
]

KEY_VARIABLE = "TOOLKIT_ADMIN_KEY"
KEY_HEADER = "toolkit-admin-key"  # over HTTP; over gRPC triton-grpc-protocol-toolkit-admin-key
RESTRICTED = "shared-memory,model-repository,statistics,trace,logging:" + KEY_HEADER
OPTIONS = ("http-restricted-api", "grpc-restricted-protocol")
# No character that has a meaning in Triton's argument, and nothing that can be guessed.
KEY_CHARACTERS = "A-Za-z0-9_.-"  # as a class of a regular expression, and of a pattern of the shell
MIN_KEY_CHARACTERS = 16
KEY = re.compile(f"[{KEY_CHARACTERS}]{{{MIN_KEY_CHARACTERS},}}")
UNUSABLE_KEY = (
    f"{KEY_VARIABLE} cannot be a key: it has to have at least {MIN_KEY_CHARACTERS} of A-Z, a-z,"
    " 0-9, _, . and -"
)
KEY_HINT = f"export {KEY_VARIABLE}=$(openssl rand -hex 16), or unset it for a random one."
LISTENERS = ("--http-address", "--grpc-address", "--metrics-address")
# What is said of each listener beyond loopback.
LISTENER_WARNING = (
    OPEN_LISTENER.format(address="this address") + "; put a proxy or a firewall before it"
)


def admin_key(environment: Mapping[str, str]) -> str:
    """The operator's key, or a random one. Raises UsageError for a key that cannot be used; the
    message does not hold it.
    """
    key = environment.get(KEY_VARIABLE) or secrets.token_hex(16)
    if KEY.fullmatch(key) is None:
        raise UsageError(UNUSABLE_KEY, hint=KEY_HINT)
    return key


def restrictions(key: str) -> list[str]:
    """The arguments of tritonserver that ask for the key."""
    return [f"--{option}={RESTRICTED}={key}" for option in OPTIONS]


def open_listeners(command: Sequence[str]) -> list[str]:
    """The arguments of a tritonserver command that make it listen beyond loopback. Of an argument
    that comes twice, Triton takes the last; the value may be a word of its own.
    """
    addresses = {}
    for argument, following in zip(command, [*command[1:], ""], strict=True):
        option, separator, value = argument.partition("=")
        if option in LISTENERS:
            addresses[option] = value if separator else following
    return [f"{option}={value}" for option, value in addresses.items() if not is_loopback(value)]
