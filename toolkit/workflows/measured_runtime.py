"""Run the serving runtime for the advisor, with a new runtime for each measurement."""

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
    """The loaded engines, which serve each measurement with a new runtime.

    It implements toolkit.advise.cost.ServingRuntime. Of its methods' arguments, drafter is
    "draft_target" to run the draft engine, "ngram" to look the draft up in the text, or "none".
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
        """The outputs of all prompts, decoded without speculation up to EOS or max_tokens."""
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
        """Serve all prompts, `batch` of them at a time: (output, statistics) of each.

        batch: None for as many as the engine takes. Raises StageError if a request fails.
        """
        outputs: list[list[int]] = [[] for _ in prompts]
        stats: dict[int, RequestStats] = {}
        errors: list[str] = []
        waiting = deque(enumerate(prompts))
        max_running = batch or self.max_batch_size

        def submit_next() -> None:
            index, prompt = waiting.popleft()

            def listen(event: TokenEvent) -> None:
                outputs[index] += event.token_ids
                if event.stats is not None:
                    stats[index] = event.stats
                    if event.error is not None:
                        errors.append(event.error)

            runtime.submit(self._request(index, prompt, max_tokens, temperature), listen)

        with contextlib.closing(self._runtime(drafter, draft_len, self._eos)) as runtime:
            while waiting or len(stats) < len(prompts):
                while waiting and len(prompts) - len(waiting) - len(stats) < max_running:
                    submit_next()
                runtime.step()
        if errors:
            raise StageError("tune", f"the runtime failed: {errors[0]}")
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
        """Nanoseconds to serve all prompts, `batch` of them at a time.

        draft_len 0 decodes without speculation.
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
        """Times of `steps` steps with all prompts in one batch, after one step that is not counted.

        EOS is ignored, so that no request ends meanwhile. A request alone may be stepped by the
        engine in bursts (toolkit.speculative.bursts): of a burst each step has an equal share.
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
                timed, outside = self._timed_step(runtime)
                prefill_ns += outside
                if len(prompts) == 1:  # a burst may have begun, and use the room up
                    parts += timed
            while len(parts) <= steps and runtime.counters().active == len(prompts):
                timed, outside = self._timed_step(runtime)
                parts += [
                    (draft, verify, host + outside // len(timed)) for draft, verify, host in timed
                ]
        counted = parts[1 : steps + 1]
        if len(counted) < min(steps, 1):
            raise StageError(
                "tune",
                f"a prompt leaves too little room to time a step in the context of"
                f" {self._target.max_seq_len} tokens",
                hint="Raise engine.max_seq_len, or shorten the prompts.",
            )
        draft_ns, verify_ns, host_ns = (tuple(step[part] for step in counted) for part in range(3))
        return StepTimes(draft_ns, verify_ns, host_ns, (prefill_ns // len(prompts),))

    @staticmethod
    def _timed_step(runtime: SpeculativeRuntime) -> tuple[list[tuple[int, int, int]], int]:
        """Take a step, or a burst of them. Returns nanoseconds (draft, verify, host) of each, and
        of everything else together.
        """
        before, began = runtime.counters(), time.monotonic_ns()
        runtime.step()
        wall, after = time.monotonic_ns() - began, runtime.counters()
        draft, verify, host = (
            getattr(after, name) - getattr(before, name)
            for name in ("draft_ns", "verify_ns", "host_ns")
        )
        count = after.steps - before.steps
        shares = [(draft // count, verify // count, host // count)] * count if count else []
        return shares, wall - draft - verify - host

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
        ngram_drafter = (
            NgramDrafter(self._ngram_size, padded=padded) if drafter == "ngram" else None
        )
        draft = self._draft if drafter == "draft_target" and draft_len > 0 else None
        return SpeculativeRuntime(self._target, draft, self._codec, settings, drafter=ngram_drafter)

    def _request(
        self, index: int, prompt: Sequence[int], max_tokens: int, temperature: float
    ) -> GenerationRequest:
        """A request that has a seed if it samples, so that it gives the same text every time."""
        sampling = Sampling(temperature=temperature, seed=index if temperature > 0 else None)
        acceptance = "rejection" if self._acceptance == "auto" else self._acceptance
        return GenerationRequest(
            str(index), tuple(prompt), max_tokens, sampling, acceptance=acceptance
        )
