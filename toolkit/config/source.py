"""Read YAML text into plain data, with the place of every key and value.

The nodes that PyYAML composes know their positions, so places are exact for keys and scalars alike.
Scalars are read by the rules of YAML 1.2: `1e-5` is a number, and `no`, `010` and `12:30` are not
silently converted. Things that the parser would silently accept are faults here: a duplicate key, a
tag, a merge key, a second document.

Values of `--set a.b=c` replace values of the file afterwards; their place is that argument.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from toolkit.errors import ConfigError, Fault

__all__ = ["KeyPath", "Place", "Source", "dotted", "read_source"]

KeyPath = tuple[str | int, ...]
MAX_NODES = 20_000  # aliases of aliases can unfold to any size
TAG = "tag:yaml.org,2002:"
CONFIG_HINT = (
    "a deployment file is a mapping: `name: ...`, `target: ...`; see configs/quickstart.yaml"
)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a key or value is. line and column count from 1; width: the length of the caret line;
    excerpt: the source line. origin: the command-line argument, if it is not in the file.
    """

    line: int | None
    column: int | None
    width: int
    excerpt: str | None
    origin: str | None = None

    def fault(self, path: KeyPath, message: str, hint: str | None = None) -> Fault:
        return Fault(
            dotted(path),
            message,
            self.line,
            self.column,
            self.excerpt,
            self.width,
            hint,
            self.origin,
        )


@dataclass(slots=True)
class Source:
    """The content of a file. keys, values: path -> place of the key, of the value. faults: the
    faults of the text. overridden: path -> the text of `--set`, as it was typed.
    """

    file: Path
    data: dict[str, Any]
    keys: dict[KeyPath, Place] = field(default_factory=dict)
    values: dict[KeyPath, Place] = field(default_factory=dict)
    faults: list[Fault] = field(default_factory=list)
    overridden: dict[KeyPath, str] = field(default_factory=dict)

    def place(self, path: KeyPath, *, of_key: bool = False) -> Place:
        """The place of a value or its key. If it is not in the file, the place of the nearest
        section around it.
        """
        places = self.keys if of_key else self.values
        if path in places:
            return places[path]
        while path and path not in self.keys:
            path = path[:-1]
        return self.keys.get(path, Place(1, 1, 1, None))


def dotted(path: KeyPath) -> str:
    return ".".join(str(part) for part in path)


def read_source(file: Path, overrides: Sequence[str] = ()) -> Source:
    """Read a YAML file, then replace values by the overrides `a.b=c`.

    Raises ConfigError for a file that cannot be read as a mapping; other faults are collected in
    the result.
    """
    text = _read_text(file)
    root = _compose(file, text, None)
    if root is None:
        raise ConfigError(file, [Place(1, 1, 1, None).fault((), "the file is empty", CONFIG_HINT)])
    source = Source(file, {})
    if not isinstance(root, yaml.MappingNode):
        content = "a list" if isinstance(root, yaml.SequenceNode) else f"text {root.value!r:.60}"
        place = _Reader(source, text, None).place(root)
        raise ConfigError(
            file, [place.fault((), f"holds {content} instead of a mapping", CONFIG_HINT)]
        )
    source.data = _Reader(source, text, None).build(root, ())
    for override in overrides:
        _override(source, override)
    return source


def _read_text(file: Path) -> str:
    try:
        raw = file.read_bytes()
    except FileNotFoundError:
        raise ConfigError(file, [Fault("", "no such file", hint="Check the path.")]) from None
    except IsADirectoryError:
        names = sorted(path.name for path in file.glob("*.y*ml"))
        hint = f"Name a file in it: {', '.join(names[:5])}" if names else "Name a YAML file."
        raise ConfigError(file, [Fault("", "is a folder, not a file", hint=hint)]) from None
    except OSError as error:
        raise ConfigError(
            file, [Fault("", f"cannot be read: {error.strerror}", hint="Check its permissions.")]
        ) from error
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        before = raw[: error.start]
        line, column = (
            before.count(b"\n") + 1,
            len(before.rpartition(b"\n")[2].decode("utf-8", "replace")) + 1,
        )
        message = f"is not UTF-8 (byte 0x{raw[error.start]:02x})"
        raise ConfigError(
            file, [Fault("", message, line, column, hint="Save it as UTF-8 text.")]
        ) from error


class _Loader(yaml.SafeLoader):
    """PyYAML's parser with the implicit types of YAML 1.2 (core schema) instead of 1.1."""

    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012 - PyYAML's own attribute


for _name, _pattern, _first in (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", list("-+0123456789")),
    (
        "float",
        r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
        list("-+.0123456789"),
    ),
):
    _Loader.add_implicit_resolver(TAG + _name, re.compile(f"^(?:{_pattern})$"), _first)


def _compose(file: Path, text: str, origin: str | None) -> Any:
    """The root node, or None for an empty text. Raises ConfigError with the place of a syntax
    error.
    """
    lines = _lines(text)

    def fault(line: int, column: int, message: str, hint: str | None) -> ConfigError:
        place = Place(None, None, 1, None, origin)
        if origin is None:
            place = Place(line, column, 1, _excerpt(lines, line))
        return ConfigError(file, [place.fault((), message, hint)])

    try:
        return yaml.compose(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line, column = (1, 1) if mark is None else (mark.line + 1, mark.column + 1)
        problem = (error.problem or "bad syntax").removeprefix("but ")
        context_line = f", line {error.context_mark.line + 1}" if error.context_mark else ""
        context = f" ({error.context}{context_line})" if error.context else ""
        begun = line if error.context_mark is None else error.context_mark.line + 1
        raise fault(
            line,
            column,
            f"not valid YAML: {problem}{context}",
            _syntax_hint(f"{error.context} {problem}", lines, line, begun),
        ) from error
    except yaml.reader.ReaderError as error:
        before = text[: error.position]
        line, column = before.count("\n") + 1, len(before.rpartition("\n")[2]) + 1
        raise fault(
            line,
            column,
            f"holds the control character U+{ord(text[error.position]):04X}",
            "Remove it.",
        ) from error
    except RecursionError as error:
        raise fault(1, 1, "is nested too deeply", CONFIG_HINT) from error


def _syntax_hint(problem: str, lines: list[str], line: int, begun: int) -> str | None:
    """problem: with its context. begun: the line in which that begins."""
    # Without its space, a key is noticed in the next line, or behind the comments there.
    near = [*lines[begun - 1 : begun], *lines[max(0, line - 8) : line]]
    if "'\\t'" in problem or "\t" in "".join(near[-1:]).partition("#")[0]:
        return "YAML is indented with spaces, not tabs."
    if any(re.match(r"\s*[A-Za-z_]\w*:[^\s:/]", each) for each in near):
        return "YAML wants a space behind the colon of a key."
    if "mapping values are not allowed" in problem:
        return 'Put text that contains ": " in quotes; otherwise check the indentation.'
    if "expected ',' or" in problem or problem.endswith(("found '}'", "found ']'")):
        return "Close each bracket and brace that is opened, once."
    if "unexpected end of stream" in problem:
        return "Close the quotes."
    if "single document" in problem:
        return "One file holds one deployment: remove the `---` between documents."
    return None


def _lines(text: str) -> list[str]:
    """The lines as the parser counts them: YAML breaks lines at fewer characters than
    str.splitlines does.
    """
    return re.split("\r\n|[\n\r\x85\u2028\u2029]", text)


def _excerpt(lines: list[str], line: int) -> str:
    return lines[line - 1].replace("\t", " ") if line <= len(lines) else ""


class _Reader:
    """Turn nodes into data, and note places and faults in `source`."""

    def __init__(self, source: Source, text: str, origin: str | None) -> None:
        self.source = source
        self.lines = _lines(text)
        self.origin = origin
        self.nodes = 0
        self.ancestors: list[int] = []

    def place(self, node: Any) -> Place:
        if self.origin is not None:
            return Place(None, None, 1, None, self.origin)
        start, end = node.start_mark, node.end_mark
        excerpt = _excerpt(self.lines, start.line + 1)
        end_column = end.column if end.line == start.line else len(excerpt.rstrip())
        width = end_column - start.column
        return Place(start.line + 1, start.column + 1, max(1, width), excerpt)

    def fault(self, node: Any, path: KeyPath, message: str, hint: str) -> None:
        self.source.faults.append(self.place(node).fault(path, message, hint))

    def build(self, node: Any, path: KeyPath) -> Any:
        self.nodes += 1
        if self.nodes > MAX_NODES or id(node) in self.ancestors:
            if self.nodes <= MAX_NODES + 1:
                self.fault(
                    node,
                    path,
                    "contains itself, or its aliases unfold to too many values",
                    "Write the value out without the alias.",
                )
            return None
        self.source.values[path] = self.place(node)
        if node.tag.removeprefix(TAG) not in ("null", "bool", "int", "float", "str", "seq", "map"):
            self.fault(
                node,
                path,
                f"the tag {node.tag!r} is not supported",
                "Remove the tag: values are text, numbers, lists or sections.",
            )
            return None
        self.ancestors.append(id(node))
        try:
            if isinstance(node, yaml.MappingNode):
                return self._mapping(node, path)
            if isinstance(node, yaml.SequenceNode):
                return [self.build(item, (*path, index)) for index, item in enumerate(node.value)]
            return self._scalar(node, path)
        finally:
            self.ancestors.pop()

    def _mapping(self, node: Any, path: KeyPath) -> dict[str | int, Any]:
        data: dict[str | int, Any] = {}
        # Below the top level all keys may be numbers; the schema says where that is allowed.
        has_number_keys = bool(path) and all(
            key.tag == TAG + "int" or _lacks_space(key, value) for key, value in node.value
        )
        key_tag = TAG + ("int" if has_number_keys else "str")
        for key, value in node.value:
            if _lacks_space(key, value):
                name, _, rest = key.value.partition(":")
                self.fault(
                    key,
                    path,
                    f"{key.value!r:.40} has no space behind its colon",
                    f"Write {name}: {rest}",
                )
                continue
            if not isinstance(key, yaml.ScalarNode) or key.tag != key_tag:
                self.fault(
                    key,
                    path,
                    f"the key {key.value!r:.40} is not a name",
                    "A key must be a word; put it in quotes if it looks like something else.",
                )
                continue
            name = self._scalar(key, path)
            here = (*path, name)
            if name == "<<":
                self.fault(
                    key,
                    path,
                    "merge keys (`<<`) are not supported",
                    "Write the keys out, or use an alias for each value.",
                )
            elif name in data:
                first = self.source.keys[here]
                where = f"on line {first.line}" if first.line is not None else "before"
                self.fault(
                    key,
                    here,
                    f"is a duplicate key; it is also {where}",
                    "Keep only one of the two lines.",
                )
            else:
                self.source.keys[here] = self.place(key)
                data[name] = self.build(value, here)
        return data

    def _scalar(self, node: Any, path: KeyPath) -> Any:
        text, kind = node.value, node.tag.removeprefix(TAG)
        try:
            if kind == "null":
                return None
            if kind == "bool":
                return {"true": True, "false": False}[text.lower()]
            if kind == "int":
                return int(text, 0) if text[:2] in ("0o", "0x") else int(text)
            if kind == "float":
                number = float(text.lower().replace(".inf", "inf").replace(".nan", "nan"))
                is_whole = "e" in text.lower() and number.is_integer()  # such as 1e3
                return int(number) if is_whole else number
        except (KeyError, ValueError):
            self.fault(
                node,
                path,
                f"{text!r:.40} is not a value of type {kind}",
                "Remove the tag, or correct the value.",
            )
            return None
        return text


def _lacks_space(key: Any, value: Any) -> bool:
    """Whether `{1:4}` stands for `{1: 4}`: YAML reads it as the key "1:4" without a value."""
    is_bare = isinstance(key, yaml.ScalarNode) and key.style is None and ":" in key.value
    return is_bare and value.start_mark.index == value.end_mark.index


def _override(source: Source, override: str) -> None:
    """Replace or add one value by an override `a.b=c`."""
    origin = f"--set {override}"
    name, equals, text = override.partition("=")
    path = tuple(name.strip().split("."))
    place = Place(None, None, 1, None, origin)
    if not equals or not all(path):
        source.faults.append(
            place.fault(
                (),
                "does not have the format key.key=value",
                "For example: --set engine.max_batch_size=4",
            )
        )
        return
    inner: Any = source.data
    for depth, part in enumerate(path[:-1], 1):
        if inner.get(part) is None:  # the section is missing or empty
            inner[part] = {}
            source.keys[path[:depth]] = source.values[path[:depth]] = place
        inner = inner[part]
        if not isinstance(inner, dict):
            source.faults.append(
                place.fault(
                    path[:depth], "is a value, not a section with keys", "Set the whole value."
                )
            )
            return
    for places in (source.keys, source.values):
        for known in [known for known in places if known[: len(path)] == path]:
            del places[known]
    try:
        node = _compose(source.file, text, origin)
    except ConfigError as error:
        source.faults.extend(error.faults)
        return
    source.keys[path] = place
    source.overridden[path] = text.strip()
    inner[path[-1]] = None if node is None else _Reader(source, text, origin).build(node, path)
    source.values.setdefault(path, place)
