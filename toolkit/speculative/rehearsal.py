"""What drafts cost beside plain decoding, found out before the first request.

`cost_timer` times the engines by themselves. What a runtime adds differs between the two ways, by
up to a tenth of a step, and where drafts of a batch gain or lose no more than that it would have to
try both while it serves. So requests of its own run first, about as many as each load has, in turns
plainly and with drafts, and a `Comparison` looks on. Their texts do not matter, since a step is
compared by what it was expected to take for the drafts that it had.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from toolkit.interfaces import GenerationRequest, StepEngine, TokenEvent
from toolkit.speculative.adaptive import PERFECT_ACCEPTANCE, AdaptiveSettings
from toolkit.speculative.comparison import (
    GIVEN_UP_STEPS,
    MOST_STEPS,
    UNSETTLED_DRAFTS,
    Comparison,
)
from toolkit.speculative.cost_timer import measured_costs
from toolkit.speculative.costs import StepCosts
from toolkit.speculative.expected_speed import Speeds
from toolkit.speculative.load_schedule import LoadSchedule
from toolkit.speculative.runtime import RuntimeSettings, SpeculativeRuntime
from toolkit.speculative.text import TextCodec
from toolkit.speculative.trials import LEAST_PROMISE, UNSETTLED_STEPS, load_of

__all__ = ["rehearsed"]

# Of each load, at most. Those beyond LEAST_COMPARISONS have to end within the budget; none is made
# where so many would not.
MOST_COMPARISONS, LEAST_COMPARISONS, BUDGET_NS = 4, 2, 500_000_000
DRAFTING_STEPS = UNSETTLED_DRAFTS + MOST_STEPS
# Of a request. Outputs differ in length, so that now and then a prompt is read, as it is later.
PROMPT_TOKENS, OUTPUT_TOKENS, OUTPUTS = 64, 64, 8


def rehearsed(
    target: StepEngine,
    draft: StepEngine,
    codec: TextCodec,
    settings: RuntimeSettings,
    clock: Callable[[], int] = time.monotonic_ns,
) -> tuple[StepCosts, Comparison]:
    """What the engines take, whose slots must be free, and are free again. settings: of the runtime
    that will serve.
    """
    costs = measured_costs(target, draft, settings.max_draft_len, clock)
    comparison = Comparison(target.max_batch_size, costs)
    rehearsal = _Rehearsal(target, draft, codec, settings, costs, comparison, clock)
    for load in range(1, load_of(target.max_batch_size) + 1):
        rehearsal.compare(min(2**load, target.max_batch_size))
    rehearsal.end()
    comparison.doubt_rehearsal()
    return costs, comparison


class _LedRuntime(SpeculativeRuntime):
    """Its requests draft as many tokens as it is told."""

    drafts = 0

    def _limit_by_load(self) -> None:
        for row in (*self._running, *self._prefilling):
            row.load_limit = self.drafts

    @property
    def open_requests(self) -> int:
        return len(self._open)

    @property
    def running_requests(self) -> int:
        """Whose prompts are read."""
        return len(self._running)

    def cancel_all(self) -> None:
        for request_id in list(self._open):
            self.cancel(request_id)
        self.step()


class _Rehearsal:
    def __init__(
        self,
        target: StepEngine,
        draft: StepEngine,
        codec: TextCodec,
        settings: RuntimeSettings,
        costs: StepCosts,
        comparison: Comparison,
        clock: Callable[[], int],
    ) -> None:
        own = replace(
            settings,
            eos_token_ids=(),
            draft_len_schedule=(),
            reuse_prefixes=False,
            adaptive=AdaptiveSettings(),
        )
        self._runtime = _LedRuntime(
            target, draft, codec, own, clock=clock, costs=costs, comparison=comparison
        )
        self._settings, self._costs, self._comparison = settings, costs, comparison
        self._clock = clock
        self._begun = 0  # requests
        context = min(target.max_seq_len, draft.max_seq_len)
        most = min(settings.max_input_len or context, context // 2)
        self._prompt = (0,) * min(PROMPT_TOKENS, most)
        self._least_output = min(OUTPUT_TOKENS, (context - most) // 2)

    def compare(self, rows: int) -> None:
        """Compare plain steps of so many requests with some that draft, if drafts could pay."""
        drafts = self._best_length(rows)
        began, expected_ns = self._clock(), self._comparison_ns(rows, drafts)
        for count in range(MOST_COMPARISONS if drafts else 0):
            comparisons = max(LEAST_COMPARISONS - count, 1)
            if self._clock() - began + comparisons * expected_ns > BUDGET_NS:
                break
            for _ in range(GIVEN_UP_STEPS):  # what has ended begins anew
                self._step(rows, 0)
                if self._runtime.running_requests == rows:
                    break
            self._comparison.begin(rows)
            for _ in range(DRAFTING_STEPS):
                self._step(rows, drafts)
            for _ in range(GIVEN_UP_STEPS):
                if self._comparison.is_on:
                    self._step(rows, 0)
            self._comparison.end()
        self._runtime.cancel_all()

    def end(self) -> None:
        self._runtime.close()

    def _best_length(self, rows: int) -> int:
        """Of perfect drafts; 0 if load or context do not allow them, or they would be slow."""
        if self._least_output <= 2:  # the first token and the last one of a step are no drafts
            return 0
        longest, schedule = self._settings.max_draft_len, self._settings.draft_len_schedule
        if schedule:
            longest = min(longest, LoadSchedule(schedule).length(rows, 0))
        speeds = Speeds(self._costs, 1.0)
        of_length = [
            speeds.of([PERFECT_ACCEPTANCE] * rows, [length] * rows, ())
            for length in range(longest + 1)
        ]
        best = max(range(1, longest + 1), key=of_length.__getitem__, default=0)
        return best if of_length[best] >= LEAST_PROMISE * of_length[0] else 0

    def _comparison_ns(self, rows: int, drafts: int) -> float:
        """What one is expected to take."""
        plain_ns = self._costs.step_ns(rows, 1.0)
        drafting_ns = self._costs.step_ns(rows, 1.0 + drafts)
        drafting_ns += sum(self._costs.draft_ns(rows, depth + 1) for depth in range(drafts))
        return DRAFTING_STEPS * drafting_ns + (UNSETTLED_STEPS + MOST_STEPS) * plain_ns

    def _step(self, rows: int, drafts: int) -> None:
        """Of so many requests."""
        while self._runtime.open_requests < rows:
            self._begun += 1
            output = self._least_output * (OUTPUTS + self._begun % OUTPUTS) // OUTPUTS
            request = GenerationRequest(
                request_id=str(self._begun),
                prompt_ids=self._prompt,
                max_tokens=output,
                draft_len=self._settings.max_draft_len,
            )
            self._runtime.submit(request, _ignore)
        self._runtime.drafts = drafts
        self._runtime.step()


def _ignore(event: TokenEvent) -> None:
    """Nobody reads the texts."""
