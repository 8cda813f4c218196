"""Engine directories of the kind vllm that nobody compiled, and the repository of a pair."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.support.checkpoints import write_byte_tokenizer
from toolkit.config.schema import TritonConfig
from toolkit.records.build import CompiledEngine, TritonRepository
from toolkit.triton.package.deploy_vllm import VllmDeployment
from toolkit.triton.package.layout_vllm import ENGINES
from toolkit.triton.package.vllm import package_vllm

ARGS: dict[str, Any] = {
    "model": f"{ENGINES}/target",
    "dtype": "auto",
    "max_model_len": 200,
    "max_num_seqs": 4,
    "enable_prefix_caching": True,
    "speculative_config": {
        "num_speculative_tokens": 3,
        "method": "draft_model",
        "model": f"{ENGINES}/draft",
    },
}

ENVIRONMENT = {"VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_KVCACHE_SPACE": "2"}


def engine(folder: Path, role: str) -> CompiledEngine:
    path = folder / role
    write_byte_tokenizer(path)
    (path / "config.json").write_text(f'{{"role": "{role}"}}')
    return CompiledEngine(
        role=role,  # type: ignore[arg-type]
        path=path,
        kind="vllm",
        mode="runtime",
        dtype="auto",
        device="cpu",
        quant_algo="W8A8_SQ_PER_CHANNEL",
        kv_cache_quant_algo=None,
        fp8_compute=None,
        max_batch_size=4,
        max_input_len=100,
        max_seq_len=200,
        max_draft_len=3,
        vocab_size=258,
        weight_bytes=1,
        notes=(),
    )


def deployment(**changes: Any) -> VllmDeployment:
    values = {"name": "Pair", "version": "0.32.0", "device": "cpu", "environment": ENVIRONMENT}
    return VllmDeployment(**{**values, **changes})


def repository(
    folder: Path,
    args: dict[str, Any] = ARGS,
    launched: VllmDeployment | None = None,
    pair: tuple[Path, Path] | None = None,
    **triton: Any,
) -> TritonRepository:
    """The repository of two engines. args without a draft model: of the target alone. launched:
    None for one on CPUs. pair: checkpoints that vLLM can load.
    """
    target, draft = (engine(folder / "engines", role) for role in ("target", "draft"))
    if pair is not None:
        target, draft = replace(target, path=pair[0]), replace(draft, path=pair[1])
    has_draft = "model" in args.get("speculative_config", {})
    return package_vllm(
        target,
        draft if has_draft else None,
        args,
        TritonConfig(**triton),
        launched or deployment(speculates="speculative_config" in args),
        folder / "out",
        max_draft_len=3,
    )
