"""`toolkit tune`: find the draft and the draft length that make decoding faster."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from toolkit.cli.common import (
    Config,
    Debug,
    Json,
    Overrides,
    Rehash,
    app,
    console,
    here,
    load,
    located_plan_errors,
    show,
    show_json,
)
from toolkit.errors import UsageError

if TYPE_CHECKING:
    from toolkit.records.report import ValidationReport


@app.command("tune")
def tune_command(
    config: Config,
    drafts: Annotated[
        list[Path] | None,
        typer.Option(
            "--draft",
            help="Another draft checkpoint to compare. Repeatable.",
            metavar="DIR",
            show_default=False,
        ),
    ] = None,
    measure: Annotated[
        int,
        typer.Option(
            help=(
                "Also run every draft length in this many rounds, and print the results beside the"
                " predictions."
            ),
            min=0,
        ),
    ] = 0,
    gpu: Annotated[
        str | None,
        typer.Option(
            help="Predict the costs for a GPU that this machine does not have: H200.",
            metavar="NAME",
            show_default=False,
        ),
    ] = None,
    stream: Annotated[
        bool,
        typer.Option(
            "--stream",
            help=(
                "Measure acceptance on given texts, reading the models layer by layer, even if both"
                " fit into memory."
            ),
        ),
    ] = False,
    grid: Annotated[
        bool,
        typer.Option(
            "--grid",
            help="Compare every precision of the target with every precision of the draft.",
        ),
    ] = False,
    details: Annotated[
        bool,
        typer.Option("--details", help="Also print alpha and the figures of every draft length."),
    ] = False,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Measure again, even if a result is stored.")
    ] = False,
    overrides: Overrides = None,
    rehash: Rehash = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Say which draft and draft length pay off, if any does.

    Acceptance and cost are measured.
    """
    from toolkit.cli.progress import displayed
    from toolkit.pipeline.store import Store
    from toolkit.records.advice import Advice, Grid
    from toolkit.workflows.tune import tune, tune_grid

    if grid and (drafts or measure):
        raise UsageError(
            "--grid compares precisions of the YAML's own pair, each at one draft length",
            hint="Leave --draft and --measure out.",
        )
    if gpu is not None and measure:
        raise UsageError(
            "--measure runs on this machine, and --gpu names another one",
            hint="Leave one of them out.",
        )
    if stream and measure:
        raise UsageError(
            "--measure runs the models, and --stream has none in memory",
            hint="Leave one of them out.",
        )
    for folder in drafts or ():
        if not (folder / "config.json").is_file():
            raise UsageError(
                f"--draft {folder} holds no checkpoint (config.json)",
                hint="Name a folder in Hugging Face format.",
            )
    loaded, workplace = load(config, overrides), here()
    with located_plan_errors(config, overrides), displayed() as display:
        store = Store(workplace.store, rehash=rehash, notice=display.notice)
        result: Advice | Grid
        if grid:
            result, folder = tune_grid(
                loaded, workplace, display, store, gpu=gpu, stream=stream, fresh=fresh
            )
        else:
            result, folder = tune(
                loaded,
                workplace,
                display,
                store,
                drafts=drafts or (),
                measured_rounds=measure,
                gpu=gpu,
                stream=stream,
                fresh=fresh,
            )
    if as_json:
        show_json(result)
        return
    from toolkit.report.advice import print_advice, print_grid

    if isinstance(result, Grid):
        print_grid(result, console())
    else:
        draft = None if loaded.draft is None else loaded.draft.checkpoint.name
        last = _last_report(workplace.report(loaded.name) / "report.json")
        # A report with other advice was measured on other engines.
        is_current = last is not None and last.advice == result
        print_advice(
            result,
            console(),
            present=loaded.speculation,
            own_draft=draft,
            schedule=loaded.capabilities.draft_len_schedule is not None,
            max_concurrency=loaded.capabilities.max_concurrency,
            served=last if is_current else None,
            details=details,
        )
    show(f"in {folder.relative_to(Path.cwd())}/")


def _last_report(file: Path) -> ValidationReport | None:
    """The report in the file; None if there is none, or if another version wrote it."""
    from toolkit.errors import StageError
    from toolkit.report.render import read_report

    with contextlib.suppress(StageError):
        return read_report(file) if file.exists() else None
    return None
