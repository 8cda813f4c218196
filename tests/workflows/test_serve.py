"""Build and judge a deployment for TensorRT-LLM: everything is real except `LLM()`, for which the
server finds a stand-in.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.cli import write_config
from tests.support.stages import Silent
from tests.support.trtllm_packages import engine, llmapi
from toolkit.client import Client
from toolkit.config.load import load_config
from toolkit.config.schema import DeploymentConfig
from toolkit.errors import UsageError
from toolkit.pipeline.store import Store
from toolkit.process.workspace import sweep
from toolkit.standins.trtllm import PACKAGE
from toolkit.standins.trtllm.tensorrt_llm.toy import MARGIN, TIE, TIED
from toolkit.triton.package import model_config
from toolkit.triton.process.localize import render_here
from toolkit.workflows.build import build
from toolkit.workflows.folders import Workplace
from toolkit.workflows.replay import replay_divergence
from toolkit.workflows.serve import Machine, check_servable, serve

HERE = Machine(
    gpus=lambda: ["stand-in"], which=lambda name: f"/usr/bin/{name}", tensorrt_llm=lambda: "1.2.1"
)
ENGINE = {"tensorrt_llm": "1.2.1", "max_batch_size": 2, "max_input_len": 64, "max_seq_len": 128}
VALIDATION = {
    "prompts": "prompts.jsonl",
    "max_tokens": 10,
    "rounds": 2,
    "max_rounds": 2,
    "parity": {"max_divergence_rate": 0.95, "source": "never"},
    "distribution": {"enabled": False},
    "latency": {"min_speedup": 1.3},
}


def loaded(
    folder: Path, pair: tuple[Path, Path], kind: str = "trtllm_pytorch", **sections: Any
) -> DeploymentConfig:
    engine = {"kind": kind, **ENGINE, **sections.pop("engine", {})}
    return load_config(
        write_config(folder, pair, engine=engine, **{"validation": VALIDATION, **sections})
    )


@pytest.mark.slow
def test_both_arms_are_served_in_turns_and_judged(
    tiny_pair: tuple[Path, Path], tmp_path: Path
) -> None:
    """Two rounds need four servers: plain, speculative, plain, speculative. Drawing tokens needs
    one more of each. Requests for log-probabilities need none: the last server answers them, and
    the first one of the drawing. The stand-in lies in the packaged model's version folder, where
    Triton looks for modules. For one prompt of the four, two tokens tie at one position.
    """
    drawn = {"enabled": True, "effect": 0.19, "power": 0.5, "max_seconds": 600.0}
    config = loaded(tmp_path, tiny_pair, validation={**VALIDATION, "distribution": drawn})
    prompts = ["def f(x):", "def g(x):", f"{TIED} def h(x):", "def i(x):"]
    (tmp_path / "prompts.jsonl").write_text(
        "".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts)
    )
    workplace, store = Workplace(tmp_path), Store(tmp_path / "store")
    packaged = (
        build(config, workplace, Silent(), store, until="package").stages["package"].record.path
    )
    (packaged / "tensorrt_llm/1/tensorrt_llm").symlink_to(PACKAGE)
    built = build(config, workplace, Silent(), store, here=HERE)
    report = built.report
    assert report is not None
    logs = [workplace.report("tiny") / f"server.{number}.log" for number in range(1, 6)]
    logs.append(workplace.report("tiny") / "server.log")
    started = [re.findall(r"stand-in LLM: (\w+)", log.read_text(errors="replace")) for log in logs]
    assert started == [["plain"], ["speculative"]] * 3

    assert report.verdict == "PASS", [gate for gate in report.gates if gate.outcome != "PASS"]
    gates = ["parity", "speedup", "speedup_sampled", "stop_words", "distribution", "quality_kl"]
    assert [gate.name for gate in report.gates] == gates
    assert report.distribution is not None and all(
        test.control_rejected for test in report.distribution.tests
    )
    assert report.plain_arm == "restarts"
    assert report.parity is not None
    (arm,) = report.parity.arms
    assert (arm.arm, arm.draft_len, arm.identical, arm.equivalent) == ("speculative", 2, 3, 1)
    (tie,) = report.parity.divergences
    assert (tie.prompt_index, tie.position, tie.judged_by) == (2, TIE, "log_probs")
    assert tie.margin == pytest.approx(MARGIN, abs=1e-5) and tie.drift == pytest.approx(
        0.0, abs=1e-5
    )
    assert report.arms.speculative is not None
    # 4 prompts in 2 rounds
    assert report.arms.plain.requests == report.arms.speculative.requests == 8
    assert report.acceptance is not None
    # 10 tokens take a prefill of one token and three steps, or four where the tie rejects a draft.
    steps, accepted = 3 * 3 + 4, 3 * 6 + 5
    assert report.acceptance.length == pytest.approx(1 + accepted / steps)
    assert report.acceptance.rate is None and report.acceptance.alpha is not None
    not_measured = " ".join(
        finding.detail for finding in report.findings if finding.check == "not measured"
    )
    for what in (
        "agreement_engine",
        "(draft)",
        "top-k, top-p and seeds",
        "verify_only",
        "draft lengths",
        "seeded",
        "by position",
        "acceptance rate",
        "engine.enable_block_reuse",
    ):
        assert what in not_measured
    (shifted,) = (each.detail for each in report.findings if each.check == "random numbers")
    assert "the sampled texts of 6 starts independent" in shifted
    assert "started in turns" in (workplace.report("tiny") / "report.md").read_text(
        encoding="utf-8"
    )

    assert tie.replay is not None
    (workplace.repository("tiny") / "tensorrt_llm/1/tensorrt_llm").symlink_to(PACKAGE)
    recorded, now = replay_divergence(workplace.report("tiny") / tie.replay, workplace, HERE)
    assert now.as_before and now.divergence is not None
    assert (
        replace(now.divergence, prompt_index=2, replay=tie.replay)
        == replace(recorded.divergence, replay=tie.replay)
        == tie
    )


@pytest.mark.slow
def test_where_auto_finds_nothing_one_plain_server_is_judged(
    tiny_pair: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Random models accept no draft tokens, so the deployment is served without speculation and has
    no second arm.
    """
    # The engines run eagerly, which is quicker here than compiling two of them.
    monkeypatch.setenv("CXX", "no-such-compiler")
    sections = {"speculation": {"max_draft_len": "auto"}, "hardware": {"gpu": "H200", "count": 1}}
    config = loaded(tmp_path, tiny_pair, **sections)
    workplace, store = Workplace(tmp_path), Store(tmp_path / "store")
    packaged = (
        build(config, workplace, Silent(), store, until="package").stages["package"].record.path
    )
    (packaged / "tensorrt_llm/1/tensorrt_llm").symlink_to(PACKAGE)
    report = build(config, workplace, Silent(), store, here=HERE).report
    assert report is not None and report.advice is not None
    assert (report.verdict, report.advice.costs_are, report.arms.speculative) == (
        "PASS",
        "predicted",
        None,
    )
    log = (workplace.report("tiny") / "server.log").read_text(errors="replace")
    assert re.findall(r"stand-in LLM: (\w+)", log) == ["plain"]
    assert not build(config, workplace, Silent(), store, here=HERE).changed


@pytest.mark.parametrize(
    ("kind", "engine", "here", "message"),
    [
        ("trtllm_pytorch", {}, {"gpus": list}, r"needs 1 NVIDIA GPU \(here: none\)"),
        ("trtllm_pytorch", {"tp_size": 2}, {}, r"needs 2 NVIDIA GPUs \(here: 1\)"),
        ("trtllm_pytorch", {}, {"which": lambda name: None}, "needs tritonserver on the PATH$"),
        (
            "trt_engine",
            {},
            {"which": lambda name: None},
            "needs tritonserver on the PATH, mpirun on the PATH$",
        ),
        (
            "trtllm_pytorch",
            {},
            {"tensorrt_llm": lambda: None},
            "needs the Python package tensorrt_llm$",
        ),
        (
            "trtllm_pytorch",
            {},
            {"tensorrt_llm": lambda: "1.1.0"},
            r"needs tensorrt_llm 1.2.1 \(here is 1.1.0\)",
        ),
        ("trt_engine", {"tp_size": 16}, {}, "over 2 nodes is not served and judged by a build"),
    ],
)
def test_a_machine_that_cannot_serve_it_says_what_is_missing(
    tiny_pair: tuple[Path, Path],
    tmp_path: Path,
    kind: str,
    engine: Mapping[str, Any],
    here: Mapping[str, Any],
    message: str,
) -> None:
    config = loaded(tmp_path, tiny_pair, kind, engine=engine)
    with pytest.raises(UsageError, match=re.compile(message, re.MULTILINE)) as raised:
        check_servable(config, replace(HERE, **here))
    assert "--until package" in str(raised.value)


@pytest.mark.slow
def test_a_deployment_is_served_by_hand_where_it_does_not_lie_in_the_container_s_folder(
    tiny_pair: tuple[Path, Path], tmp_path: Path
) -> None:
    """Its settings name /models; on this machine they have to name the folder of the server."""
    config = loaded(tmp_path, tiny_pair)
    store = Store(tmp_path / "store")
    packaged = (
        build(config, Workplace(tmp_path), Silent(), store, until="package")
        .stages["package"]
        .record
    )
    (packaged.path / "tensorrt_llm/1/tensorrt_llm").symlink_to(PACKAGE)
    ports = config.triton.model_copy(update={"http_port": 0, "grpc_port": 0, "metrics_port": 0})
    with (
        serve(config, packaged.path, triton=ports) as (client, servers),
    ):
        assert isinstance(client, Client)
        assert client.generate("def f(x):", max_tokens=4).text
        assert client.generate("def f(x):", max_tokens=4).statistics.output_tokens == 4
        folder = servers.server.repository
        os.utime(folder.parent, (0, 0))
        # The next server on this machine does this, a long time later.
        sweep(Path(tempfile.gettempdir()))
        assert client.generate("def f(x):", max_tokens=4).text
        assert folder.exists()
    assert not folder.parent.exists()


@pytest.mark.parametrize(
    ("section", "here", "message"),
    [
        (
            {},
            {"gpus": list},
            "engine.kind trtllm_pytorch cannot be served here: it needs 1 NVIDIA GPU",
        ),
        ({"engine": {"tp_size": 16}}, {}, "over 2 nodes is not served by this command"),
        (
            {"triton": {"model_py": "container"}},
            {},
            "model_py container is a file of the container",
        ),
    ],
)
def test_serving_by_hand_needs_the_same_and_says_so_in_its_own_words(
    tiny_pair: tuple[Path, Path],
    tmp_path: Path,
    section: Mapping[str, Any],
    here: Mapping[str, Any],
    message: str,
) -> None:
    config = loaded(tmp_path, tiny_pair, **section)
    with pytest.raises(UsageError, match=message) as raised:
        check_servable(config, replace(HERE, **here), judged=False)
    assert "judged" not in str(raised.value) and "--until" not in str(raised.value)


def test_a_machine_with_everything_serves_every_kind(
    tiny_pair: tuple[Path, Path], tmp_path: Path
) -> None:
    for kind in ("trtllm_pytorch", "trt_engine"):
        check_servable(loaded(tmp_path, tiny_pair, kind), HERE)
    with pytest.raises(UsageError, match="model_py container returns no token ids"):
        check_servable(loaded(tmp_path, tiny_pair, triton={"model_py": "container"}), HERE)


def test_a_rendering_names_this_machine_s_folders(tmp_path: Path) -> None:
    packaged = llmapi(tmp_path).path
    before = {file: file.read_bytes() for file in packaged.rglob("*.*") if file.is_file()}
    settings = {}
    for arm in ("plain", "speculative"):
        folder = render_here(packaged, tmp_path / arm, speculates=arm == "speculative")
        assert model_config.read(folder / "tensorrt_llm/config.pbtxt") == model_config.read(
            packaged / "tensorrt_llm/config.pbtxt"
        )
        settings[arm] = yaml.safe_load((folder / "tensorrt_llm/1/model.yaml").read_text())
        assert settings[arm]["model"] == f"{folder}/tensorrt_llm/1/engines/target"
        assert Path(settings[arm]["model"], "config.json").is_file()
    draft = settings["speculative"].pop("speculative_config")["speculative_model"]
    assert Path(draft, "config.json").is_file()
    assert settings["plain"] == {**settings["speculative"], "model": settings["plain"]["model"]}
    assert before == {file: file.read_bytes() for file in before}


def test_the_engines_of_a_bls_rendering_are_found(tmp_path: Path) -> None:
    from toolkit.config.schema import TritonConfig
    from toolkit.triton.package.trtllm import package_bls

    pair = [engine(tmp_path / "engines", role, "trt_engine") for role in ("target", "draft")]
    record = package_bls(
        pair[0],
        pair[1],
        TritonConfig(),
        tmp_path / "out",
        name="pair",
        end_ids=(257,),
        max_draft_len=3,
    )
    folder = render_here(record.path, tmp_path / "here")
    for model in ("tensorrt_llm", "tensorrt_llm_draft"):
        path = (
            model_config.read(folder / model / "config.pbtxt")
            .parameters["gpt_model_path"]
            .string_value
        )
        assert Path(path) == folder / model / "1" / "engine"
        assert (Path(path) / "config.json").is_file()
