"""Who may send how much: API keys, requests per minute, requests at a time.

A refused request costs next to nothing, and says when to come again. Keys come from the environment
and are never printed; logs and limits know a key by the beginning of its digest.
"""

from __future__ import annotations

import hashlib
import hmac
import math
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from toolkit.errors import UsageError
from toolkit.gateway.protocol import Refusal

__all__ = ["KEYS_VARIABLE", "Guard", "read_keys"]

KEYS_VARIABLE = "TOOLKIT_API_KEYS"
KEY = re.compile(r"[\x21-\x2b\x2d-\x7e]{16,}")  # visible ASCII without the comma
NAME_DIGITS = 8
MAX_RETRY_S = 60
KEPT_TIMES = 64


def read_keys(environment: Mapping[str, str]) -> tuple[str, ...]:
    """The API keys, separated by commas; none if the variable is not set.

    Raises UsageError for keys that cannot be used. The message does not hold them.
    """
    stated = environment.get(KEYS_VARIABLE)
    if stated is None:
        return ()
    keys = tuple(key.strip() for key in stated.split(",") if key.strip())
    if not keys or not all(KEY.fullmatch(key) for key in keys):
        raise UsageError(
            f"{KEYS_VARIABLE} has to be keys of at least 16 visible ASCII characters, separated by"
            " commas",
            hint=f"export {KEYS_VARIABLE}=$(openssl rand -hex 24), or unset it to need no key.",
        )
    return keys


@dataclass
class Guard:
    """Lets requests in, or raises Refusal.

    keys: empty: everybody may send. requests_per_minute: per key, or of all together where there
    are none; None: no limit. max_requests: at a time. now: seconds of a steady clock.
    """

    keys: tuple[str, ...]
    requests_per_minute: int | None
    max_requests: int
    now: Callable[[], float]
    running: int = 0
    _left: dict[str, tuple[float, float]] = field(default_factory=dict)  # name -> (requests, when)
    _times_s: list[float] = field(default_factory=list)  # of the latest requests

    def name(self, authorization: str | None) -> str:
        """Whose request it is, as logs may say it. Raises Refusal without a valid key."""
        if not self.keys:
            return "-"
        scheme, _, sent = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not sent.strip():
            raise Refusal(
                "an API key is needed, in the header `Authorization: Bearer KEY`",
                status=401,
                code="missing_api_key",
            )
        # Every key is compared, each in constant time, so that the time tells nothing.
        matches = [hmac.compare_digest(sent.strip().encode(), key.encode()) for key in self.keys]
        if not any(matches):
            raise Refusal("the API key is not valid", status=401, code="invalid_api_key")
        key = self.keys[matches.index(True)]
        return hashlib.sha256(key.encode()).hexdigest()[:NAME_DIGITS]

    def count(self, name: str) -> None:
        """Take one request of the minute's. A minute's requests may come at once; they come back
        evenly. Raises Refusal.
        """
        if self.requests_per_minute is None:
            return
        per_s, now = self.requests_per_minute / 60, self.now()
        left, since = self._left.get(name, (float(self.requests_per_minute), now))
        left = min(self.requests_per_minute, left + (now - since) * per_s)
        if left < 1:
            self._left[name] = left, now
            raise Refusal(
                f"more than {self.requests_per_minute} requests in a minute",
                status=429,
                code="rate_limit_exceeded",
                retry_after_s=math.ceil((1 - left) / per_s),
            )
        self._left[name] = left - 1, now

    @contextmanager
    def place(self) -> Iterator[None]:
        """A place among the requests that run at the same time. Raises Refusal if all are taken."""
        if self.running >= self.max_requests:
            raise Refusal(
                f"{self.running} requests are running, and no more are taken",
                status=503,
                code="overloaded",
                retry_after_s=self.retry_after_s(),
            )
        self.running += 1
        started = self.now()
        try:
            yield
        finally:
            self.running -= 1
            self._times_s = [*self._times_s[1 - KEPT_TIMES :], self.now() - started]

    def retry_after_s(self) -> int:
        """When a place should be free: after half of the time that a request takes, by the median
        of the latest.
        """
        if not self._times_s:
            return 1
        median = sorted(self._times_s)[len(self._times_s) // 2]
        return max(1, min(MAX_RETRY_S, math.ceil(median / 2)))
