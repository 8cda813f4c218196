"""Keys are made of content and settings, never of names, paths or ports."""

from __future__ import annotations

import json
import shlex
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from tests.support.cli import write_config
from tests.support.stages import Silent, small_stages
from tests.support.trtllm import place_with_builder
from toolkit.config.load import load_config
from toolkit.config.schema import DeploymentConfig
from toolkit.errors import BackendUnavailable, CheckpointError, PlanError, UsageError
from toolkit.interfaces import EngineSpec, VllmSpec
from toolkit.pipeline.manifest import verify
from toolkit.pipeline.stage import key_of
from toolkit.pipeline.store import Store
from toolkit.workflows.build import build, explain_build
from toolkit.workflows.folders import Workplace
from toolkit.workflows.plan import plan_of
from toolkit.workflows.serve import Machine
from toolkit.workflows.stages.keys import spec_parts
from toolkit.workflows.stages.sequence import stages_of
from toolkit.workflows.verify import deployed_folders


@pytest.fixture
def config(tiny_pair: tuple[Path, Path], tmp_path: Path) -> DeploymentConfig:
    return load_config(write_config(tmp_path, tiny_pair))


def pair_key(config: DeploymentConfig, workplace: Workplace) -> str:
    stage = stages_of(config, workplace, Store(workplace.store).memo)[0]
    return key_of(stage, stage.parts({}))


def flat(value: object, prefix: str = "") -> list[str]:
    if isinstance(value, dict) and value:
        return [name for key, inner in value.items() for name in flat(inner, f"{prefix}.{key}")]
    return [prefix.lstrip(".")]


@pytest.mark.slow
def test_the_parts_of_every_key_are_the_reviewed_ones(
    config: DeploymentConfig, tmp_path: Path, golden: Callable[[str, str], None]
) -> None:
    """A key that gains a part rebuilds everybody's results, and a key that loses one reuses wrong
    results. Either has to be a decision, so the parts are in a golden file.
    """
    workplace, lines = Workplace(tmp_path), list[str]()
    store = Store(workplace.store)
    built = build(config, workplace, Silent(), store, until="package")
    for stage in stages_of(config, workplace, store.memo):
        parts = stage.parts(built.stages)
        lines += [
            f"{stage.name} (version {stage.version})",
            *(f"  {name}" for name in sorted(flat(dict(parts)))),
        ]
    golden("key-parts.txt", "\n".join(lines) + "\n")


def test_a_key_does_not_depend_on_where_things_lie(
    config: DeploymentConfig, tiny_pair: tuple[Path, Path], tmp_path: Path
) -> None:
    moved = tmp_path / "elsewhere"
    for source in tiny_pair:
        shutil.copytree(source, moved / source.name)
    other = load_config(
        write_config(moved, (moved / tiny_pair[0].name, moved / tiny_pair[1].name), name="other")
    )
    assert pair_key(config, Workplace(tmp_path)) == pair_key(other, Workplace(moved))
    tokenizer = moved / tiny_pair[1].name / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text() + " ")
    assert pair_key(config, Workplace(tmp_path)) != pair_key(other, Workplace(moved))


@pytest.mark.slow
def test_where_the_server_listens_is_no_part_of_the_package(
    config: DeploymentConfig, tmp_path: Path
) -> None:
    workplace = Workplace(tmp_path)
    store = Store(workplace.store)
    first = build(config, workplace, Silent(), store, until="package")
    assert first.changed
    moved = config.model_copy(
        update={"triton": config.triton.model_copy(update={"http_port": 8000, "host": "0.0.0.0"})}
    )
    second = build(moved, workplace, Silent(), store, until="package")
    assert not second.changed
    assert [path.relative_to(tmp_path).as_posix() for path in second.published] == [
        "engines/tiny",
        "triton_repo/tiny",
    ]
    other = config.model_copy(
        update={"triton": config.triton.model_copy(update={"max_queue_size": 7})}
    )
    reasons = [
        explanation.reasons
        for explanation in explain_build(other, workplace, store)
        if explanation.stage == "package"
    ]
    assert reasons == [("config.triton.max_queue_size: 256 -> 7",)]


def folders_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir() if path.is_dir()}


@pytest.mark.slow
def test_switching_speculation_off_drops_the_draft_from_what_is_published(
    config: DeploymentConfig, tiny_pair: tuple[Path, Path], tmp_path: Path
) -> None:
    workplace = Workplace(tmp_path)
    store = Store(workplace.store)
    build(config, workplace, Silent(), store, until="compile")
    assert folders_in(tmp_path / "engines" / "tiny") == {"target", "draft"}
    alone = load_config(write_config(tmp_path, tiny_pair, draft=None, speculation={"kind": "none"}))
    build(alone, workplace, Silent(), store, until="package")
    assert folders_in(tmp_path / "engines" / "tiny") == {"target"}
    for folder in deployed_folders(alone, workplace):
        assert verify(folder, lambda done, total, what: None).is_whole
    before = build(config, workplace, Silent(), store, until="compile")
    # The repository has no draft, and the new engines have one.
    assert before.outdated == (workplace.repository("tiny"),)
    again = build(alone, workplace, Silent(), store, until="compile")
    assert again.outdated == () and again.changed
    # This build replaces no engines.
    assert build(config, workplace, Silent(), store, until="quantize").outdated == ()


def test_a_bad_line_in_the_prompts_is_found_before_anything_runs(
    config: DeploymentConfig, tmp_path: Path
) -> None:
    config.validation.prompts.write_text('{"prompt": "x"}\nnonsense\n')
    with pytest.raises(UsageError, match=r"prompts\.jsonl:2"):
        build(config, Workplace(tmp_path), Silent(), Store(tmp_path / "store"))
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize("until", ["quantize", "compile", "validate"])
def test_a_prompt_that_no_engine_would_take_is_found_before_the_long_work(
    config: DeploymentConfig, tmp_path: Path, until: str
) -> None:
    earlier = {"compile": "quantize", "validate": "package"}
    if until in earlier:  # these stages ran when the prompts were shorter
        store = Store(tmp_path / "store")
        build(config, Workplace(tmp_path), Silent(), store, until=earlier[until])
    config.validation.prompts.write_text(
        '{"prompt": "x"}\n' + json.dumps({"prompt": "y" * 80}) + "\n"
    )
    observer = Silent()
    with pytest.raises(
        UsageError,
        match=r"prompts\.jsonl: prompt 2 has 81 tokens, and engine\.max_input_len is 64: 'yyy",
    ):
        build(config, Workplace(tmp_path), observer, Store(tmp_path / "store"), until=until)
    assert not any(line.startswith(until) for line in observer.lines)


def test_a_checkpoint_with_a_link_to_nowhere_is_a_checkpoint_error(
    config: DeploymentConfig, tiny_pair: tuple[Path, Path], tmp_path: Path
) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(tiny_pair[0], broken)
    (broken / "model.safetensors").unlink()
    (broken / "model.safetensors").symlink_to(tmp_path / "nowhere")
    unreadable = load_config(write_config(tmp_path, (broken, tiny_pair[1])))
    with pytest.raises(
        CheckpointError,
        match=r"model\.safetensors: cannot be read: .*\n  It is a link to .*nowhere",
    ):
        build(unreadable, Workplace(tmp_path), Silent(), Store(tmp_path / "store"))


def test_a_recorded_digest_is_compared_even_when_everything_is_stored(
    config: DeploymentConfig, tiny_pair: tuple[Path, Path], tmp_path: Path
) -> None:
    """Otherwise somebody who doubts a checkpoint and adds its SHA256SUMS would be told that nothing
    has changed.
    """
    copy = shutil.copytree(tiny_pair[0], tmp_path / "copy")
    again = load_config(write_config(tmp_path, (copy, tiny_pair[1])))
    workplace, store = Workplace(tmp_path), Store(tmp_path / "store")
    build(again, workplace, Silent(), store, until="pair")
    (copy / "SHA256SUMS").write_text(f"{'0' * 64}  model.safetensors\n")
    with pytest.raises(CheckpointError, match="was recorded"):
        build(again, workplace, Silent(), store, until="pair")


def test_what_cannot_work_is_refused_before_anything_runs(
    tiny_pair: tuple[Path, Path], tmp_path: Path
) -> None:
    config = load_config(
        write_config(tmp_path, tiny_pair, engine={"max_input_len": 64, "max_seq_len": 10**6})
    )
    with pytest.raises(PlanError, match=r"length-within-model"):
        build(config, Workplace(tmp_path), Silent(), Store(tmp_path / "store"))
    assert not (tmp_path / "store").exists()


def test_other_stages_can_be_injected(config: DeploymentConfig, tmp_path: Path) -> None:
    observer = Silent()
    built = build(
        config,
        Workplace(tmp_path),
        observer,
        Store(tmp_path / "store"),
        until="upper",
        stages=small_stages("a"),
    )
    assert observer.lines == ["words built", "upper/target built"]
    assert built.report is None


TRTLLM = {"tensorrt_llm": "1.2.1", "max_batch_size": 2, "max_input_len": 64, "max_seq_len": 128}


@pytest.mark.parametrize("kind", ["trt_engine", "trtllm_pytorch"])
def test_what_this_machine_cannot_serve_is_refused_before_anything_runs(
    tiny_pair: tuple[Path, Path], tmp_path: Path, kind: str
) -> None:
    config = load_config(write_config(tmp_path, tiny_pair, engine={"kind": kind, **TRTLLM}))
    nothing = Machine(gpus=list, which=lambda name: None, tensorrt_llm=lambda: None)
    with pytest.raises(
        UsageError,
        match=f"engine.kind {kind} cannot be served and judged here: it needs tritonserver",
    ):
        build(config, Workplace(tmp_path), Silent(), Store(tmp_path / "store"), here=nothing)
    assert not (tmp_path / "store").exists()


@pytest.mark.slow
def test_the_pytorch_flow_is_built_as_far_as_its_repository(
    tiny_pair: tuple[Path, Path], tmp_path: Path
) -> None:
    config = load_config(
        write_config(tmp_path, tiny_pair, engine={"kind": "trtllm_pytorch", **TRTLLM})
    )
    by_batch = config.speculation.model_copy(update={"draft_len_schedule": {1: 2, 2: 1}})
    config = config.model_copy(update={"speculation": by_batch})
    workplace, store = Workplace(tmp_path), Store(tmp_path / "store")
    built = build(config, workplace, Silent(), store, until="package")
    repository = workplace.repository("tiny")
    settings = yaml.safe_load((repository / "tensorrt_llm/1/model.yaml").read_text())
    assert settings["model"] == "/models/tensorrt_llm/1/engines/target"
    assert (
        settings["speculative_config"]["speculative_model"]
        == "/models/tensorrt_llm/1/engines/draft"
    )
    assert settings["speculative_config"]["draft_len_schedule"] == {1: 2, 2: 1}
    planned = {run.place: run for run in plan_of(config).runs}
    assert planned["the server's Python model"].arguments is not None
    call = dict(planned["the server's Python model"].arguments)
    # LLM() of this version takes an object, which the plan shows as it is made.
    made = repr(call.pop("speculative_config"))
    assert f"from_dict({settings.pop('speculative_config')})" in made
    arguments = {
        name: value for name, value in settings.items() if name not in ("triton_config", "toolkit")
    }
    assert call == arguments
    launched = planned["launch.sh, in the container"].command
    assert launched is not None and shlex.join(launched) in (repository / "launch.sh").read_text()
    assert (repository / "tensorrt_llm/1/engines/draft/model.safetensors").is_file()
    assert "tritonserver:26.07-trtllm-python-py3" in (repository / "docker-run.sh").read_text()
    target = workplace.engines("tiny") / "target"
    args = json.loads((target / "llm_args.json").read_text())
    assert (
        target / args["speculative_config"]["speculative_model"]
    ).resolve() == workplace.engines("tiny") / "draft"
    assert json.loads((target / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]
    record = built.stages["compile/target"].record
    assert record.tensorrt_llm.executed == ()
    assert record.tensorrt_llm.not_executed
    assert not build(config, workplace, Silent(), store, until="compile").changed
    explanations = explain_build(config, workplace, store)
    reused = [explanation.stage for explanation in explanations if explanation.reused]
    assert reused == list(built.stages)


def _compile_key(config: DeploymentConfig, folder: Path) -> str:
    stages = stages_of(config, Workplace(folder), Store(folder).memo)
    stage = next(stage for stage in stages if stage.name == "compile/target")
    checkpoint = SimpleNamespace(entry=SimpleNamespace(digest="sha256:0"))
    return key_of(stage, stage.parts({"quantize/target": checkpoint, "quantize/draft": checkpoint}))  # type: ignore[dict-item]


def test_a_draft_length_by_batch_size_is_a_part_of_the_engine(
    tiny_pair: tuple[Path, Path], tmp_path: Path
) -> None:
    config = load_config(
        write_config(tmp_path, tiny_pair, engine={"kind": "trtllm_pytorch", **TRTLLM})
    )
    other = config.speculation.model_copy(update={"draft_len_schedule": {1: 2, 2: 1}})
    keys = [
        _compile_key(variant, tmp_path)
        for variant in (config, config.model_copy(update={"speculation": other}))
    ]
    assert keys[0] != keys[1]


def test_the_ngram_s_size_is_a_part_of_the_engine_that_looks_text_up(
    tiny_pair: tuple[Path, Path], tmp_path: Path
) -> None:
    def changed(kind: str) -> bool:
        draft = {} if kind == "draft_target" else {"draft": None}
        keys = []
        for size in (2, 3):
            speculation = {"kind": kind, "max_draft_len": 2, "max_matching_ngram_size": size}
            sections = {
                "engine": {"kind": "trtllm_pytorch", **TRTLLM},
                "speculation": speculation,
                **draft,
            }
            keys.append(
                _compile_key(load_config(write_config(tmp_path, tiny_pair, **sections)), tmp_path)
            )
        return keys[0] != keys[1]

    assert changed("ngram")
    assert not changed("draft_target")


@pytest.mark.parametrize(
    ("kind", "setting", "rebuilds"),
    [
        ("trt_engine", {"builder": "container"}, False),
        ("trt_engine", {"free_gpu_memory_fraction": 0.5}, False),
        ("trt_engine", {"tensorrt_llm": "1.1"}, True),
        ("trt_engine", {"tp_size": 2}, True),
        ("trt_engine", {"max_num_tokens": 4096}, True),
        ("trtllm_pytorch", {"free_gpu_memory_fraction": 0.5}, True),
        ("trtllm_pytorch", {"cuda_graph": False}, True),
    ],
)
def test_only_what_decides_an_engine_rebuilds_it(
    tiny_pair: tuple[Path, Path],
    tmp_path: Path,
    kind: str,
    setting: dict[str, object],
    rebuilds: bool,
) -> None:
    keys = []
    for engine in ({"kind": kind, **TRTLLM}, {"kind": kind, **TRTLLM, **setting}):
        keys.append(
            _compile_key(load_config(write_config(tmp_path, tiny_pair, engine=engine)), tmp_path)
        )
    assert (keys[0] != keys[1]) == rebuilds


def test_a_missing_builder_is_found_before_anything_is_quantized(
    tiny_pair: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load_config(write_config(tmp_path, tiny_pair, engine={"kind": "trt_engine", **TRTLLM}))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BackendUnavailable, match=r"tensorrt-llm/release:1\.2\.1"):
        build(config, Workplace(tmp_path), Silent(), Store(tmp_path / "store"), until="compile")
    assert not list((tmp_path / "store").glob("quantize/*"))


@pytest.mark.slow
def test_the_engine_flow_is_built_from_checkpoint_to_repository(
    tiny_pair: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stand-in for trtllm-build is on the PATH; everything else is real. There are two ranks."""
    place = place_with_builder(tmp_path / "bin")
    monkeypatch.setenv("PATH", place.environment["PATH"])
    config = load_config(
        write_config(tmp_path, tiny_pair, engine={"kind": "trt_engine", "tp_size": 2, **TRTLLM})
    )
    workplace, store = Workplace(tmp_path), Store(tmp_path / "store")
    built = build(config, workplace, Silent(), store, until="package")
    for role, mode in (("target", 2), ("draft", 1)):
        folder = workplace.engines("tiny") / role
        recorded = json.loads((folder / "config.json").read_text())
        assert recorded["build_config"]["speculative_decoding_mode"] == mode
        assert recorded["pretrained_config"]["vocab_size"] == built.stages["pair"].record.vocab_size
        assert {file.name for file in folder.glob("rank*")} == {"rank0.engine", "rank1.engine"}
        assert (folder / "tokenizer.json").is_file()
    assert set(built.not_executed) == {"compile/target", "compile/draft"}
    repository = workplace.repository("tiny")
    models = {
        "preprocessing",
        "tensorrt_llm",
        "tensorrt_llm_draft",
        "postprocessing",
        "tensorrt_llm_bls",
    }
    assert models <= {file.parent.name for file in repository.glob("*/config.pbtxt")}
    assert 'backend: "tensorrtllm"' in (repository / "tensorrt_llm" / "config.pbtxt").read_text()
    assert len(list(repository.glob("tensorrt_llm*/1/**/rank*.engine"))) == 4
    monkeypatch.setenv("PATH", str(tmp_path))  # stored engines need no builder
    assert not build(config, workplace, Silent(), store, until="package").changed


def test_the_part_of_vllm_holds_no_path_and_reads_a_schedule_in_any_order() -> None:
    settings = VllmSpec("0.32.0", python=Path("/env/python"), draft_dir=Path("/draft"))
    spec = EngineSpec("target", 4, 128, 256, 3, vllm=settings)
    parts = spec_parts(replace(spec, vllm=replace(settings, draft_len_schedule={8: 0, 1: 3})))
    assert parts == spec_parts(
        replace(
            spec,
            vllm=VllmSpec("0.32.0", draft_len_schedule={1: 3, 8: 0}, draft_dir=Path("/moved")),
        )
    )
    assert parts["vllm"]["draft_len_schedule"] == [[1, 3], [8, 0]]
    assert "tensorrt_llm" not in parts and "vllm" not in spec_parts(replace(spec, vllm=None))
    assert parts != spec_parts(spec)
