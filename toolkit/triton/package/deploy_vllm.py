"""Writes the files that start a repository for vLLM.

    launch_vllm.sh         vLLM's own server, with any Python that has vLLM; the others start it
    serve_vllm.py          what it runs: model.json as the server's flags
    docker-run_vllm.sh     one node, in vLLM's image
    kubernetes_vllm.yaml   one node, in vLLM's image: Deployment and Service
    ray.sh                 several nodes: a Ray cluster, and the server on its first node
    leaderworkerset.yaml   several nodes: LeaderWorkerSet and Service, without Ray
    launch.sh              inside Triton's container: tritonserver with its vLLM backend
    docker-run.sh, compose.yaml, kubernetes.yaml    one node, in Triton's container

A container of Triton has one version of vLLM inside. For a version that no container has, the last
row is left out, and launch.sh and the README say so. A deployment over several nodes has no
launch.sh: Triton's backend starts vLLM on one node only. A deployment on CPUs has no files for
images, since these images are for GPUs.

Sources: vLLM docs/deployment/frameworks/lws.md and docs/serving/parallelism_scaling.md (processes
of several nodes), examples/ray_serving/multi-node-serving.sh (Ray); vllm/config/parallel.py.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolkit.facts.vllm import SERVING_TAGS, VLLM_VERSIONS
from toolkit.templates import render_template
from toolkit.triton import access
from toolkit.triton.access import KEY_VARIABLE
from toolkit.triton.package import serve_vllm
from toolkit.triton.package.deploy import (
    PORTS,
    SERVER_PROGRAM,
    SHM_BYTES_PER_GPU,
    STARTUP_ATTEMPTS,
    STARTUP_PERIOD_S,
    WORKER_ATTEMPTS,
    WORKER_WAIT_S,
    resource_name_of,
)
from toolkit.triton.package.layout_vllm import REPOSITORY
from toolkit.triton.tensors.contract import VLLM_MODEL
from toolkit.words import Device

__all__ = ["VllmDeployment", "write"]

VLLM_IMAGE = "vllm/vllm-openai:v{version}"
HTTP_PORT = 8000  # of vLLM's own server, which has its metrics on it, too
RAY_PORT = 6379
PROMPT = "def read_config(path):"  # in the README
LAUNCH_VLLM = f"{REPOSITORY}/launch_vllm.sh"


@dataclass(frozen=True, slots=True)
class VllmDeployment:
    """What is started. environment: variables that belong to the arguments in model.json."""

    name: str  # clients of vLLM's own server name it as the model
    version: str  # of vLLM
    device: Device
    environment: Mapping[str, str]
    world_size: int = 1
    gpus_per_node: int = 8
    speculates: bool = True

    @property
    def triton_image(self) -> str | None:
        """The container of Triton that has this version of vLLM; None if none is known."""
        return VLLM_VERSIONS[self.version].serving_image

    @property
    def vllm_image(self) -> str:
        return VLLM_IMAGE.format(version=self.version)

    @property
    def nodes(self) -> int:
        """The least number of nodes that gives every node equally many ranks, as vLLM demands."""
        fewest = -(-self.world_size // self.gpus_per_node)
        return next(
            nodes for nodes in range(fewest, self.world_size + 1) if self.world_size % nodes == 0
        )

    @property
    def gpus(self) -> int:
        """GPUs on each node; 0 on CPUs."""
        return self.world_size // self.nodes if self.device == "cuda" else 0

    @property
    def has_triton(self) -> bool:
        """Whether Triton's backend can start it in a published container."""
        return self.triton_image is not None and self.device == "cuda" and self.nodes == 1

    @property
    def has_request_metrics(self) -> bool:
        """Whether its server is known to have --per-request-spec-decode-metrics, which needs
        speculation.
        """
        return self.speculates and bool(VLLM_VERSIONS[self.version].request_metrics)

    @property
    def has_plain_arm(self) -> bool:
        """Triton's backend serves one set of arguments; launch_vllm.sh has --plain."""
        return False

    @property
    def entry_model(self) -> str:
        """The model that clients of Triton call."""
        return VLLM_MODEL

    @property
    def resource_name(self) -> str:
        return resource_name_of(self.name)

    @property
    def shm_bytes(self) -> int:
        return SHM_BYTES_PER_GPU * self.gpus


def write(deployment: VllmDeployment, args: Mapping[str, Any], pair: str, folder: Path) -> None:
    """Write the files for this deployment, and the README, beside the model in `folder`. args: the
    content of model.json. pair: the models in words.
    """
    shutil.copyfile(serve_vllm.__file__, folder / "serve_vllm.py")
    for name, text in _files(deployment).items():
        (folder / name).write_text(text, encoding="utf-8")
        if name.endswith(".sh"):
            (folder / name).chmod(0o755)
    (folder / "README.md").write_text(_readme(deployment, args, pair, folder), encoding="utf-8")


def _readme(deployment: VllmDeployment, args: Mapping[str, Any], pair: str, folder: Path) -> str:
    """It names only what the folder has."""
    completion = {"model": deployment.name, "prompt": PROMPT, "max_tokens": 32, "temperature": 0}
    generate = {
        "text_input": PROMPT,
        "exclude_input_in_output": True,
        "sampling_parameters": json.dumps({"max_tokens": 32, "temperature": 0}),
    }
    return _render(
        "readme_vllm.md.j2",
        deployment,
        args=args,
        pair=pair,
        devices=_devices(deployment),
        known_containers=", ".join(_containers()),
        files={file.name for file in folder.iterdir()},
        completion=json.dumps(completion).replace("'", "'\\''"),
        generate=json.dumps(generate),
        metrics_port=HTTP_PORT,
        speculates=deployment.speculates,
    )


def _containers() -> list[str]:
    """The containers of Triton that are known, with what they have."""
    return [f"{tag} has {version}" for version, tag in SERVING_TAGS.items()]


def _devices(deployment: VllmDeployment) -> str:
    if deployment.device == "cpu":
        return f"CPUs, {deployment.world_size} process{'es' if deployment.world_size > 1 else ''}"
    gpus = f"{deployment.gpus} GPU{'s' if deployment.gpus > 1 else ''}"
    return f"{gpus} on each of {deployment.nodes} nodes" if deployment.nodes > 1 else gpus


def _files(deployment: VllmDeployment) -> dict[str, str]:
    files = {"launch_vllm.sh": _render("launch_vllm.sh.j2", deployment)}
    if deployment.nodes > 1:
        files["ray.sh"] = _render("ray.sh.j2", deployment)
        if deployment.device == "cuda":
            files["leaderworkerset.yaml"] = _leader_worker_set(deployment)
        return files
    files["launch.sh"] = _render("launch_vllm_backend.sh.j2", deployment)
    if deployment.device == "cuda":
        files["docker-run_vllm.sh"] = _docker_run_vllm(deployment)
        files["kubernetes_vllm.yaml"] = _render("kubernetes_vllm.yaml.j2", deployment)
    if deployment.has_triton:
        image = deployment.triton_image
        files["docker-run.sh"] = _render(
            "docker-run.sh.j2",
            deployment,
            image=image,
            options=[*_docker_options(deployment, *PORTS.values()), f"--env={KEY_VARIABLE}"],
            command=[f"{REPOSITORY}/launch.sh"],
        )
        files["compose.yaml"] = _render("compose.yaml.j2", deployment, image=image)
        files["kubernetes.yaml"] = _render("kubernetes.yaml.j2", deployment, image=image)
    return files


def _leader_worker_set(deployment: VllmDeployment) -> str:
    """The leader's startup probe also covers its wait for the workers."""
    waiting_attempts = WORKER_ATTEMPTS * WORKER_WAIT_S // STARTUP_PERIOD_S
    return _render(
        "leaderworkerset_vllm.yaml.j2",
        deployment,
        startup_attempts=STARTUP_ATTEMPTS + waiting_attempts,
    )


def _docker_run_vllm(deployment: VllmDeployment) -> str:
    """The image's entry point is `vllm serve`, which would take our script for a model."""
    options = _docker_options(deployment, HTTP_PORT)
    return _render(
        "docker-run.sh.j2",
        deployment,
        image=deployment.vllm_image,
        options=[*options, f"--entrypoint={LAUNCH_VLLM}"],
        command=["--host", "0.0.0.0"],
    )


def _docker_options(deployment: VllmDeployment, *ports: int) -> list[str]:
    return [
        *["--rm", f"--gpus={deployment.gpus}", f"--shm-size={deployment.shm_bytes}"],
        *["--ulimit=memlock=-1", "--ulimit=stack=67108864"],
        *(f"--publish=127.0.0.1:{port}:{port}" for port in ports),
    ]


def _render(template: str, deployment: VllmDeployment, **values: Any) -> str:
    """image: that of vLLM, unless `values` name another."""
    return render_template(
        __file__,
        template,
        **{
            "deployment": deployment,
            "repository": REPOSITORY,
            "image": deployment.vllm_image,
            "ports": PORTS,
            "http_port": HTTP_PORT,
            "server_command": _triton_command(),
            "guard": access,
            "key_variable": KEY_VARIABLE,
            "shm_bytes": deployment.shm_bytes,
            "startup_period_s": STARTUP_PERIOD_S,
            "startup_attempts": STARTUP_ATTEMPTS,
            "ray_port": RAY_PORT,
            "worker_attempts": WORKER_ATTEMPTS,
            "worker_wait_s": WORKER_WAIT_S,
            **values,
        },
    )


def _triton_command() -> list[str]:
    """Without --disable-auto-complete-config: the backend adds the tensors itself."""
    ports = [f"--{name}-port={port}" for name, port in PORTS.items()]
    return [SERVER_PROGRAM, f"--model-repository={REPOSITORY}", *ports]
