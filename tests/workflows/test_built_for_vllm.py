"""Build a small deployment for vLLM up to the verdict, by vLLM itself."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import pytest

from tests.support.cli import write_config
from tests.support.stages import Silent
from toolkit.config.load import load_config
from toolkit.pipeline.store import Store
from toolkit.validate.arms import Alternating
from toolkit.workflows.build import build
from toolkit.workflows.folders import Workplace
from toolkit.workflows.serve import serve

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


def test_build_reaches_a_verdict_and_its_figures_agree(
    tiny_pair: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pair is random, so its speed says nothing; correctness and counters do."""
    config = load_config(
        write_config(
            tmp_path,
            tiny_pair,
            name="tiny",
            engine={
                "kind": "vllm",
                "dtype": "float32",
                "max_batch_size": 2,
                "max_input_len": 64,
                "max_seq_len": 128,
                "kv_cache_gib": 0.25,
            },
            target={"checkpoint": str(tiny_pair[0]), "quantization": {"quant_algo": "NO_QUANT"}},
            draft={"checkpoint": str(tiny_pair[1]), "quantization": {"quant_algo": "NO_QUANT"}},
            validation={
                "prompts": "prompts.jsonl",
                "max_tokens": 10,
                "rounds": 1,
                "max_rounds": 1,
                "parity": {"max_divergence_rate": 0.95},
                "distribution": {"enabled": False},
                "latency": {"min_speedup": None},
            },
        )
    )
    prompts = ["def f(x):", "def g(x):", "def h(x):", "def i(x):"]
    (tmp_path / "prompts.jsonl").write_text(
        "".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts)
    )
    own_tmp = tmp_path / "tmp"
    own_tmp.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(own_tmp))
    workplace = Workplace(tmp_path)
    report = build(config, workplace, Silent(), Store(tmp_path / "store")).report
    assert report is not None
    gates = {gate.name: gate.outcome for gate in report.gates}
    assert gates["parity"] != "FAIL", report.parity
    assert gates["stop_words"] == "PASS", report.stop_check
    assert gates["agreement_source"] == "PASS", report.agreements
    assert report.plain_arm == "server"
    names = {check.name for check in report.counters}
    assert "vllm:spec_decode_num_drafts_total" in names
    assert 'vllm:spec_decode_num_accepted_tokens_per_pos_total{position="0"}' in names
    assert all(check.matches for check in report.counters), report.counters
    assert report.acceptance is not None and report.acceptance.by_position
    with serve(config, workplace.repository("tiny")) as (endpoint, servers):
        assert not isinstance(endpoint, Alternating)
        first, again = (
            endpoint.measure(prompts[:1], max_tokens=10, temperature=0.8, seed=5)[0]
            for _ in range(2)
        )
        assert first.token_ids == again.token_ids
        (scored,) = endpoint.measure(prompts[:1], max_tokens=10, temperature=0.0, log_probs=True)
        assert scored.statistics.log_probs is not None
        assert scored.statistics.next_best is not None
        assert len(scored.statistics.next_best) == len(scored.token_ids)
        servers.check()
    assert not list(own_tmp.iterdir())
