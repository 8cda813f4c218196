"""The serving runtime as the advisor looks at it: loaded engines, and a fresh runtime over them
for each question.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

from toolkit.errors import StageError
from toolkit.interfaces import GenerationRequest, RequestStats, Sampling, StepEngine, TokenEvent
from toolkit.words import AcceptanceChoice, Drafter, SpeculationKind

if TYPE_CHECKING:
    from toolkit.advise.cost import StepTimes
    from toolkit.speculative.runtime import SpeculativeRuntime
    from toolkit.speculative.text import TextCodec

__all__ = ["MeasuredRuntime"]


class MeasuredRuntime:
    """The serving runtime as the advisor looks at it (toolkit.advise.cost.ServingRuntime): loaded
    engines, and a fresh runtime over them for each question. drafter: "draft_target" runs the draft
    engine, "ngram" looks the text up.
    """

    def __init__(
        self,
        target: StepEngine,
        draft: StepEngine | None,
        codec: TextCodec,
        *,
        eos_token_ids: tuple[int, ...],
        acceptance: AcceptanceChoice = "auto",
        ngram_size: int = 4,
    ) -> None:
        self.max_batch_size = target.max_batch_size
        self._target, self._draft, self._codec = target, draft, codec
        self._eos, self._acceptance, self._ngram_size = eos_token_ids, acceptance, ngram_size

    def write(
        self, prompts: Sequence[Sequence[int]], max_tokens: int, temperature: float
    ) -> list[tuple[int, ...]]:
        """Plain decoding of all prompts, each up to EOS or max_tokens."""
        return [tuple(ids) for ids, _ in self.run("none", prompts, 0, max_tokens, temperature)]

    def run(
        self,
        drafter: SpeculationKind,
        prompts: Sequence[Sequence[int]],
        draft_len: int,
        max_tokens: int,
        temperature: float,
        *,
        batch: int | None = None,
    ) -> list[tuple[list[int], RequestStats]]:
        """Serve all prompts, `batch` of them at a time (None: as many as the engine takes):
        (output, statistics) of each.
        """
        outputs: list[list[int]] = [[] for _ in prompts]
        stats: dict[int, RequestStats] = {}
        failed: list[str] = []
        waiting = deque(enumerate(prompts))
        most = batch or self.max_batch_size

        def submit_next() -> None:
            index, prompt = waiting.popleft()

            def listen(event: TokenEvent) -> None:
                outputs[index] += event.token_ids
                if event.stats is not None:
                    stats[index] = event.stats
                    if event.error is not None:
                        failed.append(event.error)

            runtime.submit(self._request(index, prompt, max_tokens, temperature), listen)

        with contextlib.closing(self._runtime(drafter, draft_len, self._eos)) as runtime:
            while waiting or len(stats) < len(prompts):
                while waiting and len(prompts) - len(waiting) - len(stats) < most:
                    submit_next()
                runtime.step()
        if failed:
            raise StageError("tune", f"the runtime failed: {failed[0]}")
        return [(output, stats[index]) for index, output in enumerate(outputs)]

    def serve_ns(
        self,
        drafter: Drafter,
        prompts: Sequence[Sequence[int]],
        draft_len: int,
        max_tokens: int,
        temperature: float,
        *,
        batch: int,
    ) -> int:
        """Nanoseconds to serve all prompts, `batch` of them at a time; draft_len 0 decodes
        plainly.
        """
        began = time.monotonic_ns()
        self.run(
            drafter if draft_len > 0 else "none",
            prompts,
            draft_len,
            max_tokens,
            temperature,
            batch=batch,
        )
        return time.monotonic_ns() - began

    def time_steps(
        self,
        drafter: Drafter,
        prompts: Sequence[Sequence[int]],
        draft_len: int,
        temperature: float,
        steps: int,
    ) -> StepTimes:
        """Steps with all prompts running together, behind one that is not counted. No text ends
        meanwhile: EOS is ignored.
        """
        from toolkit.advise.cost import StepTimes

        begun: set[str] = set()
        parts: list[tuple[int, int, int]] = []
        prefill_ns = 0
        with contextlib.closing(self._runtime(drafter, draft_len, (), padded=True)) as runtime:
            for index, prompt in enumerate(prompts):
                room = min(
                    (draft_len + 1) * (steps + len(prompts) + 3),
                    self._target.max_seq_len - len(prompt),
                )
                request = self._request(
                    index, prompt[: self._target.max_seq_len - room], room, temperature
                )
                runtime.submit(request, lambda event: begun.add(event.request_id))
            while len(begun) < len(prompts):
                draft, verify, host, outside = self._timed_step(runtime)
                prefill_ns += outside
            for _ in range(steps + 1):
                draft, verify, host, outside = self._timed_step(runtime)
                parts.append((draft, verify, host + outside))
        draft_ns, verify_ns, host_ns = zip(*parts, strict=True)
        return StepTimes(draft_ns[1:], verify_ns[1:], host_ns[1:], (prefill_ns // len(prompts),))

    @staticmethod
    def _timed_step(runtime: SpeculativeRuntime) -> tuple[int, int, int, int]:
        """(draft, verify, host, everything else) of one step, in nanoseconds."""
        before, began = runtime.counters(), time.monotonic_ns()
        runtime.step()
        wall, after = time.monotonic_ns() - began, runtime.counters()
        parts = [
            getattr(after, name) - getattr(before, name)
            for name in ("draft_ns", "verify_ns", "host_ns")
        ]
        return parts[0], parts[1], parts[2], wall - sum(parts)

    def _runtime(
        self,
        drafter: SpeculationKind,
        draft_len: int,
        eos: tuple[int, ...],
        *,
        padded: bool = False,
    ) -> SpeculativeRuntime:
        from toolkit.speculative.drafters import NgramDrafter
        from toolkit.speculative.runtime import RuntimeSettings, SpeculativeRuntime

        settings = RuntimeSettings(
            max_draft_len=draft_len, acceptance=self._acceptance, eos_token_ids=eos
        )
        looked_up = NgramDrafter(self._ngram_size, padded=padded) if drafter == "ngram" else None
        draft = self._draft if drafter == "draft_target" and draft_len > 0 else None
        return SpeculativeRuntime(self._target, draft, self._codec, settings, drafter=looked_up)

    def _request(
        self, index: int, prompt: Sequence[int], max_tokens: int, temperature: float
    ) -> GenerationRequest:
        """Seeded where it samples, so that the same texts come out again."""
        sampling = Sampling(temperature=temperature, seed=index if temperature > 0 else None)
        acceptance = "rejection" if self._acceptance == "auto" else self._acceptance
        return GenerationRequest(
            str(index), tuple(prompt), max_tokens, sampling, acceptance=acceptance
        )
