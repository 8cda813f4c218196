"""The pipeline's commands: `build`, one per stage, `explain`, and `report` on what came of it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from toolkit.cli.shared import (
    STAGES,
    VERDICTS,
    Config,
    Debug,
    Fresh,
    Json,
    Overrides,
    Rehash,
    app,
    console,
    here,
    load,
    placed,
    run_stages,
    say,
    show,
    show_json,
)
from toolkit.errors import UsageError

if TYPE_CHECKING:
    from toolkit.assembly.build import Built
    from toolkit.config.schema import DeploymentConfig
    from toolkit.records import ValidationReport


@app.command("build")
def build_command(
    config: Config,
    until: Annotated[str, typer.Option(help=f"Stop after this stage: {', '.join(STAGES)}.", metavar="STAGE")] = "validate",
    fresh: Fresh = None,
    rehearse: Annotated[
        bool, typer.Option("--rehearse", help="Try it here with small random models and the embedded engine in their place.")
    ] = False,
    overrides: Overrides = None,
    rehash: Rehash = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Pair, quantize, compile, package and validate; whatever has not changed is reused."""
    _build(config, until, fresh, overrides, rehash, as_json, rehearse=rehearse)


def _one_stage(stage: str, text: str) -> None:
    def command(
        config: Config,
        fresh: Fresh = None,
        overrides: Overrides = None,
        rehash: Rehash = False,
        as_json: Json = False,
        debug: Debug = False,
    ) -> None:
        _build(config, stage, fresh, overrides, rehash, as_json)

    app.command(stage, help=text)(command)


_one_stage("pair", "Prove that draft and target belong together.")
_one_stage("quantize", "Quantize both checkpoints, and measure what it cost.")
_one_stage("compile", "Compile both engines into engines/NAME/.")
_one_stage("package", "Write the Triton model repository triton_repo/NAME/.")


@app.command("validate")
def validate_command(
    config: Annotated[
        Path | None, typer.Argument(help="The deployment's YAML file.", metavar="CONFIG", show_default=False)
    ] = None,
    replay: Annotated[
        Path | None,
        typer.Option(help="Ask again about one divergence: a file of build/reports/NAME/replay/.", metavar="FILE"),
    ] = None,
    fresh: Fresh = None,
    overrides: Overrides = None,
    rehash: Rehash = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Serve the repository, measure and judge it; the report is in build/reports/NAME/."""
    if replay is not None:
        if config is not None:
            raise UsageError("--replay FILE holds its deployment itself", mend=f"toolkit validate --replay {replay}")
        if overrides or fresh or rehash:
            what = "--replay serves what is built, as it was built: --set, --fresh and --rehash have nothing to say"
            raise UsageError(what, mend=f"toolkit validate --replay {replay}")
        _replay(replay, as_json=as_json)
    elif config is None:
        raise UsageError("a CONFIG or --replay FILE is needed", mend="toolkit validate CONFIG")
    else:
        _build(config, "validate", fresh, overrides, rehash, as_json)


@app.command()
def explain(config: Config, overrides: Overrides = None, as_json: Json = False, debug: Debug = False) -> None:
    """Say per stage whether it would be reused, or which parts of its key have changed."""
    from toolkit.assembly.build import explain_build
    from toolkit.pipeline.store import Store

    loaded, workplace = load(config, overrides), here()
    with placed(config, overrides):
        explanations = explain_build(loaded, workplace, Store(workplace.store, notice=say))
    if as_json:
        show_json(explanations)
        return
    for one in explanations:
        state = "reused" if one.reused else "would run" if one.key is not None else "not known yet"
        key = f"  {one.key[:12]}" if one.key is not None else ""
        show(f"{one.stage:18} {state:14}{key}")
        for reason in one.reasons:
            show(f"{'':18} {reason}")


@app.command()
def report(
    config: Config,
    overrides: Overrides = None,
    as_json: Json = False,
    open_it: Annotated[bool, typer.Option("--open", help="Open the HTML report in a browser.")] = False,
    debug: Debug = False,
) -> None:
    """Print the last report in full, or open it."""
    folder = here().report(load(config, overrides).name)
    file = folder / "report.json"
    if not file.exists():
        raise UsageError("there is no report yet", where=folder, mend=f"Make one: toolkit build {config}")
    if open_it:
        import webbrowser

        page = (folder / "report.html").absolute()
        if not webbrowser.open(page.as_uri()):
            raise UsageError("no browser could be started", mend=f"Open it yourself: {page}")
        show(str(page))
    elif as_json:
        show(file.read_text(encoding="utf-8").rstrip("\n"))
    else:
        from toolkit.report.render import read_report

        _print_report(read_report(file), full=True)
        show(f"in full: {folder / 'report.html'}")


def _build(
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
        known = {*STAGES, *(f"{stage}/{role}" for stage in ("quantize", "compile") for role in ("target", "draft"))}
        if name not in known:
            raise UsageError(f"there is no stage {name!r}", mend=f"known: {', '.join(STAGES)}")
    with placed(config, overrides):
        run = _rehearse_stages if rehearse else run_stages
        built = run(loaded, until, fresh=fresh or (), rehash=rehash)
    verdict = built.report
    if as_json:
        show_json(_as_json(loaded.name, built))
    else:
        if verdict is not None:
            _print_report(verdict, full=False)
        for folder in built.published:
            show(f"in {folder.relative_to(Path.cwd())}/")
        if built.outdated:
            named = " and ".join(f"{folder.relative_to(Path.cwd())}/" for folder in built.outdated)
            show(f"still of an earlier build: {named}")
            show("toolkit build without --until renews that; --set name=NAME keeps an experiment apart")
        for stage, missing in built.not_executed.items():
            show("\n  ".join([f"{stage}: not executed on a GPU:", *missing]))
        if not built.changed:
            show("nothing changed: every stage was reused")
    if verdict is not None:
        raise typer.Exit(VERDICTS[verdict.verdict])


def _rehearse_stages(config: DeploymentConfig, until: str, *, fresh: Any = (), rehash: bool = False) -> Built:
    """Say what is replaced, then run."""
    from toolkit.pipeline.store import Store
    from toolkit.progress import displayed
    from toolkit.rehearsing import ready, rehearse

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


def _replay(file: Path, *, as_json: bool) -> None:
    """Exit code 0 when the texts are the same now or differ by rounding, 1 when they differ beyond it."""
    from toolkit.assembly.replaying import replay_divergence

    say("serving the deployment again for the two requests of this divergence")
    found, now = replay_divergence(file, here())
    before, one = found.divergence, now.divergence
    if as_json:
        show_json({"before": before, "now": now})
    else:
        show(f"prompt {before.prompt_index + 1}, {before.arm} arm, draft length {before.draft_len}")
        show(f"then  output token {before.position + 1}: {before.kind}, {before.detail}")
        same = "both texts are those of the file" if now.as_before else "the texts are not those of the file"
        show("now   identical" if one is None else f"now   output token {one.position + 1}: {one.kind}, {one.detail}")
        show(f"      {same}")
    if one is not None and one.kind not in ("identical", "equivalent"):
        raise typer.Exit(4 if one.kind == "unexplained" else 1)


def _print_report(found: ValidationReport, *, full: bool) -> None:
    from toolkit.report.render import print_report

    print_report(found, console(), full=full)
