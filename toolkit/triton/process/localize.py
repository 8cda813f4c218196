"""A packaged repository as this machine can serve it, where it does not lie in the container's
folder.

What is packaged names its engines by the path that it has in the container. Here the same models
are laid out in a folder of their own, as links, with the configurations written anew: the paths of
this machine, and where it is wanted no speculation.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from toolkit.triton.package import model_config
from toolkit.triton.package.layout_trtllm import REPOSITORY

__all__ = ["render_here"]

ONLY_FOR_SPECULATION = (
    "speculative_config",
    "disable_overlap_scheduler",
)  # arguments of LLM(): it runs plainly without them


def render_here(packaged: Path, folder: Path, *, speculates: bool = True) -> Path:
    """Lay the repository out in `folder`, which it returns. speculates False (`llmapi` alone):
    LLM() without speculation.
    """
    for config_file in sorted(packaged.glob("*/config.pbtxt")):
        model = config_file.parent.name
        version = folder / model / "1"
        version.mkdir(parents=True)
        config = model_config.read(config_file)
        for parameter in config.parameters.values():
            parameter.string_value = _moved(parameter.string_value, folder)
        model_config.write(config, folder / model / "config.pbtxt")
        for entry in sorted((config_file.parent / "1").iterdir()):
            if entry.name == "model.yaml":
                _write_settings(entry, version / entry.name, folder, speculates)
            else:
                (version / entry.name).symlink_to(entry.resolve())
    return folder


def _write_settings(source: Path, destination: Path, folder: Path, speculates: bool) -> None:
    import yaml

    settings = yaml.safe_load(source.read_text(encoding="utf-8"))
    if not speculates:
        settings = {
            name: value for name, value in settings.items() if name not in ONLY_FOR_SPECULATION
        }
    destination.write_text(
        yaml.safe_dump(_moved(settings, folder), sort_keys=False), encoding="utf-8"
    )


def _moved(value: Any, folder: Path) -> Any:
    """The same with this folder's paths in the place of the container's."""
    if isinstance(value, dict):
        return {name: _moved(inner, folder) for name, inner in value.items()}
    inside = isinstance(value, str) and value.startswith(f"{REPOSITORY}/")
    return f"{folder}{value.removeprefix(REPOSITORY)}" if inside else value
