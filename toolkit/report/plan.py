"""Print a plan on a terminal: its facts, what the rules say, the memory it needs, how fast it can
be, and what will run.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from toolkit.facts.gpus import PUBLISHED
from toolkit.records.plan import (
    Judgement,
    KeyChange,
    Plan,
    PlannedRun,
    PredictedSpeed,
    Prediction,
    Serving,
    StageMemory,
    StageTime,
)
from toolkit.rounding import duration
from toolkit.words import JudgementSeverity

__all__ = ["print_plan"]

STYLES: dict[JudgementSeverity, str] = {
    "refused": "bold red",
    "warning": "yellow",
    "adjusted": "cyan",
}


def print_plan(plan: Plan, console: Console) -> None:
    console.print(Group(*_parts(plan)))


def _parts(plan: Plan) -> Iterator[RenderableType]:
    if plan.changes:
        yield _changes(plan.changes)
        yield Text()
    yield _facts(plan)
    if plan.judgements:
        yield Text()
        yield _judgements(plan.judgements)
    if plan.memory:
        yield Text()
        yield _memory(plan.memory)
    if plan.serving is not None and plan.possible:
        yield Text(_capacity(plan.serving))
    if plan.possible:
        for prediction in plan.predictions:
            yield Text()
            yield _speed(prediction)
            if prediction.speculative:
                yield Text(_threshold(prediction))
            if prediction.assumed is not None:
                yield Text(_assumed(prediction.assumed))
        assumptions = {prediction.assumption for prediction in plan.predictions} - {None}
        for assumption in assumptions:
            yield Text()
            yield Text(f"The assumed acceptance: {assumption}. Your head and your text decide.")
        if any(prediction.plain_tokens_per_s is not None for prediction in plan.predictions):
            yield Text()
            yield Text(f"This is an upper bound, not a forecast: {PUBLISHED.detail}", style="dim")
        if plan.times:
            yield Text()
            yield _times(plan.times)
        if plan.runs:
            yield Text()
            yield _runs(plan.runs)
    yield Text()
    yield _verdict(plan)


def _verdict(plan: Plan) -> Text:
    refused, warned = (
        sum(judgement.severity == severity for judgement in plan.judgements)
        for severity in ("refused", "warning")
    )
    if not plan.possible:
        return Text(
            f"{plan.name}: it cannot work: {_counted(refused, 'reason')} above", style="bold red"
        )
    warnings = f"; {_counted(warned, 'warning')} above" if warned else ""
    return Text(f"{plan.name}: it can work{warnings}", style="bold green")


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _facts(plan: Plan) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name, value in plan.summary.items():
        table.add_row(name, value)
    return table


def _changes(changes: tuple[KeyChange, ...]) -> Table:
    """Against the file that was named."""
    table = Table(box=None, pad_edge=False)
    for title in ("", "key", "before", "after", "why"):
        table.add_column(title, overflow="fold")
    for change in changes:
        table.add_row(change.step, change.path, change.before, change.after or "-", change.why)
    return table


def _judgements(judgements: tuple[Judgement, ...]) -> Table:
    table = Table(box=None, pad_edge=False, title_justify="left")
    for title in ("", "key", "what, and why"):
        table.add_column(title, overflow="fold")
    for judgement in judgements:
        what = Text(judgement.what)
        what.append(f"  [{judgement.rule}]", style="dim")
        if judgement.hint is not None:
            what.append(f"\n-> {judgement.hint}")
        severity = Text(judgement.severity, style=STYLES[judgement.severity])
        table.add_row(severity, judgement.path, what)
    return table


def _memory(stages: tuple[StageMemory, ...]) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("memory")
    table.add_column("size", justify="right")
    table.add_column("made of", overflow="fold")
    for stage in stages:
        for number, item in enumerate(stage.items):
            head = f"{stage.stage}, {stage.place}" if number == 0 else ""
            table.add_row(head, _size(item.num_bytes), f"{item.name}: {item.formula}")
        available, is_too_large = "available: not known here", False
        if stage.available_bytes is not None:
            available = f"of {_size(stage.available_bytes)}"
            is_too_large = stage.total_bytes > stage.available_bytes
        table.add_row(
            "",
            Text(_size(stage.total_bytes), style="bold red" if is_too_large else "bold"),
            Text(available, style="bold"),
        )
    return table


def _capacity(serving: Serving) -> str:
    each = f"{serving.kv_bytes_per_token / 1000:.1f} kB of KV cache a token"
    draft = f", {serving.draft_share:.0%} of it the draft's" if serving.draft_share else ""
    return f"{serving.sequences} sequences of max_seq_len at once; {each}{draft}"


def _speed(prediction: Prediction) -> Table:
    plain = prediction.plain_tokens_per_s
    table = Table(box=None, pad_edge=False)
    # Without a known device only the bytes of the weights can be compared. That ratio depends on
    # neither batch nor context, and there is no speed in tokens/s.
    load, how = "where weights are all that counts", "plain"
    titles = ["over plain", "tokens a step"]
    if plain is not None:
        load = f"batch {prediction.batch_size}, {prediction.context_tokens:,} tokens of context"
        how = f"plain, bound by {prediction.bound}"
        titles = ["tokens/s", *titles]
    table.add_column(f"at most, {load}")
    for title in titles:
        table.add_column(title, justify="right")
    table.add_row(how, *_rate(plain), "1.00", "1.00")
    for speculative in prediction.speculative:
        table.add_row(
            f"acceptance {speculative.acceptance_rate:.1f}, draft length {speculative.draft_len}",
            *_rate(speculative.tokens_per_s),
            f"{speculative.speedup:.2f}",
            f"{speculative.tokens_per_step:.2f}",
        )
    return table


def _assumed(speed: PredictedSpeed) -> str:
    return f"assumed: acceptance {speed.acceptance_rate:.2f}, and so {speed.speedup:.2f}x"


def _threshold(prediction: Prediction) -> str:
    rate, ratio = prediction.break_even, prediction.cost_ratio
    pays = (
        "drafting pays at no acceptance"
        if rate is None
        else f"drafting pays from acceptance {rate:.2f}"
    )
    return pays if ratio is None else f"{pays}; a draft forward costs {ratio:.3f} of the target's"


def _times(times: tuple[StageTime, ...]) -> Table:
    table = Table(box=None, pad_edge=False)
    for title in ("time, roughly", "", "made of"):
        table.add_column(title, overflow="fold")
    for time in times:
        table.add_row(time.stage, duration(time.seconds), time.formula)
    return table


def _runs(runs: tuple[PlannedRun, ...]) -> Table:
    table = Table(box=None, pad_edge=False)
    for title in ("runs", "where, and what"):
        table.add_column(title, overflow="fold")
    for run in runs:
        text = Text(f"{run.place}:\n", style="dim")
        text.append(_run(run), style="not dim")
        table.add_row(run.stage, text)
    return table


def _run(run: PlannedRun) -> str:
    """Write a run as the shell command or the Python call that it is."""
    if run.command is not None:
        return shlex.join(run.command)
    arguments = ", ".join(f"{name}={value!r}" for name, value in (run.arguments or {}).items())
    return f"{run.call}({arguments})"


def _size(num_bytes: int) -> str:
    """Return a size in decimal units, as GPUs and disks are sold."""
    return f"{num_bytes / 1e9:.2f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.1f} MB"


def _rate(tokens_per_s: float | None) -> tuple[str, ...]:
    return () if tokens_per_s is None else (f"{tokens_per_s:.0f}",)
