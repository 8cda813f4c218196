"""The tables are complete and agree with one another and with the schema, and every fact in them
has a source.
"""

from __future__ import annotations

import typing

import pytest

from toolkit.config import schema
from toolkit.facts.gpus import GPUS
from toolkit.facts.models import CONFIGS
from toolkit.facts.models import SOURCES as MODEL_SOURCES
from toolkit.facts.rules import RULES
from toolkit.facts.support import ACCEPTANCE, KV_SUPPORT, MIN_SM, WEIGHT_SUPPORT
from toolkit.facts.versions import SOURCES, VERSIONS, Version
from toolkit.facts.vllm import SOURCES as VLLM_SOURCES
from toolkit.facts.vllm import VLLM_VERSIONS, VllmVersion


def test_the_yaml_knows_exactly_the_gpus_and_versions_of_the_tables() -> None:
    assert set(typing.get_args(schema.GpuName)) == {"auto", *GPUS}
    assert set(typing.get_args(schema.TensorRtLlmVersion)) == set(VERSIONS)
    assert set(typing.get_args(schema.VllmVersion)) == set(VLLM_VERSIONS)


def test_every_algorithm_of_the_yaml_has_its_row() -> None:
    algorithms = set(typing.get_args(schema.QuantAlgo))
    for flow, rows in WEIGHT_SUPPORT.items():
        assert set(rows) == algorithms, flow
    for rows in (*WEIGHT_SUPPORT.values(), *KV_SUPPORT.values()):
        for columns in rows.values():
            assert set(columns) <= set(MIN_SM)
    rules = set(typing.get_args(schema.SpeculationConfig.model_fields["acceptance"].annotation)) - {
        "auto"
    }
    assert {rule for known in ACCEPTANCE.values() for rule in known} == rules


def test_a_gpu_below_sm_89_has_no_fp8_units() -> None:
    for gpu in GPUS.values():
        assert (gpu.fp8_tflops is not None) == (gpu.sm >= 89), gpu.name
        assert gpu.source.where


def test_every_rule_says_what_happens_and_where_that_is_known_from() -> None:
    for rule, (effect, source) in RULES.items():
        assert effect and source.where, rule
        assert source.confidence in "MABCI"


def test_every_column_of_the_versions_has_its_source() -> None:
    # The source of the last three is that of serving_tags, the matrix of containers.
    without_source = {"name", "release", "tensorrt", "cuda"}
    assert set(SOURCES) == set(Version.__slots__) - without_source


def test_every_column_of_vllms_versions_has_its_source() -> None:
    columns = {name.partition(".")[0] for name in VLLM_SOURCES}
    assert columns == {*VllmVersion.__slots__, "SERVING_TAGS"} - {"name"}
    versions = {name.partition(".")[2] for name in VLLM_SOURCES} - {""}
    assert versions <= set(VLLM_VERSIONS)


@pytest.mark.parametrize("name", CONFIGS)
def test_every_model_has_a_source(name: str) -> None:
    assert name.split("/", maxsplit=1)[0] in MODEL_SOURCES
