"""Draw tokens from the endpoint at temperature > 0, compare each with the reference, and run the
tests of `distribution` on the points.

Requests carry no seed, so the deployment's own accept rule is at work. Both arms are drawn in turns
on the same prompts: the plain arm tells faults of sampling from faults of the accept rule. Fewer
requests with another temperature, with top-k and with top-p show whether these are respected. The
number of tokens follows from the effect to be detected, and is fixed before any token is looked at.
If drawing them takes longer than allowed, fewer are drawn, and the report states what they can
show.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from toolkit.config.schema import DistributionGates
from toolkit.records.judged import Distribution, DistributionTest
from toolkit.validate import distribution
from toolkit.validate.arms import Sender
from toolkit.validate.reference import Reference, text_logits
from toolkit.words import SamplingRule, SentArm

if TYPE_CHECKING:
    from toolkit.client import RequestTiming

__all__ = ["PROMPTS", "TEXTS", "Drawn", "continuations", "draw_samples", "judge_samples"]

PROMPTS = 8  # few, each drawn many times, so that continuations of one prompt can be compared
TEXTS = 12  # per prompt and arm, at least: permutations of fewer cannot give a small p-value
LONGEST = 64  # tokens of a drawn text, at most: more texts show more than longer texts
GROUPS: dict[str, dict[str, Any]] = {
    "temperature": {"scale": 0.5},
    "top_k": {"top_k": 5},
    "top_p": {"top_p": 0.8},
}
GROUP_SHARE = 4  # a group has a quarter of the tokens, and so sees twice the effect
SEEDED = 4  # requests that are sent twice with one seed
# Share of texts that the control of the continuations replaces by the same text.
REPLACED = 0.4
TESTS = 4 + len(GROUPS)  # the most tests that one run makes


@dataclass
class Points:
    """The points of one group's second and later tokens, and the points of a biased acceptor's
    tokens at the same places.

    by_probability_biased: of the likeliest token. by_draft_biased: of a token drawn from the draft.
    outside: how many tokens the filters rule out.
    """

    by_probability: list[NDArray[np.float64]] = field(default_factory=list)
    by_probability_biased: list[NDArray[np.float64]] = field(default_factory=list)
    by_draft: list[NDArray[np.float64]] = field(default_factory=list)
    by_draft_biased: list[NDArray[np.float64]] = field(default_factory=list)
    outside: int = 0

    @property
    def tokens(self) -> int:
        return sum(map(len, self.by_probability))


@dataclass
class Drawn:
    """Everything that was drawn. texts: arm -> prompt -> tokens of every text."""

    temperature: float
    wanted: int
    alpha: float  # of a single test
    groups: dict[str, Points] = field(default_factory=dict)
    texts: dict[str, list[list[tuple[int, ...]]]] = field(default_factory=dict)
    requests: int = 0
    seconds: float = 0.0
    seeded: int = 0
    unrepeated: int = 0
    same_for_all_seeds: bool = False


def draw_samples(
    sender: Sender,
    prompts: Sequence[str],
    gates: DistributionGates,
    reference: Reference,
    *,
    temperature: float,
    near_tie_margin: float,
    seed: int,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
    clock: Callable[[], float] = time.monotonic,
) -> Drawn:
    """Draw until every group has enough tokens, or the time is up. on_progress: is called with
    (tokens so far, tokens wanted); tokens beyond a group's share do not count.

    Raises StageError as every request does.
    """
    alpha = gates.false_alarm / TESTS
    wanted = distribution.tokens_needed(gates.effect, alpha, gates.power)
    chosen = prompts[:PROMPTS]
    generator = np.random.default_rng([seed, 1])
    drawn = Drawn(
        temperature,
        wanted,
        alpha,
        texts={arm: [[] for _ in chosen] for arm in ("plain", "speculative")},
    )
    judge = _Judge(drawn, reference, generator, near_tie_margin)
    began, first = clock(), len(sender.sent)
    # The copy shares the sender's list of sent requests.
    sender = replace(sender, max_tokens=min(sender.max_tokens, LONGEST))

    def ask(name: str, arm: SentArm, index: int, settings: dict[str, Any]) -> None:
        timing = sender.send(index, chosen[index], arm, **settings)
        judge.place(name, timing, settings)
        if name in drawn.texts:
            drawn.texts[name][index].append(tuple(timing.token_ids))
        needed = _needed(wanted)
        enough = sum(
            min(drawn.groups[group].tokens, tokens)
            for group, tokens in needed.items()
            if group in drawn.groups
        )
        on_progress(enough, sum(needed.values()))

    main, pause = {"temperature": temperature}, 0
    while (
        _lacking(drawn, wanted)
        and clock() - began < gates.max_seconds
        and len(sender.sent) - first < 20 * wanted
    ):
        for index in range(len(chosen)):
            for arm in generator.permutation(["plain", "speculative"]).tolist():
                ask(arm, arm, index, main)
            if pause % GROUP_SHARE == 0:
                for name, change in GROUPS.items():
                    ask(name, "speculative", index, _settings(temperature, change))
            pause += 1
    _seeds(sender, chosen, drawn, temperature, seed)
    drawn.requests, drawn.seconds = len(sender.sent) - first, clock() - began
    return drawn


def judge_samples(
    drawn: Drawn, gates: DistributionGates, *, rule: SamplingRule, seed: int
) -> Distribution:
    """Run all tests with their controls. p-values are adjusted for the number of tests."""
    generator = np.random.default_rng([seed, 2])
    tests: list[DistributionTest] = []
    for name, points in drawn.groups.items():
        pairs = [(f"{name}: by probability", points.by_probability, points.by_probability_biased)]
        if points.by_draft and name == "speculative":
            pairs.append(
                (f"{name}: by draft against target", points.by_draft, points.by_draft_biased)
            )
        effect = gates.effect * (2 if name in GROUPS else 1)
        tests += [
            _pooled(
                title,
                np.concatenate(drawn_points),
                np.concatenate(biased),
                drawn.alpha,
                gates.power,
                effect,
                generator,
            )
            for title, drawn_points, biased in pairs
            if points.tokens
        ]
    tests.append(continuations(drawn.texts, drawn.alpha, generator))
    adjusted = distribution.holm([test.p_value for test in tests])
    tests = [_decided(test, p, gates.false_alarm) for test, p in zip(tests, adjusted, strict=True)]
    return Distribution(
        temperature=drawn.temperature,
        rule=rule,
        requests=drawn.requests,
        tokens=sum(points.tokens for points in drawn.groups.values()),
        false_alarm=gates.false_alarm,
        power=gates.power,
        effect=gates.effect,
        enough=not _lacking(drawn, drawn.wanted),
        tests=tuple(tests),
        outside_filters=sum(points.outside for points in drawn.groups.values()),
        seeded=drawn.seeded,
        unrepeated=drawn.unrepeated,
        seeds_matter=not drawn.same_for_all_seeds,
        seconds=drawn.seconds,
    )


def _lacking(drawn: Drawn, wanted: int) -> bool:
    short = any(
        name not in drawn.groups or drawn.groups[name].tokens < tokens
        for name, tokens in _needed(wanted).items()
    )
    return short or any(len(texts) < TEXTS for prompts in drawn.texts.values() for texts in prompts)


def _needed(wanted: int) -> dict[str, int]:
    """Return the number of tokens that every group needs."""
    return {
        "plain": wanted,
        "speculative": wanted,
        **dict.fromkeys(GROUPS, math.ceil(wanted / GROUP_SHARE)),
    }


def _settings(temperature: float, change: dict[str, Any]) -> dict[str, Any]:
    changed = dict(change)
    return {"temperature": temperature * changed.pop("scale", 1.0), **changed}


@dataclass
class _Judge:
    drawn: Drawn
    reference: Reference
    generator: np.random.Generator
    near_tie_margin: float

    def place(self, name: str, timing: RequestTiming, settings: dict[str, Any]) -> None:
        """Add the points of one text's second and later tokens."""
        points = self.drawn.groups.setdefault(name, Points())
        tokens = np.asarray(timing.token_ids, dtype=np.int64)[1:]
        if len(tokens) == 0:
            return
        prompt = tuple(self.reference.encode(timing.prompt))
        ids, first = (*prompt, *timing.token_ids), len(prompt) + 1
        logits = np.asarray(text_logits(self.reference, ids, first), dtype=np.float64)
        probs = distribution.probabilities(logits, **settings)
        inside = np.take_along_axis(probs, tokens[:, None], axis=-1)[:, 0] > 0
        points.outside += int(np.count_nonzero(~inside & ~self._at_the_edge(logits, probs, tokens)))
        rows, sampled = probs[inside], tokens[inside]
        points.by_probability.append(self._points(rows, sampled, rows))
        points.by_probability_biased.append(self._points(rows, rows.argmax(axis=-1), rows))
        if name == "speculative" and self.reference.draft is not None:
            own = distribution.probabilities(
                np.asarray(self.reference.draft(ids, first))[inside], **settings
            )
            with np.errstate(divide="ignore", invalid="ignore"):
                ratio = np.where(rows > 0, own / rows, -1.0)
            drafts = _draw(np.where(rows > 0, own, 0.0), rows, self.generator)
            points.by_draft.append(self._points(rows, sampled, ratio))
            points.by_draft_biased.append(self._points(rows, drafts, ratio))

    def _points(
        self, probs: NDArray[Any], tokens: NDArray[np.int64], order: NDArray[Any]
    ) -> NDArray[np.float64]:
        return distribution.places(probs, tokens, order, self.generator.random(len(tokens)))

    def _at_the_edge(
        self, logits: NDArray[Any], probs: NDArray[Any], tokens: NDArray[np.int64]
    ) -> NDArray[np.bool_]:
        """Whether only rounding put a token outside the filters: the last token inside is as
        likely, up to the margin.
        """
        last_kept = np.where(probs > 0, logits, np.inf).min(axis=-1)
        close: NDArray[np.bool_] = (
            np.take_along_axis(logits, tokens[:, None], axis=-1)[:, 0]
            >= last_kept - self.near_tie_margin
        )
        return close


def _draw(
    weights: NDArray[Any], fallback: NDArray[Any], generator: np.random.Generator
) -> NDArray[np.int64]:
    """Draw one token per row by its weights, or by the fallback's if the row has no weight."""
    total = weights.sum(axis=-1, keepdims=True)
    cumulative = np.cumsum(np.where(total > 0, weights, fallback), axis=-1)
    drawn: NDArray[np.int64] = (
        cumulative <= generator.random((len(weights), 1)) * cumulative[:, -1:]
    ).sum(axis=-1)
    return drawn


def _seeds(
    sender: Sender, prompts: Sequence[str], drawn: Drawn, temperature: float, seed: int
) -> None:
    """Check seeds under the deployment's own rule: the same seed has to give the same text twice,
    and different seeds have to matter.
    """
    texts: list[set[tuple[int, ...]]] = []
    for index in range(min(SEEDED, len(prompts))):
        distinct: set[tuple[int, ...]] = set()
        for number in (0, 1):
            options = {"temperature": temperature, "seed": seed + number}
            first, again = (
                sender.send(index, prompts[index], "speculative", **options).token_ids
                for _ in range(2)
            )
            drawn.unrepeated += first != again
            drawn.seeded += 1
            distinct.add(tuple(first))
        texts.append(distinct)
    drawn.same_for_all_seeds = all(len(distinct) == 1 for distinct in texts)


def _pooled(
    title: str,
    points: NDArray[np.float64],
    biased: NDArray[np.float64],
    alpha: float,
    power: float,
    effect: float,
    generator: np.random.Generator,
) -> DistributionTest:
    statistic, p_value = distribution.g_test(points)
    control = distribution.tilt(points, biased, effect, generator)
    return DistributionTest(
        name=title,
        samples=len(points),
        statistic=statistic,
        p_value=p_value,
        adjusted=p_value,
        rejected=False,
        lean=distribution.lean(points),
        detectable=distribution.detectable(len(points), alpha, power),
        control_effect=effect,
        control_p_value=None if control is None else (p := distribution.g_test(control[0])[1]),
        control_rejected=control is not None and p <= alpha,
    )


def continuations(
    texts: Mapping[str, Sequence[Sequence[tuple[int, ...]]]],
    alpha: float,
    generator: np.random.Generator,
) -> DistributionTest:
    """Test the continuations of both arms (arm -> prompt -> texts). In the control a share of the
    speculative texts is replaced by the same text.
    """
    arms = [
        (one, other)
        for one, other in zip(texts["plain"], texts["speculative"], strict=True)
        if one and other
    ]
    tilted = [
        (one, [other[0] if generator.random() < REPLACED else text for text in other])
        for one, other in arms
    ]
    statistic, p_value = distribution.continuation_test(arms, generator)
    control = distribution.continuation_test(tilted, generator)[1]
    return DistributionTest(
        name="continuations, plain against speculative",
        samples=sum(len(other) for _, other in arms),
        statistic=statistic,
        p_value=p_value,
        adjusted=p_value,
        rejected=False,
        lean=None,
        detectable=None,
        control_effect=REPLACED,
        control_p_value=control,
        control_rejected=control <= alpha,
    )


def _decided(test: DistributionTest, adjusted: float, false_alarm: float) -> DistributionTest:
    return replace(test, adjusted=adjusted, rejected=adjusted <= false_alarm)
