"""The advisor's findings on a terminal: what to set, how the ways to draft compare, and why it is so."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from toolkit.records import Advice, Candidate, Grid, Interval, SpeedupPrediction

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

__all__ = ["print_advice", "print_found", "print_grid", "yaml_of"]

DASH = "-"


def yaml_of(advice: Advice) -> str:
    """The lines of the YAML that the advice comes to."""
    if not advice.speculate:
        return "speculation: {kind: none}"
    lines = ["speculation:", f"  kind: {advice.drafter}", f"  max_draft_len: {advice.max_draft_len}"]
    if len(advice.schedule) > 1:
        steps = ", ".join(f"{step.batch}: {step.draft_len}" for step in advice.schedule)
        lines.append(f"  draft_len_schedule: {{{steps}}}")
    return "\n".join(lines)


def print_found(found: Advice | Grid, console: Console) -> None:
    if isinstance(found, Grid):
        print_grid(found, console)
    else:
        print_advice(found, console)


def print_grid(grid: Grid, console: Console) -> None:
    """Every pair of precisions, the best one marked; then what each precision does to target and draft."""
    cells = [
        (
            "*" if cell.best else "",
            cell.target,
            cell.draft,
            _interval(cell.alpha, 3),
            str(cell.draft_len),
            f"{cell.acceptance_length:.2f}",
            _interval(cell.tokens_per_s, 0),
            _interval(cell.speedup, 2),
        )
        for cell in grid.cells
    ]
    titles = ("", "target", "draft", "alpha, greedy", "length", "tokens/step", "tokens/s", "speed-up over its plain decoding")
    console.print(_table("pairs, one request at a time", titles, cells))
    of_target = ("target", "KL to the unquantized, nats", "perplexity", "tokens")
    targets = [(one.quant_algo, _interval(one.kl, 4), _interval(one.perplexity, 2), str(one.tokens)) for one in grid.targets]
    console.print(_table("targets on held-out text", of_target, targets))
    drafts = [
        (one.target, one.draft, f"{one.alpha_lost:.1%}", f"{one.draft_time_saved:.1%}", _interval(one.speed, 3), one.verdict)
        for one in grid.drafts
    ]
    of_draft = ("target", "draft", "alpha lost", "draft time saved", "speed / unquantized draft's", "quantizing the draft")
    console.print(_table("what quantizing the draft does", of_draft, drafts))
    console.print(
        f"* the fastest whose target keeps KL {grid.max_kl:g} by its upper bound; {grid.prompts} prompts, intervals at "
        f"{grid.confidence:.0%}",
        style="dim",
    )


def _interval(value: Interval, digits: int) -> str:
    return f"{value.estimate:.{digits}f} ({value.low:.{digits}f} to {value.high:.{digits}f})"


def print_advice(advice: Advice, console: Console) -> None:
    from rich.text import Text

    console.print(Text(advice.reason, style="bold" if advice.speculate else "bold yellow"))
    console.print(Text(yaml_of(advice)), highlight=False)
    if advice.max_concurrency is not None:
        console.print(f"it pays up to {advice.max_concurrency} requests at once, and not beyond")
    for candidate in advice.candidates:
        console.print()
        console.print(_by_length(candidate))
        console.print(_alphas(candidate))
    console.print()
    console.print(_ranking(advice))
    console.print(
        f"costs {advice.costs_are}; {advice.prompts} prompts, {advice.tokens} tokens; intervals at {advice.confidence:.0%}; "
        f"took {advice.seconds:.1f} s",
        style="dim",
    )


def _ranking(advice: Advice) -> RenderableType:
    rows = [
        (
            candidate.name,
            candidate.drafter,
            str(candidate.draft_len),
            f"{candidate.speedup:.2f} ({candidate.low:.2f} to {candidate.high:.2f})",
            f"{candidate.acceptance_length:.2f}",
            f"{candidate.break_even_length:.2f}",
            DASH if candidate.break_even_alpha is None else f"{candidate.break_even_alpha:.2f}",
        )
        for candidate in advice.candidates
    ]
    titles = ("drafts", "drafter", "best length", "speed-up", "tokens/step", "break-even", "break-even alpha")
    return _table("best first, one request at a time, greedy and sampled alike", titles, rows)


def _by_length(candidate: Candidate) -> RenderableType:
    """Predicted speed-up of each draft length, and what makes it differ from the formula, for one request at a time."""
    rows = [
        (
            prediction.mode,
            str(prediction.draft_len),
            f"{prediction.speedup:.2f} ({prediction.low:.2f} to {prediction.high:.2f})",
            _measured(prediction),
            f"{prediction.acceptance_length:.2f}",
            f"{prediction.formula:.2f}",
            f"x {prediction.dependence:.2f}",
            f"x {prediction.verification:.2f}",
            f"x {prediction.host:.2f}",
        )
        for prediction in candidate.predictions
        if prediction.batch == 1
    ]
    titles = ("mode", "length", "predicted", "measured", "tokens/step", "formula", "dependence", "verify cost", "host, prefill")
    return _table(f"{candidate.name}: speed-up over draft length", titles, rows)


def _measured(prediction: SpeedupPrediction) -> str:
    if prediction.measured is None:
        return DASH
    return f"{prediction.measured:.2f} ({prediction.measured_low:.2f} to {prediction.measured_high:.2f})"


def _alphas(candidate: Candidate) -> RenderableType:
    rows = [
        (alpha.rule, alpha.domain or "all", f"{alpha.estimate:.3f} ({alpha.low:.3f} to {alpha.high:.3f})", str(alpha.tokens))
        for alpha in candidate.alphas
    ]
    return _table(f"{candidate.name}: alpha", ("rule", "domain", "alpha", "tokens"), rows)


def _table(title: str, titles: Sequence[str], rows: Sequence[Sequence[str]]) -> RenderableType:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, title=title, title_justify="left", title_style="bold")
    for name in titles:
        table.add_column(name)
    for row in rows:
        table.add_row(*row)
    return table
