"""`toolkit build`, and a command for each stage up to `package`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from toolkit.cli.common import (
    EXIT_CODES,
    STAGES,
    Config,
    Debug,
    Fresh,
    Json,
    Overrides,
    Rehash,
    app,
    here,
    load,
    located_plan_errors,
    print_report,
    run_stages,
    say,
    show,
    show_json,
)
from toolkit.errors import UsageError

if TYPE_CHECKING:
    from toolkit.config.schema import DeploymentConfig
    from toolkit.workflows.build import Built


@app.command("build")
def build_command(
    config: Config,
    until: Annotated[
        str, typer.Option(help=f"Stop after this stage: {', '.join(STAGES)}.", metavar="STAGE")
    ] = "validate",
    fresh: Fresh = None,
    rehearse: Annotated[
        bool,
        typer.Option(
            "--rehearse",
            help=(
                "Try the build on this machine: small random models and the embedded engine replace"
                " the real ones."
            ),
        ),
    ] = False,
    overrides: Overrides = None,
    rehash: Rehash = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Run all stages up to the verdict; unchanged ones are reused.

    The stages are pair, quantize, compile, package and validate.
    """
    build_stages(config, until, fresh, overrides, rehash, as_json, rehearse=rehearse)


def _add_stage_command(stage: str, help_text: str) -> None:
    """Register the command `toolkit STAGE`, which builds up to this stage."""

    def command(
        config: Config,
        fresh: Fresh = None,
        overrides: Overrides = None,
        rehash: Rehash = False,
        as_json: Json = False,
        debug: Debug = False,
    ) -> None:
        build_stages(config, stage, fresh, overrides, rehash, as_json)

    app.command(stage, help=help_text)(command)


_add_stage_command("pair", "Prove that draft and target belong together.")
_add_stage_command("quantize", "Quantize both checkpoints, and measure the loss of quality.")
_add_stage_command("compile", "Compile both engines into engines/NAME/.")
_add_stage_command("package", "Write the Triton model repository to triton_repo/NAME/.")


def build_stages(
    config: Path,
    until: str,
    fresh: list[str] | None,
    overrides: list[str] | None,
    rehash: bool,
    as_json: bool,
    *,
    rehearse: bool = False,
) -> None:
    """Build up to the stage `until`, print the result, and exit with the code of the verdict.

    Raises ConfigError, UsageError for an unknown stage, PlanError with the lines of the YAML, and
    the errors of the stages.
    """
    loaded = load(config, overrides, texts=not rehearse)
    _check_stage_names([until, *(fresh or ())])
    with located_plan_errors(config, overrides):
        run = _rehearse_stages if rehearse else run_stages
        built = run(loaded, until, fresh=fresh or (), rehash=rehash)
    if as_json:
        show_json(_as_json(loaded.name, built))
    else:
        _print_built(built)
    if built.report is not None:
        raise typer.Exit(EXIT_CODES[built.report.verdict])


def _check_stage_names(names: list[str]) -> None:
    """Raises UsageError for a name that no stage has."""
    of_roles = [
        f"{stage}/{role}" for stage in ("quantize", "compile") for role in ("target", "draft")
    ]
    for name in names:
        if name not in (*STAGES, *of_roles):
            raise UsageError(f"there is no stage {name!r}", hint=f"known: {', '.join(STAGES)}")


def _print_built(built: Built) -> None:
    """Print the report if there is one, and where the results of the build are."""
    if built.report is not None:
        print_report(built.report, full=False)
    for folder in built.published:
        show(f"in {folder.relative_to(Path.cwd())}/")
    if built.outdated:
        folders = " and ".join(f"{folder.relative_to(Path.cwd())}/" for folder in built.outdated)
        show(f"still from an earlier build: {folders}")
        show(
            "toolkit build without --until renews it; --set name=NAME keeps an experiment separate"
        )
    for stage, missing in built.not_executed.items():
        show("\n  ".join([f"{stage}: not executed on a GPU:", *missing]))
    if not built.changed:
        show("nothing changed: every stage was reused")


def _rehearse_stages(
    config: DeploymentConfig, until: str, *, fresh: Any = (), rehash: bool = False
) -> Built:
    """Say what stands in for the real models and engine, then build with the stand-ins."""
    from toolkit.cli.progress import displayed
    from toolkit.pipeline.store import Store
    from toolkit.workflows.rehearse import prepare_rehearsal, rehearse

    workplace = here()
    rehearsal = prepare_rehearsal(config, workplace)
    say("\n  ".join(["rehearsing with stand-ins:", *rehearsal.replaced]))
    with displayed() as display:
        store = Store(workplace.store, rehash=rehash, notice=display.notice)
        return rehearse(rehearsal, workplace, display, store, until=until, fresh=fresh)


def _as_json(name: str, built: Built) -> dict[str, Any]:
    return {
        "name": name,
        "verdict": None if built.report is None else built.report.verdict,
        "speculates": None if built.report is None else built.report.arms.speculative is not None,
        "changed": built.changed,
        "stages": [
            {
                "stage": stage,
                "reused": done.reused,
                "key": done.entry.key,
                "seconds": done.seconds,
                "peak_memory_bytes": done.peak_memory_bytes,
            }
            for stage, done in built.stages.items()
        ],
        "published": [str(folder) for folder in built.published],
        "outdated": [str(folder) for folder in built.outdated],
        "not_executed": built.not_executed,
    }
