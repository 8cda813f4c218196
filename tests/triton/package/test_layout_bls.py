"""The bls layout's files hold TensorRT-LLM's tensors and parameters, each checked by itself."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tritonclient.grpc import model_config_pb2 as pb

from tests.support.checkpoints import write_byte_tokenizer
from toolkit.config.schema import TritonConfig
from toolkit.facts.triton_tensors import (
    BLS,
    ENGINE,
    ENSEMBLE,
    POSTPROCESSING,
    PREPROCESSING,
    ModelFacts,
)
from toolkit.triton.package import model_config
from toolkit.triton.package.layout_bls import model_configs, write_models
from toolkit.triton.package.layout_trtllm import Engines, bls_of_engines, ranks_of
from toolkit.triton.tensors import contract

FACTS = {
    "preprocessing": PREPROCESSING,
    "postprocessing": POSTPROCESSING,
    "tensorrt_llm": ENGINE,
    "tensorrt_llm_draft": ENGINE,
    "tensorrt_llm_bls": BLS,
    "ensemble": ENSEMBLE,
}
TYPES = {
    "${logits_datatype}": "TYPE_FP32",
    "${encoder_input_features_data_type}": "TYPE_FP16",
    "${prompt_embedding_table_data_type}": "TYPE_FP16",
}


def engines(**changes: Any) -> Engines:
    sizes = {"max_batch_size": 16, "max_input_len": 4096, "max_seq_len": 8192, "max_draft_len": 5}
    return Engines(**{"version": "1.2.1", **sizes, **changes})


def rendered(requested: Engines, folder: Path, **triton: Any) -> dict[str, Any]:
    """Model -> its configuration, written and read back."""
    configs = {}
    for name, config in model_configs(
        bls_of_engines(requested, TritonConfig(**triton), (7, 8))
    ).items():
        model_config.write(config, folder / f"{name}.pbtxt")
        configs[name] = model_config.read(folder / f"{name}.pbtxt")
    return configs


def parameters(config: Any) -> dict[str, str]:
    return {key: value.string_value for key, value in config.parameters.items()}


def check_tensors(config: Any, facts: ModelFacts, ours: tuple[set[str], set[str]]) -> None:
    for given, expected, our_names in (
        (config.input, facts.inputs, ours[0]),
        (config.output, facts.outputs, ours[1]),
    ):
        assert [tensor.name for tensor in given if tensor.name not in our_names] == [
            fact.name for fact in expected
        ]
        by_name = {tensor.name: tensor for tensor in given}
        for fact in expected:
            tensor = by_name[fact.name]
            assert pb.DataType.Name(tensor.data_type) == TYPES.get(fact.dtype, fact.dtype), (
                fact.name
            )
            assert tuple(tensor.dims) == fact.dims, fact.name
            if given is config.input:
                assert tensor.optional is fact.optional, fact.name
                assert tensor.allow_ragged_batch is fact.ragged, fact.name
                assert tensor.HasField("reshape") is fact.scalar, fact.name
        assert all(by_name[name].optional for name in our_names if given is config.input)


@pytest.mark.parametrize("tp_size", [1, 2, 8])
def test_every_tensor_and_parameter_is_the_template_s(tmp_path: Path, tp_size: int) -> None:
    configs = rendered(engines(tp_size=tp_size), tmp_path)
    assert set(configs) == set(FACTS)
    ours = (
        {spec.name for spec in contract.BLS_INPUTS},
        {spec.name for spec in contract.BLS_OUTPUTS},
    )
    for name, facts in FACTS.items():
        config = configs[name]
        assert config.name == name
        check_tensors(config, facts, ours if name == "tensorrt_llm_bls" else (set(), set()))
        stated = parameters(config)
        for fact in facts.parameters:
            if fact.required:
                assert stated[fact.name], fact.name
                assert not stated[fact.name].startswith("${"), fact.name
            elif fact.in_template:
                assert fact.name in stated, fact.name
            value = stated.get(fact.name, "")
            if value.startswith("${"):
                assert value == f"${{{fact.key}}}"
            elif value and fact.choices:
                assert value in fact.choices
            if fact.fixed is not None:
                assert value == fact.fixed
    assert configs["tensorrt_llm"].backend == configs["tensorrt_llm_draft"].backend == "tensorrtllm"
    for name in ("tensorrt_llm", "tensorrt_llm_draft"):
        stated = parameters(configs[name])
        assert stated["gpu_device_ids"] == ",".join(map(str, range(tp_size)))
        assert stated["gpt_model_path"] == f"/models/{name}/1/engine"
        assert stated["enable_kv_cache_reuse"] == "true"
        assert stated["participant_ids"] == "${participant_ids}"
        assert stated["decoding_mode"] == "${decoding_mode}"
        assert configs[name].max_batch_size == 16
        assert not configs[name].model_transaction_policy.decoupled
        assert list(configs[name].dynamic_batching.preferred_batch_size) == [16]


@pytest.mark.parametrize("version", ["0.21", "1.2.1"])
def test_the_ensemble_passes_every_tensor_on_under_a_name_that_its_step_has(
    tmp_path: Path, version: str
) -> None:
    """TensorRT-LLM's triton_backend/all_models/inflight_batcher_llm/ensemble/config.pbtxt."""
    configs = rendered(engines(version=version), tmp_path)
    config = configs["ensemble"]
    assert (config.platform, config.backend, config.max_batch_size) == ("ensemble", "", 16)
    assert len(config.input) == 36
    types = {tensor.name: tensor.data_type for tensor in config.input}
    known = dict(types)
    for step in config.ensemble_scheduling.step:
        inputs = {tensor.name: tensor for tensor in configs[step.model_name].input}
        outputs = {tensor.name: tensor for tensor in configs[step.model_name].output}
        for tensor, name in step.input_map.items():
            assert inputs[tensor].data_type == known[name], (step.model_name, tensor)
            assert inputs[tensor].optional or name not in types or not is_optional(config, name)
        known |= {name: outputs[tensor].data_type for tensor, name in step.output_map.items()}
    assert [step.model_name for step in config.ensemble_scheduling.step] == [
        "preprocessing",
        "tensorrt_llm",
        "postprocessing",
    ]
    assert {tensor.name for tensor in config.output} <= set(known)
    used = {name for step in config.ensemble_scheduling.step for name in step.input_map.values()}
    assert set(types) <= used  # nothing that a client sends is dropped
    old_names = {"min_length", "random_seed"}
    assert old_names <= set(types) if version == "0.21" else not old_names & set(types)


def is_optional(config: Any, name: str) -> bool:
    return any(tensor.optional for tensor in config.input if tensor.name == name)


def test_the_fractions_of_both_engines_add_up_to_the_configured_one(tmp_path: Path) -> None:
    configs = rendered(engines(free_gpu_memory_fraction=0.8, draft_share=0.25), tmp_path)
    shares = [
        float(parameters(configs[name])["kv_cache_free_gpu_mem_fraction"])
        for name in ("tensorrt_llm", "tensorrt_llm_draft")
    ]
    assert shares == [pytest.approx(0.6), pytest.approx(0.2)]


@pytest.mark.parametrize("world, per_node", [(16, 8), (24, 8), (6, 4), (8, 8)])
def test_each_node_has_as_many_ranks_of_an_engine_as_gpus(world: int, per_node: int) -> None:
    requested = engines(tp_size=world, gpus_per_node=per_node)
    ranks = ranks_of(requested)
    assert sorted(rank for of_model in ranks.values() for rank in of_model) == list(
        range(1, 1 + 2 * world)
    )
    # Launchers fill one node before the next. The first node also has the orchestrator.
    for of_model in ranks.values():
        assert list(of_model) == sorted(of_model)
        for position, rank in enumerate(of_model):
            assert (rank - 1) // (2 * per_node) == position // per_node


def test_ranks_of_several_nodes_are_named(tmp_path: Path) -> None:
    configs = rendered(engines(tp_size=16), tmp_path)
    stated = [parameters(configs[name]) for name in ("tensorrt_llm", "tensorrt_llm_draft")]
    assert [parameters["num_nodes"] for parameters in stated] == ["2", "2"]
    assert stated[0]["participant_ids"] == "1,2,3,4,5,6,7,8,17,18,19,20,21,22,23,24"
    assert stated[1]["participant_ids"] == "9,10,11,12,13,14,15,16,25,26,27,28,29,30,31,32"
    (tmp_path / "alone").mkdir()
    alone = parameters(
        rendered(engines(tp_size=16, max_draft_len=0), tmp_path / "alone")["tensorrt_llm"]
    )
    assert alone["participant_ids"] == ",".join(map(str, range(1, 17)))


def test_a_target_alone_has_all_the_memory_and_no_draft_model(tmp_path: Path) -> None:
    configs = rendered(engines(max_draft_len=0), tmp_path)
    assert "tensorrt_llm_draft" not in configs
    assert parameters(configs["tensorrt_llm"])["kv_cache_free_gpu_mem_fraction"] == "0.9"
    assert (
        parameters(configs["tensorrt_llm_bls"])["tensorrt_llm_draft_model_name"]
        == "${tensorrt_llm_draft_model_name}"
    )


def test_an_old_version_has_its_own_names(tmp_path: Path) -> None:
    configs = rendered(engines(version="0.21"), tmp_path)
    names = {tensor.name for tensor in configs["tensorrt_llm"].input}
    assert {"min_length", "random_seed"} <= names
    assert not {"min_tokens", "seed"} & names
    assert parameters(configs["tensorrt_llm_bls"])["engine_seed"] == "random_seed"


def test_bls_streams_and_queues_as_configured(tmp_path: Path) -> None:
    front = rendered(engines(), tmp_path, decoupled=False, max_queue_size=9)["tensorrt_llm_bls"]
    assert not front.model_transaction_policy.decoupled
    assert front.max_batch_size == 16
    assert list(front.dynamic_batching.preferred_batch_size) == [1]
    assert front.instance_group[0].count == 16
    assert front.dynamic_batching.default_queue_policy.max_queue_size == 9
    assert rendered(engines(), tmp_path)["tensorrt_llm_bls"].model_transaction_policy.decoupled


@pytest.mark.parametrize("model", ["preprocessing", "postprocessing", "tensorrt_llm_bls"])
def test_a_model_finds_all_it_imports_in_its_own_folder(tmp_path: Path, model: str) -> None:
    """It runs as in a container without the toolkit: besides its folder there are only Python's own
    modules, numpy and tokenizers.
    """
    write_byte_tokenizer(tmp_path / "tokenizer")
    write_models(tmp_path / "repository", tmp_path / "tokenizer")
    version = tmp_path / "repository" / model / "1"
    assert (version / "tokenizer" / "tokenizer.json").is_file() is (model != "tensorrt_llm_bls")
    assert {file.suffix for file in (version / "toolkit").rglob("*.*")} == {".py"}
    program = (
        "import sys, types\nsys.modules['triton_python_backend_utils'] ="
        " types.ModuleType('triton_python_backend_utils')\nsys.path[:0] ="
        f" [{str(version)!r}]\nimport model, toolkit\nassert"
        f" toolkit.__file__.startswith({str(version)!r}), toolkit.__file__\nassert"
        " model.TritonPythonModel\nprint(sorted({name.split('.')[0] for name in sys.modules} &"
        " {'torch', 'pydantic', 'transformers', 'tritonclient'}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"
