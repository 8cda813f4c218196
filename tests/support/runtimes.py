"""Runtimes over small engines, and ways to drive them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

from toolkit.interfaces import GenerationRequest, RequestStats, Sampling, StepEngine, TokenEvent
from toolkit.speculative.load_schedule import RISE_AFTER_NS
from toolkit.speculative.runtime import RuntimeSettings, SpeculativeRuntime
from toolkit.speculative.text import TextCodec


def byte_tokenizer() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(
        models.BPE(vocab={piece: i for i, piece in enumerate(alphabet)}, merges=[])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def byte_codec() -> TextCodec:
    """One token per byte; the id of an ASCII character is its place in GPT-2's byte alphabet:
    use encode, not ord.
    """
    return TextCodec(byte_tokenizer())


CODEC = byte_codec()
RUNAWAY_TEXT = "a" * 40 + "!"


def runaway_codec() -> TextCodec:
    """byte_codec, with an expression that runs away on RUNAWAY_TEXT, and is not refused when a
    checkpoint is read: its alternatives overlap.
    """
    tokenizer = byte_tokenizer()
    split = pre_tokenizers.Split(Regex("(a|a)+$"), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, tokenizer.pre_tokenizer])
    return TextCodec(tokenizer)


def slow_clock() -> Callable[[], int]:
    """A clock for runtimes: from one look to the next it is long enough for drafts to return."""
    return itertools.count(0, RISE_AFTER_NS).__next__


class EngineTime:
    """A clock, in nanoseconds, that only the engines of a test move on."""

    def __init__(self) -> None:
        self.now = 0

    def __call__(self) -> int:
        return self.now


def make_runtime(
    target: StepEngine, draft: StepEngine | None = None, *, max_draft_len: int = 4, **options: Any
) -> SpeculativeRuntime:
    settings = {
        name: options.pop(name) for name in RuntimeSettings.__dataclass_fields__ if name in options
    }
    codec = options.pop("codec", CODEC)
    return SpeculativeRuntime(
        target, draft, codec, RuntimeSettings(max_draft_len=max_draft_len, **settings), **options
    )


def make_request(
    prompt: Sequence[int] = (1, 2, 3), max_tokens: int = 24, request_id: str = "a", **fields: Any
) -> GenerationRequest:
    sampling = {name: fields.pop(name) for name in Sampling.__dataclass_fields__ if name in fields}
    return GenerationRequest(request_id, tuple(prompt), max_tokens, Sampling(**sampling), **fields)


@dataclass
class Outcome:
    """Everything one request was told."""

    events: list[TokenEvent] = field(default_factory=list)

    @property
    def ids(self) -> list[int]:
        return [token for event in self.events for token in event.token_ids]

    @property
    def text(self) -> str:
        return "".join(event.text for event in self.events)

    @property
    def finish_reason(self) -> str | None:
        return self.events[-1].finish_reason if self.events else None

    @property
    def stats(self) -> RequestStats:
        stats = self.events[-1].stats
        assert stats is not None
        return stats


def serve(runtime: SpeculativeRuntime, requests: Sequence[GenerationRequest]) -> list[Outcome]:
    """All requests at once, to the end, in the order given."""
    outcomes = [Outcome() for _ in requests]
    for request, outcome in zip(requests, outcomes, strict=True):
        runtime.submit(request, outcome.events.append)
    while runtime.step():
        pass
    assert all(outcome.finish_reason for outcome in outcomes)
    return outcomes


def serve_one(runtime: SpeculativeRuntime, request: GenerationRequest) -> Outcome:
    return serve(runtime, [request])[0]


def assert_idle(runtime: SpeculativeRuntime, *engines: StepEngine) -> None:
    """Nothing is left behind: no request, no slot, no cached token."""
    counters = runtime.counters()
    assert (counters.active, counters.queued) == (0, 0)
    for engine in engines:
        assert [engine.length(slot) for slot in range(engine.max_batch_size)] == [
            0
        ] * engine.max_batch_size
