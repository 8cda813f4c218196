"""Read texts from a file: raw text as it is, conversations as a checkpoint's chat template writes
them. Calibration and validation use this, so that both read alike what a model is asked.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

from toolkit.checkpoints.chat import BUILD_TIME, ChatTemplate, Message, has_chat_template
from toolkit.checkpoints.tokenizer import SIDE_FILES
from toolkit.errors import RequestError
from toolkit.pipeline.rows import Row, holds_conversations, read_rows

__all__ = ["PROMPT_KEYS", "TEXT_KEYS", "Writer", "read_texts", "template_part"]

PROMPT_KEYS = ("prompt", "text")  # of a prompt; the first that a row has
TEXT_KEYS = ("text", "prompt")  # of calibration text and held-out text


def read_texts(
    file: Path,
    *keys: str,
    limit: int | None = None,
    chat: Path | None = None,
    whole: bool = False,
) -> list[str]:
    """The text of each row of a file; toolkit.pipeline.rows says which forms there are.

    chat, whole: see Writer. Raises UsageError for what cannot be read or written, with its place in
    the file, and CheckpointError for a template that cannot be used.
    """
    writer = Writer(chat, whole=whole)
    return [writer.text(row) for row in read_rows(file, *keys, limit=limit)]


class Writer:
    """Writes rows as text.

    chat: the checkpoint whose template writes conversations; it is read at the first one. None if
    none is known. A folder that does not exist is a checkpoint that is not fetched yet: then the
    contents alone are written, which is good enough to check a file. whole: conversations are
    complete, with the assistant's answers (calibration); otherwise they end with what the user asks
    and the mark after which the assistant writes (prompts).
    """

    def __init__(self, chat: Path | None, *, whole: bool = False) -> None:
        self._chat, self._whole = chat, whole

    def text(self, row: Row) -> str:
        """Raises UsageError for a conversation that cannot be written."""
        if not row.messages:
            assert row.text is not None  # by construction of Row
            return row.text
        messages = row.messages if self._whole else row.messages[: row.asked]
        if self._chat is not None and not self._chat.is_dir():
            return "\n".join(message["content"] for message in messages)
        template = None if self._chat is None else _template(self._chat)
        if template is None:
            return self._without_template(row)
        return self._written(row, template, messages)

    def _written(self, row: Row, template: ChatTemplate, messages: Sequence[Message]) -> str:
        try:
            text = template.render(
                list(messages), add_generation_prompt=not self._whole, now=BUILD_TIME
            )
        except RequestError as error:
            raise row.fault(f"cannot be written: {error.what}", error.hint) from error
        if not text.strip():
            raise row.fault(
                "is written as an empty text by the chat template", f"look at {template.file}"
            )
        return text

    def _without_template(self, row: Row) -> str:
        if row.text is not None:
            return row.text
        if self._chat is None:
            raise row.fault(
                "has messages, and no checkpoint is known whose chat template writes them",
                'Name one with --tokenizer DIR, measure a chat endpoint, or write {"prompt": ...}.',
            )
        raise row.fault(
            f"has messages, and {self._chat} has no chat template to write them",
            "Put the chat_template.jinja of the model's publisher beside its tokenizer, or write"
            ' raw text: {"prompt": "..."}.',
        )


def template_part(chat: Path, *files: Path | None) -> dict[str, str]:
    """The digest of a checkpoint's template as a part of a key, if it decides how a row of these
    files is written; else nothing.
    """
    if not has_chat_template(chat):
        return {}
    if not any(file is not None and holds_conversations(file) for file in files):
        return {}
    template = _template(chat)
    return {} if template is None else {"chat_template": template.digest}


def _template(chat: Path) -> ChatTemplate | None:
    """The template of a checkpoint. A tokenizer.json of megabytes is parsed again only if one of
    the files has changed.
    """
    files = [chat / name for name in ("tokenizer.json", *SIDE_FILES)]
    states = [file.stat() if file.exists() else None for file in files]
    return _load(chat, tuple(state and (state.st_size, state.st_mtime_ns) for state in states))


@lru_cache(maxsize=4)
def _load(chat: Path, _state: object) -> ChatTemplate | None:
    return ChatTemplate.load(chat)
