"""Which served deployment answers a request: an `Arm`, and who chooses among several."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Protocol

from toolkit.client import Options, Statistics
from toolkit.gateway.backends import Backend

__all__ = ["SERVED", "Arm", "Arms", "Choice", "Finished", "OneArm"]

SERVED = "served"  # the name of the only arm


@dataclass(frozen=True, slots=True)
class Arm:
    """One way to answer. is_plain: requests decode without drafts, unless they say otherwise."""

    name: str
    backend: Backend
    is_plain: bool = False

    def options(self, options: Options) -> Options:
        """What is sent to this arm for a client's options."""
        if not self.is_plain or options.num_draft_tokens is not None:
            return options
        return dataclasses.replace(options, num_draft_tokens=0)


@dataclass(frozen=True, slots=True)
class Choice:
    """arm: answers the client. shadow: gets a copy whose answer nobody sees; None: no copy."""

    arm: Arm
    shadow: Arm | None = None


@dataclass(frozen=True, slots=True)
class Finished:
    """An answered request, as seen from the gateway. Times in ns from its arrival.

    ticket: as `Arms.choose` was given it. status: of HTTP; None: the client left. ttft_ns: None of
    an answer that does not stream. text: None where nobody compares it. gaps_ns: between chunks.
    """

    ticket: str
    request_id: str
    arm: str
    status: int | None
    ttft_ns: int | None
    e2e_ns: int
    gaps_ns: tuple[int, ...]
    statistics: Statistics
    text: str | None = None
    is_shadow: bool = False
    error: str | None = None
    is_unavailable: bool = False  # the server cannot be reached, or has failed

    @property
    def is_error(self) -> bool:
        """Whether the server failed; a refused request is the client's fault."""
        return self.status is not None and self.status >= 500


class Arms(Protocol):
    """Chooses the arm of a request, and is told how it went. Both are called in the event loop, and
    may not wait.
    """

    @property
    def all(self) -> tuple[Arm, ...]: ...

    @property
    def open(self) -> tuple[Arm, ...]:
        """The arms that may answer a client now."""
        ...

    @property
    def needed(self) -> tuple[Arm, ...]:
        """The arms without which clients are not served."""
        ...

    def choose(self, session: str, ticket: str, prompt: str | None) -> Choice:
        """The arm of a request. ticket: its own, since clients choose request ids. prompt: all that
        a greedy request asks; None: it is sampled.
        """
        ...

    def finished(self, request: Finished) -> None: ...

    def summary(self) -> dict[str, Any] | None:
        """The state of a roll-out, as JSON; None if there is none."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class OneArm:
    """Everything goes to one deployment."""

    arm: Arm

    @property
    def all(self) -> tuple[Arm, ...]:
        return (self.arm,)

    @property
    def open(self) -> tuple[Arm, ...]:
        return (self.arm,)

    @property
    def needed(self) -> tuple[Arm, ...]:
        return (self.arm,)

    def choose(self, session: str, ticket: str, prompt: str | None) -> Choice:
        return Choice(self.arm)

    def finished(self, request: Finished) -> None: ...

    def summary(self) -> None:
        """No roll-out runs."""

    def close(self) -> None: ...
