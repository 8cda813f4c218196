"""The sources in a key: everything that a module can reach by its imports, and nothing else."""

from __future__ import annotations

import ast
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from toolkit.pipeline.sources import ROOT, digest_sources, imported_modules, source_files
from toolkit.workflows.stages import package, validate

MODELS = package.SHIPPED_MODULES
STAGES = {
    "package": (package.__name__, *MODELS),
    "validate": (validate.__name__,),
    "tune": ("toolkit.workflows.stages.tune",),
    "report": ("toolkit.workflows.report",),
}
OURS = {
    ".".join(["toolkit", *path.relative_to(ROOT).with_suffix("").parts]).removesuffix(".__init__")
    for path in ROOT.rglob("*.py")
}


def write(root: Path, **files: str) -> Path:
    for name, text in files.items():
        file = root / (name.replace("__", "/", 1) + ".py")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return root


def parsed_imports(file: Path) -> set[str]:
    """Like `imported_modules`, but from the syntax tree. Imports for the type checker only are left
    out.
    """
    tree = ast.parse(file.read_text(encoding="utf-8"))
    blocks = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
    ]
    skipped = {id(inner) for block in blocks for part in block.body for inner in ast.walk(part)}
    names: set[str] = set()
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and node.value.count(":") == 1
        ):
            names.add(node.value.partition(":")[0])
    return names & OURS


def test_the_pattern_finds_what_the_syntax_tree_holds() -> None:
    differing = {
        str(file.relative_to(ROOT)): imported_modules(file, OURS) ^ parsed_imports(file)
        for file in ROOT.rglob("*.py")
        if imported_modules(file, OURS) != parsed_imports(file)
    }
    assert differing == {}


def test_the_closure_follows_imports_wherever_they_stand(tmp_path: Path) -> None:
    root = write(
        tmp_path,
        start=(
            "import os\nfrom toolkit.a import (\n    thing,\n    b as c,\n)\nif TYPE_CHECKING:\n   "
            " from toolkit import e\n"
        ),
        a____init__="",
        a__b="def f():\n    from toolkit import d\n",
        d='REGISTRY = {"x": "toolkit.named:Thing"}\n',
        e="",
        named="",
        lonely="",
    )
    assert source_files(["toolkit.start"], root) == (
        "a/__init__.py",
        "a/b.py",
        "d.py",
        "named.py",
        "start.py",
    )


def test_kernels_and_templates_beside_a_module_are_its_sources(tmp_path: Path) -> None:
    root = write(tmp_path, a__b="", c__d="")
    for name in ("a/kernels.cpp", "a/templates/launch.j2", "a/__pycache__/b.pyc", "c/other.cpp"):
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_text("")
    assert source_files(["toolkit.a.b"], root) == (
        "a/b.py",
        "a/kernels.cpp",
        "a/templates/launch.j2",
    )


def test_a_name_that_matches_nothing_is_an_error() -> None:
    with pytest.raises(LookupError, match=r"toolkit\.validate\.gone, toolkit\.nowhere"):
        digest_sources(["toolkit.validate.stage", "toolkit.validate.gone", "toolkit.nowhere"])


def test_a_changed_source_changes_the_keys_of_the_stages_that_depend_on_it(
    tmp_path: Path, golden: Callable[[str, str], None]
) -> None:
    """Change every file of ours in turn. The golden file says which stages run again; somebody has
    reviewed it.
    """
    root = tmp_path / "toolkit"
    shutil.copytree(ROOT, root, ignore=shutil.ignore_patterns("__pycache__"))
    before = {stage: digest_sources(modules, root) for stage, modules in STAGES.items()}
    lines: list[str] = []
    for file in sorted(path for path in root.rglob("*") if path.is_file()):
        text = file.read_bytes()
        file.write_bytes(text + b"\n# changed\n")
        changed = [
            stage
            for stage, modules in STAGES.items()
            if digest_sources(modules, root) != before[stage]
        ]
        file.write_bytes(text)
        lines.append(f"{file.relative_to(root)}: {' '.join(changed) or '-'}")
    assert {stage: digest_sources(modules, root) for stage, modules in STAGES.items()} == before
    golden("key-sources.txt", "\n".join(lines) + "\n")


def test_what_decides_a_verdict_is_in_the_key_of_validate() -> None:
    files = source_files(STAGES["validate"])
    decisive = ("records/report.py", "rounding.py", "validate/gates.py", "triton/process/server.py")
    assert {"workflows/stages/validate.py", *decisive} <= set(files)
    assert not any(name.startswith(("cli/", "quantize/", "standins/")) for name in files)
