"""`max_draft_len: auto`: the advice is a stage of the build, and what is packaged follows from it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from tests.report.conftest import passing
from tests.support.stages import Silent
from tests.test_cli import write_config
from tests.test_reporting import keep
from toolkit.assembly import Workplace, build, speculation_of, stages_of, tune
from toolkit.config.load import load_config
from toolkit.pipeline.store import Store
from toolkit.records import ValidationReport
from toolkit.report.render import read_report

__all__ = ["passing"]  # a fixture

MODEL_YAML = Path("tensorrt_llm") / "1" / "model.yaml"
SMALL = ["validation.max_prompts=4", "validation.max_tokens=12", "engine.max_batch_size=2"]


@pytest.mark.slow
def test_auto_packages_what_the_advice_says_and_measures_once(tiny_pair: tuple[Path, Path], tmp_path: Path) -> None:
    config = load_config(write_config(tmp_path, tiny_pair), ["speculation.max_draft_len=auto", *SMALL])
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
    (validate,) = (stage for stage in stages_of(config, workplace, store.memo) if stage.name == "validate")
    keep(store, "validate", passing, validate.parts(validated), name=config.name)
    advice, folder = tune(config, workplace, Silent(), store, drafts=[tiny_pair[0]])
    assert read_report(workplace.report(config.name) / "report.json") == replace(passing, advice=advice)
    names = {(candidate.name, candidate.drafter) for candidate in advice.candidates}
    assert names == {(tiny_pair[1].name, "draft_target"), (tiny_pair[0].name, "draft_target"), ("ngram", "ngram")}
    assert folder == workplace.advice(config.name)
    itself = next(candidate for candidate in advice.candidates if candidate.name == tiny_pair[0].name)
    greedy = next(alpha for alpha in itself.alphas if (alpha.rule, alpha.domain) == ("greedy", None))
    assert greedy.estimate > 0.95  # the target as its own draft, but for rounding


def test_without_auto_nothing_is_tuned(tiny_pair: tuple[Path, Path], tmp_path: Path) -> None:
    config = load_config(write_config(tmp_path, tiny_pair))
    workplace = Workplace(tmp_path)
    assert "tune" not in [stage.name for stage in stages_of(config, workplace, Store(workplace.store).memo)]


@pytest.mark.slow
def test_prompt_lookup_with_a_schedule_is_built_and_packaged(tiny_pair: tuple[Path, Path], tmp_path: Path) -> None:
    """No draft section; the schedule's numbers are part of the key, so another one is another package."""
    speculation = {"kind": "ngram", "max_draft_len": 4, "draft_len_schedule": {1: 4, 2: 1}}
    config = load_config(write_config(tmp_path, tiny_pair))
    asked = config.speculation.model_copy(update=speculation)
    config = config.model_copy(update={"draft": None, "speculation": asked})
    workplace = Workplace(tmp_path)
    store = Store(workplace.store)
    built = build(config, workplace, Silent(), store, until="package")
    settings = yaml.safe_load((workplace.repository(config.name) / MODEL_YAML).read_text())
    assert settings["speculative_config"]["decoding_type"] == "NGram"
    assert settings["toolkit"]["draft_len_schedule"] == [[1, 4], [2, 1]]
    assert not (workplace.engines(config.name) / "draft").exists()
    other = asked.model_copy(update={"draft_len_schedule": {1: 4, 2: 0}})
    again = build(config.model_copy(update={"speculation": other}), workplace, Silent(), store, until="package")
    assert again.stages["package"].entry.key != built.stages["package"].entry.key
    assert again.stages["compile/target"].reused
