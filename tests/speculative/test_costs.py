"""The figures that adaptive draft lengths are chosen by."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from tests.support.runtimes import EngineTime
from tests.support.step_engines import ChainingTableEngine, TableEngine
from toolkit.interfaces import Chain
from toolkit.speculative.cost_timer import measured_costs
from toolkit.speculative.costs import FRESH_STEPS, Figures, StepCosts

FLAT = [[0.0] * 5, *([1000.0] * 5 for _ in range(3))]  # widths 1 to 3, up to 4 rows


def flat_costs() -> StepCosts:
    return StepCosts(Figures(FLAT, *[[0.0] + [100.0] * 4] * 2), 50.0)


class TimedEngine(TableEngine):
    """A forward of [rows, n] tokens takes 1000 + 100 * rows * n nanoseconds."""

    def __init__(self, clock: EngineTime, **settings: object) -> None:
        super().__init__(1, **settings)  # type: ignore[arg-type]
        self._clock = clock

    def forward(
        self, slots: Sequence[int], tokens: torch.Tensor, *, last_only: bool = False
    ) -> torch.Tensor:
        self._clock.now += 1000 + 100 * tokens.numel()
        return super().forward(slots, tokens, last_only=last_only)


def test_the_engines_are_timed_and_left_free() -> None:
    clock = EngineTime()
    target = TimedEngine(clock, max_batch_size=6)
    draft = TimedEngine(clock, max_batch_size=6)
    costs = measured_costs(target, draft, 3, clock)
    for rows in range(1, 7):  # 3 and 5 are interpolated
        first, second = costs.draft_ns(rows, 1), costs.draft_ns(rows, 2)
        assert [first, second] == pytest.approx([1000 + 100 * rows] * 2)
        one, four = costs._verify_ns(rows, 1), costs._verify_ns(rows, 4)
        assert four - one == pytest.approx(300 * rows)
    assert costs.probe_ns(1) > costs.draft_ns(1, 1)
    read = min(64, draft.max_seq_len // 2, draft.max_step_tokens)
    assert costs.read_ns(read) == pytest.approx(1000 + 100 * read)
    assert [target.length(slot) for slot in range(6)] == [0] * 6
    assert [draft.length(slot) for slot in range(6)] == [0] * 6


def test_a_draft_that_chains_is_timed_by_the_chain() -> None:
    """A call of 700 nanoseconds for the first token, 50 for each one more, and 10 for each that it
    has missed, as every other row has; its forwards take no time.
    """

    class Chaining(ChainingTableEngine):
        def forward_chain(self, chains: Sequence[Chain]) -> Any:
            missed = sum(len(chain.tokens) - 1 for chain in chains)
            clock.now += 650 + 50 * chains[0].count + 10 * missed
            return super().forward_chain(chains)

    clock = EngineTime()
    draft = Chaining(1, max_batch_size=4)
    costs = measured_costs(TimedEngine(clock, max_batch_size=4), draft, 5, clock)
    assert (costs.draft_ns(1, 1), costs.draft_ns(4, 1)) == (700, 720)
    assert costs.draft_ns(1, 2) == costs.draft_ns(4, 5) == 50
    assert [draft.length(slot) for slot in range(4)] == [0] * 4


class ReadingEngine(TimedEngine):
    """Each token of a forward also reads the context of its slot, a nanosecond each."""

    def forward(
        self, slots: Sequence[int], tokens: torch.Tensor, *, last_only: bool = False
    ) -> torch.Tensor:
        self._clock.now += tokens.shape[1] * sum(self.length(slot) for slot in slots)
        return super().forward(slots, tokens, last_only=last_only)


def test_what_is_read_of_the_context_grows_with_it() -> None:
    """By as much as was seen between the two contexts that were timed."""
    clock = EngineTime()
    target, draft = (ReadingEngine(clock, max_batch_size=4, max_seq_len=1024) for _ in range(2))
    costs = measured_costs(target, draft, 3, clock)
    for rows, width in ((1, 1), (1, 4), (4, 1), (4, 3)):
        costs.note_step(rows, [], 64, 0, 0, 0)
        scale, costs._scale = costs._scale, 1.0
        near, first = costs.step_ns(rows, width), costs.draft_ns(rows, 1)
        costs._context += 1000
        assert costs.step_ns(rows, width) - near == pytest.approx(1000 * rows * width, rel=0.02)
        assert costs.draft_ns(rows, 1) - first == pytest.approx(1000 * rows, rel=0.02)
        costs._scale = scale


def test_slots_are_not_filled_for_longer_than_stated() -> None:
    """Where prompts take long, engines are timed at one context."""
    clock = EngineTime()

    class Slow(ReadingEngine):
        def forward(self, *arguments: Any, **options: Any) -> torch.Tensor:
            clock.now += 1_000_000_000
            return super().forward(*arguments, **options)

    target = Slow(clock, max_seq_len=1024)
    costs = measured_costs(target, None, 1, clock)
    near = costs.step_ns(1, 1)
    costs._context = 1000
    assert costs.step_ns(1, 1) == near


def test_slow_engines_are_timed_once() -> None:
    clock, widths = EngineTime(), list[int]()

    class Slow(TimedEngine):
        def forward(self, slots: Any, tokens: torch.Tensor, **options: Any) -> torch.Tensor:
            clock.now += 1_000_000_000
            widths.append(tokens.shape[1])
            return super().forward(slots, tokens, **options)

    measured_costs(Slow(clock, max_batch_size=2), None, 1, clock)
    assert widths.count(2) == 2 * 2  # of each batch, the second one counts


def test_drafts_without_an_engine_cost_nothing() -> None:
    clock = EngineTime()
    costs = measured_costs(TimedEngine(clock), None, 2, clock)
    assert costs.draft_ns(1, 1) == costs.draft_ns(1, 2) == costs.probe_ns(1) == 0.0


def test_a_slower_machine_slows_what_is_not_measured_alike() -> None:
    costs = flat_costs()
    before = costs.draft_ns(2, 1)
    for _ in range(200):
        costs.note_step(1, [1, 1], 64, 400, 2000, 60_000)
    assert costs.draft_ns(2, 1) == pytest.approx(2 * before, rel=0.25)
    assert costs.draft_ns(1, 1) == pytest.approx(200, rel=0.1)


def test_figures_in_use_take_no_part_of_the_machines_waves() -> None:
    """Plain decoding, which is not in use, would look cheap whenever the machine slows down."""
    costs = flat_costs()
    for steps in range(160):
        factor = 1 if steps < 100 else 2
        costs.note_step(1, [1, 1], 64, 200 * factor, 1000 * factor, 60_000)
    assert costs._verify_ns(1, 3) == pytest.approx(costs._verify_ns(1, 1), rel=0.04)
    assert costs.draft_ns(1, 1) == pytest.approx(costs._scale * 100, rel=0.04)


def test_what_a_draft_takes_is_told_by_the_forward_behind_it_on_any_machine() -> None:
    """It was timed without what drafts catch up with, and the machine never stays the same."""
    costs = flat_costs()
    for step in range(1200):
        speed = 1.5 if step // 25 % 2 else 1.0
        costs.note_step(2, [2, 2], 64, int(280 * speed), int(1000 * speed), 0)
    assert costs.draft_ns(2, 1) / (costs._scale * 1000) == pytest.approx(0.14, rel=0.05)


def test_what_prompts_take_to_read_corrects_its_figure() -> None:
    costs = StepCosts(Figures(FLAT, *[[0.0] + [100.0] * 4] * 2), 50.0, reading=3.0)
    for _ in range(100):
        costs.note_reading(30, 150)
    assert costs.read_ns(30) == pytest.approx(150, rel=0.06)


def test_a_figure_that_was_off_is_corrected_beside_the_others() -> None:
    costs = flat_costs()
    for _ in range(400):
        costs.note_step(1, [], 64, 0, 1000, 60_000)
        costs.note_step(1, [1, 1], 64, 200, 1500, 60_000)
    verify_ns = costs._scale * costs._verify_ns(1, 3)
    assert verify_ns == pytest.approx(1500, rel=0.05)


def test_steps_behind_those_of_the_other_kind_correct_their_figures_and_not_the_scale() -> None:
    """Plain decoding was timed in a bad moment, and the machine slows down later."""
    verify = [[0.0] * 5, [1300.0] * 5, [1500.0] * 5, [2000.0] * 5]
    costs = StepCosts(Figures(verify, *[[0.0] + [100.0] * 4] * 2), 50.0)
    for _ in range(100):
        costs.note_step(1, [1, 1], 64, 200, 4000, 60_000)
    scale = costs._scale
    assert scale == pytest.approx(2.0, rel=0.03)
    for _ in range(FRESH_STEPS):
        costs.note_step(1, [], 64, 0, 2000, 60_000)
    assert costs._scale == scale
    assert costs._verify_ns(1, 1) == pytest.approx(2000 / scale, rel=0.02)
    before = costs._verify_ns(1, 1)
    for _ in range(100):
        costs.note_step(1, [], 64, 0, 2 * scale * before, 60_000)
    assert costs._verify_ns(1, 1) == pytest.approx(before, rel=0.05)
    assert costs._scale == pytest.approx(2 * scale, rel=0.05)


@pytest.mark.parametrize("plain_goes_on", [False, True])
def test_what_a_comparison_corrects_is_not_taken_back(plain_goes_on: bool) -> None:
    """Plain steps are said to take 1,000 ns at the machine's speed, and take 1,200 of it."""
    costs = StepCosts(Figures([[0.0] * 5, [1000.0] * 5, [2000.0] * 5], *[[0.0] * 5] * 2), 50.0)

    def take(*, drafts: bool) -> None:
        for _ in range(100):
            costs.note_step(4, [4] if drafts else [], 0.0, 0, 4000 if drafts else 2400, 60_000)

    def beside_plain() -> float:
        return costs._verify_ns(4, 2) / costs._verify_ns(4, 1)

    take(drafts=plain_goes_on)
    take(drafts=not plain_goes_on)
    before, expected = beside_plain(), costs.step_ns(4, 1.0 if plain_goes_on else 2.0)
    costs.correct_plain(range(3, 5), 1.2, goes_on_plainly=plain_goes_on)
    assert costs.step_ns(4, 1.0 if plain_goes_on else 2.0) == pytest.approx(expected)
    take(drafts=not plain_goes_on)
    assert beside_plain() == pytest.approx(before / 1.2, rel=0.02)


@pytest.mark.parametrize("off", [0.7, 1.4])
def test_a_load_whose_figures_are_off_changes_none_of_another_load(off: float) -> None:
    """Many rows decode plainly, and then one drafts, again and again."""
    plain = [0.0] + [1000.0 + 300.0 * row for row in range(64)]
    wide = [2.0 * figure for figure in plain]
    figures = Figures([[0.0] * 65, plain, plain, wide, wide], *[[0.0] + [100.0] * 64] * 2)
    costs = StepCosts(figures, 50.0)

    def of_drafts() -> float:
        return costs._verify_ns(1, 4) / costs._verify_ns(1, 1)

    for _ in range(40):
        for _ in range(100):
            costs.note_step(64, [], 0, 0, int(off * plain[64]), 1000)
        for _ in range(20):
            costs.note_step(1, [1, 1, 1], 0, 300, 2000, 1000)
        assert of_drafts() == pytest.approx(2.0, rel=0.06)


def test_what_the_draft_reads_behind_plain_steps_is_no_draft() -> None:
    costs = flat_costs()
    costs.note_step(1, [], 64, 0, 1000, 60_000)
    for _ in range(20):
        before = costs.draft_ns(1, 1)
        costs.note_step(1, [1], 64, 9_000, 1000, 60_000)
        assert costs.draft_ns(1, 1) == before
        costs.note_step(1, [], 64, 0, 1000, 60_000)


def test_a_step_of_different_lengths_corrects_the_figures_beside_it() -> None:
    """Three tokens in two rows: between the figures of one and of two tokens each."""
    costs = flat_costs()
    for _ in range(600):
        costs.note_step(2, [], 64, 0, 1000, 60_000)
        costs.note_step(2, [1], 64, 100, 1250, 60_000)
    verify_ns = costs._scale * costs._verify_ns(2, 1.5)
    assert verify_ns == pytest.approx(1250, rel=0.05)


def test_the_host_has_more_to_do_where_rows_draft() -> None:
    """Seen from steps of either kind."""
    for drafting, host_ns in (([], 30_000), ([1, 1], 60_000)):
        costs = flat_costs()
        for _ in range(200):
            costs.note_step(1, drafting, 64, 200, 1000, host_ns)
        forward_ns = costs._scale * 1000
        assert costs.step_ns(1, 1) - forward_ns == pytest.approx(30_000, rel=0.05)
        assert costs.step_ns(1, 3) - forward_ns == pytest.approx(60_000, rel=0.05)


def test_plain_steps_are_timed_when_they_have_settled() -> None:
    """They become faster for some steps behind wider ones."""

    class Settling(TimedEngine):
        behind_wide = 0

        def forward(self, slots: Any, tokens: torch.Tensor, **options: Any) -> torch.Tensor:
            self.behind_wide = 0 if tokens.shape[1] > 1 else self.behind_wide + 1
            clock.now += 10_000 if self.behind_wide <= 6 else 0
            return super().forward(slots, tokens, **options)

    clock = EngineTime()
    costs = measured_costs(Settling(clock), None, 2, clock)
    assert costs._verify_ns(1, 2) - costs._verify_ns(1, 1) > 10_000


def test_a_step_that_was_preempted_says_nothing() -> None:
    """One step in ten takes a hundred times as long, and the figures stay."""
    costs, generator = flat_costs(), random.Random(1)
    for _ in range(1000):
        factor = 100 if generator.random() < 0.1 else generator.uniform(0.95, 1.05)
        costs.note_step(1, [1], 64, int(100 * factor), int(1000 * factor), int(60_000 * factor))
    assert costs.draft_ns(1, 1) == pytest.approx(100, rel=0.1)
    assert costs.step_ns(1, 2) == pytest.approx(61_000, rel=0.1)


def test_probes_correct_their_own_figure() -> None:
    costs = flat_costs()
    for _ in range(200):
        costs.note_probe(2, 400)
    assert costs.probe_ns(1) == pytest.approx(200, rel=0.06)


def test_a_bad_moment_cannot_make_plain_decoding_look_slower_than_drafting() -> None:
    verify = [[0.0] * 2, [0.0, 9000.0], [0.0, 1000.0], [0.0, 1500.0]]
    costs = StepCosts(Figures(verify, *[[0.0, 100.0]] * 2), 50.0)
    assert costs.step_ns(1, 1) <= costs.step_ns(1, 2) <= costs.step_ns(1, 3)
    for _ in range(300):
        costs.note_step(1, [1], 64, 100, 2500, 60_000)
    assert costs.step_ns(1, 1) <= costs.step_ns(1, 2) <= costs.step_ns(1, 3)
