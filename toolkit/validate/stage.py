"""The validate stage: a running endpoint and the gates of the YAML in, a report with a verdict out.

Nothing here starts a server or an engine: the endpoint, its counters and the reference model come in as arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from toolkit.config.schema import ValidationConfig
from toolkit.interfaces import Progress
from toolkit.records import CompiledEngine, Quality, StageCost, ValidationReport
from toolkit.validate.parity import Reference

if TYPE_CHECKING:
    from toolkit.client import RequestTiming

__all__ = ["VERSION", "Endpoint", "Reference", "validate"]

VERSION = 1


class Endpoint(Protocol):
    """Where requests go: `toolkit.client.Client` is one. overrides are fields of `toolkit.client.Options`."""

    def measure(self, prompts: Iterable[str], **overrides: Any) -> list[RequestTiming]: ...


def validate(
    endpoint: Endpoint,
    config: ValidationConfig,
    *,
    name: str,
    max_draft_len: int,
    acceptance: str,
    reference: Reference,
    quality: Quality,
    engines: Mapping[str, CompiledEngine],
    environment: Mapping[str, str],
    counters: Callable[[], Mapping[str, float]] | None = None,
    stages: Sequence[StageCost] = (),
    progress: Progress | None = None,
) -> ValidationReport:
    """Measure and judge a served deployment. Takes minutes: (rounds + 1) x prompts x max_tokens, twice, in both arms.

    endpoint: a started server's client, `Client(server.grpc_url)`. counters: reads the server's own counters, for instance
    `lambda: read_counters(server.metrics_url)` of `toolkit.validate.counters`; None leaves them out, which is reported.
    max_draft_len 0: the deployment does not speculate, and only the plain arm is measured. acceptance: the deployment's
    `speculation.acceptance`. environment: versions and hardware, name -> text. engines: by role, "target" and "draft".
    config.prompts is read here (JSON Lines with a `prompt` per line, already resolved to a readable path).

    Raises UsageError for a prompts file that cannot be used, StageError when the endpoint refuses or breaks.
    """
    raise NotImplementedError
