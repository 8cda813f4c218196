"""Digests of our own sources: the modules that a stage names, and everything that they import.

A stage whose result depends on our code has such a digest in its key. Nobody keeps a list of files
by hand: the import statements, wherever they are in a module, lead to all modules. Besides imported
modules, three things count:

- a module that a string names as "toolkit.package.module:Name" (the registry of engines imports by
  such names);
- the packages that a module is in, since Python imports them first;
- files other than Python beside a module, or in a folder below it that has no Python: kernels,
  templates.

Imports for the type checker only do not count. A pattern finds the import statements. To parse the
sources would take half of the second that a build without work may take;
tests/pipeline/test_sources.py checks that both find the same.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

from toolkit.pipeline.hashing import digest_file, digest_value

__all__ = ["ROOT", "digest_sources", "imported_modules", "source_files"]

PACKAGE = "toolkit"
ROOT = Path(__file__).parents[1]

STATEMENT = re.compile(
    rf"^[ \t]*(?:from[ \t]+(?P<module>{PACKAGE}(?:\.\w+)*)[ \t]+import["
    r" \t]+(?P<names>\([^)]*\)|[^\n#]*)"
    rf"|import[ \t]+(?P<plain>{PACKAGE}(?:\.\w+)*))",
    re.MULTILINE,
)
NAMED_IN_STRING = re.compile(rf'"(?P<module>{PACKAGE}(?:\.\w+)+):\w+"')  # as registries do
TYPE_CHECKING_BLOCK = re.compile(
    r"^if (?:typing\.)?TYPE_CHECKING:\n(?:(?:[ \t]+[^\n]*)?\n)+", re.MULTILINE
)
NAME = re.compile(r"(\w+)(?:\s+as\s+\w+)?")


def digest_sources(modules: Sequence[str], root: Path = ROOT) -> str:
    """sha256 of the names and contents of `source_files(modules)`."""
    return digest_value({name: _digest(root / name) for name in source_files(modules, root)})


def source_files(modules: Sequence[str], root: Path = ROOT) -> tuple[str, ...]:
    """The files that decide what `modules` do, as paths below `root`, sorted.

    modules: dotted names, such as "toolkit.validate.parity"; the name of a package means its
    `__init__` only. root: the folder of the package. Raises LookupError for a name that is not a
    module of ours.
    """
    ours = _modules(root)
    unknown = [module for module in modules if module not in ours]
    if unknown:
        raise LookupError(f"not a module of {root}: {', '.join(unknown)}")
    reached, pending = set[str](), list(modules)
    while pending:
        module = pending.pop()
        if module in reached:
            continue
        reached.add(module)
        imported = imported_modules(root / ours[module], ours)
        pending += [name for name in (*_parents(module), *imported) if name in ours]
    python = {ours[module] for module in reached}
    data = {
        name
        for folder in {Path(file).parent for file in python}
        for name in _data_beside(folder, root)
    }
    return tuple(sorted(python | data))


def imported_modules(file: Path, ours: Collection[str]) -> set[str]:
    """The modules out of `ours` that a source file imports or names in a string."""
    status = file.stat()
    return {
        module for module in _mentioned(file, status.st_mtime_ns, status.st_size) if module in ours
    }


def _digest(file: Path) -> str:
    status = file.stat()
    return _digest_of_state(file, status.st_mtime_ns, status.st_size)


@functools.lru_cache(maxsize=4096)
def _digest_of_state(file: Path, mtime_ns: int, size: int) -> str:
    """Stages share most of their sources, so each is read once."""
    return digest_file(file)


@functools.lru_cache(maxsize=4096)
def _mentioned(file: Path, mtime_ns: int, size: int) -> frozenset[str]:
    """All names that may be modules of ours: `from a import b` mentions a and a.b."""
    text = TYPE_CHECKING_BLOCK.sub("", file.read_text(encoding="utf-8"))
    mentioned = {match["module"] for match in NAMED_IN_STRING.finditer(text)}
    for match in STATEMENT.finditer(text):
        module = match["module"] or match["plain"]
        mentioned.add(module)
        mentioned.update(f"{module}.{name}" for name in NAME.findall(match["names"] or ""))
    return frozenset(mentioned)


def _modules(root: Path) -> dict[str, str]:
    """Dotted name of every module of ours -> its path below `root`."""
    files = (path.relative_to(root) for path in root.rglob("*.py"))
    return {_dotted(file): file.as_posix() for file in files}


def _dotted(file: Path) -> str:
    parts = [PACKAGE, *file.with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _parents(module: str) -> list[str]:
    """toolkit.a.b -> [toolkit.a, toolkit]"""
    parts = module.split(".")
    return [".".join(parts[:length]) for length in range(len(parts) - 1, 0, -1)]


def _data_beside(folder: Path, root: Path) -> Iterator[str]:
    """The files other than Python in a folder of modules, and in folders below it that have no
    Python.
    """
    if folder == Path():
        return
    for path in (root / folder).iterdir():
        if path.is_file() and path.suffix not in (".py", ".pyc"):
            yield path.relative_to(root).as_posix()
        elif path.is_dir() and path.name != "__pycache__" and not any(path.rglob("*.py")):
            inner_files = (inner for inner in path.rglob("*") if inner.is_file())
            yield from (inner.relative_to(root).as_posix() for inner in inner_files)
