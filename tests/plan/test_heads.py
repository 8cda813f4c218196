"""The plan of a deployment whose draft is a head: its size, its cost, and which kinds run it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, get_args

import pytest
from safetensors import safe_open

from tests.support.deployments import HEAD, config_of
from tests.support.eagle3 import head_config, write_eagle3_target, write_head
from toolkit.errors import CheckpointError
from toolkit.facts.capabilities import MAKERS, capabilities_of
from toolkit.facts.heads import HEAD_KINDS, HEAD_NAMES, NO_HEADS, NO_MTP, PUBLISHED, mtp_config
from toolkit.facts.versions import VERSIONS
from toolkit.plan.make import captured_by_head, make_plan, subject_of
from toolkit.plan.memory import parameters, weight_bytes
from toolkit.plan.predict import tokens_per_step
from toolkit.plan.resolve import resolve
from toolkit.records.plan import Judgement
from toolkit.standins.heads import head_tensors
from toolkit.words import EngineKind, Head


def with_head(tmp_path: Path, **changes: Any) -> dict[str, Any]:
    config = head_config(**changes)
    head = write_head(tmp_path / "head", config=config, tensors=head_tensors(config, range(200)))
    return {
        "target__checkpoint": write_eagle3_target(tmp_path / "target"),
        "draft__checkpoint": head,
        "draft__quantization": None,
        "target__quantization": None,
        "engine": {"kind": "vllm", "device": "cpu", "max_input_len": 64, "max_seq_len": 128},
        "speculation__kind": "eagle3",
    }


def test_the_tables_agree_on_who_runs_a_head() -> None:
    assert set(HEAD_KINDS) == set(HEAD_NAMES) == set(get_args(Head))
    for kind in get_args(EngineKind):
        version = {"trt_engine": "1.2.1", "trtllm_pytorch": "1.2.1", "vllm": "0.32.0"}.get(kind)
        heads = capabilities_of(kind, version, "auto", reuses_prefixes=False).heads
        assert heads == tuple(head for head in HEAD_KINDS if kind in HEAD_KINDS[head])
        assert (kind in NO_HEADS) == (not heads)
        assert (kind in NO_MTP) == (kind != "trtllm_pytorch")
    assert set(MAKERS) == set(get_args(EngineKind))


def test_a_head_is_counted_by_the_tensors_of_its_files(tmp_path: Path) -> None:
    keys = with_head(tmp_path, draft_vocab_size=200)
    shape = subject_of(config_of("vllm_cpu", **keys))[0].shapes["draft"]
    with safe_open(tmp_path / "head" / "model.safetensors", framework="np") as file:
        sizes = {name: file.get_tensor(name).size for name in file.keys()}  # noqa: SIM118
    stored = sum(size for name, size in sizes.items() if name not in ("d2t", "t2d"))
    hidden_norm = 64  # a decoder layer has no such norm; those of a layer are counted
    assert parameters(shape) == stored - hidden_norm
    assert weight_bytes(shape, "NO_QUANT") == 2 * (stored - hidden_norm - 64)


def test_a_deployment_with_a_head_is_planned(tmp_path: Path) -> None:
    plan = make_plan(config_of("vllm_cpu", **with_head(tmp_path, draft_vocab_size=200)))
    assert plan.possible, plan.judgements
    assert not {"toolkit-heads", "same-vocab"} & {judged.rule for judged in plan.judgements}
    assert plan.predictions
    (serve,) = [stage for stage in plan.memory if stage.stage == "serve"]
    assert any(item.name.startswith("draft weights") for item in serve.items)


def test_a_head_stands_beside_a_target_with_a_quantized_kv_cache(tmp_path: Path) -> None:
    """A head's own section states no precision, so it cannot be asked to state the target's."""
    fp8 = {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}
    keys = {**with_head(tmp_path, draft_vocab_size=200), "target__quantization": fp8}
    keys["engine"] = {**keys["engine"], "device": "auto"}
    judgements = resolve(subject_of(config_of("vllm", **keys))[0])
    (judged,) = [judged for judged in judgements if judged.rule == "vllm-one-kv-dtype"]
    assert judged.severity == "adjusted"


def test_the_length_of_a_head_s_drafts_is_not_measured(tmp_path: Path) -> None:
    keys = {**with_head(tmp_path, draft_vocab_size=200), "speculation__max_draft_len": "auto"}
    judgements = resolve(subject_of(config_of("vllm_cpu", **keys))[0])
    (judgement,) = [judged for judged in judgements if judged.rule == "toolkit-heads"]
    assert (judgement.severity, judgement.hint) == ("refused", "set a number")
    assert "cannot run an EAGLE-3 head" in judgement.what


def judged(kind: str = "pytorch", **keys: Any) -> dict[str, Judgement]:
    """Rule -> its judgement, of the Llama pair with NVIDIA's head unless keys say otherwise."""
    subject, unread = subject_of(config_of(kind, **{**HEAD, **keys}))
    return {judgement.rule: judgement for judgement in (*resolve(subject), *unread)}


def refused(rule: str, kind: str = "pytorch", **keys: Any) -> tuple[str, str]:
    judgement = judged(kind, **keys)[rule]
    assert judgement.severity == "refused" and judgement.hint is not None
    return judgement.what, judgement.hint


def test_a_head_in_the_pytorch_flow_is_planned() -> None:
    """Its one layer, projections and LM head are read for each draft, in 16 bits beside FP8."""
    config = config_of("pytorch", **HEAD)
    plan = make_plan(config)
    assert plan.possible, plan.judgements
    assert captured_by_head(config) == (2, 40, 77)
    (serve,) = [stage for stage in plan.memory if stage.stage == "serve"]
    sizes = {item.name: item.num_bytes for item in serve.items}
    layer = 8192 * 128 * (2 * 64 + 2 * 8) + 3 * 8192 * 28672 + 2 * 8192
    wider = 8192 * (3 * 8192 + 128 * (64 + 2 * 8))
    assert sizes["draft weights"] == 2 * (layer + wider + 128256 * 8192)
    assert sizes["captured states"] == 8192 * 3 * 8192 * 2
    per_token = sizes["KV cache of the target"] // sizes["KV cache of the draft"]
    assert per_token == 80  # layers: both caches are FP8
    assert {"head-kv-cache", "no-log-probs"} <= {j.rule for j in plan.judgements}
    assert not {"draft-target-overlap", "same-vocab"} & {j.rule for j in plan.judgements}


def test_the_acceptance_of_a_head_is_an_assumption_with_its_source() -> None:
    one, full = make_plan(config_of("pytorch", **HEAD)).predictions
    for prediction in (one, full):
        assert prediction.assumed is not None and prediction.assumption is not None
        assert "issue 26191" in prediction.assumption
        assert 1.5 < prediction.assumed.speedup < 4.0
    assert one.assumed is not None
    published = PUBLISHED["eagle3"]
    rate = one.assumed.acceptance_rate
    assert abs(tokens_per_step(rate, published.draft_len) - published.tokens) < 1e-6
    of_a_draft = make_plan(config_of("pytorch")).predictions
    assert [prediction.assumed for prediction in of_a_draft] == [None, None]


def test_a_model_in_the_place_of_a_head_is_no_head() -> None:
    keys = {**HEAD, "draft__checkpoint": "meta-llama/Llama-3.2-1B-Instruct"}
    with pytest.raises(CheckpointError, match=r"set speculation\.kind: draft_target"):
        make_plan(config_of("pytorch", **keys))


def test_a_kind_of_engine_without_heads_names_those_that_have_them() -> None:
    what, hint = refused("toolkit-heads", "engine")
    assert "from a second engine" in what
    assert "trtllm_pytorch or vllm" in hint


@pytest.mark.parametrize("version", ["1.0", "1.1"])
def test_versions_that_answer_greedily_name_those_that_sample(version: str) -> None:
    what, hint = refused("toolkit-heads", engine__tensorrt_llm=version)
    assert f"TensorRT-LLM {version} answers every request" in what
    assert hint.endswith("versions that sample: 1.2.0, 1.2.1, 1.3rc-early, 1.3rc-late, 1.4rc")


def test_targets_that_are_no_one_model_with_a_head_are_refused() -> None:
    for target, family in (
        ("Qwen/Qwen2.5-72B-Instruct", "Qwen 2 / 2.5"),
        ("mistralai/Mistral-Large-Instruct-2407", "Mistral"),
    ):
        what, _ = refused("head-target", target__checkpoint=target)
        assert what.endswith(f"with a {family} target")
    assert "head-target" not in judged(target__checkpoint="Qwen/Qwen3-32B")


def test_draft_lengths_by_load_are_refused_where_a_head_would_not_follow() -> None:
    keys = {
        "draft_len_schedule": {"speculation__draft_len_schedule": {1: 4, 3: 2}},
        "max_concurrency": {"speculation__max_concurrency": 2},
    }
    for name, setting in keys.items():
        what, hint = refused("head-load", **setting)
        assert "would ignore it with an EAGLE-3 head" in what and name in what
        assert hint == "remove it; versions that apply it: 1.3rc-late, 1.4rc"
        assert "head-load" not in judged(engine__tensorrt_llm="1.4rc", **setting)
        assert "draft-len-schedule" not in judged(**setting)


def test_a_head_over_pipeline_ranks_is_refused() -> None:
    what, _ = refused("no-pp-with-draft-target", engine__pp_size=2, hardware__count=2)
    assert what == "a head over several pipeline ranks is documented nowhere"


def test_a_head_has_to_reach_as_far_as_the_target(tmp_path: Path) -> None:
    keys = with_head(tmp_path, draft_vocab_size=200)
    keys["engine"] = {"kind": "trtllm_pytorch", "max_input_len": 200, "max_seq_len": 1100}
    keys["target__checkpoint"] = "meta-llama/Llama-3.3-70B-Instruct"
    what, _ = refused("draft-seq-len", **keys)
    assert what.startswith("max_seq_len 1100 is beyond the draft's 1024 positions")


MTP = {"draft": None, "speculation__kind": "mtp"}


def without_draft(kind: str, **keys: Any) -> dict[str, Judgement]:
    subject, unread = subject_of(config_of(kind, **{**MTP, **keys}))
    return {judgement.rule: judgement for judgement in (*resolve(subject), *unread)}


def test_a_target_without_mtp_layers_is_refused() -> None:
    judgement = without_draft("pytorch")["mtp-layers"]
    assert judgement.severity == "refused"
    assert judgement.what.startswith("a Llama 3 target has no MTP layers")
    for kind in ("torch", "engine", "vllm"):
        judgement = without_draft(kind)["mtp-layers"]
        assert judgement.what.endswith(NO_MTP[config_of(kind).engine.kind])


@pytest.mark.parametrize("version", [name for name, row in VERSIONS.items() if row.pytorch_flow])
def test_a_target_with_mtp_layers_is_refused_with_what_is_possible(
    version: str, tmp_path: Path
) -> None:
    """The toolkit reads no family that has them: it says how TensorRT-LLM itself drafts so."""
    config = {"architectures": ["DeepseekV3ForCausalLM"], "num_nextn_predict_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps(config))
    judgement = without_draft("pytorch", target__checkpoint=tmp_path, engine__tensorrt_llm=version)[
        "mtp-layers"
    ]
    assert judgement.severity == "refused" and judgement.hint is not None
    assert "DeepseekV3ForCausalLM has 1 MTP layer, and the toolkit does not read" in judgement.what
    assert json.dumps(mtp_config(version, 4)) in judgement.hint
    assert not make_plan(
        config_of("pytorch", target__checkpoint=tmp_path, engine__tensorrt_llm=version, **MTP)
    ).possible


def test_another_unread_target_has_no_mtp_layers(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["GemmaForCausalLM"]}')
    judgement = without_draft("pytorch", target__checkpoint=tmp_path)["mtp-layers"]
    assert judgement.what.startswith("GemmaForCausalLM has no MTP layers")
