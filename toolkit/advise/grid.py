"""Compare all pairs of draft and target precision: what quantizing costs in acceptance and quality,
and what it saves in time.

Quality depends on the target alone: its KL to the unquantized target and its perplexity, from
compiled engines teacher-forced over held-out text. Speed is measured by running, on the same
prompts for every cell, at the draft length that the advisor chooses for the cell. So two cells of a
target are paired by prompt and in time, and the ratio of their speeds has its own interval.

For hardware that is not here, speed is predicted: a prompt takes the steps that its text is
expected to take, and each step the predicted time. Cells are paired by prompt, and their intervals
show the uncertainty of acceptance alone.
"""

from __future__ import annotations

import gc
import itertools
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from toolkit.advise.choose import Mode, text_times
from toolkit.advise.cost import MEASURED
from toolkit.advise.observe import LogitsOf, Text
from toolkit.advise.stage import Contender, Question, Texts, predict_contender, texts_of
from toolkit.interfaces import Progress
from toolkit.records.advice import Alpha, Candidate, DraftCost, Grid, GridCell, TargetQuality
from toolkit.records.measured import Interval
from toolkit.resampling import CONFIDENCE, bootstrap_ratio_of_sums
from toolkit.words import DraftVerdict, QuantAlgo

__all__ = [
    "UNQUANTIZED",
    "Cell",
    "OpenTarget",
    "best_cell",
    "draft_cost",
    "measure_grid",
    "quality",
]

Floats = NDArray[np.float64]

UNQUANTIZED: Final = "NO_QUANT"


@dataclass(frozen=True, slots=True)
class Cell:
    """The result for one pair of precisions.

    spent_ns, plain_ns: nanoseconds [rounds, prompts] with and without speculation; if predicted,
    there is one round.
    """

    candidate: Candidate
    spent_ns: Floats
    plain_ns: Floats
    tokens: Floats  # [prompts]


@dataclass(frozen=True, slots=True)
class OpenTarget:
    """A target in one precision, and a contender for each draft that is tried with it, named by the
    draft's quant_algo; none if the target only serves as reference. If costs are predicted, a
    contender is dropped before the next is taken, so that one draft is held at a time.
    """

    target: LogitsOf
    contenders: Iterable[Contender]


def measure_grid(
    algos: Sequence[QuantAlgo],
    open_target: Callable[[QuantAlgo], OpenTarget],
    question: Question,
    heldout: Sequence[Sequence[int]],
    *,
    max_kl: float,
    rounds: int,
    progress: Progress,
    costs_are: str = MEASURED,
    left_out: Sequence[str] = (),
) -> Grid:
    """Fill the grid with greedy decoding, one request at a time.

    algos: of the targets, the unquantized one included. open_target: beside the unquantized target,
    which all are compared with, one is held at a time. max_kl: the limit that a target has to keep
    to be chosen as the best. costs_are: in words, where the costs come from. left_out: in words,
    the precisions that cannot be served.
    """
    qualities: dict[str, TargetQuality] = {}
    cells: dict[tuple[str, str], Cell] = {}
    costs: list[DraftCost] = []
    reference = open_target(UNQUANTIZED)

    def measure(number: int, algo: QuantAlgo) -> dict[str, Cell]:
        """The cells of one target, which is let go at the end."""
        opened = reference if algo == UNQUANTIZED else open_target(algo)
        progress(number, len(algos), f"target {algo}: KL and perplexity")
        qualities[algo] = quality(algo, opened.target, reference.target, heldout)
        progress(number, len(algos), f"target {algo}: acceptance and cost of every draft")
        predicted, timed = _advise_all(opened, question)
        if not timed:
            return predicted
        progress(number, len(algos), f"target {algo}: speed of every draft")
        return _run(timed, question, rounds)

    for number, algo in enumerate(algos):
        cell_of = measure(number, algo)
        gc.collect()  # runtimes and engines refer to one another in circles
        cells.update({(algo, name): cell for name, cell in cell_of.items()})
        if UNQUANTIZED in cell_of:
            costs += [
                draft_cost(algo, name, cell, cell_of[UNQUANTIZED])
                for name, cell in cell_of.items()
                if name != UNQUANTIZED
            ]
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
        texts_are="written by the target" if question.given is None else question.given.source,
    )


def quality(
    algo: QuantAlgo, target: LogitsOf, source: LogitsOf, texts: Sequence[Sequence[int]]
) -> TargetQuality:
    """KL(unquantized || quantized) in nats per token, and perplexity, which is exp of the mean
    negative log-likelihood. The intervals come from resampling texts.
    """
    divergence, surprise, counts = [], [], []
    for ids in texts:
        text = Text("", tuple(ids[:1]), tuple(ids[1:]), len(ids))
        kl_sum, nll_sum, place = 0.0, 0.0, 1
        # If source and target are the same model, one pass serves both.
        passes = [model(text) for model in dict.fromkeys((source, target))]
        for source_rows, *other_rows in zip(*passes, strict=True):
            rows = other_rows[0] if other_rows else source_rows
            source_log, target_log = _log_softmax(source_rows), _log_softmax(rows)
            following = np.array(text.output[place : place + len(rows)], dtype=np.int64)
            kl_sum += float((np.exp(source_log) * (source_log - target_log)).sum())
            nll_sum -= float(target_log[np.arange(len(rows)), following].sum())
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
    """Whether quantizing the draft pays: the acceptance lost and the draft time saved, each at the
    cell's best length, and the ratio of the speeds.
    """
    # The target writes the same texts for both drafts, so the ratio of times is that of speeds.
    speed = Interval(*bootstrap_ratio_of_sums(unquantized.spent_ns, cell.spent_ns))
    (alpha, draft_ms), (plain_alpha, plain_draft_ms) = _step(cell), _step(unquantized)
    if speed.low > 1.0:
        verdict: DraftVerdict = "pays"
    elif speed.high < 1.0:
        verdict = "costs more than it saves"
    else:
        verdict = "makes no difference seen"
    return DraftCost(
        target, draft, 1.0 - alpha / plain_alpha, 1.0 - draft_ms / plain_draft_ms, speed, verdict
    )


def best_cell(
    cells: Mapping[tuple[str, str], Cell], qualities: Mapping[str, TargetQuality], max_kl: float
) -> tuple[str, str] | None:
    """The fastest cell whose target keeps the KL limit; None if no target keeps it.

    The upper end of the interval is compared with the limit. The unquantized target always keeps
    it.
    """
    allowed = {
        names: cell
        for names, cell in cells.items()
        if qualities[names[0]].kl.high <= max_kl or names[0] == UNQUANTIZED
    }
    return max(allowed, key=lambda names: _speed(allowed[names]).estimate, default=None)


def _advise_all(
    opened: OpenTarget, question: Question
) -> tuple[dict[str, Cell], list[tuple[Contender, Candidate]]]:
    """Observe every draft under greedy decoding: (the cells whose speeds are predicted, the
    contenders that have to be timed).
    """

    def no_lookup() -> Any:
        raise AssertionError("the grid compares draft models")

    def silent(done: int, total: int | None, what: str) -> None:
        pass

    texts: Texts = {}
    predicted: dict[str, Cell] = {}
    timed: list[tuple[Contender, Candidate]] = []
    for draft in opened.contenders:
        texts = texts or texts_of(draft, question, silent)
        candidate, (greedy,) = predict_contender(
            opened.target, draft, question, texts, (1,), no_lookup, lambda logits: logits, silent
        )
        if draft.forward_s is None:
            timed.append((draft, candidate))
        else:
            predicted[draft.name] = _predicted(candidate, greedy)
        del draft
        gc.collect()  # the next draft is loaded when this one is gone
    return predicted, timed


def _predicted(candidate: Candidate, mode: Mode) -> Cell:
    tokens = np.array([len(text.ready) + 1 for text in mode.drafted], dtype=np.float64)
    spent, plain = (text_times(mode, length)[None] for length in (candidate.draft_len, 0))
    return Cell(candidate, spent, plain, tokens)


def _run(
    timed: Sequence[tuple[Contender, Candidate]], question: Question, rounds: int
) -> dict[str, Cell]:
    """Time every draft at its best length, and plain decoding.

    For each prompt they run one after another in random order, so slow moments affect all alike.
    """
    prompts = [ids for _, ids in question.prompts]
    runtime_of = {draft.name: draft.runtime for draft, _ in timed}
    length_of = {draft.name: candidate.draft_len for draft, candidate in timed}
    arms = [None, *runtime_of]
    plain = timed[0][0].runtime
    assert plain is not None  # what is timed is in memory
    spent = {arm: np.zeros((rounds, len(prompts))) for arm in arms}
    shuffle = random.Random(0).shuffle
    for number, (index, prompt) in itertools.product(range(rounds), enumerate(prompts)):
        shuffle(arms)
        for arm in arms:
            length = 0 if arm is None else length_of[arm]
            runtime = plain if arm is None else runtime_of[arm]
            assert runtime is not None
            spent[arm][number, index] = runtime.serve_ns(
                "draft_target", [prompt], length, question.max_tokens, 0.0, batch=1
            )
    tokens = np.array(
        [len(output) for output in plain.write(prompts, question.max_tokens, 0.0)],
        dtype=np.float64,
    )
    return {
        draft.name: Cell(candidate, spent[draft.name], spent[None], tokens)
        for draft, candidate in timed
    }


def _row(names: tuple[str, str], cell: Cell, *, best: bool) -> GridCell:
    alpha = _greedy_alpha(cell)
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
    """(alpha, milliseconds of drafting one token) of a cell.

    Both can be compared between cells of different draft lengths.
    """
    step = next(
        cost
        for cost in cell.candidate.costs["greedy"]
        if (cost.batch, cost.draft_len) == (1, cell.candidate.draft_len)
    )
    return max(_greedy_alpha(cell).estimate, 1e-9), step.draft_ms / step.draft_len


def _greedy_alpha(cell: Cell) -> Alpha:
    """Alpha of greedy decoding over all texts."""
    return next(
        alpha for alpha in cell.candidate.alphas if (alpha.rule, alpha.domain) == ("greedy", None)
    )


def _speed(cell: Cell) -> Interval:
    return Interval(*bootstrap_ratio_of_sums(cell.tokens, cell.spent_ns.mean(axis=0) / 1e9))


def _log_softmax(logits: NDArray[Any]) -> Floats:
    shifted = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    out: Floats = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return out
