"""Compare the chat templates of target and draft by what they write for a few conversations.

Prompts are written with the target's template and both models read the same ids, so a difference
breaks nothing. But a draft that was trained on another form of conversation guesses worse in this
one, so it is worth knowing before the acceptance is measured. Two templates with different sources
may write the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit.checkpoints.chat import BUILD_TIME, ChatTemplate
from toolkit.errors import CheckpointError, RequestError
from toolkit.records.measured import Finding

if TYPE_CHECKING:
    from tokenizers import Tokenizer

__all__ = ["check_ids", "compare_templates"]

SYSTEM = {"role": "system", "content": "You answer in one sentence."}
USER = {"role": "user", "content": "Why is the sky blue?"}
ASSISTANT = {"role": "assistant", "content": "Air scatters blue light the most."}
AGAIN = {"role": "user", "content": "  And at sunset? "}
CONVERSATIONS = {  # name -> messages, and whether the assistant is to write next
    "a user's message": ([USER], True),
    "a system message and a user's": ([SYSTEM, USER], True),
    "several turns": ([USER, ASSISTANT, AGAIN], True),
    "a complete conversation": ([USER, ASSISTANT], False),
}
SHOWN = 24  # characters of each text, around the place where they differ
NAME = "chat template"
WRITTEN = "prompts are written with the target's"


def compare_templates(target: Path, draft: Path) -> Finding:
    """Whether the templates of two checkpoints write the same. A difference is a warning."""
    try:
        templates = ChatTemplate.load(target), ChatTemplate.load(draft)
    except CheckpointError as error:
        return Finding(NAME, "warning", f"{error.where}: {error.what}")
    ours, theirs = templates
    if ours is None or theirs is None:
        if ours is theirs:
            return Finding(NAME, "ok", "none")
        which, other = ("draft", "target") if theirs is None else ("target", "draft")
        detail = f"the {which} has none, and the {other} has one; "
        detail += WRITTEN if ours is not None else "messages cannot be written for the target"
        return Finding(NAME, "warning", detail)
    texts = _texts(ours), _texts(theirs)
    differing = [name for name in CONVERSATIONS if texts[0][name] != texts[1][name]]
    if not differing:
        same = "the same" if ours.text == theirs.text else "two that write the same"
        return Finding(NAME, "ok", same)
    first = differing[0]
    return Finding(
        NAME,
        "warning",
        f"differs for {', '.join(differing)}; {WRITTEN}. {first[0].upper()}{first[1:]}:"
        f" {_difference(texts[0][first], texts[1][first])}",
    )


def check_ids(checkpoint: Path, tokenizer: Tokenizer) -> Finding | None:
    """A warning if a conversation that is encoded like a prompt, as servers do with the text that
    they are sent, gives other ids than the template's own text; None if it does not, or if there is
    no template.

    It happens where the tokenizer adds a BOS token that the template does not write, and where it
    treats the beginning of a text otherwise than what follows BOS.
    """
    try:
        template = ChatTemplate.load(checkpoint)
        if template is None:
            return None
        served = tokenizer.encode(template.render([USER], now=BUILD_TIME))
        whole = tokenizer.encode(
            template.render_whole([USER], now=BUILD_TIME), add_special_tokens=False
        )
    except (CheckpointError, RequestError):
        return None  # compare_templates or the first prompt tells it
    if served.ids == whole.ids:
        return None
    return Finding(
        "chat prompts",
        "warning",
        f"begin with {served.tokens[:3]} when they are encoded as prompts, and with"
        f" {whole.tokens[:3]} as the target's template means it; transformers' apply_chat_template"
        " gives the latter",
    )


def _texts(template: ChatTemplate) -> Mapping[str, str]:
    return {
        name: _text(template, messages, prompt)
        for name, (messages, prompt) in CONVERSATIONS.items()
    }


def _text(template: ChatTemplate, messages: Any, add_generation_prompt: bool) -> str:
    """What the template writes, or that it does not."""
    try:
        return template.render_whole(
            messages, add_generation_prompt=add_generation_prompt, now=BUILD_TIME
        )
    except RequestError:
        return "(refused)"
    except CheckpointError:
        return "(the template fails)"


def _difference(target: str, draft: str) -> str:
    """Both texts around the first character in which they differ."""
    at = sum(
        1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(target, draft, strict=False))
    )
    start = max(0, at - SHOWN // 2)
    ours, theirs = (repr(text[start : start + SHOWN]) for text in (target, draft))
    return f"target ...{ours}, draft ...{theirs}, from character {start}"
