"""A rehearsal replaces what this machine lacks, and leaves everything else as the YAML says."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.deployments import config_of
from toolkit.checkpoints.shape import read_shape
from toolkit.config.load import load_config
from toolkit.config.schema import TorchEngineConfig
from toolkit.pairing.tokenizers import prove_pair
from toolkit.pipeline.hashing import DigestMemo
from toolkit.pipeline.texts import read_texts
from toolkit.standins.prepare import Rehearsal, prepare

CONFIGS = Path(__file__).parents[2] / "configs"


def rehearsal(name: str, folder: Path) -> Rehearsal:
    return prepare(load_config(CONFIGS / f"{name}.yaml"), folder)


def test_the_engine_is_replaced_and_its_layout_and_algorithms_are_not(tmp_path: Path) -> None:
    prepared = rehearsal("llama70b-engine", tmp_path)
    assert prepared.requested.engine == load_config(CONFIGS / "llama70b-engine.yaml").engine
    assert isinstance(prepared.served.engine, TorchEngineConfig)
    assert prepared.served.triton.layout == "bls"
    assert prepared.served.name == prepared.requested.name == "llama70b-engine-rehearsal"
    assert prepared.requested.target.quantization == prepared.served.target.quantization
    assert prepared.requested.target.quantization.quant_algo == "FP8"
    assert rehearsal("llama70b", tmp_path).served.triton.layout == "llmapi"


def test_qwens_padding_is_kept_row_by_row_and_repaired(tmp_path: Path) -> None:
    prepared = rehearsal("qwen2.5-72b-int8", tmp_path)
    assert prepared.requested.draft is not None
    target, draft = prepared.requested.target.checkpoint, prepared.requested.draft.checkpoint
    assert read_shape(target).vocab_size - read_shape(draft).vocab_size == 152064 - 151936
    proof = prove_pair(target, draft, DigestMemo(tmp_path / "memo.json"), tp_size=2)
    assert proof.vocab_size == read_shape(draft).vocab_size
    assert any(
        finding.check == "vocabulary" and "trimmed" in finding.detail for finding in proof.findings
    )


@pytest.mark.parametrize("missing", [True, False])
def test_texts_that_are_not_here_are_made_up_and_listed_as_such(
    missing: bool, tmp_path: Path
) -> None:
    text = (CONFIGS / "qwen3-32b.yaml").read_text()
    text = text.replace(
        "quickstart/data/", "nowhere/" if missing else f"{CONFIGS}/quickstart/data/"
    )
    (tmp_path / "a.yaml").write_text(text)
    prepared = prepare(load_config(tmp_path / "a.yaml", texts=False), tmp_path / "made")
    assert any("which is not here" in line for line in prepared.replaced) == missing
    assert (
        prepared.requested.calibration is not None
        and prepared.requested.calibration.dataset.is_file()
    )
    prompts = prepared.served.validation.prompts.read_text().splitlines()
    assert len(prompts) == len(set(prompts)) == prepared.served.validation.max_prompts


def test_the_list_of_replacements_names_no_path(tmp_path: Path) -> None:
    """The list is a part of a key, and a key must not depend on where files are."""
    lines = rehearsal("quickstart", tmp_path).replaced
    assert not any("/" in line and str(CONFIGS.parent) in line for line in lines)
    text = "\n".join(lines)
    assert "hidden 192 ->" in text and "engine torch: " in text


def test_a_draft_length_that_is_to_be_measured_is_chosen_and_others_stay(tmp_path: Path) -> None:
    file = CONFIGS / "llama405b-tp8.yaml"
    prepared = prepare(load_config(file), tmp_path)
    assert prepared.requested.speculation.max_draft_len == 5
    prepared = prepare(load_config(file, ["speculation.max_draft_len=auto"]), tmp_path)
    assert (
        prepared.requested.speculation.max_draft_len
        == prepared.served.speculation.max_draft_len
        == 4
    )
    assert "speculation.max_draft_len auto: 4" in prepared.replaced


def test_a_rehearsal_says_that_vllm_itself_is_not_run(tmp_path: Path) -> None:
    prepared = prepare(config_of("vllm"), tmp_path)
    assert prepared.requested.vllm_engine is not None
    assert isinstance(prepared.served.engine, TorchEngineConfig)
    assert prepared.served.triton.layout == "llmapi"
    [engine, note] = [
        line for line in prepared.replaced if line.lower().startswith(("engine", "vllm"))
    ]
    assert engine.startswith("engine vllm: the embedded engine on this machine")
    assert note.startswith("vLLM 0.24.0: not run; the checkpoints, arguments and repository")


@pytest.mark.parametrize(
    ("name", "overrides", "expected"),
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
def test_another_accept_rule_than_the_real_one_is_listed(
    name: str, overrides: list[str], expected: str | None, tmp_path: Path
) -> None:
    prepared = prepare(load_config(CONFIGS / f"{name}.yaml", overrides), tmp_path)
    lines = [
        line for line in prepared.replaced if line.startswith("accept rule of sampled tokens, ")
    ]
    assert len(lines) == (expected is not None) and all(expected in line for line in lines)
    # The rule that the YAML states is the rule that is served.
    assert prepared.served.speculation.acceptance == prepared.requested.speculation.acceptance


def test_every_rank_of_a_pipeline_has_a_layer(tmp_path: Path) -> None:
    config = load_config(CONFIGS / "llama70b-engine.yaml", ["engine.pp_size=4"])
    assert read_shape(prepare(config, tmp_path).requested.target.checkpoint).num_layers == 4


def test_conversations_are_written_out_since_the_stand_ins_have_no_template(
    tmp_path: Path,
) -> None:
    """The YAML names a hub id that is not fetched, so the contents alone are written."""
    messages = Path(__file__).parents[1] / "data" / "messages.jsonl"
    text = (CONFIGS / "qwen3-32b.yaml").read_text()
    for name in ("calib", "heldout", "prompts"):
        text = text.replace(f"quickstart/data/{name}.jsonl", str(messages))
    (tmp_path / "a.yaml").write_text(text)
    prepared = prepare(load_config(tmp_path / "a.yaml", texts=False), tmp_path / "made")
    calibration = prepared.requested.calibration
    assert calibration is not None
    lines = read_texts(calibration.dataset, "text")
    assert lines[1] == "Answer in one word.\nWhich month follows May?\nJune."
    assert read_texts(prepared.requested.validation.prompts, "prompt")[0] == "What is a queue?"
    assert any(
        line == "calibration.dataset messages.jsonl: its first 4 texts, with the conversations"
        " written out"
        for line in prepared.replaced
    )
