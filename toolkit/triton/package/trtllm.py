"""The package stage for TensorRT-LLM's kinds: it takes engines and writes the repository that
TensorRT-LLM's containers serve, with the files that start it.

trt_engine: the `bls` layout over the backend tensorrtllm. trtllm_pytorch: the `llmapi` layout,
whose model.yaml holds the arguments of `LLM()`. This module needs neither TensorRT-LLM nor a GPU.
Every configuration is read back and compared.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from toolkit.config.schema import TritonConfig
from toolkit.errors import StageError
from toolkit.facts.support import LOG_PROBS
from toolkit.facts.versions import VERSIONS
from toolkit.records.build import CompiledEngine, TensorRtLlmBuild, TritonRepository
from toolkit.triton.package import deploy, layout_bls, model_config, monitoring
from toolkit.triton.package.layout_trtllm import (
    PLAIN_YAML,
    Engines,
    bls_of_engines,
    plain_arguments,
)
from toolkit.triton.package.monitoring import Monitored
from toolkit.triton.package.readme_trtllm import write_readme
from toolkit.triton.package.repository import link_tree, write_client
from toolkit.triton.tensors.contract import DRAFT_MODEL, MODEL
from toolkit.words import AcceptanceChoice

__all__ = ["model_yaml", "package_bls", "package_llmapi"]

CANCELLATION_CHECK_PERIOD_MS = 100  # the template's default


def package_bls(
    target: CompiledEngine,
    draft: CompiledEngine | None,
    triton: TritonConfig,
    out_dir: Path,
    *,
    name: str,
    end_ids: Sequence[int],
    max_draft_len: int,
    gpus_per_node: int = 8,
    free_gpu_memory_fraction: float = 0.9,
    enable_block_reuse: bool = True,
    acceptance: AcceptanceChoice = "auto",
    max_prompt_tokens: int | None = None,
    adaptive: Mapping[str, Any] | None = None,
) -> TritonRepository:
    """Package the engine flow. max_prompt_tokens, adaptive: as in `layout_bls.settings_of`. Raises
    StageError if a configuration reads back differently.
    """
    build = _tensorrt_llm_build(target)
    engines = Engines(
        version=build.version,
        max_batch_size=target.max_batch_size,
        max_input_len=target.max_input_len,
        max_seq_len=target.max_seq_len,
        max_draft_len=0 if draft is None else max_draft_len,
        tp_size=build.tp_size,
        pp_size=build.pp_size,
        gpus_per_node=gpus_per_node,
        free_gpu_memory_fraction=free_gpu_memory_fraction,
        enable_block_reuse=enable_block_reuse,
        acceptance=acceptance,
        max_prompt_tokens=max_prompt_tokens,
        adaptive=adaptive,
        vocab_size=target.vocab_size,
    )
    bls = bls_of_engines(engines, triton, end_ids)
    for model, config in layout_bls.model_configs(bls).items():
        (out_dir / model / "1").mkdir(parents=True, exist_ok=True)
        model_config.write(config, out_dir / model / "config.pbtxt")
    layout_bls.write_models(out_dir, target.path)
    for model, engine in ((MODEL, target), (DRAFT_MODEL, draft)):
        if engine is not None:
            link_tree(engine.path, out_dir / model / "1" / "engine")
    deployment = deploy.Deployment(
        name, "bls", build.version, engines.world_size, gpus_per_node, draft is not None
    )
    _finish(out_dir, deployment, target, draft, engines.max_draft_len)
    return TritonRepository(
        out_dir, "bls", "tensorrt_llm_bls", triton.decoupled, engines.max_draft_len
    )


def package_llmapi(
    target: CompiledEngine,
    draft: CompiledEngine | None,
    llm_args: Mapping[str, Any],
    triton: TritonConfig,
    out_dir: Path,
    *,
    name: str,
    max_draft_len: int,
    gpus_per_node: int = 8,
    container_image: str | None = None,
) -> TritonRepository:
    """Package the PyTorch flow. llm_args: the arguments of LLM(), with the models' paths in the
    container, `ENGINES/target` and `ENGINES/draft`. container_image: None for NVIDIA's.

    Raises StageError if a configuration reads back differently.
    """
    build, version = _tensorrt_llm_build(target), out_dir / MODEL / "1"
    is_ours = triton.model_py == "ours"
    version.mkdir(parents=True, exist_ok=True)
    model_config.write(
        model_config.build_trtllm(decoupled=triton.decoupled, ours=is_ours),
        out_dir / MODEL / "config.pbtxt",
    )
    _write_yaml(model_yaml(llm_args, triton, build.version), version / "model.yaml")
    if "speculative_config" in llm_args:
        plain = model_yaml(plain_arguments(llm_args), triton, build.version)
        _write_yaml(plain, version / PLAIN_YAML)
    if is_ours:
        layout_bls.write_model("trtllm", version)
    for engine in [target, draft] if draft is not None else [target]:
        link_tree(engine.path, version / "engines" / engine.role)
    world = build.tp_size * build.pp_size
    deployment = deploy.Deployment(
        name,
        "llmapi",
        build.version,
        world,
        gpus_per_node,
        draft is not None,
        triton.model_py,
        container_image,
    )
    _finish(out_dir, deployment, target, draft, max_draft_len)
    return TritonRepository(out_dir, "llmapi", MODEL, triton.decoupled, max_draft_len)


def model_yaml(llm_args: Mapping[str, Any], triton: TritonConfig, version: str) -> dict[str, Any]:
    """The content of model.yaml: the arguments of LLM(), Triton's section, and for our model.py a
    section of our own, which the container's model.py would not understand. There, log_probs: how
    many log-probabilities per token this version returns. ignored: settings of requests that it
    would ignore, and that are refused.
    """
    row = VERSIONS[version]
    penalties = () if row.penalties else ("frequency_penalty", "presence_penalty")
    settings = {
        **llm_args,
        "triton_config": {
            "max_batch_size": 0,
            "decoupled": triton.decoupled,
            "cancellation_check_period_ms": CANCELLATION_CHECK_PERIOD_MS,
        },
    }
    if triton.model_py == "ours":
        settings["toolkit"] = {
            "default_max_tokens": triton.default_max_tokens,
            "log_probs": _log_probs(llm_args, version),
            "ignored": [*penalties, *(() if row.seeds else ("seed",))],
            "max_queue_size": triton.max_queue_size,
            "request_timeout_s": triton.request_timeout_s,
            "stream_interval_ms": triton.stream_interval_ms,
        }
    return settings


def _log_probs(llm_args: Mapping[str, Any], version: str) -> int:
    """How many log-probabilities per token an answer has; none where target and head are one
    model (facts/support.py, SOURCES).
    """
    speculative = llm_args.get("speculative_config") or {}
    if speculative.get("decoding_type") in ("Eagle", "Eagle3"):
        return 0
    return LOG_PROBS["trtllm_pytorch"].get(version, 0)


def _tensorrt_llm_build(engine: CompiledEngine) -> TensorRtLlmBuild:
    if engine.tensorrt_llm is None:
        raise StageError(
            "package",
            f"TensorRT-LLM did not build this engine: its kind is {engine.kind}",
            where=engine.path,
        )
    return engine.tensorrt_llm


def _write_yaml(settings: Mapping[str, Any], path: Path) -> None:
    import yaml

    path.write_text(yaml.safe_dump(dict(settings), sort_keys=False), encoding="utf-8")
    if yaml.safe_load(path.read_text(encoding="utf-8")) != settings:
        raise StageError(
            "package", "model.yaml reads back differently from what was written", where=path
        )


def _finish(
    folder: Path,
    deployment: deploy.Deployment,
    target: CompiledEngine,
    draft: CompiledEngine | None,
    max_draft_len: int,
) -> None:
    write_client(folder)
    deploy.write(deployment, folder)
    if deployment.has_our_metrics:
        monitored = Monitored(
            deployment.resource_name,
            deploy.PORTS["metrics"],
            max_draft_len,
            counts_positions=deployment.layout == "bls",
            counts_waits=deployment.layout == "bls",
        )
        monitoring.write(monitored, folder)
    write_readme(folder, deployment, target, draft, max_draft_len)
