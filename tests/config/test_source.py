"""Text to data: every key and value has its place, and what a parser would silently accept is a
fault.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from toolkit.config.source import KeyPath, Source, read_source
from toolkit.errors import ConfigError


def source_of(folder: Path, text: str, *overrides: str) -> Source:
    file = folder / "x.yaml"
    file.write_bytes(text.encode("utf-8"))
    return read_source(file, overrides)


def fatal(folder: Path, content: bytes) -> str:
    file = folder / "x.yaml"
    file.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        read_source(file)
    return str(caught.value).replace(f"{folder}/", "")


words = st.from_regex(r"[a-z][a-z_]{0,6}", fullmatch=True)
scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(10**9), 10**9)
    | st.text(st.characters(codec="utf-8", exclude_categories=["Cc", "Zl", "Zp"]), max_size=6)
    | st.floats(allow_nan=False, allow_infinity=False)
)
trees = st.dictionaries(
    words,
    st.recursive(
        scalars,
        lambda inner: st.dictionaries(words, inner, max_size=3) | st.lists(inner, max_size=3),
        max_leaves=8,
    ),
    min_size=1,
)


class Quoting(yaml.SafeDumper):
    """Put text in quotes: YAML 1.1 writes text such as 1e5 without them, and YAML 1.2 would read a
    number.
    """


Quoting.add_representer(
    str, lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, style='"')
)


@given(trees, st.booleans())
def test_what_was_written_is_read_and_every_path_maps_to_its_line(
    tree: dict[str, Any], flow: bool
) -> None:
    text = yaml.dump(
        tree, Dumper=Quoting, default_flow_style=flow or None, allow_unicode=True, width=10_000
    )
    with tempfile.TemporaryDirectory() as folder:
        source = source_of(Path(folder), text)
    assert source.faults == []
    assert source.data == tree
    for path, place in source.keys.items():
        assert place.line is not None and place.column is not None and place.excerpt is not None
        shown = place.excerpt[place.column - 1 : place.column - 1 + place.width]
        assert yaml.safe_load(shown) == path[-1]


@pytest.mark.parametrize(
    "text, value",
    [
        ("1e-5", 1e-5),
        ("1E5", 100_000),
        ("-2.5e-1", -0.25),
        (".5", 0.5),
        ("010", 10),
        ("0x1f", 31),
        ("12:30", "12:30"),
        ("no", "no"),
        ("on", "on"),
        ("true", True),
        ("~", None),
        ("", None),
        ("2024-01-01", "2024-01-01"),
        ("'4'", "4"),
        ("1_000", "1_000"),
        (".inf", float("inf")),
    ],
)
def test_scalars_are_read_as_yaml_1_2_says(tmp_path: Path, text: str, value: Any) -> None:
    read = source_of(tmp_path, f"a: {text}\n").data["a"]
    assert read == value
    assert type(read) is type(value)


def test_places_are_those_of_an_editor(tmp_path: Path) -> None:
    source = source_of(
        tmp_path, "# é\na:\n  b: {c: some text, d: 2}  # note\n  e: |\n    two\n    lines\n"
    )

    def at(path: KeyPath) -> tuple[int | None, int | None, int]:
        place = source.values[path]
        return place.line, place.column, place.width

    assert at(("a", "b", "c")) == (3, 10, 9)
    assert at(("a", "b", "d")) == (3, 24, 1)
    assert at(("a", "b")) == (3, 6, 20)
    assert at(("a", "e")) == (4, 6, 1)
    assert source.keys[("a", "b", "d")].column == 21


def test_a_path_that_is_not_written_down_has_the_place_of_its_section(tmp_path: Path) -> None:
    source = source_of(tmp_path, "a:\n  b: 1\n")
    assert source.place(("a", "x", "y")).line == 1
    assert source.place(("z",)).line == 1
    assert source.place(("z",)).excerpt is None


def test_duplicate_key_is_refused_with_both_lines(tmp_path: Path) -> None:
    source = source_of(tmp_path, "a: 1\nb:\n  c: 1\n  c: 2\na: 3\n")
    assert [(fault.path, fault.line) for fault in source.faults] == [("b.c", 4), ("a", 5)]
    assert "also on line 3" in source.faults[0].message
    assert "also on line 1" in source.faults[1].message


@pytest.mark.parametrize(
    "text, message",
    [
        ("a: !!python/object:os.system x\n", "tag"),
        ("a: !secret x\n", "tag"),
        ("a: !!int x\n", "not a value of type int"),
        ("a: !!bool x\n", "not a value of type bool"),
        ("a: &a {b: 1}\nc: {<<: *a}\n", "merge keys"),
        ("1: x\n", "not a name"),
        ("? [a]\n: x\n", "not a name"),
        ("a: &a\n  b: *a\n", "contains itself"),
        ("a: " + "9" * 5000 + "\n", "not a value of type int"),
    ],
)
def test_what_a_parser_would_pass_over_is_a_fault(tmp_path: Path, text: str, message: str) -> None:
    faults = source_of(tmp_path, text).faults
    assert any(message in fault.message for fault in faults)
    assert all(fault.line and fault.column and fault.hint for fault in faults)


def test_aliases_are_read_and_cannot_unfold_without_end(tmp_path: Path) -> None:
    assert source_of(tmp_path, "a: &a {b: 1}\nc: *a\n").data == {"a": {"b": 1}, "c": {"b": 1}}
    bomb = "a0: &a0 [x]\n" + "".join(
        f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 12)
    )
    faults = source_of(tmp_path, bomb).faults
    assert len(faults) == 1
    assert "its aliases unfold to too many values" in faults[0].message


@pytest.mark.parametrize(
    "content, expected",
    [
        (b"", "x.yaml:1:1: the file is empty"),
        (b"# only a comment\n", "x.yaml:1:1: the file is empty"),
        (b"- a\n", "x.yaml:1:1: holds a list instead of a mapping"),
        (b"just words\n", "x.yaml:1:1: holds text 'just words' instead of a mapping"),
        (b"a: 1\n\tb: 2\n", "x.yaml:2:1: not valid YAML"),
        (b"a:\n  - b\n c: 1\n", "x.yaml:3:2: not valid YAML"),
        (b"a: b: c\n", "x.yaml:1:5: not valid YAML"),
        (b"a: 'open\n", "x.yaml:2:1: not valid YAML"),
        (b"a: 1\n---\nb: 2\n", "x.yaml:2:1: not valid YAML"),
        (b"a: *b\n", "x.yaml:1:4: not valid YAML"),
        (b"a: 1\nb: caf\xe9\n", "x.yaml:2:7: is not UTF-8 (byte 0xe9)"),
        (b"a: 1\nb: \x07\n", "x.yaml:2:4: holds the control character U+0007"),
        (b"[" * 5000, "x.yaml:1:1: is nested too deeply"),
    ],
)
def test_a_text_that_is_no_config_has_one_fault_with_its_place(
    tmp_path: Path, content: bytes, expected: str
) -> None:
    assert fatal(tmp_path, content).startswith(expected)


def test_tabs_get_their_own_hint(tmp_path: Path) -> None:
    assert "indented with spaces, not tabs" in fatal(tmp_path, b"a:\n\tb: 1\n")
    assert "indented with spaces, not tabs" in fatal(tmp_path, b"a:\n  b: 1\n\tc: 2\n")


@pytest.mark.parametrize(
    ("content", "hint"),
    [
        (b"s:\n  a:4\n  b: 5\n", "wants a space behind the colon"),
        (b"s:\n  b: 5\n  a:4\n", "wants a space behind the colon"),
        (b"a: [1, 2\n", "Close each bracket and brace"),
        (b"a: {b: 1\n", "Close each bracket and brace"),
        (b"a: 'open\n", "Close the quotes"),
        (b"a: 1\n---\nb: 2\n", "One file holds one deployment"),
        (b"s:\n  a:4 # four\n  # and five\n  b: 5\n", "wants a space behind the colon"),
        (b"a: {b: 1}}\n", "Close each bracket and brace"),
        (b"u: http://x\n v: 1\n", "check the indentation"),
    ],
)
def test_what_is_forgotten_is_named(tmp_path: Path, content: bytes, hint: str) -> None:
    assert hint in fatal(tmp_path, content)


@pytest.mark.parametrize(
    ("written", "meant", "read"),
    [("1:4, 2: 0", "1: 4", {2: 0}), ("a:b:c, d: 1", "a: b:c", {"d": 1})],
)
def test_a_colon_without_a_space_in_braces_is_one_fault(
    tmp_path: Path, written: str, meant: str, read: dict[str | int, int]
) -> None:
    """YAML reads {1:4} as the key "1:4" without a value."""
    source = source_of(tmp_path, f"s: {{{written}}}")
    (fault,) = source.faults
    assert (fault.path, fault.hint, source.data) == ("s", f"Write {meant}", {"s": read})
    assert source_of(tmp_path, "s: {'a:b': 1, c: d:e}").faults == []


def test_a_file_that_is_missing_or_a_folder_says_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        read_source(tmp_path / "gone.yaml")
    (tmp_path / "tiny.yaml").write_text("a: 1")
    with pytest.raises(ConfigError, match=r"is a folder(.|\n)*tiny\.yaml"):
        read_source(tmp_path)


def test_windows_text_is_read(tmp_path: Path) -> None:
    source = source_of(tmp_path, "\ufeffa: 1\r\nb:\r\n  c: x\r\n")
    assert source.data == {"a": 1, "b": {"c": "x"}}
    assert source.values[("b", "c")].excerpt == "  c: x"


def test_set_replaces_values_of_the_file(tmp_path: Path) -> None:
    text = "a: {b: 1, c: 2}\nd:\n"
    source = source_of(tmp_path, text, "a.b=[1, x]", "d.e.f=1e-5", "g=", "h= yes = no ")
    assert source.data == {
        "a": {"b": [1, "x"], "c": 2},
        "d": {"e": {"f": 1e-5}},
        "g": None,
        "h": "yes = no",
    }
    assert source.faults == []
    assert source.place(("a", "b")).origin == "--set a.b=[1, x]"
    assert source.place(("a", "c")).line == 1


@pytest.mark.parametrize(
    "override", ["", "a", "=1", "a..b=1", ".a=1", "a.b.c=1", "a.b=[", "a=\t: x:"]
)
def test_set_faults_name_the_argument(tmp_path: Path, override: str) -> None:
    source = source_of(tmp_path, "a: {b: 1}\n", override)
    (fault,) = source.faults
    assert fault.render("x.yaml").startswith(f"--set {override}: ")
