"""What a step takes, as the running engines show it.

`measured_costs` times both engines before the first request, so that lengths are chosen well from
the start. Then every step corrects the figures. Two things move apart: the whole machine becomes
slower or faster (another program runs), which changes all figures alike and often, and one figure
is off (the calibration was disturbed, contexts are longer now), which changes it alone and slowly.
So there is a common scale that follows quickly, and each figure follows slowly.

A figure follows the median of what is measured, not the mean, because a step that is preempted
takes ten times as long and says nothing: whether a step took longer or shorter than expected moves
the figure by a fixed share, up or down.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

import torch

from toolkit.interfaces import ChainingEngine, StepEngine
from toolkit.speculative.adaptive import PROBE_TOKENS

__all__ = ["StepCosts", "measured_costs"]

SCALE_STEP, HOST_STEP = 0.02, 0.02
# A figure moves by the first share at first, since its calibration may have been disturbed, and
# each time a little less, down to the last.
FIRST_FIGURE_STEP, FIGURE_STEP, FIGURE_STEP_FACTOR = 0.01, 0.004, 0.99
FIRST_HOST_NS = 60_000.0  # of a step with one row, before one has been measured
HOST_SHARE_PER_ROW = 0.4  # what each further row adds to it
CONTEXT_TOKENS = 64  # that stand in each slot while the engines are timed
ForwardChain = Callable[..., object]  # ChainingEngine's
PASSES, BUDGET_NS = 6, 2_000_000_000  # over all figures: so often, but then none begins after this


class StepCosts:
    """verify[width][rows] and draft[rows]: nanoseconds of a forward; index 0 is not used. probe:
    nanoseconds of a probe of one row.
    """

    def __init__(
        self, verify: Sequence[Sequence[float]], draft: Sequence[float], probe: float
    ) -> None:
        self._verify = [list(row) for row in verify]
        for width in reversed(range(1, len(self._verify))):
            for rows in range(1, len(self._verify[width])):
                self._keep_order(width, rows)
        self._draft = [0.0, *draft[1:]]
        self._probe = probe
        self._verify_steps = [[FIRST_FIGURE_STEP] * len(row) for row in self._verify]
        self._draft_steps = [FIRST_FIGURE_STEP] * len(self._draft)
        self._host = FIRST_HOST_NS
        self._scale = 1.0

    def draft_ns(self, rows: int) -> float:
        return self._scale * self._draft[rows]

    def step_ns(self, rows: int, width: int) -> float:
        host = self._host * (1.0 + HOST_SHARE_PER_ROW * (rows - 1))
        return self._scale * self._verify[width][rows] + host

    def probe_ns(self, rows: int) -> float:
        return self._scale * self._probe * rows

    def note_step(
        self, rows: int, drafting: Sequence[int], draft_ns: int, verify_ns: int, host_ns: int
    ) -> None:
        """A step of so many rows was taken. drafting: how many of them drafted a first token, a
        second one, and so on. Rows are packed by their own length, so a step of different lengths
        is expected to take what lies between the figures of equal ones; it moves none of them.
        """
        mean_width = 1 + sum(drafting) / rows
        width = int(mean_width)
        expected = self._verify[width][rows]
        if mean_width > width:
            wider = self._verify[width + 1][rows]
            expected += (mean_width - width) * (wider - expected)
        is_slower = verify_ns > self._scale * expected
        if mean_width == width:
            _move(self._verify[width], self._verify_steps[width], rows, up=is_slower)
            self._keep_order(width, rows)
        self._scale *= _step(SCALE_STEP, up=is_slower)
        if drafting:
            expected = self._scale * sum(self._draft[count] for count in drafting)
            for count in set(drafting):
                _move(self._draft, self._draft_steps, count, up=draft_ns > expected)
        expected = self._host * (1.0 + HOST_SHARE_PER_ROW * (rows - 1))
        self._host *= _step(HOST_STEP, up=host_ns > expected)

    def _keep_order(self, width: int, rows: int) -> None:
        """A wider forward is no faster. So a figure that was measured in a bad moment cannot make
        plain decoding look slower than drafting.
        """
        verify = self._verify
        figure = verify[width][rows]
        other = width - 1
        while other > 0 and verify[other][rows] > figure:
            verify[other][rows] = figure
            other -= 1
        other = width + 1
        while other < len(verify) and verify[other][rows] < figure:
            verify[other][rows] = figure
            other += 1

    def note_probe(self, rows: int, probe_ns: int) -> None:
        self._probe *= _step(HOST_STEP, up=probe_ns > self.probe_ns(rows))


def _move(figures: list[float], steps: list[float], rows: int, *, up: bool) -> None:
    figures[rows] *= _step(steps[rows], up=up)
    steps[rows] = max(FIGURE_STEP, steps[rows] * FIGURE_STEP_FACTOR)


def _step(share: float, *, up: bool) -> float:
    return 1.0 + share if up else 1.0 / (1.0 + share)


def measured_costs(
    target: StepEngine,
    draft: StepEngine | None,
    max_draft_len: int,
    clock: Callable[[], int] = time.monotonic_ns,
) -> StepCosts:
    """Time the engines, whose slots must be free, and free them again. Without a draft engine
    drafts cost nothing.

    Batches are timed at powers of two and at the largest one; what lies between is interpolated.
    """
    largest, widths = target.max_batch_size, range(1, max_draft_len + 2)
    batches = [*_powers_of_two(largest), largest]
    fastest = _fastest(target, [(rows, width) for width in widths for rows in batches], clock)
    verify = [[0.0] * (largest + 1)]
    for width in widths:
        verify.append(_between({rows: fastest[rows, width] for rows in batches}, largest))
    if draft is None:
        return StepCosts(verify, [0.0] * (largest + 1), 0.0)
    probe = (1, min(PROBE_TOKENS, draft.max_step_tokens))
    if isinstance(draft, ChainingEngine):
        chains = [(rows, max_draft_len) for rows in batches]
        took = _fastest(draft, chains, clock, draft.forward_chain)
        single = {rows: took[rows, max_draft_len] / max_draft_len for rows in batches}
    else:
        took = _fastest(draft, [(rows, 1) for rows in batches], clock)
        single = {rows: took[rows, 1] for rows in batches}
    probing = _fastest(draft, [probe], clock)[probe]
    return StepCosts(verify, _between(single, largest), probing)


def _powers_of_two(below: int) -> Iterator[int]:
    power = 1
    while power < below:
        yield power
        power *= 2


def _context(engine: StepEngine) -> int:
    """Short enough that every forward that is timed still fits."""
    return max(0, min(CONTEXT_TOKENS, engine.max_step_tokens, engine.max_seq_len // 2))


def _fastest(
    engine: StepEngine,
    shapes: Sequence[tuple[int, int]],
    clock: Callable[[], int],
    chain: ForwardChain | None = None,
) -> dict[tuple[int, int], float]:
    """[rows, tokens] -> nanoseconds of the fastest of several forwards, or of chains that choose so
    many tokens.

    The fastest, since what disturbs a forward only makes it slower. All shapes take a turn in every
    pass, so that a busy moment does not hit one shape alone.
    """
    slots = list(range(engine.max_batch_size))
    context = _context(engine)
    for slot in slots:
        engine.forward([slot], _zeros(1, context), last_only=True)
    found: dict[tuple[int, int], float] = {}
    began, passes = clock(), 0
    # The first pass allocates what each shape needs, and does not count.
    while passes < 2 or (passes <= PASSES and clock() - began < BUDGET_NS):
        for rows, width in shapes:
            start = clock()
            if chain is not None:
                chain(slots[:rows], [[0]] * rows, [width] * rows, [0.0] * rows, [])
            else:
                # Reading one number back waits for a GPU, as choosing the token does.
                float(engine.forward(slots[:rows], _zeros(rows, width))[0, 0, 0])
            took = float(clock() - start)
            engine.rewind(slots[:rows], [context] * rows)
            if passes:
                found[rows, width] = min(took, found.get((rows, width), took))
        passes += 1
    engine.rewind(slots, [0] * len(slots))
    return found


def _zeros(rows: int, width: int) -> torch.Tensor:
    return torch.zeros((rows, width), dtype=torch.int64)


def _between(figures: dict[int, float], largest: int) -> list[float]:
    """The figure of every number of rows up to `largest`, on the lines between those given."""
    known = sorted(figures)
    values = [0.0] * (largest + 1)
    for rows in range(1, largest + 1):
        above = next(each for each in known if each >= rows)
        below = max(each for each in known if each <= rows)
        share = 0.0 if above == below else (rows - below) / (above - below)
        values[rows] = figures[below] + share * (figures[above] - figures[below])
    return values
