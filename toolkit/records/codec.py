"""Write records as JSON and read them back. What is read equals what was written.

pydantic reads them strictly, by their annotations: a number in quotes is no number, true is no
whole number, and a missing or unknown field is an error. pydantic is imported when the first record
is read, since many programs only write records.
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

# pydantic's error type -> the value that was expected. For literal_error pydantic names it itself.
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
# JSON has no tuples, records or paths, so a list is read as a tuple, an object as a record, and a
# text as a path. Everything within them stays strict.
READ_FROM_ANOTHER_KIND = ("tuple", "dataclass", "lax-or-strict")


def to_json(record: object) -> Any:
    """Turn a record into plain JSON values. Paths become strings and tuples become lists."""
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
    """Turn JSON values back into a record, by its field annotations.

    Raises ValueError for data that to_json would not have written. Its text names the place and
    what is wrong there.
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
    """Return a validator that reads a tuple with one record. pydantic passes its settings on to
    the records in a tuple, but takes none for a record by itself.

    It reads values from json.loads rather than text. JSON may hold half of a surrogate pair (in a
    path that is no UTF-8), which pydantic's own parser refuses.
    """
    from pydantic import ConfigDict, TypeAdapter
    from pydantic_core import SchemaValidator

    settings = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)
    adapter = TypeAdapter(tuple[kind], config=settings)  # type: ignore[valid-type]
    return SchemaValidator(_from_json_kinds(adapter.core_schema))


def _from_json_kinds(schema: Any) -> Any:
    """Return the schema without strictness for the kinds that JSON does not have."""
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
    prefix = f"{where.removeprefix('.')}: " if where else ""
    if error["type"] == "missing":
        return f"{prefix}it is missing"
    if error["type"] == "unexpected_keyword_argument":
        return f"{prefix}there is no such field"
    wanted = WANTED.get(error["type"]) or error.get("ctx", {}).get("expected")
    value = error["input"]
    shown = str(value).lower() if isinstance(value, bool) else f"{value!r:.60}"
    return f"{prefix}{shown} is not {wanted}" if wanted else f"{prefix}{shown}: {error['msg']}"
