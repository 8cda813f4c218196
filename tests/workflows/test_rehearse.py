"""`toolkit build CONFIG --rehearse` with the real command: shipped deployments are built and served
on this machine.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.support.trtllm_packages import llmapi
from toolkit.config.schema import TritonConfig
from toolkit.errors import ServerError
from toolkit.pipeline.stage import Stage
from toolkit.records.build import TritonRepository
from toolkit.workflows.stages.load_served import and_loaded

CONFIGS = Path(__file__).parents[2] / "configs"
QUICK = ("--set", "validation.max_prompts=8", "--set", "validation.distribution.enabled=false")
UNJUDGED = {"speedup", "speedup_sampled", "quality_kl"}


def rehearse(name: str, *arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        "-m",
        "toolkit",
        "build",
        str(CONFIGS / f"{name}.yaml"),
        "--rehearse",
        *arguments,
    ]
    return subprocess.run(
        command, cwd=cwd, capture_output=True, text=True, timeout=400, check=False
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "model"), [("qwen3-32b", "tensorrt_llm"), ("qwen2.5-72b-int8", "tensorrt_llm_bls")]
)
def test_a_shipped_deployment_is_built_served_and_judged(
    name: str, model: str, tmp_path: Path
) -> None:
    done = rehearse(name, *QUICK, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stderr.splitlines()
    assert lines[0] == "rehearsing with stand-ins:" and lines[1].startswith("  target Qwen/")
    report = json.loads((tmp_path / f"build/reports/{name}-rehearsal/report.json").read_text())
    assert report["verdict"] == "PASS"
    assert report["replaced"] == [line.strip() for line in lines[1 : len(report["replaced"]) + 1]]
    outcomes = {gate["name"]: gate["outcome"] for gate in report["gates"]}
    assert {
        gate for gate, outcome in outcomes.items() if outcome == "NOT JUDGED"
    } >= UNJUDGED & set(outcomes)
    assert {
        outcomes[gate] for gate in ("parity", "seeded_parity", "agreement_engine", "stop_words")
    } == {"PASS"}
    # Some draft tokens are accepted, so that acceptance is rehearsed as well as rejection.
    assert report["acceptance"]["rate"] > 0
    assert (tmp_path / f"triton_repo/{name}-rehearsal/{model}/config.pbtxt").is_file()
    real = tmp_path / f"triton_repo/{name}-rehearsal-trtllm"
    if model == "tensorrt_llm":
        assert (
            yaml.safe_load((real / model / "1/model.yaml").read_text())["speculative_config"][
                "max_draft_len"
            ]
            == 4
        )
    else:
        assert 'backend: "tensorrtllm"' in (real / "tensorrt_llm/config.pbtxt").read_text()
        # Both formats are stored; the second one is split for the ranks of the real engine.
        for role in ("target", "draft"):
            [entry] = (tmp_path / f"build/store/quantize/{role}").iterdir()
            assert len([*entry.rglob("rank*.safetensors")]) == 2 and [
                *entry.rglob("model.safetensors")
            ]
        command = (real / "tensorrt_llm/1/engine/trtllm-build.sh").read_text()
        assert "--speculative_decoding_mode draft_tokens_external --max_draft_len 4" in command
    assert (
        not (tmp_path / f"triton_repo/{name}").exists()
        and not (tmp_path / f"engines/{name}").exists()
    )


@pytest.mark.slow
def test_a_deployment_with_a_head_is_rehearsed_around_the_head(tmp_path: Path) -> None:
    """The head is proved, copied and named to LLM(), over a stand-in that refuses what upstream's
    classes refuse; what is served drafts by lookup, and the report says so.
    """
    done = rehearse("llama70b-eagle3", *QUICK, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(
        (tmp_path / "build/reports/llama70b-eagle3-rehearsal/report.json").read_text()
    )
    assert report["verdict"] == "PASS"
    assert any(line.startswith("the head: not run") for line in report["replaced"])
    version = tmp_path / "triton_repo/llama70b-eagle3-rehearsal-trtllm/tensorrt_llm/1"
    config = yaml.safe_load((version / "model.yaml").read_text())["speculative_config"]
    assert config["decoding_type"] == "Eagle"
    assert config["eagle3_layers_to_capture"] == [1, 3, 4]  # of the stand-in's eight layers
    head = tmp_path / "build/rehearsals/llama70b-eagle3/models/draft/model.safetensors"
    assert (version / "engines/draft/model.safetensors").read_bytes() == head.read_bytes()
    published = tmp_path / "engines/llama70b-eagle3-rehearsal-trtllm"
    assert {folder.name for folder in published.iterdir() if folder.is_dir()} == {"target", "draft"}


@pytest.mark.slow
def test_what_the_server_would_not_load_fails_the_rehearsal(
    tmp_path: Path,
) -> None:
    """The served model file meets what refuses a mapping as speculative_config. Here it passes the
    mapping on, as it once did.
    """
    record = llmapi(tmp_path)
    stage = Stage("package", 1, TritonRepository, (), lambda _: {"inputs": {}}, lambda *_: record)
    loading = and_loaded(stage, "1.2.1", TritonConfig())
    assert "loaded_over" in loading.parts({})["inputs"]
    assert loading.run({}, tmp_path, lambda *_: None) == record
    model_file = record.path / "tensorrt_llm/1/model.py"
    text = model_file.read_text().replace("with_speculative_config(settings, llm_args)", "settings")
    model_file.write_text(text)
    with pytest.raises(ServerError, match="Extra inputs are not permitted"):
        loading.run({}, tmp_path, lambda *_: None)


def test_what_cannot_work_is_not_rehearsed(tmp_path: Path) -> None:
    done = rehearse("llama70b", "--set", "engine.tp_size=3", cwd=tmp_path)
    assert done.returncode == 2 and "[heads-divide-tp]" in done.stderr
    assert not (tmp_path / "build").exists()
