"""Writes the README.md of a repository for TensorRT-LLM's containers: how to start it, how to call
it, and its tensors.

The README is made from the folder itself, so it names nothing that the repository does not have: a
launch file is named only if it was written.
"""

from __future__ import annotations

from pathlib import Path

from toolkit.records.build import CompiledEngine
from toolkit.templates import render_template
from toolkit.triton.package import model_config
from toolkit.triton.package.deploy import PORTS, Deployment
from toolkit.triton.package.layout_trtllm import REPOSITORY
from toolkit.triton.package.tensor_rows import tensor_rows
from toolkit.triton.tensors.contract import METRICS

__all__ = ["write_readme"]


def write_readme(
    folder: Path,
    deployment: Deployment,
    target: CompiledEngine,
    draft: CompiledEngine | None,
    draft_len: int,
) -> None:
    """Write README.md. Call it last, when everything else is in `folder`."""
    config = model_config.read(folder / deployment.entry_model / "config.pbtxt")
    interface, tokens_tensor = "`llmapi` template", "sampling_param_max_tokens"
    if deployment.layout == "bls":
        interface, tokens_tensor = "`inflight_batcher_llm` templates", "max_tokens"
    text = render_template(
        __file__,
        "readme_trtllm.md.j2",
        deployment=deployment,
        target=target,
        interface=interface,
        pair=_pair(target, draft, draft_len),
        streams=(
            "streams its answers (decoupled)"
            if config.model_transaction_policy.decoupled
            else "answers each request once (not decoupled)"
        ),
        gpus=_gpus(deployment),
        repository=REPOSITORY,
        not_executed=_not_executed(target, draft),
        files={file.name for file in folder.iterdir()},
        ports=PORTS,
        tokens_tensor=tokens_tensor,
        has_draft_len=any(tensor.name == "num_draft_tokens" for tensor in config.input),
        inputs=tensor_rows(config.input),
        outputs=tensor_rows(config.output),
        # --plain reaches launch.sh from docker-run.sh, and on several nodes it is called itself.
        starter="docker-run.sh" if (folder / "docker-run.sh").is_file() else "launch.sh",
        metrics=METRICS if deployment.has_our_metrics else (),
        metrics_port=PORTS["metrics"],
        speculates=deployment.speculates,
    )
    (folder / "README.md").write_text(text, encoding="utf-8")


def _pair(target: CompiledEngine, draft: CompiledEngine | None, draft_len: int) -> str:
    pair = f"target {target.quant_algo or target.dtype}"
    if draft is not None:
        return (
            f"{pair}, draft {draft.quant_algo or draft.dtype}, up to {draft_len} draft tokens per"
            " step"
        )
    if draft_len:
        return f"{pair}, prompt lookup, up to {draft_len} draft tokens per step"
    return pair


def _gpus(deployment: Deployment) -> str:
    gpus = f"{deployment.gpus} GPU{'s' if deployment.gpus > 1 else ''}"
    return f"{gpus} on each of {deployment.nodes} nodes" if deployment.nodes > 1 else gpus


def _not_executed(*engines: CompiledEngine | None) -> list[str]:
    """The steps of these builds that no GPU has executed, each named once."""
    built = [
        engine.tensorrt_llm
        for engine in engines
        if engine is not None and engine.tensorrt_llm is not None
    ]
    return list(dict.fromkeys(item for build in built for item in build.not_executed))
