"""Who may call what: the key, and listeners that others reach. No server is needed; a real one is
asked in `process/test_server.py`.
"""

from __future__ import annotations

import pytest

from toolkit.errors import UsageError
from toolkit.triton.access import KEY_VARIABLE, admin_key, open_listeners, restrictions


def test_the_operators_key_is_taken_and_else_every_start_has_its_own() -> None:
    assert admin_key({KEY_VARIABLE: "0123456789abcdef"}) == "0123456789abcdef"
    first, second = admin_key({}), admin_key({KEY_VARIABLE: ""})
    assert first != second
    assert len(first) == len(second) == 32


@pytest.mark.parametrize(
    "key", ["short", "with,comma0123456789", "with:colon0123456789", "a b" * 9]
)
def test_a_key_that_cannot_be_used_is_refused_without_being_told(key: str) -> None:
    with pytest.raises(UsageError, match="at least 16 of") as refused:
        admin_key({KEY_VARIABLE: key})
    assert key not in str(refused.value)


def test_both_protocols_ask_for_it() -> None:
    apis = "shared-memory,model-repository,statistics,trace,logging:toolkit-admin-key=k"
    assert restrictions("k") == [
        f"--http-restricted-api={apis}",
        f"--grpc-restricted-protocol={apis}",
    ]


@pytest.mark.parametrize(
    ("arguments", "open_ones"),
    [
        (["--http-address=127.0.0.1", "--grpc-address=::1", "--metrics-address=localhost"], []),
        (["--http-address=127.0.0.1", "--http-address=0.0.0.0"], ["--http-address=0.0.0.0"]),
        (["--http-address=0.0.0.0", "--http-address", "127.0.0.1"], []),
        (["--metrics-address", "gpu7", "--http-port=1"], ["--metrics-address=gpu7"]),
    ],
)
def test_what_listens_beyond_loopback_is_found(arguments: list[str], open_ones: list[str]) -> None:
    assert open_listeners(["tritonserver", *arguments]) == open_ones
