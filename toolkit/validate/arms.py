"""Run the two arms against the endpoint: the same prompts, back to back, in random order, round
after round.

Requests are sent one at a time, since the speed that a single reader sees is compared. Within a
pair a coin decides which arm goes first, and every round has its own order of prompts. So drift of
the machine affects both arms alike.

If speculation is fixed when the server starts, and two servers do not fit on the machine, each arm
has its own server and they take turns (ABAB): start, warm-up, one round of one arm at every
temperature, then the other arm's start. Drift slower than a turn still affects both arms alike.
Drift within a turn does not, so such a comparison needs more rounds.
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
    "StreamShift",
    "run_rounds",
    "run_turns",
]

ARMS: tuple[SentArm, ...] = ("plain", "speculative")
WARM_UP_PROMPTS = 2


class Endpoint(Protocol):
    """Where requests go, such as a `toolkit.client.Client`. overrides: fields of
    `toolkit.client.Options`.
    """

    def measure(self, prompts: Iterable[str], **overrides: Any) -> list[RequestTiming]: ...


@dataclass(frozen=True, slots=True)
class Alternating:
    """One endpoint per arm, of which only one runs at a time. start: ends the other arm's server
    and starts this arm's.
    """

    start: Callable[[SentArm], Endpoint]


@dataclass
class StreamShift:
    """Called with each server that was started, if servers begin every start with the same random
    numbers: it draws one token more than at the start before. Without it the sampled rounds of two
    starts would repeat each other, and no test could take them for independent.
    """

    prompt: str
    temperature: float
    starts: int = 0

    def __call__(self, endpoint: Endpoint) -> None:
        self.starts += 1
        endpoint.measure([self.prompt] * self.starts, max_tokens=1, temperature=self.temperature)


@dataclass
class Sender:
    """Sends one request at a time and remembers all of them for the counters. If one fails, the
    error names its prompt.

    plain_by_request: the endpoint decodes plainly if a request states the draft length 0. If not,
    it does so only where no speculation is served. shift: for servers whose starts repeat their
    random numbers.
    """

    endpoint: Endpoint | Alternating
    max_tokens: int
    on_sent: Callable[[], None] = lambda: None
    hint: str = "Fix or remove this line of the prompts file."  # for a refused request
    sent: list[RequestTiming] = field(default_factory=list)
    plain_by_request: bool = True
    shift: StreamShift | None = None
    # The arm of an alternating endpoint that runs now.
    _running: tuple[SentArm, Endpoint] | None = None

    def turn_to(self, arm: SentArm) -> Endpoint:
        """Return the endpoint of this arm, and start it if the other arm's is running."""
        if not isinstance(self.endpoint, Alternating):
            return self.endpoint
        if self._running is None or self._running[0] != arm:
            self._running = arm, self.endpoint.start(arm)
            if self.shift is not None:
                self.shift(self._running[1])
        return self._running[1]

    def send(self, index: int, prompt: str, arm: SentArm, **options: Any) -> RequestTiming:
        """Send one request. arm: plain | speculative | verify (drafts are verified and discarded).

        Raises StageError if the request is not answered to its end, or tokens are missing.
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
        """Send a request that the server may refuse, and return its answer or its refusal."""
        from toolkit.client import RequestRefused, ServerUnavailable

        if arm == "plain" and self.plain_by_request and not isinstance(self.endpoint, Alternating):
            options["num_draft_tokens"] = 0
        elif arm == "verify":
            options["acceptance"] = "verify_only"
        where = _place(index, arm)
        try:
            endpoint = self.turn_to(arm)
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
                    "The server contradicts itself, so no figure per token can be trusted; package"
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
    """The requests of each arm as [round][prompt], in the prompts' order, not the sending order."""

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
    """Measure `rounds` rounds, and up to max_rounds while `undecided` returns true. options are
    sent with every request.
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
    """Measure rounds with an alternating endpoint. One turn covers all temperatures, since every
    turn begins with the start of a server.
    """
    generator = random.Random(seed)
    measured = {temperature: Measured() for temperature in temperatures}
    made = 0
    while made < rounds or (made < max_rounds and any(map(undecided, measured.values()))):
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
