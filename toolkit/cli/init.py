"""`toolkit init`: write a commented YAML for two checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from toolkit.cli.common import Debug, app, shell_path, show, write_new
from toolkit.errors import UsageError


@app.command()
def init(
    target: Annotated[
        str,
        typer.Option(
            help="The target checkpoint: a folder or a hub id.",
            metavar="DIR|HUB-ID",
            show_default=False,
        ),
    ],
    draft: Annotated[
        str | None,
        typer.Option(
            help="The draft checkpoint. Without it, the deployment does not speculate.",
            metavar="DIR|HUB-ID",
            show_default=False,
        ),
    ] = None,
    gpu: Annotated[
        str | None,
        typer.Option(
            help=(
                "The GPU to serve on: A100, L40S, H100, H200, B200, ... Without it, the YAML uses"
                " the embedded engine."
            ),
            metavar="GPU",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="The file to write.", show_default="TARGET.yaml in this folder"),
    ] = None,
    debug: Debug = False,
) -> None:
    """Write a commented YAML for a target and a draft.

    Its values are read from their checkpoints. `toolkit plan` accepts this YAML as it is written.
    """
    from toolkit.plan.make import gpu_from_user
    from toolkit.plan.suggest import suggest

    row = None if gpu is None else gpu_from_user(gpu)
    folder = (Path.cwd() if out is None else out.absolute().parent).resolve()
    models = (_checkpoint(target), None if draft is None else _checkpoint(draft))
    suggestion = suggest(*models, row, folder=folder, file_name=None if out is None else out.name)
    file = out or folder / suggestion.file_name
    write_new(file, suggestion.text, "--out")
    path = shell_path(file)
    show(
        f"wrote {path}; `toolkit plan {path}` works at once; `toolkit build {path}` needs these"
        " files:"
    )
    for name, content in suggestion.texts.items():
        show(f"  {shell_path(folder / name):24} {content}")


def _checkpoint(written: str) -> Path:
    """The path of a folder that exists, resolved, or a hub id OWNER/NAME as it is written.

    Raises UsageError for anything else.
    """
    from toolkit.config.folders import is_hub_id, similar_folder

    path = Path(written).expanduser()
    if path.exists():
        return path.resolve()
    if not is_hub_id(Path.cwd(), written):
        near = similar_folder(Path.cwd(), written)
        hint = "" if near is None else f"did you mean {near!r}? "
        raise UsageError(
            f"neither a folder nor a hub id: {written}",
            hint=f"{hint}Name a folder with a config.json, or OWNER/NAME.",
        )
    return path
