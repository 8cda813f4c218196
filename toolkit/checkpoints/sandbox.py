"""The Jinja2 environment in which chat templates run: what they can use is what transformers gives
them, and what they can spend is bounded.

A template is a program that came with the weights. Jinja2's sandbox keeps it from Python's
internals and from changing its input; here its rounds of loops and calls are counted, products are
measured before they are made, and the output is cut off at a length. This is for templates with a
fault. Nothing of it makes a publisher trustworthy.

This module imports jinja2, so it is imported where a template is rendered.

Source of the names that templates use: the documentation of transformers, "Writing a chat
template" (https://huggingface.co/docs/transformers/chat_templating_writing).
"""

from __future__ import annotations

import json
import traceback
from collections.abc import Iterable, Mapping, Sized
from datetime import datetime
from functools import lru_cache
from typing import Any

from jinja2 import Template, TemplateError, nodes, pass_context
from jinja2.exceptions import TemplateRuntimeError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

__all__ = ["MAX_OUTPUT", "MAX_STEPS", "Refusal", "fault_line", "render", "template_of"]

MAX_OUTPUT = 16 * 2**20  # characters; contexts of a million tokens have about five million
MAX_STEPS = 1_000_000  # rounds of loops and calls; a message takes about ten
MAX_EXPONENT = 64

# Names with a space, which no template can write.
COUNTED = "counted rounds"
STEPS = "steps left"
NOW = "time of rendering"


class Refusal(TemplateError):
    """The template itself refuses the messages, with `raise_exception`."""


def render(template: Template, variables: Mapping[str, Any], now: datetime) -> str:
    """The template's output. now: what `strftime_now` formats.

    Raises Refusal, or TemplateRuntimeError for one that exceeds a bound, and whatever else a
    template's expressions raise.
    """
    pieces, length = [], 0
    for piece in template.generate({**variables, STEPS: _Steps(MAX_STEPS), NOW: now}):
        pieces.append(piece)
        length += len(piece)
        _check_length(length)
    return "".join(pieces)


@lru_cache(maxsize=16)
def template_of(text: str) -> Template:
    """The compiled template. Raises jinja2.TemplateSyntaxError."""
    environment = _Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters |= {"tojson": _tojson, COUNTED: _counted}
    environment.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
    tree = environment.parse(text)
    tree.set_environment(environment)
    for loop in tree.find_all(nodes.For):
        loop.iter = nodes.Filter(
            loop.iter, COUNTED, [], [], None, None, lineno=loop.lineno, environment=environment
        )
    return environment.from_string(tree)


def fault_line(error: BaseException) -> int | None:
    """The line of the template in which it failed, if that is known."""
    if (line := getattr(error, "lineno", None)) is not None:
        return int(line)
    frames = traceback.extract_tb(error.__traceback__)
    return next(
        (frame.lineno for frame in reversed(frames) if frame.filename == "<template>"), None
    )


class _Steps:
    """What is left of one rendering's rounds and calls."""

    def __init__(self, number: int) -> None:
        self._left = number

    def spend(self, number: int) -> None:
        self._left -= number
        if self._left < 0:
            raise TemplateRuntimeError(
                f"it takes more than {MAX_STEPS:,} rounds of loops and calls"
            )


class _Environment(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset({"*", "**"})

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        __context[STEPS].spend(1)
        return super().call(__context, __obj, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "**":
            if abs(right) > MAX_EXPONENT:
                raise TemplateRuntimeError(f"an exponent is larger than {MAX_EXPONENT}")
        else:
            for value, times in ((left, right), (right, left)):
                if isinstance(value, (str, list, tuple)) and isinstance(times, int):
                    _check_length(len(value) * times)
        return super().call_binop(context, operator, left, right)


class _Generation(Extension):
    """`{% generation %} ... {% endgeneration %}` marks what an assistant wrote. The mark is for
    training and leaves no trace in the text.
    """

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it so)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


@pass_context
def _counted(context: Context, items: Iterable[Any]) -> Iterable[Any]:
    """The items of a loop, after its rounds are counted."""
    rounds = items if isinstance(items, Sized) else list(items)
    context[STEPS].spend(len(rounds))
    return rounds


@pass_context
def _strftime_now(context: Context, form: str) -> str:
    now: datetime = context[NOW]
    return now.strftime(form)


def _raise_exception(message: object) -> None:
    raise Refusal(str(message))


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as it is. Jinja2's own filter escapes it for HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _check_length(characters: int) -> None:
    if characters > MAX_OUTPUT:
        raise TemplateRuntimeError(f"it writes more than {MAX_OUTPUT:,} characters")
