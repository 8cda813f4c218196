"""docs/report.schema.json is what report.json is: made from the records, and every kind of
report validates against it.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter

from toolkit.records.report import REPORT_SCHEMA_VERSION, ValidationReport
from toolkit.report.render import render_json

SCHEMA = Path(__file__).parents[2] / "docs" / "report.schema.json"


def schema_of_the_records() -> dict[str, Any]:
    """As pydantic reads the annotations; every key is always written, and no others are."""
    made = TypeAdapter(ValidationReport).json_schema(mode="serialization")
    for one in (made, *made["$defs"].values()):
        one["required"] = list(one["properties"])
        one["additionalProperties"] = False
        for value in one["properties"].values():
            value.pop("default", None)
            value.pop("title", None)
    made["properties"]["schema_version"] = {"const": REPORT_SCHEMA_VERSION}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **made}


def test_the_schema_in_the_docs_is_that_of_the_records(request: pytest.FixtureRequest) -> None:
    text = json.dumps(schema_of_the_records(), indent=1, ensure_ascii=False) + "\n"
    if request.config.getoption("--update-golden"):
        SCHEMA.write_text(text, encoding="utf-8")
    assert text == SCHEMA.read_text(encoding="utf-8"), (
        "report.json changed: refresh with --update-golden, raise its version"
    )


@pytest.mark.parametrize("which", ["passing", "failing", "plain_only", "advised"])
def test_a_real_report_validates(which: str, request: pytest.FixtureRequest) -> None:
    jsonschema = pytest.importorskip(
        "jsonschema", reason="jsonschema, of the dev extra, is not installed"
    )
    schema = json.loads(SCHEMA.read_text(encoding="utf-8"))
    jsonschema.Draft202012Validator.check_schema(schema)
    check = jsonschema.Draft202012Validator(schema)
    report: ValidationReport = request.getfixturevalue(which)
    data = json.loads(render_json(report))
    check.validate(data)
    for damaged in (
        {**data, "schema_version": REPORT_SCHEMA_VERSION - 1},
        {**data, "verdict": None},
        {**data, "surplus": 1},
        {name: value for name, value in data.items() if name != "gates"},
        json.loads(render_json(replace(report, name=[]))),  # type: ignore[arg-type]
    ):
        assert not check.is_valid(damaged)
