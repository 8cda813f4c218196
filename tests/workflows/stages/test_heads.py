"""A deployment with an EAGLE-3 head, from the YAML to the repository that vLLM reads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from tests.support.cli import write_config
from tests.support.eagle3 import head_config, write_eagle3_target, write_head
from tests.support.stages import Silent
from toolkit.config.load import load_config
from toolkit.config.schema import DeploymentConfig
from toolkit.errors import PairingError, UsageError
from toolkit.pipeline.run import run_stages
from toolkit.pipeline.stage import Done
from toolkit.pipeline.store import Store
from toolkit.words import ROLES
from toolkit.workflows.folders import Workplace
from toolkit.workflows.stages.compile import compile_stage
from toolkit.workflows.stages.package import package_stage
from toolkit.workflows.stages.pair import pair_stage
from toolkit.workflows.stages.quantize import quantize_stage
from toolkit.workflows.stages.sequence import embedded_stages


def config_of(tmp_path: Path, head: Path, **sections: object) -> DeploymentConfig:
    target = tmp_path / "models" / "target"
    if not target.exists():
        write_eagle3_target(target)
    settings = {
        "engine": {"kind": "vllm", "device": "cpu", "max_input_len": 64, "max_seq_len": 128},
        "speculation": {"kind": "eagle3", "max_draft_len": 3},
        "calibration": None,
        **sections,
    }
    return load_config(write_config(tmp_path, (target, head), **settings))


def built(config: DeploymentConfig, store: Store, workplace: Workplace) -> dict[str, Done]:
    stages = [
        pair_stage(config, store.memo),
        *(quantize_stage(config, role, store.memo) for role in ROLES),
        *(compile_stage(config, role, workplace) for role in ROLES),
        package_stage(config, ROLES),
    ]
    return dict(run_stages(stages, store, config.name, Silent()))


def test_a_head_goes_through_all_stages_up_to_package(tmp_path: Path) -> None:
    head = write_head(tmp_path / "models" / "head")
    workplace = Workplace(tmp_path)
    done = built(config_of(tmp_path, head), Store(workplace.store), workplace)
    assert done["pair"].record.head.captured_layers == (1, 2, 3)
    assert done["quantize/draft"].record.quant_algo is None
    repository = done["package"].record.path
    args = json.loads((repository / "vllm_model/1/model.json").read_text())
    assert args["speculative_config"] == {
        "method": "eagle3",
        "model": "/models/vllm_model/1/engines/draft",
        "num_speculative_tokens": 3,
    }
    packaged = repository / "vllm_model/1/engines/draft"
    for name in ("config.json", "model.safetensors"):
        assert (packaged / name).read_bytes() == (head / name).read_bytes()


def test_tensorrt_llm_is_told_which_layers_the_head_reads(tmp_path: Path) -> None:
    """LLM() reads no layers in the head's config.json; from the pair to model.yaml."""
    head = write_head(tmp_path / "models" / "head")
    workplace = Workplace(tmp_path)
    engine = {"kind": "trtllm_pytorch", "max_input_len": 64, "max_seq_len": 128}
    config = config_of(tmp_path, head, engine=engine, triton={"layout": "llmapi"})
    done = built(config, Store(workplace.store), workplace)
    assert done["pair"].record.head.shares == ("embed_tokens.weight",)
    assert done["compile/draft"].record.quant_algo is None
    version = done["package"].record.path / "tensorrt_llm/1"
    settings = yaml.safe_load((version / "model.yaml").read_text())
    assert settings["speculative_config"] == {
        "decoding_type": "Eagle",
        "max_draft_len": 3,
        "speculative_model": "/models/tensorrt_llm/1/engines/draft",
        "eagle3_layers_to_capture": [1, 2, 3],
        "allow_advanced_sampling": True,
    }
    assert settings["toolkit"]["log_probs"] == 0
    plain = yaml.safe_load((version / "plain.yaml").read_text())
    assert "speculative_config" not in plain
    for name in ("config.json", "model.safetensors"):
        packaged = version / "engines/draft" / name
        assert packaged.read_bytes() == (head / name).read_bytes()


def test_another_head_is_built_from_the_pair_on(tmp_path: Path) -> None:
    head, workplace = write_head(tmp_path / "models" / "head"), Workplace(tmp_path)
    config, store = config_of(tmp_path, head), Store(workplace.store)
    first = built(config, store, workplace)
    again = built(config, store, workplace)
    assert all(done.reused for done in again.values())
    file = head / "config.json"
    file.write_text(file.read_text().replace('"rope_theta": 10000.0', '"rope_theta": 9999.0'))
    second = built(config, Store(workplace.store), workplace)
    changed = {name for name in first if first[name].entry.key != second[name].entry.key}
    assert changed == set(first) - {"quantize/target"}


def test_commands_that_run_both_models_in_this_process_refuse_a_head(tmp_path: Path) -> None:
    config = config_of(tmp_path, write_head(tmp_path / "models" / "head"))
    workplace = Workplace(tmp_path)
    with pytest.raises(UsageError, match="which cannot run one"):
        embedded_stages(config, workplace, Store(workplace.store).memo)


def test_a_head_of_another_target_stops_the_build(tmp_path: Path) -> None:
    config = head_config(eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 2, 9]})
    head, workplace = write_head(tmp_path / "models" / "head", config=config), Workplace(tmp_path)
    with pytest.raises(PairingError, match="captures layer 9, and the target has 4"):
        built(config_of(tmp_path, head), Store(workplace.store), workplace)
