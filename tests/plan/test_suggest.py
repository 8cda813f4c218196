"""The YAML that `toolkit init` writes loads, can work, and takes no more GPUs than needed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.checkpoints import write_checkpoint
from tests.support.deployments import LLAMA, LLAMA_DRAFT, QWEN, QWEN_DRAFT
from toolkit.config.load import load_config
from toolkit.config.schema import TensorRtLlmConfig, TorchEngineConfig
from toolkit.errors import CheckpointError, UsageError
from toolkit.facts.gpus import GPUS
from toolkit.facts.models import CONFIGS
from toolkit.plan.make import gpu_from_user, make_plan
from toolkit.plan.suggest import suggest


@pytest.mark.parametrize(
    "target, draft, gpu, kind, algo, tp_size",
    [
        (LLAMA, LLAMA_DRAFT, "H200", "trtllm_pytorch", "FP8", 1),
        (LLAMA, LLAMA_DRAFT, "L40S", "trtllm_pytorch", "FP8", 4),
        (LLAMA, LLAMA_DRAFT, "B200", "trtllm_pytorch", "FP8", 1),
        (LLAMA, LLAMA_DRAFT, "A100", "trt_engine", "W8A16", 2),
        (QWEN, QWEN_DRAFT, "A100", "trt_engine", "W8A8_SQ_PER_CHANNEL", 2),
        # Four would hold a full batch, but the draft's 14 heads cannot be split over four.
        (QWEN, QWEN_DRAFT, "A100-40GB", "trt_engine", "W8A8_SQ_PER_CHANNEL", 2),
        ("meta-llama/Llama-3.1-405B-Instruct", LLAMA_DRAFT, "H200", "trtllm_pytorch", "FP8", 4),
        (QWEN, None, "A100", "trt_engine", "W8A8_SQ_PER_CHANNEL", 2),
        (QWEN_DRAFT, None, None, "torch", "W8A8_SQ_PER_CHANNEL", 1),
    ],
)
def test_what_is_written_can_work_on_as_few_gpus_as_that_takes(
    tmp_path: Path,
    target: str,
    draft: str | None,
    gpu: str | None,
    kind: str,
    algo: str,
    tp_size: int,
) -> None:
    row = None if gpu is None else GPUS[gpu]
    made = suggest(Path(target), None if draft is None else Path(draft), row, folder=tmp_path)
    file = tmp_path / made.file_name
    file.write_text(made.text)
    config = load_config(file, texts=False)
    assert {config.validation.prompts, config.calibration and config.calibration.dataset} == {
        tmp_path / file_name for file_name in made.texts
    }
    assert make_plan(config) == made.plan
    assert config.name == made.name == file.stem
    assert (config.engine.kind, config.target.quantization.quant_algo) == (kind, algo)
    if isinstance(config.engine, TensorRtLlmConfig):
        assert config.engine.tp_size == tp_size


def test_what_fits_nowhere_says_what_stood_against_it(tmp_path: Path) -> None:
    with pytest.raises(
        UsageError, match=r"no deployment that was tried can work: .* do not fit L4"
    ) as caught:
        suggest(
            Path("meta-llama/Llama-3.1-405B-Instruct"),
            Path(LLAMA_DRAFT),
            GPUS["L4"],
            folder=tmp_path,
        )
    assert caught.value.hint


def test_lengths_are_those_that_both_models_reach(tmp_path: Path) -> None:
    made = suggest(Path(QWEN_DRAFT), Path(QWEN_DRAFT), None, folder=tmp_path)
    assert "max_seq_len: 1024" in made.text


def test_folders_beneath_the_file_are_written_relative_and_odd_names_in_quotes(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "models: my own"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIGS[QWEN_DRAFT]))
    made = suggest(folder, None, None, folder=tmp_path)
    assert "checkpoint: 'models: my own'" in made.text
    assert made.name == "models-my-own"


def test_a_small_model_on_a_cpu_gets_one_thread_and_a_measured_draft_length(tmp_path: Path) -> None:
    """With all threads and with chunks 10 ms apart, the shipped pair fails its own latency gate."""
    shipped = Path(__file__).parents[2] / "configs" / "quickstart"
    (tmp_path / "small.yaml").write_text(
        suggest(shipped / "target", shipped / "draft", None, folder=tmp_path).text
    )
    small = load_config(tmp_path / "small.yaml", texts=False)
    assert isinstance(small.engine, TorchEngineConfig)
    assert (
        small.engine.threads,
        small.triton.stream_interval_ms,
        small.speculation.max_draft_len,
    ) == (1, 0, "auto")
    assert (
        "min_speedup" not in small.validation.latency.model_fields_set
    )  # a stated one fails where nothing is drafted
    (tmp_path / "large.yaml").write_text(
        suggest(Path(QWEN_DRAFT), None, None, folder=tmp_path).text
    )
    large = load_config(tmp_path / "large.yaml", texts=False)
    assert isinstance(large.engine, TorchEngineConfig)
    assert (large.engine.threads, large.triton.stream_interval_ms) == (None, 10)


def test_the_file_s_name_is_the_deployment_s(tmp_path: Path) -> None:
    made = suggest(Path(QWEN_DRAFT), None, None, folder=tmp_path, file_name="My pair..2.yml")
    assert made.name == "My-pair.2"
    assert "toolkit plan 'My pair..2.yml'" in made.text and "name: My-pair.2 " in made.text


@pytest.mark.parametrize(
    "name, row",
    [("h100", "H100"), ("Rtx4090", "RTX4090"), ("a100-40gb", "A100-40GB"), ("H100-80GB", "H100")],
)
def test_a_gpu_is_found_however_it_is_cased(name: str, row: str) -> None:
    assert gpu_from_user(name) is GPUS[row]


def test_an_unknown_gpu_gets_a_suggestion() -> None:
    with pytest.raises(UsageError, match="did you mean H200"):
        gpu_from_user("h20")
    with pytest.raises(UsageError, match="known: A100-40GB") as caught:
        gpu_from_user("MI300X")
    assert "did you mean" not in str(caught.value)


def test_a_checkpoint_that_is_cut_off_is_refused(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "model")
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="bytes long, but its header asks for"):
        suggest(folder, None, None, folder=tmp_path)


def test_a_target_with_a_chat_template_is_asked_for_messages(tmp_path: Path) -> None:
    target = write_checkpoint(tmp_path / "model")
    raw = suggest(target, None, None, folder=tmp_path)
    assert "messages" not in raw.text
    assert raw.texts["data/prompts.jsonl"].startswith('{"prompt": "..."} on each line')

    (target / "chat_template.jinja").write_text("{{ messages[0].content }}")
    chat = suggest(target, None, None, folder=tmp_path)
    assert (
        "dataset: data/calib.jsonl # one JSON object with `messages` per line, similar to your"
        " traffic; the target has a chat template, which writes them\n"
    ) in chat.text
    assert "prompts: data/prompts.jsonl # one JSON object with `messages` per line" in chat.text
    assert '{"role": "assistant", "content": "..."}' in chat.texts["data/calib.jsonl"]
    (tmp_path / chat.file_name).write_text(chat.text)
    assert make_plan(load_config(tmp_path / chat.file_name, texts=False)) == chat.plan
