"""`toolkit rollout`: let a new deployment take over step by step, judged while it does."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from toolkit.cli.common import (
    Config,
    Debug,
    Json,
    Overrides,
    app,
    console,
    here,
    load,
    say,
    show,
    show_json,
)
from toolkit.cli.foreground import Signal, interrupted_by_signals

if TYPE_CHECKING:
    from toolkit.gateway.rollout import Rollout

rollout = typer.Typer(no_args_is_help=True, help="Let a new deployment take over step by step.")
app.add_typer(rollout, name="rollout")


@rollout.command()
def run(
    config: Config,
    candidate: Annotated[
        str,
        typer.Argument(
            metavar="ADDRESS",
            help="The new deployment, as for toolkit gateway.",
            show_default=False,
        ),
    ],
    baseline: Annotated[
        str,
        typer.Option(
            metavar="ADDRESS",
            help="The old deployment. plain: the new one's server, without drafts.",
        ),
    ] = "plain",
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Begin anew; the old journal is kept beside.")
    ] = False,
    overrides: Overrides = None,
    debug: Debug = False,
) -> None:
    """Run the gateway over an old and a new deployment, and move sessions to the new one.

    The YAML's section rollout has the steps and the limits. When a test finds the new deployment
    worse, all goes back to the old one by itself. After a restart, also after kill -9, the same
    command goes on where it was. The page /rollout of the gateway shows it. --set gateway.port=8510
    chooses the port, else it is a free one.
    """
    from toolkit.cli.gateway import run_gateway, warn_of_silent
    from toolkit.workflows.gateway import gateway_of, server_address
    from toolkit.workflows.rollout import PLAIN, rollout_maker, set_aside, take_orders

    loaded = load(config, overrides, texts=False)
    candidate = server_address(loaded, candidate)
    if baseline != PLAIN:
        baseline = server_address(loaded, baseline)
    file = here().rollout(loaded.name)
    warn_of_silent(candidate, *(() if baseline == PLAIN else (baseline,)))
    make = rollout_maker(loaded, candidate, baseline, file)
    running: list[Rollout] = []
    told: list[Any] = []

    def make_arms() -> Rollout:
        if fresh:  # only now: a gateway that cannot start leaves the journal where it is
            set_aside(file)
        running.append(make())
        return running[0]

    def check() -> None:
        take_orders(running[0], file)
        for decision in running[0].state.decisions[len(told) :]:
            told.append(decision)
            say(f"rollout  {_decision(decision, loaded.rollout.steps)}")

    try:
        with interrupted_by_signals():
            gateway = gateway_of(loaded, make_arms)
            run_gateway(loaded, gateway, check)
    except Signal:
        show("stopped")


@rollout.command()
def status(
    config: Config, overrides: Overrides = None, json: Json = False, debug: Debug = False
) -> None:
    """Show where the roll-out is, and the evidence. It may run meanwhile, or not."""
    from toolkit.workflows.rollout import status_of

    loaded = load(config, overrides, texts=False)
    summary = status_of(here().rollout(loaded.name))
    if json:
        show_json(summary)
        return
    _print(summary)


@rollout.command()
def rollback(
    config: Config,
    why: Annotated[
        str, typer.Option(metavar="TEXT", help="The reason, for the journal.")
    ] = "by an operator",
    overrides: Overrides = None,
    debug: Debug = False,
) -> None:
    """Send everything back to the old deployment, now."""
    from toolkit.workflows.rollout import order_rollback

    loaded = load(config, overrides, texts=False)
    done = order_rollback(here().rollout(loaded.name), why)
    shown = {
        "done": "rolled back",
        "told": "the running roll-out is told; toolkit rollout status",
        "already done": "it is already rolled back; toolkit rollout status says why",
    }
    show(shown[done])


def _decision(decision: dict[str, Any], steps: tuple[int, ...] | list[int]) -> str:
    if decision["outcome"] == "running":
        return f"step {steps[decision['step']]} %: {decision['why']}"
    return f"{decision['outcome']}: {decision['why']}"


def _print(summary: dict[str, Any]) -> None:
    """The summary as tables."""
    import time

    from rich.table import Table

    out = console()
    steps, ids = summary["steps_percent"], summary["ids"]
    deployment, candidate, baseline = (
        ids.get(name, "-") for name in ("deployment", "candidate", "baseline")
    )
    out.print(
        f"{deployment}: {summary['outcome']}, {summary['share_percent']:g} % of the sessions go to"
        f" the candidate ({candidate}), the others to the baseline ({baseline})"
    )
    if not summary["is_run"]:
        out.print("no process runs it now; the same toolkit rollout run goes on with it")
    if summary["outcome"] == "running":
        out.print(
            f"next step after {summary['in_step']} of {summary['needed_in_step']} answered requests"
            f" of the candidate; steps: {', '.join(f'{step} %' for step in steps)}"
        )
    if summary["missing"]:
        shown = ", ".join(f"{test} ({why})" for test, why in summary["missing"].items())
        out.print(
            f"not judged {summary['needed_in_step']} of the candidate's requests yet: {shown}"
        )
    if summary["suspected"]:
        out.print(f"the next step waits: {summary['suspected']} has evidence, and too little of it")
    figures = Table("", "baseline", "candidate", box=None, pad_edge=False)
    arms = summary["arms"]
    for name, key, digits in (
        ("sessions", "sessions", 0),
        ("errors", "errors", 0),
        ("TTFT p50, ms", "ttft_ms_p50", 1),
        ("TTFT p99, ms", "ttft_ms_p99", 1),
        ("time per token p50, ms", "token_ms_p50", 2),
        ("time per token p99, ms", "token_ms_p99", 2),
        ("acceptance rate", "acceptance_rate", 3),
        ("alpha", "acceptance_alpha", 3),
    ):
        cells = [_cell(arms[arm][key], digits) for arm in ("baseline", "candidate")]
        figures.add_row(name, *cells)
    for column in figures.columns[1:]:
        column.justify = "right"
    out.print(figures)
    texts = summary["texts"]
    out.print(
        f"{texts['differing']} of {texts['compared']} texts of both arms differ;"
        f" {texts['failed_copies']} copies failed at the candidate alone\n"
        f"times and acceptance: of the latest {summary['latest']} sessions of each arm"
    )
    tests = Table("test", "evidence", "limit", "judged", box=None, pad_edge=False)
    for finding in summary["evidence"]:
        wealth, limit = finding["wealth"], finding["limit"]
        tests.add_row(finding["test"], f"{wealth:.3g}", f"{limit:g}", str(finding["requests"]))
    for column in tests.columns[1:]:
        column.justify = "right"
    out.print(tests)
    out.print(
        f"judged: requests of the candidate that the test has judged\n"
        f"evidence at its limit rolls back; an equal candidate is rolled back with probability"
        f" {summary['false_alarm']:g} at most"
    )
    for decision in summary["decisions"]:
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(decision["time"]))
        out.print(f"{when}  {_decision(decision, steps)}")


def _cell(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"
