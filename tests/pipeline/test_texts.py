"""Files of calibration texts and prompts: valid ones, and every fault."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.chat_templates import CHATML, set_config, write_chat_tokenizer
from toolkit.errors import UsageError
from toolkit.pipeline.rows import read_rows
from toolkit.pipeline.texts import read_texts, template_part

MESSAGES = Path(__file__).parents[1] / "data" / "messages.jsonl"


def written(tmp_path: Path, *lines: str) -> Path:
    file = tmp_path / "a.jsonl"
    file.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return file


def test_either_key_is_read_the_first_one_named_wins_and_blank_lines_are_skipped(
    tmp_path: Path,
) -> None:
    file = written(
        tmp_path,
        '{"text": "one"}',
        "",
        '{"prompt": "two\\nlines", "id": 3}',
        '{"prompt": "a", "text": "b"}',
    )
    assert read_texts(file, "text", "prompt") == ["one", "two\nlines", "b"]
    assert read_texts(file, "prompt", "text") == ["one", "two\nlines", "a"]


def test_lines_after_the_limit_are_not_looked_at(tmp_path: Path) -> None:
    assert read_texts(
        written(tmp_path, '{"text": "one"}', '{"text": "two"}', "bad"), "text", limit=2
    ) == ["one", "two"]


def test_a_byte_order_mark_windows_line_ends_and_foreign_separators_do_no_harm(
    tmp_path: Path,
) -> None:
    file = tmp_path / "a.jsonl"
    file.write_bytes('\ufeff{"text": "one"}\r\n{"text": "a\u2028b \\ud83d\\ude00"}'.encode())
    assert read_texts(file, "text") == ["one", "a\u2028b \U0001f600"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{'text': 1}", r"line 2 is not valid JSON \(Expecting property name .*, column 2\)"),
        ('{"text": "cut', "line 2 is not valid JSON"),
        ("[" * 100_000, "line 2 is nested too deeply"),
        ('["text"]', "line 2 has no `text` or `prompt` string .it is list"),
        ('{"txt": "a"}', "line 2 has no `text` or `prompt` string .it is an object with 'txt'"),
        ('{"text": 3}', "line 2 has no `text`"),
        ('{"text": "  "}', "line 2 has an empty text"),
        ('{"text": "\\ud800"}', "line 2 has half of a surrogate pair"),
    ],
)
def test_a_bad_line_is_named(line: str, message: str, tmp_path: Path) -> None:
    file = written(tmp_path, '{"text": "one"}', line, '{"text": "three"}')
    with pytest.raises(UsageError, match=message) as caught:
        read_texts(file, "text", "prompt")
    assert str(caught.value).startswith(f"{file}:2: ")


def test_bytes_that_are_not_utf8_are_named(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_bytes(b'{"text": "one"}\n{"text": "\xff"}\n')
    with pytest.raises(UsageError, match=r"line 2 is not UTF-8 \(byte 11\)"):
        read_texts(file, "text")


@pytest.mark.parametrize("content", ["", "\n\n"])
def test_an_empty_file_is_refused(content: str, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(content)
    with pytest.raises(
        UsageError, match=r'the file is empty\n  write one JSON object per line: {"prompt": "..."}'
    ):
        read_texts(tmp_path / "a.jsonl", "prompt")


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read: No such file"):
        read_texts(tmp_path / "a.jsonl", "text")


def test_a_label_that_no_report_can_hold_is_refused(tmp_path: Path) -> None:
    file = written(
        tmp_path, '{"prompt": "a", "domain": "code"}', '{"prompt": "b", "domain": "\\ud800"}'
    )
    assert [row.domain for row in read_rows(file, "prompt", limit=1)] == ["code"]
    with pytest.raises(UsageError, match="line 2 has in `domain` half of a surrogate pair"):
        read_rows(file, "prompt")


def test_a_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read: Is a directory"):
        read_texts(tmp_path, "text")


@pytest.fixture
def chat(tmp_path: Path) -> Path:
    """A checkpoint's tokenizer, with a chat template in the form of ChatML."""
    return write_chat_tokenizer(tmp_path / "chat", "chatml")


def test_a_prompt_of_messages_is_what_the_template_writes_up_to_the_question(chat: Path) -> None:
    texts = read_texts(MESSAGES, "prompt", chat=chat)
    assert texts[1] == (
        "<|im_start|>system\nAnswer in one word.<|im_end|>\n"
        "<|im_start|>user\nWhich month follows May?<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_calibration_text_has_the_answers_too(chat: Path) -> None:
    texts = read_texts(MESSAGES, "text", chat=chat, whole=True)
    assert texts[1].endswith("<|im_start|>assistant\nJune.<|im_end|>\n")
    assert texts[2].count("<|im_start|>assistant") == 2


def test_raw_text_stays_raw_beside_a_template(tmp_path: Path, chat: Path) -> None:
    assert read_texts(written(tmp_path, '{"prompt": "a"}'), "prompt", chat=chat) == ["a"]


def test_a_template_with_a_date_writes_the_same_every_day(tmp_path: Path) -> None:
    chat = write_chat_tokenizer(tmp_path / "dated", "llama3")
    assert "Today is Jan 2025." in read_texts(MESSAGES, "prompt", chat=chat)[0]


def test_without_a_template_messages_are_refused_unless_a_string_stands_for_them(
    tmp_path: Path, chat: Path
) -> None:
    set_config(chat, chat_template=None)
    with pytest.raises(
        UsageError, match=r"messages.jsonl:1: line 1 has messages, and .*chat has no"
    ):
        read_texts(MESSAGES, "prompt", chat=chat)
    with pytest.raises(UsageError, match="line 1 has messages, and no checkpoint is known"):
        read_texts(MESSAGES, "prompt")
    question = MESSAGES.with_name("question.jsonl")
    assert read_texts(question, "prompt", chat=chat)[1] == "What is 12 times 12?"
    line = '{"prompt": "raw", "messages": [{"role": "user", "content": "a"}]}'
    assert read_texts(written(tmp_path, line), "prompt", chat=chat) == ["raw"]


def test_a_checkpoint_that_is_not_fetched_yet_is_checked_by_the_contents(tmp_path: Path) -> None:
    texts = read_texts(MESSAGES, "prompt", chat=tmp_path / "OWNER" / "NAME")
    assert texts[1] == "Answer in one word.\nWhich month follows May?"


def test_what_the_template_refuses_is_named_with_its_line(tmp_path: Path) -> None:
    chat = write_chat_tokenizer(tmp_path / "gemma", "gemma")
    with pytest.raises(
        UsageError, match=r"messages.jsonl:2: line 2 cannot be written: .*no system"
    ):
        read_texts(MESSAGES, "prompt", chat=chat)


def test_a_template_is_part_of_a_key_only_where_it_writes_something(
    tmp_path: Path, chat: Path
) -> None:
    raw = written(tmp_path, '{"prompt": "a"}')
    part = template_part(chat, raw, None, MESSAGES)
    assert len(part["chat_template"]) == 64
    assert template_part(chat, raw, None) == {}
    set_config(chat, chat_template=CHATML + " ")
    assert template_part(chat, MESSAGES) not in ({}, part)
    set_config(chat, chat_template=None)
    assert template_part(chat, MESSAGES) == {}
