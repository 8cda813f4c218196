"""Launch files: the commands use the words of TensorRT-LLM's launcher, and the schemas of
Kubernetes and Compose allow the manifests.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from tests.support.manifests import check_manifests, check_references, pods
from toolkit.errors import UsageError
from toolkit.triton.access import LISTENER_WARNING, admin_key
from toolkit.triton.package import deploy
from toolkit.triton.package.deploy import (
    Deployment,
    docker_run,
    launch_script,
    local_launch_command,
    slurm_script,
    write,
)


def deployment(**changes: Any) -> Deployment:
    return Deployment(**{"name": "Llama_70b", "layout": "bls", "version": "1.2.1", **changes})


def compose(of: Deployment) -> dict[str, Any]:
    content: dict[str, Any] = yaml.safe_load(deploy.compose(of))
    return content


def kubernetes(of: Deployment) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(deploy.kubernetes(of)))


def leader_worker_set(of: Deployment) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(deploy.leader_worker_set(of)))


@pytest.mark.parametrize("layout", ["bls", "llmapi"])
@pytest.mark.parametrize("world_size", [1, 2, 8])
def test_one_node_is_a_deployment_with_probes_gpus_and_shared_memory(
    layout: str, world_size: int
) -> None:
    requested = deployment(layout=layout, world_size=world_size)
    manifests = kubernetes(requested)
    check_manifests(manifests)
    check_references(manifests)
    (container,) = manifests[0]["spec"]["template"]["spec"]["containers"]
    assert container["resources"]["limits"] == {"nvidia.com/gpu": world_size}
    assert container["image"] == "nvcr.io/nvidia/tritonserver:26.07-trtllm-python-py3"
    entry = "tensorrt_llm_bls" if layout == "bls" else "tensorrt_llm"
    assert container["readinessProbe"]["httpGet"]["path"] == f"/v2/models/{entry}/ready"
    service = compose(requested)["services"]["llama-70b"]
    assert service["deploy"]["resources"]["reservations"]["devices"][0]["count"] == world_size
    assert service["shm_size"] == 4 * 2**30 * world_size
    assert all(published.startswith("127.0.0.1:") for published in service["ports"])


@pytest.mark.parametrize("layout", ["bls", "llmapi"])
def test_several_nodes_are_a_leader_and_workers(layout: str) -> None:
    requested = deployment(layout=layout, world_size=16)
    manifests = leader_worker_set(requested)
    check_manifests(manifests)
    check_references(manifests)
    assert manifests[0]["spec"]["leaderWorkerTemplate"]["size"] == 2
    for template in pods(manifests):
        (container,) = template["spec"]["containers"]
        assert container["resources"]["limits"] == {"nvidia.com/gpu": 8}


def test_a_name_that_begins_with_a_digit_becomes_one_that_a_service_may_have() -> None:
    requested = deployment(name="70b.Llama", world_size=16)
    assert requested.resource_name == "triton-70b-llama"
    check_manifests(kubernetes(requested))
    check_manifests(leader_worker_set(requested))


@pytest.mark.parametrize(
    "name", ["null", "Yes", "off", "~", "a: b #c", "$(id)`id`'\"", "70b", "_", "a" * 60]
)
def test_a_name_is_never_more_than_a_name(name: str) -> None:
    """Neither to YAML, which reads some words as something else, nor to a shell."""
    requested = deployment(name=name)
    assert list(compose(requested)["services"]) == [requested.resource_name]
    assert kubernetes(requested)[1]["spec"]["selector"] == {"app": requested.resource_name}
    check_manifests(kubernetes(requested))
    several = deployment(name=name, world_size=16)
    check_manifests(leader_worker_set(several))
    assert f"#SBATCH --job-name={several.resource_name}\n" in slurm_script(several)


def test_the_leader_s_probe_outlives_its_wait_for_workers() -> None:
    """Otherwise it would be killed while the workers pull their image, and the group with it."""
    (leader,) = pods(leader_worker_set(deployment(world_size=16)))[0]["spec"]["containers"]
    (alone,) = pods(kubernetes(deployment()))[0]["spec"]["containers"]
    seconds = [
        probe["periodSeconds"] * probe["failureThreshold"]
        for probe in (leader["startupProbe"], alone["startupProbe"])
    ]
    script = launch_script(deployment(world_size=16))
    tries, pause = (
        int(re.search(pattern, script)[1]) for pattern in (r"tries=(\d+)", r"sleep (\d+)")
    )  # type: ignore[index]
    assert seconds[0] - seconds[1] == tries * pause


def test_the_check_detects_what_kubernetes_would_refuse() -> None:
    manifests = kubernetes(deployment())
    manifests[0]["spec"]["template"]["spec"]["containers"][0]["image_pull_policy"] = "Always"
    with pytest.raises(kubernetes_validate.ValidationError, match="image_pull_policy"):
        check_manifests(manifests)
    [workers, *_] = leader_worker_set(deployment(layout="llmapi", world_size=16))
    workers["spec"]["leaderWorkerTemplate"]["workerTemplate"]["spec"]["containers"][0][
        "livenesProbe"
    ] = {}
    with pytest.raises(kubernetes_validate.ValidationError, match="livenesProbe"):
        check_manifests([workers])
    manifests = kubernetes(deployment())
    manifests[1]["spec"]["selector"] = {"app": "other"}
    with pytest.raises(AssertionError):
        check_references(manifests)


def commands(script: str) -> list[list[str]]:
    """The command of each rank that mpirun starts."""
    words = shlex.split(script[script.index("exec mpirun") :].replace("\\\n", " "))
    ranks: list[list[str]] = [[]]
    for word in words:
        if word == ":":
            ranks.append([])
        else:
            ranks[-1].append(word)
    starts = [rank.index("-n") + 1 for rank in ranks]
    return [
        without_exports(rank[start + 1 :])
        for rank, start in zip(ranks, starts, strict=True)
        for _ in range(int(rank[start]))
    ]


def without_exports(rank: list[str]) -> list[str]:
    return rank[2 * rank.count("-x") :]


def run_on_nodes(
    folder: Path, script: str, *, ssh: str, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run launch.sh with stand-ins for ssh, sleep and mpirun, and with its files in `folder`."""
    programs = {
        "ssh": ssh,
        "sleep": "exit 0",
        "mpirun": f'cat {folder}/hostfile; printf "%s\\n" "$@"',
    }
    for name, text in programs.items():
        (folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / name).chmod(0o755)
    text = script.replace("/tmp/hostfile", f"{folder}/hostfile").replace(
        "/models/hostfile", f"{folder}/hosts"
    )
    environment = {"PATH": f"{folder}:{os.environ['PATH']}", **environment}
    return subprocess.run(
        ["sh", "-c", text], env=environment, capture_output=True, text=True, check=False
    )


def test_the_leader_waits_for_its_workers_and_gives_each_its_ranks(tmp_path: Path) -> None:
    answers_at_fourth_try = f'echo x >> {tmp_path}/calls; [ "$(wc -l < {tmp_path}/calls)" -gt 3 ]'
    script = launch_script(deployment(world_size=24, gpus_per_node=8))
    done = run_on_nodes(
        tmp_path,
        script,
        ssh=answers_at_fourth_try,
        LWS_LEADER_ADDRESS="llama-70b-0.llama-70b.default",
    )
    assert done.returncode == 0, done.stderr
    hosts = [line.split() for line in done.stdout.splitlines()[:3]]
    names = [
        "llama-70b-0.llama-70b.default",
        "llama-70b-0-1.llama-70b.default",
        "llama-70b-0-2.llama-70b.default",
    ]
    assert hosts == [[names[0], "slots=17"], [names[1], "slots=16"], [names[2], "slots=16"]]
    # The first worker answers at its fourth try, then the second at once.
    assert len((tmp_path / "calls").read_text().split()) == 3 + 2
    assert "--hostfile" in done.stdout


def test_a_worker_that_never_answers_is_named(tmp_path: Path) -> None:
    script = launch_script(deployment(layout="llmapi", world_size=16))
    done = run_on_nodes(tmp_path, script, ssh="exit 255", LWS_LEADER_ADDRESS="a-0.a.default")
    assert done.returncode == 1
    assert "a-0-1.a.default does not answer ssh on port 2222" in done.stderr
    assert "--hostfile" not in done.stdout


def test_hosts_may_be_listed_in_a_file(tmp_path: Path) -> None:
    script = launch_script(deployment(layout="llmapi", world_size=16))
    assert run_on_nodes(tmp_path, script, ssh="exit 0").returncode == 2
    (tmp_path / "hosts").write_text("# two machines\nfirst slots=4\n\nsecond\n")
    assert run_on_nodes(tmp_path, script, ssh="exit 0").stdout.splitlines()[:2] == [
        "first slots=8",
        "second slots=8",
    ]


def test_ranks_on_other_nodes_have_the_container_s_paths() -> None:
    """sshd starts ranks with a bare environment, and mpirun's options before the first rank hold
    for that rank alone. So every rank needs them.
    """
    for layout in ("bls", "llmapi"):
        script = launch_script(deployment(layout=layout, world_size=16))
        ranks = script[script.index("exec mpirun") :].replace("\\\n", " ").split(" : ")
        assert all(
            {"PATH", "LD_LIBRARY_PATH"} <= set(re.findall(r"-x (\w+)", rank)) for rank in ranks
        )
        assert all(
            ("TRTLLM_ORCHESTRATOR" in re.findall(r"-x (\w+)", rank)) is (layout == "bls")
            for rank in ranks
        )


def test_two_engines_on_one_node_are_orchestrated_and_spawn_their_ranks() -> None:
    script = launch_script(deployment(world_size=2))
    assert "export TRTLLM_ORCHESTRATOR=1\n" in script
    assert "export TRTLLM_ORCHESTRATOR_SPAWN_PROCESSES=1\n" in script
    (rank,) = commands(script)
    assert rank[0] == "/opt/tritonserver/bin/tritonserver"
    for word in (
        "--model-repository=/models",
        "--disable-auto-complete-config",
        "--pinned-memory-pool-byte-size=0",
        "--enable-peer-access=false",
        "--cuda-memory-pool-byte-size=0:0",
        "--cuda-memory-pool-byte-size=1:0",
        "--backend-config=python,shm-region-prefix-name=prefix0_",
    ):
        assert word in rank


def test_two_engines_on_two_nodes_have_a_rank_each_and_an_orchestrator() -> None:
    requested = deployment(world_size=16)
    script = launch_script(requested)
    assert "export TRTLLM_ORCHESTRATOR_SPAWN_PROCESSES=0\n" in script
    ranks = commands(script)
    assert len(ranks) == 33  # the orchestrator, 16 of the target, 16 of the draft
    assert "--model-control-mode=explicit" not in ranks[0]
    assert all(
        {"--load-model=tensorrt_llm", "--load-model=tensorrt_llm_draft"} <= set(rank)
        for rank in ranks[1:]
    )
    tasks = slurm_script(requested)
    assert "#SBATCH --ntasks=33" in tasks
    assert "\n32 /opt/tritonserver/bin/tritonserver" in tasks


def test_the_pytorch_flow_is_launched_by_its_own_wrapper_on_several_nodes() -> None:
    requested = deployment(layout="llmapi", world_size=16)
    assert commands(launch_script(requested)) == [commands(launch_script(requested))[0]] * 16
    assert commands(launch_script(requested))[0][0] == "trtllm-llmapi-launch"
    assert "-n 16 " in launch_script(requested)  # all run the same
    # NVIDIA/enroot src/docker.sh: [USER@][REGISTRY#]IMAGE[:TAG]; without # it asks Docker's own
    # registry.
    image = "nvcr.io#nvidia/tritonserver:26.07-trtllm-python-py3"
    assert f"srun --mpi=pmix --container-image={image} --container-mounts" in slurm_script(
        requested
    )
    assert "TRTLLM_ORCHESTRATOR" not in launch_script(requested)
    one_node = launch_script(deployment(layout="llmapi", world_size=8))
    assert "mpirun" not in one_node  # the runtime starts its ranks itself
    assert "--model-repository=/models " in one_node


def test_the_container_s_own_model_is_copied_beside_our_settings() -> None:
    script = launch_script(deployment(layout="llmapi", model_py="container"))
    assert "cp /app/all_models/llmapi/tensorrt_llm/1/*.py /tmp/models/tensorrt_llm/1/" in script
    assert "--model-repository=/tmp/models " in script


@pytest.mark.parametrize("world_size", [2, 16])
@pytest.mark.parametrize("layout", ["bls", "llmapi"])
def test_the_files_are_written_and_the_scripts_are_sound(
    tmp_path: Path, layout: str, world_size: int
) -> None:
    write(deployment(layout=layout, world_size=world_size), tmp_path)
    files = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    one_node = {"launch.sh", "docker-run.sh", "compose.yaml", "kubernetes.yaml"}
    assert files == (
        one_node if world_size == 2 else {"launch.sh", "slurm.sh", "leaderworkerset.yaml"}
    )
    for path in tmp_path.rglob("*.sh"):
        assert os.access(path, os.X_OK)
        subprocess.run(["bash", "-n", str(path)], check=True)
    for path in tmp_path.rglob("*.yaml"):
        assert not re.search(r"[&*]id\d", path.read_text())  # people read and edit them
        if path.name != "compose.yaml":
            check_manifests(list(yaml.safe_load_all(path.read_text())))


def test_docker_run_mounts_the_folder_the_script_lies_in(tmp_path: Path) -> None:
    folder = tmp_path / "a folder"
    write(deployment(world_size=2), folder)
    (tmp_path / "docker").write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    (tmp_path / "docker").chmod(0o755)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(
        [folder / "docker-run.sh"], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines() == docker_run(deployment(world_size=2), str(folder))[1:]


@pytest.mark.parametrize("layout", ["bls", "llmapi"])
@pytest.mark.parametrize("world_size", [1, 16])
def test_every_server_asks_for_the_operators_key(
    tmp_path: Path, layout: str, world_size: int
) -> None:
    """The programs that the script starts print their arguments."""
    script = launch_script(deployment(layout=layout, world_size=world_size))
    script = script.replace(deploy.SERVER_PROGRAM, "tritonserver").replace("/tmp/", f"{tmp_path}/")
    for program in ("mpirun", "tritonserver", "ssh"):
        (tmp_path / program).write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
        (tmp_path / program).chmod(0o755)

    def arguments(**key: str) -> list[str]:
        environment = {
            "PATH": f"{tmp_path}:{os.environ['PATH']}",
            "LWS_LEADER_ADDRESS": "pod.domain",
            **key,
        }
        command = ["sh", "-c", script]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        return done.stdout.splitlines()

    apis = "shared-memory,model-repository,statistics,trace,logging:toolkit-admin-key="
    stated = arguments(TOOLKIT_ADMIN_KEY="0123456789abcdef")
    servers = max(1, stated.count("tritonserver"))
    for option in ("--http-restricted-api", "--grpc-restricted-protocol"):
        assert stated.count(f"{option}={apis}0123456789abcdef") == servers
    restricted = [word for word in arguments() if word.startswith("--http-restricted-api")]
    other = [word for word in arguments() if word.startswith("--http-restricted-api")]
    assert re.fullmatch(rf"--http-restricted-api={apis}[0-9a-f]{{32}}", restricted[0])
    assert restricted[0] != other[0]


BAD_KEYS = ["short", "0123456789abcde", "with,comma0123456789", "a b" * 9, "0123456789abcdef\n"]
BAD_KEYS += ["0123456789abcdef'; echo x", "\u00e4" * 16, "*" * 16]


@pytest.mark.parametrize("locale", ["C", "C.UTF-8", "en_US.UTF-8"])
@pytest.mark.parametrize("key", BAD_KEYS)
def test_a_script_refuses_what_the_toolkit_refuses_as_a_key(key: str, locale: str) -> None:
    """In the same words, and with the same exit code."""
    with pytest.raises(UsageError) as refused:
        admin_key({"TOOLKIT_ADMIN_KEY": key})
    environment = {
        "PATH": os.environ["PATH"],
        "TOOLKIT_ADMIN_KEY": key,
        "REPOSITORY": "/nowhere",
        "LC_ALL": locale,
    }
    launch, slurm = launch_script(deployment()), slurm_script(deployment(world_size=16))
    for shell, script in (("sh", launch), ("bash", launch), ("bash", slurm)):
        done = subprocess.run(
            [shell, "-c", script], env=environment, capture_output=True, text=True, check=False
        )
        assert (done.returncode, done.stdout) == (refused.value.exit_code, "")
        errors = [line for line in done.stderr.splitlines() if "setlocale" not in line]
        assert "\n".join(errors) == str(refused.value)


def test_slurm_says_who_reaches_its_ports(tmp_path: Path) -> None:
    (tmp_path / "srun").write_text("#!/bin/sh\n")
    (tmp_path / "srun").chmod(0o755)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "REPOSITORY": "/nowhere"}
    done = subprocess.run(
        ["bash", "-c", slurm_script(deployment(world_size=16))],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stderr == (
        f"warning: ports 8000, 8001, 8002 of the job's nodes: {LISTENER_WARNING}\n"
    )


@pytest.mark.parametrize("layout", ["bls", "llmapi"])
def test_slurm_starts_servers_that_ask_for_the_key(layout: str) -> None:
    script = slurm_script(deployment(layout=layout, world_size=16))
    tasks = re.findall(r"^\d+ /.*$", script, re.MULTILINE) or re.findall(r"^srun .*$", script, re.M)
    assert tasks
    assert all("--http-restricted-api=$restricted" in task for task in tasks)


def test_pods_may_do_little_and_are_reached_by_their_namespace_alone() -> None:
    for manifests in (kubernetes(deployment()), leader_worker_set(deployment(world_size=16))):
        (policy,) = (item for item in manifests if item["kind"] == "NetworkPolicy")
        ports = [entry["port"] for entry in policy["spec"]["ingress"][0]["ports"]]
        assert ports == [8000, 8001, 8002]
        for template in pods(manifests):
            assert template["spec"]["automountServiceAccountToken"] is False
            (container,) = template["spec"]["containers"]
            assert container["securityContext"]["allowPrivilegeEscalation"] is False
            assert container["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        (first, *_) = pods(manifests)
        (variable,) = first["spec"]["containers"][0]["env"]
        assert variable["valueFrom"]["secretKeyRef"]["optional"] is True


@pytest.mark.parametrize("version", ["1.2.1", "1.4rc"])
def test_an_image_of_the_yaml_serves_instead(version: str) -> None:
    image = "registry.example:5000/triton@sha256:0123"
    own = deployment(version=version, layout="llmapi", container_image=image)
    manifest, *_ = kubernetes(own)
    (container,) = manifest["spec"]["template"]["spec"]["containers"]
    assert container["image"] == image
    assert image in docker_run(own, "/models") and image in launch_script(own)


@pytest.mark.parametrize("layout", ["bls", "llmapi"])
def test_a_build_starts_one_node_as_its_script_does(layout: str) -> None:
    script = launch_script(deployment(layout=layout, world_size=2))
    command, environment = local_launch_command(
        deployment(layout=layout, world_size=2), ["tritonserver", "--x"]
    )
    assert [f"export {name}={value}" for name, value in environment.items()] == re.findall(
        r"^export .*$", script, re.MULTILINE
    )
    script_words = shlex.split(script.partition("exec ")[2].replace("\\\n", " "))
    assert set(command) - {"tritonserver", "--x"} <= set(script_words)
    assert ("mpirun" in command) is ("mpirun" in script_words) is (layout == "bls")
    pools = [word for word in script_words if "pool" in word or "peer" in word]
    assert [word for word in command if "pool" in word or "peer" in word] == pools
