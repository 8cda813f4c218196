"""The stage `package` for vLLM: what is in its key, and that it passes the engine's arguments on.

The other kinds' stages are built in test_sequence.py.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.deployments import base
from tests.support.vllm_packages import engine
from toolkit.config.schema import DeploymentConfig
from toolkit.engines.spec import engine_spec
from toolkit.engines.vllm.arguments import engine_args, write_engine_args
from toolkit.pipeline.stage import Finished, key_of
from toolkit.triton.package.layout_vllm import ENGINES, MODEL_JSON
from toolkit.workflows.stages.package import package_stage

NGRAM = {"kind": "ngram", "max_draft_len": 3}


def config_of(*, has_draft: bool = True, **sections: Any) -> DeploymentConfig:
    data = base("torch")
    data["engine"] = {**data["engine"], "kind": "vllm", "device": "cpu"}
    if not has_draft:
        del data["draft"]
    for name, section in sections.items():
        data[name] = {**data.get(name, {}), **section}
    return DeploymentConfig.model_validate(data)


def finished_of(config: DeploymentConfig, folder: Path) -> Finished:
    """Both compiled engines, as if their stages were done."""
    done = {}
    for role in ("target", "draft"):
        compiled = engine(folder, role)
        entry = SimpleNamespace(digest=f"digest of {role}")
        done[f"compile/{role}"] = SimpleNamespace(entry=entry, record=compiled)
    spec = engine_spec(config, "target")
    assert spec.vllm is not None
    write_engine_args(folder / "target", engine_args(spec, spec.vllm, None))
    return done  # type: ignore[return-value]


def packaged(config: DeploymentConfig, folder: Path) -> Path:
    finished = finished_of(config, folder / "engines")
    stage = package_stage(config, tuple(config.models))
    record = stage.run(finished, folder / "out", lambda *done: None)
    assert record.layout == "vllm"
    assert record.max_draft_len == config.speculation.longest_draft
    return folder / "out"


def key(config: DeploymentConfig, folder: Path) -> str:
    stage = package_stage(config, ("target", "draft"))
    return key_of(stage, stage.parts(finished_of(config, folder)))


def test_model_json_is_the_engine_s_arguments_at_their_place(tmp_path: Path) -> None:
    config = config_of(speculation={"max_draft_len": 5})
    folder = packaged(config, tmp_path)
    args = json.loads((folder / MODEL_JSON).read_text())
    assert args["model"] == f"{ENGINES}/target"
    assert args["max_model_len"] == config.engine.max_seq_len
    assert args["speculative_config"] == {
        "num_speculative_tokens": 5,
        "method": "draft_model",
        "model": f"{ENGINES}/draft",
    }
    assert not {"speculative_model", "num_speculative_tokens"} & set(args)
    assert "VLLM_CPU_KVCACHE_SPACE:-2}" in (folder / "launch_vllm.sh").read_text()


def test_without_a_draft_only_the_target_is_packaged(tmp_path: Path) -> None:
    folder = packaged(config_of(speculation=NGRAM, has_draft=False), tmp_path)
    assert [path.name for path in (folder / "vllm_model/1/engines").iterdir()] == ["target"]
    assert json.loads((folder / MODEL_JSON).read_text())["speculative_config"]["method"] == "ngram"
    plain = packaged(config_of(speculation={"kind": "none"}, has_draft=False), tmp_path / "plain")
    assert "speculative_config" not in json.loads((plain / MODEL_JSON).read_text())
    assert "--request-metrics" not in (plain / "launch_vllm.sh").read_text()


@pytest.mark.parametrize(
    "changed",
    [
        {"engine": {"kv_cache_gib": 3.0}},
        {"engine": {"vllm": "0.24.0"}},
        {"engine": {"tp_size": 2}},
        {"triton": {"max_queue_size": 7}},
    ],
    ids=["cache", "version", "ranks", "triton"],
)
def test_what_the_files_say_is_in_the_key(tmp_path: Path, changed: dict[str, Any]) -> None:
    assert key(config_of(), tmp_path / "a") != key(config_of(**changed), tmp_path / "b")


def test_where_the_server_listens_is_not_in_the_key(tmp_path: Path) -> None:
    ports = {"triton": {"http_port": 8123}, "engine": {"python": "/opt/vllm/bin/python"}}
    assert key(config_of(), tmp_path / "a") == key(config_of(**ports), tmp_path / "b")
