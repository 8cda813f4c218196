"""Which draft tokens the target keeps, and which token follows them.

`match` and `reject` are the two rules, pure functions. Around them stand the ways a request can ask
for them, each an object with the state of one request: it proposes with the draft's logits and
decides with the target's.

    Greedy       temperature 0: the output is the plain greedy output Rejection    speculative
    sampling: the output is distributed exactly as the target's own Coupled      shared noise per
    position: with a seed, the output is the same whatever the draft, its length or the batch
    SampleMatch  the target's own sample at each position, accepted while it equals the draft; what
    TensorRT-LLM does by default VerifyOnly   drafts are proposed, verified and all thrown away:
    plain decoding on the speculative path, to tell the two apart

Plain decoding is the same decision with no drafts. The logits of a draft and of its target pass
through the same penalties, temperature and filters, and inside a block the penalties see the draft
tokens before a position.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import numpy as np

from toolkit.errors import RequestError
from toolkit.interfaces import GenerationRequest, Sampling
from toolkit.speculative.sampling import (
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
    "Coupled",
    "Greedy",
    "Rejection",
    "Rule",
    "RuleFactory",
    "SampleMatch",
    "VerifyOnly",
    "choose_rule",
    "match",
    "reject",
]


def match(drafts: Sequence[int], choose: Callable[[int], int]) -> tuple[int, int]:
    """Keep drafts while they equal the target's own choices. Returns (kept, the target's choice
    behind them).

    choose(i) is what the target chooses behind drafts[:i]; it is asked in order and not beyond the
    first that differs. The output is that of choosing one by one, since every choice that is used
    stands behind a prefix that was chosen.
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
    """Speculative sampling. Returns (kept, the token behind them).

    drafts [k], each drawn from its row; draft_probs k rows [vocab]; target_probs [k + 1, vocab];
    rows sum to 1; uniforms [k + 1] in [0, 1). Draft i is kept with probability min(1, target/draft)
    at that token. At the first one that is not, the replacement is drawn from max(0, target -
    draft), renormalised; if all are kept, the bonus token comes from target_probs[k]. The output is
    distributed exactly as the target's own. Leviathan et al. 2023 (arXiv:2211.17192), Algorithm 1
    and A.1; Chen et al. 2023 (arXiv:2302.01318), Algorithm 2.
    """
    for index, token in enumerate(drafts):
        target_row, draft_row = target_probs[index], draft_probs[index]
        if uniforms[index] * float(draft_row[token]) < float(target_row[token]):
            continue
        residual = (target_row - draft_row).clip(min=0.0)
        # Rows that agree up to rounding leave nothing behind; such a rejection has a probability of
        # about the rounding error.
        return index, draw(residual if residual.any() else target_row, uniforms[-1])
    return len(drafts), draw(target_probs[len(drafts)], uniforms[-1])


class Rule(Protocol):
    """How one request chooses its tokens. Not thread-safe; a block at a time: propose or adopt
    0..k times, then decide once.
    """

    # both calls would only take the argmax: the runtime may do so for a whole batch at once
    by_argmax: bool

    def propose(self, logits: Floats, position: int, drafts: list[int]) -> int:
        """The next draft token. logits [vocab] are the draft's behind `drafts`; position: the
        token's index in the sequence.
        """
        ...

    def adopt(self, token: int) -> None:
        """The next draft token is this one, for certain: it was looked up, not drawn from a
        draft's distribution.
        """
        ...

    def decide(self, logits: Floats, position: int, drafts: list[int]) -> tuple[int, int]:
        """(kept drafts, next token). logits [k + 1, vocab] are the target's; position: index of
        the first draft.
        """
        ...

    def note(self, tokens: Sequence[int]) -> None:
        """These tokens were added to the output."""
        ...


class RuleFactory(Protocol):
    def __call__(self, sampling: Sampling, vocab_size: int) -> Rule: ...


class _Penalised:
    """The part that all rules share: penalties on a copy of the logits, where a request has any."""

    by_argmax = False

    def __init__(self, sampling: Sampling, vocab_size: int) -> None:
        self._sampling = sampling
        penalised = sampling.frequency_penalty != 0.0 or sampling.presence_penalty != 0.0
        self._penalties = Penalties(sampling, vocab_size) if penalised else None

    def adopt(self, token: int) -> None:
        """Nothing to remember where the target's own choice decides."""

    def note(self, tokens: Sequence[int]) -> None:
        if self._penalties is not None:
            for token in tokens:
                self._penalties.note(token)

    def _penalised(self, logits: Floats, drafts: list[int], first: int) -> Floats:
        return logits if self._penalties is None else self._penalties.apply(logits, drafts, first)

    def _weights(self, logits: Floats, drafts: list[int], first: int) -> Floats:
        return weights(self._penalised(logits, drafts, first), self._sampling)


class Greedy(_Penalised):
    def __init__(self, sampling: Sampling, vocab_size: int) -> None:
        super().__init__(sampling, vocab_size)
        self.by_argmax = self._penalties is None

    def propose(self, logits: Floats, position: int, drafts: list[int]) -> int:
        return int(self._penalised(logits[None], drafts, len(drafts)).argmax())

    def decide(self, logits: Floats, position: int, drafts: list[int]) -> tuple[int, int]:
        return match(drafts, self._penalised(logits, drafts, 0).argmax(-1).tolist().__getitem__)


class Rejection(_Penalised):
    """Draws come from one generator per request, in order: a seed reproduces the output for one
    and the same draft length.
    """

    def __init__(self, sampling: Sampling, vocab_size: int) -> None:
        super().__init__(sampling, vocab_size)
        self._random = random.Random(
            sampling.seed
        )  # without a seed: fresh entropy from the operating system
        self._draft_probs: list[Floats] = []
        self._vocab_size = vocab_size

    def propose(self, logits: Floats, position: int, drafts: list[int]) -> int:
        probs = normalised(self._weights(logits[None], drafts, len(drafts))[0])
        self._draft_probs.append(probs)
        return draw(probs, self._random.random())

    def adopt(self, token: int) -> None:
        certain = np.zeros(self._vocab_size)
        certain[token] = 1.0
        self._draft_probs.append(certain)

    def decide(self, logits: Floats, position: int, drafts: list[int]) -> tuple[int, int]:
        target_probs = normalised(self._weights(logits, drafts, 0))
        uniforms = [self._random.random() for _ in range(len(drafts) + 1)]
        outcome = reject(drafts, self._draft_probs, target_probs, uniforms)
        self._draft_probs.clear()
        return outcome


class Coupled(_Penalised):
    """Draft and target race with the same noise, a draft is kept if both chose it. Daliri et al.
    2024 (arXiv:2408.07978).
    """

    def __init__(self, sampling: Sampling, vocab_size: int) -> None:
        super().__init__(sampling, vocab_size)
        seed = random.SystemRandom().getrandbits(64) if sampling.seed is None else sampling.seed
        self._race = ExponentialRace(seed, vocab_size)

    def propose(self, logits: Floats, position: int, drafts: list[int]) -> int:
        return self._race.winner(self._weights(logits[None], drafts, len(drafts))[0], position)

    def decide(self, logits: Floats, position: int, drafts: list[int]) -> tuple[int, int]:
        rows = self._weights(logits, drafts, 0)
        kept, token = match(drafts, lambda index: self._race.winner(rows[index], position + index))
        self._race.forget_before(position + kept + 1)
        return kept, token


class SampleMatch(_Penalised):
    def __init__(self, sampling: Sampling, vocab_size: int) -> None:
        super().__init__(sampling, vocab_size)
        self._random = random.Random(sampling.seed)

    def propose(self, logits: Floats, position: int, drafts: list[int]) -> int:
        return draw(self._weights(logits[None], drafts, len(drafts))[0], self._random.random())

    def decide(self, logits: Floats, position: int, drafts: list[int]) -> tuple[int, int]:
        rows = self._weights(logits, drafts, 0)
        return match(drafts, lambda index: draw(rows[index], self._random.random()))


class VerifyOnly:
    """The plain decision (greedy, or coupled) from the first row of a full verify forward. Not a
    way to serve, but to test.

    Where its text differs from plain decoding's, the verify forward or the rewinding behind it is
    at fault, since nothing is accepted; where only real speculation differs, the accept rule is.
    """

    by_argmax = False

    def __init__(self, sampling: Sampling, vocab_size: int) -> None:
        self._rule: Rule = (Greedy if sampling.temperature == 0.0 else Coupled)(
            sampling, vocab_size
        )

    def propose(self, logits: Floats, position: int, drafts: list[int]) -> int:
        return self._rule.propose(logits, position, drafts)

    def adopt(self, token: int) -> None:
        """Thrown away like the others."""

    def decide(self, logits: Floats, position: int, drafts: list[int]) -> tuple[int, int]:
        return self._rule.decide(logits[:1], position, [])

    def note(self, tokens: Sequence[int]) -> None:
        self._rule.note(tokens)


RULES: Mapping[RuntimeRule, RuleFactory] = {
    "greedy": Greedy,
    "rejection": Rejection,
    "coupled": Coupled,
    "sample_match": SampleMatch,
    "verify_only": VerifyOnly,
}


def choose_rule(request: GenerationRequest, default: AcceptanceChoice) -> RuntimeRule:
    """The name of the rule for a request: its own wish, else the deployment's default; "auto"
    couples where there is a seed.
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
