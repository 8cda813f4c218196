"""`max_draft_len: auto`: the advice is a stage of the build, and decides what is packaged."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.cli import write_config
from tests.support.deployments import calibrated, config_of, for_tensorrt_llm
from tests.support.reports import keep
from tests.support.stages import Silent
from toolkit.config.load import load_config
from toolkit.config.schema import QuantizationConfig
from toolkit.errors import UsageError
from toolkit.pipeline.store import Store
from toolkit.records.advice import ScheduleStep
from toolkit.records.report import ValidationReport
from toolkit.report.render import read_report
from toolkit.workflows.build import build
from toolkit.workflows.deployment import (
    sampled_rule,
    speculation_of,
)
from toolkit.workflows.folders import Workplace
from toolkit.workflows.stages.sequence import stages_of
from toolkit.workflows.tune import tune, tune_grid

MODEL_YAML = Path("tensorrt_llm") / "1" / "model.yaml"
SMALL = ["validation.max_prompts=4", "validation.max_tokens=12", "engine.max_batch_size=2"]


@pytest.mark.slow
def test_auto_packages_what_the_advice_says_and_measures_once(
    tiny_pair: tuple[Path, Path], tmp_path: Path
) -> None:
    config = load_config(
        write_config(tmp_path, tiny_pair), ["speculation.max_draft_len=auto", *SMALL]
    )
    workplace = Workplace(tmp_path)
    store = Store(workplace.store)
    built = build(config, workplace, Silent(), store, until="package")
    advice, served = built.stages["tune"].record, speculation_of(config, built.stages)
    settings = yaml.safe_load((workplace.repository(config.name) / MODEL_YAML).read_text())
    assert (workplace.advice(config.name) / "advice.json").is_file()
    assert served.kind == ("draft_target" if advice.speculate else "none")
    assert served.longest_draft == advice.max_draft_len
    assert built.stages["package"].record.max_draft_len == advice.max_draft_len
    assert ("speculative_config" in settings) == advice.speculate
    again = build(config, workplace, Silent(), store, until="package")
    assert not again.changed


@pytest.mark.slow
def test_tune_ranks_drafts_and_prompt_lookup_and_tells_the_report(
    tiny_pair: tuple[Path, Path], passing: ValidationReport, tmp_path: Path
) -> None:
    config = load_config(write_config(tmp_path, tiny_pair), SMALL)
    workplace = Workplace(tmp_path)
    store = Store(workplace.store)
    validated = build(config, workplace, Silent(), store, until="package").stages
    (validate,) = (
        stage for stage in stages_of(config, workplace, store.memo) if stage.name == "validate"
    )
    keep(store, "validate", passing, validate.parts(validated), name=config.name)
    advice, folder = tune(config, workplace, Silent(), store, drafts=[tiny_pair[0]])
    assert read_report(workplace.report(config.name) / "report.json") == replace(
        passing, advice=advice
    )
    names = {(candidate.name, candidate.drafter) for candidate in advice.candidates}
    assert names == {
        (tiny_pair[1].name, "draft_target"),
        (tiny_pair[0].name, "draft_target"),
        ("ngram", "ngram"),
    }
    assert folder == workplace.advice(config.name)
    target_as_draft = next(
        candidate for candidate in advice.candidates if candidate.name == tiny_pair[0].name
    )
    greedy = next(
        alpha for alpha in target_as_draft.alphas if (alpha.rule, alpha.domain) == ("greedy", None)
    )
    assert greedy.estimate > 0.95  # the target accepts its own tokens, except for rounding


def test_without_auto_nothing_is_tuned(tiny_pair: tuple[Path, Path], tmp_path: Path) -> None:
    config = load_config(write_config(tmp_path, tiny_pair))
    workplace = Workplace(tmp_path)
    assert "tune" not in [
        stage.name for stage in stages_of(config, workplace, Store(workplace.store).memo)
    ]


@pytest.mark.slow
def test_prompt_lookup_with_a_schedule_is_built_and_packaged(
    tiny_pair: tuple[Path, Path], tmp_path: Path
) -> None:
    """There is no draft section. The schedule is part of the key, so another one makes another
    package.
    """
    speculation = {"kind": "ngram", "max_draft_len": 4, "draft_len_schedule": {1: 4, 2: 1}}
    config = load_config(write_config(tmp_path, tiny_pair))
    with_schedule = config.speculation.model_copy(update=speculation)
    config = config.model_copy(update={"draft": None, "speculation": with_schedule})
    workplace = Workplace(tmp_path)
    store = Store(workplace.store)
    built = build(config, workplace, Silent(), store, until="package")
    settings = yaml.safe_load((workplace.repository(config.name) / MODEL_YAML).read_text())
    assert settings["speculative_config"]["decoding_type"] == "NGram"
    assert settings["toolkit"]["draft_len_schedule"] == [[1, 4], [2, 1]]
    assert not (workplace.engines(config.name) / "draft").exists()
    other = with_schedule.model_copy(update={"draft_len_schedule": {1: 4, 2: 0}})
    again = build(
        config.model_copy(update={"speculation": other}),
        workplace,
        Silent(),
        store,
        until="package",
    )
    assert again.stages["package"].entry.key != built.stages["package"].entry.key
    assert again.stages["compile/target"].reused


@pytest.mark.slow
def test_what_tensorrt_llm_serves_is_advised_from_its_checkpoints_and_a_predicted_gpu(
    tiny_pair: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Acceptance is measured by the rule of the served deployment, on engines that nobody deploys.
    Batches that are too large for this machine are predicted too.
    """
    # The engines run eagerly, which is quicker here than compiling two of them.
    monkeypatch.setenv("CXX", "no-such-compiler")
    config = for_tensorrt_llm(tiny_pair, tmp_path, gpu="H200", count=1)
    workplace = Workplace(tmp_path)
    advice, folder = tune(config, workplace, Silent(), Store(workplace.store))
    assert (advice.costs_are, advice.rule) == ("predicted", "sample_match_greedy_draft")
    assert {(candidate.name, candidate.drafter) for candidate in advice.candidates} == {
        ("draft", "draft_target"),
        ("ngram", "ngram"),
    }
    assert max(prediction.batch for prediction in advice.candidates[0].predictions) == 64
    assert (folder / "advice.json").is_file()
    assert not workplace.engines(config.name).exists()


@pytest.mark.slow
def test_auto_for_tensorrt_llm_is_found_before_its_engines_are_made(
    tiny_pair: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Random models accept no draft tokens, so nothing is drafted. With other advice the same
    stages make other engines.
    """
    monkeypatch.setenv("CXX", "no-such-compiler")
    config = for_tensorrt_llm(tiny_pair, tmp_path, gpu="H200", count=1)
    config = config.model_copy(
        update={"speculation": config.speculation.model_copy(update={"max_draft_len": "auto"})}
    )
    workplace = Workplace(tmp_path)
    store = Store(workplace.store)
    built = build(config, workplace, Silent(), store, until="package")
    advice = built.stages["tune"].record
    assert (advice.costs_are, advice.speculate) == ("predicted", False)
    groups = [name.partition("/")[0] for name in built.stages]
    assert groups == [
        "pair",
        *["quantize"] * 2,
        *["advised"] * 2,
        "tune",
        *["compile"] * 2,
        "package",
    ]
    packaged = built.stages["package"].record
    assert packaged.max_draft_len == 0
    assert "speculative_config" not in yaml.safe_load(
        (packaged.path / "tensorrt_llm/1/model.yaml").read_text()
    )
    assert not build(config, workplace, Silent(), store, until="package").changed
    tune(config, workplace, Silent(), store)  # with the engines that the build has made
    assert [
        len(list((workplace.store / group / "target").iterdir()))
        for group in ("advised", "compile")
    ] == [1, 1]

    schedule = (ScheduleStep(1, 3), ScheduleStep(4, 1))
    other = replace(
        advice, speculate=True, drafter="draft_target", max_draft_len=3, schedule=schedule
    )
    finished = {**built.stages, "tune": replace(built.stages["tune"], record=other)}
    stages = {stage.name: stage for stage in stages_of(config, workplace, store.memo)}
    for name in ("compile/target", "compile/draft", "package"):
        (out := tmp_path / "other" / name).mkdir(parents=True)
        assert (
            stages[name].parts(finished)["config"] != stages[name].parts(built.stages)["config"]
            or name == "compile/draft"
        )
        record = stages[name].run(finished, out, lambda done, total, what: None)
        finished[name] = replace(finished[name], record=record)
    settings = yaml.safe_load((tmp_path / "other/package/tensorrt_llm/1/model.yaml").read_text())
    assert (
        settings["speculative_config"]["max_draft_len"]
        == finished["package"].record.max_draft_len
        == 3
    )
    assert settings["speculative_config"]["draft_len_schedule"] == {1: 3, 4: 1}


@pytest.mark.slow
def test_the_grid_of_what_tensorrt_llm_serves_has_predicted_speeds_of_the_pairs_that_it_takes(
    tiny_pair: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Everything that the roofline cannot predict is measured. The GPU of the option is used, not
    the one of the YAML.
    """
    # The engines run eagerly, which is quicker here than compiling four of them.
    monkeypatch.setenv("CXX", "no-such-compiler")
    config = calibrated(for_tensorrt_llm(tiny_pair, tmp_path, gpu="A100", count=1), tmp_path)
    workplace = Workplace(tmp_path)
    store = Store(workplace.store)
    grid, folder = tune_grid(config, workplace, Silent(), store, gpu="h200")
    assert grid.costs_are == "predicted for H200"
    assert {(cell.target, cell.draft) for cell in grid.cells} == set(
        itertools.product(("FP8", "NO_QUANT"), repeat=2)
    )
    assert [line.partition(": ")[0] for line in grid.left_out] == [
        f"target {algo}, draft {algo}" for algo in ("W8A8_SQ_PER_CHANNEL", "W8A16")
    ]
    quality = {target.quant_algo: target for target in grid.targets}
    assert quality["NO_QUANT"].kl.estimate == 0.0 < quality["FP8"].kl.estimate
    speeds = {(cell.target, cell.draft): cell for cell in grid.cells}
    assert (
        speeds["NO_QUANT", "NO_QUANT"].tokens_per_s.estimate
        < speeds["FP8", "FP8"].tokens_per_s.estimate
    )
    assert sum(cell.best for cell in grid.cells) == 1
    assert (folder / "grid.json").is_file()
    assert not workplace.engines(config.name).exists()
    fp8 = config.target.model_copy(update={"quantization": QuantizationConfig(quant_algo="FP8")})
    h200 = config.hardware.model_copy(update={"gpu": "H200"})
    served = build(
        config.model_copy(update={"target": fp8, "hardware": h200}),
        workplace,
        Silent(),
        store,
        until="quantize",
    )
    # The grid has made the checkpoints that are served.
    assert all(served.stages[f"quantize/{role}"].reused for role in ("target", "draft"))


def test_costs_that_can_be_neither_measured_nor_predicted_are_refused_before_anything_is_built(
    tiny_pair: tuple[Path, Path], tmp_path: Path
) -> None:
    config = for_tensorrt_llm(tiny_pair, tmp_path, gpu="H200", count=1)
    workplace = Workplace(tmp_path)
    store = Store(workplace.store)
    with pytest.raises(UsageError, match="only in its server"):
        tune(config, workplace, Silent(), store, measured_rounds=1)
    with pytest.raises(UsageError, match="Give the YAML a `draft` and a `calibration` section"):
        tune_grid(config, workplace, Silent(), store)
    with pytest.raises(UsageError, match="no GPU 'H2000' is known"):
        tune_grid(calibrated(config, tmp_path), workplace, Silent(), store, gpu="H2000")
    assert store.last(config.name) == {}


@pytest.mark.parametrize(
    ("kind", "keys", "rule", "by_load", "stops"),
    [
        ("torch", {}, "rejection", True, True),
        (
            "torch",
            {"speculation__acceptance": "coupled", "triton__layout": "bls"},
            "coupled",
            False,
            False,
        ),
        ("pytorch", {}, "sample_match_greedy_draft", True, True),
        ("pytorch", {"engine__tensorrt_llm": "1.4rc"}, "sample_match_greedy_draft", True, True),
        ("pytorch", {"engine__tensorrt_llm": "1.1"}, "sample_match_greedy_draft", False, True),
        ("engine", {}, "sample_match", False, False),
        ("engine", {"speculation__acceptance": "rejection"}, "rejection", False, False),
    ],
)
def test_rule_and_schedule_are_those_of_what_serves(
    kind: str, keys: dict[str, Any], rule: str, by_load: bool, stops: bool
) -> None:
    config = config_of(kind, **keys)
    capabilities = config.capabilities
    assert sampled_rule(config) == rule
    assert (capabilities.draft_len_schedule is not None) == by_load
    assert capabilities.max_concurrency == stops
