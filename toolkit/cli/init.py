"""`toolkit init`: write a commented YAML for two checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from toolkit.cli.common import Debug, app, as_typed, show
from toolkit.errors import UsageError


@app.command()
def init(
    target: Annotated[
        str,
        typer.Option(
            help="The target: a folder, or a hub id.", metavar="DIR|HUB-ID", show_default=False
        ),
    ],
    draft: Annotated[
        str | None,
        typer.Option(
            help="The draft; without one, nothing is drafted.",
            metavar="DIR|HUB-ID",
            show_default=False,
        ),
    ] = None,
    gpu: Annotated[
        str | None,
        typer.Option(
            help=(
                "What it will run on: A100, L40S, H100, H200, B200, ...; without it, the embedded"
                " engine."
            ),
            metavar="GPU",
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="The file to write.", show_default="TARGET.yaml here")
    ] = None,
    debug: Debug = False,
) -> None:
    """Write a commented YAML for a pair, with values read from the checkpoints, that the plan
    says can work.
    """
    from toolkit.plan.make import gpu_from_user
    from toolkit.plan.suggest import suggest

    row = None if gpu is None else gpu_from_user(gpu)
    folder = (Path.cwd() if out is None else out.absolute().parent).resolve()
    models = (_checkpoint(target), None if draft is None else _checkpoint(draft))
    made = suggest(*models, row, folder=folder, file_name=None if out is None else out.name)
    file = out or folder / made.file_name
    try:
        with file.open("x", encoding="utf-8") as opened:
            opened.write(made.text)
    except FileExistsError:
        raise UsageError("is there already", where=file, hint="name another: --out FILE") from None
    except OSError as error:
        raise UsageError(
            f"cannot be written ({error.strerror})", where=file, hint="name another: --out FILE"
        ) from error
    shown = as_typed(file)
    show(
        f"wrote {shown}; `toolkit plan {shown}` works at once, and before `toolkit build {shown}`"
        " it needs"
    )
    for needed, what in made.texts.items():
        show(f"  {as_typed(folder / needed):24} {what}")


def _checkpoint(written: str) -> Path:
    """A folder that exists, resolved; else OWNER/NAME as it is."""
    from toolkit.config.folders import is_hub_id, similar_folder

    path = Path(written).expanduser()
    if path.exists():
        return path.resolve()
    if not is_hub_id(Path.cwd(), written):
        near = similar_folder(Path.cwd(), written)
        hint = "" if near is None else f"did you mean {near!r}? "
        raise UsageError(
            f"no such folder, and no hub id: {written}",
            hint=f"{hint}Name a folder with a config.json, or OWNER/NAME.",
        )
    return path
