"""The grid of small engines: quality compared with the unquantized target, the best cell, and the
cost of quantizing a draft.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from tests.support.runtimes import CODEC
from tests.support.step_engines import TableEngine
from toolkit.advise.cost import StepTimes
from toolkit.advise.grid import OpenTarget, measure_grid, quality
from toolkit.advise.observe import teacher_forced
from toolkit.advise.stage import Contender, Question
from toolkit.records.advice import Grid
from toolkit.records.codec import from_json, to_json
from toolkit.workflows.measured_runtime import MeasuredRuntime

PROMPTS = [("all", (1 + index % 30, 2, 3 + index % 7)) for index in range(24)]
HELDOUT = [[(seed * 7 + index * index) % 40 for index in range(30)] for seed in range(8)]
# In this test FP8 saves little time, and W8A16 half of it.
DRAFT_MS = {"NO_QUANT": 2.0, "FP8": 1.9, "W8A16": 1.0}


class Scripted(MeasuredRuntime):
    """Texts and runs are real; a step takes 10 ms for the target and DRAFT_MS per draft token."""

    draft_ms = 0.0

    def time_steps(
        self,
        drafter: str,
        prompts: Sequence[Sequence[int]],
        draft_len: int,
        temperature: float,
        steps: int,
    ) -> StepTimes:
        draft = int(1e6 * self.draft_ms * draft_len)
        return StepTimes((draft,) * steps, (int(1e7),) * steps, (0,) * steps, (0,))

    def serve_ns(
        self,
        drafter: str,
        prompts: Sequence[Sequence[int]],
        draft_len: int,
        max_tokens: int,
        temperature: float,
        *,
        batch: int,
    ) -> int:
        chosen = drafter if draft_len > 0 else "none"
        stats = [
            each
            for _, each in self.run(
                chosen, prompts, draft_len, max_tokens, temperature, batch=batch
            )
        ]
        return int(
            sum(1e7 * each.verify_steps + 1e6 * self.draft_ms * each.drafted for each in stats) + 1
        )


@pytest.fixture(scope="module")
def grid() -> Grid:
    """The FP8 draft agrees with the target much less than the unquantized draft; the W8A16 draft
    agrees as well and is twice as fast.
    """
    targets = {
        "NO_QUANT": TableEngine(1, closeness=0.8),
        "FP8": TableEngine(1, closeness=0.8, sharpness=2.02),
    }
    drafts = {name: TableEngine(2, closeness=0.5 if name == "FP8" else 0.8) for name in DRAFT_MS}

    def open_target(algo: str) -> OpenTarget:
        target, contenders = targets[algo], []
        for name, draft in drafts.items():
            runtime = Scripted(target, draft, CODEC, eos_token_ids=())
            runtime.draft_ms = DRAFT_MS[name]
            contenders.append(Contender(name, "draft_target", runtime, teacher_forced(draft)))
        return OpenTarget(teacher_forced(target), contenders)

    question = Question(PROMPTS, 32, None, "auto", max_draft_len=4, batches=(1,), rounds=1, steps=4)
    return measure_grid(
        list(targets),
        open_target,
        question,
        HELDOUT,
        max_kl=0.05,
        rounds=1,
        progress=lambda *_: None,
    )


def test_beside_the_unquantized_target_one_other_is_held_at_a_time() -> None:
    """And one draft at a time, if nothing has to be timed."""
    held: dict[str, weakref.WeakSet[TableEngine]] = {
        role: weakref.WeakSet() for role in ("target", "draft")
    }
    most = dict.fromkeys(held, 0)

    def load(role: str, seed: int) -> TableEngine:
        engine = TableEngine(seed, closeness=0.8)
        held[role].add(engine)
        most[role] = max(most[role], len(held[role]))
        return engine

    def open_target(algo: str) -> OpenTarget:
        target = load("target", 1)

        def contender(name: str) -> Contender:
            draft = load("draft", 2)
            runtime = MeasuredRuntime(target, draft, CODEC, eos_token_ids=())
            return Contender(name, "draft_target", runtime, teacher_forced(draft), lambda *_: 0.001)

        return OpenTarget(teacher_forced(target), map(contender, DRAFT_MS))

    question = Question(PROMPTS, 8, None, "auto", max_draft_len=2, batches=(1,), rounds=1, steps=2)
    grid = measure_grid(
        ["NO_QUANT", "FP8", "W8A8_SQ_PER_CHANNEL", "W8A16"],
        open_target,
        question,
        HELDOUT,
        max_kl=0.05,
        rounds=1,
        progress=lambda *_: None,
    )
    assert len(grid.cells) == 4 * len(DRAFT_MS)
    assert most == {"target": 2, "draft": 1}


def test_every_pair_has_a_cell_and_the_grid_survives_json(grid: Grid) -> None:
    assert {(cell.target, cell.draft) for cell in grid.cells} == {
        (t, d) for t in ("NO_QUANT", "FP8") for d in DRAFT_MS
    }
    assert from_json(Grid, to_json(grid)) == grid
    lengths = [cell.acceptance_length for cell in grid.cells]
    assert all(1.0 <= length.low < length.estimate < length.high <= 5.0 for length in lengths)


def test_quantizing_the_draft_is_said_to_cost_more_than_it_saves_where_it_does(grid: Grid) -> None:
    verdicts = {(cost.target, cost.draft): cost for cost in grid.drafts}
    assert verdicts["NO_QUANT", "FP8"].verdict == "costs more than it saves"
    assert verdicts["NO_QUANT", "FP8"].alpha_lost > verdicts["NO_QUANT", "FP8"].draft_time_saved > 0
    assert verdicts["NO_QUANT", "W8A16"].verdict == "pays"
    assert verdicts["NO_QUANT", "W8A16"].draft_time_saved == pytest.approx(0.5)


def test_the_best_cell_is_the_fastest_that_keeps_quality(grid: Grid) -> None:
    (best,) = [cell for cell in grid.cells if cell.best]
    assert best.draft == "W8A16"
    assert best.tokens_per_s.estimate == max(cell.tokens_per_s.estimate for cell in grid.cells)


def test_a_grid_of_hardware_that_is_not_here_has_the_speeds_that_costs_and_acceptance_come_to() -> (
    None
):
    """Nothing is timed. Texts of a table engine never end early, so the speed is the tokens of a
    step divided by its time.
    """

    class Untimed(MeasuredRuntime):
        def serve_ns(self, *args: Any, **more: Any) -> int:
            raise AssertionError("nothing is run for its time where speeds are predicted")

    targets = {
        "NO_QUANT": TableEngine(1, closeness=0.8),
        "FP8": TableEngine(1, closeness=0.8, sharpness=2.02),
    }
    drafts = {"NO_QUANT": TableEngine(2, closeness=0.8), "FP8": TableEngine(2, closeness=0.8)}

    def open_target(algo: str) -> OpenTarget:
        target = targets[algo]

        def forward_s(role: str, batch: int, tokens: int) -> float:
            return (
                0.0 if tokens > 5 else 0.001 if role == "draft" else 0.010
            )  # a prompt is read in no time

        contenders = [
            Contender(
                name,
                "draft_target",
                Untimed(target, draft, CODEC, eos_token_ids=()),
                teacher_forced(draft),
                forward_s,
            )
            for name, draft in drafts.items()
            if algo != "NO_QUANT"  # fits nowhere
        ]
        return OpenTarget(teacher_forced(target), contenders)

    prompts = [("all", (*ids, 5, 6, 7)) for _, ids in PROMPTS]
    grid = measure_grid(
        list(targets),
        open_target,
        Question(prompts, 32, None, "auto", max_draft_len=4, batches=(1,)),
        HELDOUT,
        max_kl=0.05,
        rounds=1,
        progress=lambda *_: None,
        costs_are="predicted for H200",
        left_out=["target NO_QUANT: too large"],
    )
    assert [target.quant_algo for target in grid.targets] == ["NO_QUANT", "FP8"]
    assert [(cell.target, cell.draft) for cell in grid.cells] == [
        ("FP8", "NO_QUANT"),
        ("FP8", "FP8"),
    ]
    assert (grid.costs_are, grid.left_out) == (
        "predicted for H200",
        ("target NO_QUANT: too large",),
    )
    for cell in grid.cells:
        plain = 32 / (31 * 0.010)
        assert cell.tokens_per_s.estimate == pytest.approx(plain * cell.speedup.estimate)
        # Blocks are shorter at the end of a text, so the speedup is a little higher than this.
        speedup = cell.acceptance_length.estimate * 10 / (10 + cell.draft_len)
        assert speedup <= cell.speedup.estimate <= 1.1 * speedup
        assert cell.speedup.low < cell.speedup.estimate < cell.speedup.high
    (cost,) = grid.drafts  # the same draft twice
    assert (cost.speed.low, cost.speed.high, cost.verdict) == (1.0, 1.0, "makes no difference seen")


def test_kl_and_perplexity_are_those_of_the_definition() -> None:
    source, other = TableEngine(1), TableEngine(5)
    model = teacher_forced(source)
    same = quality("NO_QUANT", model, model, HELDOUT)
    assert same.kl.estimate == pytest.approx(0.0, abs=1e-12)
    measured = quality("FP8", teacher_forced(other), model, HELDOUT)
    import torch

    divergence, surprise = [], []
    for ids in HELDOUT:
        rows = []
        for engine in (source, other):
            logits = torch.cat(
                [engine.forward([0], torch.tensor([[token]])).clone() for token in ids[:-1]], dim=1
            )[0]
            engine.rewind([0], [0])
            rows.append(torch.log_softmax(logits[1:], dim=-1))
        divergence.append((rows[0].exp() * (rows[0] - rows[1])).sum(-1))
        surprise.append(-rows[1][torch.arange(len(ids) - 2), torch.tensor(ids[2:])])
    assert measured.kl.estimate == pytest.approx(float(torch.cat(divergence).mean()))
    assert measured.perplexity.estimate == pytest.approx(float(np.exp(torch.cat(surprise).mean())))
    assert measured.kl.low < measured.kl.estimate < measured.kl.high
