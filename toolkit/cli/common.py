"""Code that all commands share: the application, common options, exit codes, reading a YAML,
running stages, and printing.
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

from toolkit.errors import PlanError, UsageError

if TYPE_CHECKING:
    from rich.console import Console

    from toolkit.config.schema import DeploymentConfig
    from toolkit.records.build import TritonRepository
    from toolkit.records.plan import Plan
    from toolkit.records.report import ValidationReport
    from toolkit.workflows.build import Built
    from toolkit.workflows.folders import Workplace

__all__ = [
    "EXIT_CODES",
    "EXIT_FAILED",
    "EXIT_INTERRUPTED",
    "EXIT_USAGE",
    "PIPED_WIDTH_COLUMNS",
    "STAGES",
    "Config",
    "Debug",
    "Fresh",
    "Json",
    "Overrides",
    "Rehash",
    "app",
    "console",
    "here",
    "load",
    "located_plan_errors",
    "package_to_serve",
    "print_report",
    "run_stages",
    "say",
    "shell_path",
    "show",
    "show_json",
    "write_new",
]

STAGES = ("pair", "quantize", "compile", "package", "validate")
EXIT_CODES = {"PASS": 0, "FAIL": 1, "INCONCLUSIVE": 4}
PIPED_WIDTH_COLUMNS = 120  # width of a report that is not printed on a terminal
EXIT_USAGE, EXIT_FAILED, EXIT_INTERRUPTED = 2, 3, 130

app = typer.Typer(
    help=(
        "Quantize, compile, package, serve and judge an LLM with draft-target speculative"
        " decoding.\n\nExit codes: 0 done or PASS; 1 a gate failed; 2 an error in config, usage or"
        " plan; 3 a stage failed; 4 INCONCLUSIVE."
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
        help="Set a key of the YAML, as in engine.max_batch_size=4. Repeatable.",
        metavar="KEY=VALUE",
    ),
]
Fresh = Annotated[
    list[str] | None,
    typer.Option(
        help=f"Run this stage even if its result is stored ({', '.join(STAGES)}). Repeatable.",
        metavar="STAGE",
    ),
]
Rehash = Annotated[
    bool,
    typer.Option(
        "--rehash", help="Read every file again, even if its size and time have not changed."
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]


def load(config: Path, overrides: list[str] | None, *, texts: bool = True) -> DeploymentConfig:
    """Read a deployment's YAML and apply the `--set` overrides.

    texts: whether the files with prompts and calibration text must exist. Raises ConfigError with
    every fault in the file.
    """
    from toolkit.config.load import load_config

    return load_config(config, overrides or (), texts=texts)


@contextlib.contextmanager
def located_plan_errors(config: Path, overrides: list[str] | None) -> Iterator[None]:
    """Add the lines of the YAML to a PlanError that is raised inside the block.

    The new PlanError says for each fault which line of the file, or which `--set`, caused it.
    """
    try:
        yield
    except PlanError as error:
        from toolkit.config.load import located

        raise PlanError(config, located(config, overrides or (), error.faults)) from error


def here() -> Workplace:
    """The folders of results, which lie beneath the folder that the command runs in. Raises
    UsageError if no weights could be stored there.
    """
    from toolkit.pipeline.rows import is_unicode
    from toolkit.workflows.folders import Workplace

    if not is_unicode(str(Path.cwd())):
        raise UsageError(
            "the path of this folder is not UTF-8, and the safetensors library writes to no other",
            where=ascii(str(Path.cwd())),
            hint="Rename it, or run from another folder.",
        )
    return Workplace(Path.cwd())


def run_stages(
    config: DeploymentConfig,
    until: str,
    *,
    fresh: Any = (),
    rehash: bool = False,
    plan: Plan | None = None,
) -> Built:
    """Build the deployment up to the stage `until`, and show the progress on stderr."""
    from toolkit.cli.progress import displayed
    from toolkit.pipeline.store import Store
    from toolkit.workflows.build import build

    workplace = here()
    with displayed() as display:
        store = Store(workplace.store, rehash=rehash, notice=display.notice)
        return build(config, workplace, display, store, until=until, fresh=fresh, plan=plan)


def package_to_serve(config: DeploymentConfig, *, rehash: bool = False) -> TritonRepository:
    """Package the deployment if that has not been done yet, and return the repository's record.

    Raises PlanError or UsageError if this machine cannot serve it, before anything is downloaded.
    """
    from toolkit.workflows.serve import Machine, check_servable
    from toolkit.workflows.stages.sequence import possible_plan

    plan = possible_plan(config)
    check_servable(config, Machine(), judged=False)
    packaged: TritonRepository = (
        run_stages(config, "package", rehash=rehash, plan=plan).stages["package"].record
    )
    return packaged


def shell_path(path: Path) -> str:
    """The path as a user would type it in a shell here: relative if it can be, and quoted."""
    path, folder = path.absolute(), Path.cwd()
    if path.is_relative_to(folder):
        path = path.relative_to(folder)
    return shlex.quote(str(path))


def write_new(file: Path, text: str, option: str) -> None:
    """Write a file that does not exist yet. option: the argument that names it. Raises
    UsageError.
    """
    hint = f"Name another one: {option} FILE."
    try:
        with file.open("x", encoding="utf-8") as stream:
            stream.write(text)
    except FileExistsError:
        raise UsageError("the file exists already", where=file, hint=hint) from None
    except OSError as error:
        what = f"the file cannot be written ({error.strerror})"
        raise UsageError(what, where=file, hint=hint) from error


def console() -> Console:
    """A console as wide as the terminal, or PIPED_WIDTH_COLUMNS wide if stdout is not one."""
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else PIPED_WIDTH_COLUMNS)


def show(text: str) -> None:
    """Print a result to stdout."""
    print(text, flush=True)


def show_json(value: Any) -> None:
    """Print a record, a list of records or any JSON value to stdout, as JSON."""
    from toolkit.records.codec import to_json

    show(json.dumps(to_json(value), indent=2))


def say(text: str) -> None:
    """Print progress or an error to stderr."""
    print(text, file=sys.stderr, flush=True)


def print_report(report: ValidationReport, *, full: bool) -> None:
    """Print the verdict and the figures that people look at first; `full` prints everything."""
    from toolkit.report import render

    render.print_report(report, console(), full=full)
