"""The plan of a deployment whose draft is a head: its size, its cost, and which kinds run it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

from safetensors import safe_open

from tests.support.deployments import config_of
from tests.support.eagle3 import head_config, head_tensors, write_eagle3_target, write_head
from toolkit.facts.capabilities import MAKERS, capabilities_of
from toolkit.facts.support import HEAD_KINDS, HEAD_NAMES, NO_HEADS
from toolkit.plan.make import make_plan, subject_of
from toolkit.plan.memory import parameters, weight_bytes
from toolkit.plan.resolve import resolve
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
