"""Renders Jinja2 templates. Texts that people review are such templates: they lie in the folder
`templates` beside the module that renders them.

A value from a configuration goes through a filter where the template uses it: `words` in a shell
command, `yaml` as a YAML scalar. In templates named `*.html.j2` every value is escaped, unless it
has the filter `safe`.
"""

from __future__ import annotations

import shlex
from functools import cache
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jinja2 import Environment
    from jinja2.nodes import EvalContext

__all__ = ["render_template"]

TEMPLATES_FOLDER = "templates"


def render_template(module_file: str, name: str, **values: Any) -> str:
    """The text of a module's template: `render_template(__file__, "launch.sh.j2", image=image)`.

    Raises jinja2.UndefinedError if the template uses a name that is not among the values.
    """
    return (
        _environment(Path(module_file).parent / TEMPLATES_FOLDER).get_template(name).render(values)
    )


@cache
def _environment(folder: Path) -> Environment:
    import jinja2  # imported here because `toolkit plan` loads this module and renders nothing

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(folder),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=_is_html,
        finalize=jinja2.pass_eval_context(_escaped),
    )
    environment.filters |= {"words": shlex.join, "yaml": _yaml_scalar}
    return environment


def _is_html(name: str | None) -> bool:
    return name is not None and name.endswith(".html.j2")


def _escaped(context: EvalContext, value: Any) -> Any:
    """Escape as `html.escape` does elsewhere. Jinja2's own escape writes quotes differently."""
    from markupsafe import Markup

    if not context.autoescape or hasattr(value, "__html__"):
        return value
    return Markup(escape(str(value)))


def _yaml_scalar(value: Any) -> str:
    """The value on one line, in quotes if YAML would read something else. A deployment may be named
    `null`, for example.
    """
    import yaml

    dumped: str = yaml.safe_dump(value, allow_unicode=False, width=float("inf"))
    return dumped.partition("\n")[0]
