"""Draft precision x target precision: what quantizing either costs in acceptance and quality, and
what it saves in time.

Quality is the target's alone: KL to the unquantized target and perplexity, compiled engines
teacher-forced over held-out text. Speed is really measured, on the same prompts for every cell, at
the draft length that the advisor finds for that cell. So two cells of a target are paired prompt by
prompt and in time, and the ratio of their speeds has an interval of its own.

For hardware that is not here a prompt takes the steps that its text is expected to take, each as
long as predicted. Cells are paired by the same prompts; their intervals are then of acceptance
alone.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from toolkit.advise.choose import Mode, text_times
from toolkit.advise.cost import MEASURED
from toolkit.advise.observe import Text, teacher_forced
from toolkit.advise.stage import Contender, Question, judged, write
from toolkit.interfaces import Progress, StepEngine
from toolkit.records.advice import Candidate, DraftCost, Grid, GridCell, TargetQuality
from toolkit.records.measured import Interval
from toolkit.resampling import CONFIDENCE, bootstrap_ratio_of_sums
from toolkit.words import DraftVerdict, QuantAlgo

__all__ = ["UNQUANTIZED", "Cell", "best_cell", "draft_cost", "measure_grid", "quality"]

Floats = NDArray[np.float64]

UNQUANTIZED: Final = "NO_QUANT"


@dataclass(frozen=True, slots=True)
class Cell:
    """What was found for one pair of precisions. spent_ns, plain_ns: nanoseconds [rounds,
    prompts]; predicted, of one round.
    """

    candidate: Candidate
    spent_ns: Floats
    plain_ns: Floats
    tokens: Floats  # [prompts]


def measure_grid(
    targets: Mapping[QuantAlgo, StepEngine],
    contenders: Callable[[QuantAlgo], Sequence[Contender]],
    question: Question,
    heldout: Sequence[Sequence[int]],
    *,
    max_kl: float,
    rounds: int,
    progress: Progress,
    costs_are: str = MEASURED,
    left_out: Sequence[str] = (),
) -> Grid:
    """targets: quant_algo -> engine, the unquantized one among them. contenders: of a target's
    quant_algo, one per draft, named by the draft's quant_algo; none for a target that is only
    compared with. Greedy, one request at a time. max_kl: the gate that a target has to keep to be
    the best. costs_are, left_out: in words, whose costs, and what nobody can serve.
    """
    qualities: dict[str, TargetQuality] = {}
    cells: dict[tuple[str, str], Cell] = {}
    costs: list[DraftCost] = []
    for algo, target in targets.items():
        progress(len(qualities), len(targets), f"target {algo}: KL and perplexity")
        qualities[algo] = quality(algo, target, targets[UNQUANTIZED], heldout)
        drafts = contenders(algo)
        if not drafts:
            continue
        progress(
            len(qualities) - 1, len(targets), f"target {algo}: acceptance and cost of every draft"
        )
        advised = _advised(target, drafts, question)
        if any(draft.forward_s is None for draft in drafts):
            progress(len(qualities) - 1, len(targets), f"target {algo}: speed of every draft")
            found = _run(
                drafts,
                {name: candidate for name, (candidate, _) in advised.items()},
                question,
                rounds,
            )
        else:
            found = {
                name: _predicted(candidate, mode) for name, (candidate, mode) in advised.items()
            }
        cells.update({(algo, name): cell for name, cell in found.items()})
        quantized = (
            [] if UNQUANTIZED not in found else [name for name in found if name != UNQUANTIZED]
        )
        costs += [draft_cost(algo, name, found[name], found[UNQUANTIZED]) for name in quantized]
    best = best_cell(cells, qualities, max_kl)
    return Grid(
        cells=tuple(_row(names, cell, best=names == best) for names, cell in cells.items()),
        targets=tuple(qualities.values()),
        drafts=tuple(costs),
        costs_are=costs_are,
        left_out=tuple(left_out),
        max_kl=max_kl,
        prompts=len(question.prompts),
        confidence=CONFIDENCE,
    )


def quality(
    algo: QuantAlgo, target: StepEngine, source: StepEngine, texts: Sequence[Sequence[int]]
) -> TargetQuality:
    """KL(unquantized || quantized) in nats per token, and exp of the mean negative
    log-likelihood; intervals over texts.
    """
    divergence, surprise, counts = [], [], []
    for ids in texts:
        text = Text("", tuple(ids[:1]), tuple(ids[1:]), len(ids))
        kl_sum, nll_sum, place = 0.0, 0.0, 1
        passes = [
            teacher_forced(engine, text) for engine in dict.fromkeys((source, target))
        ]  # one where both are the same
        for reference, *others in zip(*passes, strict=True):
            rows = others[0] if others else reference
            wanted, given = _log_softmax(reference), _log_softmax(rows)
            following = np.array(text.output[place : place + len(rows)], dtype=np.int64)
            kl_sum += float((np.exp(wanted) * (wanted - given)).sum())
            nll_sum -= float(given[np.arange(len(rows)), following].sum())
            place += len(rows)
        divergence.append(kl_sum)
        surprise.append(nll_sum)
        counts.append(place - 1)
    kl = Interval(*bootstrap_ratio_of_sums(divergence, counts))
    perplexity = Interval(
        *(float(np.exp(nll)) for nll in bootstrap_ratio_of_sums(surprise, counts))
    )
    return TargetQuality(algo, kl, perplexity, sum(counts))


def draft_cost(target: str, draft: str, cell: Cell, unquantized: Cell) -> DraftCost:
    """Whether quantizing the draft pays: acceptance lost and draft time saved, at each cell's
    best length, and the speed.
    """
    speed = Interval(
        *bootstrap_ratio_of_sums(unquantized.spent_ns, cell.spent_ns)
    )  # the target writes the same texts for both
    lost = 1.0 - _step(cell)[0] / _step(unquantized)[0]
    saved = 1.0 - _step(cell)[1] / _step(unquantized)[1]
    seen: DraftVerdict = (
        "costs more than it saves" if speed.high < 1.0 else "makes no difference seen"
    )
    return DraftCost(target, draft, lost, saved, speed, "pays" if speed.low > 1.0 else seen)


def best_cell(
    cells: Mapping[tuple[str, str], Cell], qualities: Mapping[str, TargetQuality], max_kl: float
) -> tuple[str, str] | None:
    """The fastest one whose target keeps the gate on KL, judged by its upper bound; the unquantized
    target always does. None where no cell is left.
    """
    kept = {
        names: cell
        for names, cell in cells.items()
        if qualities[names[0]].kl.high <= max_kl or names[0] == UNQUANTIZED
    }
    return max(kept, key=lambda names: _speed(kept[names]).estimate, default=None)


def _advised(
    target: StepEngine, drafts: Sequence[Contender], question: Question
) -> dict[str, tuple[Candidate, Mode]]:
    """Every draft at every length, greedy, and what that rests on."""

    def no_lookup() -> Any:
        raise AssertionError("the grid compares draft models")

    def silent(done: int, total: int | None, what: str) -> None:
        pass

    texts, found = write(drafts[0].runtime, question, silent), {}
    for draft in drafts:
        candidate, (greedy,) = judged(
            target, draft, question, texts, (1,), no_lookup, lambda logits: logits, silent
        )
        found[draft.name] = candidate, greedy
    return found


def _predicted(candidate: Candidate, mode: Mode) -> Cell:
    tokens = np.array([len(text.ready) + 1 for text in mode.drafted], dtype=np.float64)
    spent, plain = (text_times(mode, length)[None] for length in (candidate.draft_len, 0))
    return Cell(candidate, spent, plain, tokens)


def _run(
    drafts: Sequence[Contender],
    candidates: Mapping[str, Candidate],
    question: Question,
    rounds: int,
) -> dict[str, Cell]:
    """Every draft at its best length, and plain decoding, prompt by prompt in random order, so
    that they share slow moments.
    """
    prompts = [ids for _, ids in question.prompts]
    arms = [None, *drafts]
    spent = {arm and arm.name: np.zeros((rounds, len(prompts))) for arm in arms}
    shuffle = random.Random(0).shuffle
    for number, (index, prompt) in itertools.product(range(rounds), enumerate(prompts)):
        shuffle(arms)
        for arm in arms:
            length = 0 if arm is None else candidates[arm.name].draft_len
            by = (arm or drafts[0]).runtime
            nanoseconds = by.serve_ns(
                "draft_target", [prompt], length, question.max_tokens, 0.0, batch=1
            )
            spent[arm and arm.name][number, index] = nanoseconds
    tokens = np.array(
        [len(output) for output in drafts[0].runtime.write(prompts, question.max_tokens, 0.0)],
        dtype=np.float64,
    )
    return {
        draft.name: Cell(candidates[draft.name], spent[draft.name], spent[None], tokens)
        for draft in drafts
    }


def _row(names: tuple[str, str], cell: Cell, *, best: bool) -> GridCell:
    alpha = next(
        each for each in cell.candidate.alphas if (each.rule, each.domain) == ("greedy", None)
    )
    return GridCell(
        target=names[0],
        draft=names[1],
        alpha=Interval(alpha.estimate, alpha.low, alpha.high),
        draft_len=cell.candidate.draft_len,
        acceptance_length=Interval(
            cell.candidate.acceptance_length,
            cell.candidate.acceptance_length_low,
            cell.candidate.acceptance_length_high,
        ),
        tokens_per_s=_speed(cell),
        speedup=Interval(*bootstrap_ratio_of_sums(cell.plain_ns, cell.spent_ns)),
        best=best,
    )


def _step(cell: Cell) -> tuple[float, float]:
    """(alpha, milliseconds of drafting one token) of a cell; comparable whatever length each
    cell takes.
    """
    alpha = next(
        each for each in cell.candidate.alphas if (each.rule, each.domain) == ("greedy", None)
    )
    one = next(
        cost
        for cost in cell.candidate.costs["greedy"]
        if (cost.batch, cost.draft_len) == (1, cell.candidate.draft_len)
    )
    return max(alpha.estimate, 1e-9), one.draft_ms / one.draft_len


def _speed(cell: Cell) -> Interval:
    return Interval(*bootstrap_ratio_of_sums(cell.tokens, cell.spent_ns.mean(axis=0) / 1e9))


def _log_softmax(logits: NDArray[Any]) -> Floats:
    shifted = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    out: Floats = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return out
