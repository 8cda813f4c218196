"""The command line as people meet it: what it prints, how it exits, how it stops."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.cli import toolkit, toolkit_here, write_config
from tests.support.hub import small_hub
from tests.support.vllm_program import fake_python

STAGES = ("pair", "quantize", "compile", "package", "validate")
SHOWS = ("plan", "explain", "report", "doctor", "schema", "version")
CONFIGS = Path(__file__).parents[2] / "configs"
COMMANDS = ("init", "build", *STAGES, "tune", "serve", "gateway", "generate", "bench", *SHOWS)
GROUPS = {"rollout": ("run", "status", "rollback")}


@pytest.fixture(scope="module")
def deployment(tiny_pair: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with tiny.yaml that all tests of this module share: each reuses the stages that the
    tests before it have built.
    """
    folder = tmp_path_factory.mktemp("deployment")
    write_config(folder, tiny_pair)
    return folder


def test_help_is_the_reviewed_one(tmp_path: Path, golden: Callable[[str, str], None]) -> None:
    texts = [toolkit_here("--help", cwd=tmp_path).stdout]
    texts += [toolkit_here(command, "--help", cwd=tmp_path).stdout for command in COMMANDS]
    for group, names in GROUPS.items():
        texts += [toolkit_here(group, name, "--help", cwd=tmp_path).stdout for name in names]
    golden("help.txt", f"\n{'-' * 110}\n\n".join(texts))


def test_no_summary_of_a_command_is_cut_at_80_columns(tmp_path: Path) -> None:
    text = toolkit_here("--help", cwd=tmp_path, COLUMNS="80").stdout
    summaries = [line for line in text.partition("Commands:")[2].splitlines() if line.strip()]
    assert len(summaries) == len(COMMANDS) + len(GROUPS)
    assert not [line for line in summaries if line.endswith("...")]


def test_a_plan_says_whether_it_can_work(tmp_path: Path) -> None:
    config = str(Path(__file__).parents[2] / "configs" / "llama70b.yaml")
    good = toolkit_here("plan", config, cwd=tmp_path)
    assert good.returncode == 0 and "llama70b: it can work" in good.stdout
    bad = toolkit_here("plan", config, "--json", "--set", "engine.tp_size=3", cwd=tmp_path)
    plan = json.loads(bad.stdout)
    assert bad.returncode == 2 and not plan["possible"]
    assert {"heads-divide-tp", "world-size"} <= {
        judgement["rule"] for judgement in plan["judgements"] if judgement["severity"] == "refused"
    }


@pytest.mark.slow
def test_a_hub_id_is_fetched_once_and_then_found(
    tiny_pair: tuple[Path, Path], tmp_path: Path
) -> None:
    config = str(write_config(tmp_path, tiny_pair, target={"checkpoint": "somebody/tiny"}))
    with small_hub("somebody/tiny", tiny_pair[0]) as hub:
        here = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "0"}
        unknown = toolkit("plan", config, cwd=tmp_path, **here)
        assert unknown.returncode == 2 and "no folder somebody/tiny beside the YAML" in " ".join(
            unknown.stdout.split()
        )
        init = ("init", "--target", "somebody/tiny", "--out", "first.yaml")
        before = toolkit(*init, cwd=tmp_path, **here)
        assert before.returncode == 2 and "hf download somebody/tiny config.json" in before.stderr
        # the command that the hint names runs this
        fetch = (
            "from huggingface_hub import hf_hub_download; hf_hub_download('somebody/tiny',"
            " 'config.json')"
        )
        subprocess.run(
            [sys.executable, "-c", fetch],
            env={**os.environ, **here},
            capture_output=True,
            timeout=60,
            check=True,
        )
        assert toolkit(*init, cwd=tmp_path, **here).returncode == 0
        assert toolkit("plan", "first.yaml", cwd=tmp_path, **here).returncode == 0
        assert hub.asked == ["config.json"]
        built = toolkit("pair", config, cwd=tmp_path, **here)
        assert built.returncode == 0, built.stderr
        assert "model.safetensors" in hub.asked
        assert toolkit("plan", config, cwd=tmp_path, **here).returncode == 0
        assert hub.asked.count("model.safetensors") == 1


def test_what_may_be_a_hub_id_is_told_in_both_readings_with_its_line(
    tiny_pair: tuple[Path, Path], tmp_path: Path
) -> None:
    config = str(write_config(tmp_path, tiny_pair, target={"checkpoint": "somebody/tiny"}))
    offline = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hub")}
    for command in ("pair", "explain"):
        done = toolkit(command, config, cwd=tmp_path, **offline)
        assert done.returncode == 2
        assert re.search(
            r"tiny\.yaml:4:\d+: target\.checkpoint: no folder somebody/tiny beside the YAML; read"
            r" as a model id",
            done.stderr,
        )
        assert (
            "Fix the path if a folder is meant." in done.stderr
            and "hf download somebody/tiny" in done.stderr
        )


def test_a_plan_of_the_engine_flow_writes_the_file_of_the_other_flow(tmp_path: Path) -> None:
    for name in ("llama70b-engine", "qwen2.5-72b-int8"):
        shutil.copy(CONFIGS / f"{name}.yaml", tmp_path)
    into = ("--as", "trtllm_pytorch", "--write", "new/llama.yaml")
    (tmp_path / "new").mkdir()
    done = toolkit_here("plan", "llama70b-engine.yaml", *into, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "wrote new/llama.yaml" in done.stderr
    assert "engine.builder" in done.stdout
    assert "llama70b-engine-pytorch: it can work" in done.stdout
    written = yaml.safe_load((tmp_path / "new/llama.yaml").read_text())
    assert written["validation"]["prompts"] == "../quickstart/data/prompts.jsonl"
    assert written["target"]["checkpoint"] == "meta-llama/Llama-3.3-70B-Instruct"
    assert toolkit_here("plan", "new/llama.yaml", cwd=tmp_path).returncode == 0
    again = toolkit_here("plan", "llama70b-engine.yaml", *into, cwd=tmp_path)
    assert again.returncode == 2 and "the file exists already" in again.stderr
    int8 = ("--as", "trtllm_pytorch", "--write", "int8.yaml")
    refused = toolkit_here("plan", "qwen2.5-72b-int8.yaml", *int8, cwd=tmp_path)
    assert refused.returncode == 2 and "[no-w8a8-in-pytorch]" in refused.stdout
    assert "int8.yaml is not written" in refused.stderr
    assert not (tmp_path / "int8.yaml").exists()
    alone = toolkit_here("plan", "llama70b-engine.yaml", "--write", "x.yaml", cwd=tmp_path)
    assert alone.returncode == 2 and "--write needs --as" in alone.stderr


def test_init_writes_a_file_that_plans(tiny_pair: tuple[Path, Path], tmp_path: Path) -> None:
    made = toolkit_here(
        "init",
        "--target",
        str(tiny_pair[0]),
        "--draft",
        str(tiny_pair[1]),
        "--out",
        "my.yaml",
        cwd=tmp_path,
    )
    assert made.returncode == 0, made.stderr
    assert "data/calib.jsonl" in made.stdout and "data/prompts.jsonl" in made.stdout
    assert "toolkit plan my.yaml" in (tmp_path / "my.yaml").read_text()
    planned = toolkit_here("plan", "my.yaml", "--set", "validation.max_tokens=8", cwd=tmp_path)
    assert planned.returncode == 0, planned.stdout + planned.stderr
    assert planned.stdout.count("[toolkit-texts]") == 2 and "my: it can work" in planned.stdout
    assert not re.search(r"(\s-){2}\s", planned.stdout)  # no column without a number
    missing = toolkit_here("build", "my.yaml", "--set", "validation.max_tokens=8", cwd=tmp_path)
    assert missing.returncode == 2 and missing.stderr.count("no such file: data/") == 2
    (tmp_path / "data").mkdir()
    for name, key in (("calib", "text"), ("prompts", "prompt")):
        (tmp_path / "data" / f"{name}.jsonl").write_text(
            (json.dumps({key: "def f(x):"}) + "\n") * 10
        )
    planned = toolkit_here("plan", "my.yaml", "--set", "validation.max_tokens=8", cwd=tmp_path)
    assert "[toolkit-texts]" not in planned.stdout
    again = toolkit_here("init", "--target", str(tiny_pair[0]), "--out", "my.yaml", cwd=tmp_path)
    assert again.returncode == 2 and "exists already" in again.stderr
    assert toolkit_here("init", "--target", "nowhere", cwd=tmp_path).returncode == 2
    assert (
        "known: A100-40GB"
        in toolkit_here("init", "--target", str(tiny_pair[0]), "--gpu", "V100", cwd=tmp_path).stderr
    )


def test_a_build_that_cannot_work_points_at_the_lines(tmp_path: Path) -> None:
    config = str(Path(__file__).parents[2] / "configs" / "llama70b.yaml")
    done = toolkit_here(
        "build",
        config,
        "--set",
        "engine.tp_size=3",
        "--set",
        "engine.tensorrt_llm='0.21'",
        cwd=tmp_path,
    )
    assert done.returncode == 2
    assert "--set engine.tp_size=3: engine.tp_size: the target's 64 attention heads" in done.stderr
    assert "[pytorch-flow-min-version]" in done.stderr
    assert not list(tmp_path.iterdir())


def toolkit_writes_to(stdout: int, *arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "toolkit", *arguments],
        cwd=cwd,
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_output_that_cannot_be_written_is_an_error_and_no_traceback(tmp_path: Path) -> None:
    with Path("/dev/full").open("w") as full:
        done = toolkit_writes_to(full.fileno(), "schema", cwd=tmp_path)
    assert done.returncode == 3
    assert done.stderr.splitlines()[0] == "reading or writing: No space left on device"
    assert "Traceback" not in done.stderr


def test_output_that_is_closed_is_no_fault(deployment: Path) -> None:
    command = ["sh", "-c", f"exec '{sys.executable}' -m toolkit plan tiny.yaml >&-"]
    done = subprocess.run(
        command, cwd=deployment, stderr=subprocess.PIPE, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("command", [["schema"], ["plan", "tiny.yaml"], ["--help"]])
def test_a_reader_that_leaves_is_no_fault(deployment: Path, command: list[str]) -> None:
    """As `| head` does, whether the output fits into a buffer or not."""
    read, write = os.pipe()
    os.close(read)
    done = toolkit_writes_to(write, *command, cwd=deployment)
    os.close(write)
    assert (done.returncode, "Traceback" in done.stderr) == (0, False)


def test_a_current_folder_that_was_deleted_is_told(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    toolkit = f"'{sys.executable}' -m toolkit build '{CONFIGS / 'quickstart.yaml'}'"
    done = subprocess.run(
        ["sh", "-c", f"cd '{gone}' && rmdir '{gone}' && {toolkit}"],
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 3
    assert done.stderr.startswith("the current folder was deleted")


def test_a_folder_whose_name_is_not_utf_8_is_refused(
    deployment: Path, tiny_pair: tuple[Path, Path], tmp_path: Path
) -> None:
    folder = tmp_path / "a\udcff"
    folder.mkdir()
    write_config(folder, tiny_pair)
    built = toolkit_here("build", "tiny.yaml", cwd=folder)
    assert (built.returncode, "the path of this folder is not UTF-8" in built.stderr) == (2, True)
    assert f"{tmp_path}/a\\udcff" in built.stderr
    shutil.copytree(tiny_pair[0], folder / "target")
    (folder / "tiny.yaml").rename(folder / "relative.yaml")
    text = (folder / "relative.yaml").read_text().replace(str(tiny_pair[0]), "target")
    (folder / "relative.yaml").write_text(text)
    read = toolkit_here("build", str(folder / "relative.yaml"), "--until", "pair", cwd=deployment)
    assert read.returncode == 2
    assert "the path is not UTF-8" in read.stderr


def test_a_draft_to_compare_is_looked_for_at_once(tmp_path: Path) -> None:
    config = CONFIGS / "quickstart.yaml"
    done = toolkit_here("tune", str(config), "--draft", "nowhere", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("--draft nowhere holds no checkpoint")


@pytest.mark.parametrize("until", ["compile", "package", "validate"])
def test_a_python_without_vllm_ends_a_build_before_anything_runs(
    until: str, tmp_path: Path
) -> None:
    shutil.copytree(CONFIGS / "quickstart", tmp_path / "quickstart")
    shutil.copy(CONFIGS / "quickstart-vllm.yaml", tmp_path)
    done = toolkit_here(
        *("build", "quickstart-vllm.yaml", "--until", until),
        *("--set", f"engine.python={sys.executable}"),
        cwd=tmp_path,
    )
    assert done.returncode == 2, done.stdout + done.stderr
    first, hint = done.stderr.splitlines()[:2]
    assert first.startswith(f"engine.python: {sys.executable} has no vLLM")
    assert "make vllm" in hint
    assert "started" not in done.stdout + done.stderr


@pytest.mark.parametrize("where", ["http://localhost:8001/v2", "tcp://localhost:8001"])
def test_an_endpoint_that_cannot_be_one_is_refused(where: str, tmp_path: Path) -> None:
    done = toolkit_here("generate", where, "hello", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith(f"{where} is not host:port of a gRPC endpoint\n")


@pytest.mark.parametrize("seed", ["-1", str(2**64)])
def test_a_seed_that_the_server_could_not_take_is_refused(seed: str, tmp_path: Path) -> None:
    done = toolkit_here("generate", "localhost:1", "hello", "--seed", seed, cwd=tmp_path)
    assert done.returncode == 2
    assert "Invalid value for '--seed'" in done.stderr


def test_usage_errors_exit_2_and_say_where_to_look(
    tmp_path: Path, golden: Callable[[str, str], None]
) -> None:
    (tmp_path / "empty.yaml").touch()
    printed = []
    for arguments in (
        ["bild"],
        ["build"],
        ["build", "--untill", "pair"],
        ["build", "gone.yaml"],
        ["build", "empty.yaml"],
        ["generate", "127.0.0.1:9", "x", "--set", "a=1"],
        ["validate", "--replay", "one.json", "--set", "a=1"],
        ["generate", "gone.yaml", "x"],
        ["generate", "x", "y", "--max-tokens", "0"],
    ):
        done = toolkit_here(*arguments, cwd=tmp_path)
        assert done.returncode == 2, done.stderr
        assert done.stdout == ""
        assert "Traceback" not in done.stderr
        printed.append(f"$ toolkit {' '.join(arguments)}\n{done.stderr}")
    golden("usage-errors.txt", "\n".join(printed).replace(str(tmp_path), "FOLDER"))


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["serve"], "cannot be served here: it needs"),
        (["bench"], "cannot be served here: it needs"),
        (["generate", "def f(x):"], "runs only in its server"),
    ],
)
def test_what_this_machine_cannot_serve_is_refused_before_anything_is_fetched(
    command: list[str], message: str, tmp_path: Path
) -> None:
    """None of these models is on this machine, so a download would fail later and with another
    message.
    """
    config = Path(__file__).parents[2] / "configs" / "llama70b.yaml"
    name, *rest = command
    done = toolkit_here(name, str(config), *rest, cwd=tmp_path, PATH=os.defpath)
    assert done.returncode == 2
    assert message in done.stderr
    assert not (tmp_path / "build").exists()


def test_a_wrong_stage_is_refused(deployment: Path) -> None:
    for arguments in (["--until", "quantise"], ["--fresh", "quantise"]):
        done = toolkit_here("build", "tiny.yaml", *arguments, cwd=deployment)
        assert done.returncode == 2
        assert "there is no stage 'quantise'" in done.stderr


def test_config_faults_exit_2_without_a_traceback_unless_asked(deployment: Path) -> None:
    arguments = ["build", "tiny.yaml", "--set", "engine.threads=none"]
    assert (
        "--set engine.threads=none: engine.threads"
        in (plain := toolkit_here(*arguments, cwd=deployment)).stderr
    )
    assert plain.returncode == 2
    assert "Traceback" not in plain.stderr
    assert "Traceback" in toolkit(*arguments, "--debug", cwd=deployment).stderr


def test_schema_is_json_schema_of_every_key(tmp_path: Path) -> None:
    schema = json.loads(toolkit_here("schema", cwd=tmp_path).stdout)
    assert {"name", "target", "draft", "validation"} <= set(schema["properties"])
    assert schema["additionalProperties"] is False
    assert schema["properties"]["target"]["description"] == "The model that is served."


def test_version_prints_one_line(tmp_path: Path) -> None:
    assert re.fullmatch(r"toolkit \d+\.\d+\.\d+\n", toolkit_here("version", cwd=tmp_path).stdout)
    by_option = toolkit_here("--version", cwd=tmp_path)
    assert (by_option.returncode, by_option.stdout) == (
        0,
        toolkit_here("version", cwd=tmp_path).stdout,
    )


def test_an_endpoint_that_nobody_answers_at_exits_3(tmp_path: Path) -> None:
    gone = toolkit_here("generate", "127.0.0.1:9", "x", cwd=tmp_path)
    assert (
        gone.returncode == 3
        and "cannot be reached" in gone.stderr
        and "Traceback" not in gone.stderr
    )


def test_a_report_that_is_not_there_yet_says_how_to_make_it(
    deployment: Path, tmp_path: Path
) -> None:
    done = toolkit_here("report", str(deployment / "tiny.yaml"), cwd=tmp_path)
    assert done.returncode == 2
    assert "toolkit build" in done.stderr


@pytest.mark.slow
def test_stages_run_up_to_the_one_that_is_asked_for_and_are_explained(deployment: Path) -> None:
    before = toolkit_here("explain", "tiny.yaml", cwd=deployment)
    assert "never built under this name" in before.stdout
    done = toolkit("build", "tiny.yaml", "--until", "pair", cwd=deployment)
    assert done.returncode == 0, done.stderr
    assert re.search(r"^pair +done in", done.stderr, re.MULTILINE)
    assert "quantize" not in done.stderr
    packaged = toolkit("package", "tiny.yaml", "--json", cwd=deployment)
    built = json.loads(packaged.stdout)
    assert [stage["reused"] for stage in built["stages"]] == [
        True,
        False,
        False,
        False,
        False,
        False,
    ]
    assert all(Path(folder).is_dir() for folder in built["published"])
    explained = toolkit_here(
        "explain",
        "tiny.yaml",
        "--set",
        "engine.max_batch_size=3",
        "--set",
        "validation.max_tokens=7",
        cwd=deployment,
    )
    assert re.search(r"^quantize/target +reused", explained.stdout, re.MULTILINE)
    assert "config.max_batch_size: 2 -> 3" in explained.stdout
    again = toolkit("package", "tiny.yaml", cwd=deployment)
    assert "nothing changed" in again.stdout
    assert "still from an earlier build" not in packaged.stdout + again.stdout
    alone = toolkit("compile", "tiny.yaml", "--set", "speculation.kind=none", cwd=deployment)
    assert (
        "still from an earlier build: triton_repo/tiny/\n" in alone.stdout
        and "--set name=NAME" in alone.stdout
    )


@pytest.mark.slow
def test_verdicts_are_exit_codes_and_only_decided_ones_are_reused(deployment: Path) -> None:
    passed = toolkit("build", "tiny.yaml", cwd=deployment)
    assert passed.returncode == 0, passed.stdout + passed.stderr
    report = json.loads((deployment / "build/reports/tiny/report.json").read_text())
    assert report["verdict"] == "PASS"
    assert {stage["stage"] for stage in report["stages"]} >= {
        "pair",
        "quantize/target",
        "compile/draft",
        "package",
    }
    # Validation has no peak of its own, since it runs beside the server that it judges.
    peaks = {stage["stage"]: stage["peak_memory_bytes"] for stage in report["stages"]}
    assert min(peaks["quantize/target"], peaks["serve"]) > 50_000_000
    assert peaks["validate"] is None
    too_much = ["build", "tiny.yaml", "--set", "validation.latency.min_speedup=1000"]
    too_much += ["--set", "validation.rounds=2", "--set", "validation.max_rounds=2"]
    failed = toolkit(*too_much, cwd=deployment)
    assert failed.returncode == 1, failed.stdout + failed.stderr
    reused = toolkit(*too_much, cwd=deployment)
    assert reused.returncode == 1
    assert "nothing changed" in reused.stdout
    assert re.search(r"^validate +reused", reused.stderr, re.MULTILINE)
    undecided = [
        "build",
        "tiny.yaml",
        "--set",
        "validation.parity.max_divergence_rate=0.01",
        "--json",
    ]
    for _ in range(2):
        done = toolkit(*undecided, cwd=deployment)
        assert done.returncode == 4, done.stdout + done.stderr
        assert json.loads(done.stdout)["stages"][-1]["reused"] is False


@pytest.mark.slow
def test_the_last_report_can_be_printed(deployment: Path) -> None:
    toolkit("build", "tiny.yaml", cwd=deployment)
    printed = toolkit_here("report", "tiny.yaml", cwd=deployment)
    assert printed.returncode == 0
    assert "tiny: PASS" in printed.stdout
    assert "report.html" in printed.stdout
    data = json.loads(toolkit_here("report", "tiny.yaml", "--json", cwd=deployment).stdout)
    assert data["verdict"] == "PASS"
    assert [stage["stage"] for stage in data["stages"]][-2:] == ["serve", "validate"]
    assert data["stages"][-1]["seconds"] >= data["stages"][-2]["seconds"] > 0


@pytest.mark.slow
def test_generate_streams_a_completion_with_its_figures(deployment: Path) -> None:
    arguments = ["generate", "tiny.yaml", "def f(x):", "--max-tokens", "8"]
    done = toolkit(*arguments, cwd=deployment)
    assert done.returncode == 0, done.stderr
    assert re.search(
        r"8 tokens in .* tokens/s, acceptance \d.\d\d, \d.\d\d tokens per step, ended by length",
        done.stderr,
    )
    found = json.loads(toolkit(*arguments, "--json", cwd=deployment).stdout)
    assert found["output_tokens"] == 8
    assert found["text"] == done.stdout.removesuffix("\n")
    plain = json.loads(toolkit(*arguments, "--json", "--draft-len", "0", cwd=deployment).stdout)
    assert plain["text"] == found["text"]
    assert plain["acceptance_rate"] is None
    refused = toolkit("generate", "tiny.yaml", "x" * 100, cwd=deployment)
    assert refused.returncode == 2
    assert "max_input_len" in refused.stderr


def write_vllm_config(folder: Path, pair: tuple[Path, Path], name: str) -> None:
    """tiny.yaml of a deployment that the program with this name serves in place of vLLM."""
    engine = {"kind": "vllm", "dtype": "float32", "kv_cache_gib": 1}
    engine |= {"python": str(fake_python(folder / "bin")), "max_input_len": 64, "max_seq_len": 128}
    write_config(folder, pair, name=name, engine=engine)


def test_a_request_that_fails_while_vllm_runs_is_an_error_and_no_traceback(
    vllm_pair: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("toolkit.engines.vllm.server.GONE_S", 0.5)
    write_vllm_config(tmp_path, vllm_pair, "breaks-off")
    done = toolkit_here("generate", "tiny.yaml", "def f(x):", cwd=tmp_path)
    assert done.returncode == 3
    assert re.search(r"^generate: 127\.0\.0\.1:\d+: the (connection|stream)", done.stderr, re.M)
    assert "vLLM itself has not failed" in done.stderr


@pytest.mark.parametrize("where", ["tiny.yaml", "127.0.0.1:9"])
def test_a_prompt_that_is_no_text_is_refused(where: str, deployment: Path) -> None:
    """Python reads a byte of an argument that is not UTF-8 as half of a surrogate pair."""
    done = toolkit_here("generate", where, "a\udc80b", cwd=deployment)
    assert done.returncode == 2
    assert "half of a surrogate pair" in done.stderr


def test_an_address_that_cannot_be_is_refused(deployment: Path) -> None:
    done = toolkit_here("generate", "localhost:99999", "def f(x):", cwd=deployment)
    assert (done.returncode, done.stdout) == (2, "")
    assert "a port is at most 65535" in done.stderr


@pytest.mark.parametrize("where", ["tiny.yaml", "127.0.0.1:9"])
def test_an_empty_prompt_is_refused(where: str, deployment: Path) -> None:
    done = toolkit_here("generate", where, "", cwd=deployment)
    assert (done.returncode, done.stdout) == (2, "")
    assert "the prompt is empty" in done.stderr


def printed_until_ready(process: subprocess.Popen[str]) -> list[str]:
    """The lines up to the one that says so, or up to the end."""
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line)
        if line.startswith("ready"):
            break
    return lines


@pytest.fixture
def served(deployment: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A running `toolkit serve`, and its gRPC address."""
    command = [sys.executable, "-m", "toolkit", "serve", "tiny.yaml"]
    process = subprocess.Popen(
        command, cwd=deployment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    lines = printed_until_ready(process)
    assert lines, process.communicate(timeout=60)[1]
    (address,) = [line.split()[1] for line in lines if line.startswith("grpc")]
    (metrics,) = [line.split()[1] for line in lines if line.startswith("metrics")]
    assert f"toolkit bench {address} --prompts prompts.jsonl --metrics {metrics}\n" in lines
    assert any(line.startswith("curl -s http://127.0.0.1:") for line in lines)
    yield process, address
    if process.poll() is None:
        process.kill()
    process.communicate(timeout=60)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_serve_answers_until_it_is_stopped(
    served: tuple[subprocess.Popen[str], str], number: int, tmp_path: Path
) -> None:
    process, address = served
    found = json.loads(
        toolkit_here(
            "generate", address, "def f(x):", "--max-tokens", "8", "--json", cwd=tmp_path
        ).stdout
    )
    assert found["output_tokens"] == 8
    assert found["finish_reason"] == "length"
    streamed = toolkit_here(
        "generate", f"grpc://{address}", "def f(x):", "--max-tokens", "8", cwd=tmp_path
    )
    assert streamed.stdout == found["text"] + "\n"
    process.send_signal(number)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    assert out.endswith("stopped\n")
    refused = toolkit_here("generate", address, "x", cwd=tmp_path)
    assert refused.returncode == 3  # as `bench` exits
    assert "cannot be reached" in refused.stderr


def curl(url: str, **body: Any) -> tuple[int, str]:
    """(status, answer) of a completion, by the real curl."""
    data = {"model": "tiny", "prompt": "def f(x):", "max_tokens": 8, "temperature": 0, **body}
    command = ["curl", "-sSN", "--max-time", "30", "-w", "\n%{http_code}", "-d", json.dumps(data)]
    done = subprocess.run([*command, url], capture_output=True, text=True, check=True)
    answer, _, status = done.stdout.rpartition("\n")
    return int(status), answer


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("curl") is None, reason="no curl on PATH")
def test_serve_with_a_gateway_answers_curl_and_leaves_no_process(
    deployment: Path, tmp_path: Path
) -> None:
    """Whole answers, streams and refusals; after SIGTERM server, model and gateway are gone."""
    packaged = toolkit("package", "tiny.yaml", cwd=deployment)
    assert packaged.returncode == 0, packaged.stderr
    command = [sys.executable, "-m", "toolkit", "serve", "tiny.yaml", "--gateway"]
    log = tmp_path / "gateway.log"
    with (
        log.open("w") as errors,
        subprocess.Popen(
            command,
            cwd=deployment,
            env={**os.environ, "TMPDIR": str(tmp_path)},
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        ) as process,
    ):
        try:
            lines = printed_until_ready(process)
            assert lines and lines[-1].startswith("ready"), log.read_text()
            (address,) = [line.split()[1] for line in lines if line.startswith("openai")]
            url = f"{address}/completions"
            assert any(line.startswith(f"curl -s {url}") for line in lines)

            status, answer = curl(url)
            whole = json.loads(answer)
            text = whole["choices"][0]["text"]
            assert (status, whole["object"]) == (200, "text_completion")
            assert text and whole["choices"][0]["finish_reason"] == "length"
            assert whole["usage"]["completion_tokens"] == 8

            status, answer = curl(url, stream=True)
            events = [part.removeprefix("data: ") for part in answer.strip().split("\n\n")]
            assert status == 200 and events.pop() == "[DONE]"
            choices = [json.loads(event)["choices"][0] for event in events]
            assert "".join(choice["text"] for choice in choices) == text
            assert [choice["finish_reason"] for choice in choices][-1] == "length"

            status, answer = curl(url, n=2)
            error = json.loads(answer)["error"]
            assert (status, error["param"]) == (400, "n") and "n has to be 1" in error["message"]
            status, answer = curl(url, prompt="x" * 100)
            error = json.loads(answer)["error"]
            assert (status, error["param"]) == (400, "prompt")
            assert "takes up to 64 (max_input_len)" in error["message"]

            begun = _descendants(process.pid)
            assert any(pid in begun for pid in _servers())
            process.send_signal(signal.SIGTERM)
            out, _ = process.communicate(timeout=20)
        finally:
            process.kill()  # does nothing if it has ended
    assert (process.returncode, out) == (0, "stopped\n")
    assert "Traceback" not in log.read_text()
    assert [pid for pid in begun if Path(f"/proc/{pid}").exists()] == []
    assert [path.name for path in tmp_path.iterdir()] == ["gateway.log"]


def _descendants(pid: int) -> list[int]:
    running = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]
    return [other for other in running if pid in _ancestors(other)]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_serve_is_stopped_at_once_while_its_server_starts(
    vllm_pair: tuple[Path, Path], tmp_path: Path, number: int
) -> None:
    write_vllm_config(tmp_path, vllm_pair, "hangs")
    (private := tmp_path / "tmp").mkdir()
    process = subprocess.Popen(
        [sys.executable, "-m", "toolkit", "serve", "tiny.yaml"],
        cwd=tmp_path,
        env={**os.environ, "TMPDIR": str(private)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 60
    while not any(is_hanging(log) for log in private.glob("*/server.log")):
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()
        time.sleep(0.05)
    process.send_signal(number)
    out, err = process.communicate(timeout=30)
    assert process.returncode == 128 + number
    assert out == "stopped\n"
    assert "Traceback" not in err
    assert list(private.iterdir()) == []


def is_hanging(log: Path) -> bool:
    """Whether the program that stands for vLLM has started its child."""
    return "started " in log.read_text(errors="replace")


@pytest.mark.slow
def test_a_server_that_dies_is_reported(served: tuple[subprocess.Popen[str], str]) -> None:
    process, _ = served
    (server,) = [pid for pid in _servers() if process.pid in _ancestors(pid)]
    os.kill(server, signal.SIGKILL)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 3
    assert "was killed by SIGKILL" in err
    assert "Traceback" not in err


def _ancestors(pid: int) -> Iterator[int]:
    while pid > 1:
        try:
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        except (FileNotFoundError, ProcessLookupError):
            return
        yield pid


@pytest.mark.slow
def test_a_build_that_is_killed_while_it_serves_leaves_no_server_and_resumes(
    deployment: Path,
) -> None:
    command = [sys.executable, "-m", "toolkit", "build", "tiny.yaml", "--fresh", "validate"]
    process = subprocess.Popen(
        command, cwd=deployment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    for line in process.stderr:
        if "warming up" in line or "measuring" in line:
            break
    (server,) = [pid for pid in _servers() if process.pid in _ancestors(pid)]
    process.kill()
    process.communicate(timeout=60)
    deadline = time.monotonic() + 30
    while server in _servers() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert server not in _servers()
    again = toolkit("build", "tiny.yaml", "--fresh", "validate", cwd=deployment)
    assert again.returncode == 0, again.stderr
    assert again.stderr.count("reused") == 6
    assert list((deployment / "build" / "store").rglob(".tmp.*")) == []


def _servers() -> list[int]:
    return [
        int(pid)
        for pid in subprocess.run(
            ["pgrep", "-x", "tritonserver"], capture_output=True, text=True, check=False
        ).stdout.split()
    ]


@pytest.mark.slow
def test_ctrl_c_exits_130_and_says_what_is_kept(deployment: Path) -> None:
    # A shell without job control ignores SIGINT in its background processes, and their children
    # inherit that.
    command = [
        "env",
        "--default-signal=INT",
        sys.executable,
        "-m",
        "toolkit",
        "build",
        "tiny.yaml",
        "--fresh",
        "validate",
    ]
    process = subprocess.Popen(
        command, cwd=deployment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith("validate"):  # validate takes seconds more, since a server has to start
            break
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "finished stages are kept" in err
    assert "Traceback" not in err
    assert list((deployment / "build" / "store").rglob(".tmp.*")) == []


@pytest.mark.slow
def test_a_terminated_build_ends_its_compiler_and_leaves_nothing(
    deployment: Path, tmp_path: Path
) -> None:
    """`timeout`, CI and systemd send SIGTERM, to this process alone."""
    command = [sys.executable, "-m", "toolkit", "build", "tiny.yaml", "--until", "compile"]
    command += ["--set", "engine.dtype=float32", "--set", "engine.mode=compiled"]
    process = subprocess.Popen(
        command,
        cwd=deployment,
        env={**os.environ, "TMPDIR": str(tmp_path)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stderr is not None
    lines = []
    for line in process.stderr:
        lines.append(line)
        if "compiling kernels" in line:
            break
    else:
        pytest.fail("".join(lines))
    time.sleep(1)  # the compiler has started
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM, err
    assert "finished stages are kept" in err
    assert list(tmp_path.glob("toolkit-*")) == []
    listed = ["pgrep", "--runstates", "R,S,D", "--list-full", "--pgroup", str(process.pid)]
    found = subprocess.run(listed, capture_output=True, text=True, check=False)
    assert found.stdout == ""


@pytest.mark.parametrize("name", ["engines", "build/reports"])
def test_a_build_looks_first_whether_its_results_can_be_written(
    name: str, deployment: Path
) -> None:
    work = deployment / "elsewhere"
    (work / name).parent.mkdir(parents=True)
    (work / name).write_text("")
    done = toolkit_here("build", "../tiny.yaml", cwd=work)
    assert (done.returncode, done.stdout) == (3, "")
    assert f"{work / name} is a file" in done.stderr
    assert not (work / "build" / "store").exists()
    shutil.rmtree(work)


@pytest.mark.slow
def test_doctor_lists_findings_and_how_to_fix_them(tmp_path: Path) -> None:
    done = toolkit("doctor", cwd=tmp_path, CXX="no-such-compiler")
    assert done.returncode == 0, done.stdout
    for check in ("python", "torch", "tritonserver", "libpython", "/dev/shm"):
        assert re.search(rf"^ok +{check} ", done.stdout, re.MULTILINE)
    assert re.search(
        r"^warn +C\+\+ compiler +no-such-compiler not found.*\n +-> apt install g\+\+",
        done.stdout,
        re.MULTILINE,
    )
