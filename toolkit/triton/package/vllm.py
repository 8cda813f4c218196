"""The package stage for vLLM: the repository that Triton's vLLM backend serves.

    vllm_model/config.pbtxt              the backend, and nothing that it knows better
    vllm_model/1/model.json              fields of AsyncEngineArgs, for both models
    vllm_model/1/engines/target, draft   checkpoints, linked
    README.md, launch files              written by deploy_vllm

The backend adds the tensors to the configuration itself, and it turns model.json into
`AsyncEngineArgs(**json)`. It refuses a model that is not decoupled. vLLM's own server takes the
same arguments as flags, so model.json is the one place where they are edited.

This module needs neither vLLM nor a GPU. What it writes is read back and compared.
Source: triton-inference-server/vllm_backend src/model.py (00ea75bc).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from toolkit.config.schema import TritonConfig
from toolkit.errors import StageError
from toolkit.records.build import CompiledEngine, TritonRepository
from toolkit.triton.package import deploy_vllm, model_config, monitoring
from toolkit.triton.package.deploy_vllm import VllmDeployment
from toolkit.triton.package.layout_vllm import ENGINES, MODEL_JSON, SPECULATION
from toolkit.triton.package.monitoring import Monitored
from toolkit.triton.package.repository import link_tree
from toolkit.triton.tensors.contract import VLLM_MODEL

__all__ = ["package_vllm"]

# NVIDIA's sample still has the first two. AsyncEngineArgs knows none of them at the top level.
OLD_KEYS = ("speculative_model", "num_speculative_tokens", "speculative_draft_tensor_parallel_size")


def package_vllm(
    target: CompiledEngine,
    draft: CompiledEngine | None,
    args: Mapping[str, Any],
    triton: TritonConfig,
    deployment: VllmDeployment,
    out_dir: Path,
    *,
    max_draft_len: int,
) -> TritonRepository:
    """Write the repository into out_dir. args: fields of AsyncEngineArgs, with the models' paths in
    the container, `ENGINES/target` and `ENGINES/draft`. draft: None if the arguments name none.
    deployment: how it is launched.

    Raises StageError if the arguments do not fit the backend or the engines, or if a file reads
    back differently.
    """
    _check(args, draft, triton, out_dir)
    version = out_dir / VLLM_MODEL / "1"
    version.mkdir(parents=True, exist_ok=True)
    model_config.write(model_config.build_vllm(), out_dir / VLLM_MODEL / "config.pbtxt")
    _write_json(args, out_dir / MODEL_JSON)
    for engine in [target, draft] if draft is not None else [target]:
        link_tree(engine.path, version / "engines" / engine.role)
    monitored = Monitored(
        deployment.resource_name, deploy_vllm.HTTP_PORT, max_draft_len, is_vllm=True
    )
    monitoring.write(monitored, out_dir)
    deploy_vllm.write(deployment, args, _pair(target, draft, max_draft_len), out_dir)
    return TritonRepository(out_dir, "vllm", VLLM_MODEL, True, max_draft_len)


def _check(
    args: Mapping[str, Any], draft: CompiledEngine | None, triton: TritonConfig, out_dir: Path
) -> None:
    if not triton.decoupled:
        raise StageError(
            "package",
            "triton.decoupled is false, and Triton's vLLM backend serves decoupled models only",
            where=out_dir,
            hint="Remove triton.decoupled.",
        )
    old_keys = [key for key in OLD_KEYS if key in args]
    if old_keys:
        raise StageError(
            "package",
            f"vLLM no longer has the argument {old_keys[0]}",
            where=out_dir,
            hint=f"Put it into {SPECULATION}, with the name that it has there.",
        )
    named = {args["model"], args.get(SPECULATION, {}).get("model")} - {None}
    packaged = {f"{ENGINES}/target"} | ({f"{ENGINES}/draft"} if draft is not None else set())
    if named != packaged:
        raise StageError(
            "package",
            f"the arguments name the models {_listed(named)}, and the repository has"
            f" {_listed(packaged)}",
            where=out_dir,
            hint="Compile the target again: its engine directory holds the arguments.",
        )


def _pair(target: CompiledEngine, draft: CompiledEngine | None, draft_len: int) -> str:
    pair = f"target {target.quant_algo or target.dtype}"
    if draft is not None:
        pair += f", draft {draft.quant_algo or draft.dtype}"
    return f"{pair}, up to {draft_len} draft tokens per step" if draft_len else pair


def _listed(paths: set[Any]) -> str:
    return " and ".join(sorted(map(str, paths)))


def _write_json(args: Mapping[str, Any], path: Path) -> None:
    path.write_text(json.dumps(dict(args), indent=2) + "\n", encoding="utf-8")
    if json.loads(path.read_text(encoding="utf-8")) != args:
        raise StageError(
            "package", "model.json reads back differently from what was written", where=path
        )
