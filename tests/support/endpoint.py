"""An endpoint with a scripted model behind it: texts, chunk times and counters are the test's,
and faults can be planted.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import numpy as np

from toolkit.client import RequestTiming, Statistics
from toolkit.validate.reference import Reference

VOCAB = 512
BOS = 1
KEPT_ROWS = 4096  # of logits and of noise: the same prompts are sent in every arm and round


def encode(prompt: str) -> tuple[int, ...]:
    return (BOS, *(byte + 2 for byte in prompt.encode()))


def logits_after(ids: tuple[int, ...]) -> np.ndarray:
    """A language: every prefix has logits of its own, the best one at least 1.0 above the rest."""
    return _logits_behind(ids[-3:], len(ids))


@lru_cache(KEPT_ROWS)
def _logits_behind(last: tuple[int, ...], length: int) -> np.ndarray:
    generator = np.random.default_rng([17, *last, length])
    logits = generator.normal(size=VOCAB)
    logits[int(generator.integers(2, VOCAB))] = logits.max() + 1.0
    logits.setflags(write=False)
    return logits


@lru_cache(KEPT_ROWS)
def gumbel(seed: int, position: int, vocab: int) -> np.ndarray:
    noise = np.random.default_rng([seed, position]).gumbel(size=vocab)
    noise.setflags(write=False)
    return noise


@dataclass
class Fault:
    """At this output position of this prompt the speculative arm takes the token of this rank;
    the margin there is set.
    """

    prompt: str
    position: int
    rank: int = 1
    margin: float | None = None
    seeded: bool = False
    arms: tuple[str, ...] = ("speculative",)


@dataclass
class ScriptedEndpoint:
    """One forward takes `step_ms`, a speculative step `speculative_step_ms`, with noise of
    `jitter` (a share) per request.
    """

    step_ms: float = 2.0
    speculative_step_ms: float = 3.0
    draft_len: int = 4
    accepted: tuple[int, ...] = (4, 2, 3)  # of one verify step after the other
    jitter: float = 0.0
    faults: list[Fault] = field(default_factory=list)
    text_tokens: int | None = None  # None: up to max_tokens
    looping: bool = False
    counted_twice: bool = False
    deaf: bool = False  # to stop words
    busy: Callable[[float], float] = lambda temperature: (
        1.0
    )  # how much longer everything takes then
    late_ms: float = 0.0  # how long the first tokens wait between server and client
    clock_ns: int = 1_000_000_000
    generator: random.Random = field(default_factory=lambda: random.Random(5))
    seen: list[dict[str, Any]] = field(default_factory=list)
    counts: dict[str, float] = field(default_factory=dict)

    def measure(self, prompts: Iterable[str], **options: Any) -> list[RequestTiming]:
        return [self._answer(prompt, options) for prompt in prompts]

    def counters(self) -> dict[str, float]:
        return dict(self.counts)

    @property
    def reference(self) -> Reference:
        return Reference(
            encode, lambda ids: self._logits(tuple(ids)), eos_token_ids=(0,), noise=gumbel
        )

    def _logits(self, ids: tuple[int, ...]) -> np.ndarray:
        logits = np.zeros(VOCAB) if self.looping else logits_after(ids).copy()
        if self.looping:
            logits[2 + len(ids) % 2] = 5.0
        for fault in self.faults:
            prefix = encode(fault.prompt)
            if (
                fault.margin is not None
                and len(ids) == len(prefix) + fault.position
                and ids[: len(prefix)] == prefix
            ):
                best, second = np.argsort(logits)[::-1][:2]
                logits[second] = logits[best] - fault.margin
        return logits

    def _token(
        self, prompt: str, ids: tuple[int, ...], position: int, options: dict[str, Any]
    ) -> int:
        scores = self._logits(ids)
        if options["temperature"] > 0:
            seed = options.get("seed", 99)
            scores = scores + options["temperature"] * gumbel(seed, len(ids), VOCAB)
        rank = 0
        for fault in self.faults:
            hit = (
                fault.prompt == prompt
                and fault.position == position
                and fault.seeded == ("seed" in options)
            )
            arm = "verify" if options.get("acceptance") == "verify_only" else "speculative"
            if options.get("num_draft_tokens") == 0 or arm not in fault.arms or options.get("stop"):
                continue
            if hit and (fault.seeded or options["temperature"] == 0):
                rank = fault.rank
        if rank == 0:
            return len(scores) - 1 - int(scores[::-1].argmax())  # the last one of equals
        return int(np.argsort(scores, kind="stable")[::-1][rank])

    def _answer(self, prompt: str, options: dict[str, Any]) -> RequestTiming:
        self.seen.append({"prompt": prompt, **options})
        prompt_ids = encode(prompt)
        tokens: list[int] = []
        length = min(options["max_tokens"], self.text_tokens or options["max_tokens"])
        for position in range(length):
            tokens.append(self._token(prompt, (*prompt_ids, *tokens), position, options))
        text = " ".join(map(str, tokens))
        stopped = next((word for word in options.get("stop") or () if word in text), None)
        if stopped is not None and not self.deaf:
            text = text[: text.index(stopped)]
            tokens = tokens[: 1 + text.count(" ")]
            length = len(tokens)
        plain = options.get("num_draft_tokens") == 0
        slowness = (1 + self.jitter * self.generator.uniform(-1, 1)) * self.busy(
            options.get("temperature", 0.0)
        )
        sent = now = self.clock_ns
        now += round(5e6 * slowness)
        chunks, done, steps = [(now, 1)], 1, 0
        drafted_at, kept_at = [0] * self.draft_len, [0] * self.draft_len
        while done < length:
            now += round((self.step_ms if plain else self.speculative_step_ms) * 1e6 * slowness)
            kept = 0 if plain else min(self.accepted[steps % len(self.accepted)], length - done - 1)
            drafted = 0 if plain else min(self.draft_len, length - done - 1)
            for i in range(drafted):
                drafted_at[i] += 1
                kept_at[i] += i < kept
            chunks.append((now, kept + 1))
            done += kept + 1
            steps += 1
        self.clock_ns = now + 1_000_000
        statistics = Statistics(
            input_tokens=len(prompt_ids),
            output_tokens=length,
            drafted=sum(drafted_at),
            accepted=sum(kept_at),
            verify_steps=steps,
            drafted_by_position=tuple(drafted_at),
            accepted_by_position=tuple(kept_at),
            arrival_ns=sent,
            first_token_ns=chunks[0][0] - round(1e6 * self.late_ms),
        )
        reason = "length" if length == options["max_tokens"] else "stop"
        if stopped is not None and not self.deaf:
            reason = "stop"
        timing = RequestTiming(prompt, text, tuple(tokens), reason, sent, tuple(chunks), statistics)
        self._count(statistics)
        return timing

    def _count(self, statistics: Statistics) -> None:
        added = {
            "toolkit_requests": 1,
            "toolkit_output_tokens": statistics.output_tokens,
            "toolkit_draft_tokens": statistics.drafted,
            "toolkit_accepted_draft_tokens": statistics.accepted,
            "toolkit_verify_steps": statistics.verify_steps,
        }
        for name, value in added.items():
            factor = 2 if self.counted_twice and name == "toolkit_output_tokens" else 1
            self.counts[name] = self.counts.get(name, 0) + factor * (value or 0)


def shortened(timing: RequestTiming, tokens: int, **changes: Any) -> RequestTiming:
    """The same answer, cut after `tokens` tokens."""
    return replace(timing, token_ids=timing.token_ids[:tokens], **changes)
