"""Imports point one way, and nothing heavy is imported before it is needed."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from toolkit.pipeline.sources import imported_modules

ROOT = Path(__file__).parents[1] / "toolkit"

# docs/architecture.md draws this arrow. A package may import those on lower levels, and itself; on
# its own level nothing.
WORKING = (
    "plan",
    "pairing",
    "quantize",
    "engines",
    "speculative",
    "triton",
    "validate",
    "report",
    "advise",
    "standins",
    "gateway",
)
LEVELS = (
    ("cli",),
    ("workflows",),
    ("inprocess",),
    WORKING,
    ("bench",),
    ("pipeline",),
    ("openai_client", "process"),
    ("client", "checkpoints"),
    ("interfaces", "config"),
    ("records", "facts", "resampling"),
    ("errors", "rounding", "templates", "words"),
)
LEVEL = {name: level for level, names in enumerate(LEVELS) for name in names}
# Programs that run inside or beside the server: composition roots of their own, and files that must
# stand alone.
ROOTS = {"__main__.py"} | {
    f"triton/models/{model}/model.py"
    for model in ("llmapi", "trtllm", "bls", "engine", "preprocessing", "postprocessing")
}
ALONE = {"client.py", "process/supervise.py", "triton/package/serve_vllm.py"}
HEAVY = (
    *(
        "torch",
        "transformers",
        "modelopt",
        "tritonclient",
        "scipy",
        "numpy",
        "pydantic",
        "tokenizers",
        "grpc",
        "rich",
    ),
    "jinja2",
    "starlette",
    "uvicorn",
    "prometheus_client",
)


def imported(file: Path) -> Iterator[tuple[str, int]]:
    """(module, line) of every import of ours, wherever it stands; those for the type checker
    alone are left out.
    """
    tree = ast.parse(file.read_text(encoding="utf-8"))
    typing_only = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
        for part in node.body
        for inner in ast.walk(part)
    }
    for node in ast.walk(tree):
        if id(node) in typing_only:
            continue
        if isinstance(node, ast.ImportFrom) and node.module:
            names = (
                [f"{node.module}.{alias.name}" for alias in node.names]
                if node.module == "toolkit"
                else [node.module]
            )
            yield from ((name, node.lineno) for name in names if name.startswith("toolkit."))
        elif isinstance(node, ast.Import):
            yield from (
                (alias.name, node.lineno)
                for alias in node.names
                if alias.name.startswith("toolkit.")
            )


def part_of(file: Path) -> str:
    return file.relative_to(ROOT).parts[0].removesuffix(".py")


SOURCES = sorted(file for file in ROOT.rglob("*.py") if file != ROOT / "__init__.py")


def faults_of(file: Path) -> Iterator[str]:
    """What is wrong with the imports of a file, by the rules above."""
    relative, here = str(file.relative_to(ROOT)), part_of(file)
    if relative in ROOTS:
        return
    if here not in LEVEL:
        yield f"{here} has no place in the layers: give it one here and in docs/architecture.md"
        return
    for module, line in imported(file):
        there = module.split(".")[1]
        if there.startswith("__"):
            continue
        if relative in ALONE:
            yield f"{relative}:{line} imports {module}, and has to stand alone"
        if there != here and LEVEL[there] <= LEVEL[here]:
            yield f"{relative}:{line} imports {module}, which is not below it"


def test_imports_point_down() -> None:
    assert [fault for file in SOURCES for fault in faults_of(file)] == []


def test_no_module_is_reached_from_what_it_imports() -> None:
    """No circle, not even through an import inside a function."""
    names = {
        f"toolkit.{'.'.join(file.relative_to(ROOT).with_suffix('').parts)}": file
        for file in SOURCES
    }
    graph = {name: set(imported_modules(file, names)) - {name} for name, file in names.items()}
    while leaves := {name for name, below in graph.items() if not below}:
        graph = {name: below - leaves for name, below in graph.items() if name not in leaves}
    assert graph == {}, "these import one another in a circle, or stand above one"


def test_the_check_finds_an_import_that_points_up(tmp_path: Path) -> None:
    file = tmp_path / "x.py"
    file.write_text(
        "from toolkit import cli\nimport toolkit.workflows\n"
        "def f():\n    from toolkit.triton.process.server import TritonServer\n"
    )
    assert list(imported(file)) == [
        ("toolkit.cli", 1),
        ("toolkit.workflows", 2),
        ("toolkit.triton.process.server", 4),
    ]


def loaded_by(code: str, modules: tuple[str, ...], *arguments: str) -> list[str]:
    """Which of `modules` are loaded after running `code` in a fresh interpreter."""
    program = (
        f"import sys, json\n{code}\nprint(json.dumps([name for name in {modules!r} if name in"
        " sys.modules]))"
    )
    command = [sys.executable, "-c", program, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    found: list[str] = json.loads(done.stdout.splitlines()[-1])
    return found


RUN = """
from toolkit.cli import main
try:
    main()
except SystemExit:
    pass
"""


def test_help_imports_nothing_heavy() -> None:
    assert loaded_by(RUN, HEAVY, "--help") == []


def test_the_help_of_a_command_imports_nothing_heavier_than_pydantic() -> None:
    """Which typer itself imports to look at arguments."""
    for command in ("build", "generate", "doctor"):
        assert set(loaded_by(RUN, HEAVY, command, "--help")) <= {"pydantic"}


def test_a_config_error_imports_nothing_heavier_than_pydantic(tmp_path: Path) -> None:
    (tmp_path / "bad.yaml").write_text("name: x\nnonsense: 1\n")
    for command in ("build", "explain", "serve", "report"):
        assert loaded_by(RUN, HEAVY, command, str(tmp_path / "bad.yaml")) == ["pydantic"]


def test_a_plan_imports_nothing_heavier_than_pydantic_and_rich() -> None:
    """So that it is there in a fraction of a second, wherever the models and their runtimes are."""
    for name in ("llama70b", "llama70b-engine"):
        config = Path(__file__).parents[1] / "configs" / f"{name}.yaml"
        assert set(loaded_by(RUN, HEAVY, "plan", str(config))) <= {"pydantic", "rich"}


def test_modules_say_what_they_are_for() -> None:
    texts = {file: file.read_text(encoding="utf-8") for file in SOURCES}
    silent = [
        file
        for file, text in texts.items()
        if text.strip() and not ast.get_docstring(ast.parse(text))
    ]
    assert silent == []


TESTS = Path(__file__).parent


def collected_modules_imported_by(file: Path) -> Iterator[tuple[str, int]]:
    """(module, line) of every import of a test module or a conftest, wherever it stands: pytest
    reads those itself, and what two of them share belongs in tests/support.
    """
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            package = "." * node.level + (node.module or "")
            names = [package, *(f"{package}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        for name in names:
            parts = name.split(".")
            is_ours = parts[0] in ("", "tests")  # a relative name begins with nothing
            if is_ours and (parts[-1].startswith("test_") or parts[-1] == "conftest"):
                yield name, node.lineno


def test_no_test_module_is_imported_by_another() -> None:
    assert [
        f"{file.relative_to(TESTS)}:{line} imports {module}"
        for file in sorted(TESTS.rglob("*.py"))
        for module, line in collected_modules_imported_by(file)
    ] == []


def test_the_check_finds_an_import_of_a_test_module(tmp_path: Path) -> None:
    file = tmp_path / "test_x.py"
    file.write_text(
        "import tests.test_client, pytest\nfrom tests.report.conftest import passing\n"
        "from tests.bench import test_metrics\nfrom . import test_y\n"
        "from tests.support.cli import write_config\nfrom toolkit.testing.test_z import z\n"
        "def test_a():\n    from .test_y import helper\n    import torch.testing\n"
    )
    assert list(collected_modules_imported_by(file)) == [
        ("tests.test_client", 1),
        ("tests.report.conftest", 2),
        ("tests.bench.test_metrics", 3),
        ("..test_y", 4),
        (".test_y", 8),
    ]
