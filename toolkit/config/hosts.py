"""Names and addresses that a server listens on."""

from __future__ import annotations

import ipaddress

__all__ = ["OPEN_LISTENER", "is_loopback"]

# What is said of a server that listens on another address.
OPEN_LISTENER = (
    "everyone who reaches {address} can use the models, without a password and unencrypted"
)


def is_loopback(host: str) -> bool:
    """Whether only programs on this machine reach what listens on this name or address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
