"""The JSON Schema of the YAML, for editors: `json_schema()`.

The description of a key is the string below its field in `toolkit.config.schema`, or that of the
section that the key holds. It is read from the source here alone: pydantic would read it whenever a
configuration is loaded (`use_attribute_docstrings`), which takes a fifth of that time.
"""

from __future__ import annotations

import ast
import inspect
import itertools
from collections.abc import Iterator
from typing import Any

from toolkit.config import schema

__all__ = ["json_schema"]


def json_schema() -> dict[str, Any]:
    """Every key with its type, default and description."""
    made = schema.DeploymentConfig.model_json_schema()
    descriptions = dict(_descriptions())
    for name, section in {"DeploymentConfig": made, **made["$defs"]}.items():
        section["description"] = " ".join(section["description"].split())
        parents = [parent.__name__ for parent in getattr(schema, name).__mro__]
        for key, value in section["properties"].items():
            told = [descriptions[at] for parent in parents if (at := (parent, key)) in descriptions]
            if told:
                value["description"] = told[0]
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **made}


def _descriptions() -> Iterator[tuple[tuple[str, str], str]]:
    """((class, field), the string below it)."""
    for section in ast.parse(inspect.getsource(schema)).body:
        if not isinstance(section, ast.ClassDef):
            continue
        for field, below in itertools.pairwise(section.body):
            match field, below:
                case (
                    ast.AnnAssign(target=ast.Name(id=name)),
                    ast.Expr(value=ast.Constant(value=str(text))),
                ):
                    yield (section.name, name), " ".join(text.split())
