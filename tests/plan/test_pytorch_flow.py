"""What a deployment of the engine flow becomes in the PyTorch flow: the keys, the plan, and a file
that works.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.deployments import base
from toolkit.config.load import load_config
from toolkit.config.schema import DeploymentConfig, TrtEngineConfig, TrtllmPytorchConfig
from toolkit.plan.pytorch_flow import ONLY_ENGINE_FLOW, to_pytorch_flow, yaml_text


def translated(**keys: Any) -> tuple[dict[str, Any], dict[str, tuple[str, str | None]]]:
    """The new content, and path -> (step, value after) of what changes in the YAML. keys: sections
    and keys laid over a deployment of the engine flow: `engine__builder="local"`.
    """
    data = base("engine")
    for name, value in keys.items():
        section, key = name.split("__")
        data.setdefault(section, {})[key] = value
    before = yaml.safe_dump(data)
    translation = to_pytorch_flow(data)
    assert yaml.safe_dump(data) == before  # the caller's content stays as it was
    DeploymentConfig.model_validate(translation.data)
    changes = {
        change.path: (change.step, change.after)
        for change in translation.changes
        if change.step != "elsewhere"
    }
    assert all(change.why for change in translation.changes)
    return translation.data, changes


def test_only_the_kind_and_the_name_change_where_nothing_else_has_to() -> None:
    data, changes = translated()
    assert changes == {
        "name": ("changed", "x-pytorch"),
        "engine.kind": ("changed", "trtllm_pytorch"),
    }
    expected = base("engine") | {"name": "x-pytorch"}
    expected["engine"] = {**expected["engine"], "kind": "trtllm_pytorch"}
    assert data == expected and list(data) == list(base("engine"))


@pytest.mark.parametrize(
    ("keys", "path", "change"),
    [
        ({"engine__builder": "container"}, "engine.builder", ("removed", None)),
        ({"engine__multiple_profiles": True}, "engine.multiple_profiles", ("removed", None)),
        ({"engine__opt_num_tokens": 64}, "engine.opt_num_tokens", ("removed", None)),
        ({"engine__tensorrt_llm": "1.0"}, "engine.tensorrt_llm", ("changed", "1.2.1")),
        ({"triton__layout": "bls"}, "triton.layout", ("changed", "llmapi")),
        ({"triton__on_draft_failure": "plain"}, "triton.on_draft_failure", ("removed", None)),
        ({"speculation__acceptance": "rejection"}, "speculation.acceptance", ("removed", None)),
    ],
)
def test_what_the_other_flow_lacks_is_changed_with_a_reason(
    keys: dict[str, Any], path: str, change: tuple[str, str | None]
) -> None:
    data, changes = translated(**keys)
    assert changes[path] == change
    section, key = path.split(".")
    assert data.get(section, {}).get(key) == change[1]


@pytest.mark.parametrize(
    "keys",
    [
        {"engine__tensorrt_llm": "1.2.0"},
        {"triton__layout": "auto"},
        {"speculation__acceptance": "sample_match"},
        {"engine__tokens_per_block": 64},
        {"engine__enable_block_reuse": False},
    ],
)
def test_what_both_flows_have_stays(keys: dict[str, Any]) -> None:
    data, changes = translated(**keys)
    assert set(changes) == {"name", "engine.kind"}
    for name, value in keys.items():
        section, key = name.split("__")
        assert data[section][key] == value


def test_every_key_that_only_the_engine_flow_has_is_known() -> None:
    only = TrtEngineConfig.model_fields.keys() - TrtllmPytorchConfig.model_fields.keys()
    assert only == ONLY_ENGINE_FLOW.keys()


def test_the_written_file_loads_as_what_was_planned(tmp_path: Path) -> None:
    data = base("engine")
    data["engine"]["builder"] = "local"
    data["engine"]["tensorrt_llm"] = "1.2.0"
    file = tmp_path / "new.yaml"
    file.write_text(yaml_text(to_pytorch_flow(data), "old.yaml"))
    config = load_config(file, texts=False)
    assert config.pytorch_flow is not None and config.pytorch_flow.version == "1.2.0"
    comments = [line for line in file.read_text().splitlines() if line.startswith("#")]
    assert comments[0].startswith("# old.yaml in TensorRT-LLM's PyTorch flow")
    assert any("engine.builder: local -> removed; nothing is built" in line for line in comments)
