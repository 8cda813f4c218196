"""The runtime itself as an endpoint, in this process: what validation asks of a server, without
one, so that any part can be broken.

Chunks are steps, as with `stream_interval_ms: 0`. Times count steps: a fault is no matter of speed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tests.support.runtimes import CODEC, serve_one
from toolkit.client import RequestTiming, Statistics
from toolkit.interfaces import GenerationRequest, Sampling, StepEngine
from toolkit.speculative.runtime import SpeculativeRuntime
from toolkit.speculative.sampling import ExponentialRace
from toolkit.validate.reference import Reference, reference_from_engine

STEP_NS = 1_000_000


def noise(seed: int, position: int, vocab: int) -> np.ndarray:
    return ExponentialRace(seed, vocab).gumbel(position)


@dataclass
class RuntimeEndpoint:
    """encode: how the server reads a prompt. overrides: options that every request gets,
    whatever was asked.
    """

    runtime: SpeculativeRuntime
    encode: Callable[[str], list[int]] = CODEC.encode
    overrides: dict[str, Any] = field(default_factory=dict)
    now_ns: int = 0
    served: int = 0

    def measure(self, prompts: Iterable[str], **options: Any) -> list[RequestTiming]:
        return [self._answer(prompt, {**options, **self.overrides}) for prompt in prompts]

    def _answer(self, prompt: str, options: dict[str, Any]) -> RequestTiming:
        sampling = Sampling(
            **{
                name: options[name]
                for name in Sampling.__dataclass_fields__
                if options.get(name) is not None
            }
        )
        self.served += 1
        request = GenerationRequest(
            request_id=f"r{self.served}",
            prompt_ids=tuple(self.encode(prompt)),
            max_tokens=options["max_tokens"],
            sampling=sampling,
            stop=tuple(options.get("stop") or ()),
            draft_len=options.get("num_draft_tokens"),
            acceptance=options.get("acceptance"),
            # Without one, a request shares with no other, as those of toolkit.client.
            cache_salt=options.get("cache_salt", f"salt {self.served}"),
        )
        sent = self.now_ns = self.now_ns + STEP_NS
        outcome = serve_one(self.runtime, request)
        chunks = []
        for event in outcome.events:
            self.now_ns += STEP_NS
            if event.token_ids:
                chunks.append((self.now_ns, len(event.token_ids)))
        stats = outcome.stats
        statistics = Statistics(
            input_tokens=stats.prompt_tokens,
            output_tokens=stats.output_tokens,
            drafted=stats.drafted,
            accepted=stats.accepted,
            verify_steps=stats.verify_steps,
            drafted_by_position=stats.drafted_by_position,
            accepted_by_position=stats.accepted_by_position,
            steps_by_reason=dict(stats.steps_by_reason),
            reused_blocks=stats.reused_prompt_tokens,
        )
        text, ids = outcome.text, tuple(outcome.ids)
        return RequestTiming(
            prompt, text, ids, outcome.finish_reason, sent, tuple(chunks), statistics
        )


def reference_of(
    target: StepEngine,
    draft: StepEngine | None = None,
    *,
    encode: Callable[[str], list[int]] = CODEC.encode,
) -> Reference:
    """Sound engines as the reference."""
    return reference_from_engine(
        lambda: target, encode, (), noise, None if draft is None else lambda: draft
    )
