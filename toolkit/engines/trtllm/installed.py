"""Ask the installed TensorRT-LLM for its flags, from its argument parser or its `--help`.

The installation is right if our tables differ from it. If it does not know a flag that we pass,
that is an error before anything is built. Every other difference is reported as a disagreement, so
that the tables can be fixed.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping
from dataclasses import dataclass

from toolkit.engines.trtllm.command import BuildCommand, flags_of
from toolkit.facts.trtllm_build import Flag
from toolkit.records.measured import Finding

__all__ = [
    "Offered",
    "flags_of_help",
    "flags_of_parser",
    "table_disagreements",
    "unknown_to_installation",
]

STANDARD = {"-h", "--help"}


@dataclass(frozen=True, slots=True)
class Offered:
    """A flag of an installation. choices: None if it takes any value or does not list them."""

    choices: tuple[str, ...] | None


def flags_of_parser(parser: argparse.ArgumentParser) -> dict[str, Offered]:
    """The long flags of a parser like that of `tensorrt_llm.commands.build.parse_arguments()`."""
    flags = {}
    for action in parser._actions:  # the only place where argparse keeps them
        choices = (
            None if action.choices is None else tuple(str(choice) for choice in action.choices)
        )
        flags.update(
            {name: Offered(choices) for name in action.option_strings if name not in STANDARD}
        )
    return flags


def flags_of_help(text: str) -> dict[str, Offered]:
    """The flags in a `--help` text, with their choices if it prints them in braces."""
    options = (
        text[match.start() :]
        if (match := re.search(r"(?m)^(options|optional arguments):", text))
        else text
    )
    flags: dict[str, Offered] = {}
    for line in re.findall(r"(?m)^ {1,8}(--?\w.*)$", options):
        names = re.findall(r"(?<![\w-])--[A-Za-z]\w+", line.split("  ")[0])
        braces = re.search(r"\{([^}]*)\}", line)
        choices = tuple(part.strip() for part in braces.group(1).split(",")) if braces else None
        flags.update({name: Offered(choices) for name in names if name not in STANDARD})
    return flags


def unknown_to_installation(command: BuildCommand, offered: Mapping[str, Offered]) -> list[str]:
    """The errors that this installation would report for our command."""
    errors = []
    for name, value in command.flags.items():
        if name not in offered:
            errors.append(f"{name} is not known there")
            continue
        choices = offered[name].choices
        if value is not None and choices is not None and value not in choices:
            errors.append(f"{name} takes {', '.join(choices)} there, not {value}")
    return errors


def table_disagreements(offered: Mapping[str, Offered], version: str) -> list[Finding]:
    """The differences between an installation of `version` and our table of its flags."""
    ours = flags_of(version)
    findings = [
        Finding(
            "our facts",
            "warning",
            f"trtllm-build {version} here has no {name}, but our table lists it",
        )
        for name in sorted(set(ours) - set(offered))
    ]
    findings += [
        Finding(
            "our facts",
            "warning",
            f"trtllm-build {version} here has {name}, which our table does not list",
        )
        for name in sorted(set(offered) - set(ours))
    ]
    findings += [
        Finding(
            "our facts",
            "warning",
            f"{name} takes {_listed(theirs)} here, but our table says {_listed(flag.choices)}",
        )
        for name, flag in ours.items()
        if (theirs := offered.get(name, Offered(None)).choices) is not None
        and _differ(theirs, flag)
    ]
    return findings


def _differ(theirs: tuple[str, ...], flag: Flag) -> bool:
    return flag.choices is not None and set(theirs) != set(flag.choices)


def _listed(choices: tuple[str, ...] | None) -> str:
    return "anything" if choices is None else ", ".join(choices)
