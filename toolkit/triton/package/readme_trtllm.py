"""README.md of a repository for TensorRT-LLM's containers: how to start it, how to call it, its
tensors.

Made from the folder itself. The tables of tensors are read from the configuration that Triton will
read, and a file to start it with is named where it was written; so nothing stands in it that the
repository does not have.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from toolkit.records.build import CompiledEngine
from toolkit.triton.package import model_config
from toolkit.triton.package.deploy import PORTS, Deployment
from toolkit.triton.package.layout_trtllm import REPOSITORY
from toolkit.triton.tensors.contract import (
    BLS_INPUTS,
    BLS_OUTPUTS,
    INPUTS,
    LOG_PROB_INPUTS,
    LOG_PROB_OUTPUTS,
    OUTPUTS,
)

__all__ = ["write_readme"]

MEANINGS = {
    spec.name: spec.meaning
    for spec in (*INPUTS, *OUTPUTS, *LOG_PROB_INPUTS, *LOG_PROB_OUTPUTS, *BLS_INPUTS, *BLS_OUTPUTS)
}
STARTS = {
    "launch.sh": "inside the container; the others start it",
    "docker-run.sh": "one machine, with NVIDIA's container toolkit; listens on loopback",
    "compose.yaml": "the same for Docker Compose: `docker compose up`",
    "kubernetes.yaml": (
        "one node: Deployment and Service; the volume claim `{resource}-repository` holds this"
        " folder"
    ),
    "slurm.sh": (
        "several nodes: `REPOSITORY=/shared/folder sbatch slurm.sh`; needs the pyxis plugin"
    ),
    "leaderworkerset.yaml": (
        "several nodes: LeaderWorkerSet and Service; needs LWS v1, the volume claim"
        " `{resource}-repository` and the secret `{resource}-ssh` (`id_ed25519`,"
        " `authorized_keys`), and an ssh server in the image"
    ),
}


def write_readme(
    folder: Path,
    deployment: Deployment,
    target: CompiledEngine,
    draft: CompiledEngine | None,
    draft_len: int,
) -> None:
    """When everything else is in `folder`."""
    (folder / "README.md").write_text(
        "\n".join(_lines(folder, deployment, target, draft, draft_len)), encoding="utf-8"
    )


def _lines(
    folder: Path,
    deployment: Deployment,
    target: CompiledEngine,
    draft: CompiledEngine | None,
    draft_len: int,
) -> Iterator[str]:
    config = model_config.read(folder / deployment.entry / "config.pbtxt")
    pair = f"target {target.quant_algo or target.dtype}"
    if draft is not None:
        pair += (
            f", draft {draft.quant_algo or draft.dtype}, up to {draft_len} draft tokens per step"
        )
    elif draft_len:
        pair += f", up to {draft_len} draft tokens per step, looked up in the text"
    form = "`inflight_batcher_llm` templates" if deployment.layout == "bls" else "`llmapi` template"
    streams = (
        "streams (decoupled)"
        if config.model_transaction_policy.decoupled
        else "answers each request once (not decoupled)"
    )
    yield f"# Triton model repository for TensorRT-LLM {deployment.version}"
    yield ""
    yield (
        f"Clients call `{deployment.entry}`, in the form of TensorRT-LLM's {form}: {pair}. It"
        f" {streams}."
    )
    lengths = f"{target.max_input_len} prompt tokens and {target.max_seq_len} in all"
    yield f"At most {lengths}, {target.max_batch_size} requests at once."
    where = f"{deployment.gpus} GPU{'s' if deployment.gpus > 1 else ''}"
    where += f" on each of {deployment.nodes} nodes" if deployment.nodes > 1 else ""
    yield (
        f"It needs {where}, and lies at `{REPOSITORY}` in `{deployment.image}`: its settings name"
        " that folder."
    )
    built = [
        engine.tensorrt_llm
        for engine in (target, draft)
        if engine is not None and engine.tensorrt_llm is not None
    ]
    unseen = dict.fromkeys(what for one in built for what in one.not_executed)
    if unseen:
        yield ""
        yield "Not executed on a GPU when this was written:"
        yield ""
        yield from (f"- {what}" for what in unseen)
    yield from ("", "## Launch", "", "| file | for |", "|---|---|")
    for name, what in STARTS.items():
        if (folder / name).exists():
            yield f"| `{name}` | {what.format(resource=deployment.resource_name)} |"
    tokens = "max_tokens" if deployment.layout == "bls" else "sampling_param_max_tokens"
    body = f'{{"text_input": "def read_config(path):", "{tokens}": 32}}'
    yield from ("", "## Call", "")
    yield f"    curl -d '{body}' localhost:{PORTS['http']}/v2/models/{deployment.entry}/generate"
    client = f'`Client("localhost:{PORTS["grpc"]}").stream("def read_config(path):")`'
    if any(tensor.name == "num_draft_tokens" for tensor in config.input):
        yield (
            f"    python validate_latency.py --url localhost:{PORTS['grpc']} --prompts"
            " prompts.jsonl"
        )
        yield from (
            "",
            (
                "`validate_latency.py` needs `tritonclient[grpc]` and numpy. It measures latency"
                " with and without speculation,"
            ),
        )
        yield f"and is a Python API too: {client}."
    else:
        yield from (
            "",
            (
                "`validate_latency.py` needs `tritonclient[grpc]` and numpy, and is a Python API:"
                f" {client}."
            ),
        )
        yield (
            "A request cannot ask for plain decoding here, so as a program it has nothing to"
            " compare with."
        )
    for title, tensors in (("Inputs", config.input), ("Outputs", config.output)):
        yield from ("", f"## {title}", "", "| name | type | meaning |", "|---|---|---|")
        yield from (_row(tensor) for tensor in tensors)
    yield from (
        "",
        "Tensors without a meaning are TensorRT-LLM's own, and described in its documentation.",
        "",
    )


def _row(tensor: Any) -> str:
    from tritonclient.grpc import model_config_pb2 as pb

    dtype = pb.DataType.Name(tensor.data_type).removeprefix("TYPE_")
    return f"| `{tensor.name}` | {dtype} | {MEANINGS.get(tensor.name, '').replace('|', 'or')} |"
