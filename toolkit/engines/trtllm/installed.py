"""Asking the installed TensorRT-LLM before our own tables: its argument parser, or what its
`--help` prints.

What it says wins. A flag of ours that it does not know is an error before anything is built; any
other difference is reported as what it is, a disagreement between our facts and this installation,
so that the facts can be fixed.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping
from dataclasses import dataclass

from toolkit.engines.trtllm.command import BuildCommand, flags_of
from toolkit.facts.trtllm_build import Flag
from toolkit.records.measured import Finding

__all__ = ["Offered", "flags_of_help", "flags_of_parser", "table_disagreements", "unknown_to_it"]

STANDARD = {"-h", "--help"}


@dataclass(frozen=True, slots=True)
class Offered:
    """One flag as an installation has it. choices None: it takes anything, or does not say."""

    choices: tuple[str, ...] | None


def flags_of_parser(parser: argparse.ArgumentParser) -> dict[str, Offered]:
    """Every long flag of a parser, such as `tensorrt_llm.commands.build.parse_arguments()`
    returns.
    """
    found = {}
    for action in parser._actions:  # the only place where argparse keeps them
        choices = (
            None if action.choices is None else tuple(str(choice) for choice in action.choices)
        )
        found.update(
            {name: Offered(choices) for name in action.option_strings if name not in STANDARD}
        )
    return found


def flags_of_help(text: str) -> dict[str, Offered]:
    """The flags that a `--help` text lists, with the choices in braces where it prints them."""
    options = (
        text[match.start() :]
        if (match := re.search(r"(?m)^(options|optional arguments):", text))
        else text
    )
    found: dict[str, Offered] = {}
    for line in re.findall(r"(?m)^ {1,8}(--?\w.*)$", options):
        names = re.findall(r"(?<![\w-])--[A-Za-z]\w+", line.split("  ")[0])
        braces = re.search(r"\{([^}]*)\}", line)
        choices = tuple(part.strip() for part in braces.group(1).split(",")) if braces else None
        found.update({name: Offered(choices) for name in names if name not in STANDARD})
    return found


def unknown_to_it(command: BuildCommand, offered: Mapping[str, Offered]) -> list[str]:
    """What of our command this installation would refuse."""
    found = []
    for name, value in command.flags.items():
        if name not in offered:
            found.append(f"{name} is not known to it")
            continue
        choices = offered[name].choices
        if value is not None and choices is not None and value not in choices:
            found.append(f"{name} takes {', '.join(choices)} there, not {value}")
    return found


def table_disagreements(offered: Mapping[str, Offered], version: str) -> list[Finding]:
    """Where an installation of `version` and our table of its flags differ."""
    ours = flags_of(version)
    found = [
        Finding(
            "our facts",
            "warning",
            f"trtllm-build {version} here has no {name}, our table says it has",
        )
        for name in sorted(set(ours) - set(offered))
    ]
    found += [
        Finding(
            "our facts",
            "warning",
            f"trtllm-build {version} here has {name}, which our table does not list",
        )
        for name in sorted(set(offered) - set(ours))
    ]
    found += [
        Finding(
            "our facts",
            "warning",
            f"{name} takes {_listed(theirs)} here, our table says {_listed(flag.choices)}",
        )
        for name, flag in ours.items()
        if (theirs := offered.get(name, Offered(None)).choices) is not None
        and _differ(theirs, flag)
    ]
    return found


def _differ(theirs: tuple[str, ...], flag: Flag) -> bool:
    return flag.choices is not None and set(theirs) != set(flag.choices)


def _listed(choices: tuple[str, ...] | None) -> str:
    return "anything" if choices is None else ", ".join(choices)
