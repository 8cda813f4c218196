"""The advisor's costs of vLLM are those of its own server. A program that takes a set time for each
step stands for it.
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.cli import write_config
from tests.support.stages import Silent
from tests.support.vllm_program import DRAFTED_TOKEN_S, STEP_S, TIMED, fake_python
from toolkit.client import RequestTiming, Statistics
from toolkit.config.load import load_config
from toolkit.config.schema import CalibrationConfig, DeploymentConfig
from toolkit.errors import BackendUnavailable, ServerError, StageError, UsageError
from toolkit.pipeline.stage import key_of
from toolkit.pipeline.store import Store
from toolkit.workflows import measured_vllm
from toolkit.workflows.build import build
from toolkit.workflows.folders import Workplace
from toolkit.workflows.measured_vllm import wave_of, waves_of
from toolkit.workflows.stages.sequence import stages_of
from toolkit.workflows.tune import tune, tune_grid

PROMPTS = ["def f(x):", "def g(x):", "def h(x):", "def i(x):"]


@pytest.fixture
def own_tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Also one wave of every size, and engines that run eagerly, which is quicker here than
    compiling two of them.
    """
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.setattr(measured_vllm, "ROUNDS", 1)
    monkeypatch.setenv("CXX", "no-such-compiler")
    return folder


def loaded(folder: Path, pair: tuple[Path, Path], **sections: Any) -> DeploymentConfig:
    models = {
        role: {"checkpoint": str(path), "quantization": {"quant_algo": "NO_QUANT"}}
        for role, path in zip(("target", "draft"), pair, strict=True)
    }
    engine = {
        "kind": "vllm",
        "python": str(fake_python(folder / "bin")),
        "device": "cpu",
        "dtype": "float32",
        "max_batch_size": 2,
        "max_input_len": 64,
        "max_seq_len": 128,
        "kv_cache_gib": 1,
        **sections.pop("engine", {}),
    }
    validation = {"prompts": "prompts.jsonl", "max_tokens": 24}
    file = write_config(
        folder, pair, name=TIMED, engine=engine, validation=validation, **models, **sections
    )
    (folder / "prompts.jsonl").write_text(
        "".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS)
    )
    return load_config(file)


def automatic(config: DeploymentConfig) -> DeploymentConfig:
    speculation = config.speculation.model_copy(update={"max_draft_len": "auto"})
    return config.model_copy(update={"speculation": speculation})


def timing(
    received_ms: list[float], *, tokens: int = 1, drafted: int | None = None, steps: int = 0
) -> RequestTiming:
    """A request whose chunks came at these times."""
    statistics = Statistics(output_tokens=1 + tokens * (len(received_ms) - 1))
    if drafted is not None:
        statistics = replace(statistics, drafted=drafted, verify_steps=steps)
    chunks = tuple((round(1e6 * time), tokens) for time in received_ms)
    return RequestTiming("", "", (), "length", 0, chunks, statistics)


def test_steps_count_while_all_requests_of_a_wave_run() -> None:
    """The first runs alone up to 50 ms, and the second alone from 80 ms on."""
    first, second = timing([0, 10, 50, 65, 80]), timing([50, 64, 80, 90, 95])
    assert wave_of([first]) == (20e6, 0.0)
    assert wave_of([first, second]) == (15e6, 0.0)
    assert wave_of([first, timing([80, 90, 95])]) is None


def test_drafted_steps_are_counted_by_the_server_and_steps_without_drafts_by_chunks() -> None:
    assert wave_of([timing([0, 10, 20], tokens=3, drafted=16, steps=2)]) == (10e6, 8.0)
    # Two steps came in one chunk.
    assert wave_of([timing([0, 10, 30], tokens=3, drafted=24, steps=3)]) == (10e6, 8.0)
    # Prompt lookup drafted in one step of four.
    assert wave_of([timing([0, 10, 20, 30, 40], drafted=8, steps=1)]) == (10e6, 2.0)
    # Plain steps have one token each, however they arrive.
    assert wave_of([timing([0, 10, 30], tokens=2)]) == (7.5e6, 0.0)


def test_a_wave_that_did_not_run_together_is_sent_again_with_longer_texts() -> None:
    asked: list[int] = []

    class Staggered:
        def measure(self, prompts: list[str], **options: Any) -> list[RequestTiming]:
            asked.append(options["max_tokens"])
            together = len(prompts) == 1 or options["max_tokens"] >= 96
            apart_ms = 0 if together else 500
            return [timing([apart_ms * index, 900 + index]) for index in range(len(prompts))]

    client: Any = Staggered()
    times = waves_of(client, PROMPTS, [1, 2], [0.0], [24, 48, 96])
    assert set(times[0.0].steps) == {1, 2}
    assert asked[2:6] == [24, 24, 48, 96]
    with pytest.raises(StageError, match="2 requests of 48 tokens did not run"):
        waves_of(client, PROMPTS, [1, 2], [0.0], [24, 48])


@pytest.mark.slow
def test_tune_times_the_server_that_will_serve(
    vllm_pair: tuple[Path, Path], tmp_path: Path, own_tmp: Path
) -> None:
    config = loaded(tmp_path, vllm_pair)
    workplace = Workplace(tmp_path)
    store = Store(workplace.store)
    advice, folder = tune(config, workplace, Silent(), store)
    assert (advice.costs_are, advice.rule) == (
        "measured on the server",
        "sample_match_greedy_draft",
    )
    assert {(candidate.name, candidate.drafter) for candidate in advice.candidates} == {
        ("draft", "draft_target"),
        ("ngram", "ngram"),
    }
    assert (folder / "advice.json").is_file()
    for candidate in advice.candidates:
        for mode in ("greedy", "sampled"):
            costs = {(cost.batch, cost.draft_len): cost for cost in candidate.costs[mode]}
            assert set(costs) == {(batch, length) for batch in (1, 2) for length in range(9)}
            for (_, length), cost in costs.items():
                step_ms = cost.draft_ms + cost.verify_ms + cost.host_ms
                least_ms = 1e3 * (STEP_S + DRAFTED_TOKEN_S * length)
                # The program sleeps, which never takes less, and on a busy machine a lot more. A
                # client that reads its first token late sees a shorter time. Tokens in place of
                # steps would be a third.
                assert 0.6 * least_ms < step_ms < 20 * least_ms
                assert (cost.host_ms, cost.samples) == (0.0, 1)
    again, _ = tune(config, workplace, Silent(), store)
    assert again == advice  # it is stored
    elsewhere, _ = tune(config, workplace, Silent(), store, gpu="H200")
    assert elsewhere.costs_are == "predicted"
    assert not list(own_tmp.iterdir())


@pytest.mark.slow
def test_auto_is_decided_by_the_server_before_engines_are_made(
    vllm_pair: tuple[Path, Path], tmp_path: Path, own_tmp: Path
) -> None:
    """Of two random models no draft token is accepted, so the deployment serves without."""
    config = automatic(loaded(tmp_path, vllm_pair))
    workplace = Workplace(tmp_path)
    store = Store(workplace.store)
    built = build(config, workplace, Silent(), store, until="package")
    advice = built.stages["tune"].record
    assert (advice.costs_are, advice.speculate) == ("measured on the server", False)
    args = json.loads((workplace.repository(config.name) / "vllm_model/1/model.json").read_text())
    assert "speculative_config" not in args
    assert not build(config, workplace, Silent(), store, until="package").changed

    def key(other: DeploymentConfig) -> str:
        (stage,) = (
            stage for stage in stages_of(other, workplace, store.memo) if stage.name == "tune"
        )
        return key_of(stage, stage.parts(built.stages))

    def with_engine(**changes: Any) -> DeploymentConfig:
        return config.model_copy(update={"engine": config.engine.model_copy(update=changes)})

    assert key(config) == built.stages["tune"].entry.key
    for changes in ({"dtype": "bfloat16"}, {"max_num_batched_tokens": 512}):
        assert key(with_engine(**changes)) != key(config)
    newer = fake_python(tmp_path / "newer")
    newer.write_text(newer.read_text().replace("2.13.0+cpu", "2.14.0+cpu"))
    assert key(with_engine(python=newer)) != key(config)
    assert key(with_engine(python=fake_python(tmp_path / "moved"))) == key(config)


def test_a_server_that_does_not_start_is_told_with_the_end_of_its_log(
    vllm_pair: tuple[Path, Path], tmp_path: Path, own_tmp: Path
) -> None:
    config = loaded(tmp_path, vllm_pair).model_copy(update={"name": "dies"})
    with pytest.raises(ServerError, match="vLLM ended with exit code 1") as raised:
        tune(config, Workplace(tmp_path), Silent(), Store(tmp_path / "store"))
    assert raised.value.log_tail.endswith("ValueError: no such model")
    assert not list(own_tmp.iterdir())


def test_without_vllm_nothing_is_built(vllm_pair: tuple[Path, Path], tmp_path: Path) -> None:
    config = loaded(tmp_path, vllm_pair, engine={"python": str(tmp_path / "none")})
    workplace = Workplace(tmp_path)
    store = Store(workplace.store)
    with pytest.raises(BackendUnavailable, match="none does not exist"):
        tune(config, workplace, Silent(), store)
    with pytest.raises(UsageError, match=r"engine\.python: .*none does not exist"):
        build(automatic(config), workplace, Silent(), store)
    assert store.last(config.name) == {}


def test_what_only_this_process_can_run_is_refused_and_a_gpu_is_predicted(
    vllm_pair: tuple[Path, Path], tmp_path: Path
) -> None:
    config = loaded(tmp_path, vllm_pair, engine={"python": str(tmp_path / "none")})
    workplace = Workplace(tmp_path)
    store = Store(workplace.store)
    with pytest.raises(UsageError, match="--measure runs draft lengths in this process"):
        tune(config, workplace, Silent(), store, measured_rounds=1)
    calibration = CalibrationConfig(dataset=config.validation.prompts)
    with pytest.raises(UsageError, match="the grid runs every pair of precisions in this process"):
        tune_grid(
            config.model_copy(update={"calibration": calibration}), workplace, Silent(), store
        )
    assert store.last(config.name) == {}
