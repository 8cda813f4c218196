"""A plan on a terminal: what it is, what the rules say, what it needs, how fast it can be, what
will run.
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
    Plan,
    PlannedRun,
    Prediction,
    Serving,
    StageMemory,
    StageTime,
)
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
        if any(one.plain_tokens_per_s is not None for one in plan.predictions):
            yield Text()
            yield Text(f"A bound and no forecast: {PUBLISHED.detail}", style="dim")
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
        sum(one.severity == severity for one in plan.judgements)
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


def _judgements(judgements: tuple[Judgement, ...]) -> Table:
    table = Table(box=None, pad_edge=False, title_justify="left")
    for title in ("", "key", "what, and why"):
        table.add_column(title, overflow="fold")
    for one in judgements:
        what = Text(one.what)
        what.append(f"  [{one.rule}]", style="dim")
        if one.hint is not None:
            what.append(f"\n-> {one.hint}")
        table.add_row(Text(one.severity, style=STYLES[one.severity]), one.path, what)
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
        there = (
            "available: not known here"
            if stage.available_bytes is None
            else f"of {_size(stage.available_bytes)}"
        )
        full = stage.available_bytes is not None and stage.total_bytes > stage.available_bytes
        table.add_row(
            "",
            Text(_size(stage.total_bytes), style="bold red" if full else "bold"),
            Text(there, style="bold"),
        )
    return table


def _capacity(serving: Serving) -> str:
    each = f"{serving.kv_bytes_per_token / 1000:.1f} kB of KV cache a token"
    draft = f", {serving.draft_share:.0%} of it the draft's" if serving.draft_share else ""
    return f"{serving.sequences} sequences of max_seq_len at once; {each}{draft}"


def _speed(prediction: Prediction) -> Table:
    plain = prediction.plain_tokens_per_s
    table = Table(box=None, pad_edge=False)
    # Bytes against bytes of weights, which is all that is left without a device, know neither batch
    # nor context.
    at = (
        "any batch"
        if plain is None
        else f"batch {prediction.batch_size}, {prediction.context_tokens:,} tokens of context"
    )
    table.add_column(f"at most, {at}")
    for title in (
        *(("tokens/s",) if plain is not None else ()),
        "over plain",
        "tokens a step",
    ):  # a CPU has ratios alone
        table.add_column(title, justify="right")
    how = f"plain, bound by {prediction.bound}" if plain is not None else "plain"
    table.add_row(how, *_rate(plain), "1.00", "1.00")
    for one in prediction.speculative:
        name = f"acceptance {one.acceptance_rate:.1f}, draft length {one.draft_len}"
        table.add_row(
            name, *_rate(one.tokens_per_s), f"{one.speedup:.2f}", f"{one.tokens_per_step:.2f}"
        )
    return table


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
    for one in times:
        table.add_row(one.stage, _duration(one.seconds), one.formula)
    return table


def _runs(runs: tuple[PlannedRun, ...]) -> Table:
    table = Table(box=None, pad_edge=False)
    for title in ("runs", "where, and what"):
        table.add_column(title, overflow="fold")
    for one in runs:
        text = Text(f"{one.place}:\n", style="dim")
        text.append(_run(one), style="not dim")
        table.add_row(one.stage, text)
    return table


def _run(one: PlannedRun) -> str:
    """As a shell or Python reads it."""
    if one.command is not None:
        return shlex.join(one.command)
    arguments = ", ".join(f"{name}={value!r}" for name, value in (one.arguments or {}).items())
    return f"{one.call}({arguments})"


def _size(num_bytes: int) -> str:
    """Decimal, as GPUs and disks are sold."""
    return f"{num_bytes / 1e9:.2f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.1f} MB"


def _rate(tokens_per_s: float | None) -> tuple[str, ...]:
    return () if tokens_per_s is None else (f"{tokens_per_s:.0f}",)


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"
