"""Test whether sampled texts of both arms have the same distribution, for endpoints whose engine
gives no logits outside its server.

The distribution that tokens should have is unknown, so the speculative arm is compared with the
plain one. Both draw the same number of texts on the same prompts. Every request has its own seed if
the engine respects seeds; if not, `arms.StreamShift` keeps the arms' random numbers apart. There
are two tests: one of the second and later tokens, each given the whole text before it
(`distribution.prefix_test`), and one of the continuations as a whole. Texts are short, since tokens
can be compared only after a beginning that both arms share. How many texts are needed depends on
how many beginnings they share. So the first number is a guess, and more follow until the effect
would be seen. That is decided without knowing which arm a text is of, so it does not touch the
level: under the null, arms are exchangeable given the texts. Arms that need restarts keep the first
number. If time runs out before, the report says what the texts drawn so far can show.

The tests see what speculation changes, but nothing that both arms have in common: whether
temperature and filters are respected stays open.
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
MOST = 200  # texts per prompt and arm, at most
# Texts per arm, at least. With 108, the control of the continuations once had p = 0.00065.
CONTROL = 144
# One token in this many follows a beginning that other texts share. It is a guess, from which the
# first number of texts is computed.
COMPARABLE = 6
TESTS = 2
MARGIN = 1.1  # how many more texts are drawn than the last look asked for
LOOK = 2000  # permutations that tell whether the texts so far are enough
SURE = 0.95  # of the effect: what so few permutations say may be that far off


@dataclass
class Pairs:
    """The texts drawn: arm -> prompt -> tokens of every text. Both arms have equally many."""

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
    with_seeds: bool = True,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
    clock: Callable[[], float] = time.monotonic,
) -> Pairs:
    """Draw texts of both arms. with_seeds: every request has a seed of its own. on_progress: is
    called with (texts so far, texts wanted).

    Raises StageError as every request does.
    """
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
    sender = replace(sender, max_tokens=longest)  # it shares its list of sent requests

    def ask(arm: SentArm, index: int) -> None:
        seeded = {"seed": int(generator.integers(2**31))} if with_seeds else {}
        timing = sender.send(index, chosen[index], arm, temperature=temperature, **seeded)
        drawn.texts[arm][index].append(tuple(timing.token_ids))
        on_progress(len(sender.sent) - first, rounds * len(chosen) * len(ARMS))

    rounds = texts
    for turn in [(arm,) for arm in ARMS] if alternating else [ARMS]:
        if alternating:
            sender.turn_to(turn[0])  # before the clock starts: a server's start takes time
        began, allowed = clock(), gates.max_seconds * len(turn) / len(ARMS)
        while (done := len(drawn.texts[turn[0]][0])) < rounds and (
            done == 0 or clock() - began < allowed
        ):
            for index in range(len(chosen)):
                for arm in generator.permutation(turn).tolist():
                    ask(arm, index)
            if done + 1 == rounds and not alternating:
                rounds = _texts_needed(drawn, gates, rounds, generator)
        rounds = len(drawn.texts[turn[0]][0])  # the other arm draws as many
        drawn.seconds += clock() - began
    fewest = min(len(texts) for by_prompt in drawn.texts.values() for texts in by_prompt)
    drawn.texts = {
        arm: [texts[:fewest] for texts in by_prompt] for arm, by_prompt in drawn.texts.items()
    }
    drawn.requests = len(sender.sent) - first
    return drawn


def _texts_needed(
    drawn: Pairs, gates: DistributionGates, rounds: int, generator: np.random.Generator
) -> int:
    """How many texts per prompt and arm would show the effect; as many as there are if they do.

    Only what does not depend on the arms' names is used of the test: not its p-value.
    """
    detectable = distribution.prefix_test(
        list(zip(*drawn.texts.values(), strict=True)),
        drawn.longest,
        generator,
        effect=gates.effect,
        alpha=gates.false_alarm / TESTS,
        power=gates.power,
        permutations=LOOK,
    ).detectable
    if detectable is None or detectable <= SURE * gates.effect:
        return rounds
    # Twice as many at most: more texts also share more beginnings.
    growth = min(2.0, MARGIN * (detectable / (SURE * gates.effect)) ** 2)
    return min(MOST, math.ceil(growth * rounds))


def judge_pairs(
    drawn: Pairs, gates: DistributionGates, *, rule: SamplingRule, seed: int
) -> Distribution:
    """Run both tests with their controls. p-values are adjusted for the number of tests."""
    generator, alpha = np.random.default_rng([seed, 4]), gates.false_alarm / TESTS
    arms = list(zip(drawn.texts["plain"], drawn.texts["speculative"], strict=True))
    prefixes = distribution.prefix_test(
        arms, drawn.longest, generator, effect=gates.effect, alpha=alpha, power=gates.power
    )
    tokens = DistributionTest(
        name="second and later tokens, plain against speculative",
        samples=prefixes.tokens,
        statistic=prefixes.statistic,
        p_value=prefixes.p_value,
        adjusted=prefixes.p_value,
        rejected=False,
        lean=None,
        detectable=prefixes.detectable,
        control_effect=gates.effect,
        control_p_value=prefixes.control_p_value,
        control_rejected=prefixes.control_p_value is not None and prefixes.control_p_value <= alpha,
    )
    tests = [tokens, continuations(drawn.texts, alpha, generator)]
    adjusted = distribution.holm([test.p_value for test in tests])
    return Distribution(
        temperature=drawn.temperature,
        rule=rule,
        requests=drawn.requests,
        tokens=sum(
            len(text) for by_prompt in drawn.texts.values() for texts in by_prompt for text in texts
        ),
        false_alarm=gates.false_alarm,
        power=gates.power,
        effect=gates.effect,
        enough=prefixes.detectable is not None and prefixes.detectable <= gates.effect,
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
