"""`toolkit explain`: say which stages would run, and why."""

from __future__ import annotations

from typing import TYPE_CHECKING

from toolkit.cli.common import (
    Config,
    Debug,
    Json,
    Overrides,
    app,
    here,
    load,
    located_plan_errors,
    say,
    show,
    show_json,
)

if TYPE_CHECKING:
    from toolkit.pipeline.run import Explanation


@app.command()
def explain(
    config: Config, overrides: Overrides = None, as_json: Json = False, debug: Debug = False
) -> None:
    """Say for each stage whether it would be reused, or why not.

    A stage runs again if a part of its key has changed; these parts are listed.
    """
    from toolkit.pipeline.store import Store
    from toolkit.workflows.build import explain_build

    loaded, workplace = load(config, overrides), here()
    with located_plan_errors(config, overrides):
        explanations = explain_build(loaded, workplace, Store(workplace.store, notice=say))
    if as_json:
        show_json(explanations)
        return
    for explanation in explanations:
        key = "" if explanation.key is None else f"  {explanation.key[:12]}"
        show(f"{explanation.stage:18} {_state(explanation):14}{key}")
        for reason in explanation.reasons:
            show(f"{'':18} {reason}")


def _state(explanation: Explanation) -> str:
    if explanation.reused:
        return "reused"
    return "not known yet" if explanation.key is None else "would run"
