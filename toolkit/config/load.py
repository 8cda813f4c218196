"""A YAML file -> DeploymentConfig with resolved paths, or a ConfigError that holds every fault with
its place and its fix.

Faults come from three readers that do not stop at the first: the text (`source`), the schema
(pydantic), and the file system, which has to hold what the paths name. This module puts pydantic's
verdicts into the words of the file.
"""

from __future__ import annotations

import difflib
import types
import typing
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ValidationError

from toolkit.config.folders import meant_folder, names_a_model
from toolkit.config.schema import DeploymentConfig
from toolkit.config.source import KeyPath, Source, dotted, read_source
from toolkit.errors import ConfigError, Fault

__all__ = ["load_config", "located"]

FOLDERS: tuple[KeyPath, ...] = (("target", "checkpoint"), ("draft", "checkpoint"))
FILES: tuple[KeyPath, ...] = (
    ("calibration", "dataset"),
    ("calibration", "heldout"),
    ("validation", "prompts"),
)

INT8 = (
    "INT8 has two forms: W8A8_SQ_PER_CHANNEL (weights and activations, SmoothQuant) and W8A16"
    " (weights only)."
)
SPELLINGS = {
    "INT8": INT8,
    "INT8_SQ": INT8,
    "W8A8": INT8,
    "SMOOTHQUANT": INT8,
    "NONE": "did you mean 'NO_QUANT'?",
    "NULL": "did you mean 'NO_QUANT'?",
}
NOUNS = {
    "quant_algo": "a quantization algorithm that is known here",
    "kv_cache_quant_algo": "a KV-cache algorithm",
    "kind": "a kind that is known here",
    "acceptance": "an acceptance rule",
    "device": "a device",
    "mode": "a mode",
    "dtype": "a dtype",
    "layout": "a layout",
}
KEEP_KV = "To keep the cache in the model's dtype, remove this line."
WORDS: dict[KeyPath, str] = {("speculation", "max_draft_len"): "auto"}  # beside a number
TYPES = {
    "int_type": ("a whole number", "Write digits without quotes, for example 4."),
    "int_from_float": ("a whole number", "Write it without a fraction."),
    "float_type": ("a number", "Write a number without quotes, for example 1.5."),
    "finite_number": ("a finite number", "Write a number, or remove the line."),
    "bool_type": ("true or false", "Write true or false, without quotes."),
    "string_type": ("text", "Put it in quotes."),
    "path_type": ("a path", "Put it in quotes."),
}


def load_config(
    file: Path, overrides: Sequence[str] = (), *, texts: bool = True
) -> DeploymentConfig:
    """Read, check and resolve a deployment file; `overrides` are `a.b=c` texts that win over it.

    Every path in the result is absolute; a relative one in the file starts at the file's folder.
    texts False: calibration and prompt files need not be there. Raises ConfigError with all faults,
    in the order of their lines.
    """
    source = read_source(file, overrides)
    _as_meant(source)
    faults = list(source.faults)
    config: DeploymentConfig | None = None
    try:
        config = DeploymentConfig.model_validate(source.data)
    except ValidationError as error:
        known = {fault.path for fault in faults}
        for detail in error.errors():
            if str(detail["loc"][-1]).startswith(
                "literal["
            ):  # the word beside a number; the number's own fault says it all
                continue
            fault = _fault(
                source,
                tuple(detail["loc"]),
                detail["type"],
                detail.get("ctx", {}),
                detail["input"],
                detail["msg"],
            )
            if fault.path not in known:  # the text had said what is wrong with it
                faults.append(fault)
    faults.extend(_missing_files(source, FOLDERS + FILES if texts else FOLDERS))
    if faults or config is None:
        raise ConfigError(
            file,
            sorted(
                faults,
                key=lambda fault: (fault.origin is not None, fault.line or 0, fault.column or 0),
            ),
        )
    return _resolved(config, file.absolute().parent)


def _as_meant(source: Source) -> None:
    """What `--set` leaves no doubt about: a number where only text can stand (a shell takes the
    quotes away), and a kind of speculation that has no use for the draft of the file.
    """
    for path, text in source.overridden.items():
        section = _section(source.data, path[:-1])
        if isinstance(section.get(path[-1]), (int, float)) and _only_text(path):
            section[path[-1]] = text
    speculation = source.data.get("speculation")
    kind = speculation.get("kind") if isinstance(speculation, dict) else None
    asked = {("speculation",), ("speculation", "kind")} & source.overridden.keys()
    if (
        asked
        and kind in ("none", "ngram")
        and not any(path[0] == "draft" for path in source.overridden)
    ):
        source.data.pop("draft", None)


def _section(data: Any, path: KeyPath) -> Any:
    for part in path:
        data = data[part]
    return data


def located(file: Path, overrides: Sequence[str], faults: Sequence[Fault]) -> list[Fault]:
    """Faults that were found after loading, with the places of their keys in the file, in its
    order.
    """
    source = read_source(file, overrides)
    paths = [tuple(fault.path.split(".")) for fault in faults]
    placed = [
        source.place(path).fault(path, fault.message, fault.hint)
        for path, fault in zip(paths, faults, strict=True)
    ]
    return sorted(
        placed, key=lambda fault: (fault.origin is not None, fault.line or 0, fault.column or 0)
    )


def _fault(
    source: Source, path: KeyPath, kind: str, context: dict[str, Any], value: Any, text: str
) -> Fault:
    """One of pydantic's errors, in our words and at its place."""
    path, variant = _without_tag(path)
    if kind in ("union_tag_invalid", "union_tag_not_found"):
        path, kind, value = (*path, "kind"), "literal_error", value["kind"]
    if kind == "extra_forbidden":
        return source.place(path, of_key=True).fault(path, *_unknown_key(path, variant))
    if kind == "missing":
        message = "is missing"
        hint = (
            f"Add `{path[-1]}:` to the section `{dotted(path[:-1])}`."
            if path[:-1]
            else f"Add `{path[-1]}:` to the file."
        )
        return source.place(path[:-1], of_key=True).fault(path, message, hint)
    return source.place(path).fault(path, *_wrong_value(path, kind, context, value, text))


def _unknown_key(path: KeyPath, variant: str | None) -> tuple[str, str]:
    name, here = str(path[-1]), _known_keys(variant).get(path[:-1], ())
    kinds = [
        kind
        for kind in _variants()
        if variant is not None and name in _known_keys(kind).get(path[:-1], ())
    ]
    if kinds:
        return (
            f"is no key of kind {variant}",
            f"It belongs to {' and '.join(kinds)}; set {path[0]}.kind, or remove this line.",
        )
    near = difflib.get_close_matches(name, here, n=1, cutoff=0.6)
    if near:
        return "unknown key", f"did you mean {near[0]!r}?"
    elsewhere = [
        dotted((*section, name)) for section, keys in _known_keys().items() if name in keys
    ]
    if elsewhere:
        return "unknown key here", f"did you mean {' or '.join(elsewhere[:3])}?"
    section = f"in `{dotted(path[:-1])}`" if path[:-1] else "at the top level"
    return "unknown key", f"known {section}: {', '.join(here)}"


def _wrong_value(
    path: KeyPath, kind: str, context: dict[str, Any], value: Any, text: str
) -> tuple[str, str | None]:
    shown = _shown(value)
    if kind == "value_error":
        message, _, hint = text.removeprefix("Value error, ").partition("; ")
        return message, f"{_capital(hint)}." if hint else None
    if kind == "literal_error":
        return f"{shown} is not {NOUNS.get(str(path[-1]), 'allowed here')}", _choices(path, value)
    if kind == "model_type":
        keys = ", ".join(_known_keys().get(path, ())[:4])
        return (
            "is empty" if value is None else f"{shown} is not a section"
        ), f"Write keys beneath it: {keys}, ..."
    if kind in ("greater_than", "greater_than_equal", "less_than", "less_than_equal"):
        (bound,) = (context[name] for name in ("gt", "ge", "lt", "le") if name in context)
        relation = {"gt": "above", "ge": "at least", "lt": "below", "le": "at most"}[
            next(iter(set(context) & {"gt", "ge", "lt", "le"}))
        ]
        return f"{shown} is out of range", f"It has to be {relation} {bound:g}."
    if kind == "invalid_key":
        return "is not a name", "Keys are words here."
    if kind == "string_pattern_mismatch":
        return (
            f"{shown} cannot name folders",
            "Use letters, digits, '.', '_' and '-', beginning with a letter or digit.",
        )
    if kind == "string_too_long":
        return (
            f"is {len(str(value))} characters long",
            f"At most {context['max_length']} are allowed.",
        )
    if kind in TYPES:
        wanted, hint = TYPES[kind]
        hint += f" Or write {WORDS[path]}." if path in WORDS else ""
        return ("is empty" if value is None else f"{shown} is not {wanted}"), hint
    return f"{shown}: {text[:1].lower()}{text[1:]}", None


def _choices(path: KeyPath, value: Any) -> str:
    allowed = _literals(path)
    listed = f"known: {', '.join(allowed)}."
    if (
        isinstance(value, (int, float)) and allowed[0][:1].isdigit()
    ):  # YAML takes a version for a number
        return f"Put it in quotes; {listed}"
    if isinstance(value, str):
        if path[-1] == "quant_algo" and value.upper() in SPELLINGS:
            return f"{SPELLINGS[value.upper()]}\n  {listed}"
        by_case = {name.lower(): name for name in allowed}
        near = difflib.get_close_matches(value.lower(), by_case, n=1, cutoff=0.6)
        if near:
            return f"did you mean {by_case[near[0]]!r}? {listed}"
    return f"{listed} {KEEP_KV}" if path[-1] == "kv_cache_quant_algo" else listed


def _missing_files(source: Source, paths: Sequence[KeyPath]) -> Iterator[Fault]:
    """Paths that are written down and lead nowhere; judged even when the schema finds other
    faults.
    """
    base = source.file.absolute().parent
    for path in paths:
        section = source.data.get(str(path[0]))
        written = section.get(path[1]) if isinstance(section, dict) else None
        if not isinstance(written, str):
            continue
        folder = path in FOLDERS
        try:
            found = _resolve(base, Path(written))
            there = found.exists()
        except (
            OSError,
            RuntimeError,
            ValueError,
        ) as error:  # too long, a loop of links, an unknown user, a NUL
            reason = (
                error.strerror
                if isinstance(error, OSError) and error.strerror
                else str(error).partition(": ")[0]
            )
            yield source.place(path).fault(
                path, f"cannot be followed: {reason}", "Write the path of a folder or file."
            )
            continue
        if not written.strip():
            yield source.place(path).fault(
                path, "is empty", "Write a path; a relative one starts at this file's folder."
            )
        elif not there:
            if folder and names_a_model(base, written):
                continue
            near = meant_folder(base, written) if folder else None
            hint = "" if near is None else f"did you mean {near!r}? "
            hint += f"A relative path starts at the folder of this file: {found}"
            yield source.place(path).fault(
                path, f"no such {'folder' if folder else 'file'}: {written}", hint
            )
        elif folder and not found.is_dir():
            yield source.place(path).fault(
                path, f"{written} is a file", "Name the folder that holds it."
            )
        elif not folder and not found.is_file():
            yield source.place(path).fault(
                path, f"{written} is not a file", "Name a JSON Lines file."
            )
        elif folder and not (found / "config.json").is_file():
            yield source.place(path).fault(
                path, f"{written} holds no config.json", _checkpoints_in(found)
            )
        elif folder and section.get("revision") is not None:  # type: ignore[union-attr]
            of = (path[0], "revision")
            yield source.place(of).fault(
                of, f"{written} is a folder, which has no revisions", "Remove this line."
            )


def _checkpoints_in(folder: Path) -> str:
    """The fix for a folder that is no checkpoint; often it holds one, or several."""
    inside = sorted(one.parent.name for one in folder.glob("*/config.json"))
    needed = (
        "Name a folder in Hugging Face form: config.json, safetensors and the tokenizer's files."
    )
    return needed if not inside else f"{needed} In this one lie: {', '.join(inside[:5])}."


def _resolve(base: Path, path: Path) -> Path:
    return (base / path.expanduser()).resolve()


def _resolved(config: DeploymentConfig, base: Path) -> DeploymentConfig:
    """The same config with absolute paths."""

    def at(section: Any, **paths: Path | None) -> Any:
        return section.model_copy(
            update={name: path and _resolve(base, path) for name, path in paths.items()}
        )

    def model(section: Any) -> Any:
        found = _resolve(base, section.checkpoint)
        return section if not found.exists() else at(section, checkpoint=section.checkpoint)

    sections = {
        "target": model(config.target),
        "draft": config.draft and model(config.draft),
        "calibration": (
            config.calibration
            and at(
                config.calibration,
                dataset=config.calibration.dataset,
                heldout=config.calibration.heldout,
            )
        ),
        "validation": at(config.validation, prompts=config.validation.prompts),
    }
    return config.model_copy(update=sections)


def _without_tag(path: KeyPath) -> tuple[KeyPath, str | None]:
    """pydantic's path through a union holds the tag or the branch, the file does not: (path as
    in the file, tag).
    """
    if path[-1] == "constrained-int":
        path = path[:-1]
    if len(path) > 1 and path[0] == "engine" and path[1] in _variants():
        return (path[0], *path[2:]), str(path[1])
    return path, None


def _variants() -> dict[str, type[BaseModel]]:
    """Tag -> member of the union that `engine` is."""
    members = _models(DeploymentConfig.model_fields["engine"].annotation)
    return {str(member.model_fields["kind"].default): member for member in members}


def _known_keys(variant: str | None = None) -> dict[KeyPath, tuple[str, ...]]:
    """Section -> its keys, for every section of the schema; of `engine`, those of one kind, or
    of all.
    """
    found: dict[KeyPath, tuple[str, ...]] = {}

    def visit(model: type[BaseModel], path: KeyPath) -> None:
        found[path] = tuple(dict.fromkeys((*found.get(path, ()), *model.model_fields)))
        for name, info in model.model_fields.items():
            models = _models(info.annotation)
            for inner in models:
                if len(models) == 1 or variant is None or inner is _variants()[variant]:
                    visit(inner, (*path, name))

    visit(DeploymentConfig, ())
    return found


def _literals(path: KeyPath) -> tuple[str, ...]:
    """The words that a key may have; `kind` of a union has those of all its members."""
    members = _members_at(path)
    words = [
        str(word)
        for member in members
        if typing.get_origin(member) is Literal
        for word in typing.get_args(member)
    ]
    return tuple(dict.fromkeys(words))


def _only_text(path: KeyPath) -> bool:
    """Whether nothing but text can stand at a key."""
    members = [member for member in _members_at(path) if member is not type(None)]
    return bool(members) and all(
        member in (str, Path) or typing.get_origin(member) is Literal for member in members
    )


def _members_at(path: KeyPath) -> list[Any]:
    """Members of the annotations of a key, of every model that has it; none for an unknown key."""
    models: tuple[type[BaseModel], ...] = (DeploymentConfig,)
    for part in path[:-1]:
        fields = [model.model_fields[str(part)] for model in models if part in model.model_fields]
        models = tuple(inner for field in fields for inner in _models(field.annotation))
    annotations = [
        model.model_fields[str(path[-1])].annotation
        for model in models
        if path[-1] in model.model_fields
    ]
    return [member for annotation in annotations for member in _members(annotation)]


def _models(annotation: Any) -> tuple[type[BaseModel], ...]:
    """The config models among the members of an annotation."""
    return tuple(
        member
        for member in _members(annotation)
        if isinstance(member, type) and issubclass(member, BaseModel)
    )


def _members(annotation: Any) -> tuple[Any, ...]:
    """X | None -> (X, NoneType); anything else -> itself; without what Annotated adds."""
    members = (
        typing.get_args(annotation)
        if typing.get_origin(annotation) in (typing.Union, types.UnionType)
        else (annotation,)
    )
    return tuple(
        typing.get_args(member)[0] if typing.get_origin(member) is typing.Annotated else member
        for member in members
    )


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (dict, list)):
        return "a section" if isinstance(value, dict) else "a list"
    return f"{value!r:.60}"


def _capital(text: str) -> str:
    """As a sentence begins, unless it begins with the name of a key."""
    return text if "_" in text.split(" ", 1)[0] else text[:1].upper() + text[1:]
