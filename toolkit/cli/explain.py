"""`toolkit explain`: which stages would run, and why."""

from __future__ import annotations

from toolkit.cli.common import (
    Config,
    Debug,
    Json,
    Overrides,
    app,
    here,
    load,
    placed,
    say,
    show,
    show_json,
)


@app.command()
def explain(
    config: Config, overrides: Overrides = None, as_json: Json = False, debug: Debug = False
) -> None:
    """Say per stage whether it would be reused, or which parts of its key have changed."""
    from toolkit.pipeline.store import Store
    from toolkit.workflows.build import explain_build

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
