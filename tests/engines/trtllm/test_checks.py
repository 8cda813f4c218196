"""Reading what engines record of themselves."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from toolkit.engines.trtllm.checks import read_engine, speculative_mode
from toolkit.engines.trtllm.inspect import count_layers, tensor_findings
from toolkit.errors import StageError
from toolkit.facts.trtllm_build import ENGINE_INPUTS


@pytest.mark.parametrize(
    ("stored", "name"),
    [
        (1, "NONE"),
        (2, "DRAFT_TOKENS_EXTERNAL"),
        ("2", "DRAFT_TOKENS_EXTERNAL"),
        ("SpeculativeDecodingMode.DRAFT_TOKENS_EXTERNAL", "DRAFT_TOKENS_EXTERNAL"),
        ("eagle", "EAGLE"),
    ],
)
def test_the_mode_is_read_as_a_flag_and_as_a_name(stored: int | str, name: str) -> None:
    assert speculative_mode(stored) == name


@pytest.mark.parametrize("stored", [3, "3", "clairvoyance"])
def test_an_unknown_mode_is_no_mode(stored: int | str) -> None:
    with pytest.raises(ValueError, match="speculative_decoding_mode"):
        speculative_mode(stored)


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", json.dumps({"pretrained_config": {}, "build_config": {}, "version": "1.2.1"})],
)
def test_a_directory_without_an_engines_config_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(StageError, match="left no readable engine"):
        read_engine(tmp_path)


def test_layers_are_counted_by_name_where_there_is_nothing_else() -> None:
    text = json.dumps(
        {
            "Layers": [
                "a",
                "b + c",
                "{ForeignNode[x...y]}",
                "layers/0/attention/PLUGIN_V2_GPTAttention_0",
            ]
        }
    )
    counts = count_layers(text)
    assert (counts.layers, counts.fused, counts.plugins, counts.precisions) == (
        4,
        2,
        {"unnamed": 1},
        {},
    )


def test_precisions_are_read_in_both_spellings() -> None:
    types = [
        "Row major linear FP8 format",
        "Int8",
        "Half",
        "BFloat16",
        "Float16",
        "Float",
        "Row major linear FP32",
        "Int64",
        "E8M0",
    ]
    layers = [
        {"Name": "n", "LayerType": "gemm", "Outputs": [{"Format/Datatype": name}]} for name in types
    ]
    assert count_layers(json.dumps({"Layers": layers})).precisions == {
        "BF16": 1,
        "E8M0": 1,
        "FP16": 2,
        "FP32": 2,
        "FP8": 1,
        "INT64": 1,
        "INT8": 1,
    }


def test_stages_of_a_pipeline_have_their_own_tensors() -> None:
    inputs = set(ENGINE_INPUTS)
    first = list(tensor_findings(inputs, {"hidden_states_output"}, first=True, last=False))
    later = list(
        tensor_findings(
            inputs - {"input_ids"} | {"hidden_states_input"}, {"logits"}, first=False, last=True
        )
    )
    assert [finding.severity for finding in (*first, *later)] == ["ok", "ok"]
    lacking = list(tensor_findings(inputs, {"logits"}, first=True, last=False))
    assert lacking[0].detail == "the engine lacks hidden_states_output"
