"""Tables beyond validation: the advisor's findings, its grid, a sweep over concurrency, the
plan's memory; if any.
"""

from __future__ import annotations

from collections.abc import Iterator

from toolkit.bench.definitions import METRICS, heading
from toolkit.records.advice import Advice, Candidate, Grid, SpeedupPrediction
from toolkit.records.bench import BenchPoint
from toolkit.records.measured import Interval, Ratio, Speedup
from toolkit.records.report import ValidationReport
from toolkit.report.advice import MEASURED, at_once, deployed
from toolkit.report.cells import DASH, Table, interval, number, size
from toolkit.report.expected import deployed_draft_len, measured_here, measured_peak

__all__ = ["outlook_tables"]


def outlook_tables(report: ValidationReport) -> list[Table]:
    return list(_tables(report))


def _tables(report: ValidationReport) -> Iterator[Table]:
    if report.advice is not None:
        yield _ways(report.advice)
        if report.advice.candidates:
            yield _by_length(report, deployed(report.advice))
            yield _alphas(deployed(report.advice))
    if report.grid is not None:
        yield _cells(report.grid)
        yield _targets(report.grid)
        yield _drafts(report.grid)
    if report.loads:
        yield _loads(report)
    if report.memory:
        yield _memory(report)


def _ways(advice: Advice) -> Table:
    rows = tuple(
        (
            candidate.name,
            str(candidate.draft_len),
            interval(candidate.speedup, candidate.low, candidate.high),
            interval(
                candidate.acceptance_length,
                candidate.acceptance_length_low,
                candidate.acceptance_length_high,
            ),
            f"{candidate.break_even_length:.2f}",
            DASH if candidate.break_even_alpha is None else f"{candidate.break_even_alpha:.2f}",
        )
        for candidate in advice.candidates
    )
    schedule = ", ".join(f"{step.draft_len} from batch {step.batch} on" for step in advice.schedule)
    note = f"{advice.reason} Draft length: {schedule or advice.max_draft_len}."
    if advice.max_concurrency is not None:
        note += f" It pays up to {at_once(advice.max_concurrency)}."
    note += f" Costs are {advice.costs_are}; {advice.prompts} prompts, {advice.tokens:,} tokens."
    break_even = METRICS["break_even"].title
    columns = (
        "drafts",
        "best length",
        heading("speedup"),
        METRICS["acceptance_length"].unit,
        break_even,
        f"{break_even} {METRICS['alpha'].title}",
    )
    return Table(
        "Advice: ways to draft, best first",
        columns,
        rows,
        ("predicted_speedup", "break_even"),
        note,
    )


def _by_length(report: ValidationReport, candidate: Candidate) -> Table:
    """One request at a time: what is predicted, what was run, and the factors between the formula
    and the prediction.

    Run it was by the advisor on the engine, or at the deployed length by this validation on the
    endpoint.
    """
    served = {
        (mode, deployed_draft_len(report)): speedup for mode, speedup in measured_here(report)
    }
    rows = tuple(
        (
            f"{one.mode}, {one.draft_len}",
            interval(one.speedup, one.low, one.high),
            *_measured(one, served.get((one.mode, one.draft_len))),
            f"{one.acceptance_length:.2f}",
            f"{one.formula:.2f}",
            f"x {one.dependence:.2f}",
            f"x {one.verification:.2f}",
            f"x {one.host:.2f}",
        )
        for one in candidate.predictions
        if one.batch == 1
    )
    columns = (
        "draft length",
        "predicted",
        "measured",
        "measured / predicted",
        METRICS["acceptance_length"].unit,
        "formula",
        "dependence",
        "verify cost",
        "host, prefill",
    )
    note = (
        "predicted = formula x dependence x verify cost x host: what makes a prediction differ from"
        " the textbook formula."
    )
    note += _sending(report, candidate)
    return Table(
        f"Speed-up over draft length, {candidate.name}", columns, rows, ("predicted_speedup",), note
    )


def _measured(one: SpeedupPrediction, served: Speedup | None) -> tuple[str, str]:
    """(measured, measured / predicted)."""
    if one.measured is not None:
        shown, estimate = interval(one.measured, one.measured_low, one.measured_high), one.measured
    elif served is not None:
        shown, estimate = (
            f"{interval(served.estimate, served.low, served.high)}, served",
            served.estimate,
        )
    else:
        return DASH, DASH
    return shown, DASH if not one.speedup else f"{estimate / one.speedup:.2f}"


def _sending(report: ValidationReport, candidate: Candidate) -> str:
    """What the endpoint adds to the engine that the costs were measured on."""
    plain, length = report.arms.plain.tokens_per_s, deployed_draft_len(report)
    engine = [
        one.tokens_per_s / one.speedup
        for one in candidate.predictions
        if (one.mode, one.batch, one.draft_len) == ("greedy", 1, length) and one.speedup
    ]
    if not engine or not plain or report.advice is None or report.advice.costs_are != MEASURED:
        return ""
    return (
        f" Plain decoding takes {1e3 / plain:.2f} ms a token as served and {1e3 / engine[0]:.2f} ms"
        " in the engine: sending is not in the prediction, and speculation sends fewer chunks."
    )


def _alphas(candidate: Candidate) -> Table:
    rows = tuple(
        (
            f"{one.rule}, {one.domain or 'all texts'}",
            interval(one.estimate, one.low, one.high),
            f"{one.tokens:,}",
        )
        for one in candidate.alphas
    ) + tuple(
        (f"{mode}, draft {place + 1} of a block, all before it kept", number(rate, 2), "")
        for mode, rates in candidate.by_place.items()
        for place, rate in enumerate(rates)
    )
    return Table(
        f"Acceptance without a speculative run, {candidate.name}",
        ("rule", heading("alpha"), "tokens"),
        rows,
        ("alpha",),
    )


def _cells(grid: Grid) -> Table:
    rows = tuple(
        (
            cell.target,
            cell.draft,
            f"{_shown(cell.tokens_per_s, 4)}{', best' if cell.best else ''}",
            _shown(cell.speedup, 3),
            _shown(cell.alpha, 3),
            str(cell.draft_len),
            _shown(cell.acceptance_length, 3),
        )
        for cell in grid.cells
    )
    columns = (
        "target",
        "draft",
        METRICS["grid"].unit,
        "over its plain decoding",
        f"{METRICS['alpha'].title}, greedy",
        "best length",
        METRICS["acceptance_length"].unit,
    )
    note = (
        f"Best: the fastest pair whose target keeps KL {grid.max_kl:g} by its upper bound."
        f" {grid.prompts} prompts, one request at a time; {grid.confidence:.0%} intervals."
    )
    if grid.costs_are != MEASURED:
        note += f" Speeds and speed-ups are {grid.costs_are}, their intervals of acceptance alone."
    note += "".join(f" Left out: {line}." for line in grid.left_out)
    if not any(cell.best for cell in grid.cells):
        note = f"No target keeps KL {grid.max_kl:g}. {note}"
    return Table(
        f"Precisions of target and draft{_whose(grid)}", columns, rows, ("grid", "alpha"), note
    )


def _targets(grid: Grid) -> Table:
    rows = tuple(
        (
            one.quant_algo,
            _shown(one.kl, 3),
            "yes" if one.kl.high <= grid.max_kl else "NO",
            _shown(one.perplexity, 4),
        )
        for one in grid.targets
    )
    columns = ("target", heading("kl_mean"), f"keeps {grid.max_kl:g}", "perplexity")
    note = f"{grid.targets[0].tokens:,} held-out tokens." if grid.targets else ""
    return Table("What quantizing the target costs", columns, rows, ("kl_mean",), note)


def _drafts(grid: Grid) -> Table:
    rows = tuple(
        (
            one.target,
            one.draft,
            f"{one.alpha_lost:.1%}",
            f"{one.draft_time_saved:.1%}",
            _shown(one.speed, 3),
            one.verdict,
        )
        for one in grid.drafts
    )
    columns = (
        "target",
        "draft",
        "alpha lost",
        "draft time saved",
        "speed / unquantized draft's",
        "quantizing the draft",
    )
    return Table(
        f"What quantizing the draft costs and saves{_whose(grid)}",
        columns,
        rows,
        ("grid", "alpha"),
        text=True,
    )


def _whose(grid: Grid) -> str:
    return "" if grid.costs_are == MEASURED else f", {grid.costs_are}"


def _shown(value: Interval, digits: int) -> str:
    return (
        f"{number(value.estimate, digits)} ({number(value.low, digits)} to"
        f" {number(value.high, digits)})"
    )


def _loads(report: ValidationReport) -> Table:
    names, tpot = [arm.name for arm in report.loads[0].arms], METRICS["tpot"]
    rows = tuple(
        (
            str(point.concurrency),
            *(number(arm.tokens_per_s) for arm in point.arms),
            _speed(point),
            *(_p50(point, index, "tpot") for index in range(len(names))),
            str(sum(arm.failed for arm in point.arms)),
        )
        for point in report.loads
    )
    columns = (
        "at once",
        *(f"{name}, {METRICS['throughput'].unit}" for name in names),
        f"{names[-1]} / {names[0]}",
        *(f"{name}, {tpot.title} p50 {tpot.unit}" for name in names),
        "failed",
    )
    note = "" if report.crossover is None else f"Speculation is {report.crossover.detail}."
    return Table(
        "Load: several requests at once", columns, rows, ("throughput", "speed", "tpot"), note
    )


def _speed(point: BenchPoint) -> str:
    ratio: Ratio | None = next((one for one in point.ratios if one.metric == "speed"), None)
    return DASH if ratio is None else interval(ratio.estimate, ratio.low, ratio.high)


def _p50(point: BenchPoint, index: int, name: str) -> str:
    return number(point.arms[index].latencies[name].p50)


def _memory(report: ValidationReport) -> Table:
    rows: list[tuple[str, ...]] = []
    for stage in report.memory:
        planned, peak = size(stage.total_bytes), size(measured_peak(stage, report.stages))
        rows.append(
            (f"{stage.stage}, {stage.place}", planned, peak, size(stage.available_bytes), "")
        )
        rows += [
            (f"- {item.name}", size(item.num_bytes), "", "", item.formula) for item in stage.items
        ]
    columns = ("stage", "planned", "measured", "available", "made of")
    return Table(
        "Memory", columns, tuple(rows), ("planned_memory", "peak_memory"), words=("made of",)
    )
