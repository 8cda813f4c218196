"""A place with a stand-in `trtllm-build` on the PATH, and `docker` where asked; and TRT-LLM
checkpoints to build from.
"""

from __future__ import annotations

import json
import os
import shutil
import stat
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tests.support.checkpoints import write_byte_tokenizer
from toolkit.engines.trt_engine import TrtEngineBackend
from toolkit.records.build import QuantizedCheckpoint, TrtllmForm

STAND_IN = Path(__file__).with_name("trtllm_build.py")
# What `docker run ... IMAGE trtllm-build ARGUMENTS` comes to: the mounts' sources in place of the
# paths inside.
DOCKER = """#!{python}
import os, re, sys
line = sys.argv[1:]
if line[0] == "kill":
    sys.exit(0)
with open({record!r}, "w") as record:
    record.write("\\n".join(line))
targets = [part for part in line if "target=" in part]
mounts = dict(re.search(r"source=([^,]+),target=([^,]+)", part).groups()[::-1] for part in targets)
arguments = [mounts.get(part, part) for part in line[line.index("trtllm-build") + 1:]]
arguments = [part.replace("/tmp/model.cache", {record!r} + ".cache") for part in arguments]
os.execv({python!r}, [{python!r}, "-I", "-S", {stand_in!r}, *arguments])
"""


@dataclass
class Place:
    """A bin folder, and what the stand-in is told. gpus: what the backend believes this machine
    has.
    """

    bin: Path
    settings: dict[str, str] = field(default_factory=dict)
    gpus: list[str] = field(default_factory=list)

    def backend(self, **fields: Any) -> TrtEngineBackend:
        given: dict[str, Any] = {
            "installed_parser": lambda: None,
            "tensorrt": lambda: None,
            "gpus": lambda: self.gpus,
            **fields,
        }
        return TrtEngineBackend(which=self.which, environment=self.environment, **given)

    def which(self, name: str) -> str | None:
        return shutil.which(name, path=str(self.bin))

    @property
    def environment(self) -> dict[str, str]:
        return {"PATH": f"{self.bin}{os.pathsep}/usr/bin{os.pathsep}/bin", **self.settings}

    def add_docker(self) -> Path:
        """Returns the file that its arguments will be in, a line each."""
        record = self.bin / "docker-arguments"
        _executable(
            self.bin / "docker",
            DOCKER.format(python=sys.executable, record=str(record), stand_in=str(STAND_IN)),
        )
        return record


def place_with_builder(folder: Path, **settings: str) -> Place:
    folder.mkdir(parents=True, exist_ok=True)
    _executable(
        folder / "trtllm-build", f'#!/bin/sh\nexec {sys.executable} -I -S {STAND_IN} "$@"\n'
    )
    return Place(folder, settings)


def _executable(file: Path, text: str) -> None:
    file.write_text(text, encoding="utf-8")
    file.chmod(file.stat().st_mode | stat.S_IXUSR)


def write_trtllm_checkpoint(
    folder: Path,
    *,
    role: str = "target",
    quant_algo: str | None = "FP8",
    kv_cache_quant_algo: str | None = None,
    tp_size: int = 1,
    pp_size: int = 1,
    architecture: str = "LlamaForCausalLM",
    vocab_size: int = 258,
) -> QuantizedCheckpoint:
    """A small random checkpoint in TRT-LLM's form, in a subfolder of one with tokenizer files.
    Returns its record.
    """
    write_byte_tokenizer(folder)
    world_size = tp_size * pp_size
    form = folder / "trtllm"
    form.mkdir()
    config = {
        "producer": {"name": "modelopt", "version": "0.47.0"},
        "architecture": architecture,
        "dtype": "bfloat16",
        "logits_dtype": "float16",
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "vocab_size": vocab_size,
        "max_position_embeddings": 4096,
        "mapping": {"world_size": world_size, "tp_size": tp_size, "pp_size": pp_size, "cp_size": 1},
        "quantization": {"quant_algo": quant_algo, "kv_cache_quant_algo": kv_cache_quant_algo},
    }
    (form / "config.json").write_text(json.dumps(config))
    for rank in range(world_size):
        weights = torch.randint(
            -100, 100, (512, 64), generator=torch.Generator().manual_seed(rank), dtype=torch.int8
        )
        save_file(
            {"transformer.layers.0.attention.qkv.weight": weights}, form / f"rank{rank}.safetensors"
        )
    return QuantizedCheckpoint(
        role=role,
        path=folder,
        quant_algo=quant_algo,
        kv_cache_quant_algo=kv_cache_quant_algo,
        architecture=architecture,
        vocab_size=vocab_size,
        weight_bytes=sum(file.stat().st_size for file in form.glob("rank*.safetensors")),
        quality=None,
        checks=(),
        trtllm=TrtllmForm(form, tp_size, pp_size),
    )
