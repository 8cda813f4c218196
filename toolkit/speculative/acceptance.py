"""Which draft tokens the target keeps, and which token follows them.

`match` and `reject` are pure functions: the two ways to compare drafts with the target. The classes
below use them. Each object holds the state of one request: it proposes from the draft's logits and
decides from the target's.

    Greedy       temperature 0: the output is the plain greedy output
    Rejection    speculative sampling: the output is distributed exactly as the target's own
    Coupled      draft and target share their noise at each position: with a seed, the output is
                 the same whatever the draft, the draft length or the batch
    SampleMatch  the target samples at each position, and a draft is accepted while it equals that
                 sample; this is what TensorRT-LLM does by default
    VerifyOnly   drafts are proposed, verified and all thrown away: plain decoding on the
                 speculative path, which shows which of the two is at fault

Plain decoding is the same decision without drafts. The logits of the draft and of the target go
through the same penalties, temperature and filters. Inside a block, the penalties at a position
also count the draft tokens before it.
"""

from __future__ import annotations

import dataclasses
import random
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from toolkit.errors import RequestError
from toolkit.interfaces import GenerationRequest, Sampling
from toolkit.speculative.sampling import (
    MIN_TEMPERATURE,
    ExponentialRace,
    Floats,
    Penalties,
    draw,
    normalised,
    weights,
)
from toolkit.words import SAMPLING_RULES, AcceptanceChoice, RuntimeRule

__all__ = [
    "RULES",
    "BurstingRule",
    "Coupled",
    "Greedy",
    "Numbers",
    "Rejection",
    "Rule",
    "RuleFactory",
    "SampleMatch",
    "VerifyOnly",
    "choose_rule",
    "match",
    "reject",
]


# How many steps an engine is given numbers for, and how much noise: 32 positions of a vocabulary of
# 2,048. Noise takes longer to make, and a burst of a model with a large vocabulary has few steps.
FORESEEN_STEPS, FORESEEN_NOISE = 16, 2**16


def match(drafts: Sequence[int], choose: Callable[[int], int]) -> tuple[int, int]:
    """Accept drafts while they equal the target's own choices.

    Returns (accepted, the target's choice after the accepted drafts).

    choose(i) returns what the target chooses after drafts[:i]. It is called in order, and not
    beyond the first draft that differs. The output is the same as without drafts, since every
    choice that is used follows a prefix that the target chose itself.
    """
    for index, draft in enumerate(drafts):
        choice = choose(index)
        if choice != draft:
            return index, choice
    return len(drafts), choose(len(drafts))


def reject(
    drafts: Sequence[int],
    draft_probs: Sequence[Floats],
    target_probs: Floats,
    uniforms: Sequence[float],
) -> tuple[int, int]:
    """Speculative sampling. Returns (accepted, the recovered or bonus token).

    drafts [k], each drawn from its row; draft_probs k rows [vocab]; target_probs [k + 1, vocab];
    rows sum to 1; uniforms [k + 1] in [0, 1). Draft i is accepted with probability
    min(1, target/draft) at that token. At the first rejection, the recovered token is drawn from
    max(0, target - draft), renormalised. If all drafts are accepted, the bonus token is drawn from
    target_probs[k]. The output is distributed exactly as the target's own. Leviathan et al. 2023
    (arXiv:2211.17192), Algorithm 1 and A.1; Chen et al. 2023 (arXiv:2302.01318), Algorithm 2.
    """
    for index, token in enumerate(drafts):
        target_row, draft_row = target_probs[index], draft_probs[index]
        if uniforms[index] * float(draft_row[token]) < float(target_row[token]):
            continue
        residual = (target_row - draft_row).clip(min=0.0)
        # The residual is all zeros if the rows agree up to rounding. A rejection then has a
        # probability of about the rounding error.
        return index, draw(residual if residual.any() else target_row, uniforms[-1])
    return len(drafts), draw(target_probs[len(drafts)], uniforms[-1])


class Rule(Protocol):
    """How one request chooses its tokens. Not thread-safe. For each block, call propose or adopt
    0..k times, then decide once.
    """

    # True if propose and decide only take the argmax: the runtime may then do so for a whole batch
    # at once.
    is_argmax: bool
    # If propose decides by the softmax of logits / temperature, the request's filters, and
    # draft_uniforms or draft_races: that temperature, and 0 if it takes the argmax. An engine may
    # then choose many drafts at once, which are adopted. None if it does anything else.
    draft_temperature: float | None

    @property
    def bursting(self) -> BurstingRule | None:
        """This rule, if an engine can take steps in its place."""
        ...

    def propose(self, logits: Floats, position: int, drafts: list[int]) -> int:
        """Choose the next draft token. logits [vocab]: the draft's, after `drafts`. position: the
        index of the token in the sequence.
        """
        ...

    def draft_uniforms(self, count: int) -> list[float]:
        """Numbers in [0, 1) for the next `count` drafts. They are not used at temperature 0, and
        not with races.
        """
        ...

    def draft_races(self, position: int, count: int) -> Floats | None:
        """Noise [count, vocab] float32 for the next `count` drafts, the first of which is at
        `position`: the largest product of probability and noise wins. None: drafts are drawn.
        """
        ...

    def adopt(self, token: int, probs: Floats | None = None) -> None:
        """Take this token as the next draft. It was drawn from probs [vocab], or, without them, it
        was looked up or is the most likely one: its draft probability is 1.
        """
        ...

    def decide(self, logits: Floats, position: int, drafts: list[int]) -> tuple[int, int]:
        """Return (accepted drafts, next token). logits [k + 1, vocab]: the target's. position: the
        index of the first draft.
        """
        ...

    def note(self, tokens: Sequence[int]) -> None:
        """Record that these tokens were added to the output."""
        ...

    def chances(self, logits: Floats, tokens: Sequence[int]) -> list[float]:
        """The probability of each token in its row of logits [len(tokens), vocab], after
        temperature and filters. Draws nothing.
        """
        ...

    def acceptable(
        self, logits: Floats, tokens: Sequence[int], target_chances: Sequence[float]
    ) -> list[float]:
        """For each of these output tokens, the probability that a draft from its row would have
        been accepted, as far as this one token shows it.

        logits [len(tokens), vocab]: the draft's, along the output. target_chances: what `chances`
        gave for the tokens when the target chose them. Penalties are left out.
        """
        ...


@dataclass(frozen=True, slots=True)
class Numbers:
    """What an engine chooses with, in place of a rule; see `Burst` in toolkit.interfaces."""

    sampling: Sampling
    uniforms: NDArray[Any] | None = None  # [n] float64
    races: Floats | None = None  # [n, vocab] float32


class BurstingRule(Protocol):
    """A rule whose steps an engine can take in a burst."""

    def foresee(self, position: int, draft_len: int) -> Numbers:
        """What the next steps choose with, the first of which begins at `position` and has
        draft_len drafts.
        """
        ...

    def pass_step(self, position: int, wanted: int, drafted: int, accepted: int) -> None:
        """Record that the engine took the step at `position`, as if it were decided here. It was to
        draft `wanted` tokens, and drafted and accepted so many.
        """
        ...


class Uniforms:
    """The numbers in [0, 1) of a generator, in order. They can be looked at before they are
    taken.
    """

    def __init__(self, generator: random.Random) -> None:
        self._random = generator.random
        self._seen: deque[float] = deque()

    def next(self) -> float:
        return self._seen.popleft() if self._seen else self._random()

    def take(self, count: int) -> list[float]:
        return [self.next() for _ in range(count)]

    def look(self, count: int) -> NDArray[Any]:
        """The next numbers [at least count] float64, which are not taken."""
        self._seen.extend(self._random() for _ in range(count - len(self._seen)))
        return np.array(self._seen)


class RuleFactory(Protocol):
    def __call__(self, sampling: Sampling, vocab_size: int) -> Rule: ...


class _Penalised:
    """What all rules share: penalties, applied to a copy of the logits if the request has any."""

    is_argmax = False
    draft_temperature: float | None = None

    def __init__(self, sampling: Sampling, vocab_size: int) -> None:
        self._sampling = sampling
        has_penalties = sampling.frequency_penalty != 0.0 or sampling.presence_penalty != 0.0
        self._penalties = Penalties(sampling, vocab_size) if has_penalties else None

    @property
    def bursting(self) -> BurstingRule | None:
        return None

    def draft_uniforms(self, count: int) -> list[float]:
        return [0.0] * count

    def draft_races(self, position: int, count: int) -> Floats | None:
        return None

    def adopt(self, token: int, probs: Floats | None = None) -> None:
        """Does nothing: this rule decides by the target's choices, not by draft probabilities."""

    def note(self, tokens: Sequence[int]) -> None:
        if self._penalties is not None:
            for token in tokens:
                self._penalties.note(token)

    def chances(self, logits: Floats, tokens: Sequence[int]) -> list[float]:
        rows = weights(logits, self._sampling)
        chosen = rows[np.arange(len(tokens)), list(tokens)]
        quotients: list[float] = (chosen / rows.sum(axis=-1, dtype=np.float64)).tolist()
        return quotients

    def acceptable(
        self, logits: Floats, tokens: Sequence[int], target_chances: Sequence[float]
    ) -> list[float]:
        """The target chose the tokens, so the mean of min(1, draft / target) over them is what
        speculative sampling accepts: the sum of min(draft, target) over the vocabulary. Shared
        noise accepts a little less.
        """
        pairs = zip(self.chances(logits, tokens), target_chances, strict=True)
        return [min(1.0, draft / max(target, 1e-30)) for draft, target in pairs]

    def _penalised(self, logits: Floats, drafts: list[int], first: int) -> Floats:
        return logits if self._penalties is None else self._penalties.apply(logits, drafts, first)

    def _weights(self, logits: Floats, drafts: list[int], first: int) -> Floats:
        return weights(self._penalised(logits, drafts, first), self._sampling)


def _warm(sampling: Sampling) -> Sampling:
    """With the temperature as `weights` takes it."""
    return dataclasses.replace(sampling, temperature=max(sampling.temperature, MIN_TEMPERATURE))


class Greedy(_Penalised):
    def __init__(self, sampling: Sampling, vocab_size: int) -> None:
        super().__init__(sampling, vocab_size)
        self.is_argmax = self._penalties is None
        self.draft_temperature = 0.0 if self.is_argmax else None

    @property
    def bursting(self) -> Greedy | None:
        return self if self.is_argmax else None

    def foresee(self, position: int, draft_len: int) -> Numbers:
        return Numbers(self._sampling)

    def pass_step(self, position: int, wanted: int, drafted: int, accepted: int) -> None:
        """Does nothing: no numbers are drawn."""

    def propose(self, logits: Floats, position: int, drafts: list[int]) -> int:
        return int(self._penalised(logits[None], drafts, len(drafts)).argmax())

    def decide(self, logits: Floats, position: int, drafts: list[int]) -> tuple[int, int]:
        return match(drafts, self._penalised(logits, drafts, 0).argmax(-1).tolist().__getitem__)

    def chances(self, logits: Floats, tokens: Sequence[int]) -> list[float]:
        return [float(best == token) for best, token in zip(logits.argmax(-1), tokens, strict=True)]

    def acceptable(
        self, logits: Floats, tokens: Sequence[int], target_chances: Sequence[float]
    ) -> list[float]:
        return self.chances(logits, tokens)


class Rejection(_Penalised):
    """Draws come in order from one generator per request, so a seed reproduces the output only for
    the same draft length.
    """

    def __init__(self, sampling: Sampling, vocab_size: int) -> None:
        super().__init__(sampling, vocab_size)
        # Without a seed: fresh entropy from the operating system.
        self._uniforms = Uniforms(random.Random(sampling.seed))
        self._draft_probs: list[Floats] = []
        self._vocab_size = vocab_size
        self.draft_temperature = None if self._penalties else _warm(sampling).temperature

    @property
    def bursting(self) -> Rejection | None:
        return None if self._penalties else self

    def foresee(self, position: int, draft_len: int) -> Numbers:
        uniforms = self._uniforms.look(FORESEEN_STEPS * (2 * draft_len + 1))
        return Numbers(_warm(self._sampling), uniforms)

    def pass_step(self, position: int, wanted: int, drafted: int, accepted: int) -> None:
        self._uniforms.take(wanted + drafted + 1)

    def propose(self, logits: Floats, position: int, drafts: list[int]) -> int:
        probs = normalised(self._weights(logits[None], drafts, len(drafts))[0])
        self._draft_probs.append(probs)
        return draw(probs, self._uniforms.next())

    def draft_uniforms(self, count: int) -> list[float]:
        return self._uniforms.take(count)

    def adopt(self, token: int, probs: Floats | None = None) -> None:
        if probs is None:
            probs = np.zeros(self._vocab_size)
            probs[token] = 1.0
        self._draft_probs.append(probs)

    def decide(self, logits: Floats, position: int, drafts: list[int]) -> tuple[int, int]:
        target_probs = normalised(self._weights(logits, drafts, 0))
        uniforms = self._uniforms.take(len(drafts) + 1)
        outcome = reject(drafts, self._draft_probs, target_probs, uniforms)
        self._draft_probs.clear()
        return outcome


class Coupled(_Penalised):
    """Draft and target choose with the same noise, and a draft is accepted if both chose it.
    Daliri et al. 2024 (arXiv:2408.07978).
    """

    def __init__(self, sampling: Sampling, vocab_size: int) -> None:
        super().__init__(sampling, vocab_size)
        seed = random.SystemRandom().getrandbits(64) if sampling.seed is None else sampling.seed
        self._race = ExponentialRace(seed, vocab_size)
        self._most_foreseen = FORESEEN_NOISE // vocab_size  # positions
        self.draft_temperature = None if self._penalties else _warm(sampling).temperature

    @property
    def bursting(self) -> Coupled | None:
        return None if self._penalties else self

    def foresee(self, position: int, draft_len: int) -> Numbers:
        """With the noise that is there, and at least that of one step."""
        count = max(draft_len + 1, min(self._race.known_from(position), self._most_foreseen))
        return Numbers(_warm(self._sampling), races=self.draft_races(position, count))

    def pass_step(self, position: int, wanted: int, drafted: int, accepted: int) -> None:
        """Also makes the noise of some later positions, since the engine takes steps meanwhile."""
        start = position + accepted + 1
        self._race.forget_before(start)
        known = self._race.known_from(start)
        for place in range(known, min(known + 2 * (wanted + 1), self._most_foreseen)):
            self._race.noise(start + place)

    def draft_races(self, position: int, count: int) -> Floats:
        rows = [self._race.noise(place) for place in range(position, position + count)]
        return np.array(rows, dtype=np.float32)

    def propose(self, logits: Floats, position: int, drafts: list[int]) -> int:
        return self._race.winner(self._weights(logits[None], drafts, len(drafts))[0], position)

    def decide(self, logits: Floats, position: int, drafts: list[int]) -> tuple[int, int]:
        rows = self._weights(logits, drafts, 0)
        accepted, token = match(
            drafts, lambda index: self._race.winner(rows[index], position + index)
        )
        self._race.forget_before(position + accepted + 1)
        return accepted, token


class SampleMatch(_Penalised):
    """The target draws once for every output token, in order, and the draft from a generator of
    its own. So with a seed the output is the same whatever the draft or the draft length.
    """

    def __init__(self, sampling: Sampling, vocab_size: int) -> None:
        super().__init__(sampling, vocab_size)
        self._random = random.Random(sampling.seed)
        self._draft_random = random.Random(
            None if sampling.seed is None else f"draft {sampling.seed}"
        )
        self.draft_temperature = None if self._penalties else _warm(sampling).temperature

    def draft_uniforms(self, count: int) -> list[float]:
        return [self._draft_random.random() for _ in range(count)]

    def propose(self, logits: Floats, position: int, drafts: list[int]) -> int:
        uniform = self._draft_random.random()
        return draw(self._weights(logits[None], drafts, len(drafts))[0], uniform)

    def decide(self, logits: Floats, position: int, drafts: list[int]) -> tuple[int, int]:
        rows = self._weights(logits, drafts, 0)
        return match(drafts, lambda index: draw(rows[index], self._random.random()))

    def acceptable(
        self, logits: Floats, tokens: Sequence[int], target_chances: Sequence[float]
    ) -> list[float]:
        return self.chances(logits, tokens)


class VerifyOnly:
    """The plain decision (greedy or coupled), made from the first row of a full verify forward. It
    is for tests, not for serving.

    It accepts nothing. So if its text differs from that of plain decoding, the verify forward or
    the rewind after it is at fault. If only real speculation differs, the accept rule is.
    """

    is_argmax = False
    draft_temperature: float | None = None
    bursting: BurstingRule | None = None

    def __init__(self, sampling: Sampling, vocab_size: int) -> None:
        plain_rule = Greedy if sampling.temperature == 0.0 else Coupled
        self._rule: Rule = plain_rule(sampling, vocab_size)

    def propose(self, logits: Floats, position: int, drafts: list[int]) -> int:
        return self._rule.propose(logits, position, drafts)

    def draft_uniforms(self, count: int) -> list[float]:
        return [0.0] * count

    def draft_races(self, position: int, count: int) -> Floats | None:
        return None

    def adopt(self, token: int, probs: Floats | None = None) -> None:
        """Does nothing: every draft is thrown away."""

    def decide(self, logits: Floats, position: int, drafts: list[int]) -> tuple[int, int]:
        return self._rule.decide(logits[:1], position, [])

    def note(self, tokens: Sequence[int]) -> None:
        self._rule.note(tokens)

    def chances(self, logits: Floats, tokens: Sequence[int]) -> list[float]:
        return self._rule.chances(logits, tokens)

    def acceptable(
        self, logits: Floats, tokens: Sequence[int], target_chances: Sequence[float]
    ) -> list[float]:
        return [0.0] * len(tokens)


RULES: Mapping[RuntimeRule, RuleFactory] = {
    "greedy": Greedy,
    "rejection": Rejection,
    "coupled": Coupled,
    "sample_match": SampleMatch,
    "verify_only": VerifyOnly,
}


def choose_rule(request: GenerationRequest, default: AcceptanceChoice) -> RuntimeRule:
    """The name of the rule for a request: the one it asks for, else the deployment's default.
    "auto" means coupled with a seed, and rejection without one.

    Raises RequestError for an unknown name.
    """
    if request.acceptance == "verify_only":
        return "verify_only"
    if request.sampling.temperature == 0.0:
        return "greedy"
    name = request.acceptance or default
    if name == "auto":
        name = "rejection" if request.sampling.seed is None else "coupled"
    if name not in SAMPLING_RULES:
        raise RequestError(
            f"acceptance is {name!r}; known: auto, rejection, coupled, sample_match, verify_only"
        )
    return name
