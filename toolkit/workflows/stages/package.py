"""The stage `package`: write a Triton model repository for the engines.

The YAML decides how it speculates, or the advice where the YAML says `auto`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from toolkit.config.schema import DeploymentConfig, TensorRtLlmConfig, VllmConfig
from toolkit.interfaces import Progress
from toolkit.pipeline.sources import digest_sources
from toolkit.pipeline.stage import Finished, Stage
from toolkit.records.build import TritonRepository
from toolkit.workflows.deployment import embedded, speculation_of
from toolkit.workflows.stages.keys import versions

__all__ = ["in_container", "package_stage"]

# Our model files that are copied into the repository, and what runs one of them. They import the
# toolkit where it is served.
SHIPPED_MODULES = (
    *(
        f"toolkit.triton.models.{name}.model"
        for name in ("bls", "engine", "llmapi", "postprocessing", "preprocessing", "trtllm")
    ),
    "toolkit.triton.native.worker",
)

# Where and how the server is started, which is no part of the repository.
SERVER_SETTINGS = {"host", "http_port", "grpc_port", "metrics_port", "start_timeout_s"}

# What the launch files of the kind vllm say. The rest of the section is in the engine.
LAUNCH_SETTINGS = {"vllm", "kv_cache_gib", "tp_size", "pp_size", "gpus_per_node"}


def package_stage(config: DeploymentConfig, roles: Sequence[str]) -> Stage:
    """The stage `package` for the engines of these roles."""
    if config.vllm_engine is not None:
        return _vllm_stage(config, config.vllm_engine, roles)
    if config.trtllm_engine is not None:
        return _trtllm_stage(config, config.trtllm_engine, roles)
    return _embedded_stage(config, roles)


def _embedded_stage(config: DeploymentConfig, roles: Sequence[str]) -> Stage:
    from toolkit.inprocess import eos_token_ids
    from toolkit.triton.native.build import backend_name
    from toolkit.triton.package.embedded import VERSION, package

    engines = tuple(f"compile/{role}" for role in roles)
    needs = (*engines, "tune") if config.speculation.is_measured else engines

    def parts(finished: Finished) -> Mapping[str, Any]:
        settings = {
            "speculation": speculation_of(config, finished).model_dump(mode="json"),
            "triton": config.triton.model_dump(exclude={*SERVER_SETTINGS, "backend"}),
            "threads": embedded(config).threads,
            "backend": backend_name(config.triton.backend),
            "enable_prefix_caching": embedded(config).enable_prefix_caching,
        }
        inputs = {need: finished[need].entry.digest for need in engines}
        inputs["toolkit_sources"] = _sources()
        return {"config": settings, "inputs": inputs, "fingerprint": versions(["tritonclient"])}

    def run(finished: Finished, out_dir: Path, progress: Progress) -> TritonRepository:
        target, *drafts = (finished[need].record for need in engines)
        speculation = speculation_of(config, finished)
        draft = drafts[0] if speculation.has_draft_model else None
        return package(
            target,
            draft,
            speculation,
            config.triton,
            embedded(config).threads,
            out_dir,
            end_ids=eos_token_ids(target.path),
            reuse_prefixes=embedded(config).enable_prefix_caching,
        )

    return Stage("package", VERSION, TritonRepository, needs, parts, run)


def _trtllm_stage(
    config: DeploymentConfig, engine: TensorRtLlmConfig, roles: Sequence[str]
) -> Stage:
    """The stage for TensorRT-LLM's containers.

    It needs the quantized target for its end ids, which an engine does not contain.
    """
    from toolkit.checkpoints.shape import read_shape
    from toolkit.engines.trtllm.llm_args import read_llm_args
    from toolkit.triton.package.embedded import VERSION
    from toolkit.triton.package.trtllm import package_bls, package_llmapi

    triton = config.triton
    engines = tuple(f"compile/{role}" for role in roles)
    needs = (*engines, "quantize/target", *(["tune"] if config.speculation.is_measured else []))
    image = None if config.pytorch_flow is None else config.pytorch_flow.container_image

    def repository_options(finished: Finished) -> dict[str, Any]:
        draft_len = speculation_of(config, finished).longest_draft
        return {
            "name": config.name,
            "gpus_per_node": engine.gpus_per_node,
            "max_draft_len": draft_len,
        }

    def parts(finished: Finished) -> Mapping[str, Any]:
        memory = {
            "free_gpu_memory_fraction": engine.free_gpu_memory_fraction,
            "enable_block_reuse": engine.enable_block_reuse,
        }
        settings = {
            "kind": config.engine.kind,
            "speculation": speculation_of(config, finished).model_dump(mode="json"),
            "triton": triton.model_dump(exclude=SERVER_SETTINGS),
            **repository_options(finished),
            **memory,
            **({} if image is None else {"container_image": image}),
        }
        inputs = {need: finished[need].entry.digest for need in (*engines, "quantize/target")}
        inputs["toolkit_sources"] = _sources()
        return {"config": settings, "inputs": inputs, "fingerprint": versions(["tritonclient"])}

    def run(finished: Finished, out_dir: Path, progress: Progress) -> TritonRepository:
        target, *drafts = (finished[need].record for need in engines)
        draft = drafts[0] if speculation_of(config, finished).has_draft_model else None
        if config.capabilities.layout == "llmapi":
            args = in_container(read_llm_args(target.path))
            return package_llmapi(
                target,
                draft,
                args,
                triton,
                out_dir,
                container_image=image,
                **repository_options(finished),
            )
        return package_bls(
            target,
            draft,
            triton,
            out_dir,
            end_ids=read_shape(finished["quantize/target"].record.path).eos_token_ids,
            free_gpu_memory_fraction=engine.free_gpu_memory_fraction,
            enable_block_reuse=engine.enable_block_reuse,
            acceptance=config.speculation.acceptance,
            max_prompt_tokens=config.speculation.max_prompt_tokens,
            adaptive=config.speculation.adaptive_settings,
            **repository_options(finished),
        )

    return Stage("package", VERSION, TritonRepository, needs, parts, run)


def _vllm_stage(config: DeploymentConfig, engine: VllmConfig, roles: Sequence[str]) -> Stage:
    """The stage for vLLM: Triton's vLLM backend and vLLM's own server read the same repository."""
    from toolkit.triton.package.embedded import VERSION
    from toolkit.triton.package.layout_vllm import ENGINES
    from toolkit.triton.package.vllm import package_vllm

    engines = tuple(f"compile/{role}" for role in roles)
    needs = (*engines, *(["tune"] if config.speculation.is_measured else []))

    def parts(finished: Finished) -> Mapping[str, Any]:
        settings = {
            "kind": config.engine.kind,
            "name": config.name,
            "engine": engine.model_dump(include=LAUNCH_SETTINGS),
            "device": finished[engines[0]].record.device,
            "speculation": speculation_of(config, finished).model_dump(mode="json"),
            "triton": config.triton.model_dump(exclude=SERVER_SETTINGS),
        }
        inputs = {need: finished[need].entry.digest for need in engines}
        inputs["toolkit_sources"] = digest_sources([__name__])
        return {"config": settings, "inputs": inputs, "fingerprint": versions(["tritonclient"])}

    def run(finished: Finished, out_dir: Path, progress: Progress) -> TritonRepository:
        from toolkit.engines.spec import engine_spec
        from toolkit.engines.vllm.arguments import (
            SPECULATION,
            environment_of,
            has_draft_model,
            read_engine_args,
            resolved,
        )
        from toolkit.triton.package.deploy_vllm import VllmDeployment

        target, *drafts = (finished[need].record for need in engines)
        args, spec = read_engine_args(target.path), engine_spec(config, "target")
        assert spec.vllm is not None
        deployment = VllmDeployment(
            config.name,
            engine.version,
            target.device,
            environment_of(replace(spec, device=target.device), spec.vllm),
            engine.world_size,
            engine.gpus_per_node,
            SPECULATION in args,
        )
        return package_vllm(
            target,
            drafts[0] if has_draft_model(args) else None,
            resolved(args, f"{ENGINES}/target", f"{ENGINES}/draft"),
            config.triton,
            deployment,
            out_dir,
            max_draft_len=speculation_of(config, finished).longest_draft,
        )

    return Stage("package", VERSION, TritonRepository, needs, parts, run)


def _sources() -> str:
    """The digest of our sources that decide what a repository contains and does."""
    return digest_sources([__name__, *SHIPPED_MODULES])


def in_container(llm_args: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of LLM(), with the folders of both models in the container that serves them."""
    from toolkit.engines.trtllm.llm_args import resolved
    from toolkit.triton.package.layout_trtllm import ENGINES

    return resolved(llm_args, f"{ENGINES}/target", f"{ENGINES}/draft")
