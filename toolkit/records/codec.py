"""Records to JSON and back. Every record is read back equal to what was written."""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from pathlib import Path
from typing import Any, TypeVar

__all__ = ["LEAVES", "R", "from_json", "to_json"]

R = TypeVar("R")


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
    not have written.
    """
    return typing.cast(R, _decode(kind, data))


LEAVES: dict[Any, tuple[tuple[type, ...], str]] = {
    int: ((int,), "a whole number"),
    float: ((int, float), "a finite number"),
    str: ((str,), "text"),
    Path: ((str,), "text"),
    bool: ((bool,), "true or false"),
}


def _decode(kind: Any, data: Any) -> Any:
    origin = typing.get_origin(kind)
    arguments = typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        if data is None and type(None) in arguments:
            return None
        present = [argument for argument in arguments if argument is not type(None)]
        return _decode(present[0], data)
    if origin is tuple:
        items = _of(list, "a list", data)
        if len(arguments) == 2 and arguments[1] is Ellipsis:
            return tuple(_decode(arguments[0], item) for item in items)
        return tuple(
            _decode(argument, item) for argument, item in zip(arguments, items, strict=True)
        )
    if origin is dict:
        return {
            key: _decode(arguments[1], value) for key, value in _of(dict, "an object", data).items()
        }
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        return _decode_record(kind, _of(dict, "an object", data))
    if kind in LEAVES:
        types_, what = LEAVES[kind]
        if isinstance(data, bool) and kind is not bool:
            raise ValueError(f"{str(data).lower()} is not {what}")
        value = _of(types_, what, data)
        if kind is float and not math.isfinite(value):
            raise ValueError(f"{value} is not {what}")
        return kind(value)
    return data


def _decode_record(kind: type, data: dict[str, Any]) -> Any:
    hints = typing.get_type_hints(kind)
    unknown = set(data) - set(hints)
    missing = {f.name for f in dataclasses.fields(kind) if f.default is dataclasses.MISSING} - set(
        data
    )
    if unknown or missing:
        raise ValueError(
            f"{kind.__name__}: unknown fields {sorted(unknown)}, missing fields {sorted(missing)}"
        )
    values = {}
    for name, value in data.items():
        try:
            values[name] = _decode(hints[name], value)
        except (ValueError, OverflowError) as error:
            raise ValueError(f"{name}: {error}") from error
    return kind(**values)


def _of(types_: Any, what: str, data: Any) -> Any:
    if not isinstance(data, types_):
        raise ValueError(f"{data!r:.60} is not {what}")
    return data
