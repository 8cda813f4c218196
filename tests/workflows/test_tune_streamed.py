"""Acceptance of models that do not fit into memory: from their checkpoints, with nothing compiled
and nothing written by the target.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.support.checkpoints import write_checkpoint
from tests.support.deployments import calibrated, config_of, for_tensorrt_llm
from tests.support.stages import Silent
from toolkit.config.schema import DeploymentConfig, TorchEngineConfig
from toolkit.engines.embedded.engine import open_checkpoint
from toolkit.errors import UsageError
from toolkit.pipeline.store import Store
from toolkit.records.build import QuantizedCheckpoint
from toolkit.speculative.text import TextCodec
from toolkit.workflows.build import build
from toolkit.workflows.deployment import embedded, embedded_twin
from toolkit.workflows.folders import Workplace
from toolkit.workflows.measured_runtime import MeasuredRuntime
from toolkit.workflows.measured_streamed import (
    COMPUTE_S,
    MIN_TEXTS,
    PROMPT_TOKENS,
    StreamedModels,
    all_texts,
    evenly,
    given_texts,
    number_of_texts,
)
from toolkit.workflows.stages import sequence
from toolkit.workflows.tune import tune, tune_grid


def silent(done: int, total: int | None, what: str) -> None:
    pass


def checkpoint_of(path: Path) -> QuantizedCheckpoint:
    return QuantizedCheckpoint("target", path, None, None, "LlamaForCausalLM", 258, 0, None, ())


def with_prompts(config: DeploymentConfig, rows: list[dict[str, str]]) -> DeploymentConfig:
    config.validation.prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return config


@pytest.fixture
def config(tiny_pair: tuple[Path, Path], tmp_path: Path) -> DeploymentConfig:
    return calibrated(for_tensorrt_llm(tiny_pair, tmp_path, gpu="H200", count=1), tmp_path)


Given = Callable[[DeploymentConfig], tuple[str, list[tuple[str, str]]]]


@pytest.fixture
def given() -> Given:
    """(source, [(prompt, output) as text]) of the texts of a deployment."""

    def of(config: DeploymentConfig) -> tuple[str, list[tuple[str, str]]]:
        codec = TextCodec.from_file(config.target.checkpoint / "tokenizer.json")
        texts = given_texts(config, embedded(embedded_twin(config)), codec)
        return texts.source, [
            (codec.decode(text.prompt), codec.decode(text.output)) for text in texts.texts
        ]

    return of


def test_completions_come_first_then_held_out_text_then_prompts(
    config: DeploymentConfig, given: Given
) -> None:
    """Completions are cut to max_tokens; a prompt without one is left out."""
    rows = [
        {"prompt": "def f(x):", "completion": " return x + 1, x + 2", "domain": "code"},
        {"prompt": "def g(x):"},
    ]
    written = with_prompts(config, rows)
    assert config.validation.max_tokens == 12
    assert given(written) == ("completions", [("def f(x):", " return x + ")])

    plain = with_prompts(config, [{"prompt": "p" * 30}])
    source, texts = given(plain)
    assert source == "held-out text"
    assert len(texts) == 4  # a tenth of 40 lines
    assert all(prompt.startswith("def f3") and len(output) == 12 for prompt, output in texts)

    without = plain.model_copy(update={"calibration": None})
    assert given(without) == ("prompts", [("p" * 6, "p" * 12)])  # BOS and a quarter of the tokens
    with pytest.raises(UsageError, match="no text is long enough") as refusal:
        given(with_prompts(without, [{"prompt": "p"}]))
    assert "`completion`" in str(refusal.value.hint)


def test_as_many_texts_are_read_as_the_estimate_allows(tmp_path: Path) -> None:
    """Few of a large target, all of a small one; and they come from all parts of the file."""
    engine = TorchEngineConfig(device="cpu")
    small = checkpoint_of(write_checkpoint(tmp_path / "small"))
    texts = [(0,) * (PROMPT_TOKENS + 64)] * 1000
    assert number_of_texts(small, texts, engine) == 1000
    large = tmp_path / "large"
    large.mkdir()
    stated = json.loads((small.path / "config.json").read_text())
    stated |= {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80}
    stated |= {"num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128}
    (large / "config.json").write_text(json.dumps(stated))
    count = number_of_texts(checkpoint_of(large), texts, engine)
    assert MIN_TEXTS <= count < 1000
    assert COMPUTE_S == 3600.0
    assert number_of_texts(checkpoint_of(large), [(0,) * 10**6] * 20, engine) == MIN_TEXTS


def test_the_estimate_is_said_before_a_layer_is_read(
    config: DeploymentConfig, tmp_path: Path
) -> None:
    engine = embedded(embedded_twin(config))
    codec = TextCodec.from_file(config.target.checkpoint / "tokenizer.json")
    texts = all_texts(evenly(given_texts(config, engine, codec), 3))
    reports: list[str] = []
    models = StreamedModels(
        texts, engine, tmp_path / "resume", lambda done, total, what: reports.append(what)
    )
    assert reports == []
    models.logits_of(checkpoint_of(config.target.checkpoint))
    tokens = sum(map(len, texts))
    assert reports[0].startswith(
        f"target NO_QUANT: reading 3 texts of {tokens} tokens, one layer at a time: "
    )
    assert "from the disk" in reports[0]
    assert "TFLOP" in reports[0]
    assert reports[1] == "target NO_QUANT: layers x texts"


class Killed(Exception):
    pass


def test_a_killed_pass_goes_on_in_the_next_run(config: DeploymentConfig, tmp_path: Path) -> None:
    engine = embedded(embedded_twin(config))
    texts, folder = [(1, 2, 3, 4), (5, 6, 7)], tmp_path / "resume"

    def kill(done: int, total: int | None, what: str) -> None:
        if what.endswith("layers x texts") and done > len(texts):
            raise Killed

    with pytest.raises(Killed):
        StreamedModels(texts, engine, folder, kill).logits_of(
            checkpoint_of(config.target.checkpoint)
        )
    reports: list[str] = []
    StreamedModels(texts, engine, folder, lambda done, total, what: reports.append(what)).logits_of(
        checkpoint_of(config.target.checkpoint)
    )
    assert reports[1] == "target NO_QUANT: going on after a killed run; layers before"


@pytest.mark.slow
def test_tune_streams_on_request_and_compiles_nothing(
    config: DeploymentConfig, tmp_path: Path
) -> None:
    workplace = Workplace(tmp_path)
    advice, folder = tune(config, workplace, Silent(), Store(workplace.store), stream=True)
    assert (advice.costs_are, advice.texts_are) == ("predicted", "held-out text")
    assert {(candidate.name, candidate.drafter) for candidate in advice.candidates} == {
        ("draft", "draft_target"),
        ("ngram", "ngram"),
    }
    assert advice.first_choices is not None
    assert 0.0 <= advice.first_choices < 1.0
    assert (folder / "advice.json").is_file()
    assert {"pair", "quantize", "tune"} == {
        entry.name for entry in workplace.store.iterdir() if entry.name[0] != "."
    }


@pytest.mark.slow
def test_on_its_own_completions_a_target_is_measured_as_if_it_wrote(
    config: DeploymentConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same counts of greedy decoding, streamed and with both models in memory."""
    monkeypatch.setenv("CXX", "no-such-compiler")  # eager, as the streamed layers are
    path = config.target.checkpoint
    codec = TextCodec.from_file(path / "tokenizer.json")
    engine = open_checkpoint(path, dtype="bfloat16", max_seq_len=64)
    runtime = MeasuredRuntime(engine, None, codec, eos_token_ids=(257,))
    prompts = [f"def f{number}(x):" for number in range(96)]
    outputs = runtime.write([codec.encode(prompt) for prompt in prompts], 4, 0.0)
    # Random models write bytes; only those that are text can be given as text.
    rows = [
        {"prompt": prompt, "completion": codec.decode(ids)}
        for prompt, ids in zip(prompts, outputs, strict=True)
        if codec.encode(codec.decode(ids), special_tokens=False) == list(ids)
    ]
    assert len(rows) > 1
    validation = config.validation.model_copy(update={"max_tokens": 4, "max_prompts": 96})
    config = with_prompts(config.model_copy(update={"validation": validation}), rows)
    workplace = Workplace(tmp_path)
    store = Store(workplace.store)
    streamed, _ = tune(config, workplace, Silent(), store, stream=True)
    loaded, _ = tune(config, workplace, Silent(), store)
    assert (streamed.texts_are, streamed.first_choices) == ("completions", 1.0)
    assert loaded.texts_are == "written by the target"

    def greedy(advice: object) -> list[float]:
        return [
            prediction.acceptance_length
            for candidate in sorted(advice.candidates, key=lambda candidate: candidate.name)
            for prediction in candidate.predictions
            if (prediction.mode, prediction.batch) == ("greedy", 1)
        ]

    assert np.allclose(greedy(streamed), greedy(loaded))


@pytest.mark.slow
def test_auto_streams_where_the_models_do_not_fit(
    config: DeploymentConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No small pair is too large for a machine that tests run on, so the answer is set."""
    monkeypatch.setattr(sequence, "must_stream", lambda config: True)
    auto = config.speculation.model_copy(update={"max_draft_len": "auto"})
    config = config.model_copy(update={"speculation": auto})
    workplace = Workplace(tmp_path)
    store = Store(workplace.store)
    built = build(config, workplace, Silent(), store, until="package")
    assert [name.partition("/")[0] for name in built.stages] == [
        "pair",
        *["quantize"] * 2,
        "tune",
        *["compile"] * 2,
        "package",
    ]
    assert built.stages["tune"].record.texts_are == "held-out text"
    assert built.stages["package"].record.max_draft_len == 0  # random models agree on nothing
    assert not build(config, workplace, Silent(), store, until="package").changed


@pytest.mark.slow
def test_the_grid_streams_every_precision(config: DeploymentConfig, tmp_path: Path) -> None:
    workplace = Workplace(tmp_path)
    grid, _ = tune_grid(config, workplace, Silent(), Store(workplace.store), stream=True)
    assert grid.texts_are == "held-out text"
    assert grid.costs_are == "predicted for H200"
    assert {(cell.target, cell.draft) for cell in grid.cells} == {
        (target, draft) for target in ("NO_QUANT", "FP8") for draft in ("NO_QUANT", "FP8")
    }
    quality = {target.quant_algo: target for target in grid.targets}
    assert quality["NO_QUANT"].kl.estimate == 0.0 < quality["FP8"].kl.estimate < 0.1
    assert not (workplace.store / "advised").exists()
    assert not (workplace.store / "compile").exists()


def test_what_is_timed_here_cannot_be_streamed(tmp_path: Path) -> None:
    workplace = Workplace(tmp_path)
    store = Store(workplace.store)
    with pytest.raises(UsageError, match="--stream has no model in memory"):
        tune(config_of("torch"), workplace, Silent(), store, stream=True)
