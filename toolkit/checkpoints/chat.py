"""A checkpoint's chat template: from messages to the text that the model was trained to read.

A conversation is a list of messages, `{"role": "user", "content": "..."}`. Every instruct
checkpoint brings a template that turns one into text, with the model's own marks between the turns.
The rendering is transformers' `apply_chat_template` (the tests compare the two), without
transformers.

Special tokens are not doubled. The text goes to servers that encode it like any prompt: with the
tokens that tokenizer.json puts before every prompt, which most templates write, too. So where the
text begins with what tokenizer.json adds, `render` leaves that out. (A template without BOS, beside
a tokenizer that adds one, gets one here; transformers, which encodes without special tokens, has
none then.)

Tools, documents and images are not supported: a content is text.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from toolkit.checkpoints.shape import read_json
from toolkit.checkpoints.tokenizer import tokenizer_text
from toolkit.errors import CheckpointError, RequestError

__all__ = [
    "BUILD_TIME",
    "ChatTemplate",
    "Message",
    "check_messages",
    "check_template",
    "has_chat_template",
]

Message = Mapping[str, Any]

# Some templates write today's date. What a build reads must not change from one day to the next.
BUILD_TIME = datetime(2025, 1, 1, 12)

MAX_TEMPLATE_BYTES = 2**20  # the longest in use have about 30,000
MEND = "put the chat_template.jinja of the model's publisher beside its tokenizer"


@dataclass(frozen=True, slots=True)
class ChatTemplate:
    """text: the Jinja2 template. file: where it was read. special_tokens: bos_token, eos_token and
    the like, which templates use by these names. added: what tokenizer.json puts before every
    prompt, as text; mostly the BOS token, or nothing.
    """

    text: str
    file: Path
    special_tokens: Mapping[str, str]
    added: str

    @classmethod
    def load(cls, checkpoint_dir: Path, *, file: Path | None = None) -> ChatTemplate | None:
        """The template of a checkpoint, or None if it has none. file: one that replaces it.

        Raises CheckpointError for a file that cannot be read, and for a template that is too long
        or has a fault of syntax.
        """
        found = _find(checkpoint_dir) if file is None else (_checked(_read(file), file), file)
        if found is None:
            return None
        text, file = found
        template = cls(
            text=text,
            file=file,
            special_tokens=_special_tokens(checkpoint_dir),
            added=_added_before(tokenizer_text(checkpoint_dir)),
        )
        template._compiled()
        return template

    @property
    def digest(self) -> str:
        """sha256 of all that decides a text; for keys of stages."""
        parts = [self.text, sorted(self.special_tokens.items()), self.added]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()

    def render(
        self, messages: object, *, add_generation_prompt: bool = True, now: datetime | None = None
    ) -> str:
        """The messages as text, to be encoded with the tokenizer's own special tokens.

        add_generation_prompt: end with the mark after which the assistant writes. Leave it out for
        a conversation that is complete. now: for templates that write a date; default: the clock.

        Raises RequestError for messages with a fault or that the template refuses, and
        CheckpointError if the template fails or exceeds a bound of toolkit.checkpoints.sandbox.
        """
        return self.render_whole(
            messages, add_generation_prompt=add_generation_prompt, now=now
        ).removeprefix(self.added)

    def render_whole(
        self, messages: object, *, add_generation_prompt: bool = True, now: datetime | None = None
    ) -> str:
        """Like render, with all special tokens written out: to be encoded without adding any."""
        from toolkit.checkpoints import sandbox

        variables = {
            **self.special_tokens,
            "messages": check_messages(messages),
            "add_generation_prompt": add_generation_prompt,
            "tools": None,
            "documents": None,
        }
        try:
            return sandbox.render(self._compiled(), variables, now or datetime.now())
        except sandbox.Refusal as exc:
            raise RequestError(
                f"the model's chat template refuses these messages: {exc}",
                hint=f"the template is {self.file}",
            ) from exc
        except Exception as exc:  # a template is a program, and can raise what it likes
            raise self._fault(exc) from exc

    def _compiled(self) -> Any:
        from toolkit.checkpoints import sandbox

        try:
            return sandbox.template_of(self.text)
        except Exception as exc:  # jinja2's own, or Python's (a recursion that is too deep)
            raise self._fault(exc) from exc

    def _fault(self, error: Exception) -> CheckpointError:
        from toolkit.checkpoints import sandbox

        line = sandbox.fault_line(error)
        place = "" if line is None else f", in its line {line}"
        return CheckpointError(
            f"the chat template fails{place}: {error or type(error).__name__}",
            where=self.file,
            hint=MEND,
        )


def has_chat_template(checkpoint_dir: Path) -> bool:
    """Whether a checkpoint brings a chat template. Its tokenizer is not read. Raises
    CheckpointError for a file that cannot be read.
    """
    return _find(checkpoint_dir) is not None


def check_template(file: Path) -> None:
    """Raise CheckpointError for a template that cannot be read, is too long, or has a fault of
    syntax.
    """
    ChatTemplate(_checked(_read(file), file), file, {}, "")._compiled()


def check_messages(messages: object) -> list[dict[str, Any]]:
    """The messages, with every content as one string: text in parts is joined by newlines.

    messages: a list of {"role": str, "content": str or a list of {"type": "text", "text": str}}.
    Other fields of a message are kept, since some templates read them. Raises RequestError, which
    names index and field.
    """
    if not isinstance(messages, list):
        raise _wrong("messages", messages, "a list of messages")
    if not messages:
        raise RequestError("messages: is empty", hint='[{"role": "user", "content": "..."}]')
    return [_check_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _check_message(message: object, name: str) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise _wrong(name, message, 'an object like {"role": "user", "content": "..."}')
    for field in ("role", "content"):
        if field not in message:
            raise RequestError(f"{name}.{field}: is missing")
    if not isinstance(message["role"], str) or not message["role"]:
        raise _wrong(f"{name}.role", message["role"], "a name like user, assistant or system")
    return {**message, "content": _content(message["content"], f"{name}.content")}


def _content(content: object, name: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise _wrong(name, content, "a string, or a list of text parts")
    texts = []
    for number, part in enumerate(content):
        place = f"{name}[{number}]"
        if not isinstance(part, dict) or "type" not in part:
            raise _wrong(place, part, 'a part like {"type": "text", "text": "..."}')
        if part["type"] != "text":
            raise RequestError(
                f"{place}.type: is {part['type']!r}, and only text is supported",
                hint='{"type": "text", "text": "..."}',
            )
        if not isinstance(part.get("text"), str):
            raise _wrong(f"{place}.text", part.get("text"), "a string")
        texts.append(part["text"])
    return "\n".join(texts)


def _wrong(name: str, value: object, wanted: str) -> RequestError:
    kinds = {dict: "an object", list: "a list", str: "a string", bool: "a boolean"}
    kind = kinds.get(type(value), "null" if value is None else "a number")
    shown = f"the string {value!r}" if isinstance(value, str) else kind
    return RequestError(f"{name}: has to be {wanted}, and is {shown}")


def _find(directory: Path) -> tuple[str, Path] | None:
    """(text, file) of the template, from the first of the three places that has one."""
    file = directory / "chat_template.jinja"
    if file.exists() and (text := _read(file)):
        return _checked(text, file), file
    for name in ("chat_template.json", "tokenizer_config.json"):
        file = directory / name
        value = _read_object(file).get("chat_template")
        if isinstance(value, list):
            value = _named(value, file)
        if value:
            return _checked(value, file), file
    return None


def _named(templates: list[Any], file: Path) -> object:
    """`default` among templates with names, which is the one for plain conversations."""
    try:
        by_name = {entry["name"]: entry["template"] for entry in templates}
    except (TypeError, KeyError) as exc:
        raise CheckpointError(
            "an entry of chat_template has no name or no template", where=file, hint=MEND
        ) from exc
    if "default" not in by_name:
        raise CheckpointError(
            f"no chat template is named default (there are {', '.join(map(str, by_name))})",
            where=file,
            hint="name the one for plain conversations default, or write it to chat_template.jinja",
        )
    return by_name["default"]


def _checked(value: object, file: Path) -> str:
    if not isinstance(value, str):
        raise CheckpointError("the chat template is not a string", where=file, hint=MEND)
    if (size := len(value.encode())) > MAX_TEMPLATE_BYTES:
        raise CheckpointError(
            f"the chat template has {size:,} bytes, and at most {MAX_TEMPLATE_BYTES:,} are read",
            where=file,
            hint=MEND,
        )
    return value


def _special_tokens(directory: Path) -> dict[str, str]:
    """Name -> text of every special token; a value is a string or the fields of an AddedToken."""
    values = {
        **_read_object(directory / "special_tokens_map.json"),
        **_read_object(directory / "tokenizer_config.json"),
    }
    texts = {
        name: value.get("content") if isinstance(value, dict) else value
        for name, value in values.items()
        if name.endswith("_token")
    }
    return {name: text for name, text in texts.items() if isinstance(text, str)}


def _added_before(tokenizer: str) -> str:
    """The text of the special tokens that a tokenizer.json puts before every prompt."""
    return _added_by(json.loads(tokenizer).get("post_processor") or {})


def _added_by(processor: Mapping[str, Any]) -> str:
    """Source of the forms: `tokenizers`, processors (its JSON of each class)."""
    kind = processor.get("type")
    if kind == "Sequence":
        return "".join(_added_by(part) for part in reversed(processor["processors"]))
    if kind in ("BertProcessing", "RobertaProcessing"):
        return str(processor["cls"][0])
    text = ""
    if kind == "TemplateProcessing":
        for piece in processor["single"]:
            if "SpecialToken" not in piece:
                break
            text += "".join(processor["special_tokens"][piece["SpecialToken"]["id"]]["tokens"])
    return text


def _read_object(file: Path) -> dict[str, Any]:
    """The JSON object in a file; empty if there is no such file."""
    return read_json(file) if file.exists() else {}


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as exc:
        raise CheckpointError(f"cannot be read ({exc})", where=file) from exc
