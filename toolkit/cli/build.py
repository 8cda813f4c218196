"""`toolkit build`, and a command for each stage up to `package`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from toolkit.cli.common import (
    STAGES,
    VERDICTS,
    Config,
    Debug,
    Fresh,
    Json,
    Overrides,
    Rehash,
    app,
    here,
    load,
    placed,
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
            help="Try it here with small random models and the embedded engine in their place.",
        ),
    ] = False,
    overrides: Overrides = None,
    rehash: Rehash = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Pair, quantize, compile, package and validate; whatever has not changed is reused."""
    build_stages(config, until, fresh, overrides, rehash, as_json, rehearse=rehearse)


def _one_stage(stage: str, text: str) -> None:
    def command(
        config: Config,
        fresh: Fresh = None,
        overrides: Overrides = None,
        rehash: Rehash = False,
        as_json: Json = False,
        debug: Debug = False,
    ) -> None:
        build_stages(config, stage, fresh, overrides, rehash, as_json)

    app.command(stage, help=text)(command)


_one_stage("pair", "Prove that draft and target belong together.")
_one_stage("quantize", "Quantize both checkpoints, and measure what it cost.")
_one_stage("compile", "Compile both engines into engines/NAME/.")
_one_stage("package", "Write the Triton model repository triton_repo/NAME/.")


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
    loaded = load(config, overrides, texts=not rehearse)
    for name in (until, *(fresh or ())):
        known = {
            *STAGES,
            *(
                f"{stage}/{role}"
                for stage in ("quantize", "compile")
                for role in ("target", "draft")
            ),
        }
        if name not in known:
            raise UsageError(f"there is no stage {name!r}", hint=f"known: {', '.join(STAGES)}")
    with placed(config, overrides):
        run = _rehearse_stages if rehearse else run_stages
        built = run(loaded, until, fresh=fresh or (), rehash=rehash)
    verdict = built.report
    if as_json:
        show_json(_as_json(loaded.name, built))
    else:
        if verdict is not None:
            print_report(verdict, full=False)
        for folder in built.published:
            show(f"in {folder.relative_to(Path.cwd())}/")
        if built.outdated:
            named = " and ".join(f"{folder.relative_to(Path.cwd())}/" for folder in built.outdated)
            show(f"still of an earlier build: {named}")
            show(
                "toolkit build without --until renews that; --set name=NAME keeps an experiment"
                " apart"
            )
        for stage, missing in built.not_executed.items():
            show("\n  ".join([f"{stage}: not executed on a GPU:", *missing]))
        if not built.changed:
            show("nothing changed: every stage was reused")
    if verdict is not None:
        raise typer.Exit(VERDICTS[verdict.verdict])


def _rehearse_stages(
    config: DeploymentConfig, until: str, *, fresh: Any = (), rehash: bool = False
) -> Built:
    """Say what is replaced, then run."""
    from toolkit.cli.progress import displayed
    from toolkit.pipeline.store import Store
    from toolkit.workflows.rehearse import ready, rehearse

    workplace = here()
    rehearsal = ready(config, workplace)
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
