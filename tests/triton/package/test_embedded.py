"""The packaged repository is self-contained and readable, and names no path of this machine."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from toolkit.config.schema import AdaptiveConfig, SpeculationConfig, TritonConfig
from toolkit.errors import StageError
from toolkit.records.build import CompiledEngine, TritonRepository
from toolkit.triton.package import model_config
from toolkit.triton.package.embedded import package
from toolkit.triton.package.monitoring import FILES
from toolkit.triton.tensors.contract import INPUTS, METRICS, OUTPUTS


@pytest.fixture
def engines(tmp_path: Path) -> tuple[CompiledEngine, CompiledEngine]:
    def engine(role: str) -> CompiledEngine:
        folder = tmp_path / "engines" / role
        (folder / "packages").mkdir(parents=True)
        (folder / "config.json").write_text("{}")
        (folder / "packages" / "model.pt2").write_text(role)
        return CompiledEngine(
            role=role,
            path=folder,
            kind="torch",
            mode="eager",
            dtype="float32",
            device="cpu",
            quant_algo="FP8",
            kv_cache_quant_algo=None,
            fp8_compute="dequantized",
            max_batch_size=8,
            max_input_len=100,
            max_seq_len=200,
            max_draft_len=4 if role == "target" else 0,
            vocab_size=258,
            weight_bytes=1,
            notes=(),
        )

    return engine("target"), engine("draft")


def test_repository_is_complete_and_its_record_is_right(
    engines: tuple[CompiledEngine, CompiledEngine], tmp_path: Path
) -> None:
    target, draft = engines
    out = tmp_path / "out"
    record = package(target, draft, SpeculationConfig(max_draft_len=3), TritonConfig(), 2, out)
    assert record == TritonRepository(
        path=out, layout="llmapi", model="tensorrt_llm", decoupled=True, max_draft_len=3
    )
    files = {str(path.relative_to(out)) for path in out.rglob("*") if path.is_file()}
    assert files == {
        "README.md",
        "launch.sh",
        "validate_latency.py",
        *FILES,
        "tensorrt_llm/config.pbtxt",
        "tensorrt_llm/1/model.py",
        "tensorrt_llm/1/libtriton_toolkit.so",
        "tensorrt_llm/1/model.yaml",
        *(
            f"tensorrt_llm/1/engines/{role}/{name}"
            for role in ("target", "draft")
            for name in ("config.json", "packages/model.pt2")
        ),
    }
    assert os.access(out / "launch.sh", os.X_OK)
    settings = yaml.safe_load((out / "tensorrt_llm/1/model.yaml").read_text())
    assert settings["speculative_config"] == {
        "decoding_type": "Draft_Target",
        "max_draft_len": 3,
        "speculative_model": "engines/draft",
    }
    assert settings["triton_config"]["max_batch_size"] == 0
    for path in out.rglob("*"):
        if path.is_file():
            assert str(tmp_path).encode() not in path.read_bytes(), path


@pytest.mark.parametrize("decoupled", [True, False])
def test_decoupled_is_written_equal_in_both_files(
    engines: tuple[CompiledEngine, CompiledEngine], tmp_path: Path, decoupled: bool
) -> None:
    out = tmp_path / "out"
    assert (
        package(
            *engines, SpeculationConfig(), TritonConfig(decoupled=decoupled), None, out
        ).decoupled
        is decoupled
    )
    config = model_config.read(out / "tensorrt_llm" / "config.pbtxt")
    settings = yaml.safe_load((out / "tensorrt_llm/1/model.yaml").read_text())
    assert (
        config.model_transaction_policy.decoupled
        is settings["triton_config"]["decoupled"]
        is decoupled
    )


def test_prompt_lookup_and_a_schedule_are_packaged(
    engines: tuple[CompiledEngine, CompiledEngine], tmp_path: Path
) -> None:
    speculation = SpeculationConfig(
        kind="ngram", max_draft_len=4, draft_len_schedule={1: 4, 4: 0}, max_matching_ngram_size=2
    )
    record = package(engines[0], None, speculation, TritonConfig(), None, tmp_path / "out")
    settings = yaml.safe_load((record.path / "tensorrt_llm" / "1" / "model.yaml").read_text())
    assert record.max_draft_len == 4
    assert settings["speculative_config"] == {
        "decoding_type": "NGram",
        "max_draft_len": 4,
        "max_matching_ngram_size": 2,
    }
    assert settings["toolkit"]["draft_len_schedule"] == [[1, 4], [4, 0]]
    assert not (record.path / "tensorrt_llm" / "1" / "engines" / "draft").exists()
    limited = SpeculationConfig(kind="ngram", max_draft_len=4, max_concurrency=3)
    record = package(engines[0], None, limited, TritonConfig(), None, tmp_path / "limited")
    settings = yaml.safe_load((record.path / "tensorrt_llm" / "1" / "model.yaml").read_text())
    assert settings["toolkit"]["draft_len_schedule"] == [[1, 4], [4, 0]]


def test_adaptive_lengths_are_packaged_in_both_layouts(
    engines: tuple[CompiledEngine, CompiledEngine], tmp_path: Path
) -> None:
    speculation = SpeculationConfig(
        max_draft_len=4, max_prompt_tokens=99, adaptive=AdaptiveConfig(probe_every_tokens=20)
    )
    settings = {"window_tokens": 32, "window_requests": 16, "probe_every_tokens": 20}
    record = package(*engines, speculation, TritonConfig(), None, tmp_path / "llmapi")
    ours = yaml.safe_load((record.path / "tensorrt_llm" / "1" / "model.yaml").read_text())
    assert ours["toolkit"]["adaptive"] == settings
    assert ours["toolkit"]["max_prompt_tokens"] == 99
    bls = TritonConfig(layout="bls")
    record = package(*engines, speculation, bls, None, tmp_path / "bls", end_ids=[1])
    parameters = model_config.read(record.path / "tensorrt_llm_bls" / "config.pbtxt").parameters
    assert json.loads(parameters["adaptive"].string_value) == settings
    assert parameters["max_prompt_tokens"].string_value == "99"
    off = SpeculationConfig(max_draft_len=4, adaptive=AdaptiveConfig(enabled=False))
    assert off.adaptive_settings is None


def test_without_a_draft_there_is_no_speculation(
    engines: tuple[CompiledEngine, CompiledEngine], tmp_path: Path
) -> None:
    record = package(
        engines[0], None, SpeculationConfig(kind="none"), TritonConfig(), None, tmp_path / "out"
    )
    settings = yaml.safe_load((record.path / "tensorrt_llm/1/model.yaml").read_text())
    assert record.max_draft_len == 0
    assert "speculative_config" not in settings
    assert not (record.path / "tensorrt_llm/1/engines/draft").exists()


def test_engines_cost_no_space_twice(
    engines: tuple[CompiledEngine, CompiledEngine], tmp_path: Path
) -> None:
    record = package(*engines, SpeculationConfig(), TritonConfig(), None, tmp_path / "out")
    copy = record.path / "tensorrt_llm/1/engines/target/packages/model.pt2"
    assert copy.samefile(engines[0].path / "packages/model.pt2")


@pytest.mark.parametrize(
    ("role", "change", "message"),
    [
        (
            "target",
            {"max_draft_len": 2},
            "verifies at most 2 draft tokens, and speculation.max_draft_len is 4",
        ),
        (
            "draft",
            {"vocab_size": 200},
            "the draft engine's vocab_size 200 is below the target's 258",
        ),
        (
            "draft",
            {"max_batch_size": 1},
            "the draft engine's max_batch_size 1 is below the target's 8",
        ),
        ("draft", {"path": Path("/nowhere")}, "/nowhere: no draft engine here"),
    ],
)
def test_engines_that_do_not_fit_are_refused(
    engines: tuple[CompiledEngine, CompiledEngine],
    tmp_path: Path,
    role: str,
    change: dict[str, object],
    message: str,
) -> None:
    target, draft = engines
    if role == "target":
        target = dataclasses.replace(target, **change)  # type: ignore[arg-type]
    else:
        draft = dataclasses.replace(draft, **change)  # type: ignore[arg-type]
    with pytest.raises(StageError, match=message):
        package(target, draft, SpeculationConfig(), TritonConfig(), None, tmp_path / "out")


def test_a_folder_that_cannot_be_written_is_named(
    engines: tuple[CompiledEngine, CompiledEngine], tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(
        StageError, match="cannot write: Not a directory\n  A file stands where a folder is needed"
    ):
        package(*engines, SpeculationConfig(), TritonConfig(), None, tmp_path / "file" / "out")


def test_readme_names_every_tensor_and_metric(
    engines: tuple[CompiledEngine, CompiledEngine], tmp_path: Path
) -> None:
    record = package(*engines, SpeculationConfig(), TritonConfig(), None, tmp_path / "out")
    readme = (record.path / "README.md").read_text()
    assert all(f"| `{spec.name}` |" in readme for spec in (*INPUTS, *OUTPUTS, *METRICS))


def test_readme_of_the_bls_layout_has_types_and_no_placeholders(
    engines: tuple[CompiledEngine, CompiledEngine], tmp_path: Path
) -> None:
    for engine in engines:
        for name in ("tokenizer.json", "tokenizer_config.json"):
            (engine.path / name).write_text("{}")
    config = TritonConfig(layout="bls")
    record = package(*engines, SpeculationConfig(), config, None, tmp_path / "out")
    readme = (record.path / "README.md").read_text()
    assert "${" not in readme
    assert "| `generation_logits` | FP32 |" in readme
    assert "| `acceptance` | STRING | rule at temperature > 0" in readme
    assert "`ensemble`" in readme


def test_latency_script_needs_nothing_of_the_toolkit(
    engines: tuple[CompiledEngine, CompiledEngine], tmp_path: Path
) -> None:
    record = package(*engines, SpeculationConfig(), TritonConfig(), None, tmp_path / "out")
    program = (
        "import runpy, sys; sys.modules['toolkit'] = None; sys.argv[:] = sys.argv[1:]\n"
        "runpy.run_path(sys.argv[0], run_name='__main__')"
    )
    command = [sys.executable, "-c", program, str(record.path / "validate_latency.py"), "--help"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "--prompts" in done.stdout


def test_launch_script_says_which_python_is_missing(
    engines: tuple[CompiledEngine, CompiledEngine], tmp_path: Path
) -> None:
    record = package(*engines, SpeculationConfig(), TritonConfig(), None, tmp_path / "out")
    tools = tmp_path / "bin"
    tools.mkdir()
    for name in ("sh", "dirname"):
        program = next(
            Path(folder) / name for folder in ("/bin", "/usr/bin") if (Path(folder) / name).exists()
        )
        (tools / name).symlink_to(program)
    done = subprocess.run(
        [record.path / "launch.sh"],
        env={"PATH": str(tools)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "no Python with the toolkit found" in done.stderr
