"""`toolkit plan`: the plans of the shipped files are reviewed, a pair on this machine is proved,
and the listed commands are those that run.
"""

from __future__ import annotations

import io
import itertools
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tests.support.checkpoints import write_checkpoint
from tests.support.cli import write_config
from tests.support.deployments import config_of
from tests.support.trtllm import place_with_builder, write_trtllm_checkpoint
from toolkit.config.load import load_config, moved
from toolkit.config.schema import DeploymentConfig, QuantizationConfig
from toolkit.engines.spec import engine_spec
from toolkit.engines.vllm.environment import default_python
from toolkit.errors import ConfigError, UsageError
from toolkit.pipeline.machine import gpus
from toolkit.plan.pytorch_flow import yaml_text
from toolkit.records.codec import from_json, to_json
from toolkit.records.plan import Plan, PlannedRun
from toolkit.report.plan import print_plan
from toolkit.workflows.plan import plan_as_pytorch, plan_of

FOLDER = Path(__file__).parents[2] / "configs"
OF_NVIDIA = sorted(
    file.stem for file in FOLDER.glob("*.yaml") if not file.stem.startswith("quickstart")
)


def planned(config: DeploymentConfig, *programs: str) -> Plan:
    """The plan with these programs on the PATH, whatever the machine of the test has."""
    return plan_of(config, which=lambda name: f"/usr/bin/{name}" if name in programs else None)


def printed(plan: Plan) -> str:
    out = io.StringIO()
    print_plan(plan, Console(width=128, file=out))
    return "".join(f"{line.rstrip()}\n" for line in out.getvalue().splitlines())


def runs(config: DeploymentConfig, stage: str, *programs: str) -> list[PlannedRun]:
    return [run for run in planned(config, *programs).runs if run.stage == stage]


@pytest.mark.parametrize("name", OF_NVIDIA)
def test_the_plan_of_a_shipped_file_is_the_reviewed_one(
    name: str, golden: Callable[[str, str], None]
) -> None:
    """A plan does not depend on the machine of the test, since the files name their GPUs."""
    plan = planned(load_config(FOLDER / f"{name}.yaml"))
    assert plan.possible
    golden(f"plan-{name}.txt", printed(plan))
    assert from_json(Plan, json.loads(json.dumps(to_json(plan)))) == plan


@pytest.mark.parametrize("name", ["llama70b-engine", "qwen2.5-72b-int8"])
def test_a_shipped_engine_flow_file_is_planned_in_the_other_flow(
    name: str, golden: Callable[[str, str], None]
) -> None:
    """Llama in FP8 goes over; Qwen in INT8 on A100s is refused, with what would have to change."""
    plan, _ = plan_as_pytorch(FOLDER / f"{name}.yaml", (), which=lambda program: None)
    assert plan.possible is (name == "llama70b-engine")
    golden(f"plan-{name}-as-pytorch.txt", printed(plan))
    assert from_json(Plan, json.loads(json.dumps(to_json(plan)))) == plan


def test_the_other_flow_s_plan_is_that_of_the_file_that_is_written(tmp_path: Path) -> None:
    """Also beside another folder: its paths are those of the new place."""
    source, file = FOLDER / "llama70b-engine.yaml", tmp_path / "new.yaml"
    plan, translation = plan_as_pytorch(source, (), which=lambda program: None)
    data = moved(translation.data, source.parent, file.parent)
    file.write_text(yaml_text(replace(translation, data=data), source.name))
    written = load_config(file)
    assert replace(planned(written), changes=plan.changes) == plan
    assert written.validation.prompts == load_config(source).validation.prompts


@pytest.mark.parametrize("name", ["llama70b", "quickstart", "llama70b-vllm"])
def test_only_the_engine_flow_is_planned_as_the_other(name: str) -> None:
    with pytest.raises(UsageError, match="is for deployments of kind trt_engine, and this one is"):
        plan_as_pytorch(FOLDER / f"{name}.yaml", ())


def test_a_plan_proves_the_pair_where_both_tokenizers_are_here(
    tiny_pair: tuple[Path, Path], tmp_path: Path
) -> None:
    assert plan_of(load_config(write_config(tmp_path, tiny_pair))).possible
    other = tmp_path / "other"
    shutil.copytree(tiny_pair[1], other)
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    first, second = list(tokenizer["model"]["vocab"])[10:12]
    vocab = tokenizer["model"]["vocab"]
    vocab[first], vocab[second] = vocab[second], vocab[first]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    plan = plan_of(load_config(write_config(tmp_path, (tiny_pair[0], other))))
    assert not plan.possible
    (refused,) = [judgement for judgement in plan.judgements if judgement.severity == "refused"]
    assert (refused.rule, refused.path) == ("same-vocab", "draft.checkpoint")


def test_what_is_trimmed_of_a_vocabulary_is_said_once(tmp_path: Path) -> None:
    """The tokenizers tell the size after trimming, so the guess from the shapes is left out."""
    pair = tmp_path / "target", tmp_path / "draft"
    write_checkpoint(pair[0])
    write_checkpoint(pair[1], vocab_size=320)
    plan = plan_of(load_config(write_config(tmp_path, pair)))
    [judgement] = [judgement for judgement in plan.judgements if judgement.rule == "same-vocab"]
    assert (plan.possible, judgement.severity) == (True, "adjusted")
    assert "the draft's 320 rows are trimmed to 258" in judgement.what


@pytest.mark.parametrize(
    ("content", "message"),
    [("", "the file is empty"), ('{"question": "why?"}\n', "line 1 has no `prompt`")],
)
def test_prompts_that_a_build_would_refuse_are_refused(
    content: str, message: str, tmp_path: Path, tiny_pair: tuple[Path, Path]
) -> None:
    (tmp_path / "bad.jsonl").write_text(content)
    config = load_config(write_config(tmp_path, tiny_pair))
    config = config.model_copy(
        update={
            "validation": config.validation.model_copy(update={"prompts": tmp_path / "bad.jsonl"})
        }
    )
    plan = plan_of(config)
    (refused,) = [judgement for judgement in plan.judgements if judgement.severity == "refused"]
    assert not plan.possible
    assert (refused.rule, refused.path) == ("toolkit-texts", "validation.prompts")
    assert message in refused.what and refused.hint


@pytest.mark.parametrize("role", ["target", "draft"])
def test_the_engine_s_command_is_the_one_that_is_run(role: str, tmp_path: Path) -> None:
    """Except for the folders, which a plan does not know."""
    place = place_with_builder(tmp_path / "bin")
    config = config_of("engine", engine__max_num_tokens=4096, engine__tokens_per_block=64)
    source = write_trtllm_checkpoint(
        tmp_path / "checkpoint", role=role, quant_algo="FP8", kv_cache_quant_algo="FP8"
    )
    (tmp_path / "engine").mkdir()
    engine = place.backend().compile(
        source, engine_spec(config, role), tmp_path / "engine", lambda *step: None
    )
    assert engine.tensorrt_llm is not None
    [planned_run] = runs(config, f"compile/{role}", "trtllm-build")
    assert planned_run.command is not None

    def without_folders(command: tuple[str, ...]) -> list[str]:
        folders = {"--checkpoint_dir", "--output_dir", "--output_timing_cache"}
        return [
            word
            for before, word in zip(("", *command), command, strict=False)
            if before not in folders
        ]

    assert without_folders(planned_run.command) == without_folders(engine.tensorrt_llm.command)


@pytest.mark.parametrize(
    ("builder", "programs", "first"),
    [
        ("auto", ("trtllm-build",), "trtllm-build"),
        ("auto", (), "docker"),
        ("local", (), "trtllm-build"),
        ("container", ("trtllm-build",), "docker"),
    ],
)
def test_the_builder_is_the_one_that_would_be_taken(
    builder: str, programs: tuple[str, ...], first: str
) -> None:
    [run] = runs(config_of("engine", engine__builder=builder), "compile/target", *programs)
    assert run.command is not None and run.command[0] == first
    assert ("nvcr.io/nvidia/tensorrt-llm/release:1.2.1" in run.command) == (first == "docker")


def test_llm_is_called_with_what_the_yaml_says() -> None:
    config = config_of(
        "pytorch",
        speculation__draft_len_schedule={1: 4, 3: 0},
        engine__tensorrt_llm="1.4rc",
        engine__container_image="registry.example/triton:1",
    )
    *_, run = runs(config, "serve")
    assert run.call == "tensorrt_llm.LLM" and run.arguments is not None
    assert run.arguments["speculative_config"] == {
        "decoding_type": "Draft_Target",
        "max_draft_len": 4,
        "speculative_model": "/models/tensorrt_llm/1/engines/draft",
        "draft_len_schedule": {2: 4, 4: 0},
    }


def test_an_image_of_the_yaml_is_the_one_that_is_started() -> None:
    image = "registry.example/triton:1"
    plan = planned(
        config_of("pytorch", engine__tensorrt_llm="1.4rc", engine__container_image=image)
    )
    assert plan.possible and plan.summary["serving image"].startswith(image)
    assert any(image in (run.command or ()) for run in plan.runs)


def test_up_to_1_2_the_call_makes_an_object_of_the_speculative_config() -> None:
    """`LLM(speculative_config={"decoding_type": ...})` is refused there, so the plan may not print
    it.
    """
    plan = planned(config_of("pytorch"))
    *_, run = [run for run in plan.runs if run.stage == "serve"]
    assert run.arguments is not None
    assert run.arguments["speculative_config"] == (
        "tensorrt_llm.llmapi.llm_args.DecodingBaseConfig.from_dict({'decoding_type': 'DraftTarget',"
        " 'max_draft_len': 4, 'speculative_model': '/models/tensorrt_llm/1/engines/draft'})"
    )
    text = " ".join(printed(plan).split())
    assert "speculative_config=tensorrt_llm" in text.replace("= ", "=")


@pytest.mark.parametrize("stated", [(), ("target",), ("draft",)])
def test_code_of_a_checkpoint_is_trusted_only_where_it_is_stated(stated: tuple[str, ...]) -> None:
    *_, run = runs(
        config_of("pytorch", **{f"{role}__trust_remote_code": True for role in stated}), "serve"
    )
    assert run.arguments is not None and run.arguments.get("trust_remote_code") is (
        True if stated else None
    )


def test_several_nodes_have_no_docker_line() -> None:
    engine: dict[str, Any] = {"engine__tp_size": 16, "hardware__count": 8, "hardware__nodes": 2}
    [launch, loading] = runs(config_of("pytorch", **engine), "serve")
    assert launch.command is not None and launch.command[0] == "mpirun"
    assert launch.command[launch.command.index("-n") + 1] == "16"
    assert launch.command.count("trtllm-llmapi-launch") == 1
    assert loading.arguments is not None and loading.arguments["gpus_per_node"] == 8


def test_the_build_inside_the_container_and_the_container_of_its_result_are_told_apart() -> None:
    """The build serves and judges inside a container that somebody has started; the container of
    its result is started from outside.
    """
    [build] = runs(config_of("pytorch"), "validate")
    image = "nvcr.io/nvidia/tritonserver:26.07-trtllm-python-py3"
    assert build.command == ("toolkit", "build", "CONFIG") and build.place.startswith(
        f"inside {image}; docs/tensorrt_llm.md"
    )
    page = (FOLDER.parent / "docs" / "tensorrt_llm.md").read_text(encoding="utf-8")
    assert (
        "## Inside NVIDIA's container\n" in page and '"Inside NVIDIA\'s container"' in build.place
    )
    docker, *_ = runs(config_of("pytorch"), "serve")
    assert (
        docker.place.startswith("docker-run.sh, on the host")
        and docker.command is not None
        and image in docker.command
    )
    assert not runs(
        config_of("pytorch", triton__model_py="container"), "validate"
    )  # it cannot be judged


def test_quantizing_names_the_presets_and_the_texts() -> None:
    calls = {
        run.stage: run.arguments
        for run in planned(config_of("int8")).runs
        if run.call and "quantize" in run.stage
    }
    assert calls["quantize/draft"] == {
        "model": "Qwen/Qwen2.5-0.5B-Instruct",
        "config": "INT8_SMOOTHQUANT_CFG",
        "forward_loop": "128 texts of at most 512 tokens, 4 at a time",
    }


def of_lines(folder: Path, lines: list[str], checkpoint: Path | str) -> DeploymentConfig:
    """A pair to quantize with 4 texts of 30 tokens, and a dataset and a held-out file for it."""
    for name, texts in (("calib", lines), ("heldout", ["something else"])):
        rows = [json.dumps({"text": text}) for text in texts]
        (folder / f"{name}.jsonl").write_text("\n".join(rows))
    model = {"checkpoint": str(checkpoint), "quantization": {"quant_algo": "FP8"}}
    calibration = {
        "dataset": str(folder / "calib.jsonl"),
        "heldout": str(folder / "heldout.jsonl"),
        "calib_size": 4,
        "calib_max_seq_length": 30,
    }
    sizes = {"engine__max_input_len": 32, "engine__max_seq_len": 128}
    return config_of("torch", target=model, draft=model, calibration=calibration, **sizes)


def text_warnings(plan: Plan) -> dict[str, str]:
    return {
        judgement.path: judgement.what
        for judgement in plan.judgements
        if judgement.rule == "toolkit-calibration-text"
    }


def test_calibration_text_is_counted_with_the_targets_tokenizer(tmp_path: Path) -> None:
    """The byte tokenizer makes a token of each byte, and one before them."""
    checkpoint = write_checkpoint(tmp_path / "model")
    plan = planned(of_lines(tmp_path, ["x" * 9, "y" * 19], checkpoint))
    assert text_warnings(plan) == {
        "calibration.calib_size": (
            "2 texts are there for calibration, and 4 are planned; they hold 30 tokens"
        ),
        "calibration.calib_max_seq_length": (
            "the longest calibration text has 20 tokens, and texts of 30 are planned: nothing is"
            " calibrated on longer contexts"
        ),
    }
    enough = planned(of_lines(tmp_path, ["x" * 50, "y", "z", "a", "b"], checkpoint))
    assert text_warnings(enough) == {}
    (quantizing,) = (run for run in enough.runs if run.stage == "quantize/target")
    assert quantizing.arguments is not None
    assert quantizing.arguments["forward_loop"] == "4 texts with 36 tokens in all, 4 at a time"


def test_without_a_tokenizer_the_tokens_are_estimated(tmp_path: Path) -> None:
    warnings = text_warnings(planned(of_lines(tmp_path, ["x" * 81] * 4, "Qwen/Qwen2.5-0.5B")))
    assert warnings == {
        "calibration.calib_max_seq_length": (
            "the longest calibration text has about 21 tokens, and texts of 30 are planned: nothing"
            " is calibrated on longer contexts"
        )
    }


def test_models_that_are_not_quantized_need_no_text(tmp_path: Path) -> None:
    config = of_lines(tmp_path, ["x"], write_checkpoint(tmp_path / "model"))
    models = {
        role: model.model_copy(update={"quantization": QuantizationConfig()})
        for role, model in config.models.items()
    }
    assert text_warnings(planned(config.model_copy(update=models))) == {}


def test_the_embedded_engine_is_served_here() -> None:
    [run] = planned(config_of("torch")).runs
    assert (run.stage, run.place) == ("serve", "this machine")
    assert run.command is not None
    assert run.command[:2] == ("tritonserver", "--model-repository=triton_repo/x")


def test_nothing_is_run_of_what_cannot_work() -> None:
    assert planned(config_of("pytorch", engine__tokens_per_block=5)).runs == ()


def quickstart_under_vllm(tmp_path: Path, **engine: Any) -> DeploymentConfig:
    """The quickstart pair in INT8 on vLLM, on a CPU."""
    pair = FOLDER / "quickstart"
    quantization = {"quant_algo": "W8A8_SQ_PER_CHANNEL"}
    data = {
        "name": "quickstart-vllm",
        "target": {"checkpoint": str(pair / "target"), "quantization": quantization},
        "draft": {"checkpoint": str(pair / "draft"), "quantization": quantization},
        "calibration": {"dataset": str(pair / "data" / "calib.jsonl")},
        "speculation": {"max_draft_len": 3},
        "engine": {"kind": "vllm", "device": "cpu", "dtype": "bfloat16", **engine},
        "validation": {"prompts": str(pair / "data" / "prompts.jsonl")},
    }
    (tmp_path / "vllm.yaml").write_text(json.dumps(data))
    return load_config(tmp_path / "vllm.yaml")


def flags_of(run: PlannedRun) -> dict[str, str]:
    """The flags of vLLM's server that have a value."""
    assert run.command is not None
    words = run.command[run.command.index("vllm.entrypoints.openai.api_server") + 1 :]
    return {
        word: value
        for word, value in itertools.pairwise(words)
        if word.startswith("--") and not value.startswith("--")
    }


def test_the_quickstart_pair_under_vllm_has_a_plan_without_vllm(tmp_path: Path) -> None:
    plan = planned(quickstart_under_vllm(tmp_path))
    assert plan.possible and plan.summary["engine"] == "vLLM 0.32.0, on CPU, tp 1, pp 1"
    assert {run.stage for run in plan.runs} == {
        "quantize/target", "quantize/draft", "serve", "validate",
    }  # fmt: skip
    [serve], [plain] = (
        [run for run in plan.runs if run.stage == stage] for stage in ("serve", "validate")
    )
    assert serve.command is not None and "VLLM_CPU_KVCACHE_SPACE=2" in serve.command
    served = flags_of(serve)
    speculation = json.loads(served.pop("--speculative-config"))
    assert speculation == {
        "num_speculative_tokens": 3,
        "method": "draft_model",
        "model": "engines/quickstart-vllm/draft",
    }
    assert served["--model"] == "engines/quickstart-vllm/target"
    # Only speculation has metrics of its own, and the plain arm is the same otherwise.
    assert served.pop("--per-request-spec-decode-metrics") == "detailed"
    assert flags_of(plain) == served
    memory = {stage.stage: stage.total_bytes for stage in plan.memory}
    assert memory["serve"] < memory["validate"] < 2 * memory["serve"]
    # Without a GPU only the costs of the models against each other are known.
    assert plan.predictions[0].plain_tokens_per_s is None
    assert max(speed.speedup for speed in plan.predictions[0].speculative) > 1.5


@pytest.mark.parametrize(("name", "count"), [("H200", 1), ("H100", 2)])
def test_llama_70b_in_fp8_with_its_draft_has_a_plan_for_vllm(name: str, count: int) -> None:
    """On a machine without that GPU, too: the YAML names it."""
    keys = {"hardware__gpu": name, "hardware__count": count, "engine__tp_size": count}
    plan = planned(config_of("vllm", **keys))
    assert plan.possible and plan.serving is not None and plan.serving.sequences >= 4
    assert plan.summary["serving image"] == "nvcr.io/nvidia/tritonserver:26.07-vllm-python-py3"
    serve, in_container = [run for run in plan.runs if run.stage == "serve"]
    assert in_container.command == ("./triton_repo/x/docker-run.sh",)
    assert plan.summary["serving image"] in in_container.place
    flags = flags_of(serve)
    assert flags["--gpu-memory-utilization"] == "0.9" and flags["--kv-cache-dtype"] == "fp8"
    speculation = json.loads(flags["--speculative-config"])
    # vLLM refuses a draft that is split over another number of ranks than the target.
    assert speculation.get("draft_tensor_parallel_size", 1) == count
    assert int(flags.get("--tensor-parallel-size", 1)) == count
    assert all(prediction.plain_tokens_per_s for prediction in plan.predictions)


def test_a_gpu_that_the_yaml_names_decides_the_device_and_no_gpu_here_does() -> None:
    assert engine_spec(config_of("vllm"), "target").device == "cuda"
    assert engine_spec(config_of("vllm_cpu"), "target").device == "cpu"


def test_a_machine_without_vllm_is_told_how_to_get_it_and_refuses_nothing(tmp_path: Path) -> None:
    plan = planned(quickstart_under_vllm(tmp_path, python="nowhere/bin/python"))
    [judgement] = [item for item in plan.judgements if item.rule == "vllm-environment"]
    assert (judgement.severity, judgement.path) == ("warning", "engine.python")
    assert "nowhere/bin/python does not exist" in judgement.what and judgement.hint
    assert plan.possible and plan.runs
    [serve] = [run for run in plan.runs if run.stage == "serve"]
    assert serve.command is not None and str(tmp_path / "nowhere/bin/python") in serve.command


def test_the_python_that_is_printed_is_the_one_that_will_run(tmp_path: Path) -> None:
    """That of `make vllm`, wherever the command is given; also before it is made."""
    [serve] = [run for run in planned(quickstart_under_vllm(tmp_path)).runs if run.stage == "serve"]
    assert serve.command is not None
    [python] = [word for word in serve.command if word.endswith("/bin/python")]
    assert python == str(default_python()) and Path(python).is_absolute()


def test_no_python_at_all_is_an_error_in_the_yaml(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"(?s)engine.python: the path is empty.*that make vllm creates"
    ):
        quickstart_under_vllm(tmp_path, python="")


def test_weights_that_are_cut_off_are_refused_by_name(
    tiny_pair: tuple[Path, Path], tmp_path: Path
) -> None:
    draft = tmp_path / "draft"
    shutil.copytree(tiny_pair[1], draft)
    config = load_config(write_config(tmp_path, (tiny_pair[0], draft)))
    assert planned(config).possible
    weights = draft / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    plan = planned(config)
    [judgement] = [item for item in plan.judgements if item.rule == "checkpoint-files"]
    assert (judgement.severity, judgement.path) == ("refused", "draft.checkpoint")
    assert str(weights) in judgement.what and "bytes long, but its header" in judgement.what
    assert not plan.possible


def test_a_folder_in_place_of_prompts_is_refused(
    tiny_pair: tuple[Path, Path], tmp_path: Path
) -> None:
    config = load_config(write_config(tmp_path, tiny_pair))
    validation = config.validation.model_copy(update={"prompts": tmp_path})
    plan = planned(config.model_copy(update={"validation": validation}))
    [judgement] = [item for item in plan.judgements if item.path == "validation.prompts"]
    assert judgement.severity == "refused" and "Is a directory" in judgement.what


@pytest.mark.skipif(bool(gpus()), reason="this machine has a GPU")
def test_vllm_for_gpus_elsewhere_is_not_looked_for_here() -> None:
    config = config_of("vllm", engine__python="/nowhere/bin/python")
    assert not [item for item in planned(config).judgements if item.rule == "vllm-environment"]


def test_a_chat_template_with_a_fault_is_refused_before_a_gateway_starts(
    tiny_pair: tuple[Path, Path], tmp_path: Path
) -> None:
    config = load_config(write_config(tmp_path, tiny_pair))
    template = tmp_path / "chat.jinja"
    gateway = config.gateway.model_copy(update={"chat_template": template})
    config = config.model_copy(update={"gateway": gateway})
    template.write_text("{% for message in messages %}{{ message.content }}{% endfor %}")
    assert planned(config).possible
    template.write_text("{% for message in messages %}")
    plan = planned(config)
    [judgement] = [item for item in plan.judgements if item.path == "gateway.chat_template"]
    assert (judgement.rule, judgement.severity) == ("toolkit-chat-template", "refused")
    assert "chat.jinja: the chat template fails" in judgement.what and judgement.hint
    assert not plan.possible
