"""Load a YAML file into a DeploymentConfig with resolved paths, or raise a ConfigError with every
fault, its place and a hint.

Three checks find faults, and none stops at the first: the text (`source`), the schema (pydantic),
and the file system, which must have the files that the paths name. This module also rewords
pydantic's errors in the terms of the file.
"""

from __future__ import annotations

import difflib
import os
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ValidationError

from toolkit.config.folders import is_hub_id, similar_folder
from toolkit.config.schema import DeploymentConfig
from toolkit.config.source import KeyPath, Source, dotted, read_source
from toolkit.errors import ConfigError, Fault

__all__ = ["load_config", "load_data", "located", "moved"]

FOLDERS: tuple[KeyPath, ...] = (("target", "checkpoint"), ("draft", "checkpoint"))
TEXTS: tuple[KeyPath, ...] = (
    ("calibration", "dataset"),
    ("calibration", "heldout"),
    ("validation", "prompts"),
)
TEMPLATES: tuple[KeyPath, ...] = (("gateway", "chat_template"),)

INT8_HINT = (
    "INT8 is the name of two algorithms: W8A8_SQ_PER_CHANNEL (weights and activations, SmoothQuant)"
    " and W8A16 (weights only)."
)
QUANT_ALGO_HINTS = {
    "INT8": INT8_HINT,
    "INT8_SQ": INT8_HINT,
    "W8A8": INT8_HINT,
    "SMOOTHQUANT": INT8_HINT,
    "NONE": "did you mean 'NO_QUANT'?",
    "NULL": "did you mean 'NO_QUANT'?",
}
NOUNS = {
    "quant_algo": "a known quantization algorithm",
    "kv_cache_quant_algo": "a known KV-cache algorithm",
    "kind": "a known kind",
    "acceptance": "an acceptance rule",
    "device": "a device",
    "mode": "a mode",
    "dtype": "a dtype",
    "layout": "a layout",
}
KV_HINT = "To keep the cache in the model's dtype, remove this line."
KEY_MARK = "[key]"  # the end of pydantic's path to a key of a table that is wrong itself
# The end of pydantic's path to a number that could also be a word: the branch of the union.
NUMBER_BRANCHES = ("int", "float", "constrained-int", "constrained-float")
# pydantic's error type -> (noun, hint)
TYPES = {
    "int_type": ("a whole number", "Write digits without quotes, for example 4."),
    "int_from_float": ("a whole number", "Write the number without a fraction."),
    "float_type": ("a number", "Write a number without quotes, for example 1.5."),
    "finite_number": ("a finite number", "Write a number, or remove the line."),
    "bool_type": ("true or false", "Write true or false, without quotes."),
    "string_type": ("text", "Put it in quotes."),
    "path_type": ("a path", "Put it in quotes."),
    "tuple_type": ("a list", "Write it in brackets, for example [1, 5, 25]."),
}


def load_config(
    file: Path,
    overrides: Sequence[str] = (),
    *,
    texts: bool = True,
    data: Mapping[str, Any] | None = None,
) -> DeploymentConfig:
    """Read, check and resolve a deployment file. `overrides` are texts `a.b=c` that replace values
    of the file.

    Every path in the result is absolute; a relative path in the file starts at the file's folder.
    texts False: calibration and prompt files need not exist. data: what takes the place of the
    file's content, as it would stand in that file. Raises ConfigError with all faults, in the order
    of their lines.
    """
    source = _source_of(file, overrides)
    if data is not None:
        source.data = dict(data)
    faults = list(source.faults)
    config: DeploymentConfig | None = None
    try:
        config = DeploymentConfig.model_validate(source.data)
    except ValidationError as error:
        faulty_paths = {fault.path for fault in faults}
        for detail in error.errors():
            # This is the word that may replace a number; the fault about the number says it all.
            if str(detail["loc"][-1]).startswith("literal["):
                continue
            fault = _fault(
                source,
                tuple(detail["loc"]),
                detail["type"],
                detail.get("ctx", {}),
                detail["input"],
                detail["msg"],
            )
            if fault.path not in faulty_paths:  # otherwise a fault of the text explains it already
                faults.append(fault)
    paths = FOLDERS + TEMPLATES + (TEXTS if texts else ())
    faults.extend(_missing_files(source, paths))
    if faults or config is None:
        raise ConfigError(file, sorted(faults, key=_position))
    return _resolved(config, file.absolute().parent)


def load_data(file: Path, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """The content of a YAML file as it is written, with the overrides. Raises ConfigError for a
    file that cannot be read as a mapping.
    """
    return _source_of(file, overrides).data


def _source_of(file: Path, overrides: Sequence[str]) -> Source:
    source = read_source(file, overrides)
    _interpret_overrides(source)
    return source


def _position(fault: Fault) -> tuple[bool, int, int]:
    """The order of faults: by line and column, then those of arguments."""
    return fault.origin is not None, fault.line or 0, fault.column or 0


def _interpret_overrides(source: Source) -> None:
    """Read a number of `--set` as text if its key takes only text, since the shell removes quotes.
    If `--set` chooses a kind of speculation without a draft model, drop the file's `draft` section.
    """
    for path, text in source.overridden.items():
        section = _section(source.data, path[:-1])
        if isinstance(section.get(path[-1]), (int, float)) and _takes_only_text(path):
            section[path[-1]] = text
    speculation = source.data.get("speculation")
    kind = speculation.get("kind") if isinstance(speculation, dict) else None
    sets_kind = {("speculation",), ("speculation", "kind")} & source.overridden.keys()
    sets_draft = any(path[0] == "draft" for path in source.overridden)
    if sets_kind and kind in ("none", "ngram", "mtp") and not sets_draft:
        source.data.pop("draft", None)


def _section(data: Any, path: KeyPath) -> Any:
    for part in path:
        data = data[part]
    return data


def located(file: Path, overrides: Sequence[str], faults: Sequence[Fault]) -> list[Fault]:
    """Faults that were found after loading, with the places of their keys in the file, sorted by
    place.
    """
    source = read_source(file, overrides)
    paths = [tuple(fault.path.split(".")) for fault in faults]
    placed = [
        source.place(path).fault(path, fault.message, fault.hint)
        for path, fault in zip(paths, faults, strict=True)
    ]
    return sorted(placed, key=_position)


def _fault(
    source: Source, path: KeyPath, kind: str, context: dict[str, Any], value: Any, text: str
) -> Fault:
    """One of pydantic's errors as a fault in our words, at its place in the file."""
    is_of_key = path[-1] == KEY_MARK
    path, variant = _without_tag(path)
    if is_of_key and kind == "literal_error":
        return source.place(path, of_key=True).fault(path, *_unknown_name(path))
    if kind in ("union_tag_invalid", "union_tag_not_found"):
        path, kind, value = (*path, "kind"), "literal_error", value["kind"]
    if kind == "extra_forbidden":
        return source.place(path, of_key=True).fault(path, *_unknown_key(path, variant))
    if kind == "missing":
        parent = f"section `{dotted(path[:-1])}`" if path[:-1] else "file"
        hint = f"Add `{path[-1]}:` to the {parent}."
        return source.place(path[:-1], of_key=True).fault(path, "is missing", hint)
    wrong = _wrong_value(path, kind, context, value, text, variant)
    return source.place(path, of_key=is_of_key).fault(path, *wrong)


def _unknown_name(path: KeyPath) -> tuple[str, str]:
    """The fault of a key in a table whose keys are words of a closed set."""
    known = [str(word) for word in _key_words(path[:-1])]
    matches = difflib.get_close_matches(str(path[-1]), known, n=1, cutoff=0.6)
    meant = f"did you mean {matches[0]!r}? " if matches else ""
    return "unknown key", f"{meant}known in `{dotted(path[:-1])}`: {', '.join(known)}"


def _unknown_key(path: KeyPath, variant: str | None) -> tuple[str, str]:
    name, known = str(path[-1]), _known_keys(variant).get(path[:-1], ())
    kinds = [
        kind
        for kind in _variants()
        if variant is not None and name in _known_keys(kind).get(path[:-1], ())
    ]
    if kinds:
        return (
            f"is not a key of kind {variant}",
            f"It belongs to {' and '.join(kinds)}; set {path[0]}.kind, or remove this line.",
        )
    sections = [section for section, keys in _known_keys().items() if name in keys]
    below = [section for section in sections if section[: len(path) - 1] == path[:-1]]
    matches = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    if matches and not (path[:-1] and below):
        return "unknown key", f"did you mean {matches[0]!r}?"
    elsewhere = [dotted((*section, name)) for section in below or sections]
    if elsewhere:
        return "unknown key here", f"did you mean {' or '.join(elsewhere[:3])}?"
    section = f"in `{dotted(path[:-1])}`" if path[:-1] else "at the top level"
    return "unknown key", f"known {section}: {', '.join(known)}"


def _wrong_value(
    path: KeyPath,
    kind: str,
    context: dict[str, Any],
    value: Any,
    text: str,
    variant: str | None = None,
) -> tuple[str, str | None]:
    shown = _shown(value)
    if kind == "value_error":
        message, _, hint = text.removeprefix("Value error, ").partition("; ")
        return message, f"{_capital(hint)}." if hint else None
    if kind == "literal_error":
        noun = NOUNS.get(str(path[-1]), "allowed here")
        return f"{shown} is not {noun}", _choices(path, value, variant)
    if kind == "model_type":
        keys = ", ".join(_known_keys().get(path, ())[:4])
        message = "is empty" if value is None else f"{shown} is not a section"
        return message, f"Write keys below it: {keys}, ..."
    if kind in ("greater_than", "greater_than_equal", "less_than", "less_than_equal"):
        (bound,) = (context[name] for name in ("gt", "ge", "lt", "le") if name in context)
        relation = {"gt": "above", "ge": "at least", "lt": "below", "le": "at most"}[
            next(iter(set(context) & {"gt", "ge", "lt", "le"}))
        ]
        hint = f"It must be {relation} {bound:g}."
        return f"{shown} is out of range", hint + _or_a_word(path, variant)
    if kind == "dict_type":
        pair = f"{next(iter(_key_words(path)), 1)}: NUMBER"
        message = "is empty" if value is None else f"{shown} is not a table"
        return message, f"Write pairs in braces: {{{pair}}}."
    if kind == "invalid_key":
        return "is not a name", "A key must be a word."
    if kind == "string_pattern_mismatch":
        if path[-1] == "container_image":
            return (
                f"{shown} is not the name of an image",
                "Write REGISTRY/NAME:TAG, without spaces.",
            )
        return (
            f"{shown} cannot be the name of a folder",
            "Use letters, digits, '.', '_' and '-', and begin with a letter or digit.",
        )
    if kind == "string_too_long":
        return (
            f"is {len(str(value))} characters long",
            f"At most {context['max_length']} are allowed.",
        )
    if kind in TYPES:
        noun, hint = TYPES[kind]
        if value is None and noun in ("text", "a path"):
            hint = "Write a value, or remove the line."
        hint += _or_a_word(path, variant)
        return ("is empty" if value is None else f"{shown} is not {noun}"), hint
    return f"{shown}: {text[:1].lower()}{text[1:]}", None


def _or_a_word(path: KeyPath, variant: str | None) -> str:
    """The end of a hint about a number: the words that the key takes as well."""
    words = _literals(path, variant)
    return f" Or write {' or '.join(words)}." if words else ""


def _choices(path: KeyPath, value: Any, variant: str | None) -> str:
    allowed = _literals(path, variant)
    listed = f"known: {', '.join(allowed)}."
    # YAML reads a version such as 1.2 as a number.
    if isinstance(value, (int, float)) and allowed[0][:1].isdigit():
        return f"Put it in quotes; {listed}"
    if isinstance(value, str):
        if path[-1] == "quant_algo" and value.upper() in QUANT_ALGO_HINTS:
            return f"{QUANT_ALGO_HINTS[value.upper()]}\n  {listed}"
        by_lower_case = {name.lower(): name for name in allowed}
        matches = difflib.get_close_matches(value.lower(), by_lower_case, n=1, cutoff=0.6)
        if matches:
            return f"did you mean {by_lower_case[matches[0]]!r}? {listed}"
    return f"{listed} {KV_HINT}" if path[-1] == "kv_cache_quant_algo" else listed


def moved(data: Mapping[str, Any], old: Path, new: Path) -> dict[str, Any]:
    """The content of a file for another folder: paths that are relative to the folder `old` become
    relative to `new`. Hub ids stay as they are.
    """
    result = {name: dict(part) if isinstance(part, dict) else part for name, part in data.items()}
    for section, key in FOLDERS + TEXTS + TEMPLATES:
        written = (result.get(str(section)) or {}).get(key)
        if not isinstance(written, str) or Path(written).expanduser().is_absolute():
            continue
        path = _resolve(old, Path(written))
        if (section, key) not in FOLDERS or path.exists():
            result[str(section)][key] = os.path.relpath(path, new.resolve())
    return result


def _missing_files(source: Source, paths: Sequence[KeyPath]) -> Iterator[Fault]:
    """The faults of paths in the file that lead to nothing usable. They are found even if the
    schema finds other faults.
    """
    base = source.file.absolute().parent
    for path in paths:
        section = source.data.get(str(path[0]))
        written = section.get(path[1]) if isinstance(section, dict) else None
        if not isinstance(written, str):
            continue
        is_folder = path in FOLDERS
        try:
            resolved = _resolve(base, Path(written))
            exists = resolved.exists()
        except (OSError, RuntimeError, ValueError) as error:
            # The path is too long or has a NUL, links form a loop, or `~user` is unknown.
            reason = str(error).partition(": ")[0]
            if isinstance(error, OSError) and error.strerror:
                reason = error.strerror
            yield source.place(path).fault(
                path, f"cannot be followed: {reason}", "Write the path of a folder or file."
            )
            continue
        if not written.strip():
            yield source.place(path).fault(
                path, "is empty", "Write a path; a relative one starts at this file's folder."
            )
        elif not exists:
            if is_folder and is_hub_id(base, written):
                continue
            similar = similar_folder(base, written) if is_folder else None
            hint = "" if similar is None else f"did you mean {similar!r}? "
            if not Path(written).expanduser().is_absolute():
                hint += f"A relative path starts at the folder of this file: {resolved}"
            yield source.place(path).fault(
                path,
                f"no such {'folder' if is_folder else 'file'}: {written}",
                hint or "Check the path.",
            )
        elif is_folder and not resolved.is_dir():
            yield source.place(path).fault(
                path, f"{written} is a file", "Name the folder that holds it."
            )
        elif not is_folder and not resolved.is_file():
            hint = "Name a JSON Lines file." if path in TEXTS else "Name a Jinja file."
            yield source.place(path).fault(path, f"{written} is not a file", hint)
        elif is_folder and not (resolved / "config.json").is_file():
            yield source.place(path).fault(
                path, f"{written} holds no config.json", _checkpoint_hint(resolved)
            )
        elif is_folder and section.get("revision") is not None:  # type: ignore[union-attr]
            revision = (path[0], "revision")
            yield source.place(revision).fault(
                revision,
                f"{written} is a folder, and a folder has no revisions",
                "Remove this line.",
            )


def _checkpoint_hint(folder: Path) -> str:
    """The hint for a folder that is not a checkpoint. Often checkpoints are inside it."""
    checkpoints = sorted(file.parent.name for file in folder.glob("*/config.json"))
    hint = (
        "Name a folder in Hugging Face format: config.json, safetensors and the tokenizer's files."
    )
    return f"{hint} This one contains: {', '.join(checkpoints[:5])}." if checkpoints else hint


def _resolve(base: Path, path: Path) -> Path:
    return (base / path.expanduser()).resolve()


def _resolved(config: DeploymentConfig, base: Path) -> DeploymentConfig:
    """The config with absolute paths; hub ids stay as they are.

    The Python that has vLLM keeps its links: that of a virtual environment is a link to another
    Python, and finds its packages by the link's own place.
    """

    def at(section: Any, **paths: Path | None) -> Any:
        return section.model_copy(
            update={name: path and _resolve(base, path) for name, path in paths.items()}
        )

    def model(section: Any) -> Any:
        is_folder = _resolve(base, section.checkpoint).exists()
        return at(section, checkpoint=section.checkpoint) if is_folder else section

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
        "gateway": at(config.gateway, chat_template=config.gateway.chat_template),
        "validation": at(config.validation, prompts=config.validation.prompts),
    }
    vllm = config.vllm_engine
    if vllm is not None and vllm.python is not None:
        python = Path(os.path.abspath(base / vllm.python.expanduser()))  # noqa: PTH100 - see above
        sections["engine"] = vllm.model_copy(update={"python": python})
    return config.model_copy(update=sections)


def _without_tag(path: KeyPath) -> tuple[KeyPath, str | None]:
    """Split pydantic's path into the path in the file and the tag. pydantic's path through a union
    has the tag or the branch in it, and that to a key has a mark; the file has not.
    """
    if path[-1] == KEY_MARK or path[-1] in NUMBER_BRANCHES:
        path = path[:-1]
    if len(path) > 1 and path[0] == "engine" and path[1] in _variants():
        return (path[0], *path[2:]), str(path[1])
    return path, None


def _variants() -> dict[str, type[BaseModel]]:
    """Tag -> member of the union of `engine`."""
    members = _models(DeploymentConfig.model_fields["engine"].annotation)
    return {str(member.model_fields["kind"].default): member for member in members}


def _known_keys(variant: str | None = None) -> dict[KeyPath, tuple[str, ...]]:
    """Section -> its keys, for every section of the schema. `engine` has the keys of the kind
    `variant`, or of all kinds.
    """
    keys: dict[KeyPath, tuple[str, ...]] = {}

    def visit(model: type[BaseModel], path: KeyPath) -> None:
        keys[path] = tuple(dict.fromkeys((*keys.get(path, ()), *model.model_fields)))
        for name, info in model.model_fields.items():
            models = _models(info.annotation)
            for inner in models:
                if len(models) == 1 or variant is None or inner is _variants()[variant]:
                    visit(inner, (*path, name))

    visit(DeploymentConfig, ())
    return keys


def _literals(path: KeyPath, variant: str | None) -> tuple[str, ...]:
    """The words that a key accepts, in the member of a union with this `kind`, or in any."""
    members = _members_at(path, variant)
    words = [
        str(word)
        for member in members
        if typing.get_origin(member) is Literal
        for word in typing.get_args(member)
    ]
    return tuple(dict.fromkeys(words))


def _key_words(path: KeyPath) -> tuple[Any, ...]:
    """The words that may be keys of a table; none if its keys are numbers."""
    return tuple(
        word
        for member in _members_at(path)
        if typing.get_origin(member) is dict
        for word in typing.get_args(typing.get_args(member)[0])
        if typing.get_origin(typing.get_args(member)[0]) is Literal
    )


def _takes_only_text(path: KeyPath) -> bool:
    """Whether a key accepts nothing but text."""
    members = [member for member in _members_at(path) if member is not type(None)]
    return bool(members) and all(
        member in (str, Path) or typing.get_origin(member) is Literal for member in members
    )


def _members_at(path: KeyPath, variant: str | None = None) -> list[Any]:
    """The members of the annotations of a key, from every model that has it, or from the one with
    the `kind` variant. An unknown key has none.
    """
    models: tuple[type[BaseModel], ...] = (DeploymentConfig,)
    for part in path[:-1]:
        fields = [model.model_fields[str(part)] for model in models if part in model.model_fields]
        models = tuple(inner for field in fields for inner in _models(field.annotation))
    annotations = [
        model.model_fields[str(path[-1])].annotation
        for model in models
        if path[-1] in model.model_fields and _has_kind(model, variant)
    ]
    return [member for annotation in annotations for member in _members(annotation)]


def _has_kind(model: type[BaseModel], variant: str | None) -> bool:
    kind = model.model_fields.get("kind")
    return variant is None or kind is None or variant in typing.get_args(kind.annotation)


def _models(annotation: Any) -> tuple[type[BaseModel], ...]:
    """The config models among the members of an annotation."""
    return tuple(
        member
        for member in _members(annotation)
        if isinstance(member, type) and issubclass(member, BaseModel)
    )


def _members(annotation: Any) -> tuple[Any, ...]:
    """The members of a union, X | None -> (X, NoneType), or the annotation itself. What Annotated
    adds is removed.
    """
    is_union = typing.get_origin(annotation) in (typing.Union, types.UnionType)
    members = typing.get_args(annotation) if is_union else (annotation,)
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
    """Begin with a capital letter, unless the text begins with the name of a key."""
    return text if "_" in text.split(" ", 1)[0] else text[:1].upper() + text[1:]
