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

Pure but for `write`: mappings and text. The image is that of the version's row, since engines are
tied to it. The arguments are those of TensorRT-LLM's own launcher (TRT
triton_backend/scripts/launch_triton_server.py, 0a2e2c1f), which itself starts the server and
leaves: as a container's first process it would end the container.
"""

from __future__ import annotations

import itertools
import json
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolkit.errors import StageError
from toolkit.facts.versions import SERVING_IMAGE, VERSIONS
from toolkit.triton.package.layout_trtllm import REPOSITORY
from toolkit.triton.tensors.contract import BLS_MODEL, DRAFT_MODEL, MODEL

__all__ = [
    "Deployment",
    "compose",
    "docker_run",
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
    layout: str  # bls | llmapi
    version: str
    world_size: int = 1
    gpus_per_node: int = 8
    speculates: bool = True
    model_py: str = "ours"  # of llmapi: ours | container

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
    lines = [
        "#!/bin/sh",
        "# Start this repository inside its container:",
        f"#     {deployment.image}",
        "set -e",
    ]
    if deployment.layout == "bls":
        lines += ["# Two engines in one server: rank 0 is the orchestrator."]
        lines += [f"export {name}={value}" for name, value in _environment(deployment).items()]
    if deployment.model_py == "container":
        lines += [
            "# The container's own model.py beside our settings.",
            f"cp -rs {REPOSITORY} {WRITABLE}",
        ]
        lines.append(f"cp {CONTAINER_MODEL}/*.py {WRITABLE}/{MODEL}/1/")
    if deployment.nodes > 1:
        lines += _hosts(deployment)
    first, *ranks = _launch(deployment)
    lines.append(f"exec {shlex.join(first)}" + (" \\\n" if ranks else ""))
    text = " : \\\n".join(f"    {shlex.join(rank)}" for rank in ranks)
    return "\n".join(lines) + f"{text}\n"


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


# Hosts come from a LeaderWorkerSet (which numbers its pods) or from a file that is there already.
# Their names are whole ones, which Open MPI would cut at the first dot. A LeaderWorkerSet starts
# its leader and its workers together, so the leader waits.
HOSTS = """\
if [ -n "$LWS_LEADER_ADDRESS" ]; then
    pod=${LWS_LEADER_ADDRESS%%.*}; domain=${LWS_LEADER_ADDRESS#*.}
    workers=$(for worker in $(seq 1 {workers}); do echo "$pod-$worker.$domain"; done)
    hosts="$LWS_LEADER_ADDRESS $workers"
elif [ -f {repository}/hostfile ]; then
    hosts=$(awk 'NF && !/^#/ {print $1}' {repository}/hostfile)
    workers=$(echo "$hosts" | tail -n +2)
else
    echo "name {nodes} hosts, one per line, this one first, in {repository}/hostfile" >&2; exit 2
fi
slots={first}
for host in $hosts; do echo "$host slots=$slots"; slots={slots}; done > /tmp/hostfile
export OMPI_MCA_orte_keep_fqdn_hostnames=1
for worker in $workers; do
    tries={tries}
    until ssh {ssh} -o BatchMode=yes -o ConnectTimeout={wait} "$worker" true; do
        tries=$((tries - 1))
        [ $tries -gt 0 ] || { echo "$worker does not answer ssh on port {port}" >&2; exit 1; }
        sleep {wait}
    done
done"""


def _hosts(deployment: Deployment) -> list[str]:
    """Lines that write /tmp/hostfile for mpirun, and wait for all of its hosts."""
    values = {
        "workers": deployment.nodes - 1,
        "nodes": deployment.nodes,
        "repository": REPOSITORY,
        "first": deployment.slots + (1 if deployment.layout == "bls" else 0),
        "slots": deployment.slots,
        "ssh": SSH,
        "port": SSH_PORT,
        "tries": WORKER_ATTEMPTS,
        "wait": WORKER_WAIT_S,
    }
    return re.sub(r"\{(\w+)\}", lambda found: str(values[found[1]]), HOSTS).splitlines()


def docker_run(deployment: Deployment, repository: str) -> list[str]:
    """The command for one node. Ports are published on loopback."""
    ports = [f"--publish=127.0.0.1:{port}:{port}" for port in PORTS.values()]
    return [
        *[
            "docker",
            "run",
            "--rm",
            f"--gpus={deployment.gpus}",
            f"--shm-size={_shm_bytes(deployment)}",
        ],
        *[
            "--ulimit=memlock=-1",
            "--ulimit=stack=67108864",
            *ports,
            f"--volume={repository}:{REPOSITORY}:ro",
        ],
        *[deployment.image, f"{REPOSITORY}/launch.sh"],
    ]


def compose(deployment: Deployment) -> dict[str, Any]:
    gpus = {"driver": "nvidia", "count": deployment.gpus, "capabilities": ["gpu"]}
    check = ["CMD", "curl", "-sf", f"localhost:{PORTS['http']}/v2/models/{deployment.entry}/ready"]
    service = {
        "image": deployment.image,
        "command": [f"{REPOSITORY}/launch.sh"],
        "volumes": [f".:{REPOSITORY}:ro"],
        "ports": [f"127.0.0.1:{port}:{port}" for port in PORTS.values()],
        "shm_size": _shm_bytes(deployment),
        "ulimits": {"memlock": -1, "stack": 67108864},
        "deploy": {"resources": {"reservations": {"devices": [gpus]}}},
        "healthcheck": {
            "test": check,
            "interval": "10s",
            "timeout": "5s",
            "retries": 3,
            "start_period": "30m",
        },
        "restart": "unless-stopped",
    }
    return {"services": {deployment.resource_name: service}}


def kubernetes(deployment: Deployment) -> list[dict[str, Any]]:
    """Deployment and Service of one node. The repository lies in the volume claim
    `NAME-repository`.
    """
    name, labels = deployment.resource_name, {"app": deployment.resource_name}
    container = {
        **_container(deployment),
        "command": [f"{REPOSITORY}/launch.sh"],
        **_probes(deployment),
    }
    template = {
        "metadata": {"labels": labels},
        "spec": {"containers": [container], "volumes": _volumes(deployment)},
    }
    return [
        {
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "metadata": {"name": name, "labels": labels},
            # A second copy would need as many GPUs again while the first still holds them.
            "spec": {
                "replicas": 1,
                "strategy": {"type": "Recreate"},
                "selector": {"matchLabels": labels},
                "template": template,
            },
        },
        _service(name, labels),
    ]


SSHD = (
    "[ -x /usr/sbin/sshd ] || { echo 'this image has no sshd: add openssh-server to it' >&2; exit"
    f" 1; }}; mkdir -p /run/sshd && ssh-keygen -A && exec /usr/sbin/sshd -D -e -p {SSH_PORT} -o"
    " StrictModes=no -o PasswordAuthentication=no"
)


def leader_worker_set(deployment: Deployment) -> list[dict[str, Any]]:
    """Several nodes: the leader runs mpirun and serves, the workers wait for it with an SSH server.

    The secret `NAME-ssh` holds `id_ed25519` and `authorized_keys`, for MPI to reach the workers.
    Kubernetes mounts it writable for all, which sshd takes for a fault unless told otherwise.
    """
    name = deployment.resource_name
    leader_labels = {"app": name, "role": "leader"}
    ssh = {"name": "ssh", "mountPath": "/root/.ssh", "readOnly": True}
    base = _container(deployment)
    mounts = {"volumeMounts": [*base["volumeMounts"], ssh]}
    volumes = [
        *_volumes(deployment),
        {"name": "ssh", "secret": {"secretName": f"{name}-ssh", "defaultMode": 0o400}},
    ]
    waiting_attempts = WORKER_ATTEMPTS * WORKER_WAIT_S // STARTUP_PERIOD_S
    probes = _probes(deployment, attempts=STARTUP_ATTEMPTS + waiting_attempts)
    leader = {**base, **mounts, "command": [f"{REPOSITORY}/launch.sh"], **probes}
    waiting = {"tcpSocket": {"port": SSH_PORT}, "periodSeconds": 5}
    worker = {
        **base,
        **mounts,
        "command": ["/bin/sh", "-c", SSHD],
        "ports": [{"name": "ssh", "containerPort": SSH_PORT}],
        "readinessProbe": waiting,
        "livenessProbe": waiting,
    }
    return [
        {
            "apiVersion": "leaderworkerset.x-k8s.io/v1",
            "kind": "LeaderWorkerSet",
            "metadata": {"name": name, "labels": {"app": name}},
            "spec": {
                "replicas": 1,
                # Ready is a leader whose ranks run on the workers, so they cannot come after it.
                "startupPolicy": "LeaderCreated",
                "leaderWorkerTemplate": {
                    "size": deployment.nodes,
                    # A lost rank takes all others with it.
                    "restartPolicy": "RecreateGroupOnPodRestart",
                    "leaderTemplate": {
                        "metadata": {"labels": leader_labels},
                        "spec": {"containers": [leader], "volumes": volumes},
                    },
                    "workerTemplate": {
                        "metadata": {"labels": {"app": name, "role": "worker"}},
                        "spec": {"containers": [worker], "volumes": volumes},
                    },
                },
            },
        },
        _service(name, leader_labels, suffix="-serving"),
    ]


def slurm_script(deployment: Deployment) -> str:
    """sbatch script: Slurm starts the ranks, and no mpirun. It reads the repository's folder from
    the environment, since sbatch runs a copy of the script that lies elsewhere.
    """
    ranks = _ranks(deployment)
    per_node = -(-len(ranks) // deployment.nodes)
    image = deployment.image.replace("/", "#", 1)  # as enroot separates the registry
    container = f'--container-image={image} --container-mounts="$REPOSITORY:{REPOSITORY}:ro"'
    lines = [
        "#!/bin/bash",
        f"#SBATCH --job-name={deployment.resource_name}",
        f"#SBATCH --nodes={deployment.nodes}",
        f"#SBATCH --ntasks={len(ranks)}",
        f"#SBATCH --ntasks-per-node={per_node}",
        f"#SBATCH --gpus-per-node={deployment.gpus}",
        "# Needs the pyxis plugin for --container-image.",
        "set -e",
        (
            ': "${REPOSITORY:?name the folder of this repository, on a file system that every node'
            ' sees}"'
        ),
    ]
    if deployment.layout == "llmapi":
        lines.append(f"srun --mpi=pmix {container} {shlex.join(ranks[0])}")
        return "\n".join(lines) + "\n"
    lines += [
        "export TRTLLM_ORCHESTRATOR=1 TRTLLM_ORCHESTRATOR_SPAWN_PROCESSES=0",
        "tasks=$(mktemp)",
    ]
    lines.append("cat > $tasks <<'TASKS'")
    lines += [f"{rank} {shlex.join(command)}" for rank, command in enumerate(ranks)]
    lines += ["TASKS", f"srun --mpi=pmix {container} --multi-prog $tasks"]
    return "\n".join(lines) + "\n"


def write(deployment: Deployment, folder: Path) -> None:
    """The files for this deployment, beside the models in `folder`."""
    import yaml

    folder.mkdir(parents=True, exist_ok=True)
    scripts = {folder / "launch.sh": launch_script(deployment)}
    documents: dict[str, list[dict[str, Any]]] = {}
    if deployment.nodes == 1:
        here = '"$(cd "$(dirname "$0")" && pwd)"'
        words = " ".join(shlex.quote(word) for word in docker_run(deployment, "@")).replace(
            "--volume=@", f"--volume={here}"
        )
        command = words.replace(f"'--volume={here}", f"--volume={here}")
        scripts[folder / "docker-run.sh"] = f"#!/bin/sh\nexec {command}\n"
        documents = {
            "compose.yaml": [compose(deployment)],
            "kubernetes.yaml": kubernetes(deployment),
        }
    else:
        scripts[folder / "slurm.sh"] = slurm_script(deployment)
        documents = {"leaderworkerset.yaml": leader_worker_set(deployment)}
    for path, text in scripts.items():
        path.write_text(text, encoding="utf-8")
        path.chmod(0o755)
    for name, parts in documents.items():
        # Through JSON, so that what several containers share is written out in each and is no
        # anchor.
        (folder / name).write_text(
            yaml.safe_dump_all(json.loads(json.dumps(parts)), sort_keys=False), encoding="utf-8"
        )


def _shm_bytes(deployment: Deployment) -> int:
    return SHM_BYTES_PER_GPU * deployment.gpus


def _container(deployment: Deployment) -> dict[str, Any]:
    gpus = {"nvidia.com/gpu": deployment.gpus}
    mounts = [
        {"name": "repository", "mountPath": REPOSITORY, "readOnly": True},
        {"name": "shm", "mountPath": "/dev/shm"},
    ]
    return {
        "name": "triton",
        "image": deployment.image,
        "ports": [{"name": name, "containerPort": port} for name, port in PORTS.items()],
        "resources": {"limits": gpus, "requests": gpus},
        "volumeMounts": mounts,
    }


def _volumes(deployment: Deployment) -> list[dict[str, Any]]:
    claim = {"claimName": f"{deployment.resource_name}-repository", "readOnly": True}
    memory = {"medium": "Memory", "sizeLimit": str(_shm_bytes(deployment))}
    return [
        {"name": "repository", "persistentVolumeClaim": claim},
        {"name": "shm", "emptyDir": memory},
    ]


def _probes(deployment: Deployment, attempts: int = STARTUP_ATTEMPTS) -> dict[str, Any]:
    def http(path: str, **timing: int) -> dict[str, Any]:
        return {"httpGet": {"path": path, "port": "http"}, **timing}

    model = f"/v2/models/{deployment.entry}/ready"
    return {
        "startupProbe": http(
            "/v2/health/ready", periodSeconds=STARTUP_PERIOD_S, failureThreshold=attempts
        ),
        "readinessProbe": http(model, periodSeconds=5, failureThreshold=3, timeoutSeconds=5),
        "livenessProbe": http(
            "/v2/health/live", periodSeconds=10, failureThreshold=6, timeoutSeconds=5
        ),
    }


def _service(name: str, selector: dict[str, str], suffix: str = "") -> dict[str, Any]:
    ports = [{"name": each, "port": port, "targetPort": each} for each, port in PORTS.items()]
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name + suffix, "labels": {"app": name}},
        "spec": {"selector": selector, "ports": ports},
    }
