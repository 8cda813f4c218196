"""Records to JSON and back. Every record is read back equal to what was written.

pydantic reads them by their annotations, strictly: a number in quotes is no number, true is no
whole number, and a field that is missing or unknown is an error. It is imported when the first
record is read, since much that writes records never reads one.
"""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails, SchemaValidator

__all__ = ["R", "from_json", "to_json"]

R = TypeVar("R")

# pydantic's word for an error -> what was wanted; of literal_error it says so itself
WANTED = {
    "int_type": "a whole number",
    "float_type": "a finite number",
    "finite_number": "a finite number",
    "string_type": "text",
    "path_type": "text",
    "bool_type": "true or false",
    "tuple_type": "a list",
    "dict_type": "an object",
    "dataclass_type": "an object",
}
# What JSON has no kind of its own for: a list is read as a tuple, an object as a record, a text
# as a path. Everything within them stays strict.
READ_FROM_ANOTHER_KIND = ("tuple", "dataclass", "lax-or-strict")


def to_json(record: object) -> Any:
    """A record as plain JSON values; paths become strings, tuples lists."""
    if dataclasses.is_dataclass(record) and not isinstance(record, type):
        return {f.name: to_json(getattr(record, f.name)) for f in dataclasses.fields(record)}
    if isinstance(record, Path):
        return str(record)
    if isinstance(record, (list, tuple)):
        return [to_json(item) for item in record]
    if isinstance(record, dict):
        return {str(key): to_json(value) for key, value in record.items()}
    return record


def from_json(kind: type[R], data: Any) -> R:
    """The inverse of to_json, driven by the field annotations. ValueError: what to_json would
    not have written; its text names the place and what is wrong there.
    """
    from pydantic import ValidationError

    record_type: type = kind
    try:
        (record,) = _validator(record_type).validate_python((data,))
    except ValidationError as error:
        raise ValueError(_explained(error.errors(include_url=False)[0])) from error
    read: R = record
    return read


@functools.cache
def _validator(kind: type) -> SchemaValidator:
    """Reads a tuple with one record: pydantic passes settings on to the records in a tuple, and
    takes none for a record by itself.

    Values that json.loads made are read, rather than the text, since JSON may hold half of a
    surrogate pair (in a path that is no UTF-8), which pydantic's own parser refuses.
    """
    from pydantic import ConfigDict, TypeAdapter
    from pydantic_core import SchemaValidator

    settings = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)
    adapter = TypeAdapter(tuple[kind], config=settings)  # type: ignore[valid-type]
    return SchemaValidator(_from_json_kinds(adapter.core_schema))


def _from_json_kinds(schema: Any) -> Any:
    """The schema, not strict about those kinds that JSON does not have."""
    if isinstance(schema, list):
        return [_from_json_kinds(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    relaxed = {key: _from_json_kinds(value) for key, value in schema.items()}
    if schema.get("type") in READ_FROM_ANOTHER_KIND:
        relaxed["strict"] = False
    return relaxed


def _explained(error: ErrorDetails) -> str:
    _, *place = error["loc"]  # the first is the place in the tuple with one record
    where = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in place)
    said = f"{where.removeprefix('.')}: " if where else ""
    if error["type"] == "missing":
        return f"{said}it is missing"
    if error["type"] == "unexpected_keyword_argument":
        return f"{said}there is no such field"
    wanted = WANTED.get(error["type"]) or error.get("ctx", {}).get("expected")
    value = error["input"]
    shown = str(value).lower() if isinstance(value, bool) else f"{value!r:.60}"
    return f"{said}{shown} is not {wanted}" if wanted else f"{said}{shown}: {error['msg']}"
