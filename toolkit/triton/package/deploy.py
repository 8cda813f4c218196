"""How a repository for TensorRT-LLM is started: one script for inside the container, and the files
that start the container.

    launch.sh             inside: environment, mpirun where ranks are needed, tritonserver
    docker-run.sh         one node
    compose.yaml          one node
    kubernetes.yaml       one node: Deployment and Service
    slurm.sh              several nodes
    leaderworkerset.yaml  several nodes: LeaderWorkerSet and Service

They lie beside the models and in no folder of their own, which Triton would take for one more
model.

What they say stands in templates/; the words of commands are made here. Pure but for `write`. The
image is that of the version's row, since engines are tied to it. The arguments are those of
TensorRT-LLM's own launcher (TRT triton_backend/scripts/launch_triton_server.py, 0a2e2c1f), which
itself starts the server and leaves: as a container's first process it would end the container.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolkit.errors import StageError
from toolkit.facts.versions import SERVING_IMAGE, VERSIONS
from toolkit.templates import render_template
from toolkit.triton.package.layout_trtllm import REPOSITORY
from toolkit.triton.tensors.contract import BLS_MODEL, DRAFT_MODEL, MODEL
from toolkit.words import Layout, ModelPy

__all__ = [
    "Deployment",
    "compose",
    "docker_run",
    "docker_run_script",
    "kubernetes",
    "launch_command",
    "launch_script",
    "leader_worker_set",
    "slurm_script",
    "started_here",
    "write",
]

PORTS = {"http": 8000, "grpc": 8001, "metrics": 8002}
SERVER = "/opt/tritonserver/bin/tritonserver"
SHM_BYTES_PER_GPU = 4 << 30  # NCCL's buffers and the Python backend's regions
MPIRUN = ("mpirun", "--allow-run-as-root")
STARTUP_PERIOD_S, STARTUP_ATTEMPTS = (
    10,
    180,
)  # half an hour: weights of hundreds of gigabytes are read
SSH_PORT = 2222
# hosts are new with every start
SSH = f"-p {SSH_PORT} -o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null"
WORKER_WAIT_S, WORKER_ATTEMPTS = 5, 180  # a quarter of an hour: a worker's image is pulled
HANDED_ON = ("PATH", "LD_LIBRARY_PATH")  # of the container; sshd starts ranks without them
CONTAINER_MODEL, WRITABLE = "/app/all_models/llmapi/tensorrt_llm/1", "/tmp/models"


@dataclass(frozen=True, slots=True)
class Deployment:
    """What is started. world_size: ranks of one engine; speculates: a second engine with as many
    beside it (`bls` only).
    """

    name: str
    layout: Layout
    version: str
    world_size: int = 1
    gpus_per_node: int = 8
    speculates: bool = True
    model_py: ModelPy = "ours"  # of llmapi

    @property
    def image(self) -> str:
        """Raises StageError for a version that no published container serves."""
        tags = VERSIONS[self.version].serving_tags
        if not tags:
            hint = "Take an engine.tensorrt_llm that has one, or serve with your own image."
            raise StageError(
                "package",
                f"no serving container of TensorRT-LLM {self.version} is known",
                hint=hint,
            )
        return SERVING_IMAGE.format(tag=tags[0])

    @property
    def nodes(self) -> int:
        return -(-self.world_size // self.gpus_per_node)

    @property
    def gpus(self) -> int:
        """On each node."""
        return min(self.world_size, self.gpus_per_node)

    @property
    def entry(self) -> str:
        return BLS_MODEL if self.layout == "bls" else MODEL

    @property
    def engines(self) -> int:
        """In the server, with as many ranks each."""
        return 2 if self.layout == "bls" and self.speculates else 1

    @property
    def slots(self) -> int:
        """Ranks on each node, but for the orchestrator, which the first node has besides."""
        return self.engines * self.gpus

    @property
    def resource_name(self) -> str:
        """As Kubernetes names services (RFC 1035): lower case, digits and hyphens, a letter
        first, at most 40 characters.
        """
        name = re.sub(r"[^a-z0-9]+", "-", self.name.lower()).strip("-")
        return (name if name[:1].isalpha() else f"triton-{name}")[:40].strip("-")


def _server(deployment: Deployment, rank: int = 0) -> list[str]:
    command = [
        SERVER,
        f"--model-repository={REPOSITORY if deployment.model_py == 'ours' else WRITABLE}",
    ]
    command += [f"--{name}-port={port}" for name, port in PORTS.items()]
    if rank:
        command += ["--model-control-mode=explicit", f"--load-model={MODEL}"]
        command += (
            [f"--load-model={DRAFT_MODEL}"]
            if deployment.layout == "bls" and deployment.speculates
            else []
        )
    else:
        command += _pools(deployment)
    return [
        *command,
        "--disable-auto-complete-config",
        f"--backend-config=python,shm-region-prefix-name=prefix{rank}_",
    ]


def _pools(deployment: Deployment) -> list[str]:
    """Of an orchestrator whose engines are processes of their own: it keeps no memory of the
    GPUs to itself.
    """
    if deployment.layout != "bls" or deployment.nodes > 1:
        return []
    pools = [f"--cuda-memory-pool-byte-size={gpu}:0" for gpu in range(deployment.gpus)]
    return ["--pinned-memory-pool-byte-size=0", "--enable-peer-access=false", *pools]


def _environment(deployment: Deployment) -> dict[str, str]:
    if deployment.layout != "bls":
        return {}
    return {
        "TRTLLM_ORCHESTRATOR": "1",
        "TRTLLM_ORCHESTRATOR_SPAWN_PROCESSES": str(int(deployment.nodes == 1)),
    }


def started_here(
    deployment: Deployment, command: Sequence[str]
) -> tuple[list[str], dict[str, str]]:
    """(command, additions to its environment): what launch.sh adds to a tritonserver command, on
    one node.
    """
    mpirun = [*MPIRUN, "-n", "1"] if deployment.layout == "bls" else []
    return [*mpirun, *command, *_pools(deployment)], _environment(deployment)


def _ranks(deployment: Deployment) -> list[list[str]]:
    """The command of each MPI rank."""
    if deployment.nodes == 1:
        return [_server(deployment)]  # further ranks are spawned
    if deployment.layout == "llmapi":
        return [["trtllm-llmapi-launch", *_server(deployment)]] * deployment.world_size
    return [
        _server(deployment, rank) for rank in range(1 + deployment.engines * deployment.world_size)
    ]


def launch_script(deployment: Deployment) -> str:
    """launch.sh, for inside the container."""
    command, *ranks = _launch(deployment)
    orchestrators = 1 if deployment.layout == "bls" else 0
    return _render(
        "launch.sh.j2",
        deployment,
        environment=_environment(deployment),
        command=command,
        ranks=ranks,
        model=MODEL,
        container_model=CONTAINER_MODEL,
        writable=WRITABLE,
        first_slots=deployment.slots + orchestrators,
        ssh_options=SSH,
        ssh_port=SSH_PORT,
        worker_attempts=WORKER_ATTEMPTS,
        worker_wait_s=WORKER_WAIT_S,
    )


def _launch(deployment: Deployment) -> list[list[str]]:
    """What launch.sh executes: a command, and behind mpirun a segment for all ranks that run the
    same.
    """
    if deployment.layout == "llmapi" and deployment.nodes == 1:
        return [_server(deployment)]  # the runtime starts its ranks itself
    if deployment.nodes == 1:
        return [[*MPIRUN], *(["-n", "1", *command] for command in _ranks(deployment))]
    mpirun = [*MPIRUN, "--hostfile", "/tmp/hostfile", "--mca", "plm_rsh_args", SSH]
    # Of each rank: what stands before the first command is of the first rank alone.
    kept = [word for name in (*HANDED_ON, *_environment(deployment)) for word in ("-x", name)]
    same = ((command, len(list(ranks))) for command, ranks in itertools.groupby(_ranks(deployment)))
    return [mpirun, *(["-n", str(count), *kept, *command] for command, count in same)]


def launch_command(deployment: Deployment) -> list[str]:
    """The command of launch.sh in one line of words."""
    first, *ranks = _launch(deployment)
    return [
        *first,
        *(word for number, rank in enumerate(ranks) for word in ([":"] if number else []) + rank),
    ]


def docker_run(deployment: Deployment, repository: str) -> list[str]:
    """The command for one node. Ports are published on loopback."""
    volume = f"--volume={repository}:{REPOSITORY}:ro"
    return [
        "docker",
        "run",
        *_docker_options(deployment),
        volume,
        deployment.image,
        f"{REPOSITORY}/launch.sh",
    ]


def _docker_options(deployment: Deployment) -> list[str]:
    return [
        *["--rm", f"--gpus={deployment.gpus}", f"--shm-size={_shm_bytes(deployment)}"],
        *["--ulimit=memlock=-1", "--ulimit=stack=67108864"],
        *(f"--publish=127.0.0.1:{port}:{port}" for port in PORTS.values()),
    ]


def docker_run_script(deployment: Deployment) -> str:
    """docker-run.sh: the command for the folder that it lies in."""
    return _render("docker-run.sh.j2", deployment, options=_docker_options(deployment))


def compose(deployment: Deployment) -> str:
    """compose.yaml."""
    return _render("compose.yaml.j2", deployment, ports=PORTS, shm_bytes=_shm_bytes(deployment))


def kubernetes(deployment: Deployment) -> str:
    """kubernetes.yaml: a Deployment and a Service."""
    return _manifests("kubernetes.yaml.j2", deployment, startup_attempts=STARTUP_ATTEMPTS)


def leader_worker_set(deployment: Deployment) -> str:
    """leaderworkerset.yaml: a LeaderWorkerSet and a Service. The leader's probe outlives its
    wait for the workers.
    """
    waiting_attempts = WORKER_ATTEMPTS * WORKER_WAIT_S // STARTUP_PERIOD_S
    attempts = STARTUP_ATTEMPTS + waiting_attempts
    return _manifests(
        "leaderworkerset.yaml.j2", deployment, startup_attempts=attempts, ssh_port=SSH_PORT
    )


def _manifests(template: str, deployment: Deployment, **values: Any) -> str:
    return _render(
        template,
        deployment,
        ports=PORTS,
        shm_bytes=_shm_bytes(deployment),
        startup_period_s=STARTUP_PERIOD_S,
        **values,
    )


def slurm_script(deployment: Deployment) -> str:
    """sbatch script: Slurm starts the ranks, and no mpirun. It reads the repository's folder from
    the environment, since sbatch runs a copy of the script that lies elsewhere.
    """
    ranks = _ranks(deployment)
    return _render(
        "slurm.sh.j2",
        deployment,
        ranks=ranks,
        tasks_per_node=-(-len(ranks) // deployment.nodes),
        enroot_image=deployment.image.replace("/", "#", 1),  # as enroot separates the registry
    )


def write(deployment: Deployment, folder: Path) -> None:
    """The files for this deployment, beside the models in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    files = {"launch.sh": launch_script(deployment)}
    if deployment.nodes == 1:
        files["docker-run.sh"] = docker_run_script(deployment)
        files["compose.yaml"] = compose(deployment)
        files["kubernetes.yaml"] = kubernetes(deployment)
    else:
        files["slurm.sh"] = slurm_script(deployment)
        files["leaderworkerset.yaml"] = leader_worker_set(deployment)
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")
        if name.endswith(".sh"):
            (folder / name).chmod(0o755)


def _render(template: str, deployment: Deployment, **values: Any) -> str:
    return render_template(
        __file__, template, deployment=deployment, repository=REPOSITORY, **values
    )


def _shm_bytes(deployment: Deployment) -> int:
    return SHM_BYTES_PER_GPU * deployment.gpus
