"""What the README and docs/ say about files, commands and links is so."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from toolkit.cli import app
from toolkit.config.load import load_config

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
ARCHITECTURE = ROOT / "docs" / "architecture.md"
PAGES = (README, *sorted((*ROOT.glob("docs/*.md"), *ROOT.glob("configs/*/README.md"))))

LINK = re.compile(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]+))?\)")
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
# In docs/architecture.md: speculative/acceptance.py, plan/rules/, and `SpeculativeRuntime.step`.
PATH = re.compile(r"(?<![\w/.*}-])((?:[\w-]+/)*[\w-]+\.(?:py|txt)|(?:[a-z_]+/)+)(?=[\s`,;:.)]|$)")
PLACEHOLDER = re.compile(r"\b[A-Z]{2,}\b")
NAME = re.compile(r"`([A-Za-z_][\w.]*)(?<!\.py)`")
COMMAND = re.compile(r"^(?:    |\s*\$ )(?:.*/)?toolkit (\w[\w-]*)", re.MULTILINE)
MODULE = re.compile(r"python (?:-m )?((?:tests\.benchmarks|configs/)[\w./]*)")


def anchors(page: Path) -> set[str]:
    """The names that GitHub gives to the headings of a page."""
    headings = HEADING.findall(page.read_text(encoding="utf-8"))
    return {
        re.sub(r"[^\w\- ]", "", heading.replace("`", "").lower()).replace(" ", "-")
        for heading in headings
    }


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    images = [(source, "") for source in re.findall(r'<img src="([^"]+)"', text)]
    for target, anchor in (*LINK.findall(text), *images):
        linked = page if not target else page.parent / target
        assert linked.exists(), target
        if anchor:
            assert anchor in anchors(linked), f"{target}#{anchor}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_exist(page: Path) -> None:
    commands = {
        command.name or (command.callback.__name__ if command.callback else "")
        for command in app.registered_commands
    }
    named = set(COMMAND.findall(page.read_text(encoding="utf-8")))
    assert named <= commands | {"version"}


def test_the_programs_that_made_the_figures_exist() -> None:
    for page in PAGES:
        for name in MODULE.findall(page.read_text(encoding="utf-8")):
            program = ROOT / (name if name.endswith(".py") else name.rstrip(".").replace(".", "/"))
            assert program.exists() or program.with_suffix(".py").exists(), f"{page.name}: {name}"


def named_files(text: str) -> list[str]:
    """The files and folders that a text names; words in capitals stand for many."""
    return [path for path in PATH.findall(text) if not PLACEHOLDER.search(path)]


def place(path: str) -> Path:
    """Paths of docs/architecture.md start in toolkit/, but for those of tests, docs and configs."""
    outside = path.startswith(("tests/", "docs/", "configs/"))
    return (ROOT if outside else ROOT / "toolkit") / path


def test_the_architecture_page_names_files_that_exist() -> None:
    text = ARCHITECTURE.read_text(encoding="utf-8")
    assert [path for path in named_files(text) if not place(path).exists()] == []


def test_what_the_architecture_page_says_is_in_a_file_is_there() -> None:
    table = ARCHITECTURE.read_text(encoding="utf-8").split("## Where is")[1].split("\n## ")[0]
    rows = [row for row in table.splitlines() if row.startswith("| ") and ".py`" in row]
    assert len(rows) > 15
    for row in rows:
        files = [place(path) for path in named_files(row) if path.endswith(".py")]
        if not files:
            continue  # a file per stage
        sources = "\n".join(file.read_text(encoding="utf-8") for file in files)
        for name in NAME.findall(row):
            assert re.search(rf"\b{name.split('.')[-1]}\b", sources), f"{name}: {row}"


def test_the_architecture_page_names_every_package() -> None:
    table = ARCHITECTURE.read_text(encoding="utf-8").split("## Packages")[1]
    parts = {
        path.name + ("/" if path.is_dir() else "")
        for path in (ROOT / "toolkit").iterdir()
        if not path.name.startswith("__") and (path.is_dir() or path.suffix == ".py")
    }
    assert {part for part in parts if f"`{part}" not in table} == set()


def test_the_first_yaml_of_the_readme_is_the_quickstart(tmp_path: Path) -> None:
    """The same deployment, without comments and defaults."""
    lines = README.read_text(encoding="utf-8").split("```yaml\n")[1].split("```")[0]
    assert len(lines.splitlines()) == 12
    (tmp_path / "readme.yaml").write_text(lines, encoding="utf-8")
    (tmp_path / "quickstart").symlink_to(ROOT / "configs" / "quickstart")
    shown = load_config(tmp_path / "readme.yaml").model_dump(mode="json")
    shipped = load_config(ROOT / "configs" / "quickstart.yaml").model_dump(mode="json")
    moved = json.loads(json.dumps(shown).replace(str(tmp_path), str(ROOT / "configs")))
    assert moved == shipped
