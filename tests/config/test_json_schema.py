"""The JSON Schema that editors read."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from toolkit.config.json_schema import json_schema

CONFIGS = Path(__file__).parents[2] / "configs"
LONGEST = 180  # characters of a description
CELL = re.compile(r"^\| (`[^|]+) \|", re.MULTILINE)
DOCS = Path(__file__).parents[2] / "docs" / "configuration.md"


def keys(schema: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """(section, key, what is said of it)."""
    for section, stated in {"": schema, **schema["$defs"]}.items():
        for key, value in stated["properties"].items():
            yield section, key, value


def said(schema: dict[str, Any], value: dict[str, Any]) -> str:
    """The description of a key, or of the section that it holds."""
    if "description" in value:
        return str(value["description"])
    named = str(value.get("$ref", "")).rpartition("/")[2]
    return str(schema["$defs"].get(named, {}).get("description", ""))


def test_every_key_has_a_short_description_in_one_line() -> None:
    schema = json_schema()
    told = {(section, key): said(schema, value) for section, key, value in keys(schema)}
    assert len(told) > 100
    assert [key for key, text in told.items() if not text.endswith(".")] == []
    assert [key for key, text in told.items() if len(text) > LONGEST or "\n" in text] == []


def test_a_key_that_sections_inherit_has_its_description_in_each() -> None:
    schema = json_schema()
    for section in ("TorchEngineConfig", "TrtEngineConfig", "TrtllmPytorchConfig", "VllmConfig"):
        value = schema["$defs"][section]["properties"]["max_input_len"]
        assert value["description"] == "The longest prompt, in tokens."


def test_every_key_has_a_row_in_the_documentation() -> None:
    words = set(re.findall(r"\w+", " ".join(CELL.findall(DOCS.read_text(encoding="utf-8")))))
    headings = set(re.findall(r"`(\w+)`", " ".join(re.findall(r"^## .*$", DOCS.read_text(), re.M))))
    nested = {"quantization", "parity", "distribution", "quality", "latency", "load"}
    assert {key for _, key, _ in keys(json_schema())} - words - headings - nested == set()


@pytest.mark.parametrize("config", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.name)
def test_shipped_configurations_are_valid(config: Path) -> None:
    jsonschema.Draft202012Validator(json_schema()).validate(yaml.safe_load(config.read_text()))
