"""Engines do not hold their weights twice, neither while they are built nor while they are loaded.
This is measured in a process of its own, which does nothing else.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.checkpoints import write_checkpoint
from toolkit.engines.embedded.directory import WEIGHTS
from toolkit.pipeline.toolchain import compiler_path

PROGRAM = """
import json, sys, threading, time
from pathlib import Path
from toolkit.engines.embedded.package import prepare
from toolkit.engines.embedded.directory import WEIGHTS, open_directory
from toolkit.engines.embedded.weights import load_weights
from toolkit.engines.registry import loader
from toolkit.engines.stage import compile_engine
from toolkit.interfaces import EngineSpec
from toolkit.pipeline.memory import freed_blocks_returned
from toolkit.records.build import QuantizedCheckpoint

def held():
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith("RssAnon")).split()[1])

class Stop(Exception):
    pass

def watch(work):
    before, peak, is_done = held(), [0], threading.Event()
    def sample():
        while not is_done.wait(0.001):
            peak[0] = max(peak[0], held())
    thread = threading.Thread(target=sample)
    thread.start()
    result = work()
    is_done.set()
    thread.join()
    final = held() - before
    del result
    return max(peak[0] - before, final), final

def build(mode, folder, progress):
    folder.mkdir()
    record = QuantizedCheckpoint("target", source, None, None, "", 258, 0, None, ())
    spec = EngineSpec("target", 2, 32, 64, 0, mode=mode)
    compile_engine("torch", record, spec, folder, progress)

def prepared():
    found = open_directory(folder)
    tensors = load_weights(folder / WEIGHTS)
    return prepare(found.shape, tensors, "bfloat16", 2, 64, 16, kv_dtype="bfloat16")

def fused():
    # what a build holds when it begins to compile
    held_then, before = [], held()
    def stop(done, total, what):
        if "compiling" in what:
            held_then.append(held() - before)
            raise Stop
    try:
        with freed_blocks_returned():
            build("compiled", folder, stop)
    except Stop:
        return held_then

source, folder = Path(sys.argv[2]), Path(sys.argv[3])
print(json.dumps({
    "build": lambda: build("eager", folder, lambda done, total, what: None),
    "eager": lambda: watch(lambda: loader("torch").load(folder, threads=1)),
    "packed": lambda: watch(prepared),
    "fused": fused,
}[sys.argv[1]]()))
"""


def measured(what: str, source: Path, folder: Path) -> list[int]:
    """Bytes of RssAnon that came up: at most and in the end, or when it begins to compile."""
    arguments = [sys.executable, "-c", PROGRAM, what, str(source), str(folder)]
    done = subprocess.run(arguments, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    values: list[int] = json.loads(done.stdout)
    return values


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """50 MB of weights."""
    return write_checkpoint(
        tmp_path_factory.mktemp("source"),
        hidden_size=512,
        intermediate_size=4096,
        num_hidden_layers=4,
    )


@pytest.fixture(scope="module")
def engine(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("engine") / "eager"
    measured("build", source, folder)
    return folder


@pytest.mark.parametrize("how", ["eager", "packed"])
def test_a_load_holds_no_weight_twice(source: Path, engine: Path, how: str) -> None:
    """eager: bfloat16 weights become float32. packed: those of a compiled engine, which are bound
    to it as they are.
    """
    peak, final = measured(how, source, engine)
    assert final > 0.9 * (engine / WEIGHTS).stat().st_size
    assert peak <= 1.3 * final


@pytest.mark.skipif(compiler_path() is None, reason="no C++ compiler")
def test_a_build_holds_no_fused_weights_beside_the_packed_ones(
    source: Path, tmp_path: Path
) -> None:
    """They are saved, and then read from their file as they are packed."""
    (held,) = measured("fused", source, tmp_path / "compiled")
    assert held < 0.2 * (tmp_path / "compiled" / WEIGHTS).stat().st_size
