"""What is found out of engines before the first request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from tests.support.runtimes import CODEC, EngineTime, make_request, serve_one
from tests.support.step_engines import PackingTableEngine
from toolkit.speculative.adaptive import AdaptiveSettings
from toolkit.speculative.comparison import GIVEN_UP_STEPS, Comparison
from toolkit.speculative.costs import StepCosts
from toolkit.speculative.expected_speed import Speeds
from toolkit.speculative.rehearsal import BUDGET_NS, DRAFTING_STEPS, rehearsed
from toolkit.speculative.runtime import RuntimeSettings, SpeculativeRuntime

LONGEST = 2


class TimedEngine(PackingTableEngine):
    """A forward takes a millisecond, and a tenth of one for each of its tokens; `scale` times that.
    Blocks of drafts take `dearer` times that in packed ones, which only a runtime makes.
    """

    def __init__(
        self, clock: EngineTime, *, scale: float = 1.0, dearer: float = 1.0, **settings: Any
    ) -> None:
        super().__init__(1, **{"max_seq_len": 512, **settings})
        self.clock, self.scale, self.dearer = clock, scale, dearer

    def pass_time(self, factor: float, tokens: int) -> None:
        self.clock.now += int(self.scale * factor * (1_000_000 + 100_000 * tokens))

    def forward(
        self, slots: Sequence[int], tokens: torch.Tensor, *, last_only: bool = False
    ) -> torch.Tensor:
        self.pass_time(1.0, tokens.numel())
        return super().forward(slots, tokens, last_only=last_only)

    def forward_rows(
        self, slots: Sequence[int], rows: Sequence[Sequence[int]], wanted: Sequence[int]
    ) -> torch.Tensor:
        factor = self.dearer if max(map(len, rows)) == 1 + LONGEST else 1.0
        self.pass_time(factor, sum(map(len, rows)))
        return super().forward_rows(slots, rows, wanted)


def pair(slots: int, **of_target: Any) -> tuple[TimedEngine, TimedEngine]:
    clock = EngineTime()
    target = TimedEngine(clock, max_batch_size=slots, **of_target)
    return target, TimedEngine(clock, scale=0.1, max_batch_size=slots)


def rehearse(
    target: TimedEngine, draft: TimedEngine, **settings: Any
) -> tuple[StepCosts, Comparison, RuntimeSettings]:
    own = RuntimeSettings(LONGEST, adaptive=AdaptiveSettings(), **settings)
    return *rehearsed(target, draft, CODEC, own, target.clock), own


def gain(costs: StepCosts, rows: int) -> float:
    speeds = Speeds(costs, 1.0)
    plain = speeds.of([0.8] * rows, [0] * rows, ())
    return speeds.of([0.8] * rows, [LONGEST] * rows, ()) / plain


def test_both_ways_of_each_load_are_compared_and_the_engines_left_free() -> None:
    target, draft = pair(6)
    costs, comparison, settings = rehearse(target, draft, eos_token_ids=tuple(range(256)))
    assert all(comparison.is_known(rows) for rows in range(2, 7))
    drafted = {len(rows) for rows in target.packed if set(rows) == {1 + LONGEST}}
    assert drafted >= {2, 4, 6}
    for engine in (target, draft):
        assert [engine.length(slot) for slot in range(6)] == [0] * 6
    runtime = SpeculativeRuntime(
        target, draft, CODEC, settings, clock=target.clock, costs=costs, comparison=comparison
    )
    assert runtime.counters().steps == 0
    assert serve_one(runtime, make_request(max_tokens=8)).finish_reason is not None


def test_what_a_runtime_adds_to_drafts_shows() -> None:
    """The engines by themselves do not tell."""
    same, dearer = (rehearse(*pair(4, dearer=factor))[0] for factor in (1.0, 1.3))
    assert gain(dearer, 1) == pytest.approx(gain(same, 1), rel=0.01)
    for rows in (2, 4):
        assert gain(dearer, rows) < 0.9 * gain(same, rows)


def test_loads_at_which_nothing_may_draft_are_left_out() -> None:
    target, draft = pair(8)
    _, comparison, _ = rehearse(target, draft, draft_len_schedule=((1, 2), (3, 1), (5, 0)))
    assert comparison.is_known(2) and comparison.is_known(4) and not comparison.is_known(8)
    widths = {(len(rows), max(rows)) for rows in target.packed if max(rows) <= 1 + LONGEST}
    assert {(2, 3), (4, 2)} <= widths and (4, 3) not in widths
    assert not any(rows > 4 for rows, _ in widths)


@pytest.mark.parametrize(("context", "known"), [(2, False), (8, False), (256, True)])
def test_a_short_context_has_short_requests_or_none(context: int, known: bool) -> None:
    target, _ = pair(2, max_seq_len=context)
    draft = TimedEngine(target.clock, scale=0.1, max_batch_size=2, max_seq_len=context)
    _, comparison, _ = rehearse(target, draft)
    assert comparison.is_known(2) is known and bool(target.packed) is known


class Slow(TimedEngine):
    """Each forward takes so much longer."""

    each_ns = 0

    def forward_rows(self, slots: Any, rows: Any, wanted: Any) -> torch.Tensor:
        self.clock.now += self.each_ns
        return super().forward_rows(slots, rows, wanted)

    def forward(self, *rest: Any, **options: Any) -> torch.Tensor:
        self.clock.now += self.each_ns
        return super().forward(*rest, **options)


def test_drafts_that_could_not_pay_are_left_out() -> None:
    target, draft = pair(2)
    draft = Slow(target.clock, max_batch_size=2)
    draft.each_ns = 20_000_000
    _, comparison, _ = rehearse(target, draft)
    assert not comparison.is_known(2) and not target.packed


@pytest.mark.parametrize(("each_ns", "known"), [(1_000_000, True), (20_000_000, False)])
def test_slow_engines_are_compared_only_as_far_as_the_budget_goes(
    each_ns: int, known: bool
) -> None:
    clock = EngineTime()
    target = Slow(clock, max_batch_size=2)
    target.each_ns = each_ns
    draft = TimedEngine(clock, scale=0.1, max_batch_size=2)
    _, comparison, _ = rehearse(target, draft)
    assert comparison.is_known(2) is known
    assert len(target.packed) * each_ns <= 1.1 * BUDGET_NS
    assert known or not target.packed


def test_an_engine_that_fails_ends_the_rehearsal_and_not_the_server() -> None:
    """Each request that comes then is told."""
    target, draft = pair(2)

    def fails(*_: Any) -> torch.Tensor:
        target.packed.append(())
        raise RuntimeError("broken")

    target.forward_rows = fails  # type: ignore[method-assign]
    costs, comparison, settings = rehearse(target, draft)
    assert not comparison.is_known(2)
    assert len(target.packed) < 100 * (GIVEN_UP_STEPS + DRAFTING_STEPS)
    runtime = SpeculativeRuntime(
        target, draft, CODEC, settings, clock=target.clock, costs=costs, comparison=comparison
    )
    assert serve_one(runtime, make_request()).finish_reason == "error"
