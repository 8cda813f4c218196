"""Run the two arms against the endpoint: the same prompts, back to back, in random order, round
after round.

One request at a time: what is compared is a single reader's speed. Within a pair a coin decides
which arm goes first, and every round has its own order of prompts, so that drift of the machine
falls on both arms alike.

Where speculation is decided when the server starts, and two servers do not fit, each arm is a
server of its own and they take turns (ABAB): a start, a warm-up, a round of one arm at every
temperature, and the other arm's start. Drift slower than a turn still falls on both; within a turn
it does not, so such a comparison wants more rounds.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from toolkit.errors import StageError
from toolkit.words import SentArm

if TYPE_CHECKING:
    from toolkit.client import RequestTiming

__all__ = [
    "ARMS",
    "WARM_UP_PROMPTS",
    "Alternating",
    "Endpoint",
    "Measured",
    "Sender",
    "run_rounds",
    "run_turns",
]

ARMS: tuple[SentArm, ...] = ("plain", "speculative")
WARM_UP_PROMPTS = 2


class Endpoint(Protocol):
    """Where requests go: `toolkit.client.Client` is one. overrides are fields of
    `toolkit.client.Options`.
    """

    def measure(self, prompts: Iterable[str], **overrides: Any) -> list[RequestTiming]: ...


@dataclass(frozen=True, slots=True)
class Alternating:
    """An endpoint per arm, of which one is there at a time. start: ends the other arm's server
    and starts this one's.
    """

    start: Callable[[SentArm], Endpoint]


@dataclass
class Sender:
    """Sends one request at a time, remembers all of them for the counters, and names the prompt
    where one fails.

    draft_lens: a request may state its draft length. Where none may, the plain arm is what is
    served without speculation.
    """

    endpoint: Endpoint | Alternating
    max_tokens: int
    on_sent: Callable[[], None] = lambda: None
    hint: str = "Fix or remove this line of the prompts file."  # of a request that is refused
    sent: list[RequestTiming] = field(default_factory=list)
    draft_lens: bool = True
    _running: tuple[SentArm, Endpoint] | None = (
        None  # of an alternating endpoint: the arm that is there now
    )

    def turn_to(self, arm: SentArm) -> Endpoint:
        """The endpoint that answers for this arm, started where it is not the one that is there."""
        if not isinstance(self.endpoint, Alternating):
            return self.endpoint
        if self._running is None or self._running[0] != arm:
            self._running = arm, self.endpoint.start(arm)
        return self._running[1]

    def send(self, index: int, prompt: str, arm: SentArm, **options: Any) -> RequestTiming:
        """arm: plain | speculative | verify (drafts are verified and thrown away).

        Raises StageError when the request is not answered to its end, or its tokens are not all
        there.
        """
        answer = self.ask(index, prompt, arm, **options)
        if isinstance(answer, str):
            raise StageError(
                "validate",
                f"the server refused a request: {answer}",
                where=_place(index, arm),
                hint=self.hint,
            )
        return answer

    def ask(self, index: int, prompt: str, arm: SentArm, **options: Any) -> RequestTiming | str:
        """The same of a request that the server may refuse: its words then."""
        from toolkit.client import RequestRefused, ServerUnavailable

        if arm == "plain" and self.draft_lens and not isinstance(self.endpoint, Alternating):
            options["num_draft_tokens"] = 0
        elif arm == "verify":
            options["acceptance"] = "verify_only"
        where = _place(index, arm)
        endpoint = self.turn_to(arm)
        try:
            (timing,) = endpoint.measure([prompt], max_tokens=self.max_tokens, **options)
        except RequestRefused as error:
            return str(error)
        except ServerUnavailable as error:
            raise StageError(
                "validate",
                f"the server went away: {error}",
                where=where,
                hint="The end of the server's log says why.",
            ) from error
        if timing.output_tokens is None or timing.output_tokens != len(timing.token_ids):
            raise StageError(
                "validate",
                f"{timing.output_tokens} output tokens were counted and {len(timing.token_ids)}"
                " token ids returned",
                where=where,
                hint=(
                    "Validation needs a model that returns output_ids and num_output_tokens;"
                    " package the repository again."
                ),
            )
        if (streamed := sum(tokens or 0 for _, tokens in timing.chunks)) != timing.output_tokens:
            raise StageError(
                "validate",
                f"{streamed} output tokens were counted while they came and {timing.output_tokens}"
                " at the end",
                where=where,
                hint=(
                    "The server contradicts itself, so nothing per token could be believed; package"
                    " the repository again."
                ),
            )
        self.sent.append(timing)
        self.on_sent()
        return timing


def _place(index: int, arm: SentArm) -> str:
    return f"prompt {index + 1}, {arm} arm"


@dataclass
class Measured:
    """[round][prompt] of each arm, in the prompts' order whatever order they were sent in."""

    plain: list[list[RequestTiming]] = field(default_factory=list)
    speculative: list[list[RequestTiming]] = field(default_factory=list)


def run_rounds(
    sender: Sender,
    prompts: Sequence[str],
    *,
    arms: Sequence[SentArm] = ARMS,
    rounds: int,
    max_rounds: int,
    undecided: Callable[[Measured], bool],
    seed: int,
    options: dict[str, Any],
) -> Measured:
    """Measure `rounds` rounds, and more while `undecided` and below max_rounds. options go with
    every request.
    """
    generator = random.Random(seed)
    measured = Measured()
    while len(measured.plain) < rounds or (
        len(measured.plain) < max_rounds and undecided(measured)
    ):
        answers: dict[SentArm, dict[int, RequestTiming]] = {arm: {} for arm in arms}
        for index in generator.sample(range(len(prompts)), len(prompts)):
            for arm in generator.sample(list(arms), len(arms)):
                answers[arm][index] = sender.send(index, prompts[index], arm, **options)
        for arm in arms:
            getattr(measured, arm).append([answers[arm][index] for index in range(len(prompts))])
    return measured


def run_turns(
    sender: Sender,
    prompts: Sequence[str],
    *,
    rounds: int,
    max_rounds: int,
    undecided: Callable[[Measured], bool],
    seed: int,
    temperatures: Sequence[float],
) -> dict[float, Measured]:
    """The same of an alternating endpoint, at all temperatures in one turn, since a turn begins
    with a start.
    """
    generator = random.Random(seed)
    measured = {temperature: Measured() for temperature in temperatures}
    made = 0
    while made < rounds or (made < max_rounds and any(undecided(one) for one in measured.values())):
        for arm in ARMS:
            for index, prompt in enumerate(prompts[:WARM_UP_PROMPTS]):
                for temperature in temperatures:
                    sender.send(index, prompt, arm, temperature=temperature)
            for temperature in temperatures:
                answers: dict[int, RequestTiming] = {}
                for index in generator.sample(range(len(prompts)), len(prompts)):
                    answers[index] = sender.send(
                        index, prompts[index], arm, temperature=temperature
                    )
                getattr(measured[temperature], arm).append(
                    [answers[index] for index in range(len(prompts))]
                )
        made += 1
    return measured
