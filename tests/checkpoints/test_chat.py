"""Rendering is what transformers' apply_chat_template does, special tokens come once, and a
template can neither escape nor run on.
"""

from __future__ import annotations

import json
import subprocess
import sys
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from tests.support.chat_templates import (
    CHATML,
    FAMILIES,
    LLAMA3,
    set_config,
    write_chat_tokenizer,
)
from toolkit.checkpoints.chat import BUILD_TIME, ChatTemplate, check_messages, has_chat_template
from toolkit.errors import CheckpointError, RequestError

USER = {"role": "user", "content": "What is 2 + 2? <b>'quotes' & ümlauts</b>"}
ASSISTANT = {"role": "assistant", "content": "It is 4."}
SYSTEM = {"role": "system", "content": "  You count.  "}
CONVERSATIONS = {
    "user": [USER],
    "system": [SYSTEM, USER],
    "turns": [USER, ASSISTANT, {"role": "user", "content": "And\nthen?"}],
    "complete": [USER, ASSISTANT],
}


def loaded(directory: Path) -> ChatTemplate:
    template = ChatTemplate.load(directory)
    assert template is not None
    return template


def reference(directory: Path) -> Any:
    """transformers' own tokenizer of a checkpoint."""
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast.from_pretrained(str(directory))


def cases() -> list[Any]:
    return [
        pytest.param(family, name, id=f"{family}-{name}")
        for family in FAMILIES
        for name in CONVERSATIONS
        if (family, name) != ("gemma", "system")
    ]


@pytest.mark.parametrize(("family", "name"), cases())
@pytest.mark.parametrize("prompt", [True, False])
def test_a_text_and_its_ids_are_those_of_transformers(
    tmp_path: Path, family: str, name: str, prompt: bool
) -> None:
    directory = write_chat_tokenizer(tmp_path, family)
    template, messages = loaded(directory), CONVERSATIONS[name]
    theirs = reference(directory)

    whole = template.render_whole(messages, add_generation_prompt=prompt)
    assert whole == theirs.apply_chat_template(
        messages, add_generation_prompt=prompt, tokenize=False
    )

    text = template.render(messages, add_generation_prompt=prompt)
    ids = Tokenizer.from_file(str(directory / "tokenizer.json")).encode(text).ids
    assert ids == theirs.apply_chat_template(
        messages, add_generation_prompt=prompt, tokenize=True, return_dict=False
    )


@pytest.mark.parametrize("adds_bos", [True, False])
def test_bos_is_left_out_exactly_when_the_tokenizer_adds_it(tmp_path: Path, adds_bos: bool) -> None:
    directory = write_chat_tokenizer(tmp_path, "llama3", adds_bos=adds_bos)
    template = loaded(directory)

    text = template.render([USER])

    assert text.startswith("<|begin_of_text|>") is not adds_bos
    ids = Tokenizer.from_file(str(directory / "tokenizer.json")).encode(text).ids
    bos = Tokenizer.from_file(str(directory / "tokenizer.json")).token_to_id("<|begin_of_text|>")
    assert ids.count(bos) == 1


@pytest.mark.parametrize(
    ("processor", "added"),
    [
        (None, ""),
        ({"type": "ByteLevel", "add_prefix_space": True}, ""),
        ({"type": "RobertaProcessing", "sep": ["</s>", 2], "cls": ["<s>", 0]}, "<s>"),
        (
            {
                "type": "Sequence",
                "processors": [
                    {"type": "ByteLevel", "add_prefix_space": True},
                    {
                        "type": "TemplateProcessing",
                        "single": [
                            {"SpecialToken": {"id": "A", "type_id": 0}},
                            {"SpecialToken": {"id": "B", "type_id": 0}},
                            {"Sequence": {"id": "A", "type_id": 0}},
                            {"SpecialToken": {"id": "C", "type_id": 0}},
                        ],
                        "pair": [],
                        "special_tokens": {
                            name: {"id": name, "ids": [0], "tokens": [f"<{name}>"]}
                            for name in "ABC"
                        },
                    },
                ],
            },
            "<A><B>",
        ),
    ],
)
def test_what_a_tokenizer_adds_before_a_prompt_is_read_from_its_processor(
    tmp_path: Path, processor: object, added: str
) -> None:
    directory = write_chat_tokenizer(tmp_path, "chatml")
    file = directory / "tokenizer.json"
    content = json.loads(file.read_text()) | {"post_processor": processor}
    file.write_text(json.dumps(content))

    assert loaded(directory).added == added


def test_the_jinja_file_comes_first_then_the_json_file_then_the_configuration(
    tmp_path: Path,
) -> None:
    directory = write_chat_tokenizer(tmp_path, "chatml")
    assert loaded(directory).text == CHATML
    (directory / "chat_template.json").write_text(json.dumps({"chat_template": "from json"}))
    assert loaded(directory).text == "from json"
    (directory / "chat_template.jinja").write_text("from jinja")
    template = loaded(directory)
    assert (template.text, template.file) == ("from jinja", directory / "chat_template.jinja")


def test_of_named_templates_the_default_is_taken(tmp_path: Path) -> None:
    directory = write_chat_tokenizer(tmp_path, "chatml")
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]
    set_config(directory, chat_template=named)
    assert loaded(directory).text == "plain"

    set_config(directory, chat_template=named[:1])
    with pytest.raises(CheckpointError, match=r"tokenizer_config.json: .*named default.*tool_use"):
        ChatTemplate.load(directory)


def test_special_tokens_may_be_strings_or_objects(tmp_path: Path) -> None:
    directory = write_chat_tokenizer(
        tmp_path, "mistral", template="{{ bos_token }}|{{ eos_token }}|{{ pad_token }}"
    )
    set_config(directory, bos_token=None, eos_token={"content": "</s>", "lstrip": False})
    (directory / "special_tokens_map.json").write_text(
        json.dumps({"bos_token": "<s>", "eos_token": "other"})
    )
    assert loaded(directory).render_whole([USER]) == "<s>|</s>|"


def test_a_checkpoint_without_template_has_none(tmp_path: Path) -> None:
    directory = write_chat_tokenizer(tmp_path, "chatml")
    assert has_chat_template(directory)
    set_config(directory, chat_template=None)
    assert not has_chat_template(directory)
    assert ChatTemplate.load(directory) is None


def test_a_date_is_the_one_that_is_given(tmp_path: Path) -> None:
    template = loaded(write_chat_tokenizer(tmp_path, "llama3"))
    assert "Today is Feb 2031." in template.render([USER], now=datetime(2031, 2, 3))
    assert "Today is Jan 2025." in template.render([USER], now=BUILD_TIME)


def test_the_digest_follows_all_that_decides_a_text(tmp_path: Path) -> None:
    first = loaded(write_chat_tokenizer(tmp_path / "a", "llama3"))
    same = loaded(write_chat_tokenizer(tmp_path / "b", "llama3"))
    others = [
        loaded(write_chat_tokenizer(tmp_path / "c", "llama3", adds_bos=False)),
        loaded(write_chat_tokenizer(tmp_path / "d", "llama3", template=LLAMA3 + " ")),
    ]
    set_config(tmp_path / "a", eos_token="<|begin_of_text|>")
    others.append(loaded(tmp_path / "a"))
    assert first.digest == same.digest
    assert len({first.digest, *(other.digest for other in others)}) == 4


def test_text_in_parts_is_one_text(tmp_path: Path) -> None:
    template = loaded(write_chat_tokenizer(tmp_path, "chatml"))
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert template.render([{"role": "user", "content": parts}]) == template.render(
        [{"role": "user", "content": "one\ntwo"}]
    )


def test_other_fields_reach_the_template(tmp_path: Path) -> None:
    template = loaded(
        write_chat_tokenizer(tmp_path, "chatml", template="{{ messages[0].name | tojson }}")
    )
    assert template.render([{**USER, "name": "<Ann>"}]) == '"<Ann>"'


@pytest.mark.parametrize(
    ("messages", "error"),
    [
        ("hello", "messages: has to be a list of messages, and is the string 'hello'"),
        ([], "messages: is empty"),
        (["hello"], "messages[0]: has to be an object like"),
        ([USER, {"content": "a"}], "messages[1].role: is missing"),
        ([{"role": "user"}], "messages[0].content: is missing"),
        ([{"role": 3, "content": "a"}], "messages[0].role: has to be a name"),
        ([{"role": "user", "content": None}], "and is null"),
        ([{"role": "user", "content": {}}], "messages[0].content: has to be a string, or a list"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}],
            "messages[0].content[0].type: is 'image_url', and only text is supported",
        ),
        (
            [{"role": "user", "content": [{"type": "text", "text": 1}]}],
            "messages[0].content[0].text: has to be a string, and is a number",
        ),
        ([{"role": "user", "content": ["a"]}], "messages[0].content[0]: has to be a part"),
    ],
)
def test_a_fault_of_messages_names_index_and_field(messages: object, error: str) -> None:
    with pytest.raises(RequestError) as caught:
        check_messages(messages)
    assert error in str(caught.value)


def test_what_the_template_refuses_is_the_fault_of_the_messages(tmp_path: Path) -> None:
    template = loaded(write_chat_tokenizer(tmp_path, "mistral"))
    with pytest.raises(RequestError, match="refuses these messages: roles have to alternate"):
        template.render([USER, USER])


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "not safely callable|unsafe"),
        ("{% include '/etc/passwd' %}", "no loader"),
        ("a\n{{ messages[0].content + 1 }}", "in its line 2"),
        ("{{ 'x' * 10 ** 10 }}", "more than 16,777,216 characters"),
        ("{{ 9 ** 99 }}", "an exponent is larger"),
        (
            "{% for i in range(99999) %}{% for i in range(99999) %}{% endfor %}{% endfor %}",
            "more than 1,000,000 rounds",
        ),
        (
            "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}"
            "{{ f(60) }}",
            "more than 1,000,000 rounds",
        ),
        (
            "{% for i in range(9999) %}{{ 'x' * 9999 }}{% endfor %}",
            "writes more than 16,777,216 characters",
        ),
    ],
)
def test_a_template_stays_in_its_sandbox_and_its_bounds(
    tmp_path: Path, text: str, error: str
) -> None:
    template = loaded(write_chat_tokenizer(tmp_path, "chatml", template=text))
    with pytest.raises(CheckpointError, match=error) as caught:
        template.render([USER])
    assert str(caught.value).startswith(f"{tmp_path / 'tokenizer_config.json'}: the chat template")
    assert "put the chat_template.jinja of the model's publisher" in str(caught.value)


def test_a_bound_is_per_rendering(tmp_path: Path) -> None:
    text = "{% for i in range(90000) %}{% endfor %}{{ messages[0].role }}"
    template = loaded(write_chat_tokenizer(tmp_path, "chatml", template=text))
    assert [template.render([USER]) for _ in range(12)] == ["user"] * 12


def test_a_fault_of_syntax_is_told_when_the_template_is_loaded(tmp_path: Path) -> None:
    directory = write_chat_tokenizer(tmp_path, "chatml", template="a\n{% if %}")
    with pytest.raises(CheckpointError, match="in its line 2: Expected an expression"):
        ChatTemplate.load(directory)


def test_a_template_that_is_too_long_is_not_read(tmp_path: Path) -> None:
    directory = write_chat_tokenizer(tmp_path, "chatml")
    (directory / "chat_template.jinja").write_text("x" * (2**20 + 1))
    with pytest.raises(CheckpointError, match=r"chat_template.jinja: .* 1,048,577 bytes"):
        ChatTemplate.load(directory)


def test_transformers_is_not_imported(tmp_path: Path) -> None:
    directory = write_chat_tokenizer(tmp_path, "llama3")
    program = (
        "import sys; from pathlib import Path; from toolkit.checkpoints.chat import ChatTemplate\n"
        f"template = ChatTemplate.load(Path({str(directory)!r}))\n"
        "assert template.render([{'role': 'user', 'content': 'Hi'}])\n"
        "print([name for name in ('transformers', 'torch', 'tokenizers') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert done.stdout.strip() == "[]", done.stderr
