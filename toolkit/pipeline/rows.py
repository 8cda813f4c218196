"""Read the rows of a file of texts: raw text or conversations, with their domains.

One rule for calibration text, held-out text and prompts, so that every command reads a file alike.
A file is JSON Lines, or one JSON list of the same rows. A row is one of

    {"prompt": "..."} or {"text": "..."}         raw text
    {"messages": [{"role": ..., "content": ...}]}
    {"conversations": [{"from": "human" or "gpt" or "system", "value": ...}]}   as ShareGPT
    {"turns": ["...", "..."], "category": ...}   as MT-Bench, Spec-Bench and SPEED-Bench

The published forms are read as they are published. Of `turns` only the first is used, because the
next one answers a reply that the model would have to give first. A prompt made of a ShareGPT row is
its first turn, too, as other tools send it. Nothing is fetched.

Sources of the forms: FastChat, llm_judge/data/mt_bench/question.jsonl; Spec-Bench,
data/spec_bench/question.jsonl; the dataset card of nvidia/SPEED-Bench; ShareGPT_V3 as read by
`vllm bench serve`.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolkit.checkpoints.chat import Message, check_messages
from toolkit.errors import RequestError, UsageError

__all__ = ["Row", "holds_conversations", "is_unicode", "read_rows"]

NO_DOMAIN = "all"
CONVERSATION_KEYS = ("messages", "conversations", "turns")
SPEAKERS = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "assistant": "assistant",
    "system": "system",
}
# Rows of SPEED-Bench whose text may not be published with it have this instead.
PLACEHOLDER = "FULL BENCHMARK DATA SHOULD BE FETCHED"
PARQUET = b"PAR1"


@dataclass(frozen=True, slots=True)
class Row:
    """One text. number, unit: its place in the file. text: raw text; of a conversation: what stands
    for it where there is no chat template, or None. messages: the whole conversation; none for raw
    text. asked: how many of the messages a prompt has; the last of them is the user's. completion:
    what the target wrote after the prompt, or "".
    """

    file: Path
    number: int
    unit: str
    text: str | None
    messages: tuple[Message, ...] = ()
    asked: int = 0
    domain: str = NO_DOMAIN
    completion: str = ""

    def fault(self, what: str, hint: str | None = None) -> UsageError:
        """An error about this row: `what` follows its name, as in "has no text"."""
        return _fault(self.file, self.number, self.unit, what, hint)


def read_rows(file: Path, *keys: str, limit: int | None = None) -> list[Row]:
    """The rows of a file, raw text from the first of `keys` that a row has. Blank lines and a byte
    order mark are skipped, and so are rows of ShareGPT in which nobody asks anything.

    limit: stop after this many rows; later ones are not checked. Raises UsageError if the file is
    missing or has no row, and, with the number of the line, if a line is not UTF-8, is not JSON,
    has none of these forms, or has an empty text.
    """
    rows = itertools.islice(_rows(file, keys), limit)
    if result := list(rows):
        return result
    raise UsageError("the file is empty", where=file, hint=_hint(keys))


def holds_conversations(file: Path) -> bool:
    """Whether a row may be a conversation, from a quick look: no conversation is overlooked. False
    if the file cannot be read.
    """
    try:
        content = file.read_bytes()
    except OSError:
        return False
    return any(f'"{key}"'.encode() in content for key in CONVERSATION_KEYS)


def _rows(file: Path, keys: Sequence[str]) -> Iterator[Row]:
    for number, unit, value in _values(file, keys):
        row = _row(Row(file, number, unit, None), value, keys)
        if row is not None:
            yield row


def _row(place: Row, value: Any, keys: Sequence[str]) -> Row | None:
    """The value as a row; None if it is one without a question."""
    fields = value if isinstance(value, dict) else {}
    text = next((fields[key] for key in keys if key in fields), None)
    conversation = _conversation(place, fields)
    if conversation is None and not isinstance(text, str):
        names = " or ".join(f"`{key}`" for key in keys)
        what = f"has no {names} string (it is {_described(value)})"
        raise place.fault(what, _hint(keys))
    text = text if isinstance(text, str) else None
    messages, asked, first = conversation or ((), 0, None)
    if conversation is not None and not messages:
        return None
    spoken = [message["content"] for message in messages]
    if not (spoken[asked - 1] if spoken else text or "").strip():
        raise place.fault("has an empty text", "remove the line, or give it text")
    if not all(is_unicode(part) for part in (*spoken, text or "")):
        raise _half_character(place, "has")
    domain, completion = _label(place, fields, "domain", "category"), fields.get("completion")
    return Row(
        file=place.file,
        number=place.number,
        unit=place.unit,
        text=first if text is None else text,
        messages=messages,
        asked=asked,
        domain=domain,
        completion=completion if isinstance(completion, str) else "",
    )


_Spoken = tuple[tuple[Message, ...], int, str | None]
"""Messages, how many of them a prompt has, and raw text that may stand for the prompt."""


def _conversation(place: Row, fields: dict[str, Any]) -> _Spoken | None:
    key = next((key for key in CONVERSATION_KEYS if isinstance(fields.get(key), list)), None)
    if key == "messages":
        return _of_messages(place, fields[key])
    if key == "conversations":
        return _of_sharegpt(fields[key])
    return None if key is None else _of_turns(place, fields[key])


def _of_messages(place: Row, values: list[Any]) -> _Spoken:
    try:
        messages = check_messages(values)
    except RequestError as error:
        raise place.fault(f"cannot be used: {error.what}", error.hint) from error
    asked = [i for i, message in enumerate(messages, start=1) if message["role"] == "user"]
    if not asked:
        raise place.fault(
            "has no message with the role user",
            '{"messages": [{"role": "user", "content": "..."}]}',
        )
    return tuple(messages), asked[-1], None


def _of_sharegpt(values: list[Any]) -> _Spoken:
    """The turns from the first question on, as long as question and answer alternate; templates
    refuse what does not. A system message may come first.
    """
    messages: list[Message] = []
    for value in values:
        turn = value if isinstance(value, dict) else {}
        role = SPEAKERS.get(str(turn.get("from", turn.get("role"))))
        said = turn.get("value", turn.get("content"))
        last = messages[-1]["role"] if messages else None
        wanted = {None: ("system", "user"), "user": ("assistant",)}.get(last, ("user",))
        if role in wanted and isinstance(said, str):
            messages.append({"role": role, "content": said})
        elif last in ("user", "assistant"):
            break
    asked = next((i for i, m in enumerate(messages, start=1) if m["role"] == "user"), 0)
    if not asked or not messages[asked - 1]["content"].strip():
        return (), 0, None
    return tuple(messages), asked, messages[asked - 1]["content"]


def _of_turns(place: Row, values: list[Any]) -> _Spoken:
    if not values or not isinstance(values[0], str):
        raise place.fault("has no string in `turns`", '{"turns": ["..."], "category": "..."}')
    if values[0].startswith(PLACEHOLDER):
        raise place.fault(
            "has no text: this row of SPEED-Bench is published without it",
            "fetch the texts with NVIDIA's prepare_data.py (Model-Optimizer, examples/"
            "specdec_bench), or remove such rows",
        )
    return ({"role": "user", "content": values[0]},), 1, values[0]


def _label(place: Row, fields: dict[str, Any], *keys: str) -> str:
    for key in keys:
        label = fields.get(key)
        if isinstance(label, str):
            if not is_unicode(label):
                raise _half_character(place, f"has in `{key}`")
            return label
    return NO_DOMAIN


def _values(file: Path, keys: Sequence[str]) -> Iterator[tuple[int, str, Any]]:
    """(number, unit, value) of each entry of a JSON list or each line of JSON Lines."""
    try:
        content = file.read_bytes()
    except OSError as error:
        raise UsageError(
            f"cannot be read: {error.strerror}",
            where=file,
            hint="check the path and its permissions",
        ) from error
    if content.startswith(PARQUET):
        raise UsageError(
            "is a Parquet file, and JSON is read here",
            where=file,
            hint="with pandas: read_parquet(FILE).to_json(OUT, orient='records', lines=True)",
        )
    content = content.removeprefix(b"\xef\xbb\xbf")
    values = _entries if content.lstrip()[:1] == b"[" else _lines
    return values(file, content, keys)


def _lines(file: Path, content: bytes, keys: Sequence[str]) -> Iterator[tuple[int, str, Any]]:
    """Only a newline ends a line, since a string may contain U+2028."""
    hint = _hint(keys)
    for number, line in enumerate(content.split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            yield number, "line", json.loads(line.decode("utf-8"))
        except UnicodeDecodeError as error:
            what = f"is not UTF-8 (byte {error.start + 1})"
            raise _fault(file, number, "line", what, hint) from error
        except json.JSONDecodeError as error:
            what = f"is not valid JSON ({error.msg}, column {error.colno})"
            raise _fault(file, number, "line", what, hint) from error
        except RecursionError as error:
            raise _fault(file, number, "line", "is nested too deeply", hint) from error


def _entries(file: Path, content: bytes, keys: Sequence[str]) -> Iterator[tuple[int, str, Any]]:
    """One entry is parsed at a time: the whole list may have a gigabyte, of which few are used."""
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(f"is not UTF-8 (byte {error.start + 1})", where=file) from error
    decoder, at = json.JSONDecoder(), _after_space(text, text.index("[") + 1)
    for number in itertools.count(1):
        if text[at : at + 1] == "]":
            return
        try:
            value, at = decoder.raw_decode(text, at)
            at = _after_space(text, at)
            if text[at : at + 1] not in (",", "]"):
                raise json.JSONDecodeError("Expecting ',' delimiter", text, at)
        except json.JSONDecodeError as error:
            what = f"is not valid JSON ({error.msg}, line {error.lineno} column {error.colno})"
            raise _fault(file, number, "entry", what) from error
        except RecursionError as error:
            raise _fault(file, number, "entry", "is nested too deeply") from error
        yield number, "entry", value
        at = _after_space(text, at + 1) if text[at] == "," else at


def _after_space(text: str, at: int) -> int:
    while text[at : at + 1] in (" ", "\t", "\n", "\r"):
        at += 1
    return at


def _hint(keys: Sequence[str]) -> str:
    return f'write one JSON object per line: {{"{keys[0]}": "..."}}'


def _fault(file: Path, number: int, unit: str, what: str, hint: str | None = None) -> UsageError:
    where = f"{file}:{number}" if unit == "line" else str(file)
    return UsageError(f"{unit} {number} {what}", where=where, hint=hint)


def _described(row: Any) -> str:
    if isinstance(row, dict):
        return f"an object with {', '.join(map(repr, row)) or 'no keys'}"
    return type(row).__name__


def _half_character(place: Row, has: str) -> UsageError:
    return place.fault(
        f"{has} half of a surrogate pair, which is not a character",
        "write a character beyond U+FFFF as it is, or with both halves of its pair",
    )


def is_unicode(text: str) -> bool:
    """Whether the text can be sent and stored. Half of a surrogate pair is no character; Python
    also makes halves of bytes in an argument that are not UTF-8.
    """
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True
