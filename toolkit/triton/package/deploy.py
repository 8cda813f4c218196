"""Writes the files that start a repository for TensorRT-LLM: one script that runs inside the
container, and the files that start the container.

    launch.sh             inside: environment, mpirun where ranks are needed, tritonserver
    docker-run.sh         one node
    compose.yaml          one node
    kubernetes.yaml       one node: Deployment and Service
    slurm.sh              several nodes
    leaderworkerset.yaml  several nodes: LeaderWorkerSet and Service

They lie beside the models, not in a folder of their own: Triton would take such a folder for
another model.

Their text is in templates/; this module makes the words of the commands. It is pure, except for
`write`. The image is the one in the version's row, since engines are tied to it. The arguments are
those of TensorRT-LLM's own launcher (TRT triton_backend/scripts/launch_triton_server.py, 0a2e2c1f).
That launcher itself starts the server and exits, so as a container's first process it would end the
container.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolkit.facts.versions import SERVING_IMAGE, VERSIONS
from toolkit.templates import render_template
from toolkit.triton import access
from toolkit.triton.access import KEY_VARIABLE
from toolkit.triton.package.layout_trtllm import PLAIN_YAML, REPOSITORY
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
    "local_launch_command",
    "resource_name_of",
    "slurm_script",
    "write",
]

PORTS = {"http": 8000, "grpc": 8001, "metrics": 8002}
SERVER_PROGRAM = "/opt/tritonserver/bin/tritonserver"
SHM_BYTES_PER_GPU = 4 << 30  # for NCCL's buffers and the Python backend's regions
MPIRUN = ("mpirun", "--allow-run-as-root")
# Half an hour together, since weights of hundreds of gigabytes have to be read.
STARTUP_PERIOD_S = 10
STARTUP_ATTEMPTS = 180
SSH_PORT = 2222
# Host keys are not checked, because every start makes new hosts.
SSH_OPTIONS = f"-p {SSH_PORT} -o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null"
# A quarter of an hour together, since a worker may have to pull its image.
WORKER_WAIT_S = 5
WORKER_ATTEMPTS = 180
FORWARDED_VARIABLES = ("PATH", "LD_LIBRARY_PATH")  # the container's; sshd starts ranks without them
CONTAINER_MODEL_FOLDER = "/app/all_models/llmapi/tensorrt_llm/1"
WRITABLE_REPOSITORY = "/tmp/models"


@dataclass(frozen=True, slots=True)
class Deployment:
    """What is started. world_size: the number of ranks of one engine. speculates: in the `bls`
    layout, a second engine (the draft) runs beside it with as many ranks. container_image: serves
    instead of NVIDIA's image of the version.
    """

    name: str
    layout: Layout
    version: str
    world_size: int = 1
    gpus_per_node: int = 8
    speculates: bool = True
    model_py: ModelPy = "ours"  # for the llmapi layout
    container_image: str | None = None

    @property
    def image(self) -> str:
        """The container image. The plan refuses a version without one, unless the YAML names an
        image of its own.
        """
        if self.container_image is not None:
            return self.container_image
        return SERVING_IMAGE.format(tag=VERSIONS[self.version].serving_tags[0])

    @property
    def nodes(self) -> int:
        return -(-self.world_size // self.gpus_per_node)

    @property
    def gpus(self) -> int:
        """GPUs on each node."""
        return min(self.world_size, self.gpus_per_node)

    @property
    def entry_model(self) -> str:
        """The model that clients call."""
        return BLS_MODEL if self.layout == "bls" else MODEL

    @property
    def has_plain_arm(self) -> bool:
        """Whether launch.sh serves the target alone if asked, since no request can."""
        return self.layout == "llmapi" and self.speculates

    @property
    def has_our_metrics(self) -> bool:
        """Whether our model files answer, which count what operators look at."""
        return self.layout == "bls" or self.model_py == "ours"

    @property
    def engine_count(self) -> int:
        """Engines that have their own ranks in the server."""
        return 2 if self.layout == "bls" and self.speculates else 1

    @property
    def ranks_per_node(self) -> int:
        """Engine ranks on each node. The first node also has the orchestrator's rank."""
        return self.engine_count * self.gpus

    @property
    def resource_name(self) -> str:
        return resource_name_of(self.name)


def resource_name_of(name: str) -> str:
    """A name that Kubernetes allows for services (RFC 1035): lower-case letters, digits and
    hyphens, a letter first, at most 40 characters.
    """
    name = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    return (name if name[:1].isalpha() else f"triton-{name}")[:40].strip("-")


def _server_command(deployment: Deployment, rank: int = 0) -> list[str]:
    repository = REPOSITORY if deployment.model_py == "ours" else WRITABLE_REPOSITORY
    command = [SERVER_PROGRAM, f"--model-repository={repository}"]
    command += [f"--{name}-port={port}" for name, port in PORTS.items()]
    if rank:
        command += ["--model-control-mode=explicit", f"--load-model={MODEL}"]
        if deployment.layout == "bls" and deployment.speculates:
            command.append(f"--load-model={DRAFT_MODEL}")
    else:
        command += _memory_pool_options(deployment)
    return [
        *command,
        "--disable-auto-complete-config",
        f"--backend-config=python,shm-region-prefix-name=prefix{rank}_",
    ]


def _memory_pool_options(deployment: Deployment) -> list[str]:
    """Options that leave all GPU memory to the engines, for an orchestrator whose engines run in
    processes of their own.
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


def local_launch_command(
    deployment: Deployment, command: Sequence[str]
) -> tuple[list[str], dict[str, str]]:
    """Add to a tritonserver command what launch.sh adds on one node. Returns (command, additions to
    its environment).
    """
    mpirun = [*MPIRUN, "-n", "1"] if deployment.layout == "bls" else []
    return [*mpirun, *command, *_memory_pool_options(deployment)], _environment(deployment)


def _rank_commands(deployment: Deployment) -> list[list[str]]:
    """The command of each MPI rank that the launcher starts."""
    if deployment.nodes == 1:
        return [_server_command(deployment)]  # the server spawns the other ranks
    if deployment.layout == "llmapi":
        return [["trtllm-llmapi-launch", *_server_command(deployment)]] * deployment.world_size
    return [
        _server_command(deployment, rank)
        for rank in range(1 + deployment.engine_count * deployment.world_size)
    ]


def launch_script(deployment: Deployment) -> str:
    """launch.sh, which runs inside the container."""
    command, *ranks = _launch_segments(deployment)
    orchestrators = 1 if deployment.layout == "bls" else 0
    return _render(
        "launch.sh.j2",
        deployment,
        environment=_environment(deployment),
        command=command,
        ranks=ranks,
        model=MODEL,
        plain_yaml=f"{REPOSITORY}/{MODEL}/1/{PLAIN_YAML}",
        container_model=CONTAINER_MODEL_FOLDER,
        writable=WRITABLE_REPOSITORY,
        first_slots=deployment.ranks_per_node + orchestrators,
        ssh_options=SSH_OPTIONS,
        ssh_port=SSH_PORT,
        worker_attempts=WORKER_ATTEMPTS,
        worker_wait_s=WORKER_WAIT_S,
    )


def _launch_segments(deployment: Deployment) -> list[list[str]]:
    """What launch.sh executes: one command, and after mpirun one segment for each group of ranks
    that run the same command.
    """
    if deployment.layout == "llmapi" and deployment.nodes == 1:
        return [_server_command(deployment)]  # the runtime starts its ranks itself
    if deployment.nodes == 1:
        return [[*MPIRUN], *(["-n", "1", *command] for command in _rank_commands(deployment))]
    mpirun = [*MPIRUN, "--hostfile", "/tmp/hostfile", "--mca", "plm_rsh_args", SSH_OPTIONS]
    # Every segment repeats them, since options before the first command hold for its ranks alone.
    names = (*FORWARDED_VARIABLES, *_environment(deployment))
    exports = [word for name in names for word in ("-x", name)]
    groups = itertools.groupby(_rank_commands(deployment))
    counts = [(command, len(list(ranks))) for command, ranks in groups]
    return [mpirun, *(["-n", str(count), *exports, *command] for command, count in counts)]


def launch_command(deployment: Deployment) -> list[str]:
    """The command of launch.sh as one list of words."""
    first, *ranks = _launch_segments(deployment)
    return [
        *first,
        *(word for number, rank in enumerate(ranks) for word in ([":"] if number else []) + rank),
    ]


def docker_run(deployment: Deployment, repository: str) -> list[str]:
    """The docker command for one node. It publishes the ports on loopback."""
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
        *["--ulimit=memlock=-1", "--ulimit=stack=67108864", f"--env={KEY_VARIABLE}"],
        *(f"--publish=127.0.0.1:{port}:{port}" for port in PORTS.values()),
    ]


def docker_run_script(deployment: Deployment) -> str:
    """docker-run.sh, which serves the folder that it lies in."""
    return _render(
        "docker-run.sh.j2",
        deployment,
        options=_docker_options(deployment),
        command=[f"{REPOSITORY}/launch.sh"],
    )


def compose(deployment: Deployment) -> str:
    """compose.yaml."""
    return _render("compose.yaml.j2", deployment, ports=PORTS, shm_bytes=_shm_bytes(deployment))


def kubernetes(deployment: Deployment) -> str:
    """kubernetes.yaml: a Deployment and a Service."""
    return _manifests("kubernetes.yaml.j2", deployment, startup_attempts=STARTUP_ATTEMPTS)


def leader_worker_set(deployment: Deployment) -> str:
    """leaderworkerset.yaml: a LeaderWorkerSet and a Service. The leader's startup probe also covers
    its wait for the workers.
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
    """slurm.sh, for sbatch. Slurm starts the ranks, without mpirun. The script reads the
    repository's folder from the environment, since sbatch runs a copy of it in another place.
    """
    ranks = _rank_commands(deployment)
    return _render(
        "slurm.sh.j2",
        deployment,
        ranks=ranks,
        tasks_per_node=-(-len(ranks) // deployment.nodes),
        ports=PORTS,
        enroot_image=deployment.image.replace("/", "#", 1),  # enroot writes REGISTRY#IMAGE
    )


def write(deployment: Deployment, folder: Path) -> None:
    """Write the files for this deployment beside the models in `folder`."""
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
        __file__,
        template,
        deployment=deployment,
        image=deployment.image,
        repository=REPOSITORY,
        guard=access,
        key_variable=KEY_VARIABLE,
        **values,
    )


def _shm_bytes(deployment: Deployment) -> int:
    return SHM_BYTES_PER_GPU * deployment.gpus
