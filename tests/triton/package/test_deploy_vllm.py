"""Launch files of a repository for vLLM: its own server starts with the flags of model.json, and
the schemas of Kubernetes and LeaderWorkerSet allow the manifests.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.manifests import check_manifests, check_references, pods
from tests.support.vllm_packages import ARGS, deployment, repository
from toolkit.engines.vllm import arguments, server
from toolkit.engines.vllm.arguments import command_flags
from toolkit.engines.vllm.sampling_plugin import DISTRIBUTION
from toolkit.errors import UsageError
from toolkit.triton.access import LISTENER_WARNING
from toolkit.triton.package import serve_vllm
from toolkit.triton.package.deploy_vllm import VllmDeployment
from toolkit.triton.package.layout_vllm import MODEL_JSON
from toolkit.triton.package.monitoring import FILES
from toolkit.triton.package.serve_vllm import (
    flags_of,
    plugin_path,
    server_command,
    server_environment,
    thread_binding,
)
from toolkit.triton.process.localize import local_args

ON_GPU = {"device": "cuda", "environment": {"VLLM_NO_USAGE_STATS": "1"}}
SEVERAL_NODES = {**ON_GPU, "world_size": 16}


def folder_of(tmp_path: Path, **changes: Any) -> Path:
    return repository(tmp_path, launched=deployment(**changes)).path


def manifests(file: Path) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(file.read_text()))


def stand_in_python(folder: Path, *, has_vllm: bool = True) -> Path:
    """A Python that has vLLM or not, and prints its other commands and the environment."""
    folder.mkdir(parents=True, exist_ok=True)
    program = folder / "python3"
    status = 0 if has_vllm else 1
    program.write_text(
        f'#!/bin/sh\n[ "$1" = -c ] && exit {status}\nprintf "%s\\n" "$@"\n'
        'echo "kv=$VLLM_CPU_KVCACHE_SPACE"\n'
    )
    program.chmod(0o755)
    return program


def run(script: Path, *options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [script, *options],
        env={"PATH": os.environ["PATH"], **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def test_flags_are_those_of_the_rest_of_the_toolkit() -> None:
    """The program stands alone, so it has a copy of the rule."""
    args = {**ARGS, "enforce_eager": False, "max_num_batched_tokens": 64, "kv_cache_dtype": "fp8"}
    assert flags_of(args) == command_flags(args)
    assert serve_vllm.MISLEADING_NAMES == arguments.MISLEADING_NAMES
    variables = server_environment(Path("/bin/python"), {})
    assert variables == {**server.THREAD_POLICY, **server.ENVIRONMENT}


def test_the_server_is_started_with_model_json_as_it_is_now(tmp_path: Path) -> None:
    folder = folder_of(tmp_path)
    (folder / MODEL_JSON).write_text(json.dumps({**ARGS, "max_num_seqs": 2}))
    command = server_command(folder, ["--port", "8001"], "python")
    assert command[:3] == ["python", "-m", "vllm.entrypoints.openai.api_server"]
    flags = ["--generation-config", "vllm", *command_flags(local_args(folder))]
    assert command[3:] == [*flags, "--port", "8001"]
    assert command[command.index("--max-num-seqs") + 1] == "2"
    assert command[command.index("--model") + 1] == f"{folder}/vllm_model/1/engines/target"


def test_the_plain_arm_neither_speculates_nor_counts(tmp_path: Path) -> None:
    folder = folder_of(tmp_path)
    speculative = server_command(folder, ["--request-metrics"], "python")
    assert speculative[-2:] == ["--per-request-spec-decode-metrics", "detailed"]
    assert json.loads(speculative[speculative.index("--speculative-config") + 1])["model"] == str(
        folder / "vllm_model/1/engines/draft"
    )
    plain = server_command(folder, ["--plain", "--request-metrics"], "python")
    assert not [word for word in plain if "spec" in word]


def test_a_node_without_requests_is_started_by_the_command_that_knows_headless(
    tmp_path: Path,
) -> None:
    command = server_command(folder_of(tmp_path), ["--headless"], "python")
    assert command[1:4] == ["-m", "vllm.entrypoints.cli.main", "serve"]


def test_the_script_finds_a_python_that_has_vllm(tmp_path: Path) -> None:
    script = folder_of(tmp_path, name="a b") / "launch_vllm.sh"
    lacking = stand_in_python(tmp_path / "lacking", has_vllm=False)
    having = stand_in_python(tmp_path / "having")
    path = f"{lacking.parent}:{os.environ['PATH']}"
    done = run(script, "--port", "9", PATH=f"{having.parent}:{os.environ['PATH']}")
    assert done.stdout.splitlines() == [
        str(script.parent / "serve_vllm.py"),
        *["--served-model-name", "a b", "--host", "127.0.0.1", "--port", "8000"],
        *["--request-metrics", "--port", "9", "kv=2"],
    ]
    given = run(script, PATH=path, PYTHON=str(having), VLLM_CPU_KVCACHE_SPACE="7")
    assert given.stdout.splitlines()[-1] == "kv=7"


def test_without_vllm_the_script_says_what_to_set(tmp_path: Path) -> None:
    script = folder_of(tmp_path) / "launch_vllm.sh"
    stand_in_python(tmp_path / "lacking", has_vllm=False)
    (tmp_path / "lacking" / "python").symlink_to("python3")
    done = run(script, PATH=f"{tmp_path / 'lacking'}:{os.environ['PATH']}")
    assert (done.returncode, done.stdout) == (2, "")
    assert "set PYTHON=/path/to/python" in done.stderr
    assert "vLLM 0.32.0" in done.stderr


def test_another_python_is_never_taken_for_the_one_that_was_named(tmp_path: Path) -> None:
    script = folder_of(tmp_path) / "launch_vllm.sh"
    having = stand_in_python(tmp_path / "having")
    done = run(script, PATH=f"{having.parent}:{os.environ['PATH']}", PYTHON="/nowhere/python")
    assert (done.returncode, done.stdout) == (2, "")
    assert "PYTHON=/nowhere/python is no Python that has vLLM 0.32.0" in done.stderr


@pytest.mark.parametrize(
    ("changes", "files"),
    [
        ({}, {"launch.sh"}),
        (ON_GPU, {"launch.sh", "docker-run_vllm.sh", "kubernetes_vllm.yaml"}),
        (
            {**ON_GPU, "version": "0.24.0"},
            {
                *("launch.sh", "docker-run_vllm.sh", "kubernetes_vllm.yaml"),
                *("docker-run.sh", "compose.yaml", "kubernetes.yaml"),
            },
        ),
        (SEVERAL_NODES, {"ray.sh", "leaderworkerset.yaml"}),
    ],
    ids=["cpu", "gpu", "with-container", "nodes"],
)
def test_the_files_fit_the_deployment_and_the_readme_names_them(
    tmp_path: Path, changes: dict[str, Any], files: set[str]
) -> None:
    folder = folder_of(tmp_path, **changes)
    written = {path.name for path in folder.iterdir() if path.is_file()} - {"README.md"}
    assert written == files | {"launch_vllm.sh", "serve_vllm.py", *FILES}
    readme = (folder / "README.md").read_text()
    assert set(re.findall(r"^\| `([\w.-]+)` \|", readme, re.MULTILINE)) == written
    for path in folder.glob("*.sh"):
        assert os.access(path, os.X_OK)
        subprocess.run(["sh", "-n", str(path)], check=True)
    for path in folder.glob("*.yaml"):
        if path.name != "compose.yaml":
            check_manifests(manifests(path))
            check_references(manifests(path))


@pytest.mark.parametrize("version", ["0.24.0", "0.32.0"])
def test_a_version_without_a_container_is_told_and_no_tag_is_invented(
    tmp_path: Path, version: str
) -> None:
    folder = folder_of(tmp_path, **ON_GPU, version=version)
    texts = [(folder / name).read_text() for name in ("launch.sh", "README.md")]
    image = "nvcr.io/nvidia/tritonserver:26.07-vllm-python-py3"
    assert all((image in text) is (version == "0.24.0") for text in texts)
    if version == "0.32.0":
        assert "no published container" in texts[0]
        assert "none is known to have vLLM 0.32.0 (26.07 has 0.24.0" in texts[1]
    # Only a version that was seen to have the option gets it.
    launch = (folder / "launch_vllm.sh").read_text()
    assert ("--request-metrics" in launch) is (version == "0.32.0")


def test_triton_adds_the_tensors_so_its_own_completion_stays_on(tmp_path: Path) -> None:
    script = (folder_of(tmp_path) / "launch.sh").read_text()
    words = shlex.split(script.partition("exec ")[2])
    assert words[:2] == ["/opt/tritonserver/bin/tritonserver", "--model-repository=/models"]
    assert "--disable-auto-complete-config" not in script


def test_the_script_of_triton_s_backend_says_who_reaches_it(tmp_path: Path) -> None:
    script = (folder_of(tmp_path) / "launch.sh").read_text()
    script = script.replace("/opt/tritonserver/bin/tritonserver", "true")

    def said(*arguments: str) -> list[str]:
        command = ["sh", "-c", script, "launch.sh", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        return done.stderr.splitlines()

    listeners = [f"--{name}-address" for name in ("http", "grpc", "metrics")]
    assert said() == [f"warning: {option}=0.0.0.0: {LISTENER_WARNING}" for option in listeners]
    loopback = [f"{option}=127.0.0.1" for option in listeners]
    assert said(*loopback) == []
    assert said(*loopback, "--grpc-address=::1", "--http-address=gpu7") == [
        f"warning: --http-address=gpu7: {LISTENER_WARNING}"
    ]


@pytest.mark.parametrize(
    ("changes", "name", "ports"),
    [
        (ON_GPU, "kubernetes_vllm.yaml", [8000]),
        ({**ON_GPU, "version": "0.24.0"}, "kubernetes.yaml", [8000, 8001, 8002]),
        (SEVERAL_NODES, "leaderworkerset.yaml", [8000]),
    ],
)
def test_pods_may_do_little_and_are_reached_by_their_namespace_alone(
    tmp_path: Path, changes: dict[str, Any], name: str, ports: list[int]
) -> None:
    """With several nodes each also reaches the ports of the others."""
    group = manifests(folder_of(tmp_path, **changes) / name)
    (policy,) = (item for item in group if item["kind"] == "NetworkPolicy")
    assert policy["spec"]["podSelector"]["matchLabels"] == {"app": "pair"}
    assert policy["spec"]["policyTypes"] == ["Ingress"]
    first, *others = policy["spec"]["ingress"]
    assert first["from"] == [{"podSelector": {}}]  # without a namespaceSelector: this one
    assert [entry["port"] for entry in first["ports"]] == ports
    peers = [{"podSelector": {"matchLabels": {"app": "pair"}}}]
    assert [rule["from"] for rule in others] == ([peers] if changes is SEVERAL_NODES else [])
    for template in pods(group):
        assert template["spec"]["automountServiceAccountToken"] is False
        (container,) = template["spec"]["containers"]
        context = container["securityContext"]
        assert context["allowPrivilegeEscalation"] is False
        assert context["seccompProfile"] == {"type": "RuntimeDefault"}
        assert context["capabilities"] == {"drop": ["ALL"]}
        assert template["metadata"]["labels"]["app"] == "pair"


def test_an_image_runs_our_script_instead_of_its_own_entry_point(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, **ON_GPU, world_size=2)
    (tmp_path / "docker").write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    (tmp_path / "docker").chmod(0o755)
    words = run(
        folder / "docker-run_vllm.sh", PATH=f"{tmp_path}:{os.environ['PATH']}"
    ).stdout.splitlines()
    assert words[-3:] == ["vllm/vllm-openai:v0.32.0", "--host", "0.0.0.0"]
    assert {"--entrypoint=/models/launch_vllm.sh", "--gpus=2"} <= set(words)
    assert f"--volume={folder}:/models:ro" in words
    assert "--publish=127.0.0.1:8000:8000" in words


def test_a_pod_is_ready_when_the_server_is(tmp_path: Path) -> None:
    file = folder_of(tmp_path, **ON_GPU, world_size=4) / "kubernetes_vllm.yaml"
    (container,) = pods(manifests(file))[0]["spec"]["containers"]
    assert container["image"] == "vllm/vllm-openai:v0.32.0"
    assert container["command"] == ["/models/launch_vllm.sh", "--host", "0.0.0.0"]
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 4}
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[probe]["httpGet"] == {"path": "/health", "port": "http"}


def test_every_node_runs_the_same_command_with_its_rank(tmp_path: Path) -> None:
    file = folder_of(tmp_path, **SEVERAL_NODES) / "leaderworkerset.yaml"
    group = manifests(file)
    assert group[0]["spec"]["leaderWorkerTemplate"]["size"] == 2
    leader, worker = (pod["spec"]["containers"][0] for pod in pods(group))
    environment = {
        "LWS_GROUP_SIZE": "2",
        "LWS_WORKER_INDEX": "1",
        "LWS_LEADER_ADDRESS": "pair-0.pair.default",
    }
    for container, has_requests in ((leader, True), (worker, False)):
        script = container["command"][2].replace("exec /models/launch_vllm.sh", 'printf "%s\\n"')
        done = subprocess.run(
            ["sh", "-c", script], env=environment, capture_output=True, text=True, check=True
        )
        words = done.stdout.splitlines()
        assert ("--headless" in words) is not has_requests
        assert ("0.0.0.0" in words) is has_requests
        position = words.index("--nnodes")
        assert words[position : position + 6] == [
            *["--nnodes", "2", "--node-rank", "1"],
            *["--master-addr", "pair-0.pair.default"],
        ]
        assert container["resources"]["limits"] == {"nvidia.com/gpu": 8}


@pytest.mark.parametrize(
    ("world_size", "gpus_per_node", "nodes"),
    [(1, 8, 1), (8, 8, 1), (16, 8, 2), (12, 8, 2), (9, 8, 3), (7, 4, 7)],
)
def test_every_node_has_equally_many_ranks(world_size: int, gpus_per_node: int, nodes: int) -> None:
    """vLLM refuses anything else."""
    several: VllmDeployment = deployment(
        **ON_GPU, world_size=world_size, gpus_per_node=gpus_per_node
    )
    assert several.nodes == nodes
    assert several.gpus * several.nodes == world_size
    assert several.gpus <= gpus_per_node


def ray_folder(tmp_path: Path, joined: str) -> Path:
    """The repository, and a stand-in for Python with Ray that notes its commands. joined: a shell
    command that prints how many nodes there are.
    """
    folder = folder_of(tmp_path, **SEVERAL_NODES)
    python = tmp_path / "python3"
    python.write_text(
        "#!/bin/sh\n"
        f'case "$2" in *ray.nodes*) {joined}; exit 0;; esac\n'
        '[ "$1" = -c ] && exit 0\n'
        f'echo "$@" >> {tmp_path}/calls\n'
        f'[ "$3 $4" != "start --block" ] || [ "$(wc -l < {tmp_path}/calls)" -gt 2 ]\n'
    )
    (tmp_path / "sleep").write_text("#!/bin/sh\n")
    for program in (python, tmp_path / "sleep"):
        program.chmod(0o755)
    return folder


def test_the_first_node_waits_for_the_others_and_then_serves(tmp_path: Path) -> None:
    joins_at_third = f"echo x >> {tmp_path}/n; echo $(($(wc -l < {tmp_path}/n) / 3 + 1))"
    folder = ray_folder(tmp_path, joins_at_third)
    done = run(
        folder / "ray.sh",
        *("leader", "--host", "0.0.0.0"),
        PYTHON=str(tmp_path / "python3"),
        PATH=f"{tmp_path}:{os.environ['PATH']}",
    )
    assert done.returncode == 0, done.stderr
    assert len((tmp_path / "n").read_text().split()) == 3
    start, serve = (tmp_path / "calls").read_text().splitlines()
    assert start == "-m ray.scripts.scripts start --head --port=6379"
    assert serve.endswith("--distributed-executor-backend ray --host 0.0.0.0")
    assert serve.startswith(str(folder / "serve_vllm.py"))


def test_nodes_that_never_join_are_counted(tmp_path: Path) -> None:
    folder = ray_folder(tmp_path, "echo 1")
    done = run(
        folder / "ray.sh",
        "leader",
        PYTHON=str(tmp_path / "python3"),
        PATH=f"{tmp_path}:{os.environ['PATH']}",
    )
    assert done.returncode == 1
    assert "1 of 2 nodes have joined" in done.stderr
    assert "serve_vllm.py" not in (tmp_path / "calls").read_text()
    assert (tmp_path / "calls").read_text().endswith("stop\n")  # nothing stays behind


def test_other_nodes_try_until_the_first_answers(tmp_path: Path) -> None:
    folder = ray_folder(tmp_path, "echo 1")
    environment = {
        "PYTHON": str(tmp_path / "python3"),
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
    }
    assert run(folder / "ray.sh", "worker", **environment).returncode == 2
    assert run(folder / "ray.sh", "worker", "10.0.0.1", **environment).returncode == 0
    calls = (tmp_path / "calls").read_text().splitlines()
    assert calls == ["-m ray.scripts.scripts start --block --address=10.0.0.1:6379"] * 3


def test_the_calls_of_the_readme_are_json_that_a_shell_passes_on(tmp_path: Path) -> None:
    readme = (folder_of(tmp_path, name="it's") / "README.md").read_text()
    bodies = [
        json.loads(words[words.index("-d") + 1])
        for line in readme.splitlines()
        if line.startswith("    curl ") and (words := shlex.split(line))
    ]
    assert bodies[0]["model"] == "it's"
    assert json.loads(bodies[1]["sampling_parameters"]) == {"max_tokens": 32, "temperature": 0}


@pytest.mark.parametrize("name", ["null", "a: b #c", "$(id)`id`'\"", "70b", "_", "a" * 60])
def test_a_name_is_never_more_than_a_name(tmp_path: Path, name: str) -> None:
    folder = folder_of(tmp_path, **ON_GPU, name=name)
    check_manifests(manifests(folder / "kubernetes_vllm.yaml"))
    having = stand_in_python(tmp_path / "having")
    done = run(folder / "launch_vllm.sh", PYTHON=str(having))
    assert done.stdout.splitlines()[1:3] == ["--served-model-name", name]
    several = deployment(**SEVERAL_NODES, name=name)
    check_manifests(
        manifests(repository(tmp_path / "several", launched=several).path / "leaderworkerset.yaml")
    )


def test_more_ranks_than_numa_nodes_share_the_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM gives a node to each rank and refuses more ranks; so each gets a share of the cores."""
    for node in ("node0", "node1", "nodelist"):
        (tmp_path / node).mkdir()
    monkeypatch.delenv("VLLM_CPU_OMP_THREADS_BIND", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {9, 1, 2, 3, 4, 5, 6, 7, 8})
    assert thread_binding({"tensor_parallel_size": 2}, tmp_path) == {}
    assert thread_binding({}, tmp_path / "none") == {}
    both = {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}
    assert thread_binding(both, tmp_path) == {"VLLM_CPU_OMP_THREADS_BIND": "1,2|3,4|5,6|7,8"}
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    assert thread_binding(both, tmp_path) == {}  # vLLM says what is missing
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3})
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1|2|3")
    assert thread_binding(both, tmp_path) == {}  # a person's own choice stays


@pytest.mark.parametrize(
    "edited, message",
    [
        ([], "no object"),
        (None, "no object"),
        ({}, 'no object with a "model"'),
        ({**ARGS, "tensor_parallel_size": "2"}, "tensor_parallel_size is '2', not a number"),
        ({**ARGS, "speculative_config": "none"}, "speculative_config is no object"),
        ({**ARGS, "model": "/models/nothing"}, "there is no such folder"),
    ],
)
def test_an_edited_model_json_that_cannot_start_is_told(
    edited: object, message: str, tmp_path: Path
) -> None:
    folder = folder_of(tmp_path)
    (folder / MODEL_JSON).write_text(json.dumps(edited))
    with pytest.raises(ValueError, match=message):
        server_command(folder, [], "python")
    if "folder" not in message:
        with pytest.raises(UsageError, match=r"model\.json cannot be used"):
            local_args(folder)


def test_a_folder_that_vllm_would_misread_is_refused(tmp_path: Path) -> None:
    folder = folder_of(tmp_path).rename(tmp_path / "an-Eagle3-folder")
    with pytest.raises(ValueError, match="'eagle3' for another kind of draft"):
        server_command(folder, [], "python")
    assert server_command(folder, ["--plain"], "python")


def test_the_server_gets_the_openmp_of_its_build(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    python, openmp = tmp_path / "bin" / "python", tmp_path / "lib" / "libiomp5.so"
    assert "LD_PRELOAD" not in server_environment(python, {})
    openmp.parent.mkdir()
    openmp.touch()
    assert server_environment(python, {})["LD_PRELOAD"] == str(openmp)
    spaced = tmp_path / "v v"
    (spaced / "lib").mkdir(parents=True)
    (spaced / "lib" / "libiomp5.so").touch()
    assert capsys.readouterr().err == ""
    assert "LD_PRELOAD" not in server_environment(spaced / "bin" / "python", {})
    assert "cannot be preloaded" in capsys.readouterr().err
    assert server_environment(python, {"OMP_WAIT_POLICY": "ACTIVE"}).keys() >= {"HF_HUB_OFFLINE"}
    assert "OMP_WAIT_POLICY" not in server_environment(python, {"OMP_WAIT_POLICY": "ACTIVE"})


def test_the_server_finds_the_plugins_of_the_engine(tmp_path: Path) -> None:
    assert plugin_path(tmp_path, {}) == {}
    plugins = tmp_path / "vllm_plugins"
    plugins.mkdir()
    assert plugin_path(tmp_path, {}) == {"PYTHONPATH": str(plugins)}
    assert plugin_path(tmp_path, {"PYTHONPATH": "/mine"}) == {"PYTHONPATH": f"{plugins}:/mine"}
    chosen = plugin_path(tmp_path, {"VLLM_PLUGINS": "one"})["VLLM_PLUGINS"]
    assert chosen == f"one,{DISTRIBUTION}"
    (tmp_path / "a:b" / "vllm_plugins").mkdir(parents=True)
    with pytest.raises(ValueError, match="PYTHONPATH cannot name a path with ':'"):
        plugin_path(tmp_path / "a:b", {})
