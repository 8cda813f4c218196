"""What `toolkit init` writes loads, can work, and is no larger than it has to be."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.plan.conftest import LLAMA, LLAMA_DRAFT, QWEN, QWEN_DRAFT
from toolkit.config.load import load_config
from toolkit.config.schema import TensorRtLlmConfig
from toolkit.errors import UsageError
from toolkit.facts.models import CONFIGS
from toolkit.plan.make import make_plan
from toolkit.plan.suggest import suggest


@pytest.mark.parametrize(
    "target, draft, gpu, kind, algo, tp_size",
    [
        (LLAMA, LLAMA_DRAFT, "H200", "trtllm_pytorch", "FP8", 1),
        (LLAMA, LLAMA_DRAFT, "L40S", "trtllm_pytorch", "FP8", 4),
        (LLAMA, LLAMA_DRAFT, "B200", "trtllm_pytorch", "FP8", 1),
        (LLAMA, LLAMA_DRAFT, "A100", "trt_engine", "W8A16", 2),
        (QWEN, QWEN_DRAFT, "A100", "trt_engine", "W8A8_SQ_PER_CHANNEL", 2),
        # Four would hold a full batch, and the draft's 14 heads do not split over four.
        (QWEN, QWEN_DRAFT, "A100-40GB", "trt_engine", "W8A8_SQ_PER_CHANNEL", 2),
        ("meta-llama/Llama-3.1-405B-Instruct", LLAMA_DRAFT, "H200", "trtllm_pytorch", "FP8", 4),
        (QWEN, None, "A100", "trt_engine", "W8A8_SQ_PER_CHANNEL", 2),
        (QWEN_DRAFT, None, None, "torch", "W8A8_SQ_PER_CHANNEL", 1),
    ],
)
def test_what_is_written_can_work_on_as_few_gpus_as_that_takes(
    tmp_path: Path, target: str, draft: str | None, gpu: str | None, kind: str, algo: str, tp_size: int
) -> None:
    made = suggest(Path(target), None if draft is None else Path(draft), gpu, folder=tmp_path)
    (tmp_path / "data").mkdir()
    for name in ("calib", "prompts"):
        (tmp_path / "data" / f"{name}.jsonl").touch()
    file = tmp_path / f"{made.name}.yaml"
    file.write_text(made.text)
    config = load_config(file)
    assert make_plan(config) == made.plan
    assert (config.engine.kind, config.target.quantization.quant_algo) == (kind, algo)
    if isinstance(config.engine, TensorRtLlmConfig):
        assert config.engine.tp_size == tp_size


def test_what_fits_nowhere_says_what_stood_against_it(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"nothing that was tried can work: .* do not fit L4") as caught:
        suggest(Path("meta-llama/Llama-3.1-405B-Instruct"), Path(LLAMA_DRAFT), "L4", folder=tmp_path)
    assert caught.value.mend


def test_lengths_are_those_that_both_models_reach(tmp_path: Path) -> None:
    made = suggest(Path(QWEN_DRAFT), Path(QWEN_DRAFT), None, folder=tmp_path)
    assert "max_seq_len: 1024" in made.text


def test_folders_beneath_the_file_are_written_relative_and_odd_names_in_quotes(tmp_path: Path) -> None:
    folder = tmp_path / "models: my own"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIGS[QWEN_DRAFT]))
    made = suggest(folder, None, None, folder=tmp_path)
    assert "checkpoint: 'models: my own'" in made.text
    assert made.name == "models-my-own"
