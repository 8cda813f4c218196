"""On which device an engine is compiled, where the YAML leaves it to the machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.deployments import config_of
from toolkit.engines import spec
from toolkit.engines.spec import engine_spec
from toolkit.errors import UsageError
from toolkit.facts.models import CONFIGS

SMALL, LARGE = "Qwen/Qwen2.5-0.5B-Instruct", "meta-llama/Llama-3.2-1B-Instruct"


def checkpoint(folder: Path, hub_id: str) -> str:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIGS[hub_id]))
    return str(folder)


def machine(monkeypatch: pytest.MonkeyPatch, *gpus: str, usable: bool = True) -> None:
    monkeypatch.setattr(spec, "gpus", lambda: list(gpus))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(gpus) and usable)


def devices(target: str, draft: str, **keys: Any) -> list[tuple[str, int | None]]:
    config = config_of("torch", target__checkpoint=target, draft__checkpoint=draft, **keys)
    specs = [engine_spec(config, role) for role in ("target", "draft")]
    return [(made.device, made.prefill_chunk_len) for made in specs]


@pytest.mark.parametrize(
    ("target", "draft", "quant_algo", "device"),
    [
        # 15 million weights in a layer: a GPU gains if each has two bytes.
        (SMALL, SMALL, "NO_QUANT", "cuda"),
        (SMALL, SMALL, "FP8", "cpu"),
        (LARGE, SMALL, "FP8", "cuda"),  # the draft runs where the target does
        (SMALL, LARGE, "FP8", "cpu"),
    ],
)
def test_auto_takes_a_gpu_that_the_target_gains_from(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    target: str,
    draft: str,
    quant_algo: str,
    device: str,
) -> None:
    folders = checkpoint(tmp_path / "target", target), checkpoint(tmp_path / "draft", draft)
    keys = {f"{role}__quantization": {"quant_algo": quant_algo} for role in ("target", "draft")}
    machine(monkeypatch, "NVIDIA H100")
    chunk_len = 256 if device == "cuda" else 64
    assert devices(*folders, engine__device="auto", **keys) == [(device, chunk_len)] * 2
    # What the YAML names is taken, whether it gains or not.
    for named in ("cpu", "cuda"):
        assert [name for name, _ in devices(*folders, engine__device=named, **keys)] == [named] * 2


def test_auto_is_the_cpu_without_a_gpu_that_torch_can_use(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = checkpoint(tmp_path / "model", LARGE)
    for gpus, usable in (((), True), (("NVIDIA H100",), False)):
        machine(monkeypatch, *gpus, usable=usable)
        assert devices(folder, folder, engine__device="auto") == [("cpu", 64)] * 2
    machine(monkeypatch)
    with pytest.raises(UsageError, match="has no NVIDIA GPU"):
        devices(folder, folder, engine__device="cuda")


def test_a_checkpoint_that_cannot_be_read_is_left_to_those_who_report_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    machine(monkeypatch, "NVIDIA H100")
    absent = str(tmp_path / "absent")
    assert devices(absent, absent, engine__device="auto") == [("cuda", 256)] * 2
