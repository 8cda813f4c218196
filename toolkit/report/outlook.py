"""Tables of a report that validation alone does not fill: the advisor's results, its grid of
precisions, a sweep over concurrency, and the plan's memory. Each appears only if it was made.
"""

from __future__ import annotations

from collections.abc import Iterator

from toolkit.bench.definitions import METRICS, heading
from toolkit.records.advice import Advice, Candidate, Grid, SpeedupPrediction
from toolkit.records.bench import BenchPoint
from toolkit.records.measured import Interval, Ratio, Speedup
from toolkit.records.report import ValidationReport
from toolkit.report.advice import MEASURED, at_once, deployed, teacher_forcing_note
from toolkit.report.cells import DASH, Table, capital, interval, number, size
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
    basis = teacher_forcing_note(advice.texts_are, advice.first_choices)
    note += "" if basis is None else f" {capital(basis)}."
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
    """Tabulate, for one request at a time, the predicted and the measured speed-up and the factors
    between the formula and the prediction.

    A measured speed-up is either the advisor's run on the engine or, at the deployed length, this
    validation's run on the endpoint.
    """
    served = {
        (mode, deployed_draft_len(report)): speedup for mode, speedup in measured_here(report)
    }
    rows = tuple(
        (
            f"{prediction.mode}, {prediction.draft_len}",
            interval(prediction.speedup, prediction.low, prediction.high),
            *_measured(prediction, served.get((prediction.mode, prediction.draft_len))),
            f"{prediction.acceptance_length:.2f}",
            f"{prediction.formula:.2f}",
            f"x {prediction.dependence:.2f}",
            f"x {prediction.verification:.2f}",
            f"x {prediction.host:.2f}",
        )
        for prediction in candidate.predictions
        if prediction.batch == 1
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
        "predicted = formula x dependence x verify cost x host. The factors are what makes a"
        " prediction differ from the textbook formula."
    )
    note += _streaming_cost(report, candidate)
    return Table(
        f"Speed-up over draft length, {candidate.name}", columns, rows, ("predicted_speedup",), note
    )


def _measured(prediction: SpeedupPrediction, served: Speedup | None) -> tuple[str, str]:
    """Return the cells (measured, measured / predicted)."""
    if prediction.measured is not None:
        estimate = prediction.measured
        shown = interval(estimate, prediction.measured_low, prediction.measured_high)
    elif served is not None:
        estimate = served.estimate
        shown = f"{interval(estimate, served.low, served.high)}, served"
    else:
        return DASH, DASH
    return shown, f"{estimate / prediction.speedup:.2f}" if prediction.speedup else DASH


def _streaming_cost(report: ValidationReport, candidate: Candidate) -> str:
    """Say how much time the endpoint adds to the engine that the costs were measured on."""
    plain, length = report.arms.plain.tokens_per_s, deployed_draft_len(report)
    engine = [
        prediction.tokens_per_s / prediction.speedup
        for prediction in candidate.predictions
        if (prediction.mode, prediction.batch, prediction.draft_len) == ("greedy", 1, length)
        and prediction.speedup
    ]
    if not engine or not plain or report.advice is None or report.advice.costs_are != MEASURED:
        return ""
    return (
        f" Plain decoding takes {1e3 / plain:.2f} ms a token as served and {1e3 / engine[0]:.2f} ms"
        " in the engine. The prediction leaves out the cost of sending chunks, and speculation"
        " sends fewer of them."
    )


def _alphas(candidate: Candidate) -> Table:
    rows = tuple(
        (
            f"{alpha.rule}, {alpha.domain or 'all texts'}",
            interval(alpha.estimate, alpha.low, alpha.high),
            f"{alpha.tokens:,}",
        )
        for alpha in candidate.alphas
    ) + tuple(
        (f"{mode}, draft token {place + 1}, all before it accepted", number(rate, 2), "")
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
        f"Best: the fastest pair whose target stays within KL {grid.max_kl:g} by its upper bound."
        f" {grid.prompts} prompts, one request at a time; {grid.confidence:.0%} intervals."
    )
    if grid.costs_are != MEASURED:
        note += f" Speeds and speed-ups are {grid.costs_are}; the intervals cover acceptance alone."
    basis = teacher_forcing_note(grid.texts_are)
    note += "" if basis is None else f" {capital(basis)}."
    note += "".join(f" Left out: {line}." for line in grid.left_out)
    if not any(cell.best for cell in grid.cells):
        note = f"No target stays within KL {grid.max_kl:g}. {note}"
    return Table(
        f"Precisions of target and draft{_cost_source(grid)}",
        columns,
        rows,
        ("grid", "alpha"),
        note,
    )


def _targets(grid: Grid) -> Table:
    rows = tuple(
        (
            target.quant_algo,
            _shown(target.kl, 3),
            "yes" if target.kl.high <= grid.max_kl else "NO",
            _shown(target.perplexity, 4),
        )
        for target in grid.targets
    )
    columns = ("target", heading("kl_mean"), f"within {grid.max_kl:g}", "perplexity")
    note = f"{grid.targets[0].tokens:,} held-out tokens." if grid.targets else ""
    return Table("What quantizing the target costs", columns, rows, ("kl_mean",), note)


def _drafts(grid: Grid) -> Table:
    rows = tuple(
        (
            cost.target,
            cost.draft,
            f"{cost.alpha_lost:.1%}",
            f"{cost.draft_time_saved:.1%}",
            _shown(cost.speed, 3),
            cost.verdict,
        )
        for cost in grid.drafts
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
        f"What quantizing the draft costs and saves{_cost_source(grid)}",
        columns,
        rows,
        ("grid", "alpha"),
        text=True,
    )


def _cost_source(grid: Grid) -> str:
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
        "Load: several requests at once",
        columns,
        rows,
        ("throughput", "speed", "tpot"),
        note,
        is_brief=True,
    )


def _speed(point: BenchPoint) -> str:
    ratio: Ratio | None = next((each for each in point.ratios if each.metric == "speed"), None)
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
