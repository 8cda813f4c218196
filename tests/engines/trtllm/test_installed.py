"""What an installation says of its flags, by its parser and by its help text, and how it differs
from our table.
"""

from __future__ import annotations

import argparse
import subprocess
import sys

from tests.support import trtllm_build
from tests.support.trtllm import STAND_IN
from toolkit.engines.trtllm.command import BuildCommand
from toolkit.engines.trtllm.installed import (
    flags_of_help,
    flags_of_parser,
    table_disagreements,
    unknown_to_installation,
)


def stand_in_help() -> str:
    return subprocess.run(
        [sys.executable, "-I", "-S", str(STAND_IN), "--help"],
        capture_output=True,
        text=True,
        check=True,
        timeout=30,
    ).stdout


def test_the_help_text_says_what_the_parser_says() -> None:
    from_help, from_parser = flags_of_help(stand_in_help()), flags_of_parser(trtllm_build.parser())
    assert from_help == from_parser


def test_an_installation_of_the_contract_has_no_disagreement() -> None:
    assert table_disagreements(flags_of_help(stand_in_help()), "1.2.1") == []


def test_every_kind_of_disagreement_is_told() -> None:
    parser = trtllm_build.parser()
    parser.add_argument("--new_flag")
    offered = flags_of_parser(parser)
    del offered["--fast_build"]
    offered["--gemm_swiglu_plugin"] = type(offered["--new_flag"])(("fp8", "fp4", "disable"))
    assert [finding.detail for finding in table_disagreements(offered, "1.2.1")] == [
        "trtllm-build 1.2.1 here has no --fast_build, but our table lists it",
        "trtllm-build 1.2.1 here has --new_flag, which our table does not list",
        "--gemm_swiglu_plugin takes fp8, fp4, disable here, but our table says fp8, disable",
    ]


def test_what_it_would_refuse_of_a_command() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--gemm_plugin", choices=["auto"])
    said = unknown_to_installation(
        BuildCommand({"--gemm_plugin": "disable", "--workers": "1"}), flags_of_parser(parser)
    )
    assert said == ["--gemm_plugin takes auto there, not disable", "--workers is not known there"]
