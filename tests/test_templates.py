"""Templates: one loader, nothing undefined, nothing unused, and nothing from outside that means
more than itself.
"""

from __future__ import annotations

import ast
import shlex
from pathlib import Path

import pytest
import yaml
from jinja2 import UndefinedError
from jinja2.nodes import Import, Include

from toolkit.templates import _environment, render_template

ROOT = Path(__file__).parents[1] / "toolkit"
TEMPLATES = sorted(ROOT.rglob("*.j2"))
HOSTILE = '<b title="x">it\'s & {{ 7 * 7 }}</b>'


def module(folder: Path, **templates: str) -> str:
    """The file of a module with these templates beside it; `__` in a name stands for a dot."""
    (folder / "templates").mkdir(exist_ok=True)
    for name, text in templates.items():
        (folder / "templates" / f"{name.replace('__', '.')}.j2").write_text(text)
    return str(folder / "module.py")


def test_an_undefined_name_is_an_error(tmp_path: Path) -> None:
    file = module(
        tmp_path,
        text="{{ known }} {{ unknown }}",
        page__html="{{ unknown }}",
        test="{% if unknown %}x{% endif %}",
    )
    for name in ("text.j2", "page.html.j2", "test.j2"):
        with pytest.raises(UndefinedError, match="'unknown' is undefined"):
            render_template(file, name, known=1)


def test_a_value_in_a_page_is_escaped_and_elsewhere_it_stands_as_it_is(tmp_path: Path) -> None:
    text = "{% macro cell(x) %}<td>{{ x }}</td>{% endmacro %}{{ cell(value) }}"
    file = module(tmp_path, page__html=text, text=text, safe__html="{{ value | safe }}")
    assert render_template(file, "page.html.j2", value=HOSTILE) == (
        "<td>&lt;b title=&quot;x&quot;&gt;it&#x27;s &amp; {{ 7 * 7 }}&lt;/b&gt;</td>"
    )
    assert render_template(file, "text.j2", value=HOSTILE) == f"<td>{HOSTILE}</td>"
    assert render_template(file, "safe.html.j2", value=HOSTILE) == HOSTILE


def test_lines_of_blocks_leave_no_line_behind(tmp_path: Path) -> None:
    file = module(tmp_path, text="a\n  {% if true %}\nb\n  {% endif %}\n{# why #}\nc\n")
    assert render_template(file, "text.j2") == "a\nb\nc\n"


@pytest.mark.parametrize(
    "value", ["plain", "null", "yes", "1", "a: b #c", "it's", "$(id) `id`", HOSTILE, "x " * 100]
)
def test_filters_keep_a_value_one_word_and_one_scalar(tmp_path: Path, value: str) -> None:
    file = module(
        tmp_path,
        words="{{ values | words }}",
        yaml="key: {{ value | yaml }}\n{{ value | yaml }}: 1\n",
    )
    assert shlex.split(render_template(file, "words.j2", values=["run", value])) == ["run", value]
    assert yaml.safe_load(render_template(file, "yaml.j2", value=value)) == {"key": value, value: 1}


def test_each_folder_has_templates_of_its_own(tmp_path: Path) -> None:
    files = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        files.append(module(tmp_path / name, text=name))
    assert [render_template(file, "text.j2") for file in files] == ["a", "b"]


def named_in_modules(folder: Path) -> set[str]:
    """Templates that the modules in `folder` name."""
    return {
        node.value
        for file in folder.glob("*.py")
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and node.value.endswith(".j2")
    }


def named_in_templates(folder: Path) -> set[str]:
    return {
        node.template.value  # type: ignore[attr-defined]
        for file in folder.glob("*.j2")
        for node in _environment(folder)
        .parse(file.read_text(encoding="utf-8"))
        .find_all((Import, Include))
    }


@pytest.mark.parametrize(
    "folder",
    sorted({file.parent for file in TEMPLATES}),
    ids=lambda path: str(path.relative_to(ROOT)),
)
def test_every_template_is_used_and_every_one_that_is_named_is_there(folder: Path) -> None:
    named = named_in_modules(folder.parent) | named_in_templates(folder)
    assert named == {file.name for file in folder.iterdir()}


@pytest.mark.parametrize("file", TEMPLATES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_template_can_be_read(file: Path) -> None:
    assert _environment(file.parent).get_template(file.name)
    assert file.read_text(encoding="utf-8").endswith("\n")
