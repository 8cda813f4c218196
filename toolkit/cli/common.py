"""What all commands share: the application, common options, exit codes, reading a YAML, running
stages, printing.
"""

from __future__ import annotations

import contextlib
import json
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from toolkit.errors import PlanError

if TYPE_CHECKING:
    from rich.console import Console

    from toolkit.config.schema import DeploymentConfig
    from toolkit.records.build import TritonRepository
    from toolkit.records.plan import Plan
    from toolkit.records.report import ValidationReport
    from toolkit.workflows.build import Built
    from toolkit.workflows.folders import Workplace

__all__ = [
    "FAILED",
    "INTERRUPTED",
    "PIPED_WIDTH",
    "STAGES",
    "USAGE",
    "VERDICTS",
    "Config",
    "Debug",
    "Fresh",
    "Json",
    "Overrides",
    "Rehash",
    "app",
    "as_typed",
    "console",
    "here",
    "load",
    "packaged_here",
    "placed",
    "print_report",
    "run_stages",
    "say",
    "show",
    "show_json",
]

STAGES = ("pair", "quantize", "compile", "package", "validate")
VERDICTS = {"PASS": 0, "FAIL": 1, "INCONCLUSIVE": 4}
PIPED_WIDTH = 120  # of a report that goes to a file
USAGE, FAILED, INTERRUPTED = 2, 3, 130

app = typer.Typer(
    help=(
        "Quantize, compile, package, serve and judge an LLM with draft-target speculative"
        " decoding.\n\nExit codes: 0 done or PASS; 1 a gate failed; 2 config, usage or plan; 3 a"
        " stage failed; 4 INCONCLUSIVE."
    ),
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)

Config = Annotated[
    Path, typer.Argument(help="The deployment's YAML file.", metavar="CONFIG", show_default=False)
]
Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        help="Set a key of the YAML: engine.max_batch_size=4. Repeatable.",
        metavar="KEY=VALUE",
    ),
]
Fresh = Annotated[
    list[str] | None,
    typer.Option(
        help=f"Run this stage anew, stored or not ({', '.join(STAGES)}). Repeatable.",
        metavar="STAGE",
    ),
]
Rehash = Annotated[
    bool,
    typer.Option(
        "--rehash", help="Read every file again instead of trusting size and time of the last look."
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]


def load(config: Path, overrides: list[str] | None, *, texts: bool = True) -> DeploymentConfig:
    """texts: prompts and calibration have to be there. Raises ConfigError with every fault."""
    from toolkit.config.load import load_config

    return load_config(config, overrides or (), texts=texts)


@contextlib.contextmanager
def placed(config: Path, overrides: list[str] | None) -> Iterator[None]:
    """What the plan refuses inside the block, with the lines of the file that ask for it."""
    try:
        yield
    except PlanError as error:
        from toolkit.config.load import located

        raise PlanError(config, located(config, overrides or (), error.faults)) from error


def here() -> Workplace:
    """Results go beneath the folder that the command runs in."""
    from toolkit.workflows.folders import Workplace

    return Workplace(Path.cwd())


def run_stages(
    config: DeploymentConfig,
    until: str,
    *,
    fresh: Any = (),
    rehash: bool = False,
    plan: Plan | None = None,
) -> Built:
    """`build`, with its progress shown."""
    from toolkit.cli.progress import displayed
    from toolkit.pipeline.store import Store
    from toolkit.workflows.build import build

    workplace = here()
    with displayed() as display:
        store = Store(workplace.store, rehash=rehash, notice=display.notice)
        return build(config, workplace, display, store, until=until, fresh=fresh, plan=plan)


def packaged_here(config: DeploymentConfig, *, rehash: bool = False) -> TritonRepository:
    """The record of what a command will serve, packaged where that is missing. Raises PlanError and
    UsageError for what cannot be served on this machine, before anything is downloaded.
    """
    from toolkit.workflows.serve import Machine, check_servable
    from toolkit.workflows.stages.sequence import planned

    plan = planned(config)
    check_servable(config, Machine(), judged=False)
    packaged: TritonRepository = (
        run_stages(config, "package", rehash=rehash, plan=plan).stages["package"].record
    )
    return packaged


def as_typed(path: Path) -> str:
    """As it is typed from here."""
    path, folder = path.absolute(), Path.cwd()
    return shlex.quote(str(path.relative_to(folder) if path.is_relative_to(folder) else path))


def console() -> Console:
    """As wide as the terminal; a report in a file has a width of its own."""
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else PIPED_WIDTH)


def show(text: str) -> None:
    """A result."""
    print(text, flush=True)


def show_json(value: Any) -> None:
    """A record, a list of them, or what JSON has anyway."""
    from toolkit.records.codec import to_json

    show(json.dumps(to_json(value), indent=2))


def say(text: str) -> None:
    """Progress, or an error."""
    print(text, file=sys.stderr, flush=True)


def print_report(found: ValidationReport, *, full: bool) -> None:
    """On the terminal: the verdict and what people look at first; full: all of it."""
    from toolkit.report import render

    render.print_report(found, console(), full=full)
