"""What engine kinds can do: one record per kind, version and layout, and the table in the docs."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import get_args

import pytest

from toolkit.config.schema import EngineConfig, TensorRtLlmVersion
from toolkit.facts import triton_tensors
from toolkit.facts.capabilities import (
    EMBEDDED,
    MAKERS,
    PENALTIES,
    Capabilities,
    capabilities_of,
)
from toolkit.facts.support import LOG_PROBS
from toolkit.facts.versions import VERSIONS
from toolkit.triton.tensors import contract

PAGE = Path(__file__).parents[2] / "docs" / "engines.md"
BEGIN, END = "<!-- capabilities: begin -->\n", "<!-- capabilities: end -->\n"
SHOWN = {"torch": None, "trt_engine": "1.2.1", "trtllm_pytorch": "1.2.1", "vllm": "0.32.0"}


def table() -> str:
    columns = [
        capabilities_of(kind, version, "auto", reuses_prefixes=True)
        for kind, version in SHOWN.items()
    ]
    heads = [kind if version is None else f"{kind} {version}" for kind, version in SHOWN.items()]
    rows = [
        [field.name, *(shown(getattr(column, field.name)) for column in columns)]
        for field in dataclasses.fields(Capabilities)
        if field.name != "kind"
    ]
    lines = [["", *(f"`{head}`" for head in heads)], ["---"] * (len(heads) + 1), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def shown(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, tuple):
        return ", ".join(value)
    return "no" if value is None else str(value)


def test_the_table_in_the_docs_is_that_of_the_records(request: pytest.FixtureRequest) -> None:
    page = PAGE.read_text(encoding="utf-8")
    before, _, rest = page.partition(BEGIN)
    if request.config.getoption("--update-golden"):
        page = f"{before}{BEGIN}{table()}{END}{rest.partition(END)[2]}"
        PAGE.write_text(page, encoding="utf-8")
    assert page.partition(BEGIN)[2].partition(END)[0] == table()


def test_every_field_is_explained_in_the_docs() -> None:
    described = PAGE.read_text(encoding="utf-8") + (Capabilities.__doc__ or "")
    missing = [
        field.name for field in dataclasses.fields(Capabilities) if field.name not in described
    ]
    assert missing == []


def test_every_kind_of_the_yaml_has_capabilities() -> None:
    sections = get_args(get_args(EngineConfig)[0])
    kinds = {get_args(section)[0].model_fields["kind"].default for section in sections}
    assert kinds == set(MAKERS)


@pytest.mark.parametrize("version", get_args(TensorRtLlmVersion))
def test_what_differs_by_version_comes_from_the_tables(version: str) -> None:
    pytorch = capabilities_of("trtllm_pytorch", version, "auto", reuses_prefixes=True)
    assert pytorch.draft_len_schedule == VERSIONS[version].draft_len_schedule
    assert pytorch.max_concurrency == VERSIONS[version].max_concurrency
    assert (pytorch.seeds == "repeatable") == VERSIONS[version].seeds
    assert bool(pytorch.penalties) == VERSIONS[version].penalties
    assert pytorch.log_probs == LOG_PROBS["trtllm_pytorch"].get(version, 0)
    assert pytorch.reuses_prefixes and pytorch.layout == "llmapi"
    engine = capabilities_of("trt_engine", version, "auto", reuses_prefixes=False)
    assert engine.log_probs == LOG_PROBS["trt_engine"].get(version, 0)
    assert not engine.reuses_prefixes and engine.layout == "bls"


def test_penalties_are_those_that_the_layouts_have_tensors_for() -> None:
    """docs/engines.md promises them, so they may not drift from what a request can carry."""
    tensors = {
        "llmapi": [spec.name.removeprefix("sampling_param_") for spec in contract.INPUTS],
        "bls": [fact.name for fact in triton_tensors.BLS.inputs],
    }
    for layout, names in tensors.items():
        taken = {name.removesuffix("_penalty") for name in names if name.endswith("_penalty")}
        assert set(PENALTIES[layout]) == taken


def test_behind_bls_every_request_drafts_for_itself() -> None:
    behind_bls = capabilities_of("torch", None, "bls", reuses_prefixes=False)
    assert EMBEDDED.max_concurrency and EMBEDDED.has_ngram
    assert not behind_bls.max_concurrency and not behind_bls.has_ngram
    assert behind_bls.draft_len_schedule is None
