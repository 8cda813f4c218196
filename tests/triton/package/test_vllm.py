"""The repository for vLLM: Triton's protobuf reads its configuration back, and model.json holds
what both ways to start vLLM take.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tritonclient.grpc import model_config_pb2 as pb

from tests.support.vllm_packages import ARGS, deployment, engine, repository
from toolkit.config.schema import TritonConfig
from toolkit.errors import StageError
from toolkit.triton.package import model_config
from toolkit.triton.package.layout_vllm import ENGINES, MODEL_JSON
from toolkit.triton.package.vllm import OLD_KEYS, package_vllm
from toolkit.triton.process.localize import local_args

NGRAM = {**ARGS, "speculative_config": {"method": "ngram", "num_speculative_tokens": 3}}
PLAIN = {name: value for name, value in ARGS.items() if name != "speculative_config"}


def args_in(folder: Path) -> dict[str, Any]:
    args: dict[str, Any] = json.loads((folder / MODEL_JSON).read_text())
    return args


def test_the_configuration_leaves_tensors_and_devices_to_the_backend(tmp_path: Path) -> None:
    record = repository(tmp_path)
    assert (record.layout, record.model, record.decoupled) == ("vllm", "vllm_model", True)
    assert record.max_draft_len == 3
    config = model_config.read(record.path / "vllm_model" / "config.pbtxt")
    (group,) = config.instance_group
    assert (config.backend, group.count, group.kind) == (
        "vllm",
        1,
        pb.ModelInstanceGroup.KIND_MODEL,
    )
    assert config.model_transaction_policy.decoupled  # the backend asserts it
    assert (config.max_batch_size, list(config.input), list(config.output)) == (0, [], [])


def test_model_json_names_both_engines_by_their_place_in_the_container(tmp_path: Path) -> None:
    record = repository(tmp_path)
    assert args_in(record.path) == ARGS
    for role in ("target", "draft"):
        packaged = record.path / f"{ENGINES}/{role}/config.json".removeprefix("/models/")
        assert json.loads(packaged.read_text()) == {"role": role}
        assert packaged.samefile(tmp_path / "engines" / role / "config.json")  # a hard link


@pytest.mark.parametrize("args", [NGRAM, PLAIN], ids=["ngram", "plain"])
def test_without_a_draft_model_only_the_target_is_packaged(
    tmp_path: Path, args: dict[str, Any]
) -> None:
    record = repository(tmp_path, args)
    assert args_in(record.path) == args
    assert [file.name for file in (record.path / "vllm_model/1/engines").iterdir()] == ["target"]


@pytest.mark.parametrize("key", OLD_KEYS)
def test_arguments_that_vllm_no_longer_has_are_refused(tmp_path: Path, key: str) -> None:
    with pytest.raises(StageError, match=f"no longer has the argument {key}"):
        repository(tmp_path, {**ARGS, key: 3})


def test_a_model_that_is_not_decoupled_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StageError, match=r"triton\.decoupled is false"):
        repository(tmp_path, decoupled=False)


def test_arguments_that_name_other_models_than_those_packaged_are_refused(tmp_path: Path) -> None:
    target, draft = (engine(tmp_path, role) for role in ("target", "draft"))
    elsewhere = {**ARGS, "model": "/somewhere/target"}
    for args, second in ((elsewhere, draft), (ARGS, None), (NGRAM, draft)):
        with pytest.raises(StageError, match="the arguments name the models"):
            package_vllm(
                target,
                second,
                args,
                TritonConfig(),
                deployment(),
                tmp_path / "out",
                max_draft_len=3,
            )


def test_here_the_arguments_have_the_paths_of_this_machine(tmp_path: Path) -> None:
    record = repository(tmp_path)
    args = local_args(record.path)
    engines = record.path / "vllm_model" / "1" / "engines"
    assert args == {
        **ARGS,
        "model": str(engines / "target"),
        "speculative_config": {**ARGS["speculative_config"], "model": str(engines / "draft")},
    }
    assert local_args(record.path, speculates=False) == {**PLAIN, "model": str(engines / "target")}


def test_what_a_user_edits_in_model_json_is_served(tmp_path: Path) -> None:
    record = repository(tmp_path)
    edited = {**ARGS, "max_num_seqs": 2}
    (record.path / MODEL_JSON).write_text(json.dumps(edited))
    assert local_args(record.path)["max_num_seqs"] == 2
