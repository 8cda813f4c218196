"""Templates are compared by what they write, and a difference is told and not refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer

from tests.support.chat_templates import CHATML, GEMMA, set_config, write_chat_tokenizer
from toolkit.pairing.chat import check_ids, compare_templates
from toolkit.records.measured import Finding


def compared(tmp_path: Path, target: str | None, draft: str | None) -> Finding:
    for name, template in (("target", target), ("draft", draft)):
        directory = write_chat_tokenizer(tmp_path / name, "chatml", template=template or "")
        if template is None:
            set_config(directory, chat_template=None)
    return compare_templates(tmp_path / "target", tmp_path / "draft")


@pytest.mark.parametrize(
    ("target", "draft", "finding"),
    [
        (None, None, Finding("chat template", "ok", "none")),
        (CHATML, CHATML, Finding("chat template", "ok", "the same")),
        (
            CHATML,
            CHATML.replace("{%- endfor %}", "{%- endfor -%}"),
            Finding("chat template", "ok", "two that write the same"),
        ),
        (
            CHATML,
            None,
            Finding(
                "chat template",
                "warning",
                "the draft has none, and the target has one; prompts are written with the target's",
            ),
        ),
        (
            None,
            CHATML,
            Finding(
                "chat template",
                "warning",
                "the target has none, and the draft has one; messages cannot be written for the"
                " target",
            ),
        ),
    ],
)
def test_templates_that_agree_or_are_missing(
    tmp_path: Path, target: str | None, draft: str | None, finding: Finding
) -> None:
    assert compared(tmp_path, target, draft) == finding


def test_a_difference_names_the_conversations_and_shows_the_first_place(tmp_path: Path) -> None:
    other = CHATML.replace("You answer briefly.", "You answer at length.")
    finding = compared(tmp_path, CHATML, other)
    assert finding.severity == "warning"
    assert finding.detail == (
        "differs for a user's message, several turns, a complete conversation; prompts are written"
        " with the target's. A user's message: target ...'\\nYou answer briefly.<|im', draft"
        " ...'\\nYou answer at length.<|', from character 18"
    )


def test_a_conversation_that_one_refuses_is_a_difference(tmp_path: Path) -> None:
    finding = compared(tmp_path, GEMMA.replace("'no system'", "'x'"), GEMMA)
    assert finding == Finding("chat template", "ok", "two that write the same")
    finding = compared(tmp_path, GEMMA, GEMMA.replace("raise_exception('no system')", "''"))
    assert "differs for a system message and a user's; " in finding.detail
    assert "(refused)" in finding.detail


def test_a_template_that_cannot_be_read_is_told(tmp_path: Path) -> None:
    finding = compared(tmp_path, CHATML, "{% if %}")
    assert finding.severity == "warning"
    assert "draft/tokenizer_config.json: the chat template fails" in finding.detail


@pytest.mark.parametrize("writes_bos", [True, False])
def test_a_bos_that_the_template_does_not_write_is_told(tmp_path: Path, writes_bos: bool) -> None:
    template = "{{ bos_token if writes }}{{ messages[0].content }}"
    template = template.replace("writes", str(writes_bos).lower())
    directory = write_chat_tokenizer(tmp_path, "llama3", template=template)
    finding = check_ids(directory, Tokenizer.from_file(str(directory / "tokenizer.json")))
    if writes_bos:
        assert finding is None
    else:
        assert finding is not None
        assert finding.severity == "warning"
        assert "begin with ['<|begin_of_text|>', 'W', 'h']" in finding.detail


def test_a_tokenizer_without_template_has_no_such_ids(tmp_path: Path) -> None:
    directory = write_chat_tokenizer(tmp_path, "llama3", template="")
    assert check_ids(directory, Tokenizer.from_file(str(directory / "tokenizer.json"))) is None
