"""Prepares a packaged repository so that this machine can serve it outside the container's folder.

For vLLM's own server that is only its arguments, with this machine's paths: `local_args`.

A packaged repository names its engines by their path in the container. This module makes a folder
with links to the same models and new configurations: with this machine's paths and, if wanted,
without speculation.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from toolkit.errors import UsageError
from toolkit.triton.package import model_config
from toolkit.triton.package.layout_trtllm import PLAIN_YAML, REPOSITORY, plain_arguments
from toolkit.triton.package.layout_vllm import MODEL_JSON, SPECULATION
from toolkit.triton.package.serve_vllm import checked_args

__all__ = ["local_args", "render_here"]


def render_here(packaged: Path, folder: Path, *, speculates: bool = True) -> Path:
    """Write the repository for this machine into `folder`, and return the folder. speculates False
    (`llmapi` only): LLM() runs without speculation.
    """
    for config_file in sorted(packaged.glob("*/config.pbtxt")):
        model = config_file.parent.name
        version = folder / model / "1"
        version.mkdir(parents=True)
        config = model_config.read(config_file)
        for parameter in config.parameters.values():
            parameter.string_value = _with_local_paths(parameter.string_value, folder)
        model_config.write(config, folder / model / "config.pbtxt")
        for entry in sorted((config_file.parent / "1").iterdir()):
            if entry.name == "model.yaml":
                _write_settings(entry, version / entry.name, folder, speculates)
            elif entry.name != PLAIN_YAML:  # the container's paths; speculates decides here
                (version / entry.name).symlink_to(entry.resolve())
    return folder


def local_args(repository: Path, *, speculates: bool = True) -> dict[str, Any]:
    """The arguments of a repository for vLLM (fields of AsyncEngineArgs), as its model.json holds
    them now, with the paths of this machine. speculates False: for the plain arm.

    Raises UsageError for a model.json that no server can be started with.
    """
    file = repository / MODEL_JSON
    try:
        args = checked_args(json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        raise UsageError(
            f"model.json cannot be used: {error}",
            where=file,
            hint="Package the repository again: toolkit package CONFIG --fresh package.",
        ) from error
    if not speculates:
        args.pop(SPECULATION, None)
    return dict(_with_local_paths(args, repository.absolute()))


def _write_settings(source: Path, destination: Path, folder: Path, speculates: bool) -> None:
    import yaml

    settings = yaml.safe_load(source.read_text(encoding="utf-8"))
    if not speculates:
        settings = plain_arguments(settings)
    destination.write_text(
        yaml.safe_dump(_with_local_paths(settings, folder), sort_keys=False), encoding="utf-8"
    )


def _with_local_paths(value: Any, folder: Path) -> Any:
    """The same value, with this folder's path in place of the container's."""
    if isinstance(value, dict):
        return {name: _with_local_paths(inner, folder) for name, inner in value.items()}
    is_container_path = isinstance(value, str) and value.startswith(f"{REPOSITORY}/")
    return f"{folder}{value.removeprefix(REPOSITORY)}" if is_container_path else value
