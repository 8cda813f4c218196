"""Run the two arms against the endpoint: the same prompts, back to back, in random order, round after round.

One request at a time: what is compared is a single reader's speed. Within a pair a coin decides which arm goes first, and every
round has its own order of prompts, so that drift of the machine falls on both arms alike.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from toolkit.errors import StageError

if TYPE_CHECKING:
    from toolkit.client import RequestTiming

__all__ = ["ARMS", "Endpoint", "Measured", "Sender", "run_rounds"]

ARMS = ("plain", "speculative")


class Endpoint(Protocol):
    """Where requests go: `toolkit.client.Client` is one. overrides are fields of `toolkit.client.Options`."""

    def measure(self, prompts: Iterable[str], **overrides: Any) -> list[RequestTiming]: ...


@dataclass
class Sender:
    """Sends one request at a time, remembers all of them for the counters, and names the prompt where one fails."""

    endpoint: Endpoint
    max_tokens: int
    on_sent: Callable[[], None] = lambda: None
    sent: list[RequestTiming] = field(default_factory=list)

    def send(self, index: int, prompt: str, arm: str, **options: Any) -> RequestTiming:
        """arm: plain | speculative | verify (drafts are verified and thrown away).

        Raises StageError when the request is not answered, or its tokens are not all there.
        """
        from toolkit.client import RequestRefused, ServerUnavailable

        if arm == "plain":
            options["num_draft_tokens"] = 0
        elif arm == "verify":
            options["acceptance"] = "verify_only"
        where = f"prompt {index + 1}, {arm} arm"
        try:
            (timing,) = self.endpoint.measure([prompt], max_tokens=self.max_tokens, **options)
        except RequestRefused as error:
            raise StageError(
                "validate",
                f"the server refused a request: {error}",
                where=where,
                mend="Mend or remove this line of the prompts file.",
            ) from error
        except ServerUnavailable as error:
            raise StageError(
                "validate", f"the server went away: {error}", where=where, mend="The end of the server's log says why."
            ) from error
        if timing.output_tokens is None or timing.output_tokens != len(timing.token_ids):
            raise StageError(
                "validate",
                f"{timing.output_tokens} output tokens were counted and {len(timing.token_ids)} token ids returned",
                where=where,
                mend="Validation needs a model that returns output_ids and num_output_tokens; package the repository again.",
            )
        self.sent.append(timing)
        self.on_sent()
        return timing


@dataclass
class Measured:
    """[round][prompt] of each arm, in the prompts' order whatever order they were sent in."""

    plain: list[list[RequestTiming]] = field(default_factory=list)
    speculative: list[list[RequestTiming]] = field(default_factory=list)


def run_rounds(
    sender: Sender,
    prompts: Sequence[str],
    *,
    arms: Sequence[str] = ARMS,
    rounds: int,
    max_rounds: int,
    undecided: Callable[[Measured], bool],
    seed: int,
    options: dict[str, Any],
) -> Measured:
    """Measure `rounds` rounds, and more while `undecided` and below max_rounds. options go with every request."""
    generator = random.Random(seed)
    measured = Measured()
    while len(measured.plain) < rounds or (len(measured.plain) < max_rounds and undecided(measured)):
        answers: dict[str, dict[int, RequestTiming]] = {arm: {} for arm in arms}
        for index in generator.sample(range(len(prompts)), len(prompts)):
            for arm in generator.sample(list(arms), len(arms)):
                answers[arm][index] = sender.send(index, prompts[index], arm, **options)
        for arm in arms:
            getattr(measured, arm).append([answers[arm][index] for index in range(len(prompts))])
    return measured
