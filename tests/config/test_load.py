"""All faults are reported at once, each with its place and a hint. A valid file becomes a config
with resolved paths.
"""

from __future__ import annotations

import os
import typing
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from pydantic import BaseModel

from toolkit.config.load import load_config
from toolkit.config.schema import DeploymentConfig, TensorRtLlmConfig
from toolkit.errors import ConfigError, Fault
from toolkit.facts.heads import OTHER_KINDS

GOOD = """\
name: tiny
target:
  checkpoint: models/target
  quantization: {quant_algo: FP8, kv_cache_quant_algo: FP8}
draft:
  checkpoint: models/draft
calibration: {dataset: calib.jsonl, heldout: ../heldout.jsonl}
engine: {max_seq_len: 640}
validation:
  prompts: prompts.jsonl
"""

BAD = """\
# Everything in here is wrong.
name: llama 70b
target:
  checkpoint: meta-llama/Llama-3.3
  quantization: {quant_algo: INT8, kv_cache_quant_algo: FP16}
draft:
  checkpoint: nowhere
  quantisation: {quant_algo: fp8}
speculation: {kind: ngrams, max_draft_len: many}
engine:
  kind: trt_engine
  tp_size: 2
  max_batch_size: "8"
  max_input_len: 2048
  max_batch_size: 4
  dtype: f32
triton: {http_port: 99999, decoupled: yes, layout: bls}
max_draft_len: 3
hardware: auto
validation:
  promts: prompts.jsonl
  rounds: 9
  max_tokens: 2.5
  temperature: .nan
  latency: {min_speedup: -1e-5, max_ttft_p90_ms: abc}
  parity:
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with all files and folders that GOOD names."""
    home = tmp_path / "home"
    for name in ("target", "draft"):
        (home / "models" / name).mkdir(parents=True)
        (home / "models" / name / "config.json").write_text("{}")
    for file in (home / "calib.jsonl", home / "prompts.jsonl", tmp_path / "heldout.jsonl"):
        file.write_text("{}\n")
    (home / "tiny.yaml").write_text(GOOD)
    return home


def faults_of(file: Path, *overrides: str) -> tuple[Fault, ...]:
    with pytest.raises(ConfigError) as caught:
        load_config(file, overrides)
    return caught.value.faults


def with_line(folder: Path, old: str, new: str) -> Path:
    assert old in GOOD
    file = folder / "changed.yaml"
    file.write_text(GOOD.replace(old, new))
    return file


def test_the_python_of_vllm_is_absolute_and_keeps_its_links(folder: Path) -> None:
    """A virtual environment's Python is a link: what it leads to has other packages."""
    (folder / "env" / "bin").mkdir(parents=True)
    (folder / "env" / "bin" / "python").symlink_to("/usr/bin/env")
    file = folder / "vllm.yaml"
    file.write_text(GOOD.replace("max_seq_len", "kind: vllm, python: env/bin/python, max_seq_len"))
    engine = load_config(file).vllm_engine
    assert engine is not None and engine.python == folder / "env" / "bin" / "python"


def test_paths_start_at_the_folder_of_the_file(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder.parent)
    config = load_config(Path("home/tiny.yaml"))
    assert config.target.checkpoint == folder / "models" / "target"
    assert config.draft is not None and config.draft.checkpoint == folder / "models" / "draft"
    assert (
        config.calibration is not None
        and config.calibration.heldout == folder.parent / "heldout.jsonl"
    )
    assert config.validation.prompts == folder / "prompts.jsonl"
    assert config.target.quantization.kv_cache_quant_algo == "FP8"


def test_a_chat_template_is_needed_where_texts_are_not_and_starts_at_the_files_folder(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder.parent)
    file = with_line(folder, "engine:", "gateway: {chat_template: chat.jinja}\nengine:")
    with pytest.raises(ConfigError, match=r"no such file: chat.jinja"):
        load_config(file, texts=False)
    (folder / "chat.jinja").write_text("{{ messages }}")
    assert load_config(file).gateway.chat_template == folder / "chat.jinja"


def test_every_fault_is_reported_at_once(
    folder: Path, golden: Callable[[str, str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    Path("bad.yaml").write_text(BAD)
    with pytest.raises(ConfigError) as caught:
        load_config(
            Path("bad.yaml"),
            ["engine.mode=fast", "foo", "calibration.dataset=gone.jsonl", "engine.threads=1e0"],
        )
    golden("config-faults.txt", str(caught.value).replace(str(folder), "FOLDER") + "\n")
    lines = [fault.line for fault in caught.value.faults if fault.line is not None]
    assert lines == sorted(lines)
    assert all(fault.hint for fault in caught.value.faults)


def test_numbers_with_an_exponent_are_numbers(folder: Path) -> None:
    file = with_line(
        folder,
        "  prompts: prompts.jsonl",
        "  prompts: prompts.jsonl\n  quality: {max_kl: 1e-5}\n  max_tokens: 1e1",
    )
    validation = load_config(file).validation
    assert validation.quality.max_kl == 1e-5
    assert validation.max_tokens == 10


@pytest.mark.parametrize("value", ["true", '"8"', "eight", "2.5", "[8]", "~", "0", "-1"])
def test_a_whole_number_is_nothing_else(folder: Path, value: str) -> None:
    file = with_line(folder, "max_seq_len: 640", f"max_seq_len: 640, max_batch_size: {value}")
    (fault,) = faults_of(file)
    assert (fault.path, fault.line, fault.column) == ("engine.max_batch_size", 8, 44)
    assert fault.hint


def test_a_key_of_a_section_below_is_not_taken_for_one_that_is_like_it(folder: Path) -> None:
    file = with_line(folder, "engine:", "speculation: {min_acceptance_length: 2}\nengine:")
    fault = next(each for each in faults_of(file) if "min_acceptance" in each.path)
    assert fault.hint == "did you mean speculation.adaptive.min_acceptance_length?"


@pytest.mark.parametrize(
    "key, hint",
    [
        ("kv_cache_quant_algoo", "did you mean 'kv_cache_quant_algo'?"),
        ("quantalgo", "did you mean 'quant_algo'?"),
        ("max_draft_len", "did you mean speculation.max_draft_len?"),
        (
            "zzz",
            "known in `target.quantization`: quant_algo, kv_cache_quant_algo, allow_unsupported",
        ),
    ],
)
def test_a_misspelt_key_gets_a_suggestion(folder: Path, key: str, hint: str) -> None:
    (fault,) = faults_of(with_line(folder, "kv_cache_quant_algo", key))
    assert (fault.line, fault.column, fault.width) == (4, 35, len(key))
    assert fault.hint == hint


@pytest.mark.parametrize(
    "value, hint",
    [
        ("fp8", "did you mean 'FP8'?"),
        ("W8A8_SQ_PERCHANNEL", "did you mean 'W8A8_SQ_PER_CHANNEL'?"),
        ("INT8", "W8A8_SQ_PER_CHANNEL (weights and activations, SmoothQuant) and W8A16"),
        ("int8", "W8A16"),
        ("none", "did you mean 'NO_QUANT'?"),
        ("NVFP4", "known: FP8, W8A8_SQ_PER_CHANNEL, W8A16, NO_QUANT"),
    ],
)
def test_a_wrong_algorithm_gets_a_suggestion(folder: Path, value: str, hint: str) -> None:
    fault = faults_of(
        with_line(folder, "quant_algo: FP8, kv_cache_quant_algo: FP8", f"quant_algo: {value}")
    )[0]
    assert fault.path == "target.quantization.quant_algo"
    assert fault.hint is not None and hint in fault.hint


@pytest.mark.parametrize(
    "override, path, words",
    [
        ("engine.kind=tensorrt", "engine.kind", "known: torch, trt_engine, trtllm_pytorch"),
        ("engine.kind=trt-engine", "engine.kind", "did you mean 'trt_engine'?"),
        ("engine.kind=[a]", "engine.kind", "known: torch"),
        ("engine.kind=", "engine.kind", "known: torch"),
        ("engine=torch", "engine", "Write keys below it"),
        ("engine.tp_size=2", "engine.tp_size", "It belongs to trt_engine and trtllm_pytorch"),
        ("engine.cuda_graph=true", "engine.cuda_graph", "It belongs to trtllm_pytorch"),
        ("engine.tpsize=2", "engine.tpsize", "known in `engine`: max_batch_size"),
        ("engine.threads=x", "engine.threads", "Write digits"),
        ("hardware.gpu=h200", "hardware.gpu", "did you mean 'H200'?"),
        ("hardware.count=0", "hardware.count", "at least 1"),
        ("triton.layout=ensemble", "triton.layout", "known: auto, llmapi, bls"),
    ],
)
def test_a_key_or_word_of_another_engine_says_whose_it_is(
    folder: Path, override: str, path: str, words: str
) -> None:
    (fault,) = faults_of(folder / "tiny.yaml", override)
    assert fault.path == path
    assert fault.hint is not None and words in fault.hint


@pytest.mark.parametrize("kind", ["trt_engine", "trtllm_pytorch"])
def test_an_engine_of_tensorrt_llm_has_its_own_keys(folder: Path, kind: str) -> None:
    file = with_line(
        folder,
        "engine: {max_seq_len: 640}",
        f'engine: {{kind: {kind}, tensorrt_llm: "1.1", tp_size: 2, pp_size: 4}}',
    )
    engine = load_config(file).engine
    assert isinstance(engine, TensorRtLlmConfig)
    assert (engine.kind, engine.tensorrt_llm, engine.world_size) == (kind, "1.1", 8)
    (fault,) = faults_of(file, "engine.threads=2")
    assert fault.message == f"is not a key of kind {kind}"
    (fault,) = faults_of(file, "engine.tensorrt_llm=1.4")
    assert fault.hint is not None and "1.2.1, 1.3rc-early" in fault.hint
    (fault,) = faults_of(file, 'engine.tensorrt_llm="1.4"')
    assert fault.hint is not None and "1.2.1, 1.3rc-early" in fault.hint


@pytest.mark.parametrize(
    "override, read",
    [
        ("engine.tensorrt_llm=1.1", "1.1"),
        ("engine.tensorrt_llm=1.0", "1.0"),  # as it was typed, and not as the number is printed
        ('engine.tensorrt_llm="1.1"', "1.1"),
        ("name=70", "70"),
        ("draft.revision=2024", "2024"),
        ("draft.revision=null", None),
    ],
)
def test_a_number_on_the_command_line_is_text_where_only_text_can_stand(
    folder: Path, override: str, read: str | None
) -> None:
    """A shell removes quotes."""
    file = with_line(folder, "engine: {max_seq_len: 640}", "engine: {kind: trtllm_pytorch}")
    config: typing.Any = load_config(file, [override, "draft.checkpoint=meta-llama/Llama-3.2-1B"])
    for part in override.partition("=")[0].split("."):
        config = getattr(config, part)
    assert config == read


def test_a_number_in_the_file_is_told_to_be_quoted(folder: Path) -> None:
    (fault,) = faults_of(
        with_line(
            folder,
            "engine: {max_seq_len: 640}",
            "engine: {kind: trtllm_pytorch, tensorrt_llm: 1.3}",
        )
    )
    assert fault.hint is not None and "Put it in quotes" in fault.hint


@pytest.mark.parametrize("kind", ["none", "ngram"])
def test_turning_the_draft_off_on_the_command_line_leaves_its_section_out(
    folder: Path, kind: str
) -> None:
    config = load_config(folder / "tiny.yaml", [f"speculation.kind={kind}"])
    assert (config.draft, config.speculation.kind) == (None, kind)
    (fault,) = faults_of(
        folder / "tiny.yaml", f"speculation.kind={kind}", "draft.quantization.quant_algo=FP8"
    )
    assert "does not use the `draft` section" in fault.message


def test_a_head_has_a_draft_section_and_keeps_its_precision(folder: Path) -> None:
    config = load_config(folder / "tiny.yaml", ["speculation.kind=eagle3"])
    assert (config.speculation.head, config.speculation.has_draft_model) == ("eagle3", True)
    (fault,) = faults_of(
        folder / "tiny.yaml", "speculation.kind=eagle3", "draft.quantization.quant_algo=FP8"
    )
    assert "keeps its own precision" in fault.message
    assert fault.hint is not None and "draft.quantization" in fault.hint


@pytest.mark.parametrize("kind", OTHER_KINDS)
def test_other_kinds_of_tensorrt_llm_are_refused_with_their_versions(
    folder: Path, kind: str
) -> None:
    (fault,) = faults_of(folder / "tiny.yaml", f"speculation.kind={kind}")
    versions, why = OTHER_KINDS[kind]
    assert f"({versions}) that the toolkit does not support: {why}" in fault.message
    assert fault.hint is not None and "draft_target, ngram, eagle3, mtp, none" in fault.hint


def test_mtp_layers_need_no_draft_section(folder: Path) -> None:
    config = load_config(folder / "tiny.yaml", ["speculation.kind=mtp"])
    assert (config.draft, config.speculation.has_draft_model) == (None, False)
    assert config.speculation.longest_draft > 0


def test_a_checkpoint_may_be_a_hub_id(folder: Path) -> None:
    file = with_line(folder, "models/draft", "meta-llama/Llama-3.2-1B\n  revision: main")
    config = load_config(file)
    assert config.draft is not None and config.draft.hub_id == "meta-llama/Llama-3.2-1B"
    assert config.target.hub_id is None


@pytest.mark.parametrize(
    "written, meant",
    [
        ("models/drfat", "models/draft"),  # the first part is a folder here
        ("model/draft", "models/draft"),  # could be a hub id, but a folder has a similar spelling
        ("Models/Drafts", "models/draft"),
        ("home/models/draft", "models/draft"),  # the path from the folder above
        ("elsewhere/small", "../elsewhere/small"),
        ("./meta-llama/Llama", None),
        ("../meta/Llama", None),
        ("/meta/Llama", None),
        ("meta-llama/Llama/", None),
        ("meta/llama/Llama", None),
        ("nowhere", None),
        ("targett", None),
    ],
)
def test_a_path_with_a_typing_error_is_no_hub_id(
    folder: Path, written: str, meant: str | None
) -> None:
    (folder.parent / "elsewhere" / "small").mkdir(parents=True)
    (fault,) = faults_of(with_line(folder, "models/draft", written))
    assert (fault.message, fault.line, fault.column) == (f"no such folder: {written}", 6, 15)
    assert fault.hint is not None and ("did you mean" in fault.hint) == (meant is not None)
    assert meant is None or f"did you mean {meant!r}?" in fault.hint


def test_a_model_that_is_known_is_no_misspelt_folder(folder: Path) -> None:
    (folder / "qwen" / "Qwen2.5-0.5B").mkdir(parents=True)
    config = load_config(with_line(folder, "models/draft", "Qwen/Qwen2.5-0.5B-Instruct"))
    assert config.draft is not None and config.draft.hub_id == "Qwen/Qwen2.5-0.5B-Instruct"
    (fault,) = faults_of(with_line(folder, "models/draft", "Qwen/Qwen2.5-0.6B"))
    assert fault.hint is not None and "did you mean 'qwen/Qwen2.5-0.5B'?" in fault.hint


def test_a_folder_without_config_json_is_a_fault_with_its_line(folder: Path) -> None:
    (fault,) = faults_of(with_line(folder, "models/draft", "models"))
    assert (fault.path, fault.line, fault.column) == ("draft.checkpoint", 6, 15)
    assert fault.message == "models holds no config.json"
    assert fault.hint is not None and fault.hint.endswith("This one contains: draft, target.")


def test_a_folder_has_no_revisions(folder: Path) -> None:
    (fault,) = faults_of(with_line(folder, "models/draft", "models/draft\n  revision: main"))
    assert (fault.path, fault.line) == ("draft.revision", 7)


@pytest.mark.parametrize(
    "old, new, path",
    [
        ("checkpoint: models/draft", "checkpoint: calib.jsonl", "draft.checkpoint"),
        ("prompts: prompts.jsonl", "prompts: models", "validation.prompts"),
        ("engine:", "gateway: {chat_template: nope.jinja}\nengine:", "gateway.chat_template"),
        ("engine:", "gateway: {chat_template: models}\nengine:", "gateway.chat_template"),
        ("prompts: prompts.jsonl", "prompts: ''", "validation.prompts"),
        ("dataset: calib.jsonl", "dataset: gone.jsonl", "calibration.dataset"),
        ("dataset: calib.jsonl", 'dataset: "a\\0b"', "calibration.dataset"),
        ("checkpoint: models/draft", f"checkpoint: {'a' * 5000}", "draft.checkpoint"),
        ("checkpoint: models/draft", "checkpoint: ~nobody-of-this-name/draft", "draft.checkpoint"),
        ("checkpoint: models/draft", "checkpoint: loop/draft", "draft.checkpoint"),
    ],
)
def test_a_path_that_leads_to_nothing_usable_is_a_fault(
    folder: Path, old: str, new: str, path: str
) -> None:
    (folder / "loop").symlink_to("loop")
    (fault,) = faults_of(with_line(folder, old, new))
    assert fault.path == path
    assert fault.line is not None
    assert len(fault.message) < 200


LIMITED = "speculation: {{max_draft_len: {}, {}max_concurrency: 8}}\nengine:"
SCHEDULE = "speculation: {{max_draft_len: {}, draft_len_schedule: {}}}\nengine:"


@pytest.mark.parametrize(
    "old, new, path, message",
    [
        ("draft:\n  checkpoint: models/draft\n", "", "speculation", "needs a `draft` section"),
        (
            "engine:",
            "speculation: {kind: none}\nengine:",
            "speculation",
            "does not use the `draft` section",
        ),
        (
            "engine:",
            "speculation: {kind: ngram}\nengine:",
            "speculation",
            "does not use the `draft` section",
        ),
        (
            "engine:",
            SCHEDULE.format("auto", "{1: 4}"),
            "speculation.draft_len_schedule",
            "is measured if",
        ),
        (
            "engine:",
            SCHEDULE.format("4", "{2: 4}"),
            "speculation.draft_len_schedule",
            "must begin with 1: 4",
        ),
        (
            "engine:",
            SCHEDULE.format("4", "{1: 2, 4: 1}"),
            "speculation.draft_len_schedule",
            "begins with 1: 2, and max_draft_len is 4",
        ),
        (
            "engine:",
            SCHEDULE.format("4", "{1: 4, 2: 1, 4: 2}"),
            "speculation.draft_len_schedule",
            "grows",
        ),
        (
            "engine:",
            SCHEDULE.format("3", "{1: 3, 4: 3}"),
            "speculation.draft_len_schedule",
            "stays 3 from 4 requests on",
        ),
        (
            "engine:",
            SCHEDULE.format("4", "{1: 4, 2: -1}"),
            "speculation.draft_len_schedule.2",
            "out of range",
        ),
        (
            "engine:",
            LIMITED.format(4, "draft_len_schedule: {1: 4}, "),
            "speculation.max_concurrency",
            "also says when to stop",
        ),
        ("engine:", LIMITED.format("auto", ""), "speculation.max_concurrency", "is measured if"),
        (
            "engine:",
            SCHEDULE.format("4.5", "{1: 4}"),
            "speculation.max_draft_len",
            "4.5 is not a whole number",
        ),
        ("engine:", "hardware: {1: 2}\nengine:", "hardware.1", "is not a name"),
        (
            "calibration: {dataset: calib.jsonl, heldout: ../heldout.jsonl}\n",
            "",
            "calibration",
            "quantizing target needs",
        ),
        ("max_seq_len: 640", "max_seq_len: 500", "engine.max_seq_len", "leaves no room"),
        ("max_seq_len: 640", "max_input_len: 2000", "engine.max_seq_len", "leaves no room"),
        (
            "  prompts: prompts.jsonl",
            "  prompts: prompts.jsonl\n  max_tokens: 900",
            "validation",
            "does not fit",
        ),
        (
            "  prompts: prompts.jsonl",
            "  prompts: prompts.jsonl\n  rounds: 90",
            "validation.max_rounds",
            "greater than max_rounds",
        ),
        ("  prompts: prompts.jsonl", "  max_tokens: 8", "validation.prompts", "is missing"),
        (
            "engine:",
            "triton: {http_port: 8000, grpc_port: 8000}\nengine:",
            "triton.grpc_port",
            "8000 is also http_port",
        ),
        *(
            ("engine:", f"rollout: {{{keys}}}\nengine:", path, message)
            for keys, path, message in (
                ("steps: []", "rollout.steps", "there are no steps"),
                ("steps: [1, 5, 25]", "rollout.steps", "the last step is 25"),
                ("steps: [5, 1, 100]", "rollout.steps", "1 comes after 5"),
                ("steps: [1, 1, 100]", "rollout.steps", "1 comes after 1"),
                ("steps: [1, 200]", "rollout.steps.1", "200 is out of range"),
                ("steps: 100", "rollout.steps", "100 is not a list"),
                ("steps: [0, 100], shadow: 0", "rollout.shadow", "has only shadow copies"),
            )
        ),
        ("name: tiny", "name: ../tiny", "name", "cannot be the name of a folder"),
        ("name: tiny", "name: a..b", "name", "must not contain"),
    ],
)
def test_fields_that_disagree_are_a_fault(
    folder: Path, old: str, new: str, path: str, message: str
) -> None:
    (fault,) = faults_of(with_line(folder, old, new))
    assert fault.path == path
    assert message in fault.message
    assert fault.hint


@pytest.mark.parametrize(
    "keys, path, message, hint",
    [
        (
            "load: {rate: 2, goodput: {ttft: 300, tbt: 30}}",
            "validation.load.goodput.tbt",
            "unknown key",
            "known in `validation.load.goodput`: ttft, tpot, itl, icl, e2e",
        ),
        (
            "load: {rate: 2, goodput: {1: 30}}",
            "validation.load.goodput.1",
            "unknown key",
            "known in `validation.load.goodput`: ttft, tpot, itl, icl, e2e",
        ),
        (
            "latency: {max_ratios: {ttft_p95: 1.1}}",
            "validation.latency.max_ratios.ttft_p95",
            "unknown key",
            "did you mean 'ttft_p99'? known in",
        ),
        (
            "load: {rate: 2, min_goodput: 0.9}",
            "validation.load.min_goodput",
            "min_goodput is the share of requests that keep the limits of goodput, and there are"
            " none",
            "Add some, such as goodput: {ttft: 300, tpot: 30}, or remove this line.",
        ),
        (
            "load: {rate: 2, goodput: [ttft]}",
            "validation.load.goodput",
            "a list is not a table",
            "Write pairs in braces: {ttft: NUMBER}.",
        ),
        (
            "load: {rate: automatic}",
            "validation.load.rate",
            "'automatic' is not a number",
            "Write a number without quotes, for example 1.5. Or write auto.",
        ),
        ("load: {rate: -1}", "validation.load.rate", "-1 is out of range", "Or write auto."),
    ],
)
def test_a_wrong_key_or_word_is_told_what_is_known(
    folder: Path, keys: str, path: str, message: str, hint: str
) -> None:
    old = "  prompts: prompts.jsonl"
    (fault,) = faults_of(with_line(folder, old, f"{old}\n  {keys}"))
    assert (fault.path, fault.message) == (path, message)
    assert hint in (fault.hint or "")
    assert fault.excerpt is not None and fault.column is not None
    assert fault.excerpt[fault.column - 1 :].startswith(path.rsplit(".", 1)[1]) or (
        not message.startswith("unknown")
    )


def test_a_schedule_of_loads_has_numbers_as_keys(folder: Path) -> None:
    for keys, path in (("a: 4", "a"), ("0: 4", "0")):
        (fault,) = faults_of(with_line(folder, "engine:", SCHEDULE.format("4", f"{{{keys}}}")))
        assert fault.path == f"speculation.draft_len_schedule.{path}"
        assert fault.excerpt is not None and fault.column is not None
        assert fault.excerpt[fault.column - 1] == path


def models_in(annotation: object) -> Iterator[type[BaseModel]]:
    """Every config model inside an annotation, however deep."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for inner in typing.get_args(annotation):
        yield from models_in(inner)


def keys_of(model: type[BaseModel], path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Every key of the schema that is no section; of `engine` the keys of its first kind."""
    for name, info in model.model_fields.items():
        inner = next(models_in(info.annotation), None)
        if inner is None:
            yield (*path, name)
        else:
            yield from keys_of(inner, (*path, name))


@pytest.mark.parametrize("key", [".".join(key) for key in keys_of(DeploymentConfig)])
def test_a_value_of_a_wrong_type_is_reported_at_its_key_with_a_hint(folder: Path, key: str) -> None:
    """Nothing of pydantic's own names reaches users: paths are those of the file."""
    added = ["validation.load.rate=2"] if key.startswith("validation.load.") else []
    faults = faults_of(folder / "tiny.yaml", *added, f"{key}=[{{}}]")
    of_key = [fault for fault in faults if fault.path in (key, f"{key}.0")]
    assert of_key, [fault.path for fault in faults]
    assert all(fault.hint for fault in of_key)
    assert not [
        fault for fault in faults if fault.path.startswith(f"{key}.") and fault not in of_key
    ]


@pytest.mark.parametrize(("schedule", "adds"), [("{1: 4, 12: 0}", True), ("{1: 4, 6: 0}", False)])
def test_a_limit_beside_a_schedule_is_told_what_the_schedule_lacks(
    folder: Path, schedule: str, adds: bool
) -> None:
    limited = LIMITED.format(4, f"draft_len_schedule: {schedule}, ")
    (fault,) = faults_of(with_line(folder, "engine:", limited))
    assert fault.hint is not None
    assert ("add 9: 0 to draft_len_schedule" in fault.hint) == adds


def test_a_rule_is_judged_even_when_other_fields_are_at_fault(folder: Path) -> None:
    file = with_line(folder, "max_seq_len: 640", "max_seq_len: 100, threads: x")
    assert {fault.path for fault in faults_of(file)} >= {"engine.max_seq_len", "engine.threads"}


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_without_permission_says_so(folder: Path) -> None:
    (folder / "tiny.yaml").chmod(0)
    (fault,) = faults_of(folder / "tiny.yaml")
    assert "cannot be read" in fault.message


def test_every_key_has_a_default_that_the_strict_schema_accepts() -> None:
    """pydantic does not validate defaults by itself."""

    def check(model: type) -> None:
        for name, info in model.model_fields.items():  # type: ignore[attr-defined]
            if not info.is_required() and hasattr(info.default, "model_dump"):
                check(type(info.default))
                type(info.default).model_validate(info.default.model_dump())
            assert name

    check(DeploymentConfig)


@pytest.mark.parametrize(
    "file",
    sorted((Path(__file__).parents[2] / "configs").glob("*.yaml")),
    ids=lambda file: file.name,
)
def test_every_shipped_config_is_sound(file: Path) -> None:
    config = load_config(file)
    assert config.name == file.stem


def test_every_key_is_in_the_documentation() -> None:
    text = (Path(__file__).parents[2] / "docs" / "configuration.md").read_text()

    def names(model: type[BaseModel]) -> Iterator[str]:
        for name, info in model.model_fields.items():
            yield name
            for inner in models_in(info.annotation):
                yield from names(inner)

    assert [
        name
        for name in names(DeploymentConfig)
        if f"{name}`" not in text and f"`{name}." not in text
    ] == []


@pytest.mark.parametrize("key", ["parity.draft_lens", "latency.concurrency"])
def test_a_list_of_numbers_is_read_in_the_file_and_from_the_command_line(
    folder: Path, key: str
) -> None:
    section, name = key.split(".")
    stated = with_line(folder, "validation:\n", f"validation:\n  {section}: {{{name}: [2, 3]}}\n")
    for config in (
        load_config(stated),
        load_config(folder / "tiny.yaml", [f"validation.{key}=[2, 3]"]),
    ):
        assert getattr(getattr(config.validation, section), name) == (2, 3)
    with pytest.raises(ConfigError, match="out of range"):
        load_config(folder / "tiny.yaml", [f"validation.{key}=[0]"])


def test_a_rate_to_be_found_needs_limits_to_keep(folder: Path) -> None:
    section = "validation:\n  load: {{rate: {}}}\n"
    stated = load_config(with_line(folder, "validation:\n", section.format(5)))
    assert stated.validation.load is not None and stated.validation.load.rate == 5.0
    found = section.format("auto, goodput: {ttft: 300}")
    load = load_config(with_line(folder, "validation:\n", found)).validation.load
    assert load is not None and load.goodput == {"ttft": 300.0}
    for wrong, why in (
        ("auto", "rate auto looks for the highest rate that keeps these limits"),
        ("auto, goodput: {tps: 3}", "goodput"),
        ("0", "rate"),
        ("quick", "rate"),
    ):
        with pytest.raises(ConfigError, match=why):
            load_config(with_line(folder, "validation:\n", section.format(wrong)))


def test_a_schedule_is_read_as_a_table_of_numbers(folder: Path) -> None:
    file = with_line(folder, "engine:", SCHEDULE.format("4", "{8: 0, 1: 4, 4: 2}"))
    assert load_config(file).speculation.draft_len_schedule == {1: 4, 4: 2, 8: 0}


def test_an_engine_is_built_for_the_longest_draft_that_may_be_chosen(folder: Path) -> None:
    assert (
        load_config(
            folder / "tiny.yaml", ["speculation.max_draft_len=auto"]
        ).speculation.longest_draft
        == 8
    )
    assert (
        load_config(folder / "tiny.yaml", ["speculation.max_draft_len=3"]).speculation.longest_draft
        == 3
    )
