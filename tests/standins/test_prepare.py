"""What a rehearsal replaces, and what it leaves as the YAML says."""

from __future__ import annotations

from pathlib import Path

import pytest

from toolkit.checkpoints.shape import read_shape
from toolkit.config.load import load_config
from toolkit.config.schema import TorchEngineConfig
from toolkit.pairing.tokenizers import prove_pair
from toolkit.pipeline.hashing import DigestMemo
from toolkit.standins.prepare import Rehearsal, prepare

CONFIGS = Path(__file__).parents[2] / "configs"


def rehearsal(name: str, folder: Path) -> Rehearsal:
    return prepare(load_config(CONFIGS / f"{name}.yaml"), folder)


def test_the_engine_is_replaced_and_its_layout_and_algorithms_are_not(tmp_path: Path) -> None:
    found = rehearsal("llama70b-engine", tmp_path)
    assert found.asked.engine == load_config(CONFIGS / "llama70b-engine.yaml").engine
    assert isinstance(found.served.engine, TorchEngineConfig)
    assert found.served.triton.layout == "bls"
    assert found.served.name == found.asked.name == "llama70b-engine-rehearsal"
    assert found.asked.target.quantization == found.served.target.quantization
    assert found.asked.target.quantization.quant_algo == "FP8"
    assert rehearsal("llama70b", tmp_path).served.triton.layout == "llmapi"


def test_qwens_padding_is_kept_row_by_row_and_repaired(tmp_path: Path) -> None:
    found = rehearsal("qwen2.5-72b-int8", tmp_path)
    assert found.asked.draft is not None
    target, draft = found.asked.target.checkpoint, found.asked.draft.checkpoint
    assert read_shape(target).vocab_size - read_shape(draft).vocab_size == 152064 - 151936
    proof = prove_pair(target, draft, DigestMemo(tmp_path / "memo.json"), tp_size=2)
    assert proof.vocab_size == read_shape(draft).vocab_size
    assert any(
        finding.check == "vocabulary" and "trimmed" in finding.detail for finding in proof.findings
    )


@pytest.mark.parametrize("missing", [True, False])
def test_texts_that_are_not_here_are_made_up_and_said_to_be(missing: bool, tmp_path: Path) -> None:
    text = (CONFIGS / "qwen3-32b.yaml").read_text()
    text = text.replace(
        "quickstart/data/", "nowhere/" if missing else f"{CONFIGS}/quickstart/data/"
    )
    (tmp_path / "a.yaml").write_text(text)
    found = prepare(load_config(tmp_path / "a.yaml", texts=False), tmp_path / "made")
    assert any("which is not here" in line for line in found.replaced) == missing
    assert found.asked.calibration is not None and found.asked.calibration.dataset.is_file()
    prompts = found.served.validation.prompts.read_text().splitlines()
    assert len(prompts) == len(set(prompts)) == found.served.validation.max_prompts


def test_the_replaced_are_said_without_a_path(tmp_path: Path) -> None:
    """They are a part of a key, which must not depend on where things lie."""
    lines = rehearsal("quickstart", tmp_path).replaced
    assert not any("/" in line and str(CONFIGS.parent) in line for line in lines)
    said = "\n".join(lines)
    assert "hidden 192 ->" in said and "engine torch: " in said


def test_a_draft_length_that_is_to_be_measured_is_chosen_and_others_stay(tmp_path: Path) -> None:
    file = CONFIGS / "llama405b-tp8.yaml"
    found = prepare(load_config(file), tmp_path)
    assert found.asked.speculation.max_draft_len == 5
    found = prepare(load_config(file, ["speculation.max_draft_len=auto"]), tmp_path)
    assert found.asked.speculation.max_draft_len == found.served.speculation.max_draft_len == 4
    assert "speculation.max_draft_len auto: 4" in found.replaced


@pytest.mark.parametrize(
    ("name", "asked", "said"),
    [
        (
            "llama70b",
            [],
            "sample_match in trtllm_pytorch, over its draft's likeliest token: rejection; ",
        ),
        ("llama70b-engine", [], "sample_match in trt_engine: rejection; "),
        ("llama70b-engine", ["speculation.acceptance=sample_match"], None),
        ("llama70b-engine", ["speculation.acceptance=rejection"], None),
        ("llama70b", ["speculation.kind=none"], None),
        ("quickstart", [], None),
    ],
)
def test_another_accept_rule_than_the_real_one_is_said(
    name: str, asked: list[str], said: str | None, tmp_path: Path
) -> None:
    found = prepare(load_config(CONFIGS / f"{name}.yaml", asked), tmp_path)
    lines = [line for line in found.replaced if line.startswith("accept rule of sampled tokens, ")]
    assert len(lines) == (said is not None) and all(said in line for line in lines)
    assert (
        found.served.speculation.acceptance == found.asked.speculation.acceptance
    )  # what is stated is what is served


def test_every_rank_of_a_pipeline_has_a_layer(tmp_path: Path) -> None:
    config = load_config(CONFIGS / "llama70b-engine.yaml", ["engine.pp_size=4"])
    assert read_shape(prepare(config, tmp_path).asked.target.checkpoint).num_layers == 4
