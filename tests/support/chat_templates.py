"""Chat templates in the forms of known families, written for these tests, and the tokenizer
files of a checkpoint that has one of them.
"""

from __future__ import annotations

import json
from pathlib import Path

from toolkit.standins.tokenizer import Habits, write_tokenizer

LLAMA3 = """\
{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system = '' %}
{%- endif %}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\n' }}
{{- 'Today is ' + strftime_now('%b %Y') + '.\\n\\n' + system + '<|eot_id|>' }}
{%- for message in messages %}
    {%- set header = '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' %}
    {{- header + message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""
CHATML = """\
{% for message in messages %}
    {% if loop.first and message['role'] != 'system' %}
        {{- '<|im_start|>system\\nYou answer briefly.<|im_end|>\\n' }}
    {%- endif %}
    {% if message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' }}
        {%- generation %}
        {{- message.content + '<|im_end|>' + '\\n' }}
        {%- endgeneration %}
        {% continue %}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{% if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
{% if tools %}{{ tools | tojson }}{% endif %}
"""
MISTRAL = """\
{{ bos_token }}{% set state = namespace(system='', turn=0) %}
{% for message in messages %}
    {% if message['role'] == 'system' %}
        {% set state.system = message['content'] + '\\n\\n' %}
    {% elif (message['role'] == 'user') != (state.turn % 2 == 0) %}
        {{ raise_exception('roles have to alternate: user, assistant, user, ...') }}
    {% else %}
        {% set state.turn = state.turn + 1 %}
        {% if message['role'] == 'user' %}
            {% if loop.last or loop.length < 3 %}
{{ '[INST] ' + state.system + message['content'] + '[/INST]' }}{% else %}
{{ '[INST] ' + message['content'] + '[/INST]' }}{% endif %}
        {% else %}
{{ ' ' + message['content'] + eos_token }}{% endif %}
    {% endif %}
{% endfor %}
"""
GEMMA = """\
{{ bos_token }}\
{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}\
{% for message in messages %}{% set role = message['role'] %}\
{% if role == 'assistant' %}{% set role = 'model' %}{% endif %}\
{{ '<start_of_turn>' + role + '\\n' + message['content'] | trim + '<end_of_turn>\\n' }}{% endfor %}\
{% if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}
"""

# Family -> template, special tokens, and whether tokenizer.json adds BOS by itself.
FAMILIES = {
    "llama3": (
        LLAMA3,
        ("<|begin_of_text|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>"),
        True,
    ),
    "chatml": (CHATML, ("<|endoftext|>", "<|im_end|>", "<|im_start|>"), False),
    "mistral": (MISTRAL, ("<s>", "</s>", "[INST]", "[/INST]"), True),
    "gemma": (GEMMA, ("<bos>", "<end_of_turn>", "<start_of_turn>"), True),
}


def write_chat_tokenizer(
    directory: Path, family: str, *, template: str | None = None, adds_bos: bool | None = None
) -> Path:
    """tokenizer.json and a tokenizer_config.json that has the family's template, or another."""
    own, special, adds = FAMILIES[family]
    directory.mkdir(parents=True, exist_ok=True)
    bos = special[0] if (adds if adds_bos is None else adds_bos) else None
    write_tokenizer(directory, Habits(special, bos, (special[1],)))
    set_config(directory, bos_token=special[0], chat_template=own if template is None else template)
    return directory


def set_config(directory: Path, **values: object) -> None:
    """Set fields of tokenizer_config.json; None removes one."""
    file = directory / "tokenizer_config.json"
    fields = json.loads(file.read_text(encoding="utf-8")) | values
    kept = {name: value for name, value in fields.items() if value is not None}
    file.write_text(json.dumps(kept), encoding="utf-8")
