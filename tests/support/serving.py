"""A packaged repository of a small pair, for tests that talk to a real server."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from toolkit.config.schema import SpeculationConfig, TritonConfig
from toolkit.interfaces import EngineSpec
from toolkit.records.build import CompiledEngine, QuantizedCheckpoint, TritonRepository

MAX_BATCH_SIZE = 4
MAX_QUEUE_SIZE = 32
MAX_INPUT_LEN = 96
# Long enough that a whole sequence takes longer than a client needs to hang up, on a fast core,
# too.
MAX_SEQ_LEN = 960
MAX_DRAFT_LEN = 3


def compile_eager(role: str, checkpoint: Path, out_dir: Path) -> CompiledEngine:
    """An eager float64 engine: in float64 no result depends on which other requests are in the
    batch.
    """
    from toolkit.engines.stage import compile_engine

    source = QuantizedCheckpoint(
        role=role,
        path=checkpoint,
        quant_algo=None,
        kv_cache_quant_algo=None,
        architecture="LlamaForCausalLM",
        vocab_size=258,
        weight_bytes=0,
        quality=None,
        checks=(),
    )
    spec = EngineSpec(
        role=role,
        max_batch_size=MAX_BATCH_SIZE,
        max_input_len=MAX_INPUT_LEN,
        max_seq_len=MAX_SEQ_LEN,
        max_draft_len=MAX_DRAFT_LEN if role == "target" else 0,
        dtype="float64",
        mode="eager",
    )
    return compile_engine("torch", source, spec, out_dir, lambda done, total, what: None)


def package_pair(pair: tuple[Path, Path], folder: Path, **triton: Any) -> TritonRepository:
    """A repository of (target, draft) checkpoints in folder/repository."""
    from toolkit.inprocess import eos_token_ids
    from toolkit.triton.package.embedded import package

    target = compile_eager("target", pair[0], folder / "target")
    draft = compile_eager("draft", pair[1], folder / "draft")
    speculation = SpeculationConfig(max_draft_len=MAX_DRAFT_LEN)
    config = TritonConfig(
        **{
            "max_queue_size": MAX_QUEUE_SIZE,
            "default_max_tokens": 16,
            "request_timeout_s": 60.0,
            **triton,
        }
    )
    return package(
        target,
        draft,
        speculation,
        config,
        1,
        folder / "repository",
        end_ids=eos_token_ids(target.path),
    )


def add_bls_variant(repository: Path, name: str, parameters: dict[str, str]) -> None:
    """A second BLS model with other parameters, on the same engines."""
    from toolkit.triton.package import model_config

    shutil.copytree(repository / "tensorrt_llm_bls", repository / name)
    config = model_config.read(repository / name / "config.pbtxt")
    config.name = name
    config.instance_group[0].count = 1
    for key, value in parameters.items():
        config.parameters[key].string_value = value
    model_config.write(config, repository / name / "config.pbtxt")
