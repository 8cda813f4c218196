"""Is sampled text of both arms distributed alike? For endpoints whose engine gives no logits to
anybody outside its server.

Nothing is known of the distribution that tokens should have, so the plain arm is what the
speculative one is held against. Both are drawn equally often on the same prompts, a seed of its own
for every request. Two tests: the second and later tokens, each given the whole text before it
(`distribution.prefix_test`), and the continuations as a whole. Texts are short: what two texts have
in common is their beginning, and only there can tokens be compared. How many are drawn is fixed
before any is looked at; where the time is up before, the report says what so many can show.

It sees what speculation changes, and nothing that both arms have in common: whether temperature and
filters are respected stays open.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from toolkit.config.schema import DistributionGates
from toolkit.records.judged import Distribution, DistributionTest
from toolkit.validate import distribution
from toolkit.validate.arms import ARMS, Alternating, Sender
from toolkit.validate.sampled import PROMPTS, TEXTS, continuations
from toolkit.words import SamplingRule, SentArm

__all__ = ["Pairs", "draw_pairs", "judge_pairs"]

LONGEST = 16  # tokens of a drawn text
MOST = 100  # texts of a prompt and arm
# texts of an arm, at least: with 108, the control of the continuations was once seen at p = 0.00065
CONTROL = 144
# one token in so many stands behind a text that others have said too: a guess, for how many are
# drawn
COMPARABLE = 6
TESTS = 2


@dataclass
class Pairs:
    """texts: arm -> prompt -> tokens of every text; both arms have as many of each prompt."""

    temperature: float
    texts: dict[str, list[list[tuple[int, ...]]]]
    longest: int
    requests: int = 0
    seconds: float = 0.0


def draw_pairs(
    sender: Sender,
    prompts: Sequence[str],
    gates: DistributionGates,
    *,
    temperature: float,
    seed: int,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
    clock: Callable[[], float] = time.monotonic,
) -> Pairs:
    """on_progress: (texts so far, texts wanted). Raises StageError as every request does."""
    chosen = prompts[:PROMPTS]
    longest = min(sender.max_tokens, LONGEST)
    needed = (
        2
        * COMPARABLE
        * distribution.tokens_needed(gates.effect, gates.false_alarm / TESTS, gates.power)
    )
    wanted = max(CONTROL, needed / max(1, longest - 1))
    texts = min(MOST, max(TEXTS, math.ceil(wanted / len(chosen))))
    drawn = Pairs(temperature, {arm: [[] for _ in chosen] for arm in ARMS}, longest)
    generator = np.random.default_rng([seed, 3])
    alternating, first = isinstance(sender.endpoint, Alternating), len(sender.sent)
    sender = replace(sender, max_tokens=longest)  # its list of what was sent is the same one

    def ask(arm: SentArm, index: int) -> None:
        timing = sender.send(
            index, chosen[index], arm, temperature=temperature, seed=int(generator.integers(2**31))
        )
        drawn.texts[arm][index].append(tuple(timing.token_ids))
        on_progress(len(sender.sent) - first, texts * len(chosen) * len(ARMS))

    rounds = texts
    for turn in [(arm,) for arm in ARMS] if alternating else [ARMS]:
        if alternating:
            sender.turn_to(turn[0])  # the start of a server is no time of drawing
        began, allowed = clock(), gates.max_seconds * len(turn) / len(ARMS)
        while (said := len(drawn.texts[turn[0]][0])) < rounds and (
            said == 0 or clock() - began < allowed
        ):
            for index in range(len(chosen)):
                for arm in generator.permutation(turn).tolist():
                    ask(arm, index)
        rounds = len(drawn.texts[turn[0]][0])  # the other arm gives as many
        drawn.seconds += clock() - began
    fewest = min(len(said) for prompts_of in drawn.texts.values() for said in prompts_of)
    drawn.texts = {
        arm: [said[:fewest] for said in prompts_of] for arm, prompts_of in drawn.texts.items()
    }
    drawn.requests = len(sender.sent) - first
    return drawn


def judge_pairs(
    drawn: Pairs, gates: DistributionGates, *, rule: SamplingRule, seed: int
) -> Distribution:
    """Both tests with their controls; p-values are adjusted for how many there are."""
    generator, alpha = np.random.default_rng([seed, 4]), gates.false_alarm / TESTS
    arms = list(zip(drawn.texts["plain"], drawn.texts["speculative"], strict=True))
    found = distribution.prefix_test(
        arms, drawn.longest, generator, effect=gates.effect, alpha=alpha, power=gates.power
    )
    tokens = DistributionTest(
        name="second and later tokens, plain against speculative",
        samples=found.tokens,
        statistic=found.statistic,
        p_value=found.p_value,
        adjusted=found.p_value,
        rejected=False,
        lean=None,
        detectable=found.detectable,
        control_effect=gates.effect,
        control_p_value=found.control_p_value,
        control_rejected=found.control_p_value is not None and found.control_p_value <= alpha,
    )
    tests = [tokens, continuations(drawn.texts, alpha, generator)]
    adjusted = distribution.holm([test.p_value for test in tests])
    return Distribution(
        temperature=drawn.temperature,
        rule=rule,
        requests=drawn.requests,
        tokens=sum(len(text) for said in drawn.texts.values() for texts in said for text in texts),
        false_alarm=gates.false_alarm,
        power=gates.power,
        effect=gates.effect,
        enough=found.detectable is not None and found.detectable <= gates.effect,
        tests=tuple(
            replace(test, adjusted=p, rejected=p <= gates.false_alarm)
            for test, p in zip(tests, adjusted, strict=True)
        ),
        outside_filters=0,
        seeded=0,
        unrepeated=0,
        seeds_matter=True,
        seconds=drawn.seconds,
    )
