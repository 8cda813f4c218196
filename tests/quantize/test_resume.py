"""A build that is killed while it quantizes goes on at the layer that it had reached, and ends with
the same files. It never takes up what belongs to another input, or is damaged.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.checkpoints import write_checkpoint
from tests.support.cli import write_config
from tests.support.quantizing import main as quantize_here

ROOT = Path(__file__).parents[2]
LAYERS, BATCHES = 4, 5
CALIBRATING, MEASURING = "calibrating, batches x layers", "measuring quality, batches"
IN_THE_THIRD_LAYER = (CALIBRATING, str(2 * BATCHES + 3))
GOING_ON = "quantize/target: going on after a killed run; layers calibrated before 2/4"
BEGINNING_ANEW = "quantize/target: what a killed run has left cannot be used; beginning anew 0/None"


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("pair")
    return (
        write_checkpoint(folder / "target", num_hidden_layers=LAYERS),
        write_checkpoint(folder / "draft", seed=1, num_hidden_layers=1),
    )


def yaml_of(folder: Path, pair: tuple[Path, Path], **calibration: Any) -> Path:
    """A YAML whose target is quantized with text that makes five batches."""
    folder.mkdir(exist_ok=True)
    lines = [{"text": f"def f{i}(x): return x * {i}  # {'w' * (i % 5)}"} for i in range(10)]
    heldout = [{"text": f"class C{i}: pass  # held out"} for i in range(3)]
    for name, rows in (("calib", lines), ("heldout", heldout)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return write_config(
        folder,
        pair,
        target={
            "checkpoint": str(pair[0]),
            "quantization": {"quant_algo": "W8A8_SQ_PER_CHANNEL"},
        },
        calibration={
            "dataset": "calib.jsonl",
            "heldout": "heldout.jsonl",
            "batch_size": 2,
            **calibration,
        },
        engine={"threads": 1, "max_batch_size": 2, "max_input_len": 64, "max_seq_len": 128},
    )


def killed(yaml: Path, store: Path, what: str, done: str) -> Path:
    """Kill a build with SIGKILL at this report; the folder that it kept things in."""
    command = [sys.executable, "-m", "tests.support.quantizing", str(yaml), str(store), what, done]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        assert process.stdout is not None
        lines = iter(process.stdout)
        try:
            assert "stopped\n" in lines, "the build ended before it could be killed"
        finally:
            os.kill(process.pid, signal.SIGKILL)
    return waiting_in(store)


def waiting_in(store: Path) -> Path:
    (folder,) = (store / "quantize" / "target").glob(".tmp.*/resume")
    return folder


Finish = Callable[[Path, Path], list[str]]


@pytest.fixture(scope="module")
def stopped(pair: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(a YAML, the store of its build that was killed in the third layer). Tests take copies."""
    folder = tmp_path_factory.mktemp("stopped")
    yaml, store = yaml_of(folder / "yaml", pair), folder / "store"
    killed(yaml, store, *IN_THE_THIRD_LAYER)
    return yaml, store


@pytest.fixture
def store(stopped: tuple[Path, Path], tmp_path: Path) -> Path:
    shutil.copytree(stopped[1], tmp_path / "store")
    return tmp_path / "store"


@pytest.fixture
def finish(capsys: pytest.CaptureFixture[str]) -> Finish:
    def to_the_end(yaml: Path, store: Path) -> list[str]:
        capsys.readouterr()
        quantize_here(str(yaml), str(store))
        return capsys.readouterr().out.splitlines()

    return to_the_end


def digest_in(lines: list[str]) -> str:
    (line,) = (line for line in lines if line.startswith("quantize/target sha256:"))
    return line.split()[1]


def reports(lines: list[str], what: str) -> list[str]:
    return [line for line in lines if line.startswith(f"quantize/target: {what}")]


@pytest.mark.parametrize(
    ("stop_at", "passes", "measures"),
    [
        (IN_THE_THIRD_LAYER, 2 * BATCHES, True),
        ((MEASURING, "2"), 0, True),
        (("reading back", "0"), 0, False),
    ],
    ids=["in the third layer", "measuring", "written"],
)
def test_a_killed_build_goes_on_and_ends_with_the_same_files(
    stop_at: tuple[str, str],
    passes: int,
    measures: bool,
    pair: tuple[Path, Path],
    finish: Finish,
    tmp_path: Path,
) -> None:
    yaml = yaml_of(tmp_path / "yaml", pair)
    expected = finish(yaml, tmp_path / "whole")
    assert len(reports(expected, CALIBRATING)) == LAYERS * BATCHES
    killed(yaml, tmp_path / "store", *stop_at)
    resumed = finish(yaml, tmp_path / "store")
    assert digest_in(resumed) == digest_in(expected)
    assert any(line.endswith(" resumed") for line in resumed)
    assert not any(line.endswith(" resumed") for line in expected)
    assert len(reports(resumed, CALIBRATING)) == passes
    assert (GOING_ON in resumed) == (passes > 0)
    assert bool(reports(resumed, MEASURING)) == measures
    assert list((tmp_path / "store").rglob("resume")) == []  # nothing waits any more
    assert list((tmp_path / "store").rglob(".tmp.*")) == []


def cut(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize("damage", [cut, flip, Path.unlink])
@pytest.mark.parametrize("name", ["layer-001.safetensors", "hidden-0"])
def test_what_is_damaged_is_not_used(
    name: str,
    damage: Callable[[Path], None],
    stopped: tuple[Path, Path],
    store: Path,
    finish: Finish,
) -> None:
    damage(waiting_in(store) / name)
    lines = finish(stopped[0], store)
    assert BEGINNING_ANEW in lines
    assert len(reports(lines, CALIBRATING)) == LAYERS * BATCHES


def test_what_another_device_has_made_is_not_used(
    stopped: tuple[Path, Path], store: Path, finish: Finish
) -> None:
    journal = waiting_in(store) / "journal.json"
    journal.write_text(journal.read_text().replace('"cpu"', '"cuda"'))
    assert BEGINNING_ANEW in finish(stopped[0], store)


def test_fresh_begins_at_the_first_layer(
    stopped: tuple[Path, Path], store: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    quantize_here(str(stopped[0]), str(store), fresh=True)
    lines = capsys.readouterr().out.splitlines()
    assert len(reports(lines, CALIBRATING)) == LAYERS * BATCHES


@pytest.mark.parametrize("change", ["checkpoint", "text", "setting"])
def test_another_input_begins_at_the_first_layer(
    change: str, pair: tuple[Path, Path], store: Path, finish: Finish, tmp_path: Path
) -> None:
    yaml, waiting = yaml_of(tmp_path / "yaml", pair), waiting_in(store)
    if change == "checkpoint":
        other = write_checkpoint(tmp_path / "target", seed=5, num_hidden_layers=LAYERS)
        yaml = yaml_of(tmp_path / "yaml", (other, pair[1]))
    elif change == "text":
        with (tmp_path / "yaml" / "calib.jsonl").open("a") as file:
            file.write('{"text": "one more"}\n')
    else:
        yaml = yaml_of(tmp_path / "yaml", pair, calib_max_seq_length=20)
    lines = finish(yaml, store)
    assert reports(lines, CALIBRATING)[0].startswith(f"quantize/target: {CALIBRATING} 1/")
    assert GOING_ON not in lines
    assert waiting.is_dir()  # the killed build may still be gone on with
    assert digest_in(lines) == digest_in(finish(yaml, tmp_path / "whole"))
